"""Attention: dense equals the formula written out, sharded equals dense, for every kind of head and of mask."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpcore import ParallelAttention, RotaryEmbedding, apply_rope, full_state_dict, load_full_state_dict
from mpcore import collectives as c
from mpcore.gradients import reduce_gradients
from tests.equality import FEWER_SIZES, close, draw, same_model, tp_axis
from tests.oracles.attention import attend, sees
from tests.pool import on_ranks

B, T, D, K = 2, 12, 6, 4
SIZES = [pytest.param(2, marks=pytest.mark.slow), 3, 4]
HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 2), (6, 3), (6, 6)]
DOCUMENTS = torch.tensor([0, 1, 5, 5, 12])
PADDED = torch.arange(T) < torch.tensor([[[5]], [[T]]])  # [B, 1, T]
SLOPES = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])  # of 6 heads: those of 4 and of 8


def build_attention(heads, kv_heads, **options):
    """A layer whose norms and sinks are away from their first values, so that they matter."""
    rope = RotaryEmbedding(K, 100.0) if options.pop("rope", False) else None
    return nudge(ParallelAttention(D, heads, kv_heads, K, rope=rope, **options))


def nudge(module):
    with torch.no_grad():
        for i, (name, p) in enumerate(module.named_parameters()):
            if "norm" in name or "sinks" in name:
                p.copy_(1 + 0.3 * draw(40 + i, *p.shape))
    return module


def formula(p, heads, options, x, memory=None, bias=None, cu_seqlens=None, mask=None):
    """The layer of unsharded parameters `p`: projections, norms and rotations around `attend`."""
    widths, T = [n * K for n in (heads[0], heads[1], heads[1])], x.shape[1]
    if memory is None:
        q, k, v = F.linear(x, p["qkv.weight"], p.get("qkv.bias")).split(widths, -1)
    else:
        q, (k, v) = F.linear(x, p["q.weight"], p["q.bias"]), F.linear(memory, p["kv.weight"], p["kv.bias"]).chunk(2, -1)
    q, k, v = (t.unflatten(-1, (-1, K)) for t in (q, k, v))
    if options.get("qk_norm"):
        q, k = F.rms_norm(q, (K,), p["q_norm.weight"], 1e-6), F.rms_norm(k, (K,), p["k_norm.weight"], 1e-6)
    if options.get("rope"):
        ends = [0] if cu_seqlens is None else cu_seqlens.tolist()
        places = torch.tensor([t - max(end for end in ends if end <= t) for t in range(T)])
        q, k = (apply_rope(t, *RotaryEmbedding(K, 100.0)(places, torch.float64)) for t in (q, k))
    if memory is None:
        see = sees(T, options.get("causal", True), options.get("window"), cu_seqlens)
    else:
        see = torch.ones(T, memory.shape[1]).bool()
    bias = 0 if bias is None else bias
    if options.get("alibi"):
        bias = bias - SLOPES[:, None, None] * (torch.arange(T)[:, None] - torch.arange(T)).abs()
    see = see if mask is None else (see & mask).view(-1, 1, *see.shape)
    y, _ = attend(q, k, v, see, softcap=options.get("softcap"), bias=bias, sinks=p.get("sinks.weight"))
    return F.linear(y.flatten(2), p["output.weight"], p.get("output.bias"))


def check_formula(heads, options, leaves, **others):
    """Compare the output of one rank with the formula, and the gradients of parameters and of `leaves`."""
    attention = build_attention(*heads, **options).double()
    p = {name: q.detach().clone().requires_grad_() for name, q in attention.named_parameters()}
    ours, theirs = ({name: t.clone().requires_grad_() for name, t in leaves.items()} for _ in range(2))
    y, want = attention(**ours, **others), formula(p, heads, options, **theirs, **others)
    close(y.detach(), want.detach(), "y")
    for each in (y, want):
        each.backward(draw(5, *each.shape))
    for name, t in ours.items():
        close(t.grad, theirs[name].grad, f"gradient of {name}")
    for name, q in attention.named_parameters():
        close(q.grad, p[name].grad, name)


DENSE = [
    {}, {"bias": False}, {"rope": True}, {"qk_norm": True, "rope": True}, {"causal": False, "rope": True},
    {"window": 1}, {"window": 3, "rope": True}, {"window": 100}, {"softcap": 0.3}, {"softcap": 0.3, "causal": False},
    {"softcap": 0.3, "window": 3, "rope": True}, {"impl": "reference"}, {"impl": "reference", "causal": False},
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("options", DENSE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_dense_is_the_formula(heads, options, packed):
    check_formula(heads, options, {"x": draw(1, 1 if packed else B, T, D)}, cu_seqlens=DOCUMENTS if packed else None)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("options", [{"rope": True}, {"window": 3}, {"causal": False}], ids=str)
def test_a_mask_and_causality_windows_and_documents_all_hold(options, packed):
    """A token sees what all of them let it see: a mask alone would show it the future."""
    x, ends = draw(1, 1 if packed else B, T, D), DOCUMENTS if packed else None
    for mask in (torch.ones(T, T).bool(), (draw(3, len(x), T, T) < 0) | torch.eye(T).bool()):
        check_formula((4, 2), options, {"x": x}, cu_seqlens=ends, mask=mask)


def check_sharded(heads, options, leaves, sequence=None, **others):
    """Compare a layer on tp with the unsharded one. Under sequence parallel, a rank has shards of x and memory."""
    sp = {} if sequence is None else {"sequence_parallel": True, "sequence_dim": sequence}

    def run(attention):
        tp, given = attention.output.tp, {name: t.clone().requires_grad_() for name, t in leaves.items()}
        parts = {n: t if sequence != 0 or n == "bias" else t.transpose(0, 1) for n, t in given.items()}
        if sequence is not None:
            parts |= {name: c.split(t, tp, sequence) for name, t in parts.items() if name != "bias"}
        y = attention(**parts, **others)
        y = y if sequence is None else c.gather(y, tp, sequence)
        (y * draw(5, *y.shape)).sum().backward()
        return {"y": y.detach(), **{f"gradient of {name}": t.grad for name, t in given.items()}}

    same_model(lambda **axes: build_attention(*heads, **options, **sp, **axes), run, tp=tp_axis())


def check_attention(heads, options, sequence, shape=(B, T), packed=False, mask=None):
    ends = DOCUMENTS if packed else None
    check_sharded(heads, options, {"x": draw(1, *shape, D)}, sequence, cu_seqlens=ends, mask=mask)


def check_heads(qk_norm):
    for heads in HEADS:
        options = {"qk_norm": qk_norm, "rope": True}
        check_attention(heads, options, None)
        check_attention(heads, options, 1)
    check_attention((8, 2), options, 0)
    check_attention((6, 2), {**options, "bias": False}, 0)


@pytest.mark.parametrize("size", SIZES)
def test_sharded_equals_dense_for_every_grouping_of_heads(ranks, size):
    ranks(size, check_heads, False)


@pytest.mark.parametrize("size", FEWER_SIZES)
def test_pitfall_12_qk_norm_gradients_are_summed_with_and_without_sequence_parallel(ranks, size):
    ranks(size, check_heads, True)


@on_ranks(*FEWER_SIZES)
def test_sharded_equals_dense_for_every_mask():
    for heads, causal, packed in itertools.product([(8, 2), (6, 2)], (True, False), (True, False)):
        check_attention(heads, {"causal": causal, "rope": True}, None, shape=(1, T), packed=packed)
        check_attention(heads, {"causal": causal, "rope": True}, 1, shape=(1, T), packed=packed)
    for packed in (True, False):
        check_attention((6, 2), {"window": 3, "rope": True}, 1, shape=(1, T), packed=packed)
    for sequence in (None, 1, 0):
        check_attention((6, 2), {"rope": True}, sequence, mask=PADDED)
    check_attention((6, 2), {"softcap": 0.3}, 1, shape=(1, T))
    check_attention((6, 2), {"rope": True}, None, shape=(1, 1))
    check_attention((6, 2), {"rope": True}, None, shape=(0, T))
    check_attention((6, 2), {"rope": True, "qk_norm": True}, 1, shape=(0, T))


@pytest.mark.parametrize("rope", [False, True])
def test_query_and_key_norms_may_be_replaced(rope):
    """By a norm of one's own, of a class of its own or not: the fused rotation must not take it for RMSNorm."""
    attention = build_attention(4, 2, rope=rope, qk_norm=True).double()
    x = draw(1, B, T, D)
    plain = attention(x)
    attention.q_norm.register_forward_hook(lambda norm, given, y: 2 * y)
    assert not torch.allclose(attention(x), plain)  # nor leave out a hook
    attention.q_norm, attention.k_norm = nn.LayerNorm(K).double(), nn.LayerNorm(K).double()
    q, k, v = attention.qkv(x).split([4 * K, 2 * K, 2 * K], -1)
    q, k = (F.layer_norm(t.unflatten(-1, (-1, K)), (K,), eps=1e-5).flatten(2) for t in (q, k))
    twin = build_attention(4, 2, rope=rope).double()
    twin.qkv, twin.output = nn.Identity(), attention.output
    want = twin(torch.cat([q, k, v], -1))
    close(attention(x).detach(), want.detach(), "y")
    assert not torch.allclose(want, plain)


