"""Bugs that are planted in the ranks of a pool, for the tests of `mpcore preflight`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from mpcore.gradients.accumulate import gradient_of
from mpcore.tools.preflight.rehearse import Rehearsal
from tests.pool import Pool


@dataclass(frozen=True)
class Bug:
    """A bug: what is replaced, and by what; the flags of the run, the check that must fail, and what it must say."""

    place: str
    instead: Any
    flags: str
    check: str
    sentence: str
    slow: bool = True


class Lent:
    """A pool that its borrower neither sizes nor stops."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.workers = pool, [True]

    def __call__(self, *args: Any, **kwargs: Any) -> list:
        return self.pool(*args, **kwargs)

    def stop(self) -> None:
        """The lender stops it."""


class Planted(Lent):
    """A pool in whose ranks a bug is planted for each call."""

    def __init__(self, pool: Pool, bug: str) -> None:
        super().__init__(pool)
        self.bug = bug

    def __call__(self, size: int, check: Callable, *args: Any, timeout: float, **kwargs: Any) -> list:
        return self.pool(size, planted, self.bug, check, args, kwargs, timeout=timeout)


def planted(name: str, check: Callable, args: tuple, kwargs: dict[str, Any]) -> Rehearsal:
    """In a rank: call with the bug."""
    bug = BUGS[name]
    with ExitStack() as stack:
        stack.enter_context(mock.patch(bug.place, bug.instead(resolve_name(bug.place))))
        return check(*args, **kwargs)


def identity(old: Callable) -> Callable:
    return lambda x, *args, **kwargs: x


def nothing(old: Callable) -> Callable:
    return lambda *args, **kwargs: None


