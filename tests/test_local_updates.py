"""Local updates: workers on any layout against dense models that are merged by hand, and what they send."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.model import GPT
from mpcore import AdamW, ColumnParallelLinear, Mesh, Muon, build_mesh, decay_groups, simulate
from mpcore._torch.distributed import default_store
from mpcore.checkpoint import load, save
from mpcore.gradients import reduce_gradients
from mpcore.layers import materialize, update_routers
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.offload import offload_optimizer, offload_parameters
from mpcore.sharding.local import local_tensor, reshard
from mpcore.tools import diloco
from mpcore.tools.diloco import DiLoCo, Merge
from tests.equality import close
from tests.pool import Pool, mesh, on_ranks
from tests.quick import some
from tests.test_checkpoint import CONFIG, Run, same_bits, size_of

DILOCO = {"every": 4, "lr": 0.7, "momentum": 0.9}
PLAIN_MOMENTUM = {"every": 3, "lr": 0.5, "momentum": 0.8, "nesterov": False}
LOCAL_SGD = {"every": 2, "lr": 1.0, "momentum": 0.0}
FRAGMENTS = {"every": 5, "lr": 0.7, "momentum": 0.9, "fragments": 3}  # of two layers, so that one is empty
STEPS = 11


class Worker(Run):
    """A run whose optimizer merges."""

    def __init__(self, on: Mesh, options: dict, config: GPTConfig = CONFIG, zero: int = 0) -> None:
        super().__init__(on, config, zero % 10, replicate=zero // 10 or 1)
        blocks = {int(i): block for i, block in self.model.blocks.items()}
        self.merges = self.optimizer = DiLoCo(self.optimizer, self.model, on, blocks=blocks, **options)

    def step(self, step: int) -> float:
        loss = super().step(step * self.mesh.worlds.size + self.mesh.worlds.rank)
        self.merged = self.merges.merge(step + 1)
        return loss


def norm(tensors: list) -> float:
    return math.sqrt(sum(x.square().sum().item() for x in tensors))


class ByHand:
    """Dense models in one process, merged by torch's SGD."""

    def __init__(self, workers: int, options: dict, config: GPTConfig = CONFIG) -> None:
        self.runs = [Run(Mesh(), config) for _ in range(workers)]
        self.every, self.fragments = options["every"], options.get("fragments", 1)
        self.anchors = {name: nn.Parameter(p.detach().clone()) for name, p in self.runs[0].model.named_parameters()}
        momentum = {"momentum": options["momentum"], "nesterov": options.get("nesterov", options["momentum"] > 0)}
        self.outer = torch.optim.SGD(self.anchors.values(), lr=options["lr"], **momentum)
        self.norms: tuple[float, list[float]] | None = None

    def due(self, done: int) -> Iterator[int]:
        for fragment in range(self.fragments):
            first = (fragment + 1) * self.every // self.fragments
            if done >= first and (done - first) % self.every == 0:
                yield fragment

    @torch.no_grad()
    def merge(self, fragment: int) -> None:
        of = {name: int((re.findall(r"\d+", name) or ["0"])[0]) % self.fragments for name in self.anchors}
        models = [dict(run.model.named_parameters()) for run in self.runs]
        mine = [name for name in self.anchors if of[name] == fragment]
        moved = [[self.anchors[name] - model[name] for name in mine] for model in models]
        for name, *each in zip(mine, *moved, strict=True):
            self.anchors[name].grad = torch.stack(each).mean(0)
        mean = norm([self.anchors[name].grad for name in mine])
        self.norms = mean, [norm(each) for each in moved]
        self.outer.step()
        self.outer.zero_grad()
        for model in models:
            for name in mine:
                model[name].copy_(self.anchors[name])

    def step(self, step: int) -> list[float]:
        losses = [run.step(step * len(self.runs) + worker) for worker, run in enumerate(self.runs)]
        self.norms = None
        for fragment in self.due(step + 1):
            self.merge(fragment)
        return losses


@cache
def by_hand(workers: int, options: tuple, config: GPTConfig):
    """Losses, norms of merges and parameters, of each worker."""
    dense = ByHand(workers, dict(options), config)
    return [(dense.step(step), dense.norms) for step in range(STEPS)], [run.full() for run in dense.runs]


