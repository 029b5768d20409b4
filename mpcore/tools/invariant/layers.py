"""`make_invariant`: the layers that compute each virtual shard separately, and add the shards by one binary tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from mpcore.kernels.layer_norm import layer_norm
from mpcore.kernels.rms_norm import rms_norm
from mpcore.layers.attention.multi_head import ParallelAttention
from mpcore.layers.block import TransformerBlock
from mpcore.layers.dropout import Dropout
from mpcore.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from mpcore.layers.fused_linear import GateUpParallelLinear, KVParallelLinear, QKVParallelLinear
from mpcore.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from mpcore.layers.linear_ops import Product
from mpcore.layers.loss import VocabParallelCrossEntropy
from mpcore.layers.mlp import ParallelMLP
from mpcore.layers.module import ParallelLayer, input_error
from mpcore.layers.norm import LayerNorm, RMSNorm
from mpcore.layers.rope import RotaryEmbedding
from mpcore.mesh.axis import Axis
from mpcore.sharding.declarations import declare_anew, named_modules
from mpcore.sharding.declare import cut_blocks
from mpcore.tools.invariant.pieces import ColumnProduct, RowProduct, in_pieces, on_tokens
from mpcore.tools.invariant.sums import check_pieces, degree


@dataclass(frozen=True)
class InvariantProduct(Product):
    """The invariant form of a linear layer's `Product`: one product for each virtual shard. It has no FP8.

    Args:
        blocks: this rank's output features of each projection that is fused in the weight; (): a single projection.
    """

    blocks: tuple[int, ...] = ()
    sequence_dim: int = 1

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None, regather: bool = False
    ) -> Tensor:
        return ColumnProduct.apply(x, weight, bias, tp, dim, self.blocks)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None) -> Tensor:
        y = RowProduct.apply(x, weight, tp, dim)
        return y if bias is None else on_tokens(Tensor.add, tp, self.sequence_dim, dim is not None, y, bias)


class InvariantParallelMLP(ParallelMLP):
    """The invariant form of `ParallelMLP`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(in_pieces(self.activation, self.up.tp, x.dim() - 1, self.up(x), blocks=self.parts))


class InvariantParallelAttention(ParallelAttention):
    """The invariant form of `ParallelAttention`."""

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, length: int, mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """softmax(scale q k^T) v: queries [B, T, H/tp, K] -> [B, T, H/tp, V], with this rank's KV heads."""
        if bias is not None:
            raise input_error("a bias on the scores has no invariant form: leave it out, or leave out make_invariant")
        core = partial(super().core, cu_seqlens=cu_seqlens, length=length, mask=mask)
        return in_pieces(core, self.tp, 2, q, k, v)


