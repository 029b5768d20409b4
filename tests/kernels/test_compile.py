"""Every kernel compiles for every target, spills nothing, and costs what `golden_compile.json` says."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import compile_table
import pytest
import triton

GOLDEN = json.loads(compile_table.GOLDEN.read_text())
CASES = [(target, case) for target in compile_table.TARGETS for case in compile_table.cases_of(target)]


def check(target, case, kernels):
    """Hold a case to the bars, and where the compiler is the recorded one to the recorded facts."""
    assert {name for name, facts in kernels.items() if facts["spills"]} <= compile_table.SPILLS.get(
        (target, case), set()
    )
    for name, facts in kernels.items() if target.startswith("sm_") else ():
        compile_table.check(target, case, name, facts)
    if triton.__version__ == GOLDEN["triton"]:  # another compiler allocates other registers
        assert kernels == GOLDEN["targets"][target][case], f"regenerate by: python {compile_table.__file__}"


@pytest.mark.parametrize(("target", "case"), CASES)
def test_each_case_has_its_recorded_facts(target, case):
    """The facts stand as long as the source does; a case whose source has changed is compiled."""
    recorded = GOLDEN["triton"], GOLDEN["sources"][target].get(case)
    unchanged = recorded == (triton.__version__, compile_table.source_of(target, case))
    check(target, case, GOLDEN["targets"][target][case] if unchanged else compile_table.compile_case(target, case))


@pytest.fixture(scope="module")
def compiled(request):
    """Compiles a case, unless another process has it already, which begins at the other end."""
    name = test_compiles_to_the_golden_facts.__name__
    cases = [tuple(item.callspec.params.values()) for item in request.session.items if item.originalname == name]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        found = {case: other.submit(compile_table.compile_case, *case) for case in reversed(cases)}
        yield lambda *case: compile_table.compile_case(*case) if found[case].cancel() else found[case].result()
        other.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("target", "case"),
    [pytest.param(*each, marks=pytest.mark.slow if each[1] != "column sum" else ()) for each in CASES],
)
def test_compiles_to_the_golden_facts(compiled, target, case):
    check(target, case, compiled(target, case))


@pytest.mark.parametrize("target", compile_table.TARGETS)
def test_attention_multiplies_on_tensor_cores(target):
    for case, kernels in GOLDEN["targets"][target].items():
        for name, facts in kernels.items():
            on_cores = case.startswith("attention ") and name != "rows_kernel" and "fp32" not in case
            assert "matrix" in facts or not on_cores, (case, name)
            assert not facts["spills"] or name in compile_table.SPILLS.get((target, case), ()), (case, name)
