"""Read the tensors of a model out of the files of transformers, box by box.

A tensor of the files is a box of a model's tensor, often with permuted dimensions, such as one expert's matrix within
the tensor of all experts. A few conversions of transformers interleave rows; their model tensors are computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore._torch.storage import address
from mpcore.checkpoint.format import DTYPES, Chunk, Entry
from mpcore.checkpoint.loading import copy_box
from mpcore.checkpoint.pieces import LocalTensor, check_finite, held_by_model
from mpcore.checkpoint.store import THREADS, in_threads
from mpcore.checkpoint.tensor_file import TensorFile, host_memory
from mpcore.interop.hugging_face.stored import Group, stored_tensors
from mpcore.mesh.agreement import together
from mpcore.mesh.axis import Mesh

PIECE = 2**22  # bytes of a box that are copied at once
SMALL = 2**16  # bytes of a tensor that each of its ranks reads, without a broadcast


class _Part(NamedTuple):
    """A tensor of a file, as a box of a model's tensor: the file, and the order and sizes of its dimensions there."""

    file: TensorFile
    order: tuple[int, ...]
    shape: tuple[int, ...]


class Weights:
    """The tensors of a folder, by the names that they have in the model."""

    def __init__(self, dense: Any) -> None:
        self.dense = dense
        self.entries: dict[str, Entry] = {}
        self.numbers: dict[str, int] = {}
        self.parts: dict[str, _Part] = {}
        self.groups: dict[str, tuple[Group, dict[str, str], dict[str, TensorFile]]] = {}  # computed at once
        self.last: tuple[Group | None, dict[str, Tensor]] = None, {}

    def add(self, group: Group, keys: dict[str, str], files: dict[str, TensorFile]) -> None:
        """Add a group of tensors that transformers converts together."""
        for key, like in group.files.items():
            file, about = files[keys[key]], files[keys[key]].header[keys[key]]
            shape, dtype = tuple(about["shape"]), DTYPES[about["dtype"]]
            if shape != tuple(like.shape) or not torch.can_cast(dtype, like.dtype):
                want = f"in config.json {tuple(like.shape)} of {like.dtype}"
                raise ValueError(f"{file.path}: {keys[key]} has shape {shape} of {dtype}, {want}")
        shapes = {name: tuple(self.dense.get_parameter_or_buffer(name).shape) for name in group.sources}
        whole = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        name_of = {address(x.untyped_storage()): name for name, x in whole.items()}
        chunks: dict[str, list[Chunk]] = {name: [] for name in shapes}
        for key, view in stored_tensors(self.dense, group, whole).items():
            name, found = name_of.get(address(view.untyped_storage())), keys[key]
            box = None if name is None else _box(view, shapes[name])
            if name is None or box is None:
                self.groups |= dict.fromkeys(shapes, (group, keys, files))
                chunks = {name: [Chunk("", name, (0,) * len(shape), shape, 0)] for name, shape in shapes.items()}
                break
            start, order = box
            shape = tuple(view.shape[order.index(dim)] if dim in order else 1 for dim in range(len(start)))
            kept = tuple(sorted((i for i, dim in enumerate(order) if dim >= 0), key=lambda i: order[i]))
            rest = tuple(i for i, dim in enumerate(order) if dim < 0)
            self.parts[found] = _Part(files[found], (*rest, *kept), shape)
            chunks[name].append(Chunk(files[found].path.name, found, start, shape, 0))
        for name, shape in shapes.items():
            self.numbers[name] = len(self.entries)
            self.entries[name] = Entry(shape, "", tuple(chunks[name]))

    def alias(self, names: Iterable[Sequence[str]]) -> None:
        """Give tied tensors their other names. Each item of `names` has the names of one tensor."""
        for tied in names:
            for known in [name for name in tied if name in self.entries][:1]:
                self.entries |= dict.fromkeys(tied, self.entries[known])
                self.numbers |= dict.fromkeys(tied, self.numbers[known])

    def read(self, model: nn.Module, mesh: Mesh, dtypes: Mapping[str, torch.dtype]) -> int:
        """Fill the tensors of a model that are named in `dtypes`, and return the number of bytes that this rank read.

        All ranks of the mesh must call it. The model, or this rank's stages of it, may have any layout; its parameters
        must have memory. The values are cast to `dtypes` before they are copied. If the folder has no such tensor, or a
        value is NaN or infinite, every rank raises ValueError.
        """
        weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}

        def fill() -> tuple[list[tuple[LocalTensor, str]], int]:
            found = [(held, held.name.removeprefix("model/")) for held in held_by_model(model, mesh)]
            items = sorted((each for each in found if each[1] in dtypes), key=lambda item: self._number(item[1]))
            for held, name in items:
                if held.shape != self.entries[name].shape:
                    raise ValueError(f"{name} has shape {held.shape}, in the folder {self.entries[name].shape}")
            mine = [item for item in items if self._reads(*item)]

            def one(item: tuple[LocalTensor, str]) -> None:
                held, name = item
                for box in held.boxes:
                    for at, part in pieces(box.start, box.of(held.tensor), dtypes[name].itemsize):
                        values = torch.empty(part.shape, dtype=dtypes[name])
                        copy_box(values, at, self.entries[name], self._tensor)
                        check_finite([(name, values, name in weights)], str(self._file(name).path))
                        part.copy_(values)
                        self._forget(name)

            computed = [item for item in mine if item[1] in self.groups]
            in_threads(one, [item for item in mine if item not in computed], THREADS)
            in_threads(one, computed, 1)
            self.last = None, {}
            return items, sum(math.prod(b.shape) * dtypes[name].itemsize for held, name in mine for b in held.boxes)

        items, nbytes = together(mesh.world, fill)
        self._broadcast(items)
        return nbytes

    def _number(self, name: str) -> int:
        if name not in self.numbers:
            raise ValueError(f"the folder has no {name}: give the model values, or read it without defer")
        return self.numbers[name]

    def _source(self, held: LocalTensor, name: str) -> list[int]:
        """Return the rank on each axis of the replicas that reads a tensor."""
        number, ranks = self.numbers[name], []
        for axis in held.replicas:
            number, rank = divmod(number, axis.size)
            ranks.append(rank)
        return ranks

    def _reads(self, held: LocalTensor, name: str) -> bool:
        return held.tensor.nbytes < SMALL or [axis.rank for axis in held.replicas] == self._source(held, name)

    @torch.no_grad()
    def _broadcast(self, items: Sequence[tuple[LocalTensor, str]]) -> None:
        """Give the replicas of each tensor the values that one of them read, axis by axis."""
        large = [(held, self._source(held, name)) for held, name in items if held.tensor.nbytes >= SMALL]
        for order in sorted({axis.order for held, _ in large for axis in held.replicas}):
            for held, source in large:
                for i, axis in enumerate(held.replicas):
                    later = [(one.rank, rank) for one, rank in zip(held.replicas, source, strict=True)][i + 1 :]
                    if axis.order == order and all(rank == wanted for rank, wanted in later):
                        dist.broadcast(held.tensor, group=axis.group, group_src=source[i])

    def _file(self, name: str) -> TensorFile:
        if name in self.groups:
            return next(iter(self.groups[name][2].values()))
        return self.parts[self.entries[name].chunks[0].key].file

    def _tensor(self, entry: Entry, chunk: Chunk) -> Tensor:
        """Return a tensor of the files as a view that has the shape of its box, or a computed tensor."""
        if chunk.file:
            file, order, shape = self.parts[chunk.key]
            return file.whole(chunk.key).permute(order).reshape(shape)
        if self.last[0] is not self.groups[chunk.key][0]:
            self.last = self.groups[chunk.key][0], self._computed(*self.groups[chunk.key])
        return self.last[1][chunk.key]

    def _forget(self, name: str) -> None:
        for chunk in self.entries[name].chunks:
            if chunk.file:
                self.parts[chunk.key].file.forget(chunk.key)

    def _computed(self, group: Group, keys: dict[str, str], files: dict[str, TensorFile]) -> dict[str, Tensor]:
        """Return the model's tensors of a group. A tensor of indices gives the position of each element."""
        found = {key: files[at].whole(at) for key, at in keys.items()}
        shapes = {name: self.entries[name].shape for name in group.sources}
        sizes = [math.prod(shape) for shape in shapes.values()]
        flat = host_memory((sum(sizes),), next(iter(found.values())).dtype)
        numbers = torch.arange(sum(sizes)).split(sizes)
        places = {name: at.view(shape) for (name, shape), at in zip(shapes.items(), numbers, strict=True)}
        for key, place in stored_tensors(self.dense, group, places).items():
            flat[place.reshape(-1)] = found[key].reshape(-1).to(flat.dtype)
        for at in keys.values():
            files[at].forget(at)
        return {name: x.view(shapes[name]) for name, x in zip(shapes, flat.split(sizes), strict=True)}


