"""Attention over heads that are sharded over tp and sequences that are sharded over cp. Open `multi_head.py` first."""

from mpcore.layers.attention.cache import KVCache
from mpcore.layers.attention.context import context_attention
from mpcore.layers.attention.documents import document_ends, document_ids, document_positions
from mpcore.layers.attention.latent import MultiLatentAttention
from mpcore.layers.attention.multi_head import ParallelAttention
from mpcore.layers.attention.scores import AttentionSinks
from mpcore.layers.attention.sequence import sequence_index, shard_sequence, unshard_sequence

__all__ = [
    "AttentionSinks", "KVCache", "MultiLatentAttention", "ParallelAttention", "context_attention", "document_ends",
    "document_ids", "document_positions", "sequence_index", "shard_sequence", "unshard_sequence",
]  # fmt: skip