def train(sizes: dict, options: dict, config: GPTConfig, zero: int):
    run = Worker(mesh(**sizes), options, config, zero)
    steps = []
    for step in range(STEPS):
        if step == 3:
            run.evaluate()  # leaves parameters gathered
        steps.append((run.step(step), run.merged))
    reshard(run.model)
    return run.mesh.worlds.rank, steps, run.full()


LAYOUTS = [({"worlds": 2, "tp": 2}, DILOCO, 0), ({"worlds": 2, "pp": 2}, FRAGMENTS, 0),
           ({"worlds": 2, "dp": 2}, PLAIN_MOMENTUM, 1)]  # fmt: skip
MORE_LAYOUTS = [
    ({"worlds": 2, "tp": 2}, FRAGMENTS, 0), ({"worlds": 2, "dp": 2}, PLAIN_MOMENTUM, 0),
    ({"worlds": 2, "dp": 2}, FRAGMENTS, 1), ({"worlds": 3}, DILOCO, 0), ({"worlds": 2, "cp": 2}, LOCAL_SGD, 3),
    ({"worlds": 2, "dp": 2}, DILOCO, 2), ({"worlds": 2, "dp": 2}, DILOCO, 3), ({"worlds": 1, "tp": 3}, DILOCO, 0),
    ({"worlds": 2, "tp": 2, "dp": 2}, FRAGMENTS, 3), ({"worlds": 2, "tp": 2, "pp": 2}, DILOCO, 0),
    ({"worlds": 2, "pp": 2, "dp": 2}, FRAGMENTS, 1), ({"worlds": 2, "dp": 4}, DILOCO, 22),
    ({"worlds": 4, "tp": 2}, FRAGMENTS, 0),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "options", "zero"), some(*LAYOUTS[1:], of=LAYOUTS), ids=str)
def test_workers_on_every_layout_train_and_merge_as_dense_ones_by_hand(ranks, sizes, options, zero):
    """Losses and norms of all steps, parameters and Adam's moments in the end, dropout on."""
    compare_with_dense(ranks, sizes, options, zero)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "options", "zero"), MORE_LAYOUTS, ids=str)
def test_workers_on_eight_ranks_train_and_merge_as_dense_ones_by_hand(eight_ranks, sizes, options, zero):
    compare_with_dense(eight_ranks, sizes, options, zero)


def compare_with_dense(ranks: Pool, sizes: dict, options: dict, zero: int) -> None:
    config = replace(CONFIG, tie_embeddings="pp" in sizes)
    wanted, states = by_hand(sizes["worlds"], tuple(options.items()), config)
    seen = [set() for _ in range(sizes["worlds"])]
    for worker, steps, state in ranks(size_of(sizes), train, sizes, options, config, zero):
        for step, ((loss, merged), (losses, norms)) in enumerate(zip(steps, wanted, strict=True)):
            assert loss == pytest.approx(losses[worker], abs=1e-10), step
            assert (merged is None) == (norms is None), step
            if merged is not None:
                assert merged.step == step + 1
                assert merged.norm == pytest.approx(norms[0], rel=1e-9)
                assert merged.norms == pytest.approx(norms[1], rel=1e-9)
        for name, value in state.items():
            if "outer" not in name:
                close(value, states[worker][name], f"{name} of worker {worker}", 1e-10)
                seen[worker].add(name)
    assert all(names == states[0].keys() for names in seen)


# --- messages -------------------------------------------------------------------------------------------------------


def check_messages(sizes: dict, options: dict, steps: int):
    run = Worker(mesh(**sizes), options)

    def sent() -> list[int]:
        """Collectives of the workers, and agreements of the whole job, until now."""
        agreements = default_store().add(f"mpcore/agree/{dist.group.WORLD.group_name}.0/at/{dist.get_rank()}", 0)
        return [run.mesh.worlds.group._get_sequence_number_for_group(), agreements]

    counts = []
    for step in range(steps):
        before = sent()
        run.step(step)
        counts.append([after - b for after, b in zip(sent(), before, strict=True)])
    return counts