def method(change: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """Replace a method by `change(old, self, *args)`."""

    def make(old: Callable) -> Callable:
        def new(self: Any, *args: Any, **kwargs: Any) -> Any:
            return change(old, self, *args, **kwargs)

        return new

    return make


def bias_everywhere(old: Callable, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    y = old(self, *args, **kwargs)
    return y if self.bias is None or self.tp.size == 1 else y + (self.tp.size - 1) * self.bias


def mean_over_rank(old: Callable, self: Any, target: Tensor) -> Tensor:
    return torch.as_tensor((target != -100).sum()).double()


def shifted(old: Callable, self: Any, step: int) -> int:
    return old(self, step) + self.first_step


def by_rank(old: Callable) -> Callable:
    def draw(seed: int, name: str) -> int:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return old(seed, f"{name}/{rank}")

    return draw


def take_all(old: Callable, self: Any, lr: float | None = None) -> Any:
    with mock.patch("mpcore.training.run.math.isfinite", return_value=True):
        return old(self, lr=lr)


def without_slots(old: Callable) -> Callable:
    return lambda *args, **kwargs: []


def halved(old: Callable) -> Callable:
    def loss_factor(self: Any, tokens: Any) -> Tensor:
        return old(self, tokens) / max(self.mesh.dp.size, self.pipeline.micro_batches)

    return loss_factor


def without_scale(old: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    scaler, self.scaler = self.scaler, None
    try:
        return old(self, *args, **kwargs)
    finally:
        self.scaler = scaler


def without_step(old: Callable, self: Any, path: Any) -> Any:
    loaded = old(self, path)
    self.step = 0
    return loaded


def averaged(old: Callable) -> Callable:
    def reduce(tree: Any) -> None:
        old(tree)
        for p in tree.parameters:
            if p.grad is not None and torch.distributed.is_initialized():
                p.grad.div_(torch.distributed.get_world_size())

    return reduce


def doubled_in_bfloat16(old: Callable) -> Callable:
    def reduce(tree: Any) -> None:
        old(tree)
        for p in tree.parameters:
            grad = gradient_of(p) if p.dtype == torch.bfloat16 and torch.distributed.get_world_size() > 1 else None
            if grad is not None:
                grad.mul_(2)

    return reduce


def local_norm(old: Callable) -> Callable:
    def norm(tree: Any, mesh: Any, **options: Any) -> Tensor:
        grads = [x.grad.double().square().sum() for x in tree.parameters if x.grad is not None]
        return torch.stack([torch.stack(grads).sum().sqrt(), *old(tree, mesh, **options)[1:]])

    return norm


def out_of_range(old: Callable, self: Any, index: int) -> np.ndarray:
    read = old(self, index).copy()
    read[-1] = 400
    return read


TWO, ZERO0 = "--tp 2 --dp 2 --zero 0", "--dp 4 --zero 0"
BUGS: dict[str, Bug] = {
    "the reduce of a row is missing": Bug(
        "mpcore.layers.linear.collectives.reduce", identity, TWO, "sharded against unsharded",
        "nothing adds them", False,
    ),
    "a row bias counts tp times": Bug(
        "mpcore.layers.linear.RowParallelLinear.forward", method(bias_everywhere),
        "--preset gpt2 --heads 4 --d-model 32 " + TWO, "sharded against unsharded", "is added 2 times|differs",
    ),
    "sequence-parallel norms are not summed": Bug(
        "mpcore.gradients.reduce._reduce_pending", nothing, TWO + " --sequence-parallel",
        "sharded against unsharded", "nobody sums them|differs",
    ),
    "gradients are averaged again": Bug(
        "mpcore.training.run.reduce_gradients", averaged, ZERO0, "sharded against unsharded", "2 times too small", False
    ),
    "the loss is divided by this rank's tokens": Bug(
        "mpcore.training.run.Run.count_tokens", method(mean_over_rank), ZERO0, "sharded against unsharded",
        "loss differs|too large",
    ),
    "the loss is divided twice": Bug(
        "mpcore.training.run.Run.loss_factor", halved, ZERO0, "sharded against unsharded", "too small|differs"
    ),
    "the norm is of local gradients": Bug(
        "mpcore.training.run.norm_of", local_norm, TWO, "sharded against unsharded", "norm differs", False
    ),
    "each rank draws a dropout mask of its own": Bug(
        "mpcore.layers.module.stream_key", by_rank, TWO + " --dropout 0.2", "sharded against unsharded",
        "dropout mask depends on the layout",
    ),
    "the optimizer's state is not saved": Bug(
        "mpcore.checkpoint.saving.held_by_optimizer", without_slots, TWO, "save, load elsewhere",
        "what the optimizer or the routers keep|state", False,
    ),
    "resuming shifts the samples": Bug(
        "examples.gpt.checkpoints.Checkpoints.sample", method(shifted), TWO, "save, load elsewhere",
        "other samples", False,
    ),
    "a gradient of bfloat16 counts twice": Bug(
        "mpcore.training.run.reduce_gradients", doubled_in_bfloat16, TWO + " --dtype bfloat16", "dtype",
        "the norm of step 0 in bfloat16 is .*: a gradient of this dtype is lost, kept or counted twice",
    ),
    "the step is not loaded": Bug(
        "mpcore.training.run.Run.load", method(without_step), TWO, "save, load elsewhere", "it went on with step 0"
    ),
    "the loss scale is not saved": Bug(
        "mpcore.training.run.Run.save", method(without_scale), TWO + " --dtype float16", "dtype",
        "the loss scale is .*: it is not saved",
    ),
    "a step of NaN is taken": Bug(
        "mpcore.training.run.Run.optimizer_step", method(take_all), TWO, "NaN on one rank", "rank 0 took the step"
    ),
    "a signal is ignored": Bug(
        "examples.gpt.checkpoints.Stop.after_step", method(lambda old, self: False), TWO, "signal and resume",
        "SIGTERM to rank 3 in step 0 did not stop",
    ),
    "a token id is beyond the vocabulary": Bug(
        "examples.gpt.samples.TokenSamples.sample", method(out_of_range), TWO, "one process", "400|id"
    ),
}  # fmt: skip
