"""Process groups whose ranks are threads of this process. Checked with torch 2.11 and 2.13; comments say what differs.

torch keeps the groups of a process in one object, `_world`, and their names in C++. Here each rank's thread has its own
of both. A group is a Python subclass of `ProcessGroup`, and torch calls it like a C++ group. The ranks of a group put
their inputs to a collective into a table of the job, and the last rank to arrive computes the result for all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

from mpcore._torch.autograd import below_autograd

BACKEND = "simulated"
# Typed as Any: the declared C++ signatures have other names than those by which torch calls a subclass.
_ProcessGroup: Any = dist.ProcessGroup
_Store: Any = c10d.Store
_TorchWork: Any = c10d.Work
_OPERATIONS = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum, "band": torch.bitwise_and,
           "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}  # fmt: skip


class Job(Protocol):
    """The scheduler of the ranks, as the groups and the store need it.

    Attributes:
        table: the collectives that some ranks of a group have not yet entered.
    """

    table: dict[tuple[Any, ...], Any]
    boxes: dict[tuple[Any, ...], Any]

    def wait(self, ready: Callable[[], bool], polls: bool = False, inside: object = None) -> None:
        """Let other ranks run until `ready()` is true."""

    def changed(self) -> None:
        """Note that some rank may be able to continue now."""

    def enters(self, group: SimulatedGroup, number: int, kind: str, x: Tensor | None, first: Any) -> Any:
        """Log that this rank enters a collective.

        `first` is the value that this method returned on the first rank that entered the collective.
        """


class _Here(threading.local):
    rank: int | None = None
    job: Job | None = None
    world: Any = None


_here = _Here()


def simulated_rank() -> int | None:
    """Return the simulated rank of this thread, or None in any other thread."""
    return _here.rank


class _World(type(dist.distributed_c10d._world)):  # type: ignore[misc]
    """The groups of one rank, as plain attributes. torch's own class uses module variables."""

    default_pg: Any = None
    group_count: Any = 0
    comms: Any = ()
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    pg_coalesce_state: Any = None

    def __init__(self) -> None:
        self.comms = []
        names = "pg_map pg_names pg_group_ranks pg_backend_config tags_to_pg pg_to_tag pg_coalesce_state"
        vars(self).update({name: {} for name in names.split()})


class _Worlds:
    """Replaces torch's `_world`: the groups of this thread's rank, or those of the process."""

    def __init__(self, process: Any) -> None:
        object.__setattr__(self, "_process", process)

    def __getattr__(self, name: str) -> Any:
        return getattr(_here.world or self._process, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_here.world or self._process, name, value)


@contextmanager
def rank_threads() -> Iterator[None]:
    """Within this context, each thread that calls `become_rank` has its own process groups."""
    module: Any = dist.distributed_c10d
    hook, process = sys.excepthook, module._world
    module._world = _Worlds(process)
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        # In torch 2.11 (not 2.14) that is built for CUDA, a fake tensor, such as DTensor makes, ends the process with
        # SIGSEGV if a thread other than this one is the first to replace the guard of devices that are not there.
        torch._C._ensureCUDADeviceGuardSet()
    c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, SimulatedGroup, extended_api=True, devices=["cpu", "cuda"])
    try:
        yield
    finally:
        c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        module._world, sys.excepthook = process, hook


def become_rank(job: Job, rank: int, size: int, store: dist.Store) -> None:
    """Make this thread a rank of a job, with a default process group. Its backward runs in this thread too."""
    _here.rank, _here.job, _here.world = rank, job, _World()
    torch.autograd.set_multithreading_enabled(False)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)


