"""The sources of the properties: a decorator that makes a test of each row and counts it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

PEERS = {  # the folder of the tests, and the commit they were read at
    "Megatron-LM": ("NVIDIA/Megatron-LM", "tests/unit_tests", "d98e8a6"),
    "nanotron": ("huggingface/nanotron", "tests", "2411b02"),
    "torchtitan": ("pytorch/torchtitan", "tests/unit_tests", "b5bcd76"),
    "DeepSpeed": ("microsoft/DeepSpeed", "tests/unit", "38327e0"),
    "torch": ("pytorch/pytorch", "torch", "v2.13.0"),
}

AREAS = (
    "ranks of an axis",
    "layers of a stage",
    "pipeline schedules",
    "tensor-parallel collectives and linears",
    "layers and attention",
    "packed documents",
    "loss",
    "router and experts",
    "learning rate",
    "batch size",
    "loss scale",
    "gradient norm and clipping",
    "optimizers",
    "data",
    "checkpoints",
    "precision, recomputation, flags",
)


@dataclass(frozen=True)
class Property:
    """What one test of a peer states, or one of its statements.

    Attributes:
        area: a row of the table.
        peer: a key of `PEERS`.
        source: the file in the peer's folder, and the test.
        test: the test here.
    """

    area: str
    peer: str
    source: str
    test: str


FOUND: list[Property] = []


def states(area: str, peer: str, file: str, *names: str, **rows: Any) -> Callable[[Callable], Callable]:
    """Count the properties that the decorated test holds.

    Args:
        area: the row of the table.
        peer: whose they are, read at the commit of `PEERS` or at another, as in `nanotron@be8ad7b`.
        file: the peer's file; "" if each name has its own, as `file: test`.
        names: the peer's tests. If `peer` is "", each begins with its peer, as `DeepSpeed: file: test`.
        rows: `table={name: arguments}` makes a test of each row, which gets the arguments of its row.
    """
    table: Mapping[str, Any] = rows.pop("table", {})
    if rows or area not in AREAS:
        raise TypeError(f"unknown {[*rows, area]}")

    def count(test: Callable) -> Callable:
        for name in (*names, *table):
            whose, _, source = f"{peer}: {file}: {name}".replace(": : ", ": ").removeprefix(": ").partition(": ")
            PEERS[whose.partition("@")[0]]  # it is one of them
            FOUND.append(Property(area, whose, source, test.__name__))
        if not table:
            return test

        def each(row: str, **fixtures: Any) -> None:
            test(*arguments(table[row]), **fixtures)

        taken = len(arguments(next(iter(table.values()))))
        row = inspect.Parameter("row", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        fixtures = list(inspect.signature(test).parameters.values())[taken:]
        each.__name__, each.__doc__, each.__module__ = test.__name__, test.__doc__, test.__module__
        each.pytestmark = [*getattr(test, "pytestmark", ())]  # type: ignore[attr-defined]
        each.__signature__ = inspect.Signature([row, *fixtures])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("row", table)(each)

    return count


def arguments(row: Any) -> tuple:
    """The arguments of a row: a tuple of them, or the only one."""
    return row if isinstance(row, tuple) else (row,)
