"""Save and load sharded models with `torch.distributed.checkpoint` (DCP).

A `BoxedTensor` has the logical size of a tensor and holds the boxes of it that this rank stores. It answers DCP's three
questions: which boxes to write, which boxes to read, and where a box lies in memory.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mpcore.checkpoint.pieces import Box, LocalTensor, held_by_model, held_by_optimizer, held_slot, masters_of
from mpcore.mesh.agreement import merged, together
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.optim import AdamW
from mpcore.sharding.declarations import declarations
from mpcore.sharding.declare import check_lies_on
from mpcore.sharding.local import local_tensor, reshard
from mpcore.sharding.state_dict import all_names

_ALLOWED = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.storage_offset, Tensor.untyped_storage, Tensor.set_,
    Tensor.new_empty, Tensor.data_ptr, Tensor.element_size, Tensor.is_floating_point, Tensor.__repr__,
}  # fmt: skip


# Of torch's optimizers those whose state before the first step is zeros. Adagrad has its state from the beginning.
_FROM_ZEROS = (
    torch.optim.Adadelta, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW, torch.optim.Muon, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.SGD,
)  # fmt: skip


class BoxedTensor(Tensor):
    """A tensor of the logical size whose values are the boxes that this rank holds. Only DCP can read it.

    Its own storage has one element: every operation that would read values raises a ValueError.

    Attributes:
        held: the local tensor and its boxes. It shares memory with the model or the optimizer.
        master: the float32 master weight of the local tensor. DCP writes it, and reads into the local tensor.
        fills: what DCP has read of a tied weight, which it reads once for each name.
    """

    held: LocalTensor
    master: Tensor | None = None
    fills: Any = None
    writes = False

    @staticmethod
    def of(held: LocalTensor, master: Tensor | None = None) -> BoxedTensor:
        boxed = held.tensor.new_zeros(()).expand(held.shape).as_subclass(BoxedTensor)
        boxed.held, boxed.master = held, master
        return boxed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED or getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ValueError(
            f"{getattr(func, '__name__', func)} would read a tensor that holds boxes for torch.distributed.checkpoint: "
            f"take the values from model.state_dict() or mpcore.full_state_dict(model)"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            f"{self.held.name} holds boxes for torch.distributed.checkpoint and can't be pickled: use torch.save with "
            f"mpcore.full_state_dict(model), and dcp.async_save with threads"
        )

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Return the boxes that this rank writes: each box is written by one of its holders."""
        self.writes = True
        of = TensorProperties.create_from_tensor(self._tensor()), torch.Size(self.held.shape)
        boxes = [(MetadataIndex(name, torch.Size(x.start)), _chunk(x)) for x in self._boxes() if x.owned]
        return [WriteItem(at, WriteItemType.SHARD, tensor_data=TensorWriteData(x, *of)) for at, x in boxes]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank holds, and must read."""
        self.writes: bool = False
        if self.fills is not None:
            self.fills.seen = torch.zeros_like(self.held.tensor, dtype=torch.bool)
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the view of the local tensor that is one box."""
        if 0 in self.held.shape:
            return self.held.tensor.new_empty(self.held.shape)
        box = next(box for box in self.held.boxes if torch.Size(box.start) == index.offset)
        return box.of(self._tensor()) if self.writes or self.fills is None else box.of(self.fills)

    def _tensor(self) -> Tensor:
        return self.master if self.writes and self.master is not None else self.held.tensor

    def _boxes(self) -> tuple[Box, ...]:
        """Return the boxes. An empty tensor is one box, which DCP writes once."""
        shape = self.held.shape
        return (Box((0,) * len(shape), (0,) * len(shape), shape, True),) if 0 in shape else self.held.boxes


class _Fills:
    """A tied weight, or a part of it, that DCP fills once for each name. It raises if a second value is another."""

    def __init__(self, names: str, x: Tensor, seen: Tensor, lock: Any) -> None:
        self.names, self.x, self.seen, self.lock, self.size = names, x, seen, lock, x.size

    def detach(self, *_: Any) -> _Fills:
        return self

    __deepcopy__ = detach  # dcp.async_save copies what it writes, and reads nothing

    def narrow(self, *where: int) -> _Fills:
        return _Fills(self.names, self.x.narrow(*where), self.seen.narrow(*where), self.lock)

    def copy_(self, x: Tensor) -> None:
        x = x.to(self.x)
        with self.lock:  # a reader may have several threads
            if bool((self.seen & (self.x != x) & ~(self.x.isnan() & x.isnan())).any()):
                raise ValueError(f"{self.names} differ in the checkpoint, and are one tensor in the model: untie it")
            self.seen.fill_(True)
            self.x.copy_(x)


