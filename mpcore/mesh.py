"""Floor 1: which rank talks to which. `build_mesh` cuts the world into the axes tp, cp, dp, pp, ep and etp.

With `workers` there are several such worlds, one after the other, each training a model of its own
(`mpcore.local_updates`).

Ranks are numbered with tp fastest, then cp, dp and pp, so that a tensor-parallel group lies inside a node:
rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank. Experts cut the same ranks of a stage in their own way,
etp fastest, then ep and edp: rank = ((pp_rank * edp + edp_rank) * ep + ep_rank) * etp + etp_rank.

Source: Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473), section 3.2, and its default order tp-cp-ep-dp-pp.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as one rank sees it. `Axis()` is the axis of size 1: no group, no communication.

    Args:
        size: number of ranks along the axis.
        rank: this process's place along the axis, `0 <= rank < size`.
        group: the process group of the ranks along the axis; None is enough for size 1 and for planning.
        name: how messages call the axis.
        levels: the axis as outer x inner, its ranks numbered with inner fastest: cp with `build_mesh(cp_inner=...)`.

    Raises:
        ValueError: if `rank` lies outside `size`, or the group has another number of ranks.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    name: str = "axis"
    levels: tuple[Axis, Axis] | None = None
    group_name: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} lies outside the {self.name} axis of size {self.size}")
        if self.group is not None:
            if self.group.size() != self.size:
                raise ValueError(
                    f"the {self.name} axis has size {self.size}, but its process group has {self.group.size()} ranks"
                )
            # Collectives name their group by a string: a constant to torch.compile, unlike the group itself.
            object.__setattr__(self, "group_name", self.group.group_name)

    def __copy__(self) -> Axis:
        return self

    def __deepcopy__(self, memo: dict) -> Axis:
        return self  # a process group can't be copied, and a copied layer talks to the same ranks

    def __getstate__(self) -> dict:
        if self.group is not None:
            raise TypeError(
                f"the {self.name} axis of size {self.size} belongs to running processes and can't be pickled: save "
                f"full_state_dict(model) instead of the model, or use mpcore.checkpoint.save"
            )
        return vars(self)


@dataclass(frozen=True)
class Mesh:
    """The axes of one rank. Make it with `build_mesh`; several may live in one process.

    Attributes:
        tp, cp, dp, pp: tensor, context, data and pipeline parallel.
        ep, etp: experts, and tensor parallel inside each of them, over the ranks of a stage; `edp` is what they leave:
            replicas of the same experts. etp x ep x edp = tp x cp x dp.
        data: dp x cp, every rank that sees other tokens with the same weights.
        ends: the first and last pipeline rank, for tied embeddings; size 1 on the ranks between them.
        world: all ranks that train this model: of this worker.
        workers: the ranks at the same place of each worker's world, which train models of their own and merge them.
        job: all ranks of all workers; of one worker the world.
        saves: with several workers the world once more, on the host, for saves in the background.
        device_mesh: torch's mesh with dimensions pp, dp, cp, tp, behind workers where there are several; None where
            torch.distributed isn't running.
        made_ns: when, in nanoseconds of the host's clock: what its groups' namesakes did before is not theirs.
    """

    tp: Axis = Axis(name="tp")
    cp: Axis = Axis(name="cp")
    dp: Axis = Axis(name="dp")
    pp: Axis = Axis(name="pp")
    ep: Axis = Axis(name="ep")
    etp: Axis = Axis(name="etp")
    edp: Axis = Axis(name="edp")
    data: Axis = Axis(name="data")
    ends: Axis = Axis(name="ends")
    world: Axis = Axis(name="world")
    workers: Axis = Axis(name="workers")
    job: Axis = Axis(name="job")
    saves: Axis = Axis(name="saves")
    device_type: str = "cpu"
    device_mesh: DeviceMesh | None = None
    made_ns: int = field(default_factory=time.time_ns, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name).size for name in ("tp", "cp", "pp", "ep", "dp", "etp")}
        table = layout_table(**sizes, rank=self.world.rank, device_type=self.device_type)
        return f"worker {self.workers.rank} of {self.workers.size}: {table}" if self.workers.size > 1 else table

    @property
    def axes(self) -> dict[str, Axis]:
        """Every axis by its name; of two names for one group the more usual one comes first."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: axis for name, axis in found.items() if isinstance(axis, Axis)}

    @property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)


