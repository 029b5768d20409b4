"""What a local user, a neighbour on the network or a folder's author may try. All of it is refused: `make attack`.

Only loopback is used, and only ports of these tests' own jobs.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.gpt import indexed_dataset
from examples.gpt.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from mpcore.checkpoint.format import Chunk, Entry
from mpcore.checkpoint.store import Store
from mpcore.checkpoint.tensor_file import TensorFile, write_tensors
from mpcore.mesh import secret
from mpcore.mesh.rendezvous import meet
from mpcore.tools.fault_tolerance.faults import check_writable
from mpcore.tools.fault_tolerance.metrics import write_whole
from tests.forked import Forked
from tests.quick import some
from tests.test_launch import free_port

START = """
import sys, types, torch, mpcore
import torch.distributed as dist
from mpcore import collectives
from mpcore.mesh.agreement import check_same, gather_objects
from mpcore.tools.fault_tolerance import leave_together, record
GRACE = 0.5
"""
# Two ranks exchange a value at each line that they read; rank 1 waits before the exchange of the second line.
JOB = """
mesh = mpcore.build_mesh(tp=2)
with leave_together(mesh, GRACE):
    print("group", f"{mesh.tp.group_name}.{dist.get_global_rank(mesh.tp.group, 0)}", flush=True)
    for line in sys.stdin:
        print(gather_objects([mesh.tp.rank, line.strip()], mesh.tp.group), flush=True)
"""
# Rank 1 takes five steps, rank 0 six.
EARLY = """
mesh = mpcore.build_mesh(tp=2)
with leave_together(mesh, GRACE) as leaving:
    print("group", "x", flush=True)
    leaving.run = run = types.SimpleNamespace(step=0)
    while run.step < 6 - mesh.tp.rank:
        collectives.all_reduce(torch.ones(1), mesh.tp)
        run.step += 1
"""
# Rank 0 calls a group's first collective: gloo waits for the address of rank 1, which a dead rank doesn't write.
FIRST = """
mesh = mpcore.build_mesh(tp=2)
with leave_together(mesh, GRACE):
    print("group", "x", flush=True)
    sys.stdin.readline()
    collectives.all_reduce(torch.ones(1), mesh.tp)
"""
# Two ranks whose shapes differ, as with batches of another size.
SHAPES = """
record()
mesh = mpcore.build_mesh(tp=2)
collectives.all_reduce(torch.ones(1), mesh.tp)
with leave_together(mesh, GRACE):
    print("group", "x", flush=True)
    collectives.all_reduce(torch.ones(6 + 2_000_000 * (1 - mesh.tp.rank)), mesh.tp)
    collectives.all_reduce(torch.ones(3), mesh.tp)
"""
# Two ranks whose collectives differ so that gloo lets both wait.
WAITS = """
mesh = mpcore.build_mesh(tp=2)
collectives.all_reduce(torch.ones(1), mesh.tp)
with leave_together(mesh, GRACE):
    print("group", "x", flush=True)
    if mesh.tp.rank == FIRST:
        EXTRA
    for n in (6, 8):
        collectives.all_reduce(torch.ones(n), mesh.tp)
