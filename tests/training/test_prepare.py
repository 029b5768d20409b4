"""The front door: one order, the same numbers on every layout, and every wrong order refused in words."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.checkpoint import latest
from mpcore.collectives import gather, split
from mpcore.experimental import LocalUpdates
from mpcore.layers.module import ParallelModule, uniform
from mpcore.pipeline import partition
from mpcore.sharding import full_state_dict
from mpcore.sharding.declare import cut
from mpcore.sharding.local import local_tensor
from tests.pool import mesh, on_ranks
from tests.quick import some

V, D, T, LAYERS = 12, 8, 6, 4
SAMPLES = 8
STEPS = 3


class Block(nn.Module):
    """A block whose norm has a gradient that is pending over tp under sequence parallel."""

    def __init__(self, tp: mp.Axis, sequence_parallel: bool, on: mp.Mesh) -> None:
        super().__init__()
        self.moe = mp.ParallelMoE(D, D, 4, 2, ep=on.ep, data=on.data) if on.ep.size > 1 else nn.Identity()
        sp = {"tp": tp, "sequence_parallel": sequence_parallel}
        self.norm = mp.LayerNorm(D, **sp)
        self.up = mp.ColumnParallelLinear(D, 2 * D, **sp)
        self.down = mp.RowParallelLinear(2 * D, D, **sp)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x + self.down(torch.tanh(self.up(self.norm(x)))))


class Stage(nn.Module):
    """The blocks of one pipeline rank, with the embedding and the head at the ends."""

    def __init__(self, on: mp.Mesh, sequence_parallel: bool = False) -> None:
        super().__init__()
        mine = partition([1.0] * LAYERS, on.pp.size)[on.pp.rank]
        sp = {"tp": on.tp, "sequence_parallel": sequence_parallel}
        self.first, self.last = mine.start == 0, mine.stop == LAYERS
        if self.first:
            self.embedding = mp.VocabParallelEmbedding(V, D, **sp)
        self.blocks = nn.ModuleDict({str(i): Block(on.tp, sequence_parallel, on) for i in mine})
        if self.last:
            self.norm = mp.LayerNorm(D, **sp)
            self.head = mp.ColumnParallelLinear(D, V, bias=False, **sp)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def start(sizes: dict, *, dtype: torch.dtype = torch.float64, sequence_parallel: bool = False, **told: Any) -> mp.Run:
    on = mesh(**sizes)
    with torch.device("meta"):
        model = Stage(on, sequence_parallel).to(dtype)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return mp.vocab_parallel_cross_entropy(logits, target, tp=on.tp, vocab_size=V, reduction="sum")

    given = {"seed": 3, "micro_batches": 2, "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)}
    return mp.prepare(model, on, **{"blocks": model.blocks, "loss": loss, **given, **told})


def batch(step: int, share: range) -> tuple[Tensor, Tensor]:
    """Samples with different numbers of ignored targets."""
    draws = torch.Generator().manual_seed(step)
    text = torch.randint(V, (SAMPLES, T + 1), generator=draws)[share.start : share.stop]
    target = text[:, 1:].clone()
    for row, sample in enumerate(share):
        target[row, : sample % T] = -100
    return text[:, :-1], target


def train(sizes: dict, folder: str = "", **told: Any) -> dict[str, Any]:
    run = start(sizes, **told)
    results = []
    while run.step < STEPS:
        if folder and run.step == 2:
            run.save(folder)
            run = start(sizes, **{**told, "seed": 7})
            run.load(latest(folder, run.mesh) or "")
        mean = run.forward_backward(*batch(run.step, run.share(SAMPLES)))
        norm = run.clip_gradients(0.5)
        results.append(run.optimizer_step(lr=0.1 / (run.step + 1)))
        assert results[-1][:2] == (float(mean), float(norm))
    with run.parameters() as model:
        state = full_state_dict(model)
    value = run.evaluate([batch(99, run.share(SAMPLES))])
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "val": value, "state": state}


def by_hand() -> dict[str, Any]:
    """The same in plain torch, but for the model: one batch, the mean over its tokens, clip, step."""
    run = start({}, micro_batches=1)  # for its first values alone
    model, losses, norms = run.model, [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def mean(step: int) -> Tensor:
        x, target = batch(step, range(SAMPLES))
        return nn.functional.cross_entropy(model(x).flatten(0, 1), target.flatten())

    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        loss = mean(step)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm(grads)))
        torch._foreach_mul_(grads, min(0.5 / norms[-1], 1.0))  # torch's clip_grad_norm_ adds 1e-6 to the norm
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return {"losses": losses, "norms": norms, "val": float(mean(99)), "state": model.state_dict()}


LAYOUTS: dict[str, tuple[dict, dict]] = {  # tests/laws has all others; here with clipping, rates and an evaluation
    "compiled": ({}, {"compile": mp.Compile("aot_eager"), "recompute": "selective"}),
    "dp 2, offload": ({"dp": 2}, {"data": mp.Zero(0), "offload": mp.Offload(True, True, True)}),
    "ZeRO-3 x tp, recompute": ({"dp": 2, "tp": 2}, {"data": mp.Zero(3), "recompute": mp.Recompute("full", every=2)}),
    "ZeRO-2 x tp, sequence parallel": ({"dp": 2, "tp": 2}, {"data": mp.Zero(2), "sequence_parallel": True}),
    "HSDP": ({"dp": 4}, {"data": mp.Zero(3, replicate=2), "micro_batches": 1}),
    "pp 2 x dp 2, zb": ({"pp": 2, "dp": 2}, {"schedule": "zb", "data": mp.Zero(2)}),
}


@pytest.mark.parametrize("name", some(*(name for name in LAYOUTS if name != "HSDP"), of=LAYOUTS))  # BRANCHED has it
def test_every_layout_trains_as_plain_torch_does(ranks, tmp_path, name):
    """Steps before and after a checkpoint, of one process and of the layout in turn."""
    sizes, told = LAYOUTS[name]
    want = by_hand()
    for got in ranks(math.prod(sizes.values()), train, sizes, folder=str(tmp_path), **told):
        for key in ("losses", "norms", "val"):
            assert got[key] == pytest.approx(want[key], rel=1e-9), key
        for key, value in got["state"].items():
            torch.testing.assert_close(value, want["state"][key], rtol=0, atol=1e-8)


class BranchedBlock(nn.Module):
    """A layer that is always used, and four that some samples of some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.some = nn.Linear(D, D), nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, use: Tensor) -> Tensor:
        x = x + self.always(x).tanh()
        for branch, rows in zip(self.some, use.T, strict=True):
            x = x + rows[:, None] * branch(x).tanh() if rows.any() else x
        return x