@pytest.mark.parametrize("options", some(FRAGMENTS, of=[DILOCO]), ids=str)
def test_nothing_is_sent_between_workers_between_merges(ranks, options):
    first = {(i + 1) * options["every"] // options.get("fragments", 1) for i in range(options.get("fragments", 1))}
    for counts in ranks(4, check_messages, {"worlds": 2, "tp": 2}, options, 10):
        for step, of in enumerate(counts):
            due = (step + 1) % options["every"] in {n % options["every"] for n in first}
            assert [count > 0 for count in of] == [due, due], (step, of)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def check_save(sizes: dict, options: dict, zero: int, folder: str, at: int, how: str):
    run = Worker(mesh(**sizes), options, zero=zero)
    run.steps(0, at)
    run.evaluate()
    reshard(run.model)
    run.save(f"{folder}/{run.mesh.worlds.rank}", at)
    return run.steps(at, STEPS)


def check_load(sizes: dict, options: dict, zero: int, folder: str, at: int, how: str):
    run = Worker(mesh(**sizes), options, zero=zero)
    if how == "used":
        run.steps(20, 22)
    run.load(f"{folder}/{run.mesh.worlds.rank}")
    return run.mesh.worlds.rank, run.steps(at, STEPS)


@pytest.mark.parametrize(
    ("how", "at"),
    [("used", 6), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fresh", 4), ("fresh", 6), ("used", 4)))],
    ids={4: "at a merge", 6: "between two"}.get,
)
def test_any_layout_goes_on_from_what_another_has_saved(ranks, tmp_path, at, how):
    writer, reader = ({"worlds": 2, "tp": 2}, DILOCO, 0), ({"worlds": 2, "dp": 2}, DILOCO, 3)
    wanted = ranks(4, check_save, *writer, str(tmp_path), at, how)
    for worker, losses in ranks(4, check_load, *reader, str(tmp_path), at, how):
        assert losses == pytest.approx(wanted[2 * worker], abs=1e-10)


def check_from_plain(folder: str):
    on = mesh(worlds=2)
    run = Worker(on, DILOCO)
    manifest = load(f"{folder}/plain", run.model, run.optimizer, mesh=on)
    losses = [run.step(step) for step in range(manifest.step, 8)]
    save(f"{folder}/{on.worlds.rank}", run.model, run.optimizer, mesh=on, step=8)
    return losses, {name: x for name, x in run.full().items() if name.startswith("model/")}


def test_workers_begin_from_a_checkpoint_without_merges_and_a_run_without_from_theirs(ranks, tmp_path):
    plain = Run(Mesh())
    plain.steps(0, 4)
    plain.save(tmp_path / "plain", 4)
    (losses, merged), (_, other) = ranks(2, check_from_plain, str(tmp_path))
    same_bits(other, merged)
    dense = ByHand(2, DILOCO)
    for run in dense.runs:
        run.load(tmp_path / "plain")
    for name, p in dense.runs[0].model.named_parameters():
        dense.anchors[name].data.copy_(p)
    assert losses == pytest.approx([dense.step(step)[0] for step in range(4, 8)], abs=1e-10)
    again = Run(Mesh())
    assert again.load(tmp_path / "0").step == 8
    same_bits({name: x for name, x in again.full().items() if name.startswith("model/")}, merged)


# --- precision, buffers, frozen parameters --------------------------------------------------------------------------


def check_half(dtype: torch.dtype, masters: bool):
    on = mesh(worlds=2)
    model = materialize(nn.Sequential(ColumnParallelLinear(6, 4, device="meta", dtype=dtype)), 0)
    (weight,) = (p for p in model.parameters() if p.dim() > 1)
    start = weight.detach().float().clone()
    inner = AdamW(model, lr=1e-2, masters=masters)
    optimizer = DiLoCo(inner, model, on, every=2, lr=1.0, momentum=0.0)
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + on.worlds.rank + step)
        optimizer.step()
        before = inner.state[weight]["master"].clone() if masters else weight.detach().float().clone()
        merged = optimizer.merge(step + 1)
    assert merged is not None
    anchor = optimizer.state[weight]["outer_anchor"]
    assert anchor.dtype == torch.float32
    assert torch.equal(weight, anchor.to(dtype))
    if masters:
        assert torch.equal(inner.state[weight]["master"], anchor)
    assert [optimizer.merge(step + 1).norm for step in (4, 5) if optimizer.due(step + 1) is not None] == [0]
    assert torch.equal(optimizer.state[weight]["outer_anchor"], anchor)
    return before, anchor.clone(), start


@pytest.mark.parametrize(("dtype", "masters"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)])
def test_pitfall_34_half_precision_is_merged_in_float32(ranks, dtype, masters):
    (one, anchor, start), (two, other, _) = ranks(2, check_half, dtype, masters)
    assert torch.equal(anchor, other)
    rounding = 0 if masters else torch.finfo(dtype).eps * start.abs().max().item()  # anchors beside what was given out
    close(anchor, (one + two) / 2, "the mean of what workers had", 1e-6 + rounding)
    assert not torch.equal(anchor, anchor.to(dtype).float()), "the mean of two has more bits than either"


