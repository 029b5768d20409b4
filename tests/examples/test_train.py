"""The training loop: what it asks of the run, in which order, and what it makes of the answers."""

from __future__ import annotations

import atexit
import gc
import runpy
import signal
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import examples
from examples.gpt import pretrain, train
from examples.gpt.arguments import parse
from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.tokenizer import ByteTokenizer
from examples.gpt.train import Trainer
from mpcore import Axis, Mesh
from mpcore.pipeline.schedules import build_schedule


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


# --- how it is made ---------------------------------------------------------------------------------------------------


def made_with(flags: str, mesh: Mesh = Mesh(), run_step: int = 0, config: Any = None) -> tuple[Any, Any]:
    """The trainer, and the calls of its parts, which are mocks."""
    plan = build_schedule("interleaved", 2, 4)
    setup = SimpleNamespace(config=GPTConfig(), train="train", held_out="held out", blocks="blocks", plan=plan,
                            micro_batches=4)  # fmt: skip
    names = ("set_up", "build_stages", "prepare", "invariant", "Console", "Checkpoints", "round_anew", "TensorCurves",
             "Stragglers", "Stop", "Profile", "StepTimes", "build_optimizer", "policies")  # fmt: skip
    with mock.patch.multiple(train, **dict.fromkeys(names, mock.DEFAULT)) as parts:
        called = SimpleNamespace(**parts)
        called.set_up.return_value = setup
        stage = SimpleNamespace(head="head", last=False, blocks={"0": "a", "1": "b"}, loss="first loss")
        last = SimpleNamespace(head="last head", last=True, blocks={"4": "c"}, loss="the loss")
        called.build_stages.return_value = [stage, last]
        called.policies.return_value = {"data": "zero"}
        args = parse(flags.split())
        if args.bitwise:
            called.prepare = called.invariant.prepare
        called.prepare.return_value.step = run_step
        made = Trainer(args, mesh, config)
        called.args = args
        called.optimizer = called.prepare.call_args.kwargs.pop("optimizer")
        called.optimizer("model")
    return made, called


def test_a_trainer_makes_its_parts_of_the_flags():
    mesh = Mesh(pp=Axis(2))
    made, called = made_with("--seed 5 --out there --record-tensors 7 --profile 2:3 --cp-kind ring", mesh)
    args, run = called.args, made.run
    called.set_up.assert_called_once_with(args, mesh, None)
    (config, on, blocks, ranks), options = called.build_stages.call_args
    assert (config, on, blocks, ranks) == (GPTConfig(), mesh, "blocks", [0, 1, 0, 1])
    assert options == {"sequence_parallel": False, "context": "ring", "device": "meta", "dtype": torch.float32,
                       "residual_dtype": torch.float32}  # fmt: skip
    (stages, at), options = called.prepare.call_args
    assert (stages, at) == (made.stages, mesh)
    assert options == {"blocks": {0: "a", 1: "b", 4: "c"}, "loss": "the loss", "seed": 5, "micro_batches": 4,
                       "schedule": called.set_up.return_value.plan, "trace": False, "data": "zero"}  # fmt: skip
    called.policies.assert_called_once_with(args, made.stages)
    called.build_optimizer.assert_called_once_with(args, "model", mesh, ["last head"])
    assert made.model is run.model
    called.Console.assert_called_once_with(mesh, Path("there"))
    called.Checkpoints.assert_called_once_with(run, made.setup, args, Path("there"), made.console)
    made.checkpoints.begin.assert_called_once_with()
    called.round_anew.assert_not_called()
    called.TensorCurves.assert_called_once_with(run, 7, Path("there"))
    called.Stragglers.assert_called_once_with(mesh)
    called.Stop.assert_called_once_with(run, made.checkpoints)
    called.Profile.assert_called_once_with(range(2, 4), mesh, Path("there"))
    called.StepTimes.assert_called_once_with(args, mesh)
    assert (made.config, made.train_samples, made.held_out) == (GPTConfig(), "train", "held out")
    assert made.beat() is None
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


