"""Which implementation of a kernel runs, and how a Triton launcher becomes a torch operator."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ValueError, ImportError):  # somebody has put None where it would be, or forbidden it
        return False


HAS_TRITON = _has("triton")
# As Triton reads it when it decorates a kernel.
INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


class Later:
    """A kernel that Triton decorates before the first launch of any.

    Triton takes as long to import as all of mpcore, and decorating reads each kernel's source again: both are for those
    alone who launch one. `decorate` puts the real ones where these stand.
    """

    def __init__(self, function: Callable, options: dict[str, Any]) -> None:
        self.function, self.options = function, options
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    @functools.cached_property
    def jit(self) -> Any:
        """The kernel as Triton has it."""
        decorator = importlib.import_module("triton").jit
        return decorator(**self.options)(self.function) if self.options else decorator(self.function)


def _jit(function: Callable | None = None, **options: Any) -> Any:
    return Later(function, options) if function is not None else lambda function: Later(function, options)


if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    triton = SimpleNamespace(jit=_jit)
    tl = SimpleNamespace()  # kernels name it in their bodies and annotations alone


def made(value: Any) -> Any:
    """The kernel as Triton has it, whatever stands for it; anything else is itself."""
    return value.jit if isinstance(value, Later) else value


def decorate() -> None:
    """Import Triton, and decorate every kernel there is, in all modules that name it."""
    language, package = importlib.import_module("triton.language"), __name__.rpartition(".")[0]
    placeholder = tl
    for module in [m for name, m in sys.modules.items() if name.startswith(package + ".") and m is not None]:
        for name, value in list(vars(module).items()):
            if isinstance(value, Later):
                setattr(module, name, value.jit)
            elif value is placeholder and name == "tl":
                setattr(module, name, language)


KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
REFERENCE_DTYPES = KERNEL_DTYPES | {torch.float64}


def runs_triton(impl: str | None, x: Tensor, any_dtype: bool = False) -> bool:
    """Say whether the Triton kernel runs for `x`; if not, the reference does.

    Args:
        impl: `None` takes Triton for a CUDA tensor of a dtype the kernels know, and the reference elsewhere.
            `"triton"` and `"reference"` are explicit requests.
        x: the kernel's main input.
        any_dtype: the kernel reads bits, and knows all dtypes.

    Raises:
        ValueError: `impl` is unknown, or is `"triton"` where Triton can't run; the message says why.
    """
    if impl is None:
        return HAS_TRITON and x.is_cuda and (any_dtype or x.dtype in KERNEL_DTYPES)
    if impl == "reference":
        return False
    if impl != "triton":
        raise ValueError(f"impl {impl!r} is none of None, 'triton' and 'reference'")
    if not HAS_TRITON:
        raise ValueError("impl='triton', but the triton package can't be imported; use impl='reference'")
    if not any_dtype and x.dtype not in KERNEL_DTYPES:
        raise ValueError(f"impl='triton' has no {x.dtype} kernel; cast to float32, or use impl='reference'")
    if not (x.is_cuda or (INTERPRETING and x.device.type == "cpu")):
        raise ValueError(
            f"impl='triton', but x is on {x.device}; move it to a CUDA device, use impl='reference', "
            "or set TRITON_INTERPRET=1 to run kernels on the CPU"
        )
    return True


def refuse_second_derivative(name: str, instead: str = "impl='reference'") -> None:
    """Raise if the backward pass of kernel `name`, running now, is itself being differentiated; says what to use.

    Stricter than torch's `once_differentiable`, which lets the dependence on saved inputs go lost unnoticed.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"the {name} kernel has no second derivative; use {instead}")


def can_read(ids: Tensor) -> bool:
    """Not on a GPU, nor while compiling: it would stall. A fake tensor, of a subclass, has no values."""
    return type(ids) is Tensor and ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel() > 0


def outside(ids: Tensor, size: int, ignore_index: int | None = None) -> int | None:
    """One of the indices that is neither in [0, size) nor `ignore_index`; None where there is none, or they
    can't be read."""
    if not can_read(ids):
        return None
    if ignore_index is not None:
        ids = ids.masked_fill(ids == ignore_index, 0)
    low, high = (int(v) for v in ids.aminmax())
    return low if low < 0 else high if high >= size else None


_library = torch.library.Library("mpcore", "FRAGMENT")


def define(schema: str, empty: Callable) -> Callable:
    """Declare `torch.ops.mpcore.<name>` and return its overload, bound once so that calls skip the lookup.

    Args:
        schema: the operator's signature, such as `"gelu_forward(Tensor x) -> Tensor"`.
        empty: allocates the outputs and writes nothing; this is what `torch.compile` traces, and what the launcher
            calls first, so that the two can't disagree on shapes, strides or dtypes.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"mpcore::{name}", empty, lib=_library)
    return getattr(torch.ops.mpcore, name).default


launching_on_cpu = INTERPRETING  # a fake GPU sets it: its tensors are there too


def launches(op: Callable, reference: Callable | None = None) -> Callable[[Callable], Callable]:
    """Decorate the launcher that runs `op` on CUDA tensors, and in Triton's interpreter on CPU tensors.

    Where nothing interprets, `reference` runs on CPU tensors: fake ones trace the operator, and a graph gets real ones.

    What the operator writes over has a new version then, so that autograd refuses a graph that had kept the old values.
    """
    arguments = op._schema.arguments  # pyright: ignore[reportFunctionMemberAccess]
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def register(launch: Callable) -> Callable:
        def launch_and_count(*given: Any) -> Any:
            outs = launch(*given)
            torch.autograd.graph.increment_version(
                [given[i] for i in written if i < len(given) and given[i] is not None]
            )
            return outs

        run = launch_and_count if written else launch

        def run_on_cpu(*given: Any) -> Any:
            return reference(*given) if reference is not None and not launching_on_cpu else run(*given)

        _library.impl(op, run, "CUDA")
        _library.impl(op, run if reference is None else run_on_cpu, "CPU")
        return launch

    return register
