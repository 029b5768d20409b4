"""The training loop: what it asks of the run, in which order, and what it makes of the answers."""

from __future__ import annotations

import atexit
import gc
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import examples
from examples.gpt import pretrain, train
from examples.gpt.arguments import parse
from examples.gpt.config import GPTConfig
from examples.gpt.tokenizer import ByteTokenizer
from examples.gpt.train import Trainer
from mpcore import Axis, Mesh


def bare(flags: str = "", mesh: Mesh = Mesh(), **parts: Any) -> Any:
    """A trainer whose parts are given."""
    made = Trainer.__new__(Trainer)
    made.args, made.mesh, made.config = parse(flags.split()), mesh, GPTConfig()
    vars(made).update(parts)
    return made


class Samples:
    """Sample i is the tokens 10 i, 10 i + 1, .. and the next ones."""

    def __init__(self, length: int = 4, size: int = 100) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor([[10 * i + j for j in range(self.length + 1)] for i in indices])
        return tokens[:, :-1], tokens[:, 1:]


# --- a batch and a share ----------------------------------------------------------------------------------------------


def test_a_batch_is_this_ranks_part_of_samples_and_documents():
    setup = SimpleNamespace(tokenizer=ByteTokenizer())
    x, y, more = bare(setup=setup).batch(Samples(), [3, 1])
    assert x.tolist() == [[30, 31, 32, 33], [10, 11, 12, 13]]
    assert y.tolist() == [[31, 32, 33, 34], [11, 12, 13, 14]]
    assert {name: value.tolist() for name, value in more.items()} == {"samples": [3, 1]}
    second = Mesh(cp=Axis(2, 1))
    x, y, _ = bare("--cp-kind alltoall", second, setup=setup).batch(Samples(), [3])
    assert (x.tolist(), y.tolist()) == ([[32, 33]], [[33, 34]])
    x, _, _ = bare("", second, setup=setup).batch(Samples(), [3])
    assert x.tolist() == [[31, 32]], "zigzag: the middle parts"
    ended = SimpleNamespace(tokenizer=SimpleNamespace(end_of_document=31))
    _, _, more = bare("--set document_masking=true", setup=ended).batch(Samples(), [3])
    found = more["documents"][0].tolist()
    assert [found.index(document) for document in found] == [0, 0, 2, 2], "31 ends the first document"


def test_a_share_is_reordered_by_a_twin_and_sets_the_micro_batches():
    said: list[Any] = []
    run: Any = SimpleNamespace(set_micro_batches=said.append, share=lambda size: said.append(size) or range(2, 4))
    run.pipeline = SimpleNamespace(micro_batches=4)
    checkpoints = SimpleNamespace(samples=lambda step: said.append(step) or range(100, 108))
    made = bare("--global-batch 16 --set twin=2 --workers 2", run=run, checkpoints=checkpoints,
                setup=SimpleNamespace(micro_batches=4))  # fmt: skip
    with mock.patch.object(train, "reorder", return_value="mine") as reorder:
        assert made.share(7) == "mine"
    assert said == [7, 2, 8]
    reorder.assert_called_once_with(range(2, 4), 7, range(100, 108), 2, 2)


