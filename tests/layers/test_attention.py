"""Attention: dense equals the formula written out, sharded equals dense, for every kind of head and of mask."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpcore import Axis, ParallelAttention, RotaryEmbedding, apply_rope, full_state_dict, load_full_state_dict
from mpcore import collectives as c
from mpcore.gradients import reduce_gradients
from mpcore.parallel.recompute import recompute
from mpcore.pipeline import Pipeline
from tests.equality import FEWER_SIZES, close, draw, same_model, tp_axis
from tests.pool import mesh, on_ranks

B, T, D, K = 2, 12, 6, 4
SIZES = [pytest.param(2, marks=pytest.mark.slow), 3, 4]
HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 2), (6, 3), (6, 6)]
DOCUMENTS = torch.tensor([0, 1, 5, 5, 12])
PADDED = torch.arange(T) < torch.tensor([[[5]], [[T]]])  # [B, 1, T]


def build_attention(heads, kv_heads, **options):
    rope = RotaryEmbedding(K, 100.0) if options.pop("rope", False) else None
    return ParallelAttention(D, heads, kv_heads, K, rope=rope, **options)


def sees(T, causal, window, documents):
    """The mask, one pair of tokens at a time."""
    document = [sum(end <= t for end in documents) for t in range(T)] if documents is not None else [0] * T
    return torch.tensor(
        [
            [
                document[q] == document[k] and (not causal or k <= q) and (window is None or q - k < window)
                for k in range(T)
            ]
            for q in range(T)
        ]
    )


def formula(
    p,
    x,
    heads,
    kv_heads,
    *,
    causal=True,
    window=None,
    qk_norm=False,
    rope=False,
    documents=None,
    softcap=None,
    eps=1e-6,
    also=True,
):
    """Attention one head at a time, under the mask `also` too."""
    B, T, _ = x.shape
    q, k, v = F.linear(x, p["qkv.weight"], p.get("qkv.bias")).split([heads * K, kv_heads * K, kv_heads * K], -1)
    q, k, v = (t.view(B, T, -1, K) for t in (q, k, v))
    if qk_norm:
        q, k = F.rms_norm(q, (K,), p["q_norm.weight"], eps), F.rms_norm(k, (K,), p["k_norm.weight"], eps)
    if rope:
        starts = [0] * T
        if documents is not None:
            starts = [max(int(end) for end in documents if end <= t) for t in range(T)]
        cos, sin = RotaryEmbedding(K, 100.0)(torch.tensor([t - s for t, s in enumerate(starts)]), torch.float64)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    mask = sees(T, causal, window, documents) & also
    outputs = []
    for head in range(heads):
        keys, values = (t[:, :, head // (heads // kv_heads)] for t in (k, v))
        scores = q[:, :, head] @ keys.transpose(1, 2) / K**0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        outputs.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values)
    return F.linear(torch.cat(outputs, -1), p["output.weight"], p.get("output.bias"))


DENSE = [
    {}, {"bias": False}, {"rope": True}, {"qk_norm": True, "rope": True}, {"causal": False, "rope": True},
    {"window": 1}, {"window": 3, "rope": True}, {"window": 100}, {"softcap": 0.3}, {"softcap": 0.3, "causal": False},
    {"softcap": 0.3, "window": 3, "rope": True},
]  # fmt: skip


def nudge(module):
    """Norm weights away from 1, so that they matter."""
    with torch.no_grad():
        for i, (name, p) in enumerate(module.named_parameters()):
            if "norm" in name:
                p.copy_(1 + 0.3 * draw(40 + i, *p.shape))
    return module


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("options", DENSE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_dense_is_the_formula(heads, options, packed):
    attention = nudge(build_attention(*heads, **options).double())
    p = {name: q.detach().clone().requires_grad_() for name, q in attention.named_parameters()}
    x, x_formula = (draw(1, 1 if packed else B, T, D).requires_grad_() for _ in range(2))
    y = attention(x, cu_seqlens=DOCUMENTS if packed else None)
    flags = {k: v for k, v in options.items() if k != "bias"}
    y_formula = formula(p, x_formula, *heads, documents=DOCUMENTS if packed else None, **flags)
    dy = draw(2, *y.shape)
    y.backward(dy)
    y_formula.backward(dy)
    close(y.detach(), y_formula.detach(), "y")
    close(x.grad, x_formula.grad, "dx")
    for name, q in attention.named_parameters():
        close(q.grad, p[name].grad, name)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("options", [{"rope": True}, {"window": 3}, {"causal": False}], ids=str)
def test_a_mask_and_causality_windows_and_documents_all_hold(options, packed):
    """A token sees what all of them let it see: a mask alone would show it the future."""
    attention = build_attention(4, 2, **options).double()
    x = draw(1, 1 if packed else B, T, D)
    documents = DOCUMENTS if packed else None
    for mask in (torch.ones(T, T).bool(), (draw(3, len(x), T, T) < 0) | torch.eye(T).bool()):
        want = formula(dict(attention.named_parameters()), x, 4, 2, documents=documents, also=mask, **options)
        close(attention(x, cu_seqlens=documents, mask=mask).detach(), want.detach(), f"under {tuple(mask.shape)}")


def check_attention(heads, options, sequence, shape=(B, T), packed=False, frozen=(), mask=None):
    sp = {} if sequence is None else {"sequence_parallel": True, "sequence_dim": sequence}

    def build(**axes):
        attention = nudge(build_attention(*heads, **options, **sp, **axes))
        for name in frozen:
            attention.get_parameter(name).requires_grad_(False)
        return attention

    def run(attention):
        tp = attention.qkv.tp
        x = draw(1, *shape, D).requires_grad_()
        part = c.split(x, tp, sequence) if sequence is not None else x
        y = attention(part, cu_seqlens=DOCUMENTS if packed else None, mask=mask)
        y = c.gather(y, tp, sequence) if sequence is not None else y
        (y * draw(2, *y.shape)).sum().backward()
        return {"y": y.detach(), "dx": x.grad}

    same_model(build, run, tp=tp_axis())


def check_heads(qk_norm):
    for heads in HEADS:
        options = {"qk_norm": qk_norm, "rope": True}
        check_attention(heads, options, None)
        check_attention(heads, options, 1)
    check_attention((8, 2), options, 0, shape=(T, B))
    check_attention((6, 2), {**options, "bias": False}, 0, shape=(T, B))


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
    for sequence, shape in ((None, (B, T)), (1, (B, T)), (0, (T, B))):
        check_attention((6, 2), {"rope": True}, sequence, shape=shape, mask=PADDED)
    check_attention((6, 2), {"softcap": 0.3}, 1, shape=(1, T))
    check_attention((6, 2), {"rope": True}, None, shape=(1, 1))
    check_attention((6, 2), {"rope": True}, None, shape=(0, T))
    check_attention((6, 2), {"rope": True, "qk_norm": True}, 1, shape=(0, T))


class Stage(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.attention = build_attention(4, 2, rope=True).double()

    def forward(self, x, mask):
        return x + self.attention(x, mask=mask)


@on_ranks(2)
def test_a_mask_of_samples_is_cut_with_the_batch():
    on, rows = mesh(pp=2), 2 * B
    x, target, mask = draw(1, rows, T, D), draw(2, rows, T, D), PADDED.repeat(2, 1, 1)
    dense = nn.ModuleList([Stage(i) for i in range(2)])
    want = (dense[1](dense[0](x, mask), mask) * target).sum()
    want.backward()
    stage = Stage(on.pp.rank)
    recompute([stage.attention])
    pipeline = Pipeline(stage, on, 4, lambda y, t: (y * t).sum())
    close(pipeline.forward_backward(x, target, mask=mask), want.detach(), "loss")
    for (name, p), q in zip(stage.named_parameters(), dense[on.pp.rank].parameters(), strict=True):
        close(p.grad, q.grad, f"gradient of {name}")


@pytest.mark.parametrize("rope", [False, True])
def test_query_and_key_norms_may_be_replaced(rope):
    """By a norm of one's own, of a class of its own or not: the fused rotation must not take it for RMSNorm."""
    attention = nudge(build_attention(4, 2, rope=rope, qk_norm=True).double())
    x = draw(1, B, T, D)
    plain = attention(x)
    attention.q_norm, attention.k_norm = nn.LayerNorm(K).double(), nn.LayerNorm(K).double()
    q, k, v = attention.qkv(x).split([4 * K, 2 * K, 2 * K], -1)
    q, k = (F.layer_norm(t.unflatten(-1, (-1, K)), (K,), eps=1e-5).flatten(2) for t in (q, k))
    twin = build_attention(4, 2, rope=rope).double()
    twin.qkv, twin.output = nn.Identity(), attention.output
    want = twin(torch.cat([q, k, v], -1))
    close(attention(x).detach(), want.detach(), "y")
    assert not torch.allclose(want, plain)


