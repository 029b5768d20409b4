"""A check of `mpcore preflight`, its result, and the loop that runs checks one after another."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mpcore.tools.verify import what_happened
from mpcore.tools.verify.pool import RankError

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"


class Skip(Exception):  # noqa: N818  (not an error)
    """Raised by a check that doesn't apply; its text says why."""


@dataclass(frozen=True)
class Check:
    """One check, printed as one line.

    Attributes:
        run: runs the check and returns the measured numbers as text. It raises ValueError with the problem and how to
            fix it, or `Skip` with the reason why the check doesn't apply.
        meaning: one sentence: what a failure means, and what to do.
        needed: if True and the check fails, later checks are skipped.
    """

    name: str
    run: Callable[[], str]
    meaning: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a check: its state is "ok", "FAILED" or "skipped", `detail` the numbers, the problem or why."""

    name: str
    state: str
    detail: str
    seconds: float = 0.0
    meaning: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8}{self.name:<26}{self.seconds:6.1f} s  {self.detail}".rstrip()


@dataclass(frozen=True)
class Options:
    """Facts about the run that checks may use.

    Attributes:
        ranks: the number of ranks, from the launcher's arguments; None: the product of the axes.
        each: the number of ranks per node; None if unknown.
        memory: bytes of memory per GPU; None if unknown.
        timeout: seconds that a toy run may take.
    """

    ranks: int | None = None
    each: int | None = None
    memory: float | None = None
    timeout: float = 120.0


def run_checks(checks: Sequence[Check], begin: Callable[[int], None] = lambda at: None) -> Iterator[Result]:
    """Run checks one after another, and yield each result. `begin` is called with the index of the next check."""
    stopped = ""
    for at, check in enumerate(checks):
        begin(at)
        began, state, detail = time.perf_counter(), OK, ""
        try:
            if stopped:
                raise Skip(f"{stopped} failed")
            detail = _run(check)
        except Skip as why:
            state, detail = SKIPPED, str(why)
        except RankError as error:
            state, detail = FAILED, what_happened(str(error))
        except Exception as error:  # a check runs the user's own code
            state, detail = FAILED, _explained(error)
        stopped = stopped or (check.name if check.needed and state == FAILED else "")
        yield Result(check.name, state, detail, time.perf_counter() - began, check.meaning)


def _run(check: Check) -> str:
    """Run a check, and run it again if a process crashed in native code: gloo does so once in some hundred runs."""
    try:
        return check.run()
    except RankError as error:
        crash = re.search(r"died \((SIGABRT|SIGBUS|SIGSEGV)\)", str(error))
        if crash is None:
            raise
    return f"{check.run()}; a process had crashed before ({crash[1]})".lstrip("; ")


def _explained(error: Exception) -> str:
    """Return the text of an error; for one of torch about a write in place, also its line and what to change."""
    if isinstance(error, ValueError | OSError):
        return str(error)
    text, frames = f"{type(error).__name__}: {error}", traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)]
    if not own or not re.search(r"modified (by an )?in-?place", text):
        return text
    return (
        f"{own[-1].filename}:{own[-1].lineno}, {own[-1].name}: a tensor is written to in place that shares its memory "
        f"with another result, or whose values a backward needs. Write to a clone, or return a new tensor. {text}"
    )


def verdict(results: Sequence[Result]) -> str:
    """Say in a sentence whether to start the run, and what each failure means."""
    failed = [result for result in results if result.state == FAILED]
    seconds = sum(result.seconds for result in results)
    if not failed:
        return f"Nothing found that speaks against this run: {len(results)} checks in {seconds:.0f} s."
    names = ", ".join(result.name for result in failed)
    lines = [f"Don't start this run: {len(failed)} of {len(results)} checks failed ({names})."]
    return "\n".join(lines + [f"- {result.name}: {result.meaning}." for result in failed if result.meaning])
