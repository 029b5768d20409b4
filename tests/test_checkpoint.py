"""Checkpoints: any layout to any layout bitwise, safe to load, safe to be killed over."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from examples.gpt.pretrain import Trainer, parse
from mpcore import AdamW, ColumnParallelLinear, Mesh, decay_groups, full_state_dict, parallelize, shard_sequence
from mpcore import vocab_parallel_cross_entropy as cross_entropy
from mpcore.checkpoint import diff, inspect, latest, load, save, save_async, step_path, tensor_file, verify
from mpcore.checkpoint.format import MANIFEST, read_manifest, tiles
from mpcore.checkpoint.tensor_file import Files
from mpcore.collectives import all_reduce
from mpcore.gradients import clip_gradients, grad_norm, guard_optimizer, reduce_gradients
from mpcore.layers import materialize
from mpcore.layers.dropout import seed_dropout
from mpcore.parallel.data import shard_data_parallel
from mpcore.pipeline import Pipeline
from mpcore.sharding import shardings
from mpcore.sharding.local import local_tensor
from tests.checkpoint.test_schema import rewrite
from tests.examples.test_pretrain import trainer
from tests.gpt_step import over_data
from tests.pool import RankError, mesh
from tests.quick import some

# Odd on purpose: 53 words over 4 ranks, 6 heads over 4, 2 KV heads replicated over 4, 21 hidden features.
CONFIG = GPTConfig(vocab_size=53, seq_len=6, layers=2, d_model=24, heads=6, kv_heads=2, d_ff=21, dropout=0.1)
TIED = replace(CONFIG, tie_embeddings=True, bias=True, norm="layer", positions="learned", activation="gelu")
BATCH = 12


class Run:
    """A model in training on some mesh: what a checkpoint must bring back."""

    def __init__(self, on: Mesh, config: GPTConfig = CONFIG, zero: int = 0, seed: int = 5, replicate: int = 1) -> None:
        self.mesh, self.config = on, config
        self.model = GPT(config, on, device="meta", dtype=torch.float64)
        materialize(self.model, seed)
        shard_data_parallel(self.model, on, self.model.blocks.values(), zero=zero, replicate=replicate)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))
        self.pipeline = Pipeline(self.model, on, on.pp.size, self.loss)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target, tp=self.mesh.tp, vocab_size=self.config.vocab_size, reduction="sum") / 72

    def step(self, step: int) -> float:
        g = torch.Generator().manual_seed(step)
        whole = (*torch.randint(self.config.vocab_size, (2, BATCH, 6), generator=g), torch.arange(BATCH) + BATCH * step)
        *whole, samples = (t.chunk(self.mesh.dp.size)[self.mesh.dp.rank] for t in whole)
        tokens, targets = (shard_sequence(t, self.mesh.cp, "zigzag") for t in whole)
        total = self.pipeline.forward_backward(tokens, targets, samples=samples)
        reduce_gradients(self.model)
        clip_gradients(self.model, 1.0, grad_norm(self.model, self.mesh))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(all_reduce(total, self.mesh.data))

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        list(self.pipeline.forward([torch.zeros(2, 6 // self.mesh.cp.size, dtype=torch.int64)]))
        self.model.train()

    def steps(self, first: int, last: int) -> list[float]:
        return [self.step(step) for step in range(first, last)]

    def save(self, path: str | Path, step: int, how: Callable = save, **options):
        state = {"sample": step * BATCH, "seed": 5, "config": {"layers": 2}, "extra": {"scale": 1.5}}
        return how(path, self.model, self.optimizer, mesh=self.mesh, step=step, **state, **options)

    def load(self, path: str | Path, **options):
        manifest = load(path, self.model, self.optimizer, mesh=self.mesh, **options)
        seed_dropout(self.model, manifest.seed or 0)
        return manifest

    def full(self) -> dict[str, Tensor]:
        """Parameters and optimizer state in logical shapes, of this stage: a collective."""
        declared, found = shardings(self.model), {}
        for name, p in self.model.named_parameters():
            for slot, value in {"": p, **self.optimizer.state[p]}.items():
                whole = over_data(value, self.mesh, declared[name]) if value.dim() else value
                found[f"optimizer/{slot}/{name}" if slot else f"model/{name}"] = whole
        return {name: tensor.clone() for name, tensor in found.items()}


def size_of(sizes: dict) -> int:
    return math.prod(sizes.values())


def everything(path: str | Path) -> dict[str, Tensor]:
    manifest = inspect(path)
    files = Files(Path(path), manifest)
    return {name: files.assemble(name) for name in manifest.tensors}


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


# Beside the sizes the stage of ZeRO; 22: stage 2, replicated over two groups of ranks.
def check_save(sizes: dict, path: str, config: GPTConfig, zero: int, more: int = 3):
    run = Run(mesh(**sizes), config, zero % 10, replicate=zero // 10 or 1)
    run.steps(0, 2)
    state = run.full()
    run.evaluate()
    run.save(path, 2)
    return state, run.steps(2, 2 + more)


def check_load(sizes: dict, path: str, config: GPTConfig, zero: int, again: str, more: int = 3):
    run = Run(mesh(**sizes), config, zero % 10, seed=6, replicate=zero // 10 or 1)
    if zero:
        run.step(9)  # a used optimizer, and parameters that a forward has left gathered
        run.evaluate()
    manifest = run.load(path)
    assert (manifest.step, manifest.sample, manifest.seed, manifest.extra) == (2, 2 * BATCH, 5, {"scale": 1.5})
    state = run.full()
    run.save(again, 2)
    return state, run.steps(2, 2 + more)


# A writer and a reader. Tied weights, and all else that GQA hasn't: where they are sharded most.
PAIRS = [
    (({"tp": 2, "pp": 2}, 0), ({}, 0), CONFIG), (({"tp": 2, "pp": 2}, 0), ({"tp": 2, "dp": 2}, 2), CONFIG),
    (({"tp": 2, "pp": 2}, 0), ({"dp": 4}, 22), CONFIG), (({"tp": 2, "pp": 2}, 0), ({"pp": 2, "dp": 2}, 1), TIED),
    (({}, 0), ({"pp": 2}, 0), CONFIG), (({}, 0), ({"tp": 4}, 0), TIED),
]  # fmt: skip
LAYOUTS = [({"tp": 3}, 0), ({"tp": 4}, 0), ({"pp": 2}, 0), ({"dp": 4}, 3), ({"dp": 4}, 22), ({"tp": 2, "dp": 2}, 2),
           ({"cp": 2, "tp": 2}, 1), ({"cp": 2, "dp": 2}, 3)]  # fmt: skip
MORE = [(*pair, config) for pair in itertools.product(LAYOUTS, repeat=2) for config in (CONFIG, TIED)]
WRITTEN: dict = {}


@pytest.mark.parametrize(("writer", "reader", "config"), [
    *some(PAIRS[0], *PAIRS[2:4], PAIRS[5], of=PAIRS), *some(of=random.Random(0).sample(MORE, 24)),
], ids=lambda x: "tied" if x is TIED else "gqa" if x is CONFIG else str(x))  # fmt: skip
def test_pitfall_15_16_17_38_what_one_layout_saves_every_other_loads_bitwise(
    ranks, tmp_path_factory, writer, reader, config
):
    """Parameters and Adam's state when gathered, the next losses, and what the reader saves in its turn."""
    check_pair(ranks, tmp_path_factory, writer, reader, config)


