"""Run the steps of a mixture of experts with dispatch buffers of fixed sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpcore.layers.moe.bounds import DispatchBounds
from mpcore.training.observers import Observer

if TYPE_CHECKING:
    from mpcore.training.run import Run


class BoundedDispatch(Observer):
    """Repeat a step whose dispatch buffers overflowed on any rank."""

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
