"""Slow ranks, spikes, skipped steps, metrics and versions: by hand."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import mpcore as mp
from mpcore.tools.fault_tolerance import metrics
from mpcore.tools.fault_tolerance.metrics import MetricsWriter, read_line
from mpcore.tools.fault_tolerance.spikes import Skips, Spikes
from mpcore.tools.fault_tolerance.stragglers import SlowRank, Stragglers, late_ranks
from mpcore.tools.fault_tolerance.versions import code_versions, file_versions


def test_a_rank_is_late_by_a_ratio_and_by_seconds():
    def of(*seconds: float, threshold: float = 1.5, least: float = 0.0) -> list[tuple[int, float]]:
        return [(late.rank, late.ratio) for late in late_ranks([{"data": s} for s in seconds], threshold, least)]

    assert of(1.0, 1.0, 1.5) == []
    assert of(1.0, 1.0, 1.5001) == [(2, 1.5001)]
    assert of(1.0, 3.0, 2.5, 9.0) == [(3, 3.6)], "the others' median is 2.5"
    assert of(1.0, 1.0, 1.75, least=0.75) == []
    assert of(1.0, 1.0, 1.76, least=0.75) == [(2, 1.76)]
    assert of(0.0, 0.0, 1e-3) == [(2, pytest.approx(1e6))], "a median of 0 counts as a nanosecond"
    times = [{"b": 1.0, "a": 9.0}, {"b": 5.0, "a": 1.0}, {"b": 1.0, "a": 1.0}, {"c": 7.0}]
    assert late_ranks(times, 1.5, 0.0) == [SlowRank(0, "a", 9.0), SlowRank(1, "b", 5.0)]


def finder_on(workers: int) -> list[list[tuple[int, str]]]:
    on = mp.build_mesh(device_type="cpu", worlds=workers)
    finder = Stragglers(on, threshold=2.0, patience=2, size=2)
    slow = {0: (), 1: (1,), 2: (1, 2), 3: (2,), 4: (2,)}  # by check, the ranks that are slow
    found = []
    for check, ranks in slow.items():
        finder.times = {"data": [1.0, 3.0 if on.world.rank in ranks else 1.0], "load": [0.1]}
        if on.world.rank in ranks:
            finder.times["data"].append(5.0)
        found.append([(late.rank, late.phase) for late in finder.check()])
        assert finder.times == {}, check
    return found


def test_a_rank_is_reported_after_two_checks_in_a_row_and_as_long_as_it_is_slow():
    want = [[], [], [(1, "data")], [(2, "data")], [(2, "data")]]
    assert mp.simulate(finder_on, 1, ranks=4) == [want] * 4


def test_a_phase_is_timed_and_the_probe_multiplies_its_matrices(monkeypatch):
    from mpcore.tools.fault_tolerance import stragglers

    clock = iter([10.0, 10.5, 20.0, 22.0, 30.0, 30.25])
    finder = Stragglers(mp.Mesh())
    assert (finder.threshold, finder.least, finder.patience) == (1.5, 1e-3, 2)
    assert torch.equal(finder.matrix, torch.ones(256, 256))
    monkeypatch.setattr(stragglers.time, "perf_counter", lambda: next(clock))
    products: list = []
    monkeypatch.setattr(stragglers.torch, "mm", lambda *given: products.append(given))
    for phase in ("data", "data"):
        with finder.timed(phase):
            assert products == []
    finder.probe()
    assert finder.times == {"data": [0.5, 2.0], "compute": [0.25]}
    assert len(products) == 4
    assert all(a is b is finder.matrix for a, b in products)
    assert finder.check() == []
    with pytest.raises(ValueError, match=r"threshold 0\.5 is not more than 1"):
        Stragglers(mp.Mesh(), threshold=0.5)
    Stragglers(mp.Mesh(), threshold=1.01, size=1)


# --- spikes -----------------------------------------------------------------------------------------------------------


def test_a_spikes_score_is_its_distance_in_standard_deviations():
    finder = Spikes(window=4, threshold=3.0, least=4)
    assert [finder.score(x) for x in (1.0, 3.0, 1.0, 3.0)] == [None] * 4
    assert finder.score(5.0) is None  # (5 - 2) / 1 is the threshold, and not above it
    assert list(finder.before) == [3.0, 1.0, 3.0, 5.0]
    mean, spread = 3.0, math.sqrt(2)
    assert finder.score(8.0) == pytest.approx((8 - mean) / spread)
    assert list(finder.before) == [1.0, 3.0, 5.0, pytest.approx(mean + 3 * spread)], "as far as the threshold"
    assert finder.score(-99.0) is None, "a loss that falls is no spike"
    assert list(finder.before)[-1] == -99.0


def test_a_window_of_equal_losses_has_a_hundredth_of_the_mean_as_its_deviation():
    for level, spread in ((2.0, 0.02), (-2.0, 0.02), (0.0, 1e-12)):
        for times, spike in ((5.9, False), (6.1, True)):
            finder = Spikes(window=2, least=2)
            finder.before.extend([level, level])
            score = finder.score(level + times * spread)
            assert (score is not None) is spike
            assert score is None or score == pytest.approx(times, rel=1e-6)


def test_the_usual_window_is_64_losses_of_which_16_must_be_there():
    finder = Spikes()
    assert [finder.score(9.0 ** (i % 2)) for i in range(16)] == [None] * 16
    assert finder.score(1e9) is not None
    assert finder.before.maxlen == 64
    Spikes(window=2, least=2)
    for window, least in ((64, 1), (64, 65), (1, 2)):
        with pytest.raises(ValueError, match=f"least {least} is not from 2 to the window of {window}"):
            Spikes(window, least=least)


def test_skipped_steps_in_a_row_are_counted_and_one_too_many_raises(tmp_path):
    skips = Skips(2, tmp_path / "s.jsonl")
    rows = []
    for finite in (True, False, False, True, False):
        skips.step(finite, step=3, loss=math.nan)
        rows.append(skips.row)
    assert rows == [0, 1, 2, 0, 1]
    skips.step(False)
    with pytest.raises(ValueError, match=r"^3 steps in a row had .* 2 are allowed \(step 7, loss inf\)$"):
        skips.step(False, step=7, loss=math.inf)
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [line["in_a_row"] for line in lines] == [1, 2, 1, 2, 3]
    assert lines[0] == {"step": 3, "loss": None, "in_a_row": 1}
    assert Skips(0, None).lines is None


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_line_that_does_not_fit_is_written_with_the_next(monkeypatch, tmp_path):
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    writer.add({"a": 1, "b": [math.nan, 2.5], "c": -math.inf})
    assert path.read_text() == '{"a": 1, "b": [null, 2.5], "c": null}\n'
    real, room = open, [5]

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *given: Any) -> None:
            self.file.close()

        def fileno(self) -> int:
            return self.file.fileno()

        def write(self, data: bytes) -> int:
            return self.file.write(data[: room[0]])

        def truncate(self, size: int) -> None:
            self.file.truncate(size)

    monkeypatch.setattr(metrics, "open", lambda *given, **how: Full(real(*given, **how)), raising=False)
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left") as found:
            writer.add({"step": step})
        assert found.value.errno == errno.ENOSPC
        assert path.read_text().count("\n") == 1, "a part of a line is taken back"
    room[0] = 10**6
    writer.add({"step": 4})
    assert path.read_text().splitlines()[1:] == ['{"step": 2}', '{"step": 3}', '{"step": 4}']
    assert writer.waiting == b""
    assert read_line('{"x": NaN, "y": Infinity, "z": 1}') == {"x": None, "y": None, "z": 1}


# --- versions ---------------------------------------------------------------------------------------------------------


def test_a_files_version_is_its_size_and_a_hash_of_both_ends(tmp_path):
    def version(data: bytes, hashed: bytes) -> str:
        return f"{len(data)} bytes, {hashlib.sha256(hashed).hexdigest()[:12]}"

    data = bytes(range(100))
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(b"")
    path = str(tmp_path / "a")
    assert file_versions(path, ends=10) == {"a": version(data, data[:10] + data[-10:])}
    assert file_versions(path, ends=100) == {"a": version(data, data * 2)}
    assert file_versions(path, ends=70) == {"a": version(data, data[:70] + data[-70:])}
    assert file_versions(path) == {"a": version(data, data * 2)}
    assert file_versions(tmp_path / "b") == {"b": version(b"", b"")}
    large = bytes(3 * 2**16 + 5)
    (tmp_path / "c").write_bytes(large)
    assert file_versions(tmp_path / "c") == {"c": version(large, bytes(2 * 2**16))}


def test_code_has_a_hash_for_each_source_file_of_each_folder(tmp_path):
    own = tmp_path / "own"
    (own / "deep").mkdir(parents=True)
    (own / "deep" / "x.py").write_text("x = 1\n")
    (own / "y.py").write_text("y = 1\n")
    (own / "note.txt").write_text("no code")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "z.py").write_text("z = 1\n")
    (own / "link").symlink_to(tmp_path / "linked")
    found = code_versions(own)
    assert (found["python"], found["torch"]) == (platform.python_version(), torch.__version__)
    assert found["numpy"] == numpy.__version__
    here = {name: version for name, version in found.items() if name.startswith("own/")}
    assert here == {
        f"own/{name}": hashlib.sha256((own / name).read_bytes()).hexdigest()[:12]
        for name in ("deep/x.py", "y.py", "link/z.py")
    }
    package = Path(mp.__file__).parent
    assert {name for name in found if name.startswith("mpcore/")} >= {
        f"mpcore/{os.path.relpath(path, package)}" for path in package.rglob("*.py")
    }
    assert code_versions(str(own), own) == found, "a folder may be named twice"
