"""Floor 4: what happens to gradients between backward and the optimizer step, on any mesh.

Everything is derived from what layers declare of their parameters (`mpcore.sharding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from mpcore.collectives import all_reduce
from mpcore.kernels.adamw import sum_of_squares
from mpcore.layers.moe import check_experts, check_replicas
from mpcore.mesh import Axis, Mesh, check_axis, check_mesh
from mpcore.sharding import Shard, check_lies_on, data_run, declarations, is_dtensor, local_tensor, param_groups, units

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Elements that one all-reduce sums: 256 MiB in float32, of which two copies live; a link is long at its full rate.
BUCKET = 2**26


def main_gradients(model: nn.Module) -> nn.Module:
    """Have gradients accumulated in float32, whatever the parameters and the products are computed in.

    Each parameter gets `main_grad`, float32 of its local shape (float64 for float64), and `.grad` stays None. The
    weight gradient of the parallel linears is a product with a float32 result, added there in backward; all other
    gradients are added as autograd finishes them. `reduce_gradients`, `grad_norm`, `clip_gradients` and the optimizers
    of `mpcore.optim` read it by `gradient_of`; begin each step with `zero_gradients` (or their `zero_grad`). Torch's
    optimizers, which read `.grad` alone, refuse to step where it isn't there. Hooks of a
    parameter find `main_grad`, and no `.grad`.
    `DistributedDataParallel` sums `.grad` alone, so it can't be used with them: `reduce_gradients(model, mesh)` can.

    Args:
        model: the model, or this rank's stage of it, not sharded over data: `fully_shard` has an accumulation of its
            own, in its `reduce_dtype`.

    Returns:
        The model.

    Raises:
        ValueError: if a parameter is sharded over data, or the model is wrapped in `DistributedDataParallel`.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("DistributedDataParallel sums no main gradients: take its module and reduce_gradients")
    for name, parameter, _ in declarations(model):
        if is_dtensor(parameter):
            raise ValueError(f"{name} is sharded over data: its gradients accumulate in fully_shard's reduce_dtype")
    check_steps()
    for parameter in model.parameters():
        if parameter.requires_grad and getattr(parameter, "main_grad", None) is None:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.main_grad = torch.zeros_like(parameter, dtype=wide)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_accumulate)
    return model


@cache
def check_steps() -> None:
    """Have every optimizer refuse, before it steps, parameters that it would step wrongly, or not at all.

    What tp or ep cuts is known from the first `reduce_gradients` on.
    """
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    kind, ours = type(optimizer).__name__, hasattr(optimizer, "reads_main_gradients")
    for group in optimizer.param_groups:
        for p in group["params"]:
            check_current(p)
            if not ours and p.grad is None and getattr(p, "grad_added_to_main_grad", False):
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} is in main_grad, and {kind} reads .grad "
                    f"alone, which is None: take an optimizer of mpcore.optim, or leave main_gradients out"
                )
            if isinstance(optimizer, OF_WHOLE_TENSORS) and getattr(p, "is_cut", False):
                raise ValueError(
                    f"{kind} computes each element from its whole tensor, and a parameter of shape {tuple(p.shape)} is "
                    f"this rank's part of one: take mpcore.AdamW or mpcore.Muon, or what steps each element by itself"
                )
        if ours:
            continue
        stepped = [p for p in group["params"] if p.grad is not None]
        cut = [p for p in stepped if is_dtensor(p)]
        plain = [p for p in stepped if not is_dtensor(p) and p.numel() != 1]  # torch takes one number for a replica
        if cut and plain and _steps_together(group, stepped):
            raise ValueError(
                f"{kind} steps all of a group at once, and of this one {len(cut)} parameters are sharded over data and "
                f"{len(plain)} are not, as one of shape {tuple(plain[0].shape)}: foreach=False, a group for each kind, "
                f"or mpcore.AdamW"
            )


# Of torch's optimizers those that don't step each element by itself.
OF_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)


