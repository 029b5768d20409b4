"""What a run prints, records, draws, times and checks after each step, worked out by hand from known numbers."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.gpt import console, dashboards
from examples.gpt.arguments import parse
from examples.gpt.checkpoints import Checkpoints, Stop
from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.console import (
    Console,
    Lines,
    bytes_of_token,
    peak_memory,
    summary,
)
from examples.gpt.dashboards import Dashboards, Profile, check_installed, numbers
from examples.gpt.policies import Ramp, learning_rate, long_warmup, lr_schedule
from examples.gpt.tokenizer import ByteTokenizer
from examples.gpt.train import summarize_experts
from mpcore import Axis, Mesh
from mpcore.layers import RouterStatistics
from mpcore.tools.fault_tolerance import faults as faults

FIRST, SECOND = Mesh(), Mesh(world=Axis(2, 1), job=Axis(2, 1))
WORKER = Mesh(worlds=Axis(2, 1), job=Axis(2, 1))  # the first rank of the second worker


# --- lines ------------------------------------------------------------------------------------------------------------


def test_the_first_rank_of_each_worker_tells_and_names_it(tmp_path, capsys):
    for mesh in (FIRST, SECOND, WORKER):
        Console(mesh, tmp_path).tell("hello")
    assert capsys.readouterr().out == "hello\nworker 1: hello\n"
    Console(FIRST, tmp_path).tell("bad", file=sys.stderr)
    assert capsys.readouterr() == ("", "bad\n")
    shows = [(made.lead, made.shows) for made in (Console(mesh, tmp_path) for mesh in (FIRST, SECOND, WORKER))]
    assert shows == [(True, True), (False, False), (True, False)]


def test_a_file_that_cannot_be_written_is_told_once_until_it_can(tmp_path, capsys):
    made = Console(FIRST, tmp_path)

    def full() -> None:
        raise OSError("disk full")

    for work in (full, full, lambda: None, full):
        made.write("loss.png", work)
    made.write("other", full)
    told = ["NOT WRITTEN: loss.png: disk full"] * 2 + ["NOT WRITTEN: other: disk full"]
    assert capsys.readouterr().err.splitlines() == told
    with pytest.raises(ValueError, match="no"):
        made.write("loss.png", lambda: int("no"))


def progress(todo: range, steps: int, seconds: float, monkeypatch: Any, capsys: Any) -> list[str]:
    """The lines of a run that takes so long for a step."""
    now = iter([100 + seconds * i for i in range(99)])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now))
    bar = Lines(todo, steps)
    for step in bar:
        bar.set_postfix({"loss": f"{step}.5", "norm": "1"})
    bar.close()
    return capsys.readouterr().err.splitlines()


def test_lines_come_every_ten_seconds_and_at_the_end(monkeypatch, capsys):
    assert progress(range(2, 8), 8, 4, monkeypatch, capsys) == [
        "step 5 of 8, loss 4.5, norm 1, 12 s left", "step 8 of 8, loss 7.5, norm 1, 0 s left"
    ]  # fmt: skip
    assert [line[:11] for line in progress(range(4), 9, 10, monkeypatch, capsys)] == [
        f"step {i} of 9" for i in range(1, 5)
    ]
    assert progress(range(2), 9, 9.9, monkeypatch, capsys)[0].startswith("step 2 of 9, loss 1.5, norm 1, 69 s left")
    assert progress(range(0), 9, 1, monkeypatch, capsys) == []


def test_a_terminal_has_a_bar_and_other_ranks_have_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = Console(FIRST, tmp_path).bar(range(3, 9), 9)
    assert (bar.initial, bar.total, bar.unit, bar.disable, bar.fp.fileno()) == (
        3,
        9,
        "step",
        False,
        sys.stderr.fileno(),
    )  # type: ignore[union-attr]
    assert bar.dynamic_ncols  # type: ignore[union-attr]
    bar.close()
    hidden = Console(SECOND, tmp_path).bar(range(3, 9), 9)
    assert hidden.disable  # type: ignore[union-attr]
    assert list(hidden) == list(range(3, 9))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    lines = Console(FIRST, tmp_path).bar(range(3, 9), 9)
    assert isinstance(lines, Lines)
    assert (lines.todo, lines.steps) == (range(3, 9), 9)
    assert not isinstance(Console(SECOND, tmp_path).bar(range(3, 9), 9), Lines)


# --- records ----------------------------------------------------------------------------------------------------------


def trainer_of(**changes: Any) -> Any:
    config = changes.pop("config", GPTConfig(seq_len=10))
    spans = ["span"]
    made = SimpleNamespace(
        args=parse(["--steps", "5"]), config=config,
        run=SimpleNamespace(step=2, pipeline=SimpleNamespace(recorded=lambda: spans)),
        checkpoints=SimpleNamespace(samples=lambda step: range(4 * step, 4 * step + 4), last=None),
        times=SimpleNamespace(seconds=0.5, record=lambda: {"seconds": 0.5}),
        setup=SimpleNamespace(tokenizer=ByteTokenizer()), held_out=None,
    )  # fmt: skip
    vars(made).update(changes)
    return made


def test_a_step_is_recorded_with_its_samples_tokens_and_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "peak_memory", lambda mesh: 77)
    made, shown = Console(FIRST, tmp_path), []
    bar: Any = SimpleNamespace(set_postfix=shown.append)
    experts = {"max_violation": [0.25, 0.5], "dropped": [0.125, 0.0]}
    made.record_step(trainer_of(), 3, {"loss": 2.34567, "grad_norm": 0.126, "lr": 0.1}, bar)
    made.record_step(trainer_of(), 0, {"loss": 2.0, "grad_norm": 1.0, "experts": experts}, bar)
    first, second = made.records
    assert first == {"step": 3, "loss": 2.34567, "grad_norm": 0.126, "lr": 0.1, "samples": [12, 15], "tokens": 160,
                     "tokens_per_second": 80.0, "seconds": 0.5, "memory": 77}  # fmt: skip
    assert (second["samples"], second["tokens"], second["experts"]) == ([0, 3], 40, experts)
    assert shown == [
        {"loss": "2.346", "norm": "0.13", "tok/s": "80"},
        {"loss": "2.000", "norm": "1.00", "tok/s": "80", "max load": "1.50", "dropped": "12.5%"},
    ]
    assert made.spans == []
    traced = trainer_of(args=parse(["--set", "trace=true"]))
    made.record_step(traced, 0, {"loss": 2.0, "grad_norm": 1.0}, bar)
    assert made.spans == ["span"]


def test_on_a_gpu_a_step_has_its_mfu_where_the_peak_is_known(tmp_path, monkeypatch):
    made, shown = Console(Mesh(device_type="cuda"), tmp_path), []
    monkeypatch.setattr(console, "peak_memory", lambda mesh: 77)
    asked: list[float] = []
    for share, told in ((0.4567, {"MFU": "45.7%"}), (math.nan, {})):
        monkeypatch.setattr(console, "mfu", lambda trainer, speed, share=share: asked.append(speed) or share)
        made.record_step(trainer_of(), 0, {"loss": 2.0, "grad_norm": 1.0}, SimpleNamespace(set_postfix=shown.append))  # type: ignore[arg-type]
        assert shown[-1] == {"loss": "2.000", "norm": "1.00", "tok/s": "80", **told}
        assert made.records[-1].get("mfu") == (0.4567 if told else None)
    assert asked == [80.0, 80.0]


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--steps 21", ""),
        ("--steps 20", "--warmup 20 is not below --steps 20: "),
        ("--steps 24 --lr-decay-steps 16", "--warmup 20 is not below --lr-decay-steps 16: "),
        ("--steps 16 --lr-decay-steps 24", ""),
    ],
)
def test_a_warm_up_that_is_not_shorter_than_the_schedule_is_named(flags, warning):
    args = parse(flags.split())
    assert long_warmup(args).startswith(warning)
    assert bool(long_warmup(args)) == bool(warning)
    if warning:
        rates = [learning_rate(lr_schedule(args), step) for step in (18, 19, 20, 21)]
        assert rates == pytest.approx([0.95 * args.lr, args.lr, args.lr, 0.1 * args.lr])


def test_merges_and_evaluations_are_recorded(tmp_path, capsys):
    made = Console(FIRST, tmp_path)
    merge: Any = SimpleNamespace(fragment=1, norm=2.0, agreement=0.5, norms=[3.0, 4.0])
    made.record_merge(3, None)
    made.record_merge(4, merge)
    assert made.records == [{"step": 4, "merge": {"fragment": 1, "norm": 2.0, "agreement": 0.5, "norms": [3.0, 4.0]}}]
    made.bytes_of_token = 2.0
    made.record_evaluation(5, math.log(8), {})
    made.record_evaluation(6, 1000.0, {"code": 1.25, "text": 2.5})
    one, two = made.records[1:]
    assert one == {
        "step": 5,
        "val_loss": math.log(8),
        "perplexity": pytest.approx(8),
        "bits_per_byte": pytest.approx(1.5),
    }
    assert two["val_losses"] == {"code": 1.25, "text": 2.5}
    assert two["perplexity"] == math.exp(700)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "after 6 steps: validation loss 2.0794 (perplexity 8.00, 1.500 bits a byte)"
    assert told[1].endswith("bits a byte), code 1.2500, text 2.5000")


def test_records_go_to_the_file_and_the_dashboards_of_the_first_rank(tmp_path, monkeypatch, capsys):
    sent: list[Any] = []
    ends: list[int] = []
    monkeypatch.setattr(console, "Dashboards", lambda *of: sent.append(of) or SimpleNamespace(
        add=sent.append, close=lambda: ends.append(1)))  # fmt: skip
    monkeypatch.setattr(console, "summary", lambda trainer: "the summary")
    monkeypatch.setattr(console, "bytes_of_token", lambda trainer: 3.0)
    made = Console(FIRST, tmp_path)
    before = [{"step": 0}]
    trainer = trainer_of(args=parse(["--set", "log_to=wandb", "--steps", "5"]))
    with made.recording(trainer, before):
        assert made.records is before
        assert made.bytes_of_token == 3.0
        made.record({"step": 1, "loss": 2.0})
    assert ends == [1]
    assert sent == [(["wandb"], tmp_path, vars(trainer.args), 2), {"step": 1, "loss": 2.0}]
    assert before == [{"step": 0}, {"step": 1, "loss": 2.0}]
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "loss": 2.0}
    ]
    assert capsys.readouterr().out == "the summary\n"
    (tmp_path / "other").mkdir()
    other = Console(SECOND, tmp_path / "other")
    with other.recording(trainer, []):
        other.record({"step": 1})
    assert (other.records, other.dashboards, len(sent)) == ([{"step": 1}], None, 2)
    assert not (tmp_path / "other" / "metrics.jsonl").exists()
    with made.recording(trainer_of(args=parse(["--steps", "2"])), []):
        pass
    assert "nothing is left to train: 2 steps are done, --steps is 2" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError), made.recording(trainer, []):
        made.records[0] = 1 / 0  # type: ignore[call-overload]
    assert len(ends) == 3
    assert "nothing is left" not in capsys.readouterr().out


def test_the_end_of_a_run_draws_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    drawn: list[tuple] = []
    monkeypatch.setattr(console, "plot_losses", lambda *of: drawn.append(of))
    monkeypatch.setattr(console, "draw_trace", lambda *of: drawn.append(of))
    monkeypatch.setattr(console, "sample_text", lambda trainer: "some text")
    for name in ("b.json", "a.png", ".lock", "errors"):
        (tmp_path / name).write_text("")
    made = Console(FIRST, tmp_path)
    made.records = [{"step": 0}]
    trainer = trainer_of()
    made.end(trainer)
    assert drawn == [([{"step": 0}], tmp_path / "loss.png")]
    assert (
        capsys.readouterr().out == f"--- a sample\nsome text\n---\nwrote {tmp_path / 'a.png'}, {tmp_path / 'b.json'}\n"
    )
    made.spans = ["span"]
    trainer.run.pipeline.plan = "plan"
    trainer.checkpoints.last = Path("ckpt")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    made.end(trainer)
    assert drawn[1] == ("plan", ["span"], tmp_path)
    here = "bin/python"
    assert capsys.readouterr().out.splitlines()[4:] == [
        "train on:  the same command with --resume auto --steps 10 --lr-decay-steps 5",
        f"generate:  {here} -m examples.gpt.generate --checkpoint ckpt --prompt 'def '",
        f"export:    {here} -m mpcore convert examples.gpt.hf:SPEC --from ckpt --to-hf {tmp_path / 'hugging_face'}",
    ]
    monkeypatch.setattr(sys, "executable", "/elsewhere/bin/python")
    made.end(trainer)
    assert "generate:  python -m" in capsys.readouterr().out
    drawn.clear()
    other = Console(SECOND, tmp_path)
    other.spans = ["span"]
    other.end(trainer)
    assert drawn == []
    assert capsys.readouterr().out == ""


def test_the_bytes_of_a_token_are_those_of_the_first_held_out_samples():
    asked: list[range] = []

    class Samples:
        def __len__(self) -> int:
            return self.size

        def batch(self, indices: range) -> tuple:
            asked.append(indices)
            return None, torch.tensor([[65, 66, 256, 67]] * len(indices))

    samples = Samples()
    trainer = trainer_of(held_out=samples)
    for samples.size, first in ((20, range(8)), (3, range(3))):
        assert bytes_of_token(trainer) == 0.75
        assert asked[-1] == first
    assert math.isnan(bytes_of_token(trainer_of()))
    trainer.setup.tokenizer = SimpleNamespace(count_bytes=lambda ids: 0)
    assert math.isnan(bytes_of_token(trainer)), "of ends of documents alone"


def test_the_summary_counts_parameters_memory_and_samples(monkeypatch):
    linear = torch.nn.Linear(1023, 1024)  # 2^20 parameters
    monkeypatch.setattr(console.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**10))
    config = GPTConfig(seq_len=16, layers=1, d_model=8, heads=1)
    setup = SimpleNamespace(train=range(1234), micro_batches=3)
    trainer: Any = SimpleNamespace(
        config=config, mesh=FIRST, model=linear, setup=setup, held_out=range(56), args=parse([])
    )
    for dtype, size in ((torch.float32, 16), (torch.bfloat16, 18), (torch.float64, 32)):
        linear.to(dtype)
        *mesh, counts, samples = summary(trainer).splitlines()
        assert "\n".join(mesh) == str(FIRST)
        assert f"{2**20:,} on rank [0]; parameters, gradients and Adam: {size}.0 MiB (3 MiB resident so far)" in counts
        assert "active" not in counts
        assert samples == "1,234 training samples of 16 tokens, 56 held out; 3 micro-batches a step"
    trainer.config = GPTConfig(seq_len=16, layers=1, d_model=8, heads=1, moe=MoEConfig(experts=4, d_ff=8))
    trainer.held_out = None
    experts, others = 4 * 3 * 8 * 8, 2 * 257 * 8 + 4 * 8 * 8 + 3 * 8 + 4 * 8  # tables, attention, norms, router
    counts, samples = summary(trainer).splitlines()[-2:]
    assert counts.startswith(f"{experts + others:,} parameters ({experts // 2 + others:,} active), ")
    assert ", 0 held out;" in samples
    trainer.args = parse(["--steps", "2"])
    assert summary(trainer).splitlines()[-1] == long_warmup(trainer.args)
    assert peak_memory(FIRST) == 3 * 2**20
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 9)
    trainer.mesh = Mesh(device_type="cuda")
    assert "(5 MiB allocated so far)" in summary(trainer)
    assert peak_memory(trainer.mesh) == 9


# --- dashboards and profiles ------------------------------------------------------------------------------------------


def test_numbers_of_a_record_have_their_paths():
    entry = {"step": 1, "loss": 2.5, "name": "x", "a": {"b": [1, {"c": 2}]}, "none": None, "on": True}
    found = [("step", 1), ("loss", 2.5), ("a/b/0", 1), ("a/b/1/c", 2), ("on", True)]
    assert list(numbers(entry)) == found


class Board:
    made: list[Any] = []  # noqa: RUF012

    def __init__(self, *of: Any, **how: Any) -> None:
        self.said: list[Any] = [of, how]
        Board.made.append(self)

    def add_scalar(self, *of: Any, **how: Any) -> None:
        self.said.append((of, how))

    def log(self, *of: Any, **how: Any) -> None:
        self.said.append((of, how))

    def close(self) -> None:
        self.said.append("closed")

    finish = close


def test_dashboards_get_the_numbers_of_each_record(tmp_path, monkeypatch):
    Board.made = []
    began: list[dict] = []
    board = SimpleNamespace(SummaryWriter=Board)
    wandb = SimpleNamespace(init=lambda **how: began.append(how) or Board())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_MODE", raising=False)
    both = Dashboards(["tensorboard", "wandb"], tmp_path, {"lr": 1}, 7)
    both.add({"step": 7, "loss": 2.0, "x": {"y": 3}})
    both.close()
    options = {"new_style": True, "double_precision": True}
    shown, logged = Board.made
    assert shown.said == [(tmp_path / "tensorboard",), {"purge_step": 7}, (("loss", 2.0, 7), options),
                          (("x/y", 3, 7), options), "closed"]  # fmt: skip
    assert logged.said == [(), {}, (({"loss": 2.0, "x/y": 3},), {"step": 7}), "closed"]
    assert began == [{"project": "mpcore", "dir": tmp_path, "config": {"lr": 1}, "mode": "offline"}]
    monkeypatch.setenv("WANDB_MODE", "online")
    Dashboards(["wandb"], tmp_path, {}, 0)
    assert began[-1]["mode"] == "online"
    Dashboards(["tensorboard"], tmp_path, {}, 0)
    assert Board.made[-1].said[1] == {"purge_step": None}
    none = Dashboards([], tmp_path, {}, 0)
    none.add({"step": 1})
    none.close()
    check_installed([])
    check_installed(["json"])
    with pytest.raises(ValueError, match=r"^log_to nothing needs the package nothing: pip install nothing$"):
        check_installed(["json", "nothing"])


class Profiler:
    """Stands for torch's."""

    def __init__(self, said: list, **options: Any) -> None:
        self.said = said
        said.append(options)

    def start(self) -> None:
        self.said.append("start")

    def stop(self) -> None:
        self.said.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        self.said.append(Path(path))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_profile_is_of_its_steps(device, tmp_path, monkeypatch):
    said: list[Any] = []
    kinds = dashboards.ProfilerActivity
    monkeypatch.setattr(dashboards, "profile", lambda **options: Profiler(said, **options))
    for name in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.setattr(torch.cuda.memory, name, lambda *of, name=name, **how: said.append((name, of, how)))
    found = Profile(range(2, 4), Mesh(world=Axis(4, 3), device_type=device), tmp_path)
    at: dict[int, list] = {}
    for step in range(6):
        found.before(step)
        found.after(step)
        at[step], said[:] = list(said), []
    path = tmp_path / "profile" / "rank-3"
    options = {"activities": [kinds.CPU, kinds.CUDA] if device == "cuda" else [kinds.CPU], "profile_memory": True}
    record, dump = ("_record_memory_history", (), {}), ("_dump_snapshot", (f"{path}.pickle",), {})
    last = ("_record_memory_history", (), {"enabled": None})
    gpu = device == "cuda"
    assert at == {0: [], 1: [], 2: [*[record] * gpu, options, "start"],
                  3: ["stop", path.with_suffix(".json"), *[dump, last] * gpu], 4: [], 5: []}  # fmt: skip
    assert path.parent.is_dir()
    for mesh in (Mesh(dp=Axis(2, 1)), Mesh(worlds=Axis(2, 1))):
        other = Profile(range(2, 4), mesh, tmp_path)
        other.before(2)
        other.after(3)
    assert said == []
    assert list(Profile(range(2, 4), Mesh(tp=Axis(2, 1)), tmp_path).steps) == [2, 3]


