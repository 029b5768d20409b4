"""Which ranks communicate, how layers are split into stages, and in which order a pipeline runs them."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from mpcore.mesh.layout import mesh_ranks, mesh_shape
from mpcore.pipeline import partition
from mpcore.pipeline.prove import Times, prove
from mpcore.pipeline.schedules import Schedule, build_schedule
from tests.peers import rows


@rows({
        "runtime/pipe/test_topology.py: test_topology_2d, rows": ({"pp": 2, "dp": 2}, "dp", [[0, 1], [2, 3]]),
        "runtime/pipe/test_topology.py: test_topology_2d, columns": ({"pp": 2, "dp": 2}, "pp", [[0, 2], [1, 3]]),
        "runtime/pipe/test_topology.py: test_topology_comm_list, pipe": (
            {"pp": 2, "dp": 2, "tp": 2}, "pp", [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
        "runtime/pipe/test_topology.py: test_topology_comm_list, data": (
            {"pp": 2, "dp": 2, "tp": 2}, "dp", [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
        "runtime/pipe/test_topology.py: test_topology_comm_list, model": (
            {"pp": 2, "dp": 2, "tp": 2}, "tp", [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        "utils/test_groups.py: test_get_expert_parallel_ranks, expert": (
            {"dp": 8, "tp": 2, "ep": 4}, "ep", [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
        ),
        "utils/test_groups.py: test_get_expert_parallel_ranks, expert data": (
            {"dp": 8, "tp": 2, "ep": 4}, "edp",
            [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
        ),
    })  # fmt: skip
def test_groups_have_deepspeeds_ranks(sizes, axis, groups):
    assert sorted(mesh_ranks(**sizes)[axis]) == groups


@rows({
        "test_hyper_comm_grid.py: test_gen_rank_enum_single_dim": (
            {"tp": 2, "dp": 4}, "tp", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        "test_hyper_comm_grid.py: test_edge_case_single_rank_dims": (
            {"cp": 2, "dp": 4}, "tp", [[0], [1], [2], [3], [4], [5], [6], [7]]),
        "test_hyper_comm_grid.py: test_rank_enumeration_correctness": (
            {"tp": 2, "cp": 2, "dp": 2}, "dp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        "test_parallel_state.py: test_data_parallel_initializations": (
            {"pp": 8}, "dp", [[0], [1], [2], [3], [4], [5], [6], [7]]),
        "test_parallel_state.py: test_tensor_model_parallel_rank": ({"tp": 8}, "tp", [[*range(8)]]),
        "test_parallel_state.py: test_pipeline_model_parallel_rank": ({"pp": 8}, "pp", [[*range(8)]]),
        "test_parallel_state.py: test_context_parallel_rank": ({"cp": 8}, "cp", [[*range(8)]]),
        "test_parallel_state.py: test_expert_model_parallel_rank": ({"dp": 8, "ep": 8}, "ep", [[*range(8)]]),
        "test_parallel_state.py: test_moe_tensor_model_parellel_rank": ({"dp": 8, "etp": 8}, "etp", [[*range(8)]]),
        "test_parallel_state.py: test_separate_all_gather_group": ({"cp": 8}, "data", [[*range(8)]]),
    })  # fmt: skip
def test_groups_have_megatrons_ranks(sizes, axis, groups):
    assert mesh_ranks(**sizes)[axis] == groups


@pytest.mark.parametrize(
    ("world", "tp", "pp", "cp", "ep"),
    [(1, 1, 1, 1, 1), (8, 2, 2, 1, 1), (24, 8, 3, 1, 1), (64, 2, 1, 1, 4), (64, 2, 2, 2, 1), (64, 2, 2, 2, 4)],
)
def test_groups_are_strides_of_the_ranks(world, tp, pp, cp, ep):
    dp = world // (tp * pp * cp)
    groups = mesh_ranks(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)
    stage = world // pp
    starts = [range(p * stage, (p + 1) * stage) for p in range(pp)]
    assert groups["tp"] == [[*range(i, i + tp)] for i in range(0, world, tp)]
    assert groups["pp"] == [[*range(i, world, stage)] for i in range(stage)]
    assert groups["data"] == [[*of[i::tp]] for of in starts for i in range(tp)]
    assert groups["dp"] == [[*of[i :: cp * tp]] for of in starts for i in range(cp * tp)]
    blocks = [range(i, i + cp * tp) for i in range(0, world, cp * tp)]
    assert groups["cp"] == [[*block[i::tp]] for block in blocks for i in range(tp)]
    assert groups["edp"] == [[*of[i :: ep * tp]] for of in starts for i in range(ep * tp)]


@rows(
    {
        "test_auto_calculate_dp_shard": (8, {"tp": 2}, {"dp": 4}),
        "test_from_config": (8, {"tp": 2, "cp": 1, "pp": 1, "ep": 1}, {"dp": 4, "tp": 2, "pp": 1, "ep": 1}),
        "test_enabled_properties": (2, {"cp": 2}, {"dp": 1, "cp": 2}),
        "test_expert_parallelism_validation, ep 2 of 2": (2, {"dp": 2, "ep": 2}, {"ep": 2, "dp": 2}),
    }
)
def test_sizes_are_derived_as_torchtitans(world, given, sizes):
    """dp_replicate x dp_shard is one axis here, which `Zero(replicate=)` divides."""
    assert mesh_shape(world, **given).items() >= sizes.items()


@rows(
    {
        "test_validation_invalid_world_size": (10, {"dp": 4, "tp": 2}, "tp 2 .* = 8 is not the world size 10"),
        "test_validation_zero_parallelism": (1, {"dp": 0}, "dp 0 is not a positive integer"),
        "test_validation_invalid_dp_shard": (1, {"tp": 0}, "tp 0 is not a positive integer"),
        "test_expert_parallelism_validation, ep 3": (4, {"dp": 4, "ep": 3}, "ep 3 does not divide dp x cp"),
    }
)
def test_sizes_that_torchtitan_refuses_are_refused(world, given, words):
    with pytest.raises(ValueError, match=words):
        mesh_shape(world, **given)


def bounds(costs, stages: int) -> list[int]:
    return [0, *(held.stop for held in partition(costs, stages))]


@rows(
    {
        "runtime/utils/test_partition.py: test_valid_partition": ([1] * 10, 1, [0, 10]),
        "runtime/utils/test_partition.py: test_easy_balance_balanced": ([1] * 8, 4, [0, 2, 4, 6, 8]),
        "runtime/utils/test_partition.py: test_int_balanced": ([0, 1, 2, 3, 3, 3], 4, [0, 3, 4, 5, 6]),
        "runtime/utils/test_partition.py: test_float_balanced": ([0.0, 1.1, 1.9, 3.0, 3.0, 3.0], 4, [0, 3, 4, 5, 6]),
        "runtime/utils/test_partition.py: test_float_lastheavy": ([0.0, 1.1, 1.9, 3.0, 30.0], 2, [0, 4, 5]),
        "runtime/utils/test_partition.py: test_float_midheavy": ([0.0, 1.1, 30, 3.0], 3, [0, 2, 3, 4]),
    }
)
def test_blocks_are_split_as_deepspeeds(costs, stages, at):
    assert bounds(costs, stages) == at


def test_bert_is_split_into_eight_valid_stages():
    """An embedding, 24 layers, a layer without parameters and a head."""
    costs = [52559872, *[12596224] * 24, 0, 52559872]
    at = bounds(costs, 8)
    assert (len(at), at[-1]) == (9, 27)
    assert all(a < b for a, b in pairwise(at))
    assert max(sum(costs[a:b]) for a, b in pairwise(at)) == 52559872  # no split has a faster slowest stage


@rows({
        "64 layers, pp 4": (64, 4, {}, [16] * 4),
        "64 layers, pp 4, 8 virtual stages": (64, 32, {}, [2] * 32),
        "63 layers and the embedding, pp 4": (63, 4, {"first": 1.0}, [15, 16, 16, 16]),
        "63 layers and the loss, pp 4": (63, 4, {"last": 1.0}, [16, 16, 16, 15]),
        "62 layers, the embedding and the loss, pp 4": (62, 4, {"first": 1.0, "last": 1.0}, [15, 16, 16, 15]),
        "62 layers, the embedding and the loss, pp 4, 2 virtual stages": (
            62, 8, {"first": 1.0, "last": 1.0}, [7, 8, 8, 8, 8, 8, 8, 7]),
    })  # fmt: skip
def test_stages_have_as_many_layers_as_megatrons(layers, stages, ends, sizes):
    """A first stage that holds the embedding too counts it as a layer, and so does a last stage its loss."""
    assert [len(held) for held in partition([1.0] * layers, stages, **ends)] == sizes


@rows({
        "2 layers, pp 4": (lambda: partition([1.0] * 2, 4), "2 blocks are fewer than the 4 stages"),
        "4 layers, pp 4, 4 virtual stages": (lambda: partition([1.0] * 4, 16), "4 blocks are fewer than the 16"),
    })  # fmt: skip
def test_splits_that_megatron_refuses_are_refused(split, words):
    with pytest.raises(ValueError, match=words):
        split()


def test_virtual_stages_have_megatrons_layers():
    """Layers 2 and 6 are on rank 1 of 4 if stages of one layer follow each other over the ranks."""
    on = build_schedule("interleaved", 4, 4, 2).rank_of
    assert [[s for s in range(8) if on[s] == rank] for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_stages_may_have_unequal_numbers_of_layers():
    """A convention: Megatron refuses 65 layers on pp 4."""
    assert [len(held) for held in partition([1.0] * 65, 4)] == [17, 16, 16, 16]


def kinds(schedule: Schedule, rank: int) -> list[str]:
    return [action.kind for action in schedule.ranks[rank]]


def test_one_stage_alternates_forward_and_backward():
    assert kinds(build_schedule("1f1b", 1, 4), 0) == ["F", "B"] * 4


@pytest.mark.parametrize(("micro_batches", "stages"), [(4, 3), (8, 3), (4, 4)])
def test_1f1b_takes_twice_the_micro_batches_and_stages_less_one(micro_batches, stages):
    proof = prove(build_schedule("1f1b", stages, micro_batches), Times(backward=1.0))
    assert proof.makespan == 2 * (micro_batches + stages - 1)


@pytest.mark.parametrize("micro_batches", [1, 3, 8, 10])
def test_forwards_alone_take_the_micro_batches_and_stages_less_one(micro_batches):
    """The forwards of gpipe on 3 stages: stage s begins s later and sends all but the last stage's outputs."""
    proof = prove(build_schedule("gpipe", 3, micro_batches), Times(backward=0.0))
    forwards = [span for span in proof.spans if span.action.kind == "F"]
    assert max(span.end for span in forwards) == micro_batches + 2
    for rank in range(3):
        mine = [span for span in forwards if span.rank == rank]
        assert [span.start for span in mine] == [rank + m for m in range(micro_batches)]
        sends = kinds(build_schedule("gpipe", 3, micro_batches).with_messages, rank).count("SEND_F")
        assert sends == (micro_batches if rank < 2 else 0)


