"""End a process that hangs while it joins the world, and log the cause."""

from __future__ import annotations

import functools
import inspect
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from mpcore._torch.distributed import ranks_are_threads
from mpcore.mesh.launch import Launch, read_launch
from mpcore.mesh.log import Logger, get_logger

log: Logger = get_logger("mpcore.mesh")
P = ParamSpec("P")
T = TypeVar("T")
GRACE_S = 10.0  # an exception that arrives within this time has a better message
EXIT_CODE = 70  # the same code as for a hang in a training step


def guard_start(start: Callable[P, T]) -> Callable[P, T]:
    """Decorate `start` so that the process ends if `start` runs `GRACE_S` seconds longer than its argument `timeout`.

    If the connection to a host is cut, torch waits in C for about 15 minutes, and no Python exception can end the wait.
    """

    @functools.wraps(start)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        given = inspect.signature(start).bind(*args, **kwargs).arguments.get("timeout")
        limit = dist.default_pg_timeout.total_seconds() if given is None else given
        if not isinstance(limit, int | float) or not 0 < limit < 1e8:
            raise ValueError(f"timeout {limit!r} is not a number of seconds above 0 and below 1e8: take such as 600.0")
        if ranks_are_threads():  # a breakpoint may take long
            return start(*args, **kwargs)
        timer = threading.Timer(limit + GRACE_S, _end, (limit,))
        timer.daemon = True
        timer.start()
        try:
            with host_named():
                return start(*args, **kwargs)
        finally:
            timer.cancel()

    return guarded


@contextmanager
def host_named() -> Iterator[None]:
    """Raise a ValueError that says who is gone if the connection to the store breaks in the block."""
    try:
        yield
    except dist.DistNetworkError:
        raise ValueError("rank 0, or the host that keeps the store of the run, is gone: read what ended it") from None


def _end(limit: float) -> None:
    try:
        launch = read_launch(os.environ)
    except ValueError:  # another launcher: this thread must still end the process
        launch = Launch(address=os.environ.get("MASTER_ADDR", ""))
    at, why = f"{launch.address}:{launch.port}", "a rank that had arrived gives no answer"
    try:
        socket.create_connection((launch.address, launch.port), timeout=3).close()
    except OSError as error:
        why = f"the host of rank 0 at {at} gives no answer ({error}): it is down, or the link to it is cut"
    log.error(
        "on %s: the mesh was not built within %g s: %s. Start the run again when all hosts reach %s",
        socket.gethostname(), limit, why, at,
    )  # fmt: skip
    os._exit(EXIT_CODE)
