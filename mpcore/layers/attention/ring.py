"""Ring attention: keys and values are sent from rank to rank, and each rank merges its partial results."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from mpcore import collectives
from mpcore.kernels._choice import TORCH
from mpcore.kernels.attention import attention, attention_backward, attention_merge
from mpcore.layers.attention.sequence import Runs, tokens_of
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Run


@dataclass(frozen=True)
class _Ring:
    """Which rank holds which block of keys at which step.

    At a given step, rank r holds block r - step, if that block is sent so far.

    Attributes:
        blocks: for each rank, the tokens of its block.
        reads: for each rank, the blocks with keys that its queries see, including its own block.
        reach: for each block, the number of ranks it is sent along the ring.
        causal: whether the mask is causal or full; None: it has a window or documents.
    """

    axis: Axis
    blocks: tuple[Runs, ...]
    reads: tuple[frozenset[int], ...]
    reach: tuple[int, ...]
    causal: bool | None

    @property
    def steps(self) -> int:
        """The number of times that blocks are sent on."""
        return max(self.reach)

    def block(self, rank: int, step: int) -> int:
        """Return the block that `rank` holds at a step, or would hold if the block were sent that far."""
        return (rank - step) % self.axis.size

    def here(self, step: int) -> bool:
        return step <= self.reach[self.block(self.axis.rank, step)]

    def to(self, rank: int, step: int, home: bool) -> int | None:
        """Return where `rank` sends its block after a step, or None. With `home`, a block's last rank sends it home."""
        block = self.block(rank, step)
        if step < self.reach[block]:
            return (rank + 1) % self.axis.size
        return block if home and 0 < step == self.reach[block] else None

    def receipts(self, unit: int, step: int, home: bool) -> list[int]:
        """Return how many elements each rank sends to this rank after a step, with `unit` elements per token."""
        senders = (self.to(rank, step, home) == self.axis.rank for rank in range(self.axis.size))
        return [unit * tokens_of(self.blocks[self.block(rank, step)]) * here for rank, here in enumerate(senders)]

    def pass_on(self, x: Tensor, unit: int, step: int, home: bool = False) -> Tensor:
        """Start to send what this rank holds after a step; `wait` returns what this rank receives."""
        to = self.to(self.axis.rank, step, home)
        return collectives.start_send(x, self.axis, to, self.receipts(unit, step, home))

    def returned(self, flying: Tensor, unit: int, step: int, mine: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the previous rank sent to this rank, and this rank's own block if it came home, else `mine`."""
        parts = collectives.wait(flying).split(self.receipts(unit, step, True))
        rank, far = self.axis.rank, self.reach[self.axis.rank]
        return parts[rank - 1], parts[(rank + far) % self.axis.size] if step == far > 0 else mine

    def mask(self, low: Tensor, high: Tensor, block: int) -> tuple[int, int, dict[str, Any]]:
        """Return the first query that sees the block, how many of its keys are seen, and the mask between the two.

        A causal mask shows to a run of queries either all or nothing of another rank's run of keys.
        """
        mine, keys = self.blocks[self.axis.rank], tokens_of(self.blocks[block])
        if self.causal and block != self.axis.rank:
            seen = [sum(b - a for a, b in self.blocks[block] if b <= start) for start, _ in mine]
            if len({*seen} - {0}) == 1:
                return tokens_of(mine[: seen.count(0)]), max(seen), {"causal": False}
        elif self.causal is not None:
            return 0, keys, {"causal": self.causal}
        both = torch.stack((low, high))
        before = [(both - a).clamp_(0, b - a) for a, b in self.blocks[block]]
        return 0, keys, {"bounds": tuple(torch.stack(before).sum(0, dtype=low.dtype))}


def ring_attention(
    axis: Axis, blocks: tuple[Runs, ...], causal: bool, window: int | None, documents: list[int] | None
) -> _Ring:
    """Decide on the host which rank needs which block of keys, from the mask."""

    def seen(run: Run) -> Run:  # the keys that a run of queries sees: one run, as each query sees itself
        first, last = run[0], run[1] - 1
        low, high = 0, blocks_end
        if documents is not None:
            low, high = documents[bisect_right(documents, first) - 1], documents[bisect_right(documents, last)]
        if causal:
            high = last + 1
        if window is not None:
            low = max(low, first + 1 - window)
        return low, high

    def meet(a: Run, b: Run) -> bool:
        return max(a[0], b[0]) < min(a[1], b[1])

    blocks_end = max(end for runs in blocks for _, end in runs)
    needs = [[seen(run) for run in runs] for runs in blocks]
    reads = tuple(
        frozenset(j for j, keys in enumerate(blocks) if any(meet(a, b) for a in need for b in keys)) for need in needs
    )
    size = axis.size
    reach = tuple(max((rank - block) % size for rank in range(size) if block in reads[rank]) for block in range(size))
    return _Ring(axis, blocks, reads, reach, causal if window is None and documents is None else None)


class _RingAttention(Function):
    """Ring attention: each step sends the next block while the current block is computed."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, low, high, ring: _Ring, options: dict[str, Any]):
        wide = torch.promote_types(q.dtype, torch.float32)
        options, shapes, rank, merged = {**options, "out_dtype": wide}, _Shapes(k, v), ring.axis.rank, None
        held = shapes.pack(k, v)
        later = {**options, "out_dtype": None} if options["impl"] == TORCH else options  # torch's kernel rounds anyway
        for step in range(ring.steps + 1):
            coming = ring.pass_on(held, shapes.unit, step) if step < ring.steps else held
            block = ring.block(rank, step)
            if ring.here(step) and block in ring.reads[rank]:
                first, keys, mask = ring.mask(low, high, block)
                k_part, v_part = (t[:, :keys] for t in shapes.unpack(held))
                part = attention(q[:, first:], k_part, v_part, **mask, **(options if merged is None else later))
                merged = part if merged is None else attention_merge(*merged, *part)
            held = collectives.wait(coming) if step < ring.steps else held
        assert merged is not None  # each query sees itself
        merged = merged if sinks is None else with_sinks(*merged, sinks)
        # A cast that does nothing is an alias, whose gradient torch 2.11 loses when it is compiled.
        output, lse = merged if wide == q.dtype else (merged[0].to(q.dtype), merged[1])
        ctx.save_for_backward(q, k, v, sinks, output, lse, low, high)
        ctx.ring, ctx.options = ring, options
        return output

    @staticmethod
    def backward(ctx, grad):
        """Send each block's gradients along the ring, one step behind the block, and finally to the block's rank."""
        refuse_second_derivative("context-parallel attention")
        q, k, v, sinks, output, lse, low, high = ctx.saved_tensors
        ring, how, shapes, wide = ctx.ring, ctx.options, _Shapes(k, v), torch.promote_types(q.dtype, torch.float32)
        rank, held, dq = ring.axis.rank, shapes.pack(k, v), torch.zeros_like(q, dtype=wide)
        mine = flying = dq.new_empty(0)
        for step in range(ring.steps + 1):
            coming = ring.pass_on(held, shapes.unit, step) if step < ring.steps else held
            block, part = ring.block(rank, step), dq.new_empty(0)
            if ring.here(step) and block in ring.reads[rank]:
                first, keys, mask = ring.mask(low, high, block)
                k_part, v_part = (t[:, :keys] for t in shapes.unpack(held))
                dq_part, *grads = attention_backward(
                    grad[:, first:], q[:, first:], k_part, v_part, output[:, first:], lse[..., first:], **mask, **how
                )
                dq[:, first:].add_(dq_part)
                unseen = tokens_of(ring.blocks[block]) - keys
                part = shapes.pack(*(F.pad(t, (0, 0, 0, 0, 0, unseen)) if unseen else t for t in grads))
            if step == 0:
                mine = part
            else:
                before, mine = ring.returned(flying, shapes.unit, step - 1, mine)
                if ring.here(step):
                    part = before + part if part.numel() else before
            if ring.steps:
                flying = ring.pass_on(part, shapes.unit, step, home=True)
            held = collectives.wait(coming) if step < ring.steps else held
        if ring.steps:
            _, mine = ring.returned(flying, shapes.unit, ring.steps, mine)
        dk, dv = shapes.unpack(mine)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), sinks_gradient(grad, output, lse, sinks), *[None] * 4


class _Shapes:
    """Packs keys and values of some tokens in one flat tensor, with `unit` elements per token."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        (self.B, _, self.heads, self.K), self.V = k.shape, v.shape[-1]
        self.unit = self.B * self.heads * (self.K + self.V)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Concatenate [B, T, Hkv, K] and [B, T, Hkv, V] in one flat tensor."""
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as views of the flat tensor."""
        tokens = x.numel() // max(self.unit, 1)
        k, v = x.split([self.B * tokens * self.heads * d for d in (self.K, self.V)])
        return k.view(self.B, tokens, self.heads, self.K), v.view(self.B, tokens, self.heads, self.V)


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add one logit per head [H] without a value to the softmax of `attention`'s results."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))
    return output * rearrange((lse - total).exp(), "b h t -> b t h 1"), total


def sinks_gradient(grad: Tensor, output: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the logits [H] that `with_sinks` added; `output` and `lse` are its results."""
    if sinks is None:
        return None
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    inner = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
    return -torch.einsum("bht,bth->h", share, inner).to(sinks.dtype)
