"""Leave together: when one rank fails, all leave, with an exit status that says why."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

from mpcore._torch.distributed import clone_store
from mpcore.mesh.axis import Mesh

EXIT_PEER = 70  # EX_SOFTWARE, as of a hang: this rank was well, another one failed
EXIT_STOPPED = 75  # EX_TEMPFAIL: saved because a signal asked; start again to go on
_PEER = re.compile(r"by peer|Connection refused|Broken pipe|[Tt]imed out|NCCL|gloo/|[Ss]ocket|Transport retry")


class leave_together:  # noqa: N801  (a context manager, named as what it does)
    """End every rank within seconds when one fails, and print which rank failed first and why.

    The rank that fails prints its own traceback. The others, whose next collective breaks, print one line that names
    it. A rank that leaves with status 0 before the end of the block has failed too; another status is kept. A thread
    asks the run's store twice each grace. It ends a rank whose main thread hears of nothing, as in a wait for its GPU.

    Args:
        mesh: of this rank. In a world of one rank errors pass as they are.
        grace: seconds in which a rank that failed can say why. Other ranks have twice as many to leave.
    """

    def __init__(self, mesh: Mesh, grace: float = 2.0) -> None:
        self.rank, self.size, self.grace = mesh.job.rank, mesh.job.size, grace
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
        """Find the rank that failed first: it says so itself, or gives no answer."""
        self.store.set(f"mpcore/left/{self.rank}", "")
        found = self._wait(self.grace)
        if found is None and self.store.add("mpcore/asked", 1) == 1:  # one rank looks, not all at all
            silent = [rank for rank in range(self.size) if not self.store.check([f"mpcore/left/{rank}"])]
            found = "the network between the ranks failed: all of them are there"
            if silent:
                found = f"{give_no_answer(silent)}: killed, or cut off"
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
    """Exit once gloo's threads have freed the tensors of the last collective: see `leave`."""
    time.sleep(0.2)
    sys.exit(status)


def leave(status: int) -> NoReturn:
    """Exit with a status after a run that went well, without tearing Python down.

    A thread of gloo may still hold tensors. If it frees them while Python is torn down, it aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def give_no_answer(ranks: Sequence[int]) -> str:
    """`rank 3 gives no answer`, or of several."""
    return f"rank {ranks[0]} gives no answer" if len(ranks) == 1 else f"ranks {list_ranks(ranks)} give no answer"


def list_ranks(ranks: Sequence[int]) -> str:
    """`1, 2, 5`."""
    return ", ".join(map(str, ranks))


def _whole_text(error: BaseException | None) -> str:
    parts = []
    while error is not None:
        parts.append(str(error))
        error = error.__cause__
    return "\n".join(parts)
