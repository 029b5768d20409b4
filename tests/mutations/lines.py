"""Which tests run which line, as coverage.py records it, so that a mutation is tried by the fastest of them.

python -m tests.mutations.lines                      record the test files that the record, build/lines, lacks
python -m tests.mutations.lines TEST_FILE ..         record these anew
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import re
import sqlite3
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from coverage import CoverageData
from coverage.exceptions import CoverageException

from tests.mutations.choice import Project
from tests.mutations.operators import Mutant
from tests.mutations.trial import NOT_SLOW, SIMULATED, Copy, copies

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "lines"
OTHERS = ("tests.slurm", "tests.test_mutations", "tests.test_notebooks", "tests.test_two_hosts",
          "tests.kernels.test_interpreter")  # it runs files that are recorded by themselves  # fmt: skip
MOST, NEAR = 80, 4  # tests of a mutation, and nearest test files


class Lines:
    """The tests of each line, in coverage.py's file of a folder, and beside it the seconds that each test takes.

    Args:
        folder: the record; it is made where there is none.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.times = folder / "lines.db", folder / "seconds.json"
        self.data = CoverageData(str(self.path))
        self.data.read()
        self.lock = threading.Lock()
        kept = json.loads(self.times.read_text()) if self.times.is_file() else {}
        self.seconds: dict[str, dict[str, float]] = kept  # of each file, its tests
        self.known = {test: seconds for tests in kept.values() for test, seconds in tests.items()}
        self.of_file = cache(self.data.contexts_by_lineno)

    def record(self, copy: Copy, file: str, limit: float, words: Sequence[str] = SIMULATED) -> str:
        """Run a test file, and add what its tests ran. Returns how it went.

        A test that ends the process, or takes all the time, is left out, and the file runs again without it.
        """
        passed, out, how = {}, [], []
        if file in self.seconds:  # lines that it ran when it was recorded before
            with self.lock, contextlib.closing(sqlite3.connect(self.path)) as known, known:
                old = f"SELECT id FROM context WHERE context LIKE '{file}::%'"
                known.execute(f"DELETE FROM line_bits WHERE context_id IN ({old})")
        with tempfile.TemporaryDirectory(prefix="mpcore-lines-") as part:
            for i in range(4):
                lines = Path(part) / str(i)
                done = [*passed, *out]
                answer = copy.run([file], [*words, *NOT_SLOW], limit, str(lines), stop=False, without=done)
                passed |= {test: seconds for what, test, seconds in answer["said"] if what == "passed"}
                for each in Path(part).glob(f"{i}*"):  # its own, and those of the processes that it started
                    data = CoverageData(str(each))
                    with self.lock, contextlib.suppress(CoverageException):  # one that was killed while it wrote
                        data.read()
                        self.data.update(data)
                began = [test for what, test, _ in answer["said"] if what == "began"]
                how.append(answer["end"])
                if answer["end"] in ("ended", "cpu") or not began:
                    break
                out += [test for test in began if test not in passed]
        with self.lock:
            self.seconds[file] = passed
            self.times.write_text(json.dumps(self.seconds) + "\n")
        return f"{len(passed)} tests, {' '.join(how)}"

    def tests(self, project: Project, module: str, mutant: Mutant, seconds: float) -> list[str]:
        """The fastest tests that run the line, as many as take these seconds.

        First come cases whose id has a word of the line, such as a flag's name, and then one case of each function.
        Tests in the nearest files come before others, the nearest first: they compare what the module computes, and
        others only run it.
        Tests that enter the body of an `if` come first if the line is its condition: they alone see a refusal.
        Where no test runs the line itself: those of the statement, the definition, or what names it in the module.
        """
        of_line = self.of_file(str(project.paths[module]))

        def known(lines: Sequence[int]) -> set[str]:
            return {test for line in lines for test in of_line.get(line, ()) if test in self.known}

        found = next(filter(None, map(known, scopes(project.trees[module], mutant.line))), set())
        ranked = project.ranked(module, mutant.definition)[:NEAR]
        near = {str(project.paths[test]): i for i, test in enumerate(ranked)}
        inside = known(branch(project.trees[module], mutant.line)) & found
        line = mutant.shown(project.texts[module])[0]
        code = re.sub(r"\"[^\"]*\"|'[^']*'", lambda text: "" if " " in text[0] else text[0], line)  # without sentences
        words = {*re.findall(r"\w{4,}", code)} - {"None", "True", "False"}
        functions: Counter[str] = Counter()
        named: Counter[str] = Counter()
        turns = []
        for elsewhere, cost, test in sorted((test not in inside, self.known[test], test) for test in found):
            name = test.partition("[")[0]
            functions[name] += 1
            named[name] += bool(says := words & {*re.findall(r"\w{4,}", test.partition("[")[2])})
            file = Path(test.partition("::")[0])
            far = near.get(str(file), NEAR + (not {*module.split(".")} & {*file.parts}))
            few = bool(says) and named[name] <= 3
            turns.append((elsewhere, not few, functions[name] > 1, far, functions[name] > 3, cost, test))
        chosen: list[str] = []
        for *_, cost, test in sorted(turns):
            if len(chosen) < MOST and (cost <= seconds or not chosen):
                seconds -= cost
                chosen.append(test)
        return chosen


