"""The example with latent attention, on every layout against the same run in one process."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import pytest
import torch

from examples.gpt.config import GPTConfig, LatentConfig
from examples.gpt.flops import count_parameters
from examples.gpt.hf import SPEC
from examples.gpt.model import GPT
from examples.gpt.presets import PRESETS
from mpcore import full_state_dict
from mpcore.interop.hugging_face import architecture_of
from tests.pool import mesh

FLAGS = [
    "--preset", "tiny-mla", "--layers", "2", "--d-model", "16", "--heads", "5", "--d-ff", "24", "--seq-len", "16",
    "--global-batch", "4", "--device", "cpu", "--dtype", "float64", "--dropout", "0.1", "--warmup", "2",
]  # fmt: skip
STEPS = 5


def run(sizes: dict, *flags: str) -> dict:
    """Losses and norms of all steps, the loss of what is held out, and a hash of each parameter before the first."""
    from examples.gpt.pretrain import Trainer, parse

    micro_batch = 4 // (sizes.get("dp", 1) * sizes.get("pp", 1))
    parts = ["--micro-batch", str(micro_batch), "--steps", str(STEPS), "--eval-samples", "4"]
    t = Trainer(parse([*FLAGS, *parts, *flags]), mesh(**sizes))
    hashes = {n: hashlib.sha256(p.numpy().tobytes()).hexdigest() for n, p in full_state_dict(t.model).items()}
    records = [t.step() for i in range(STEPS)]
    numbers = [r[key] for r in records for key in ("loss", "grad_norm")]
    return {"numbers": [*numbers, t.evaluate()], "hashes": hashes}


LAYOUTS = [
    ({"tp": 2, "pp": 2}, "--sequence-parallel"),
    ({"cp": 2}, "--zero 3"),
    *(
        pytest.param(sizes, flags, marks=pytest.mark.slow)
        for sizes, flags in [
            ({"tp": 4}, "--recompute full"),
            ({"tp": 2, "cp": 2}, "--sequence-parallel --cp-kind alltoall --recompute selective"),
            ({"tp": 2, "pp": 2}, "--schedule zb --offload activations"),
            ({"dp": 2, "tp": 2}, "--zero 2 --compile aot_eager"),
            ({"dp": 2, "tp": 2, "ep": 2}, "--experts 4 --expert-d-ff 8"),
            ({"tp": 2}, "--optimizer muon"),
        ]
    ),
]
_alone: dict = {}


@pytest.mark.parametrize(("sizes", "flags"), LAYOUTS, ids=str)
def test_every_layout_trains_as_one_process_does(ranks, sizes, flags):
    model = tuple(flags.split()) if flags.startswith(("--experts", "--optimizer")) else ()
    if model not in _alone:
        (_alone[model],) = ranks(1, run, {}, *model)
    hashes = {}
    world = math.prod(size for axis, size in sizes.items() if axis != "ep")
    for got in ranks(world, run, sizes, *flags.split()):
        assert got["numbers"] == pytest.approx(_alone[model]["numbers"], rel=1e-10, abs=0)
        hashes |= got["hashes"]
    assert hashes == _alone[model]["hashes"]


def test_the_model_is_what_its_config_says():
    """Weights and biases of a block counted by hand; DeepSeek-V2-Lite's attention at its size."""
    latent = LatentConfig(kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = GPTConfig(layers=1, d_model=2048, heads=16, latent=latent, rope_base=1e4)
    block = GPT(config, device="meta").blocks["0"]
    attention = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    assert sum(p.numel() for p in block.get_submodule("attention").parameters()) == attention
    again = GPTConfig(**dataclasses.asdict(config))
    assert again == config
    assert count_parameters(again) == count_parameters(config)
    assert GPT(PRESETS["tiny-mla"], device="meta").rope.interleaved


def test_what_latent_attention_has_not_is_refused():
    latent = LatentConfig()
    with pytest.raises(ValueError, match=r"latent attention has no \{'kv_heads': 2, 'qk_norm': True\}"):
        GPTConfig(latent=latent, kv_heads=2, qk_norm=True)
    with pytest.raises(ValueError, match="latent attention has no biases of one projection alone"):
        GPTConfig(latent=latent, qkv_bias=True)
    with pytest.raises(ValueError, match="architecture has latent attention without experts"):
        architecture_of(GPTConfig(latent=latent), spec=SPEC)
    assert torch.is_tensor(GPT(GPTConfig(layers=1, latent=latent, bias=True), device="cpu")(torch.zeros(1, 2).long()))
