"""Stores, process groups and meshes, and the flight recorder. Read in torch 2.11 and 2.13, which agree."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def clone_store() -> Any:
    """Open another connection to the store that the ranks of the job met at: a thread may wait in the first one."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group that operators call by this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def as_group(x: object) -> dist.ProcessGroup | None:
    """Return the process group that an operator's argument is, or None where it is something else."""
    try:
        return dist.ProcessGroup.unbox(x)  # type: ignore[attr-defined]
    except (RuntimeError, TypeError, AttributeError):
        return None


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join all dimensions of a mesh into one, with a process group of its own."""
    return mesh._flatten(name)


def group_count() -> int:
    """Count the process groups that this rank is in, all of which it has a name for."""
    return len(dist.distributed_c10d._world.pg_names)


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
