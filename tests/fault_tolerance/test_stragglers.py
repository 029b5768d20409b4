"""Slow ranks, spikes, skipped steps and versions: by hand."""

from __future__ import annotations

import json
import math

import pytest

import mpcore as mp
from mpcore.tools.fault_tolerance.spikes import Skips, Spikes
from mpcore.tools.fault_tolerance.stragglers import SlowRank, Stragglers, late_ranks
from mpcore.tools.fault_tolerance.versions import code_versions


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
    assert mp.simulate(finder_on, 1, ranks=4) == [[[], [], [(1, "data")], [(2, "data")], [(2, "data")]]] * 4


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


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_thresholds_and_windows_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match=r"threshold 0\.5 is not more than 1"):
        Stragglers(mp.Mesh(), threshold=0.5)
    for window, least in ((64, 1), (1, 2)):
        with pytest.raises(ValueError, match=f"least {least} is not from 2 to the window of {window}"):
            Spikes(window, least=least)


def test_source_files_behind_a_link_have_a_hash(tmp_path):
    for folder in ("own", "linked"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.py").write_text("x = 1\n")
    (tmp_path / "own" / "link").symlink_to(tmp_path / "linked")
    found = {name for name in code_versions(tmp_path / "own") if name.startswith("own/")}
    assert found == {"own/own.py", "own/link/linked.py"}
