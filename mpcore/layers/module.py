"""Base class of all layers: a module that declares how each parameter is sharded and initialized."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mpcore._torch.autograd import in_backward
from mpcore._torch.module import ranks_of_wrapper, remove_forward_pre_hook
from mpcore.mesh.axis import Axis, check_axis
from mpcore.sharding.dcp import refuse_shards
from mpcore.sharding.declarations import named_modules
from mpcore.sharding.declare import Shard, Sharding

Init = Callable[..., Tensor]
"""Fills a logical tensor in place: `init(tensor, generator=None)`."""
Blocks = Iterable[nn.Module] | Mapping[Any, nn.Module] | nn.ModuleDict
"""Submodules that a caller names, such as the transformer blocks of a model."""


class TensorParallelOptions(TypedDict, total=False):
    """Keyword arguments of every layer on the tensor-parallel axis.

    Attributes:
        tp: the tensor-parallel axis. The default has size 1.
        sequence_parallel: between layers, each rank holds an equal shard of the activations' sequence dimension.
        sequence_dim: the sequence dimension of activations and token ids; 1 by default.
    """

    tp: Axis
    sequence_parallel: bool
    sequence_dim: int


class TensorOptions(TypedDict, total=False):
    """Device and dtype of the parameters. On the meta device no values are drawn: call `mpcore.layers.materialize`."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class LayerOptions(TensorParallelOptions, TensorOptions, total=False):
    """Keyword arguments of every parallel layer with parameters.

    Attributes:
        device, dtype: device and dtype of the parameters, as in torch's layers.
        init: a function `init(tensor, generator=None)` that fills the logical weight in place, such as
            `functools.partial(torch.nn.init.normal_, std=0.02)`; biases then begin at 0. None: the initial values of
            torch's own layer.
    """

    init: Init | None


Options = TypeVar("Options")


def check_names(options: Mapping[str, Any], kind: type) -> None:
    unknown = sorted(options.keys() - kind.__annotations__.keys())
    if unknown:
        raise TypeError(f"unexpected keyword arguments {unknown}: {kind.__name__} has {sorted(kind.__annotations__)}")


def select_options(options: Mapping[str, Any], kind: type[Options], **others: Any) -> Options:
    """Select the keyword arguments that are fields of `kind`; `others` that are not None replace them."""
    given = {**options, **{name: value for name, value in others.items() if value is not None}}
    return {name: given[name] for name in kind.__annotations__ if name in given}  # type: ignore[return-value]


def normal(std: float) -> Init:
    """Return an `Init` that draws from a normal distribution with mean 0."""
    return partial(nn.init.normal_, std=std)


def uniform(bound: float) -> Init:
    """Return an `Init` that draws uniformly from [-bound, bound]."""
    return partial(nn.init.uniform_, a=-bound, b=bound)


def constant(value: float) -> Init:
    """Return an `Init` that fills the tensor with one value."""
    return partial(_fill, value=value)


def _fill(tensor: Tensor, generator: torch.Generator | None = None, *, value: float) -> Tensor:
    return nn.init.constant_(tensor, value)


def check_init(init: object) -> None:
    """Raise TypeError if `init` can't be called as an `Init`."""
    fits = callable(init)
    if callable(init):
        try:
            inspect.signature(init).bind(None, generator=None)
        except TypeError:
            fits = False
        except ValueError:  # a builtin function without a signature
            pass
    if not fits:
        raise TypeError(
            f"init {init!r:.60} is no function init(tensor, generator=None) that fills the unsharded weight in place: "
            f"pass, for example, functools.partial(torch.nn.init.normal_, std=0.02)"
        )


