"""The first operator that isn't finite: which values are allowed, and what the message says of the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcore.tools.simulation import nonfinite
from mpcore.tools.simulation.nonfinite import FiniteCheck, NonFiniteError

INF, NAN = torch.inf, torch.nan


def message(run: Callable[[], object], *stages: nn.Module, doing: str = "") -> str:
    with pytest.raises(NonFiniteError) as error, FiniteCheck(stages, doing):
        run()
    return str(error.value)


def ends(run: Callable[[], Any], *stages: nn.Module) -> Any:
    with FiniteCheck(stages):
        return run()


ONE, ZERO = torch.ones(4), torch.zeros(4)


@pytest.mark.parametrize("run", [
    lambda: torch.full((2,), -INF), lambda: ONE.masked_fill(ONE > 0, INF) + 1, lambda: torch.full((2,), INF).sum() * 2,
    lambda: torch.cat([torch.full((2,), INF), ONE]),
    lambda: torch.softmax(ONE.masked_fill(torch.tensor([True, False, False, False]), -INF), -1),
    lambda: torch.zeros(3).fill_(INF).add_(1), lambda: ONE.clone().copy_(torch.full((4,), INF)),
    lambda: torch.empty(9), lambda: torch.empty(9).mul(0).sum(), lambda: torch.empty(9).add_(1),
    lambda: torch.empty_like(ONE).clone(), lambda: torch.empty(8).view(2, 4)[1] * 2,
    lambda: torch.empty(9).fill_(1).sum(), lambda: torch.full((2,), INF).view(1, 2).t(), lambda: torch.arange(4) // 1,
    lambda: torch.tensor([True]) & torch.tensor([False]), lambda: torch.empty(4, device="meta") / 0,
    lambda: torch.complex(ONE, ONE) * 2, lambda: ONE.to(torch.float8_e4m3fn).to(torch.float32),
])  # fmt: skip
def test_infinities_that_a_program_writes_and_memory_that_nobody_wrote_are_allowed(run):
    ends(run)


def test_freed_memory_excuses_nothing():
    def run() -> None:
        for _ in range(3):
            x = torch.full((1000,), INF)
            del x
            torch.div(ONE, ZERO)

    assert "div" in message(run)


@pytest.mark.parametrize(("run", "operator", "kind", "count", "inputs"), [
    (lambda: ONE / ZERO, "aten.div.Tensor", "infinity", "4 of 4 elements of [4] float32", "its inputs are finite"),
    (lambda: ZERO / ZERO, "aten.div.Tensor", "NaN", "4 of 4", "its inputs are finite"),
    (lambda: (ONE - 1).log_(), "aten.log_.default", "infinity", "4 of 4", "its inputs are finite"),
    (lambda: torch.tensor([1.0, 400, 3]).double().mul(9).exp(), "aten.exp.default", "infinity",
     "1 of 3 elements of [3] float64", "its inputs are finite"),
    (lambda: torch.ones(2, 3, dtype=torch.bfloat16) / 0, "aten.div.Tensor", "infinity",
     "6 of 6 elements of [2, 3] bfloat16", "its inputs are finite"),
    (lambda: torch.full((2,), INF) - INF, "aten.sub.Tensor", "NaN", "2 of 2", "not finite already"),
    (lambda: torch.ones(3).div_(0), "aten.div_.Tensor", "infinity", "3 of 3", "its inputs are finite"),
    (lambda: torch.full((2,), INF) * 0, "aten.mul.Tensor", "NaN", "2 of 2", "not finite already"),
    (lambda: torch.zeros(2).add_(NAN), "aten.add_.Tensor", "NaN", "2 of 2", "its inputs are finite"),
    (lambda: torch.sqrt(torch.tensor([4.0, -1.0])), "aten.sqrt.default", "NaN", "1 of 2", "its inputs are finite"),
    (lambda: torch.topk(torch.tensor([1.0, NAN]), 1), "aten.topk.default", "NaN", "1 of 1", "not finite already"),
    (lambda: torch.add(ONE, torch.tensor(3e38)).mul(torch.tensor(9e9)), "aten.mul.Tensor", "infinity", "4 of 4",
     "its inputs are finite"),
    (lambda: torch.div(ONE, ZERO, out=torch.empty(4)), "aten.div.out", "infinity", "4 of 4", "its inputs are finite"),
])  # fmt: skip
def test_the_message_has_the_operator_the_count_and_the_place(run, operator, kind, count, inputs):
    said = message(run)
    assert said.startswith(
        f"{operator} made {kind} outside of the model's modules (neither forward nor backward): {count}"
    )
    assert inputs in said
    assert re.search(r"; at \S*test_nonfinite.py:\d+$", said), said
    assert message(run, doing="step 7").startswith(f"step 7: {operator} made")


def test_a_value_written_in_place_over_a_bad_one_is_that_ones_fault():
    bad = torch.tensor([NAN, 1.0])
    said = message(lambda: bad.mul_(2))
    assert "an input was not finite already" in said
    ends(lambda: bad.copy_(torch.ones(2)))
    bad.fill_(NAN)
    ends(lambda: bad.zero_())


class Divide(nn.Module):
    """x / by, and in backward dy / by."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.by = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return _Divide.apply(x, *self.by)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.by = backward
        return x / forward

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy / ctx.by, None, None


def model(forward: float = 1.0, backward: float = 1.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Divide(forward, backward)), nn.Linear(3, 1))


def test_a_node_behind_the_modules_is_none_of_theirs():
    layer = nn.Linear(2, 2)

    def run() -> None:
        y = layer(torch.ones(1, 2))
        (_Divide.apply(y, 1.0, 0.0)).sum().backward()

    assert "outside of the model's modules (backward)" in message(run, layer)


def test_a_node_of_a_submodule_is_its_own_also_where_its_output_is_the_models():
    inner = nn.Sequential(nn.Linear(2, 2), Divide(1.0, 0.0))
    said = message(lambda: inner(torch.ones(1, 2)).sum().backward(), inner)
    assert "in 1 (backward)" in said
    twice = nn.Sequential(nn.Sequential(Divide(1.0, 0.0)))
    leaf = torch.ones(2, requires_grad=True)
    assert "in 0.0 (backward)" in message(lambda: twice(leaf).sum().backward(), twice)


def test_the_micro_batch_of_a_pipeline_is_named():
    found: dict[str, Any] = {"inner": lambda: ONE / ZERO}
    name = f"somewhere/{nonfinite._EXECUTOR}"
    exec(compile("def act(m):\n    return inner()\n", name, "exec"), found)
    assert "(neither forward nor backward, micro-batch 5)" in message(lambda: found["act"](5))
    assert "micro-batch" not in message(lambda: ONE / ZERO)


def test_a_check_can_be_entered_again_and_names_modules_of_several_stages():
    layer, check = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), FiniteCheck([], "step 1")
    for step in range(2):
        check.doing = f"step {step}"
        with check as entered:
            assert entered is check
            layer(torch.ones(1, 2))
        with pytest.raises(NonFiniteError, match=f"^step {step}: "), check:
            torch.div(ONE, ZERO)
    torch.div(ONE, ZERO)
    first, second = nn.Linear(2, 2), nn.Sequential(Divide(0.0, 1.0))
    with pytest.raises(NonFiniteError, match=r"in 0 \(forward\)"), FiniteCheck([first, second]):
        second(first(torch.ones(1, 2)))
    assert "made infinity" in message(lambda: torch.cat([ONE, ONE / ZERO]))
    assert "made NaN" in message(lambda: torch.tensor([complex(1, INF)]) * torch.tensor([0.0]))
