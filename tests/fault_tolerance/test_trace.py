"""Where a rank stands, what its flight recorder says, and which rank is at fault: from frames and records by hand."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpcore as mp
from mpcore import _torch
from mpcore.tools.fault_tolerance import trace, watchdog
from mpcore.tools.fault_tolerance.trace import Call, Log, call_site, calls_of, explain, read_log, record, stands_in

TORCH, PACKAGE = os.path.dirname(torch.__file__), os.path.dirname(mp.__file__)
USER, LAYER = "/home/me/gpt/model.py", f"{PACKAGE}/layers/linear.py"
INSIDE = [f"{TORCH}/nn/modules/module.py", f"{os.path.dirname(_torch.__file__)}/fsdp.py", "<string>",
          f"{PACKAGE}/collectives.py", f"{PACKAGE}/pipeline/messages.py", "module.py"]  # fmt: skip


@pytest.mark.parametrize("file", INSIDE)
def test_frames_of_torch_and_of_what_all_collectives_go_through_say_nothing(file):
    assert trace._site(file, 3) is None
    assert trace._places([(file, 3), (USER, 8)]) == "gpt/model.py:8"


def test_a_place_is_the_innermost_line_and_if_that_is_ours_also_who_called():
    assert trace._site(USER, 8) == "gpt/model.py:8"
    assert trace._places([(USER, 8), (LAYER, 3), ("/home/me/gpt/train.py", 9)]) == "gpt/model.py:8"
    other = f"{PACKAGE}/layers/mlp.py"
    called = "layers/linear.py:3, called at gpt/model.py:8"
    assert trace._places([(INSIDE[0], 1), (LAYER, 3), (other, 4), (USER, 8), (USER, 9)]) == called
    assert trace._places([(LAYER, 3), (other, 4)]) == "layers/linear.py:3"
    assert trace._places([]) == trace._places([(INSIDE[0], 1)]) == "an unknown place"


def frames(*calls: tuple[str, int, str, dict]) -> Any:
    """A stack, innermost first, of files, lines, functions and locals."""
    frame = None
    for file, line, name, held in reversed(calls):
        code = SimpleNamespace(co_filename=file, co_name=name)
        frame = SimpleNamespace(f_code=code, f_lineno=line, f_locals=held, f_back=frame)
    return frame


def test_a_thread_stands_at_its_innermost_line_in_its_innermost_named_module():
    outer, inner, unknown = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    names = {id(outer): "blocks.0", id(inner): "blocks.0.mlp"}
    stack = [(USER, 8, "forward", {"self": unknown}), (LAYER, 3, "forward", {"self": inner}),
             ("/home/me/gpt/train.py", 9, "run", {"self": outer})]  # fmt: skip
    assert stands_in(frames(*stack), names) == ("gpt/model.py:8", "blocks.0.mlp", False)
    assert stands_in(frames(*stack), {}) == ("gpt/model.py:8", "", False)
    assert stands_in(frames((f"{TORCH}/distributed/c10d.py", 1, "wait", {}), *stack), names)[2], "it waits"
    step = (f"{TORCH}/distributed/pipelining/schedules.py", 7, "_step_microbatches", {"action": "1F2"})
    assert stands_in(frames(step, *stack), names)[1] == "the pipeline's 1F2"
    assert stands_in(frames(*stack, step), names)[1] == "blocks.0.mlp", "the innermost says it"
    assert stands_in(None, names) == ("an unknown place", "", False)


def test_a_stack_of_this_file_is_named():
    line = sys._getframe().f_lineno + 1
    assert call_site(sys._getframe()) == f"fault_tolerance/test_trace.py:{line}"


def entry(**changes: Any) -> dict:
    """A record as torch's flight recorder returns it."""
    return {
        "is_p2p": False, "time_created_ns": 100, "input_sizes": [[2, 3], [9]], "input_dtypes": ["Float", "Half"],
        "retired": False, "state": "scheduled", "profiling_name": "gloo:all_reduce", "collective_seq_id": 4,
        "process_group": ("g", "mesh_tp"), "frames": [{"filename": LAYER, "line": 3}, {"filename": USER, "line": 8}],
        **changes,
    }  # fmt: skip


def test_a_record_becomes_a_call():
    where = "layers/linear.py:3, called at gpt/model.py:8"
    want = Call("g", 4, "all_reduce", (2, 3), "Float", where, False, 100, "gloo")
    assert calls_of([entry()]) == [want]
    for change, field in (
        ({"retired": True}, {"done": True}), ({"state": "completed"}, {"done": True}), ({"state": "started"}, {}),
        ({"input_sizes": [], "input_dtypes": []}, {"shape": (), "dtype": ""}),
        ({"frames": []}, {"site": "an unknown place"}),
        ({"profiling_name": "nccl:_all_gather_base"}, {"backend": "nccl", "kind": "_all_gather_base"}),
        ({"profiling_name": "a:b:c"}, {"backend": "a:b", "kind": "c"}), ({"collective_seq_id": 7}, {"number": 7}),
    ):  # fmt: skip
        assert calls_of([entry(**change)]) == [Call(**{**asdict(want), **field})]
    assert calls_of([entry(is_p2p=True), entry(time_created_ns=49)], 50) == []
    early, late = entry(time_created_ns=50), entry(time_created_ns=70)
    assert [call.time for call in calls_of([late, early], 50)] == [50, 70]


def reads() -> tuple[Any, ...]:
    on = mp.build_mesh(tp=2, device_type="cpu")
    log = read_log(on)
    names = {axis.group_name: name for name, axis in reversed(on.axes.items()) if axis.group is not None}
    return log.rank, {name: axis for name, (axis, _) in log.groups.items()}, names, [r for _, r in log.groups.values()]


