"""Run a function as every rank of a mesh, in one process."""

from __future__ import annotations

import inspect
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import Any, TextIO, cast

from torch import Tensor, nn

from mpcore._torch.distributed import forget_meshes, loaded_caches
from mpcore.mesh.axis import Mesh
from mpcore.mesh.build import build_mesh
from mpcore.mesh.layout import mesh_shape
from mpcore.tools._torch.simulated import SimulatedGroup, SimulatedStore, become_rank, rank_threads, simulated_rank
from mpcore.tools.fault_tolerance.trace import Call, Log, call_site, explain, form_of, stands_in
from mpcore.tools.simulation.turns import RankError, StoppedError, Turns, process_state, restore

_HERE = os.path.dirname(__file__) + os.sep
_KEPT = 512  # collectives kept per rank, to explain a deadlock
_alone = threading.Lock()  # one simulation at a time: a process has one torch.distributed world


class DeadlockError(RuntimeError):
    """No simulated rank can continue. The message says which ranks wait, in which call and at which line."""


def simulate(
    function: Callable[..., Any],
    *args: Any,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int | None = None,
    ranks: int | None = None,
    mesh: dict[str, Any] | None = None,
) -> list[Any]:
    """Run a function as every rank of a mesh, in this process and on one device.

    Each rank is a thread. One thread runs at a time, until it waits for another rank. So a run is deterministic, a
    breakpoint stops one rank, and every printed line begins with its rank.

    Args:
        function: called as `function(mesh, *args)` on each rank, or as `function(*args)` if `ranks` is given.
        args: the arguments; every rank gets the same objects. `functools.partial` gives it keyword arguments. Build
            models inside the function, so that each rank has its own.
        tp, cp, pp, ep: the sizes of the mesh's axes. The mesh is on the CPU.
        dp: the size of the data-parallel axis. None: 1, or the smallest size that ep needs.
        ranks: the number of ranks, for a function that calls `build_mesh` itself.
        mesh: further arguments of `build_mesh`, such as `{"etp": 1, "device_type": "cuda"}`.

    Returns:
        What the function returned on each rank, in rank order.

    Raises:
        ValueError: if the sizes don't fit each other.
        RankError: if a rank raised an exception, which is the `__cause__`. The other ranks are stopped.
        DeadlockError: if no rank can continue, because a rank returned early or the ranks are in different collectives.

    Note:
        - All ranks share the process: modules, their global variables, environment variables, files.
        - A rank may call `simulate`. Its other ranks wait meanwhile.
        - Each rank has its own process groups, random states of torch, NumPy and Python, and default dtype.
        - `run.save(background=True)` writes at once.

    Example:
        >>> def total(mesh):
        ...     return mpcore.collectives.all_reduce(torch.tensor(mesh.tp.rank), mesh.tp).item()
        >>> mpcore.simulate(total, tp=3)
        [3, 3, 3]
    """
    sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
    if ranks is not None:
        if max(sizes.values()) > 1 or dp is not None or mesh is not None:
            raise ValueError(f"ranks={ranks} and sizes of a mesh: give one of them; with ranks, build_mesh takes sizes")
        if ranks < 1:
            raise ValueError(f"ranks {ranks} is smaller than 1")
        return _Job(ranks).run(lambda _: function(*args))
    more = {"device_type": "cpu", **(mesh or {})}
    if dp is None:
        inside, experts = tp * cp, ep * (more.get("etp") or tp)
        dp = experts // math.gcd(inside, experts) if min(inside, experts) > 0 else 1
    size = max(tp * cp * pp * dp, 1)
    mesh_shape(size, **sizes, dp=dp, etp=more.get("etp"))  # raises if the sizes don't fit
    job = _Job(size * more.get("worlds", 1))

    def work(rank: int) -> Any:
        job.meshes[rank] = build_mesh(**sizes, dp=dp, **more)
        return function(job.meshes[rank], *args)

    return job.run(work)


