"""Compare a value on all ranks, or raise an error on all ranks.

The ranks use the store of their rendezvous, not collectives. Each rank has one connection to the store and sends it
six short requests, for any number of ranks. A value itself is sent only if ranks differ or ask for the values: it is
sent to rank 0 of the group, which merges all values.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from mpcore._torch.distributed import default_store, has_peers
from mpcore.mesh.axis import Axis
from mpcore.mesh.log import Logger, get_logger
from mpcore.mesh.secret import decode, encode, printable, seal, unseal

log: Logger = get_logger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_LOOK_AFTER, _NEAR = 5.0, 16  # seconds of waiting, and how far ranks of one host are apart
_PART = 2**22  # bytes of a value: a TCPStore refuses 8 MiB


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of a small group, in rank order (`exchange`)."""
    return exchange(None, value, group)


def check_same(what: str, value: Mapping[str, object] | str, axis: Axis | None = None) -> None:
    """Check that a value is the same on all ranks, and raise on every rank if it is not.

    Args:
        what: what the value is, for the message. It is compared too: ranks that make different checks raise.
        value: the value on this rank: a text or a mapping. For a mapping the message shows only the entries that
            differ.
        axis: the ranks to compare. None: all ranks of the job.

    Raises:
        ValueError: on every rank, if two ranks differ. The message names the two ranks and both values.

    Example:
        >>> from mpcore.mesh import check_same
        >>> check_same("batch size", "32")  # on one process there is nothing to compare
    """
    entries = {what: value} if isinstance(value, str) else {key: repr(entry) for key, entry in value.items()}
    mine = {"call": what, **entries}
    group = dist.group.WORLD if axis is None else axis.group
    if group is None or _alone(group) or _begin(group, what).same(repr(sorted(mine.items()))):
        return
    rank, differing = exchange(None, mine, group, _first_difference)
    raise ValueError(f"ranks 0 and {rank} disagree about the {what} ({differing})")


def raise_together(error: Exception | None, axis: Axis | None = None, line: str = "") -> None:
    """Raise an error on every rank if one rank has failed, so that no rank waits for the failed one.

    Args:
        error: the exception of this rank. None: this rank did not fail.
        axis: the ranks that call this function. None: all ranks of the job.
        line: see `together`.

    Raises:
        ValueError: on every rank, with the message of the first rank that failed. On a rank that failed, the cause is
            its own exception.
    """
    group, said = dist.group.WORLD if axis is None else axis.group, _say(error)
    state = "well" if error is None else f"failed: {said}"
    if group is not None and not _alone(group) and not _begin(group, line=line).same(state):
        exchange(error, None, group, line=line)
    if error is not None:
        raise ValueError(said) from error


