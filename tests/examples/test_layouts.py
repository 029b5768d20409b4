"""The example on every layout against the same run in one process."""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import pytest
import torch

from mpcore import full_state_dict
from tests.equality import close
from tests.pool import mesh
from tests.quick import some

STEPS = 3
BASE = "--layers 2 --d-model 16 --heads 4 --d-ff 24 --seq-len 16 --global-batch 4 --dropout 0.1 --warmup 2 --device cpu"
COMMON = f"{BASE} --dtype float64 --steps {STEPS} --set eval_samples=7"
EXPERTS = "--kv-heads 2 --experts 4 --set moe.top_k=2 --set moe.d_ff=6"
MODELS = {
    "gpt": "--kv-heads 2",
    "tied": "--kv-heads 2 --set tie_embeddings=true",
    "float32": "--kv-heads 2 --dtype float32",
    "tied float32": "--kv-heads 2 --set tie_embeddings=true --dtype float32",
    "muon": "--kv-heads 2 --set tie_embeddings=true --optimizer muon --set lr_schedule=wsd",
    "bf16 moments": "--kv-heads 2 --set tie_embeddings=true --optimizer adamw-bf16 --set lr_schedule=wsd",
    "balanced sequences": f"{EXPERTS} --set moe.aux_coefficient=0.1 --set moe.z_loss=0.01 --set moe.jitter=0.1 "
    "--set moe.shared_experts=1 --set moe.capacity_factor=0.8",
    "balanced batch": f"{EXPERTS} --set moe.aux_loss=global "
    "--set moe.aux_coefficient=0.1 --set moe.dispatch=all_to_all",
    "biased": f"{EXPERTS} --set moe.aux_loss=none moe.bias_rate=0.05 --set moe.every=2",
    "latent": "--preset tiny-mla --heads 5",
    "latent muon": "--preset tiny-mla --heads 5 --optimizer muon --layers 4",
    "latent experts": "--preset tiny-mla --heads 5 --experts 4 --set moe.d_ff=8",
    "hybrid": f"{EXPERTS} --layers 5 --set moe.latent_dim=6 moe.biased=true gate=head linear.head_dim=4 "
    "linear.key_heads=2 layers_spec=delta+dense,window=3+rope=100+moe,mamba+moe,kimi+dense,full+no-rope+dense",
    "further": f"{EXPERTS} --layers 3 --set mtp=2 moe.every=3 post_norm=true embedding_scale=2 document_masking=true",
    "further tied": "--kv-heads 2 --layers 4 --set mtp=1 tie_embeddings=true layers_spec=full,full,full,delta",
    "fp8": "--kv-heads 4 --fp8 --d-model 256 --d-ff 256 --seq-len 256 --steps 2 --set eval_samples=3",
    "dropped": "--kv-heads 2 --set tie_embeddings=true attention_dropout=0.2 embedding_lr_scale=0.3 held_out=0.3",
    "deep fp8": "--kv-heads 4 --fp8 --d-model 256 --d-ff 256 --seq-len 256 --steps 2 --layers 4",
}
TOLERANCE = {"float32": 1e-5, "tied float32": 1e-5, "muon": 1e-9, "bf16 moments": 1e-9, "fp8": 1e-9, "deep fp8": 1e-9}
NUMBERS = ("losses", "norms", "val", "further")
TP_PP_DP = [
    ({"tp": tp, "pp": pp, "dp": dp}, sp)
    for tp, pp, dp in ((2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2))
    for sp in ("", *["--sequence-parallel"] * (tp > 1))
]
CASES = [
    *((model, *on) for model in ("gpt", "tied", "float32", "tied float32") for on in TP_PP_DP),
    *(("gpt", {"dp": 4}, f"--zero {zero} --set replicate=2") for zero in "123"),
    *((name, {"tp": 2, "pp": 2}, "") for name in ("muon", "bf16 moments")), ("bf16 moments", {"tp": 2, "dp": 2}, ""),
    ("tied", {"cp": 2, "pp": 2}, "--cp-kind ring"), ("tied", {"cp": 2, "dp": 2}, "--zero 3"),
    ("dropped", {"tp": 4}, "--sequence-parallel"), ("dropped", {"pp": 2, "dp": 2}, "--recompute full --zero 3"),
    *(("gpt", {"cp": 4}, f"--cp-kind {kind}") for kind in ("alltoall", "ring", "allgather")),
    ("gpt", {"cp": 4, "cp_inner": 2}, "--cp-kind two-level"), ("gpt", {"cp": 2, "tp": 2}, "--sequence-parallel"),
    ("tied", {"cp": 2, "tp": 2}, "--cp-kind alltoall --sequence-parallel"), ("gpt", {"cp": 2, "pp": 2}, ""),
    ("tied", {"cp": 2, "dp": 2}, "--cp-kind allgather"), ("latent", {"tp": 2, "pp": 2}, "--sequence-parallel"),
    ("balanced batch", {"tp": 2, "dp": 2, "etp": 1, "ep": 2}, "--zero 3 --sequence-parallel --micro-batch 2"),
    ("biased", {"pp": 2, "dp": 2, "ep": 2}, "--zero 3 --micro-batch 1"),
    ("balanced sequences", {"dp": 4, "ep": 2}, "--zero 3"),
    ("balanced batch", {"pp": 2, "tp": 2, "etp": 1, "ep": 2}, "--micro-batch 2"), ("latent", {"cp": 2}, "--zero 3"),
    ("latent", {"tp": 4}, "--recompute full"),
    ("latent", {"tp": 2, "cp": 2}, "--sequence-parallel --cp-kind alltoall --recompute selective"),
    ("latent", {"tp": 2, "pp": 2}, "--schedule zb --offload activations"),
    ("latent", {"dp": 2, "tp": 2}, "--zero 2 --compile aot_eager"), ("latent experts", {"dp": 2, "tp": 2, "ep": 2}, ""),
    ("latent muon", {"tp": 2}, ""), ("latent muon", {"pp": 2}, "--schedule interleaved"),
    ("fp8", {"dp": 2, "cp": 2}, "--zero 3 --cp-kind ring"),
    ("balanced batch", {"dp": 2, "ep": 2}, "--zero 3 --micro-batch 1"),
    ("balanced sequences", {"pp": 2}, "--schedule zb --micro-batch 1"),
    ("fp8", {"tp": 2, "pp": 2}, "--sequence-parallel --micro-batch 1"),
    ("deep fp8", {"pp": 2, "dp": 2}, "--micro-batch 1 --schedule zbv --zero 1"),
    ("deep fp8", {"tp": 2, "pp": 2}, "--micro-batch 1 --schedule zb --sequence-parallel"),
    ("deep fp8", {"tp": 2, "dp": 2}, "--recompute full --zero 2 --offload optimizer activations"),
    ("hybrid", {"tp": 4}, "--recompute full"), ("hybrid", {"cp": 2, "dp": 2, "ep": 2}, "--zero 3"),
    ("further", {"tp": 2, "pp": 2}, "--sequence-parallel"),
    ("further", {"cp": 4}, "--cp-kind zigzag"), ("further", {"pp": 2, "dp": 2}, "--zero 3 --recompute full"),
    ("further tied", {"pp": 2, "cp": 2}, ""), ("further tied", {"tp": 2, "pp": 2}, "--schedule zbv --micro-batch 1"),
    ("deep fp8", {"tp": 2, "cp": 2}, "--recompute selective --cp-kind alltoall --offload parameters --zero 0"),
    ("deep fp8", {"tp": 2, "dp": 2}, "--recompute budget=0.5 --sequence-parallel"),
]  # fmt: skip
SHORT = [  # tests/recorded_runs.py has two ranks, tp x dp and FP8, and test_documents.py latent attention on tp x pp
    ("muon", {"tp": 2, "dp": 2}, ""),
    ("tied", {"cp": 4}, "--cp-kind zigzag"), ("biased", {"tp": 2, "etp": 1}, "--micro-batch 2"),
    ("balanced batch", {"dp": 4, "ep": 2, "etp": 2}, ""), ("dropped", {"tp": 2, "pp": 2}, "--recompute full"),
    ("balanced sequences", {"pp": 2, "dp": 2, "ep": 2}, "--micro-batch 1"),
    ("hybrid", {"tp": 2, "pp": 2}, "--sequence-parallel"), ("further", {"pp": 2}, "--micro-batch 1"),
]  # fmt: skip


