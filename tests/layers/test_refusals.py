"""A table of what the layers refuse. Their axes have no group, so each refusal comes before any message."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore import MultiLatentAttention, ParallelAttention, RotaryEmbedding, sequence_index
from mpcore.experimental import GatedDeltaNet, Mamba2, MultiTokenPrediction, gated_delta_rule
from mpcore.layers import ColumnParallelEmbedding, document_ends, linear_log_prob
from mpcore.layers.attention.context import context_attention
from mpcore.layers.attention.sequence import KINDS
from mpcore.random import dropout
from mpcore.sharding.declare import Shard, cut


def axis(size: int, rank: int = 0, name: str = "tp", inner: int = 0) -> mp.Axis:
    levels = (mp.Axis(size // inner, rank // inner), mp.Axis(inner, rank % inner)) if inner else None
    return mp.Axis(size, rank, None, name, levels)


ONE, TWO, FOUR, CP = mp.Axis(), axis(2), axis(4), axis(2, name="cp")
ZERO = torch.zeros
ALL, CROSS = ParallelAttention(8, 4), ParallelAttention(8, 4, memory_dim=4)
X, MEMORY, BIAS = ZERO(2, 3, 8), ZERO(2, 5, 4), ZERO(4, 3, 3)
LATENT = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def true(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def latent(**options: object) -> MultiLatentAttention:
    return MultiLatentAttention(6, 5, **LATENT, **{"rope": RotaryEmbedding(4), **options})


def in_context(kind: str, rows: int = 1, **options: object) -> Tensor:
    q = ZERO(rows, 4, 4, 4)
    return context_attention(q, q, q, kind, axis(4, name="cp", inner=2), **options)


def cached(layer: nn.Module = ALL, **call: object) -> Tensor:
    """Call a layer, or the one in `of`, with a cache of 4 tokens that holds 3 of two rows."""
    cache = layer.new_cache(4)
    with torch.no_grad():
        layer(X, cache=cache)
        try:
            return call.pop("of", layer)(**{"x": X[:, :1], "cache": cache, **call})
        finally:
            assert cache.length == 3


def dropped(samples=None, tokens=None, features: int = 10, **options: object) -> Tensor:
    site = mp.Dropout(0.5, **options)
    mp.layers.seed_dropout(site, 3)
    return site(torch.ones(4, 12, features), samples, tokens)


SENT = {"tp": TWO, "capacity_factor": 1.0, "aux_loss": "sequence"}


def routed(options: dict, **call: object) -> Tensor:
    moe = mp.ParallelMoE(4, 3, 4, 2, dtype=torch.float64, **{n: value for n, value in options.items() if n != "key"})
    moe.router.key = options.get("key", moe.router.key)
    return moe(**{"x": ZERO(4, 8, 4, dtype=torch.float64), **call})


def of_cp(rank: int, rope: RotaryEmbedding | None, context: str, dim: int) -> Tensor:
    """Give attention the ends of this rank's shard: of two documents in two rows of 8 it has 4 tokens of a row."""
    layer = ParallelAttention(8, 4, rope=rope, cp=axis(2, rank, "cp"), context=context, sequence_dim=dim)
    documents = torch.tensor([[0] * 3 + [1] * 5] * 2)[:, sequence_index(8, layer.cp, context)]
    return layer(ZERO(2, 4, 8) if dim else ZERO(4, 2, 8), cu_seqlens=document_ends(documents))


