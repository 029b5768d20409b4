"""Blocks that compute two halves of their rows: each argument reaches its rows, or is refused."""

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mpcore import Axis, ParallelAttention, ParallelMoE, RMSNorm, RotaryEmbedding, TransformerBlock
from mpcore.experimental import overlap_experts, record_routing
from mpcore.experimental.overlap_experts import HalvesBlock
from mpcore.layers import materialize
from tests.equality import close

B, T, D, HEADS = 3, 5, 8, 2  # halves of 2 rows and 1
ENDS = torch.tensor([0, 3, 5, 9, 10, 15])


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(ep=Axis(), **options):
    attention = ParallelAttention(D, HEADS, head_dim=4, rope=RotaryEmbedding(4))
    moe = ParallelMoE(D, 16, 4, 2, ep=ep, **{"aux_loss": "sequence", "jitter": 0.1, **options})
    return TransformerBlock(attention, moe, RMSNorm(D), RMSNorm(D), dropout=0.2)


ROUTING = {"samples": torch.arange(B) + 4, "loss_scale": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)}
EXPERTS = (torch.arange(B * T * 2) * 3 % 4).view(B, T, 2)
CALLS = {
    "mask, positions": {"mask": torch.rand(B, T, T, generator=torch.Generator().manual_seed(0)) > 0.3,
                        "positions": torch.arange(B * T).view(B, T)},
    "shared mask, bias": {"mask": torch.ones(T, T).tril().bool(), "bias": draw(B, HEADS, T, T), "positions": None},
    "one row for all": {"mask": torch.ones(1, T, T).tril().bool(), "positions": torch.arange(T)[None] + 2},
    "documents": {"cu_seqlens": ENDS},
    "rotary": {"rotary": RotaryEmbedding(4)(torch.arange(B * T).view(B, T), torch.float64)},
    "padding": {"mlp_arguments": {"mask": torch.arange(B * T).view(B, T) % 4 > 0, "positions": torch.arange(T) + 2}},
    "given experts": {"mlp_arguments": {"experts": EXPERTS}}, "one scale": {"mlp_arguments": {"loss_scale": 0.5}},
    "one scale in a tensor": {"mlp_arguments": {"loss_scale": torch.tensor([0.5], dtype=torch.float64)}},
}  # fmt: skip


def step(block, call, x):
    """Output and gradients of a block."""
    call = {**call, "mlp_arguments": ROUTING | call.get("mlp_arguments", {})}
    x = x.clone().requires_grad_()
    y = block(x, samples=ROUTING["samples"], **call)
    (y * draw(*y.shape, seed=2)).sum().backward()
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in block.named_parameters()}}


@pytest.mark.parametrize("name", CALLS)
def test_two_halves_equal_all_rows_with_every_argument(name):
    whole = build().double()
    materialize(whole, 0)
    halves = copy.deepcopy(whole)
    halves.__class__ = HalvesBlock
    want, got = (step(block, CALLS[name], draw(B, T, D)) for block in (whole, halves))
    for key in want:
        close(got[key], want[key], f"{key}, {name}")
    with torch.no_grad():  # one row
        one = [block.eval()(draw(1, T, D), cu_seqlens=torch.tensor([0, 2, T])) for block in (whole, halves)]
    assert torch.equal(*one)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("call", [{}, {"cu_seqlens": torch.tensor([0, 2, T])}, {"mask": torch.ones(1, T, T).bool()}])
def test_a_rank_with_one_row_or_none_sends_as_many_messages(rows, call):
    whole = build(aux_loss=None, jitter=0.0).double().eval()
    materialize(whole, 0)
    halves = copy.deepcopy(whole)
    halves.__class__ = HalvesBlock
    call = {name: (value[:rows] if name == "mask" else value * rows) for name, value in call.items()}
    found = []
    with mock.patch.object(ParallelMoE, "send", autospec=True, side_effect=ParallelMoE.send) as sent:
        for block in (whole, halves):
            x = draw(rows, T, D).requires_grad_()
            with pytest.warns(match="hides nothing") if rows and block is halves else nullcontext():
                y = block(x, **call)
            y.sum().backward()
            found.append({"y": y, "dx": x.grad, **{name: p.grad for name, p in block.named_parameters()}})
    assert sent.call_count >= 2
    for key in found[0]:
        if found[0][key] is not None:
            close(found[1][key], found[0][key], key)


@pytest.mark.parametrize(("call", "message"), [
    ({"cache": object()}, "cache"),
    ({"samples": torch.arange(2)}, "has 2 rows, and overlap_experts cuts the 3 rows of x"),
    ({"cu_seqlens": torch.tensor([0, 7, 12, 15])}, "end of row 2 of 3"),
])  # fmt: skip
def test_what_has_no_halves_is_refused(call, message):
    block = build(aux_loss=None, jitter=0.0).double().eval()
    block.__class__ = HalvesBlock
    with pytest.raises(ValueError, match=message):
        block(**{"x": draw(B, T, D), **call})


def test_the_routing_of_a_call_in_halves_is_one_entry():
    block = build(aux_loss=None, jitter=0.0).double().eval()
    materialize(block, 0)
    found = []
    for kind in (TransformerBlock, HalvesBlock):
        block.__class__ = kind
        with record_routing(block) as experts:
            y = checkpoint(block, draw(B, T, D).requires_grad_(), use_reentrant=False)
            y.sum().backward()
        found.append(experts["mlp"])
    assert [len(entries) for entries in found] == [1, 1]
    assert torch.equal(found[0][0], found[1][0])


def test_a_document_across_halves_is_nan_where_the_host_reads_none():
    block = build(aux_loss=None, jitter=0.0).double().eval()
    materialize(block, 0)
    block.__class__ = HalvesBlock
    want = block(draw(B, T, D), cu_seqlens=ENDS)
    with mock.patch("mpcore.experimental.overlap_experts.can_read", return_value=False):
        assert torch.equal(block(draw(B, T, D), cu_seqlens=ENDS), want)
        assert block(draw(B, T, D), cu_seqlens=torch.tensor([0, 7, 12, 15])).isnan().any()


EP = Axis(2, 0, None, "ep")


@pytest.mark.parametrize(("model", "message"), [
    (lambda: build(), "the model has none"), (lambda: build(ep=EP, aux_loss="micro_batch"), "micro_batch"),
    (lambda: build(ep=EP, sequence_dim=0), "sequence_dim"), (lambda: build(ep=EP).mlp, "ParallelMoE"),
])  # fmt: skip
def test_a_model_without_halves_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        overlap_experts(model())
