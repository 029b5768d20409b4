"""AdamW of many parameters in one launch.

    g = scale grad                                         (unscale and clip: one number, read on the device)
    w = w - lr decay w
    m = m + (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2
    w = w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, with the constants of torch's AdamW.

The arithmetic is in float32. m, v and a parameter without a master weight may be bfloat16. With a key these are rounded
stochastically, so that the expected value is exact (Gupta et al. 2015, arXiv:1502.02551, section 3). The random bits
are Philox words of the element's index in the logical tensor and of t, so they do not depend on the layout.

One launch steps all tensors that share their dtypes: a program steps one tile, and finds the addresses of the tile's
tensors in a table in device memory. The host copies the table without waiting, and only when an address has changed.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import check_dtype
from ._dispatch import operator, runs_triton
from ._philox import philox
from ._rows import ceil_div
from ._torch import has_no_values
from ._triton import launch, tl, triton

_BLOCK = 1024
_MOST_TABLES = 64  # tables that are kept, each for one list of sizes


class AdamWState(NamedTuple):
    """One parameter of `adamw_foreach`, and what belongs to it alone.

    Attributes:
        param: any shape, contiguous; float32, bfloat16 or float16 (the reference takes float64 too).
        grad: of that shape and any such dtype.
        now: `[4]` float64 on the device: lr, 1 - beta1^t, sqrt(1 - beta2^t) and t, as `adamw_now` returns them.
        master: float32 of that shape. The update goes to `master`, and `param` becomes `master` rounded to nearest.
            Where `param` isn't `master` rounded before, somebody wrote to it: there the step begins with `param`.
        key: below 2^63: round every bfloat16 output stochastically. `None`: round to nearest.
        place: with a key, int64 `[R]` and `[C]` with R C elements in all: element i of `param` has the logical index
            `place[0][i // C] + place[1][i % C]`. `None`: i.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    now: Tensor
    master: Tensor | None = None
    key: int | None = None
    place: tuple[Tensor, Tensor] | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the parameter's shape, by name."""
        named = {"param": self.param, "grad": self.grad, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return named if self.master is None else named | {"master": self.master}

    @property
    def kind(self) -> Hashable:
        """Equal for states that one launch can step: dtypes, what they have, and whether loads can be wide."""
        held = [x for x in (*self[:4], self.master) if x is not None]
        addresses = 0
        if not (torch.compiler.is_compiling() or has_no_values(self.param)):
            for x in held:
                addresses |= x.data_ptr()
        return *[x.dtype for x in held], self.key is None, self.place is None, addresses % 16


@torch.no_grad()
def adamw_foreach(
    states: Sequence[AdamWState], *, betas: tuple[float, float], eps: float, weight_decay: float,
    scale: Tensor | None = None, impl: str | None = None,
) -> None:  # fmt: skip
    """Update parameters, their moments and their master weights in place, one launch for each combination of dtypes.

    Args:
        states: of the parameters, on one device.
        betas, eps, weight_decay: the parameters of `torch.optim.AdamW`.
        scale: a scalar that multiplies the gradients first.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of the parameters.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.

    Example:
        >>> weights = [torch.ones(3), torch.ones(2, 2)]
        >>> now = adamw_now(torch.ones(2), 0.1, (0.9, 0.999)).unbind()
        >>> states = [AdamWState(w, w.clone(), 0 * w, 0 * w, t) for w, t in zip(weights, now)]
        >>> adamw_foreach(states, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        >>> weights[0]
        tensor([0.9000, 0.9000, 0.9000])
    """
    groups: dict[Hashable, list[AdamWState]] = defaultdict(list)
    for state in states:
        _check(state, scale)
        groups[state.kind].append(state)
    for group in groups.values():
        if not runs_triton(impl, group[0].param, "adamw"):
            for state in group:
                _reference(state, scale, *betas, eps, weight_decay)
            continue
        params, grads, exp_avgs, exp_avg_sqs, now, masters, keys, places = zip(*group, strict=True)
        masters, keys = ([x for x in of if x is not None] for of in (masters, keys))
        rows, columns = zip(*places, strict=True) if places[0] is not None else ((), ())
        lists = (list(of) for of in (params, grads, exp_avgs, exp_avg_sqs, now, masters, rows, columns))
        _adamw_op(*lists, scale, *betas, eps, weight_decay, keys)


def _reference(
    state: AdamWState, scale: Tensor | None, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    param, grad, exp_avg, exp_avg_sq, now, master, key, place = state
    weight = param if master is None else master
    before = param if master is None else followed(master, param)
    exact = torch.promote_types(weight.dtype, torch.float32)
    lr, correction1, correction2, _ = now.to(exact).unbind()
    w, g, m, v = (x.to(exact) for x in (before, grad, exp_avg, exp_avg_sq))
    g = g if scale is None else g * scale.to(exact)
    w = w - lr * weight_decay * w
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    w = w - lr / correction1 * (m / (v.sqrt() / correction2 + eps))
    bits: Sequence[Tensor | None] = (None, None, None)
    if key is not None:
        i = torch.arange(param.numel(), device=param.device) if place is None else place[0][:, None] + place[1]
        bits = rounding_bits(key, i.view(param.shape), now[3].long())
    for x, value, random in zip((weight, exp_avg, exp_avg_sq), (w, m, v), bits, strict=True):
        x.copy_(value if random is None or x.dtype != torch.bfloat16 else round_at_random(value, random))
    if master is not None:
        param.copy_(w)


def followed(master: Tensor, param: Tensor) -> Tensor:
    """Return `master`, and the values of `param` where it isn't `master` rounded: where somebody wrote to it."""
    return torch.where(master.to(param.dtype) == param, master, param.to(master.dtype))


def adamw_now(steps: Tensor, lr: float | Tensor, betas: tuple[float, float]) -> Tensor:
    """Compute the `now` of each of several parameters.

    Args:
        steps: `[n]`, how many steps each parameter has had, this one included.
        lr, betas: the parameters of `torch.optim.AdamW`.

    Returns:
        `[n, 4]` float64 on the device of `steps`; the host does not wait for the device.
    """
    t = steps.to(torch.float64)
    return torch.stack([torch.ones_like(t) * lr, 1 - betas[0] ** t, (1 - betas[1] ** t).sqrt(), t], 1)


def rounding_bits(key: int, indices: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw 16 random bits for the weight, for m and for v of each element: int64 of the shape of `indices`."""
    first, second, _, _ = philox(key, indices & 0xFFFFFFFF, indices >> 32, t & 0xFFFFFFFF, torch.zeros_like(t))
    return first & 0xFFFF, first >> 16, second & 0xFFFF


def round_at_random(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically: away from zero if `bits` plus the 16 cut-off bits carry over."""
    x = x.to(torch.float32)
    cut = ((x.view(torch.int32) + bits.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(x.isnan(), x, cut).to(torch.bfloat16)


def _check(state: AdamWState, scale: Tensor | None) -> None:
    param, now, key, place = state.param, state.now, state.key, state.place
    shape, device = param.shape, param.device
    for name, x in state.tensors.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but param has {tuple(shape)}")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, but param is on {device}")
        check_dtype(name, x.dtype)
        if name != "grad" and not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()} at shape {tuple(x.shape)}: make it contiguous")
        if name == "master" and x.dtype.itemsize < 4:
            raise ValueError(f"master is {x.dtype}; it must be float32")
    if now.shape != (4,) or now.dtype != torch.float64 or now.device != device:
        raise ValueError(f"now is {now.dtype} {tuple(now.shape)} on {now.device}; adamw_now gives float64 (4,) there")
    if key is not None and not 0 <= key < 2**63:
        raise ValueError(f"key {key} is not in [0, 2^63)")
    if scale is not None and (scale.numel() != 1 or scale.device != device):
        raise ValueError(f"scale has shape {tuple(scale.shape)} on {scale.device}, but is one number on {device}")
    for index in place or ():
        if index.dtype != torch.int64 or index.dim() != 1 or index.device != device:
            there = f"{index.dtype} {tuple(index.shape)} on {index.device}"
            raise ValueError(f"place has indices of {there}; they must be int64 in one dimension on {device}")
    if place is not None and place[0].numel() * place[1].numel() != param.numel():
        counts = f"{place[0].numel()} x {place[1].numel()}"
        raise ValueError(f"place has {counts} indices, but param has {param.numel()} elements")


@operator(
    "adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor[] now,"
    " Tensor(d!)[] masters, Tensor[] rows, Tensor[] columns, Tensor? scale, float beta1, float beta2, float eps,"
    " float weight_decay, int[] keys) -> ()"
)
def _adamw_op(params: list[Tensor], *others: Any) -> Iterator[None]:
    *lists, scale, beta1, beta2, eps, weight_decay, keys = others
    yield
    lists = [params, *([x.contiguous() for x in of] for of in lists)]
    tiles, table = _tables(lists, keys)
    grads, exp_avgs, exp_avg_sqs, _, masters, rows, _ = lists[1:]
    aligned = all(x.data_ptr() % 16 == 0 for of in (params, grads, exp_avgs, exp_avg_sqs, masters) for x in of)
    if tiles.numel() == 0:
        return
    launch(
        adamw_kernel, (tiles.numel(), 1, 1), num_warps=4, tiles_ptr=tiles, table_ptr=table, param_ptr=params[0],
        grad_ptr=grads[0], exp_avg_ptr=exp_avgs[0], exp_avg_sq_ptr=exp_avg_sqs[0],
        master_ptr=masters[0] if masters else None, rows_ptr=rows[0] if rows else None, scale_ptr=scale,
        weight1=1 - beta1, beta2=beta2, weight2=1 - beta2, eps=eps, weight_decay=weight_decay,
        ROUND=bool(keys), ALIGNED=aligned, BLOCK=_BLOCK,
    )  # fmt: skip


def _tables(lists: list[list[Tensor]], keys: list[int]) -> tuple[Tensor, Tensor]:
    """Return which tensor each tile is of, and for each tensor its addresses, N, C, key and first tile, int64."""
    params, columns = lists[0], lists[-1]
    device, sizes = params[0].device, tuple(p.numel() for p in params)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    counts = [ceil_div(n, _BLOCK) for n in sizes]
    addresses = [[x.data_ptr() for x in of] or [0] * len(params) for of in lists]
    last = [c.numel() for c in columns] or sizes
    firsts = [0, *itertools.accumulate(counts)][:-1]
    numbers = tuple(zip(*addresses, sizes, last, keys or sizes, firsts, strict=True))
    # A graph copies the host's table at each replay, and only then: other launches have a table of their own.
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    kept = [] if captured else _kept(device, stream, _BLOCK, sizes)
    if not kept or kept[2] != numbers:
        host = _host_table(numbers, device) if captured else _host_table.__wrapped__(numbers, device)
        table = host.to(device, non_blocking=True)
        counted = (table[:, 8] + _BLOCK - 1) // _BLOCK
        tiles = kept[0] if kept else torch.repeat_interleave(counted, output_size=sum(counts))
        kept[:] = tiles, table, numbers
    return kept[0], kept[1]


@functools.lru_cache(_MOST_TABLES)
def _kept(device: torch.device, stream: int, block: int, sizes: tuple[int, ...]) -> list[Any]:
    """Return what `_tables` keeps: the tensor of each tile, the table on the device, and its numbers."""
    return []


@functools.cache
def _host_table(numbers: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return the table on the host, for a GPU in pinned memory: kept, as a graph reads it as long as it lives."""
    table = torch.tensor(numbers)
    return table.pin_memory() if device.type == "cuda" else table


@triton.jit
def _round_at_random(x, bits):
    raised = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return tl.where(x == x, raised.to(tl.float32, bitcast=True), x)


@triton.jit
def _address(table_ptr, column: tl.constexpr, like_ptr, ALIGNED: tl.constexpr):
    """Return an address of the table as a pointer to elements of the type that `like_ptr` points to."""
    ptr = tl.load(table_ptr + column).to(like_ptr.dtype)
    return tl.multiple_of(ptr, 16) if ALIGNED else ptr


@triton.jit
def _load(ptr, at, N, EDGE: tl.constexpr):
    if EDGE:
        return tl.load(ptr + at, mask=at < N, other=0)
    else:
        return tl.load(ptr + at)


@triton.jit
def _store(ptr, at, x, N, EDGE: tl.constexpr):
    if EDGE:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=at < N)
    else:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty))


@triton.jit
def adamw_kernel(
    tiles_ptr, table_ptr, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, rows_ptr, scale_ptr,
    weight1, beta2, weight2, eps, weight_decay, ROUND: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step one tile. The pointers from `param_ptr` on give types alone; the addresses are in the table."""
    table_ptr += tl.load(tiles_ptr + tl.program_id(0)) * 12
    N, C, key = tl.load(table_ptr + 8), tl.load(table_ptr + 9), tl.load(table_ptr + 10)
    start = (tl.program_id(0) - tl.load(table_ptr + 11)) * BLOCK
    if start + BLOCK <= N:  # without a mask every access is wide, whatever N is
        _step(
            table_ptr, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, rows_ptr, scale_ptr,
            weight1, beta2, weight2, eps, weight_decay, start, N, C, key, ROUND, ALIGNED, False, BLOCK,
        )  # fmt: skip
    else:
        for part in range(start, N, BLOCK // 8):  # narrow accesses of few elements: of many they take registers
            _step(
                table_ptr, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, rows_ptr, scale_ptr,
                weight1, beta2, weight2, eps, weight_decay, part, N, C, key, ROUND, ALIGNED, True, BLOCK // 8,
            )  # fmt: skip


@triton.jit
def _step(
    table_ptr, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, rows_ptr, scale_ptr,
    weight1, beta2, weight2, eps, weight_decay, start, N, C, key,
    ROUND: tl.constexpr, ALIGNED: tl.constexpr, EDGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    now_ptr = tl.load(table_ptr + 4).to(tl.pointer_type(tl.float64))
    param_ptr = _address(table_ptr, 0, param_ptr, ALIGNED)
    grad_ptr = _address(table_ptr, 1, grad_ptr, ALIGNED)
    exp_avg_ptr = _address(table_ptr, 2, exp_avg_ptr, ALIGNED)
    exp_avg_sq_ptr = _address(table_ptr, 3, exp_avg_sq_ptr, ALIGNED)
    lr = tl.load(now_ptr).to(tl.float32)
    correction1 = tl.load(now_ptr + 1).to(tl.float32)
    correction2 = tl.load(now_ptr + 2).to(tl.float32)
    g = _load(grad_ptr, at, N, EDGE).to(tl.float32)
    m = _load(exp_avg_ptr, at, N, EDGE).to(tl.float32)
    v = _load(exp_avg_sq_ptr, at, N, EDGE).to(tl.float32)
    p = _load(param_ptr, at, N, EDGE)
    w = p.to(tl.float32)
    if master_ptr is not None:
        master_ptr = _address(table_ptr, 5, master_ptr, ALIGNED)
        master = _load(master_ptr, at, N, EDGE)
        w = tl.where(master.to(p.dtype) == p, master, w)  # else somebody wrote to the parameter
    if scale_ptr is not None:
        g *= tl.load(scale_ptr).to(tl.float32)
    w -= lr * weight_decay * w
    m += (g - m) * weight1
    v = v * beta2 + g * g * weight2
    w -= tl.div_rn(lr, correction1) * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), correction2) + eps)
    narrow = w
    if ROUND:
        index = at
        if rows_ptr is not None:
            row_ptrs = _address(table_ptr, 6, rows_ptr, False) + at // C
            column_ptrs = _address(table_ptr, 7, rows_ptr, False) + at % C
            if EDGE:
                index = tl.load(row_ptrs, mask=at < N, other=0) + tl.load(column_ptrs, mask=at < N, other=0)
            else:
                index = tl.load(row_ptrs) + tl.load(column_ptrs)
        low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
        t = low * 0 + tl.load(now_ptr + 3).to(tl.int64).to(tl.uint32)
        first, second, _, _ = tl.philox(key, low, high, t, low * 0)  # pyright: ignore[reportGeneralTypeIssues]
        if param_ptr.dtype.element_ty == tl.bfloat16 and master_ptr is None:
            narrow = _round_at_random(w, first & 0xFFFF)
        if exp_avg_ptr.dtype.element_ty == tl.bfloat16:
            m = _round_at_random(m, first >> 16)
        if exp_avg_sq_ptr.dtype.element_ty == tl.bfloat16:
            v = _round_at_random(v, second & 0xFFFF)
    _store(param_ptr, at, narrow, N, EDGE)
    _store(exp_avg_ptr, at, m, N, EDGE)
    _store(exp_avg_sq_ptr, at, v, N, EDGE)
    if master_ptr is not None:
        _store(master_ptr, at, w, N, EDGE)
