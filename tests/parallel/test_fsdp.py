"""The sums and gathers that ZeRO makes of gloo's exchanges, and the meshes that it shards over: on simulated ranks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpcore as mp
from mpcore.parallel import fsdp
from mpcore.parallel.fsdp import BroadcastAllGather, ExchangeReduceScatter
from mpcore.tools.invariant.run import TreeReduceScatter


def scattered(kind: type, size: int) -> tuple[list[float], list[float]]:
    on = mp.build_mesh(dp=size, device_type="cpu")
    rank, group = on.dp.rank, on.dp.group
    made: Any = kind()
    given = made.allocate([3 * size], dtype=torch.float64, device=torch.device("cpu"))
    assert (given.shape, given.dtype, given.device.type) == ((3 * size,), torch.float64, "cpu")
    given.copy_(torch.arange(3.0 * size) + 100 * 2.0**rank)
    before = given.clone()
    out = torch.empty(3, dtype=torch.float64)
    made(out, given, group, op="sum", async_op=False)
    assert torch.equal(given, before), "its input is another unit's to read"
    return out.tolist(), [float(x) for x in given[:1]]


@pytest.mark.parametrize(("kind", "size"), [(TreeReduceScatter, 2), (TreeReduceScatter, 4), (ExchangeReduceScatter, 2),
                                            (ExchangeReduceScatter, 3), (ExchangeReduceScatter, 4)])  # fmt: skip
def test_each_rank_keeps_its_shard_of_the_sum(kind, size):
    total = 100 * (2**size - 1)
    for rank, (out, _) in enumerate(mp.simulate(partial(scattered, kind, size), ranks=size)):
        assert out == [size * (3.0 * rank + i) + total for i in range(3)]


def orders(kind: type) -> float:
    on = mp.build_mesh(dp=4, device_type="cpu")
    value = (1e20, 1.0, -1e20, 1.0)[on.dp.rank]
    out = torch.empty(1)
    kind()(out, torch.full((4,), value), on.dp.group)
    return out.item()


def test_terms_are_added_in_rank_order_or_by_a_tree():
    assert mp.simulate(orders, ExchangeReduceScatter, ranks=4) == [1.0] * 4, "((1e20 + 1) - 1e20) + 1"
    assert mp.simulate(orders, TreeReduceScatter, ranks=4) == [0.0] * 4, "(1e20 + 1) + (-1e20 + 1)"


def gathered() -> list[float]:
    on = mp.build_mesh(dp=3, device_type="cpu")
    made = BroadcastAllGather()
    out = made.allocate([6], dtype=torch.float32, device=torch.device("cpu"))
    out.fill_(-1.0)
    mine = out.chunk(3)[on.dp.rank]
    mine.copy_(torch.tensor([10.0, 20.0]) + on.dp.rank)
    made(out, mine, on.dp.group, async_op=False)  # type: ignore[arg-type]
    return out.tolist()


def test_every_rank_has_the_shards_of_all():
    assert mp.simulate(gathered, ranks=3) == [[10.0, 20.0, 11.0, 21.0, 12.0, 22.0]] * 3


def cut(replicate: int) -> tuple[Any, ...]:
    on = mp.build_mesh(dp=4, device_type="cpu")
    mesh = fsdp._cut_axis(on.data, replicate, "cpu")
    ranks = [dist.get_process_group_ranks(mesh.get_group(i)) for i in range(mesh.ndim)]
    return mesh.mesh_dim_names, mesh.mesh.tolist(), ranks, mesh.get_coordinate()


def test_replicas_are_groups_of_consecutive_ranks():
    for rank, (names, mesh, ranks, at) in enumerate(mp.simulate(cut, 1, ranks=4)):
        assert (names, mesh, ranks, list(at)) == (("data",), [0, 1, 2, 3], [[0, 1, 2, 3]], [rank])
    for rank, (names, mesh, ranks, at) in enumerate(mp.simulate(cut, 2, ranks=4)):
        assert names == ("data_replicate", "data_shard")
        assert mesh == [[0, 1], [2, 3]]
        assert ranks == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]
        assert list(at) == [rank // 2, rank % 2]


class Unit:
    """A unit that writes down what it is told."""

    def __init__(self, told: list) -> None:
        self.told = told

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.told.append((name, *(type(x).__name__ if callable(x) else x for x in given)))


def wraps(zero: int) -> list[Any]:
    on = mp.build_mesh(dp=2, device_type="cpu")
    model = torch.nn.Linear(2, 2).to(torch.float64 if zero == 3 else torch.float32)
    told: list = []
    model.told = told  # type: ignore[assignment]
    fsdp.UnitWrapper(on, {}, fsdp.Zero(zero, 1, torch.bfloat16, torch.float16))(model, set(), zero)
    return told


@pytest.mark.parametrize("zero", [1, 3])
def test_a_unit_sums_and_never_divides_and_keeps_its_parameters_below_stage_3(monkeypatch, zero):
    def shard(module: Any, **how: Any) -> Unit:
        policy = how["mp_policy"]
        dtypes = policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs
        module.told.append((how["reshard_after_forward"], *dtypes))
        return Unit(module.told)

    monkeypatch.setattr(fsdp, "fully_shard", shard)
    monkeypatch.setattr(fsdp, "dist", SimpleNamespace(get_backend=lambda group: "gloo"))
    monkeypatch.setattr(fsdp.fsdp, "reduce_unused", lambda unit: unit.told.append("unused"))
    ours = [("set_custom_reduce_scatter", "ExchangeReduceScatter"), ("set_custom_all_gather", "BroadcastAllGather")]
    reduce_dtype = None if zero == 3 else torch.float16  # gradients of float64 are summed in float64
    want = [
        (zero == 3, torch.bfloat16, reduce_dtype, False), ("set_gradient_divide_factor", 1.0),
        ("set_force_sum_reduction_for_comms", True), *ours, "unused",
    ]  # fmt: skip
    assert mp.simulate(wraps, zero, ranks=2) == [want] * 2


class AddsInPlace(nn.Module):
    """The output of `up` is a view of its product, of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y += x
        return self.down(y.tanh())


def norm_of_step(zero: int, recompute: str) -> float:
    torch.manual_seed(0)
    model, x = AddsInPlace().double(), torch.randn(4, 3, 4, dtype=torch.float64)
    run = mp.prepare(
        model, mp.build_mesh(device_type="cpu"), blocks=[model.up, model.down], initialize=False, data=mp.Zero(zero),
        loss=lambda y, target: (y - target).square().sum(), recompute=recompute,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    mine = [*run.share(4)]
    run.forward_backward(x[mine], x[mine], tokens=4)
    return run.optimizer_step().grad_norm


@pytest.mark.parametrize(("zero", "recompute"), [(1, "none"), (3, "none"), (3, "full")])
def test_pitfall_68_a_blocks_output_may_be_changed_in_place(zero, recompute):
    want = mp.simulate(norm_of_step, 0, "none", ranks=1)[0]
    assert mp.simulate(norm_of_step, zero, recompute, ranks=2) == [pytest.approx(want, rel=1e-12)] * 2
