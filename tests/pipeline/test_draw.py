"""Pictures and Chrome traces of plans; that a person can read them was looked at, not tested."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mpcore.pipeline import draw as drawing
from mpcore.pipeline.draw import draw, main, write_chrome_trace
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import NAMES, Action, Span, build_schedule, write_csv

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
    command = [sys.executable, "-W", "error", "-m", "mpcore.pipeline.draw", "--schedule", str(plan), *sizes]
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
