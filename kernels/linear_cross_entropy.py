"""A linear layer and the cross-entropy of its output, without ever holding all logits.

    logits = x W^T,  total = sum over rows of scale loss(logits, target),  loss as in `cross_entropy.py`
    dx = dlogits W,  dW = dlogits^T x

Rows come in chunks. For each, one product makes the logits, two kernels read them and turn them into their gradient in
place, and two products make dx and add to dW: three products in all, none of them done twice, since the gradient is
made in the forward pass (the backward pass only multiplies it by dtotal). At most one chunk of logits is alive.

Where the vocabulary is cut over ranks, W is this rank's rows of the whole, dx is one term of a sum over ranks, and
`gather` hands the statistics of a chunk, five numbers per row, to all of them.

Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2025), for the aim; the chunks follow Hsu et al.,
"Liger Kernel" (2024), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._dispatch import outside, refuse_second_derivative
from ._rows import ceil_div
from .cross_entropy import combine_stats, cross_entropy_backward, cross_entropy_stats, loss_of_stats

CHUNK_BYTES = 2**29


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    scale: Tensor,
    *,
    start: int = 0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    gather: Callable[[Tensor], Tensor] | None = None,
    chunk_rows: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """The sum over tokens of `scale * loss`, of the logits `x @ weight.T`.

    Args:
        x: `[N, D]`.
        weight: `[V/tp, D]`, this rank's rows.
        target: `[N]`, int64 or int32, ids in the whole vocabulary, or `ignore_index`. Only a CPU checks them: elsewhere
            one outside it has the logit 0. What `x` holds in an ignored row must be finite: dW is a product with it.
        scale: `[N]`, the weight of each token in the sum, of any dtype; not differentiated.
        start: the id of the first row of `weight`.
        vocab_size: V; `None`: `weight` has all of it.
        ignore_index, label_smoothing, z_loss, softcap: as in `cross_entropy.py`.
        gather: makes `[4, n]` statistics of this rank `[P, 4, n]`, of all P ranks; `None`: this rank has all.
        chunk_rows: tokens of a chunk, the same on all ranks; `None`: as many as make 512 MiB of logits.
        impl: `"triton"`, `"reference"`, or `None`, of the kernels of `cross_entropy.py`.

    Returns:
        A scalar, float32, or float64 for float64 logits. With `gather`, the gradient of `x` is one term of the sum over
        ranks.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, `impl` can't run here, or (on a CPU) a target lies
            outside the vocabulary.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not [N, D] and [V, D]")
    device = x.device.type
    if x.dtype != weight.dtype and (device == "meta" or not torch.is_autocast_enabled(device)):
        raise ValueError(f"x is {x.dtype}, but weight is {weight.dtype}: cast one of them")
    for name, row in (("target", target), ("scale", scale)):
        if row.shape != x.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(row.shape)}, but x has {x.shape[0]} rows")
    if chunk_rows is None:
        chunk_rows = rows_of_chunk(x, weight.shape[0])
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows {chunk_rows} is not positive")
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    wrong = outside(target, vocab_size, ignore_index)
    if wrong is not None:
        raise ValueError(f"target {wrong} is outside the vocabulary of {vocab_size}")
    loss = {
        "vocab_size": vocab_size,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
    }
    logits = {"start": start, "ignore_index": ignore_index, "softcap": softcap, "impl": impl}
    scale = scale.detach().to(torch.promote_types(x.dtype, torch.float32))
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
    return _LinearCrossEntropy.apply(x, weight, target, scale, gather, chunk_rows, loss, logits, wanted)


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    scale: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """`linear_cross_entropy` of a whole vocabulary in plain torch, under torch's own autograd, with all logits."""
    z = x @ weight.t()
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    loss = torch.nn.functional.cross_entropy(
        z, target.long(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    if z_loss:
        loss = loss + z_loss * z.logsumexp(-1).square().masked_fill(target == ignore_index, 0)
    return (loss * scale.detach().to(loss.dtype)).sum()


def rows_of_chunk(x: Tensor, columns: int) -> int:
    """Rows of `x` `[N, D]` whose `columns` logits fill `CHUNK_BYTES`: equal chunks, of whole tiles of 128 if many."""
    most = max(1, CHUNK_BYTES // (max(columns, 1) * x.element_size()))
    rows = ceil_div(x.shape[0], max(1, ceil_div(x.shape[0], most)))
    return max(1, ceil_div(rows, 128) * 128 if rows > 128 else rows)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, scale, gather, chunk_rows, loss, logits, wanted):
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
        dweight = None
        total = scale.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for first in range(0, x.shape[0], chunk_rows):
            rows = slice(first, first + chunk_rows)
            z = x[rows] @ weight.t()
            stats = cross_entropy_stats(z, target[rows], sum_logits=loss["label_smoothing"] > 0, **logits)
            stats = stats if gather is None else combine_stats(gather(stats))
            total = total + (loss_of_stats(stats, target[rows], **loss) * scale[rows]).sum()
            if not any(wanted):
                continue
            dz = cross_entropy_backward(z, target[rows], stats, scale[rows], in_place=True, **(logits | loss))
            if dx is not None:
                dx[rows] = dz @ weight
            if wanted[1]:
                term = dz.t() @ x[rows]
                several = x.shape[0] > chunk_rows  # whose sum is taken in float32
                term = term.to(torch.promote_types(term.dtype, torch.float32)) if several else term
                dweight = term if dweight is None else dweight.add_(term)
            del z, dz  # before the next chunk's are made
        if wanted[1] and dweight is None:
            dweight = torch.zeros_like(weight)
        ctx.save_for_backward(dx, dweight)
        ctx.dtypes = x.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx, dtotal):
        refuse_second_derivative("linear_cross_entropy", "torch.nn.functional.cross_entropy of the logits")
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((None if d is None else (d * dtotal).to(dtype)) for d, dtype in gradients), *[None] * 7
