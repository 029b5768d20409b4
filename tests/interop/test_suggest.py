"""How a plan is found: which layer feeds which, what is tried of a part in which order, and what is left."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.interop.parallelize import suggest as module
from mpcore.interop.parallelize.model_copy import ModelCopy
from mpcore.interop.parallelize.plan import Colwise, Experts, Hidden, LocalSizes
from mpcore.interop.parallelize.prove import PlanTester, shapes_of
from mpcore.interop.parallelize.suggest import Suggestion, _Flow, share_of, suggest_plan


class MLP(nn.Module):
    def __init__(self, d=4, f=8):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(d, f), nn.GELU(), nn.Linear(f, d)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Attention(nn.Module):
    """Heads with a norm each, and a norm of all features in front."""

    def __init__(self, d=8, heads=4):
        super().__init__()
        self.num_heads, self.head_dim = heads, d // heads
        self.norm, self.q, self.k, self.v = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.q_norm, self.o = nn.LayerNorm(d // heads), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (
            f(self.norm(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = torch.nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.ModuleList([Attention(), MLP(8, 16)]) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for attention, mlp in self.blocks:
            x = mlp(attention(x))
        return self.head(self.norm(x))


def flow_of(model, example=None):
    prover = PlanTester(shapes_of(model), example)
    return prover.whole[0], module._flow(prover.whole[0], prover)


# --- the whole --------------------------------------------------------------------------------------------------------


def test_a_transformer_is_sharded_whole():
    found = suggest_plan(GPT())
    assert (found.proven, found.left, found.replicated) == (True, {}, {})
    assert found.plan == {
        "blocks.0.0": LocalSizes(("num_heads",)), "blocks.1.0": LocalSizes(("num_heads",)),
        **{f"blocks.*.*.{name}": "colwise" for name in ("k", "q", "v", "up")},
        "blocks.*.*.o": "rowwise", "blocks.*.*.down": "rowwise",
        "blocks.*.*.q_norm": "replicated_with_grad_allreduce", "embed": "vocab", "head": "colwise_gather_output",
    }  # fmt: skip
    norms_and_biases = 2 * (2 * 8 + 2 * 2 + 2 * 8) + 2 * 8  # of norms, and of rowwise layers
    total = sum(p.numel() for p in GPT().parameters())
    assert found.share == pytest.approx(1 - norms_and_biases / total)
    model = mp.parallelize(GPT(), found.plan, mp.Axis(2, 0, name="tp"), strict=True)
    assert model.blocks[1][0].num_heads == 2
    assert model.blocks[0][1].up.weight.shape == (8, 8)


def test_what_is_found_is_written_as_a_plan_with_a_reason_for_the_rest():
    found = Suggestion(
        {"a.*": "colwise", "b": LocalSizes(("n",))}, 0.456, True, {"c": "nothing divides it"}, {"o": "of a norm"}
    )
    assert str(found) == (
        "'a.*': 'colwise',\n'b': LocalSizes(names=('n',), kept=()),\n# c stays whole: nothing divides it\n"
        "# each rank computes the full input of o (all heads, if this is attention): of a norm\n"
        "# shards 46% of the bytes, proven equal to the unsharded model; attention, or what else feeds o, is computed "
        "in full on each rank"
    )
    assert str(Suggestion({}, 0.0, False, {})) == "# shards 0% of the bytes, not proven"


def test_heads_that_nothing_divides_are_gathered():
    found = suggest_plan(Attention(9, 3), 2)
    assert found.plan == dict.fromkeys("kqv", "colwise_gather_output") | {"o": "rowwise_split_input"}
    assert found.replicated == {"o": "tp 2 does not divide num_heads 3"}
    assert suggest_plan(Attention(9, 3), 3).plan == dict.fromkeys("kqv", "colwise") | {
        "": LocalSizes(("num_heads",)), "o": "rowwise", "q_norm": "replicated_with_grad_allreduce"
    }  # fmt: skip
    assert suggest_plan(MLP(4, 9)).plan == suggest_plan(MLP(4, 9), 2).plan == {"up": "colwise", "down": "rowwise"}


class Written(Attention):
    """Heads whose number stands in the forward, or a norm over all features of the queries."""

    def __init__(self, norm=False, **sizes):
        super().__init__(8, 4)
        del self.num_heads, self.head_dim
        vars(self).update(sizes)
        self.q_norm = nn.LayerNorm(8) if norm else nn.Identity()

    def forward(self, x):
        q, k, v = self.q_norm(self.q(x)), self.k(x), self.v(x)
        y = torch.nn.functional.scaled_dot_product_attention(
            *(z.unflatten(-1, (4, 2)).transpose(1, 2) for z in (q, k, v))
        )
        return x + self.o(y.transpose(1, 2).flatten(2))


class Tempered(Attention):
    """Heads with one temperature, whose gradient nothing sums."""

    def __init__(self):
        super().__init__(8, 4)
        self.temp, self.q_norm = nn.Parameter(torch.ones(())), nn.Identity()

    def forward(self, x):
        q, k, v = self.q(x) * self.temp, self.k(x), self.v(x)
        y = torch.nn.functional.scaled_dot_product_attention(
            *(z.unflatten(-1, (self.num_heads, 2)).transpose(1, 2) for z in (q, k, v))
        )
        return x + self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Written(), ["fails on 2 ranks", "heads, read their number from Written.num_heads"]),
        (Written(head_dim=2), ["fails on 2 ranks"]),
        (Written(num_heads=4), ["on 2 ranks", "num_heads is divided already: if its forward computes another size"]),
        (Tempered(), ["the gradient of temp on 2 ranks", "call mp.add_partial(module, 'temp', tp) before parallelize"]),
        (Written(norm=True), ["norms over all features come before it (q_norm)"]),
        (Attention(8, 4), []),
    ],
)
def test_the_suggestion_says_why_each_rank_computes_all_heads(model, words):
    found = suggest_plan(model)
    assert found.plan["q"] == ("colwise_gather_output" if words else "colwise")
    assert list(found.replicated) == ["o"][: len(words)]
    for word in words:
        assert word in str(found)
    assert ("read their number" in str(found)) == any("read their number" in word for word in words)
    assert "has the sizes" not in str(found), "dividing them was tried, and head_dim is never divided"
    assert ("computed in full on each rank" in str(found)) == bool(words)


def test_an_input_that_several_layers_feed_has_a_reason_why_it_is_full():
    inputs = {"a": "-", "b": "-", "c": "ab", "d": "c", "e": "cd", "f": "ab*", "g": "a*"}
    flow = _Flow(
        {name: frozenset("" if each == "-" else each for each in came) for name, came in inputs.items()},
        full_norms={"n": frozenset("a"), "m": frozenset("z")},
        output=frozenset("f"),
        patterns={name: name.upper() for name in "abcdefgmn"},
    )
    assert module._full_inputs(flow) == {
        "C": "no plan shards all that feeds it (A, B)",
        "E": "no plan shards all that feeds it (C, D)",
        "F": "norms over all features come before it (N)",
    }


def test_what_no_plan_shards_is_left_with_the_reason():
    """Of one feature: two ranks cannot share it."""
    found = suggest_plan(MLP(1, 1), 2)
    assert (found.plan, found.share, found.proven) == ({}, 0.0, False)
    assert found.left.keys() == {"down", "up"}


def test_a_model_that_takes_nothing_is_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2)

        def forward(self, a, b):
            return self.one(a) + b

    with pytest.raises(
        ValueError, match=r"^no plan can be tried on this model: .*\. Give arguments of a forward: example"
    ):
        suggest_plan(Odd())
    assert suggest_plan(Odd(), example={"a": torch.ones(1, 2), "b": torch.ones(1, 2)}).left == {}
    assert suggest_plan(Odd(), example=(torch.ones(1, 2), torch.ones(1, 2))).plan == {"one": "colwise_gather_output"}


def test_the_part_of_the_bytes_that_a_plan_shards():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False).double())
    sizes = 4 * 32, 8 * 16
    assert share_of(model, {"0": "colwise"}, 2) == sizes[0] / sum(sizes)
    assert share_of(model, {"0": "colwise", "2": "rowwise"}, 2) == 1
    assert share_of(model, {}, 2) == share_of(model, None, 2) == 0
    assert share_of(nn.ReLU(), {}, 2) == 0


# --- the trace --------------------------------------------------------------------------------------------------------


def test_which_layers_feed_which():
    _, flow = flow_of(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 4)))
    whole = ""
    assert flow.inputs == {"0": {whole}, "2": {"0", "*"}, "3": {"2"}}  # a norm over all features needs them all
    assert flow.norms == {}
    assert flow.output == {"3"}
    assert (flow.patterns, flow.labelled) == ({n: n for n in ("", "0", "1", "2", "3")}, {})
    _, flow = flow_of(GPT())
    at = "blocks.0.0"
    assert flow.inputs[f"{at}.o"] == {f"{at}.q", f"{at}.k", f"{at}.v"}
    of_heads = {f"blocks.{i}.0.q_norm": {f"blocks.{i}.0.q"} for i in range(2)}
    assert flow.norms == of_heads | {"blocks.0.0.norm": {whole}}
    assert flow.tables == {"embed": None}
    assert flow.inputs["blocks.0.1.down"] == {"blocks.0.1.up"}
    assert whole in flow.inputs["head"]
    assert flow.output == {"head"}
    regions = module._regions(flow)
    assert [set(r.rows) for r in regions] == [
        {"blocks.0.0.o", "blocks.1.0.o"}, {"blocks.0.1.down", "blocks.1.1.down"}
    ]  # fmt: skip
    assert set(regions[0].columns) == {f"blocks.{i}.0.{n}" for i in range(2) for n in "qkv"}
    assert regions[0].norms.keys() == of_heads.keys()
    assert set(regions[1].norms) == set()


class Tables(nn.Module):
    """A table as wide as the layers, and one of a number for each head."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.up = nn.Embedding(5, 4), nn.Embedding(5, 1), nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, ids):
        return self.down(self.up(self.wide(ids)) + self.narrow(ids))


