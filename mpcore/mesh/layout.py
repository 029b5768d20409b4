"""Compute which ranks communicate with each other: pure functions of the sizes of the axes.

Ranks are numbered with tp fastest, then cp, dp and pp, so that a tensor-parallel group lies inside a node:
rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank. Expert layers arrange the same ranks of a pipeline
stage differently, with etp fastest, then ep and edp:
rank = ((pp_rank * edp + edp_rank) * ep + ep_rank) * etp + etp_rank.

A job may hold several such worlds, one after another. Each world trains a model of its own.

Source: Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473), section 3.2, and its default order tp-cp-ep-dp-pp.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange


def mesh_shape(
    world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, dp: int | None = None,
    etp: int | None = None,
) -> dict[Any, Any]:  # fmt: skip
    """Return the size of each axis by name.

    Args:
        world_size: the number of ranks.
        tp, cp, pp, ep: the sizes of the axes.
        dp: the size of the data-parallel axis. None: the world size divided by tp x cp x pp.
        etp: the size of tensor parallelism inside each expert. None: the same as tp.

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
            if inner > world_size:
                larger = " x ".join(f"{name} {size}" for name, size in (("tp", tp), ("cp", cp), ("pp", pp)) if size > 1)
                raise ValueError(
                    f"{larger} needs {inner} processes, and this job has {world_size}: start {inner}, such as with "
                    f"torchrun --nproc-per-node {inner}, or choose smaller sizes"
                )
            raise ValueError(
                f"{asked} = {inner} does not divide the world size {world_size}: choose sizes whose product is "
                f"{divisors(world_size).removeprefix('take ')}, or start a multiple of {inner} processes"
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
    """List the groups of every axis. No process group is needed.

    Every world rank is in exactly one group of each axis, except "ends": only the first and last pipeline ranks are.
    The arguments are those of `mesh_shape`.

    Returns:
        By axis name a list of groups; each group lists its world ranks in axis order.
    """
    ranks = torch.arange(pp * dp * cp * tp)
    grid = rearrange(ranks, "(pp dp cp tp) -> pp dp cp tp", pp=pp, dp=dp, cp=cp)
    expert = rearrange(ranks, "(pp edp ep etp) -> pp edp ep etp", pp=pp, ep=ep, etp=tp if etp is None else etp)
    groups = {
        "tp": rearrange(grid, "pp dp cp tp -> (pp dp cp) tp"),
        "cp": rearrange(grid, "pp dp cp tp -> (pp dp tp) cp"),
        "dp": rearrange(grid, "pp dp cp tp -> (pp cp tp) dp"),
        "pp": rearrange(grid, "pp dp cp tp -> (dp cp tp) pp"),
        "data": rearrange(grid, "pp dp cp tp -> (pp tp) (dp cp)"),
        "ep": rearrange(expert, "pp edp ep etp -> (pp edp etp) ep"),
        "etp": rearrange(expert, "pp edp ep etp -> (pp edp ep) etp"),
        "edp": rearrange(expert, "pp edp ep etp -> (pp ep etp) edp"),
        "ends": rearrange(grid[[0, -1]], "ends dp cp tp -> (dp cp tp) ends"),
    }
    return {name: [] if name == "ends" and pp == 1 else each.tolist() for name, each in groups.items()}


def layout_table(
    *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1, etp: int | None = None,
    rank: int | None = None, device_type: str | None = None,
) -> str:  # fmt: skip
    """Return a drawing of the mesh: one line per pipeline stage, one cell per tensor-parallel group.

    Args:
        tp, cp, pp, ep, dp, etp: see `mesh_shape`.
        rank: the rank to mark with brackets. None: no mark.
        device_type: the type of device to print, such as "cuda". None: print none.
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


def divisors(size: int) -> str:
    """Return the text "take one of ..." with all divisors of `size`, for error messages."""
    return f"take one of {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"


def world_size_of(job_size: int, worlds: int) -> int:
    """Return the number of ranks of each world. Raise ValueError if the worlds don't divide the job's ranks."""
    if not isinstance(worlds, int) or isinstance(worlds, bool) or worlds < 1 or job_size % worlds:
        raise ValueError(f"worlds {worlds!r} do not divide the job's {job_size} ranks: {divisors(job_size)}")
    return job_size // worlds


def for_worlds(ranks: dict[str, list[list[int]]], job_size: int, worlds: int) -> dict[str, list[list[int]]]:
    """Repeat the groups of one world for every world, and add the groups "world" and "worlds".

    A group of "world" has all ranks of one world. A group of "worlds" has the ranks with the same number in each world.
    """
    each = job_size // worlds
    starts = range(0, job_size, each)
    ranks = {**ranks, "world": [list(range(each))]}
    found = {
        name: [[start + rank for rank in group] for start in starts for group in groups]
        for name, groups in ranks.items()
    }
    return {**found, "worlds": [[start + rank for start in starts] for rank in range(each)]}


def level_ranks(groups: list[list[int]], inner: int) -> dict[str, list[list[int]]]:
    """Return the groups of the two levels of cp, "cp_outer" and "cp_inner"."""
    size = len(groups[0])
    if not isinstance(inner, int) or inner < 1 or size % inner:
        raise ValueError(f"cp_inner {inner!r} does not divide cp {size}: {divisors(size)}")
    return {
        "cp_outer": [group[i::inner] for group in groups for i in range(inner)],
        "cp_inner": [group[i : i + inner] for group in groups for i in range(0, size, inner)],
    }
