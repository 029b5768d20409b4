"""The layers under torch.compile, under autocast and from the meta device; first parameters; collectives, counted."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from mpcore import (
    Axis,
    ColumnParallelLinear,
    MultiLatentAttention,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    full_state_dict,
    load_full_state_dict,
    vocab_parallel_cross_entropy,
)
from mpcore import collectives as c
from mpcore.gradients import reduce_gradients
from mpcore.layers import materialize
from tests.calls import Calls
from tests.equality import close, draw, draw_ids, full_gradients, tp_axis
from tests.layers.test_block import Model, build_block
from tests.pool import mesh, on_ranks
from tests.quick import some

B, T, D, V = 2, 12, 8, 21


@pytest.mark.parametrize(("what", "sequence"), some(
    ("block", 1), of=[("regather", 1), *itertools.product(("latent", "block"), (None, 1))],
))  # fmt: skip
@on_ranks(2)
def test_layers_compile_to_one_graph_equal_to_eager(what, sequence):
    """One graph, forward and backward, on the values and gradients of eager."""
    tp = mesh(tp=2).tp
    sp = {"tp": tp, "sequence_parallel": sequence is not None, "sequence_dim": 1 if sequence is None else sequence}
    shape = (B, T, D) if sequence is None else (B, T // 2, D)
    if what == "regather":
        up = ColumnParallelLinear(D, 10, regather=True, **sp)
        model = nn.Sequential(up, nn.Tanh(), RowParallelLinear(10, D, **sp)).double()
    elif what == "latent":
        narrow = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 3, "q_lora_rank": 5}
        model = MultiLatentAttention(D, 5, **narrow, rope=RotaryEmbedding(4), **sp).double()
    else:
        model = materialize(build_block(dropout=0.2, sequence=sequence, tp=tp), 3).double()
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        model.zero_grad()
        x = draw(1 + tp.rank * (sequence is not None), *shape).requires_grad_()
        f = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        y = f(x, samples=torch.arange(B)) if what == "block" else f(x)
        y.backward(draw(2, *shape))
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append({"y": y.detach(), "dx": x.grad} | grads)
    for name, want in results[0].items():
        close(results[1][name], want, name)


@pytest.mark.parametrize("sequence", [None, 1])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@on_ranks(2)
def test_autocast_on_two_ranks_is_as_near_as_on_one(kind, sequence):
    """Under autocast two ranks are as near to the exact block as one rank is, within a factor of 2."""
    tp = mesh(tp=2).tp
    torch.manual_seed(1)
    exact = build_block(kind).double()
    x, dy = draw(1, B, T, D), draw(2, B, T, D)
    states = full_state_dict(exact)

    def run(block, x, dy, autocast):
        x = x.clone().requires_grad_()
        cut = block.attention.qkv.sequence_parallel
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            mine = c.split(x, tp, 1) if cut else x
            branch = block.attention(mine)
            assert branch.dtype == (torch.bfloat16 if autocast else x.dtype)
            assert block.mlp(mine).dtype == branch.dtype
            y = block(mine)
        y = c.gather(y, tp, 1) if cut else y
        y.backward(dy.to(y.dtype))
        reduce_gradients(block)
        return [y.detach(), x.grad, *full_gradients(block).values()]

    want = run(exact, x, dy, False)
    errors = []
    for axes in ({}, {"tp": tp, "sequence": sequence}):
        block = build_block(kind, **axes)
        load_full_state_dict(block, states)
        got = run(block, x.float(), dy.float(), True)
        assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in block.parameters())
        errors.append([(g.double() - w).square().mean().sqrt().item() for g, w in zip(got, want, strict=True)])
    for one, two in zip(*errors, strict=True):
        assert two <= 2 * one


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("gpt2", False)])
@on_ranks(2, 3, 4)
def test_pitfall_21_first_parameters_are_bitwise_equal_at_every_size(kind, tied):
    """Uneven shards (10 hidden units, 21 words) and replicated KV heads (2 of 6) included."""
    tp, want = tp_axis(), full_state_dict(materialize(Model(kind, tied=tied), 7))
    torch.manual_seed(tp.rank)  # the global generator must not matter
    for on in ({}, {"device": "meta"}):
        state = full_state_dict(materialize(Model(kind, tied=tied, tp=tp, **on), 7))
        assert state.keys() == want.keys()
        assert all(torch.equal(state[name], want[name]) for name in want), on
    other = full_state_dict(materialize(Model(kind, tied=tied, tp=tp), 8))
    assert not (other["embedding.weight"] == want["embedding.weight"]).any()


def test_pitfall_21_order_and_company_do_not_matter():
    def build(names):
        return nn.ModuleDict({name: build_block(device="meta") for name in names})

    whole = materialize(build(["0", "1", "2"]), 5)
    backwards = materialize(build(["2", "1", "0"]), 5)
    stage = materialize(build(["2"]), 5)
    for other in (backwards, stage):
        for name, p in other.named_parameters():
            assert torch.equal(p, whole.get_parameter(name)), name
    assert not torch.equal(whole["0"].mlp.up.weight, whole["1"].mlp.up.weight)


def test_pitfall_21_the_fan_is_that_of_the_logical_weight():
    for size in (1, 2, 4):
        row = materialize(RowParallelLinear(4096, 8, tp=Axis(size, 0, None, "tp")), 1)
        assert row.weight.abs().max() <= 4096**-0.5
        assert row.weight.abs().max() > 0.99 * 4096**-0.5


def test_what_is_not_ours_is_reset_from_its_name():
    def build(on):
        return nn.Sequential(nn.Linear(3, 4, device=on), RMSNorm(4, device=on), nn.Embedding(5, 4, device=on))

    first, second = build("meta"), build("cpu")
    state = torch.random.get_rng_state()
    materialize(first, 3), materialize(second, 3), materialize(build("meta"), 3, "meta")
    assert torch.equal(state, torch.random.get_rng_state()), "torch's own generator moved"
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not torch.equal(materialize(build("cpu"), 4)[0].weight, first[0].weight)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    normed = nn.utils.weight_norm(nn.Linear(3, 4, device="meta"))  # its reset fills `weight`, no parameter any more
    for module, leaf, kind in ((normed, "weight_g", "Linear"), (Bare(), "scale", "Bare")):
        with pytest.raises(ValueError, match=f"the parameter {leaf} its first values: add .* to {kind}") as raised:
            materialize(module, 1)
    assert str(raised.value).endswith("To keep them, build the model with values and pass initialize=False to prepare")


def test_an_init_is_a_function_that_fills_the_tensor_in_place():
    words = r"^init .* is no function init\(tensor, generator=None\) that fills .* functools.partial\(torch.nn.init"
    for wrong in (0.02, "normal", lambda: None, lambda tensor, std: tensor):
        for build in (partial(ColumnParallelLinear, 2, 3), partial(VocabParallelEmbedding, 3, 2, padding_idx=0)):
            with pytest.raises(TypeError, match=words):
                build(init=wrong)
            with pytest.raises(TypeError, match=words):
                materialize(build(init=wrong, device="meta"), 0)
    with pytest.raises(TypeError, match=words):
        materialize(RowParallelLinear(2, 3, init=lambda tensor: tensor.zero_(), device="meta"), 0)  # no generator
    with pytest.raises(TypeError, match=words):
        RowParallelLinear(2, 3, init=0.02, device="meta")  # at once
    with pytest.raises(TypeError, match=r"returned a Tensor in place of the tensor that it was given"):
        RowParallelLinear(2, 3, init=lambda tensor, generator=None: torch.zeros(3, 2))
    with pytest.raises(TypeError, match="own"):
        RowParallelLinear(2, 3, init=refuse)

    def fills(tensor, generator=None):  # and returns None
        nn.init.normal_(tensor, std=0.02, generator=generator)

    for init in (fills, partial(nn.init.normal_, std=0.02), nn.init.normal_, torch.Tensor.zero_):
        layer = RowParallelLinear(64, 64, init=init)
        want = {nn.init.normal_: 1, torch.Tensor.zero_: 0}.get(init, 0.02)
        assert layer.weight.std().item() == pytest.approx(want, rel=0.1)
        assert layer.bias.count_nonzero() == 0


def refuse(tensor, generator=None):
    raise TypeError("own")


REDUCE, GATHER, SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"


def count_block(kind, sequence, frozen):
    tp = tp_axis()
    block = build_block(kind, sequence=sequence, tp=tp)
    if frozen:
        block.requires_grad_(False)
    x = draw(1, B, T // 2 if sequence else T, D, dtype=torch.float32).requires_grad_()
    with Calls(collectives=True) as forward:
        y = block(x)
    with Calls(collectives=True) as backward:
        y.sum().backward()
    with Calls(collectives=True) as after:
        reduce_gradients(block)
    return forward.counts(), backward.counts(), after.counts()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@on_ranks(2)
def test_a_block_makes_two_collectives_each_way_and_nothing_else(kind, frozen):
    pending = {REDUCE: 1} if kind == "llama" and not frozen else {}  # qk-norm
    assert count_block(kind, None, frozen) == ({REDUCE: 2}, {REDUCE: 2}, pending)
    pending, both = {} if frozen else {REDUCE: 1}, {GATHER: 2, SCATTER: 2}
    assert count_block(kind, 1, frozen) == (both, both, pending)


@on_ranks(2)
def test_the_loss_makes_one_collective_forward_and_none_backward():
    tp = tp_axis()
    table, head = VocabParallelEmbedding(V, D, tp=tp), ColumnParallelLinear(D, V, tp=tp)
    with Calls(collectives=True) as embedding:
        x = table(draw_ids(1, V, B, T))
    with Calls(collectives=True) as head_forward:
        logits = head(x)
    with Calls(collectives=True) as loss_forward:
        loss = vocab_parallel_cross_entropy(
            logits, draw_ids(2, V, B, T), tp=tp, vocab_size=V, label_smoothing=0.1, z_loss=0.1
        )
    with Calls(collectives=True) as backward:
        loss.backward()
    counts = [mode.counts() for mode in (embedding, head_forward, loss_forward, backward)]
    assert counts == [{REDUCE: 1}, {}, {GATHER: 1}, {REDUCE: 1}]  # backward: the head's input gradient


def test_on_one_rank_there_is_no_collective():
    model = Model(sequence=1)
    with Calls(collectives=True) as mode:
        model(draw_ids(1, V, B, T), draw_ids(2, V, B, T)).backward()
        reduce_gradients(model)
    assert not mode.found
