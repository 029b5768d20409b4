"""The mesh: which ranks form which group, what is refused, and that every rank makes the same groups."""

import copy
import io
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from mpcore import (
    Axis,
    ColumnParallelLinear,
    Dropout,
    Mesh,
    Muon,
    ParallelAttention,
    ParallelMoE,
    PositionEmbedding,
    RMSNorm,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    build_mesh,
    collectives,
    linear_cross_entropy,
    parallelize,
    sequence_index,
    shard_sequence,
    unshard_sequence,
    vocab_parallel_cross_entropy,
)
from mpcore.collectives import all_reduce
from mpcore.gradients import grad_norm, reduce_gradients
from mpcore.layers import Router, linear_log_prob
from mpcore.mesh.build import choose_device
from mpcore.mesh.layout import layout_table, mesh_ranks, mesh_shape
from mpcore.optim import LossScaler
from mpcore.parallel.data import shard_data_parallel
from mpcore.sharding.declare import cut
from mpcore.tools.fault_tolerance.watchdog import Watchdog
from tests.pool import mesh, on_ranks

BIG = {"tp": 8, "cp": 2, "pp": 8, "ep": 4, "dp": 8}


@pytest.mark.parametrize(("world", "sizes", "message"), [
    (4, {"tp": 3}, "tp 3 x cp 1 x pp 1 = 3 does not divide the world size 4: choose sizes whose product is one of 1"),
    (1, {"tp": 2, "pp": 3}, "tp 2 x pp 3 needs 6 processes, and this job has 1: start 6"),
    (6, {"tp": 2, "pp": 2}, "tp 2 x cp 1 x pp 2 = 4 does not divide the world size 6"),
    (8, {"tp": 2, "dp": 2}, "tp 2 x cp 1 x pp 1 x dp 2 = 4 is not the world size 8: start 4 processes"),
    (8, {"tp": 2, "cp": 2, "ep": 3}, "ep 3 does not divide dp x cp = 2 x 2 = 4 (world size 8): take one of 1, 2"),
    (4, {"tp": 0}, "tp 0 is not a positive integer (tp 0 x cp 1 x pp 1, world size 4)"),
    (4, {"pp": -2}, "pp -2 is not"), (4, {"tp": 2.0}, "tp 2.0 is not"), (4, {"dp": "2"}, "dp '2' is not"),
    (4, {"cp": True}, "cp True is not"), (4, {"ep": 0}, "ep 0 is not"), (4, {"etp": 0}, "etp 0 is not"),
    (8, {"tp": 2, "pp": 2, "etp": 1, "ep": 8}, "etp x ep = 1 x 8 = 8 does not divide tp x cp x dp = 2 x 1 x 2 = 4"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_named(world, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        mesh_shape(world, **sizes)
    assert mesh_shape(24, tp=2, pp=3) == {"tp": 2, "cp": 1, "pp": 3, "ep": 1, "dp": 4, "etp": 2}
    assert mesh_shape(24, tp=2, pp=3, cp=2, dp=2, ep=4)["dp"] == 2


def test_without_torch_distributed_every_axis_has_size_one():
    m = build_mesh()
    assert m.device_mesh is None
    for name in ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "data", "ends", "world"):
        axis = getattr(m, name)
        assert (axis.size, axis.rank, axis.group) == (1, 0, None), name
    assert str(m) == f"mesh of 1 ranks on {m.device_type}: pp 1 x dp 1 x cp 1 x tp 1\n  stage 0 | dp 0: [0]"
    assert m.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert not dist.is_initialized()
    with pytest.raises(
        ValueError, match=r"tp 2 needs 2 processes.*torch.distributed isn't running: start with torchrun"
    ):
        build_mesh(tp=2)
    assert Mesh().tp.size == 1


@pytest.mark.parametrize("sizes", [
    {"cp": 2, "dp": 2, "ep": 2}, {"tp": 2, "dp": 2, "etp": 1, "ep": 4}, {"tp": 2, "pp": 2, "etp": 1, "ep": 2},
], ids=str)  # fmt: skip
@on_ranks(4)
def test_every_group_holds_the_ranks_of_the_table(sizes):
    m = mesh(**sizes)
    me = dist.get_rank()
    table = mesh_ranks(**{"dp": 1, **sizes})
    for name, groups in table.items():
        axis = getattr(m, name)
        expected = next((group for group in groups if me in group), [me])
        assert axis.name == name
        assert (axis.size, axis.rank) == (len(expected), expected.index(me)), name
        if axis.size > 1:
            members = [torch.zeros((), dtype=torch.int64) for _ in expected]
            dist.all_gather(members, torch.tensor(me), group=axis.group)
            assert [int(r) for r in members] == expected, name
    assert (m.world.size, m.world.rank) == (dist.get_world_size(), me)
    assert m.device_mesh is not None
    assert m.device_mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
    assert f"[{me}]" in str(m)
    assert str(m) == layout_table(**{"dp": 1, **sizes}, rank=me, device_type="cpu")
    assert str(m).startswith("mesh of 4 ranks on cpu: ")


def check_refused_before_any_group():
    before = len(distributed_c10d._world.pg_names)
    with pytest.raises(ValueError, match=r"tp 3 x cp 1 x pp 1 = 3 does not divide the world size 4"):
        build_mesh(tp=3)
    with pytest.raises(ValueError, match=r"ep 3 does not divide dp x cp = 4 x 1 = 4"):
        build_mesh(ep=3)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 disagree about the mesh .*'tp': 2.* and .*'tp': 4"):
        build_mesh(tp=2 if dist.get_rank() == 0 else 4)
    with pytest.raises(ValueError, match=r"ranks 0 and 3 disagree about the mesh .*'tp': 2.* and tp 3 x cp 1"):
        build_mesh(tp=3 if dist.get_rank() == 3 else 2)
    assert len(distributed_c10d._world.pg_names) == before, "a group was made"


def groups_made():
    """The name and ranks of each group of this rank, of several meshes."""
    meshes = build_mesh(cp=2, pp=2, ep=2), build_mesh(tp=2, pp=2), build_mesh(tp=2, cp=2, ep=2)
    groups = [axis.group for m in meshes for axis in m.axes.values() if axis.group is not None]
    return [(group.group_name, tuple(dist.get_process_group_ranks(group))) for group in groups]


def test_pitfall_41_the_ranks_of_a_group_know_it_by_one_name_and_no_other_group_by_that(ranks):
    logs = ranks(4, groups_made)
    names = {}
    for log in logs:
        for name, members in log:
            assert names.setdefault(name, members) == members
    assert len(names) > 6
    for name, members in names.items():
        assert [rank for rank, log in enumerate(logs) if name in dict(log)] == list(members)


def test_pitfall_41_the_plan_that_ranks_compare_changes_with_any_group(ranks):
    plans = [repr(mesh_ranks(tp=a, cp=b, pp=c, dp=d)) for a, b, c, d in ((2, 1, 1, 2), (1, 2, 1, 2), (2, 1, 2, 1))]
    assert len(set(plans)) == 3


def check_axis_and_copy():
    tp = mesh(tp=2).tp
    with pytest.raises(ValueError, match="the tp axis has size 3, its process group 2 ranks"):
        Axis(3, 0, tp.group, "tp")
    assert tp.group is not None
    assert collectives.reduce(torch.ones(()), Axis(tp.group.size(), tp.group.rank(), tp.group)).item() == 2
    layer = ColumnParallelLinear(3, 4, tp=tp)
    twin = copy.deepcopy(layer)
    assert twin.tp is layer.tp is twin.shardings["weight"].shards[0].axis is copy.copy(tp)
    assert torch.equal(twin.weight, layer.weight)
    assert twin.weight is not layer.weight
    twin(torch.ones(2, 3)).sum().backward()
    for held in (tp, layer, mesh(tp=2)):
        with pytest.raises(TypeError, match=r"axis of size \d belongs to running processes .* full_state_dict\(mod"):
            torch.save(held, io.BytesIO())
    planned = Axis(4, 1, None, "tp")
    assert pickle.loads(pickle.dumps(planned)) == planned


GLOO, NCCL = {"cpu": "gloo", "cuda": "gloo"}, {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize("use", [
    lambda it: ColumnParallelLinear(4, 4, tp=it), lambda it: ColumnParallelLinear(4, 4, tp=it, sequence_parallel=True),
    lambda it: RowParallelLinear(4, 4, tp=it, sequence_parallel=True),
    lambda it: VocabParallelEmbedding(4, 4, tp=it, sequence_parallel=True), lambda it: RMSNorm(4, tp=it),
    lambda it: parallelize(nn.Linear(4, 4), it, {"": "colwise"}), lambda it: Dropout(0.1, tp=it),
    lambda it: ParallelMoE(4, 4, 4, 2, ep=it),
    lambda it: vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([0, 1]), tp=it),
    lambda it: linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1]), tp=it),
    lambda it: linear_log_prob(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1]), tp=it),
    lambda it: reduce_gradients(nn.Linear(2, 2), it), lambda it: ParallelMoE(4, 4, 4, 2, tp=it),
    lambda it: Router(4, 4, 2, data=it), lambda it: PositionEmbedding(4, 4, tp=it),
    lambda it: ParallelAttention(4, 2, context="ring", cp=it), lambda it: ParallelAttention(4, 2, cp=it),
    lambda it: VocabParallelCrossEntropy(4, tp=it), lambda it: cut(4, it, 0),
    lambda it: shard_sequence(torch.ones(2, 4), it, "ring"), lambda it: unshard_sequence(torch.ones(2, 4), it, "ring"),
    lambda it: sequence_index(4, it, "ring"), lambda it: collectives.shard_range(4, it),
    lambda it: collectives.copy(torch.ones(4, 4), it), lambda it: collectives.reduce(torch.ones(4, 4), it),
    lambda it: collectives.split(torch.ones(4, 4), it, 0), lambda it: collectives.gather(torch.ones(4, 4), it, 0),
    lambda it: collectives.all_gather(torch.ones(4, 4), it, 0),
    lambda it: collectives.reduce_scatter(torch.ones(4, 4), it, 0),
    lambda it: collectives.all_to_all(torch.ones(4, 4), it, 0, 1),
    lambda it: collectives.all_to_all_rows(torch.ones(4, 4), it),
    lambda it: collectives.all_reduce(torch.ones(4, 4), it),
    lambda it: collectives.start_all_reduce(torch.ones(4, 4), it),
    lambda it: collectives.start_all_gather(torch.ones(4, 4), it),
    lambda it: collectives.start_reduce_scatter(torch.ones(4, 4), it),
    lambda it: collectives.start_send(torch.ones(4), it, None, [0]),
])  # fmt: skip
def test_what_is_no_axis_is_refused_in_words(use):
    words = r"an axis is wanted, such as mesh.tp of build_mesh\(tp=2\), or Axis\(.*\) of a process group, not \w+ "
    for it in (SimpleNamespace(size=lambda: 2), SimpleNamespace()):  # as torch's, which have no rank, and as our mesh
        with pytest.raises(TypeError, match=words):
            use(it)


