"""The product of a linear layer in FP8: forward, and both products of backward."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpcore._torch.autograd import will_run
from mpcore._torch.compile import uncompiled
from mpcore._torch.dispatch import unsafe_view, wrapper
from mpcore._torch.storage import StorageWeakRef
from mpcore.collectives import start_all_gather, wait
from mpcore.kernels._main_grad import add_or_return, main_grad
from mpcore.kernels._torch import has_no_values, is_tracing
from mpcore.kernels.fp8_matmul import fp8_matmul
from mpcore.kernels.quantize_fp8 import BLOCK, Quantized, quantize_fp8
from mpcore.layers.linear_ops import Product, autocast_dtype, cast, column_sum, flat_tokens, gathered, share, start_sum
from mpcore.layers.module import input_error, refuse_second_derivative
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Sharding

_ALONE = Axis()


class KeptWeight:
    """The quantized form of one parameter, and of its transpose, until the parameter changes.

    An optimizer's step, an operation in place, or other memory (`parameter.data = ..`) changes it. A forward without
    gradients adds no forms, because between steps weights are swapped and written in more ways than torch counts. A
    copy, or what `pickle` loads, belongs to the copied parameter and holds no forms yet.
    """

    stamp: tuple[Any, ...] | None
    forms: list[Quantized | None]

    def __init__(self, parameter: Tensor) -> None:
        self.parameter: Tensor = parameter
        self.drop()
        drop: Any = weakref.WeakMethod(self.drop)

        def stepped(*_: Any) -> None:  # an optimizer may write through `.data`
            if (found := drop()) is not None:
                found()

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def drop(self) -> None:
        """Drop the forms."""
        self.stamp, self.forms = None, [None, None]

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptWeight:
        return KeptWeight(copy.deepcopy(self.parameter, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptWeight, (self.parameter,)

    def form(self, weight: Tensor, turned: bool, both: bool, add: bool) -> Quantized:
        """Return the weight quantized, or its transpose; with `both`, compute what is missing in one pass."""
        place = (weight.storage_offset(), weight.shape, weight.stride(), weight.dtype)
        now = (StorageWeakRef(weight.untyped_storage()), *place, weight._version)
        forms: list[Quantized | None] = self.forms if now == self.stamp else [None, None]
        if forms[turned] is None:
            made = quantize_fp8(weight, square=True, rows=both or not turned, columns=both or turned)
            forms = [old if new is None else new for old, new in zip(forms, made, strict=True)]
        if add:
            self.stamp, self.forms = now, forms
        return _given(forms[turned])


class Fp8Weight(Tensor):
    """A weight that ZeRO gathered in FP8, of the weight's shape and dtype. Only an `Fp8Product` reads it.

    Its one form serves forward and backward: the transpose of square blocks has the transposed values and scales.
    """

    quantized: Quantized

    @staticmethod
    def __new__(cls, quantized: Quantized, dtype: torch.dtype) -> Fp8Weight:
        values = quantized.values
        made = wrapper(cls, values.shape, dtype, values.device)
        made.quantized = quantized
        return made

    @staticmethod
    def cut(shard: Tensor) -> tuple[Tensor, Tensor]:
        """See `GatherForm`."""
        values, scales = _given(quantize_fp8(shard, square=True)[0])
        return values, scales.contiguous()

    @staticmethod
    def join(gathered: tuple[Tensor, Tensor], dtype: torch.dtype) -> Fp8Weight:
        """See `GatherForm`."""
        return Fp8Weight(Quantized(*gathered), dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, aten = args[0], torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.as_strided.default):  # all that `fully_shard` needs
            return Fp8Weight(x.quantized, x.dtype)
        if func is aten.zeros_like.default:
            return torch.zeros(x.shape, dtype=(kwargs or {}).get("dtype", x.dtype), device=x.device)
        raise ValueError(
            f"{func} reads a weight {tuple(x.shape)} that ZeRO gathered in FP8: only FP8 layers read it; convert the "
            f"layer without all_gather"
        )

    def form(self, turned: bool) -> Quantized:
        """Return the values and scales, or those of the transpose."""
        values, scales = self.quantized
        return Quantized(values.t().contiguous(), scales.t()) if turned else self.quantized


@dataclass(frozen=True)
class Fp8Product(Product):
    """A `Product` in FP8. The input kept for backward is in FP8 too; the parameter keeps its dtype.

    Args:
        kept: where the quantized weight is kept from one product to the next; None: each product quantizes it.
        all_gather: whether ZeRO gathers the weight as an `Fp8Weight`.
    """

    kept: KeptWeight | None = field(default=None, compare=False, repr=False)
    all_gather: bool = field(default=False, repr=False)

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None, regather: bool = False
    ) -> Tensor:
        main = (weight, bias) if main_grad(weight) is not None and not torch.compiler.is_compiling() else None
        if self.kept is not None and self.kept.parameter is not weight and not has_no_values(weight):
            if not isinstance(weight, torch.nn.Parameter):
                raise input_error(
                    f"keep_weights=True, but the weight {tuple(weight.shape)} is no parameter but computed from "
                    f"others, such as merged adapters: leave out keep_weights"
                )
            self.kept.parameter = weight  # as `materialize` makes anew; its memory is other memory
        x = cast(x, autocast_dtype(x))
        if self.split_backward:
            x, tp, dim = share(x, tp, dim), _ALONE, None
        how = main, self.split_backward, self.kept, torch.is_grad_enabled()
        return _Fp8Linear.apply(x, weight, bias, tp, dim, regather and dim is not None, *how)

    def gather_form(self, name: str, rows: int, zero: int, shards: int) -> type[Fp8Weight] | None:
        """See `Product`."""
        if self.kept is not None:
            raise ValueError(
                f"{name} keeps its FP8 weight (keep_weights), and zero {zero} gathers the weight into memory that it "
                f"fills again without a new version: leave out keep_weights, or use zero=0"
            )
        if self.all_gather and rows % (BLOCK * shards) and shards > 1:
            raise ValueError(
                f"{name} has {rows} output features on this rank, which zero {zero} cuts into {shards} shards at no "
                f"multiple of {BLOCK}, the block of FP8: take {-(-rows // (BLOCK * shards)) * BLOCK * shards} or fewer "
                f"shards, or convert this layer without all_gather"
            )
        return Fp8Weight if self.all_gather else None


@uncompiled
def grouped_fp8(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute `grouped_linear` in FP8, expert by expert, with the rows of each padded to a multiple of 128.

    The host reads the counts: see docs/decisions.md. On tensors without values experts have equally many rows.
    """
    if not isinstance(weight, torch.nn.Parameter):
        raise input_error(
            f"the experts' weight {tuple(weight.shape)} is computed from others, such as merged adapters, which FP8 "
            f"would round away: leave these experts out of convert_to_fp8"
        )
    even = [len(x) // len(weight)] * len(weight)
    sizes = even if has_no_values(counts) or is_tracing() else counts.tolist()
    *groups, rest = x.split([*sizes, len(x) - sum(sizes)])
    outputs = []
    for group, w in zip(groups, weight.unbind(), strict=True):
        padded = F.pad(group, (0, 0, 0, -len(group) % BLOCK))
        outputs.append(_Fp8Linear.apply(padded, w, None, _ALONE, None, False, None, False, None, False)[: len(group)])
    return torch.cat([*outputs, rest.new_zeros(len(rest), weight.shape[1])])


def check_blocks(sharding: Sharding, name: str, first: int = 0) -> None:
    """Raise ValueError if a matrix, whose rows are dimension `first`, is not cut at multiples of `BLOCK`."""
    for shard in [shard for shard in sharding.shards if shard.dim >= first]:
        for edge in sorted({edge for runs in shard.runs for run in runs for edge in run}):
            if edge % BLOCK and edge != sharding.shape[shard.dim]:
                axis, step = shard.axis, BLOCK * shard.axis.size
                parts = (shard.dim == first and sharding.blocks) or (sharding.shape[shard.dim],)
                found, wanted = (" + ".join(map(str, w)) for w in (parts, [-(-n // step) * step for n in parts]))
                raise ValueError(
                    f"{name} is cut over {axis.name} {axis.size} at feature {edge}, which is no multiple of {BLOCK}, "
                    f"the block of FP8: take {wanted} features instead of {found}, a smaller {axis.name}, or don't "
                    f"convert this layer"
                )


def to_fp8(
    product: Product, sharding: Sharding, name: str, kept: KeptWeight | None = None, all_gather: bool = False
) -> Product:
    """Return the form of a layer's product that computes in FP8."""
    check_blocks(sharding, name)

    def convert(base: Product) -> Product:
        if type(base) not in (Product, Fp8Product):
            raise ValueError(f"{name} computes with {base}, which has no FP8: don't convert this layer")
        old = base if isinstance(base, Fp8Product) else Fp8Product()
        return Fp8Product(base.split_backward, kept or old.kept, all_gather or old.all_gather)

    return product.change(convert)


class _Fp8Linear(Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None, regather: bool,
        main: tuple[Tensor, Tensor | None] | None, split: bool, kept: KeptWeight | None, add: bool,
    ) -> Tensor:  # fmt: skip
        whole = x if dim is None else gathered(start_all_gather(x, tp), tp, dim)
        wanted = ctx.needs_input_grad[1]
        rows, columns = quantize_fp8(flat_tokens(whole), columns=wanted and not regather)
        y = fp8_matmul(_given(rows), _form(kept, weight, False, ctx.needs_input_grad[0], add), x.dtype)
        if bias is not None:
            y += bias.to(y.dtype)
        saved = (None, None) if columns is None else columns
        ctx.save_for_backward(x if wanted and regather else None, *saved, weight)
        ctx.tp, ctx.dim, ctx.main, ctx.dtype, ctx.split, ctx.kept = tp, dim, main, weight.dtype, split, kept
        return unsafe_view(y, (*whole.shape[:-1], len(weight)))

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer in eight bits")
        x, values, scales, weight = ctx.saved_tensors
        tp, dim = ctx.tp, ctx.dim
        needed, nodes = ctx.needs_input_grad, ctx.next_functions
        for_x, for_weight, for_bias = (needed[i] and (not ctx.split or will_run(nodes[i][0])) for i in range(3))
        gathering = None if x is None or not for_weight else start_all_gather(x, tp)
        flat = flat_tokens(dy)
        rows, columns = quantize_fp8(flat, rows=for_x, columns=for_weight)
        dx = summing = dweight = None
        if rows is not None:
            dx = fp8_matmul(rows, _form(ctx.kept, weight, True), dy.dtype).view(*dy.shape[:-1], weight.shape[1])
            summing = start_sum(dx, tp, dim)
        weight_main, bias_main = ctx.main or (None, None)
        if columns is not None:
            if gathering is not None:
                whole = flat_tokens(gathered(gathering, tp, dim))
                values, scales = _given(quantize_fp8(whole, rows=False, columns=True)[1])
            dweight = add_or_return(weight_main, partial(_weight_product, ctx.dtype), *columns, values, scales)
        dbias = add_or_return(bias_main, column_sum, flat) if for_bias else None
        return dx if summing is None else wait(summing), dweight, cast(dbias, ctx.dtype), *[None] * 7


def _form(kept: KeptWeight | None, weight: Tensor, turned: bool, both: bool = False, add: bool = True) -> Quantized:
    """Return the quantized weight, or its transpose. While a graph is traced or captured, nothing is kept."""
    if isinstance(weight, Fp8Weight):
        return weight.form(turned)
    traced = torch.compiler.is_compiling() or has_no_values(weight) or is_tracing()
    if kept is None or traced or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _given(quantize_fp8(weight, square=True, rows=not turned, columns=turned)[turned])
    return kept.form(weight, turned, both, add)


def _weight_product(
    dtype: torch.dtype, main: Tensor | None, dy: Tensor, dy_scales: Tensor, x: Tensor, x_scales: Tensor
) -> Tensor:
    y = fp8_matmul(Quantized(dy, dy_scales), Quantized(x, x_scales), dtype if main is None else main.dtype)
    return y if main is None else main.add_(y)


def _given(x: Quantized | None) -> Quantized:
    assert x is not None
    return x
