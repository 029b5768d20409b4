"""Detect a hang, explain which rank the others wait for and at which line, and end the process."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from mpcore._torch.distributed import clone_store
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.mesh.log import Logger, get_logger
from mpcore.mesh.secret import printable, seal, unseal
from mpcore.tools.fault_tolerance.leave import end_after, store_address, write_new
from mpcore.tools.fault_tolerance.trace import Log, explain, read_log

log: Logger = get_logger("mpcore.tools.fault_tolerance")
EXIT_CODE = 70  # EX_SOFTWARE: a supervisor sees a failure and may restart the run


class Watchdog:
    """Detect a hang in a background thread, explain it, and end the process with exit status 70. Use one on each rank.

    Args:
        mesh: this rank's mesh.
        model: the names of its modules say where a rank is. None: module names are left out.
        timeout: the seconds without a call of `beat` that count as a hang. Choose several times the longest step,
            evaluation or save.
        folder: the folder where each rank writes its log, `rank0.json` and so on, for `mpcore explain FOLDER`. None: no
            files.
        grace: the seconds to wait for the other ranks' logs.

    Raises:
        ValueError: if `timeout` or `grace` isn't positive.

    Example::

        record()  # before the first process group is created
        mesh = build_mesh(tp=2)
        with Watchdog(mesh, model, timeout=300) as watchdog:
            for batch in batches:
                train(batch)
                watchdog.beat()
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
        self.mesh = mesh
        self.model = model
        self.timeout = timeout
        self.grace = grace
        self.folder: Path | None = None if folder is None else Path(folder)
        self.store: Any = clone_store() if mesh.job.size > 1 else None
        self.last: float = time.monotonic()
        self.over: threading.Event = threading.Event()
        self.watched: int = threading.get_ident()
        self.thread: threading.Thread = threading.Thread(target=self._watch, name="mpcore-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.last = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()

    def beat(self) -> None:
        """Report progress: the timeout starts again."""
        self.last = time.monotonic()

    def _watch(self) -> None:
        while not self.over.wait(min(1.0, self.timeout / 4)):
            if time.monotonic() - self.last > self.timeout:
                try:
                    self._report()
                except Exception:  # end the process all the same
                    log.exception("no progress for %g s, and the report of it failed", self.timeout)
                finally:
                    os._exit(EXIT_CODE)

    def _report(self) -> None:
        mine = read_log(self.mesh, self.model, self.watched)
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_new(self.folder / f"rank{mine.rank}.json", mine.to_json())
            except OSError as error:
                log.error("NOT WRITTEN: the log of rank %d in %s: %s", mine.rank, self.folder, error)
        if self.store is not None:
            at = f"no progress for {self.timeout:g} s: the store of the run{store_address(self.store)} gives no answer"
            end_after(self.grace + 5, f"{at}: its host is down, or the link to it is cut", EXIT_CODE)
        logs = self._exchange(mine)
        if mine.rank == min(log.rank for log in logs):
            log.error("no progress for %g s: %s", self.timeout, printable(explain(logs, self.mesh.job.size)))
        time.sleep(0.2)  # the line must be printed before a supervisor sees the first rank exit

    def _exchange(self, mine: Log) -> list[Log]:
        if self.store is None:
            return [mine]
        key = "mpcore/trace/{}"
        logs = {mine.rank: mine}
        until = time.monotonic() + self.grace
        try:
            self.store.set(key.format(mine.rank), seal(key.format(mine.rank), mine.to_json().encode()))
            while len(logs) < self.mesh.job.size and time.monotonic() < until:
                for rank in range(self.mesh.job.size):
                    if rank not in logs and self.store.check([key.format(rank)]):
                        with suppress(ValueError):  # another process wrote it
                            text = unseal(key.format(rank), self.store.get(key.format(rank))).decode()
                            logs[rank] = Log.from_json(text)
                time.sleep(0.05)
        except RuntimeError:  # the rank that hosts the store is gone
            pass
        return list(logs.values())
