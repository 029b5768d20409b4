"""The checks of `mpcore preflight` for the example: what each trains, compares, refuses and tells."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpcore.tools.preflight import Options, Skip
from mpcore.tools.preflight.rehearse import Rehearsal
from mpcore.tools.preflight.toy import Toy
from mpcore.tools.preflight.training import Preflight, without
from tests.examples.corpora import write
from tests.preflight.planted import rank

SMALL = "--layers 2 --d-model 32 --heads 4 --d-ff 64 --seq-len 32 --micro-batch 1 --global-batch 8"


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


@pytest.mark.parametrize(("flags", "ranks", "told"), [
    ("", None, "1 ranks; toys: one rank"), ("--tp 2", None, "2 ranks; toys: tp 2 x etp 2"),
    ("--tp 2 --dp 4", None, "8 ranks; toys: tp 2 x dp 2 x etp 2"),
    ("--tp 2 --cp 2 --pp 2", None, "8 ranks; toys: tp 2 x cp 2 x pp 2 x etp 2"),
    ("--tp 2", 8, "8 ranks; toys: tp 2 x dp 2 x etp 2"), ("--workers 2", None, "2 ranks; toys: worlds 2"),
    ("--workers 2 --dp 2", None, "4 ranks; toys: dp 2 x worlds 2"),
])  # fmt: skip
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


def test_the_data_is_read_at_65_places(tmp_path):
    one, two = (write(tmp_path / name, [[*range(99), 255, 256]] * 40) for name in "ab")
    made = Fake(f"--data {one} --set eval_data=more={two} --steps 20")
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


def test_the_folder_can_be_written_and_holds_no_other_run(tmp_path):
    out, stat = tmp_path / "a" / "b", os.statvfs(tmp_path)
    said = folder(f"--out {out}")
    assert abs(int(re.fullmatch(r"(\d+) GB are free", said)[1]) - stat.f_bavail * stat.f_frsize / 1e9) < 2
    assert not out.exists()
    (tmp_path / "file").write_text("")
    for inner in ("file", "file/x"):
        with pytest.raises(ValueError, match=f"{inner} can't be written: .*file is a file"):
            folder(f"--out {tmp_path / inner}")


def test_flags_that_a_plan_does_not_know_are_left_out_and_named():
    made = Fake("--pp 2 --tp 2 --offload activations optimizer --compile --device cpu")
    assert re.fullmatch(
        r"[\d.e-]+ GiB on the fullest rank; GB sent a step: .*pp.*tp.* \(without --offload and --compile\)",
        made.check_memory(),
    )
    with pytest.raises(ValueError, match=r"on the fullest rank; .*, and a GPU has 2.79e-06 GiB$"):
        Fake("", memory=3e3).check_memory()
    Fake("--offload optimizer", memory=3e3).check_memory()
    assert without(["--a", "1", "--b", "2", "3", "--c=4", "--d", "-1"], {"--b", "--c"}) == ["--a", "1", "--d", "-1"]
    assert without(["x", "--a"], {"--b"}) == ["x", "--a"]


def test_each_toy_trains_on_one_process_first():
    made = Fake("--tp 3 --pp 3 --layers 3 --heads 6 --d-model 48")
    assert made.check_dense() == "loss 4.0000 to 1.0000 in 4 steps of 2 toys"
    how = {"save_at": 2, "look": True}
    assert made.told == [("one rank", "dense-0", how), ("one rank", "dense-1", how)]
    assert vars(made.asked[1][0].args) == vars(made.toys[1].alone().args)
    made.answers["dense-1"] = [rank(losses=(4.0, math.inf, 2.0, 1.0))]
    with pytest.raises(ValueError, match=r"^the toy's losses in float64 are \[4.0, inf, 2.0, 1.0\]$"):
        made.check_dense()


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
