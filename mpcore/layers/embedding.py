"""The embedding table, with its rows (the vocabulary) sharded over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from mpcore import collectives
from mpcore.kernels._checks import can_read, outside
from mpcore.layers.linear import check_sequence, check_size
from mpcore.layers.module import Init, LayerOptions, ParallelModule, TensorOptions, fill, input_error, normal
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Shard, cut


class _Table(ParallelModule):
    weight: Tensor

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(**options)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx {padding_idx} is outside the table of {num_embeddings} rows")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings

    def declare_table(self, shard: Shard) -> None:
        init = self._init or normal(1.0)
        if self.padding_idx is not None:
            init = partial(_padded, init=init, padding_idx=self.padding_idx)
        self.declare("weight", (self.num_embeddings, self.embedding_dim), init, shard=shard)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp.size}"


@torch.no_grad()
def _padded(tensor: Tensor, generator: torch.Generator | None = None, *, init: Init, padding_idx: int) -> Tensor:
    fill(init, tensor, generator)[padding_idx] = 0
    return tensor


class VocabParallelEmbedding(_Table):
    """Look up token ids in a table whose rows are sharded over tp. Ids and result are the same on every rank.

    The logical table has exactly `num_embeddings` rows for every tp size, without padding: 50257 rows on tp=4 are
    12565 + 3 x 12564. To tie the output head, set `head.weight = embedding.weight`, where `head` is a
    `ColumnParallelLinear(embedding_dim, num_embeddings, bias=False, tp=tp)`.

    Args:
        num_embeddings, embedding_dim: sizes of the unsharded table, as in `torch.nn.Embedding`.
        padding_idx: the id whose row starts as zeros and gets no gradient, as in `torch.nn.Embedding`. A negative value
            counts from the end of the table.
        options: `LayerOptions`. With `sequence_parallel`, `ids` is the full sequence, and the result is this rank's
            shard.

    Raises:
        ValueError: if padding_idx lies outside the table.

    Example:
        >>> embedding = mpcore.VocabParallelEmbedding(50257, 8, tp=mpcore.Axis(size=4, rank=0), device="meta")
        >>> embedding.weight.shape
        torch.Size([12565, 8])
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, padding_idx: int | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, **options)
        check_size("num_embeddings", num_embeddings, self.tp)
        shard = cut(num_embeddings, self.tp, 0)
        self.start: int
        self.end: int
        ((self.start, self.end),) = shard.mine
        self.local_padding_idx: int | None = None
        if self.padding_idx is not None and self.start <= self.padding_idx < self.end:
            self.local_padding_idx = self.padding_idx - self.start
        self.declare_table(shard)

    def forward(self, ids: Tensor) -> Tensor:
        """Integer ids [B, T] -> [B, T, D], or this rank's shard of the sequence with `sequence_parallel`.

        Raises:
            ValueError: on a CPU, if an id lies outside the table.
        """
        check_ids(ids, self.num_embeddings)
        if self.tp.size == 1:
            return F.embedding(ids, self.weight, self.padding_idx)
        if self.sequence_parallel:
            check_sequence(ids, self.sequence_dim, self.tp)
        elsewhere = (ids < self.start) | (ids >= self.end)
        rows = F.embedding((ids - self.start).masked_fill(elsewhere, 0), self.weight, self.local_padding_idx)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return collectives.reduce_scatter(rows, self.tp, self.sequence_dim)
        return collectives.reduce(rows, self.tp)