# --- experts, stops and checkpoints -----------------------------------------------------------------------------------


def test_experts_are_told_by_block_in_the_order_of_the_model():
    config = GPTConfig(layers=4, moe=MoEConfig(experts=3, every=2))

    def statistics(of: float) -> RouterStatistics:
        scalars = [torch.tensor(of + i / 10) for i in range(len(RouterStatistics._fields) - 1)]
        return RouterStatistics(torch.tensor([of, of + 1, of + 2]), *scalars)

    routers = {"blocks.3.mlp.router": statistics(30.0), "stage.blocks.1.mlp.router": statistics(10.0)}
    found = summarize_experts(routers, config, FIRST)
    assert found.pop("tokens_per_expert") == [[10, 11, 12], [30, 31, 32]]
    names = RouterStatistics._fields[1:]
    assert list(found) == ["entropy", "dropped", "max_violation", "aux_loss", "z_loss"] == list(names)
    for i, name in enumerate(names):
        assert found[name] == pytest.approx([10 + i / 10, 30 + i / 10])


class Ranks:
    """The wishes of other ranks."""

    def __init__(self, *granted: str) -> None:
        self.granted, self.asked = set(granted), []

    def after_step(self, step: int, **wishes: bool) -> set[str]:
        self.asked.append((step, wishes))
        return self.granted


