"""Floor 4: what a long run needs to stand faults, or to stop in time and say why.

    with leave_together(mesh), StopSignals() as signals:
        for step in range(steps):
            with stragglers.timed("data"):
                batch = load(step)
            loss = train(batch)
            if spikes.score(loss) is not None: ...
            if step % 100 == 0:
                compare_replicas(model, mesh)
                late = stragglers.check()
            if signals.asked: ...

`mpcore.trace.Watchdog` explains hangs, `mpcore.mesh.check_same` refuses ranks that differ from the start, and
`mpcore.checkpoint` survives what stops a save.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import re
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore.collectives import all_reduce
from mpcore.kernels.cross_replica_hash import cross_replica_hash
from mpcore.mesh import Axis, Mesh
from mpcore.sharding import Shard, declarations, is_dtensor, local_tensor

EXIT_PEER = 70  # EX_SOFTWARE, as of a hang: this rank was well, another one failed
EXIT_STOPPED = 75  # EX_TEMPFAIL: saved because a signal asked; start again to go on
_PEER = re.compile(r"by peer|Connection refused|Broken pipe|[Tt]imed out|NCCL|gloo/|[Ss]ocket|Transport retry")


# --- the ranks leave together -------------------------------------------------------------------------------------


class leave_together:  # noqa: N801  (a context manager, named as what it does)
    """Every rank ends in failure within seconds when one fails, and says which rank was first and why.

    The rank that fails prints its own traceback first. The others, whose next collective breaks, print one line that
    names it. A rank that leaves with status 0 before the end of the block has failed too; another status is kept.
    A thread asks the run's store twice each grace, and ends a rank whose main thread stands where nothing breaks, such
    as in a wait for its GPU, where no signal is heard either.

    Args:
        mesh: of this rank. Alone in its world, errors pass as they are.
        grace: seconds in which a rank that failed can say why; after that it is called silent. Another rank has twice
            as many to leave.
    """

    def __init__(self, mesh: Mesh, grace: float = 2.0) -> None:
        self.rank, self.size, self.grace = mesh.job.rank, mesh.job.size, grace
        self.store: Any = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="mpcore-leave", daemon=True)
        if self.size > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self.store = store.clone()  # the main thread's own connection may be waiting

    def __enter__(self) -> leave_together:
        if self.size > 1:
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.over.set()
        if error is None or self.store is None:
            if self.thread.is_alive():  # inside the store while Python is torn down, it would abort the process
                self.thread.join(self.grace)
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a supervisor ends the survivors of the first that fails
        if not isinstance(error, KeyboardInterrupt) and _PEER.search(_whole_text(error)):
            try:
                cause = self._ask()
            except (RuntimeError, OSError):
                cause = "rank 0, or what keeps the store of the run, is gone"
            print(f"rank {self.rank}: stopped, because {cause}", file=sys.stderr, flush=True)
            _leave(EXIT_PEER)
        status, cause = self._own(error)
        try:
            self.store.set(f"mpcore/left/{self.rank}", "")
            if self.store.add("mpcore/left", 1) == 1:
                self.store.set("mpcore/cause", f"rank {self.rank} {cause}")
        except (RuntimeError, OSError):
            pass
        _leave(status)

    def _watch(self) -> None:
        try:
            while not self.store.check(["mpcore/cause"]):
                if self.over.wait(self.grace / 2):
                    return
            cause = self.store.get("mpcore/cause").decode()
        except (RuntimeError, OSError):  # who keeps the store may be done, and gone
            return
        if not self.over.wait(2 * self.grace):
            print(f"rank {self.rank}: stopped, because {cause}", file=sys.stderr, flush=True)
            os._exit(EXIT_PEER)

    def _own(self, error: BaseException) -> tuple[int, str]:
        """Print what went wrong here; return the exit status, and it in a line."""
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT, "was interrupted"
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr, flush=True)
                return 1, f"left: {error.code}"
            if error.code:
                return int(error.code), f"left with exit status {error.code}"
            print(f"rank {self.rank}: left before the end, which is a failure", file=sys.stderr, flush=True)
            return 1, "left before the end, with exit status 0"
        traceback.print_exception(error)
        sys.stderr.flush()
        return 1, f"failed first: {type(error).__name__}: {error}"

    def _ask(self) -> str:
        """Who failed first: it says so itself, or is the one that says nothing."""
        self.store.set(f"mpcore/left/{self.rank}", "")
        found = self._wait(self.grace)
        if found is None and self.store.add("mpcore/asked", 1) == 1:  # one rank looks, not all at all
            silent = [rank for rank in range(self.size) if not self.store.check([f"mpcore/left/{rank}"])]
            one = len(silent) == 1
            names = f"rank{'' if one else 's'} {', '.join(map(str, silent))}"
            found = f"{names} {'gives' if one else 'give'} no answer: killed, or cut off"
            found = found if silent else "the network between the ranks failed: all of them are there"
            self.store.set("mpcore/cause", found)
        return found or self._wait(self.grace) or "a rank is gone"

    def _wait(self, seconds: float) -> str | None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.store.check(["mpcore/cause"]):
                return self.store.get("mpcore/cause").decode()
            time.sleep(0.02)
        return None


def _leave(status: int) -> NoReturn:
    """Exit, once gloo's threads have let go of the last collective: one that needs Python's lock while Python is torn
    down aborts the process, and its status would be that of a signal."""
    time.sleep(0.2)
    sys.exit(status)


def leave(status: int) -> NoReturn:
    """Exit after a run that went well, without tearing Python down: gloo's threads may still hold tensors, and one that
    lets go of them then waits for Python's lock, which is gone, and aborts the process.

    Args:
        status: the exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _whole_text(error: BaseException | None) -> str:
    parts = []
    while error is not None:
        parts.append(str(error))
        error = error.__cause__
    return "\n".join(parts)


