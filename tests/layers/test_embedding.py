"""The embedding tables: sharded equals dense, padding rows are torch's, and no row exists that the vocabulary lacks."""

from functools import partial

import pytest
import torch
from torch import nn

from mpcore import (
    Axis,
    ColumnParallelLinear,
    PositionEmbedding,
    VocabParallelEmbedding,
    full_state_dict,
    vocab_parallel_cross_entropy,
)
from mpcore import collectives as c
from mpcore.layers import ColumnParallelEmbedding, materialize
from tests.equality import FEWER_SIZES, draw, draw_ids, full_gradients, same_layer, same_model, tp_axis

B, T, D = 2, 12, 4


def check_padding(padding):
    def run(table):
        ids = draw_ids(1, 10, B, T)
        ids[:, 0] = padding % 10
        (table(ids) * draw(2, B, T, D)).sum().backward()
        return {"y": table(ids).detach()}

    tp = tp_axis()
    whole = partial(ColumnParallelEmbedding, gather_output=True)
    for kind in (VocabParallelEmbedding, whole):
        same_model(lambda kind=kind, **a: kind(10, D, padding_idx=padding, **a), run, tp=tp)
        torch.manual_seed(5)
        torchs = nn.Embedding(10, D, padding_idx=padding)
        torch.manual_seed(5)
        ours = kind(10, D, padding_idx=padding, tp=tp)
        for table in (torchs, ours):
            table(torch.arange(10)).sum().backward()
        assert torch.equal(full_state_dict(ours)["weight"], torchs.weight)
        assert torch.equal(full_gradients(ours)["weight"], torchs.weight.grad)
        assert torch.equal(full_state_dict(materialize(ours, 3))["weight"].eq(0).all(1), torchs.weight.eq(0).all(1))


@pytest.mark.parametrize("size", [1, 3])
def test_the_padding_row_begins_as_zeros_and_stays_as_torchs(ranks, size):
    for padding in (0, 4, 9, -1, -10):
        ranks(size, check_padding, padding)


def check_columns(columns):
    def run(table):
        y = c.gather(table(draw_ids(1, 7, B, T)), table.tp, -1, columns)
        (y * draw(2, B, T, columns)).sum().backward()
        return {"y": y.detach()}

    same_model(lambda **a: ColumnParallelEmbedding(7, columns, **a), run, tp=tp_axis())


@pytest.mark.parametrize("size", FEWER_SIZES)
def test_a_table_cut_by_columns_equals_dense(ranks, size):
    for columns in (4, 5, 12):
        ranks(size, check_columns, columns)


def check_embedding(vocab, sequence, shape):
    options = {} if sequence is None else {"sequence_parallel": True, "sequence_dim": sequence}

    def run(table):
        ids = draw_ids(1, vocab, *shape)
        if ids.numel() > 2:
            ids.view(-1)[:2] = torch.tensor([0, vocab - 1])
        y = table(ids)
        y = y if sequence is None else c.gather(y, table.tp, sequence)
        (y * draw(2, *y.shape)).sum().backward()
        return {"y": y.detach()}

    same_model(lambda **a: VocabParallelEmbedding(vocab, D, **options, **a), run, tp=tp_axis())


@pytest.mark.parametrize("size", FEWER_SIZES)
def test_sharded_equals_dense(ranks, size):
    for vocab in (12, 10, 7):
        for sequence, shape in [(None, (B, T)), (None, (1,)), (None, (0, T)), (1, (B, T)), (0, (T, B))]:
            ranks(size, check_embedding, vocab, sequence, shape)


class TiedModel(nn.Module):
    """An embedding whose table is the output head as well, with an untied twin of the head beside it."""

    def __init__(self, vocab, tied=True, tp=Axis()):
        super().__init__()
        self.embedding = VocabParallelEmbedding(vocab, D, tp=tp)
        self.head = ColumnParallelLinear(D, vocab, bias=False, tp=tp)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)))


def check_tied(vocab, tied):
    ids, target = draw_ids(1, vocab, B, T), draw_ids(2, vocab, B, T)

    def run(model):
        tp = model.head.tp
        logits = model(ids)
        loss = vocab_parallel_cross_entropy(logits, target, tp=tp, vocab_size=vocab)
        loss.backward()
        return {"logits": c.gather(logits.detach(), tp, -1, vocab), "loss": loss.detach()}

    same_model(lambda **a: TiedModel(vocab, tied, **a), run, tp=tp_axis())


@pytest.mark.parametrize("size", FEWER_SIZES)
def test_pitfall_17_vocabulary_50257_has_no_padding_at_any_size(ranks, size):
    ranks(size, check_tied, 50257, True)
    rows = ranks(size, local_rows)
    assert sum(rows) == 50257
    assert max(rows) - min(rows) <= 1


def local_rows():
    table = VocabParallelEmbedding(50257, 2, tp=tp_axis())
    state = full_state_dict(table)
    assert state["weight"].shape == (50257, 2)
    assert (table.start, table.end) == c.shard_range(50257, table.tp)
    return len(table.weight)


def check_positions(sequence_parallel, sequence):
    build = partial(PositionEmbedding, 16, D, sequence_parallel=sequence_parallel, sequence_dim=sequence)
    shape, cut = (B, T, D) if sequence == 1 else (T, B, D), sequence if sequence_parallel else None
    same_layer(build, shape, split=cut, gather=None if cut is None else (cut,))


@pytest.mark.parametrize("size", FEWER_SIZES)
def test_positions_equal_dense_with_and_without_sequence_parallel(ranks, size):
    for sequence_parallel in (True, False):
        for sequence in (0, 1):
            ranks(size, check_positions, sequence_parallel, sequence)
