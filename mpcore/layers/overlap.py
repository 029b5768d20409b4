"""Hide the messages of tensor parallelism under the products of linear layers, in forward too.

With sequence parallelism the all-gather before a product and the reduce-scatter after one run as a ring: each rank
multiplies the shard that is here while the next shard travels. Without it the all-reduce after a product runs in chunks
of the tokens: one chunk is summed while the next is multiplied.

Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition" (ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from mpcore._torch.dispatch import unsafe_view
from mpcore.collectives import start_all_gather, start_all_reduce, start_rows, wait
from mpcore.kernels._main_grad import add_or_return, main_grad
from mpcore.layers.linear import ParallelLinear
from mpcore.layers.linear_ops import (
    Product,
    autocast_dtype,
    cast,
    column_backward,
    flat_tokens,
    gathered,
    weight_product,
)
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh.agreement import gather_objects, raising_together
from mpcore.mesh.axis import Axis, Mesh
from mpcore.sharding.declarations import named_modules

_ALONE = Axis()
SMALLEST = 2**22
CHUNKS = 4  # of an all-reduce: a quarter of it stays exposed, and each chunk has the latency of a message


@dataclass(frozen=True)
class OverlapProduct(Product):
    """A `Product` whose communication runs beside its own parts. A split backward overlaps nothing."""

    smallest: int = SMALLEST

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None, regather: bool = False
    ) -> Tensor:
        if self.split_backward or dim is None or tp.size == 1 or x.numel() < self.smallest:
            return super().column(x, weight, bias, tp, dim, regather)
        return _apply(_RingColumn, x, weight, bias, (tp, dim, regather))

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None) -> Tensor:
        """See `Product.row`."""
        summed = x.numel() // x.shape[-1] * len(weight)  # the same on every rank: it decides about messages
        chunks = min(CHUNKS, summed // self.smallest) if dim is None else tp.size
        if self.split_backward or tp.size == 1 or chunks < 2 or summed < chunks * self.smallest:
            return super().row(x, weight, bias, tp, dim)
        kind, how = (_ChunkedRow, (tp, chunks)) if dim is None else (_RingRow, (tp, dim))
        y = _apply(kind, x, weight, None, how)
        return y if bias is None else y + bias.to(y.dtype)


def overlap_communication(model: nn.Module, smallest: int = SMALLEST) -> None:
    """Hide messages of tensor parallelism under products, in forward and backward, in all parallel linear layers.

    Call it on every rank, with the same arguments, before `prepare`. Results differ from those without it by the
    rounding of a sum in another order. Layers on a tp of size 1 compute as before.

    Args:
        model: the model, or a part of it.
        smallest: the number of elements of the smallest message that is worth a product of its own. Smaller layers
            communicate as before. A message has tokens x model width / tp elements. With the default 2^22 and hidden
            units of 4 widths on tp 8, a part's product has 2^21 outputs: 128 tiles of 128 x 128, about one for each of
            the 132 multiprocessors of an H100. Smaller products would leave some of them idle.

    Raises:
        ValueError: before anything is changed, if a layer computes in FP8 or with invariant numerics, whose sums have
            an order of their own.

    Example:
        >>> model = mpcore.ParallelMLP(4, 8)
        >>> mpcore.layers.overlap_communication(model)
        >>> model.up.product
        OverlapProduct(split_backward=False, smallest=4194304)
    """
    if smallest < 1:
        raise ValueError(f"smallest is {smallest} elements: it must be at least 1")
    layers = {name: layer for name, layer in named_modules(model) if isinstance(layer, ParallelLinear)}

    def convert(name: str, layer: ParallelLinear, base: Product) -> Product:
        if type(base) not in (Product, OverlapProduct) or layer.tp.sums is not None:
            why = f"computes with {base}" if layer.tp.sums is None else "has invariant numerics"
            raise ValueError(
                f"{name or 'the model'} {why}, whose communication can't be overlapped: leave out "
                f"overlap_communication, or prepare's overlap"
            )
        return OverlapProduct(base.split_backward, smallest)

    changed = {layer: layer.product.change(partial(convert, name, layer)) for name, layer in layers.items()}
    for layer, product in changed.items():
        layer.product = product


def overlap_stages(stages: Sequence[nn.Module], mesh: Mesh, smallest: int | bool) -> None:
    """Call `overlap_communication` on each stage of this rank.

    Raises:
        ValueError: on every rank, if no stage of the pipeline has a parallel linear layer on tp > 1.
    """
    layers = [layer for stage in stages for layer in stage.modules() if isinstance(layer, ParallelLinear)]
    if not any(gather_objects(any(layer.tp.size > 1 for layer in layers), mesh.pp.group)):
        raise ValueError(
            f"overlap={smallest} hides messages of parallel linear layers on tp > 1, and the model has none "
            f"(tp {mesh.tp.size}, {len(layers)} such layers on this rank): leave out overlap"
        )
    with raising_together():
        for stage in stages:
            overlap_communication(stage, SMALLEST if smallest is True else smallest)


def _apply(kind: type[Function], x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
    dtype = autocast_dtype(x)
    main = (weight, bias) if main_grad(weight) is not None and not torch.compiler.is_compiling() else None
    return kind.apply(cast(x, dtype), weight, bias, (*how, main, dtype))


def _ring(tp: Axis, rows: int) -> tuple[Axis, list[int], list[int]]:
    """Return what `start_rows` takes to send so many rows to the next rank and to receive as many of the last."""
    send, receive = [0] * tp.size, [0] * tp.size
    send[(tp.rank + 1) % tp.size] = receive[tp.rank - 1] = rows
    return tp, send, receive


def ring_gather(x: Tensor, tp: Axis, product: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return every rank's `x` of [T, D], and `product` of each, in the order of ranks. Shapes are equal."""
    shards, products = [x] * tp.size, [x] * tp.size
    ring = _ring(tp, len(x))
    for step in range(tp.size - 1):
        flying = start_rows(x, *ring)
        shards[tp.rank - step], products[tp.rank - step] = x, product(x)
        x = wait(flying)
    shards[tp.rank + 1 - tp.size], products[tp.rank + 1 - tp.size] = x, product(x)
    return shards, products


