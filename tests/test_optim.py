"""Optimizers against torch's, and on every layout against the unsharded model, bit for bit; schedules."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from mpcore import AdamW, Axis, Mesh, Muon, decay_groups, parallelize
from mpcore.checkpoint import load, save
from mpcore.checkpoint.pieces import like
from mpcore.gradients.accumulate import mark_reduced
from mpcore.interop.parallelize import Colwise
from mpcore.layers import ColumnParallelEmbedding, materialize
from mpcore.optim.adamw import logical_indices
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.offload import offload_optimizer
from mpcore.sharding import shardings
from mpcore.sharding.declare import Sharding, cut
from mpcore.sharding.local import data_run, is_dtensor
from tests.equality import close
from tests.gpt_step import over_data
from tests.pool import mesh
from tests.test_checkpoint import Run, same_bits
from tests.test_gradients import draw, hash_of

CONFIG = GPTConfig(vocab_size=23, seq_len=6, layers=2, d_model=12, heads=6, kv_heads=2, d_ff=7)
OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}


def adamw(model, on, **options):
    return AdamW(model, **OPTIONS, **options)


def muon(model, on, **options):
    heads = [model.head] if getattr(model, "last", True) else []
    return Muon(model, mesh=on, exclude=heads, **OPTIONS, **options)


KINDS = {
    "adamw": adamw, "adamw-bf16": partial(adamw, state_dtype=torch.bfloat16, seed=3),
    "adamw no masters": partial(adamw, masters=False, seed=3), "muon": muon,
    "muon-bf16": partial(muon, state_dtype=torch.bfloat16),
}  # fmt: skip


def give_gradients(model, step, dtype):
    """A fixed gradient for every logical parameter, of which this rank takes its part."""
    declared = shardings(model)
    for name, p in model.named_parameters():
        sharding = declared[name]
        local = sharding.take(draw(hash_of(name) + 7919 * step, *sharding.shape)).to(dtype)
        if is_dtensor(p):
            start, end = data_run(p)
            local = local[start:end]
        p.grad = like(p, local.clone())
        mark_reduced(p)


def full_state(model, optimizer, on):
    """Parameters and optimizer state, whole: a collective."""
    found, declared = {}, shardings(model)
    for name, p in model.named_parameters():
        for slot, value in {"weight": p, **optimizer.state[p]}.items():
            whole = value if value.dim() == 0 else over_data(value, on, declared[name])
            found[f"{slot} of {name}"] = whole.clone()
    return found


def train(kind, sizes, zero, dtype, steps=3, scale=None):
    on = mesh(**sizes) if sizes else Mesh()
    model = materialize(GPT(CONFIG, on, device="meta", dtype=dtype), 5)
    if zero:
        shard_data_parallel(model, on, model.blocks.values())
    optimizer = KINDS[kind](model, on)
    for step in range(steps):
        give_gradients(model, step, dtype)
        optimizer.step(scale=scale)
        optimizer.zero_grad()
    return full_state(model, optimizer, on)


_alone: dict = {}


def alone(kind, dtype):
    if (kind, dtype) not in _alone:
        _alone[kind, dtype] = train(kind, {}, False, dtype)
    return _alone[kind, dtype]


LAYOUTS = [({"tp": 3}, False), ({"tp": 2, "dp": 2}, True)]
MORE_LAYOUTS = [({"tp": 4}, False), ({"dp": 3}, True), ({"tp": 2, "dp": 2}, False)]
CASES = [("adamw", torch.float32), ("adamw", torch.bfloat16), ("adamw-bf16", torch.float32), ("muon", torch.float32),
         ("adamw no masters", torch.bfloat16), ("muon-bf16", torch.bfloat16)]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "zero"), [*LAYOUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_LAYOUTS)], ids=str
)
def test_pitfall_34_a_step_is_that_of_the_whole_model_bit_for_bit_on_every_layout(ranks, sizes, zero):
    """Decay groups, bfloat16 state rounded at random, masters, and Muon's whole matrices: KV heads replicated over tp,
    uneven shards, and data shards that cross and miss parameters."""
    for kind, dtype in CASES:
        for got in ranks(math.prod(sizes.values()), train, kind, sizes, zero, dtype):
            want = alone(kind, dtype)
            ours, torchs = set(), set()
            for item in want:
                name = item.rpartition(" ")[2]
                slots = [want.get(f"{slot} of {name}") for slot in ("weight", "exp_avg")]
                plain = all(x is not None and x.dtype == torch.float32 for x in slots)
                (torchs if plain else ours).add(item)
            assert bool(ours) == (kind != "adamw" or dtype != torch.float32)
            same_bits({name: got[name] for name in ours}, {name: want[name] for name in ours})
            for item in torchs:  # torch's fused step rounds the tail of a tensor otherwise than what fills its vectors
                close(got[item], want[item], item, 1e-6)


def small(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_adamw_is_torchs_fused_one_bit_for_bit(dtype):
    ours, theirs = small(dtype), small(dtype)
    a, b = AdamW(ours, **OPTIONS), torch.optim.AdamW(decay_groups(theirs, 0.1), lr=0.01, betas=(0.8, 0.95), fused=True)
    for step in range(5):
        for model, optimizer in ((ours, a), (theirs, b)):
            give_gradients(model, step, dtype)
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(a.state[p]["exp_avg_sq"], b.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_train_as_float32_does_and_the_parameter_is_their_rounding(dtype):
    half, single = small(dtype), small(dtype).float()
    a, b = AdamW(half, **OPTIONS), torch.optim.AdamW(decay_groups(single, 0.1), lr=0.01, betas=(0.8, 0.95))
    for step in range(20):
        give_gradients(half, step, dtype)
        for p, q in zip(half.parameters(), single.parameters(), strict=True):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(half.parameters(), single.parameters(), strict=True):
        close(a.state[p]["master"], q.detach(), "master", 1e-6)
        assert torch.equal(p, a.state[p]["master"].to(dtype))


def test_bfloat16_moments_follow_float32_ones_and_would_stall_without_chance():
    """With beta2 = 0.999 a step changes v by less than half of bfloat16's last place: rounded to nearest, it stands."""
    model, exact = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    a, b = AdamW(model, 0.0, (0.9, 0.999), state_dtype=torch.bfloat16), AdamW(exact, 0.0, (0.9, 0.999))
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(400):
        for m, optimizer in ((model, a), (exact, b)):
            m.weight.grad = torch.ones(64, 64)
            optimizer.step()
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    got, want = a.state[model.weight]["exp_avg_sq"].float(), b.state[exact.weight]["exp_avg_sq"]
    assert got.mean().item() == pytest.approx(want.mean().item(), rel=0.01)
    assert nearest.item() < 0.9 * want.mean().item()


