"""ZeRO-0 to 3 and HSDP against the dense model: values, gradients, norms, what lies where, and what is sent."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mpcore import (
    Axis,
    ColumnParallelLinear,
    Mesh,
    ParallelMoE,
    RowParallelLinear,
    full_state_dict,
    linear_cross_entropy,
    load_full_state_dict,
    vocab_parallel_cross_entropy,
)
from mpcore.gradients import clip_gradients, drop_gradients, grad_norm, guard_optimizer, reduce_gradients
from mpcore.gradients.accumulate import gradient_of
from mpcore.layers import linear_log_prob, materialize, update_routers
from mpcore.optim.adamw import AdamW
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.fsdp import BroadcastAllGather, ExchangeReduceScatter
from mpcore.parallel.sync import gathered, set_gradient_sync
from mpcore.pipeline.partition import join_stages
from mpcore.sharding import shardings
from mpcore.sharding.declarations import add_partial
from mpcore.sharding.local import is_dtensor, local_tensor, reshard
from tests.equality import close
from tests.gpt_step import TOLERANCE, Run, batch, over_data, unsharded
from tests.placement import placements
from tests.pool import BEFORE_2_13, mesh, on_ranks
from tests.quick import some

STAGES = [0, 1, 2, 3]
NORMS = [1, 2, math.inf]


@pytest.mark.parametrize(("schedule", "zero", "more"), [("zbv", 3, {}), ("dualpipev", 0, {"vocab_size": 2**15})])
@on_ranks(4)
def test_pitfall_14_24_30_33_a_table_of_two_stages_is_summed_once_and_stays_whole(
    schedule: str, zero: int, more: dict
) -> None:
    """Twice, with an evaluation between. A large table is summed alone. `tests/laws` has all other layouts."""
    options = {"tie_embeddings": True, **more}
    run = Run(mesh(pp=2, dp=2), schedule, zero=zero, **options)
    for _ in range(2):
        run.compare(run.step(), **options)
        run.model.zero_grad()
        run.evaluate()
        assert all(is_dtensor(p) == (zero > 0) for p in run.model.parameters())
    for name, placed in placements(run.stages, run.on).items() if zero else ():
        want_cut = (1, 1, 2) if name == "embedding.weight" else (2, 2, 2)  # stages share the table
        assert (placed.parameter, placed.gradient, placed.state) == want_cut, name


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Elements that `fully_shard` sends to gather and to reduce-scatter, and how often."""
    found: Counter = Counter()
    gather, scatter = BroadcastAllGather.__call__, ExchangeReduceScatter.__call__

    def gathered(self, output_tensor: Tensor, *args, **kwargs):
        found.update(gathers=1, gathered=output_tensor.numel())
        return gather(self, output_tensor, *args, **kwargs)

    def scattered(self, output_tensor: Tensor, input_tensor: Tensor, *args, **kwargs):
        found.update(scatters=1, scattered=input_tensor.numel())
        return scatter(self, output_tensor, input_tensor, *args, **kwargs)

    gathers = mock.patch.object(BroadcastAllGather, "__call__", gathered)
    with gathers, mock.patch.object(ExchangeReduceScatter, "__call__", scattered):
        yield found


def check_traffic(sizes: dict, zero: int, schedule: str, micro_batches: int) -> None:
    """All sizes are multiples of the data size, so nothing is padded: the theory to the element."""
    run = Run(mesh(**sizes), schedule, micro_batches, zero, vocab_size=32)
    for p in run.model.parameters():
        assert len(local_tensor(p)) * (2 if zero else 1) == (p.shape[0])
    parameters = sum(p.numel() for p in run.model.parameters())
    units = sum(len(stage.blocks) + (stage.first or stage.last) for stage in run.stages)
    run.step()
    run.gradients()
    run.model.zero_grad()
    with counted() as sent:
        run.step()
        run.gradients()
    gathers, scatters = {0: (0, 0), 1: (1, 1), 2: (1, micro_batches), 3: (2 * micro_batches, micro_batches)}[zero]
    want = {"gathers": gathers * units, "gathered": gathers * parameters}
    want |= {"scatters": scatters * units, "scattered": scatters * parameters}
    if schedule != "zbv" or zero != 3:  # whose split backward gathers anew what is still there, or not
        expected = {k: v for k, v in want.items() if v}
        assert sent == expected, f"sent {dict(sent)}, the theory says {expected}"
    for stage in run.stages:
        assert all(is_dtensor(p) == (zero > 0) for p in stage.parameters())
    if zero in (1, 2):
        with counted() as sent:
            run.evaluate(3)
        assert sent == {"gathers": units, "gathered": parameters}, "an evaluation of many batches gathers once"
        assert all(is_dtensor(p) for stage in run.stages for p in stage.parameters())


