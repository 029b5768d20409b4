"""Context parallel, broken."""

from tests.mutations import Mutation

LAYER, MODEL = "tests/layers/test_context.py", "tests/examples/test_context.py"
CONTEXT = "mpcore/layers/context.py"

MUTATIONS = [
    Mutation("13 cp: unshard_sequence sums its gradient", CONTEXT,
             "collectives.gather(x, cp, dim, length)", "collectives.all_gather(x, cp, dim, length)", LAYER),
    Mutation("25 cp: tokens are counted over dp alone", "examples/gpt/pretrain.py",
             "all_reduce((targets != -100).sum(), self.mesh.data)", "all_reduce((targets != -100).sum(), self.mesh.dp)",
             MODEL),
    Mutation("24 cp: each rank divides by its own tokens", "examples/gpt/pretrain.py",
             "return total * (self.scale / self.tokens_of_step)",
             "return total * (self.scale / max(int((target != -100).sum()), 1)) / self.mesh.cp.size", MODEL),
    Mutation("36 cp: positions begin anew on each rank", "mpcore/layers/attention.py",
             "document_positions(cu_seqlens, whole, x.device)[index]",
             "document_positions(cu_seqlens, whole, x.device)[: len(index)]", LAYER),
    Mutation("36 cp: zigzag pairs neighbours", CONTEXT,
             "(chunks[i], chunks[-1 - i])", "(chunks[2 * i], chunks[2 * i + 1])", LAYER),
    Mutation("36 cp: the mask of the first tokens for all ranks", CONTEXT,
             "(torch.cat([bound[start:end] for start, end in runs]) for bound in bounds)",
             "(bound[: sum(end - start for start, end in runs)] for bound in bounds)", LAYER),
    Mutation("36 cp: targets are shifted after the split", "examples/gpt/pretrain.py",
             "(shard_sequence(t, self.mesh.cp, self.args.cp_kind) for t in (tokens, targets))",
             "(shard_sequence(tokens, self.mesh.cp, self.args.cp_kind).roll(-i, 1) for i in range(2))", MODEL),
    Mutation("37 cp: partial results merged in bf16", CONTEXT,
             "    return output * weight + other * other_weight, total\n",
             "    half = output * weight + other * other_weight\n    return half.bfloat16().to(half.dtype), total\n",
             LAYER),
    Mutation("37 cp: gradients of keys summed in bf16", CONTEXT,
             "part = before + part if part.numel() else before",
             "part = (before + part).to(q.dtype).to(wide) if part.numel() else before", LAYER),
    Mutation("cp: a gradient from the end of the way is lost", CONTEXT,
             "if step == far > 0 else mine", "if step == far > 1 else mine", LAYER),
    Mutation("cp: a window reaches one block short", CONTEXT,
             "low = max(low, first + 1 - window)", "low = max(low, first + 2 - window)", LAYER),
    Mutation("cp: keys go on round where nobody reads them", CONTEXT,
             "if step < self.reach[block]:", "if step < self.axis.size - 1:", LAYER),
    Mutation("cp: dropout takes each rank's tokens for the first", "mpcore/layers/dropout.py",
             "tokens = tokens[first : first + length]", "tokens = torch.arange(first, first + length)",
             LAYER),
    Mutation("cp: learned positions begin anew on each rank", "mpcore/layers/embedding.py",
             "F.embedding(positions[first : first + length], self.weight)", "self.weight[first : first + length]",
             MODEL),
]  # fmt: skip
