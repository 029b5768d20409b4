"""Recomputation against none: losses and gradients bitwise, bytes as the formula says, no collective too many."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from examples.gpt.config import GPTConfig
from examples.gpt.model import build_stages
from examples.gpt.pretrain import Trainer, parse
from mpcore import Mesh, ParallelMoE
from mpcore.layers import materialize, seed_dropout
from mpcore.layers.module import recomputing
from mpcore.memory_footprint import StorageTracker
from mpcore.parallel.recompute import KINDS, kept_bytes, recompute
from mpcore.pipeline.schedules import NAMES
from mpcore.sharding.local import local_tensor
from tests.calls import Calls
from tests.gpt_step import CONFIG, Run
from tests.pool import mesh, on_ranks
from tests.quick import some


def step(on: Mesh, kind: str, name: str = "1f1b", half: bool = False, every: int = 1, sp: bool = False, **changes):
    """Losses and gradients of two steps, two micro-batches a stage each, and the collectives of the second."""
    run = Run(
        on, name, 2 * on.pp.size, dtype=torch.float32 if half else torch.float64, sequence_parallel=sp,
        change=lambda stage: recompute(stage.blocks.values(), kind, every=every, preserve_rng_state=False), **changes,
    )  # fmt: skip
    losses = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext(), Calls(collectives=True) as calls:
            losses.append(run.step())
    gradients = {n: local_tensor(p.grad) for n, p in run.model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(run.model.parameters()))
    return losses, gradients, calls.counts()


def same(got, want) -> None:
    for a, b in zip(got[0], want[0], strict=True):
        assert torch.equal(a, b), f"loss {a.item()!r}, wanted {b.item()!r}"
    assert got[1].keys() == want[1].keys()
    for name in want[1]:
        assert torch.equal(got[1][name], want[1][name]), f"the gradient of {name} differs"


def check_bitwise(sizes: dict, name: str, **options) -> None:
    on = mesh(**sizes)
    want = step(on, "none", name, **options)
    for kind in ("selective", "full"):
        same(step(on, kind, name, **options), want)


@pytest.mark.parametrize(("sizes", "options"), [
    ({}, {"every": 2, "norm": "layer", "activation": "gelu", "bias": True}),
    ({"tp": 2}, {"half": True, "sp": True, "bias": True}),
    pytest.param({"tp": 2, "dp": 2}, {"sp": True, "positions": "learned"}, marks=pytest.mark.slow),
    pytest.param({}, {"half": True}, marks=pytest.mark.slow),
    *(pytest.param(sizes, {}, marks=pytest.mark.slow) for sizes in ({}, {"tp": 2}, {"dp": 2})),
], ids=str)  # fmt: skip
def test_pitfall_22_recomputed_losses_and_gradients_are_bitwise_the_kept_ones(ranks, sizes, options):
    """With dropout; under autocast; on shards, of sequences too; with fully_shard."""
    ranks(torch.Size(sizes.values()).numel(), check_bitwise, sizes, "1f1b", **options)


@pytest.mark.parametrize("name", some("zb", of=NAMES))
def test_pitfall_22_under_every_schedule(ranks, name):
    """Split backward asks for a block's activations twice."""
    ranks(2, check_bitwise, {"pp": 2}, name)


@on_ranks(2)
def test_selective_repeats_no_collective_and_full_only_those_whose_result_backward_needs() -> None:
    """Dropout saves a mask behind the last sum over tp, so the block is run to its end; without, to before that."""
    on, blocks, micro_batches = mesh(tp=2), 2, 2
    for options, fewer in (({}, 0), ({"dropout": 0.0}, 1)):
        calls = {kind: step(on, kind, layers=blocks, **options)[2] for kind in KINDS}
        assert calls["selective"] == calls["none"]
        assert calls["none"]["all_reduce"] == micro_batches * (4 * blocks + 2)
        assert calls["full"]["all_reduce"] - calls["none"]["all_reduce"] == (2 - fewer) * micro_batches * blocks
    calls = {kind: step(on, kind, sp=True, layers=blocks)[2] for kind in KINDS}
    assert calls["selective"] == calls["none"]
    more = calls["full"] - calls["none"]
    assert more == dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"), 2 * micro_batches * blocks)


