"""The checks of the first step: of the loss, of the gradients of replicas, and of gradients that somebody changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpcore._torch.pytree import leaves
from mpcore.collectives import all_reduce, shard_sizes
from mpcore.gradients.accumulate import gradient_of
from mpcore.mesh.agreement import check_same, gather_objects, together
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import Logger, get_logger
from mpcore.random import random_state
from mpcore.sharding.declarations import ModelTree
from mpcore.sharding.local import is_dtensor, local_tensor
from mpcore.training.length_check import LengthCheck
from mpcore.training.loss_check import Loss, LossCheck, check_targets
from mpcore.training.observers import Observer
from mpcore.training.replica_check import check_replicas, sketch

if TYPE_CHECKING:
    from mpcore.training.run import Run

log: Logger = get_logger(__name__)
CHANGED = (
    "the gradients were changed after forward_backward, before their sums over ranks: if by torch's clip_grad_norm_, "
    "call run.clip_gradients(max_norm) instead"
)


class GradientWrites(Observer):
    """Notice gradients that the caller changes or drops before the ranks sum them, in steps 1, 2, 3, 5, 9, 17, ...

    In step 1, and of gradients on shards, their norms are compared, as torch counts no write of a collective; of the
    others its counts of writes, for which the host doesn't wait. Gradients whose sum over ranks runs are left out.
    """

    def __init__(self) -> None:
        self.written: list[str] = []
        self.changed: bool = False

    def after_backward(self, run: Run, total: Tensor) -> Tensor:
        """Remember what was written, until a warning."""
        self.written = [] if self.changed or run.step & (run.step - 1) else _writes(run)
        return total

    def before_reduce(self, run: Run) -> None:
        """Raise if the caller dropped all gradients; warn if they were changed."""
        if not self.written:
            return
        now = _writes(run)
        if {*self.written} != {*now} == {"None"}:
            raise ValueError(
                "zero_grad was called between forward_backward and optimizer_step, so no gradient is left: remove it. "
                "run.optimizer_step drops the gradients of its step"
            )
        self.changed = run.mesh.world.size > 1 and self.written != now
        if self.changed and run.mesh.job.rank == 0:
            log.warning("step %d: %s, or replicas drift apart", run.step + 1, CHANGED)


class FirstStep(Observer):
    """Check the first step, and leave the run's observers after it."""

    def __init__(self, tree: ModelTree, mesh: Mesh, half: bool, writes: GradientWrites) -> None:
        self.parameters: tuple[nn.Parameter, ...] = tree.parameters
        self.loss_check: LossCheck | None = None
        self.length_check: LengthCheck | None = None
        self.half = half
        self.mesh = mesh
        self.states: list[Tensor] = []  # torch's random states before forward and after backward
        self.writes = writes

    def attach(self, run: Run) -> None:
        self.alike: Tensor = self._alike()

    def _alike(self) -> Tensor:
        parts = (local_tensor(p).detach().reshape(-1)[:1024] for p in self.parameters)
        sums = [sketch(part, self.mesh.device)[0] for part in parts]
        total = sum(sums, torch.zeros((), dtype=torch.float64, device=self.mesh.device))
        most, least = all_reduce(torch.stack([total, -total]), self.mesh.world, "max")
        return most == -least

    def watch(self, loss: Loss) -> Loss:
        """Return the loss, checked in the first micro-batch of the first step."""
        return lambda *given: self.loss_check.call(loss, *given) if self.loss_check else loss(*given)

    def agree(self, run: Run, tokens: Tensor | int | None, arguments: dict[str, Any]) -> None:
        """Raise on every rank if `forward_backward` got other arguments on a rank, or a batch that doesn't fit."""
        given = {"tokens": tokens is not None, "arguments": sorted(arguments)}
        check_same("arguments of forward_backward", given, self.mesh.world)
        shapes = [[*x.shape] for x in leaves(arguments["x"]) if isinstance(x, Tensor)]
        every = gather_objects(shapes, self.mesh.cp.group)
        rows = {getattr(module, "sequence_dim", 1) for module in run.model.modules()} == {1}  # dimension 0 has rows
        _, uneven = together(self.mesh.world, lambda: (run.pipeline.cut(arguments), _check_shards(every, rows)))
        self.length_check = LengthCheck(run.model, uneven[0]) if uneven else None

    def before_forward(self, run: Run, tokens: Tensor | int, arguments: Mapping[str, Any]) -> None:
        varied = (bool((x != x.flatten()[:1]).any()) for x in map(local_tensor, self.parameters))
        if not run.offloaded and self._alike() > self.alike and any(varied):
            raise ValueError(
                "all ranks have the same weights, and had others after prepare: DistributedDataParallel(run.model) "
                "sends rank 0's weights to all. Wrap nothing: the run sums the gradients"
            )
        if not run.model.training and run.mesh.job.rank == 0:
            log.warning("the model is in eval mode, as of from_pretrained, so dropout is off: call model.train()")
        check_targets(run.mesh, arguments["target"])
        self.loss_check = LossCheck(run.mesh, tokens, run.pipeline.micro_batches)
        self.half = self.half or torch.is_autocast_enabled(run.mesh.device.type)
        self.states = [random_state(run.mesh.device)]

    def after_backward(self, run: Run, total: Tensor) -> Tensor:
        """Raise on every rank if the loss is a mean, or differs between the ranks of tp."""
        assert self.loss_check is not None
        if self.length_check:
            self.length_check.end()
        self.loss_check.end(total / run.factor)
        self.states[1:] = [random_state(run.mesh.device)]  # of the last, if the step was computed again
        return total

    def after_reduce(self, run: Run) -> None:
        """Raise on every rank if no parameter has a gradient, or ranks of tp other gradients of a replicated one."""
        run.observers.remove(self)
        if self.loss_check and self.loss_check.tokens:
            count = sum(gradient_of(p) is not None for p in self.parameters)
            if not all_reduce(torch.tensor(float(count), device=self.mesh.device), self.mesh.world):
                raise ValueError(
                    f"none of the {len(self.parameters)} parameters has a gradient after the first backward: the loss "
                    f"is made of none that requires one, so there is nothing to train"
                )
            check_replicas(run.tree, run.mesh, self.half, self.states, CHANGED if self.writes.changed else "")