def mesh_shape(
    world_size: int,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int | None = None,
    etp: int | None = None,
) -> dict:
    """Sizes of all axes; `dp` is inferred from the world size where it isn't given, and `etp` is tp.

    Returns:
        `{"tp": ..., "cp": ..., "pp": ..., "ep": ..., "dp": ..., "etp": ...}`.

    Raises:
        ValueError: if a size isn't a positive integer, the product isn't the world size, or etp x ep doesn't divide
            tp x cp x dp.
    """
    given = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
    given |= {name: size for name, size in (("dp", dp), ("etp", etp)) if size is not None}
    asked = " x ".join(f"{name} {size}" for name, size in given.items() if name not in ("ep", "etp"))
    for name, size in given.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} {size!r} is not a positive integer ({asked}, world size {world_size})")
    inner = tp * cp * pp
    if dp is None:
        if world_size % inner:
            fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ValueError(
                f"{asked} = {inner} does not divide the world size {world_size}: choose sizes whose product is one "
                f"of {fits}, or start a multiple of {inner} processes"
            )
        dp = world_size // inner
    elif inner * dp != world_size:
        raise ValueError(
            f"{asked} = {inner * dp} is not the world size {world_size}: start {inner * dp} processes, "
            f"or leave dp out to have it inferred"
        )
    if etp in (None, tp) and (dp * cp) % ep:
        raise ValueError(
            f"ep {ep} does not divide dp x cp = {dp} x {cp} = {dp * cp} (world size {world_size}): {divisors(dp * cp)}"
        )
    etp = tp if etp is None else etp
    if (tp * cp * dp) % (etp * ep):
        raise ValueError(
            f"etp x ep = {etp} x {ep} = {etp * ep} does not divide tp x cp x dp = {tp} x {cp} x {dp} = {tp * cp * dp} "
            f"(world size {world_size}): {divisors(tp * cp * dp)}"
        )
    return {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "dp": dp, "etp": etp}


def mesh_ranks(
    *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1, etp: int | None = None
) -> dict[str, list[list[int]]]:
    """Ranks of every group of every axis: a pure function, no process group needed.

    Returns:
        For each of tp, cp, dp, pp, ep, etp, edp, data and ends the list of its groups, each the list of its world ranks
        in axis order. Every world rank is in one group of each axis; of `ends` only the first and last pipeline ranks.
    """
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    data = grid.permute(0, 3, 1, 2).reshape(pp, tp, dp * cp)
    etp = tp if etp is None else etp
    expert = grid.view(pp, -1, ep, etp)
    return {
        "tp": grid.reshape(-1, tp).tolist(),
        "cp": grid.transpose(2, 3).reshape(-1, cp).tolist(),
        "dp": grid.permute(0, 2, 3, 1).reshape(-1, dp).tolist(),
        "pp": grid.permute(1, 2, 3, 0).reshape(-1, pp).tolist(),
        "data": data.reshape(-1, dp * cp).tolist(),
        "ep": expert.transpose(2, 3).reshape(-1, ep).tolist(),
        "etp": expert.reshape(-1, etp).tolist(),
        "edp": expert.permute(0, 2, 3, 1).reshape(-1, expert.shape[1]).tolist(),
        "ends": torch.stack([grid[0].flatten(), grid[-1].flatten()], dim=1).tolist() if pp > 1 else [],
    }


def layout_table(
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    etp: int | None = None,
    rank: int | None = None,
    device_type: str | None = None,
) -> str:
    """The mesh as a table: a line for each pipeline stage, a cell for each tensor-parallel group.

    Args:
        rank: the rank to mark with brackets; None marks none.
        device_type: what the ranks compute on, where that is known.
    """
    world = tp * cp * pp * dp
    experts = (f", ep {ep}" if ep > 1 else "") + (f", etp {etp}" if etp not in (None, tp) else "")
    on = f" on {device_type}" if device_type else ""
    lines = [f"mesh of {world} ranks{on}: pp {pp} x dp {dp} x cp {cp} x tp {tp}{experts}"]
    groups = mesh_ranks(tp=tp, cp=cp, pp=pp, dp=dp)["tp"]
    per_stage, most = dp * cp, 4

    def short(items: list[str], gap: str) -> str:
        return gap.join(items if len(items) <= most + 1 else [*items[: most - 1], "..", items[-1]])

    rows = []
    for stage in range(pp):
        cells = []
        for i, group in enumerate(groups[stage * per_stage : (stage + 1) * per_stage]):
            where = f"dp {i // cp}" + (f" cp {i % cp}" if cp > 1 else "")
            cells.append(f"{where}: " + short([f"[{r}]" if r == rank else str(r) for r in group], " "))
        rows.append(f"  stage {stage} | " + short(cells, " | "))
    lines += rows if len(rows) <= 2 * most else [*rows[:most], "  ..", rows[-1]]
    return "\n".join(lines)


