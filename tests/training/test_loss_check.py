"""When a loss is checked, what counts as a mean, and what policies and loss scales take: in one process."""

from __future__ import annotations

import logging
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.experimental import LocalUpdates
from mpcore.tools.invariant import TreeSums
from mpcore.tools.invariant.run import _check_policies, _leaves_of_rank
from mpcore.training import loss_check
from mpcore.training.loss_check import LossCheck, with_mesh
from mpcore.training.policies import DTYPES, check_policies


def mesh_of(data: int = 1, tp: int = 1, rank: int = 0) -> Any:
    return mp.Mesh(data=mp.Axis(data), tp=mp.Axis(tp), job=mp.Axis(8, rank))


def begun(tokens: int = 8, **sizes: int) -> LossCheck:
    check = LossCheck(mesh_of(**sizes))
    check.begin(tokens, 1)
    return check


Y = torch.arange(6.0).view(3, 2) + 1


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


@pytest.mark.parametrize(("tokens", "micro_batches", "data", "due"), [
    (1, 1, 1, False), (2, 1, 1, True), (4, 4, 1, False), (5, 4, 1, True), (8, 4, 2, False), (9, 4, 2, True),
    (torch.tensor(9.0), 4, 2, True), (0, 1, 1, False),
])  # fmt: skip
def test_a_loss_is_checked_if_a_micro_batch_has_more_than_a_token(tokens, micro_batches, data, due):
    check = LossCheck(mesh_of(data))
    assert (check.tokens, check.is_due, check.is_mean) == (0, False, False)
    check.is_mean = True
    check.begin(tokens, micro_batches)
    assert (check.tokens, check.is_due, check.is_mean) == (int(tokens) if due else 0, due, False)


def test_the_first_micro_batch_alone_is_repeated_with_every_sample_twice():
    check, seen = begun(), []

    def loss(y: Any, t: Tensor) -> Tensor:
        seen.append((y, t, torch.is_grad_enabled()))
        return squares(y["a"], t) + y["b"]

    number = torch.tensor(3.0)
    for _ in range(2):
        assert float(check.call(loss, {"a": Y, "b": number}, 2 * Y)) == float(squares(Y, 2 * Y) + 3)
    (twice, targets, graded), *others = seen
    assert torch.equal(twice["a"], torch.cat([Y, Y]))
    assert twice["b"] is number, "a number has no samples"
    assert torch.equal(targets, torch.cat([2 * Y, 2 * Y]))
    assert [graded, *(grad for *_, grad in others)] == [False, True, True]
    assert len(others) == 2
    assert (check.is_due, check.is_mean) == (False, False)


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 2.0**-5)])
def test_a_loss_that_hardly_changes_is_a_mean(dtype, slack):
    for off, is_mean in ((0.0, True), (0.97, True), (-0.97, True), (1.03, False), (-1.03, False)):
        for value in (3.0, -3.0):
            check = begun()

            def loss(y: Tensor, t: Tensor, value: float = value, off: float = off) -> Tensor:
                x = torch.tensor(value, dtype=torch.float64)
                return x.to(dtype) if len(y) == 3 else x * (1 + off * slack)

            check.call(loss, Y, Y)
            assert check.is_mean is is_mean, (off, value)


def test_what_is_no_number_is_no_mean():
    for once in (torch.tensor(0.0), torch.tensor(3), torch.ones(2), 3.0, torch.tensor(math.nan)):
        check = begun()
        assert check.call(lambda y, t, once=once: once, Y, Y) is once
        assert not check.is_mean
    check = begun()
    check.call(lambda y, t: torch.tensor([3.0]), Y, Y)
    assert check.is_mean, "one number in a tensor of another shape"

    def one_size(y: Tensor, t: Tensor) -> Tensor:
        assert len(y) == 3
        return torch.tensor(1.0)

    check = begun()
    assert float(check.call(one_size, Y, Y)) == 1.0
    assert not check.is_mean


