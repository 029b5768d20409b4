"""All-reduce the gradients that layers declare partial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore._torch.autograd import has_gradient_hooks
from mpcore.collectives import all_reduce, wait
from mpcore.gradients.accumulate import gradient_of, mark_reduced, zero_gradients
from mpcore.gradients.overlap import StartedAllReduce, begin_sum, distinct, is_large, only_axis, take_begun
from mpcore.layers.moe.layer import check_experts, check_replicas
from mpcore.mesh.axis import Axis, Mesh, check_axis
from mpcore.sharding.declarations import ModelTree, tree_of
from mpcore.sharding.declare import Shard, Sharding
from mpcore.sharding.local import data_run, is_dtensor, local_tensor

# Elements that one all-reduce sums: 256 MiB in float32, of which two copies live; a link is long at its full rate.
BUCKET = 2**26
_Entry: TypeAlias = "tuple[str, nn.Parameter, Shard | None]"  # None: all of the parameter's gradient is pending
T = TypeVar("T")
UNSUMMED = (
    "the last micro-batch had no backward or one that raised, set_gradient_sync(model, last=True) wasn't called before "
    "its forward, or the model's output hides its tensors (return tensors, dicts, tuples, dataclasses). To give the "
    "step up: mpcore.gradients.drop_gradients(model)"
)


@torch.no_grad()
def reduce_gradients(model: nn.Module | ModelTree, *over: Axis | Mesh) -> None:
    """All-reduce the gradients that layers declare partial. Call it once per step, after the last backward.

    A gradient is partial if a replicated parameter saw only this rank's part of the work: norm weights under sequence
    parallelism and of sharded heads, replicated KV heads, and embeddings tied across pipeline stages. Gradients are
    summed in fp32 (fp64 for fp64), those of 2^18 elements or more alone, smaller ones in buckets of up to 2^26. With
    `shard_data_parallel(zero=0)` the large ones have started during the last backward. A gradient that some ranks don't
    have counts as zero there. If no rank has it, it is None afterwards.

    Args:
        model: the model, or this rank's pipeline stage. Its gradients must have been zeroed since the last call.
        over: for plain data parallelism without `shard_data_parallel`. Pass the mesh, to sum each parameter over its
            own `Sharding.data_axis`; or pass axes over which all parameters are replicated and the ranks' data differ.

    Raises:
        ValueError: before any communication, if `shard_data_parallel` already sums over one of these axes, or has not
            summed a gradient because the last backward is missing or raised (then call `drop_gradients`); if a trained
            parameter was added after `shard_data_parallel`, is still gathered, or has a hook that would never run; or
            if experts are not sharded as on the mesh, or have replicas over tp that nothing sums.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> mpcore.gradients.reduce_gradients(model, mpcore.Mesh())  # on one rank there is nothing to sum
    """
    tree = tree_of(model)
    for on in over:
        if isinstance(on, Mesh):
            check_experts(tree, on)
        else:
            check_axis(on)
    if not over:
        check_replicas(tree)
    unsummed = fsdp.unreduced_parameter(tree.units)
    if unsummed is not None:
        raise ValueError(f"the gradient of {unsummed} is not summed over data: {UNSUMMED}")
    pending: dict[object, tuple[Axis, list[_Entry]]] = {}
    alone: list[tuple[nn.Parameter, Axis]] = []
    sharded: dict[object, list[nn.Parameter]] = {}  # by data axis: those of which a flag is sent alone
    laid = {x.data.group: x.data for _, _, x in tree.declared if x.data is not None and x.data.size > 1}
    for name, parameter, sharding in tree.declared:
        if not parameter.requires_grad:
            continue
        axes = [sharding.data_axis(on) if isinstance(on, Mesh) else on for on in over]
        for axis in axes:
            _check_unsummed(name, parameter, axis)
        once = distinct((*sharding.partial, *axes))
        if sharding.data is None and laid and laid.keys().isdisjoint(once) and local_tensor(parameter) is parameter:
            axis = next(iter(laid.values()))
            raise ValueError(
                f"{name} was added after shard_data_parallel, so nothing sums its gradient over the {axis.size} ranks "
                f"of {axis.name}: add it before, join stages after, or freeze it"
            )
        cut = bool(is_dtensor(parameter))
        if cut and has_gradient_hooks(parameter):
            raise ValueError(
                f"{name} is sharded, and what register_hook was given is never called for its gradient: use "
                f"register_post_accumulate_grad_hook, which sees this rank's shard of the sum"
            )
        if has_gradient_hooks(parameter):
            refuse_hooks(name, sharding, once.values())
        data = sharding.data
        if data is not None and data.size > 1 and data.group not in once and not cut:
            raise ValueError(f"{name} is gathered from the {data.size} ranks of {data.name}: {UNSUMMED}")
        if cut and data is not None:
            pending.setdefault(data.group, (data, []))
            sharded.setdefault(data.group, []).append(parameter)
        single = only_axis(parameter, sharding, once)
        if single is not None:
            alone.append((parameter, single))
        wanted: list[tuple[Axis, Shard | None]] = [(axis, None) for axis in once.values()]
        wanted += [(shard.axis, shard) for shard in sharding.shards if shard.replicated]
        for axis, shard in wanted:
            pending.setdefault(axis.group, (axis, []))[1].append((name, parameter, shard))
    unused = fsdp.take_unused(tree.units)
    zero_gradients(unused.difference(*sharded.values()))  # those on one data rank
    begun = take_begun(tree.parameters)
    for parameter, axis in reversed(alone):  # the order in which backward began some of them
        if parameter not in begun:
            begun[parameter] = begin_sum(parameter, axis)
    first = {sum_.axis.group for sum_ in begun.values()}  # a gradient may be pending over a further axis
    order = {group: (group not in sharded, group not in first, axis.order) for group, (axis, _) in pending.items()}
    for axis, entries in sorted(pending.values(), key=lambda entry: order[entry[0].group]):
        entries.sort(key=lambda entry: entry[0])
        large = [p for _, p, shard in entries if shard is None and is_large(p, axis)]
        begun |= {p: begin_sum(p, axis) for p in large if p not in begun or begun[p].axis.group is not axis.group}
        apart = [(p, begun[p]) for p in large]
        whole = set(large)
        packed = [entry for entry in entries if entry[2] is not None or entry[1] not in whole]
        wide = torch.float64 if any(p.dtype == torch.float64 for _, p, _ in packed) else torch.float32
        for bucket in list(buckets(packed, _sent_elements, BUCKET)) or [[]]:
            flagged = [(p, p not in unused and p.grad is not None) for p in sharded.pop(axis.group, ())]
            _reduce_pending(axis, bucket, wide, apart, flagged)
            apart = []
    for _, parameter, _ in itertools.chain.from_iterable(entries for _, entries in pending.values()):
        mark_reduced(parameter)


def refuse_hooks(name: str, sharding: Sharding, over: Iterable[Axis]) -> None:
    """Raise ValueError if a hook on the gradient would see a shard of it, or one rank's term of its sum."""
    shards = [shard.axis for shard in sharding.shards if shard.axis.size > 1]
    for axis in [*shards, *(axis for axis in (*sharding.partial, *over) if axis.size > 1)]:
        seen = "shard" if axis in shards else "term of the sum"
        raise ValueError(
            f"{name} has a hook on its gradient, which would see a rank's {seen} over {axis.name} {axis.size}, where "
            f"one process gives it all of the gradient: change .grad after run.finish_gradients() or reduce_gradients"
        )


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


