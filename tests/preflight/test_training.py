"""The checks of `mpcore preflight` for the example: what each trains, compares, refuses and tells."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from examples.gpt import plan, pretrain
from examples.gpt.arguments import parse
from examples.gpt.indexed_dataset import IndexedDatasetWriter
from mpcore.tools.preflight import Options, Skip
from mpcore.tools.preflight import training as preflight
from mpcore.tools.preflight.rehearse import Rehearsal
from mpcore.tools.preflight.toy import Toy
from mpcore.tools.preflight.training import Preflight, layout_of, without
from mpcore.tools.verify.run import SHIFT, RankRecord

SMALL = "--layers 2 --d-model 32 --heads 4 --d-ff 64 --seq-len 32 --micro-batch 1 --global-batch 8"


def rank(worker: int = 0, losses: tuple = (4.0, 3.0, 2.0, 1.0), **changes: Any) -> Rehearsal:
    """What a rank of a sound run saw."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    seen = RankRecord(0, 0, 0, 0, rows=4, length=8, initial={"w": w}, gradients={"w": w}, norm=5**0.5)
    steps = dict(enumerate(losses))
    told = {"norms": dict.fromkeys(steps, 1.0), "state": {"w": w}, "begun": {"w": w}, "kept": {2: {"w": w}},
            "validation": 1.5, "seen": seen, "reference": losses[0], "scales": {i + 1: 1.0 for i in steps}}  # fmt: skip
    return Rehearsal(worker, losses=steps, **{**told, **changes})


class Fake(Preflight):
    """Trains nothing: `answers` gives what the ranks of a toy saw, by the name of its folder."""

    def __init__(self, flags: str = "", **options: Any) -> None:
        pool: Any = SimpleNamespace(workers=[], most=None, preload=None)
        super().__init__("examples.gpt.pretrain", f"{SMALL} {flags}".split(), Options(**options), pool)
        self.check_flags()
        self.asked: list[tuple[Toy, str, dict]] = []
        self.answers: dict[str, list[Rehearsal]] = {}

    def train(self, toy: Toy, out: str, **how: Any) -> list[Rehearsal]:
        self.asked.append((toy, out, how))
        return self.answers.get(out, [rank(worker) for worker in range(toy.args.workers)])

    @property
    def told(self) -> list[tuple[str, str, dict]]:
        """The toys' sizes, the folders, and how they were trained."""
        return [(toy.name, out, how) for toy, out, how in self.asked]


# --- the flags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "ranks", "told"),
    [
        ("", None, "1 ranks; toys: one rank"),
        ("--tp 2", None, "2 ranks; toys: tp 2 x etp 2"),
        ("--tp 2 --dp 4", None, "8 ranks; toys: tp 2 x dp 2 x etp 2"),
        ("--tp 2 --cp 2 --pp 2", None, "8 ranks; toys: tp 2 x cp 2 x pp 2 x etp 2"),
        ("--tp 2", 8, "8 ranks; toys: tp 2 x dp 2 x etp 2"),
        ("--workers 2", None, "2 ranks; toys: worlds 2"),
        ("--workers 2 --dp 2", None, "4 ranks; toys: dp 2 x worlds 2"),
    ],
)
def test_the_ranks_are_those_of_the_launcher_or_of_the_flags(flags, ranks, told):
    made = Fake(flags, ranks=ranks)
    assert made.check_flags() == told
    assert made.pool.most == max(toy.ranks for toy in made.toys)
    assert made.pool.preload == ("mpcore.tools.preflight.rehearse", "examples.gpt.pretrain")
    assert (Path(made.folder.name) / "corpus.bin").is_file()
    assert made.sizes["tp"] == made.args.tp
    made.pool.workers, made.pool.most = ["one"], 3
    made.check_flags()
    assert made.pool.most == 3, "a pool that runs keeps its size"


# --- data and folder --------------------------------------------------------------------------------------------------


def corpus(prefix: Path, documents: int = 40, largest: int = 255) -> str:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            writer.add_document(np.append(np.arange(99) % 7, [largest, 256]))
    return str(prefix)