def test_a_log_names_each_group_once_by_its_first_axis():
    found = mp.simulate(reads, ranks=4)
    for rank, (number, axes, names, members) in enumerate(found):
        assert number == rank
        assert axes == names
        assert {"tp", "dp", "world"} <= set(axes.values())
        assert all(rank in each for each in members)
        assert [list(each) for each in members if len(each) == 4] == [[0, 1, 2, 3]]
        assert (rank // 2 * 2, rank // 2 * 2 + 1) in members
    alone = read_log(mp.Mesh(), nn.Linear(1, 1))
    assert (alone.rank, alone.groups, alone.doing) == (0, {}, "")


def test_the_recorder_keeps_as_many_entries_as_asked(monkeypatch):
    for given, kept in (((), "512"), ((1,), "1"), ((7,), "7")):
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "")
        record(*given)
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == kept
    for wrong in (0, -3):
        with pytest.raises(ValueError, match=f"entries {wrong} is smaller than 1"):
            record(wrong)


# --- who is at fault --------------------------------------------------------------------------------------------------


def log(rank: int, *calls: Call, waits: bool = True, **groups: tuple[int, ...]) -> Log:
    held = {name: (f"axis {name}", ranks) for name, ranks in (groups or {"g": (0, 1, 2)}).items()}
    return Log(rank, held, list(calls), f"at{rank}.py:1", waiting=waits)


def call(number: int, done: bool = True, group: str = "g", site: str = "s:1", time: int = 0, **more: Any) -> Call:
    given = {"kind": "all_reduce", "shape": (2,), "dtype": "Float", "backend": "gloo", **more}
    return Call(group=group, number=number, site=site, done=done, time=time or number, **given)


def test_a_chain_of_waiting_ranks_is_followed_to_its_end():
    a = log(0, call(1, False), g=(0, 1))
    b = log(1, call(1, False, "h", time=5), h=(1, 2), g=(0, 1))
    c = log(2, waits=False, h=(1, 2))
    said = explain([a, b, c], 3).splitlines()
    assert said == [
        "rank 1 entered all_reduce(axis h) of [2] Float at s:1 while rank 2 never did: it is at at2.py:1",
        "  rank 0: waits in all_reduce(axis g) of [2] Float at s:1",
        "  rank 1: waits in all_reduce(axis h) of [2] Float at s:1",
        "  rank 2: is at at2.py:1",
    ]
    silent = explain([a, b], 3).splitlines()
    assert silent[0].endswith("while rank 2 gives no answer: it is stopped, dead or cut off")
    assert silent[-1] == "  rank 2: no answer"
    circle = log(2, call(1, False, "k"), k=(0, 2), h=(1, 2))
    assert explain([log(0, call(1, False), g=(0, 1), k=(0, 2)), b, circle], 3).splitlines()[0] == (
        "the ranks wait in a circle: rank 0 waits in all_reduce(axis g) of [2] Float at s:1 for rank 1, rank 1 waits "
        "in all_reduce(axis h) of [2] Float at s:1 for rank 2, rank 2 waits in all_reduce(axis k) of [2] Float at s:1 "
        "for rank 0"
    )
    lead = log(3, call(1, False, "m"), m=(2, 3))
    found = explain([log(0, call(1, False), g=(0, 1), k=(0, 2)), b, circle, lead], 4).splitlines()[0]
    assert "rank 3" not in found, "the circle alone"


def test_a_rank_waits_for_the_lowest_that_is_behind_in_the_group():
    ahead = log(1, call(1), call(2, False))
    for behind, named in (((1, 2), 0), ((2, 1), 2), ((1, 1), 0)):
        others = [log(rank, *(call(n + 1, n + 1 < last) for n in range(last)), waits=False)
                  for rank, last in zip((0, 2), behind, strict=True)]  # fmt: skip
        assert f"while rank {named} never did" in explain([ahead, *others], 3)
    other_group = log(0, call(1), call(1, group="h", time=9), call(2, group="h", time=10), waits=False, g=(0, 1, 2))
    assert "while rank 0 never did" in explain([ahead, other_group, log(2, call(1), call(2, False))], 3)
    assert explain([log(0, call(1, False, "x"))], 1).startswith("all ranks wait, and their collectives match")


def test_the_first_call_from_another_place_is_told_too():
    parted = [log(0, call(1), call(2, site="a:1")), log(1, call(1), call(2, site="b:2"))]
    text = explain(parted, 2).splitlines()
    assert text[0].startswith("all ranks wait, and their collectives match")
    assert text[1] == (
        "  the first call that ranks made at different places is call 2: rank 0 entered all_reduce(axis g) of [2] "
        "Float at a:1 while rank 1 entered all_reduce(axis g) of [2] Float at b:2"
    )
    both = [log(0, call(1, site="a:1")), log(1, call(1, site="b:2", dtype="Half"))]
    assert len(explain(both, 2).splitlines()) == 3, "it is said once"


def test_a_watchdog_without_the_store_has_its_own_log(monkeypatch):
    store = dist.HashStore()
    store.set("mpcore/trace/0", log(0).to_json())

    def gone(*_: object) -> None:
        raise RuntimeError("connection reset")

    for name in ("set", "check", "get"):
        broken = SimpleNamespace(**{"set": store.set, "check": store.check, "get": store.get, name: gone})
        monkeypatch.setattr(watchdog, "clone_store", lambda broken=broken: broken)
        found = watchdog.Watchdog(mp.Mesh(job=mp.Axis(4, 1, name="world")))._exchange(log(1))
        assert [each.rank for each in found] == [1]
