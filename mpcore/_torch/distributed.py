"""Stores, process groups and meshes, and the flight recorder. Read in torch 2.11 and 2.13, which agree."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def default_store() -> Any:
    """Return the store that the ranks of the job met at."""
    return dist.distributed_c10d._get_default_store()


def clone_store() -> Any:
    """Open another connection to the store that the ranks of the job met at: a thread may wait in the first one."""
    return default_store().clone()


def replace_wait(wait: Callable[..., Any]) -> None:
    """Replace `Work.wait`, which all but functional collectives end with."""
    dist.Work.wait = wait  # type: ignore[method-assign]


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group that operators call by this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def as_group(x: object) -> dist.ProcessGroup | None:
    """Return the process group that an operator's argument is, or None where it is something else."""
    try:
        return dist.ProcessGroup.unbox(x)  # type: ignore[attr-defined]
    except (RuntimeError, TypeError, AttributeError):
        return None


def ranks_of_running_ddp() -> list[int]:
    """Return the ranks over which a `DistributedDataParallel` copies its model, while its forward runs; else none."""
    running: Any = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return [] if running is None else dist.get_process_group_ranks(running.process_group)


def group_count() -> int:
    """Return the number after which torch names the next process group: all ranks must have the same."""
    return dist.distributed_c10d._world.group_count


def reserve_groups(count: int) -> int:
    """Reserve names for so many process groups, which no other call returns: the first of their numbers."""
    return 10**9 + default_store().add("mpcore/groups", count) - count


def share_group(ranks: list[int], role: str, number: int | None = None) -> dist.ProcessGroup | None:
    """Return the process group of these ranks for this role, made once in a process; None on other ranks.

    Args:
        ranks: of the job, ascending.
        role: groups of the same ranks for other roles have connections of their own.
        number: of `reserve_groups`, where the ranks alone call this; None: all ranks of the job call it in one order.
    """
    world, group = dist.distributed_c10d._world, None
    before = world.group_count
    world.group_count = before if number is None else number  # torch names the group after it
    if dist.get_rank() in ranks:
        known = (other for other in world.pg_names if other.group_desc == role)
        group = next((other for other in known if dist.get_process_group_ranks(other) == ranks), None)
        group = group or dist.new_group(ranks, group_desc=role)
    world.group_count = before + (number is None)
    return group  # type: ignore[return-value]  # a member gets a group


def split_groups(groups: list[list[int]], role: str) -> dist.ProcessGroup | None:
    """Return this rank's group of a partition, which nccl splits from the world's where that is bound to a device."""
    return dist.split_group(split_ranks=groups, group_desc=role)


def is_bound() -> bool:
    """Tell whether the world is bound to a device, so that its nccl communicator can be split."""
    return dist.distributed_c10d._get_default_group().bound_device_id is not None


def use_group(group: dist.ProcessGroup, change: int) -> bool:
    """Count who uses a process group, in the job's store; destroy it when nobody does. Tell whether it was."""
    if group not in dist.distributed_c10d._world.pg_names:  # it has ended already
        return False
    if default_store().add(f"mpcore/uses/{dist.get_rank()}/{group.group_name}", change):
        return False
    dist.destroy_process_group(group)
    return True


def flight_records() -> list[bytes]:
    """Return what each flight recorder of this process holds, pickled: that of gloo, and that of NCCL."""
    recorders: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
    # A build of torch without NCCL has no recorder of it.
    dumps = [getattr(recorders, f"_dump_{name}_trace", None) for name in ("fr", "nccl")]
    return [dump(True, True, False) for dump in dumps if dump is not None]


def mesh_caches() -> list[Any]:
    """List the functions of torch that have remembered results and may remember a mesh."""
    found = [o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper]
    return [o for o in found if str(getattr(o, "__module__", "")).startswith("torch.distributed")]


def forget_meshes(caches: Sequence[Any]) -> None:
    """Clear these caches and all newer ones: DTensor would return a mesh of the same ranks, whose groups have ended."""
    for cached in (*caches, *mesh_caches()):
        cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
