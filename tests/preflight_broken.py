"""The trial of `mpcore preflight` on broken libraries: which check finds each planted bug, and with which sentence.

python -m tests.preflight_broken                      all cases of `tests.broken_runs` and `tests.preflight.planted`
python -m tests.preflight_broken --only "row bias"    those with these words
python -m tests.preflight_broken --write docs/preflight.md      put what was found into the table of this page

Each case is a small mistake in one module, and the flags of the smallest run that can show it. A process that has
imported torch is forked; the fork imports the library with the mistake in it, and forks the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.broken_runs import PITFALLS, Case
from tests.mutations.choice import Project
from tests.mutations.patterns import locate

SMALL = "--steps 6 --global-batch 16 --micro-batch 1 --seq-len 32 --layers 4 --device cpu"
LIMIT_S, TOY_S = 200.0, 40.0
RANKS = 4
WARM = ("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "numpy", "tqdm", "triton")


class Mutated(importlib.abc.MetaPathFinder):
    """Imports one module from a changed text."""

    def __init__(self, module: str, text: str) -> None:
        self.module, self.text = module, text

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """As of `importlib`: nothing for other modules."""
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin, self.text)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.changed = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.changed, self.path, "exec", dont_inherit=True)


@contextmanager
def silent(path: Path) -> Iterator[None]:
    """Write what this process and its children print to a file."""
    kept = [os.dup(1), os.dup(2)]
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)


def first_failure(words: str, folder: str) -> dict[str, Any]:
    """Run the checks before `rank killed` until one fails; return it, and a hash of each run of a toy."""
    import torch

    from mpcore.tools.preflight import FAILED, Command, Options, checks_of, run_checks
    from mpcore.tools.preflight.training import Preflight
    from mpcore.tools.verify.pool import Pool

    torch.set_num_threads(1)
    pool = Pool(RANKS, start="fork", grace=1.0)
    pool(1, int)  # forked before anything is computed here
    options, runs = Options(timeout=TOY_S), {}

    def hashed(key: str, value: Any) -> None:
        runs[key] = sha256(pickle.dumps(repr(value))).hexdigest()

    if ":" in words:
        target, *flags = words.split()
        checks = checks_of(Command(target, flags), options, pool)
    else:
        preflight = Preflight("examples.gpt.pretrain", [*words.split(), "--out", f"{folder}/out"], options, pool)
        train = preflight.train

        def recorded(toy: Any, out: str, **how: Any) -> list[Any]:
            ranks = train(toy, out, **how)
            seen = [
                (r.losses, r.norms, r.scales, r.validation, sorted((name, x.tolist()) for name, x in r.state.items()))
                for r in ranks
            ]
            hashed(f"{out} {sorted(how)}", seen)
            return ranks

        preflight.train = recorded  # type: ignore[method-assign]
        checks = preflight.checks()[:-1]
    try:
        results = []
        for result in run_checks(checks):
            results.append(result)
            if result.state == FAILED:
                return {"found": {"check": result.name, "sentence": " ".join(result.detail.split())}, "runs": runs}
        if ":" in words:
            hashed(words, [result.detail for result in results])
        return {"found": None, "runs": runs}
    finally:
        pool.stop()


def broken(words: str, folder: str, bug: str) -> dict[str, Any]:
    """As `first_failure`, with one of `tests.preflight.planted.BUGS` in this process and its forks."""
    from pkgutil import resolve_name
    from unittest import mock

    from tests.preflight.planted import BUGS

    with mock.patch(BUGS[bug].place, BUGS[bug].instead(resolve_name(BUGS[bug].place))):
        return first_failure(words, folder)


def reports(folder: str) -> list[Case]:
    """The cases of `tests.preflight.planted`, which imports the library."""
    from tests.preflight.planted import BUGS

    either = "|against torch|data", "|torch's of the same logits"
    return [
        Case("report", what, bug.flags, bug.check + either[0], bug.sentence + either[1]) for what, bug in BUGS.items()
    ]


def in_a_fork(function: Callable[..., Any], *args: Any, change: tuple[str, str] | None = None) -> Any:
    """Call `function(*args, folder)` in a fork, in which a module has another text: `change`, its name and its text."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        os.setpgrp()
        with tempfile.TemporaryDirectory(prefix="preflight-trial-") as folder:
            try:
                with silent(Path(folder) / "said.txt"):
                    if change is not None:
                        sys.meta_path.insert(0, Mutated(*change))
                    got = function(*args, folder=folder)
            except BaseException as error:  # told by the one who waits
                got = {"found": {"check": "import", "sentence": f"{type(error).__name__}: {error}"}, "runs": {}}
            theirs.send(got)
        os._exit(0)

    process: Any = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        if ours.poll(LIMIT_S):
            return ours.recv()
        return {"found": {"check": "none", "sentence": f"no end after {LIMIT_S:.0f} s"}, "runs": {}}
    except EOFError:
        return {"found": {"check": "none", "sentence": "the process died"}, "runs": {}}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def sort(case: Case, got: dict[str, Any], want: dict[str, str]) -> str:
    """Say what became of a case: found, found with another sentence, missed, without effect, or in one process too."""
    found = got["found"]
    if found is not None:
        right = found["check"] in case.check.split("|") and re.search(case.sentence, found["sentence"])
        return "found" if right else "found by another sentence"
    changed = [name for name, run in got["runs"].items() if run != want.get(name)]
    if not changed:
        return "without effect"
    return "in one process too" if any(name.startswith(("dense", "dtype-dense")) for name in changed) else "missed"


