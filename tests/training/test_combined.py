"""A run with copies of compiled blocks, schedulers that set momentum, observers that come later, and unlike ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.training import Observer

X, Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1)).double()


class Layer(nn.Module):
    """A linear layer beside a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Stage(nn.Module):
    """One layer, with its number in the full model as its name."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.add_module(str(number), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return next(self.children())(x)


def squares(y: Tensor, target: Tensor, **_: Any) -> Tensor:
    return (y - target).square().sum()


def start(mesh: mp.Mesh, *layers: nn.Module, optimizer: Any = None, **options: Any) -> mp.Run:
    torch.manual_seed(0)
    model = nn.Sequential(*(layers or (Layer(), Layer())))
    how = {"blocks": model, "initialize": False, "loss": squares, **options}
    return mp.prepare(model, mesh, optimizer=optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), **how)


def step(run: mp.Run, **arguments: Any) -> float:
    share = run.share(8)
    run.forward_backward(X[share], Y[share], **arguments)
    return run.optimizer_step().loss


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_copy_of_a_compiled_model_keeps_its_own_weights(recompute):
    def copied(mesh: mp.Mesh) -> Tensor:
        run = start(mesh, recompute=recompute, compile=mp.Compile("eager"))
        before, kept = run.model(X).detach(), copy.deepcopy(run.model)
        step(run)
        return (kept(X) - before).abs().max()

    assert mp.simulate(copied) == [0]


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_a_scheduler_that_sets_momentum_goes_on_after_a_resume(tmp_path, name):
    options = {"OneCycleLR": {"max_lr": 0.2, "total_steps": 9}, "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2}}[name]

    def losses(mesh: mp.Mesh, resumed: bool) -> list[float]:
        def begin() -> tuple[mp.Run, Any]:
            run = start(mesh, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
            return run, getattr(torch.optim.lr_scheduler, name)(run.optimizer, **options)

        (run, scheduler), found = begin(), []
        for at in range(6):
            if at == 3 and resumed:
                path, (run, scheduler) = run.save(tmp_path, extra={"scheduler": scheduler.state_dict()}), begin()
                scheduler.load_state_dict(run.load(path).extra["scheduler"])
            found += [step(run)]
            scheduler.step()
        return found

    assert mp.simulate(losses, True) == mp.simulate(losses, False)


def test_an_unused_weight_of_several_stages_a_rank_is_not_decayed():
    def trained(mesh: mp.Mesh) -> float:
        stages = [Stage(mesh.pp.rank + 2 * i) for i in range(2)]
        run = mp.prepare(
            stages, mesh, blocks=[], initialize=False, loss=squares, micro_batches=2, schedule="interleaved",
            optimizer=lambda m: mp.AdamW(m, weight_decay=0.5),
        )  # fmt: skip
        step(run)
        run.stages[0].register_forward_pre_hook(lambda *_: {0: None}[mesh.pp.rank])  # fails before rank 0's second
        with pytest.raises(ValueError, match="KeyError: 1"):
            run.evaluate([(X, Y)])
        return min(float(p.min()) for n, p in mp.full_state_dict(run.model).items() if n.endswith("unused"))

    assert mp.simulate(trained, pp=2, dp=2) == [1.0] * 4


def test_an_observer_that_is_appended_is_attached_before_the_next_step():
    class Attached(Observer):
        times, leaves = 0, False

        def attach(self, run: mp.Run) -> None:
            self.times += 1
            _ = self.leaves and run.observers.remove(self)

    def times(mesh: mp.Mesh) -> list[int]:
        run, later, found = start(mesh), Attached(), []
        for appended in ([], [type("Leaving", (Attached,), {"leaves": True})(), later], []):
            run.observers += appended
            step(run)
            found += [later.times]
        return found

    assert mp.simulate(times) == [[0, 1, 1]]


class Counts(torch.optim.SGD):
    """Counts its steps in its group, as ScheduleFree and Prodigy do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


def shares_a_weight(mesh: mp.Mesh) -> None:
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    layers[1].weight = layers[0].weight
    start(mesh, *layers, blocks=layers[:1], offload=mp.Offload(parameters=True))


def differ(mesh: mp.Mesh, **options: Any) -> None:
    """Prepare and step with these options on rank 1 alone."""
    mine = options if mesh.dp.rank == 1 else {}
    inputs = {"tokens": mine.pop("tokens")} if "tokens" in mine else {}
    run = start(mesh, data=mp.Zero(0), **mine)
    x = X[: mine.pop("rows", 4)] + mesh.dp.rank
    run.forward_backward(x, x, **inputs)
    run.optimizer_step()


@pytest.mark.parametrize(("words", "wrong", "options"), [
    (r"Counts keeps count of all", lambda mesh: step(start(
        mesh, offload=mp.Offload(optimizer=True), optimizer=lambda m: Counts(m.parameters(), lr=0.1))), {}),
    (r"Offload\(parameters=True\), and weight \(4, 4\) of a Linear", shares_a_weight, {}),
    (r"0 has sparse=True", lambda mesh: start(mesh, nn.Embedding(4, 4, sparse=True)), {}),
    (r"tokens: 8.0 and 9.0", lambda mesh, **_: start(mesh).evaluate([(X, Y)], tokens=8 + mesh.dp.rank), {"dp": 2}),
    (r"initialize: False and True", differ, {"initialize": True}),
    (r"schedule: '1f1b' and 'gpipe'", differ, {"schedule": "gpipe"}),
    (r"blocks: 2 and 0", differ, {"blocks": []}), (r"tokens: False and True", differ, {"tokens": 8}),
    (r"drift apart: momentum 0 and 0.5", differ, {
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5)}),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(words, wrong, options):
    with pytest.raises(RuntimeError, match=words):
        mp.simulate(lambda mesh: wrong(mesh, **options), dp=2 if options else 1)


def test_a_batch_that_fits_on_one_rank_alone_is_refused_on_all():
    def unequal(mesh: mp.Mesh) -> None:
        x = X[: 4 - mesh.dp.rank]
        start(mesh, micro_batches=2, data=mp.Zero(3)).forward_backward(x, x)

    with pytest.raises(RuntimeError, match=r"a batch of 3 is not a multiple of 2 .*rank 1 of 2"):
        mp.simulate(unequal, dp=2)
