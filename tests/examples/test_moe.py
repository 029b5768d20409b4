"""The example with experts: how a run from a checkpoint balances them, and what pads take of their room."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from mpcore import full_state_dict
from mpcore.layers import materialize
from mpcore.pipeline import Pipeline
from tests.equality import close
from tests.examples.test_pretrain import TINY
from tests.pool import mesh

MIXTURE = ["--experts", "4", "--set", "moe.top_k=2", "--set", "moe.d_ff=6"]
KINDS = {
    "sequence": ["--set", "moe.aux_coefficient=0.1", "--set", "moe.z_loss=0.01", "--set", "moe.jitter=0.1",
                 "--set", "moe.shared_experts=1", "--set", "moe.capacity_factor=0.8"],
    "global": ["--set", "moe.aux_loss=global", "--set", "moe.aux_coefficient=0.1", "--set", "moe.dispatch=all_to_all"],
    "bias": ["--set", "moe.aux_loss=none", "moe.bias_rate=0.05", "--set", "moe.every=2"],
}  # fmt: skip


def test_a_run_from_any_checkpoint_balances_as_its_flags_say(tmp_path, capsys):
    """`--init-from` with another balance: the loss or the bias is that of the flags, and a learned bias stays."""
    from examples.gpt.pretrain import Trainer, parse

    def trainer(*flags: str) -> Trainer:
        return Trainer(parse([*TINY, *flags, "--dtype", "float64", "--warmup", "1"]), mesh())

    begun = {}
    for kind in ("bias", "global", "sequence"):
        t = trainer(*MIXTURE, *KINDS[kind], "--out", str(tmp_path / kind))
        t.step()
        t.checkpoints.save()
        begun[kind] = str(tmp_path / kind / "checkpoints" / "step-00000001"), full_state_dict(t.model)
    bias, fractions = "expert_bias", "fractions"
    for kind, flags, (aux, rate), there in (
        ("bias", ["--set", "moe.aux_loss=sequence", "moe.bias_rate=0"], ("sequence", 0.0), {bias}),
        ("bias", ["--set", "moe.aux_loss=global", "moe.bias_rate=0"], ("global", 0.0), {bias, fractions}),
        ("bias", ["--set", "moe.bias_rate=0"], (None, 0.0), {bias}), ("bias", [], (None, 0.05), {bias}),
        ("global", ["--set", "moe.aux_loss=none", "moe.bias_rate=0.001"], (None, 0.001), {bias}),
        ("global", ["--set", "moe.aux_loss=none"], (None, 0.0), set()), ("global", [], ("global", 0.0), {fractions}),
        ("sequence", ["--set", "moe.aux_loss=global"], ("global", 0.0), {fractions}),
    ):  # fmt: skip
        path, state = begun[kind]
        capsys.readouterr()
        t = trainer("--init-from", path, *flags, "--out", str(tmp_path / "new"))
        frozen = bias in there and rate == 0
        assert ("bias of" in capsys.readouterr().out) == frozen
        moe = t.config.moe
        assert moe is not None
        assert (moe.aux_loss, moe.bias_rate) == (aux, rate)
        before = full_state_dict(t.model)
        assert {name.rpartition(".")[2] for name in before if ".router." in name} == there | {"weight"}
        for name, value in before.items():
            want = state.get(name, math.nan if not name.endswith(tuple(there)) else float(name.endswith(fractions)))
            close(value, value.new_tensor(want).expand_as(value) if isinstance(want, float) else want, name)
        t.step()
        moved = [
            name for name, p in full_state_dict(t.model).items() if name.endswith(bias) and (p != before[name]).any()
        ]
        assert bool(moved) == (rate > 0)
    with pytest.raises(ValueError, match=r"shared.up.weight: in the checkpoint, but not in the model"):
        trainer("--init-from", begun["sequence"][0], "--set", "moe.shared_experts=0", "--out", str(tmp_path / "new"))


def check_text(sizes: dict, **options) -> torch.Tensor:
    """The logits of each token of a text."""
    from examples.gpt import generate as command
    from examples.gpt.config import GPTConfig, MoEConfig
    from examples.gpt.model import GPT
    from examples.gpt.tokenizer import load_tokenizer

    m, seen = mesh(**sizes), []
    moe = MoEConfig(experts=4, top_k=2, capacity_factor=1.0)
    config = GPTConfig(layers=2, d_model=16, heads=2, d_ff=16, seq_len=32, init_std=0.5, moe=moe)
    model = GPT(config, m, device="meta", dtype=torch.float64, **options)
    materialize(model, 0)
    pipeline = Pipeline(model, m, 1, lambda y, target: y.sum())

    def draw(logits: torch.Tensor, *_) -> int:
        seen.append(logits)
        return 7 * len(seen)

    with mock.patch.object(command, "_draw", draw):
        command.generate(model, pipeline, m, load_tokenizer("byte"), "def ", new_tokens=16)
    return torch.stack(seen)


def test_pitfall_27_pads_take_no_experts_room_from_a_text(ranks):
    [want] = ranks(1, check_text, {})
    for sizes, options in (({"cp": 2}, {}), ({"tp": 2}, {"sequence_parallel": True})):
        for got in ranks(2, check_text, sizes, **options):
            close(got, want, str(sizes))
