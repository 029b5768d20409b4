"""Collectives, layers, attention, positions, norms and losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mpcore as mp
from examples.gpt.config import PRESETS
from examples.gpt.model import GPT
from mpcore import collectives as c
from mpcore.layers.rope import rope_frequencies
from mpcore.sharding.declare import cut
from tests.peers import rows


def copied(tp: mp.Axis) -> None:
    x = torch.ones(1, requires_grad=True)
    c.copy(x, tp).backward(torch.ones(1) * tp.rank)
    assert float(x.grad) == 6  # type: ignore[arg-type]


def reduced(tp: mp.Axis) -> None:
    y = torch.ones(1).mul(tp.rank).requires_grad_()
    total = c.reduce(y, tp)
    total.backward(torch.ones(1) * tp.rank)
    assert (total.item(), y.grad.item()) == (6, tp.rank)  # type: ignore[union-attr]


def scattered(tp: mp.Axis) -> None:
    whole = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    part = c.split(whole, tp, 1)
    assert torch.equal(part, whole[:, tp.rank : tp.rank + 1])
    part.backward(torch.ones(8, 1) * tp.rank)
    assert torch.equal(whole.grad, torch.arange(4.0).expand(8, 4))  # type: ignore[arg-type]


def gathered(tp: mp.Axis) -> None:
    eight = (torch.ones(8) * tp.rank).requires_grad_()
    all_ = c.gather(eight, tp, 0)
    assert torch.equal(all_, torch.arange(4.0).repeat_interleave(8))
    rows = torch.rand(32, generator=torch.Generator().manual_seed(0))
    all_.backward(rows)
    assert torch.equal(eight.grad, rows[8 * tp.rank : 8 * tp.rank + 8])  # type: ignore[arg-type]


def scattered_along_the_sequence(tp: mp.Axis) -> None:
    whole = torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(c.split(whole, tp, 0), whole[2 * tp.rank : 2 * tp.rank + 2])


def gathered_along_the_sequence(tp: mp.Axis) -> None:
    four = (torch.ones(4) * tp.rank).requires_grad_()
    sequence = c.all_gather(four, tp, 0)
    assert torch.equal(sequence, torch.arange(4.0).repeat_interleave(4))
    sequence.backward(torch.arange(4.0).repeat_interleave(4))
    assert torch.equal(four.grad, torch.ones(4) * 4 * tp.rank)  # type: ignore[arg-type]


def reduced_and_scattered(tp: mp.Axis) -> None:
    stacked = torch.arange(4.0)[:, None].repeat(1, 4).requires_grad_()
    sums = c.reduce_scatter(stacked, tp, 0)
    assert torch.equal(sums, torch.ones(1, 4) * 4 * tp.rank)
    sums.backward(torch.ones(1, 4) * tp.rank)
    assert torch.equal(stacked.grad, stacked.detach())  # type: ignore[arg-type]


@rows(
    {
        "test_CopyToModelParallelRegion": copied, "test_ReduceFromModelParallelRegion": reduced,
        "test_ScatterToModelParallelRegion": scattered, "test_GatherFromModelParallelRegion": gathered,
        "test_ScatterToSequenceParallelRegion": scattered_along_the_sequence,
        "test_GatherFromSequenceParallelRegion": gathered_along_the_sequence,
        "test_ReduceScatterToSequenceParallelRegion": reduced_and_scattered,
    }
)  # fmt: skip
def test_mappings_have_megatrons_values(check):
    mp.simulate(lambda on: check(on.tp), tp=4)


@rows({"test_vocab": (1600, 8), "test_split_tensor_along_last_dim": (4, 2)})
def test_a_dimension_is_sharded_in_megatrons_ranges(size, ranks):
    """Rank r of n has indices r * size / n to (r + 1) * size / n - 1."""
    for rank in range(ranks):
        assert cut(size, mp.Axis(ranks, rank, name="tp"), 0).mine == (
            (rank * size // ranks, (rank + 1) * size // ranks),
        )


@rows({
        "models/test_gpt_model.py: TestGPTModel.test_constructor": (12, ("",), 6240),
        "transformer/test_transformer_layer.py: test_constructor": (12, ("blocks.0.",), 1884),
        "transformer/test_transformer_block.py: test_constructor": (64, ("blocks.", "norm."), 100096),
        "transformer/test_attention.py: test_constructor": (
            128, ("blocks.0.attention.", "blocks.0.attention_norm."), 66304),
        "transformer/test_mlp.py: TestParallelMLP.test_constructor": (12, ("blocks.0.mlp.",), 1212),
        "models/test_base_embedding.py: TestBaseEmbedding.test_constructor": (12, ("embedding.", "position."), 1248),
    })  # fmt: skip
def test_a_gpt_has_as_many_parameters_as_megatrons(size, parts, count):
    """Two layers of 4 heads, 100 tokens, 4 positions."""
    config = replace(PRESETS["gpt2"], vocab_size=100, seq_len=4, layers=2, d_model=size, heads=4, kv_heads=4,
                     d_ff=4 * size, tie_embeddings=False)  # fmt: skip
    model = GPT(config, mp.Mesh())
    assert sum(p.numel() for name, p in model.named_parameters() if name.startswith(parts)) == count


def test_equal_scores_are_a_mean_over_the_past():
    """Queries of zero: token i sees i + 1 values with equal weights."""
    attention = mp.ParallelAttention(8, 2, bias=False)
    with torch.no_grad():
        attention.qkv.weight[:8].zero_()
        attention.output.weight.copy_(torch.eye(8))
    x = torch.randn(2, 32, 8)
    values = F.linear(x, attention.qkv.weight[16:])
    want = values.cumsum(1) / torch.arange(1, 33)[:, None]
    y = attention(x)
    assert y.shape == (2, 32, 8)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)


def test_a_sink_of_zero_takes_the_weight_of_one_token():
    attention = mp.ParallelAttention(8, 2, bias=False, sinks=True)
    with torch.no_grad():
        attention.qkv.weight[:8].zero_()
        attention.output.weight.copy_(torch.eye(8))
        attention.sinks.weight.zero_()
    x = torch.randn(2, 32, 8)
    values = F.linear(x, attention.qkv.weight[16:])
    torch.testing.assert_close(attention(x), values.cumsum(1) / torch.arange(2, 34)[:, None], rtol=1e-5, atol=1e-6)


def test_a_mask_of_megatrons_is_refused():
    """A convention: [b, 1, s, s], True is masked; squeezed it would mean the opposite."""
    attention = mp.ParallelAttention(8, 2)
    x, seen = torch.randn(2, 5, 8), torch.ones(5, 5).tril().bool()
    theirs = ~seen.expand(2, 1, 5, 5)
    with pytest.raises(ValueError, match=r"mask \(2, 1, 5, 5\) is none of \[T, T\]"):
        attention(x, mask=theirs)
    for mask in (theirs[:, 0], theirs[0, 0]):
        with pytest.raises(ValueError, match=r"no query sees its own key in the mask .*: True is a key that is seen"):
            attention(x, mask=mask)
    torch.testing.assert_close(attention(x, mask=~theirs[:, 0]), attention(x))
    assert not attention(x, mask=torch.zeros(5, 5).bool()).isnan().any()  # padding alone


def test_yarn_keeps_the_first_frequency_and_divides_the_slow_ones():
    """128 dimensions, base 10,000, factor 40, trained on 64 positions."""
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    found, _ = rope_frequencies(128, 10000.0, scaling)
    assert len(found) == 64
    assert found[0] == pytest.approx(1.0)
    assert found[17] == pytest.approx(10000.0 ** (-34 / 128) / 40.0)


def test_yarns_factor_of_the_scores_needs_no_long_sequence():
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
               "mscale_all_dim": 1.0}  # fmt: skip
    assert mp.RotaryEmbedding(64, scaling=scaling).score_factor == pytest.approx((0.1 * math.log(40.0) + 1) ** 2)


def test_yarn_turns_position_one_by_other_angles():
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    one = torch.tensor([1])
    assert not torch.equal(mp.RotaryEmbedding(64, scaling=scaling)(one)[0], mp.RotaryEmbedding(64)(one)[0])


def test_documents_of_three_two_and_four_tokens_end_there():
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2]])
    ends = mp.layers.document_ends(documents)
    assert ends[:4].tolist() == [0, 3, 5, 9]
    assert mp.layers.document_positions(ends, 1, 9).tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]


def test_the_cross_entropy_has_megatrons_values():
    """32 columns on each of 4 ranks."""
    logits, target = torch.arange(8.0).repeat(16, 4), torch.arange(0, 32, 2)

    def loss(on: mp.Mesh) -> Tensor:
        return mp.vocab_parallel_cross_entropy(logits, target, tp=on.tp, vocab_size=128, reduction="none")

    want = torch.tensor([10.2309, 8.2309, 6.2309, 4.2309]).repeat(4)
    for found in mp.simulate(loss, tp=4):
        torch.testing.assert_close(found, want, rtol=0, atol=5e-5)


def test_labels_of_another_order_are_refused_where_shapes_tell():
    """A convention: Megatron's logits are [s, b, v] and its labels [b, s]."""
    logits = torch.randn(5, 2, 7)
    with pytest.raises(ValueError, match="don't have the same tokens"):
        mp.vocab_parallel_cross_entropy(logits, torch.zeros(2, 5).long())
