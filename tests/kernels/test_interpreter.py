"""Runs the numeric tests of the kernels, `interpret/`, in two processes in which Triton interprets."""

import pytest
from interpreters import Interpreters


def test_kernels_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    failed, said = pytestconfig.stash[Interpreters.KEY].wait()
    assert not failed, said
