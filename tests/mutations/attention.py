"""Attention, broken: its reference, its masks, what it launches, and what the layer asks of it."""

from tests.mutations import Mutation

KERNEL = "tests/kernels/test_attention.py"
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
             '        refuse_second_derivative("attention")\n', "", KERNEL),
    Mutation("strides of 64 bits meet a kernel of 32", "kernels/_launch.py",
             ", -(2**31) <= s < 2**31)", ", True)", KERNEL),
    Mutation("views are copied before the launch", FILE,
             "x = x if x.stride(3) == 1 else x.contiguous()", "x = x.contiguous()", KERNEL),
    Mutation("KV heads of uneven shards are taken evenly", "mpcore/layers/attention.py",
             "self.kv_repeats = sizes if len(set(sizes)) > 1 else None", "self.kv_repeats = None", LAYER),
    Mutation("the layer's soft cap gets lost", "mpcore/layers/attention.py",
             "softcap=self.softcap, impl=self.impl", "softcap=None, impl=self.impl", LAYER),
]  # fmt: skip
