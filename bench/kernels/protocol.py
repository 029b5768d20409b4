"""How a kernel is timed beside its peers: a bench of `bench_<kernel>.py` names inputs, functions and costs only.

First every function is checked; what is wrong gets no number. Then all of them, and the machine's own copy or matrix
product as the yardstick, run in turn, round by round, each after a read of more memory than the L2 cache holds. Events
on the device take the time, while the stream is held until the host has launched everything.

Without CUDA a bench runs at toy size: what can run is checked, and the reference is timed beside the peers that run on
a CPU, in processor time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.interleave import interleave, spread
from bench.machine import describe
from mpcore.kernels import use_kernels

FORWARD, BOTH = "forward", "forward+backward"
OURS = "mpcore"
ROUNDS, HOST_CALLS = 50, 20
FEWEST_ROUNDS, SECONDS = 10, 3.0  # of a row whose rounds are long
PEER_SLACK = 16  # times the error of the plain reference in the same dtype; a peer may round inside
EVICT = 2**26  # int32 in 256 MiB, more than any L2 cache holds
YARDSTICK = 2**28, 8192  # int32 in a copy's 1 GiB, rows and columns of a product's matrices
YARDSTICK_OF_CPU = 2**22, 256
ROUNDS_OF_CPU, CALLS_OF_CPU = 15, 3
Shape = Mapping[str, int]
Inputs = dict[str, Tensor]
Function = Callable[..., Any]


class NotHereError(Exception):
    """A peer can't run; the message says why."""


class WrongError(Exception):
    """A function's results are not the reference's; it gets no number."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and its peers.

    Args:
        name: as its file in `kernels/`.
        inputs: makes tensors by name, `inputs(shape, dtype, device)`.
        ours, reference: take the inputs by name, and return a tensor or a tuple.
        peers: by name, what returns such a function for a shape, or raises `ImportError` or `NotHereError`.
        cost: bytes or floating point operations of `(forward, forward+backward)`, by shape and bytes of an element.
        shapes: what is measured; toy: what is checked without CUDA.
        unit: "GB/s", beside a copy, or "TFLOP/s", beside a matrix product.
        passes: which to measure.
        check: sizes to shrink where the check in float64 would not fit.
        constants: inputs without a gradient though they are floating.
        in_float64: the reference takes float64; otherwise its own dtype is the truth.
        slack: times the reference's error that ours may have.
        random: a peer draws random numbers, or chooses scales, of its own; only its shapes and finiteness are checked.
    """

    name: str
    inputs: Callable[[Shape, torch.dtype, torch.device], Inputs]
    ours: Function
    reference: Function
    peers: Mapping[str, Callable[[Shape], Function]]
    cost: Callable[[Shape, int], tuple[float, float]]
    shapes: Sequence[Shape]
    toy: Shape
    unit: str = "GB/s"
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
    passes: Sequence[str] = (FORWARD, BOTH)
    check: Shape = field(default_factory=dict)
    constants: Sequence[str] = ()
    in_float64: bool = True
    slack: int = 2
    random: bool = False

    def cases(self) -> list[Any]:
        """Parameters of a bench: shape, dtype and pass; of the toy size without CUDA."""
        cuda = torch.cuda.is_available()
        shapes, dtypes = (self.shapes, self.dtypes) if cuda else ([self.toy], [torch.float32])
        return [
            pytest.param(self, shape, dtype, which, id=f"{self.name} {label(shape)} {short(dtype)} {which}")
            for shape in shapes
            for dtype in dtypes
            for which in self.passes
        ]


def label(shape: Shape) -> str:
    """`M 8192, D 4096`."""
    return ", ".join(f"{name} {size}" for name, size in shape.items())


