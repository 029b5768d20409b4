"""Tables and the page of what was tried."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.mutations.notes import EQUIVALENT, NOTES
from tests.mutations.trial import Verdict

KINDS = ("killed", "survived", "timeout", "equivalent", "unsure", "stale")
HEAD = """# Mutations

A mutation is a small mistake that is put into a copy of the library on purpose. The tests run in the copy until one of
them fails. A mutation that no test notices has survived: either a test is missing, or the change means nothing.
`make mutation` (`python -m tests.mutations --help`) tries two kinds and writes this page.

- **Drawn mutations.** A seeded mutator changes one place of the syntax tree: a comparison, an operator, a constant, a
  default, a condition, a `dim`; it drops a statement, an argument, an early return or a refusal, or swaps two
  arguments. Every possible change of the library is equally likely, text for people excepted. A seed draws
  them in the order of a hash of each, so an edited function changes no other function's draws. The bodies of Triton's
  kernels are drawn with `--kernels` alone.
- **Hand-written mutations.** `tests/mutations/hand.py` holds slips that would be silent: the loss falls, and a number
  is wrong. Each names a definition and the shape of an expression, no file and no line.

`python -m tests.mutations.lines` records once which tests run which line, with coverage.py: ranks are threads of one
process, and the processes that a test starts are recorded too. Each mutation is tried by the fastest of the tests
that run its line, one case of each test, those of the nearest files first (same name, then imports, or same folder);
what survives is tried by all tests of the two nearest files. A kill counts only if the same test passes without the
mutation. *by a test written since*: the mutation survived when it was drawn, and is killed now. *timeout*: no test
failed, but the time was over before all had run; it counts as not killed. *equivalent*: the change cannot be seen
(`tests/mutations/notes.py` says why); it is not counted. *unsure*: the test that failed fails without the mutation
too; not counted. *stale*: the place is gone; not counted.
"""


class Row(NamedTuple):
    """A mutation that was tried: its group (a package or an area), where it is, what it changes, what became of it.

    `first` is what became of it before tests were written for it.
    """

    group: str
    operator: str
    definition: str
    before: str
    after: str
    verdict: Verdict
    first: str = ""

    @property
    def since(self) -> bool:
        """Whether a test that was written since kills it."""
        return self.verdict.kind == "killed" and self.first in ("survived", "timeout")

    @property
    def key(self) -> tuple[str, str, str]:
        """How `notes.py` names it."""
        return self.definition, self.before, self.after

    @property
    def kind(self) -> str:
        """The verdict, or "equivalent" where the change cannot be seen."""
        alive = self.verdict.kind in ("survived", "timeout")
        return "equivalent" if alive and self.key in EQUIVALENT else self.verdict.kind

    @property
    def word(self) -> str:
        """What `notes.py` says."""
        return EQUIVALENT.get(self.key) or NOTES.get(self.key) or "not looked at yet"


def interval(killed: int, tried: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, "Probable inference", 1927), right at 0 and at 1 too."""
    if not tried:
        return 0.0, 1.0
    z, share = 1.96, killed / tried
    middle = share + z * z / (2 * tried)
    half = z * math.sqrt(share * (1 - share) / tried + z * z / (4 * tried * tried))
    return (middle - half) / (1 + z * z / tried), (middle + half) / (1 + z * z / tried)


def score(rows: Iterable[Row], at_first: bool = False) -> str:
    """Return the share of mutations that are killed, with its interval: at first, or by today's tests."""
    rows = list(rows)
    kinds = Counter(row.kind for row in rows)
    tried = kinds["killed"] + kinds["survived"] + kinds["timeout"]
    killed = kinds["killed"] - at_first * sum(row.since for row in rows)
    low, high = interval(killed, tried)
    return f"{100 * killed / max(tried, 1):.0f} % ({100 * low:.0f} to {100 * high:.0f} %)"


def table(rows: Sequence[Row]) -> list[str]:
    """A line a group, and one for all."""
    head = ("", "tried", "killed", "by a test written since", *KINDS[1:], "score at first (95 %)", "score (95 %)")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    groups = sorted({row.group for row in rows})
    for group in (*groups, *(["all"] if len(groups) > 1 else [])):
        mine = [row for row in rows if group in (row.group, "all")]
        kinds, since = Counter(row.kind for row in mine), sum(row.since for row in mine)
        counts = (len(mine), kinds["killed"] - since, since, *(kinds[kind] for kind in KINDS[1:]))
        lines.append(f"| {' | '.join(map(str, (group, *counts, score(mine, at_first=True), score(mine))))} |")
    return lines


def left(rows: Iterable[Row]) -> list[str]:
    """A bullet for each mutation that was not killed, with its change and the word on it."""
    lines = []
    for row in rows:
        if row.kind == "stale":
            lines.append(f"- stale, {row.operator} (`{row.definition}`): {row.verdict.by}")
        elif row.kind != "killed":
            by = f" `{row.verdict.by}`" if row.kind == "unsure" else f" {row.word}."
            lines.append(f"- {row.kind}, {row.operator} (`{row.definition}`): `{row.before}` → `{row.after}`.{by}")
    return lines or ["None is left."]


def section(name: str, title: str, command: str, date: str, rows: Sequence[Row]) -> str:
    """A part of the page, between marks by which the next run finds it."""
    lines = [f"<!-- {name} -->", f"## {title}", "", f"`{command}`, {date}.", "", *table(rows), "", *left(rows)]
    return "\n".join([*lines, f"<!-- /{name} -->"]) + "\n"


def page(old: str, sections: dict[str, str]) -> str:
    """The page with these parts replaced; parts that were not tried now stay as they are."""
    kept = {m[1]: f"{m[0]}\n" for m in re.finditer(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", old, re.S)}
    return "\n".join(
        [HEAD, *({**kept, **sections}[name] for name in ("drawn", "hand") if name in {**kept, **sections})]
    )