REFUSED: list[tuple[str, Callable[[], object]]] = [
    # attention
    ("dim 6 is not a multiple of num_heads 4: give head_dim", lambda: ParallelAttention(6, 4)),
    ("window 3 needs a causal mask", lambda: ParallelAttention(8, 4, causal=False, window=3)),
    ("window 0 needs a causal mask and at least 1 token", lambda: ParallelAttention(8, 4, window=0)),
    ("softcap 0 is not a positive number", lambda: ParallelAttention(8, 4, softcap=0)),
    *((f"x has {len(shape)} dimensions, but attention takes [B, T, D]", lambda shape=shape: ALL(ZERO(shape)))
      for shape in ((5, 8), (2, 3, 4, 8))),
    ("from 0 to 8, the tokens of all rows, but runs from 0 to 4", lambda: ALL(ZERO(2, 4, 8), cu_seqlens=ends(0, 4))),
    ("from 0 to 4, the tokens of all rows, but runs from 1 to 4", lambda: ALL(ZERO(1, 4, 8), cu_seqlens=ends(1, 4))),
    ("runs from 0 to 4, falling from 3 to 2", lambda: ALL(ZERO(1, 4, 8), cu_seqlens=ends(0, 3, 2, 4))),
    ("cu_seqlens is a list, but must be int32 or int64 [n + 1], such as", lambda: ALL(X, cu_seqlens=[0, 4])),
    ("the mask is of torch.float32, which torch would add", lambda: ALL(X, mask=torch.ones(3, 3))),
    *((f"mask {shape} is none of ~ for 2 rows with 8 tokens on each of 1 ranks", lambda shape=shape, dim=dim:
       ParallelAttention(8, 4, tp=TWO, sequence_parallel=True, sequence_dim=dim)(
           ZERO(2, 4, 8) if dim else ZERO(4, 2, 8), mask=true(*shape)))
      for dim in (0, 1) for shape in ((4, 4), (3, 1, 8), (2, 8))),
    ("rotary and positions are given", lambda: latent()(X[..., :6], rotary=(), positions=ends(0, 1, 2))),
    *(("length is 4, but the whole sequence has 3 tokens", lambda how=how: ALL(X, length=4, **how))
      for how in ({}, {"bias": BIAS}, {"mask": true(3, 3)})),
    # scores
    *((f"{next(iter(how))} can't go with cp size 2",
       lambda how=how: ParallelAttention(8, 4, cp=CP, context="alltoall", **how))
      for how in ({"alibi": True}, {"sinks": True}, {"memory_dim": 4})),
    *((f"memory_dim 4 has no {name}", lambda how={name: value}: ParallelAttention(8, 4, memory_dim=4, **how))
      for name, value in (("causal", True), ("rope", RotaryEmbedding(2)), ("alibi", True))),
    ("window 2 needs a causal mask", lambda: ParallelAttention(8, 4, memory_dim=4, window=2)),
    ("impl='triton'", lambda: ParallelAttention(8, 4, impl="triton")(X)),
    *(("goes through torch's attention: leave out impl 'reference'", call) for call in (
        lambda: ParallelAttention(8, 4, alibi=True, impl="reference"),
        lambda: ParallelAttention(8, 4, impl="reference")(X, mask=true(3, 3)))),
    *(("attends to x alone: build it with memory_dim", lambda of=of: of(X, MEMORY))
      for of in (ALL, MultiLatentAttention(8, 2, **LATENT))),
    ("of a `memory` [B, S, 4]: give it", lambda: CROSS(X)),
    ("memory (1, 5, 4) has 1 rows of width 4, but x has 2 rows and memory_dim is 4", lambda: CROSS(X, MEMORY[:1])),
    ("has 2 rows of width 8, but x has 2 rows and memory_dim is 4", lambda: CROSS(X, X)),
    ("memory has 2 dimensions", lambda: CROSS(X, MEMORY[0])),
    *(("cu_seqlens and length are of x, and not of a `memory`: give a mask", lambda how=how: CROSS(X, MEMORY, **how))
      for how in ({"cu_seqlens": ends(0, 6)}, {"length": 3})),
    ("mask (3, 3) is none of [3, 5], [2, 3, 5]", lambda: CROSS(X, MEMORY, mask=true(3, 3))),
    ("mask is of torch.float32, ~ give mask.bool(), or ~ `bias`", lambda: CROSS(X, MEMORY, mask=torch.ones(3, 5))),
    *((f"bias {shape} of torch.float32 is no float [heads, 3, 3] or [2, heads, 3, 3] with 4 heads: expand",
       lambda shape=shape: ALL(X, bias=ZERO(shape)))
      for shape in ((1, 3, 3), (4, 2, 3), (0, 4, 3, 3), (3, 4, 3, 3), (4, 3, 4), (4, 1, 3), (3, 3))),
    ("torch.bool is no float", lambda: ALL(X, bias=BIAS.bool())),
    ("a bias can't go with cp size 2: use rope, or cp 1",
     lambda: ParallelAttention(8, 4, cp=CP, context="alltoall", tp=TWO)(X, bias=BIAS)),
    # a cache
    ("passes no gradients: decode under torch.inference_mode() or torch.no_grad",
     lambda: ALL(X, cache=ALL.new_cache(4))),
    *((f"a cache needs {said}", lambda how=how, call=call: call(ParallelAttention(8, 4, **how))) for how, said in (
        ({"causal": False}, "causal=True"), ({"cp": CP, "context": "ring"}, "cp 1, not 2"),
        ({"tp": TWO, "sequence_parallel": True}, "sequence_parallel=False"),
    ) for call in (lambda layer: layer.new_cache(4), lambda layer: layer(X, cache=ALL.new_cache(4)))),
    ("max_length 0 holds no token", lambda: ALL.new_cache(0)),
    ("2 tokens after 3 don't fit a cache of max_length 4", lambda: cached(x=X[:, :2])),
    ("the cache holds 2 rows, but x has 1: ~ by cache.select", lambda: cached(x=X[:1, :1])),
    *(("this cache is another layer's: make one for each", lambda at=at: cached(at[0](*at[1:]), of=at[0](*at[1:])))
      for at in ((ParallelAttention, 8, 4), (GatedDeltaNet, 8, 2, 4, 4, 4), (Mamba2, 8, 4, 4, 4))),
    ("give no cu_seqlens or length", lambda: cached(length=3)), ("attends to x alone", lambda: cached(memory=X)),
    ("mask (1, 3) is none of [1, 4]", lambda: cached(mask=true(1, 3))),
    ("bias (4, 1, 3) ~ [heads, 1, 4]", lambda: cached(bias=ZERO(4, 1, 3))),
    # context parallelism
    ("context 'spiral' is none of 'alltoall', 'ring', 'zigzag'",
     lambda: ParallelAttention(8, 4, context="spiral", cp=axis(4, name="cp"))),
    ("the cp size 4 needs a context, one of 'alltoall', 'ring'",
     lambda: ParallelAttention(8, 4, cp=axis(4, name="cp"))),
    ("'alltoall' can't cut 3 heads over the cp size 4: 'zigzag', 'ring' and",
     lambda: ParallelAttention(6, 3, cp=axis(4, name="cp"), context="alltoall")),
    ("'alltoall' can't cut 2 heads over the cp size 4",
     lambda: ParallelAttention(8, 4, cp=axis(4, name="cp"), tp=TWO, context="alltoall")),
    ("can't cut 2 heads over the cp size 3", lambda: latent(context="alltoall", cp=axis(3, name="cp"), tp=TWO)),
    ("'two-level' can't cut 3 heads over the cp_inner size 4",
     lambda: ParallelAttention(6, 3, cp=axis(8, inner=4), context="two-level")),
    ("'two-level' needs the cp axis of size 4 as outer x inner: build_mesh(cp=4",
     lambda: ParallelAttention(8, 4, cp=axis(4, name="cp"), context="two-level")),
    *((said,
       lambda kind=kind, rows=rows, how=how: in_context(kind, rows, **how)) for kind in KINDS for said, rows, how in (
        ("this rank has 4 tokens, but rank 0 of ~ holds 3 of 11: give the", 1, {"length": 11}),
        ("window 3 needs a causal mask", 1, {"causal": False, "window": 3}),
        ("impl='torch' ~ not ~window 3 or softcap 2.0: leave out impl", 1,
         {"window": 3, "softcap": 2.0, "impl": "torch"}),
        ("rise from 0 to 16, the tokens of all rows, but runs from 0 to 15", 1, {"cu_seqlens": ends(0, 4, 15)}),
        ("rise from 0 to 32, the tokens of all rows, but runs from 0 to 16", 2, {"cu_seqlens": ends(0, 16)}))),
    *(("3 tokens is shorter than the cp size 4, ~: pad it to 4 ~ cp 3", lambda kind=kind:
       mp.shard_sequence(ZERO(2, 3), axis(4, name="cp", inner=2), kind)) for kind in KINDS),
    ("one sequence can't have the lengths {'a': 8, 'b': 9}",
     lambda: mp.shard_sequence({"a": ZERO(8), "b": ZERO(1, 9)}, FOUR, "ring")),
    ("'ring' can't serve a mask (8, 8) ~: 'allgather' and 'alltoall' can",
     lambda: ParallelAttention(8, 4, cp=axis(4, name="cp"), context="ring")(ZERO(1, 2, 8), mask=true(8, 8))),
    *((f"mask {shape} is none of [T, T], ~ for 2 rows with 4 tokens on each of 4 ranks", lambda shape=shape:
       ParallelAttention(8, 4, cp=axis(4, name="cp"), context="allgather")(ZERO(2, 4, 8), mask=true(*shape)))
      for shape in ((9, 9), (16,), (2, 16), (16, 1), (3, 16, 16), (2, 2, 16), (2, 1, 1, 16))),
    *((f"cu_seqlens ends at 8, so rank {rank} of cp 2 holds 2 tokens of each of 2 rows, but x has 4: give the "
       "cu_seqlens of the whole sequence, and x as shard_sequence cuts it",
       lambda rank=rank, given=given: of_cp(rank, *given))
      for rank in (0, 1) for given in ((None, "ring", 1), (RotaryEmbedding(2), "allgather", 0))),
    # latent attention
    ("num_heads 5 is smaller than the tp size 8", lambda: latent(tp=axis(8))),
    ("rope turns 8 dimensions, but qk_rope_head_dim is 4", lambda: latent(rope=RotaryEmbedding(8))),
    # rotations and recurrences
    ("RoPE rotates pairs: 3 of head_dim 8, fraction 0.4, is not even", lambda: RotaryEmbedding(8, fraction=0.4)),
    ("rope_type 'dynamic' is unknown: it is one of ['default', 'linear', 'llama3', 'yarn']",
     lambda: RotaryEmbedding(8, scaling={"rope_type": "dynamic"})),
    ("low_freq_factor 4.0 must be below high_freq_factor 4.0", lambda: RotaryEmbedding(8, scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16})),
    ("rope scaling 'linear' lacks ['factor']", lambda: RotaryEmbedding(8, scaling={"rope_type": "linear"})),
    ("rope scaling 'yarn' has no ['rope_theta'] (rope_theta is `base` here",
     lambda: RotaryEmbedding(8, scaling={**YARN, "rope_theta": 5e5})),
    ("num_value_heads 4 ~ num_key_heads 3", lambda: GatedDeltaNet(6, 3, 4, 4, 4)),
    ("cp size 2 needs a context", lambda: GatedDeltaNet(6, 2, 4, 4, 4, cp=CP)),
    *((said, lambda how=how: gated_delta_rule(*[ZERO(1, 2, 1, 1)] * 3, *[ZERO(1, 2, 1)] * 2, cp=CP, **how))
      for said, how in (
          ("runs are of 1 ranks, but cp has 2", {}),
          ("before the first token needs cp 1, not 2", {"state": X, "runs": (((0, 2),), ((2, 4),))}))),
    ("send is [1, 3] and receive None", lambda: mp.collectives.all_to_all_rows(ZERO(4, 1), TWO, [1, 3])),
    ("6 tokens~ 7 of 13", lambda: GatedDeltaNet(6, 2, 4, 4, 4, cp=CP, context="zigzag")(ZERO(1, 6, 6), length=13)),
    # feed-forward layers
    ("activation 'gelu_new' is unknown: it is one of ['geglu', 'geglu_tanh', ",
     lambda: mp.ParallelMLP(4, 8, "gelu_new")),
    *(("activation ~ gives other values on a part of the features", lambda mixes=mixes: mp.ParallelMLP(4, 8, mixes))
      for mixes in (nn.Softmax(-1), lambda x: x - x.mean(0), nn.Dropout())),
    *(("activation ~", lambda mixes=mixes: mp.ParallelMLP(4, 8, mixes))
      for mixes in (lambda x: x[..., :1], lambda x: x.sum(-1))),
    ("PReLU~ has parameters, and each rank of tp would train its own", lambda: mp.ParallelMLP(4, 8, nn.PReLU())),
    ("0 inputs for 1 blocks", lambda: MultiTokenPrediction(4, [nn.Identity()])(ZERO(1, 2, 4), [], nn.Identity())),
    # dropout
    ("dropout has no seed: call mpcore.layers.seed_dropout",
     lambda: mp.Dropout(0.5)(torch.ones(4, 12, 10), torch.arange(4))),
    *(("residual has shape (1, 3, 8), but x has (2, 3, 8)", lambda p=p: mp.Dropout(p).eval()(X, residual=X[:1]))
      for p in (0.0, 0.5)),
    ("dropout 0.5 needs samples~(4, 12, 10)~ nn.Sequential passes x alone", dropped),
    ("x (4, 12, 10), samples (3,) are not [B, T, D], [B]", lambda: dropped(torch.arange(3))),
    ("tokens (24,) for 12: give this rank's", lambda: dropped(torch.arange(4), torch.arange(24))),
    *((f"dropout probability {p} is not in [0, 1)", lambda p=p: mp.Dropout(p)) for p in (1.0, -0.1)),
    *((f"dropout probability {p} is not in [0, 1)",
       lambda p=p: dropout(X, p, key=1, samples=ends(0, 1))) for p in (1.0, -0.1)),
    ("x has 10 features, and this rank's shard 5: pass sharded_features and unit",
     lambda: dropped(torch.arange(4), tp=axis(2, 1), sharded_features=10)),
    ("sharded_features=10 with sequence_parallel=True: between a column-parallel",
     lambda: mp.Dropout(0.1, tp=TWO, sharded_features=10, sequence_parallel=True)),
    ("not a multiple", lambda: mp.Dropout(0.1, tp=TWO, sharded_features=10, unit=4)),
    # tables
    *((f"padding_idx {bad} is outside the table of 10 rows",
       lambda bad=bad: mp.VocabParallelEmbedding(10, 4, padding_idx=bad))
      for bad in (10, -11)),
    *((f"token id {bad} is outside the vocabulary of 10",
       lambda bad=bad, tp=tp: mp.VocabParallelEmbedding(10, 4, tp=tp)(
        torch.tensor([[1, bad]]))) for tp in (ONE, *(axis(4, rank) for rank in range(4))) for bad in (10, 11, -1)),
    ("token id 7 is outside the vocabulary of 7", lambda: ColumnParallelEmbedding(7, 4)(torch.tensor([7]))),
    ("sequence length 1021 is not a multiple of the tp size 4",
     lambda: mp.VocabParallelEmbedding(10, 4, tp=FOUR, sequence_parallel=True)(ZERO(1, 1021, dtype=torch.int64))),
    ("num_embeddings 3 is smaller than the tp size 4", lambda: mp.VocabParallelEmbedding(3, 4, tp=FOUR)),
    ("embedding_dim 3 is smaller than the tp size 4", lambda: ColumnParallelEmbedding(7, 3, tp=FOUR)),
    *((f"positions {tuple(at.shape)} for 4 tokens: under context parallelism select this rank", lambda at=at:
       mp.PositionEmbedding(8, 4)(ZERO(1, 4, 4), at)) for at in (ends(*range(8)), ZERO(1, 8).int(), ZERO(2, 4).int())),
    ("x (4, 4) is not [B, T, D]", lambda: mp.PositionEmbedding(8, 4)(ZERO(4, 4))),
    # linear layers
    *((said, lambda layer=layer, shape=shape: layer()(ZERO(shape))) for said, layer, shape in (
        ("1021 is not a multiple of the tp size 4~pad it to 1024",
         lambda: mp.RowParallelLinear(8, 5, tp=FOUR, sequence_parallel=True), (1, 1021, 2)),
        ("length 3 is not a multiple of the tp size 4",
         lambda: mp.RowParallelLinear(8, 5, tp=FOUR, sequence_parallel=True, sequence_dim=0), (3, 1, 2)),
        ("is 5, but in_features is 6", lambda: mp.ColumnParallelLinear(6, 8, tp=FOUR), (2, 5)),
        ("is 8, but this rank's share of in_features 8 is 2~ swapped",
         lambda: mp.RowParallelLinear(8, 5, tp=FOUR), (2, 8)),
        ("is 3, but in_features is 10",
         lambda: mp.RowParallelLinear(10, 5, tp=FOUR, input_is_parallel=False), (2, 3)))),
    ("out_features 3 is smaller than the tp size 4", lambda: mp.ColumnParallelLinear(6, 3, tp=FOUR)),
    ("in_features 3 is smaller than the tp size 4", lambda: mp.RowParallelLinear(3, 6, tp=FOUR)),
    ("hidden_features 3 is smaller than the tp size 4", lambda: mp.GateUpParallelLinear(6, 3, tp=FOUR)),
    ("num_heads 2 is smaller than the tp size 4", lambda: mp.QKVParallelLinear(6, 2, 1, 8, tp=FOUR)),
    *((f"num_heads 6 is not a multiple of num_kv_heads {n}", lambda n=n: ParallelAttention(6, 6, n, 8, tp=FOUR))
      for n in (4, 0)),
    ("in_features 10 is not a multiple of the unit 4", lambda: mp.RowParallelLinear(10, 6, tp=FOUR, unit=4)),
    ("in_features 8 / 4 = 2 is smaller than the tp size 4", lambda: mp.RowParallelLinear(8, 6, tp=FOUR, unit=4)),
    ("gather_output can't put", lambda: mp.GateUpParallelLinear(6, 8, tp=FOUR, gather_output=True)),
    ("gather_output can't put", lambda: mp.ColumnParallelLinear(6, 8, tp=FOUR, unit=2, gather_output=True)),
    ("gather_output can't put", lambda: mp.ColumnParallelLinear(
        6, 4, tp=FOUR, gather_output=True, shard=Shard(FOUR, 0, cut(4, FOUR, 0).runs[::-1]))),
    ("a sum of 7, not of out_features 8", lambda: mp.ColumnParallelLinear(6, 8, tp=FOUR, blocks=(4, 3))),
    ("dimension 0 over tp 4", lambda: mp.ColumnParallelLinear(6, 8, tp=FOUR, shard=cut(8, TWO, 0))),
    # losses
    *((f"token id {bad} is outside the vocabulary of 12", lambda bad=bad: mp.vocab_parallel_cross_entropy(
        ZERO(3, 6), torch.tensor([0, bad, -100]), tp=TWO, vocab_size=12)) for bad in (12, -1)),
    ("6 columns ~ cut over the tp axis of size 2: give vocab_size, which 12 would be",
     lambda: mp.vocab_parallel_cross_entropy(ZERO(3, 6), ends(0, 1, 2), tp=TWO)),
    ("target (3, 12) is of torch.float64, but ids of classes are integers",
     lambda: mp.vocab_parallel_cross_entropy(ZERO(3, 6), ZERO(3, 12).double(), tp=TWO, vocab_size=12)),
    *((f"sequence_dim {dim} is none of {len(shape) - 1} in front of D in x",
       lambda head=head, shape=shape, dim=dim: head(
        ZERO(shape), ZERO(11, 4), ZERO(8, dtype=torch.long), tp=TWO, sequence_parallel=True, sequence_dim=dim))
      for head in (mp.linear_cross_entropy, linear_log_prob)
      for shape, dim in (((4, 4), 1), ((2, 4, 4), 2), ((2, 4, 4), -2))),
    # experts
    *((said, lambda how=how: mp.ParallelMoE(4, 3, 4, **{"top_k": 2, **how})) for how, said in (
        ({"top_k": 5}, "top_k 5 is not between 1 and the number of experts 4"),
        ({"top_k": 0}, "top_k 0 is not between 1"),
        ({"top_k": 1, "normalize": True}, "normalize=True with top_k 1: one weight divided by itself is always 1"),
        ({"ep": axis(3, 0, "ep")}, "4 experts are not a multiple of the ep size 3"),
        ({"etp": axis(4, 0, "etp")}, "hidden_dim 3 is smaller than the etp size 4"),
        *(({"capacity_factor": n}, f"capacity_factor {n} is not positive") for n in (0.0, float("nan"))),
        ({"score": "tanh"}, "score 'tanh' is neither"), ({"aux_loss": "batch"}, "aux_loss 'batch' is none of"),
        ({"groups": 3}, "4 experts are not a multiple of 3 groups"),
        ({"groups": 2, "top_groups": 3}, "top_groups 3 is not between 1 and the number of groups 2"),
        ({"groups": 4, "top_groups": 1}, "top_k 2 is more than the 1 experts of 1 groups of 1"),
        ({"routed_scale": 0.0}, "routed_scale 0.0 is not positive"), ({"jitter": 1.0}, "jitter 1.0 is not in [0, 1)"),
        ({"z_loss": -1.0}, "z_loss -1.0 is negative"), ({"dispatch": "ring"}, "dispatch 'ring' is none of"),
        ({"activation": "tanh"}, "activation 'tanh' is unknown"),
        ({"shared_experts": -1}, "shared_experts -1 is negative"))),
    *((said, lambda how=how, call=call: routed(how, **call)) for how, call, said in (
        ({"aux_loss": "sequence"}, {}, "balance losses need loss_scale"), ({"jitter": 0.1}, {}, "jitter has no seed"),
        *(({"jitter": 0.1, "key": 1}, call, "jitter 0.1 needs samples") for call in ({}, {"samples": torch.arange(8)})),
        ({}, {"mask": true(4, 3)}, "mask has shape (4, 3), but this rank's sequences are (4, 8)"),
        ({}, {"positions": ends(0, 1, 2)}, "positions has shape (3,), but this rank's sequence 8 tokens"),
        ({}, {"x": ZERO(4, 8, 3)}, "is 3, but dim is 4"), ({}, {"x": ZERO(32, 4)}, "x (32, 4) is not [B, T, D]"),
        *(({}, {"x": ZERO(4, 8, 4, dtype=dtype)}, f"x is of {dtype}, the experts of torch.float64")
          for dtype in (torch.float32, torch.bfloat16)),
        *((SENT, {"mask": torch.ones(4, 8, dtype=dtype), "loss_scale": 0.1}, f"mask is of {dtype}: give mask.bool()")
          for dtype in (torch.float32, torch.int64)),
        (SENT, {"loss_scale": ZERO(3)}, "loss_scale has shape (3,), the batch 4 rows"))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_a_wrong_input_is_refused(message, call):
    """A message is plain text, in which `~` stands for anything."""
    with pytest.raises(ValueError, match=".*".join(map(re.escape, message.split("~")))):
        call()
