"""Dropless all-to-all in which the host does not wait for the device between dispatch and combine.

The buffers of a step have fixed sizes, chosen from the loads of earlier steps. The device counts the rows that each
buffer needed; the host reads the counts once, at the end of the step's backward. If a buffer was too small on any rank,
every rank drops the step's gradients and computes the step again with larger buffers, so no token is lost.

The buffers start with `FIRST` times the rows of even loads. After an overflow they get `MARGIN` times the rows that
were needed. Every `REVIEW` steps they shrink to `MARGIN` times the largest need of those steps, if that saves a tenth,
but never below `LEAST` times the rows of even loads. A repeated step may overflow again, because layers after the first
overflow saw inexact inputs. The third repetition has room for the worst case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from mpcore.collectives import all_reduce
from mpcore.layers.moe.dispatch import AllToAll, Bound
from mpcore.layers.moe.layer import ParallelMoE
from mpcore.layers.moe.router import Router
from mpcore.mesh.agreement import gather_objects
from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import ModelTree, named_modules

MARGIN = 1.15
REVIEW = 100
LEAST = 0.25
REPEATS = 3

T = TypeVar("T")


class DispatchBounds:
    """Run steps with dispatch buffers of fixed sizes, and run a step again if a buffer overflowed.

    Every `Run` has one. In your own training loop, create one after the model.

    Args:
        model: the model, or this rank's pipeline stage.
        mesh: the model's mesh.

    Attributes:
        is_used: True if any pipeline rank has a `ParallelMoE` with `dispatch="all_to_all"`, ep > 1 and no capacity. If
            False, `exact` calls `compute` once.
        repeats: how often the last step was computed again.
        rows: the number of rows that a rank sends over ep per token, in the layer that sends the most. All-gather sends
            ep rows per token.

    Example:
        >>> from mpcore.layers.moe import DispatchBounds
        >>> moe = mpcore.ParallelMoE(4, 8, num_experts=2, top_k=2, dispatch="all_to_all")
        >>> bounds = DispatchBounds(moe, mpcore.Mesh())
        >>> loss = bounds.exact(lambda: moe(torch.randn(2, 3, 4)).sum(), lambda: mpcore.gradients.drop_gradients(moe))
        >>> bounds.repeats, bounds.is_used  # one rank sends nothing
        (0, False)
    """

    def __init__(self, model: nn.Module | ModelTree, mesh: Mesh) -> None:
        layers = [module for _, module in named_modules(model) if isinstance(module, ParallelMoE)]
        self.routers: list[Router] = [moe.router for moe in layers]
        dropless = [moe.dispatcher for moe in layers if moe.router.options.capacity_factor is None]
        self.dispatches: list[AllToAll] = [each for each in dropless if isinstance(each, AllToAll)]
        self.largest: list[Bound] = [each.even.times(LEAST) for each in self.dispatches]
        for each in self.dispatches:
            each.set_bound(each.bound, mesh.device)
        self.mesh = mesh
        self.steps: int = 0
        self.repeats: int = 0
        self.rows: float = 0.0
        self.is_used: bool = any(gather_objects(len(self.dispatches), mesh.pp.group))

    def exact(self, compute: Callable[[], T], forget: Callable[[], object]) -> T:
        """Compute a step's forward and backward, and repeat them until no buffer overflows.

        The host waits for the device once per attempt.

        A repeated step must give the same result for the same arguments. mpcore's dropout and jitter do. torch's
        generators do not: they are not rewound. Buffers that a forward changes are not restored.

        Args:
            compute: runs forward and backward of all micro-batches.
            forget: drops the gradients of `compute`; called before each repetition.

        Returns:
            The result of the last call of `compute`.

        Raises:
            RuntimeError: on every rank, if a buffer overflows that has room for all rows.
        """
        self.begin()
        try:
            for _ in range(REPEATS + 1):
                result = compute()
                if self.fits():
                    return result
                forget()
            raise RuntimeError(f"a step overflowed {REPEATS + 1} times, the last with room for all rows: report this")
        finally:
            self.end()

    def begin(self, again: bool = False) -> None:
        """Begin a step, or the same again: use the buffers of fixed sizes, and forget its counts. `exact` calls it."""
        if not again:
            self.repeats = 0
            self._tallies = [router.tally for router in self.routers]
        for router, tally in zip(self.routers, self._tallies, strict=True):
            router.tally = tally
        for dispatch in self.dispatches:
            dispatch.is_bounded, dispatch.needed = True, None

    def fits(self) -> bool:
        """Return whether the step was exact. If not, the buffers are larger now: drop the gradients, compute again."""
        if not self.is_used or not self._overflowed():
            return True
        self.begin(again=True)
        self.repeats += 1
        return False

    def end(self) -> None:
        """End a step: outside of steps, the host waits for the sizes of the messages."""
        for dispatch in self.dispatches:
            dispatch.is_bounded = False

    @torch.no_grad()
    def _overflowed(self) -> bool:
        """Return whether a buffer was too small on any rank, and set the sizes for the next attempt or step."""
        mesh = self.mesh
        zero = torch.zeros(1, dtype=torch.float64, device=mesh.device)
        found = [zero.expand(2 * each.ep.size + 1) if each.needed is None else each.needed for each in self.dispatches]
        needed = all_reduce(all_reduce(torch.cat([*found, zero]), mesh.tp, "max"), mesh.data, "max")
        over = torch.stack([each[-1] for each in needed.split([*map(len, found), 1])]).max()
        rows = max((sum(each.bound.sent) for each in self.dispatches), default=0.0)
        agreed = all_reduce(torch.stack([over, zero[0] + rows]), mesh.pp, "max")
        over, self.rows, *loads = torch.cat([agreed, needed]).tolist()
        for i, each in enumerate(self.dispatches):
            ep = each.ep.size
            mine, loads = loads[: 2 * ep], loads[2 * ep + 1 :]
            sent, run = mine[:ep], mine[ep:]
            for rank in range(ep):
                if sent[rank] > each.bound.sent[rank]:  # the rank's experts did not get all rows: estimate the number
                    run[rank] = max(run[rank], sent[rank] / each.even.sent[rank] * each.even.run[rank])
            fit = Bound(tuple(sent), tuple(run)).times(MARGIN).with_each(min, each.worst)
            if over:
                last = self.repeats == REPEATS - 1
                each.set_bound(each.worst if last else each.bound.with_each(max, fit), mesh.device)
                continue
            self.largest[i] = self.largest[i].with_each(max, fit)
            if self.repeats == REPEATS or self.steps % REVIEW == REVIEW - 1:
                smaller = self.largest[i].with_each(lambda new, old: new if new < 0.9 * old else old, each.bound)
                each.set_bound(smaller, mesh.device)
                self.largest[i] = each.even.times(LEAST)
        self.steps += not over
        return bool(over)