def test_an_index_outside_of_sharded_logits_is_explained():
    def loss(y: Tensor, t: Tensor) -> Tensor:
        raise IndexError("7 is out of bounds")

    with pytest.raises(
        ValueError, match=r"outside of its input \(7 is out of bounds\); if its input is sharded: shard"
    ):
        begun(tp=2).call(loss, Y, Y)
    with pytest.raises(IndexError):
        begun(tp=1).call(loss, Y, Y)


@pytest.mark.parametrize(("dtype", "rank", "said"), [
    (torch.float16, 0, 1), (torch.bfloat16, 0, 1), (torch.bfloat16, 1, 0), (torch.float32, 0, 0), (torch.float64, 0, 0),
])  # fmt: skip
def test_a_loss_in_sixteen_bits_is_warned_of_on_rank_0(caplog, dtype, rank, said):
    with caplog.at_level(logging.WARNING):
        begun(rank=rank).call(lambda y, t: torch.tensor(2.0, dtype=dtype), Y, Y)
    assert len(caplog.records) == said


def test_a_loss_may_accept_the_mesh():
    on = mp.Mesh()

    def plain(y: Tensor, t: Tensor, weight: float = 1.0) -> Tensor:
        return squares(y, t) * weight

    def named(y: Tensor, t: Tensor, weight: float = 1.0, *, mesh: mp.Mesh | None = None) -> Tensor:
        assert mesh is on
        return squares(y, t) * weight

    def third(y: Tensor, t: Tensor, where: mp.Mesh) -> Tensor:
        assert where is on
        return squares(y, t)

    for loss in (plain, named, third, partial(third, where=on), nn.MSELoss(reduction="sum")):
        assert float(with_mesh(loss, on)(Y, 2 * Y)) == float(squares(Y, 2 * Y))
    assert with_mesh(torch.dist, on) is torch.dist, "it has no signature"
    net = nn.Linear(2, 2)
    run = mp.prepare(net, on, blocks=(), loss=third, initialize=False, optimizer=lambda m: mp.AdamW(m, lr=0.1))
    assert float(run.forward_backward(Y, Y)) == pytest.approx(float(squares(net(Y), Y) / Y.numel()))


def end_on_rank(totals: list[float], is_mean: bool, tokens: int) -> str:
    on = mp.build_mesh(tp=2, device_type="cpu")
    check = LossCheck(on)
    check.tokens, check.is_mean = tokens, is_mean
    try:
        check.end(torch.tensor(totals[on.job.rank], dtype=torch.float64))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("totals", "is_mean", "tokens", "said"), [
    ([2.0, 2.0], False, 9, ""), ([2.0, 2.0 + 1.9e-5], False, 9, ""), ([-2.0, -2.0 - 1.9e-5], False, 9, ""),
    ([2.0, 2.0 + 2.1e-5], False, 9, "the ranks of tp have different losses, from 2 to 2.00002: "),
    ([2.0, 1.0], True, 9, "the ranks of tp have different losses, from 1 to 2: "),
    ([2.0, 2.0], True, 9, "the loss is a mean, as it stays the same when each sample comes twice"),
    ([2.0, 1.0], True, 0, ""),
])  # fmt: skip
def test_losses_of_a_tp_group_may_differ_by_1e_5(totals, is_mean, tokens, said):
    for text in mp.simulate(end_on_rank, totals, is_mean, tokens, ranks=2):
        assert text.startswith(said)
        assert bool(text) is bool(said)


def end_on_four(mean_rank: int) -> str:
    on = mp.build_mesh(dp=2, tp=2, device_type="cpu")
    check = LossCheck(on)
    check.tokens, check.is_mean = 9, on.job.rank == mean_rank
    try:
        check.end(torch.tensor(float(on.dp.rank), dtype=torch.float64))
    except ValueError as error:
        return str(error)
    return ""