SENT = [({"dp": 2}, "1f1b"), ({"dp": 2, "pp": 2}, "1f1b"), ({"dp": 2, "pp": 2}, "zbv")]


@pytest.mark.parametrize(
    ("sizes", "schedule", "zero"),
    some(*((*SENT[0], zero) for zero in STAGES), (*SENT[2], 1),
         of=[(*case, zero) for case in SENT for zero in STAGES]),
    ids=str,
)  # fmt: skip
def test_each_stage_of_zero_sends_what_the_theory_says(ranks, sizes, schedule, zero):
    """0: nothing by `fully_shard`; 1: 2 units of parameters a step; 2: gradients, 3: all, each micro-batch."""
    ranks(math.prod(sizes.values()), check_traffic, sizes, zero, schedule, 4)


def check_gathered_once(zero: int) -> None:
    on = mesh(dp=2)
    whole, model = Parts(), Parts()
    shard_data_parallel(model, on, model.blocks, zero=zero)
    x, use = torch.ones(2, 3, dtype=torch.float64), {"plain", "other", "tiny", "scalar", "frozen"}
    with torch.no_grad(), counted() as sent:
        with gathered(model):
            for _ in range(1 + 2 * on.data.rank):  # samples of other lengths
                close(model(x, use), whole(x, use), "evaluation")
        once = sent["gathers"]
        assert all(is_dtensor(p) for p in model.parameters() if p.dim() and p.numel())
        model(x, use)
        assert sent["gathers"] == 2 * once > 0, f"{once} gathers of {1 + 2 * on.data.rank} forwards"


class Part(nn.Module):
    """A unit with parameters of every odd kind; what `use` names takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        shapes = {"plain": (5, 3), "other": (4, 3), "tiny": (1, 3), "scalar": (), "empty": (0, 3), "frozen": (2, 3),
                  "never": (3, 3)}  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64)))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, use: set[str]) -> Tensor:
        y = x
        for name, p in self.named_parameters():
            if name in use:
                y = y + (x @ p.T).sin().mean(-1, keepdim=True).nan_to_num() if p.dim() else y * p.cos()
        return y


class Parts(nn.Module):
    """Two blocks, and a root with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part() for _ in range(2))
        self.root = Part()

    def forward(self, x: Tensor, use: set[str]) -> Tensor:
        for block in self.blocks:
            x = block(x, use if len(use) > 2 else {"frozen"})  # at times a rank trains nothing of the blocks
        return self.root(x, use)


