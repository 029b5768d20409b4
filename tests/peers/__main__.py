"""The tables of peers' properties, in docs/records, from the tests here: python -m tests.peers --write.

A property holds if a test here states it. What differs by convention stands on the page for those who come from the
peer, and what mpcore cannot state in `differences`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from pathlib import Path

from mpcore.tools.command_line import Parser
from tests.peers.differences import DIFFER, MISSING, PAGES
from tests.peers.sources import AREAS, FOUND, PEERS, Property

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
MARKS = "<!-- peers -->", "<!-- /peers -->"


def properties() -> list[Property]:
    """What the tests here hold."""
    for path in sorted(HERE.glob("test_*.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
    return FOUND


def conventions(peer: str) -> list[str]:
    """The first cells of the table "Conventions" on the page for those who come from the peer."""
    section = (DOCS / PAGES[peer]).read_text().partition("## Conventions")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [row[0] for row in rows[2:]]


def test_of(source: str) -> tuple[str, str]:
    """The file of a source, and the test in it without the statement."""
    file, _, rest = source.partition(": ")
    found = re.search(r"test_\w+", rest) or re.search(r"Test\w+", rest)
    return file, found[0] if found else rest


def counts(name: str, of: dict[str, Counter[str]]) -> str:
    """A row of a table."""
    numbers = [of[kind][name] for kind in of]
    return f"| {name} | {' | '.join(map(str, numbers))} | {sum(numbers)} |"


def table() -> str:
    """The text between the marks."""
    found = properties()
    areas = {
        "hold": Counter(each.area for each in found),
        "differ by convention": Counter(each.area for each in DIFFER),
        "can't be stated": Counter(each.area for each in MISSING for _ in each.sources),
    }
    peers = {
        "hold": Counter(each.peer.partition("@")[0] for each in found),
        "differ by convention": Counter(each.peer for each in DIFFER),
        "can't be stated": Counter(each.peer for each in MISSING for _ in each.sources),
    }
    lines = []
    for first, of, names in (("area", areas, AREAS), ("peer", peers, PEERS)):
        lines += [f"| {first} | {' | '.join(of)} | all |", "|---|---|---|---|---|"]
        lines += [counts(name, of) for name in names]
        sums = [of[kind].total() for kind in of]
        lines += [f"| **all** | {' | '.join(map(str, sums))} | {sum(sums)} |", ""]
    tests = {(each.peer, test_of(each.source)) for each in found}
    lines += [f"The {len(found)} that hold are statements of {len(tests)} tests.", ""]
    read = ", ".join(f"{peer} ({repo}, {folder}, at {commit})" for peer, (repo, folder, commit) in PEERS.items())
    linked = ", ".join(f"[{peer}](../{page}#conventions)" for peer, page in PAGES.items())
    lines += [f"Read: {read}.", "", f"What differs by convention is listed for those who come from {linked}."]
    lines += ["", "These properties can't be tested in mpcore, for the reason given:", ""]
    for each in MISSING:
        lines.append(f"- {each.peer}, {', '.join(f'`{source}`' for source in each.sources)}: {each.why}.")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the table."""
    return re.sub(f"({MARKS[0]}\n).*(\n{MARKS[1]})", lambda found: found[1] + table() + found[2], page, flags=re.DOTALL)


def main() -> int:
    """The command."""
    parser = Parser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/records")
    page = DOCS / "records" / "2026-11-28_peers_tests.md"
    if parser.parse_args().write:
        page.write_text(written(page.read_text()))
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
