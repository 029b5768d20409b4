"""`mpcore from-config`: settings of other trainers become a run.toml; nothing that differs is listed as the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mpcore as mp
from examples.gpt.arguments import parse
from mpcore.__main__ import main
from mpcore.tools.from_config import convert, read, rows
from mpcore.tools.from_config.table import PEERS

SECTIONS = re.split(
    r"^\[(.+) (\..+)\]\n", Path(__file__).with_suffix(".txt").with_stem("from_config").read_text(), flags=re.M
)
EXPECTED = {
    peer: (suffix, text.strip().splitlines()) for peer, suffix, text in zip(*[iter(SECTIONS[1:])] * 3, strict=True)
}
SCRIPT = """#!/bin/bash
LAYERS=${LAYERS:-2}
ARGS=(
    --num-layers $LAYERS --hidden-size 64 --num-attention-heads 4   # small
    --swiglu --seq-length 32 \\
    --train-iters 100 --lr-warmup-fraction .05 --lr 6.0e-5 --bf16 --adam-beta1 0.9
)
torchrun --nproc_per_node 2 pretrain_gpt.py ${ARGS[@]} --tensor-model-parallel-size 2 --data-path $1 --new-flag 3
if [ $2 ]; then ARGS+=(--seed 7 --untie-embeddings-and-output-weights); fi
"""
FILES: dict[str, tuple[str, dict[str, Any], int]] = {  # a file, fields that the example reads, and the exit status
    "a.sh": (SCRIPT, {"layers": 2, "tp": 2, "warmup_share": 0.05, "d_ff": 128, "betas": [0.9, 0.999]}, 1),
    "b.yaml": ("MODEL_ARGS:\n  --num-layers: 2\n  --weight-decay: 1e-2\n  --swiglu: null\n  --global-batch-size: 4\n"
               "  --save: out\n  --tokenizer-type: X\n  --data-path: $DATA\n",
               {"layers": 2, "weight_decay": 0.01, "activation": "gelu_tanh", "tie_embeddings": True}, 0),
    "c.toml": ('[training]\nglobal_batch_size = 4\n[optimizer]\nlr = 1e-3\n', {"lr": 1e-3, "global_batch": 4}, 0),
    "h.sh": ("if [ $1 ]; then A=(--adam-beta2 0.98); fi\nfor i in 1; do x.py --adam-beta2 .9 --data-path A\ndone\n",
             {"betas": [0.9, 0.95], "data": ["A"]}, 1),
    "k.sh": ('\ufeffT="--lr 2e-4 --micro_batch_size 2"\r\nU=\' --num-layers 2 --bf16 --mtp-num-layers 1\'\r\nx.py $T '
             "$U 7 $X --seed ${Y:-7}\r\n", {"lr": 2e-4, "micro_batch": 2, "layers": 2, "dtype": "bfloat16", "seed": 7,
                                            "mtp": 1, "mtp_weight": 0.1}, 1),
    "m.yaml": ("MODEL_ARGS: {--num-layers: 2, --data-path: gr\u00f6\u00dfe\U0001f600\\}",
               {"data": ["gr\u00f6\u00dfe\U0001f600\\"]}, 1),
    "n.json": ('{"train_batch_size": "auto", "bf16": {"enabled": "auto"}}', {"dtype": "float32", "clip": 0.0}, 1),
    "o.yml": ("num_layers: 2\ntrain_iters: 2024-01-01\nlr_decay_iters: [1, 2]\nseed: -1\n\"a\\e[31m\": 1",
              {"steps": 200}, 1),
    "p.sh": ("x.py --num-layers 0 --lr 0 --decoupled-lr 1 --global-batch-size 0 --train-samples 10 --split 0,0,0 "
             "--eval-interval nan --clip-grad inf --weight-decay 1e999 --exit-interval 1e30\n",
             {"layers": None, "clip": 1.0, "weight_decay": 0.1}, 1),
}  # fmt: skip
REFUSED = {
    "a.toml": ("[1, 2", "a.toml"),
    "a.json": ("[1, 2", "a.json"),
    "a.yaml": ("[1, 2", "a.yaml"),
    "a.txt": ("", "ends in none of"),
    "b.json": ("[" * 100_000, "b.json"),
    "c.json": ("[]", "no settings by name"),
    "b.yaml": ("MODEL_ARGS: a test\nTEST_TYPE: b\n", "none of the file's 2 settings"),
    "c.yaml": ("a: &a {hidden_size: 64, b: *a}", "10000 settings"),
    "d.yml": ("a: &a {b: 1}\nb: &b {a: *a}\n" * 3 + "# " + "x" * 200_000, "bytes"),
    "a.sh": ("--swiglu --squared-relu --num-layers 2", "swiglu and squared-relu contradict"),
    "b.sh": ("--num-layers 2 --fp16 --bf16", "bf16 and fp16 contradict"),
    "c.sh": ("".join(f"A{i + 1}=" + f"$A{i}" * 50 + "\n" for i in range(9)) + "--num-layers $A9", "without end"),
    "e.yml": ("data_path: x\nlauncher: slurm", "none of the file's 2 settings"),
}  # fmt: skip


def word(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def written(suffix: str, settings: str) -> str:
    """Return a file of `key value; key value`."""
    found = {key: value for key, _, value in (each.strip().partition(" ") for each in settings.split(";"))}
    if suffix == ".sh":
        return "python x.py " + " ".join(f"--{key} {value}".removesuffix(" true") for key, value in found.items())
    if suffix == ".toml":
        return "\n".join(f"{key} = {json.dumps(word(value))}" for key, value in found.items())
    content: dict[str, Any] = {}
    for key, value in found.items():
        *outer, last = key.split(".")
        inner = content
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = word(value)
    return json.dumps(content)


@pytest.mark.parametrize("peer", PEERS)
def test_defaults_and_keys_are_those_that_the_peer_documents(tmp_path, peer):
    suffix, lines = EXPECTED[peer]
    table = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    path, base = tmp_path / f"x{suffix}", table[0][0]
    wrong = []
    for settings, made, verdict in table:
        path.write_text(written(suffix, f"{base}; {settings}"))
        found, values = read(path)
        fields, lists = convert(found, values)
        field, _, value = made.partition(" ")
        want = word(value) if field else None
        same = pytest.approx(want, rel=1e-12) if isinstance(want, float) else want
        key = settings.split(";")[-1].split()[0]
        listed = {name for name in lists if any(line.startswith(f"{key} ") for line in lists[name])}
        made_of = re.findall(
            r" -> ([\w.]+) = (.+?)(?:: .*)?$", "\n".join(line for each in lists.values() for line in each), re.M
        )
        names = [name for name, _ in made_of if name != "betas"]  # two settings make the betas
        assert sorted(names) == sorted(fields.keys() - {"betas"})
        assert [at for at in made_of if word(at[1]) != fields[at[0]]] == []  # each line has the value of run.toml
        if settings == base:
            assert found == peer
            defaults = {name: word(value) for name, _, value in (x.partition(" = ") for x in lines if "|" not in x)}
            assert [line.split()[0] for line in lists["-"]] == defaults.pop("-")
            assert fields == defaults
        if (field and fields.get(field) != same) or (verdict != "d" and verdict not in listed) or {"=", "-"} <= listed:
            wrong.append((settings, made, verdict, fields.get(field), listed))
    assert wrong == []
    tested = {setting.split()[0] for settings, *_ in table for setting in settings.split(";")}
    assert {key for row in rows(peer) if row.field for key in row.keys} <= tested


@pytest.mark.parametrize("name", FILES)
def test_files_of_each_peer_become_a_run_that_the_example_accepts(tmp_path, name, capsys):
    text, want, status = FILES[name]
    (tmp_path / name).write_text(text, newline="")
    out = tmp_path / "run.toml"
    assert main(["from-config", str(tmp_path / name), "--out", str(out)]) == status
    assert main(["from-config", str(tmp_path / name), "--out", str(out)]) == 2  # it exists
    args = parse(["--config", str(out)])
    got = {**vars(args), **args.model}
    assert {key: got[key] for key in want} == want
    lists = convert(*read(tmp_path / name))[1]
    assert bool(lists["-"]) == status
    printed = capsys.readouterr().out
    assert printed.count("\n  ") == sum(map(len, lists.values()))
    assert "\x1b" not in printed
    for line in lists["="]:  # a default, or a value with a condition, is never the same
        assert "its default" not in line
        assert " -> " in line
        assert line.count(": ") == 0


def test_pitfall_77_traps_are_not_the_same(tmp_path):
    (tmp_path / "a.sh").write_text(SCRIPT)
    lists = convert(*read(tmp_path / "a.sh"))[1]
    flags = "norm-epsilon split use-distributed-optimizer min-lr eval-iters hidden-dropout lr-warmup-fraction clip-grad"
    for flag in flags.split():
        assert any(line.startswith(flag) for line in lists["~"])
    for flag in ("new-flag", "seed", "untie-embeddings"):
        assert any(line.startswith(flag) for line in lists["-"])
    assert [line.split()[0] for line in lists["+"]] == ["data-path"]


def test_gains_of_1_plus_w_take_the_same_steps():
    norm, more = mp.RMSNorm(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    here, there = mp.AdamW(norm, lr=0.1, weight_decay=0.5), torch.optim.AdamW([more], lr=0.1, weight_decay=0.0)
    for x in torch.randn(5, 3, 4, dtype=torch.float64):
        norm(x).square().mul(x).sum().backward()
        torch.nn.functional.rms_norm(x, (4,), 1 + more, 1e-6).square().mul(x).sum().backward()
        [(each.step(), each.zero_grad()) for each in (here, there)]
    torch.testing.assert_close(norm.weight, 1 + more, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_named_in_one_line(tmp_path, name, capsys):
    text, message = REFUSED[name]
    (tmp_path / name).write_text(text)
    assert main(["from-config", str(tmp_path / name), "--out", str(tmp_path / "o")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_megatron_flag_is_answered_with_the_command(capsys):
    for flag in ("--tensor-model-parallel-size", "--master_addr"):
        with pytest.raises(SystemExit):
            parse([flag, "2"])
        assert "mpcore from-config" in capsys.readouterr().err


def test_the_pages_and_the_table_know_the_same_settings():
    """A setting that a page lists is in the table; if the page has no counterpart, then the table has no field."""
    for page, peer, pattern in (
        ("megatron", "Megatron-LM", r"--([a-z][\w-]*)"),
        (
            "from_fsdp2",
            "torchtitan",
            r"`((?:parallelism|training|activation_checkpoint|compile|lr_scheduler|checkpoint)\.\w+)",
        ),
    ):
        fields = {key: row.field for row in rows(peer) for key in row.keys}
        text = Path(f"docs/{page}.md").read_text().partition("## Conventions")[0]
        cells = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
        known = {key: here.strip() for theirs, here in cells for key in re.findall(pattern, theirs) if key != "loader"}
        assert len(known) > 15
        assert [key for key in known if key not in fields] == []
        assert [key for key, here in known.items() if here == "none" and fields[key]] == []