@pytest.mark.parametrize(
    ("zero", "replicate"), some((0, 1), (3, 1), of=[(0, 1), *itertools.product((1, 2, 3), (1, 2))]), ids=str
)
@on_ranks(4)
def test_pitfall_33_34_43_frozen_unused_empty_scalar_and_tiny_parameters(zero: int, replicate: int) -> None:
    """PITFALLS 33, 34: which parameters a rank uses is random, by rank, step and micro-batch."""
    on = mesh(dp=4)
    whole, model = Parts(), Parts()
    shard_data_parallel(model, on, model.blocks, zero=zero, replicate=replicate)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-4) for m in (whole, model)]
    declared, wanted = shardings(model), dict(whole.named_parameters())
    for step in range(3):
        draws = torch.Generator().manual_seed(step)
        for micro, rank in itertools.product(range(3), range(4)):
            x = torch.randn(2, 3, generator=draws, dtype=torch.float64)
            chosen = torch.rand(4, generator=draws) < 0.4
            use = {"frozen", "scalar", *itertools.compress(("plain", "other", "tiny", "empty"), chosen)}
            if rank == on.data.rank:
                set_gradient_sync(model, micro == 2)
                model(x, use).sum().backward()
            whole(x, use).sum().backward()
        reduce_gradients(model)
        for name, p in model.named_parameters():
            want = wanted[name].grad
            assert (p.grad is None) == (want is None), f"{name} at step {step}"
            if p.grad is not None and want is not None:
                close(over_data(p.grad, on, declared[name]), want, f"gradient of {name} at step {step}")
        for p in NORMS:
            close(grad_norm(model, on, p), grad_norm(whole, Mesh(), p), f"the {p}-norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters():
            close(over_data(p, on, declared[name]), wanted[name].detach(), f"{name} after step {step}")
    assert placements(model, on)["root.scalar"].state == 1


def check_evaluations(zero: int) -> None:
    """A teacher before backward, a validation between micro-batches, before the step and after it: nothing shows."""
    on = mesh(dp=2)
    whole, model = Parts(), Parts()
    shard_data_parallel(model, on, model.blocks, zero=zero)
    use = {"plain", "other", "tiny", "scalar", "frozen"}
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (whole, model)]
    x = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted, declared = dict(whole.named_parameters()), shardings(model)

    @torch.no_grad()
    def evaluated() -> Tensor:
        y = model(x[0], use)
        close(y, whole(x[0], use), "evaluation")
        close(model.blocks[0](x[1], use), whole.blocks[0](x[1], use), "evaluation of a block alone")
        for p in model.parameters():
            assert is_dtensor(p) == (zero > 0 and p.dim() > 0 and p.numel() > 0)
        return y

    guard_optimizer(optimizers[1], model)
    for _ in range(3):
        set_gradient_sync(model, False)
        model(x[0], use).sum().backward()
        optimizers[1].zero_grad()  # an abandoned step
        for micro in range(2):
            set_gradient_sync(model, micro == 1)
            mine, every = model(x[on.data.rank], use), [whole(each, use) for each in x]
            teacher = 1.5 * evaluated()
            (mine - teacher).square().sum().backward()
            sum((y - teacher).square().sum() for y in every).backward()
            evaluated()
        reduce_gradients(model)
        for m, sizes in ((model, on), (whole, Mesh())):
            clip_gradients(m, 0.5, grad_norm(m, sizes))
        evaluated()
        close(grad_norm(model, on), grad_norm(whole, Mesh()), "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters():
            close(over_data(p, on, declared[name]), wanted[name].detach(), name)
        evaluated()


def check_statistics(zero: int) -> None:
    """A bias whose steps bfloat16 can't tell apart chooses, and moves, as in float32 (Megatron-LM #1482)."""
    on = mesh(dp=2)
    options = {"bias_rate": 0.001, "aux_loss": "global", "data": on.data, "device": "meta", "dtype": torch.float32}
    moe = materialize(ParallelMoE(8, 8, 3, 1, **options), seed=0)
    bias = 1 + torch.arange(3) / 1000
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.expert_bias.copy_(bias)
        moe.router.fractions.fill_(1.001)
    shard_data_parallel(moe, on, zero=zero, param_dtype=torch.bfloat16)
    moe(torch.ones(1, 6, 8, dtype=torch.bfloat16), loss_scale=1.0).sum().backward()
    did = update_routers(moe, on)["router"]
    assert did.tokens_per_expert.tolist() == [0, 0, 12]
    close(did.aux_loss.float(), torch.tensor(1.001), "the balance loss", 1e-6)
    close(moe.router.expert_bias.detach(), bias + 0.001 * torch.tensor([1, 1, -1]), "the bias", 1e-7)


def check_half(sizes: dict, zero: int, schedule: str) -> None:
    """Masters in float32, products in bfloat16, and the sum over micro-batches and ranks in float32, never rounded."""
    on = mesh(**sizes)
    micro_batches = 4
    mixed = {"param_dtype": torch.bfloat16}
    run = Run(on, schedule, micro_batches, zero, dtype=torch.float32, mixed=mixed, dropout=0.0)
    run.step()
    model = unsharded(torch.float32, dropout=0.0).bfloat16()
    tokens, targets, samples = batch()
    count = (targets != -100).sum()
    want = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in model.named_parameters()}
    pieces = micro_batches * on.data.size
    for x, y, z in zip(tokens.chunk(pieces), targets.chunk(pieces), samples.chunk(pieces), strict=True):
        (vocab_parallel_cross_entropy(model(x, z), y, reduction="sum") / count).backward()
        for n, p in model.named_parameters():
            want[n] += p.grad.double()
        model.zero_grad()
    for name, grad in run.gradients().items():
        assert grad.dtype == torch.float32
        close(grad.double(), want[name], f"gradient of {name}", 1e-6 * want[name].abs().max().item())


