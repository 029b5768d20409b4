"""The command `mpcore plan`: its sizes, and the words that it hands on."""

from __future__ import annotations

import pytest

from mpcore.tools import parsers


@pytest.mark.parametrize(("text", "sizes"), [("1", [1]), ("2,4,8", [2, 4, 8])])
def test_sizes_are_numbers_between_commas(text, sizes):
    assert parsers.plan().parse_args(["--tp", text]).tp == sizes
    for wrong in ("0", "2,0", "-1,4"):
        with pytest.raises(SystemExit):
            parsers.plan().parse_args([f"--tp={wrong}"])


def test_the_words_of_a_target_are_handed_on():
    args = parsers.parse_target(parsers.memory, ["a:b", "--tp", "2", "--x", "1", "--rank", "3", "--cp-inner", "2"])
    assert [getattr(args, axis) for axis in parsers.AXES] == [2, 1, 1, 1, 1, None, 2]
    assert (args.target, args.rank, args.arguments, args.cpu, args.plot) == ("a:b", 3, ["--x", "1"], False, None)
    words = ["a:b", "--etp", "4", "--pp", "5", "--ep", "6", "--dp", "7", "--cp", "8"]
    args = parsers.parse_target(parsers.ledger, words)
    assert [getattr(args, axis) for axis in parsers.AXES] == [1, 5, 8, 6, 7, 4, None]
    assert parsers.parse_target(parsers.ledger, ["a:b"]).rank == 0
    assert not hasattr(parsers.parse_target(parsers.ledger, ["a:b"]), "plot"), "a ledger has no picture"
    with pytest.raises(SystemExit):
        parsers.parse_target(parsers.memory, [])
    with pytest.raises(SystemExit):
        parsers.parse_target(parsers.memory, ["a:b", "--tp", "two"])
