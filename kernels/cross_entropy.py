"""Cross-entropy of logits whose vocabulary may be sharded over ranks; each rank calls these kernels on its columns.

    z = logits, or c tanh(logits / c) with a soft cap c
    per rank:   m = max z,  s = sum e^(z - m),  t = z[target], or 0 elsewhere,  u = sum z,  w = sum e^(z - m) (z - m)
    all ranks:  M = max m,  S = sum s e^(m - M),  t and u summed,  W = sum e^(m - M) (w + (m - M) s)

    lse     = log S + M
    loss    = log S + (1 - a) (M - t) + a (M - u / V) + b lse^2          (a: label smoothing, b: z-loss)
    log p   = t - M - log S
    entropy = log S - W / S

    dz = p (g (1 + 2 b lse) - g' - h (z - M - W / S)) - onehot ((1 - a) g - g') - a / V g,  p = e^(z - M) / S
    dlogits = dz, or dz (1 - (z / c)^2)                                  (g = dloss, g' = dlog p, h = dentropy)

Every term is relative to M, where the likely tokens are, so no digits cancel between a large lse and t.

Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7, for a; Chowdhery et al., "PaLM" (2022),
section 5, for b; Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the one pass.

A step is four calls. `cross_entropy_stats` reads the logits once and returns five numbers per row, which the caller
all-gathers. `combine_stats` and `loss_of_stats` compute on rows only. `cross_entropy_backward` reads the logits again
and writes their gradient, so no softmax is ever stored. Kernels compute in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import check_inputs
from ._cross_entropy_kernels import backward_kernel, stats_kernel
from ._dispatch import operator, runs_triton
from ._rows import as_rows, ceil_div, contiguous, count_rows, next_power_of_2
from ._triton import launch

BLOCK_V = 4096  # columns of a tile


@dataclass(frozen=True)
class Loss:
    """The terms of a loss, and the columns that this rank holds.

    Attributes:
        vocab_size: V.
        start: the id of the first column on this rank.
        ignore_index: rows with this target are not read; their loss and gradient are 0.
        softcap: c; 0 for none.
        label_smoothing, z_loss: a and b.
    """

    vocab_size: int
    start: int = 0
    ignore_index: int = -100
    softcap: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def cross_entropy_stats(
    logits: Tensor, target: Tensor, loss: Loss, *, entropy: bool = False, impl: str | None = None
) -> Tensor:
    """Compute the statistics that each row of this rank's logits adds to the cross-entropy. Not differentiable.

    Args:
        logits: `[..., V/tp]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        target: `[...]`, int64 or int32, ids in the whole vocabulary, or `ignore_index`. Ids are not checked: one
            outside the vocabulary counts as a logit of 0, so its loss is lse.
        loss: the terms of the loss. Without label smoothing u is 0.
        entropy: compute w.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `logits`.

    Returns:
        `[4, ...]`, or `[5, ...]` with entropy: m, s, t, u and w; float32, or float64 for float64 logits.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.

    Example:
        >>> logits, target = torch.randn(6, 10), torch.arange(6)
        >>> stats = [cross_entropy_stats(logits[:, i : i + 5], target, Loss(10, start=i)) for i in (0, 5)]
        >>> found = loss_of_stats(combine_stats(torch.stack(stats)), target, Loss(10))
        >>> torch.allclose(found, torch.nn.functional.cross_entropy(logits, target, reduction="none"), atol=1e-5)
        True
    """
    _check(logits, target, loss)
    compute = _stats_op if runs_triton(impl, logits, "cross_entropy") else _stats_reference
    smooths = loss.label_smoothing > 0
    return compute(logits.detach(), target, loss.start, loss.ignore_index, loss.softcap, smooths, entropy)


cross_entropy_stats_reference: functools.partial[Tensor] = functools.partial(cross_entropy_stats, impl="reference")


def _stats_reference(
    logits: Tensor, target: Tensor, start: int, ignore_index: int, softcap: float, sum_logits: bool, entropy: bool
) -> Tensor:
    z = _cap(logits, softcap)
    column, here = _target_column(z, target, start, ignore_index)
    largest = z.amax(-1).clamp(min=torch.finfo(z.dtype).min)  # a shard may be all -inf
    shifted = z - largest.unsqueeze(-1)
    weighted = [(shifted.exp() * shifted.clamp(min=torch.finfo(z.dtype).min)).sum(-1)] if entropy else []
    total = shifted.exp_().sum(-1)
    at_target = z.gather(-1, column).squeeze(-1).masked_fill(~here, 0)
    return torch.stack([largest, total, at_target, z.sum(-1) if sum_logits else torch.zeros_like(total), *weighted])


def combine_stats(stats: Tensor) -> Tensor:
    """Merge the statistics of all ranks in any order, `[P, 4 or 5, ...] -> [4 or 5, ...]`."""
    if stats.shape[0] == 1:
        return stats[0]
    largest = stats[:, 0].amax(0)
    shift = stats[:, 0] - largest
    scale = shift.exp()
    merged = [largest, (stats[:, 1] * scale).sum(0), stats[:, 2].sum(0), stats[:, 3].sum(0)]
    if stats.shape[1] == 5:
        weighted = scale * (stats[:, 4] + shift * stats[:, 1])
        merged.append(weighted.masked_fill(scale == 0, 0).sum(0))  # a shard without probability has 0 times infinity
    return torch.stack(merged)


def loss_of_stats(stats: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """Compute the loss of each row, `[...]`, from the merged statistics `[4 or 5, ...]`; 0 for ignored tokens."""
    largest, log_total = stats[0], stats[1].log()
    rows = log_total + (1 - loss.label_smoothing) * (largest - stats[2])
    if loss.label_smoothing:
        rows = rows + loss.label_smoothing * (largest - stats[3] / loss.vocab_size)
    if loss.z_loss:
        rows = rows + loss.z_loss * (largest + log_total).square()
    return rows.masked_fill(target == loss.ignore_index, 0)


def log_prob_of_stats(stats: Tensor, target: Tensor, loss: Loss) -> tuple[Tensor, Tensor | None]:
    """Compute log p of each target and the entropy of p, `[...]`, from the merged statistics; 0 for ignored tokens.

    With statistics of four numbers, the entropy is `None`.
    """
    ignored, log_total = target == loss.ignore_index, stats[1].log()
    entropy = (log_total - stats[4] / stats[1]).masked_fill(ignored, 0) if stats.shape[0] == 5 else None
    return (stats[2] - stats[0] - log_total).masked_fill(ignored, 0), entropy


@torch.no_grad()
def cross_entropy_backward(
    logits: Tensor, target: Tensor, stats: Tensor, loss: Loss, *, dloss: Tensor | None = None,
    dlog_prob: Tensor | None = None, dentropy: Tensor | None = None, in_place: bool = False, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Compute the gradient of this rank's logits, 0 for ignored rows, from the logits. Not differentiable.

    Args:
        logits, target, loss, impl: the parameters of `cross_entropy_stats`.
        stats: `[4 or 5, ...]`, of all ranks.
        dloss: `[...]`, the gradient of each row's loss, of any dtype; it carries the weights of tokens.
        dlog_prob, dentropy: `[...]`, the gradients of log p and of the entropy.
        in_place: overwrite `logits` and return it.

    Returns:
        `[..., V/tp]` in the dtype of the logits.

    Raises:
        ValueError: as `cross_entropy_stats`, or `stats` don't go with the gradients.

    Example:
        >>> logits, target = torch.randn(6, 10), torch.arange(6)
        >>> stats = cross_entropy_stats(logits, target, Loss(10))
        >>> dlogits = cross_entropy_backward(logits, target, stats, Loss(10), dloss=torch.ones(6))
        >>> bool(dlogits.sum(-1).abs().max() < 1e-5)
        True
    """
    if stats.dim() == 0 or stats.shape[0] not in (4, 5):
        raise ValueError(f"stats have shape {tuple(stats.shape)}; they are 4 or 5 numbers for each row")
    if dentropy is not None and stats.shape[0] == 4:
        raise ValueError("dentropy needs stats of 5 numbers: ask cross_entropy_stats for the entropy")
    _check(logits, target, loss, stats=stats[0], dloss=dloss, dlog_prob=dlog_prob, dentropy=dentropy)
    rows = _Rows(
        target, stats, dloss, dlog_prob, dentropy, loss.start, loss.ignore_index, 1 - loss.label_smoothing,
        loss.label_smoothing / loss.vocab_size, 2 * loss.z_loss, loss.softcap,
    )  # fmt: skip
    if not runs_triton(impl, logits, "cross_entropy"):
        dlogits = _backward_reference(logits, rows)
        return logits.copy_(dlogits) if in_place else dlogits
    if not in_place:
        return _backward_op(logits, *rows)
    _backward_in_place_op(logits, *rows)
    return logits


class _Rows(NamedTuple):
    target: Tensor
    stats: Tensor
    dloss: Tensor | None
    dlog_prob: Tensor | None
    dentropy: Tensor | None
    start: int
    ignore_index: int
    peak: float  # 1 - a
    uniform: float  # a / V
    twice_z_loss: float
    softcap: float


def _backward_reference(logits: Tensor, rows: _Rows) -> Tensor:
    target, stats, dloss, dlog_prob, dentropy, start, ignore_index, peak, uniform, twice_z_loss, softcap = rows
    z = _cap(logits, softcap)
    column, here = _target_column(z, target, start, ignore_index)
    ignored, stats = target == ignore_index, stats.to(z.dtype)
    largest, total = stats[0], stats[1]
    slope, at_target = torch.zeros_like(total), torch.zeros_like(total)
    dloss, dlog_prob, dentropy = (None if d is None else d.to(z.dtype) for d in (dloss, dlog_prob, dentropy))
    if dloss is not None:
        slope = dloss * (1 + twice_z_loss * (largest + total.log())) if twice_z_loss else dloss
        at_target = -peak * dloss
    if dlog_prob is not None:
        slope, at_target = slope - dlog_prob, at_target + dlog_prob
    shifted = z - largest.unsqueeze(-1)
    if dentropy is None:
        dz = shifted.exp_().mul_((slope / total).unsqueeze(-1))
    else:
        dentropy = (dentropy / total).unsqueeze(-1)
        centred = shifted.clamp(min=torch.finfo(z.dtype).min) - (stats[4] / total).unsqueeze(-1)
        dz = shifted.exp_() * ((slope / total).unsqueeze(-1) - dentropy * centred)
    if uniform and dloss is not None:
        dz -= uniform * dloss.unsqueeze(-1)
    dz.scatter_add_(-1, column, at_target.masked_fill(~here, 0).unsqueeze(-1))
    if softcap:
        dz *= 1 - (z / softcap).square()
    return dz.masked_fill_(ignored.unsqueeze(-1), 0).to(logits.dtype)


def _cap(logits: Tensor, softcap: float) -> Tensor:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return softcap * torch.tanh(z / softcap) if softcap else z


def _target_column(z: Tensor, target: Tensor, start: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    column = target.long() - start
    here = (target != ignore_index) & (column >= 0) & (column < z.shape[-1])
    return column.masked_fill(~here, 0).unsqueeze(-1), here


def _check(logits: Tensor, target: Tensor, loss: Loss, **rows: Tensor | None) -> None:
    check_inputs(logits)
    if logits.shape[-1] == 0:
        raise ValueError(f"logits {tuple(logits.shape)} have no columns")
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target is {target.dtype}; it must be int64 or int32")
    if not 0 <= loss.softcap < float("inf"):
        raise ValueError(f"softcap {loss.softcap} is not a positive number, or 0 for none")
    for name, row in {"target": target, **rows}.items():
        if row is not None and row.shape != logits.shape[:-1]:
            raise ValueError(f"{name} has shape {tuple(row.shape)}, but logits {tuple(logits.shape)} have other rows")
        if row is not None and row.device != logits.device:
            raise ValueError(f"{name} is on {row.device}, but logits are on {logits.device}")


_ROWS = (
    "Tensor target, Tensor stats, Tensor? dloss, Tensor? dlog_prob, Tensor? dentropy,"
    " int start, int ignore_index, float peak, float uniform, float twice_z_loss, float softcap"
)


@operator(
    "cross_entropy_stats(Tensor logits, Tensor target, int start, int ignore_index, float softcap, bool sum_logits,"
    " bool entropy) -> Tensor stats"
)
def _stats_op(logits, target, start, ignore_index, softcap, sum_logits, entropy) -> Iterator[Tensor]:
    stats = logits.new_empty((4 + entropy, *target.shape), dtype=torch.float32)
    yield stats
    N, V, (logits, stride) = count_rows(logits), logits.shape[-1], as_rows(logits)
    vector, block_v, num_warps = _tile(logits)
    launch(
        stats_kernel, (N, 1, 1), num_warps=num_warps, x_ptr=logits, target_ptr=target.contiguous(), stats_ptr=stats,
        N=N, start=start, ignore_index=ignore_index, STRIDE=stride, V=V, SOFTCAP=softcap, SUM_LOGITS=sum_logits,
        ENTROPY=entropy, BLOCK_V=block_v, VECTOR=vector,
    )  # fmt: skip


@operator(f"cross_entropy_backward(Tensor logits, {_ROWS}) -> Tensor dlogits")
def _backward_op(logits: Tensor, *others: Any) -> Iterator[Tensor]:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    yield dlogits
    _run_backward(logits, dlogits, _Rows(*others))


@operator(f"cross_entropy_backward_in_place(Tensor(a!) logits, {_ROWS}) -> ()")
def _backward_in_place_op(logits: Tensor, *others: Any) -> Iterator[None]:
    yield
    _run_backward(logits, logits, _Rows(*others))


def _run_backward(logits: Tensor, dlogits: Tensor, given: _Rows) -> None:
    N, V = count_rows(logits), logits.shape[-1]
    rows, stride = as_rows(logits)
    out, out_stride = (rows, stride) if dlogits is logits else (dlogits, V)
    vector, block_v, num_warps = _tile(rows)
    target, stats, dloss, dlog_prob, dentropy = contiguous(*given[:5])
    tiles = ceil_div(V if stride % vector == 0 else V + vector - 1, block_v)
    launch(
        backward_kernel, (N * tiles, 1, 1), num_warps=num_warps,
        x_ptr=rows, target_ptr=target, stats_ptr=stats, dloss_ptr=dloss, dlog_prob_ptr=dlog_prob,
        dentropy_ptr=dentropy, dx_ptr=out, N=N, start=given.start, ignore_index=given.ignore_index, peak=given.peak,
        uniform=given.uniform, twice_z_loss=given.twice_z_loss, STRIDE=stride, DX_STRIDE=out_stride, V=V,
        SOFTCAP=given.softcap, TILES=tiles, BLOCK_V=block_v, VECTOR=vector,
    )  # fmt: skip
    if dlogits is logits and rows.data_ptr() != logits.data_ptr():  # as_rows had to copy
        logits.copy_(rows.view(logits.shape))


def _tile(logits: Tensor) -> tuple[int, int, int]:
    """Return the elements of a thread's 16-byte vector, the columns of a program's tile, and its warps."""
    block_v = max(256, min(BLOCK_V, next_power_of_2(logits.shape[-1])))
    return 16 // logits.element_size(), block_v, max(1, block_v // 1024)
