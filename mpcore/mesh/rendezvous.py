"""Join the launcher's processes into one world. The store may hold keys of earlier attempts."""

from __future__ import annotations

import math
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mpcore._torch.distributed import keep_secret
from mpcore.mesh.agreement import name_ranks, this_process
from mpcore.mesh.failure import report_failures
from mpcore.mesh.launch import Launch
from mpcore.mesh.log import Logger, get_logger
from mpcore.mesh.secret import find_secret, leave_secret, printable, remove_secret

log: Logger = get_logger("mpcore.mesh")
_MET = "all are here"
_LATE = 5.0  # seconds after which ranks that have not arrived are named, while this rank goes on waiting
_GONE = 30.0  # seconds after which this rank gives up, if no process of the host has the rank that it waits for
_FILES = 64  # files and sockets of a rank: 15 are open after the first collective of two ranks

_WORLD = "mpcore/world"
Absent = Callable[[Callable[[], list[int]]], str]


def start_world(launch: Launch, backend: str, timeout: float | None) -> None:
    """Create the default process group. Keys of earlier attempts in the launcher's store do no harm.

    `timeout` is the seconds to wait for all ranks, and the timeout of collectives. None: torch's default.
    """
    limit = dist.default_pg_timeout if timeout is None else timedelta(seconds=timeout)
    until = time.monotonic() + limit.total_seconds()
    store = open_store(launch, limit)
    enter_world(store, launch, max(until - time.monotonic(), 1.0))
    try:
        left = max(math.ceil(until - time.monotonic()), 1)
        name = meet(store, launch.rank, launch.world_size, left, _find_absent(launch))
    except ValueError:
        time.sleep(1.0 if launch.keeps_store else 0.0)  # the other ranks read the cause before the store is closed
        raise
    if launch.keeps_store:
        store.set(_WORLD, f"{_title(launch)}, all of them here")
    secret = _share_secret(store, launch, name, until) if launch.one_host else b""
    join_world(backend, dist.PrefixStore(name, store), launch.rank, launch.world_size, limit)
    report_failures(launch.rank)  # after torch, which prints each line of a traceback with the rank before it
    if secret:
        keep_secret(secret)


def _share_secret(store: dist.Store, launch: Launch, name: str, until: float) -> bytes:
    """Return the secret of a job whose ranks are all on this host."""
    ready, read = f"{name}/mpcore/secret", f"{name}/mpcore/read"
    if launch.rank == 0:
        secret = leave_secret(name)
        store.set(ready, "")
        return secret
    _wait_for(store, ready, max(until - time.monotonic(), 1.0))
    secret = find_secret(name)
    if store.add(read, 1) == launch.world_size - 1:  # counted after the read: the others have read it, too
        remove_secret(name)
    return secret


def open_store(launch: Launch, limit: timedelta) -> dist.Store:
    """Connect to the store at which the ranks meet. If torchrun hosts no store, rank 0 hosts it."""
    address = "127.0.0.1" if launch.one_host and launch.launcher != "torchrun" else launch.address
    here, there = f"rank {launch.rank} on {socket.gethostname()}", f"{launch.address}:{launch.port}"
    try:
        socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{here}: the address {launch.address!r} of rank 0 doesn't resolve ({error}): set MASTER_ADDR to an "
            f"address of its host that every host knows"
        ) from None
    found: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            if not launch.keeps_store:  # torch prints 30 lines per failed attempt to connect
                _wait_for_port(address, launch.port, limit.total_seconds())
            found.append(dist.TCPStore(
                address, launch.port, launch.world_size, launch.keeps_store, limit,
                wait_for_workers=False, multi_tenant=True,
                master_listen_fd=_listen(address, launch.port) if launch.keeps_store else None,
            ))  # fmt: skip
        except (RuntimeError, OSError) as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="mpcore-connect", daemon=True)
    thread.start()
    absent, until = _find_absent(launch), time.monotonic() + limit.total_seconds() + 1
    while thread.is_alive() and time.monotonic() < until:  # torch waits forever if the process there isn't a store
        thread.join(0.1)
        if not launch.keeps_store and thread.is_alive() and (text := absent(lambda: [0])):
            raise ValueError(f"{here}: {text}")
    store = found[0] if found else None
    if isinstance(store, dist.Store):
        return store
    if "EADDRINUSE" in str(store):
        problem = f"port {launch.port} is in use: end what listens there (another RANK 0?), or set a free MASTER_PORT"
    elif launch.keeps_store:
        problem = f"can't reach itself at {there}: set MASTER_ADDR to an address of this host"
    else:
        problem = (
            f"rank 0 did not arrive at {there} within {limit.total_seconds():g} s: start all ranks, set MASTER_ADDR "
            f"and MASTER_PORT alike for all, and open the port between the hosts"
        )
    raise ValueError(f"{here}: {problem}")