@pytest.mark.parametrize("options", [{}, {"window": 3, "qk_norm": True}, {"causal": False}], ids=str)
def test_no_tokens_give_none(options):
    attention = build_attention(4, 2, rope=True, **options).double()
    x = draw(1, B, 0, D).requires_grad_()
    y = attention(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (B, 0, D)
    assert not attention.qkv.weight.grad.any()


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
            loss = (model(x) - wanted).square().mean()
            loss.backward()
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
        with pytest.raises(ValueError, match="rotary is given to an attention that doesn't rotate"):
            without.double()(x, rotary=table, memory=None if without.memory_dim is None else x)
    close(attention(x, positions=index + 1000), plain, "shifted positions", 1e-10)
    assert not torch.allclose(attention(x, positions=2 * index), plain)


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_may_be_asked_for(causal):
    asked = build_attention(4, 2, causal=causal, impl="reference").double()
    plain = build_attention(4, 2, causal=causal).double()
    plain.load_state_dict(asked.state_dict())
    x, x_plain = (draw(1, B, T, D).requires_grad_() for _ in range(2))
    for attention, leaf in ((asked, x), (plain, x_plain)):
        attention(leaf).square().sum().backward()
    close(x.grad, x_plain.grad, "dx")
    with pytest.raises(ValueError, match="impl='triton'"):
        build_attention(4, 2, impl="triton")(draw(1, B, T, D).float())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="dim 6 is not a multiple of num_heads 4: give head_dim"):
        ParallelAttention(6, 4)
    with pytest.raises(ValueError, match="window 3 needs a causal mask"):
        ParallelAttention(8, 4, causal=False, window=3)
    with pytest.raises(ValueError, match="window 0 needs a causal mask and at least 1 token"):
        ParallelAttention(8, 4, window=0)
    with pytest.raises(ValueError, match="softcap 0 is not a positive number"):
        ParallelAttention(8, 4, softcap=0)
    attention = ParallelAttention(8, 4)
    for shape in ((5, 8), (2, 3, 4, 8)):
        with pytest.raises(ValueError, match=rf"x has {len(shape)} dimensions, but attention takes \[B, T, D\]"):
            attention(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"from 0 to 8, the tokens of all rows, but runs from 0 to 4$"):
        attention(torch.zeros(2, 4, 8), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"the mask is of torch.float32, which torch would add .* give mask.bool\(\)"):
        attention(torch.zeros(1, 4, 8), mask=torch.ones(4, 4).tril())
    for sequence_dim in (0, 1):  # on an axis without a group, so before anything is gathered
        cut = ParallelAttention(8, 4, tp=Axis(2), sequence_parallel=True, sequence_dim=sequence_dim)
        x = torch.zeros(2, 4, 8) if sequence_dim else torch.zeros(4, 2, 8)
        for shape in ((4, 4), (3, 1, 8), (2, 8)):
            message = rf"mask {re.escape(str(shape))} is none of .* for 2 rows with 8 tokens on each of 1 ranks"
            with pytest.raises(ValueError, match=message):
                cut(x, mask=torch.ones(shape, dtype=torch.bool))
    for bad, found in (
        ([0, 4], "a list"), (torch.tensor([0.0, 4.0]), r"torch.float32 \(2,\)"),
        (torch.tensor([[0, 4]]), r"torch.int64 \(1, 2\)"), (torch.zeros(0, dtype=torch.int32), r"torch.int32 \(0,\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"cu_seqlens is {found}, but must be int32 or int64 \[n \+ 1\], such as"):
            attention(torch.zeros(1, 4, 8), cu_seqlens=bad)
    with pytest.raises(ValueError, match="but runs from 0 to 12, falling from 4 to 3"):
        attention(torch.zeros(1, 12, 8), cu_seqlens=torch.tensor([0, 4, 3, 12]))
    for bad in ([0, 3], [1, 4], [0, 3, 2, 4]):
        with pytest.raises(ValueError, match=f"0 to 4, the tokens of all rows, but runs from {bad[0]} to {bad[-1]}"):
            attention(torch.zeros(1, 4, 8), cu_seqlens=torch.tensor(bad))
