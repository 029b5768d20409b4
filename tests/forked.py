"""Python processes for tests of how a process starts and ends, forked from one that has imported the library.

A new process needs four seconds of a core to import torch. `Forked(code)` needs none, and is otherwise as
`subprocess.Popen([sys.executable, "-c", code])` with three pipes.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[1]
SERVE = "import sys, tests.forked; exec(tests.forked.serve(int(sys.argv[1])), {'__name__': '__main__'})"
MOST = 2**20  # bytes of a request


@functools.cache
def server() -> socket.socket:
    """Start the process that forks, once. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
    words = [sys.executable, "-c", SERVE, str(theirs.fileno())]
    subprocess.Popen(words, cwd=ROOT, pass_fds=[theirs.fileno()], env=os.environ | {"OMP_NUM_THREADS": "1"})
    theirs.close()
    return ours


def serve(number: int) -> CodeType:
    """Fork a process at each request. Return in that process, with its code, so that it ends as any other."""
    import torch.distributed  # noqa: F401

    import mpcore.checkpoint
    import mpcore.tools.fault_tolerance  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes between
    with socket.socket(fileno=number) as requests:
        while True:
            message, files, *_ = socket.recv_fds(requests, MOST, 4)
            if not message:
                os._exit(0)
            if os.fork() == 0:
                break
            for file in files:
                os.close(file)
    *pipes, status = files
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():  # this one waits, as its parent has no time
        os.write(status, f"{child}\n".encode())
        for file in pipes:
            os.close(file)
        os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
        os._exit(0)
    for place, file in enumerate(pipes):
        os.dup2(file, place)
    for file in files:
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code, argv, environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *argv]
    return compile(code, "<string>", "exec")


class Forked:
    """A process that runs `code` in the folder of the checkout. Attributes and methods are those of `Popen`.

    Its environment in `/proc` is not `env` but that of the process that forks: some tests need a new process.

    Args:
        code: the program.
        argv: its words.
        env: all of its environment. None: this process's.
    """

    def __init__(self, code: str, *argv: str, env: Mapping[str, str] | None = None) -> None:
        (stdin, feed), *outs, (told, status) = (os.pipe() for _ in range(4))
        theirs = [stdin, *(write for _, write in outs), status]
        request = json.dumps([code, argv, dict(os.environ if env is None else env)]).encode()
        socket.send_fds(server(), [request], theirs)
        for file in theirs:
            os.close(file)
        self.stdin = os.fdopen(feed, "w")
        self.stdout, self.stderr = (os.fdopen(read) for read, _ in outs)
        self.told = os.fdopen(told)
        self.pid = int(self.told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None."""
        if self.returncode is None and select.select([self.told], [], [], 0)[0]:
            self.returncode = int(self.told.readline())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the status."""
        if self.returncode is None and not select.select([self.told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("python -c", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close the input, wait for the end, and return what was printed on the output and as errors."""
        self.stdin.close()
        with ThreadPoolExecutor(2) as threads:
            texts = [threads.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return texts[0].result(), texts[1].result()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)