def test_the_data_is_read_at_65_places(tmp_path):
    made = Fake(f"--data {corpus(tmp_path / 'a')} --set eval_data=more={corpus(tmp_path / 'b')} --steps 20")
    told = made.check_data()
    tokens = 40 * 101
    match = re.fullmatch(rf"{tokens:,} tokens; the run takes 160 samples, ([\d.e+]+) epochs", told)
    assert match
    assert 1 < float(match[1]) < 2
    assert made.corpus == {"documents": 40, "tokens": tokens}
    ramped = Fake(f"--data {tmp_path / 'a'} --steps 6 --set rampup_batch_size=2,2,6 --micro-batch 1")
    assert "takes 38 samples" in ramped.check_data()  # 2, 4, and four times 8


def folder(flags: str = "", **found: Any) -> str:
    made = Fake(flags)
    made.corpus = {"tokens": 5}
    return made.check_folder()


def test_the_folder_can_be_written_and_holds_no_other_run(tmp_path, monkeypatch):
    out = tmp_path / "a" / "b"
    stat = os.statvfs(tmp_path)
    said = folder(f"--out {out}")
    assert re.fullmatch(r"\d+ GB are free", said)
    assert abs(int(said.split()[0]) - stat.f_bavail * stat.f_frsize / 1e9) < 2
    assert not out.exists()
    (tmp_path / "file").write_text("")
    for inner in ("file", "file/x"):
        message = f"--out {tmp_path / inner} can't be written: {tmp_path / 'file'} is a file"
        with pytest.raises(ValueError, match=re.escape(message)):
            folder(f"--out {tmp_path / inner}")
    probed: list[tuple] = []
    monkeypatch.setattr(preflight, "check_writable", lambda *of: probed.append(of))
    folder(f"--out {out}")
    assert probed == [(tmp_path, 0)]


def test_a_checkpoint_goes_on_only_if_it_is_asked_for_and_fits(tmp_path, monkeypatch):
    saved = [Path("/x/step-9"), Path("/x/step-8")]
    looked: list[Path] = []
    monkeypatch.setattr(preflight, "checkpoints", lambda path: looked.append(path) or saved)
    judged: list[tuple] = []
    monkeypatch.setattr(preflight, "verify", lambda path: judged.append(path) or [])
    monkeypatch.setattr(pretrain, "other_run", lambda *of: judged.append(of))
    with pytest.raises(ValueError, match=r"^/x/step-9 is there: --resume auto goes on from it, another --out begins"):
        folder(f"--out {tmp_path}")
    with pytest.raises(ValueError, match=r"^/x/step-9 is there"):
        folder(f"--out {tmp_path} --workers 2 --local-steps 4")
    assert looked == [tmp_path / "checkpoints", tmp_path / "worker-0" / "checkpoints"]
    assert judged == []
    folder(f"--out {tmp_path} --resume auto --seed 4 --dtype bfloat16 --optimizer muon")
    path, (same, about, seed, dtype, begun) = judged
    assert (path, same, seed, dtype, begun) == (saved[0], saved[0], 4, "bfloat16", False)
    assert set(about) == {"model", "corpus", "optimizer", "tokenizer"}
    assert (about["corpus"], about["optimizer"], about["tokenizer"]) == ({"tokens": 5}, "muon", "byte")
    assert about["model"]["d_model"] == 32
    judged.clear()
    folder(f"--out {tmp_path} --resume /y/step-3")
    assert judged[0] == Path("/y/step-3")
    monkeypatch.setattr(pretrain, "other_run", lambda *of: ValueError("is of another run"))
    with pytest.raises(ValueError, match="is of another run"):
        folder(f"--out {tmp_path} --resume auto")
    monkeypatch.setattr(preflight, "verify", lambda path: ["a file is gone", "and more"])
    with pytest.raises(ValueError, match=r"^--resume /x/step-9: a file is gone$"):
        folder(f"--out {tmp_path} --resume auto")
    saved.clear()
    folder(f"--out {tmp_path} --resume auto")
    folder(f"--out {tmp_path}")


# --- memory -----------------------------------------------------------------------------------------------------------


