"""What all benches share: one thread, a described machine, and results without raw rounds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.machine import ROOT, describe
from mpcore import Mesh, build_mesh

torch.set_num_threads(1)

SUBSET_SECONDS = 240  # after which no further bench begins, so that all are done in five minutes
BEGAN = pytest.StashKey[float]()


@pytest.fixture(autouse=True)
def _described(request: pytest.FixtureRequest) -> None:
    if "benchmark" in request.fixturenames:
        request.getfixturevalue("benchmark").extra_info.update(describe())


@pytest.fixture
def tp8() -> Iterator[Mesh]:
    """Rank 0 of a mesh with tp 8, whose collectives return at once: what is left is the host's work."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield build_mesh(tp=8, device_type="cpu")
    dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full`: all shapes and passes."""
    parser.addoption(
        "--full", action="store_true", help="on a GPU all shapes and passes of each kernel, without a limit"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a GPU, without `--full`: of each kernel the first shape and the longest pass."""
    if torch.cuda.is_available() and not config.getoption("full", default=False):
        left_out = [item for item in items if not in_the_subset(getattr(item, "callspec", None))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def in_the_subset(case: Any) -> bool:
    """Return whether a case runs without `--full`; what is no case of a kernel does."""
    given = case.params if case is not None else {}
    if "kernel" not in given or "shape" not in given:
        return True
    kernel = given["kernel"]
    return (given["shape"], given["dtype"], given["which"]) == (kernel.shapes[0], kernel.dtypes[0], kernel.passes[-1])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a GPU, without `--full`: leave out what does not fit into five minutes."""
    if torch.cuda.is_available() and not item.config.getoption("full", default=False):
        began = item.config.stash.setdefault(BEGAN, time.monotonic())
        if time.monotonic() - began > SUBSET_SECONDS:
            pytest.skip(f"{SUBSET_SECONDS} seconds are over: --full has no limit")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the targets and how they were judged."""
    session = getattr(config, "_benchmarksession", None)
    benches = session.benchmarks if session is not None else []
    lines = [f"{line}  [{bench.name}]" for bench in benches for line in bench.extra_info.get("targets", ())]
    if lines:
        terminalreporter.section("targets: median (p20-p80) of interleaved rounds; a miss is no failure")
        terminalreporter.write("\n".join(sorted(lines)) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """On a GPU results are kept without being asked for: `bench/results/<machine>_<date>.json`."""
    if torch.cuda.is_available() and not getattr(config.option, "benchmark_json", None):
        config.option.benchmark_json = str(ROOT / "bench" / "results" / results_name(torch.cuda.get_device_name()))


def results_name(device: str) -> str:
    """`h200_2026-01-31.json` of an "NVIDIA H200"."""
    machine = re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")
    return f"{machine}_{describe()['date']}.json"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write after each bench: the next may take the process with it, and what comes at the end of the run."""
    result = yield
    keep(item.config)
    return result


def keep(config: pytest.Config) -> None:
    """Write what has been measured so far, where results are written at all."""
    file, session = config.option.benchmark_json, getattr(config, "_benchmarksession", None)
    if not file or session is None or not session.benchmarks:
        return
    output = config.hook.pytest_benchmark_generate_json(
        config=config, benchmarks=session.benchmarks, include_data=False, machine_info={}, commit_info={}
    )
    pytest_benchmark_update_json(config, session.benchmarks, output)
    part = Path(f"{file}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(output, indent=1))
    part.replace(file)


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict) -> None:
    """Keep medians and what stands beside them; leave out raw rounds, functions and the flags of the processor.

    What the file has from earlier runs stays, unless it was run again.
    """
    output_json["machine_info"] = describe()
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
        entry["params"] = None  # of a kernel's bench functions, which extra_info describes better
    again = {entry["fullname"] for entry in output_json["benchmarks"]}
    file = Path(config.option.benchmark_json or "")
    if torch.cuda.is_available() and file.is_file():
        kept = json.loads(file.read_text())["benchmarks"]
        output_json["benchmarks"] = [e for e in kept if e["fullname"] not in again] + output_json["benchmarks"]
