"""How layers are replaced: which layer by which, what of them a rank holds, what is refused; and the summary of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import mpcore as mp
from mpcore.interop.parallelize import layers, swap
from mpcore.interop.parallelize.plan import Colwise, Experts, Hidden, LocalSizes, Replicate, Vocab, resolve
from mpcore.interop.parallelize.summary import Summary, SummaryRow, parallelize_summary
from mpcore.interop.parallelize.swap import cut_model, experts_shardings, swaps_of
from mpcore.layers.embedding import ColumnParallelEmbedding, VocabParallelEmbedding
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.mesh.axis import Axis
from mpcore.sharding.declarations import declarations

ONE, TWO = Axis(2, 1, name="tp"), Axis(name="tp")


def cut(model, plan, axis=ONE):
    return cut_model(model, resolve(model, plan), axis)


def drawn(layer):
    """With other values than any initial ones."""
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape) + 100.0 * i)
    return layer


LINEAR = torch.arange(24.0).view(6, 4)


@pytest.mark.parametrize(
    ("style", "kind", "weight", "bias", "held"),
    [
        ("colwise", ColumnParallelLinear, LINEAR[3:], slice(3, 6), {"gather_output": False}),
        ("colwise_gather_output", ColumnParallelLinear, LINEAR[3:], slice(3, 6), {"gather_output": True}),
        (Colwise(unit=3), ColumnParallelLinear, LINEAR[3:], slice(3, 6), {}),
        (Colwise(blocks=3), ColumnParallelLinear, LINEAR[1::2], slice(1, 6, 2), {}),
        (Colwise(blocks=(2, 4)), ColumnParallelLinear, LINEAR[[1, 4, 5]], [1, 4, 5], {}),
        ("rowwise", RowParallelLinear, LINEAR[:, 2:], slice(0, 6), {"input_is_parallel": True}),
        ("rowwise_split_input", RowParallelLinear, LINEAR[:, 2:], slice(0, 6), {"input_is_parallel": False}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("has_bias", [True, False])
def test_what_a_rank_holds_of_a_linear_layer(style, kind, weight, bias, held, conv, has_bias):
    if conv and not has_bias:
        return
    model = nn.Sequential(drawn(Conv1D(6, 4) if conv else nn.Linear(4, 6, bias=has_bias)))
    with torch.no_grad():
        model[0].weight.copy_(LINEAR.t() if conv else LINEAR)
    full = None if not has_bias else model[0].bias.clone()
    model.eval()
    layer = cut(model, {"0": style})[0]
    if conv:
        names = {ColumnParallelLinear: layers.ColumnParallelConv1D, RowParallelLinear: layers.RowParallelConv1D}
        kind = names.get(kind, layers.ColumnParallelConv1D)
    assert type(layer) is kind
    assert torch.equal(layer.weight, weight.t() if conv else weight)
    assert isinstance(layer.product, layers.TransposedProduct) == conv
    assert (layer.bias is not None) == has_bias
    assert not has_bias or torch.equal(layer.bias, full[bias])
    assert all(getattr(layer, name) == value for name, value in held.items())
    assert (layer.training, layer.in_features, layer.out_features, layer.tp) == (False, 4, 6, ONE)
    shapes = {name: sharding.shape for name, _, sharding in declarations(model)}
    assert shapes["0.weight"] == ((4, 6) if conv else (6, 4))


@pytest.mark.parametrize(
    ("layer", "style", "message"),
    [
        (nn.Linear(4, 6), Colwise(blocks=4), "^0: 6 output features are not a multiple of 4 blocks$"),
        (nn.Linear(4, 6), Colwise(blocks=(2, 3)), r"^0: blocks \(2, 3\) have a sum of 5, not of out_features 6$"),
        (nn.Linear(4, 6), Vocab(), "^0: 'vocab' is for embeddings, and this is a Linear$"),
        (nn.Embedding(6, 4, max_norm=1.0), Vocab(), "^0: max_norm, scale_grad_by_freq and sparse need the whole"),
        (nn.Embedding(6, 4, scale_grad_by_freq=True), Vocab(), "^0: max_norm, scale_grad_by_freq and sparse need"),
        (nn.Embedding(6, 4, sparse=True), Vocab(), "^0: max_norm, scale_grad_by_freq and sparse need the whole"),
        (nn.Embedding(6, 4), Colwise(blocks=2), "^0: an embedding of several blocks, or with a forward of its own"),
        (nn.LayerNorm(4), Colwise(), "^0 is a LayerNorm, which"),
    ],
)  # fmt: skip
def test_layers_that_a_style_does_not_fit(layer, style, message):
    with pytest.raises(ValueError, match=message):
        swaps_of(nn.Sequential(layer), [("0", layer, style)], ONE)


TABLE = torch.arange(28.0).view(7, 4)


class Doubled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


def table(kind=nn.Embedding, **options):
    model = nn.Sequential(kind(7, 4, **options))
    with torch.no_grad():
        model[0].weight.copy_(TABLE)
    return model


def test_what_a_rank_holds_of_an_embedding():
    rows = cut(table(padding_idx=5), {"0": "vocab"})[0]
    assert type(rows) is VocabParallelEmbedding
    assert torch.equal(rows.weight, TABLE[4:])
    assert rows.padding_idx == 5
    columns = cut(table(), {"0": "colwise"})[0]
    assert type(columns) is ColumnParallelEmbedding
    assert torch.equal(columns.weight, TABLE[:, 2:])
    assert (columns.gather_output, cut(table(), {"0": "colwise_rep"})[0].gather_output) == (False, True)
    assert torch.equal(cut(table(), {"0": Colwise(unit=2)})[0].weight, TABLE[:, 2:])
    with pytest.raises(ValueError, match="3"):
        cut(table(), {"0": Colwise(unit=3)})
    own = cut(table(Doubled, padding_idx=5), {"0": "vocab"})[0]
    assert (type(own).__name__, own.start, own.end, own.padding_idx) == ("VocabParallelDoubled", 4, 7, 1)
    assert torch.equal(own.weight, TABLE[4:])
    assert cut(table(Doubled, padding_idx=2), {"0": "vocab"})[0].padding_idx is None


def test_an_embedding_with_its_own_forward_looks_up_this_ranks_rows():
    ids = torch.tensor([[0, 3, 4, 6]])

    def work(axis):
        model = cut(table(Doubled), {"0": "vocab"}, axis)
        return model(ids)

    assert all(torch.equal(found, 2 * TABLE[ids]) for found in mp.simulate(lambda mesh: work(mesh.tp), tp=2))
    with pytest.raises(ValueError, match="7"):
        cut(table(Doubled), {"0": "vocab"})(torch.tensor([7]))


class Tied(nn.Module):
    def __init__(self, third=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        if third:
            self.norm = nn.LayerNorm(4)
            self.other = nn.Module()
            self.other.gain = self.norm.weight


@pytest.mark.parametrize(
    ("plan", "gathers"), [({"embed": "vocab"}, True), ({"head": "colwise_rep"}, True), ({"head": "colwise"}, False)]
)
def test_the_other_end_of_a_tie_follows(plan, gathers):
    model = cut(Tied(True), plan)
    assert (type(model.embed), type(model.head)) == (VocabParallelEmbedding, ColumnParallelLinear)
    assert model.head.weight is model.embed.weight
    assert model.head.gather_output == gathers
    assert model.other.gain is model.norm.weight


def test_a_tie_that_is_cut_in_two_ways_is_refused():
    with pytest.raises(ValueError, match=r"^embed.weight and head.weight are one tied weight, which the plan cuts"):
        cut(Tied(), {"embed": "colwise", "head": "colwise_rep"})
    with pytest.raises(ValueError, match="are one tied weight"):
        cut(Tied(), {"embed": "vocab", "head": "rowwise"})
    whole = cut(Tied(), {"embed": "replicate", "head": "replicate"})
    assert (type(whole.embed), type(whole.head)) == (nn.Embedding, nn.Linear)


def test_one_layer_under_two_names_and_a_parameter_with_a_second_name():
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Module()})
    model["c"].bias = layer.bias
    model = cut(model, {"a": "colwise"})
    assert model["a"] is model["b"]
    assert type(model["a"]) is ColumnParallelLinear
    assert model["c"].bias is model["a"].bias
    names = {name: sharding for name, _, sharding in declarations(model)}
    assert names["a.bias"].shards[0].dim == 0
    assert names["a.bias"].shape == (4,)
    lone = cut(nn.Linear(4, 4), {"": "colwise"})
    assert type(lone) is ColumnParallelLinear


def test_attributes_of_a_parameter_and_whether_it_trains_stay():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.no_weight_decay = True
    model[0].bias.requires_grad_(False)
    bias = model[0].bias
    layer = cut(model, {"0": "rowwise"})[0]
    assert layer.weight.no_weight_decay
    assert layer.bias is bias  # is not sharded
    frozen = nn.Sequential(nn.Linear(4, 4))
    frozen[0].weight.requires_grad_(False)
    assert not cut(frozen, {"0": "colwise"})[0].weight.requires_grad
    alone = nn.Sequential(nn.Linear(4, 4))
    weight = alone[0].weight
    assert cut(alone, {"0": "colwise"}, TWO)[0].weight is weight


def test_sizes_are_divided_and_gradients_are_sums():
    model = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.LayerNorm(4)})
    vars(model).update(heads=6, kept=4)
    cut(model, {"": LocalSizes(("heads",), kept=("kept",)), "a": Replicate(partial_gradient=True), "b": Replicate()})
    assert (model.heads, model.kept) == (3, 4)
    partial = {name: [axis.name for axis in sharding.partial] for name, _, sharding in declarations(model)}
    assert partial == {"a.weight": ["tp"], "a.bias": ["tp"], "b.weight": [], "b.bias": []}


def experts(**held):
    module = nn.Module()
    for name, value in held.items():
        if isinstance(value, tuple):
            module.register_parameter(name, nn.Parameter(torch.arange(float(torch.Size(value).numel())).view(value)))
        else:
            setattr(module, name, value)
    return module


PACKED = {"gate_up_proj": Hidden(-2, blocks=2), "down_proj": Hidden(-1)}


@pytest.mark.parametrize(
    ("held", "hidden"),
    [
        ({"is_transposed": False, "is_concatenated": True, "gate_up_proj": (2, 8, 4), "down_proj": (2, 4, 4)}, PACKED),
        ({"is_transposed": True, "is_concatenated": True, "gate_up_proj": (2, 4, 8), "down_proj": (2, 4, 4)},
         {"gate_up_proj": Hidden(-1, blocks=2), "down_proj": Hidden(-2)}),
        ({"is_transposed": False, "is_concatenated": False, "gate_up_proj": (2, 8, 4), "down_proj": (2, 4, 4)},
         {"gate_up_proj": Hidden(-2, unit=2), "down_proj": Hidden(-1)}),
        ({"is_transposed": False, "is_concatenated": True, "up_proj": (2, 4, 4), "down_proj": (2, 4, 4)},
         {"up_proj": Hidden(-2), "down_proj": Hidden(-1)}),
        ({"is_transposed": False, "is_concatenated": True, "gate_up_proj": (2, 8, 4), "gate_up_proj_bias": (2, 8),
          "down_proj": (2, 4, 4)}, PACKED | {"gate_up_proj_bias": Hidden(-1, blocks=2)}),
        ({"is_transposed": True, "is_concatenated": False, "up_proj": (2, 4, 4), "up_proj_bias": (2, 4),
          "down_proj": (2, 4, 4)}, {"up_proj": Hidden(-1), "up_proj_bias": Hidden(-1), "down_proj": Hidden(-2)}),
    ],
)  # fmt: skip
def test_how_the_parameters_of_hugging_faces_experts_lie(held, hidden):
    module = experts(**held)
    assert swap._hidden_of(module) == hidden
    assert experts_shardings(module, Experts(), ONE) == experts_shardings(module, Experts(hidden), ONE)


@pytest.mark.parametrize(
    ("held", "hidden", "message"),
    [
        ({}, {}, "^its hidden dimension is unknown: give Experts"),
        ({"is_transposed": True}, {}, "^its hidden dimension is unknown"),
        ({"is_concatenated": True}, {}, "^its hidden dimension is unknown"),
        ({}, {"w": Hidden(-1)}, "^it has no parameter 'w' of at least 2 dimensions$"),
        ({"w": (4,)}, {"w": Hidden(-1)}, "^it has no parameter 'w' of at least 2 dimensions$"),
        ({"w": (2, 4, 6)}, {"w": Hidden(-1, blocks=4)},
         "^w has 6 features in dimension -1, not 4 blocks of at least 2 units of 1: correct its Hidden"),
        ({"w": (2, 4, 6)}, {"w": Hidden(-1, blocks=3, unit=2)}, "^w has 6 .* not 3 blocks of at least 2 units of 2:"),
        ({"w": (2, 1, 6)}, {"w": Hidden(-2)}, "^w has 1 features in dimension -2, not 1 blocks of at least 2 units"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_sharded(held, hidden, message):
    module = experts(**held)
    with pytest.raises(ValueError, match=message):
        experts_shardings(module, Experts(hidden), ONE)
    model = nn.ModuleDict({"a": module})
    with pytest.raises(ValueError, match=f"^a: {message[1:]}"):
        swaps_of(model, [("a", module, Experts(hidden))], ONE)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"w": (3, 4, 6), "b": (3, 4)}, "^3 experts are not a multiple of the ep size 2: take one of 1, 3$"),
        ({"w": (4, 4, 6), "v": (2, 4, 6)}, r"different numbers of experts \(w 4, v 2\)"),
        ({"b": (4,)}, r"different numbers of experts \(none\)"),
    ],
)
def test_experts_that_ep_cannot_shard(held, message):
    with pytest.raises(ValueError, match=message):
        experts_shardings(experts(**held), Experts(ep=Axis(2, role="ep"), etp=Axis(role="etp")), ONE)


@pytest.mark.parametrize(
    ("hidden", "index"),
    [(Hidden(-1), [3, 4, 5]), (Hidden(-1, blocks=3), [1, 3, 5]), (Hidden(-1, unit=3), [3, 4, 5]), (Hidden(-2), None)],
)
def test_what_a_rank_holds_of_experts(hidden, index):
    class Own(nn.Module):
        def forward(self, x):
            return x

    model = nn.ModuleDict({"a": Own()})
    model["a"].w, model["a"].b = nn.Parameter(torch.arange(48.0).view(2, 4, 6)), nn.Parameter(torch.ones(2, 4))
    full = model["a"].w.detach().clone()
    cut(model, {"a": Experts({"w": hidden})})
    a = model["a"]
    assert type(a).__name__ == "ParallelOwn"
    assert (a.tp, a.replicated) == (ONE, ("b",))
    assert torch.equal(a.w, full[:, 2:] if index is None else full[..., index])
    found = {name: sharding for name, _, sharding in declarations(model)}
    assert found["a.w"].shape == (2, 4, 6)
    assert found["a.w"].shards[0].dim == (1 if index is None else 2)
    assert [axis.name for axis in found["a.b"].partial] == ["tp"]
    alone = nn.ModuleDict({"a": Own()})
    alone["a"].w = nn.Parameter(torch.ones(2, 4, 6))
    assert type(cut(alone, {"a": Experts({"w": hidden})}, TWO)["a"]) is Own


class Mixture(nn.Module):
    """All experts on all tokens: y = sum of w_down act(w_up x) + b."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 4, 3)), nn.Parameter(torch.randn(2, 3, 4))
        self.b = nn.Parameter(torch.randn(3))

    def forward(self, x, scale):
        hidden = torch.einsum("efd,td->etf", self.up, x).relu()
        return torch.einsum("edf,etf->td", self.down, hidden) * scale + self.b


