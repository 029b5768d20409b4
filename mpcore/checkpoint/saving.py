"""Write a checkpoint from any layout, in the foreground or in the background."""

from __future__ import annotations

import json
import operator
import os
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch.distributed import ranks_are_threads
from mpcore.checkpoint.folders import check_keep, prune, running
from mpcore.checkpoint.format import (
    JSON_LIMIT,
    Chunk,
    Entry,
    FileRecord,
    Group,
    Manifest,
    SmallFile,
    check_inside,
    dtype_name,
    tiles,
    write_manifest,
)
from mpcore.checkpoint.pieces import (
    Box,
    LocalTensor,
    check_finite,
    held_by_model,
    held_by_optimizer,
    masters_of,
    parameter_groups,
)
from mpcore.checkpoint.remote import as_path, store_of
from mpcore.checkpoint.schema import convert
from mpcore.checkpoint.store import Store, in_threads
from mpcore.checkpoint.tensor_file import checksum, host_memory, raw, write_tensors
from mpcore.mesh.agreement import check_same, merged, together
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import Logger, get_logger
from mpcore.sharding.local import reshard

log: Logger = get_logger("mpcore.checkpoint")
_MESH_AXES = ("tp", "cp", "pp", "ep", "dp")


@dataclass(frozen=True)
class _Request:
    """The arguments of `save` besides the model and the optimizer."""

    path: Path
    mesh: Mesh
    step: int
    sample: int
    seed: int | None
    config: Mapping[str, Any] | None
    extra: Mapping[str, Any] | None
    keep: int | None
    keep_every: int | None
    beside: Mapping[str, bytes] | None

    def __post_init__(self) -> None:
        of = ((k, getattr(self, k)) for k in ("step", "sample", "seed", "keep", "keep_every"))  # may be on a GPU
        check_same("arguments of save", {k: x.tolist() if isinstance(x, Tensor) else x for k, x in of}, self.mesh.world)

    def manifest(self, optimizer: list[Any] | None) -> Manifest:
        """Return the manifest of this moment, without files and tensors."""
        check_keep(1 if self.keep is None else self.keep)
        state = {"config": dict(self.config or {}), "extra": dict(self.extra or {}), "optimizer": optimizer}
        for name, value in state.items():
            try:
                state[name] = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} can't be written as JSON: {error}") from None
        size = len(json.dumps({name: state[name] for name in ("config", "extra")}, indent=1))
        if size > JSON_LIMIT:
            raise ValueError(
                f"config and extra have {size} bytes as JSON, more than {JSON_LIMIT}: save large values as a file, "
                f"beside={{'data.bin': bytes}}"
            )
        step, sample = operator.index(self.step), operator.index(self.sample)
        if not 0 <= min(step, sample) <= max(step, sample) < 2**63:
            raise ValueError(f"step {step} and sample {sample} are not both between 0 and {2**63 - 1}")
        seed = None if self.seed is None else operator.index(self.seed)  # json refuses NumPy's integers
        sizes = {name: getattr(self.mesh, name).size for name in _MESH_AXES}
        return Manifest(step, sample, seed, mesh=sizes, **state)


@dataclass(frozen=True)
class _Snapshot:
    request: _Request
    manifest: Manifest  # without files and tensors
    tensors: dict[str, tuple[tuple[int, ...], str]]  # logical shape and dtype of each tensor that this rank holds
    pieces: list[tuple[LocalTensor, Box, Tensor]]


@dataclass(frozen=True)
class _Part:
    """One rank's part of the manifest."""

    files: dict[str, FileRecord]
    tensors: dict[str, tuple[tuple[int, ...], str]]
    chunks: list[tuple[str, Chunk]]
    replicas: list[tuple[str, Chunk]]  # held here, but written by another rank: they have no file
    optimizer: list[Group] | None


