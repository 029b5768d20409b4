"""Linear layers in eight bits: the formula of their three products, and every layout computes the same ones."""

import copy
import itertools
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mpcore import (
    Axis,
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    ParallelMoE,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    TransformerBlock,
    parallelize,
)
from mpcore._torch.fake import fake_tensors
from mpcore.gradients import main_gradients, reduce_gradients
from mpcore.kernels import quantize_fp8
from mpcore.layers import GroupedLinear, materialize
from mpcore.layers import linear_fp8 as products
from mpcore.layers.linear_fp8 import Fp8Product, grouped_fp8
from mpcore.layers.linear_ops import Product
from mpcore.parallel import gathered, set_gradient_sync, shard_data_parallel
from mpcore.parallel.precision import convert_to_fp8
from mpcore.parallel.recompute import recompute
from mpcore.pipeline.split import backward_inputs, backward_weights
from mpcore.sharding.declare import cut
from mpcore.tools.analysis.counts import CommunicationCounter
from tests.calls import Calls
from tests.equality import close, draw, same_layer, tp_axis
from tests.pool import mesh, on_ranks
from tests.quick import some

B, T, D, F = 2, 96, 384, 768
NONE = Axis(name="tp")


def converted(module, **options):
    convert_to_fp8([module], **options)
    return module