def test_a_table_as_wide_as_an_input_is_whole():
    _, flow = flow_of(Tables())
    assert flow.inputs == {"up": {""}, "down": {"up"}}
    assert flow.tables == {"wide": None, "narrow": None}


def test_a_layer_that_feeds_the_output_or_a_whole_input_is_no_column():
    flow = _Flow(
        inputs={
            "a": frozenset([""]), "b": frozenset("a"), "c": frozenset("a"), "d": frozenset("b"), "e": frozenset("x")
        },
        output=frozenset("x"), patterns={name: name for name in "abcdex"},
    )  # fmt: skip
    found = [(set(r.columns), set(r.rows)) for r in module._regions(flow)]
    assert found == [({"a"}, {"b", "c"})]  # d gets from b, a row itself; x reaches the output
    flow = _Flow(inputs={"a": frozenset(), "b": frozenset("a")}, patterns={"a": "a", "b": "b"})
    assert [(set(r.columns), set(r.rows)) for r in module._regions(flow)] == [({"a"}, {"b"})]


def test_patterns_have_a_star_for_an_index_of_a_list_of_modules():
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])})
    patterns, labelled = module._patterns(model)
    assert patterns["a.1.0"] == "a.*.0"
    assert labelled == {}
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])
    patterns, labelled = module._patterns(mixed)
    assert patterns == {"": "", "0": "* (ModuleList, Linear)", "2": "* (ModuleList, Linear)",
                        "1": "* (ModuleList, ReLU)"}  # fmt: skip
    assert labelled == {"* (ModuleList, Linear)": ["0", "2"], "* (ModuleList, ReLU)": ["1"]}
    spelled = _Flow(labelled=labelled).spelled({"* (ModuleList, Linear)": "colwise", "b": "rowwise"})
    assert spelled == {"0": "colwise", "2": "colwise", "b": "rowwise"}


