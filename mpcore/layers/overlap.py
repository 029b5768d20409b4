"""Hide the messages of tensor parallelism under the products of linear layers, in forward too.

With sequence parallelism the all-gather before a product and the reduce-scatter after one run in parts: each rank
multiplies the shard that is here while those of the other ranks travel. Without it the all-reduce after a product runs
in chunks of the tokens: one chunk is summed while the next is multiplied.

Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition" (ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from mpcore._torch.dispatch import unsafe_view
from mpcore.collectives import shards_in_front, start_all_gather, start_all_reduce, start_rows, wait
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
        return _apply(_GatherColumn, x, weight, bias, (self, tp, dim, regather))

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None) -> Tensor:
        summed = x.numel() // x.shape[-1] * len(weight)  # the same on every rank: it decides about messages
        chunks = min(CHUNKS, summed // self.smallest) if dim is None else tp.size
        if self.split_backward or tp.size == 1 or chunks < 2 or summed < chunks * self.smallest:
            return super().row(x, weight, bias, tp, dim)
        kind, how = (_ChunkedRow, (tp, chunks)) if dim is None else (_ScatterRow, (self, tp, dim))
        y = _apply(kind, x, weight, None, how)
        return y if bias is None else y + bias.to(y.dtype)

    def all_gather_linear(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None, tp: Axis, dim: int, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """Return `all_gather(x, dim)` (x itself, if not `keep`) and its product with `matrix` [D, F], plus the bias.

        The shard that is here is multiplied while the shards of the other ranks travel.
        """
        shard, (messages, order) = flat_tokens(x).contiguous(), _messages(tp.rank, tp.size)
        rows, largest = len(shard), max(message.ranks for message in messages)
        copies = torch.cat([shard] * largest) if largest > 1 else shard
        flying = [message.start(copies[: rows * sum(message.send)], tp, rows) for message in messages]
        parts, ys = [shard], [_multiply(shard, matrix, bias)]
        for part in map(wait, flying):
            parts.append(part)
            ys.append(_multiply(part, matrix, bias))
        return _along(parts, order, x, tp, dim) if keep else x, _along(ys, order, x, tp, dim)

    def linear_reduce_scatter(self, x: Tensor, matrix: Tensor, tp: Axis, dim: int) -> Tensor:
        """Return `reduce_scatter(x @ matrix, dim)`. The shards of other ranks are multiplied first, this one's last."""
        flat = flat_tokens(x if x.shape[:dim].numel() == 1 else shards_in_front(x, tp.size, dim))
        rows, flying = len(flat) // tp.size, []
        own = flat[tp.rank * rows : (tp.rank + 1) * rows]
        for message in reversed(_messages(tp.rank, tp.size)[0]):
            part = flat[message.to * rows : (message.to + message.ranks) * rows]
            if message.to <= tp.rank < message.to + message.ranks:
                before = (tp.rank - message.to) * rows
                part = torch.cat([part[:before], part[before + rows :]])
            flying.append(message.start(part @ matrix, tp, rows))
        own = own @ matrix
        y = torch.cat([own, *map(wait, flying)]).view(tp.size, *own.shape).sum(0)
        shape = [*x.shape[:-1], matrix.shape[1]]
        shape[dim] //= tp.size
        return unsafe_view(y, shape)  # no view: callers may write to the output


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
    """Call `overlap_communication` on each stage of this rank. Refuse a pipeline without a linear layer on tp > 1."""
    named = [each for stage in stages for each in named_modules(stage)]
    here = [(name, layer.tp.size) for name, layer in named if isinstance(layer, ParallelLinear)]
    found = [each for of_rank in gather_objects(here, mesh.pp.group) for each in of_rank]
    if all(size == 1 for _, size in found):
        which = f", all built with tp 1, such as {found[0][0] or 'the model'}" if found else ""
        raise ValueError(
            f"overlap={smallest} hides messages of parallel linear layers on tp > 1. The mesh has tp {mesh.tp.size}, "
            f"and the model has {len(found)} such layers{which}: pass them tp=mesh.tp, or leave out overlap"
        )
    with raising_together():
        for stage in stages:
            overlap_communication(stage, SMALLEST if smallest is True else smallest)


