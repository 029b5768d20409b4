"""Pictures and Chrome traces of plans; that a person can read them was looked at, not tested."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mpcore.pipeline.prove import Times, prove
from mpcore.pipeline.schedules import NAMES, Action, Span, build_schedule, write_csv
from mpcore.tools import draw as drawing
from mpcore.tools.draw import draw, main, write_chrome_trace

ROOT = Path(__file__).parent.parent.parent


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_a_picture(name, tmp_path, capsys):
    main(["--schedule", name, "--stages", "3", "--microbatches", "6", "--out", str(tmp_path / "x.png")])
    width, height = png_size(tmp_path / "x.png")
    assert width > 900
    assert height > 300
    assert f"{name}: 3 ranks, " in capsys.readouterr().out


def test_the_command_draws_the_times_that_it_is_given(tmp_path):
    times = ["--forward", "4", "--input", "1", "--weight", "2", "--message", "8"]
    main(["--schedule", "1f1b", "--stages", "2", "--microbatches", "2", *times, "--out", str(tmp_path / "x.json")])
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X"]
    took = {e["name"][1]: e["dur"] / 1e3 for e in boxes}
    assert (took["F"], took["B"]) == (4, 1 + 2)
    main(["--schedule", "zb", "--stages", "2", "--microbatches", "2", *times, "--out", str(tmp_path / "zb.json")])
    parts = [e for e in json.loads((tmp_path / "zb.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["name"][1]: e["dur"] / 1e3 for e in parts} == {"F": 4, "I": 1, "W": 2}
    assert min(e["ts"] for e in boxes if e["tid"] == 1) / 1e3 == 4 + 8, "the message has arrived"


def test_a_picture_has_a_box_for_every_action_and_its_colour(tmp_path):
    proof = prove(build_schedule("zb", 2, 4, 2))
    path = tmp_path / "plan.svg"
    draw(proof.spans, path, title="a plan", unit="ms")
    text = path.read_text()
    boxes = [text.count(f"fill: {colour}") for colour in (drawing.COLOURS[kind] for kind in "FIWB")]
    assert boxes[:3] == [9, 9, 9], "8 of a rank's first stage and one in the legend, of each kind"
    assert boxes[3] == 0, "there is no whole backward"
    assert text.count("<!-- 3 -->") == 4 * 3, "each box of micro-batch 3 says so"
    draw([*proof.spans, Span(0, Action("F", 0, 7), 1e3, 2e3)], path)
    assert path.read_text().count("<!-- 3 -->") == 0, "no box is wide enough"
    assert all(f">{word}<" in text or word in text for word in ("rank 0", "rank 1", "time (ms)", "a plan"))


def test_a_run_is_drawn_from_seconds_that_begin_anywhere(tmp_path):
    spans = [Span(0, Action("F", 0, 0), 1e9 + 0.5, 1e9 + 0.7), Span(1, Action("SEND_F", 0, 0), 0.0, 0.0)]
    draw(spans, tmp_path / "run.png", unit="s")
    assert png_size(tmp_path / "run.png")[0] > 900
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([], tmp_path / "none.png")


def test_a_chrome_trace_holds_every_span_in_microseconds(tmp_path):
    proof = prove(build_schedule("1f1b", 2, 3))
    late = [span._replace(start=span.start + 100, end=span.end + 100) for span in proof.spans]
    write_chrome_trace(late, tmp_path / "trace.json", seconds=0.5)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    boxes = {e["name"]: e for e in events if e["ph"] == "X"}
    assert len(boxes) == 12
    assert boxes["0F0"]["ts"] == 0
    assert boxes["1B0"]["ts"] == 2 * 0.5e6
    assert boxes["1B0"]["dur"] == 2 * 0.5e6
    assert boxes["1B0"]["tid"] == 1
    assert boxes["1B0"]["args"] == {"stage": 1, "micro_batch": 0}
    assert boxes["1B0"]["cat"] == "backward"


def refused(capsys, message, argv):
    assert main(argv) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_command_draws_a_file_and_refuses_a_broken_one(tmp_path, capsys):
    plan = tmp_path / "plan.csv"
    write_csv(build_schedule("gpipe", 2, 3), plan)
    sizes = ["--stages", "2", "--microbatches", "3"]
    command = [sys.executable, "-W", "error", "-m", "mpcore.tools.draw", "--schedule", str(plan), *sizes]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "x.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "x.json").read_text())["traceEvents"]) == 2 + 12
    plan.write_text("0F0,0B0\n1B0,1F0\n")
    refused(
        capsys,
        "deadlocks: 1B0, action 0 of rank 1, waits for 1F0, only later",
        ["--schedule", str(plan), "--stages", "2", "--microbatches", "1", "--out", str(tmp_path / "y.png")],
    )
    refused(capsys, "error: 3 micro-batches are fewer than the pp size 4", ["--microbatches", "3"])
    refused(capsys, r"error: --forward -1\.0 is no time: a number from 0", ["--forward", "-1"])
    refused(capsys, r"error: .*no/such/folder", ["--out", str(tmp_path / "no/such/folder/x.png")])
    assert not list(tmp_path.glob("y*"))


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"drawing needs matplotlib: pip install 'mpcore\[examples\]'"):
        draw(prove(build_schedule("1f1b", 2, 2)).spans, tmp_path / "x.png")
    refused(capsys, "drawing needs matplotlib", ["--out", str(tmp_path / "x.png")])
    main(["--out", str(tmp_path / "x.json")])


# --- what is drawn, box by box ----------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The figures that are saved, and how."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **how: found.append((self, path, how)))
    return found


def light(colour: str, by: float) -> tuple[float, ...]:
    """A colour, a share of the way to white."""
    return tuple(c + (1 - c) * by for c in to_rgb(colour))


SPANS = [  # rank 0 holds the stages 0, 2 and 4, rank 1 the stage 1
    Span(0, Action("F", 0, 3), 10.0, 12.0), Span(0, Action("I", 2, 3), 12.0, 13.0),
    Span(0, Action("W", 4, 3), 13.5, 14.0),
    Span(1, Action("B", 1, 12), 11.0, 20.0), Span(0, Action("SEND_F", 0, 3), 12.0, 50.0),
]  # fmt: skip


def test_each_action_has_its_box_in_its_row_from_its_start_to_its_end(drawn):
    draw(SPANS, "x.png", title="a title", unit="ms")
    ((figure, path, how),) = drawn
    assert (path, how) == ("x.png", {"dpi": 150})
    assert figure.get_size_inches().tolist() == [7.0, 1.7 + 0.42 * 2]
    (axes,) = figure.axes
    boxes = [(round(b.get_x(), 9), round(b.get_y() + 0.43, 9), round(b.get_width(), 9), round(b.get_height(), 9))
             for b in axes.patches]  # fmt: skip
    assert boxes == [(0, 0, 2, 0.86), (2, 0, 1, 0.86), (3.5, 0, 0.5, 0.86), (1, 1, 9, 0.86)]
    colours = [("#4477aa", 0.0), ("#ddaa33", 0.3), ("#44aa77", 0.6), ("#ee8866", 0.0)]
    assert [b.get_facecolor()[:3] for b in axes.patches] == [pytest.approx(light(*each)) for each in colours]
    assert {(b.get_edgecolor(), b.get_linewidth()) for b in axes.patches} == {((1.0, 1.0, 1.0, 1.0), 0.6)}
    texts = [(t.get_position(), t.get_text(), t.get_color()) for t in axes.texts]
    assert texts == [((1, 0), "3", "white"), ((2.5, 0), "3", "#111111"), ((3.75, 0), "3", "#111111"),
                     ((5.5, 1), "12", "#111111")]  # fmt: skip
    assert {(t.get_ha(), t.get_va(), t.get_fontsize()) for t in axes.texts} == {("center", "center", 7.0)}
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 10), (1.5, -0.5))
    assert axes.get_xlabel() == "time (ms)"
    assert axes.get_yticks().tolist() == [0, 1]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_title(loc="left") == "a title"
    assert axes.get_facecolor()[:3] == pytest.approx(to_rgb("#eeeeee"))
    assert not any(spine.get_visible() for spine in axes.spines.values())
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward", "backward", "backward of the input", "backward of the weights", "first stage of a rank", "stage 2",
        "last stage of a rank", "idle",
    ]  # fmt: skip
    shades = [("#4477aa", 0), ("#ee8866", 0), ("#ddaa33", 0), ("#44aa77", 0), ("#555555", 0), ("#555555", 0.3),
              ("#555555", 0.6), ("#eeeeee", 0)]  # fmt: skip
    assert [patch.get_facecolor()[:3] for patch in legend.get_patches()] == [pytest.approx(light(*x)) for x in shades]
    assert legend._ncols == 9


def test_a_plan_of_one_stage_a_rank_has_a_short_legend_and_its_kinds_alone(drawn):
    draw(SPANS[3:], "x.png")
    ((figure, *_),) = drawn
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["backward", "idle"]
    assert figure.axes[0].get_xlabel() == "time (units)"
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    two = [SPANS[0], SPANS[1]]
    draw(two, "x.png")
    names = [text.get_text() for text in drawn[1][0].legends[0].get_texts()]
    assert names == ["forward", "backward of the input", "first stage of a rank", "last stage of a rank", "idle"]
    assert drawn[1][0].axes[0].patches[1].get_facecolor()[:3] == pytest.approx(light("#ddaa33", 0.6))


@pytest.mark.parametrize(("boxes", "inches"), [(1, 7.0), (27, 0.26 * 27), (101, 26.0)])
def test_a_picture_is_as_wide_as_its_fullest_row_asks_within_limits(drawn, boxes, inches):
    spans = [Span(rank, Action("F", rank, i), i, i + 1) for rank in (0, 2) for i in range(boxes if rank else 1)]
    draw(spans, "x.png")
    assert drawn[0][0].get_size_inches().tolist() == pytest.approx([inches, 1.7 + 0.42 * 3])


def test_a_number_stands_in_a_box_that_has_room_for_its_digits(drawn):
    """Of 7 inches, a digit takes 0.075, and both sides together 0.03."""
    for number, needed in ((7, 0.105), (12, 0.18)):
        for share, shown in ((1.01, True), (0.99, False)):
            width = share * needed / 7 * 100
            spans = [Span(0, Action("F", 0, number), 0.0, width), Span(0, Action("B", 0, 1), width, 100.0)]
            draw(spans, "x.png")
            assert [t.get_text() for t in drawn.pop()[0].axes[0].texts] == [str(number)] * shown + ["1"]


def test_a_title_says_what_was_proved():
    schedule = build_schedule("interleaved", 2, 4)
    proof = prove(schedule)
    assert drawing.plan_title(schedule, proof) == (
        f"interleaved: 2 ranks, 4 stages, 4 micro-batches\nbubble {100 * proof.bubble:.1f}%, activations of at most "
        f"{max(proof.peaks):g} micro-batches a rank, {proof.messages} messages"
    )


def test_the_commands_flags_reach_the_schedule_and_the_picture(monkeypatch, capsys):
    pictures, traces, plans, find = [], [], [], drawing.find_schedule
    monkeypatch.setattr(drawing, "draw", lambda spans, path, **how: pictures.append((spans, path, how)))
    monkeypatch.setattr(drawing, "write_chrome_trace", lambda spans, path, **how: traces.append((spans, path, how)))
    monkeypatch.setattr(drawing, "find_schedule", lambda *given: plans.append(given) or find(*given))
    assert main([]) == 0
    assert plans.pop() == ("1f1b", 4, 8, None)
    schedule = build_schedule("1f1b", 4, 8)
    proof = prove(schedule)
    title = drawing.plan_title(schedule, proof)
    how = {"title": title, "unit": "forward of one stage is 1"}
    assert pictures.pop() == (proof.spans, "pipeline.png", how)
    assert capsys.readouterr().out == f"{title}; wrote pipeline.png\n"
    flags = ["--schedule", "zb", "--stages", "2", "--microbatches", "4", "--virtual-stages", "2", "--forward", "2.5"]
    main([*flags, "--input", "3", "--weight", "0", "--message", "0.5", "--out", "y.json"])
    assert plans.pop() == ("zb", 2, 4, 2)
    want = prove(build_schedule("zb", 2, 4, 2), Times(2.5, 3, 0, message=0.5))
    assert traces.pop() == (want.spans, "y.json", {"seconds": 1e-3})
    assert pictures == []
    main([*flags, "--out", "y.png"])
    assert pictures.pop()[2]["unit"] == "forward of one stage is 2.5"
    for flag in ("--forward", "--input", "--weight", "--message"):
        for wrong in ("-0.1", "inf", "nan"):
            refused(capsys, f"{flag} .* is no time: a number from 0", [flag, wrong])


def test_a_trace_begins_at_its_first_span_and_names_messages(tmp_path):
    path = tmp_path / "t.json"
    write_chrome_trace([], path)
    assert json.loads(path.read_text()) == {"traceEvents": [], "displayTimeUnit": "ms"}
    write_chrome_trace([Span(1, Action("F", 2, 3), 5.0, 6.5), Span(0, Action("SEND_F", 1, 0), 4.0, 4.0)], path)
    events = json.loads(path.read_text())["traceEvents"]
    common = {"ph": "X", "pid": 0}
    assert events[:2] == [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}} for rank in (0, 1)
    ]
    assert events[2:] == [
        {**common, "name": "2F3", "cat": "forward", "tid": 1, "ts": 1e6, "dur": 1.5e6,
         "args": {"stage": 2, "micro_batch": 3}},
        {**common, "name": "1SEND_F0", "cat": "message", "tid": 0, "ts": 0.0, "dur": 0.0,
         "args": {"stage": 1, "micro_batch": 0}},
    ]  # fmt: skip
