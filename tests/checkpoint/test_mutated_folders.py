"""Mutated folders, of checkpoints and of transformers: each gives what was saved, or is refused by name within seconds.

A mutation changes a file's bytes, its JSON, or what kind of file it is; a manifest is signed again or not.
"""

import copy
import json
import os
import random
import shutil
import struct
import time
import tracemalloc
import zlib

import pytest
import torch
from torch import nn

import mpcore as mp
from examples.gpt.hf import SPEC
from mpcore.checkpoint import inspect, latest, load, save, verify
from mpcore.checkpoint.format import MANIFEST, sign
from mpcore.interop.hugging_face import carried_by_checkpoint, open_hf

hf = pytest.importorskip("transformers", minversion="5")
from tests.families import build  # noqa: E402

ODD = [None, True, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**9, 10**30, 0.5, -0.0, 1e308, "", "x", "..", "a\0b", "\x1b[31m"]
ODD += ["/etc/passwd", "F32", "I8", "int64", [], {}, [[]], [1] * 70, [0] * 2000, {"a": None}, [None]]
BESIDE = {"hugging_face/tokenizer.json": b'{"model": {"vocab": {"a": 0}}}', "note": b"said"}
FAMILIES = ("llama", "gpt2", "qwen3_moe", "gemma2")
SECONDS = 2  # of the processor, so that a busy machine counts for nothing


def places(value):
    """Yield each container inside a JSON value with each of its keys."""
    for key, inner in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
        yield value, key
        yield from places(inner) if isinstance(inner, dict | list) else ()


def mutate_json(body, draw):
    for _ in range(draw.randint(1, 2)):
        if not isinstance(body, dict | list) or not body:
            return draw.choice(ODD)
        (inner, key), (other, source) = draw.choice(found := [*places(body)]), draw.choice(found)
        how, old = draw.choice(["odd", "odd", "copy", "delete", "rename", "near"]), inner[key]
        if how in ("delete", "rename"):
            del inner[key]
            if how == "rename" and isinstance(inner, dict):
                inner[draw.choice(["x", "", "\x1b[31m", f"{key}2", str(source)])] = old
        elif how == "near" and type(old) in (int, float):
            inner[key] = draw.choice([old + 1, old - 1, old * 2, -old])
        else:
            inner[key] = copy.deepcopy(other[source] if how == "copy" else draw.choice(ODD))
    return body


def mutate_bytes(data, draw):
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice([1, 4, 64, 4096]))
    middle = draw.choice([b"", data[at:end] * 2, bytes(end - at), draw.randbytes(end - at), draw.randbytes(9)])
    middle = data[:at] + middle + data[end:]
    return draw.choice([middle, middle, middle, data[:at], data[at:], data[::-1], data + draw.randbytes(8)])


def mutate_kind(path, draw):
    data = draw.choice(sorted(p for p in path.parent.iterdir() if p.is_file())).read_bytes()
    path.unlink()
    kinds = [path.mkdir, lambda: os.mkfifo(path), lambda: path.write_bytes(data), lambda: None]
    kinds += [lambda to=to: path.symlink_to(to) for to in (path.name, "/dev/zero", "gone")]
    draw.choice(kinds)()


def mutate(folder, draw):
    path = draw.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    how, data, head = draw.choice(["json", "json", "json", "bytes", "kind"]), path.read_bytes(), 0
    if path.suffix == ".safetensors":
        head = 8 + struct.unpack("<Q", data[:8])[0]
    if how == "kind":
        mutate_kind(path, draw)
    elif how == "json" and (head or path.suffix == ".json"):
        body = json.loads(data[8:head] if head else data)
        body.pop("crc32", None)
        text = json.dumps(mutate_json(body, draw)).encode()
        data = struct.pack("<Q", len(text)) + text + data[head:] if head else text
        path.write_bytes(data)
    else:
        path.write_bytes(data := mutate_bytes(data, draw))
    manifest = folder / MANIFEST
    if draw.random() < 0.3 or not manifest.is_file() or manifest.is_symlink():
        return
    try:  # sign it again, as the author could
        body = json.loads(manifest.read_text())
        body.pop("crc32", None)
        if head and path.is_file() and len(data) > 8:
            crc = zlib.crc32(data[: 8 + struct.unpack("<Q", data[:8])[0]])
            body["files"][path.name] = {"bytes": len(data), "header_crc32": crc}
        manifest.write_text(json.dumps(body | {"crc32": sign(body)}))
    except (ValueError, LookupError, TypeError, AttributeError):  # no longer a manifest
        return


def result(folder, call, *args, **options):
    """Return what the call returns, or None if it raises a ValueError, which must name the folder."""
    began = time.process_time()
    if call is load:
        tracemalloc.start()
    try:
        return call(*args, **options)
    except ValueError as error:
        text = str(error)
        assert folder.name in text
        assert len(text) < 4000, text
        assert text.replace("\n", "").isprintable(), text
    finally:
        assert time.process_time() - began < SECONDS
        if call is load:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 1 << 22, "a file that asks for much memory"


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))
    model.register_buffer("table", torch.randn(3).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(5, 40)).sum().backward()
    optimizer.step()


def state_of(model, optimizer):
    slots = [optimizer.state[p][name] for p in model.parameters() for name in ("step", "exp_avg", "exp_avg_sq")]
    return [x.detach().clone() for x in [*model.state_dict().values(), *slots]]


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_checkpoints_are_refused_or_hold_what_was_saved(tmp_path, count):
    model, optimizer = trained(0)
    source, folder = tmp_path / "source", tmp_path / "root" / "step-00000003"
    want = state_of(model, optimizer)
    save(source, model, optimizer, mesh=mp.Mesh(), step=3, beside=BESIDE)
    for seed in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        mutate(folder, random.Random(seed))
        latest(folder.parent)
        for call in (inspect, verify, carried_by_checkpoint):
            result(folder, call, folder)
        model, optimizer = trained(1)
        before = state_of(model, optimizer)
        loaded = result(folder, load, folder, model, optimizer, mesh=mp.Mesh())
        assert all(map(torch.equal, state_of(model, optimizer), want if loaded else before)), seed
        step(model, optimizer)


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_mutated_folders_of_transformers_are_refused_or_have_its_logits(tmp_path, count):
    hf.logging.disable_progress_bar()
    for family in FAMILIES:
        torch.manual_seed(0)
        build(family).save_pretrained(tmp_path / family, max_shard_size="20KB")
    for seed in range(count):
        source, folder = tmp_path / (family := FAMILIES[seed % len(FAMILIES)]), tmp_path / "root" / family
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        mutate(folder, random.Random(seed))
        result(folder, open_hf, folder, spec=SPEC)
        if (model := result(folder, mp.from_pretrained, folder, check=False)) is None:
            continue
        kind = getattr(hf, type(model).__name__)
        try:
            want = kind.from_pretrained(folder)
        except Exception:  # it is stricter about metadata, which change no value
            want = kind.from_pretrained(source)
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            try:
                logits = want.eval()(tokens).logits
            except Exception as error:  # such as for an odd number of experts a token
                with pytest.raises(type(error)):
                    model(tokens)
            else:
                torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-4, atol=1e-4, equal_nan=True)
