"""Fine-tuning a Hugging Face model: the losses are those of one process on every mesh, and what it saves opens."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import mpcore as mp
from examples.gpt.indexed_dataset import IndexedDatasetWriter

hf = pytest.importorskip("transformers")

TINY = "--steps 4 --batch 4 --seq-len 16 --device cpu"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Documents that repeat themselves, so that a few steps learn something."""
    with IndexedDatasetWriter(tmp_path_factory.mktemp("corpus") / "text", "uint16") as writer:
        for i in range(60):
            writer.add_document([*(b"def f%d(x): return x\n" % (i % 7)) * 4, 256])
    return str(writer.prefix)


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
    for found in ranks(4, run, corpus, f"--tp 2 --pp 2 --micro-batches 2 --out {tmp_path}/staged"):
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
    with pytest.raises(ValueError, match=r"has no config.json: give the folder of a causal model"):
        run(corpus, f"--model {tmp_path} --out {tmp_path}/new")
    assert not Path(tmp_path / "new").exists()


# --- what is asked of the library, and what is said -------------------------------------------------------------------

FLAGS: dict[str, tuple[str, Any, Any]] = {
    "model": ("there", Path("there"), None), "lora": ("8", 8, 0), "adapter": ("there", Path("there"), None),
    "tp": ("2", 2, 1), "pp": ("2", 2, 1), "zero": ("3", 3, 0), "dtype": ("bfloat16", "bfloat16", "float32"),
    "recompute": ("full", "full", "none"), "steps": ("9", 9, 60), "batch": ("4", 4, 8),
    "micro_batches": ("2", 2, 1), "seq_len": ("64", 64, 128), "lr": ("0.5", 0.5, 2e-3), "device": ("cpu", "cpu", None),
    "out": ("there", Path("there"), None),
}  # fmt: skip


def test_each_flag_has_its_value_and_its_default(capsys):
    from examples.finetune_hf import parse

    defaults = {name: default for name, (*_, default) in FLAGS.items()}
    assert vars(parse([])) == defaults
    for name, (words, value, _) in FLAGS.items():
        assert vars(parse([f"--{name.replace('_', '-')}", words])) == {**defaults, name: value}
    for words in ("--zero 4", "--dtype float16", "--recompute some", "--device tpu"):
        with pytest.raises(SystemExit):
            parse(words.split())
    with pytest.raises(SystemExit):
        parse(["--help"])
    told = capsys.readouterr().out
    assert "Fine-tune a causal Hugging Face model with tensor parallelism, ZeRO and LoRA, on Python's standard" in told
    assert "    python -m examples.finetune_hf                                        # all weights" in told
    said = " ".join(told.split())
    for flag, words in {
        "--model MODEL": "folder of a causal", "--lora RANK": "train adapters", "--adapter ADAPTER": "go on with",
        "--tp TP": "tensor-parallel size", "--pp PP": "pipeline stages", "--zero {0,1,2,3}": "stage of ZeRO",
        "--dtype {float32,bfloat16}": "of weights", "--batch BATCH": "samples a step", "--out OUT": "gets the folders",
        "--micro-batches MICRO_BATCHES": "parts of a rank's", "--device {cpu,cuda}": "without: the GPU",
    }.items():  # fmt: skip
        assert f"{flag} {words}" in said


def test_the_new_model_is_a_small_llama():
    from examples.finetune_hf import load_model

    model: Any = load_model(None, mp.Mesh())
    c = model.config
    assert (c.model_type, c.vocab_size, c.hidden_size, c.intermediate_size) == ("llama", 257, 128, 384)
    assert (c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads) == (4, 4, 2)
    torch.manual_seed(5)
    again: Any = load_model(None, mp.Mesh())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    torch.manual_seed(0)
    first = type(model)(c)
    assert torch.equal(model.lm_head.weight, first.lm_head.weight)


def test_the_loss_is_a_sum_in_float32():
    from examples.finetune_hf import token_loss

    logits, target = torch.randn(2, 3, 5).bfloat16(), torch.arange(6).view(2, 3) % 5
    chosen = logits.float().log_softmax(-1).gather(-1, target[..., None])
    found = token_loss({"logits": logits}, target)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(-float(chosen.sum()), rel=1e-6)


