"""Floor 2: where a parameter's local tensor lies in its logical tensor.

A layer declares this once for each of its parameters, in `layer.shardings`. Initialisation, gradient sums, gradient
norm, state dicts and checkpoints all read that one declaration; none of them looks at a parameter's name.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from mpcore.collectives import shard_sizes, start_all_gather, wait
from mpcore.mesh import Axis, Mesh, check_axis

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Run = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """How one dimension of a logical tensor is dealt out over an axis.

    Args:
        axis: the axis.
        dim: the dimension of the logical tensor.
        runs: for each rank the runs `(start, end)` of the dimension that it holds, in the order it holds them. Runs of
            different ranks may overlap: then those ranks hold replicas, and their gradients are terms of one sum.
    """

    axis: Axis
    dim: int
    runs: tuple[tuple[Run, ...], ...]

    @property
    def mine(self) -> tuple[Run, ...]:
        """The runs that this rank holds."""
        return self.runs[self.axis.rank]

    def size(self, rank: int) -> int:
        """How many indices of the dimension `rank` holds."""
        return sum(end - start for start, end in self.runs[rank])

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The indices that more than one rank holds, in order."""
        seen: set[int] = set()
        twice: set[int] = set()
        for runs in self.runs:
            held = {i for start, end in runs for i in range(start, end)}
            twice |= seen & held
            seen |= held
        return tuple(sorted(twice))

    @cached_property
    def owned(self) -> tuple[bool, ...]:
        """For each index this rank holds: whether no lower rank holds it too."""
        lower = {i for runs in self.runs[: self.axis.rank] for start, end in runs for i in range(start, end)}
        return tuple(i not in lower for start, end in self.mine for i in range(start, end))

    @cached_property
    def owned_runs(self) -> tuple[Run, ...]:
        """The runs of what this rank holds, counted from its first index, that no lower rank holds too."""
        kept = [i if mine else None for i, mine in enumerate(self.owned)]
        return tuple((start, start + length) for start, _, length in _runs(kept))

    @cached_property
    def replica_runs(self) -> tuple[tuple[int, int, int], ...]:
        """The replicas that this rank holds in runs: where in what it holds, where in `replicated`, how many."""
        slot = {index: i for i, index in enumerate(self.replicated)}
        return tuple(_runs([slot.get(index) for start, end in self.mine for index in range(start, end)]))