def _apply(kind: type[Function], x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
    dtype = autocast_dtype(x)
    main = (weight, bias) if main_grad(weight) is not None and not torch.compiler.is_compiling() else None
    return kind.apply(cast(x, dtype), weight, bias, (*how, main, dtype))


class _Message(NamedTuple):
    """A message to `ranks` neighbouring ranks from `to` on, and from as many from `source` on, but not to this one.

    `send` and `receive` have 1 for each rank that takes part, and 0 for the others.
    """

    to: int
    source: int
    ranks: int
    send: list[int]
    receive: list[int]

    def start(self, x: Tensor, tp: Axis, rows: int) -> Tensor:
        """Start to send `rows` of x to each of its ranks. `wait` returns those of the ranks that it comes from."""
        return start_rows(x, tp, [rows * n for n in self.send], [rows * n for n in self.receive])


class _Order(NamedTuple):
    """Where the shards of neighbouring ranks lie: shards `first` to below `last` of a part, or all of it.

    Part 0 is this rank's shard, part i what message i - 1 brings.
    """

    part: int
    first: int
    last: int
    whole: bool


@cache
def _messages(rank: int, size: int) -> tuple[list[_Message], list[_Order]]:
    """Return the messages of a rank, and the order in which what they bring makes the whole.

    Blocks of ranks grow: of 4 ranks, rank 0 exchanges with 1, then with 2 and 3. More than 4 ranks begin with the
    others of a block of 4 in one message, because a message costs host time: then rank 0 of 8 exchanges with 4 to 7.
    """
    found, ranks = [], 1
    if size % 4 == 0 and size > 4:
        first, ranks = rank - rank % 4, 4
        found.append((first, first, 4))
    while ranks < size:
        factor = 2
        while size // ranks % factor:
            factor += 1
        mine = rank // ranks
        first = mine - mine % factor
        for step in range(1, factor):
            to, source = first + (mine + step) % factor, first + (mine - step) % factor
            found.append((to * ranks, source * ranks, ranks))
        ranks *= factor

    def taking(start: int, ranks: int) -> list[int]:
        return [int(start <= other < start + ranks and other != rank) for other in range(size)]

    messages = [_Message(to, source, n, taking(to, n), taking(source, n)) for to, source, n in found]
    parts = [[rank], *([other for other in range(size) if message.receive[other]] for message in messages)]
    place = {other: (part, at) for part, ranks_of in enumerate(parts) for at, other in enumerate(ranks_of)}
    order: list[_Order] = []
    for part, at in (place[other] for other in range(size)):
        follows = order and (order[-1].part, order[-1].last) == (part, at)
        first = order.pop().first if follows else at
        order.append(_Order(part, first, at + 1, (first, at + 1) == (0, len(parts[part]))))
    return messages, order


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return x @ matrix if bias is None else torch.addmm(bias, x, matrix)


def _along(parts: list[Tensor], order: list[_Order], like: Tensor, tp: Axis, dim: int) -> Tensor:
    """Lay the shards of all ranks along `dim`. Before its product, a shard has the shape of `like`.

    Args:
        parts: see `_Order`; each has rows of [.., F].
    """
    rows = len(parts[0])
    ordered = [parts[each.part] if each.whole else parts[each.part][each.first * rows : each.last * rows]
               for each in order]  # fmt: skip
    shape = [*like.shape[:-1], parts[0].shape[-1]]
    if like.shape[:dim].numel() > 1:
        tokens = max(rows, 1)
        whole = torch.cat([part.view(len(part) // tokens, *shape).movedim(0, dim) for part in ordered], dim)
    else:
        whole = torch.cat(ordered)
    shape[dim] *= tp.size
    return whole.view(shape)


class _GatherColumn(Function):
    """`linear(all_gather(x, dim))`. Backward is `column_backward`, unless no product would hide its messages."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        (ctx.product, *_), ctx.how = how, how[1:]
        tp, dim, regather, _, dtype = ctx.how
        keep = ctx.needs_input_grad[1] and not regather
        whole, y = ctx.product.all_gather_linear(x, cast(weight, dtype).t(), cast(bias, dtype), tp, dim, keep)
        ctx.save_for_backward(whole if ctx.needs_input_grad[1] else None, weight)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        if ctx.needs_input_grad[:3] != (True, False, False):
            return column_backward(ctx, dy)
        refuse_second_derivative("a linear layer with overlapped communication")
        (_, weight), (tp, dim, *_) = ctx.saved_tensors, ctx.how
        return ctx.product.linear_reduce_scatter(dy, weight.to(dy.dtype), tp, dim), None, None, None


class _ScatterRow(Function):
    """`reduce_scatter(linear(x), dim)`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        ctx.how = product, tp, dim, _, dtype = how
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return product.linear_reduce_scatter(x, cast(weight, dtype).t(), tp, dim)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer with overlapped communication")
        (x, weight), (product, tp, dim, main, _) = ctx.saved_tensors, ctx.how
        dx, dweight, keep = None, None, ctx.needs_input_grad[1]
        if ctx.needs_input_grad[0]:
            dy, dx = product.all_gather_linear(dy, weight.to(dy.dtype), None, tp, dim, keep)
        elif keep:
            dy = gathered(start_all_gather(dy, tp), tp, dim)
        if keep:
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
