"""Dynamic loss scaling for float16; all ranks use the same scale."""

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
    """Scale the loss so that small gradients don't underflow in float16. All ranks of the world take the same decision.

    In each step, run backward of `loss * scaler.scale`, call `reduce_gradients`, `scaler.unscale(model)` and
    `grad_norm`. Step the optimizer only if `scaler.update(norm.isfinite())` returns True, which it does on every rank
    or on none.

    Args:
        mesh: the mesh; the ranks of `mesh.world` agree.
        scale: the initial scale.
        growth_factor: multiplies the scale after `growth_interval` consecutive finite steps.
        backoff_factor: multiplies the scale after a step with non-finite gradients, which is skipped.
        growth_interval: the number of steps before the scale grows.

    Raises:
        ValueError: if growth_factor does not grow the scale, or backoff_factor does not shrink it.

    Example:
        >>> mpcore.optim.LossScaler(scale=1024.0).scale
        1024.0
    """

    def __init__(
        self, mesh: Mesh = Mesh(), scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:  # fmt: skip
        if scale <= 0 or growth_factor < 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                f"scale {scale} and growth_interval {growth_interval} must be positive, growth_factor {growth_factor} "
                f"at least 1, backoff_factor {backoff_factor} in (0, 1)"
            )
        check_mesh(mesh)
        self.mesh = mesh
        self.scale: float = scale
        self.good_steps: int = 0
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval

    @torch.no_grad()
    def unscale(self, model: nn.Module | ModelTree) -> None:
        """Divide all gradients by the scale. Call it once per step, after `reduce_gradients`.

        Raises:
            ValueError: if `reduce_gradients` was not called.
        """
        tree = tree_of(model)
        check_all_reduced(tree)
        for parameter in tree.parameters:
            grad = gradient_of(parameter)
            if grad is not None:
                local_tensor(grad).div_(self.scale)

    def update(self, finite: Tensor | bool) -> bool:
        """Adapt the scale after a backward. This is a collective over all ranks of the world.

        Return whether to step the optimizer: False on every rank if a rank's gradients are not finite.
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
        """Return the state to resume from, as JSON-serializable numbers."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state. Values that it lacks stay unchanged."""
        self.scale = float(state.get("scale", self.scale))
        self.good_steps = int(state.get("good_steps", self.good_steps))
