"""Cross-entropy of logits whose vocabulary is sharded over the tensor-parallel axis, with one small collective.

For each row, each rank computes over its own columns the maximum m_r, the sum of exponentials s_r = sum exp(z - m_r),
the target's logit t_r (0 if another rank holds it) and the sum of logits u_r. An all-gather of these numbers gives
    lse = log sum_r s_r exp(m_r - m) + m,  m = max_r m_r,     target = sum_r t_r,     mean = sum_r u_r / V
    loss = lse - (1 - a) target - a mean + z lse^2            (a: label smoothing, z: z-loss)
and backward needs no collective: dlogits = p (1 + 2 z lse) - (1 - a) onehot - a / V, with p = exp(logits - lse).

On a GPU the kernels of `mpcore/kernels/cross_entropy.py` compute this and keep only the logits for backward. On a CPU,
exponentials are expensive, so the softmax is computed once and kept.

Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, for the sharding; Szegedy et al. 2016 (arXiv:1512.00567),
section 7, for smoothing; Chowdhery et al. 2022 (arXiv:2204.02311), section 5, for the z-loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import Unpack

from mpcore import collectives
from mpcore._torch.autograd import graph_is_kept
from mpcore.collectives import shard_range, start_all_gather, wait
from mpcore.kernels import linear_cross_entropy as fused
from mpcore.kernels._dispatch import runs_triton
from mpcore.kernels.cross_entropy import (
    Loss,
    combine_stats,
    cross_entropy_backward,
    cross_entropy_stats,
    log_prob_of_stats,
    loss_of_stats,
)
from mpcore.layers.embedding import check_ids
from mpcore.layers.linear import check_size
from mpcore.layers.module import check_names, refuse_second_derivative
from mpcore.mesh.axis import Axis, check_axis
from mpcore.sharding.local import is_dtensor


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    tp: Axis = Axis(name="tp"),
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute the cross-entropy of each token from this rank's columns of the logits. Inputs are never changed.

    Args:
        logits: [..., V/tp], any floating dtype, this rank's shard of the vocabulary: what `ColumnParallelLinear`
            returns without `gather_output`.
        target: integer ids [...] in [0, V) or `ignore_index`, the same on every rank.
        tp: the axis over which the vocabulary is sharded.
        vocab_size: V. Required if tp has more than one rank, because shards may be uneven. None: the width of logits.
        ignore_index: tokens with this target have loss 0 and gradient 0, and don't count in the mean.
        label_smoothing: a, the weight of the uniform distribution over the vocabulary.
        z_loss: weight of the squared log-sum-exp.
        softcap: c, replaces the logits by c tanh(logits / c); 0: no soft cap.
        token_weight: [...], each token's weight in the loss and in the mean's divisor; the same on every rank.
        reduction: "mean" over the tokens that are not ignored (0 if there are none), "sum" or "none".

    Returns:
        fp32 (fp64 for fp64 logits): a scalar, or [...] with "none".

    Raises:
        ValueError: before any collective, if shapes don't fit, `vocab_size` is missing, or (on a CPU) a target lies
            outside the vocabulary.

    Example:
        >>> logits, target = torch.zeros(2, 3, 8), torch.tensor([[1, 2, 3], [4, 5, -100]])
        >>> mpcore.vocab_parallel_cross_entropy(logits, target)  # log(8)
        tensor(2.0794)
    """
    _check_loss(target, reduction, label_smoothing, token_weight)
    given = {"ignore_index": ignore_index, "softcap": softcap, "label_smoothing": label_smoothing, "z_loss": z_loss}
    terms = _loss_of(logits.shape, target, tp, vocab_size, **given)
    if tp.sums is not None or runs_triton(None, logits, "cross_entropy"):
        loss = _FusedCrossEntropy.apply(logits, target, terms, tp, False)
    else:
        if softcap:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            wide = wide.masked_fill((target == ignore_index).unsqueeze(-1), 0)  # else 0 times NaN
            logits = softcap * torch.tanh(wide / softcap)
        loss = _CrossEntropy.apply(logits, target, terms, tp)
    if token_weight is not None:
        token_weight = token_weight.masked_fill(target == ignore_index, 0)  # else 0 times NaN
        loss = loss * token_weight
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / _divisor(target, ignore_index, token_weight)


