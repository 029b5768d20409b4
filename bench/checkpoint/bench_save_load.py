"""What a checkpoint costs beside the safetensors library that moves the same bytes, which checks and syncs nothing."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bench.interleave import Times, at_most
from mpcore import Mesh
from mpcore.checkpoint import load, save, save_async

ROUNDS, TENSORS, ROWS, COLUMNS = 9, 24, 1024, 2048  # 201 MB of fp32


class Model(nn.Module):
    """Matrices, as a transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(ROWS, COLUMNS)) for _ in range(TENSORS)])


def wall(calls: Mapping[str, Callable[[], object]], before: Callable[[], None], rounds: int = ROUNDS) -> Times:
    """As `interleave`, by the clock on the wall: threads and disks are what is measured here."""
    times = Times({name: [] for name in calls})
    for turn in range(-1, rounds):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            before()
            began = time.perf_counter()
            calls[name]()
            if turn >= 0:
                times[name].append(time.perf_counter() - began)
    return times


def sync(path: Path) -> None:
    """Bring a file to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def drop(*paths: Path) -> None:
    """Forget what memory holds of files, so that the disk is read."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def milliseconds(times: Times) -> dict[str, float]:
    """Medians."""
    return {name: round(1e3 * times.median(name), 1) for name in times}


@pytest.fixture
def model() -> Model:
    """201 MB of it."""
    torch.manual_seed(0)
    return Model()


@pytest.mark.benchmark(group="save 201 MB")
def test_save(benchmark, model: Model, tmp_path: Path) -> None:
    """At most 1.3 times `save_file` and a sync; in the background, a step waits for the copy and no more."""
    mesh, state = Mesh(), dict(model.state_dict())

    def theirs() -> None:
        save_file(state, tmp_path / "raw.safetensors")
        sync(tmp_path / "raw.safetensors")

    def copy() -> list[Tensor]:
        return [p.detach().to("cpu", copy=True) for p in model.parameters()]

    def clear() -> None:
        shutil.rmtree(tmp_path / "step", ignore_errors=True)
        (tmp_path / "raw.safetensors").unlink(missing_ok=True)

    ours = lambda: save(tmp_path / "step", model, mesh=mesh, step=1)  # noqa: E731
    times = wall({"mpcore": ours, "save_file and fsync": theirs}, clear)
    ratio = times.ratio("mpcore", "save_file and fsync")
    blocked, copied, writing = [], [], None
    for _ in range(ROUNDS):
        clear()
        began = time.perf_counter()
        kept = copy()
        copied.append(time.perf_counter() - began)
        del kept
        began = time.perf_counter()
        writing = save_async(tmp_path / "step", model, mesh=mesh, step=1)
        blocked.append(time.perf_counter() - began)
        writing.wait()
    waits = statistics.median(a / b for a, b in zip(blocked, copied, strict=True))
    benchmark.extra_info |= {
        "bytes": sum(p.nbytes for p in model.parameters()),
        "milliseconds": milliseconds(times) | {"blocked": round(1e3 * statistics.median(blocked), 1)},
        "ratios": {
            "save / safetensors' save_file and fsync (at most 1.3)": round(ratio, 3),
            "what save_async blocks / copy to memory (at most 1.3)": round(waits, 3),
        },
    }
    benchmark.pedantic(ours, setup=clear, rounds=3)
    at_most("what save_async blocks over a copy to memory", waits, 1.3)
    at_most("save over save_file and fsync", ratio, 1.3)


@pytest.mark.benchmark(group="load 201 MB")
def test_load(benchmark, model: Model, tmp_path: Path) -> None:
    """From the disk at most 1.3 times `load_file` and `load_state_dict`; from memory, where the CRC shows, no bound."""
    mesh, raw = Mesh(), tmp_path / "raw.safetensors"
    save_file(dict(model.state_dict()), raw)
    path = save(tmp_path / "step", model, mesh=mesh, step=1)
    want = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load(path, model, mesh=mesh)
    for p, value in zip(model.parameters(), want, strict=True):
        assert torch.equal(p, value)

    calls = {
        "mpcore": lambda: load(path, model, mesh=mesh),
        "unchecked": lambda: load(path, model, mesh=mesh, check_bytes=False),
        "load_file": lambda: model.load_state_dict(load_file(raw)),
    }
    hot = wall(calls, lambda: None)
    cold = wall(calls, lambda: drop(raw, *path.glob("*.safetensors")))
    ratio = cold.ratio("mpcore", "load_file")
    benchmark.extra_info |= {
        "bytes": sum(p.nbytes for p in model.parameters()),
        "milliseconds": {"disk": milliseconds(cold), "memory": milliseconds(hot)},
        "ratios": {
            "load from disk / load_file and load_state_dict (at most 1.3)": round(ratio, 3),
            "load from memory / load_file and load_state_dict (no bound)": round(hot.ratio("mpcore", "load_file"), 3),
            "the same without the CRC (no bound)": round(hot.ratio("unchecked", "load_file"), 3),
        },
    }
    benchmark.pedantic(calls["mpcore"], rounds=3)
    at_most("load from disk over load_file", ratio, 1.3)
