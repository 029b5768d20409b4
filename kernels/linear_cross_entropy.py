"""Chunked linear cross-entropy: the loss of a linear layer's output, with the logits of a chunk of tokens at a time.

    logits = x W^T,  total = sum over rows of scale loss(logits, target),  loss as in `cross_entropy.py`
    dx = dlogits W,  dW = dlogits^T x

For each chunk of rows, one product computes the logits, two kernels replace them in place by their gradient, and two
products compute dx and add to dW. The forward pass computes the gradients, and the backward pass only multiplies them
by dtotal. A loss, log p or entropy of each row has a gradient that only the backward pass knows, so there the logits of
each chunk are computed again: four products. A single chunk is kept for it: three. Several chunks sum dW in float32. If
the logits of all tokens take no more memory than that sum and a chunk, one chunk is faster and takes no more.

Where the vocabulary is sharded over ranks, W holds this rank's rows and dx is one term of a sum over ranks. The forward
pass calls `gather` to all-gather the statistics of each chunk, five numbers per row.

Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2025), for the aim; the chunks follow Hsu et al.,
"Liger Kernel" (2024), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._checks import can_read, check_shapes, outside
from ._dispatch import refuse_second_derivative
from ._main_grad import add_product, remember_main_grad, take_main_grad
from ._rows import ceil_div
from ._torch import graph_is_kept
from .cross_entropy import (
    Loss,
    combine_stats,
    cross_entropy_backward,
    cross_entropy_stats,
    log_prob_of_stats,
    loss_of_stats,
)

CHUNK_BYTES = 2**29


class HeadOptions(TypedDict, total=False):
    """How the functions below compute and read the logits `x @ weight.T`.

    Attributes:
        impl: the parameter of `cross_entropy_stats`.
        gather: all-gathers statistics `[4 or 5, n]` of this rank to `[P, 4 or 5, n]` of all P ranks; by default there
            is one rank. With `gather`, the gradient of `x` is one term of the sum over ranks.
        chunk_rows: tokens of a chunk, the same on all ranks; by default as many as make 512 MiB of logits, or all if
            their logits are no larger than the float32 gradient of the weight that several chunks need, and a chunk.
    """

    gather: Callable[[Tensor], Tensor] | None
    chunk_rows: int | None
    impl: str | None


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, scale: Tensor, loss: Loss | None = None, **options: Unpack[HeadOptions]
) -> Tensor:
    """Compute the sum over tokens of `scale * loss` for the logits `x @ weight.T`.

    Args:
        x: `[N, D]`.
        weight: `[V/tp, D]`, this rank's rows. If it has a `main_grad` (float32), its gradient is added there.
        target: `[N]`, int64 or int32, ids in the whole vocabulary, or `ignore_index`. Ids are checked on a CPU only;
            elsewhere an id outside the vocabulary counts as a logit of 0. Rows of `x` with an ignored target count as 0
            in dW, whatever they hold.
        scale: `[N]`, the weight of each token in the sum, of any dtype; not differentiated.
        loss: the terms of the loss; by default `weight` has all rows, and the loss is the plain cross-entropy.
        options: of `HeadOptions`.

    Returns:
        A scalar, float32, or float64 for float64 logits.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, `impl` can't run here, or (on a CPU) a target lies
            outside the vocabulary.

    Example:
        >>> x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
        >>> loss = linear_cross_entropy(x, weight, torch.arange(6), torch.full((6,), 1 / 6), chunk_rows=2)
        >>> loss.backward()
        >>> tuple(x.grad.shape), tuple(weight.grad.shape)
        ((6, 4), (10, 4))
    """
    head = _Head.of(x, weight, target, scale, loss, **options)
    scale = scale.detach().to(torch.promote_types(x.dtype, torch.float32))
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
    return _LinearCrossEntropy.apply(x, weight, target, scale, head, wanted)


def linear_cross_entropy_rows(
    x: Tensor, weight: Tensor, target: Tensor, loss: Loss | None = None, **options: Unpack[HeadOptions]
) -> Tensor:
    """Compute the loss of each token for the logits `x @ weight.T`. Backward recomputes the logits of several chunks.

    Args:
        x, weight, target, loss, options: the parameters of `linear_cross_entropy`. Backward keeps the three tensors,
            and the logits if all tokens are one chunk.

    Returns:
        `[N]`, float32, or float64 for float64 logits; 0 for ignored tokens.

    Raises:
        ValueError: as `linear_cross_entropy`.
    """
    return _LinearRows.apply(x, weight, target, _Head.of(x, weight, target, None, loss, **options), False)


def linear_log_prob(
    x: Tensor, weight: Tensor, target: Tensor, loss: Loss | None = None, **options: Unpack[HeadOptions]
) -> tuple[Tensor, Tensor]:
    """Compute log p of each target and the entropy of p for the logits `x @ weight.T`, in chunks of tokens.

    Args:
        x, weight, target, options: the parameters of `linear_cross_entropy_rows`.
        loss: the columns, `ignore_index` and `softcap` of the logits.

    Returns:
        `(log_prob, entropy)`, each `[N]`, float32, or float64 for float64 logits; 0 for ignored tokens.

    Raises:
        ValueError: as `linear_cross_entropy`.
    """
    return _LinearRows.apply(x, weight, target, _Head.of(x, weight, target, None, loss, **options), True)


def rows_of_chunk(x: Tensor, columns: int, weight: Tensor) -> int:
    """Return how many rows of `x` `[N, D]` make a chunk of at most `CHUNK_BYTES` of logits: equal chunks, in 128s.

    With a gradient of a 16-bit `weight`, several chunks need its sum in float32. All rows are one chunk if their logits
    are no larger than that sum and a chunk.
    """
    of_row = max(columns, 1) * x.element_size()
    wanted = torch.is_grad_enabled() and weight.requires_grad
    if wanted and x.element_size() == 2 and x.shape[0] * of_row <= CHUNK_BYTES + 4 * columns * x.shape[1]:
        return max(1, x.shape[0])
    most = max(1, CHUNK_BYTES // of_row)
    rows = ceil_div(x.shape[0], max(1, ceil_div(x.shape[0], most)))
    return max(1, ceil_div(rows, 128) * 128 if rows > 128 else rows)


@dataclass(frozen=True)
class _Head:
    loss: Loss
    gather: Callable[[Tensor], Tensor] | None
    chunk_rows: int
    impl: str | None
    dtype: torch.dtype  # of the logits

    @staticmethod
    def of(
        x: Tensor, weight: Tensor, target: Tensor, scale: Tensor | None, loss: Loss | None, *,
        gather: Callable[[Tensor], Tensor] | None = None, chunk_rows: int | None = None, impl: str | None = None,
    ) -> _Head:  # fmt: skip
        """Raise `ValueError` unless the parameters of the public functions go together; return how to read logits."""
        check_shapes(x=(x, "N D"), weight=(weight, "V D"), target=(target, "N"), scale=(scale, "N"))
        device = x.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        if x.dtype != weight.dtype and not autocast:
            raise ValueError(f"x is {x.dtype}, but weight is {weight.dtype}: cast one of them")
        chunk_rows = rows_of_chunk(x, weight.shape[0], weight) if chunk_rows is None else chunk_rows
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows {chunk_rows} is not positive")
        loss = Loss(weight.shape[0]) if loss is None else loss
        wrong = outside(target, loss.vocab_size, loss.ignore_index)
        if wrong is not None:
            raise ValueError(f"target {wrong} is outside the vocabulary of {loss.vocab_size}")
        dtype = torch.get_autocast_dtype(device) if autocast and x.dtype != torch.float64 else x.dtype
        return _Head(loss, gather, chunk_rows, impl, dtype)

    def stats(self, z: Tensor, target: Tensor, entropy: bool = False) -> Tensor:
        """Return the statistics of a chunk, merged over ranks."""
        stats = cross_entropy_stats(z, target, self.loss, entropy=entropy, impl=self.impl)
        return stats if self.gather is None else combine_stats(self.gather(stats))

    def backward(self, z: Tensor, target: Tensor, stats: Tensor, in_place: bool = True, **given: Tensor) -> Tensor:
        """Return the gradient of the logits: in place, unless they are kept."""
        return cross_entropy_backward(z, target, stats, self.loss, in_place=in_place, impl=self.impl, **given)

    def products(
        self, x: Tensor, weight: Tensor, target: Tensor, wanted: Sequence[bool],
        gradient: Callable[[Tensor, slice], Tensor | None], logits: Tensor | None = None, main: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Return dx and dweight (added to `main`), each if wanted; `gradient(z, rows)` returns that of logits z."""
        ignored = (target == self.loss.ignore_index).unsqueeze(1)
        narrow = weight.to(self.dtype)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
        dweight = main
        for first in range(0, x.shape[0], self.chunk_rows):
            rows = slice(first, first + self.chunk_rows)
            part = x[rows].to(self.dtype)
            dz = gradient(part @ narrow.t() if logits is None else logits, rows)
            if dz is None:
                continue
            if dx is not None:
                dx[rows] = dz @ narrow
            if wanted[1]:
                part = part.masked_fill(ignored[rows], 0)  # 0 times NaN would be in dW
            if wanted[1] and main is None and x.shape[0] <= self.chunk_rows:
                dweight = dz.t() @ part
            elif wanted[1]:
                dweight = add_product(dweight, dz.t(), part, torch.promote_types(dz.dtype, torch.float32))
            del dz  # before the next chunk's logits exist
        if wanted[1] and dweight is None:
            dweight = torch.zeros_like(weight)
        return dx, dweight


