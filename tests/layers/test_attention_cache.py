"""Decoding with a cache gives what one call on the whole sequence gives, in chunks of any size, on every tp."""

import pytest
import torch

from mpcore import MultiLatentAttention, RotaryEmbedding
from tests.equality import close, draw
from tests.layers.test_attention import B, D, K, T
from tests.layers.test_attention_scores import HEADS, WIDTH, build
from tests.pool import mesh, on_ranks

CHUNKS = [(1,) * T, (5, 1, 3, 1, 1, 1), (T - 1, 1), (2, 10), (T,)]
LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 3, "q_lora_rank": 5}
LEFT = torch.arange(T) >= torch.tensor([[[3]], [[0]]])  # [B, 1, T]: prompts of two lengths, padded on the left
OPTIONS = [
    {"rope": True}, {"rope": True, "window": 3, "qk_norm": True}, {"window": 1}, {"rope": True, "softcap": 0.3},
    {"sinks": True, "window": 4}, {"alibi": True}, {"alibi": True, "sinks": True, "softcap": 0.3, "window": 5},
    {"impl": "reference", "window": 3}, {"sequence_dim": 0},
]  # fmt: skip


def decode(attention, x, chunks, mask=None, bias=None, **others):
    """Outputs of all tokens, some at a time."""
    cache, start, outputs, dim = attention.new_cache(T), 0, [], attention.sequence_dim
    for size in chunks:
        end = start + size
        seen = {"mask": None if mask is None else mask[..., :end], "bias": None if bias is None else bias[..., :end]}
        seen = {n: t if t is None or t.shape[-2] == 1 else t[..., start:end, :] for n, t in seen.items()}
        outputs.append(attention(x.narrow(dim, start, size), cache=cache, **seen, **others))
        assert cache.length == end
        start = end
    return torch.cat(outputs, dim)


@torch.no_grad()
def check_cache(heads, every):
    tp = mesh(tp=torch.distributed.get_world_size()).tp
    mask = (draw(3, B, T, T) < 0.5) | torch.eye(T).bool()
    for options in every:
        torch.manual_seed(1)
        attention = build(options, heads, tp=tp).double()
        x = draw(1, B, T, D)
        x = x.transpose(0, 1) if attention.sequence_dim == 0 else x
        scores = [{}] if attention.impl else [{}, {"mask": LEFT, "bias": draw(4, heads[0], T, T)}, {"mask": mask}]
        for extra in scores:
            want = attention(x, **extra)
            for chunks in CHUNKS:
                close(decode(attention, x, chunks, **extra), want, f"{options} {chunks} {extra.keys()}")
        cache = attention.new_cache(T)
        attention(x.narrow(attention.sequence_dim, 0, 2), cache=cache)
        assert cache.keys.shape == (B, T, attention.local_kv_heads, K)  # this rank's heads, not repeated


@pytest.mark.parametrize(("size", "heads", "every"), [
    (1, HEADS, OPTIONS), pytest.param(2, HEADS, OPTIONS, marks=pytest.mark.slow), (3, HEADS, OPTIONS),
    *((size, heads, [{"rope": True}]) for size, heads in ((2, (6, 6)), (3, (8, 2)), (4, (6, 2)))),
], ids=lambda x: "" if isinstance(x, list) else str(x))  # fmt: skip
def test_chunks_of_any_size_are_the_whole_sequence(ranks, size, heads, every):
    """Also where heads are uneven, or shared by ranks."""
    ranks(size, check_cache, heads, every)


@on_ranks(1, 2)
@torch.no_grad()
def test_latent_attention_decodes_too():
    tp = mesh(tp=torch.distributed.get_world_size()).tp
    torch.manual_seed(1)
    attention = MultiLatentAttention(D, 5, **LATENT, rope=RotaryEmbedding(4), tp=tp).double()
    x = draw(1, B, T, D)
    for chunks in CHUNKS:
        close(decode(attention, x, chunks), attention(x), str(chunks))
        close(decode(attention, x, chunks, mask=LEFT), attention(x, mask=LEFT), str(chunks))


@on_ranks(1, 2, 3)
@torch.no_grad()
def test_a_memory_is_read_once():
    tp = mesh(tp=torch.distributed.get_world_size()).tp
    torch.manual_seed(1)
    attention = build({"memory_dim": WIDTH, "qk_norm": True, "sinks": True}, tp=tp).double()
    x, memory, keep = draw(1, B, T, D), draw(2, B, 7, WIDTH), torch.arange(7) < torch.tensor([[[4]], [[7]]])
    cache = attention.new_cache(7)
    for other in (memory[:, 1:], memory.flip(1), memory):  # each replaces the one before
        first = attention(x[:, :3], other, mask=keep[..., : other.shape[1]], cache=cache)
    with pytest.raises(ValueError, match=r"mask \(2, 1, 6\) is none of \[1, 7\]"):
        attention(x[:, 3:4], mask=keep[..., :6], cache=cache)
    rest = [attention(x[:, i : i + 1], mask=keep, cache=cache) for i in range(3, T)]
    close(torch.cat([first, *rest], 1), attention(x, memory, mask=keep), "y")
    assert cache.length == 7


@torch.no_grad()
def test_beams_and_tokens_that_are_taken_back():
    attention = build({"rope": True}).double()
    x, cache = draw(1, B, T, D), attention.new_cache(T)
    attention(x[:, :8], cache=cache)
    cache.length = 5
    close(attention(x[:, 5:6], cache=cache), attention(x)[:, 5:6], "after three were forgotten")
    cache.select(torch.tensor([1, 1, 0]))
    close(attention(x[[1, 1, 0], 6:7], cache=cache), attention(x[[1, 1, 0]])[:, 6:7], "beams")


@torch.no_grad()
def test_dtypes_are_those_of_the_layer():
    attention = build({"sinks": True, "rope": True}).bfloat16()
    x, cache = draw(1, B, T, D).bfloat16(), attention.new_cache(T)
    parts = [attention(x[:, i : i + 1], cache=cache) for i in range(T)]
    assert cache.keys.dtype == parts[0].dtype == torch.bfloat16
    close(torch.cat(parts, 1).double(), attention(x).double(), "y", 0.03)
