"""The indices of samples that dropout needs: they differ in each step, or a warning says so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.training import samples
from mpcore.training.samples import SampleCheck


class Net(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 3, device="meta"), mp.Dropout(p)

    def forward(self, x: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x), samples)


def prepared(p: float, **options: Any) -> mp.Run:
    def make(model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * target.unsqueeze(-1)).sum()

    return mp.prepare(Net(p), mp.Mesh(), blocks=(), loss=loss, optimizer=make, **options)


def warned(monkeypatch: pytest.MonkeyPatch, given: list, p: float = 0.5, **options: Any) -> list[tuple]:
    """The warnings of a run whose steps have these samples; a function makes them of the run."""
    told: list[tuple] = []
    monkeypatch.setattr(samples.log, "warning", lambda *words: told.append(words))
    run = prepared(p, **options)
    x, target = torch.ones(4, 2, 4), torch.ones(4, 2)
    for each in given:
        each = each(run) if callable(each) else each
        as_list = isinstance(each, list)
        run.forward_backward([*x.chunk(2)] if as_list else x, [*target.chunk(2)] if as_list else target, samples=each)
        run.optimizer_step()
    return told


def test_samples_of_a_run_differ_in_each_step_and_give_other_masks():
    run, found, losses = prepared(0.5), [], []
    for _ in range(3):
        found.append(run.samples(4))
        losses.append(float(run.forward_backward(torch.ones(4, 2, 4), torch.ones(4, 2), samples=found[-1])))
        run.optimizer_step()
    assert [each.tolist() for each in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert found[0].dtype == torch.int64
    assert len(set(losses)) == 3


def test_equal_samples_are_warned_of_once_and_others_pass(monkeypatch):
    same = torch.arange(4)
    assert len(warned(monkeypatch, [same, same.clone(), same])) == 1
    assert len(warned(monkeypatch, [[*same.chunk(2)], [*same.chunk(2)]], micro_batches=2)) == 1
    assert not warned(monkeypatch, [lambda run: run.samples(4)] * 3)
    assert not warned(monkeypatch, [same, same + 4, same + 4])  # only the first two steps are compared
    assert not warned(monkeypatch, [same, same], p=0.0)


def test_a_step_that_is_repeated_is_compared_with_none_of_itself(monkeypatch):
    told: list[tuple] = []
    monkeypatch.setattr(samples.log, "warning", lambda *words: told.append(words))
    check = SampleCheck(nn.Sequential(mp.Dropout(0.5)), mp.Mesh())
    for step, given in ((0, None), (0, torch.arange(2)), (0, torch.arange(2)), (1, torch.arange(2, 4))):
        check.before_forward(SimpleNamespace(step=step, mesh=mp.Mesh()), 1, {"samples": given})
    assert (told, check.is_due, check.before) == ([], False, None)
