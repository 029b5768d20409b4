"""gloo over a link of known speed: a work ends when its bytes would have come over the link, and the host may sleep.

A collective travels from the later of its starts on all ranks and the end of the one before in its group, and takes
`latency + bytes / bandwidth` for the rank that sends the most. A message between two ranks travels
from the later of its starts on both, as gloo's do.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mpcore._torch.distributed import default_store
from mpcore.tools._torch.simulated import PythonGroup

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
SET_UP = {"broadcast", "allgather", "gather", "scatter", "reduce", "barrier", "monitored_barrier"}
_TorchWork: Any = dist.Work
TAGS = 10**6  # messages with start times have tags of their own
NUMBERS = 10**6  # of the collectives of one group: groups of the same ranks have others


class Event(NamedTuple):
    """One action of a rank's host: "compute", "start" and "send" have their seconds, "receive" and "wait" none.

    The key of "compute" is the product's share of a whole one.
    """

    kind: str
    key: tuple = ()
    seconds: float = 0.0


@dataclass
class Link:
    """The link of this process, and what happened on it.

    Attributes:
        latency: seconds of a message, whatever its size.
        bandwidth: bytes a second.
        overlaps: whether a start returns at once; False: it waits.
        product: seconds that a matrix product takes, asleep.
        whole: a product of fewer multiplications takes its share of these seconds.
        events: what the host did.
        waited: seconds asleep in waits.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    overlaps: bool = True
    product: float = 0.0
    whole: int = 1
    events: list[Event] = field(default_factory=list)
    waited: float = 0.0

    def begin(self) -> None:
        """Forget what happened."""
        self.events, self.waited = [], 0.0

    def note(self, *event: Any) -> None:
        """Add an action."""
        self.events.append(Event(*event))

    def sleep_until(self, moment: float) -> None:
        """Count the time that the host is blocked by a message."""
        began = time.monotonic()
        if moment > began:
            time.sleep(moment - began)
        self.waited += time.monotonic() - began


LINK = Link()


@contextmanager
def over(link: Link) -> Iterator[Link]:
    """Send over this link, and let each matrix product sleep for `link.product` seconds."""
    vars(LINK).update(vars(link))
    with _Asleep():
        yield LINK


