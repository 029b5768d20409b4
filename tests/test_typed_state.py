"""State has a type and one owner: nothing depends on the names of attributes, modules and axes; nothing is global."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from mpcore import AdamW, Axis, ColumnParallelLinear, RMSNorm
from mpcore import collectives as c
from mpcore.gradients import (
    clip_gradients,
    drop_gradients,
    grad_norm,
    guard_optimizer,
    main_gradients,
    reduce_gradients,
)
from mpcore.gradients.accumulate import is_reduced, mark_reduced
from mpcore.layers.module import ParallelModule, normal
from mpcore.optim import LossScaler
from mpcore.parallel import shard_data_parallel
from mpcore.sharding.declare import Sharding, cut
from tests.equality import close
from tests.pool import mesh, on_ranks


class OwnExperts(ParallelModule):
    """An expert class of the user's own, cut over ep: one matrix an expert, and no name that says so."""

    def __init__(self, ep: Axis) -> None:
        super().__init__()
        self.declare("table", (4, 3), normal(1.0), shard=(cut(4, ep, 0),))


def check_own_experts() -> None:
    m = mesh(tp=2, etp=1, dp=1)
    for ep in (m.ep, Axis(role="ep"), Axis(name="experts", role="ep")):  # of size 1
        declared = OwnExperts(ep).shardings["table"]
        assert declared.data_axis(m) is m.edp
        assert m.tp not in declared.replica_axes(m)
    for other in (Axis(), Axis(name="ep"), Axis(name="ep", role="cp")):  # a printed name says nothing
        declared = OwnExperts(other).shardings["table"]
        assert declared.data_axis(m) is m.data
        assert m.tp in declared.replica_axes(m)


class Norms(nn.Module):
    """A norm whose gradient is pending over tp, and a layer whose gradient is not."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.tp = tp
        self.norm = RMSNorm(3, tp=tp, sequence_parallel=True)
        self.up = ColumnParallelLinear(3, 4, tp=tp, sequence_parallel=True, sequence_dim=0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(c.split(x, self.tp, 0))).square()


FORGOTTEN = (
    r"the gradient of norm.weight is this rank's term of a sum over tp \(2 ranks\): call "
    r"mpcore.gradients.reduce_gradients\(model\) after the last backward"
)


@pytest.mark.parametrize("main", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("how", ["grad_norm", "clip_gradients", "unscale", "AdamW", "guarded"])
@on_ranks(2)
def test_a_forgotten_reduction_is_refused_and_nothing_else(main: bool, how: str) -> None:
    m = mesh(tp=2)
    model = Norms(m.tp)
    if main:
        main_gradients(model)
    torchs_own = torch.optim.SGD(model.parameters(), lr=0.1)
    use = {
        "grad_norm": partial(grad_norm, model, m),
        "clip_gradients": partial(clip_gradients, model, 1.0, 1.0),
        "unscale": partial(LossScaler(m).unscale, model),
        "AdamW": AdamW(model).step,
        "guarded": guard_optimizer(torchs_own, model).step,
    }[how]
    forget = model.zero_grad if not main else partial(drop_gradients, model)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    use()  # no gradients: nothing is missing
    for step in range(3):
        for _ in range(2):
            model(x + step).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=FORGOTTEN):
            use()
        assert all(map(torch.equal, model.parameters(), before))
        reduce_gradients(model)
        if main and how == "guarded":
            with pytest.raises(ValueError, match="is in main_grad, and SGD reads"):
                use()
        else:
            use()
            use()  # again, as after a clip and an unscale, which change the gradients
        if main:  # one more accumulation is unreduced
            model(x).sum().backward()
            with pytest.raises(ValueError, match=FORGOTTEN):
                use()
        forget()
        use()


def check_forgotten_over(zero: int) -> None:
    """Declared sums over data too: plain data parallelism; with ZeRO what `fully_shard` doesn't sum."""
    m = mesh(tp=2, dp=2) if zero else mesh(dp=2)
    model = Norms(m.tp)
    shard_data_parallel(model, m, zero=zero)
    over = r"norm.weight is this rank's term of a sum over " + (r"tp \(2" if zero else r"data \(2")
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        with pytest.raises(ValueError, match=over):
            grad_norm(model, m)
        reduce_gradients(model)
        first = grad_norm(model, m)
        clip_gradients(model, first.item() / 2, first)
        close(grad_norm(model, m), first / 2, "clipped", 1e-6)
        model.zero_grad()


def check_frozen_and_undeclared() -> None:
    m = mesh(tp=2)
    model = Norms(m.tp)
    model.norm.weight.requires_grad_(False)
    own = type("Own", (torch.optim.SGD,), {"zero_grad": lambda self: torch.optim.SGD.zero_grad(self)})
    assert ref(guard_optimizer(own(model.parameters(), lr=0.1), model))() is None, "freed: in no cycle of references"
    optimizer = guard_optimizer(own(model.parameters(), lr=0.1), model)
    for _ in range(2):  # nothing is pending of what is trained
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.norm.weight.requires_grad_(True)  # thawed
    model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(ValueError, match=FORGOTTEN):
        optimizer.step()
    reduce_gradients(model)
    optimizer.step()
    optimizer = guard_optimizer(torch.optim.SGD(model.up.parameters(), lr=0.1), model)
    optimizer.step()
    optimizer.add_param_group({"params": [model.norm.weight]})  # the guard reads the groups anew
    model.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(ValueError, match=FORGOTTEN):
        optimizer.step()


def test_a_copy_of_a_parameter_has_a_gradient_of_its_own():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    mark_reduced(p)
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        other.grad = torch.ones(2)
        assert not is_reduced(other)


@pytest.mark.parametrize(("size", "check", "args"), [
    (2, check_own_experts, ()),
    (2, check_forgotten_over, (0,)), (4, check_forgotten_over, (1,)), (2, check_frozen_and_undeclared, ()),
])  # fmt: skip
def test_state_on_ranks(ranks, size, check, args):
    ranks(size, check, *args)


def test_pending_axes_are_partial_ones_and_those_of_replicas():
    tp, one = Axis(4, 1, role="tp"), Axis(role="tp")
    replicas = cut(8, tp, 0)
    assert Sharding((8,), (replicas,)).pending == ()
    shared = type(replicas)(tp, 0, (((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)))
    assert Sharding((8,), (shared,), (one,)).pending == (tp,)
    assert Sharding((8,), (), (one, tp)).pending == (tp,)


def test_an_optimizer_of_another_models_parameters_is_refused_when_it_is_guarded():
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    stale = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight = nn.Parameter(torch.zeros(2, 2))  # as `materialize` or `parallelize` may do
    with pytest.raises(ValueError, match=r"shape \(2, 2\) in the optimizer is none of the model's: make the optimizer"):
        guard_optimizer(stale, model)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"shape \(3, 3\) in the optimizer is none of the model's"):
        guard_optimizer(both, model)
    assert guard_optimizer(both, [model, other]) is both
    both.step()
    both.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
    with pytest.raises(ValueError, match=r"shape \(4,\) in the optimizer is none of the model's"):
        both.step()
