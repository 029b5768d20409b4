"""Make a small copy of a model to test a plan on: on the CPU, in float64, with random weights and few layers."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpcore._torch.fake import is_fake
from mpcore._torch.pytree import map_tensors
from mpcore.sharding.local import is_dtensor

SMALL = 2**22  # a model of at most this number of elements is copied with all its layers
MOST = 2**31  # no copy of more elements is made: they would need 16 GiB in float64
TOKENS = 7
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ModelCopy(NamedTuple):
    """The copy, and for each module's name in the copy its name in the model."""

    model: nn.Module
    names: dict[str, str]


def shape_copy(model: nn.Module) -> nn.Module:
    """Copy a model without the memory of its parameters: they are on the meta device, all other tensors on the CPU."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None and is_dtensor(p):
                raise ValueError("its parameters are DTensors")
            if p is not None:
                memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.is_floating_point())
        for x in (*module._buffers.values(), *vars(module).values()):
            if isinstance(x, Tensor):
                unknown = x.is_meta or is_fake(x)
                memo[id(x)] = torch.zeros(x.shape, dtype=x.dtype) if unknown else x.detach().cpu().clone()
    return copy.deepcopy(model, memo)


def drop_layers(model: nn.Module) -> None:
    """Keep two layers of each kind in every `nn.ModuleList`. Layers of one kind have the same classes and shapes."""
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        seen: dict[object, int] = {}
        kept: list[nn.Module] = []
        for layer in layers:
            kind = (
                str([(n, type(m)) for n, m in layer.named_modules()]),
                str([(n, tuple(p.shape)) for n, p in layer.named_parameters()]),
            )
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] <= 2:
                kept.append(layer)
        if len(kept) < len(layers):
            layers._modules.clear()
            layers.extend(kept)


def size_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def twin_of(shapes: nn.Module, few_layers: bool) -> ModelCopy:
    """Make the twin of a `shape_copy`. Its parameters get random values, so that every mistake in a plan shows."""
    model = copy.deepcopy(shapes)
    names = {id(module): name for name, module in model.named_modules()}
    if few_layers:
        drop_layers(model)
    choose_plain_kernels(model)
    generator = torch.Generator().manual_seed(5)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, p in module._parameters.items():
            if p is not None:
                module._parameters[leaf] = made.setdefault(id(p), _random(p, generator))
    for module in model.modules():
        for leaf, x in module._buffers.items():
            if x is not None and x.is_floating_point():
                module._buffers[leaf] = x.double()
    return ModelCopy(model.eval(), {name: names[id(module)] for name, module in model.named_modules()})


def choose_plain_kernels(model: nn.Module) -> nn.Module:
    """Make a Hugging Face model use kernels that support float64 on a CPU. Return the model."""
    for part, plain in (("experts", "eager"), ("attn", "sdpa"), ("attn", "eager")):
        choose: Any = getattr(model, f"set_{part}_implementation", None)
        config: Any = getattr(model, "config", None)
        chosen = getattr(config, f"_{part}_implementation", None)
        if choose is not None and chosen not in (None, "eager", "sdpa"):
            with contextlib.suppress(ValueError, ImportError):
                choose(plain)
    return model


def _random(p: Tensor, generator: torch.Generator) -> nn.Parameter:
    """Return a random parameter: a matrix whose outputs have the size of its inputs, or a vector in [0.5, 1.5)."""
    if not p.is_floating_point():
        return nn.Parameter(torch.zeros(p.shape, dtype=p.dtype), requires_grad=False)
    if p.dim() < 2:
        return nn.Parameter(torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.5)
    std = max(min(p.shape[-2:]), 1) ** -0.5
    return nn.Parameter(torch.randn(p.shape, generator=generator, dtype=torch.float64) * std)


def as_arguments(example: Any) -> Arguments:
    """Return an example as (args, kwargs): a dict gives kwargs, a tuple args; another value is the only argument."""
    if isinstance(example, dict):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def plain_arguments(arguments: Arguments) -> Arguments:
    """Return the same arguments on the CPU, with floating-point tensors in float64."""

    def plain(x: Tensor) -> Tensor:
        x = x.detach().cpu()
        return x.double() if x.is_floating_point() else x.clone()

    return map_tensors(plain, arguments)


def guesses(model: nn.Module) -> Iterator[Arguments]:
    """Yield arguments that a model's forward may accept: by the names in its signature, or token ids, or features."""
    generator = torch.Generator().manual_seed(6)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    config: Any = getattr(model, "config", None)
    words = min([size for size in (getattr(config, "vocab_size", None), max(tables, default=2)) if size])
    ids = torch.randint(min(2, words - 1), words, (2, TOKENS), generator=generator)
    named = _named(model, config, ids, generator)
    if named:
        yield (), named
    if tables:
        yield (ids,), {}
    if linears and not tables:
        yield (torch.randn(2, TOKENS, linears[0].in_features, generator=generator, dtype=torch.float64),), {}


def _named(model: nn.Module, config: Any, ids: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """Return arguments by the names that Hugging Face models use."""
    wanted = inspect.signature(model.forward).parameters
    named: dict[str, Any] = {}
    if config is None:
        return named
    sight: Any = getattr(config, "vision_config", config)
    if "pixel_values" in wanted and isinstance(getattr(sight, "image_size", None), int):
        shape = (2, getattr(sight, "num_channels", 3), sight.image_size, sight.image_size)
        named["pixel_values"] = torch.randn(shape, generator=generator).double()
    if "input_features" in wanted and getattr(config, "num_mel_bins", None):
        length = 2 * config.max_source_positions
        named["input_features"] = torch.randn(2, config.num_mel_bins, length, generator=generator).double()
    if "input_ids" in wanted:
        named["input_ids"] = ids
    if "decoder_input_ids" in wanted and getattr(config, "is_encoder_decoder", False):
        named["decoder_input_ids"] = ids[:, :5]
    if "use_cache" in wanted:
        named["use_cache"] = False
    return named
