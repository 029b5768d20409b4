"""What the example makes of a configuration and of flags: its layers, stages, policies and optimizer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from examples.gpt.arguments import parse
from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.model import GPT, flops_of_token
from examples.gpt.policies import learning_rate, long_warmup, lr_schedule

SMALL = GPTConfig(vocab_size=11, seq_len=8, layers=3, d_model=16, heads=4, d_ff=24)


@pytest.mark.parametrize(("blocks", "changes", "parts"), [
    (range(3), {}, {"embedding", "dropout", "blocks", "norm", "head"}),
    (range(3), {"positions": "learned"}, {"embedding", "position", "dropout", "blocks", "norm", "head"}),
    (range(1), {}, {"embedding", "dropout", "blocks"}), (range(1, 2), {}, {"blocks"}),
    (range(1, 2), {"positions": "learned", "tie_embeddings": True}, {"blocks"}),
    (range(2, 3), {}, {"blocks", "norm", "head"}),
    (range(2, 3), {"tie_embeddings": True}, {"embedding", "blocks", "norm", "head"}),
])  # fmt: skip
def test_a_stage_has_its_part_of_the_model(blocks, changes, parts):
    stage = GPT(dataclasses.replace(SMALL, **changes), blocks=blocks, device="meta")
    assert {name for name, _ in stage.named_children()} == parts
    assert list(stage.blocks) == [str(i) for i in blocks]
    assert (stage.first, stage.last) == (blocks.start == 0, blocks.stop == 3)
    if stage.last:
        tied = changes.get("tie_embeddings", False)
        assert (stage.head.weight is getattr(stage, "embedding", stage.head).weight) == (tied or not stage.first)
        assert stage.head.bias is None


def test_the_model_refuses_longer_samples():
    model = GPT(SMALL)
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 11)
    with pytest.raises(ValueError, match=r"^sequence length 9 is longer than the model's 8$"):
        model(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(("kind", "changes"), [
    ("window=3+rope=100", {"window": 3, "rope_base": 100.0}), ("full+no-rope+moe", {"positions": "learned"}),
    ("mamba+moe", {"layers_spec": ("mamba",)}), ("delta", {"layers_spec": ("kimi", "delta")}),
])  # fmt: skip
def test_a_block_is_of_its_kind(kind, changes):
    experts = MoEConfig(experts=3, top_k=2, d_ff=8, aux_loss=None)
    mixed = dataclasses.replace(SMALL, moe=experts, layers_spec=("full+dense", kind))
    alike = dataclasses.replace(SMALL, moe=experts if mixed.kind(1).experts else None)
    models = [GPT(c, dtype=torch.float64) for c in (mixed, dataclasses.replace(alike, **changes))]
    models[1].blocks["1"].load_state_dict(models[0].blocks["1"].state_dict())
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    got, want = ([block(x, **how) for block, how in m.calls(8, None, x.dtype, x.device)] for m in models)
    assert torch.equal(got[1], want[1])
    assert not torch.equal(got[0], got[1])
    assert mixed.kind(0) == mixed.kind(2) != mixed.kind(1)


def test_losses_of_further_tokens_are_weighted():
    model = GPT(dataclasses.replace(SMALL, mtp=2, mtp_weight=0.5))
    logits, targets = torch.randn(2, 3 * 8, 11), torch.randint(11, (2, 3, 8))
    targets[:, 1:, -1] = -100
    each = [F.cross_entropy(logits[:, 8 * i : 8 * i + 8].mT, targets[:, i], reduction="sum") for i in range(3)]
    assert torch.allclose(model.loss(logits, targets), each[0] + 0.25 * (each[1] + each[2]))
    assert flops_of_token(model.config) > flops_of_token(SMALL)
    model.eval()
    plain = GPT(SMALL)
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(11, (1, 8))
    assert torch.equal(model(tokens), plain(tokens)), "further tokens are predicted in training alone"


def test_a_warm_up_has_three_names_and_the_decay_its_own_steps():
    def rate(flags: str, step: int, warmup: str = "--warmup 2") -> float:
        return learning_rate(lr_schedule(parse(["--steps", "10", *warmup.split(), *flags.split()])), step)

    assert [rate("--lr 0.5", step) for step in (0, 1)] == [0.25, 0.5]
    for warmup in ("warmup_share=0.2", "warmup_samples=32"):  # of 16 a step
        for step in range(12):
            assert rate("--lr 0.5", step, f"--set {warmup}") == rate("--lr 0.5", step)
    assert rate("--lr 0.5 --lr-decay-steps 5", 5) == rate("--lr 0.5 --lr-decay-steps 5", 9) == pytest.approx(0.05)


@pytest.mark.parametrize(("flags", "warning"), [
    ("--steps 21", ""), ("--steps 20", "--warmup 20 is not below --steps 20: "),
    ("--steps 24 --lr-decay-steps 16", "--warmup 20 is not below --lr-decay-steps 16: "),
    ("--steps 16 --lr-decay-steps 24", ""),
])  # fmt: skip
def test_a_warm_up_that_is_not_shorter_than_the_schedule_is_named(flags, warning):
    args = parse(flags.split())
    assert long_warmup(args).startswith(warning)
    assert bool(long_warmup(args)) == bool(warning)
    if warning:
        rates = [learning_rate(lr_schedule(args), step) for step in (18, 19, 20, 21)]
        assert rates == pytest.approx([0.95 * args.lr, args.lr, args.lr, 0.1 * args.lr])