def check_pair(ranks, tmp_path_factory, writer, reader, config, more=3) -> None:
    (sizes, zero), (wanted, sharded) = writer, reader
    key = (str(writer), config, more)
    if key not in WRITTEN:
        path = tmp_path_factory.mktemp("written") / "step"
        results = ranks(size_of(sizes), check_save, sizes, str(path), config, zero, more)
        state = {name: tensor for part, _ in results for name, tensor in part.items()}
        for part, losses in results:
            same_bits(part, {name: state[name] for name in part})
            assert losses == results[0][1]
        same_bits(everything(path), state)
        WRITTEN[key] = path, state, results[0][1]
    path, state, losses = WRITTEN[key]
    again = tmp_path_factory.mktemp("again") / "step"
    found: dict[str, Tensor] = {}
    for part, got in ranks(size_of(wanted), check_load, wanted, str(path), config, sharded, str(again), more):
        same_bits(part, {name: state[name] for name in part})
        found |= part
        assert got == pytest.approx(losses, rel=1e-12)
        assert wanted != sizes or sharded != zero or got == losses
    assert found.keys() == state.keys()
    assert not diff(path, again)


def check_bytes(sizes: dict, path: str, zero: int = 0) -> None:
    run = Run(mesh(**sizes), zero=zero)
    run.step(0)
    run.save(path, 1)


def test_pitfall_15_17_every_element_is_stored_once_in_its_logical_place(ranks, tmp_path):
    """KV heads replicated over tp, 53 words over 4 ranks: no copy, no padding; files that the library opens."""
    for zero, sizes in enumerate(({"tp": 4}, {"tp": 2, "dp": 2})):
        path = tmp_path / str(zero)
        ranks(4, check_bytes, sizes, str(path), zero)
        manifest = inspect(path)
        assert manifest.tensors["model/embedding.weight"].shape == (53, 24)
        assert manifest.tensors["model/blocks.1.attention.qkv.weight"].shape == ((6 + 2 * 2) * 4, 24)
        dense = [p.numel() for p in GPT(CONFIG, device="meta").parameters()]
        stored = 0
        for name in manifest.files:
            with safe_open(path / name, "pt") as file:
                stored += sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
        assert stored == 3 * sum(dense) + len(dense)
        assert not verify(path)
    ranks(1, check_bytes, {}, str(tmp_path / "one"))
    want = everything(tmp_path / "one")
    with safe_open(tmp_path / "one" / "model-00000.safetensors", "pt") as file:  # one file, of logical names
        same_bits({f"model/{key}": file.get_tensor(key) for key in file.keys()},  # noqa: SIM118
                  {name: tensor for name, tensor in want.items() if name.startswith("model/")})  # fmt: skip


class Odd(nn.Module):
    """Dtypes, scalars, empty tensors and buffers that models may hold."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
            self.register_parameter(f"a_{str(dtype)[6:]}", nn.Parameter(torch.randn(3, 5, generator=g).to(dtype)))
        self.scalar = nn.Parameter(torch.randn((), generator=g))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("eight", torch.randn(4, generator=g).to(torch.float8_e4m3fn))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_pitfall_38_buffers_and_odd_tensors_come_back(tmp_path):
    model, other = Odd(), Odd()
    save(tmp_path / "odd", model, mesh=Mesh(), step=3)
    assert "model/cache" not in inspect(tmp_path / "odd").tensors
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.zero_()
    load(tmp_path / "odd", other, mesh=Mesh())
    for name, tensor in other.state_dict().items():
        assert torch.equal(*(x.view(torch.uint8) if name == "eight" else x for x in (tensor, model.state_dict()[name])))
    assert not other.cache.any()
    save(tmp_path / "odd2", other, mesh=Mesh(), step=3)
    assert not diff(tmp_path / "odd", tmp_path / "odd2")


class Large(nn.Module):
    """Parameters that are larger than a large page, one of them with another order of its dimensions, in memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(1021, 521, generator=g))
        self.turned = nn.Parameter(torch.randn(1031, 509, generator=g).t())
        self.brief = nn.Parameter(torch.randn(1049, 1013, generator=g).bfloat16())
        self.optimizer = torch.optim.AdamW(self.parameters())

    def step(self) -> None:
        for number, p in enumerate(self.parameters()):
            p.grad = torch.full_like(p, 0.1).addcmul_(p.detach(), p.detach(), value=number + 1.0)
        self.optimizer.step()


