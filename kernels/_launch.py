"""How kernels are launched: on the device of their tensors, and without compiling or looking up twice."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ._dispatch import Later, decorate, made

_compiled: dict[tuple, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Any, ...],
    scalars: tuple[int | float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
) -> None:
    """Launch `kernel[grid](*tensors, *scalars, *constants)` on the device and current stream of `tensors[0]`.

    A tensor that the kernel can do without may be `None`.

    Triton finds the compiled kernel of a launch anew each time, in about twice the host time of all the rest. Its
    choice depends on no more than the key below (on AMD also on the tensors' sizes, so there it is left to Triton).
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, scalars, constants, num_warps)
    pointers = [t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    numbers = [type(s) is int and (s == 1, s % 16 == 0, -(2**31) <= s < 2**31) for s in scalars]
    key = (id(kernel), device.index, num_warps, constants, *pointers, *numbers)  # kernels live as long as modules
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*tensors, *scalars, *constants)
        return None
    if any(type(held) is Later for held in (kernel, *constants)):
        decorate()
        kernel, constants = made(kernel), tuple(map(made, constants))
    compiled = kernel[grid](*tensors, *scalars, *constants, num_warps=num_warps)
    if compiled is not None and compiled.metadata.target.backend == "cuda":  # None from the interpreter
        _compiled[key] = compiled
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a CUDA device; a CPU counts as one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
