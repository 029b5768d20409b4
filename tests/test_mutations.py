"""The mutation report: every mutation is one of the code as it is, and a partial run keeps what others found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.mutations.__main__ import MUTATIONS, Result, read, report
from tests.mutations.reach import BEYOND, EXPLAINED, beyond

ROOT = Path(__file__).parents[1]


def test_every_mutation_breaks_a_place_that_is_there_once():
    stale = [
        f"{area}: {m.what}" for area, m in MUTATIONS
        if (ROOT / m.file).read_text().count(m.old) != 1 or not (ROOT / m.tests.split("::")[0]).is_file()
    ]  # fmt: skip
    assert not stale
    assert max(Counter((area, m.what) for area, m in MUTATIONS).values()) == 1


def test_reasons_are_of_mutations_that_there_are():
    names = {m.what for _, m in MUTATIONS}
    assert not {name for found in BEYOND.values() for name in found} - names
    assert not EXPLAINED.keys() - names
    seen = sum(not beyond(m) for _, m in MUTATIONS)
    assert seen > 60


def test_what_was_not_tried_again_stays():
    (area, first), (_, second), *_ = MUTATIONS
    found = {
        (area, first.what): Result(area, first.what, "caught by test_a[x | y]", "beyond: a cost", 3.0),
        (area, second.what): Result(area, second.what, "SURVIVED", "caught: tp2: loss", 60.0),
    }
    text = report(found)
    assert {key: r for key, r in read(text).items() if r.tests} == found
    assert f"| {area} |" in text
    assert f"- **{area}: {second.what}**, not seen by the tests" in text
    assert report(read(text)) == text