# --- an evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "mesh", "size", "places", "counted"),
    [
        ("--set eval_samples=3", Mesh(), 100, [0, 1, 2], [True] * 3),
        ("--set eval_samples=3", Mesh(dp=Axis(2)), 100, [0, 2], [True, True]),
        ("--set eval_samples=3", Mesh(dp=Axis(2, 1)), 100, [1, 3], [True, False]),
        ("--set eval_samples=4", Mesh(dp=Axis(2, 1)), 100, [1, 3], [True, True]),
        ("--set eval_samples=9", Mesh(), 2, [0, 1], [True, True]),
        ("--set eval_samples=1", Mesh(dp=Axis(3, 2)), 100, [2], [False]),
        ("--set eval_samples=2 --set document_masking=true", Mesh(), 100, [0, 1], [True] * 2),
    ],
)
def test_an_evaluation_deals_the_first_samples_out(flags, mesh, size, places, counted):
    asked: list[tuple] = []
    run = SimpleNamespace(evaluate=lambda batches, documents: asked.append((batches, documents)) or 1.5)
    made = bare(flags, mesh, run=run, setup=SimpleNamespace(tokenizer=ByteTokenizer()), held_out=Samples(size=size))
    assert made.evaluate() == 1.5
    ((batches, documents),) = asked
    assert [x[0, 0].item() // 10 for x, _ in batches] == places
    assert all(x.shape == y.shape == (1, 4) for x, y in batches)
    assert [(y == x + 1).all().item() for x, y in batches] == counted
    assert [(y == -100).all().item() for _, y in batches] == [not each for each in counted]
    assert [document is not None for document in documents] == ["document" in flags] * len(places)
    made.evaluate(Samples(size=1))
    assert len(asked[1][0]) == 1
    made.held_out = None
    with pytest.raises(ValueError, match="the held-out part has no sample: --eval-every above 0 says why"):
        made.evaluate()


# --- the command ------------------------------------------------------------------------------------------------------


class Started:
    """What the command makes."""

    def __init__(self, stopped: bool = False, error: Exception | None = None) -> None:
        self.model, self.stop = "model", SimpleNamespace(signals=None)
        self.stopped, self.error = stopped, error
        self.beat: Any = None
        self.run = SimpleNamespace()

    def train(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.stopped


def command(flags: str, trainer: Any, ready: bool = False) -> tuple[Any, mock.MagicMock]:
    """The exit status, and the mocks of what it calls."""
    names = (
        "build_mesh",
        "invariant_mesh",
        "Watchdog",
        "leave_together",
        "StopSignals",
        "Trainer",
        "record",
        "tell_launcher",
    )
    with mock.patch.multiple(pretrain, **dict.fromkeys(names, mock.DEFAULT), dist=mock.DEFAULT) as parts:
        called = mock.MagicMock(**parts)
        for name, part in parts.items():
            setattr(called, name, part)
        called.Trainer.side_effect = trainer if callable(trainer) else [trainer]
        called.dist.is_initialized.return_value = ready
        called.dist.get_rank.return_value = 3
        called.build_mesh.return_value.job.rank = called.invariant_mesh.return_value.job.rank = 2
        try:
            return pretrain.main(flags.split()), called
        except SystemExit as left:
            return left.code, called


def test_the_command_makes_a_mesh_a_watchdog_and_a_trainer():
    trainer = Started()
    flags = "--tp 2 --pp 3 --cp 4 --cp-kind two-level --set cp_inner=2 --ep 5 --dp 6 --etp 1 --device cpu --workers 7"
    status, called = command(f"{flags} --set timeout=8 --set bitwise=4 --out there", trainer)
    assert status == 0
    called.build_mesh.assert_called_once_with(
        tp=2, cp=4, pp=3, ep=5, dp=6, etp=1, device_type="cpu", worlds=7, cp_inner=2, timeout=23.0
    )
    called.invariant_mesh.assert_called_once_with(called.build_mesh.return_value, 4)
    mesh, signals = called.invariant_mesh.return_value, called.StopSignals.return_value.__enter__.return_value
    called.leave_together.assert_called_once_with(mesh, folder=Path("there/errors"))
    called.Watchdog.assert_called_once_with(mesh, timeout=8.0, folder=Path("there/hang"))
    watchdog = called.Watchdog.return_value.__enter__.return_value
    assert (watchdog.model, trainer.beat) == ("model", watchdog.beat)
    called.StopSignals.assert_called_once_with(leave_with=75)
    assert signals.leave_with is None
    assert trainer.stop.signals is signals
    assert called.Trainer.call_args.args[1] is mesh
    called.record.assert_called_once_with()
    called.dist.destroy_process_group.assert_not_called()
    status, called = command("", Started(stopped=True), ready=True)
    assert status == 75
    called.record.assert_not_called()
    called.dist.destroy_process_group.assert_called_once_with()


def test_errors_of_the_command_name_the_rank(monkeypatch):
    assert command("", Started(error=ValueError("no data")))[0] == "rank 2: error: no data"
    assert command("--steps 0", Started())[0] == "error: --steps 0 is smaller than 1"
    for local, code in (("0", "rank 3: error: --steps 0 is smaller than 1"), ("1", 1)):
        for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": "2",
                            "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        status, called = command("--steps 0", Started(), ready=True)
        assert status == code
        called.tell_launcher.assert_called_once_with("error: --steps 0 is smaller than 1")


@pytest.mark.parametrize(("local", "shown"), [("0", True), ("1", False)])
def test_a_program_names_missing_packages_once_a_host_before_it_starts(monkeypatch, local, shown):
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    examples.check_packages()  # an import alone, of a test for example, doesn't need them
    monkeypatch.setattr("sys.argv", ["-m"])
    with pytest.raises(SystemExit) as ended:
        examples.check_packages()
    text = "error: examples/ needs tqdm: run pip install '.[examples]' in the clone"
    assert ended.value.code == (text if shown else 1)


def test_the_command_frees_at_its_exit_what_the_garbage_collector_skipped(monkeypatch, capsys):
    """Triton 3.9 prints the names of objects that are left at a normal exit, such as after --help."""
    said = []
    monkeypatch.setattr(gc, "freeze", lambda: said.append("freeze"))
    monkeypatch.setattr(atexit, "register", said.append)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr("sys.argv", ["pretrain", "--help"])
    monkeypatch.delitem(sys.modules, "examples.gpt.pretrain")  # runpy warns of a module that is imported
    with pytest.raises(SystemExit):
        runpy.run_module("examples.gpt.pretrain", run_name="__main__")
    assert said == ["freeze", gc.unfreeze]
    assert "usage: " in capsys.readouterr().out
