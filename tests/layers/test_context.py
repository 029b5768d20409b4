"""Context parallel: every kind equals dense attention, in values and gradients, for every mask, length and grouping."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from mpcore import (
    Axis,
    ParallelAttention,
    RotaryEmbedding,
    apply_rope,
    full_state_dict,
    load_full_state_dict,
    sequence_index,
    shard_sequence,
    unshard_sequence,
)
from mpcore._torch.fake import fake_tensors
from mpcore.collectives import shard_sizes
from mpcore.gradients import reduce_gradients
from mpcore.kernels.attention import key_bounds
from mpcore.layers.attention.context import context_attention
from mpcore.layers.attention.ring import ring_attention
from mpcore.layers.attention.sequence import KINDS, sequence_runs
from mpcore.tools.analysis.counts import CommunicationCounter
from mpcore.tools.analysis.dry_run import on_mesh
from mpcore.tools.simulation import simulate
from tests.calls import Calls
from tests.equality import close, draw
from tests.oracles.attention import attend, sees
from tests.pool import mesh, on_ranks

B, T, D, K = 2, 13, 6, 4
SIZES = [pytest.param(2, marks=pytest.mark.slow), 3, 4]
RINGS = ["ring", "zigzag"]
DOCUMENTS = [0, 1, 6, 6, 13]
MASKS = [
    {}, {"causal": False}, {"window": 1}, {"window": 4}, {"cu_seqlens": DOCUMENTS},
    {"cu_seqlens": [0, 3, 13], "causal": False}, {"cu_seqlens": [0, 9, 13], "window": 3},
]  # fmt: skip
PACKED = [  # documents of two rows, whose ends lie one after another
    {"cu_seqlens": [0, 1, 2, 6, 13, 13, 20, 26]},
    {"cu_seqlens": [0, 13, 16, 26], "causal": False},
    {"cu_seqlens": [0, 7, 13, 26], "window": 3},
]
BY_TORCH = [{"impl": "torch"}, {"impl": "torch", "causal": False}]
CAPPED = [{"softcap": 0.5}]
HEADS = [(4, 4), (4, 2), (4, 1), (6, 2), (8, 2), (6, 3), (5, 1)]


def cp_axis(kind: str) -> Axis:
    """cp over the whole world; two levels are 2 x 2, 1 x 2 or 3 x 1."""
    size = dist.get_world_size()
    return mesh(cp=size, **{"cp_inner": {2: 2, 3: 1, 4: 2}[size]} if kind == "two-level" else {}).cp


def planned(size: int, rank: int = 0, inner: int | None = None) -> Axis:
    """An axis without a group, for what needs no communication."""
    levels = None if inner is None else (Axis(size // inner, rank // inner), Axis(inner, rank % inner))
    return Axis(size, rank, None, "cp", levels)


def axes(kind: str, size: int) -> list[Axis]:
    inners = [i for i in range(1, size + 1) if size % i == 0] if kind == "two-level" else [None]
    return [planned(size, inner=inner) for inner in inners]


def inputs(heads: tuple[int, int], rows: int, length: int = T) -> list[Tensor]:
    return [draw(i, rows, length, h, K).requires_grad_() for i, h in enumerate((heads[0], heads[1], heads[1]))]


def formula(q: Tensor, k: Tensor, v: Tensor, mask: dict) -> Tensor:
    rows, length = q.shape[:2] if mask.get("cu_seqlens") else (1, q.shape[1])
    see = sees(rows * length, mask.get("causal", True), mask.get("window"), mask.get("cu_seqlens"))
    see = torch.stack([part[:, i * length : (i + 1) * length] for i, part in enumerate(see.split(length))])
    return attend(q, k, v, see[:, None], softcap=mask.get("softcap"))[0]


def tensors(mask: dict) -> dict:
    return {n: torch.tensor(v) if n == "cu_seqlens" else v for n, v in mask.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_lies_on_one_rank_in_order_and_ranks_are_even(kind):
    for size in (1, 2, 3, 4, 6, 8):
        for length, cp in itertools.product((size, size + 1, 2 * size - 1, 2 * size + 1, 24, 31), axes(kind, size)):
            runs = sequence_runs(length, cp, kind)
            held = [[i for run in of_rank for i in range(*run)] for of_rank in runs]
            assert sorted(itertools.chain(*held)) == list(range(length))
            assert all(mine == sorted(mine) for mine in held)
            assert [len(mine) for mine in held] == shard_sizes(length, size)
            assert sequence_index(length, cp, kind).tolist() == held[0]


@pytest.mark.parametrize("kind", ["zigzag", "allgather"])
@pytest.mark.parametrize("length", [1024, 8191, 131072])
def test_causal_work_is_equal_within_two_percent(kind, length):
    for size in (2, 3, 4, 8):
        work = [sum((a + b + 1) * (b - a) / 2 for a, b in runs) for runs in sequence_runs(length, planned(size), kind)]
        assert max(work) <= 1.02 * sum(work) / size
    contiguous = [sum((a + b + 1) * (b - a) / 2 for a, b in r) for r in sequence_runs(length, planned(4), "ring")]
    assert max(contiguous) > 1.7 * sum(contiguous) / 4


@on_ranks(*SIZES)
def test_pitfall_36_tokens_targets_positions_and_masks_are_cut_alike():
    for kind in KINDS:
        cp = cp_axis(kind)
        for length in (12, 13):
            text = torch.arange(100, 101 + length).expand(2, -1)
            batch = {
                "tokens": text[:, :-1], "targets": text[:, 1:], "positions": torch.arange(length),
                "mask": torch.arange(length) % 3 == 0,
            }  # fmt: skip
            assert shard_sequence({}, cp, kind) == {}
            mine = shard_sequence(batch, cp, kind)
            assert {n: (t.dtype, t.shape[:-1]) for n, t in mine.items()} == {
                n: (t.dtype, t.shape[:-1]) for n, t in batch.items()
            }
            assert torch.equal(mine["positions"], sequence_index(length, cp, kind))
            assert torch.equal(mine["targets"], mine["tokens"] + 1)  # no border loses a target
            assert torch.equal(shard_sequence(batch["targets"], cp, kind), mine["targets"])
            for name, t in mine.items():
                if t.dtype != torch.bool:
                    assert torch.equal(unshard_sequence(t, cp, kind, length=length), batch[name])
        x = draw(1, 2, 13, 3).requires_grad_()
        whole = unshard_sequence(shard_sequence(x, cp, kind, 1), cp, kind, 1, 13)
        whole.backward(draw(2, 2, 13, 3))
        assert torch.equal(whole, x)
        assert torch.equal(x.grad, draw(2, 2, 13, 3))


@on_ranks(4)
def test_pitfall_13_a_replicated_loss_after_unshard_counts_once():
    """The whole output on every rank, and the same loss of it: not cp times the gradient."""
    for kind in KINDS:
        cp = cp_axis(kind)
        x = draw(1, 2, 13, 3).requires_grad_()
        shard_cut = shard_sequence(x, cp, kind, 1)
        unshard_sequence(shard_cut.square(), cp, kind, 1, 13).sum().backward()
        close(x.grad, 2 * x.detach(), kind)


def fits(kind: str, cp: Axis, heads: int) -> bool:
    inner = {"alltoall": cp.size, "two-level": cp.levels[1].size if cp.levels else 1}
    return heads >= inner.get(kind, 1)


def check_attention(cases, kinds=KINDS):
    for mask, heads in cases:
        rows = mask["cu_seqlens"][-1] // T if "cu_seqlens" in mask else B
        want = inputs(heads, rows)
        y = formula(*want, mask)
        y.backward(draw(9, *y.shape))
        for kind in kinds:
            cp = cp_axis(kind)
            if not fits(kind, cp, heads[0]) or (kind == "allgather" and "impl" in mask):
                continue
            got = inputs(heads, rows)
            q, k, v = (shard_sequence(t, cp, kind, 1) for t in got)
            part = context_attention(q, k, v, kind, cp, length=T, **tensors(mask))
            whole = unshard_sequence(part, cp, kind, 1, T)
            whole.backward(draw(9, *y.shape))
            close(whole.detach(), y.detach(), f"{kind} {mask} {heads} y")
            for name, a, b in zip("qkv", got, want, strict=True):
                close(a.grad, b.grad, f"{kind} {mask} {heads} d{name}")


def cases(size: int) -> list:
    """Each mask with some grouping of heads, each grouping with some mask; 13 tokens, which no size divides."""
    return [(mask, HEADS[(i + size) % len(HEADS)]) for i, mask in enumerate(MASKS + PACKED + BY_TORCH + CAPPED)]


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_is_dense_attention(ranks, size):
    ranks(size, check_attention, cases(size))


@pytest.mark.slow
def test_rings_of_eight_ranks_are_dense_attention():
    simulate(check_attention, cases(8), RINGS, ranks=8)


def odd_masks() -> list[Tensor]:
    """Of all samples, of each, and of keys alone; but for the last, some queries see nothing."""
    see = torch.rand(B, T, T, generator=torch.Generator().manual_seed(1)) < 0.4
    see[:, 3] = False
    keys = torch.tensor([[True] * 9 + [False] * (T - 9), [False] * T])
    return [see[0], see, see[:1], keys[:, None], keys[:1]]


def attended(layer: ParallelAttention, x: Tensor, see: Tensor) -> Tensor:
    """A dense layer of 6 query and 2 KV heads, written out."""
    q, k, v = layer.qkv(x).view(B, T, 10, K).split([6, 2, 2], 2)
    q, k = (apply_rope(t, *layer.rope(torch.arange(T), torch.float64)) for t in (q, k))
    return layer.output(attend(q, k, v, see[:, None] if see.dim() == 3 else see)[0].flatten(2))


@on_ranks(2, 3)
def test_odd_masks_are_dense_attention():
    masks = [(see, True) for see in odd_masks()] + [(odd_masks()[3], False)]  # of keys alone, for every query
    for kind, (see, causal) in itertools.product(("alltoall", "allgather"), masks):
        cp, order = cp_axis(kind), torch.ones(T, T).bool()
        rope = RotaryEmbedding(K, 100.0)
        dense, plain, sharded = (
            ParallelAttention(D, 6, 2, K, cp=a, context=kind, rope=rope, causal=causal).double()
            for a in (Axis(), Axis(), cp)
        )
        for layer in (plain, sharded):
            load_full_state_dict(layer, full_state_dict(dense))
        x, x_plain, x_cut = (draw(1, B, T, D).requires_grad_() for _ in range(3))
        want, y = attended(dense, x, see & (order.tril() if causal else order)), plain(x_plain, mask=see)
        part = sharded(shard_sequence(x_cut, cp, kind, 1), mask=see)
        y_cut = unshard_sequence(part, cp, kind, 1, T)
        for t in (want, y, y_cut):
            t.backward(draw(2, *t.shape))
        reduce_gradients(sharded, cp)
        for layer, output, leaf in ((plain, y, x_plain), (sharded, y_cut, x_cut)):
            where = f"{kind} {tuple(see.shape)} on {layer.cp.size}"
            close(output.detach(), want.detach(), f"{where} y")
            close(leaf.grad, x.grad, f"{where} dx")
            for (name, p), q in zip(layer.named_parameters(), dense.parameters(), strict=True):
                close(p.grad, q.grad, f"{where} gradient of {name}")


def ring_results(size: int, dtype: torch.dtype, kind: str, impl: str | None = None) -> list[Tensor]:
    """Output, dq, dk and dv of the whole sequence."""
    length, (heads, kv_heads, dim) = 64, (4, 2, 16)
    full = [draw(i, 1, length, h, dim).to(dtype) for i, h in enumerate((heads, kv_heads, kv_heads, heads))]

    def work(on):
        cp = on.cp
        index = sequence_index(length, cp, kind)
        q, k, v, dy = (t[:, index].requires_grad_() for t in full)
        y = context_attention(q, k, v, kind, cp, impl=impl)
        return index, y.detach(), *torch.autograd.grad(y, (q, k, v), dy)

    results = simulate(work, cp=size)
    back = torch.cat([index for index, *_ in results]).argsort()
    return [torch.cat(parts, 1)[:, back] for parts in zip(*(rest for _, *rest in results), strict=True)]


@pytest.mark.parametrize(("impl", "most"), [(None, 1.01), ("torch", 1.25)])  # torch's rounds the output of each block
@pytest.mark.parametrize("kind", RINGS)
def test_pitfall_37_the_error_in_bf16_does_not_grow_with_cp(kind, impl, most):
    exact = ring_results(1, torch.float64, kind)
    errors = {
        size: [
            (got.double() - want).square().mean().sqrt().item()
            for got, want in zip(ring_results(size, torch.bfloat16, kind, impl=impl), exact, strict=True)
        ]
        for size in (1, 2, 4, 8)
    }
    for size in (2, 4, 8):
        for one, many in zip(errors[1], errors[size], strict=True):
            assert many <= most * one, errors


@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_ring_meets_exactly_the_blocks_whose_keys_are_seen(kind, mask):
    see = sees(T, mask.get("causal", True), mask.get("window"), mask.get("cu_seqlens"))
    for size in (1, 2, 3, 4, 7, 13):
        runs = sequence_runs(T, planned(size), kind)
        index = [torch.cat([torch.arange(*run) for run in of_rank]) for of_rank in runs]
        ring = ring_attention(planned(size), runs, mask.get("causal", True), mask.get("window"), mask.get("cu_seqlens"))
        for rank in range(size):
            assert ring.reads[rank] == {j for j in range(size) if see[index[rank]][:, index[j]].any()}
        for j in range(size):
            assert ring.reach[j] == max((rank - j) % size for rank in range(size) if j in ring.reads[rank])
        low, high = key_bounds(T, **tensors(mask))
        for rank, j in itertools.product(range(size), range(size)):
            ring = replace(ring, axis=planned(size, rank))
            first, keys, local = ring.mask(low[index[rank]], high[index[rank]], j)
            found = torch.zeros(len(index[rank]), len(index[j]), dtype=torch.bool)
            if "bounds" in local:
                assert mask.keys() - {"causal"} or j not in ring.reads[rank]
                a, b = local["bounds"]
                assert a.dtype == b.dtype == torch.int32
                local, found = torch.arange(len(index[j])), found[first:, :keys]
                found |= (local >= a[:, None]) & (local < b[:, None])
            else:  # a plain mask, causal in the rank's own block only
                assert local["causal"] == (j == rank and not mask)
                found[first:, :keys] = sees(T, local["causal"], None, None)[: len(found) - first, :keys]
            assert torch.equal(found, see[index[rank]][:, index[j]])


class Sent(Calls):
    """The collectives of this rank."""

    def __init__(self) -> None:
        super().__init__(collectives=True)

    @property
    def bytes(self) -> Counter[str]:
        """What this rank sends to others, by operator."""
        found: Counter[str] = Counter()
        for name, (x, *how), _ in self.found:
            if name == "all_to_all_single":
                me = dist.get_rank(_resolve_process_group(how[2]))
                amount = sum(n for rank, n in enumerate(how[1]) if rank != me)
            elif name == "all_gather_into_tensor":
                amount = x.numel() * (how[0] - 1)  # each rank's shard goes to all others
            else:
                assert name == "reduce_scatter_tensor"
                amount = x.numel() // how[1] * (how[1] - 1)
            found[name] += amount * x.element_size()
        return found


@on_ranks(2, 4)
def test_bytes_sent_are_those_of_theory():
    """Against what the papers count, for bf16: 2 bytes an element, 4 where gradients are summed."""
    H, G, dtype, size = 8, 4, torch.bfloat16, dist.get_world_size()
    n = 8 // size

    def send(kind, cp, **mask):
        q, k, v = (draw(i, B, n, h, K).to(dtype).requires_grad_() for i, h in enumerate((H, G, G)))
        counts = []
        with Sent() as sent:
            y = context_attention(q, k, v, kind, cp, **mask)
        counts.append(sent)
        with Sent() as sent:
            y.backward(torch.ones_like(y))
        counts.append(sent)
        return counts

    q_bytes, kv_bytes = 2 * B * n * H * K, 2 * B * n * 2 * G * K
    for forward, backward in [send("alltoall", cp_axis("alltoall"))]:
        for sent in (forward, backward):  # q, k, v and o
            assert sent.counts() == {"all_to_all_single": 4}
            assert sent.bytes["all_to_all_single"] == (2 * q_bytes + kv_bytes) * (size - 1) // size
    for kind, mask in (("ring", {"causal": False}), ("zigzag", {}), ("zigzag", {"causal": False})):
        forward, backward = send(kind, cp_axis(kind), **mask)
        assert forward.bytes == {"all_to_all_single": (size - 1) * kv_bytes}  # each block passes each rank once
        assert backward.bytes == {"all_to_all_single": (size - 1) * kv_bytes + size * 2 * kv_bytes}
    cp = cp_axis("ring")
    forward, backward = send("ring", cp)  # a block goes up to the last rank, its gradient all the way and home
    last = cp.rank == size - 1
    assert forward.bytes == {"all_to_all_single": 0 if last else (cp.rank + 1) * kv_bytes}
    home = (size - 1) if last else (cp.rank + 1)
    assert backward.bytes == {"all_to_all_single": (0 if last else (cp.rank + 1) * kv_bytes) + home * 2 * kv_bytes}
    forward, _ = send("ring", cp, window=n)
    assert forward.bytes == {"all_to_all_single": 0 if last else kv_bytes}  # only the neighbour's keys are in sight
    assert forward.counts() == {"all_to_all_single": 1}
    forward, backward = send("allgather", cp_axis("allgather"))
    assert forward.bytes == {"all_gather_into_tensor": (size - 1) * kv_bytes}
    assert backward.bytes == {
        "all_gather_into_tensor": (size - 1) * kv_bytes,
        "reduce_scatter_tensor": 2 * (size - 1) * kv_bytes,
    }
    cp = cp_axis("two-level")
    assert cp.levels is not None
    outer, inner = (axis.size for axis in cp.levels)
    forward, _ = send("two-level", cp)
    exchange = (2 * q_bytes + kv_bytes) * (inner - 1) // inner
    assert forward.bytes == {"all_to_all_single": exchange + (outer - 1) * kv_bytes}


@on_ranks(4)
def test_documents_that_end_where_ranks_do_send_nothing():
    """Documents that end where ranks do: nothing is sent, neither forward nor backward."""
    cp = cp_axis("ring")
    q, k, v = (draw(i, 1, 3, 4, K).requires_grad_() for i in range(3))
    with Sent() as sent:
        context_attention(q, k, v, "ring", cp, cu_seqlens=torch.tensor([0, 3, 6, 7, 9, 12])).sum().backward()
    assert sent.counts() == {}


@pytest.mark.parametrize("kind", ["ring", "zigzag", "allgather"])
@pytest.mark.parametrize("cp", [2, 4])
def test_a_dry_run_counts_documents_that_it_cant_read_as_one_a_row(kind, cp):
    for rank in range(cp):
        found = []
        for packed in (False, True):
            with on_mesh(rank, cp=cp) as on, fake_tensors(True):
                q, k, v = (torch.empty(3, 16 // cp, 2, 4, requires_grad=True) for _ in range(3))
                cu_seqlens = torch.empty(4, dtype=torch.int32) if packed else None
                with CommunicationCounter(on) as ledger:
                    context_attention(q, k, v, kind, on.cp, cu_seqlens=cu_seqlens).sum().backward()
            found.append(ledger.counts)
        assert found[0] == found[1] != {}