def _runs(places: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    """The index, the place and the length of each run of places that follow each other."""
    for _, found in itertools.groupby(enumerate(places), lambda pair: None if pair[1] is None else pair[1] - pair[0]):
        (index, place), *more = found
        if place is not None:
            yield index, place, 1 + len(more)


@dataclass(frozen=True)
class Sharding:
    """Where a local tensor lies in its logical tensor, and which axes its gradient is still to be summed over.

    Args:
        shape: the logical shape.
        shards: the sharded dimensions, each with its axis. Over all other axes the tensor is replicated.
        partial: axes over which the tensor is replicated while each rank's gradient is one term of a sum, such as the
            weight of a norm that sees only this rank's part of the sequence.
        blocks: lengths of the matrices that the tensor is made of, such as Q, K and V; (): it is one.
        block_dim: the dimension that they follow each other in.
        added: those of `partial` that hold for every use of the parameter, whichever module's: what `add_partial` said.
        data: the axis that `shard_data_parallel` laid it out over; None: it didn't see it.
    """

    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    partial: tuple[Axis, ...] = ()
    blocks: tuple[int, ...] = ()
    block_dim: int = 0
    added: tuple[Axis, ...] = field(default=(), compare=False)
    data: Axis | None = field(default=None, compare=False)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        shape = list(self.shape)
        for shard in self.shards:
            shape[shard.dim] = shard.size(shard.axis.rank)
        return tuple(shape)

    def data_axis(self, mesh: Mesh) -> Axis:
        """The axis on which the tensor is replicated while its ranks see other data: their gradients are to be summed.

        That is `mesh.edp` for what is sharded over the experts' axis, and `mesh.data` for all else.
        """
        return mesh.edp if self._is_expert(mesh) else mesh.data

    def replica_axes(self, mesh: Mesh) -> tuple[Axis, ...]:
        """The axes besides `data_axis` on which other ranks hold the same elements."""
        over = self.partial if self._is_expert(mesh) else (mesh.tp, *self.partial)  # experts have their own etp
        cut = {_key(shard.axis) for shard in self.shards}
        return tuple(axis for axis in over if _key(axis) not in cut)

    def _is_expert(self, mesh: Mesh) -> bool:
        return any(_key(shard.axis) == _key(mesh.ep) for shard in self.shards)

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of the logical tensor, in a tensor of its own unless that is all of it."""
        if tuple(full.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(full.shape)} is not the logical shape {self.shape}")
        for shard in self.shards:
            full = torch.cat([full.narrow(shard.dim, start, end - start) for start, end in shard.mine], shard.dim)
        return full

    def assemble(self, local: Tensor) -> Tensor:
        """The logical tensor, gathered over the axes it is sharded on: a collective, on all of their ranks."""
        for shard in reversed(self.shards):
            if shard.axis.size == 1:
                parts = [local.movedim(shard.dim, 0)]
            else:
                longest = max(shard.size(rank) for rank in range(shard.axis.size))
                front = local.movedim(shard.dim, 0)
                front = torch.cat([front, front.new_zeros(longest - len(front), *front.shape[1:])])
                parts = list(wait(start_all_gather(front, shard.axis)).split(longest))
            full = parts[0].new_empty(self.shape[shard.dim], *parts[0].shape[1:])
            for part, runs in zip(parts, shard.runs, strict=True):
                offset = 0
                for start, end in runs:
                    full[start:end] = part[offset : offset + end - start]
                    offset += end - start
            local = full.movedim(0, shard.dim)
        return local.contiguous()


def _key(axis: Axis) -> str:
    return axis.group_name or axis.name  # the group says which ranks they are


def check_lies_on(name: str, parameter: Tensor, sharding: Sharding, mesh: Mesh) -> None:
    """Refuse a parameter that lies on axes of another mesh: whose replica is whose would be guessed.

    Raises:
        ValueError: naming it and the axis, or that a DTensor isn't of `shard_data_parallel`.
    """
    if is_dtensor(parameter) and sharding.data is None and parameter.device_mesh.size() > 1:
        raise ValueError(
            f"{name} is a DTensor over {parameter.device_mesh.size()} ranks that shard_data_parallel didn't make: cut "
            f"it over tp by parallelize or mpcore's layers, over data by shard_data_parallel"
        )
    for axis in (*(shard.axis for shard in sharding.shards), sharding.data):
        if axis is not None and axis.size > 1:
            namesake = getattr(mesh, axis.name, None)
            there = [namesake] if isinstance(namesake, Axis) else mesh.axes.values()  # of a name of its own: any
            if all(axis.group is not one.group for one in there):
                raise ValueError(
                    f"{name} lies on the axis {axis.name} ({axis.size} ranks) of another mesh than the one given: give "
                    f"the mesh that its layers were made with"
                )


def cut(length: int, axis: Axis, dim: int, unit: int = 1) -> Shard:
    """A dimension of `length` cut in one run for each rank, no `unit` torn apart."""
    return cut_blocks((length,), axis, dim, (unit,))


def cut_blocks(lengths: Sequence[int], axis: Axis, dim: int, units: Sequence[int]) -> Shard:
    """A dimension made of blocks, such as gate and up, each of which is cut over the axis."""
    check_axis(axis)
    runs: list[list[Run]] = [[] for _ in range(axis.size)]
    offset = 0
    for length, unit in zip(lengths, units, strict=True):
        start = offset
        for rank, size in enumerate(shard_sizes(length, axis.size, unit)):
            runs[rank].append((start, start + size))
            start += size
        offset += length
    return Shard(axis, dim, tuple(tuple(r) for r in runs))


# --- of a whole model ---------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a parameter is held: its full name, the module, its name there, and what the module declares of it."""

    name: str
    module: nn.Module
    leaf: str
    declared: Sharding | None


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """For each parameter, tied ones once: its first full name, a module that holds it, its name there, the parameter.

    Of several modules it is the first that declares the parameter, or the first.

    Raises:
        ValueError: if what a module declares is no parameter of it any more, as when torch parametrizes it.
    """
    for parameter, places in _places(model):
        owner = next((place for place in places if place.declared is not None), places[0])
        yield places[0].name, owner.module, owner.leaf, parameter


def declarations(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Sharding]]:
    """For each parameter, tied ones once: its first full name, itself, what all modules that hold it declare of it.

    Raises:
        ValueError: as `owners`, and if two modules declare one parameter differently.
    """
    for parameter, places in _places(model):
        said = [place for place in places if place.declared is not None]
        yield places[0].name, parameter, _joined(said) if said else Sharding(tuple(parameter.shape))


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # what torch.compile and checkpoint_wrapper put into names


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once under its full name without wrappers, which are left out: none has anything of its own."""
    for name, module in model.named_modules():
        if not any(wrapper in module._modules for wrapper in WRAPPERS):
            yield plain_name(name), module


def plain_name(name: str) -> str:
    """A name of torch's without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _places(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[Place]]]:
    """Each parameter with all places that hold it, the first one first."""
    found: dict[int, tuple[nn.Parameter, list[Place]]] = {}
    for prefix, module in named_modules(model):
        declared: Mapping[str, Sharding] = getattr(module, "shardings", {})
        for leaf in declared:
            if leaf not in module._parameters:
                raise ValueError(
                    f"{prefix}.{leaf} is no parameter any more, and {type(module).__name__} declares how it is cut and "
                    f"summed: in place of parametrize or weight_norm write a ParallelModule that declares the factors, "
                    f"or merge them (remove_parametrizations)".lstrip(".")
                )
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                place = Place(f"{prefix}.{leaf}" if prefix else leaf, module, leaf, declared.get(leaf))
                found.setdefault(id(parameter), (parameter, []))[1].append(place)
    yield from found.values()


