"""mpcore: Megatron-style model-parallel layers in pure PyTorch and Triton, proven equal to the unsharded model.

Each name below is imported when it is first used, so `import mpcore` is fast.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpcore.checkpoint import latest
    from mpcore.gradients import (
        clip_gradients,
        drop_gradients,
        grad_norm,
        guard_optimizer,
        main_gradients,
        reduce_gradients,
        zero_gradients,
    )
    from mpcore.interop.cut import pipeline_stages
    from mpcore.interop.hugging_face import from_pretrained, save_pretrained
    from mpcore.interop.lora import add_lora, load_lora, merge_lora, merged_state_dict, save_lora
    from mpcore.interop.parallelize import (
        Colwise,
        Experts,
        Hidden,
        LocalSizes,
        Replicate,
        parallelize,
        parallelize_summary,
        suggest_plan,
    )
    from mpcore.layers import (
        ColumnParallelEmbedding,
        ColumnParallelLinear,
        Dropout,
        GateUpParallelLinear,
        GroupedLinear,
        LayerNorm,
        MultiLatentAttention,
        ParallelAttention,
        ParallelMLP,
        ParallelMoE,
        PositionEmbedding,
        QKVParallelLinear,
        RMSNorm,
        RotaryEmbedding,
        Router,
        RowParallelLinear,
        TransformerBlock,
        VocabParallelCrossEntropy,
        VocabParallelEmbedding,
        apply_rope,
        document_ends,
        document_ids,
        document_positions,
        linear_cross_entropy,
        linear_log_prob,
        seed_dropout,
        sequence_index,
        shard_sequence,
        unshard_sequence,
        upcycle,
        update_routers,
        vocab_parallel_cross_entropy,
        vocab_parallel_log_prob,
    )
    from mpcore.layers.initialize import materialize
    from mpcore.mesh import Axis, Mesh, build_mesh
    from mpcore.optim import AdamW, LossScaler, Muon, decay_groups
    from mpcore.parallel import (
        convert_to_fp8,
        finish_gradients,
        offload_activations,
        offload_optimizer,
        offload_parameters,
        recompute,
        shard_data_parallel,
        sync_gradients,
    )
    from mpcore.pipeline import Pipeline
    from mpcore.pipeline.partition import partition
    from mpcore.sharding import add_partial, full_state_dict, load_full_state_dict, shardings
    from mpcore.tools.simulation import simulate
    from mpcore.training import Compile, Offload, Precision, Recompute, Run, StepResult, Zero, prepare

__version__ = "0.3.0.dev0"
__all__ = [
    "AdamW",
    "Axis",
    "ColumnParallelEmbedding",
    "ColumnParallelLinear",
    "Colwise",
    "Compile",
    "Dropout",
    "Experts",
    "GateUpParallelLinear",
    "GroupedLinear",
    "Hidden",
    "LayerNorm",
    "LocalSizes",
    "LossScaler",
    "Mesh",
    "MultiLatentAttention",
    "Muon",
    "Offload",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelMoE",
    "Pipeline",
    "PositionEmbedding",
    "Precision",
    "QKVParallelLinear",
    "RMSNorm",
    "Recompute",
    "Replicate",
    "RotaryEmbedding",
    "Router",
    "RowParallelLinear",
    "Run",
    "StepResult",
    "TransformerBlock",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "Zero",
    "add_lora",
    "add_partial",
    "apply_rope",
    "build_mesh",
    "clip_gradients",
    "convert_to_fp8",
    "decay_groups",
    "document_ends",
    "document_ids",
    "document_positions",
    "drop_gradients",
    "finish_gradients",
    "from_pretrained",
    "full_state_dict",
    "grad_norm",
    "guard_optimizer",
    "latest",
    "linear_cross_entropy",
    "linear_log_prob",
    "load_full_state_dict",
    "load_lora",
    "main_gradients",
    "materialize",
    "merge_lora",
    "merged_state_dict",
    "offload_activations",
    "offload_optimizer",
    "offload_parameters",
    "parallelize",
    "parallelize_summary",
    "partition",
    "pipeline_stages",
    "prepare",
    "recompute",
    "reduce_gradients",
    "save_lora",
    "save_pretrained",
    "seed_dropout",
    "sequence_index",
    "shard_data_parallel",
    "shard_sequence",
    "shardings",
    "simulate",
    "suggest_plan",
    "sync_gradients",
    "unshard_sequence",
    "upcycle",
    "update_routers",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_prob",
    "zero_gradients",
]
_HOMES = {
    "checkpoint": "latest",
    "gradients": (
        "clip_gradients drop_gradients grad_norm guard_optimizer main_gradients reduce_gradients zero_gradients"
    ),
    "interop.hugging_face": "from_pretrained save_pretrained",
    "interop.lora": "add_lora load_lora merge_lora merged_state_dict save_lora",
    "interop.parallelize": "Colwise Experts Hidden LocalSizes Replicate parallelize parallelize_summary suggest_plan",
    "layers": (
        "ColumnParallelEmbedding ColumnParallelLinear Dropout GateUpParallelLinear GroupedLinear LayerNorm "
        "MultiLatentAttention ParallelAttention ParallelMLP ParallelMoE PositionEmbedding QKVParallelLinear "
        "RMSNorm RotaryEmbedding Router RowParallelLinear TransformerBlock VocabParallelCrossEntropy "
        "VocabParallelEmbedding apply_rope document_ends document_ids document_positions linear_cross_entropy "
        "linear_log_prob seed_dropout sequence_index shard_sequence unshard_sequence upcycle update_routers "
        "vocab_parallel_cross_entropy vocab_parallel_log_prob "
    ),
    "layers.initialize": "materialize",
    "mesh": "Axis Mesh build_mesh",
    "optim": "AdamW LossScaler Muon decay_groups",
    "parallel": (
        "convert_to_fp8 finish_gradients offload_activations offload_optimizer offload_parameters "
        "recompute shard_data_parallel sync_gradients "
    ),
    "pipeline": "Pipeline",
    "interop.cut": "pipeline_stages",
    "pipeline.partition": "partition",
    "tools.simulation": "simulate",
    "training": "Compile Offload Precision Recompute Run StepResult Zero prepare",
    "sharding": "add_partial full_state_dict load_full_state_dict shardings",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(f"mpcore.{_HOME_OF[name]}"), name)
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
