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
    descriptors: tuple[Any, ...] = (),
) -> None:
    """Launch `kernel[grid](*descriptors, *tensors, *scalars, *constants)` on the device and stream of `tensors[0]`.

    The stream is the device's current one. A tensor or a descriptor that the kernel can do without may be `None`.

    Triton finds the compiled kernel of a launch anew each time, in about twice the host time of all the rest. Its
    choice depends on no more than the key below (on AMD also on the tensors' sizes, so there it is left to Triton).
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, scalars, constants, num_warps, descriptors)
    pointers = [t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    numbers = [type(s) is int and (s == 1, s % 16 == 0, -(2**31) <= s < 2**31) for s in scalars]
    boxes = [d if d is None else (d.base.dtype, *d.block_shape) for d in descriptors]
    # Kernels live as long as modules.
    key = (id(kernel), device.index, num_warps, constants, *boxes, *pointers, *numbers)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*descriptors, *tensors, *scalars, *constants)
        return None
    if any(type(held) is Later for held in (kernel, *constants)):
        decorate()
        kernel, constants = made(kernel), tuple(map(made, constants))
    compiled = kernel[grid](*descriptors, *tensors, *scalars, *constants, num_warps=num_warps)
    if compiled is not None and compiled.metadata.target.backend == "cuda":  # None from the interpreter
        _compiled[key] = compiled
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a CUDA device; a CPU counts as one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