def planned(flags: str, monkeypatch: Any, **options: Any) -> tuple[str, list]:
    """What the check says, and what was planned. Rank r needs 2 GiB + r bytes and sends 3 GB over tp and r over dp."""
    asked: list[tuple] = []

    def dry_run(build: Any, flags: list[str], rank: int, stands_for_gpu: bool, **sizes: int) -> Any:
        assert build is plan.build
        assert stands_for_gpu == ("cpu" not in flags)
        asked.append((flags, rank, sizes))
        volumes = {"tp": 3_000_000_000, "dp": 1_500_000_000 * rank, "cp": 0}
        return SimpleNamespace(total=2 * 2**30 + rank, ledger=SimpleNamespace(volumes=lambda: volumes))

    made = Fake(flags, **options)
    monkeypatch.setattr(preflight, "dry_run", dry_run)
    return made.check_memory(), asked


def test_the_first_the_second_and_the_last_stage_are_planned(monkeypatch):
    told, asked = planned("--layers 8", monkeypatch)
    one = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1}
    assert asked == [([*SMALL.split(), "--layers", "8"], 0, one)]
    assert told == "2 GiB on the fullest rank; GB sent a step: tp 3"
    told, asked = planned("--pp 2", monkeypatch)
    assert [rank for _, rank, _ in asked] == [0, 1]
    assert told == "2 GiB on the fullest rank; GB sent a step: dp 1.5, tp 3"
    many = "--layers 8 --pp 4 --tp 2 --dp 3 --cp 2 --global-batch 24"
    told, asked = planned(many, monkeypatch)
    assert [rank for _, rank, _ in asked] == [0, 12, 36]
    assert asked[0][2] == {"tp": 2, "cp": 2, "pp": 4, "dp": 3, "ep": 1, "etp": 2}
    assert "--dp" not in asked[0][0]
    _, asked = planned("--cp 4 --cp-kind two-level", monkeypatch, each=2)
    assert asked[0][2]["cp_inner"] == 2


def test_flags_that_a_plan_does_not_know_are_left_out_and_named(monkeypatch):
    told, asked = planned(
        "--offload activations optimizer --lr 0.5 --compile --resume none --set profile=1:2", monkeypatch
    )
    assert asked[0][0] == [*SMALL.split(), "--lr", "0.5", "--set", "profile=1:2"]
    assert told.endswith("tp 3 (without --offload and --compile)")
    assert planned("--offload optimizer", monkeypatch)[0].endswith(" (without --offload)")
    assert without(["--a", "1", "--b", "2", "3", "--c=4", "--d", "-1"], {"--b", "--c"}) == ["--a", "1", "--d", "-1"]
    assert without(["x", "--a"], {"--b"}) == ["x", "--a"]


def test_more_than_a_gpu_has_is_refused_unless_it_is_offloaded(monkeypatch):
    for memory in (None, 2**31, 2**32):
        planned("", monkeypatch, memory=memory)
    with pytest.raises(ValueError, match=r"^2 GiB on the fullest rank; GB sent a step: tp 3, and a GPU has 1 GiB$"):
        planned("", monkeypatch, memory=2**30)
    planned("--offload optimizer", monkeypatch, memory=2**30)
    planned("--device cpu", monkeypatch)
    with pytest.raises(ValueError, match="GiB"):
        planned("--compile", monkeypatch, memory=2**30)


# --- the toys ---------------------------------------------------------------------------------------------------------


def test_each_toy_trains_on_one_process_first():
    made = Fake("--tp 3 --pp 3 --layers 3 --heads 6 --d-model 48")
    assert made.check_dense() == "loss 4.0000 to 1.0000 in 4 steps of 2 toys"
    how = {"save_at": 2, "look": True}
    assert made.told == [("one rank", "dense-0", how), ("one rank", "dense-1", how)]
    assert vars(made.asked[1][0].args) == vars(made.toys[1].alone().args)
    made.answers["dense-1"] = [rank(losses=(4.0, math.inf, 2.0, 1.0))]
    with pytest.raises(ValueError, match=r"^the toy's losses in float64 are \[4.0, inf, 2.0, 1.0\]$"):
        made.check_dense()


