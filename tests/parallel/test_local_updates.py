"""Merges of one worker and of vectors by hand: when, how far, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.tools import diloco as module
from mpcore.tools.diloco import OUTER_SLOTS, DiLoCo, Merge, _State


def made(model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> DiLoCo:
    model = model or nn.Linear(2, 2).double()
    return DiLoCo(optimizer or torch.optim.SGD(model.parameters(), lr=0.5), model, mp.Mesh(), **options)


@pytest.mark.parametrize("changes", [[(1, 0), (1, 0)], [(1, 0), (0, 1)], [(1, 0), (-1, 0)], [(3, 4)], [(0, 0)] * 3,
                                     [(1, 2), (3, 1), (-2, 5)]])  # fmt: skip
def test_agreement_is_the_mean_inner_product_over_the_mean_square(changes):
    rows = torch.tensor(changes, dtype=torch.float64)
    merge = Merge(1, 0, float(rows.mean(0).norm()), tuple(row.norm().item() for row in rows))
    pairs = [float(a @ b) for i, a in enumerate(rows) for b in rows[i + 1 :]]
    squares = float(rows.square().sum()) / len(rows)
    want = 1.0 if not pairs or not squares else sum(pairs) / len(pairs) / squares
    assert merge.agreement == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("every", "fragments", "first"), [(4, 1, [4]), (4, 2, [2, 4]), (5, 3, [1, 3, 5]), (3, 3, [1, 2, 3])]
)
def test_fragments_are_merged_in_turn(every, fragments, first):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    outer = made(model, every=every, fragments=fragments, blocks=model)
    count = 0
    for step in range(1, 4 * every):
        want = [i for i, at in enumerate(first) if step >= at and (step - at) % every == 0]
        assert outer.due(step) == (want[0] if want else None)
        count += len(want)
        assert outer.merges_until(step) == count
    assert outer.due(0) is None
    assert outer.merges_until(0) == 0


def test_a_merge_by_hand():
    """One weight of 5; it goes down by 1 in each period: an outer gradient of 1."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 5.0)
    for nesterov in (True, False):
        nn.init.constant_(model.weight, 5.0)
        outer, momentum, value = made(model, every=1, lr=0.5, momentum=0.5, nesterov=nesterov), 0.0, 5.0
        for step in (1, 2, 3):
            outer._begin()
            with torch.no_grad():
                model.weight -= 1.0
            found = outer.merge(step)
            momentum = 0.5 * momentum + 1.0
            value -= 0.5 * (1.0 + 0.5 * momentum if nesterov else momentum)
            assert model.weight.item() == pytest.approx(value, rel=1e-15)
            assert found == Merge(step, 0, 1.0, (1.0,))


def test_only_the_due_fragment_is_merged_and_parameters_are_sharded_before(monkeypatch):
    shards: list = []
    monkeypatch.setattr(module, "reshard", shards.append)
    model = nn.ModuleDict({"0": nn.Linear(1, 1, bias=False), "1": nn.Linear(1, 1, bias=False), "end": nn.Linear(1, 1)})
    outer = made(model, every=2, fragments=2, momentum=0.0, lr=0.25, blocks={0: model["0"], 3: model["1"]})
    assert shards == [model]
    outer._begin()
    for step, merged in ((1, ("0.weight", "end.weight", "end.bias")), (2, ("1.weight",))):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p += 1.0
        outer.merge(step)
        for name, p in model.named_parameters():  # by step 2 the second fragment has moved by 2
            moved = (1.0 if step == 1 else 2.0) * 0.25 - (step - 1) if name in merged else 1.0
            assert p.item() == pytest.approx(before[name].item() + moved)
    assert shards == [model] * 3
    assert outer.merge(2) is not None
    shards.clear()
    model2 = nn.Linear(1, 1)
    later = made(model2, every=3)
    shards.clear()
    assert later.merge(2) is None
    assert shards == [], "nothing happens when none is due"


def test_a_change_that_is_not_finite_merges_nothing():
    model = nn.Linear(1, 1).double()
    outer = made(model, every=1)
    outer._begin()
    anchor = outer.outer[model.weight]["outer_anchor"].clone()
    with torch.no_grad():
        model.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="weight of worker 0 of 1 is not finite: nothing was merged"):
        outer.merge(1)
    assert torch.equal(outer.outer[model.weight]["outer_anchor"], anchor)


