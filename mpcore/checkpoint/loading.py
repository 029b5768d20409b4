"""Read a checkpoint into any layout: check everything first, then read the parts that this rank holds."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.checkpoint.folders import read_complete, resolve
from mpcore.checkpoint.format import DTYPES, Chunk, Entry, Manifest, dtype_name, overlap
from mpcore.checkpoint.pieces import LocalTensor, check_finite, held_by_model, held_slot, like, parameter_groups
from mpcore.checkpoint.store import in_threads
from mpcore.checkpoint.tensor_file import Files, host_memory
from mpcore.mesh.agreement import merged, together
from mpcore.mesh.axis import Mesh
from mpcore.mesh.secret import printable
from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import lies_as, local_tensor, reshard
from mpcore.sharding.state_dict import all_names

_MOST_TOLD = 20
_OF_METHODS = {"betas", "momentum", "momentum_decay", "rho", "alpha", "etas", "lambd", "lr_decay", "beta2_decay"}
_RULES = {"amsgrad", "maximize"}  # an optimizer that has no such option doesn't follow it
_SCALARS = {"step", "eta", "mu", "mu_product"}  # in torch's optimizers, also of a tensor
_HOW = {"foreach", "fused", "capturable"}  # how a step is computed here, which changes no rule


@dataclass(frozen=True)
class Loaded(Manifest):
    """The manifest of the checkpoint that was loaded, and with `strict=False` the names that were not loaded.

    Attributes:
        missing_keys: tensors of the model or the optimizer, on any rank, that the checkpoint lacks. They kept their
            values.
        unexpected_keys: tensors of the checkpoint that no rank's model or optimizer has.
    """

    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)


@dataclass
class _Plan:
    """What a rank will read: the tensors to fill, the tensors that the checkpoint lacks, and the problems found."""

    files: Files
    held: list[LocalTensor] = field(default_factory=list)
    masters: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    state: dict[nn.Parameter, dict[str, Tensor]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)  # of this rank's optimizer
    kept: set[nn.Parameter] = field(default_factory=set)  # the checkpoint lacks them: they keep their optimizer state
    lies: list[list[int]] = field(default_factory=list)  # in which groups of the checkpoint each lies; -1: in none
    options: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    mesh: Mesh,
    strict: bool = True,
    check_bytes: bool = True,
    cast: bool = False,
) -> Loaded:
    """Load a checkpoint into a model of any layout, and into its optimizer. All ranks must call it.

    All ranks check names, shapes, dtypes and files before any value changes, and each a share of the checksums. Then
    each rank reads the ranges that it holds.

    Args:
        path: the checkpoint.
        model: the model, or this rank's stage of it, before or after `fully_shard`. Its parameters must have memory
            (`materialize`).
        optimizer: the model's optimizer, new or used. Its state is replaced; existing state tensors are reused if they
            have the right shape and dtype. None: the checkpoint's optimizer state is not read.
        mesh: the mesh that the model is on.
        strict: if False, a parameter that the checkpoint lacks keeps its value, and a tensor that the model lacks is
            skipped. A wrong shape or dtype or damage raises in any case.
        check_bytes: if False, the checksums of the tensors are not checked. Those of headers and manifest always are.
        cast: if True, the checkpoint may hold the model's tensors in another dtype; the values are cast to the model's,
            but not from floats to integers or from complex to real numbers.

    Returns:
        The manifest, with step, sample, seed, config and extra among others, and the names that were not loaded.

    Raises:
        ValueError: on every rank and before any value changes, if a tensor is missing, unexpected, damaged, or has
            another shape or dtype, a tensor holds NaN, or a weight infinity, or would after the cast. The message names
            each such tensor. On every rank and after the values changed, if a file was written to while it was read.
    """
    reshard(model)
    mine = together(mesh.world, lambda: _plan(resolve(path), model, optimizer, mesh, cast))
    tensors = mine.files.manifest.tensors
    kinds = ("model/",) if optimizer is None else ("model/", "optimizer/")
    wanted = {name for name in tensors if name.startswith(kinds)}

    def of_all(found: list[Any]) -> tuple[list[str], list[str], list[list[int]]]:
        held, missing, read, lies = zip(*found, strict=True)
        if others := [where for digest, where in read if digest != read[0][0]]:
            raise ValueError(
                f"ranks read two checkpoints, {read[0][1]} and {others[0]}: give all one path that they share"
            )
        groups = [sorted(set().union(*of)) for of in zip_longest(*lies, fillvalue=())]
        return sorted(wanted.difference(*held)), sorted(set().union(*missing)), groups

    known = {item.name for item in mine.held} | _copies(tensors, model)
    read = zlib.crc32(repr(mine.files.manifest).encode()), str(path)
    left, missing, groups = merged(mesh.world, lambda: (known, mine.missing, read, mine.lies), of_all)

    def check() -> None:
        problems = [] if optimizer is None else _plan_options(mine, optimizer, groups)
        problems += mine.problems
        if strict:
            problems = [f"{name}: missing from the checkpoint" for name in mine.missing] + problems
            problems += [f"{name}: in the checkpoint, but not in the {name.partition('/')[0]}" for name in left]
        if check_bytes:
            problems += mine.files.problems(_share(tensors, kinds, mesh.world.rank, mesh.world.size))
            problems += mine.files.problems_beside() if mesh.world.rank == 0 else []
        problems = list(dict.fromkeys(problems))  # a damaged file once, not once for each of its tensors
        if problems:
            told = problems[:_MOST_TOLD] + [f"... and {len(problems) - _MOST_TOLD} more"] * (len(problems) > _MOST_TOLD)
            raise ValueError(f"{path} can't be loaded:\n  " + "\n  ".join(printable(each[:1000]) for each in told))
        check_weights([(item, tensors[item.name]) for item in mine.held], mine.files.tensor, str(path))

    together(mesh.world, check)
    together(mesh.world, lambda: _read(mine, optimizer))
    together(mesh.world, mine.files.unchanged)
    keys: dict[str, Any] = {} if strict else {"missing_keys": missing, "unexpected_keys": left}
    return Loaded(**vars(mine.files.manifest), **keys)


def _plan(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: Mesh, cast: bool) -> _Plan:
    plan = _Plan(Files(folder, read_complete(folder)))
    plan.masters = _masters(plan.files.manifest, model, optimizer)
    for item in held_by_model(model, mesh, plan.masters):
        _want(plan, item, cast)
    if optimizer is not None:
        _plan_optimizer(plan, model, optimizer, mesh)
    return plan


def _copies(tensors: dict[str, Entry], model: nn.Module) -> set[str]:
    """Return the other names of tied tensors under which a checkpoint has the same values again, as one of DCP has."""

    def values(name: str) -> Any:
        found = tensors.get(f"model/{name}")
        return found and (found.shape, found.dtype, {(c.start, c.shape, c.checksum) for c in found.chunks})

    return {f"model/{name}" for first, *names in all_names(model) for name in names if values(name) == values(first)}


def _want(plan: _Plan, item: LocalTensor, cast: bool = False) -> None:
    """Add a tensor to the plan, or note why it can't be read."""
    entry = plan.files.manifest.tensors.get(item.name)
    if entry is None:
        plan.missing.append(item.name)
        return
    where = ", ".join(sorted({chunk.file for chunk in entry.chunks}))
    dtype = dtype_name(item.tensor.dtype)
    if entry.shape != item.shape:
        plan.problems.append(f"{item.name}: expected shape {item.shape}, found {entry.shape} in {where}")
    elif entry.dtype != dtype and not (cast and torch.can_cast(DTYPES[entry.dtype], item.tensor.dtype)):
        plan.problems.append(f"{item.name}: expected dtype {dtype}, found {entry.dtype} in {where}")
    else:
        try:
            for chunk in entry.chunks:  # opens the files: their headers are checked here
                if any(overlap((box.start, box.shape), (chunk.start, chunk.shape)) is not None for box in item.boxes):
                    plan.files[chunk.file].check(entry, chunk)
        except (ValueError, OSError) as error:
            plan.problems.append(str(error))
    plan.held.append(item)