def _listen(address: str, port: int) -> int | None:
    """Return a socket bound to the interface of an address. None: torch binds to all interfaces, or says why not.

    Hosts often map their own name to loopback, and Kubernetes gives rank 0 "localhost". So loopback is bound only if
    the address says so in numbers, which are those of a job of one host.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found = socket.gethostbyname(address)
        if found.startswith("127.") and found != address:
            raise OSError("other hosts may have to reach it")
        sock.bind((found, port))
    except OSError:  # the address is a translated one, or an IPv6 one
        sock.close()
        return None
    return sock.detach()


def _find_absent(launch: Launch) -> Absent:
    """Return a function that logs who is away, and says who won't arrive if all are here, with no torchrun."""
    begin, looked, last, seen, said = time.monotonic(), 0.0, set[int](), set[int](), list[int]()
    here = launch.address == "localhost" or launch.address.startswith("127.")  # or the first host in Kubernetes
    here = (here and "KUBERNETES_SERVICE_HOST" not in os.environ) or launch.one_host

    def describe(away: Callable[[], list[int]]) -> str:
        nonlocal looked, last, seen, said
        if time.monotonic() < looked + 1.0:
            return ""
        looked, ranks, now = time.monotonic(), away(), set[int]()
        for path in Path("/proc").glob("[0-9]*/environ") if here and launch.launcher == "variables" else ():
            with suppress(OSError):  # of another user, or ended
                variables = path.read_bytes().decode(errors="replace").split("\0")
                if f"MASTER_PORT={launch.port}" in variables:
                    now |= {int(each[5:]) for each in variables if each.startswith("RANK=") and each[5:].isdigit()}
        is_known = launch.rank in now  # processes that set RANK themselves are not found
        lost = [rank for rank in ranks if is_known and rank not in now | last]  # in an exec no variables are there
        if looked > begin + (0.5 if lost else _LATE) and (lost or not said) and said != (lost or ranks):
            said = lost or ranks
            why = "no process on this host has such a RANK" if lost else "a slow start is no fault"
            log.warning("waits for %s, not here after %.0f s: %s", name_ranks(None, said), looked - begin, why)
        gone = [rank for rank in lost if rank in seen or looked > begin + _GONE]
        last, seen = now, seen | now
        text = f"{name_ranks(None, gone)} ended before the ranks met, or did not start: no process of this host has "
        return f"{text}such a RANK and MASTER_PORT={launch.port}. Start all within {_GONE:g} s" if gone else ""

    return describe


def _wait_for_port(address: str, port: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), max(until - time.monotonic(), 0.1)).close()
            return
        except OSError:
            if time.monotonic() + 0.1 > until:
                raise
            time.sleep(0.1)


def enter_world(store: dist.Store, launch: Launch, timeout: float) -> None:
    """Write the world's name to a store that rank 0 hosts, or refuse a store that belongs to another world."""
    if launch.launcher == "torchrun":  # torchrun separates worlds itself, and its store outlives them
        return
    if launch.rank == 0:
        store.set(_WORLD, _title(launch))
        return
    there = _wait_for(store, _WORLD, timeout)
    if there != _title(launch):
        raise ValueError(
            f"rank {launch.rank} on {socket.gethostname()}: {launch.address}:{launch.port} belongs to another world "
            f"({there}), this is {_title(launch)}: give each world a MASTER_PORT, its ranks one WORLD_SIZE, and "
            f"those of a host one LOCAL_WORLD_SIZE"
        )


def _title(launch: Launch) -> str:
    return f"{launch.job} of {launch.world_size} ranks{' on one host' if launch.one_host else ''}"