class StopSignals:
    """Within the block, SIGTERM, SIGUSR1 and ctrl-C ask for an orderly stop. A second ctrl-C leaves at once.

    A supervisor passes on the ctrl-C that the terminal has sent already, so a second one counts after `apart` seconds.

    Attributes:
        asked: whether any has come. The ranks may learn of it a step apart: agree before acting on it.
    """

    def __init__(self, apart: float = 1.0) -> None:
        self.asked, self.apart = False, apart
        self._first: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        # Python's handlers wait while the main thread is inside a collective; this thread hears of signals even then.
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="mpcore-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._write.close()

    def _ask(self, *_: object) -> None:
        self.asked = True

    def _listen(self) -> None:
        while data := self._read.recv(16):
            for number in data:
                if number != signal.SIGINT:
                    continue
                now = time.monotonic()
                if self._first is None:
                    self._first = now
                    print("stopping after this step; ctrl-C again leaves at once", file=sys.stderr, flush=True)
                elif now - self._first > self.apart:
                    os._exit(128 + signal.SIGINT)


# --- what ranks must have in common -------------------------------------------------------------------------------


def code_versions(*folders: str | os.PathLike[str]) -> dict[str, str]:
    """What this rank runs: a hash of each source file of mpcore and of `folders`, and the versions below them.

    For `check_same("code", code_versions(...))`, which names the files that differ.

    Raises:
        ValueError: if folders of one name hold different files of one name.
    """
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for folder in map(Path, (Path(__file__).parent, *folders)):
        for parent, _, files in sorted(os.walk(folder, followlinks=True)):  # mpcore/kernels may be a link
            for path in (Path(parent, file) for file in sorted(files) if file.endswith(".py")):
                name = f"{folder.name}/{path.relative_to(folder)}"
                version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
                if found.setdefault(name, version) != version:
                    raise ValueError(
                        f"two of the folders are called {folder.name}, and each has a {path.relative_to(folder)} of "
                        f"its own: give the folder that holds both"
                    )
    return found


def file_versions(*paths: str | os.PathLike[str], ends: int = 2**16) -> dict[str, str]:
    """Size and hash of the first and last bytes of files, however large, for `check_same("data", ...)`.

    Args:
        paths: the files.
        ends: how many bytes at either end are hashed: a change between them that keeps the size is not seen.

    Returns:
        By path in the folder that all of them share: ranks may keep that folder at different places.
    """
    found, folder = {}, os.path.commonpath([Path(path).absolute().parent for path in paths]) if paths else ""
    for path in map(Path, paths):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(ends))
            file.seek(max(size - ends, 0))
            digest.update(file.read(ends))
        found[os.path.relpath(path, folder)] = f"{size} bytes, {digest.hexdigest()[:12]}"
    return found


