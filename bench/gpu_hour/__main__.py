"""Measure a machine with one GPU: `python -m bench.gpu_hour [--budget SECONDS]`, from a bare checkout.

Each job runs in a process of its own under a time limit, and what became of it joins a file of results at once. Run the
command again to go on: jobs that the file has are skipped. The jobs, in this order:

1. together, for they need not be timed: the environment, `mpcore doctor`, the tests of the marker `gpu` in several
   processes, one correctness case and one repeat of each kernel;
2. the rates of a copy and of a matrix product;
3. a training step beside plain torch, and the example's model FLOPs utilization (MFU);
4. one shape of each kernel beside eager, torch.compile, SDPA and all peers that are installed;
5. two stages against three in the loops of every kernel.

A report in Markdown and a plot lie beside the results after every call.
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
EXAMPLES = ("dense", "compiled", "fp8", "recomputed")  # of `jobs.EXAMPLES`, which a test compares
LEAST = 15.0  # seconds of budget that a job needs to begin
NAMES = (  # of the kernels of `jobs.kernels`, which a test compares
    "rms_norm", "add_rms_norm", "cross_entropy", "linear_cross_entropy", "linear_cross_entropy_rows", "linear_log_prob",
    "swiglu", "geglu", "gelu", "relu_squared", "attention", "rope", "layer_norm", "adamw", "dropout_add", "moe_permute",
    "quantize_fp8", "quantize_fp8 both ways",
)  # fmt: skip


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


def stages_of(names: Sequence[str], variants: dict[int, Path], environment: dict[str, str]) -> list[Job]:
    """List the jobs that time a kernel with two and with three stages in its loops, in copies of the sources."""
    return [
        Job(
            "stages",
            f"{name}, {count}",
            _command("stages", name),
            60,
            folder,
            {**environment, "PYTHONPATH": str(folder)},
        )
        for name in names
        for count, folder in variants.items()
    ]


def _command(kind: str, name: str, *rest: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "bench.gpu_hour.jobs", kind, name, "{rows}", *rest)


def plan(args: argparse.Namespace, folder: Path) -> Iterator[tuple[list[Job], int]]:
    """Yield groups of jobs in their order, and how many run at a time."""
    names = args.kernels or NAMES
    faults = {name: fault for fault, _, name in (given.partition(":") for given in args.inject)}
    wait = args.job_seconds

    def jobs(kind: str, seconds: float, faulty: bool = False, **environment: str) -> list[Job]:
        planted = {name: ("--fault", faults[name]) if faulty and name in faults else () for name in names}
        return [
            Job(kind, name, _command(kind, name, *planted[name]), wait or seconds, environment=environment)
            for name in names
        ]

    interpreted = {"TRITON_INTERPRET": "1"} if args.rehearse else {}
    checks = jobs("check", 180, faulty=True, **interpreted)
    doctor = Job("doctor", "", (sys.executable, "-m", "mpcore", "doctor"), 180)
    yield [*_tests(args.rehearse), doctor, *one_of("environment"), *checks], 2 if args.rehearse else 6
    yield one_of("ceilings"), 1
    runs = ["dense"] if args.rehearse else EXAMPLES
    yield (
        [*([] if args.rehearse else one_of("step")), *(Job("example", n, _command("example", n), 150) for n in runs)],
        SIDE_BY_SIDE,
    )
    yield jobs("measure", 180), SIDE_BY_SIDE
    make = "import sys; from pathlib import Path; from bench.gpu_hour.jobs import sources_with_stages as copy; "
    make += "copy(int(sys.argv[1]), Path(sys.argv[2]))"
    variants = {count: folder / f"stages_{count}" for count in (2, 3)}
    for count, to in variants.items():
        if not to.is_dir():
            subprocess.run([sys.executable, "-c", make, str(count), str(to)], cwd=ROOT, check=True)
    yield stages_of(names, variants, {}), SIDE_BY_SIDE
    if not args.rehearse:
        yield [_pytest("giants", "tests/kernels/test_on_gpu.py", "among", 1)], 1


def one_of(kind: str) -> list[Job]:
    """List the one job of a kind that has no names."""
    return [Job(kind, "", _command(kind, ""), 180)]


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
    parser.add_argument("--kernels", nargs="*", choices=NAMES, metavar="KERNEL", help=f"of {', '.join(NAMES)} (all)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: checks in Triton's interpreter, toy shapes")
    parser.add_argument("--inject", nargs="*", default=[], metavar="FAULT:KERNEL", help="plant hang, crash or wrong")
    parser.add_argument("--job-seconds", type=float, help="the limit of each kernel's jobs (60 to 120, by job)")
    args = parser.parse_args(argv)
    until = time.monotonic() + args.budget
    results = Results(args.out / "results.jsonl")
    done = True
    with tempfile.TemporaryDirectory(prefix="gpu_hour_") as folder:
        for jobs, workers in plan(args, Path(folder)):
            done &= run_all(jobs, results, until, workers)
            report.write(results.lines, args.out)
    print(f"{args.out}/report.md" + ("" if done else "; the budget is over: run the command again to go on"))
    return int(not done)


if __name__ == "__main__":
    sys.exit(main())