class SimulatedStore(_Store):
    """The store at which the ranks of a job meet: a dictionary. A rank that asks for a missing key lets others run."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self.job.changed()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        value = int(self.values.get(key, b"0")) + amount
        if amount:
            self.set(key, str(value))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        if not self._has(keys):
            self.job.wait(lambda: self._has(keys), polls=True)
        return self._has(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.job.wait(lambda: self._has(keys))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if self.values.get(key, b"") == bytes(expected):
            self.set(key, desired)
        return self.values.get(key, bytes(expected))

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def clone(self) -> SimulatedStore:
        return self

    def num_keys(self) -> int:
        return len(self.values)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    # The names that torch's C++ code calls.
    compareSet, deleteKey, getNumKeys = compare_set, delete_key, num_keys  # noqa: N815


class _Work(_TorchWork):
    """A collective in progress: `wait` lets other ranks run until it is done."""

    def __init__(
        self, job: Job, ready: Callable[[], bool], inside: object = None, finish: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__()
        self.job, self.ready, self.inside, self.finish, self.over = job, ready, inside, finish, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.over:
            self.job.wait(self.ready, inside=self.inside)
            self.finish()
            self.over = True
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self.ready():
            self.job.wait(self.ready, polls=True)
        return self.ready()

    def is_success(self) -> bool:
        return self.ready()


class _Meeting:
    """One collective of a group: each rank's input, by the rank in the group."""

    def __init__(self) -> None:
        self.parts: dict[int, Any] = {}
        self.entry: Any = None
        self.done = False


