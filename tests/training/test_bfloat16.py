"""bfloat16 all the way: 16-bit parameters, activations, messages and collectives, with float32 masters."""

from __future__ import annotations

import math

import pytest
import torch

import mpcore as mp
from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT, build_stages
from mpcore import AdamW, Mesh, Muon, ParallelAttention, Precision, Zero, prepare
from mpcore._torch import pytree
from mpcore._torch.dispatch import TorchDispatchMode
from mpcore.checkpoint import inspect, step_path
from mpcore.gradients import gradient_of
from mpcore.layers.initialize import materialize
from mpcore.layers.linear import ParallelLinear
from mpcore.pipeline.schedules import find_schedule
from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import is_dtensor, local_tensor
from mpcore.sharding.state_dict import full_tensor
from tests.pool import mesh
from tests.quick import some

BF16 = torch.bfloat16
CONFIG = GPTConfig(vocab_size=50, layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24, seq_len=16)


def build(mesh=Mesh(), optimizer=None, precision="bfloat16", config=CONFIG, values=None, **options):
    like = {name: options.pop(name) for name in ("residual_dtype", "sequence_parallel") if name in options}
    model = GPT(config, mesh, device="meta", dtype=torch.float32, **like)
    if values is not None:
        mp.load_full_state_dict(materialize(model.double(), 0), {name: x.double() for name, x in values.items()})
    optimizer = optimizer or (lambda model: AdamW(model, lr=0.01))
    return prepare(
        model, mesh, blocks=model.blocks.values(), loss=model.loss, optimizer=optimizer, precision=precision, seed=3,
        **options,
    )  # fmt: skip


def batch(step, share=range(4)):
    g = torch.Generator().manual_seed(step)
    tokens = torch.randint(CONFIG.vocab_size, (4, 13), generator=g)[share.start : share.stop]
    return tokens[:, :-1], tokens[:, 1:]


def train(run, steps, first=0, clip=True):
    found = []
    for step in range(first, first + steps):
        run.forward_backward(*batch(step, run.share(4)))
        if clip:
            run.clip_gradients(1.0)
        found.append(run.optimizer_step().loss)
    return found


def full(run):
    return {name: x.clone() for name, x in mp.full_state_dict(run.model).items()}


def test_a_step_is_that_of_float32_adamw_rounded_to_bfloat16_afterwards():
    """Against AdamW of Loshchilov and Hutter 2019, algorithm 2, written here; bit for bit, from the float32 draw on."""
    run, exact = build(), build(precision="float32")
    masters = {name: p.detach().clone() for name, p in exact.model.named_parameters()}
    for name, p in run.model.named_parameters():
        assert torch.equal(p, masters[name].to(BF16)), name
    m, v = ({name: torch.zeros_like(x) for name, x in masters.items()} for _ in range(2))
    for step in range(1, 4):
        run.forward_backward(*batch(step))
        run.finish_gradients()
        grads = {name: p.main_grad.clone() for name, p in run.model.named_parameters()}
        run.optimizer_step()
        lr, c1, c2 = (torch.tensor(x).float() for x in (0.01, 1 - 0.9**step, (1 - 0.999**step) ** 0.5))
        for name, p in run.model.named_parameters():
            w, g = masters[name], grads[name]
            w = w - lr * (0.01 if w.dim() > 1 else 0) * w
            m[name] = m[name] + (g - m[name]) * (1 - 0.9)
            v[name] = v[name] * 0.999 + g * g * (1 - 0.999)
            masters[name] = w - lr / c1 * (m[name] / (v[name].sqrt() / c2 + 1e-8))
            assert grads[name].dtype == torch.float32
            assert p.grad is None
            assert torch.equal(run.optimizer.state[p]["master"], masters[name]), name
            assert torch.equal(p, masters[name].to(BF16)), name