class Saving:
    """A save that runs in the background, as `save_async` returns it.

    Attributes:
        path: the checkpoint.
        seconds: how long the writing took, in seconds. 0 until it is done.
        bytes: the size of all files in bytes. 0 until it is done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: float = 0.0
        self.bytes: int = 0
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether the save has ended on this rank, with or without an error."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the save has ended with an error.

        Ranks may see this at different steps: let them agree before they act on it.
        """
        return self.done and self._error is not None

    def join(self) -> None:
        """Wait until the save has ended, except in its own thread. Its error stays for `wait`."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def wait(self) -> Path:
        """Wait until the save has ended, and return the path of the checkpoint.

        Raises:
            ValueError: on every rank, if the save failed on any rank. A second call doesn't raise again, so that the
                next save may be tried.
        """
        self.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise ValueError(f"the save of {self.path} failed: {error}") from error
        return self.path


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    mesh: Mesh,
    step: int,
    sample: int = 0,
    seed: int | None = None,
    config: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint that any layout can load. All ranks of the mesh must call it.

    Each element of a logical tensor is written once, by the lowest rank that holds it. The replicas on other ranks are
    compared with it by checksum. The call waits for a save that is running in the background.

    Args:
        path: the directory to create, which is returned. A checkpoint there is replaced once this one is complete.
        model: the model, or this rank's stage of it, before or after `fully_shard`.
        optimizer: the model's optimizer. Its state must be tensors of the parameter's shape, or scalars. None: save no
            optimizer state.
        mesh: the mesh that the model is on.
        step: optimizer steps done.
        sample: global index of the next sample.
        seed: the run's seed.
        config, extra: JSON values to store, such as the model's configuration and the loss scale. Rank 0's are written.
        keep, keep_every: which older checkpoints stay in the parent directory of `path` after the save: see `prune`.
            `keep=None`: all stay.
        beside: small files to store, such as a tokenizer: a dict from the path within the checkpoint to the file's
            bytes. Rank 0's are written.

    Raises:
        ValueError: on every rank, if a rank can't write (full disk, read-only directory), if replicas differ, or if a
            value can't be saved, a tensor holds NaN, or a weight infinity, or if the last save in the background failed
            and `wait` has not said so. The checkpoint that was at `path` is unchanged, and no partial one is left.
    """
    request = _Request(as_path(path), mesh, step, sample, seed, config, extra, keep, keep_every, beside)
    _write(together(mesh.world, lambda: _snapshot(model, optimizer, request, None, copy=False)))
    return request.path


def save_async(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    mesh: Mesh,
    step: int,
    sample: int = 0,
    seed: int | None = None,
    config: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    beside: Mapping[str, bytes] | None = None,
    after: Saving | None = None,
) -> Saving:
    """Copy the model and optimizer state to host memory, return, and write the checkpoint in a background thread.

    The files are equal to those that `save` would write now, byte for byte. One save is in flight at a time: each call
    waits for the one before it. Call `wait` on the last one before you destroy the process group. The interpreter
    doesn't exit before the thread has ended. All other parameters are those of `save`.

    Args:
        after: an earlier `Saving` whose error this call raises. The previous one's is raised in any case.

    Raises:
        ValueError: on every rank, if the previous save failed, a value can't be saved, a tensor holds NaN, or a weight
            infinity.

    Example:
        >>> from tempfile import mkdtemp
        >>> from mpcore import Mesh
        >>> from mpcore.checkpoint import save_async
        >>> model, folder, saving = torch.nn.Linear(2, 2), mkdtemp(), None
        >>> for step in (1, 2):  # each call waits for the save before it
        ...     saving = save_async(f"{folder}/step-{step}", model, mesh=Mesh(), step=step, after=saving)
        >>> saving.wait().name
        'step-2'
    """
    request = _Request(as_path(path), mesh, step, sample, seed, config, extra, keep, keep_every, beside)
    snapshot = together(mesh.world, lambda: _snapshot(model, optimizer, request, after, copy=True))
    saving = Saving(request.path)

    def work() -> None:
        began = time.perf_counter()
        try:
            saving.bytes = _write(snapshot, "save")
        except Exception as error:  # `wait` raises it, if the program calls it
            saving._error = error
            log.error("NOT SAVED in the background: %s: %s", saving.path, error)
        saving.seconds = time.perf_counter() - began

    if ranks_are_threads():  # a second thread would not be this rank's
        work()
        return saving
    saving._thread = threading.Thread(target=work, name=f"save {saving.path.name}")
    saving._thread.start()
    running()[:] = [saving]
    return saving


