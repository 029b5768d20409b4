"""Layers that are replaced: an embedding with its own forward, a shared layer, experts; and the summary of a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.interop.parallelize import swap
from mpcore.interop.parallelize.plan import Experts, Hidden, Replicate, resolve
from mpcore.interop.parallelize.summary import Summary, SummaryRow, parallelize_summary
from mpcore.interop.parallelize.swap import cut_model, experts_shardings
from mpcore.layers.linear import ColumnParallelLinear
from mpcore.mesh.axis import Axis
from mpcore.sharding.declarations import declarations

ONE = Axis(2, 1, name="tp")


def cut(model, plan, axis=ONE):
    return cut_model(model, resolve(model, plan), axis)


TABLE = torch.arange(28.0).view(7, 4)


class Doubled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


def table(kind=nn.Embedding, **options):
    model = nn.Sequential(kind(7, 4, **options))
    with torch.no_grad():
        model[0].weight.copy_(TABLE)
    return model


def test_an_embedding_with_its_own_forward_looks_up_this_ranks_rows():
    ids = torch.tensor([[0, 3, 4, 6]])

    def work(axis):
        model = cut(table(Doubled), {"0": "vocab"}, axis)
        return model(ids)

    assert all(torch.equal(found, 2 * TABLE[ids]) for found in mp.simulate(lambda mesh: work(mesh.tp), tp=2))
    with pytest.raises(ValueError, match="7"):
        cut(table(Doubled), {"0": "vocab"})(torch.tensor([7]))


def test_one_layer_under_two_names_and_a_parameter_with_a_second_name():
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Module()})
    model["c"].bias = layer.bias
    model = cut(model, {"a": "colwise"})
    assert model["a"] is model["b"]
    assert type(model["a"]) is ColumnParallelLinear
    assert model["c"].bias is model["a"].bias
    names = {name: sharding for name, _, sharding in declarations(model)}
    assert names["a.bias"].shards[0].dim == 0
    assert names["a.bias"].shape == (4,)
    lone = cut(nn.Linear(4, 4), {"": "colwise"})
    assert type(lone) is ColumnParallelLinear


def experts(**held):
    module = nn.Module()
    for name, value in held.items():
        if isinstance(value, tuple):
            module.register_parameter(name, nn.Parameter(torch.arange(float(torch.Size(value).numel())).view(value)))
        else:
            setattr(module, name, value)
    return module


PACKED = {"gate_up_proj": Hidden(-2, blocks=2), "down_proj": Hidden(-1)}


@pytest.mark.parametrize(
    ("held", "hidden"),
    [
        ({"is_transposed": False, "is_concatenated": True, "gate_up_proj": (2, 8, 4), "down_proj": (2, 4, 4)}, PACKED),
        ({"is_transposed": True, "is_concatenated": True, "gate_up_proj": (2, 4, 8), "down_proj": (2, 4, 4)},
         {"gate_up_proj": Hidden(-1, blocks=2), "down_proj": Hidden(-2)}),
        ({"is_transposed": False, "is_concatenated": False, "gate_up_proj": (2, 8, 4), "down_proj": (2, 4, 4)},
         {"gate_up_proj": Hidden(-2, unit=2), "down_proj": Hidden(-1)}),
        ({"is_transposed": False, "is_concatenated": True, "up_proj": (2, 4, 4), "down_proj": (2, 4, 4)},
         {"up_proj": Hidden(-2), "down_proj": Hidden(-1)}),
        ({"is_transposed": False, "is_concatenated": True, "gate_up_proj": (2, 8, 4), "gate_up_proj_bias": (2, 8),
          "down_proj": (2, 4, 4)}, PACKED | {"gate_up_proj_bias": Hidden(-1, blocks=2)}),
        ({"is_transposed": True, "is_concatenated": False, "up_proj": (2, 4, 4), "up_proj_bias": (2, 4),
          "down_proj": (2, 4, 4)}, {"up_proj": Hidden(-1), "up_proj_bias": Hidden(-1), "down_proj": Hidden(-2)}),
    ],
)  # fmt: skip
def test_how_the_parameters_of_hugging_faces_experts_lie(held, hidden):
    module = experts(**held)
    assert swap._hidden_of(module) == hidden
    assert experts_shardings(module, Experts(), ONE) == experts_shardings(module, Experts(hidden), ONE)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"w": (3, 4, 6), "b": (3, 4)}, "^3 experts are not a multiple of the ep size 2: take one of 1, 3$"),
        ({"w": (4, 4, 6), "v": (2, 4, 6)}, r"different numbers of experts \(w 4, v 2\)"),
        ({"b": (4,)}, r"different numbers of experts \(none\)"),
    ],
)
def test_experts_that_ep_cannot_shard(held, message):
    with pytest.raises(ValueError, match=message):
        experts_shardings(experts(**held), Experts(ep=Axis(2, role="ep"), etp=Axis(role="etp")), ONE)


def test_a_summary_has_a_row_for_parameters_that_are_alike():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 6) for _ in range(3)]), "norm": nn.LayerNorm(4)})
    model["small"] = nn.Linear(2, 2, bias=False).half()
    model["heads"] = nn.LayerNorm(2)
    cut(
        model,
        {"layers.*": "colwise", "norm": "replicate", "heads": Replicate(partial_gradient=True), "small": "rowwise"},
    )
    found = parallelize_summary(model)
    columns = "dimension 0 sharded over tp 2"
    assert found.rows == (
        SummaryRow("layers.*.weight", columns, 3, 3 * 96, 3 * 48),
        SummaryRow("layers.*.bias", columns, 3, 3 * 24, 3 * 12),
        SummaryRow("norm.weight", "whole, as the plan leaves it", 1, 16, 16),
        SummaryRow("norm.bias", "whole, as the plan leaves it", 1, 16, 16),
        SummaryRow("small.weight", "dimension 1 sharded over tp 2", 1, 8, 4),
        SummaryRow("heads.weight", "whole, its gradient summed over tp", 1, 8, 8),
        SummaryRow("heads.bias", "whole, its gradient summed over tp", 1, 8, 8),
    )
    assert found.share == (3 * 120 + 8) / (3 * 120 + 8 + 32 + 16)
    assert str(found).splitlines()[0] == f"layers.*.weight  x3            288 ->            144 bytes  {columns}"
    assert str(found).splitlines()[-1] == "88% is sharded: 416 -> 232 bytes on this rank"
    assert str(Summary((), 0.0)) == "0% is sharded: 0 -> 0 bytes on this rank"
    assert parallelize_summary(nn.ReLU()) == Summary((), 0.0)