def _steps_together(group: dict[str, Any], parameters: list[Tensor]) -> bool:
    """Whether torch's optimizers take their foreach or fused path, which on a GPU is the default."""
    said = group.get("foreach"), group.get("fused")
    return any(said) or ("foreach" in group and said == (None, None) and parameters[0].is_cuda)


def check_current(parameter: Tensor) -> None:
    """Refuse a parameter that data parallelism replaced."""
    if hasattr(parameter, "replaced_by_shards"):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is no longer the model's, whose shards replaced it: make "
            f"the optimizer after shard_data_parallel"
        )


@torch.no_grad()
def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter: its main gradient if it has one that was added to, else `.grad`.

    Raises:
        ValueError: for one that data parallelism replaced: it would never have one.
    """
    check_current(parameter)
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return parameter.grad
    _accumulate(parameter)
    return main if parameter.grad_added_to_main_grad else None  # type: ignore[attr-defined]


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
def drop_gradients(model: nn.Module, parameters: Iterable[Tensor] | None = None) -> None:
    """Forget the gradients of a step that is given up, those too that `shard_data_parallel` has not summed yet.

    Call it, on all ranks, where a backward raised and was caught, or where the step ends before its last micro-batch.
    `zero_grad` of the model and of `mpcore.optim` does it; that of torch's optimizers sees only what was summed.

    Args:
        model: the model, or this rank's stage of it; where stages are joined, each of them.
        parameters: those whose gradients are forgotten; None: all of the model's.
    """
    chosen = None if parameters is None else {id(p): p for p in parameters}
    for context in _contexts(model):
        groups = _groups(context)
        failed = _backward_failed(context)
        if failed:
            for group in groups:
                group._training_state = type(group._training_state).POST_BACKWARD  # so that nothing is summed now
            context.is_last_backward, context.iter_forward_root = True, None
            context.all_states[0]._root_post_backward_final_callback()
        for group in groups:
            if failed:
                group.reshard()
            mine = [p for p in group.fsdp_params if chosen is None or id(p.sharded_param) in chosen]
            if mine:
                group._partial_reduce_output = None
            for p in mine:
                p.unsharded_accumulated_grad = p.sharded_param.grad = None  # the model's may be gathered ones
                whole = getattr(p, "_unsharded_param", None)
                if whole is not None and whole.grad is not None:
                    whole.grad = None
    zero_gradients(model.parameters() if chosen is None else chosen.values())


def _contexts(model: nn.Module) -> list[Any]:
    """What the units of a stage share, of each stage that ran."""
    found = {id(context): context for unit in units(model) for context in (unit._get_fsdp_state()._state_ctx,)}
    return [context for context in found.values() if context.all_states]


def _groups(context: Any) -> list[Any]:
    return [group for state in context.all_states for group in param_groups(state)]


def _backward_failed(context: Any) -> bool:
    """Whether the end of a backward is awaited that is no longer running."""
    return context.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1


def check_backward(unit: Any) -> None:
    """Refuse to go on after a backward that raised: `fully_shard` would never sum again.

    Raises:
        ValueError: with the way out.
    """
    if _backward_failed(unit._get_fsdp_state()._state_ctx):
        raise ValueError(
            "a backward raised, so gradients are neither whole nor summed: give the step up with "
            "mpcore.drop_gradients(model), on every rank, before the next forward"
        )


def _check_summed(model: nn.Module) -> None:
    for context in _contexts(model):
        for group in _groups(context):
            partial = group._partial_reduce_output
            for p in group.fsdp_params:
                whole = getattr(getattr(p, "_unsharded_param", None), "grad", None)
                if any(grad is not None for grad in (partial, p.unsharded_accumulated_grad, whole)):
                    raise ValueError(f"the gradient of {p._param_fqn} is not summed over data: {_UNSUMMED}")


_UNSUMMED = (
    "the last micro-batch had no backward or one that raised, sync_gradients(model, last=True) wasn't said before its "
    "forward, or the model's output hides its tensors (return tensors, dicts, tuples, dataclasses). To give the step "
    "up: mpcore.drop_gradients(model)"
)


@torch.no_grad()
def reduce_gradients(model: nn.Module, *over: Axis | Mesh) -> None:
    """Finish the gradients: sum those that layers declare as pending. Call it once, after the last backward.

    Once between two `zero_grad` of all trained parameters: a gradient kept from the step before would be summed again.

    Pending are the gradients of replicated parameters that saw only this rank's part of the work: norms under sequence
    parallel, norms of sharded heads, replicated KV heads, embeddings tied across pipeline stages. One all-reduce an
    axis and `BUCKET` elements, in fp32 (fp64 for fp64), however many parameters there are. A parameter that got no
    gradient on some rank counts as zero there; one that got none on any rank keeps None.

    Args:
        model: the model, or this rank's stage of it.
        over: axes over which every parameter is replicated with other data on each rank, and which nothing else
            reduces; a mesh stands for each parameter's own (`Sharding.data_axis`): plain data parallelism, where
            `shard_data_parallel` didn't do it.

    Raises:
        ValueError: before anything is sent, if `shard_data_parallel` sums gradients over one of them already, or a
            trained parameter was added after it, is still gathered, or has a gradient that it didn't sum (the last
            micro-batch had no backward, or one that raised: `drop_gradients`), or hooks that it never calls; or if
            experts lie otherwise than the mesh says, or have replicas over tp that neither it nor a mesh speaks of.
    """
    check_steps()
    for on in over:
        if isinstance(on, Mesh):
            check_experts(model, on)
        else:
            check_axis(on)
    if not over:
        check_replicas(model)
    _check_summed(model)
    pending: dict[object, tuple[Axis, list[tuple[str, nn.Parameter, Shard | None]]]] = {}
    declared = list(declarations(model))
    laid = {x.data.group: x.data for _, _, x in declared if x.data is not None and x.data.size > 1}
    for name, parameter, sharding in declared:
        if not parameter.requires_grad:
            continue
        parameter.is_cut = any(shard.axis.size > 1 for shard in sharding.shards)  # type: ignore[attr-defined]
        axes = [sharding.data_axis(on) if isinstance(on, Mesh) else on for on in over]
        for axis in axes:
            _check_unsummed(name, parameter, axis)
        once = {axis.group: axis for axis in (*sharding.partial, *axes) if axis.size > 1}
        if sharding.data is None and laid and laid.keys().isdisjoint(once) and local_tensor(parameter) is parameter:
            axis = next(iter(laid.values()))
            raise ValueError(
                f"{name} was added after shard_data_parallel, so nothing sums its gradient over the {axis.size} ranks "
                f"of {axis.name}: add it before, join stages after, or freeze it"
            )
        cut = bool(is_dtensor(parameter))
        if cut and parameter._backward_hooks:
            raise ValueError(
                f"{name} is sharded, and what register_hook was given is never called for its gradient: use "
                f"register_post_accumulate_grad_hook, which sees this rank's shard of the sum"
            )
        data = sharding.data
        if data is not None and data.size > 1 and data.group not in once and not cut:
            raise ValueError(f"{name} is gathered from the {data.size} ranks of {data.name}: {_UNSUMMED}")
        wanted: list[tuple[Axis, Shard | None]] = [(axis, None) for axis in once.values()]
        wanted += [(shard.axis, shard) for shard in sharding.shards if shard.replicated]
        for axis, shard in wanted:
            pending.setdefault(axis.group, (axis, []))[1].append((name, parameter, shard))
    for axis, entries in sorted(pending.values(), key=lambda entry: entry[0].name):  # the same order on every rank
        wide = torch.float64 if any(p.dtype == torch.float64 for _, p, _ in entries) else torch.float32
        for bucket in _buckets(sorted(entries, key=lambda entry: entry[0])):
            _reduce_pending(axis, bucket, wide)


def _check_unsummed(name: str, parameter: nn.Parameter, axis: Axis) -> None:
    if axis.size > 1 and is_dtensor(parameter):
        assert axis.group is not None
        summed = {*parameter.device_mesh.mesh.flatten().tolist()} & {*dist.get_process_group_ranks(axis.group)}
        if len(summed) > 1:
            raise ValueError(
                f"{name} is sharded by shard_data_parallel, which sums its gradient over {len(summed)} of the "
                f"{axis.size} ranks of {axis.name}: call reduce_gradients(model); reduce_gradients(model, mesh) is for "
                f"plain data parallelism without it"
            )


def _buckets(
    entries: list[tuple[str, nn.Parameter, Shard | None]],
) -> Iterator[list[tuple[str, nn.Parameter, Shard | None]]]:
    """Of at most `BUCKET` elements, or of one parameter: cut by what is sent, which is the same on every rank."""
    bucket, size = [], 0
    for name, parameter, shard in entries:
        length = local_tensor(parameter).numel()
        if shard is not None:  # of which ranks hold more or less
            others = (*parameter.shape[: shard.dim], *parameter.shape[shard.dim + 1 :])
            length = len(shard.replicated) * math.prod(others)
        if bucket and size + length > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter, shard))
        size += length
    yield bucket


def _reduce_pending(axis: Axis, entries: list[tuple[str, nn.Parameter, Shard | None]], wide: torch.dtype) -> None:
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
    front = whole.movedim(shard.dim, 0)
    part = front.new_zeros(len(shard.replicated), *front.shape[1:])
    for index, slot, length in shard.replica_runs:  # runs, not indices, for which a GPU would wait
        part[slot : slot + length] = front[index : index + length]
    return part


def _store_part(parameter: nn.Parameter, shard: Shard | None, total: Tensor) -> None:
    grad = gradient_of(parameter)
    assert grad is not None
    if shard is None:
        local_tensor(grad).copy_(total)
        return
    whole = grad.full_tensor() if is_dtensor(grad) else grad
    front = whole.movedim(shard.dim, 0)
    for index, slot, length in shard.replica_runs:
        front[index : index + length] = total[slot : slot + length]
    if is_dtensor(grad):
        start, end = data_run(grad)
        grad.to_local().copy_(whole[start:end])


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

    Raises:
        ValueError: if p isn't above 0, a parameter is cut over an axis of another mesh, or one is a DTensor that isn't
            mpcore's.
    """
    return norm_of(model, mesh, gradient_of, p)


