"""The small copy that a plan is tested on: what it keeps, how large its weights are, and what its forward is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpcore._torch.fake import fake_tensors
from mpcore.interop.parallelize import model_copy as module
from mpcore.interop.parallelize.model_copy import (
    as_arguments,
    drop_layers,
    guesses,
    plain_arguments,
    shape_copy,
    size_of,
    twin_of,
)


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
        [3, 4],
        0.5,
        [1, 2],
        None,
    )
    assert copied.steps is not model.steps
    model.steps.zero_()
    assert copied.steps.tolist() == [3, 4]
    with fake_tensors():
        faked = Model()
    for unknown in (faked, Model().to("meta")):
        unknown = shape_copy(unknown)
        assert (unknown.steps.tolist(), unknown.steps.dtype, unknown.steps.device.type) == ([0, 0], torch.int64, "cpu")


def test_two_layers_of_each_kind_are_kept():
    model = nn.ModuleDict(
        {
            "a": nn.ModuleList([nn.Linear(2, n) for n in (3, 3, 5, 3, 5, 5, 3)]),
            "b": nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.ReLU()]),
            "c": nn.ModuleList([nn.Linear(2, 2)]),
            "d": nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))),
        }
    )
    first = model["a"][4]
    drop_layers(model)
    assert [layer.out_features for layer in model["a"]] == [3, 3, 5, 5]
    assert model["a"][3] is first
    assert [type(layer) for layer in model["b"]] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]
    assert (len(model["c"]), len(model["d"])) == (1, 4)


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


def test_kept_layers_have_the_names_of_the_model():
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)])
    assert twin_of(shape_copy(layers), True).names == {"": "", "0": "0", "1": "1", "2": "3"}


def test_outputs_are_as_large_as_inputs_and_vectors_are_near_one():
    generator = torch.Generator().manual_seed(0)
    for shape, width in (((400, 100), 100), ((100, 400), 100), ((3, 400, 100), 100)):
        std = module._random(torch.empty(shape), generator).std().item()
        assert std == pytest.approx(width**-0.5, rel=0.05)
    vector = module._random(torch.empty(10000), generator)
    assert 0.5 <= vector.min().item() < 0.51
    assert 1.49 < vector.max().item() < 1.5
    assert vector.requires_grad
    assert module._random(torch.empty(0, 3), generator).shape == (0, 3)
    assert module._random(torch.empty(()), generator).dim() == 0
    codes = module._random(torch.ones(2, dtype=torch.int8), generator)
    assert (codes.tolist(), codes.dtype, codes.requires_grad) == ([0, 0], torch.int8, False)


class Hub(nn.Module):
    """Chooses implementations as a model of transformers does."""

    def __init__(self, refused=(), **chosen):
        super().__init__()
        self.config = SimpleNamespace(**{f"_{part}_implementation": name for part, name in chosen.items()})
        self.refused = refused

    def choose(self, part, name):
        if name in self.refused:
            raise ValueError(name)
        setattr(self.config, f"_{part}_implementation", name)

    def set_experts_implementation(self, name):
        self.choose("experts", name)

    def set_attn_implementation(self, name):
        self.choose("attn", name)


@pytest.mark.parametrize(
    ("refused", "before", "after"),
    [
        ((), {"attn": "flash", "experts": "grouped_mm"}, ("sdpa", "eager")),
        (("sdpa",), {"attn": "flash", "experts": None}, ("eager", None)),
        (("sdpa", "eager"), {"attn": "flash", "experts": "grouped_mm"}, ("flash", "grouped_mm")),
        ((), {"attn": "eager", "experts": "eager"}, ("eager", "eager")),
        ((), {"attn": "sdpa", "experts": "sdpa"}, ("sdpa", "sdpa")),
    ],
)
def test_implementations_that_a_cpu_has_in_float64(refused, before, after):
    model = Hub(refused, **before)
    module.choose_plain_kernels(model)
    assert (model.config._attn_implementation, model.config._experts_implementation) == after
    module.choose_plain_kernels(nn.Linear(2, 2))


def test_an_example_is_arguments():
    x, y = torch.ones(1), torch.ones(2)
    assert as_arguments({"a": x}) == ((), {"a": x})
    assert as_arguments((x, y)) == as_arguments([x, y]) == ((x, y), {})
    assert as_arguments(x) == ((x,), {})
    (a, b, c), kwargs = plain_arguments(((x.half(), y.int(), "text"), {"z": [x]}))
    assert (a.dtype, b.dtype, c, kwargs["z"][0].dtype) == (torch.float64, torch.int32, "text", torch.float64)
    (same,), _ = plain_arguments(((y.int(),), {}))
    assert same.data_ptr() != y.data_ptr()


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


def shapes_of_guesses(model):
    def told(x):
        return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x

    return [([told(x) for x in args], {name: told(x) for name, x in kwargs.items()}) for args, kwargs in guesses(model)]


IDS, I64, F64 = (2, 7), torch.int64, torch.float64


def test_what_a_forward_may_accept():
    assert shapes_of_guesses(Takes("x")) == [([((2, 7, 5), F64)], {})]
    assert shapes_of_guesses(Takes("x", words=9)) == [([(IDS, I64)], {})]
    assert shapes_of_guesses(Takes("x", features=0)) == []
    text = SimpleNamespace(vocab_size=6)
    assert shapes_of_guesses(Takes("input_ids, use_cache", text, 9)) == [
        ([], {"input_ids": (IDS, I64), "use_cache": False}), ([(IDS, I64)], {})
    ]  # fmt: skip
    both = SimpleNamespace(vocab_size=6, is_encoder_decoder=True)
    assert shapes_of_guesses(Takes("input_ids, decoder_input_ids", both, 9))[0] == (
        [], {"input_ids": (IDS, I64), "decoder_input_ids": ((2, 5), I64)}
    )  # fmt: skip
    assert "decoder_input_ids" not in shapes_of_guesses(Takes("input_ids, decoder_input_ids", text, 9))[0][1]
    sight = SimpleNamespace(vision_config=SimpleNamespace(image_size=8, num_channels=1), vocab_size=6)
    assert shapes_of_guesses(Takes("pixel_values", sight))[0] == ([], {"pixel_values": ((2, 1, 8, 8), F64)})
    plain = SimpleNamespace(image_size=8)
    assert shapes_of_guesses(Takes("pixel_values", plain))[0] == ([], {"pixel_values": ((2, 3, 8, 8), F64)})
    assert shapes_of_guesses(Takes("pixel_values", SimpleNamespace(image_size=(8, 8)), features=0)) == []
    speech = SimpleNamespace(num_mel_bins=3, max_source_positions=10)
    assert shapes_of_guesses(Takes("input_features", speech))[0] == ([], {"input_features": ((2, 3, 20), F64)})
    assert shapes_of_guesses(Takes("input_features", SimpleNamespace(num_mel_bins=0), features=0)) == []


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
