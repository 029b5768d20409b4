"""The language of plans: which module becomes which parallel layer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy


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
    prefix = f"{prefix}." if prefix in model._modules else ""
    plan = {prefix + pattern: style for pattern, style in base.items()} | (getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise ValueError(f"{type(model).__name__} carries no tp plan: give one, such as {{'layers.*.fc1': 'colwise'}}")
    return plan


Target = tuple[str, nn.Module, Style]


def resolve(model: nn.Module, plan: Plan | str | None) -> list[Target]:
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
        style = style_of(pattern, rules[pattern])
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


def style_of(pattern: str, style: str | Style) -> Style:
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
