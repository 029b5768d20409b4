"""Send tokens to the experts that they chose, on whichever rank of ep x etp these lie, and bring the outputs back.

"all_gather"   every token goes to every rank of ep, and the outputs are summed in a reduce-scatter.
"all_to_all"   a token goes once to each rank that holds some of its experts; that rank returns one row, the weighted
               sum of their outputs. Over etp a rank then gathers what its peers received.

The host needs the sizes of all buffers before the device knows how many tokens there are. all_gather has room for the
worst case, `ep` times N tokens, and all_to_all with a capacity for what the capacity allows. Without a capacity the
worst case is N rows for each rank, as many as all_gather sends. So `DispatchBounds`, which every `Run` has, gives the
buffers fixed sizes that the loads of earlier steps fit, and computes a step again that overflowed one. Elsewhere, as in
evaluation or in a layer without `prepare`, the host reads the sizes from the device, twice a layer.

Sources: one row for each token and rank: DeepSeek-V3 (arXiv:2412.19437), section 3.2.2; etp inside ep: Megatron-LM,
`MoEAlltoAllTokenDispatcher`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpcore._torch.fake import is_fake
from mpcore.collectives import all_gather, all_reduce, all_to_all_rows, reduce_scatter
from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_unpermute
from mpcore.mesh.axis import Axis

DISPATCHES = ("all_gather", "all_to_all")
FIRST = 2.0  # the first buffers hold so many times the rows of even loads

Experts = Callable[[Tensor, Tensor], Tensor]


class Bound(NamedTuple):
    """How many rows the buffers of all-to-all have, for each token of a rank.

    Attributes:
        sent: rows that each rank sends to the first, second, .. rank of ep.
        run: rows that the experts of the first, second, .. rank of ep compute.
    """

    sent: tuple[float, ...]
    run: tuple[float, ...]

    def with_each(self, change: Callable[..., Any], *others: Bound) -> Bound:
        """Each number changed, together with the same one of the others."""
        return Bound(*(tuple(map(change, *each)) for each in zip(self, *others, strict=True)))

    def times(self, factor: float) -> Bound:
        """All, so many times as large."""
        return self.with_each(lambda rows: rows * factor)


class AllGather:
    """Bring every token to every rank of ep x etp, and sum the outputs. The host reads nothing.

    Args:
        ep, etp: the axes.
        num_experts, top_k: E and K.

    Example:
        >>> from mpcore.layers.moe.dispatch import AllGather
        >>> dispatch = AllGather(mpcore.Axis(), mpcore.Axis(), num_experts=2, top_k=1)
        >>> x, expert, weight = torch.ones(3, 4), torch.tensor([[0], [1], [0]]), torch.full((3, 1), 2.0)
        >>> dispatch(x, expert, weight, None, lambda rows, counts: rows * counts[0])[:, 0]
        tensor([4., 4., 4.])
    """

    def __init__(self, ep: Axis, etp: Axis, num_experts: int, top_k: int) -> None:
        self.ep, self.etp, self.top_k = ep, etp, top_k
        self.peers, self.local = ep.size * etp.size, num_experts // ep.size

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, room: int | None, run: Experts) -> Tensor:
        """[N, D] tokens -> [N, D], the weighted sum over each token's experts.

        Args:
            experts: [N, K] the experts of each token; E is none.
            weights: [N, K].
            room: how many of these N tokens an expert takes at most; None: all.
            run: `run(rows, counts)`, this rank's experts.
        """
        route = _route(experts, weights)
        for axis in (self.etp, self.ep):
            x, route = all_gather(x, axis, 0), all_gather(route, axis, 0)
        row, counts = self._rows_here(route)
        _, rows = self._worst(len(x) // self.peers, room)
        y = self._run(x, route, row, counts, rows, run)
        return reduce_scatter(reduce_scatter(y, self.ep, 0), self.etp, 0)

    def _worst(self, tokens: int, room: int | None) -> tuple[int, int]:
        """The most rows that can be sent to a rank, and that its experts can have."""
        n, room = self.local, tokens if room is None else room
        return min(tokens, n * room), self.peers * min(tokens * min(self.top_k, n), n * room)

    def _rows_here(self, route: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each choice among those of this rank's experts, and how many each of these has."""
        experts = route[:, self.top_k :].detach().long() - 1
        return moe_rows(experts - self.ep.rank * self.local, self.local)

    def _run(self, x: Tensor, route: Tensor, row: Tensor, counts: Tensor, rows: int, run: Experts) -> Tensor:
        return moe_unpermute(run(moe_permute(x, row, rows), counts), row, route[:, : self.top_k])