@pytest.mark.parametrize("options", [
    {"rope": True}, {"window": 3, "qk_norm": True, "rope": True}, {"causal": False, "rope": True}, {"alibi": True},
    {"sinks": True}, {"sinks": True, "window": 2}, {"alibi": True, "sinks": True},
], ids=str)  # fmt: skip
def test_no_tokens_give_none_and_the_first_sees_itself(options):
    attention = build_attention(6, 2, **options).double()
    for shape in ((B, 0, D), (0, T, D)):
        x = draw(1, *shape).requires_grad_()
        y = attention(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
        assert not attention.qkv.weight.grad.any()
    x = draw(1, 1, 3, D)
    if attention.causal:
        close(attention(x[:, :1]).detach(), attention(x)[:, :1].detach(), "the first token")


def check_replicas_through_training(kv_heads):
    """20 steps of SGD: the replicas stay bitwise equal, and the weights are the dense ones."""
    tp = tp_axis()
    options = {"qk_norm": True, "rope": True}
    torch.manual_seed(1)
    dense = build_attention(8, kv_heads, **options).double()
    sharded = build_attention(8, kv_heads, **options, tp=tp).double()
    load_full_state_dict(sharded, full_state_dict(dense))
    for step in range(20):
        x, wanted = draw(step, B, 5, D), draw(100 + step, B, 5, D)
        for model in (dense, sharded):
            model.zero_grad()
            (model(x) - wanted).square().mean().backward()
            reduce_gradients(model)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    want, got = full_state_dict(dense), full_state_dict(sharded)
    for name in want:
        close(got[name], want[name], name)
    shard = sharded.qkv.shardings["weight"].shards[0]
    held = [i for start, end in shard.mine for i in range(start, end)]
    return {i: sharded.qkv.weight[row].tolist() for row, i in enumerate(held)}


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_pitfall_15_replicated_kv_heads_stay_equal_through_20_steps(ranks, kv_heads):
    held = ranks(4, check_replicas_through_training, kv_heads)
    counts = dict.fromkeys(range((8 + 2 * kv_heads) * K), 0)
    values = {}
    for rows in held:
        for index, row in rows.items():
            counts[index] += 1
            assert values.setdefault(index, row) == row, f"replicas of row {index} came apart"
    assert all(counts[i] == (1 if i < 8 * K else 4 // kv_heads) for i in counts)


def test_pitfall_64_positions_and_tables_may_be_given():
    attention = build_attention(4, 2, rope=True).double()
    x = draw(1, B, T, D)
    plain = attention(x)
    index = torch.arange(T)
    close(attention(x, positions=index), plain, "positions")
    close(attention(x, positions=index.expand(B, T)), plain, "positions of each row")
    table = attention.rope(index, torch.float64)
    close(attention(x, rotary=table), plain, "table")
    for without in (build_attention(4, 2), ParallelAttention(D, 4, head_dim=K, memory_dim=D)):
        for name, given in {"rotary": table, "positions": index}.items():
            with pytest.raises(ValueError, match=f"{name} is given to an attention that doesn't rotate"):
                without.double()(x, memory=None if without.memory_dim is None else x, **{name: given})
    close(attention(x, positions=index + 1000), plain, "shifted positions", 1e-10)
    assert not torch.allclose(attention(x, positions=2 * index), plain)