class Counting(nn.Module):
    """A module with a buffer that training moves, one that isn't saved, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def check_buffers():
    on = mesh(worlds=2)
    model = Counting()
    optimizer = DiLoCo(torch.optim.SGD([model.weight, model.frozen], lr=1.0), model, on, every=2)
    for step in range(2):
        for buffer in model.buffers():
            buffer += 1 + on.worlds.rank
        optimizer.merge(step + 1)
    return [b.tolist() for b in (model.bias, model.steps, model.cache)], len(optimizer.state)


def test_saved_buffers_are_averaged_and_frozen_parameters_left_alone(ranks):
    for worker, (buffers, states) in enumerate(ranks(2, check_buffers)):
        assert buffers == [[3.0] * 3, 2 * (1 + worker), [2.0 * (1 + worker)] * 3]
        assert states == 1


def check_router(balance: dict, zero: int):
    on = mesh(worlds=2, dp=2)
    config = GPTConfig(vocab_size=11, seq_len=4, layers=2, d_model=8, heads=2, d_ff=8, moe=MoEConfig(4, 2, **balance))
    model = materialize(GPT(config, on, device="meta"), 3)
    shard_data_parallel(model, on, model.blocks.values(), zero=zero)
    optimizer = DiLoCo(AdamW(model), model, on, every=2)
    g = torch.Generator().manual_seed(on.job.rank)
    for step in range(2):
        arguments = {"samples": torch.arange(2), "loss_factor": torch.ones(2, dtype=torch.float64)}
        logits = model(torch.randint(11, (2, 4), generator=g), **arguments)
        logits.logsumexp(-1).sum().backward()
        reduce_gradients(model)
        update_routers(model, on)
        optimizer.step()
        optimizer.zero_grad()
        before = {n: local_tensor(p).detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        assert (optimizer.merge(step + 1) is not None) == (step == 1)
    reshard(model)
    after = {n: local_tensor(p).detach().clone() for n, p in model.named_parameters()}
    return on.world.rank, before, after


@pytest.mark.parametrize(("zero", "balance"), some(
    (3, {"aux_loss": None, "bias_rate": 0.1}), (0, {"aux_loss": "global"}),
    of=[(0, {"aux_loss": None, "bias_rate": 0.1}), (3, {"aux_loss": "global"})],
), ids=str)  # fmt: skip
def test_what_training_moves_without_gradients_is_averaged(ranks, balance, zero):
    """Biases of routers are frozen parameters; afterwards all of the workers' parameters are the same bits."""
    found = ranks(4, check_router, balance, zero)
    for place in range(2):
        (_, before, after), (_, other_before, other_after) = (found[place], found[place + 2])
        same_bits(other_after, after)
        assert any(not torch.equal(x, other_before[name]) for name, x in before.items())
        for name, x in before.items():
            close(after[name], (x + other_before[name]) / 2, name, 1e-6)


