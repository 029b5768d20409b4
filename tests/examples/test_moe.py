"""The example with experts on every layout, with ZeRO 1 and 3, against the same run in one process."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from mpcore import full_state_dict, materialize
from mpcore.pipeline import Pipeline
from tests.equality import close
from tests.examples.test_pretrain import TINY
from tests.pool import mesh

STEPS = 3
MIXTURE = ["--experts", "4", "--top-k", "2", "--expert-d-ff", "6", "--dtype", "float64", "--steps", str(STEPS),
           "--warmup", "1"]  # fmt: skip
KINDS = {
    "sequence": ["--aux-coefficient", "0.1", "--router-z-loss", "0.01", "--router-jitter", "0.1",
                 "--shared-experts", "1", "--capacity-factor", "0.8"],
    "global": ["--balance", "aux", "--aux-loss", "global", "--aux-coefficient", "0.1", "--dispatch", "all_to_all"],
    "bias": ["--balance", "bias", "--bias-rate", "0.05", "--moe-every", "2"],
}  # fmt: skip
LAYOUTS = [
    ({"tp": 2, "etp": 1}, "bias", 1, 2),
    ({"dp": 2, "ep": 2}, "global", 3, 1),
    ({"pp": 2, "dp": 2, "ep": 2}, "sequence", 1, 1),
    ({"dp": 4, "ep": 2, "etp": 2}, "global", 1, 1),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ({"tp": 2, "dp": 2, "etp": 1, "ep": 2}, "global", 3, 2),
            ({"pp": 2, "dp": 2, "ep": 2}, "bias", 3, 1),
            ({"dp": 4, "ep": 2}, "sequence", 3, 1),
            ({"pp": 2, "tp": 2, "etp": 1, "ep": 2}, "global", 1, 2),
        ]
    ),
]


def run(sizes: dict, kind: str, zero: int, micro_batch: int, *flags: str) -> dict:
    """Losses, norms and loads of all steps, the parameters after them, and the held-out loss."""
    from examples.gpt.pretrain import Trainer, parse

    mine = ["--zero", str(zero), "--micro-batch", str(micro_batch), "--eval-samples", "4", *flags]
    t = Trainer(parse([*TINY, *MIXTURE, *KINDS[kind], *mine]), mesh(**sizes))
    records = [t.step() for i in range(STEPS)]
    return {"records": records, "val": t.evaluate(), "state": full_state_dict(t.model)}


_alone: dict = {}


def alone(ranks, kind: str) -> dict:
    if kind not in _alone:
        _alone[kind] = ranks(1, run, {}, kind, 1, 2)[0]
    return _alone[kind]


def world(sizes: dict) -> int:
    return math.prod(sizes.get(name, 1) for name in ("tp", "pp", "dp"))


def compare(ranks, sizes: dict, kind: str, zero: int, micro_batch: int, *flags: str) -> None:
    want = alone(ranks, kind)
    for got in ranks(world(sizes), run, sizes, kind, zero, micro_batch, *flags):
        for step, (mine, dense) in enumerate(zip(got["records"], want["records"], strict=True)):
            for name in ("loss", "grad_norm"):
                assert mine[name] == pytest.approx(dense[name], rel=1e-10), (step, name)
            assert mine["experts"]["tokens_per_expert"] == dense["experts"]["tokens_per_expert"], step
            for name in ("entropy", "dropped", "max_violation", "aux_loss", "z_loss"):
                assert mine["experts"][name] == pytest.approx(dense["experts"][name], rel=1e-10), (step, name)
        assert got["val"] == pytest.approx(want["val"], rel=1e-10)
        for name, value in got["state"].items():
            close(value, want["state"][name], name, 1e-9)


@pytest.mark.parametrize(("sizes", "kind", "zero", "micro_batch"), LAYOUTS, ids=str)
def test_pitfall_26_27_28_every_layout_trains_the_same_mixture(ranks, sizes, kind, zero, micro_batch):
    """Loss, norm, balance, loads, weights and biases, with other micro-batches than in one process."""
    flags = ["--sequence-parallel"] if sizes.get("tp") and zero == 3 else []
    compare(ranks, sizes, kind, zero, micro_batch, *flags)


def test_a_backward_split_in_two_adds_balance_losses_once(ranks):
    compare(ranks, {"pp": 2}, "sequence", 1, 1, "--schedule", "zb")


def test_a_run_from_any_checkpoint_balances_as_its_flags_say(tmp_path, capsys):
    """`--init-from` with another `--balance`: the loss or the bias is that of the flags, and a learned bias stays."""
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
        ("bias", ["--balance", "aux"], ("sequence", 0.0), {bias}),
        ("bias", ["--balance", "aux", "--aux-loss", "global"], ("global", 0.0), {bias, fractions}),
        ("bias", ["--balance", "none"], (None, 0.0), {bias}),
        ("bias", ["--balance", "bias"], (None, 0.05), {bias}),
        ("bias", [], (None, 0.05), {bias}),
        ("global", ["--balance", "bias"], (None, 0.001), {bias}),
        ("global", ["--balance", "none"], (None, 0.0), set()),
        ("global", ["--balance", "aux"], ("global", 0.0), {fractions}),
        ("sequence", ["--aux-loss", "global"], ("global", 0.0), {fractions}),
    ):
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
        trainer("--init-from", begun["sequence"][0], "--shared-experts", "0", "--out", str(tmp_path / "new"))


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