def test_what_is_a_linear_layer():
    from transformers.pytorch_utils import Conv1D

    linear, conv, norm = nn.Linear(2, 2), Conv1D(2, 2), nn.LayerNorm(2)
    assert [module.is_linear(m) for m in (linear, conv, norm)] == [True, True, False]
    assert not module.is_linear(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))


# --- what is tried ----------------------------------------------------------------------------------------------------


def owner(**held):
    found = nn.Module()
    vars(found).update(held)
    return found


def test_attributes_that_may_count_heads():
    held = owner(heads=3, num_heads=4, head_dim=2, width=8, one=1, odd=5, size=16, half=4.0, flag=True, big=32)
    assert module._counts(held, 16, 8) == {"heads": 3, "num_heads": 4}
    # besides those named so: divisors of a width that are less than the input
    assert module._counts(owner(groups=2, odd=5, one=1, eight=8), 24, 8) == {"groups": 2}
    assert module._counts(owner(groups=3), 24, 8) == {"groups": 3}  # of the output alone
    assert module._counts(owner(groups=2, heads=4), 24, 8) == {"heads": 4, "groups": 2}
    assert list(module._counts(owner(groups=2, heads=4), 24, 8)) == ["heads", "groups"]


def sizes(tp=2, n_out=8, n_in=8, **held):
    return list(module._sizes(owner(**held), n_out, n_in, tp))


