"""How a kernel is timed beside its peers: `bench/cases.py` names inputs, functions and costs only.

Each function is checked first; a wrong one gets no number. Then all functions, and a copy or a matrix product as the
yardstick, run in turn, round by round. Events on the device take the time. A turn makes several calls on rotating
buffers, which together exceed the L2 cache four times: inputs come from memory, and outputs are written back to it
within the time. An untimed pass before each turn fills the cache with the buffers of the same function, so that a turn
writes back as much as it leaves behind. One pair of events serves all calls of a turn.

Without CUDA the sizes are toys: the reference is timed beside the peers that run on a CPU, in processor time.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.interleave import Times, interleave, spread
from bench.machine import gpu_state
from bench.protocol import (
    BOTH,
    FORWARD,
    OURS,
    Function,
    Inputs,
    Kernel,
    NotHereError,
    Shape,
    WrongError,
    as_tuple,
    label,
    short,
)

ROUNDS, HOST_CALLS = 50, 20
FEWEST_ROUNDS, SECONDS = 10, 3.0  # of a row whose rounds are long
PEER_SLACK = 16  # times the error of the plain reference in the same dtype; a peer may round inside
FEWEST_CALLS, MOST_BUFFERS, L2_TIMES = 4, 16, 4  # of a turn
YARDSTICK = 2**28, 8192  # int32 in a copy's 1 GiB, rows and columns of a product's matrices
YARDSTICK_OF_CPU = 2**22, 256
ROUNDS_OF_CPU, CALLS_OF_CPU = 15, 3
SCALES = {"GB/s": 1e9, "TFLOP/s": 1e12}


def begin() -> None:
    """Nothing of the case before: its memory, and its compiled code, which torch makes only so often of a function."""
    if torch.cuda.is_available():
        torch.compiler.reset()
        gc.collect()  # an error keeps frames, and these tensors, in a cycle
        torch.cuda.empty_cache()


def measure(
    kernel: Kernel, shape: Shape, dtype: torch.dtype, which: str, only: Sequence[str] | None = None
) -> tuple[dict[str, Any], Times]:
    """Check the kernel and its peers, and time them in turn.

    Args:
        kernel, shape, dtype, which: a case.
        only: the providers to measure; None: all.

    Returns:
        The row, and by provider the seconds a call in each round.
    """
    begin()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    checked = kernel.checked(shape)
    inputs = kernel.inputs(checked, dtype, device)
    bound = find_bounds(kernel, inputs, which)
    functions, errors, skipped, wrong = {}, {}, {}, {}
    for name, make in kernel.providers().items():
        if only is not None and name not in only:
            continue
        try:
            function = make(checked)
            with poisoned():
                errors[name] = check_results(kernel, name, function, inputs, which, bound)
            functions[name] = function if checked == shape else make(shape)
        except Exception as error:
            if not (cuda or isinstance(error, ImportError | NotHereError | WrongError)):
                raise
            (wrong if isinstance(error, WrongError) else skipped)[name] = _why(error)
    del inputs, bound
    try:
        beside = _at_full_size(kernel, functions, shape, dtype, which, device) if checked != shape else "float64"
    except WrongError as error:
        wrong[OURS], beside = _why(error), "a peer at full size"
        del functions[OURS]
    row, times = _measure(kernel, functions, shape, dtype, which, device)
    for name, provider in row["providers"].items():
        provider["error"] = errors[name]
    return row | {"skipped": skipped | row["skipped"], "wrong": wrong, "checked beside": beside}, times


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def _at_full_size(
    kernel: Kernel, functions: dict[str, Function], shape: Shape, dtype: torch.dtype, which: str, device: torch.device
) -> str:
    """Compare ours with the first peer that fits into memory, at the size that is timed; return the peer's name."""
    inputs = kernel.inputs(shape, dtype, device)
    for name, function in functions.items() if OURS in functions else ():
        if name == OURS:
            continue
        try:
            truth = run_once(kernel, function, inputs, which)
        except Exception:  # out of memory, most of all: `_measure` says so
            continue
        bounds = [(y, _rounding(y, y.dtype) if y.is_floating_point() else 0.0, y.dtype) for y in truth]
        with poisoned():
            check_results(kernel, name + " at full size", functions[OURS], inputs, which, bounds)
        return name
    return "nothing at full size"


