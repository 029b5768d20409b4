"""Send tokens to their experts on the ranks of ep x etp, and bring the outputs back.

"all_gather"   every rank of ep gets every token; a reduce-scatter sums the outputs.
"all_to_all"   each token is sent once to each rank that holds some of its experts. That rank returns one row per token,
               the weighted sum of the experts' outputs. With etp, each rank also all-gathers what its etp peers got.

The host must choose the buffer sizes before the device has counted the tokens. all_gather has room for the worst case,
`ep` times N tokens. all_to_all with a capacity has room for what the capacity allows. Without a capacity the worst case
is N rows for each rank, which is what all_gather sends. `DispatchBounds` (every `Run` has one) therefore gives the
buffers fixed sizes that fitted the loads of earlier steps, and repeats a step whose buffers overflowed. Without it, for
example in evaluation, the host reads the sizes from the device, twice per layer.

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

from mpcore._torch.values import has_values
from mpcore.collectives import Flying, all_gather, all_reduce, finish, reduce_scatter, start
from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_unpermute
from mpcore.mesh.axis import Axis

DISPATCHES = ("all_gather", "all_to_all")
FIRST = 2.0  # the first buffers have FIRST times the rows of even loads

Experts = Callable[[Tensor, Tensor], Tensor]


class Bound(NamedTuple):
    """The number of rows of the all-to-all buffers, per token of a rank.

    Attributes:
        sent: for each rank of ep, the rows that every rank sends to it.
        run: for each rank of ep, the rows that its experts compute.
    """

    sent: tuple[float, ...]
    run: tuple[float, ...]

    def with_each(self, change: Callable[..., Any], *others: Bound) -> Bound:
        """Return a `Bound` with `change` applied to corresponding numbers of this and the other bounds."""
        return Bound(*(tuple(map(change, *each)) for each in zip(self, *others, strict=True)))

    def times(self, factor: float) -> Bound:
        """Multiply every number of rows by `factor`."""
        return self.with_each(lambda rows: rows * factor)


class Sent(NamedTuple):
    """Tokens on their way to their experts."""

    x: Flying
    route: Flying
    rows: int | None  # of this rank's experts; None: the host does not know them yet
    row: Tensor | None = None  # of each choice in the buffer of an all-to-all
    needed: tuple[Tensor, Tensor, int] | None = None  # what `AllToAll._note` takes


class Returned(NamedTuple):
    """Outputs of experts on their way back; `row` as in `Sent`."""

    y: Flying
    row: Tensor | None = None


class AllGather:
    """All-gather the tokens over ep x etp, and reduce-scatter the outputs. The host reads nothing from the device."""

    def __init__(self, ep: Axis, etp: Axis, num_experts: int, top_k: int) -> None:
        self.ep = ep
        self.etp = etp
        self.top_k = top_k
        self.peers: int = ep.size * etp.size
        self.local: int = num_experts // ep.size

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, room: int | None, run: Experts) -> Tensor:
        """Map tokens [N, D] to [N, D], the weighted sum of each token's expert outputs: the three methods in turn.

        Args:
            x: [N, D], this rank's tokens.
            experts: int64 [N, K], the experts of each token; E means no expert.
            weights: [N, K], the weight of each expert's output.
            room: the largest number of these N tokens that one expert takes; None: no limit.
            run: `run(rows, counts)`, which computes this rank's experts.
        """
        return self.receive(self.compute(self.send(x, experts, weights, room), run))

    def send(self, x: Tensor, experts: Tensor, weights: Tensor, room: int | None) -> Sent:
        """Start to send tokens to their experts; work between the methods runs beside the messages."""
        route, (_, rows) = _route(experts, weights), self._worst(len(x), room)
        x, route = all_gather(x, self.etp, 0), all_gather(route, self.etp, 0)
        return Sent(start("all_gather", x, self.ep), start("all_gather", route, self.ep), rows)

    def compute(self, sent: Sent, run: Experts) -> Returned:
        """Compute the experts of the tokens that arrived, and start to send the outputs back."""
        x, route = finish(sent.x), finish(sent.route)
        row, counts = self._rows_here(route)
        return Returned(start("reduce_scatter", self._run(x, route, row, counts, sent.rows or 0, run), self.ep))

    def receive(self, returned: Returned) -> Tensor:
        """Return the outputs [N, D] of this rank's tokens."""
        return reduce_scatter(finish(returned.y), self.etp, 0)

    def _worst(self, tokens: int, room: int | None) -> tuple[int, int]:
        n, room = self.local, tokens if room is None else room
        return min(tokens, n * room), self.peers * min(tokens * min(self.top_k, n), n * room)

    def _rows_here(self, route: Tensor) -> tuple[Tensor, Tensor]:
        return moe_rows(route[:, self.top_k :].detach().long() - 1 - self.ep.rank * self.local, self.local)

    def _run(self, x: Tensor, route: Tensor, row: Tensor, counts: Tensor, rows: int, run: Experts) -> Tensor:
        return moe_unpermute(run(moe_permute(x, row, rows), counts), row, route[:, : self.top_k])


