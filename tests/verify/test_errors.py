"""An error of the user's forward or loss is reported with the layer that raised it and a likely cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.tools.verify import parse_layout
from mpcore.tools.verify.errors import explained, why_sizes
from mpcore.training.wrong_width import wrong_width

TP2 = mp.Axis(2, 0, name="tp")


class Residual(nn.Module):
    """Adds the output of a linear layer to its input. With `size` the output has another size."""

    def __init__(self, size: int = 0, **options: Any) -> None:
        super().__init__()
        self.fc, self.size = mp.ColumnParallelLinear(4, 4, **options), size

    def forward(self, x: Tensor) -> Tensor:
        return x + x.new_ones(self.size or 1)


def loss(output: Tensor) -> Tensor:
    if output.dim() > 2:
        raise ValueError("logits and target\ndon't fit")
    return output.sum()


def said(model: nn.Module, x: Tensor, layout: str = "tp2sp") -> str:
    try:
        loss(model(x))
    except (RuntimeError, ValueError) as error:
        return explained(error, model, loss, parse_layout(layout))
    raise AssertionError("it ran")


SIZES = "The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 1"


def test_an_error_names_the_innermost_layer_whose_forward_was_running_or_the_loss():
    blocks = nn.Sequential(nn.Identity(), nn.Sequential(Residual(16)))
    assert said(blocks, torch.ones(2, 8), "dp2") == f"{SIZES} (in layer 1.0)"
    assert said(blocks[1][0], torch.ones(2, 8), "dp2") == f"{SIZES} (in the model's own forward)"
    fits = nn.Sequential(nn.Identity(), Residual())
    assert said(fits, torch.ones(2, 8, 1), "dp2") == "logits and target don't fit (in the loss)"
    assert explained(ValueError("a (in layer b)"), fits, loss, parse_layout("dp2")) == "a (in layer b)"
    assert explained(ValueError("a"), fits, loss, parse_layout("dp2")) == "a", "from nowhere"
    pos = nn.Sequential(mp.PositionEmbedding(4, 4))
    told = said(pos, torch.ones(1, 8, 4), "dp2")
    assert told == "sequence length 8 is longer than the model's 4 positions (in layer 0)"


def test_under_sequence_parallelism_the_layers_built_without_it_are_named():
    on = {"tp": TP2, "sequence_parallel": True}
    hint = "Built without sequence_parallel=True: {}: pass it to every layer"
    one = nn.Sequential(Residual(**on), Residual(16, tp=TP2))
    assert said(one, torch.ones(2, 8)) == f"{SIZES} (in layer 1). {hint.format('1.fc')}"
    assert "Built" not in said(one, torch.ones(2, 8), "tp2")
    many = nn.Sequential(Residual(16, **on), *[Residual(tp=TP2) for _ in range(7)])
    assert said(many, torch.ones(2, 8)).endswith(hint.format("1.fc, 2.fc, 3.fc, 4.fc, 5.fc and 2 more"))
    outer = nn.Sequential(Residual(16, **on), mp.ParallelAttention(8, 2, tp=TP2))
    assert said(outer, torch.ones(2, 8)).endswith(hint.format("1")), "without the layers that it built"
    for others in (Residual(**on), Residual(), nn.LayerNorm(8), mp.LayerNorm(8)):  # without tp: replicated by intent
        assert "Built" not in said(nn.Sequential(Residual(16, **on), others), torch.ones(2, 8))
    assert "Built" not in said(nn.Sequential(Residual(16, tp=TP2)), torch.ones(2, 8)), "none has it"


def test_two_sizes_of_which_one_is_tp_times_the_other_are_explained():
    said = "RuntimeError: The size of tensor a (16) must match the size of tensor b ({}) at non-singleton dimension 1"
    assert why_sizes(said.format(32), parse_layout("tp2sp")).startswith(". A rank holds 16 of 32 tokens under seq")
    assert why_sizes(said.format(8), parse_layout("tp2")).startswith(". A rank holds 8 of the 16 features")
    for other, layout in ((33, "tp2sp"), (32, "tp4"), (16, "tp2"), (16, "dp2")):
        assert why_sizes(said.format(other), parse_layout(layout)) == ""
    assert why_sizes("RuntimeError: no sizes", parse_layout("tp2")) == ""


def told_of(module: nn.Module, x: Any, mesh: mp.Mesh) -> Any:
    try:
        module(x)
    except (RuntimeError, ValueError) as error:
        found = wrong_width(error, mesh)
        return found and str(found)
    raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("norm", "argument"),
    [(nn.LayerNorm, "normalized_shape"), (nn.RMSNorm, "normalized_shape"), (mp.LayerNorm, "dim"), (mp.RMSNorm, "dim")],
)
def test_a_norm_whose_input_is_sharded_is_named(norm, argument):
    tp2 = mp.Mesh(tp=mp.Axis(2, 0, name="tp"))
    told = told_of(nn.Sequential(nn.Identity(), norm(4)), torch.ones(5, 2), tp2)
    library = norm.__module__.partition(".")[0].replace("torch", "nn").replace("mpcore", "mp")
    assert told.startswith(
        f"{library}.{norm.__name__} 1: its input has 2 features, and {argument} is 4. If the input is"
    )
    assert told.endswith("or behind gather_output=True")
    assert told_of(nn.Sequential(norm(4)), torch.ones(5, 2), mp.Mesh()) is None