def test_pitfall_40_large_tensors_come_back_into_new_memory_and_into_old(tmp_path):
    model, other = Large(1), Large(2)
    model.step()
    save(tmp_path / "now", model, model.optimizer, mesh=Mesh(), step=1)
    saving = save_async(tmp_path / "later", model, model.optimizer, mesh=Mesh(), step=1)
    model.step()
    saving.wait()
    assert not diff(tmp_path / "now", tmp_path / "later")
    for _ in range(2):  # the second time the optimizer has memory
        load(tmp_path / "now", other, other.optimizer, mesh=Mesh())
        other.step()
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            same_bits(other.optimizer.state[p] | {"": p}, model.optimizer.state[q] | {"": q})
        slots = [other.optimizer.state[p]["exp_avg"] for p in other.parameters()]
        assert [x.stride() for x in slots] == [p.stride() for p in other.parameters()]


def state_of(run: Run) -> dict[str, Tensor]:
    """This rank's own tensors, as they are."""
    found = {name: local_tensor(p).detach().clone() for name, p in run.model.named_parameters()}
    for i, slots in enumerate(run.optimizer.state.values()):
        found |= {f"{i}/{slot}": local_tensor(value).clone() for slot, value in slots.items()}
    return found


def flip_bit(path: Path) -> str:
    chunk = read_manifest(path).tensors["model/blocks.1.mlp.down.weight"].chunks[0]
    with safe_open(path / chunk.file, "pt") as file:
        payload = tensor_file.raw(file.get_tensor(chunk.key))
    data = bytearray((path / chunk.file).read_bytes())
    data[data.index(payload) + 3] ^= 4
    (path / chunk.file).write_bytes(data)
    return rf"model/blocks.1.mlp.down.weight: .*{chunk.file}: {chunk.key} is damaged"


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 128]) + (data[at + 1 :] if at != -1 else b"")


def canary(path: Path) -> bytes:
    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {path.parent / 'canary'}",)

    return pickle.dumps(Payload())


def pickled_tensors(path: Path) -> str:
    """The right size and a manifest that agrees with it: only the format itself stands in the way."""
    file = path / "model-00000.safetensors"
    file.write_bytes(canary(path).ljust(file.stat().st_size, b"\0"))
    return "model-00000.safetensors is damaged: a header of"


