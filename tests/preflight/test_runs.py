"""`mpcore preflight`: a sound run passes every check, and each planted fault is refused with the sentence that fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.gpt.plan import build
from mpcore.__main__ import main
from mpcore.tools.analysis.dry_run import dry_run
from mpcore.tools.preflight import FAILED, OK, SKIPPED, Check, Options, Result, Skip, run_checks, verdict
from mpcore.tools.preflight.training import Preflight
from tests.examples.corpora import write
from tests.preflight.planted import BUGS, Lent, Planted
from tests.quick import some

SMALL = ["--steps", "6", "--global-batch", "16", "--micro-batch", "1", "--seq-len", "32", "--layers", "2"]


def preflight(pool: Any, tmp_path: Path, *flags: str, stop: str = "rank killed") -> dict[str, Result]:
    """The results of all checks before `stop`, by name."""
    checks = Preflight(
        "examples.gpt.pretrain", [*SMALL, "--out", str(tmp_path / "out"), *flags], Options(), Lent(pool)
    ).checks()  # type: ignore[arg-type]
    names = [check.name for check in checks]
    return {result.name: result for result in run_checks(checks[: names.index(stop)])}


@pytest.mark.parametrize("flags", some(
    "--cp 2 --ep 2 --experts 4 --set moe.dispatch=all_to_all --dtype bfloat16 --set autocast=true "
    "--set rampup_batch_size=8,8,32",
    of=["--tp 2 --dp 4 --sequence-parallel --zero 2 --dropout 0.1 --dtype bfloat16",
        "--pp 2 --dp 2 --set tie_embeddings=true --schedule interleaved --layers 4 --dtype float16 --optimizer muon",
        "--tp 2 --dp 2 --zero 3 --set bitwise=16"],
))  # fmt: skip
def test_a_sound_run_passes_every_check(ranks, tmp_path, flags):
    results = preflight(ranks, tmp_path, *flags.split())
    skipped = {name for name, result in results.items() if result.state != OK}
    assert skipped == ({"accumulation"} if "bitwise" in flags else set()), [*map(str, results.values())]


@pytest.mark.parametrize(("flags", "check", "sentence"), [
    ("--layer 3", "flags", "unknown --layer; did you mean --layers?"),
    ("--tp 3 --seq-len 32 --sequence-parallel", "flags", "--seq-len 32 is not a multiple of the tp size 3 .*30 is"),
    ("--data MISSING", "data", "MISSING.*cannot be read"), ("--data TORN", "data", "truncated"),
    ("--data WIDE", "data", "token"),
    ("--data SHORT", "data", "use a smaller seq_len or more text"), ("--out FILE", "output folder", "is a file"),
    ("--resume MISSING", "output folder", "MISSING"),
])  # fmt: skip
def test_a_fault_of_flags_or_data_is_refused_before_anything_trains(ranks, tmp_path, flags, check, sentence):
    for name, top, count in (("WIDE", 300, 5000), ("SHORT", 200, 20), ("TORN", 200, 5000)):
        write(tmp_path / name, [np.arange(count) % top])
    (tmp_path / "TORN.bin").write_bytes((tmp_path / "TORN.bin").read_bytes()[:-10])
    (tmp_path / "FILE").write_text("")
    words = [str(tmp_path / word) if word.isupper() else word for word in flags.split()]
    results = preflight(ranks, tmp_path, *words, stop="memory and bytes")
    assert results[check].state == FAILED
    assert re.search(sentence, results[check].detail), results[check].detail
    assert all(result.state == OK for name, result in results.items() if name != check and check != "flags")


@pytest.mark.parametrize("device", [[], ["--device", "cpu"]], ids=str)
def test_memory_is_that_of_the_devices_kernels(ranks, tmp_path, device):
    """As `mpcore memory` counts them, by default those of a GPU."""
    words = [*SMALL, "--dtype", "bfloat16", *device]
    lent: Any = Lent(ranks)
    *_, result = run_checks(
        Preflight("examples.gpt.pretrain", [*words, "--out", str(tmp_path)], Options(), lent).checks()[:4]
    )
    flags = [*SMALL, "--dtype", "bfloat16"]
    totals = [dry_run(build, flags, 0, gpu).most / 2**30 for gpu in (False, True)]
    assert totals[0] > 1.03 * totals[1]  # norms keep float32 copies on a CPU
    assert result.detail.startswith(f"{totals[not device]:.3g} GiB on the fullest rank")


@pytest.mark.parametrize("bug", [pytest.param(b, marks=[pytest.mark.slow] * BUGS[b].slow) for b in BUGS])
def test_a_planted_bug_is_found_and_named(ranks, tmp_path, bug):
    """All checks that the one which must fail stands on run before it, and pass."""
    flags = [*SMALL, "--out", str(tmp_path / "out"), *BUGS[bug].flags.split()]
    checks = Preflight("examples.gpt.pretrain", flags, Options(), Planted(ranks, bug)).checks()  # type: ignore[arg-type]
    until = checks[: [check.name for check in checks].index(BUGS[bug].check) + 1]
    *before, last = run_checks([check for check in until if check.needed or check.name == BUGS[bug].check])
    assert {result.state for result in before} == {OK}, [str(result) for result in before]
    assert last.state == FAILED, str(last)
    assert re.search(BUGS[bug].sentence, last.detail), last.detail


def test_what_stands_on_a_check_that_failed_does_not_run(tmp_path):
    """Checks of the sharded run say nothing where the model itself does not train."""
    checks = Preflight("examples.gpt.pretrain", [*SMALL, "--out", str(tmp_path)], Options(), None).checks()  # type: ignore[arg-type]
    assert {check.name for check in checks if check.needed} == {"flags", "one process", "sharded against unsharded"}


def test_a_command_that_cant_be_checked_is_two_and_says_what_to_write(capsys):
    for words, sentence in (
        ([], "nothing starts no module"),
        (["--", "python", "train.py"], "starts no module: write the words of the run"),
        (["--", "torchrun", "--nproc-per-node", "gpu", "-m", "examples.gpt.pretrain"], "gpu is no number"),
        (["--", "torchrun", "-m", "--nnodes=2"], "torchrun -m --nnodes 2 starts no module"),
        (["--", "-m", "tests.verify_models"], "has no module tests.preflight with checks"),
        (["--", "tests.verify_models:missing"], "has no missing"),
    ):
        assert main(["preflight", *words]) == 2
        assert sentence in capsys.readouterr().err


def test_the_page_has_a_line_for_each_check_and_ends_with_what_failures_mean(capsys):
    def bad() -> str:
        raise ValueError("3 is not 2")

    def other() -> str:
        raise Skip("one rank")

    checks = [Check("one", lambda: "fine"), Check("two", other), Check("three", bad, "write 2", needed=True)]
    results = list(run_checks([*checks, Check("four", bad)]))
    assert [r.state for r in results] == [OK, SKIPPED, FAILED, SKIPPED]
    assert [r.detail for r in results] == ["fine", "one rank", "3 is not 2", "three failed"]
    assert verdict(results) == "Don't start this run: 1 of 4 checks failed (three).\n- three: write 2."
    assert verdict(results[:2]).startswith("Nothing found that speaks against this run: 2 checks")
    assert main(["preflight", "--json", "--", "-m", "examples.gpt.pretrain", "--layer", "2"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [entry["state"] for entry in told] == [FAILED] + [SKIPPED] * 12
    assert told[0]["detail"].startswith("python -m examples.gpt.pretrain: error: unknown --layer")


def test_a_model_is_checked_under_each_layout(capsys, ranks, monkeypatch):
    monkeypatch.setattr("mpcore.tools.preflight.command.Pool", lambda size: Lent(ranks))
    assert main(["preflight", "--", "tests.verify_models:Encoder", "--layouts", "tp2,dp2zero2"]) == 0
    out = capsys.readouterr().out
    for name in ("tp2 against unsharded", "dp2zero2 against unsharded", "two micro-batches", "save tp2, load on 1"):
        assert re.search(rf"^ok      {name}", out, re.MULTILINE), out


@pytest.mark.slow
def test_a_killed_rank_is_named_by_all_others(capsys, tmp_path):
    flags = [*SMALL, "--tp", "2", "--dp", "2", "--out", str(tmp_path / "out")]
    assert main(["preflight", "--", "torchrun", "--nproc-per-node", "4", "-m", "examples.gpt.pretrain", *flags]) == 0
    assert "3 of 3 others name rank 3" in capsys.readouterr().out
