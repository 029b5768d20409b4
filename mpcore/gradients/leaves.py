"""The gradients of a step as a binary tree over its leaves, on meshes with virtual degrees.

A leaf is the batch's V-th part, V the virtual degree of the data ranks. Each forward and backward is of one leaf, so no
shape depends on the layout; ranks and micro-batches decide only who holds which leaves. A rank joins its leaves as they
come, and holds log2 of their number and one more at a time. `mpcore.collectives.all_reduce` joins the ranks' nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore.collectives import all_reduce, tree_sum
from mpcore.gradients.accumulate import gradient_of, zero_gradients
from mpcore.kernels._main_grad import MainGradState, main_grad, mark_main_grad
from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import ModelTree
from mpcore.sharding.declare import Sharding

Node = tuple[int, Tensor | None]  # its level in the tree, and its sum; None: no leaf below used the parameter


class LeafGradients:
    """Takes the gradients of each leaf after its backward, and gives the sum of this rank's leaves.

    Args:
        stages: this rank's stages, laid out over data.
        mesh: their mesh, with virtual degrees.
    """

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh) -> None:
        self.mesh = mesh
        self.trees = {stage: ModelTree(stage) for stage in stages}
        for tree in self.trees.values():
            tree.declared  # noqa: B018  read now: between micro-batches modules hold gathered parameters
        self.nodes: dict[nn.Parameter, list[Node]] = {}
        self.sharded: dict[nn.Parameter, Any] = {}  # torch's record of a parameter that data parallelism sharded

    def take(self, stage: nn.Module) -> None:
        """Take the gradients that the backward of a leaf left in one of the stages."""
        tree = self.trees[stage]
        if not self.sharded and tree.units:
            self.sharded = {p: record for each in self.trees.values() for p, record in fsdp.records(each.units)}
        for _, parameter, sharding in tree.declared:
            grad = self._take(parameter) if parameter.requires_grad else None
            held = self.nodes.setdefault(parameter, [])
            # -0 becomes 0: where a rank holds none of an element, others add 0 to it
            held.append((0, None if grad is None else grad.to(torch.promote_types(grad.dtype, torch.float32)) + 0.0))
            while not self._is_tied(sharding) and len(held) > 1 and held[-1][0] == held[-2][0]:
                (level, a), (_, b) = held[-2:]
                held[-2:] = [(level + 1, b if a is None else a if b is None else a + b)]

    def finish(self) -> None:
        """Give each parameter the sum of this rank's leaves, as its gradient."""
        for tree in self.trees.values():
            for _, parameter, sharding in tree.declared:
                held = self.nodes.pop(parameter, [])
                if held and self._is_tied(sharding):
                    self._give(parameter, self._tied_sum(parameter, [node for _, node in held]))
                elif held and held[0][1] is not None:
                    self._give(parameter, held[0][1])

    def drop(self) -> None:
        """Forget all leaves."""
        self.nodes.clear()

    def _is_tied(self, sharding: Sharding) -> bool:
        ends = self.mesh.ends
        return ends.size > 1 and any(axis.group is ends.group for axis in sharding.partial)

    def _tied_sum(self, parameter: nn.Parameter, leaves: list[Tensor | None]) -> Tensor:
        """Add what the first and the last stage have of each leaf, as autograd does in one stage; then sum the leaves.

        The last stage returns zeros, so that the sum over both, which is still to come, changes nothing.
        """
        record = self.sharded.get(parameter)
        computed = parameter if record is None else fsdp.whole_parameter(record)
        zero = torch.zeros(computed.shape, dtype=torch.promote_types(computed.dtype, torch.float32))
        mine = torch.stack([zero.to(computed.device) if leaf is None else leaf for leaf in leaves])
        total = all_reduce(mine, self.mesh.ends).to(computed.dtype).to(mine.dtype)
        return tree_sum(total.unbind()) if self.mesh.ends.rank == 0 else torch.zeros_like(total[0])

    def _take(self, parameter: nn.Parameter) -> Tensor | None:
        record = self.sharded.get(parameter)
        if record is not None:
            return fsdp.take_gradient(record)
        grad = gradient_of(parameter)
        grad = grad.clone() if grad is not None and grad is main_grad(parameter) else grad
        zero_gradients([parameter])
        return grad

    def _give(self, parameter: nn.Parameter, total: Tensor) -> None:
        record, main = self.sharded.get(parameter), main_grad(parameter)
        if record is not None:
            fsdp.give_gradient(record, total)
        elif main is not None:
            main.copy_(total)
            mark_main_grad(parameter, MainGradState.ADDED)
        else:
            parameter.grad = total.to(parameter.dtype)