MODEL, OPTIMIZER = "model-00000.safetensors", "optimizer-00000.safetensors"
# A file, its new bytes (None: it is removed), and what the refusal names.
BYTES: list[tuple[str, Callable[[bytes], bytes | None], str]] = [
    ("optimizer-00001.safetensors", flip(-1), "optimizer/exp_avg_sq/head.weight: .*optimizer-00001.safetensors"),
    ("model-00001.safetensors", flip(30), "model-00001.safetensors is damaged: the CRC-32 of its header"),
    (MODEL, lambda data: data[:-9], rf"{MODEL} has \d+ bytes, written were \d+"),
    (MODEL, lambda data: b"", f"{MODEL} has 0 bytes, written were"),
    (MODEL, lambda data: struct.pack("<Q", 2**63) + data[8:], f"{MODEL} is damaged: .* 9223372036854775808 bytes"),
    (OPTIMIZER, lambda data: None, f"{OPTIMIZER} is missing"),
    (MANIFEST, lambda data: None, "no complete checkpoint: .* no manifest.json"),
    (MANIFEST, lambda data: data[: len(data) // 2], "manifest.json is damaged"),
    (MANIFEST, lambda data: data.replace(b'"step": 2', b'"step": 3', 1), "manifest.json is damaged: its CRC-32"),
]


def at(*keys: Any, **values: Any) -> Callable[[dict], None]:
    """Set values of the object at these keys of a manifest."""

    def change(body: Any) -> None:
        for key in keys:
            body = body[key]
        body.update(values)

    return change


def tensors(body: dict) -> dict:
    return body["tensors"]


NORM, WORDS = "model/norm.weight", "model/embedding.weight"
# Changes of a manifest that is signed again, as someone would who means harm, and what the refusal names.
SIGNED: list[tuple[Callable[[dict], Any], str]] = [
    (at(format="torch"), "is not the manifest of an mpcore checkpoint"),
    (at(version=3), "format version 3, this mpcore reads version 2"),
    (at(version=1), "format version 1, this mpcore reads version 2"),
    (lambda body: body["files"].update({"../../etc/passwd": body["files"][MODEL]}), r"'../../etc/passwd'"),
    (lambda body: tensors(body)[WORDS]["chunks"].pop(), rf"the 1 chunks of {WORDS} .*\(53, 24\)"),
    (at("tensors", WORDS, "chunks", 1, start=[26, 0]), rf"the 2 chunks of {WORDS} .*\(53, 24\)"),
    (at("tensors", NORM, "chunks", 0, key="norm.bias"), f"{MODEL} has no tensor 'norm.bias'"),
    (lambda body: tensors(body)[NORM]["chunks"][0].update(
        {key: x for key, x in tensors(body).pop(WORDS)["chunks"][0].items() if key in ("key", "file")}),
     r"embedding.weight\S* is \{.*'shape': \[\d\d, 24\].* expected \{.*'shape': \[24\]"),
    (at("tensors", NORM, dtype="F3"), f"{NORM} has the unknown dtype 'F3'"),
    (at("tensors", NORM, "chunks", 0, file="other"), f"{NORM} lies in 'other'"),
    (lambda body: tensors(body).pop(NORM), f"{NORM}: missing from the checkpoint"),
    (lambda body: tensors(body).pop("optimizer/exp_avg_sq/norm.weight"), "exp_avg_sq/norm.weight: missing"),
    (at(optimizer=None), "the optimizer: missing from the checkpoint"),
    (lambda body: tensors(body).update({"model/extra.weight": tensors(body)[NORM]}), "are both 'norm.weight' of"),
]  # fmt: skip


def check_refused(cases: list[tuple[str, str]]) -> None:
    """Every rank refuses, by name, and nothing has changed."""
    run = Run(mesh(dp=2), zero=1)
    run.step(7)
    before, options = state_of(run), [dict(group) for group in run.optimizer.param_groups]
    for path, message in cases:
        with pytest.raises(ValueError, match=message):
            run.load(path)
        same_bits(state_of(run), before)
        assert [dict(group) for group in run.optimizer.param_groups] == options


def test_what_is_damaged_is_refused_by_name_and_changes_nothing(ranks, tmp_path):
    """RELIABILITY 16 to 19 and 26: bits, lengths, versions, shapes, pickles. No payload runs."""
    good, cases = tmp_path / "good", [(str(tmp_path / "nowhere"), "nowhere is no complete checkpoint")]
    ranks(2, check_save, {"tp": 2}, str(good), CONFIG, 0, 0)

    def case(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name / "step"))

    for damage in (flip_bit, pickled_tensors):
        cases.append((str(path := case(damage.__name__)), damage(path)))
    for i, (name, change, message) in enumerate(BYTES):
        data = change(((path := case(f"bytes {i}")) / name).read_bytes())
        (path / name).unlink() if data is None else (path / name).write_bytes(data)
        cases.append((str(path), message))
    for i, (change, message) in enumerate(SIGNED):
        rewrite(path := case(f"signed {i}"), change)
        cases.append((str(path), message))
    assert latest(tmp_path / "bytes 6") is None
    ranks(2, check_refused, cases)
    assert verify(tmp_path / "flip_bit" / "step")
    assert verify(tmp_path / "pickled_tensors" / "step")
    assert not verify(good)
    assert "canary" not in {p.name for p in tmp_path.rglob("*")}


def check_other_models(path: str) -> None:
    on = mesh(tp=2)
    for config, message in (
        (replace(CONFIG, d_ff=22), r"model/blocks.0.mlp.down.weight: .*\(24, 22\), .*\(24, 21\)"),
        (replace(CONFIG, vocab_size=54), r"model/embedding.weight: .*\(54, 24\), .*\(53, 24\)"),
        (replace(CONFIG, layers=3), r"model/blocks.2.attention_norm.weight: missing from the checkpoint"),
        (replace(CONFIG, layers=1), r"model/blocks.1.attention_norm.weight: in the checkpoint, but not in the model"),
        (replace(CONFIG, tie_embeddings=True), r"model/head.weight: in the checkpoint, but not in the model"),
    ):
        run = Run(on, config)
        with pytest.raises(ValueError, match=message):
            run.load(path)
    run.load(path, strict=False)
    (held,) = run.model.embedding.shardings["weight"].shards[0].mine
    assert torch.equal(run.model.embedding.weight, everything(path)["model/embedding.weight"][slice(*held)])
    run = Run(on)
    run.model.float()
    with pytest.raises(ValueError, match=r"model/embedding.weight: expected dtype F32, found F64 in model-00000"):
        run.load(path)
    run = Run(on)
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    with pytest.raises(ValueError, match=r"parameter group 0 of the optimizer lies in groups \[0, 1\]"):
        run.load(path)


def check_left_out(path: str) -> None:
    on = mesh(pp=2)
    me, every = on.pp.rank, range(2)

    def build(*names: str) -> nn.ModuleDict:
        return nn.ModuleDict({f"{name}{me}": nn.Linear(2, 2) for name in names})

    old = build("same", "old")
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in old.parameters()).backward()
    optimizer.step()
    save(path, old, optimizer, mesh=on, step=3)
    both = load(path, old, optimizer, mesh=on, strict=False)
    assert (both.step, both.missing_keys, both.unexpected_keys) == (3, [], [])
    new = build("same", *(["new"] if me else []))  # on one stage alone, and known on both
    optimizer = torch.optim.SGD([module.weight for module in new.values()], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"optimizer/momentum_buffer/same0\.bias: in the checkpoint, but not in"):
        load(path, new, optimizer, mesh=on)
    found = load(path, new, optimizer, mesh=on, strict=False)
    assert found.missing_keys == ["model/new1.bias", "model/new1.weight", "the optimizer's group of new1.weight"]
    left = [f"model/old{i}.{leaf}" for i in every for leaf in ("bias", "weight")]
    slots = [f"{of}{i}.{leaf}" for of in ("old", "same") for i in every for leaf in ("bias", "weight")]
    left += [f"optimizer/momentum_buffer/{name}" for name in slots if not ("same" in name and "weight" in name)]
    assert found.unexpected_keys == left
    assert torch.equal(new[f"same{me}"].weight, old[f"same{me}"].weight)
    wide = new.bfloat16()
    optimizer = AdamW(wide, lr=0.1)
    sum(p.float().square().sum() for p in wide.parameters()).backward()
    optimizer.step()
    before = {p: dict(optimizer.state[p]) for p in wide[f"new{me}"].parameters()} if me else {}
    save(path, old, AdamW(old), mesh=on, step=3)
    load(path, wide, optimizer, mesh=on, strict=False, cast=True)
    assert all(optimizer.state[p] == state for p, state in before.items()), "also the float32 master weight"
    save(path, old, mesh=on, step=3)
    strict = load(path, old, mesh=on)
    assert strict.missing_keys == strict.unexpected_keys == []


