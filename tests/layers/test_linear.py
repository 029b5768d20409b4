"""The linear layers: dense equals torch's, sharded equals dense, in values and in every gradient."""

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch import nn
from torch.nn import functional as F

from mpcore import (
    Axis,
    ColumnParallelLinear,
    GateUpParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    full_state_dict,
    load_full_state_dict,
)
from mpcore import collectives as c
from mpcore.experimental import overlap_in_symmetric_memory
from mpcore.gradients import main_gradients, reduce_gradients
from mpcore.layers.overlap import OverlapProduct, overlap_communication
from mpcore.tools.simulation import simulate
from tests.equality import FEWER_SIZES, close, draw, same_layer, tp_axis
from tests.pool import mesh, on_ranks

IN, B, T = 6, 2, 12


def changed(build, frozen=(), overlap=False, **axes):
    layer = build(**axes)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    if overlap:
        (overlap_communication if overlap is True else overlap)(layer, smallest=1)
    return layer


def check_column(out, bias, gather_output, sequence, regather, shape, frozen=(), overlap=False, **how):
    options = {"gather_output": gather_output, "regather": regather}
    if sequence is not None:
        options |= {"sequence_parallel": True, "sequence_dim": sequence}
    build = partial(changed, partial(ColumnParallelLinear, IN, out, bias, **options), frozen, overlap)
    same_layer(build, shape, split=sequence, gather=None if gather_output else (-1, out), **how)


@on_ranks(*FEWER_SIZES)
def test_column_parallel_equals_dense_with_every_option():
    for out, bias, gather_output in itertools.product([10, 12], [True, False], [True, False]):
        check_column(out, bias, gather_output, None, False, (B, T, IN))
        for sequence, regather in itertools.product([0, 1], [True, False]):
            shape = (B, T, IN) if sequence == 1 else (T, B, IN)
            check_column(out, bias, gather_output, sequence, regather, shape)


@on_ranks(2, 4)
def test_pitfall_43_frozen_weights_still_pass_the_summed_gradient_on():
    for sequence, regather in [(None, False), (1, False), (1, True)]:
        for frozen in [("weight",), ("bias",), ("weight", "bias")]:
            check_column(10, True, False, sequence, regather, (B, T, IN), frozen=frozen)


def check_row(inner, bias, parallel_input, sequence, shape, frozen=(), overlap=False, **how):
    options = {"input_is_parallel": parallel_input}
    if sequence is not None:
        options |= {"sequence_parallel": True, "sequence_dim": sequence}
    build = partial(changed, partial(RowParallelLinear, inner, 5, bias, **options), frozen, overlap)
    gather = None if sequence is None else (sequence,)
    same_layer(build, (*shape, inner), split=-1 if parallel_input else None, gather=gather, **how)


@on_ranks(*FEWER_SIZES)
def test_row_parallel_equals_dense_with_every_option():
    for inner, bias, parallel_input in itertools.product([10, 12], [True, False], [True, False]):
        check_row(inner, bias, parallel_input, None, (B, T))
        check_row(inner, bias, parallel_input, 1, (B, T))
        check_row(inner, bias, parallel_input, 0, (T, B))


@on_ranks(4)
def test_row_parallel_of_one_token_of_none_of_any_rank_and_frozen():
    for shape in [(), (1,), (1, 1), (0,), (B, 0), (2, 1, 3)]:
        check_row(10, True, True, None, shape)
    for shape, dim in [((B, 4), 1), ((4, 1), 0), ((4,), 0), ((0, 4), 1)]:
        check_row(10, True, True, dim, shape)
        check_row(10, True, False, dim, shape, expanded=True)
    for frozen in [("weight",), ("bias",), ("weight", "bias")]:
        check_row(10, True, True, None, (B, T), frozen=frozen)
        check_row(10, True, True, 1, (B, T), frozen=frozen)


@on_ranks(*FEWER_SIZES)
def test_overlapped_communication_equals_dense():
    """Uneven shards and lengths, frozen parameters, inputs without a gradient, one token and none."""
    size = torch.distributed.get_world_size()
    for dim, bias, regather in [(0, True, False), (1, True, True), (1, False, False)]:
        shape = (B * size, T, IN)
        for frozen in [(), ("weight",), ("weight", "bias")] if bias else [()]:
            check_column(13, bias, False, dim, regather, shape, frozen=frozen, overlap=True)
            for grad in [True, False] if not frozen else [True]:
                check_row(13, bias, True, dim, shape[:-1], frozen=frozen, overlap=True, grad=grad)
    for shape in [(B, T), (7,), (1,), (), (0,), (B, 0)]:
        check_row(13, True, True, None, shape, overlap=True)
        check_column(13, True, True, None, False, (*shape, IN), overlap=True)
    for shape, dim in [((size,), 0), ((0, 2 * size), 1), ((B, 2 * size), 1)]:
        check_row(13, True, True, dim, shape, overlap=True, expanded=True)
        check_column(13, True, True, dim, True, (*shape, IN), overlap=True, expanded=True)


