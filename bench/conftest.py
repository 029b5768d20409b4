"""What all benches share: one thread, a described machine, rows with a rate, and progress."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.machine import ROOT, describe
from bench.measure import SCALES
from bench.protocol import OURS
from mpcore import Mesh, build_mesh

torch.set_num_threads(1)

QUICK_SECONDS = 165  # after which `--quick` begins no further bench
BEGAN = pytest.StashKey[float]()


@pytest.fixture(autouse=True)
def _described(request: pytest.FixtureRequest) -> None:
    if "benchmark" in request.fixturenames:
        request.getfixturevalue("benchmark").extra_info.update(describe())


@pytest.fixture
def tp8() -> Iterator[Mesh]:
    """A tp group of 8 ranks of which only this one exists: collectives do nothing and cost next to nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield build_mesh(tp=8, device_type="cpu")
    dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose rows of kernels."""
    parser.addoption("--quick", action="store_true", help="the first shape and longest pass of each kernel, 3 minutes")
    parser.addoption("--kernel", metavar="NAME", help="the rows of this kernel alone")
    parser.addoption("--shapes", type=int, metavar="N", help="only the first N shapes of each kernel")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """End at SIGTERM as at Ctrl-C, with the table. On a GPU keep results in `bench/results/<machine>_<date>.json`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if torch.cuda.is_available() and not getattr(config.option, "benchmark_json", None):
        config.option.benchmark_json = str(ROOT / "bench" / "results" / results_name(torch.cuda.get_device_name()))


def results_name(device: str) -> str:
    """`h200_2026-01-31.json` of an "NVIDIA H200"."""
    machine = re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")
    return f"{machine}_{describe()['date']}.json"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rows of kernels that the options don't choose; other benches stay."""

    def chosen(item: pytest.Item) -> bool:
        case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        if case is None:
            return True
        kernel, shape, _, which = case
        quick, name = config.getoption("quick", default=False), config.getoption("kernel", default=None)
        count = 1 if quick else config.getoption("shapes", default=None)
        shapes = kernel.shapes[:count] if torch.cuda.is_available() else [kernel.toy]
        return shape in shapes and name in (None, kernel.name) and not (quick and which != kernel.passes[-1])

    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = [item for item in items if chosen(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With `--quick`: leave out what does not fit into three minutes."""
    began = item.config.stash.setdefault(BEGAN, time.monotonic())
    if item.config.getoption("quick", default=False) and time.monotonic() - began > QUICK_SECONDS:
        pytest.skip(f"{QUICK_SECONDS} seconds are over: without --quick there is no limit")


def progress(done: int, count: int, seconds: float) -> str:
    """Return `12 of 240 rows after 0:31, about 9:49 left`."""
    left, spent = round(seconds / done * (count - done)), int(seconds)
    return f"{done} of {count} rows after {spent // 60}:{spent % 60:02}, about {left // 60}:{left % 60:02} left"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After each case say how far the run is, and write its rows: the next may take the process with it."""
    result = yield
    case, following = (getattr(getattr(i, "callspec", None), "params", {}).get("case", i) for i in (item, nextitem))
    if case is not following:
        keep(item.config)
        if (reporter := item.config.pluginmanager.get_plugin("terminalreporter")) is not None:
            items, now = item.session.items, time.monotonic()
            seconds = now - item.config.stash.get(BEGAN, now)
            reporter.write_line(f"  {progress(items.index(item) + 1, len(items), seconds)}")
    return result


def keep(config: pytest.Config) -> None:
    """Write what has been measured so far, where results are written at all."""
    file, session = config.option.benchmark_json, getattr(config, "_benchmarksession", None)
    if not file or session is None or not any(session.benchmarks):
        return
    output = config.hook.pytest_benchmark_generate_json(
        config=config,
        benchmarks=session.benchmarks,
        include_data=False,
        machine_info=session.get_machine_info(),
        commit_info=config.hook.pytest_benchmark_generate_commit_info(config=config),
    )
    pytest_benchmark_update_json(config, session.benchmarks, output)
    part = Path(f"{file}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(output, indent=1))
    part.replace(file)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add what `bench.report` names."""
    machine_info.update({key: value for key, value in describe().items() if key not in ("date", "commit")})


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict[str, Any]) -> None:
    """Leave out raw rounds and parameters that are functions; keep rows of earlier runs of the same file."""
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
        entry["params"] = None  # extra_info describes a kernel's case better
    again = {entry["fullname"] for entry in output_json["benchmarks"]}
    file = Path(config.option.benchmark_json or "")
    if torch.cuda.is_available() and file.is_file():
        kept = json.loads(file.read_text())["benchmarks"]
        output_json["benchmarks"] = [e for e in kept if e["fullname"] not in again] + output_json["benchmarks"]


@pytest.hookimpl(wrapper=True)
def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: list[dict[str, Any]], group_by: str) -> Iterator:
    """Name the rows of kernels by provider, with rate, part of a copy or product, and ratio to the fastest peer."""
    groups = yield
    for _, rows in groups:
        for source in {row["source"] for row in rows}:
            of_source = [row for row in rows if row["source"] == source and "provider" in row["extra_info"]]
            peers = [r["median"] for r in of_source if not r["extra_info"]["provider"].startswith(OURS)]
            for row in of_source:
                row["name"] = columns(row["extra_info"], row["median"], min(peers, default=None))
    return groups


def columns(info: dict[str, Any], median: float, fastest_peer: float | None) -> str:
    """Return `mpcore          3058 GB/s   101 %  0.98x  host 12 us`; on a CPU host time and memory."""
    ratio = f"{median / fastest_peer:6.2f}x" if fastest_peer else "      -"
    if info["clock"] == "host":
        return f"{info['provider']:<18}{ratio}{1024 * info['peak_mib']:9.1f} KiB"
    rate = info["cost"] / median / SCALES[info["unit"]]
    of = 100 * rate / info["yardstick"]
    host = info["host_us"] if isinstance(info["host_us"], str) else f"{info['host_us']:.0f}"
    return f"{info['provider']:<18}{rate:8.0f} {info['unit']:<8}{of:5.0f} %{ratio}{host:>6} us host"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Explain the columns, and list the targets and how they were judged."""
    session = getattr(config, "_benchmarksession", None)
    benches = session.benchmarks if session is not None else []
    if any("provider" in bench.extra_info for bench in benches):
        terminalreporter.write_line(
            "Kernels on a GPU, time of the device: rate, its part of a copy's or matrix product's, median time over "
            "the fastest peer's, host time of a call.\nKernels on a CPU, time of the host, toy sizes, the reference "
            "in place of the kernel: time over the fastest peer's, memory that the operators return."
        )
    lines = [f"{line}  [{bench.name}]" for bench in benches for line in bench.extra_info.get("targets", ())]
    if lines:
        terminalreporter.section("targets: median (p20-p80) of interleaved rounds; a miss is no failure")
        terminalreporter.write("\n".join(sorted(lines)) + "\n")
