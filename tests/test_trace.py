"""Four seeded hangs, and what the explainer says of each; the matching of logs without processes."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mpcore import RowParallelLinear
from mpcore.collectives import all_reduce
from mpcore.mesh.axis import Mesh
from mpcore.mesh.build import build_mesh
from mpcore.pipeline import Pipeline
from mpcore.tools.fault_tolerance.__main__ import main
from mpcore.tools.fault_tolerance.trace import Call, Log, calls_of, explain, read_log, record
from mpcore.tools.fault_tolerance.watchdog import Watchdog
from tests.pool import RankError, mesh
from tests.quick import some

TIMEOUT_S = 2.0
ONES = torch.ones(4, 8)


class Stuck(nn.Module):
    """Never leaves its forward on one rank."""

    def __init__(self, stuck: bool) -> None:
        super().__init__()
        self.stuck = stuck

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stuck:
            time.sleep(100)  # stuck
        return x


class Model(nn.Module):
    """Blocks with a collective each."""

    def __init__(self, on: Mesh, stuck: int | None = None) -> None:
        super().__init__()
        inner = Stuck(stuck == on.world.rank)
        self.blocks = nn.ModuleList(
            [*(RowParallelLinear(8, 8, tp=on.tp, input_is_parallel=False) for _ in range(2)), inner]
        )
        self.last = RowParallelLinear(8, 8, tp=on.tp, input_is_parallel=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


# Each: what rank 1 (or another) does wrong. Where a line matters it is marked `# here`.


def never_leaves_a_block(on: Mesh) -> None:
    Model(on, stuck=1)(ONES)


def waits_in_a_circle(on: Mesh) -> None:
    first, second = (on.tp, on.dp) if on.world.rank in (0, 3) else (on.dp, on.tp)
    all_reduce(ONES, first)  # here
    all_reduce(ONES, second)


def is_stopped(on: Mesh) -> None:
    if on.tp.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce(ONES, on.tp)


def is_stuck_in_a_stage(on: Mesh) -> None:
    pipeline = Pipeline(nn.Sequential(nn.Linear(8, 8), Stuck(on.pp.rank == 1)), on, 2, lambda y, t: y.sum())
    pipeline.forward_backward(ONES, ONES)


HANGS = [
    (never_leaves_a_block, {"tp": 2}, r"rank 0 entered all_reduce\(tp\).* 1 never did: it is at .* in blocks\.2\n"),
    (waits_in_a_circle, {"tp": 2, "dp": 2}, r"the ranks wait in a circle: rank \d waits in all_reduce\(.p\) .* at"),
    (is_stopped, {"tp": 2}, r"rank 0 entered all_reduce\(tp\).* while rank 1 gives no answer: it is stopped"),
    (is_stuck_in_a_stage, {"pp": 2}, r"rank 1 waits for nobody while others wait: it is at"),
]  # fmt: skip


def line_of(function) -> str | None:
    """`test_trace.py:LINE` of the line marked in a hang, or in the module that is stuck."""
    lines, start = inspect.getsourcelines(function)
    marked = [start + i for i, line in enumerate(lines) if line.endswith("# here\n")]
    return f"tests/test_trace.py:{marked[0]}" if marked else None


def hang(what: str, sizes: dict, folder: str) -> None:
    on = mesh(**sizes)
    model = Model(on)
    all_reduce(ONES, on.world)  # all are there: now the clock runs
    if what == "never_leaves_a_block":
        model = Model(on, stuck=1)
    Path(folder, "began").write_text(str(time.time()))
    sys.stderr = open(f"{folder}/stderr{on.world.rank}", "w")  # noqa: SIM115
    with Watchdog(on, model, timeout=TIMEOUT_S, folder=folder):
        model(ONES) if what == "never_leaves_a_block" else globals()[what](on)


@pytest.mark.parametrize(("what", "sizes", "pattern"), some(HANGS[0], of=HANGS))
def test_a_hang_is_explained(ranks, tmp_path, what, sizes, pattern):
    with pytest.raises(RankError, match="the process died"):
        ranks(torch.Size(sizes.values()).numel(), hang, what.__name__, sizes, str(tmp_path), timeout=90)
    ((file, said),) = [(file, text) for file in tmp_path.glob("stderr*") if (text := file.read_text())]
    assert re.search(pattern, said), said
    assert Log.from_json((tmp_path / "rank0.json").read_text()).rank == 0
    line = line_of(what)
    assert line is None or line in said.splitlines()[0], said
    assert file.stat().st_mtime - float((tmp_path / "began").read_text()) < TIMEOUT_S + 10


def log(
    rank: int, *numbers: int, kind: str = "all_reduce", size: int = 2, done: bool = True, waiting: bool = True
) -> Log:
    calls = [Call("g", n, kind, (n,), "Float", f"a.py:{n}", done or n != numbers[-1], 10 * n + rank) for n in numbers]
    return Log(rank, {"g": ("tp", (0, 1))}, calls, "b.py:7", "blocks.4", waiting)


def test_matching_is_a_pure_function_of_the_logs():
    behind, ahead = log(1, 1, 2, waiting=False), log(0, 1, 2, 3, done=False)
    assert explain([ahead, behind], 2).splitlines() == [
        "rank 0 entered all_reduce(tp) of [3] Float at a.py:3 while rank 1 never did: it is at b.py:7 in blocks.4",
        "  rank 0: waits in all_reduce(tp) of [3] Float at a.py:3 in blocks.4",
        "  rank 1: is at b.py:7 in blocks.4",
    ]
    other = replace(log(1, 1, 2), calls=[*log(1, 1).calls, replace(log(1, 2).calls[0], dtype="Half")])
    assert explain([ahead, other], 2).startswith(
        "the ranks disagree about call 2: rank 0 entered all_reduce(tp) of [2] Float at a.py:2 while rank 1 entered "
        "all_reduce(tp) of [2] Half at a.py:2\n"
    )
    assert explain([ahead], 2).splitlines()[0].endswith("while rank 1 gives no answer: it is stopped, dead or cut off")
    assert "  rank 1: no answer" in explain([ahead], 2)
    started = log(0, 1, 2, 3, done=False, waiting=False)  # started and not waited for: it stops nobody
    assert explain([started, behind], 2).startswith("no rank waits for another")
    assert explain([log(0, 1), log(1, 1)], 2).startswith("all ranks wait, and their collectives match")
    assert explain([log(0, 1), log(1, 1, waiting=False)], 2).startswith("rank 1 waits for nobody while others wait")
    assert explain([log(0, 1)], 3).startswith("ranks 1, 2 give no answer")
    crossed = [replace(log(rank, 1, done=False), groups={g: (g, (0, 1)) for g in "gh"}) for rank in range(2)]
    crossed[1] = replace(crossed[1], calls=[replace(crossed[1].calls[0], group="h")])
    assert explain(crossed, 2).splitlines()[0] == (
        "the ranks wait in a circle: rank 0 waits in all_reduce(g) of [1] Float at a.py:1 for rank 1, rank 1 waits in "
        "all_reduce(h) of [1] Float at a.py:1 for rank 0"
    )
    uneven = [log(rank, 5, kind="all_to_all") for rank in range(2)]
    uneven[1] = replace(uneven[1], calls=[replace(uneven[1].calls[0], shape=(9,))])
    assert explain(uneven, 2).startswith("all ranks wait")  # shards of an all-to-all may differ


def nccl(number: int, done: bool, group: str = "g", at: int = 0, **changes: object) -> dict:
    """An entry of nccl's flight recorder, as torch 2.11 dumps it."""
    return {
        "record_id": number, "pg_id": 1, "process_group": (group, "mesh_tp"), "is_p2p": False, "p2p_seq_id": 0,
        "collective_seq_id": number, "op_id": number, "profiling_name": "nccl:all_reduce", "retired": False,
        "state": "completed" if done else "scheduled", "time_created_ns": at or 10 * number, "timeout_ms": 600_000,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": 10 * number + 5 if done else None,
        "input_sizes": [[number]], "input_dtypes": ["Float"], "output_sizes": [[number]], "output_dtypes": ["Float"],
        "frames": [{"name": "f", "filename": "/a/b.py", "line": number}], **changes,
    }  # fmt: skip


