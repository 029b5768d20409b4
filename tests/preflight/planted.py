"""A sound rank, and bugs that are planted in the ranks of a pool, for the tests of `mpcore preflight`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mpcore.gradients.accumulate import gradient_of
from mpcore.tools.preflight.rehearse import Rehearsal
from mpcore.tools.verify.run import RankRecord
from tests.pool import Pool


def rank(worker: int = 0, losses: tuple = (4.0, 3.0, 2.0, 1.0), **changes: Any) -> Rehearsal:
    """The record of one rank in a run without a fault."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    seen = RankRecord(0, 0, 0, 0, rows=4, length=8, initial={"w": w}, gradients={"w": w}, norm=5**0.5)
    steps = dict(enumerate(losses))
    told = {"norms": dict.fromkeys(steps, 1.0), "state": {"w": w}, "begun": {"w": w}, "kept": {2: {"w": w}},
            "validation": 1.5, "seen": seen, "reference": losses[0], "scales": {i + 1: 1.0 for i in steps}}  # fmt: skip
    return Rehearsal(worker, losses=steps, **{**told, **changes})


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


def method(change: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """Replace a method by `change(old, self, *args)`."""

    def make(old: Callable) -> Callable:
        def new(self: Any, *args: Any, **kwargs: Any) -> Any:
            return change(old, self, *args, **kwargs)

        return new

    return make


def shifted(old: Callable, self: Any, step: int) -> int:
    return old(self, step) + self.first_step


def without_slots(old: Callable) -> Callable:
    return lambda *args, **kwargs: []


def without_scale(old: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    scaler, self.scaler = self.scaler, None
    try:
        return old(self, *args, **kwargs)
    finally:
        self.scaler = scaler


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


TWO, ZERO0 = "--tp 2 --dp 2 --zero 0", "--dp 4 --zero 0"
BUGS: dict[str, Bug] = {
    "the reduce of a row is missing": Bug(
        "mpcore.layers.linear.collectives.reduce", identity, TWO, "sharded against unsharded",
        "nothing adds them", False,
    ),
    "gradients are averaged again": Bug(
        "mpcore.training.run.reduce_gradients", averaged, ZERO0, "sharded against unsharded", "2 times too small", False
    ),
    "the norm is of local gradients": Bug(
        "mpcore.training.run.norm_of", local_norm, TWO, "sharded against unsharded", "norm differs", False
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
    "the loss scale is not saved": Bug(
        "mpcore.training.run.Run.save", method(without_scale), TWO + " --dtype float16", "dtype",
        "the loss scale is .*: it is not saved",
    ),
}  # fmt: skip