# --- silent corruption --------------------------------------------------------------------------------------------


@torch.no_grad()
def compare_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Refuse to go on when ranks that hold replicas of a parameter hold different bits: a collective on all ranks.

    What is replicated follows from what layers declare: whole parameters over tp and data, replicated KV heads, tied
    embeddings, and what `fully_shard` replicates. A hash of each is compared, one all-reduce an axis; only where some
    differ is more sent.

    Args:
        model: the model, or this rank's stage of it, between two steps.
        mesh: the mesh it lies on.

    Raises:
        ValueError: on every rank, naming the tensors and the ranks; of three replicas or more, those that differ from
            most.
    """
    found: list[str] = []
    for axis, entries in _replicas(model, mesh):
        absent = torch.tensor(torch.iinfo(torch.int64).min, device=mesh.device)
        hashes = torch.stack([absent if x is None else cross_replica_hash(x).to(mesh.device) for _, x in entries])
        held = torch.tensor([x is not None for _, x in entries], device=mesh.device)
        both = torch.cat([hashes, torch.where(held, ~hashes, hashes)])
        most, least = all_reduce(both, axis, "max").chunk(2)  # ~ turns the order around: the least is ~most of ~
        differing = (most != ~least) & (most != absent)
        if bool(differing.any()):
            found += _name(axis, [name for name, _ in entries], differing.tolist(), hashes, held)
    count = torch.tensor(len(found), device=mesh.device)
    if int(all_reduce(count, mesh.world, "max")):
        everywhere: list = [found]
        if mesh.world.size > 1:
            everywhere = [None] * mesh.world.size
            dist.all_gather_object(everywhere, found, group=mesh.world.group)
        messages = list(dict.fromkeys(message for part in everywhere for message in part))
        more = f"; and {len(messages) - 8} more" if len(messages) > 8 else ""
        raise ValueError(f"replicas differ, so a rank's memory is corrupt: {'; '.join(messages[:8])}{more}")


def _replicas(model: nn.Module, mesh: Mesh) -> list[tuple[Axis, list[tuple[str, Tensor | None]]]]:
    """For each axis, in an order that all its ranks share: what is replicated over it, None where not on this rank."""
    by_axis: dict[object, tuple[Axis, list[tuple[str, Tensor | None]]]] = {}
    for name, parameter, sharding in declarations(model):
        local = local_tensor(parameter).detach()
        axes = {axis.group: axis for axis in sharding.replica_axes(mesh)}
        axes |= _data_replicas(parameter, sharding.data_axis(mesh))
        for group, axis in axes.items():
            if axis.size > 1:
                by_axis.setdefault(group, (axis, []))[1].append((name, local))
        for shard in sharding.shards:
            if shard.replicated and not is_dtensor(parameter):
                entries = by_axis.setdefault(shard.axis.group, (shard.axis, []))[1]
                entries += [(f"{name}{where}", x) for where, x in _shared_runs(shard, local)]
    return [(axis, entries) for axis, entries in sorted(by_axis.values(), key=lambda entry: entry[0].name)]


def _data_replicas(parameter: Tensor, data: Axis) -> dict[object, Axis]:
    if not is_dtensor(parameter):
        return {data.group: data}
    at, found = parameter.device_mesh.get_coordinate(), {}
    assert at is not None
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            group = parameter.device_mesh.get_group(dim)
            found[group] = Axis(group.size(), at[dim], group, "data")
    return found


def _shared_runs(shard: Shard, local: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """The runs of a dimension that several ranks hold: the same list on all ranks of the axis."""
    holders = [{i for start, end in runs for i in range(start, end)} for runs in shard.runs]
    place = {i: at for at, i in enumerate(i for start, end in shard.mine for i in range(start, end))}
    runs: list[list[int]] = []
    for i in shard.replicated:
        same = runs and i == runs[-1][-1] + 1 and all((i in held) == (i - 1 in held) for held in holders)
        runs[-1].append(i) if same else runs.append([i])
    for run in runs:
        part = None
        if run[0] in place:
            part = local.index_select(shard.dim, torch.tensor([place[i] for i in run], device=local.device))
        yield f"[{run[0]}:{run[-1] + 1}]", part


def _name(axis: Axis, names: Sequence[str], differing: Sequence[bool], hashes: Tensor, held: Tensor) -> list[str]:
    assert axis.group is not None
    mine = (hashes.tolist(), held.tolist())
    every: list = [None] * axis.size
    dist.all_gather_object(every, mine, group=axis.group)
    world = dist.get_process_group_ranks(axis.group)
    found = []
    for i, name in enumerate(names):
        if not differing[i]:
            continue
        by_hash: dict[int, list[int]] = {}
        for rank, (values, present) in zip(world, every, strict=True):
            if present[i]:
                by_hash.setdefault(values[i], []).append(rank)
        sets = sorted(by_hash.values(), key=len)
        if len(sets[-1]) == len(sets[-2]):
            found.append(f"{name} over {axis.name}, on ranks {' and '.join(_list(ranks) for ranks in sets)}")
        else:
            odd = sorted(rank for ranks in sets[:-1] for rank in ranks)
            found.append(f"{name} over {axis.name}, on rank {_list(odd)}, while ranks {_list(sets[-1])} agree")
    return found


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


# --- what looks wrong ---------------------------------------------------------------------------------------------


class Spikes:
    """Finds losses that lie far above those before them, by their z-score over a window.

    A spike enters the window only as far as the threshold, so that a second one is found too, while a new level is
    accepted in the end.

    Args:
        window: how many losses before are looked at.
        threshold: standard deviations above their mean that are a spike; one counts as 1 % of the mean at least.
        least: how many there must be before any is.
    """

    def __init__(self, window: int = 64, threshold: float = 6.0, least: int = 16) -> None:
        if not 2 <= least <= window:
            raise ValueError(f"least {least} is not from 2 to the window of {window}")
        self.threshold, self.least = threshold, least
        self.before: deque[float] = deque(maxlen=window)

    def score(self, loss: float) -> float | None:
        """Take the next loss; the standard deviations it lies above the window, if it is a spike.

        One that isn't finite is none, and is left out: such a step is skipped.
        """
        if not math.isfinite(loss):
            return None
        if len(self.before) < self.least:
            self.before.append(loss)
            return None
        mean = statistics.fmean(self.before)
        spread = max(statistics.pstdev(self.before, mean), 1e-2 * abs(mean), 1e-12)
        score = (loss - mean) / spread
        self.before.append(min(loss, mean + self.threshold * spread))
        return score if score > self.threshold else None


class Late(NamedTuple):
    """A rank that is slower than the others.

    Attributes:
        rank: of the job.
        phase: "compute" of the probe, or as it was timed.
        ratio: its time over the median of the others'.
    """

    rank: int
    phase: str
    ratio: float

    def __str__(self) -> str:
        return f"rank {self.rank} is slow: {self.phase} takes {self.ratio:.1f} times as long as on the others"


class Stragglers:
    """Names the rank that all others wait for, by what each does without them: its own loading, and a fixed probe.

    In a synchronous step every rank takes as long as the slowest, so their step times say nothing. A rank is late when
    it took more than `threshold` times the median of the other ranks in `patience` checks one after the other.

    Args:
        mesh: of this rank.
        threshold: ratio from which a rank is late.
        least: seconds a call that it must be slower besides, so that noise in short phases isn't one.
        patience: checks in a row.
        size: of the square matrices that the probe multiplies.
    """

    def __init__(
        self, mesh: Mesh, threshold: float = 1.5, least: float = 1e-3, patience: int = 2, size: int = 256
    ) -> None:
        if threshold <= 1:
            raise ValueError(f"threshold {threshold} is not more than 1")
        self.mesh, self.threshold, self.least, self.patience = mesh, threshold, least, patience
        self.times: dict[str, list[float]] = {}
        self.row: dict[tuple[int, str], int] = {}
        self.matrix = torch.ones(size, size, device=mesh.device)
        self._multiply()  # what the first call sets up isn't timed

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Time what this rank does without communication, on its GPU too, and nothing that was queued there before."""
        self._synchronize()
        began = time.perf_counter()
        yield
        self._synchronize()
        self.times.setdefault(phase, []).append(time.perf_counter() - began)

    def probe(self) -> None:
        """Time a fixed computation: once a step, some milliseconds on a CPU."""
        with self.timed("compute"):
            self._multiply()

    def _multiply(self) -> None:
        for _ in range(4):
            torch.mm(self.matrix, self.matrix)

    def _synchronize(self) -> None:
        if self.mesh.device_type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    def check(self) -> list[Late]:
        """Compare the ranks since the last check: a collective on all of them, with the same result on each."""
        every: list = [self.times]
        if self.mesh.world.size > 1:
            every = [None] * self.mesh.world.size
            dist.all_gather_object(every, {phase: statistics.fmean(t) for phase, t in self.times.items()},
                                   group=self.mesh.world.group)  # fmt: skip
        self.times = {}
        late = late_ranks(every, self.threshold, self.least) if len(every) > 1 else []
        if self.mesh.workers.size > 1:  # people know ranks by their number in the job
            late = [one._replace(rank=one.rank + self.mesh.job.rank - self.mesh.world.rank) for one in late]
        self.row = {(one.rank, one.phase): self.row.get((one.rank, one.phase), 0) + 1 for one in late}
        return [one for one in late if self.row[one.rank, one.phase] >= self.patience]


