"""Try a change in a copy of the tree: run the tests until one fails, then see that it passes without the change."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutations import warm

LEFT_OUT = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache", "*.egg-info", "runs", "build", ".ci-out")
INTERPRETED = "tests/kernels/interpret"  # tests that run Triton's kernels in its interpreter
SIMULATED, NOT_SLOW = ("--simulate",), ("-m", "not slow")
FINE = (0, 5)  # pytest's codes: all pass, or none is left on this machine
WALL = 20  # seconds by the clock for each of processor time


class Verdict(NamedTuple):
    """What became of a change.

    Attributes:
        kind: "killed"; "survived": all chosen tests pass; "timeout": none failed, but not all ran in the time;
            "unsure": the tests that failed also fail without the change; "stale": its place is gone.
        by: the test that failed, or what else there is to say.
        seconds: how much processor time it took.
    """

    kind: str
    by: str = ""
    seconds: float = 0.0


class Copy:
    """A copy of the tree, without .git; changes are made in it alone.

    Args:
        root: the tree.
        folder: where the copy goes; it must not exist.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        shutil.copytree(root, folder, symlinks=True, ignore=LEFT_OUT)
        self.folder = folder
        self.passes: dict[tuple[str, ...], bool] = {}  # tests without a change
        self.red: set[str] = set()  # those that fail without a change
        self.spent = 0.0
        self.warm: dict[bool, subprocess.Popen] = {}  # by whether Triton interprets, the process that forks

    def judge(self, path: Path, changed: str, tests: Sequence[str], limit: float, simulated: bool = False) -> Verdict:
        """Change a file, run the tests in their order, and mend it.

        Args:
            path: the file, relative to the tree.
            changed: its changed text.
            tests: files, or pytest's `file::name`, in the order in which they run.
            limit: seconds of processor time for all of them.
            simulated: ranks are threads, instead of processes of a pool.
        """
        file, began = self.folder / path, self.spent
        left = [test for test in tests if not self.red & {test, test.partition("::")[0]}]
        if tests and not left:
            return Verdict("unsure", tests[0])
        before, times = file.read_text(), file.stat()
        parts = [[test for test in left if test.startswith(INTERPRETED) == kind] for kind in (False, True)]
        words = [*NOT_SLOW, *(SIMULATED if simulated else ())]
        kind, by = "survived", "" if tests else "no test reaches it"
        for part in filter(None, parts):
            self.started(part[0].startswith(INTERPRETED))
        file.write_text(changed)
        os.utime(file, (0, 0))  # a time that no bytecode is of
        try:
            for part in filter(None, parts):
                kind, by = self._outcome(part, words, limit)
                if kind != "survived":
                    break
        finally:
            file.write_text(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        if kind == "killed":
            chosen = part[: part.index(by) + 1] if by in part else [by]  # the same tests before it
            if not self._passes(tuple(chosen), (*words, *(() if "::" in by else ("--collect-only",))), limit):
                again = by not in self.red
                self.red.add(by)
                kind, by, _ = self.judge(path, changed, tests, limit, simulated) if again else ("unsure", by, 0)
        return Verdict(kind, by, self.spent - began)

    def _outcome(self, tests: Sequence[str], words: Sequence[str], limit: float) -> tuple[str, str]:
        """The kind of verdict, and the first test that failed."""
        answer = self.run(tests, words, limit, without=sorted(self.red))
        said, last = answer["said"], tests[0].partition("::")[0]
        for what, test, _ in said:
            if what == "failed":
                return "killed", test
            last = test if what == "began" else last
        if answer["end"] in ("cpu", "wall"):
            return "timeout", last
        if answer["end"] == "died":
            return "killed", last
        if said[-1][1] in FINE:  # of a file, nothing but what is red may be left
            return "unsure" if self.red and said[-1][1] else "survived", ""
        return "killed", tests[0].partition("::")[0]  # a conftest.py can't be imported

    def _passes(self, tests: tuple[str, ...], words: tuple[str, ...], limit: float) -> bool:
        """Whether tests pass in the copy as it is."""
        key = (*tests, *words)
        if key not in self.passes:
            answer = self.run(tests, words, limit)
            self.passes[key] = answer["end"] == "ended" and answer["said"][-1][:2] in [["done", code] for code in FINE]
        return self.passes[key]

    def started(self, interpreted: bool) -> subprocess.Popen:
        """The warm process, which keeps the bytecode of the tree as it is when it starts."""
        if interpreted not in self.warm:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            environment["PYTHONPATH"] = str(self.folder)
            if interpreted:
                environment["TRITON_INTERPRET"] = "1"
            self.warm[interpreted] = subprocess.Popen(
                [sys.executable, warm.__file__, INTERPRETED if interpreted else "tests"], cwd=self.folder,
                env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            self.warm[interpreted].stdout.readline()  # type: ignore[union-attr]
        return self.warm[interpreted]

    def run(
        self,
        tests: Sequence[str],
        words: Sequence[str],
        limit: float,
        lines: str = "",
        stop: bool = True,
        without: Sequence[str] = (),
    ) -> dict:
        """Have the warm process fork, run the tests in the fork, and return its report (`warm.Job`, `warm.run`)."""
        process = self.started(tests[0].startswith(INTERPRETED))
        print(json.dumps((tests, words, limit, WALL * limit, lines, stop, without)), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline())  # type: ignore[union-attr]
        self.spent += answer["cpu"]
        return answer

    def stop(self) -> None:
        """End the warm processes, which end all that they started."""
        for process in self.warm.values():
            process.terminate()
            process.wait()


@contextlib.contextmanager
def copies(root: Path, count: int) -> Iterator[list[Copy]]:
    """So many copies of a tree, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mpcore-mutations-") as folder:
        made = [Copy(root, Path(folder) / str(i)) for i in range(count)]
        try:
            yield made
        finally:
            for copy in made:
                copy.stop()