def test_a_checkpoint_of_muon_knows_its_matrices(tmp_path):
    """One matrix or three is another rule: a plan that declares blocks changes it, and split_blocks=False doesn't."""

    def build(blocks: int, **options) -> tuple[nn.Module, Muon]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(4, 12, dtype=torch.float64))
        if blocks:
            model = parallelize(model, {"0": Colwise(blocks=blocks)}, tp=Axis())
        return model, Muon(model, 0.1, **options)

    def train(model: nn.Module, optimizer: Muon) -> torch.Tensor:
        for step in range(2):
            give_gradients(model, step, torch.float64)
            optimizer.step()
        return model[0].weight.detach().clone()

    for i, (first, then, same) in enumerate([(0, 3, 0), (3, 0, 3), (3, 2, 3)]):
        model, optimizer = build(first)
        train(model, optimizer)
        save(tmp_path / str(i), model, optimizer, mesh=Mesh(), step=2)
        with pytest.raises(ValueError, match=rf"0.weight as {first or 1} matri\w+.*, here as {then or 1} matri"):
            load(tmp_path / str(i), *build(then), mesh=Mesh())
        again = build(same)
        load(tmp_path / str(i), *again, mesh=Mesh())
        close(train(*again), train(model, optimizer), f"{first} blocks")
    plain, named = build(0), build(3, split_blocks=False)
    assert not torch.equal(train(*build(3)), train(*build(0)))
    load(tmp_path / "0", *plain, mesh=Mesh())
    load(tmp_path / "0", *named, mesh=Mesh())
    close(train(*named), train(*plain), "one matrix by name")


