"""Learning rates, batches, loss scales, clipping, parameter groups and optimizer steps."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcore as mp
from examples.gpt.policies import Ramp
from mpcore.mesh.axis import Axis
from mpcore.optim.schedules import cosine, linear, wsd
from mpcore.sharding.declare import cut
from mpcore.training.run import Run
from tests.peers import rows


@rows({
        "test_get_lr_linear, step 500": (500, linear, 0.1 - (0.1 - 0.001) * ((500 - 100) / (1000 - 100))),
        "test_get_lr_linear, past the end": (1001, linear, 0.001),
        "test_get_lr_cosine": (
            500, cosine, 0.001 + (0.1 - 0.001) * 0.5 * (math.cos(math.pi * ((500 - 100) / (1000 - 100))) + 1.0)),
        "test_step_function": (100, linear, 0.1),
    })  # fmt: skip
def test_the_rate_after_warm_up_is_megatrons(step, schedule, rate):
    assert math.isclose(schedule(step, steps=1000, warmup=100, lr=0.1, floor=0.01), rate, rel_tol=1e-12)


@rows({
        "test_linear_warmup_decay": (
            linear, {"steps": 10, "warmup": 2}, [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        "test_warmup_stable_decay": (
            wsd, {"steps": 10, "warmup": 2, "decay": 5}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        "test_warmup_stable_only": (wsd, {"steps": 10, "warmup": 2, "decay": 0}, [0.5, *[1.0] * 9]),
        "test_warmup_plus_decay_exceeds_training": (
            wsd, {"steps": 10, "warmup": 5, "decay": 8}, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
    })  # fmt: skip
def test_the_rates_are_torchtitans(schedule, options, factors):
    assert [schedule(i, **options, floor=0.0) for i in range(10)] == pytest.approx(factors, abs=1e-12)


@rows(
    {
        "1,000 steps, 100 of warm-up, decay from 100": (1000, 100, 100), "decay from 500": (1000, 100, 500),
        "decay from 900": (1000, 200, 900), "100 steps": (100, 10, 10),
    }
)  # fmt: skip
def test_the_rate_falls_to_the_end_and_not_before(steps, warmup, start):
    rates = [wsd(i, steps=steps, warmup=warmup, decay=steps - start, lr=1.0, floor=0.1) for i in range(steps)]
    assert 0.1 < rates[-1] == pytest.approx(0.1, abs=0.01)
    assert all(later < earlier for earlier, later in pairwise(rates[start:]))


def test_the_first_step_of_warm_up_isnt_zero():
    """A convention: Megatron's is lr-warmup-init; here step i has lr (i + 1) / warmup, and warm-up isn't shortened."""
    assert [linear(i, steps=3, warmup=4) for i in range(3)] == [0.25, 0.5, 0.75]


def test_a_run_sets_one_rate_in_all_groups():
    """A convention: Megatron's and torchtitan's groups have schedules of their own."""
    model = nn.Sequential(nn.Linear(2, 2))
    run = mp.prepare(
        model, mp.Mesh(), blocks=model, initialize=False, data=mp.Zero(0),
        loss=lambda y, target: (y - target).square().sum(),
        optimizer=lambda m: torch.optim.SGD([{"params": [m[0].weight], "lr": 0.2}, {"params": [m[0].bias], "lr": 0.1}]),
    )  # fmt: skip
    run.forward_backward(torch.ones(1, 2), torch.zeros(1, 2))
    run.optimizer_step(lr=0.5)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.5, 0.5]


def share(count: int, dp: int, micro_batches: int) -> list[range]:
    """Of each rank of dp its samples, as `Run.share` computes them."""
    return [
        Run.share(SimpleNamespace(  # type: ignore[arg-type]
            mesh=SimpleNamespace(worlds=Axis(), dp=SimpleNamespace(size=dp, rank=rank)),
            pipeline=SimpleNamespace(micro_batches=micro_batches)), count)
        for rank in range(dp)
    ]  # fmt: skip


@rows(
    {
        "Megatron-LM: test_num_microbatches_calculator.py: test_init_num_microbatches_calculator, 32 samples": (
            32,
            8,
            2,
            2,
        ),
        "Megatron-LM: test_num_microbatches_calculator.py: test_reconfigure_num_microbatches_calculator": (16, 8, 2, 1),
        "Megatron-LM: test_num_microbatches_calculator.py: test_get_current_global_batch_size": (16, 4, 2, 2),
        "DeepSpeed: runtime/test_ds_config_dict.py: TestBatchConfig, 1 step of accumulation": (32, 16, 2, 1),
        "DeepSpeed: runtime/test_ds_config_dict.py: TestBatchConfig, 2 steps of accumulation": (32, 8, 2, 2),
    }
)
def test_a_batch_is_micro_batches_of_all_ranks(count, micro_batch, dp, micro_batches):
    parts = share(count, dp, micro_batches)
    assert [len(part) for part in parts] == [micro_batch * micro_batches] * dp
    assert sorted(i for part in parts for i in part) == list(range(count))


@rows(
    {
        "DeepSpeed: runtime/test_ds_config_dict.py: TestBatchConfig, 33 samples": (33, 2, 2),
        "Megatron-LM: test_num_microbatches_calculator.py: "
        "test_step_batch_size_schedule_consistency_check_fails_when_batch_too_small": (256, 512, 1),
        "Megatron-LM: test_eval_batch_size.py: TestEvalBatchSizeDivisibility.test_invalid_divisibility_raises": (
            50,
            2,
            8,
        ),
    }
)
def test_a_batch_that_does_not_divide_is_refused(count, dp, micro_batches):
    with pytest.raises(ValueError, match=rf"{count} samples a step are not a multiple of .* = {dp * micro_batches}"):
        share(count, dp, micro_batches)


def test_a_ramp_takes_the_batches_of_megatron():
    ramp = Ramp(16, 32, stages=1, samples=96)
    assert [ramp.after(0, steps) for steps in range(12)] == [0, 16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256]
    assert [Ramp(16, 32, stages=2, samples=96).size(sample) // 8 for sample in (0, 48)] == [2, 3]


@rows({
        "test_no_overflow": (2**8, [True] * 10, [2**8, 2**9, 2**9, 2**10, 2**10, 2**11, 2**11, 2**12, 2**12, 2**13]),
        "test_all_overflow, down to 1": (2**4, [False] * 4, [8, 4, 2, 1]),
        "test_some_overflow": (
            2**8, [False, False, True, True, True, False], [2**7, 2**6, 2**6, 2**7, 2**7, 2**6]),
    })  # fmt: skip
def test_the_loss_scale_follows_deepspeeds(first, finite, scales):
    scaler = mp.optim.LossScaler(scale=first, growth_interval=2)
    found = []
    for each in finite:
        scaler.update(each)
        found.append(scaler.scale)
    assert found == scales


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_scale_is_that_of_torchs_grad_scaler(seed):
    """Over a hundred steps, some of which overflow."""
    dice = random.Random(seed)
    how = {"growth_factor": dice.choice([2.0, 4.0]), "backoff_factor": 0.5, "growth_interval": dice.choice([1, 3, 7])}
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=1024.0, **how), mp.optim.LossScaler(mp.Mesh(), 1024.0, **how)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.0)
    for _ in range(100):
        good = dice.random() < 0.8
        theirs.scale(torch.ones(()))  # it begins here
        p.grad = torch.tensor([1.0, 1.0 if good else torch.inf])
        theirs.step(optimizer)
        theirs.update()
        assert ours.update(good) is good
        assert ours.scale == theirs.get_scale()


def test_the_loss_scale_has_no_lower_bound():
    """A convention: DeepSpeed's stays at 1."""
    scaler = mp.optim.LossScaler(scale=2.0**4)
    for _ in range(8):
        scaler.update(False)
    assert scaler.scale == 2.0**-4


