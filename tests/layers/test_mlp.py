"""The feed-forward layer: dense equals the formula in torch, sharded equals dense, for every activation."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpcore import Axis, ParallelMLP
from mpcore.tools.invariant import TreeSums, make_invariant
from tests.equality import FEWER_SIZES, close, draw, same_layer
from tests.pool import on_ranks

B, T, D = 2, 12, 4
FORMULAS = {
    "swiglu": lambda h: F.silu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :],
    "geglu": lambda h: F.gelu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :],
    "geglu_tanh": lambda h: F.gelu(h[..., : h.shape[-1] // 2], approximate="tanh") * h[..., h.shape[-1] // 2 :],
    "gelu": F.gelu, "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"), "relu": lambda h: torch.clamp(h, min=0),
    "silu": lambda h: h / (1 + torch.exp(-h)), "relu_squared": lambda h: torch.clamp(h, min=0) ** 2,
    F.glu: lambda h: h[..., : h.shape[-1] // 2] * torch.sigmoid(h[..., h.shape[-1] // 2 :]),
    nn.Tanh(): lambda h: 1 - 2 / (torch.exp(2 * h) + 1),
}  # fmt: skip
SHARDED = ("geglu", "gelu", "relu_squared", F.glu, nn.Tanh())  # a kind each, of two and of one projection


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", FORMULAS)
def test_dense_is_the_formula(activation, bias):
    mlp = ParallelMLP(D, 10, activation, bias=bias).double()
    p = {name: q.detach().clone().requires_grad_() for name, q in mlp.named_parameters()}
    x, x_torch = (draw(1, B, T, D).requires_grad_() for _ in range(2))
    y = mlp(x)
    h = FORMULAS[activation](F.linear(x_torch, p["up.weight"], p.get("up.bias")))
    y_torch = F.linear(h, p["down.weight"], p.get("down.bias"))
    dy = draw(2, B, T, D)
    y.backward(dy)
    y_torch.backward(dy)
    close(y.detach(), y_torch.detach(), "y")
    close(x.grad, x_torch.grad, "dx")
    for name, q in mlp.named_parameters():
        close(q.grad, p[name].grad, name)


def check_mlp(activation, hidden, bias, sequence, shape, frozen=False):
    options = {} if sequence is None else {"sequence_parallel": True, "sequence_dim": sequence}

    def build(**axes):
        return ParallelMLP(D, hidden, activation, bias=bias, **options, **axes).requires_grad_(not frozen)

    same_layer(build, (*shape, D), split=sequence, gather=None if sequence is None else (sequence,))


@on_ranks(*FEWER_SIZES)
def test_sharded_equals_dense_for_every_activation():
    for activation, hidden, bias in itertools.product(SHARDED, (12, 10), (True, False)):
        check_mlp(activation, hidden, bias, None, (B, T))
        check_mlp(activation, hidden, bias, 1, (B, T))
    for activation in ("swiglu", "gelu"):
        check_mlp(activation, 10, True, 0, (T, B))
        check_mlp(activation, 10, True, None, (1, 1))
        check_mlp(activation, 10, True, None, (0, T))
        check_mlp(activation, 10, True, None, (B, T), frozen=True)
        check_mlp(activation, 10, True, 1, (B, T), frozen=True)


@pytest.mark.parametrize("activation", ["silu", "swiglu", "geglu", nn.Tanh()])
def test_on_a_virtual_axis_each_shard_is_activated_by_itself(activation):
    """The last features of a tensor are computed without vector instructions, and may have other bits."""
    torch.manual_seed(0)
    mlp, x = ParallelMLP(8, 12, activation, tp=Axis(sums=TreeSums(4))), torch.randn(2, 3, 8)
    make_invariant(mlp)
    hidden = mlp.up(x).chunk(mlp.parts, -1)
    shards = [torch.cat(each, -1) for each in zip(*(block.chunk(4, -1) for block in hidden), strict=True)]
    assert mlp(x).equal(mlp.down(torch.cat([mlp.activation(shard) for shard in shards], -1)))
