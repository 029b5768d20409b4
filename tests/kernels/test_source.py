"""Laws on the source of the kernels: examples run, files and signatures stay short, one file names private torch."""

import ast
import doctest
import re
import sys

import api_table
import pytest

FILES = sorted(api_table.KERNELS.rglob("*.py"))
EXAMPLES = [
    pytest.param(test, id=test.name)
    for _, function in api_table.functions()
    for test in doctest.DocTestFinder().find(function, function.__name__, globs=vars(sys.modules[function.__module__]))
    if test.examples
]


@pytest.mark.parametrize("test", EXAMPLES)
def test_an_example_prints_what_it_says(test):
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_short_and_more_than_ten_parameters_say_why(path):
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            many = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) > 10
            assert not many or "parameters" in (ast.get_docstring(node) or ""), f"{path.name}: {node.name}"


def test_one_file_names_what_is_private_in_torch():
    private = re.compile(r"(from|import) torch[a-z_.]*\._|torch\._[a-zA-Z]")
    assert [path.name for path in FILES if private.search(path.read_text())] == ["_torch.py"]
