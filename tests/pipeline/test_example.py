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
        ({"pp": 2}, ["--schedule", "naive"]), ({"pp": 2, "dp": 2}, ["--schedule", "dualpipev"]),
        ({"pp": 2}, ["--schedule", "interleaved", "--virtual-stages", "2"]),
    ]  # fmt: skip
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
    ran = {event["name"]: event["pid"] for event in events if event["ph"] == "X" and event["cat"] != "exposed"}
    plan = build_schedule("zb", 2, 8)
    assert ran == {str(action): rank for rank, actions in enumerate(plan.ranks) for action in actions}
