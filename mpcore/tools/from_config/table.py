"""The settings of other trainers, and what each is in the run.toml of `examples.gpt`. One table for command and docs.

A line is `keys | default | field | verdict | note`. The verdict is = (the same), ~ (differs; the note says how), + (a
file or folder to pass to the run) or - (not available; the note says what to do). Keys of one line, separated by a
space, share the rest of the line; with a field they mean the same. A default is what the other trainer takes if the
file doesn't set the key; an empty one adds nothing. `field:name` converts the value by `CONVERSIONS[name]` of
`mpcore.tools.from_config`, given the lines above.
"""

# ruff: noqa: E501

MEGATRON = """
tensor-model-parallel-size | | tp | = |
pipeline-model-parallel-size | | pp | ~ | blocks are divided so that the stages have about equal cost, the head included
context-parallel-size | | cp | = |
expert-model-parallel-size | | ep | = |
expert-tensor-parallel-size | | etp | = |
sequence-parallel | | sequence_parallel:flag | = |
use-distributed-optimizer | false | zero:int | ~ | on is ZeRO-1; with --use-megatron-fsdp the sharding strategy says the stage
use-megatron-fsdp | | | ~ | zero is of the sharding strategy
data-parallel-sharding-strategy | no_shard | zero:strategy | ~ | counts with --use-megatron-fsdp alone
use-torch-fsdp2 | | zero:three | ~ | ZeRO-3 by torch's fully_shard, as here
zero-stage | | zero:count | ~ | in BLOOM's scripts stage 0 goes with BF16_Optimizer, which shards the optimizer state itself: take zero = 1
num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank | | | - | set --virtual-stages to the stages of a rank, and --schedule interleaved
standalone-embedding-stage decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout | | | - | the blocks of each stage follow from the costs of blocks and head
num-layers | | layers | = |
hidden-size | | d_model | = |
num-attention-heads | | heads | = |
num-query-groups | | kv_heads:groups | = |
kv-channels | | head_dim | = |
ffn-hidden-size | | d_ff | = |
seq-length | | seq_len | = |
max-position-embeddings | | | ~ | seq_len is the one number for positions and samples
position-embedding-type | learned_absolute | positions:positions | = |
use-rotary-position-embeddings | | positions:rope | = |
rotary-base | | rope_base:float | = |
rotary-percent | | rope_fraction:float | = |
use-rope-scaling rope-scaling-factor rotary-seq-len-interpolation-factor | | | - | set rope_scaling as in the Hugging Face config of the model
rotary-interleaved | | | - | the example rotates halves; RotaryEmbedding(interleaved=) rotates neighbours
swiglu | | activation:swiglu | = |
squared-relu | | activation:squared_relu | = |
no-bias-gelu-fusion | | | ~ | without a gate activation is "gelu", which is exact
quick-geglu glu-linear-offset activation-func-clamp-value openai-gelu | | | - | the example has no such activation
normalization | LayerNorm | norm:norm | = |
norm-epsilon layernorm-epsilon | 1e-5 | norm_eps:float | = |
qk-layernorm | | qk_norm:flag | ~ | an RMSNorm over each head; Megatron's is of the kind of --normalization
apply-layernorm-1p | | | ~ | gains of w that begin at 1 take the same steps as 1 + w: no gain decays, here and there
disable-bias-linear | false | bias:false | = |
add-qkv-bias | | qkv_bias:flag | = |
untie-embeddings-and-output-weights | false | tie_embeddings:false | = |
make-vocab-size-divisible-by | 128 | | ~ | the vocabulary isn't padded: shards are uneven
vocab-size | | | ~ | the tokenizer's size is taken
hidden-dropout | 0.1 | dropout:float | ~ | not after the embedding; other random masks
attention-dropout | 0.1 | attention_dropout:weights | ~ | other random masks; it needs O(T^2) memory, and neither cp nor [latent]
init-method-std | 0.02 | init_std:float | ~ | other random numbers; output projections have std / sqrt(2 layers) in both
micro-batch-size | | micro_batch | = |
global-batch-size | micro-batch-size x data ranks | global_batch:batch | = |
train-iters | | steps | = |
train-samples | | steps:batches | ~ | counted in steps of the global batch
lr-decay-samples | | lr_decay_steps:batches | ~ | counted in steps of the global batch
lr-warmup-samples | | warmup_samples:count | ~ | rounded to steps of the global batch
rampup-batch-size | | rampup_batch_size:ramp | ~ | the learning rate counts steps, not samples
step-batch-size-schedule decrease-batch-size-if-needed | | | - | set rampup_batch_size = [START, INCREMENT, SAMPLES]
lr | | lr:float | = |
decoupled-lr | | embedding_lr_scale:of_lr | ~ | the lowest rate is scaled too, in place of --decoupled-min-lr
min-lr | 0.0 | min_lr:float | = |
lr-warmup-fraction | | warmup_share:float | ~ | rounded to steps; Megatron's first step has --lr-warmup-init
lr-warmup-iters | 0 | warmup:warmup | ~ | step i has lr (i + 1) / warmup; Megatron's first step has --lr-warmup-init
lr-warmup-init decoupled-min-lr lr-wsd-decay-iters lr-wsd-decay-style start-weight-decay end-weight-decay weight-decay-incr-style | | | - | the schedules of the example have no such setting: docs/training.md
lr-decay-iters | | lr_decay_steps | = |
lr-decay-style | linear | lr_schedule:schedule | ~ | one step later than Megatron's, as its warm-up
optimizer | adam | optimizer:adam | ~ | Adam with decoupled weight decay, as AdamW
weight-decay | 0.01 | weight_decay:float | ~ | embeddings decay, as in Megatron; tensors of one dimension never do
adam-beta1 | 0.9 | betas:first | = |
adam-beta2 | 0.999 | betas:second | = |
adam-eps | 1e-8 | eps:float | = |
clip-grad | 1.0 | clip:float | ~ | Megatron divides by the norm + 1e-6
bf16 | | dtype:bfloat16 | ~ | weights in bfloat16 with float32 masters; gradients are summed in float32
fp16 | | dtype:float16 | ~ | float32 weights, matrix products in float16
fp32-residual-connection | | residual_dtype:float32 | ~ | only the stream between the blocks
calculate-per-token-loss | | | ~ | nothing to do: the loss is always divided by the tokens of the step
grad-reduce-in-bf16 | | reduce_dtype:bfloat16 | ~ | the sums over data ranks; micro-batches add in float32 here
initial-loss-scale | 4294967296 | first_loss_scale:with_fp16 | ~ | window and hysteresis are fixed
loss-scale loss-scale-window hysteresis min-loss-scale | | | - | the loss scale adapts by rules of its own
fp8-format fp8-recipe fp8-hybrid fp8-param-gather | | | - | --fp8 multiplies in e4m3 with a scale per 128 elements; other recipes have none
recompute-granularity | | recompute:recompute | ~ | the same numbers; other activations are kept
recompute-method recompute-num-layers recompute-activations | | | - | see --recompute and recompute_every
optimizer-cpu-offload | | offload:optimizer | ~ | the same numbers
seed | 1234 | seed:count | ~ | other random numbers
data-parallel-random-init | | | - | one seed: first values don't depend on the rank
eval-interval | 0 | eval_every:count | = |
eval-iters | 100 | | ~ | batches there; set eval_samples to eval-iters x global-batch-size
save-interval | | save_every:count | = |
exit-duration-in-mins | | exit_minutes:float | ~ | counted from the end of the setup; then the run saves, and ends with status 75
exit-signal-handler | | | ~ | nothing to do: SIGTERM and SIGUSR1 always save and end the run
exit-interval | | exit_step | ~ | counts steps from the beginning of the run
data-path | | data:words | ~ | shares are exact in every 10,000 samples; the order of samples differs
split | 969,30,1 | held_out:rest | ~ | documents of all places, by a hash; the third part is held out too
train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path multiple-validation-sets | | | + | pass --data, and --set eval_data=NAME=PREFIX
tokenizer-type tokenizer-model vocab-file merge-file tiktoken-pattern | | | + | pass --tokenizer byte or a tokenizer.json
reset-position-ids reset-attention-mask | | document_masking:flag | ~ | one field for both
eod-mask-loss | | | - | the loss counts a document's last token
mock-data | | | ~ | nothing to do: without data the run trains on Python's standard library
num-experts | | experts:count | = |
moe-router-topk | 2 | moe.top_k:moe | ~ | with top-k 1 the score is not normalized, as with --moe-router-pre-softmax
moe-ffn-hidden-size | | moe.d_ff:moe | = |
moe-router-load-balancing-type | aux_loss | moe.aux_loss:balance | ~ | the scope of the loss and its scale differ: docs/moe.md
moe-aux-loss-coeff | 0.0 | moe.aux_coefficient:coefficient | ~ | the scale follows the scope of the loss
moe-z-loss-coeff | | moe.z_loss:moe_float | ~ | the mean over tokens of the step
moe-router-pre-softmax | | | ~ | with top-k 1 nothing to do; else the scores of the chosen experts sum to 1 here
moe-router-bias-update-rate moe-router-enable-expert-bias moe-router-score-function moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor moe-layer-freq moe-shared-expert-intermediate-size | | | - | set [moe] by hand: bias_rate, score, groups, top_groups, routed_scale, every, dense, shared_experts
overlap-moe-expert-parallel-comm | | overlap_experts:flag | ~ | halves of a micro-batch overlap, not two micro-batches
mtp-num-layers | | mtp:count | ~ | the losses of further tokens are divided by the tokens of the main loss
mtp-loss-scaling-factor | 0.1 | mtp_weight:with_mtp | = |
moe-expert-capacity-factor | | moe.capacity_factor:moe_float | ~ | relative to a sequence's mean load
moe-token-dispatcher-type moe-grouped-gemm moe-permute-fusion moe-router-dtype | | | ~ | nothing to do: the numbers don't depend on it
multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim | | | - | set [latent] by hand
window-size | | | - | set window to W + 1: it counts the token itself
save load finetune pretrained-checkpoint tensorboard-dir wandb-project wandb-exp-name wandb-save-dir wandb-entity data-cache-path | | | + | pass --out, --resume, --init-from and --set log_to
profile profile-step-start profile-step-end | | | ~ | nothing to do: set profile = "10:11" for a trace of two steps
yaml-cfg spec apply-query-key-layer-scaling hybrid-layer-pattern | | | - | docs/megatron.md says what there is in its place
nproc-per-node nnodes node-rank local-rank master-addr master-port rdzv-endpoint rdzv-backend rdzv-id | | | ~ | flags of torchrun: keep them
use-mcore-models use-te export-te-mcore-model rerun-mode empty-unused-memory-level use-nccl-ub fsdp-double-buffer fsdp-manual-registration init-model-with-meta-device logging-level profile-ranks record-memory-history transformer-impl use-flash-attn attention-backend attention-softmax-in-fp32 no-masked-softmax-fusion no-gradient-accumulation-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl overlap-grad-reduce overlap-param-gather overlap-p2p-communication defer-embedding-wgrad-compute tp-comm-overlap distributed-backend distributed-timeout-minutes nccl-communicator-config-path log-interval log-params-norm log-num-zeros-in-grad log-throughput log-progress log-timers-to-tensorboard log-memory-to-tensorboard log-validation-ppl-to-tensorboard timing-log-level timing-log-option ckpt-format use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure dist-ckpt-strictness exit-on-missing-checkpoint async-save use-persistent-ckpt-worker use-checkpoint-opt-param-scheduler override-opt-param-scheduler num-workers no-mmap-bin-files no-create-attention-mask-in-dataloader manual-gc manual-gc-interval no-check-for-nan-in-loss-and-grad deterministic-mode no-load-optim no-load-rng no-save-optim no-save-rng no-position-embedding group-query-attention | | | ~ | nothing to do, or a matter of speed, logs and checkpoints: docs/megatron.md
"""

