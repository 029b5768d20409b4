"""The small copy that a plan is tested on: what it keeps, how large its weights are, and what its forward is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpcore._torch.fake import fake_tensors
from mpcore.interop.parallelize.model_copy import guesses, shape_copy, size_of, twin_of


class Model(nn.Module):
    """Layers of two kinds, a tied weight, buffers and a tensor that is neither."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].weight.requires_grad_(False)
        self.register_buffer("steps", torch.tensor([3, 4]))
        self.register_buffer("mean", torch.tensor([0.5], dtype=torch.bfloat16))
        self.register_buffer("nothing", None)
        self.table = torch.tensor([1.0, 2.0])
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)

    def forward(self, ids):
        return self.head(self.layers[0](self.embed(ids)))


def test_a_copy_of_shapes_has_no_memory_but_for_what_is_no_parameter():
    model = Model()
    copied = shape_copy(model)
    assert all(p.is_meta for p in copied.parameters())
    assert [(n, p.shape, p.dtype) for n, p in copied.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in model.named_parameters()
    ]
    assert copied.head.weight is copied.embed.weight
    assert {n for n, p in copied.named_parameters() if not p.requires_grad} == {"codes"}  # gradients of all that can
    assert (copied.steps.tolist(), copied.mean.item(), copied.table.tolist(), copied.nothing) == (
        [3, 4], 0.5, [1, 2], None,
    )  # fmt: skip
    assert copied.steps is not model.steps
    model.steps.zero_()
    assert copied.steps.tolist() == [3, 4]
    with fake_tensors():
        faked = Model()
    for unknown in (faked, Model().to("meta")):
        unknown = shape_copy(unknown)
        assert (unknown.steps.tolist(), unknown.steps.dtype, unknown.steps.device.type) == ([0, 0], torch.int64, "cpu")


@pytest.mark.parametrize("few", [False, True])
def test_a_twin_is_random_in_float64_and_knows_the_models_names(few):
    shapes = shape_copy(Model())
    model_copy = twin_of(shapes, few)
    assert size_of(shapes) == 7 * 4 + 3 * (16 + 4) + 24 + 6 + 3
    names = {"": "", "embed": "embed", "layers": "layers", "head": "head"}
    names |= {f"layers.{i}": f"layers.{i}" for i in range(3 if few else 4)}
    assert model_copy.names == names
    assert not model_copy.model.training
    assert model_copy.model.head.weight is model_copy.model.embed.weight
    assert all(not p.is_meta for p in model_copy.model.parameters())
    assert {p.dtype for p in model_copy.model.parameters() if p.requires_grad} == {torch.float64}
    assert (model_copy.model.codes.tolist(), model_copy.model.codes.dtype) == ([0, 0, 0], torch.int64)
    assert (model_copy.model.mean.dtype, model_copy.model.steps.dtype) == (torch.float64, torch.int64)
    again = twin_of(shapes, few)
    for one, two in zip(model_copy.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert all(p.is_meta for p in shapes.parameters())


class Takes(nn.Module):
    """A model with these names in its forward, a config, a table and a linear layer."""

    def __init__(self, signature, config=None, words=None, features=5):
        super().__init__()
        self.config = config
        if words:
            self.table, self.small = nn.Embedding(words, 2), nn.Embedding(2, 2)
        if features:
            self.linear = nn.Linear(features, 2)
        scope = {}
        exec(f"def forward(self, {signature}): return None", scope)
        self.forward = scope["forward"].__get__(self)


@pytest.mark.parametrize(
    ("vocab", "tables", "low", "high"), [(6, 100, 2, 5), (100, 6, 2, 5), (None, 6, 2, 5), (None, 2, 1, 1), (3, 9, 2, 2)]
)
def test_ids_are_in_the_smaller_of_vocabulary_and_table_and_neither_0_nor_1(vocab, tables, low, high):
    """0 and 1 may stand for padding, whose embedding has no gradient."""
    config = None if vocab is None else SimpleNamespace(vocab_size=vocab)
    ((ids,), _) = list(guesses(Takes("x", config, tables)))[-1]
    assert (ids.min().item(), ids.max().item()) == (low, high)
    ((again,), _) = list(guesses(Takes("x", config, tables)))[-1]
    assert torch.equal(ids, again)
