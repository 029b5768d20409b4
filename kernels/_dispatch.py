"""Which implementation of a kernel runs, and how a Triton launcher becomes a torch operator."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton import knobs

    HAS_TRITON = True
    # Read by Triton when it decorates a kernel, so it cannot change once the kernels are imported.
    INTERPRETING = knobs.runtime.interpret
except ImportError:  # the kernels below still import; only their references can run
    triton, tl = SimpleNamespace(jit=lambda fn=None, **options: fn or (lambda later: later)), None
    HAS_TRITON = INTERPRETING = False

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


def refuse_second_derivative(name: str) -> None:
    """Raise if the backward pass of kernel `name`, running now, is itself being differentiated.

    Stricter than torch's `once_differentiable`, which lets the dependence on saved inputs go lost unnoticed.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"the {name} kernel has no second derivative; use impl='reference'")


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


def launches(op: Callable) -> Callable[[Callable], Callable]:
    """Decorate the launcher that runs `op` on CUDA tensors, and in Triton's interpreter on CPU tensors."""

    def register(launch: Callable) -> Callable:
        for device in ("CUDA", "CPU"):
            _library.impl(op, launch, device)
        return launch

    return register