def test_muon_leaves_kernels_tables_and_vectors_to_adamw():
    """A kernel of 2 x 2 is no matrix, nor is a table of each head's bias."""
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv1d(4, 4, 2), ColumnParallelEmbedding(5, 4), nn.Linear(4, 4))
    assert Muon(model).param_groups[0]["params"] == [model[3].weight]


def check_unused():
    """A gradient on some ranks alone counts as zero on the others; one on none leaves the parameter alone."""
    on = mesh(dp=2)
    model = nn.ParameterList(torch.ones(2, 3) for _ in range(3))
    optimizer = Muon(model, mesh=on)
    if on.data.rank == 1:
        model[1].grad = draw(1, 2, 3).float()
    model[2].grad = draw(2, 2, 3).float()
    optimizer.step()
    assert torch.equal(model[0], torch.ones(2, 3))
    assert not torch.equal(model[2], torch.ones(2, 3))
    assert len(optimizer.state) == 2
    for kind in (AdamW, Muon, lambda model: offload_optimizer(torch.optim.AdamW(model.parameters()))):
        model = small()
        optimizer = kind(model)
        shard_data_parallel(model, on)
        model(torch.ones(2, 5)).sum().backward()
        with pytest.raises(ValueError, match=r"shape \(7, 5\) is no longer the model's.* make the optimizer after"):
            optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_of_a_step_is_a_scale_of_its_gradients(kind):
    dtype = torch.bfloat16 if kind == "adamw no masters" else torch.float32
    states = []
    for scale in (None, torch.tensor(0.25), 0.25):
        model = materialize(GPT(CONFIG, device="meta", dtype=dtype), 5)
        optimizer = KINDS[kind](model, Mesh())
        give_gradients(model, 0, dtype)
        for p in model.parameters():
            p.grad *= 0.25 if scale is None else 1
        optimizer.step(scale=scale)
        states.append(full_state(model, optimizer, Mesh()))
    same_bits(states[0], states[1])
    same_bits(states[0], states[2])


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_state_dict_brings_everything_back(kind):
    model, other = (materialize(GPT(CONFIG, device="meta", dtype=torch.bfloat16), 5) for _ in range(2))
    first, second = KINDS[kind](model, Mesh()), KINDS[kind](other, Mesh())
    for step in range(2):
        give_gradients(model, step, torch.bfloat16)
        first.step()
    other.load_state_dict(model.state_dict())
    second.load_state_dict(first.state_dict())
    for each, optimizer in ((model, first), (other, second)):
        give_gradients(each, 3, torch.bfloat16)
        optimizer.step()
    same_bits(full_state(other, second, Mesh()), full_state(model, first, Mesh()))


class Trained(Run):
    """A run of the checkpoint tests, with another optimizer and dtype."""

    def __init__(self, kind, dtype, *args, **options):
        super().__init__(*args, **options)
        self.model.to(dtype)
        self.optimizer = KINDS[kind](self.model, self.mesh)


def check_resume(kind, dtype, sizes, zero, path, writes):
    run = Trained(kind, dtype, mesh(**sizes), zero=zero, seed=5 if writes else 6)
    if writes:
        run.steps(0, 2)
        run.save(path, 2)
    else:
        run.step(9)
        run.load(path)
    state = run.full()
    losses = run.steps(2, 4)
    return state, losses, run.full()


