"""End all ranks together when one rank fails, with an exit status that says why."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from mpcore._torch.distributed import clone_store
from mpcore.mesh.agreement import has_ended, name_ranks, near_ranks, processes_of
from mpcore.mesh.axis import Mesh
from mpcore.mesh.failure import tell_launcher
from mpcore.mesh.guard import host_named
from mpcore.mesh.log import Logger, get_logger
from mpcore.mesh.secret import printable, seal, unseal
from mpcore.tools.fault_tolerance.trace import Log, circle, explain, give_no_answer, last_call, read_log

log: Logger = get_logger("mpcore.tools.fault_tolerance")
EXIT_PEER = 70  # EX_SOFTWARE, the same as for a hang: another rank failed, not this one
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped and saved because of a signal; start again to resume
_PEER = re.compile(
    r"by peer|Connection refused|Connection was likely closed|Broken pipe|[Tt]imed out|NCCL|gloo/|[Ss]ocket|"
    r"Transport retry"
)
_CAUSE = "mpcore/cause"
_EARLY = "without an error: let all ranks take the same number of steps"


class leave_together:  # noqa: N801  (a context manager, named as a function)
    """End every rank within seconds when one rank fails, and print which rank failed first and why.

    What each rank does:

    - The rank that fails prints its traceback, or one line that names the file with the traceback. If several ranks of
      a host fail with the same message, one of them prints it.
    - A rank whose collective breaks because another rank failed prints the collective that it called last, if
      `record` recorded it, and one line that names the first failed rank. Ranks that call different collectives break
      so: a rank that gloo aborts prints its own stack.
    - If ranks wait in different collectives over gloo, all ranks end within seconds and print both calls, each with its
      shape, module and line. NCCL needs a `Watchdog`.
    - A rank that calls `sys.exit(0)` inside the block counts as failed. Any other exit status is kept.
    - A background thread polls the run's store twice per `grace`. It ends a rank whose main thread is blocked, for
      example while it waits for its GPU, and names a rank of the same host whose process has ended. It also answers
      when another rank asks which ranks are alive, so that a live rank that waits for a dead rank is not blamed.
    - Rank 0, which may host the store, leaves last. It waits at most five times `grace` for the other ranks at the end
      of the block, and once `grace` after a failure.

    Args:
        mesh: this rank's mesh. In a world of one rank, exceptions pass unchanged.
        grace: seconds in which a failed rank can write why it failed. The other ranks leave within twice this time.
        folder: the folder for the tracebacks, `rank0.txt` and so on. None: tracebacks go to standard error.

    Attributes:
        run: set it to the `Run`, so that a rank that ends its loop too early is named with its step.

    Example::

        with leave_together(mesh):
            train(mesh)
    """

    def __init__(self, mesh: Mesh, grace: float = 2.0, folder: Path | str | None = None) -> None:
        self.mesh = mesh
        self.rank: int = mesh.job.rank
        self.size: int = mesh.job.size
        self.grace = grace
        self.folder: Path | None = None if folder is None else Path(folder)
        self.store: Any = None
        self.block: int = 1
        self.cause: str = ""
        self.is_host_done: bool = False
        self.host_early: str = ""
        self.run: Any = None
        self.watched: int = threading.get_ident()
        self.log: Log = Log(self.rank, {})
        self.over: threading.Event = threading.Event()
        self.thread: threading.Thread = threading.Thread(target=self._watch, name="mpcore-leave", daemon=True)
        if self.size > 1:
            with host_named():
                self.store = clone_store()  # a connection of its own: the main thread may block its connection
                self.block: int = self.store.add(f"mpcore/blocks/{self.rank}", 1)  # this process may have several

    def __enter__(self) -> leave_together:
        if self.size > 1:
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or self.store is None:
            self.over.set()
            if self.thread.is_alive():  # a thread inside the store at interpreter exit would abort the process
                self.thread.join(self.grace)
            if self.store is not None:
                self._part(5 * self.grace)
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after the first failure a supervisor ends the other ranks
        if not isinstance(error, KeyboardInterrupt) and _PEER.search(_torch_text(error)):
            at = store_address(self.store)
            line = (
                f"stopped, because the store of the run{at} gives no answer: its host is down, or the link to it is cut"
            )
            alarm = end_after(6 * self.grace, line, EXIT_PEER)
            try:
                cause = self.cause or self._ask()
            except (RuntimeError, OSError):
                cause = f"rank 0, or the host that keeps the store of the run{at}, is gone"
                if self.is_host_done:
                    cause = self.host_early
            alarm.cancel()
            self.over.set()
            if called := last_call(self.mesh):
                log.error("its last collective was %s", called)
            log.error("stopped, because %s", cause)
            self._part(self.grace)
            sys.exit(EXIT_PEER)
        self.over.set()
        status, cause = self._own(error)
        try:
            self._write("left")
            if self.store.add("mpcore/left", 1) == 1:
                self.store.set(_CAUSE, seal(_CAUSE, f"rank {self.rank} {cause}".encode()))
        except (RuntimeError, OSError):
            pass
        self._part(self.grace)
        sys.exit(status)

    def _part(self, seconds: float) -> None:
        """Tell rank 0 that this rank needs the store no more. On rank 0, wait until no rank needs it."""
        with suppress(RuntimeError, OSError):  # rank 0 has waited long enough
            if self.run is not None:
                self.store.set(f"mpcore/step/{self.block}/{self.rank}", str(self.run.step))
            if not self.cause:
                self._sign_off(self.rank)
            until = time.monotonic() + seconds
            while self.rank == 0 and self.store.add(f"mpcore/ended/{self.block}", 0) < self.size:
                if time.monotonic() > until:
                    return
                time.sleep(0.02)

    def _early(self, ranks: Sequence[int]) -> str:
        """Return that these ranks ended before this one, and after which steps if the ranks' runs are known."""
        text = f"{name_ranks(self.store, ranks)} ended before rank {self.rank}"
        key = f"mpcore/step/{self.block}/{ranks[0]}"
        if self.run is not None and self.store.check([key]):
            step = printable(self.store.get(key).decode(errors="replace"))
            mine = self.run.step + 1
            text += f": rank {ranks[0]} ended its loop after step {step}, rank {self.rank} is in step {mine}"
        return f"{text}, {_EARLY}"

    def _sign_off(self, rank: int) -> None:
        key, once = f"mpcore/ended/{self.block}/{rank}", secrets.token_hex(8).encode()
        if self.store.compare_set(key, "", seal(key, once).decode()).endswith(once):
            self.store.add(f"mpcore/ended/{self.block}", 1)

    def _write(self, word: str) -> None:
        key = f"mpcore/{word}/{self.rank}"
        self.store.set(key, seal(key, b""))

    def _wrote(self, rank: int, *words: str) -> bool:
        """Return whether a rank wrote one of the words. What a stranger wrote in its place does not count."""
        for key in (f"mpcore/{word}/{rank}" for word in words):
            with suppress(ValueError):
                if self.store.check([key]) and unseal(key, self.store.get(key)) is not None:
                    return True
        return False

    def _watch(self) -> None:
        polls, at = 0, (0, 0)  # how often the watched thread was found at one place, and where
        try:
            processes = processes_of(self.store, near_ranks(self.rank, self.size))
            while not self.store.check([_CAUSE]):
                gone = [rank for rank, found in processes.items() if any(map(has_ended, found))]
                if dead := [rank for rank in gone if not self._wrote(rank, "left", f"ended/{self.block}")]:
                    self._tell_dead(dead)
                    continue
                if self.store.check(["mpcore/asked"]):
                    self._write("alive")
                if self._wrote(0, f"ended/{self.block}"):
                    self.host_early = self._early([0])
                    self.is_host_done = True
                frame = sys._current_frames().get(self.watched)
                polls, at = (polls + 1 if at == (now := (id(frame), frame.f_lasti if frame else 0)) else 0), now
                if polls > 2 and (found := self._disagreement(polls == 3)):
                    self.store.set(_CAUSE, seal(_CAUSE, found.encode()))
                    continue
                if self.over.wait(self.grace / 2):
                    return
            self.cause = cause = _read_cause(self.store)
            self._sign_off(self.rank)
        except (RuntimeError, OSError):  # the rank that hosts the store may have finished
            return
        if not self.over.wait(2 * self.grace):
            log.error("stopped, because %s", cause)
            os._exit(EXIT_PEER)

    def _disagreement(self, begins: bool) -> str:
        """Return which collective this rank and the first of a group entered differently, if both stand still."""
        key = f"mpcore/stands/{self.block}/"
        if begins:
            log = read_log(self.mesh, getattr(self.run, "model", None), self.watched)
            self.log = replace(log, calls=[call for call in log.calls if call.group in log.groups][-64:])
        if begins or not self.store.check([f"{key}{self.rank}"]):
            self.store.set(f"{key}{self.rank}", seal(f"{key}{self.rank}", self.log.to_json().encode()))
        for at in {f"{key}{ranks[0]}" for _, ranks in self.log.groups.values()} if self.log.waiting else ():
            if self.store.check([at]):  # explain finds nothing between this rank's log and itself
                try:
                    log = Log.from_json(unseal(at, self.store.get(at)).decode())
                except ValueError:  # a stranger wrote it: its rank writes its own again
                    self.store.delete_key(at)
                    continue
                if (found := explain([log, self.log], 0)).startswith("the ranks disagree"):
                    return found
                if found := circle(log, self.log, self.store) or circle(self.log, log, self.store):
                    return found
        return ""

    def _own(self, error: BaseException) -> tuple[int, str]:
        """Print what failed on this rank; return the exit status and a one-line description."""
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT, "was interrupted"
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                tell_launcher(error.code)
                if self._is_first_to_say(error.code.removeprefix(f"rank {self.rank}: ")):
                    log.error("%s", error.code.removeprefix(f"rank {self.rank}: "))
                return 1, f"left: {error.code}"
            if error.code:
                return int(error.code), f"left with exit status {error.code}"
            log.error("left before the end, which is a failure")
            return 1, "left before the end, with exit status 0"
        cause, text = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"rank{self.rank}.txt"
                write_new(path, text)
                text = f"{cause} (details: {path})"
        tell_launcher(f"rank {self.rank} failed: {cause}")
        if self._is_first_to_say(cause):
            log.error("failed on %s: %s", socket.gethostname(), text.rstrip())
        return 1, f"failed first: {cause}"

    def _is_first_to_say(self, text: str) -> bool:
        try:
            return self.store.add(f"mpcore/said/{socket.gethostname()}/{text}", 1) == 1
        except (RuntimeError, OSError):
            return True

    def _ask(self) -> str:
        """Find the rank that failed first: it wrote its cause to the store, or it gives no answer."""
        self._write("left")
        found = self._wait(self.grace)
        if found is None and self.store.add("mpcore/asked", 1) == 1:  # only one rank looks for the failed one
            time.sleep(self.grace)  # each rank's thread polls twice in this time
            silent = [rank for rank in range(self.size) if not self._wrote(rank, "left", "alive")]
            found = "the network between the ranks failed: all of them are there"
            ended = [rank for rank in silent if self._wrote(rank, f"ended/{self.block}")]
            if ended:
                found = self._early(ended)
            elif silent:
                return self._tell_dead(silent)
            self.store.set(_CAUSE, seal(_CAUSE, found.encode()))
        return found or self._wait(2 * self.grace) or "a rank is gone"

    def _tell_dead(self, ranks: Sequence[int]) -> str:
        found = f"{give_no_answer(ranks, self.store)}: killed, or cut off{_cut_files()}"
        for rank in ranks:
            self._sign_off(rank)
        self.store.set(_CAUSE, seal(_CAUSE, found.encode()))
        return found

    def _wait(self, seconds: float) -> str | None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.store.check([_CAUSE]):
                return _read_cause(self.store)
            time.sleep(0.02)
        return None


