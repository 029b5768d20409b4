"""Fine-tuning a Hugging Face model: the losses are those of one process on every mesh, and what it saves opens."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.examples.corpora import write

hf = pytest.importorskip("transformers")
TINY = "--steps 4 --batch 4 --seq-len 16 --device cpu"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Documents that repeat themselves, so that a few steps learn something."""
    documents = [[*(b"def f%d(x): return x\n" % (i % 7)) * 4, 256] for i in range(60)]
    return write(tmp_path_factory.mktemp("corpus") / "text", documents)


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory) -> list[float]:
    """The losses without flags."""
    return run(corpus, f"--out {tmp_path_factory.mktemp('plain')}")


def run(corpus: str, flags: str) -> list[float]:
    from examples import finetune_hf

    with mock.patch.object(finetune_hf, "default_corpus", return_value=corpus):
        return finetune_hf.finetune(finetune_hf.parse(f"{TINY} {flags}".split()))


def test_every_mesh_has_the_losses_of_one_process_and_what_is_saved_goes_on(ranks, corpus, tmp_path):
    base = f"--model {tmp_path}/base/model"
    (whole,) = ranks(1, run, corpus, f"--out {tmp_path}/base")
    (adapter,) = ranks(1, run, corpus, f"{base} --lora 4 --out {tmp_path}/alone")
    assert whole[-1] < whole[0]
    assert adapter[-1] < adapter[0] < whole[-1] + 0.1
    first, again = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / at / "model") for at in ("base", "alone"))
    changed = {n for n, p in again.state_dict().items() if not torch.equal(p, first.state_dict()[n])}
    assert changed == {n for n in first.state_dict() if n.endswith("proj.weight")}
    assert again.config.use_cache
    more = "--tp 2 --zero 3 --micro-batches 2 --recompute selective"
    for found in ranks(4, run, corpus, f"{base} --lora 4 {more} --out {tmp_path}/4"):
        assert found == pytest.approx(adapter, rel=1e-4)
    for found in ranks(2, run, corpus, f"--pp 2 --micro-batches 2 --out {tmp_path}/staged"):
        assert found == pytest.approx(whole, rel=1e-4)
    staged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "staged" / "model")
    for name, p in staged.named_parameters():
        assert torch.allclose(p, first.get_parameter(name), atol=1e-4), name
    (onward,) = ranks(1, run, corpus, f"{base} --adapter {tmp_path}/4/adapter --out {tmp_path}/onward")
    (merged,) = ranks(1, run, corpus, f"--model {tmp_path}/4/model --lora 4 --out {tmp_path}/merged")
    assert onward[0] == pytest.approx(merged[0], rel=1e-5)
    assert onward[0] < adapter[0]


@pytest.mark.parametrize(
    "flags", ["--lr 0.02", "--dtype bfloat16", "--steps 3", "--seq-len 8", "--batch 2", "--lora 2"]
)
def test_a_flag_changes_the_losses(corpus, plain, tmp_path, flags):
    assert run(corpus, f"{flags} --out {tmp_path}") != plain


def test_what_is_there_is_not_overwritten_and_a_folder_without_a_model_is_refused(corpus, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="model is there: give another --out"):
        run(corpus, f"--out {tmp_path}")
    with pytest.raises(ValueError, match=r"config.json is missing"):
        run(corpus, f"--model {tmp_path} --out {tmp_path}/new")
    assert not Path(tmp_path / "new").exists()


def test_the_tokenizer_of_a_folder_is_used_and_stays_beside_the_weights(corpus, tmp_path):
    from examples.gpt.tokenizer import train_tokenizer

    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        run(corpus, f"--model {tmp_path}/base --out {tmp_path}/new")
    train_tokenizer(["def f(x): return x"], 300, tmp_path / "base" / "tokenizer.json")
    run(corpus, f"--model {tmp_path}/base --out {tmp_path}/new")
    files = [(tmp_path / at / "tokenizer.json").read_bytes() for at in ("base", "new/model")]
    assert files[0] == files[1]


def test_the_loss_is_a_sum_in_float32():
    from examples.finetune_hf import token_loss

    logits, target = torch.randn(2, 3, 5).bfloat16(), torch.arange(6).view(2, 3) % 5
    chosen = logits.float().log_softmax(-1).gather(-1, target[..., None])
    found = token_loss({"logits": logits}, target)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(-float(chosen.sum()), rel=1e-6)
