"""Check a model against its plan before anything changes."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from mpcore._torch.fake import is_fake
from mpcore._torch.module import has_hooks
from mpcore.interop.parallelize.layers import VocabShard
from mpcore.interop.parallelize.plan import Colwise, LocalSizes, Plan, Style, Target
from mpcore.layers.module import ParallelModule
from mpcore.mesh.axis import Axis
from mpcore.sharding.local import is_dtensor


def fingerprint(model: nn.Module, plan: Plan | str | None) -> dict[str, str]:
    """Hashes of what must be the same on all ranks. Reads each weight once."""
    named = dict(model.named_parameters())
    held = [p.detach() for p in named.values() if not p.is_meta and not is_dtensor(p)]
    sums = [x.cpu() for p in held if not is_fake(x := p.sum(dtype=torch.float64))]
    told = {
        "plan": plan if plan is None or isinstance(plan, str) else sorted((key, repr(plan[key])) for key in plan),
        "shapes": [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named.items()],
        "weights": torch.stack(sums).tolist() if sums else [],
    }
    return {key: hashlib.sha256(repr(value).encode()).hexdigest()[:12] for key, value in told.items()}


_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")


def head_dim_of(parent: nn.Module) -> int | None:
    sizes = (getattr(parent, name, None) for name in _HEAD_DIMS)
    return next((size for size in sizes if isinstance(size, int)), None)


def unit_of(name: str, parent: nn.Module, style: Colwise, blocks: tuple[int, ...], tp: Axis) -> int:
    """The output features that may not be torn apart; refuses heads that tp doesn't divide."""
    head_dim = head_dim_of(parent)
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


def check_shared_parameters(model: nn.Module, styles: list[Target]) -> None:
    """Refuse a plan that shards a module's features or heads and says nothing of its parameters that meet them all."""
    named = {id(target) for _, target, _ in styles}
    for name, _, style in styles:
        attention = name.rpartition(".")[0]
        if not isinstance(style, Colwise) or style.gather_output or not name:
            continue
        parent = model.get_submodule(attention)
        head_dim = head_dim_of(parent)
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


def check_local_sizes(styles: list[Target], tp: Axis) -> None:
    for name, target, style in styles:
        for attribute in style.names if isinstance(style, LocalSizes) else ():
            size = getattr(target, attribute, None)
            if not isinstance(size, int):
                raise ValueError(
                    f"{name}.{attribute} is {size!r}, not a size to divide by the {tp.name} size {tp.size}"
                )
            if size % tp.size:
                raise ValueError(f"{name}.{attribute} {size} is not a multiple of the {tp.name} size {tp.size}")


def check_plain(name: str, module: nn.Module, style: Style) -> None:
    """Refuse a module of which a swap would lose something, or that has nothing to cut."""
    kind = type(module).__name__
    if isinstance(module, ParallelModule | VocabShard):
        raise ValueError(f"{name} is a {kind} already: parallelize a model once, by one plan")
    base = next((base for base in (nn.Linear, nn.Embedding) if isinstance(module, base)), None)
    if base is None and not is_conv1d(module):
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
    if has_hooks(module):
        raise ValueError(f"{name} has hooks, which a swap would lose: register them afterwards")


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' linear layer with a weight of [in, out]."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]
