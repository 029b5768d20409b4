"""Create the parallel layers, and replace the model's layers by them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mpcore.interop.parallelize.checks import check_plain, linear_sizes, unit_of
from mpcore.interop.parallelize.layers import ColumnParallelConv1D, ExpertsShard, RowParallelConv1D, VocabShard
from mpcore.interop.parallelize.plan import (
    Colwise,
    Experts,
    Hidden,
    LocalSizes,
    Replicate,
    Rowwise,
    SequenceParallel,
    Style,
    Target,
    Vocab,
)
from mpcore.interop.parallelize.sequence import shards_tokens, split_tokens
from mpcore.layers.embedding import ColumnParallelEmbedding, VocabParallelEmbedding
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.mesh.axis import Axis
from mpcore.mesh.layout import divisors
from mpcore.sharding.declarations import add_partial, declare_anew, sharding_of
from mpcore.sharding.declare import Sharding, cut, cut_blocks

EXPERTS = re.compile(r"(\w+_)?experts")  # attributes that count experts
Swap = tuple[nn.Module, nn.Module]
Place = tuple[str, nn.Module, str]


def swaps_of(model: nn.Module, styles: list[Target], tp: Axis) -> dict[int, Swap]:
    """Return, by id of each module to replace, the module and its replacement on the meta device."""
    swaps: dict[int, Swap] = {}

    def build(name: str, module: nn.Module, style: Style) -> None:
        check_plain(name, module, style)
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            raise ValueError(
                f"{name} is part of an nn.MultiheadAttention, which reads its weight past the layer: leave it out of "
                f"the plan, to run whole on every rank, or write the attention with nn.Linear or ParallelAttention"
            )
        try:
            if isinstance(module, nn.Embedding):
                swaps[id(module)] = module, _parallel_embedding(module, style, tp)
            else:
                swaps[id(module)] = module, _parallel_linear(name, parent, module, style, tp)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    for name, module, style in styles:
        if isinstance(style, Experts):
            try:
                experts_shardings(module, style, tp)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        elif not isinstance(style, Replicate | LocalSizes | SequenceParallel):
            build(name, module, style)
    named = {id(module) for _, module, _ in styles}
    for ends in _tied(model):
        if any(id(module) in swaps for _, module, _ in ends):
            for name, module, leaf in ends:
                if id(module) not in named and leaf == "weight":
                    build(name, module, Vocab() if isinstance(module, nn.Embedding) else Colwise(gather_output=True))
            _check_tie(ends, swaps)
    return swaps


def _tied(model: nn.Module) -> Iterator[list[Place]]:
    """Yield, for each parameter that several modules hold, its places: module name, module and leaf name."""
    places: dict[int, list[Place]] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((name, module, leaf))
    return (ends for ends in places.values() if len(ends) > 1)


def _check_tie(ends: list[Place], swaps: dict[int, Swap]) -> None:
    """Raise ValueError if a tied weight would be sharded in two ways."""
    ends = [end for end in ends if id(end[1]) in swaps or isinstance(end[1], nn.Linear | nn.Embedding)]
    held = [(swaps.get(id(module), (module, module))[1], leaf, getattr(module, leaf)) for _, module, leaf in ends]
    cuts = [sharding_of(*place).shards for place in held]
    for (name, _, leaf), shards in zip(ends, cuts, strict=True):
        if shards != cuts[0]:
            raise ValueError(
                f"{ends[0][0]}.{ends[0][2]} and {name}.{leaf} are one tied weight, which the plan cuts in two ways"
            )


def _parallel_embedding(module: nn.Embedding, style: Style, tp: Axis) -> nn.Module:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ValueError("max_norm, scale_grad_by_freq and sparse need the whole embedding: leave it out")
    like: dict[str, Any] = {"padding_idx": module.padding_idx, "tp": tp, "device": "meta", "dtype": module.weight.dtype}
    if not isinstance(style, Colwise):
        return VocabParallelEmbedding(*module.weight.shape, **like)
    if style.blocks != 1 or type(module).forward is not nn.Embedding.forward:
        raise ValueError("an embedding of several blocks, or with a forward of its own, is cut by 'vocab' alone")
    like |= {"gather_output": style.gather_output, "unit": style.unit or 1}
    return ColumnParallelEmbedding(*module.weight.shape, **like)


def _parallel_linear(name: str, parent: nn.Module, module: nn.Module, style: Style, tp: Axis) -> nn.Module:
    n_in, n_out = linear_sizes(module)
    conv1d, bias = not isinstance(module, nn.Linear), module.bias is not None
    like: dict[str, Any] = {"tp": tp, "device": "meta", "dtype": module.get_parameter("weight").dtype}
    if isinstance(style, Rowwise):
        row = RowParallelConv1D if conv1d else RowParallelLinear
        return row(n_in, n_out, bias, input_is_parallel=not style.split_input, **like)
    if not isinstance(style, Colwise):
        raise ValueError(f"'vocab' is for embeddings, and this is a {type(module).__name__}")
    blocks = style.blocks
    if isinstance(blocks, int):
        if n_out % blocks:
            raise ValueError(f"{n_out} output features are not a multiple of {blocks} blocks")
        blocks = (n_out // blocks,) * blocks
    if sum(blocks) != n_out:
        raise ValueError(f"blocks {blocks} have a sum of {sum(blocks)}, not of out_features {n_out}")
    like |= {"gather_output": style.gather_output, "unit": unit_of(name, parent, style, blocks, tp)}
    column = ColumnParallelConv1D if conv1d else ColumnParallelLinear
    return column(n_in, n_out, bias, blocks=blocks if len(blocks) > 1 else (), **like)


def cut_model(model: nn.Module, styles: list[Target], tp: Axis, swaps: dict[int, Swap] | None = None) -> nn.Module:
    """Shard a model in place for this rank, and return it."""
    swaps = swaps_of(model, styles, tp) if swaps is None else swaps
    for _, target, style in styles:
        if isinstance(style, LocalSizes):
            for attribute in style.names:  # the user named these attributes in the plan
                setattr(target, attribute, getattr(target, attribute) // tp.size)
        elif isinstance(style, Experts):
            _shard_experts(target, style, tp)
        elif style == Replicate(partial_gradient=True):
            for leaf in dict(target.named_parameters(recurse=False)):
                add_partial(target, leaf, tp)
    model = apply_swaps(model, swaps)
    if tp.size > 1 and shards_tokens(styles):
        split_tokens(model, styles, tp)
    return model


def experts_shardings(module: nn.Module, style: Experts, tp: Axis) -> dict[str, Sharding]:
    """Return the declaration of each parameter of an experts module that is sharded."""
    ep, etp, found = style.ep, style.inner(tp), {}
    count = num_experts(module) if ep.size > 1 else 0
    hidden_of = style.hidden if ep.size > 1 and etp.size == 1 else style.hidden or _hidden_of(module)
    for leaf, hidden in hidden_of.items():
        p = module._parameters.get(leaf)
        if p is None or p.dim() < 2:
            raise ValueError(f"it has no parameter {leaf!r} of at least 2 dimensions")
        length, dim = p.shape[hidden.dim], p.dim() + hidden.dim
        if length % (hidden.blocks * hidden.unit) or length // (hidden.blocks * hidden.unit) < etp.size:
            raise ValueError(
                f"{leaf} has {length} features in dimension {hidden.dim}, not {hidden.blocks} blocks of at least "
                f"{etp.size} units of {hidden.unit}: correct its Hidden(..), or take a smaller {etp.name}"
            )
        lengths = (length // hidden.blocks,) * hidden.blocks
        shards = (cut_blocks(lengths, etp, dim, (hidden.unit,) * hidden.blocks),) if etp.size > 1 else ()
        found[leaf] = Sharding(tuple(p.shape), shards)
    if ep.size > 1:
        if count % ep.size:
            raise ValueError(f"{count} experts are not a multiple of the ep size {ep.size}: {divisors(count)}")
        for leaf, p in module.named_parameters(recurse=False):
            if p.shape[:1] == (count,):
                old = found.get(leaf) or Sharding(tuple(p.shape))
                found[leaf] = replace(old, shards=(cut(count, ep, 0), *old.shards))
    return found


def num_experts(module: nn.Module) -> int:
    """Return the number of experts that a module holds in its parameters, which are stacked by expert."""
    counts = {leaf: p.shape[0] for leaf, p in module.named_parameters(recurse=False) if p.dim() > 1}
    if len(set(counts.values())) != 1:
        said = ", ".join(f"{leaf} {count}" for leaf, count in counts.items()) or "none"
        raise ValueError(f"its parameters [experts, ..] hold different numbers of experts ({said}): leave it out")
    return next(iter(counts.values()))


def sharded_parameters(swaps: dict[int, Swap], styles: list[Target], tp: Axis) -> set[int]:
    held = ((new, leaf, p) for old, new in swaps.values() for leaf, p in old.named_parameters(recurse=False))
    found = {id(p) for new, leaf, p in held if sharding_of(new, leaf, p).shards}
    experts = [(module, style) for _, module, style in styles if isinstance(style, Experts)]
    return found | {id(m.get_parameter(leaf)) for m, style in experts for leaf in experts_shardings(m, style, tp)}


def _hidden_of(module: nn.Module) -> dict[str, Hidden]:
    """Return the dimensions of the hidden features, from the attributes of a Hugging Face experts module.

    Its parameters are up (and gate) [E, F, D] and down [E, D, F], or transposed.
    """
    transposed, together = (getattr(module, f"is_{name}", None) for name in ("transposed", "concatenated"))
    gated = "gate_up_proj" in module._parameters
    if transposed is None or together is None:
        raise ValueError(
            "its hidden dimension is unknown: give Experts({'w_in': Hidden(-2, blocks=2), 'w_out': Hidden(-1)})"
        )
    packed = {"blocks": 2} if gated and together else {"unit": 2} if gated else {}
    up = "gate_up_proj" if gated else "up_proj"
    found = {up: Hidden(-1 if transposed else -2, **packed), "down_proj": Hidden(-2 if transposed else -1)}
    return found | ({f"{up}_bias": Hidden(-1, **packed)} if f"{up}_bias" in module._parameters else {})


def _shard_experts(module: nn.Module, style: Experts, tp: Axis) -> None:
    """Shard the parameters of an experts module. Its own forward then computes with this rank's part of them."""
    ep, etp = style.ep, style.inner(tp)
    if ep.size == etp.size == 1:
        return
    kind, shardings = type(module), experts_shardings(module, style, tp)
    count = num_experts(module) if ep.size > 1 else 0
    for leaf, sharding in shardings.items():
        module.register_parameter(leaf, _shard(module.get_parameter(leaf), sharding))
        declare_anew(module, leaf, sharding)
    own = dict(module.named_parameters(recurse=False))
    features = {leaf for leaf, each in shardings.items() if any(shard.axis is etp for shard in each.shards)}
    others = tuple(leaf for leaf in own if leaf not in features) if etp.size > 1 else ()
    for leaf in others:
        add_partial(module, leaf, etp if leaf in shardings else tp)
    if ep.size > 1 and etp.size == 1:  # what all experts share sees other tokens on each rank of tp
        for part in module.modules():
            for leaf, _ in part.named_parameters(recurse=False):
                if part is not module or leaf not in shardings:
                    add_partial(part, leaf, tp)
    if ep.size > 1:
        counts = [name for name, value in vars(module).items() if value == count and EXPERTS.fullmatch(name)]
        vars(module).update(dict.fromkeys(counts, count // ep.size))
    module.__class__ = type(f"Parallel{kind.__name__}", (ExpertsShard, kind), {})
    module.tp, module.ep, module.etp, module.num_all, module.replicated = tp, ep, etp, count, others  # type: ignore[assignment]


@torch.no_grad()
def apply_swaps(model: nn.Module, swaps: dict[int, Swap]) -> nn.Module:
    """Shard the parameters, each once, and replace the layers."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and id(module) in swaps:
            parent, _, child = name.rpartition(".")
            places.setdefault(id(module), []).append((model.get_submodule(parent), child))
    shards: dict[int, nn.Parameter] = {}
    cuts: dict[int, tuple[Sharding, nn.Parameter]] = {}  # keeps each parameter alive: a new one could get its id
    for key, (module, layer) in swaps.items():
        for leaf, full in module.named_parameters(recurse=False):
            shard = shards.setdefault(id(full), _shard(full, layer.shardings[leaf]))  # type: ignore[index]
            layer.register_parameter(leaf, shard)
            cuts[id(full)] = sharding_of(layer, leaf, full), full
        layer.train(module.training)
        if isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward:
            _shard_in_place(module, layer)
            continue
        for parent, child in places.get(key, []):
            parent.add_module(child, layer)
        if module is model:
            return layer
    for module in model.modules():  # other names of a parameter, such as the second name of BERT's head bias
        for leaf, full in module.named_parameters(recurse=False):
            if id(full) in cuts:
                module.register_parameter(leaf, shards[id(full)])
                declare_anew(module, leaf, cuts[id(full)][0])
    call_layers(model, (layer for _, layer in swaps.values()))
    return model


def call_layers(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Make torch's transformer encoders call these layers in evaluation, instead of reading their weights directly."""
    changed = {id(layer) for layer in layers}
    for module in model.modules():
        if any(id(layer) in changed for layer in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def _shard(full: nn.Parameter, sharding: Sharding) -> nn.Parameter:
    if not sharding.shards:
        return full
    shard = nn.Parameter(sharding.take(full.detach()), requires_grad=full.requires_grad)
    vars(shard).update(vars(full))  # attributes that users set on a parameter, such as no_weight_decay
    return shard


def _shard_in_place(module: nn.Embedding, layer: nn.Module) -> None:
    """Shard an embedding that has its own forward: the forward then looks up this rank's rows."""
    kind = type(module)
    module.__class__ = type(f"VocabParallel{kind.__name__}", (VocabShard, kind), {})
    module.register_parameter("weight", layer.weight)  # type: ignore[arg-type]
    module.padding_idx = layer.local_padding_idx  # type: ignore[assignment]
    module.tp, module.start, module.end = layer.tp, layer.start, layer.end  # type: ignore[assignment]
    declare_anew(module, "weight", layer.shardings["weight"])  # type: ignore[index]
