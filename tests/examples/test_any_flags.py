"""Flags drawn at random: a run that isn't refused trains as one process does, whatever goes together with whatever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from examples.gpt.plan import build
from mpcore import full_state_dict
from mpcore.tools.analysis.dry_run import dry_run
from tests.equality import close
from tests.pool import Pool, mesh
from tests.quick import some

STEPS = 3
BATCH = 8
COMMON = ["--dtype", "float64", "--warmup", "1", "--steps", str(STEPS), "--global-batch", str(BATCH),
          "--set", "eval_samples=8"]  # fmt: skip


def draw_model(dice: random.Random) -> list[str]:
    """What is trained, and how: the same for one process."""
    heads = dice.choice([4, 6])
    flags = ["--layers", str(dice.randint(2, 5)), "--heads", str(heads), "--d-model", str(4 * heads),
             "--d-ff", str(dice.choice([20, 36])), "--seq-len", str(dice.choice([12, 16, 24])),
             "--dropout", dice.choice(["0", "0.1"]), "--set", f"clip={dice.choice(['0', '0.05', '1'])}",
             "--optimizer", dice.choice(["adamw", "adamw", "adamw-bf16", "muon"]),
             "--set", f"lr_schedule={dice.choice(['cosine', 'linear', 'wsd'])}"]  # fmt: skip
    flags += ["--set", "tie_embeddings=true"] if dice.random() < 0.4 else []
    preset = dice.choice(["tiny", "tiny", "gpt2", "tiny-moe", "tiny-moe"])
    kv_heads = dice.choice(["1", "2", str(heads)]) if preset != "gpt2" else None
    if preset == "tiny" and kv_heads == str(heads):  # every head has keys of its own
        preset, kv_heads = "tiny-mla", None
    flags += ["--preset", preset, *(["--kv-heads", kv_heads] if kv_heads else [])]
    if preset == "tiny-moe":
        flags += [
            "--experts", dice.choice(["4", "6"]), "--set", f"moe.top_k={dice.choice(['1', '2'])}", "--set",
            "moe.d_ff=8",
        ]  # fmt: skip
        flags += dice.choice([[], ["--set", "moe.shared_experts=1"]]) + dice.choice([[], ["--set", "moe.every=2"]])
        flags += dice.choice([[], ["--set", "moe.capacity_factor=0.7"]]) + dice.choice(
            [[], ["--set", "moe.jitter=0.1"]]
        )
        flags += dice.choice([[], ["--set", "moe.z_loss=0.01"]]) + dice.choice([[], ["--set", "moe.routed_scale=2"]])
        flags += dice.choice([["--set", "moe.aux_loss=none"], ["--set", "moe.aux_loss=none", "moe.bias_rate=0.05"],
                              ["--set", "moe.aux_loss=global", "--set", "moe.aux_coefficient=0.1"],
                              ["--set", "moe.aux_loss=sequence", "--set", "moe.aux_coefficient=0.1"]])  # fmt: skip
    # drawn by dice of its own, so that the cases stay what they were
    return flags + random.Random(" ".join(flags)).choice([[], ["--set", "document_masking=true"]])


def draw_layout(dice: random.Random, world: int, mixture: bool) -> tuple[dict[str, int], list[str]]:
    """Where it is trained: sizes of the axes, and flags that change no number."""
    sizes, left = {}, world
    for axis in dice.sample(["tp", "pp", "cp"], 3):
        sizes[axis] = dice.choice([size for size in range(1, left + 1) if left % size == 0])
        left //= sizes[axis]
    sizes["dp"] = left
    flags = ["--zero", dice.choice("0123"), "--micro-batch", dice.choice("1124")]
    flags += ["--recompute", dice.choice(["none", "none", "selective", "full", "budget=0.5"])]
    offload = dice.sample(["optimizer", "activations", "parameters"], dice.choice([0, 0, 1, 2]))
    flags += ["--offload", *(offload or ["none"])]
    flags += dice.choice([[], ["--sequence-parallel"]])
    if sizes["dp"] > 1 and dice.random() < 0.3:
        flags += ["--set", "replicate=2"]
    if sizes["cp"] > 1:
        flags += ["--cp-kind", dice.choice(["alltoall", "ring", "zigzag", "allgather", "two-level"])]
        sizes |= {"cp_inner": sizes["cp"] // 2} if flags[-1] == "two-level" else {}
    if sizes["pp"] > 1:
        flags += ["--schedule", dice.choice(["naive", "gpipe", "1f1b", "interleaved", "bfs", "zb", "zbv", "dualpipev"])]
    if mixture:
        data = sizes["tp"] * sizes["cp"] * sizes["dp"]
        sizes["etp"] = dice.choice([size for size in (1, 2, sizes["tp"]) if data % size == 0])
        data //= sizes["etp"]
        sizes["ep"] = dice.choice([size for size in range(1, data + 1) if data % size == 0])
        flags += ["--set", f"moe.dispatch={dice.choice(['all_gather', 'all_to_all'])}"]
    return sizes, flags


def train(sizes: dict[str, int], flags: list[str]) -> dict[str, Any]:
    """Losses, norms, the held-out loss and the parameters, or why there are none."""
    from examples.gpt.pretrain import Trainer, parse

    try:
        t = Trainer(parse([*COMMON, *flags]), mesh(**sizes))
    except ValueError as refusal:
        return {"refused": str(refusal)}
    records = [t.step() for i in range(STEPS)]
    numbers = {name: [r[name] for r in records] for name in ("loss", "grad_norm")} | {"val": [t.evaluate()]}
    with t.run.parameters():
        return numbers | {"state": {name: p.clone() for name, p in full_state_dict(t.model).items()}}


def check(ranks: Pool, seed: int, world: int) -> None:
    """Draw until it isn't refused, by all ranks with one message; then it trains as one process does, as planned."""
    dice = random.Random(seed)
    while True:
        model = draw_model(dice)
        sizes, layout = draw_layout(dice, world, "tiny-moe" in model)
        print(sizes, *layout, "|", *model)
        results = ranks(world, train, sizes, [*model, *layout], timeout=30 * world)
        refused = {got.get("refused") for got in results}
        if refused == {None}:
            break
        assert len(refused) == 1, refused
    (dense,) = ranks(1, train, {}, model)
    for got in results:
        for name in ("loss", "grad_norm", "val"):
            assert got[name] == pytest.approx(dense[name], rel=1e-9), name
        for name, value in got["state"].items():
            close(value, dense["state"][name], name, 1e-8)
    assert dry_run(build, [*COMMON, *model, *layout, "--offload", "none"], **sizes).most > 0


@pytest.mark.parametrize("seed", some(1, of=range(60)))
def test_whatever_is_drawn_trains_as_one_process_does(ranks, seed):
    check(ranks, seed, 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_whatever_is_drawn_for_eight_ranks_trains_as_one_process_does(eight_ranks, seed):
    check(eight_ranks, seed, 8)
