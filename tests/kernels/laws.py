"""Laws that every kernel keeps, whatever it computes. The tests of a kernel only name the cases."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mpcore.kernels.adamw import AdamWState, adamw_foreach

GUARD = 16384  # elements of NaN on either side of a tensor: more than any program's tile reaches
HOLE = 0x5EA  # the NaN of integers
FAR = 2**30 + 8  # elements between rows, so that the offset of the third needs more than 32 bits
MAP_NORESERVE = 0x4000  # Linux's; Python names it from 3.12 on
ALL_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
Inputs = dict[str, Tensor]
Results = dict[str, Tensor]


def drawn(draw: Callable[..., Tensor], *size: Any, generator: torch.Generator) -> Tensor:
    """What `draw` draws, the same numbers on every device: on the CPU, and moved to torch's default device."""
    return draw(*size, generator=generator, device="cpu").to(torch.get_default_device())


def adamw(param, grad, exp_avg, exp_avg_sq, now, *, master=None, key=None, place=None, **options) -> None:
    """Step one parameter."""
    adamw_foreach([AdamWState(param, grad, exp_avg, exp_avg_sq, now, master, key, place)], **options)


def check_errors(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Inputs,
    layout: str = "contiguous",
    gradients: bool = True,
    roundings: int = 1,
    **options: Any,
) -> None:
    """Law: in outputs and (unless left out) gradients, the kernel errs at most twice as much as its reference here."""
    truth = results(reference, {name: x.double() for name, x in inputs.items()}, gradients=gradients, **options)
    references = results(reference, inputs, gradients=gradients, **options)
    with guarded_memory():
        placed = {name: place(x, layout, 8 * i) for i, (name, x) in enumerate(inputs.items())}
        kernels = results(kernel, placed, place_gradient=layout, gradients=gradients, **options)
    assert kernels.keys() == references.keys()
    for name, exact in truth.items():
        found, plain = kernels[name], references[name]
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape), name
        if exact.numel() == 0:
            continue
        rounding = roundings * torch.finfo(plain.dtype).eps
        for size, granted in ((_largest, rounding), (_mean_square, rounding / 2)):
            bound = 2 * max(size(plain - exact), granted * size(exact))
            error = size(found - exact)
            assert error <= bound, f"{name}: {size.__name__[1:]} error {error:.3g} of the kernel, over {bound:.3g}"


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def _mean_square(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def results(
    function: Callable[..., Any],
    inputs: Inputs,
    place_gradient: str | None = None,
    gradients: bool = True,
    **options: Any,
) -> Results:
    """Outputs of `function`, and gradients of all inputs for fixed random gradients of the outputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    if not gradients:
        return named
    generator = torch.Generator().manual_seed(1)
    given = [drawn(torch.randn, y.shape, generator=generator).to(torch.bfloat16).to(y) for y in outputs]
    if place_gradient is not None:
        given = [place(dy, place_gradient, 8 * (i + 3)) for i, dy in enumerate(given)]
    torch.autograd.backward(outputs, given)
    return named | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def place(x: Tensor, layout: str, extra: int) -> Tensor:
    """A copy of `x` in a sea of NaN, with `extra` elements in every gap, so that no two tensors share their strides:"""
    step = 3 if layout == "strided columns" else 1
    gap = {"contiguous": 0, "strided rows": 24, "strided columns": 5, "far rows": FAR}[layout]
    gap += extra if gap else 0
    strides = [step]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size + (gap if len(strides) == 1 else 0))
    span = 2 * GUARD + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True) if size)
    if layout == "far rows" and x.dim() > 1 and x.is_cuda:
        need_memory(span * x.element_size())
        sea = torch.zeros(span, dtype=x.dtype, device=x.device)
    elif layout == "far rows" and x.dim() > 1:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        sea = torch.frombuffer(mmap.mmap(-1, span * x.element_size(), flags=flags), dtype=x.dtype)
    else:
        sea = torch.full((span,), math.nan, dtype=x.dtype, device=x.device)
    return sea.as_strided(x.shape, strides, GUARD).copy_(x)


def need_memory(size: int) -> None:
    """Skip the running test where the GPU has fewer bytes left than that."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < size:
        pytest.skip(f"needs {size / 2**30:.0f} GiB of GPU memory, but {free / 2**30:.0f} GiB are free")


def check_operator(op: Callable[..., Any], *args: Any, tests: tuple[str, ...] = ALL_TESTS) -> None:
    """Law: `op` does what its schema and its fake say, eagerly and when compiled."""
    torch.library.opcheck(op, args, test_utils=tests)


def check_compiles(function: Callable[..., Any], inputs: Inputs, **options: Any) -> None:
    """Law: `torch.compile(fullgraph=True)` changes no bit, forward or backward."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    plain = results(function, inputs, **options)
    for name, value in results(compiled, inputs, **options).items():
        assert torch.equal(value, plain[name]), name


@contextlib.contextmanager
def guarded_memory() -> Iterator[None]:
    """Within, new memory for outputs is NaN between guards; on the way out, every guard must be whole."""
    seas: list[tuple[Tensor, int]] = []
    plain_new_empty = Tensor.new_empty

    def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        nothing = math.nan if dtype.is_floating_point else HOLE
        sea = torch.full((2 * GUARD + shape.numel(),), nothing, dtype=dtype, device=device)
        seas.append((sea, shape.numel()))
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return torch.tensor([], dtype=dtype, device=device).set_(sea.untyped_storage(), GUARD, shape, strides)

    def empty_like(x: Tensor, *, dtype: torch.dtype | None = None, memory_format: torch.memory_format) -> Tensor:
        assert memory_format == torch.contiguous_format
        return empty(x.shape, dtype or x.dtype, x.device)

    def new_empty(x: Tensor, shape: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        if device is not None:  # the interpreter's own, not a kernel's
            return plain_new_empty(x, shape, dtype=dtype, device=device)
        return empty(torch.Size([shape] if isinstance(shape, int) else shape), dtype or x.dtype, x.device)

    def plain_empty(*size: int, dtype: torch.dtype, device: str = "") -> Tensor:
        assert device == "cuda", "use empty_like or new_empty; they are quicker"  # but for Triton's own memory
        return torch.zeros(*size, dtype=dtype, device=device)

    with (
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.object(Tensor, "new_empty", new_empty),
        mock.patch.object(torch, "empty", plain_empty),
    ):
        yield
    for sea, size in seas:
        whole = sea.isnan() if sea.is_floating_point() else sea == HOLE
        assert whole[:GUARD].all(), "a kernel wrote before the start of an output"
        assert whole[GUARD + size :].all(), "a kernel wrote past the end of an output"