def test_attributes_that_are_divided_from_none_to_all():
    assert sizes() == [None]
    assert sizes(num_heads=4) == [LocalSizes((), kept=("num_heads",)), LocalSizes(("num_heads",))]
    assert sizes(num_heads=3) == [LocalSizes((), kept=("num_heads",))]
    assert sizes(3, num_heads=3) == [LocalSizes((), kept=("num_heads",)), LocalSizes(("num_heads",))]
    assert sizes(num_heads=4, kv_heads=1) == [
        LocalSizes((), kept=("num_heads", "kv_heads")), LocalSizes(("num_heads",), kept=("kv_heads",))
    ]  # fmt: skip
    assert sizes(num_heads=4, split_size=8) == [
        LocalSizes((), kept=("num_heads",)), LocalSizes(("num_heads",)), LocalSizes(("num_heads", "split_size"))
    ]  # fmt: skip
    assert sizes(n_out=24, width=24) == [None, LocalSizes(("width",))]
    assert sizes(2, 8, 9, width=9) == [None]  # 2 does not divide it
    found = sizes(num_heads=4, a=2, b=4)
    assert found[:2] == [LocalSizes((), kept=("num_heads",)), LocalSizes(("num_heads",))]
    assert found[2:] == [LocalSizes(("num_heads", *some)) for some in (("a", "b"), ("a",), ("b",))]
    many = sizes(n_in=64, **dict.fromkeys("abcdef", 2))
    assert many[1:] == [LocalSizes(some) for n in (4, 3, 2, 1) for some in itertools.combinations("abcd", n)]


def packings(n_out, n_in, columns=("a",), config=None, **held):
    twin = ModelCopy(owner(config=SimpleNamespace(**config) if config else None), {})
    return list(module._packings(twin, owner(**held), n_out, n_in, columns))


def test_ways_to_pack_projections():
    assert packings(8, 8) == packings(6, 8) == packings(24, 8, ("a", "b")) == ["colwise"]
    of_three = [Colwise(blocks=3, unit=1), Colwise(unit=3), "colwise"]
    assert packings(24, 8) == of_three
    assert packings(12, 8) == ["colwise"]
    # heads of 4: [Q | K | V], or the queries, key and value of each KV head side by side
    heads = [Colwise(blocks=(8, 8, 8), unit=4), Colwise(unit=12)]
    assert packings(24, 8, head_dim=4) == [*heads, *of_three]
    by_count = [Colwise(unit=12), Colwise(blocks=12, unit=1)]
    assert packings(24, 8, num_heads=2) == [*heads, *by_count, *of_three]
    assert packings(24, 8, config={"num_attention_heads": 2}) == [*heads, *by_count, *of_three]
    assert packings(24, 8, config={"num_heads": 2}) == packings(24, 8, config={"n_head": 2}) == [
        *heads, *by_count, *of_three
    ]  # fmt: skip
    # two KV heads of 2 beside four heads
    assert packings(16, 8, head_dim=2) == [
        Colwise(blocks=(8, 4, 4), unit=2), Colwise(unit=8), Colwise(blocks=2, unit=1), Colwise(unit=2), "colwise"
    ]  # fmt: skip
    assert packings(14, 8, head_dim=2) == ["colwise"]  # 3 are no whole heads
    assert packings(12, 8, head_dim=2) == [Colwise(blocks=(8, 2, 2), unit=2), Colwise(unit=12), "colwise"]
    assert packings(13, 8, head_dim=1) == ["colwise"]  # keys and values of one width
    assert packings(24, 8, heads=3) == [Colwise(unit=8), Colwise(blocks=8, unit=1), *of_three]
    assert packings(25, 8, head_dim=4) == ["colwise"]


@pytest.mark.parametrize(
    ("shape", "size", "ways"),
    [
        ((2, 8, 4), 8, [Hidden(-2)]), ((2, 4, 8), 8, [Hidden(-1)]), ((2, 8, 8), 8, [Hidden(-1), Hidden(-2)]),
        ((2, 16, 4), 8, [Hidden(-2, blocks=2), Hidden(-2, unit=2)]), ((2, 4, 3), 8, []), ((2, 8), 8, [Hidden(-1)]),
        ((8, 4), 8, []), ((2, 16), 8, [Hidden(-1, blocks=2), Hidden(-1, unit=2)]),
    ],
)  # fmt: skip
def test_dimensions_that_may_hold_hidden_features(shape, size, ways):
    assert list(module._hidden_ways(torch.Size(shape), size)) == ways


