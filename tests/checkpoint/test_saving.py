"""What a save writes of its arguments, byte by byte, and what it leaves on the disk: in one process."""

from __future__ import annotations

import copy
import json
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.__main__ import main as mpcore_main
from mpcore.checkpoint import folders, load, loading, report, saving
from mpcore.checkpoint.folders import checkpoints, prune, read_complete, resolve
from mpcore.checkpoint.format import Chunk, Entry, FileRecord, read_manifest
from mpcore.checkpoint.store import Store
from mpcore.checkpoint.tensor_file import TensorFile, write_tensors
from mpcore.tools import checkpoint as command
from tests.forked import Forked

FILE = "model-00000.safetensors"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


ABOUT: dict[str, Any] = {
    "mesh": mp.Mesh(), "step": np.int64(7), "sample": np.int32(40), "seed": np.uint8(5), "config": {"a": [1, (2,)]},
    "extra": {"scale": 2.0}, "keep": 2, "keep_every": 3, "beside": {"note.txt": b"said", "deep/x": b"y"},
}  # fmt: skip


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_every_argument_of_a_save_is_in_its_checkpoint(tmp_path, how):
    for step in (2, 3, 4, 5, 6):
        saved(tmp_path, step)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    path = tmp_path / "c"
    written: Any = getattr(saving, how)(path, net, optimizer, **ABOUT)
    if how == "save_async":
        written.wait()
        assert (written.done, written.failed) == (True, False)
        assert written.seconds > 0
        assert written.bytes == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    found = read_manifest(path)
    assert (found.step, found.sample, found.seed) == (7, 40, 5)
    assert (found.config, found.extra) == ({"a": [1, [2]]}, {"scale": 2.0})
    assert found.mesh == dict.fromkeys(("tp", "cp", "pp", "ep", "dp"), 1)
    assert found.optimizer[0]["params"] == ["bias", "weight"]
    assert (path / "note.txt").read_bytes() == b"said"
    assert (path / "deep" / "x").read_bytes() == b"y"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "s3", "s6"], "two, and every third"


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_what_a_save_is_not_told_has_its_usual_value(tmp_path, how):
    for step in range(3):
        written: Any = getattr(saving, how)(tmp_path / f"{step}", model(), mesh=mp.Mesh(), step=step)
        if how == "save_async":
            written.wait()
    found = read_manifest(tmp_path / "2")
    assert (found.sample, found.seed, found.config, found.extra, found.optimizer) == (0, None, {}, {}, None)
    assert len(checkpoints(tmp_path)) == 3
    for name in ("config", "extra"):
        for wrong in ({"x": float("nan")}, {"x": object()}):
            with pytest.raises(ValueError, match=f"{name} can't be written as JSON: "):
                saving.save(tmp_path / "d", model(), mesh=mp.Mesh(), step=1, **{name: wrong})


@pytest.mark.parametrize(("wrong", "said"), [
    ({"extra": {"a": "x" * 2**24}}, r"config and extra have 16777\d\d\d bytes as JSON, more than 16777216: "),
    ({"keep": 0}, "keep 0 is smaller than 1"),
    ({"keep": 2.5}, "'float' object cannot be interpreted as an integer"),
    ({"step": -1}, "step -1 and sample 0 are not both between 0 and 9223372036854775807"),
    ({"sample": 2**63}, "step 1 and sample 9223372036854775808 are not both between 0 and 9223372036854775807"),
])  # fmt: skip
def test_a_save_that_could_not_be_loaded_or_kept_is_refused(tmp_path, wrong, said):
    with pytest.raises(ValueError, match=said):
        saving.save(tmp_path / "d", model(), **{"mesh": mp.Mesh(), "step": 1, **wrong})
    assert not [*tmp_path.iterdir()]
    extra = {"a": "x" * (2**24 - 60)}
    path = saving.save(tmp_path / "d", model(), mesh=mp.Mesh(), step=1, extra=extra)
    assert load(path, model(), mesh=mp.Mesh()).extra == extra


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