@pytest.mark.parametrize("make", [AdamW, Muon], ids=["adamw", "muon"])
def test_weights_written_from_elsewhere_are_what_the_next_step_begins_with(make):
    """By copy_, by .data, by load_full_state_dict: two models with the same values take the same step (lr 0: none)."""
    run, other = (build(optimizer=lambda model: make(model, lr=0.1, weight_decay=0.0)) for _ in range(2))
    train(run, 2)
    values = full(other)
    values["blocks.0.mlp.up.weight"] = values["blocks.0.mlp.up.weight"] + 1
    with torch.no_grad():
        run.model.norm.weight.copy_(torch.full((16,), 3.0))
        run.model.head.weight.data.fill_(0.5)
    mp.load_full_state_dict(run.model, {**full(run), **{n: x for n, x in values.items() if n.startswith("blocks.0")}})
    want = full(run)
    run.forward_backward(*batch(9))
    run.optimizer_step(lr=0.0)
    for name, x in full(run).items():
        assert torch.equal(x, want[name]), name
    untouched = run.optimizer.state[run.model.get_parameter("blocks.1.mlp.up.weight")]["master"]
    assert not torch.equal(untouched, untouched.to(BF16).float())  # it kept the bits that bfloat16 lacks


def test_an_optimizer_without_masters_is_refused_and_told_the_way_out():
    def torchs(model):
        return torch.optim.AdamW(model.parameters())

    for make in (torchs, lambda model: AdamW(model, masters=False)):
        with pytest.raises(ValueError, match=r"AdamW keeps no float32 masters of \d+ torch.bfloat16 parameters: take"):
            build(optimizer=make)
    train(build(optimizer=torchs, precision=Precision("bfloat16", autocast=True)), 1)


def run_of(sizes, options):
    """A run on a mesh; `stages` of a pipeline are made as the example makes them."""
    on, options = mesh(**sizes), dict(options)
    if on.pp.size == 1:
        return build(on, **options)
    plan = find_schedule("1f1b", 2, options["micro_batches"])
    stages = build_stages(CONFIG, on, [range(0, 1), range(1, 2)], [0, 1], device="meta", dtype=torch.float32,
                          residual_dtype=options.pop("residual_dtype", None))  # fmt: skip
    blocks = {int(i): block for stage in stages for i, block in stage.blocks.items()}
    return prepare(stages, on, blocks=blocks, loss=stages[-1].loss, optimizer=lambda model: AdamW(model, lr=0.01),
                   precision="bfloat16", seed=3, schedule=plan, **options)  # fmt: skip


def gradients(run):
    """The gradient of a step's batch, whole, in float64."""
    run.forward_backward(*batch(0, run.share(4)))
    run.finish_gradients()
    found = {}
    for name, p, sharding in declarations(run.model):
        grad = gradient_of(p)
        assert grad.dtype == (torch.float64 if p.dtype == torch.float64 else torch.float32), name
        found[name] = full_tensor(grad, sharding).double()
    return found


def apart(got, want):
    """The norm of the difference over the norm."""
    return float((got - want).norm() / want.norm())