def experts(concatenated=None, **shapes):
    found = owner() if concatenated is None else owner(is_concatenated=concatenated)
    for leaf, shape in shapes.items():
        found.register_parameter(leaf, nn.Parameter(torch.empty(shape)))
    return list(module._expert_styles(found))


def test_styles_of_experts():
    assert experts(up=(2, 7, 3), down=(2, 3, 7)) == [
        Experts({"up": Hidden(-2), "down": Hidden(-1)}), Experts({"up": Hidden(-1), "down": Hidden(-2)})
    ]  # fmt: skip
    gated = experts(gate_up=(2, 10, 3), down=(2, 3, 5))
    assert gated == [
        Experts({"gate_up": Hidden(-1), "down": Hidden(-2)}),  # 3, the first size that both have
        Experts({"gate_up": Hidden(-2, blocks=2), "down": Hidden(-1)}),
        Experts({"gate_up": Hidden(-2, unit=2), "down": Hidden(-1)}),
    ]
    assert experts(True, up=(2, 7, 3), down=(2, 3, 7))[0] == "moe_tp_experts"
    assert len(experts(True, up=(2, 7, 3), down=(2, 3, 7))) == 3
    assert experts(False) == ["moe_tp_experts"]
    assert experts(up=(2, 7, 3)) == experts(up=(1, 7, 3), down=(1, 3, 7)) == experts(up=(7, 3), down=(3, 7)) == []
    assert experts(up=(2, 7, 3), down=(3, 3, 7)) == []
    with_bias = experts(up=(2, 7, 3), up_bias=(2, 7), down=(2, 3, 7), down_bias=(2, 3))
    assert with_bias == [
        Experts({"up": Hidden(-2), "up_bias": Hidden(-1), "down": Hidden(-1)}),
        Experts({"up": Hidden(-1), "down": Hidden(-2), "down_bias": Hidden(-1)}),
    ]
    assert len(experts(up=(2, 7, 3), down=(2, 3, 7), one=(4,))) == 2


def test_the_ends_and_what_is_large():
    model = nn.ModuleDict({
        "words": nn.Embedding(9, 4), "places": nn.Embedding(5, 4), "other": nn.Embedding(9, 2),
        "big": nn.Linear(20, 20), "small": nn.Linear(1, 1), "head": nn.Linear(4, 9),
    })  # fmt: skip
    twin = ModelCopy(model, {})
    names = {name: f"the {name}" for name in model}
    flow = _Flow(
        inputs=dict.fromkeys(("big", "small", "head"), frozenset()), tables=dict.fromkeys(("words", "places", "other")),
        patterns=names,
    )  # fmt: skip
    assert list(module._ends(twin, flow)) == [
        {"the words": "vocab"}, {"the other": "vocab"}, {"the head": "colwise_gather_output"}
    ]  # fmt: skip
    assert list(module._large(twin, flow)) == [
        {"the big": "colwise_gather_output"}, {"the head": "colwise_gather_output"}
    ]  # fmt: skip
    assert list(module._ends(twin, _Flow())) == []
    assert module.LARGE == 0.005
    even = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(200)))  # half a percent each: not more
    flow = _Flow(inputs={"0": frozenset()}, patterns={"0": "0"})
    assert list(module._large(ModelCopy(even, {}), flow)) == []
    assert list(module._large(ModelCopy(even[:199], {}), flow)) == [{"0": "colwise_gather_output"}]


def test_the_parts_of_a_region_in_their_order():
    model = GPT()
    twin, flow = flow_of(model)
    flow.patterns["blocks.0.0"] = "A"
    region = module._regions(flow)[0]
    columns, row, norm = (flow.patterns[f"blocks.0.0.{n}"] for n in ("k", "o", "q_norm"))
    parts = list(module._parts(twin, flow, region, 2))
    base = {row: "rowwise", norm: "replicated_with_grad_allreduce"}
    names = [flow.patterns[f"blocks.0.0.{n}"] for n in "kqv"]
    colwise = dict.fromkeys(names, "colwise")
    assert parts[0] == {"A": LocalSizes((), kept=("num_heads",))} | colwise | base
    assert parts[1] == {"A": LocalSizes(("num_heads",))} | colwise | base
    assert parts[-1] == dict.fromkeys(names, "colwise_gather_output") | {row: "rowwise_split_input"}
    assert columns in names
    flow.tables["x"], flow.patterns["x"] = None, "A.bias"
    assert next(module._parts(twin, flow, region, 2))["A.bias"] == "colwise"
    assert "embed" not in parts[0]