@on_ranks(2)
def test_parameters_may_lie_on_the_host():
    on = mesh(worlds=2)
    losses = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        inner = AdamW(model, lr=0.1)
        optimizer = DiLoCo(inner, model, on, every=2)
        optimizer.begin()
        away = offload_parameters(model.children(), inner, pin_memory=False) if offload else None
        for step in range(4):
            loss = model(torch.ones(2, 3) * (1 + on.worlds.rank)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with away.here() if away else contextlib.nullcontext():
                optimizer.merge(step + 1)
            losses.append(loss.item())
    assert losses[:4] == losses[4:]


@on_ranks(4)
def test_pitfall_34_masters_of_shards_may_lie_on_the_host():
    on = mesh(worlds=2, dp=2)
    found = []
    for offload in (lambda optimizer: optimizer, offload_optimizer):
        model = materialize(nn.Sequential(*(nn.Linear(3, 3, device="meta", dtype=torch.bfloat16) for _ in range(2))), 0)
        shard_data_parallel(model, on, zero=2)
        optimizer = DiLoCo(offload(AdamW(model, lr=0.1)), model, on, every=2)
        for step in range(5):
            model(torch.ones(2, 3, dtype=torch.bfloat16) * (1 + on.worlds.rank)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.merge(step + 1)
        slots = {
            f"{slot} of {name}": x for name, p in model.named_parameters() for slot, x in optimizer.state[p].items()
        }
        held = {**dict(model.named_parameters()), **slots}
        found.append({name: local_tensor(x).detach().clone() for name, x in held.items()})
    same_bits(found[1], found[0])


@on_ranks(2)
def test_a_parameter_that_this_worker_never_used_keeps_its_outer_momentum(tmp_path):
    on, folder = mesh(worlds=2), f"{tmp_path}/{mesh(worlds=2).worlds.rank}"

    def build():
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(2, 2, dtype=torch.bfloat16) for name in ("0", "1", "unused")})
        return model, DiLoCo(AdamW(model, lr=0.1), model, on, every=1)

    def step(model, optimizer):
        model[str(on.worlds.rank)](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.merge(1)

    runs = build(), build()
    step(*runs[0])
    save(folder, *runs[0], mesh=on, step=1)
    load(folder, *runs[1], mesh=on)
    runs[1][1].begin()
    for run in runs:
        step(*run)
    same_bits(dict(runs[1][0].named_parameters()), dict(runs[0][0].named_parameters()))
    plain = torch.optim.AdamW(decay_groups(runs[0][0].float(), 0.01))
    load(folder, runs[0][0], plain, mesh=on, cast=True)
    runs[0][0]["0"](torch.ones(1, 2)).sum().backward()
    plain.step()
    runs[1][1].state[runs[1][0]["unused"].bias]["outer_momentum"].fill_(on.worlds.rank)
    with pytest.raises(ValueError, match="outer momentum of unused"):
        runs[1][1].begin()


@on_ranks(4)
def test_any_optimizer_and_torchs_schedules_work_with_it():
    on = mesh(worlds=2, tp=2)
    model = materialize(nn.Sequential(ColumnParallelLinear(8, 8, tp=on.tp, bias=False, device="meta")), 0)
    optimizer = DiLoCo(Muon(model, mesh=on), model, on, every=1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    scheduler.step()
    assert optimizer.merge(1) is not None
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.5e-3
    assert {"momentum_buffer", "outer_anchor"} <= optimizer.state[model[0].weight].keys()


def test_torchs_optimizer_gets_moments_in_its_dtype_and_outer_state_as_it_was(tmp_path):
    on = build_mesh(worlds=1)
    model = ColumnParallelLinear(4, 4, bias=False, dtype=torch.bfloat16)
    for step, inner in enumerate((AdamW(model), torch.optim.AdamW(model.parameters()))):
        optimizer = DiLoCo(inner, model, on, every=2)
        if step:
            load(tmp_path / "0", model, optimizer, mesh=on, cast=True)
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        save(tmp_path / f"{step}", model, optimizer, mesh=on, step=step)
    without = torch.optim.AdamW(model.parameters())
    load(tmp_path / "1", model, without, mesh=on)
    assert all(without.state[p]["outer_anchor"].dtype == torch.float32 for p in model.parameters())


def test_parameters_that_join_later_are_stepped_and_merged():
    """One worker whose outer step takes all: as the inner optimizer alone."""
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1)
    inner = torch.optim.SGD(models[1][0].parameters(), lr=0.1)
    late = models[1].pop(1)
    optimizer = DiLoCo(inner, models[1], Mesh(), every=1, lr=1.0, momentum=0.0)
    with pytest.raises(ValueError, match="is none of the model's"):
        optimizer.add_param_group({"params": late.parameters()})  # nothing is added
    optimizer.add_param_group({"params": list(models[1].append(late)[1].parameters())})
    for step in (1, 2):
        for model, each in zip(models, (plain, optimizer), strict=True):
            each.zero_grad()
            model(torch.ones(1, 2).double()).square().sum().backward()
            each.step()
        assert optimizer.merge(step) is not None
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-14)


# --- what is refused ------------------------------------------------------------------------------------------------


def train_until_refused(what: str) -> None:
    on = mesh(worlds=2, tp=2)
    torch.manual_seed(0 if what != "seed" else on.worlds.rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + (on.worlds.rank if what == "shape" else 0)))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DiLoCo(inner, model, on, every=2 + (on.worlds.rank if what == "every" else 0))
    for step in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if what == "nan" and on.worlds.rank == 1 and on.tp.rank == 1:
            model[1].bias.grad.fill_(math.nan)
        optimizer.step()
        if what == "anchor" and on.job.rank == 2:
            optimizer.state[model[0].bias]["outer_anchor"][1] += 1e-7
        before = [p.detach().clone() for p in model.parameters()]
        try:
            optimizer.merge(step + 1)
        except ValueError:
            assert all(x.allclose(p, equal_nan=True) for x, p in zip(before, model.parameters(), strict=True))
            raise


