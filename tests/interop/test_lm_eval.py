"""`interop.lm_eval.Model` on layouts gives the numbers that lm-eval-harness computes for the dense model itself."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mpcore as mp
from examples.gpt.evaluate import evaluate
from examples.gpt.generate import load_model
from examples.gpt.pretrain import main as pretrain
from examples.gpt.tokenizer import ByteTokenizer
from mpcore.interop.parallelize import model_plan
from tests.lora_models import GPT2, build, fill, token_loss
from tests.pool import RankError
from tests.quick import some

lm_eval = pytest.importorskip("lm_eval")
tokenizers, hf = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")

HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
Model = pytest.importorskip("mpcore.interop.lm_eval").Model
QUIET = {"bootstrap_iters": 0, "task_manager": lm_eval.tasks.TaskManager(include_defaults=False)}  # of 26,000 files
LETTERS = "abcdefghijklmnopqrstuvwxyz .,?"
LAYOUTS = {
    "tp2": ({"tp": 2}, None), "tp2 zero3": ({"tp": 2, "dp": 2}, mp.Zero(3)),
    "pp2": ({"pp": 2}, mp.Zero(0)), "tp2 pp2": ({"tp": 2, "pp": 2}, mp.Zero(0)),
}  # fmt: skip


def tokenizer_of_letters():
    words = {letter: i for i, letter in enumerate([*LETTERS, "<unk>", "<eos>", "<bos>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    )


def tasks(folder: Path) -> list[dict]:
    """A choice between answers, the perplexity of texts longer than the model's 16 tokens, and generated text."""
    texts = ["is it?", "a", "x, y and so on"]
    rows = [{"q": text, "a": ["yes", "no", " maybe"], "i": i} for i, text in enumerate(texts)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows * 2))
    files = {"data_files": {"test": str(folder / "rows.jsonl")}}
    told = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test", "doc_to_text": "{{q}}"}
    choice = {"doc_to_choice": "{{a}}", "doc_to_target": "{{i}}", "metric_list": [{"metric": "acc"}]}
    rolling = {"doc_to_text": "", "doc_to_target": "{{q}} {{q}}, {{q}}", "metric_list": [{"metric": "byte_perplexity"}]}
    write = {"doc_to_target": "yes", "metric_list": [{"metric": "exact_match"}]}
    write["generation_kwargs"] = {"until": ["k", "\n"], "max_gen_toks": 6, "do_sample": False}
    return [
        {**told, "task": "choice", "output_type": "multiple_choice", **choice},
        {**told, "task": "rolling", "output_type": "loglikelihood_rolling", **rolling},
        {**told, "task": "write", "output_type": "generate_until", **write},
    ]


def evaluated(model, folder: Path) -> str:
    """Every number and answer of lm-eval's report, floats to 12 digits."""
    return numbers(lm_eval.simple_evaluate(model=model, tasks=tasks(folder), **QUIET))


def numbers(found: dict) -> str:
    answers = {task: [sample["filtered_resps"] for sample in samples] for task, samples in found["samples"].items()}
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda x: f"{float(x[0]):.12g}", json.dumps([found["results"], answers]))


def on_layout(on: mp.Mesh, data: mp.Zero | None, folder: Path) -> str:
    model, folder = build("llama"), folder / str(on.world.rank)
    folder.mkdir()
    if data is None:
        held = mp.parallelize(model, tp=on.tp, check=False)
    else:
        if on.tp.size > 1:
            mp.parallelize(model, tp=on.tp, check=False)
        stages, blocks, plan = mp.pipeline_stages(model, on, micro_batches=2)
        held = mp.prepare(
            stages, on, blocks=blocks, schedule=plan, micro_batches=2, initialize=False, data=data,
            loss=lambda out, target: token_loss(out.logits, target), optimizer=lambda model: mp.AdamW(model, lr=1e-2),
        )  # fmt: skip
    return evaluated(Model(held, tokenizer_of_letters(), on, batch_size=4, vocab_size=33, max_length=16), folder)


@pytest.mark.parametrize("layout", some("tp2 zero3", of=LAYOUTS))
def test_every_layout_evaluates_as_the_dense_model(tmp_path, layout):
    dense = HFLM(pretrained=build("llama"), tokenizer=tokenizer_of_letters(), batch_size=1)
    want, (sizes, data) = evaluated(dense, tmp_path), LAYOUTS[layout]
    assert set(mp.simulate(partial(on_layout, data=data, folder=tmp_path), **sizes)) == {want}


def request(*args):
    return SimpleNamespace(args=args)