def test_one_process_is_compared_with_torch_and_with_the_slope(monkeypatch):
    made = Fake("--workers 2 --local-steps 4")
    made.dense[0] = [rank(0), rank(1, losses=(5.0, 3.0, 2.0, 1.0))]
    made.answers = {
        "shifted-0-1.0": [rank(0, (4.5,)), rank(1, (5.5,))],
        "shifted-0--1.0": [rank(0, (3.5,)), rank(1, (4.5,))],
    }
    slopes: list[tuple] = []
    errors = iter([0.25, 0.125])
    monkeypatch.setattr(preflight, "check_slope", lambda *of: slopes.append(of) or next(errors))
    assert made.check_torch() == "the loss is torch's; the gradient is its slope to 0.2 of the norm"
    assert [(out, how) for _, out, how in made.asked] == [
        ("shifted-0-1.0", {"until": 1, "shift": SHIFT}), ("shifted-0--1.0", {"until": 1, "shift": -SHIFT})
    ]  # fmt: skip
    assert [of[1:] for of in slopes] == [(5**0.5, 4.5, 3.5), (5**0.5, 5.5, 4.5)]
    assert slopes[0][0] is made.dense[0][0].seen.gradients
    made.dense[0][1].wrong = "it is rounded"
    with pytest.raises(ValueError, match=r"^worlds 2: it is rounded$"):
        made.check_torch()


@pytest.mark.parametrize(("flags", "slope"), [
    ("--experts 4", False), ("--experts 4 --set moe.aux_loss=none", True),
    ("--experts 4 --set moe.aux_loss=none --set moe.z_loss=0.1", False),
])  # fmt: skip
def test_a_gradient_with_a_balance_loss_has_another_slope(flags, slope, monkeypatch):
    made = Fake(flags)
    made.dense[0] = [rank()]
    monkeypatch.setattr(preflight, "check_slope", lambda *of: 0.5)
    said = made.check_torch()
    assert said.endswith("0.5 of the norm" if slope else "so it is not compared with the slope")
    assert len(made.asked) == 2 * slope


class Verdicts:
    """A judge that finds what it is told to."""

    found: ClassVar[list] = []
    asked: ClassVar[list] = []

    def __init__(self, truth: RankRecord) -> None:
        self.truth = truth

    def __call__(self, layout: Any, seen: list[RankRecord]) -> Any:
        Verdicts.asked.append((self.truth, layout, seen))
        return Verdicts.found.pop(0)


def verdict(equal: bool = True, mismatch: str = "", error: str = "", **worst: float) -> SimpleNamespace:
    return SimpleNamespace(equal=equal, mismatch=mismatch, error=error, worst=worst or {"gradient": 1.5, "loss": 0.5})


def test_each_toy_is_judged_on_its_layout_and_trained_some_steps(monkeypatch):
    monkeypatch.setattr(preflight, "Judge", Verdicts)
    made = Fake("--tp 2 --workers 2 --local-steps 4 --zero 0")
    of_worker_1 = (4.0, 3.5, 3.0, 2.5)  # it reads other samples than worker 0
    made.dense[0] = [rank(0), rank(1, of_worker_1)]
    made.answers["first-0"] = ranks = [rank(0), rank(0), rank(1), rank(1)]
    made.answers["sharded-0"] = [rank(0), rank(0), rank(1, of_worker_1), rank(1, of_worker_1)]
    Verdicts.found, Verdicts.asked = [verdict(), verdict(gradient=2.5)], []
    assert made.check_sharded() == "tp 2 x etp 2 x worlds 2: equal to 2.5 ULPs, 4 steps"
    assert made.told == [
        ("tp 2 x etp 2 x worlds 2", "first-0", {"until": 1, "look": True}),
        ("tp 2 x etp 2 x worlds 2", "sharded-0", {"save_at": 2}),
    ]
    assert made.sharded[0] is made.answers["sharded-0"]
    (one, layout, seen), (two, _, others) = Verdicts.asked
    assert one is made.dense[0][0].seen
    assert two is made.dense[0][1].seen
    assert [s is r.seen for s, r in zip(seen, ranks[:2], strict=True)] == [True, True]
    assert [s is r.seen for s, r in zip(others, ranks[2:], strict=True)] == [True, True]
    assert layout == layout_of(made.toys[0])

    for found, sentence in ((verdict(False, "w is off"), "w is off"), (verdict(False, "", "no answer"), "no answer")):
        Verdicts.found = [found]
        with pytest.raises(ValueError, match=f"^tp 2 x etp 2 x worlds 2: {sentence}$"):
            made.check_sharded()
    made.answers["sharded-0"][3] = rank(1, (4.0, 3.5, 2.0, 2.5))
    Verdicts.found = [verdict(), verdict()]
    with pytest.raises(ValueError, match=r"against one process: loss 2 of step 2 is not 3: the gradients"):
        made.check_sharded()
    for place in (2, 3):
        made.answers["first-0"][place] = rank(1, state={})
    Verdicts.found = [verdict()]
    with pytest.raises(ValueError, match=r"^tp 2 x etp 2 x worlds 2: no rank has w, which one process has$"):
        made.check_sharded()


