"""The embedding tables: sharded equals dense, padding rows are torch's, and no row exists that the vocabulary lacks."""

import itertools
from functools import partial

import torch
from torch import nn

from mpcore import (
    PositionEmbedding,
    VocabParallelEmbedding,
    full_state_dict,
)
from mpcore import collectives as c
from mpcore.layers import ColumnParallelEmbedding, materialize
from tests.equality import FEWER_SIZES, draw, draw_ids, full_gradients, same_layer, same_model, tp_axis
from tests.pool import on_ranks

B, T, D = 2, 12, 4


@on_ranks(1, 3)
def test_the_padding_row_begins_as_zeros_and_stays_as_torchs():
    tp, whole = tp_axis(), partial(ColumnParallelEmbedding, gather_output=True)
    for padding, kind in itertools.product((0, 4, 9, -1, -10), (VocabParallelEmbedding, whole)):

        def run(table, padding=padding):
            ids = draw_ids(1, 10, B, T)
            ids[:, 0] = padding % 10
            (table(ids) * draw(2, B, T, D)).sum().backward()
            return {"y": table(ids).detach()}

        same_model(partial(kind, 10, D, padding_idx=padding), run, tp=tp)
        torch.manual_seed(5)
        torchs = nn.Embedding(10, D, padding_idx=padding)
        torch.manual_seed(5)
        ours = kind(10, D, padding_idx=padding, tp=tp)
        for table in (torchs, ours):
            table(torch.arange(10)).sum().backward()
        assert torch.equal(full_state_dict(ours)["weight"], torchs.weight)
        assert torch.equal(full_gradients(ours)["weight"], torchs.weight.grad)
        assert torch.equal(full_state_dict(materialize(ours, 3))["weight"].eq(0).all(1), torchs.weight.eq(0).all(1))


@on_ranks(*FEWER_SIZES)
def test_a_table_cut_by_columns_equals_dense():
    def run(table):
        y = c.gather(table(draw_ids(1, 7, B, T)), table.tp, -1, table.embedding_dim)
        (y * draw(2, *y.shape)).sum().backward()
        return {"y": y.detach()}

    for columns in (4, 5, 12):
        same_model(partial(ColumnParallelEmbedding, 7, columns), run, tp=tp_axis())


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

    same_model(partial(VocabParallelEmbedding, vocab, D, **options), run, tp=tp_axis())


@on_ranks(*FEWER_SIZES)
def test_sharded_equals_dense():
    for vocab in (12, 10, 7):
        for sequence, shape in [(None, (B, T)), (None, (1,)), (None, (0, T)), (1, (B, T)), (0, (T, B))]:
            check_embedding(vocab, sequence, shape)


@on_ranks(*FEWER_SIZES)
def test_pitfall_17_vocabulary_50257_has_no_padding_at_any_size():
    table = VocabParallelEmbedding(50257, 2, tp=tp_axis())
    assert full_state_dict(table)["weight"].shape == (50257, 2)
    assert (table.start, table.end) == c.shard_range(50257, table.tp)
    assert len(table.weight) == table.end - table.start


@on_ranks(*FEWER_SIZES)
def test_positions_equal_dense_with_and_without_sequence_parallel():
    for sequence_parallel, sequence in itertools.product((True, False), (0, 1)):
        build = partial(PositionEmbedding, 16, D, sequence_parallel=sequence_parallel, sequence_dim=sequence)
        shape, cut = (B, T, D) if sequence == 1 else (T, B, D), sequence if sequence_parallel else None
        same_layer(build, shape, split=cut, gather=None if cut is None else (cut,))