def _why(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def make_leaves(kernel: Kernel, inputs: Inputs, which: str) -> Inputs:
    """Copies of the inputs, those with a gradient as leaves."""
    copies = {
        name: x.detach().clone(memory_format=torch.preserve_format) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }
    for x in kernel.differentiable(copies):
        x.requires_grad_(which == BOTH)
    return copies


def _gradients_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The same for every function; 1 for a loss."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [
        torch.ones_like(y)
        if y.dim() == 0
        else torch.randn(y.shape, generator=generator, device=y.device).bfloat16().to(y.dtype)
        for y in outputs
    ]


def pass_of(function: Function, leaves: Inputs, which: str) -> Callable[[], tuple[Tensor, ...]]:
    """Run a function once, outputs and gradients of its inputs as the result."""
    if which == FORWARD:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return as_tuple(function(**leaves))

        return forward
    wanted = [x for x in leaves.values() if isinstance(x, Tensor) and x.requires_grad]
    gradients: list[Tensor] = []

    def both() -> tuple[Tensor, ...]:
        outputs = as_tuple(function(**leaves))
        if not gradients:
            gradients.extend(_gradients_of(outputs))
        return *(y.detach() for y in outputs), *torch.autograd.grad(outputs, wanted, gradients)

    return both


def run_once(kernel: Kernel, function: Function, inputs: Inputs, which: str) -> tuple[Tensor, ...]:
    """Run a function once on copies of the inputs."""
    return pass_of(function, make_leaves(kernel, inputs, which), which)()


Bound = tuple[Tensor, float, torch.dtype]


def find_bounds(kernel: Kernel, inputs: Inputs, which: str) -> list[Bound]:
    """Each output and gradient of the reference, as exact as it can be; the error, and dtype, of one in the inputs'."""
    plain = run_once(kernel, kernel.reference, inputs, which)
    if not kernel.in_float64:
        exact = plain
    else:
        wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in inputs.items()}
        exact = run_once(kernel, kernel.reference, wide, which)
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