@on_ranks(4)
def test_workers_that_differ_are_refused_on_all_ranks():
    for what, message in {
        "seed": r"0.weight differs between workers 0 and 1 of 2: begin all with one seed or one checkpoint",
        "shape": r"ranks 0 and 1 disagree about the model of each worker \(1.bias: .*\(3,\).* and .*\(4,\)",
        "every": r"ranks 0 and 2 disagree about the local updates \(every: 2 and 3\)",
        "anchor": r"0.bias after the last merge differs between workers 0 and 1 of 2",
        "nan": r"1.bias of worker 1 of 2 is not finite: nothing was merged \(on rank 3 of 4\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            train_until_refused(what)


@pytest.mark.parametrize(("options", "said"), [
    ({"every": 0}, "every 0 is not at least one step"), ({"fragments": 2}, "fragments 2 are of blocks, and none"),
    ({"every": 3, "fragments": 4}, "fragments 4 is not from 1 to the 3 steps"), ({"lr": 0.0}, "lr 0.0 is not above 0"),
    ({"momentum": 1.0}, "momentum 1.0 not from 0 to below 1"),
    ({"model": nn.Linear(4, 3)}, r"parameter of shape \(2, 3\) is none of the model's"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options, said):
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=said):
        DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), **{"model": model, "mesh": Mesh(), **options})


@pytest.mark.parametrize(("changes", "want"), [([(1, 0), (0, 1)], 0.0), ([(1, 2), (3, 1), (-2, 5)], 3 / 11)])
def test_agreement_is_the_mean_inner_product_over_the_mean_square(changes, want):
    rows = torch.tensor(changes, dtype=torch.float64)
    merge = Merge(1, 0, float(rows.mean(0).norm()), tuple(row.norm().item() for row in rows))
    assert merge.agreement == pytest.approx(want, abs=1e-12)


def check_empty():
    on = mesh(worlds=2, dp=2)
    model = materialize(nn.Sequential(nn.Linear(3, 1, device="meta")), 0)
    shard_data_parallel(model, on, zero=3)
    optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=1.0), model, on, every=1)
    (model(torch.ones(2, 3)).sum() * (1 + on.worlds.rank)).backward()
    optimizer.step()
    assert optimizer.merge(1) is not None
    return [local_tensor(p).numel() for p in model.parameters()]


def test_a_rank_may_hold_nothing(ranks):
    assert [0, 0] in ranks(4, check_empty)


@on_ranks(2)
def test_merges_may_begin_after_a_forward_that_gathered_parameters():
    on = mesh(worlds=1, dp=2)
    model = nn.Linear(4, 4, dtype=torch.float64)
    shard_data_parallel(model, on, zero=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4, dtype=torch.float64))  # ZeRO-2 keeps them gathered, and no backward follows
    outer = DiLoCo(optimizer, model, on, every=1)
    assert set(outer.names.values()) == {"weight", "bias"}
    assert all(isinstance(p, DTensor) for p in outer.names)


def averages() -> list[list[float]]:
    on = build_mesh(worlds=3, device_type="cpu")
    outer = DiLoCo.__new__(DiLoCo)
    object.__setattr__(outer, "mesh", on)
    rank = on.worlds.rank
    tensors = [torch.arange(5.0) * (rank + 1), torch.full((2, 2), float(rank)).double(), torch.tensor(3.0 * rank),
               torch.full((7,), (256.0, 1.0, 1.0)[rank], dtype=torch.bfloat16)]  # fmt: skip
    outer._average(tensors)
    gathered = outer._gather(torch.tensor([rank, 10 * rank]))
    return [x.double().flatten().tolist() for x in tensors] + [gathered.flatten().tolist()]


@pytest.mark.parametrize("bucket", [2**25, 6, 1])
def test_tensors_are_averaged_over_workers_whatever_their_sizes(monkeypatch, bucket):
    monkeypatch.setattr(diloco, "_BUCKET", bucket)
    want = [[2.0 * i for i in range(5)], [1.0] * 4, [3.0], [86.0] * 7, [0, 0, 1, 10, 2, 20]]
    assert simulate(averages, ranks=3) == [want] * 3
