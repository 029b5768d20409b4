"""Triton: imported by the first launch of a kernel, and launched without looking up a compiled kernel twice.

Importing Triton takes as long as importing all of mpcore, so only a launch imports it. Until then, `triton.jit` here is
a stand-in that remembers the kernel, and `tl` is an empty name. Other modules import both from here.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

try:
    HAS_TRITON = importlib.util.find_spec("triton") is not None
except (ValueError, ImportError):  # sys.modules holds None for Triton, or an import hook forbids it
    HAS_TRITON = False
# Triton reads the same variable when it decorates a kernel.
INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
STAGES = 3  # of the loops of memory-bound kernels


class LazyKernel:
    """A kernel that waits for the first launch to be decorated by `triton.jit`."""

    def __init__(self, function: Callable, options: dict[str, Any]) -> None:
        self.function, self.options = function, options
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    @functools.cached_property
    def jit(self) -> Any:
        """The kernel as Triton decorates it; imports Triton."""
        decorator = importlib.import_module("triton").jit
        return decorator(**self.options)(self.function) if self.options else decorator(self.function)


def _jit(function: Callable | None = None, **options: Any) -> Any:
    return LazyKernel(function, options) if function is not None else lambda function: LazyKernel(function, options)


if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    triton = SimpleNamespace(jit=_jit)
    tl = SimpleNamespace()  # kernels use it in their bodies and annotations only


def decorated(value: Any) -> Any:
    """Return the kernel that Triton decorated for a `LazyKernel`; any other value comes back unchanged."""
    return value.jit if isinstance(value, LazyKernel) else value


def decorate_all() -> None:
    """Import Triton, and replace the stand-ins in every module of this package: Triton reads a kernel's globals."""
    language, package = importlib.import_module("triton.language"), __name__.rpartition(".")[0]
    placeholder = tl
    for module in [m for name, m in sys.modules.items() if name.startswith(package + ".") and m is not None]:
        for name, value in list(vars(module).items()):
            if isinstance(value, LazyKernel):
                setattr(module, name, value.jit)
            elif value is placeholder and name == "tl":
                setattr(module, name, language)


def launch(kernel: Any, grid: tuple[int, ...], *, num_warps: int, **arguments: Any) -> None:
    """Launch `kernel[grid](**arguments)` on the device and the current stream of its first argument, a tensor.

    Triton searches for the compiled kernel at each launch, which takes twice the host time of everything else. This
    function remembers it instead. Triton's choice depends on the key below only; on AMD it also depends on the sizes of
    the tensors, so there Triton searches. A constant may be a kernel; `None` stands for a tensor that is not given.
    """
    function = kernel.function if type(kernel) is LazyKernel else kernel.fn
    every, pointers, numbers, constants, compiled = _readers(function)
    values: tuple[Any, ...]
    try:
        values = every(arguments)
    except KeyError:
        values = ()
    if len(values) != len(arguments):
        wrong = sorted(arguments.keys() ^ set(function.__code__.co_varnames[: function.__code__.co_argcount]))
        raise TypeError(f"{kernel.__name__} and its launch don't share the arguments {', '.join(wrong)}")
    device = values[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, num_warps=num_warps, **arguments)
    tensors = [t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in pointers(arguments)]
    scalars = [type(s) is int and (s == 1, s % 16 == 0, -(2**31) <= s < 2**31) for s in numbers(arguments)]
    fixed = constants(arguments)
    key = (id(kernel), device.index, num_warps, fixed, *tensors, *scalars)
    known = compiled.get(key)
    if known is not None:
        known[1][grid](*values)
        return None
    held = kernel, *fixed
    if any(type(value) is LazyKernel for value in held):
        decorate_all()
    run, values = decorated(kernel), tuple(map(decorated, values))
    made = run[grid](*values, num_warps=num_warps)
    if made is not None and made.metadata.target.backend == "cuda":  # the interpreter returns None
        compiled[key] = held, made  # what is held keeps its id
    return None


Reader = Callable[[dict[str, Any]], tuple[Any, ...]]


@functools.cache
def _readers(function: Callable) -> tuple[Reader, Reader, Reader, Reader, dict[tuple, Any]]:
    """Return what reads, from named arguments in the kernel's order: all, its pointers, its numbers, its constants.

    And what `launch` keeps: the function's compiled kernels, by what Triton's choice depends on.
    """
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    constants = [name for name in names if function.__annotations__.get(name) == "tl.constexpr"]
    pointers = [name for name in names if name.endswith("_ptr")]

    def reader(names: Sequence[str]) -> Reader:  # itemgetter is a few times as fast as a comprehension
        return itemgetter(*names) if len(names) > 1 else lambda arguments: tuple(arguments[name] for name in names)

    numbers = [n for n in names if n not in (*pointers, *constants)]
    return reader(names), reader(pointers), reader(numbers), reader(constants), {}


def stages(elements: int, *tensors: torch.Tensor | None) -> int:
    """Return how many stages a loop gets that loads `elements` of each tensor in one iteration.

    Three, if two buffers of each fit into shared memory: two stages take one buffer, so each iteration would begin by
    waiting for the copies that the iteration before it began last.
    """
    if INTERPRETING:
        return STAGES
    given = [t for t in tensors if t is not None]
    device, buffers = given[0].device, 2 * elements * sum(t.element_size() for t in given)
    index = device.index if device.type == "cuda" else driver().get_current_device()
    return STAGES if buffers + 1024 <= _shared_memory(index) else 2


def driver() -> Any:
    """Return Triton's active driver."""
    return importlib.import_module("triton.runtime").driver.active


@functools.cache
def _shared_memory(device: Any) -> int:
    """Return the bytes of shared memory that a program may have on a device, as the driver names it."""
    return driver().utils.get_device_properties(device)["max_shared_mem"]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; a CPU counts as one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
