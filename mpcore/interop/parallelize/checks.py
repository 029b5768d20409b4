"""Check a plan and a model before anything changes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import torch
from torch import nn

from mpcore._torch.fake import is_fake
from mpcore._torch.fsdp import ranks_of_units, units
from mpcore._torch.module import has_hooks
from mpcore.interop.parallelize.layers import VocabShard
from mpcore.interop.parallelize.plan import Colwise, LocalSizes, Plan, Rowwise, Style, Target
from mpcore.layers.module import ParallelModule
from mpcore.mesh.axis import Axis
from mpcore.sharding.declarations import sharding_of
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import is_dtensor

HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
SEEDED = "weights, which all ranks draw after one torch.manual_seed"
HEADS = re.compile(r"(\w+_)?n?heads?")


def fingerprint(model: nn.Module, plan: Plan | str | None) -> dict[str, str]:
    """Return hashes of what must be the same on all ranks: the plan, the shapes, the weights. Read each weight once."""
    named = dict(model.named_parameters())
    held = [p.detach() for p in named.values() if not p.is_meta and not is_dtensor(p)]
    sums = [x.cpu() for p in held if not is_fake(x := p.sum(dtype=torch.float64))]
    told = {
        "plan": plan if plan is None or isinstance(plan, str) else sorted((key, repr(plan[key])) for key in plan),
        "shapes": [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named.items()],
        SEEDED: torch.stack(sums).tolist() if sums else [],
    }
    return {key: hashlib.sha256(repr(value).encode()).hexdigest()[:12] for key, value in told.items()}


def head_dim_of(parent: nn.Module) -> int | None:
    sizes = (getattr(parent, name, None) for name in HEAD_DIMS)
    return next((size for size in sizes if isinstance(size, int)), None)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, by its attributes."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer or Conv1D."""
    rows, columns = module.get_parameter("weight").shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)


def unit_of(name: str, parent: nn.Module, style: Colwise, blocks: tuple[int, ...], tp: Axis) -> int:
    """Return the number of consecutive output features of a layer that must stay on one rank."""
    head_dim = head_dim_of(parent)
    if style.gather_output or (head_dim is None and style.unit is None):
        return 1
    unit = style.unit or head_dim or 1
    if style.unit is None and any(length % unit for length in blocks):
        unit = 1  # such as a gate for each head
    away = f"take a tp size that divides it, or leave the projections of {_owner(name) or 'this module'} out"
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


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def owner_of(model: nn.Module, name: str) -> str:
    """Return the name of the module whose forward calls a layer: the nearest parent that is no list of modules."""
    name = _owner(name)
    while name and isinstance(model.get_submodule(name), nn.Sequential | nn.ModuleList | nn.ModuleDict):
        name = _owner(name)
    return name


def _sharded(styles: list[Target]) -> Iterator[tuple[str, nn.Module, Colwise]]:
    """Yield the layers of a plan whose output stays sharded."""
    for name, module, style in styles:
        if isinstance(style, Colwise) and not style.gather_output and name:
            yield name, module, style


def check_plan(model: nn.Module, styles: list[Target], tp: Axis, own: bool = False) -> None:
    check_local_sizes(styles, tp)
    if tp.size > 1:
        check_shared_parameters(model, styles, tp)
        if not own:
            check_head_counts(model, styles, tp)
            check_fused(styles)


def check_not_sharded_over_data(model: nn.Module) -> None:
    if ranks := ranks_of_units(units(model)):
        raise ValueError(
            f"fully_shard has sharded parameters over {len(ranks)} ranks already: call parallelize first, and then "
            f"shard_data_parallel or fully_shard"
        )


def is_partial(sharding: Sharding, tp: Axis | None) -> bool:
    """Return whether a gradient is declared partial over `tp`, or over an axis with the role "tp" of any mesh."""
    return any(axis.role == "tp" or (tp is not None and axis.key == tp.key) for axis in sharding.partial)


def check_shared_parameters(model: nn.Module, styles: list[Target], tp: Axis) -> None:
    """Raise ValueError if sharded heads or features meet a replicated parameter whose gradient nothing sums.

    Modules that the plan names, and gradients that `add_partial` declares partial over tp, are accepted.
    """
    named = {id(target) for _, target, _ in styles}
    for name, _, _ in _sharded(styles):
        attention = _owner(name)
        parent = model.get_submodule(attention)
        head_dim = head_dim_of(parent)
        for inner, owner in parent.named_modules():
            beside = attention or not inner or ("." not in inner and not any(owner.children()))  # root: its leaves
            if id(owner) in named or not beside:
                continue
            for leaf, p in owner.named_parameters(recurse=False):
                head = p.shape[-1:] == (head_dim,)  # such as a norm of each head
                if (not head and p.numel() != 1) or is_partial(sharding_of(owner, leaf, p), tp):
                    continue
                where = ".".join(filter(None, (attention, inner))) or "the model itself"
                meets = f"one head's {head_dim} features, and the heads" if head else "one element, and the features"
                raise ValueError(
                    f"{where} has a parameter {leaf!r} of {meets} beside it are sharded: add "
                    f"'replicated_with_grad_allreduce' for it to the plan, or 'replicate' where it sees them all"
                )


