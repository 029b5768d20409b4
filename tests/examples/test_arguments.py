"""The flags of `examples.gpt.pretrain` and the fields of its file: types, defaults, ranges, and what has moved."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from examples.gpt.arguments import (
    FLAGS,
    FROM_0,
    FROM_1,
    NOT_NEGATIVE,
    POSITIVE,
    SHARES,
    Fields,
    check_ranges,
    flag,
    parse,
)

NAMES = {name: default for rows in FLAGS.values() for name, (default, _) in rows.items()}
VALUES = {"zero": "3", "cp_kind": "ring", "device": "cuda", "preset": "gpt2", "optimizer": "muon", "dtype": "bfloat16",
          "schedule": "zbv"}  # fmt: skip


def test_there_are_48_flags_and_each_gives_its_value_and_no_other(capsys):
    assert len(NAMES) + len(("--config", "--set")) == 48
    before = vars(parse([]))
    for name, default in NAMES.items():
        none = 2 if name == "micro_batch" else None
        assert before[name] == (none if isinstance(default, type) or default == [str] else default)
        kind = default if isinstance(default, type) else type(default)
        word = VALUES.get(name, "0.5" if kind is float else "7")
        word = {"offload": "optimizer activations", "data": "0.7 a 0.3 b", "compile": "aot_eager"}.get(name, word)
        words = [] if default is False else word.split()
        after = vars(parse([flag(name), *words]))
        value = True if default is False else words if kind is list else kind(word)
        assert after == {**before, name: value}
    assert parse(["--compile"]).compile == "inductor"
    with pytest.raises(SystemExit):
        parse(["--help"])
    told = capsys.readouterr().out
    assert all(f"\n  {flag(name)}" in told for name in NAMES)
    assert all(f"\n    {name} = " in told for name in vars(Fields()))


def written(folder: Path, text: str) -> list[str]:
    (folder / "run.toml").write_text(text)
    return ["--config", str(folder / "run.toml")]


def test_a_run_begins_again_with_its_own_config(tmp_path):
    words = ["--tp", "2", "--offload", "optimizer", "activations", "--sequence-parallel", "--experts", "4", "--set",
             "betas=0.8,0.9", "nesterov=false", "moe.aux_loss=none", "rampup_batch_size=2,2,8", "norm=layer",
             "log_to=wandb", "eval_data=a=b,c=d", "timeout=9", "moe.z_loss=0.1"]  # fmt: skip
    args = parse(words)
    assert (args.betas, args.nesterov, args.moe) == ([0.8, 0.9], False, {"aux_loss": None, "z_loss": 0.1})
    assert (args.rampup_batch_size, args.model, args.eval_data) == ([2, 2, 8], {"norm": "layer"}, ["a=b", "c=d"])
    (tmp_path / "config.json").write_text(json.dumps({"run": vars(args), "model": {"layers": 2}}))
    assert {**vars(parse(["--config", str(tmp_path / "config.json")])), "config": None} == vars(args)
    old = {
        "steps": 3, "keep": None, "aux_loss": None, "moe_every": 2, "balance": None, "tie_embeddings": True,
        "init_from_hf": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"run": old}))
    args = parse(["--config", str(tmp_path / "config.json"), "--steps", "5", "--set", "keep=2"])
    assert (args.steps, args.keep, args.moe, args.model) == (5, 2, {"every": 2}, {"tie_embeddings": True})


@pytest.mark.parametrize(("text", "sentence"), [
    ("[a]\nkv-heads = 1\n[b]\nkv_heads = 1", "--kv-heads is given twice"),
    ("[moe]\nz_los = 1.0", "unknown z_los; did you mean z_loss?"), ("min_lr = 'low'", "min_lr = 'low' is no float"),
    ("[model]\nqk_norm = 1", "model.qk_norm = 1 is no bool"),
    ("lr_schedule = 'sine'", "lr_schedule: 'sine' is none of"), ("betas = 0.9", "betas = 0.9 is no list"),
    ("betas = ['a', 'b']", "betas = 'a' is no float"), ("tp = false", "tp = false is no value of --tp"),
    ("balance = 'bias'", "balance is no field any more: set moe.aux_loss and moe.bias_rate"),
    ("steps = 'many'", "argument --steps"), ("steps 7", "line 1"),
])  # fmt: skip
def test_errors_of_a_file_name_it_and_what_is_wrong(text, sentence, tmp_path, capsys):
    words = written(tmp_path, text)
    with pytest.raises(SystemExit):
        parse(words)
    told = capsys.readouterr().err
    assert told.startswith(f"python -m examples.gpt.pretrain --config {words[1]}: error: ")
    assert sentence in told


def test_errors_of_the_command_line_are_its_own(tmp_path, capsys):
    words = written(tmp_path, "steps = 7\nlr = 0.5\n[any]\nout = 'a b'")
    args = parse([*words, "--lr", "0.25"])
    assert (args.steps, args.lr, args.out) == (7, 0.25, "a b")
    (tmp_path / "x.json").write_text('{"run": 3}')
    for more, sentence in ((["--steps", "many"], "pretrain: error: argument --steps"),
                           (["--set", "steps"], "pretrain --set: error: steps is not FIELD=VALUE"),
                           (["--config", str(tmp_path / "x.json")], "x.json: error: it has no 'run'"),
                           (["--conf", "x"], "unknown --conf; did you mean --config?")):  # fmt: skip
        with pytest.raises(SystemExit):
            parse([*words, *more])
        assert sentence in capsys.readouterr().err


RANGES: list[tuple[tuple[str, ...], list[float], list[float], str]] = [
    (FROM_0, [0, 1, 10**9], [-1, -(10**9)], "smaller than 0"),
    (FROM_1, [1, 10**9], [0, -1], "smaller than 1"),
    (NOT_NEGATIVE, [0.0, 1e300], [-1e-9, math.inf, math.nan], "no number from 0"),
    (POSITIVE, [1e-300, 1e300], [0.0, math.inf, math.nan], "no number above 0"),
    (SHARES, [0.0, 0.999999], [-1e-9, 1.0, math.nan], "no number from 0 to below 1"),
    (("clip",), [-1.0, math.inf], [math.nan], "no number; 0 bounds nothing"),
]


@pytest.mark.parametrize(("names", "legal", "illegal", "fault"), RANGES, ids=[row[-1] for row in RANGES])
def test_a_number_outside_its_range_is_refused_with_its_flag(names, legal, illegal, fault):
    for name in names:
        for value in (*legal, *illegal):
            args = parse([])
            table, _, own = name.rpartition(".")
            several = {"betas": [0.5, value], "rampup_batch_size": [1, 1, value]}.get(name, value)
            getattr(args, table).update({own: several}) if table else setattr(args, name, several)
            if value in illegal or value != value:
                with pytest.raises(ValueError, match=f"{name.replace('_', '.')} {value} is {fault}"):
                    check_ranges(args)
            else:
                check_ranges(args)
    ranged = {name for row in RANGES for name in row[0]} | {"seed", "zero", "betas", "rampup_batch_size"}
    numbers = {name for name, default in NAMES.items() if default in (int, float) or type(default) in (int, float)}
    assert numbers <= ranged
