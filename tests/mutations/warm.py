"""A process that has imported what the tests import, the library excepted. Each trial is a fork of it.

`trial.py` runs this file in a copy of the tree, waits for a line, and writes a job (`Job`) on a line of its input, in
JSON. The answer, a line of its output, has what the fork's tests "said", and its "end": "ended", "died", "cpu" (it
was out of processor time) or "wall"; and its "cpu", in seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest

SUBREAPER, PARENT_ENDS = 36, 1  # of prctl: processes whose parent ended become children of this one; a signal then

COVERAGE = """[run]
data_file = {0}
parallel = true
relative_files = true
include = mpcore/*, kernels/*, examples/*
context = ${{TEST_THAT_RUNS-}}
patch = _exit
"""


class Job(NamedTuple):
    """The task of one fork.

    Attributes:
        tests: test files, or pytest's `file::name`, with or without a case, in the order in which they run.
        words: pytest's options.
        cpu: seconds of processor time for the fork, and for each process that it starts.
        wall: seconds by the clock; a fork that waits forever ends then.
        lines: write there which test runs which line, with coverage.py; other processes write to `lines.*`.
        stop: end at the first test that fails.
        without: tests that are left out.
    """

    tests: list[str]
    words: list[str]
    cpu: float
    wall: float
    lines: str = ""
    stop: bool = True
    without: tuple[str, ...] = ()


def spent() -> float:
    """Seconds of processor time of this process and of its children that ended."""
    return sum(os.times()[:4])


class Teller:
    """A plugin of pytest that writes down what each test did, and follows its lines where the job asks for them."""

    def __init__(self, job: Job, out: IO[str]) -> None:
        self.job, self.out, self.began, self.coverage = job, out, 0.0, None
        if job.lines:
            from coverage import Coverage

            config = Path(job.lines).with_name("rc")
            config.write_text(COVERAGE.format(job.lines))
            self.coverage = Coverage(config_file=str(config), data_suffix=False, context="")
            self.coverage.start()
            os.environ["COVERAGE_PROCESS_START"] = str(config)  # for the processes that tests start

    def say(self, what: str, test: str, seconds: float = 0.0) -> None:
        print(json.dumps((what, test, round(seconds, 3))), file=self.out, flush=True)

    def failed(self, test: str) -> None:
        self.say("failed", test)
        if self.job.stop:
            os._exit(0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the job's tests. One whose name is gone, since it depends on what was changed, is no error."""
        turn = {test: i for i, test in enumerate(self.job.tests)}
        chosen = []
        for i, item in enumerate(items):
            names = item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
            at = [turn[name] for name in names if name in turn]
            chosen += [(at[0], i)] if at and item.nodeid not in self.job.without else []
        items[:] = [items[i] for _, i in sorted(chosen)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.say("began", item.nodeid)
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)
            os.environ["TEST_THAT_RUNS"] = item.nodeid
        self.began = spent()
        result = yield
        if self.coverage is not None:
            self.coverage.switch_context("")
            self.coverage.save()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed(report.nodeid)
        elif report.when == "call" and report.passed:
            self.say("passed", report.nodeid, spent() - self.began)


def fork(job: Job, out: IO[str]) -> int:
    """Start a fork that does a job, in a session of its own. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(job.cpu) + 1, int(job.cpu) + 9))
        null = os.open(os.devnull, os.O_RDWR)
        for i in range(3):
            os.dup2(null, i)
        files = dict.fromkeys(test.partition("::")[0] for test in job.tests)
        code = pytest.main([*files, *job.words, "-q", "-p", "no:cacheprovider", "--timeout=0"], [Teller(job, out)])
        print(json.dumps(("done", int(code), 0)), file=out, flush=True)
    except BaseException as error:
        print(json.dumps(("done", repr(error), 0)), file=out, flush=True)
    os._exit(0)


def run(job: Job) -> dict:
    """Do a job, and end every process that it started."""
    began = spent()
    with tempfile.TemporaryFile("w+") as out:
        pid = fork(job, out)
        poll = select.poll()
        descriptor = os.pidfd_open(pid)
        poll.register(descriptor, select.POLLIN)
        end = "wall" if not poll.poll(1000 * job.wall) else "ended"
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if end == "ended" and os.WIFSIGNALED(status):
            end = "cpu" if os.WTERMSIG(status) == signal.SIGXCPU else "died"
        _end_children()
        out.seek(0)
        said = [json.loads(line) for line in out.read().splitlines()]
    if end == "ended" and (not said or (said[-1][0] != "done" and not (job.stop and said[-1][0] == "failed"))):
        end = "died"
    return {"said": said, "end": end, "cpu": spent() - began}


def _end_children() -> None:
    """Kill all descendants: a grandchild becomes a child when its parent ends."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def warm_up(files: list[str]) -> None:
    """Import here whatever a fork imports when it collects test files, the modules of the tree excepted.

    The fork keeps the tree's bytecode, which saves the others most of the time.
    """
    tree = {path.name.removesuffix(".py") for path in Path.cwd().iterdir()}
    with tempfile.NamedTemporaryFile("w+") as out:
        pid = os.fork()
        if not pid:
            sys.dont_write_bytecode = False
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            with contextlib.suppress(BaseException):
                pytest.main([*files, "--collect-only", "-q", "-p", "no:cacheprovider"])
            print("\n".join(sys.modules), file=out, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        out.seek(0)
        for name in out.read().splitlines():
            if name.partition(".")[0] not in tree and not name.startswith("__"):
                with contextlib.suppress(BaseException):
                    module = importlib.import_module(name)
                    file = getattr(module, "__file__", None) or ""
                    if file.startswith(f"{Path.cwd()}{os.sep}"):
                        del sys.modules[name]
    gc.collect()
    gc.freeze()


def main(files: list[str]) -> None:
    """Warm up for these test files, and do jobs until the input ends."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)
    prctl(PARENT_ENDS, signal.SIGTERM, 0, 0, 0)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: (_end_children(), os._exit(0)))
    warm_up(files)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(Job(*json.loads(line)))), file=out, flush=True)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    main(sys.argv[1:])
