"""Mixture of experts: the router, the dispatch of tokens over ep, and the experts. Open `layer.py` first."""

from mpcore.layers.moe.bounds import DispatchBounds
from mpcore.layers.moe.experts import Experts, GroupedLinear
from mpcore.layers.moe.layer import ParallelMoE
from mpcore.layers.moe.router import Router
from mpcore.layers.moe.statistics import RouterStatistics, update_routers

__all__ = [
    "DispatchBounds", "Experts", "GroupedLinear", "ParallelMoE", "Router", "RouterStatistics", "update_routers",
]  # fmt: skip