TORCHTITAN = """
model.name | | | ~ | initial values follow the block's depth there
model.flavor | | preset:flavor | ~ | sizes of the preset; initial values follow the block's depth there
training.steps | 10000 | steps | = |
training.seq_len | 2048 | seq_len | = |
training.local_batch_size training.batch_size | 8 | micro_batch:local | ~ | under pp it is divided again: micro_batch is pipeline_parallel_microbatch_size
training.global_batch_size | -1 | global_batch:of_ranks | ~ | by default local_batch_size x the data ranks
parallelism.pipeline_parallel_microbatch_size | | | ~ | micro_batch under pp, by default 1
training.max_norm | 1.0 | clip:float | ~ | torch divides by the norm + 1e-6
training.mixed_precision_param | bfloat16 | dtype:dtype | ~ | bfloat16: float32 weights there, cast for each forward; here bfloat16 weights with float32 masters
training.dtype | | | - | bfloat16 there means no float32 masters
training.seed debug.seed | | seed:count | ~ | other random numbers
optimizer.name | AdamW | optimizer:adamw | ~ | every parameter decays there, norms too
optimizer.lr | 8e-4 | lr:float | = |
optimizer.beta1 | 0.9 | betas:first | = |
optimizer.beta2 | 0.95 | betas:second | = |
optimizer.eps | 1e-8 | eps:float | = |
optimizer.weight_decay | 0.1 | weight_decay:float | ~ | there norms decay too
lr_scheduler.warmup_steps training.warmup_steps | 200 | warmup:warmup | ~ | docs/training.md has the formula
lr_scheduler.total_steps | | lr_decay_steps | ~ | shifted by a step
lr_scheduler.decay_type | linear | lr_schedule:schedule | ~ | shifted by a step
lr_scheduler.decay_ratio | | | - | lr_schedule = "wsd" decays over the last fifth
lr_scheduler.min_lr_factor lr_scheduler.lr_min | 0.0 | min_lr:factor | = |
parallelism.tensor_parallel_degree | | tp | ~ | the sequence is sharded, too
parallelism.tensor_parallel_degree | | sequence_parallel:above_1 | ~ | torchtitan always shards the sequence over tp
parallelism.pipeline_parallel_degree | | pp | ~ | blocks are divided by cost
parallelism.pipeline_parallel_schedule | | schedule:pipeline | ~ | by the plan of the same name
parallelism.context_parallel_degree | | cp | = |
parallelism.expert_parallel_degree | | ep | ~ | of the ranks of dp, cp and, with etp 1, tp
parallelism.expert_tensor_parallel_degree | 1 | etp:etp | ~ | 1 by default there; here it is tp
parallelism.data_parallel_replicate_degree | | replicate:replicas | ~ | with data_parallel_shard_degree 1 it is DDP: zero = 0
parallelism.data_parallel_shard_degree | -1 | zero:fsdp | ~ | above 1 it is ZeRO-3; by default with pp torchtitan keeps parameters gathered, as zero = 2
parallelism.fsdp_reshard_after_forward | | | ~ | counts for zero: "never" is 2, "always" 3
activation_checkpoint.mode | selective | recompute:recompute | ~ | the same numbers; other activations are kept
activation_checkpoint.selective_ac_option | | | ~ | "selective" keeps the results of linear layers and collectives here
compile.enable | | compile:inductor | ~ | blocks are compiled, the loss isn't
validation.enable | false | eval_every:validation | ~ | here on held-out documents of the training data
validation.freq validation.steps validation.dataset validation.local_batch_size | | | ~ | validation.freq is eval_every if validation.enable is true; set eval_samples and eval_data
checkpoint.enable | false | save_every:saving | ~ | the end of a run is saved in any case
checkpoint.interval | | | ~ | save_every if checkpoint.enable is true
checkpoint.async_mode | | async_save:asynchronous | ~ | its kinds aren't told apart
model.converters | | | - | for float8 pass --fp8: blockwise scales
training.dataset training.dataset_path model.hf_assets_path model.tokenizer_path checkpoint.folder checkpoint.initial_load_path | | | + | pass --data, --tokenizer, --out and --resume
checkpoint.last_save_model_only checkpoint.export_dtype checkpoint.keep_latest_k job.dump_folder job.description job.print_config profiling.enable_profiling profiling.save_traces_folder profiling.profile_freq profiling.enable_memory_snapshot profiling.save_memory_snapshot_folder metrics.log_freq metrics.enable_tensorboard metrics.save_tb_folder metrics.enable_wandb metrics.disable_color_printing compile.components parallelism.enable_async_tensor_parallel parallelism.disable_loss_parallel | | | ~ | nothing to do, or a matter of speed, logs and checkpoints: docs/example.md
"""