def test_what_the_adapter_cannot_evaluate_is_refused_and_a_prefix_is_encoded_once():
    made = Model(build("llama"), tokenizer_of_letters(), batch_size=2, vocab_size=33, max_length=8)
    until = {"until": ["."], "do_sample": False}
    for told, words in (({"do_sample": True, "temperature": 1.0}, "greedily"), ({"num_beams": 2}, "greedily"),
                        ({"max_gen_toks": 8}, "max_gen_toks 8 leaves no room")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            made.generate_until([request("a", {**until, "max_gen_toks": 2, **told})])
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="an answer has 9 tokens, and max_length is 8"):
        made._loglikelihood_tokens([(None, [1], [*ids, 9])])
    ((full, _),) = made._loglikelihood_tokens([(None, [1], ids)])
    ((cut, _),) = made._loglikelihood_tokens([(None, [9, 9, 1], ids)])  # the first of the context are left out
    assert full == cut
    assert max(map(len, made.generate_until([request(x, {**until, "max_gen_toks": 2}) for x in ("a" * 20, "")]))) <= 2
    with pytest.raises(ValueError, match="vocab_size is None and max_length 8: give both"):
        Model(torch.nn.Linear(2, 2), tokenizer_of_letters(), max_length=8)
    bos = made.prefix_token_id
    adds_bos = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    made.tokenizer.backend_tokenizer.post_processor = adds_bos
    assert made.tok_encode("<bos>a") == made.tok_encode("a") == [bos, 0]
    made.tokenizer.bos_token = None
    assert made.prefix_token_id == made.eot_token_id


def other_requests(mesh):
    made = Model(build("llama"), tokenizer_of_letters(), mesh, vocab_size=33, max_length=8)
    with pytest.raises(ValueError, match="every rank must evaluate the same tasks"):
        made._loglikelihood_tokens([(None, [1], [2 + mesh.world.rank])])


def other_vocabulary(mesh):
    stages, blocks, plan = mp.pipeline_stages(build("llama"), mesh, micro_batches=2)
    loss, made = (lambda out, target: token_loss(out.logits, target)), partial(mp.AdamW, lr=1e-2)
    how: dict = {"schedule": plan, "micro_batches": 2, "initialize": False, "loss": loss, "optimizer": made}
    run = mp.prepare(stages, mesh, blocks=blocks, **how)
    Model(run, tokenizer_of_letters(), vocab_size=20, max_length=8)._loglikelihood_tokens([(None, [1], [2])])


def width_of_a_shard(mesh):
    """The logits [.., 32 / tp] of a rank are as many as the tokens that are claimed."""
    head = mp.ColumnParallelLinear(8, 32, tp=mesh.tp)
    model = torch.nn.Sequential(mp.VocabParallelEmbedding(32, 8, tp=mesh.tp), head)
    Model(model, tokenizer_of_letters(), mesh, vocab_size=16, max_length=8)._loglikelihood_tokens([(None, [1], [2])])


def test_ranks_with_other_requests_and_context_parallelism_are_refused():
    mp.simulate(other_requests, dp=2)
    with pytest.raises(RankError, match="the logits are of 32 tokens, and vocab_size is 16"):
        mp.simulate(width_of_a_shard, tp=2)
    with pytest.raises(RankError, match="the logits are of 33 tokens, and vocab_size is 20"):
        mp.simulate(other_vocabulary, pp=2)
    with pytest.raises(RankError, match="cp 2"):
        mp.simulate(other_requests, cp=2)


def at_the_last_position(mesh: mp.Mesh) -> float:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2 | {"n_positions": 15})).double()
    fill(model)
    model = mp.parallelize(model, tp=mesh.tp, check=False)
    told = {"vocab_size": 33, "max_length": 15}
    ((found, _),) = Model(model, tokenizer_of_letters(), mesh, **told)._loglikelihood_tokens([(None, [1], [2] * 15)])
    if mesh.tp.size > 1:
        split = mp.parallelize(
            build("llama"), model_plan(build("llama")) | {"": "sequence_parallel"}, mesh.tp, check=False
        )
        with pytest.raises(ValueError, match=r"max_length 15 is no multiple of tp 2, .* max_length=14"):
            Model(split, tokenizer_of_letters(), mesh, **told)
    return found


def test_inputs_as_long_as_a_table_of_positions_are_not_padded_past_it():
    """Under tp they were padded to 16 tokens, for which sequence parallelism alone has a use."""
    (want,) = mp.simulate(at_the_last_position, tp=1)
    assert mp.simulate(at_the_last_position, tp=2) == pytest.approx([want, want], rel=1e-9)


def of_example(on: mp.Mesh, checkpoint: Path, folder: Path) -> str:
    folder = folder / f"example{on.world.rank}"
    folder.mkdir()
    return numbers(evaluate(checkpoint, ByteTokenizer(), tasks(folder), on, **QUIET))


def test_a_checkpoint_of_the_example_gets_its_models_own_numbers(tmp_path, monkeypatch):
    """On two ranks of tp, the numbers of the reference: the log-probabilities of a plain forward."""
    monkeypatch.chdir(tmp_path)
    flags: str = "--device cpu --steps 1 --layers 2 --d-model 16 --heads 2 --seq-len 64 --dtype float64 --out run"
    assert pretrain([*flags.split()]) == 0
    (checkpoint,) = tmp_path.glob("run/checkpoints/step-*")
    found = [
        json.loads(each) for each in mp.simulate(partial(of_example, checkpoint=checkpoint, folder=tmp_path), tp=2)
    ]
    assert found[0] == found[1]
    model, said = load_model(checkpoint).eval(), found[0][1]["choice"]
    for answers, text in zip(said[:3], ["is it?", "a", "x, y and so on"], strict=True):
        for (value, _), answer in zip(answers, ["yes", "no", " maybe"], strict=True):
            ids = torch.tensor([ByteTokenizer().encode(f"{text} {answer}").astype(int)])
            likely = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])
            assert float(value) == pytest.approx(likely[0, -len(answer) - 1 :].sum().item(), rel=1e-9)
