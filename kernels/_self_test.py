"""The self-test of the kernels: each Triton kernel, and the FP8 product, beside its reference on a small shape.

A kernel that `impl=` doesn't name is tested before its first run on a device with these versions and sources. The
verdict is a file in Triton's cache. A kernel that is wrong, or that fails, is replaced by plain torch, with one
warning. `mpcore doctor` runs the same tests.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._torch import backward_runs, has_no_values

Inputs = dict[str, Any]


def _draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")  # whatever the default device


def _ids(end: int, *shape: int) -> Tensor:
    return torch.randint(end, shape, generator=torch.Generator().manual_seed(end), device="cpu")


def _adamw(param: Tensor, grad: Tensor, impl: str) -> Tensor:
    kernel, new = import_module("mpcore.kernels.adamw"), param.detach().clone()
    now = kernel.adamw_now(torch.ones(1, device=param.device), 1e-2, (0.9, 0.95))[0]
    moments = torch.zeros_like(new), torch.zeros_like(new)
    states = [kernel.AdamWState(new, grad, *moments, now)]
    kernel.adamw_foreach(states, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, impl=impl)
    return new


def _fp8_products(a: Tensor, b: Tensor, impl: str) -> tuple[Tensor, ...]:
    """Multiply whole numbers, whose sums are exact however many bits a tensor core keeps of them."""
    quantize = import_module("mpcore.kernels.quantize_fp8").quantize_fp8_reference
    multiply, impl = import_module("mpcore.kernels.fp8_matmul").fp8_matmul, impl.replace("triton", "torch")
    rows, factors = quantize(a - 1.0)[0], [quantize(b - 1.0, square=square)[0] for square in (True, False)]
    return tuple(multiply(rows, f, dtype, impl=impl) for f in factors for dtype in (torch.bfloat16, torch.float32))


def _experts(x: Tensor, weight: Tensor, chosen: Tensor, impl: str) -> Tensor:
    moe = import_module("mpcore.kernels.moe_permute")
    row, _ = moe.moe_rows(chosen, 4, impl=impl)
    return moe.moe_unpermute(moe.moe_permute(x, row, row.numel(), impl=impl), row, weight, impl=impl)


def _merge(impl: str, **given: Tensor) -> tuple[Tensor, ...]:
    merge = import_module("mpcore.kernels.attention").attention_merge
    return merge(**{name: x.detach().clone() for name, x in given.items()}, impl=impl)


def _quantize(x: Tensor, impl: str) -> tuple[Tensor, ...]:
    module = import_module("mpcore.kernels.quantize_fp8")
    both = [q for square in (True, False) for q in module.quantize_fp8(x, square=square, columns=True, impl=impl)]
    return tuple(module.dequantize_fp8(q) for q in both)


TESTS: dict[str, tuple[Callable[[], Inputs], Callable[..., Any] | None]] = {
    "adamw": (lambda: {"param": _draw(300), "grad": _draw(300)}, _adamw),
    "attention": (
        lambda: {"query": _draw(1, 37, 4, 16), "key": _draw(1, 37, 2, 16), "value": _draw(1, 37, 2, 16)}, None
    ),
    "attention_merge": (
        lambda: {"output": _draw(1, 9, 2, 16), "lse": _draw(1, 2, 9), "other": _draw(1, 5, 2, 16),
                 "other_lse": _draw(1, 2, 5)}, _merge
    ),
    "dropout_add": (lambda: {"x": _draw(2, 9, 33), "residual": _draw(2, 9, 33), "p": 0.3, "samples": _ids(9, 2)}, None),
    "fp8_matmul": (lambda: {"a": _ids(3, 64, 512), "b": _ids(3, 256, 512)}, _fp8_products),
    "geglu": (lambda: {"x": _draw(9, 66)}, None),
    "layer_norm": (lambda: {"x": _draw(9, 33), "weight": _draw(33), "bias": _draw(33)}, None),
    "linear_cross_entropy": (
        lambda: {"x": _draw(9, 16), "weight": _draw(50, 16), "target": _ids(50, 9), "scale": torch.ones(9)}, None
    ),
    "moe_permute": (lambda: {"x": _draw(9, 16), "weight": _draw(9, 2), "chosen": _ids(4, 9, 2)}, _experts),
    "quantize_fp8": (lambda: {"x": _draw(130, 140)}, _quantize),
    "relu_squared": (lambda: {"x": _draw(9, 33)}, None),
    "rms_norm": (lambda: {"x": _draw(9, 33), "weight": _draw(33)}, None),
    "rope": (
        lambda: {"q": _draw(1, 9, 2, 16), "k": _draw(1, 9, 2, 16), "cos": _draw(9, 8).cos(), "sin": _draw(9, 8).sin()},
        None,
    ),
    "route": (lambda: {"x": _draw(9, 16), "weight": _draw(21, 16), "k": 3, "bias": _ids(2, 21)}, None),
    "swiglu": (lambda: {"x": _draw(9, 66)}, None),
    "top_k": (lambda: {"scores": _draw(9, 21), "k": 3, "bias": _draw(21)}, None),
}  # fmt: skip
"""By test: the inputs, in float64, and what calls the kernels; None: the function of that name."""
MODULES: dict[str, str] = dict.fromkeys(("geglu", "relu_squared", "swiglu"), "activation")
MODULES |= {"route": "router", "top_k": "router"}
IN_FP8 = ("fp8_matmul", "quantize_fp8")
OPERATORS = {name: name for name in TESTS} | {
    "cross_entropy": "linear_cross_entropy",
    "grouped_linear": "moe_permute",  # which also clears the rows after its last group
    "plain_attention": "attention",
}
"""By operator: the test that covers it."""
CONSTANT = ("cos", "sin", "scale")  # inputs without a gradient


def run_kernel(name: str, impl: str, dtype: torch.dtype, device: str | torch.device) -> list[Tensor]:
    """Return the outputs and gradients of a test of `TESTS`, as float64 on the CPU, of inputs of a dtype."""
    make, call = TESTS[name]
    call = call or getattr(import_module(f"mpcore.kernels.{MODULES.get(name, name)}"), name)
    given: dict[str, Any] = make()
    for key, x in given.items():
        if isinstance(x, Tensor):
            real = x.is_floating_point()
            given[key] = x.to(device, dtype if real else x.dtype).requires_grad_(real and key not in CONSTANT)
    outs = call(**given, impl=impl)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out is not None]
    if summed := [out for out in outs if out.requires_grad]:
        leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
        weights = [torch.arange(1, out.numel() + 1, device=device).view(out.shape) / out.numel() for out in summed]
        outs += torch.autograd.grad(summed, leaves, [w.to(out.dtype) for w, out in zip(weights, summed, strict=True)])
    return [out.detach().double().cpu() for out in outs]


def fault(name: str, device: str | torch.device) -> str:
    """Compare a kernel in float32 with its reference, and say what is wrong; "" if nothing is.

    The kernel's error may be twice the reference's, or four roundings. Raises `ValueError` if it refuses the device.
    """
    try:
        exact = run_kernel(name, "reference", torch.float64, device)
        plain = run_kernel(name, "reference", torch.float32, device)
        found = run_kernel(name, "triton", torch.float32, device)
    except ValueError:
        raise
    except Exception as error:  # whatever a compiler or a driver raises is the finding
        return f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"
    for i, (truth, reference, kernel) in enumerate(zip(exact, plain, found, strict=True)):
        rounding = torch.finfo(torch.float32).eps * truth.abs().max().item()
        bound = max(2 * (reference - truth).abs().max().item(), 4 * rounding)
        error = (kernel - truth).abs().max().item()
        if not error <= bound:
            return f"result {i} is off by {error:.2g}, more than {bound:.2g}"
    return ""


_verdicts: dict[tuple[str, torch.device], str] = {}


def passes(operator: str, x: Any) -> bool:
    """Return whether the kernel of `operator` passed its self-test on the device of `x`; tests it if need be.

    While torch traces, captures a CUDA graph or runs backward, a kernel without a verdict counts as right.
    """
    key = (OPERATORS[operator], x.device)
    if torch.compiler.is_compiling() or key in _verdicts:
        return not _verdicts.get(key)
    captures = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if (isinstance(x, Tensor) and has_no_values(x)) or backward_runs() or captures:
        return True
    _verdicts[key] = ""  # a kernel that calls another, or another thread, does not wait
    _verdicts[key] = why = _verdict(*key)
    if why:
        warnings.warn(
            f"mpcore's kernel of {key[0]} failed its self-test on {device_name(x.device)}: {why}. Plain torch "
            "runs in its place, and is slower. Please report this line with the output of `mpcore doctor`",
            RuntimeWarning,
            stacklevel=4,
        )
    return not why


def device_name(device: torch.device) -> str:
    """Return the name of a device as verdicts have it; "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _verdict(name: str, device: torch.device) -> str:
    """Return the fault that the cache has for a test, or run the test and write what it found."""
    about = {"device": device_name(device), **_versions()}  # what a verdict holds for
    digest = hashlib.sha256(json.dumps([name, about]).encode()).hexdigest()[:16]
    path = triton_cache() / "mpcore_self_test" / f"{name}_{digest}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(path.read_text())["fault"]
    with ThreadPoolExecutor(1, f"mpcore self-test of {name}") as thread:  # it has its own autocast, modes and stream
        try:
            found = thread.submit(fault, name, device).result()
        except ValueError as error:
            found = str(error)
    part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    with suppress(OSError):  # a cache that can't be written: the next process tests again
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"test": name, "on": about, "fault": found}, indent=1))
        part.replace(path)  # other processes may write the same at the same time
    return found


def triton_cache() -> Path:
    """Return Triton's folder of compiled kernels, which `TRITON_CACHE_DIR` moves."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


@functools.cache
def _versions() -> dict[str, str]:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:  # built from source, or under another name
        triton = import_module("triton").__version__
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    return {"torch": torch.__version__, "triton": triton, "kernels": sources.hexdigest()[:16]}
