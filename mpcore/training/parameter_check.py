"""Refuse a run's parameters that were unfrozen, added or replaced after `prepare`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from operator import methodcaller
from typing import Any

import torch

from mpcore.sharding.declarations import ModelTree
from mpcore.sharding.local import reshard

_VALUES = methodcaller("values")


class ParameterCheck:
    """Compare the parameters before each step with those of `prepare`."""

    def __init__(self, tree: ModelTree, param_dtype: torch.dtype | None, dtype: Any) -> None:
        self.tree, self.dtype = tree, dtype
        self.rounded = {p for p in tree.parameters if p.dtype == param_dtype and not p.requires_grad}
        self.held: list[Mapping[str, Any]] = []  # of each module its parameters and its submodules
        self.ids: list[int] = [0]

    def __call__(self, together: bool = False) -> str | None:
        """Return an error, which all ranks must raise after the step, if parameters of the same shapes were replaced.

        Raises:
            ValueError: if this step can't run as built: parameters were unfrozen, added, or are of another shape. If
                the ranks raise `together`, for each error: before the first step, ZeRO can't gather what was replaced.
        """
        if self.rounded and any(p.requires_grad for p in self.rounded):
            name = next(name for name, p, _ in self.tree.declared if p in self.rounded and p.requires_grad)
            raise ValueError(
                f"{name} requires a gradient, and was frozen in prepare, which made no float32 master of it for "
                f"precision {self.dtype}: freeze it after prepare, or use Precision(.., autocast=True)"
            )
        if [*map(id, itertools.chain.from_iterable(map(_VALUES, self.held)))] == self.ids:
            return None
        reshard(self.tree.model)  # a forward before this step left copies
        tree = ModelTree(self.tree.model)
        if [*map(id, tree.parameters)] != [*map(id, self.tree.parameters)]:
            error = (
                "parameters were added or replaced after prepare, and the optimizer holds the old ones: add adapters "
                "before prepare, and give run.model to no fully_shard, FSDP or accelerator.prepare"
            )
            pairs = () if together else itertools.zip_longest(tree.parameters, self.tree.parameters)
            if pairs and all(isinstance(q, type(p)) and (q.shape, q.dtype) == (p.shape, p.dtype) for p, q in pairs):
                return error
            raise ValueError(error)
        self.held = [held for _, module in tree.modules for held in (module._parameters, module._modules)]
        self.ids = [*map(id, itertools.chain.from_iterable(map(_VALUES, self.held)))]
        return None
