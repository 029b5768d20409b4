"""Properties of the unit tests of Megatron-LM, nanotron, torchtitan, DeepSpeed and torch, with their concrete values.

A row has the name of the peer's test; docs/records/2026-11-28_peers_tests.md has the sources by area.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest


def rows(table: Mapping[str, Any]) -> Callable[[Callable], Callable]:
    """Make a test of each row, which gets the arguments of its row: a tuple of them, or the only one."""

    def decorate(test: Callable) -> Callable:
        arguments = {name: row if isinstance(row, tuple) else (row,) for name, row in table.items()}
        taken = len(next(iter(arguments.values())))
        names = [*inspect.signature(test).parameters][:taken]
        return pytest.mark.parametrize(names, arguments.values(), ids=table)(test)

    return decorate
