"""Each picture that a command draws shows the numbers that the command prints."""

from __future__ import annotations

import json
import re

import pytest

from mpcore.__main__ import main
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import build_schedule
from mpcore.tools.coordinate_check import Coordinates
from mpcore.tools.coordinate_check import draw as draw_coordinates
from mpcore.tools.draw import draw_trace, plot_losses
from mpcore.tools.verify import Verdict
from mpcore.tools.verify.page import draw as draw_gradients
from mpcore.tools.workers import command as workers

figure = pytest.importorskip("matplotlib.figure")
GPT = ["examples.gpt.plan:build", "--preset", "tiny", "--seq-len", "64", "--global-batch", "16"]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, the newest last."""
    found = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (found.append(self), save(self, *a, **k)))
    return found


def bars(axes) -> list[tuple[float, float, float, float]]:
    """Each bar's left, bottom, width and height."""
    return [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in axes.patches]


def test_the_bars_of_memory_are_the_lines_of_its_table(drawn, tmp_path, capsys):
    layout = ["--pp", "2", "--dp", "2", "--zero", "1", "--micro-batch", "1"]
    tables = []
    for rank in (0, 2):
        more = ["--machine", "h100", "--plot", str(tmp_path / "memory.svg")] if rank == 0 else []
        assert main(["memory", *GPT, *layout, "--rank", str(rank), *more]) == 0
        printed = capsys.readouterr().out
        tables.append({name: float(size) for name, size in re.findall(r"^(\w[\w ]*\w) +([\d.]+) MiB", printed, re.M)})
    axes = drawn[-1].axes[0]
    shown = {c.get_label(): [p.get_height() for p in c.patches] for c in axes.containers}
    shown["total"] = [y for _, y in axes.collections[0].get_offsets()]
    assert axes.collections[0].get_label() == "total"
    assert {"gathered", "activations", "working set", "total"} <= shown.keys()
    for name, sizes in shown.items():
        assert sizes == pytest.approx([table[name] for table in tables], abs=5.1e-4), name
    assert all(size == 0 for table in tables for name, size in table.items() if name not in shown)


def test_the_points_of_plan_are_the_rows_of_its_table(drawn, tmp_path, capsys):
    vary = ["--vary", "zero=1,3", "--vary", "micro-batch=1,4", "--top", "99", "--out", str(tmp_path / "plan.svg")]
    assert main(["plan", *GPT, "--world", "2", *vary]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+)((?: +\d+)+) +([\d.]+) +([\d.]+) +\d+%.*?( --.*)$", printed, re.M)
    table = {int(row): (float(size), float(step)) for row, _, size, step, _ in rows}
    axes = drawn[-1].axes[0]
    *dots, ring = axes.collections
    points = [tuple(point) for each in dots for point in each.get_offsets()]
    shown = [point for point in table.values() if point[1] <= 4 * table[1][1]]
    left_out = re.findall(r"(\d+) slower layouts are not shown", axes.get_xlabel())
    assert len(points) == len(shown)
    assert left_out == [str(len(table) - len(shown))]
    for point in shown:
        assert any(point == pytest.approx(other, abs=0.051) for other in points), point
    (chosen,) = re.findall(r"^choose row (\d+)", printed, re.M)
    assert tuple(ring.get_offsets()[0]) == pytest.approx(table[int(chosen)], abs=0.051)
    assert ring.get_label() == f"chosen: row {chosen}"


