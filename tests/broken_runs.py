"""Runs that are broken on purpose, for the trial of `mpcore preflight`: a case for each pitfall of docs/pitfalls.md.

`python -m tests.preflight_broken` tries them.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.mutations.hand import MUTATIONS
from tests.mutations.patterns import Hand

OWN = "tests.branching:Branching --layouts tp2"
DENSE, TORCH, DTYPE, LOAD = "sharded against unsharded", "against torch", "dtype", "save, load elsewhere"
SUM, DIFFERS = "nobody sums them|holds one term", "differs"


class Case(NamedTuple):
    """A planted bug.

    Attributes:
        number: of the pitfall; "report" for a bug of a kind that users of other libraries reported.
        what: the bug, in a few words.
        flags: of the run.
        check: those that may find it, separated by "|".
        sentence: a pattern in what the check says.
        hand: the mutation; None: `what` names one of `tests.preflight.planted.BUGS`.
    """

    number: str
    what: str
    flags: str
    check: str = DENSE
    sentence: str = DIFFERS
    hand: Hand | None = None

    @property
    def name(self) -> str:
        """Number and bug."""
        return f"{self.number}, {self.what}"


_HAND = {hand.what: hand for hand in MUTATIONS}


def known(number: str, what: str, flags: str, check: str = DENSE, sentence: str = DIFFERS) -> Case:
    """A case of a hand-written mutation."""
    return Case(number, what, flags, check, sentence, _HAND[what])


def new(
    number: str, what: str, flags: str, definition: str, pattern: str, replacement: str, check: str = DENSE,
    sentence: str = DIFFERS,
) -> Case:  # fmt: skip
    """A case of a mutation that is written here."""
    hand = Hand("preflight", what, definition, pattern, replacement, "", "")
    return Case(number, what, flags, check, sentence, hand)


TP2 = "tp2 against unsharded"
PITFALLS = [
    known("1", "copy sums its gradient in place", OWN, TP2),
    known("2", "reduce writes to its input", OWN, TP2),
    new("3", "the sum of a strided tensor is lost", OWN, "all_reduce",
        "return _call(_ops.all_reduce.default, x, op, _group(axis), wait=True)",
        "y = _call(_ops.all_reduce.default, x, op, _group(axis), wait=True)\n"
        "return y if x.is_contiguous() else x", TP2),
    new("4", "the loss writes to its logits", "--dp 2", "_CrossEntropy.forward",
        "kept, most, largest = ANY_1",
        "kept, most, largest = ANY_1\nlogits.detach().sub_(largest.unsqueeze(-1).to(logits.dtype))",
        TORCH, "writes to its logits|torch's"),
    known("5", "smoothing gradient over the local vocabulary", OWN, TP2),
    new("6", "the loss takes the logarithm of a softmax", "--dp 2", "_CrossEntropy.forward",
        "loss = lse - (1 - smoothing) * at_target", "loss = -(at_target - lse).exp().log()", TORCH, "is inf, torch's"),
    new("7", "every target counts, ignored or not", "--dp 4", "Run.count_tokens",
        "sum(((t != -100).sum() for t in targets))", "sum((torch.as_tensor(t.numel()) for t in targets))",
        DENSE, "don't count targets that are -100"),
    known("8", "ignored targets have a gradient", "--dp 2", TORCH, "an ignored target a gradient|off by"),
    new("9", "the gradient of the loss is rounded to bfloat16", "--dp 2", "_CrossEntropy.backward",
        "return gradient(kept.clone() if again else kept, *rows), None, None",
        "return gradient(kept.clone() if again else kept, *rows).bfloat16().to(kept.dtype), None, None",
        TORCH, "it is rounded"),
    new("10", "the head's logits are gathered before the loss", "--tp 2 --dp 2", "GPT.forward",
        "self.head(self.norm(x))",
        "__import__('mpcore.collectives').collectives.gather(self.head(self.norm(x)), self.tp, -1, "
        "self.config.vocab_size)", "memory and bytes|" + DENSE, "columns|logits"),
    known("11", "a norm under sequence parallelism is not pending", "--tp 2 --dp 2 --sequence-parallel", DENSE, SUM),
    new("12", "norms of queries and keys are not pending", "tests.verify_models:Encoder --layouts tp2",
        "ParallelAttention.__init__", "{'partial': (self.tp,), **ANY_1}", "ANY_1", TP2, SUM),
    known("13", "gather sums its gradient", OWN, TP2),
    new("14", "a tied table is not pending over both ends", "--pp 2 --dp 2 --set tie_embeddings=true", "GPT.__init__",
        "add_partial(self.embedding, 'weight', mesh.ends)", "pass", "memory and bytes|" + DENSE, "stage"),
    known("15", "replicas of a slice are summed into the wrong place", "--tp 2 --dp 2 --heads 4 --kv-heads 1"),
    known("16", "gate and up are sharded as one block", "--tp 2 --dp 2"),
    new("17", "an uneven vocabulary has one more column", "--tp 2 --dp 2", "_CrossEntropy.forward",
        "lse = largest + total.log()",
        "lse = largest + (total + (how.size % tp.size) * (-largest).exp()).log()", DENSE, "loss differs"),
    known("18", "the row bias is added on every rank", "--tp 2 --dp 2 --preset gpt2 --heads 4 --d-model 32"),
    known("19", "sites share a mask", "--dp 2 --dropout 0.2", TORCH, "draw the same masks"),
    known("20", "keys are sums of numbers in the name", "--dp 2", TORCH, "one random stream|draw the same masks"),
    known("21", "each rank draws its own shard", "--tp 2 --dp 2", DENSE, "depend on the layout"),
    new("22", "recompute draws another dropout mask", "--dp 2 --dropout 0.2 --recompute full", "Dropout.forward",
        "dropout_add(x, residual, self.p, key=self.key, **where)",
        "dropout_add(x, residual, self.p, key=self.key + __import__('mpcore').layers.module.recomputing(), **where)"),
    new("23", "a recomputed block loses the gradient of its input", "--dp 2 --recompute full",
        "mpcore.parallel.recompute",
        "checkpoint(forward, ...)",
        "checkpoint(forward, *(x.detach().requires_grad_() for x in args), use_reentrant=False, "
        "preserve_rng_state=setting.preserve_rng_state, **options)", DENSE, "gradient of"),
    new("24", "the loss is a mean of each rank's mean", "--dp 2 --zero 1", "Run.count_tokens",
        "all_reduce(torch.as_tensor(count, device=self.mesh.device), self.mesh.data).double()",
        "torch.as_tensor(count, device=self.mesh.device).double()"),
    new("25", "context ranks count their own tokens", "--cp 2", "Run.count_tokens",
        "all_reduce(torch.as_tensor(count, device=self.mesh.device), self.mesh.data)",
        "all_reduce(torch.as_tensor(count, device=self.mesh.device), self.mesh.dp)"),
    known("26", "the schedule divides by the number of micro-batches", "--pp 2 --dp 2", TORCH, "a backward is not"),
    known("27", "fractions are of this rank's tokens alone", "--ep 2 --dp 2 --experts 4 --tp 2"),
    known("28", "experts are reduced over all data ranks", "--ep 2 --dp 4 --experts 4", "memory and bytes|" + DENSE,
          "ep|experts"),
    new("29", "room for tokens goes by their place on the rank",
        "--tp 2 --dp 2 --sequence-parallel --experts 4 --set moe.capacity_factor=0.7", "Router._within_capacity",
        "places.position[:, None]", "torch.arange(n, device=experts.device)[:, None]"),
    known("30", "each replica says that it is the first", "--tp 2 --dp 2 --heads 4 --kv-heads 1", DENSE,
          "norm differs"),
    new("31", "each rank decides for itself whether a step is finite", "--tp 2 --dp 2", "Run.optimizer_step",
        "self.scaler.update(finite) if self.scaler else finite", "finite or self.mesh.dp.rank == 0",
        "NaN on one rank", "took the step"),
    known("32", "a gradient is added twice", "--tp 2 --dp 2 --dtype bfloat16", DTYPE, "kept or counted twice"),
    known("33", "only the first micro-batch is summed", "--dp 2 --zero 2", "memory and bytes|" + DENSE,
          "not summed|differs|last micro-batch"),
    known("34", "random rounding follows the local index", "--dp 2 --zero 2 --optimizer adamw-bf16", DENSE,
          "the gradients of the first step are right"),
    known("35", "the first stage answers for the last", "--pp 2 --dp 2", "memory and bytes|" + DENSE,
          "only the last pipeline stage has the loss"),
    known("36", "a gradient from the end of the ring is lost", "--cp 2 --dp 2 --cp-kind ring"),
    known("37", "partial results are merged in bfloat16", "--cp 2 --dp 2 --cp-kind ring"),
    known("38", "the optimizer stays out", "--tp 2 --dp 2", LOAD, "what the optimizer or the routers keep"),
    new("39", "resuming reads other samples", "--dp 2", "Checkpoints.sample",
        "return ANY_1", "return ANY_1 + self.args.global_batch * (self.first_step > 0)", LOAD, "other samples"),
    known("40", "a background save holds what training goes on with", "--dp 2 --set async_save=true", LOAD,
          "it was not saved, or not loaded, as it was|state"),
    new("41", "ranks make process groups in different orders", "--tp 2 --dp 2", "_share",
        "[share_group(ranks, f'mpcore {role}') for ranks in groups]",
        "[share_group(ranks, f'mpcore {role}') for ranks in groups[:: 1 - 2 * (torch.distributed.get_rank() % 2)]]",
        DENSE, "process groups in the same order"),
    new("42", "two sums share a buffer", "--tp 2 --dp 2", "all_reduce",
        "return _call(_ops.all_reduce.default, x, op, _group(axis), wait=True)",
        "y = _call(_ops.all_reduce.default, x, op, _group(axis), wait=True)\n"
        "return all_reduce.__dict__.setdefault((y.shape, y.dtype), y).copy_(y)", "memory and bytes|" + DENSE,
        "differs|Write to a clone"),
    known("43", "a frozen weight stops its input's gradient", OWN, "gradient of one process|" + TP2, "differs|slope"),
    known("44", "gradients are summed in bfloat16", "--dp 4 --zero 3 --dtype bfloat16", DTYPE, "has the digits of"),
]  # fmt: skip
