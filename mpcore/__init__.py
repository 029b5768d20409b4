"""mpcore: Megatron-style model-parallel layers in pure PyTorch and Triton, proven equal to the unsharded model.

Each name below is imported when it is first used, so `import mpcore` is fast. All other names come from their package,
such as `mpcore.gradients.clip_gradients`.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpcore.interop.cut import pipeline_stages
    from mpcore.interop.hugging_face import from_pretrained, save_pretrained
    from mpcore.interop.parallelize import parallelize, suggest_plan
    from mpcore.layers import (
        ColumnParallelLinear,
        Dropout,
        GateUpParallelLinear,
        LayerNorm,
        MultiLatentAttention,
        ParallelAttention,
        ParallelMLP,
        ParallelMoE,
        PositionEmbedding,
        QKVParallelLinear,
        RMSNorm,
        RotaryEmbedding,
        RowParallelLinear,
        TransformerBlock,
        VocabParallelCrossEntropy,
        VocabParallelEmbedding,
        apply_rope,
        document_ids,
        linear_cross_entropy,
        sequence_index,
        shard_sequence,
        unshard_sequence,
        vocab_parallel_cross_entropy,
    )
    from mpcore.mesh import Axis, Mesh, build_mesh
    from mpcore.optim import AdamW, Muon, decay_groups
    from mpcore.sharding import add_partial, full_state_dict, load_full_state_dict
    from mpcore.tools.simulation import simulate
    from mpcore.training import Compile, Offload, Precision, Recompute, Run, Zero, prepare

__version__ = "0.3.0.dev0"
__all__ = [
    "AdamW", "Axis", "ColumnParallelLinear", "Compile", "Dropout", "GateUpParallelLinear", "LayerNorm", "Mesh",
    "MultiLatentAttention", "Muon", "Offload", "ParallelAttention", "ParallelMLP", "ParallelMoE", "PositionEmbedding",
    "Precision", "QKVParallelLinear", "RMSNorm", "Recompute", "RotaryEmbedding", "RowParallelLinear", "Run",
    "TransformerBlock", "VocabParallelCrossEntropy", "VocabParallelEmbedding", "Zero", "add_partial", "apply_rope",
    "build_mesh", "decay_groups", "document_ids", "from_pretrained", "full_state_dict", "linear_cross_entropy",
    "load_full_state_dict", "parallelize", "pipeline_stages", "prepare", "save_pretrained", "sequence_index",
    "shard_sequence", "simulate", "suggest_plan", "unshard_sequence", "vocab_parallel_cross_entropy",
]  # fmt: skip
_HOMES = {
    "interop.cut": "pipeline_stages",
    "interop.hugging_face": "from_pretrained save_pretrained",
    "interop.parallelize": "parallelize suggest_plan",
    "layers": (
        "ColumnParallelLinear Dropout GateUpParallelLinear LayerNorm MultiLatentAttention ParallelAttention "
        "ParallelMLP ParallelMoE PositionEmbedding QKVParallelLinear RMSNorm RotaryEmbedding RowParallelLinear "
        "TransformerBlock VocabParallelCrossEntropy VocabParallelEmbedding apply_rope document_ids "
        "linear_cross_entropy sequence_index shard_sequence unshard_sequence vocab_parallel_cross_entropy"
    ),
    "mesh": "Axis Mesh build_mesh",
    "optim": "AdamW Muon decay_groups",
    "sharding": "add_partial full_state_dict load_full_state_dict",
    "tools.simulation": "simulate",
    "training": "Compile Offload Precision Recompute Run Zero prepare",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_MOVED = {
    "checkpoint": "latest",
    "experimental": "DiLoCo LocalUpdates",
    "gradients": (
        "clip_gradients drop_gradients grad_norm guard_optimizer main_gradients reduce_gradients zero_gradients"
    ),
    "interop.lora": "add_lora load_lora merge_lora merged_state_dict save_lora",
    "interop.upcycle": "upcycle",
    "interop.parallelize": "Colwise Experts Hidden LocalSizes Replicate parallelize_summary",
    "layers": (
        "ColumnParallelEmbedding GroupedLinear Router document_ends document_positions linear_log_prob "
        "materialize seed_dropout update_routers vocab_parallel_log_prob"
    ),
    "optim": "LossScaler",
    "parallel": (
        "convert_to_fp8 finish_gradients offload_activations offload_optimizer offload_parameters recompute "
        "shard_data_parallel"
    ),
    "pipeline": "Pipeline partition",
    "sharding": "shardings",
    "training": "StepResult",
}
_MOVED_TO = {name: home for home, names in _MOVED.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(f"mpcore.{_HOME_OF[name]}"), name)
    elif name in _MOVED_TO:
        raise AttributeError(f"mpcore.{name} is mpcore.{_MOVED_TO[name]}.{name} since 0.3")
    else:
        try:
            value = import_module(f"mpcore.{name}")  # a package, such as mpcore.collectives
        except ModuleNotFoundError as error:
            if error.name != f"mpcore.{name}":
                raise
            raise AttributeError(f"module 'mpcore' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    packages = {name for name, value in globals().items() if isinstance(value, ModuleType)}
    return sorted({*__all__, *packages, "__version__"})