def _snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, request: _Request, after: Saving | None, copy: bool
) -> _Snapshot:
    """Collect everything that this rank saves, once earlier saves are done. If `copy` is True, copy the tensors."""
    for earlier in (after, *(() if ranks_are_threads() else running())):
        if earlier is not None:
            earlier.wait()
    reshard(model)
    held, groups = held_by_model(model, request.mesh, masters_of(optimizer)), None
    if optimizer is not None:
        held += held_by_optimizer(model, optimizer, request.mesh)
        groups = parameter_groups(model, optimizer)
    check_finite(((x.name, x.tensor, x.is_weight) for x in held), f"{request.path} isn't written")  # the old one stays
    manifest = request.manifest(groups)
    tensors = {item.name: (item.shape, dtype_name(item.tensor.dtype)) for item in held}
    pieces = [(item, box, box.of(item.tensor)) for item in held for box in item.boxes]
    if copy:
        pieces = [(item, box, host_memory(box.shape, x.dtype).copy_(x)) for item, box, x in pieces]
    return _Snapshot(request, manifest, tensors, pieces)


def _write(snapshot: _Snapshot, line: str = "") -> int:
    """Write the files of a snapshot on all ranks. Return their total size in bytes."""
    request, path, world = snapshot.request, snapshot.request.path, snapshot.request.mesh.world
    lead, began = world.rank == 0, time.perf_counter()
    store = store_of(path)
    lock = together(world, lambda: store.prepare(path) if lead else None, line)
    try:
        size = merged(
            world, lambda: json.dumps(asdict(_write_part(snapshot, store, world.rank))),
            lambda texts: _commit(snapshot, store, [convert(_Part, json.loads(x), "a rank's part") for x in texts]),
            line,
        )  # fmt: skip
    except ValueError:
        if lead:
            store.discard(path)
        raise
    finally:
        if lock is not None:
            lock.close()
    if lead:
        log.info("saved %s: %.1f MB in %.2f s", path, size / 1e6, time.perf_counter() - began)
    if request.keep is not None:
        keep = request.keep
        together(world, lambda: prune(path.parent, keep, request.keep_every, spare=path) if lead else None, line)
    return size


def _write_part(snapshot: _Snapshot, store: Store[Any], rank: int) -> _Part:
    """Write the boxes that this rank owns, and compute checksums of the replicas that it holds."""
    tensors: dict[str, dict[str, Tensor]] = {}  # by file and key
    where: dict[tuple[str, str], tuple[str, Box]] = {}
    replicas = []
    for held, box, tensor in snapshot.pieces:
        if not box.owned:
            replicas.append((held.name, Chunk("", "", box.start, box.shape, checksum(raw(tensor)))))
            continue
        kind, key = held.name.split("/", 1)
        if box.shape != held.shape:
            key += "@" + ",".join(map(str, box.start))
        file = f"{kind}-{rank:05d}{store.suffix}.safetensors"
        while key in tensors.get(file, ()):  # a parameter may be named as a box is
            key += "@"
        tensors.setdefault(file, {})[key] = tensor
        where[file, key] = held.name, box
    folder = store.temporary(snapshot.request.path)
    # All files at the same time: while one waits for the disk, another is filled.
    results = in_threads(lambda file: write_tensors(folder / file, tensors[file]), tensors)
    written = dict(zip(tensors, results, strict=True))
    files = {file: record for file, (record, _) in written.items()}
    places = ((name, file, key, box, written[file][1][key]) for (file, key), (name, box) in where.items())
    chunks = [(name, Chunk(file, key, box.start, box.shape, checked)) for name, file, key, box, checked in places]
    return _Part(files, snapshot.tensors, chunks, replicas, snapshot.manifest.optimizer)