@pytest.mark.parametrize(("sp", "dropout"), [(False, 0.0), (True, 0.2)])
@on_ranks(2)
def test_what_is_kept_is_what_the_formula_says(sp: bool, dropout: float) -> None:
    on = mesh(tp=2)
    config = GPTConfig(**{**CONFIG, "d_model": 16, "d_ff": 18, "heads": 4, "dropout": dropout})
    (stage,) = build_stages(config, on, [range(4)], [0], device="meta", dtype=torch.float64, sequence_parallel=sp)
    materialize(stage, seed=5)
    block, T, B, D, F = stage.blocks["0"], 8, 3, 16, 18
    x = torch.randn(B, T // 2 if sp else T, D, dtype=torch.float64, requires_grad=True)
    example = (x,), {"rotary": stage.ropes[1e4](torch.arange(T), torch.float64), "samples": torch.arange(B)}
    stream, whole = 8 * x.numel(), 8 * B * T * D
    want = {"full": stream}  # the input of the next block, as this one's is the output of the block before
    # and both halves' sum over tp, qkv and up; of gathered inputs both, whole
    want["selective"] = 2 * stream + 8 * B * T * (3 * D + 2 * F) // 2 + (2 * whole if sp else 0)
    for kind, size in want.items():
        counted = kept_bytes(block, example, kind)
        recompute([block], kind)
        with StorageTracker() as storages:
            y = block(*example[0], **example[1])
        for _ in range(100):  # gloo's threads let go of their tensors a little later
            if storages.held() <= size + 64:
                break
            time.sleep(0.02)
        # results that nothing needs are kept as shells of one element, 8 bytes
        for what, found in {"counted": counted, "held": storages.held()}.items():
            more = (found - size) // 8
            assert more == 0 or (kind == "selective" and 0 < more <= 9), f"{kind}: {what} {more} elements more"
        del y
    assert kept_bytes(block, example, "selective") < kept_bytes(block, example, "none")


def test_ranks_choose_and_refuse_together(ranks):
    """Else one sends again in backward what the other doesn't, or waits for a stage that has left."""
    (together, alone), (also, otherwise) = ranks(2, check_alike)
    assert together == also == ["selective", "none"]
    assert alone != otherwise
    messages = ranks(2, check_refused)
    assert len(set(messages)) == 1
    assert messages[0].endswith("0.055 is kept (on rank 0 of 2)")


def test_a_budget_is_kept_counted_and_refused_where_it_is_out_of_reach():
    (stage,) = build_stages(GPTConfig(**CONFIG), Mesh(), [range(4)], [0], device="meta", dtype=torch.float64)
    seed_dropout(stage, 0)
    x = torch.empty(2, 8, 12, dtype=torch.float64, device="meta", requires_grad=True)
    samples = torch.empty(2, dtype=torch.int64, device="meta")
    example = (x,), {"rotary": stage.ropes[1e4](torch.arange(8, device="meta"), torch.float64), "samples": samples}
    blocks = list(stage.blocks.values())
    bytes_of = {kind: kept_bytes(blocks[0], example, kind) for kind in KINDS}
    found = {budget: recompute(blocks, budget=budget, example=example) for budget in (1.0, 0.8, 0.5, 0.2)}
    assert found[1.0] == ["none"] * 4
    assert {"none", "selective"} == set(found[0.8])
    assert {"selective", "full"} == set(found[0.2])
    for budget, kinds in found.items():
        assert sum(bytes_of[kind] for kind in kinds) <= budget * 4 * bytes_of["none"]
    materialize(stage, seed=0)
    x = torch.randn(2, 8, 12, dtype=torch.float64, requires_grad=True)
    whole, given = [], {**example[1], "samples": torch.arange(2), "rotary": stage.ropes[1e4](torch.arange(8), x.dtype)}
    for kinds in ("none", 0.5):
        if kinds == "none":
            recompute(blocks)
            recompute(blocks, kinds)
        else:
            recompute(blocks, budget=kinds, example=example)
        with StorageTracker() as storages:
            y = x
            for block in blocks:
                y = block(y, **given)
            whole.append(storages.held())
    assert whole[1] <= 0.5 * whole[0]
    with pytest.raises(ValueError, match=r"budget 0.01 is out of reach: with all blocks recomputed in full 0") as error:
        recompute(blocks, budget=0.01, example=example)
    least = float(str(error.value).split()[-3])
    assert recompute(stage.blocks, budget=least, example=example) == ["full"] * 4, "the share that it names can be had"


def test_every_nth_block_is_recomputed_from_the_first():
    blocks = [nn.Identity() for _ in range(5)]
    assert recompute(blocks) == ["full"] * 5
    assert recompute(blocks, "selective", every=2) == ["selective", "none", "selective", "none", "selective"]
    assert recompute(blocks, every=3) == ["full", "none", "none", "full", "none"]
    with pytest.raises(ValueError, match="every 0 is smaller than 1"):
        recompute(blocks, every=0)


def check_alike() -> tuple[list[str], list[str]]:
    """Kinds chosen together and alone, where rank 1 keeps more of the first block and rank 0 of the second."""
    axis = mesh(tp=2).tp
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)]
    rows = {blocks[0]: 4 + 28 * axis.rank, blocks[1]: 32 - 28 * axis.rank}

    def example(block: nn.Module):
        return (torch.empty(rows[block], 8, requires_grad=True),), {}

    return tuple(recompute(blocks, budget=0.9, example=example, axes=axes) for axes in ((axis,), ()))