def fill(init: Init, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill a logical tensor in place, and return it."""
    try:
        found: Any = init(tensor) if generator is None else init(tensor, generator=generator)
    except TypeError:
        check_init(init)
        raise
    if found is not None and found is not tensor:
        raise TypeError(
            f"init {init!r:.60} returned a {type(found).__name__} in place of the tensor that it was given: fill the "
            f"given tensor in place"
        )
    return tensor


@contextmanager
def in_eval_mode(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put models into eval mode, and each of their modules back into its own mode afterwards."""
    models = list(models)
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def input_error(message: str) -> ValueError:
    """Make the error for an invalid input of forward. The call stack gives the layer's name in the called model."""
    calls = [*dict.fromkeys(running_modules())]
    names = (name for root in reversed(calls) for name, module in named_modules(root) if module is calls[0] and name)
    name = next(names, "")
    return ValueError(f"{message} (in layer {name})" if name else message)


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose forward is running, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
        frame = frame.f_back


def refuse_wrapper(layer: ParallelModule, *_: object) -> None:
    """Raise ValueError if DDP or FSDP takes ranks with other shards for replicas. A hook of the first forward."""
    if torch.compiler.is_compiling():
        return
    remove_forward_pre_hook(layer, refuse_wrapper)
    axes = {shard.axis for sharding in layer.shardings.values() for shard in sharding.shards if shard.axis.group}
    wrappers: dict[str, set[int]] = {}
    for module in reversed([*running_modules()] if axes else []):  # the innermost FSDP holds the layer
        wrappers |= ranks_of_wrapper(module, layer)
    for axis, (name, ranks) in itertools.product(axes, wrappers.items()):
        both = sorted(ranks & {*torch.distributed.get_process_group_ranks(axis.group)})
        if len(both) > 1:
            raise input_error(
                f"{name} over ranks {sorted(ranks)} takes ranks {both} of {axis.name} {axis.size}, which hold other "
                f"shards, for replicas: build a new model and give it to mpcore.prepare, or wrap it over dp alone"
            )


def refuse_second_derivative(what: str) -> None:
    """Raise RuntimeError if the running backward pass of `what` is itself differentiated: its result would be wrong."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{what} has no second derivative")


class RandomModule(nn.Module):
    """A module that draws random numbers in forward, from its own stream.

    `mpcore.layers.materialize` and `mpcore.layers.seed_dropout` seed every module of this class. Derive from it to have
    your module seeded too.

    Attributes:
        key: the stream's key, from `mpcore.random.stream_key`; None until the module is seeded. torch.compile treats
            the key as a constant and compiles one graph per module, unless its option `allow_unspec_int_on_nn_module`
            is set.
    """

    key: int | None = None


def recomputing() -> bool:
    """Return whether this forward runs inside a backward (recomputation). Code that counts calls must skip it."""
    return in_backward()


def as_module_list(blocks: Blocks) -> list[nn.Module]:
    """Return the submodules of a list, a `ModuleList`, or a mapping such as a `ModuleDict`, as a list."""
    held: Any = blocks.values() if isinstance(blocks, Mapping | nn.ModuleDict) else blocks
    found: list[Any] = list(held) if isinstance(held, Iterable) else []
    other = next((f"holds a {type(block).__name__}" for block in found if not isinstance(block, nn.Module)), None)
    if other or not isinstance(held, Iterable):
        is_ = other or f"is a {type(blocks).__name__}"
        raise ValueError(f"blocks {is_}: give a list of the model's submodules, as model.layers")
    return found


class ParallelLayer(nn.Module):
    """A layer on the tensor-parallel axis. Its attributes are `TensorParallelOptions`; a single rank has no shards."""

    exchanges_tokens = False
    """Whether the layer mixes tokens and exchanges them over cp."""

    def __init__(self, *, tp: Axis = Axis(name="tp"), sequence_parallel: bool = False, sequence_dim: int = 1) -> None:
        super().__init__()
        check_axis(tp)
        self.tp = tp
        self.sequence_parallel: bool = sequence_parallel and tp.size > 1
        self.sequence_dim = sequence_dim


class ParallelModule(ParallelLayer):
    """A layer whose parameters are plain local shards of declared logical tensors.

    Args:
        init, device, dtype, options: see `LayerOptions`. `device` and `dtype` are the defaults of `declare`. A subclass
            reads `init` from `self._init`.

    Attributes:
        shardings: maps each parameter's name to its `Sharding`: which part of the logical tensor this rank holds.
        inits: maps each parameter's name to the `Init` that fills its logical tensor.
    """

    def __init__(
        self, *, init: Init | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        **options: Unpack[TensorParallelOptions],
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self._init, self._like = init, (device, dtype)
        self.shardings: dict[str, Sharding] = {}
        self.inits: dict[str, Init] = {}
        refuse_shards(self)
        if torch.distributed.is_initialized():
            self.register_forward_pre_hook(refuse_wrapper)

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        init: Init,
        *,
        shard: Shard | tuple[Shard, ...] | None = None,
        partial: tuple[Axis, ...] = (),
        blocks: tuple[int, ...] = (),
        block_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Register a parameter by its logical shape; this rank holds its shard.

        The logical tensor is drawn from torch's global generator. Ranks that called `torch.manual_seed` with one seed
        therefore hold shards of the same tensor, and it equals that of torch's own layer.

        Args:
            name: the parameter's name in this module.
            shape: the logical shape.
            init: fills the logical tensor.
            shard: how the tensor is sharded; None: replicated. The shards of a tuple are applied one after another, and
                stay declared on axes of size 1 too: experts on ep 1 need their own data axis.
            partial: axes over which the gradient of a replica is partial (must be all-reduced).
            blocks, block_dim: the matrices that are concatenated in this parameter; see `Sharding`.
            device, dtype: None: those of the layer.
        """
        if not callable(init):
            check_init(init)
        if isinstance(shard, Shard):
            shard = (shard,) if shard.axis.size > 1 else None
        sharding = Sharding(shape, shard or (), tuple(axis for axis in partial if axis.size > 1), blocks, block_dim)
        self.shardings[name], self.inits[name] = sharding, init
        device, dtype = device or self._like[0], dtype or self._like[1]
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type == "meta":
            local = torch.empty(sharding.local_shape, device=device, dtype=dtype)
        else:
            with torch.no_grad():
                local = sharding.take(fill(init, torch.empty(shape, device=device, dtype=dtype)))
        self.register_parameter(name, nn.Parameter(local))