def vocab_parallel_log_prob(
    logits: Tensor,
    target: Tensor,
    *,
    tp: Axis = Axis(name="tp"),
    vocab_size: int | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of each distribution. Inputs are never changed.

    Args:
        logits, target, tp, vocab_size, ignore_index, softcap: see `vocab_parallel_cross_entropy`.

    Returns:
        `(log_prob, entropy)`, differentiable, each [...] in nats, in fp32 (fp64 for fp64 logits); 0 if ignored.

    Example:
        >>> log_prob, entropy = mpcore.layers.vocab_parallel_log_prob(torch.zeros(3, 8), torch.tensor([1, 2, -100]))
        >>> log_prob
        tensor([-2.0794, -2.0794,  0.0000])
    """
    terms = _loss_of(logits.shape, target, tp, vocab_size, ignore_index=ignore_index, softcap=softcap)
    return _FusedCrossEntropy.apply(logits, target, terms, tp, True)


class HeadLossOptions(TypedDict, total=False):
    """Keyword arguments of a loss of `x @ weight.T`.

    Attributes:
        chunk_rows: tokens per chunk; None: those of 512 MiB of logits, or all if several chunks need more memory.
    """

    tp: Axis
    vocab_size: int | None
    ignore_index: int
    softcap: float
    sequence_parallel: bool
    sequence_dim: int
    chunk_rows: int | None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    **head: Unpack[HeadLossOptions],
) -> Tensor:
    """Compute `vocab_parallel_cross_entropy(x @ weight.T, target)` chunk by chunk.

    Forward computes the gradients too, in three products per chunk: the logits, the gradients of x and of the weight.
    With reduction "none", backward computes the logits of several chunks again.

    Args:
        x: [..., D], the same on every rank of tp; with `sequence_parallel` this rank's equal shard of the sequence.
        weight: [V/tp, D], this rank's shard of the head weight, as a `ColumnParallelLinear` without bias holds it.
        target: integer ids [...] of the full sequence, the same on every rank.
        label_smoothing, z_loss, reduction: see `vocab_parallel_cross_entropy`.
        token_weight: see `vocab_parallel_cross_entropy`. It gets a gradient only with reduction "none".
        head: tp, vocab_size, ignore_index, softcap, sequence_parallel, sequence_dim, chunk_rows: see `HeadLossOptions`.

    Returns:
        The loss in fp32 (fp64 if x is fp64): a scalar; with reduction "none", [...] for the full sequence.

    Raises:
        ValueError: before any collective, if shapes don't fit, or (on a CPU) a target lies outside the vocabulary.

    Example:
        >>> head = mpcore.ColumnParallelLinear(4, 8, bias=False)
        >>> x, target = torch.zeros(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
        >>> mpcore.linear_cross_entropy(x, head.weight, target).item()  # log(8)
        2.0794...
    """
    _check_loss(target, reduction, label_smoothing, token_weight)
    extra = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    if reduction != "none" and token_weight is not None and token_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"reduction {reduction!r} gives token_weight no gradient: detach it, or take 'none'")
    rows, terms, options = _head("linear_cross_entropy", x, weight, target, extra, **head)
    if token_weight is not None:
        token_weight = token_weight.masked_fill(target == terms.ignore_index, 0)  # else 0 times NaN
    if reduction == "none":
        loss = _shaped(fused.linear_cross_entropy_rows(*rows, terms, **options), target)
        return loss if token_weight is None else loss * token_weight
    exact = torch.promote_types(x.dtype, torch.float32)
    scale = x.new_ones(target.shape, dtype=exact) if token_weight is None else token_weight.to(exact)
    total = fused.linear_cross_entropy(*rows, scale.reshape(-1), terms, **options)
    return total if reduction == "sum" else total / _divisor(target, terms.ignore_index, token_weight)


def linear_log_prob(
    x: Tensor, weight: Tensor, target: Tensor, **head: Unpack[HeadLossOptions]
) -> tuple[Tensor, Tensor]:
    """Compute `vocab_parallel_log_prob(x @ weight.T, target)` chunk by chunk.

    Backward computes the logits of several chunks again. Those of a single chunk are kept: pass a smaller `chunk_rows`
    if many outputs wait for their backward.

    Args:
        x, weight, target, head: see `linear_cross_entropy`, which also raises the same errors.

    Returns:
        `(log_prob, entropy)`, each of the shape of `target`, as of `vocab_parallel_log_prob`.

    Example:
        >>> head = mpcore.ColumnParallelLinear(4, 8, bias=False)
        >>> target = torch.tensor([1, 2, -100])
        >>> log_prob, entropy = mpcore.layers.linear_log_prob(torch.zeros(3, 4), head.weight, target)
        >>> log_prob.detach()
        tensor([-2.0794, -2.0794,  0.0000])
    """
    rows, terms, options = _head("linear_log_prob", x, weight, target, {}, **head)
    log_prob, entropy = fused.linear_log_prob(*rows, terms, **options)
    return _shaped(log_prob, target), _shaped(entropy, target)


def _head(
    what: str, x: Tensor, weight: Tensor, target: Tensor, extra: dict[str, Any], *, tp: Axis = Axis(name="tp"),
    vocab_size: int | None = None, chunk_rows: int | None = None, sequence_parallel: bool = False,
    sequence_dim: int = 1, **columns: Any,
) -> tuple[tuple[Tensor, Tensor, Tensor], Loss, fused.HeadOptions]:  # fmt: skip
    """Return the rows of the full sequence, the weight, the targets, the loss and the options for the kernels."""
    check_axis(tp)
    if tp.sums is not None:
        raise ValueError(f"{what} can't sum as {tp.name} asks, {tp.sums}: take vocab_parallel_cross_entropy of logits")
    check_names(columns, HeadLossOptions)
    if is_dtensor(weight):
        raise ValueError(
            f"the weight is this rank's shard over data: call {what} inside the model's forward (and that of the block "
            f"that holds the head), where parameters are gathered, and let it return what {what} does"
        )
    tokens, gathered = list(x.shape[:-1]), sequence_parallel and tp.size > 1
    if gathered:
        if not 0 <= sequence_dim < len(tokens):
            raise ValueError(f"sequence_dim {sequence_dim} is none of {len(tokens)} in front of D in x {list(x.shape)}")
        tokens[sequence_dim] *= tp.size
    terms = _loss_of((*tokens, weight.shape[0]), target, tp, vocab_size, **columns, **extra)
    x = collectives.all_gather(x, tp, sequence_dim) if gathered else collectives.copy(x, tp)
    rows = x.reshape(-1, x.shape[-1])
    gather = None if tp.size == 1 else lambda stats: _gather_pieces(stats.unsqueeze(0), tp)
    widest = -(-terms.vocab_size // tp.size)  # shards may be uneven
    chunk_rows = fused.rows_of_chunk(rows, widest, weight) if chunk_rows is None else chunk_rows
    return (rows, weight, target.reshape(-1)), terms, {"gather": gather, "chunk_rows": chunk_rows}


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Reshape rows without a view: `fully_shard` would lose the hook of a view that the caller writes to."""
    return rows.view(like.shape).clone()


def _check_loss(target: Tensor, reduction: str, label_smoothing: float, token_weight: Tensor | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r} is not 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing {label_smoothing} is not in [0, 1)")
    if token_weight is not None and token_weight.shape != target.shape:
        raise ValueError(f"token_weight {tuple(token_weight.shape)} and target {tuple(target.shape)} differ in shape")


def _loss_of(
    shape: tuple[int, ...], target: Tensor, tp: Axis, vocab_size: int | None, *, ignore_index: int = -100,
    softcap: float = 0.0, **terms: float,
) -> Loss:  # fmt: skip
    """Return the loss for logits of this shape. Raise ValueError for logits of another shape, or bad targets."""
    check_axis(tp)
    *tokens, columns = shape
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap {softcap} is not a positive number, or 0 for none")
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target {tuple(target.shape)} is of {target.dtype}, but ids of classes are integers (int64)")
    if tokens != list(target.shape):
        raise ValueError(f"logits {tuple(shape)} and target {tuple(target.shape)} don't have the same tokens")
    if vocab_size is None and tp.size > 1:
        raise ValueError(
            f"{columns} columns are this rank's of a vocabulary that is cut over the {tp.name} axis of size {tp.size}: "
            f"give vocab_size, which {columns * tp.size} would be of equal shards alone"
        )
    size = columns if vocab_size is None else vocab_size
    check_size("the vocabulary", size, tp)
    start, end = shard_range(size, tp)
    if columns != end - start:
        raise ValueError(
            f"logits have {columns} columns, but rank {tp.rank} of the {tp.name} axis of size {tp.size} holds "
            f"{end - start} of a vocabulary of {size}: pass this rank's shard, not gathered logits"
        )
    check_ids(target, size, ignore_index)
    return Loss(size, start, ignore_index, softcap, **terms)


def _divisor(target: Tensor, ignore_index: int, token_weight: Tensor | None) -> Tensor:
    if token_weight is None:
        return (target != ignore_index).sum().clamp(min=1)
    total = token_weight.sum()  # 0 where the target is ignored
    return total.masked_fill(total == 0, 1)


def _gather_pieces(stats: Tensor, tp: Axis) -> Tensor:
    return stats if tp.size == 1 else wait(start_all_gather(stats, tp))


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, terms: Loss, tp: Axis) -> Tensor:
        smoothing = terms.label_smoothing
        wide = torch.promote_types(logits.dtype, torch.float32)
        counts = target != terms.ignore_index
        column = target - terms.start
        here = counts & (column >= 0) & (column < logits.shape[-1])
        column = column.masked_fill(~here, 0)

        kept, most, largest = _softmax(logits, wide)  # over this rank's columns; one pass, where exp and sum are three
        total = most.reciprocal()
        at_target = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(wide).masked_fill(~here, 0)
        sum_logits = logits.sum(-1, dtype=wide) if smoothing else torch.zeros_like(total)
        share = torch.ones_like(total)
        if tp.size > 1:
            masked = largest == -torch.inf  # all logits of this shard are -inf
            mine = torch.stack([largest.clamp(min=torch.finfo(wide).min), total.masked_fill(masked, 0)])
            stats = torch.cat([mine, torch.stack([at_target, sum_logits])])
            stats = _gather_pieces(stats.unsqueeze(0), tp)
            largest = stats[:, 0].amax(0)
            totals = stats[:, 1] * (stats[:, 0] - largest).exp()
            total = totals.sum(0)
            share = totals[tp.rank] / total
            at_target, sum_logits = stats[:, 2:].sum(0)
        lse = largest + total.log()
        loss = lse - (1 - smoothing) * at_target
        if smoothing:
            loss = loss - smoothing / terms.vocab_size * sum_logits
        if terms.z_loss:
            loss = loss + terms.z_loss * lse.square()

        ctx.save_for_backward(kept, lse, share, counts, here, column)
        ctx.terms = terms
        return loss.masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx, dloss: Tensor):  # type: ignore[override]
        refuse_second_derivative("vocab_parallel_cross_entropy")
        kept, lse, share, counts, here, column = ctx.saved_tensors
        terms = ctx.terms
        dloss = dloss.masked_fill(~counts, 0)
        scale = dloss * (1 + 2 * terms.z_loss * lse) * share
        at_target = (dloss * (terms.label_smoothing - 1)).masked_fill(~here, 0)
        smooth = dloss * (terms.label_smoothing / terms.vocab_size)

        def gradient(softmax: Tensor, zero: Tensor, *rows: Tensor) -> Tensor:
            scale, at_target, smooth, column = [row.unsqueeze(-1) for row in rows]
            softmax.mul_(scale)
            softmax.masked_fill_(zero.unsqueeze(-1), 0)
            if terms.label_smoothing:
                softmax -= smooth
            return softmax.scatter_add_(-1, column, at_target)

        # an ignored row may be NaN, and if all logits of this shard are -inf, its share is 0
        rows = ~counts | (share == 0), scale, at_target, smooth, column
        if kept.dtype == lse.dtype:  # a graph that backward frees needs its softmax no more
            again = torch.compiler.is_compiling() or graph_is_kept()
            return gradient(kept.clone() if again else kept, *rows), *[None] * 3
        dlogits = torch.empty_like(kept, memory_format=torch.contiguous_format)
        for logits, into, *of_rows in _in_pieces(kept, dlogits, *rows):
            into.copy_(gradient(logits.to(lse.dtype).softmax(-1), *of_rows))
        return dlogits, *[None] * 3


