"""What changes the scores of attention, each alone and together: the formula written out, on every tp."""

import math
import re

import pytest
import torch
from torch.nn import functional as F

from mpcore import Axis, MultiLatentAttention, ParallelAttention, RotaryEmbedding
from mpcore import collectives as c
from mpcore.layers import ColumnParallelEmbedding
from tests.equality import close, draw, same_model
from tests.layers.test_attention import DOCUMENTS, B, D, K, T, sees
from tests.pool import mesh, on_ranks

S, WIDTH, HEADS = 7, 5, (6, 2)  # of a memory; query heads and KV heads, 6 heads have the ALiBi slopes of 4 and of 8
SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
MASK = (draw(3, B, T, T) < 0.7) | torch.eye(T).bool()
PADDED = torch.arange(T) < torch.tensor([[[5]], [[T]]])  # [B, 1, T]
BLIND = MASK.clone()
BLIND[1, :3] = False  # queries that see nothing
# (options of the layer, arguments: mask, of how many dimensions a bias, packed documents)
CASES = [
    ({}, {"bias": 3}), ({"causal": False}, {"bias": 4}), ({"window": 3}, {"bias": 4, "mask": PADDED}),
    ({"softcap": 0.3}, {"bias": 3}), ({"softcap": 0.3}, {"mask": MASK}),
    ({"softcap": 0.3, "causal": False}, {"mask": BLIND, "bias": 4}), ({"alibi": True}, {}),
    ({"alibi": True, "causal": False}, {"mask": PADDED}), ({"alibi": True, "softcap": 0.3, "window": 4}, {"bias": 3}),
    ({"alibi": True}, {"packed": True}), ({"sinks": True}, {}), ({"sinks": True, "causal": False}, {}),
    ({"sinks": True, "window": 3}, {}), ({"sinks": True, "softcap": 0.3}, {"packed": True}),
    ({"sinks": True}, {"mask": BLIND}), ({"sinks": True, "alibi": True, "qk_norm": True}, {"mask": MASK, "bias": 4}),
    ({"memory_dim": WIDTH}, {}), ({"memory_dim": WIDTH, "qk_norm": True}, {"mask": PADDED[..., :S]}),
    ({"memory_dim": WIDTH, "softcap": 0.3}, {"bias": 3}),
    ({"memory_dim": WIDTH, "sinks": True}, {"mask": BLIND[..., :S], "bias": 4}),
]  # fmt: skip


def build(options, heads=HEADS, **axes):
    """A layer whose norms and sinks are away from their first values, so that they matter."""
    attention = ParallelAttention(D, *heads, K, **options, **axes)
    with torch.no_grad():
        for i, (name, p) in enumerate(attention.named_parameters()):
            if "norm" in name or "sinks" in name:
                p.copy_(
                    attention.get_submodule(name.rpartition(".")[0]).shardings["weight"].take(whole_weight(i, name))
                )
    return attention


def whole_weight(seed, name):
    return 1 + 0.3 * draw(40 + seed, HEADS[0] if "sinks" in name else K)


def inputs(options, packed=False, mask=None, bias=None, rows=B):
    rows = 1 if packed else rows
    keys = S if "memory_dim" in options else T
    given = {"x": draw(1, rows, T, D), "memory": draw(2, rows, S, WIDTH) if "memory_dim" in options else None}
    given["bias"] = None if bias is None else draw(4, *(rows, HEADS[0], T, keys)[4 - bias :])
    given = {name: t if t is None else t.requires_grad_() for name, t in given.items()}
    return given, {"cu_seqlens": DOCUMENTS if packed else None, "mask": mask}


def formula(p, options, x, memory, bias, cu_seqlens, mask):
    """One head at a time: a softmax over the keys that are seen, and over the sink."""
    (heads, kv_heads), causal = HEADS, options.get("causal", "memory_dim" not in options)
    if memory is None:
        qkv = F.linear(x, p["qkv.weight"], p["qkv.bias"])
        q, k, v = qkv.split([heads * K, kv_heads * K, kv_heads * K], -1)
    else:
        q, (k, v) = F.linear(x, p["q.weight"], p["q.bias"]), F.linear(memory, p["kv.weight"], p["kv.bias"]).chunk(2, -1)
    q, k, v = (t.unflatten(-1, (-1, K)) for t in (q, k, v))
    if options.get("qk_norm"):
        q, k = F.rms_norm(q, (K,), p["q_norm.weight"], 1e-6), F.rms_norm(k, (K,), p["k_norm.weight"], 1e-6)
    seen = torch.ones(T, k.shape[1]).bool()
    if memory is None:
        seen = sees(T, causal, options.get("window"), cu_seqlens)
    seen = seen.expand(len(x), *seen.shape) & (True if mask is None else mask)
    outputs = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        z = q[:, :, head] @ k[:, :, group].mT / math.sqrt(K)
        z = options["softcap"] * torch.tanh(z / options["softcap"]) if "softcap" in options else z
        if options.get("alibi"):
            z = z - SLOPES[head] * torch.tensor([[abs(i - j) for j in range(T)] for i in range(T)])
        z = z if bias is None else z + bias[..., head, :, :]
        e = torch.where(seen, z.exp(), 0)
        total = e.sum(-1, keepdim=True) + (p["sinks.weight"][head].exp() if options.get("sinks") else 0)
        outputs.append(e / torch.where(total == 0, 1, total) @ v[:, :, group])
    return F.linear(torch.cat(outputs, -1), p["output.weight"], p["output.bias"])


