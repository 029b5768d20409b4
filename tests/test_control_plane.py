"""How ranks agree, share their process groups and start: what it costs, and whom it names."""

import gc
import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpcore import Mesh, build_mesh
from mpcore._torch.distributed import clone_store, default_store
from mpcore.collectives import all_reduce
from mpcore.mesh.agreement import Agreement, check_same, exchange, raise_together
from mpcore.mesh.axis import Axis
from mpcore.mesh.rendezvous import meet
from mpcore.tools.fault_tolerance import SharedRequests
from tests.forked import Forked
from tests.pool import mesh, on_ranks
from tests.test_launch import free_port


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- agreement ----------------------------------------------------------------------------------------------------


def check_values(size: int):
    me, world = dist.get_rank(), dist.group.WORLD
    large = bytes([me]) * (9 * 2**20)  # a TCPStore refuses 8 MiB
    assert exchange(None, large if me == 1 else b"", world, lambda parts: [len(part) for part in parts]) == [
        len(large) if rank == 1 else 0 for rank in range(size)
    ]
    assert exchange(None, (me, None), world) == [(rank, None) for rank in range(size)]
    with pytest.raises(ValueError, match=r"^ZeroDivisionError: "):
        exchange(None, me, world, lambda ranks: 1 // ranks[0])  # rank 0's error is everybody's
    with pytest.raises(ValueError, match=rf"^lost \(on rank {size - 1} of {size}\)$"):
        exchange(OSError("lost") if me == size - 1 else None, 0, world)
    raise_together(None, Axis())  # alone, nobody is asked


def test_ranks_exchange_values_of_any_size_and_errors(ranks):
    for size in (2, 3, 4):
        ranks(size, check_values, size)


def keys_after(times: int) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    check_same("colour", "red")
    raise_together(None)
    counts = []
    for _ in range(times):
        check_same("colour", "red")
        with pytest.raises(ValueError, match="disagree"):
            check_same("number", str(dist.get_rank()))
        exchange(None, dist.get_rank(), dist.group.WORLD)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def test_the_store_does_not_grow_with_the_number_of_agreements(ranks):
    for counts in ranks(4, keys_after, 12):
        assert counts[-1] == counts[3], counts


def check_late(limit: float):
    me = dist.get_rank()
    store, usual = default_store(), default_store().timeout
    store.set_timeout(timedelta(seconds=limit))
    dist.barrier()
    began = time.monotonic()
    if me in (1, 3):
        time.sleep(limit + 1)
        check_same("colour", "red")  # all have come now
        took = 0.0
    else:
        with pytest.raises(ValueError, match=r"^ranks 1, 3 of 4 did not reach the check of the colour within 2 s"):
            check_same("colour", "red")
        took = time.monotonic() - began
    store.set_timeout(usual)
    check_same("colour", "red")
    return took


def test_ranks_that_do_not_come_to_an_agreement_are_named_on_those_that_do(ranks):
    for seconds in ranks(4, check_late, 2.0):
        assert seconds < 2 + 1.5


def check_wishes(steps: int):
    me, found, other = dist.get_rank(), [], clone_store()
    wishes, old = SharedRequests(mesh(dp=4).world), SharedRequests(mesh(dp=4).world)
    for step in range(1, steps):
        dist.all_reduce(torch.ones(1))  # no rank is a step ahead
        found.append(sorted(wishes.after_step(step, stop=me == 2 and step == 3, failed=step == 3)))
        assert old.after_step(step, stop=False) == set()  # of a run before in the same process
        if step == 1:  # from now on nothing reaches the store
            busy = threading.Thread(target=default_store().wait, args=([f"idle/{me}"], timedelta(seconds=60)))
            busy.start()
    assert busy.is_alive()
    other.set(f"idle/{me}", "")
    busy.join()
    return found


def test_a_wish_of_one_rank_is_granted_on_all_after_the_next_step(ranks):
    for found in ranks(4, check_wishes, 7):
        assert found == [[], [], [], ["failed", "stop"], [], []]


class CountedStore:
    """A store that counts what one rank asks of it: requests, and bytes of keys, values and answers."""

    timeout = timedelta(seconds=300)

    def __init__(self, store):
        self.store, self.requests, self.bytes = store, 0, 0

    def __getattr__(self, name):
        def counted(*given):
            answer = getattr(self.store, name)(*given)
            self.requests += 1
            self.bytes += size_of([*given, answer])
            return answer

        return counted


def size_of(x):
    if isinstance(x, list):
        return sum(map(size_of, x))
    return 0 if x is None else 1 if isinstance(x, bool) else 8 if isinstance(x, int) else len(x)


class Returns(Agreement):
    """A rank that comes before the last one: it finds no answer yet, and returns."""

    def _hear(self, key):
        self.store.check([key])
        return b""


@pytest.mark.parametrize("size", [4, 16, 64, 512])
def test_what_a_rank_asks_of_the_store_does_not_grow_with_the_world(size):
    held = dist.HashStore()
    stores = [CountedStore(held) for _ in range(size)]
    for _ in range(2):  # the second one deletes the keys of the first
        for store in stores:
            store.requests = store.bytes = 0
        late = [Returns(store, rank, size) for rank, store in enumerate(stores[:-1])]
        for agreement in late:
            agreement.same("plan")
        assert Agreement(stores[-1], size - 1, size).same("plan")
        for agreement in late:  # all look again
            assert Agreement._hear(agreement, agreement._key("result")).startswith(b"same")
    assert sum(store.requests for store in stores) <= 6 * size + 8
    assert max(store.requests for store in stores) <= 14  # the last one settles it and clears up
    assert sum(store.bytes for store in stores) <= 160 * size + 300


@pytest.mark.parametrize("size", [pytest.param(32, marks=pytest.mark.slow), 8])
def test_a_world_starts_with_few_files_a_rank(size, monkeypatch):
    """Ranks are threads of this process, each with a connection of its own to one real store."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    limit = timedelta(seconds=300)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    gc.collect()
    before, started, groups = open_files(), threading.Barrier(size + 1), [None] * size

    def start(rank):
        try:
            store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=limit)
            here = dist.PrefixStore(meet(store, rank, size, 300.0), store)
            assert Agreement(dist.PrefixStore("agree", here), rank, size).same("plan")
            groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("world", here), rank, size, limit)
            started.wait()
            started.wait()  # until the files are counted
        except BaseException:
            started.abort()
            raise

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    started.wait()
    opened = open_files() - before
    started.wait()
    for thread in threads:
        thread.join()
    # of each connection one end is the store's; with every rank connected to every other it would be size + 3
    assert (opened - size) / size <= 6


# --- groups -------------------------------------------------------------------------------------------------------


def check_many_meshes(count: int):
    sizes = [{"tp": 2, "pp": 2}, {"tp": 4}, {"cp": 2, "dp": 2, "ep": 2}, {"pp": 4}, {"tp": 2, "cp": 2}]
    files = []
    for i in range(count):
        m = build_mesh(device_type="cpu", **sizes[i % len(sizes)])
        assert int(exchange(None, m.tp.rank, m.tp.group, sum)) == sum(range(m.tp.size))
        total = torch.ones(())
        if m.pp.group is not None:
            dist.all_reduce(total, group=m.pp.group)
        assert total == m.pp.size
        files.append(open_files())
    return files


def test_meshes_of_one_process_share_their_groups(ranks):
    for files in ranks(4, check_many_meshes, 40):
        assert max(files[10:]) == files[10], "files grow with the number of meshes"
        assert files[-1] < 256


def check_close():
    def total(axis: Axis) -> float:
        return all_reduce(torch.ones(()), axis).item()

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1799))  # torch's default is 1800
    first, second = build_mesh(etp=3, device_type="cpu"), build_mesh(etp=3, device_type="cpu")
    assert first.etp.group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 1799
    group = first.etp.group_name
    assert second.etp.group_name == group
    assert first.etp.group is not first.job.group
    assert total(first.etp) == 3
    before = open_files()
    first.close()
    first.close()  # a second time does nothing
    assert total(second.etp) == 3
    second.close()
    with pytest.raises(RuntimeError, match="group"):
        total(second.etp)
    assert total(second.job) == 3
    del first, second
    gc.collect()
    assert open_files() < before
    with build_mesh(etp=3, device_type="cpu") as third:
        assert third.etp.group_name != group
        assert total(third.etp) == 3
    with pytest.raises(RuntimeError, match="group"):
        total(third.etp)


def test_a_group_ends_with_the_last_mesh_that_uses_it(ranks):
    ranks(3, check_close)
    with Mesh() as alone:
        alone.close()


@on_ranks(4)
def test_ranks_that_made_other_groups_are_refused_as_torch_would_name_the_next_ones_apart():
    me = dist.get_rank()
    if me == 1:
        dist.new_group([1])
    with pytest.raises(ValueError, match=r"ranks 0 and 1 disagree about the process groups made before"):
        build_mesh(tp=2, device_type="cpu")
    if me != 1:
        dist.new_group([1])
    build_mesh(tp=2, device_type="cpu")


# --- the start ----------------------------------------------------------------------------------------------------


def test_a_rank_that_is_there_twice_is_named_on_all():
    store, told = dist.HashStore(), []

    def one(rank: int) -> None:
        with pytest.raises(ValueError, match="rank 1 is there twice, on ") as error:
            meet(store, rank, 3, 20.0)
        told.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 3


FEW_FILES = """
import os, resource, mpcore
if os.environ["RANK"] == os.environ["LIMITED"]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
mpcore.build_mesh(tp=2)
"""


def test_a_rank_that_may_open_too_few_files_is_named_on_all():
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "LIMITED": "1"}
    variables |= {"MASTER_PORT": str(free_port())}
    ranks = [Forked(FEW_FILES, env={**os.environ, **variables, "RANK": r, "LOCAL_RANK": r}) for r in "01"]
    for rank in ranks:
        assert f"rank 1 on {socket.gethostname()} may open 24 files" in rank.communicate(timeout=60)[1]
        assert rank.returncode == 1


GUARDED = """
import time
from mpcore.mesh import guard
guard.GRACE_S = 0.2
@guard.guard_start
def start(timeout=None):
    time.sleep(timeout)
start(timeout=0.05)  # it ends in time, and so does nothing else
time.sleep(0.5)
guard.guard_start(lambda timeout: time.sleep(60))(timeout=0.3)
"""


def test_a_start_that_hangs_ends_and_names_the_host_that_gives_no_answer():
    variables = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    run = Forked(GUARDED, env={**os.environ, **variables})
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 70, stderr
    for wrong in (timedelta(minutes=10), "600", 0, -20.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="is not a number of seconds above 0 and below 1e8: take such as 600"):
            build_mesh(timeout=wrong)  # type: ignore[arg-type]
    assert "the mesh was not built within 0.3 s: the host of rank 0 at 127.0.0.1:1 gives no answer" in stderr
