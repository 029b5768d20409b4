"""Broken copies of mpcore: each must turn its test file red, and be seen by `mpcore.verify` where that looks.

    python -m tests.mutations [WORD ...] [--only tests|verify] [--workers 2]
        [--write docs/mutations.md]

A word is an area (a module of this package) or a part of a name or of a test file's name; without words all are tried.
Nothing is changed in place: the tree is copied, a mutation is applied to the copy, `verify` and the test file run
there, and the copy is mended again. A test file has `LIMIT_S` seconds; a hang counts as caught, and is shown as such.
With `--write`, mutations that weren't tried stay as the file has them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import pkgutil
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tests import mutations
from tests.mutations import Mutation
from tests.mutations.reach import EXPLAINED, beyond

ROOT = Path(__file__).parents[2]
LIMIT_S = 150
TARGET = 0.95
MUTATIONS: list[tuple[str, Mutation]] = [
    (part.name, mutation)
    for part in pkgutil.iter_modules(mutations.__path__)
    if part.name not in ("__main__", "reach", "warm")
    for mutation in importlib.import_module(f"tests.mutations.{part.name}").MUTATIONS
]


class Result(NamedTuple):
    """What became of a mutation: what tests and `verify` said ("": not run), and the seconds both took."""

    area: str
    what: str
    tests: str = ""
    verify: str = ""
    seconds: float = 0.0


# --- one mutation -----------------------------------------------------------------------------------------------------


class Verifier:
    """`verify` on a copy of the tree: see `tests.mutations.warm`. Its first run, of the whole copy, sets the limit."""

    def __init__(self, tree: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutations.warm"], cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=_environment(tree),
        )  # fmt: skip
        began = time.monotonic()
        said = self.ask(600)
        if said:
            raise RuntimeError(f"verify sees a difference in the library as it is: {said}")
        self.limit = max(60.0, 10 * (time.monotonic() - began))

    def ask(self, limit: float) -> str:
        """What departs first, or ""."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{limit}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __call__(self) -> str:
        """The verdict."""
        said = self.ask(self.limit)
        return f"caught: {said}" if said else "SURVIVED"


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def run_tests(tree: Path, mutation: Mutation) -> str:
    """The verdict of the mutation's test file."""
    interpreter = {"TRITON_INTERPRET": "1"} if "/interpret/" in mutation.tests else {}
    command = [sys.executable, "-m", "pytest", mutation.tests, "-x", "-q", "-p", "no:cacheprovider", "--timeout=60"]
    command += ["-m", "not slow"]  # what `make test` runs must notice
    environment = {**_environment(tree), **interpreter}
    try:
        run = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return "caught (hang)"
    if run.returncode == 5 or re.search(r"^ERROR: (file or directory )?not found", run.stdout + run.stderr, re.M):
        return "STALE: no test ran"
    verdict = {0: "SURVIVED", 1: "caught"}.get(run.returncode, f"caught (exit {run.returncode})")
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return verdict + (" by " + failed[0].split("::")[-1].split(" - ")[0] if failed else "")


def judge(tree: Path, area: str, mutation: Mutation, verifier: Verifier | None, tests: bool) -> Result:
    """Break the copy, run both, mend the copy."""
    file = tree / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        stale = f"STALE: its text is there {text.count(mutation.old)} times"
        return Result(area, mutation.what, stale, stale)
    start, verdict, seen = time.monotonic(), "", ""
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        if verifier is not None:
            reason = beyond(mutation)
            seen = f"beyond: {reason}" if reason else verifier()
        if tests:
            verdict = run_tests(tree, mutation)
    finally:
        file.write_text(text)
    return Result(area, mutation.what, verdict, seen, time.monotonic() - start)


def judge_all(chosen: list[tuple[str, Mutation]], only: str | None, size: int) -> dict[tuple[str, str], Result]:
    """Judge on copies of the tree, several at a time."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for each in chosen:
        waiting.put(each)
    results: dict[tuple[str, str], Result] = {}

    def work(tree: Path) -> None:
        ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", "*.egg-info", ".ci-out", "shared", "runs")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        verifier = Verifier(tree) if only != "tests" else None
        while not waiting.empty():
            try:
                area, mutation = waiting.get_nowait()
            except queue.Empty:
                break
            result = judge(tree, area, mutation, verifier, only != "verify")
            results[area, mutation.what] = result
            print(f"{area}: {mutation.what:<48} {result.seconds:5.0f} s  tests {result.tests or '-'}; "
                  f"verify {result.verify or '-'}", flush=True)  # fmt: skip
        if verifier is not None:
            verifier.process.kill()
            verifier.process.wait()

    with tempfile.TemporaryDirectory(prefix="mpcore-mutations-") as folder:
        workers = [threading.Thread(target=work, args=(Path(folder) / str(i),)) for i in range(size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return results


# --- the report -------------------------------------------------------------------------------------------------------

HEAD = """# Mutations

