"""Compare the replicas of parameters across ranks, to detect silent data corruption."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore.collectives import all_reduce
from mpcore.mesh.agreement import gather_objects, merged
from mpcore.mesh.axis import Axis, Mesh
from mpcore.sharding.cross_replica_hash import cross_replica_hash
from mpcore.sharding.declarations import declarations
from mpcore.sharding.declare import Shard
from mpcore.sharding.local import is_dtensor, local_tensor


@torch.no_grad()
def compare_replicas(model: nn.Module, mesh: Mesh, cause: str = "so a rank's memory is corrupt") -> None:
    """Raise on every rank if the replicas of a parameter differ in any bit. All ranks of the mesh must call it.

    The layers' declarations say which parameters are replicated: unsharded parameters over tp and data, replicated KV
    heads, and tied embeddings. With HSDP, shards are replicated across groups of ranks. One all-reduce per axis
    compares hashes; more data is sent only if hashes differ.

    Args:
        model: the model, or this rank's stage of it, between two steps. If parameters are offloaded, pass the
            model that `with run.parameters() as model` yields.
        mesh: the mesh that the model is on.
        cause: the cause that the error message states.

    Raises:
        ValueError: on every rank, if replicas differ. The message names the tensors and the ranks. With three or more
            replicas it names the ranks that differ from the majority.
    """
    found: list[str] = []
    for axis, entries in _replicas(model, mesh):
        absent = torch.tensor(torch.iinfo(torch.int64).min, device=mesh.device)
        hashes = torch.stack([absent if x is None else cross_replica_hash(x).to(mesh.device) for _, x in entries])
        held = torch.tensor([x is not None for _, x in entries], device=mesh.device)
        both = torch.cat([hashes, torch.where(held, ~hashes, hashes)])
        most, least = all_reduce(both, axis, "max").chunk(2)  # ~ turns the order around: the least is ~most of ~
        differing = (most != ~least) & (most != absent)
        if bool(differing.any()):
            found += _name(axis, [name for name, _ in entries], differing.tolist(), hashes, held)
    count = torch.tensor(len(found), device=mesh.device)
    if int(all_reduce(count, mesh.world, "max")):
        messages = merged(mesh.world, lambda: found, lambda lists: list(dict.fromkeys(itertools.chain(*lists))))
        more = f"; and {len(messages) - 8} more" if len(messages) > 8 else ""
        raise ValueError(f"replicas differ, {cause}: {'; '.join(messages[:8])}{more}")


@torch.no_grad()
def equal_shards(model: nn.Module, axis: Axis) -> list[str]:
    """Return the names of the parameters of which all ranks of `axis` hold the same shard, unless it is a constant.

    `nn.init` on a shard draws so after one seed for all ranks. All ranks of the axis must call it.
    """
    held = {
        name: local_tensor(p).detach()
        for name, p, sharding in declarations(model)
        if not p.is_meta and any(s.axis.key == axis.key and not s.replicated for s in sharding.shards)
    }
    if axis.size == 1 or not held:
        return []
    varied = [(x != x.flatten()[:1]).any() for x in held.values()]
    hashes = [torch.where(v, cross_replica_hash(x), axis.rank) for v, x in zip(varied, held.values(), strict=True)]
    most, least = all_reduce(torch.stack(hashes + [~x for x in hashes]), axis, "max").chunk(2)
    return [name for name, same in zip(held, (most == ~least).tolist(), strict=True) if same]


def _replicas(model: nn.Module, mesh: Mesh) -> list[tuple[Axis, list[tuple[str, Tensor | None]]]]:
    """Return the replicated tensors of each axis, in one order on all ranks. None: this rank doesn't hold it."""
    by_axis: dict[object, tuple[Axis, list[tuple[str, Tensor | None]]]] = {}
    for name, parameter, sharding in declarations(model):
        local = local_tensor(parameter).detach()
        if local.is_meta:  # its values are read later
            continue
        axes = {axis.group: axis for axis in sharding.replica_axes(mesh)}
        axes |= _data_replicas(parameter, sharding.data_axis(mesh))
        for group, axis in axes.items():
            if axis.size > 1:
                by_axis.setdefault(group, (axis, []))[1].append((name, local))
        for shard in sharding.shards:
            if shard.replicated and not is_dtensor(parameter):
                entries = by_axis.setdefault(shard.axis.group, (shard.axis, []))[1]
                entries += [(f"{name}{where}", x) for where, x in _shared_runs(shard, local)]
    return [(axis, entries) for axis, entries in sorted(by_axis.values(), key=lambda entry: entry[0].order)]


def _data_replicas(parameter: Tensor, data: Axis) -> dict[object, Axis]:
    if not is_dtensor(parameter):
        return {data.group: data}
    at, found = parameter.device_mesh.get_coordinate(), {}
    assert at is not None
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            group = parameter.device_mesh.get_group(dim)
            found[group] = Axis(group.size(), at[dim], group, role="data")
    return found


def _shared_runs(shard: Shard, local: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the index ranges of a dimension that several ranks hold. The list is the same on all ranks of the axis."""
    holders = [{i for start, end in runs for i in range(start, end)} for runs in shard.runs]
    place = {i: at for at, i in enumerate(i for start, end in shard.mine for i in range(start, end))}
    runs: list[list[int]] = []
    for i in shard.replicated:
        same = runs and i == runs[-1][-1] + 1 and all((i in held) == (i - 1 in held) for held in holders)
        runs[-1].append(i) if same else runs.append([i])
    for run in runs:
        part = None
        if run[0] in place:
            part = local.index_select(shard.dim, torch.tensor([place[i] for i in run], device=local.device))
        yield f"[{run[0]}:{run[-1] + 1}]", part


def _name(axis: Axis, names: Sequence[str], differing: Sequence[bool], hashes: Tensor, held: Tensor) -> list[str]:
    assert axis.group is not None
    every = gather_objects((hashes.tolist(), held.tolist()), axis.group)
    world = dist.get_process_group_ranks(axis.group)
    found = []
    for i, name in enumerate(names):
        if not differing[i]:
            continue
        by_hash: dict[int, list[int]] = {}
        for rank, (values, present) in zip(world, every, strict=True):
            if present[i]:
                by_hash.setdefault(values[i], []).append(rank)
        sets = sorted(by_hash.values(), key=len)
        if len(sets[-1]) == len(sets[-2]):
            where = f"ranks {' and '.join(map(list_ranks, sets))}"
        else:
            odd = sorted(rank for ranks in sets[:-1] for rank in ranks)
            where = f"rank {list_ranks(odd)}, while ranks {list_ranks(sets[-1])} agree"
        found.append(f"{name} over {axis.name}, on {where}")
    return found


def list_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