def check_undeclared(root: str) -> None:
    """RELIABILITY 25: a shard that nobody declares, a name on two stages, replicas that drifted apart."""
    on, stages = mesh(tp=2), mesh(pp=2)
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight.add_(on.tp.rank)
    other = torch.optim.SGD(nn.Linear(3, 4).parameters())
    extra = {"x": torch.ones(1)} if on.tp.rank else None
    refused: list[tuple[tuple, dict, str]] = [
        ((model,), {}, r"model/weight on rank 1 differs from model-00000.safetensors"),
        ((nn.Linear(3, 4 + on.tp.rank),), {}, r"ranks disagree about model/(weight|bias)"),
        ((nn.Linear(3, 4),), {"mesh": stages}, r"the 2 chunks of model/bias in model-00000.\S+, model-00001.safeten"),
        ((model, other), {}, r"a parameter of shape \(4, 3\) that is none of the model's"),
        ((nn.Linear(3, 4),), {"extra": extra}, r"extra can't be written as JSON: .*\(on rank 1 of 2\)"),
    ]
    for given, options, message in refused:
        with pytest.raises(ValueError, match=message):
            save(f"{root}/a", *given, **{"mesh": on, "step": 1, **options})
    assert not list(Path(root).iterdir())
    layer = ColumnParallelLinear(3, 4, tp=on.tp)
    layer.register_parameter("weight@0,0", nn.Parameter(torch.ones(2)))  # the key of a shard of weight
    assert verify(save(f"{root}/a", layer, mesh=on, step=1)) == []


def check_groups(path: str) -> None:
    """A learning rate for each layer, and layers on other stages."""
    on = mesh(pp=2)
    model = nn.ModuleDict({f"{i}": nn.Linear(2, 2) for i in range(3) if (i > 0) == on.pp.rank})
    groups = [{"params": list(layer.parameters()), "lr": 0.1 * int(i)} for i, layer in model.items()]
    with pytest.raises(ValueError, match=r"some ranks' optimizers have 1 parameter groups, others 2"):
        save(path, model, torch.optim.SGD(groups), mesh=on, step=1)
    every: list[dict] = [
        {"params": list(model[f"{i}"].parameters()) if f"{i}" in model else [], "lr": 0.1 * i} for i in range(3)
    ]
    apart = [group | {"momentum": 0.1 * on.pp.rank} for group in every]
    with pytest.raises(ValueError, match=r"parameter group 0: .*'momentum': 0\.0.*'momentum': 0\.1"):
        save(path, model, torch.optim.SGD(apart), mesh=on, step=1)
    optimizer = torch.optim.SGD(every)
    save(path, model, optimizer, mesh=on, step=1)
    assert [group["params"] for group in inspect(path).optimizer or ()] == [
        [f"{i}.bias", f"{i}.weight"] for i in range(3)
    ]
    load(path, model, optimizer, mesh=on)
    model = nn.ModuleDict({"1": nn.Linear(2, 2)} if on.pp.rank else {"0": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    groups = [{"params": list(model[name].parameters()) if name in model else [], "lr": 9.0} for name in ("1", "new")]
    optimizer = torch.optim.SGD(groups)  # the first was the second on stage 1, the second is new
    load(path, model, optimizer, mesh=on, strict=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 9.0]


def check_other_optimizers(root: str) -> None:
    on = mesh(tp=2)
    for make in (partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1), torch.optim.Adagrad):
        models = [ColumnParallelLinear(3, 5, tp=on.tp) for _ in range(2)]
        first, second = (make(model.parameters()) for model in models)
        models[0].bias.requires_grad_(False)
        models[0](torch.ones(2, 3)).sum().backward()
        first.step()
        save(f"{root}/step", models[0], first, mesh=on, step=1)
        load(f"{root}/step", models[1], second, mesh=on)
        same_bits(dict(models[1].named_parameters()), dict(models[0].named_parameters()))
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            same_bits(*({k: v for k, v in o.state[x].items() if v is not None} for o, x in ((first, p), (second, q))))
        slots = [x for state in second.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]
        want = [x.clone() for x in slots]
        for x in slots:
            x.fill_(7)
        load(f"{root}/step", models[1], second, mesh=on)  # into the memory that there is, not beside it
        assert all(map(torch.equal, slots, want))


@pytest.mark.parametrize("check", [check_left_out, check_undeclared, check_groups, check_other_optimizers])
def test_what_ranks_save_and_load_is_named_or_refused_on_each(ranks, tmp_path, check):
    (tmp_path / "root").mkdir()
    ranks(2, check, str(tmp_path / "root"))


def test_another_model_is_refused_by_name_and_shape(ranks, tmp_path):
    ranks(2, check_save, {"tp": 2}, str(tmp_path / "step"), CONFIG, 0, 0)
    ranks(2, check_other_models, str(tmp_path / "step"))


def test_a_checkpoint_from_before_the_first_step_forgets_what_the_optimizer_had(tmp_path):
    """Nor is it refused: with float16 all steps before it may have been skipped (Megatron-LM #602)."""
    run = Run(Mesh())
    run.save(tmp_path / "step", 0)
    want = run.steps(0, 2), run.full()
    run.load(tmp_path / "step")
    assert not run.optimizer.state
    got = run.steps(0, 2), run.full()
    assert got[0] == want[0]
    same_bits(got[1], want[1])


def test_settings_and_states_of_another_kind_of_optimizer_are_refused(tmp_path):
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    first = torch.optim.AdamW(model.parameters())
    first.step()
    save(tmp_path / "step", model, first, mesh=Mesh(), step=np.int64(3), sample=np.int32(12))
    for other, names in (("RAdam", "AdamW, this is RAdam"), ("SGD", "only one of both has betas, momentum")):
        if other == "SGD":  # an older checkpoint doesn't say
            rewrite(tmp_path / "step", lambda body: body["optimizer"][0].pop("kind"))
        for strict in (True, False):
            optimizer = getattr(torch.optim, other)(model.parameters(), lr=0.5)
            with pytest.raises(ValueError, match=f"another kind of optimizer: {names}.*checkpoint.load"):
                load(tmp_path / "step", model, optimizer, mesh=Mesh(), strict=strict)
            assert optimizer.param_groups[0]["lr"] == 0.5
    found = load(tmp_path / "step", model, torch.optim.AdamW(model.parameters(), foreach=True), mesh=Mesh())
    assert (found.step, found.sample) == (3, 12)
    with pytest.raises(ValueError, match="amsgrad True, whose state the checkpoint lacks, as it was saved with False"):
        load(tmp_path / "step", model, torch.optim.AdamW(model.parameters(), amsgrad=True), mesh=Mesh())
    other = torch.optim.AdamW(model.parameters(), amsgrad=True, maximize=True)
    save(tmp_path / "step", model, other, mesh=Mesh(), step=3)
    with pytest.raises(ValueError, match="only one of both has amsgrad, maximize"):  # whose step ignores both
        load(tmp_path / "step", model, AdamW(model), mesh=Mesh())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_moments_are_loaded_in_the_dtype_that_the_optimizer_keeps(tmp_path, dtype):
    model, want = ColumnParallelLinear(4, 4, bias=False), dtype or torch.float32
    model.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))  # a tensor without axes
    first = AdamW(model, state_dtype=torch.float32 if dtype else torch.bfloat16, masters=False)
    (model(torch.ones(1, 4)) * model.scale).sum().backward()
    first.step()
    save(tmp_path / "step", model, first, mesh=Mesh(), step=1)
    second = AdamW(model, state_dtype=dtype, masters=False)
    load(tmp_path / "step", model, second, mesh=Mesh())
    for p, state in first.state.items():
        for slot in ("exp_avg", "exp_avg_sq"):
            same_bits({slot: second.state[p][slot]}, {slot: state[slot].to(want)})
    third = torch.optim.AdamW(decay_groups(model, 0.1), fused=True)  # whose step takes the parameters' dtype alone
    load(tmp_path / "step", model, third, mesh=Mesh())
    third.step()


