"""What the example tells the planners of a layout, against formulas written out here."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from examples.gpt.arguments import parse
from examples.gpt.config import PRESETS, BlockKind
from examples.gpt.model import GPT
from examples.gpt.plan import even_blocks, given_blocks, least_bytes, outline
from tests.examples.test_checks import mesh_of


def flags(text: str, **others: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(parse(text.split())), "regather": False, **others})


def test_blocks_are_dealt_out_evenly_or_as_given():
    assert even_blocks(6, 3) == [range(2), range(2, 4), range(4, 6)]
    assert even_blocks(4, 1) == [range(4)]
    with pytest.raises(ValueError, match="--even-stages: 7 layers are not a multiple of 3 stages"):
        even_blocks(7, 3)
    assert given_blocks("3,1,2", 6, 3) == [range(3), range(3, 4), range(4, 6)]
    for text, told in (("3,3", "3,3 are 2 stages, not 3"), ("1,2,2", "hold 5, not .* 6"), ("3,0,3", "none empty")):
        with pytest.raises(ValueError, match=told):
            given_blocks(text, 6, 3)


def outlined(text: str, **sizes: int):
    return outline(mesh_of(*sizes.items()), text.split())


def test_an_outline_has_what_the_flags_say():
    found = outlined("")
    assert (found.schedule, found.ranks, found.micro_batches, found.virtual_stages) == ("1f1b", 1, 8, None)
    assert (list(found.blocks), found.linear, found.sharded, found.few) == ([range(4)], True, True, 1)
    assert found.parameters == sum(p.numel() for p in GPT(PRESETS["tiny"], device="meta").parameters())
    assert found.least == least_bytes(flags(""), PRESETS["tiny"], mesh_of(), 8, 4)
    assert [found.kind(i) for i in range(4)] == [BlockKind("attention", None, 10000.0, False)] * 4
    mixed = outlined("--experts 4 --set moe.every=2")
    assert [mixed.kind(i).experts for i in range(4)] == [False, True, False, True]
    assert outlined("--vocab-size 1000").parameters == found.parameters + 2 * 743 * 128
    assert outlined("--preset gpt2 --global-batch 2").parameters == 124_439_808
