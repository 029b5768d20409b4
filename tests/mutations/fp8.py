"""Eight-bit floats, broken: scales, blocks, directions and products."""

from tests.mutations import Mutation

QUANTIZE, MATMUL = "kernels/quantize_fp8.py", "kernels/fp8_matmul.py"
LAWS, INTERPRETED = "tests/kernels/test_fp8.py", "tests/kernels/interpret/test_fp8.py"

MUTATIONS = [
    Mutation("fp8: a scale too small for the largest", QUANTIZE,
             "((bits & 0x7FFFFF) > 0x600000)", "((bits & 0x7FFFFF) > 0x700000)", LAWS),
    Mutation("fp8: a NaN is quantized as if it were a number", QUANTIZE,
             "torch.where(largest.isfinite(), scale, torch.nan)", "scale", LAWS),
    Mutation("fp8: columns in the blocks of rows", QUANTIZE, "_quantize(x.t(), square) if columns",
             "Quantized(*(held.t() for held in _quantize(x, square))) if columns", LAWS),
    Mutation("fp8: a block of a weight is a row of it", QUANTIZE,
             "block_m = x.shape, BLOCK if square else 1", "block_m = x.shape, 1", LAWS),
    Mutation("fp8: rows of a turned copy begin anywhere", QUANTIZE, "ceil_div(K, 16) * 16), dtype", "K), dtype", LAWS),
    Mutation("fp8: a GPU of compute capability 8.0 is tried", QUANTIZE, "< (8, 9)", "< (8, 0)", LAWS),
    Mutation("fp8: strided rows are copied", QUANTIZE,
             "(x, stride) = x.shape, as_rows(x)", "(x, stride) = x.shape, as_rows(x.contiguous())", LAWS),
    Mutation("fp8: small batches have the tiles of large ones", MATMUL, ">= programs:", ">= 0:", LAWS),
    Mutation("fp8 kernel: a scale doubles a step too early", QUANTIZE,
             "((largest & 0x7FFFFF) > 0x600000)", "((largest & 0x7FFFFF) >= 0x600000)", INTERPRETED),
    Mutation("fp8 kernel: what is no number saturates", QUANTIZE,
             "inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000)",
             "inverse = (254 - exponent) << 23", INTERPRETED),
    Mutation("fp8 kernel: tokens past the last are read", QUANTIZE,
             "mask = (row < M)[:, None] & (col < K)[None, :]", "mask = (row >= 0)[:, None] & (col < K)[None, :]",
             INTERPRETED),
    Mutation("fp8 kernel: a row is written into the next", QUANTIZE,
             "(col < ROW_STRIDE)[None, :]", "(col < ROW_STRIDE + 1)[None, :]", INTERPRETED),
    Mutation("fp8 kernel: rows' offsets have 32 bits", QUANTIZE,
             "x_ptr + row.to(tl.int64)[:, None] * X_STRIDE", "x_ptr + row[:, None] * X_STRIDE", INTERPRETED),
    Mutation("fp8 kernel: both directions have the scales of rows", QUANTIZE,
             "tl.max(size, 0, keep_dims=True)", "tl.max(tl.trans(size), 0, keep_dims=True)", INTERPRETED),
    Mutation("fp8 product: the first scale for all of K", MATMUL,
             "a_ptrs += tl.cast(A_K, tl.int64) * block", "a_ptrs += 0", INTERPRETED),
    Mutation("fp8 product: what is left of K after whole blocks is left out", MATMUL,
             "if whole * BLOCK_K < K:", "if whole * BLOCK_K < 0:", INTERPRETED),
    Mutation("fp8 product: terms past the last are read", MATMUL,
             "left = (term < K - whole * BLOCK_K)[None, :]", "left = (term < BLOCK_K)[None, :]", INTERPRETED),
    Mutation("fp8 product: what is added to is forgotten", MATMUL,
             "        total += tl.load(y_ptrs, mask=mask, other=0.0)\n", "        pass\n", INTERPRETED),
    Mutation("fp8 product: the last group of tiles is as high as the others", MATMUL,
             "height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)", "height = GROUP", INTERPRETED),
    Mutation("fp8 product: without terms what was there stays", MATMUL, "return y.zero_()", "return y", INTERPRETED),
]  # fmt: skip