def test_a_learning_rate_in_a_tensor_stays_the_tensor_that_it_was(tmp_path):
    """A captured step reads it where it lies."""
    model = nn.Linear(3, 2)
    save(tmp_path / "step", model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25)), mesh=Mesh(), step=1)
    lr = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    load(tmp_path / "step", model, optimizer, mesh=Mesh())
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.25


def test_tiles_accepts_what_covers_a_shape_once_and_nothing_else():
    assert tiles([()], ())
    assert tiles([((0, 2), (0, 3)), ((2, 1), (0, 1)), ((2, 1), (1, 2))], (3, 3))
    assert tiles([], (0, 3))
    for boxes, shape in (
        ([], ()), ([(), ()], ()), ([], (1,)), ([((0, 2),)], (3,)), ([((0, 2),), ((1, 2),)], (3,)),
        ([((0, 3),), ((3, 1),)], (3,)), ([((0, 3),)] * 2, (3,)), ([((0, 0),), ((0, 3),)], (3,)),
    ):  # fmt: skip
        assert not tiles(boxes, shape), boxes


def check_killed(root: str, victim: int, name: str, count: int, asynchronous: bool) -> None:
    """Two saves that end well, then one over the first, in which the victim dies at its `count`-th call of `name`."""
    run = Run(mesh(tp=2))
    run.steps(0, 1)
    run.save(Path(root) / "step", 1)
    run.steps(1, 2)
    calls, real = [0], getattr(os, name)

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    if run.mesh.tp.rank == victim:
        setattr(os, name, call)
    saving = run.save(Path(root) / "step", 2, save_async if asynchronous else save)
    saving.wait() if asynchronous else None


UNINTERRUPTED: list[float] = []


def check_killed_and_resumed(ranks, tmp_path: Path, victim: int, name: str, count: int, asynchronous: bool) -> None:
    with pytest.raises(RankError, match="the process died"):
        ranks(2, check_killed, str(tmp_path), victim, name, count, asynchronous)
    found = latest(tmp_path)
    assert not verify(found)
    step = inspect(found).step
    if not UNINTERRUPTED:
        UNINTERRUPTED.extend(Run(Mesh()).steps(0, 4))
    run = Run(Mesh())
    assert run.load(tmp_path / "step").step == step
    assert run.steps(step, 4) == pytest.approx(UNINTERRUPTED[step:], rel=1e-12)
    run.save(tmp_path / "step", 4, keep=1)  # the next save clears up
    assert [p.name for p in tmp_path.iterdir()] == ["step"]
    assert not verify(tmp_path / "step")


# the call at which a rank dies: with a file half done, between two renames; then any that changes the disk, drawn
MOMENTS: list = [(1, "fsync", 1, True), (0, "rename", 2, False)]
CALLS = {"pwrite": 20, "fsync": 5, "rename": 2, "mkdir": 1, "open": 2, "rmdir": 1}


def drawn(seed: int) -> tuple[int, str, int, bool]:
    """Of the calls of rank 0 any, and of those of rank 1 a write."""
    draw = random.Random(seed)
    name = draw.choice([*CALLS, "pwrite", "pwrite"])
    victim = draw.randrange(2) if name in ("pwrite", "fsync") else 0
    return victim, name, draw.randint(1, 2 if victim and name == "fsync" else CALLS[name]), bool(draw.randrange(2))


@pytest.mark.parametrize("moment", [*MOMENTS, *(pytest.param(drawn(i), marks=pytest.mark.slow) for i in range(30))],
                         ids=str)  # fmt: skip
def test_killed_at_any_moment_a_whole_checkpoint_is_there(ranks, tmp_path, moment):
    """RELIABILITY 14 and 15."""
    check_killed_and_resumed(ranks, tmp_path, *moment)


REAL = {name: getattr(os, name) for name in ("fsync", "mkdir")}


