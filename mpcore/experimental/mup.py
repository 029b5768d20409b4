"""muP: learning rates and initial values that are tuned on a narrow model hold for a wide one.

With n the number of a matrix's input features and n0 that number at the base width (Yang et al. 2022, "Tensor Programs
V", arXiv:2203.03466, table 3, for Adam):

    parameter                               standard deviation of the first values     learning rate
    embedding, vector                       that of the base model                     lr
    hidden matrix  (inputs, outputs grow)   that of the base model * sqrt(n0 / n)      lr * n0 / n
    output matrix  (inputs grow)            that of the base model * n0 / n            lr * n0 / n

n is the size of the logical tensor. A rank's shard has fewer features, and must not decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpcore.layers.attention.heads import HeadAttention
from mpcore.layers.embedding import TABLES
from mpcore.layers.module import Init, ParallelModule, fill
from mpcore.layers.moe import GroupedLinear
from mpcore.mesh.agreement import gather_objects, raising_together
from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import owners, sharding_of
from mpcore.sharding.local import is_dtensor

Kind = Literal["input", "hidden", "output"]
_STD = {"input": 0.0, "hidden": -0.5, "output": -1.0}  # the exponents of n / n0
_TORCH: dict[type, float] = {nn.Linear: -0.5, nn.Embedding: 0.0}  # the same of their reset_parameters
_ROWS = 64  # of a matrix are drawn to measure how its first values depend on the width


@dataclass(frozen=True)
class Mup:
    """The learning-rate factors of a model's parameters.

    Attributes:
        factors: n0 / n of each matrix whose inputs grow, by full name; 1.0 for all other parameters.
        distinct: all factors of the model, with those of other pipeline stages, in descending order.
    """

    factors: Mapping[str, float]
    distinct: tuple[float, ...]

    def groups(self, model: nn.Module, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Return the parameter groups of AdamW.

        A matrix decays by lr * weight_decay in each step, at every width; vectors don't decay. `Run.optimizer_step(lr)`
        multiplies its learning rate by each group's "lr_scale". All pipeline stages have the same groups.

        Args:
            model: the model that `prepare` passes to `optimizer`.
            lr: the learning rate at the base width.
            weight_decay: the weight decay at the base width.

        Raises:
            ValueError: if the model has a trainable parameter that `apply_mup` has not seen, such as an adapter.
        """
        matrices: dict[float, list[nn.Parameter]] = {factor: [] for factor in self.distinct}
        vectors = []
        for name, module, _, parameter in owners(model):
            if not parameter.requires_grad:
                continue
            if name not in self.factors:
                raise ValueError(f"apply_mup has not seen {name}: add it to the model before you call apply_mup")
            (matrices[self.factors[name]] if _is_matrix(module, parameter) else vectors).append(parameter)
        made = [
            {"params": each, "lr": lr * factor, "lr_scale": factor, "weight_decay": weight_decay / factor}
            for factor, each in matrices.items()
        ]
        return [*made, {"params": vectors, "lr": lr, "lr_scale": 1.0, "weight_decay": 0.0}]


def apply_mup(
    model: nn.Module | Sequence[nn.Module],
    base: nn.Module | Sequence[nn.Module],
    mesh: Mesh = Mesh(),
    kinds: Mapping[str, Kind] | None = None,
) -> Mup:
    """Scale the first values of a model by muP, and return its learning rates.

    Call it on each rank, before `prepare`. It measures how the first values of a matrix depend on the width, so it is
    right for an `init` of a constant standard deviation and for one that divides by sqrt(n).

    Args:
        model: the model, or this rank's pipeline stages, on the meta device or with values.
        base: the same model, or the same stages, at the base width. It needn't be sharded: pass its layers `Axis()`.
            If the plain torch layers of the model have values, give it values too.
        mesh: the model's mesh.
        kinds: the kind of a matrix by its parameter's full name. Name tables and matrices that are parameters of your
            own modules. Other layers say themselves what they are.

    Returns:
        The `Mup`, for the optimizer.

    Raises:
        ValueError: if the two models have other parameters; a matrix's kind is unknown; a tied table is both input and
            output; the size of attention heads grows, but `scale` doesn't shrink by 1 / size; the first values of a
            plain layer on the meta device must be scaled; the model is prepared already, or scaled twice.

    Example:
        >>> from mpcore.experimental import apply_mup
        >>> wide, narrow = (mpcore.ParallelMLP(width, 4 * width, device="meta") for width in (64, 16))
        >>> mup = apply_mup(wide, base=narrow)
        >>> [group["lr"] for group in mup.groups(wide, lr=0.01)]
        [0.01, 0.0025, 0.01]
    """
    stages, bases = ([each] if isinstance(each, nn.Module) else list(each) for each in (model, base))
    named: dict[str, Kind] = dict(kinds or {})
    factors: dict[str, float] = {}
    with raising_together():
        if len(stages) != len(bases):
            raise ValueError(f"the model has {len(stages)} stages on this rank, the base model {len(bases)}")
        for stage, narrow in zip(stages, bases, strict=True):
            _check_attention(stage, narrow)
            factors |= _scale(stage, narrow, named)
    found = gather_objects(factors, mesh.pp.group)
    if unknown := named.keys() - {name for each in found for name in each}:
        raise ValueError(f"kinds names {sorted(unknown)}, which are none of the model's parameters")
    return Mup(factors, tuple(sorted({1.0, *(x for each in found for x in each.values())}, reverse=True)))


