"""What the example tells the planners of a layout, against formulas written out here."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from examples.gpt.arguments import parse
from examples.gpt.config import PRESETS, BlockKind, GPTConfig, LatentConfig
from examples.gpt.model import GPT
from examples.gpt.plan import even_blocks, given_blocks, least_bytes, outline
from tests.examples.test_checks import mesh_of

CONFIG = GPTConfig(vocab_size=1000, seq_len=64, layers=8, d_model=32, heads=4, kv_heads=2, d_ff=96)


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


def bound(text: str, config: GPTConfig = CONFIG, micro_batches: int = 8, first: int = 2, **sizes: int) -> int:
    return least_bytes(flags(text), config, mesh_of(*sizes.items()), micro_batches, first)


D, F, V, L, T = 32, 96, 1000, 8, 64
BLOCK = D * (4 + 2 * 2) * 8 + D * D + 3 * D * F + 2 * D  # q, k, v of 8 wide heads, output, MLP with a gate, two norms
WIDE = (4 + 2 * 2) * 8 + 3 * F  # what a token's products give: q, k, v, and gate, up, their product


@pytest.mark.parametrize(("text", "sizes", "state"), [
    ("--zero 0", {}, 16),  # float32: parameter, gradient and two moments
    ("--zero 0 --dtype bfloat16", {}, 18),  # and a 16-bit copy that is multiplied
    ("--zero 0 --dtype bfloat16 --set autocast=true", {}, 16), ("--zero 0 --dtype float16", {}, 16),
    ("--zero 0 --optimizer adamw-bf16", {}, 12), ("--zero 0 --optimizer muon", {}, 12),
    ("--zero 3", {}, 16),  # one data rank holds all
    ("--zero 0", {"dp": 4}, 16), ("--zero 3", {"dp": 4}, 16 / 4), ("--zero 2", {"dp": 4}, 16 / 4),
    ("--zero 1", {"dp": 4}, 16 / 4 + 4),  # whole gradients wait for their reduction
    ("--zero 3 --dtype bfloat16", {"dp": 4}, 16 / 4),
    ("--zero 3 --set replicate=2", {"dp": 4}, 16 / 4),  # max(n, edp): each group of 2 shards, edp is 4
    ("--zero 3 --set replicate=4", {"dp": 4}, 16), ("--zero 3 --optimizer muon", {"dp": 4}, 12 / 4),
    ("--zero 3", {"dp": 2, "cp": 2}, 16 / 4), ("--zero 0", {"tp": 2}, 16 / 2), ("--zero 0", {"pp": 2}, 16 / 2),
    ("--zero 0", {"pp": 4, "tp": 4}, 16 / 16),
])  # fmt: skip
def test_state_is_shared_by_the_ranks_that_shard_it(text, sizes, state):
    """With experts or latents only the state between steps counts; here activations are made too small to matter."""
    latent = dataclasses.replace(CONFIG, kv_heads=None, latent=LatentConfig())
    parameters = sum(p.numel() for p in GPT(latent, device="meta").parameters())
    assert bound(text, latent, **sizes) == int(parameters * state)


@pytest.mark.parametrize(("text", "sizes", "micro_batches", "held", "width", "saved"), [
    ("--zero 0", {}, 8, 1, 4, D + WIDE - F), ("--zero 0 --recompute selective", {}, 8, 1, 4, D + WIDE - F),
    ("--zero 0 --recompute full", {}, 8, 1, 4, D), ("--zero 0 --recompute budget=0.5", {}, 8, 1, 4, D),
    ("--zero 0", {"pp": 4}, 8, 4, 4, D + WIDE - F), ("--zero 0", {"pp": 4}, 2, 2, 4, D + WIDE - F),
    ("--zero 0 --schedule gpipe", {"pp": 4}, 8, 8, 4, D + WIDE - F),
    ("--zero 0 --schedule interleaved", {"pp": 4}, 8, 4, 4, D + WIDE - F),
    ("--zero 0 --dtype bfloat16", {}, 8, 1, 2, D + WIDE - F), ("--zero 0 --dtype float16", {}, 8, 1, 2, D + WIDE - F),
    ("--zero 0 --dtype bfloat16 --fp8", {}, 8, 1, 1, D + WIDE - F),
    ("--zero 0", {"cp": 2}, 8, 1, 4, (D + WIDE - F) / 2), ("--zero 0", {"tp": 2}, 8, 1, 4, D + (WIDE - F) / 2),
    ("--zero 0 --sequence-parallel", {"tp": 2}, 8, 1, 4, (D + WIDE - F) / 2),
    ("--zero 0 --micro-batch 5", {}, 8, 1, 4, 5 / 2 * (D + WIDE - F)),
])  # fmt: skip
def test_what_waits_for_backward_is_held_beside_the_state(text, sizes, micro_batches, held, width, saved):
    """A model with samples so long that activations outweigh all else."""
    long = dataclasses.replace(CONFIG, seq_len=10**6)
    first = 8 // sizes.get("pp", 1)
    mine = first * BLOCK / sizes.get("tp", 1)
    state = 18 if "bfloat16" in text else 16
    want = mine * state + first * held * 2 * 10**6 * saved * width
    assert bound(text, long, micro_batches, first, **sizes) == pytest.approx(want, rel=1e-9)


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
