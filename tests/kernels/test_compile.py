"""Every kernel compiles for every target, spills nothing, and costs what `golden_compile.json` says."""

import inspect
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import api_table
import compile_table
import pytest
import triton

GOLDEN = json.loads(compile_table.GOLDEN.read_text())


def is_slow(target: str, case: str) -> bool:
    """`make test` compiles every case for sm_90; for the other targets, the first case of each function."""
    first = {case.split()[0]: case for case in reversed(compile_table.cases_of(target))}
    return case in compile_table.SLOW or (target != "sm_90" and case not in first.values())


CASES = [
    pytest.param(target, case, marks=pytest.mark.slow if is_slow(target, case) else ())
    for target in compile_table.TARGETS
    for case in compile_table.cases_of(target)
]


@pytest.fixture(scope="module")
def compiled(request):
    """Compiles a case, unless another process has it already, which begins at the other end."""
    name = test_compiles_to_the_golden_facts.__name__
    cases = [tuple(item.callspec.params.values()) for item in request.session.items if item.originalname == name]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        found = {case: other.submit(compile_table.compile_case, *case) for case in reversed(cases)}
        yield lambda *case: compile_table.compile_case(*case) if found[case].cancel() else found[case].result()
        other.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("target", "case"), CASES)
def test_compiles_to_the_golden_facts(compiled, target, case):
    kernels = compiled(target, case)
    assert {name for name, facts in kernels.items() if facts["spills"]} <= compile_table.SPILLS.get(
        (target, case), set()
    )
    for name, facts in kernels.items() if target.startswith("sm_") else ():
        compile_table.check(target, case, name, facts)
    if triton.__version__ == GOLDEN["triton"]:  # another compiler allocates other registers
        assert kernels == GOLDEN["targets"][target][case], f"regenerate by: python {compile_table.__file__}"


def test_the_table_is_the_golden_file():
    assert compile_table.TABLE.read_text() == compile_table.table(GOLDEN)


def test_the_table_names_every_function_with_a_kernel_and_its_inputs():
    found = {function.__name__: inspect.signature(function).parameters for _, function in api_table.functions()}
    assert found.keys() == api_table.GRADIENTS.keys()
    for name, parameters in found.items():
        assert parameters.keys() >= set(api_table.GRADIENTS[name].split()), name
    assert {module.__name__.rpartition(".")[2] for module, _ in api_table.functions()} == set(api_table.MODULES)


@pytest.mark.parametrize("target", compile_table.TARGETS)
def test_attention_multiplies_on_tensor_cores(target):
    for case, kernels in GOLDEN["targets"][target].items():
        for name, facts in kernels.items():
            on_cores = case.startswith("attention") and name != "rows_kernel" and "fp32" not in case
            assert "matrix" in facts or not on_cores, (case, name)
            assert not facts["spills"] or name in compile_table.SPILLS.get((target, case), ()), (case, name)