class _Job:
    """The ranks of one simulation: the functions that their groups and store call, and their logs."""

    def __init__(self, size: int) -> None:
        self.size, self.turns = size, Turns(size, self._stuck)
        self.table: dict[tuple[Any, ...], Any] = {}
        self.boxes: dict[tuple[Any, ...], Any] = {}
        self.meshes: list[Mesh | None] = [None] * size
        self.threads: list[threading.Thread] = []
        self.groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in range(size)]
        self.calls: list[deque[list[Any]]] = [deque(maxlen=_KEPT) for _ in range(size)]  # [Call, came back, modules]
        self.waits_in: list[object] = [None] * size  # the entry of `calls`, or the text, that a rank waits in
        self.results: list[Any] = [None] * size

    # --- called by the groups and the store ------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], polls: bool = False, inside: object = None) -> None:
        rank = simulated_rank()
        if rank is None:  # a thread started by a rank
            while not ready() and not polls and self.turns.failure is None:
                time.sleep(1e-3)
            return
        self.waits_in[rank] = inside
        self.turns.wait(rank, ready, polls)
        self.waits_in[rank] = None

    def changed(self) -> None:
        self.turns.changed()

    def enters(self, group: SimulatedGroup, number: int, kind: str, x: Tensor | None, first: Any) -> list[Any]:
        rank = group.ranks[group.place]
        role = "world" if group.group_desc in ("default_pg", "undefined") else group.group_desc.removeprefix("mpcore ")
        self.groups[rank].setdefault(group.group_name, (role, group.ranks))
        shape, dtype = (tuple(x.shape), str(x.dtype).removeprefix("torch.")) if x is not None else ((), "")
        frame = _outside(inspect.currentframe())
        site = call_site(frame)
        call = Call(group.group_name, number, kind, shape, dtype, site, False, time.time_ns(), "simulated")
        entry = [call, False, _running_modules(frame)]
        self.calls[rank].append(entry)
        if first is not None and form_of(first[0]) != form_of(call):
            self.waits_in[rank] = entry
            self.turns.fail(rank, self._stuck())
            raise StoppedError
        return entry

    # --- the threads -----------------------------------------------------------------------------------------------

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        store = SimulatedStore(self)
        inside = simulated_rank() is not None  # a rank of another simulation, whose other ranks wait meanwhile
        with _kept_state(), nullcontext() if inside else _one_world():
            trace = sys.gettrace()
            for rank in range(self.size):
                name = f"rank {rank} of {self.size}"
                thread = threading.Thread(target=self._rank, args=(rank, work, store, trace), name=name, daemon=True)
                self.threads.append(thread)
                thread.start()
            self.turns.begin()
            try:
                self.turns.over.wait()
            except BaseException as error:  # such as KeyboardInterrupt
                self.turns.fail(-1, error)
                self.turns.over.wait(1.0)
                raise
            for thread in self.threads:
                thread.join()
            if not inside:
                forget_meshes(loaded_caches())
        if self.turns.failure is None:
            return self.results
        rank, error = self.turns.failure
        if isinstance(error, DeadlockError):
            raise error
        line = "".join(traceback.format_exception_only(type(error), error)).strip()
        raise RankError(f"{self._name(rank)}: {line}") from error

    def _rank(self, rank: int, work: Callable[[int], Any], store: SimulatedStore, trace: Any) -> None:
        self.turns.take(rank)
        try:
            if self.turns.failure is None:
                become_rank(self, rank, self.size, store)
                if trace is not None and sys.gettrace() is None:  # a debugger's trace function, for its breakpoints
                    sys.settrace(trace)
                self.results[rank] = work(rank)
        except StoppedError:
            pass
        except BaseException as error:
            self.turns.fail(rank, error)
        finally:
            sys.settrace(None)
            self.turns.finish(rank)

    def _name(self, rank: int) -> str:
        mesh = self.meshes[rank]
        places = {} if mesh is None else {n: a for n, a in mesh.axes.items() if n in ("pp", "dp", "cp", "tp")}
        where = ", ".join(f"{name} {axis.rank}" for name, axis in places.items() if axis.size > 1)
        return f"rank {rank} of {self.size}{where and f' ({where})'}"

    # --- why no rank can continue ----------------------------------------------------------------------------------

    def _stuck(self) -> DeadlockError:
        logs = [self._log(rank) for rank in range(self.size)]
        return DeadlockError(f"no rank can go on: {explain(logs, self.size)}")

    def _log(self, rank: int) -> Log:
        waited = self.waits_in[rank]
        calls = [
            replace(call, done=entry is not waited, site=f"{call.site}{_name_of(modules)}")
            for entry in self.calls[rank]
            for call, _, modules in [entry]
        ]
        groups, mesh = dict(self.groups[rank]), self.meshes[rank]
        for name, axis in () if mesh is None else reversed(mesh.axes.items()):
            if axis.group_name in groups:
                groups[axis.group_name] = name, groups[axis.group_name][1]
        if rank not in self.turns.alive:
            return Log(rank, groups, calls, "the end of its function")
        frame = _outside(sys._current_frames().get(self.threads[rank].ident or 0))
        site, doing, _ = stands_in(frame, _module_names(_running_modules(frame)))
        doing = f"{waited}{doing and f', in {doing}'}" if isinstance(waited, str) else doing
        return Log(rank, groups, calls, site, doing, waiting=True)


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and (
        frame.f_code.co_filename.startswith(_HERE) or frame.f_code.co_filename == threading.__file__
    ):
        frame = frame.f_back
    return frame


def _running_modules(frame: FrameType | None) -> list[nn.Module]:
    """Return the modules whose methods are running, the innermost first."""
    found = []
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, nn.Module):
            found.append(owner)
        frame = frame.f_back
    return found


def _module_names(modules: Sequence[nn.Module]) -> dict[int, str]:
    """Return the names of all modules inside the outermost running module, by id."""
    return {id(m): name for name, m in modules[-1].named_modules()} if modules else {}


def _name_of(modules: Sequence[nn.Module]) -> str:
    """Return text that names the innermost running module that has a name in the outermost one."""
    names = _module_names(modules)
    return next((f", in {names[id(m)]}" for m in modules if names.get(id(m))), "")


@contextmanager
def _kept_state() -> Iterator[None]:
    state = process_state()
    try:
        yield
    finally:
        restore(state)


@contextmanager
def _one_world() -> Iterator[None]:
    with _alone, rank_threads(), _marked_output():
        yield


@contextmanager
def _marked_output() -> Iterator[None]:
    out, errors = (cast(TextIO, _Marked(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(errors):
        yield


class _Marked:
    """A stream that begins each line of a rank with the rank's number."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._open = stream, None  # the rank that wrote the current, unfinished line
        self._at_start = True

    def write(self, text: str) -> int:
        rank = simulated_rank()
        if rank is None or not text:
            return self._stream.write(text)
        mark = f"rank {rank}: "
        if not self._at_start and self._open != rank:
            self._stream.write("\n")
            self._at_start = True
        marked = "".join(
            mark + line if before.endswith("\n") else line
            for before, line in pairwise(["\n" if self._at_start else "", *text.splitlines(keepends=True)])
        )
        self._at_start, self._open = text.endswith("\n"), rank
        self._stream.write(marked)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