MARKS = "<!-- broken -->\n", "<!-- /broken -->"
HEAD = "| pitfall | planted | flags of the run | found by | what it says |\n|---|---|---|---|---|\n"


def written(page: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page with these rows in its table, in the place of those of the same bug."""
    before, table, after = re.split(f"{MARKS[0]}|{MARKS[1]}", page)
    lines = {line.split(" | ")[1]: line for line in table.splitlines()[2:]}
    for row in rows:
        found = row["check"] if row["kind"] == "found" else f"**{row['kind']}** {row['check']}"
        sentence = row["sentence"].replace(f"{Path.cwd()}/", "")
        told = [cut(sentence).replace("|", "\\|"), *([] if row["kind"] == "found" else ["not as it should be"])]
        lines[row["what"]] = f"| {row['number']} | {row['what']} | `{row['flags']}` | {found} | {'; '.join(told)} |"
    return f"{before}{MARKS[0]}{HEAD}" + "".join(f"{line}\n" for line in lines.values()) + MARKS[1] + after


def cut(sentence: str, most: int = 400) -> str:
    """The begin of a sentence."""
    return sentence if len(sentence) <= most else sentence[:most].rpartition(" ")[0] + " .."


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if a case that preflight has to find was not found with its sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.preflight_broken", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="cases with any of these words in their name")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the cases that ran into this page's table")
    args = parser.parse_args(argv)
    project = Project(Path(__file__).parents[1])
    for name in WARM:
        importlib.import_module(name)
    cases = [*PITFALLS, *in_a_fork(reports)]
    cases = [case for case in cases if not args.only or any(words in case.name for words in args.only)]
    changes: dict[Case, tuple[str, str]] = {}
    for case in cases:
        if case.hand is not None:
            module, mutant = locate(project, case.hand)
            changes[case] = module, mutant.applied(project.texts[module])
    sound: dict[str, dict[str, str]] = {}
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases, 1):
        words = case.flags if ":" in case.flags else f"{SMALL} {case.flags}"
        began = time.monotonic()
        if case.hand is None:
            got = in_a_fork(partial(broken, words, bug=case.what))
        else:
            got = in_a_fork(partial(first_failure, words), change=changes[case])
        seconds = time.monotonic() - began
        if got["found"] is None and words not in sound:
            without = in_a_fork(partial(first_failure, words))
            assert without["found"] is None, (words, without["found"])
            sound[words] = without["runs"]
        kind = sort(case, got, sound.get(words, {}))
        found = got["found"] or {"check": "", "sentence": ""}
        rows.append({"number": case.number, "what": case.what, "flags": case.flags, "kind": kind, **found})
        print(f"{number} of {len(cases)}, {seconds:.0f} s: {case.name}: {kind}: {found['check']}: "
              f"{found['sentence'][:400]}", flush=True)  # fmt: skip
    kinds = Counter(row["kind"] for row in rows)
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), f"of {len(rows)} cases")
    if args.write is not None:
        args.write.write_text(written(args.write.read_text(), rows))
    return int(any(row["kind"] != "found" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
