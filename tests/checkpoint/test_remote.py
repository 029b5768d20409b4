"""Checkpoints in fsspec's file systems: equal to local ones, and whole whatever operation of the store fails."""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import mpcore as mp
from examples.gpt.arguments import parse
from mpcore.checkpoint import checkpoints, diff, inspect, latest, load, save, verify
from mpcore.checkpoint.remote import ObjectStore, as_path
from mpcore.checkpoint.store import LOCK, is_complete, old
from mpcore.interop.lora import add_lora, save_lora
from tests.pool import on_ranks

FAULTS: dict[str, Any] = {"first": 0, "last": 0, "now": 0}  # the store's operations that fail, and this one's number
OPERATIONS = ("pipe_file", "rm", "rm_file", "_open", "makedirs", "cp_file", "info", "ls", "cat_file", "find")


def count() -> bool:
    FAULTS["now"] += 1
    if FAULTS["now"] == FAULTS.get("other"):
        FAULTS.pop("save")()
    return FAULTS["first"] <= FAULTS["now"] <= FAULTS["last"]


def faulty(base: type, name: str) -> Any:
    def operation(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if count():
            raise OSError(28, "the store is full")
        file = getattr(base, name)(self, path, *args, **kwargs)
        if name == "_open":
            inner = file.write

            def write(data: Any) -> None:
                fails = count()
                inner(data[: len(data) // (1 + fails)])  # half of the data arrives
                if fails:
                    raise OSError(28, "the store is full")

            file.write = write
        return file

    return operation


for base in (MemoryFileSystem, LocalFileSystem):
    own = "faulty-file" if base is LocalFileSystem else "faulty-memory"
    body = {name: faulty(base, name) for name in OPERATIONS} | {"protocol": own}
    fsspec.register_implementation(own, type("Faulty", (base,), body), clobber=True)


def start(mesh: mp.Mesh, zero: int = 0, seed: int = 0) -> mp.Run:
    with torch.device("meta"):
        model = torch.nn.Sequential(
            mp.ColumnParallelLinear(6, 12, tp=mesh.tp), torch.nn.GELU(), mp.RowParallelLinear(12, 6, tp=mesh.tp)
        )
    return mp.prepare(
        model, mesh, blocks=[], seed=seed, data=mp.Zero(zero), optimizer=lambda model: mp.AdamW(model, lr=1e-2),
        loss=lambda y, target: (y - target).square().sum(),
    )  # fmt: skip


def step(run: mp.Run) -> float:
    rows = torch.arange(72.0).view(12, 6)[run.share(12).start : run.share(12).stop] / 72 + run.step
    run.forward_backward(rows.sin(), rows.cos(), tokens=12)
    return run.optimizer_step().loss


def trial(mesh: mp.Mesh, local: str, remote: str, zero: int, background: bool) -> None:
    run = start(mesh, zero)
    saving, note = None, {"deep/note.txt": b"said"}
    for _ in range(3):
        step(run)
        run.save(local, keep=2, beside=note)
        saving = run.save(remote, keep=2, background=background, after=saving, beside=note)
    if background:
        saving.wait()
    newest = latest(remote, run.mesh)
    assert [path.name for path in checkpoints(remote, run.mesh)] == ["step-00000003", "step-00000002"]
    if run.mesh.world.rank == 0:
        assert LOCK not in newest.sizes()
        assert diff(newest, f"{local}/step-00000003") == []
        assert inspect(newest).beside.keys() == {"deep/note.txt"}
    other = start(run.mesh, zero, seed=1)
    assert other.load(newest).step == 3
    assert step(other) == step(run)


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"tp": 2, "dp": 2}])
@pytest.mark.parametrize("background", [False, True])
def test_a_run_in_memory(tmp_path, sizes, background):
    remote = f"memory://{uuid.uuid4()}/run"
    mp.simulate(trial, str(tmp_path), remote, 0, background, **sizes)
    assert str(checkpoints(remote)[0]) == f"{remote}/step-00000003"


@pytest.mark.parametrize("name", ["run*", "run?"])
def test_a_name_in_a_store_is_no_pattern(name):
    remote = f"memory://{uuid.uuid4()}"
    for folder in ("run1", name):
        saved(as_path(f"{remote}/{folder}/step-00000001"), 1)
        assert str(latest(f"{remote}/{folder}")) == f"{remote}/{folder}/step-00000001"


@on_ranks(2)
def test_the_memory_of_one_process_is_no_store_of_two():
    with pytest.raises(ValueError, match="memory of one process, and 2 save"):
        start(mp.build_mesh(dp=2, device_type="cpu")).save(f"memory://{uuid.uuid4()}")


