"""The training loop: what it asks of the run, in which order, and what it makes of the answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.gpt.arguments import parse
from examples.gpt.config import GPTConfig
from examples.gpt.tokenizer import ByteTokenizer
from examples.gpt.train import Trainer
from mpcore import Axis, Mesh


def bare(flags: str = "", mesh: Mesh = Mesh(), **parts: Any) -> Any:
    """A trainer whose parts are given."""
    made = Trainer.__new__(Trainer)
    made.args, made.mesh, made.config = parse(flags.split()), mesh, GPTConfig()
    vars(made).update(parts)
    return made


class Samples:
    """Sample i is the tokens 10 i, 10 i + 1, .. and the next ones."""

    def __init__(self, length: int = 4, size: int = 100) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor([[10 * i + j for j in range(self.length + 1)] for i in indices])
        return tokens[:, :-1], tokens[:, 1:]


def test_a_batch_is_this_ranks_part_of_samples_and_documents():
    setup = SimpleNamespace(tokenizer=ByteTokenizer())
    x, y, more = bare(setup=setup).batch(Samples(), [3, 1])
    assert x.tolist() == [[30, 31, 32, 33], [10, 11, 12, 13]]
    assert y.tolist() == [[31, 32, 33, 34], [11, 12, 13, 14]]
    assert {name: value.tolist() for name, value in more.items()} == {"samples": [3, 1]}
    second = Mesh(cp=Axis(2, 1))
    x, y, _ = bare("--cp-kind alltoall", second, setup=setup).batch(Samples(), [3])
    assert (x.tolist(), y.tolist()) == ([[32, 33]], [[33, 34]])
    x, _, _ = bare("", second, setup=setup).batch(Samples(), [3])
    assert x.tolist() == [[31, 32]], "zigzag: the middle parts"
    ended = SimpleNamespace(tokenizer=SimpleNamespace(end_of_document=31))
    _, _, more = bare("--set document_masking=true", setup=ended).batch(Samples(), [3])
    found = more["documents"][0].tolist()
    assert [found.index(document) for document in found] == [0, 0, 2, 2], "31 ends the first document"


@pytest.mark.parametrize(
    ("flags", "mesh", "size", "places", "counted"),
    [
        ("--set eval_samples=3", Mesh(), 100, [0, 1, 2], [True] * 3),
        ("--set eval_samples=3", Mesh(dp=Axis(2)), 100, [0, 2], [True, True]),
        ("--set eval_samples=3", Mesh(dp=Axis(2, 1)), 100, [1, 3], [True, False]),
        ("--set eval_samples=4", Mesh(dp=Axis(2, 1)), 100, [1, 3], [True, True]),
        ("--set eval_samples=9", Mesh(), 2, [0, 1], [True, True]),
        ("--set eval_samples=1", Mesh(dp=Axis(3, 2)), 100, [2], [False]),
        ("--set eval_samples=2 --set document_masking=true", Mesh(), 100, [0, 1], [True] * 2),
    ],
)
def test_an_evaluation_deals_the_first_samples_out(flags, mesh, size, places, counted):
    asked: list[tuple] = []
    run = SimpleNamespace(evaluate=lambda batches, documents: asked.append((batches, documents)) or 1.5)
    made = bare(flags, mesh, run=run, setup=SimpleNamespace(tokenizer=ByteTokenizer()), held_out=Samples(size=size))
    assert made.evaluate() == 1.5
    ((batches, documents),) = asked
    assert [x[0, 0].item() // 10 for x, _ in batches] == places
    assert all(x.shape == y.shape == (1, 4) for x, y in batches)
    assert [(y == x + 1).all().item() for x, y in batches] == counted
    assert [(y == -100).all().item() for _, y in batches] == [not each for each in counted]
    assert [document is not None for document in documents] == ["document" in flags] * len(places)
    made.evaluate(Samples(size=1))
    assert len(asked[1][0]) == 1
    made.held_out = None
    with pytest.raises(ValueError, match="the held-out part has no sample: --eval-every above 0 says why"):
        made.evaluate()
