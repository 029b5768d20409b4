"""Documents packed in the rows of a batch: tokens attend within their own document, and positions restart in each.

Source: Llama 3 (arXiv:2407.21783), section 3.2; packing and its mask, Krell et al. 2021 (arXiv:2107.02027).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpcore.kernels.attention import check_documents, key_bounds


def document_ids(tokens: Tensor, end_of_document: int) -> Tensor:
    """Number the documents in each row of tokens, from 0. An end-of-document token counts to the document it ends.

    Args:
        tokens: [B, T] token ids of full sequences. Call this before `shard_sequence`.
        end_of_document: the id of the token that ends a document.

    Returns:
        int32 [B, T], the document of each token, nondecreasing along each row.

    Example:
        >>> mpcore.document_ids(torch.tensor([[7, 8, 0, 9, 0, 0, 7]]), end_of_document=0)
        tensor([[0, 0, 0, 1, 1, 2, 3]], dtype=torch.int32)
    """
    ends = (tokens == end_of_document).int()
    return ends.cumsum(-1, dtype=torch.int32) - ends


def document_ends(documents: Tensor) -> Tensor:
    """Return where the documents of a batch end, to pass as `cu_seqlens` to attention. The host does not synchronize.

    Args:
        documents: [B, T] or [B, 1, T], the document of each token, for example from `document_ids`. A document is a run
            of equal values. The tensor must be the same on every rank of tp and cp.

    Returns:
        int32 [B T + 1]: 0, then the end of each document, counted over the concatenated rows. The last value, B T, is
        repeated to fill the tensor, so the length does not depend on the documents.

    Example:
        >>> mpcore.layers.document_ends(torch.tensor([[0, 0, 1], [0, 1, 1]]))
        tensor([0, 2, 3, 4, 6, 6, 6], dtype=torch.int32)
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    total = documents.numel()
    index = torch.arange(total, dtype=torch.int32, device=documents.device)
    return torch.cat([index.masked_fill(~begins.flatten(), total).sort().values, index.new_full((1,), total)])


def document_positions(cu_seqlens: Tensor, rows: int, length: int, device: torch.device | None = None) -> Tensor:
    """Return the position of each token in its document, for `RotaryEmbedding` and `PositionEmbedding`.

    Args:
        cu_seqlens: [n + 1] document ends, as `document_ends` returns them.
        rows, length: B and T of the full sequences.
        device: the device of the result; None: the device of `cu_seqlens`.

    Returns:
        int64 [B, T]. Under context parallelism select this rank's tokens: `[:, sequence_index(...)]`.

    Example:
        >>> mpcore.layers.document_positions(torch.tensor([0, 2, 3, 6]), rows=2, length=3)
        tensor([[0, 1, 0],
                [0, 1, 2]])
    """
    check_documents(cu_seqlens, rows * length)
    cu_seqlens = cu_seqlens.to(device or cu_seqlens.device, non_blocking=True)
    index = torch.arange(rows * length, device=cu_seqlens.device)
    return (index - cu_seqlens[torch.searchsorted(cu_seqlens, index, right=True) - 1]).view(rows, length)


def visible_keys(
    rows: int, length: int, device: torch.device, cu_seqlens: Tensor | None, causal: bool, window: int | None
) -> Tensor:
    """Return the combined mask of causality, window and documents: bool [B, T, T], or [1, T, T] without documents."""
    if cu_seqlens is None:
        rows = 1
    else:
        cu_seqlens = cu_seqlens.to(device, non_blocking=True)
    bounds = key_bounds(rows * length, causal=causal, window=window, cu_seqlens=cu_seqlens, device=device)
    first = length * torch.arange(rows, device=device)[:, None]  # of each row
    low, high = ((bound.view(rows, length) - first)[..., None] for bound in bounds)
    key = torch.arange(length, device=device)
    return (low <= key) & (key < high)