Made by `python -m tests.mutations --write docs/mutations.md` (`make mutation`). The library is broken on purpose, one
place at a time. *Tests* is the test file of what is broken, until its first failure. *verify* is `mpcore.verify` on the
models and layouts of `tests.verify_models.PROOFS`, until the first difference; it compares a model under layouts with
the same model on one process, so what is wrong on one process too, or is no number of a step, is beyond it: such
mutations are not counted there, and each says why.

"""


def read(text: str) -> dict[tuple[str, str], Result]:
    """The results that a report holds."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and re.fullmatch(r"\d+", cells[4]) and not re.fullmatch(r"\d*", cells[1]):
            area, what, tests, verify, seconds = (cell.replace(r"\|", "|") for cell in cells)
            found[area, what] = Result(area, what, tests, verify, float(seconds))
    return found


def report(results: dict[tuple[str, str], Result]) -> str:
    """The tables, of the mutations that there are now."""
    rows = [results.get((area, m.what), Result(area, m.what)) for area, m in MUTATIONS]
    areas = list(dict.fromkeys(area for area, _ in MUTATIONS))
    lines = ["| area | mutations | tried on tests | caught | tried on verify | caught | seconds |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name in [*areas, "all"]:
        mine = [row for row in rows if name in (row.area, "all")]
        tests, seen = [r for r in mine if r.tests], [r for r in mine if r.verify and not r.verify.startswith("beyond")]
        lines.append(
            f"| {name} | {len(mine)} | {len(tests)} | {_share(r.tests for r in tests)} | {len(seen)} | "
            f"{_share(r.verify for r in seen)} | {sum(r.seconds for r in mine):.0f} |"
        )
    survivors = []
    for row in rows:
        for by, verdict in (("the tests", row.tests), ("verify", row.verify)):
            if _missed(verdict):
                why = EXPLAINED.get(row.what, "not explained yet")
                how = "not seen" if verdict == "SURVIVED" else f"not tried ({verdict})"
                survivors.append(f"- **{row.area}: {row.what}**, {how} by {by}: {why}")
    lines += [
        "",
        "## Survivors",
        "",
        *(survivors or ["None."]),
        "",
        "## Each",
        "",
        "| area | mutation | tests | verify | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [cell.replace("|", r"\|") for cell in (row.area, row.what, row.tests, row.verify)]
        lines.append(f"| {' | '.join(cells)} | {row.seconds:.0f} |")
    return HEAD + "\n".join(lines) + "\n"


def _share(verdicts) -> str:
    verdicts = list(verdicts)
    caught = sum(verdict.startswith("caught") for verdict in verdicts)
    return f"{caught} ({100 * caught / len(verdicts):.0f} %)" if verdicts else ""


def main(argv: list[str] | None = None) -> int:
    """The command: 1 if a survivor isn't explained, or fewer than `TARGET` are caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", help="areas, or parts of names (default: all)")
    parser.add_argument("--only", choices=("tests", "verify"), help="run one of them")
    parser.add_argument("--workers", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--write", metavar="FILE", type=Path)
    args = parser.parse_args(argv)
    words = args.words
    names = [(area, m.what) for area, m in MUTATIONS]
    assert len(names) == len(set(names)), "two mutations of one area have one name"
    areas = {area for area, _ in MUTATIONS}
    chosen = [
        (area, m) for area, m in MUTATIONS
        if not words or any(word == area if word in areas else word in f"{m.what} {m.tests}" for word in words)
    ]  # fmt: skip
    old = read(args.write.read_text()) if args.write is not None and args.write.is_file() else {}
    began = time.monotonic()
    new = judge_all(chosen, args.only, args.workers)
    for key, result in new.items():  # of one alone the other's verdict stays
        before = old.get(key, Result(*key))
        seconds = max(result.seconds, before.seconds) if args.only else result.seconds
        old[key] = Result(*key, result.tests or before.tests, result.verify or before.verify, seconds)
    if args.write is not None:
        args.write.write_text(report(old))
    bad = [r for r in new.values() if any(_missed(v) for v in (r.tests, r.verify)) and r.what not in EXPLAINED]
    tests, seen = [r.tests for r in new.values() if r.tests], [r.verify for r in new.values() if r.verify]
    seen = [verdict for verdict in seen if not verdict.startswith("beyond")]
    print(f"tests caught {_share(tests) or 0} of {len(tests)}, verify {_share(seen) or 0} of {len(seen)} in its reach, "
          f"in {time.monotonic() - began:.0f} s, {datetime.date.today()}")  # fmt: skip
    low = any(v and sum(x.startswith("caught") for x in v) < TARGET * len(v) for v in (tests, seen))
    return int(bool(bad) or low or len(new) < len(chosen))


def _missed(verdict: str) -> bool:
    return bool(verdict) and not verdict.startswith(("caught", "beyond"))


if __name__ == "__main__":
    sys.exit(main())
