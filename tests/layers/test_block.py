"""The transformer block, and a small model of several: sharded equals dense with every part in place."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcore import (
    Axis,
    ColumnParallelLinear,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RotaryEmbedding,
    TransformerBlock,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from mpcore.layers import materialize
from tests.equality import FEWER_SIZES, draw_ids, full_gradients, same_model
from tests.pool import mesh, on_ranks

B, T, D, V = 2, 12, 8, 21
NONE = Axis(name="tp")


def build_block(kind="llama", dropout=0.0, sequence=None, tp=NONE, heads=(6, 2), **like):
    """A llama block (RMSNorm, SwiGLU, grouped queries, qk-norm, rope) or a GPT-2 block (LayerNorm, GELU, biases)."""
    sp = {"tp": tp, "sequence_parallel": sequence is not None}
    order = {"sequence_dim": 1 if sequence is None else sequence}
    llama = kind == "llama"
    norm = RMSNorm if llama else LayerNorm
    attention = ParallelAttention(
        D, *heads, head_dim=4, bias=not llama, qk_norm=llama, rope=RotaryEmbedding(4) if llama else None,
        **sp, **order, **like,
    )  # fmt: skip
    mlp = ParallelMLP(D, 10, "swiglu" if llama else "gelu", bias=not llama, **sp, **order, **like)
    return TransformerBlock(
        attention, mlp, norm(D, **sp, **like), norm(D, **sp, **like), dropout=dropout, **sp, **order
    )


class Model(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, kind="llama", sequence=None, dropout=0.0, tied=False, layers=2, tp=NONE, **like):
        super().__init__()
        self.tp, self.sequence = tp, sequence
        sp = {"tp": tp, "sequence_parallel": sequence is not None}
        order = {"sequence_dim": 1 if sequence is None else sequence}
        self.embedding = VocabParallelEmbedding(V, D, **sp, **order, **like)
        self.blocks = nn.ModuleList(build_block(kind, dropout, sequence, tp, **like) for _ in range(layers))
        self.norm = RMSNorm(D, **sp, **like)
        self.head = ColumnParallelLinear(D, V, bias=False, **sp, **order, **like)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, target, samples=None, recompute=False, **options):
        if self.sequence == 0:
            ids, target = ids.t(), target.t()
        x = self.embedding(ids)
        for block in self.blocks:
            if recompute:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, samples=samples)
            else:
                x = block(x, samples=samples)
        return vocab_parallel_cross_entropy(self.head(self.norm(x)), target, tp=self.tp, vocab_size=V, **options)


def check_model(kind, sequence, tied, dropout, recompute):
    ids, target = draw_ids(1, V, B, T), draw_ids(2, V, B, T)
    target[0, :5] = -100

    def build(**axes):
        return materialize(Model(kind, sequence, dropout, tied, **axes), 11)

    def run(model):
        loss = model(ids, target, samples=torch.arange(B), recompute=recompute, label_smoothing=0.1, z_loss=1e-3)
        loss.backward()
        return {"loss": loss.detach()}

    same_model(build, run, tp=mesh(tp=torch.distributed.get_world_size()).tp)


@on_ranks(*FEWER_SIZES)
def test_models_equal_dense_tied_or_not_with_dropout_and_recomputation():
    for kind, sequence, tied in (("llama", None, True), ("llama", 0, False), ("gpt2", 0, True), ("gpt2", 1, False)):
        check_model(kind, sequence, tied, 0.2, recompute=tied)


@on_ranks(2)
def test_pitfall_22_recomputation_changes_no_bit():
    tp = mesh(tp=2).tp
    model = materialize(Model(dropout=0.3, sequence=1, tp=tp), 5)
    ids, target = draw_ids(1, V, B, T), draw_ids(2, V, B, T)
    runs = []
    for recompute in (False, True):
        model.zero_grad()
        loss = model(ids, target, samples=torch.arange(B), recompute=recompute)
        loss.backward()
        runs.append((loss.detach(), full_gradients(model)))
    (loss, grads), (loss_again, grads_again) = runs
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)
