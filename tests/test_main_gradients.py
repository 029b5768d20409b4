"""Gradients accumulated in float32 beside the parameters: the dense model's, whatever path they came by."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mpcore import (
    ColumnParallelLinear,
    Mesh,
    RowParallelLinear,
    VocabParallelEmbedding,
    full_state_dict,
    load_full_state_dict,
    simulate,
)
from mpcore._torch.fake import fake_tensors
from mpcore.gradients import (
    clip_gradients,
    grad_norm,
    guard_optimizer,
    main_gradients,
    reduce_gradients,
    zero_gradients,
)
from mpcore.gradients.accumulate import gradient_of
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.offload import offload_optimizer
from mpcore.sharding import shardings
from mpcore.sharding.state_dict import full_tensor
from tests.calls import Calls
from tests.equality import close, draw, full_gradients
from tests.layers.test_block import Model
from tests.pool import mesh, on_ranks


def full_main_gradients(model):
    declared = shardings(model)
    assert all(p.grad is None for p in model.parameters()), ".grad must stay None"
    found = {name: gradient_of(p) for name, p in model.named_parameters()}
    return {name: full_tensor(grad, declared[name]) for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize(("sequence", "tied"), [(None, True), (1, True), (1, False)])
@on_ranks(2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4)))
def test_pitfall_32_main_gradients_are_the_dense_ones_tied_or_not(sequence, tied):
    """Two micro-batches of unequal token counts, then all that reads gradients, against the dense model's `.grad`."""
    m = mesh(tp=torch.distributed.get_world_size())
    torch.manual_seed(2)
    dense, model = Model(tied=tied).double(), Model(sequence=sequence, tied=tied, tp=m.tp).double()
    load_full_state_dict(model, full_state_dict(dense))
    main_gradients(main_gradients(model))
    ids = torch.arange(36).reshape(3, 12) * 7 % 21
    targets = ids.flip(1).clone()
    targets[1, 3:] = -100
    for _ in range(2):  # the second step begins anew
        for rows in (slice(0, 2), slice(2, 3)):
            model(ids[rows], targets[rows], reduction="sum").backward()
        reduce_gradients(model)
        dense.zero_grad()
        dense(ids, targets, reduction="sum").backward()
        want, got = full_gradients(dense), full_main_gradients(model)
        assert want.keys() == got.keys()
        for name in want:
            close(got[name], want[name], name)
        norm = grad_norm(model, m)
        close(norm, grad_norm(dense, Mesh()), "norm")
        clip_gradients(model, 0.3 * norm.item(), norm)
        for name, got in full_main_gradients(model).items():
            close(got, 0.3 * want[name], f"clipped {name}")
        zero_gradients(model.parameters())
        assert all(gradient_of(p) is None for p in model.parameters())


class Tied(nn.Module):
    """A weight used three times: as a table, as a head, and by an operation that knows nothing of main gradients."""

    def __init__(self, dtype):
        super().__init__()
        self.table = VocabParallelEmbedding(11, 6, dtype=dtype)
        self.head = ColumnParallelLinear(6, 11, bias=False, dtype=dtype)
        self.head.weight = self.table.weight
        self.down = RowParallelLinear(11, 3, dtype=dtype)

    def forward(self, ids):
        return self.down(self.head(self.table(ids).tanh())).square().sum() + self.table.weight.sin().sum()


def run_tied(dtype, main, fused=True, batches=4):
    torch.manual_seed(3)
    model = Tied(torch.float64)
    ids = torch.arange(4 * batches).reshape(batches, 4) * 5 % 11
    model.to(dtype)
    if main:
        main_gradients(model)
    if not fused:
        for layer in (model.head, model.down):
            layer.forward = partial(unfused, layer)
    for row in ids:
        model(row[None]).backward()
    return {name: gradient_of(p) for name, p in model.named_parameters()}


def unfused(layer, x):
    return nn.functional.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("fused", [True, False])
