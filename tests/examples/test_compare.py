"""The comparisons of the documents, made small: what they write, and what of it must agree."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from examples.gpt import compare_moe, compare_precision, compare_workers

SMALL = ["--layers", "1", "--d-model", "16", "--heads", "2", "--seq-len", "16", "--d-ff", "32", "--device", "cpu"]


def test_a_mixture_is_compared_with_the_dense_model_of_its_active_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_moe, "SHAPE", [*SMALL, "--micro-batch", "16"])
    monkeypatch.setitem(compare_moe.MODELS, "8 experts, 2 a token", ["--experts", "8", "--expert-d-ff", "16"])
    compare_moe.main(["--steps", "3", "--seeds", "1", "--evaluations", "2", "--out", str(tmp_path / "moe.png")])
    (dense,), (mixture,) = json.loads((tmp_path / "moe.json").read_text()).values()
    assert dense["tokens"] == mixture["tokens"] == [tokens * 16 * 16 for tokens in (1, 2, 3)]
    assert dense["active"] == dense["parameters"]
    assert mixture["active"] == dense["active"] + 8 * 16  # the router, beside two experts of half the width
    assert mixture["parameters"] == mixture["active"] + 6 * 3 * 16 * 16
    assert all(0 <= low <= 1 <= high for low, high in mixture["loads"])
    assert (tmp_path / "moe.png").stat().st_size > 5000
    assert "dense, " in capsys.readouterr().out.splitlines()[-2]


def test_a_precision_is_measured_at_even_steps_and_at_the_last(monkeypatch):
    monkeypatch.setattr(compare_precision, "SHAPE", [*SMALL, "--micro-batch", "4", "--eval-samples", "4"])
    found = compare_precision.train(["--dtype", "bfloat16"], seed=0, steps=3, every=2)
    assert found["steps"] == [2, 3]
    assert len(found["train"]) == len(found["held_out"]) == 2


def compare(out: str) -> None:
    kinds = {name: flags for name, flags in compare_workers.KINDS.items() if "10" not in name}
    kinds["DiLoCo, every step"] = ["--local-steps", "1"]
    with (
        mock.patch.object(compare_workers, "SHAPE", [*SMALL, "--micro-batch", "4"]),
        mock.patch.object(compare_workers, "KINDS", kinds),
        mock.patch.object(compare_workers.tempfile, "tempdir", str(Path(out).parent)),
        mock.patch.object(compare_workers.dist, "destroy_process_group"),  # it is the pool's
    ):
        compare_workers.main(["--steps", "2", "--seeds", "1", "--evaluations", "1", "--out", out])


def test_workers_are_compared_with_data_parallelism(ranks, tmp_path):
    ranks(2, compare, str(tmp_path / "workers.png"))
    scratch, begun = json.loads((tmp_path / "workers.json").read_text()).values()
    for start, steps in ((scratch, 2), (begun, 1)):
        (data,), (sgd,), (diloco,), (each,) = start.values()
        parameters = data["reduced"][-1] // steps
        assert sgd["reduced"] == diloco["reduced"] == [0], "50 steps are not over"
        assert each["reduced"] == [steps * parameters]
        assert len(each["agreement"]) == steps
    assert begun["data parallel"][0]["held_out"] == pytest.approx(scratch["data parallel"][0]["held_out"], rel=1e-5)
    assert (tmp_path / "workers.png").stat().st_size > 5000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["workers.json", "workers.png"]
