"""The example's flags: --schedule, --virtual-stages and --trace, against the same run on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.gpt.pretrain import Trainer, parse
from mpcore.pipeline.schedules import build_schedule, write_csv
from tests.pool import mesh

FLAGS = [
    "--layers", "5", "--d-model", "16", "--heads", "4", "--d-ff", "24", "--seq-len", "16", "--global-batch", "8",
    "--micro-batch", "1", "--steps", "3", "--warmup", "1", "--eval-every", "3", "--dtype", "float64", "--dropout",
    "0.1", "--set", "eval_samples=4", "--set", "no_save=true",
]  # fmt: skip


def run(sizes: dict, out: str, *flags: str) -> list[float]:
    Trainer(parse([*FLAGS, "--out", out, *flags]), mesh(**sizes)).train()
    entries = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    return [entry[key] for entry in entries for key in ("loss", "grad_norm", "val_loss") if key in entry]


@pytest.mark.slow  # tests/recorded_runs.py has a run of each kind
@pytest.mark.parametrize("tied", [[], ["--set", "tie_embeddings=true"]], ids=["untied", "tied"])
def test_pitfall_14_the_example_trains_alike_under_every_kind_of_schedule(ranks, tied, tmp_path):
    (want,) = ranks(1, run, {}, str(tmp_path / "one"), *tied)
    assert len(want) == 7
    write_csv(build_schedule("gpipe", 2, 8), tmp_path / "plan.csv")
    others = [
        ({"pp": 2}, ["--schedule", "naive"]),
        ({"pp": 2}, ["--schedule", "interleaved", "--virtual-stages", "2"]),
        ({"pp": 2, "dp": 2}, ["--schedule", "dualpipev"]),
    ]
    for sizes, flags in [
        ({"pp": 2}, ["--schedule", str(tmp_path / "plan.csv")]),
        ({"pp": 2}, ["--schedule", "zbv", "--set", "trace=true"]),
        *([] if tied else others),
    ]:
        size, out = 2 * sizes.get("dp", 1), str(tmp_path / "out")
        for got in ranks(size, run, sizes, out, *tied, *flags):
            assert got == pytest.approx(want, rel=1e-9), flags


def test_trace_leaves_a_picture_of_the_plan_and_of_the_run(ranks, tmp_path):
    ranks(2, run, {"pp": 2}, str(tmp_path), "--schedule", "zb", "--set", "trace=true")
    for name in ("plan.png", "trace.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ran = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    plan = build_schedule("zb", 2, 8)
    assert ran == {str(action): rank for rank, actions in enumerate(plan.ranks) for action in actions}


def check_refused(path: str) -> None:
    for flags, message in [
        (["--schedule", "zigzag"], "schedule 'zigzag' is none of naive, gpipe"),
        (["--schedule", "zbv", "--virtual-stages", "3"], "zbv has exactly 2 virtual stages a rank, not 3"),
        (["--schedule", "interleaved", "--virtual-stages", "3"], "5 blocks are fewer than the 6 stages"),
        (["--schedule", "dualpipev", "--global-batch", "3"], "3 micro-batches are fewer than the 4 stages"),
        (["--schedule", path], "deadlocks: 1B0, action 0 of rank 1, waits for 1F0"),
        (["--schedule", path + ".csv"], r"can't be read"),
    ]:
        size = [] if path not in flags else ["--global-batch", "1"]
        with pytest.raises(ValueError, match=message):
            Trainer(parse([*FLAGS, *size, *flags]), mesh(pp=2))


def test_what_the_flags_cant_have_is_refused_on_every_rank(ranks, tmp_path):
    (tmp_path / "deadlock.csv").write_text("0F0,0B0\n1B0,1F0\n")
    ranks(2, check_refused, str(tmp_path / "deadlock.csv"))
