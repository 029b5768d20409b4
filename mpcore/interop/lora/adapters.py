"""Add adapters to a model, and merge them into its weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpcore.interop.lora.layers import (
    Factor,
    GroupedAdapter,
    LoRALayer,
    LoRAProduct,
    factors,
    is_transposed,
    sizes_of,
    weight_with,
    with_adapter,
    with_grouped,
)
from mpcore.interop.parallelize.checks import is_conv1d
from mpcore.interop.parallelize.layers import ExpertsShard
from mpcore.interop.parallelize.swap import EXPERTS, call_layers
from mpcore.layers.initialize import deferred_reads
from mpcore.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from mpcore.layers.module import constant, uniform
from mpcore.layers.moe import GroupedLinear
from mpcore.random import generator
from mpcore.sharding.declarations import named_modules, plain_name, sharding_of
from mpcore.sharding.local import is_dtensor
from mpcore.sharding.state_dict import full_state_dict

ALL = "all-linear"
FACTORS = ("lora_A", "lora_B")
_CHILD = "_lora"  # the adapter of weight `w` is the child `w_lora` of the weight's module
_SIXTEEN = (torch.bfloat16, torch.float16)


def add_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] = ALL,
    dropout: float = 0.0,
    *,
    seed: int = 0,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    use_rslora: bool = False,
) -> nn.Module:
    """Freeze a model and add a low-rank adapter to its linear layers: `y = x W^T + alpha / rank x A^T B^T`.

    A is initialized as in PEFT, from the seed and the layer's full name, and B is zero, so outputs don't change at
    first. The factors are sharded like the layer's weight, and the merged weight is the same for every layout.

    Args:
        model: the model, or this rank's stage of it, changed in place and returned. It may consist of mpcore's layers,
            those that `parallelize` puts in, or plain torch layers. Its parameters keep their names. The adapter's
            are `lora_A.weight` [rank, in_features] and `lora_B.weight` [out_features, rank] inside each layer.
        rank: the number of features between A and B.
        alpha: the adapter's output is scaled by alpha / rank.
        targets: names of linear layers, complete or their last parts, as `target_modules` of PEFT: `("q_proj",
            "v_proj")`. "all-linear": all linear layers except the head. The model must then have
            `get_output_embeddings`, as Hugging Face models do. A name that matches no linear layer may be that of
            grouped weights [experts, M, N], such as `"experts.gate_up_proj"` of Hugging Face models, or of
            `GroupedLinear` layers: each expert then has factors [rank, N] and [M, rank].
        dropout: the probability, in [0, 1), with which an element of the adapter's input is zero in training. The mask
            comes from torch's random generator: use one seed on all ranks of tp, and others on ranks with other data.
        seed: the seed of A's initial values.
        rank_pattern, alpha_pattern: other ranks and alphas for the layers whose full name, or last parts of it, match a
            regular expression, as in PEFT. The first match counts.
        use_rslora: scale by alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv:2312.03732).

    Raises:
        ValueError: before anything changes, if an argument is out of range, a pattern or target matches no linear
            layer, a matched layer can't have an adapter, dropout is not 0 for a grouped weight or for a layer whose
            ranks see parts of its input, or the model is sharded over data or has adapters already.

    Note:
        - Call it after `parallelize` and before `prepare(..., initialize=False)` or `shard_data_parallel`.
        - The factors of a bfloat16 or float16 weight are float32, as in PEFT. Other factors have the weight's dtype.
          Without ZeRO, `prepare(precision="bfloat16")` rounds them, as all parameters, and `save_lora` writes bfloat16.
        - A module with grouped weights computes with the merged weights, made in each forward, in the weights' dtype.
          Their adapters have no dropout, and "all-linear" leaves them out. `save_lora` rejects them.
        - A head whose weight is used outside of the layer, as by `linear_cross_entropy`, must not get an adapter.

    Source: Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.1.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> _ = mpcore.interop.lora.add_lora(model, rank=2, targets=("0", "2"))
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['0.lora_A.weight', '0.lora_B.weight', '2.lora_A.weight', '2.lora_B.weight']
    """
    chosen, ranks, alphas = _chosen(model, targets), dict(rank_pattern or {}), dict(alpha_pattern or {})
    for pattern in (*ranks, *alphas):
        if not any(_matches(pattern, name) for name in chosen):
            raise ValueError(f"pattern {pattern!r} matches none of the {len(chosen)} layers with an adapter")
    sizes = {name: rank_and_alpha(name, rank, alpha, ranks, alphas, use_rslora) for name in chosen}
    return adapt(model, chosen, sizes, dropout, seed)


def rank_and_alpha(
    name: str, rank: int, alpha: float, ranks: Mapping[str, int], alphas: Mapping[str, float], rslora: bool
) -> tuple[int, float]:
    """Return one layer's rank, and the alpha by which its adapter is scaled as alpha / rank."""
    rank = next((r for pattern, r in ranks.items() if _matches(pattern, name)), rank)
    alpha = next((a for pattern, a in alphas.items() if _matches(pattern, name)), alpha)
    if type(rank) is not int or rank < 1:
        raise ValueError(f"rank is {rank!r}: give a whole number of at least 1, such as 8")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha is {alpha!r}: give a number above 0, such as {2 * rank} for rank {rank}")
    return rank, alpha * rank**0.5 if rslora else alpha


