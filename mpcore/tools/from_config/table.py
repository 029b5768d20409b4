"""The settings of other trainers, and what each is in the run.toml of `examples.gpt`. One table for command and docs.

A line is `keys | default | field | verdict | note`. The verdict is = (the same), ~ (differs; the note says how) or -
(not available; the note says what to do). Keys of one line separated by a space mean the same. A default is what the
other trainer takes if the file doesn't set the key; an empty one adds nothing. `field:name` converts the value by
`CONVERSIONS[name]` of `mpcore.tools.from_config`.
"""

# ruff: noqa: E501

MEGATRON = """
tensor-model-parallel-size | | tp | = |
pipeline-model-parallel-size | | pp | ~ | blocks are divided so that the stages have about equal cost, the head included
context-parallel-size | | cp | = |
expert-model-parallel-size | | ep | = |
expert-tensor-parallel-size | | etp | = |
sequence-parallel | | sequence_parallel:flag | = |
use-distributed-optimizer | false | zero:int | ~ | ZeRO-1; with --use-megatron-fsdp the next line says the stage
data-parallel-sharding-strategy | | zero:strategy | ~ | counts with --use-megatron-fsdp alone
zero-stage | | zero | ~ | in BLOOM's scripts stage 0 goes with BF16_Optimizer, which shards the optimizer state itself: take zero = 1
num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank | | | - | set --virtual-stages to the stages of a rank, and --schedule interleaved
num-layers | | layers | = |
hidden-size | | d_model | = |
num-attention-heads | | heads | = |
num-query-groups | | kv_heads:groups | = |
kv-channels | | head_dim | = |
ffn-hidden-size | | d_ff | = |
seq-length | | seq_len | = |
max-position-embeddings | | | ~ | seq_len is the one number for positions and samples
position-embedding-type | learned_absolute | positions:positions | = |
rotary-base | | rope_base:float | = |
rotary-percent | | rope_fraction:float | = |
use-rope-scaling rope-scaling-factor | | | - | set rope_scaling as in the Hugging Face config of the model
swiglu | | activation:swiglu | = |
squared-relu | | activation:squared_relu | = |
quick-geglu glu-linear-offset activation-func-clamp-value | | | - | the example has no such activation
normalization | LayerNorm | norm:norm | = |
norm-epsilon layernorm-epsilon | 1e-5 | norm_eps:float | = |
qk-layernorm | | qk_norm:flag | ~ | an RMSNorm over each head; Megatron's is of the kind of --normalization
apply-layernorm-1p | | | ~ | gains of w that begin at 1 take the same steps as 1 + w: no gain decays, here and there
disable-bias-linear | | bias:false | = |
add-qkv-bias | | qkv_bias:flag | = |
untie-embeddings-and-output-weights | | tie_embeddings:false | = |
make-vocab-size-divisible-by | 128 | | ~ | the vocabulary isn't padded: shards are uneven
vocab-size | | | ~ | the tokenizer's size is taken
hidden-dropout | 0.1 | dropout:float | ~ | not after the embedding; other random masks
attention-dropout | 0.1 | attention_dropout:weights | ~ | other random masks; it needs O(T^2) memory, and neither cp nor [latent]
init-method-std | 0.02 | init_std:float | ~ | other random numbers; output projections have std / sqrt(2 layers) in both
micro-batch-size | | micro_batch | = |
global-batch-size | data ranks x micro-batch-size | global_batch:positive | = |
train-iters | | steps | = |
train-samples | | steps:batches | ~ | counted in steps of the global batch
lr-decay-samples | | lr_decay_steps:batches | ~ | counted in steps of the global batch
lr-warmup-samples | | warmup_samples | ~ | rounded to steps of the global batch
rampup-batch-size | | rampup_batch_size:ramp | ~ | the learning rate counts steps, not samples
step-batch-size-schedule | | | - | set rampup_batch_size = [START, INCREMENT, SAMPLES]
lr | | lr:float | = |
decoupled-lr | | embedding_lr_scale:of_lr | ~ | the lowest rate is scaled too, in place of --decoupled-min-lr
min-lr | 0.0 | min_lr:float | = |
lr-warmup-fraction | | warmup_share:float | ~ | rounded to steps; Megatron's first step has --lr-warmup-init
lr-warmup-iters | 0 | warmup | ~ | step i has lr (i + 1) / warmup; Megatron's first step has --lr-warmup-init
lr-decay-iters | | lr_decay_steps | = |
lr-decay-style | linear | lr_schedule:schedule | ~ | one step later than Megatron's, as its warm-up
optimizer | adam | optimizer:optimizer | ~ | Adam with decoupled weight decay, as AdamW
weight-decay | 0.01 | weight_decay:float | ~ | embeddings decay, as in Megatron; tensors of one dimension never do
adam-beta1 adam-beta2 | 0.9 | betas:betas | = |
adam-eps | 1e-8 | eps:float | = |
clip-grad | 1.0 | clip:float | ~ | Megatron divides by the norm + 1e-6
bf16 | | dtype:bfloat16 | ~ | weights in bfloat16 with float32 masters; gradients are summed in float32
fp16 | | dtype:float16 | ~ | float32 weights, matrix products in float16
grad-reduce-in-bf16 | | reduce_dtype:bfloat16 | ~ | the sums over data ranks; micro-batches add in float32 here
initial-loss-scale | | first_loss_scale:float | ~ | window and hysteresis are fixed
loss-scale loss-scale-window hysteresis min-loss-scale | | | - | the loss scale adapts by rules of its own
fp8-format fp8-recipe fp8-hybrid | | | - | --fp8 multiplies in e4m3 with a scale per 128 elements; other recipes have none
recompute-granularity | | recompute:recompute | ~ | the same numbers; other activations are kept
recompute-method recompute-num-layers recompute-activations | | | - | see --recompute and recompute_every
seed | 1234 | seed | ~ | other random numbers
eval-interval | 1000 | eval_every | = |
eval-iters | 100 | | ~ | batches there; set eval_samples to eval-iters x global-batch-size
save-interval | | save_every | = |
exit-duration-in-mins | | exit_minutes:float | ~ | counted from the end of the setup; then the run saves, and ends with status 75
exit-interval | | exit_step | ~ | counts steps from the beginning of the run
data-path | | data:words | ~ | shares are exact in every 10,000 samples; the order of samples differs
split | 969,30,1 | held_out:rest | ~ | documents of all places, by a hash; the third part is held out too
tokenizer-type tokenizer-model vocab-file merge-file | | | - | pass --tokenizer byte or a tokenizer.json
reset-position-ids reset-attention-mask | | document_masking:flag | ~ | one field for both
eod-mask-loss | | | - | the loss counts a document's last token
mock-data | | | ~ | nothing to do: without data the run reads Python's library
num-experts | | experts | = |
moe-router-topk | 2 | moe.top_k:moe | ~ | with top-k 1 the score is not normalized, as with --moe-router-pre-softmax
moe-ffn-hidden-size | | moe.d_ff:moe | = |
moe-router-load-balancing-type | aux_loss | moe.aux_loss:balance | ~ | the scope of the loss and its scale differ: docs/moe.md
moe-aux-loss-coeff | 0.0 | moe.aux_coefficient:moe_float | ~ | the scale follows the scope of the loss
moe-z-loss-coeff | | moe.z_loss:moe_float | ~ | the mean over tokens of the step
moe-router-bias-update-rate moe-router-enable-expert-bias moe-router-score-function moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor moe-layer-freq moe-shared-expert-intermediate-size | | | - | set [moe] by hand: bias_rate, score, groups, top_groups, routed_scale, every, dense, shared_experts
moe-expert-capacity-factor | | moe.capacity_factor:moe_float | ~ | relative to a sequence's mean load
moe-token-dispatcher-type moe-grouped-gemm moe-permute-fusion | | | - | nothing to do: the numbers don't depend on it
multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim | | | - | set [latent] by hand
window-size | | | - | set window to W + 1: it counts the token itself
save load tensorboard-dir wandb-project wandb-exp-name wandb-save-dir data-cache-path | | | - | pass --out, --resume and --set log_to
nproc_per_node nproc-per-node nnodes node_rank node-rank master_addr master-addr master_port master-port rdzv_endpoint rdzv_backend | | | - | flags of torchrun: keep them
use-mcore-models transformer-impl use-flash-attn attention-backend attention-softmax-in-fp32 no-masked-softmax-fusion no-gradient-accumulation-fusion no-bias-swiglu-fusion overlap-grad-reduce overlap-param-gather tp-comm-overlap distributed-backend distributed-timeout-minutes log-interval log-params-norm log-num-zeros-in-grad log-throughput log-timers-to-tensorboard log-memory-to-tensorboard log-validation-ppl-to-tensorboard timing-log-level ckpt-format use-dist-ckpt ckpt-fully-parallel-save ckpt-fully-parallel-load dist-ckpt-strictness async-save use-persistent-ckpt-worker num-workers deterministic-mode no-load-optim no-load-rng no-save-optim no-position-embedding group-query-attention cross-entropy-loss-fusion | | | - | nothing to do, or a matter of speed, logs and checkpoints: docs/megatron.md
"""