@torch.no_grad()
def norm_of(model: nn.Module, mesh: Mesh, of: Callable[[Tensor], Tensor | None], p: float = 2.0) -> Tensor:
    """As `grad_norm`, of any tensors that lie as the parameters do; `of` gives a parameter's, or None."""
    check_mesh(mesh)
    if not p > 0:
        raise ValueError(f"the norm's p is {p}, which is not above 0: take 1, 2, ... or math.inf")
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
    for name, parameter, sharding in declarations(model):
        check_lies_on(name, parameter, sharding, mesh)
        found = of(parameter)
        if found is None:
            continue
        first = _is_first_replica(found) if is_dtensor(found) else sharding.data_axis(mesh).rank == 0
        if not first or any(axis.rank > 0 for axis in sharding.replica_axes(mesh)):
            continue
        grad = local_tensor(found)
        for shard in sharding.shards:
            if shard.replicated:
                front = grad.movedim(shard.dim, 0)
                begin = data_run(found)[0] if is_dtensor(found) and shard.dim == 0 else 0
                runs = ((max(start - begin, 0), max(end - begin, 0)) for start, end in shard.owned_runs)
                grad = torch.cat([front[:0], *(front[start:end] for start, end in runs)])
        yield grad


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, norm: Tensor | float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`. No communication, no wait for the device.

    Args:
        model: the model, or this rank's stage of it.
        max_norm: the bound; 0 or less: no clipping.
        norm: what `grad_norm` returned, or a float. Where it isn't finite gradients stay as they are: skip the step.
    """
    if max_norm <= 0:
        return
    norm = torch.as_tensor(norm, dtype=torch.float64)
    scale = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    grads = [local_tensor(grad) for grad in map(gradient_of, model.parameters()) if grad is not None]
    for dtype in {grad.dtype for grad in grads}:  # a launch for many tensors
        alike = [grad for grad in grads if grad.dtype == dtype]
        torch._foreach_mul_(alike, scale.to(alike[0].device, dtype))