def _matches(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def adapt(
    model: nn.Module, chosen: Mapping[str, nn.Module], sizes: Mapping[str, tuple[int, float]], dropout: float,
    seed: int = 0,
) -> nn.Module:  # fmt: skip
    """Freeze a model and add adapters of these ranks and alphas to the layers in `chosen`, by full name."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout {dropout!r} is not in [0, 1)")
    check_adaptable(model, chosen, dropout)
    for name, p in model.named_parameters():
        if is_dtensor(p):
            raise ValueError(f"{name} is sharded over data already: add adapters before prepare or shard_data_parallel")
    grouped = {name: leaf for name, _, leaf in grouped_weights(model)}
    before = factor_names(model)  # of an earlier call, for other layers
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and plain_name(name) in before)
    deferred = bool(deferred_reads([model]))  # the factors have values, although the weights don't yet
    for name, layer in chosen.items():
        rank, alpha = sizes[name]
        add = partial(_add_grouped, leaf=grouped[name]) if name in grouped else _add_factors
        made = add(name, layer, rank, seed, deferred)
        made.rank, made.alpha, made.scaling, made.dropout = rank, alpha, alpha / rank, dropout
    call_layers(model, chosen.values())
    return model


def lora_layers(model: nn.Module) -> dict[str, LoRALayer]:
    found = {name: layer for name, layer in named_modules(model) if isinstance(layer, LoRALayer)}
    may_have_none = getattr(type(model), "whole_class", None) or not any(p.requires_grad for p in model.parameters())
    if not found and not may_have_none:  # a pipeline stage of a frozen model
        raise ValueError(f"this {type(model).__name__} has 0 layers with an adapter: call add_lora or load_lora first")
    return found


@torch.no_grad()
def merge_lora(model: nn.Module) -> nn.Module:
    """Merge each adapter's low-rank update into its layer's weight, and remove the adapters. Ranks don't communicate.

    The outputs stay the same up to rounding. The layers of the model, changed in place and returned, get their old
    classes back. The parameters stay frozen.

    Raises:
        ValueError: before anything changes, if there are no adapters, if parameters are sharded over the data ranks,
            or if a merged weight of this rank overflows, as in float16. For a sharded model, call `merged_state_dict`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> _ = mpcore.interop.lora.add_lora(model, targets="0")
        >>> type(mpcore.interop.lora.merge_lora(model)[0])
        <class 'torch.nn.modules.linear.Linear'>
    """
    layers = lora_layers(model)
    for name, layer in layers.items():
        if any(is_dtensor(p) for p in layer.parameters()):
            raise ValueError(
                f"{name} is sharded over data: take mpcore.interop.lora.merged_state_dict(model), or save_lora, and "
                f"merge_lora in a model that load_lora read the file into"
            )
    owners = {child: module for module in model.modules() for child in module.children()}
    weights = {
        layer: owners[layer].get_parameter(layer.leaf) if isinstance(layer, GroupedAdapter)
        else layer.get_parameter("weight") for layer in layers.values()
    }  # fmt: skip
    for name, layer in layers.items():
        check_merged(weight_name(name, layer), layer.merged_weight(weights[layer]))
    for layer, weight in weights.items():
        weight.copy_(layer.merged_weight(weight))
        if isinstance(layer, GroupedAdapter):
            owner: Any = owners[layer]
            delattr(owner, f"{layer.leaf}{_CHILD}")
            if not any(isinstance(child, GroupedAdapter) for child in owner.children()):
                owner.__class__ = owner.kind
            continue
        del layer.lora_A, layer.lora_B, layer.rank, layer.alpha, layer.scaling, layer.dropout
        layer.__class__ = layer.kind  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(layer, ParallelLinear):
            layer.product = cast("LoRAProduct", layer.product).base
    return model


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Gather the state dict of the unsharded model with the adapters merged. All ranks of the model must call it.

    The model keeps its adapters. It may be sharded over data.

    Args:
        model: the model, or this rank's pipeline stage of it.

    Returns:
        The full tensors, by the names that the model had before `add_lora` (see `full_state_dict`).

    Raises:
        ValueError: if there are no adapters, a parameter is offloaded, or a merged weight overflows, as in float16.

    Example:
        >>> model = mpcore.interop.lora.add_lora(nn.Sequential(mpcore.ColumnParallelLinear(4, 8)), targets="0")
        >>> sorted(mpcore.interop.lora.merged_state_dict(model))
        ['0.bias', '0.weight']
    """
    layers, state = lora_layers(model), full_state_dict(model)
    for name, layer in layers.items():
        weight = state[weight_name(name, layer)]
        a, b = (state[f"{name}.{leaf}.weight".lstrip(".")] for leaf in FACTORS)
        weight.copy_(weight_with(weight, a, b, layer.scaling, is_transposed(layer)))
        check_merged(weight_name(name, layer), weight)
    for name in factor_names(model):
        del state[name]
    return state


def check_merged(name: str, weight: Tensor) -> None:
    """Raise ValueError if a weight with its adapter merged holds NaN or infinity."""
    if not weight.is_meta and not weight.isfinite().all():
        raise ValueError(
            f"{name} {tuple(weight.shape)} with its adapter holds NaN or values beyond the "
            f"{torch.finfo(weight.dtype).max:g} of {weight.dtype}: merge it into a model in float32, or call save_lora"
        )


def factor_names(model: nn.Module) -> set[str]:
    """Return the names of the adapters' parameters, under all names of their layers."""
    held = model.named_modules(remove_duplicate=False)
    return {f"{plain_name(name)}.weight" for name, module in held if isinstance(module, Factor)}


def adapters_of(model: nn.Module) -> dict[str, LoRALayer]:
    """Return the layers that have an adapter, by all full names of their weights."""
    held = ((plain_name(name), module) for name, module in model.named_modules(remove_duplicate=False))
    return {weight_name(name, layer): layer for name, layer in held if isinstance(layer, LoRALayer)}


def weight_name(name: str, layer: LoRALayer) -> str:
    """Return the full name of the weight that the adapter with this name changes."""
    if isinstance(layer, GroupedAdapter):
        return name.removesuffix(f"{layer.leaf}{_CHILD}") + layer.leaf
    return f"{name}.weight".lstrip(".")


# --- which layers, and their factors ----------------------------------------------------------------------------------


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each linear layer: mpcore's, torch's, and Conv1D of transformers."""
    for name, module in named_modules(model):
        if isinstance(module, ParallelLinear | nn.Linear) or is_conv1d(module):
            yield name, module


def grouped_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each weight [experts, .., ..] that experts share: its name, its module, and its name in the module.

    The weight of a `GroupedLinear` goes by the module's name, as that of a linear layer.
    """
    for name, module in named_modules(model):
        counts = [n for key, n in vars(module).items() if EXPERTS.fullmatch(key)]
        for leaf, p in module._parameters.items():
            if p is not None and p.dim() == 3:
                if isinstance(module, GroupedLinear):
                    yield name, module, leaf
                elif isinstance(module, ExpertsShard) or len(p) in counts:
                    yield f"{name}.{leaf}".lstrip("."), module, leaf


def factor_prefix(weight: str, layer: LoRALayer) -> str:
    """Return what the full names of an adapter's factors begin with, from the full name of the weight."""
    return f"{weight}{_CHILD}." if isinstance(layer, GroupedAdapter) else weight.removesuffix("weight")


def _chosen(model: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers that `targets` names, in the model's order."""
    layers = dict(linear_layers(model))
    if targets == ALL:
        head_of: Any = getattr(model, "get_output_embeddings", None)
        if head_of is None:
            raise ValueError(
                f'"{ALL}" leaves out the head, and a {type(model).__name__} doesn\'t say which that is: name the last '
                f"parts of layers, of {_last_parts(layers)}"
            )
        head = head_of()
        out = [name for name in _refused(model, layers) if not isinstance(layers[name], LoRALayer)]
        adapted = {name: layer for name, layer in layers.items() if layer is not head and name not in out}
        if not adapted:
            check_adaptable(model, layers)  # names the reason
        return adapted
    grouped = {name: module for name, module, _ in grouped_weights(model)}
    found: dict[str, nn.Module] = {}
    for target in [targets] if isinstance(targets, str) else targets:
        matches = [{n: m for n, m in kind.items() if f".{n}".endswith(f".{target}")} for kind in (layers, grouped)]
        mine = matches[0] or matches[1]
        if not mine:
            other = next((m for name, m in named_modules(model) if f".{name}".endswith(f".{target}")), None)
            what = "no module" if other is None else f"a {type(other).__name__} and no linear layer"
            raise ValueError(f"target {target!r} matches {what}; the linear layers are {_last_parts(layers)}")
        found |= mine
    if not found:
        raise ValueError(f'targets {targets!r} names 0 layers: give names, or "{ALL}"')
    return {name: layer for name, layer in (layers | grouped).items() if name in found}


def _last_parts(layers: dict[str, nn.Module]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none"


def check_adaptable(model: nn.Module, layers: Mapping[str, nn.Module], dropout: float = 0.0) -> None:
    for name, why in _refused(model, layers).items():
        raise ValueError(f"{name} {why}")
    grouped = {name for name, *_ in grouped_weights(model)}
    for name, layer in layers.items() if dropout else ():
        if name in grouped:
            raise ValueError(
                f"dropout {dropout} masks the input of an adapter, and {name} is adapted in the weight: pass "
                f"dropout=0, or leave it out of targets"
            )
        partial = sharding_of(layer, "weight", layer.get_parameter("weight")).partial
        if axis := next((axis for axis in partial if axis.size > 1), None):
            raise ValueError(
                f"{name} sees a part of its input on each rank of {axis.name} {axis.size}, so the masks of dropout "
                f"{dropout} would not be those of the unsharded layer: pass dropout=0, or leave it out of targets"
            )


def _refused(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return, for each layer that can't have an adapter, the reason."""
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    refused = {}
    grouped = {name: leaf for name, _, leaf in grouped_weights(model)}
    for name, layer in layers.items():
        parent, leaf = model.get_submodule(name.rpartition(".")[0]) if name else layer, grouped.get(name, "weight")
        weight = layer._parameters.get(leaf)
        lies = sharding_of(layer, leaf, layer.get_parameter(leaf)).shards if name in grouped else ()
        axes = [layer.tp] if isinstance(layer, ParallelLinear) else [shard.axis for shard in lies]
        if isinstance(layer, LoRALayer) or (name in grouped and f"{leaf}{_CHILD}" in layer._modules):
            refused[name] = "has an adapter already: merge_lora(model) first"
        elif isinstance(parent, nn.MultiheadAttention):
            refused[name] = "is read past the layer by nn.MultiheadAttention: write the attention with nn.Linear"
        elif weight is None:
            refused[name] = "has no plain weight: add adapters before it is parametrized"
        elif axis := next((axis for axis in axes if axis.sums is not None), None):
            refused[name] = (
                f"is on {axis.name} with {axis.sums}, and an adapter has no invariant numerics: build the model on the "
                f"mesh from build_mesh"
            )
        elif holders[id(weight)] > 1:
            refused[name] = "shares its weight with another module, which merging would change too: leave it out"
    return refused


def _add_factors(name: str, layer: nn.Module, rank: int, seed: int, deferred: bool) -> LoRALayer:
    """Add the factors of an adapter to one layer, and change its class to one that computes their product."""
    weight = layer.get_parameter("weight")
    lies, flipped = sharding_of(layer, "weight", weight), is_transposed(layer)
    n_in, n_out = sizes_of(layer)
    by_dim = {shard.dim: shard for shard in lies.shards}
    of_in, of_out = (by_dim.get(dim) for dim in ((0, 1) if flipped else (1, 0)))
    over_a = over_b = ()
    if isinstance(layer, ColumnParallelLinear) and layer.sequence_parallel:
        over_a = (layer.tp,)  # A's input is this rank's part of the sequence
    if isinstance(layer, RowParallelLinear) and layer.tp.size > 1:
        over_b = (layer.tp,)  # B's input is this rank's term of the product with A
    dtype = torch.float32 if weight.dtype in _SIXTEEN else weight.dtype
    shard_a = None if of_in is None else type(of_in)(of_in.axis, 1, of_in.runs)
    shard_b = None if of_out is None else type(of_out)(of_out.axis, 0, of_out.runs)
    made: Any = layer
    made.__class__ = with_adapter(type(layer))
    if isinstance(layer, ParallelLinear):
        layer.product = LoRAProduct(layer.product, made)
    made.lora_A = Factor((rank, n_in), uniform(n_in**-0.5), shard_a, (*lies.partial, *over_a), dtype)
    made.lora_B = Factor((n_out, rank), constant(0.0), shard_b, (*lies.partial, *over_b), dtype)
    _draw(made, name, weight, seed, deferred)
    return made


def _add_grouped(name: str, layer: nn.Module, rank: int, seed: int, deferred: bool, *, leaf: str) -> LoRALayer:
    """Add the factors of an adapter to one grouped weight of a module, and change the module's class."""
    weight = layer.get_parameter(leaf)
    lies = sharding_of(layer, leaf, weight)
    experts, middle, last = lies.shape
    shards = [tuple(shard for shard in lies.shards if shard.dim in (0, dim)) for dim in (2, 1)]
    pending = [tuple(shard.axis for shard in lies.shards if shard.dim == dim) for dim in (1, 2)]
    dtype = torch.float32 if weight.dtype in _SIXTEEN else weight.dtype
    made = GroupedAdapter()
    made.leaf = leaf
    shapes, inits = ((experts, rank, last), (experts, middle, rank)), (uniform(last**-0.5), constant(0.0))
    made.lora_A, made.lora_B = (
        Factor(shape, init, mine, (*lies.partial, *over), dtype)
        for shape, init, mine, over in zip(shapes, inits, shards, pending, strict=True)
    )
    layer.add_module(f"{leaf}{_CHILD}", made)
    layer.__class__ = with_grouped(type(layer))
    place = name if isinstance(layer, GroupedLinear) else name.rpartition(".")[0]
    _draw(made.train(layer.training), f"{place}.{leaf}{_CHILD}".lstrip("."), weight, seed, deferred)
    return made


def _draw(made: LoRALayer, name: str, weight: Tensor, seed: int, deferred: bool) -> None:
    """Give the factors of the layer with this name their initial values, if its weight has values."""
    for leaf, factor in factors(made):
        if deferred or not weight.is_meta:
            lies = factor.shardings["weight"]
            drawn = torch.empty(lies.shape, dtype=factor.weight.dtype)
            factor.inits["weight"](drawn, generator=generator(seed, f"{name}.{leaf}.weight".lstrip(".")))
            factor.weight = nn.Parameter(lies.take(drawn).to("cpu" if weight.is_meta else weight.device))
        factor.train(made.training)
