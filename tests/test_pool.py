"""The pool of ranks: what a call's time is, and what is said of ranks that never come."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from mpcore.tools.verify import what_happened
from tests.pool import Pool, RankError


def slow() -> None:
    time.sleep(2.0)


def die() -> None:
    os._exit(3)


def test_a_calls_time_begins_when_all_ranks_have_started():
    pool = Pool(1, prepare=slow)
    try:
        assert pool(1, os.getpid, timeout=1.8) == [process.pid for process, _ in pool.workers]
        with pytest.raises(RankError, match=r"still running when the time was over\n  .*\n    File .* in slow\n"):
            pool(1, slow, timeout=0.1)
    finally:
        pool.stop()
    with pytest.raises(ValueError, match="3 ranks of a pool of 2: make it with most=3"):
        Pool(2)(3, print)
    with pytest.raises(RankError, match="a rank died as it started"):
        Pool(1, prepare=die)(1, os.getpid)


def rank_1_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_the_signal_that_killed_a_rank_is_named_before_its_peers_broken_connection(ranks):
    with pytest.raises(RankError) as told:
        ranks(2, rank_1_is_killed)
    assert "rank 0" in str(told.value)
    assert what_happened(str(told.value), 1.0) == "rank 1: the process died (SIGKILL)"
    aborted = what_happened("--- rank 2 of 4\nthe process died (SIGABRT)\n--- rank 3 of 4\nRuntimeError: closed")
    assert re.fullmatch(r"rank 2: the process died \(SIGABRT\)\. Gloo aborts .* in the same order", aborted)


def end_the_world() -> int:
    dist.destroy_process_group()
    return dist.get_world_size() if dist.is_initialized() else 0


@pytest.mark.parametrize("size", [1, 2])
def test_a_call_after_one_that_ended_its_world_has_another(ranks, size):
    assert ranks(size, end_the_world) == [0] * size
    assert ranks(size, dist.get_world_size) == [size] * size
    worlds = ranks.worlds
    assert ranks(size, dist.get_world_size) == [size] * size
    assert ranks.worlds == worlds, "the next call stays in its world"
