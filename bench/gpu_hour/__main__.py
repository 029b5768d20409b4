"""Measure a machine with one GPU: `python -m bench.gpu_hour [--budget SECONDS] [--commit]`, from a bare checkout.

Each job is a run of pytest in a process of its own under a time limit, and its outcome joins a file of results at once.
Run the command again to go on: jobs that the file has are skipped. First `mpcore doctor`. Then the steps, in this
order, and with `--commit` a commit of the results after each:

(a) attention, each mask at its first two sizes, beside cuDNN, flash and FlexAttention;
(b) the head: loss, loss of rows, log-probabilities;
(c) weight gradients added to the float32 main gradient by the product;
(d) an FP8 linear layer and grouped products;
(e) a training step, an 8B-shaped block and experts: the list of their kernels by time;
(f) ring attention of simulated ranks in one process;
(g) the Gluon attention kernel of commit ef70cef, two minutes;
(h) model FLOPs utilization (MFU) of the example: three shapes, dense, experts, documents;
(i) the planner's prediction of each run of (h), in the same rows.

At the end come the other kernels, and the tests of the marker `gpu`. After every step `report.md` and
`benchmarks.json`, which `pytest-benchmark compare` reads, lie beside the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.cases import KERNELS
from bench.machine import ROOT
from bench.report import longest_kernels, table

OK, HANG, CRASH, WRONG_RESULT, FAILED = "ok", "hang", "crash", "wrong", "failed"
LOG = 3000  # lines of what a job printed that stay, if it has no rows or failed
SIDE_BY_SIDE = 2  # processes of which one is timed and the other compiles
LEAST = 15.0  # seconds of budget that a job needs to begin
ATTENTION = ("attention", "attention, window", "attention, documents", "attention, soft cap")
HEAD = ("linear_cross_entropy", "linear_cross_entropy_rows", "linear_log_prob")
PRODUCTS = ("weight gradient", "FP8 linear", "grouped linear")
STEP = "bench/examples/bench_gpt_step.py"
EXAMPLES = ("small", "medium", "large", "experts", "documents")
GLUON = "git archive ef70cef kernels mpcore tests pyproject.toml | tar -x -C {folder} && cd {folder} && "
GLUON += "PYTHONPATH={folder} {python} -m pytest -q -m gpu -k gluon tests/kernels --timeout 100"
# A test that hangs takes its process with it, which another replaces.
TESTS = "-v --no-header --tb short -m gpu --timeout 120 --timeout-method thread"


class Job(NamedTuple):
    """What runs in a process of its own: kind and name, which are its name in the results, the command, and its limit.

    {rows} in the command stands for the file that it writes rows to: lines of JSON, or pytest-benchmark's file.
    """

    kind: str
    name: str
    command: tuple[str, ...]
    seconds: float = 180


def parsed(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of lines of JSON. The last line may be cut: its process was killed while it wrote."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def read_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows that a job wrote."""
    try:
        return json.loads(text)["benchmarks"]
    except (ValueError, KeyError):
        return [*parsed(text)]


