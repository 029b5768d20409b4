"""A folder's config.json alone gives what each rank of a layout holds."""

from __future__ import annotations

import json

import pytest

from mpcore.tools.analysis.dry_run import dry_run
from mpcore.tools.analysis.hugging_face import build
from mpcore.tools.analysis.plan import main as plan
from mpcore.tools.verify.hugging_face import HuggingFaceModel
from tests.quick import some

hf = pytest.importorskip("transformers", minversion="5")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip


def config(folder) -> int:
    """Write a config.json, and return the number of parameters of its model."""
    made = hf.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
    made.save_pretrained(folder)
    return sum(p.numel() for p in hf.LlamaForCausalLM(made).parameters())


@pytest.mark.parametrize(
    ("sizes", "flags", "share"), some(({"dp": 2, "pp": 2}, "--zero 3 --recompute full", 4), of=[({"pp": 2}, "", 2)])
)
def test_ranks_together_hold_the_model_once(tmp_path, sizes, flags, share):
    count, arguments = config(tmp_path), ["--hf", str(tmp_path), *f"--dtype float32 --seq-len 8 {flags}".split()]
    found = [dry_run(build, arguments, rank, **sizes) for rank in range(share)]
    assert sum(each.held.parameters for each in found) == 4 * count
    assert sum(each.held.optimizer for each in found) == pytest.approx(8 * count, rel=0.01)  # and the steps' numbers
    assert all(each.peak > 0 for each in found)


def test_adapters_alone_are_trained(tmp_path):
    count = config(tmp_path)
    found = dry_run(build, ["--hf", str(tmp_path), "--seq-len", "8", "--lora", "2"])
    assert 2 * count < found.held.parameters < 3 * count
    assert found.held.optimizer < 2 * count  # of all weights: 12 bytes each


@pytest.mark.parametrize(("flags", "sizes", "words"), [
    ("--micro-batch 0", {}, "--micro-batch 0"), ("--seq-len 0", {}, "--seq-len 0"),
    ("--global-batch 0", {}, "over 0 micro-batches"), ("", {"cp": 2}, "cp is 2: take cp 1"),
])  # fmt: skip
def test_numbers_that_no_step_has_are_refused(tmp_path, flags, sizes, words):
    config(tmp_path)
    with pytest.raises(ValueError, match=words):
        dry_run(build, ["--hf", str(tmp_path), *flags.split()], **sizes)


@pytest.mark.parametrize(("kind", "name", "table"), [
    ("GPT2", "GPT2LMHeadModel", "wpe"), ("OPT", "OPTForCausalLM", "embed_positions"),
    ("Roberta", "RobertaForCausalLM", "position_embeddings"),
])  # fmt: skip
def test_a_sequence_beyond_a_table_of_positions_is_refused(tmp_path, kind, name, table):
    length = 18 if kind == "Roberta" else 16  # whose first two rows are no positions
    fields = {"max_position_embeddings": length, "vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2}
    getattr(hf, f"{kind}Config")(**fields, num_hidden_layers=2, architectures=[name]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"--seq-len 17 is more than the 16 positions of .*{table}: give 16"):
        dry_run(build, ["--hf", str(tmp_path), "--seq-len", "17"])


def test_the_command_that_explains_a_row_names_the_folder_and_no_target(tmp_path, capsys):
    config(tmp_path)
    plan(["--hf", str(tmp_path), "--world", "1", "--seq-len", "8"])
    command = capsys.readouterr().out.rpartition("explain row 1: mpcore plan ")[2]
    plan(command.split())
    assert capsys.readouterr().out.splitlines()[1].startswith("row 1 of 1")


def test_hidden_messages_of_tp_are_counted(tmp_path):
    config(tmp_path)
    flags = ["--hf", str(tmp_path), "--seq-len", "64", "--overlap"]
    plain, hidden = (dry_run(build, [*flags, n], tp=2).ledger.counts["tp", "all_reduce"].beside for n in "01")
    assert hidden > plain


@pytest.mark.parametrize(("fields", "words"), [
    ({"architectures": ["Mine"]}, r"names the architectures \['Mine'\]"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, more than 1024"),
    ({"attn_implementation": "org/kernel"}, "code on the Hub"),
    ({"architectures": ["LlamaModel"]}, "LlamaModel returns no logits of tokens"),
    ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, "trust_remote_code"),
])  # fmt: skip
def test_a_folder_without_a_model_or_with_code_is_refused(tmp_path, fields, words):
    config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the folder ran')")
    with pytest.raises(ValueError, match=words):
        dry_run(build, ["--hf", str(tmp_path)])
    if "Hub" in words or "trust" in words:
        with pytest.raises(ValueError, match=words):
            HuggingFaceModel(str(tmp_path)).config()