def scopes(tree: ast.Module, line: int) -> Iterator[list[int]]:
    """The lines whose tests may see a change of a line, the best first."""
    chain: list[ast.AST] = [tree]  # the statements around the line, the innermost last
    while inner := [node for node in ast.walk(chain[-1]) if node is not chain[-1] and _within(node, line)]:
        chain.append(inner[0])
    functions = [node for node in chain if isinstance(node, ast.FunctionDef) and line >= node.body[0].lineno]
    if functions:  # what stands elsewhere runs when the module is imported, in whichever test that is
        last, body = chain[-1], getattr(chain[-1], "body", None)
        yield [line]
        yield list(range(last.lineno, body[0].lineno if isinstance(body, list) else last.end_lineno + 1))  # type: ignore[attr-defined]
    for node in reversed(chain[1:]):
        if isinstance(node, ast.FunctionDef):
            yield _body(node)
    stored = [] if functions else [x for x in ast.walk(chain[-1]) if isinstance(getattr(x, "ctx", None), ast.Store)]
    names = {_name(node) for node in (*chain, *stored)} - {""}
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    yield sorted({x.lineno for node in bodies for each in node.body for x in ast.walk(each) if _name(x) in names})
    for node in reversed(chain):
        if isinstance(node, ast.ClassDef | ast.Module):
            yield [n for each in ast.walk(node) if isinstance(each, ast.FunctionDef) for n in _body(each)]


def branch(tree: ast.Module, line: int) -> list[int]:
    """The lines of the body of the `if` whose condition a line is part of."""
    found = [x for x in ast.walk(tree) if isinstance(x, ast.If) and x.lineno <= line < x.body[0].lineno]
    return [x.lineno for x in found[-1].body] if found else []


def _name(node: ast.AST) -> str:
    """The name of a class, a variable or an attribute."""
    return next((getattr(node, key) for key in ("id", "attr", "name") if isinstance(getattr(node, key, None), str)), "")


def _within(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)


def _body(node: ast.FunctionDef) -> list[int]:
    return list(range(node.body[0].lineno, (node.end_lineno or 0) + 1))


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations.lines", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("files", nargs="*", metavar="TEST_FILE", help="which tests (default all)")
    parser.add_argument("--limit", type=float, default=200, metavar="S", help="processor seconds a file (default 200)")
    parser.add_argument("--workers", type=int, default=2, metavar="K", help="how many at a time (default 2)")
    args = parser.parse_args(argv)
    lines, project = Lines(), Project(ROOT)
    files = [str(project.paths[test]) for test in project.tests if not test.startswith(OTHERS)]
    waiting = args.files or [file for file in sorted(files) if file not in lines.seconds]

    def work(copy: Copy) -> None:
        while waiting:
            file = waiting.pop(0)
            print(f"{file}: {lines.record(copy, file, args.limit)}", flush=True)

    with copies(ROOT, args.workers) as each, ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(work, each))
    return 0


if __name__ == "__main__":
    sys.exit(main())