def test_the_sum_over_ranks_adds_what_is_replicated_once():
    torch.manual_seed(0)
    whole, x, scale = Mixture(), torch.randn(5, 3), torch.tensor(2)
    state = whole.state_dict()
    inputs = x.clone().requires_grad_()
    want = whole(inputs, scale)
    want.square().sum().backward()

    def work(axis):
        model = nn.ModuleDict({"a": Mixture()})
        model["a"].load_state_dict(state)
        cut(model, {"a": Experts({"up": Hidden(-2), "down": Hidden(-1)})}, axis)
        given = x.clone().requires_grad_()
        y = model["a"](given, scale)
        y.square().sum().backward()
        mp.gradients.reduce_gradients(model)
        assert not {"b"} & vars(model["a"]).keys()
        return y.detach(), given.grad, model["a"].b.grad, model["a"].up.grad

    for rank, (y, dx, db, dup) in enumerate(mp.simulate(lambda mesh: work(mesh.tp), tp=2)):
        torch.testing.assert_close(y, want.detach())
        torch.testing.assert_close(dx, inputs.grad)
        torch.testing.assert_close(db, whole.b.grad)
        torch.testing.assert_close(dup, whole.up.grad[:, 2 * rank : 2 * rank + 2])


def test_a_summary_has_a_row_for_parameters_that_are_alike():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 6) for _ in range(3)]), "norm": nn.LayerNorm(4)})
    model["small"] = nn.Linear(2, 2, bias=False).half()
    model["heads"] = nn.LayerNorm(2)
    cut(
        model,
        {"layers.*": "colwise", "norm": "replicate", "heads": Replicate(partial_gradient=True), "small": "rowwise"},
    )
    found = parallelize_summary(model)
    columns = "dimension 0 sharded over tp 2"
    assert found.rows == (
        SummaryRow("layers.*.weight", columns, 3, 3 * 96, 3 * 48),
        SummaryRow("layers.*.bias", columns, 3, 3 * 24, 3 * 12),
        SummaryRow("norm.weight", "whole, as the plan leaves it", 1, 16, 16),
        SummaryRow("norm.bias", "whole, as the plan leaves it", 1, 16, 16),
        SummaryRow("small.weight", "dimension 1 sharded over tp 2", 1, 8, 4),
        SummaryRow("heads.weight", "whole, its gradient summed over tp", 1, 8, 8),
        SummaryRow("heads.bias", "whole, its gradient summed over tp", 1, 8, 8),
    )
    assert found.share == (3 * 120 + 8) / (3 * 120 + 8 + 32 + 16)
    assert str(found).splitlines()[0] == f"layers.*.weight  x3            288 ->            144 bytes  {columns}"
    assert str(found).splitlines()[-1] == "88% is sharded: 416 -> 232 bytes on this rank"
    assert str(Summary((), 0.0)) == "0% is sharded: 0 -> 0 bytes on this rank"
    assert parallelize_summary(nn.ReLU()) == Summary((), 0.0)
