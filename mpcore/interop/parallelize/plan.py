"""Plans: which module becomes which parallel layer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.parameter import is_lazy

from mpcore.mesh.axis import Axis


@dataclass(frozen=True)
class Colwise:
    """Shard the output features of a linear layer, or the columns of an embedding.

    An embedding with sharded columns is, for example, the table of a relative position bias, whose shape is [buckets of
    distances, heads].

    Args:
        blocks: the number of equal blocks of output features (3 for a fused [Q|K|V]), or a tuple of their lengths. Each
            block is sharded separately. An embedding has one block.
        gather_output: whether to all-gather the output, so that every rank returns all features.
        unit: the number of consecutive output features that stay on one rank, such as the size of a head. None: the
            parent module's `head_dim` (or `head_size`, `attention_head_size`, `key_value_proj_dim`); 1 for an embedding
            and if it has none that divides the blocks. A linear layer with `gather_output` ignores `unit`.

    Raises:
        ValueError: from `parallelize`, if `blocks` don't fit out_features, `unit` doesn't divide a block, tp doesn't
            divide the number of units in a block, or an embedding has several blocks.

    Example:
        >>> from mpcore.interop.parallelize import Colwise
        >>> plan = {"h.*.attn.qkv": Colwise(blocks=3, unit=64), "h.*.attn.proj": "rowwise"}  # heads of 64
    """

    blocks: int | tuple[int, ...] = 1
    gather_output: bool = False
    unit: int | None = None


@dataclass(frozen=True)
class Rowwise:
    """Shard the input features of a linear layer. For an embedding it is the same as `Vocab`.

    Args:
        split_input: True: the input has all features, and the layer takes this rank's shard of them. False: the input
            is sharded already.
    """

    split_input: bool = False


@dataclass(frozen=True)
class Vocab:
    """Shard the rows of an embedding."""


@dataclass(frozen=True)
class Replicate:
    """Replicate a module's own parameters, or one parameter.

    Args:
        partial_gradient: True: each rank uses the parameter only with its own heads, for example in a norm of each
            head. The gradient is then partial, and `mpcore.gradients.reduce_gradients` all-reduces it over tp.

    Example:
        >>> from mpcore.interop.parallelize import Replicate
        >>> plan = {"h.*.attn.q_norm": Replicate(partial_gradient=True)}  # a norm over each head's features
    """

    partial_gradient: bool = False


@dataclass(frozen=True)
class LocalSizes:
    """Divide integer attributes of a module by the size of tp, such as a number of heads.

    Args:
        names: the attributes to divide by the size of tp. Each must be a multiple of the size of tp.
        kept: attributes that keep their values, although they are named like a number of heads.

    Example:
        >>> plan = {"h.*.attn": mpcore.interop.parallelize.LocalSizes(("n_head",)), "h.*.attn.q": "colwise"}
    """

    names: tuple[str, ...]
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hidden:
    """Name the dimension of the hidden features in a parameter that holds all experts.

    Args:
        dim: the dimension, counted from the end: -1 or -2.
        blocks: the number of equal blocks in the dimension, such as 2 for [gate | up]. Each block is sharded
            separately.
        unit: the number of consecutive features that stay on one rank, such as 2 if gate and up alternate.

    Example:
        >>> mpcore.interop.parallelize.Hidden(-1, unit=2)  # of [E, D, 2F], gate and up alternating
        Hidden(dim=-1, blocks=1, unit=2)
    """

    dim: int
    blocks: int = 1
    unit: int = 1


@dataclass(frozen=True)
class Experts:
    """Shard the experts that one module holds in its parameters: their hidden features over tp, and the list over ep.

    With ep above 1 the hidden features are sharded over etp. The module's forward must then take tokens [N, D], the
    experts that each token chose, integers [N, K], and their weights [N, K], as Hugging Face's experts do; or, as those
    of Llama 4, [E N, D] alone, N rows for each expert in turn. Tokens travel to the ranks of their experts by mpcore's
    dropless all-to-all.

    Args:
        hidden: the dimension of the hidden features, by parameter name. {}: read it from the attributes of Hugging
            Face's experts modules. Other parameters, such as output biases, are not sharded over tp; each rank adds
            1 / tp of them.
        ep, etp: the axes over which `parallelize` shards the experts. `parallelize` sets them.

    Example:
        >>> from mpcore.interop.parallelize import Experts, Hidden
        >>> gated = Experts({"w_in": Hidden(-2, blocks=2), "w_out": Hidden(-1)})
        >>> plan = {"layers.*.mlp.experts": gated}  # w_in [E, 2F, D], w_out [E, D, F]
    """

    hidden: Mapping[str, Hidden] = field(default_factory=dict)
    ep: Axis = field(default=Axis(role="ep"), repr=False)
    etp: Axis | None = field(default=None, repr=False)

    def inner(self, tp: Axis) -> Axis:
        """Return the axis over which the hidden features are sharded."""
        return tp if self.etp is None or self.ep.size == 1 < self.etp.size else self.etp


@dataclass(frozen=True)
class SequenceParallel:
    """Shard the tokens between the sharded layers of a model of transformers over tp. Name the model itself: "".

    Norms, residuals and the outputs of embeddings then have T/tp tokens on each rank. Each module that owns sharded
    layers, such as an attention or an MLP, gathers its input and splits its output.

    Example:
        >>> plan = {"": "sequence_parallel", "model.layers.*.mlp.up_proj": "colwise"}  # the same as SequenceParallel()
    """


Style = Colwise | Rowwise | Vocab | Replicate | LocalSizes | Experts | SequenceParallel
Plan = Mapping[str, str | Style]
Target = tuple[str, nn.Module, Style]
STYLES: dict[str, Style] = {
    "colwise": Colwise(), "colwise_gather_output": Colwise(gather_output=True),
    "colwise_rep": Colwise(gather_output=True), "rowwise": Rowwise(), "rowwise_split_input": Rowwise(split_input=True),
    "rowwise_rep": Rowwise(split_input=True), "embedding_rowwise": Vocab(), "vocab": Vocab(),
    "replicated_with_grad_allreduce": Replicate(partial_gradient=True), "replicate": Replicate(),
    "moe_tp_experts": Experts(), "ep_dispatch_experts": Experts(), "grouped_gemm": Experts(), "ep_router": Replicate(),
    "sequence_parallel": SequenceParallel(),
}  # fmt: skip
"""Styles by the names that Hugging Face's plans give them (4.x and 5.x), and "vocab"."""
UNSUPPORTED = (
    *("packed_colwise", "packed_rowwise", "local_packed_rowwise", "local_colwise", "local_rowwise", "local", "gather"),
    *("local_params", "isolated", "all_reduce", "embedding_colwise", "mla_kv_a_proj", "moe_identity_expert"),
)
"""Styles of Hugging Face's plans that `parallelize` refuses."""
BASE_PLANS: dict[str, Plan] = {
    "gpt2": {
        "wte": "vocab", "h.*.attn": LocalSizes(("num_heads", "split_size")), "h.*.attn.c_attn": Colwise(blocks=3),
        "h.*.attn.c_proj": "rowwise", "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise",
    }
}  # fmt: skip
"""For model types whose Hugging Face config carries no plan: the plan of the base model."""
_LEFT_OUT: dict[str, Plan] = {"apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}}
"""Modules that Hugging Face's own plans don't name, though their gradients are sums over tp."""


def model_plan(model: nn.Module, tp: int = 2, ep: int = 1) -> dict[str, str | Style]:
    """Return the plan that a Hugging Face model carries, by full name patterns, as far as they match.

    It is the config's `base_model_tp_plan`, or the entry of `BASE_PLANS`, updated with the model's own `_tp_plan`.

    Args:
        model: the model.
        tp, ep: the sizes of the axes. With ep above 1 the plan also has the experts of `base_model_ep_plan`; with tp 1
            it then has nothing but experts.

    Raises:
        ValueError: if the model carries no plan.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    base = getattr(config, "base_model_tp_plan", None) or BASE_PLANS.get(kind, {})
    base = {**_LEFT_OUT.get(kind, {}), **base}
    if ep > 1:
        base = {**(getattr(config, "base_model_ep_plan", None) or {}), **base}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix in model._modules else ""
    plan = {prefix + pattern: style for pattern, style in base.items()} | (getattr(model, "_tp_plan", None) or {})
    if ep > 1 and tp == 1:
        plan = {pattern: style for pattern, style in plan.items() if is_experts(style)}
    names = _names(model)
    plan = {pattern: style for pattern, style in plan.items() if any(map(_regex(pattern).fullmatch, names))}
    if not plan:
        axis, sizes = ("ep", f", tp={tp}, ep={ep}") if ep > 1 else ("tp", "")
        other = ", or build the mesh with ep 1" if ep > 1 else ""
        raise ValueError(f"{type(model).__name__} carries no {axis} plan: give suggest_plan(model{sizes}).plan{other}")
    return plan


def is_experts(style: str | Style | None) -> bool:
    return isinstance(STYLES.get(style) if isinstance(style, str) else style, Experts)


def is_own(plan: Plan | str | None) -> bool:
    """Return whether `plan` means the plan that the model carries."""
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(f"plan {plan!r} is neither 'auto' nor a mapping from name patterns to styles")
    return plan is None or plan == "auto"


def resolve(model: nn.Module, plan: Plan | str | None, tp: int = 2, ep: int = 1) -> list[Target]:
    """Return name, module and style of every module that the plan names. Each module appears once.

    The sizes of tp and ep choose what the model's own plan names (`model_plan`).
    """
    rules: Plan = model_plan(model, tp, ep) if is_own(plan) else plan  # pyright: ignore[reportAssignmentType]
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise ValueError(f"{lazy} has no shape yet: run the model once, on every rank alike, before parallelize")
    kind, modules, names = type(model).__name__, dict(model.named_modules(remove_duplicate=False)), _names(model)
    chosen: dict[int, tuple[str, Target]] = {}
    for pattern in sorted(rules, key=lambda pattern: pattern.count("*")):
        hits = list(filter(_regex(pattern).fullmatch, names))
        if hits and not modules.keys() & hits and is_experts(rules.get(pattern.rpartition(".")[0])):
            if rules[pattern] not in UNSUPPORTED:
                _style(pattern, rules[pattern])
            continue  # a pattern of parameters: the style of their module covers them
        style = _style(pattern, rules[pattern])
        if not hits:
            raise ValueError(f"plan pattern {pattern!r} matches no module of {kind}{_near(pattern, names)}")
        for name in hits:
            if name in modules:
                first, (_, _, old) = chosen.setdefault(id(modules[name]), (pattern, (name, modules[name], style)))
                if old != style and first.count("*") == pattern.count("*"):
                    raise ValueError(f"plan patterns {first!r} and {pattern!r} both match {name}, in different styles")
            elif style != Replicate():
                raise ValueError(
                    f"{name} is a parameter, and {rules[pattern]!r} is for modules: name its module, or leave that "
                    f"module's layers out of the plan"
                )
    if not chosen:
        raise ValueError(
            f"the plan of {len(rules)} patterns matches no module of {kind}: if it is of suggest_plan, print what that "
            f"returned, which says why each part stays whole; or build the mesh without this axis"
        )
    return [target for _, target in chosen.values()]


def _names(model: nn.Module) -> list[str]:
    named = (model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False))
    return [name for each in named for name, _ in each]


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))


def on_axes(styles: list[Target], ep: Axis, etp: Axis | None = None) -> list[Target]:
    return [(n, m, replace(style, ep=ep, etp=etp) if isinstance(style, Experts) else style) for n, m, style in styles]


def _near(pattern: str, names: Iterable[str]) -> str:
    general = {name: re.sub(r"\b\d+\b", "*", name) for name in names if name}
    same = [name for name, each in general.items() if each == re.sub(r"\b\d+\b", "*", pattern)]
    near = difflib.get_close_matches(pattern, sorted(set(general.values())), 3, 0.4)
    top = list(dict.fromkeys(name.partition(".")[0] for name in general))
    said = f"it has {same[0]!r} to {same[-1]!r}" if same else f"near it: {near}" if near else f"its modules are {top}"
    return f"; {said}. Give a part of a model, such as a pipeline stage, the patterns of its own modules"


def _style(pattern: str, style: str | Style) -> Style:
    if isinstance(style, Style):
        return style
    if style in UNSUPPORTED:
        raise ValueError(
            f"style {style!r} of {pattern!r} is one that parallelize doesn't support: it knows {sorted(STYLES)}. Leave "
            f"it and what it feeds out of the plan, to run whole on every rank"
        )
    if style not in STYLES:
        raise ValueError(
            f"style {style!r} of {pattern!r} is unknown: it is one of {sorted(STYLES)}, or a Colwise(..), Rowwise(..), "
            f"Replicate(..), LocalSizes(..) or Experts(..)"
        )
    return STYLES[style]
