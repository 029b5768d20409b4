"""What a checkpoint of a model and its AdamW costs beside the safetensors library that moves the same bytes.

The library checks nothing and syncs nothing. So its file is synced after it is written, as ours are. What it loads is a
mapping of the file, of which nothing is read: parameters are copied out of it, and so are the optimizer's moments, into
memory of their own, since the optimizer is going to write to them. Both sides touch every byte and end with the same.
"""

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

from bench.interleave import Times, judge
from mpcore import Mesh
from mpcore.checkpoint import load, save, save_async

# 67 MB of fp32, and moments of 134. Of 32 MiB each: smaller ones malloc would give out of memory that it has kept from
# the round before, as no process that resumes has any.
BOUND = ("disk", "memory")
ROUNDS, TENSORS, ROWS, COLUMNS = 9, 2, 4096, 2048


class Model(nn.Module):
    """Matrices, as a transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(ROWS, COLUMNS)) for _ in range(TENSORS)])


def wall(
    calls: Mapping[str, Callable[[], object]], before: Callable[[], None], rounds: int = ROUNDS
) -> tuple[Times, Times]:
    """As `interleave`, by the clock on the wall: threads and disks are what is measured here. And processor time."""
    times, processor = Times({name: [] for name in calls}), Times({name: [] for name in calls})
    for turn in range(-1, rounds):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            before()
            began, used = time.perf_counter(), time.process_time()
            calls[name]()
            if turn >= 0:
                times[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - used)
    return times, processor


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


class Training:
    """A model and its optimizer.

    Args:
        used: whether the optimizer has done a step, and has state.
    """

    def __init__(self, used: bool = True) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = self.fresh()
        if used:
            for p in self.model.parameters():
                p.grad = torch.randn_like(p)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def fresh(self) -> torch.optim.AdamW:
        """Another optimizer, without state."""
        return torch.optim.AdamW(self.model.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by the names of the library's file."""
        found = dict(self.model.state_dict())
        for (name, _), state in zip(self.model.named_parameters(), self.optimizer.state.values(), strict=True):
            found |= {f"{slot}/{name}": value for slot, value in state.items()}
        return found

    def load_raw(self, path: Path) -> None:
        """What `load` does, by the library: into the optimizer's memory where it has some."""
        found = load_file(path)
        self.model.load_state_dict({name: found[name] for name in self.model.state_dict()})
        for name, p in self.model.named_parameters():
            for slot in ("step", "exp_avg", "exp_avg_sq"):
                value, state = found[f"{slot}/{name}"], self.optimizer.state[p]
                if slot in state:
                    state[slot].copy_(value)
                else:
                    state[slot] = value.clone()


@pytest.mark.benchmark(group="save 201 MB")
def test_save(benchmark, tmp_path: Path) -> None:
    """At most 1.3 times `save_file` and a sync; in the background, a step waits for the copy and no more."""
    training = Training()
    held, state = (training.model, training.optimizer), training.tensors()

    def theirs() -> None:
        save_file(state, tmp_path / "raw.safetensors")
        sync(tmp_path / "raw.safetensors")

    def clear() -> None:
        shutil.rmtree(tmp_path / "step", ignore_errors=True)
        (tmp_path / "raw.safetensors").unlink(missing_ok=True)

    ours = lambda: save(tmp_path / "step", *held, mesh=Mesh(), step=1)  # noqa: E731
    times, processor = wall({"mpcore": ours, "save_file and fsync": theirs}, clear)
    ratio = times.ratio("mpcore", "save_file and fsync")
    blocked, copied = [], []
    for _ in range(ROUNDS):
        clear()
        began = time.perf_counter()
        kept = [tensor.to("cpu", copy=True) for tensor in state.values()]
        copied.append(time.perf_counter() - began)
        del kept
        began = time.perf_counter()
        writing = save_async(tmp_path / "step", *held, mesh=Mesh(), step=1)
        blocked.append(time.perf_counter() - began)
        writing.wait()
    waits = statistics.median(a / b for a, b in zip(blocked, copied, strict=True))
    benchmark.extra_info |= {
        "bytes": sum(tensor.nbytes for tensor in state.values()),
        "milliseconds": milliseconds(times) | {"blocked": round(1e3 * statistics.median(blocked), 1)},
        "processor milliseconds": milliseconds(processor),
        "ratios": {
            "save / safetensors' save_file and fsync (at most 1.3)": round(ratio, 3),
            "what save_async blocks / copy to memory (at most 1.3)": round(waits, 3),
        },
    }
    benchmark.pedantic(ours, setup=clear, rounds=3)
    waiting = [a / b for a, b in zip(blocked, copied, strict=True)]
    judge(benchmark.extra_info, "what save_async blocks over a copy to memory", waiting, at_most=1.3)
    saving = times.ratios("mpcore", "save_file and fsync")
    judge(benchmark.extra_info, "save over save_file and fsync", saving, at_most=1.3)


@pytest.mark.benchmark(group="load 201 MB")
def test_load(benchmark, tmp_path: Path) -> None:
    """At most 1.3 times the library, to resume: from the disk, and from memory.

    A run that goes back to a checkpoint has memory to read into, and no page of it is new. A copy there takes a quarter
    of the time, and what looking at every byte adds shows: no bound, since on one thread nothing could keep it.
    """
    training, raw = Training(), tmp_path / "raw.safetensors"
    want = {name: tensor.clone() for name, tensor in training.tensors().items()}
    save_file(training.tensors(), raw)
    path = save(tmp_path / "step", training.model, training.optimizer, mesh=Mesh(), step=1)

    def ours(check_bytes: bool = True) -> None:
        load(path, training.model, training.optimizer, mesh=Mesh(), check_bytes=check_bytes)

    def theirs() -> None:
        training.load_raw(raw)

    def begin() -> None:
        training.optimizer = training.fresh()

    def begin_cold() -> None:
        begin()
        drop(raw, *path.glob("*.safetensors"))

    def wipe() -> None:
        with torch.no_grad():
            for tensor in training.tensors().values():
                tensor.zero_()

    for call in (ours, theirs):
        for before in (wipe, begin):
            before()
            call()
            for name, tensor in training.tensors().items():
                assert torch.equal(tensor, want[name]), name

    calls = {"mpcore": ours, "unchecked": lambda: ours(check_bytes=False), "load_file": theirs}
    ways = {"disk": begin_cold, "memory": begin, "going back": lambda: None}
    times = {way: wall(calls, before) for way, before in ways.items()}
    ratios = {way: of.ratio("mpcore", "load_file") for way, (of, _) in times.items()}
    benchmark.extra_info |= {
        "bytes": sum(tensor.nbytes for tensor in want.values()),
        "milliseconds": {way: milliseconds(of) for way, (of, _) in times.items()},
        "processor milliseconds": {way: milliseconds(of) for way, (_, of) in times.items()},
        "ratios": {
            f"load, {way} / load_file and copies ({'at most 1.3' if way in BOUND else 'no bound'})": round(ratio, 3)
            for way, ratio in ratios.items()
        },
    }
    benchmark.pedantic(ours, setup=begin, rounds=3)
    for way in BOUND:
        each = times[way][0].ratios("mpcore", "load_file")
        judge(benchmark.extra_info, f"load from {way} over load_file and copies", each, at_most=1.3)
