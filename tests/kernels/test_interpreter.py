"""Runs the numeric tests of the kernels, `interpret/`, in a process in which Triton interprets."""

import pytest

from tests.beside import Beside


@pytest.mark.timeout(1800)
def test_kernels_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    """In the whole suite also what else ran beside it."""
    said = pytestconfig.stash[Beside.KEY].wait()
    assert not said, said
