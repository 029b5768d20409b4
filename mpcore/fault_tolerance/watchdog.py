"""Explain a hang and end it: which rank the others wait for, at which line."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from torch import nn

from mpcore._torch.distributed import clone_store
from mpcore.fault_tolerance.leave import end_after, store_address
from mpcore.fault_tolerance.trace import Log, explain, read_log
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.mesh.log import get_logger

log = get_logger("mpcore.fault_tolerance")
EXIT_CODE = 70  # EX_SOFTWARE: a supervisor sees a failure, and may start again


class Watchdog:
    """Explain a hang and end the process. Each rank has one, in a thread of its own.

    Args:
        mesh: of this rank.
        model: its modules' names say where a rank is.
        timeout: seconds without `beat` that are a hang: several times the longest step, evaluation or save.
        folder: where each rank leaves its log, `rank0.json` and on, for `mpcore explain FOLDER`.
        grace: seconds in which the other ranks answer.

    Raises:
        ValueError: if timeout or grace isn't positive.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: nn.Module | None = None,
        *,
        timeout: float = 600.0,
        folder: Path | str | None = None,
        grace: float = 3.0,
    ) -> None:
        if timeout <= 0 or grace <= 0:
            raise ValueError(f"timeout {timeout} s and grace {grace} s must be more than 0")
        check_mesh(mesh)
        self.mesh, self.model, self.timeout, self.grace = mesh, model, timeout, grace
        self.folder = None if folder is None else Path(folder)
        self.store: Any = clone_store() if mesh.job.size > 1 else None
        self.last = time.monotonic()
        self.over = threading.Event()
        self.watched = threading.get_ident()
        self.thread = threading.Thread(target=self._watch, name="mpcore-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.last = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()

    def beat(self) -> None:
        """Record progress; call it once in each step."""
        self.last = time.monotonic()

    def _watch(self) -> None:
        while not self.over.wait(min(1.0, self.timeout / 4)):
            if time.monotonic() - self.last > self.timeout:
                self._report()
                os._exit(EXIT_CODE)

    def _report(self) -> None:
        mine = read_log(self.mesh, self.model, self.watched)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"rank{mine.rank}.json").write_text(mine.to_json())
        if self.store is not None:
            at = f"no progress for {self.timeout:g} s: the store of the run{store_address(self.store)} gives no answer"
            end_after(self.grace + 5, f"{at}: its host is down, or the link to it is cut", EXIT_CODE)
        logs = self._exchange(mine)
        if mine.rank == min(log.rank for log in logs):
            log.error("no progress for %g s: %s", self.timeout, explain(logs, self.mesh.job.size))
        time.sleep(0.2)  # so that the line is out before a supervisor sees the first rank leave

    def _exchange(self, mine: Log) -> list[Log]:
        if self.store is None:
            return [mine]
        key = "mpcore/trace/{}"
        logs = {mine.rank: mine}
        until = time.monotonic() + self.grace
        try:
            self.store.set(key.format(mine.rank), mine.to_json())
            while len(logs) < self.mesh.job.size and time.monotonic() < until:
                for rank in range(self.mesh.job.size):
                    if rank not in logs and self.store.check([key.format(rank)]):
                        logs[rank] = Log.from_json(self.store.get(key.format(rank)).decode())
                time.sleep(0.05)
        except RuntimeError:  # the rank that keeps the store is gone
            pass
        return list(logs.values())