def test_a_toy_has_its_layout_by_name():
    made = Fake("--tp 2 --pp 2 --sequence-parallel --zero 3 --cp 2 --global-batch 16")
    found = layout_of(made.toys[0])
    assert (found.tp, found.cp, found.pp, found.dp, found.ep) == (2, 2, 2, 1, 1)
    assert (found.sequence_parallel, found.zero, found.mb, found.name) == (True, 3, 4, made.toys[0].name)
    (one,) = Fake("--sequence-parallel --dp 3 --workers 2 --global-batch 48 --local-steps 4").toys[:1]
    found = layout_of(one)
    assert (found.sequence_parallel, found.dp, found.mb) == (False, one.sizes["dp"], 2)
    assert layout_of(Fake("--tp 2").toys[0]).sequence_parallel is False


def test_a_batch_is_cut_in_another_way():
    made = Fake("--dp 2 --micro-batch 2 --global-batch 16")
    made.dense[0] = [rank()]
    assert made.check_accumulation() == "1 x 8 samples as 8 x 1"
    ((toy, out, how),) = made.asked
    assert (toy.args.micro_batch, toy.ranks, out, how) == (8, 1, "accumulate", {})
    made.answers["accumulate"] = [rank(losses=(4.0, 3.0, 2.0, 0.5))]
    with pytest.raises(ValueError, match=r"^one micro-batch of 8 against 8 of 1: loss 0.5 of step 3 is not 1: a mean"):
        made.check_accumulation()
    made = Fake("--workers 2 --local-steps 4")
    made.dense[0] = [rank(0), rank(1)]
    assert made.check_accumulation() == "1 x 2 samples as 2 x 1"
    made = Fake("--set rampup_batch_size=1,1,4")
    made.dense[0] = [rank()]
    assert made.check_accumulation() == "1 x 2 samples as 2 x 1"
    with pytest.raises(Skip, match="a step of one sample can't be cut"):
        Fake("--global-batch 1 --schedule gpipe").check_accumulation()


def later(worker: int = 0, **changes: Any) -> Rehearsal:
    """A run that went on after two steps."""
    found = rank(worker, **changes)
    for kept in (found.losses, found.norms):
        for step in (0, 1):
            kept.pop(step)
    return found


def test_what_one_layout_saved_another_loads():
    made = Fake("--tp 2")
    made.dense[0], made.sharded[0] = [rank()], [rank(), rank()]
    made.answers = {"sharded-0-loaded": [later()], "dense-0-loaded": [later(), later()]}
    assert made.check_layouts() == "2 changes of layout after step 2, two steps each"
    where = Path(made.folder.name)
    assert made.told == [
        ("one rank", "sharded-0-loaded", {"resume": str(where / "sharded-0")}),
        ("tp 2 x etp 2", "dense-0-loaded", {"resume": str(where / "dense-0")}),
    ]
    made.answers["dense-0-loaded"][1] = later(losses=(4.0, 3.0, 2.25, 1.0))
    with pytest.raises(ValueError, match=r"^one process saved, tp 2 x etp 2 loaded: parameters are what they were"):
        made.check_layouts()
    made.answers["sharded-0-loaded"] = [later(begun={"w": torch.zeros(2)})]
    with pytest.raises(ValueError, match=r"^tp 2 x etp 2 saved, one process loaded: w is off by 2: it was not saved"):
        made.check_layouts()