def _joined(places: list[Place]) -> Sharding:
    """One declaration of several of one parameter: it lies in one way, and its gradient is all pending sums of all."""
    first = places[0].declared
    assert first is not None
    if len(places) == 1:
        return first
    said = [(place.name, place.declared) for place in places if place.declared is not None]
    pending = [{_key(axis): axis for axis in sharding.partial} for _, sharding in said]
    added = {_key(axis): axis for _, sharding in said for axis in sharding.added}
    for (name, other), axes in zip(said, pending, strict=True):
        if _lies(other) != _lies(first):
            raise ValueError(
                f"{places[0].name} and {name} are one parameter, declared as {_words(first)} and as {_words(other)}: "
                f"tie modules that cut it alike, or make it a parameter of each"
            )
        for key in axes.keys() ^ pending[0].keys():
            if key not in added:
                axis = {**axes, **pending[0]}[key]
                raise ValueError(
                    f"{places[0].name} and {name} are one parameter, whose gradient is a pending sum over {axis.name} "
                    f"({axis.size} ranks) in one of them and whole in the other: give both the same sequence_parallel, "
                    f"or if it is pending in both declare that with add_partial"
                )
    data = next((sharding.data for _, sharding in said if sharding.data is not None), None)
    union = {key: axis for axes in pending for key, axis in axes.items()}
    return replace(first, partial=tuple(union.values()), added=tuple(added.values()), data=data)


def _lies(sharding: Sharding) -> tuple[object, ...]:
    return sharding.shape, [(_key(s.axis), s.dim, s.runs) for s in sharding.shards if s.axis.size > 1]


def _words(sharding: Sharding) -> str:
    cuts = [f"dimension {s.dim} cut over {s.axis.name}" for s in sharding.shards if s.axis.size > 1]
    return f"{sharding.shape} with {' and '.join(cuts) or 'nothing cut'}, here {sharding.local_shape}"


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """For each buffer in the state dict: its full name, the module that holds it, its name there, the buffer."""
    for prefix, module in named_modules(model):
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}".lstrip("."), module, leaf, buffer


def shardings(model: nn.Module) -> dict[str, Sharding]:
    """The declaration of every parameter by full name; a parameter that nobody declares is replicated."""
    return {name: sharding for name, _, sharding in declarations(model)}


def sharding_of(module: nn.Module, leaf: str, parameter: Tensor) -> Sharding:
    """What `module` declares of its parameter `leaf`."""
    declared: Mapping[str, Sharding] = getattr(module, "shardings", {})
    return declared.get(leaf) or Sharding(tuple(parameter.shape))


def add_partial(module: nn.Module, leaf: str, axis: Axis) -> None:
    """Declare that the gradient of `module`'s parameter `leaf` is, besides all else, a pending sum over `axis`."""
    if axis.size > 1:
        old = sharding_of(module, leaf, getattr(module, leaf))
        declared = {**getattr(module, "shardings", {})}
        declared[leaf] = replace(old, partial=(*old.partial, axis), added=(*old.added, axis))
        module.shardings = declared  # type: ignore[assignment]


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    """Whether data parallelism sharded `x`. DTensor takes 0.4 s to import: where nobody did, nothing is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_tensor(x: Tensor) -> Tensor:
    """The tensor this rank holds of a DTensor; a plain tensor is itself."""
    return x.to_local() if is_dtensor(x) else x


def lies_as(value: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor lies as a parameter: with a DTensor, whose memory is its mesh's, may go a local tensor of the
    host's."""
    if is_dtensor(value) and (not is_dtensor(parameter) or value.shape != parameter.shape):
        return False
    return local_tensor(value).shape == local_tensor(parameter).shape


