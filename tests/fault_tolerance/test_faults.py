"""The seconds of a step, the detectors of faults, and the files of a run's folder, by numbers worked out by hand."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpcore import Axis, Mesh, simulate
from mpcore.tools.analysis import communication as times
from mpcore.tools.analysis.communication import StepTimes
from mpcore.tools.fault_tolerance import faults
from mpcore.tools.fault_tolerance.faults import Faults, check_writable, is_timed, was_restarted
from mpcore.tools.fault_tolerance.metrics import read_records, whole, write_whole

FIRST = Mesh()


# --- times ------------------------------------------------------------------------------------------------------------


def test_where_communication_cannot_be_seen_it_is_left_out(monkeypatch):
    monkeypatch.setattr(times, "simulated_rank", lambda: None)
    assert StepTimes(FIRST).clock is not None
    for compiled, mesh in ((False, Mesh(device_type="cuda")), (True, FIRST)):
        found = StepTimes(mesh, compiled)
        assert found.clock is None
        with found, found.data():
            pass
        assert set(found.record()) == {"seconds", "data_seconds"}
        assert 0 <= found.data_seconds <= found.seconds < 1
    monkeypatch.setattr(times, "simulated_rank", lambda: 0)
    assert StepTimes(FIRST).clock is None


# --- faults -----------------------------------------------------------------------------------------------------------


def checked(entry: dict, mesh: Mesh = FIRST, replicas: int = 0, speed: int = 0, late: Any = (),
            before: Any = (), out: Path = Path("unused"), samples: range = range(8, 16)) -> list[str]:  # fmt: skip
    found = Faults(mesh, list(before), out, max_skips=20, check_replicas=replicas, check_speed=speed)
    run: Any = SimpleNamespace(parameters=lambda: nullcontext("model"))
    stragglers: Any = SimpleNamespace(probe=lambda: None, check=lambda: list(late))
    return found.after({"step": 4, "loss": 1.0, "grad_norm": 1.0, **entry}, samples, run, stragglers)


def test_ranks_tell_the_same_spike_after_a_restart():
    """Rank 0 alone has the records of the steps before."""
    before = [{"step": step, "loss": 2.0} for step in range(20)]
    first, second = simulate(lambda mesh: checked({"loss": 9.0}, mesh, before=before[: 20 * (not mesh.dp.rank)]), dp=2)
    assert first == second
    assert "loss 9 is a spike" in first[0]


def test_a_step_that_is_not_finite_is_told_with_whose_it_is(tmp_path):
    said = "step 4: the loss or the gradient is not finite, the step was skipped on all ranks"
    for bad in ({"loss": math.nan}, {"grad_norm": math.inf}):
        assert checked(bad, out=tmp_path) == [said]
    assert checked({"loss": math.nan}, Mesh(worlds=Axis(2, 1)), out=tmp_path) == [f"{said} of the worker"]
    assert checked({}) == []
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [(line["step"], line["samples"]) for line in lines] == [(4, [8, 15]), (4, [8, 15]), (4, [12, 15])]
    checked({"loss": math.nan}, Mesh(world=Axis(2, 1)), out=tmp_path / "other")
    assert not (tmp_path / "other").exists(), "the first rank alone writes the list"


def test_a_spike_is_told_with_this_workers_samples():
    before = [{"loss": 1.0 + 0.01 * (i % 2)} for i in range(200)] + [{"loss": None}, {"val_loss": 9.0}]
    for mesh, samples in (
        (FIRST, "8 to 15"),
        (Mesh(worlds=Axis(2, 1)), "12 to 15"),
        (Mesh(worlds=Axis(4, 2)), "12 to 13"),
    ):
        (line,) = checked({"loss": 5.0}, mesh, before=before)
        assert re.fullmatch(
            rf"step 4: loss 5 is a spike, \d+ standard deviations above those before; its samples are {samples}", line
        )
    assert checked({"loss": 1.0}, before=before) == []
    assert checked({"loss": 5.0}) == [], "without losses before, nothing is a spike"


def test_skipped_steps_in_a_row_are_counted_over_a_restart(tmp_path):
    before = [{"loss": 1.0, "grad_norm": None}, *[{"loss": None}] * 19, {"val_loss": 9.0}]

    def resume(mesh: Mesh) -> None:
        with pytest.raises(ValueError, match="21 steps in a row"):
            checked({"loss": math.nan}, mesh, before=() if mesh.world.rank else before, out=tmp_path)

    simulate(resume, dp=2)  # rank 0 alone reads the records
    assert len(checked({"loss": math.nan}, before=[*before, {"loss": 1.0, "grad_norm": 1.0}], out=tmp_path)) == 1


def test_replicas_are_compared_and_slow_ranks_are_told(monkeypatch):
    compared: list[tuple] = []
    monkeypatch.setattr(faults, "compare_replicas", lambda *of: compared.append(of))
    checked({}, replicas=5)
    assert compared == [("model", FIRST)]
    checked({"step": 5}, replicas=5)
    assert len(compared) == 1
    two = Mesh(world=Axis(2), job=Axis(2))
    late = ["rank 1 is slow"]
    assert checked({}, two, speed=5, late=late) == ["step 4: rank 1 is slow"]
    for step, speed, mesh in ((3, 5, two), (4, 0, two), (4, 5, FIRST)):
        assert checked({"step": step}, mesh, speed=speed, late=late) == []


def test_the_last_five_steps_before_a_check_of_speed_are_timed():
    two = Mesh(world=Axis(2))
    assert [step for step in range(24) if is_timed(12, two, step)] == [7, 8, 9, 10, 11, 19, 20, 21, 22, 23]
    assert all(is_timed(3, two, step) for step in range(6))
    assert not any(is_timed(0, two, step) for step in range(6))
    assert not any(is_timed(3, FIRST, step) for step in range(6))


def test_restarts_are_counted_and_a_folder_is_probed(tmp_path, monkeypatch):
    for value, told in ((None, False), ("0", False), ("1", True), ("2", True)):
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        if value is not None:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", value)
        assert was_restarted() is told
    check_writable(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'gone'} can't be written: ")):
        check_writable(tmp_path / "gone", 3)


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "one")
    assert path.read_text() == "one"
    with suppress(ZeroDivisionError), whole(path) as part:
        part.write_text("half")
        assert part.parent == tmp_path
        part.write_text(str(1 / 0))
    assert [(at.name, at.read_text()) for at in tmp_path.iterdir()] == [("a.json", "one")]


def test_records_of_an_earlier_run_are_read_up_to_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "loss": 2}\n{"step": 2}\n{"st')
    assert [read_records(path, n) for n in (0, 1, 9)] == [
        [], [{"step": 0}], [{"step": 0}, {"step": 1, "loss": 2}, {"step": 2}]
    ]  # fmt: skip
    assert read_records(tmp_path / "gone", 3) == []
