"""The example on every layout against the same run in one process."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from examples.gpt.config import GPTConfig, LatentConfig
from examples.gpt.flops import flops_of_token
from examples.gpt.model import GPT
from mpcore import full_state_dict, shardings
from mpcore.sharding.local import reshard
from tests.pool import mesh
from tests.test_data_parallel import over_data

TINY = [
    "--layers",
    "2",
    "--d-model",
    "16",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--d-ff",
    "24",
    "--seq-len",
    "16",
    "--global-batch",
    "4",
    "--device",
    "cpu",
]
STEPS = 10
LAYOUTS = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
CASES = [(layout, sp) for layout in LAYOUTS for sp in (False, True) if layout[0] > 1 or not sp]
NAME = "tp{}pp{}dp{}"
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def trainer(*flags: str, **sizes: int):
    from examples.gpt.pretrain import Trainer, parse

    return Trainer(parse([*TINY, "--steps", str(STEPS), "--warmup", "2", *flags]), mesh(**sizes))


def save_as(step: int, t) -> None:
    """Save a checkpoint of so many steps."""
    t.run.step = step
    t.checkpoints.save()


def run(sizes: dict, *flags: str) -> dict:
    """Losses and norms of all steps, and a hash of each parameter before the first."""
    micro_batch = 4 // (sizes.get("dp", 1) * sizes.get("pp", 1)) if sizes else 1
    t = trainer(*flags, "--micro-batch", str(micro_batch), "--eval-samples", "7", **sizes)
    hashes = {n: hashlib.sha256(p.numpy().tobytes()).hexdigest() for n, p in full_state_dict(t.model).items()}
    records = [t.step() for i in range(STEPS)]
    return {"hashes": hashes, "losses": [r["loss"] for r in records], "norms": [r["grad_norm"] for r in records],
            "val": t.evaluate()}  # fmt: skip


def names(layout: tuple[int, int, int]) -> dict:
    return dict(zip(("tp", "pp", "dp"), layout, strict=True))


def final(sizes: dict, *flags: str) -> dict:
    """Losses and norms of all steps, and the parameters after them."""
    micro_batch = 4 // (sizes.get("dp", 1) * sizes.get("pp", 1)) if sizes else 1
    t = trainer(*flags, "--dropout", "0.1", "--micro-batch", str(micro_batch), **sizes)
    records = [t.step() for i in range(STEPS)]
    for stage in t.stages:
        reshard(stage)
    declared = shardings(t.model)
    parameters = {n: over_data(p, t.mesh, declared[n]) for n, p in t.model.named_parameters()}
    return {"losses": [r["loss"] for r in records], "norms": [r["grad_norm"] for r in records],
            "parameters": parameters}  # fmt: skip


_alone: dict = {}


def alone(ranks, *flags: str, how=run) -> dict:
    if (how, flags) not in _alone:
        (_alone[how, flags],) = ranks(1, how, {}, *flags)
    return _alone[how, flags]


def every_case() -> Iterator[Any]:
    """`make test`: all layouts in float64, tied where a table lies on two stages, with sequence parallel where there is
    tp."""
    for (layout, sp), tied, dtype in itertools.product(CASES, (False, True), ("float64", "float32")):
        short = tied == (layout[1] > 1) and (sp or layout[0] == 1) and dtype == "float64"
        name = "-".join([NAME.format(*layout), *["sp"] * sp, "tied" if tied else "untied", dtype])
        yield pytest.param(layout, sp, tied, dtype, id=name, marks=[] if short else pytest.mark.slow)


@pytest.mark.parametrize(("layout", "sequence_parallel", "tied", "dtype"), list(every_case()))
def test_every_layout_trains_as_one_process_does(ranks, layout, sequence_parallel, tied, dtype):
    """PITFALLS 14, 20, 21, 24, 26, 30: ten steps with dropout; bitwise the same beginning, then losses and norms."""
    flags = ["--dtype", dtype, "--dropout", "0.1", *(["--tie-embeddings"] if tied else [])]
    want = alone(ranks, *flags)
    parallel = [*flags, *(["--sequence-parallel"] if sequence_parallel else [])]
    results = ranks(math.prod(layout), run, names(layout), *parallel)
    hashes = {}
    for got in results:
        for key in ("losses", "norms"):
            assert got[key] == pytest.approx(want[key], rel=TOLERANCE[dtype], abs=0), key
        assert got["val"] == pytest.approx(want["val"], rel=10 * TOLERANCE[dtype])
        hashes |= got["hashes"]
    assert hashes == want["hashes"]


ZERO_LAYOUTS = [(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1)]
SHORT = [("float64", (1, 2, 2))]
GRID = [
    pytest.param(*case, marks=[] if case in SHORT else pytest.mark.slow)
    for case in itertools.product(TOLERANCE, ZERO_LAYOUTS)
]


@pytest.mark.parametrize(("dtype", "layout"), GRID, ids=lambda v: v if isinstance(v, str) else NAME.format(*v))
def test_pitfall_24_30_34_every_zero_stage_trains_as_one_process_does(ranks, dtype, layout):
    """Ten steps with dropout; 2 and 3 add in one order and agree to the bit, as 1 does with one micro-batch."""
    want = alone(ranks, "--dtype", dtype, how=final)
    found: list[list[dict]] = []
    for zero in ("0", "1", "2", "3"):
        found.append(ranks(4, final, names(layout), "--dtype", dtype, "--zero", zero))
        for got in found[-1]:
            for key in ("losses", "norms"):
                assert got[key] == pytest.approx(want[key], rel=TOLERANCE[dtype], abs=0), f"{key} of zero {zero}"
            for name, parameter in got["parameters"].items():
                error = (parameter - want["parameters"][name]).abs().max().item()
                assert dtype != "float64" or error <= 1e-8, f"{name} of zero {zero} is off by {error}"
    pairs = [(2, 3)] + [(1, 2)] * (layout[1] == 1) + [(0, 1)] * (layout[2] == 1)
    for a, b in pairs:
        for mine, theirs in zip(found[a], found[b], strict=True):
            assert (mine["losses"], mine["norms"]) == (theirs["losses"], theirs["norms"]), f"zero {a} and {b}"
            assert all(torch.equal(p, theirs["parameters"][n]) for n, p in mine["parameters"].items())


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.slow) for zero in "12"), "3"])
def test_pitfall_30_replicas_of_shards_train_as_one_process_does(ranks, zero):
    want = alone(ranks, "--dtype", "float64", how=final)
    flags = ["--dtype", "float64", "--zero", zero, "--replicate", "2"]
    for got in ranks(4, final, {"dp": 4}, *flags):
        for key in ("losses", "norms"):
            assert got[key] == pytest.approx(want[key], rel=1e-10, abs=0), key


@pytest.mark.parametrize("optimizer", [pytest.param("adamw-bf16", marks=pytest.mark.slow), "muon"])
@pytest.mark.parametrize("layout", [pytest.param((2, 2, 1), marks=pytest.mark.slow), (2, 1, 2)], ids=str)
def test_pitfall_34_every_optimizer_trains_on_a_layout_as_in_one_process(ranks, layout, optimizer):
    flags = ["--dtype", "float64", "--optimizer", optimizer, "--lr-schedule", "wsd", "--tie-embeddings"]
    want = alone(ranks, *flags)
    for got in ranks(math.prod(layout), run, names(layout), *flags):
        for key in ("losses", "norms"):
            assert got[key] == pytest.approx(want[key], rel=1e-9, abs=0), key


class Reads(TorchDispatchMode):
    """Counts what a GPU would be waited for: values that the host reads, and sizes that depend on values."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flags", ["--dtype bfloat16", "--preset tiny-moe", "--optimizer muon --zero 0"])
