"""Floor 4: an existing model made tensor parallel in place, by a plan of name patterns.

    plan = {"embed": "vocab", "layers.*.fc1": "colwise", "layers.*.fc2": "rowwise", "head": "colwise_gather_output"}
    model = parallelize(model, plan, tp=mesh.tp)
    model = parallelize(llama, tp=mesh.tp)  # by the plan that a Hugging Face model carries

The parameters keep their names and logical shapes: `full_state_dict` of the result is the state dict of the original.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3, for the cuts.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from mpcore import collectives
from mpcore.layers.embedding import ColumnParallelEmbedding, VocabParallelEmbedding, check_ids
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.layers.module import ParallelModule
from mpcore.mesh import Axis, check_axis, check_same
from mpcore.sharding import Shard, Sharding, add_partial, cut_blocks, is_dtensor, sharding_of


@dataclass(frozen=True)
class Colwise:
    """Cut a linear layer's output features, or what an embedding has for each id, such as a bias of each head.

    Args:
        blocks: how many equal blocks the output is made of (3 for a fused [Q|K|V]), or their lengths. Each is cut.
        gather_output: return the whole output on every rank.
        unit: output features that may not be torn apart, of which every rank gets as many. None: the `head_dim` (or
            `head_size`, `attention_head_size`, `key_value_proj_dim`) of the module that holds the layer, and 1 where it
            has none; of an embedding 1.
    """

    blocks: int | tuple[int, ...] = 1
    gather_output: bool = False
    unit: int | None = None


@dataclass(frozen=True)
class Rowwise:
    """Cut a linear layer's input features. On an embedding: `Vocab`.

    Args:
        split_input: the input is whole, and cut here.
    """

    split_input: bool = False


@dataclass(frozen=True)
class Vocab:
    """Cut an embedding's rows."""


@dataclass(frozen=True)
class Replicate:
    """Leave a module's own parameters, or a parameter, whole on every rank.

    Args:
        partial_gradient: each rank sees its heads alone, so that the gradient is a sum over tp, as that of a norm of
            sharded heads. `mpcore.reduce_gradients` finishes it.
    """

    partial_gradient: bool = False


@dataclass(frozen=True)
class LocalSizes:
    """Divide attributes of a module that count what is sharded, such as its heads.

    Args:
        names: the attributes, integers that tp divides.
    """

    names: tuple[str, ...]


Style = Colwise | Rowwise | Vocab | Replicate | LocalSizes
Plan = Mapping[str, str | Style]

STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "colwise_gather_output": Colwise(gather_output=True),
    "colwise_rep": Colwise(gather_output=True),
    "rowwise": Rowwise(),
    "rowwise_split_input": Rowwise(split_input=True),
    "rowwise_rep": Rowwise(split_input=True),
    "embedding_rowwise": Vocab(),
    "vocab": Vocab(),
    "replicated_with_grad_allreduce": Replicate(partial_gradient=True),
    "replicate": Replicate(),
}
"""Styles by the names that Hugging Face's plans give them (4.x and 5.x), and "vocab"."""

UNSUPPORTED = (
    *("packed_colwise", "packed_rowwise", "local_packed_rowwise", "local_colwise", "local_rowwise", "local", "gather"),
    *("local_params", "isolated", "sequence_parallel", "all_reduce", "embedding_colwise", "mla_kv_a_proj"),
    *("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_router", "ep_dispatch_experts"),
)
"""Styles of Hugging Face's plans that `parallelize` refuses."""

