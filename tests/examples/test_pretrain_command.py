"""The command as people start it, what it leaves behind, and what it refuses."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
from pathlib import Path

import matplotlib.figure
import pytest
import torch
import torch.distributed as dist

from examples.gpt.console import summary
from examples.gpt.pretrain import main, parse
from examples.gpt.setup import find_carried
from examples.gpt.tokenizer import ByteTokenizer
from mpcore.checkpoint import step_path
from mpcore.tools.fault_tolerance import metrics
from tests.checkpoint.test_schema import rewrite
from tests.examples.corpora import write
from tests.examples.test_flags import MEASURED
from tests.examples.test_pretrain import STEPS, TINY, save_as, trainer
from tests.forked import Forked
from tests.pool import mesh, on_ranks
from tests.test_launch import free_port

ROOT = Path(__file__).parents[2]


def read(out: Path) -> tuple[list[dict], list[dict]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if "loss" in r], [r for r in records if "val_loss" in r]


def by_hand(*arguments: str, ranks: int) -> list[tuple[int, str, str]]:
    """The command in processes that nobody started together: their statuses and what they printed."""
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    where |= {"OMP_NUM_THREADS": "1"}
    code = "import runpy; runpy.run_module('examples.gpt.pretrain', run_name='__main__')"
    where = {**os.environ, **where}
    runs = [Forked(code, *TINY, *arguments, env=where | {"RANK": str(rank)}) for rank in range(ranks)]
    printed = [run.communicate(timeout=120) for run in runs]
    return [(run.returncode, *texts) for run, texts in zip(runs, printed, strict=True)]


def test_one_process_and_two_leave_the_same_files_and_the_same_losses(tmp_path, capsys):
    """The two find each other without torchrun; tests/examples/test_survival_runs.py starts runs with it."""
    alone, mesh2 = tmp_path / "alone", tmp_path / "mesh"
    flags = ["--steps", "3", "--eval-every", "2", "--set", "eval_samples=4", "--dropout", "0.1"]
    assert main([*TINY, *flags, "--out", str(alone)]) == 0
    first = capsys.readouterr()
    (status, *second), (other, *_) = by_hand(*flags, "--pp", "2", "--out", str(mesh2), ranks=2)
    assert (status, other) == (0, 0), second
    for out, (stdout, stderr) in ((alone, first), (mesh2, second)):
        assert sorted(p.name for p in out.iterdir()) == [
            ".lock", "checkpoints", "config.json", "loss.png", "metrics.jsonl",
        ]  # fmt: skip
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
        steps, evaluations = read(out)
        assert [r["step"] for r in steps] == [0, 1, 2]
        assert [r["step"] for r in evaluations] == [1, 2]
        assert set(steps[0]) == {"step", "loss", "grad_norm", "lr", "samples", "tokens", *MEASURED}
        assert [r["tokens"] for r in steps] == [64, 128, 192]
        config = json.loads((out / "config.json").read_text())
        assert config["model"]["d_model"] == 16
        assert config["run"]["steps"] == 3
        assert stdout.count("mesh of") == 1
        assert "parameters" in stdout
        assert "--- a sample\ndef " in stdout
        assert "step 3 of 3, loss " in stderr
    assert "2 ranks" in second[0]
    assert "stage 1 | dp 0: 1" in second[0]
    for a, b in zip(*(read(out)[0] for out in (alone, mesh2)), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)


def check_all_refused(cases: list[tuple[dict, str, str]], out: str) -> None:
    for sizes, flags, message in cases:
        with pytest.raises(ValueError, match=message):
            trainer("--out", out, *flags.split(), **sizes).train()
        assert not Path(out).exists()


def test_what_does_not_fit_is_refused_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("here first")
    cases = [
        ({"tp": 4}, "--kv-heads 3", r"heads 4 is not a multiple of kv_heads 3"),
        ({"cp": 4}, "--seq-len 18", r"--seq-len 18 is not a multiple of the cp size 4 that cut it: 16 is"),
        ({"cp": 4, "cp_inner": 3}, "--cp-kind two-level", r"cp_inner 3 does not divide cp 4"),
        ({"tp": 4}, "--lr nan", r"--lr nan is no number from 0"),
        ({"tp": 4}, "--eval-every -1", r"--eval-every -1 is smaller than 0"),
        ({"worlds": 4}, "--workers 4 --local-steps 0", r"--local-steps 0 is smaller than 1"),
        ({"worlds": 4}, "--workers 4 --set outer_lr=0", r"outer_lr 0.0 is no number above 0"),
        ({"tp": 4}, "--data /nowhere/corpus", r"/nowhere/corpus"),
        ({"tp": 4}, f"--out {tmp_path / 'file'}", "can't be written"),
    ]
    ranks(4, check_all_refused, cases, str(tmp_path / "out"))


def test_a_corpus_that_cannot_be_trained_on_is_refused(ranks, tmp_path):
    outside, cut = (write(tmp_path / name, [[*range(250), 300 * (name == "a")]] * 2) for name in "ab")
    os.truncate(f"{cut}.bin", os.path.getsize(f"{cut}.bin") - 10)
    text = tmp_path / "in.jsonl"
    text.write_text('{"text": "a"}\n')
    cases = [
        (outside, r"300.*257"),
        (cut, r"b\.bin.*99\d|b.*100\d"),
        (text, r"jsonl.bin: .*; of text, python -m examples.gpt.prepare --input .*in.jsonl --o"),
        (write(tmp_path / "empty", []), r"empty.idx has no document: there is nothing to train on"),
        (write(tmp_path / "short", [range(6)] * 2), r"holds 6 tokens.*17"),
    ]
    out = str(tmp_path / "out")
    ranks(2, check_all_refused, [({"tp": 2}, f"--data {data}", message) for data, message in cases], out)


def test_a_single_text_is_a_corpus_and_short_documents_train_without_evaluations(tmp_path):
    text = trainer("--data", write(tmp_path / "text", [range(200)]))
    assert math.isfinite(text.step()["loss"] + text.evaluate())
    assert "11 training samples of 16 tokens, 1 held out" in summary(text)
    short = trainer("--data", write(tmp_path / "short", [[1, 2]] * 40), "--eval-every", "0")
    assert math.isfinite(short.step()["loss"])
    assert "4 training samples of 16 tokens, 0 held out" in summary(short)
    for every, told in (("1", True), ("2", False)):  # every second block has a dense MLP
        run = trainer("--d-ff", "25", "--experts", "4", "--set", "moe.d_ff=8", f"moe.every={every}")
        assert ("--d-ff 25 has no effect: every block has experts, of moe.d_ff 8" in summary(run)) == told
    with pytest.raises(ValueError, match="the held-out part has no sample: --eval-every above 0 says why"):
        short.evaluate()


@pytest.mark.parametrize("newest", ["", "worker-0"])
def test_of_a_run_with_and_without_workers_the_newest_checkpoint_goes_on(tmp_path, newest):
    for place in ("", "worker-0"):
        save_as(7 if place == newest else 3, trainer("--out", str(tmp_path / place)))
    run = trainer("--out", str(tmp_path), "--resume", "auto")
    assert run.run.step == 7


def test_a_checkpoint_without_fields_that_came_later_goes_on(tmp_path):
    save_as(3, trainer("--out", str(tmp_path)))
    path = step_path(tmp_path / "checkpoints", 3)
    rewrite(path, lambda body: [body["config"]["model"].pop(name) for name in ("gate", "mtp")])
    assert trainer("--out", str(tmp_path), "--resume", "auto").run.step == 3


def test_a_command_without_flags_carries_its_tokenizer_alone():
    assert find_carried(parse([]), ByteTokenizer()).config == {"bos_token_id": None, "eos_token_id": 256}


def test_a_place_without_a_checkpoint_is_named_and_where_there_is_one(tmp_path):
    out, gone = tmp_path / "r1", tmp_path / "gone"
    flags = ["--dtype", "float64", "--kv-heads", "4", "--out", str(out)]
    run = trainer(*flags)
    save_as(9, run)
    save_as(10, run)
    newest = out / "checkpoints" / "step-00000010"
    none = f"is no complete checkpoint: it has no manifest.json; the newest in it is {newest}"
    other = f"^{newest} has float64 weights: --dtype float64 goes on from it, not float32$"
    for flag in ("--resume", "--init-from"):
        for place in (out, out / "checkpoints"):
            with pytest.raises(ValueError, match=f"{place} {none}"):
                trainer(*flags, "--out", str(tmp_path / "new"), flag, str(place))
        with pytest.raises(ValueError, match=f"{gone}.* there is no such folder"):
            trainer(*flags, flag, str(gone))
        with pytest.raises(ValueError, match=other):
            trainer(*flags, "--dtype", "float32", flag, str(newest))
    run = trainer(*flags[2:], "--kv-heads", "2")
    save_as(11, run)
    path = out / "checkpoints" / "step-00000011"
    with pytest.raises(ValueError, match=r"^.* has float32 weights: --dtype float32 goes on from it, not float64$"):
        trainer(*flags, "--kv-heads", "2", "--resume", str(path))
    trainer(*flags[2:], "--init-from", str(path), "--kv-heads", "2", "--dtype", "bfloat16")
    for changed, message in (("1", "--kv-heads 1 is not the 2 of"), ("2 --set init_std=0.5", "init_std 0.5 has no")):
        with pytest.raises(ValueError, match=message):
            trainer(*flags[2:], "--init-from", str(path), "--kv-heads", *changed.split())


@on_ranks(4, timeout=30)
def test_unequal_flags_are_refused_on_every_rank_by_name() -> None:
    seed = str(dist.get_rank() // 3)
    with pytest.raises(ValueError, match=r"ranks 0 and 3 disagree about the configuration \(--seed: 0 and 1\)"):
        trainer("--seed", seed, tp=4)


def check_one_rank_without_data(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"on rank 1 of 2"):
        trainer("--data", prefix if dist.get_rank() == 0 else prefix + "-gone", tp=2)


def test_a_fault_on_one_rank_stops_all(ranks, tmp_path):
    ranks(2, check_one_rank_without_data, write(tmp_path / "corpus", [range(250)] * 2), timeout=30)


def check_full_disk(out: str) -> str:
    run = trainer(
        "--steps", "6", "--eval-every", "2", "--set", "eval_samples=2", "--set", "trace=true", "--save-every", "5",
        "--out", out,
    )  # fmt: skip
    real, lines, left = run.step, Path(out) / "metrics.jsonl", []

    class File(io.FileIO):
        def write(self, data) -> int:
            return super().write(data[: left[0]] if left else data)

    def step() -> dict:
        number = run.run.step
        if number in (2, 3):  # a disk that takes a part of a line, and then nothing
            left[:] = [9 * (3 - number)]
        if number == 4:
            assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == [0, 1, 1]
            left.clear()
        return real()

    def full(figure, path, **_) -> None:
        Path(path).write_text("a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run.step = step
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(told):
        patch.setattr(metrics, "open", lambda path, mode, buffering=-1: File(path, mode), raising=False)
        patch.setattr(matplotlib.figure.Figure, "savefig", full)
        run.train()
    return told.getvalue()


def test_row_20_a_run_whose_metrics_and_pictures_are_not_written_goes_on(ranks, tmp_path):
    """What could not be written comes with the next lines, and no part of a file stays."""
    (told,) = ranks(1, check_full_disk, str(tmp_path))
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        0, 1, 1, 2, 3, 3, 4, 5, 5
    ]  # fmt: skip
    for name in ("metrics.jsonl", "the trace", "loss.png"):
        assert told.count(f"NOT WRITTEN: {name}: [Errno 28] No space left on device") == 1
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "checkpoints", "config.json", "metrics.jsonl"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[!.]*")) == ["step-00000005", "step-00000006"]


@on_ranks(4)
def test_pitfall_31_an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    """An infinite gradient on one rank: all ranks skip the step, and fp16's scale falls alike."""
    t = trainer("--dtype", "float16", tp=2, dp=2)
    before = [p.detach().to_local().clone() for p in t.model.parameters()]  # type: ignore[attr-defined]
    if dist.get_rank() == 3:

        def poison(module, inputs, output):
            output.register_hook(lambda g: torch.full_like(g, math.inf))

        t.model.norm.register_forward_hook(poison)
    record = t.step()
    assert not math.isfinite(record["grad_norm"])
    assert t.run.scaler.state_dict() == {"scale": 2.0**15, "good_steps": 0}
    for p, old in zip(t.model.parameters(), before, strict=True):
        assert torch.equal(p.detach().to_local(), old)  # type: ignore[attr-defined]


