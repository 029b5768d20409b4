"""Attention over heads that are sharded over tp and sequences that are sharded over cp. Open `heads.py` first."""

from mpcore.layers.attention.context import context_attention
from mpcore.layers.attention.documents import document_ends, document_ids, document_positions
from mpcore.layers.attention.heads import ParallelAttention
from mpcore.layers.attention.latent import MultiLatentAttention
from mpcore.layers.attention.scores import AttentionSinks
from mpcore.layers.attention.sequence import sequence_index, shard_sequence, unshard_sequence

__all__ = [
    "AttentionSinks",
    "MultiLatentAttention",
    "ParallelAttention",
    "context_attention",
    "document_ends",
    "document_ids",
    "document_positions",
    "sequence_index",
    "shard_sequence",
    "unshard_sequence",
]
