"""Measure a machine with one GPU: `python -m bench.gpu_hour [--budget SECONDS] [--commit]`, from a bare checkout.

Each job runs in a process of its own under a time limit, and its outcome joins a file of results at once. Run the
command again to go on: jobs that the file has are skipped. First the environment, the copy and the matrix product.
Then the steps of `STEPS`, in this order, and with `--commit` a commit of the results after each:

(a) attention, each mask at 2k and 8k tokens, beside cuDNN, flash and FlexAttention;
(b) the head: loss, loss of rows, log-probabilities;
(c) weight gradients added to the float32 main gradient by the product;
(d) an FP8 linear layer and grouped products;
(e) a training step, an 8B-shaped block and experts: the list of their kernels by time;
(f) ring attention of simulated ranks in one process;
(g) the Gluon attention kernel of commit ef70cef, two minutes;
(h) model FLOPs utilization (MFU) of the example: three shapes, dense, experts, documents;
(i) the planner's prediction of each run of (h).

At the end come the other kernels, `mpcore doctor`, and the tests of the marker `gpu`. A report in Markdown and a plot
lie beside the results after every step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu_hour import report
from bench.machine import ROOT

WRONG = 3  # as in `jobs.py`, which this process does not import: it would hold memory of the GPU
OK, HANG, CRASH, WRONG_RESULT, FAILED = "ok", "hang", "crash", "wrong", "failed"
LOG = 3000  # lines of what a job printed that stay, if it has no rows or failed
SIDE_BY_SIDE = 2  # processes of which one is timed and the other starts
LEAST = 15.0  # seconds of budget that a job needs to begin
ATTENTION = ("attention", "attention, window", "attention, documents", "attention, soft cap")
HEAD = ("linear_cross_entropy", "linear_cross_entropy_rows", "linear_log_prob")
OTHERS = (
    "rms_norm", "add_rms_norm", "cross_entropy", "swiglu", "geglu", "gelu", "relu_squared", "rope", "layer_norm",
    "adamw", "dropout_add", "moe_permute", "quantize_fp8", "quantize_fp8 both ways",
)  # fmt: skip
NAMES = (*ATTENTION, *HEAD, "ring attention", *OTHERS)  # of `bench.cases`, which the jobs import
EXAMPLES = ("small", "medium", "large", "experts", "documents")  # of `jobs.EXAMPLES`
GLUON = "git archive ef70cef kernels mpcore tests pyproject.toml | tar -x -C {folder} && cd {folder} && "
GLUON += "PYTHONPATH={folder} {python} -m pytest -q -m gpu -k gluon tests/kernels --timeout 100"


@dataclass(frozen=True)
class Job:
    """What runs in a process of its own.

    Attributes:
        kind, name: together they are its name in the file of results.
        command: the process; {rows} stands for the file that it writes rows to.
        seconds: the limit.
        folder: where it runs; None: the checkout.
        environment: variables besides those of this process.
    """

    kind: str
    name: str
    command: tuple[str, ...]
    seconds: float
    folder: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)


def run(job: Job, limit: float | None = None) -> dict[str, Any]:
    """Run a job, kill its process group at its limit, and say what became of it.

    Only SIGKILL ends a process that waits for a device, and its children hold the device too: so the group gets it.

    Args:
        job: what to run.
        limit: seconds, where fewer are left than the job's own.

    Returns:
        A line of the results: job, name, state, seconds, why and rows.
    """
    limit = job.seconds if limit is None else min(limit, job.seconds)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        rows.touch()
        command = [part.replace("{rows}", str(rows)) for part in job.command]
        env = {
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            **os.environ,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONUNBUFFERED": "1",
            **job.environment,
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=job.folder or ROOT, env=env, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # what waits within the driver may stay: the next job has its turn anyway
        lines = log.read_text(errors="replace").strip().splitlines()
        found = list(_parsed(rows.read_text()))
    state, why = OK, ""
    if status is None:
        state, why = HANG, f"killed after {limit:.0f} s"
    elif status < 0:
        state, why = CRASH, signal.Signals(-status).name
    elif status:
        state = WRONG_RESULT if status == WRONG else FAILED
        why = lines[-1] if lines else f"status {status}"
    seconds = round(time.monotonic() - began, 1)
    line = {"job": job.kind, "name": job.name, "state": state, "seconds": seconds, "why": why[:300], "rows": found}
    return line if state == OK and found else line | {"log": lines[-LOG:]}


def _parsed(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # a process was killed while it wrote
            yield json.loads(line)


class Results:
    """The file of results, which every job joins as it ends.

    Args:
        path: a file of JSON lines; it may be there.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = list(_parsed(path.read_text())) if path.is_file() else []

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


def run_all(jobs: Sequence[Job], results: Results, until: float, workers: int = 1) -> bool:
    """Run the jobs that the results don't have, and return whether the budget was enough for all.

    A job that the end of the budget cuts off is not recorded: the next call gives it its whole time.
    """

    def one(job: Job) -> bool:
        if results.has(job):
            return True
        left = until - time.monotonic()
        if left < min(LEAST, job.seconds):
            return False
        line = run(job, left)
        if line["state"] == HANG and left < job.seconds:
            return False
        results.add(line)
        print(f"{line['state']:<7}{line['seconds']:7.1f} s  {job.kind} {job.name}  {line['why']}", flush=True)
        return True

    with ThreadPoolExecutor(workers) as pool:
        return all(list(pool.map(one, jobs)))


