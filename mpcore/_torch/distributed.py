"""Stores, process groups, meshes and the flight recorder. Checked with torch 2.11 and 2.13: no difference."""

from __future__ import annotations

import atexit
import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@atexit.register
def _wait_for_gloo() -> None:
    """Wait, before the interpreter shuts down, until gloo's threads have freed the tensors of the last collective.

    A thread needs Python's lock to free a tensor. During the shutdown it can't take the lock: the process would abort.
    """
    sys.setswitchinterval(1e-6)  # the main thread gives the lock to a thread that waits for it
    quiet, until = 0, time.monotonic() + 5.0
    while quiet < 2 and time.monotonic() < until:
        time.sleep(0.005)  # without the lock
        with suppress(OSError):  # a thread has just ended
            states = [file.read_text() for file in Path("/proc/self/task").glob("*/stat")]
            quiet = 0 if any("(pt_gloo_runloop) R" in state for state in states) else quiet + 1


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def ranks_are_threads() -> bool:
    """Return whether the ranks of the job are threads of this process: they never wait in C."""
    return dist.is_initialized() and dist.get_backend() == "simulated"


def has_peers() -> bool:
    """Return whether other ranks of the job can exist: not in a dry run, where one process has the name of a rank."""
    return dist.get_backend() != "fake"


def clone_store() -> Any:
    """Open another connection to the store of the job's rendezvous, because a thread may block the first one."""
    store = default_store()
    store.check(["mpcore"])  # raises if the store's host is gone: a new connection would wait for it
    return store.clone()


class _SecretStore(dist.PrefixStore):
    """The store of a job whose ranks share a secret."""

    secret = b""


def keep_secret(secret: bytes) -> None:
    """Keep a secret with the store of the default process group, as long as the group lives."""
    world, group = dist.distributed_c10d._world, dist.distributed_c10d._get_default_group()
    backend, inner = world.pg_map[group]
    store = _SecretStore("", inner)  # type: ignore[arg-type]
    store.secret = secret
    world.pg_map[group] = backend, store


def store_secret() -> bytes:
    """Return the secret of `keep_secret`, or nothing if there is none."""
    return getattr(default_store(), "secret", b"") if dist.is_initialized() else b""


def replace_wait(wait: Callable[..., Any]) -> None:
    """Replace `Work.wait`, which all collectives except functional ones end with."""
    dist.Work.wait = wait  # type: ignore[method-assign]


def group_by_name(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def as_group(x: object) -> dist.ProcessGroup | None:
    """Return an operator's argument as a process group, or None if it isn't one."""
    try:
        return dist.ProcessGroup.unbox(x)  # type: ignore[attr-defined]
    except (RuntimeError, TypeError, AttributeError):
        return None


def group_count() -> int:
    """Return the number that torch puts into the name of the next process group. It must be the same on all ranks."""
    return dist.distributed_c10d._world.group_count


def reserve_groups(count: int) -> int:
    """Reserve `count` consecutive numbers for names of process groups, and return the first."""
    return 10**9 + default_store().add("mpcore/groups", count) - count


def share_group(ranks: list[int], role: str, number: int | None = None) -> dist.ProcessGroup | None:
    """Return the process group of these ranks for a role, created once per process. Return None on other ranks.

    Args:
        role: the purpose of the group. Groups of the same ranks for other roles have their own connections.
        number: a number of `reserve_groups`, if only `ranks` call this function. None: all ranks of the job call it in
            the same order.
    """
    world, group = dist.distributed_c10d._world, None
    before = world.group_count
    world.group_count = before if number is None else number  # part of the group's name
    if dist.get_rank() in ranks:
        known = (other for other in world.pg_names if other.group_desc == role)
        group = next((other for other in known if dist.get_process_group_ranks(other) == ranks), None)
        group = group or dist.new_group(ranks, _timeout(), group_desc=role)
    world.group_count = before + (number is None)
    return group  # type: ignore[return-value]  # a member gets a group


def share_groups(groups: list[list[int]], role: str) -> dist.ProcessGroup | None:
    """Return this rank's group of a partition of the world, also one that an earlier mesh created.

    nccl splits it from the communicator of a world that is bound to a device.
    """
    if dist.distributed_c10d._get_default_group().bound_device_id is not None:
        return dist.split_group(split_ranks=groups, group_desc=role, timeout=_timeout())
    mine = [share_group(ranks, f"mpcore {role}") for ranks in groups]  # every rank takes part in every group
    return next((group for group in mine if group is not None), None)


def _timeout() -> Any:
    """Return the timeout of the world's collectives, for other groups, to which torch gives its default."""
    with suppress(AttributeError, IndexError, RuntimeError):  # a backend without a timeout
        world: Any = dist.group.WORLD
        return world._get_backend(world._device_types[0]).options._timeout


def use_group(group: dist.ProcessGroup, change: int) -> bool:
    """Change the user count of a process group in the job's store, and destroy the group when the count is 0."""
    if group not in dist.distributed_c10d._world.pg_names:  # destroyed already
        return False
    if default_store().add(f"mpcore/uses/{dist.get_rank()}/{group.group_name}", change):
        return False
    dist.destroy_process_group(group)
    return True


def flight_records() -> list[bytes]:
    """Return the pickled content of each flight recorder of this process: gloo's, and NCCL's if torch has NCCL."""
    recorders: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
    # A build of torch without NCCL has no recorder for it.
    dumps = [getattr(recorders, f"_dump_{name}_trace", None) for name in ("fr", "nccl")]
    return [dump(True, True, False) for dump in dumps if dump is not None]


def mesh_caches() -> list[Any]:
    """Return the cached functions of torch.distributed, which may hold a mesh."""
    found = [o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper]
    return [o for o in found if str(getattr(o, "__module__", "")).startswith("torch.distributed")]


@functools.cache
def _caches_of(loaded: int) -> list[Any]:
    return mesh_caches()


def loaded_caches() -> list[Any]:
    """Return `mesh_caches()`, looked for again only if torch.distributed has loaded more modules.

    The search takes 0.1 s in a process with many objects. Caches that a thread makes later for itself are not found.
    """
    return _caches_of(sum(name.startswith("torch.distributed") for name in sys.modules))


def forget_meshes(caches: Sequence[Any]) -> None:
    """Clear these caches.

    Otherwise DTensor may return a mesh of the same ranks with destroyed groups.
    """
    for cached in caches:
        cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
