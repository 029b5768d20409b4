"""Broken copies of mpcore: each must turn its test file red. `python -m tests.mutations [WORD ...]` runs some or all.

Nothing is changed in place: the tree is copied, a mutation is applied to the copy, the test file runs there, and the
copy is mended again. A test file has `LIMIT_S` seconds; a hang counts as caught, and is shown as such.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests import mutations
from tests.mutations import Mutation

ROOT = Path(__file__).parents[2]
LIMIT_S = 150
WORKERS = 2
MUTATIONS: list[Mutation] = [
    mutation
    for part in pkgutil.iter_modules(mutations.__path__)
    if part.name != "__main__"
    for mutation in importlib.import_module(f"tests.mutations.{part.name}").MUTATIONS
]


def judge(tree: Path, mutation: Mutation) -> tuple[str, float]:
    """Break the copy, run the tests, mend the copy; return the verdict and the seconds it took."""
    file = tree / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        return f"STALE: its text is there {text.count(mutation.old)} times", 0.0
    start = time.monotonic()
    file.write_text(text.replace(mutation.old, mutation.new))
    interpreter = {"TRITON_INTERPRET": "1"} if "/interpret/" in mutation.tests else {}
    command = [sys.executable, "-m", "pytest", mutation.tests, "-x", "-q", "-p", "no:cacheprovider", "--timeout=60"]
    try:
        run = subprocess.run(
            command,
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), **interpreter},
        )
        verdict = {0: "SURVIVED", 1: "caught"}.get(run.returncode, f"caught (exit {run.returncode})")
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        verdict += " by " + failed[0].split("::")[-1].split(" - ")[0] if failed else ""
    except subprocess.TimeoutExpired:
        verdict = "caught (hang)"
    finally:
        file.write_text(text)
    return verdict, time.monotonic() - start


def main(words: list[str]) -> int:
    """Judge the mutations whose name or tests hold any of the words (none: all); return how many weren't caught."""
    chosen = [m for m in MUTATIONS if not words or any(word in f"{m.what} {m.tests}" for word in words)]
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for index in range(len(chosen)):
        waiting.put(index)
    verdicts: dict[int, str] = {}

    def work(tree: Path) -> None:
        ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", "*.egg-info", ".ci-out", "shared")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            verdict, seconds = judge(tree, chosen[index])
            verdicts[index] = verdict
            print(f"{chosen[index].what:<48} {chosen[index].tests:<46} {seconds:5.0f} s  {verdict}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mpcore-mutations-") as folder:
        workers = [threading.Thread(target=work, args=(Path(folder) / str(i),)) for i in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    missed = [verdict for verdict in verdicts.values() if not verdict.startswith("caught")]
    print(f"{len(verdicts) - len(missed)} of {len(chosen)} mutations caught")
    return len(missed) + len(chosen) - len(verdicts)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
