"""Broken copies of mpcore: each must turn its test file red. `python -m tests.mutations [WORD ...]` runs some or all.

Nothing is changed in place: the tree is copied, a mutation is applied to the copy, the test file runs there, and the
copy is mended again. A test file has `LIMIT_S` seconds; a hang counts as caught, and is shown as such.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIMIT_S = 150
WORKERS = 2

COLLECTIVES, GRADIENTS, MESH = "tests/test_collectives.py", "tests/test_gradients.py", "tests/test_mesh.py"
SHARDING, RANDOM, FLOORS = "tests/test_sharding.py", "tests/test_random.py", "tests/test_floors.py"
LINEAR, LOSS, NORM = "tests/layers/test_linear.py", "tests/layers/test_loss.py", "tests/layers/test_norm.py"
ATTENTION, BLOCK, ROPE = "tests/layers/test_attention.py", "tests/layers/test_block.py", "tests/layers/test_rope.py"
EMBEDDING, DROPOUT = "tests/layers/test_embedding.py", "tests/layers/test_dropout.py"
FIRST = "tests/layers/test_compile_autocast_meta.py"
MLP = "tests/layers/test_mlp.py"
PIPELINE = "tests/test_pipeline.py"


class Mutation(NamedTuple):
    """What breaks: the pitfall or the promise, the file, its text before and after, and the tests that must notice."""

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation("1 copy reduces its gradient in place", "mpcore/collectives.py",
             "        return reduce(dy, ctx.axis), None\n",
             "        torch.distributed.all_reduce(dy, group=ctx.axis.group)\n        return dy, None\n", COLLECTIVES),
    Mutation("2 reduce writes to its input", "mpcore/collectives.py",
             "        return all_reduce(x, axis)\n",
             "        torch.distributed.all_reduce(x, group=axis.group)\n        return x.clone()\n", COLLECTIVES),
    Mutation("3 reduce loses non-contiguous results", "mpcore/collectives.py",
             "        return all_reduce(x, axis)\n",
             "        torch.distributed.all_reduce(x.contiguous(), group=axis.group)\n        return x.clone()\n",
             COLLECTIVES),
    Mutation("4 the loss changes its logits", "mpcore/layers/loss.py",
             "kept = softmax if",
             "kept = logits.detach().copy_(softmax) if", LOSS),
    Mutation("5 smoothing over the local vocabulary", "mpcore/layers/loss.py",
             "label_smoothing / size * sum_logits",
             "label_smoothing / logits.shape[-1] * sum_logits", LOSS),
    Mutation("5 smoothing gradient over the local vocabulary", "mpcore/layers/loss.py",
             "ctx.label_smoothing / ctx.size",
             "ctx.label_smoothing / kept.shape[-1]", LOSS),
    Mutation("5 smoothing sums the logits of one rank", "mpcore/layers/loss.py",
             "at_target, sum_logits = stats[:, 2:].sum(0)",
             "at_target, sum_logits = stats[:, 2].sum(0), stats[0, 3]", LOSS),
    Mutation("5 z-loss gradient without its factor", "mpcore/layers/loss.py",
             "1 + 2 * ctx.z_loss", "1 + ctx.z_loss", LOSS),
    Mutation("6 exponentials without the maximum", "mpcore/layers/loss.py",
             "total = softmax.amax(-1).reciprocal()",
             "total = logits.to(wide).exp().sum(-1) / largest.exp()", LOSS),
    Mutation("7 mean over ignored tokens too", "mpcore/layers/loss.py",
             "return counts.sum().clamp(min=1)", "return torch.ones_like(counts).sum().clamp(min=1)", LOSS),
    Mutation("7 mean of nothing", "mpcore/layers/loss.py",
             "return counts.sum().clamp(min=1)", "return counts.sum()", LOSS),
    Mutation("8 ignored targets have a loss", "mpcore/layers/loss.py",
             "return loss.masked_fill(~counts, 0)", "return loss", LOSS),
    Mutation("8 ignored targets have a gradient", "mpcore/layers/loss.py",
             "dloss = dloss.masked_fill(~counts, 0).unsqueeze(-1)", "dloss = dloss.unsqueeze(-1)", LOSS),
    Mutation("9 the gradient goes through bf16", "mpcore/layers/loss.py",
             "return dlogits.to(ctx.dtype)",
             "return dlogits.bfloat16().to(ctx.dtype)", LOSS),
    Mutation("10 gathered logits are taken", "mpcore/layers/loss.py",
             "if columns != end - start:", "if False:", LOSS),
    Mutation("a shard masked with -inf gives NaN", "mpcore/layers/loss.py",
             "masked = largest == -torch.inf",
             "masked = largest == torch.inf", LOSS),
    Mutation("11 norms under sequence parallel", "mpcore/layers/norm.py",
             "partial = (tp, *partial) if sequence_parallel else partial", "partial = tuple(partial)", NORM),
    Mutation("11 norms, in a block", "mpcore/layers/norm.py",
             "partial = (tp, *partial) if sequence_parallel else partial", "partial = tuple(partial)", BLOCK),
    Mutation("11 row bias under sequence parallel", "mpcore/layers/linear.py",
             "partial = (tp,) if self.sequence_parallel else ()", "partial = ()", LINEAR),
    Mutation("11 positions under sequence parallel", "mpcore/layers/embedding.py",
             "partial = (tp,) if self.sequence_parallel else ()", "partial = ()", EMBEDDING),
    Mutation("12 query norm over sharded heads", "mpcore/layers/attention.py",
             "self.q_norm = RMSNorm(head_dim, norm_eps, partial=(tp,), **like)",
             "self.q_norm = RMSNorm(head_dim, norm_eps, **like)", ATTENTION),
    Mutation("12 key norm over sharded heads", "mpcore/layers/attention.py",
             "self.k_norm = RMSNorm(head_dim, norm_eps, partial=(tp,), **like)",
             "self.k_norm = RMSNorm(head_dim, norm_eps, **like)", ATTENTION),
    Mutation("13 gather sums its gradient", "mpcore/collectives.py",
             "return _Split.apply(dy, ctx.axis, ctx.dim), None, None, None",
             "return _ReduceScatter.apply(dy, ctx.axis, ctx.dim), None, None, None", LINEAR),
    Mutation("13 all_gather doesn't sum its gradient", "mpcore/collectives.py",
             "return _ReduceScatter.apply(dy, ctx.axis, ctx.dim), None, None, None",
             "return _Split.apply(dy, ctx.axis, ctx.dim), None, None, None", LINEAR),
    Mutation("15 KV replicas aren't summed", "mpcore/gradients.py",
             "for shard in sharding.shards if shard.replicated]", "for shard in () if shard.replicated]", ATTENTION),
    Mutation("15 the sum lands in the wrong replica", "mpcore/gradients.py",
             "return mine, [slot[held[i]] for i in mine]", "return mine, list(range(len(mine)))", ATTENTION),
    Mutation("15 query heads read the wrong KV head", "mpcore/layers/linear.py",
             "self.kv_head_of = [head // group - kv_start for head", "self.kv_head_of = [0 * head for head", ATTENTION),
    Mutation("16 gate and up cut as one block", "mpcore/layers/linear.py",
             "cut_blocks((self.hidden_features,) * 2, self.tp, 0, (unit,) * 2)",
             "cut(2 * self.hidden_features, self.tp, 0, unit)", MLP),
    Mutation("16 K and V change places", "mpcore/layers/linear.py",
             "run(*kv, k), run(*kv, v)", "run(*kv, v), run(*kv, k)", SHARDING),
    Mutation("17 words of other ranks aren't masked", "mpcore/layers/embedding.py",
             "rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)", "", EMBEDDING),
    Mutation("17 the word after the last is held too", "mpcore/layers/embedding.py",
             "(ids >= self.end)", "(ids > self.end)", EMBEDDING),
    Mutation("17 targets at the border of a shard", "mpcore/layers/loss.py",
             "(column >= 0)", "(column > 0)", LOSS),
    Mutation("17 shards padded to one size", "mpcore/collectives.py",
             "(whole + (rank < rest)) * unit", "(whole + (rest > 0)) * unit", EMBEDDING),
    Mutation("18 row bias on every rank", "mpcore/layers/linear.py",
             "        y = F.linear(x, self.weight)\n", "        y = F.linear(x, self.weight, self.bias)\n", LINEAR),
    Mutation("19 sequence shards share a mask", "mpcore/layers/dropout.py",
             "first = self.tp.rank * x.shape[self.sequence_dim] if self.sequence_parallel else 0",
             "first = 0", DROPOUT),
    Mutation("19 samples share a mask", "mpcore/random.py",
             "samples[:, None, None] & _MASK", "samples[:, None, None] & 0", DROPOUT),
    Mutation("19 samples repeat after 2^32", "mpcore/random.py",
             "(samples[:, None, None] >> 32) & _MASK", "(samples[:, None, None] >> 32) & 0", DROPOUT),
    Mutation("19 sites share a mask", "mpcore/layers/dropout.py",
             "module.key = stream_key(seed, name)", 'module.key = stream_key(seed, "")', DROPOUT),
    Mutation("19 the mask depends on the tp rank", "mpcore/layers/dropout.py",
             "key=self.key, samples=samples, tokens=tokens)\n\n",
             "key=self.key + self.tp.rank, samples=samples, tokens=tokens)\n\n", DROPOUT),
    Mutation("20 keys are sums", "mpcore/random.py",
             'return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1',
             "return 1234 * seed + 100 * sum(int(c) for c in name if c.isdigit())", RANDOM),
    Mutation("20 Philox of nine rounds", "mpcore/random.py", "_ROUNDS = 10", "_ROUNDS = 9", RANDOM),
    Mutation("21 each rank draws its own shard", "mpcore/initialize.py",
             "parameter.copy_(sharding.take(init(full, generator=generator(seed, name))))",
             "parameter.copy_(init(sharding.take(full).clone(), generator=generator(seed, name)))", FIRST),
    Mutation("21 one generator for all parameters", "mpcore/initialize.py",
             "generator=generator(seed, name)", "generator=None", FIRST),
    Mutation("21 ties break on the meta device", "mpcore/initialize.py",
             "        _to_empty(model, device)\n", "        model.to_empty(device=device)\n", FIRST),
    Mutation("24 gradients are averaged once more", "mpcore/gradients.py",
             "_store_part(parameter, shard, total.view_as(part))",
             "_store_part(parameter, shard, total.view_as(part) / axis.size)", LOSS),
    Mutation("25 data ranks aren't summed", "mpcore/gradients.py",
             "(*sharding.partial, *over) if axis.size", "sharding.partial if axis.size", LOSS),
    Mutation("30 replicas are counted again", "mpcore/gradients.py",
             "if any(axis.rank > 0 for axis in replicated_over):", "if False:", GRADIENTS),
    Mutation("30 KV replicas are counted again", "mpcore/sharding.py",
             "i not in lower for", "True for", GRADIENTS),
    Mutation("30 the norm is this stage's", "mpcore/gradients.py",
             "all_reduce(each.pow(p).sum(), mesh.world)", "all_reduce(each.pow(p).sum(), mesh.tp)", GRADIENTS),
    Mutation("30 a NaN is lost in the maximum", "mpcore/gradients.py",
             "each = each.masked_fill(each.isnan(), math.inf)", "pass", GRADIENTS),
    Mutation("33 ranks without a gradient stay out", "mpcore/gradients.py",
             "        if not parameter.requires_grad:\n", "        if parameter.grad is None:\n", GRADIENTS),
    Mutation("33 unused parameters get zeros", "mpcore/gradients.py",
             "found = None if complete else present.tolist()", "found = None", GRADIENTS),
    Mutation("41 groups in another order on odd ranks", "mpcore/mesh.py",
             "    for ranks in groups:\n",
             "    for ranks in groups if dist.get_rank() % 2 else groups[::-1]:\n", MESH),
    Mutation("41 ranks ask for different meshes", "mpcore/mesh.py",
             "        if differing:\n", "        if False:\n", MESH),
    Mutation("41 the expert groups leave their stage", "mpcore/mesh.py",
             "data = grid.permute(0, 3, 1, 2).reshape(pp, tp, dp * cp)",
             "data = grid.permute(0, 3, 2, 1).reshape(pp, tp, dp * cp)", MESH),
    Mutation("43 a frozen weight stops the gradient", "mpcore/layers/linear.py",
             "dx = start_all_reduce(dy @ weight, ctx.tp) if ctx.needs_input_grad[0] else None",
             "dx = start_all_reduce(dy @ weight, ctx.tp) if all(ctx.needs_input_grad[:2]) else None", LINEAR),
    Mutation("43 a frozen weight skips the sum", "mpcore/layers/linear.py",
             "dx = start_all_reduce(dy @ weight, ctx.tp) if ctx.needs_input_grad[0] else None",
             "dx = (start_all_reduce(dy @ weight, ctx.tp) if ctx.needs_input_grad[1] else dy @ weight)", ATTENTION),
    Mutation("the input gradient isn't summed", "mpcore/layers/linear.py",
             "start_all_reduce(dy @ weight, ctx.tp) if", "dy @ weight if", MLP),
    Mutation("a second derivative comes out wrong", "mpcore/layers/linear.py",
             '        refuse_second_derivative("a column-parallel linear on tp > 1")\n'
             "        x, weight = ctx.saved_tensors\n        dx",
             "        x, weight = ctx.saved_tensors\n        dx", LINEAR),
    Mutation("a block gathers once more", "mpcore/layers/linear.py",
             "ctx.save_for_backward((x if regather else whole)",
             "ctx.save_for_backward((x if (regather := True) else whole)", FIRST),
    Mutation("the window is one token wider", "mpcore/layers/attention.py",
             "distance < window", "distance <= window", ATTENTION),
    Mutation("documents see each other", "mpcore/layers/attention.py",
             "sees &= document[:, None] == document", "pass", ATTENTION),
    Mutation("positions run on over documents", "mpcore/layers/attention.py",
             "return index - cu_seqlens[", "return index - 0 * cu_seqlens[", ATTENTION),
    Mutation("rope turns in the dtype of the model", "mpcore/layers/rope.py",
             "        device = fn(self.inv_freq).device\n",
             "        self.inv_freq = fn(self.inv_freq)\n        device = self.inv_freq.device\n", ROPE),
    Mutation("llama3's bands change places", "mpcore/layers/rope.py",
             "(1 - smooth) * f / factor + smooth * f", "smooth * f / factor + (1 - smooth) * f", ROPE),
    Mutation("autocast inside the autograd function", "mpcore/layers/linear.py",
             "    return [None if t is None else t.to(dtype) for t in (x, *tensors)]",
             "    return [x, *tensors]", FIRST),
    Mutation("DTensor is imported with the library", "mpcore/sharding.py",
             "from torch import Tensor, nn\n",
             "from torch import Tensor, nn\nimport torch.distributed.tensor\n", FLOORS),
    Mutation("a floor is climbed", "mpcore/collectives.py",
             "from mpcore.mesh import Axis\n", "from mpcore.mesh import Axis\nimport mpcore.layers.module\n", FLOORS),
    Mutation("24 data ranks are averaged", "mpcore/data_parallel.py",
             "sharded.set_gradient_divide_factor(1.0)", "pass", PIPELINE),
    Mutation("26 the schedule divides by micro-batches", "mpcore/pipeline/engine.py",
             "scale_grads=False", "scale_grads=True", PIPELINE),
    Mutation("33 only the first micro-batch is summed over data", "mpcore/pipeline/engine.py",
             "sync_gradients(stage, i == self.micro_batches - 1)", "sync_gradients(stage, i == 0)", PIPELINE),
    Mutation("35 the first stage answers for the last", "mpcore/pipeline/engine.py",
             "return all_reduce(x if self.pp.rank == self.last_rank else",
             "return all_reduce(x if self.pp.rank == 0 else", PIPELINE),
    Mutation("the loss scales a softmax that is used again", "mpcore/layers/loss.py",
             "dlogits = kept * scale if _graph_is_kept() else kept.mul_(scale)", "dlogits = kept.mul_(scale)", LOSS),
]  # fmt: skip


def judge(tree: Path, mutation: Mutation) -> tuple[str, float]:
    """Break the copy, run the tests, mend the copy; return the verdict and the seconds it took."""
    file = tree / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        return f"STALE: its text is there {text.count(mutation.old)} times", 0.0
    start = time.monotonic()
    file.write_text(text.replace(mutation.old, mutation.new))
    command = [sys.executable, "-m", "pytest", mutation.tests, "-x", "-q", "-p", "no:cacheprovider", "--timeout=60"]
    try:
        run = subprocess.run(
            command,
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        verdict = {0: "SURVIVED", 1: "caught"}.get(run.returncode, f"caught (exit {run.returncode})")
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        verdict += " by " + failed[0].split("::")[-1].split(" - ")[0] if failed else ""
    except subprocess.TimeoutExpired:
        verdict = "caught (hang)"
    finally:
        file.write_text(text)
    return verdict, time.monotonic() - start


def main(words: list[str]) -> int:
    """Judge the mutations whose name or tests hold any of the words (none: all); return how many weren't caught."""
    chosen = [m for m in MUTATIONS if not words or any(word in f"{m.what} {m.tests}" for word in words)]
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for index in range(len(chosen)):
        waiting.put(index)
    verdicts: dict[int, str] = {}

    def work(tree: Path) -> None:
        ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", "*.egg-info", ".ci-out", "shared")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            verdict, seconds = judge(tree, chosen[index])
            verdicts[index] = verdict
            print(f"{chosen[index].what:<48} {chosen[index].tests:<46} {seconds:5.0f} s  {verdict}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mpcore-mutations-") as folder:
        workers = [threading.Thread(target=work, args=(Path(folder) / str(i),)) for i in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    missed = [verdict for verdict in verdicts.values() if not verdict.startswith("caught")]
    print(f"{len(verdicts) - len(missed)} of {len(chosen)} mutations caught")
    return len(missed) + len(chosen) - len(verdicts)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
