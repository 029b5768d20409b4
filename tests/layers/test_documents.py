"""Documents in the rows of a batch: ids, ends and positions by hand; attention as of each document by itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from mpcore import Axis, ParallelAttention, PositionEmbedding, RotaryEmbedding, document_ids
from mpcore.experimental import shift_tokens
from mpcore.layers import document_ends, document_positions
from tests.equality import close

END = 3


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    """Tokens of which every fourth ends a document, two in a row among them."""
    return torch.randint(0, END + 1, (rows, length), generator=torch.Generator().manual_seed(seed))


def by_hand(row: Tensor) -> list[tuple[int, int]]:
    """The documents of a row, from and to."""
    cuts = sorted({0, len(row), *(i + 1 for i, token in enumerate(row.tolist()) if token == END)})
    return list(itertools.pairwise(cuts))


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 1), (1, 13), (4, 31), (0, 5), (2, 1021)])
def test_ids_ends_and_positions_are_those_counted_by_hand(rows, length):
    tokens = text(rows, length)
    ids = document_ids(tokens, END)
    documents = [by_hand(row) for row in tokens]
    assert ids.tolist() == [[i for i, (a, b) in enumerate(row) for _ in range(a, b)] for row in documents]
    ends = [0, *(row * length + b for row, cuts in enumerate(documents) for _, b in cuts)]
    for given in (ids, 7 - 2 * ids.long(), ids[:, None]):  # any numbers that differ from the neighbour's
        found = document_ends(given)
        assert (found.dtype, found.tolist()) == (torch.int32, ends + [rows * length] * (rows * length + 1 - len(ends)))
        places = document_positions(found, rows, length)
        assert places.tolist() == [[i for a, b in row for i in range(b - a)] for row in documents]


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 2}, {"sequence_dim": 0}], ids=str)
def test_rows_of_documents_equal_each_document_by_itself(options):
    torch.manual_seed(0)
    layer = ParallelAttention(8, 4, 2, rope=RotaryEmbedding(2), **options).double()
    tokens, x = text(3, 9, seed=1), torch.randn(3, 9, 8, dtype=torch.float64)
    turned = (lambda t: t.transpose(0, 1)) if options.get("sequence_dim") == 0 else (lambda t: t)
    packed = turned(layer(turned(x), cu_seqlens=document_ends(document_ids(tokens, END))))
    for row, of in enumerate(tokens):
        alone = [turned(layer(turned(x[row : row + 1, a:b]))) for a, b in by_hand(of)]
        close(packed[row].detach(), torch.cat(alone, 1)[0].detach(), f"row {row}")
    empty, ends = torch.zeros(0, 9, 8, dtype=torch.float64), document_ends(torch.zeros(0, 9, dtype=torch.int32))
    for size, given in ((1, ends), (2, ends), (2, None)):  # no rows are no messages
        layer.cp, layer.context = Axis(size, name="cp"), "zigzag"
        assert turned(layer(turned(empty), cu_seqlens=given)).shape == (0, 9, 8)


@pytest.mark.parametrize("sequence_dim", [0, 1])
def test_learned_positions_begin_anew_in_each_document(sequence_dim):
    table, tokens = PositionEmbedding(9, 4, sequence_dim=sequence_dim), text(3, 9)
    places = document_positions(document_ends(document_ids(tokens, END)), 3, 9)
    x = torch.zeros(3, 9, 4) if sequence_dim else torch.zeros(9, 3, 4)
    y = table(x, places)
    assert torch.equal(y if sequence_dim else y.transpose(0, 1), table.weight[places])


def test_other_documents_compile_nothing_anew():
    layer, counter = ParallelAttention(8, 4, rope=RotaryEmbedding(2)), CompileCounter()
    compiled, x = torch.compile(layer, backend=counter, fullgraph=True), torch.randn(2, 9, 8)
    for seed in range(3):
        ends = document_ends(document_ids(text(2, 9, seed), END))
        close(compiled(x, cu_seqlens=ends).detach(), layer(x, cu_seqlens=ends).detach(), f"seed {seed}", 1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("rank", "tokens"), [(0, 3), (1, 2)])
def test_ends_give_the_length_of_rows_that_cp_and_tp_shard_unevenly(rank, tokens):
    """Of 9 tokens rank 0 of cp 2 has 5, and of them the ranks of tp 2 have 3 and 2."""
    tp, cp = Axis(2, rank, name="tp"), Axis(2, 0, name="cp")
    layer = ParallelAttention(8, 4, tp=tp, cp=cp, context="ring", sequence_parallel=True)
    ends = torch.tensor([0, 4, 9])
    assert layer._whole_length(torch.zeros(1, tokens, 8), ends, None, None, None, 0) == 9
    with pytest.raises(ValueError, match=rf"holds {tokens} tokens of each of 1 rows, but x has 4"):
        layer._whole_length(torch.zeros(1, 4, 8), ends, None, None, None, 0)


def test_no_target_lies_across_the_end_of_a_document():
    tokens = torch.arange(20, 27).expand(2, 7)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]])
    inputs, targets = shift_tokens(tokens, 2, documents)
    for depth, (given, target) in enumerate(zip(inputs, targets, strict=True), 1):
        for row in range(2):
            for i in range(7):
                ends = [j < 7 and documents[row, j] == documents[row, i] for j in (i + depth, i + depth + 1)]
                assert given[row, i] == (20 + i + depth if ends[0] else 20 + i)
                assert target[row, i] == (20 + i + depth + 1 if ends[1] else -100)
