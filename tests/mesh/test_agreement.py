"""Simulated ranks gather and merge values. If they disagree or one fails, each rank gets an error that says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import mpcore as mp
from mpcore.mesh import agreement
from mpcore.mesh.agreement import Agreement, check_same, exchange, gather_objects, name_ranks, raise_together


def test_of_many_ranks_eight_are_named():
    assert name_ranks(None, range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def told(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        return repr(work()), ""
    except ValueError as error:
        return str(error), type(error.__cause__).__name__


def compares(sizes: dict, what: Any, axis: str | None = None) -> tuple[str, str]:
    on = mp.build_mesh(device_type="cpu", **sizes)
    value = what(on.world.rank)
    return told(lambda: check_same("run", value, getattr(on, axis) if axis else None))


def test_the_entries_that_differ_are_shown():
    cases: list[tuple[Any, str | None, list[str]]] = [
        (lambda rank: "a", None, ["None"] * 4),
        (lambda rank: "ab"[rank == 3], None, ["ranks 0 and 3 disagree about the run (run: a and b)"] * 4),
        (lambda rank: "abcd"[rank], "tp", ["ranks 0 and 1 disagree about the run (run: a and b)"] * 2
            + ["ranks 0 and 1 disagree about the run (run: c and d)"] * 2),
        (lambda rank: {"x": 1, "y": rank // 2, "z": [rank // 2]}, "tp", ["None"] * 4),
        (lambda rank: {"x": 1, "y": rank // 2, "z": [rank // 2]}, None,
            ["ranks 0 and 2 disagree about the run (y: 0 and 1; z: [0] and [1])"] * 4),
        (lambda rank: {"b": 1, "a": 2} if rank else {"a": 2, "b": 1}, None, ["None"] * 4),
        (lambda rank: {"b": 1} if rank else {"a": 2}, None,
            ["ranks 0 and 1 disagree about the run (a: 2 and None; b: None and 1)"] * 4),
    ]  # fmt: skip
    for what, axis, want in cases:
        found = mp.simulate(compares, {"tp": 2, "dp": 2}, what, axis, ranks=4)
        assert [text for text, _ in found] == want
    assert check_same("run", "a") is None
    assert check_same("run", {"a": 1}, mp.Axis()) is None


def raises(failing: tuple[int, ...], axis: str | None) -> tuple[str, str]:
    on = mp.build_mesh(device_type="cpu", tp=2)
    error = OSError(f"lost {on.job.rank}") if on.job.rank in failing else None
    return told(lambda: raise_together(error, getattr(on, axis) if axis else None))


def test_the_first_rank_that_failed_is_quoted_and_an_own_error_is_the_cause():
    assert [text for text, _ in mp.simulate(raises, (), None, ranks=4)] == ["None"] * 4
    found = mp.simulate(raises, (2,), None, ranks=4)
    assert found == [("lost 2 (on rank 2 of 4)", "OSError" if rank == 2 else "NoneType") for rank in range(4)]
    two = "lost 1 (on rank 1, 3 of 4)"
    assert [text for text, _ in mp.simulate(raises, (3, 1), None, ranks=4)] == [two] * 4
    tp = mp.simulate(raises, (2,), "tp", ranks=4)
    assert tp[:2] == [("None", "")] * 2
    assert [text for text, _ in tp[2:]] == ["lost 2 (on rank 0 of 2)"] * 2


def merges() -> list:
    on = mp.build_mesh(device_type="cpu", tp=2)
    return [
        gather_objects(on.job.rank, dist.group.WORLD), gather_objects(on.job.rank, on.tp.group),
        exchange(None, on.job.rank, on.tp.group, max), exchange(None, 5, None), exchange(None, 5, None, sum),
        told(lambda: exchange(None, on.job.rank, on.tp.group, lambda ranks: 1 // (ranks[0] - 2))),
        told(lambda: exchange(KeyError("k") if on.tp.rank else None, 0, on.tp.group)),
    ]  # fmt: skip


@pytest.mark.parametrize("part", [2**22, 7])
def test_values_are_gathered_and_merged_in_the_order_of_the_ranks(monkeypatch, part):
    monkeypatch.setattr(agreement, "_PART", part)  # bytes of a value that the store takes at once
    found = mp.simulate(merges, ranks=4)
    zero = "ZeroDivisionError: integer division or modulo by zero (on rank 0 of 2)"
    for rank, (world, tp, most, alone, total, divided, failed) in enumerate(found):
        first = rank // 2 * 2
        assert (world, tp, most, alone, total) == ([0, 1, 2, 3], [first, first + 1], first + 1, [5], 5)
        assert divided[0] == (zero if first else "-1")
        assert failed == ("KeyError: 'k' (on rank 1 of 2)", "KeyError" if rank % 2 else "NoneType")


def shared(kinds: tuple, error: Exception) -> tuple[str, str, bool]:
    on, went_on = mp.build_mesh(device_type="cpu", dp=2), False
    try:
        with agreement.raising_together(*kinds):
            if on.job.rank == 1:
                raise error
            went_on = True
    except Exception as found:
        return type(found).__name__, str(found), went_on
    return "", "", went_on


def test_an_error_of_a_block_is_shared_at_its_end():
    assert mp.simulate(shared, (), ValueError("a"), ranks=2) == [
        ("ValueError", "a (on rank 1 of 2)", True), ("ValueError", "a (on rank 1 of 2)", False),
    ]  # fmt: skip
    assert mp.simulate(shared, ((KeyError, OSError),), OSError("b"), ranks=2)[0][:2] == (
        "ValueError",
        "b (on rank 1 of 2)",
    )


@pytest.mark.timeout(60)
def test_a_signature_that_begins_with_digits_is_no_number_of_parts(monkeypatch):
    monkeypatch.setenv("MPCORE_SECRET", "a secret")
    store = dist.HashStore()

    def agrees(rank: int) -> bool:  # one of 43 signatures begins with eight digits
        return all(Agreement(store, rank, 2).same("text") for _ in range(300))

    def merges(rank: int) -> tuple[str, str]:  # a message for "a" isn't one for "b", as with another secret
        return told(lambda: Agreement(store, rank, 2, prefix="ab"[rank]).merged(rank, list))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(agrees, range(2)))
        assert all("isn't signed with the job's secret" in text for text, _ in pool.map(merges, range(2)))