class AllToAll(AllGather):
    """Send each token once to each rank that holds some of its experts.

    All ranks send equally many rows to a given rank.

    Attributes:
        even: the rows needed if every set of K experts is chosen equally often.
        bound: the rows of the buffers while `is_bounded` is True.
        shares: `bound.sent` on the device.
        is_bounded: if True, the buffers have the rows of `bound`, and further tokens are dropped. `DispatchBounds`
            repeats such a step.
        needed: [2 ep + 1] on the device, the maximum over all calls while `is_bounded`: the needed rows per token, in
            the order of `Bound`, and a positive number if a buffer was too small. None before the first call.
    """

    def __init__(self, ep: Axis, etp: Axis, num_experts: int, top_k: int) -> None:
        super().__init__(ep, etp, num_experts, top_k)
        elsewhere = math.comb(num_experts - self.local, top_k) / math.comb(num_experts, top_k)
        self.even: Bound = Bound((1 - elsewhere,) * ep.size, (float(etp.size * top_k),) * ep.size)
        self.worst: Bound = Bound((1.0,) * ep.size, (float(self.peers * min(top_k, self.local)),) * ep.size)
        self.bound: Bound = self.even.times(FIRST).with_each(min, self.worst)
        self.is_bounded: bool = False
        self.shares: Tensor | None = None
        self.needed: Tensor | None = None

    def set_bound(self, bound: Bound, device: torch.device) -> None:
        """Change the rows of the buffers. Call it between steps: the copy to the device waits for the device."""
        self.bound = bound
        self.shares = torch.tensor(bound.sent, dtype=torch.float64, device=device)

    def send(self, x: Tensor, experts: Tensor, weights: Tensor, room: int | None) -> Sent:
        """See `AllGather.send`. Arrived rows are [etp x ep x slots, C]; empty slots are zero."""
        N, ep, route = len(x), self.ep.size, _route(experts, weights)
        owner = experts // self.local  # ep: nobody
        again = (owner[:, :, None] == owner[:, None, :]).tril(-1).any(-1)  # an earlier choice brings the token there
        row, counts = moe_rows(torch.where(again, ep, owner), ep)
        send, slots, rows = self._sizes(counts, N, room)
        sizes = send, [send[self.ep.rank]] * ep
        firsts = torch.stack([counts.cumsum(0) - counts, slots.cumsum(0) - slots, slots])
        first, begin, size = F.pad(firsts, (0, 1))[:, owner]  # of each choice: in `row`, in the buffer
        place = row - first
        row = torch.where((row >= 0) & (place < size), begin + place, -1)
        flying = [start("all_to_all_rows", moe_permute(t, row, sum(send)), self.ep, *sizes) for t in (x, route)]
        needed = (counts, slots, N) if room is None and rows is not None else None
        return Sent(flying[0], flying[1], rows, row, needed)

    def compute(self, sent: Sent, run: Experts) -> Returned:
        """See `AllGather.compute`."""
        x, route = (all_gather(finish(t), self.etp, 0) for t in (sent.x, sent.route))
        (here, loads), rows = self._rows_here(route), sent.rows
        if rows is None:
            rows = int(loads.sum())
        elif sent.needed is not None:
            counts, slots, tokens = sent.needed
            self._note(counts, loads.sum(), slots, rows, tokens)
            loads = loads.cumsum(0, dtype=loads.dtype).clamp(max=rows).diff(prepend=loads.new_zeros(1))
        y = reduce_scatter(self._run(x, route, here, loads, rows, run), self.etp, 0)
        return Returned(start("all_to_all_rows", y, self.ep, sent.x.receive, sent.x.send), sent.row)

    def receive(self, returned: Returned) -> Tensor:
        """See `AllGather.receive`."""
        assert returned.row is not None
        return moe_unpermute(finish(returned.y), returned.row)

    def _sizes(self, counts: Tensor, tokens: int, room: int | None) -> tuple[list[int], Tensor, int | None]:
        """Return the slots per rank on host and device, and the rows of this rank's experts; None: not yet known."""
        slots, rows = self._worst(tokens, room)
        if room is not None:
            return [slots] * self.ep.size, counts.new_full(counts.shape, slots), rows
        sent = [math.ceil(share * tokens) for share in self.bound.sent]
        rows = min(math.ceil(self.bound.run[self.ep.rank] * tokens), rows)
        if not has_values(counts):  # as in a dry run: the first bound
            return sent, counts, rows
        if self.is_bounded:
            assert self.shares is not None
            return sent, (self.shares * tokens).ceil().to(counts.dtype), rows
        slots = all_reduce(all_reduce(counts, self.ep, "max"), self.etp, "max")
        return slots.tolist(), slots, None

    @torch.no_grad()
    def _note(self, sent: Tensor, run: Tensor, slots: Tensor, rows: int, tokens: int) -> None:
        over = (sent > slots).any() | (run > rows)
        mine = F.pad(run[None], (self.ep.rank, self.ep.size - self.ep.rank - 1))
        needed = torch.cat([sent, mine, over[None] * max(tokens, 1)]).double() / max(tokens, 1)
        self.needed = needed if self.needed is None else torch.maximum(self.needed, needed)


def _route(experts: Tensor, weights: Tensor) -> Tensor:
    """Pack weights and experts in one message [N, 2K]. Experts are stored plus 1, so 0 means none. Exact in fp32."""
    return torch.cat([weights, (experts + 1).to(weights.dtype)], 1)