def _box(view: Tensor, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return where a view of a contiguous tensor begins there, and which of its dimensions each dimension of it is.

    A dimension of size 1 that none of the tensor's has is -1. None: the view is no box of the tensor.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset, start, order = int(view.storage_offset()), [], []
    for stride in strides:
        at, offset = divmod(offset, max(stride, 1))
        start.append(at)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        fits = [d for d, s in enumerate(strides) if s == stride and start[d] + size <= shape[d] and d not in order]
        if size > 1 and not fits:
            return None
        order.append(fits[0] if size > 1 else -1)
    return tuple(start), tuple(order)


def pieces(
    start: tuple[int, ...], part: Tensor, itemsize: int, limit: int = PIECE
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield pieces of at most `limit` bytes of a box, each with its start in the logical tensor."""
    dim = next((dim for dim, size in enumerate(part.shape) if size > 1), None)
    if dim is None or part.numel() * itemsize <= limit:
        yield start, part
        return
    step = max(1, limit * part.shape[dim] // (part.numel() * itemsize))
    for at in range(0, part.shape[dim], step):
        piece = part.narrow(dim, at, min(step, part.shape[dim] - at))
        yield from pieces((*start[:dim], start[dim] + at, *start[dim + 1 :]), piece, itemsize, limit)