def build_mesh(
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int | None = None,
    device_type: str | None = None,
    cp_inner: int | None = None,
    etp: int | None = None,
    workers: int = 1,
    timeout: float | None = None,
) -> Mesh:
    """Cut the world into a mesh of tensor, context, pipeline, expert and data parallel axes.

    Without `torch.distributed` all axes have size 1. Under torchrun the default process group is made where there is
    none yet: gloo, and on CUDA nccl for what lies there.

    Args:
        tp, cp, pp, ep: sizes of the axes.
        dp: size of the data-parallel axis; None takes what the others leave of the world.
        device_type: "cuda" or "cpu"; None takes CUDA where each of torchrun's processes on this machine has a GPU, and
            in a world that runs already where it has nccl. With `--virtual-local-rank`, say "cuda".
        cp_inner: ranks of a sub-group of cp, for two-level context parallel; then `mesh.cp.levels` are (outer, inner).
        etp: tensor parallel inside each expert, of any size; None: as tp.
        workers: consecutive ranks of the job, in so many equal parts, are worlds of their own with a mesh as above, for
            `mpcore.local_updates.DiLoCo`.
        timeout: seconds that ranks may take to arrive, and then a collective of the default process group made here;
            None: torch's default.

    Returns:
        The mesh as this rank sees it.

    Raises:
        ValueError: on every rank and before any group is made, if the sizes don't fit the world (all of them are
            named), or if the ranks ask for different meshes; naming the ranks that didn't arrive in time; on a rank
            that "cuda" leaves without a GPU.
    """
    running = dist.is_initialized()
    launched = dist.is_torchelastic_launched() if running else is_launched()
    device_type = choose_device(
        device_type,
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)) if launched else 0,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launched else 1,
        backends=dict(pair.split(":") for pair in dist.get_backend_config().split(",")) if running else None,
    )
    if launched and not running:
        # gloo too: objects, and modules on the host, have no backend in a world of nccl alone.
        _start_world("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    problem, shape, ranks = None, None, {}
    try:
        shape = mesh_shape(_worker_size(world_size, workers), tp=tp, cp=cp, pp=pp, ep=ep, dp=dp, etp=etp)
        ranks = mesh_ranks(**shape)
        ranks |= {} if cp_inner is None else _level_ranks(ranks["cp"], cp_inner)
        ranks = _for_workers(ranks, world_size, workers)
    except ValueError as error:
        if not dist.is_initialized():
            raise ValueError(f"{error}. torch.distributed isn't running: start with torchrun") from None
        problem = str(error)
    if not dist.is_initialized():
        return Mesh(device_type=device_type)

    if device_type == "cuda":  # before the first collective: nccl refuses two ranks on one GPU
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count())
    plan = problem or f"{device_type} {shape} {hashlib.sha256(repr(sorted(ranks.items())).encode()).hexdigest()}"
    check_same("mesh", plan)
    if problem:
        raise ValueError(problem)
    assert shape is not None
    names = ("pp", "dp", "cp", "tp")
    sizes = {"workers": workers} if workers > 1 else {}
    sizes |= {name: shape[name] for name in names}
    device_mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    axes = {name: _torch_axis(device_mesh, name) for name in sizes}
    same_as = {
        "data": "dp" if shape["cp"] == 1 else None,
        "etp": "tp" if shape["etp"] == shape["tp"] else None,
        "edp": "data" if (shape["ep"], shape["etp"]) == (1, shape["tp"]) else None,
    }
    for name in ("data", "ep", "etp", "edp", "ends"):  # fixed order: every rank makes every group, its own or not
        twin = same_as.get(name)
        if twin is not None:
            axes[name] = Axis(axes[twin].size, axes[twin].rank, axes[twin].group, name)
        else:
            axes[name] = _new_axis(name, ranks[name])
    if cp_inner is not None:
        outer, inner = (_new_axis(name, ranks[name]) for name in ("cp_outer", "cp_inner"))
        axes["cp"] = replace(axes["cp"], levels=(outer, inner))
    job = Axis(world_size, dist.get_rank(), dist.group.WORLD, "job")
    world = replace(job, name="world") if workers == 1 else _new_axis("world", ranks["world"])
    saves = Axis(name="saves") if workers == 1 else _new_axis("saves", ranks["world"], "gloo")
    return Mesh(
        **axes,
        world=world,
        job=job,
        saves=saves,
        device_type=device_type,
        device_mesh=device_mesh,
    )


