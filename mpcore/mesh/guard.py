"""Guard the start: end a process that waits in C for a host that is gone, and say which."""

from __future__ import annotations

import functools
import inspect
import os
import socket
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from mpcore._torch.simulated import simulated_rank
from mpcore.mesh.launch import read_launch
from mpcore.mesh.log import get_logger

log = get_logger("mpcore.mesh")
P = ParamSpec("P")
T = TypeVar("T")
GRACE_S = 10.0  # what raises in time can say more
EXIT_CODE = 70  # as of a hang in a step


def guard_start(start: Callable[P, T]) -> Callable[P, T]:
    """End this process if `start` has not returned `GRACE_S` seconds after its argument `timeout`.

    A connection whose other end is cut off waits in C, some 15 minutes long, where no exception reaches it.
    """
    signature = inspect.signature(start)

    @functools.wraps(start)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        if simulated_rank() is not None:  # nothing waits in C, and a breakpoint may take its time
            return start(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments.get("timeout")
        limit = dist.default_pg_timeout.total_seconds() if given is None else given
        timer = threading.Timer(limit + GRACE_S, _end, (limit,))
        timer.daemon = True
        timer.start()
        try:
            return start(*args, **kwargs)
        finally:
            timer.cancel()

    return guarded


def _end(limit: float) -> None:
    try:
        launch = read_launch(os.environ)
        address, port = launch.address, launch.port
    except ValueError:  # the world was made by other means: this thread must end the process all the same
        address, port = os.environ.get("MASTER_ADDR", ""), 0
    try:
        socket.create_connection((address, port), timeout=3).close()
        why = "a rank that had arrived gives no answer"
    except OSError as error:
        why = f"the host of rank 0 at {address}:{port} gives no answer ({error}): it is down, or the link to it is cut"
    log.error(
        "on %s: the mesh was not built within %g s: %s. Start the run again when all hosts reach %s:%s",
        socket.gethostname(), limit, why, address, port,
    )  # fmt: skip
    os._exit(EXIT_CODE)
