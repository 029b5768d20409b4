"""What the start of a world costs by its size: `python -m bench.start_up --write PAGE`.

Ranks are threads of one process, each with a connection of its own to a real TCPStore. They meet
(`mpcore.mesh.rendezvous.meet`), make a gloo group of the world that connects lazily, as in `build_mesh`, and agree
twice. In a network namespace of its own, all bytes of the loopback interface are theirs. Agreements of larger worlds
are counted: the requests and bytes of each rank, where all ranks come at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.machine import replace_between
from mpcore.mesh.agreement import Agreement
from mpcore.mesh.rendezvous import meet

LIMIT_S = 300.0
SIZES = (16, 64, 256, 1024)
COUNTED = (2048, 4096, 16384)


@dataclass
class CountedStore:
    """A store that counts what one rank asks of it: requests, and bytes of keys, values and answers."""

    store: Any
    requests: int = 0
    bytes: int = 0
    timeout: timedelta = field(default=timedelta(seconds=LIMIT_S))

    def __getattr__(self, name: str) -> Any:
        """Return a method of the store that counts."""
        method = getattr(self.store, name)

        def counted(*given: Any) -> Any:
            answer = method(*given)
            self.requests += 1
            self.bytes += size_of([*given, answer])
            return answer

        return counted


def size_of(x: Any) -> int:
    """Return the bytes of a message to a store or of its answer: 8 of a number, one of a truth value."""
    if isinstance(x, list):
        return sum(map(size_of, x))
    return 0 if x is None else 1 if isinstance(x, bool) else 8 if isinstance(x, int) else len(x)


def agree(store: Any, rank: int, size: int) -> None:
    """Agree with the other ranks as `build_mesh` does, once the world is connected."""
    for number in range(2):
        agreement = Agreement(store, rank, size)
        if not agreement.same(f"plan {number}"):
            raise ValueError("the ranks disagree")


def count_agreement(size: int) -> list[CountedStore]:
    """Count what each rank of an agreement asks of the store, where all come at once and the last one settles it."""
    held = dist.HashStore()
    stores = [CountedStore(held) for _ in range(size)]
    for _ in range(2):  # the second one deletes the keys of the first
        for store in stores:
            store.requests = store.bytes = 0
        # all ranks but the last find no answer yet: they return, and look again below
        late = [_Returns(store, rank, size) for rank, store in enumerate(stores[:-1])]
        for agreement in late:
            agreement.same("plan")
        assert Agreement(stores[-1], size - 1, size).same("plan")
        for agreement in late:
            assert Agreement._hear(agreement, agreement._key("result")).startswith(b"same")
    return stores


class _Returns(Agreement):
    def _hear(self, key: str) -> bytes:
        self.store.check([key])
        return b""


def measure(size: int) -> dict[str, float]:
    """Start a world of `size` ranks in threads: seconds, and open files and bytes of the loopback a rank.

    The groups come last: gloo's own threads, several of each rank in this one process, hold up all others.
    """
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    limit = timedelta(seconds=LIMIT_S)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    gc.collect()
    files, sent = open_files(), loopback_bytes()
    errors: list[BaseException] = []
    groups: list[Any] = [None] * size
    marks: dict[str, float] = {}
    stores: list[Any] = [None] * size
    step = threading.Barrier(size + 1)

    def one(rank: int) -> None:
        try:
            stores[rank] = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=limit)
            step.wait()
            name = meet(stores[rank], rank, size, LIMIT_S)
            step.wait()
            here = dist.PrefixStore(name, stores[rank])
            agree(dist.PrefixStore("agree", here), rank, size)
            step.wait()
            groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("world", here), rank, size, limit)
            step.wait()
        except BaseException as error:
            errors.append(error)
            step.abort()

    threading.stack_size(2**18)
    began = time.perf_counter()
    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    try:
        for name in ("connect", "meet", "agree", "group"):
            step.wait()
            marks[name], began = time.perf_counter() - began, time.perf_counter()
    except threading.BrokenBarrierError:
        raise errors[0] from None
    opened, sent = open_files() - files, loopback_bytes() - sent
    for thread in threads:
        thread.join()
    # of each connection one end is the store's, on the host of rank 0
    return {"seconds": sum(marks.values()), **marks, "files": (opened - size) / size, "bytes": sent / size}


def open_files() -> int:
    """Count the open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def loopback_bytes() -> int:
    """Bytes that the loopback interface of this network namespace has carried."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def table(measured: dict[int, dict[str, float]]) -> str:
    """Make the table: what was measured, and what is counted."""
    rows = ["| ranks | seconds | files per rank | kB per rank at the start | requests in one agreement, mean (most) "
            "| bytes in one agreement, mean | source |",
            "|---:|---:|---:|---:|---:|---:|---|"]  # fmt: skip
    for size in (*measured, *COUNTED):
        stores = count_agreement(size)
        requests, most = sum(s.requests for s in stores) / size, max(s.requests for s in stores)
        told = f"{requests:.1f} ({most}) | {sum(s.bytes for s in stores) / size:.0f}"
        start, source = "- | - | -", "counted"
        if found := measured.get(size):
            start = f"{found['seconds']:.2f} | {found['files']:.1f} | {found['bytes'] / 1e3:.1f}"
            source = "measured; agreement counted"
        rows.append(f"| {size:,} | {start} | {told} | {source} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.start_up", description="Cost of a start by world size.")
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="worlds to start")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table between its markers in this file")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    own = shutil.which("unshare") and os.geteuid() == 0 and not args.inside
    if own:  # a loopback interface of our own, with nobody else's bytes
        words = sys.argv[1:] if argv is None else argv
        again = " ".join([sys.executable, "-m", "bench.start_up", "--inside", *words])
        sys.exit(subprocess.call(["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {again}"]))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(1)
    measured = {}
    for size in args.ranks:
        measured[size] = measure(size)
        print(size, {name: round(value, 3) for name, value in measured[size].items()}, flush=True)
    text = table(measured)
    print(text)
    if args.write:
        replace_between(args.write, "<!-- start_up -->", "<!-- end -->", f"{text}\n")


if __name__ == "__main__":
    main()