def check_refused() -> str:
    flags = ["--preset", "tiny-moe", "--layers", "2", "--set", "moe.every=2", "--d-model", "16", "--set", "moe.d_ff=64"]
    flags += ["--d-ff", "24", "--seq-len", "16", "--global-batch", "4", "--recompute", "budget=0.03"]
    with pytest.raises(ValueError, match=r"budget 0\.03 is out of reach") as refused:
        Trainer(parse(flags), mesh(pp=2))
    return str(refused.value)


def test_a_budget_counts_the_products_of_experts_and_keeps_them():
    """As their kernels keep them, and without reading how many tokens each has."""
    B, T, D, F, K = 2, 6, 8, 5, 2
    moe = ParallelMoE(D, F, 4, K, dtype=torch.float64)
    x = torch.empty(B, T, D, dtype=torch.float64, requires_grad=True)
    bytes_of = {kind: kept_bytes(moe, ((x,), {}), kind) for kind in KINDS}
    assert bytes_of["full"] + 8 * B * T * K * (2 * F + D) < bytes_of["selective"] < bytes_of["none"]
    assert recompute([moe], budget=0.9, example=((x,), {})) == ["selective"]
    y = moe.to("meta")(torch.empty_like(x, device="meta", requires_grad=True))
    with Calls() as operators:
        y.sum().backward()
    assert operators.counts()["grouped_linear_forward"] == 2, "gradients of inputs alone"


