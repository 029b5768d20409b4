"""A deadlock of simulated ranks names the calls that wait."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import mpcore as mp
from mpcore.collectives import all_reduce
from mpcore.tools.simulation import DeadlockError, simulate


def test_a_deadlock_lists_the_calls_of_a_group_by_the_name_of_its_axis():
    def work(mesh: mp.Mesh) -> None:
        all_reduce(torch.ones(2), mesh.dp)
        dist.all_reduce(torch.ones(3))
        if mesh.dp.rank == 0:
            all_reduce(torch.ones(4), mesh.dp)

    with pytest.raises(DeadlockError) as error:
        simulate(work, dp=2)
    said = str(error.value)
    assert said.startswith("no rank can go on: ")
    assert "rank 0 entered all_reduce(dp) of [4] float32" in said
    assert "the end of its function" in said