@pytest.mark.parametrize("zero", some(1, 3, of=[1, 2, 3]))
def test_pitfall_44_half_precision_gradients_are_summed_in_float32(ranks, zero):
    ranks(4, check_half, {"dp": 2, "pp": 2}, zero, "zb")
    ranks(1 if zero == 1 else 2, check_half, {} if zero == 1 else {"dp": 2}, zero, "1f1b")


class Odd(nn.Module):
    """Cut both ways by tp, in dimensions that data ranks can't share evenly; a scalar, and what is frozen."""

    def __init__(self, tp: Axis = Axis(name="tp")) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(3, 10, tp=tp).double(), RowParallelLinear(10, 3, tp=tp).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.frozen = nn.Linear(3, 1).double().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sin()) * self.scale + self.frozen(x)


def check_load(sizes: dict, zero: int, replicate: int, lefts: tuple[str, ...]) -> None:
    on = mesh(**sizes)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for left in lefts:
        torch.manual_seed(5)
        wholes = [Odd(), Odd()]
        model = Odd(on.tp)
        load_full_state_dict(model, full_state_dict(wholes[0]))
        shard_data_parallel(model, on, [model.up], zero=zero, replicate=replicate)
        with gathered(model) if left == "gathered" else contextlib.nullcontext():
            if left:
                with torch.set_grad_enabled(left == "forward"):
                    close(model(x), wholes[0](x), "before")
            if left == "forward" and zero < 3:
                with pytest.raises(ValueError, match=r"down.weight is a gathered copy of . ranks' shards: reshard the"):
                    load_full_state_dict(join_stages([model]), full_state_dict(wholes[1]))
            load_full_state_dict(model, full_state_dict(wholes[1]))
            close(model(x), wholes[1](x), "after")
        reshard(model)
        declared = shardings(model)
        for name, p in model.named_parameters():
            assert is_dtensor(p) == (p.dim() > 0)
            assert torch.equal(over_data(p, on, declared[name]), wholes[1].get_parameter(name)), name


@pytest.mark.parametrize("zero", some(1, 3, of=[2]))
def test_a_logical_state_loads_into_shards_whatever_ran_before(ranks, zero):
    ranks(4, check_load, {"tp": 2, "dp": 2}, zero, 1, ("", "evaluation", "forward", "gathered"))
    ranks(4, check_load, {"dp": 4}, zero, 2, ("forward",))


def check_added(zero: int) -> None:
    """An adapter or a head that comes too late: refused, unless it is declared by hand or replaces a parameter."""
    on = mesh(dp=2)
    for frozen, how in itertools.product((False, True), ("within", "around", "joined")):
        model, wrapped = nn.Sequential(nn.Linear(3, 3)).double().requires_grad_(not frozen), nn.Module()
        for p in model.parameters():
            nn.init.ones_(p)
        if how == "joined":
            wrapped = join_stages([model])
        shard_data_parallel(model, on, zero=zero)
        added = nn.Linear(3, 2, bias=False).double()
        nn.init.ones_(added.weight)
        if how == "within":
            model[0].late, wrapped = added, model
        else:
            wrapped.inner, wrapped.late = model, added
        x = torch.full((1, 3), on.dp.rank + 1.0, dtype=torch.float64)
        added(model(x)).sum().backward()
        with pytest.raises(ValueError, match=r"late.weight was added after .* over the 2 ranks of data"):
            reduce_gradients(wrapped)
        added.requires_grad_(False)
        reduce_gradients(wrapped)
        added.requires_grad_(True)
        add_partial(added, "weight", on.data)
        added.weight.grad = x.expand(2, 3).clone()
        reduce_gradients(wrapped)
        close(added.weight.grad, torch.full((2, 3), 3.0, dtype=torch.float64), "declared by hand")
    if zero:
        return
    model = shard_data_parallel(nn.Sequential(nn.Linear(3, 2, bias=False)).double(), on, zero=0)
    assert isinstance(model, nn.Sequential)
    model[0].weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    model.append(nn.Linear(2, 2, bias=False).double())
    for p in model.parameters():
        p.grad = torch.full_like(p, on.dp.rank + 1.0)
    reduce_gradients(model, on)
    for name, p in model.named_parameters():
        close(p.grad, torch.full_like(p, 3.0), name)
    alone = shard_data_parallel(nn.Sequential(nn.Linear(3, 2)), mesh(tp=2), zero=1)
    assert isinstance(alone, nn.Sequential)
    alone.append(nn.Linear(2, 2))
    reduce_gradients(alone)