# Half precision is converted to float32 in pieces of this many elements, so that a copy stays in a core's cache.
_CACHED = 2**18


def _in_pieces(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    whole = (logits.reshape(-1, logits.shape[-1]), *(x.view(-1, *x.shape[logits.dim() - 1 :]) for x in others))
    pieces = logits.is_cpu and not torch.compiler.is_compiling()
    count = max(1, _CACHED // logits.shape[-1] if pieces else len(whole[0]))
    yield from zip(*(x.split(count) for x in whole), strict=True)


def _softmax(logits: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return what backward keeps (softmax, or logits of half precision), and each row's largest softmax and logit."""
    if logits.dtype == wide:
        softmax = logits.softmax(-1)
        return softmax, softmax.amax(-1), logits.amax(-1)
    most, largest = (logits.new_empty(logits.shape[:-1], dtype=wide) for _ in range(2))
    for x, most_here, largest_here in _in_pieces(logits, most, largest):
        x = x.to(wide)
        most_here.copy_(x.softmax(-1).amax(-1))
        largest_here.copy_(x.amax(-1))
    return logits, most, largest


class _FusedCrossEntropy(Function):
    """`_CrossEntropy` with the GPU kernels, which keep only the logits; or log-probability and entropy."""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, terms: Loss, tp: Axis, log_prob: bool):
        ctx.how, ctx.log_prob = (terms, tp), log_prob
        stats = [cross_entropy_stats(z, target, loss, entropy=log_prob) for z, loss in _pieces(logits, terms, tp)]
        stats = combine_stats(_gather_pieces(torch.stack(stats), tp))
        ctx.save_for_backward(logits, target, stats)
        return log_prob_of_stats(stats, target, terms) if log_prob else loss_of_stats(stats, target, terms)

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[override]
        refuse_second_derivative("vocab_parallel_log_prob" if ctx.log_prob else "vocab_parallel_cross_entropy")
        rows = dict(zip(("dlog_prob", "dentropy") if ctx.log_prob else ("dloss",), gradients, strict=True))
        logits, target, stats = ctx.saved_tensors
        found = [cross_entropy_backward(z, target, stats, loss, **rows) for z, loss in _pieces(logits, *ctx.how)]
        return found[0] if len(found) == 1 else torch.cat(found, -1), *[None] * 4


def _pieces(logits: Tensor, terms: Loss, tp: Axis) -> list[tuple[Tensor, Loss]]:
    if tp.sums is None:
        return [(logits, terms)]
    pieces = tp.sums.split(logits, tp, logits.dim() - 1, terms.vocab_size)
    starts = accumulate((piece.shape[-1] for piece in pieces[:-1]), initial=terms.start)
    return [(piece, replace(terms, start=start)) for piece, start in zip(pieces, starts, strict=True)]


class CrossEntropyOptions(TypedDict, total=False):
    """Keyword arguments of `vocab_parallel_cross_entropy`, which explains them."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    token_weight: Tensor | None
    reduction: str


class VocabParallelCrossEntropy(nn.Module):
    """`vocab_parallel_cross_entropy` as a module for one vocabulary size. It rejects gathered logits.

    Args:
        vocab_size: V.
        tp: the axis over which the vocabulary is sharded.
        options: `CrossEntropyOptions`.

    Example:
        >>> loss_function = mpcore.VocabParallelCrossEntropy(8, label_smoothing=0.1, reduction="sum")
        >>> loss_function(torch.zeros(2, 8), torch.tensor([1, 2]))
        tensor(4.1589)
    """

    def __init__(self, vocab_size: int, *, tp: Axis = Axis(name="tp"), **options: Unpack[CrossEntropyOptions]) -> None:
        super().__init__()
        check_axis(tp)
        self.vocab_size = vocab_size
        self.tp = tp
        self.options: CrossEntropyOptions = options

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits [..., V/tp] and targets [...] -> a scalar, or [...] with reduction "none"."""
        return vocab_parallel_cross_entropy(logits, target, tp=self.tp, vocab_size=self.vocab_size, **self.options)
