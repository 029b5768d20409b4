"""Files that someone else may have written: each is read, or refused in one line that names it, within two seconds."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.checkpoint import inspect, latest, load, loading, save, verify
from mpcore.checkpoint.folders import read_complete
from mpcore.checkpoint.format import MANIFEST, sign
from mpcore.checkpoint.schema import read_lines
from mpcore.checkpoint.tensor_file import TensorFile
from mpcore.pipeline import schedules
from mpcore.tools.fault_tolerance import __main__ as explain

BESIDE = {"hugging_face/tokenizer.json": b"{}", "note": b"said"}


def saved(folder: Path) -> Path:
    return save(folder / "c", nn.Linear(3, 2), mesh=mp.Mesh(), step=1, beside=BESIDE)


def rewrite(path: Path, change: Callable[[dict], Any]) -> None:
    body = json.loads((path / MANIFEST).read_text())
    del body["crc32"]
    change(body)
    (path / MANIFEST).write_text(json.dumps(body | {"crc32": sign(body)}))


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("data", [b"[]", b"{", b"said it", None, os.mkfifo])
def test_pitfall_62_a_damaged_file_beside_the_tensors_is_named(tmp_path, name, data):
    file = saved(tmp_path) / name
    before = len(BESIDE[name])
    if isinstance(data, bytes):
        file.write_bytes(data)
    else:
        file.unlink()
        if data is not None:
            data(file)
    (line,) = verify(tmp_path / "c")
    assert str(file) in line
    assert (latest(tmp_path) is None) == (not isinstance(data, bytes) or len(data) != before)
    with pytest.raises(ValueError, match=name):
        load(tmp_path / "c", nn.Linear(3, 2), mesh=mp.Mesh())


def test_a_checkpoint_of_0_2_lists_no_files_beside_the_tensors(tmp_path):
    path = saved(tmp_path)
    rewrite(path, lambda body: body.pop("beside"))
    assert load(path, nn.Linear(3, 2), mesh=mp.Mesh()).step == 1
    rewrite(path, lambda body: body.update(beside={"../x": {"bytes": 0, "crc32": 0}}))
    with pytest.raises(ValueError, match=r"'../x' leads out of the checkpoint"):
        load(path, nn.Linear(3, 2), mesh=mp.Mesh())


def test_pitfall_63_bytes_that_change_between_the_checksum_and_the_read_are_noticed(tmp_path, monkeypatch):
    path = saved(tmp_path)
    check = loading.check_weights

    def rewrite_file(*of: Any) -> None:
        check(*of)
        with open(path / "model-00000.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")

    monkeypatch.setattr(loading, "check_weights", rewrite_file)
    with pytest.raises(ValueError, match=r"model-00000.safetensors changed while it was read"):
        load(path, nn.Linear(3, 2), mesh=mp.Mesh())


def large_manifest(folder: Path) -> Path:
    path = saved(folder)
    os.truncate(path / MANIFEST, 300_000_000)
    return path


def many_dimensions(folder: Path) -> Path:
    path = saved(folder)
    rewrite(path, lambda body: body["tensors"]["model/bias"].update(shape=[1] * 100_000))
    return path


def deep_config(folder: Path) -> Path:
    path = saved(folder)
    text = (path / MANIFEST).read_text().replace('"config": {', '"config": {"a": ' + "[" * 100_000 + "]" * 100_000, 1)
    (path / MANIFEST).write_text(text)
    return path


def other_values(folder: Path, **about: Any) -> Path:
    path = saved(folder)
    rewrite(path, lambda body: body.update(about))
    return path


def load_rate(folder: Path, rate: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    path = save(folder / "c", model, optimizer, mesh=mp.Mesh(), step=1)
    rewrite(path, lambda body: body["optimizer"][0]["options"].update(lr=rate))
    load(path, model, optimizer, mesh=mp.Mesh())


def header(folder: Path, text: bytes, data: bytes = b"") -> Path:
    return tensor_file(folder, len(text).to_bytes(8, "little") + text + data)


def tensor_file(folder: Path, content: bytes) -> Path:
    (folder / "x.safetensors").write_bytes(content)
    return folder / "x.safetensors"


def pipe(folder: Path) -> Path:
    path = saved(folder)
    (path / "model-00000.safetensors").unlink()
    os.mkfifo(path / "model-00000.safetensors")
    return path


def actions(folder: Path, text: str) -> Path:
    (folder / "s.csv").write_text(text)
    return folder / "s.csv"


def log(folder: Path, **about: Any) -> str:
    (folder / "rank0.json").write_text(json.dumps({"rank": 0, "groups": {}} | about))
    return str(folder)


def metrics(folder: Path, *lines: str) -> Path:
    (folder / "config.json").write_text('{"run": {}}')
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


MANY = b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(300_000)) + b"}"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "manifest of 300 MB": (lambda at: inspect(large_manifest(at)), "has 300000000 bytes, more than 3355"),
    "shape of 100,000 dimensions": (lambda at: inspect(many_dimensions(at)), "has 100000 dimensions, more than 64"),
    "nested 100,000 times": (lambda at: inspect(deep_config(at)), "manifest.json is damaged"),
    "step of text": (lambda at: inspect(other_values(at, step="x")), "manifest.json is damaged: step: 'x' is not"),
    "negative sample": (lambda at: inspect(other_values(at, sample=-5)), "sample: '-5' is not between 0 and"),
    "infinity": (lambda at: inspect(other_values(at, extra={"a": float("inf")})), "Infinity is not a finite number"),
    "rate of text": (lambda at: load_rate(at, "abc"), "parameter group 0 has lr 'abc', which is of another type"),
    "rate of NaN": (lambda at: load_rate(at, float("nan")), "NaN is not a finite number"),
    "header of 300,000 tensors": (lambda at: TensorFile(header(at, MANY)), "it has 300001 objects, more than 262144"),
    "header of many dimensions": (
        lambda at: TensorFile(header(at, b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[%s0]}}' % (b"0," * 10**5))),
        "its header says a is",
    ),
    "header with a hole": (
        lambda at: TensorFile(header(at, b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"12")),
        "a tensor begins at byte 1",
    ),
    "header of an unknown dtype": (
        lambda at: TensorFile(header(at, b'{"a":{"dtype":"F6","shape":[1],"data_offsets":[0,1]}}', b"1")), "says a is"
    ),
    "header beyond the end": (
        lambda at: TensorFile(header(at, b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"1")), "says a is"
    ),
    "tensors in a pipe": (lambda at: read_complete(pipe(at)), "safetensors is missing"),
    "header that is a list": (lambda at: TensorFile(header(at, b"[]")), "x.safetensors is damaged"),
    "file of no bytes": (lambda at: TensorFile(tensor_file(at, b"")), "x.safetensors has 0 bytes"),
    "file of 7 bytes": (lambda at: TensorFile(tensor_file(at, b"\0" * 7)), "x.safetensors has 7 bytes"),
    "header of no bytes": (lambda at: TensorFile(tensor_file(at, b"\0" * 8)), "is damaged: Expecting value"),
    "header longer than its file": (lambda at: TensorFile(tensor_file(at, struct.pack("<Q", 3) + b"{}")), "file of 10"),
    "schedule of 500,000 actions": (
        lambda at: schedules.read_csv(actions(at, ",".join(f"0F{i}" for i in range(500_000)))), "bytes, more than"
    ),
    "schedule of a distant stage": (lambda at: schedules.read_csv(actions(at, "0F0,999999999F0")), "999999999"),
    "log of rank 10^18": (lambda at: explain.main([log(at, rank=10**18)]), "rank0.json"),
    "log without a rank": (lambda at: explain.main([log(at, rank=None)]), "rank0.json"),
    "log of other groups": (lambda at: explain.main([log(at, groups={"a": ["tp"]})]), "rank0.json"),
    "metrics without a step": (lambda at: [*read_lines(metrics(at, '{"loss": 1}') / "metrics.jsonl")], "line 1"),
    "metrics of a list": (lambda at: [*read_lines(metrics(at, '{"step": 0}', "[]") / "metrics.jsonl")], "line 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_damaged_or_too_large_is_refused_in_one_line(tmp_path, case, capsys):
    call, words = REFUSED[case]
    began = time.monotonic()
    try:
        assert call(tmp_path) == 2  # a command prints one line
        text = capsys.readouterr().err
    except ValueError as error:
        text = str(error)
    assert words in text
    assert len(text) < 1000
    assert text.count("\n") <= 1
    assert time.monotonic() - began < 20  # two seconds on an idle machine


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    folder = metrics(tmp_path, '{"step": 0, "loss": null}')
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "lo')
    assert [*read_lines(folder / "metrics.jsonl")] == [{"step": 0, "loss": None}]
