"""Transformers of unusual make: the plan that is found is equal to the whole model, or what can't be cut is named."""

from functools import partial

import pytest
import torch

import mpcore as mp
from mpcore.interop.parallelize import Colwise, LocalSizes
from mpcore.interop.parallelize.plan import STYLES
from mpcore.tools.verify import verify
from tests import odd_models as models
from tests.quick import some

pytestmark = pytest.mark.filterwarnings("ignore:the plan leaves", "ignore:`torch.nn.utils.weight_norm`")
KINDS = ["qkv of groups", "table read as a head", "weight norm", "state space", "used twice"]
SHARES = {"weight norm": 0.6, "functional": 0.6, "torch's": 0.7, "vision": 0.7}
SHARES |= {"table read as a head": 0.8, "max norm": 0.8}
TP = mp.Axis(size=2, rank=0, name="tp")


def found(name, tp=2):
    return mp.suggest_plan(models.MODELS[name](), tp, example=models.example(name))


@pytest.mark.parametrize(
    ("name", "layout"),
    some(*((n, "tp2") for n in KINDS), of=[(n, at) for n in models.MODELS for at in ("tp2", "tp3", "tp2dp2zero3")]),
)
def test_the_plan_found_trains_as_the_whole_model(ranks, name, layout):
    tp, batch = int(layout[2]), {"x": models.example(name)}
    suggestion = found(name, tp)
    assert suggestion.share > SHARES.get(name, 0.93)
    mp.parallelize(models.MODELS[name](), suggestion.plan, mp.Axis(tp, 0, name="tp"), example=batch["x"], strict=True)
    build = partial(models.build, name, suggestion.plan)
    (verdict,) = verify(build, batch, [layout], loss=models.loss, pool=ranks)
    if name == "max norm" and "dp" in layout:
        assert "table has max_norm: each of 2 data ranks would scale" in verdict.error
    else:
        assert verdict.equal, verdict


@pytest.mark.parametrize(("name", "plan"), [
    ("qkv of kind, head", {"blocks.0": LocalSizes(("n",)), "blocks.0.w": Colwise(blocks=3, unit=6)}),
    ("qkv of head, kind", {"blocks.0": LocalSizes(("n",)), "blocks.0.w": Colwise(unit=18)}),
    ("qkv of feature, kind, head", {"blocks.0": LocalSizes(("n",)), "blocks.0.w": Colwise(18, unit=1)}),
    ("qkv of groups", {"blocks.0": LocalSizes(("kv",)), "blocks.0.w": Colwise(unit=24)}),
    ("two kv heads", {"blocks.0": LocalSizes(("heads", "groups")), "blocks.0.to_*": "colwise"}),
    ("gate and up", {"blocks.*.wi": Colwise(blocks=2)}), ("gate and up in turns", {"blocks.*.wi": Colwise(unit=2)}),
])  # fmt: skip
def test_packings_whose_names_say_nothing_are_found(name, plan):
    said = found(name).plan
    shards = [mp.parallelize(models.MODELS[name](), p, TP, check=False).state_dict() for p in (said, said | plan)]
    assert {key: x.shape for key, x in shards[0].items()} == {key: x.shape for key, x in shards[1].items()}
    styles = [STYLES.get(str(style), style) for style in said.values()]
    assert sum(getattr(style, "gather_output", False) for style in styles) == 1  # the head alone


@pytest.mark.parametrize(("name", "plan", "said"), [
    ("weight norm", {"blocks.1.up": "colwise"}, "blocks.1.up"),
    ("max norm", {"table": "vocab"}, "table: max_norm"), ("vision", {"stem": "colwise"}, "stem is a Conv2d"),
    ("table read as a head", {"table": "vocab"}, "scale"),
    ("torch's", {"blocks.0.attention.out_proj": "rowwise"}, "blocks.0.attention.out_proj is part of an nn.Multi"),
    ("functional", {"blocks.1.up": "colwise", "blocks.1.down": "rowwise"}, "blocks.1"),
    ("state space", {"blocks.0.into": Colwise(blocks=2), "blocks.0.out": "rowwise"}, "blocks.0.conv"),
    ("mixed by softmax", {"blocks.1.up": "colwise", "blocks.1.down": "rowwise"}, "blocks.1"),
    ("mixed by roll", {"blocks.1.up": "colwise", "blocks.1.down": "rowwise"}, "blocks.1"),
    ("mixed by mean", {"blocks.1.up": "colwise", "blocks.1.down": "rowwise"}, "blocks.1"),
    ("one kv head", {"blocks.0": LocalSizes(("heads",)), "blocks.0.to_*": "colwise"}, "blocks.0"),
    ("qkv of head, kind", {"blocks.0": LocalSizes(("n",)), "blocks.0.w": Colwise(blocks=3)}, "blocks.0"),
])  # fmt: skip
def test_a_wrong_plan_is_refused_by_the_name_of_a_module(name, plan, said):
    back = {"blocks.0.back": "rowwise"} if "blocks.0" in plan else {}
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        mp.parallelize(models.MODELS[name](), plan | back, TP, example=models.example(name))


def test_arguments_that_cannot_be_guessed_are_asked_for():
    with pytest.raises(ValueError, match=r"no plan can be tried on this model: .* Give arguments .* example="):
        mp.suggest_plan(models.MODELS["vision"]())
    assert torch.is_floating_point(models.example("vision"))
