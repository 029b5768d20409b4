"""Parallel layers. Each is a plain `torch.nn.Module` that also works alone: the default `tp=Axis()` is one rank."""

from typing import TYPE_CHECKING, Any

from mpcore.layers.attention.documents import document_ends, document_ids, document_positions
from mpcore.layers.attention.latent import MultiLatentAttention
from mpcore.layers.attention.multi_head import ParallelAttention
from mpcore.layers.attention.sequence import sequence_index, shard_sequence, unshard_sequence
from mpcore.layers.block import TransformerBlock
from mpcore.layers.dropout import Dropout, seed_dropout
from mpcore.layers.embedding import ColumnParallelEmbedding, PositionEmbedding, VocabParallelEmbedding
from mpcore.layers.fused_linear import GateUpParallelLinear, KVParallelLinear, QKVParallelLinear
from mpcore.layers.initialize import materialize
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.layers.loss import (
    VocabParallelCrossEntropy,
    linear_cross_entropy,
    linear_log_prob,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_prob,
)
from mpcore.layers.mlp import ParallelMLP
from mpcore.layers.moe.experts import GroupedLinear
from mpcore.layers.moe.layer import ParallelMoE
from mpcore.layers.moe.router import Router
from mpcore.layers.moe.statistics import RouterStatistics, update_routers
from mpcore.layers.norm import LayerNorm, RMSNorm
from mpcore.layers.overlap import overlap_communication
from mpcore.layers.rope import RotaryEmbedding, apply_rope

__all__ = [
    "ColumnParallelEmbedding", "ColumnParallelLinear", "Dropout", "GateUpParallelLinear", "GroupedLinear",
    "KVParallelLinear", "LayerNorm", "MultiLatentAttention", "ParallelAttention", "ParallelMLP", "ParallelMoE",
    "PositionEmbedding", "QKVParallelLinear", "RMSNorm", "RotaryEmbedding", "Router", "RouterStatistics",
    "RowParallelLinear", "TransformerBlock", "VocabParallelCrossEntropy", "VocabParallelEmbedding", "apply_rope",
    "document_ends", "document_ids", "document_positions", "linear_cross_entropy", "linear_log_prob", "materialize",
    "overlap_communication", "seed_dropout", "sequence_index", "shard_sequence", "unshard_sequence",
    "update_routers", "vocab_parallel_cross_entropy", "vocab_parallel_log_prob",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        moved = "mpcore.layers.upcycle is mpcore.interop.upcycle.upcycle since 0.3"
        raise AttributeError(moved if name == "upcycle" else f"module {__name__!r} has no attribute {name!r}")
