"""`mpcore verify --hf`: which layouts hold for a model of Hugging Face, of its config alone."""

from __future__ import annotations

import pytest
import torch

from mpcore.tools.verify import __main__, verify
from mpcore.tools.verify.hugging_face import LAYERS, HuggingFaceModel, token_loss

hf = pytest.importorskip("transformers")

SIZES = {"vocab_size": 41, "hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 20}


def test_layouts_of_a_config_hold(ranks, tmp_path):
    """GPT-2: a tied head, dropout in its config, and no plan for its names but ours."""
    config = hf.GPT2Config(vocab_size=41, n_embd=24, n_head=6, n_positions=32)  # of 12 layers
    config.save_pretrained(tmp_path)
    model = HuggingFaceModel(str(tmp_path))
    assert model.config().num_hidden_layers == LAYERS
    verdicts = verify(model, model.batch(), ["tp2", "pp2"], loss=token_loss, pool=ranks)
    assert [verdict.layout for verdict in verdicts if verdict.equal] == ["tp2", "pp2"]


def test_what_cannot_be_tried_is_refused_in_words(tmp_path, capsys):
    hf.LlamaConfig(**SIZES, num_hidden_layers=2).save_pretrained(tmp_path)
    for arguments, said in (
        (["--hf", f"{tmp_path}/none"], "is no folder and no config.json on this machine"),
        (["--hf", str(tmp_path), "--set", "width=3"], "width is no field of the llama config"),
        (["--hf", str(tmp_path), "--set", "vocab_size=1000000"], "can be tried: shrink it, such as --set hidden_size"),
        ([], "give either package.module:build, or --hf PATH"),
        (["tests.verify_models:build", "--set", "a=1"], "give either package.module:build, or --hf PATH"),
    ):
        assert __main__.main(arguments) == 2
        assert said in capsys.readouterr().err


def test_the_loss_of_tokens_is_the_sum_of_their_cross_entropies():
    logits, target = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[0, 4, 2], [1, 1, 3]])
    want = sum(-logits[b, t, target[b, t]] + logits[b, t].exp().sum().log() for b in range(2) for t in range(3))
    assert token_loss({"logits": logits}, target, None).item() == pytest.approx(float(want))  # type: ignore[arg-type]