def run(sizes: dict[str, int], model: str, flags: str = "") -> dict[str, Any]:
    """Losses, norms and loads of all steps, the held-out loss, and the parameters: their hashes before, they after."""
    from examples.gpt.pretrain import Trainer, parse

    micro_batch = 4 // (sizes.get("dp", 1) * sizes.get("pp", 1)) if sizes else 1
    line = f"{COMMON} --micro-batch {micro_batch} {MODELS[model]} {flags}"
    t = Trainer(parse(line.split()), mesh(**sizes))
    with t.run.parameters():
        begun = {n: hashlib.sha256(p.numpy().tobytes()).hexdigest() for n, p in full_state_dict(t.model).items()}
    records = [t.step() for _ in range(t.args.steps)]
    numbers = {"losses": [r["loss"] for r in records], "norms": [r["grad_norm"] for r in records], "val": t.evaluate()}
    numbers["further"] = [r.get("mtp_loss", 0.0) for r in records]
    with t.run.parameters():
        state = {name: p.clone() for name, p in full_state_dict(t.model).items()}
    return {**numbers, "begun": begun, "state": state, "experts": [r.get("experts", {}) for r in records]}


_alone: dict[str, dict] = {}


def alone(ranks, model: str) -> dict:
    """The run of one process."""
    if model not in _alone:
        (_alone[model],) = ranks(1, run, {}, model)
    return _alone[model]


