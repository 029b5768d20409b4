"""The command line of `examples.gpt.pretrain`: what each flag takes, its default, and the numbers it may have."""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any
from unittest import mock

import pytest

from examples.gpt import arguments
from examples.gpt.arguments import DTYPES, check_ranges, flag, flags_of_file, parse
from examples.gpt.pretrain import main
from mpcore.tools.command_line import Parser

# By name in the parsed arguments: words of the command line, their value, and the default.
FLAGS: dict[str, tuple[str, Any, Any]] = {
    "config": ("", None, None),  # its own tests are below
    "tp": ("4", 4, 1), "pp": ("4", 4, 1), "cp": ("4", 4, 1), "ep": ("4", 4, 1), "dp": ("4", 4, None),
    "etp": ("4", 4, None), "zero": ("3", 3, 1), "replicate": ("2", 2, 1), "sequence_parallel": ("", True, False),
    "cp_kind": ("ring", "ring", "zigzag"), "cp_inner": ("2", 2, None), "schedule": ("zbv", "zbv", "1f1b"),
    "virtual_stages": ("2", 2, None), "device": ("cuda", "cuda", None), "bitwise": ("8", 8, 0),
    "trace": ("", True, False), "workers": ("2", 2, 1), "local_steps": ("9", 9, None),
    "outer_lr": ("0.5", 0.5, None), "outer_momentum": ("0.5", 0.5, None), "fragments": ("3", 3, None),
    "preset": ("gpt2", "gpt2", None), "layers": ("3", 3, None), "d_model": ("64", 64, None),
    "heads": ("8", 8, None), "kv_heads": ("2", 2, None), "d_ff": ("99", 99, None), "dropout": ("0.1", 0.1, None),
    "tie_embeddings": ("", True, None), "init_std": ("0.1", 0.1, None), "experts": ("8", 8, None),
    "top_k": ("3", 3, None), "shared_experts": ("1", 1, None), "expert_d_ff": ("64", 64, None),
    "routed_scale": ("2.5", 2.5, None), "moe_every": ("2", 2, None), "balance": ("bias", "bias", None),
    "aux_loss": ("global", "global", None), "aux_coefficient": ("0.1", 0.1, None),
    "router_z_loss": ("0.1", 0.1, None), "bias_rate": ("0.1", 0.1, None), "router_jitter": ("0.1", 0.1, None),
    "capacity_factor": ("1.25", 1.25, None), "dispatch": ("all_to_all", "all_to_all", None),
    "data": ("0.7 a 0.3 b", ["0.7", "a", "0.3", "b"], None), "without_documents": ("FILE", "FILE", None),
    "tokenizer": ("byte", "byte", None), "end_of_document": ("EOD", "EOD", None),
    "document_masking": ("", True, False), "eval_data": ("a=b c=d", ["a=b", "c=d"], []),
    "seq_len": ("64", 64, None), "steps": ("9", 9, 200), "lr_decay_steps": ("9", 9, None), "global_batch": ("8", 8, 16),
    "rampup_batch_size": ("2 3 4", [2, 3, 4], None), "micro_batch": ("4", 4, 2), "lr": ("0.5", 0.5, 0.003),
    "min_lr": ("0.1", 0.1, None), "warmup": ("7", 7, 20), "lr_schedule": ("wsd", "wsd", "cosine"),
    "betas": ("0.8 0.9", [0.8, 0.9], [0.9, 0.95]), "optimizer": ("muon", "muon", "adamw"),
    "weight_decay": ("0.5", 0.5, 0.1), "clip": ("0.5", 0.5, 1.0), "recompute": ("budget=0.5", "budget=0.5", "none"),
    "offload": ("optimizer activations", ["optimizer", "activations"], ["none"]), "seed": ("-3", -3, 0),
    "twin": ("2", 2, 0), "dtype": ("bfloat16", "bfloat16", "float32"), "autocast": ("", True, False),
    "residual_dtype": ("float32", "float32", None), "fp8": ("", True, False),
    "compile": ("aot_eager", "aot_eager", None), "eval_every": ("7", 7, 50), "eval_samples": ("7", 7, 32),
    "out": ("a/b", "a/b", "runs/pretrain"), "log_to": ("wandb tensorboard", ["wandb", "tensorboard"], []),
    "record_tensors": ("7", 7, 0), "profile": ("1:2", "1:2", None), "save_every": ("7", 7, 0),
    "no_save": ("", True, False), "keep": ("2", 2, None), "async_save": ("", True, False),
    "resume": ("auto", "auto", "none"), "init_from_hf": ("DIR", "DIR", None), "init_from": ("PATH", "PATH", None),
    "exit_step": ("7", 7, None), "timeout": ("1.5", 1.5, 600), "max_skips": ("7", 7, 20),
    "check_replicas": ("7", 7, 100), "check_speed": ("7", 7, 50),
}  # fmt: skip
CHOICES = {
    "zero": [0, 1, 2, 3], "cp_kind": ["alltoall", "ring", "zigzag", "allgather", "two-level"],
    "device": ["cpu", "cuda"], "balance": ["aux", "bias", "none"], "aux_loss": ["sequence", "micro_batch", "global"],
    "dispatch": ["all_gather", "all_to_all"], "lr_schedule": ["cosine", "linear", "wsd"],
    "optimizer": ["adamw", "adamw-bf16", "muon"], "offload": ["none", "optimizer", "activations", "parameters"],
    "dtype": ["float64", "float32", "bfloat16", "float16"], "residual_dtype": ["float32"],
    "log_to": ["tensorboard", "wandb"],
}  # fmt: skip
METAVARS = {  # what the usage shows for a value, where it is not the flag in capitals or a list of choices
    "config": "PATH", "schedule": "NAME|PATH.csv", "bitwise": "V", "data": "[WEIGHT] PREFIX",
    "without_documents": "FILE", "end_of_document": "TOKEN", "eval_data": "NAME=PREFIX",
    "rampup_batch_size": ("START", "INCREMENT", "SAMPLES"), "recompute": "{none,selective,full,budget=0.5}",
    "twin": "N", "compile": "BACKEND", "record_tensors": "N", "profile": "FIRST:LAST",
    "resume": "{auto,PATH,none}", "init_from_hf": "DIR", "init_from": "PATH", "check_replicas": "N",
    "check_speed": "N",
}  # fmt: skip


