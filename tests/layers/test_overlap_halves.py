"""Dense blocks that compute two halves of their rows: equal to the unsharded block on tp, or refused."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcore import Axis, ParallelAttention, ParallelMLP, ParallelMoE, RMSNorm, RotaryEmbedding, TransformerBlock
from mpcore.collectives import gather, split
from mpcore.experimental import overlap_halves
from mpcore.layers import materialize, overlap_communication
from mpcore.layers.linear_ops import Product
from mpcore.parallel import recompute
from tests.equality import close, same_model
from tests.layers.test_overlap_experts import CALLS, B, D, T, draw
from tests.pool import mesh, on_ranks


def build(halves=True, change=id, mlp=ParallelMLP, **on):
    """A block with uneven heads and hidden units on tp 3."""
    attention = ParallelAttention(D, 4, 2, head_dim=4, rope=RotaryEmbedding(4), **on)
    block = TransformerBlock(attention, mlp(D, 10, **on), RMSNorm(D, **on), RMSNorm(D, **on), dropout=0.2, **on)
    materialize(block, 0)
    if halves and on:
        overlap_halves(block)
    change(block)
    return block


def hook(block):
    for module in (block.attention, block.mlp.down):
        module.register_forward_hook(lambda _, x, y: 2 * y)


SIXES = torch.tensor([0, 4, 6, 12, 17, 18])  # documents of rows of 6, which 2 and 3 ranks share


def regather(block):
    block.attention.qkv.regather = True


CHANGES = {
    "hooks": hook,
    "backward hooks": lambda block: block.mlp.register_full_backward_pre_hook(lambda _, dy: (2 * dy[0],)),
    "recompute first": lambda block: recompute([block.eval()], "selective"),
    "overlap": lambda block: overlap_communication(block, smallest=1),
    "frozen": lambda block: [p.requires_grad_("norm" in name) for name, p in block.named_parameters()],
    "full": lambda block: recompute([block.eval()], "full"), "selective": lambda block: recompute([block], "selective"),
    "regather": regather, "attention alone": lambda block: recompute([block.attention], "full"),
}  # fmt: skip


def check_halves(call, change, needs_gradient, **options):
    tp = mesh(tp=dist.get_world_size()).tp

    def run(block):
        x = draw(B, 6 if options else T, D).requires_grad_(needs_gradient)
        if block.attention.sequence_parallel:
            y = gather(block(split(x, tp, 1), samples=torch.arange(B) + 4, **call), tp, 1)
        else:
            y = block(x, samples=torch.arange(B) + 4, **call)
        (y * draw(*y.shape, seed=2)).sum().backward()
        return {"y": y.detach()} | ({"dx": x.grad} if needs_gradient else {})

    same_model(partial(build, change=change), run, tp=tp, **options)


@on_ranks(pytest.param(2, marks=pytest.mark.slow), 3)
def test_two_halves_on_tp_equal_the_unsharded_block():
    calls = [call for call in CALLS.values() if not {"mlp_arguments", "bias"} & call.keys()]
    changed = [(CALLS["documents"], change) for change in CHANGES.values()]
    for case, needs_gradient in itertools.product([*((call, id) for call in calls), *changed], (True, False)):
        check_halves(*case, needs_gradient)
    for change, needs_gradient in itertools.product((id, *CHANGES.values()), (True, False)):
        check_halves({"cu_seqlens": SIXES}, change, needs_gradient, sequence_parallel=True)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0, "a message was never waited for"


class Own(ParallelMLP):
    def forward(self, x):
        return 2 * super().forward(x)


TP = {"tp": Axis(2, 0, None, "tp")}


def moe(dim, hidden, **on):
    return ParallelMoE(dim, hidden, 4, 2, **on)


@pytest.mark.parametrize(("on", "message"), [
    ({}, "model has none .on this rank 1 blocks, 0 with experts"),
    ({**TP, "mlp": moe}, "1 with experts.: leave it out, or call overlap_experts"),
    ({**TP, "mlp": Own}, "has a Own mlp with a forward of its own"),
    ({**TP, "mlp": lambda *_, **on: nn.Identity()}, "has a Identity that may not return"),
    ({**TP, "sequence_dim": 0}, "sequence_dim=0"),
])  # fmt: skip
def test_a_model_without_dense_halves_is_refused(on, message):
    with pytest.raises(ValueError, match=message):
        overlap_halves(build(halves=False, **on))


class Kept(RMSNorm):
    def forward(self, x):
        return super().forward(x) * getattr(self, "rows", 1.0)


def twice(block):
    block.forward = block.forward


def own_norm(block):
    block.mlp_norm.__class__ = Kept


def batch_norm(block):
    block.attention_norm = nn.BatchNorm1d(T)


@pytest.mark.parametrize("change", [twice, own_norm, batch_norm])
def test_a_block_whose_rows_may_depend_on_each_other_is_refused(change):
    with pytest.raises(ValueError, match="with a forward of its own, which may mix the rows: leave out overlap_halves"):
        overlap_halves(build(halves=False, change=change, **TP))


@on_ranks(2)
def test_hooks_that_change_before_a_recomputation_are_refused():
    block = build(tp=mesh(tp=2).tp)
    recompute([block], "full")
    handle = block.mlp.register_forward_hook(lambda *_: None)
    loss = block(draw(B, T, D).float().requires_grad_(), samples=torch.arange(B)).sum()
    handle.remove()
    with pytest.raises(ValueError, match="hooks of a block were added or removed before its recomputation"):
        loss.backward()


class _Own(Product):
    def row(self, x, weight, bias, tp, dim=None):
        return super().row(x, weight, bias, tp, dim)


@on_ranks(2)
def test_one_row_and_a_product_that_communicates_in_its_own_way_are_whole():
    def change(block):
        block.mlp.down.product = _Own()

    check_halves({}, change, True, sequence_parallel=True)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0, "a message was never waited for"
    block = build(tp=mesh(tp=2).tp).double()
    with pytest.warns(match="overlap_halves hides nothing in a micro-batch of 1 row"):
        one = block.eval()(draw(1, T, D))
    close(torch.cat([one] * 2), block(draw(1, T, D).expand(2, -1, -1)), "one row")


@on_ranks(2)
def test_a_reentrant_checkpoint_draws_the_masks_of_its_forward():
    found = []
    for halves in (False, True):
        block = build(halves, mlp=partial(ParallelMLP, activation="relu"), tp=mesh(tp=2).tp).double().eval()
        block.mlp.activation = nn.functional.dropout
        x = draw(B, T, D).requires_grad_()
        torch.manual_seed(0)
        checkpoint(block, x, use_reentrant=True).square().sum().backward()
        found.append(x.grad)
    close(found[1], found[0], "dx")