@on_ranks(3)
def test_a_run_of_processes_on_uneven_shards(tmp_path):
    mesh, remote = mp.build_mesh(dp=3, device_type="cpu"), f"faulty-file://{tmp_path}/remote"
    trial(mesh, f"{tmp_path}/local", remote, 3, True)
    run = start(mesh, 3)
    run.load(latest(remote, mesh))
    step(run)
    FAULTS.update(first=1, last=10**9 * (mesh.world.rank == 2), now=0)
    with pytest.raises(ValueError, match=r"step-00000004.*the store is full .*rank 2"):
        run.save(remote)
    FAULTS.update(last=0)
    assert run.load(latest(remote, mesh)).step == 3


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def saved(path: Path, seed: int, **about: Any) -> None:
    save(path, net(seed), mesh=mp.Mesh(), step=seed, beside={"note.txt": b"%d" % seed}, **about)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("kind", "dead", "replaced"), [
    ("memory", False, 0), ("file", True, 2), *(
        pytest.param(kind, dead, replaced, marks=SLOW)
        for kind in ("memory", "file") for dead in (False, True) for replaced in (0, 1, 2)
        if (kind, dead, replaced) not in (("memory", False, 0), ("file", True, 2))
    ),
])  # fmt: skip
def test_a_checkpoint_is_whole_whatever_operation_of_a_save_fails(tmp_path, kind, dead, replaced):
    """Each operation of a save fails in turn, alone or with all that follow, as if the process were killed.

    The save writes a new checkpoint, or one over another, or over one that replaced another.
    """
    root = as_path(f"faulty-{kind}://{tmp_path}/{uuid.uuid4()}")
    fault, failed = 0, True
    while failed:
        fault, error = fault + 1, ""
        run = root / str(fault)
        last, path = run / "step-1", run / ("step-1" if replaced else "step-2")
        for _ in range(max(replaced, 1)):
            saved(last, 1)
        FAULTS.update(first=fault, last=10**9 if dead else fault, now=0)
        try:
            saved(path, 2, keep=1)
        except ValueError as problem:
            error = str(problem)
        assert not error or (str(run) in error and "the store is full" in error)
        failed = bool(error) or FAULTS["now"] >= fault  # what only cleans up may fail in silence
        FAULTS.update(first=0, last=0)
        newest = latest(run)
        model = net(0)
        step = load(newest, model, mesh=mp.Mesh()).step
        assert torch.equal(model.weight, net(step).weight)
        assert verify(newest) == []
        saved(path, 2, keep=1)
        assert load(path, model, mesh=mp.Mesh()).step == 2
        assert len(checkpoints(run)) == len([folder for folder in run.iterdir() if folder.sizes()]) == 1
    assert fault > 20


@pytest.mark.parametrize("dead", [False, True])
def test_no_checkpoint_is_missing_whatever_operation_of_a_read_fails(tmp_path, dead):
    """fsspec's `find` leaves out a folder whose listing fails: the newest checkpoint was ignored."""
    run, fault = as_path(f"faulty-file://{tmp_path}"), 0
    for step in (1, 2):
        saved(run / f"step-{step}", step)
    while FAULTS["now"] >= fault:
        FAULTS.update(first=(fault := fault + 1), last=10**9 if dead else fault, now=0)
        with suppress(ValueError):
            assert latest(run) == run / "step-2"
    FAULTS.update(first=0, last=0)
    assert fault > 8


@pytest.mark.parametrize("replaced", [False, True])
def test_of_two_saves_of_one_path_one_is_left_and_the_other_is_refused(replaced):
    """The second save runs before each operation of the first in turn, until the first removes what it replaced."""
    root, fault, refused = as_path(f"faulty-memory://{uuid.uuid4()}"), 0, 0

    def other() -> None:
        if not replaced or is_complete(path) or not is_complete(old(path)):
            saved(path, 3)

    while "save" not in FAULTS:
        path = root / str(fault := fault + 1) / "a"
        if replaced:
            saved(path, 1)
        FAULTS.update(now=0, other=fault, save=other)
        try:
            saved(path, 2)
        except ValueError as error:
            refused += f"{path}: another job" in str(error)
        FAULTS.pop("other")
        (found,) = checkpoints(path.parent)
        assert verify(found) == []
        assert load(path, net(0), mesh=mp.Mesh()).step in (2, 3)
    FAULTS.pop("save")
    assert refused > 8


def test_what_is_no_checkpoint_in_a_store_stays_and_a_damaged_one_is_named():
    root = f"memory://{uuid.uuid4()}"
    fsspec.filesystem("memory").pipe_file(f"{root}/other/notes.txt", b"mine")
    with pytest.raises(ValueError, match=f"{root}/other is there and is no checkpoint"):
        saved(as_path(f"{root}/other"), 1)
    saved(as_path(f"{root}/a"), 1)
    shown, store = as_path(f"{root}/a/note.txt"), fsspec.filesystem("memory")
    opened = ObjectStore().open(shown)
    shown.write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"note.txt: .*0 bytes from 0 to 1: it was cut"):
        opened.read(0, opened.size)
    shown.write_bytes(b"1")
    (file,) = (f"memory:/{name}" for name in store.glob(f"{root}/a/model-*"))
    data = bytearray(store.cat_file(file))
    data[-1] ^= 1
    store.pipe_file(file, bytes(data))
    assert file in verify(f"{root}/a")[0]
    with pytest.raises(ValueError, match=r"model/weight.*is damaged"):
        load(f"{root}/a", net(0), mesh=mp.Mesh())
    store.pipe_file(file, bytes(data[:-1]))
    with pytest.raises(ValueError, match=f"{file} has {len(data) - 1} bytes, written were {len(data)}"):
        load(f"{root}/a", net(0), mesh=mp.Mesh())
    assert latest(root) is None


def test_pitfall_76_a_url_is_never_a_local_folder():
    for url, words in (("nowhere://a", "nowhere"), ("simplecache::s3://a/b", "chains"), (Path("s3://a/b"), "a URL")):
        with pytest.raises(ValueError, match=words):
            saved(url, 1)
    with pytest.raises(ValueError, match="a URL"):
        save_lora(add_lora(torch.nn.Sequential(net(0)), targets="0"), "s3://a/b")
    with pytest.raises(ValueError, match="--out"):
        parse(["--out", "s3://a/b"])
