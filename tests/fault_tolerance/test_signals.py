"""Requests that ranks share through a store, and the handlers of signals."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

import mpcore as mp
from mpcore.tools.fault_tolerance.signals import SharedRequests, StopSignals
from tests.pool import on_ranks


@on_ranks(2)
def test_ranks_in_other_steps_or_with_other_requests_are_told_so():
    mesh, step = mp.build_mesh(tp=2), 0
    for wrong in ({"stop": False}, {}):
        wishes = SharedRequests(mesh.world)
        step = 7 if mesh.tp.rank and wrong else 6
        wishes.after_step(step, **(wrong if mesh.tp.rank else {"stop": False}))
        with pytest.raises(ValueError, match="steps 6 and 7" if wrong else r"other requests than \['stop'\]"):
            wishes.after_step(9, stop=False)
        dist.barrier()


def test_a_block_leaves_a_handler_that_another_set():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.asked
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as leave_together does
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