NANOTRON = """
model.model_config.hidden_size | | d_model | = |
model.model_config.num_hidden_layers | | layers | = |
model.model_config.num_attention_heads | | heads | = |
model.model_config.num_key_value_heads | | kv_heads | = |
model.model_config.intermediate_size | | d_ff | = |
model.model_config.hidden_act | silu | activation:hidden_act | = |
model.model_config.rms_norm_eps | | norm_eps:float | = |
model.model_config.rope_theta | 10000.0 | rope_base:float | ~ | the default differs between nanotron's models
model.model_config.tie_word_embeddings | | tie_embeddings:flag | = |
model.model_config.moe_config.num_experts model.model_config.moe_config.top_k | | | - | set experts and [moe] by hand
model.model_config.rope_interleaved | | | - | true rotates neighbours; the example rotates halves
model.model_config._use_doc_masking | | document_masking:flag | ~ | positions restart in each document, too
model.model_config.attention_bias | | qkv_bias:flag | ~ | nanotron's Qwen2 has it on queries, keys and values
model.model_config.rope_scaling model.model_config.sliding_window_size model.model_config.no_rope_layer model.model_config.z_loss_enabled | | | - | set rope_scaling or window by hand; the others have no counterpart
model.init_method.std | | init_std:float | ~ | other random numbers, and scales of output projections
model.dtype | bfloat16 | dtype:dtype | ~ | bfloat16: weights in bfloat16 with float32 masters
tokens.sequence_length | | seq_len | = |
tokens.micro_batch_size | | micro_batch | = |
tokens.batch_accumulation_per_replica | 1 | global_batch:accumulation | ~ | it x micro_batch_size x dp
tokens.train_steps | | steps | = |
optimizer.learning_rate_scheduler.learning_rate | | lr:float | = |
optimizer.learning_rate_scheduler.min_decay_lr | lr | min_lr:lowest | = |
optimizer.learning_rate_scheduler.lr_warmup_steps | 0 | warmup:warmup | ~ | shifted by a step
optimizer.learning_rate_scheduler.lr_decay_style | linear | lr_schedule:schedule | ~ | shifted by a step
optimizer.learning_rate_scheduler.lr_decay_steps | | lr_decay_steps:after_warmup | ~ | counted after the warm-up there
optimizer.learning_rate_scheduler.lr_decay_starting_step | | | - | behind the warm-up it keeps the rate constant: lr_schedule = "wsd" decays over the last fifth
optimizer.learning_rate_scheduler.lr_warmup_style | | | ~ | linear here
optimizer.optimizer_factory.name optimizer.name | adamW | optimizer:adamw | ~ | which parameters decay differs
optimizer.optimizer_factory.adam_beta1 optimizer.adam_beta1 | | betas:first | = |
optimizer.optimizer_factory.adam_beta2 optimizer.adam_beta2 | | betas:second | = |
optimizer.optimizer_factory.adam_eps optimizer.adam_eps | | eps:float | = |
optimizer.weight_decay | | weight_decay:float | ~ | nanotron decays all parameters
optimizer.clip_grad | 0.0 | clip:float | ~ | torch divides by the norm + 1e-6; none clips nothing
optimizer.zero_stage | | zero:count | = |
parallelism.dp | | dp | = |
parallelism.tp | | tp | = |
parallelism.pp | | pp | ~ | blocks are divided by cost
parallelism.context_parallel_size | | cp | = |
parallelism.expert_parallel_size | | ep | ~ | here the ranks of ep are a part of dp; nanotron counts them beside it
parallelism.tp_mode | | sequence_parallel:reduce_scatter | = |
parallelism.pp_engine | afab | schedule:pipeline | ~ | by the plan of the same name
parallelism.recompute_layer | | recompute:full | ~ | the same numbers
general.seed | 42 | seed:count | ~ | other random numbers
tokens.val_check_interval | 0 | eval_every:validations | ~ | here on held-out documents of the training data
checkpoints.checkpoint_interval | | save_every:count | = |
checkpoints.checkpoints_path checkpoints.resume_checkpoint_path tokenizer.tokenizer_name_or_path data_stages | | | + | pass --out, --resume, --tokenizer and --data
model.model_config.vocab_size model.model_config.max_position_embeddings model.make_vocab_size_divisible_by | | | ~ | the tokenizer's size and seq_len are taken; the vocabulary isn't padded
model.model_config.initializer_range model.model_config.bos_token_id model.model_config.eos_token_id model.model_config.pad_token_id model.model_config.pretraining_tp model.model_config.use_cache model.model_config.is_llama_config model.model_config.is_qwen2_config model.ddp_bucket_cap_mb optimizer.accumulate_grad_in_fp32 optimizer.torch_adam_is_fused optimizer.optimizer_factory.torch_adam_is_fused parallelism.tp_linear_async_communication parallelism.tp_recompute_allgather checkpoints.checkpoints_path_is_shared_file_system checkpoints.save_initial_state checkpoints.save_final_state general.project general.run general.step general.consumed_train_samples general.ignore_sanity_checks general.benchmark_csv_path logging.log_level logging.log_level_replica logging.iteration_step_info_interval profiler | | | ~ | nothing to do, or a matter of speed, logs and checkpoints: docs/example.md
"""

