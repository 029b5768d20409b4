"""A pool of local gloo ranks: started once, then a distributed call costs milliseconds instead of seconds.

`pool(n, check, *args)` calls `check(*args)` in n processes that form a world of their own, and returns the n results.
`check` must be importable: a function at the top level of a module.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing as mp
import os
import signal
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpcore._torch.distributed import forget_meshes, mesh_caches
from mpcore._torch.simulated import simulated_rank
from mpcore.mesh.axis import Mesh
from mpcore.mesh.build import build_mesh
from mpcore.simulation.turns import RankError

GRACE_S = 5.0
STACK_S = 0.5  # for the signal to come, as a process that hangs does nothing else
START_S = 240.0  # on a machine that others use too, the first import of torch takes minutes
DIED, LATE = "the process died", "still running when the time was over"


class Pool:
    """Worker processes, started when first needed and again after a hang or a crash.

    A call on one rank has a process of its own, so that the world of the others outlives it.

    Args:
        most: ranks of the largest world; the first call waits until all have started.
        prepare: called once in each; importable.
        preload: modules that all of them start with, imported once.
        start: as of `multiprocessing`: "forkserver", or "fork" from a process that computed nothing yet.
        grace: seconds that ranks may still take after one failed or died.
    """

    def __init__(
        self,
        most: int = 4,
        prepare: Callable[[], None] | None = None,
        preload: Sequence[str] = (),
        start: str = "forkserver",
        grace: float = GRACE_S,
    ) -> None:
        self.most, self.prepare, self.preload, self.start, self.grace = most, prepare, preload, start, grace
        self.workers: list[tuple[Any, Connection]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="mpcore-pool-")
        self.worlds = self.lone = self.size = 0
        self.store: Any = None  # where the ranks of all worlds meet

    def __call__(self, size: int, check: Callable, *args: Any, timeout: float = 120.0, **kwargs: Any) -> list:
        """Call `check(*args, **kwargs)` on ranks 0 .. size-1, and return what each returned.

        Raises:
            ValueError: if the pool has fewer ranks.
            RankError: if a rank failed, died, or was not done after `timeout` seconds, with where it stood then; the
                pool begins anew.
        """
        if size > self.most:
            raise ValueError(f"{size} ranks of a pool of {self.most}: make it with most={size} or more")
        if not self.workers:
            self._start()
        if size not in (1, self.size):
            self.size, self.worlds = size, self.worlds + 1
        workers = self.workers[:size] if size > 1 else self.workers[-1:]
        store = (self.store.port, str(self.worlds if size > 1 else self.lone))
        connections = [connection for _, connection in workers]
        for rank, connection in enumerate(connections):
            connection.send((rank, size, store, check, args, kwargs))
        results: list = [None] * size
        errors: dict[int, str] = {}
        gone = False
        waiting = dict(zip(connections, range(size), strict=True))
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[index]
                try:
                    ok, value, there = connection.recv()  # type: ignore[union-attr]
                    gone = gone or not there
                except (EOFError, ConnectionResetError):
                    ok, value = False, _death(workers[rank][0])
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + self.grace)
            if not ready:
                errors |= {rank: f"{LATE}\n{self._stack(workers[rank][0])}" for rank in waiting.values()}
                break
        if errors:
            self.stop()  # an error may leave a group or a collective half done: begin anew
            raise RankError("\n".join(f"--- rank {rank} of {size}\n{text}" for rank, text in sorted(errors.items())))
        if gone:  # `check` ended its world, as programs do: the next call begins another
            self.worlds += 1
            self.size, self.lone = (0, self.lone) if size > 1 else (self.size, self.worlds)
        return results

    def _start(self) -> None:
        context: Any = mp.get_context(self.start)
        context.set_forkserver_preload(
            ["torch", "torch.distributed", "mpcore", *self.preload, "mpcore.verify.preloaded"]
        )
        self.lone = self.worlds = self.worlds + 1
        for _ in range(self.most + (self.most > 1)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self.prepare, self.folder.name), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        for _, connection in self.workers:  # all before any call, so that its time is its own
            try:
                there = connection.poll(START_S) and connection.recv()
            except (EOFError, ConnectionResetError):
                there = False
            if not there:
                self.stop()
                raise RankError(f"a rank died as it started, or was not there after {START_S:.0f} seconds")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def _stack(self, process: Any) -> str:
        """The stacks of a worker's threads, indented as tracebacks are."""
        path = _stack_file(self.folder.name, process.pid)
        os.kill(process.pid, signal.SIGUSR2)
        process.join(STACK_S)
        return textwrap.indent(path.read_text(), "  ")

    def stop(self) -> None:
        """End the workers."""
        for process, connection in self.workers:
            connection.close()
            process.kill()
        for process, _ in self.workers:
            process.join()
        self.workers, self.size, self.store = [], 0, None


def _work(connection: Connection, prepare: Callable[[], None] | None, folder: str) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "256"  # what mpcore.fault_tolerance.trace.record sets
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # what build_mesh sets
    stack = _stack_file(folder, os.getpid()).open("w")  # as long as the process
    faulthandler.register(signal.SIGUSR2, stack)
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    imported = imported_caches()
    connection.send(True)
    world = None
    while True:
        try:
            rank, size, store, check, args, kwargs = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if world != store:
                if dist.is_initialized():
                    dist.destroy_process_group()
                    forget_meshes(imported)
                port, name = store
                met = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
                dist.init_process_group("gloo", store=met, rank=rank, world_size=size)
                _meshes.clear()
                world = store
            torch.manual_seed(0)
            result = (True, check(*args, **kwargs))
        except BaseException:
            result = (False, traceback.format_exc())
        with contextlib.suppress(OSError):
            connection.send((*result, dist.is_initialized()))


@functools.cache
def imported_caches() -> list[Any]:
    """Return the caches of what this process has imported, which the garbage collector passes over from now on."""
    caches = mesh_caches()
    gc.freeze()
    return caches


def _death(process: Any) -> str:
    """How a worker ended, as far as its exit status tells."""
    process.join(GRACE_S)
    status = process.exitcode or 0
    return f"{DIED} ({signal.Signals(-status).name})" if status < 0 else DIED


def _stack_file(folder: str, pid: int) -> Path:
    return Path(folder, f"stack-{pid}")


_meshes: dict = {}


def mesh(**sizes: Any) -> Mesh:
    """In a worker: the mesh of these sizes over the whole world, made once. As the models, it is on the CPU."""
    if simulated_rank() is not None:  # each rank of this process has its own
        return build_mesh(**{"device_type": "cpu", **sizes})
    key = tuple(sorted(sizes.items()))
    if key not in _meshes:
        _meshes[key] = build_mesh(**{"device_type": "cpu", **sizes})
    return _meshes[key]
