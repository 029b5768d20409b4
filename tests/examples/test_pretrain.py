"""A step of the example: what a GPU would be waited for, and its floating-point operations."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from examples.gpt.config import GPTConfig, LatentConfig
from examples.gpt.model import GPT, flops_of_token
from tests.pool import mesh

TINY = [
    "--layers", "2", "--d-model", "16", "--heads", "4", "--kv-heads", "2", "--d-ff", "24", "--seq-len", "16",
    "--global-batch", "4", "--device", "cpu",
]  # fmt: skip
STEPS = 10


def trainer(*flags: str, **sizes: int):
    from examples.gpt.pretrain import Trainer, parse

    return Trainer(parse([*TINY, "--steps", str(STEPS), "--warmup", "2", *flags]), mesh(**sizes))


def save_as(step: int, t) -> None:
    """Save a checkpoint of so many steps."""
    t.run.step = step
    t.checkpoints.save()


class Reads(TorchDispatchMode):
    """Counts what a GPU would be waited for: values that the host reads, and sizes that depend on values."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "flags", ["--dtype bfloat16", "--preset tiny-moe", "--optimizer muon --zero 0", "--set document_masking=true"]
)
def test_a_step_waits_for_the_device_once(flags, monkeypatch):
    t, lists, tolist = trainer(*flags.split()), [], torch.Tensor.tolist
    t.step()
    for module in ("mpcore.layers.embedding", "mpcore.layers.loss"):
        monkeypatch.setattr(f"{module}.check_ids", lambda *_: None)  # of a GPU's tokens it looks at none
    for module in ("mpcore.kernels.attention.bounds", "mpcore.layers.attention.heads"):
        monkeypatch.setattr(f"{module}.can_read", lambda *_: False)  # nor at documents
    monkeypatch.setattr("examples.gpt.train.summarize_experts", lambda *_: {})  # the experts' loads come after the step
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(x) or tolist(x))
    with Reads() as reads:
        t.step()
    assert reads.count == 0
    assert sum(x.is_floating_point() for x in lists) == 1  # integers, the experts' counts, only references read


@pytest.mark.parametrize("config", [
    GPTConfig(d_model=24, heads=2, head_dim=16, kv_heads=1),
    GPTConfig(d_model=24, heads=2, tie_embeddings=True, positions="learned", norm="layer", bias=True),
    GPTConfig(d_model=24, heads=2, latent=LatentConfig(v_head_dim=20)),
], ids=["untied, wide heads", "tied, learned positions", "latent"])  # fmt: skip
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
