"""Cross-entropy of logits whose vocabulary may be cut over ranks, each of which calls these kernels on its columns.

    z = logits, or c tanh(logits / c) with a soft cap c
    per rank:   m = max z,  s = sum e^(z - m),  t = z[target], or 0 elsewhere,  u = sum z,  w = sum e^(z - m) (z - m)
    all ranks:  M = max m,  S = sum s e^(m - M),  t and u summed,  W = sum e^(m - M) (w + (m - M) s)

    lse     = log S + M
    loss    = log S + (1 - a) (M - t) + a (M - u / V) + b lse^2          (a: label smoothing, b: z-loss)
    log p   = t - M - log S
    entropy = log S - W / S

    dz = p (g (1 + 2 b lse) - g' - h (z - M - W / S)) - onehot ((1 - a) g - g') - a / V g,  p = e^(z - M) / S
    dlogits = dz, or dz (1 - (z / c)^2)                                  (g = dloss, g' = dlog p, h = dentropy)

All is relative to M, where the likely tokens are, so that no digits are lost between large lse and t.

Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7, for a; Chowdhery et al., "PaLM" (2022),
section 5, for b; Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the one pass.

A step is four calls: `cross_entropy_stats` reads the logits once and gives five numbers per row; the caller gathers
those of all ranks, which is all they exchange; `combine_stats` and `loss_of_stats` are a few operations on rows; and
`cross_entropy_backward` reads the logits again and writes their gradient, so that no softmax is ever stored. There is
no autograd function here, since the exchange lies between the calls: `mpcore/layers/loss.py` has it.

The kernels compute in float32. An online softmax takes two exponentials per element, more than a GPU can at the speed
of its memory. So a thread first finds the maximum of the vector that it loads at once, and takes one per element and
one per vector. Rows that are long and few are split over programs, and merged in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import define, launches, runs_triton, tl, triton
from ._launch import launch, multiprocessors
from ._rows import as_rows, ceil_div, check_inputs, count_rows, next_power_of_2

LONG_ROW = 32768  # columns from which a row may be split
MOST_PARTS = 8
BLOCK_V = 4096


def cross_entropy_stats(
    logits: Tensor,
    target: Tensor,
    *,
    start: int = 0,
    ignore_index: int = -100,
    softcap: float = 0.0,
    sum_logits: bool = False,
    entropy: bool = False,
    impl: str | None = None,
) -> Tensor:
    """What each row of this rank's logits adds to the cross-entropy, in one pass over them. Nothing is differentiated.

    Args:
        logits: `[..., V/tp]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        target: `[...]`, int64 or int32, ids in the whole vocabulary, or `ignore_index`. Nobody checks them: one that
            no rank holds has the logit 0, so that its loss is the log of the sum of exponentials.
        start: the id of the first column here.
        ignore_index: rows with this target are not read.
        softcap: c; 0: none.
        sum_logits: fill in u, which label smoothing needs; otherwise it is 0.
        entropy: add w.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `logits`.

    Returns:
        `[4, ...]`, or `[5, ...]` with entropy: m, s, t, u and w; float32, or float64 for float64 logits.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    _check(logits, target, softcap)
    logits = logits.detach()
    if not runs_triton(impl, logits):
        return cross_entropy_stats_reference(
            logits,
            target,
            start=start,
            ignore_index=ignore_index,
            softcap=softcap,
            sum_logits=sum_logits,
            entropy=entropy,
        )
    return _stats_op(logits, target, start, ignore_index, softcap, sum_logits, entropy)


def cross_entropy_stats_reference(
    logits: Tensor,
    target: Tensor,
    *,
    start: int = 0,
    ignore_index: int = -100,
    softcap: float = 0.0,
    sum_logits: bool = False,
    entropy: bool = False,
) -> Tensor:
    """`cross_entropy_stats` in plain torch; computes in float32, or float64 for float64 logits."""
    z = _cap(logits, softcap)
    column, here = _target_column(z, target, start, ignore_index)
    largest = z.amax(-1).clamp(min=torch.finfo(z.dtype).min)  # a shard may be masked with -inf from end to end
    shifted = z - largest.unsqueeze(-1)
    weighted = [(shifted.exp() * shifted.clamp(min=torch.finfo(z.dtype).min)).sum(-1)] if entropy else []
    total = shifted.exp_().sum(-1)
    at_target = z.gather(-1, column).squeeze(-1).masked_fill(~here, 0)
    return torch.stack([largest, total, at_target, z.sum(-1) if sum_logits else torch.zeros_like(total), *weighted])


def combine_stats(stats: Tensor) -> Tensor:
    """Merge the statistics of all ranks, `[P, 4 or 5, ...] -> [4 or 5, ...]`, in any order of ranks."""
    if stats.shape[0] == 1:
        return stats[0]
    largest = stats[:, 0].amax(0)
    shift = stats[:, 0] - largest
    scale = shift.exp()
    merged = [largest, (stats[:, 1] * scale).sum(0), stats[:, 2].sum(0), stats[:, 3].sum(0)]
    if stats.shape[1] == 5:
        weighted = scale * (stats[:, 4] + shift * stats[:, 1])
        merged.append(weighted.masked_fill(scale == 0, 0).sum(0))  # 0 times infinity, of a shard without probability
    return torch.stack(merged)


def loss_of_stats(
    stats: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss of each row, `[...]`, from the merged statistics; of ignored tokens it is 0.

    Args:
        stats: `[4 or 5, ...]`, of all ranks; with `sum_logits` if there is label smoothing.
        target: `[...]`.
        vocab_size: V, of all ranks.
        ignore_index: tokens with this target have loss 0.
        label_smoothing: a.
        z_loss: b.
    """
    largest, log_total = stats[0], stats[1].log()
    loss = log_total + (1 - label_smoothing) * (largest - stats[2])
    if label_smoothing:
        loss = loss + label_smoothing * (largest - stats[3] / vocab_size)
    if z_loss:
        loss = loss + z_loss * (largest + log_total).square()
    return loss.masked_fill(target == ignore_index, 0)


def log_prob_of_stats(stats: Tensor, target: Tensor, *, ignore_index: int = -100) -> tuple[Tensor, Tensor | None]:
    """Log p of each row's target and the entropy of p, `[...]`, from the merged statistics; of ignored tokens 0.

    Args:
        stats: `[4 or 5, ...]`, of all ranks; of four, the entropy is `None`.
        target: `[...]`.
        ignore_index: as above.
    """
    ignored = target == ignore_index
    log_total = stats[1].log()
    log_prob = (stats[2] - stats[0] - log_total).masked_fill(ignored, 0)
    if stats.shape[0] == 4:
        return log_prob, None
    return log_prob, (log_total - stats[4] / stats[1]).masked_fill(ignored, 0)


@torch.no_grad()
def cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor | None,
    *,
    vocab_size: int,
    start: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    dlog_prob: Tensor | None = None,
    dentropy: Tensor | None = None,
    in_place: bool = False,
    impl: str | None = None,
) -> Tensor:
    """The gradient of this rank's logits, recomputed from them. Ignored rows are not read; their gradient is 0.

    Nothing is differentiated.

    Args:
        logits: `[..., V/tp]`, as of `cross_entropy_stats`.
        target: `[...]`.
        stats: `[4 or 5, ...]`, of all ranks.
        dloss: `[...]`, the gradient of each row's loss, of any dtype; weights of tokens come in by it.
        vocab_size: V, of all ranks.
        start, ignore_index, label_smoothing, z_loss, softcap: as in the forward pass.
        dlog_prob: `[...]`, the gradient of log p.
        dentropy: `[...]`, the gradient of the entropy.
        in_place: write over `logits`, and return them.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `logits`.

    Returns:
        `[..., V/tp]` in the dtype of the logits.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    if stats.dim() == 0 or stats.shape[0] not in (4, 5):
        raise ValueError(f"stats have shape {tuple(stats.shape)}; they are 4 or 5 numbers for each row")
    if dentropy is not None and stats.shape[0] == 4:
        raise ValueError("dentropy needs stats of 5 numbers: ask cross_entropy_stats for the entropy")
    _check(logits, target, softcap, stats=stats[0], dloss=dloss, dlog_prob=dlog_prob, dentropy=dentropy)
    numbers = (start, ignore_index, 1 - label_smoothing, label_smoothing / vocab_size, 2 * z_loss, softcap)
    arguments = (target, stats, dloss, dlog_prob, dentropy, *numbers)
    if not runs_triton(impl, logits):
        dlogits = _backward_reference(logits, *arguments)
        return logits.copy_(dlogits) if in_place else dlogits
    if in_place:
        _backward_in_place_op(logits, *arguments)
        return logits
    return _backward_op(logits, *arguments)


def _backward_reference(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor | None,
    dlog_prob: Tensor | None,
    dentropy: Tensor | None,
    start: int,
    ignore_index: int,
    peak: float,
    uniform: float,
    twice_z_loss: float,
    softcap: float,
) -> Tensor:
    z = _cap(logits, softcap)
    column, here = _target_column(z, target, start, ignore_index)
    ignored, stats = target == ignore_index, stats.to(z.dtype)
    largest, total = stats[0], stats[1]
    slope, at_target = torch.zeros_like(total), torch.zeros_like(total)
    dloss, dlog_prob, dentropy = (None if d is None else d.to(z.dtype) for d in (dloss, dlog_prob, dentropy))
    if dloss is not None:
        dloss = dloss.masked_fill(ignored, 0)
        slope = dloss * (1 + twice_z_loss * (largest + total.log())) if twice_z_loss else dloss
        at_target = -peak * dloss
    if dlog_prob is not None:
        dlog_prob = dlog_prob.masked_fill(ignored, 0)
        slope, at_target = slope - dlog_prob, at_target + dlog_prob
    shifted = z - largest.unsqueeze(-1)
    if dentropy is None:
        dz = shifted.exp_().mul_((slope / total).unsqueeze(-1))
    else:
        dentropy = (dentropy / total).masked_fill(ignored, 0).unsqueeze(-1)
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


def _check(logits: Tensor, target: Tensor, softcap: float, **rows: Tensor | None) -> None:
    check_inputs(logits)
    if logits.shape[-1] == 0:
        raise ValueError(f"logits {tuple(logits.shape)} have no columns")
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target is {target.dtype}; it must be int64 or int32")
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap {softcap} is not a positive number, or 0 for none")
    for name, row in {"target": target, **rows}.items():
        if row is None:
            continue
        if row.shape != logits.shape[:-1]:
            raise ValueError(f"{name} has shape {tuple(row.shape)}, but logits {tuple(logits.shape)} have other rows")
        if row.device != logits.device:
            raise ValueError(f"{name} is on {row.device}, but logits are on {logits.device}")


def _empty_stats(
    logits: Tensor, target: Tensor, start: int, ignore_index: int, softcap: float, sum_logits: bool, entropy: bool
) -> Tensor:
    return logits.new_empty((4 + entropy, *target.shape), dtype=torch.float32)


def _empty_backward(logits: Tensor, *others: Tensor | float | None) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _empty_in_place(logits: Tensor, *others: Tensor | float | None) -> None:
    return None


_NUMBERS = "int start, int ignore_index, float peak, float uniform, float twice_z_loss, float softcap"
_ROWS = "Tensor target, Tensor stats, Tensor? dloss, Tensor? dlog_prob, Tensor? dentropy"
_stats_op = define(
    "cross_entropy_stats(Tensor logits, Tensor target, int start, int ignore_index, float softcap, bool sum_logits,"
    " bool entropy) -> Tensor stats",
    _empty_stats,
)
_backward_op = define(f"cross_entropy_backward(Tensor logits, {_ROWS}, {_NUMBERS}) -> Tensor dlogits", _empty_backward)
_backward_in_place_op = define(
    f"cross_entropy_backward_in_place(Tensor(a!) logits, {_ROWS}, {_NUMBERS}) -> ()", _empty_in_place
)


@launches(_stats_op)
def _launch_stats(
    logits: Tensor, target: Tensor, start: int, ignore_index: int, softcap: float, sum_logits: bool, entropy: bool
) -> Tensor:
    stats = _empty_stats(logits, target, start, ignore_index, softcap, sum_logits, entropy)
    if stats.numel() == 0:
        return stats
    N, V = count_rows(logits), logits.shape[-1]
    logits, stride = as_rows(logits)
    vector, block_v, num_warps = _tile(logits)
    parts = 1
    if V >= LONG_ROW:
        parts = max(1, min(MOST_PARTS, 4 * multiprocessors(logits.device) // N))
    partial = stats if parts == 1 else stats.new_empty((parts, 4 + entropy, N))
    tensors, scalars = (logits, target.contiguous(), partial), (N, start, ignore_index)
    span = ceil_div(ceil_div(V + vector - 1, block_v), parts) * block_v
    constants = (stride, V, softcap, sum_logits, entropy, parts, span, block_v, vector)
    launch(_stats_kernel, (N * parts, 1, 1), tensors, scalars, constants, num_warps)
    if parts > 1:
        launch(_merge_kernel, (ceil_div(N, 64), 1, 1), (partial, stats), (N,), (parts, 4 + entropy, 64), num_warps=2)
    return stats


@launches(_backward_op)
def _launch_backward(logits: Tensor, *others) -> Tensor:
    dlogits = _empty_backward(logits)
    _run_backward(logits, dlogits, *others)
    return dlogits


@launches(_backward_in_place_op)
def _launch_backward_in_place(logits: Tensor, *others) -> None:
    _run_backward(logits, logits, *others)


def _run_backward(
    logits: Tensor,
    dlogits: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor | None,
    dlog_prob: Tensor | None,
    dentropy: Tensor | None,
    start: int,
    ignore_index: int,
    peak: float,
    uniform: float,
    twice_z_loss: float,
    softcap: float,
) -> None:
    if logits.numel() == 0:
        return
    N, V = count_rows(logits), logits.shape[-1]
    rows, stride = as_rows(logits)
    out, out_stride = (rows, stride) if dlogits is logits else (dlogits, V)
    vector, block_v, num_warps = _tile(rows)
    given = (target, stats, dloss, dlog_prob, dentropy)
    tensors = (rows, *(None if row is None else row.contiguous() for row in given), out)
    scalars = (N, start, ignore_index, peak, uniform, twice_z_loss)
    tiles = ceil_div(V if stride % vector == 0 else V + vector - 1, block_v)
    constants = (stride, out_stride, V, softcap, tiles, block_v, vector)
    launch(_backward_kernel, (N * tiles, 1, 1), tensors, scalars, constants, num_warps)
    if dlogits is logits and rows.data_ptr() != logits.data_ptr():  # of strides that no kernel takes
        logits.copy_(rows.view(logits.shape))


def _tile(logits: Tensor) -> tuple[int, int, int]:
    """Elements of a thread's 16-byte vector, columns of a program's tile, and warps."""
    block_v = max(256, min(BLOCK_V, next_power_of_2(logits.shape[-1])))
    return 16 // logits.element_size(), block_v, max(1, block_v // 1024)


@triton.jit
def _in_caps(z, SOFTCAP: tl.constexpr, dtype: tl.constexpr):
    if dtype == tl.float32:
        return tl.div_rn(z, SOFTCAP)  # a GPU's own division errs by more than the caller's tanh does
    return z * (1.0 / SOFTCAP)


@triton.jit
def _tanh(v):
    """Return tanh and its slope: near 0 by a polynomial, beyond by an exponential, neither where it cancels."""
    e = tl.exp(-2.0 * tl.abs(v))
    half = 1.0 / (1.0 + e)
    large = (1.0 - e) * half
    square = v * v
    series = square * -0.0062763877 + 0.0211162132
    series = series * square - 0.0538751371
    series = series * square + 0.1333292424
    series = series * square - 0.3333333135
    small = v + v * (square * series)
    near = square < 0.36
    tanh = tl.where(near, small, tl.where(v < 0.0, -large, large))
    return tanh, tl.where(near, 1.0 - small * small, 4.0 * e * half * half)


@triton.jit
def _row_shift(row, STRIDE, VECTOR):
    """Elements between the start of a row and the 16-byte boundary before it, if tensors start on one."""
    if STRIDE % VECTOR == 0:
        return 0
    else:
        return (row * STRIDE % VECTOR).to(tl.int32)


@triton.jit
def _load_logits(x_ptr, row, lanes, offset, shift, live, outside, STRIDE, V, BLOCK_V, VECTOR):
    """Load `lanes` of a row, counted from the boundary before it; a mask for each element, which forbids loads of whole
    vectors, is needed at the ends of the row alone."""
    x_ptr += tl.multiple_of(row * STRIDE - shift, VECTOR)
    if (STRIDE % VECTOR == 0) & (V % VECTOR == 0):
        x = tl.load(x_ptr + lanes, mask=live & (lanes < V), other=outside)
    elif (offset >= shift) & (offset + BLOCK_V <= shift + V):
        x = tl.load(x_ptr + lanes, mask=live, other=outside)
    else:
        x = tl.load(x_ptr + lanes, mask=live & (lanes >= shift) & (lanes < shift + V), other=outside)
    return x.to(tl.float32)


@triton.jit
def _stats_kernel(
    x_ptr, target_ptr, stats_ptr, N, start, ignore_index,
    STRIDE: tl.constexpr, V: tl.constexpr, SOFTCAP: tl.constexpr, SUM_LOGITS: tl.constexpr, ENTROPY: tl.constexpr,
    PARTS: tl.constexpr, SPAN: tl.constexpr, BLOCK_V: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, part = (program // PARTS).to(tl.int64), program % PARTS
    target = tl.load(target_ptr + row)
    live = target != ignore_index
    shift = _row_shift(row, STRIDE, VECTOR)
    end = tl.where(live, tl.minimum((part + 1) * SPAN, V + shift), 0)

    THREADS: tl.constexpr = BLOCK_V // VECTOR
    OUTSIDE: tl.constexpr = float("-inf") if SOFTCAP == 0.0 else 0.0
    lane = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    LOWEST: tl.constexpr = -3.4028234663852886e38
    largest = tl.full((THREADS,), LOWEST, tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    linear = tl.zeros((THREADS,), tl.float32)
    weighted = tl.zeros((THREADS,), tl.float32)
    for offset in tl.range(part * SPAN, end, BLOCK_V):
        lanes = offset + lane
        in_row = (lanes >= shift) & (lanes < shift + V)
        z = _load_logits(x_ptr, row, lanes, offset, shift, live, OUTSIDE, STRIDE, V, BLOCK_V, VECTOR)
        if SOFTCAP != 0.0:
            capped, _ = _tanh(_in_caps(z, SOFTCAP, x_ptr.dtype.element_ty))
            z = tl.where(in_row, SOFTCAP * capped, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(z, 1))
        scale = tl.exp(before - largest)
        shifted = z - largest[:, None]
        e = tl.exp(shifted)
        if ENTROPY:
            weighted = tl.where(scale > 0.0, scale * (weighted + (before - largest) * total), 0.0)
            weighted += tl.sum(e * tl.maximum(shifted, LOWEST), 1)  # of -inf, 0 and not NaN
        total = total * scale + tl.sum(e, 1)
        if SUM_LOGITS:
            linear += tl.sum(tl.where(in_row, z, 0.0), 1)

    row_largest = tl.max(largest, 0)
    scale = tl.exp(largest - row_largest)
    row_total = tl.sum(total * scale, 0)
    column = (target - start).to(tl.int64)
    here = live & (column >= 0) & (column < V) & (part == 0)
    at_target = tl.load(x_ptr + row * STRIDE + column, mask=here).to(tl.float32)
    if SOFTCAP != 0.0:
        capped, _ = _tanh(_in_caps(at_target, SOFTCAP, x_ptr.dtype.element_ty))
        at_target = SOFTCAP * capped
    stats_ptr += part.to(tl.int64) * (5 if ENTROPY else 4) * N + row
    tl.store(stats_ptr, tl.where(live, row_largest, 0.0))
    stats_ptr += N
    tl.store(stats_ptr, tl.where(live, row_total, 1.0 / PARTS))
    stats_ptr += N
    tl.store(stats_ptr, tl.where(here, at_target, 0.0))
    stats_ptr += N
    tl.store(stats_ptr, tl.sum(linear, 0))
    if ENTROPY:
        weighted = tl.where(scale > 0.0, scale * (weighted + (largest - row_largest) * total), 0.0)
        tl.store(stats_ptr + N, tl.sum(weighted, 0))


@triton.jit
def _merge_kernel(
    partial_ptr, stats_ptr, N, PARTS: tl.constexpr, STATS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = rows < N
    largest = tl.load(partial_ptr + rows, mask=mask, other=0.0)
    for part in range(1, PARTS):
        largest = tl.maximum(largest, tl.load(partial_ptr + part * STATS * N + rows, mask=mask, other=0.0))
    total = tl.zeros((BLOCK_N,), tl.float32)
    at_target = tl.zeros((BLOCK_N,), tl.float32)
    linear = tl.zeros((BLOCK_N,), tl.float32)
    weighted = tl.zeros((BLOCK_N,), tl.float32)
    for part in range(PARTS):
        part_ptr = partial_ptr + part * STATS * N + rows
        shift = tl.load(part_ptr, mask=mask, other=0.0) - largest
        scale = tl.exp(shift)
        part_total = tl.load(part_ptr + N, mask=mask, other=0.0)
        total += scale * part_total
        at_target += tl.load(part_ptr + 2 * N, mask=mask, other=0.0)
        linear += tl.load(part_ptr + 3 * N, mask=mask, other=0.0)
        if STATS == 5:
            part_weighted = tl.load(part_ptr + 4 * N, mask=mask, other=0.0)
            weighted += tl.where(scale > 0.0, scale * (part_weighted + shift * part_total), 0.0)
    tl.store(stats_ptr + rows, largest, mask=mask)
    tl.store(stats_ptr + N + rows, total, mask=mask)
    tl.store(stats_ptr + 2 * N + rows, at_target, mask=mask)
    tl.store(stats_ptr + 3 * N + rows, linear, mask=mask)
    if STATS == 5:
        tl.store(stats_ptr + 4 * N + rows, weighted, mask=mask)


@triton.jit
def _backward_kernel(
    x_ptr, target_ptr, stats_ptr, dloss_ptr, dlog_prob_ptr, dentropy_ptr, dx_ptr,
    N, start, ignore_index, peak, uniform, twice_z_loss,
    STRIDE: tl.constexpr, DX_STRIDE: tl.constexpr, V: tl.constexpr, SOFTCAP: tl.constexpr,
    TILES: tl.constexpr, BLOCK_V: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, offset = (program // TILES).to(tl.int64), program % TILES * BLOCK_V
    target = tl.load(target_ptr + row)
    live = target != ignore_index
    shift = _row_shift(row, STRIDE, VECTOR)
    lanes = offset + tl.arange(0, BLOCK_V)
    z = _load_logits(x_ptr, row, lanes, offset, shift, live, 0.0, STRIDE, V, BLOCK_V, VECTOR)
    if SOFTCAP != 0.0:
        capped, cap_slope = _tanh(_in_caps(z, SOFTCAP, x_ptr.dtype.element_ty))
        z = SOFTCAP * capped

    stats_ptr += row
    largest, total = tl.load(stats_ptr), tl.load(stats_ptr + N)
    slope, at_target, flat = 0.0, 0.0, 0.0
    if dloss_ptr is not None:
        dloss = tl.load(dloss_ptr + row).to(tl.float32)
        slope += dloss * (1.0 + twice_z_loss * (largest + tl.log(total)))
        at_target -= dloss * peak
        flat = dloss * uniform
    if dlog_prob_ptr is not None:
        dlog_prob = tl.load(dlog_prob_ptr + row).to(tl.float32)
        slope -= dlog_prob
        at_target += dlog_prob
    shifted = z - largest
    e = tl.exp(shifted)
    dz = e * (slope / total)
    if dentropy_ptr is not None:
        LOWEST: tl.constexpr = -3.4028234663852886e38
        weighted = tl.load(stats_ptr + N + N + N + N)
        dentropy = tl.load(dentropy_ptr + row).to(tl.float32)
        dz -= e * (tl.maximum(shifted, LOWEST) - weighted / total) * (dentropy / total)  # of -inf, 0 and not NaN
    dz += tl.where(lanes - shift == target - start, at_target, 0.0) - flat
    if SOFTCAP != 0.0:
        dz *= cap_slope
    dx = tl.where(live, dz, 0.0).to(dx_ptr.dtype.element_ty)

    if (STRIDE - DX_STRIDE) % VECTOR == 0:
        dx_ptr += tl.multiple_of(row * DX_STRIDE - shift, VECTOR)
    else:
        dx_ptr += row * DX_STRIDE - shift
    if (STRIDE % VECTOR == 0) & (V % VECTOR == 0):
        tl.store(dx_ptr + lanes, dx, mask=lanes < V)
    elif (offset >= shift) & (offset + BLOCK_V <= shift + V):
        tl.store(dx_ptr + lanes, dx)
    else:
        tl.store(dx_ptr + lanes, dx, mask=(lanes >= shift) & (lanes < shift + V))
