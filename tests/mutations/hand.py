"""Slips that would be silent: training goes on, the loss falls, and a number is wrong.

Each names a definition by the end of its dotted name and a pattern in it (`patterns.py`), so moving a file or
reformatting a line changes nothing here. One whose place is gone is stale: `python -m tests.mutations --hand --list`.
"""

from __future__ import annotations

from tests.mutations.patterns import Hand
from tests.mutations.trainer import TRAINER

COLLECTIVES = [
    Hand("collectives", "copy sums its gradient in place", "_Copy.backward",
         "return reduce(dy, ANY_1), None",
         "torch.distributed.all_reduce(dy, group=ANY_1.group)\nreturn dy, None",
         "only a second branch of the same input gets a wrong gradient", "01"),
    Hand("collectives", "reduce sums its gradient again", "_Reduce.backward",
         "copy(dy, ANY_1)", "all_reduce(dy, ANY_1)",
         "the gradient is tp times too large, and AdamW hides a factor", "dual gradient"),
    Hand("collectives", "reduce writes to its input", "_Reduce.forward",
         "return all_reduce(x, ANY_1)", "torch.distributed.all_reduce(x, group=ANY_1.group)\nreturn x.clone()",
         "the output is right; what else reads the input is not", "02"),
    Hand("collectives", "gather sums its gradient", "_Gather.backward",
         "_Split.apply", "_ReduceScatter.apply",
         "the gradient is tp times too large", "13"),
    Hand("collectives", "all_gather keeps its own part of the gradient", "_AllGather.backward",
         "_ReduceScatter.apply", "_Split.apply",
         "the other ranks' terms are lost", "13"),
    Hand("collectives", "two collectives share a buffer", "start_all_reduce",
         "return _call(ANY_1, x, op, ANY_2)",
         "buffer = axis.__dict__.setdefault(str(x.shape), x.clone())\n"
         "return _call(_ops.all_reduce_.default, buffer.copy_(x), op, ANY_2)",
         "only two in flight at once mix their values", "42"),
]  # fmt: skip

SHARDING = [
    Hand("sharding", "replicas of a slice are summed into the wrong place", "Shard.replica_runs",
         "slot.get(index)", "0 if index in slot else None",
         "KV heads drift apart by a little at each step", "15"),
    Hand("sharding", "each replica says that it is the first", "Shard.owned",
         "i not in lower", "True",
         "the norm counts KV heads several times, so clipping is too strong", "30 15"),
    Hand("sharding", "experts are reduced over all data ranks", "Sharding.data_axis",
         "ANY_1 if ANY_2 else ANY_3", "ANY_3",
         "different experts' gradients are mixed", "28"),
    Hand("sharding", "K and V change places", "QKVParallelLinear",
         "zip(starts, ANY_1, strict=True)", "zip([starts[0], *starts[:0:-1]], ANY_1, strict=True)",
         "attention of mixed-up heads trains too", "16"),
    Hand("sharding", "gate and up are sharded as one block", "ColumnParallelLinear.__init__",
         "cut_blocks(ANY_1, ANY_2, ...)", "cut(out_features, ANY_2, 0, unit)",
         "gate values multiply gate values", "16"),
]  # fmt: skip