def test_flags_change_how_a_trainer_is_made():
    _, called = made_with("--dtype float64 --sequence-parallel --trace --bitwise 2", config="mine")
    assert called.set_up.call_args.args[2] == "mine"
    options = called.build_stages.call_args.kwargs
    assert (options["dtype"], options["sequence_parallel"]) == (torch.float64, True)
    assert called.invariant.prepare.call_args.kwargs["trace"] is True
    made, called = made_with("--out there", Mesh(worlds=Axis(2, 1)))
    assert made.out == Path("there/worker-1")
    made, called = made_with("--twin 3 --dtype bfloat16")
    called.round_anew.assert_called_once_with(made.run, 3, torch.bfloat16)
    _, called = made_with("--twin 3", run_step=1)
    called.round_anew.assert_not_called()


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
    _, _, more = bare("--document-masking", setup=ended).batch(Samples(), [3])
    found = more["documents"][0].tolist()
    assert [found.index(document) for document in found] == [0, 0, 2, 2], "31 ends the first document"


def test_a_share_is_reordered_by_a_twin_and_sets_the_micro_batches():
    said: list[Any] = []
    run: Any = SimpleNamespace(set_micro_batches=said.append, share=lambda size: said.append(size) or range(2, 4))
    run.pipeline = SimpleNamespace(micro_batches=4)
    checkpoints = SimpleNamespace(samples=lambda step: said.append(step) or range(100, 108))
    made = bare("--global-batch 16 --twin 2 --workers 2", run=run, checkpoints=checkpoints,
                setup=SimpleNamespace(micro_batches=4))  # fmt: skip
    with mock.patch.object(train, "reorder", return_value="mine") as reorder:
        assert made.share(7) == "mine"
    assert said == [7, 2, 8]
    reorder.assert_called_once_with(range(2, 4), 7, range(100, 108), 2, 2)


# --- a step -----------------------------------------------------------------------------------------------------------


class Run:
    """Says what it was asked for."""

    def __init__(self, step: int = 3, merge: Any = None, used: bool = False) -> None:
        self.step, self.said, self.bounds = step, [], SimpleNamespace(is_used=used, rows=9)
        self.result = SimpleNamespace(loss=2.5, grad_norm=0.5, routers="routers", repeats=1)
        self.observers = [SimpleNamespace(joins_worlds=True, merged=merge)]

    def count_tokens(self, targets: torch.Tensor) -> torch.Tensor:
        self.said.append(("count", targets.tolist()))
        return torch.tensor(8)

    def loss_factor(self, count: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.125]) * count

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor, **more: Any) -> None:
        self.said.append(("forward", x.tolist(), y.tolist(), {name: value.tolist() for name, value in more.items()}))

    def clip_gradients(self, norm: float) -> None:
        self.said.append(("clip", norm))

    def optimizer_step(self, lr: float) -> Any:
        self.said.append(("step", lr))
        return self.result


def stepped(flags: str = "", config: GPTConfig = GPTConfig(), **run: Any) -> tuple[dict, list, Any]:  # noqa: B008
    made = bare(flags, run=Run(**run), config=config, setup=SimpleNamespace(tokenizer=ByteTokenizer()))
    said = made.run.said

    @contextmanager
    def within(name: str):
        said.append(f"{name} in")
        yield
        said.append(f"{name} out")

    made.times = SimpleNamespace(data=partial(within, "data"))
    made.stragglers = SimpleNamespace(timed=within)
    made.curves = SimpleNamespace(after_backward=lambda: said.append("curves"))
    made.share, made.train_samples = lambda step: [step, 1], Samples()
    with mock.patch.object(train, "summarize_experts", side_effect=lambda *of: of):
        return made.step(), said, made


def test_a_step_is_a_batch_its_gradients_and_an_update():
    entry, said, _ = stepped("--lr 0.5 --warmup 8 --clip 0.25")
    assert entry == {"step": 3, "loss": 2.5, "grad_norm": 0.5, "lr": 0.25}
    x, y = [[30, 31, 32, 33], [10, 11, 12, 13]], [[31, 32, 33, 34], [11, 12, 13, 14]]
    assert said == ["data in", "data out", ("count", y), ("forward", x, y, {"tokens": 8, "samples": [3, 1]}),
                    ("clip", 0.25), "curves", ("step", 0.25)]  # fmt: skip