@contextlib.contextmanager
def failing(name: str, code: int, here: bool = True) -> Iterator[None]:
    """A function of `os` fails, on this rank if `here`."""

    def call(*paths: Any) -> None:
        raise OSError(code, os.strerror(code), *(map(str, paths[:1]) if code == errno.EROFS else ()))

    if here:
        setattr(os, name, call)
    try:
        yield
    finally:
        setattr(os, name, REAL[name])


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A machine that loses its power has what a checkpoint's name stands for."""
    synced, before, fsync, rename = [], [], os.fsync, os.rename

    def note(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        fsync(handle)

    def name_it(new: Path, path: Path) -> None:
        before.extend(synced)
        rename(new, path)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", name_it)
    path = small(tmp_path, 1, beside={"words/tokenizer.json": b"{}"})
    assert {p.stat().st_ino for p in (path, *path.rglob("*"))} == {*before}
    assert synced[len(before) :] == [tmp_path.stat().st_ino], "the folder that holds the name"


def check_cannot_write(root: str) -> None:
    on = mesh(tp=2)
    run, path = Run(on), Path(root) / "step"
    run.steps(0, 1)
    run.save(path, 1)
    run.steps(1, 2)
    before = state_of(run)
    for rank in range(2):
        with failing("fsync", errno.ENOSPC, on.tp.rank == rank):
            with pytest.raises(ValueError, match=rf"No space left .*/model-0000{rank}.safetensors' \(on rank {rank}"):
                run.save(path, 2)
            saving = run.save(path, 2, save_async)
            with pytest.raises(ValueError, match=rf"the save of .*step failed: .*No space left .*on rank {rank} of 2"):
                run.save(path, 2, save_async, after=saving)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if on.tp.rank == 1:  # the kernel's own refusal, in the middle of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(ValueError, match=r"File too large: '.*-00001.safetensors' \(on rank 1 of 2"):
            run.save(path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = r"Read-only file system: '.*/\.step\.mpcore-tmp' \(on rank 0 of 2\)"
    with failing("mkdir", errno.EROFS), pytest.raises(ValueError, match=told):
        run.save(path, 2)
    with pytest.raises(ValueError, match=r"Not a directory|File exists"):
        run.save(Path(root) / "file" / "step", 2)
    with pytest.raises(ValueError, match=r"precious is there and is no checkpoint: it is not overwritten"):
        run.save(Path(root) / "precious", 2)
    same_bits(state_of(run), before)
    run.steps(2, 3)


def test_a_full_disk_is_told_on_every_rank_and_leaves_the_old_checkpoint(ranks, tmp_path):
    """RELIABILITY 20 to 22: by the file, on a disk for reading alone too; training goes on."""
    (tmp_path / "file").write_text("")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("mine")
    ranks(2, check_cannot_write, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "precious", "step"]
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "mine"
    assert not verify(tmp_path / "step")
    assert inspect(tmp_path / "step").step == 1


def check_async(root: str, sizes: dict, zero: bool) -> None:
    run = Run(mesh(**sizes), zero=zero)
    run.steps(0, 2)
    run.save(f"{root}/now", 2)
    saving = run.save(f"{root}/later", 2, save_async)
    run.steps(2, 4)  # the optimizer writes in place while the files are written
    again = run.save(f"{root}/third", 4, save_async)  # waits, also without after=saving
    assert saving.done, "one in flight at most"
    run.save(f"{root}/fourth", 4, save_async, after=again).wait()


@pytest.mark.parametrize(("sizes", "zero"), [({"tp": 2}, False), ({"dp": 2}, True)], ids=["tp2", "zero"])
def test_pitfall_40_a_save_in_the_background_has_the_bytes_of_its_moment(ranks, tmp_path, sizes, zero):
    ranks(2, check_async, str(tmp_path), sizes, zero)
    for one, other in (("now", "later"), ("third", "fourth")):
        files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in (one, other)]
        assert files[0] == files[1], other
    assert diff(tmp_path / "now", tmp_path / "third")


def small(root: Path, step: int, **options) -> Path:
    torch.manual_seed(step)
    return save(step_path(root, step), nn.Linear(2, 3), mesh=Mesh(), step=step, **options)


FLAGS = ["--steps", "6", "--warmup", "2", "--eval-every", "2", "--set", "eval_samples=4", "--dropout", "0.1"]


def losses_of(out: str | Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r.get("loss", r.get("val_loss"))) for r in records]


def check_run(sizes: dict, out: str, *flags: str, asked: int | None = None) -> tuple[int, int]:
    """A run of the example; rank 1 is asked to stop in step `asked`. Returns the step and sample it began at."""
    micro_batch = 4 // (sizes.get("dp", 1) * sizes.get("pp", 1))
    run = trainer(*FLAGS, "--micro-batch", str(micro_batch), "--out", out, *flags, **sizes)
    real = run.step

    def step() -> dict[str, float]:
        if run.run.step == asked and run.mesh.world.rank == run.mesh.world.size - 1:
            run.stop.asked = True
        return real()

    run.step = step
    run.train()
    return run.checkpoints.first_step, run.checkpoints.first_sample


def test_pitfall_38_39_a_stopped_run_goes_on_as_if_it_had_not_been(ranks, tmp_path):
    """RELIABILITY 31, 36, 37. Same layout: bitwise. Another: the same samples, losses to rounding."""
    flags, sizes = ["--dtype", "float16"], {"tp": 2}
    whole, again = tmp_path / "whole", tmp_path / "again"
    ranks(2, check_run, sizes, str(whole), *flags, "--save-every", "4")
    ranks(2, check_run, sizes, str(again), *flags, "--set", "exit_step=2", "--set", "async_save=true")
    assert [p.name for p in (again / "checkpoints").glob("[!.]*")] == ["step-00000002"]
    begun = ranks(2, check_run, sizes, str(again), *flags, "--resume", "auto", "--save-every", "4", asked=2)
    assert begun == [(2, 8)] * 2
    assert latest(again / "checkpoints") == step_path(again / "checkpoints", 4)
    shutil.copytree(again, tmp_path / "dp")
    begun = ranks(2, check_run, sizes, str(again), *flags, "--resume", "auto", "--save-every", "4", "--set", "keep=1")
    assert begun == [(4, 16)] * 2
    assert losses_of(again) == losses_of(whole)
    assert [p.name for p in (again / "checkpoints").glob("[!.]*")] == ["step-00000006"]
    assert not diff(step_path(again / "checkpoints", 6), step_path(whole / "checkpoints", 6))
    ranks(2, check_run, {"dp": 2}, str(tmp_path / "dp"), *flags, "--resume", "auto")
    for (step, got), (same, want) in zip(losses_of(tmp_path / "dp"), losses_of(whole), strict=True):
        assert step == same
        assert got == pytest.approx(want, rel=2e-3)