def stop_of(*granted: str, due: Any = None, workers: bool = False) -> tuple[Stop, Any]:
    merges = SimpleNamespace(due=lambda step: due if step == 3 else None)
    observers = [SimpleNamespace(joins_worlds=True, optimizer=merges)] if workers else []
    run: Any = SimpleNamespace(mesh=FIRST, step=2, observers=observers)
    told: list[str] = []
    made = Stop(run, SimpleNamespace(failed=False, tell_failed=lambda: told.append("failed")))  # type: ignore[arg-type]
    made.wishes = Ranks(*granted)  # type: ignore[assignment]
    return made, told


def test_a_run_stops_when_any_rank_was_asked():
    made, told = stop_of()
    assert (made.after_step(), made.stopped, told) == (False, False, [])
    made.ask()
    made.checkpoints.failed = True  # type: ignore[misc]
    made.after_step()
    made.asked, made.signals = False, SimpleNamespace(asked=True)  # type: ignore[assignment]
    made.after_step()
    made.signals = SimpleNamespace(asked=False)  # type: ignore[assignment]
    made.after_step()
    asked = [
        (2, {"stop": stop, "failed": failed})
        for stop, failed in ((False, False), (True, True), (True, True), (False, True))
    ]
    assert made.wishes.asked == asked  # type: ignore[attr-defined]
    made, told = stop_of("stop")
    assert (made.after_step(), made.stopped, told) == (True, True, [])
    made, told = stop_of("failed")
    assert (made.after_step(), told) == (False, ["failed"])


