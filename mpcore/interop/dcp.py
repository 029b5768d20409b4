"""Save and load sharded models with `torch.distributed.checkpoint` (DCP).

A `BoxedTensor` has the logical size of a tensor and holds the boxes of it that this rank stores. It answers DCP's three
questions: which boxes to write, which boxes to read, and where a box lies in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mpcore.checkpoint.pieces import Box, LocalTensor, held_by_model, held_by_optimizer, held_slot, masters_of
from mpcore.mesh.agreement import merged
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.sharding.declarations import declarations
from mpcore.sharding.declare import check_lies_on
from mpcore.sharding.local import reshard
from mpcore.sharding.state_dict import all_names

_ALLOWED = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.storage_offset, Tensor.untyped_storage, Tensor.set_,
    Tensor.new_empty, Tensor.data_ptr, Tensor.element_size, Tensor.is_floating_point, Tensor.__repr__,
}  # fmt: skip


class BoxedTensor(Tensor):
    """A tensor of the logical size whose values are the boxes that this rank holds. Only DCP can read it.

    Its own storage has one element: every operation that would read values raises a ValueError.

    Attributes:
        held: the local tensor and its boxes. It shares memory with the model or the optimizer.
    """

    held: LocalTensor

    @staticmethod
    def of(held: LocalTensor) -> BoxedTensor:
        boxed = held.tensor.new_zeros(()).expand(held.shape).as_subclass(BoxedTensor)
        boxed.held = held
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
        properties = TensorProperties.create_from_tensor(self.held.tensor)
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(box.start)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, torch.Size(self.held.shape)),
            )
            for box in self.held.boxes
            if box.owned
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank holds, and must read."""
        return [_chunk(box) for box in self.held.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the view of the local tensor that is one box."""
        return next(box.of(self.held.tensor) for box in self.held.boxes if torch.Size(box.start) == index.offset)


def dcp_state_dict(
    model: nn.Module, mesh: Mesh = Mesh(), optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Return a state dict for `dcp.save`, `dcp.async_save` and `dcp.load`. All ranks must call it.

    DCP writes the logical tensors, so any layout can load them, and so can plain torch: an unsharded model, FSDP2,
    DTensor, `dcp_to_torch_save`. `dcp.load` reads into the model and the optimizer in place.

    Args:
        model: the model, or this rank's pipeline stage of it, before or after `shard_data_parallel`.
        mesh: the mesh that the model is on.
        optimizer: the model's optimizer. Its state is created first if it took no step yet. None: only the model.

    Returns:
        The tensors of the model by their full names; with an optimizer
        `{"model": ..., "optimizer": {"state": {name: {slot: tensor}}}}`, as of torch's `get_optimizer_state_dict`. The
        options of the parameter groups, such as lr, are not part of it.

    Raises:
        ValueError: on every rank, if a parameter is on another mesh or offloaded, or two pipeline stages have different
            parameters of one name.

    Note:
        - A parameter in 16 bits is written in 16 bits. Its float32 master weight is the slot "master".
        - `dcp.async_save` copies the shards to the CPU before it returns. Use its default, a thread.

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

    def mine() -> tuple[dict[str, LocalTensor], dict[str, dict[str, LocalTensor]]]:
        for name, parameter, sharding in declarations(model):
            check_lies_on(name, parameter, sharding, mesh)
        held = {item.name.removeprefix("model/"): item for item in held_by_model(model, mesh)}
        slots: dict[str, dict[str, LocalTensor]] = {}
        for item in [] if optimizer is None else _slots(model, mesh, optimizer):
            _, slot, name = item.name.split("/", 2)
            slots.setdefault(name, {})[slot] = item
        return held, slots

    found: list[Any] = []
    weights = {name for name, _ in model.named_parameters()}

    def owned() -> list[tuple[str, tuple[int, ...]]]:
        found.extend(mine())
        return [(name, box.start) for name, item in found[0].items() if name in weights
                for box in item.boxes if box.owned]  # fmt: skip

    def check(ranks: list[list[tuple[str, tuple[int, ...]]]]) -> None:
        first: dict[Any, int] = {}
        for rank, boxes in enumerate(ranks):
            for name, start in boxes:
                if (other := first.setdefault((name, tuple(start)), rank)) != rank:
                    raise ValueError(
                        f"ranks {other} and {rank} have different parameters named {name}, and a checkpoint has one: "
                        f"give the pipeline stages the names of the whole model, as pipeline_stages does"
                    )

    merged(mesh.world, owned, check)
    held, slots = found
    tensors: dict[str, Any] = {name: BoxedTensor.of(item) for name, item in held.items()}
    for first, *others in all_names(model):
        item = held[first]
        if mesh.pp.size > 1:  # the writer may be a stage without the other names; DCP writes equal boxes once
            item = replace(item, boxes=tuple(replace(box, owned=True) for box in item.boxes))
        tensors |= {name: BoxedTensor.of(item) for name in others}
    if optimizer is None:
        return tensors
    state = {name: {slot: BoxedTensor.of(item) for slot, item in each.items()} for name, each in slots.items()}
    return {"model": tensors, "optimizer": {"state": state}}


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))


def _slots(model: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer) -> list[LocalTensor]:
    _create_state(optimizer)
    named: Mapping[Tensor, Any] = {p: (name, sharding) for name, p, sharding in declarations(model)}
    masters = [
        held_slot(f"optimizer/master/{named[p][0]}", master, p, named[p][1], mesh)
        for p, master in masters_of(optimizer).items()
    ]
    return held_by_optimizer(model, optimizer, mesh) + masters


@torch.no_grad()
def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer without state create it, by a step with gradients and learning rates of zero."""
    params = [*itertools.chain(*(group["params"] for group in optimizer.param_groups))]
    if optimizer.state or any(p.grad is not None for p in params):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for p in params:
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for p in params:
            p.grad = None
    for state in optimizer.state.values():
        for x in state.values():
            if isinstance(x, Tensor) and x.dim() == 0:
                x.zero_()  # the count of steps