NEOX = """
model_parallel_size | | tp | = |
sequence_parallel | | sequence_parallel:flag | = |
pipe_parallel_size | | pp:stages | ~ | blocks are divided by cost; 0 is 1
num_layers | | layers | = |
hidden_size | | d_model | = |
num_attention_heads | | heads | = |
num_kv_heads | | kv_heads | = |
seq_length | | seq_len | = |
pos_emb | learned | positions:positions | = |
rotary_pct | 1.0 | rope_fraction:float | = |
rotary_emb_base | 10000 | rope_base:float | = |
norm | layernorm | norm:norm | = |
activation | gelu | activation:act | ~ | GELU is exact, or with bias_gelu_fusion in its tanh form
layernorm_epsilon | 1e-5 | norm_eps:layer_eps | = |
rms_norm_epsilon | 1e-8 | norm_eps:rms_eps | = |
intermediate_size expansion_factor mlp_multiple_of | | | ~ | d_ff: with a gate a third of it, rounded up
use_bias_in_attn_linear | true | bias:flag | ~ | a LayerNorm always has one
use_bias_in_mlp | true | mlp_bias:flag | = |
no_weight_tying | false | tie_embeddings:false | = |
gpt_j_residual | | | - | attention and MLP in parallel: the example has no such block
init_method_std | | init_std:float | ~ | other random numbers; output projections have std / sqrt(2 layers) in both
init_method output_layer_init_method | | | - | "normal" and "scaled_normal" are those here; others give other sizes
hidden_dropout | 0.0 | dropout:float | ~ | other random masks
attention_dropout | 0.0 | attention_dropout:weights | ~ | other random masks
train_micro_batch_size_per_gpu | | micro_batch | = |
train_batch_size | train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks | global_batch:batch | = |
gradient_accumulation_steps | | | ~ | counts for train_batch_size: the run computes it
gradient_clipping | 1.0 | clip:float | ~ | DeepSpeed divides by the norm + 1e-6
weight_decay | 0.1 | weight_decay:float | ~ | which parameters decay differs
optimizer.type | adam | optimizer:adam | ~ | Adam with decoupled weight decay, as AdamW
optimizer.params.lr | 1e-3 | lr:float | = |
optimizer.params.betas | 0.9,0.999 | betas:pair | = |
optimizer.params.eps | 1e-8 | eps:float | = |
min_lr | 0.0 | min_lr:float | = |
lr_decay_style | linear | lr_schedule:schedule | ~ | shifted by a step; a linear rate falls to 0 there, and is never below min_lr
lr_decay_iters | | lr_decay_steps | = |
warmup | 0.01 | warmup_share:float | ~ | rounded to steps
train_iters | | steps | = |
zero_optimization.stage | 0 | zero:count | ~ | gradients are summed in float32 here
fp16.enabled | | dtype:float16 | ~ | float32 weights, matrix products in float16
bf16.enabled | | dtype:bfloat16 | ~ | weights in bfloat16 with float32 masters
precision | | dtype:dtype | ~ | bfloat16: weights in bfloat16 with float32 masters
fp16.loss_scale fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale fp16.initial_scale_power | | | - | the loss scale adapts by rules of its own; set first_loss_scale
eval_interval | 1000 | eval_every:count | = |
eval_iters | 100 | | ~ | batches there; set eval_samples to eval_iters x train_batch_size
checkpoint_factor save_interval | | save_every:count | = |
checkpoint_activations | | recompute:full | ~ | the same numbers
split | 969, 30, 1 | held_out:rest | ~ | documents of all places, by a hash; the third part is held out too
sliding_window_width moe_num_experts attention_config mlp_type use_bias_in_norms | | | - | set window to W + 1, or experts and [moe]; other kinds of attention and MLP have no counterpart
data_path train_data_paths valid_data_paths test_data_paths tokenizer_type vocab_file merge_file save load finetune | | | + | pass --data, --tokenizer, --out, --resume and --init-from
max_position_embeddings make_vocab_size_divisible_by bias_gelu_fusion | | | ~ | seq_len is the one number; the vocabulary isn't padded; GELU in its tanh form
fp16.fp16 output_layer_parallelism scaled_upper_triang_masked_softmax_fusion rope_fusion layernorm_fusion data_impl checkpoint_num_layers partition_activations synchronize_each_layer distributed_backend log_interval steps_per_print wall_clock_breakdown keep_last_n_checkpoints num_workers launcher hostfile zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size zero_optimization.overlap_comm zero_optimization.reduce_scatter zero_optimization.reduce_bucket_size zero_optimization.contiguous_gradients | | | ~ | nothing to do, or a matter of speed, logs and checkpoints: docs/from_deepspeed.md
seed | 1234 | seed:count | ~ | other random numbers
"""