def actions() -> dict[str, argparse.Action]:
    """The flags as argparse knows them."""
    with mock.patch.object(Parser, "parse_args", lambda self, _: self), mock.patch.object(arguments, "check_ranges"):
        parser: Any = parse([])
    return {action.dest: action for action in parser._actions if action.dest != "help"}


def test_without_flags_each_has_its_default():
    assert vars(parse([])) == {name: default for name, (*_, default) in FLAGS.items()}


@pytest.mark.parametrize("name", [name for name in FLAGS if name != "config"])
def test_a_flag_gives_its_value_and_no_other(name):
    words, value, _ = FLAGS[name]
    found = vars(parse([flag(name), *words.split()]))
    assert found == {**{other: default for other, (*_, default) in FLAGS.items()}, name: value}
    assert [type(x) for x in flat(found[name])] == [type(x) for x in flat(value)]


def flat(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def test_a_flag_that_may_stand_alone_has_a_value_then():
    assert parse(["--compile"]).compile == "inductor"


def test_the_help_tells_of_each_flag_what_it_takes_and_its_default():
    found = actions()
    assert {name: list(a.choices) for name, a in found.items() if a.choices and name != "preset"} == CHOICES
    assert {name: a.metavar for name, a in found.items() if a.metavar is not None} == METAVARS
    for name, action in found.items():
        assert action.help, name
        if action.default not in (None, False, [], ["none"]):
            default = re.escape(" ".join(f"{x:g}" if isinstance(x, int | float) else x for x in flat(action.default)))
            assert re.search(rf"default {default}[):;]|\({default}\)$|{default}: [^;]* \(default\)$", action.help), name
    assert found["dp"].help == "data parallel size (default: what the others leave of the world)"
    for axis, kind in {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}.items():
        assert found[axis].help == f"{kind} parallel size (default 1)"


def test_the_help_begins_and_ends_with_what_to_write(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    told = capsys.readouterr().out
    assert told.startswith("usage: python -m examples.gpt.pretrain [-h]")
    assert "Pretrain a GPT on any mesh." in told
    assert told.endswith(
        "examples:\n  python -m examples.gpt.pretrain --steps 10\n"
        "  torchrun --nproc-per-node 4 -m examples.gpt.pretrain --tp 2 --pp 2 --sequence-parallel\n"
    )


@pytest.mark.parametrize("name", CHOICES)
def test_a_word_that_is_no_choice_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        parse([flag(name), "7"])
    assert flag(name) in capsys.readouterr().err


def test_names_of_dtypes_are_torchs():
    assert {name: str(dtype) for name, dtype in DTYPES.items()} == {
        name: f"torch.{name}" for name in ("float64", "float32", "bfloat16", "float16")
    }


# --- the numbers that a flag may have ---------------------------------------------------------------------------------

ANY, FROM_0, FROM_1, NOT_NEGATIVE, POSITIVE, SHARE, CLIP = range(7)
RANGES: dict[int, str] = {
    ANY: "seed zero",  # a seed is any integer, and --zero has choices
    FROM_0: "bitwise experts shared_experts warmup twin eval_every record_tensors save_every max_skips check_replicas "
            "check_speed",
    FROM_1: "tp pp cp ep dp etp replicate cp_inner virtual_stages workers local_steps fragments layers d_model heads "
            "kv_heads d_ff top_k expert_d_ff moe_every seq_len steps lr_decay_steps global_batch "
            "rampup_batch_size micro_batch eval_samples keep exit_step",
    NOT_NEGATIVE: "lr min_lr weight_decay init_std aux_coefficient router_z_loss bias_rate",
    POSITIVE: "timeout outer_lr routed_scale capacity_factor",
    SHARE: "dropout outer_momentum router_jitter betas",
    CLIP: "clip",
}  # fmt: skip
LEGAL: dict[int, list[float]] = {
    FROM_0: [0, 1, 10**9], FROM_1: [1, 10**9], NOT_NEGATIVE: [0.0, 1e-300, 1e300], POSITIVE: [1e-300, 1e300],
    SHARE: [0.0, 0.999999], CLIP: [-1.0, 0.0, 1e300, math.inf], ANY: [],
}  # fmt: skip
ILLEGAL: dict[int, tuple[list[float], str]] = {
    FROM_0: ([-1, -(10**9)], "smaller than 0"),
    FROM_1: ([0, -1], "smaller than 1"),
    NOT_NEGATIVE: ([-1e-9, math.inf, math.nan], "no number from 0"),
    POSITIVE: ([0.0, -1e-9, math.inf, math.nan], "no number above 0"),
    SHARE: ([-1e-9, 1.0, math.inf, math.nan], "no number from 0 to below 1"),
    CLIP: ([math.nan], "no number; 0 bounds nothing"),
    ANY: ([], ""),
}
NUMERIC = {name: kind for kind, names in RANGES.items() for name in names.split()}


def given(name: str, value: float, place: int = 0) -> argparse.Namespace:
    """The flags with this number, of those with several numbers at this place."""
    args = parse([])
    several = FLAGS[name][1]
    if isinstance(several, list):
        value = [value if i == place else x for i, x in enumerate(several)]  # type: ignore[assignment]
    setattr(args, name, value)
    return args


def test_every_flag_with_a_number_has_a_range():
    numbers = {name for name, (_, value, _) in FLAGS.items() if type(flat(value)[0]) in (int, float)}
    assert numbers == set(NUMERIC)


@pytest.mark.parametrize("name", NUMERIC)
def test_a_number_in_its_range_is_taken_and_one_outside_is_refused_with_its_flag(name):
    check_ranges(parse([]))
    kind = NUMERIC[name]
    places = range(len(flat(FLAGS[name][1])))
    for value in LEGAL[kind]:
        for place in places:
            check_ranges(given(name, value, place))
    values, fault = ILLEGAL[kind]
    for value in values:
        for place in places:
            with pytest.raises(ValueError, match=f"^{re.escape(f'{flag(name)} {value} is {fault}')}$"):
                check_ranges(given(name, value, place))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--micro-batch", "0"], "--micro-batch 0 is smaller than 1"),
        (["--steps", "0"], "--steps 0 is smaller than 1"),
        (["--seq-len", "-1"], "--seq-len -1 is smaller than 1"),
        (["--tp", "0"], "--tp 0 is smaller than 1"),
        (["--lr", "nan"], "--lr nan is no number from 0"),
    ],
)
def test_the_command_refuses_a_number_before_anything_starts(flags, message, tmp_path):
    with mock.patch("examples.gpt.pretrain.build_mesh") as mesh, pytest.raises(SystemExit) as left:
        main([*flags, "--out", str(tmp_path / "out")])
    assert left.value.code == f"error: {message}"
    assert not mesh.called
    assert not (tmp_path / "out").exists()