class _Box:
    """The messages from one rank to another. The n-th receive gets the n-th message."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.messages: dict[int, list[Tensor]] = {}


class PythonGroup(_ProcessGroup):
    """The methods that torch calls on a process group written in Python."""

    backend = ""

    def __init__(self, options: Any, _: object = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.place, self.count, self._name = options.group_rank, options.group_size, options.group_id
        self.ranks = tuple(options.global_ranks_in_group or range(self.count))
        self.number, self.described = 0, ""

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.place

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self.described

    def _set_group_desc(self, text: str) -> None:
        self.described = text

    def getBackendName(self) -> str:  # noqa: N802
        return self.backend

    def shutdown(self) -> None:
        """Do nothing: the group holds no resources."""

    abort = shutdown


class SimulatedGroup(PythonGroup):
    """A process group of simulated ranks."""

    backend = BACKEND

    def __init__(self, options: Any, _: object = None) -> None:
        super().__init__(options)
        self.job: Any = _here.job

    def _meet(self, kind: str, x: Tensor | None, part: Any, compute: Callable[[list[Any]], None]) -> _Work:
        """Enter the next collective of the group with this rank's input.

        The last rank computes all results in place. Ranks may use different CUDA streams.
        """
        _finish_stream(x)
        self.number += 1
        key = (self._name, self.ranks, self.number)
        meeting = self.job.table.setdefault(key, _Meeting())
        entry = self.job.enters(self, self.number, kind, x, meeting.entry)
        meeting.entry = meeting.entry or entry
        meeting.parts[self.place] = part
        if len(meeting.parts) == self.count:
            with _disable_current_modes(), torch.no_grad(), below_autograd():
                compute([meeting.parts[place] for place in range(self.count)])
            _finish_stream(x)
            meeting.done = True
            del self.job.table[key]
            self.job.changed()
        return _Work(self.job, lambda: meeting.done, entry)

    # --- collectives, with the names that torch calls -------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        def compute(parts: list[list[Tensor]]) -> None:
            for same in zip(*parts, strict=True):
                total = _reduced(same, opts.reduceOp)
                for x in same:
                    x.data.copy_(total)  # autograd counts no write, as for a real collective

        return self._meet("all_reduce", tensors[0], tensors, compute)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        def compute(parts: list[list[Tensor]]) -> None:
            for same in zip(*parts, strict=True):
                same[opts.rootRank].data.copy_(_reduced(same, opts.reduceOp))

        return self._meet("reduce", tensors[0], tensors, compute)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        def compute(parts: list[list[Tensor]]) -> None:
            for same in zip(*parts, strict=True):
                for place, x in enumerate(same):
                    if place != opts.rootRank:
                        x.data.copy_(same[opts.rootRank])

        return self._meet("broadcast", tensors[0], tensors, compute)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        def compute(parts: list[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
            for outs, _ in parts:
                for many, index in zip(outs, range(len(outs)), strict=True):
                    for out, (_, ins) in zip(many, parts, strict=True):
                        out.copy_(ins[index])

        return self._meet("all_gather", inputs[0], (outputs, inputs), compute)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> _Work:
        return self.all_gather_single_coalesced([output], [x], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        def compute(parts: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for outs, _ in parts:
                for index, out in enumerate(outs):
                    out.view(-1).copy_(torch.cat([ins[index].reshape(-1) for _, ins in parts]))

        return self._meet("_all_gather_base", inputs[0], (outputs, inputs), compute)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Work:
        def compute(parts: list[tuple[list[Tensor], list[list[Tensor]]]]) -> None:
            results = [
                [_reduced([ins[index][place] for _, ins in parts], opts.reduceOp) for index in range(len(outs))]
                for place, (outs, _) in enumerate(parts)
            ]
            for (outs, _), mine in zip(parts, results, strict=True):
                for out, result in zip(outs, mine, strict=True):
                    out.copy_(result)

        return self._meet("reduce_scatter", inputs[0][0], (outputs, inputs), compute)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> _Work:
        def compute(parts: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for index in range(len(parts[0][0])):
                totals = _reduced([ins[index] for _, ins in parts], opts.reduceOp).reshape(self.count, -1)
                for (outs, _), total in zip(parts, totals, strict=True):
                    outs[index].copy_(total.view(outs[index].shape))

        return self._meet("_reduce_scatter_base", inputs[0], (outputs, inputs), compute)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: list[int] | None, sizes: list[int] | None, opts: Any = None
    ) -> _Work:
        def cut(whole: Tensor, lengths: list[int] | None) -> tuple[Tensor, ...]:
            return whole.split(lengths or [len(whole) // self.count] * self.count)

        return self._exchange(x, cut(output, output_sizes), cut(x, sizes))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._exchange(inputs[0], outputs, inputs)

    def _exchange(self, x: Tensor, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Work:
        def compute(parts: list[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
            for to, (outs, _) in enumerate(parts):
                for source, (_, ins) in enumerate(parts):
                    if outs[source].shape != ins[to].shape:
                        raise ValueError(
                            f"all_to_all: rank {self.ranks[source]} sends {list(ins[to].shape)} to rank "
                            f"{self.ranks[to]}, which receives {list(outs[source].shape)}: let both know one size"
                        )
                    outs[source].copy_(ins[to])

        return self._meet("all_to_all", x, (outputs, inputs), compute)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Work:
        def compute(parts: list[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
            for out, (_, ins) in zip(parts[opts.rootRank][0][0], parts, strict=True):
                out.copy_(ins[0])

        return self._meet("gather", inputs[0], (outputs, inputs), compute)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Work:
        def compute(parts: list[tuple[list[Tensor], list[list[Tensor]]]]) -> None:
            for (outs, _), x in zip(parts, parts[opts.rootRank][1][0], strict=True):
                outs[0].copy_(x)

        return self._meet("scatter", outputs[0], (outputs, inputs), compute)

    def barrier(self, opts: Any = None) -> _Work:
        return self._meet("barrier", None, None, lambda parts: None)

    # torch 2.11 has other names for five of them
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- messages: a send is done at once, because its tensor is copied -------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        box = self.job.boxes.setdefault((self._name, self.ranks, self.place, to, tag), _Box())
        with _disable_current_modes(), torch.no_grad():
            box.messages[box.sent] = [x.clone() for x in tensors]
        _finish_stream(tensors[0])
        box.sent += 1
        self.job.changed()
        return _Work(self.job, lambda: True)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        box = self.job.boxes.setdefault((self._name, self.ranks, source, self.place, tag), _Box())
        number, box.received = box.received, box.received + 1

        def take() -> None:
            with _disable_current_modes(), torch.no_grad(), below_autograd():
                for x, message in zip(tensors, box.messages.pop(number), strict=True):
                    x.copy_(message)

        inside = f"receiving from rank {self.ranks[source]} of {self.described}"
        return _Work(self.job, lambda: number in box.messages, inside, take)


def _finish_stream(x: Tensor | None) -> None:
    """Wait for what the current CUDA stream has to do, if `x` is on a GPU: a stream of another rank may use it next."""
    if x is not None and x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()


def _reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    first, *others = tensors
    kind = next(name for name in ("sum", "avg", *_OPERATIONS) if op == getattr(dist.ReduceOp, name.upper()))
    total = first.clone()
    for x in others:
        total = total.add_(x) if kind in ("sum", "avg") else _OPERATIONS[kind](total, x)
    return total.div_(len(tensors)) if kind == "avg" else total