CASES = [(P, V, M) for P, V, M in product((1, 2, 4, 8), (1, 2, 4), (8, 32)) if M % max(1, M // P) == 0]


def plan(P: int, V: int, M: int) -> Schedule:
    return build_schedule("interleaved" if V > 1 else "1f1b", P, M, V)


@rows({
        "as many actions as micro-batches x chunks x 2": (
            lambda row, V, M: len(row) == 2 * V * M),
        "each forward has its backward": (
            lambda row, V, M: {a[1:] for a in row if a.kind == "F"} == {a[1:] for a in row if a.kind == "B"}),
        "no backward before its forward": (
            lambda row, V, M: all(row.index(a._replace(kind="F")) < i for i, a in enumerate(row) if a.kind == "B")),
        "never more backwards than forwards": (
            lambda row, V, M: all(
                sum(a.kind == "F" for a in row[:i]) >= sum(a.kind == "B" for a in row[:i]) for i in range(len(row)))),
        "as many chunks as virtual stages": (
            lambda row, V, M: len({a.stage for a in row}) == V),
    })  # fmt: skip
def test_the_order_of_every_rank_is_as_megatrons(law):
    for P, V, M in CASES:
        if P * V > 1:
            for row in plan(P, V, M).ranks:
                assert law(list(row), V, M), (P, V, M)


@rows(
    {
        "pp 4, 8 micro-batches": ("1f1b", 4, 8, 1, [3, 2, 1, 0]),
        "pp 2, 2 virtual stages, 8 micro-batches": ("interleaved", 2, 8, 2, [4, 2]),
        "pp 4, 2 virtual stages, 8 micro-batches": ("interleaved", 4, 8, 2, [10, 8, 6, 4]),
    }
)
def test_a_rank_warms_up_with_megatrons_forwards(name, P, M, V, ahead):
    """2 (P - rank - 1) + (V - 1) P with virtual stages, else P - rank - 1: forwards before the first pair."""
    found = [row.index("B") - 1 for row in (kinds(build_schedule(name, P, M, V), rank) for rank in range(P))]
    assert found == ahead