def check_groups(m):
    """Messages to more than one rank: the rows of two samples, and a frozen weight's gradient."""
    for frozen in [(), ("weight", "bias")]:
        check_column(13, True, False, 1, False, (2, 24, IN), frozen=frozen, overlap=True, tp=m.tp)
    check_row(13, True, True, 1, (2, 24), overlap=True, tp=m.tp)


@pytest.mark.parametrize("size", [6, 8])
def test_overlapped_communication_in_groups_of_ranks_equals_dense(size):
    simulate(check_groups, tp=size)


def in_symmetric_memory(layer, smallest=1):
    return overlap_in_symmetric_memory(layer, layer.tp, "cpu", smallest)


@on_ranks(2)
def test_operators_on_symmetric_memory_equal_dense_or_are_not_used():
    """Torch's operators compute by gloo here. Without them, or if one is wrong, the ranks agree on the other way."""
    layers = [RowParallelLinear(8, 8, tp=tp_axis()) for _ in range(2)]
    with pytest.warns(UserWarning, match="symmetric memory is not used"):
        assert "has no symm_mem.fused_all_gather_matmul for cpu" in in_symmetric_memory(layers[0])
    gather, scatter = symmetric._fused_all_gather_matmul_fallback, symmetric._fused_matmul_reduce_scatter_fallback
    late = torch.distributed.get_rank() == 1
    for wrong, layer in enumerate(layers):
        with torch.library._scoped_library("symm_mem", "IMPL", "CPU") as library:
            library.impl("fused_all_gather_matmul", gather)
            library.impl("fused_matmul_reduce_scatter", lambda *args, by=wrong * late: scatter(*args) + by)
            with pytest.warns(UserWarning, match="other results") if wrong else nullcontext():
                assert ("other results" in in_symmetric_memory(layer)) == wrong
            assert (type(layer.product) is OverlapProduct) == wrong
            for dim, frozen in [] if wrong else [(0, ()), (1, ()), (1, ("weight", "bias"))]:
                shape = (4, 4, IN)
                check_column(13, True, False, dim, dim == 0, shape, frozen=frozen, overlap=in_symmetric_memory)
                check_row(13, True, True, dim, shape[:-1], frozen=frozen, overlap=in_symmetric_memory)


@on_ranks(2)
def test_pitfall_03_strided_inputs_and_expanded_gradients():
    tp = tp_axis()
    column, row = ColumnParallelLinear(IN, 10, tp=tp).double(), RowParallelLinear(10, 5, tp=tp).double()
    gathering = ColumnParallelLinear(IN, 10, tp=tp, sequence_parallel=True, sequence_dim=0).double()
    scattering = RowParallelLinear(10, 5, tp=tp, sequence_parallel=True, sequence_dim=0).double()
    for layer, width in (
        (column, IN), (gathering, IN), (row, row.local_in_features), (scattering, row.local_in_features),
    ):  # fmt: skip
        for x in (draw(1, width, 4).t(), draw(1, 1, width).expand(4, width), draw(1, 8, 2 * width)[::2, ::2]):
            before = x.clone()
            results = []
            for given in (x, x.contiguous()):
                layer.zero_grad()
                leaf = given.detach().requires_grad_()
                y = layer(leaf)
                y.sum().backward()  # an expanded gradient
                results.append([y.detach(), leaf.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
            assert torch.equal(x, before)
            for got, want in zip(*results, strict=True):
                close(got, want, type(layer).__name__)


@on_ranks(4)
def test_pitfall_18_a_row_bias_is_added_once():
    for sequence_parallel in (False, True):
        row = RowParallelLinear(8, 5, tp=tp_axis(), sequence_parallel=sequence_parallel, sequence_dim=0)
        with torch.no_grad():
            row.weight.zero_()
            row.bias.fill_(3.0)
        y = row(torch.ones(4, 2))
        assert torch.equal(y, torch.full_like(y, 3.0))
        y.sum().backward()
        reduce_gradients(row)
        assert torch.equal(row.bias.grad, torch.full((5,), 4.0))


QKV_HEADS = {  # (heads, kv heads, tp): query heads and kv heads of each rank, the local kv head each query reads
    (8, 8, 4): ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1]] * 4),
    (8, 4, 4): ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0], [1], [2], [3]], [[0, 0]] * 4),
    (8, 2, 4): ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0], [0], [1], [1]], [[0, 0]] * 4),
    (8, 1, 4): ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0]] * 4, [[0, 0]] * 4),
    (6, 2, 4): ([[0, 1], [2, 3], [4], [5]], [[0], [0, 1], [1], [1]], [[0, 0], [0, 1], [0], [0]]),
    (6, 2, 3): ([[0, 1], [2, 3], [4, 5]], [[0], [0, 1], [1]], [[0, 0], [0, 1], [0, 0]]),
    (6, 6, 4): ([[0, 1], [2, 3], [4], [5]], [[0, 1], [2, 3], [4], [5]], [[0, 1], [0, 1], [0], [0]]),
    (6, 3, 2): ([[0, 1, 2], [3, 4, 5]], [[0, 1], [1, 2]], [[0, 0, 1], [0, 1, 1]]),
}  # fmt: skip


