"""mpcore: Megatron-style model-parallel layers in pure PyTorch and Triton, proven equal to the unsharded model."""

from mpcore.gradients import clip_gradients, grad_norm, main_gradients, reduce_gradients, zero_gradients
from mpcore.initialize import materialize
from mpcore.layers import (
    ColumnParallelLinear,
    Dropout,
    GateUpParallelLinear,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    PositionEmbedding,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    TransformerBlock,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    apply_rope,
    linear_cross_entropy,
    seed_dropout,
    sequence_index,
    shard_sequence,
    unshard_sequence,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_prob,
)
from mpcore.mesh import Axis, Mesh, build_mesh
from mpcore.optim import AdamW, Muon, decay_groups
from mpcore.parallelize import parallelize
from mpcore.precision import LossScaler
from mpcore.sharding import full_state_dict, load_full_state_dict, shardings

__version__ = "0.1.0"
__all__ = [
    "AdamW",
    "Axis",
    "ColumnParallelLinear",
    "Dropout",
    "GateUpParallelLinear",
    "LayerNorm",
    "LossScaler",
    "Mesh",
    "Muon",
    "ParallelAttention",
    "ParallelMLP",
    "PositionEmbedding",
    "QKVParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "TransformerBlock",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "apply_rope",
    "build_mesh",
    "clip_gradients",
    "decay_groups",
    "full_state_dict",
    "grad_norm",
    "linear_cross_entropy",
    "load_full_state_dict",
    "main_gradients",
    "materialize",
    "parallelize",
    "reduce_gradients",
    "seed_dropout",
    "sequence_index",
    "shard_sequence",
    "shardings",
    "unshard_sequence",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_prob",
    "zero_gradients",
]
