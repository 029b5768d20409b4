"""Layers that are replaced: an embedding with its own forward, a shared layer, experts; and the summary of a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.interop.parallelize import swap
from mpcore.interop.parallelize.plan import Experts, Hidden, resolve
from mpcore.interop.parallelize.swap import cut_model, experts_shardings
from mpcore.mesh.axis import Axis

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
        return cut(table(Doubled), {"0": "vocab"}, axis)(ids)

    assert all(torch.equal(found, 2 * TABLE[ids]) for found in mp.simulate(lambda mesh: work(mesh.tp), tp=2))
    with pytest.raises(ValueError, match="7"):
        cut(table(Doubled), {"0": "vocab"})(torch.tensor([7]))


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


@pytest.mark.parametrize(("held", "message"), [
    ({"w": (3, 4, 6), "b": (3, 4)}, "^3 experts are not a multiple of the ep size 2: take one of 1, 3$"),
    ({"w": (4, 4, 6), "v": (2, 4, 6)}, r"different numbers of experts \(w 4, v 2\)"),
    ({"b": (4,)}, r"different numbers of experts \(none\)"),
])  # fmt: skip
def test_experts_that_ep_cannot_shard(held, message):
    with pytest.raises(ValueError, match=message):
        experts_shardings(experts(**held), Experts(ep=Axis(2, role="ep"), etp=Axis(role="etp")), ONE)