def test_a_signal_stops_all_ranks_after_one_step_and_the_run_goes_on():
    made = Fake("--tp 2")
    made.sharded[0] = [rank(), rank()]
    calls: list[dict] = []

    def train(toy: Toy, out: str, **how: Any) -> list[Rehearsal]:
        calls.append({"out": out, **how})
        return stopped if "stop_at" in how else [later(), later()]

    made.train = train  # type: ignore[method-assign]
    stopped = [rank(stopped=True, step=2), rank(stopped=True, step=2)]
    assert made.check_signal() == "saved and left after step 2, and went on as if nothing had been"
    assert calls == [{"out": "signal", "stop_at": 0}, {"out": "signal", "resume": "auto"}]
    stopped = [rank(stopped=True, step=2), rank(stopped=True, step=3)]
    with pytest.raises(ValueError, match=r"^ranks of one worker left after step 2 and after 3$"):
        made.check_signal()
    stopped = [rank(stopped=True, step=2), rank(stopped=False, step=2)]
    with pytest.raises(ValueError, match=r"^SIGTERM to rank 1 in step 0 did not stop a run of 4 steps$"):
        made.check_signal()
    stopped = [rank(stopped=True, step=3), rank(stopped=True, step=3)]
    with pytest.raises(ValueError, match=r"^resumed after step 3: it went on with step 2, 3 steps were done$"):
        made.check_signal()
    workers = Fake("--workers 2 --local-steps 4")
    workers.sharded[0] = [rank(0), rank(1)]
    third = later(1)
    third.losses.pop(2)
    answers = [[rank(0, stopped=True, step=2), rank(1, stopped=True, step=3)], [later(0), third]]
    workers.train = lambda toy, out, **how: answers.pop(0)  # type: ignore[method-assign]
    assert workers.check_signal().startswith("saved and left after step 3")


def test_a_nan_on_one_rank_is_skipped_by_all():
    made = Fake("--dp 2")
    made.answers["nan"] = [rank(skipped=True), rank(skipped=True)]
    assert made.check_nan() == "all ranks skip the step"
    assert made.told == [("dp 2", "nan", {"poison_at": 1, "until": 2})]
    made.answers["nan"][1].skipped = False
    with pytest.raises(ValueError, match=r"^a NaN in the loss of the last data rank: rank 1 took the step$"):
        made.check_nan()
    with pytest.raises(Skip, match="the toy's workers merge"):
        Fake("--workers 2 --local-steps 4").check_nan()


def dtyped(flags: str) -> Fake:
    made = Fake(flags)
    made.answers["dtype-loaded"] = [later() for _ in range(made.toys[0].ranks)]
    return made


def test_the_dtype_of_the_run_is_tried_with_twins_float64_and_a_resume(monkeypatch):
    judged: list[tuple] = []
    digits: list[tuple] = []
    monkeypatch.setattr(preflight, "within_rounding", lambda *of, **how: judged.append((of, how)))
    monkeypatch.setattr(preflight, "check_digits", lambda *of: digits.append(of))
    made = dtyped("--tp 2 --dp 2 --dtype bfloat16 --set residual_dtype=float32 --micro-batch 1")
    made.answers["dtype-dense"] = [rank(begun={"w": torch.ones(2)})]
    made.answers["dtype"] = [rank() for _ in range(4)]
    assert made.check_dtype() == "bfloat16: first loss 4.0000, on one process 4.0000"
    where = str(Path(made.folder.name) / "dtype")
    begun = made.answers["dtype-dense"][0].begun
    look = {"until": 1, "look": True}
    name = made.toys[0].name
    assert made.told == [
        ("one rank", "dtype-dense", {"poison_at": 1, "look": True}),
        *(("one rank", f"dtype-twin-{i}", look) for i in (1, 2, 3)),
        (name, "dtype", {"save_at": 2, "poison_at": 1, "look": True}),
        ("one rank", "dtype-float64", {**look, "start": begun}),
        (name, "dtype-sum", look),
        (name, "dtype-loaded", {"resume": where}),
    ]
    for toy, out, _ in made.asked:
        own = ("float64", None) if out == "dtype-float64" else ("bfloat16", "float32")
        assert (toy.args.dtype, toy.args.residual_dtype) == own, out
        assert toy.args.twin == (int(out[-1]) if "twin" in out else 0)
    assert made.asked[6][0].args.micro_batch == made.toys[0].args.global_batch // 2
    assert len(judged) == 4
    (dtype, eps, truth, rounded, got), how = judged[0]
    assert (dtype, eps, how) == ("bfloat16", 2.0**-7, {"layers": 2, "experts": False})
    assert len(rounded) == 4
    assert rounded[0] is made.answers["dtype-dense"][0].seen
    assert got is made.answers["dtype"][0].seen
    assert truth is not got
    assert [of[0] for of in digits] == [torch.bfloat16]