def _command(kind: str, name: str, *rest: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "bench.gpu_hour.jobs", kind, name, "{rows}", *rest)


def plan(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[Job], int]]:
    """Yield the steps in their order: a letter or word, its jobs, and how many run at a time."""
    faults = {name: fault for fault, _, name in (given.partition(":") for given in args.inject)}
    interpreted = {"TRITON_INTERPRET": "1"} if args.rehearse else {}
    asked = args.kernels or NAMES

    def jobs(kind: str, names: Sequence[str], seconds: float = 180) -> list[Job]:
        return [Job(kind, n, _command(kind, n), args.job_seconds or seconds) for n in names]

    def kernels(*names: str) -> list[Job]:
        """Return check and measurement of each."""
        names = tuple(name for name in names if name in asked)
        checks = [
            Job("check", n, _command("check", n, *(("--fault", faults[n]) if n in faults else ())),
                args.job_seconds or 180, environment=interpreted)
            for n in names
        ]  # fmt: skip
        return [job for pair in zip(checks, jobs("measure", names), strict=True) for job in pair]

    yield "machine", [*jobs("environment", [""]), *jobs("ceilings", [""])], 1
    yield "a", kernels(*ATTENTION), SIDE_BY_SIDE
    yield "b", kernels(*HEAD), SIDE_BY_SIDE
    yield "c", jobs("add", [""]), 1
    yield "d", jobs("products", [""]), 1
    yield "e", jobs("block", ["dense", "experts"]) + ([] if args.rehearse else jobs("step", [""])), 1
    yield "f", kernels("ring attention"), 1
    gluon = GLUON.format(folder=folder, python=sys.executable)
    yield "g", [] if args.rehearse else [Job("gluon", "ef70cef", ("sh", "-c", gluon), 120)], 1
    yield "h", jobs("example", EXAMPLES[:1] if args.rehearse else EXAMPLES, 150), SIDE_BY_SIDE
    yield "i", jobs("planner", EXAMPLES), 1
    yield "others", kernels(*OTHERS), SIDE_BY_SIDE
    doctor = Job("doctor", "", (sys.executable, "-m", "mpcore", "doctor"), 180)
    giants = [] if args.rehearse else [_pytest("giants", "tests/kernels/test_on_gpu.py", "among", 1)]
    yield "tests", [doctor, *_tests(args.rehearse), *giants], 1


def commit(step: str, folder: Path) -> None:
    """Commit the results of a step; without git nothing is done."""
    with contextlib.suppress(OSError):
        subprocess.run(["git", "add", "-f", str(folder)], cwd=ROOT, check=False)
        message = f"Record step {step} of the measurements of a GPU"
        subprocess.run(["git", "commit", "-q", "-m", message, "--", str(folder)], cwd=ROOT, check=False)


def _tests(rehearse: bool) -> list[Job]:
    """List the tests of the kernels, and those of the example."""
    if rehearse:
        return [Job("tests", "kernels", (sys.executable, "-m", "pytest", "-q", "tests/kernels/test_rows.py"), 540)]
    more = "tests/examples/test_on_gpu.py tests/test_cross_replica_hash.py"
    return [_pytest("kernels", "tests/kernels", "not among", 9), _pytest("example", more, "not none", 3)]


def _pytest(name: str, files: str, which: str, processes: int) -> Job:
    """A run of tests of the marker `gpu`. A test that hangs takes its process with it, which another replaces."""
    flags = f"-v --no-header --tb short -m gpu --timeout 120 --timeout-method thread -p no:cacheprovider -n {processes}"
    return Job("tests", name, (sys.executable, "-m", "pytest", *flags.split(), *files.split(), "-k", which), 400)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 when every job has a line in the results, otherwise 1: run the command again.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_hour", description=__doc__)
    parser.add_argument("--budget", type=float, default=560, help="seconds, after which no job runs (560)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu_hour", help="a folder of results")
    parser.add_argument("--commit", action="store_true", help="commit the results after each step")
    parser.add_argument("--kernels", nargs="*", choices=NAMES, metavar="KERNEL", help=f"of {', '.join(NAMES)} (all)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: checks in Triton's interpreter, toy shapes")
    parser.add_argument("--inject", nargs="*", default=[], metavar="FAULT:KERNEL", help="plant hang, crash or wrong")
    parser.add_argument("--job-seconds", type=float, help="the limit of each kernel's jobs (60 to 120, by job)")
    args = parser.parse_args(argv)
    until = time.monotonic() + args.budget
    results = Results(args.out / "results.jsonl")
    done = True
    with tempfile.TemporaryDirectory(prefix="gpu_hour_") as folder:
        for step, jobs, workers in plan(args, Path(folder)):
            print(f"--- {step}", flush=True)
            done &= run_all(jobs, results, until, workers)
            report.write(results.lines, args.out)
            if args.commit and jobs:
                commit(step, args.out)
    print(f"{args.out}/report.md" + ("" if done else "; the budget is over: run the command again to go on"))
    return int(not done)


if __name__ == "__main__":
    sys.exit(main())
