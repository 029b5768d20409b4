"""Rows column by column, and runs read as rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.planner.rows import TARGET, Row, flops_of, read_row, read_rows, read_run

ALONE = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": 1}
PUBLISHED = Path(__file__).parents[2] / "bench" / "planner" / "published.json"


def test_every_column_of_the_planners_own_is_read():
    row = read_row({"seconds": 2})
    assert row == Row("the row", "rows", "", TARGET, ALONE, (), 2.0, False, 4)
    assert read_row({"seconds": "OOM"}).seconds is None
    row = read_row({
        "name": "a", "set": "b", "machine": "c", "target": "d:e", "tp": "2", "pp": 2, "cp": 2.0, "ep": 4, "dp": 3,
        "etp": 1, "cp_inner": 2, "gpus": 24, "seconds": "1.5", "attention": "unfused", "gradient_bytes": "6",
    })  # fmt: skip
    sizes = {"tp": 2, "pp": 2, "cp": 2, "ep": 4, "dp": 3, "etp": 1, "cp_inner": 2}
    assert row == Row("a", "b", "c", "d:e", sizes, (), 1.5, True, 6)


@pytest.mark.parametrize(("columns", "words"), [
    ({"x_y": True}, "--x-y"), ({"x_y": "on"}, "--x-y"), ({"x_y": False}, ""), ({"x_y": "off"}, ""),
    ({"x_y": 3}, "--x-y 3"), ({"x_y": 0}, "--x-y 0"), ({"x_y": 0.5}, "--x-y 0.5"), ({"x_y": [1, 2]}, "--x-y 1 2"),
    ({" X y ": " b "}, "--x-y b"), ({"x-y": "  "}, ""), ({"x_y": None}, ""), ({"hidden": 4}, "--d-model 4"),
    ({"stages_per_rank": 2}, "--virtual-stages 2 --schedule interleaved"),
    ({"virtual_stages": 2, "schedule": "zb"}, "--virtual-stages 2 --schedule zb"), ({"virtual_stages": "1"}, ""),
    ({"virtual_stages": 1, "schedule": "zb"}, "--schedule zb"),
])  # fmt: skip
def test_a_column_is_a_flag_of_the_target(columns, words):
    assert " ".join(read_row({**columns, "seconds": 1}).arguments) == words


@pytest.mark.parametrize(("columns", "dp"), [
    ({"gpus": 8}, 8), ({"gpus": 16, "tp": 2, "pp": 2, "cp": 2}, 2), ({"gpus": 16, "tp": 2, "dp": 8, "ep": 4}, 8),
    ({"tp": 2}, 1), ({"dp": 5, "tp": 2}, 5),
])  # fmt: skip
def test_data_ranks_are_those_that_are_left(columns, dp):
    assert read_row({**columns, "seconds": 1}).sizes["dp"] == dp


@pytest.mark.parametrize(("columns", "message"), [
    ({"gpus": 12, "tp": 8}, "12 gpus are not a multiple of tp x pp x cp = 8"),
    ({"gpus": 16, "tp": 2, "dp": 4}, "16 gpus are not tp x pp x cp x dp = 8"),
    ({"tp": True}, "tp is True"), ({"tp": 0}, "tp is 0"), ({"tp": "nan"}, "tp is 'nan'"), ({"tp": [2]}, "tp is .2."),
    ({"gpus": 1.5}, "gpus is 1.5, no integer"), ({"gradient_bytes": 0}, "gradient_bytes is 0"),
    ({"seconds": 0}, "seconds is 0"), ({"seconds": True}, "seconds is True"), ({"seconds": "inf"}, "is 'inf'"),
    ({"attention": "Fused"}, "attention 'Fused' is none of fused, unfused"),
    ({"tflops": 3}, "one of the columns seconds and tflops, not 2"),
    ({"seconds": None}, "seconds and tflops, not 0"),
    ({"hidden": 1, "d_model": 2}, "the column d_model gives d_model a second time"),
    ({"name": "mine", "tp": -1}, r"here \(mine\): tp is -1"),
])  # fmt: skip
def test_a_wrong_column_is_named(columns, message):
    with pytest.raises(ValueError, match=message):
        read_row({"seconds": 1, **columns}, "here")


SHAPE = {"global_batch": 4, "seq_len": 12, "layers": 2, "d_model": 6, "vocab_size": 36}


def test_tflops_of_all_gpus_compute_the_operations_of_a_step():
    """F B s L h^2 (1 + s / 6h + V / D L h), by hand: h 6, s 12, V 36, L 2, B 4."""
    plain = 72 * 4 * 12 * 2 * 36 * (1 + 12 / 36 + 36 / (12 * 2 * 6))
    again = 96 * 4 * 12 * 2 * 36 * (1 + 12 / 36 + 36 / (16 * 2 * 6))
    assert flops_of(SHAPE, "plain", "") == pytest.approx(plain, rel=1e-12)
    for columns, flops in (
        ({}, plain), ({"recompute": "full"}, again), ({"recompute": "selective"}, plain),
        ({"recompute": "full", "flops": "plain"}, plain), ({"flops": "recomputed"}, again), ({"flops": 6e6}, 6e6),
    ):  # fmt: skip
        row = read_row({**SHAPE, "tflops": 2e-6, "tp": 2, "pp": 3, "cp": 5, "ep": 7, "dp": 7, **columns})
        assert row.seconds == pytest.approx(flops / 2e6 / (2 * 3 * 5 * 7), rel=1e-12)
    for name in SHAPE:
        with pytest.raises(ValueError, match=f"here: tflops need the columns {name}, or"):
            read_row({**{k: v for k, v in SHAPE.items() if k != name}, "tflops": 1}, "here")
    with pytest.raises(ValueError, match="flops is 'many', no number above 0"):
        read_row({**SHAPE, "tflops": 1, "flops": "many"})


def test_rows_are_read_from_a_list_from_an_object_and_from_csv(tmp_path):
    assert [*Counter(row.set for row in read_rows(PUBLISHED)).values()] == [5, 4, 4]
    rows = [{"name": "a", "seconds": 1, "set": "x"}, {"name": "b", "seconds": 2, "tp": 2, "machine": "../mine.json"}]
    for name, text in (
        ("list.json", json.dumps(rows)), ("object.json", json.dumps({"about": "", "rows": rows})),
        ("table.csv", "name,seconds,set,tp,machine\na,1,x,,\nb,2,,2,../mine.json\n"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        found = read_rows(str(tmp_path / name))
        assert found[0] == read_row(rows[0])
        assert (found[1].name, found[1].sizes["tp"], found[1].machine) == ("b", 2, f"{tmp_path}/../mine.json")
    for content, words in (
        ('[{"name": "a"}]', r"wrong.json, row 1 \(a\): give one"), ("[3]", "row 1 is a int, no mapping"),
        ("5", "no list of at least one"), ("[]", "no list of at least one"), ("\udcff", "can't be read"),
    ):  # fmt: skip
        (tmp_path / "wrong.json").write_text(content, errors="surrogateescape")
        with pytest.raises(ValueError, match=words):
            read_rows(tmp_path / "wrong.json")


def write_run(folder: Path, seconds: list, flags: dict) -> None:
    lines = [{"loss": 1, "seconds": s} for s in seconds]
    lines[1:1] = [{"val_loss": 1, "seconds": 50}, {"loss": 1}]
    (folder / "metrics.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    (folder / "config.json").write_text(json.dumps({"run": flags}))


def test_the_seconds_of_a_run_are_the_median_of_its_steps_but_the_first_two(tmp_path):
    flags = {"tp": 2, "dp": 2, "pp": None, "lr": 3, "zero": 1, "recompute": "full", "sequence_parallel": True}
    write_run(tmp_path, [90, 80, 4, 2, 3], flags)
    row = read_run(tmp_path)
    assert (row.name, row.seconds) == (tmp_path.name, 3)
    assert row.sizes == {**ALONE, "tp": 2, "dp": 2}
    assert row.arguments == ("--zero", "1", "--sequence-parallel", "--recompute", "full")
    write_run(tmp_path, [90, 80], {})
    with pytest.raises(ValueError, match="no step with seconds after the first 2"):
        read_run(tmp_path)


@pytest.mark.parametrize("broken", ["config.json", "metrics.jsonl"])
@pytest.mark.parametrize("text", ["{", None, "{}"])
def test_a_folder_that_holds_no_run_is_refused(broken, text, tmp_path):
    write_run(tmp_path, [1, 1, 1], {})
    (tmp_path / broken).unlink() if text is None else (tmp_path / broken).write_text(text)
    words = "no step with seconds" if broken == "metrics.jsonl" and text else "holds no run"
    with pytest.raises(ValueError, match=words):
        read_run(tmp_path)