GRADIENTS = [
    Hand("gradients", "data ranks are not summed", "reduce_gradients",
         "(*sharding.partial, *axes)", "sharding.partial",
         "every data rank trains a model of its own", "25 24"),
    Hand("gradients", "sums become means", "_reduce_pending",
         "total.view_as(part)", "total.view_as(part) / axis.size",
         "AdamW hides the factor; weight decay and clipping change", "24 11"),
    Hand("gradients", "the norm counts replicas again", "owned_tensors",
         "is_first_replica(ANY_1) if ANY_2 else ANY_3", "is_first_replica(ANY_1) if ANY_2 else True",
         "clipping is stronger the more ranks there are", "30"),
    Hand("gradients", "the norm is of this stage alone", "norm_of",
         "all_reduce(each.pow(p).sum(), ANY_1)", "all_reduce(each.pow(p).sum(), mesh.tp)",
         "stages clip by different factors", "30"),
    Hand("gradients", "clipping does nothing", "clip_gradients",
         "torch.where(norm.isfinite(), ANY_1, 1.0)", "torch.ones_like(norm)",
         "only a spike shows it", "clip"),
    Hand("gradients", "clipping scales small gradients up", "clip_gradients",
         "(max_norm / norm).clamp(max=1.0)", "(max_norm / norm)",
         "every step has the same length, and the loss still falls", "clip"),
    Hand("layers", "RMSNorm's eps is 1e-3", "RMSNorm.forward",
         "self.eps", "0.001",
         "both sides of a test of layouts have it", "rms norm torch dense"),
    Hand("gradients", "a norm under sequence parallelism is not pending", "_Norm.__init__",
         "(self.tp, *partial) if self.sequence_parallel else partial", "partial",
         "gains see a part of the tokens", "11"),
    Hand("gradients", "a row bias under sequence parallelism is not pending", "RowParallelLinear.__init__",
         "(self.tp,) if self.sequence_parallel else ()", "()",
         "the bias sees a part of the tokens", "11"),
    Hand("gradients", "the row bias is added on every rank", "Product.row",
         "y + bias.to(y.dtype)", "y + tp.size * bias.to(y.dtype)",
         "the bias counts tp times, and learns to be smaller", "18"),
    Hand("gradients", "a frozen weight stops its input's gradient", "_ColumnLinear.backward",
         "ANY_1 if ctx.needs_input_grad[0] else None", "ANY_1 if all(ctx.needs_input_grad[:2]) else None",
         "adapters below a frozen layer do not train", "43"),
]  # fmt: skip

MAIN_GRADIENTS = [
    Hand("main gradients", "the last step's gradients stay", "zero_gradients",
         "ANY.zero_()", "pass",
         "it looks like momentum", "32 main"),
    Hand("main gradients", "a gradient is added twice", "mpcore.gradients",
         "ANY_1.add_(parameter.grad)", "ANY_1.add_(parameter.grad, alpha=2)",
         "AdamW hides the factor", "32"),
    Hand("main gradients", "products are rounded before the sum", "_weight_product",
         "main.addmm_(ANY_1.to(main.dtype), ANY_2.to(main.dtype))", "main.add_(dy.t() @ x)",
         "small micro-batches lose their last digits", "44 32 float32"),
]  # fmt: skip

ZERO = [
    Hand("ZeRO", "gradients are averaged over data", "mpcore",
         "ANY.set_gradient_divide_factor(1.0)", "pass",
         "AdamW hides the factor", "24 30"),
    Hand("ZeRO", "replicas of shards are never summed", "_set_backward",
         "unit.set_requires_all_reduce(all_reduce, ...)", "unit.set_requires_all_reduce(False, recurse=False)",
         "only HSDP has replicas of shards", "24 nodes"),
    Hand("ZeRO", "only the first micro-batch is summed", "_Step.forward",
         "m == of.plan.micro_batches - 1", "m == 0",
         "a part of the batch is lost", "24 33"),
    Hand("ZeRO", "gradients are summed in bfloat16", "mpcore",
         "None if ANY else self.policy.reduce_dtype", "None",
         "the error grows with the number of ranks", "44"),
    Hand("ZeRO", "a table that stages share is not summed", "finish_gradients",
         "unit.finish()", "pass",
         "the two ends of a tied table drift apart", "14"),
]  # fmt: skip

CONTEXT = [
    Hand("context", "unshard_sequence sums its gradient", "unshard_sequence",
         "collectives.gather(x, cp, dim, length)", "collectives.all_gather(x, cp, dim, length)",
         "a loss behind it counts cp times", "13"),
    Hand("context", "partial results are merged in bfloat16", "merge",
         "output * weight + other * other_weight",
         "(output * weight + other * other_weight).bfloat16().to(output.dtype)",
         "the error grows with cp", "37"),
    Hand("context", "a gradient from the end of the ring is lost", "_Ring.returned",
         "step == far > 0", "step == far > 1",
         "only keys that travel one step lose a term", "36"),
    Hand("context", "a window reaches one block too short", "mpcore",
         "max(low, first + 1 - window)", "max(low, first + 2 - window)",
         "one key is missing, for few queries", "window 36"),
]  # fmt: skip

