"""Every schedule against one backward of the dense model; shapes that change; what the engine refuses and records."""

from __future__ import annotations

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from examples.gpt.config import GPTConfig
from examples.gpt.model import build_stages
from mpcore import ColumnParallelLinear, RowParallelLinear, vocab_parallel_cross_entropy
from mpcore._torch import pipelining
from mpcore.pipeline import Pipeline
from mpcore.pipeline.partition import join_stages
from mpcore.pipeline.schedules import (
    COMPUTE,
    MESSAGES,
    NAMES,
    Action,
    Schedule,
    build_schedule,
    default_virtual_stages,
    with_messages,
    write_csv,
)
from mpcore.pipeline.split import backward_inputs, backward_weights
from mpcore.sharding.declarations import add_partial
from tests.equality import close
from tests.gpt_step import CONFIG, TOLERANCE, Run, batch, dense, unsharded
from tests.pool import mesh, on_ranks
from tests.quick import some


def check_schedule(sizes: dict, name: str, micro_batches: int, virtual: int | None = None, **model) -> None:
    run = Run(mesh(**sizes), name, micro_batches, virtual=virtual, layers=8, **model)
    run.compare(run.step(), layers=8, **model)


# `tests/laws/test_steps.py` has each schedule on two stages, with ZeRO, tp, dp, frozen and unused parameters
@pytest.mark.parametrize(("name", "sizes", "micro_batches", "virtual"), [
    *((name, {"pp": 4}, 8, None) for name in NAMES if name not in ("naive", "gpipe")),
    ("interleaved", {"pp": 3}, 4, 2), ("bfs", {"pp": 2}, 2, 3), ("zb", {"pp": 2}, 4, 2), ("zbv", {"pp": 3}, 1, 2),
    ("dualpipev", {"pp": 2}, 4, 2), ("naive", {"pp": 3}, 1, 1), ("interleaved", {}, 4, 3),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [("interleaved", {"pp": 2}, 4, 4), ("zb", {"pp": 4}, 4,
     2), ("gpipe", {"pp": 4}, 2, 1), ("zbv", {}, 2, 2), ("zb", {}, 16, 1)]),
], ids=str)  # fmt: skip
def test_pitfall_14_24_26_30_every_schedule_gives_the_dense_gradients(ranks, name, sizes, micro_batches, virtual):
    """Dropout, unequal token counts: nothing is rescaled, and a tied table counts once in the norm."""
    ranks(torch.Size(sizes.values()).numel(), check_schedule, sizes, name, micro_batches, virtual, tie_embeddings=True)


def check_shapes(sizes: dict, name: str) -> None:
    """PITFALL 35: a buffer of another shape passes in silence on gloo. Also: gradients of steps before stay."""
    run = Run(mesh(**sizes), name, 4)
    want: dict[str, Tensor] = {}
    for rows, length in ((16, 8), (16, 5), (8, 5), (16, 8)):
        loss = run.step(rows, length)
        want_loss, gradients = dense(rows, length)
        close(loss, want_loss, f"loss of {rows} x {length}", TOLERANCE)
        want = {n: g + want[n] if n in want else g for n, g in gradients.items()}
    for n, grad in run.gradients().items():
        close(grad, want[n], f"gradient of {n}", TOLERANCE)


@pytest.mark.parametrize(("name", "sizes"), some(
    ("zbv", {"pp": 2}), of=itertools.product(("1f1b", "interleaved", "zbv"), ({"pp": 2}, {"pp": 2, "dp": 2})),
), ids=str)  # fmt: skip
def test_pitfall_35_lengths_and_batches_may_change_from_step_to_step(ranks, name, sizes):
    ranks(torch.Size(sizes.values()).numel(), check_shapes, sizes, name)


def check_incomplete() -> None:
    """Eleven rows of sixteen: the rest is padded with targets that don't count."""
    run = Run(mesh(pp=2), "1f1b", 4)
    tokens, targets, samples = batch(11)
    run.count = (targets != -100).sum()
    pad = torch.zeros(1, 8, dtype=torch.int64)
    loss = run.pipeline.forward_backward(
        torch.cat([tokens, pad]), torch.cat([targets, pad - 100]), samples=torch.cat([samples, pad[0, :1]])
    )
    run.compare(loss, 11)


