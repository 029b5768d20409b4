"""Each flag of `python -m examples.gpt.pretrain` does something: what a probe sees differs with it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from examples.gpt import pretrain, train
from examples.gpt.console import PEAK_FLOPS, Console, mfu
from examples.gpt.model import flops_of_token
from examples.gpt.policies import lr_schedule, merge_options, policies
from examples.gpt.pretrain import Trainer, main, parse
from mpcore import Mesh
from mpcore.tools.fault_tolerance import faults as faults
from tests.oracles.runs import build, corpus

TINY = (
    "--layers 2 --d-model 16 --heads 4 --d-ff 24 --seq-len 12 --global-batch 4 --steps 4 --warmup 2 --dtype float64 "
    "--eval-every 2 --device cpu"
)
EXPERTS = "--experts 4 --set moe.d_ff=8"


class AskedError(Exception):
    """Ends a run where a probe has seen enough."""


def arguments(flags: str, out: Path | str = "unused") -> list[str]:
    given = flags.replace("OUT", str(out)).replace("OTHER", corpus(1)).split()
    return [*TINY.split(), "--data", corpus(), *given, "--out", str(out)]


def trains(flags: str, out: Path) -> Any:
    """Losses, norms and rates of two steps, the validation loss, and first and last weights."""
    t = Trainer(parse(arguments(flags)), Mesh())

    def sums() -> list[float]:
        return [float(p.detach().double().square().sum()) for p in t.model.parameters()]

    first = sums()
    steps = [(entry["loss"], entry["grad_norm"], entry["lr"]) for entry in (t.step() for _ in range(2))]
    return first, steps, t.evaluate(), sums()


def first_batch(flags: str, out: Path) -> Any:
    t = Trainer(parse(arguments(flags)), Mesh())
    return t.batch(t.train_samples, t.share(0))[0].tolist()


def asks_for_documents(flags: str, out: Path) -> Any:
    t = Trainer(parse(arguments(flags)), Mesh())
    return sorted(t.batch(t.train_samples, t.share(0))[2])


def first_weights(flags: str, out: Path) -> Any:
    t = Trainer(parse(arguments(flags)), Mesh())
    return [float(p.detach().double().sum()) for p in t.model.parameters()]


def moe_dispatch(flags: str, out: Path) -> Any:
    return Trainer(parse(arguments(flags)), Mesh()).model.get_submodule("blocks.0.mlp").dispatch


def seen(target: Any, name: str, flags: str, wants: Callable[[mock.Mock], Any]) -> Any:
    """What a run asks of one of its parts; the run ends there."""
    with mock.patch.object(target, name, side_effect=AskedError) as part, contextlib.suppress(AskedError):
        Trainer(parse(arguments(flags)), Mesh())
    return wants(part)


def asks_of_prepare(flags: str, out: Path) -> Any:
    """The policies and other arguments of `mpcore.prepare`."""

    def wants(part: mock.Mock) -> Any:
        told = {
            name: value for name, value in part.call_args.kwargs.items() if name not in ("blocks", "loss", "optimizer")
        }
        recompute = dataclasses.replace(told.pop("recompute"), example=None, budget=None), told["data"]
        plan = told.pop("schedule")
        return recompute, (plan.name, plan.stages), told

    return seen(train, "prepare", flags, wants)


def asks_of_workers(flags: str, out: Path) -> str:
    """The options of workers that are jobs of their own."""
    return repr(merge_options(parse(arguments(flags))))


def asks_of_rates(flags: str, out: Path) -> Any:
    return lr_schedule(parse(flags.split()))


def asks_of_model(flags: str, out: Path) -> Any:
    return seen(train, "build_stages", flags, lambda part: part.call_args.kwargs)


def asks_of_mesh(flags: str, out: Path) -> Any:
    """The sizes of axes, the device and the time limit that the command asks for."""
    with mock.patch.object(pretrain, "build_mesh", side_effect=AskedError) as part, contextlib.suppress(AskedError):
        main(arguments(flags))
    return part.call_args.kwargs


def sums_by(flags: str, out: Path) -> Any:
    """How the trainer's mesh sums over tp."""
    with mock.patch.object(pretrain, "Trainer", side_effect=AskedError) as part, contextlib.suppress(AskedError):
        main(arguments(flags, out))
    return part.call_args.args[1].tp.sums


def asks_of_watchdog(flags: str, out: Path) -> Any:
    with mock.patch.object(pretrain, "Watchdog", side_effect=AskedError) as part, contextlib.suppress(AskedError):
        main(arguments(flags, out))
    return part.call_args.kwargs["timeout"]