TORCHTITAN = """
model.name | | | ~ | initial values follow the block's depth there
model.flavor | | preset:flavor | ~ | sizes of the preset; initial values follow the block's depth there
training.steps | 10000 | steps | = |
training.seq_len | 2048 | seq_len | = |
training.global_batch_size | | global_batch:positive | = |
training.local_batch_size training.batch_size | 8 | | ~ | set global_batch to it x the data ranks; under pp it is divided again into micro-batches
training.max_norm | 1.0 | clip:float | ~ | torch divides by the norm + 1e-6
training.mixed_precision_param | bfloat16 | dtype:dtype | ~ | float32 weights there, cast for each forward; here bfloat16 weights with float32 masters
training.seed | | seed | ~ | other random numbers
optimizer.name | AdamW | optimizer:optimizer | ~ | every parameter decays there, norms too
optimizer.lr | 8e-4 | lr:float | = |
optimizer.beta1 optimizer.beta2 | 0.9 | betas:betas | = |
optimizer.eps | 1e-8 | eps:float | = |
optimizer.weight_decay | 0.1 | weight_decay:float | ~ | there norms decay too
lr_scheduler.warmup_steps training.warmup_steps | 200 | warmup | ~ | docs/training.md has the formula
lr_scheduler.decay_type | linear | lr_schedule:schedule | ~ | shifted by a step
lr_scheduler.decay_ratio | | | - | lr_schedule = "wsd" decays over the last fifth
lr_scheduler.min_lr_factor lr_scheduler.lr_min | 0.0 | min_lr:factor | = |
parallelism.tensor_parallel_degree | | tp | ~ | torchtitan always shards the sequence, too: pass --sequence-parallel
parallelism.pipeline_parallel_degree | | pp | ~ | blocks are divided by cost
parallelism.context_parallel_degree | | cp | = |
parallelism.expert_parallel_degree | | ep | ~ | of the ranks of dp, cp and, with etp 1, tp
parallelism.expert_tensor_parallel_degree | 1 | etp:etp | ~ | 1 by default there; here it is tp
parallelism.data_parallel_replicate_degree | | replicate | ~ | where nothing is sharded it is DDP: take zero = 0 and replicate = 1
parallelism.data_parallel_shard_degree | -1 | zero:three | ~ | ZeRO-3; with pp torchtitan keeps parameters gathered, as --zero 2
activation_checkpoint.mode | selective | recompute:recompute | ~ | the same numbers; other activations are kept
"""

