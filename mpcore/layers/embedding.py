"""The embedding table, its rows (the vocabulary) cut over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpcore import collectives
from mpcore.kernels._dispatch import can_read, outside
from mpcore.layers.linear import check_sequence, check_size
from mpcore.layers.module import Init, ParallelModule, normal
from mpcore.mesh.axis import Axis, check_axis
from mpcore.sharding.declare import cut


class VocabParallelEmbedding(ParallelModule):
    """Looks up token ids in a table whose rows are cut over tp: ids are I, the result is I.

    The table has `num_embeddings` rows, whatever the tp size: 50257 on tp=4 is 12565 + 3 x 12564, and there is no
    padding to train or to store. To tie an output head: `head.weight = embedding.weight`, where `head` is a
    `ColumnParallelLinear(embedding_dim, num_embeddings, bias=False, tp=tp)`.

    Args:
        num_embeddings, embedding_dim: logical sizes, as of `torch.nn.Embedding`.
        tp: the axis.
        sequence_parallel: return this rank's equal shard of the sequence instead of the whole.
        sequence_dim: the dimension of `ids` that is the sequence.
        padding_idx: the id whose row begins as zeros and gets no gradient, as of `torch.nn.Embedding`; a negative one
            counts from the end.
        init: fills the logical table; None: normal with deviation 1, as `torch.nn.Embedding`.
        device, dtype: of the parameters.

    Raises:
        ValueError: if padding_idx lies outside the table.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp: Axis = Axis(name="tp"),
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        padding_idx: int | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("num_embeddings", num_embeddings, tp)
        self.num_embeddings, self.embedding_dim, self.tp = num_embeddings, embedding_dim, tp
        self.sequence_parallel, self.sequence_dim = sequence_parallel and tp.size > 1, sequence_dim
        shard = cut(num_embeddings, tp, 0)
        ((self.start, self.end),) = shard.mine
        self.local_padding_idx = None
        self.padding_idx, init = _with_padding(num_embeddings, padding_idx, init or normal(1.0))
        if self.padding_idx is not None and self.start <= self.padding_idx < self.end:
            self.local_padding_idx = self.padding_idx - self.start
        self.declare("weight", (num_embeddings, embedding_dim), init, shard=shard, device=device, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] integer ids -> [B, T, D], or the sequence's shard of it.

        Raises:
            ValueError: on a CPU, if an id lies outside the vocabulary.
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

    def extra_repr(self) -> str:
        """Global sizes, as users wrote them."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp.size}"


class ColumnParallelEmbedding(ParallelModule):
    """A table whose columns are cut over tp, such as a bias of each head: ids are I, the result is S(-1).

    Args:
        num_embeddings, embedding_dim: logical sizes, as of `torch.nn.Embedding`. Shards may be uneven.
        tp, gather_output, unit: as of `ColumnParallelLinear`.
        padding_idx, init, device, dtype: as of `VocabParallelEmbedding`.

    Raises:
        ValueError: if there are fewer units of columns than ranks, or padding_idx lies outside the table.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp: Axis = Axis(name="tp"),
        gather_output: bool = False,
        unit: int = 1,
        padding_idx: int | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("embedding_dim", embedding_dim, tp, unit)
        self.num_embeddings, self.embedding_dim, self.tp = num_embeddings, embedding_dim, tp
        self.gather_output = gather_output
        self.padding_idx, init = _with_padding(num_embeddings, padding_idx, init or normal(1.0))
        shard = cut(embedding_dim, tp, 1, unit)
        self.declare("weight", (num_embeddings, embedding_dim), init, shard=shard, device=device, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] integer ids -> [..., embedding_dim/tp], or [..., embedding_dim] with `gather_output`.

        Raises:
            ValueError: on a CPU, if an id lies outside the table.
        """
        check_ids(ids, self.num_embeddings)
        rows = F.embedding(ids, self.weight, self.padding_idx)
        return collectives.gather(rows, self.tp, -1, self.embedding_dim) if self.gather_output else rows

    def extra_repr(self) -> str:
        """Global sizes, as users wrote them."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp.size}"


def _with_padding(num_embeddings: int, padding_idx: int | None, init: Init) -> tuple[int | None, Init]:
    """The padding's row counted from the first, and what fills a table that has it."""
    if padding_idx is None:
        return None, init
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(f"padding_idx {padding_idx} is outside the table of {num_embeddings} rows")
    padding_idx %= num_embeddings
    return padding_idx, partial(_padded, init=init, padding_idx=padding_idx)


@torch.no_grad()
def _padded(tensor: Tensor, generator: torch.Generator | None = None, *, init: Init, padding_idx: int) -> Tensor:
    tensor = init(tensor) if generator is None else init(tensor, generator=generator)
    tensor[padding_idx] = 0
    return tensor


def check_ids(ids: Tensor, size: int, ignore_index: int | None = None) -> None:
    """Refuse ids outside [0, size) but `ignore_index`, where they can be read."""
    wrong = outside(ids, size, ignore_index)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary of {size}")


class PositionEmbedding(ParallelModule):
    """Adds a learned vector for each position; replicated on tp.

    Args:
        num_positions: the longest sequence.
        dim: D.
        tp, sequence_parallel, sequence_dim: with sequence parallel the input is this rank's equal shard of the
            sequence, and the table's gradient is declared a pending sum over tp.
        init: fills the table; None: normal with deviation 1.
        device, dtype: of the parameters.

    Source: Gehring et al. 2017, arXiv:1705.03122, section 3.1.
    """

    weight: Tensor

    def __init__(
        self,
        num_positions: int,
        dim: int,
        *,
        tp: Axis = Axis(name="tp"),
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_axis(tp)
        self.num_positions, self.tp = num_positions, tp
        self.sequence_parallel, self.sequence_dim = sequence_parallel and tp.size > 1, sequence_dim
        partial = (tp,) if self.sequence_parallel else ()
        self.declare("weight", (num_positions, dim), init or normal(1.0), partial=partial, device=device, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D], or the sequence's shard of both.

        Args:
            positions: [T] place in the whole sequence of each token, where context parallel cuts it
                (`sequence_index`); with sequence parallel before that cut. None: 0 .. T-1.

        Raises:
            ValueError: if the sequence is longer than the table.
        """
        length = x.shape[self.sequence_dim]
        first = self.tp.rank * length if self.sequence_parallel else 0
        whole = length * (self.tp.size if self.sequence_parallel else 1)
        if positions is not None and can_read(positions):
            whole = int(positions.max()) + 1
        if whole > self.num_positions:
            raise ValueError(f"sequence length {whole} is longer than the model's {self.num_positions} positions")
        if positions is None:
            rows = self.weight[first : first + length]
        else:
            rows = F.embedding(positions[first : first + length], self.weight)
        return x + (rows if self.sequence_dim == 1 else rows.unsqueeze(1))


# Modules whose weight is read row by row, and not multiplied with.
TABLES = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding, ColumnParallelEmbedding, PositionEmbedding)