def on_layout(ranks, model: str, sizes: dict[str, int], flags: str) -> list[dict]:
    """What each rank has, compared with the run of one process."""
    want, tolerance, begun = alone(ranks, model), TOLERANCE.get(model, 1e-10), {}
    count = math.prod(size for axis, size in sizes.items() if axis in ("tp", "pp", "cp", "dp"))
    found = ranks(count, run, sizes, model, flags)
    for got in found:
        for name in NUMBERS:
            assert got[name] == pytest.approx(want[name], rel=tolerance, abs=0), name
        for step, (mine, dense) in enumerate(zip(got["experts"], want["experts"], strict=True)):
            assert mine.get("tokens_per_expert") == dense.get("tokens_per_expert"), step
            for name in dense.keys() - {"tokens_per_expert"}:
                assert mine[name] == pytest.approx(dense[name], rel=1e-10), (step, name)
        for name, value in got["state"].items() if tolerance <= 1e-9 and model != "bf16 moments" else ():
            close(value, want["state"][name], name, 1e-8)
        begun |= got["begun"]
    assert begun == want["begun"], "first parameters"
    return found


@pytest.mark.parametrize(("model", "sizes", "flags"), some(*SHORT, of=CASES), ids=str)
def test_pitfall_14_20_21_24_25_26_27_28_30_34_36_every_layout_trains_as_one_process_does(ranks, model, sizes, flags):
    """Dropout on, and other micro-batches; the first parameters are bitwise the same."""
    on_layout(ranks, model, sizes, flags)


ZERO_LAYOUTS = [{"dp": 4}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2}]


@pytest.mark.parametrize(
    ("model", "sizes"), some(("gpt", ZERO_LAYOUTS[2]), of=itertools.product(("gpt", "float32"), ZERO_LAYOUTS)), ids=str
)
def test_pitfall_24_30_34_every_zero_stage_trains_as_one_process_does(ranks, model, sizes):
    """Stages 2 and 3 add in one order and agree to the bit, as 1 does with one micro-batch."""
    found = [on_layout(ranks, model, sizes, f"--zero {zero}") for zero in range(4)]
    pairs = [(2, 3)] + [(1, 2)] * ("pp" not in sizes) + [(0, 1)] * ("dp" not in sizes)
    for a, b in pairs:
        for mine, theirs in zip(found[a], found[b], strict=True):
            assert (mine["losses"], mine["norms"]) == (theirs["losses"], theirs["norms"]), f"zero {a} and {b}"
            assert all(torch.equal(p, theirs["state"][n]) for n, p in mine["state"].items())