class Roundings(TorchDispatchMode):
    """Counts the operations whose result is rounded to bfloat16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        computes = "view" not in func.name() and "transpose" not in func.name() and "detach" not in func.name()
        self.count += computes and isinstance(out, torch.Tensor) and out.dtype == BF16
        return out


@pytest.fixture(scope="module")
def exact():
    """The gradient in float64 at the rounded weights, and how far bfloat16 in one process may be from it.

    A rounding to 8 significant bits errs by 2^-9 of the value, root mean square; independent ones add as squares.
    """
    with Roundings() as roundings:
        gradients(build())
    return gradients(build(precision="float64", initialize=False, values=full(build()))), 2**-9 * roundings.count**0.5


def check_layout(sizes, options, want, band):
    run = run_of(sizes, options)
    for name, grad in gradients(run).items():
        assert apart(grad, want[name]) < band, name
    run.optimizer_step()
    state = run.optimizer.state
    for _, p, _ in declarations(run.model):  # shards are the masters where there are any
        assert p.dtype == (torch.float32 if is_dtensor(p) else BF16)
        assert ("master" in state[p]) != is_dtensor(p)


LAYOUTS = {
    "one process": ({}, {"recompute": "full", "micro_batches": 2}), "tp 2": ({"tp": 2}, {"sequence_parallel": True}),
    "dp 2, ZeRO-0": ({"dp": 2}, {"data": Zero(0)}),
    "dp 2, ZeRO-3, recompute": ({"dp": 2}, {"data": Zero(3), "recompute": "full"}),
    "pp 2 x tp 2": ({"pp": 2, "tp": 2}, {"micro_batches": 2}), "HSDP": ({"dp": 4}, {"data": Zero(2, replicate=2)}),
}  # fmt: skip


@pytest.mark.parametrize("name", some("tp 2", "dp 2, ZeRO-3, recompute", "HSDP", of=LAYOUTS))
def test_each_layout_is_as_near_to_float64_as_its_roundings_allow(ranks, exact, name):
    sizes, options = LAYOUTS[name]
    ranks(math.prod(sizes.values()), check_layout, sizes, options, *exact)


@pytest.mark.parametrize("residual", [None, torch.float32])
def test_equal_orders_of_operations_are_equal_bit_for_bit(ranks, residual):
    """Recompute and pipelines change no order of a sum, nor does the stage of ZeRO with one micro-batch."""
    like = {"residual_dtype": residual}
    losses, recomputed = ([run.forward_backward(*batch(0)), *gradients_after(run)] for run in (
        build(**like), build(recompute="selective", **like)))  # fmt: skip
    assert all(map(torch.equal, losses, recomputed))
    same = [{"pp": 2}, {"micro_batches": 2, **like}]
    assert ranks(2, trained, *same)[0] == trained({}, same[1])
    kinds = [ranks(2, trained, {"dp": 2}, {"data": Zero(stage), **like}) for stage in (1, 3)]
    assert kinds[0] == kinds[1]


def gradients_after(run):
    run.finish_gradients()
    return [gradient_of(p) for p in run.model.parameters()]


def trained(sizes, options):
    return train(run_of(sizes, options), 3)


class Dtypes(TorchDispatchMode):
    """The dtypes of what is sent over ranks, by kind and whether it has hidden states' width; casts of weights."""

    def __init__(self, model):
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in map(local_tensor, model.parameters()) if p.dim() > 1}
        self.sent, self.casts, self.gathers = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        self.gathers += name == "broadcast"
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            for x in pytree.leaves((args, out)):
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim():
                    kind = "hidden" if x.shape[-1] == CONFIG.d_model and x.dim() > 1 else "flat" if x.dim() == 1 else ""
                    kind = "" if x.shape == (3,) else kind  # the loss and the step
                    self.sent.add((name.split("_tensor")[0], kind, x.dtype))
        if name in ("to_copy", "copy", "foreach_copy"):
            held = [x for x in pytree.leaves((args, out)) if isinstance(x, torch.Tensor)]
            weights = [x for x in held if x.untyped_storage().data_ptr() in self.weights]
            self.casts += len(weights) * any(x.dtype != weights[0].dtype for x in held if weights)
        return out


def check_dtypes(sizes, options):
    """Return what a step sends, and how many weights it casts."""
    run = run_of(sizes, options)
    residual, inner = options.get("residual_dtype") or BF16, set()
    streams = set()
    for stage in run.stages:
        for block in stage.blocks.values():
            block.register_forward_hook(lambda _, args, out: streams.update({args[0].dtype, out.dtype}))
            for module in block.modules():
                if isinstance(module, (ParallelLinear, ParallelAttention, mp.ParallelMLP)):
                    module.register_forward_hook(lambda _, args, out: inner.update({args[0].dtype, out.dtype}))
    train(run, 1)  # with the pipeline's exchange of shapes
    with Dtypes(run.model) as dtypes:
        run.forward_backward(*batch(1, run.share(4)))
    assert run.precision.autocast or (inner == {BF16} and streams == {residual})
    return dtypes.sent, dtypes.casts, dtypes.gathers