class _Scaled:
    """The first values of `init`, multiplied by a factor."""

    def __init__(self, init: Init, factor: float) -> None:
        self.init, self.factor = init, factor

    def __call__(self, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        fill(self.init, tensor, generator).mul_(self.factor)


@torch.no_grad()
def _scale(model: nn.Module, base: nn.Module, kinds: dict[str, Kind]) -> dict[str, float]:
    """Scale the first values of a stage. Return the learning-rate factors."""
    narrow = {name: (module, leaf, p) for name, module, leaf, p in owners(base)}
    wide = {name: (module, leaf, p) for name, module, leaf, p in owners(model)}
    if narrow.keys() != wide.keys():
        raise ValueError(
            f"the base model has other parameters: {sorted(narrow.keys() ^ wide.keys())[:3]}. Change its width only"
        )
    holders: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            holders.setdefault(p, []).append(module)
    factors = {}
    for name, (module, leaf, p) in wide.items():
        if is_dtensor(p):
            raise ValueError(f"{name} is sharded over data already: call apply_mup before prepare")
        shape, small = sharding_of(module, leaf, p).shape, sharding_of(*narrow[name]).shape
        if len(shape) != len(small):
            raise ValueError(f"{name} has {len(shape)} dimensions, and {len(small)} in the base model")
        factors[name] = 1.0
        if not _is_matrix(module, p) or shape == small:
            continue
        growth = shape[-1] / small[-1]
        kind = kinds.get(name) or _kind(name, holders[p], growth, shape[-2] / small[-2])
        if kind != "input":
            factors[name] = 1 / growth
        inits = getattr(module, "inits", {})
        if isinstance(inits.get(leaf), _Scaled):
            raise ValueError(f"{name} is scaled already: call apply_mup once")
        now, before = _std(module, leaf, p), _std(*narrow[name])
        if now is None or before is None:
            if type(module) not in _TORCH:
                raise ValueError(
                    f"{name} is on the meta device, and {type(module).__name__} has no `inits`: build the model and "
                    f"the base model with values, and pass initialize=False to prepare"
                )
            exponent = _TORCH[type(module)]
        elif now == before == 0 or growth == 1:
            continue
        else:
            exponent = math.log(now / before) / math.log(growth)
        known = min(_STD.values(), key=lambda each: abs(each - exponent))
        if abs(known - exponent) > 0.2:
            raise ValueError(
                f"the standard deviation of {name} is {before:.3g} in the base model and {now:.3g} here, where "
                f"{growth:g} times as many inputs should give the same, or 1/sqrt({growth:g}) or 1/{growth:g} of it"
            )
        factor = growth ** (_STD[kind] - known)
        if factor == 1:
            continue
        if leaf in inits:
            inits[leaf] = _Scaled(inits[leaf], factor)
        elif p.is_meta:
            raise ValueError(
                f"the first values of {name} must be multiplied by {factor:.3g}, and {type(module).__name__} draws "
                f"them later: use mpcore's layer, or build the model with values and pass initialize=False to prepare"
            )
        if not p.is_meta:
            p.mul_(factor)
    return factors


def _is_matrix(module: nn.Module, p: Tensor) -> bool:
    return p.dim() - isinstance(module, GroupedLinear) > 1  # whose first dimension is experts


def _kind(name: str, holders: list[nn.Module], inputs: float, outputs: float) -> Kind:
    """Return the kind of a matrix from the modules that hold it and the growth of its inputs and outputs."""
    tables = [isinstance(module, TABLES) for module in holders]
    if all(tables):
        return "input"
    if any(tables):
        raise ValueError(
            f"{name} is tied: the table of an embedding and the matrix of a head. Untie them; or multiply the head's "
            f'input by {1 / inputs:g} (base width / width) in forward, and pass kinds={{"{name}": "input"}}'
        )
    if not isinstance(holders[0], nn.Linear | ParallelModule):
        kind = type(holders[0]).__name__
        raise ValueError(f'apply_mup doesn\'t know what {name} of {kind} is: pass kinds={{"{name}": "hidden"}}')
    if inputs == 1:
        return "input"
    return "output" if outputs == 1 else "hidden"


def _std(module: nn.Module, leaf: str, p: Tensor) -> float | None:
    init = getattr(module, "inits", {}).get(leaf)
    if init is None:
        return None if p.is_meta else p.double().std(correction=0).item()
    *first, rows, columns = sharding_of(module, leaf, p).shape
    drawn = torch.empty(*(1 for _ in first), min(rows, _ROWS), columns, device="cpu")
    return fill(init, drawn, torch.Generator().manual_seed(0)).double().std(correction=0).item()


def _check_attention(model: nn.Module, base: nn.Module) -> None:
    """Raise if the scores of larger heads aren't scaled by 1 / size."""
    narrow = dict(base.named_modules())
    for name, module in model.named_modules():
        other = narrow.get(name)
        if not isinstance(module, HeadAttention) or not isinstance(other, HeadAttention):
            continue
        size, small = module.head_dim, other.head_dim
        scale, before = module.scale or size**-0.5, other.scale or small**-0.5
        if not math.isclose(scale, before * small / size, rel_tol=1e-9):
            raise ValueError(
                f"{name} has heads of {size} in place of {small}, and scores scaled by {scale:.4g}: muP scales them by "
                f"1 / size. Set {name or 'model'}.scale = {before * small / size:.6g}, or add heads and keep their size"
            )
