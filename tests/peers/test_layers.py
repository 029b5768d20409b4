"""Collectives, layers, attention, positions, norms and losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcore as mp
from examples.gpt.config import PRESETS
from examples.gpt.model import GPT
from mpcore import collectives as c
from mpcore.layers.attention.sequence import sequence_runs
from mpcore.layers.module import normal
from mpcore.layers.rope import rope_frequencies
from mpcore.sharding.declare import cut
from tests.peers.sources import states

TP, LAYERS, LOSS, PACKED = "tensor-parallel collectives and linears", "layers and attention", "loss", "packed documents"

# --- collectives ---------------------------------------------------------------------------------------------------


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


@states(
    TP,
    "Megatron-LM",
    "tensor_parallel/test_mappings.py",
    table={
        "test_CopyToModelParallelRegion": copied,
        "test_ReduceFromModelParallelRegion": reduced,
        "test_ScatterToModelParallelRegion": scattered,
        "test_GatherFromModelParallelRegion": gathered,
        "test_ScatterToSequenceParallelRegion": scattered_along_the_sequence,
        "test_GatherFromSequenceParallelRegion": gathered_along_the_sequence,
        "test_ReduceScatterToSequenceParallelRegion": reduced_and_scattered,
    },
)
def test_mappings_have_megatrons_values(check):
    mp.simulate(lambda on: check(on.tp), tp=4)


@states(
    TP,
    "Megatron-LM",
    "tensor_parallel/test_tensor_parallel_utils.py",
    table={"test_vocab": (1600, 8), "test_split_tensor_along_last_dim": (4, 2)},
)
def test_a_dimension_is_sharded_in_megatrons_ranges(size, ranks):
    """Rank r of n has indices r * size / n to (r + 1) * size / n - 1."""
    for rank in range(ranks):
        assert cut(size, mp.Axis(ranks, rank, name="tp"), 0).mine == (
            (rank * size // ranks, (rank + 1) * size // ranks),
        )


# --- linear layers and embeddings ----------------------------------------------------------------------------------


@states(
    TP,
    "Megatron-LM",
    "tensor_parallel/test_initialization.py: Test",
    table={
        "test_embedding_init": (lambda tp: mp.VocabParallelEmbedding(16, 4, tp=tp), 0),
        "test_row_init": (lambda tp: mp.RowParallelLinear(16, 16, tp=tp), 1),
        "test_col_init": (lambda tp: mp.ColumnParallelLinear(16, 16, tp=tp), 0),
    },
)
def test_a_shards_first_values_are_those_of_the_whole_weight(build, dim):
    def weight(on: mp.Mesh) -> Tensor:
        layer = build(on.tp)
        return mp.layers.materialize(layer, seed=42).weight.detach().clone()  # type: ignore[union-attr]

    whole = weight(mp.Mesh())
    shards = mp.simulate(weight, tp=4)
    assert {shard.shape[dim] for shard in shards} == {4}
    assert torch.equal(torch.cat(shards, dim), whole)


def linear_of(kind: str, sequence_parallel: bool, on: mp.Mesh) -> None:
    """2 inputs and 3 outputs of each rank, 5 tokens of each rank; the sum of the outputs as the loss."""
    tp, sp = on.tp, {"sequence_parallel": sequence_parallel}
    column = kind == "column"
    ours = (
        mp.ColumnParallelLinear(2, 3 * tp.size, tp=tp, **sp)
        if column
        else mp.RowParallelLinear(2 * tp.size, 3, tp=tp, **sp)
    )
    mp.layers.materialize(ours, seed=0)
    theirs = nn.Linear(ours.in_features, ours.out_features)
    theirs.load_state_dict(mp.full_state_dict(ours))
    x = torch.randn(1, 5 * tp.size, theirs.in_features, generator=torch.Generator().manual_seed(0)).requires_grad_()
    want = theirs(x)
    want.square().sum().backward()
    tokens = slice(5 * tp.rank, 5 * tp.rank + 5) if sequence_parallel else slice(None)
    if column:
        mine, columns = x.detach()[:, tokens].clone().requires_grad_(), slice(3 * tp.rank, 3 * tp.rank + 3)
        y, part = ours(mine), want[..., columns]
        grad, rows = x.grad[:, tokens], theirs.weight.grad[columns]  # type: ignore[index]
    else:
        features = slice(2 * tp.rank, 2 * tp.rank + 2)
        mine = x.detach()[..., features].clone().requires_grad_()
        y, part = ours(mine), want[:, tokens]
        grad, rows = x.grad[..., features], theirs.weight.grad[:, features]  # type: ignore[index]
    torch.testing.assert_close(y, part)
    y.square().sum().backward()
    torch.testing.assert_close(mine.grad, grad)
    torch.testing.assert_close(ours.weight.grad, rows)


@states(
    TP,
    "nanotron",
    "test_tensor_parallel.py",
    table={
        "test_column_linear, all-reduce": ("column", False),
        "test_column_linear, reduce-scatter": ("column", True),
        "test_row_linear, all-reduce": ("row", False),
        "test_row_linear, reduce-scatter": ("row", True),
    },
)
def test_a_sharded_linear_is_the_whole_one(kind, sequence_parallel):
    mp.simulate(lambda on: linear_of(kind, sequence_parallel, on), tp=3)


@states(
    TP,
    "",
    "",
    table={
        "nanotron: test_tensor_parallel.py: test_tensor_parallel_embedding, all-reduce": (400, False),
        "nanotron: test_tensor_parallel.py: test_tensor_parallel_embedding, reduce-scatter": (400, True),
        "torchtitan: test_embedding.py: test_vocab_parallel_embedding_parity, 128 tokens": (128, False),
        "torchtitan: test_embedding.py: test_vocab_parallel_embedding_parity, 128, over the sequence": (128, True),
        "torchtitan: test_embedding.py: test_vocab_parallel_embedding_parity, 131 tokens": (131, False),
        "torchtitan: test_embedding.py: test_vocab_parallel_embedding_parity, 131, over the sequence": (131, True),
    },
)
def test_a_sharded_table_is_the_whole_one(vocab, sequence_parallel):
    """16 tokens, and gradients weighted by their place."""
    ids = torch.randint(vocab, (3, 16), generator=torch.Generator().manual_seed(42))
    weights = torch.arange(16.0)[:, None]

    def look_up(on: mp.Mesh) -> None:
        table = mp.VocabParallelEmbedding(vocab, 32, tp=on.tp, sequence_parallel=sequence_parallel)
        mp.layers.materialize(table, seed=0)
        whole = mp.full_state_dict(table)["weight"].requires_grad_()
        want = F.embedding(ids, whole)
        (want * weights).sum().backward()
        tokens = slice(4 * on.tp.rank, 4 * on.tp.rank + 4) if sequence_parallel else slice(None)
        y = table(ids)
        assert torch.equal(y, want[:, tokens])
        (y * weights[tokens]).sum().backward()
        mine = [i for start, end in cut(vocab, on.tp, 0).mine for i in range(start, end)]
        torch.testing.assert_close(table.weight.grad, whole.grad[mine], rtol=0, atol=0)  # type: ignore[index]

    mp.simulate(look_up, tp=4)


@states(
    TP,
    "Megatron-LM",
    "tensor_parallel/test_layers.py: test_LinearWithFrozenWeight",
    table={"tp 1": 1, "tp 8, summed": 8},
)
def test_a_frozen_weight_still_passes_gradients_on(tp):
    """Ones of 8 x 8 and the identity: each output is 1, each gradient of the input 8."""

    def product(on: mp.Mesh) -> None:
        layer = mp.ColumnParallelLinear(8, 8, tp=on.tp, gather_output=True).requires_grad_(False)
        with torch.no_grad():
            layer.weight.fill_(1.0)
            layer.bias.zero_()  # type: ignore[union-attr]
        x = torch.eye(8).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert torch.equal(y, torch.ones(8, 8))
        assert torch.equal(x.grad, 8 * torch.ones(8, 8))  # type: ignore[arg-type]
        assert layer.weight.grad is None

    mp.simulate(product, tp=tp)


@states(TP, "Megatron-LM", "tensor_parallel/test_layers.py", "test_linear_default_output_dtype_preserves_input_dtype")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_linear_keeps_the_dtype(dtype):
    layer, x = mp.ColumnParallelLinear(16, 32, bias=False, dtype=dtype), torch.randn(4, 3, 16, dtype=dtype)
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight))


@states(TP, "torchtitan", "test_linear.py", "TestLinear.test_custom_init_std")
@states(TP, "torchtitan", "test_embedding.py", "TestEmbeddingConfig.test_custom_init_std")
@pytest.mark.parametrize(("layer", "outputs"), [(mp.ColumnParallelLinear, 500), (mp.VocabParallelEmbedding, 160)])
def test_first_values_have_the_given_deviation(layer, outputs):
    weight = mp.layers.materialize(layer(1000, outputs, init=normal(0.02)), seed=42).weight.detach()  # type: ignore[operator]
    assert (float(weight.mean()), float(weight.std())) == (pytest.approx(0.0, abs=5e-4), pytest.approx(0.02, abs=5e-4))


# --- counts of parameters ------------------------------------------------------------------------------------------


@states(
    LAYERS,
    "Megatron-LM",
    "",
    table={
        "models/test_gpt_model.py: TestGPTModel.test_constructor": (12, ("",), 6240),
        "transformer/test_transformer_layer.py: test_constructor": (12, ("blocks.0.",), 1884),
        "transformer/test_transformer_block.py: test_constructor": (64, ("blocks.", "norm."), 100096),
        "transformer/test_attention.py: test_constructor": (
            128, ("blocks.0.attention.", "blocks.0.attention_norm."), 66304),
        "transformer/test_mlp.py: TestParallelMLP.test_constructor": (12, ("blocks.0.mlp.",), 1212),
        "models/test_base_embedding.py: TestBaseEmbedding.test_constructor": (12, ("embedding.", "position."), 1248),
    },
)  # fmt: skip
def test_a_gpt_has_as_many_parameters_as_megatrons(size, parts, count):
    """Two layers of 4 heads, 100 tokens, 4 positions."""
    config = replace(PRESETS["gpt2"], vocab_size=100, seq_len=4, layers=2, d_model=size, heads=4, kv_heads=4,
                     d_ff=4 * size, tie_embeddings=False)  # fmt: skip
    model = GPT(config, mp.Mesh())
    assert sum(p.numel() for name, p in model.named_parameters() if name.startswith(parts)) == count


@states(LAYERS, "nanotron", "test_tie_weights.py", "test_tie_weight_in_same_device")
@states(
    LAYERS,
    "torchtitan",
    "test_weight_tying.py",
    table={
        "test_weights_are_shared_when_tying_enabled": (True, False),
        "test_weights_are_independent_when_tying_disabled": (False, False),
        "test_weights_remain_tied_after_init_states": (True, True),
    },
)
def test_a_tied_head_has_the_embeddings_weight(tied, drawn):
    config = replace(PRESETS["gpt2"], vocab_size=100, seq_len=4, layers=1, d_model=12, heads=4, kv_heads=4, d_ff=48,
                     tie_embeddings=tied)  # fmt: skip
    model = GPT(config, mp.Mesh(), device="meta" if drawn else "cpu")
    if drawn:
        mp.layers.materialize(model, seed=0)
    assert (model.head.weight is model.embedding.weight) is tied


# --- attention -----------------------------------------------------------------------------------------------------


@states(LAYERS, "Megatron-LM", "fusions/test_torch_softmax.py", "TestTorchSoftmax.test_causal_mask_equal_scores")
@states(LAYERS, "Megatron-LM", "transformer/test_attention.py", "TestParallelAttention.test_gpu_forward")
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


@states(LAYERS, "Megatron-LM", "fusions/test_torch_softmax.py", "TestSoftmaxOne.test_causal_mask_equal_scores")
def test_a_sink_of_zero_takes_the_weight_of_one_token():
    attention = mp.ParallelAttention(8, 2, bias=False, sinks=True)
    with torch.no_grad():
        attention.qkv.weight[:8].zero_()
        attention.output.weight.copy_(torch.eye(8))
        attention.sinks.weight.zero_()
    x = torch.randn(2, 32, 8)
    values = F.linear(x, attention.qkv.weight[16:])
    torch.testing.assert_close(attention(x), values.cumsum(1) / torch.arange(2, 34)[:, None], rtol=1e-5, atol=1e-6)


@states(LAYERS, "Megatron-LM", "transformer/test_attention.py", "test_parallel_attention_correctness")
@states(
    LAYERS,
    "Megatron-LM",
    "transformer/test_attention.py",
    "test_parallel_attention_correctness_num_query_groups_less_than_tp_size",
)
def test_sharded_attention_is_the_whole_one():
    """On tp 2, with 4, 2 and 1 KV heads, with and without sequence parallelism: also one KV head for two ranks."""
    x = torch.randn(2, 6, 16)

    def attend(on: mp.Mesh, kv_heads: int, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
        attention = mp.ParallelAttention(16, 4, kv_heads, tp=on.tp, sequence_parallel=sequence_parallel)
        mp.layers.materialize(attention, seed=0)
        mine = (x.chunk(on.tp.size, 1)[on.tp.rank] if sequence_parallel else x).clone().requires_grad_()
        y = attention(mine)
        y.square().sum().backward()
        return y.detach(), mine.grad  # type: ignore[return-value]

    cases = [(kv_heads, sp) for kv_heads in (4, 2, 1) for sp in (False, True)]
    ranks = mp.simulate(lambda on: [attend(on, *case) for case in cases], tp=2)
    for case, *shards in zip(cases, *ranks, strict=True):
        joined = [torch.cat(parts, 1) if case[1] else parts[0] for parts in zip(*shards, strict=True)]
        for found, want in zip(joined, attend(mp.Mesh(), *case), strict=True):
            torch.testing.assert_close(found, want)


@states(
    LAYERS,
    "torchtitan",
    "test_tp_kv_heads_validation.py",
    table={
        "test_llama3_valid_gqa_does_not_raise": (16, 8, 4, (4, 2)),
        "test_llama3_mha_none_kv_heads_does_not_raise": (16, None, 4, (4, 4)),
        "test_llama3_tp1_skips_check": (9, 3, 1, (9, 3)),
    },
)
def test_a_rank_has_its_share_of_the_heads(heads, kv_heads, tp, local):
    attention = mp.ParallelAttention(8 * heads, heads, kv_heads, tp=mp.Axis(tp, 0, name="tp"), device="meta")
    assert (attention.local_heads, attention.local_kv_heads) == local


@states(LAYERS, "Megatron-LM", "transformer/test_attention.py", "test_qk_layernorm_from_config_fallback")
def test_qk_norm_has_a_norm_for_queries_and_for_keys():
    found = {name for name, _ in mp.ParallelAttention(16, 4, qk_norm=True).named_parameters()}
    assert {"q_norm.weight", "k_norm.weight"} <= found


@states(LAYERS, "torchtitan", "test_fused_qkv.py", "test_forward_outputs_are_contiguous_and_correct, their values")
def test_a_fused_projection_holds_queries_then_keys_then_values():
    """4 heads of 8, 2 KV heads."""
    qkv, x = mp.QKVParallelLinear(16, 4, 2, 8, bias=False), torch.randn(6, 16)
    q, k, v = qkv(x).split([32, 16, 16], -1)
    for part, rows in ((q, slice(0, 32)), (k, slice(32, 48)), (v, slice(48, 64))):
        torch.testing.assert_close(part, x @ qkv.weight[rows].t())


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


# --- positions -----------------------------------------------------------------------------------------------------


@states(LAYERS, "Megatron-LM", "transformer/test_rope.py", "TestRotaryEmbedding.test_gpu_forward")
def test_a_table_of_64_positions_has_a_row_each():
    cos, sin = mp.RotaryEmbedding(8)(torch.arange(64))
    assert (cos.shape, cos.dtype) == (sin.shape, torch.float32) == ((64, 4), torch.float32)


@states(
    LAYERS,
    "torchtitan",
    "test_rope.py: TestApplyRotaryEmbCosSin",
    table={
        "test_output_dtype_matches_input": "dtype",
        "test_output_shape_matches_input": "shape",
        "test_computes_in_fp32": "",
    },
)
def test_rope_keeps_shape_and_dtype_and_computes_in_float32(attribute):
    x, (cos, sin) = torch.randn(1, 16, 4, 64).bfloat16(), mp.RotaryEmbedding(64)(torch.arange(16))
    y = mp.apply_rope(x, cos, sin)
    if attribute:
        assert {"dtype": y.dtype, "shape": y.shape}[attribute] == {"dtype": x.dtype, "shape": x.shape}[attribute]
    else:
        first, second = x.float().chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        want = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).bfloat16()
        assert torch.equal(y, want)


@states(LAYERS, "torchtitan", "test_rope.py", "TestYaRNScaling.test_zero_lower_correction_boundary")
def test_yarn_keeps_the_first_frequency_and_divides_the_slow_ones():
    """128 dimensions, base 10,000, factor 40, trained on 64 positions."""
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    found, _ = rope_frequencies(128, 10000.0, scaling)
    assert len(found) == 64
    assert found[0] == pytest.approx(1.0)
    assert found[17] == pytest.approx(10000.0 ** (-34 / 128) / 40.0)


@states(
    LAYERS, "torchtitan", "test_rope.py", "TestYaRNScaling.test_deepseek_mscale_applies_below_original_sequence_length"
)
def test_yarns_factor_of_the_scores_needs_no_long_sequence():
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
               "mscale_all_dim": 1.0}  # fmt: skip
    assert mp.RotaryEmbedding(64, scaling=scaling).score_factor == pytest.approx((0.1 * math.log(40.0) + 1) ** 2)


@states(
    LAYERS, "torchtitan", "test_rope.py", "TestYaRNScaling.test_complex_rope_applies_below_original_sequence_length"
)
def test_yarn_turns_position_one_by_other_angles():
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    one = torch.tensor([1])
    assert not torch.equal(mp.RotaryEmbedding(64, scaling=scaling)(one)[0], mp.RotaryEmbedding(64)(one)[0])


@states(LAYERS, "torchtitan", "test_rope.py", "TestRoPEPositionBoundsCosSin.test_valid_positions")
def test_positions_may_repeat():
    rope, x = mp.RotaryEmbedding(64), torch.randn(1, 16, 4, 64)
    y = mp.apply_rope(x, *rope(torch.arange(16) % 8))
    torch.testing.assert_close(y[:, 8:], mp.apply_rope(x[:, 8:], *rope(torch.arange(8))))


# --- norms ---------------------------------------------------------------------------------------------------------


@states(
    LAYERS,
    "torchtitan",
    "test_rmsnorm.py: TestRMSNorm",
    table={
        "test_config_build": "weight",
        "test_custom_eps": "eps",
        "test_forward": "values",
        "test_init_states": "ones",
    },
)
def test_rms_norm_is_torchs(what):
    norm, theirs = mp.RMSNorm(32, 1e-6), nn.RMSNorm(32, 1e-6)
    x = torch.randn(2, 10, 32) * 1e-3
    if what == "weight":
        assert norm.weight.shape == (32,)
    elif what == "ones":
        assert torch.equal(mp.layers.materialize(mp.RMSNorm(32, device="meta"), seed=0).weight, torch.ones(32))  # type: ignore[arg-type]
    elif what == "eps":
        assert not torch.allclose(norm(x), mp.RMSNorm(32, 1e-5)(x))
    else:
        torch.testing.assert_close(norm(x), theirs(x))


@states(LAYERS, "DeepSpeed", "ops/transformer/inference/test_layer_norm.py", "test_layer_norm")
@states(LAYERS, "DeepSpeed", "ops/transformer/inference/test_rms_norm.py", "test_rms_norm")
@pytest.mark.parametrize("kind", [(mp.LayerNorm, nn.LayerNorm), (mp.RMSNorm, nn.RMSNorm)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 128), (4, 3, 511)])
def test_norms_are_computed_in_float32(kind, dtype, shape):
    ours, theirs = (of(shape[-1], eps=1e-5, dtype=each) for of, each in zip(kind, (dtype, torch.float32), strict=True))
    x = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x.float()).to(dtype))


# --- packed documents ----------------------------------------------------------------------------------------------


@states(PACKED, "torchtitan", "test_varlen_attention.py", "TestPackedVarlenMetadata.test_document_boundaries")
def test_documents_of_three_two_and_four_tokens_end_there():
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2]])
    ends = mp.layers.document_ends(documents)
    assert ends[:4].tolist() == [0, 3, 5, 9]
    assert mp.layers.document_positions(ends, 1, 9).tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]


@states(PACKED, "torchtitan", "test_text_dataset_packing.py", "test_positions_are_contiguous_per_document_runs")
@states(PACKED, "Megatron-LM", "data/test_gpt_dataset.py", "test_inter_document_masking")
def test_positions_begin_anew_after_the_end_of_a_document():
    tokens = torch.randint(6, (3, 64), generator=torch.Generator().manual_seed(0))
    documents = mp.document_ids(tokens, end_of_document=0)
    ends = mp.layers.document_ends(documents)
    positions = mp.layers.document_positions(ends, 3, 64)
    assert int(ends[0]) == 0
    assert int(ends[-1]) == 3 * 64
    steps = positions[:, 1:] - positions[:, :-1]
    assert bool(((steps == 1) | (positions[:, 1:] == 0)).all())
    assert torch.equal(positions[:, 1:] == 0, tokens[:, :-1] == 0)


@states(
    PACKED,
    "Megatron-LM",
    "transformer/test_attention_packed_seq.py",
    "TestParallelAttentionWithPackedSequence.test_gpu_forward",
)
@states(PACKED, "Megatron-LM", "transformer/test_multi_latent_attention.py", "test_gpu_forward_thd_precision")
@pytest.mark.parametrize("latent", [False, True])
def test_packed_documents_attend_as_each_alone(latent):
    rope = mp.RotaryEmbedding(4)
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    attention: nn.Module = mp.ParallelAttention(16, 4, rope=rope)
    if latent:
        attention = mp.MultiLatentAttention(16, 2, **sizes, rope=rope)
    x, ends = torch.randn(1, 9, 16), torch.tensor([0, 3, 5, 9])
    packed = attention(x, cu_seqlens=ends, positions=mp.layers.document_positions(ends, 1, 9))
    alone = torch.cat([attention(part) for part in x.split([3, 2, 4], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


@states(PACKED, "Megatron-LM", "test_sequence_packing.py", "test_get_batch_on_this_rank_for_sequence_packing")
@pytest.mark.parametrize("pattern", ["ring", "alltoall"])
def test_a_rank_of_cp_has_its_share_of_a_packed_row(pattern):
    runs = sequence_runs(8192, mp.Axis(2, 0, name="cp"), pattern)
    assert [sum(end - start for start, end in of) for of in runs] == [4096, 4096]
    assert sorted(i for of in runs for start, end in of for i in range(start, end)) == list(range(8192))


# --- loss ----------------------------------------------------------------------------------------------------------


@states(LOSS, "Megatron-LM", "tensor_parallel/test_cross_entropy.py", "test_vocab_parallel_cross_entropy")
def test_the_cross_entropy_has_megatrons_values():
    """32 columns on each of 4 ranks."""
    logits, target = torch.arange(8.0).repeat(16, 4), torch.arange(0, 32, 2)

    def loss(on: mp.Mesh) -> Tensor:
        return mp.vocab_parallel_cross_entropy(logits, target, tp=on.tp, vocab_size=128, reduction="none")

    want = torch.tensor([10.2309, 8.2309, 6.2309, 4.2309]).repeat(4)
    for found in mp.simulate(loss, tp=4):
        torch.testing.assert_close(found, want, rtol=0, atol=5e-5)


@states(
    LOSS,
    "torchtitan",
    "test_loss.py: TestLossParallelCrossEntropy.test_loss_parallel_cross_entropy_parity",
    table={"320 columns": (320, False), "323 columns": (323, False), "ignored targets": (320, True)},
)
def test_a_sharded_cross_entropy_is_torchs(vocab, ignored):
    draws = torch.Generator().manual_seed(109)
    logits, target = torch.randn(128, vocab, generator=draws), torch.randint(vocab, (128,), generator=draws)
    if ignored:
        target[torch.rand(128, generator=draws) < 0.3] = -100
    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(whole, target, reduction="sum")
    want.backward()

    def loss(on: mp.Mesh) -> None:
        ((start, end),) = cut(vocab, on.tp, 0).mine
        mine = logits[:, start:end].clone().requires_grad_()
        found = mp.vocab_parallel_cross_entropy(mine, target, tp=on.tp, vocab_size=vocab, reduction="sum")
        found.backward()
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(mine.grad, whole.grad[:, start:end])  # type: ignore[index]

    mp.simulate(loss, tp=4)


@states(LOSS, "torchtitan", "test_loss.py", "TestLoss.test_compute_logprobs_token_major")
def test_log_probabilities_and_entropy_are_torchs():
    logits, target = torch.randn(8, 16), torch.randint(16, (8,))
    log_prob, entropy = mp.layers.vocab_parallel_log_prob(logits, target)
    torch.testing.assert_close(log_prob, -F.cross_entropy(logits, target, reduction="none"))
    p = logits.softmax(-1)
    torch.testing.assert_close(entropy, logits.logsumexp(-1) - (p * logits).sum(-1))


@states(LOSS, "torchtitan", "test_loss.py", "TestLoss.test_ignore_index_equal_per_token_contribution")
def test_the_sum_grows_with_the_tokens_that_count():
    logits, target = torch.randn(32, 100), torch.randint(100, (32,))
    target[[1, 11, 21, 31]] = -100
    once = mp.vocab_parallel_cross_entropy(logits, target, reduction="sum")
    twice = mp.vocab_parallel_cross_entropy(logits.repeat(2, 1), target.repeat(2), reduction="sum")
    assert float(twice / once) == pytest.approx(2.0, rel=1e-6)
    mean = mp.vocab_parallel_cross_entropy(logits, target)
    assert float(mean) == pytest.approx(float(once) / 28, rel=1e-6)


@states(LOSS, "torchtitan", "test_loss.py", "TestLoss.test_ignore_index_gradient_accumulation_consistency")
def test_sums_of_micro_batches_divided_once_are_the_mean_of_all():
    logits, target = torch.randn(3, 8, 100), torch.randint(100, (3, 8))
    target[1, ::2], target[2, 2:] = -100, -100
    total = sum(mp.vocab_parallel_cross_entropy(x, y, reduction="sum") for x, y in zip(logits, target, strict=True))
    mean = mp.vocab_parallel_cross_entropy(logits, target)
    assert float(total / (target >= 0).sum()) == pytest.approx(float(mean), rel=1e-5)


@states(
    LOSS,
    "torchtitan",
    "test_loss.py: TestChunkedLossWrapper",
    table={
        "test_chunked_loss_matches_torch_chunk_reference_for_supported_shapes": (24, 5, 17, ()),
        "test_chunked_loss_backward_matches_torch_chunk_reference": (24, 5, 17, ()),
        "test_numerical_equivalence": (16, 32, 64, (1, 11)),
    },
)
def test_a_loss_from_hidden_states_is_that_of_the_logits(tokens, width, vocab, ignored):
    head, x = mp.ColumnParallelLinear(width, vocab, bias=False), torch.randn(tokens, width, requires_grad=True)
    target = torch.randint(vocab, (tokens,))
    target[list(ignored)] = -100
    loss = mp.linear_cross_entropy(x, head.weight, target, vocab_size=vocab, reduction="sum")
    inner, weight = (t.detach().clone().requires_grad_() for t in (x, head.weight))
    want = F.cross_entropy(inner @ weight.t(), target, reduction="sum")
    torch.testing.assert_close(loss, want)
    loss.backward()
    want.backward()
    torch.testing.assert_close(x.grad, inner.grad)
    torch.testing.assert_close(head.weight.grad, weight.grad)


def test_labels_of_another_order_are_refused_where_shapes_tell():
    """A convention: Megatron's logits are [s, b, v] and its labels [b, s]."""
    logits = torch.randn(5, 2, 7)
    with pytest.raises(ValueError, match="don't have the same tokens"):
        mp.vocab_parallel_cross_entropy(logits, torch.zeros(2, 5).long())
