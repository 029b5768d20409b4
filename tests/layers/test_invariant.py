"""Layers on an axis with a virtual degree compute what the layers of one rank do: values and every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import mpcore as mp
from mpcore.interop.lora import add_lora
from mpcore.sharding.declare import Shard
from mpcore.tools.invariant import TreeSums, invariant_mesh, make_invariant
from tests.equality import close, draw

B, T, D = 2, 8, 12
V, PAIR = mp.Axis(sums=TreeSums(4)), mp.Axis(2, sums=TreeSums(4))
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "column": lambda **on: mp.ColumnParallelLinear(D, 16, **on),
    "column, gathered": lambda **on: mp.ColumnParallelLinear(D, 16, bias=False, gather_output=True, **on),
    "column, blocks": lambda **on: mp.ColumnParallelLinear(D, 16, blocks=(4, 12), **on),
    "row": lambda **on: mp.RowParallelLinear(D, 5, **on), "qkv": lambda **on: mp.QKVParallelLinear(D, 4, 4, 2, **on),
    "gate and up": lambda **on: mp.GateUpParallelLinear(D, 8, **on),
    "mlp": lambda **on: mp.ParallelMLP(D, 16, "swiglu", **on),
    "mlp, gelu": lambda **on: mp.ParallelMLP(D, 16, "gelu", bias=True, **on),
    "attention": lambda **on: mp.ParallelAttention(D, 4, head_dim=4, **on),
    "layer norm": lambda **on: mp.LayerNorm(D, **on), "rms norm": lambda **on: mp.RMSNorm(D, **on),
}  # fmt: skip


def results(layer: nn.Module, x: torch.Tensor, weight: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The output, and the gradients of the input and of every parameter that has one."""
    y = layer(x)
    y = torch.cat([each.flatten(2) for each in y], -1) if isinstance(y, tuple) else y
    (y * draw(9, *y.shape)).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}
    return {"y": y.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_on_virtual_shards_is_that_of_one_rank(kind):
    plain, virtual = (LAYERS[kind](tp=tp, dtype=torch.float64) for tp in (mp.Axis(), V))
    for i, p in enumerate(plain.parameters()):
        p.data = draw(i, *p.shape)
    virtual.load_state_dict(plain.state_dict())
    make_invariant(virtual)
    for frozen, wanted in ((), True), (("weight",), True), (("bias",), False):
        found = []
        for layer in (plain, virtual):
            layer.zero_grad()
            for name, p in layer.named_parameters():
                p.requires_grad_(not name.endswith(frozen) if frozen else True)
            found.append(results(layer, draw(8, B, T, D).requires_grad_(wanted)))
        want, got = found
        assert want.keys() == got.keys()
        assert ("x" in got) == wanted
        for name in want:
            close(got[name], want[name], f"{kind}: {name}")


class Halved(mp.RowParallelLinear):
    """A layer of a user's own, whose forward is another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize("targets", ["all-linear", "0"])
def test_pitfall_45_an_adapter_has_no_invariant_numerics(targets):
    head = mp.ColumnParallelLinear(D, 16, tp=V)
    model = nn.Sequential(head)
    model.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match=r"TreeSums\(degree=4\)"):
        add_lora(model, targets=targets)


def test_pitfall_45_a_subclass_has_no_invariant_form():
    tp = invariant_mesh(mp.build_mesh(device_type="cpu"), 4).tp
    model = nn.Sequential(mp.ColumnParallelLinear(D, 16, tp=tp), Halved(16, 4, tp=tp))
    with pytest.raises(ValueError, match=r"1, a Halved: "):
        make_invariant(model)
    assert type(model[0]) is mp.ColumnParallelLinear, "nothing is changed"


def replaced() -> nn.Module:
    layer = mp.RowParallelLinear(16, D, tp=V)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "ColumnParallelLinear: .*axis of size 1 has no virtual degree": lambda: mp.ColumnParallelLinear(D, 16),
    "RMSNorm: .*has no virtual degree": lambda: mp.RMSNorm(D, tp=mp.Axis(2)),
    "RowParallelLinear: in_features 6 is not a multiple of the virtual degree 4": lambda: mp.RowParallelLinear(
        6, D, tp=V
    ),
    "QKVParallelLinear: out_features 4 / 2 = 2 is not": lambda: mp.QKVParallelLinear(D, 4, 2, 2, tp=V),
    "ParallelAttention: .*qk_norm": lambda: mp.ParallelAttention(8, 4, qk_norm=True, tp=V),
    "ParallelAttention: .*alibi": lambda: mp.ParallelAttention(8, 4, alibi=True, tp=V),
    "ParallelAttention: .*sinks": lambda: mp.ParallelAttention(8, 4, sinks=True, tp=V),
    "ParallelAttention: .*memory": lambda: mp.ParallelAttention(8, 4, memory_dim=4, tp=V),
    "ColumnParallelLinear: .*shard": lambda: mp.ColumnParallelLinear(
        D, 8, shard=Shard(PAIR, 0, (((4, 8),), ((0, 4),))), tp=PAIR
    ),
    "ColumnParallelEmbedding: ": lambda: mp.layers.ColumnParallelEmbedding(4, 4, tp=V),
    "Router: ": lambda: mp.layers.Router(4, 4, 2),
    "RowParallelLinear: .*a forward of its own": replaced,
    "ParametrizedColumnParallelLinear: ": lambda: weight_norm(mp.ColumnParallelLinear(D, 16, tp=V)),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_layer_without_an_invariant_form_is_named(said):
    with pytest.raises(ValueError, match=f"^a, a {said}"):
        make_invariant(nn.ModuleDict({"a": REFUSED[said]()}))


def test_an_invariant_layer_takes_no_fp8_and_no_bias_of_scores():
    linear, attention = mp.RowParallelLinear(16, D, tp=V), mp.ParallelAttention(D, 4, head_dim=4, tp=V)
    model = nn.Sequential(linear, attention)
    for _ in range(2):  # the second call finds the forms of the first
        make_invariant(model)
    with pytest.raises(ValueError, match="FP8"):
        mp.parallel.convert_to_fp8([linear])
    with pytest.raises(ValueError, match="bias on the scores"):
        attention(torch.ones(B, T, D), bias=torch.zeros(4, T, T))
