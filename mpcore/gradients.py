"""Floor 4: what happens to gradients between backward and the optimizer step, on any mesh.

Everything is derived from what layers declare of their parameters (`mpcore.sharding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpcore.collectives import all_reduce
from mpcore.kernels.adamw import sum_of_squares
from mpcore.mesh import Axis, Mesh
from mpcore.sharding import Shard, data_run, is_dtensor, local_tensor, owners, sharding_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def main_gradients(model: nn.Module) -> nn.Module:
    """Have gradients accumulated in float32, whatever the parameters and the products are computed in.

    Each parameter gets `main_grad`, float32 of its local shape (float64 for float64), and `.grad` stays None. The
    weight gradient of the parallel linears is a product with a float32 result, added there in backward; all other
    gradients are added as autograd finishes them. `reduce_gradients`, `grad_norm`, `clip_gradients` and the optimizers
    of `mpcore.optim` read it by `gradient_of`; begin each step with `zero_gradients` (or their `zero_grad`).

    Args:
        model: the model, or this rank's stage of it, not sharded over data: `fully_shard` has an accumulation of its
            own, in its `reduce_dtype`.

    Returns:
        The model.

    Raises:
        ValueError: if a parameter is sharded over data.
    """
    for name, _, _, parameter in owners(model):
        if is_dtensor(parameter):
            raise ValueError(f"{name} is sharded over data: its gradients accumulate in fully_shard's reduce_dtype")
    for parameter in model.parameters():
        if parameter.requires_grad and getattr(parameter, "main_grad", None) is None:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.main_grad = torch.zeros_like(parameter, dtype=wide)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_accumulate)
    return model


@torch.no_grad()
def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter: its main gradient if it has one that was added to, else `.grad`."""
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return parameter.grad
    _accumulate(parameter)
    return main if parameter.grad_added_to_main_grad else None  # type: ignore[attr-defined]


def add_to_main_gradients(model: nn.Module) -> None:
    """Add what a backward in two passes left in `.grad`, of which no hook is told. `Pipeline` calls it."""
    for parameter in model.parameters():
        if getattr(parameter, "main_grad", None) is not None:
            _accumulate(parameter)


@torch.no_grad()
def _accumulate(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


@torch.no_grad()
def zero_gradients(parameters: Iterable[Tensor]) -> None:
    """Forget all gradients, main gradients included."""
    for parameter in parameters:
        parameter.grad = None
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]


@torch.no_grad()
def reduce_gradients(model: nn.Module, *over: Axis | Mesh) -> None:
    """Finish the gradients: sum those that layers declare as pending. Call it once, after the last backward.

    Pending are the gradients of replicated parameters that saw only this rank's part of the work: norms under sequence
    parallel, norms of sharded heads, replicated KV heads, embeddings tied across pipeline stages. One all-reduce an
    axis, in fp32 (fp64 for fp64), however many parameters there are. A parameter that got no gradient on some rank
    counts as zero there; one that got none on any rank keeps None.

    Args:
        model: the model, or this rank's stage of it.
        over: axes over which every parameter is replicated with other data on each rank, and which nothing else
            reduces; a mesh stands for each parameter's own (`Sharding.data_axis`): plain data parallelism.
    """
    pending: dict[object, tuple[Axis, list[tuple[str, nn.Parameter, Shard | None]]]] = {}
    for name, module, leaf, parameter in owners(model):
        if not parameter.requires_grad:
            continue
        sharding = sharding_of(module, leaf, parameter)
        axes = [sharding.data_axis(on) if isinstance(on, Mesh) else on for on in over]
        wanted = [(axis, None) for axis in (*sharding.partial, *axes) if axis.size > 1]
        wanted += [(shard.axis, shard) for shard in sharding.shards if shard.replicated]
        for axis, shard in wanted:
            pending.setdefault(axis.group, (axis, []))[1].append((name, parameter, shard))
    for axis, entries in sorted(pending.values(), key=lambda entry: entry[0].name):  # the same order on every rank
        _reduce_pending(axis, sorted(entries, key=lambda entry: entry[0]))


def _reduce_pending(axis: Axis, entries: list[tuple[str, nn.Parameter, Shard | None]]) -> None:
    wide = torch.float64 if any(p.dtype == torch.float64 for _, p, _ in entries) else torch.float32
    here = [gradient_of(p) is not None for _, p, _ in entries]
    present, complete = torch.tensor(here, dtype=wide), all(here)
    for (_, parameter, _), there in zip(entries, here, strict=True):
        if not there:
            parameter.grad = torch.zeros_like(parameter)
    parts = [_pending_part(p, shard).to(wide) for _, p, shard in entries]
    flat = torch.cat([present.to(parts[0].device), *(part.reshape(-1) for part in parts)])
    present, *sums = all_reduce(flat, axis).split([len(entries), *(part.numel() for part in parts)])
    found = None if complete else present.tolist()  # waits for the device, so only where it matters
    for i, ((_, parameter, shard), part, total) in enumerate(zip(entries, parts, sums, strict=True)):
        if found is not None and found[i] == 0:
            zero_gradients([parameter])
        else:
            _store_part(parameter, shard, total.view_as(part))