class Branches(nn.Module):
    def __init__(self, mine: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): BranchedBlock() for i in mine})

    def forward(self, x: Tensor, use: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x, use)
        return x


def branched_run(sizes: dict, **told: Any) -> mp.Run:
    on = mesh(**sizes)
    with torch.device("meta"):
        model = Branches(partition([1.0] * LAYERS, on.pp.size)[on.pp.rank]).double()
    given = {"blocks": model.blocks, "loss": lambda y, target: (y - target).square().sum(), "micro_batches": 2}
    make = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    return mp.prepare(model, on, optimizer=lambda model: make(model.parameters()), **given, **told)


def branched_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Branches are used from step 2, in every second step, in the first, and never; each by one sample."""
    x, target = torch.randn(2, SAMPLES, D, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    use = torch.zeros(SAMPLES, 4, dtype=torch.float64)
    use[[1, 6, 3], [0, 1, 2]] = torch.tensor([step >= 2, step % 2, step == 0]).double()
    return x, target, use


def freeze(model: nn.Module, step: int) -> None:
    for name, p in model.named_parameters():
        if "blocks.1.always" in name:
            p.requires_grad_(step not in (1, 3))


def train_branches(sizes: dict, save: str, load: str = "", frozen: bool = False, **told: Any) -> dict[str, Any]:
    run = branched_run(sizes, **told)
    if load:
        run.load(load)
    losses, mine = [], slice(run.share(SAMPLES).start, run.share(SAMPLES).stop)
    while run.step < 5:
        x, target, use = (each[mine] for each in branched_batch(run.step))
        freeze(run.model, run.step) if frozen else None
        losses.append(float(run.forward_backward(x, target, use=use, tokens=SAMPLES)))
        run.optimizer_step()
        if run.step == 3 and not load:
            run.save(save)
    with run.parameters() as model:
        held = sum(local_tensor(p).numel() for p in model.parameters())
        return {"losses": losses, "state": full_state_dict(model), "held": held}


BRANCHED: dict[str, tuple[dict, dict]] = {
    "HSDP, ZeRO-2": ({"dp": 4}, {"data": mp.Zero(2, replicate=2)}),
    "pp 2 x dp 2": ({"pp": 2, "dp": 2}, {"data": mp.Zero(3)}),
    "pp 2 x dp 2, zb": ({"pp": 2, "dp": 2}, {"data": mp.Zero(1), "schedule": "zb"}),
    "frozen in two steps, ZeRO-0": ({"dp": 2}, {"data": mp.Zero(0), "frozen": True}),
    "frozen in two steps, ZeRO-3": ({"dp": 2}, {"data": mp.Zero(3), "frozen": True}),
}


@pytest.mark.parametrize("name", some("HSDP, ZeRO-2", "pp 2 x dp 2, zb", "frozen in two steps, ZeRO-3", of=BRANCHED))
def test_pitfall_52_a_parameter_without_a_gradient_stays_as_it_is_on_every_stage_and_after_a_resume(
    ranks, tmp_path, name
):
    sizes, told = BRANCHED[name]
    run, losses = branched_run({}), []
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        x, target, use = branched_batch(step)
        freeze(run.model, step) if "frozen" in name else None
        loss = (run.model(x, use) - target).square().sum() / SAMPLES
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state, (here, there) = run.model.state_dict(), (str(tmp_path / "here"), str(tmp_path / "there"))
    frozen = "frozen" in name
    train_branches({}, here, frozen=frozen)
    size = math.prod(sizes.values())
    found = [
        *ranks(size, train_branches, sizes, there, **told),
        *ranks(size, train_branches, sizes, "", mp.checkpoint.step_path(here, 3), **told),
        train_branches({}, "", mp.checkpoint.step_path(there, 3), frozen=frozen),
    ]
    if "HSDP" in name:  # each of two replicas holds the model once
        assert [got["held"] for got in found[:4]] == [sum(x.numel() for x in state.values()) // 2] * 4
    for got in found:
        torch.testing.assert_close(got["losses"], losses[-len(got["losses"]) :], rtol=1e-12, atol=0)
        torch.testing.assert_close(got["state"], {name: state[name] for name in got["state"]}, rtol=0, atol=1e-12)


def step_of(run: mp.Run, *calls: str) -> None:
    x, target = batch(0, run.share(SAMPLES))
    does = {
        "clip_gradients": lambda: run.clip_gradients(1.0), "forward_backward": lambda: run.forward_backward(x, target),
        "save": lambda: run.save("nowhere"), "load": lambda: run.load("nowhere"),
        "evaluate": lambda: run.evaluate([(x, target)]), "nan": lambda: run.optimizer_step(lr=math.nan),
        "clip to nan": lambda: run.clip_gradients(math.nan),
        "positions": lambda: run.forward_backward(x, target, tokens=x),
    }  # fmt: skip
    for call in calls:
        does.get(call, getattr(run, call, None))()


@pytest.mark.parametrize(("calls", "words"), [
    (["optimizer_step"], "optimizer_step without gradients: the order of a step is forward_backward, clip_gradients"),
    (["clip_gradients"], "clip_gradients without gradients: the order"),
    (["finish_gradients"], "without gradients: the order"),
    (["forward_backward"] * 2, "forward_backward while gradients wait .*to accumulate, prepare"),
    (["forward_backward", "clip_gradients", "clip_gradients"], "finished or clipped already"),
    (["forward_backward", "save"], "save while gradients wait for optimizer_step"),
    (["forward_backward", "clip_gradients", "load"], "load while gradients wait"),
    (["forward_backward", "evaluate"], "evaluate while gradients wait"),
    (["forward_backward", "optimizer_step", "optimizer_step"], "optimizer_step without gradients"),
    (["positions"], r"tokens has shape \(8, 6\), and is the step's number"),
    (["forward_backward", "nan"], "lr is nan in step 0"), (["forward_backward", "clip to nan"], "max_norm is nan"),
], ids=lambda value: "-".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_a_wrong_order_is_refused_with_the_right_one(calls, words):
    run = start({})
    step_of(run, *calls[:-1])
    with pytest.raises(ValueError, match=words):
        step_of(run, calls[-1])


def test_a_step_can_be_given_up_after_a_forward_that_raised():
    run, other = start({}), start({})
    x, target = batch(0, range(SAMPLES))
    with pytest.raises(ValueError, match="don't have the same tokens"):
        run.forward_backward(x, target[:, :2])
    with pytest.raises(ValueError, match=r"after a forward_backward that raised: call drop_gradients\(\) on every"):
        run.forward_backward(x, target)
    run.drop_gradients()
    for each in (run, other):
        step_of(each, "forward_backward", "optimizer_step")
    for p, q in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("made", "words"), [
    (partial(mp.Zero, 4), "zero stage 4 is none of 0, 1, 2 and 3"),
    (partial(mp.Precision, "int8"), "precision 'int8' is none of float64, float32, bfloat16, float16"),
    (partial(mp.Precision, "fp8"), r"'fp8' is none of .*; for FP8 write Precision\('bfloat16', fp8=True\)"),
    (partial(mp.Recompute, "some"), "recompute kind 'some' is unknown: it is one of 'none', 'selective', 'full'"),
    *((partial(mp.Recompute, budget=budget, example=of), f"recompute budget {budget} {said}") for budget, of, said in (
        (1.5, None, "is not above 0 and at most 1"), (0.5, None, "needs example="), (0.0, len, "is not above 0"))),
    (partial(mp.Compile, "fast"), "compile backend 'fast' is none of torch's"),
    (partial(LocalUpdates, 2, fragments=3), "fragments 3 is not from 1 to the 2 steps between merges"),
    (partial(LocalUpdates, lr=0.0), "the outer lr 0.0 is not above 0"), (partial(LocalUpdates, 0), "every 0 is not"),
    (partial(LocalUpdates, lr=math.inf), "the outer lr inf is not above 0, or the momentum 0.9 not from"),
    (partial(LocalUpdates, momentum=1.0), "or the momentum 1.0 not"),
    *((partial(mp.Zero, stage), f"zero stage {stage} is none of") for stage in (-1, 1.5)),
])  # fmt: skip
def test_a_policy_refuses_what_it_cannot_mean(made, words):
    with pytest.raises(ValueError, match=words):
        made()


MADE = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
PARAMETERS = mp.Offload(parameters=True)
REFUSED: dict[int, list[tuple[dict[str, int], dict[str, Any], str]]] = {  # by the number of ranks
    1: [
        ({}, {"observers": [LocalUpdates()]}, r"worlds=1\) with Local.*one worker merges with other jobs"),
        ({}, {"data": 3}, r"data is 3, which is no Zero: write data=Zero\(3\)"),
        ({}, {"data": None}, "data is None, which is no Zero"),
        ({}, {"offload": True}, "offload is True, which is no Offload"),
        ({}, {"observers": [2]}, "observers holds 2, not an Observer"),
        ({}, {"compile": True}, r"write compile=Compile\(\)"),
        ({}, {"optimizer": torch.optim.AdamW}, r"optimizer=lambda model: AdamW\(model.parameters\(\), lr"),
        ({}, {"optimizer": partial(torch.optim.SGD, lr=0.1)}, r"optimizer=lambda model: SGD\(model.parameters"),
        ({}, {"optimizer": MADE}, r"optimizer is a SGD that exists already, .*=lambda model: SGD"),
        ({}, {"optimizer": None}, "optimizer is None"),
        ({}, {"optimizer": callable}, r"optimizer\(model\) returned True"),
        ({}, {"blocks": [nn.Linear(2, 2)]}, "blocks holds a Linear that is no submodule of the model"),
        ({}, {"blocks": ["0"]}, "blocks holds a str"),
        ({}, {"blocks": [], "recompute": "full"}, "blocks is empty, and recompute would do nothing"),
        ({}, {"initialize": False}, r'initialize=False keeps values, and .* is on "meta", without one'),
    ],
    2: [
        ({"dp": 2}, {"offload": PARAMETERS}, r"Offload\(parameters=True\) with Zero\(stage=1\) on 2"),
        ({"dp": 2}, {"data": mp.Zero(3, replicate=2)}, "replicate 2 with zero 3 on 2 data ranks leaves"),
        ({"pp": 2}, {"offload": PARAMETERS, "schedule": "zb"}, "second half of a split backward"),
        ({"worlds": 2}, {}, r"build_mesh\(worlds=2\) without an observer that joins their models"),
        ({"dp": 2}, {"seed": None}, r"ranks 0 and 1 disagree about the arguments of prepare \(seed: 0 and 1\)"),
        ({"pp": 2}, {"blocks": [], "compile": mp.Compile("eager"), "offload": PARAMETERS, "data": mp.Zero(0)},
         "blocks is empty, and offload of parameters and compile would do nothing"),
        ({"pp": 2}, {"optimizer": lambda model: torch.optim.SGD(  # a frozen stage
            list(model.parameters())[: torch.distributed.get_rank()])}, "optimizer got an empty parameter list"),
    ],
    4: [
        ({"pp": 2, "worlds": 2}, {"observers": [LocalUpdates(2, fragments=2)]},
         r"2 fragments on 2 pipeline ranks need the blocks' numbers")
    ],
}  # fmt: skip


def check_refused(size: int) -> None:
    for sizes, told, words in REFUSED[size]:
        with pytest.raises(ValueError, match=words):
            start(sizes, **(told if told.get("seed", 0) is not None else {"seed": mesh(**sizes).dp.rank}))


@pytest.mark.parametrize("size", REFUSED)
def test_policies_that_do_not_go_together_are_refused_on_every_rank(ranks, size):
    ranks(size, check_refused, size)


def test_float64_needs_a_model_in_float64():
    told = {"loss": None, "optimizer": mp.AdamW, "initialize": False, "precision": "float64"}
    with pytest.raises(ValueError, match=r"precision is float64, but weight is torch.float32: .*model.double\(\)"):
        mp.prepare(nn.Linear(2, 2), mp.Mesh(), blocks=[], **told)


@pytest.mark.parametrize("of", [mp.AdamW, lambda model: torch.optim.AdamW(model.parameters())], ids=["ours", "torch"])
def test_float16_skips_a_step_that_overflows_and_goes_on(of):
    precision = mp.Precision("float16", first_loss_scale=2.0**40)
    run = start({}, dtype=torch.float32, precision=precision, optimizer=of)
    before = [p.clone() for p in run.model.parameters()]
    x, target = batch(0, range(SAMPLES))
    scales, taken = [], []
    while not any(taken):
        assert len(taken) < 40
        scales.append(run.scaler.scale)
        run.forward_backward(x, target)
        taken.append(run.optimizer_step().taken)
        assert any(taken) != all(map(torch.equal, before, run.model.parameters()))
    assert len(taken) > 2
    assert all(a == 2 * b for a, b in itertools.pairwise(scales))


def test_a_batch_without_a_token_has_no_loss_and_moves_nothing():
    run = start({}, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
    before = [p.clone() for p in run.model.parameters()]
    x, target = batch(0, range(SAMPLES))
    assert float(run.forward_backward(x, torch.full_like(target, -100))) == 0.0
    result = run.optimizer_step()
    assert (result.loss, result.grad_norm, result.taken) == (0.0, 0.0, True)
    assert all(map(torch.equal, before, run.model.parameters()))


def check_unequal(sizes: dict, zero: int) -> str:
    run, refused, pp = start(sizes, data=mp.Zero(zero), micro_batches=sizes.get("pp", 1)), "", sizes.get("pp", 1)
    x, target = batch(0, run.share(SAMPLES))
    rank = run.mesh.data.rank if run.mesh.data.size > 1 else run.mesh.tp.rank
    one = [run.evaluate([(x, target if rank == at else torch.full_like(target, -100))]) for at in (0, 1)]
    tokens = [int((batch(0, range(at, at + SAMPLES // 2))[1] != -100).sum()) for at in (0, SAMPLES // 2)]
    mean = sum((2 + at) * one[at] * tokens[at] for at in (0, 1)) / sum((2 + at) * tokens[at] for at in (0, 1))
    for call in (lambda: run.set_micro_batches(pp + pp * rank), lambda: run.evaluate([(x, target)] * (2 + rank))):
        try:
            assert call() in (None, pytest.approx(mean, rel=1e-12))
        except ValueError as error:
            refused += f"{error}\n"
    with pytest.raises(ValueError, match=r"got 0 batches|ranks have 0 and 1 batches"):
        run.evaluate([(x, target)] * rank)
    if run.mesh.tp.size == 1:  # one data rank's last stage fails, and every rank says why
        with pytest.raises(ValueError, match="outside the vocabulary"):
            run.evaluate([(x, target.masked_fill(target != -100, V * rank))])
    behind = run.pipeline.last_rank - run.mesh.pp.rank
    failing = run.stages[-1].register_forward_pre_hook(lambda *_: {1: None}[behind])  # the forward of the last stage
    for call in (lambda: run.evaluate([(x, target)] * 3), lambda: run.forward_backward(x, target)):
        with pytest.raises((KeyError, ValueError), match=r"^0$|KeyError: 0"):
            call()
    failing.remove()
    run.drop_gradients()
    run.forward_backward(x, target)
    assert run.optimizer_step().taken
    return refused


@pytest.mark.parametrize(("sizes", "zero", "refused"), [
    ({"dp": 2}, 3, True), ({"dp": 2}, 1, False), ({"dp": 2}, 0, False), ({"tp": 2}, 1, True),
    ({"pp": 2, "dp": 2}, 1, False), ({"pp": 2, "dp": 2, "ep": 2}, 1, True),
])  # fmt: skip
def test_ranks_with_different_numbers_of_micro_batches_or_batches_are_refused_where_one_would_wait(
    ranks, sizes, zero, refused
):
    for said in ranks(math.prod(sizes.values()) // sizes.get("ep", 1), check_unequal, sizes, zero):
        pp = sizes.get("pp", 1)
        assert (f"{pp} and {2 * pp} micro-batches" in said, "2 and 3 batches" in said) == (refused, refused)


def check_alike(sizes: dict, other: int, what: str) -> str:
    run = start(sizes)
    step_of(run, "forward_backward", "optimizer_step")
    more = {what: run.mesh.job.rank == other}
    run.step += more.get("step", 0)
    step_of(run, "forward_backward")
    if what == "max_norm":
        run.clip_gradients(1.0 + more[what])
    with pytest.raises(ValueError, match="disagree") as error:
        run.optimizer_step(lr=1.0 + more.get("lr", 0))
    return str(error.value)


@pytest.mark.parametrize(("sizes", "other", "what"), [
    ({"dp": 4}, 0, "step"), ({"dp": 2, "tp": 2}, 1, "step"), ({"tp": 2}, 0, "step"), ({"pp": 2}, 1, "step"),
    ({"dp": 2}, 1, "lr"), ({"tp": 2}, 0, "max_norm"),
])  # fmt: skip
def test_pitfall_61_ranks_in_different_steps_or_of_other_rates_are_refused(ranks, sizes, other, what):
    for said in ranks(math.prod(sizes.values()), check_alike, sizes, other, what):
        assert f"{what}: {'2 and 1' if other == 0 else '1 and 2'}" in said.replace(".0", "")


def small(value: float | None, **told: Any) -> mp.Run:
    """A run of one linear layer, of one value, or on "meta"."""
    layer = mp.ColumnParallelLinear(4, 4, device=None if value else "meta")
    if value:
        nn.init.constant_(layer.get_parameter("weight"), value)
    model = nn.Sequential(layer)
    given = {"loss": lambda y, t: (y - t).square().sum(), "optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1)}
    return mp.prepare(model, mp.build_mesh(device_type="cpu"), **{"blocks": model, **given, **told})


def test_weights_that_are_there_are_never_drawn_anew_in_silence():
    with small(0.5, initialize=False).parameters() as held:
        assert torch.equal(held.get_parameter("0.weight"), torch.full((4, 4), 0.5))
    with pytest.raises(ValueError, match=r"0.weight has a value already: initialize=False keeps .*, initialize=True"):
        small(0.5)
    for again, drawn in itertools.pairwise((small(None), small(0.5, initialize=True), small(None, initialize=True))):
        assert torch.equal(*(run.model.get_parameter("0.weight") for run in (again, drawn)))


class Attends(nn.Module):
    """Attention of one's own, of a class that nothing is known about."""

    def __init__(self, axis: mp.Axis | None = None) -> None:
        super().__init__()
        self.axis, self.qkv = axis, nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True)


