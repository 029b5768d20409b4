"""The gradient norm of the unsharded model, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mpcore._torch.optim import scale_each
from mpcore.collectives import all_reduce
from mpcore.gradients.accumulate import gradient_of
from mpcore.gradients.guard import check_all_reduced
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.sharding.declarations import ModelTree, tree_of
from mpcore.sharding.declare import Sharding, check_lies_on
from mpcore.sharding.local import data_run, is_dtensor, is_first_replica, local_tensor


@torch.no_grad()
def grad_norm(model: nn.Module | ModelTree, mesh: Mesh, p: float = 2.0) -> Tensor:
    """Return the p-norm of the unsharded model's gradient.

    Args:
        model: the model, or this rank's pipeline stage. Call `reduce_gradients` first.
        mesh: the model's mesh.
        p: 1, 2, ... or `math.inf`.

    Returns:
        An fp64 scalar tensor, the same on every rank.

    Raises:
        ValueError: if p is not positive, `reduce_gradients` was not called, or a parameter is on another mesh.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> round(mpcore.gradients.grad_norm(model, mpcore.Mesh()).item(), 3)  # of 16 + 4 ones
        4.472
    """
    tree = tree_of(model)
    check_all_reduced(tree)
    return norm_of(tree, mesh, gradient_of, p)


@torch.no_grad()
def norm_of(
    model: nn.Module | ModelTree, mesh: Mesh, of: Callable[[Tensor], Tensor | None], p: float = 2.0,
    numbers: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Compute `grad_norm` of any tensors sharded like the parameters; `of` maps a parameter to its tensor or None.

    With `numbers` return [1 + len(numbers)]: the norm, then the sum of each number over all ranks, of one message.
    """
    check_mesh(mesh)
    if not p > 0:
        raise ValueError(f"the norm's p is {p}, which is not above 0: take 1, 2, ... or math.inf")
    norms = [_norm(x, p) for _, x in owned_tensors(model, mesh, of) if x.numel()]
    each = torch.stack([torch.zeros((), dtype=torch.float64, device=mesh.device), *norms])
    if math.isinf(p):
        each = each.masked_fill(each.isnan(), math.inf)  # gloo and nccl may lose a NaN in a maximum
        return all_reduce(each.max(), mesh.world, "max")
    total, *sums = all_reduce(torch.cat([each.pow(p).sum().view(1), each.new_tensor(numbers)]), mesh.world)
    return torch.stack([total.pow(1 / p), *sums]) if sums else total.pow(1 / p)


def _norm(grad: Tensor, p: float) -> Tensor:
    if p == 2 and grad.is_cuda and grad.dtype != torch.float64:  # reads each byte once: float64 would be a copy
        return torch.linalg.vector_norm(grad, p, dtype=torch.float32).double()
    return torch.linalg.vector_norm(grad, p, dtype=torch.float64)


def owned_tensors(
    model: nn.Module | ModelTree, mesh: Mesh, of: Callable[[Tensor], Tensor | None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's tensors by name, without elements that a lower rank also holds."""
    for name, parameter, sharding, holds_first in _held(tree_of(model), mesh):
        found = of(parameter)
        if found is None or not (is_first_replica(found) if is_dtensor(found) else holds_first):
            continue
        grad = local_tensor(found)
        for shard in sharding.shards:
            if shard.replicated:
                front = grad.movedim(shard.dim, 0)
                begin = data_run(found)[0] if is_dtensor(found) and shard.dim == 0 else 0
                runs = ((max(start - begin, 0), max(end - begin, 0)) for start, end in shard.owned_runs)
                grad = torch.cat([front[:0], *(front[start:end] for start, end in runs)])
        yield name, grad


def _held(tree: ModelTree, mesh: Mesh) -> list[tuple[str, nn.Parameter, Sharding, bool]]:
    """Return the parameters to measure here, and whether this rank is the first on the data axis of each. Cached."""
    known = tree.derived.get(("held", id(mesh)))
    if known is None:
        held = []
        for name, parameter, sharding in tree.declared:
            check_lies_on(name, parameter, sharding, mesh)
            if all(axis.rank == 0 for axis in sharding.replica_axes(mesh)):
                held.append((name, parameter, sharding, sharding.data_axis(mesh).rank == 0))
        known = tree.derived["held", id(mesh)] = mesh, held  # the mesh lives as long as its id is known
    return known[1]


@torch.no_grad()
def clip_gradients(model: nn.Module | ModelTree, max_norm: float, norm: Tensor | float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`, without communication or waiting for the device.

    Args:
        model: the model, or this rank's pipeline stage.
        max_norm: the largest norm; 0 or less: no clipping.
        norm: the result of `grad_norm`, or a float. If it is not finite, gradients stay unchanged; skip the step then.

    Raises:
        ValueError: if `reduce_gradients` was not called, or `max_norm` is NaN.

    Note:
        - Don't call torch's `clip_grad_norm_` on a sharded model: each rank would clip by the norm of its own shards,
          and replicas would diverge.
        - torch's function divides by norm + 1e-6; this function divides by the norm.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> norm = mpcore.gradients.grad_norm(model, mpcore.Mesh())
        >>> mpcore.gradients.clip_gradients(model, 1.0, norm)
        >>> round(mpcore.gradients.grad_norm(model, mpcore.Mesh()).item(), 3)
        1.0
    """
    tree = tree_of(model)
    check_all_reduced(tree)
    if math.isnan(max_norm):
        raise ValueError(f"max_norm is {max_norm}, as every gradient would be: give a positive number, or 0 for none")
    if max_norm <= 0:
        return
    norm = torch.as_tensor(norm, dtype=torch.float64)
    scale = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    grads = [local_tensor(grad) for grad in map(gradient_of, tree.parameters) if grad is not None]
    for dtype in {grad.dtype for grad in grads}:  # a launch for many tensors
        alike = [grad for grad in grads if grad.dtype == dtype]
        scale_each(alike, scale.to(alike[0].device, dtype))