def test_workers_ask_each_other_before_a_merge_alone(monkeypatch):
    asked: list[tuple] = []
    monkeypatch.setattr(
        "examples.gpt.checkpoints.all_reduce", lambda x, axis, op: asked.append((x.item(), axis, op)) or x
    )
    made, _ = stop_of("stop", due=0, workers=True)
    assert made.after_step()
    assert asked == [(1, FIRST.worlds, "max")]
    made.tell_workers()
    assert len(asked) == 1, "they know already"
    made, _ = stop_of("stop", workers=True)
    assert made.after_step()
    assert len(asked) == 1
    made.tell_workers()
    assert asked[1:] == [(1, FIRST.worlds, "max")]
    made, _ = stop_of(due=1, workers=True)
    assert not made.after_step()
    assert asked[2:] == [(0, FIRST.worlds, "max")]
    made.run.step = 1
    made.tell_workers()
    made, _ = stop_of("stop")
    made.after_step()
    made.tell_workers()
    assert len(asked) == 3, "one worker has nobody to tell"

    def over(*of: Any) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr("examples.gpt.checkpoints.all_reduce", over)
    made, _ = stop_of("stop", workers=True)
    made.after_step()
    made.tell_workers()


def checkpoints_of(flags: str = "", step: int = 4, **ramp: int) -> Any:
    made = Checkpoints.__new__(Checkpoints)
    made.args, made.path, made.out = parse(flags.split()), Path("ckpt"), Path("out")
    made.saved = []  # type: ignore[attr-defined]

    def save(path: Path, **state: Any) -> Any:
        made.saved.append((path, state))  # type: ignore[attr-defined]
        return made.pending if state.get("background") else None  # type: ignore[attr-defined]

    made.run = SimpleNamespace(step=step, save=save)  # type: ignore[assignment]
    carried = SimpleNamespace(extra={"e": 1}, beside={"b": 2})
    made.setup = SimpleNamespace(ramp=Ramp(**{"start": 8, "final": 8, **ramp}), carried=carried)  # type: ignore[assignment]
    made.about, made.first_step, made.first_sample = {"model": 1}, 0, 0
    made.saving = made.told = None
    made.lines = []  # type: ignore[attr-defined]
    made.console = SimpleNamespace(tell=lambda text, file=None: made.lines.append((text, file)), lead=True)  # type: ignore
    return made