@pytest.mark.parametrize("residual", [None, torch.float32])
def test_activations_and_messages_are_of_the_dtype_that_is_asked_for_and_no_weight_is_cast(ranks, residual):
    """Nothing but the four numbers a token of the loss is sent in float32."""
    options = {"micro_batches": 2, "recompute": "full", "residual_dtype": residual}
    for sent, casts, _ in ranks(4, check_dtypes, {"pp": 2, "tp": 2}, options):
        messages = {dtype for name, kind, dtype in sent if kind == "hidden" and name in ("send", "recv")}
        assert messages == {residual or BF16}
        assert {dtype for name, kind, dtype in sent if kind == "hidden" and name == "all_reduce"} == {BF16}
        assert casts == 0


def test_shards_are_cast_once_a_gather_and_gradients_are_summed_in_reduce_dtype(ranks):
    for zero, times, reduce_dtype in ((1, 1, torch.float32), (3, 2, BF16)):  # a step; forward and backward
        options = {"data": Zero(zero, reduce_dtype=reduce_dtype), "recompute": "full"}
        for sent, casts, gathers in ranks(2, check_dtypes, {"dp": 2}, options):
            flat = {(name, dtype) for name, kind, dtype in sent if kind == "flat"}
            assert flat == {("broadcast", BF16), ("alltoall_base", reduce_dtype)}  # gloo's way to gather and to reduce
            assert (casts, gathers) == (10 * times, 2 * 3 * times)  # 10 matrices in 3 units, a broadcast from each rank
    (found,) = ranks(1, check_dtypes, {}, {"recompute": "full", "precision": Precision("bfloat16", autocast=True)})
    assert found[1] >= 2 * 8 + 1  # autocast casts weights in forward, again in recomputation, and again in backward


def check_save(sizes, options, folder, resume=None):
    """Train to step 4, from a checkpoint or from scratch, and save after 2; return the losses and the weights."""
    run = run_of(sizes, options)
    if resume is not None:
        run.load(resume)
        begin = dict(full(run).items())
        assert run.step == 2
        return train(run, 2, first=2), begin, full(run)
    train(run, 2)
    run.save(folder)
    return train(run, 2, first=2), {}, full(run)


def test_a_checkpoint_holds_masters_that_any_layout_and_dtype_reads(ranks, tmp_path):
    """bfloat16 on tp 2 -> the same: bit for bit; -> float32 in one process -> ZeRO-3 -> bfloat16 in one process."""
    losses, _, weights = ranks(2, check_save, {"tp": 2}, {}, tmp_path)[0]
    path = step_path(tmp_path, 2)
    again, _, resumed = ranks(2, check_save, {"tp": 2}, {}, tmp_path, path)[0]
    assert again == losses
    assert all(torch.equal(resumed[name], x) for name, x in weights.items())
    entries = inspect(path).tensors
    assert {entry.dtype for name, entry in entries.items() if name.startswith("model/")} == {"F32"}
    assert not any("master" in name for name in entries)

    exact, half = build(precision="float32"), build()
    exact.load(path)
    half.load(path)
    for name, p in exact.model.named_parameters():
        here = half.model.get_parameter(name)
        assert torch.equal(half.optimizer.state[here]["master"], p), name
        assert torch.equal(here, p.to(BF16)), name
        assert torch.equal(half.optimizer.state[here]["exp_avg"], exact.optimizer.state[p]["exp_avg"])
    for of in (exact.save(tmp_path / "other"), path):
        _, begin, _ = ranks(2, check_save, {"dp": 2}, {"data": Zero(3)}, tmp_path, of)[0]
        assert all(torch.equal(begin[name], p) for name, p in exact.model.named_parameters())


def test_a_checkpoint_has_the_weights_that_were_written_over_masters(tmp_path):
    run, other = build(), build()
    train(run, 1)
    with torch.no_grad():
        run.model.norm.weight.copy_(torch.full((16,), 3.0))
    other.load(run.save(tmp_path))
    assert torch.equal(other.model.norm.weight, run.model.norm.weight)
    assert torch.equal(other.optimizer.state[other.model.norm.weight]["master"], torch.full((16,), 3.0))


@pytest.mark.parametrize("offload", [{"optimizer": True}, {"parameters": True}, {"activations": True}], ids=str)
def test_offload_changes_no_bit(offload):
    runs = build(), build(offload=mp.Offload(**offload))
    assert train(runs[0], 3) == train(runs[1], 3)
