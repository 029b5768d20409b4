"""What changes the scores of attention, each alone and together: the formula written out, on every tp."""

import pytest
import torch

from mpcore.layers import ColumnParallelEmbedding
from tests.equality import close, draw, same_model
from tests.layers.test_attention import DOCUMENTS, B, D, T, build_attention, check_formula, check_sharded
from tests.pool import mesh, on_ranks

S, WIDTH, HEADS = 7, 5, (6, 2)  # of a memory; query heads and KV heads
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
    return build_attention(*heads, **options, **axes)


def inputs(options, packed=False, mask=None, bias=None):
    """The leaves of a call, and its other arguments."""
    rows, keys = 1 if packed else B, S if "memory_dim" in options else T
    leaves = {"x": draw(1, rows, T, D)} | ({"memory": draw(2, rows, S, WIDTH)} if "memory_dim" in options else {})
    leaves |= {} if bias is None else {"bias": draw(4, *(rows, HEADS[0], T, keys)[4 - bias :])}
    return leaves, {"cu_seqlens": DOCUMENTS if packed else None, "mask": mask}


@pytest.mark.parametrize(("options", "arguments"), CASES, ids=str)
def test_one_rank_is_the_formula(options, arguments):
    leaves, others = inputs(options, **arguments)
    check_formula(HEADS, options, leaves, **others)


def check_case(options, arguments, sequence=None, heads=HEADS):
    leaves, others = inputs(options, **arguments)
    check_sharded(heads, options, leaves, sequence, **others)


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
    with pytest.raises(ValueError, match="expand a bias that all heads share"):  # also where a rank has one head
        build({"causal": False}, tp=tp).double()(draw(1, B, T, D), bias=draw(6, 1, T, T))


@pytest.mark.parametrize("leading", [(), (1,), (B,)], ids=str)
def test_samples_may_share_a_bias(leading):
    attention, x, bias = build({"causal": False}).double(), draw(1, B, T, D), draw(6, HEADS[0], T, T)
    given = bias.expand(*leading, HEADS[0], T, T)
    close(attention(x, bias=given).detach(), attention(x, bias=bias.repeat(B, 1, 1, 1)).detach(), "one for each sample")


def test_masks_and_scores_compile_to_one_graph():
    for options, arguments in ({}, {"mask": PADDED}), ({"alibi": True, "sinks": True}, {"bias": 4, "mask": MASK}):
        torch.compiler.reset()
        given, others = inputs({}, **arguments)
        attention = build(options).double()
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        close(compiled(**given, **others).detach(), attention(**given, **others).detach(), "y")
