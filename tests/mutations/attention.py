"""Attention, broken: its reference, its masks, what it launches, and what the layer asks of it."""

from tests.mutations import Mutation

KERNEL = "tests/kernels/test_attention.py"
INTERPRETED = "tests/kernels/interpret/test_attention.py"
LAYER = "tests/layers/test_attention.py"
FILE = "kernels/attention.py"

MUTATIONS = [
    Mutation("37 blocks keep lse in the inputs' dtype", FILE,
             "    exact = torch.promote_types(query.dtype, torch.float32)\n    return query.new_empty((B, T, H,",
             "    exact = query.dtype\n    return query.new_empty((B, T, H,", KERNEL),
    Mutation("the gradient of lse gets lost", FILE,
             "            delta -= dlse.to(q.dtype)", "            delta -= 0 * dlse.to(q.dtype)", KERNEL),
    Mutation("the gradient of the soft cap gets lost", FILE,
             "return softcap * tanh, 1 - tanh.square()", "return softcap * tanh, None", KERNEL),
    Mutation("a query that sees nothing spreads NaN", FILE,
             "rows_lse.masked_fill(nothing, math.inf), delta.masked_fill(nothing, 0)", "rows_lse, delta", KERNEL),
    Mutation("keys on the left stay hidden from nobody", FILE,
             "if starts[last] > start:", "if starts[last] > start and False:", KERNEL),
    Mutation("a chunk forgets the keys of its last query", FILE,
             "rows, start, end = slice(first, last + 1), starts[first], ends[last]",
             "rows, start, end = slice(first, last + 1), starts[first], ends[first]", KERNEL),
    Mutation("the output is not divided where chunks are small", FILE,
             ".div_(total.masked_fill(total == 0, 1))", "", KERNEL),
    Mutation("bounds may fall", FILE,
             "if bool((low.diff() < 0).any()) or bool((high.diff() < 0).any()):",
             "if bool((low.diff() < 0).any()):", KERNEL),
    Mutation("a second derivative of attention comes out wrong", FILE,
             '        refuse_second_derivative("attention", "torch.nn.functional.scaled_dot_product_attention")\n', "",
             KERNEL),
    Mutation("strides of 64 bits meet a kernel of 32", "kernels/_launch.py",
             ", -(2**31) <= s < 2**31)", ", True)", KERNEL),
    Mutation("views are copied before the launch", FILE,
             "x = x if x.stride(3) == 1 else x.contiguous()", "x = x.contiguous()", KERNEL),
    Mutation("KV heads of uneven shards are taken evenly", "mpcore/layers/attention.py",
             "self.kv_repeats = sizes if len(set(sizes)) > 1 else None", "self.kv_repeats = None", LAYER),
    Mutation("the layer's soft cap gets lost", "mpcore/layers/attention.py",
             "softcap=self.softcap, impl=self.impl", "softcap=None, impl=self.impl", LAYER),
    Mutation("odd head dimensions take the reference on a GPU", FILE,
             "tiled = all(1 <= dim <= WIDEST_HEAD for dim in dims)", "tiled = all(dim in (64, 128) for dim in dims)",
             KERNEL),
    Mutation("a head wider than the tiles takes the kernel", FILE,
             "WIDEST_HEAD = 256", "WIDEST_HEAD = 512", KERNEL),
    Mutation("narrow heads are too small for a matrix instruction", FILE,
             "return max(16, next_power_of_2(dim))", "return next_power_of_2(dim)", KERNEL),
    Mutation("the columns past a head are read", FILE,
             "    if CHECK and D != BLOCK_D:\n", "    if CHECK and D > BLOCK_D:\n", INTERPRETED),
]  # fmt: skip