def test_a_mean_on_one_rank_is_raised_on_all():
    said = mp.simulate(end_on_four, 3, ranks=4)
    assert all("by the 9 tokens of the step (on rank 3 of 4)" in text for text in said)
    assert mp.simulate(end_on_four, 9, ranks=4) == [""] * 4, "data ranks have losses of their own"
    assert loss_check.SHARDED.startswith("sharded logits need mpcore.vocab_parallel_cross_entropy(")


# --- policies ---------------------------------------------------------------------------------------------------------


def test_names_of_dtypes():
    names = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    known = {name: getattr(torch, long) for long, short in names.items() for name in (long, short)}
    assert known == DTYPES


HALVES = [torch.bfloat16, "bfloat16", "bf16"], [torch.float16, "float16", "fp16"]


def test_a_precision_says_what_is_computed_in_what():
    for name in HALVES[0]:
        assert (mp.Precision(name).param_dtype, mp.Precision(name).autocast_dtype) == (torch.bfloat16, None)
        cast = mp.Precision(name, autocast=True)
        assert (cast.param_dtype, cast.autocast_dtype) == (None, torch.bfloat16)
    for name in HALVES[1]:
        for cast in (mp.Precision(name), mp.Precision(name, autocast=True)):
            assert (cast.param_dtype, cast.autocast_dtype) == (None, torch.float16)
    for name in ("float32", "fp64", torch.float64):
        wide = mp.Precision(name)
        assert (wide.param_dtype, wide.autocast_dtype) == (None, None)
        with pytest.raises(ValueError, match="autocast is to bfloat16 or float16"):
            mp.Precision(name, autocast=True)
    assert mp.Precision().first_loss_scale == 65536.0
    assert (mp.Precision().dtype, mp.Precision().fp8, mp.Precision().autocast) == ("float32", False, False)
    for wrong in ("int8", torch.int8):
        with pytest.raises(ValueError, match="is none of float64, float32, bfloat16, float16"):
            mp.Precision(wrong)


def test_the_edges_of_policies():
    for stage in range(4):
        assert mp.Zero(stage).stage == stage
    for stage in (-1, 4, 1.5):
        with pytest.raises(ValueError, match=f"zero stage {stage} is none of"):
            mp.Zero(stage)  # type: ignore[arg-type]
    for budget in (1.0, 1e-9):
        assert mp.Recompute(budget=budget, example=len).budget == budget  # type: ignore[arg-type]
    for budget in (0.0, 1.0001, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"recompute budget {budget} is not above 0"):
            mp.Recompute(budget=budget, example=len)  # type: ignore[arg-type]
    assert (mp.Recompute().kind, mp.Recompute().every, mp.Recompute().preserve_rng_state) == ("full", 1, True)
    usual = LocalUpdates()
    assert (usual.every, usual.lr, usual.momentum, usual.nesterov, usual.fragments) == (100, 0.7, 0.9, True, 1)
    for every, fragments in ((1, 1), (3, 3)):
        LocalUpdates(every, fragments=fragments)
    for every, fragments in ((0, 1), (-1, 1), (3, 4), (3, 0)):
        with pytest.raises(ValueError, match=f"(every|fragments) ({every}|{fragments}) is not "):
            LocalUpdates(every, fragments=fragments)
    for lr, momentum in ((1e-9, 0.0), (5.0, 0.999)):
        LocalUpdates(lr=lr, momentum=momentum)
    for lr, momentum in ((0.0, 0.5), (math.inf, 0.5), (-1.0, 0.5), (1.0, 1.0), (1.0, -0.1)):
        with pytest.raises(ValueError, match=f"the outer lr {lr} is not above 0, or the momentum {momentum} not from"):
            LocalUpdates(lr=lr, momentum=momentum)


