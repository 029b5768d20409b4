"""What a save writes of its arguments, byte by byte, and what it leaves on the disk: in one process."""

from __future__ import annotations

import copy
import json
import logging
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.checkpoint import folders, load, loading, pieces, report, saving, tensor_file
from mpcore.checkpoint.folders import checkpoints, prune, read_complete, resolve
from mpcore.checkpoint.format import Chunk, Entry, FileRecord, read_manifest
from mpcore.checkpoint.tensor_file import TensorFile, host_memory, in_threads, write_tensors
from mpcore.tools import checkpoint as command


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


ABOUT: dict[str, Any] = {
    "mesh": mp.Mesh(), "step": np.int64(7), "sample": np.int32(40), "seed": np.uint8(5), "config": {"a": [1, (2,)]},
    "extra": {"scale": 2.0}, "keep": 2, "keep_every": 3, "beside": {"note.txt": b"said", "deep/x": b"y"},
}  # fmt: skip


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_every_argument_of_a_save_is_in_its_checkpoint(tmp_path, monkeypatch, how):
    pruned: list = []
    monkeypatch.setattr(saving, "prune", lambda *given, **more: pruned.append((given, more)))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    path = tmp_path / "c"
    saved: Any = getattr(saving, how)(path, net, optimizer, **ABOUT)
    if how == "save_async":
        waited = saved.wait()
        assert saved.done
        assert not saved.failed
        assert saved.seconds > 0
        assert saved.bytes == sum(file.stat().st_size for file in path.glob("*.safetensors"))
        saved = waited
    assert saved == path
    assert pruned == [((tmp_path, 2, 3), {"spare": path})]
    found = read_manifest(path)
    assert (found.step, found.sample, found.seed) == (7, 40, 5)
    assert (found.config, found.extra) == ({"a": [1, [2]]}, {"scale": 2.0})
    assert found.mesh == dict.fromkeys(("tp", "cp", "pp", "ep", "dp"), 1)
    assert found.optimizer is not None
    assert found.optimizer[0]["params"] == ["bias", "weight"]
    assert (path / "note.txt").read_bytes() == b"said"
    assert (path / "deep" / "x").read_bytes() == b"y"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_what_a_save_is_not_told_has_its_usual_value(tmp_path, monkeypatch, how):
    monkeypatch.setattr(saving, "prune", pytest.fail)
    saved: Any = getattr(saving, how)(tmp_path / "c", model(), mesh=mp.Mesh(), step=1)
    path = saved.wait() if how == "save_async" else saved
    found = read_manifest(path)
    assert (found.sample, found.seed, found.config, found.extra, found.optimizer) == (0, None, {}, {}, None)
    for name in ("config", "extra"):
        for wrong in ({"x": float("nan")}, {"x": object()}):
            with pytest.raises(ValueError, match=f"{name} can't be written as JSON: "):
                saving.save(tmp_path / "d", model(), mesh=mp.Mesh(), step=1, **{name: wrong})


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pitfall_60_weights_that_are_not_finite_are_neither_written_nor_read(tmp_path, how, value):
    """Also where one rank alone has one. The good checkpoint stays, and a bad one changes nothing."""
    said = r"model/weight .* holds NaN or infinity"

    def start(bad: bool) -> tuple[mp.Mesh, nn.Module]:
        on = mp.build_mesh(tp=2, device_type="cpu")
        net = mp.ColumnParallelLinear(2, 4, tp=on.tp)
        net.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        with torch.no_grad():
            net.weight[0, 1] = value if bad and on.tp.rank else 1.0
        return on, net

    def older() -> None:
        on, net = start(bad=True)
        saving.save(tmp_path / "old", net, mesh=on, step=2)

    def trial() -> None:
        on, net = start(bad=False)
        saving.save(tmp_path / "run" / "step-1", net, mesh=on, step=1)
        kept = copy.deepcopy(net.state_dict())
        with pytest.raises(ValueError, match=said):
            loading.load(tmp_path / "old", net, mesh=on, check_bytes=False)
        assert all(torch.equal(x, kept[name]) for name, x in net.state_dict().items())
        with pytest.raises(ValueError, match=said):
            getattr(saving, how)(tmp_path / "run" / "step-2", start(bad=True)[1], mesh=on, step=2, keep=1)
        loading.load(tmp_path / "run" / "step-1", net, mesh=on)

    with mock.patch.object(saving, "check_finite"):  # as an older release wrote it
        mp.simulate(older, ranks=2)
    mp.simulate(trial, ranks=2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-1"]


def test_a_save_in_the_background_waits_for_the_one_before_and_tells_its_error_once(tmp_path, monkeypatch):
    order: list = []
    before: Any = SimpleNamespace(wait=lambda: order.append("waited"))
    monkeypatch.setattr(saving, "_write", lambda snapshot, line: order.append(("wrote", line)) or 1 // 0)
    saved = saving.save_async(tmp_path / "c", model(), mesh=mp.Mesh(), step=1, after=before)
    saved._thread.join(10)  # type: ignore[union-attr]
    assert order == ["waited", ("wrote", "save")]
    assert saved._thread.name == "save c"  # type: ignore[union-attr]
    assert not saved._thread.daemon, "the interpreter waits for it"  # type: ignore[union-attr]
    assert saved.failed
    with pytest.raises(ValueError, match=r"the save of .*/c failed: .*division"):
        saved.wait()
    assert saved.wait() == tmp_path / "c"
    assert not saved.failed


def test_a_save_in_the_background_has_the_values_of_its_moment(tmp_path, monkeypatch):
    go, real = threading.Event(), saving._write
    monkeypatch.setattr(saving, "_write", lambda *given: go.wait(10) and real(*given))
    net = model()
    want = {name: p.detach().clone() for name, p in net.named_parameters()}
    saved = saving.save_async(tmp_path / "c", net, mesh=mp.Mesh(), step=1)
    assert (saved.done, saved.failed, saved.bytes, saved.seconds) == (False, False, 0, 0.0)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    go.set()
    load(saved.wait(), net, mesh=mp.Mesh())
    assert all(torch.equal(p, want[name]) for name, p in net.named_parameters())


def test_a_save_that_fails_is_discarded_and_a_failed_prune_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "write_manifest", lambda *given: 1 // 0)
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        saving.save(tmp_path / "c", model(), mesh=mp.Mesh(), step=1)
    assert list(tmp_path.iterdir()) == []


def test_the_time_and_size_of_a_save_are_logged(tmp_path, monkeypatch):
    said: list = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    saving.log.addHandler(handler)
    saving.log.setLevel(logging.INFO)
    try:
        with monkeypatch.context() as patch:
            clock = iter([1.0, 3.5])
            patch.setattr(saving.time, "perf_counter", lambda: next(clock))
            path = saving.save(tmp_path / "c", nn.Linear(500, 500), mesh=mp.Mesh(), step=1)
    finally:
        saving.log.removeHandler(handler)
        saving.log.setLevel(logging.NOTSET)
    size = (path / "model-00000.safetensors").stat().st_size
    assert said == [f"saved {path}: {size / 1e6:.1f} MB in 2.50 s"]


# --- groups and replicas of ranks -------------------------------------------------------------------------------------


def group(*names: str, **options: Any) -> dict[str, Any]:
    return {"options": options, "params": list(names)}


def test_groups_of_ranks_are_joined_and_must_be_alike():
    merge: Any = saving._merge
    assert merge([]) is None
    assert merge([[group("b", "a", lr=1)], [group("a", "c", lr=1)]]) == [group("a", "b", "c", lr=1)]
    assert merge([[group("a", lr=1), group(lr=2)], [group(lr=1), group("b", lr=2)]]) == [
        group("a", lr=1),
        group("b", lr=2),
    ]
    with pytest.raises(ValueError, match="some ranks' optimizers have 1 parameter groups, others 3"):
        merge([[group()], [group()] * 3, [group()]])
    with pytest.raises(ValueError, match=r"ranks disagree about parameter group 1: \{'lr': 2\}, \{'lr': 3\}"):
        merge([[group(lr=1), group(lr=2)], [group(lr=1), group(lr=3)]])


def test_replicas_are_compared_with_the_chunk_of_their_place():
    def chunk(start: int, size: int, checksum: int, file: str = "") -> Chunk:
        return Chunk(file, "k", (start,), (size,), checksum)

    tensors = {"model/w": Entry((6,), "F32", (chunk(0, 4, 1, "f0"), chunk(4, 2, 2, "f1")))}

    def check(*replicas: Chunk) -> None:
        parts: Any = [SimpleNamespace(replicas=[]), SimpleNamespace(replicas=[("model/w", each) for each in replicas])]
        saving._check_replicas(tensors, parts)

    check()
    check(chunk(0, 4, 1), chunk(4, 2, 2), chunk(0, 2, 9), chunk(2, 4, 9))
    for wrong, file in ((chunk(0, 4, 2), "f0"), (chunk(4, 2, 1), "f1")):
        with pytest.raises(ValueError, match=f"model/w on rank 1 differs from {file}"):
            check(chunk(0, 4, 1), wrong)


# --- folders ----------------------------------------------------------------------------------------------------------


def saved(root: Path, step: int, name: str = "") -> Path:
    return saving.save(root / (name or f"s{step}"), model(), mesh=mp.Mesh(), step=step)


def test_the_newest_checkpoints_and_every_nth_stay(tmp_path):
    for step in (1, 2, 3, 4, 5, 6):
        saved(tmp_path, step)
    (tmp_path / "other").mkdir()
    (tmp_path / ".s9.mpcore-tmp").mkdir()
    prune(tmp_path, 2, 3, spare=tmp_path / "s1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "s1", "s3", "s5", "s6"]
    prune(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "s6"]
    for keep in (0, -1):
        with pytest.raises(ValueError, match=f"keep {keep} is smaller than 1"):
            prune(tmp_path, keep)
    assert checkpoints(tmp_path) == [tmp_path / "s6"]


def test_of_one_step_the_later_checkpoint_is_the_newest(tmp_path):
    first, second = saved(tmp_path, 3, "b"), saved(tmp_path, 3, "a")
    os.utime(first, (1, 1))
    assert checkpoints(tmp_path) == [second, first]
    os.utime(second, (0, 0))
    assert checkpoints(tmp_path) == [first, second]
    newest = saved(tmp_path, 4, "c")
    os.utime(newest, (0, 0))
    assert checkpoints(tmp_path) == [newest, first, second]
    assert checkpoints(tmp_path / "none") == []
    assert folders.step_path("root", 120) == Path("root/step-00000120")


def test_an_old_checkpoint_counts_until_its_successor_is_there(tmp_path):
    path = saved(tmp_path, 1, "c")
    old = tmp_path / ".c.mpcore-old"
    os.rename(path, old)
    assert resolve(path) == old
    assert checkpoints(tmp_path) == [old]
    assert resolve(tmp_path / "none") == tmp_path / "none"
    folders.prepare(path)
    assert path.is_dir()
    assert not old.exists()
    assert (tmp_path / ".c.mpcore-tmp").is_dir()
    os.rename(tmp_path / ".c.mpcore-tmp", old)
    (old / "manifest.json").write_text("{}")
    assert resolve(path) == path
    assert checkpoints(tmp_path) == [path], "it has a successor"
    folders.prepare(path)
    assert not old.exists()


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path):
    file, full, empty = tmp_path / "file", tmp_path / "full", tmp_path / "empty"
    file.write_text("x")
    full.mkdir()
    (full / "y").write_text("x")
    empty.mkdir()
    for there in (file, full):
        with pytest.raises(ValueError, match=f"{there} is there and is no checkpoint: it is not overwritten"):
            folders.prepare(there)
    folders.prepare(empty)
    folders.prepare(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / ".c.mpcore-tmp").is_dir()


def test_files_of_another_size_and_missing_ones_are_told(tmp_path):
    path = saved(tmp_path, 1)
    file = path / "model-00000.safetensors"
    size = file.stat().st_size
    with open(file, "ab") as opened:
        opened.write(b"x")
    with pytest.raises(ValueError, match=f"{file} has {size + 1} bytes, written were {size}"):
        read_complete(path)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file} is missing"):
        read_complete(path)


def test_a_checkpoint_that_cannot_be_renamed_leaves_the_one_before(tmp_path, monkeypatch):
    path = saved(tmp_path, 1, "c")
    rename = os.rename

    def fails(source: Any, to: Any) -> None:
        if str(source).endswith("-tmp"):
            raise OSError(28, "no space")
        rename(source, to)

    monkeypatch.setattr(os, "rename", fails)
    for name, there in (("c", True), ("d", False)):
        with pytest.raises(ValueError, match="no space"):
            saved(tmp_path, 2, name)
        assert (tmp_path / name).exists() is there
    assert read_manifest(path).step == 1
    assert checkpoints(tmp_path) == [path]
    monkeypatch.undo()
    saved(tmp_path, 2, "c")
    assert read_manifest(path).step == 2
    assert not (tmp_path / ".c.mpcore-old").exists()


def test_a_damaged_checkpoint_is_passed_over_with_a_word(tmp_path, caplog, capsys):
    one, two = saved(tmp_path, 1), saved(tmp_path, 2)
    (two / "model-00000.safetensors").unlink()
    assert folders.latest(tmp_path) == one
    assert f"{two} is incomplete, and ignored: {two}/model-00000.safetensors is missing" in caplog.text
    for given in ((one, two), (two, one)):
        with pytest.raises(ValueError, match=f"{two}/model-00000.safetensors is missing"):
            report.diff(*given)
    assert not command.main(["verify", str(one)])
    assert capsys.readouterr().out == f"{one}: every byte is as written\n"
    for given in ([one, two], [two, one]):
        assert command.main(["verify", *map(str, given)]) == 1
        out = capsys.readouterr().out
        assert f"{one}: every byte is as written\n" in out
        assert f"{two}/model-00000.safetensors is missing\n" in out
    assert command.main(["diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "no difference\n"


# --- files of tensors -------------------------------------------------------------------------------------------------


def test_a_file_has_its_widest_tensors_first_after_a_header_of_whole_words(tmp_path):
    tensors = {"b": torch.arange(3, dtype=torch.int8), "a": torch.ones(2, dtype=torch.float64), "c": torch.tensor(1.5),
               "d": torch.zeros(0, 4), "aa": torch.tensor([2.5])}  # fmt: skip
    record, sums = write_tensors(tmp_path / "f", tensors)
    data = (tmp_path / "f").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert list(header) == ["a", "aa", "c", "d", "b"]
    assert [header[key]["data_offsets"] for key in header] == [[0, 16], [16, 20], [20, 24], [24, 24], [24, 27]]
    assert record == FileRecord(len(data), zlib.crc32(data[: 8 + length]))
    assert len(data) == 8 + length + 27
    assert list(sums) == list(tensors)
    opened = TensorFile(tmp_path / "f", record)
    for key, tensor in tensors.items():
        assert torch.equal(opened.whole(key), tensor)
        chunk = Chunk("f", key, (0,) * tensor.dim(), tuple(tensor.shape), sums[key])
        entry = Entry(tuple(tensor.shape), header[key]["dtype"], (chunk,))
        assert opened.problem(entry, chunk) is None
        opened.forget(key)
        assert torch.equal(opened.tensor(entry, chunk), tensor)
    with pytest.raises(FileExistsError) as found:
        write_tensors(tmp_path / "f", tensors)
    assert found.value.filename == str(tmp_path / "f")


def test_values_may_be_read_one_by_one_in_the_order_of_the_keys(tmp_path):
    asked: list = []
    meta = {key: torch.empty(2, device="meta") for key in ("b", "a", "c")}

    def read(key: str) -> torch.Tensor:
        asked.append((key, threading.current_thread()))
        return torch.full((2,), float(ord(key)))

    write_tensors(tmp_path / "f", meta, read)
    assert asked == [(key, threading.current_thread()) for key in ("b", "a", "c")]
    opened = TensorFile(tmp_path / "f")
    assert [opened.whole(key).tolist() for key in "abc"] == [[97.0] * 2, [98.0] * 2, [99.0] * 2]


def test_a_write_goes_on_where_the_system_wrote_a_part(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(tensor_file.os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
    with open(tmp_path / "f", "wb") as file:
        tensor_file._write_at(file, b"0123456789", 2)
    assert (tmp_path / "f").read_bytes() == b"\0\x000123456789"


@pytest.mark.parametrize(
    ("threads", "items", "most"), [((), 9, 4), ((2,), 9, 2), ((1,), 9, 1), ((4,), 2, 2), ((), 0, 0)]
)
def test_items_are_worked_on_in_so_many_threads_and_come_back_in_order(threads, items, most):
    running, peak, lock, full = [0], [0], threading.Lock(), threading.Event()

    def work(i: int) -> int:
        with lock:
            running[0] += 1
            peak[0] = max(peak[0], running[0])
            if running[0] == most:
                full.set()
        full.wait(20)  # until all threads have begun, however busy the machine is
        time.sleep(0.01)  # one thread too many would begin now
        with lock:
            running[0] -= 1
        return i * i

    assert in_threads(work, iter(range(items)), *threads) == [i * i for i in range(items)]
    assert peak[0] == most


def test_large_host_memory_lies_in_a_mapping_of_its_own(monkeypatch):
    maps: list = []
    real = mmap.mmap

    class Map(real):  # type: ignore[misc, valid-type]
        def __new__(cls, *given: Any, **how: Any) -> Any:
            maps.append((given, how))
            return real.__new__(cls, *given, **how)

    monkeypatch.setattr(tensor_file.mmap, "mmap", Map)
    large = host_memory((2**18, 2), torch.float32)
    assert (large.shape, large.dtype) == ((2**18, 2), torch.float32)
    large.fill_(1.0)
    assert large.sum() == 2**19
    assert maps == [((-1, 2**21), {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS})]
    assert host_memory((2**18 - 1, 2), torch.float32).shape == (2**18 - 1, 2)
    assert host_memory((), torch.int64).shape == ()
    assert len(maps) == 1


# --- reading ----------------------------------------------------------------------------------------------------------


def test_each_rank_checks_the_bytes_of_its_share_in_the_order_of_the_files():
    sizes = [4, 4, 4, 20, 8]
    chunks = [Chunk(f"f{i % 2}", f"k{i}", (0,), (n // 4,), i) for i, n in enumerate(sizes)]
    tensors = {
        f"model/{i}": Entry((n // 4,), "F32", (chunk,)) for (i, n), chunk in zip(enumerate(sizes), chunks, strict=True)
    }
    tensors["optimizer/x/0"] = Entry((9,), "F32", (Chunk("f0", "o", (0,), (9,), 9),))
    order = [0, 2, 4, 1, 3]  # of 40 bytes the chunks begin at 0, 4, 8, 16 and 20
    for size, want in ((1, [order]), (2, [[0, 2, 4, 1], [3]]), (4, [[0, 2, 4], [1], [3], []])):
        for rank in range(size):
            share: Any = loading._share(tensors, ("model/",), rank, size)
            assert [chunk.checksum for _, _, chunk in share] == want[rank]
    both: Any = loading._share(tensors, ("model/", "optimizer/"), 0, 1)
    assert len(both) == 6
    assert loading._share({}, ("model/",), 0, 2) == []


def test_a_box_is_filled_from_every_chunk_that_lies_in_it():
    whole = torch.arange(48.0).view(6, 8)
    cuts = [((0, 0), (2, 8)), ((2, 0), (4, 5)), ((2, 5), (4, 3))]
    chunks = tuple(Chunk("f", str(i), start, shape, 0) for i, (start, shape) in enumerate(cuts))
    entry = Entry((6, 8), "F32", chunks)

    def tensor(of: Entry, chunk: Chunk) -> torch.Tensor:
        (a, b), (h, w) = chunk.start, chunk.shape
        return whole[a : a + h, b : b + w]

    for start, shape in (((0, 0), (6, 8)), ((1, 3), (3, 4)), ((3, 6), (2, 2)), ((0, 1), (1, 1))):
        target = torch.full(shape, -1.0, dtype=torch.float64)
        loading.copy_box(target, start, entry, tensor)
        assert torch.equal(target, whole[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]].double())
    assert loading._overlap((0,), (2,), Chunk("", "", (2,), (2,), 0)) is None
    assert loading._overlap((0,), (3,), Chunk("", "", (2,), (2,), 0)) == [(2, 3)]
    assert loading._overlap((), (), Chunk("", "", (), (), 0)) == []


def test_problems_are_told_up_to_twenty_and_counted(tmp_path):
    def named(count: int, rows: int) -> nn.Module:
        return nn.ParameterDict({f"p{i:02}": nn.Parameter(torch.ones(rows)) for i in range(count)})

    for count, more in ((20, ""), (21, "\n  ... and 1 more"), (25, "\n  ... and 5 more")):
        path = saving.save(tmp_path / f"c{count}", named(count, 2), mesh=mp.Mesh(), step=1)
        with pytest.raises(ValueError, match="can't be loaded") as found:
            load(path, named(count, 3), mesh=mp.Mesh())
        lines = [
            f"model/p{i:02}: expected shape (3,), found (2,) in model-00000.safetensors" for i in range(min(count, 20))
        ]
        assert str(found.value) == f"{path} can't be loaded:\n  " + "\n  ".join(lines) + more


def test_a_load_that_is_not_strict_names_what_it_left_out(tmp_path):
    path = saving.save(tmp_path / "c", nn.ParameterDict({"a": nn.Parameter(torch.ones(1))}), mesh=mp.Mesh(), step=4)
    other = nn.ParameterDict({"b": nn.Parameter(torch.zeros(1))})
    found = load(path, other, mesh=mp.Mesh(), strict=False)
    assert (found.step, found.missing_keys, found.unexpected_keys) == (4, ["model/b"], ["model/a"])
    with pytest.raises(
        ValueError, match=r"model/b: missing from the checkpoint\n  model/a: in the checkpoint, but not in"
    ):
        load(path, other, mesh=mp.Mesh())
    strict = load(path, nn.ParameterDict({"a": nn.Parameter(torch.zeros(1))}), mesh=mp.Mesh())
    assert (strict.missing_keys, strict.unexpected_keys) == ([], [])


def test_another_dtype_is_read_only_if_it_may_be_cast(tmp_path):
    net = nn.ParameterDict({"a": nn.Parameter(torch.tensor([1.5]))})
    path = saving.save(tmp_path / "c", net, mesh=mp.Mesh(), step=1)
    wide = nn.ParameterDict({"a": nn.Parameter(torch.zeros(1, dtype=torch.float64))})
    with pytest.raises(ValueError, match=r"model/a: expected dtype F64, found F32 in model-00000"):
        load(path, wide, mesh=mp.Mesh())
    load(path, wide, mesh=mp.Mesh(), cast=True)
    assert wide["a"].item() == 1.5


def test_damaged_bytes_are_refused_unless_they_arent_checked(tmp_path):
    net = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})
    path = saving.save(tmp_path / "c", net, mesh=mp.Mesh(), step=1)
    file = path / "model-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="a is damaged: its checksum is"):
        load(path, net, mesh=mp.Mesh())
    load(path, net, mesh=mp.Mesh(), check_bytes=False)
    assert net["a"][3] != 1


def test_a_local_tensor_that_is_not_as_declared_is_refused():
    layer: Any = mp.ColumnParallelLinear(3, 4)
    layer.weight = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"model/weight has shape \(2, 3\), declared is \(4, 3\) on this rank"):
        pieces.held_by_model(layer, mp.Mesh())


# --- descriptions -----------------------------------------------------------------------------------------------------


def test_a_description_has_a_line_for_each_tensor_of_the_model_and_each_kind_of_state(tmp_path):
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = saving.save(tmp_path / "c", net, optimizer, mesh=mp.Mesh(), step=2, sample=9, config={"x": 1})
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    head = [
        f"{path}: step 2, next sample 9, seed None, written on one process", "config {'x': 1}", "extra {}",
        f"2 files, {size:,} bytes", "model: 2 tensors, 32 bytes", "optimizer: 6 tensors, 72 bytes",
    ]  # fmt: skip
    assert report.describe(path).splitlines() == [
        *head, "  model/bias    F32                  2  chunks: 1", "  model/weight  F32              2 x 3  chunks: 1",
        "  optimizer/exp_avg: 2 tensors of F32, 32 bytes (--all lists them)",
        "  optimizer/exp_avg_sq: 2 tensors of F32, 32 bytes (--all lists them)",
        "  optimizer/step: 2 tensors of F32, 8 bytes (--all lists them)",
    ]  # fmt: skip
    lines = report.describe(path, all_tensors=True).splitlines()
    assert lines[:6] == head
    assert len(lines) == 6 + 2 + 6
    assert lines[-1] == f"  {'optimizer/step/weight':27}  F32             scalar  chunks: 1"
    plain = saving.save(tmp_path / "d", net, mesh=mp.Mesh(), step=2, seed=1)
    first = report.describe(plain).splitlines()[0]
    assert first == f"{plain}: step 2, seed 1, written on one process"


def test_differences_are_counted_and_measured(tmp_path):
    def at(name: str, **tensors: torch.Tensor) -> Path:
        net = nn.Module()
        for key, value in tensors.items():
            net.register_buffer(key, value)
        return saving.save(tmp_path / name, net, mesh=mp.Mesh(), step=len(name), sample=3)

    z = "model/z: 1 of 1 elements differ, by 2 at most, 1.4 of the largest value"
    base = {"x": torch.tensor([1.0, -8.0, 3.0]), "i": torch.tensor([1, 2]), "z": torch.tensor([1 + 1j])}
    one, same = at("a", **base), at("b", **base)
    assert report.diff(one, same) == []
    other = at("cc", x=torch.tensor([1.5, -8.0, 2.0]), i=torch.tensor([1, 5]), z=torch.tensor([1 + 3j]))
    assert report.diff(one, other) == [
        "step: 1 and 2", "model/i: 1 of 2 elements differ, by 3 at most, 1.5 of the largest value",
        "model/x: 2 of 3 elements differ, by 1 at most, 0.12 of the largest value", z,
    ]  # fmt: skip
    assert report.diff(one, other, rtol=0.125)[2:] == [z]
    assert len(report.diff(one, other, rtol=0.124)) == 4
    shapes = at("d", x=torch.ones(2), i=torch.tensor([1.0, 2.0]), y=torch.ones(1))
    assert report.diff(one, shapes) == [
        "model/i: I64 (2,) and F32 (2,)", "model/x: F32 (3,) and F32 (2,)", f"model/z: only in {one}",
        f"model/y: only in {shapes}",
    ]  # fmt: skip
    with mock.patch.object(saving, "check_finite"):
        spoiled = at("e", **{**base, "x": torch.tensor([1.0, float("nan"), 3.0])})
    assert report.diff(one, spoiled, rtol=1e9) == ["model/x: 1 of 3 elements differ, by nan at most"]
    zeros, ones = (at(name, x=value) for name, value in (("f", torch.zeros(2)), ("g", torch.ones(2))))
    assert report.diff(zeros, ones) == ["model/x: 2 of 2 elements differ, by 1 at most"]


SAVER = """
import sys, torch, mpcore
make = lambda: mpcore.prepare(
    torch.nn.Linear(2, 2, device="meta"), mpcore.Mesh(), blocks=(), loss=lambda y, t: (y - t).square().sum(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
first, second = make(), make()
first.save(sys.argv[1])
second.step = 1
second.save(sys.argv[1])  # another run of this process
print("saved", flush=True)
sys.stdin.read()
"""


def test_a_second_job_that_saves_into_a_folder_is_refused_by_name(tmp_path):
    command = [sys.executable, "-c", SAVER, str(tmp_path / "all")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "saved\n"
        two = subprocess.run(command, capture_output=True, text=True, input="", check=False)
        assert f"is in use by 'process {one.pid} on " in two.stderr
        assert two.stdout == ""
        one.communicate("")
    three = subprocess.run(command, capture_output=True, text=True, input="", check=False)  # a lock of a dead process
    assert three.stdout == "saved\n", three.stderr


def test_two_processes_that_write_one_checkpoint_are_told_apart(tmp_path):
    held = folders.prepare(tmp_path / "c")  # a save in this process
    text = "import sys, pathlib\nfrom mpcore.checkpoint import folders\nfolders.prepare(pathlib.Path(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", text, tmp_path / "c"], capture_output=True, text=True, check=False)
    assert f"is in use by 'process {os.getpid()} on " in other.stderr
    assert held is not None
    held.close()
