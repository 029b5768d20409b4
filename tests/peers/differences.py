"""The properties that differ by convention, and those that mpcore cannot state, each with its source."""

from __future__ import annotations

from typing import NamedTuple

from tests.peers.sources import AREAS

PAGES = {"Megatron-LM": "megatron.md", "torchtitan": "from_fsdp2.md", "DeepSpeed": "from_deepspeed.md"}


class Difference(NamedTuple):
    """A row of a page's section "Conventions".

    Attributes:
        area: a row of the table.
        peer: a key of `PAGES`.
        theirs: the first cell of the row.
        source: the peer's file, and the test or the code.
    """

    area: str
    peer: str
    theirs: str
    source: str


M, T, D = PAGES
RANKS, STAGES, ORDER, TP, LAYERS, PACKED, LOSS, MOE, RATES, BATCHES, SCALES, NORMS, STEPS, DATA, CHECKPOINTS, USE = (
    AREAS
)
DIFFER = [
    Difference(LAYERS, M, "activations are [s, b, h]", "transformer/test_attention.py: test_gpu_forward"),
    Difference(LOSS, M, "logits [s, b, v] and labels [b, s]", "models/test_gpt_model.py: test_post_process_forward"),
    Difference(LAYERS, M, "`output, bias = layer(x)`", "transformer/test_mlp.py: test_gpu_forward"),
    Difference(LAYERS, M, "a mask [b, 1, s, s], True is masked", "transformer/test_attention.py: test_gpu_forward"),
    Difference(STEPS, M, "gradients are averaged over data ranks, the loss over micro-batches",
               "distributed/test_param_and_grad_buffer.py: test_grad_sync"),
    Difference(RATES, M, "the first step of warm-up has `--lr-warmup-init` (0)",
               "test_optimizer_param_scheduler.py: test_get_lr_linear"),
    Difference(RATES, M, "a warm-up longer than the run is an error", "megatron/core/optimizer_param_scheduler.py"),
    Difference(RATES, M, "a skipped step doesn't advance the learning rate schedule", "megatron/training/training.py"),
    Difference(RATES, M, "a parameter group may have a maximal and a minimal learning rate of its own",
               "test_optimizer.py: test_get_param_groups_overlapping_matches"),
    Difference(MOE, M, "the global-batch balance loss counts the step's tokens so far",
               "transformer/moe/test_aux_loss.py: test_global_aux_loss"),
    Difference(MOE, M, "group scores sum floor(K / top groups) experts",
               "transformer/moe/test_routers.py: TestGroupLimitedRouter.test_router_forward"),
    Difference(LAYERS, M, "`F.gelu` is exact; fused with a bias it is the tanh form", "transformer/test_mlp.py"),
    Difference(STEPS, M, "`--weight-decay` for all parameters except biases and norms of one dimension",
               "test_optimizer.py: test_get_param_groups_with_standard_config_overrides"),
    Difference(CHECKPOINTS, M, "checkpoints hold state of each rank, such as random numbers",
               "test_checkpointing.py: save_checkpoint"),
    Difference(DATA, M, "each sample of a blend is from the corpus that is furthest behind its share",
               "data/test_builder.py: test_builder"),
    Difference(STAGES, M, "layers must be a multiple of pipeline stages, unless a layout is given",
               "transformer/test_transformer_block.py: test_layer_builder, 65 layers, pp 4"),
    Difference(STAGES, M, "a layout may have stages without layers",
               "transformer/test_transformer_block.py: test_layout_layer_number"),
    Difference(USE, M, "FLOPs of causal attention count the keys that a token sees",
               "test_num_floating_point_operations.py: test_thd_zero_seqlen_squared_sum_removes_core_attn"),
    Difference(BATCHES, M, "`--decrease-batch-size-if-needed` trains with a smaller batch",
               "test_num_microbatches_calculator.py: test_get_num_microbatches"),
    Difference(RATES, T, "a warm-up that is longer than the run is shortened to the length of the run",
               "test_lr_scheduler.py: test_warmup_exceeds_training"),
    Difference(RATES, T, "each parameter group's learning rate follows the schedule from its own peak",
               "test_optimizer_param_groups.py: test_mixed_optimizer_same_schedule_different_base_lr"),
    Difference(STEPS, T, "a parameter that no group's pattern matches is an error",
               "test_optimizer_param_groups.py: test_uncovered_params_raises"),
    Difference(LAYERS, T, "heads and KV heads must be multiples of tp",
               "test_tp_kv_heads_validation.py: test_llama3_kv_heads_not_divisible_raises"),
    Difference(LAYERS, T, "RoPE raises an error for positions beyond `max_context_length`",
               "test_rope.py: test_out_of_range_positions_raises"),
    Difference(RANKS, T, "the sequence length must be a multiple of tp x 2 cp",
               "test_parallel_dims.py: test_seq_len_divisor"),
    Difference(RANKS, T, "experts are not sharded over tp: ep may divide dp x cp x tp",
               "test_parallel_dims.py: test_expert_parallelism_validation"),
    Difference(LAYERS, T, "linear layers have no bias by default", "test_linear.py: test_default_bias_false"),
    Difference(LAYERS, T, "a tied head with pipeline parallelism is an error",
               "test_weight_tying.py: test_pp_guard_raises_when_weight_tying_and_pp_enabled"),
    Difference(PACKED, T, "context parallelism with varlen attention is an error",
               "test_context_parallel_validation.py: test_rejects_varlen_cp_on_spmd_types"),
    Difference(USE, T, "selective recomputation repeats every second matrix product",
               "test_activation_checkpoint.py: TestApplyAC.test_flops"),
    Difference(USE, T, "a loss that is not finite raises an error",
               "test_invalid_loss.py: test_nan_loss_raises_on_log_step"),
    Difference(RATES, D, "the warm-up begins at `warmup_min_lr`, and is logarithmic by default",
               "runtime/test_lr_schedulers.py: TestLrSchedule.test_lr_warmup_schedule"),
    Difference(SCALES, D, "the loss scale has a lower bound (`min_loss_scale`)",
               "runtime/half_precision/test_dynamic_loss_scale.py: TestFused.test_all_overflow"),
    Difference(STEPS, D, "gradients are averaged over ranks and accumulation steps",
               "runtime/zero/test_zero.py: TestZero3ParamPartitioningLargeParam"),
    Difference(BATCHES, D, "you may set the micro-batch size, and DeepSpeed checks that it fits the batch size",
               "runtime/test_ds_config_dict.py: TestBatchConfig"),
    Difference(STAGES, D, "with more pipeline stages than layers, some stages are empty",
               "runtime/utils/test_partition.py: test_short_partition"),
    Difference(RANKS, D, "the axes of a topology have any names and any order",
               "runtime/pipe/test_topology.py: test_topology_3d"),
    Difference(MOE, D, "an expert at its capacity keeps the tokens of highest probability, or the earliest tokens",
               "moe/test_moe.py: TestTopkGate"),
    Difference(DATA, D, "the loader drops the last incomplete batch, or makes it smaller",
               "runtime/test_data.py: TestDataLoaderDropLast"),
    Difference(MOE, D, "ranks may pass different numbers of tokens to the experts", "moe/test_moe.py: TestTopk"),
]  # fmt: skip


