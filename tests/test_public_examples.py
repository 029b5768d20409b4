"""Every public name has an example in its docstring, and the example prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest
import torch

import mpcore
import mpcore.layers.attention
import mpcore.layers.moe

ROOT = Path(__file__).parent.parent
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


def test_every_other_example_of_a_docstring_runs():
    for found in pkgutil.walk_packages(mpcore.__path__, "mpcore."):
        if not found.name.endswith(("__main__", "preloaded")):  # the latter freezes what the process holds
            module = importlib.import_module(found.name)
            names = {**vars(module), "mpcore": mpcore, "torch": torch, "nn": torch.nn}
            public = {each.__name__ for _, each in PUBLIC.values() if each.__module__ == found.name}
            for test in doctest.DocTestFinder().find(module, globs=names):
                if test.name.removeprefix(f"{found.name}.") not in public:
                    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0, test.name