def test_a_step_has_the_loads_of_experts_the_dispatch_and_a_merge():
    mixed = GPTConfig(moe=MoEConfig())
    entry, said, made = stepped("", mixed, used=True, merge="merge")
    assert said[3][3] == {"tokens": 8, "samples": [3, 1], "loss_factor": [1.0, 1.0]}
    assert entry["experts"] == ("routers", mixed, made.mesh)
    assert entry["dispatch"] == {"repeats": 1, "rows": 9}
    assert entry["merge"] == "merge"


def test_the_data_of_a_step_before_a_check_of_speed_is_timed():
    with mock.patch.object(train, "is_timed", return_value=True) as timed:
        _, said, made = stepped()
    timed.assert_called_once_with(made.args, made.mesh, 3)
    assert said[:4] == ["data in", "data in", "data out", "data out"]


# --- an evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "mesh", "size", "places", "counted"),
    [
        ("--eval-samples 3", Mesh(), 100, [0, 1, 2], [True] * 3),
        ("--eval-samples 3", Mesh(dp=Axis(2)), 100, [0, 2], [True, True]),
        ("--eval-samples 3", Mesh(dp=Axis(2, 1)), 100, [1, 3], [True, False]),
        ("--eval-samples 4", Mesh(dp=Axis(2, 1)), 100, [1, 3], [True, True]),
        ("--eval-samples 9", Mesh(), 2, [0, 1], [True, True]),
        ("--eval-samples 1", Mesh(dp=Axis(3, 2)), 100, [2], [False]),
        ("--eval-samples 2 --document-masking", Mesh(), 100, [0, 1], [True] * 2),
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
    assert [document is not None for document in documents] == ["--document" in flags] * len(places)
    made.evaluate(Samples(size=1))
    assert len(asked[1][0]) == 1
    made.held_out = None
    with pytest.raises(ValueError, match="the held-out part has no sample: --eval-every above 0 says why"):
        made.evaluate()


# --- the loop ---------------------------------------------------------------------------------------------------------


def loop(flags: str, first: int = 0, stop_at: int | None = None, merge: Any = None) -> tuple[bool, list]:
    """Train to the end, and return what happened in order."""
    said: list[Any] = []
    made = bare(flags, out=Path("there"))
    args = made.args
    made.run = SimpleNamespace(step=first)

    def step() -> dict:
        made.run.step += 1
        said.append(f"step {made.run.step - 1}")
        return {"step": made.run.step - 1, **({"merge": merge} if merge else {})}

    @contextmanager
    def within(*of: Any):
        said.append(("open", *of[1:]))
        yield "records"
        said.append("close")

    made.step = step
    made.evaluate = lambda samples=None: 1.0 if samples is None else samples
    made.setup = SimpleNamespace(eval_sets={"more": 2.0})
    made.profile = SimpleNamespace(
        before=lambda s: said.append(f"before {s}"), after=lambda s: said.append(f"after {s}")
    )
    made.times = mock.MagicMock()
    made.times.__enter__.side_effect = lambda: said.append("timed")
    made.times.__exit__.side_effect = lambda *_: said.append("untimed")
    made.beat = lambda: said.append("beat")
    made.stragglers = "stragglers"
    bar = mock.MagicMock()
    bar.__iter__.side_effect = lambda: iter(next(each[0] for each in said if isinstance(each[0], range)))
    bar.close.side_effect = lambda: said.append("bar closed")
    made.console = SimpleNamespace(
        recording=lambda trainer, records: within(None, trainer is made, records),
        bar=lambda todo, steps: said.append((todo, steps)) or bar,
        record_step=lambda trainer, step, entry, bar: said.append(("record", step, dict(entry))),
        tell=lambda line: said.append(("tell", line)),
        record_merge=lambda step, merge: said.append(("merge", step, merge)) if merge else None,
        record_evaluation=lambda step, value, sets: said.append(("evaluation", step, value, sets)),
        end=lambda trainer: said.append("end"),
    )  # fmt: skip
    made.checkpoints = SimpleNamespace(
        folder=partial(within, None), samples=lambda step: range(step, step + 1),
        tell_saved=lambda: None, is_due=lambda step: step % 2 == 1,
        save_and_leave=lambda: said.append("save and leave"),
        save_last=lambda: said.append("save last"), try_to_save=lambda: said.append("try to save"),
    )  # fmt: skip
    made.stop = SimpleNamespace(
        after_step=lambda: made.run.step == stop_at, tell_workers=lambda: said.append("tell workers"),
        stopped=stop_at is not None,
    )  # fmt: skip

    class Faults:
        def __init__(self, *of: Any) -> None:
            said.append(("faults", of[0] is args, of[1] is made.mesh, *of[2:]))

        def after(self, entry: dict, samples: range, run: Any, stragglers: Any) -> list[str]:
            assert (run, stragglers) == (made.run, "stragglers")
            return [f"fault {samples.start}"] if entry["step"] == 0 else []

    with mock.patch.object(train, "Faults", Faults):
        return made.train(), said


def test_the_loop_does_all_in_order():
    stopped, said = loop("--steps 2 --eval-every 1", merge="merge")
    assert stopped is False
    each = [
        ["before 0", "timed", "step 0", "untimed", "after 0", "beat", ("record", 0, {"step": 0}), ("tell", "fault 0"),
         ("merge", 0, "merge"), ("evaluation", 0, 1.0, {"more": 2.0}), "beat", "beat"],
        ["before 1", "timed", "step 1", "untimed", "after 1", "beat", ("record", 1, {"step": 1}),
         ("merge", 1, "merge"), ("evaluation", 1, 1.0, {"more": 2.0}), "beat", "save last", "beat"],
    ]  # fmt: skip
    assert said == [("open",), ("open", True, "records"), ("faults", True, True, "records", Path("there")),
                    (range(2), 2), *each[0], *each[1], "bar closed", "end", "close", "close"]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "evaluated"),
    [("--steps 5 --eval-every 2", [1, 3, 4]), ("--steps 5 --eval-every 0", []), ("--steps 4 --eval-every 9", [3])],
)
def test_evaluations_come_as_often_as_asked_and_at_the_end(flags, evaluated):
    assert [each[1] for each in loop(flags)[1] if each[0] == "evaluation"] == evaluated


