"""Collect the sharding declarations of all parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore.mesh.axis import Axis
from mpcore.sharding.dcp import refuse_shards
from mpcore.sharding.declare import Sharding

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile and checkpoint_wrapper add these to names


class Place(NamedTuple):
    """One holder of a parameter: the full name, the module, the parameter's name in the module, the declaration."""

    name: str
    module: nn.Module
    leaf: str
    declared: Sharding | None


@dataclass(frozen=True)
class ModelTree:
    """The modules, parameters and declarations of a model. Each list is built on first read and cached.

    `Run` keeps one tree, so that a step does not walk over the modules. After a module or a parameter is replaced,
    build a new tree.
    """

    model: nn.Module

    @cached_property
    def modules(self) -> tuple[tuple[str, nn.Module], ...]:
        return tuple(named_modules(self.model))

    @cached_property
    def declared(self) -> tuple[tuple[str, nn.Parameter, Sharding], ...]:
        """Return name, parameter and `Sharding` of each parameter (`declarations`)."""
        return tuple(_declarations(self.modules))

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        held = (p for _, module in self.modules for p in module._parameters.values() if p is not None)
        return tuple(dict.fromkeys(held))

    @cached_property
    def derived(self) -> dict[tuple[str, int], Any]:
        """Cache what others compute from the declarations, by a name and the `id` of what the value depends on."""
        return {}

    @cached_property
    def units(self) -> list[FSDPModule]:
        return fsdp.units(self.model)


def tree_of(model: nn.Module | ModelTree) -> ModelTree:
    """Return `model` if it is a `ModelTree`, else a new tree of the model."""
    return model if isinstance(model, ModelTree) else ModelTree(model)


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield name, owning module, leaf name and parameter of every parameter.

    A tied parameter is yielded once, under its first full name. Its owner is the first module that declares the
    parameter. If no module declares it, the owner is the first module that holds it.

    Raises:
        ValueError: see `declarations`.
    """
    for parameter, places in _places(named_modules(model)):
        owner = next((place for place in places if place.declared is not None), places[0])
        yield places[0].name, owner.module, owner.leaf, parameter


def declarations(model: nn.Module | ModelTree) -> Iterator[tuple[str, nn.Parameter, Sharding]]:
    """Yield name, parameter and `Sharding` of every parameter.

    A tied parameter is yielded once, under its first full name, with the declarations of all its modules joined.

    Raises:
        ValueError: if two modules declare one parameter differently, or a module declares a name that is not one of its
            parameters, for example after `torch.nn.utils.parametrize`.
    """
    yield from model.declared if isinstance(model, ModelTree) else _declarations(named_modules(model))


def _declarations(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter, Sharding]]:
    for parameter, places in _places(modules):
        said = [place for place in places if place.declared is not None]
        yield places[0].name, parameter, _joined(said) if said else Sharding(tuple(parameter.shape))


def named_modules(model: nn.Module | ModelTree) -> Iterator[tuple[str, nn.Module]]:
    """Yield the full name and the module of each module once.

    Wrapper modules of `torch.compile` and `checkpoint_wrapper` are skipped, and their parts of the names are removed.
    """
    if isinstance(model, ModelTree):
        yield from model.modules
        return
    for name, module in model.named_modules():
        if not any(wrapper in module._modules for wrapper in WRAPPERS):
            yield plain_name(name), module


def plain_name(name: str) -> str:
    """Return a module or parameter name without the parts that `torch.compile` and `checkpoint_wrapper` add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _places(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[nn.Parameter, list[Place]]]:
    """Yield each parameter with all modules that hold it, in the order of the modules."""
    found: dict[int, tuple[nn.Parameter, list[Place]]] = {}
    for prefix, module in modules:
        declared = declared_by(module)
        for leaf in declared:
            if leaf not in module._parameters and leaf not in module._buffers:
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
    """Join the declarations of a tied parameter, which must be sharded alike; the partial axes add up."""
    first = places[0].declared
    assert first is not None
    if len(places) == 1:
        return first
    said = [(place.name, place.declared) for place in places if place.declared is not None]
    pending = [{axis.key: axis for axis in sharding.partial} for _, sharding in said]
    added = {axis.key: axis for _, sharding in said for axis in sharding.added}
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
    return sharding.shape, [(s.axis.key, s.dim, s.runs) for s in sharding.shards if s.axis.size > 1]


def _words(sharding: Sharding) -> str:
    cuts = [f"dimension {s.dim} cut over {s.axis.name}" for s in sharding.shards if s.axis.size > 1]
    return f"{sharding.shape} with {' and '.join(cuts) or 'nothing cut'}, here {sharding.local_shape}"


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield full name, module, leaf name and buffer of every buffer that is in the state dict."""
    for prefix, module in named_modules(model):
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}".lstrip("."), module, leaf, buffer


def shardings(model: nn.Module) -> dict[str, Sharding]:
    """Return the `Sharding` of every parameter, by full name.

    A parameter that no module declares is replicated.

    Args:
        model: the model, or this rank's pipeline stage of it.

    Raises:
        ValueError: if two modules declare one parameter differently.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 8)
        >>> sorted(mpcore.sharding.shardings(model))
        ['bias', 'weight']
    """
    return {name: sharding for name, _, sharding in declarations(model)}


def declared_by(module: nn.Module) -> Mapping[str, Sharding]:
    """Return the module's attribute `shardings`: the declarations of its own parameters, by leaf name."""
    return getattr(module, "shardings", {})


def sharding_of(module: nn.Module, leaf: str, parameter: Tensor) -> Sharding:
    """Return the `Sharding` of `module`'s parameter `leaf`. If it declares none, the parameter is replicated."""
    return declared_by(module).get(leaf) or Sharding(tuple(parameter.shape))


def declare_anew(module: nn.Module, leaf: str, sharding: Sharding) -> None:
    """Replace the declaration of `module`'s parameter `leaf`. The module need not have any declaration."""
    if not declared_by(module):
        refuse_shards(module)
    module.shardings = {**declared_by(module), leaf: sharding}  # pyright: ignore[reportArgumentType]


def add_partial(module: nn.Module, leaf: str, axis: Axis) -> None:
    """Declare that the gradient of `module`'s parameter `leaf` is partial over `axis` and must be all-reduced.

    The axis is added to the axes that the module declares. An axis of size 1 changes nothing. Call it before
    `mpcore.parallelize`, whose test of the plan then sums the gradient, and before `mpcore.prepare`.

    Args:
        module: the module that holds the parameter.
        leaf: the parameter's name in the module, such as "weight".
        axis: the axis. Each of its ranks computes one term of the gradient.

    Raises:
        AttributeError: if the module has no attribute `leaf` (on an axis of more than one rank).

    Example:
        >>> table, pp = nn.Embedding(4, 2), mpcore.Axis(size=2, rank=0, name="pp")
        >>> mpcore.add_partial(table, "weight", pp)  # each of two pipeline stages computes a part of the gradient
        >>> mpcore.sharding.shardings(table)["weight"].partial
        (Axis(pp: rank 0 of 2),)
    """
    if axis.size > 1:
        old = sharding_of(module, leaf, getattr(module, leaf))
        partial, added = ((*had, axis) if axis not in had else had for had in (old.partial, old.added))
        declare_anew(module, leaf, replace(old, partial=partial, added=added))
