"""Explain why ranks wait for each other: match their logs of collectives and find the first mismatch.

The logs are those of torch's flight recorders of gloo and NCCL. A flight recorder keeps the last collectives of its
process, with their call sites. On gloo it doesn't record point-to-point messages; there, only the line at which each
rank's main thread stands shows the cause.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import nn

from mpcore import _torch
from mpcore._torch.distributed import flight_records
from mpcore.checkpoint.schema import Size, convert, load_json
from mpcore.mesh.agreement import Agreement, name_ranks
from mpcore.mesh.axis import Mesh

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_torch.__file__)) + os.sep
_INSIDE = (
    _TORCH,
    *(os.path.join(_PACKAGE, room) + os.sep for room in ("_torch", os.path.join("tools", "_torch"))),
    "<",
)
"""Frames in these files don't say where a rank is."""
_OURS = tuple(
    os.path.join(_PACKAGE, *name.split("/"))
    for name in ("collectives.py", "mesh/agreement.py", "parallel/fsdp.py", "pipeline/messages.py",
                 "tools/fault_tolerance/signals.py", "tools/simulation/nonfinite.py")
)  # fmt: skip
_HEARS = Agreement._hear.__code__
Rank = Annotated[int, range(2**20)]
LIMIT = 2**24  # bytes of a log
_EQUAL_SHAPES = ("all_reduce", "all_gather", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base", "broadcast")


@dataclass(frozen=True)
class Call:
    """A collective that a rank entered.

    Attributes:
        number: its number among the collectives of its group and backend, from 1.
        kind: such as "all_reduce".
        shape, dtype: those of its input.
        site: the file and line outside of torch that called it. If that line is in mpcore, the line that called mpcore
            follows.
        done: whether it has completed.
        time: when it began, in nanoseconds of the host's clock.
        backend: the backend, such as "gloo". On "nccl" the device waits for the collective, not the host.
    """

    group: str
    number: Size
    kind: str
    shape: tuple[Size, ...]
    dtype: str
    site: str
    done: bool
    time: int
    backend: str = "gloo"


@dataclass(frozen=True)
class Log:
    """One rank's report.

    Attributes:
        groups: the axis and the ranks of each process group, by the group's name.
        calls: the last collectives, oldest first.
        site: the file and line where the main thread is.
        doing: the innermost module of the model, or the pipeline action, that the main thread is in.
        waiting: whether the main thread is inside a call of torch.distributed.
        agreement, number, members: the agreement that the main thread waits in, if it does: its name in the store, its
            number, and its ranks.
    """

    rank: Rank
    groups: dict[str, tuple[str, tuple[Rank, ...]]]
    calls: list[Call] = field(default_factory=list)
    site: str = "an unknown place"
    doing: str = ""
    waiting: bool = False
    agreement: str = ""
    number: Size = 0
    members: list[Rank] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Log:
        """Return the log that `to_json` wrote. ValueError if it is damaged."""
        return convert(Log, load_json(text.encode(), "the log"), "the log")


def record(entries: int = 512) -> None:
    """Record the last collectives of this process in torch's flight recorder.

    Call it before a process group is created.

    Raises:
        ValueError: if a process group already exists, or `entries` is below 1.
    """
    if entries < 1:
        raise ValueError(f"entries {entries} is smaller than 1")
    if dist.is_initialized():
        raise ValueError("the first process group reads how much is logged: call record() before it is made")
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(entries)


def read_log(mesh: Mesh, model: nn.Module | None = None, thread: int | None = None) -> Log:
    """Return this rank's log, with the line where its main thread is now. Any thread may call it.

    Args:
        mesh: its axes name the process groups.
        model: the names of its modules say where the rank is. None: `Log.doing` names only pipeline actions.
        thread: the identifier of the thread to look at. None: the main thread.
    """
    groups = {}
    for name, axis in mesh.axes.items():
        if axis.group is not None and axis.group_name not in groups:
            groups[axis.group_name] = (name, tuple(dist.get_process_group_ranks(axis.group)))
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    site, doing, waiting = stands_in(frame, {id(m): n for n, m in model.named_modules()} if model is not None else {})
    # Unpickling is safe: this process has just pickled the records.
    entries = [e for record in flight_records() for e in pickle.loads(record).get("entries", [])]
    # A destroyed process group leaves its calls in the recorder, and a later group may have the same name.
    found: Any = next((f.f_locals["self"] for f, _ in traceback.walk_stack(frame) if f.f_code is _HEARS), None)
    members = [] if found is None else dist.get_process_group_ranks(found.group)
    doing = doing or (f"the agreement about the {found.what}" if found is not None and found.what else "")
    waits = ("", 0, []) if found is None else (found.prefix, found.number, members)
    return Log(mesh.job.rank, groups, calls_of(entries, mesh.made_ns), site, doing, waiting, *waits)


def give_no_answer(ranks: Sequence[int], store: dist.Store | None = None) -> str:
    """Return text such as `rank 3 gives no answer`. With a store it includes the ranks' hosts, except this one."""
    return f"{name_ranks(store, ranks)} {'gives' if len(ranks) == 1 else 'give'} no answer"


def last_call(mesh: Mesh) -> str:
    """Return the collective that this rank called last: its axis, shape, file and line. "": none is recorded."""
    log = read_log(mesh)
    return _called(log.calls[-1], log) if log.calls else ""


def calls_of(entries: Sequence[Mapping[str, Any]], since_ns: int = 0) -> list[Call]:
    """Return the collectives in entries of torch's flight recorders that began since then, oldest first."""
    calls = []
    for e in entries:
        if e["is_p2p"] or e["time_created_ns"] < since_ns:
            continue
        shape = tuple(e["input_sizes"][0]) if e["input_sizes"] else ()
        dtype = e["input_dtypes"][0] if e["input_dtypes"] else ""
        done = e["retired"] or e["state"] == "completed"
        backend, _, kind = e["profiling_name"].rpartition(":")
        site = _places((f["filename"], f["line"]) for f in e["frames"])
        group, number, time_ns = e["process_group"][0], e["collective_seq_id"], e["time_created_ns"]
        calls.append(Call(group, number, kind, shape, dtype, site, done, time_ns, backend))
    return sorted(calls, key=lambda call: call.time)


@functools.cache
def _site(file: str, line: int) -> str | None:
    """Return text such as `layers/linear.py:88`, or None for a file of torch or one that all collectives go through."""
    if file.startswith(_INSIDE) or file in _OURS or os.sep not in file:
        return None
    return f"{os.path.join(*Path(file).parts[-2:])}:{line}"


def _places(lines: Iterable[tuple[str, int]]) -> str:
    """Return the first site of a stack, innermost first. If it is in mpcore, add the first site outside of mpcore."""
    first = ""
    for file, line in lines:
        site = _site(file, line)
        if site and not (first and file.startswith(_PACKAGE)):
            if first or not file.startswith(_PACKAGE):
                return f"{first}, called at {site}" if first else site
            first = site
    return first or "an unknown place"


def call_site(frame: FrameType | None) -> str:
    """Return where a stack is outside of torch, such as `layers/linear.py:88, called at gpt/model.py:40`."""
    return _places((f.f_code.co_filename, line) for f, line in traceback.walk_stack(frame))


def stands_in(frame: FrameType | None, names: Mapping[int, str]) -> tuple[str, str, bool]:
    """Return where a thread is: the values `site`, `doing` and `waiting` of its `Log`. `names`: of modules, by `id`."""
    site, doing, waiting = "", "", False
    while frame is not None:
        file, held = frame.f_code.co_filename, frame.f_locals
        if not site:
            waiting |= file.startswith(os.path.join(_TORCH, "distributed")) or file in _OURS
            site = call_site(frame) if _site(file, frame.f_lineno) else ""
        if not doing:
            if names.get(id(held.get("self"))):
                doing = names[id(held["self"])]
            elif frame.f_code.co_name == "_step_microbatches" and held.get("action") is not None:
                doing = f"the pipeline's {held['action']}"
        frame = frame.f_back
    return site or "an unknown place", doing, waiting


def explain(logs: Sequence[Log], size: int) -> str:
    """Explain why the ranks don't make progress, from the logs of those of the `size` ranks that answered.

    The text names first the rank at fault and where it is, then has one line per rank.
    """
    by_rank = {log.rank: log for log in logs}
    silent = [rank for rank in range(size) if rank not in by_rank]
    mismatch = _first_pair(by_rank, form_of)
    verdict = f"the ranks disagree about {mismatch}" if mismatch else _lag(by_rank, silent) or _idle(by_rank, silent)
    parted = _first_pair(by_rank, lambda call: call.site)
    if parted and parted != mismatch:
        verdict += f"\n  the first call that ranks made at different places is {parted}"
    lines = [f"  rank {log.rank}: {_stands(log)}" for _, log in sorted(by_rank.items())]
    lines += [f"  rank {rank}: no answer" for rank in silent]
    return "\n".join([verdict, *lines])


def _first_pair(logs: dict[int, Log], key: Callable[[Call], object]) -> str | None:
    """Return the first collective for which two ranks have different keys, and how each of the two entered it."""
    entered: dict[tuple[str, str, int], dict[int, Call]] = defaultdict(dict)
    for rank, log in logs.items():
        for call in log.calls:
            entered[call.group, call.backend, call.number][rank] = call
    found: list[tuple[int, str]] = []
    for calls in entered.values():
        (first, one), *others = sorted(calls.items())
        rank, other = next((entry for entry in others if key(entry[1]) != key(one)), (first, one))
        if rank != first:
            text = f"{_entered(first, one, logs)} while {_entered(rank, other, logs)}"
            found.append((min(one.time, other.time), f"call {one.number}: {text}"))
    return min(found)[1] if found else None


def _entered(rank: int, call: Call, logs: dict[int, Log]) -> str:
    return f"rank {rank} entered {_called(call, logs[rank])}"


def form_of(call: Call) -> tuple[Any, ...]:
    """Return what must be the same on all ranks that enter a collective: kind, dtype and, for some kinds, shape."""
    return (call.kind, call.dtype, call.shape if call.kind in _EQUAL_SHAPES else ())


def _pending(log: Log) -> Call | None:
    """Return the collective that a rank waits in, or None.

    On NCCL the device waits in the first collective that isn't done, and the host runs ahead. On other backends only a
    collective that the main thread waits for counts: a collective in progress that nothing waits for blocks no rank.
    """
    open_calls = [call for call in log.calls if not call.done]
    on_host = [call for call in open_calls if call.backend != "nccl"][-1:] if log.waiting else []
    on_device = [call for call in open_calls if call.backend == "nccl"][:1]
    return min(on_host + on_device, key=lambda call: call.time, default=None)


def _missing(log: Log, logs: dict[int, Log], silent: Sequence[int]) -> list[int]:
    """Return the ranks that a waiting rank waits for."""
    call = _pending(log)
    if call is None or call.group not in log.groups:
        return []

    def is_behind(rank: int) -> bool:
        if rank not in logs:
            return rank in silent
        mine = (c.number for c in logs[rank].calls if (c.group, c.backend) == (call.group, call.backend))
        return max(mine, default=0) < call.number

    return [rank for rank in log.groups[call.group][1] if is_behind(rank)]


def circle(a: Log, b: Log, store: dist.Store) -> str:
    """Return that rank a waits in an agreement for rank b, which waits in a collective for rank a; "" otherwise."""
    if b.rank not in a.members or a.rank not in _missing(b, {a.rank: a, b.rank: b}, ()):
        return ""
    if store.add(f"{a.agreement}/at/{a.members.index(b.rank)}", 0) >= a.number:  # b has come since
        return ""
    waits = f"rank {a.rank}: waits at {a.site} for rank {b.rank}"
    return f"the ranks wait in a circle:\n  {waits}\n  rank {b.rank}: {_stands(b)}"


def _lag(logs: dict[int, Log], silent: Sequence[int]) -> str | None:
    """Follow each waiting rank to the rank that it waits for, until a rank waits for no other or a cycle closes."""
    starts = [log for log in sorted(logs.values(), key=lambda log: log.rank) if _missing(log, logs, silent)]
    for log in starts:
        seen = [log.rank]
        while True:
            behind = _missing(logs[seen[-1]], logs, silent)
            if not behind:
                break
            if behind[0] in seen:
                circle = itertools.pairwise([*seen[seen.index(behind[0]) :], behind[0]])
                waits = (f"rank {a} waits in {_called(_pending(logs[a]), logs[a])} for rank {b}" for a, b in circle)
                return f"the ranks wait in a circle: {', '.join(waits)}"
            seen.append(behind[0])
            if seen[-1] in silent:
                break
        waiter, root = logs[seen[-2]], seen[-1]
        entered = f"rank {waiter.rank} entered {_called(_pending(waiter), waiter)} while rank {root}"
        if root in silent:
            return f"{entered} gives no answer: it is stopped, dead or cut off"
        return f"{entered} never did: it {_stands(logs[root])}"
    return None


def _idle(logs: dict[int, Log], silent: Sequence[int]) -> str:
    if silent:
        return f"{give_no_answer(silent)}: stopped, dead or cut off"
    apart = [log for log in logs.values() if not log.waiting and _pending(log) is None]
    if apart and len(apart) < len(logs):
        first = min(apart, key=lambda log: log.rank)
        return f"rank {first.rank} waits for nobody while others wait: it {_stands(first)}"
    if apart:
        return "no rank waits for another: all are slow, or stuck at the same place"
    return "all ranks wait, and their collectives match: messages between two of them don't, or the network is cut"


def _stands(log: Log) -> str:
    inside = f" in {log.doing}" if log.doing else ""
    call = _pending(log)
    if call is not None:
        return f"waits in {_called(call, log)}{inside}"
    return f"{'waits' if log.waiting else 'is'} at {log.site}{inside}"


def _called(call: Call | None, log: Log) -> str:
    assert call is not None
    axis = log.groups.get(call.group, (call.group, ()))[0]
    return f"{call.kind}({axis}) of {list(call.shape)} {call.dtype} at {call.site}"
