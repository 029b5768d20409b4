"""docs/memory.md: that it is what its generator writes, by a row of each table, and that what it shows holds."""

from __future__ import annotations

import re
from pathlib import Path

from mpcore.parallel.recompute import KINDS
from tests.memory_tables import CONFIG, TEXT, estimates, recomputations, stages_of_zero
from tests.test_memory import FLAGS, LAYOUTS

PAGE = (Path(__file__).parents[1] / "docs" / "memory.md").read_text()


def rows(head: str) -> list[list[str]]:
    """The cells of the table that begins with this head."""
    table = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_the_page_is_what_its_generator_writes(ranks):
    tables = [estimates(ranks, LAYOUTS[:1]), stages_of_zero(ranks, (2,), (2,)), recomputations(ranks, ((1, False),))]
    for table in tables:
        for line in table.splitlines():
            assert line in PAGE
    for piece in re.split(r"\{\w+\}", TEXT):  # what is between the numbers
        assert piece in PAGE
    assert " ".join(FLAGS) in PAGE


def test_every_estimate_is_within_three_percent():
    shown = rows("| layout | flags | estimate")
    assert [row[1] for row in shown] == [" ".join(flags) for _, flags in LAYOUTS]
    assert len(shown) >= 24
    for *_, estimate, measured, error in shown:
        assert f"{number(estimate) / number(measured) - 1:+.2%}" == error
        assert abs(float(error[:-1])) < 3


def test_each_stage_of_zero_sends_the_theory_and_holds_its_share():
    (alone, *shown) = rows("| dp | zero ")
    psi, states = number(alone[5]), number(alone[7])
    assert [row[:2] for row in shown] == [[str(dp), str(zero)] for dp in (2, 4) for zero in range(4)]
    for row in (alone, *shown):
        dp, zero = number(row[0]), number(row[1])
        for cell in row[2:5]:
            sent, theory = cell.split(" / ")
            assert sent == theory
        share = dp if zero else 1
        whole = [psi * (zero < 3), psi * (zero < 2)]
        assert [number(cell) for cell in row[5:]] == [psi // share, psi // share, states // share, *whole]


def test_recomputation_saves_what_the_formula_says_and_changes_no_bit():
    shown = rows("| layout | kind | saved")
    assert [row[1] for row in shown] == [*KINDS] * 3
    for _, kind, saved, formula, same in shown:
        shells = number(saved) - number(formula)
        assert shells == 0 or (kind == "selective" and 0 < shells <= 4 * 9), (kind, shells)
        assert same == "yes"
    assert CONFIG.dropout > 0