class AllToAll(AllGather):
    """Send each token once to each rank that holds some of its experts. All ranks send one rank equally many rows.

    Args:
        ep, etp, num_experts, top_k: as of `AllGather`.

    Attributes:
        even: the rows where every set of K experts is chosen equally often.
        worst: the rows that are always enough.
        bound: the rows of the buffers while `is_bounded`; `shares` has those of `sent` on the device.
        is_bounded: the buffers have the rows of `bound`, and tokens beyond them go nowhere: `DispatchBounds` sees to it
            that no such step counts.
        needed: [2 ep + 1] on the device, of all calls while `is_bounded`: the rows that were needed for each token, as
            `Bound` has them, and whether any buffer was too small. None before the first.

    Example:
        >>> from mpcore.layers.moe.dispatch import AllToAll
        >>> AllToAll(mpcore.Axis(size=2, group=None), mpcore.Axis(), num_experts=4, top_k=2).even
        Bound(sent=(0.8333333333333334, 0.8333333333333334), run=(2.0, 2.0))
    """

    def __init__(self, ep: Axis, etp: Axis, num_experts: int, top_k: int) -> None:
        super().__init__(ep, etp, num_experts, top_k)
        elsewhere = math.comb(num_experts - self.local, top_k) / math.comb(num_experts, top_k)
        self.even = Bound((1 - elsewhere,) * ep.size, (float(etp.size * top_k),) * ep.size)
        self.worst = Bound((1.0,) * ep.size, (float(self.peers * min(top_k, self.local)),) * ep.size)
        self.bound, self.is_bounded = self.even.times(FIRST).with_each(min, self.worst), False
        self.shares: Tensor | None = None
        self.needed: Tensor | None = None

    def set_bound(self, bound: Bound, device: torch.device) -> None:
        """Change the rows of the buffers, between steps: the copy to the device waits for it."""
        self.bound = bound
        self.shares = torch.tensor(bound.sent, dtype=torch.float64, device=device)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, room: int | None, run: Experts) -> Tensor:
        """As `AllGather`."""
        N, ep, route = len(x), self.ep.size, _route(experts, weights)
        owner = experts // self.local  # ep: nobody
        again = (owner[:, :, None] == owner[:, None, :]).tril(-1).any(-1)  # an earlier choice brings the token there
        row, counts = moe_rows(torch.where(again, ep, owner), ep)
        send, slots, rows = self._sizes(counts, N, room)
        receive = [send[self.ep.rank]] * ep
        firsts = torch.stack([counts.cumsum(0) - counts, slots.cumsum(0) - slots, slots])
        first, start, size = F.pad(firsts, (0, 1))[:, owner]  # of each choice: in `row`, in the buffer
        place = row - first
        row = torch.where((row >= 0) & (place < size), start + place, -1)

        def sent(tokens: Tensor) -> Tensor:
            """[N, C] -> [etp x ep x slots, C], what all peers sent here; empty slots are zero."""
            arrived = all_to_all_rows(moe_permute(tokens, row, sum(send)), self.ep, send, receive)
            return all_gather(arrived, self.etp, 0)

        x, route = sent(x), sent(route)
        here, loads = self._rows_here(route)
        if rows is None:
            rows = int(loads.sum())
        elif room is None:
            self._note(counts, loads.sum(), slots, rows, N)
            loads = loads.cumsum(0, dtype=loads.dtype).clamp(max=rows).diff(prepend=loads.new_zeros(1))
        y = reduce_scatter(self._run(x, route, here, loads, rows, run), self.etp, 0)
        return moe_unpermute(all_to_all_rows(y, self.ep, receive, send), row)

    def _sizes(self, counts: Tensor, tokens: int, room: int | None) -> tuple[list[int], Tensor, int | None]:
        """The slots for each rank, alike on all ranks, on the host and on the device, and the rows of this rank's
        experts; None: not yet known."""
        slots, rows = self._worst(tokens, room)
        if room is not None:
            return [slots] * self.ep.size, counts.new_full(counts.shape, slots), rows
        sent = [math.ceil(share * tokens) for share in self.bound.sent]
        rows = min(math.ceil(self.bound.run[self.ep.rank] * tokens), rows)
        if counts.is_meta or is_fake(counts):  # without values, as in a dry run: the first bound
            return sent, counts, rows
        if self.is_bounded:
            assert self.shares is not None
            return sent, (self.shares * tokens).ceil().to(counts.dtype), rows
        slots = all_reduce(all_reduce(counts, self.ep, "max"), self.etp, "max")
        return slots.tolist(), slots, None

    @torch.no_grad()
    def _note(self, sent: Tensor, run: Tensor, slots: Tensor, rows: int, tokens: int) -> None:
        """Note what was needed. A recomputed forward needs the same, and changes nothing."""
        over = (sent > slots).any() | (run > rows)
        mine = F.pad(run[None], (self.ep.rank, self.ep.size - self.ep.rank - 1))
        needed = torch.cat([sent, mine, over[None] * max(tokens, 1)]).double() / max(tokens, 1)
        self.needed = needed if self.needed is None else torch.maximum(self.needed, needed)


def _route(experts: Tensor, weights: Tensor) -> Tensor:
    """[N, 2K], one message: the weights, and the experts + 1, so that 0 in an empty slot is none. Exact in fp32."""
    return torch.cat([weights, (experts + 1).to(weights.dtype)], 1)