def data_run(x: DTensor) -> tuple[int, int]:
    """The run of dimension 0 that this rank holds of a parameter that `fully_shard` cut."""
    coordinate = x.device_mesh.get_coordinate()  # not get_local_rank: torch's caches may return a mesh of ended groups
    assert coordinate is not None
    size = -(-x.shape[0] // x.device_mesh.size(x.device_mesh.ndim - 1))
    start = min(coordinate[-1] * size, x.shape[0])
    return start, start + x.to_local().shape[0]


def reshard(model: nn.Module) -> None:
    """Have the modules hold their shards, which a forward with gradients but no backward leaves gathered.

    `save`, `load` and `load_full_state_dict` do it for the modules of the model they are given. Where a rank's stages
    are sharded each for itself and joined, call it for each stage before.
    """
    for unit in units(model):
        unit.reshard()


def units(model: nn.Module) -> list[Any]:
    """What `fully_shard` gathers and sums together: submodules, and what shares parameters with other stages."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # where nobody imported it, nothing is sharded
        return []
    shared = getattr(getattr(model, "data_parallel", None), "shared", ())
    return [module for module in (*model.modules(), *shared) if isinstance(module, fsdp.FSDPModule)]


def param_groups(state: Any) -> list[Any]:
    """Of a unit's state: its parameters, together; before torch 2.13 all on one mesh, or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def check_present(name: str, x: Tensor) -> None:
    """Refuse a parameter without memory here: torch would read and write past the end of what there is.

    Raises:
        ValueError: naming it, and the way out.
    """
    x = local_tensor(x)
    if x.numel() and not x.untyped_storage().nbytes():
        raise ValueError(
            f"{name} has {x.numel()} elements and 0 bytes of memory here: its block is offloaded; do this within "
            f"`with offload.here():`, of what offload_parameters returned"
        )


def full_tensor(x: Tensor, sharding: Sharding) -> Tensor:
    """The logical tensor of a parameter or gradient, also where data parallelism shards it: a collective."""
    x = x.full_tensor() if is_dtensor(x) else x
    return sharding.assemble(x.detach())


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model that isn't sharded, gathered to every rank: a collective on all ranks.

    Every parameter in its logical shape, tied ones under all their names, and persistent buffers, which are this
    rank's. A model cut in pipeline stages gives its own stage's. All are copies. What `torch.compile` and
    `checkpoint_wrapper` put into names is left out.

    Raises:
        ValueError: before anything is sent, naming a parameter that is offloaded.
    """
    held = list(declarations(model))
    for name, parameter, _ in held:
        check_present(name, parameter)
    state = {}
    for name, parameter, sharding in held:
        full = full_tensor(parameter, sharding)
        own = full.data_ptr() == local_tensor(parameter).data_ptr()  # what no other rank holds a part of
        state[name] = full.clone() if own else full
    state |= {name: buffer.detach().clone() for name, _, _, buffer in persistent_buffers(model)}
    return state | {name: state[first] for first, *others in _names(model) for name in others}


def _names(model: nn.Module) -> Iterable[list[str]]:
    """All names of each tensor in the state dict, the first one first."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, x in itertools.chain(module._parameters.items(), module._buffers.items()):
            if x is not None and leaf not in module._non_persistent_buffers_set:
                names.setdefault(id(x), []).append(plain_name(f"{prefix}.{leaf}".lstrip(".")))
    return names.values()


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy a logical state dict into the model: each parameter's part, and persistent buffers. No communication.

    Args:
        model: the model, or this rank's stage of it, sharded over data or not. Gathered parameters are shards again.
        state: logical tensors by full name, of a tied parameter by one of its names; may hold more than this model's
            stage needs.

    Raises:
        ValueError: before anything changes, naming what is missing, has another shape, is offloaded, or is still
            gathered by a stage that the model joins.
    """
    reshard(model)  # what is gathered is a copy, dropped before the next step
    held, buffers = list(declarations(model)), {}
    for name, _, _, buffer in persistent_buffers(model):
        buffers.setdefault(id(buffer), (name, buffer))
    for name, parameter, sharding in held:
        check_present(name, parameter)
        over = sharding.data
        pending = [_key(axis) for axis in sharding.partial]
        if over is not None and over.size > 1 and not is_dtensor(parameter) and _key(over) not in pending:
            raise ValueError(f"{name} is a gathered copy of {over.size} ranks' shards: reshard the stages first")
    given = {name: state[one] for name, *others in _names(model) for one in (*others, name) if one in state}
    shapes = {name: sharding.shape for name, _, sharding in held}
    for name, shape in (shapes | {name: tuple(buffer.shape) for name, buffer in buffers.values()}).items():
        if name not in given:
            raise ValueError(f"the state dict of {len(state)} tensors has no {name!r}")
        if tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)}, the model needs {shape}")
    for name, parameter, sharding in held:
        part = sharding.take(given[name])
        if is_dtensor(parameter):
            start, end = data_run(parameter)
            part = part[start:end]
        local_tensor(parameter).copy_(part)
    for name, buffer in buffers.values():
        buffer.copy_(given[name])