class Router(nn.Module):
    """Sends each token to one of two experts, counts calls, draws from torch's generator, changes products in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.route = nn.Linear(6, 2)
        self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("tokens", torch.zeros(2))

    def forward(self, x: Tensor, *, scale: Tensor, flag: str = "on") -> Tensor:
        assert flag == "on"
        weight, choice = self.route(x).softmax(-1).max(-1)
        if not recomputing():
            self.tokens += torch.bincount(choice, minlength=2)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (choice == i).nonzero().squeeze(-1)
            y = y.index_add(0, mine, torch.tanh(expert(x[mine]).mul_(scale)) * weight[mine, None])
        return x + self.dropout(y)


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("x_grad", [False, True])
def test_pitfall_22_23_routing_counters_generators_keywords_and_products_written_to(kind, x_grad):
    """Keyword tensors and those that the forward closes over get their gradient, and nobody else's; a deep copy has
    parameters of its own."""
    results = []
    for how in ("none", kind):
        model = Router()
        recompute([model], how)
        model = copy.deepcopy(model)
        torch.manual_seed(1)
        x = torch.randn(7, 6).requires_grad_(x_grad)
        scale = torch.tensor(1.5, requires_grad=True)
        y = model(x, scale=scale)
        y.square().sum().backward(retain_graph=True)
        after = torch.rand(3)
        gradients = [p.grad.clone() for p in (*model.parameters(), scale, *([x] if x_grad else []))]
        y.square().sum().backward()  # once more through the same graph
        doubled = [p.grad for p in model.parameters()]
        results.append([y.detach(), model.tokens, after, *gradients, *doubled])
        assert model.tokens.sum() == 7
        with torch.no_grad():
            model(x, scale=scale)
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_pitfall_22_evaluation_between_forward_and_backward(kind):
    """A forward in training is recomputed in training, and one in evaluation likewise: pipelines find shapes so."""
    for training in (True, False):
        results = []
        for how in ("none", kind):
            model = Router()
            recompute([model], how)
            torch.manual_seed(1)
            y = model.train(training)(torch.ones(7, 6), scale=torch.tensor(1.5))
            model.train(not training)
            y.square().sum().backward()
            assert model.training == model.dropout.training == (not training)
            results.append([y, *(p.grad for p in model.parameters())])
        assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


class Codebook(nn.Module):
    """Writes to buffers through `.data`, by assignment and in place, and counts in an attribute."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(3, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        y = torch.tanh(h * self.codes[0] - self.mean)
        self.codes.data.lerp_(h.detach()[:3], 0.1)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.calls += 1
        self.steps += 1
        return y * self.calls.item() * self.steps


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("layers", [
    lambda: [nn.BatchNorm1d(4), nn.Tanh()],
    lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()], lambda: [Codebook(), nn.Tanh()],
    lambda: [nn.RReLU()],
], ids=["batch_norm", "spectral_norm", "codebook", "rrelu"])  # fmt: skip
def test_pitfall_22_buffers_are_written_once_and_rrelu_keeps_its_noise(layers, kind):
    """Two micro-batches in flight, each recomputed with the buffers of its own forward."""
    results = []
    for how in ("none", kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), *layers()).double()
        recompute([model], how)
        for x in torch.randn(3, 2, 5, 4, dtype=torch.float64):
            outputs = [model(each) for each in x]
            for y in outputs:
                y.square().sum().backward()
        results.append([*model.buffers(), *(p.grad for p in model.parameters())])
    assert equal(results[1], results[0])


class FunctionalRReLU(nn.Module):
    def __init__(self, rrelu: Callable[..., Tensor]) -> None:
        super().__init__()
        self.rrelu = rrelu

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rrelu(x, training=True)


@pytest.mark.parametrize("rrelu", [nn.functional.rrelu, torch.rrelu], ids=["functional", "torch"])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_rrelu_as_a_function_at_the_end_of_a_block_is_refused(kind, rrelu):
    model = nn.Sequential(nn.Linear(4, 4), FunctionalRReLU(rrelu))
    recompute([model], kind)
    with pytest.raises(ValueError, match=r"rrelu.*use nn\.RReLU"):
        model(torch.randn(5, 4)).sum().backward()
    model.append(nn.Tanh())  # what comes last is saved after the noise
    results = []
    for how in (kind, "none"):
        recompute([model], how)
        torch.manual_seed(0)
        model.zero_grad()
        model(torch.ones(5, 4)).sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert equal(*results)


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh()).double()


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "kind", [kind if kind == "selective" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_each_kind_compiles_to_one_graph(kind):
    """Equal to eager; the backward of selective has no product of the forward, and that of full has."""
    model = small()
    recompute([model], kind)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    want = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    torch.compiler.reset()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().sum()
    with Calls() as operators:
        got = torch.autograd.grad(loss, (x, *model.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert (operators.counts()["addmm"] > 0) == (kind == "full")
    assert (operators.counts()["tanh"] > 0) == (kind != "none")
