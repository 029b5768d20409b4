"""Attention for Hopper, broken: its masks, its sums, what it launches, and where it may run."""

from tests.mutations import Mutation

FILE = "kernels/_attention_ws.py"
LAWS = "tests/kernels/interpret/test_attention.py"
LAUNCHES = "tests/kernels/test_attention.py"

MUTATIONS = [
    Mutation("hopper: the scores lose their scale", FILE,
             "        z, unit, _ = _scores_of(tl.dot(q, k.T), scale, SOFTCAP)",
             "        z, unit, _ = _scores_of(tl.dot(q, k.T), 1.0, SOFTCAP)", LAWS),
    Mutation("hopper: a query sees the next key", FILE,
             "        return keys <= queries\n", "        return keys <= queries + 1\n", LAWS),
    Mutation("hopper: the key that ends a run is seen", FILE,
             "return (first <= queries) & (queries < past)", "return (first <= queries) & (queries <= past)", LAWS),
    Mutation("hopper: what was summed keeps its old base", FILE,
             "acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])", "acc = tl.dot(p.to(v.dtype), v, acc)", LAWS),
    Mutation("hopper: queries of a group go to other KV heads", FILE,
             "        v_ptr += batch * v_batch + head // GROUP * v_head\n",
             "        v_ptr += batch * v_batch + head % (H // GROUP) * v_head\n", LAWS),
    Mutation("hopper: a persistent program stays in the first sequence", FILE,
             "(batch * v_batch + head // GROUP * v_head).to", "(head // GROUP * v_head).to", LAWS),
    Mutation("hopper: lse is the largest score alone", FILE,
             "largest * LN_2 + tl.log(total), mask", "largest * LN_2, mask", LAWS),
    Mutation("hopper: columns past 32 bits wrap", FILE,
             "if tile.persistent and all(_columns(x) < 2**31 for x in (q, k, v)):", "if tile.persistent:", LAUNCHES),
    Mutation("hopper: the last block of keys is left out", FILE,
             "        return 0, tl.minimum(start + BLOCK_M, KEYS)\n",
             "        return 0, tl.minimum(start + BLOCK_M, KEYS) - BLOCK_N // 2\n", LAWS),
    Mutation("hopper: keys take their queries by the wrong side", FILE,
             "high.clamp(max=keys).contiguous(), index, right=True",
             "high.clamp(max=keys).contiguous(), index, right=False", LAUNCHES),
    Mutation("hopper: what lies past the last key is seen", FILE, "high.clamp(max=keys)", "high", LAUNCHES),
    Mutation("hopper: the second part of lse gets lost", FILE,
             "tl.where(part == 1, middle.to(tl.float32)[:, None], tl.where", "tl.where(part == 1, 0.0, tl.where", LAWS),
    Mutation("hopper: the heads of a group add the same gradient", FILE,
             "q = q_rows.load([row, head * q_head])", "q = q_rows.load([row, 0 * head * q_head])", LAWS),
    Mutation("hopper: the gradient of lse gets lost", "kernels/attention.py",
             "        delta -= tl.load(dlse_ptr", "        delta -= 0.0 * tl.load(dlse_ptr", LAWS),
    Mutation("hopper: the gradient of the soft cap gets lost", FILE,
             "            ds *= slope\n        dq =", "            ds *= 1.0\n        dq =", LAWS),
    Mutation("hopper: rows at odd addresses are taken as they are", FILE,
             "fits = x.data_ptr() % 16 == 0 and all", "fits = all", LAUNCHES),
    Mutation("hopper: an allocator of the user is replaced", FILE,
             "    if isinstance(allocation._allocator.get(), allocation.NullAllocator):\n        allocation.set",
             "    if True:\n        allocation.set", LAUNCHES),
    Mutation("hopper: other GPUs are not refused", "kernels/attention.py",
             "if (device.major, device.minor) != (9, 0) or", "if device.major != 9 or", LAUNCHES),
]  # fmt: skip