def eight_bits(x, rows):
    """What is left of x `[M, K]` in blocks of `rows` x 128, by floating-point arithmetic and one block at a time."""
    out = torch.empty_like(x)
    for i, j in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], 128)):
        block = x[i : i + rows, j : j + 128]
        scale = 2.0 ** torch.ceil(torch.log2(block.abs().max() / 448))
        out[i : i + rows, j : j + 128] = (block / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("shape", [(130, 200), (2, 33, 200), (1, 1, 200), (0, 5, 200)], ids=str)
def test_the_three_products_are_those_of_quantized_factors(kind, bias, shape):
    layer = converted(kind(200, 150, bias).double())
    with torch.no_grad():
        layer.weight *= draw(3, 150, 200).exp2()
    x = draw(1, *shape).requires_grad_()
    y = layer(x)
    dy = draw(2, *y.shape)
    y.backward(dy)
    flat, w, g = x.detach().flatten(0, -2), layer.weight.detach(), dy.flatten(0, -2)
    want = eight_bits(flat, 1) @ eight_bits(w, 128).t()
    want = want if layer.bias is None else want + layer.bias.detach()
    close(y.detach().flatten(0, -2), want, "y")
    close(x.grad.flatten(0, -2), eight_bits(g, 1) @ eight_bits(w, 128), "dx")
    close(layer.weight.grad, eight_bits(g.t(), 1) @ eight_bits(flat.t(), 1).t(), "dweight")
    if bias:
        close(layer.bias.grad, g.sum(0), "dbias")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_products_of_experts_are_those_of_quantized_factors(compiled):
    experts = GroupedLinear(3, 200, 150, ep=NONE, shard=cut(150, NONE, 1)).double()
    converted(experts, experts=True)
    with torch.no_grad():
        experts.weight *= draw(3, 3, 150, 200).exp2()
    x, dy = draw(1, 140, 200).requires_grad_(), draw(2, 140, 150)
    run = torch.compile(experts, backend="aot_eager") if compiled else experts
    y = run(x, torch.tensor([130, 0, 7]))
    y.backward(dy)
    assert not any(left.any() for left in (y[137:], x.grad[137:], experts.weight.grad[1]))
    for e, rows in ((0, slice(130)), (2, slice(130, 137))):
        flat, g, w = x.detach()[rows], dy[rows], experts.weight.detach()[e]
        close(y.detach()[rows], eight_bits(flat, 1) @ eight_bits(w, 128).t(), "y")
        close(x.grad[rows], eight_bits(g, 1) @ eight_bits(w, 128), "dx")
        close(experts.weight.grad[e], eight_bits(g.t(), 1) @ eight_bits(flat.t(), 1).t(), "dweight")


@on_ranks(2)
def test_experts_in_fp8_on_ep_compute_the_same_and_refuse_other_cuts_and_merged_weights():
    world, found = mesh(dp=2, ep=2), []
    for ep in (Axis(role="ep"), world.ep):
        moe = converted(materialize(ParallelMoE(128, 128, 4, 2, ep=ep, device="meta"), seed=3), experts=True)
        found.append(moe(draw(1, 2, 96, 128, dtype=torch.float32)))
    assert torch.equal(*found)
    etp = mesh(tp=2).tp
    with pytest.raises(ValueError, match=r"experts.gate_up is cut over .*tp 2 at feature 96, which .* take 256 \+ 256"):
        converted(ParallelMoE(128, 192, 4, 2, tp=etp), experts=True)
    with pytest.raises(ValueError, match=r"weight .* is computed from others, such as merged adapters"):
        grouped_fp8(torch.ones(1, 4), moe.experts.down.weight * 2, torch.tensor([1, 0]))


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias"), ("x",)], ids="-".join)
def test_pitfall_43_what_is_frozen_gets_nothing_and_stops_nothing(frozen):
    layer = converted(ColumnParallelLinear(200, 150).double())
    x, names = draw(1, 130, 200), {"weight", "bias", "x"}
    found = []
    for off in ((), frozen):
        layer.zero_grad()
        x = x.detach().requires_grad_("x" not in off)
        for name, p in layer.named_parameters():
            p.requires_grad_(name not in off)
        layer(x).backward(draw(2, 130, 150))
        found.append({"weight": layer.weight.grad, "bias": layer.bias.grad, "x": x.grad})
    for name in names:
        want, got = found[0][name], found[1][name]
        assert (got is None) == (name in frozen)
        assert got is None or torch.equal(got, want)


def test_what_is_kept_of_the_input_has_eight_bits():
    layer = ColumnParallelLinear(512, 384, bias=False, dtype=torch.bfloat16)
    x = draw(1, 256, 512, dtype=torch.bfloat16).requires_grad_()
    kept = []

    def keep(t):
        if t.data_ptr() != layer.weight.data_ptr():
            kept[-1] += t.untyped_storage().nbytes()
        return t

    for _ in range(2):
        kept.append(0)
        with saved_tensors_hooks(keep, lambda t: t):
            layer(x)
        convert_to_fp8([layer])
    assert kept == [2 * x.numel(), x.numel() + 4 * x.numel() // 128]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_main_gradients_take_the_sum_over_micro_batches_in_float32(split):
    layer = converted(ColumnParallelLinear(200, 150, dtype=torch.bfloat16))
    main_gradients(layer)
    layer.product = layer.product.split(split)
    terms = []
    for seed in range(3):
        x, dy = draw(seed, 130, 200, dtype=torch.bfloat16), draw(9 + seed, 130, 150, dtype=torch.bfloat16)
        if split:  # as a zero-bubble pipeline
            y = layer(x.requires_grad_())  # with a name: torch 2.11 frees a graph whose output is gone
            _, deferred = backward_inputs([y], [dy], [x])
            backward_weights(deferred)
        else:
            layer(x).backward(dy)
        terms.append(eight_bits(dy.double().t(), 1) @ eight_bits(x.detach().double().t(), 1).t())
    assert layer.weight.grad is None
    close(layer.weight.main_grad.double(), torch.stack(terms).sum(0), "main gradient", 1e-6)


def test_compiled_recomputed_and_split_it_is_bitwise_the_same(monkeypatch):
    want, calls, multiply = None, [], products.fp8_matmul
    for how in ("eager", "compiled", "recomputed", "split"):
        torch.manual_seed(1)
        model = converted(nn.Sequential(ColumnParallelLinear(200, 300), nn.GELU(), RowParallelLinear(300, 150)))
        x = draw(1, 130, 200, dtype=torch.float32).requires_grad_()
        run = model
        if how == "compiled":
            torch.compiler.reset()
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
        elif how == "recomputed":
            recompute([model], "full")
        y = run(x)
        dy = draw(2, *y.shape, dtype=torch.float32)
        if how == "split":  # as a zero-bubble pipeline: the input's gradient first, the weights' later
            for layer in (model[0], model[2]):
                layer.product = layer.product.split(True)
            parameters = list(model.parameters())
            y = model(x)
            monkeypatch.setattr(products, "fp8_matmul", lambda *a, **k: calls.append(1) or multiply(*a, **k))
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            assert len(calls) == 2
            grads = torch.autograd.grad(y, parameters, dy)
            assert len(calls) == 2 + 3  # both weights', and the gradient between the layers
        else:
            y.backward(dy)
            dx, grads = x.grad, [p.grad for p in model.parameters()]
        got = [y.detach(), dx, *grads]
        want = want or got
        assert all(map(torch.equal, got, want)), how


def build_block(tp=NONE, sequence=None, regather=False, kv_heads=2):
    sp = {"tp": tp, "sequence_parallel": sequence is not None, "sequence_dim": 1 if sequence is None else sequence}
    attention = ParallelAttention(D, 6, kv_heads, 128, rope=RotaryEmbedding(128), **sp)
    mlp = ParallelMLP(D, F, "swiglu", bias=True, **sp)
    norm = {"tp": tp, "sequence_parallel": sequence is not None}
    block = TransformerBlock(attention, mlp, RMSNorm(D, **norm), RMSNorm(D, **norm), **sp)
    for layer in block.modules():
        if isinstance(layer, ColumnParallelLinear):
            layer.regather = regather
    return converted(block)


@pytest.mark.parametrize(("sequence", "regather"), some((1, True), (None, False), of=[(1, False), (0, True)]))
@on_ranks(3, pytest.param(2, marks=pytest.mark.slow))
def test_every_tp_size_computes_the_same_products(sequence, regather):
    tp = tp_axis()
    build = partial(build_block, sequence=sequence, regather=regather, kv_heads=tp.size)
    shape, gather = (B, T, D) if sequence != 0 else (T, B, D), None if sequence is None else (sequence, T)
    same_layer(build, shape, split=sequence, gather=gather, tp=tp)


@pytest.mark.parametrize(("kind", "want"), [("none", 16), ("full", 24)])
def test_a_kept_weight_is_quantized_once_a_step(kind, want, monkeypatch):
    monkeypatch.setattr(quantize_fp8, "runs_triton", lambda *_: True)
    found = {}
    for keep in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(ColumnParallelLinear(200, 300), nn.GELU(), RowParallelLinear(300, 150))
        recompute([converted(model, keep_weights=keep)], kind)
        optimizer, found[keep] = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(2):
            with Calls() as calls:
                for seed in range(4):  # micro-batches
                    model(draw(seed, 130, 200, dtype=torch.float32).requires_grad_()).square().sum().backward()
            found[keep] += [p.grad for p in model.parameters()]
            quantized = sum(args[1] for name, args, _ in calls.found if name == "quantize_fp8")  # of weights: square
            assert quantized == (2 if keep else want)
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, *found.values()))