def _pending_part(parameter: nn.Parameter, shard: Shard | None) -> Tensor:
    grad = gradient_of(parameter)
    assert grad is not None
    if shard is None:
        return local_tensor(grad)
    # Replicas may lie in different data shards on different ranks, so they are summed whole.
    whole = grad.full_tensor() if is_dtensor(grad) else grad
    mine, slots = _replica_slots(shard)
    front = whole.movedim(shard.dim, 0)
    part = front.new_zeros(len(shard.replicated), *front.shape[1:])
    part[slots] = front[mine]
    return part


def _store_part(parameter: nn.Parameter, shard: Shard | None, total: Tensor) -> None:
    grad = gradient_of(parameter)
    assert grad is not None
    if shard is None:
        local_tensor(grad).copy_(total)
        return
    mine, slots = _replica_slots(shard)
    whole = grad.full_tensor() if is_dtensor(grad) else grad
    whole.movedim(shard.dim, 0)[mine] = total[slots].to(whole.dtype)
    if is_dtensor(grad):
        start, end = data_run(grad)
        grad.to_local().copy_(whole[start:end])


def _replica_slots(shard: Shard) -> tuple[list[int], list[int]]:
    slot = {index: i for i, index in enumerate(shard.replicated)}
    held = [index for start, end in shard.mine for index in range(start, end)]
    mine = [i for i, index in enumerate(held) if index in slot]
    return mine, [slot[held[i]] for i in mine]


def _is_first_replica(x: DTensor) -> bool:
    """Whether no lower rank holds the same shard: shards may be replicated over nodes."""
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(rank == 0 for place, rank in zip(x.placements, coordinate, strict=True) if place.is_replicate())


@torch.no_grad()
def grad_norm(model: nn.Module, mesh: Mesh, p: float = 2.0) -> Tensor:
    """The p-norm of the whole model's gradient, every logical element counted once, the same on every rank.

    Args:
        model: the model, or this rank's stage of it, after `reduce_gradients`.
        mesh: the mesh it lies on.
        p: 1, 2, ... or `math.inf`.

    Returns:
        An fp64 scalar tensor.
    """
    return norm_of(model, mesh, gradient_of, p)


def norm_of(model: nn.Module, mesh: Mesh, of: Callable[[Tensor], Tensor | None], p: float = 2.0) -> Tensor:
    """As `grad_norm`, of any tensors that lie as the parameters do; `of` gives a parameter's, or None."""
    norms = [_norm(x, p) for x in _owned(model, mesh, of) if x.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    each = torch.stack([zero, *norms])
    if math.isinf(p):
        each = each.masked_fill(each.isnan(), math.inf)  # gloo and nccl may lose a NaN in a maximum
        return all_reduce(each.max(), mesh.world, "max")
    return all_reduce(each.pow(p).sum(), mesh.world).pow(1 / p)


def _norm(grad: Tensor, p: float) -> Tensor:
    if p == 2 and grad.is_cuda and grad.dtype != torch.float64:
        return sum_of_squares(grad).sqrt()  # reads half precision as it is
    return torch.linalg.vector_norm(grad, p, dtype=torch.float64)


def _owned(model: nn.Module, mesh: Mesh, of: Callable[[Tensor], Tensor | None]) -> Iterator[Tensor]:
    """This rank's tensors, without the elements that a lower rank holds as well."""
    for _, module, leaf, parameter in owners(model):
        found = of(parameter)
        if found is None:
            continue
        sharding = sharding_of(module, leaf, parameter)
        first = _is_first_replica(found) if is_dtensor(found) else sharding.data_axis(mesh).rank == 0
        if not first or any(axis.rank > 0 for axis in sharding.replica_axes(mesh)):
            continue
        grad = local_tensor(found)
        for shard in sharding.shards:
            if shard.replicated:
                start, end = data_run(found) if is_dtensor(found) else (0, len(grad))
                owned = torch.tensor(shard.owned, device=grad.device)
                owned = owned[start:end] if shard.dim == 0 else owned
                grad = grad.movedim(shard.dim, 0)[owned]
        yield grad


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm is at most `max_norm`. No communication, no wait for the device.

    Args:
        model: the model, or this rank's stage of it.
        max_norm: the bound; 0 or less: no clipping.
        norm: what `grad_norm` returned. Where it isn't finite gradients stay as they are: skip the step.
    """
    if max_norm <= 0:
        return
    scale = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    for grad in map(gradient_of, model.parameters()):
        if grad is not None:
            local_tensor(grad).mul_(scale.to(grad.dtype))
