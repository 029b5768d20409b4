"""The toys of a preflight: small runs that are accepted, and divide as the run does."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.gpt.arguments import parse
from examples.gpt.config import PRESETS, GPTConfig
from examples.gpt.setup import check, model_config
from mpcore.pipeline.schedules import find_schedule
from mpcore.tools.preflight.toy import SIZE_NAMES, Toy, shrink
from tests.examples.test_any_flags import draw_layout, draw_model
from tests.examples.test_checks import mesh_of
from tests.quick import some

ONE = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1}


def toys(flags: str = "", micro_batches: int = 8, config: GPTConfig | None = None, **sizes: int) -> list[Toy]:
    """The toys of a run with these flags, on a mesh of these sizes; etp is tp unless it is given."""
    full = {**ONE, "etp": sizes.get("tp", 1), **sizes}
    args = parse(flags.split())
    plan = find_schedule(args.schedule, full["pp"], micro_batches, args.virtual_stages) if "csv" not in flags else None
    plan = plan or find_schedule("1f1b", full["pp"], micro_batches, None)
    return shrink(args, config or GPTConfig(), full, micro_batches, plan, Path("/toys"), "examples.gpt.pretrain")


def test_each_axis_is_in_a_toy_and_each_two_that_fit():
    for sizes in itertools.product((1, 2, 3), repeat=4):
        full = dict(zip(("tp", "cp", "pp", "dp"), sizes, strict=True))
        found = [{axis for axis in full if toy.sizes[axis] > 1} for toy in toys("", 6, **full)]
        for one, two in itertools.combinations_with_replacement([axis for axis in full if full[axis] > 1], 2):
            if one == two or full[one] * full[two] <= 8:
                assert any({one, two} <= axes for axes in found), (full, found)


# What every toy has: float64 on the CPU, four steps on a corpus of its own, and nothing that the run would write.
ALWAYS: dict[str, Any] = {
    "dtype": "float64", "device": "cpu", "steps": 4, "warmup": 1, "data": ["/toys/corpus"], "eval_data": [],
    "tokenizer": "byte", "eval_every": 1, "eval_samples": 3, "out": "/toys/out", "timeout": 60.0, "check_replicas": 1,
    "check_speed": 0, "global_batch": 4, "dp": 1,
}  # fmt: skip
LOUD = (
    "--set autocast=true --set residual_dtype=float32 --compile --set trace=true --set profile=1:2 "
    "--set log_to=wandb --set eval_data=a=b --data c "
    "--tokenizer t --set end_of_document=e --eval-every 9 --init-from x --resume auto --save-every 3 "
    "--set keep=2 --set exit_step=4 --set timeout=5 --set check_replicas=7 --set check_speed=7 --device cuda "
    "--dtype bfloat16 --steps 99"
)


def test_a_toy_has_the_flags_of_the_run_but_these():
    (toy,) = toys(f"{LOUD} --lr 0.5 --optimizer muon --set clip=2 --zero 3 --seed 5 --dropout 0.1")
    same = {"lr": 0.5, "optimizer": "muon", "clip": 2.0, "zero": 3, "seed": 5, "dropout": 0.1}
    assert vars(toy.args) == vars(parse([])) | ALWAYS | same
    fp8 = toys("--fp8")[0]
    assert (fp8.args.fp8, fp8.config.d_model, fp8.config.d_ff) == (False, 2 * 16, 6 * 32)
    assert toys("--preset llama3-8b")[0].args.preset is None


def runs() -> Iterator[tuple[list[str], dict[str, int]]]:
    """Flags and sizes of axes: those of `test_any_flags`, each preset on some layouts, and options of both."""
    for seed in range(100):
        dice = random.Random(seed)
        model = draw_model(dice)
        sizes, layout = draw_layout(dice, dice.choice([4, 6, 8, 12, 16]), "tiny-moe" in model)
        more = ["", "--micro-batch 5", "--fp8", "--set rampup_batch_size=48,48,240", "--virtual-stages 3",
                "--set window=300", "--set window=5", "--set rope_fraction=0.125"]  # fmt: skip
        yield [*model, *layout, *dice.choice(more).split(), "--global-batch", dice.choice(["240", "234", "252"])], sizes
    for name in PRESETS:
        for sizes in ({}, {"tp": 2, "dp": 4}, {"tp": 3}, {"tp": 4, "cp": 2, "pp": 2}, {"pp": 3, "dp": 3, "ep": 3}):
            yield ["--preset", name], sizes
    for sizes in ({"worlds": 3, "dp": 2}, {"worlds": 2, "dp": 2, "pp": 2}):
        yield ["--workers", str(sizes["worlds"]), "--set", "fragments=5", "--local-steps", "9"], sizes
    yield ["--set", "replicate=2", "--zero", "2"], {"dp": 8}
    for sizes in ({"tp": 2}, {"dp": 2}, {"tp": 4, "pp": 2}, {"pp": 2}, {"dp": 8, "pp": 2}, {"tp": 2, "dp": 2}):
        yield ["--set", "bitwise=16"], sizes
    mixed = ["--experts", "4", "--set", "moe.d_ff=8", "--layers", "4", "--heads", "6", "--d-model", "48"]
    yield mixed, {"tp": 3, "pp": 2, "dp": 2, "ep": 1, "etp": 2}


def kinds(args: argparse.Namespace, config: Any, sizes: dict[str, int], micro_batches: int) -> dict[str, Any]:
    """Return the features that the small model of a preflight shares with the run that it stands for."""
    stages = find_schedule(args.schedule, sizes["pp"], micro_batches, args.virtual_stages).stages
    kv, tp, unit = config.kv_heads or config.heads, sizes["tp"], sizes["cp"] * sizes["tp"] ** args.sequence_parallel
    found: dict[str, Any] = {
        "tp": (config.heads % tp == 0, kv % tp == 0, kv < tp, config.vocab_size % tp == 0, config.hidden % tp == 0),
        "heads": kv == config.heads, "parts": config.seq_len % (2 * unit) == 0, "layers": config.layers % stages == 0,
        "window": config.window is not None and config.window >= config.seq_len, "rounds": micro_batches % sizes["pp"],
        "model": {n: v for n, v in vars(config).items() if n != "d_ff" and (v is None or isinstance(v, bool | str))},
    }  # fmt: skip
    if config.moe is not None:
        m = config.moe
        found["moe"] = (m.top_k > 1, m.top_k < m.experts, m.groups > 1, m.shared_experts > 0, m.every > 1, m.dense > 0)
    return found | {"rounds": found["rounds"] == 0}


@pytest.mark.parametrize("part", some(0, of=range(4)))
def test_the_toys_of_a_run_are_small_runs_of_its_kind(part):
    taken = 0
    for number, (flags, sizes) in itertools.islice(enumerate(runs()), part, None, 4):
        args = parse(["--global-batch", "240", *flags])
        try:
            config = model_config(args, 256 + number % 2)
            on = mesh_of(*sizes.items())
            micro_batches = check(args, config, on)
            plan = find_schedule(args.schedule, on.pp.size, micro_batches, args.virtual_stages)
        except ValueError:
            continue
        taken += 1
        full = {axis: getattr(on, axis).size for axis in SIZE_NAMES}
        for toy in shrink(args, config, full, micro_batches, plan, Path("/toys"), "examples.gpt.pretrain"):
            here = mesh_of(*toy.sizes.items())
            small, told = {axis: getattr(here, axis).size for axis in SIZE_NAMES}, (flags, sizes, toy.name)
            assert toy.ranks == here.job.size <= 8, told
            rounds = check(toy.args, toy.config, here)  # a toy of a run that is accepted is accepted
            moe, scaling = toy.config.moe, toy.config.rope_scaling or {}
            assert moe is None or moe.experts <= 12, told
            assert scaling.get("original_max_position_embeddings", toy.config.seq_len) == toy.config.seq_len, told
            assert max(toy.config.d_model, toy.config.hidden, toy.config.vocab_size, toy.config.seq_len) < 300, told
            assert toy.config.layers <= max(9, len(toy.config.layers_spec or ())), told
            assert all(small[axis] == 1 or small[axis] % 2 == full[axis] % 2 for axis in ("tp", "cp", "pp", "dp")), told
            want, got = kinds(args, config, full, micro_batches), kinds(toy.args, toy.config, small, rounds)
            parts = small["cp"] * small["tp"] ** args.sequence_parallel
            rising = small["pp"] if args.rampup_batch_size is None else 1
            for name, size in (("tp", small["tp"]), ("layers", small["pp"]), ("rounds", rising), ("parts", parts)):
                if size == 1:
                    del want[name], got[name]
            assert got == want, told
            assert (toy.args.workers > 1, toy.args.fragments is None) == (args.workers > 1, args.fragments is None)
            one, whole = toy.alone(seed=3), toy.args.global_batch // toy.args.workers
            assert (one.config, one.args.seed, one.ranks) == (toy.config, 3, toy.args.workers)
            assert check(one.args, one.config, mesh_of(*one.sizes.items())) == whole // one.args.micro_batch, told
    assert taken > 25