def test_pitfall_60_a_moment_that_is_nan_is_neither_written_nor_read(tmp_path):
    net, on = nn.Linear(2, 2), mp.Mesh()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[net.weight]["exp_avg_sq"][0, 1] = torch.inf  # an overflow that the weights survive
    saving.save(tmp_path / "a", net, optimizer, mesh=on, step=1)
    optimizer.state[net.weight]["exp_avg"][0, 1] = torch.nan
    with pytest.raises(ValueError, match=r"b isn't written: .*weight.* holds NaN"):
        saving.save(tmp_path / "b", net, optimizer, mesh=on, step=1)
    with pytest.raises(ValueError, match=r"c isn't written: model/a .* holds NaN"):
        saving.save(tmp_path / "c", nn.ParameterDict({"a": torch.tensor([complex(0, torch.nan)])}), mesh=on, step=1)
    with mock.patch.object(saving, "check_finite"):
        saving.save(tmp_path / "b", net, optimizer, mesh=on, step=1)
    with pytest.raises(ValueError, match=r"weight.* holds NaN"):
        loading.load(tmp_path / "b", net, optimizer, mesh=on)


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_save_waits_for_the_one_in_the_background_and_raises_its_error(tmp_path, how):
    with mock.patch.object(os, "fsync", side_effect=OSError(28, "no space")):
        failed = saving.save_async(tmp_path / "c", model(), mesh=mp.Mesh(), step=1)
        with pytest.raises(ValueError, match=r"the save of .*/c failed: .*no space"):
            getattr(saving, how)(tmp_path / "d", model(), mesh=mp.Mesh(), step=2)
    assert failed.wait() == tmp_path / "c"  # the error is raised once
    assert not failed.failed
    assert not [*tmp_path.iterdir()]
    with mock.patch.object(saving, "write_tensors", lambda *given: time.sleep(0.3) or write_tensors(*given)):
        first = saving.save_async(tmp_path / "c", model(), mesh=mp.Mesh(), step=3)
        getattr(saving, how)(tmp_path / "c", model(), mesh=mp.Mesh(), step=4)
        assert first.done
        later = saving.save_async(f"memory://{how}/c", model(), mesh=mp.Mesh(), step=5)
        prune(f"memory://{how}", 1)
        assert [later.wait()] == checkpoints(f"memory://{how}")
    assert [saved(tmp_path, 5), tmp_path / "c"] == checkpoints(tmp_path)
    assert read_manifest(tmp_path / "c").step == 4


def test_ranks_that_keep_other_checkpoints_are_refused(tmp_path):
    def trial(on: mp.Mesh) -> None:
        for name in ("keep", "step", "sample", "seed"):
            with pytest.raises(ValueError, match=rf"disagree about the arguments of save \({name}: 1 and 2\)"):
                saving.save(tmp_path / "c", model(), **{"mesh": on, "step": 1, name: 1 + on.world.rank})
        with pytest.raises(ValueError, match=r"\.d\.mpcore-tmp isn't there: let all ranks save to one .*rank 1 of 2"):
            saving.save(tmp_path / "cd"[on.world.rank], mp.ColumnParallelLinear(2, 4, tp=on.tp), mesh=on, step=1)
        same = ((1, 2), torch.arange(1, 3))[on.world.rank]
        made = [saving.save(tmp_path / f"{n}", model(), mesh=on, step=n) for n in same]
        with pytest.raises(ValueError, match=r"ranks read two checkpoints, \S+/1 and \S+/2: give all one path"):
            load(made[on.world.rank], model(), mesh=on)

    mp.simulate(trial, tp=2)


def test_float32_weights_alone_become_the_masters_of_a_16_bit_model(tmp_path):
    path, net = saved(tmp_path, 1), model().bfloat16()
    optimizer = mp.AdamW(net, lr=1e-3)
    assert load(path, net, optimizer, mesh=mp.Mesh(), strict=False).missing_keys == ["the optimizer"]
    assert torch.equal(optimizer.state[net.weight]["master"], model().weight)


def test_a_folder_that_is_being_written_is_neither_replaced_nor_pruned(tmp_path):
    with Store().prepare(tmp_path / "c"):
        prune(tmp_path, 1)
        with pytest.raises(ValueError, match=f"c.mpcore-tmp is in use by 'process {os.getpid()} on "):
            saved(tmp_path, 1, "c")
    prune(tmp_path, 1)
    assert not [*tmp_path.iterdir()]


def saved(root: Path, step: int, name: str = "") -> Path:
    return saving.save(root / (name or f"s{step}"), model(), mesh=mp.Mesh(), step=step)