DEEPSPEED = """
train_batch_size | train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks | global_batch:batch | = |
train_micro_batch_size_per_gpu | | micro_batch | = |
gradient_accumulation_steps | | | ~ | counts for train_batch_size: the run computes it
gradient_clipping | 0.0 | clip:float | ~ | DeepSpeed divides by the norm + 1e-6; 0 clips nothing
optimizer.type | auto | optimizer:adam | ~ | Adam with decoupled weight decay, as AdamW; which parameters decay differs
optimizer.params.adam_w_mode | | | - | false adds the decay to the gradient: here it is always decoupled
optimizer.params.lr | 1e-3 | lr:with_optimizer | = |
optimizer.params.betas | 0.9,0.999 | betas:pair_with_optimizer | = |
optimizer.params.eps | 1e-8 | eps:with_optimizer | = |
optimizer.params.weight_decay | 0.0 | weight_decay:with_optimizer | ~ | which parameters decay differs
optimizer.params.torch_adam optimizer.params.bias_correction | | | ~ | torch's AdamW begins with weight_decay 0.01; the bias is always corrected here
scheduler.type | auto | lr_schedule:decay | ~ | WarmupDecayLR falls to 0, WarmupCosineLR to cos_min_ratio
scheduler.type | | min_lr:cos_min | ~ | of the schedule
scheduler.params.warmup_max_lr | 0.001 | lr:decay_lr | ~ | the schedule's rate counts, whatever the optimizer's is
scheduler.params.warmup_min_lr scheduler.params.warmup_min_ratio scheduler.params.cos_min_ratio scheduler.params.warmup_type | | | ~ | the warm-up is linear here, from lr / warmup; cos_min_ratio x lr is min_lr
scheduler.params.warmup_num_steps | 1000 | warmup:with_scheduler | ~ | DeepSpeed's warm-up is logarithmic by default
scheduler.params.total_num_steps | | steps | ~ | the steps of the schedule
zero_optimization.stage | 0 | zero:count | ~ | stage 0 with bf16 uses BF16_Optimizer, which shards the optimizer state: take zero = 1
zero_optimization.offload_optimizer.device | | offload:cpu | ~ | the same numbers
zero_optimization.offload_param.device zero_optimization.offload_param.pin_memory zero_optimization.offload_optimizer.pin_memory | | | - | --offload parameters needs zero = 0, or one data rank
fp16.enabled | | dtype:float16 | ~ | float32 weights, matrix products in float16
fp16.initial_scale_power | 16 | first_loss_scale:power | ~ | then the scale adapts by rules of its own
fp16.loss_scale fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale fp16.auto_cast fp16.consecutive_hysteresis | | | - | the loss scale adapts by rules of its own
bf16.enabled bfloat16.enabled | | dtype:bfloat16 | ~ | weights in bfloat16 with float32 masters
torch_autocast.enabled torch_autocast.dtype tensor_parallel.autotp_size activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing activation_checkpointing.number_checkpoints compile.enabled data_types.grad_accum_dtype zero_optimization.mics_shard_size zero_optimization.zero_hpz_partition_size zero_optimization.zero_quantized_weights | | | - | docs/from_deepspeed.md says what there is in its place
zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.reduce_scatter zero_optimization.reduce_bucket_size zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size zero_optimization.sub_group_size zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.round_robin_gradients zero_force_ds_cpu_optimizer zero_allow_untested_optimizer prescale_gradients gradient_predivide_factor steps_per_print wall_clock_breakdown flops_profiler.enabled tensorboard.enabled wandb.enabled | | | ~ | nothing to do, or a matter of speed and logs: docs/from_deepspeed.md
"""

PEERS = {
    "Megatron-LM": MEGATRON,
    "torchtitan": TORCHTITAN,
    "nanotron": NANOTRON,
    "gpt-neox": NEOX,
    "DeepSpeed": DEEPSPEED,
}
