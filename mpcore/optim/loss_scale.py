"""Dynamic loss scaling for float16, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mpcore.collectives import all_reduce
from mpcore.gradients.accumulate import gradient_of
from mpcore.gradients.guard import check_all_reduced
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.sharding.declarations import ModelTree, tree_of
from mpcore.sharding.local import local_tensor


class LossScaler:
    """Scale the loss, so that small gradients don't vanish in float16; all ranks of the world decide the same.

    A step: backward of `loss * scaler.scale`, the gradient sums, `scaler.unscale(model)`, the norm; then the optimizer
    steps if `scaler.update(norm.isfinite())` says so, on every rank or on none.

    Args:
        mesh: its `world` agrees.
        scale: the first scale.
        growth_factor: multiplies the scale after `growth_interval` finite steps in a row.
        backoff_factor: multiplies the scale after a step that is not finite and skipped.
        growth_interval: in steps.

    Raises:
        ValueError: if growing would not grow, or shrinking not shrink.

    Example:
        >>> mpcore.LossScaler(scale=1024.0).scale
        1024.0
    """

    def __init__(
        self,
        mesh: Mesh = Mesh(),
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if scale <= 0 or growth_factor < 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                f"scale {scale} and growth_interval {growth_interval} must be positive, growth_factor {growth_factor} "
                f"at least 1, backoff_factor {backoff_factor} in (0, 1)"
            )
        check_mesh(mesh)
        self.mesh, self.scale, self.good_steps = mesh, scale, 0
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval

    @torch.no_grad()
    def unscale(self, model: nn.Module | ModelTree) -> None:
        """Divide all gradients by the scale; call it once a step, after `reduce_gradients`.

        Raises:
            ValueError: if `reduce_gradients` was forgotten.
        """
        tree = tree_of(model)
        check_all_reduced(tree)
        for parameter in tree.parameters:
            grad = gradient_of(parameter)
            if grad is not None:
                local_tensor(grad).div_(self.scale)

    def update(self, finite: Tensor | bool) -> bool:
        """Adapt the scale after a backward, and tell whether to take the step: a collective on all ranks of the world.

        Args:
            finite: whether this rank found its gradients finite. One rank that didn't makes all skip the step.
        """
        found = torch.as_tensor(finite, device=self.mesh.device).to(torch.int32)
        good = bool(all_reduce(found, self.mesh.world, "min"))
        self.good_steps = self.good_steps + 1 if good else 0
        if not good:
            self.scale *= self.backoff_factor
        elif self.good_steps % self.growth_interval == 0:
            self.scale *= self.growth_factor
        return good

    def state_dict(self) -> dict[str, float]:
        """The state to resume from, as JSON takes it."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from a state; values that it lacks stay."""
        self.scale = float(state.get("scale", self.scale))
        self.good_steps = int(state.get("good_steps", self.good_steps))