class Raises(torch.autograd.Function):
    """Stands for a backward that runs out of memory."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


class Chain(nn.Module):
    """Three layers, of which the middle one may be a block, and what they return, wrapped by `wrap`."""

    def __init__(self, wrap=lambda y: y) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.wrap, self.raises = wrap, False
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))
        for p in self.parameters():
            nn.init.normal_(p, generator=g)

    def forward(self, x: Tensor):
        for layer in self.layers:
            x = layer(x).tanh()
            if self.raises and layer is self.layers[0]:
                x = Raises.apply(x)
        self.loss = x.square().sum()
        return self.wrap(x)


def chain(on: Mesh, zero: int, replicate: int = 1, **options) -> Chain:
    model = Chain(**options)
    shard_data_parallel(model, on, [model.layers[1]], zero=zero, replicate=replicate)
    return model


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def micro_batch(model: Chain, on: Mesh, step: int, last: bool) -> None:
    set_gradient_sync(model, last)
    model(rows(step, on.data.rank)).square().sum().backward()


def check_gradients_of(model: Chain, on: Mesh, steps: list[int], what: str) -> None:
    whole, declared = Chain(), shardings(model)
    for step in steps:
        for rank in range(on.data.size):
            whole(rows(step, rank)).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, f"{what}: {name}"
        close(over_data(p.grad, on, declared[name]), whole.get_parameter(name).grad, f"{what}: {name}", TOLERANCE)


@pytest.mark.parametrize(
    ("zero", "replicate", "how"),
    some((1, 1, "raised"), (2, 1, "skipped"), (2, 2, "abandoned"), (3, 2, "raised"),
         of=itertools.product((1, 2, 3), (1, 2), ("abandoned", "skipped", "raised"))),
)  # fmt: skip
@on_ranks(4)
def test_nothing_is_left_of_a_step_given_up(zero: int, replicate: int, how: str) -> None:
    for group in [[0, 3], [0]]:  # torch names the groups of a cut axis after the number of groups that a rank is in
        dist.new_group(group)
    on = mesh(dp=4)
    model = chain(on, zero, replicate)
    optimizer = AdamW(model)
    by_hand = AdamW(model, groups=[{"params": list(model.layers[i].parameters())} for i in range(3)])
    for forget in (lambda: drop_gradients(model), optimizer.zero_grad, by_hand.zero_grad, model.zero_grad):
        micro_batch(model, on, 1, last=False)
        if how == "raised":
            model.raises = True
            with pytest.raises(RuntimeError, match="out of memory"):
                micro_batch(model, on, 2, last=True)
            model.raises = False
            with pytest.raises(ValueError, match="a backward raised"):
                model(rows(3, on.data.rank))
        elif how == "skipped":
            set_gradient_sync(model, True)
            model(rows(2, on.data.rank))
            if zero < 3 or replicate > 1:
                with pytest.raises(ValueError, match=r"layers.*weight is (not summed|gathered).*the last micro-batch"):
                    reduce_gradients(model)
        forget()
        for micro in (0, 1):
            micro_batch(model, on, 4 + micro, last=micro == 1)
        reduce_gradients(model)
        check_gradients_of(model, on, [4, 5], how)
        forget()
        assert all(p.grad is None for p in model.parameters())


def check_between(zero: int) -> None:
    """`zero_grad` between forward and backward, and of another's parameters, forgets nothing that is wanted."""
    on = mesh(dp=2)
    model = chain(on, zero)
    optimizer, other = AdamW(model), AdamW(model, groups=[{"params": list(model.layers[0].parameters())}])
    loss = model(rows(0, on.data.rank)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    reduce_gradients(model)
    check_gradients_of(model, on, [0], "zero_grad before backward")
    optimizer.zero_grad()
    micro_batch(model, on, 1, last=False)
    other.zero_grad()
    micro_batch(model, on, 2, last=True)
    reduce_gradients(model)
    wanted = Chain()
    for step, rank in itertools.product((1, 2), range(2)):
        wanted(rows(step, rank)).square().sum().backward()
    name, p = "layers.2.weight", model.layers[2].weight
    close(over_data(p.grad, on, shardings(model)[name]), wanted.get_parameter(name).grad, name, TOLERANCE)


def check_outputs(zero: int) -> None:
    """What a model returns may hold its tensor anywhere that is looked into; elsewhere it is refused."""
    on = mesh(dp=2)
    x = rows(0, on.data.rank)
    for wrap, unwrap in ((lambda y: {"a": [(y, None, 3)]}, lambda out: out["a"][0][0]),
                         (lambda y: (None, y), lambda out: out[1])):  # fmt: skip
        model = chain(on, zero, wrap=wrap)
        unwrap(model(x)).square().sum().backward()
        reduce_gradients(model)
        check_gradients_of(model, on, [0], "what it returns")
    model = chain(on, zero, wrap=lambda y: UserDict(a=y))
    with pytest.raises(ValueError, match=r"Chain returns a UserDict, in which no tensor is found"):
        model(x)
    assert all(map(is_dtensor, model.parameters()))
    with torch.no_grad():
        model(x)
    leaf = x.clone().requires_grad_()
    model.requires_grad_(False)(leaf)
    if zero < 3:
        model.loss.backward()
        assert leaf.grad is not None
    model = chain(on, zero, wrap=lambda y: {"a": y.detach(), "b": [1, "c", None]})
    model(x)
    assert all(map(is_dtensor, model.parameters()))


def check_first(zero: int) -> None:
    """Inference mode, and a block alone, before the model's first forward; a second derivative."""
    on = mesh(dp=2)
    model, x = chain(on, zero), rows(0, on.data.rank)
    for module in (model, model.layers[1]):
        with torch.inference_mode(), pytest.raises(ValueError, match=r"of (Chain|Linear) is within torch.inference_mo"):
            module(x)
    with torch.no_grad():
        model.layers[1](x)
    micro_batch(model, on, 0, last=True)
    with torch.inference_mode():
        model(x)
    reduce_gradients(model)
    check_gradients_of(model, on, [0], "after a block alone")
    x.requires_grad_()
    with pytest.raises(RuntimeError, match=rf"a model sharded over data \(zero {zero}\) has no second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def check_old_optimizers(zero: int) -> None:
    on = mesh(dp=2)
    model = Chain()
    model.layers[0].weight.no_decay = True
    late, guarded = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    guard_optimizer(guarded, model)
    shard_data_parallel(model, on, zero=zero)
    assert model.layers[0].weight.no_decay
    assert not hasattr(model.layers[0].bias, "no_decay")
    micro_batch(model, on, 0, last=True)
    reduce_gradients(model)
    old = late.param_groups[0]["params"][0]
    for refused in (guarded.step, partial(guard_optimizer, late, model), partial(gradient_of, old)):
        with pytest.raises(ValueError, match=r"shape \(3, 3\) is no longer the model's.* after shard_data_parallel"):
            refused()
    guard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).step()
    model.layers[1].weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(ValueError, match=r"layers\.1\.weight is sharded, and what register_hook was given is never"):
        reduce_gradients(model)


@pytest.mark.parametrize(("check", "stages"), [
    (check_gathered_once, [1, 3]), (check_evaluations, STAGES), (check_statistics, [1, 3]),
    (check_added, STAGES), (check_between, [1, 3]), (check_outputs, [1, 3]),
    (check_first, [1, 3]), (check_old_optimizers, [1, 3]),
], ids=lambda x: getattr(x, "__name__", None))  # fmt: skip
@on_ranks(2)
def test_two_data_ranks(check: Callable[[int], None], stages: list[int]) -> None:
    for zero in stages:
        check(zero)


class Mixed(nn.Module):
    """Experts that no other data rank holds stay whole beside what is sharded; so does a number."""

    def __init__(self, on: Mesh) -> None:
        super().__init__()
        self.moe = ParallelMoE(4, 8, 2, 1, ep=on.ep, data=on.data)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.moe(x)


@pytest.mark.skipif(BEFORE_2_13, reason="experts with zero need torch 2.13")
@on_ranks(2)
def test_torchs_foreach_steps_refuse_shards_beside_whole_parameters() -> None:
    on = mesh(dp=2, ep=2)
    model = Mixed(on)
    shard_data_parallel(model, on)
    model(torch.ones(1, 4, 4)).sum().backward()
    reduce_gradients(model)

    def step(parameters, kind=torch.optim.AdamW, **options):
        guard_optimizer(kind(parameters, **options), model).step()

    sharded, whole = ([p for p in model.parameters() if is_dtensor(p) is kind] for kind in (True, False))
    for fast in ({"foreach": True}, {"fused": True}):
        with pytest.raises(ValueError, match=r"AdamW steps all of a group at once, .* 1 parameters are sharded .* 2"):
            step(model.parameters(), **fast)
        step([{"params": sharded}, {"params": whole}], **fast)
        step([*sharded, model.gain], **fast)
    for slow in ({"foreach": False}, {"fused": False}, {}):
        step(model.parameters(), **slow)
    AdamW(model).step()
    for kind, fast in ((torch.optim.Rprop, {}), (torch.optim.SGD, {"fused": True})):
        with pytest.raises(ValueError, match=f"{kind.__name__} has no step for shards, of ZeRO 1 to 3"):
            step(sharded, kind, **fast)
    drop_gradients(model, whole)
    step(model.parameters(), foreach=True)


def shared(a: str, b: str) -> Parts:
    model = Parts()
    model.get_submodule(a).plain = model.get_submodule(b).plain
    return model


@on_ranks(4)
def test_what_cant_be_had_is_refused_on_every_rank_before_anything_changes() -> None:
    """`tests/parallel/test_sync.py` has the refusals of one process."""
    on, other = mesh(dp=4), nn.Linear(2, 2)
    cases: list[tuple[Parts, dict, str]] = [
        (Parts(), {"zero": 4}, "zero stage 4 is none of 0, 1, 2 and 3"),
        (Parts(), {"zero": -1}, "zero stage -1 is none of"),
        (Parts(), {"blocks": other}, "blocks is a Linear"),
        (Parts(), {"blocks": ["0"]}, "blocks holds a str"),
        (Parts(), {"blocks": [other]}, "the block Linear is no submodule of the model"),
        (Parts(), {"zero": on.data.rank % 2}, "ranks 0 and 1 disagree about the data parallelism .stage: 0 and 1"),
        (shared("blocks.1", "blocks.0"), {}, r"blocks\.0\.plain and blocks\.1\.plain are one parameter in two units"),
        (shared("root", "blocks.0"), {}, r"blocks\.0\.plain and root\.plain are one parameter in two units"),
    ]
    for model, options, message in cases:
        with pytest.raises(ValueError, match=message):
            shard_data_parallel(model, on, **{"blocks": model.blocks, **options})
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
    shard_data_parallel(cases[-2][0], on)
    shard_data_parallel(cases[-1][0], on, cases[-1][0].blocks[1:])
    first, second = Parts(), Parts()
    shard_data_parallel(first, on, first.blocks)
    with pytest.raises(ValueError, match="the model is sharded over data already"):
        shard_data_parallel(first, on, first.blocks)
    with pytest.raises(ValueError, match="zero 1 has sharded can't be copied"):
        torch.optim.swa_utils.AveragedModel(first)
    with pytest.raises(ValueError, match="is sharded over data already: materialize first"):
        materialize(first, 0)
    second.root.plain = first.root.plain
    with pytest.raises(ValueError, match=r"root\.plain is sharded already"):
        shard_data_parallel(second, on)
    head = nn.Sequential(nn.Linear(2, 8, bias=False))
    shard_data_parallel(head, on, zero=3)
    for loss in (linear_cross_entropy, linear_log_prob):
        with pytest.raises(ValueError, match=f"call {loss.__name__} inside the model's forward"):
            loss(torch.ones(1, 2), head[0].weight, torch.tensor([1]))
    model = Parts()
    assert shard_data_parallel(model, Mesh(), model.blocks, zero=3) is model
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