def run(job: Job, limit: float = math.inf) -> dict[str, Any]:
    """Run a job for at most `limit` seconds, kill its process group, and return a line of the results.

    Only SIGKILL ends a process that waits for a device, and its children hold the device too: so the group gets it.
    """
    began, limit = time.monotonic(), min(limit, job.seconds)
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.json", Path(folder) / "log"
        more = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [part.replace("{rows}", str(rows)) for part in job.command], cwd=ROOT, stdout=output, stderr=output,
                env={"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ, **more}, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # what waits within the driver may stay: the next job has its turn anyway
        lines = log.read_text(errors="replace").strip().splitlines()
        found = read_rows(rows.read_text()) if rows.is_file() else []
    state, why = OK, ""
    if status is None:
        state, why = HANG, f"killed after {limit:.0f} s"
    elif status < 0:
        state, why = CRASH, signal.Signals(-status).name
    elif status:
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        state, why = FAILED, (failed or lines or [f"status {status}"])[-1][:300]
    seconds = round(time.monotonic() - began, 1)
    line = {"job": job.kind, "name": job.name, "state": state, "seconds": seconds, "why": why, "rows": found}
    return line if state == OK and found else line | {"log": lines[-LOG:]}


class Results:
    """The file of results, a line of JSON for each job, which joins as it ends. The file may be there."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = [*parsed(path.read_text())] if path.is_file() else []

    def has(self, job: Job) -> bool:
        """Return whether a job is done, well or not."""
        return any((line["job"], line["name"]) == (job.kind, job.name) for line in self.lines)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, and have it on the disk."""
        with self._lock, self.path.open("a") as file:
            self.lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def run_all(jobs: Sequence[Job], results: Results, until: float, workers: int) -> bool:
    """Run the jobs that the results don't have, and return whether the budget was enough for all.

    A job that the end of the budget cuts off is not recorded: the next call gives it its whole time.
    """

    def one(job: Job) -> bool:
        if results.has(job):
            return True
        left = until - time.monotonic()
        if left < min(LEAST, job.seconds):
            return False
        line = run(job, min(left, job.seconds))
        if line["state"] == HANG and left < job.seconds:
            return False
        results.add(line)
        print(f"{line['state']:<7}{line['seconds']:7.1f} s  {job.kind} {job.name}  {line['why']}", flush=True)
        return True

    with ThreadPoolExecutor(workers) as pool:
        return all(list(pool.map(one, jobs)))


def plan(args: argparse.Namespace, folder: str) -> Iterator[tuple[str, list[Job], int]]:
    """Yield the steps in their order: a letter or word, its jobs, and how many run at a time."""

    def pytest(kind: str, name: str, *words: str, seconds: float = 180) -> Job:
        command = sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words
        return Job(kind, name, command, args.job_seconds or seconds)

    def bench(name: str, *words: str, seconds: float = 180) -> Job:
        return pytest("bench", name, *words, "-p", "no:xdist", "--benchmark-json={rows}", seconds=seconds)

    def kernels(*names: str, shapes: int = 1) -> list[Job]:
        names = tuple(name for name in names if name in (args.kernels or KERNELS))
        return [bench(n, "bench/bench_kernels.py", f"--kernel={n}", f"--shapes={shapes}") for n in names]

    yield "machine", [Job("doctor", "", (sys.executable, "-m", "mpcore", "doctor"))], 1
    yield "a", kernels(*ATTENTION, shapes=2), SIDE_BY_SIDE
    yield "b", kernels(*HEAD), SIDE_BY_SIDE
    yield "c", kernels(PRODUCTS[0]), 1
    yield "d", kernels(*PRODUCTS[1:]), 1
    yield "e", [bench(name, STEP, "-k", name) for name in ("test_block", "test_gpt_step")], 1
    yield "f", kernels("ring attention"), 1
    gluon = GLUON.format(folder=folder, python=sys.executable)
    yield "g", [] if args.rehearse else [Job("gluon", "ef70cef", ("sh", "-c", gluon), 120)], 1
    examples = EXAMPLES[:1] if args.rehearse else EXAMPLES
    yield "h", [bench(f"pretrain {n}", f"{STEP}::test_pretrain[{n}]", seconds=150) for n in examples], 1
    done = {*ATTENTION, *HEAD, *PRODUCTS, "ring attention"}
    yield "others", kernels(*(name for name in KERNELS if name not in done)), SIDE_BY_SIDE
    if args.rehearse:
        yield "tests", [pytest("tests", "kernels", "tests/kernels/test_rows.py", seconds=540)], 1
        return
    more = "tests/examples/test_on_gpu.py tests/test_cross_replica_hash.py"
    runs = [("kernels", "tests/kernels", "not among", 9), ("example", more, "not none", 3),
            ("giants", "tests/kernels/test_on_gpu.py", "among", 1)]  # fmt: skip
    yield "tests", [
        pytest("tests", name, *TESTS.split(), "-n", f"{n}", *files.split(), "-k", which, seconds=400)
        for name, files, which, n in runs
    ], 1  # fmt: skip


def report(lines: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write `benchmarks.json` and `report.md`: what went wrong, the tables, and the ends of the tests."""
    rows = [row for line in lines for row in line["rows"]]
    about = rows[0]["extra_info"] if rows else {"device": "unknown", "date": "", "commit": ""}
    machine, commit = {"machine": "", "cpu": {}, "device": about["device"]}, {"id": about["commit"]}
    saved = {
        "machine_info": machine,
        "commit_info": commit,
        "benchmarks": rows,
        "datetime": about["date"],
        "version": "5",
    }
    (folder / "benchmarks.json").write_text(json.dumps(saved, indent=1) + "\n")
    bad = [
        f"- **{line['state']}** {line['job']} `{line['name']}`: {line['why']}" for line in lines if line["state"] != OK
    ]
    text = [f"# {about['device']}, {about['date']}, {about['commit']}\n"]
    if not any(row["extra_info"].get("clock") == "device" for row in rows):
        text.append("**A rehearsal on a CPU, of toy shapes: no figure of a GPU is below.**\n")
    text.append(
        f"{len(lines)} jobs, {len(bad)} of them not ok; {sum(line['seconds'] for line in lines):.0f} s in all\n"
    )
    text += ["## What went wrong\n", *(bad or ["Nothing."]), "\n## Times\n", table(rows), *longest_kernels(rows)]
    text += [f"\n## {line['job']} {line['name']}\n\n```text\n" + "\n".join(line["log"][-12:]) + "\n```"
             for line in lines if "log" in line]  # fmt: skip
    (folder / "report.md").write_text("\n".join(text) + "\n")


def commit(step: str, folder: Path) -> None:
    """Commit the results of a step; without git nothing is done."""
    message = f"Record step {step} of the measurements of a GPU"
    with contextlib.suppress(OSError):
        subprocess.run(["git", "add", "-f", str(folder)], cwd=ROOT, check=False)
        subprocess.run(["git", "commit", "-q", "-m", message, "--", str(folder)], cwd=ROOT, check=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 when every job has a line in the results, otherwise 1: run the command again."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_hour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=560, help="seconds, after which no job runs (560)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu_hour", help="a folder of results")
    parser.add_argument("--commit", action="store_true", help="commit the results after each step")
    parser.add_argument(
        "--kernels", nargs="*", choices=KERNELS, metavar="KERNEL", help=f"of {', '.join(KERNELS)} (all)"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: references of the kernels, toy shapes")
    parser.add_argument("--job-seconds", type=float, help="the limit of each run of pytest (150 to 540, by job)")
    args = parser.parse_args(argv)
    until = time.monotonic() + args.budget
    results = Results(args.out / "results.jsonl")
    done = True
    with tempfile.TemporaryDirectory(prefix="gpu_hour_") as folder:
        for step, jobs, workers in plan(args, folder):
            print(f"--- {step}", flush=True)
            done &= run_all(jobs, results, until, workers)
            report(results.lines, args.out)
            if args.commit and jobs:
                commit(step, args.out)
    print(f"{args.out}/report.md" + ("" if done else "; the budget is over: run the command again to go on"))
    return int(not done)


if __name__ == "__main__":
    sys.exit(main())