@pytest.mark.parametrize("key", QKV_HEADS, ids=str)
def test_pitfall_16_qkv_shards_are_whole_heads(key):
    heads, kv_heads, size = key
    queries, keys, reads = QKV_HEADS[key]
    K = 2
    rows = torch.arange((heads + 2 * kv_heads) * K, dtype=torch.float32)
    for rank in range(size):
        axis = Axis(size, rank, None, "tp")
        layer = QKVParallelLinear(3, heads, kv_heads, K, tp=axis)
        wanted = [*queries[rank], *(heads + h for h in keys[rank]), *(heads + kv_heads + h for h in keys[rank])]
        wanted_rows = [head * K + i for head in wanted for i in range(K)]
        assert layer.shardings["bias"].take(rows).tolist() == wanted_rows
        assert layer.kv_head_of == reads[rank]
        assert (layer.local_heads, layer.local_kv_heads) == (len(queries[rank]), len(keys[rank]))
        assert layer.out_features == (heads + 2 * kv_heads) * K


def test_pitfall_16_gate_up_shards_never_mix_halves():
    rows = torch.arange(20)
    wanted = [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15], [6, 7, 16, 17], [8, 9, 18, 19]]
    for rank in range(4):
        layer = GateUpParallelLinear(3, 10, tp=Axis(4, rank, None, "tp"))
        assert layer.shardings["bias"].take(rows).tolist() == wanted[rank]


@on_ranks(*FEWER_SIZES)
def test_pitfall_13_replicated_and_divided_consumers_of_a_gathered_sequence():
    """After `gather` every rank does the same; after `all_gather` each does its part. Either way the dense gradient."""
    tp = tp_axis()
    whole, router, dy = draw(1, T, IN), draw(2, IN, 4), draw(3, T, 4)
    dense, dense_router = whole.clone().requires_grad_(), router.clone().requires_grad_()
    ((dense @ dense_router).softmax(-1) * dy).sum().backward()
    x, w = whole.clone().requires_grad_(), router.clone().requires_grad_()
    ((c.gather(c.split(x, tp, 0), tp, 0) @ w).softmax(-1) * dy).sum().backward()
    close(x.grad, dense.grad, "dx after gather")
    close(w.grad, dense_router.grad, "router gradient after gather")
    x, w = whole.clone().requires_grad_(), router.clone().requires_grad_()
    probabilities = (c.all_gather(c.split(x, tp, 0), tp, 0) @ w).softmax(-1)
    part = (tp.rank + 1) % tp.size  # another rank's tokens
    mine = slice(part * T // tp.size, (part + 1) * T // tp.size)
    (probabilities[mine] * dy[mine]).sum().backward()
    close(x.grad, dense.grad, "dx after all_gather")
    close(c.all_reduce(w.grad, tp), dense_router.grad, "router gradient after all_gather")


def test_a_wrong_shape_is_said_with_the_name_of_its_layer():
    up, block = ColumnParallelLinear(4, 8), nn.Sequential()
    block.up = up
    for model, said in ((up, ""), (block, r" \(in layer up\)"), (nn.Sequential(block), r" \(in layer 0\.up\)")):
        with pytest.raises(ValueError, match=f"is 5, but in_features is 4{said}$"):
            model(torch.zeros(2, 5))


@on_ranks(1, 2)
def test_second_derivatives_are_right_or_refused():
    tp = tp_axis()
    if tp.size == 1:
        x = draw(1, 2, IN).requires_grad_()
        assert torch.autograd.gradgradcheck(ColumnParallelLinear(IN, 4).double(), (x,))
        return
    for layer in (
        ColumnParallelLinear(IN, 4, tp=tp).double(),
        ColumnParallelLinear(IN, 4, tp=tp, sequence_parallel=True, sequence_dim=0).double(),
    ):
        x = draw(1, 2, IN).requires_grad_()
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    row = RowParallelLinear(4, 3, tp=tp).double()
    dense = RowParallelLinear(4, 3).double()
    load_full_state_dict(dense, full_state_dict(row))
    seconds = []
    for layer in (row, dense):
        x = draw(1, 2, 4).requires_grad_()
        y = layer(c.split(x, layer.tp, -1))
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(dx.pow(2).sum(), x)[0])
    close(seconds[0], seconds[1], "second derivative")


@pytest.mark.parametrize("main", [False, True])
@on_ranks(1, 2)
def test_outputs_can_be_written_to_as_those_of_torch_linear(main):
    tp = mesh(tp=torch.distributed.get_world_size()).tp
    layers = [ColumnParallelLinear(8, 6, tp=tp), RowParallelLinear(8, 6, tp=tp, input_is_parallel=False)]
    for layer, overlap in itertools.product(layers, [False, True]):
        if main and not overlap:
            main_gradients(layer)
        if overlap:
            overlap_communication(layer, smallest=1)
        y = layer(torch.ones(2, 4, 8))
        want = y.detach().relu()
        F.relu(y, inplace=True)
        assert torch.equal(y, want)
        y.sum().backward()