class ColumnParallelEmbedding(_Table):
    """Look up ids in a table whose columns are sharded over tp, for example to get one bias per attention head.

    All ranks pass the same ids. Each rank returns its shard of the last dimension.

    Args:
        num_embeddings, embedding_dim: sizes of the unsharded table, as in `torch.nn.Embedding`. Shards may be uneven.
        tp, init, device, dtype: see `LayerOptions`.
        gather_output, unit: see `ColumnParallelLinear`.
        padding_idx: see `VocabParallelEmbedding`.

    Raises:
        ValueError: if embedding_dim / unit is smaller than the number of ranks, or padding_idx lies outside the table.

    Example:
        >>> bias_of_heads = mpcore.layers.ColumnParallelEmbedding(32, 6, tp=mpcore.Axis(size=2, rank=0), device="meta")
        >>> bias_of_heads.weight.shape
        torch.Size([32, 3])
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, tp: Axis = Axis(name="tp"), gather_output: bool = False,
        unit: int = 1, padding_idx: int | None = None, init: Init | None = None, **like: Unpack[TensorOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, tp=tp, init=init, **like)
        check_size("embedding_dim", embedding_dim, tp, unit)
        self.gather_output = gather_output
        self.declare_table(cut(embedding_dim, tp, 1, unit))

    def forward(self, ids: Tensor) -> Tensor:
        """Integer ids [...] -> [..., D/tp], or [..., D] with `gather_output`.

        Raises:
            ValueError: on a CPU, if an id lies outside the table.
        """
        check_ids(ids, self.num_embeddings)
        rows = F.embedding(ids, self.weight, self.padding_idx)
        return collectives.gather(rows, self.tp, -1, self.embedding_dim) if self.gather_output else rows


def check_ids(ids: Tensor, size: int, ignore_index: int | None = None) -> None:
    """Raise ValueError if an id is outside [0, size) and not `ignore_index`, if the host can read the ids."""
    wrong = outside(ids, size, ignore_index)
    if wrong is not None:
        raise input_error(f"token id {wrong} is outside the vocabulary of {size}")


class PositionEmbedding(ParallelModule):
    """Add a learned vector for each position. The table is replicated over tp.

    Args:
        num_positions: the length of the longest sequence.
        dim: D.
        options: `LayerOptions`. With `sequence_parallel`, the table's gradient is declared partial over tp.

    Source: Gehring et al. 2017, arXiv:1705.03122, section 3.1.

    Example:
        >>> x = mpcore.PositionEmbedding(16, 4)(torch.zeros(2, 3, 4))
        >>> x.shape, torch.equal(x[0], x[1])
        (torch.Size([2, 3, 4]), True)
    """

    weight: Tensor

    def __init__(self, num_positions: int, dim: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(**options)
        self.num_positions = num_positions
        partial = (self.tp,) if self.sequence_parallel else ()
        self.declare("weight", (num_positions, dim), self._init or normal(1.0), partial=partial)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]. Under sequence parallelism, input and output are this rank's shard of the sequence.

        Args:
            positions: [T] integers, the position of each token in the full sequence; or [B, T], the position of each
                token in its document (`document_positions`). None: 0 .. T-1. Under context parallelism pass this cp
                rank's positions (`sequence_index`), under sequence parallelism those of all tp ranks' tokens.

        Raises:
            ValueError: if the sequence is longer than the table, or the number of positions is not the number of
                tokens.
        """
        if x.dim() != 3:
            raise input_error(f"x {tuple(x.shape)} is not [B, T, D]")
        length, B = x.shape[self.sequence_dim], x.shape[1 - self.sequence_dim]
        first, whole = (self.tp.rank * length, self.tp.size * length) if self.sequence_parallel else (0, length)
        if positions is not None and positions.shape not in ((whole,), (1, whole), (B, whole)):
            raise input_error(
                f"positions {tuple(positions.shape)} for {whole} tokens: under context parallelism select this "
                f"rank's, positions[..., sequence_index(T, cp, context)]"
            )
        if positions is not None and can_read(positions):
            whole = int(positions.max()) + 1
        if whole > self.num_positions:
            raise input_error(f"sequence length {whole} is longer than the model's {self.num_positions} positions")
        if positions is None:
            rows = self.weight[first : first + length]
        else:
            rows = F.embedding(positions[..., first : first + length], self.weight)
        rows = rows if rows.dim() == 3 else rows.unsqueeze(0)
        return x + (rows if self.sequence_dim == 1 else rows.transpose(0, 1))


# Lookup tables: forward reads rows of the weight and does not multiply by it.
TABLES = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding, ColumnParallelEmbedding, PositionEmbedding)