SECONDS = {f"{what}seconds" for what in ("", "data_", "communication_", "exposed_", "compute_")}
MEASURED = {"tokens_per_second", "memory", *SECONDS}


def leaves(flags: str, out: Path) -> Any:
    """What runs of the command leave behind, `then` one after another: their status, words, records and files."""
    printed = io.StringIO()
    status: Any = None
    with mock.patch.object(Console, "end"), contextlib.redirect_stdout(printed):
        for each in flags.split(" then "):
            try:
                status = main(arguments(each, out))
            except SystemExit as error:
                status = str(error.code)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.name != ".lock")
    written = (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").exists() else ""
    records = [json.loads(line, parse_constant=refuse) for line in written.splitlines()]
    records = [{k: v for k, v in entry.items() if k not in MEASURED} for entry in records]
    words = sorted({w for w in ("background", "resumed") if w in printed.getvalue()})
    return str(status).replace(str(out), "OUT"), records, files, words


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def draws(flags: str, out: Path) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        main(arguments(flags, out))
    return sorted(path.name for path in out.iterdir())


def elsewhere(flags: str, out: Path) -> Any:
    """Which folder is written to: the last --out counts."""
    with mock.patch.object(Console, "end"), contextlib.redirect_stdout(io.StringIO()):
        main([*arguments("--steps 1 --eval-every 0", out / "a"), *flags.replace("OUT", str(out)).split()])
    return sorted(path.name for path in out.iterdir())


def checks_for(flags: str, out: Path) -> Any:
    """Which faults the trainer has looked for, and how often."""
    with mock.patch.object(train, "Faults", side_effect=AskedError) as part, contextlib.suppress(AskedError):
        Trainer(parse(arguments(flags, out)), Mesh()).train()
    return part.call_args.kwargs


def reads(flags: str, out: Path) -> Any:
    """The flags of a command line on which TOML is a file."""
    (out / "run.toml").write_text("lr = 0.5")
    return parse(arguments(flags.replace("TOML", str(out / "run.toml")))).lr


def trains_without(flags: str, out: Path) -> Any:
    """A run where DROP is a file of documents."""
    (out / "drop.txt").write_text("3\n4\n")
    return trains(flags.replace("DROP", str(out / "drop.txt")), out)


def policies_of(flags: str, out: Path) -> Any:
    """What more ranks than one would be told."""
    return policies(parse(arguments(flags)), [])


SAVED = "--save-every 2 --eval-every 0"
FLAGS: dict[str, tuple[Callable[[str, Path], Any], str, str]] = {
    **{axis: (asks_of_mesh, "", f"--{axis} 2") for axis in ("tp", "pp", "cp", "ep", "dp", "etp")},
    "workers": (asks_of_mesh, "", "--workers 2"),
    "cp_inner": (asks_of_mesh, "--cp 8 --cp-kind two-level", "--set cp_inner=4"),
    "device": (asks_of_mesh, "", "--device cuda"), "timeout": (asks_of_watchdog, "", "--set timeout=77"),
    "zero": (asks_of_prepare, "", "--zero 3"), "replicate": (policies_of, "", "--set replicate=2"),
    "sequence_parallel": (asks_of_model, "", "--sequence-parallel"), "cp_kind": (asks_of_model, "", "--cp-kind ring"),
    "schedule": (asks_of_prepare, "", "--schedule gpipe"),
    "virtual_stages": (asks_of_prepare, "--schedule interleaved --virtual-stages 1", "--virtual-stages 2"),
    "trace": (draws, "--steps 1", "--set trace=true"),
    "local_steps": (asks_of_prepare, "--workers 2", "--local-steps 7"),
    "outer_lr": (asks_of_prepare, "--workers 2", "--set outer_lr=0.5"),
    "outer_momentum": (asks_of_prepare, "--workers 2", "--set outer_momentum=0.5"),
    "listen": (asks_of_workers, "--join a:1", "--listen b:2"), "join": (asks_of_workers, "--listen b:2", "--join a:1"),
    "wait": (asks_of_workers, "--listen b:2", "--wait none"),
    "dynamic_steps": (asks_of_workers, "--listen b:2", "--set dynamic_steps=false"),
    "worker_timeout": (asks_of_workers, "--listen b:2", "--set worker_timeout=7"),
    "staleness": (asks_of_workers, "--listen b:2", "--set staleness=3"),
    "token": (asks_of_workers, "--listen b:2", "--set token=there"),
    "replicas": (asks_of_workers, "--listen b:2", "--set replicas=3"),
    "update_dtype": (asks_of_workers, "--listen b:2", "--set update_dtype=bfloat16"),
    "overlap_exchange": (asks_of_workers, "--listen b:2", "--set overlap_exchange=true"),
    "fragments": (asks_of_prepare, "--workers 2", "--set fragments=2"), "preset": (trains, "", "--preset gpt2"),
    "layers": (trains, "", "--layers 3"), "d_model": (trains, "", "--d-model 24"), "heads": (trains, "", "--heads 2"),
    "kv_heads": (trains, "", "--kv-heads 2"), "d_ff": (trains, "", "--d-ff 25"),
    "dropout": (trains, "", "--dropout 0.1"), "model.tie_embeddings": (trains, "", "--set tie_embeddings=true"),
    "model.init_std": (trains, "", "--set init_std=0.1"), "experts": (trains, EXPERTS, "--experts 6"),
    "moe.top_k": (trains, EXPERTS, "--set moe.top_k=3"),
    "moe.shared_experts": (trains, EXPERTS, "--set moe.shared_experts=1"),
    "moe.d_ff": (trains, EXPERTS, "--set moe.d_ff=9"),
    "moe.routed_scale": (trains, EXPERTS, "--set moe.routed_scale=2"),
    "moe.every": (trains, EXPERTS, "--set moe.every=2"), "moe.aux_loss": (trains, EXPERTS, "--set moe.aux_loss=global"),
    "moe.aux_coefficient": (trains, EXPERTS, "--set moe.aux_coefficient=0.5"),
    "moe.z_loss": (trains, EXPERTS, "--set moe.z_loss=0.1"),
    "moe.bias_rate": (trains, f"{EXPERTS} --set moe.aux_loss=none moe.bias_rate=0.001", "--set moe.bias_rate=0.1"),
    "moe.jitter": (trains, EXPERTS, "--set moe.jitter=0.3"),
    "moe.capacity_factor": (trains, EXPERTS, "--set moe.capacity_factor=0.5"),
    "moe.dispatch": (moe_dispatch, EXPERTS, "--set moe.dispatch=all_to_all"), "data": (trains, "", "--data OTHER"),
    "without_documents": (trains_without, "", "--set without_documents=DROP"),
    "tokenizer": (leaves, "", "--tokenizer nowhere.json"), "end_of_document": (leaves, "", "--set end_of_document=EOD"),
    "document_masking": (asks_for_documents, "", "--set document_masking=true"),
    "eval_data": (leaves, "", "--set eval_data=other=OTHER"), "seq_len": (trains, "", "--seq-len 10"),
    "steps": (leaves, "--eval-every 0", "--steps 3"), "global_batch": (trains, "", "--global-batch 8"),
    "rampup_batch_size": (trains, "--micro-batch 1", "--set rampup_batch_size=1,1,6"),
    "micro_batch": (asks_of_prepare, "", "--micro-batch 1"), "lr": (trains, "", "--lr 0.01"),
    "min_lr": (trains, "--warmup 0", "--set min_lr=0.002"), "warmup": (trains, "", "--warmup 3"),
    "warmup_share": (asks_of_rates, "", "--set warmup_share=0.5"),
    "warmup_samples": (asks_of_rates, "", "--set warmup_samples=9"),
    "embedding_lr_scale": (trains, "", "--set embedding_lr_scale=2"), "eps": (trains, "", "--set eps=0.1"),
    "model.attention_dropout": (trains, "", "--set attention_dropout=0.1"),
    "held_out": (trains, "", "--set held_out=0.5"), "exit_minutes": (leaves, SAVED, "--set exit_minutes=1e-9"),
    "lr_schedule": (trains, "--steps 8 --warmup 0", "--set lr_schedule=wsd"),
    "lr_decay_steps": (trains, "--warmup 0", "--lr-decay-steps 99"), "betas": (trains, "", "--set betas=0.8,0.9"),
    "optimizer": (trains, "", "--optimizer muon"), "weight_decay": (trains, "", "--set weight_decay=0.5"),
    "clip": (trains, "", "--set clip=0.1"), "recompute": (asks_of_prepare, "", "--recompute full"),
    "offload": (asks_of_prepare, "", "--offload activations"), "seed": (trains, "", "--seed 1"),
    "bitwise": (sums_by, "", "--set bitwise=2"), "overlap": (asks_of_prepare, "", "--set overlap=64"),
    "overlap_experts": (leaves, EXPERTS, "--set overlap_experts=true"),
    "overlap_halves": (leaves, "", "--set overlap_halves=true"),
    "dtype": (trains, "--dtype float32", "--dtype bfloat16"),
    "autocast": (asks_of_prepare, "--dtype bfloat16", "--set autocast=true"),
    "residual_dtype": (asks_of_model, "--dtype bfloat16", "--set residual_dtype=float32"),
    "fp8": (asks_of_prepare, "--d-model 256 --d-ff 256", "--fp8"),
    "compile": (asks_of_prepare, "", "--compile aot_eager"), "eval_every": (leaves, "", "--eval-every 1"),
    "eval_samples": (trains, "", "--set eval_samples=3"), "config": (reads, "", "--config TOML"),
    "log_to": (leaves, "", "--set log_to=tensorboard"),
    "profile": (leaves, "", "--set profile=1:2"),
    "no_save": (leaves, "", "--set no_save=true"), "out": (elsewhere, "", "--out OUT/b"),
    "save_every": (leaves, "", "--save-every 2"), "keep": (leaves, SAVED, "--set keep=1"),
    "async_save": (leaves, SAVED, "--set async_save=true"),
    "resume": (leaves, f"{SAVED} --set exit_step=2 then {SAVED}", "--resume auto"),
    "init_from": (leaves, "", "--init-from nowhere"), "exit_step": (leaves, SAVED, "--set exit_step=3"),
    "param_dtype": (lambda flags, _: policies(parse(arguments(flags)), []), "", "--set param_dtype=bfloat16"),
    "reduce_dtype": (asks_of_prepare, "", "--set reduce_dtype=bfloat16"),
    "first_loss_scale": (asks_of_prepare, "--dtype float16", "--set first_loss_scale=8"),
    "recompute_every": (asks_of_prepare, "--recompute full", "--set recompute_every=2"),
    "nesterov": (asks_of_prepare, "--workers 2", "--set nesterov=false"),
    "model": (trains, "", "--set activation=gelu"),
    "latent": (trains, "--preset tiny-mla", "--set latent.kv_lora_rank=8"),
    "linear": (trains, "--set layers_spec=delta", "--set linear.key_heads=2"),
    "max_skips": (leaves, "--lr 1e300 --steps 6 --warmup 0 --set clip=0 --set weight_decay=0", "--set max_skips=2"),
    "check_replicas": (checks_for, "", "--set check_replicas=4"),
    "check_speed": (checks_for, "", "--set check_speed=4"),
}  # fmt: skip
MORE = [(first_weights, "", "--seed 1"), (first_batch, "", "--seed 1"), (trains, "", "--optimizer adamw-bf16"),
        (trains, "--steps 8 --warmup 0", "--set lr_schedule=linear"), (leaves, "", "--set profile=2:9")]  # fmt: skip


@cache
def at_base(probe: Callable[[str, Path], Any], base: str, folder: str) -> Any:
    out = Path(folder, f"{probe.__name__} {base}".replace(" ", "_").replace("/", "_"))
    out.mkdir()
    return probe(base, out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where base runs leave their files."""
    return str(tmp_path_factory.mktemp("flags"))


def test_every_flag_is_in_the_table():
    assert {name for name in FLAGS if "." not in name} == set(vars(parse([]))) - {"moe"}


@pytest.mark.parametrize(
    ("probe", "base", "given"), [*FLAGS.values(), *MORE], ids=[*FLAGS, *(f"{p.__name__} {g}" for p, _, g in MORE)]
)
def test_a_flag_changes_what_it_is_for(probe, base, given, folder, tmp_path):
    assert at_base(probe, base, folder) != probe(f"{base} {given}".strip(), tmp_path)


def test_the_time_limit_is_the_watchdogs_and_torchs_is_later(tmp_path):
    assert asks_of_watchdog("--set timeout=77", tmp_path) == 77
    assert asks_of_mesh("--set timeout=77", tmp_path)["timeout"] == 92


def test_more_skips_than_allowed_end_the_run_and_leave_json_behind(tmp_path):
    """Weights of 1e300 overflow from the second step on. What is null was not finite."""
    diverging = "--lr 1e300 --steps 9 --warmup 0 --set clip=0 --set weight_decay=0 --eval-every 0 --set"
    status, records, *_ = leaves(f"{diverging} max_skips=3 then {diverging} max_skips=3 --resume auto", tmp_path)
    assert "4 steps in a row had a loss or gradient that isn't finite, 3 are allowed" in status
    assert [entry["grad_norm"] is None for entry in records] == [False, True, True, True, True]
    assert all(entry["lr"] < records[0]["lr"] for entry in records[1:])  # the rate goes on while steps are skipped
    skipped = (tmp_path / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["grad_norm"] for line in skipped] == [None] * 4


def test_mfu_is_a_share_of_the_peak_of_all_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB")
    t = SimpleNamespace(config=build({}).config, mesh=SimpleNamespace(job=SimpleNamespace(size=4)))
    expected = flops_of_token(t.config) * 1e6 / (4 * PEAK_FLOPS["H100"])
    assert mfu(t, 1e6) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]