def test_a_hang_on_nccl_is_explained_while_the_host_stands_elsewhere():
    """On GPUs the host runs ahead of the collectives, and waits where it reads a number."""

    def rank(number: int, *entries: dict, waiting: bool = False) -> Log:
        groups = {"g": ("tp", (0, 1)), "h": ("dp", (0, 1))}
        return Log(number, groups, calls_of(entries, 10), "train.py:9", "", waiting)

    ahead = rank(0, nccl(1, True), nccl(2, False), nccl(3, False), nccl(1, False, group="h", at=40))
    assert [call.backend for call in ahead.calls] == ["nccl"] * 4
    assert explain([ahead, rank(1, nccl(1, True))], 2).splitlines() == [
        "rank 0 entered all_reduce(tp) of [2] Float at a/b.py:2 while rank 1 never did: it is at train.py:9",
        "  rank 0: waits in all_reduce(tp) of [2] Float at a/b.py:2",
        "  rank 1: is at train.py:9",
    ]
    assert explain([ahead, replace(ahead, rank=1)], 2).startswith("all ranks wait, and their collectives match")
    other = rank(1, nccl(1, True), nccl(2, False, profiling_name="nccl:broadcast"))
    assert explain([ahead, other], 2).startswith("the ranks disagree about call 2: rank 0 entered all_reduce(tp)")
    queued = rank(0, nccl(1, False), nccl(1, False, group="h", at=20)), rank(1, nccl(1, False, group="h", at=15))
    assert explain(queued, 2).splitlines()[0] == (
        "rank 0 entered all_reduce(tp) of [1] Float at a/b.py:1 while rank 1 never did: "
        "it waits in all_reduce(dp) of [1] Float at a/b.py:1"
    )
    # A group counts its collectives on either backend for itself.
    both = [nccl(1, True, profiling_name="gloo:all_gather", at=11), nccl(1, True, at=12), nccl(2, True, at=13)]
    assert explain([rank(r, *both, waiting=True) for r in range(2)], 2).startswith("all ranks wait, and their")
    late = nccl(2, False, profiling_name="gloo:all_gather", at=20)
    assert explain([rank(0, *both, late, waiting=True), rank(1, *both)], 2).startswith(
        "rank 0 entered all_gather(tp) of [2] Float at a/b.py:2 while rank 1 never did"
    )
    assert calls_of([nccl(1, True, is_p2p=True), nccl(2, True, at=9)], 10) == []


