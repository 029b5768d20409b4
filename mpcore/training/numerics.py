"""`numerics="invariant"`: which runs can have it, and how their step sums gradients (docs/bitwise.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore.collectives import all_reduce, tree_sum
from mpcore.gradients import gradient_of, zero_gradients
from mpcore.kernels._main_grad import MainGradState, main_grad, mark_main_grad
from mpcore.layers.attention.heads import HeadAttention
from mpcore.layers.attention.multi_head import ParallelAttention
from mpcore.layers.embedding import ColumnParallelEmbedding, VocabParallelEmbedding
from mpcore.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from mpcore.layers.mlp import ParallelMLP
from mpcore.layers.moe.router import Router
from mpcore.layers.norm import LayerNorm, RMSNorm
from mpcore.mesh.axis import Mesh
from mpcore.optim.adamw import AdamW
from mpcore.parallel.shared import shared_units
from mpcore.parallel.sync import reduce_once
from mpcore.sharding.declarations import ModelTree
from mpcore.sharding.declare import Sharding
from mpcore.training.policies import Precision


def leaves_of_rank(numerics: str, mesh: Mesh, micro_batches: int) -> int:
    """Return the number of micro-batches per step on each rank; with numerics "invariant", one per leaf."""
    if numerics not in ("default", "invariant"):
        raise ValueError(f"numerics {numerics!r} is none of default, invariant")
    if (numerics == "invariant") != (mesh.data.virtual > 0):
        way_out = "build_mesh(..., virtual=8)" if numerics == "invariant" else 'prepare(..., numerics="invariant")'
        raise ValueError(f"numerics {numerics!r} on a mesh with virtual degree {mesh.data.virtual}: take {way_out} too")
    if numerics == "default":
        return micro_batches
    leaves = mesh.data.pieces
    if leaves % micro_batches:
        raise ValueError(
            f"micro_batches {micro_batches} does not divide the {leaves} leaves of a rank: take one that does"
        )
    return leaves


def check_invariant(
    stages: Sequence[nn.Module], precision: Precision, policies: Mapping[str, Any], splits: bool
) -> None:
    """Raise ValueError for modules and policies that do not support `numerics="invariant"`."""
    data = policies["data"]
    asked = {
        "FP8": precision.fp8, "autocast": precision.autocast_dtype is not None, "compile": policies["compile"],
        "local updates": policies["local_updates"], "a schedule that splits backward": splits,
        "replicate above 1": data.replicate > 1, "offload of parameters": policies["offload"].parameters,
        "a reduce_dtype other than float32": data.reduce_dtype != torch.float32,
    }  # fmt: skip
    refused = [name for name, value in asked.items() if value]
    modules = [(name, module) for stage in stages for name, module in stage.named_modules() if _has_no_form(module)]
    refused += [f"{name}, a {type(module).__name__} with these options" for name, module in modules]
    if refused:
        raise ValueError(f'numerics "invariant" doesn\'t go with {refused[0]}: see docs/bitwise.md')


_FORMS = (
    ColumnParallelLinear, RowParallelLinear, ParallelMLP, ParallelAttention, RMSNorm, LayerNorm, VocabParallelEmbedding,
)  # fmt: skip


def _has_no_form(module: nn.Module) -> bool:
    layer = next((layer for layer in _FORMS if isinstance(module, layer)), type(module))
    if any(getattr(type(module), name, None) is not getattr(layer, name, None) for name in ("forward", "project")):
        return True  # a subclass that computes something else, such as an adapter
    if isinstance(module, HeadAttention):
        plain = isinstance(module, ParallelAttention) and module.q_norm is None and module.sinks is None
        return not plain or module.alibi or module.memory_dim is not None
    if isinstance(module, ParallelLinear):
        return module.mode.fp8 or not module.tp.virtual
    return isinstance(module, Router | ColumnParallelEmbedding)


class InvariantStep:
    """Sum the gradients of an invariant run by a binary tree over the leaves of its batch.

    A leaf is one of V equal parts of the batch, where V is the virtual degree of the data ranks. Each forward and
    backward computes one leaf, so no shape depends on the layout; the layout decides only which rank has which leaves.
    A rank adds its leaves as they come, and holds at most log2(leaves) + 1 partial sums. `all_reduce` adds the sums of
    the ranks.
    """

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) is not AdamW:
            kind = f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
            raise ValueError(f'numerics "invariant" has no form of {kind}: take optimizer=mpcore.AdamW')
        if any(shared_units(stages)):
            raise ValueError('numerics "invariant" has no ZeRO of a table that stages of a rank share: take Zero(0)')
        optimizer.set_fused(False)
        self.ends, self.trees = mesh.ends, {stage: ModelTree(stage) for stage in stages}
        for tree in self.trees.values():
            tree.declared  # noqa: B018  read now: between micro-batches modules hold gathered parameters
        self.losses: list[Tensor] = []  # of this step's leaves
        # of each parameter the levels and sums of the tree's nodes; None: no leaf below used it
        self.nodes: dict[nn.Parameter, list[tuple[int, Tensor | None]]] = {}
        self.sharded: dict[nn.Parameter, Any] = {}  # torch's record of a parameter that data parallelism sharded

    def watch_loss(self, loss: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        """Wrap the loss function to record the loss of each leaf."""

        def watched(output: Any, target: Tensor) -> Tensor:
            total = loss(output, target)
            if torch.is_grad_enabled():
                self.losses.append(total.detach().double())
            return total

        return watched

    def take(self, stage: nn.Module) -> None:
        """Take the gradients that the backward of a leaf left in one of the stages."""
        tree = self.trees[stage]
        if not self.sharded and tree.units:
            self.sharded = {p: record for each in self.trees.values() for p, record in fsdp.records(each.units)}
        for _, parameter, sharding in tree.declared:
            if not parameter.requires_grad:
                continue
            held = self.nodes.setdefault(parameter, [])
            held.append((0, self._take(parameter)))
            while not self._is_tied(sharding) and len(held) > 1 and held[-1][0] == held[-2][0]:
                (level, a), (_, b) = held[-2:]
                held[-2:] = [(level + 1, b if a is None else a if b is None else a + b)]

    def finish(self, total: Tensor) -> Tensor:
        """After the last leaf, sum the leaves' gradients (with ZeRO also over ranks), and return the summed loss."""
        for stage, tree in self.trees.items():
            for _, parameter, sharding in tree.declared:
                nodes = [node for _, node in self.nodes.pop(parameter, [])]
                if nodes and self._is_tied(sharding):
                    nodes = [self._tied_sum(parameter, nodes)]
                if nodes and nodes[0] is not None:
                    self._give(parameter, nodes[0])
            reduce_once(stage, leaves=True)
        losses, self.losses = self.losses, []
        return tree_sum(losses) if losses else total

    def drop(self) -> None:
        """Drop the gradients of a step."""
        self.losses.clear()
        self.nodes.clear()

    def _is_tied(self, sharding: Sharding) -> bool:
        return self.ends.size > 1 and any(axis.group is self.ends.group for axis in sharding.partial)

    def _tied_sum(self, parameter: nn.Parameter, leaves: list[Tensor | None]) -> Tensor:
        """Add the first and last stage's gradients of each leaf, as autograd does in one stage; then sum the leaves.

        The last stage returns zeros, so the later sum over both stages changes nothing.
        """
        record = self.sharded.get(parameter)
        computed: Any = parameter if record is None else fsdp.whole_parameter(record)
        zero = torch.zeros_like(computed, dtype=torch.promote_types(computed.dtype, torch.float32))
        mine = torch.stack([zero if leaf is None else leaf for leaf in leaves])
        total = all_reduce(mine, self.ends).to(computed.dtype).to(mine.dtype)
        return tree_sum(total.unbind()) if self.ends.rank == 0 else zero

    def _take(self, parameter: nn.Parameter) -> Tensor | None:
        record = self.sharded.get(parameter)
        grad = gradient_of(parameter) if record is None else fsdp.exchange_gradient(record, None)
        # in a tensor of its own; -0 becomes 0: where a rank holds none of an element, others add 0 to it
        grad = None if grad is None else grad.to(torch.promote_types(grad.dtype, torch.float32)) + 0.0
        if record is None:
            zero_gradients([parameter])
        return grad

    def _give(self, parameter: nn.Parameter, total: Tensor) -> None:
        record, main = self.sharded.get(parameter), main_grad(parameter)
        if record is not None:
            fsdp.exchange_gradient(record, total)
        elif main is not None:
            main.copy_(total)
            mark_main_grad(parameter, MainGradState.ADDED)
        else:
            parameter.grad = total.to(parameter.dtype)