NANOTRON = """
model.model_config.hidden_size | | d_model | = |
model.model_config.num_hidden_layers | | layers | = |
model.model_config.num_attention_heads | | heads | = |
model.model_config.num_key_value_heads | | kv_heads | = |
model.model_config.intermediate_size | | d_ff | = |
model.model_config.rms_norm_eps | | norm_eps:float | = |
model.model_config.rope_theta | 10000.0 | rope_base:float | ~ | the default differs between nanotron's models
model.model_config.tie_word_embeddings | | tie_embeddings:flag | = |
model.model_config.moe_config.num_experts model.model_config.moe_config.top_k | | | - | set experts and [moe] by hand
model.model_config.rope_interleaved | | | - | true rotates neighbours; the example rotates halves
model.model_config._use_doc_masking | | document_masking:flag | ~ | positions restart in each document, too
model.init_method.std | | init_std:float | ~ | other random numbers, and scales of output projections
model.dtype | bfloat16 | dtype:dtype | ~ | weights in bfloat16 with float32 masters
tokens.sequence_length | | seq_len | = |
tokens.micro_batch_size | | micro_batch | = |
tokens.batch_accumulation_per_replica | | | ~ | set global_batch to it x micro_batch_size x dp
tokens.train_steps | | steps | = |
optimizer.learning_rate_scheduler.learning_rate | | lr:float | = |
optimizer.learning_rate_scheduler.min_decay_lr | lr | min_lr:lowest | = |
optimizer.learning_rate_scheduler.lr_warmup_steps | 0 | warmup | ~ | shifted by a step
optimizer.learning_rate_scheduler.lr_decay_style | linear | lr_schedule:schedule | ~ | shifted by a step
optimizer.learning_rate_scheduler.lr_decay_steps | | | ~ | counted after the warm-up there: set lr_decay_steps to both
optimizer.optimizer_factory.name | adamW | optimizer:optimizer | ~ | which parameters decay differs
optimizer.optimizer_factory.adam_beta1 optimizer.optimizer_factory.adam_beta2 | | betas:betas | = |
optimizer.optimizer_factory.adam_eps | | eps:float | = |
optimizer.weight_decay | | weight_decay:float | ~ | nanotron decays all parameters
optimizer.clip_grad | | clip:float | ~ | torch divides by the norm + 1e-6
optimizer.zero_stage | | zero | = |
parallelism.dp | | dp | = |
parallelism.tp | | tp | = |
parallelism.pp | | pp | ~ | blocks are divided by cost
parallelism.context_parallel_size | | cp | = |
parallelism.expert_parallel_size | | ep | ~ | here the ranks of ep are a part of dp; nanotron counts them beside it
parallelism.tp_mode | | sequence_parallel:reduce_scatter | = |
general.seed | | seed | ~ | other random numbers
"""

