"""Make Triton's interpreter compute what a GPU computes. For tests only: it replaces private parts of Triton."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

PROVEN = ("3.6.", "3.7.")
_ARITHMETIC = ("create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_fma", "create_exp", "create_exp2")
_stock_convert = interpreter._convert_float
_stock_dot = interpreter.InterpreterBuilder.create_dot
_stock_masked_load = interpreter.InterpreterBuilder.create_masked_load
_stock_masked_store = interpreter.InterpreterBuilder.create_masked_store
_stock_exp, _stock_exp2 = interpreter.InterpreterBuilder.create_exp, interpreter.InterpreterBuilder.create_exp2
_stock_fdiv, _stock_rsqrt = interpreter.InterpreterBuilder.create_fdiv, interpreter.InterpreterBuilder.create_rsqrt
_stock_init_args = interpreter.GridExecutor._init_args_hst
_stock_patch_lang = interpreter._patch_lang


def install() -> None:
    """Repair the interpreter for the rest of this process, before its first launch."""
    if not triton.__version__.startswith(PROVEN):
        raise RuntimeError(f"interpreter_repair.py is proven for Triton {PROVEN}, not for {triton.__version__}")
    builder = interpreter.InterpreterBuilder
    interpreter._convert_float = _convert_float
    builder.create_dot = _create_dot
    builder.create_masked_load = _create_masked_load
    builder.create_masked_store = _create_masked_store
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_fma = _create_fma
    builder.create_exp, builder.create_exp2 = _create_exp, _create_exp2
    builder.create_fdiv, builder.create_rsqrt = _create_fdiv, _create_rsqrt
    for name in _ARITHMETIC:
        setattr(builder, name, _refuse_bfloat16(name, getattr(builder, name)))
    _stock_patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
    tl.tensor.__index__ = lambda self: self.handle.data.item()
    interpreter.GridExecutor._init_args_hst = _init_args
    interpreter.GridExecutor._restore_args_dev = lambda *args: None  # the tensors are on the CPU already


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
    """Return `data`'s values in `target`, as bit patterns."""
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(data).view(np.uint32)
        half_to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = ((bits + half_to_even) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded).reshape(data.shape)
    if source == tl.bfloat16 and target == tl.float32:
        return (np.ascontiguousarray(data).astype(np.uint32) << np.uint32(16)).reshape(data.shape)
    if source == tl.float32 and target == tl.float8e4nv:
        x = torch.from_numpy(np.array(data, order="C"))
        bits = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(x.isnan(), 0x7F, bits).numpy()
    if source == tl.float8e4nv and target in (tl.float16, tl.float32):
        x = torch.from_numpy(np.array(data, dtype=np.uint8, order="C")).view(torch.float8_e4m3fn)
        bits = (np.float16, np.uint16) if target == tl.float16 else (np.float32, np.uint32)
        return x.float().numpy().astype(bits[0]).view(bits[1])
    return _stock_convert(data, source, target, rounding)


def _to_float32(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = _convert_float(handle.data, tl.bfloat16, tl.float32, None)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _create_dot(self: Any, a: Any, b: Any, acc: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    return _stock_dot(self, _to_float32(a), _to_float32(b), acc, input_precision, max_num_imprecise_acc)


def _off(exact: np.ndarray, operand: np.ndarray) -> np.ndarray:
    """[...] float64 -> float32, off by up to a unit in the last place, which the operand's bits decide."""
    bits = np.ascontiguousarray(operand).view(np.uint32).astype(np.uint64)
    share = ((bits * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) / 2.0**23 - 1
    return (exact * (1 + share.reshape(exact.shape) * 2.0**-24)).astype(np.float32)


def _power_of_two(x: np.ndarray) -> np.ndarray:
    exact = np.exp2(x.astype(np.float64))
    return np.where(x == np.round(x), exact.astype(np.float32), _off(exact, x))  # integers' powers are exact


def _create_exp2(self: Any, x: Any) -> Any:
    if x.data.dtype != np.float32:
        return _stock_exp2(self, x)
    with np.errstate(all="ignore"):
        return interpreter.TensorHandle(_power_of_two(x.data), x.dtype.scalar)


def _create_exp(self: Any, x: Any) -> Any:
    if x.data.dtype != np.float32:
        return _stock_exp(self, x)
    with np.errstate(all="ignore"):
        return interpreter.TensorHandle(_power_of_two(x.data * np.float32(1.4426950408889634)), x.dtype.scalar)


def _create_fdiv(self: Any, x: Any, y: Any) -> Any:
    if x.data.dtype != np.float32:
        return _stock_fdiv(self, x, y)
    with np.errstate(all="ignore"):
        return interpreter.TensorHandle(x.data * (np.float32(1) / y.data), x.dtype.scalar)


def _create_rsqrt(self: Any, x: Any) -> Any:
    if x.data.dtype != np.float32:
        return _stock_rsqrt(self, x)
    with np.errstate(all="ignore"):
        return interpreter.TensorHandle(_off(x.data.astype(np.float64) ** -0.5, x.data), x.dtype.scalar)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    total = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


_extents: list[tuple[int, int]] = []  # first byte of, and first byte after, each tensor of the running launch


def _init_args(self: Any, args: Any, kwargs: Any) -> Any:
    _extents.clear()
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor) and x.numel() > 0:
            span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            _extents.append((x.data_ptr(), x.data_ptr() + span * x.element_size()))
    named = dict(zip(self.arg_names, args, strict=False)) | kwargs
    if "table_ptr" in named:
        _extents.extend(_of_table(named))
    return _stock_init_args(self, args, kwargs)


def _of_table(named: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """The extents of the tensors whose addresses AdamW's kernel finds in its table."""
    roles = ("param", "grad", "exp_avg", "exp_avg_sq", None, "master")
    for *addresses, rows, columns, n, last, _, _ in named["table_ptr"].tolist():
        for role, address in zip(roles, addresses, strict=True):
            x = named[f"{role}_ptr"] if role else None
            if role is None or x is not None:
                yield address, address + (n * x.element_size() if x is not None else 32)  # `now`: four of float64
        if rows:
            yield from ((rows, rows + 8 * (n // max(last, 1))), (columns, columns + 8 * last))


def _check_addresses(ptrs: Any, mask: Any) -> None:
    addresses = ptrs.data[np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)]
    if addresses.size == 0:
        return
    first, end = int(addresses.min()), int(addresses.max()) + ptrs.get_element_ty().primitive_bitwidth // 8
    if not any(start <= first and end <= stop for start, stop in _extents):
        raise IndexError("an access reaches past the tensors of the launch")


def _create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
    _check_addresses(ptrs, mask)
    return _stock_masked_store(self, ptrs, value, mask, *args)


def _create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
    _check_addresses(ptrs, mask)
    element = ptrs.get_element_ty()
    if other is None and element.is_floating() and element.primitive_bitwidth >= 16:
        np_dtype = interpreter._get_np_dtype(element)
        undefined = np_dtype.type(0x7FC0 if element == tl.bfloat16 else np.nan)
        other = interpreter.TensorHandle(np.full_like(ptrs.data, undefined, dtype=np_dtype), element)
    return _stock_masked_load(self, ptrs, mask, other, *args, **kwargs)


def _refuse_bfloat16(name: str, stock: Any) -> Any:
    def checked(self: Any, *operands: Any) -> Any:
        if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
            raise TypeError(f"{name} on bfloat16: upcast with .to(tl.float32) right after the load")
        return stock(self, *operands)

    return checked