def _plan_optimizer(plan: _Plan, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    manifest = plan.files.manifest
    if manifest.optimizer is None:
        plan.missing.append("the optimizer")
        return
    slots: dict[str, dict[str, Entry]] = {}
    for name, entry in manifest.tensors.items():
        if name.startswith("optimizer/"):
            _, slot, of = name.split("/", 2)
            slots.setdefault(of, {})[slot] = entry
    group_of = {name: i for i, saved in enumerate(manifest.optimizer) for name in saved["params"]}
    fused = {p: g.get("fused") or g.get("capturable") for g in optimizer.param_groups for p in g["params"]}
    plan.groups = parameter_groups(model, optimizer)
    for group in plan.groups:
        plan.missing += [f"the optimizer's group of {name}" for name in group["params"] if name not in group_of]
        plan.lies.append(sorted({group_of.get(name, -1) for name in group["params"]}))

    def alike(name: str) -> tuple[int, str]:  # parameters of one group and dtype have the same state tensors
        entry = manifest.tensors.get(f"model/{name}")
        return group_of.get(name, -1), entry.dtype if entry else ""

    inner = vars(optimizer).get("optimizer", optimizer)
    of_torch = type(inner).__module__.startswith("torch.optim.")  # its state has the dtype of the parameter
    dtype_of = getattr(inner, "slot_dtype", lambda p, _: p.dtype if of_torch else None)  # None: as it was saved
    used: dict[tuple[int, str], set[str]] = {}
    for name, of in slots.items():
        used.setdefault(alike(name), set()).update(of)
    for name, parameter, sharding in declarations(model):
        if parameter not in fused:
            continue
        needed = set(used.get(alike(name), ()))
        if name in group_of and manifest.optimizer[group_of[name]]["options"].get("amsgrad"):
            needed.add("max_exp_avg_sq")  # which its step reads
        of = slots.get(name, {})
        if f"model/{name}" not in manifest.tensors and not of:
            plan.kept.add(parameter)
        stepped = any(not slot.startswith("outer_") for slot in of)  # else a merge alone moved it
        plan.missing += [f"optimizer/{slot}/{name}" for slot in sorted(needed - of.keys()) if stepped]
        for slot, entry in of.items():
            dtype = DTYPES[entry.dtype]
            if entry.shape or not (slot in _SCALARS or sharding.shape):
                dtype = (None if slot.startswith("outer_") else dtype_of(parameter, slot)) or dtype
                value = _slot_like(optimizer.state.get(parameter, {}).get(slot), parameter, dtype)
            else:  # a scalar: the step count is on the CPU unless a fused or capturable optimizer reads it, as in torch
                host = slot == "step" and not fused[parameter]
                value = torch.zeros((), dtype=dtype, device="cpu" if host else parameter.device)
            if stepped or not isinstance(optimizer.state, dict):  # torch's would take this for its own state
                plan.state.setdefault(parameter, {})[slot] = value
            _want(plan, held_slot(f"optimizer/{slot}/{name}", value, parameter, sharding, mesh), cast=True)


def _plan_options(plan: _Plan, optimizer: torch.optim.Optimizer, lies: list[list[int]]) -> list[str]:
    """Plan the options of each group from the group of the checkpoint where it lies on all ranks; return problems."""
    saved, problems = plan.files.manifest.optimizer or [], list[str]()
    for i, group in enumerate(plan.groups):
        found = [at for at in lies[i] if at >= 0] or ([] if lies[i] else [i])
        if not found or found[0] >= len(saved):  # a new group keeps its options
            plan.options.append({})
            continue
        if len(found) > 1:
            problems.append(f"parameter group {i} of the optimizer lies in groups {found} of the checkpoint")
            continue
        options, mine = saved[found[0]]["options"], optimizer.param_groups[i]
        others = sorted(
            _OF_METHODS & (options.keys() ^ mine.keys()) | {name for name in _RULES if options.get(name)} - mine.keys()
        )
        was, now = saved[found[0]].get("kind", group["kind"]), group["kind"]
        if others or was != now:
            what = f"{was}, this is {now}" if was != now else f"only one of both has {', '.join(others)}"
            problems.append(
                f"parameter group {i} was saved by another kind of optimizer: {what}. "
                f"Take that kind, or read the weights alone: mpcore.checkpoint.load(path, model, mesh=mesh)"
            )
            continue
        for name in ("amsgrad", "centered", *(["momentum"] if "alpha" in options else [])):  # each has a state tensor
            if mine.get(name) and not options.get(name, True):
                problems.append(
                    f"parameter group {i} has {name} {mine[name]}, whose state the checkpoint lacks, as it was saved "
                    f"with {options[name]}: set it so"
                )
        kept = {name: value for name, value in options.items() if name not in _HOW}
        for name, value in kept.items():
            if not _fits(value, mine.get(name)):
                problems.append(f"parameter group {i} has {name} {value!r:.200}, which is of another type")
        plan.options.append(kept)
        split = saved[found[0]].get("blocks")  # None: an older checkpoint
        if split is None or "blocks" not in group:
            continue
        for name in group["params"]:
            was, now = split.get(name, []), group["blocks"].get(name, [])
            if was != now:
                problems.append(
                    f"Muon orthogonalized {name} as {_matrices(was)}, here as {_matrices(now)}: declare the same "
                    f"blocks, as with Colwise(blocks=3) in parallelize for any tp, or give Muon split_blocks=False"
                )
    return problems


def _fits(value: Any, old: Any) -> bool:
    if isinstance(old, tuple):
        return isinstance(value, list) and len(value) == len(old) and all(map(_fits, value, old))
    is_number = type(value) in (int, float)
    if old is None or type(old) is bool:
        return type(value) is bool or (old is None and (is_number or value is None))
    return is_number if type(old) in (int, float) or isinstance(old, Tensor) else not is_number


def _matrices(blocks: list[int]) -> str:
    return f"{len(blocks)} matrices of {blocks}" if blocks else "1 matrix"


def _masters(
    manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[nn.Parameter, Tensor]:
    """Return the float32 master weights to read into, one for each 16-bit parameter that is saved in float32."""
    if optimizer is None or not getattr(optimizer, "masters", False):
        return {}
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    return {
        p: _slot_like(optimizer.state.get(p, {}).get("master"), p, torch.float32)
        for name, p, _ in declarations(model)
        if p in stepped and p.dtype in (torch.bfloat16, torch.float16)
        if (entry := manifest.tensors.get(f"model/{name}")) is not None and entry.dtype == "F32"
    }


def _slot_like(old: Any, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    if isinstance(old, Tensor) and lies_as(old, parameter) and old.dtype == dtype:
        return old
    local = local_tensor(parameter).detach()
    large = local.device.type == "cpu" and local.is_contiguous()
    return like(parameter, host_memory(local.shape, dtype) if large else torch.empty_like(local, dtype=dtype))


def _share(tensors: dict[str, Entry], kinds: tuple[str, ...], rank: int, size: int) -> list[tuple[str, Entry, Chunk]]:
    """Return the chunks whose bytes this rank checks; the ranks together check every chunk."""
    chunks = [(n, entry, chunk) for n, entry in tensors.items() if n.startswith(kinds) for chunk in entry.chunks]
    chunks.sort(key=lambda item: (item[2].file, item[2].key))
    total = sum(entry.size(chunk) for _, entry, chunk in chunks)
    mine, end = [], 0
    for name, entry, chunk in chunks:
        if end * size // max(total, 1) == rank:
            mine.append((name, entry, chunk))
        end += entry.size(chunk)
    return mine


def fill(items: Iterable[tuple[LocalTensor, Entry]], tensor: Callable[[Entry, Chunk], Tensor]) -> None:
    """Copy this rank's parts of logical tensors out of their chunks, in several threads."""

    def one(item: tuple[LocalTensor, Entry]) -> None:
        held, entry = item
        for box in held.boxes:
            copy_box(box.of(held.tensor), box.start, entry, tensor)

    in_threads(one, items)


def check_weights(
    items: Iterable[tuple[LocalTensor, Entry]], tensor: Callable[[Entry, Chunk], Tensor], where: str
) -> None:
    """Raise ValueError if this rank's parts of tensors hold NaN, or those of weights infinity, in their chunks."""

    def one(item: tuple[LocalTensor, Entry]) -> None:
        held, entry = item
        parts = (part for box in held.boxes for _, part in _parts(box.shape, box.start, entry, tensor))
        check_finite([(held.name, part.to(held.tensor.dtype), held.is_weight) for part in parts], where)

    in_threads(one, items)


@torch.no_grad()
def copy_box(target: Tensor, start: tuple[int, ...], entry: Entry, tensor: Callable[[Entry, Chunk], Tensor]) -> None:
    """Fill `target` with the box of a logical tensor that begins at `start` and has the shape of `target`.

    The values are cast to the dtype of `target`.
    """
    for into, part in _parts(tuple(target.shape), start, entry, tensor):
        target[into].copy_(part)


def _parts(
    shape: tuple[int, ...], start: tuple[int, ...], entry: Entry, tensor: Callable[[Entry, Chunk], Tensor]
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield the parts of a box that lie in one chunk each: where in the box, and the values as a view of the file."""
    for chunk in entry.chunks:
        common = overlap((start, shape), (chunk.start, chunk.shape))
        if common is not None:
            into = tuple(slice(a - b, e - b) for (a, e), b in zip(common, start, strict=True))
            out_of = tuple(slice(a - b, e - b) for (a, e), b in zip(common, chunk.start, strict=True))
            yield into, tensor(entry, chunk)[out_of]


def _read(plan: _Plan, optimizer: torch.optim.Optimizer | None) -> None:
    fill([(item, plan.files.manifest.tensors[item.name]) for item in plan.held], plan.files.tensor)
    for p, master in plan.masters.items():
        local_tensor(p.detach()).copy_(local_tensor(master))
        if optimizer is not None:
            optimizer.state[p] = {**optimizer.state.get(p, {}), "master": master}
    if optimizer is None or plan.files.manifest.optimizer is None:
        return
    for group, options in zip(optimizer.param_groups, plan.options, strict=True):
        for name, value in options.items():
            old = group.get(name)
            if isinstance(old, Tensor):
                old.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(old, tuple) else value
    for parameter in optimizer.state.keys() - plan.kept:
        del optimizer.state[parameter]
    for parameter in plan.state.keys() | plan.masters.keys():
        kept = {"master": plan.masters[parameter]} if parameter in plan.masters else {}
        optimizer.state[parameter] = {**plan.state.get(parameter, {}), **kept}
