"""The kernels, broken: what only Triton's interpreter, or the launch path, can see."""

from tests.mutations import Mutation

CROSS_ENTROPY = "tests/kernels/interpret/test_cross_entropy.py"
DROPOUT = "tests/kernels/interpret/test_dropout_add.py"
GPT = "tests/kernels/interpret/test_gpt.py"
HASH = "tests/kernels/interpret/test_cross_replica_hash.py"
MAIN_GRAD = "tests/kernels/interpret/test_main_grad.py"
ROPE = "tests/kernels/interpret/test_rope.py"
LAUNCHES = "tests/kernels/test_dropout_add.py"
BYTES = "tests/kernels/test_bytes.py"
HEAD, HEAD_TESTS = "kernels/linear_cross_entropy.py", "tests/kernels/test_linear_cross_entropy.py"

MUTATIONS = [
    Mutation("19 kernel: samples share a mask", "kernels/dropout_add.py",
             "    sample = tl.load(samples_ptr + b, mask=live, other=0)",
             "    sample = tl.load(samples_ptr + b * 0, mask=live, other=0)", DROPOUT),
    Mutation("19 kernel: samples repeat after 2^32", "kernels/_philox.py",
             "(sample >> 32).to(tl.uint32)", "(sample >> 63).to(tl.uint32)", DROPOUT),
    Mutation("19 kernel: a shard's mask begins at feature 0", "kernels/dropout_add.py",
             "return 1 / (1 - p), first_feature // 4,", "return 1 / (1 - p), 0,", DROPOUT),
    Mutation("19 kernel: half of the key", "kernels/dropout_add.py",
             "as_int32(key >> 32)", "as_int32(0)", DROPOUT),
    Mutation("22 kernel: backward draws another mask", "kernels/dropout_add.py",
             "dx = tl.where(keep, dx * scale, 0.0)", "dx = tl.where(keep, 0.0, dx * scale)", DROPOUT),
    Mutation("each dropout site compiles anew", "kernels/dropout_add.py",
             'do_not_specialize=["key_low", "key_high", "threshold"])\ndef _forward_kernel',
             'do_not_specialize=["threshold"])\ndef _forward_kernel', LAUNCHES),
    Mutation("rope's gradient turns on", "kernels/_rope_kernels.py", "        sin = -sin\n", "        pass\n", ROPE),
    Mutation("rope reads keys by the strides of queries", "kernels/_rope_kernels.py",
             "rows, live, T, eps, k_stride_b, k_stride_t, k_stride_h, H,",
             "rows, live, T, eps, k_stride_b, q_stride_t, q_stride_h * 2, H,", ROPE),
    Mutation("rope forgets the norm's mean in backward", "kernels/_rope_kernels.py",
             "rstd * (gain_a * dn_a - a * dot)", "rstd * gain_a * dn_a", ROPE),
    Mutation("rope takes neighbours for halves", "kernels/_rope_kernels.py",
             "    if INTERLEAVED:\n        cols = tl.arange(0, 2 * BLOCK_R)[None, None, :]\n        both = tl.load",
             "    if False:\n        cols = tl.arange(0, 2 * BLOCK_R)[None, None, :]\n        both = tl.load", ROPE),
    Mutation("a permuted tensor has the same hash", "kernels/cross_replica_hash.py",
             "+ place.to(tl.uint64) * 0x", "+ place.to(tl.uint64) * 0 * 0x", HASH),
    Mutation("the hash leaves out the tail", "kernels/cross_replica_hash.py",
             "mask=place * 8 + byte < size, other=0", "mask=place * 8 + byte < size - 1, other=0", HASH),
    Mutation("32 kernel: autograd's gradient besides", "kernels/rms_norm.py",
             "            dweight = dweight if main is None else None\n",
             "            dweight = dweight if main is None else main[0].to(dh.dtype)\n", MAIN_GRAD),
    Mutation("32 kernel: the sum replaces the main gradient", "kernels/rms_norm.py",
             "accumulate=main_grad is not None", "accumulate=False", MAIN_GRAD),
    Mutation("32 kernel: gradients asked for aren't returned", "kernels/_main_grad.py",
             "    except RuntimeError:\n        return None", "    except RuntimeError:\n        return True",
             MAIN_GRAD),
    Mutation("4 kernel: logits are overwritten unasked", "kernels/cross_entropy.py",
             "    dlogits = _empty_backward(logits)\n    _run", "    dlogits = logits\n    _run", CROSS_ENTROPY),
    Mutation("5 kernel: smoothing sums the logits of one shard", "kernels/cross_entropy.py",
             "stats[:, 2].sum(0), stats[:, 3].sum(0)]", "stats[:, 2].sum(0), stats[0, 3]]", CROSS_ENTROPY),
    Mutation("6 kernel: exponentials without the maximum", "kernels/_cross_entropy_kernels.py",
             "shifted = z - largest[:, None]", "shifted = z", CROSS_ENTROPY),
    Mutation("8 kernel: ignored targets have a gradient", "kernels/_cross_entropy_kernels.py",
             "dx = tl.where(live, dz, 0.0)", "dx = dz", CROSS_ENTROPY),
    Mutation("9 kernel: the gradient goes through bf16", "kernels/_cross_entropy_kernels.py",
             "dx = tl.where(live, dz, 0.0)", "dx = tl.where(live, dz, 0.0).to(tl.bfloat16)", CROSS_ENTROPY),
    Mutation("each row takes the gradient of the first", HEAD,
             "{name: d[rows] for name, d", "{name: d[:1].expand_as(d[rows]) for name, d", HEAD_TESTS),
    Mutation("each row takes the statistics of the first chunk", HEAD,
             "target[rows], stats[:, rows], **of_rows", "target[rows], stats[:, : len(z)], **of_rows", HEAD_TESTS),
    Mutation("backward makes other logits than autocast's", HEAD,
             "if autocast and x.dtype != torch.float64 else x.dtype", "if False else x.dtype", HEAD_TESTS),
    Mutation("chunks of dW are added in half precision", HEAD,
             "several = x.shape[0] > self.chunk_rows", "several = False", HEAD_TESTS),
    Mutation("two chunks of logits are alive", HEAD,
             "            del dz  # before the next chunk's logits exist\n", "", "tests/layers/test_fused_loss.py"),
    Mutation("partial sums cost as much as the gradient", "kernels/dropout_add.py",
             "2 * multiprocessors(dy.device) // tiles", "64 * multiprocessors(dy.device) // tiles", BYTES),
    Mutation("a kernel of the GPT step is off", "kernels/_activation.py",
             "return z * s, s * (1.0 + z * complement)", "return z * s, s * (1.0 + z * s)", GPT),
]  # fmt: skip