def check_generation(sizes: dict, flags: list[str]) -> str:
    from examples.gpt.generate import generate

    t = trainer("--dtype", "float64", *flags, **sizes)
    return generate(t.model, t.run.pipeline, mesh(**sizes), t.setup.tokenizer, "import ", new_tokens=6, seed=3)


def test_every_layout_writes_the_same_text(ranks):
    (want,) = ranks(1, check_generation, {}, [])
    for sizes, flags in (
        ({"tp": 4}, ["--sequence-parallel"]),
        ({"pp": 2, "tp": 2}, ["--sequence-parallel", "--micro-batch", "1"]),
        ({"pp": 2, "dp": 2}, ["--micro-batch", "1"]),
    ):
        assert ranks(4, check_generation, sizes, flags) == [want] * 4


def test_a_checkpoint_behind_the_newest_goes_on_in_another_folder_only(tmp_path, monkeypatch):
    out, other = str(tmp_path / "a"), str(tmp_path / "b")
    whole = trainer("--out", out, "--save-every", "1", "--eval-every", "0")
    whole.train()
    middle = str(step_path(tmp_path / "a" / "checkpoints", STEPS - 2))
    with pytest.raises(
        ValueError, match=f"leaves behind what was trained after it, up to .*step-0*{STEPS}, from which"
    ):
        trainer("--out", out, "--resume", middle)
    assert trainer("--out", other, "--resume", middle).run.step == STEPS - 2
    last = str(step_path(tmp_path / "a" / "checkpoints", STEPS))
    assert trainer("--out", out, "--resume", last).run.step == STEPS
    again = trainer("--out", out, "--resume", "auto", "--eval-every", "0", "--set", "trace=true")
    assert again.run.step == STEPS
    again.train()  # with nothing left to train, nor to draw a trace of