def _cut_files() -> str:
    """Return text that names the files that are shorter now than when this process mapped them.

    A read behind the end of such a file ends a process by SIGBUS. Another rank that read there may have died of it.
    """
    found = {}
    with suppress(OSError):  # no Linux
        for line in Path("/proc/self/maps").read_text().splitlines():
            pages, mode, offset, _, _, *path = line.split(maxsplit=5)
            if path and mode.startswith("r") and os.path.isfile(path[0]):  # no hole in a library, and no device
                first, last = (int(page, 16) for page in pages.split("-"))
                if (size := os.path.getsize(path[0])) <= int(offset, 16) + last - first - mmap.PAGESIZE:
                    found[path[0]] = size
    return "".join(f". {path} has {size} bytes now, fewer than were mapped" for path, size in found.items())


def _read_cause(store: dist.Store) -> str:
    try:
        return printable(unseal(_CAUSE, store.get(_CAUSE)).decode(errors="replace"))
    except ValueError as error:
        return str(error)


def leave(status: str | int | None) -> NoReturn:
    """Exit without shutting the Python interpreter down, after its threads that are no daemons have ended.

    A thread of gloo may still hold tensors, which a shutdown would free, or wait for a rank that is gone.

    Args:
        status: the exit status, or the code of a `SystemExit`: a text is printed, and the status is then 1.
    """
    for thread in threading.enumerate():  # such as a save in the background
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def write_new(path: Path, text: str) -> None:
    """Write a file in place of the one that is there, through no link."""
    path.unlink(missing_ok=True)
    with open(path, "x") as file:
        file.write(text)


def store_address(store: dist.Store) -> str:
    """Return ` at host:port` of a store, or an empty string if the store has no address."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""


def end_after(seconds: float, line: str, status: int) -> threading.Timer:
    """Return a started timer that logs a line and ends the process. Cancel it if all went well.

    The timer works even if the other threads wait in C code for a host that is gone.
    """

    def end() -> None:
        log.error("%s", line)
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def _torch_text(error: BaseException | None) -> str:
    """Return what RuntimeErrors say, as torch raises: an OSError is of a file or server of this rank alone."""
    parts = []
    while error is not None:
        parts += [str(error)] if isinstance(error, RuntimeError) else []
        error = error.__cause__
    return "\n".join(parts)