def _scaled(d: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `factor` d, rounded once to `dtype`, in one pass: in place if this is the last backward pass."""
    last = not graph_is_kept()
    if last and can_read(factor) and factor == 1:
        return d.to(dtype)
    return torch.mul(d, factor, out=d if last and d.dtype == dtype else d.new_empty(d.shape, dtype=dtype))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, scale, head: _Head, wanted):
        totals = [scale.new_zeros(())]

        def gradient(z: Tensor, rows: slice) -> Tensor | None:
            stats = head.stats(z, target[rows])
            totals.append((loss_of_stats(stats, target[rows], head.loss) * scale[rows]).sum())
            return head.backward(z, target[rows], stats, dloss=scale[rows]) if any(wanted) else None

        ctx.save_for_backward(*head.products(x, weight, target, wanted, gradient))
        ctx.dtypes, ctx.main = (x.dtype, weight.dtype), remember_main_grad(weight) if wanted[1] else None
        return torch.stack(totals).sum()

    @staticmethod
    def backward(ctx, dtotal):
        refuse_second_derivative("linear_cross_entropy", "torch.nn.functional.cross_entropy of the logits")
        (dx, dweight), (main,) = ctx.saved_tensors, take_main_grad(ctx.main) or (None,)
        if main is not None:
            main.addcmul_(dweight, dtotal)
            dweight = None
        scaled = zip((dx, dweight), ctx.dtypes, strict=True)
        return *(None if d is None else _scaled(d, dtotal, dtype) for d, dtype in scaled), *[None] * 4


class _LinearRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, head: _Head, log_prob: bool):
        stats = x.new_empty((4 + log_prob, x.shape[0]), dtype=torch.promote_types(x.dtype, torch.float32))
        logits: list[Tensor] = []

        def keep(z: Tensor, rows: slice) -> None:
            stats[:, rows] = head.stats(z, target[rows], entropy=log_prob)
            if x.shape[0] <= head.chunk_rows and any(ctx.needs_input_grad):
                logits.append(z)

        head.products(x, weight, target, (False, False), keep)
        ctx.save_for_backward(x, weight, target, stats, *logits)
        ctx.head, ctx.main = head, remember_main_grad(weight) if ctx.needs_input_grad[1] else None
        if log_prob:
            ctx.name, ctx.outputs = "linear_log_prob", ("dlog_prob", "dentropy")
            return log_prob_of_stats(stats, target, head.loss)
        ctx.name, ctx.outputs = "linear_cross_entropy_rows", ("dloss",)
        return loss_of_stats(stats, target, head.loss)

    @staticmethod
    def backward(ctx, *given):
        refuse_second_derivative(ctx.name, "torch.log_softmax of the logits")
        head, (x, weight, target, stats, *logits) = ctx.head, ctx.saved_tensors
        in_place = not logits or not graph_is_kept()

        def gradient(z: Tensor, rows: slice) -> Tensor:
            of_rows = {name: d[rows] for name, d in zip(ctx.outputs, given, strict=True)}
            return head.backward(z, target[rows], stats[:, rows], in_place, **of_rows)

        (main,) = take_main_grad(ctx.main) or (None,)
        dx, dweight = head.products(x, weight, target, ctx.needs_input_grad, gradient, *(logits or [None]), main)
        return dx, None if dweight is main else dweight.to(weight.dtype), *[None] * 3  # `None`, or added to it
