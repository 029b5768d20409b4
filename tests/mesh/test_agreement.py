"""Agreements through a store: ranks are threads, and the store counts what they ask and what is left in it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import mpcore as mp
from mpcore.mesh import agreement
from mpcore.mesh.agreement import Agreement, check_same, exchange, gather_objects, name_ranks, raise_together
from mpcore.mesh.secret import encode


class Asked:
    """A store that writes down the requests, and knows its keys."""

    timeout = timedelta(seconds=20)

    def __init__(self) -> None:
        self.inner, self.lock, self.requests = dist.HashStore(), threading.Lock(), []

    def __getattr__(self, name: str) -> Callable:
        def ask(*given: Any) -> Any:
            key = given[0][0] if isinstance(given[0], list) else given[0]
            with self.lock:
                self.requests.append((name, key))
                if name == "wait":
                    return None
                if name in ("get",) and not self.inner.check([key]):
                    raise AssertionError(f"{key} isn't there")
                return getattr(self.inner, name)(*given)

        return ask

    def keys(self) -> set[str]:
        return {key for _, key in self.requests if self.inner.check([key])}


def on_threads(size: int, work: Callable[[int], Any]) -> list:
    found: list = [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_texts_are_the_same_on_all_ranks_or_not():
    store = Asked()
    for texts, same in ((["a"] * 3, True), (["a", "a", "b"], False), (["a", "b", "b"], False), ([""] * 3, True)):
        assert on_threads(3, lambda rank, texts=texts: Agreement(store, rank, 3).same(texts[rank])) == [same] * 3
    digest = hashlib.sha256(b"").hexdigest()[:32]
    assert store.inner.get("4/first").decode() == digest
    assert store.keys() == {"at/0", "at/1", "at/2", "4/first", "4/came", "4/result"}, "older agreements are deleted"
    assert [int(store.inner.get(f"at/{rank}")) for rank in range(3)] == [4, 4, 4]


@pytest.mark.parametrize("part", [2**22, 7])
def test_values_of_many_parts_are_merged_on_rank_0_and_only_the_last_result_stays(monkeypatch, part):
    monkeypatch.setattr(agreement, "_PART", part)
    store, values = Asked(), ["a", "b" * 50, ""]
    for _ in range(3):
        got = on_threads(3, lambda rank: Agreement(store, rank, 3).merged(values[rank], "-".join))
        assert got == [(None, "-".join(values))] * 3
    data = encode((None, "-".join(values)))
    count = -(-len(data) // part)
    assert store.inner.get("3/result").startswith(b"%d " % count)
    parts = {f"3/result/{i}" for i in range(1, count)}
    assert store.keys() == {"at/0", "at/1", "at/2", "3/came", "3/full", "3/result", *parts}
    assert sum(name == "set" and "/of/0" in key for name, key in store.requests) == 0, "rank 0 has its own value"


def test_an_error_of_the_merge_is_every_ranks():
    store = Asked()
    found = on_threads(2, lambda rank: Agreement(store, rank, 2).merged(rank, lambda ranks: 1 // ranks[0]))
    assert [(type(error), str(error), result) for error, result in found] == [
        (ValueError, "ZeroDivisionError: integer division or modulo by zero", None)
    ] * 2


@pytest.mark.parametrize(("late", "what", "told"), [
    ((1,), "colour", "rank 1 of 3 did not reach the check of the colour within 0.05 s: read what ended it, or"),
    ((0, 2), "", "ranks 0, 2 of 3 did not reach the call in which the others wait within 0.05 s: read"),
])  # fmt: skip
def test_ranks_that_dont_come_are_named_on_the_others(late, what, told):
    store = Asked()
    store.timeout = timedelta(seconds=0.05)  # type: ignore[misc]
    found = on_threads(3, lambda rank: None if rank in late else Agreement(store, rank, 3, what).same("a"))
    for rank, error in enumerate(found):
        assert (error is None) if rank in late else str(error).startswith(told)
    assert ("wait", "1/missing") in store.requests


def test_ranks_are_named_with_the_hosts_that_they_wrote(monkeypatch):
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "here")
    store = dist.HashStore()
    for rank, host in enumerate(["here", "b", "a", "b", *["c"] * 6]):
        store.set(f"mpcore/host/{rank}", host)
    inner = dist.PrefixStore("group", store)
    for at in (store, inner, dist.PrefixStore("more", inner)):
        assert name_ranks(at, [0]) == "rank 0"
        assert name_ranks(at, [1]) == "rank 1 (host b)"
        assert name_ranks(at, [3, 2, 0]) == "ranks 3, 2, 0 (host a, b)"
        assert name_ranks(at, [11]) == "rank 11"
        assert name_ranks(at, range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 (host a, b, c)"
    assert name_ranks(store, range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more (host a, b, c)"
    assert name_ranks(None, [1, 2]) == "ranks 1, 2"
    store.set("mpcore/host/0", "z")
    assert name_ranks(store, [1, 2, 4, 4, 4, 4, 4, 4, 0]).endswith("(host a, b, c)"), "of eight ranks at most"


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


def test_values_are_gathered_and_merged_in_the_order_of_the_ranks():
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

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(agrees, range(2)))
