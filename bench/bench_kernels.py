"""Each kernel beside its peers: one row for each shape, pass and provider, with the device's time.

All providers of a case are timed in turn when its first row runs. Each row then hands its own seconds to
pytest-benchmark through a timer.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from bench.cases import KERNELS
from bench.interleave import device_clock, judge
from bench.measure import measure
from bench.protocol import OURS, label, short
from mpcore.kernels import use_kernels

HOST_US = 60  # to launch forward

CASES = [case for kernel in KERNELS.values() for case in kernel.cases()]


def case_id(case: tuple[Any, ...]) -> str:
    """Return `rms_norm M 8192, D 4096 bfloat16 forward`."""
    kernel, shape, dtype, which = case
    return f"{kernel.name} {label(shape)} {short(dtype)} {which}"


ROWS = [
    pytest.param(case, provider, id=f"{case_id(case)}-{provider}") for case in CASES for provider in case[0].providers()
]


@pytest.fixture(scope="session")
def measured() -> dict[str, Any]:
    """What has been measured, by case."""
    return {}


@pytest.mark.benchmark(timer=device_clock)
@pytest.mark.parametrize(("case", "provider"), ROWS)
def test_kernel(request, benchmark, measured, case, provider) -> None:
    """Right, and as fast as it is; a peer that isn't there or is wrong is skipped."""
    name = case_id(case)
    if name not in measured:
        params = [item.callspec.params for item in request.session.items if "[" + name + "-" in item.name]
        with use_kernels("triton") if torch.cuda.is_available() else contextlib.nullcontext():
            measured[name] = measure(*case, only=[p["provider"] for p in params])
    row, times = measured[name]
    why = row["skipped"].get(provider) or row["wrong"].get(provider)
    if why and provider == OURS:
        pytest.fail(why)
    if why:
        pytest.skip(why)
    benchmark.group = name if row["clock"] == "device" else f"{name}, host time on a CPU"
    shared = {key: value for key, value in row.items() if key not in ("providers", "skipped", "wrong")}
    benchmark.extra_info.update(shared | {"provider": provider} | row["providers"][provider])
    if provider != OURS and OURS in times:
        benchmark.extra_info["ratio"] = round(times.ratio(provider, OURS), 3)
    if provider == OURS:
        benchmark.extra_info["skipped"] = row["skipped"] | row["wrong"]
        if row["clock"] == "device" and case[3] == "forward":
            judge(benchmark.extra_info, "host us of a launch", [row["providers"][OURS]["host_us"]], at_most=HOST_US)
    device_clock.hand(benchmark, times[provider])
