"""Which implementation of a kernel runs, and how a launcher becomes a torch operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._choice import REFERENCE, TORCH, TRITON, by_rule, chosen, forced
from ._flops import register_flops
from ._torch import has_no_values, is_on_gpu, mutated_arguments
from ._triton import HAS_TRITON, INTERPRETING

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def runs_triton(impl: str | None, x: Tensor, operator: str) -> bool:
    """Return whether the Triton kernel of an operator runs for `x`; see `implementation`."""
    return implementation(impl, x, operator) == TRITON


def implementation(impl: str | None, x: Tensor, operator: str) -> str:
    """Return the implementation that runs for the main input `x`: "triton", "reference" or "torch" (torch's own).

    Args:
        impl: "triton" or "reference", or `None` to choose: the reference on a CPU and for dtypes that the kernels
            don't have, and else what `chosen` in `_choice.py` returns for `operator`.
    """
    impl = forced() if impl is None else impl
    if impl is None:
        if not HAS_TRITON and x.is_cuda and x.dtype in KERNEL_DTYPES:
            raise ValueError(
                f"{operator} on {x.device} needs the triton package: pip install triton, or run the slower reference "
                f"under mpcore.kernels.use_kernels('reference')"
            )
        known = is_on_gpu(x) and x.dtype in KERNEL_DTYPES
        if known and not x.is_cuda and has_no_values(x):  # a dry run for a GPU launches nothing, and needs no Triton
            return by_rule(operator)
        return chosen(operator, x) if known and HAS_TRITON else REFERENCE
    if impl == REFERENCE:
        return REFERENCE
    if impl != TRITON:
        raise ValueError(f"impl {impl!r} is none of None, 'triton' and 'reference'")
    if not HAS_TRITON:
        raise ValueError("impl='triton', but the triton package can't be imported; use impl='reference'")
    if x.dtype not in KERNEL_DTYPES:
        raise ValueError(f"impl='triton' has no {x.dtype} kernel; cast to float32, or use impl='reference'")
    if not (is_on_gpu(x) or (INTERPRETING and x.device.type == "cpu")):
        raise ValueError(
            f"impl='triton', but x is on {x.device}; move it to a CUDA device, use impl='reference', "
            "or set TRITON_INTERPRET=1 to run kernels on the CPU"
        )
    return TRITON


def runs_torch(impl: str | None, x: Tensor, operator: str, fits: bool) -> bool:
    """Return whether torch's own product of the operator runs for `x`, not the reference.

    `impl` is "torch", "reference" or `None` to choose; `fits` says whether torch has the product for these inputs.
    Raises `ValueError` if `impl` is unknown, or is "torch" where torch has no such product.
    """
    if impl not in (None, TORCH, REFERENCE):
        raise ValueError(f"impl {impl!r} is none of None, 'torch' and 'reference', which {operator} has")
    here = fits and is_on_gpu(x)
    if impl == TORCH and not here:
        raise ValueError(f"impl='torch', but on {x.device} torch has no {operator} of these inputs; use 'reference'")
    if impl is not None or not here or forced() == REFERENCE:
        return impl == TORCH
    return (not x.is_cuda and has_no_values(x)) or chosen(operator, x) == TORCH


def refuse_second_derivative(name: str, instead: str = "impl='reference'") -> None:
    """Raise if the backward pass that runs now, of kernel `name`, is itself being differentiated.

    torch's `once_differentiable` is less strict: it silently drops the dependence on saved inputs.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"the {name} kernel has no second derivative; use {instead}")


_library = torch.library.Library("mpcore", "FRAGMENT")
launching_on_cpu = INTERPRETING  # the fake GPU of the tests sets it: its tensors are on the CPU


def operator(
    schema: str, reference: Callable | None = None, flops: Callable[..., int] | None = None
) -> Callable[[Callable], Callable]:
    """Decorate a launcher, and return the overload of `torch.ops.mpcore.<name>`; callers keep it and skip the lookup.

    A launcher is a generator: it allocates the outputs, yields them, and then launches. `torch.compile` traces it with
    inputs that have no values, and stops at the `yield`: so both agree on shapes, strides and dtypes. If the first
    input has no elements, the outputs are zeros, and nothing is launched. An operator that calls torch's own product
    is a plain function, which asks `has_no_values`. Each argument that the operator mutates gets a new version, so that
    autograd raises if a graph saved the old values.
    """
    name = schema.partition("(")[0]

    def register(launcher: Callable) -> Callable:
        generates = inspect.isgeneratorfunction(launcher)
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        fake = (lambda *given: next(launcher(*given))) if generates else launcher
        torch.library.register_fake(f"mpcore::{name}", fake, lib=_library)
        op = getattr(torch.ops.mpcore, name).default
        if flops is not None:
            register_flops(getattr(torch.ops.mpcore, name), flops)
        mutated = mutated_arguments(op)

        def launch(*given: Any) -> Any:
            steps = launcher(*given)
            outs = next(steps)
            if isinstance(given[0], Tensor) and given[0].numel() == 0:
                for out in outs if isinstance(outs, tuple) else () if outs is None else (outs,):
                    out.zero_()
            else:
                next(steps, None)
            for i in mutated:
                if i < len(given) and given[i] is not None:
                    torch.autograd.graph.increment_version(given[i])
            return outs

        run = launch if generates else launcher

        def run_on_cpu(*given: Any) -> Any:
            return reference(*given) if reference is not None and not launching_on_cpu else run(*given)

        _library.impl(op, run, "CUDA")
        _library.impl(op, run if reference is None else run_on_cpu, "CPU")
        return op

    return register
