"""muP: rules of the paper's table 3 by hand, one training on every layout, and activations that keep their size."""

import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from examples.mup import BASE, Stage, standard, train
from mpcore.experimental import BiasedExperts, apply_mup, clamped_swiglu, coordinate_check, simulate
from mpcore.layers import materialize
from mpcore.sharding.state_dict import full_state_dict
from tests.quick import some

WIDTH = 96  # three times the base width; 6 heads
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2}, "tp3": {"tp": 3}, "pp2": {"pp": 2}, "dp2": {"dp": 2}, "tp2pp2": {"tp": 2, "pp": 2},
}  # fmt: skip
SCALED = {"qkv": (0.5, 1), "output": (0.5, 1), "up": (0.5, 1), "down": (0.5, 1), "head": (1, 1), "embedding": (0, 0)}


def losses(mesh: mp.Mesh, zero: int) -> list[float]:
    run, batch = train(WIDTH, mesh, zero=zero)
    found = []
    for step in range(3):
        run.forward_backward(**batch)
        found.append(run.optimizer_step(lr=1e-2 / (step + 1)).loss)
    rates = [(group["lr"], group["lr_scale"]) for group in run.optimizer.param_groups]
    assert rates == [(1e-2 / 3 * scale, scale) for scale in (1.0, BASE / WIDTH, 1.0)]
    return found


def test_values_and_rates() -> None:
    """std = base std * (n0/n)^a and lr = base lr * (n0/n)^b, with (a, b) of SCALED; other parameters stay."""

    def built(mup: bool) -> tuple[dict, dict]:
        with torch.device("meta"):
            model, base = Stage(WIDTH, mp.Mesh(), mp.Axis()), Stage(BASE, mp.Mesh(), mp.Axis())
        rates = apply_mup(model, base) if mup else None
        materialize(model, 0)
        names = {p: name for name, p in model.named_parameters()}
        groups = rates.groups(model, lr=1.0, weight_decay=0.3) if rates else []
        return full_state_dict(model), {
            names[p]: (g["lr"], g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]
        }

    (values, rates), (before, _) = built(True), built(False)
    for name, value in values.items():
        place = name.split(".")[-2]
        a, b = SCALED.get(place, (0, 0)) if value.dim() > 1 else (0, 0)
        torch.testing.assert_close(value, before[name] * 3.0**-a)
        lr = 3.0**-b
        assert rates[name] == pytest.approx((lr, lr, 0.3 / lr if value.dim() > 1 else 0.0)), name


def test_biases_of_experts_are_vectors() -> None:
    """In a bias [E, F] F grows, and no input does: it has the learning rate of the base width and no decay."""
    kind = {"expert_class": BiasedExperts, "device": "meta"}
    wide, narrow = (mp.ParallelMoE(width, 2 * width, 4, 2, clamped_swiglu, **kind) for width in (64, 16))
    mup = apply_mup(wide, narrow)
    assert {name for name, factor in mup.factors.items() if factor != 1} == {
        "experts.gate_up.weight",
        "experts.down.weight",
        "router.weight",
    }
    *_, vectors = mup.groups(wide, lr=1.0, weight_decay=0.3)
    assert {id(p) for p in vectors["params"]} == {id(wide.experts.gate_up.bias), id(wide.experts.down.bias)}


@pytest.mark.parametrize(("layout", "zero"), some(
    ("tp2", 1), ("tp3", 3), ("pp2", 1), ("dp2", 3), ("tp2pp2", 1), of=itertools.product(LAYOUTS, (1, 3))))  # fmt: skip
def test_layouts(layout: str, zero: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        one, *others = [*simulate(losses, 0), *simulate(losses, zero, **LAYOUTS[layout])]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(found == pytest.approx(one, rel=1e-11) for found in others)


def test_coordinates() -> None:
    """Flat with muP on two layouts; standard parametrization grows."""
    widths = (32, 96, 256)
    for layout in ("tp1", "tp2"):
        assert not coordinate_check(train, widths, 3, layout).growing
    assert len(coordinate_check(standard, widths, 3).growing) > 5

    def deeper(width: int, mesh: mp.Mesh) -> Any:
        run, batch = standard(width, mesh)
        run.model.extra = nn.Identity() if width > 32 else None
        run.model.register_forward_hook(lambda model, _, out: out if model.extra is None else model.extra(out))
        return run, batch

    with pytest.raises(ValueError, match="extra is there at 1 of 2 widths"):
        coordinate_check(deeper, (32, 96), 1)


class Tied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = mp.VocabParallelEmbedding(8, width)
        self.head = mp.ColumnParallelLinear(width, 8, bias=False)
        self.head.weight = self.embedding.weight


class Own(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width))


def attention(width: int) -> nn.Module:
    return mp.ParallelAttention(width, num_heads=2)


@pytest.mark.parametrize(("make", "named"), [
    (Tied, ["embedding.weight", "Untie", "by 0.5"]), (Own, ["matrix", "Own", "kinds"]),
    (attention, ["heads of 8 in place of 4", ".scale = 0.25"]),
    (lambda width: nn.Linear(width, 4, device="meta"), ["weight", "0.707", "initialize=False"]),
    (lambda width: nn.Sequential(*(nn.Linear(8, 8) for _ in range(width // 8))), ["1.bias", "width only"]),
])  # fmt: skip
def test_refusals(make, named: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, named))):
        apply_mup(make(16), make(8))


def refusals_of_stages(mesh: mp.Mesh) -> list[str]:
    found, build = [], Own if mesh.pp.rank == 0 else partial(nn.Linear, 8)
    for kinds in (None, {"matrix": "hidden", "matrx": "hidden"}):
        with pytest.raises(ValueError, match=r"matri?x") as caught:
            apply_mup(build(16), build(8), mesh, kinds)
        found.append(str(caught.value))
    return found


def test_refusals_of_one_stage_reach_all() -> None:
    first, second = simulate(refusals_of_stages, pp=2)
    assert first == second
    assert "matrix of Own" in first[0]
    assert "matrx" in first[1]


def test_neighbours() -> None:
    """Values that exist are scaled once; a named kind and a smaller `scale` of the scores are taken."""
    torch.manual_seed(0)
    wide, narrow = Own(16), Own(8)
    before = wide.matrix.detach().clone()
    mup = apply_mup(wide, narrow, kinds={"matrix": "hidden"})
    torch.testing.assert_close(wide.matrix.detach(), before / 2**0.5)
    assert mup.factors == {"matrix": 0.5}
    model, base = (mp.ColumnParallelLinear(width, width, init=nn.init.normal_) for width in (16, 8))
    apply_mup(model, base)
    with pytest.raises(ValueError, match="weight is scaled already"):
        apply_mup(model, base)
    heads = mp.ParallelAttention(16, num_heads=2)
    heads.scale = 0.25
    apply_mup(heads, attention(8))
    with pytest.raises(ValueError, match="adapter"):
        mup.groups(nn.ModuleDict({"adapter": nn.Linear(2, 2)}), 1.0)