NEOX = """
model_parallel_size | | tp | = |
sequence_parallel | | sequence_parallel:flag | = |
pipe_parallel_size | | pp:positive | ~ | blocks are divided by cost; 0 is 1
num_layers | | layers | = |
hidden_size | | d_model | = |
num_attention_heads | | heads | = |
num_kv_heads | | kv_heads | = |
seq_length | | seq_len | = |
pos_emb | learned | positions:positions | = |
rotary_pct | 1.0 | rope_fraction:float | = |
rotary_emb_base | 10000 | rope_base:float | = |
norm | layernorm | norm:norm | = |
activation | gelu | activation:act | ~ | GELU is in its tanh form
layernorm_epsilon rms_norm_epsilon | | | ~ | norm_eps is that of the norm, by default 1e-5 and 1e-8
intermediate_size expansion_factor mlp_multiple_of | | | ~ | d_ff: with a gate a third of it, rounded up
use_bias_in_attn_linear use_bias_in_mlp | | | ~ | bias and mlp_bias; a LayerNorm always has one
no_weight_tying | false | tie_embeddings:not | = |
gpt_j_residual | | | - | attention and MLP in parallel: the example has no such block
init_method output_layer_init_method | | | - | initial values differ: init_std is one number
hidden_dropout | 0.0 | dropout:float | ~ | other random masks
attention_dropout | 0.0 | attention_dropout:float | ~ | other random masks
train_micro_batch_size_per_gpu | | micro_batch:positive | = |
train_batch_size | | global_batch:positive | = |
gradient_accumulation_steps | | | ~ | set global_batch to it x train_micro_batch_size_per_gpu x dp
gradient_clipping | | clip:float | ~ | DeepSpeed divides by the norm + 1e-6
weight_decay | 0.1 | weight_decay:float | ~ | which parameters decay differs
optimizer.type | | optimizer:optimizer | ~ | Adam with decoupled weight decay, as AdamW
optimizer.params.lr | | lr:float | = |
optimizer.params.betas | 0.9,0.999 | betas:pair | = |
optimizer.params.eps | 1e-8 | eps:float | = |
min_lr | 0.0 | min_lr:float | = |
lr_decay_style | linear | lr_schedule:schedule | ~ | shifted by a step; a linear rate falls to 0 there, and is never below min_lr
lr_decay_iters | | lr_decay_steps | = |
warmup | 0.01 | warmup_share:float | ~ | rounded to steps
train_iters | | steps | = |
zero_optimization.stage | 0 | zero | ~ | gradients are summed in float32 here
fp16.enabled | | dtype:float16 | ~ | float32 weights, matrix products in float16
bf16.enabled | | dtype:bfloat16 | ~ | weights in bfloat16 with float32 masters
precision | | dtype:dtype | ~ | weights in bfloat16 with float32 masters
eval_iters | | | ~ | batches there; set eval_samples
seed | 1234 | seed | ~ | other random numbers
"""

DEEPSPEED = """
train_batch_size | | global_batch:positive | = |
train_micro_batch_size_per_gpu | | micro_batch:positive | = |
gradient_accumulation_steps | | | ~ | set global_batch to it x train_micro_batch_size_per_gpu x dp
gradient_clipping | 0.0 | clip:float | ~ | DeepSpeed divides by the norm + 1e-6; 0 clips nothing
optimizer.type | | optimizer:optimizer | ~ | Adam with decoupled weight decay, as AdamW; which parameters decay differs
optimizer.params.lr | | lr:float | = |
optimizer.params.betas | 0.9,0.999 | betas:pair | = |
optimizer.params.eps | 1e-8 | eps:float | = |
optimizer.params.weight_decay | 0.0 | weight_decay:float | ~ | which parameters decay differs
scheduler.type | the program's | | - | set lr_schedule and warmup: docs/training.md
scheduler.params.warmup_num_steps | | warmup | ~ | DeepSpeed's warm-up is logarithmic by default
scheduler.params.total_num_steps | | steps | ~ | the steps of the schedule
zero_optimization.stage | 0 | zero | ~ | stage 0 with bf16 uses BF16_Optimizer, which shards the optimizer state: take zero = 1
fp16.enabled | | dtype:float16 | ~ | float32 weights, matrix products in float16
bf16.enabled | | dtype:bfloat16 | ~ | weights in bfloat16 with float32 masters
"""

PEERS = {
    "Megatron-LM": MEGATRON,
    "torchtitan": TORCHTITAN,
    "nanotron": NANOTRON,
    "gpt-neox": NEOX,
    "DeepSpeed": DEEPSPEED,
}
