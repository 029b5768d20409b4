"""Floor 4: split a stage's backward in two: first the gradients of its inputs, then the gradients of its weights.

torch's version (in `torch.distributed.pipelining`) silently omits the gradients of weights that don't depend on an
input with a gradient, and counts some gradients of weights that share an operation twice. The two halves here compute
the same gradients as one backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Group:
    """Hold leaves, such as parameters, and the operations on a path to an input from which backward reaches them."""

    nodes: list[Node]
    leaves: set[Node]


@dataclass
class Deferred:
    """Hold the state that the second half needs. It runs the full backward of `ends`."""

    ends: list[tuple[GradientEdge, Tensor]]  # the outputs that don't depend on an input, with their gradients
    groups: list[_Group] = field(default_factory=list)  # they share no operation
    caught: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)  # that reached it in the first half


def backward_inputs(
    outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None], inputs: Sequence[Any]
) -> tuple[tuple[Tensor | None, ...], Deferred]:
    """Run the first half: return the gradients of a stage's inputs, and the argument of `backward_weights`.

    Args:
        outputs: the stage's outputs or the loss, as tensors or as gradient edges.
        grads: the gradients of the outputs. An output whose gradient is None is ignored.
        inputs: the stage's inputs. Gradients, contiguous, are computed for tensors that require them.

    Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
    """
    ends = [
        (y if isinstance(y, GradientEdge) else get_gradient_edge(y), dy)
        for y, dy in zip(outputs, grads, strict=True)
        if dy is not None and (isinstance(y, GradientEdge) or y.requires_grad)
    ]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    order = list(_children_first([y.node for y, _ in ends]))
    feeds = {get_gradient_edge(x).node for x in wanted}  # and what lies on the way to an input
    groups: dict[Node, _Group] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        if not any(child in feeds for child in children):
            continue
        feeds.add(node)
        below = _children_first([child for child in children if child not in feeds])
        leaves = {x for x in below if x.name() == "torch::autograd::AccumulateGrad"}
        if leaves:
            group = _Group([node], leaves)
            for met in {id(groups[leaf]): groups[leaf] for leaf in leaves if leaf in groups}.values():
                group.nodes += met.nodes
                group.leaves |= met.leaves
            groups |= dict.fromkeys(group.leaves, group)
    apart = [(y, dy) for y, dy in ends if y.node not in feeds]
    ends = [(y, dy) for y, dy in ends if y.node in feeds]
    deferred = Deferred(apart, list({id(group): group for group in groups.values()}.values()))
    found: dict[int, Tensor | None] = {}
    if ends:
        caught = deferred.caught
        handles = [
            node.register_prehook(lambda reached, node=node: caught.__setitem__(node, reached))
            for group in deferred.groups
            for node in group.nodes
        ]
        try:
            ys, dys = zip(*ends, strict=True)
            dxs = torch.autograd.grad(ys, wanted, dys, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        found = {id(x): None if dx is None else dx.contiguous() for x, dx in zip(wanted, dxs, strict=True)}
    return tuple(found.get(id(x)) for x in inputs), deferred


def backward_weights(deferred: Deferred) -> None:
    """Run the second half: add to `.grad` of every leaf, such as a parameter, as `Tensor.backward` does."""
    # A group with several operations may need saved tensors that the backward of another group frees: it runs first.
    groups = sorted(deferred.groups, key=lambda group: len(group.nodes) == 1)
    if deferred.ends:
        ys, dys = zip(*deferred.ends, strict=True)
        torch.autograd.backward(ys, dys, retain_graph=bool(groups))
    for i, group in enumerate(groups):
        reached = [(node, deferred.caught.pop(node)) for node in group.nodes if node in deferred.caught]
        pairs = [(GradientEdge(node, j), dy) for node, dys in reached for j, dy in enumerate(dys) if dy is not None]
        if not pairs:
            continue
        # The gradients caught at an operation already include what another operation of the group sends to it.
        handles = [node.register_prehook(lambda _, dys=dys: dys) for node, dys in reached]
        try:
            edges, dys = zip(*pairs, strict=True)
            leaves: Any = [leaf.variable for leaf in group.leaves]  # type: ignore[attr-defined]
            more = len(group.nodes) > 1 and i + 1 < len(groups)
            torch.autograd.backward(edges, dys, retain_graph=more, inputs=leaves)
        finally:
            for handle in handles:
                handle.remove()
    deferred.ends, deferred.groups = [], []


def _children_first(roots: Sequence[Node]) -> Iterator[Node]:
    """Yield all operations that a backward from `roots` reaches, each after its children."""
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, after = stack.pop()
        if after:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