def started(flags: str) -> tuple[mock.MagicMock, Any, Any]:
    """What `start` asks of the library: its calls, the model and the mesh."""
    from examples import finetune_hf

    mp, model = mock.MagicMock(), SimpleNamespace(config=SimpleNamespace(use_cache=True))
    mesh, mp.pipeline_stages.return_value = mp.build_mesh.return_value, ("stages", "blocks", "schedule")
    with (
        mock.patch.multiple(finetune_hf, mp=mp, add_lora=mp.add_lora, load_lora=mp.load_lora, save_lora=mp.save_lora),
        mock.patch.object(finetune_hf, "load_model", return_value=model) as load,
    ):
        args = finetune_hf.parse(flags.split())
        assert finetune_hf.start(args) is mp.prepare.return_value
        load.assert_called_once_with(args.model, mesh)
        mp.AdamW.assert_not_called()
        made = mp.prepare.call_args.kwargs["optimizer"]("the model")
        assert made is mp.AdamW.return_value
        mp.AdamW.assert_called_once_with("the model", lr=args.lr)
    return mp, model, mesh


def test_the_model_is_laid_out_as_the_flags_say():
    from examples.finetune_hf import token_loss

    mp, model, mesh = started("--tp 2 --pp 4 --zero 3 --dtype bfloat16 --recompute full --micro-batches 2 --device cpu")
    mp.build_mesh.assert_called_once_with(tp=2, pp=4, device_type="cpu")
    assert model.config.use_cache is False
    mp.pipeline_stages.assert_called_once_with(model, mesh, micro_batches=2)
    told = dict(mp.prepare.call_args.kwargs)
    told.pop("optimizer")
    assert mp.prepare.call_args.args == ("stages", mesh)
    assert told == {"blocks": "blocks", "schedule": "schedule", "loss": token_loss, "initialize": False,
                    "data": mp.Zero.return_value, "precision": "bfloat16", "recompute": "full",
                    "micro_batches": 2}  # fmt: skip
    mp.Zero.assert_called_once_with(3)
    mp.add_lora.assert_not_called()
    mp.load_lora.assert_not_called()


def test_an_adapter_is_made_or_read():
    mp, model, _ = started("--lora 8")
    mp.add_lora.assert_called_once_with(model, rank=8, alpha=16)
    mp.load_lora.assert_not_called()
    mp, model, mesh = started("--adapter there --lora 8")
    mp.load_lora.assert_called_once_with(model, Path("there"), mesh)
    mp.add_lora.assert_not_called()


class Stub:
    """A run whose losses are known."""

    def __init__(self, rank: int = 0) -> None:
        self.mesh = SimpleNamespace(job=SimpleNamespace(rank=rank), device="cpu")
        self.model = torch.nn.Linear(3, 4)
        self.model.bias.requires_grad_(False)
        self.whole, self.said = SimpleNamespace(config=SimpleNamespace(use_cache=False)), []
        self.values = iter([3.0, 2.5])

    def share(self, batch: int) -> range:
        return range(1, batch)

    def evaluate(self, batches: list) -> float:
        ((x, target),) = batches
        self.said.append(("evaluate", x.tolist(), target.tolist()))
        return next(self.values)

    def forward_backward(self, x: Any, target: Any) -> None:
        self.said.append(("step", x.tolist(), target.tolist()))

    def clip_gradients(self, norm: float) -> None:
        self.said.append(("clip", norm))

    def optimizer_step(self, lr: float) -> Any:
        self.said.append(("lr", round(lr, 9)))
        return SimpleNamespace(loss=float(len(self.said)))

    def parameters(self) -> Any:
        return nullcontext(self.whole)


class Numbers:
    def __init__(self, first: int) -> None:
        self.first = first

    def batch(self, indices: range) -> tuple:
        return torch.tensor(list(indices)) + self.first, torch.tensor(list(indices)) - self.first