# --- files of flags ---------------------------------------------------------------------------------------------------


def test_a_flag_is_a_name_with_dashes():
    assert flag("kv_heads") == "--kv-heads"
    assert flag("check_the_speed") == "--check-the-speed"


def test_a_file_says_what_its_flags_are(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 7\nlr = 0.5\ntrace = true\nno-save = false\nlog_to = []\nconfig = "other"\nout = "a b"\n'
        '[one]\nbetas = [0.8, 0.9]\neval_every = 0\n[two]\ndata = ["a", 1]\n'
    )
    assert flags_of_file(file) == [
        "--steps", "7", "--lr", "0.5", "--trace", "--out", "a b", "--betas", "0.8", "0.9", "--eval-every", "0",
        "--data", "a", "1",
    ]  # fmt: skip
    run = tmp_path / "config.json"
    run.write_text(json.dumps({"run": {"steps": 3, "keep": None, "betas": [0.5, 0.5]}, "model": {"layers": 2}}))
    assert flags_of_file(run) == ["--steps", "3", "--betas", "0.5", "0.5"]


def test_a_name_that_two_tables_have_is_refused(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[a]\nkv-heads = 1\n[b]\nkv_heads = 1\n")
    with pytest.raises(ValueError, match=r"^--kv-heads is given twice$"):
        flags_of_file(file)


def test_of_a_flag_that_is_only_like_config_no_file_is_read(capsys):
    with pytest.raises(SystemExit):
        parse(["--conf", "nowhere.toml"])
    assert "unknown --conf; did you mean --config?" in capsys.readouterr().err


def test_errors_of_a_file_name_it_and_errors_of_the_line_do_not(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("steps = 7")
    assert parse(["--config", str(file)]).steps == 7
    with pytest.raises(SystemExit):
        parse(["--config", str(file), "--steps", "many"])
    assert capsys.readouterr().err.startswith("python -m examples.gpt.pretrain: error: argument --steps")
    file.write_text("steps = 'many'")
    with pytest.raises(SystemExit):
        parse(["--config", str(file)])
    assert capsys.readouterr().err.startswith(f"python -m examples.gpt.pretrain --config {file}: error: argument")


def test_the_command_line_is_the_process_own_without_arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pretrain", "--steps", "9"])
    assert parse().steps == 9