@pytest.mark.parametrize(("kind", "dtype"), [
    pytest.param("adamw-bf16", torch.float32, marks=pytest.mark.slow),
    pytest.param("adamw", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("muon", torch.float32, marks=pytest.mark.slow), ("muon-bf16", torch.bfloat16),
], ids=str)  # fmt: skip
def test_pitfall_38_each_optimizer_resumes_bitwise_and_moves_to_other_layouts(ranks, tmp_path, kind, dtype):
    sizes, path = {"tp": 2, "dp": 2}, str(tmp_path / "step")
    written = ranks(4, check_resume, kind, dtype, sizes, True, path, True)
    for got, want in zip(ranks(4, check_resume, kind, dtype, sizes, True, path, False), written, strict=True):
        assert got[1] == want[1]
        same_bits(got[0], want[0])
        same_bits(got[2], want[2])
    for state, _, _ in ranks(3, check_resume, kind, dtype, {"tp": 3}, False, path, False):
        same_bits(state, written[0][0])


def test_a_place_is_an_elements_index_in_the_whole_tensor():
    cuts = (cut(2, Axis(2, 1), 0), cut(4, Axis(2, 0), 2)), (cut(4, Axis(3, 1), 2),)
    for sharding in (
        *map(Sharding, [(), (1,), (5,), (2, 3, 4), (0, 3)]),
        *(Sharding((2, 3, 4), each) for each in cuts),
    ):
        rows, columns = logical_indices(torch.zeros(sharding.local_shape), sharding)
        want = sharding.take(torch.arange(math.prod(sharding.shape)).view(sharding.shape))
        assert torch.equal((rows[:, None] + columns).view(want.shape), want)


def test_what_is_refused():
    half, first, frozen = AdamW(small(torch.bfloat16), masters=False), Muon(small()), small()
    half.model.append(nn.Linear(2, 2, dtype=torch.float16))
    frozen[0].requires_grad_(False)
    later = Muon(frozen)
    foreign = nn.Linear(2, 2).weight
    for call, error, message in [
        (partial(AdamW, small(torch.float16), masters=False), ValueError, "0.weight is float16 and vanishes"),
        (partial(AdamW, small(), groups=decay_groups(small(), 0.1)), ValueError, r"shape \(7, 5\) .* none of"),
        (partial(Muon, small(), adjust_lr_fn="best"), ValueError, "adjust_lr_fn 'best' is neither"),
        (partial(decay_groups, small(), 0.1, ["0.weight"]), TypeError, "exclude holds '0.weight', neither"),
        (partial(Muon, small(), exclude=["0"]), TypeError, "exclude holds '0', neither"),
        (partial(AdamW, small().parameters()), TypeError, "the model, .* not generator"),
        (partial(Muon, small().parameters()), TypeError, "the model, .* not generator"),
        (partial(AdamW(small()).add_param_group, {"params": foreign}), ValueError, r"shape \(2, 2\) .* none of"),
        (partial(half.add_param_group, {"params": half.model[3].bias}), ValueError, "3.bias is float16 and vanishes"),
        (partial(first.add_param_group, {"params": []}), ValueError, "give it 'muon': True"),
        (partial(later.add_param_group, {"params": frozen[0].bias, "muon": True}), ValueError, "0.bias has 1 dim"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert [len(optimizer.param_groups) for optimizer in (half, first, later)] == [2, 3, 3]


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_what_was_frozen_is_in_no_group_and_zero_grad_forgets_it_once_it_is_thawed(kind):
    model = small()
    model[0].requires_grad_(False)
    optimizer = kind(model)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters() if p.requires_grad
    }
    model.requires_grad_(True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if kind is AdamW:  # where groups are said, others may hold the rest
        AdamW(model, groups=decay_groups(model, 0.1, [model[0]])).zero_grad()
        assert all((p.grad is None) == (name[0] != "0") for name, p in model.named_parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def check_other_layout(kind) -> None:
    """What another layout, or another model, has saved by torch would be read past its end."""
    on = mesh(dp=2)
    sharded, whole, wide = (kind(model) for model in (shard_data_parallel(small(), on), small(), small()))
    wide.model[0] = nn.Linear(5, 8)
    wide = kind(wide.model)
    for each in (sharded, whole, wide):
        give_gradients(each.model, 0, torch.float32)
        each.step()
    for into, state in ((sharded, whole), (whole, sharded), (whole, wide)):
        before = full_state(into.model, into, on)
        with pytest.raises(
            ValueError, match=r"of 0.weight has shape \(\d, 5\), the parameter \(\d, 5\) here: save and"
        ):
            into.load_state_dict(state.state_dict())
        same_bits(full_state(into.model, into, on), before)
    whole.load_state_dict(copy.deepcopy(whole.state_dict()))


@pytest.mark.parametrize(("size", "check", "args"), [
    (2, check_unused, ()), (2, check_other_layout, (AdamW,)), (2, check_other_layout, (Muon,)),
])  # fmt: skip
def test_optimizers_on_ranks(ranks, size, check, args):
    ranks(size, check, *args)