def test_a_folder_of_logs_is_explained_again(tmp_path, capsys):
    for entry in (log(0, 1, 2, 3, done=False), log(1, 1, 2, waiting=False)):
        (tmp_path / f"rank{entry.rank}.json").write_text(entry.to_json())
        assert Log.from_json(entry.to_json()) == entry
    main([str(tmp_path)])
    assert "while rank 1 never did" in capsys.readouterr().out
    (tmp_path / "rank1.json").write_text("{")
    assert main([str(tmp_path)]) == 2
    assert "rank1.json can't be read" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 2
    assert "has no rank*.json" in capsys.readouterr().err


def check_what_a_former_mesh_did() -> None:
    former = build_mesh(tp=2)
    all_reduce(ONES, former.tp)
    on = build_mesh(tp=2)
    assert read_log(former).calls[0].shape == (4, 8)
    assert read_log(on).calls == []
    all_reduce(ONES[0], on.tp)
    assert [call.shape for call in read_log(on).calls] == [(8,)]


def check_quiet() -> None:
    on = mesh(tp=2)
    with pytest.raises(ValueError, match="call record\\(\\) before it is made"):
        record()
    with Watchdog(on, timeout=0.2) as watchdog:
        for _ in range(8):
            time.sleep(0.05)
            watchdog.beat()
    time.sleep(0.5)  # over: nothing fires any more


def test_progress_keeps_the_watchdog_quiet(ranks):
    ranks(2, check_quiet)
    ranks(2, check_what_a_former_mesh_did)
    for wrong in ({"timeout": 0.0}, {"grace": -1.0}):
        with pytest.raises(ValueError, match="must be more than 0"):
            Watchdog(Mesh(), **wrong)


@pytest.mark.parametrize(("options", "words"), [
    ({"folder": "/dev/null/no"}, "NOT WRITTEN: the log of rank 0"), ({"model": "none"}, "the report of it failed"),
])  # fmt: skip
def test_a_hang_ends_with_a_reason_also_where_its_log_cannot_be_written(monkeypatch, caplog, options, words):
    left = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: left.set())
    with Watchdog(Mesh(), timeout=0.1, **options):
        assert left.wait(10)
    assert words in caplog.text