def test_checkpoints_are_tried_on_the_way_and_must_be_written_at_the_end():
    said = [each for each in loop("--steps 4 --eval-every 0")[1] if each in ("try to save", "save last")]
    assert said == ["try to save", "save last"]


@pytest.mark.parametrize(("flags", "stop_at", "stopped"), [("--exit-step 3", None, False), ("", 3, True)])
def test_a_run_that_is_stopped_saves_and_leaves(flags, stop_at, stopped):
    found, said = loop(f"--steps 9 --eval-every 0 {flags}", first=1, stop_at=stop_at)
    assert found is stopped
    assert [each for each in said if str(each).startswith("step ")] == ["step 1", "step 2"]
    assert said[-5:] == ["bar closed", "save and leave", "tell workers", "close", "close"]
    assert (range(1, 3 if flags else 9), 9) in said


def test_an_exit_step_that_is_done_trains_nothing_and_a_later_one_than_the_last_changes_nothing():
    assert loop("--steps 9 --exit-step 3", first=3)[1][-3:] == ["bar closed", "close", "close"]
    assert "save and leave" not in loop("--steps 2 --exit-step 2 --eval-every 0")[1]
    assert loop("--steps 2 --exit-step 9 --eval-every 0") == loop("--steps 2 --eval-every 0")


# --- the command ------------------------------------------------------------------------------------------------------


class Started:
    """What the command makes."""

    def __init__(self, stopped: bool = False, error: Exception | None = None) -> None:
        self.model, self.stop = "model", SimpleNamespace(signals=None)
        self.stopped, self.error = stopped, error
        self.beat: Any = None

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
    flags = "--tp 2 --pp 3 --cp 4 --cp-kind two-level --cp-inner 2 --ep 5 --dp 6 --etp 1 --device cpu --workers 7"
    status, called = command(f"{flags} --timeout 8 --bitwise 4 --out there", trainer)
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
