"""`Observer`: what looks at the steps of a `Run`, moment by moment, and may store a state of its own in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from mpcore.layers.moe.bounds import DispatchBounds
from mpcore.mesh.axis import Mesh

if TYPE_CHECKING:
    from mpcore.training.run import Run


class Observer:
    """Base class: every method does nothing. `run.observers` is the list of a run's observers, called in its order.

    All ranks must have the same observers, so that an observer may call collectives. Pass an observer to `prepare`, or
    append it to `run.observers`.

    Attributes:
        joins_worlds: whether the observer joins the models of several worlds (`build_mesh(worlds=2)`).
        slots: the names of tensors that it stores in the optimizer's state. They begin with `outer_`. A run drops such
            tensors of a checkpoint if none of its observers has their name.

    Example:
        >>> class LargestLoss(mpcore.training.Observer):
        ...     largest = 0.0
        ...
        ...     def after_backward(self, run, total):
        ...         self.largest = max(self.largest, float(total))
        ...         return total
    """

    joins_worlds: ClassVar[bool] = False
    slots: ClassVar[tuple[str, ...]] = ()

    def check(self, mesh: Mesh, blocks: Sequence[nn.Module] | Mapping[int, nn.Module]) -> None:
        """Raise ValueError if the observer does not fit the arguments of `prepare`. No collective runs yet."""

    def attach(self, run: Run) -> None:
        """Look at a run that `prepare` has made. Its optimizer may be replaced. No parameters are offloaded yet."""

    def before_forward(self, run: Run, tokens: Tensor | int, arguments: Mapping[str, Any]) -> None:
        """Look at a step before its first forward.

        Args:
            run: the run.
            tokens: the divisor of the step's summed loss.
            arguments: the arguments of `run.forward_backward`, with "x" and "target".
        """

    def after_backward(self, run: Run, total: Tensor) -> Tensor | None:
        """Look at the gradients of this rank, before ranks sum them.

        Args:
            run: the run.
            total: the sum of this rank's losses, scaled as the gradients are.

        Returns:
            The sum of the losses. None: drop the gradients, and compute forward and backward again, on every rank.
        """
        return total

    def before_reduce(self, run: Run) -> None:
        """Look at the gradients again when the user's own code has read them, before ranks sum them."""

    def after_reduce(self, run: Run) -> None:
        """Look at the gradients of the unsharded model, each rank at its shards, before clipping.

        Under a loss scale they are still multiplied by `run.scaler.scale`. `mpcore.gradients.grad_norm` reads them over
        all ranks, with p=math.inf the largest entry.
        """

    def after_step(self, run: Run, taken: bool) -> None:
        """Look at the parameters after the optimizer's step. `run.step` counts the step already.

        Args:
            run: the run.
            taken: False if the step was skipped because a value was not finite.
        """

    def dropped(self, run: Run) -> None:
        """Forget the step: its gradients were dropped."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, as JSON values under names of this observer's own."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned; a checkpoint of a run without this observer lacks it."""


class BoundedDispatch(Observer):
    """Repeat a step in which a mixture of experts' dispatch buffers, of fixed sizes, overflowed on any rank."""

    def __init__(self, bounds: DispatchBounds) -> None:
        self.bounds = bounds

    def before_forward(self, run: Run, tokens: Tensor | int, arguments: Mapping[str, Any]) -> None:
        self.bounds.begin()

    def after_backward(self, run: Run, total: Tensor) -> Tensor | None:
        if not self.bounds.fits():
            return None
        self.bounds.end()
        return total

    def dropped(self, run: Run) -> None:
        self.bounds.end()
        for router in self.bounds.routers:
            router.tally = None