def dcp_state_dict(
    model: nn.Module, mesh: Mesh = Mesh(), optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Return a state dict for `dcp.save`, `dcp.async_save` and `dcp.load`. All ranks must call it.

    DCP writes the logical tensors, so any layout can load them, and so can plain torch: an unsharded model, FSDP2,
    DTensor, `dcp_to_torch_save`. `dcp.load` reads into the model and the optimizer in place.

    Args:
        model: the model, or this rank's pipeline stage of it, before or after `shard_data_parallel`.
        mesh: the mesh that the model is on.
        optimizer: the model's optimizer. Parameters without state get it first, as before their first step. None: only
            the model.

    Returns:
        The tensors of the model by their full names; with an optimizer
        `{"model": ..., "optimizer": {"state": {name: {slot: tensor}}}}`, as of torch's `get_optimizer_state_dict`. The
        options of the parameter groups, such as lr, are not part of it.

    Raises:
        ValueError: on every rank, if a parameter is on another mesh or offloaded, two pipeline stages have different
            parameters or buffers of one name, a module has an extra state, or a parameter has no optimizer state yet
            and the optimizer's state doesn't begin with zeros (NAdam, ASGD, Rprop, SGD with dampening).

    Note:
        - A parameter in 16 bits that has a float32 master weight is written as its master weight, if the optimizer is
          given, so that a run without masters loads the same values. The master weight is the slot "master", too.
        - `dcp.async_save` copies the shards to the CPU before it returns. Use its default, a thread.
        - `dcp.load` raises a `CheckpointException` on every rank if the names of a tied weight have different values.

    Example:
        >>> import tempfile
        >>> import torch.distributed.checkpoint as dcp
        >>> from mpcore.interop.dcp import dcp_state_dict
        >>> model, folder = mpcore.ColumnParallelLinear(4, 8), tempfile.mkdtemp()
        >>> _ = dcp.save(dcp_state_dict(model), checkpoint_id=folder, no_dist=True)
        >>> dcp.load({"weight": (full := torch.empty(8, 4))}, checkpoint_id=folder, no_dist=True)
        >>> torch.equal(full, model.weight)
        True
    """
    check_mesh(mesh)
    reshard(model)

    def mine() -> tuple[dict[str, LocalTensor], dict[str, dict[str, LocalTensor]], dict[str, Tensor]]:
        for name, parameter, sharding in declarations(model):
            check_lies_on(name, parameter, sharding, mesh)
        held = {item.name.removeprefix("model/"): item for item in held_by_model(model, mesh)}
        slots: dict[str, dict[str, LocalTensor]] = {}
        for item in [] if optimizer is None else _slots(model, mesh, optimizer):
            _, slot, name = item.name.split("/", 2)
            slots.setdefault(name, {})[slot] = item
        return held, slots, {name: each["master"].tensor for name, each in slots.items() if "master" in each}

    held, slots, masters = together(mesh.world, mine)
    owned = [(name, box.start) for name, item in held.items() for box in item.boxes if box.owned]

    def check(ranks: list[list[tuple[str, tuple[int, ...]]]]) -> None:
        first: dict[Any, int] = {}
        for rank, boxes in enumerate(ranks):
            for name, start in boxes:
                if (other := first.setdefault((name, tuple(start)), rank)) != rank:
                    raise ValueError(
                        f"ranks {other} and {rank} have different tensors named {name}, and a checkpoint has one: "
                        f"give the pipeline stages the names of the whole model, as pipeline_stages does"
                    )

    merged(mesh.world, lambda: owned, check)
    tensors: dict[str, Any] = {name: BoxedTensor.of(item, masters.get(name)) for name, item in held.items()}
    for names in (names for names in all_names(model) if len(names) > 1):
        item = held[names[0]]
        fills = _Fills(" and ".join(names), item.tensor, item.tensor, threading.Lock())
        if mesh.pp.size > 1:  # the writer may be a stage without the other names; DCP writes equal boxes once
            item = replace(item, boxes=tuple(replace(box, owned=True) for box in item.boxes))
        tensors |= {name: BoxedTensor.of(item, masters.get(names[0])) for name in names[1:]}
        for name in names:
            tensors[name].fills = fills
    if optimizer is None:
        return tensors
    state = {name: {slot: BoxedTensor.of(item) for slot, item in each.items()} for name, each in slots.items()}
    return {"model": tensors, "optimizer": {"state": state}}


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))


def _slots(model: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer) -> list[LocalTensor]:
    named: Mapping[Tensor, Any] = {p: (name, sharding) for name, p, sharding in declarations(model)}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and not optimizer.state.get(p, {}).keys() - {"master"}:
                _create_state(optimizer, group, p, named[p][0] if p in named else f"a parameter of {tuple(p.shape)}")
    masters = [
        held_slot(f"optimizer/master/{named[p][0]}", master, p, named[p][1], mesh)
        for p, master in masters_of(optimizer).items()
    ]
    return held_by_optimizer(model, optimizer, mesh) + masters


@torch.no_grad()
def _create_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter, name: str) -> None:
    """Create the state that a parameter has before its first step. Nothing else changes."""
    kind: Any = type(optimizer)
    if isinstance(optimizer, AdamW):
        optimizer._state(p, *(["momentum_buffer"] if group.get("muon") else ["exp_avg", "exp_avg_sq"]))
        return
    if kind not in _FROM_ZEROS or group.get("dampening"):
        raise ValueError(
            f"{kind.__name__} has no state of {name}, and can't create it without a step: take a step first, give an "
            f"optimizer whose state begins with zeros, such as AdamW, or call dcp_state_dict without the optimizer"
        )
    copy = nn.Parameter(p.detach().clone())
    copy.grad = torch.ones_like(p)
    inner = kind.__new__(kind)
    vars(inner).update(vars(optimizer), param_groups=[{**group, "params": [copy]}], state=defaultdict(dict))
    inspect.unwrap(kind.step)(inner)  # without the hooks of `step`
    for x in inner.state[copy].values():
        if isinstance(x, Tensor):
            local_tensor(x).zero_()
    optimizer.state[p] = inner.state[copy]