def buckets(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Split a sequence into lists whose sizes sum to at most `most`. A larger item gets its own list."""
    bucket: list[T] = []
    size = 0
    for item in items:
        mine = size_of(item)
        if bucket and size + mine > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += mine
    if bucket:
        yield bucket


def _sent_elements(entry: _Entry) -> int:
    _, parameter, shard = entry
    if shard is None:
        return local_tensor(parameter).numel()
    return len(shard.replicated) * math.prod((*parameter.shape[: shard.dim], *parameter.shape[shard.dim + 1 :]))


def _reduce_pending(
    axis: Axis, entries: list[_Entry], wide: torch.dtype, apart: Sequence[tuple[nn.Parameter, StartedAllReduce]],
    sharded: Sequence[tuple[nn.Parameter, bool]],
) -> None:  # fmt: skip
    """All-reduce gradients in one message, which also tells which ranks have those of `apart` and `sharded`."""
    flags = [
        *((p, begun.here) for p, begun in apart),
        *sharded,
        *((p, gradient_of(p) is not None) for _, p, _ in entries),
    ]
    parameters, here = [p for p, _ in flags], [is_here for _, is_here in flags]
    for _, parameter, _ in entries:
        if gradient_of(parameter) is None:
            parameter.grad = torch.zeros_like(parameter)
    parts = [_pending_part(p, shard).to(wide) for _, p, shard in entries]
    present = torch.tensor(here, dtype=wide).to(parameters[0].device)
    flat = torch.cat([present, *(part.reshape(-1) for part in parts)])
    present, *sums = all_reduce(flat, axis).split([len(here), *(part.numel() for part in parts)])
    for parameter, begun in apart:
        _store_part(parameter, None, wait(begun.total))
    for (_, parameter, shard), total, part in zip(entries, sums, parts, strict=True):
        _store_part(parameter, shard, total.view_as(part))
    if not all(here):  # waits for the device, so only where it matters
        zero_gradients(p for p, count in zip(parameters, present.tolist(), strict=True) if count == 0)


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