class InvariantRMSNorm(RMSNorm):
    """The invariant form of `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.narrowed(_on_tokens(self, partial(rms_norm, eps=self.eps), x, self.weight))


class InvariantLayerNorm(LayerNorm):
    """The invariant form of `LayerNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.narrowed(_on_tokens(self, partial(layer_norm, eps=self.eps), x, self.weight, self.bias))


def _on_tokens(layer: ParallelLayer, function: Any, x: Tensor, *weights: Tensor | None) -> Tensor:
    return on_tokens(function, layer.tp, layer.sequence_dim, layer.sequence_parallel, x, *weights)


FORMS: dict[type[nn.Module], type[nn.Module]] = {
    ParallelMLP: InvariantParallelMLP,
    ParallelAttention: InvariantParallelAttention,
    RMSNorm: InvariantRMSNorm,
    LayerNorm: InvariantLayerNorm,
}
"""The invariant form of each of mpcore's layers that has one."""

LINEAR = (ColumnParallelLinear, GateUpParallelLinear, QKVParallelLinear, KVParallelLinear, RowParallelLinear)
"""Layers whose invariant form is another product."""

SAME = (VocabParallelEmbedding, PositionEmbedding, Dropout, RotaryEmbedding, TransformerBlock,
        VocabParallelCrossEntropy)  # fmt: skip
"""Layers that compute the same bits on every layout as they are."""

SUMMED: dict[type[nn.Module], tuple[str, ...]] = {
    RowParallelLinear: ("bias",), InvariantRMSNorm: ("weight",), InvariantLayerNorm: ("weight", "bias"),
}  # fmt: skip
"""The parameters whose gradients the invariant form sums over tp itself, under sequence parallelism."""


def make_invariant(model: nn.Module | Sequence[nn.Module]) -> None:
    """Change mpcore's layers of a model to their invariant forms: the same bits at every size of tp.

    Only classes of mpcore are changed. Your own modules between them must compute the same bits for a feature, however
    many features the tensor has; for your own parameters use `on_tokens`.

    Args:
        model: the model, or this rank's pipeline stages, whose layers lie on the axes of `invariant_mesh`. Call it
            before `shard_data_parallel`. `mpcore.tools.invariant.prepare` calls it.

    Raises:
        ValueError: before anything is changed, if a layer has no invariant form, lies on an axis without a virtual
            degree, or has a size that is no multiple of the degree. Subclasses of mpcore's layers have no form.

    Example:
        >>> from mpcore.tools.invariant import invariant_mesh, make_invariant
        >>> head = mpcore.ColumnParallelLinear(4, 8, tp=invariant_mesh(mpcore.build_mesh(), 8).tp)
        >>> make_invariant(head)
        >>> head.product
        InvariantProduct(split_backward=False, blocks=(), sequence_dim=1)
    """
    stages = [model] if isinstance(model, nn.Module) else list(model)
    named = [each for stage in stages for each in named_modules(stage)]
    for name, module in named:
        try:
            _check_form(module)
        except ValueError as error:
            raise ValueError(f"{name or 'the model'}, a {type(module).__name__}: {error}") from None
    for _, module in named:
        if isinstance(module, LINEAR):
            if not isinstance(module.product, InvariantProduct):
                blocks = tuple(length // module.tp.size for length in module.shardings["weight"].blocks)  # on this rank
                module.product = InvariantProduct(module.product.split_backward, blocks, module.sequence_dim)
                _sum_itself(module)
        elif type(module) in FORMS and not _is_alone(module):
            module.__class__ = FORMS[type(module)]  # pyright: ignore[reportAttributeAccessIssue]
            _sum_itself(module)


def _check_form(module: Any) -> None:
    """Raise ValueError if this module of mpcore has no invariant form."""
    kind = type(module)
    if kind is VocabParallelCrossEntropy:
        degree(module.tp)
    if kind in SAME or kind in FORMS.values() or _is_alone(module):
        return
    if kind not in FORMS and kind not in LINEAR:
        if any(_is_layer(base) for base in kind.__mro__):
            raise ValueError("the class has no invariant form: see docs/bitwise.md")
        return
    if not {"forward", "core"}.isdisjoint(vars(module)):
        raise ValueError("the module has a forward of its own, which the invariant form would leave out")
    if isinstance(module, ParallelAttention):
        options = {"qk_norm": module.q_norm, "sinks": module.sinks, "alibi": module.alibi, "memory": module.memory_dim}
        asked = [name for name, value in options.items() if value]
        if asked:
            raise ValueError(f"no invariant form with {asked[0]}: see docs/bitwise.md")
    if isinstance(module, ParallelLinear) and type(module.product) not in (Product, InvariantProduct):
        raise ValueError(f"no invariant form with {module.product}: see docs/bitwise.md")
    if isinstance(module, ColumnParallelLinear):
        declared = module.shardings["weight"]
        blocks = declared.blocks
        lengths = blocks or (module.out_features,)
        even = cut_blocks(lengths, module.tp, 0, (module.unit,) * len(lengths))
        if kind is ColumnParallelLinear and declared.shards not in ((), (even,)):
            raise ValueError("no invariant form with a shard of your own: see docs/bitwise.md")
        rest = 0 if blocks or module.unit > 1 else 1
        check_pieces("out_features", blocks or (module.out_features,), module.tp, module.unit, rest)
    elif isinstance(module, RowParallelLinear):
        check_pieces("in_features", (module.in_features,), module.tp, module.unit)
    elif not isinstance(module, ParallelMLP):
        degree(module.tp)


def _is_alone(module: Any) -> bool:
    """Return whether this is a norm without `tp`: without sequence parallelism it has the same shapes on every rank."""
    return type(module) in (RMSNorm, LayerNorm) and module.tp.size == 1 and module.tp.sums is None


def _is_layer(kind: type) -> bool:
    """Return whether a class computes something for mpcore: all of mpcore's but the stages of a cut model."""
    return kind.__module__.startswith("mpcore.") and kind.__module__ != "mpcore.interop.stage_modules"


def _sum_itself(module: Any) -> None:
    """Declare the gradients that the invariant form sums itself as not partial over tp."""
    for leaf in SUMMED.get(type(module), ()):
        if module.sequence_parallel and leaf in module.shardings:
            axes = list(module.shardings[leaf].partial)
            axes.remove(module.tp)
            declare_anew(module, leaf, replace(module.shardings[leaf], partial=tuple(axes)))
