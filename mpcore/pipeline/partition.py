"""Assign the blocks of a model to pipeline stages, and stages to ranks.

It works on any list of modules: `parameter_costs` counts the weights of each, and `partition` splits the list so that
the slowest stage is as fast as possible.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import ChainMap
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from mpcore.layers.embedding import TABLES
from mpcore.layers.moe.experts import GroupedLinear
from mpcore.sharding.dcp import refuse_shards
from mpcore.sharding.declarations import declared_by
from mpcore.sharding.declare import Sharding


def partition(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Return the range of blocks of each stage, such that the slowest stage is as fast as possible.

    The result is exact, by dynamic programming. Among all splits with the least cost of the slowest stage, it is the
    one with the least sum of squares, so the other stages are even. In a tie, earlier stages get more blocks.

    Args:
        costs: the cost of each block, in any unit; not negative.
        stages: the number of stages; each gets at least one block.
        first: additional cost of the first stage, for example of the embedding.
        last: additional cost of the last stage, for example of the head and the loss.

    Raises:
        ValueError: if there are more stages than blocks, or a cost is negative or not finite.

    Example:
        >>> mpcore.pipeline.partition([1.0] * 6, 2, last=2.0)  # the head costs as much as two blocks
        [range(0, 4), range(4, 6)]
    """
    n = len(costs)
    if stages < 1:
        raise ValueError(f"{stages} stages: at least 1 is needed")
    if n < stages:
        raise ValueError(f"{n} blocks are fewer than the {stages} stages: each stage holds at least one")
    for what, cost in (*((f"block {i}", c) for i, c in enumerate(costs)), ("first", first), ("last", last)):
        if not 0 <= cost < math.inf:
            raise ValueError(f"the cost {cost} of {what} is not a finite number of at least 0")
    # costs with the extras folded into the outer blocks, which no cut can take away from them
    weighed = [cost + (first if i == 0 else 0) + (last if i == n - 1 else 0) for i, cost in enumerate(costs)]
    sums = [0.0, *itertools.accumulate(weighed)]
    return _even_cut(sums, stages, _slowest(sums, stages))


def _slowest(sums: list[float], stages: int) -> float:
    """The least cost of the slowest stage. best[i]: of the first i blocks in the stages so far."""
    n = len(sums) - 1
    best = [math.inf] + [sums[i] for i in range(1, n + 1)]
    for stage in range(2, stages + 1):
        found = [math.inf] * (n + 1)
        for i in range(stage, n + 1):
            # best grows with j, the rest shrinks: the least maximum is where they cross
            cross = bisect_left(range(stage - 1, i), 0, key=lambda j, i=i: best[j] - (sums[i] - sums[j])) + stage - 1
            found[i] = min(max(best[j], sums[i] - sums[j]) for j in (cross - 1, cross) if stage - 1 <= j < i)
        best = found
    return best[n]


def _even_cut(sums: list[float], stages: int, slowest: float) -> list[range]:
    """Of the cuts whose stages all cost at most `slowest` the one with the least sum of squares."""
    found: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}  # of the first i blocks in the stages so far
    for stage in range(1, stages + 1):
        longer: dict[int, tuple[float, list[range]]] = {}
        for i in range(stage, len(sums)):
            for j in range(i - 1, stage - 2, -1):
                cost = sums[i] - sums[j]
                if cost > slowest:
                    break
                if j in found:
                    total = found[j][0] + cost * cost
                    if i not in longer or total < longer[i][0] * (1 - 1e-12):  # ties: the last stage is the shortest
                        longer[i] = total, [*found[j][1], range(j, i)]
        found = longer
    return found[len(sums) - 1][1]


def split_sizes(sizes: Sequence[int], blocks: int) -> list[range]:
    if min(sizes, default=0) < 1 or sum(sizes) != blocks:
        raise ValueError(f"stages of {list(sizes)} blocks hold {sum(sizes)}, not the model's {blocks}, none empty")
    return [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def join_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """Join a rank's stages in one module with the unsharded model's names, for the optimizer and checkpoints.

    The joined module shares modules, parameters and buffers with the stages, and can't be called. If several stages
    have a module of one name, it must be the same module, be empty, or hold only other modules, as lists of blocks do.
    Such lists are joined.

    Raises:
        ValueError: if two stages hold different parameters, buffers or modules under one name.
    """
    for name in dict.fromkeys(name for stage in stages for name in (*stage._parameters, *stage._buffers)):
        held = [{**stage._parameters, **stage._buffers}.get(name) for stage in stages]
        if (count := len(set(map(id, held)) - {id(None)})) > 1:
            raise ValueError(f"{count} stages hold a parameter or buffer {name} each: which of them is the model's?")
    joined = _Joined(stages)
    for name in dict.fromkeys(name for stage in stages for name, _ in stage.named_children()):
        children = [child for stage in stages if (child := stage._modules.get(name)) is not None]
        children = list({id(child): child for child in children}.values())
        full = [child for child in children if any(True for _ in (*child.parameters(), *child.buffers()))]
        children = full or children[:1]  # what stands for a module of another stage is empty
        hold = [child for child in children if child._parameters or child._buffers]
        if len(children) > 1 and hold:
            raise ValueError(
                f"{len(children)} stages of a rank hold a {type(hold[0]).__name__} {name} each: give them one module, "
                f"and if its weight is tied, leave out add_partial over mesh.ends"
            )
        joined.add_module(name, children[0] if len(children) == 1 else join_stages(children))
    return joined


class _Roots(ChainMap[str, Any]):
    """The tensors at the roots of several stages. A value is set in each stage that has its name."""

    def __getitem__(self, name: str) -> Any:
        return next((held[name] for held in self.maps if held.get(name) is not None), None)

    def __setitem__(self, name: str, value: Any) -> None:
        for held in [held for held in self.maps if name in held] or self.maps[:1]:
            held[name] = value


class _Joined(nn.Module):
    """Stages as one module, with the tensors and declarations that the stages have at their roots now."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        refuse_shards(self)
        roots = {kind: _Roots(*(vars(stage)[kind] for stage in stages)) for kind in ("_parameters", "_buffers")}
        vars(self).update(roots, stages=tuple(stages))
        self._non_persistent_buffers_set = {name for each in stages for name in each._non_persistent_buffers_set}
        self.inits = {name: init for stage in stages for name, init in getattr(stage, "inits", {}).items()}

    @property
    def shardings(self) -> dict[str, Sharding]:
        return {name: lies for stage in vars(self)["stages"] for name, lies in declared_by(stage).items()}


# --- what a block costs -------------------------------------------------------------------------------------------


def parameter_costs(modules: Iterable[nn.Module]) -> list[float]:
    """Return the number of weights that each module multiplies by: the elements of its matrices, except tables.

    Of experts it counts the fraction that a token uses (`GroupedLinear.used_share`).
    """

    def cost(module: nn.Module) -> float:
        used = module.used_share if isinstance(module, GroupedLinear) else 1
        held = () if isinstance(module, TABLES) else module.parameters(recurse=False)
        return sum(p.numel() * used for p in held if p.dim() > 1)

    return [float(sum(map(cost, root.modules()))) for root in modules]