@pytest.mark.parametrize(("options", "said"), [
    ({"every": 0}, "every 0 is not at least one step"), ({"every": 2.0}, "every 2.0 is not at least one step"),
    ({"every": 3, "fragments": 4}, "fragments 4 is not from 1 to the 3 steps"),
    ({"fragments": 0}, "fragments 0 is not"),
    ({"fragments": 2.0}, "fragments 2.0 is not"), ({"lr": 0.0}, "the outer lr 0.0 is not above 0"),
    ({"lr": math.inf}, "the outer lr inf"), ({"momentum": 1.0}, "or the momentum 1.0 not from 0 to below 1"),
    ({"momentum": -0.1}, "or the momentum -0.1 not"),
    ({"fragments": 2}, "fragments 2 are of blocks, and none are given"),
])  # fmt: skip
def test_options_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        made(**options)
    made(every=1, fragments=1, lr=1e-9, momentum=0.0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made(model, every=2, fragments=2, blocks=model)


def test_another_models_parameter_is_refused_and_a_frozen_one_is_not():
    other = torch.optim.SGD(nn.Linear(3, 4).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the optimizer's parameter of shape \(4, 3\) is none of the model's"):
        made(optimizer=other)
    frozen = nn.Linear(3, 4).requires_grad_(False)
    made(optimizer=torch.optim.SGD(frozen.parameters(), lr=0.1))


# --- its state --------------------------------------------------------------------------------------------------------


def test_the_outer_state_is_float32_or_wider_and_begins_as_the_parameters_are():
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        for momentum, slots in ((0.0, OUTER_SLOTS[:1]), (0.9, OUTER_SLOTS)):
            model = nn.Linear(2, 2).to(dtype)
            model.bias.requires_grad_(False)
            outer = made(model, momentum=momentum)
            assert outer.outer == {}
            outer.begin()
            assert list(outer.outer) == [model.weight]
            held = outer.outer[model.weight]
            assert tuple(held) == slots
            assert {x.dtype for x in held.values()} == {wide}
            assert torch.equal(held["outer_anchor"], model.weight.detach().to(wide))
            anchor = held["outer_anchor"]
            with torch.no_grad():
                model.weight += 1
            outer._begin()
            assert held["outer_anchor"] is anchor
            assert not torch.equal(anchor, model.weight.detach().to(wide))
            assert momentum == 0 or not held["outer_momentum"].any()


def test_a_state_dict_gives_the_outer_state_back():
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    one, other = made(model, every=1), made(twin, every=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    one.step()
    one.merge(1)
    state = one.state_dict()
    assert state.keys() == {"inner", "outer"}
    assert list(state["outer"]) == [0, 1]
    other.load_state_dict(state)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert other.outer[q].keys() == one.outer[p].keys()
        for slot, value in one.outer[p].items():
            assert torch.equal(other.outer[q][slot], value)
            assert other.outer[q][slot] is not value
    assert other.param_groups is other.optimizer.param_groups
    assert other.defaults == other.optimizer.defaults
    with pytest.raises(AttributeError):
        DiLoCo.__new__(DiLoCo).anything  # noqa: B018


def test_the_state_of_both_optimizers_is_one_mapping():
    a, b, c = (torch.ones(1) for _ in range(3))
    inner: dict = {a: {"m": 1}}
    outer: dict = {a: {"outer_anchor": 2}, b: {"outer_anchor": 3}}
    state = _State(inner, outer)
    assert state[a] == {"m": 1, "outer_anchor": 2}
    assert state[b] == {}, "never stepped, while others were: no checkpoint needs its anchor"
    with pytest.raises(KeyError):
        state[c]
    assert [id(p) for p in state] == [id(a), id(b)]
    assert len(state) == 2
    state[b] = {"m": 4, "outer_momentum": 5}
    assert (inner[b], outer[b]) == ({"m": 4}, {"outer_momentum": 5})
    state[b] = {"m": 6}
    assert (inner[b], b in outer) == ({"m": 6}, False)
    del state[a]
    assert a not in inner
    assert a not in outer
    assert _State({}, {b: {"outer_anchor": 3}})[b] == {"outer_anchor": 3}, "before the first step"


# --- between workers --------------------------------------------------------------------------------------------------


def averages() -> list[list[float]]:
    on = mp.build_mesh(worlds=3, device_type="cpu")
    outer = DiLoCo.__new__(DiLoCo)
    object.__setattr__(outer, "mesh", on)
    rank = on.worlds.rank
    tensors = [torch.arange(5.0) * (rank + 1), torch.full((2, 2), float(rank)).double(), torch.tensor(3.0 * rank),
               torch.full((7,), rank, dtype=torch.bfloat16)]  # fmt: skip
    outer._average(tensors)
    gathered = outer._gather(torch.tensor([rank, 10 * rank]))
    return [x.double().flatten().tolist() for x in tensors] + [gathered.flatten().tolist()]


@pytest.mark.parametrize("bucket", [2**25, 6, 1])
def test_tensors_are_averaged_over_workers_whatever_their_sizes(monkeypatch, bucket):
    monkeypatch.setattr(module, "_BUCKET", bucket)
    want = [[2.0 * i for i in range(5)], [1.0] * 4, [3.0], [1.0] * 7, [0, 0, 1, 10, 2, 20]]
    assert mp.simulate(averages, ranks=3) == [want] * 3


def differs(same: bool) -> str:
    on = mp.build_mesh(worlds=2, device_type="cpu")
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0 if same else float(on.worlds.rank))
    nn.init.zeros_(model.bias)
    try:
        DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), model, on)
    except ValueError as error:
        return str(error)
    return ""


def test_workers_that_begin_apart_are_told_the_tensor():
    assert mp.simulate(differs, True, ranks=2) == ["", ""]
    said = mp.simulate(differs, False, ranks=2)
    assert all(text.startswith("weight differs between workers 0 and 1 of 2: begin all with one seed") for text in said)