def llama(kind: str, **sizes: int) -> nn.Module:
    module: Any = pytest.importorskip("transformers")
    about = {"vocab_size": V, "hidden_size": D, "intermediate_size": D, "num_attention_heads": 2,
             "num_key_value_heads": 2, "num_hidden_layers": 1}  # fmt: skip
    return getattr(module, f"{kind}ForCausalLM")(getattr(module, f"{kind}Config")(**about, **sizes))


def experts(on: mp.Mesh, *axes: str) -> nn.Module:
    return mp.ParallelMoE(4, 4, 2, 1, **{name: getattr(on, name) for name in axes})


def attention(on: mp.Mesh, **options: Any) -> nn.Module:
    return mp.ParallelAttention(4, 2, tp=on.tp, **options)


def of_cp(on: mp.Mesh) -> nn.Module:
    return attention(on, context="ring", cp=on.cp)


linear = partial(nn.Linear, 4, 4)
IDLE: list[tuple[dict[str, int], Any, list[str]]] = [
    # the mesh, the layers on it, the words of the refusal
    ({"tp": 2}, lambda on: [linear()], ["no parameter is sharded", "2 ranks of tp"]),
    ({"tp": 2, "pp": 2}, lambda on: [linear()], ["2 ranks of tp"]),
    ({"tp": 2}, lambda on: [Attends(on.tp)], []),  # collectives of one's own
    ({"tp": 2, "pp": 2}, lambda on: [mp.ColumnParallelLinear(4, 4, tp=on.tp) if on.pp.rank else linear()], []),
    ({"tp": 2}, lambda on: [mp.LayerNorm(4, tp=on.tp, sequence_parallel=True), mp.RowParallelLinear(4, 4, tp=on.tp)],
     ["1 (LayerNorm) has sequence_parallel=True", "2 ranks of tp"]),
    (
        {"tp": 2},
        lambda on: [
            mp.LayerNorm(4, tp=on.tp, sequence_parallel=True),
            mp.ColumnParallelLinear(4, 4, tp=on.tp, sequence_parallel=True),
        ],
        [],
    ),
    ({"dp": 2, "ep": 2}, lambda on: [linear()], ["sharded over ep", "2 ranks"]),
    ({"dp": 2, "ep": 2}, lambda on: [llama("Qwen3Moe", num_experts=2, moe_intermediate_size=4)],
     ["sharded over ep", "2 ranks"]),
    ({"dp": 2, "ep": 2}, lambda on: [experts(on, "ep"), experts(on)],
     ["2 (ParallelMoE) was built with ep 1", "has ep 2"]),
    ({"dp": 2, "ep": 2}, lambda on: [experts(on, "ep")], []),
    ({"dp": 2, "etp": 2}, lambda on: [linear()], ["sharded over etp", "2 ranks"]),
    ({"cp": 2}, lambda on: [llama("Llama")], ["1 (LlamaForCausalLM) may mix tokens", "2 ranks of cp"]),
    ({"cp": 2}, lambda on: [Attends()], ["1 (Attends) may mix tokens", "2 ranks of cp"]),
    ({"cp": 2}, lambda on: [Attends(), experts(on, "cp")], ["1 (Attends)", "2 ranks of cp"]),
    ({"cp": 2}, lambda on: [of_cp(on), attention(on)], ["2 (ParallelAttention) was built with cp 1", "has cp 2"]),
    ({"cp": 2}, lambda on: [of_cp(on), nn.MultiheadAttention(4, 2)], ["2 (MultiheadAttention)", "2 ranks of cp"]),
    ({"cp": 2}, lambda on: [of_cp(on), nn.GRU(4, 4)], ["2 (GRU)", "2 ranks of cp"]),
    ({"cp": 2}, lambda on: [nn.Conv1d(4, 4, 3)], ["1 (Conv1d)", "2 ranks of cp"]),
    ({"cp": 2, "pp": 2}, lambda on: [linear() if on.pp.rank else Attends()], ["1 (Attends)", "2 ranks of cp"]),
    ({"cp": 2, "pp": 2}, lambda on: [Attends() if on.pp.rank else of_cp(on)], []),  # the first stage has cp
    ({"cp": 2}, lambda on: [linear(), nn.GELU(), nn.RMSNorm(4)], []),  # token by token
    ({"cp": 2}, lambda on: [Attends(on.cp)], []),
    ({"cp": 2}, lambda on: [of_cp(on), linear(), attention(on, memory_dim=4)], []),
    ({"dp": 2}, lambda on: [Attends()], []),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "layers", "words"), IDLE)
