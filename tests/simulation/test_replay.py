"""Replays of programs that are written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpcore.__main__ import main
from mpcore.tools.simulation import RankError, replay
from mpcore.tools.simulation.replay import replay as play_again

asked: list[tuple[Path, int]] = []
played: list[int] = []


def program(run: Path, step: int) -> tuple[int, Any]:
    """Two ranks; rank 1 divides by zero in the step that the folder is named after."""
    asked.append((run, step))

    def play(watch: Any) -> None:
        rank = torch.distributed.get_rank()
        for i in range(step + 1):
            with watch([], f"step {i}"):
                played.append(i)
                torch.div(torch.ones(2), 0 if rank == 1 and run.name == str(i) else 1)

    if run.name == "none":
        raise ValueError("no run")
    if run.name == "fails":
        return 2, lambda watch: 1 / 0
    return 2, play


def test_the_steps_of_all_ranks_are_played_and_the_first_bad_operator_is_told():
    asked.clear()
    played.clear()
    assert play_again(program, Path("x/9"), 2) == (2, None)
    assert asked == [(Path("x/9"), 2)]
    assert sorted(played) == [0, 0, 1, 1, 2, 2]
    ranks, found = play_again(program, Path("x/1"), 2)
    assert ranks == 2
    assert found is not None
    assert found.startswith("rank 1 of 2: step 1: aten.div.Tensor made infinity")
    assert max(played[6:]) <= 2
    with pytest.raises(RankError, match="ZeroDivisionError"):
        play_again(program, Path("fails"), 0)
    with pytest.raises(ValueError, match="no run"):
        play_again(program, Path("none"), 0)


@pytest.mark.parametrize(
    ("folder", "status", "out", "err"),
    [
        ("x/9", 0, "step 2 and those before it, from the checkpoint on: finite on all 2 ranks\n", ""),
        ("x/1", 1, "rank 1 of 2: step 1: aten.div.Tensor made infinity", ""),
        ("none", 2, "", "mpcore replay: error: no run\n"),
        ("fails", 2, "", "mpcore replay: error: rank 0 of 2: ZeroDivisionError: division by zero\n"),
    ],
)
def test_the_status_of_the_command_says_how_it_went(folder, status, out, err, capsys):
    words = ["replay", folder, "--step", "2", "--program", f"{__name__}:program"]
    assert main(words) == status
    said = capsys.readouterr()
    assert said.out.startswith(out)
    assert bool(said.out) == bool(out)
    assert said.err == err


def test_the_program_of_the_example_is_the_default_and_a_step_is_needed(monkeypatch, capsys):
    found: list[Any] = []
    monkeypatch.setattr(replay, "of_trainer", lambda name: found.append(name))
    monkeypatch.setattr(replay, "replay", lambda *of: found.append(of) or (3, None))
    assert replay.main(["runs/a", "--step", "7"]) == 0
    assert found == ["examples.gpt.pretrain", (None, Path("runs/a"), 7)]
    assert "step 7 " in capsys.readouterr().out
    for words in (["runs/a"], ["--step", "1"]):
        with pytest.raises(SystemExit):
            replay.main(words)
