"""Plain data parallelism: start to all-reduce large gradients while backward still computes others.

All ranks of a group must send the same messages in the same order, even if a rank has no gradient for a parameter, or
its backward reaches parameters in another order. The order is therefore fixed, last layers first. An all-reduce starts
when its gradient exists and all earlier ones have started. `reduce_gradients` starts the rest, and waits for all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpcore._torch.autograd import has_last_accumulation_hook
from mpcore._torch.storage import holders
from mpcore.collectives import start_sum_in_place, wait
from mpcore.gradients.accumulate import gradient_of, gradient_state
from mpcore.kernels._main_grad import GradientState, main_grad
from mpcore.mesh.agreement import gather_objects
from mpcore.mesh.axis import Axis
from mpcore.sharding.declarations import tree_of
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import local_tensor

# Gradients of at least this many elements are all-reduced in place: one message is cheaper than packing and unpacking.
ALONE = 2**18


class StartedAllReduce(NamedTuple):
    """A running all-reduce."""

    axis: Axis
    total: Tensor  # valid after waiting; the memory of the gradient, or a float32 copy
    here: bool  # whether this rank has the gradient


class _Pending(threading.local):
    """The unfinished all-reduces of this thread. Thread-local, because the ranks of a job may be threads."""

    def __init__(self) -> None:
        self.all: list[OverlappedAllReduce] = []


_pending = _Pending()


class OverlappedAllReduce:
    """The all-reduces over data that a stage starts during the backward of a step's last micro-batch."""

    def __init__(self, stage: nn.Module, stages: Sequence[nn.Module]) -> None:
        self.stage = stage
        self.stages = stages
        self.places: list[tuple[nn.Module, str, nn.Parameter, Axis]] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.order: list[tuple[nn.Parameter, Axis]] = []
        self.next: int = 0
        self.armed: bool = False
        self.found: bool = False
        self.ready: set[nn.Parameter] = set()

    @property
    def begun(self) -> dict[nn.Parameter, StartedAllReduce]:
        return {p: vars(p)["running_sum"] for p, _ in self.order if "running_sum" in vars(p)}

    def arm(self) -> None:
        """Let the next backward start the all-reduces, unless another stage of this thread is in its backward."""
        if any(sums.armed for sums in _pending.all if sums is not self):
            return
        self._find()
        self.order = [(p, axis) for _, _, p, axis in self.places if p.requires_grad]
        self.next, self.armed = 0, bool(self.order)
        self.ready.clear()
        if self.armed and self not in _pending.all:
            _pending.all.append(self)

    def check_settled(self) -> None:
        """Raise ValueError for another micro-batch before `reduce_gradients` has finished the previous step."""
        if self.begun:
            raise ValueError(
                "the gradients of the last micro-batch are being summed over data, and another forward would add to "
                "them: call reduce_gradients(model) first, or drop_gradients(model) to give the step up"
            )

    def _find(self) -> None:
        """Find the parameters and register hooks once; again if parameters were replaced or got more hooks."""
        if self.found and all(
            module._parameters.get(leaf) is p and has_last_accumulation_hook(p, hook)
            for (module, leaf, p, _), hook in zip(self.places, self.hooks, strict=True)
        ):
            return
        self.found = True
        for hook in self.hooks:
            hook.remove()
        stages_of = Counter(p for stage in self.stages for p in stage.parameters())
        tree, self.places = tree_of(self.stage), []
        leaves = {id(p): (module, leaf) for _, module in tree.modules for leaf, p in module._parameters.items()}
        for _, p, sharding in reversed(tree.declared):
            axis = only_axis(p, sharding, distinct(sharding.partial)) if p.requires_grad else None
            if axis is not None and stages_of[p] == 1 and (main_grad(p) is not None or p.dtype.itemsize >= 4):
                self.places.append((*leaves[id(p)], p, axis))
        self.hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for _, _, p, _ in self.places]

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if gradient_state(parameter) is GradientState.SUMMING:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} got another gradient after the backward that "
                f"set_gradient_sync(model, last=True) announced: say last=False before the backwards that come first"
            )
        if self.armed:
            self.ready.add(parameter)
            while self.next < len(self.order) and self.order[self.next][0] in self.ready:
                self._begin()

    def _begin(self) -> None:
        parameter, axis = self.order[self.next]
        vars(parameter)["running_sum"] = begin_sum(parameter, axis)
        self.next += 1

    def has_begun(self) -> bool:
        """Return whether the backward has started an all-reduce on any rank: ranks may use other parameters."""
        groups = dict.fromkeys(axis.group for _, axis in self.order if self.armed)
        return not self.armed or any(set().union(*(gather_objects(bool(self.begun), group) for group in groups)))

    def begin_rest(self) -> None:
        """After the backward, start the all-reduces of gradients that this rank does not have."""
        while self.armed and self.next < len(self.order):
            self._begin()
        self.armed = False


def distinct(axes: Iterable[Axis]) -> dict[object, Axis]:
    """Return the axes that have more than one rank, keyed by process group."""
    return {axis.group: axis for axis in axes if axis.size > 1}


def only_axis(parameter: nn.Parameter, sharding: Sharding, over: Mapping[object, Axis]) -> Axis | None:
    """Return the axis of a large gradient that is summed over only that axis; otherwise None."""
    axis = next(iter(over.values()), None)
    if axis is None or len(over) > 1 or not is_large(parameter, axis):
        return None
    return None if any(shard.replicated for shard in sharding.shards) else axis


def is_large(parameter: nn.Parameter, axis: Axis) -> bool:
    """Return whether a gradient is all-reduced separately."""
    return parameter.numel() >= ALONE and local_tensor(parameter).numel() >= ALONE and axis.sums is None


@torch.no_grad()
def begin_sum(parameter: nn.Parameter, axis: Axis) -> StartedAllReduce:
    """Start the all-reduce of a gradient over an axis; a missing gradient is sent as zeros."""
    found = gradient_of(parameter)
    here = found is not None
    if not here:
        parameter.grad = torch.zeros_like(parameter)
        found = gradient_of(parameter)
    assert found is not None
    grad = local_tensor(found)
    total = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
    if total is grad and holders(grad) > 1:  # a view of what backward reads yet, or of another gradient
        total = grad.clone()
    return StartedAllReduce(axis, start_sum_in_place(total, axis), here)


def take_begun(parameters: Iterable[Tensor]) -> dict[nn.Parameter, StartedAllReduce]:
    """Start all remaining all-reduces, but of a backward to come (GANs), and hand over those of the parameters."""
    given = {id(p) for p in parameters} if _pending.all else ()
    begun: dict[nn.Parameter, StartedAllReduce] = {}
    for sums in tuple(_pending.all):
        if any(id(p) in given for p, _ in sums.order) or sums.has_begun():
            sums.begin_rest()
        begun |= {p: vars(p).pop("running_sum") for p in sums.begun if id(p) in given}
        if not sums.begun and not sums.armed:
            _pending.all.remove(sums)
    return begun


def drop_begun(parameters: Iterable[Tensor]) -> None:
    """Wait for the all-reduces of an abandoned step, so that no rank waits for another.

    All-reduces that are announced are started first, as on ranks whose backward did not raise.
    """
    given = {id(p) for p in parameters} if _pending.all else ()
    for sums in tuple(_pending.all):
        if any(id(p) in given for p, _ in sums.order):
            sums.begin_rest()
            for p in sums.begun:
                wait(vars(p).pop("running_sum").total)
            _pending.all.remove(sums)
