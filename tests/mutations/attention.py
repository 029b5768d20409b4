"""Attention, broken: its reference, its masks, what it launches, and what the layer asks of it."""

from tests.mutations import Mutation

KERNEL = "tests/kernels/test_attention.py"
INTERPRETED = "tests/kernels/interpret/test_attention.py"
LAYER = "tests/layers/test_attention.py"
PACKAGE = "kernels/attention/"
REFERENCE, FORWARD, BACKWARD = (PACKAGE + name for name in ("reference.py", "forward.py", "backward.py"))
INTERFACE, TILES = PACKAGE + "interface.py", PACKAGE + "tiles.py"

MUTATIONS = [
    Mutation("37 blocks keep lse in the inputs' dtype", FORWARD,
             "    exact = torch.promote_types(query.dtype, torch.float32)\n    return query.new_empty((B, T, H,",
             "    exact = query.dtype\n    return query.new_empty((B, T, H,", KERNEL),
    Mutation("the gradient of lse gets lost", REFERENCE,
             "            delta -= dlse.to(q.dtype)", "            delta -= 0 * dlse.to(q.dtype)", KERNEL),
    Mutation("the gradient of the soft cap gets lost", REFERENCE,
             "return softcap * tanh, 1 - tanh.square()", "return softcap * tanh, None", KERNEL),
    Mutation("a query that sees nothing spreads NaN", REFERENCE,
             "rows_lse.masked_fill(nothing, math.inf), delta.masked_fill(nothing, 0)", "rows_lse, delta", KERNEL),
    Mutation("keys on the left stay hidden from nobody", REFERENCE,
             "if starts[last] > start:", "if starts[last] > start and False:", KERNEL),
    Mutation("a chunk forgets the keys of its last query", REFERENCE,
             "rows, start, end = slice(first, last + 1), starts[first], ends[last]",
             "rows, start, end = slice(first, last + 1), starts[first], ends[first]", KERNEL),
    Mutation("the output is not divided where chunks are small", REFERENCE,
             ".div_(total.masked_fill(total == 0, 1))", "", KERNEL),
    Mutation("bounds may fall", REFERENCE,
             "if bool((low.diff() < 0).any()) or bool((high.diff() < 0).any()):",
             "if bool((low.diff() < 0).any()):", KERNEL),
    Mutation("a second derivative of attention comes out wrong", INTERFACE,
             '        refuse_second_derivative("attention", "torch.nn.functional.scaled_dot_product_attention")\n', "",
             KERNEL),
    Mutation("strides of 64 bits meet a kernel of 32", "kernels/_triton.py",
             ", -(2**31) <= s < 2**31)", ", True)", KERNEL),
    Mutation("views are copied before the launch", TILES,
             "x = x if x.stride(3) == 1 else x.contiguous()", "x = x.contiguous()", KERNEL),
    Mutation("KV heads of uneven shards are taken evenly", "mpcore/layers/attention.py",
             "self.kv_repeats = sizes if len(set(sizes)) > 1 else None", "self.kv_repeats = None", LAYER),
    Mutation("the layer's soft cap gets lost", "mpcore/layers/attention.py",
             "softcap=self.softcap, impl=self.impl", "softcap=None, impl=self.impl", LAYER),
    Mutation("odd head dimensions take the reference on a GPU", INTERFACE,
             "tiled = all(1 <= dim <= WIDEST_HEAD for dim in dims)", "tiled = all(dim in (64, 128) for dim in dims)",
             KERNEL),
    Mutation("a head wider than the tiles takes the kernel", TILES,
             "WIDEST_HEAD = 256", "WIDEST_HEAD = 512", KERNEL),
    Mutation("narrow heads are too small for a matrix instruction", TILES,
             "return max(16, next_power_of_2(dim))", "return next_power_of_2(dim)", KERNEL),
    Mutation("the columns past a head are read", TILES,
             "    if CHECK and D != BLOCK_D:\n", "    if CHECK and D > BLOCK_D:\n", INTERPRETED),
    Mutation("kernel: the scores lose their scale", TILES,
             "return products, scale * LOG2_E, 1.0", "return products, LOG2_E, 1.0", INTERPRETED),
    Mutation("kernel: a query sees the next key", PACKAGE + "bounds.py",
             "        return keys <= queries\n", "        return keys <= queries + 1\n", INTERPRETED),
    Mutation("kernel: what was summed keeps its old base", FORWARD,
             "acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None]", "acc = tl.dot(p.to(v.dtype), v, acc", INTERPRETED),
    Mutation("kernel: queries of a group go to other KV heads", FORWARD,
             "    v_ptr += batch * v_batch + head // GROUP * v_head\n",
             "    v_ptr += batch * v_batch + head % (H // GROUP) * v_head\n", INTERPRETED),
    Mutation("kernel: lse is the largest score alone", FORWARD,
             "largest * LN_2 + tl.log(total), mask", "largest * LN_2, mask", INTERPRETED),
    Mutation("kernel: the heads of a group add the same gradient", BACKWARD,
             "load_rows(q_ptr + head * q_head, queries", "load_rows(q_ptr + 0 * head * q_head, queries", INTERPRETED),
    Mutation("kernel: the gradient of lse gets lost", BACKWARD,
             "        delta -= tl.load(dlse_ptr", "        delta -= 0.0 * tl.load(dlse_ptr", INTERPRETED),
    Mutation("kernel: the gradient of the soft cap gets lost", BACKWARD,
             "            ds *= slope\n        dq =", "            ds *= 1.0\n        dq =", INTERPRETED),
]  # fmt: skip