"""


class Job:
    """Two ranks on this host, which rank 0 keeps the store of."""

    def __init__(self, code: str = JOB) -> None:
        self.port = free_port()
        base = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port)}
        base |= {"LOCAL_WORLD_SIZE": "2"}
        self.ranks = [Forked(START + code, env={**base, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
        first = [self.hear(rank) for rank in range(2)]
        assert all(line.startswith("group ") for line in first), [rank.communicate()[1] for rank in self.ranks]
        self.group = first[0].split()[1]

    def hear(self, rank: int) -> str:
        return self.ranks[rank].stdout.readline()

    def say(self, rank: int) -> None:
        self.ranks[rank].stdin.write("x\n")
        self.ranks[rank].stdin.flush()

    def end(self) -> list[tuple[int, str]]:
        """Tell the ranks that no line follows, and return the status and the errors of each."""
        for rank in self.ranks:  # before the first one is waited for: each waits for the others
            rank.stdin.close()
        try:
            errors = [rank.communicate(timeout=60)[1] for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()
        return [*zip([rank.returncode for rank in self.ranks], errors, strict=True)]


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.canary),)


def attack_store(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=5), wait_for_workers=False)


@pytest.mark.parametrize("text", some(b'[null,[1,"wrong"]]', None, of=[b"null"]), ids=["a value", "pickle", "json"])
def test_a_message_of_a_stranger_runs_no_code_and_is_refused(tmp_path, text):
    job = Job()
    store, canary = attack_store(job.port), tmp_path / "canary"
    data = pickle.dumps((None, Payload(canary))) if text is None else text
    for rank in (0, 1):
        job.say(rank)
    assert [job.hear(rank) for rank in (0, 1)] == ["[[0, 'x'], [1, 'x']]\n"] * 2
    (at,) = (key for key in store.list_keys() if key.endswith("/at/1") and job.group in key)
    prefix, number = at.removesuffix("/at/1"), int(store.get(at))
    job.say(0)  # rank 0 waits for the message of rank 1
    time.sleep(0.3)
    store.set(f"{prefix}/{number + 1}/of/1", b"1 " + data)
    store.set(f"{prefix}/{number + 1}/full", "")
    ends = job.end()
    assert not canary.exists()
    assert "isn't signed with the job's secret" in ends[0][1]
    assert ends[0][0] != 0


def test_a_cause_that_a_stranger_invents_is_not_shown():
    job = Job()
    store = attack_store(job.port)
    (key,) = {k.removesuffix("mpcore/blocks/0") for k in store.list_keys() if k.endswith("mpcore/blocks/0")}
    store.set(f"{key}mpcore/cause", b"\x1b]0;owned\x07 rank 0 was hacked")
    for rank in job.ranks:  # each waits for a line, until its watch ends it
        rank.wait(60)
    for _, text in job.end():
        assert "hacked" not in text
        assert "\x1b" not in text
        assert "isn't signed with the job's secret" in text


def test_the_store_of_one_host_listens_on_loopback():
    job = Job()
    tables = [Path(f"/proc/net/tcp{six}") for six in ("", "6")]
    listening = [line.split()[1] for table in tables if table.exists() for line in table.read_text().splitlines()[1:]
                 if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == job.port]  # fmt: skip
    assert listening == [f"0100007F:{job.port:04X}"]
    assert [status for status, _ in job.end()] == [0, 0]


def test_ranks_of_other_secrets_are_told_so(monkeypatch):
    monkeypatch.setenv(secret.NAME, "a")
    message = secret.seal("key", b"said")
    assert secret.unseal("key", message) == b"said"
    for key, changed in (("other", message), ("key", message[:-1] + b"x"), ("key", b"said"), ("key", b"")):
        with pytest.raises(ValueError, match="isn't signed"):
            secret.unseal(key, changed)
    monkeypatch.setenv(secret.NAME, "b")
    with pytest.raises(ValueError, match="isn't signed"):
        secret.unseal("key", message)


def test_values_are_the_same_on_the_other_side():
    value = [None, True, -1, 2.5, float("inf"), "a\x1b", b"\x00\xff", (1, (2,)), {1, 2}, {3: {"a": [()]}, "b": {}}]
    assert secret.decode(secret.encode(value)) == value
    for wrong in (object(), [Path("x")], {1: 2j}):
        with pytest.raises(ValueError, match="can't be sent to other ranks"):
            secret.encode(wrong)
    for data in (b"", b"\x80\x04]", b'{"a":1,"b":2}', b"[" * 100_000, b'{"bytes":"xy"}', b"{}"):
        with pytest.raises(ValueError, match="damaged, or signed with another MPCORE_SECRET: "):
            secret.decode(data)


def test_texts_of_the_rendezvous_are_shown_escaped():
    store = dist.HashStore()
    original = store.get

    def get(key: str) -> bytes:
        return b"\x1b[31m\xff" if key.endswith("/mpcore/met") else original(key)

    class Store:
        def __getattr__(self, name: str) -> Any:
            return get if name == "get" else getattr(store, name)

    with pytest.raises(ValueError, match=r"\\x1b\[31m") as caught:
        meet(Store(), 0, 1, 2.0)  # type: ignore[arg-type]
    assert "\x1b" not in str(caught.value)


# --- links and predictable names --------------------------------------------------------------------------------------


def test_no_file_is_written_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    for name in (".rank0.tmp", "config.tmp.json", ".lock"):
        (out / name).symlink_to(precious)
    check_writable(out, 0)
    write_whole(out / "config.json", "{}")
    with pytest.raises(OSError, match="symbolic links"):
        Store().lock(out)
    assert precious.read_text() == "mine"
    assert (out / "config.json").read_text() == "{}"


def test_a_private_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = secret.private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="with mode 777"):
        secret.private_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"mpcore-\d+ belongs to user"):
        secret.private_folder()


# --- files that are cut while they are mapped -------------------------------------------------------------------------


def test_files_that_are_cut_while_they_are_mapped_are_named(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    _, sums = write_tensors(path, {"a": torch.ones(100_000)})
    chunk = Chunk(path.name, "a", (0,), (100_000,), sums["a"])
    file, entry = TensorFile(path), Entry((100_000,), "F32", (chunk,))
    assert float(file.whole("a").sum()) == 100_000
    with IndexedDatasetWriter(tmp_path / "c", "uint16") as writer:
        for _ in range(2000):
            writer.add_document([1] * 5)
    corpus = IndexedDataset(tmp_path / "c")
    assert int(corpus[-1].sum()) == 5
    read, index = indexed_dataset._read_header, tmp_path / "c.idx"
    monkeypatch.setattr(indexed_dataset, "_read_header", lambda *args: (read(*args), os.truncate(index, 45))[0])
    for text in ("c.idx was cut to 45 bytes", "c.idx: 2000 sequences .* but the file has 45"):
        with pytest.raises(ValueError, match=text):
            IndexedDataset(tmp_path / "c")
    assert int(corpus[-1].sum()) == 5  # an open corpus doesn't need its index
    for name in (path, tmp_path / "c.bin"):
        os.truncate(name, 4096)
    for read in (lambda: file.whole("a"), lambda: file.problem(entry, chunk)):
        with pytest.raises(ValueError, match=r"x.safetensors was cut to 4096 bytes"):
            read()
    with pytest.raises(ValueError, match=r"c.bin was cut to 4096 bytes"):
        corpus[-1]


# --- what ends ranks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [JOB, FIRST], ids=["an agreement", "a first collective"])
def test_a_rank_that_is_killed_before_the_first_step_is_named(code):
    """Also if a stranger says that it left, ended well or is alive."""
    job = Job(code)
    store = attack_store(job.port)
    (at,) = {key.removesuffix("blocks/0") for key in store.list_keys() if key.endswith("mpcore/blocks/0")}
    for word in ("left/1", "ended/1/1", "alive/1"):
        store.set(f"{at}{word}", "")
    if code == FIRST:
        job.ranks[1].kill()
    job.say(0)  # waits for rank 1, which no broken connection ends
    time.sleep(0.3)
    job.ranks[1].kill()
    began = time.monotonic()
    assert job.ranks[0].wait(60) != 0
    assert time.monotonic() - began < 15 + 15  # four seconds on an idle machine
    assert re.search("rank 1 (gives no answer|of this host ended)", job.end()[0][1])


def test_ranks_whose_collectives_differ_say_what_they_called_last():
    (status, text), (aborted, stack) = Job(SHAPES).end()
    assert status == 70
    assert "its last collective was all_reduce(tp) of [2000006]" in text
    assert aborted == -signal.SIGABRT
    assert 'File "<string>", line 14 in <module>' in stack


EXTRA = "all_gather(torch.ones(5, 5), mesh.tp, 0)", "all_reduce(torch.ones(8), mesh.tp)"


@pytest.mark.parametrize(("first", "extra"), some((0, EXTRA[0]), (1, EXTRA[1]), of=[(1, EXTRA[0]), (0, EXTRA[1])]))
def test_ranks_that_wait_in_different_collectives_are_ended_with_both_calls(first, extra):
    """Also if a stranger overwrites once what a rank says that it waits for."""
    job = Job(WAITS.replace("EXTRA", f"collectives.{extra}").replace("FIRST", str(first)))
    store, until = attack_store(job.port), time.monotonic() + 60
    while not (keys := [key for key in store.list_keys() if key.endswith("mpcore/stands/1/0")]):
        assert time.monotonic() < until, [rank.kill() for rank in job.ranks]
        time.sleep(0.02)
    store.set(keys[0], b"x" * 99)
    for status, text in job.end():
        assert status == 70
        assert f"rank {first} entered {extra[:10]}(tp) of" in text
        assert f"rank {1 - first} entered all_reduce(tp) of [6]" in text


@pytest.mark.parametrize("first", some(1, of=[0]))
def test_an_agreement_of_one_rank_is_ended_where_the_other_waits_in_a_collective(first):
    code = WAITS.replace("EXTRA", "check_same('rate', '1')").replace("FIRST", str(first))
    for status, text in Job(code).end():
        assert status == 70, text
        assert re.search(rf"rank {first}: waits at .+ for rank {1 - first}\n  rank {1 - first}: waits in all_re", text)


def test_a_rank_that_ends_its_loop_early_is_named_with_its_step():
    _, text = Job(EARLY).end()[0]
    assert "rank 1 ended its loop after step 5, rank 0 is in step 6" in text