@pytest.mark.parametrize(
    ("flags", "due"),
    [
        ("--steps 6", [5]),
        ("--steps 6 --set no_save=true", []),
        ("--steps 6 --save-every 2", [1, 3, 5]),
        ("--steps 5 --save-every 2", [1, 3, 4]),
        ("--steps 6 --save-every 1", [0, 1, 2, 3, 4, 5]),
        ("--steps 6 --save-every 0", [5]),
    ],
)
def test_checkpoints_are_due_as_often_as_asked_and_at_the_end(flags, due):
    made = checkpoints_of(flags)
    assert [step for step in range(made.args.steps) if made.is_due(step)] == due


def test_samples_of_a_step_follow_those_before():
    made = checkpoints_of()
    assert [made.samples(step) for step in (0, 3)] == [range(8), range(24, 32)]
    made.first_step, made.first_sample = 2, 5
    assert (made.sample(2), made.samples(4)) == (5, range(21, 29))


SCHEDULE = {"lr_schedule": "cosine", "lr": 0.003, "min_lr": None, "warmup": 20, "lr_decay_steps": 200}


def test_a_save_has_the_place_in_the_data_and_what_lies_beside(monkeypatch):
    made = checkpoints_of("--set keep=3")
    made.save()
    state = {
        "sample": 32,
        "config": {"model": 1},
        "extra": {"e": 1, "lr_schedule": SCHEDULE},
        "keep": 3,
        "beside": {"b": 2},
    }
    assert made.saved == [(Path("ckpt"), state)]
    assert (made.saving, made.lines) == (None, [])