def finetuned(
    flags: str, tmp_path: Path, rank: int = 0
) -> tuple[list[float], list[Stub], mock.MagicMock, mock.MagicMock]:
    from examples import finetune_hf

    runs: list[Any] = []

    def start(args: Any) -> Stub:
        runs.append(Stub(rank))
        return runs[-1]

    with (
        mock.patch.object(finetune_hf, "mp", mock.MagicMock()) as mp,
        mock.patch.object(finetune_hf, "save_lora", mp.save_lora),
        mock.patch.object(finetune_hf, "start", start),
        mock.patch.object(finetune_hf, "default_corpus", side_effect=lambda tokenizer: ("corpus", tokenizer)) as corpus,
        mock.patch.object(finetune_hf, "IndexedDataset", side_effect=lambda prefix: ("data", prefix)),
        mock.patch.object(finetune_hf, "split_samples", return_value=(Numbers(100), Numbers(500))) as split,
    ):
        mp.save_pretrained.side_effect = lambda whole, folder, mesh: folder
        found = finetune_hf.finetune(finetune_hf.parse([*flags.split()]))
    (prefix, seq_len), how = split.call_args
    tokenizer = prefix[1][1]
    assert (prefix, how) == (("data", ("corpus", tokenizer)), {"seed": 0})
    corpus.assert_called_once_with(tokenizer=tokenizer)
    runs[0].seq_len, runs[0].tokenizer = seq_len, tokenizer
    return found, runs, mp, corpus


def test_a_run_warms_up_clips_evaluates_and_saves(tmp_path, capsys):
    out = tmp_path / "out"
    losses, (run,), mp, _ = finetuned(f"--steps 12 --batch 3 --lr 0.5 --seq-len 16 --out {out}", tmp_path)
    rates = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5, 0.5]
    held = ("evaluate", [501, 502], [-499, -498])
    steps = []
    for step, rate in enumerate(rates):
        mine = [3 * step + 1, 3 * step + 2]
        steps += [("step", [i + 100 for i in mine], [i - 100 for i in mine]), ("clip", 1.0), ("lr", rate)]
    assert run.said == [held, *steps, held]
    assert losses == [float(4 + 3 * step) for step in range(12)]
    assert (run.seq_len, type(run.tokenizer).__name__) == (16, "ByteTokenizer")
    mp.save_pretrained.assert_called_once_with(run.whole, out / "model", run.mesh)
    mp.save_lora.assert_not_called()
    assert run.whole.config.use_cache is True
    assert capsys.readouterr().out.splitlines() == [
        "trains 12 of 16 parameters a rank",
        "loss on held-out text 3.0000 -> 2.5000",
        f"the model, for AutoModelForCausalLM.from_pretrained: {out / 'model'}",
        f"next, train an adapter on it: python -m examples.finetune_hf --model {out / 'model'} --lora 8",
    ]


def test_an_adapter_is_saved_beside_the_model(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags in ("--lora 4", "--adapter there"):
        _, (run,), mp, _ = finetuned(f"--steps 1 {flags}", tmp_path)
        mp.save_lora.assert_called_once_with(run.whole, Path("runs/lora/adapter"), run.mesh)
        told = capsys.readouterr().out.splitlines()
        assert told[-1].endswith("(base, ..) or --adapter: runs/lora/adapter")
        assert told[-2].endswith(": runs/lora/model")
    _, (run,), mp, _ = finetuned("--steps 1", tmp_path)
    assert mp.save_pretrained.call_args.args[1] == Path("runs/finetune/model")


def test_another_rank_says_nothing(tmp_path, capsys):
    finetuned(f"--steps 1 --out {tmp_path / 'out'}", tmp_path, rank=1)
    assert capsys.readouterr() == ("", "")


def test_the_models_own_tokenizer_is_used_where_it_has_one(tmp_path):
    from examples import finetune_hf

    (tmp_path / "tokenizer.json").write_text("{}")
    with mock.patch.object(finetune_hf, "load_tokenizer", side_effect=lambda path: ("read", path)):
        _, (run,), *_ = finetuned(f"--steps 1 --model {tmp_path} --out {tmp_path / 'out'}", tmp_path)
        assert run.tokenizer == ("read", tmp_path / "tokenizer.json")
        _, (run,), *_ = finetuned(f"--steps 1 --model {tmp_path / 'other'} --out {tmp_path / 'out2'}", tmp_path)
        assert type(run.tokenizer).__name__ == "ByteTokenizer"