def ring_scatter(xs: Sequence[Tensor], tp: Axis, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum over ranks of `product(xs[tp.rank])`. `xs` has [T, D] for each rank; shapes are equal."""
    y = product(xs[tp.rank - 1])
    ring = _ring(tp, len(y))
    for step in range(2, tp.size + 1):
        flying = start_rows(y, *ring)
        y = product(xs[tp.rank - step])
        y += wait(flying)
    return y


def _parts(x: Tensor, size: int, dim: int) -> Sequence[Tensor]:
    """Return `size` parts of a sequence, each as [T, D]."""
    in_front = x.shape[:dim].numel() == 1  # they lie one behind the other: fewer calls
    return flat_tokens(x).chunk(size) if in_front else [flat_tokens(part) for part in x.chunk(size, dim)]


def _shard_shape(x: Tensor, size: int, dim: int, features: int) -> list[int]:
    """Return the shape of one of `size` parts of `x` after a product."""
    shape = [*x.shape[:-1], features]
    shape[dim] //= size
    return shape


def _along(parts: Sequence[Tensor], like: Tensor, dim: int) -> Tensor:
    """Lay parts of [T, F] along `dim`, in the shape of `like`, which is one part before its product."""
    shape = [*like.shape[:-1], parts[0].shape[-1]]
    if like.shape[:dim].numel() > 1:
        return torch.cat([part.view(shape) for part in parts], dim)
    shape[dim] *= len(parts)
    return torch.cat(list(parts)).view(shape)


class _RingColumn(Function):
    """`linear(all_gather(x, dim))`. Backward is `column_backward`, unless no product would hide its messages."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        ctx.how = tp, dim, regather, _, dtype = how
        w, b = cast(weight, dtype), cast(bias, dtype)
        shards, ys = ring_gather(flat_tokens(x).contiguous(), tp, lambda shard: F.linear(shard, w, b))
        kept = x if regather or not ctx.needs_input_grad[1] else _along(shards, x, dim)
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, weight)
        return _along(ys, x, dim)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        if ctx.needs_input_grad[:3] != (True, False, False):
            return column_backward(ctx, dy)
        refuse_second_derivative("a linear layer with overlapped communication")
        (_, weight), (tp, dim, *_) = ctx.saved_tensors, ctx.how
        weight = weight.to(dy.dtype)
        dx = ring_scatter(_parts(dy, tp.size, dim), tp, lambda part: part @ weight)
        return dx.view(_shard_shape(dy, tp.size, dim, weight.shape[1])), None, None, None


class _RingRow(Function):
    """`reduce_scatter(linear(x), dim)`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        ctx.how = tp, dim, _, dtype = how
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        w = cast(weight, dtype)
        y = ring_scatter(_parts(x, tp.size, dim), tp, lambda part: F.linear(part, w))
        return unsafe_view(y, _shard_shape(x, tp.size, dim, len(w)))  # no view: callers may write to the output

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer with overlapped communication")
        (x, weight), (tp, dim, main, _) = ctx.saved_tensors, ctx.how
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            w = weight.to(dy.dtype)
            shards, parts = ring_gather(flat_tokens(dy).contiguous(), tp, lambda part: part @ w)
            dx = _along(parts, dy, dim)
            dy = _along(shards, dy, dim) if ctx.needs_input_grad[1] else dy
        elif ctx.needs_input_grad[1]:
            dy = gathered(start_all_gather(dy, tp), tp, dim)
        if ctx.needs_input_grad[1]:
            dweight = add_or_return(main and main[0], weight_product, flat_tokens(dy), flat_tokens(x))
        return dx, cast(dweight, weight.dtype), None, None


class _ChunkedRow(Function):
    """`reduce(linear(x))`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        tp, chunks, main, dtype = how
        ctx.how = _ALONE, None, False, main, dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        w = cast(weight, dtype)
        flying = [start_all_reduce(F.linear(part, w), tp) for part in flat_tokens(x).chunk(chunks)]
        y = torch.cat([wait(part) for part in flying])
        return unsafe_view(y, (*x.shape[:-1], len(weight)))  # no view: callers may write to the output

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer with overlapped communication")
        return column_backward(ctx, dy)
