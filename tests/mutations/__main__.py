"""Put small mistakes into copies of the library, and see which the tests notice. The work tree is never changed.

python -m tests.mutations                          what changed since this branch left main, 20 drawn mutations
python -m tests.mutations --all --seed 1 2 --count 15
python -m tests.mutations --module mpcore.layers --seed 7
python -m tests.mutations --hand [WORD ..]         the hand-written ones (of these areas, or with these words)
python -m tests.mutations --hand --list            only see whether their places are there
python -m tests.mutations --all --seed 3 --count 1000 --new 20 --record tests/mutations/drawn.json
                                                   the next 20 of the 1000 that the file has no verdict on

Run `python -m tests.mutations.lines` before the first, and after a change of the library.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from tests.mutations import operators, report
from tests.mutations.choice import Project, changed_lines, default_base
from tests.mutations.hand import MUTATIONS
from tests.mutations.lines import Lines
from tests.mutations.operators import Mutant
from tests.mutations.patterns import StaleError, locate
from tests.mutations.record import Record
from tests.mutations.report import Row
from tests.mutations.trial import Copy, Verdict, copies

ROOT = Path(__file__).parents[2]


class Trial(NamedTuple):
    """A mutation to try: its group, its module, the change, the tests whose ranks are threads, and then other tests."""

    group: str
    module: str
    mutant: Mutant
    tests: Sequence[str] = ()
    others: Sequence[str] = ()


def possible(project: Project, args: argparse.Namespace) -> list[Trial]:
    """Every mutation of the modules that the command names."""
    modules = project.library(*args.module) if args.module else project.library()
    changed = None
    if not args.all and not args.module:
        changed = changed_lines(project.root, args.since or default_base(project.root))
    pool = [
        Trial(".".join(module.split(".")[:2]), module, mutant)
        for module in modules if changed is None or project.paths[module] in changed
        for mutant in operators.candidates(project.texts[module], args.kernels)
        if changed is None or mutant.line in changed[project.paths[module]]
    ]  # fmt: skip
    print(f"{len(pool)} possible changes in {len({trial.module for trial in pool})} modules")
    return pool


def drawn(project: Project, pool: Sequence[Trial], args: argparse.Namespace) -> Iterator[Trial]:
    """The mutations that the seeds draw."""
    for seed in args.seed:
        order = sorted(pool, key=lambda each: each.mutant.turn(seed, each.module, project.texts[each.module]))
        valid = (each for each in order if operators.changes_something(project.texts[each.module], each.mutant))
        yield from itertools.islice(valid, args.count)


def with_tests(project: Project, trials: Sequence[Trial], args: argparse.Namespace) -> Iterator[Trial]:
    """The drawn trials, each with the tests that run its line, or with the nearest files."""
    if args.hand is not None:
        yield from trials
        return
    lines = Lines()
    for trial in trials:
        tests = args.written or lines.tests(project, trial.module, trial.mutant, args.budget)
        others = args.written or _files(project, trial.module, trial.mutant, args.files)
        yield trial._replace(tests=tests, others=others)  # a new test may need ranks that are processes


def by_hand(project: Project, words: Sequence[str], files: int) -> tuple[list[Trial], list[Row]]:
    """The hand-written mutations with these words, and those whose place is gone."""
    trials, stale = [], []
    for hand in MUTATIONS:
        if not words or any(word == hand.area or word in f"{hand.what} {hand.definition}" for word in words):
            try:
                module, mutant = locate(project, hand)
            except StaleError as error:
                stale.append(Row(hand.area, hand.what, hand.definition, "", "", Verdict("stale", str(error))))
                continue
            named = project.named_tests(hand.tests, module, hand.definition)
            trials.append(Trial(hand.area, module, mutant, [], [*named, *_files(project, module, mutant, files)]))
    return trials, stale


def _files(project: Project, module: str, mutant: Mutant, count: int) -> list[str]:
    return [str(project.paths[test]) for test in project.test_files(module, mutant.definition, count)]


def judge(
    project: Project,
    trials: Iterable[Trial],
    limit: float,
    workers: int,
    record: Record | None = None,
    late: bool = False,
) -> list[Row]:
    """Try them, each worker in a copy of its own, and keep each verdict in the record."""
    waiting, lock, rows = enumerate(trials), threading.Lock(), {}
    bar = tqdm(unit="mutation", dynamic_ncols=True)

    def following() -> tuple[int, Trial] | None:
        with lock:
            return next(waiting, None)

    def work(copy: Copy) -> None:
        while (each := following()) is not None:
            i, trial = each
            source, mutant = project.texts[trial.module], trial.mutant
            path, changed = project.paths[trial.module], mutant.applied(source)
            verdict = Verdict("survived", "no test reaches it")
            for tests in ((trial.tests, True), (trial.others, False)):
                if tests[0] and verdict.kind != "killed":
                    verdict = copy.judge(path, changed, tests[0], limit, simulated=tests[1])
            before, after = mutant.shown(source)
            with lock:
                rows[i] = Row(trial.group, mutant.operator, mutant.definition, before, after, verdict)
                if record is not None:
                    record.add(trial.module, mutant, rows[i], late)
            bar.write(line(trial.module, rows[i]))
            bar.update()
            bar.set_postfix(Counter(row.kind for row in rows.values()))

    with bar, copies(project.root, workers) as each, ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(work, each))
        finally:  # on an interrupt, and on an error of one worker: nothing more begins
            waiting = iter(())
    return [rows[i] for i in sorted(rows)]


def line(module: str, row: Row) -> str:
    """A mutation on two lines: its verdict, and its change."""
    verdict = row.verdict
    return (
        f"{row.kind:<10} {verdict.seconds:4.0f} s  {row.operator} in {module}:{row.definition}  {verdict.by}\n"
        f"    - {row.before}\n    + {row.after}"
    )


def main(argv: list[str] | None = None) -> int:
    """The command. It reports: survivors are no failure of it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", metavar="REV", help="lines that differ from this commit")
    parser.add_argument("--all", action="store_true", help="the whole library")
    parser.add_argument("--module", nargs="+", metavar="NAME", help="these modules or packages (mpcore.layers)")
    parser.add_argument("--kernels", action="store_true", help="also the bodies of Triton's kernels")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--count", type=int, default=20, metavar="K", help="how many a seed (default 20)")
    parser.add_argument("--hand", nargs="*", metavar="WORD", help="the hand-written mutations instead")
    parser.add_argument("--list", action="store_true", help="show the mutations and their tests, run nothing")
    parser.add_argument("--budget", type=float, default=20, metavar="S", help="tests of so many seconds (default 20)")
    parser.add_argument("--limit", type=float, default=120, metavar="S", help="processor seconds each (default 120)")
    parser.add_argument("--files", type=int, default=2, metavar="K",
                        help="then try survivors by all tests of the K nearest files (default 2)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, metavar="K", help="how many at a time (default 2)")
    parser.add_argument("--record", metavar="FILE", type=Path, help="keep verdicts here, and don't try those again")
    parser.add_argument("--again", action="store_true", help="with --record: try survivors once more")
    parser.add_argument("--written", nargs="+", metavar="TEST", help="with --record: try survivors with new tests")
    parser.add_argument(
        "--new", type=int, metavar="K", help="with --record: try only so many more; 0 writes the page alone"
    )
    parser.add_argument("--write", metavar="FILE", type=Path, help="put the result into this page")
    args = parser.parse_args(argv)
    project = Project(ROOT)
    stale: list[Row] = []
    record = None if args.record is None else Record(args.record, project)
    known: dict[Trial, Row] = {}
    if args.hand is None:
        pool = possible(project, args)
        known = {each: row for each in pool if record and (row := record.get(each.module, each.mutant))}
        if args.again or args.written:
            trials = [each for each, row in known.items() if row.kind in ("survived", "timeout", "unsure")]
        else:
            trials = [each for each in drawn(project, pool, args) if each not in known][: args.new]
    else:
        trials, stale = by_hand(project, args.hand, args.files)
        print(f"{len(trials)} of {len(trials) + len(stale)} hand-written mutations have their place")
    if args.list:
        for group, module, mutant, tests, others in with_tests(project, trials, args):
            before, after = mutant.shown(project.texts[module])
            print(f"{group}: {mutant.operator} in {module}:{mutant.definition}, line {mutant.line}\n"
                  f"    - {before}\n    + {after}\n    {' '.join([*tests, *others])}")  # fmt: skip
        print("\n".join(report.left(stale)) if stale else "none is stale")
        return 0
    chosen = with_tests(project, trials, args)
    tried = judge(project, chosen, args.limit, args.workers, record, late=bool(args.written)) if trials else []
    known |= dict(zip(trials, tried, strict=True))
    if record:  # which also knows what became of a mutation at first
        known = {each: record.get(each.module, each.mutant) or row for each, row in known.items()}
    rows = [*known.values(), *stale]
    print("\n".join([*report.table(rows), "", *report.left(rows)]))
    if args.write is not None:
        command = f"python -m tests.mutations {shlex.join(sys.argv[1:] if argv is None else argv)}"
        title, name = ("Drawn", "drawn") if args.hand is None else ("Hand-written", "hand")
        part = report.section(name, f"{title} mutations", command, str(datetime.date.today()), rows)
        old = args.write.read_text() if args.write.is_file() else ""
        args.write.write_text(report.page(old, {name: part}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