class _WritesData(torch.optim.Optimizer):
    def step(self):
        self.param_groups[0]["params"][0].data.mul_(3)


def other_memory(layer):
    for _ in range(3):  # the allocator gives the same address again
        layer.weight.data = layer.weight.data * 3


@torch.no_grad()
def in_place(layer):
    layer.weight.mul_(3)


def dry_run(layer):
    in_place(layer)
    with fake_tensors():
        layer(torch.ones(130, 200, dtype=torch.float64))


@torch.no_grad()
def average(layer):  # of the weights, swapped in for an evaluation and written in between
    own, mean = layer.weight.data, 3 * layer.weight.data
    for _ in range(2):
        layer.weight.data = mean
        layer(torch.ones(130, 200, dtype=torch.float64))
        layer.weight.data = own
        mean *= 5
    layer.weight.data = mean


CHANGES = {
    "in place": in_place, "other memory": other_memory,
    "load_state_dict": lambda layer: layer.load_state_dict({k: 3 * x for k, x in layer.state_dict().items()}),
    "optimizer": lambda layer: _WritesData([layer.weight], {}).step(),
    "deepcopy": lambda layer: in_place(made := copy.deepcopy(layer)) or made,
    "pickle": lambda layer: in_place(made := pickle.loads(pickle.dumps(layer))) or made,
    "dry run": dry_run, "average": average,
    "new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(2 * layer.weight.detach())),
    "strides": lambda layer: setattr(layer.weight, "data", layer.weight.data.as_strided((150, 200), (1, 150))),
    "compile": lambda layer: in_place(layer) or torch.compile(layer, fullgraph=True, backend="aot_eager"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_weight_follows_its_parameter(change):
    layer, x = converted(ColumnParallelLinear(200, 150).double(), keep_weights=True), draw(1, 130, 200)
    before = layer(x)
    changed = CHANGES[change](layer)
    changed = changed if isinstance(changed, nn.Module) else layer
    fresh = ColumnParallelLinear(200, 150).double()
    fresh.load_state_dict({name.removeprefix("_orig_mod."): p for name, p in changed.state_dict().items()})
    got, want = (each(x.clone().requires_grad_()) for each in (changed, converted(fresh)))
    assert torch.equal(got, want)
    assert not torch.equal(got, before)
    assert change not in ("deepcopy", "pickle") or torch.equal(layer(x), before)


def gathered_bytes(zero, all_gather, dtype, kind):
    """Train sharded layers, and return their parameters and the bytes of a step's messages that gather."""
    torch.manual_seed(1)
    whole = mesh(dp=2)
    model = nn.Sequential(ColumnParallelLinear(256, 512), nn.GELU(), RowParallelLinear(512, 256, False))
    with torch.no_grad():  # of another scale in each block
        for weight in (model[0].weight, model[2].weight):
            weight *= ((torch.arange(len(weight)) // 128)[:, None] - torch.arange(weight.shape[1]) // 128 * 3).exp2()
    converted(model, all_gather=all_gather)
    recompute([model], kind)
    shard_data_parallel(model, whole, zero=zero, param_dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(2):
        with CommunicationCounter(whole) as ledger:
            for last in (False, True):
                set_gradient_sync(model, last)
                x = draw(5 + whole.data.rank, 128, 256, dtype=dtype or torch.float32).requires_grad_()
                model(x).float().square().sum().backward()
        reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), gathered(model):
        y = model(torch.ones(1, 256, dtype=dtype))
        if all_gather:
            with pytest.raises(ValueError, match=r"reads a weight \(512, 256\) that ZeRO gathered in"):
                model[0].weight.sum()
    return [y, *(p.full_tensor() for p in model.parameters())], ledger.counts["dp", "broadcast"].bytes


@pytest.mark.parametrize(("zero", "dtype", "kind"), some(
    (1, torch.bfloat16, "none"), (2, None, "full"), (3, torch.bfloat16, "full"), (3, None, "none"),
    of=itertools.product((1, 2, 3), (torch.bfloat16, None), ("none", "full")),
))  # fmt: skip
@on_ranks(2)
def test_zero_gathers_weights_in_fp8_and_computes_the_same(zero, dtype, kind):
    (want, plain), (got, fp8) = (gathered_bytes(zero, on, dtype, kind) for on in (False, True))
    assert all(map(torch.equal, got, want))
    weights, bias, width, times = 2 * 512 * 256, 512, 2 if dtype else 4, 4 if zero == 3 else 1
    assert (plain, fp8) == (width * times * (weights + bias), times * (weights + weights // 128**2 * 4 + width * bias))


@on_ranks(2)
def test_what_can_be_neither_kept_nor_gathered_is_refused():
    cut = nn.Sequential(converted(ColumnParallelLinear(256, 384), all_gather=True))
    with pytest.raises(ValueError, match=r"0 has 384 output features on this rank, .* 2 shards .* take 512 or fewer"):
        shard_data_parallel(cut, mesh(dp=2), zero=3)
    layer = converted(ColumnParallelLinear(256, 256), keep_weights=True)
    with pytest.raises(ValueError, match=r"0 keeps its FP8 weight \(keep_weights\), and zero 1 gathers"):
        shard_data_parallel(nn.Sequential(layer), mesh(dp=2), zero=1)
    assert converted(layer).product.kept is layer.product.kept
    with pytest.raises(ValueError, match=r"the weight \(256, 256\) is no parameter but computed from others, such as"):
        layer.product.column(torch.ones(1, 256), 2 * layer.weight, None, Axis())


def test_selective_recomputation_keeps_the_products_of_a_gpu(monkeypatch):
    # the operators; on a CPU they are the references
    monkeypatch.setattr(quantize_fp8, "runs_triton", lambda *_: True)
    counts = {}
    for kind in ("none", "selective", "full"):
        block = converted(ParallelMLP(256, 128, "swiglu", bias=False))
        recompute([block], kind)
        with Calls() as calls:
            block(torch.ones(1, 8, 256, requires_grad=True)).sum().backward()
        counts[kind] = calls.counts()["fp8_matmul"]
    assert counts == {"none": 6, "selective": 6, "full": 8}


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_conversion_keeps_a_split_backward_and_other_layers(kind):
    layer, other = kind(4, 6), kind(4, 6)
    layer.product = layer.product.split(True)
    convert_to_fp8([layer])
    assert (layer.product, other.product) == (Fp8Product(split_backward=True), Product())
    assert layer.product.split(False) == Fp8Product()


def test_parallelized_linears_are_converted():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    parallelize(model, {"0": "colwise", "2": "rowwise"}, tp=NONE)
    convert_to_fp8(model)
    assert model[0].product == Fp8Product()
    convert_to_fp8([nn.Embedding(3, 4)])  # a stage without any


@on_ranks(2)
def test_cuts_within_a_block_are_refused_by_name():
    tp = mesh(tp=2).tp
    model = nn.ModuleDict({"down": RowParallelLinear(200, 6, tp=tp), "up": ColumnParallelLinear(4, 256, tp=tp)})
    refused = "blocks[0] down is cut over tp 2 at feature 100, which is no multiple of 128, the block of FP8: "
    with pytest.raises(ValueError, match=re.escape(refused + "take 256 features instead of 200, a smaller tp, or")):
        convert_to_fp8([model])
    with pytest.raises(ValueError, match=r"take 512 \+ 256 \+ 256 features instead of 288 \+ 96 \+ 96, "):
        convert_to_fp8([QKVParallelLinear(4, 6, 2, 48, tp=tp)])
    assert all(layer.product == Product() for layer in model.values())
    convert_to_fp8([model.up])
    convert_to_fp8(nn.ModuleList([ColumnParallelLinear(4, 384 - 56, tp=mesh(tp=1).tp)]))