def check_head_counts(model: nn.Module, styles: list[Target], tp: Axis) -> None:
    """Raise ValueError if the plan shards heads, and an attribute that counts heads is not in a `LocalSizes`."""
    told = {id(target): style.names + style.kept for _, target, style in styles if isinstance(style, LocalSizes)}
    for name, _, _ in _sharded(styles):
        attention = owner_of(model, name)
        owner = model.get_submodule(attention)
        for attribute, value in vars(owner).items():
            if type(value) is int and HEADS.fullmatch(attribute) and attribute not in told.get(id(owner), ()):
                raise ValueError(
                    f"{attention or 'the model itself'}.{attribute} is {value} on each of {tp.size} ranks, and the "
                    f"plan shards {name}. Divide it by tp: add {re.sub('[0-9]+', '*', attention)!r}: "
                    f"mpcore.interop.parallelize.LocalSizes(({attribute!r},)) to the plan; or keep it, where it "
                    f"counts no sharded heads: LocalSizes((), kept=({attribute!r},))"
                )


def check_fused(styles: list[Target]) -> None:
    """Raise ValueError if a plan shards a fused projection as one block.

    The first ranks would get only features of the first projection, the last ranks none of them.
    """
    by_owner: dict[str, tuple[list[Target], list[Target]]] = {}
    for target in styles:
        if isinstance(target[2], Colwise | Rowwise) and not isinstance(target[1], nn.Embedding):
            by_owner.setdefault(_owner(target[0]), ([], []))[isinstance(target[2], Rowwise)].append(target)
    for columns, rows in by_owner.values():
        if len(columns) == len(rows) == 1 and columns[0][2] == Colwise():
            (name, column, _), (row_name, row, _) = *columns, *rows
            n_out, n_in = linear_sizes(column)[1], linear_sizes(row)[0]
            if n_out > n_in:
                raise ValueError(
                    f"{name} has {n_out} output features, and {row_name} takes {n_in}: it fuses several projections. "
                    f"Write Colwise(blocks=..), their number or their lengths; or Colwise(unit=..), where each unit of "
                    f"features has a part of all of them"
                )


def check_local_sizes(styles: list[Target], tp: Axis) -> None:
    for name, target, style in styles:
        for attribute in style.names if isinstance(style, LocalSizes) else ():
            size = getattr(target, attribute, None)
            if not isinstance(size, int):
                what = f"is {size!r}" if attribute in dir(target) else "doesn't exist"
                raise ValueError(f"{name}.{attribute} {what}, so it is no size to divide by {tp.name} {tp.size}")
            if size % tp.size:
                raise ValueError(f"{name}.{attribute} {size} is not a multiple of the {tp.name} size {tp.size}")


_LEAVE_OUT = "give parallelize skip=(name,) to leave it whole, or plan=suggest_plan(model, tp).plan"


def check_plain(name: str, module: nn.Module, style: Style) -> None:
    kind = type(module).__name__
    if isinstance(module, ParallelModule | VocabShard):
        raise ValueError(f"{name} is a {kind} already: parallelize a model once, by one plan")
    base = next((base for base in (nn.Linear, nn.Embedding) if isinstance(module, base)), None)
    weight = module._parameters.get("weight")
    if base is None and not is_conv1d(module):
        raise ValueError(f"{name} is a {kind}, which {style} can't cut: it is for nn.Linear, nn.Embedding and Conv1D")
    if weight is None or is_dtensor(weight):
        raise ValueError(
            f"{name} has no plain weight: leave it out of the plan if it is parametrized, such as by weight norm, and "
            f"parallelize before you shard over data"
        )
    if not {"weight", "bias"}.issuperset(module._parameters):
        raise ValueError(
            f"{name} is a {kind} with parameters {sorted(module._parameters)}, of which a swap would lose some: "
            f"{_LEAVE_OUT}"
        )
    if (base is nn.Linear and type(module).forward is not nn.Linear.forward) or "forward" in vars(module):
        raise ValueError(f"{name} is a {kind} with a forward of its own, which a swap would lose: {_LEAVE_OUT}")
    if has_hooks(module):
        raise ValueError(f"{name} has hooks, which a swap would lose: register them afterwards")
