"""Layers without an invariant form are refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import mpcore as mp
from mpcore.interop.lora import add_lora
from mpcore.sharding.declare import Shard
from mpcore.tools.invariant import TreeSums, invariant_mesh, make_invariant

B, T, D = 2, 8, 12
V, PAIR = mp.Axis(sums=TreeSums(4)), mp.Axis(2, sums=TreeSums(4))


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
