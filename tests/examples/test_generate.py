"""Generation token by token: which tokens a model is asked with, what is drawn from its logits, and the command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from examples.gpt import generate as module
from examples.gpt.generate import _draw, _last_logits, generate, load_model, main, sample_text
from examples.gpt.tokenizer import ByteTokenizer
from mpcore import Axis, Mesh
from mpcore.random import generator


class Pipeline:
    """A model of one process: the likeliest token after t is t + 1; what comes behind the window is 99."""

    stages = ()

    def __init__(self, vocab: int = 260) -> None:
        self.asked: list[tuple[list[int], list[bool]]] = []
        self.vocab = vocab

    def forward(self, batches: list[Tensor], mask: Tensor) -> tuple[Tensor]:
        (x,) = batches
        assert x.shape == mask.shape[:1] + x.shape[1:]
        self.asked.append((x[0].tolist(), mask[0].tolist()))
        y = torch.zeros(1, x.shape[1], self.vocab)
        for place, token in enumerate(x[0].tolist()):
            y[0, place, (token + 1) % self.vocab] = 5.0
        return (y,)

    def from_last(self, logits: Tensor) -> Tensor:
        return logits


def model_of(seq_len: int = 8, vocab: int = 260, **changes: Any) -> Any:
    model = SimpleNamespace(config=SimpleNamespace(seq_len=seq_len, vocab_size=vocab), training=True, last=True,
                            sequence_parallel=False, context="zigzag", modes=[])  # fmt: skip
    model.eval = lambda: (model.modes.append("eval"), setattr(model, "training", False))
    model.modules = lambda: [model]
    vars(model).update(changes)
    return model


def text(prompt: str, pipeline: Pipeline | None = None, model: Any = None, mesh: Mesh = Mesh(), **how: Any) -> str:
    return generate(model or model_of(), pipeline or Pipeline(), mesh, ByteTokenizer(), prompt, **how)  # type: ignore[arg-type]


def test_each_token_follows_the_last_window():
    pipeline, model = Pipeline(), model_of(seq_len=3)
    assert text("ab", pipeline, model, new_tokens=4, temperature=0) == "abcdef"
    assert [tokens for tokens, _ in pipeline.asked] == [[97, 98], [97, 98, 99], [98, 99, 100], [99, 100, 101]]
    assert all(all(mask) for _, mask in pipeline.asked)
    assert model.modes == ["eval"]
    assert model.training
    model = model_of(training=False)
    text("ab", model=model, new_tokens=0)
    assert model.modes == ["eval"]
    assert not model.training
    assert text("ab", new_tokens=0) == "ab"


def test_an_empty_prompt_begins_a_document_and_its_end_ends_the_text():
    pipeline = Pipeline(vocab=257)
    assert text("", pipeline, model_of(vocab=257), new_tokens=3, temperature=0) == "\x00\x01\x02"
    assert pipeline.asked[0][0] == [256]
    pipeline = Pipeline()
    model = model_of(seq_len=99)
    ended = generate(model, pipeline, Mesh(), ByteTokenizer(), "\x7f", new_tokens=200, temperature=0)  # type: ignore[arg-type]
    assert len(pipeline.asked) == 256 - 0x7F, "up to the end of a document"
    assert ended.startswith("\x7f")


def test_ids_that_the_tokenizer_lacks_are_not_drawn():
    """After 256 the model would say 257, which has no text."""
    pipeline = Pipeline(vocab=300)
    with mock.patch.object(pipeline, "from_last", side_effect=lambda logits: logits + torch.arange(300)):
        text("a", pipeline, model_of(vocab=300), new_tokens=1, temperature=0)
    drawn = pipeline.from_last(torch.zeros(300))
    assert len(drawn) == 300
    assert text("a", Pipeline(vocab=300), model_of(vocab=300), new_tokens=1, temperature=0) == "ab"


@pytest.mark.parametrize(
    ("mesh", "changes", "prompt", "more"),
    [
        (Mesh(), {}, "abc", 0),
        (Mesh(tp=Axis(4)), {}, "abc", 0),
        (Mesh(tp=Axis(2)), {"sequence_parallel": True}, "abc", 1),
        (Mesh(tp=Axis(4)), {"sequence_parallel": True}, "abc", 1),
        (Mesh(tp=Axis(3)), {"sequence_parallel": True}, "abc", 0),
        (Mesh(tp=Axis(5)), {"sequence_parallel": True}, "abc", 2),
    ],
)
def test_a_window_is_padded_to_the_ranks_that_cut_it_and_the_padding_is_masked(mesh, changes, prompt, more):
    pipeline = Pipeline()
    with mock.patch.object(module, "gather", side_effect=lambda logits, *of: logits):
        assert text(prompt, pipeline, model_of(**changes), mesh, new_tokens=1, temperature=0) == "abcd"
    assert pipeline.asked == [([97, 98, 99] + [0] * more, [True] * 3 + [False] * more)]


def test_context_parallel_ranks_have_their_part_of_the_tokens():
    asked: list[list[int]] = []
    pipeline: Any = SimpleNamespace(stages=(), from_last=lambda logits: logits)

    def forward(batches: list[Tensor], mask: Tensor) -> tuple[Tensor]:
        asked.append(batches[0][0].tolist())
        y = torch.zeros(1, batches[0].shape[1], 260)
        y[0, :, 100] = torch.arange(batches[0].shape[1]).float()
        return (y,)

    pipeline.forward = forward
    sums: list[Any] = []
    second = Mesh(cp=Axis(2, 1))
    with mock.patch.multiple(module, all_reduce=lambda x, axis: sums.append(axis) or x, gather=lambda x, *of: x):
        text("abc", pipeline, model_of(context="alltoall"), second, new_tokens=1, temperature=0)
        assert asked == [[99, 0]], "the second half of abc and one pad"
        logits = _last_logits(torch.eye(4)[None], 2, model_of(vocab=4, context="alltoall"), second)
        assert logits.tolist() == [0, 0, 0, 0], "this rank has the tokens 4 to 7"
        logits = _last_logits(torch.eye(4)[None], 6, model_of(vocab=4, context="alltoall"), second)
        assert (logits.tolist(), logits.dtype) == ([0, 0, 1, 0], torch.float64)
    assert sums == [second.cp] * 3


def test_a_stage_that_is_not_the_last_has_no_logits():
    found = _last_logits(torch.ones(1, 2, 3), 1, model_of(vocab=7, last=False), Mesh())
    assert (found.shape, found.dtype, found.any().item()) == ((7,), torch.float64, False)
    with mock.patch.object(module, "gather", side_effect=lambda *of: of) as gathered:
        _last_logits(torch.ones(1, 2, 3), 1, model_of(vocab=7), Mesh(tp=Axis(2)))
    _, axis, dim, size = gathered.call_args.args
    assert (axis.size, dim, size) == (2, 0, 7)


def test_a_token_is_drawn_by_its_probability():
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert _draw(logits, 0, torch.Generator()) == 1
    for temperature in (0.5, 1.0, 2.0):
        draws = torch.Generator().manual_seed(0)
        drawn = torch.tensor([_draw(logits, temperature, draws) for _ in range(3000)])
        found = torch.bincount(drawn, minlength=3) / 3000
        assert torch.allclose(found, (logits / temperature).softmax(0), atol=0.03)


def test_the_seed_draws_the_text_and_the_same_seed_the_same():
    how = {"new_tokens": 12, "temperature": 5.0}
    texts = [text("a", seed=seed, **how) for seed in (0, 1, 0)]  # type: ignore[arg-type]
    assert texts[0] == texts[2] != texts[1]
    assert text("a", **how) == texts[0]  # type: ignore[arg-type]
    draws, ids = generator(3, "generate"), [97]
    logits = torch.zeros(257)
    for _ in range(2):
        one = logits.clone()
        one[ids[-1] + 1] = 5.0
        ids.append(_draw(one, 0.8, draws))
    assert text("a", seed=3, new_tokens=2) == ByteTokenizer().decode(ids)


def test_a_finished_run_shows_a_text_or_says_why_not():
    inside: list[str] = []
    evaluating = mock.MagicMock()
    evaluating.__enter__.side_effect = lambda: inside.append("in")
    run = SimpleNamespace(evaluating=lambda: evaluating, pipeline="pipeline", mesh="mesh")
    trainer: Any = SimpleNamespace(run=run, stages=["first", "last"], args=SimpleNamespace(seed=7),
                                   setup=SimpleNamespace(tokenizer="tokenizer"))  # fmt: skip
    with mock.patch.object(module, "generate", return_value="def f") as made:
        assert sample_text(trainer) == "def f"
        made.assert_called_once_with("last", "pipeline", "mesh", "tokenizer", "def ", seed=7)
        assert inside == ["in"]
        made.side_effect = Exception("no such token")
        evaluating.__exit__.return_value = False
        assert sample_text(trainer) == "none: no such token"
        made.side_effect = RuntimeError("lost")
        with pytest.raises(RuntimeError, match="lost"):
            sample_text(trainer)


# --- the command ------------------------------------------------------------------------------------------------------


def command(*words: str, vocab: int = 300) -> tuple[int, Any]:
    """The status, and the mocks of what the command calls."""
    names = ("open_checkpoint", "load_tokenizer", "tokenizer_of_checkpoint", "load_model", "generate", "Pipeline")
    with mock.patch.multiple(module, **dict.fromkeys(names, mock.DEFAULT)) as parts:
        called = SimpleNamespace(**parts)
        called.open_checkpoint.return_value = (None, None, SimpleNamespace(vocab_size=vocab))
        called.load_tokenizer.return_value.vocab_size = 257
        called.tokenizer_of_checkpoint.return_value = "the checkpoint's"
        called.generate.return_value = "some text"
        return main(["--checkpoint", "there", *words]), called


def test_the_command_prints_a_text(capsys):
    status, called = command()
    assert status == 0
    assert capsys.readouterr().out == "some text\n"
    called.load_tokenizer.assert_called_once_with("the checkpoint's", None)
    called.open_checkpoint.assert_called_once_with("there")
    called.load_model.assert_called_once_with("there")
    (model, mesh, count, loss), _ = called.Pipeline.call_args
    assert (model, mesh, count) == (called.load_model.return_value, Mesh(), 1)
    assert loss(torch.ones(3), None) == 3
    called.generate.assert_called_once_with(
        model, called.Pipeline.return_value, Mesh(), called.load_tokenizer.return_value, "",
        new_tokens=120, temperature=0.8, seed=0,
    )  # fmt: skip
    words = "--prompt a --new-tokens 0 --temperature 0 --seed 5 --tokenizer mine --end-of-document EOD"
    status, called = command(*words.split())
    called.load_tokenizer.assert_called_once_with("mine", "EOD")
    assert called.generate.call_args.args[-1] == "a"
    assert called.generate.call_args.kwargs == {"new_tokens": 0, "temperature": 0.0, "seed": 5}
    assert command(vocab=257)[0] == 0


def test_the_command_refuses_what_cannot_be(capsys):
    for words, vocab, message in (
        (("--temperature", "-0.5"), 300, "--temperature -0.5 is no number from 0"),
        (("--temperature", "nan"), 300, "--temperature nan is no number from 0"),
        (("--temperature", "inf"), 300, "--temperature inf is no number from 0"),
        (("--new-tokens", "-1"), 300, "--new-tokens -1 is smaller than 0"),
        ((), 256, "the tokenizer has 257 tokens, the model 256"),
    ):
        assert command(*words, vocab=vocab)[0] == 2
        assert capsys.readouterr().err == f"python -m examples.gpt.generate: error: {message}\n"
    with pytest.raises(SystemExit):
        main([])
    assert "--checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("usage: python -m examples.gpt.generate [-h] --checkpoint PATH")
    for said in ("Sample from a checkpoint.", "--checkpoint PATH of any layout", "--prompt PROMPT what the text begins",
                 "--tokenizer TOKENIZER 'byte' or", "--end-of-document TOKEN token of", "at the most (default 120)",
                 "0 takes the likeliest token (default 0.8)"):  # fmt: skip
        assert said in told


def test_a_checkpoint_is_loaded_in_its_own_dtype():
    saved = SimpleNamespace(tensors={"model/norm.weight": SimpleNamespace(dtype="F64")})
    names = ("open_checkpoint", "GPT", "materialize", "load")
    with mock.patch.multiple(module, **dict.fromkeys(names, mock.DEFAULT)) as parts:
        parts["open_checkpoint"].return_value = (saved, None, "config")
        model = load_model(Path("there"))
    assert model is parts["GPT"].return_value
    parts["GPT"].assert_called_once_with("config", device="meta", dtype=torch.float64)
    parts["materialize"].assert_called_once_with(model, 0)
    parts["load"].assert_called_once_with(Path("there"), model, mesh=Mesh())
