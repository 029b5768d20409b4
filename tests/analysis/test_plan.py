"""The command `mpcore plan`: its sizes, its changed rates, and the words that it hands on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mpcore.tools import parsers
from mpcore.tools.analysis.command import parse, sizes_of
from mpcore.tools.analysis.machine import load_machine
from mpcore.tools.analysis.plan import what_if

H100 = load_machine("h100")


@pytest.mark.parametrize(("text", "sizes"), [("1", [1]), ("2,4,8", [2, 4, 8])])
def test_sizes_are_numbers_between_commas(text, sizes):
    assert parsers.plan().parse_args(["--tp", text]).tp == sizes
    for wrong in ("0", "2,0", "-1,4"):
        with pytest.raises(SystemExit):
            parsers.plan().parse_args([f"--tp={wrong}"])


@pytest.mark.parametrize(("change", "want"), [
    ("tau=3", {"tau": 3.0}), ("tau=0", {"tau": 0.0}), ("peak=2x", {"peak": 2 * H100.peak}), ("node=4", {"node": 4}),
    ("bandwidth=0.5x", {"bandwidth": H100.bandwidth / 2}), ("node=2x", {"node": 16}), ("memory=1e9", {"memory": 1e9}),
])  # fmt: skip
def test_a_rate_is_set_or_multiplied(change, want):
    found = what_if(H100, [change])
    assert found == replace(H100, **want)
    assert isinstance(found.node, int)
    assert what_if(H100, []) == H100
    assert what_if(H100, ["tau=3", "tau=2x"]).tau == 6


@pytest.mark.parametrize(("change", "message"), [
    *((change, f"{change} isn't of the form tau=2x or tau=NUMBER")
      for change in ("tau=-1", "tau=inf", "tau=nan", "tau=", "tau", "tau=x", "tau=2y", "tau=-2x")),
    *((f"{name}=2x", f"{name!r} is none of peak") for name in ("speed", "name", "sources", "")),
])  # fmt: skip
def test_a_change_of_another_form_is_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        what_if(H100, [change])


def test_the_words_of_a_target_are_handed_on():
    args = parse(parsers.memory, ["a:b", "--tp", "2", "--x", "1", "--rank", "3", "--cp-inner", "2"])
    assert sizes_of(args) == {"tp": 2, "cp": 1, "pp": 1, "ep": 1, "dp": 1, "etp": None, "cp_inner": 2}
    assert (args.target, args.rank, args.arguments, args.cpu, args.plot) == ("a:b", 3, ["--x", "1"], False, None)
    words = ["a:b", "--etp", "4", "--pp", "5", "--ep", "6", "--dp", "7", "--cp", "8"]
    assert sizes_of(parse(parsers.ledger, words)) == {
        "tp": 1, "cp": 8, "pp": 5, "ep": 6, "dp": 7, "etp": 4, "cp_inner": None,
    }  # fmt: skip
    assert parse(parsers.ledger, ["a:b"]).rank == 0
    assert not hasattr(parse(parsers.ledger, ["a:b"]), "plot"), "a ledger has no picture"
    with pytest.raises(SystemExit):
        parse(parsers.memory, [])
    with pytest.raises(SystemExit):
        parse(parsers.memory, ["a:b", "--tp", "two"])
