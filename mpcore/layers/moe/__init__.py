"""Mixture of experts: the router, the dispatch of tokens over ep, and the experts. Open `layer.py` first."""

from typing import TYPE_CHECKING, Any

from mpcore.layers.moe.bounds import DispatchBounds
from mpcore.layers.moe.experts import Experts, GroupedLinear
from mpcore.layers.moe.layer import ParallelMoE
from mpcore.layers.moe.router import Router
from mpcore.layers.moe.statistics import RouterStatistics, update_routers

__all__ = [
    "DispatchBounds", "Experts", "GroupedLinear", "ParallelMoE", "Router", "RouterStatistics", "update_routers",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        moved = "mpcore.layers.moe.upcycle is mpcore.interop.upcycle.upcycle since 0.3"
        raise AttributeError(moved if name == "upcycle" else f"module {__name__!r} has no attribute {name!r}")