POLICIES: list[tuple[dict, str]] = [
    ({"data": mp.Zero(3, replicate=2), "data_ranks": 4}, ""),
    ({"data": mp.Zero(0, replicate=2), "data_ranks": 4}, "replicate 2 with zero 0 on 4 data ranks leaves"),
    ({"offload": mp.Offload(parameters=True)}, ""),
    ({"offload": mp.Offload(parameters=True), "data_ranks": 2}, "Offload(parameters=True) with Zero(stage=1) on 2"),
    ({"offload": mp.Offload(parameters=True), "data": mp.Zero(0), "data_ranks": 2}, ""),
    ({"offload": mp.Offload(optimizer=True, activations=True), "data_ranks": 2, "splits": True}, ""),
    ({"offload": mp.Offload(parameters=True), "splits": True}, "Offload(parameters=True) with a schedule that splits"),
    ({"data": None}, "data is None, which is no Zero: write data=Zero(3)"),
    ({"offload": None}, "offload is None, which is no Offload: write offload=Offload(optimizer=True)"),
    ({"compile": "inductor"}, "compile is 'inductor', which is no Compile: write compile=Compile()"),
    ({"compile": mp.Compile("eager")}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), POLICIES)
def test_policies_that_go_together_and_those_that_do_not(given, said):
    of = {"data_ranks": "data"}
    sizes = {of.get(name, name): given.get(name) for name in ("data_ranks", "splits") if name in given}
    policies = {name: value for name, value in given.items() if name not in ("data_ranks", "splits")}
    size = mp.Axis(sizes.get("data", 1))
    on: Any = SimpleNamespace(data=size, edp=size, device_mesh=None)
    usual = {"data": mp.Zero(), "offload": mp.Offload(), "compile": None}
    try:
        check_policies(on, sizes.get("splits", False), **{**usual, **policies})
        told = ""
    except ValueError as error:
        told = str(error)
    assert told.startswith(said)
    assert bool(told) is bool(said)


# --- invariant numerics -----------------------------------------------------------------------------------------------


def test_the_leaves_of_a_rank_are_its_virtual_shards():
    def on(size: int = 1) -> Any:
        return SimpleNamespace(data=mp.Axis(size, 0, role="data", sums=TreeSums(8)))

    assert [_leaves_of_rank(on(size), each) for size, each in ((1, 8), (2, 2), (4, 1))] == [8, 4, 2]
    for size, each in ((2, 3), (4, 4), (1, 16)):
        with pytest.raises(ValueError, match=f"micro_batches {each} does not divide the {8 // size} leaves of a rank"):
            _leaves_of_rank(on(size), each)


WIDE = mp.Precision()


def refused(precision: Any = WIDE, **given: Any) -> str:
    try:
        _check_policies(precision, **{"data": mp.Zero(), "offload": mp.Offload(), "schedule": "1f1b", **given})
    except ValueError as error:
        return str(error).removeprefix("invariant numerics don't go with ").removesuffix(": see docs/bitwise.md")
    return ""


def test_policies_without_an_invariant_form_are_named():
    assert refused() == refused(precision=mp.Precision("bfloat16")) == ""
    assert refused(offload=mp.Offload(True, True, False), data=mp.Zero(3)) == ""
    for given, name in (
        ({"precision": mp.Precision("bfloat16", fp8=True)}, "FP8"),
        ({"precision": mp.Precision("bfloat16", autocast=True)}, "autocast"),
        ({"precision": mp.Precision("float16")}, "autocast"), ({"compile": mp.Compile("eager")}, "compile"),
        ({"schedule": "zb"}, "a schedule that splits"),
        ({"data": mp.Zero(3, replicate=2)}, "replicate above 1"),
        ({"offload": mp.Offload(parameters=True)}, "offload of parameters"),
        ({"data": mp.Zero(reduce_dtype=torch.bfloat16)}, "a reduce_dtype other than float32"),
    ):  # fmt: skip
        assert refused(**given).startswith(name)
