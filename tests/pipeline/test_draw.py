"""Pictures and Chrome traces of plans; that a person can read them was looked at, not tested."""

import json
import re
import struct

import pytest

from mpcore.pipeline.schedules import Action, Span, build_schedule, write_csv
from mpcore.tools.draw import draw, main, write_chrome_trace


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


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
    assert min(e["ts"] for e in boxes if e["pid"] == 1) / 1e3 == 4 + 8, "the message has arrived"


def test_a_run_is_drawn_from_seconds_that_begin_anywhere(tmp_path):
    spans = [Span(0, Action("F", 0, 0), 1e9 + 0.5, 1e9 + 0.7), Span(1, Action("SEND_F", 0, 0), 0.0, 0.0)]
    draw(spans, tmp_path / "run.png", unit="s")
    assert png_size(tmp_path / "run.png")[0] > 900
    for nothing in ([], [Span(0, Action("F", 0, 0), 1.0, 1.0)]):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw(nothing, tmp_path / "none.png")


def test_the_command_draws_a_schedule_or_a_file_and_refuses_a_broken_one(tmp_path, capsys):
    main(["--schedule", "zbv", "--stages", "3", "--microbatches", "6", "--out", str(tmp_path / "x.png")])
    assert png_size(tmp_path / "x.png") > (900, 300)
    plan = tmp_path / "plan.csv"
    write_csv(build_schedule("gpipe", 2, 3), plan)
    sizes = ["--schedule", str(plan), "--stages", "2", "--microbatches"]
    assert main([*sizes, "3", "--out", str(tmp_path / "x.json")]) == 0
    assert len(json.loads((tmp_path / "x.json").read_text())["traceEvents"]) == 2 + 12
    plan.write_text("0F0,0B0\n1B0,1F0\n")
    for message, argv in (
        ("deadlocks: 1B0, action 0 of rank 1, waits for 1F0", [*sizes, "1", "--out", str(tmp_path / "y.png")]),
        ("error: 3 micro-batches are fewer than the pp size 4", ["--microbatches", "3"]),
        (r"error: --forward -1\.0 is no time: a number from 0", ["--forward", "-1"]),
        (r"error: .*no/such/folder", ["--out", str(tmp_path / "no/such/folder/x.png")]),
        *((f"{flag} .* is no time", [flag, wrong]) for flag in ("--input", "--weight") for wrong in ("inf", "nan")),
    ):
        assert main(argv) == 2
        assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("y*"))


def test_a_trace_begins_at_its_first_span_and_names_messages(tmp_path):
    path = tmp_path / "t.json"
    write_chrome_trace([], path)
    assert json.loads(path.read_text()) == {"traceEvents": [], "displayTimeUnit": "ms"}
    waited = Span(1, Action("exposed RECV_F", 2, 3), 4.5, 5.0)
    inside = [Span(0, Action(f"{kind}tp all_reduce", -1, -1), 5.0, 5.5) for kind in ("", "exposed ")]
    spans = [waited, Span(1, Action("F", 2, 3), 5.0, 6.5), Span(0, Action("SEND_F", 1, 0), 4.0, 4.5), *inside]
    write_chrome_trace(spans, path)
    events = json.loads(path.read_text())["traceEvents"]
    assert events[:2] == [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}} for rank in (0, 1)
    ]
    common, args = {"ph": "X", "pid": 1, "tid": 0}, {"args": {"stage": 2, "micro_batch": 3}}
    sent = {"name": "1SEND_F0", "cat": "message", "id": 2, "pid": 0, "tid": 0}
    assert [(e["name"], e["ph"]) for e in events[6:]] == [
        ("tp all_reduce", "b"), ("tp all_reduce", "e"), ("exposed tp all_reduce", "X"),
    ]  # fmt: skip
    assert events[2:6] == [
        {**common, "name": "exposed 2RECV_F3", "cat": "exposed", "cname": "terrible", "ts": 5e5, "dur": 5e5, **args},
        {**common, "name": "2F3", "cat": "forward", "ts": 1e6, "dur": 1.5e6, **args},
        {**sent, "ph": "b", "ts": 0.0, "args": {"stage": 1, "micro_batch": 0}}, {**sent, "ph": "e", "ts": 5e5},
    ]  # fmt: skip
