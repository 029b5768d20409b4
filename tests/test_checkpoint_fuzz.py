"""Damaged or hostile checkpoints: refused by name, or read as they were; never a giant allocation."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mpcore import Mesh
from mpcore.checkpoint import format as checkpoint_format
from mpcore.checkpoint import load, save, verify
from mpcore.checkpoint.format import MANIFEST
from mpcore.checkpoint.tensor_file import TensorFile

FILE = "model-00000.safetensors"
MANY = settings(max_examples=50, deadline=None)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict[str, Any], bytes]:
    """A checkpoint, its manifest without the checksum, and the bytes of its file."""
    folder = tmp_path_factory.mktemp("fuzz") / "step"
    save(folder, small(), mesh=Mesh(), step=3)
    body = json.loads((folder / MANIFEST).read_text())
    del body["crc32"]
    return folder, body, (folder / FILE).read_bytes()


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """The path of everything inside a JSON value."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [place for key, inner in items for place in places(inner, (*at, key))]


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
    | st.sampled_from([2**31, 2**63, 2**64, -1, 10**18, "..", "/etc/passwd", FILE, "F32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    | st.sampled_from([[1] * 2000, [0] * 2000]),
    max_leaves=4,
)  # fmt: skip


def changed(data: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A JSON object of which up to three values are others, or gone."""
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        known = places(body)[:500]
        if not known:
            break
        *way, last = data.draw(st.sampled_from(known))
        inner = body
        for key in way:
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[last] = copy.deepcopy(data.draw(ODD))
        else:
            del inner[last]
    return body


def read(folder: Path) -> None:
    """Reading is an error that says what, or gives the bits that were saved; and takes little memory."""
    model = small()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    tracemalloc.start()
    try:
        load(folder, model, mesh=Mesh())
        same = {name: torch.equal(value, want[name]) for name, value in model.state_dict().items()}
        assert all(same.values()), same
    except ValueError:
        assert not any(value.any() for value in model.state_dict().values())  # nothing was half loaded
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 22
    with contextlib.suppress(ValueError):  # a manifest that can't be read at all
        verify(folder)


@given(data=st.data())
@MANY
def test_row_19_a_manifest_of_any_content_is_refused_or_reads_what_was_saved(written, data):
    folder, body, content = written
    body = changed(data, body)
    try:
        body["crc32"] = checkpoint_format.sign(body)
    except (ValueError, TypeError):
        return
    (folder / MANIFEST).write_text(json.dumps(body))
    (folder / FILE).write_bytes(content)
    read(folder)


def test_row_19_a_key_that_is_no_name_is_refused(written):
    folder, body, content = written
    body = copy.deepcopy(body)
    body["tensors"]["model/0.bias"]["chunks"][0]["key"] = []
    body["crc32"] = checkpoint_format.sign(body)
    (folder / MANIFEST).write_text(json.dumps(body))
    (folder / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=r"key: .* is not of type str"):
        load(folder, small(), mesh=Mesh())


@given(data=st.data())
@MANY
def test_row_19_a_tensor_file_of_any_header_is_refused_or_gives_what_lies_in_it(written, data):
    """As of others, with no manifest that knows its checksum."""
    folder, _, content = written
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(changed(data, json.loads(content[8 : 8 + length]))).encode()
    if data.draw(st.booleans()):
        length = data.draw(st.sampled_from([len(header), len(header), 0, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1))
    else:
        length = len(header)
    path = folder.parent / "other.safetensors"
    message = str(path)
    path.write_bytes(struct.pack("<Q", length) + header + content[8 + struct.unpack("<Q", content[:8])[0] :])
    tracemalloc.start()
    try:
        file = TensorFile(path)
        for key in file.header:
            assert file.whole(key).nbytes <= path.stat().st_size
    except ValueError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(path) in message
    assert peak < 1 << 22


@given(at=st.integers(0, 10**6), bits=st.integers(1, 255), cut=st.booleans(), manifest=st.booleans())
@MANY
def test_row_16_17_18_any_byte_changed_or_cut_is_refused(written, at, bits, cut, manifest):
    folder, body, content = written
    body = {**body, "crc32": checkpoint_format.sign(body)}
    parts = {FILE: content, MANIFEST: json.dumps(body).encode()}
    name = MANIFEST if manifest else FILE
    damaged = bytearray(parts[name])
    if cut:
        del damaged[at % len(damaged) :]
    else:
        damaged[at % len(damaged)] ^= bits
    for part, old in parts.items():
        (folder / part).write_bytes(damaged if part == name else old)
    read(folder)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has 0 bytes"),
        (b"\0" * 7, "has 7 bytes"),
        (b"\0" * 8, "is damaged: Expecting value"),
        (struct.pack("<Q", 3) + b"{}", "is damaged: a header of 3 bytes, in a file of 10 and at most"),
    ],
)
def test_a_file_without_a_header_is_told_by_its_size(tmp_path, content, told):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} {told}"):
        TensorFile(path)
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert TensorFile(path).header == {}