def test_pitfall_32_a_weight_used_three_times_gets_each_gradient_once(fused):
    want, got = run_tied(torch.float64, False), run_tied(torch.float64, True, fused)
    for name in want:
        close(got[name], want[name], name)


def test_the_product_of_half_precision_is_not_rounded():
    layer = main_gradients(ColumnParallelLinear(6, 5, dtype=torch.bfloat16))
    x, dy = draw(1, 7, 6).bfloat16(), draw(2, 7, 5).bfloat16()
    layer(x).backward(dy)
    close(layer.weight.main_grad, dy.float().t() @ x.float(), "weight", 1e-6)
    close(layer.bias.main_grad, dy.float().sum(0), "bias", 1e-6)
    assert not torch.equal(layer.weight.main_grad, layer.weight.main_grad.bfloat16().float())
    simulate(check_gathered_product, tp=2)


def test_on_a_gpu_the_product_of_half_precision_adds_by_itself():
    with fake_tensors(stands_for_gpu=True):
        layer = main_gradients(ColumnParallelLinear(6, 5, dtype=torch.bfloat16))
        y = layer(torch.empty(7, 6, dtype=torch.bfloat16))
        with Calls() as calls, FlopCounterMode(display=False) as counter:
            y.backward(torch.empty_like(y))
    assert counter.get_total_flops() == 2 * 7 * 6 * 5
    assert layer.weight.grad_added_to_main_grad
    made = [out for _, args, out in calls.found if not any(out is given for given in args)]
    assert not any(isinstance(x, torch.Tensor) and (x.dtype, x.shape) == (torch.float32, (5, 6)) for x in made)


def check_gathered_product(on):
    layer = main_gradients(ColumnParallelLinear(6, 10, dtype=torch.bfloat16, tp=on.tp, sequence_parallel=True))
    x, dy = draw(1, 1, 8, 6).bfloat16(), draw(2, 1, 8, 10).bfloat16().chunk(2, -1)[on.tp.rank]
    layer(x.chunk(2, 1)[on.tp.rank]).backward(dy)
    close(layer.weight.main_grad, dy[0].float().t() @ x[0].float(), "weight", 1e-6)
    close(layer.bias.main_grad, dy[0].float().sum(0), "bias", 1e-6)


def test_under_autocast_the_float32_parameters_get_unrounded_products():
    layer = main_gradients(RowParallelLinear(6, 5, bias=False))
    x, dy = draw(1, 7, 6).float(), draw(2, 7, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    close(layer.weight.main_grad, dy.float().t() @ x.bfloat16().float(), "weight", 1e-6)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, offload_optimizer], ids=["here", "offloaded"])
def test_an_optimizer_that_reads_grad_alone_refuses_main_gradients(wrap):
    model = main_gradients(ColumnParallelLinear(3, 4))
    optimizer = wrap(guard_optimizer(torch.optim.AdamW(model.parameters()), model))
    model(draw(0, 2, 3).float()).sum().backward()
    with pytest.raises(ValueError, match=r"shape \(4, 3\) is in main_grad, and AdamW reads .grad alone, which is None"):
        optimizer.step()
    before = model.weight.detach().clone()
    for p in model.parameters():
        p.grad = gradient_of(p)
    guard_optimizer(torch.optim.AdamW(model.parameters()), model).step()
    assert not torch.equal(model.weight, before)


@on_ranks(2)
def test_main_gradients_under_data_parallelism():
    m = mesh(dp=2)
    model = shard_data_parallel(ColumnParallelLinear(4, 4), m)
    with pytest.raises(ValueError, match="weight is sharded over data: its gradients accumulate in fully_shard's"):
        main_gradients(model)
    same = shard_data_parallel(main_gradients(ColumnParallelLinear(4, 4)), m, zero=0)
    same(torch.full((1, 4), 1.0 + m.data.rank)).sum().backward()
    reduce_gradients(same)
    assert torch.equal(gradient_of(same.weight), torch.full((4, 4), 3.0))
