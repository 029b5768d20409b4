"""Leave together: when one rank fails, all leave, with an exit status that says why."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from mpcore._torch.distributed import clone_store
from mpcore.mesh.agreement import name_ranks
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import get_logger

log = get_logger("mpcore.fault_tolerance")
EXIT_PEER = 70  # EX_SOFTWARE, as of a hang: this rank was well, another one failed
EXIT_STOPPED = 75  # EX_TEMPFAIL: saved because a signal asked; start again to go on
_PEER = re.compile(r"by peer|Connection refused|Broken pipe|[Tt]imed out|NCCL|gloo/|[Ss]ocket|Transport retry")


class leave_together:  # noqa: N801  (a context manager, named as what it does)
    """End every rank within seconds when one fails, and print which rank failed first and why.

    The rank that fails prints its own traceback, or a line with the file that holds it. If several ranks of a host fail
    with the same error, one of them prints it. The other ranks, whose next collective breaks, print one line that names
    the first failed rank. A rank that leaves with status 0 before the end of the block counts as failed; another status
    is kept. A thread asks the run's store twice in each grace period. It ends a rank whose main thread is blocked, as
    in a wait for its GPU. It also answers when a rank asks who is alive, so no live rank is named as failed.

    Args:
        mesh: of this rank. In a world of one rank errors pass as they are.
        grace: seconds in which a failed rank can report its error. Other ranks have twice as many seconds to leave.
        folder: where a rank that fails writes its traceback, as `rank0.txt` and on; None: to its standard error.
    """

    def __init__(self, mesh: Mesh, grace: float = 2.0, folder: Path | str | None = None) -> None:
        self.rank, self.size, self.grace = mesh.job.rank, mesh.job.size, grace
        self.folder = None if folder is None else Path(folder)
        self.store: Any = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="mpcore-leave", daemon=True)
        if self.size > 1:
            self.store = clone_store()  # the main thread's own connection may be waiting

    def __enter__(self) -> leave_together:
        if self.size > 1:
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or self.store is None:
            self.over.set()
            if self.thread.is_alive():  # inside the store while Python is torn down, it would abort the process
                self.thread.join(self.grace)
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a supervisor ends the survivors of the first that fails
        if not isinstance(error, KeyboardInterrupt) and _PEER.search(_whole_text(error)):
            at = f"stopped, because the store of the run{store_address(self.store)}"
            end_after(6 * self.grace, f"{at} gives no answer: its host is down, or the link to it is cut", EXIT_PEER)
            try:
                cause = self._ask()
            except (RuntimeError, OSError):
                cause = f"rank 0, or the host that keeps the store of the run{store_address(self.store)}, is gone"
            self.over.set()
            log.error("stopped, because %s", cause)
            _leave(EXIT_PEER)
        self.over.set()
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
                if self.store.check(["mpcore/asked"]):
                    self.store.set(f"mpcore/alive/{self.rank}", "")
                if self.over.wait(self.grace / 2):
                    return
            cause = self.store.get("mpcore/cause").decode()
        except (RuntimeError, OSError):  # who keeps the store may be done, and gone
            return
        if not self.over.wait(2 * self.grace):
            log.error("stopped, because %s", cause)
            os._exit(EXIT_PEER)

    def _own(self, error: BaseException) -> tuple[int, str]:
        """Print what went wrong here; return the exit status, and it in a line."""
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
                path.write_text(text)
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
        """Find the rank that failed first: it says so itself, or gives no answer."""
        self.store.set(f"mpcore/left/{self.rank}", "")
        found = self._wait(self.grace)
        if found is None and self.store.add("mpcore/asked", 1) == 1:  # one rank looks, not all at all
            time.sleep(self.grace)  # in which each thread looks twice
            silent = [rank for rank in range(self.size) if not self._is_alive(rank)]
            found = "the network between the ranks failed: all of them are there"
            if silent:
                found = f"{give_no_answer(silent, self.store)}: killed, or cut off"
            self.store.set("mpcore/cause", found)
        return found or self._wait(2 * self.grace) or "a rank is gone"

    def _is_alive(self, rank: int) -> bool:
        return any(self.store.check([f"mpcore/{word}/{rank}"]) for word in ("left", "alive"))

    def _wait(self, seconds: float) -> str | None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.store.check(["mpcore/cause"]):
                return self.store.get("mpcore/cause").decode()
            time.sleep(0.02)
        return None


def _leave(status: int) -> NoReturn:
    """Exit once gloo's threads have freed the tensors of the last collective: see `leave`."""
    time.sleep(0.2)
    sys.exit(status)


def leave(status: int) -> NoReturn:
    """Exit with a status after a successful run, without Python's shutdown.

    A thread of gloo may still hold tensors. If it frees them during Python's shutdown, it aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def tell_launcher(text: str) -> None:
    """Let torchrun print this text as the root cause, below its own traceback. Does nothing under other launchers.

    Args:
        text: what failed on this rank, in a line or two.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


def give_no_answer(ranks: Sequence[int], store: dist.Store | None = None) -> str:
    """`rank 3 gives no answer`, or of several; with the hosts that they named in the store, if not this one."""
    return f"{name_ranks(store, ranks)} {'gives' if len(ranks) == 1 else 'give'} no answer"


def store_address(store: dist.Store) -> str:
    """` at host:port` of a store, or nothing where it has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""


def end_after(seconds: float, line: str, status: int) -> threading.Timer:
    """Log a line and end the process after so many seconds, also where its threads wait in C for a host that is gone.

    Cancel the timer that it returns when all went well.
    """

    def end() -> None:
        log.error("%s", line)
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def list_ranks(ranks: Sequence[int]) -> str:
    """`1, 2, 5`."""
    return ", ".join(map(str, ranks))


def _whole_text(error: BaseException | None) -> str:
    parts = []
    while error is not None:
        parts.append(str(error))
        error = error.__cause__
    return "\n".join(parts)