def test_the_boxes_of_a_schedule_have_the_bubble_that_is_printed(drawn, tmp_path, capsys):
    path = tmp_path / "plan.svg"
    assert main(["schedule", "--schedule", "zbv", "--stages", "4", "--microbatches", "8", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    axes = drawn[-1].axes[0]
    busy, end = sum(width for _, _, width, _ in bars(axes)), axes.get_xlim()[1]
    assert f"bubble {1 - busy / (4 * end):.1%}" in printed
    assert axes.get_title(loc="left") in printed
    assert {text.get_text() for text in axes.texts} == {str(i) for i in range(8)}
    middles = sorted(round(text.get_position()[0], 6) for text in axes.texts)
    assert middles == sorted(round(left + width / 2, 6) for left, _, width, _ in bars(axes)), "a number in each box"


def test_a_trace_shows_its_plan_its_run_and_the_bubble_of_each(drawn, tmp_path):
    plan = build_schedule("1f1b", 2, 4)
    spans = [span._replace(end=span.end + 0.25 * (span.rank == 1)) for span in prove(plan).spans]
    draw_trace(plan, spans, tmp_path)
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    axes = drawn[-1].axes[0]
    assert sorted(width for _, _, width, _ in bars(axes)) == pytest.approx(
        sorted(e["dur"] / 1e3 for e in events if e["cat"] != "message")
    )
    busy = sum(width for _, _, width, _ in bars(axes))
    assert axes.get_title(loc="left") == f"1f1b: the last step, bubble {1 - busy / (2 * axes.get_xlim()[1]):.1%}"
    assert f"bubble {prove(plan).bubble:.1%}" in drawn[-2].axes[0].get_title(loc="left")


def test_the_curve_of_the_loss_has_the_numbers_of_its_records(drawn, tmp_path):
    records = [{"step": i, "loss": 5.0 - i, "tokens": 100 * (i + 1)} for i in range(4)]
    records += [{"step": 1, "val_loss": 4.25}, {"step": 2, "val_loss": 3.125}, {"step": 3, "val_loss": 3.5}]
    plot_losses(records, tmp_path / "loss.svg")
    axes = drawn[-1].axes[0]
    training, held_out = ([list(map(float, data)) for data in line.get_data()] for line in axes.lines)
    assert training == [[100, 200, 300, 400], [5, 4, 3, 2]]
    assert held_out == [[200, 300, 400], [4.25, 3.125, 3.5]]
    assert axes.get_title(loc="left") == "held-out loss: lowest 3.125 after 300 tokens, 3.500 at the end"


def test_the_cells_of_verify_are_the_differences_of_gradients(drawn, tmp_path):
    verdicts = [Verdict("tp2", gradients={"up": 1.5, "down": 0.25}), Verdict("dp2", error="no", gradients={"up": 2e7})]
    draw_gradients(verdicts, tmp_path / "verify.svg")
    axes = drawn[-1].axes[0]
    cells = {tuple(text.get_position()): text.get_text() for text in axes.texts}
    assert cells == {(0, 0): "1.5", (0, 1): "0.25", (1, 0): "2e+07", (1, 1): "-"}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["up", "down"]
    assert [label.get_text().split("\n") for label in axes.get_xticklabels()] == [["tp2", "equal"], ["dp2", "FAILED"]]
    assert axes.get_title(loc="left").startswith("1 of 2 layouts equal")


def test_the_lines_of_a_coordinate_check_are_its_activations(drawn, tmp_path):
    sizes = {"up": [[1.0, 2.0], [1.0, 3.0]], "head": [[1.0, 0.5], [1.0, 0.25]]}
    draw_coordinates({"one process": Coordinates((32, 64), sizes, {})}, tmp_path / "mup.svg")
    (axes,) = drawn[-1].axes
    shown = {line.get_label(): [list(map(float, data)) for data in line.get_data()] for line in axes.lines}
    assert shown == {name: [[32, 64], [steps[-1] for steps in each]] for name, each in sizes.items()}
    assert axes.get_title() == "one process"


def test_the_bars_of_workers_are_what_their_journal_says(drawn, tmp_path):
    lines = [
        {"op": "begin", "at": 10.0},
        {"op": "join", "worker": 0, "at": 10.0},
        {"op": "lease", "worker": 0, "at": 11.0},
        {"op": "update", "at": 14.0, "updates": [{"worker": 0, "phase": 0, "handed": 13.0, "applied": True}]},
        {"op": "leave", "worker": 0, "why": "", "at": 16.0},
    ]
    workers.draw(lines, tmp_path / "run.svg")
    axes = drawn[-1].axes[0]
    assert [(left, width) for left, _, width, _ in bars(axes)] == [(0, 1), (1, 2), (3, 3)]
    kinds = {handle.get_facecolor(): text.get_text() for handle, text in zip(
        drawn[-1].legends[0].get_patches(), drawn[-1].legends[0].get_texts(), strict=True)}  # fmt: skip
    shown = [kinds[p.get_facecolor()] for p in axes.patches]
    assert shown == [workers.MEANINGS[kind] for kind in ("wait", "train", "wait")]
    vertical, leaves = axes.lines
    assert (vertical.get_xdata()[0], list(leaves.get_xdata())) == (4.0, [6.0])
