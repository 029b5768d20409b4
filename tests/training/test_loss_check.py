"""When a loss is checked, what counts as a mean, and what policies and loss scales take: in one process."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.training.loss_check import LossCheck, with_mesh


def mesh_of(data: int = 1, tp: int = 1, rank: int = 0) -> Any:
    return mp.Mesh(data=mp.Axis(data), tp=mp.Axis(tp), job=mp.Axis(8, rank))


def begun(tokens: int = 8, **sizes: int) -> LossCheck:
    return LossCheck(mesh_of(**sizes), tokens, 1)


Y = torch.arange(6.0).view(3, 2) + 1


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


@pytest.mark.parametrize(("tokens", "micro_batches", "data", "due"), [
    (1, 1, 1, False), (2, 1, 1, True), (4, 4, 1, False), (5, 4, 1, True), (8, 4, 2, False), (9, 4, 2, True),
    (torch.tensor(9.0), 4, 2, True), (0, 1, 1, False),
])  # fmt: skip
def test_a_loss_is_checked_if_a_micro_batch_has_more_than_a_token(tokens, micro_batches, data, due):
    check = LossCheck(mesh_of(data), tokens, micro_batches)
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
    check = LossCheck(on, tokens, 1)
    check.is_mean = is_mean
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
