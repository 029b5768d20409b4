"""Whom a watchdog waits for when the store of the run fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import mpcore as mp
from mpcore.tools.fault_tolerance import watchdog as module
from mpcore.tools.fault_tolerance.trace import Log
from mpcore.tools.fault_tolerance.watchdog import Watchdog


def log(rank: int) -> Log:
    return Log(rank, {}, [], f"rank{rank}.py:1")


def job(rank: int, size: int, monkeypatch: pytest.MonkeyPatch, store: Any, **options: Any) -> Watchdog:
    monkeypatch.setattr(module, "clone_store", lambda: store)
    return Watchdog(mp.Mesh(job=mp.Axis(size, rank, name="world")), **options)


def test_a_rank_without_the_store_has_its_own_log(monkeypatch):
    store = dist.HashStore()
    store.set("mpcore/trace/0", log(0).to_json())

    def gone(*_: object) -> None:
        raise RuntimeError("connection reset")

    for name in ("set", "check", "get"):
        broken = SimpleNamespace(set=store.set, check=store.check, get=store.get, **{})
        setattr(broken, name, gone)
        assert [each.rank for each in job(1, 4, monkeypatch, broken)._exchange(log(1))] == [1]