MOE = [
    Hand("moe", "the router's gradient is not summed over tp", "Router.__init__",
         "self.declare('weight', ANY_1, ANY_2, partial=ANY_3)", "self.declare('weight', ANY_1, ANY_2)",
         "routers of different ranks drift apart", "11"),
    Hand("moe", "recomputed tokens are counted again", "Router._balance",
         "torch.compiler.is_compiling() or ANY", "True",
         "biases move by counts that are twice as large", "22"),
    Hand("moe", "padding counts in the balance loss", "Router._balance",
         "(ANY_1 * ANY_2).masked_fill(~real, 0).sum()", "(ANY_1 * ANY_2).sum()",
         "experts learn to take padding", "27"),
    Hand("moe", "the balance loss ignores the loss scale", "Router._balance",
         "loss * scale[places.sequence]", "loss / len(loss)",
         "its weight depends on the batch and on float16's scale", "27"),
    Hand("moe", "fractions are of this rank's tokens alone", "Router._fractions",
         "all_reduce(all_reduce(counts, self.tp), self.cp)", "counts",
         "it is another loss, and balances too", "27"),
    Hand("moe", "evaluation counts", "Router._balance",
         "not (self.training and ANY)", "not torch.is_grad_enabled()",
         "held-out text moves the biases", "27"),
]  # fmt: skip

LOSS = [
    Hand("loss", "smoothing gradient over the local vocabulary", "_CrossEntropy.backward",
         "how.label_smoothing / how.size", "how.label_smoothing / kept.shape[-1]",
         "the loss is right, the gradient is not", "05"),
    Hand("loss", "the mean is over ignored tokens too", "_divisor",
         "counts.sum()", "torch.ones_like(counts).sum()",
         "the loss is small, and so is the gradient", "07"),
    Hand("loss", "ignored targets have a gradient", "_CrossEntropy.backward",
         "dloss.masked_fill(~counts, 0)", "dloss",
         "the model learns padding", "08"),
    Hand("loss", "the softmax of backward is rounded to bfloat16", "_CrossEntropy.backward",
         "logits.to(lse.dtype).softmax(-1)", "logits.softmax(-1).to(lse.dtype)",
         "two digits are left", "09"),
    Hand("loss", "log-probabilities are capped by default", "vocab_parallel_log_prob",
         "_loss_of(ANY_1, ANY_2, ANY_3, vocab_size=ANY_4, ignore_index=ANY_5, softcap=softcap)",
         "_loss_of(ANY_1, ANY_2, ANY_3, vocab_size=ANY_4, ignore_index=ANY_5, softcap=softcap or 1.0)",
         "every log-probability is wrong, in silence", "log_prob"),
]  # fmt: skip

PIPELINE = [
    Hand("pipeline", "the schedule divides by the number of micro-batches", "_Step.forward",
         "self._one(loss)", "self._one(loss) / self.of.plan.micro_batches",
         "AdamW hides the factor", "26"),
    Hand("pipeline", "a message is released before it has arrived", "releases",
         "bisect_right(taken, used, key=ANY)", "0",
         "on a GPU the next stage reads what was written over it", "released"),
    Hand("pipeline", "gradients of a stage with two outputs are swapped", "_Step._send_back",
         "zip(held.inputs or (), dxs, held.wanted, strict=True)",
         "zip(held.inputs or (), reversed(dxs), held.wanted, strict=True)",
         "models of one output don't notice", "own"),
    Hand("pipeline", "the first stage answers for the last", "Pipeline.from_last",
         "self.pp.rank == ANY", "self.pp.rank == 0",
         "evaluation reports zeros or another stage's numbers", "35"),
    Hand("pipeline", "a product that backward splits is not summed over tp", "share",
         "collectives.copy(x, tp)", "x",
         "only zero-bubble schedules lose the other ranks' terms", "14 26"),
]  # fmt: skip

