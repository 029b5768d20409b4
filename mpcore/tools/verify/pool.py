"""A pool of local gloo ranks that stay alive: a distributed call takes milliseconds instead of seconds.

`pool(n, check, *args)` calls `check(*args)` in n processes that form a world, and returns the n results. `check` must
be importable: a function at the top level of a module.
"""

from __future__ import annotations

import atexit
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
from mpcore.mesh.axis import Mesh
from mpcore.mesh.build import build_mesh
from mpcore.tools._torch.simulated import simulated_rank
from mpcore.tools.simulation.turns import RankError

GRACE_S = 5.0
STACK_S = 0.5  # seconds to wait for a process to write its stacks
START_S = 240.0  # the first import of torch may take minutes on a busy machine
DIED, LATE = "the process died", "still running when the time was over"


class Pool:
    """Worker processes. They start at the first call, and start again after a hang or a crash.

    A call with one rank uses a separate process, so that the world of the other processes stays alive.

    Args:
        most: the number of ranks of the largest world. The first call waits until all processes have started.
        prepare: called once in each process. It must be importable. None: nothing is called.
        preload: modules that are imported once, before the processes are forked.
        start: the start method of `multiprocessing`: "forkserver", or "fork" if this process has computed nothing yet.
        grace: the seconds that the other ranks get to finish after one failed or died.
    """

    def __init__(
        self, most: int = 4, prepare: Callable[[], None] | None = None, preload: Sequence[str] = (),
        start: str = "forkserver", grace: float = GRACE_S,
    ) -> None:  # fmt: skip
        self.most = most
        self.prepare = prepare
        self.preload = preload
        self.start = start
        self.grace = grace
        self.workers: list[tuple[Any, Connection]] = []
        self.folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(prefix="mpcore-pool-")
        self.worlds: int = 0  # made so far: each has its number as its name
        self.world = self.size = self.lone = (
            0  # the world of several ranks, their number, and the world of a rank alone
        )
        self.store: Any = None  # where the ranks of all worlds meet

    def __call__(
        self, size: int, check: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Call `check(*args, **kwargs)` on ranks 0 .. size - 1, and return the results in rank order."""
        if size > self.most:
            raise ValueError(f"{size} ranks of a pool of {self.most}: make it with most={size} or more")
        if not self.workers:
            self._start()
        if size not in (1, self.size):
            self.world: int = self._new_world()
            self.size = size
        workers = self.workers[:size] if size > 1 else self.workers[-1:]
        store = (self.store.port, str(self.world if size > 1 else self.lone))
        connections = [connection for _, connection in workers]
        for rank, connection in enumerate(connections):
            connection.send((rank, size, store, check, args, kwargs))
        results: list[Any] = [None] * size
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
            self.stop()  # after an error a collective may be half done: start new processes
            raise RankError("\n".join(f"--- rank {rank} of {size}\n{text}" for rank, text in sorted(errors.items())))
        if gone and size > 1:  # `check` destroyed its process group: the next call makes a new world
            self.size = 0
        elif gone:
            self.lone = self._new_world()
        return results

    def _new_world(self) -> int:
        self.worlds += 1
        return self.worlds

    def _start(self) -> None:
        context: Any = mp.get_context(self.start)
        context.set_forkserver_preload(
            ["torch", "torch.distributed", "mpcore", *self.preload, "mpcore.tools.verify.preloaded"]
        )
        self.lone: int = self._new_world()
        for _ in range(self.most + (self.most > 1)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self.prepare, self.folder.name), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        for _, connection in self.workers:  # before any call, so that no call's timeout includes the start
            try:
                there = connection.poll(START_S) and connection.recv()
            except (EOFError, ConnectionResetError):
                there = False
            if not there:
                self.stop()
                raise RankError(f"a rank died as it started, or was not there after {START_S:.0f} seconds")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def _stack(self, process: Any) -> str:
        path = _stack_file(self.folder.name, process.pid)
        os.kill(process.pid, signal.SIGUSR2)
        process.join(STACK_S)
        return textwrap.indent(path.read_text(), "  ")

    def stop(self) -> None:
        """End the processes."""
        for process, connection in self.workers:
            connection.close()
            process.kill()
        for process, _ in self.workers:
            process.join()
        self.workers = []
        self.size: int = 0
        self.store = None


def _work(connection: Connection, prepare: Callable[[], None] | None, folder: str) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "256"  # what mpcore.tools.fault_tolerance.trace.record sets
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
                    forget_meshes([*imported, *mesh_caches()])
                port, name = store
                met = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
                dist.init_process_group("gloo", store=met, rank=rank, world_size=size)
                _mesh.cache_clear()
                world = store
            torch.manual_seed(0)
            result = (True, check(*args, **kwargs))
        except BaseException:
            result = (False, traceback.format_exc())
        gc.collect()  # what the check left behind, such as the lock of a run's folder; what was imported is frozen
        with contextlib.suppress(OSError):
            connection.send((*result, dist.is_initialized()))


@functools.cache
def imported_caches() -> list[Any]:
    """Return the caches of the modules that this process has imported.

    The garbage collector skips all objects that exist now, until the process exits.
    """
    caches = mesh_caches()
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise Triton 3.9 prints 29 lines "nanobind: leaked ..", after the command's last
    return caches


def _death(process: Any) -> str:
    process.join(GRACE_S)
    status = process.exitcode or 0
    return f"{DIED} ({signal.Signals(-status).name})" if status < 0 else DIED


def _stack_file(folder: str, pid: int) -> Path:
    return Path(folder, f"stack-{pid}")


def mesh(**sizes: Any) -> Mesh:
    """Return, in a worker, the mesh of these sizes over the whole world.

    It is made once, on the CPU as the models are.
    """
    if simulated_rank() is not None:  # each simulated rank has its own
        return build_mesh(**{"device_type": "cpu", **sizes})
    return _mesh(**dict(sorted(sizes.items())))


@functools.cache
def _mesh(**sizes: Any) -> Mesh:
    return build_mesh(**{"device_type": "cpu", **sizes})