def check_results(
    kernel: Kernel, name: str, function: Function, inputs: Inputs, which: str, bounds: list[Bound]
) -> float:
    """The largest error, as a multiple of the reference's; raises where it is too large.

    A peer may have results of another dtype, such as a loss in bfloat16, and then their rounding too.
    """
    found = run_once(kernel, function, inputs, which)
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


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let other processes of `bench.gpu_hour` wait, which compile meanwhile."""
    with (Path(tempfile.gettempdir()) / f"mpcore_bench_{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@alone()
def _measure(
    kernel: Kernel, functions: Mapping[str, Function], shape: Shape, dtype: torch.dtype, which: str,
    device: torch.device,
) -> tuple[dict[str, Any], Times]:  # fmt: skip
    """The row of one shape, and the seconds of each provider."""
    copy, yardstick_cost = yardstick(kernel.unit, device)
    inputs = kernel.inputs(shape, dtype, device)
    cuda = device.type == "cuda"
    cost = kernel.cost(shape, dtype.itemsize)[which == BOTH]
    calls: dict[str, Callable[[], object]] = {"yardstick": copy}
    host, memory, skipped = {}, {}, {}
    for name, function in functions.items():
        try:
            call = pass_of(function, make_leaves(kernel, inputs, which), which)
            host[name] = _host_seconds(call) if cuda else 0.0
            memory[name] = _peak_bytes(call) if cuda else returned_bytes(call)
            size = sum(x.nbytes for x in inputs.values() if isinstance(x, Tensor)) + memory[name]
            more = [pass_of(function, make_leaves(kernel, inputs, which), which) for _ in range(1, buffers(size))]
            calls[name] = Rotating([call, *more])
        except Exception as error:  # such as out of memory, at the full size
            if name == OURS:
                raise
            skipped[name] = _why(error)
        call, more = None, []  # who is left out leaves its memory to the next
    del inputs
    times = time_calls(calls, max(host.values(), default=0.0), ROUNDS_OF_CPU, CALLS_OF_CPU)
    scale = SCALES[kernel.unit]
    best = yardstick_cost / times.median("yardstick") / scale
    providers = {}
    for name in host.keys() & times.keys():
        low, middle, high = spread(times[name])
        providers[name] = {
            "us": round(1e6 * middle, 2), "us_p20": round(1e6 * low, 2), "us_p80": round(1e6 * high, 2),
            "rate": round(cost / middle / scale, 1), "percent": round(100 * cost / middle / scale / best, 1),
            "peak_mib": round(memory[name] / 2**20, 1 if cuda else 4),
            "host_us": round(1e6 * (host[name] if cuda else middle), 1),
        }  # fmt: skip
    row = {
        "kernel": kernel.name, "shape": label(shape), "dtype": short(dtype), "pass": which, "unit": kernel.unit,
        "cost": cost, "clock": "device" if cuda else "host", "yardstick": round(best, 1),
        "gpu": gpu_state() if cuda else {}, "skipped": skipped,
        "providers": {name: providers[name] for name in functions if name in providers},
    }  # fmt: skip
    return row, times


class Rotating:
    """Call the same function on each of several buffers in turn, and keep as many results alive.

    Args:
        calls: one for each set of buffers.
    """

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.calls, self.results, self.turn = calls, [None] * len(calls), 0

    def __call__(self) -> None:
        """Make the next call."""
        i = self.turn % len(self.calls)
        self.results[i], self.turn = self.calls[i](), self.turn + 1  # type: ignore[assignment]


def buffers(size: int) -> int:
    """Return how many sets of buffers of so many bytes exceed the L2 cache four times; 1 on a CPU."""
    if not torch.cuda.is_available():
        return 1
    cache = torch.cuda.get_device_properties().L2_cache_size
    return max(1, min(MOST_BUFFERS, math.ceil(L2_TIMES * cache / max(1, size))))


def device_times(calls: Mapping[str, Callable[[], object]], hold: float) -> Times:
    """Seconds on the device of each call, a list of one for each round; the rounds of all belong together.

    There are 50 rounds, or as many as `SECONDS` hold, but at least 10.

    Args:
        calls: by name; all warm.
        hold: seconds for which the stream is held for each call of a turn, so that the host is always ahead of it.
    """
    sizes = {name: max(FEWEST_CALLS, len(c.calls)) if isinstance(c, Rotating) else 1 for name, c in calls.items()}
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
            torch.cuda._sleep(int(3e9 * min(4 * hold * sizes[name], 0.02)))
            for _ in range(sizes[name]):
                calls[name]()
            began.record()
            for _ in range(sizes[name]):
                calls[name]()
            ended.record()
            if turn >= 0:
                events[name].append((began, ended))
        torch.cuda.synchronize()
        turn += 1
    return Times({name: [a.elapsed_time(b) / 1e3 / sizes[name] for a, b in pairs] for name, pairs in events.items()})


def time_calls(
    calls: Mapping[str, Callable[[], object]], hold: float = 1e-3, rounds: int = 5, iterations: int = 2
) -> Times:
    """Time each call in turn: on a GPU by `device_times`, otherwise in so many rounds in processor time."""
    if torch.cuda.is_available():
        return device_times(calls, hold)
    return interleave(calls, rounds=rounds, iterations=iterations)


class _Returned(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        there = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in there:
                self.storages[id(x.untyped_storage())] = x.untyped_storage()
        return out


def returned_bytes(call: Callable[[], object]) -> int:
    """Bytes that the operators of a call return in new memory."""
    with _Returned() as seen:
        call()
    return sum({s.data_ptr(): s.nbytes() for s in seen.storages.values()}.values())


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
