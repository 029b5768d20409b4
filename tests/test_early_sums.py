"""Plain data parallelism sums large gradients within the last backward: the same bits as after it, or a refusal."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from mpcore._torch.autograd import in_backward
from mpcore.gradients import drop_gradients, guard_optimizer, main_gradients, overlap, reduce_gradients
from mpcore.gradients.accumulate import gradient_of
from mpcore.mesh.axis import Axis
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.sync import finish_gradients, set_gradient_sync
from tests.pool import mesh, on_ranks


class Model(nn.Module):
    """Two weights whose gradients are one memory, a tied, a frozen and an unused one, and one that rank 1 alone uses.

    Backward comes to `of_rank_1` first, and then to the others from the last.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        for name in ("tied", "left", "right", "frozen", "unused", "of_rank_1", "last"):
            self.register_parameter(name, nn.Parameter(torch.randn(4, 4).to(dtype), requires_grad=name != "frozen"))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        """[4, 4] to the same."""
        x = x @ self.tied + (self.left.view(-1) + self.right.view(-1)).view(4, 4)
        x = x @ self.frozen @ self.tied
        if rank == 1:
            x = x @ self.of_rank_1
        return (x @ self.last).sin()


def step(model: Model, rank: int, micro_batches: int = 2) -> None:
    """Forward and backward of all micro-batches."""
    for m in range(micro_batches):
        set_gradient_sync(model, m == micro_batches - 1)
        x = torch.full((4, 4), 0.1 * (1 + m + rank), dtype=model.tied.dtype)
        model(x, rank).sum().backward()


def gradients(alone: int, dtype: torch.dtype, steps: int = 2) -> tuple[dict[str, Tensor | None], list[bool]]:
    """The summed gradients of the last step; and of each sum of a large one whether it began within backward."""
    m, model, within = mesh(dp=2), Model(dtype), list[bool]()
    start = overlap.start_sum_in_place

    def begun(x: Tensor, axis: Axis) -> Tensor:
        within.append(in_backward())
        return start(x, axis)

    with mock.patch.object(overlap, "ALONE", alone), mock.patch.object(overlap, "start_sum_in_place", begun):
        shard_data_parallel(model, m, zero=0)
        if dtype == torch.bfloat16:
            main_gradients(model)
        for _ in range(steps):
            drop_gradients(model)
            within.clear()
            step(model, m.dp.rank)
            reduce_gradients(model)
    return {name: gradient_of(p) for name, p in model.named_parameters()}, within


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_sums_within_backward_have_the_bits_of_sums_after_it(dtype: torch.dtype) -> None:
    want, late = gradients(2**18, dtype)
    got, within = gradients(1, dtype)
    assert (len(late), len(within)) == (0, 6), "all trained ones, also those without a gradient"
    rank = mesh(dp=2).dp.rank
    assert within == ([True] * 2 + [False] * 4 if rank else [True] + [False] * 5), "rank 0 waits for a gradient"
    assert [name for name in want if want[name] is None] == ["frozen", "unused"]
    for name, expected in want.items():
        found = got[name]
        assert (found is None) == (expected is None), name
        assert expected is None or torch.equal(found, expected), name


def doubled(p: Tensor) -> None:
    """Twice the gradient, on rank 1 transposed in memory: what a user hooks."""
    p.grad = 2 * p.grad if torch.distributed.get_rank() == 0 else 2 * p.grad.T.contiguous().T


@on_ranks(2)
def test_only_the_last_micro_batch_sums_and_no_step_is_taken_before_all_is_summed() -> None:
    m = mesh(dp=2)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with mock.patch.object(overlap, "ALONE", 5):
        shard_data_parallel(model, m, zero=0)
        own = [model[i].weight for i in range(3)]
        own[0].register_post_accumulate_grad_hook(doubled)  # runs before the sum begins
        for last in (False, True):
            set_gradient_sync(model, last)
            model(torch.ones(2, 4)).sum().backward()
            began = [len(sums.begun) for sums in overlap._pending.all]
            assert began == ([3] if last else []), "weights of the last micro-batch alone; biases are packed"
            assert all(each.total.is_contiguous() for sums in overlap._pending.all for each in sums.begun.values())
        with pytest.raises(ValueError, match="call reduce_gradients"):
            set_gradient_sync(model, True)
        with pytest.raises(ValueError, match="got another gradient after"):
            model(torch.ones(2, 4)).sum().backward()
        drop_gradients(model)
        assert not overlap._pending.all
        optimizer = guard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        set_gradient_sync(model, True)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ValueError, match="reduce_gradients"):
            optimizer.step()
        reduce_gradients(model)
        optimizer.step()
        alike = torch.stack([own[0], own[1], own[2]])
        both = [torch.empty_like(alike) for _ in range(2)]
        torch.distributed.all_gather(both, alike.detach())
        assert torch.equal(*both)
        drop_gradients(model)
        model[1].weight = nn.Parameter(own[1].detach().clone())  # as a user may replace one
        set_gradient_sync(model, True)
        model(torch.ones(2, 4)).sum().backward()
        assert set(overlap._pending.all[0].begun) == {model[i].weight for i in range(3)}
        reduce_gradients(model)


@on_ranks(2)
def test_a_step_given_up_after_a_backward_that_raised_on_one_rank_leaves_nothing() -> None:
    """Rank 0's last backward raises half-way: both ranks give the step up, and the next one is right."""
    m = mesh(dp=2)
    want = gradients(2**18, torch.float64, steps=1)[0]
    model = Model(torch.float64)
    with mock.patch.object(overlap, "ALONE", 1):
        shard_data_parallel(model, m, zero=0)
        set_gradient_sync(model, True)
        y = model(torch.ones(4, 4, dtype=torch.float64), 1)
        if m.dp.rank == 0:
            hook = model.of_rank_1.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                y.sum().backward()
            hook.remove()
        else:
            y.sum().backward()
        drop_gradients(model)
        assert all(p.grad is None for p in model.parameters())
        step(model, m.dp.rank)
        finish_gradients([model])
        reduce_gradients(model)
    for name, p in model.named_parameters():
        assert p.grad is want[name] or torch.equal(p.grad, want[name]), name


@on_ranks(2)
def test_one_stage_at_a_time_sums_within_its_backward() -> None:
    m, stages = mesh(dp=2), [nn.Linear(4, 4, bias=False) for _ in range(2)]
    with mock.patch.object(overlap, "ALONE", 1):
        for stage in stages:
            shard_data_parallel(stage, m, zero=0)
        for by_turns in (False, True):  # as a GAN sums those of its discriminator before its generator's backward
            for stage in stages:
                drop_gradients(stage)
                set_gradient_sync(stage, True)
            for stage in reversed(stages):
                stage(torch.full((2, 4), 1.0 + m.dp.rank)).sum().backward()
                assert [len(sums.begun) for sums in overlap._pending.all] == [int(stage is stages[0])]
                if by_turns:
                    reduce_gradients(stage)
            for stage in [] if by_turns else stages:
                reduce_gradients(stage)
            assert all(torch.equal(stage.weight.grad, torch.full((4, 4), 6.0)) for stage in stages)
