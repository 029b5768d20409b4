"""Build the mesh: choose the device, initialize torch.distributed, create the process groups of all axes."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mpcore._torch.distributed import group_count, share_groups
from mpcore.mesh.agreement import check_same
from mpcore.mesh.axis import Axis, Mesh
from mpcore.mesh.guard import guard_start
from mpcore.mesh.launch import read_launch
from mpcore.mesh.layout import for_worlds, level_ranks, mesh_ranks, mesh_shape, world_size_of
from mpcore.mesh.rendezvous import start_world


@guard_start
def build_mesh(
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int | None = None,
    device_type: str | None = None,
    cp_inner: int | None = None,
    etp: int | None = None,
    worlds: int = 1,
    timeout: float | None = None,
) -> Mesh:
    """Build a mesh of tensor, context, pipeline, expert and data parallel axes over all ranks.

    A process that no launcher started gets a mesh whose axes all have size 1. Under torchrun, srun or another launcher
    (`read_launch`) this function creates the default process group if there is none yet: gloo for CPU tensors, and nccl
    for CUDA tensors if the device is CUDA.

    Args:
        tp, cp, pp, ep: the sizes of the axes.
        dp: the size of the data-parallel axis. None: the world size divided by tp x cp x pp.
        device_type: "cuda" or "cpu". None: CUDA if every process of this machine has a GPU. If torch.distributed runs
            already, None means CUDA if its backend for CUDA is nccl and there is a GPU. With torchrun's
            `--virtual-local-rank`, pass "cuda".
        cp_inner: the size of the inner groups of cp, for two-level context parallelism. `mesh.cp.levels` is then
            (outer, inner). None: one level.
        etp: the size of tensor parallelism inside each expert. None: the same as tp.
        worlds: the number of worlds, of consecutive ranks, each with a mesh and a model of its own. An observer of the
            run joins the models (`mpcore.training.Observer`).
        timeout: the seconds to wait for all ranks, and the timeout of collectives. None: torch's default. If
            torch.distributed runs already, its own timeout is taken.

    Raises:
        ValueError: on every rank and before a group is created, if the sizes don't fit the world, ranks pass different
            arguments or don't arrive in time, the launcher's variables contradict each other, or a rank has no GPU.

    Note:
        - It enables Python's faulthandler: a process that a signal such as SIGSEGV or SIGBUS ends prints its stack.

    Example:
        >>> mesh = mpcore.build_mesh(tp=1)
        >>> mesh.tp.size, mesh.dp.size
        (1, 1)
    """
    with suppress(OSError, ValueError, AttributeError, RuntimeError):  # standard error is no file
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a signal such as SIGBUS, of a mapped file that was cut, prints the stack
    running = dist.is_initialized()
    launch = read_launch(os.environ, (dist.get_rank(), dist.get_world_size()) if running else None)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_rank, local_size = launch.place(gpus)
    asked = device_type
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(",")) if running else None
    device_type = choose_device(device_type, gpus=gpus, local_rank=local_rank, local_size=local_size, backends=backends)
    if asked is None and device_type == "cpu" and gpus and not running and local_rank == 0:
        warnings.warn(f"GPUs here: {gpus}, processes: {local_size}. Too few for all, so the CPU is taken", stacklevel=3)
    if launch.launcher and not running:
        # Add gloo to nccl: nccl alone can't communicate Python objects and CPU tensors.
        start_world(launch, "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    problem, shape, ranks = None, None, {}
    try:
        shape = mesh_shape(world_size_of(world_size, worlds), tp=tp, cp=cp, pp=pp, ep=ep, dp=dp, etp=etp)
        ranks = mesh_ranks(**shape)
        ranks |= {} if cp_inner is None else level_ranks(ranks["cp"], cp_inner)
        ranks = for_worlds(ranks, world_size, worlds)
    except ValueError as error:
        if not dist.is_initialized():
            raise ValueError(f"{error}. torch.distributed isn't running: start with torchrun or srun") from None
        problem = str(error)
    if not dist.is_initialized():
        return Mesh(device_type=device_type)

    if device_type == "cuda":  # before the first collective: nccl raises if two ranks use one GPU
        torch.cuda.set_device(launch.local_rank % gpus)
    places = hashlib.sha256(repr(sorted(ranks.items())).encode()).hexdigest()
    check_same("mesh", problem or f"{device_type} {shape} {places}")
    check_same("process groups made before", str(group_count()))
    if problem:
        raise ValueError(problem)
    assert shape is not None
    sizes = {"worlds": worlds} if worlds > 1 else {}
    sizes |= {name: shape[name] for name in ("pp", "dp", "cp", "tp")}
    alone = share_groups([[rank] for rank in range(world_size)], "alone")
    axes = {name: _new_axis(name, ranks[name], whole=dist.group.WORLD) for name in sizes}
    grid = torch.arange(world_size, dtype=torch.int).view(*sizes.values())
    groups: list[Any] = [axes[name].group or alone for name in sizes]
    device_mesh = DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=tuple(sizes))
    same_as = {
        "data": "dp" if shape["cp"] == 1 else None,
        "etp": "tp" if shape["etp"] == shape["tp"] else None,
        "edp": "data" if (shape["ep"], shape["etp"]) == (1, shape["tp"]) else None,
    }
    for name in ("data", "ep", "etp", "edp", "ends"):  # every rank creates every group, in this order
        same = axes.get(same_as.get(name) or "")
        axes[name] = Axis(same.size, same.rank, same.group, role=name) if same else _new_axis(name, ranks[name])
    if cp_inner is not None:
        outer, inner = (_new_axis(name, ranks[name]) for name in ("cp_outer", "cp_inner"))
        axes["cp"] = replace(axes["cp"], levels=(outer, inner))
    job = Axis(world_size, dist.get_rank(), dist.group.WORLD, role="job")
    world = replace(job, name="world", role="world") if worlds == 1 else _new_axis("world", ranks["world"])
    return Mesh(**axes, world=world, job=job, device_type=device_type, device_mesh=device_mesh).hold()


def choose_device(
    asked: str | None, *, gpus: int, local_rank: int = 0, local_size: int = 1, backends: Mapping[Any, Any] | None = None
) -> str:
    """Return the type of device that a rank computes on. The result depends only on the arguments.

    Args:
        asked: "cuda" or "cpu". None: CUDA if there are enough GPUs and, in a running world, nccl; else the CPU.
        gpus: the number of GPUs that this process sees.
        local_rank, local_size: this process's rank among the launcher's processes on this machine, and their number.
        backends: the backend by device type of a world that runs already. None: no world runs.

    Raises:
        ValueError: if `asked` is another type, or is "cuda" and this rank has no GPU. nccl needs one GPU per rank.
    """
    if asked not in (None, "cuda", "cpu"):
        raise ValueError(f"device_type {asked!r} is none of 'cuda', 'cpu' and None")
    nccl = backends is None or backends.get("cuda") == "nccl"
    if asked is None:
        return "cuda" if nccl and gpus >= (local_size if backends is None else 1) else "cpu"
    if asked == "cuda" and (local_rank >= gpus if nccl else gpus == 0):
        needs = "Each needs one for nccl" if nccl else "They need one"
        raise ValueError(f'GPUs here: {gpus}, processes: {local_size}. {needs}: start fewer, or take device_type="cpu"')
    return asked


def _new_axis(name: str, groups: list[list[int]], whole: dist.ProcessGroup | None = None) -> Axis:
    """Create this rank's axis `name`. A group that has all ranks of `whole` is not created: the axis uses `whole`."""
    me = dist.get_rank()
    mine = next((ranks for ranks in groups if me in ranks), [me])
    if whole is not None and len(mine) == whole.size():
        group = whole
    else:
        group = share_groups(groups, name) if groups and len(groups[0]) > 1 else None
    return Axis(len(mine), mine.index(me), group, role=name)