class Pending:
    """A save in the background."""

    def __init__(self, fails: bool = False) -> None:
        self.done, self.bytes, self.seconds, self.failed = True, 3_000_000, 0.5, fails
        self.path, self.waited = Path("step-00000004"), 0

    def wait(self) -> None:
        self.waited += 1
        if self.failed:
            raise ValueError("disk full")


def background(monkeypatch: Any, flags: str = "--set async_save=true") -> Any:
    monkeypatch.setattr("examples.gpt.checkpoints.Saving", Pending)
    now = iter([1.0, 1.25, 2.0, 2.5, 3.0, 3.5])
    monkeypatch.setattr("examples.gpt.checkpoints.time.perf_counter", lambda: next(now))
    made = checkpoints_of(flags)
    made.pending = Pending()
    return made


SAVED = "saved step-00000004: 3.0 MB in 0.50 s (6 MB/s)"


def test_a_save_in_the_background_waits_for_the_one_before_and_is_told_once(monkeypatch):
    made = background(monkeypatch)
    made.save()
    assert made.saving is made.pending
    (_, state), = made.saved  # fmt: skip
    assert (state["background"], state["after"], state["sample"]) == (True, None, 32)
    assert made.lines == [("saving step-00000004 in the background, copied in 0.25 s", None)]
    made.tell_saved()
    made.tell_saved()
    assert made.lines[1:] == [(SAVED, None)]
    first = made.pending
    made.pending = Pending()
    made.save()
    assert first.waited == 1
    assert made.saved[1][1]["after"] is first
    assert made.saving is made.pending
    assert len(made.lines) == 3
    made.console.lead = False
    made.tell_saved()
    made.console.lead, made.pending.done = True, False
    made.tell_saved()
    made.pending.done, made.pending.bytes = True, 0
    made.tell_saved()
    assert len(made.lines) == 3