def test_pitfall_53_54_an_axis_that_the_model_does_not_use_is_refused(sizes, layers, words):
    def make() -> str:
        on = mp.build_mesh(device_type="cpu", **sizes)
        model = nn.Sequential(OrderedDict((str(1 + i + 9 * on.pp.rank), each) for i, each in enumerate(layers(on))))
        try:
            mp.prepare(model.to("meta"), on, blocks=[], loss=lambda y, _: y.sum(), optimizer=mp.AdamW, micro_batches=2)
        except ValueError as error:
            return str(error)
        return ""

    for said in mp.simulate(make, ranks=math.prod(sizes.get(name, 1) for name in ("tp", "cp", "pp", "dp"))):
        assert all(word in said for word in words), said
        assert bool(said) is bool(words), said


MEAN = r"the loss is a mean, .*: return the sum over tokens \(reduction='sum'\), .* by the 32 tokens of the step"
LOSSES: dict[str, tuple[Any, str | None]] = {
    "sum of squares": (lambda y, t: (y - t).square().sum(), None), "mean": (nn.functional.mse_loss, MEAN),
    "mean in half precision": (lambda y, t: (y - t).square().mean().bfloat16(), MEAN),
    "mean over samples": (lambda y, t: (y - t).square().sum(1).mean(), MEAN),
    "sum and a constant": (lambda y, t: (y - t).square().sum() + 1000, None),
    "contrast of samples": (lambda y, t: nn.functional.cross_entropy(y @ t.T, torch.arange(len(t))), None),
    "fixed size": (lambda y, t: (y.view(4, 4) - t).square().mean(), None), "zero": (lambda y, t: (y * 0).mean(), None),
    "random": (lambda y, t: (y * torch.rand(4) - t).square().sum(), None),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_is_refused_in_the_first_step(name):
    loss, words = LOSSES[name]
    run = small(None, loss=loss, micro_batches=2)
    x, target = torch.arange(32.0).view(8, 4).sin(), torch.ones(8, 4)
    if words is None:
        torch.manual_seed(0)
        run.forward_backward(x, target)
        after = torch.random.get_rng_state()
        torch.manual_seed(0)
        for _ in range(2 * (name == "random")):  # a draw for each micro-batch, and none for the check
            torch.rand(4)
        assert torch.equal(after, torch.random.get_rng_state())
        return
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            run.forward_backward(x, target)
        run.drop_gradients()
    run.forward_backward(x, target, tokens=2)  # the mean over micro-batches


def as_whole(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten() % 6, reduction="sum")


def check_wrong_losses() -> None:
    for sizes, loss, words in (
        ({"tp": 2}, as_whole, "the ranks of tp have different losses, .* need mpcore.vocab_parallel_cross_entropy"),
        ({"pp": 2}, lambda y, t: mp.vocab_parallel_cross_entropy(y, t), "the loss is a mean"),
    ):
        run = start(sizes, loss=loss)
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                run.forward_backward(*batch(0, run.share(SAMPLES)))
            run.drop_gradients()


def step_past_the_run() -> None:
    run = start({"tp": 2}, sequence_parallel=True)
    run.forward_backward(*batch(0, run.share(SAMPLES)))
    with pytest.raises(ValueError, match=r"with mpcore.prepare call run.optimizer_step\(\), which does it"):
        run.optimizer.step()


def test_what_is_no_checkpoint_is_refused_with_the_newest_that_is_there(tmp_path):
    run = small(None)
    for _ in range(2):
        run.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
        run.optimizer_step()
        run.save(tmp_path)
    for path, words in ((tmp_path, "the newest in it is .*/step-00000002"), (tmp_path / "empty", "empty"),
                        (latest(tmp_path / "empty"), "load got None and no path")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            run.load(path)


class Half(nn.Module):
    """A stage whose blocks are named from 0 on each rank, or by their number in the model."""

    def __init__(self, mesh: mp.Mesh, numbered: bool) -> None:
        super().__init__()
        first = 2 * mesh.pp.rank if numbered else 0
        self.blocks = nn.ModuleDict({str(first + i): nn.Linear(4, 4, device="meta") for i in range(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


@pytest.mark.parametrize(("sizes", "zero"), [({"tp": 2}, 0), ({"dp": 2}, 0), ({"dp": 2}, 3)])
@on_ranks(2)
def test_kept_values_that_differ_between_replicas_are_refused(sizes: dict, zero: int) -> None:
    on = mesh(**sizes)
    name = "0.weight" if sizes.get("tp", 1) == 1 else "2.weight"
    for seeded in (True, False):
        torch.manual_seed(0 if seeded else on.world.rank)
        model = nn.Sequential(
            mp.ColumnParallelLinear(4, 8, tp=on.tp), mp.RowParallelLinear(8, 4, tp=on.tp), nn.LayerNorm(4)
        )
        nn.init.normal_(model[2].weight)
        told = {"blocks": [], "optimizer": mp.AdamW, "loss": lambda y, t: y.sum(), "data": mp.Zero(zero)}
        refused = pytest.raises(ValueError, match=rf"replicas differ, as each rank made its own: .* {name}")
        with contextlib.nullcontext() if seeded else refused:
            mp.prepare(model, on, initialize=False, **told)


class Part(nn.Module):
    """One of four stages; the first and the last hold one table."""

    def __init__(self, on: mp.Mesh, number: int, value: float) -> None:
        super().__init__()
        if number in (0, 3):
            self.table = nn.Embedding(4, 4)
            nn.init.constant_(self.table.weight, value)
            mp.add_partial(self.table, "weight", on.ends)
        else:
            self.blocks = nn.ModuleDict({str(number): nn.Linear(4, 4)})


def check_a_table_of_two_stages() -> None:
    """The stages lie at other places of their ranks."""
    on = mesh(pp=2)
    told = {"blocks": [], "optimizer": mp.AdamW, "loss": lambda y, t: y.sum(), "schedule": "interleaved"}
    for alike in (True, False):
        stages = [Part(on, number, 1.0 if alike else number) for number in (on.pp.rank, on.pp.rank + 2)]
        refused = pytest.raises(ValueError, match=r"replicas differ, as each rank made its own: .* table.weight")
        with contextlib.nullcontext() if alike else refused:
            mp.prepare(stages, on, initialize=False, micro_batches=2, **told)


class Gains(ParallelModule):
    """Stages whose parameters, sharded over tp, and buffers, which forward replaces, lie at their roots."""

    def __init__(self, on: mp.Mesh, numbers: Iterable[int]) -> None:
        super().__init__(dtype=torch.float64)
        self.tp, self.numbers = on.tp, [*numbers]
        for i in self.numbers:
            self.declare(f"gain{i}", (D,), uniform(1.0), shard=cut(D, on.tp, 0))
            self.register_buffer(f"calls{i}", torch.zeros((), dtype=torch.float64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        for i in self.numbers:
            setattr(self, f"calls{i}", self.get_buffer(f"calls{i}") + 1)
            x = x + gather(split(x, self.tp, -1) * self.get_parameter(f"gain{i}"), self.tp, -1).tanh()
        return x


def train_gains(on: mp.Mesh, folder: str, schedule: str = "1f1b", zero: int = 0) -> tuple[list, dict]:
    numbers = {"interleaved": (on.pp.rank, on.pp.rank + 2), "zbv": (on.pp.rank, 3 - on.pp.rank)}.get(schedule)
    results = []
    for steps in (2, 4):
        with torch.device("meta"):
            stages = [Gains(on, [i]) for i in numbers] if numbers else Gains(on, range(4))
        run = mp.prepare(
            stages, on, blocks=(), optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
            loss=lambda y, t: (y - t).square().sum(), data=mp.Zero(zero), schedule=schedule,
            micro_batches=4 // on.data.size,
        )  # fmt: skip
        if steps > 2:
            run.load(latest(folder, on) or "")
        while run.step < steps:
            x = torch.linspace(-1, 1 + run.step, 8 * D, dtype=torch.float64).view(8, D)[list(run.share(8))]
            run.forward_backward(x, x.sin(), tokens=8)
            results.append(run.optimizer_step()[:2])
        run.save(folder)
    with run.parameters() as model:
        return results, full_state_dict(model)


@pytest.mark.parametrize(("sizes", "schedule", "zero"), [
    ({"tp": 2}, "interleaved", 0), ({"dp": 2}, "zbv", 0), ({"dp": 2}, "interleaved", 1), ({"dp": 2}, "zbv", 3),
])  # fmt: skip
def test_tensors_at_the_roots_of_two_stages_of_a_rank(tmp_path, sizes, schedule, zero):
    ((want, whole),) = mp.simulate(train_gains, str(tmp_path / "one"))
    state = {}
    for results, held in mp.simulate(train_gains, str(tmp_path / "two"), schedule, zero, pp=2, **sizes):
        assert results == [pytest.approx(each, rel=1e-9) for each in want]
        state |= held
    state |= {name: x * sizes.get("dp", 1) for name, x in state.items() if "calls" in name}  # micro-batches of a rank
    torch.testing.assert_close(state, whole)


def check_names_of_stages() -> None:
    on = mesh(pp=2)

    def run(numbered: bool, make: Any = lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **told) -> mp.Run:
        stage = Half(on, numbered)
        stage = stage if told.get("initialize", True) else stage.to_empty(device="cpu")
        return mp.prepare(
            stage, on, blocks=stage.blocks, loss=lambda y, t: (y - t).square().sum(), optimizer=make, micro_batches=2,
            **told,
        )  # fmt: skip

    for told in {"initialize": True}, {"initialize": False}:
        with pytest.raises(ValueError, match=r"ranks 0 and 1 both hold a parameter blocks.0.weight. .*pipeline_stages"):
            run(numbered=False, **told)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the optimizer holds 2 parameters that the prepared model has not: make it"):
        run(numbered=True, make=lambda model: other)
    ready = run(numbered=True)
    ready.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"call run.optimizer_step\(\) instead"):
        ready.optimizer.step()
    assert ready.optimizer_step().taken


def check_untrainable() -> None:
    on, pp = mesh(pp=2), 2
    options: dict[str, Any] = {"loss": lambda y, _: y.sum(), "optimizer": mp.AdamW, "initialize": False}
    stage = nn.ModuleDict({str(on.pp.rank): nn.Linear(D, D)})
    with pytest.raises(ValueError, match=f"none of the {2 * pp} parameters requires a gradient"):
        mp.prepare(stage.requires_grad_(False), on, blocks=stage, **options)
    stage["gate"] = nn.ParameterList([torch.zeros(3, dtype=torch.complex64)])
    with pytest.raises(ValueError, match=r"gate.0 is torch.complex64, .* of shape \(3, 2\)"):
        mp.prepare(stage.requires_grad_(True), on, blocks=stage, **options)
    stage["gate"] = nn.BatchNorm1d(D)
    with pytest.raises(ValueError, match=r"gate is a BatchNorm1d .* torch.float32, .* torch.bfloat16.*autocast=True"):
        mp.prepare(stage, on, blocks=stage, precision="bfloat16", **options)
    for group, over in ((None, r"\[0, 1\]"), (torch.distributed.new_group([0]), r"\[\], and mesh.data has \[1\]")):
        stage["gate"] = nn.SyncBatchNorm(D, process_group=group)
        with pytest.raises(ValueError, match=f"gate is a SyncBatchNorm over ranks {over}"):
            mp.prepare(stage, on, blocks=stage, **options)


@pytest.mark.parametrize("check", [check_wrong_losses, step_past_the_run,
                                   check_names_of_stages, check_a_table_of_two_stages, check_untrainable])  # fmt: skip
def test_what_is_wrong_is_refused_on_both_ranks(ranks, check):
    ranks(2, check)