@pytest.mark.parametrize(("options", "arguments"), CASES, ids=str)
def test_one_rank_is_the_formula(options, arguments):
    attention = build(options).double()
    p = {name: q.detach().clone().requires_grad_() for name, q in attention.named_parameters()}
    (given, others), (given_formula, _) = inputs(options, **arguments), inputs(options, **arguments)
    y, want = attention(**given, **others), formula(p, options, **given_formula, **others)
    close(y.detach(), want.detach(), "y")
    for each in (y, want):
        each.backward(draw(5, *each.shape))
    for name, t in given.items():
        if t is not None:
            close(t.grad, given_formula[name].grad, f"gradient of {name}")
    for name, q in attention.named_parameters():
        close(q.grad, p[name].grad, name)


def check_case(options, arguments, sequence=None, heads=HEADS):
    tp = mesh(tp=torch.distributed.get_world_size()).tp
    sp = {} if sequence is None else {"sequence_parallel": True, "sequence_dim": sequence}

    def run(attention):
        axis = attention.output.tp
        given, others = inputs(options, **arguments)
        leaves = {name: t for name, t in given.items() if t is not None}
        if sequence is not None:  # a shard of x and of the memory
            parts = {name: t for name, t in given.items() if name != "bias" and t is not None}
            parts = {name: t if sequence == 1 else t.transpose(0, 1) for name, t in parts.items()}
            given = {**given, **{name: c.split(t, axis, sequence) for name, t in parts.items()}}
        y = attention(**given, **others)
        if sequence is not None:
            y = c.gather(y, axis, sequence)
            y = y if sequence == 1 else y.transpose(0, 1)
        (y * draw(5, *y.shape)).sum().backward()
        return {"y": y.detach(), **{f"gradient of {name}": t.grad for name, t in leaves.items()}}

    same_model(lambda **axes: build({**options, **sp}, heads, **axes), run, tp=tp)


@on_ranks(2, 3)
def test_every_tp_is_one_rank():
    for options, arguments in CASES:
        check_case(options, arguments)
    for heads in ((6, 1), (6, 3), (6, 6)):
        check_case({"sinks": True, "alibi": True}, {"bias": 4}, heads=heads)
        check_case({"memory_dim": WIDTH}, {}, heads=heads)


@on_ranks(2, 3)
def test_sequence_parallel_is_one_rank():
    """T is 12 and the memory 7 tokens long, which no size divides: 6 of it."""
    global S
    S, whole = 6, S
    for sequence in (0, 1):
        check_case({"sinks": True, "alibi": True}, {"bias": 3}, sequence)
        check_case({"memory_dim": WIDTH}, {"bias": 4, "mask": PADDED[..., :6]}, sequence)
    S = whole


@on_ranks(2, 3, 4)
def test_a_bias_may_be_of_this_ranks_heads():
    """Relative position buckets as of T5, the table's columns sharded as the heads are."""
    tp = mesh(tp=torch.distributed.get_world_size()).tp
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(-3, 3) + 3

    class Relative(torch.nn.Module):
        def __init__(self, **axes):
            super().__init__()
            self.table = ColumnParallelEmbedding(7, HEADS[0], **axes)
            self.attention = build({"causal": False}, **axes)

        def forward(self, x):
            return self.attention(x, bias=self.table(distance).permute(2, 0, 1))

    def run(model):
        x = draw(1, B, T, D).requires_grad_()
        y = model(x)
        (y * draw(5, *y.shape)).sum().backward()
        return {"y": y.detach(), "dx": x.grad}

    same_model(Relative, run, tp=tp)


