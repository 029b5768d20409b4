"""Muon steps the gate, up and down projections of each expert as matrices of their own, on every layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mpcore import Mesh, Muon
from mpcore.layers import materialize
from mpcore.layers.moe import Experts
from mpcore.layers.moe.experts import GroupedLinear
from mpcore.parallel.data import shard_data_parallel
from mpcore.sharding import shardings
from tests.equality import close
from tests.pool import mesh
from tests.test_checkpoint import same_bits
from tests.test_data_parallel import over_data
from tests.test_optim import give_gradients

E, D, HIDDEN = 4, 6, 5


def build(activation: str, on: Mesh) -> nn.Module:
    like = {"device": "meta", "dtype": torch.float64}
    return materialize(Experts(E, D, HIDDEN, activation, ep=on.ep, etp=on.etp, **like), 5)


def matrices(x: torch.Tensor, name: str, activation: str) -> list[torch.Tensor]:
    """Take the projections of each expert apart, in slices written by hand."""
    if name == "down.weight" or activation == "gelu":
        return [x[e] for e in range(E)]
    return [half for e in range(E) for half in (x[e, :HIDDEN], x[e, HIDDEN:])]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu"])
def test_muon_steps_each_projection_of_each_expert_alone(activation, adjust):
    """HIDDEN < D < 2 HIDDEN: gate above up would be a tall matrix, and the length of its step another one."""
    model = build(activation, Mesh())
    apart = {
        name: nn.ParameterList(part.clone() for part in matrices(p.detach(), name, activation))
        for name, p in model.named_parameters()
    }
    fused, alone = (Muon(it, 0.1, adjust_lr_fn=adjust) for it in (model, nn.ModuleList(apart.values())))
    for step in range(3):
        give_gradients(model, step, torch.float64)
        for name, p in model.named_parameters():
            assert p.grad is not None
            for part, grad in zip(apart[name], matrices(p.grad, name, activation), strict=True):
                part.grad = grad.clone()
        fused.step()
        alone.step()
    for name, p in model.named_parameters():
        for i, (got, want) in enumerate(zip(matrices(p.detach(), name, activation), apart[name], strict=True)):
            close(got, want.detach(), f"matrix {i} of {name}", 1e-12)


def train(sizes: dict[str, int], zero: bool) -> dict[str, torch.Tensor]:
    on = mesh(**sizes) if sizes else Mesh()
    model = build("swiglu", on)
    if zero:
        shard_data_parallel(model, on, [model])
    optimizer = Muon(model, 0.1, mesh=on)
    for step in range(2):
        give_gradients(model, step, torch.float64)
        optimizer.step()
        optimizer.zero_grad()
    declared = [m.shardings["weight"] for m in model.modules() if isinstance(m, GroupedLinear)]
    assert [(it.blocks, it.block_dim) for it in declared] == [((HIDDEN, HIDDEN), 1), ((), 1)]
    slots = {name: {"weight": p, **optimizer.state[p]} for name, p in model.named_parameters()}
    return {
        f"{slot} of {name}": over_data(value.detach(), on, shardings(model)[name]).clone()
        for name, held in slots.items()
        for slot, value in held.items()
        if value.dim()
    }


@pytest.mark.parametrize(("sizes", "zero"), [
    ({"tp": 2, "dp": 2, "ep": 2}, False),  # ep 2 x etp 2, of uneven shards
    ({"dp": 4, "ep": 2}, True),  # ep 2, and edp 2 of ZeRO
    pytest.param({"tp": 2, "dp": 2, "etp": 4}, False, marks=pytest.mark.slow),
    pytest.param({"tp": 4}, False, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_muon_steps_sharded_experts_as_whole_ones_bit_for_bit(ranks, sizes, zero):
    want = train({}, False)
    for got in ranks(math.prod(sizes[name] for name in ("tp", "dp") if name in sizes), train, sizes, zero):
        same_bits(got, want)