@contextmanager
def raising_together(kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Run a block on every rank of the job. If it raised on one rank, raise on every rank at its end.

    Args:
        kinds: the exception types to share in this way. Other exceptions are raised at once, on their own rank.
    """
    error = None
    try:
        yield
    except kinds as problem:
        error = problem
    raise_together(error)


def together(axis: Axis, work: Callable[[], T], line: str = "") -> T:
    """Run `work` on every rank of an axis and wait for all ranks. If it fails on one, raise on every rank.

    Args:
        line: a name for the calls of a background thread. Calls of different names are counted separately, so that a
            background thread and the main thread can call this function in any order.
    """
    error, result = _try(work)
    raise_together(error, axis, line)
    return result


def merged(axis: Axis, work: Callable[[], T], merge: Callable[[list[T]], R], line: str = "") -> R:
    """Run `work` on every rank of an axis. Return on every rank what `merge` makes of all results (`exchange`)."""
    error, result = _try(work)
    return exchange(error, result, axis.group, merge, line)


def exchange(
    error: Exception | None,
    value: T,
    group: dist.ProcessGroup | None,
    merge: Callable[[list[T]], Any] = list,
    line: str = "",
) -> Any:
    """Merge the values of all ranks on rank 0 of the group and return the result on every rank, or raise on every rank.

    Args:
        error, line: see `raise_together`. An error of `merge` is raised on every rank, too.
        value: this rank's value, of the types that `mpcore.mesh.secret.encode` takes. Named tuples become tuples.
        group: the ranks. None: this process alone.
        merge: called on rank 0 with the values in rank order. The default returns all values, for small groups.
    """

    def settle(answers: list[tuple[str | None, T]]) -> Any:
        failed = [rank for rank, (message, _) in enumerate(answers) if message is not None]
        if failed:
            where = "" if len(failed) == len(answers) else f" (on rank {', '.join(map(str, failed))} of {len(answers)})"
            raise ValueError(f"{answers[failed[0]][0]}{where}")
        error, result = _try(merge, [value for _, value in answers])
        if error is not None:
            where = f" (on rank 0 of {len(answers)})" if len(answers) > 1 else ""
            raise ValueError(f"{_say(error)}{where}") from error
        return result

    answer = (_say(error), value)
    if group is None or _alone(group):
        told, result = _try(settle, [answer])
    else:
        told, result = _begin(group, line=line).merged(answer, settle)
    if told is not None:
        raise ValueError(_say(told)) from error or told.__cause__
    return result


class Agreement:
    """One agreement among a group of ranks. All ranks must start their agreements in the same order.

    `store` has a prefix that only these ranks use. It counts the agreements of each rank, so the process keeps no
    state. The last rank that reaches an agreement deletes the keys of the previous one, which all ranks have left.
    """

    def __init__(
        self, store: Any, rank: int, size: int, what: str = "", group: dist.ProcessGroup | None = None, prefix: str = ""
    ) -> None:
        self.prefix = prefix
        self.store = store
        self.rank = rank
        self.size = size
        self.what = what
        self.group = group
        self.number: Any = self.store.add(f"at/{self.rank}", 1)

    def same(self, text: str) -> bool:
        """Return whether all ranks have the same text. Each rank sends a hash."""
        digest = hashlib.sha256(seal(self._name("first"), text.encode())).hexdigest()[:32]
        same = b"same " + seal(self._name("result"), b"same")  # a signature alone may begin with digits, as parts do
        if self.store.compare_set(self._key("first"), "", digest).decode() != digest:
            self.store.set(self._key("differ"), "")
        if self.store.add(self._key("came"), 1) == self.size:
            self.store.set(self._key("result"), b"" if self.store.check([self._key("differ")]) else same)
            self._forget()
        return self._hear(self._key("result")) == same

    def merged(self, value: T, merge: Callable[[list[T]], R]) -> tuple[Exception | None, R]:
        """Return what `merge` computes on rank 0 from the values of all ranks, or its error."""
        if self.rank:
            error, data = _try(encode, value)
            self._put(f"of/{self.rank}", data if error is None else encode((_say(error), None)))
        if self.store.add(self._key("came"), 1) == self.size:
            self.store.set(self._key("full"), "")
            self._forget()
        if self.rank == 0:
            self._hear(self._key("full"))
            others = (decode(self._take(f"of/{rank}")) for rank in range(1, self.size))  # an error is told to all ranks
            error, result = _try(lambda: merge([value, *others]))
            problem, data = _try(encode, (told := _say(error), result))
            if problem is not None:
                data = encode((told := _say(problem), None))
            self._put("result", data)
        else:
            told, result = decode(self._take("result", keep=True))
        return None if told is None else ValueError(printable(told)), result

    def _name(self, name: str) -> str:
        return f"{self.prefix} {self._key(name)}"  # what a message says it is, so that it can't be sent again elsewhere

    def _key(self, name: str, ago: int = 0) -> str:
        return f"{self.number - ago}/{name}"

    def _put(self, name: str, data: bytes) -> None:
        data = seal(self._name(name), data)
        parts = [data[at : at + _PART] for at in range(0, len(data), _PART)]
        for i, part in enumerate(parts[1:], 1):
            self.store.set(self._key(f"{name}/{i}"), part)
        self.store.set(self._key(name), b"%d " % len(parts) + parts[0])  # written last: then all parts are there

    def _take(self, name: str, keep: bool = False) -> bytes:
        count, _, data = self._hear(self._key(name)).partition(b" ")
        parts = [f"{name}/{i}" for i in range(1, int(count))]
        data = b"".join([data, *(self.store.get(self._key(part)) for part in parts)])
        for part in () if keep else (name, *parts):
            self.store.delete_key(self._key(part))
        return unseal(self._name(name), data)

    def _forget(self) -> None:
        result = self._key("result", 1)
        if self.number > 1 and self.store.check([result]):
            head = self.store.get(result)[:8].partition(b" ")[0]
            parts = [f"result/{i}" for i in range(1, int(head) if head.isdigit() else 1)]
            for name in ("first", "differ", "came", "full", "result", *parts):  # what isn't there isn't deleted
                self.store.delete_key(self._key(name, 1))

    def _hear(self, key: str) -> bytes:
        """Wait for a key by polling: a blocking wait would block the process's other threads."""
        began, limit, looked = time.monotonic(), self.store.timeout.total_seconds(), 0.0
        while not self.store.check([key]):
            waited = time.monotonic() - began
            if self.group is not None and waited > looked + _LOOK_AFTER:
                looked = waited
                if dead := self._dead(self.group):
                    raise ValueError(
                        f"{name_ranks(default_store(), dead)} of this host ended: read what ended it. If nothing did, "
                        f"let every rank {self._purpose()}"
                    )
                if waited > 2 * _LOOK_AFTER and self.store.add(self._key("told"), 1) == 1:  # only one rank tells
                    log.warning("waits: %s yet. Every rank must make this call", self._late())
            if waited > limit:
                raise ValueError(f"{self._missing()} within {limit:g} s: read what ended it, or check its network")
            time.sleep(min(2e-4 + 2e-5 * self.size + waited / 8, 1.0))
        return self.store.get(key)

    def _dead(self, group: dist.ProcessGroup) -> list[int]:
        late = [rank for rank in near_ranks(self.rank, self.size) if self.store.add(f"at/{rank}", 0) < self.number]
        processes = processes_of(default_store(), [dist.get_global_rank(group, rank) for rank in late])
        return [rank for rank, found in processes.items() if any(map(has_ended, found))]

    def _purpose(self) -> str:
        return f"reach the check of the {self.what}" if self.what else "reach the call in which the others wait"

    def _late(self) -> str:
        late = [rank for rank in range(self.size) if self.store.add(f"at/{rank}", 0) < self.number]
        if not late:
            return "all ranks came, but rank 0 did not answer"
        named = [dist.get_global_rank(self.group, rank) if self.group else rank for rank in late]
        ranks = name_ranks(default_store() if self.group else None, named)
        return f"{ranks} of {self.size} did not {self._purpose()}"

    def _missing(self) -> str:
        if self.store.add(self._key("looks"), 1) == 1:  # only one rank looks for the late ranks
            self.store.set(self._key("missing"), self._late())
        self.store.wait([self._key("missing")], timedelta(seconds=10 + self.size / 500))
        return printable(self.store.get(self._key("missing")).decode(errors="replace"))


def _begin(group: dist.ProcessGroup, what: str = "", line: str = "") -> Agreement:
    name = f"mpcore/agree/{group.group_name}.{dist.get_global_rank(group, 0)}{line}"  # disjoint groups may share a name
    return Agreement(dist.PrefixStore(name, default_store()), group.rank(), group.size(), what, group, name)


def name_ranks(store: dist.Store | None, ranks: Sequence[int]) -> str:
    """Return the ranks as text, such as `rank 3 (host b)`.

    The hosts are those that the ranks wrote at the rendezvous. This process's own host is left out.
    """
    hosts = {host for rank in ranks[:8] for host in _written(store, f"mpcore/host/{rank}")}
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    hosts -= {socket.gethostname()}
    on = f" (host {', '.join(sorted(hosts))})" if hosts else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{on}"


def _written(store: dist.Store | None, key: str) -> set[str]:
    """Return what was written under a key at the rendezvous, before torch added its own prefix to the store."""
    found = set()
    while store is not None:
        found |= {printable(store.get(key).decode(errors="replace"))} if store.check([key]) else set()
        store = store.underlying_store if isinstance(store, dist.PrefixStore) else None
    return found


def near_ranks(rank: int, size: int) -> range:
    """Return the ranks that may be on the host of a rank."""
    return range(max(rank - _NEAR, 0), min(rank + _NEAR + 1, size))


def processes_of(store: dist.Store, ranks: Sequence[int]) -> dict[int, set[str]]:
    """Return what each rank's process wrote at the rendezvous, for `has_ended`."""
    return {rank: _written(store, f"mpcore/process/{rank}") for rank in ranks}


def this_process() -> str:
    """Return the host, the process namespace, the number and the start time of this process."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_start(os.getpid())}"
    except OSError:  # no Linux
        return ""


def has_ended(process: str) -> bool:
    """Return whether a process that wrote `this_process` ran on this host, and has ended."""
    mine, fields = this_process().split(), process.split()
    if len(fields) != 4 or fields[:2] != mine[:2] or not fields[2].isdigit():
        return False
    try:
        return _start(int(fields[2])) != fields[3]
    except OSError:
        return True


def _start(process: int) -> str:
    state, *others = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return "" if state == "Z" else others[18]


def _first_difference(values: list[dict[str, str]]) -> tuple[int, str]:
    first, *others = values
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    differing = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
    differing = ["call"] if "call" in differing else differing
    return rank, "; ".join(f"{key}: {first.get(key)} and {other.get(key)}" for key in differing)


def _alone(group: dist.ProcessGroup) -> bool:
    return group.size() == 1 or not has_peers()


def _try(work: Callable[..., R], *given: Any) -> tuple[Exception | None, R]:
    try:
        return None, work(*given)
    except Exception as error:  # catch every error: the other ranks wait for the answer
        return error, None  # type: ignore[return-value]


def _say(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
