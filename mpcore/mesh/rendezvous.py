"""Join the launcher's processes into one world, whatever earlier attempts left in its store."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist


def is_launched() -> bool:
    """Tell whether torchrun has started this process, or another launcher that sets the variables torch reads.

    Raises:
        ValueError: if there are other processes, and a variable that it takes to find them is missing.
    """
    if dist.is_torchelastic_launched():
        return True
    if int(os.environ.get("WORLD_SIZE") or 1) < 2:
        return False
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} isn't set: start with torchrun, or "
            f"set them for each process (and LOCAL_RANK and LOCAL_WORLD_SIZE, for its GPU)"
        )
    return True


def start_world(backend: str, timeout: float | None) -> None:
    """Make the default process group from the launcher's variables, whatever earlier attempts left in its store."""
    limit = dist.default_pg_timeout if timeout is None else timedelta(seconds=timeout)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=limit)))
    store = dist.PrefixStore(meet(store, rank, size, limit.total_seconds()), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Agree on a name for this attempt to start, which no earlier attempt has used: all of its ranks call this.

    torchrun keeps its store over a restart, with the addresses of dead ranks in it, and its count of restarts differs
    between nodes. So each rank says hello with a number of its own, and rank 0 answers that number.

    Raises:
        ValueError: naming the ranks that didn't arrive within `timeout` seconds.
    """
    mine, until = os.urandom(8).hex(), time.monotonic() + timeout
    if rank:
        store.set(f"mpcore/hello/{rank}", mine)
        name = _wait_for(store, f"mpcore/welcome/{mine}", timeout)
        store.set(f"mpcore/here/{name}/{rank}", "")
        # Rank 0 tells when it gave up; without it, nobody can.
        missing = _wait_for(store, f"mpcore/met/{name}", max(until - time.monotonic(), 0) + 10)
    else:
        name, waiting, answered = mine, set(range(1, size)), set()
        while waiting and time.monotonic() < until:
            for other in sorted(waiting):
                hello = f"mpcore/hello/{other}"
                number = store.get(hello).decode() if store.check([hello]) else None
                if number is not None and number not in answered:  # perhaps of a dead one: then nobody reads the answer
                    answered.add(number)
                    store.set(f"mpcore/welcome/{number}", name)
                if store.check([f"mpcore/here/{name}/{other}"]):
                    waiting.discard(other)
            time.sleep(0.01 if waiting else 0)
        missing = ", ".join(map(str, sorted(waiting)))
        store.set(f"mpcore/met/{name}", missing)
    if missing:
        raise ValueError(f"of {size} ranks {missing} did not arrive within {timeout:g} s")
    return f"attempt {name}"


def _wait_for(store: dist.Store, key: str, timeout: float) -> str:
    try:
        store.wait([key], timedelta(seconds=timeout))
    except dist.DistStoreError:
        raise ValueError(f"rank 0 did not arrive within {timeout:g} s") from None
    return store.get(key).decode()
