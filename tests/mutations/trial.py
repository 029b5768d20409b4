"""Try a change in a copy of the tree: run the tests until one fails, then see that it passes without the change."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LEFT_OUT = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache", "*.egg-info", "runs", "build", ".ci-out")
INTERPRETED = "interpret"  # the folder of tests that run Triton's kernels in its interpreter
EACH_TEST_S = 60


class Verdict(NamedTuple):
    """What became of a change.

    Attributes:
        kind: "killed"; "survived": all chosen tests pass; "timeout": none failed, but not all ran in the time;
            "unsure": the test that failed also fails without the change; "stale": its place is gone.
        by: the test that failed, or what else there is to say.
        seconds: how long it took.
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
        self.passes: dict[str, bool] = {}  # tests without a change
        self.process: subprocess.Popen | None = None

    def judge(self, path: Path, changed: str, tests: Sequence[str], limit: float) -> Verdict:
        """Change a file, run the tests in their order, and mend it.

        Args:
            path: the file, relative to the tree.
            changed: its changed text.
            tests: files, or pytest's `file::name`, in the order in which they run.
            limit: seconds for all of them.
        """
        began = time.monotonic()
        file = self.folder / path
        before = file.read_text()
        file.write_text(changed)
        try:
            kind, by = self._run(tests, limit)
        finally:
            file.write_text(before)
        if kind == "killed" and not self._passes(by, limit):
            kind = "unsure"
        return Verdict(kind, by, time.monotonic() - began)

    def _run(self, tests: Sequence[str], limit: float) -> tuple[str, str]:
        """The kind of verdict, and the first test that failed."""
        end = time.monotonic() + limit
        for part in _parts(tests):
            code, output = self._pytest(part, max(end - time.monotonic(), 1))
            if code is None:
                return "timeout", part[0]
            if code in (0, 5):  # 5: all tests of these files are left out on this machine
                continue
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?= - |$)", output, re.M)
            return "killed", failed[0] if failed else part[0]
        return "survived", "" if tests else "no test reaches it"

    def _passes(self, test: str, limit: float) -> bool:
        if test not in self.passes:
            collect = [] if "::" in test else ["--collect-only"]  # a file that could not be imported
            self.passes[test] = self._pytest([test, *collect], limit)[0] in (0, 5)
        return self.passes[test]

    def _pytest(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """The exit code, None after the limit, and what was printed; no process is left behind."""
        command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = str(self.folder)
        if _is_interpreted(tests[0]):
            environment["TRITON_INTERPRET"] = "1"
        self.process = process = subprocess.Popen(
            [*command, f"--timeout={EACH_TEST_S}"], cwd=self.folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            self.stop()

    def stop(self) -> None:
        """End the tests that run, and all processes that they started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _is_interpreted(test: str) -> bool:
    return f"/{INTERPRETED}/" in test


def _parts(tests: Sequence[str]) -> list[list[str]]:
    """The tests in their order, in runs that share an environment."""
    parts: list[list[str]] = []
    for test in tests:
        if parts and _is_interpreted(parts[-1][0]) == _is_interpreted(test):
            parts[-1].append(test)
        else:
            parts.append([test])
    return parts