BASE_PLANS: dict[str, Plan] = {
    "gpt2": {
        "wte": "vocab",
        "h.*.attn": LocalSizes(("num_heads", "split_size")),
        "h.*.attn.c_attn": Colwise(blocks=3),
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
}
"""For model types whose Hugging Face config carries no plan: the plan of the base model."""

_LEFT_OUT: dict[str, Plan] = {"apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}}
"""What plans of Hugging Face's configs don't name, though its gradient is a sum over tp."""

GPT2_PLAN: Plan = {f"transformer.{pattern}": style for pattern, style in BASE_PLANS["gpt2"].items()} | {
    "lm_head": "colwise_gather_output"
}
"""The plan of Hugging Face's `GPT2LMHeadModel`. With "lm_head": "colwise" the logits stay sharded."""


def parallelize(module: nn.Module, plan: Plan | str | None = "auto", tp: Axis = Axis(name="tp")) -> nn.Module:
    """Make an existing model tensor parallel: swap its linear layers and embeddings in place, with their weights.

    Every rank holds the whole model on entry, with the same weights, and keeps its shard. dtype, device, requires_grad,
    training mode and ties stay; the other end of a tied weight follows where the plan doesn't name it, and gives whole
    outputs. On an axis of size 1 the parameters stay the same objects; otherwise make the optimizer afterwards.
    After each backward call `mpcore.reduce_gradients`. A model with dropout needs the same random seed on all ranks of
    tp, and even shards.

    Args:
        module: the model. `nn.Linear`, `nn.Embedding` and transformers' `Conv1D` can be swapped.
        plan: styles (a name of `STYLES`, or `Colwise(...)` and the like) by pattern of module or parameter name. `*`
            matches within one component ("model.layers.*.self_attn.q_proj"), `**` across components. The pattern with
            fewer stars wins. "auto" or None: the plan that a Hugging Face model carries, of which patterns that match
            nothing are left out; `BASE_PLANS` where its config has none.
        tp: the axis.

    Returns:
        The model itself (or its replacement, where it is one layer and the plan names it by "").

    Raises:
        ValueError: on every rank of tp and before anything is changed, if a pattern matches nothing, a style is unknown
            or unsupported or doesn't fit its module, sizes don't fit tp, or the ranks hold different models.
    """
    check_axis(tp)
    problem, swaps, styles = None, {}, []
    try:
        styles = _resolve(module, plan)
        swaps = _swaps(module, styles, tp)
        _check_local_sizes(styles, tp)
    except ValueError as error:
        problem = error
    if tp.size > 1:
        check_same("model and plan given to parallelize", {"error": problem and str(problem)}, tp)
    if problem is not None:
        raise problem
    if tp.size > 1:
        check_same("model and plan given to parallelize", _fingerprint(module, plan), tp)
    for _, target, style in styles:
        if isinstance(style, LocalSizes):
            for attribute in style.names:
                setattr(target, attribute, getattr(target, attribute) // tp.size)
        elif style == Replicate(partial_gradient=True):
            for leaf in dict(target.named_parameters(recurse=False)):
                add_partial(target, leaf, tp)
    return _apply(module, swaps)


def model_plan(model: nn.Module) -> dict[str, str | Style]:
    """The plan that a Hugging Face model carries, by full names.

    Its config's `base_model_tp_plan`, or what `BASE_PLANS` has for its type, under the prefix of its base model; then
    the model's own `_tp_plan`.

    Raises:
        ValueError: if it carries none.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    base = getattr(config, "base_model_tp_plan", None) or BASE_PLANS.get(kind, {})
    base = {**_LEFT_OUT.get(kind, {}), **base}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    plan = {prefix + pattern: style for pattern, style in base.items()} | (getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise ValueError(f"{type(model).__name__} carries no tp plan: give one, such as {{'layers.*.fc1': 'colwise'}}")
    return plan


Target = tuple[str, nn.Module, Style]


def _resolve(model: nn.Module, plan: Plan | str | None) -> list[Target]:
    """Name, module and style of everything that the plan names, each module once."""
    own = plan is None or plan == "auto"
    if isinstance(plan, str) and not own:
        raise ValueError(f"plan {plan!r} is neither 'auto' nor a mapping from name patterns to styles")
    rules: Plan = model_plan(model) if plan is None or isinstance(plan, str) else plan
    modules = dict(model.named_modules(remove_duplicate=False))
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise ValueError(f"{lazy} has no shape yet: run the model once, on every rank alike, before parallelize")
    names = [*modules, *dict(model.named_parameters(remove_duplicate=False))]
    chosen: dict[int, tuple[str, str, nn.Module, Style]] = {}
    for pattern in sorted(rules, key=lambda pattern: pattern.count("*")):
        regex = re.compile(re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))
        hits = [name for name in names if regex.fullmatch(name)]
        if not hits and own:
            continue
        style = _style(pattern, rules[pattern])
        if not hits:
            near = difflib.get_close_matches(pattern, sorted({re.sub(r"\b\d+\b", "*", n) for n in names}), 3, 0.4)
            raise ValueError(f"plan pattern {pattern!r} matches no module of {type(model).__name__}; near it: {near}")
        for name in hits:
            if name not in modules:
                if style != Replicate():
                    raise ValueError(
                        f"{name} is a parameter, and {rules[pattern]!r} is for modules: name its module, or leave that "
                        f"module's layers out of the plan"
                    )
                continue
            target = modules[name]
            _, first, _, old = chosen.setdefault(id(target), (name, pattern, target, style))
            if old != style and first.count("*") == pattern.count("*"):
                raise ValueError(f"plan patterns {first!r} and {pattern!r} both match {name}, with different styles")
    if not chosen:
        raise ValueError(f"the plan of {len(rules)} patterns matches no module of {type(model).__name__}")
    return [(name, target, style) for name, _, target, style in chosen.values()]


def _style(pattern: str, style: str | Style) -> Style:
    if isinstance(style, Style):
        return style
    if style in UNSUPPORTED:
        raise ValueError(
            f"style {style!r} of {pattern!r} is one that parallelize doesn't support: it knows {sorted(STYLES)}. Leave "
            f"it and what it feeds out of the plan, to run whole on every rank"
        )
    if style not in STYLES:
        raise ValueError(f"style {style!r} of {pattern!r} is unknown: it is one of {sorted(STYLES)}")
    return STYLES[style]


def _fingerprint(model: nn.Module, plan: Plan | str | None) -> dict[str, str]:
    """Hashes of what must be the same on all ranks. Reads each weight once."""
    named = dict(model.named_parameters())
    held = [p.detach() for p in named.values() if not p.is_meta and not is_dtensor(p)]
    sums = [x.cpu() for p in held if not isinstance(x := p.sum(dtype=torch.float64), FakeTensor)]
    told = {
        "plan": plan if plan is None or isinstance(plan, str) else sorted((key, repr(plan[key])) for key in plan),
        "shapes": [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named.items()],
        "weights": torch.stack(sums).tolist() if sums else [],
    }
    return {key: hashlib.sha256(repr(value).encode()).hexdigest()[:12] for key, value in told.items()}


_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")


def _head_dim(parent: nn.Module) -> int | None:
    sizes = (getattr(parent, name, None) for name in _HEAD_DIMS)
    return next((size for size in sizes if isinstance(size, int)), None)


def _unit(name: str, parent: nn.Module, style: Colwise, blocks: tuple[int, ...], tp: Axis) -> int:
    """The output features that may not be torn apart; refuses heads that tp doesn't divide."""
    head_dim = _head_dim(parent)
    if style.gather_output or (head_dim is None and style.unit is None):
        return 1
    unit = style.unit or head_dim or 1
    if style.unit is None and any(length % unit for length in blocks):
        unit = 1  # such as a gate for each head
    away = f"take a tp size that divides it, or leave the projections of {name.rpartition('.')[0] or 'this module'} out"
    for length in blocks:
        if length % unit:
            raise ValueError(f"{length} output features are not a multiple of the unit {unit}")
        if length // unit % tp.size:
            raise ValueError(
                f"{length // unit} heads of {unit} output features are not a multiple of the {tp.name} size {tp.size}: "
                f"{away}"
            )
    heads = getattr(getattr(parent, "config", None), "num_attention_heads", None)
    if style.unit is None and isinstance(heads, int) and heads % tp.size:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of the {tp.name} size {tp.size}: {away}")
    return unit


def _check_shared_parameters(model: nn.Module, styles: list[Target]) -> None:
    """Refuse a plan that shards a module's features or heads and says nothing of its parameters that meet them all."""
    named = {id(target) for _, target, _ in styles}
    for name, _, style in styles:
        attention = name.rpartition(".")[0]
        if not isinstance(style, Colwise) or style.gather_output or not name:
            continue
        parent = model.get_submodule(attention)
        head_dim = _head_dim(parent)
        for inner, owner in parent.named_modules():
            beside = attention or not inner or ("." not in inner and not any(owner.children()))  # of a whole model
            if id(owner) in named or not beside:
                continue
            for p in owner.parameters(recurse=False):
                head = p.shape[-1:] == (head_dim,)  # a norm's, or a product's with each head
                if not head and p.numel() != 1:
                    continue
                where = ".".join(filter(None, (attention, inner))) or "the model itself"
                meets = f"one head's {head_dim} features, and the heads" if head else "one element, and the features"
                raise ValueError(
                    f"{where} has a parameter of {meets} beside it are sharded: add 'replicated_with_grad_allreduce' "
                    f"for it to the plan, or 'replicate' where it sees them all"
                )


def _check_local_sizes(styles: list[Target], tp: Axis) -> None:
    for name, target, style in styles:
        for attribute in style.names if isinstance(style, LocalSizes) else ():
            size = getattr(target, attribute, None)
            if not isinstance(size, int):
                raise ValueError(
                    f"{name}.{attribute} is {size!r}, not a size to divide by the {tp.name} size {tp.size}"
                )
            if size % tp.size:
                raise ValueError(f"{name}.{attribute} {size} is not a multiple of the {tp.name} size {tp.size}")


def _check_plain(name: str, module: nn.Module, style: Style) -> None:
    """Refuse a module of which a swap would lose something, or that has nothing to cut."""
    kind = type(module).__name__
    if isinstance(module, ParallelModule | _VocabShard):
        raise ValueError(f"{name} is a {kind} already: parallelize a model once, by one plan")
    base = next((base for base in (nn.Linear, nn.Embedding) if isinstance(module, base)), None)
    if base is None and not _is_conv1d(module):
        raise ValueError(f"{name} is a {kind}, which {style} can't cut: it is for nn.Linear, nn.Embedding and Conv1D")
    weight = module._parameters.get("weight")
    if weight is None or is_dtensor(weight):
        raise ValueError(f"{name} has no plain weight: parallelize before it is parametrized or sharded over data")
    if not {"weight", "bias"}.issuperset(module._parameters):
        raise ValueError(
            f"{name} is a {kind} with parameters {sorted(module._parameters)}, of which a swap would lose some"
        )
    if (base is nn.Linear and type(module).forward is not nn.Linear.forward) or "forward" in vars(module):
        raise ValueError(f"{name} is a {kind} with a forward of its own, which a swap would lose")
    if any(getattr(module, f"_{which}") for which in ("forward_hooks", "forward_pre_hooks", "backward_hooks")):
        raise ValueError(f"{name} has hooks, which a swap would lose: register them afterwards")


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' linear layer with a weight of [in, out]."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]


class FusedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one input in one product; each rank's output is [its part of block 0 | of block 1 | ...].

    Args:
        blocks: lengths of the blocks, whose sum is `out_features`.
        others: as of `ColumnParallelLinear`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, blocks: tuple[int, ...], **others: Any
    ) -> None:
        self.blocks = blocks
        super().__init__(in_features, out_features, bias, **others)

    def output_shard(self, unit: int) -> Shard:
        """Each block is cut for itself."""
        return cut_blocks(self.blocks, self.tp, 0, (unit,) * len(self.blocks))

    def output_blocks(self) -> tuple[int, ...]:
        """As given."""
        return self.blocks


class ColumnParallelConv1D(FusedColumnParallelLinear):
    """`FusedColumnParallelLinear` with its weight stored as [in_features, out_features]."""

    def __init__(self, *sizes: Any, **others: Any) -> None:
        super().__init__(*sizes, **others)
        self.shardings["weight"] = _transposed(self.shardings["weight"])

    def matrix(self) -> Tensor:
        """The weight turned."""
        return self.weight.t()


class RowParallelConv1D(RowParallelLinear):
    """`RowParallelLinear` with its weight stored as [in_features, out_features]."""

    def __init__(self, *sizes: Any, **others: Any) -> None:
        super().__init__(*sizes, **others)
        self.shardings["weight"] = _transposed(self.shardings["weight"])

    def matrix(self) -> Tensor:
        """The weight turned."""
        return self.weight.t()


def _transposed(sharding: Sharding) -> Sharding:
    shards = tuple(Shard(s.axis, 1 - s.dim, s.runs) for s in sharding.shards)
    return replace(sharding, shape=sharding.shape[::-1], shards=shards, block_dim=1 - sharding.block_dim)


class _VocabShard(nn.Embedding):
    """Stands before a subclass of `nn.Embedding`, whose own forward then looks up this rank's rows."""

    tp: Axis
    start: int
    end: int

    def forward(self, input: Tensor) -> Tensor:
        check_ids(input, self.num_embeddings)
        elsewhere = (input < self.start) | (input >= self.end)
        rows = super().forward((input - self.start).masked_fill(elsewhere, 0))
        return collectives.reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp)


Swap = tuple[nn.Module, nn.Module]


def _swaps(model: nn.Module, styles: list[Target], tp: Axis) -> dict[int, Swap]:
    """For each module to swap, by id: the module and its replacement, on the meta device."""
    swaps: dict[int, Swap] = {}

    def build(name: str, module: nn.Module, style: Style) -> None:
        _check_plain(name, module, style)
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            raise ValueError(
                f"{name} is part of an nn.MultiheadAttention, which reads its weight past the layer: leave it out of "
                f"the plan, to run whole on every rank, or write the attention with nn.Linear or ParallelAttention"
            )
        try:
            swaps[id(module)] = module, _parallel(name, parent, module, style, tp)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    for name, module, style in styles:
        if isinstance(style, (Colwise, Rowwise, Vocab)):
            build(name, module, style)
    if tp.size > 1:
        _check_shared_parameters(model, styles)
    named = {id(module) for _, module, _ in styles}
    for ends in _ties(model):
        if any(id(module) in swaps for _, module, _ in ends):
            for name, module, leaf in ends:
                if id(module) not in named and leaf == "weight":
                    build(name, module, Vocab() if isinstance(module, nn.Embedding) else Colwise(gather_output=True))
        _check_tie(ends, swaps)
    return swaps


def _ties(model: nn.Module) -> Iterator[list[tuple[str, nn.Module, str]]]:
    """The places of each parameter that has several: module name, module and the parameter's name there."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((name, module, leaf))
    return (ends for ends in places.values() if len(ends) > 1)


def _check_tie(ends: list[tuple[str, nn.Module, str]], swaps: dict[int, Swap]) -> None:
    cuts = [sharding_of(swaps[id(m)][1] if id(m) in swaps else m, leaf, getattr(m, leaf)).shards for _, m, leaf in ends]
    for (name, _, leaf), shards in zip(ends, cuts, strict=True):
        if shards != cuts[0]:
            raise ValueError(
                f"{ends[0][0]}.{ends[0][2]} and {name}.{leaf} are one tied weight, but the plan cuts them differently"
            )


def _parallel(name: str, parent: nn.Module, module: nn.Module, style: Style, tp: Axis) -> nn.Module:
    """The parallel layer for a module, on the meta device."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    like: dict[str, Any] = {"tp": tp, "device": "meta", "dtype": weight.dtype}
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError("max_norm, scale_grad_by_freq and sparse need the whole embedding: leave it out")
        if isinstance(style, Colwise):
            if style.blocks != 1 or type(module).forward is not nn.Embedding.forward:
                raise ValueError(
                    "an embedding of several blocks, or with a forward of its own, is cut by 'vocab' alone"
                )
            like |= {"gather_output": style.gather_output, "unit": style.unit or 1}
            return ColumnParallelEmbedding(*weight.shape, padding_idx=module.padding_idx, **like)
        return VocabParallelEmbedding(*weight.shape, padding_idx=module.padding_idx, **like)
    if isinstance(style, Vocab):
        raise ValueError(f"'vocab' is for embeddings, and this is a {type(module).__name__}")
    conv1d = not isinstance(module, nn.Linear)
    n_out, n_in = weight.shape[::-1] if conv1d else weight.shape
    bias = module.bias is not None
    if isinstance(style, Rowwise):
        row = RowParallelConv1D if conv1d else RowParallelLinear
        return row(n_in, n_out, bias, input_is_parallel=not style.split_input, **like)
    assert isinstance(style, Colwise)
    blocks = style.blocks
    if isinstance(blocks, int):
        if n_out % blocks:
            raise ValueError(f"{n_out} output features are not a multiple of {blocks} blocks")
        blocks = (n_out // blocks,) * blocks
    if sum(blocks) != n_out:
        raise ValueError(f"blocks {blocks} have a sum of {sum(blocks)}, not of out_features {n_out}")
    like |= {"gather_output": style.gather_output, "unit": _unit(name, parent, style, blocks, tp)}
    if conv1d or len(blocks) > 1:
        column = ColumnParallelConv1D if conv1d else FusedColumnParallelLinear
        return column(n_in, n_out, bias, blocks=blocks, **like)
    return ColumnParallelLinear(n_in, n_out, bias, **like)


@torch.no_grad()
def _apply(model: nn.Module, swaps: dict[int, Swap]) -> nn.Module:
    """Cut the parameters, once each, and put the parallel layers in place."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and id(module) in swaps:
            parent, _, child = name.rpartition(".")
            places.setdefault(id(module), []).append((model.get_submodule(parent), child))
    shards: dict[int, nn.Parameter] = {}
    for key, (module, layer) in swaps.items():
        for leaf, full in module.named_parameters(recurse=False):
            shard = shards.setdefault(id(full), _shard(full, layer.shardings[leaf]))  # type: ignore[index]
            layer.register_parameter(leaf, shard)
        layer.train(module.training)
        if isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward:
            _shard_in_place(module, layer)
            continue
        for parent, child in places.get(key, []):
            setattr(parent, child, layer)
        if module is model:
            return layer
    swapped = {id(layer) for _, layer in swaps.values()}
    for module in model.modules():  # in evaluation torch's encoders read their layers' weights, past the layers
        if any(id(layer) in swapped for layer in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
    return model


def _shard(full: nn.Parameter, sharding: Sharding) -> nn.Parameter:
    if not sharding.shards:
        return full
    shard = nn.Parameter(sharding.take(full.detach()), requires_grad=full.requires_grad)
    for mark, value in vars(full).items():  # what users set on a parameter, such as no_weight_decay
        setattr(shard, mark, value)
    return shard


def _shard_in_place(module: nn.Embedding, layer: nn.Module) -> None:
    """Keep an embedding's own forward, such as one that scales the rows, and have it look up this rank's rows."""
    kind = type(module)
    module.__class__ = type(f"VocabParallel{kind.__name__}", (_VocabShard, kind), {})
    module.register_parameter("weight", layer.weight)  # type: ignore[arg-type]
    module.padding_idx = layer.local_padding_idx  # type: ignore[assignment]
    for attribute in ("tp", "start", "end", "shardings"):
        setattr(module, attribute, getattr(layer, attribute))