def late_ranks(times: Sequence[dict[str, float]], threshold: float, least: float) -> list[Late]:
    """The ranks whose seconds in a phase are more than `threshold` times the median of the other ranks'.

    Args:
        times: of each rank, by phase.
        threshold, least: as of `Stragglers`.
    """
    found = []
    for phase in sorted({phase for own in times for phase in own}):
        for rank, own in enumerate(times):
            others = [other[phase] for place, other in enumerate(times) if place != rank and phase in other]
            if phase not in own or not others:
                continue
            usual = statistics.median(others)
            if own[phase] > max(threshold * usual, usual + least):
                found.append(Late(rank, phase, own[phase] / max(usual, 1e-9)))
    return found


class Lines:
    """Appends lines of JSON to a file, whole ones alone; what can't be written waits for the next line."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, b""

    def add(self, entry: dict) -> None:
        """Write it, and what waits.

        Raises:
            OSError: where they can't be written; the file is as it was.
        """
        self.waiting += (json.dumps(entry) + "\n").encode()
        with open(self.path, "ab", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            try:
                if file.write(self.waiting) < len(self.waiting):  # a part fitted on the disk
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):  # a device keeps what it took
                    file.truncate(end)
                raise
        self.waiting = b""


class Skips:
    """Counts the steps in a row whose loss or gradient isn't finite, and writes down what they were fed.

    Args:
        limit: how many in a row are skipped; the next one stops the run.
        path: a file that gets a line of JSON for each; None: none. One rank writes.
    """

    def __init__(self, limit: int, path: Path | None) -> None:
        self.limit, self.row = limit, 0
        self.lines = None if path is None else Lines(path)

    def step(self, finite: bool, **about: Any) -> None:
        """Take note of a step. Ranks that hand in the same `finite` all decide alike.

        Args:
            finite: whether it was done.
            about: what is written down: the step, its samples, the loss.

        Raises:
            ValueError: if it is one too many.
        """
        self.row = 0 if finite else self.row + 1
        if finite:
            return
        if self.lines is not None:
            try:
                self.lines.add({**about, "in_a_row": self.row})
            except OSError as error:  # a full disk ends no run
                print(f"NOT WRITTEN: {self.lines.path}: {error}", file=sys.stderr, flush=True)
        if self.row > self.limit:
            said = ", ".join(f"{name} {value}" for name, value in about.items())
            raise ValueError(
                f"{self.row} steps in a row had a loss or gradient that isn't finite, {self.limit} are allowed ({said})"
            )