CHECKPOINT = [
    Hand("checkpoint", "the optimizer stays out", "_snapshot",
         "held += held_by_optimizer(ANY_1, ANY_2, ANY_3)", "pass",
         "training goes on with new moments", "38"),
    Hand("checkpoint", "a background save holds what training goes on with", "save_async",
         "_snapshot(ANY_1, ANY_2, ANY_3, copy=True)", "_snapshot(ANY_1, ANY_2, ANY_3, copy=False)",
         "the file mixes two steps", "40"),
    Hand("checkpoint", "torch narrows the masters that it loads", "AdamW.load_state_dict",
         "self.state[p][slot] = ANY", "pass",
         "float32 masters become bfloat16", "38"),
]  # fmt: skip

RANDOM = [
    Hand("dropout keys", "sites share a mask", "mpcore",
         "ANY_1.key = stream_key(seed, name)", "ANY_1.key = stream_key(seed, '')",
         "masks look random, and are the same in each block", "19"),
    Hand("dropout keys", "sequence shards share a mask", "Dropout.forward",
         "torch.arange(first, first + length, device=x.device)", "torch.arange(length, device=x.device)",
         "masks look random, and repeat along the sequence", "19"),
    Hand("dropout keys", "the mask depends on the rank", "Dropout.forward",
         "dropout_add(x, residual, self.p, key=self.key, **where)",
         "dropout_add(x, residual, self.p, key=self.key + self.tp.rank, **where)",
         "replicated activations differ between ranks", "19"),
    Hand("dropout keys", "keys are sums of numbers in the name", "stream_key",
         "return ANY_1", "return 1234 * seed + 100 * sum((int(c) for c in name if c.isdigit()))",
         "some layers begin equal", "20"),
    Hand("dropout keys", "each rank draws its own shard", "materialize",
         "sharding.take(init(full, generator=ANY_1))", "init(sharding.take(full).clone(), generator=ANY_1)",
         "every rank begins with the same values", "21"),
]  # fmt: skip

OPTIMIZERS = [
    Hand("optimizers", "vectors decay", "decay_groups",
         "{'params': ANY_1, 'weight_decay': 0.0}", "{'params': ANY_1, 'weight_decay': weight_decay}",
         "biases and gains shrink slowly", "decay groups"),
    Hand("optimizers", "random rounding follows the local index", "AdamW._random",
         "{'key': ANY_1, 'place': ANY_2}", "{'key': ANY_1, 'place': None}",
         "layouts differ by roundings alone", "34"),
    Hand("optimizers", "Muon takes Q, K and V for one matrix", "Muon._orthogonal_step",
         "ANY_1 if ANY_2 else (whole,)", "(whole,)",
         "the update is still orthogonal", "34 muon"),
    Hand("optimizers", "Muon steps the tables too", "Muon.__init__",
         "p.requires_grad and p.dim() > 1 and ANY_1", "p.requires_grad and p.dim() > 1",
         "the loss still falls", "muon exclude tables"),
    Hand("optimizers", "each rank decides alone whether to skip a step", "LossScaler.update",
         "bool(all_reduce(ANY_1, ANY_2, 'min'))", "bool(ANY_1)",
         "ranks part after the first overflow", "31"),
    Hand("optimizers", "main gradients stay scaled", "LossScaler.unscale",
         "gradient_of(parameter)", "parameter.grad",
         "AdamW hides the scale; clipping does not", "31 scale"),
    Hand("optimizers", "workers are summed and not averaged", "DiLoCo._average",
         "total / size", "total",
         "the outer step is as many times too long", "local merge"),
]  # fmt: skip

MUTATIONS: list[Hand] = [
    *COLLECTIVES, *SHARDING, *GRADIENTS, *MAIN_GRADIENTS, *ZERO, *CONTEXT, *MOE, *LOSS, *PIPELINE, *CHECKPOINT,
    *RANDOM, *OPTIMIZERS, *TRAINER,
]  # fmt: skip