def join_world(backend: str, store: dist.Store, rank: int, size: int, limit: timedelta) -> None:
    """Create the default process group after all ranks have met, or name the ranks that gave no answer."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # otherwise gloo connects every pair of ranks
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:  # all ranks fail at about the same time, because they began to wait together
        store.set(f"mpcore/late/{rank}", "")
        time.sleep(2.0)
        silent = [other for other in range(size) if not store.check([f"mpcore/late/{other}"])]
        who = f"{name_ranks(store, silent)} gave no answer" if silent else str(error).partition("\n")[0]
        raise ValueError(
            f"the ranks met, but could not make their process group within {limit.total_seconds():g} s: {who}. See "
            f"whether they run, and whether the link to them is up"
        ) from None


def meet(store: dist.Store, rank: int, size: int, timeout: float, absent: Absent = lambda _: "") -> str:
    """Agree with all ranks of this start attempt on a name that no earlier attempt used, and return it.

    torchrun keeps its store over a restart, with the addresses of dead ranks in it. Its count of restarts differs
    between nodes, so the count can't name the attempt. Therefore each rank writes a random number under its own ticket,
    and rank 0 answers each number with the attempt's name. Each rank then writes its host's name under the attempt's
    name. `absent` returns why some of these ranks will never arrive, or an empty text.

    Raises:
        ValueError: if ranks don't arrive in time or have ended, two processes have the same rank, or a rank may open
            too few files. The message names the ranks.
    """
    mine, until = os.urandom(8).hex(), time.monotonic() + timeout
    if rank:
        store.set(f"mpcore/hello/{store.add('mpcore/tickets', 1)}", mine)
    name = _wait_for(store, f"mpcore/welcome/{mine}", timeout) if rank else f"attempt {mine}"
    host, told, few, read = socket.gethostname(), f"{name}/mpcore/met", f"{name}/mpcore/files", set()
    if store.add(f"{name}/mpcore/is/{rank}", 1) > 1:
        other = _text(store, f"{name}/mpcore/host/{rank}")
        _tell(store, told, f"rank {rank} is there twice, on {other} and {host}: give each process a RANK of its own")
    else:
        store.set(f"{name}/mpcore/process/{rank}", this_process())
        store.set(f"{name}/mpcore/host/{rank}", host)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files < _FILES:  # gloo would end the process, or wait without an end
            text = f"rank {rank} on {host} may open {files} files, and needs {_FILES}: raise it, ulimit -n {_FILES}"
            _tell(store, few, text)
        if store.add(f"{name}/mpcore/here", 1) == size:
            _tell(store, told, _text(store, few) if store.check([few]) else _MET)

    def away() -> list[int]:
        return [other for other in range(size) if not store.check([f"{name}/mpcore/host/{other}"])]

    while not store.check([told]) and time.monotonic() < until + (1.0 if rank else 0.0):
        if rank == 0 and (text := absent(away)):
            _tell(store, told, text)
        for ticket in () if rank else set(range(1, store.add("mpcore/tickets", 0) + 1)) - read:
            if store.check([f"mpcore/hello/{ticket}"]):  # if its rank is dead, no rank reads the answer
                store.set(f"mpcore/welcome/{_text(store, f'mpcore/hello/{ticket}')}", name)
                read.add(ticket)
        time.sleep(min(0.01 + 2e-4 * size, 1.0))
    if not store.check([told]):
        late = away()
        hosts = sorted({_text(store, f"{name}/mpcore/host/{other}") for other in range(size) if other not in late})
        _tell(
            store, told, f"of {size} ranks {', '.join(map(str, late))} did not arrive within {timeout:g} s. The others "
            f"are on {', '.join(hosts)}: start the missing ones too, or read what ended them",
        )  # fmt: skip
    if (text := _text(store, told)) != _MET:
        raise ValueError(text)
    return name


def _tell(store: dist.Store, key: str, text: str) -> None:
    store.compare_set(key, "", text)  # the first message is kept


def _wait_for(store: dist.Store, key: str, timeout: float) -> str:
    try:
        store.wait([key], timedelta(seconds=timeout))
    except dist.DistStoreError:
        raise ValueError(f"rank 0 did not arrive within {timeout:g} s: start it too, or read what ended it") from None
    return _text(store, key)


def _text(store: dist.Store, key: str) -> str:
    return printable(store.get(key).decode(errors="replace"))