@pytest.mark.parametrize(
    ("flags", "eps", "twins", "sums"),
    [
        ("--dtype float32 --dp 2", 2.0**-23, 3, 0),
        ("--dtype float16 --dp 2", 2.0**-10, 3, 1),
        ("--dtype float16 --cp 2", 2.0**-10, 3, 1),
        ("--dtype float16", 2.0**-10, 3, 0),
        ("--dtype float16 --tp 2", 2.0**-10, 3, 0),
        ("--dtype bfloat16 --dp 2 --pp 2", 2.0**-7, 3, 0),
        ("--dtype bfloat16 --set autocast=true", 2.0**-7, 3, 0),
        ("--dtype bfloat16 --fp8 --d-model 128 --d-ff 128", 2.0**-3, 3, 0),
        ("--experts 4 --set moe.aux_loss=micro_batch", 2.0**-23, 0, 0),
        ("--experts 4", 2.0**-23, 3, 0),
    ],
)
def test_what_is_tried_depends_on_the_dtype_and_the_layout(flags, eps, twins, sums, monkeypatch):
    judged: list[tuple] = []
    monkeypatch.setattr(preflight, "within_rounding", lambda *of, **how: judged.append((of[1], how["experts"])))
    monkeypatch.setattr(preflight, "check_digits", lambda *of: None)
    made = dtyped(flags)
    said = made.check_dtype()
    assert ", fp8:" in said if "--fp8" in flags else "fp8" not in said
    assert set(judged) == {(eps, "--experts" in flags)}
    folders = [out for _, out, _ in made.asked]
    assert sum("twin" in out for out in folders) == twins
    assert folders.count("dtype-sum") == sums


@pytest.mark.parametrize(
    ("dtype", "near"), [("float32", 1e-4), ("float64", 1e-8), ("bfloat16", 0.03), ("float16", 0.03)]
)
def test_a_first_loss_is_near_that_of_one_process(dtype, near, monkeypatch):
    monkeypatch.setattr(preflight, "within_rounding", lambda *of, **how: None)
    made = dtyped(f"--dtype {dtype}")
    for off in (0.99, -0.99):
        made.answers["dtype"] = [rank(losses=(4.0 * (1 + off * near), 3.0, 2.0, 1.0))]
        made.check_dtype()
        made.answers["dtype"] = [rank(losses=(4.0 * (1 + 1.02 * off * near / 0.99), 3.0, 2.0, 1.0))]
        with pytest.raises(ValueError, match=f"^the first loss in {dtype} is [0-9.]+, on one process 4$"):
            made.check_dtype()


def test_a_gradient_that_is_left_and_a_lost_state_are_named(monkeypatch):
    monkeypatch.setattr(preflight, "within_rounding", lambda *of, **how: None)
    made = dtyped("--dtype float32")
    for place in ("dtype", "dtype-dense"):
        made.answers[place] = [rank(left="head.weight")]
        with pytest.raises(ValueError, match=r"^the gradient of head.weight in float32 is still there after the step$"):
            made.check_dtype()
        made.answers.pop(place)
    made.answers["dtype-loaded"] = [later(scale=2.0)]
    with pytest.raises(ValueError, match=r"^resumed in float32: the loss scale is 2, it was 1: it is not saved$"):
        made.check_dtype()


def test_the_last_rank_is_killed(monkeypatch):
    monkeypatch.setattr(preflight, "kill", lambda *of: of)
    made = Fake("--dp 2", timeout=9.0)
    assert made.check_killed() == (made.toys[0], str(Path(made.folder.name) / "killed"), 9.0)
    with pytest.raises(Skip, match="one rank"):
        Fake("").check_killed()


def test_a_run_without_flags_is_parsed_as_the_command_does():
    made = Preflight("examples.gpt.pretrain", [], Options(), SimpleNamespace(workers=[]))  # type: ignore[arg-type]
    made.check_flags()
    assert vars(made.args) == vars(parse([]))
