"""The ledger's bytes of every kind of call, its names of groups, its table; and the bytes of a block on paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpcore import Axis, ParallelMLP
from mpcore import collectives as c
from mpcore.layers.overlap import overlap_communication
from mpcore.tools.analysis.counts import CommunicationCounter, Count, volume
from mpcore.tools.analysis.dry_run import on_mesh


def counted(ledger: CommunicationCounter) -> dict:
    return {key: (count.calls, count.bytes) for key, count in ledger.counts.items()}


def test_each_call_counts_the_bytes_of_its_full_tensor():
    """Of 4 ranks: what is gathered is 4 times as large as a shard, what is scattered 4 times as a result."""
    x = torch.ones(4, 2)  # 32 bytes
    calls = {
        "all_reduce": [
            (lambda on: dist.all_reduce(x, group=on.group), 32),
            (lambda on: c.all_reduce(x, on), 32),
            (lambda on: c.wait(c.start_sum_in_place(x, on)), 32),
        ],
        "all_gather": [
            (lambda on: dist.all_gather_into_tensor(torch.empty(16, 2), x, group=on.group), 128),
            (lambda on: dist.all_gather([torch.empty(4, 2) for _ in range(4)], x, group=on.group), 128),
            (lambda on: c.all_gather(x, on, 0), 128),
        ],
        "reduce_scatter": [
            (lambda on: dist.reduce_scatter_tensor(torch.empty(1, 2), x, group=on.group), 32),
            (lambda on: c.reduce_scatter(x, on, 0), 32),
        ],
        "all_to_all": [
            (lambda on: dist.all_to_all_single(torch.empty(4, 2), x, group=on.group), 32),
            (lambda on: c.all_to_all(x, on, 0, 1), 32),
        ],
        "broadcast": [(lambda on: dist.broadcast(x, 0, group=on.group), 32)],
        "reduce": [(lambda on: dist.reduce(x, 0, group=on.group), 32)],
        "gather": [(lambda on: dist.gather(x, [torch.empty(4, 2) for _ in range(4)], group=on.group), 128)],
        "scatter": [(lambda on: dist.scatter(x, [torch.empty(4, 2) for _ in range(4)], group=on.group), 128)],
        "send": [(lambda on: dist.send(x, 1, group=on.group), 32)],
        "recv": [(lambda on: dist.recv(x, 1, group=on.group), 32)],
        "barrier": [(lambda on: dist.barrier(group=on.group), 0)],
    }
    with on_mesh(0, tp=4) as mesh:
        for kind, ways in calls.items():
            for run, size in ways:
                with CommunicationCounter(mesh) as ledger:
                    run(mesh.tp)
                    run(mesh.tp)
                ((key, (times, total)),) = counted(ledger).items()
                assert (key, times) == (("tp", kind), 2)
                assert total == 2 * size or kind == "barrier", (kind, total)


def test_groups_have_the_names_of_their_axes_or_of_their_ranks():
    x = torch.ones(2)
    with on_mesh(0, tp=2, cp=4, dp=2, cp_inner=2) as mesh:
        pair, many = dist.new_group([0, 8]), dist.new_group(range(0, 16, 3))
        five: Any = dist.new_group([0, 5])
        other, all_of_tp = dist.new_group([0, 3]), dist.new_group([0, 1])
        extra = Axis(2, 0, five, name="extra")
        with CommunicationCounter(mesh, extra=extra) as ledger:
            for group in (all_of_tp, mesh.dp.group, pair, many, other, extra.group, other, mesh.world.group):
                dist.all_reduce(x, group=group)
            for axis in (mesh.tp, *(mesh.cp.levels or ()), mesh.cp):
                c.all_reduce(x, axis)
        found = {axis: count.calls for (axis, _), count in ledger.counts.items()}
        assert found == {
            "tp": 2, "dp": 2, "ranks 0+3+6+9..": 1, "ranks 0+3": 2, "extra": 1, "world": 1,
            "cp_outer": 1, "cp_inner": 1, "cp": 1,
        }  # fmt: skip
        assert ledger.ranks_of["tp"] == (0, 1)
        assert ledger.ranks_of["extra"] == (0, 5)
        assert ledger.ranks_of["ranks 0+3+6+9.."] == (0, 3, 6, 9, 12, 15)
        assert ledger.ranks_of["cp_inner"] == (0, 2)
        assert ledger.ranks_of["cp_outer"] == (0, 4)
        sizes = {
            "tp": 2, "cp": 4, "dp": 2, "extra": 2, "ranks 0+3": 2, "ranks 0+3+6+9..": 6, "cp_outer": 2, "world": 16,
        }  # fmt: skip
        assert ledger.sizes.items() >= sizes.items()


def test_groups_of_the_same_ranks_are_one_axis():
    with on_mesh(0, tp=2) as mesh, CommunicationCounter(mesh, pair=mesh.tp) as ledger:
        for group in (mesh.tp.group, mesh.world.group, dist.new_group([0, 1])):
            dist.all_reduce(torch.ones(2), group=group)
    assert counted(ledger) == {("tp", "all_reduce"): (3, 24)}
    assert "tp" in str(ledger)


def test_what_is_no_collective_is_not_counted():
    with on_mesh(0, tp=2) as mesh, CommunicationCounter(mesh) as ledger:
        y = torch.ones(2) + 1
        started = c.start_all_reduce(y, mesh.tp)
        assert counted(ledger) == {("tp", "all_reduce"): (1, 8)}
        c.wait(started)
        c.all_reduce(y, Axis())
    assert counted(ledger) == {("tp", "all_reduce"): (1, 8)}


def test_the_volume_counts_an_all_reduce_twice_and_a_message_where_it_is_sent():
    factors = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "send": 1, "recv": 0,
               "broadcast": 1, "barrier": 0}  # fmt: skip
    ledger = CommunicationCounter()
    for i, (kind, factor) in enumerate(factors.items()):
        assert volume(kind, 10) == 10 * factor
        ledger.add("a" if i % 2 else "b", kind, 10**i)
        ledger.add("a" if i % 2 else "b", kind, 0)
    assert ledger.volume("a") == 10 + 10**3
    assert ledger.volume("b") == 2 + 10**2 + 10**4 + 10**6
    assert ledger.volume() == ledger.volume("a", "b") == ledger.volume("a") + ledger.volume("b")
    assert ledger.volume("nothing") == 0
    assert ledger.volumes() == {"a": ledger.volume("a"), "b": ledger.volume("b")}
    assert ledger.counts["b", "all_reduce"] == Count(2, 1)
    assert Count() == Count(0, 0)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_messages_that_travel_beside_products_are_counted_with_these(sequence_parallel):
    """tp 4, 32 tokens of width 8, hidden 32. Half of each product runs beside messages of 1 and 2 shards; or three of
    four chunks of the last."""
    with on_mesh(0, tp=4) as mesh:
        layer = ParallelMLP(8, 32, "relu", bias=False, tp=mesh.tp, sequence_parallel=sequence_parallel)
        overlap_communication(layer, smallest=1)
        with CommunicationCounter(mesh) as ledger, torch.no_grad():
            layer(torch.ones(1, 8 if sequence_parallel else 32, 8))
        part = 2 * 8 * (32 // 4) * 8  # of 8 tokens
        if sequence_parallel:
            (count,) = ledger.counts.values()
            assert (count.calls, count.bytes, count.beside, count.flops) == (4, 6 * 256, 6 * 256, 4 * part)
        else:
            assert vars(ledger.counts["tp", "all_reduce"]) == {
                "calls": 4, "bytes": 4 * 256, "beside": 3 * 256, "flops": 3 * part,
            }  # fmt: skip