def is_launched() -> bool:
    """Whether torchrun has started this process, or another launcher that sets what `torch.distributed` reads.

    Raises:
        ValueError: if one says that there are others, and not all that it takes to find them.
    """
    if dist.is_torchelastic_launched():
        return True
    if int(os.environ.get("WORLD_SIZE") or 1) < 2:
        return False
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} isn't set: start with torchrun, or "
            f"set them for each process (and LOCAL_RANK and LOCAL_WORLD_SIZE, for its GPU)"
        )
    return True


def choose_device(
    asked: str | None, *, gpus: int, local_rank: int = 0, local_size: int = 1, backends: Mapping | None = None
) -> str:
    """The type of device that a rank computes on: a pure function.

    Args:
        asked: "cuda" or "cpu"; None: as the machine and the world are.
        gpus: that this process sees.
        local_rank, local_size: among the launcher's processes on this machine.
        backends: by type of device, of a world that runs already.

    Raises:
        ValueError: for another type, or on a rank without a GPU; nccl takes one a rank.
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


def _start_world(backend: str, timeout: float | None) -> None:
    """Make the default process group from the launcher's variables, whatever earlier attempts left in its store."""
    limit = dist.default_pg_timeout if timeout is None else timedelta(seconds=timeout)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=limit)))
    store = dist.PrefixStore(meet(store, rank, size, limit.total_seconds()), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Agree on a name for this attempt, which nothing that died before it has used: all of its ranks call this.

    torchrun keeps its store over a restart, with the addresses of the dead in it, and its count of restarts differs
    between nodes. So each rank says hello with a number of its own, and rank 0 answers that number.

    Returns:
        The name, the same on all ranks.

    Raises:
        ValueError: naming the ranks that didn't arrive within `timeout` seconds.
    """
    mine, until = os.urandom(8).hex(), time.monotonic() + timeout
    if rank:
        store.set(f"mpcore/hello/{rank}", mine)
        name = _wait_for(store, f"mpcore/welcome/{mine}", timeout)
        store.set(f"mpcore/here/{name}/{rank}", "")
        # Rank 0 tells when it gave up; without it, nobody can.
        missing = _wait_for(store, f"mpcore/met/{name}", max(until - time.monotonic(), 0) + 10)
    else:
        name, waiting, answered = mine, set(range(1, size)), set()
        while waiting and time.monotonic() < until:
            for other in sorted(waiting):
                hello = f"mpcore/hello/{other}"
                number = store.get(hello).decode() if store.check([hello]) else None
                if number is not None and number not in answered:  # perhaps of a dead one: then nobody reads the answer
                    answered.add(number)
                    store.set(f"mpcore/welcome/{number}", name)
                if store.check([f"mpcore/here/{name}/{other}"]):
                    waiting.discard(other)
            time.sleep(0.01 if waiting else 0)
        missing = ", ".join(map(str, sorted(waiting)))
        store.set(f"mpcore/met/{name}", missing)
    if missing:
        raise ValueError(f"of {size} ranks {missing} did not arrive within {timeout:g} s")
    return f"attempt {name}"


def _wait_for(store: dist.Store, key: str, timeout: float) -> str:
    try:
        store.wait([key], timedelta(seconds=timeout))
    except dist.DistStoreError:
        raise ValueError(f"rank 0 did not arrive within {timeout:g} s") from None
    return store.get(key).decode()


def check_axis(axis: Axis) -> None:
    """Refuse what is no axis, such as torch's DeviceMesh, a process group or a whole mesh."""
    if not isinstance(axis, Axis):
        kind, given = type(axis).__name__, f"{axis!r:.40}"
        raise TypeError(
            f"an axis is wanted, such as mesh.tp of build_mesh(tp=2), or Axis(group.size(), group.rank(), group) of a "
            f"process group, not {kind} {given}"
        )


def check_mesh(mesh: Mesh) -> None:
    """Refuse what is no mesh of ours, such as torch's DeviceMesh or an axis."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"expected the mesh that the model lies on, found {type(mesh).__name__}: give build_mesh's")


def check_same(what: str, value: Mapping[str, object] | str, axis: Axis | None = None) -> None:
    """Refuse to go on when the ranks disagree about something that must be the same on all of them.

    Args:
        what: the name of the thing, for the message.
        value: it on this rank; a text, or a mapping of which only the entries that differ are named.
        axis: the ranks to ask; None asks the whole job.

    Raises:
        ValueError: on every rank, naming two ranks that differ and both values.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return
    group = axis.group if axis is not None else dist.group.WORLD
    if group is None or group.size() == 1:
        return
    mine = {what: value} if isinstance(value, str) else {key: repr(entry) for key, entry in value.items()}
    values: list = [None] * group.size()
    with unset_fake_temporarily():  # what is compared is real, also of fake models
        dist.all_gather_object(values, mine, group=group)
    for rank, other in enumerate(values):
        differing = sorted(key for key in values[0].keys() | other.keys() if values[0].get(key) != other.get(key))
        if differing:
            entries = "; ".join(f"{key}: {values[0].get(key)} and {other.get(key)}" for key in differing)
            raise ValueError(f"ranks 0 and {rank} disagree about the {what} ({entries})")


def raise_together(error: Exception | None) -> None:
    """Fail on every rank when one rank has failed, so that none waits for it.

    Args:
        error: what went wrong on this rank; None: nothing.

    Raises:
        ValueError: on every rank, with the messages of the ranks that failed.
    """
    errors: list = [str(error) if error else None]
    if dist.is_initialized() and dist.get_backend() != "fake":
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, str(error) if error else None)
    failed = [rank for rank, message in enumerate(errors) if message]
    if failed:
        where = "" if len(failed) == len(errors) else f" (on rank {', '.join(map(str, failed))} of {len(errors)})"
        raise ValueError(f"{errors[failed[0]]}{where}") from error


