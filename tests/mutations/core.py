"""Mesh, collectives, shardings, gradients and the engines, broken."""

from tests.mutations import Mutation

COLLECTIVES = "tests/test_collectives.py"
GRADIENTS = "tests/test_gradients.py"
MESH = "tests/test_mesh.py"
RANDOM = "tests/test_random.py"
FLOORS = "tests/test_floors.py"
LINEAR = "tests/layers/test_linear.py"
LOSS = "tests/layers/test_loss.py"
ATTENTION = "tests/layers/test_attention.py"
EMBEDDING = "tests/layers/test_embedding.py"
DROPOUT = "tests/layers/test_dropout.py"
FIRST = "tests/layers/test_compile_autocast_meta.py"
PIPELINE = "tests/test_pipeline.py"

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
    Mutation("17 shards padded to one size", "mpcore/collectives.py",
             "(whole + (rank < rest)) * unit", "(whole + (rest > 0)) * unit", EMBEDDING),
    Mutation("19 samples share a mask", "kernels/_philox.py",
             "samples[:, None, None] & _MASK", "samples[:, None, None] & 0", DROPOUT),
    Mutation("19 samples repeat after 2^32", "kernels/_philox.py",
             "(samples[:, None, None] >> 32) & _MASK", "(samples[:, None, None] >> 32) & 0", DROPOUT),
    Mutation("20 keys are sums", "mpcore/random.py",
             'return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1',
             "return 1234 * seed + 100 * sum(int(c) for c in name if c.isdigit())", RANDOM),
    Mutation("20 Philox of nine rounds", "kernels/_philox.py", "_ROUNDS = 10", "_ROUNDS = 9", RANDOM),
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
             "(*sharding.partial, *axes) if axis.size", "sharding.partial if axis.size", LOSS),
    Mutation("30 replicas are counted again", "mpcore/gradients.py",
             "if not first or any(axis.rank > 0 for axis in sharding.replica_axes(mesh)):", "if not first:", GRADIENTS),
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
    Mutation("ranks share a GPU by default", "mpcore/mesh.py", "gpus >= (local_size if backends is None else 1)",
             "gpus >= 1", MESH),
    Mutation("a world on GPUs has no backend on the host", "mpcore/mesh.py", '"cpu:gloo,cuda:nccl" if device_type',
             '"nccl" if device_type', MESH),
    Mutation("41 the expert groups leave their stage", "mpcore/mesh.py",
             "data = grid.permute(0, 3, 1, 2).reshape(pp, tp, dp * cp)",
             "data = grid.permute(0, 3, 2, 1).reshape(pp, tp, dp * cp)", MESH),
    Mutation("42 two collectives under way share a buffer", "mpcore/collectives.py",
             "return _call(_ops.all_reduce.default, x, op, _group(axis))\n",
             "buffer = axis.__dict__.setdefault(str(x.shape), x.clone())\n"
             "    return _call(_ops.all_reduce_.default, buffer.copy_(x), op, _group(axis))\n", COLLECTIVES),
    Mutation("DTensor is imported with the library", "mpcore/sharding.py",
             "from torch import Tensor, nn\n",
             "from torch import Tensor, nn\nimport torch.distributed.tensor\n", FLOORS),
    Mutation("a floor is climbed", "mpcore/collectives.py",
             "from mpcore.mesh import Axis\n", "from mpcore.mesh import Axis\nimport mpcore.layers.module\n", FLOORS),
    Mutation("24 data ranks are averaged", "mpcore/data_parallel.py",
             "sharded.set_gradient_divide_factor(1.0)", "pass", PIPELINE),
    Mutation("26 the schedule divides by micro-batches", "mpcore/pipeline/engine.py",
             "        reduce_once(self.submod)", "        reduce_once(self.submod), self.scale_grads(2)", PIPELINE),
    Mutation("33 only the first micro-batch is summed over data", "mpcore/pipeline/engine.py",
             "sync_gradients(stage, i == self.micro_batches - 1)", "sync_gradients(stage, i == 0)", PIPELINE),
    Mutation("35 the first stage answers for the last", "mpcore/pipeline/engine.py",
             "return all_reduce(x if self.pp.rank == self.last_rank else",
             "return all_reduce(x if self.pp.rank == 0 else", PIPELINE),
]  # fmt: skip
