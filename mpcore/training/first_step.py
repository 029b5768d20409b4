"""The checks of the first step: of the loss, of the gradients of replicas, and of gradients that somebody changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpcore.gradients.accumulate import gradient_of
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import get_logger
from mpcore.sharding.declarations import ModelTree
from mpcore.sharding.local import is_dtensor
from mpcore.training.loss_check import Loss, LossCheck, check_targets
from mpcore.training.observers import Observer
from mpcore.training.replica_check import ReplicaCheck, sketch

if TYPE_CHECKING:
    from mpcore.training.run import Run

log = get_logger(__name__)
CHANGED = (
    "the gradients were changed after forward_backward, before their sums over ranks: if by torch's clip_grad_norm_, "
    "call run.clip_gradients(max_norm) instead"
)


class FirstStep(Observer):
    """Check the first step, and leave the run's observers after it."""

    def __init__(self, tree: ModelTree, mesh: Mesh, half: bool) -> None:
        self.parameters = tree.parameters
        self.loss_check, self.half = LossCheck(mesh), half
        self.replica_check: ReplicaCheck | None = None
        self.written: list[str] = []
        self.changed = False

    def watch(self, loss: Loss) -> Loss:
        """Return the loss, checked in the first micro-batch of the first step."""
        return lambda output, target: self.loss_check.call(loss, output, target)

    def before_forward(self, run: Run, tokens: Tensor | int, arguments: Mapping[str, Any]) -> None:
        if [*map(id, ModelTree(run.model).parameters)] != [*map(id, self.parameters)]:
            raise ValueError(
                "parameters were added or replaced after prepare, and the optimizer holds the old ones: add adapters "
                "before prepare, and give run.model to no fully_shard, FSDP or accelerator.prepare"
            )
        check_targets(run.mesh, arguments["target"])
        self.loss_check.begin(tokens, run.pipeline.micro_batches)
        self.replica_check = ReplicaCheck(run.mesh, self.half) if self.loss_check.tokens else None

    def after_backward(self, run: Run, total: Tensor) -> Tensor:
        """Raise on every rank if the loss is a mean, or differs between the ranks of tp."""
        self.loss_check.end(total / run.factor)
        if self.replica_check:
            self.replica_check.end()
        self.written = _writes(run.tree) if run.mesh.world.size > 1 else []
        return total

    def before_reduce(self, run: Run) -> None:
        """Warn if the caller changed gradients that the ranks have not summed yet."""
        self.changed = bool(self.written) and self.written != _writes(run.tree)
        if self.changed and run.mesh.job.rank == 0:
            log.warning("%s, or replicas drift apart", CHANGED)

    def after_reduce(self, run: Run) -> None:
        """Raise on every rank if the ranks of tp have different gradients of a replicated parameter."""
        run.observers.remove(self)
        if self.replica_check:
            self.replica_check.compare(run.tree, CHANGED if self.changed else "")


def _writes(tree: ModelTree) -> list[str]:
    """Return a text for each gradient that differs if it was written since: a DTensor counts no writes."""
    found = [gradient_of(p) for p in tree.parameters]
    return [str(x if x is None else float(sketch(x, x.device)[1]) if is_dtensor(x) else x._version) for x in found]