def divisors(size: int) -> str:
    """The way out of a size that doesn't divide another: those that do."""
    return f"take one of {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"


def _torch_axis(device_mesh: DeviceMesh, name: str) -> Axis:
    size = device_mesh.size(device_mesh.mesh_dim_names.index(name))  # type: ignore[union-attr]
    return Axis(size, device_mesh.get_local_rank(name), device_mesh.get_group(name), name)


def _worker_size(world_size: int, workers: int) -> int:
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1 or world_size % workers:
        raise ValueError(
            f"workers {workers!r} do not divide the world size {world_size} into equal parts: {divisors(world_size)}"
        )
    return world_size // workers


def _for_workers(ranks: dict[str, list[list[int]]], world_size: int, workers: int) -> dict[str, list[list[int]]]:
    """The same groups in each worker's part of the job, and the parts themselves."""
    each = world_size // workers
    starts = range(0, world_size, each)
    everywhere = {
        name: [[start + rank for rank in group] for start in starts for group in groups]
        for name, groups in ranks.items()
    }
    return everywhere | {"world": [list(range(start, start + each)) for start in starts]}


def _level_ranks(groups: list[list[int]], inner: int) -> dict[str, list[list[int]]]:
    size = len(groups[0])
    if inner < 1 or size % inner:
        raise ValueError(f"cp_inner {inner} does not divide cp {size}: {divisors(size)}")
    return {
        "cp_outer": [group[i::inner] for group in groups for i in range(inner)],
        "cp_inner": [group[i : i + inner] for group in groups for i in range(0, size, inner)],
    }


def _new_axis(name: str, groups: list[list[int]], backend: str | None = None) -> Axis:
    mine = Axis(name=name)
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, backend=backend)
        if isinstance(group, dist.ProcessGroup):
            mine = Axis(len(ranks), ranks.index(dist.get_rank()), group, name)
    return mine
