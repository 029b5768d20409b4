"""Generation token by token: which tokens a model is asked with, what is drawn from its logits, and the command."""

from __future__ import annotations

import io
import math
import re
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.gpt.generate import _draw, generate
from examples.gpt.pretrain import Trainer, parse
from examples.gpt.tokenizer import ByteTokenizer
from mpcore import Mesh
from mpcore.random import generator
from tests.pool import mesh
from tests.quick import some


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
        y[..., 257:] = 9.0  # rows of no token
        return (y,)

    def from_last(self, logits: Tensor) -> Tensor:
        return logits


def model_of(seq_len: int = 8, vocab: int = 260, **changes: Any) -> Any:
    model = SimpleNamespace(config=SimpleNamespace(seq_len=seq_len, vocab_size=vocab, mtp=0), training=True, last=True,
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


def drafted(flags: str, sizes: dict[str, int]) -> tuple[list[str], str]:
    """A text with guesses and one without, after training on words that repeat."""
    base = "--layers 2 --d-model 16 --heads 4 --d-ff 24 --seq-len 24 --global-batch 4 --micro-batch 1 --device cpu"
    t = Trainer(parse([*f"{base} --lr 0.01 --set mtp=2 no_save=true {flags}".split()]), mesh(**sizes))
    words = torch.tensor([list(b"over and ") * 4])[:, :25].repeat(4, 1)
    t.train_samples.batch = lambda indices: (words[: len(indices), :-1], words[: len(indices), 1:])
    for _ in range(16):
        t.step()
    made, text = [], io.StringIO()
    for draft in (False, True):
        with t.run.evaluating(), redirect_stderr(text):
            made.append(generate(t.stages[-1], t.run.pipeline, t.run.mesh, t.setup.tokenizer, "over", new_tokens=30,
                                 temperature=0, draft=draft))  # fmt: skip
    return made, text.getvalue()


@pytest.mark.parametrize(("flags", "sizes"), some(
    ("--experts 4 --set moe.d_ff=8 layers_spec=delta,full", {}), ("", {"pp": 2}),
    of=[("--sequence-parallel", {"tp": 2, "pp": 2})],
))  # fmt: skip
def test_guessed_tokens_give_the_same_text_in_fewer_forwards(ranks, flags, sizes):
    found = ranks(math.prod(sizes.values()), drafted, flags, sizes)
    assert all(made == [found[0][0][0]] * 2 for made, _ in found)
    right, asked, forwards, tokens = map(int, re.findall(r"\d+", found[0][1]))
    assert 0 < right <= asked
    assert forwards < tokens == 30


def test_drafting_needs_its_layers_and_temperature_0():
    with pytest.raises(ValueError, match=r"draft with temperature 0\.8, mtp 0 and cp 1"):
        text("a", model=model_of(), draft=True)
