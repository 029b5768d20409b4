"""Put small mistakes into a copy of the tree, and see which tests notice. The work tree is never changed.

python -m bench.mutations                       20 mutations of the lines that changed since this branch left main
python -m bench.mutations --all --seed 3 --count 100
python -m bench.mutations --module mpcore.layers --files 4

A line of the core is drawn three times as often as one of interop, the tools or the examples; text for people is never
drawn. The tests are the files nearest to the module, by name and imports, with ranks as threads. A kill counts only if
the same files pass without the mutation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tqdm import tqdm

from bench.mutations.choice import Project, changed_lines, default_base
from bench.mutations.operators import Mutant, candidates, changes_something
from tests.storeys import storey

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache", "*.egg-info", "runs", "build", ".ci-out")
WEIGHTS = {"core": 3}  # of a storey; 1 for the others


def possible(project: Project, args: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """Every mutation of the modules or lines that the command names."""
    changed = None
    if not args.all and not args.module:
        changed = changed_lines(project.root, args.since or default_base(project.root))
    return [
        (module, mutant)
        for module in project.library(*args.module)
        if changed is None or project.paths[module] in changed
        for mutant in candidates(project.texts[module], args.kernels)
        if changed is None or mutant.line in changed[project.paths[module]]
    ]


def drawn(project: Project, pool: Sequence[tuple[str, Mutant]], seed: int, count: int) -> list[tuple[str, Mutant]]:
    """Draw mutations by weight. Editing a function changes no other function's draws."""

    def turn(each: tuple[str, Mutant]) -> float:
        module, mutant = each
        weight = WEIGHTS.get(storey(module), 1) if module.startswith("mpcore") else 1
        return -(Random(f"{seed}/{mutant.key(module, project.texts[module])}").random() ** (1 / weight))

    found = []
    for module, mutant in sorted(pool, key=turn):
        if len(found) == count:
            break
        if changes_something(project.texts[module], mutant):
            found.append((module, mutant))
    return found


def passes(folder: Path, tests: Sequence[str], limit: float) -> tuple[bool | None, str]:
    """Run tests in a copy: whether all pass (None: the time was over), and the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--simulate", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    try:
        run = subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True, text=True,
                             timeout=limit)  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    failed = [line.split()[1] for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return run.returncode in (0, 5), (failed or [tests[0]])[0]


def judge(project: Project, folder: Path, module: str, mutant: Mutant, args: argparse.Namespace) -> dict[str, str]:
    """Try one mutation in the copy, and mend the copy."""
    path, source = folder / project.paths[module], project.texts[module]
    tests = args.tests or [str(project.paths[t]) for t in project.test_files(module, mutant.definition, args.files)]
    verdict, by = "survived", "no test reaches it"
    if tests:
        path.write_text(mutant.applied(source))
        try:
            good, by = passes(folder, tests, args.limit)
        finally:
            path.write_text(source)
        verdict = {None: "timeout", True: "survived", False: "killed"}[good]
        if verdict == "killed" and not passes(folder, [by], args.limit)[0]:
            verdict = "unsure"
    before, after = mutant.shown(source)
    return {"verdict": verdict, "module": module, "definition": mutant.definition, "operator": mutant.operator,
            "by": by if verdict in ("killed", "unsure") else "", "before": before, "after": after}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command. It reports: survivors are no failure of it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", metavar="REV", help="lines that differ from this commit")
    parser.add_argument("--all", action="store_true", help="the whole library")
    parser.add_argument("--module", nargs="+", default=[], metavar="NAME", help="these modules or packages")
    parser.add_argument("--kernels", action="store_true", help="also the bodies of Triton's kernels")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--count", type=int, default=20, metavar="K")
    parser.add_argument("--files", type=int, default=4, metavar="K", help="test files for each mutation (default 4)")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="these tests instead")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds for each mutation (default 600)")
    parser.add_argument("--list", action="store_true", help="show the mutations, run nothing")
    parser.add_argument("--record", metavar="FILE", type=Path, help="append each verdict to this file, as JSON lines")
    args = parser.parse_args(argv)
    project = Project(ROOT)
    pool = possible(project, args)
    chosen = drawn(project, pool, args.seed, args.count)
    print(f"{len(chosen)} of {len(pool)} possible changes")
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutations-") as parent:
        folder = Path(parent) / "tree"
        if not args.list:
            shutil.copytree(ROOT, folder, symlinks=True, ignore=LEFT_OUT)
        for module, mutant in tqdm(chosen, unit="mutation", disable=args.list):
            if args.list:
                before, after = mutant.shown(project.texts[module])
                row = {"verdict": "drawn", "module": module, "definition": mutant.definition, "by": "",
                       "operator": mutant.operator, "before": before, "after": after}  # fmt: skip
            else:
                row = judge(project, folder, module, mutant, args)
            counts[row["verdict"]] += 1
            tqdm.write(
                "{verdict:<9} {operator} in {module}:{definition} {by}\n    - {before}\n    + {after}".format(**row)
            )
            if args.record is not None:
                with args.record.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
