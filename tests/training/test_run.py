"""The calls of a run in one process and on two simulated ranks, against plain torch and numbers by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.experimental import LocalUpdates
from mpcore.training import Observer
from mpcore.training.run import StepResult

X = torch.arange(24.0, dtype=torch.float64).view(8, 3).sin()
T = torch.arange(16.0, dtype=torch.float64).view(8, 2).cos()


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, whose rates differ."""
    weight, bias = model.parameters()
    return torch.optim.SGD([{"params": [weight], "lr": 0.5}, {"params": [bias], "lr": 0.25}])


def start(model: nn.Module | None = None, mesh: mp.Mesh | None = None, **told: Any) -> mp.Run:
    torch.manual_seed(1)
    model = model or nn.Linear(3, 2).double()
    given = {"blocks": (), "loss": squares, "optimizer": sgd, "initialize": False, **told}
    return given.pop("prepare", mp.prepare)(model, mesh or mp.Mesh(), **given)


def gradients(run: mp.Run) -> list[Tensor]:
    return [p.grad for p in run.model.parameters()]


def by_hand(tokens: float) -> tuple[float, list[Tensor], float]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2).double()
    loss = squares(model(X), T) / tokens
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    return loss.item(), grads, math.sqrt(sum(float(g.square().sum()) for g in grads))


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("tokens", "divisor"), [(None, 16), (5, 5), (torch.tensor(7.0), 7), (0, 1)])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradients_are_those_of_the_loss_divided_once_by_the_steps_tokens(tokens, divisor, micro_batches):
    run = start(micro_batches=micro_batches)
    loss, want, norm = by_hand(divisor)
    close(float(run.forward_backward(X, T, tokens=tokens)), loss)
    close(gradients(run), want)
    close(float(run.finish_gradients()), norm)
    close(float(run.finish_gradients()), norm)
    for most in (0.0, -1.0, 2 * norm):
        again = start()
        again.forward_backward(X, T, tokens=tokens)
        close(float(again.clip_gradients(most)), norm)
        close(gradients(again), want)


