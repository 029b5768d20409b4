"""Record which tests run which lines, so that a mutation is tried first by the fastest tests that run its line.

python -m tests.mutations.lines build/lines.json [TEST_FILE ..]     files that the record has are left out
python -m tests.mutations --all --seed 7 --lines build/lines.json   the mutations use it
"""

from __future__ import annotations

import argparse
import ast
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.mutations.choice import Project

ROOT = Path(__file__).parents[2]
FOLDER = "MPCORE_LINES"  # the environment variable that names the folder of what is running and what ran
CALLS = 8  # of a function in one test; a line that runs later only is not seen
KEPT = 12  # tests of a line

# --- in the processes of the tests ------------------------------------------------------------------------------------


def running(folder: Path) -> memoryview:
    """The number of the test that runs, shared by all processes."""
    with (folder / "running").open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")


def follow(folder: str, root: Path = ROOT) -> None:
    """From now on, write each line of the library that this process runs to a file of the folder, once a test."""
    number, library = running(Path(folder)), f"{root / 'mpcore'}{os.sep}"
    out = os.open(Path(folder) / f"{os.getpid()}.lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    inside: dict[CodeType, bool] = {}
    calls: dict[CodeType, int] = {}
    seen: set[tuple[CodeType, int]] = set()
    last = -1

    def line(frame: FrameType, event: str, _: Any) -> Callable:
        code, at = frame.f_code, frame.f_lineno
        if event == "line" and (code, at) not in seen:
            seen.add((code, at))
            name = code.co_qualname.replace(".<locals>", "")
            where = os.path.relpath(code.co_filename, root)
            os.write(out, f"{last}\t{where}:{name}\t{at - code.co_firstlineno}\n".encode())
        return line

    def call(frame: FrameType, event: str, _: Any) -> Callable | None:
        nonlocal last
        code = frame.f_code
        if code not in inside:
            inside[code] = code.co_filename.startswith(library) and not code.co_name.endswith(">")
        if not inside[code]:
            return None
        if number[0] != last:
            last = number[0]
            calls.clear()
            seen.clear()
        calls[code] = calls.get(code, 0) + 1
        return line if calls[code] <= CALLS else None

    threading.settrace(call)
    sys.settrace(call)


class Recorder:
    """The plugin of pytest: it numbers the tests, and writes down how long each took."""

    def __init__(self, folder: str) -> None:
        self.number, self.folder, self.count = running(Path(folder)), Path(folder), 0
        follow(folder)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.count += 1
        self.number[0] = self.count
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with (self.folder / "tests").open("a") as file:
                file.write(f"{self.count}\t{report.nodeid}\t{report.duration:.2f}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin where the folder is named."""
    if FOLDER in os.environ:
        config.pluginmanager.register(Recorder(os.environ[FOLDER]))


# --- the record -------------------------------------------------------------------------------------------------------


class Lines:
    """For each line of each definition, its fastest tests.

    Args:
        path: the record, a JSON file; it is made where there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        kept = json.loads(path.read_text()) if path.is_file() else {}
        self.files: list[str] = kept.get("files", [])
        self.seconds: dict[str, float] = kept.get("seconds", {})
        self.tests: dict[str, dict[str, list[str]]] = kept.get("tests", {})

    def record(self, file: str, limit: float) -> int:
        """Run a test file, and add what its tests ran. Returns how many tests passed."""
        with tempfile.TemporaryDirectory(prefix="mpcore-lines-") as folder:
            (Path(folder) / "running").write_bytes(bytes(8))
            (Path(folder) / "tests").touch()
            words = ["-q", "-p", "no:cacheprovider", "-p", "tests.mutations.lines", "-m", "not slow"]
            environment = {**os.environ, FOLDER: folder, "OMP_NUM_THREADS": "1"}
            try:
                subprocess.run([sys.executable, "-m", "pytest", file, *words], cwd=ROOT, env=environment, timeout=limit,
                               capture_output=True, check=False)  # fmt: skip
            except subprocess.TimeoutExpired:
                print(f"{file}: not done after {limit:.0f} s; the tests that ended are kept")
            passed = self.add(Path(folder))
        self.files.append(file)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"files": self.files, "seconds": self.seconds, "tests": self.tests}) + "\n")
        return passed

    def add(self, folder: Path) -> int:
        """Add what the processes of a run wrote."""
        rows = (row.split("\t") for row in (folder / "tests").read_text().splitlines())
        named = {number: (test, float(seconds)) for number, test, seconds in rows}
        self.seconds |= dict(named.values())
        for file in folder.glob("*.lines"):
            for row in file.read_text().splitlines():
                number, definition, line = row.split("\t")
                if number in named:
                    tests = self.tests.setdefault(definition, {}).setdefault(line, [])
                    if named[number][0] not in tests:
                        tests.append(named[number][0])
                    tests[:] = sorted(tests, key=lambda test: (self._before(test, tests), self.seconds[test]))[:KEPT]
        return len(named)

    def _before(self, test: str, tests: Sequence[str]) -> int:
        """How many faster cases of the same test function there are: one case of each function comes first."""
        name = test.partition("[")[0]
        return sum(other.partition("[")[0] == name and (self.seconds[other], other) < (self.seconds[test], test)
                   for other in tests)  # fmt: skip

    def of(self, project: Project, module: str, definition: str, line: int, seconds: float) -> list[str]:
        """The fastest tests that run a line, as many as take these seconds; none where the record doesn't know it."""
        first = first_line(project, module, definition)
        known = self.tests.get(f"{project.paths[module]}:{definition}", {})
        before = [int(at) for at in known if int(at) <= line - first]
        tests = known[str(max(before))] if before else next(iter(known.values()), [])
        chosen: list[str] = []
        for test in tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
            if f"def {name.partition('[')[0]}(" in text and self.seconds[test] <= seconds:
                seconds -= self.seconds[test]
                chosen.append(test)
        return chosen


def first_line(project: Project, module: str, definition: str) -> int:
    """The first line of a definition, its decorators included."""
    node: ast.AST = project.trees[module]
    for name in filter(None, definition.split(".")):
        node = next((child for child in ast.walk(node) if getattr(child, "name", None) == name), node)
    decorators = getattr(node, "decorator_list", [])
    return min((each.lineno for each in (*decorators, node) if hasattr(each, "lineno")), default=1)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations.lines", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("record", type=Path, metavar="FILE", help="the record")
    parser.add_argument("files", nargs="*", metavar="TEST_FILE", help="which tests (default all)")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds for each file (default 600)")
    args = parser.parse_args(argv)
    lines, project = Lines(args.record), Project(ROOT)
    for file in args.files or [str(project.paths[test]) for test in project.tests]:
        if file not in lines.files:
            print(f"{file}: {lines.record(file, args.limit)} tests", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
