"""Cross-entropy of logits whose vocabulary is cut over the tensor-parallel axis: one small collective, whatever the
size.

Per row, each rank computes over its own columns the maximum m_r, the sum of exponentials s_r = sum exp(z - m_r), the
target's logit t_r (0 where another rank holds it) and the sum of logits u_r. One all-gather of these four numbers gives
    lse = log sum_r s_r exp(m_r - m) + m,  m = max_r m_r,     target = sum_r t_r,     mean = sum_r u_r / V
    loss = lse - (1 - a) target - a mean + z lse^2            (a: label smoothing, z: z-loss)
and backward needs no collective: dlogits = p (1 + 2 z lse) - (1 - a) onehot - a / V, with p = exp(logits - lse).

Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, for the cut; Szegedy et al. 2016 (arXiv:1512.00567),
section 7,
for smoothing; Chowdhery et al. 2022 (arXiv:2204.02311), section 5, for the z-loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import Function

from mpcore.collectives import shard_range, start_all_gather, wait
from mpcore.layers.embedding import check_ids
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh import Axis


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    tp: Axis = Axis(name="tp"),
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of each token, from this rank's columns of the logits. Never changes its inputs.

    Args:
        logits: [..., V/tp], any floating dtype, this rank's run of the vocabulary, as `ColumnParallelLinear` returns it
            without `gather_output`.
        target: [...] integer ids in [0, V), the same on every rank, or `ignore_index`.
        tp: the axis that the vocabulary is cut over.
        vocab_size: V. None takes all shards to be equal; give it for uneven ones, and to have gathered logits refused.
        ignore_index: tokens with this target have loss 0 and gradient 0, and don't count in the mean.
        label_smoothing: a, the weight of the uniform distribution over the whole vocabulary.
        z_loss: weight of the squared log-sum-exp.
        reduction: "mean" over the tokens that count (0 where there is none), "sum" or "none".

    Returns:
        fp32 (fp64 for fp64 logits): a scalar, or [...] with "none".

    Raises:
        ValueError: before any collective, if shapes don't fit, or (on a CPU) a target lies outside the vocabulary.
    """
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)} don't have the same tokens")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r} is not 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing {label_smoothing} is not in [0, 1)")
    size = logits.shape[-1] * tp.size if vocab_size is None else vocab_size
    start, end = shard_range(size, tp)
    if logits.shape[-1] != end - start:
        raise ValueError(
            f"logits have {logits.shape[-1]} columns, but rank {tp.rank} of the {tp.name} axis of size {tp.size} holds "
            f"{end - start} of a vocabulary of {size}: pass this rank's shard, not gathered logits"
        )
    check_ids(target, size, ignore_index)
    loss = _CrossEntropy.apply(logits, target, tp, size, start, ignore_index, label_smoothing, z_loss)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (target != ignore_index).sum().clamp(min=1)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        target: Tensor,
        tp: Axis,
        size: int,
        start: int,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
    ) -> Tensor:
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        counts = target != ignore_index
        column = target - start
        here = counts & (column >= 0) & (column < z.shape[-1])
        column = column.masked_fill(~here, 0)

        largest = z.amax(-1).clamp(min=torch.finfo(z.dtype).min)  # a shard may be masked with -inf from end to end
        total = (z - largest.unsqueeze(-1)).exp().sum(-1)
        at_target = z.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
        stats = torch.stack([largest, total, at_target, z.sum(-1) if label_smoothing else torch.zeros_like(total)])
        if tp.size > 1:
            stats = wait(start_all_gather(stats.unsqueeze(0), tp))
            largest = stats[:, 0].amax(0)
            total = (stats[:, 1] * (stats[:, 0] - largest).exp()).sum(0)
            stats = torch.stack([largest, total, stats[:, 2].sum(0), stats[:, 3].sum(0)])
        largest, total, at_target, sum_logits = stats.unbind(0)
        lse = largest + total.log()
        loss = lse - (1 - label_smoothing) * at_target
        if label_smoothing:
            loss = loss - label_smoothing / size * sum_logits
        if z_loss:
            loss = loss + z_loss * lse.square()

        ctx.save_for_backward(logits, lse, counts, here, column)
        ctx.size, ctx.label_smoothing, ctx.z_loss = size, label_smoothing, z_loss
        return loss.masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx, dloss: Tensor):  # type: ignore[override]
        refuse_second_derivative("vocab_parallel_cross_entropy")
        logits, lse, counts, here, column = ctx.saved_tensors
        dloss = dloss.masked_fill(~counts, 0).unsqueeze(-1)
        dlogits = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp()
        dlogits *= dloss * (1 + 2 * ctx.z_loss * lse.unsqueeze(-1))
        if ctx.label_smoothing:
            dlogits -= dloss * (ctx.label_smoothing / ctx.size)
        at_target = (dloss * (ctx.label_smoothing - 1)).masked_fill(~here.unsqueeze(-1), 0)
        dlogits.scatter_add_(-1, column.unsqueeze(-1), at_target)
        return dlogits.to(logits.dtype), *[None] * 7


class VocabParallelCrossEntropy(nn.Module):
    """`vocab_parallel_cross_entropy` for one vocabulary: it knows V, so it takes uneven shards and refuses gathered
    logits.

    Args:
        vocab_size: V.
        tp: the axis that the vocabulary is cut over.
        options: as of `vocab_parallel_cross_entropy`.
    """

    def __init__(self, vocab_size: int, *, tp: Axis = Axis(name="tp"), **options) -> None:
        super().__init__()
        self.vocab_size, self.tp, self.options = vocab_size, tp, options

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """[..., V/tp], [...] -> scalar, or [...] with reduction "none"."""
        return vocab_parallel_cross_entropy(logits, target, tp=self.tp, vocab_size=self.vocab_size, **self.options)