def check_resume_refused(out: str, cases: list[tuple[list[str], str]]) -> None:
    for flags, message in cases:
        with pytest.raises(ValueError, match=message):
            trainer(*FLAGS, "--out", out, *flags, tp=2).train()


def test_resuming_another_run_is_refused_and_a_damaged_checkpoint_passed_over(ranks, tmp_path):
    out = tmp_path / "out"
    ranks(2, check_run, {"tp": 2}, str(out), "--save-every", "2")
    at = out / "checkpoints"
    cases: list[tuple[list[str], str]] = [
        (["--save-every", "2"], "step-00000006 is there"),
        ([], "step-00000006 is there"),
        (["--resume", "auto", "--seed", "1"], "seed is 0 there, 1 here. --init-from .*step-00000006"),
        (["--resume", "auto", "--dropout", "0.2", "--seq-len", "8"],
         "model.seq_len is 16 there, 8 here; model.dropout is 0.1 there, 0.2 here."),
        (["--resume", str(step_path(at, 2)), "--d-ff", "32"], "model.d_ff is 24 there, 32 here. .*00000002"),
        (["--resume", "auto", "--optimizer", "adamw-bf16"], "optimizer is 'adamw' there, 'adamw-bf16' here"),
        (["--resume", str(at / "none")], "none is no complete checkpoint: there is no such"),
    ]  # fmt: skip
    ranks(2, check_resume_refused, str(out), cases)
    for step, name in ((6, MANIFEST), (4, "model-00001.safetensors")):
        (step_path(at, step) / name).write_bytes(flip(-9)((step_path(at, step) / name).read_bytes()))
    begun = ranks(2, check_run, {"tp": 2}, str(out), "--resume", "auto", "--set", "exit_step=3")
    assert begun == [(2, 8)] * 2


def check_flags_of_a_resumed_run(out: str) -> None:
    check_run({}, out, "--set", "exit_step=2")
    run = trainer(*FLAGS, "--out", out, "--resume", "auto", "--set", "weight_decay=0.5")
    assert [group["weight_decay"] for group in run.run.optimizer.param_groups] == [0.5, 0.0]
    assert all(len(run.run.optimizer.state[p]) == 3 for p in run.model.parameters())
    begin = ["--init-from", str(latest(Path(out) / "checkpoints")), "--seed", "1", "--optimizer", "muon"]
    with pytest.raises(ValueError, match=r"--d-ff 32 is not the 24 of .*step-00000002"):
        trainer("--out", f"{out}-new", *begin, "--d-ff", "32")
    new = Trainer(parse(["--out", f"{out}-new", *begin, "--micro-batch", "1", "--dropout", "0"]), mesh())
    assert new.config == replace(run.config, dropout=0.0)
    assert (new.run.step, new.checkpoints.first_sample, len(new.run.optimizer.state)) == (0, 0, 0)
    for p, q in zip(new.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(p, q)
    check_run({}, out, "--resume", "auto", "--global-batch", "8", "--set", "check_speed=0")
    records = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    with contextlib.redirect_stdout(printed := io.StringIO()):
        check_run({}, out, "--resume", "auto", "--steps", "2")
    assert "nothing is left to train: 6 steps are done, --steps is 2" in printed.getvalue()
    assert [r["tokens"] for r in records if "tokens" in r] == [64, 128, 256, 384, 512, 640]


def test_a_run_of_one_process(ranks, tmp_path):
    ranks(1, check_flags_of_a_resumed_run, str(tmp_path / "out"))


def check_dcp(folder: str) -> list[str]:
    """DCP refuses the states of a sharded model and its optimizer. Other uses of a state dict go on."""
    on, errors = mesh(tp=2), []
    torch.manual_seed(0)
    whole: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4))
    want = {name: x.clone() for name, x in whole.state_dict().items()}
    model = parallelize(whole, {"0": "colwise", "2": "rowwise"}, tp=on.tp)
    optimizer = AdamW(model, lr=0.1)
    dcp.save({name: x.detach() for name, x in model.state_dict().items()}, checkpoint_id=f"{folder}/shards")
    dcp.save(full_state_dict(model), checkpoint_id=f"{folder}/full")
    torchs = guard_optimizer(torch.optim.AdamW(model.parameters()), model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torchs.step()
    states = (model.state_dict(), model.state_dict(keep_vars=True), optimizer.state_dict(), torchs.state_dict())
    for use, of in ((partial(dcp.load, model.state_dict()), "shards"), *((partial(dcp.save, x), "no") for x in states)):
        with pytest.raises(CheckpointException) as error:
            use(checkpoint_id=f"{folder}/{of}")
        errors.append(str(error.value))
    state, file = model.state_dict(), io.BytesIO()
    with pytest.warns(UserWarning, match=r"torch.save stores this rank's shards .* over tp \(2 ranks\)"):
        torch.save(state, file)
    file.seek(0)
    for again in (torch.load(file), copy.deepcopy(state)):
        same_bits(again, state)
        copy.deepcopy(model).load_state_dict(again, assign=True)
    read = {name: torch.zeros_like(x) for name, x in want.items()}
    dcp.load(read, checkpoint_id=f"{folder}/full")
    same_bits(read, want)
    return errors


def test_pitfall_58_dcp_is_refused_for_shards_and_takes_the_full_state_dict(ranks, tmp_path):
    for errors in ranks(2, check_dcp, str(tmp_path)):
        for error in errors:
            assert re.search(r"0.(weight|bias) is a shard of shape \(3,( 4)?\) of a tensor of shape \(6,( 4)?\)", error)
            assert "mpcore.checkpoint" in error