def test_the_newest_checkpoints_and_every_nth_stay(tmp_path, caplog):
    for step in (1, 2, 3, 4, 5, 6):
        saved(tmp_path, step)
    (tmp_path / "other").mkdir()
    (tmp_path / ".s9.mpcore-tmp").mkdir()
    (tmp_path / "best").symlink_to(tmp_path / "s6")
    prune(tmp_path, 2, 3, spare=tmp_path / "s5")  # of a run that went back
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "other", "s3", "s4", "s5", "s6"]
    assert "s5 is earlier than s6. `latest` returns " in caplog.text
    os.truncate(tmp_path / "s6" / FILE, 3)
    prune(tmp_path, 1)  # a damaged one doesn't count as the last
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "other", "s5", "s6"]
    for keep in (0, -1):
        with pytest.raises(ValueError, match=f"keep {keep} is smaller than 1"):
            prune(tmp_path, keep)
    assert checkpoints(tmp_path) == [tmp_path / "s5"]


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


def test_a_checkpoint_that_cannot_be_renamed_leaves_the_one_before(tmp_path, monkeypatch):
    path = saved(tmp_path, 1, "c")
    rename = os.rename

    def fails(source: Any, to: Any) -> None:
        if str(source).endswith("-tmp"):
            raise OSError(28, "no space")
        rename(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        for name, there in (("c", True), ("d", False)):
            with pytest.raises(ValueError, match="no space"):
                saved(tmp_path, 2, name)
            assert (tmp_path / name).exists() is there
    assert read_manifest(path).step == 1
    assert checkpoints(tmp_path) == [path]
    os.rename(path, tmp_path / ".c.mpcore-old")  # as one killed between two renames sets it aside
    with mock.patch.object(os, "fsync", side_effect=OSError(28, "no space")), pytest.raises(ValueError, match="no sp"):
        saved(tmp_path, 2, "c")
    assert folders.latest(tmp_path) == resolve(path) == path
    saved(tmp_path, 2, "c")
    assert read_manifest(path).step == 2
    for step in (4, 5):
        saved(tmp_path, step, ".c.mpcore-old")  # one killed before it removed this
        assert checkpoints(tmp_path) == [resolve(path)] == [path]
        saved(tmp_path, step + 2, "c") if step == 4 else prune(tmp_path, 1)
        assert not (tmp_path / ".c.mpcore-old").exists()
    os.rename(path, tmp_path / ".c.mpcore-old")
    assert checkpoints(tmp_path) == [resolve(path)] == [tmp_path / ".c.mpcore-old"]


def test_a_damaged_checkpoint_is_passed_over_with_a_word(tmp_path, caplog, capsys):
    assert folders.latest(tmp_path / "nowhere") is folders.latest(tmp_path) is None
    one, two = saved(tmp_path, 1), saved(tmp_path, 2)
    with open(two / FILE, "ab") as opened:
        opened.write(b"x")
    size = (two / FILE).stat().st_size
    with pytest.raises(ValueError, match=f"{two / FILE} has {size} bytes, written were {size - 1}"):
        read_complete(two)
    (two / FILE).unlink()
    os.remove(saved(tmp_path, 3) / "manifest.json")
    (tmp_path / ".s4.mpcore-tmp").mkdir()
    (tmp_path / "notes").mkdir()
    assert folders.latest(tmp_path) == one
    assert len(caplog.records) == 3
    for part in (f"{two}/{FILE} is missing", "s3", ".s4.mpcore-tmp"):
        assert part in caplog.text
    for given in ([one, two], [two, one]):
        with pytest.raises(ValueError, match=f"{two}/{FILE} is missing"):
            report.diff(*given)
        assert command.main(["verify", *map(str, given)]) == 1
        out = capsys.readouterr().out
        assert f"{one}: every byte is as written\n" in out
        assert f"{two}/{FILE} is missing\n" in out


def test_the_exit_status_of_a_command_is_what_it_found(tmp_path, capsys):
    one, two = saved(tmp_path, 1), saved(tmp_path, 2)
    for status, *given in ((0, "verify", one, two), (0, "diff", one, one), (1, "diff", one, two), (0, "inspect", one),
                           (2, "inspect", tmp_path / "none"), (2, "diff", one, tmp_path / "none")):  # fmt: skip
        assert command.main([*map(str, given)]) == status
    assert "none is no complete checkpoint" in capsys.readouterr().err
    for text in ("no difference\n", "step: 1 and 2"):
        assert command.main(["diff", str(one), str(one if "no" in text else two)]) == (text[:2] != "no")
        assert text in capsys.readouterr().out
    assert mpcore_main(["checkpoint", "verify", str(one)]) == 0
    assert capsys.readouterr().out == f"{one}: every byte is as written\n"


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
        opened.check(entry, chunk)
    with pytest.raises(ValueError, match="__metadata__"):
        write_tensors(tmp_path / "g", {"__metadata__": torch.ones(2)})
    with pytest.raises(FileExistsError) as found:
        write_tensors(tmp_path / "f", tensors)
    assert found.value.filename == str(tmp_path / "f")


def test_a_write_goes_on_where_the_system_wrote_a_part(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
    write_tensors(tmp_path / "f", {"a": torch.arange(9)})
    assert TensorFile(tmp_path / "f").whole("a").tolist() == [*range(9)]


def vectors(dtype: torch.dtype = torch.float32, **sizes: int) -> nn.Module:
    return nn.ParameterDict({name: nn.Parameter(torch.full((n,), 1.5, dtype=dtype)) for name, n in sizes.items()})


def test_strictness_casts_and_checked_bytes_are_what_a_load_is_told(tmp_path):
    path = saving.save(tmp_path / "c", vectors(a=4), mesh=mp.Mesh(), step=4)
    found = load(path, vectors(b=1), mesh=mp.Mesh(), strict=False)
    assert (found.step, found.missing_keys, found.unexpected_keys) == (4, ["model/b"], ["model/a"])
    strict = load(path, vectors(a=4), mesh=mp.Mesh())
    assert (strict.missing_keys, strict.unexpected_keys) == ([], [])
    wide = vectors(torch.float64, a=4)
    nn.init.zeros_(wide["a"])
    for other, told in ((vectors(b=1), r"model/b: missing .*\n.*model/a: in the"), (wide, r"model/a: .*F64.*F32.*000")):
        with pytest.raises(ValueError, match=told):
            load(path, other, mesh=mp.Mesh())
    load(path, wide, mesh=mp.Mesh(), cast=True)
    assert wide["a"].tolist() == [1.5] * 4
    large = nn.ParameterDict({"a": torch.full((4,), 1e300, dtype=torch.float64)})
    for made, told in ((large, "infinity"), (vectors(torch.complex64, a=4), "expected dtype F32, found C64")):
        with pytest.raises(ValueError, match=told):
            load(saving.save(tmp_path / "x", made, mesh=mp.Mesh(), step=1), vectors(a=4), mesh=mp.Mesh(), cast=True)
    data = (path / FILE).read_bytes()
    (path / FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="a is damaged: its checksum is"):
        load(path, wide, mesh=mp.Mesh(), cast=True)
    load(path, wide, mesh=mp.Mesh(), cast=True, check_bytes=False)
    assert wide["a"][3] != 1.5


def test_a_description_has_each_tensor_of_the_model_and_each_kind_of_state(tmp_path):
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = saving.save(tmp_path / "c", net, optimizer, mesh=mp.Mesh(), step=2, sample=9, config={"x": 1})
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    text = report.describe(path)
    for part in ("step 2, next sample 9, seed None", "config {'x': 1}", f"2 files, {size:,} bytes",
                 "model: 2 tensors, 32 bytes", "optimizer: 6 tensors, 72 bytes", "2 x 3  chunks: 1",
                 "optimizer/exp_avg_sq: 2 tensors of F32, 32 bytes", "optimizer/step: 2 tensors of F32"):  # fmt: skip
        assert part in text
    assert "optimizer/step/weight" not in text
    assert "optimizer/step/weight" in report.describe(path, all_tensors=True)
    assert "--all" not in report.describe(path, all_tensors=True)
    plain = saving.save(tmp_path / "d", net, optimizer, mesh=mp.Mesh(), step=2, seed=1)
    assert "step 2, seed 1, written on one process" in report.describe(plain)


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
    note = saving.save(tmp_path / "n", nn.Module(), mesh=mp.Mesh(), step=1, sample=3, beside={"note.txt": b"said"})
    assert report.diff(at("m"), note) == ["beside: {} and {'note.txt': SmallFile(bytes=4, crc32=4013622486)}"]
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
    one = Forked(SAVER, str(tmp_path / "all"))
    assert one.stdout.readline() == "saved\n"
    printed, errors = Forked(SAVER, str(tmp_path / "all")).communicate(60)
    assert f"is in use by 'process {one.pid} on " in errors
    assert printed == ""
    one.communicate(60)
    printed, errors = Forked(SAVER, str(tmp_path / "all")).communicate(60)  # a lock of a dead process
    assert printed == "saved\n", errors