@pytest.mark.parametrize("bound", [0.1, 100.0])
def test_clipping_is_torchs_but_for_its_millionth(bound):
    """torch divides by norm + 1e-6, mpcore by the norm: a relative 1e-6 / norm."""
    draws = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Linear(5, 3) for _ in range(2))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        p.grad = torch.randn(p.shape, generator=draws)
        q.grad = p.grad.clone()
    mp.gradients.clip_gradients(ours, bound, mp.gradients.grad_norm(ours, mp.Mesh()))
    norm = float(nn.utils.clip_grad_norm_(theirs.parameters(), bound))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6 / norm + 1e-6, atol=0)


def test_the_norm_with_experts_is_the_same_on_all_ranks():
    """One replicated gradient of 1, and an expert's of rank + 1."""

    def norm(on: mp.Mesh) -> float:
        experts = mp.layers.GroupedLinear(2, 1, 1, ep=on.ep, shard=cut(1, Axis(), 1))
        experts.weight.grad = torch.full_like(experts.weight, on.ep.rank + 1.0)
        whole = nn.Linear(1, 1, bias=False)
        whole.weight.grad = torch.ones(1, 1)
        return float(mp.gradients.grad_norm(nn.ModuleDict({"experts": experts, "whole": whole}), on))

    assert mp.simulate(norm, ep=2, dp=2) == pytest.approx([math.sqrt(1 + 1 + 4)] * 2)