def _commit(snapshot: _Snapshot, store: Store[Any], parts: list[_Part]) -> int:
    """On rank 0, once all tensors are written: write the other files and the manifest, and publish the checkpoint."""
    folder = store.temporary(path := snapshot.request.path)
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    chunks: dict[str, list[Chunk]] = {}
    for part in parts:
        for name, what in part.tensors.items():
            if found.setdefault(name, what) != what:
                raise ValueError(f"ranks disagree about {name}: {found[name]} and {what}")
        for name, chunk in part.chunks:
            chunks.setdefault(name, []).append(chunk)
    tensors = {}
    for name in sorted(found):
        entry = Entry(*found[name], tuple(sorted(chunks.get(name, ()), key=lambda chunk: chunk.start)))
        if not tiles([tuple(zip(c.start, c.shape, strict=True)) for c in entry.chunks], entry.shape):
            where = ", ".join(sorted({chunk.file for chunk in entry.chunks}))
            raise ValueError(
                f"the {len(entry.chunks)} chunks of {name} in {where or 'no file'} don't tile its shape {entry.shape}: "
                f"ranks hold parts or replicas that its layer does not declare, or it is tied, and not on every stage "
                f"under its first name in the unsharded model"
            )
        tensors[name] = entry
    _check_replicas(tensors, parts)
    beside = write_beside(folder, snapshot.request.beside or {})
    files = {name: record for part in parts for name, record in part.files.items()}
    groups = _merge([part.optimizer for part in parts if part.optimizer is not None])
    write_manifest(folder, replace(snapshot.manifest, optimizer=groups, files=files, tensors=tensors, beside=beside))
    store.publish(path)
    return sum(record.bytes for record in files.values())


def write_beside(folder: Path, files: Mapping[str, bytes]) -> dict[str, SmallFile]:
    """Write small files into a checkpoint's directory, and sync them to the disk."""
    for name, data in files.items():
        check_inside(name)
        (folder / name).parent.mkdir(exist_ok=True)
        store_of(folder).write(folder / name, data)
        store_of(folder).sync((folder / name).parent)
    return {name: SmallFile(len(data), zlib.crc32(data)) for name, data in files.items()}


def _check_replicas(tensors: Mapping[str, Entry], parts: list[_Part]) -> None:
    for rank, part in enumerate(parts):
        for name, mine in part.replicas:
            for chunk in tensors[name].chunks:
                if (chunk.start, chunk.shape) == (mine.start, mine.shape) and chunk.checksum != mine.checksum:
                    raise ValueError(
                        f"{name} on rank {rank} differs from {chunk.file}: replicas have drifted apart (as after "
                        f"torch's clip_grad_norm_: call run.clip_gradients or mpcore.gradients.clip_gradients), or "
                        f"its layer does not declare that it is sharded. Average a buffer that each rank fills by "
                        f"itself, as BatchNorm's, over mesh.data first, or give it persistent=False"
                    )


def _merge(of_ranks: list[list[Group]]) -> list[Group] | None:
    """Return the optimizer's parameter groups of all pipeline stages together, or None if there is no optimizer."""
    if not of_ranks:
        return None
    counts = sorted({len(groups) for groups in of_ranks})
    if len(counts) > 1:
        raise ValueError(
            f"some ranks' optimizers have {counts[0]} parameter groups, others {counts[-1]}: give every stage the same "
            f"groups, in one order, empty where it holds none of their parameters"
        )
    merged = []
    for i, same in enumerate(zip(*of_ranks, strict=True)):
        for group in same:
            if group["options"] != same[0]["options"]:
                raise ValueError(f"ranks disagree about parameter group {i}: {same[0]['options']}, {group['options']}")
        merged.append({**same[0], "params": sorted({name for group in same for name in group["params"]})})
        if "blocks" in same[0]:
            merged[-1]["blocks"] = {name: sizes for group in same for name, sizes in group["blocks"].items()}
    return merged