@pytest.mark.parametrize("leading", [(), (1,), (B,)], ids=str)
def test_samples_may_share_a_bias(leading):
    attention, x, bias = build({"causal": False}).double(), draw(1, B, T, D), draw(6, HEADS[0], T, T)
    given = bias.expand(*leading, HEADS[0], T, T)
    close(attention(x, bias=given).detach(), attention(x, bias=bias.repeat(B, 1, 1, 1)).detach(), "one for each sample")


@pytest.mark.parametrize("shape", [
    (0, HEADS[0], T, T), (B + 1, HEADS[0], T, T), (HEADS[0], T, T + 1), (HEADS[0], 1, T), (HEADS[1], T, T), (T, T),
], ids=str)  # fmt: skip
def test_a_bias_of_another_shape_is_refused(shape):
    attention, x = build({"causal": False}), draw(1, B, T, D)
    with pytest.raises(ValueError, match=re.escape(f"bias {shape} of torch.float64 is no float")):
        attention(x, bias=torch.zeros(shape, dtype=torch.float64))


def test_one_token_and_none():
    for options in ({"alibi": True}, {"sinks": True}, {"sinks": True, "window": 2}, {"alibi": True, "sinks": True}):
        attention = build(options).double()
        x = draw(1, 1, 3, D)
        close(attention(x[:, :1]).detach(), attention(x)[:, :1].detach(), "the first token sees itself")
        for shape in ((B, 0, D), (0, T, D)):
            x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
            attention(x).sum().backward()
            assert x.grad.shape == shape


def test_masks_and_scores_compile_to_one_graph():
    for options, arguments in ({}, {"mask": PADDED}), ({"alibi": True, "sinks": True}, {"bias": 4, "mask": MASK}):
        torch.compiler.reset()
        given, others = inputs({}, **arguments)
        attention = build(options).double()
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        close(compiled(**given, **others).detach(), attention(**given, **others).detach(), "y")


def test_what_can_not_be_is_refused():
    cp = Axis(2, name="cp")
    for options, message in (
        ({"alibi": True}, "alibi can't go with cp size 2: take cp 1 and a larger tp"),
        ({"sinks": True}, "sinks can't go with cp size 2"),
        ({"memory_dim": 4}, "memory_dim can't go with cp size 2"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelAttention(8, 4, cp=cp, context="alltoall", **options)
    for options, message in (
        ({"causal": True}, "memory_dim 4 has no causal"), ({"rope": RotaryEmbedding(2)}, "memory_dim 4 has no rope"),
        ({"alibi": True}, "memory_dim 4 has no alibi"), ({"window": 2}, "window 2 needs a causal mask"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ParallelAttention(8, 4, memory_dim=4, **options)
    with pytest.raises(ValueError, match="alibi goes through torch's attention: leave out impl 'reference'"):
        ParallelAttention(8, 4, alibi=True, impl="reference")
    x, memory, bias = torch.zeros(2, 3, 8), torch.zeros(2, 5, 4), torch.zeros(4, 3, 3)
    whole, cross = ParallelAttention(8, 4), ParallelAttention(8, 4, memory_dim=4)
    split = ParallelAttention(8, 4, cp=cp, context="alltoall", tp=Axis(2))
    latent = MultiLatentAttention(8, 2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
    for call, message in (
        (lambda: whole(x, memory), "attends to x alone: build it with memory_dim"),
        (lambda: latent(x, memory), "attends to x alone: build it with memory_dim"),
        (lambda: cross(x), r"of a `memory` \[B, S, 4\]: give it"),
        (
            lambda: cross(x, memory[:1]),
            r"memory \(1, 5, 4\) has 1 rows of width 4, but x has 2 rows and memory_dim is 4",
        ),
        (lambda: cross(x, x), r"has 2 rows of width 8, but x has 2 rows and memory_dim is 4"),
        (lambda: cross(x, memory[0]), "memory has 2 dimensions"),
        (lambda: cross(x, memory, cu_seqlens=torch.tensor([0, 6])), "cu_seqlens packs documents of x"),
        (lambda: cross(x, memory, mask=torch.ones(3, 3).bool()), r"mask \(3, 3\) is none of \[3, 5\], \[2, 3, 5\]"),
        (
            lambda: cross(x, memory, mask=torch.ones(3, 5)),
            r"mask is of torch.float32, .* give mask.bool\(\), or .* `bias`",
        ),
        (lambda: whole(x, bias=bias[:1]), r"bias \(1, 3, 3\) of torch.float32 is no float .* with 4 heads: expand"),
        (lambda: whole(x, bias=bias.bool()), "torch.bool is no float"),
        (lambda: whole(x, bias=bias[:, :2]), r"\[heads, 3, 3\] or \[2, heads, 3, 3\] with 4 heads"),
        (lambda: split(x, bias=bias), "a bias can't go with cp size 2: use rope, or cp 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