class Two(nn.Module):
    """Two layers, as nanotron's: 10 to 20 to 2."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 20, bias=False, dtype=dtype), nn.Linear(20, 2, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(F.relu(self.fc1(x))))


@rows({
        "test_optimizer_lr_one_group": ([(0.1, 0.0)] * 2, torch.float32, 1),
        "test_optimizer_lr_multiple_group": ([(0.1, 0.0), (0.001, 0.0)], torch.float32, 1),
        "test_optimizer_lr_weight_decay_one_group": ([(0.1, 0.1)] * 2, torch.float32, 1),
        "test_optimizer_lr_weight_decay_multiple_group": ([(0.1, 0.1), (0.001, 0.001)], torch.float32, 1),
        "test_optimizer_grad_accumulation_lr_one_group": ([(0.1, 0.0)] * 2, torch.bfloat16, 3),
        "test_optimizer_grad_accumulation_lr_multiple_group": ([(0.1, 0.0), (0.001, 0.0)], torch.bfloat16, 3),
        "test_optimizer_grad_accumulation_lr_weight_decay_one_group": ([(0.1, 0.1)] * 2, torch.bfloat16, 3),
        "test_optimizer_grad_accumulation_lr_weight_decay_multiple_group": (
            [(0.1, 0.1), (0.001, 0.001)], torch.bfloat16, 3),
    })  # fmt: skip
def test_each_group_has_its_rate_and_its_decay(groups, dtype, accumulation):
    """The first step of AdamW moves each weight by lr, after (1 - lr x decay); bf16 gradients accumulate in float32."""
    torch.manual_seed(42)
    model = Two(dtype)
    options = [{"params": [p], "lr": lr, "weight_decay": decay}
               for p, (lr, decay) in zip(model.parameters(), groups, strict=True)]  # fmt: skip
    before = [p.detach().float().clone() for p in model.parameters()]
    mp.gradients.main_gradients(model)
    optimizer = mp.AdamW(model, groups=options, eps=1e-30)
    for _ in range(accumulation):
        F.cross_entropy(model(torch.randn(10, 10, dtype=dtype)).float(), torch.randint(2, (10,))).backward()
    mp.gradients.reduce_gradients(model)
    grads = [p.main_grad.clone() for p in model.parameters()]  # type: ignore[attr-defined]
    assert {grad.dtype for grad in grads} == {torch.float32}
    optimizer.step()
    for p, old, grad, (lr, decay) in zip(model.parameters(), before, grads, groups, strict=True):
        want = (1 - lr * decay) * old - lr * grad.sign()
        torch.testing.assert_close(p.detach(), want.to(dtype), rtol=1e-5, atol=1e-6)


def test_matrices_alone_decay():
    """No decay for biases and for tensors of one dimension; five of ten parameters."""
    model = nn.Sequential(nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    decays, spared = mp.decay_groups(model, 0.1)
    assert (decays["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert (len(decays["params"]), len(spared["params"])) == (5, 5)
    assert {p.dim() for p in decays["params"]} == {2, 4}
    assert {p.dim() for p in spared["params"]} == {1}


def test_the_name_of_no_parameter_is_refused():
    with pytest.raises(TypeError, match="exclude holds 'nonexistent_layer'"):
        mp.decay_groups(nn.Linear(2, 2), 0.1, exclude=["nonexistent_layer"])  # type: ignore[list-item]


def test_a_parameter_of_no_group_is_not_updated():
    """A convention, torch's: torchtitan raises an error."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "out": nn.Linear(2, 2)})
    before = model["a"].weight.detach().clone()
    optimizer = mp.AdamW(model, groups=[{"params": list(model["out"].parameters())}])
    model["out"](model["a"](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert torch.equal(model["a"].weight, before)


def muon_step(steps: int = 1, **options) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    optimizer = mp.Muon(model, lr=0.03, weight_decay=0.2, **options)
    for i in range(steps):
        model.weight.grad = torch.arange(1.0, 25.0).view(4, 6).sin() + i
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_torchs(adjust):
    """Momentum 0.8, two steps of Newton-Schulz, lr 0.03, decay 0.2. torch's computes in bfloat16."""
    torch.manual_seed(0)
    weight = nn.Parameter(nn.Linear(6, 4, bias=False).weight.detach().clone())
    optimizer = torch.optim.Muon([weight], lr=0.03, weight_decay=0.2, momentum=0.8, ns_steps=2, adjust_lr_fn=adjust)
    for i in range(2):
        weight.grad = torch.arange(1.0, 25.0).view(4, 6).sin() + i
        optimizer.step()
    ours = muon_step(2, momentum=0.8, ns_steps=2, adjust_lr_fn=adjust, ns_dtype=torch.bfloat16)
    torch.testing.assert_close(ours, weight.detach(), rtol=0, atol=1e-3)


def test_muon_orthogonalizes_queries_keys_and_values_each():
    def step(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        weight: Tensor = model.weight  # type: ignore[assignment]
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape))
        weight.grad = torch.randn(weight.shape)
        mp.Muon(model, lr=0.1).step()
        return weight.detach()

    assert not torch.equal(step(mp.QKVParallelLinear(8, 2, 1, 4, bias=False)), step(nn.Linear(8, 16, bias=False)))