class _Asleep(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func in PRODUCTS or (func.namespace == "mpcore" and "attention" in func.__name__):
            share = 1.0
            if func in PRODUCTS:
                a, b = args[-2:]
                share = min(1.0, a.numel() * b.shape[-1] / LINK.whole)
            LINK.note("compute", (share,), share * LINK.product)
            time.sleep(share * LINK.product)
        return func(*args, **(kwargs or {}))


class _Work(_TorchWork):
    def __init__(self, inner: Any, key: tuple, arrives: Callable[[], float] | None) -> None:
        super().__init__()
        self.inner, self.key, self.arrives, self.over = inner, key, arrives, False
        if not LINK.overlaps and len(key) == 2:  # a collective
            self.wait()

    def wait(self, timeout: Any = None) -> bool:
        if not self.over:
            self.over = True
            if self.arrives is not None:
                LINK.note("wait", self.key)
                began = time.monotonic()
                arrives = self.arrives()
                LINK.waited += time.monotonic() - began
                LINK.sleep_until(arrives)
            self.inner.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.over


class SlowGroup(PythonGroup):
    """A group of gloo whose works end as late as on the link."""

    backend = "slow"
    made = 0

    def __init__(self, options: Any, _: object = None) -> None:
        super().__init__(options)
        self.inner: Any = dist.ProcessGroupGloo(options.store, self.place, self.count, options.timeout)
        self.number, SlowGroup.made = NUMBERS * SlowGroup.made, SlowGroup.made + 1
        self.ends: list[Callable[[], float]] = []
        self.sent: dict[tuple, int] = defaultdict(int)
        self.held: list[Any] = []  # messages with start times, which nobody waits for

    def _collective(self, nbytes: float, begin: Callable[[], Any]) -> _Work:
        key, seconds = (self.ranks, self.number), LINK.latency + nbytes / LINK.bandwidth
        self.number += 1
        LINK.note("start", key, seconds)
        with _disable_current_modes():
            mine = torch.tensor([time.monotonic(), seconds], dtype=torch.float64)
            all_ranks = [torch.empty_like(mine) for _ in range(self.count)]
            told, inner = self.inner.allgather([all_ranks], [mine]), begin()
        before = self.ends[-1] if self.ends else lambda: 0.0
        found: list[float] = []

        def arrives() -> float:
            if not found:
                told.wait()
                starts, durations = zip(*(each.tolist() for each in all_ranks), strict=True)
                found.append(max(before(), *starts) + max(durations))
            return found[0]

        self.ends = [arrives]
        return _Work(inner, key, arrives)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        """Twice the bytes of a reduce-scatter."""
        sent = 2 * (self.count - 1) / self.count * sum(x.nbytes for x in tensors)
        return self._collective(sent, lambda: self.inner.allreduce(tensors, opts))

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> _Work:
        """The bytes that this rank gets."""
        sent = (self.count - 1) / self.count * output.nbytes
        return self._collective(sent, lambda: self.inner._allgather_base(output, x))

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any) -> _Work:
        """The bytes that this rank gives."""
        sent = (self.count - 1) / self.count * x.nbytes
        return self._collective(sent, lambda: self.inner._reduce_scatter_base(output, x, opts))

    def all_to_all_single(self, output: Tensor, x: Tensor, received: Any, sent: Any, opts: Any = None) -> _Work:
        """All that a rank sends."""
        return self._collective(x.nbytes, lambda: self.inner.alltoall_base(output, x, received or [], sent or []))

    def __getattribute__(self, name: str) -> Any:  # what no step has goes to gloo as it is
        return getattr(self.inner, name) if name in SET_UP else super().__getattribute__(name)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        """As functional collectives ask: of one tensor."""
        return self.all_gather_single(outputs[0], inputs[0], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> _Work:
        """As functional collectives ask: of one tensor."""
        return self.reduce_scatter_single(outputs[0], inputs[0], opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        """Tell when it starts, then send."""
        key = self._message(self.place, to, tag)
        seconds = LINK.latency + sum(x.nbytes for x in tensors) / LINK.bandwidth
        LINK.note("send", key, seconds)
        with _disable_current_modes():
            started = [torch.tensor([time.monotonic()], dtype=torch.float64)]
            work = _Work(self.inner.send(tensors, to, tag), key, None)
            self.held.append((started, self.inner.send(started, to, tag + TAGS)))
        if not LINK.overlaps:
            LINK.note("wait", key)
            LINK.sleep_until(float(started[0]) + seconds)
        return work

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        """Wait until the message would have come."""
        key, started = self._message(source, self.place, tag), torch.empty(1, dtype=torch.float64)
        LINK.note("receive", key)
        posted = time.monotonic()
        seconds = LINK.latency + sum(x.nbytes for x in tensors) / LINK.bandwidth
        with _disable_current_modes():
            told, inner = self.inner.recv([started], source, tag + TAGS), self.inner.recv(tensors, source, tag)

        def arrives() -> float:
            told.wait()
            return max(float(started), posted) + seconds

        return _Work(inner, key, arrives)

    def _message(self, source: int, to: int, tag: int) -> tuple:
        way = (self.ranks[source], self.ranks[to], tag)
        self.sent[way] += 1
        return (*way, self.sent[way])


def begin(name: str) -> None:
    """In a rank of a pool: a world of slow groups in place of gloo's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"slow {name}", default_store())
    dist.destroy_process_group()
    if "SLOW" not in dist.Backend._plugins:
        dist.Backend.register_backend("slow", SlowGroup, extended_api=True, devices=["cpu"])
    dist.init_process_group("slow", store=store, rank=rank, world_size=size)


def critical_path(ranks: Sequence[Sequence[Event]]) -> tuple[float, float]:
    """Return the seconds from the first event to the last, and those in waits on the rank that waits most.

    Args:
        ranks: the events of each rank, as in `Link.events`. Other work of the host counts as no time.
    """
    clocks, waited, places = [0.0] * len(ranks), [0.0] * len(ranks), [0] * len(ranks)
    starts: dict[tuple, list[tuple[float, float]]] = defaultdict(list)  # of each rank, with the seconds of its bytes
    ends, free = dict[tuple, float](), defaultdict[tuple, float](float)
    sent, received = dict[tuple, tuple[float, float]](), dict[tuple, float]()
    going = True
    while going:
        going = False
        for rank, events in enumerate(ranks):
            while places[rank] < len(events):
                kind, key, seconds = events[places[rank]]
                if kind == "wait" and key in sent and key in received:
                    ends[key] = max(sent[key][0], received[key]) + sent[key][1]
                if kind == "wait" and key not in ends:
                    break
                if kind == "compute":
                    clocks[rank] += seconds
                elif kind == "send":
                    sent[key] = clocks[rank], seconds
                elif kind == "receive":
                    received[key] = clocks[rank]
                elif kind == "start":
                    starts[key].append((clocks[rank], seconds))
                    if len(starts[key]) == len(key[0]):
                        group, (begun, durations) = (key[0], key[1] // NUMBERS), zip(*starts[key], strict=True)
                        ends[key] = free[group] = max(free[group], *begun) + max(durations)
                elif kind == "wait":
                    blocked = max(0.0, ends[key] - clocks[rank])
                    waited[rank] += blocked
                    clocks[rank] += blocked
                places[rank] += 1
                going = True
    if any(place < len(events) for place, events in zip(places, ranks, strict=True)):
        raise ValueError("a rank waits for what no other one starts")
    return max(clocks), max(waited)
