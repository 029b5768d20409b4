"""What is checked of a plan before a weight moves: every refusal, and what passes beside it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.interop.parallelize import checks
from mpcore.interop.parallelize.plan import (
    Colwise,
    Experts,
    Hidden,
    LocalSizes,
    Replicate,
    Rowwise,
    is_own,
    model_plan,
    resolve,
)
from mpcore.mesh.axis import Axis

TP = Axis(2, 0, name="tp")


class Part(nn.Module):
    """An attention of this plan, with whatever attributes a test gives it."""

    def __init__(self, n_in=8, n_out=8, **held):
        super().__init__()
        self.q, self.o = nn.Linear(n_in, n_out), nn.Linear(n_out, n_in)
        vars(self).update(held)


class Model(nn.Module):
    def __init__(self, **held):
        super().__init__()
        self.layers = nn.ModuleList([Part(**held) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)


PLAN = {"layers.*.q": "colwise", "layers.*.o": "rowwise"}


def check(model, plan, tp=TP, **how):
    checks.check_plan(model, resolve(model, plan), tp, **how)


@pytest.mark.parametrize(
    ("head_dim", "style", "blocks", "unit"),
    [
        (None, Colwise(), (8,), 1), (4, Colwise(), (8,), 4), (4, Colwise(gather_output=True), (8,), 1),
        (4, Colwise(unit=2), (8,), 2), (None, Colwise(unit=2), (8,), 2), (4, Colwise(), (8, 16), 4),
        (4, Colwise(), (8, 6), 1), (4, Colwise(unit=2, gather_output=True), (8,), 1),
    ],
)  # fmt: skip
def test_features_that_stay_on_one_rank(head_dim, style, blocks, unit):
    assert checks.unit_of("layers.0.q", SimpleNamespace(head_dim=head_dim), style, blocks, TP) == unit


@pytest.mark.parametrize(
    ("parent", "style", "blocks", "name", "message"),
    [
        ({}, Colwise(unit=3), (8,), "a.q", "^8 output features are not a multiple of the unit 3$"),
        ({"head_dim": 4}, Colwise(), (12,), "a.q", "^3 heads of 4 output features are not a multiple of the tp size 2: "
         "take a tp size that divides it, or leave the projections of a out$"),
        ({"head_dim": 4}, Colwise(), (8, 12), "q", "^3 heads of 4 .* leave the projections of this module out$"),
        ({"head_dim": 4, "config": SimpleNamespace(num_attention_heads=3)}, Colwise(), (8,), "a.b.q",
         "^num_attention_heads 3 is not a multiple of the tp size 2: .* leave the projections of a.b out$"),
    ],
)  # fmt: skip
def test_heads_that_cannot_be_shared_out(parent, style, blocks, name, message):
    with pytest.raises(ValueError, match=message):
        checks.unit_of(name, SimpleNamespace(**parent), style, blocks, TP)
    if "config" in parent:
        assert checks.unit_of(name, SimpleNamespace(**parent), Colwise(unit=4), blocks, TP) == 4
        parent["config"].num_attention_heads = 4
        assert checks.unit_of(name, SimpleNamespace(**parent), style, blocks, TP) == 4


def test_a_number_of_heads_must_be_divided_or_kept():
    for name in ("num_heads", "n_head", "heads", "head", "nhead", "num_key_value_heads", "n_kv_heads"):
        model = Model(**{name: 4})
        with pytest.raises(
            ValueError, match=rf"^layers.0.{name} is 4 on each of 2 ranks, and the plan shards layers.0.q"
        ):
            check(model, PLAN)
        for told in (LocalSizes((name,)), LocalSizes((), kept=(name,))):
            check(model, PLAN | {"layers.*": told})
        check(model, PLAN, own=True)
        check(model, PLAN, Axis(name="tp"))
        check(model, {"layers.*.q": "colwise_gather_output"})
        check(model, {"layers.*.o": "rowwise_split_input"})
    for name, value in (("head_dim", 4), ("headway", 4), ("num_heads", 4.0), ("num_heads", True), ("forehead", 3)):
        check(Model(**{name: value}), PLAN)
    lone = Part(num_heads=2)
    with pytest.raises(ValueError, match=r"^the model itself.num_heads is 2 .* add '': LocalSizes\(\('num_heads',\)\)"):
        check(lone, {"q": "colwise", "o": "rowwise"})


@pytest.mark.parametrize(
    ("size", "names", "message"),
    [
        (4, ("width",), None), (3, ("width",), "^layers.0.width 3 is not a multiple of the tp size 2$"),
        (4.0, ("width",), "^layers.0.width is 4.0, so it is no size to divide by tp 2$"),
        (4, ("depth",), "^layers.0.depth doesn't exist, so it is no size"),
        (None, ("width",), "^layers.0.width is None, so it is no size"),
    ],
)  # fmt: skip
def test_sizes_that_are_divided(size, names, message):
    model, plan = Model(width=size), PLAN | {"layers.*": LocalSizes(names)}
    if message is None:
        check(model, plan)
        check(model, plan, Axis(4, 0, name="tp"))
        return
    with pytest.raises(ValueError, match=message):
        check(model, plan)
    with pytest.raises(ValueError, match=message):
        check(model, plan, own=True)


def test_a_parameter_of_one_head_must_be_named():
    model = Model(head_dim=4)
    model.layers[1].norm = nn.LayerNorm(4)
    words = r"^layers.1.norm has a parameter '\w+' of one head's 4 features, and the heads beside it are sharded: add"
    with pytest.raises(ValueError, match=words):
        check(model, PLAN)
    with pytest.raises(ValueError, match=words):
        check(model, PLAN, own=True)
    for style in ("replicated_with_grad_allreduce", "replicate"):
        check(model, PLAN | {"layers.1.norm": style})
    check(model, PLAN, Axis(name="tp"))
    check(model, {"layers.*.q": "colwise_gather_output"})
    model.layers[1].norm = nn.LayerNorm(8)
    check(model, PLAN)
    model.layers[0].scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"^layers.0 has a parameter '\w+' of one element, and the features beside it"):
        check(model, PLAN)


def test_at_the_root_only_its_own_leaves_are_beside():
    lone = Part()
    lone.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"^the model itself has a parameter '\w+' of one element"):
        check(lone, {"q": "colwise", "o": "rowwise"})
    deep = Part()
    deep.block = nn.Module()
    deep.block.inner = nn.Module()
    deep.block.inner.gain = nn.Parameter(torch.ones(1))
    check(deep, {"q": "colwise", "o": "rowwise"})
    deep.leaf = nn.Module()
    deep.leaf.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"^leaf has a parameter '\w+' of one element"):
        check(deep, {"q": "colwise", "o": "rowwise"})


def test_a_fused_projection_is_no_single_block():
    class Fused(nn.Module):
        def __init__(self, n_out):
            super().__init__()
            self.qkv, self.o = nn.Linear(8, n_out), nn.Linear(8, 8)

    words = r"^qkv has 24 output features, and o takes 8: it fuses several projections. Write Colwise\(blocks=..\)"
    with pytest.raises(ValueError, match=words):
        check(Fused(24), {"qkv": "colwise", "o": "rowwise"})
    for style in (Colwise(blocks=3), Colwise(unit=12)):
        check(Fused(24), {"qkv": style, "o": "rowwise"})
    check(Fused(8), {"qkv": "colwise", "o": "rowwise"})
    check(Fused(6), {"qkv": "colwise", "o": "rowwise"})  # fewer: not fused
    check(Fused(24), {"qkv": "colwise"})
    check(Fused(24), {"qkv": "colwise", "o": "rowwise"}, own=True)
    two = Fused(24)
    two.k = nn.Linear(8, 8)
    check(two, {"qkv": "colwise", "k": "colwise", "o": "rowwise"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mp.ColumnParallelLinear(4, 4), "layer is a ColumnParallelLinear already: parallelize a model once"),
        (lambda: nn.LayerNorm(4), "layer is a LayerNorm, which .* can't cut: it is for nn.Linear, nn.Embedding and C"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "layer has no plain weight"),
        (lambda: with_(nn.Linear(4, 4), "scale", nn.Parameter(torch.ones(1))),
         r"with parameters \['bias', 'scale', 'weight'\], of which a swap would lose some"),
        (lambda: with_(nn.Linear(4, 4), "forward", lambda x: x), "with a forward of its own, which a swap would lose"),
        (lambda: Own(4, 4), "layer is a Own with a forward of its own"),
        (lambda: hooked(nn.Linear(4, 4)), "layer has hooks, which a swap would lose"),
    ],
)  # fmt: skip
def test_what_a_swap_would_lose_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        checks.check_plain("layer", make(), Colwise())


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def with_(layer, name, value):
    setattr(layer, name, value)
    return layer


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


def resolved(model, plan):
    return {name: style for name, _, style in resolve(model, plan)}


def test_stars_match_within_a_component_and_fewer_stars_win():
    model = Model()
    one = {f"layers.{i}.{n}" for i in range(2) for n in "qo"}
    assert resolved(model, {"layers.*.*": "colwise"}).keys() == one
    assert resolved(model, {"**.q": "colwise"}).keys() == {"layers.0.q", "layers.1.q"}
    assert resolved(model, {"*": "replicate"}).keys() == {"", "layers", "norm", "head"}
    assert resolved(model, {"layers.*": "replicate"}).keys() == {"layers.0", "layers.1"}
    found = resolved(model, {"layers.*.q": "colwise", "layers.1.q": "rowwise", "**.*": "replicate"})
    assert (found["layers.0.q"], found["layers.1.q"]) == (Colwise(), Rowwise())
    assert found["layers.0.o"] == Replicate()
    tied = nn.ModuleDict({"a": (layer := nn.Linear(2, 2)), "b": layer})
    assert len(resolve(tied, {"a": "colwise", "b": "colwise"})) == 1


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.*.k": "colwise"}, r"^plan pattern 'layers.\*.k' matches no module of Model; near it: \['layers.\*"),
        ({"layers.5.q": "colwise"}, r"matches no module of Model; it has 'layers.0.q' to 'layers.1.q'. Give a part"),
        ({"zzzzzz": "colwise"}, r"matches no module of Model; its modules are \['layers', 'norm', 'head'\]"),
        ({"hea.": "colwise"}, r"^plan pattern 'hea.' matches no module of Model"),
        ({"head": "odd"}, r"^style 'odd' of 'head' is unknown: it is one of \['colwise', "),
        ({"head": "gather"}, "^style 'gather' of 'head' is one that parallelize doesn't support: it knows"),
        ({"layers.*.q": "colwise", "*.0.q": "rowwise"},
         r"^plan patterns 'layers.\*.q' and '\*.0.q' both match layers.0.q, in different styles$"),
        ({"head.weight": "colwise"}, "^head.weight is a parameter, and 'colwise' is for modules: name its module"),
        ({"head.weight": "replicate"}, "^the plan of 1 patterns matches no module of Model: if it is of suggest"),
        ({}, "^the plan of 0 patterns matches no module"),
        ("odd", "^plan 'odd' is neither 'auto' nor a mapping"),
        ("auto", "^Model carries no tp plan: give suggest_plan"), (None, "^Model carries no tp plan"),
    ],
)  # fmt: skip
def test_a_plan_that_fits_nothing_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        resolve(Model(), plan)


def test_the_plan_that_a_model_carries():
    model = nn.ModuleDict({"model": Model(), "lm_head": nn.Linear(8, 5)})
    model.config = SimpleNamespace(base_model_tp_plan={"layers.*.q": "colwise", "gone.*": "rowwise"}, model_type="x")
    model.base_model_prefix = "model"
    assert model_plan(model) == {"model.layers.*.q": "colwise"}, "what matches nothing is left out"
    model._tp_plan = {"lm_head": "colwise_rep"}
    assert model_plan(model)["lm_head"] == "colwise_rep"
    assert resolved(model, "auto").keys() == {"model.layers.0.q", "model.layers.1.q", "lm_head"}
    model.base_model_prefix = "transformer"
    assert model_plan(model).keys() == {"lm_head"}
    names = {"attn": ("c_attn", "c_proj"), "mlp": ("c_fc", "c_proj")}
    block = nn.ModuleDict({part: nn.ModuleDict({name: nn.Identity() for name in own}) for part, own in names.items()})
    gpt2 = nn.ModuleDict({"wte": nn.Embedding(4, 4), "h": nn.ModuleList([block])})
    gpt2.config = SimpleNamespace(base_model_tp_plan=None, model_type="gpt2")
    plan = model_plan(gpt2)
    assert plan["h.*.attn"] == LocalSizes(("num_heads", "split_size"))
    assert plan["h.*.attn.c_attn"] == Colwise(blocks=3)
    assert len(plan) == 6
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"act_fn": nn.ReLU()})})
    apertus = nn.ModuleDict({"a": nn.Linear(4, 4), "layers": nn.ModuleList([layer])})
    apertus.config = SimpleNamespace(base_model_tp_plan={"a": "rowwise"}, model_type="apertus")
    assert model_plan(apertus) == {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce", "a": "rowwise"}
    assert [is_own(plan) for plan in ("auto", None, {}, {"a": "b"})] == [True, True, False, False]


def test_patterns_of_the_parameters_of_experts_are_those_of_their_module():
    model = nn.ModuleDict({"experts": nn.Module()})
    model["experts"].w = nn.Parameter(torch.ones(2, 4, 4))
    for style in ("moe_tp_experts", Experts({"w": Hidden(-1)})):
        assert resolved(model, {"experts": style, "experts.w": "grouped_gemm"}).keys() == {"experts"}
    with pytest.raises(ValueError, match=r"experts.w is a parameter, and 'grouped_gemm' is for modules"):
        resolve(model, {"experts": "replicate", "experts.w": "grouped_gemm"})