class Missing(NamedTuple):
    """Properties that mpcore has no way to state.

    Attributes:
        area, peer: as of `Difference`.
        why: the reason.
        sources: the peer's files, or their tests.
    """

    area: str
    peer: str
    why: str
    sources: tuple[str, ...]


MISSING: list[Missing] = [
    Missing(
        MOE, M, "experts' all-to-alls are not overlapped with another micro-batch",
        ("a2a_overlap/test_schedule_chunk_1f1b.py", "a2a_overlap/test_schedule_layer_1f1b.py"),
    ),
    Missing(LAYERS, M, "mpcore trains; it has no inference server", ("inference",)),
    Missing(LAYERS, M, "mpcore has no state-space layer", ("ssm",)),
    Missing(
        LAYERS, M, "use transformers' models with `parallelize`",
        ("models/test_bert_model.py", "models/test_t5_model.py"),
    ),
    Missing(
        LAYERS, M, "random numbers have no state: each depends only on its seed and index",
        ("tensor_parallel/test_random.py",),
    ),
    Missing(
        RANKS, M, "mpcore has no global state, and one order of ranks",
        ("test_parallel_state.py: test_different_initialize_order_consistency",
         "test_parallel_state.py: test_different_initialize_order_unconsistency"),
    ),
    Missing(
        MOE, M, "the capacity is per sequence, on every layout",
        ("transformer/moe/test_token_dispatcher.py: test_capacity_forward_backward",),
    ),
    Missing(
        LAYERS, M, "mpcore uses Triton kernels, and graphs of `torch.compile`",
        ("fusions", "transformer/test_cuda_graphs.py"),
    ),
    Missing(
        CHECKPOINTS, M, "mpcore has one format, which stores logical tensors",
        ("dist_checkpointing/test_mapping.py", "dist_checkpointing/test_serialization.py"),
    ),
    Missing(
        RATES, M, "weight decay is constant", (
            "test_optimizer_param_scheduler.py: test_get_wd_linear",
            "test_optimizer_param_scheduler.py: test_get_wd_cosine"),
    ),
    Missing(
        RATES, D, "mpcore has three schedules; `Run.optimizer_step(lr=)` takes any other rate",
        ("runtime/test_lr_schedulers.py: TestOneCycle", "runtime/test_lr_schedulers.py: TestLrRange"),
    ),
    Missing(ORDER, M, "each stage holds whole blocks; a pipeline of several modules is no chain of stages", (
        "pipeline_parallel/test_multimodule_schedules.py", "pipeline_parallel/test_bridge_communicator.py")),
    Missing(ORDER, "nanotron", "stages are a chain", ("test_pipeline_parallel.py: test_pipeline_engine_diamond",)),
    Missing(LAYERS, M, "no prediction of several tokens (MTP)", (
        "transformer/test_multi_token_prediction.py", "pipeline_parallel/test_mtp_loss_scale.py")),
    Missing(LAYERS, T, "no prediction of several tokens (MTP)", (
        "test_loss.py: test_mtp_loss_masks_document_boundaries_from_positions",
        "test_loss.py: test_roll_mtp_sequence_respects_packed_document_boundaries",
        "test_loss.py: test_mtp_loss_rejects_plain_tensor")),
    Missing(LAYERS, T, "no multimodal positions (MRoPE) and no vision encoder", (
        "test_rope.py: TestMRoPECache", "test_vision_attention.py", "test_packed_vision.py")),
    Missing(LAYERS, M, "clipping of the scores by their maximum (QK-clip) is not implemented", (
        "transformer/test_attention.py: test_clip_qk_above_threshold_updates_weights",
        "transformer/test_attention.py: test_clip_qk_gqa_configuration")),
    Missing(LAYERS, M, "no muP scaling of widths", ("transformer/test_mup.py",)),
    Missing(LAYERS, "nanotron", "no spectral muP initialization", ("test_parametrization.py: test_parametrization",)),
    Missing(LAYERS, "nanotron", "random numbers have no state: each depends only on its seed and index", (
        "test_random_state.py: test_random_state_sync",
        "test_random_state.py: test_random_state_fork_random_operation_in_local_context")),
    Missing(LAYERS, "nanotron", "parameters are torch's, with declarations in the module",
            ("test_parameter.py: test_uncastable_tensor",)),
    Missing(MOE, M, "routing is never replayed, forced or balanced by quantiles", (
        "transformer/moe/test_router_replay.py", "transformer/moe/test_qb_routing.py",
        "transformer/moe/test_routers.py: test_force_load_balancing")),
    Missing(STEPS, M, "the optimizers are AdamW and Muon; torch's others work too", (
        "test_emerging_optimizers.py: test_soap_optimizer_smoke",
        "test_emerging_optimizers.py: test_adaptive_muon_optimizer_smoke", "test_lion_optimizer.py")),
    Missing(STEPS, D, "no 1-bit optimizers, Lion or Adagrad of its own", (
        "runtime/half_precision/onebit/test_onebit.py", "ops/lion/test_lion.py", "ops/adagrad/test_cpu_adagrad.py")),
    Missing(STEPS, D, "torch's `fully_shard` shards parameters: no partitions of flat buffers", (
        "runtime/zero/test_zero.py: TestIncorectAllgatherBucketSize",
        "runtime/zero/test_zero.py: TestPartitionNcclAlignment",
            "runtime/utils/test_partition.py: TestPartitionedTensor")),
    Missing(BATCHES, D, "the batch is given; no search for elastic sizes",
            ("elasticity/test_elastic.py: test_basic_10k",)),
    Missing(DATA, M, "no fill-in-the-middle and no chat templates",
            ("data/test_fim_dataset.py", "data/test_varlen_dataset.py")),
    Missing(DATA, M, "corpora are local files", ("data/test_bin_reader.py: _S3BinReader",)),
    Missing(CHECKPOINTS, T, "one format, in folders of a file system", (
        "test_checkpoint.py: test_reaches_remote_uris_through_fsspec",
        "test_checkpoint.py: test_async_save_with_pinned_mem_assigns_staging_future")),
    Missing(USE, T, "FP8 in blocks of 128 alone: no NVFP4 and no MXFP8", (
        "test_quantization.py: test_nvfp4_bf16_tail_fqns", "test_quantization.py: test_quantized_grouped_experts")),
    Missing(USE, M, "FP8 has no scale with a history, and parameters are never kept in it",
            ("test_fp8_param.py", "test_fp4_param.py")),
    Missing(USE, "nanotron", "parameters are never kept in FP8",
            ("fp8/test_fp8_parameter.py: test_create_fp8_parameter",)),
]  # fmt: skip