def short(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def always(function: Function) -> Callable[[Shape], Function]:
    """A peer that is there everywhere."""
    return lambda shape: function


def compiled(function: Function) -> Callable[[Shape], Function]:
    """`torch.compile` of a plain function, for static shapes."""

    def make(shape: Shape) -> Function:
        if not torch.cuda.is_available():
            raise NotHereError("compiled for CUDA only")
        return torch.compile(function, dynamic=False, fullgraph=True)

    return make


def imported(module: str, name: str, adapt: Callable[[Any], Function]) -> Callable[[Shape], Function]:
    """`adapt(module.name)`, where the module can be imported and CUDA is there."""

    def make(shape: Shape) -> Function:
        found = getattr(importlib.import_module(module), name)
        if not torch.cuda.is_available():
            raise NotHereError("runs on CUDA only")
        return adapt(found)

    return make


def begin() -> None:
    """Nothing of the case before: its memory, and its compiled code, which torch makes only so often of a function."""
    if torch.cuda.is_available():
        torch.compiler.reset()
        gc.collect()  # an error keeps frames, and these tensors, in a cycle
        torch.cuda.empty_cache()


def compare(request: pytest.FixtureRequest, kernel: Kernel, shape: Shape, dtype: torch.dtype, which: str) -> None:
    """Check the kernel and its peers, time them, and hand the row to pytest-benchmark."""
    with use_kernels("triton") if torch.cuda.is_available() else contextlib.nullcontext():
        row, replay = measure(kernel, shape, dtype, which)
        _report(request, kernel, which, row, replay)


def _report(
    request: pytest.FixtureRequest, kernel: Kernel, which: str, row: dict[str, Any], replay: Callable[[], object]
) -> None:
    benchmark = request.getfixturevalue("benchmark")
    benchmark.group = f"{kernel.name} {which}"
    benchmark.extra_info.update(describe() | row)
    benchmark.pedantic(replay, rounds=10, iterations=1, warmup_rounds=1)


def measure(
    kernel: Kernel, shape: Shape, dtype: torch.dtype, which: str
) -> tuple[dict[str, Any], Callable[[], object]]:
    """Check the kernel and its peers, time them, and return the row and a call of ours that waits for the device."""
    begin()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    checked = {**shape, **{name: min(size, shape[name]) for name, size in kernel.check.items()}}
    inputs = kernel.inputs(checked, dtype, device)
    bound = _bounds(kernel, inputs, which)
    functions, errors, skipped = {}, {}, {}
    for name, make in {OURS: always(kernel.ours), **kernel.peers}.items():
        try:
            function = make(checked)
            errors[name] = _check(kernel, name, function, inputs, which, bound)
            functions[name] = function if checked == shape else make(shape)
        except Exception as error:
            if name == OURS or not (cuda or isinstance(error, ImportError | NotHereError)):
                raise
            skipped[name] = _why(error)
    del inputs, bound
    row, replay = _measure(kernel, functions, shape, dtype, which, device)
    for name, provider in row["providers"].items():
        provider["error"] = errors[name]
    return row | {"skipped": skipped | row["skipped"]}, replay


def _why(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _leaves(kernel: Kernel, inputs: Inputs, which: str) -> Inputs:
    """Copies of the inputs, those with a gradient as leaves."""
    copies = {name: x.detach().clone(memory_format=torch.preserve_format) for name, x in inputs.items()}
    for name, x in copies.items():
        x.requires_grad_(which == BOTH and x.is_floating_point() and name not in kernel.constants)
    return copies


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _gradients_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The same for every function; 1 for a loss."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [
        torch.ones_like(y)
        if y.dim() == 0
        else torch.randn(y.shape, generator=generator, device=y.device).bfloat16().to(y.dtype)
        for y in outputs
    ]


def _call(function: Function, leaves: Inputs, which: str) -> Callable[[], tuple[Tensor, ...]]:
    """Run a function once, outputs and gradients of its inputs as the result."""
    if which == FORWARD:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return _tuple(function(**leaves))

        return forward
    wanted = [x for x in leaves.values() if x.requires_grad]
    gradients: list[Tensor] = []

    def both() -> tuple[Tensor, ...]:
        outputs = _tuple(function(**leaves))
        if not gradients:
            gradients.extend(_gradients_of(outputs))
        return *(y.detach() for y in outputs), *torch.autograd.grad(outputs, wanted, gradients)

    return both


Bound = tuple[Tensor, float, torch.dtype]


def _bounds(kernel: Kernel, inputs: Inputs, which: str) -> list[Bound]:
    """Each output and gradient of the reference, as exact as it can be; the error, and dtype, of one in the inputs'."""
    plain = _call(kernel.reference, _leaves(kernel, inputs, which), which)()
    if not kernel.in_float64:
        exact = plain
    else:
        wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        exact = _call(kernel.reference, _leaves(kernel, wide, which), which)()
    bounds = []
    for truth, found in zip(exact, plain, strict=True):
        if not found.is_floating_point():
            bounds.append((found, 0.0, found.dtype))
            continue
        error = (found - truth).abs().max().item()
        bounds.append((truth, max(error, _rounding(truth, found.dtype)), found.dtype))
    return bounds


def _rounding(truth: Tensor, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * truth.abs().max().item()


def _check(kernel: Kernel, name: str, function: Function, inputs: Inputs, which: str, bounds: list[Bound]) -> float:
    """The largest error, as a multiple of the reference's; raises where it is too large.

    A peer may have results of another dtype, such as a loss in bfloat16, and then their rounding too.
    """
    found = _call(function, _leaves(kernel, inputs, which), which)()
    if len(found) != len(bounds):
        raise WrongError(f"{len(found)} results instead of {len(bounds)}")
    own = name.startswith(OURS)
    slack, worst = kernel.slack if own else PEER_SLACK, 0.0
    for i, (y, (truth, bound, dtype)) in enumerate(zip(found, bounds, strict=True)):
        if y.shape != truth.shape:
            raise WrongError(f"result {i} has shape {tuple(y.shape)} instead of {tuple(truth.shape)}")
        if own and y.dtype != dtype:
            raise WrongError(f"result {i} is {short(y.dtype)} instead of {short(dtype)}")
        if y.is_floating_point() and y.dtype != dtype:
            bound = max(bound, _rounding(truth, y.dtype))
        if kernel.random and not own:
            error = 0.0 if y.isfinite().all() else math.nan
        else:
            difference = y - truth if y.is_floating_point() else (y != truth).double()
            error = difference.abs().max().item()
        if not error <= slack * bound:  # NaN too
            raise WrongError(f"result {i} errs by {error:.3g}, more than {slack} times {bound:.3g}")
        worst = max(worst, error / bound if bound else 0.0)
    return round(worst, 3)


def yardstick(unit: str, device: torch.device) -> tuple[Callable[[], object], float]:
    """A copy of 1 GiB, or a product of 8192^3 in bfloat16 of random numbers, and its bytes or operations.

    A CPU copies 16 MiB, and multiplies 256^3 in float32.
    """
    elements, n = YARDSTICK if device.type == "cuda" else YARDSTICK_OF_CPU
    if unit == "GB/s":
        source = torch.randint(2**31 - 1, (elements,), dtype=torch.int32, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), 2.0 * source.nbytes
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * n**3


def _measure(
    kernel: Kernel,
    functions: Mapping[str, Function],
    shape: Shape,
    dtype: torch.dtype,
    which: str,
    device: torch.device,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """The row of one shape, and a call of ours that waits for the device."""
    copy, yardstick_cost = yardstick(kernel.unit, device)
    inputs = kernel.inputs(shape, dtype, device)
    cuda = device.type == "cuda"
    calls: dict[str, Callable[[], object]] = {}
    host, skipped = {}, {}
    for name, function in functions.items():
        try:
            call = _call(function, _leaves(kernel, inputs, which), which)
            host[name] = _host_seconds(call) if cuda else 0.0
            calls[name] = call
        except Exception as error:  # such as out of memory, at the full size
            if name == OURS:
                raise
            skipped[name] = _why(error)
        call = None  # who is left out leaves its memory to the next
    del inputs
    memory = {name: _peak_bytes(call) if cuda else 0 for name, call in calls.items()}
    timed = {**calls, "yardstick": copy}
    if cuda:
        times = device_times(timed, max(host.values()))
    else:
        times = interleave(timed, rounds=ROUNDS_OF_CPU, iterations=CALLS_OF_CPU)

    cost = kernel.cost(shape, dtype.itemsize)[which == BOTH]
    scale = 1e9 if kernel.unit == "GB/s" else 1e12
    best = yardstick_cost / statistics.median(times["yardstick"]) / scale
    providers = {}
    for name in calls:
        low, middle, high = spread(times[name])
        providers[name] = {
            "us": round(1e6 * middle, 2),
            "us_p20": round(1e6 * low, 2),
            "us_p80": round(1e6 * high, 2),
            "rate": round(cost / middle / scale, 1),
            "percent": round(100 * cost / middle / scale / best, 1),
            "peak_mib": round(memory[name] / 2**20, 1),
            "host_us": round(1e6 * host[name], 1),
        }
    row = {
        "kernel": kernel.name,
        "shape": label(shape),
        "dtype": short(dtype),
        "pass": which,
        "unit": kernel.unit,
        "cost": cost,
        "yardstick": round(best, 1),
        "providers": providers,
        "skipped": skipped,
        "peer_ratios": {
            name: round(statistics.median(a / b for a, b in zip(times[name], times[OURS], strict=True)), 3)
            for name in calls
            if name != OURS
        },
    }

    def replay() -> None:
        calls[OURS]()
        if cuda:
            torch.cuda.synchronize()

    return row, replay


def device_times(calls: Mapping[str, Callable[[], object]], hold: float) -> dict[str, list[float]]:
    """Seconds on the device of each call, a list of one for each round; the rounds of all belong together.

    There are 50 rounds, or as many as `SECONDS` hold, but at least 10.

    Args:
        calls: by name; all warm.
        hold: seconds for which the stream is held before a call, so that the host is always ahead of it.
    """
    evict = torch.zeros(EVICT, dtype=torch.int32, device="cuda")  # only read, so nothing is written back
    cycles = int(3e9 * min(2 * hold, 0.01))
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    turn, rounds, began_at = -5, ROUNDS, 0.0
    while turn < rounds:
        if turn == -3:
            began_at = time.monotonic()
        if turn == 0:
            rounds = max(FEWEST_ROUNDS, min(ROUNDS, int(SECONDS * 3 / (time.monotonic() - began_at))))
        names = list(calls)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            evict.max()
            torch.cuda._sleep(cycles)
            began.record()
            calls[name]()
            ended.record()
            if turn >= 0:
                events[name].append((began, ended))
        torch.cuda.synchronize()
        turn += 1
    return {name: [a.elapsed_time(b) / 1e3 for a, b in pairs] for name, pairs in events.items()}


def _host_seconds(call: Callable[[], object]) -> float:
    """Seconds the host takes to launch a call, nothing waiting for the device."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    ended = time.perf_counter()
    torch.cuda.synchronize()
    return (ended - began) / HOST_CALLS


def _peak_bytes(call: Callable[[], object]) -> int:
    """Memory of a call over what there was before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