@pytest.mark.parametrize("use", [
    lambda it: grad_norm(nn.Linear(2, 2), it), lambda it: shard_data_parallel(nn.Linear(2, 2), it),
    lambda it: Muon(nn.Linear(2, 2), mesh=it), lambda it: LossScaler(it), lambda it: Watchdog(it),
])  # fmt: skip
def test_what_is_no_mesh_is_refused_in_words(use):
    for it in (Axis(), SimpleNamespace(size=lambda: 2)):
        with pytest.raises(TypeError, match="expected the mesh that the model lies on, found"):
            use(it)


def test_cuda_is_taken_where_each_rank_has_a_gpu_of_its_own():
    assert choose_device(None, gpus=0) == "cpu"
    assert choose_device(None, gpus=1) == "cuda"
    for gpus in range(4):
        assert choose_device(None, gpus=gpus, local_rank=0, local_size=4) == "cpu"
    assert choose_device(None, gpus=4, local_rank=3, local_size=4) == "cuda"
    assert choose_device(None, gpus=8, backends=GLOO) == "cpu"  # a pool, with its models
    assert choose_device(None, gpus=8, backends={"cpu": "fake", "cuda": "fake"}) == "cpu"
    assert choose_device(None, gpus=0, backends=NCCL) == "cpu"
    assert choose_device(None, gpus=1, local_rank=1, local_size=2, backends=NCCL) == "cuda"
    assert choose_device("cpu", gpus=8, backends=NCCL) == "cpu"
    assert choose_device("cuda", gpus=1, local_rank=3, local_size=4, backends=GLOO) == "cuda"  # they share it
    assert choose_device("cuda", gpus=1, local_rank=0, local_size=4) == "cuda"  # with a GPU each that others don't see
    for backends in (None, NCCL):
        with pytest.raises(ValueError, match=r"GPUs here: 2, processes: 4\. Each needs one"):
            choose_device("cuda", gpus=2, local_rank=2, local_size=4, backends=backends)
    for backends in (None, NCCL, GLOO):
        with pytest.raises(ValueError, match="GPUs here: 0, processes: 1"):
            choose_device("cuda", gpus=0, backends=backends)
    for other in ("mps", "cuda:0"):
        with pytest.raises(ValueError, match=f"device_type '{other}' is none of 'cuda', 'cpu' and None"):
            build_mesh(device_type=other)


def check_gpus_of_a_pool():
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
    try:
        on = build_mesh(dp=2)
        assert (on.device_type, build_mesh(tp=2).device_type, mesh(tp=2).device_type) == ("cpu", "cpu", "cpu")
        all_reduce(torch.ones(1), on.dp)
    finally:
        torch.cuda.is_available, torch.cuda.device_count = GPUS


GPUS = torch.cuda.is_available, torch.cuda.device_count


@pytest.mark.parametrize(("size", "check"), [
    (4, check_refused_before_any_group), (2, check_axis_and_copy), (2, check_gpus_of_a_pool),
])  # fmt: skip
def test_meshes_on_ranks(ranks, size, check):
    ranks(size, check)