def test_the_last_save_waits_for_all_of_them(monkeypatch):
    made = background(monkeypatch)
    made.saving = before = Pending()
    made.save_last()
    assert (before.waited, made.pending.waited) == (1, 1)
    assert made.saved[0][1]["after"] is None
    assert [line for line, _ in made.lines] == [
        SAVED,
        "saving step-00000004 in the background, copied in 0.25 s",
        SAVED,
    ]
    made = checkpoints_of()
    made.save_last()
    assert len(made.saved) == 1


def test_a_save_that_fails_is_told_and_the_last_one_is_an_error(monkeypatch, capsys):
    made = background(monkeypatch)
    made.saving = Pending(fails=True)
    assert made.failed
    made.tell_failed()
    assert made.lines == [("NOT SAVED, training goes on: disk full", sys.stderr)]
    assert (made.saving, made.failed) == (None, False)
    made.tell_failed()
    made.pending = Pending(fails=True)
    with pytest.raises(ValueError, match="disk full"):
        made.save_last()
    made = checkpoints_of()
    made.run.save = lambda *of, **how: Pending(fails=True).wait()
    made.try_to_save()
    assert made.lines == [("NOT SAVED, training goes on: disk full", sys.stderr)]
    with pytest.raises(ValueError, match="disk full"):
        made.save_last()


def test_a_run_that_leaves_says_where_it_goes_on(tmp_path, capsys):
    made = checkpoints_of()
    made.path = tmp_path
    assert made.last is None
    made.save_and_leave()
    path = tmp_path / "step-00000004"
    assert capsys.readouterr().out == f"saved {path} and stopped; --resume auto continues from there\n"
    path.mkdir()
    assert made.last == path
    made.console.lead = False
    made.save_and_leave()
    assert (capsys.readouterr().out, len(made.saved)) == ("", 2)
    assert os.listdir(tmp_path) == ["step-00000004"]
