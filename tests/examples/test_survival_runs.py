"""Faults injected into real runs of the example: two processes under torchrun, as people start them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpcore.checkpoint import inspect, latest, step_path, verify
from tests.examples.test_pretrain import TINY

ROOT = Path(__file__).parents[2]
FLAGS = [*TINY, "--warmup", "2", "--eval-every", "0", "--micro-batch", "1"]


def start(
    *flags: str, fault: tuple[str, int, int] = ("none", 0, 0), torchrun: tuple[str, ...] = ()
) -> subprocess.Popen:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *torchrun, "-m"]
    return subprocess.Popen(
        [sys.executable, *launch, "tests.examples.faulty", *map(str, fault), *FLAGS, *flags], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def finish(run: subprocess.Popen, timeout: float = 150) -> tuple[int, str, str]:
    try:
        stdout, stderr = run.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout, stderr = end(run)
        raise AssertionError(f"still running after {timeout} s\n{stdout}\n{stderr}") from None
    return run.returncode, stdout, stderr


def end(run: subprocess.Popen) -> tuple[str, str]:
    """Kill torchrun and its workers, whatever state they are in."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split() if run.poll() is None else []
    for pid in (run.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    return run.communicate()


def losses(out: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in records]


def wait_for_steps(run: subprocess.Popen, out: Path, count: int) -> None:
    until = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len(losses(out)) < count:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_row_2_36_37_a_killed_rank_is_started_again_and_nothing_is_lost_but_steps(tmp_path, record_property):
    whole, again = tmp_path / "whole", tmp_path / "again"
    flags = ["--steps", "7", "--save-every", "2", "--dropout", "0.1"]
    status, _, stderr = finish(start(*flags, "--tp", "2", "--out", str(whole)))
    assert status == 0, stderr
    status, stdout, stderr = finish(
        start(*flags, "--tp", "2", "--out", str(again), fault=("kill", 1, 5), torchrun=("--max-restarts", "2"))
    )
    assert status == 0, stderr
    assert "resumed after step 4, from sample 16" in stdout
    assert losses(again) == losses(whole)
    assert not verify(step_path(again / "checkpoints", 7))
    record_property("work_lost", "1 step")


CAUSES = {
    "kill": (1, "rank 1 gives no answer: killed, or cut off"),
    "raise": (3, "rank 1 failed first: LookupError: a planted fault"),
    "exit": (4, "rank 1 left before the end, with exit status 0"),
}


@pytest.mark.slow  # tests/test_survival.py has the same law of processes that train nothing
@pytest.mark.parametrize("kind", CAUSES)
def test_row_1_3_4_all_ranks_leave_within_seconds_and_name_the_first(tmp_path, kind, record_property):
    run = start("--steps", "100000", "--dp", "2", "--save-every", "3", "--set", "keep=2", "--out", str(tmp_path),
                fault=(kind, 1, 7))  # fmt: skip
    wait_for_steps(run, tmp_path, 7)
    began = time.monotonic()
    status, _, stderr = finish(run)
    took = time.monotonic() - began
    assert status == 1
    assert f"rank 0: stopped, because {CAUSES[kind][1]}" in stderr
    assert took < 30  # 5 s on an idle machine; torchrun's own end is in it
    if kind == "raise":
        details = tmp_path / "errors" / "rank1.txt"
        assert re.search(rf"rank 1: failed on \S+: LookupError: a planted fault \(details: {details}\)\n", stderr)
        assert stderr.index("rank 1: failed on ") < stderr.index("rank 0: stopped")
        assert details.read_text().startswith("Traceback")
    found = latest(tmp_path / "checkpoints")
    assert found == step_path(tmp_path / "checkpoints", 6)
    assert not verify(found)
    record_property("work_lost", "1 step")


@pytest.mark.slow
def test_row_31_sigterm_saves_and_every_worker_says_so(tmp_path):
    run = start("--steps", "100000", "--tp", "2", "--save-every", "100000", "--out", str(tmp_path))
    wait_for_steps(run, tmp_path, 3)
    run.send_signal(signal.SIGTERM)
    status, stdout, stderr = finish(run)
    assert status != 0, stderr
    found = latest(tmp_path / "checkpoints")
    assert found is not None
    assert f"saved {found} and stopped" in stdout
    assert inspect(found).step == len(losses(tmp_path))


@pytest.mark.slow
def test_row_27_numbers_that_stay_bad_stop_the_run_on_all_ranks(tmp_path, record_property):
    run = start("--steps", "100", "--dp", "2", "--save-every", "2", "--set", "max_skips=2", "--out", str(tmp_path),
                "--set", "check_replicas=0", fault=("nan", 1, 5))  # fmt: skip
    status, _, stderr = finish(run)
    assert status == 1
    for rank in (0, 1):  # in torchrun's list of causes
        assert f"traceback : rank {rank}: error: 3 steps in a row had a loss or gradient that isn't finite" in stderr
    skipped = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [(s["step"], s["samples"]) for s in skipped] == [(5, [20, 23]), (6, [24, 27]), (7, [28, 31])]
    assert not verify(step_path(tmp_path / "checkpoints", 4))
    record_property("work_lost", "the steps since the last good checkpoint")
