"""The calls of a pipeline in one process: what is cut, checked, timed and passed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.pipeline.engine import Pipeline


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


def pipe(model: nn.Module | None = None, micro_batches: int = 2, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(model or nn.Linear(3, 2).double(), mp.Mesh(), micro_batches, **{"loss": squares, **options})


X, T = torch.arange(12.0, dtype=torch.float64).view(4, 3), torch.ones(4, 2, dtype=torch.float64)


@pytest.mark.parametrize(("given", "said"), [
    ({"x": X[:3], "target": T[:3]}, "a batch of 3 is not a multiple of 2 micro-batches: pad it to 4 with rows"),
    ({"x": X[:0], "target": T[:0]}, "a batch of 0 is not a multiple of 2 micro-batches: pad it to 2 with rows"),
    ({"x": [X], "target": [T]}, "x is 1 tensors, and x is a list: give a list with one tensor for each of 2"),
    ({"x": [X, X], "target": T}, "target is a Tensor, and x is a list"),
    ({"x": [X, X], "target": [T, T], "m": [T]}, "m is 1 tensors, and x is a list"),
    ({"x": X, "target": T[:2]}, "target has 2 rows, x has 4"),
    ({"x": [X[:2], X], "target": [T[:2], T[:2]]}, "target has 2 rows, x has 4"),
    ({"x": X, "target": None}, "target is a NoneType"), ({"x": torch.tensor(1.0), "target": T}, "x is a tensor"),
    ({"x": None, "target": T}, "x is a NoneType"), ({"x": X, "target": T, "scale": 0.5}, "scale is a float"),
    ({"x": X, "target": T, "scale": torch.ones(())}, "scale is a tensor without rows"),
    ({"x": X, "target": T, "mask": None}, "mask is a NoneType: arguments are tensors with one row a sample"),
])  # fmt: skip
def test_what_cant_be_cut_is_refused_with_the_numbers(given, said):
    with pytest.raises(ValueError, match=said):
        pipe().forward_backward(**given)


def check_failing(of: str, schedule: str, size: int) -> None:
    """The step goes on with zeros, so that no other rank waits for a message, and all are told at its end."""
    on = mp.build_mesh(pp=size, device_type="cpu")
    stage = Failing(of) if on.pp.rank == size - 1 else nn.Linear(3, 3).double()
    line, x = Pipeline(stage, on, 2, lambda y, t: y.sum(), schedule), torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises((OSError, ValueError), match="in backward"):
        line.forward_backward(x.requires_grad_(size == 1), x)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("of", "schedule"), [("x", "1f1b"), ("weight", "1f1b"), ("x", "zb"), ("weight", "zb")])
def test_an_error_in_backward_is_raised_on_every_rank(of, schedule, size):
    mp.simulate(check_failing, of, schedule, size, ranks=size)


class Options(nn.Linear):
    """Adds what it is told."""

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return super().forward(x) + more


def test_a_forward_has_one_argument_for_all_batches_or_one_for_each():
    model = Options(3, 2).double()
    line = pipe(model)
    with torch.no_grad():
        plain = nn.Linear.forward(model, X)
    batches = [X[:1], X[1:]]
    for more, want in ((torch.tensor(2.0), [2.0, 2.0]), ([torch.tensor(3.0), torch.tensor(4.0)], [3.0, 4.0])):
        got = list(line.forward(batches, more=more))
        torch.testing.assert_close(got[0], plain[:1] + want[0])
        torch.testing.assert_close(got[1], plain[1:] + want[1])
    assert line.from_last(X) is X
    assert line.last_rank == 0


class Fails(torch.autograd.Function):
    """Raises in the backward of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        raise OSError("in backward")


class Failing(nn.Module):
    def __init__(self, of: str) -> None:
        super().__init__()
        self.of, self.weight = of, nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Fails.apply(x) * self.weight if self.of == "x" else x * Fails.apply(self.weight)
