"""`mpcore from-config`: settings of other trainers become a run.toml; nothing that differs is listed as the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mpcore as mp
from examples.gpt.arguments import parse
from mpcore.__main__ import main
from mpcore.tools.from_config import convert, read, rows
from mpcore.tools.from_config.table import PEERS

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
FILES = {
    "a.sh": (SCRIPT, {"layers": 2, "tp": 2, "warmup_share": 0.05, "d_ff": 128, "norm_eps": 1e-5, "min_lr": 0.0,
                      "warmup": None, "betas": [0.9, 0.999], "bias": True, "positions": "learned", "dropout": 0.1,
                      "zero": 0, "attention_dropout": 0.1, "held_out": 0.031, "eps": 1e-8}),
    "b.yaml": ("MODEL_ARGS:\n  --num-layers: 2\n  --weight-decay: 1e-2\n  --num-query-groups: 2\n",
               {"layers": 2, "weight_decay": 0.01, "activation": "gelu_tanh", "tie_embeddings": True}),
    "c.toml": ('[training]\nlocal_batch_size = 4\n[optimizer]\nlr = 1e-3\n',
               {"lr": 1e-3, "min_lr": 0.0, "lr_schedule": "linear", "dtype": "bfloat16", "zero": 3}),
    "d.yaml": ("model:\n  model_config: {hidden_size: 64}\nparallelism: {dp: 2, tp_mode: ALL_REDUCE}\n",
               {"d_model": 64, "dp": 2, "sequence_parallel": False, "warmup": 0, "min_lr": 8e-4}),
    "e.yml": ('{"num-layers": 2, "train_iters": 100, "pos_emb": "rotary", "gpt_j_residual": true}',
              {"layers": 2, "positions": "rope", "warmup_share": 0.01, "min_lr": 0.0, "zero": 0, "norm_eps": 1e-5}),
    "g.yml": ("hidden_size: 4096\nactivation: swiglu\nnorm: rmsnorm\nintermediate_size: 32768\nmlp_multiple_of: 256\n",
              {"d_ff": 11008, "norm_eps": 1e-8, "bias": True, "mlp_bias": True}),  # its llama2/7B.yml
    "i.sh": ("python x.py --train-samples 999 --lr-decay-samples 500 --lr-warmup-samples 90 --global-batch-size 10 "
             "--lr 2e-4 --decoupled-lr 1e-4 --grad-reduce-in-bf16 --exit-duration-in-mins 9 --use-megatron-fsdp "
             "--quick-geglu --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params "
             "--adam-eps 1e-6\n",
             {"steps": 99, "lr_decay_steps": 50, "warmup_samples": 90, "embedding_lr_scale": 0.5, "zero": 3,
              "eps": 1e-6, "reduce_dtype": "bfloat16", "exit_minutes": 9.0}),
    "j.toml": ("[parallelism]\nexpert_parallel_degree = 4\ntensor_parallel_degree = 2\n", {"ep": 4, "etp": 1, "tp": 2}),
    "h.sh": ("if [ $1 ]; then A=(--adam-beta2 0.98); fi\nA=(--adam-beta2 .9 --lr-warmup-iters 7)\n", {"warmup": 7}),
    "k.sh": ('T="--lr 2e-4 --micro-batch-size 2"\nU=\' --num-layers 2 \'\npython x.py $T $U\n',
             {"lr": 2e-4, "micro_batch": 2, "layers": 2}),
    "f.json": ('{"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
               {"zero": 2, "dtype": "bfloat16", "clip": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_each_peer_become_a_run_that_the_example_accepts(tmp_path, name, capsys):
    text, want = FILES[name]
    (tmp_path / name).write_text(text)
    out = tmp_path / "run.toml"
    assert main(["from-config", str(tmp_path / name), "--out", str(out)]) == 0
    args = parse(["--config", str(out)])
    got = {**vars(args), **args.model}
    assert {key: got[key] for key in want} == want
    lists = convert(*read(tmp_path / name))[1]
    assert capsys.readouterr().out.count("\n  ") == sum(map(len, lists.values()))
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
    for flag in ("new-flag", "data-path", "seed", "untie-embeddings"):
        assert any(line.startswith(flag) for line in lists["-"])


def test_gains_of_1_plus_w_take_the_same_steps():
    norm, more = mp.RMSNorm(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    here, there = mp.AdamW(norm, lr=0.1, weight_decay=0.5), torch.optim.AdamW([more], lr=0.1, weight_decay=0.0)
    for x in torch.randn(5, 3, 4, dtype=torch.float64):
        norm(x).square().mul(x).sum().backward()
        torch.nn.functional.rms_norm(x, (4,), 1 + more, 1e-6).square().mul(x).sum().backward()
        [(each.step(), each.zero_grad()) for each in (here, there)]
    torch.testing.assert_close(norm.weight, 1 + more, rtol=1e-12, atol=0)


def test_attention_dropout_is_left_out_where_the_example_refuses_it():
    for values, is_there in (
        ({}, True),
        ({"context-parallel-size": 2}, False),
        ({"multi-latent-attention": True}, False),
    ):
        fields, lists = convert("Megatron-LM", {"num-layers": 2, **values})
        assert ("attention_dropout" in fields) == is_there == any(x.startswith("attention-d") for x in lists["~"])


@pytest.mark.parametrize("name", ["x.toml", "x.json", "x.yaml", "x.txt"])
def test_what_cannot_be_read_is_named(tmp_path, name, capsys):
    (tmp_path / name).write_text("[1, 2")
    assert main(["from-config", str(tmp_path / name), "--out", str(tmp_path / "o")]) == 2
    assert name in capsys.readouterr().err


def test_a_file_of_nobody_is_refused(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("MODEL_ARGS: a test\nTEST_TYPE: b\n")
    assert main(["from-config", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "o")]) == 2
    assert "none of the file's 2 settings" in capsys.readouterr().err


def test_a_megatron_flag_is_answered_with_the_command(capsys):
    with pytest.raises(SystemExit):
        parse(["--tensor-model-parallel-size", "2"])
    assert "mpcore from-config" in capsys.readouterr().err


def test_the_record_has_the_table():
    page = Path("docs/records/2026-11-28_from_config.md").read_text()
    lists = {part.partition("\n")[0]: " ".join(part.split()) for part in page.split("\n### ")}
    for peer in PEERS:
        for row in rows(peer):
            keys = ", ".join(f"`{'--' if peer == 'Megatron-LM' else ''}{key}`" for key in row.keys)
            if row.verdict == "=" and not row.note:
                assert f"{keys} ({row.field})" in lists[peer]
            else:
                field = f"`{row.field}`" if row.field else ""
                assert f"| {keys} | {field} | {VERDICTS[row.verdict]} | {row.note} |" in page


VERDICTS = {"=": "same", "~": "differs", "-": "not available"}
