"""Every public name has an example in its docstring, and the example prints what it says."""

from __future__ import annotations

import ast
import doctest
import sys
from pathlib import Path

import pytest
import torch

import mpcore
import mpcore.layers.attention
import mpcore.layers.moe

NAMES = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (mpcore, mpcore.layers, mpcore.layers.attention, mpcore.layers.moe)
    for name in package.__all__
}
PUBLIC = {id(value): (name, value) for name, value in NAMES.items()}  # a name in two packages counts once


def example(value: object) -> doctest.DocTest:
    """The docstring of one public name, with what a reader has imported."""
    names = {**vars(sys.modules[value.__module__]), "mpcore": mpcore, "torch": torch, "nn": torch.nn}
    (test,) = doctest.DocTestFinder(recurse=False, exclude_empty=False).find(value, globs=names)
    return test


@pytest.mark.parametrize(("name", "value"), PUBLIC.values(), ids=[name for name, _ in PUBLIC.values()])
def test_a_public_name_has_an_example_that_runs(name, value):
    test = example(value)
    assert test.examples, "add an example"
    with torch.random.fork_rng():
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


@pytest.mark.parametrize("path", sorted(Path(mpcore.layers.__path__[0]).rglob("*.py")), ids=lambda path: path.name)
def test_a_layer_with_more_than_ten_parameters_says_why(path):
    tree = ast.parse(path.read_text())
    for owner in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
        for function in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            count = len(function.args.args + function.args.kwonlyargs) - isinstance(owner, ast.ClassDef)  # less self
            said = ast.get_docstring(function) or ast.get_docstring(owner) or ""
            assert count <= 10 or "parameters" in said, f"{path.name}: {function.name} of {count}"