def test_a_step_waits_for_the_device_once(flags, monkeypatch):
    t, lists, tolist = trainer(*flags.split()), [], torch.Tensor.tolist
    t.step()
    for module in ("mpcore.layers.embedding", "mpcore.layers.loss"):
        monkeypatch.setattr(f"{module}.check_ids", lambda *_: None)  # of a GPU's tokens it looks at none
    monkeypatch.setattr("examples.gpt.train.summarize_experts", lambda *_: {})  # the experts' loads come after the step
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(x) or tolist(x))
    with Reads() as reads:
        t.step()
    assert reads.count == 0
    assert sum(x.is_floating_point() for x in lists) == 1  # integers, the experts' counts, only references read


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(d_model=24, heads=2, head_dim=16, kv_heads=1),
        GPTConfig(d_model=24, heads=2, tie_embeddings=True, positions="learned", norm="layer", bias=True),
        GPTConfig(d_model=24, heads=2, latent=LatentConfig(v_head_dim=20)),
    ],
    ids=["untied, wide heads", "tied, learned positions", "latent"],
)
def test_flops_of_a_token_are_those_of_its_products(config):
    """A table that is looked up, and heads that aren't d_model wide together (torchtitan #280, open-instruct #1096)."""
    model, T = GPT(config, device="meta"), config.seq_len
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, T, dtype=torch.int64, device="meta"))
    vectors = sum(p.numel() for p in model.parameters() if p.dim() < 2)  # of norms and biases, that torch doesn't count
    assert flops_of_token(config) * T == 3 * (counter.get_total_flops() + 2 * vectors * T)


def test_flops_of_a_token_with_a_window_are_those_of_a_sequence_as_long():
    short, long = GPTConfig(seq_len=8), GPTConfig(seq_len=64)
    assert flops_of_token(dataclasses.replace(long, window=8)) == flops_of_token(short) < flops_of_token(long)
