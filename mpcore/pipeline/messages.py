"""The messages between pipeline stages, and how long a sender keeps them in memory.

The tensors of a message are sent one after another, without names. A header gives their number, shapes and dtypes. In
training it is sent only before the first message of each batch shape, and both ranks remember it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mpcore.mesh.axis import Axis
from mpcore.pipeline.prove import other_end
from mpcore.pipeline.schedules import COMPUTE, Action, Schedule

_DTYPES = sorted({str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})


class Meta(NamedTuple):
    """The shape, dtype and flags of a tensor, which its receiver must know."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> Meta:
        return cls(tuple(x.shape), x.dtype, x.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


_PLAIN = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8})


class Message(NamedTuple):
    """Tensors that are being sent to, or received from, a peer."""

    tensors: Sequence[Tensor]
    works: Sequence[dist.Work]
    action: Action
    peer: int

    def wait(self) -> None:
        """Wait until the tensors are transferred. On a GPU only the current stream waits."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as why:
            raise RuntimeError(f"{self.action}, to or from rank {self.peer} of the pipeline, failed: {why}") from why


def post(transfer: Callable[..., Any], tensors: Sequence[Tensor], pp: Axis, peer: int, action: Action) -> Message:
    """Start sends (`dist.isend`) or receives (`dist.irecv`) of contiguous tensors. Empty tensors are not sent."""
    given = [x if x.dtype in _PLAIN else x.detach().view(-1).view(torch.uint8) for x in tensors if x.numel()]
    if given and given[0].is_cpu:  # as `transfer` does, in half the time
        group: Any = pp.group
        start = group.send if transfer is dist.isend else group.recv
        works = [start([x], peer, 0) for x in given]
    else:
        operations = [dist.P2POp(transfer, x, group=pp.group, group_peer=peer) for x in given]
        works = dist.batch_isend_irecv(operations) if operations else []
    return Message(tensors, works, action, peer)  # type: ignore[arg-type]


def send_header(metas: Iterable[Meta] | None, pp: Axis, to: int, device: torch.device) -> None:
    """Tell a rank which tensors it will receive. None: none, because this stage or an earlier one failed."""
    fields = [(_DTYPES.index(str(x.dtype)), int(x.requires_grad), len(x.shape), *x.shape) for x in metas or ()]
    numbers = sum(fields, ())
    for content in [[len(numbers)], numbers] if numbers else [[0]]:
        dist.send(torch.tensor(content, dtype=torch.int64, device=device), group=pp.group, group_dst=to)


def receive_header(pp: Axis, source: int, device: torch.device) -> tuple[Meta, ...] | None:
    """Receive the header that rank `source` sent. The host waits for it."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, group=pp.group, group_src=source)
    if int(size) == 0:
        return None
    content = torch.zeros(int(size), dtype=torch.int64, device=device)
    dist.recv(content, group=pp.group, group_src=source)
    numbers, metas = iter(content.tolist()), []
    for name in numbers:
        requires_grad, dim = bool(next(numbers)), next(numbers)
        dtype = getattr(torch, _DTYPES[name].removeprefix("torch."))
        metas.append(Meta(tuple(next(numbers) for _ in range(dim)), dtype, requires_grad))
    return tuple(metas)


def send_tensors(outputs: Sequence[Tensor] | None, pp: Axis, to: int, device: torch.device) -> None:
    """Send a header and its tensors, and wait until they are sent. None: a stage failed."""
    send_header(None if outputs is None else map(Meta.of, outputs), pp, to, device)
    post(dist.isend, outputs or (), pp, to, Action("SEND_F", 0, 0)).wait()


class EarlierStageError(ValueError):
    """An earlier stage failed, on a rank that raises its own error."""


def receive_tensors(pp: Axis, source: int, device: torch.device) -> tuple[Tensor, ...]:
    """Receive the tensors that rank `source` sent with `send_tensors`."""
    metas = receive_header(pp, source, device)
    if metas is None:
        raise EarlierStageError(f"the stage before failed on rank {source} of the pipeline, which says why")
    tensors = tuple(x.empty(device) for x in metas)
    post(dist.irecv, tensors, pp, source, Action("RECV_F", 0, 0)).wait()
    return tensors


def sent_on(out: Any, stage: int, when: str) -> tuple[Tensor, ...]:
    """Return a stage's output as a tuple of contiguous tensors, the input of the next stage."""
    outputs = out if type(out) in (tuple, list) else (out,)
    for i, x in enumerate(outputs):
        if not isinstance(x, Tensor):
            which = f"output {i}" if len(outputs) > 1 else "the output"
            raise ValueError(
                f"{which} of stage {stage} in {when} is a {type(x).__name__}: what goes to the next stage is a tensor "
                f"or a tuple of tensors"
            )
    if not outputs:
        raise ValueError(f"stage {stage} returns nothing in {when}")
    return tuple(x.contiguous() for x in outputs)


def peer_of(schedule: Schedule, message: Action) -> int:
    return schedule.rank_of[other_end(message).stage]


def input_of(action: Action) -> Action:
    """Return the receive whose result an F, B or I needs, if it comes from another rank."""
    return action._replace(kind="RECV_F" if action.kind == "F" else "RECV_B")


def receive_early(schedule: Schedule, rank: int) -> list[Action]:
    """Return the actions of a rank with each receive posted up to two computations earlier.

    A message travels once both ends are posted, and a rank that computes posts nothing. Two computations early, a
    message that takes no longer than a forward is never held by its receiver. Receives from one rank keep their order,
    and the gradient of an output is received after the output is sent.
    """
    row: list[Action] = []
    for action in schedule.ranks[rank]:
        at, left = len(row), 2
        while action.kind.startswith("RECV") and at > 0:
            before = row[at - 1]
            left -= before.kind in COMPUTE
            same = before.kind.startswith("RECV") and peer_of(schedule, before) == peer_of(schedule, action)
            if left < 0 or same or before == action._replace(kind="SEND_F"):
                break
            at -= 1
        row.insert(at, action)
    return row


def releases(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """Return, for each action of a rank, the sends to release once the action's input has arrived.

    A send is known to have arrived when its receiver sends something that it computed afterwards. No extra waiting is
    needed, because an action waits for its own input anyway. Sends that no later message confirms are released at the
    end of the step.
    """
    place = schedule.places
    mine = place[rank]
    arrivals: dict[int, list[tuple[int, Action]]] = defaultdict(list)  # by peer: where it sent, what takes it here
    for action in schedule.ranks[rank]:
        if action.kind in ("F", "B", "I"):
            receive = input_of(action)
            if receive in mine:
                peer = peer_of(schedule, receive)
                arrivals[peer].append((place[peer][other_end(receive)], action))
    found: dict[Action, list[Action]] = defaultdict(list)
    for peer, taken in arrivals.items():
        taken.sort()
        for i in range(len(taken) - 1, 0, -1):  # the first of our own actions that takes this message or a later one
            if mine[taken[i][1]] < mine[taken[i - 1][1]]:
                taken[i - 1] = taken[i - 1][0], taken[i][1]
        for send in (a for a in mine if a.kind.startswith("SEND") and peer_of(schedule, a) == peer):
            _, stage, m = other_end(send)
            kinds = ("F",) if send.kind == "SEND_F" else ("B", "I")
            used = next(place[peer][a] for kind in kinds if (a := Action(kind, stage, m)) in place[peer])
            later = bisect_right(taken, used, key=lambda pair: pair[0])
            if later < len(taken):
                found[taken[later][1]].append(send)
    return dict(found)