def _check_shards(every: list[list[list[int]]], rows: bool) -> list[list[int]]:
    """Return the sizes of x that differ on the ranks of cp; raise ValueError if they are no shards of one sequence."""
    uneven: list[list[int]] = []
    for shapes in zip(*every, strict=False):
        for dim, sizes in enumerate(map(list, zip(*shapes, strict=False))):
            if len({*sizes}) == 1:
                continue
            if 0 in sizes or (rows and dim == 0 < len(shapes[0]) - 1):
                raise ValueError(
                    f"x has the sizes {sizes} in dimension {dim} on the ranks of cp: give all ranks the same rows, "
                    f"of at least {len(sizes)} tokens, and each its part, shard_sequence(x, mesh.cp, context)"
                )
            if sizes != (shards := shard_sizes(sum(sizes), len(sizes))):
                raise ValueError(
                    f"the ranks of cp have {sizes} tokens of x, and {shards} are the shards of {sum(sizes)}: give "
                    f"each its part, shard_sequence(x, mesh.cp, context)"
                )
            uneven.append(sizes)
    return uneven


def _writes(run: Run) -> list[str]:
    """Return a text for each gradient that differs if it was written since, or if its norm does."""
    found = run.tree.parameters
    return ["summing" if "running_sum" in vars(p) else _text(gradient_of(p), run.step == 0) for p in found]


def _text(x: Tensor | None, norm: bool) -> str:
    return str(None if x is None else float(sketch(x, x.device)[1]) if norm or is_dtensor(x) else x._version)
