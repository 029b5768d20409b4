"""`docs/pitfalls.md` and the tests that cite it name each other."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "pitfalls.md"
NAMES = {
    name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
}  # fmt: skip
ROWS = {int(number): test for number, test in re.findall(r"^\| (\d+) \|.*::(\w+)` \|$", PAGE.read_text(), re.M)}


def pitfalls(name: str) -> set[str]:
    """The numbers of the pitfalls that a test's name cites: {"02", "2", "3", "03"} for `test_pitfall_02_03_..`."""
    found = re.match(r"test_pitfall_((?:\d+_)+)", name)
    numbers = found[1].strip("_").split("_") if found else []
    return {*numbers, *(str(int(number)) for number in numbers)}


def test_every_row_has_its_test():
    assert list(ROWS) == sorted(ROWS)
    assert not {test for test in ROWS.values() if test not in NAMES}, "renamed tests: docs/pitfalls.md still has these"
    assert not [number for number, test in ROWS.items() if str(number) not in pitfalls(test)]


def test_every_number_in_a_tests_name_has_its_row():
    cited = {int(number) for name in NAMES for number in pitfalls(name)}
    assert len(cited) > 40
    assert not cited - ROWS.keys()


def test_every_tool_has_its_test():
    page = (PAGE.parent / "tools.md").read_text()
    rows = re.findall(r"^\| (.+?) \| .* \| `(.+)::(test_\w+)` \|$", page, re.M)
    assert len(rows) == page.count("\n| ") - 1  # each row but the title names one
    assert not [tool for tool, file, test in rows if f"def {test}(" not in (TESTS / file).read_text()]