def test_gradients_are_clipped_to_a_norm_and_the_step_is_a_plain_one():
    run = start()
    run.forward_backward(X, T)
    loss, want, norm = by_hand(16)
    close(float(run.clip_gradients(norm / 4)), norm)
    close(gradients(run), [g / 4 for g in want])
    before = [p.detach().clone() for p in run.model.parameters()]
    result = run.optimizer_step()
    assert result == StepResult(pytest.approx(loss, rel=1e-12), pytest.approx(norm, rel=1e-12), True, {}, 0)
    assert run.step == 1
    close([p.detach() for p in run.model.parameters()], [p - lr * g / 4 for p, lr, g in
                                                         zip(before, (0.5, 0.25), want, strict=True)])  # fmt: skip
    assert gradients(run) == [None, None]
    run.forward_backward(X, T)
    run.optimizer_step(lr=0.125)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize("spoiled", ["loss", "gradient", "none"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(spoiled):
    def loss(y: Tensor, t: Tensor) -> Tensor:
        found = squares(y, t)
        return found + math.inf if spoiled == "loss" else found

    run = start(loss=loss)
    run.forward_backward(X, T)
    if spoiled == "gradient":
        gradients(run)[1][0] = math.nan
    before = [p.detach().clone() for p in run.model.parameters()]
    result = run.optimizer_step()
    same = all(map(torch.equal, before, run.model.parameters()))
    assert (result.taken, same, run.step) == (spoiled == "none", spoiled != "none", 1)
    assert math.isfinite(result.loss) is (spoiled != "loss")
    assert math.isfinite(result.grad_norm) is (spoiled != "gradient")
    assert gradients(run) == [None, None]


def test_targets_of_minus_100_are_no_tokens():
    run = start()
    target = torch.tensor([[1, -100, 3], [-100, -100, 0]])
    assert run.count_tokens(target).item() == 3
    assert run.count_tokens([target, target[:, 1:], torch.full((2,), -100)]).item() == 3 + 2
    assert run.count_tokens(T).dtype == torch.float64


def test_the_number_of_micro_batches_does_not_change_within_a_step():
    run = start(micro_batches=2)
    executor = run.pipeline.executor
    run.set_micro_batches(2)
    assert run.pipeline.executor is executor, "nothing is made anew for the same number"
    run.forward_backward(X, T)
    with pytest.raises(ValueError, match=r"set_micro_batches while gradients wait for optimizer_step:"):
        run.set_micro_batches(4)


class Modes(nn.Linear):
    """Doubles in training."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert self.training or not torch.is_grad_enabled()
        y = super().forward(x) * (2 if self.training else 1)
        return y if bias is None else y + bias


def test_the_loss_of_an_evaluation_is_over_all_tokens_of_all_batches():
    run = start(Modes(3, 2).double())
    batches = [(X[:3], T[:3]), (X[3:4], T[3:4])]
    with torch.no_grad():
        y = nn.Linear.forward(run.model, X[:4])
    close(run.evaluate(batches), float(squares(y, T[:4])) / 8)
    shift = [torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]
    moved = torch.cat([y[:3] + 1, y[3:]])
    close(run.evaluate(iter(batches), bias=shift), float(squares(moved, T[:4])) / 8)
    none = torch.full((1, 2), -100.0, dtype=torch.float64)
    close(run.evaluate([(X[:1], none)]), float(squares(y[:1], none)))
    close(run.evaluate(batches, tokens=4), float(squares(y, T[:4])) / 4)
    assert run.model.training
    with pytest.raises(ValueError, match="evaluate got 0 batches"):
        run.evaluate([])
    run.forward_backward(X, T)
    run.optimizer_step()
    run.factor = run.factor * 0.25
    again = run.evaluate(batches)
    run.factor = torch.ones_like(run.factor)
    assert run.evaluate(batches) == again, "the factor of a step is none of an evaluation's"


def test_pitfall_59_modes_come_back_after_an_evaluation_also_after_an_error():
    kept = nn.Sequential(Modes(3, 2), nn.Dropout()).double()
    kept[1].eval()
    start(kept).evaluate([(X, T)])
    assert [module.training for module in kept.modules()] == [True, True, False]
    run = start(Modes(3, 2).double())
    run.model.eval()
    with run.evaluating():
        assert (run.model.training, torch.is_grad_enabled()) == (False, False)
    with pytest.raises(LookupError), run.evaluating():
        raise LookupError
    assert not run.model.training
    run.model.train()
    with run.evaluating():
        pass
    assert run.model.training


def shares(sizes: dict, count: int, micro_batches: int) -> tuple[int, int, str]:
    on = mp.build_mesh(device_type="cpu", **sizes)
    options = {"observers": [LocalUpdates()]} if sizes.get("worlds", 1) > 1 else {}
    model = mp.ColumnParallelLinear(3, 2, tp=on.tp, dtype=torch.float64)
    run = start(model, on, micro_batches=micro_batches, data=mp.Zero(0), **options)
    try:
        share = run.share(count)
    except ValueError as error:
        return 0, 0, str(error)
    return share.start, share.stop, ""


def test_each_data_rank_of_each_worker_has_consecutive_samples():
    found = mp.simulate(shares, {"worlds": 2, "dp": 2, "tp": 1}, 24, 3, ranks=4)
    assert found == [(6 * i, 6 * i + 6, "") for i in range(4)]
    assert mp.simulate(shares, {"tp": 2, "dp": 2}, 8, 2, ranks=4) == [(0, 4, "")] * 2 + [(4, 8, "")] * 2
    said = "25 samples a step are not a multiple of worlds x dp x micro-batches = 2 x 2 x 3 = 12: take 36"
    assert mp.simulate(shares, {"worlds": 2, "dp": 2}, 25, 3, ranks=4) == [(0, 0, said)] * 4


def test_a_save_has_the_runs_state_and_a_load_keeps_the_options_of_this_run(tmp_path):
    run, other = start(seed=9), start()
    run.scaler, other.scaler = mp.optim.LossScaler(scale=8.0), mp.optim.LossScaler(scale=2.0)
    run.step = 3
    for group in run.optimizer.param_groups:
        group.update(lr=9.0, momentum=0.9)
    with pytest.raises(ValueError, match="extra has good_steps, which the run saves itself"):
        run.save(tmp_path, extra={"good_steps": 1})
    path = run.save(tmp_path, extra={"a": 1}, sample=7)
    assert path == tmp_path / "step-00000003"
    found = other.load(path)
    assert (found.step, found.sample, found.seed) == (3, 7, 9)
    assert found.extra == {"a": 1, "scale": 8.0, "good_steps": 0}
    assert [(group["lr"], group["momentum"]) for group in other.optimizer.param_groups] == [(0.5, 0), (0.25, 0)]
    assert (other.step, other.scaler.scale) == (3, 8.0)
    saving: Any = run.save(tmp_path / "later", background=True)
    saving = run.save(tmp_path / "later", background=True, after=saving)
    assert other.load(saving.wait()).step == 3
    failed = mp.checkpoint.Saving(tmp_path / "failed")
    failed._error = OSError("no space")
    with pytest.raises(ValueError, match="failed: no space"):
        run.save(tmp_path, after=failed)
    for wrong in (None, 3):
        with pytest.raises(ValueError, match=f"load got {wrong} and no path"):
            run.load(wrong)


def test_pitfall_67_a_scheduler_of_torch_goes_on_after_a_resume(tmp_path):
    def steps(count: int, resume: Path | None = None) -> tuple[list[float], mp.Run, Any]:
        run, rates = start(), []
        scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
        if resume:
            scheduler.load_state_dict(run.load(resume).extra["scheduler"])
        for _ in range(count):
            run.forward_backward(X, T)
            rates += [group["lr"] for group in run.optimizer.param_groups]
            run.optimizer_step()
            scheduler.step()
        return rates, run, scheduler

    want, (first, run, scheduler) = steps(5)[0], steps(2)
    assert first + steps(3, run.save(tmp_path, extra={"scheduler": scheduler.state_dict()}))[0] == want


def test_what_was_frozen_in_prepare_gets_no_gradient_in_half_precision():
    parts = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2)
    run = start(nn.Sequential(*parts), precision="bfloat16", optimizer=mp.AdamW)
    run.model.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0.weight .*frozen in prepare.* bfloat16"):
        run.forward_backward(X.bfloat16(), T)


class Recorder(Observer):
    """Writes down its calls, has the first attempt of each step repeated, and counts steps in checkpoints."""

    def __init__(self) -> None:
        self.calls, self.steps = [], 0

    def before_forward(self, run, tokens, arguments):
        self.calls += ["before_forward", int(tokens)]
        self.again = True

    def after_backward(self, run, total):
        self.calls += [("after_backward", float(total), run.phase)]
        again, self.again = self.again, False
        return None if again else total

    def before_reduce(self, run):
        self.calls += [("before_reduce", run.phase)]

    def after_reduce(self, run):
        self.calls += [("after_reduce", run.phase)]

    def after_step(self, run, taken):
        self.calls += [("after_step", run.step, taken)]
        self.steps += 1

    def dropped(self, run):
        self.calls += ["dropped"]

    def state(self):
        return {"steps": self.steps}

    def load_state(self, state):
        self.steps = state["steps"]


def test_an_observer_sees_each_moment_of_a_step_and_a_repeated_step_counts_once(tmp_path):
    plain, run, recorder = start(), start(), Recorder()
    run.observers.append(recorder)
    for one in (plain, run):
        one.forward_backward(X, T)
    assert plain.optimizer_step() == run.optimizer_step()
    assert [each if isinstance(each, str | int) else each[0] for each in recorder.calls] == [
        "before_forward", T.numel(), "after_backward", "after_backward", "before_reduce", "after_reduce", "after_step",
    ]  # fmt: skip
    for a, b in zip(plain.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(a, b)
    x, both = X.float().view(8, 1, 3), ([], [Recorder()])
    runs = [start(mp.ParallelMoE(3, 4, 2, 1), optimizer=mp.AdamW, observers=observers) for observers in both]
    for one in runs:
        one.forward_backward(x, x)
    assert torch.equal(*(one.optimizer_step().routers["router"].tokens_per_expert for one in runs))
    run.forward_backward(X, T)
    run.drop_gradients()
    assert recorder.calls[-1] == "dropped"
    path = run.save(tmp_path)
    other = start()
    other.observers.append(resumed := Recorder())
    other.load(path)
    assert resumed.steps == 1