def check_forward(sizes: dict, name: str) -> None:
    on = mesh(**sizes)
    whole, run = unsharded(layers=8).eval(), Run(on, name, 8, layers=8)
    for stage in run.stages:
        stage.eval()
    g = torch.Generator().manual_seed(1)
    batches = [torch.randint(31, (b, t), generator=g) for b, t in itertools.product((1, 3), (1, 5, 8))]
    for x, y in zip(batches, run.pipeline.forward(batches), strict=True):
        with torch.no_grad():
            want = whole(x)
        assert (on.pp.rank == run.pipeline.last_rank) == run.stages[-1].last
        close(
            run.pipeline.from_last(y if run.stages[-1].last else torch.zeros_like(want)), want, f"logits of {x.shape}"
        )


@pytest.mark.parametrize("sizes", [{"pp": 2}, pytest.param({"pp": 4}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_pitfall_35_evaluation_passes_through_virtual_stages(ranks, name, sizes):
    ranks(torch.Size(sizes.values()).numel(), check_forward, sizes, name)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear)
        return function(*args, **(kwargs or {}))


def check_products(sizes: dict, name: str, sequence_parallel: bool) -> int:
    on = mesh(**sizes)
    sp = {"tp": on.tp, "sequence_parallel": sequence_parallel}
    stage = nn.Sequential(ColumnParallelLinear(4, 8, **sp), nn.Tanh(), RowParallelLinear(8, 4, **sp))
    pipeline = Pipeline(stage, on, 4, lambda y, t: (y * t).sum(), name)
    x = torch.ones(4, 2, 4)
    pipeline.forward_backward(x, x)  # the dry run
    with Products() as products:
        pipeline.forward_backward(x, x)
    return products.count


@pytest.mark.parametrize(("name", "sizes", "sequence_parallel"), some(
    ("1f1b", {"pp": 2}, False), ("zb", {"pp": 2}, False), ("zb", {"pp": 2, "tp": 2}, True),
    of=itertools.product(("1f1b", "zb"), ({"pp": 2}, {"pp": 2, "tp": 2}), (False, True)),
), ids=str)  # fmt: skip
def test_split_backward_takes_the_products_of_whole_backward(ranks, name, sizes, sequence_parallel):
    """ENGINES.md, trap 1: 6 products a micro-batch; 5 on stage 0, whose input needs no gradient."""
    size = torch.Size(sizes.values()).numel()
    got = ranks(size, check_products, sizes, name, sequence_parallel)
    assert got == [4 * 5] * (size // 2) + [4 * 6] * (size // 2)


def check_main_gradients(name: str, tied: bool) -> None:
    run = Run(mesh(pp=2), name, 8, tie_embeddings=tied, main=True)
    loss = run.step()
    assert all(parameter.grad is None for parameter in run.model.parameters())
    run.compare(loss, tie_embeddings=tied)


def test_the_halves_of_a_backward_serve_outputs_and_inputs_that_do_not_meet():
    """An output that no input leads to shares an operation with one that has an input; another input leads nowhere."""
    x, w, unused = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    shared = w.exp()
    outputs, grads = (x * shared, shared.sin()), torch.randn(2, 3, dtype=torch.float64)
    want = torch.autograd.grad(outputs, (x, w), tuple(grads), retain_graph=True)
    (dx, nothing), deferred = backward_inputs(outputs, tuple(grads), (x, unused))
    assert nothing is None
    assert w.grad is None
    backward_weights(deferred)
    close(dx, want[0], "dx")
    close(w.grad, want[1], "dw")
    assert (deferred.ends, deferred.groups) == ([], []), "nothing is kept"
    z = torch.randn(2, 3, requires_grad=True)
    (dz,), _ = backward_inputs((2 * z.t(),), (torch.ones(3, 2),), (z,))
    assert dz.is_contiguous(), "as a message must be"


def check_csv(path: str) -> None:
    run = Run(mesh(pp=2), "gpipe", 4, virtual=2, ranks=[0, 1, 1, 0], plan=path)
    run.compare(run.step())


def test_a_schedule_from_a_file_runs(ranks, tmp_path):
    """A V of two stages a rank whose backward is whole: no name has this one."""
    (tmp_path / "plan.csv").write_text(
        "0F0,0F1,0F2,0F3,3F0,3F1,,3B0,3F2,3B1,3F3,3B2,3B3,0B0,0B1,0B2,0B3\n"
        "1F0,2F0,1F1,2F1,1F2,2F2,1F3,2F3,2B0,1B0,2B1,1B1,2B2,1B2,2B3,1B3\n"
    )
    ranks(2, check_csv, str(tmp_path / "plan.csv"))


def check_refused(path: str) -> None:
    on = mesh(pp=2)
    module, loss = nn.Linear(2, 2), lambda y, t: y.sum()
    with pytest.raises(ValueError, match="1 micro-batches are fewer than the pp size 2"):
        Pipeline(module, on, 1, loss)
    with pytest.raises(ValueError, match="deadlocks: 1B0, action 0 of rank 1, waits for 1F0"):
        Pipeline(module, on, 1, loss, path + "/deadlock.csv")
    with pytest.raises(ValueError, match=r"^1B0 is missing$"):
        Pipeline(module, on, 1, loss, path + "/missing.csv")
    with pytest.raises(ValueError, match=r"reversed.csv has stage 0 on rank 1: let row 0 begin with it"):
        Pipeline(module, on, 1, loss, path + "/reversed.csv")
    x = torch.ones(4, 2)  # micro-batches may pass in any order
    total = Pipeline(module, on, 2, loss, path + "/unordered.csv").forward_backward(x, x)
    close(total, Pipeline(module, on, 2, loss, "gpipe").forward_backward(x, x), "loss")
    with pytest.raises(ValueError, match=r"names messages, as 0SEND_F0: leave them out"):
        Pipeline(module, on, 2, loss, with_messages(build_schedule("gpipe", 2, 2)))
    for action in (Action("Z", 0, 0), Action("F", 0, -1)):
        rows = [(action, *row) for row in build_schedule("gpipe", 2, 2).ranks]
        with pytest.raises(ValueError, match=r"kinds are F, B, I, W, and numbers begin at 0"):
            Pipeline(module, on, 2, loss, Schedule("own", tuple(rows), 2, 2))
    with pytest.raises(ValueError, match=r"unordered.csv is your own, for 2 micro-batches: build"):
        Pipeline(module, on, 2, loss, path + "/unordered.csv").set_micro_batches(4)
    with pytest.raises(ValueError, match=r"lays 1 stages on rank 0, which holds 2"):
        Pipeline([module, module], on, 2, loss, path + "/good.csv")
    with pytest.raises(ValueError, match="is for 2 ranks and 2 micro-batches, the pipeline has 2 and 3"):
        Pipeline(module, on, 3, loss, build_schedule("gpipe", 2, 2))
    good = pipelining.with_messages
    with (
        mock.patch.object(pipelining, "with_messages", lambda *args: [good(*args)[0], good(*args)[1][1:]]),
        pytest.raises(ValueError, match=r"^1RECV_F0 is missing: the schedule names"),  # PITFALL 35
    ):
        Pipeline(module, on, 5, loss, "gpipe")
    with pytest.raises(ValueError, match="ranks 0 and 1 disagree about the pipeline"):
        Pipeline(module, on, 4, loss, "gpipe" if on.pp.rank else "1f1b")
    with pytest.raises(ValueError, match="make the Pipeline with trace=True"):
        Pipeline(module, on, 2, loss, path + "/good.csv").recorded()
    with pytest.raises(ValueError, match="shared embedding on the pipeline ranks 1 and 0"):
        build_stages(
            GPTConfig(**{**CONFIG, "tie_embeddings": True}), on, [range(4), range(4, 8)], [1, 0], device="meta"
        )


def test_what_cant_run_is_refused_on_every_rank(ranks, tmp_path):
    write_csv(build_schedule("gpipe", 2, 2), tmp_path / "good.csv")
    (tmp_path / "deadlock.csv").write_text("0F0,0B0\n1B0,1F0\n")
    (tmp_path / "missing.csv").write_text("0F0,0B0\n1F0\n")
    (tmp_path / "reversed.csv").write_text("1F0,1B0\n0F0,0B0\n")
    (tmp_path / "unordered.csv").write_text("0F0,0F1,0B1,0B0\n1F1,1F0,1B0,1B1\n")
    ranks(2, check_refused, str(tmp_path))


def check_half_tied() -> None:
    """A table on the first and the last stage whose gradient the one in between would be waited for to sum."""
    on = mesh(pp=3)
    stage = nn.Linear(2, 2) if on.pp.rank == 1 else nn.Embedding(2, 2)
    if on.pp.rank != 1:
        add_partial(stage, "weight", on.pp)
    with pytest.raises(ValueError, match=r"pending over pp, which all .* \(of shape \(2, 2\): 1 and None\)"):
        Pipeline(stage, on, 3, lambda y, t: y.sum())


def check_thawed(schedule: str, rank: int) -> None:
    on = mesh(pp=2)
    run = Run(on, schedule, 4)
    run.step()
    frozen = list(run.model.parameters()) if on.pp.rank == rank else []
    for wanted in (False, False, True):
        for parameter in frozen:
            parameter.requires_grad_(wanted)
        if wanted:
            run.step()
            break
        with pytest.raises(ValueError, match="frozen or freed after the first step: make a new Pipeline"):
            run.step()
        assert not any(parameter.requires_grad for parameter in frozen)


class Own(nn.Module):
    """Stage `i` of a model of nobody's; what it returns and how is the case's."""

    def __init__(self, case: str, i: int, last: int) -> None:
        super().__init__()
        self.case, self.i, self.last, self.calls = case, i, i == last, 0
        self.l, self.m, self.e = (layer.double() for layer in (nn.Linear(6, 6), nn.Linear(6, 6), nn.Embedding(11, 6)))
        self.norm = nn.BatchNorm1d(6).double()
        self.drop = nn.Dropout(0.0 if case != "dropout" else 0.5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        self.calls += 1
        self.seen += len(x)
        return getattr(self, self.case)(x, *more)

    def plain(self, x: Tensor) -> Tensor:
        return torch.tanh(self.l(x))

    def aux(self, x: Tensor, before: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """A loss beside the activation, in training alone."""
        return self.plain(x), before + (self.m(x).square().mean() if self.training else x.new_zeros(()))

    def more(self, x: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
        """An output more, in training alone."""
        return self.plain(x), *before, *([self.m(x).square().mean()] if self.training else [])

    def stats(self, x: Tensor) -> Tensor:
        return self.plain(self.norm(x))

    def places(self, x: Tensor, places: Tensor | None = None, positive: Tensor | None = None) -> Any:
        """Integers that are places in a table, and bools, go on beside the activation."""
        if places is None:
            return self.plain(x), torch.full((len(x),), 7, dtype=torch.int16), x > 0
        h = self.plain(x) + self.e(places.long()) * (0.5 if positive is None else positive)
        return h if self.last else (h, places, h > 0)

    def many(self, x: Tensor, *others: Tensor) -> Any:
        """More outputs than anybody expects, and one without elements."""
        return self.plain(x), *(others or [x[:, :0], *x.new_zeros(99, 1, 2, 3)])

    def turned(self, x: Tensor) -> Tensor:
        x = x.t() if self.i else x
        return self.plain(x) if self.last else self.plain(x).t()

    def summed(self, x: Tensor) -> Tensor:
        return self.plain(x).sum(0, keepdim=True).expand(len(x), -1) if self.i else self.plain(x)

    def split(self, x: Tensor) -> Tensor:
        """A middle stage whose input needs no gradient, for all that comes before: fine-tuning's."""
        return self.plain(x.detach())

    def whole(self, x: Tensor) -> Tensor:
        if self.i:
            return self.plain(x)
        with torch.no_grad():
            return self.plain(x)

    def ids(self, x: Tensor) -> Tensor:
        return (x > 0).long() if self.i == 0 else self.plain(self.e(x[:, 0])) if self.i == 1 else self.plain(x)

    def penalty(self, x: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
        """Outputs that depend on weights alone, of which one is used with the input as well."""
        return self.plain(x), *before, self.m.weight.square().sum() + self.l.weight.square().sum()

    def shared(self, x: Tensor) -> Tensor:
        """A layer that is used twice, with another between."""
        return self.l(torch.tanh(self.m(self.plain(x))))

    def late(self, x: Tensor) -> Tensor:
        """A weight that joins two layers, after weights that each has alone."""
        table = self.e.weight[:6]
        return torch.tanh(torch.addmm(self.l.bias, x, table)) + torch.tanh(torch.addmm(self.m.bias, x.sin(), table))  # type: ignore

    def heads(self, x: Tensor, *before: Tensor) -> tuple[Tensor, Tensor]:
        """Two outputs, of which one is what the other's backward needs."""
        h = torch.sigmoid(self.plain(x))
        return h, torch.tanh(self.m(h)) + sum(before)

    def passed(self, x: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """An activation that goes through untouched, and views of one another."""
        h = self.plain(x) + (0 if first is None else first)
        return h, x if first is None else first

    def view(self, x: Tensor) -> Tensor:
        return torch.stack([self.plain(x), x])[0]

    def named(self, x: Tensor) -> Any:
        return {"h": self.plain(x)} if self.last else self.plain(x)


def own_loss(out: Any, target: Tensor) -> Tensor:
    out = out["h"] if isinstance(out, dict) else out
    h, *more = out if isinstance(out, tuple) else (out,)
    extra = sum((0.01 * (i + 1) * x.square().sum() for i, x in enumerate(more)), 0.0)
    return ((h - target).square().sum() + extra).reshape(1)[0]  # a view


def run_dense(stages: list[nn.Module], x: Tensor) -> Any:
    out: Any = (x,)
    for stage in stages:
        out = stage(*(out if isinstance(out, tuple) else (out,)))
    return out


def check_own(case: str, name: str, ranks: int = 2) -> None:
    on = mesh(pp=ranks)
    plan = build_schedule(name, ranks, 4, default_virtual_stages(name))
    torch.manual_seed(0)
    whole = [Own(case, i, plan.stages - 1) for i in range(plan.stages)]
    if case == "plain":
        whole[0].requires_grad_(False)
    mine = [copy.deepcopy(whole[i]) for i in plan.stages_of(on.pp.rank)]
    x, target = torch.randn(2, 8, 6, dtype=torch.float64)
    want = []
    for a, b in zip(x.chunk(4), target.chunk(4), strict=True):
        want.append(own_loss(run_dense(whole, a), b))  # type: ignore
        want[-1].backward()
    calls = []

    def loss(out: Any, target: Tensor) -> Tensor:
        calls.append(1)
        return own_loss(out, target)

    pipeline = Pipeline(mine, on, 4, loss, plan)
    close(pipeline.forward_backward(x, target), sum(want).detach(), f"loss of {case}, {name}", TOLERANCE)  # type: ignore
    assert len(calls) in (0, 4)
    for i, stage in zip(plan.stages_of(on.pp.rank), mine, strict=True):
        assert stage.calls == 4
        for (what, p), q in zip(stage.named_parameters(), whole[i].parameters(), strict=True):
            assert p.grad is None or p.requires_grad, f"{case}, {name}: {what} of stage {i} is frozen"
            got, grad = (torch.zeros_like(p) if grad is None else grad for grad in (p.grad, q.grad))
            close(got, grad, f"{case}, {name}: {what} of stage {i}", TOLERANCE)
        for p, q in zip(stage.buffers(), whole[i].buffers(), strict=True):
            close(p.double(), q.double(), f"{case}, {name}: a buffer of stage {i}", TOLERANCE)
    for stage in (*whole, *mine):
        stage.eval()
    for a, y in zip(x.chunk(2), list(pipeline.forward(list(x.chunk(2)))), strict=True):
        if on.pp.rank == pipeline.last_rank:
            want_y = run_dense(whole, a)
            assert type(y) is type(want_y)
            pairs = zip(*(z if isinstance(z, tuple) else (z,) for z in (y, want_y)), strict=True)
            for one, other in () if isinstance(y, dict) else pairs:
                close(one, other, f"evaluation of {case}, {name}", TOLERANCE)


OWN = ("aux", "more", "stats", "places", "many", "turned", "summed", "named")
SPLIT = ("plain", "split", "whole", "ids", "penalty", "shared", "late", "heads", "passed", "view")


@pytest.mark.parametrize(("name", "cases"), [
    pytest.param("1f1b", OWN, id="1f1b"), pytest.param("zbv", OWN + SPLIT, id="zbv"),
    *(pytest.param(n, OWN + SPLIT, id=n, marks=pytest.mark.slow) for n in ("zb", "dualpipev", "gpipe", "interleaved")),
])  # fmt: skip
@on_ranks(2)
def test_own_models_get_the_dense_gradients_and_are_called_once_a_micro_batch(
    cases: tuple[str, ...], name: str
) -> None:
    for case in cases:
        check_own(case, name)


@pytest.mark.parametrize("case", ["aux", "more", "places", "named"])
def test_several_stages_on_one_rank_pass_tuples(case):
    check_own(case, "interleaved", 1)


class Broken(Own):
    """Returns something else in the third micro-batch, or something that can't be sent at all."""

    def grad(self, x: Tensor) -> Any:
        return self.plain(x), self.m(x).sum() if self.calls == 3 else x.new_zeros(())

    def shape(self, x: Tensor) -> Any:
        return self.plain(x)[:, : 5 if self.calls == 3 else 6]

    def count(self, x: Tensor) -> Any:
        return (self.plain(x), x.sum()) if self.calls == 3 else self.plain(x)

    def dict(self, x: Tensor) -> Any:
        return {"h": self.plain(x)}

    def none(self, x: Tensor) -> Any:
        return self.plain(x), None

    def nothing(self, x: Tensor) -> Any:
        return ()

    def crash(self, x: Tensor) -> Any:
        raise IndexError("no such place")

    def late(self, x: Tensor) -> Any:
        return self.plain(x) if self.calls < 3 else self.crash(x)


class End(nn.Linear):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] == 6 else x


BROKEN = {
    "grad": r"output 1 of stage 0 in micro-batch 2 is in need of a gradient, .* was in need of none",
    "shape": r"output 0 of stage 0 in micro-batch 2 is \(2, 5\) of torch.float64, in its first .* was \(2, 6\)",
    "count": r"stage 0 returns 2 outputs in micro-batch 2, 1 in its first forward",
    "dict": r"the output of stage 0 in micro-batch 0 is a dict: what goes to the next stage is a tensor or a tuple",
    "none": r"output 1 of stage 0 in micro-batch 0 is a NoneType",
    "nothing": r"stage 0 returns nothing in micro-batch 0", "crash": r"no such place", "late": r"no such place",
}  # fmt: skip


LOSSES = {
    "NoneType": lambda y, t: None, "float": lambda y, t: 1.0, "tuple": lambda y, t: (y.sum(), 1),
    r"a tensor of shape \(2, 6\)": lambda y, t: y * t, "a tensor that needs no gradient": lambda y, t: y.sum().detach(),
}  # fmt: skip


def check_losses(sizes: dict, name: str) -> None:
    on, x = mesh(**sizes), torch.ones(8, 6)
    for text, loss in LOSSES.items():
        with pytest.raises(ValueError, match=f"the loss is .*{text}: return a tensor of one number"):
            Pipeline(nn.Linear(6, 6), on, 4, loss, name).forward_backward(x, x)
    with pytest.raises(ValueError, match="no parameter that it is made of requires one, so there is nothing to train"):
        Pipeline(nn.Linear(6, 6).requires_grad_(False), on, 4, lambda y, t: y.sum(), name).forward_backward(x, x)
    shapes = itertools.cycle([(), (1,), (1, 1)])
    pipeline = Pipeline(nn.Linear(6, 6), on, 4, lambda y, t: y.sum().view(next(shapes)), name)
    assert pipeline.forward_backward(x, x).shape == ()
    with pytest.raises(ValueError, match="mask is a NoneType: arguments are tensors with one row a sample"):
        pipeline.forward_backward(x, x, mask=None)


def test_what_is_no_loss_and_no_argument_is_refused_on_every_rank(ranks):
    ranks(2, check_losses, {"pp": 2}, "1f1b")
    ranks(2, check_losses, {"pp": 2}, "zb")
    check_losses({}, "1f1b")


def check_broken_forward() -> None:
    on, x = mesh(pp=2), torch.ones(2, 6, dtype=torch.float64)
    for case in ("dict", "nothing", "crash"):
        stage = End(6, 6).double() if on.pp.rank else Broken(case, 0, 1)
        with pytest.raises(
            (ValueError, IndexError),
            match=f"{BROKEN[case]}".replace("micro-batch 0", "batch 0") if on.pp.rank == 0 else "failed on rank 0",
        ):
            list(Pipeline(stage, on, 4, own_loss).forward([x]))


@pytest.mark.parametrize("name", ["1f1b", "zbv", pytest.param("interleaved", marks=pytest.mark.slow)])
@on_ranks(2)
def test_micro_batches_of_a_step_may_have_different_shapes(name: str) -> None:
    """Micro-batches of other lengths and numbers of samples, one of them of a single token: the dense losses' sum."""
    run, want = Run(mesh(pp=2), name, 4), unsharded()
    shapes = [(2, 8), (1, 3), (3, 8), (1, 1)]
    cut = [[t[:rows, :length].contiguous() for t in batch(4)[:2]] + [batch(4)[2][:rows]] for rows, length in shapes]
    for _ in range(2):
        tokens, targets, samples = zip(*cut, strict=True)
        total = run.pipeline.forward_backward(list(tokens), list(targets), samples=list(samples))
        losses = [vocab_parallel_cross_entropy(want(x, s), y, reduction="sum") for x, y, s in cut]
        sum(losses).backward()  # type: ignore[union-attr]
        close(total, sum(losses).detach(), "loss", TOLERANCE)  # type: ignore[union-attr]
        cut = cut[::-1]
    for parameter_name, got in run.gradients().items():
        close(got, want.get_parameter(parameter_name).grad, parameter_name, TOLERANCE)


def check_broken(name: str) -> None:
    on = mesh(pp=2)
    for case, text in BROKEN.items():
        stage = End(6, 6).double() if on.pp.rank else Broken(case, 0, 1)
        pipeline = Pipeline(stage, on, 4, lambda y, t: (y - t[:, : y.shape[1]]).square().sum(), name)
        x = torch.ones(8, 6, dtype=torch.float64)
        with pytest.raises((ValueError, IndexError), match=text):
            pipeline.forward_backward(x, x)


def part(**layers: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleDict(layers), "act": nn.Tanh()})


def test_stages_join_under_the_models_names_and_clashes_are_refused():
    one, two, four = (nn.Linear(2, 2) for _ in range(3))
    joined = join_stages([part(one=one, two=two), part(four=four)])
    names = [f"layers.{layer}.{kind}" for layer in ("one", "two", "four") for kind in ("weight", "bias")]
    assert [name for name, _ in joined.named_parameters()] == names
    assert dict(joined.named_parameters())["layers.four.bias"] is four.bias
    with pytest.raises(ValueError, match="2 stages of a rank hold a Linear four each: give them one module"):
        join_stages([part(four=four), part(four=nn.Linear(2, 2))])
    shared = part(one=one)
    assert join_stages([shared, shared]).get_submodule("layers.one") is one
    parts = [part(one=one), part(two=two)]
    for each in parts:
        each.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="2 stages hold a parameter or buffer scale each"):
        join_stages(parts)
    parts[1].scale = parts[0].scale
    assert join_stages(parts).scale is parts[0].scale


def check_recorded(name: str) -> None:
    on = mesh(pp=2)
    stages = [nn.Linear(2, 2) for _ in range(default_virtual_stages(name))]
    pipeline, x = Pipeline(stages, on, 4, lambda y, t: (y * t).sum(), name, trace=True), torch.ones(4, 2)
    for _ in range(2):
        pipeline.forward_backward(x, x)
        spans = pipeline.recorded()
        if on.pp.rank == 0:
            for rank, actions in enumerate(pipeline.plan.ranks):
                ran = [s.action for s in spans if s.rank == rank]
                assert [a for a in ran if a.kind in COMPUTE] == [a for a in actions if a.kind in COMPUTE]
                for kinds in (MESSAGES, [f"exposed {kind}" for kind in MESSAGES]):  # from post to arrival, and waits
                    assert sorted(a[1:] for a in ran if a.kind in kinds) == sorted(
                        a[1:] for a in pipeline.executor.plan.ranks[rank] if a.kind in MESSAGES
                    )
            assert all(span.start <= span.end for span in spans)
    assert pipeline.recorded() == []


@pytest.mark.parametrize(("size", "check", "args"), [
    (3, check_half_tied, ()), (2, check_incomplete, ()), (2, check_broken_forward, ()),
    (2, check_broken, ("1f1b",)), (2, check_broken, ("zb",)), (2, check_thawed, ("1f1b", 0)),
    (2, check_thawed, ("zb", 1)), (2, check_main_gradients, ("zb", False)), (2, check_main_gradients, ("zbv", True)),
    (2, check_main_gradients, ("1f1b", True)), (2, check_recorded, ("zbv",)),
])  # fmt: skip
def test_pitfall_24_batches_modules_and_refusals_on_ranks(ranks, size, check, args):
    ranks(size, check, *args)
