"""Eight-bit linear layers, broken."""

from tests.mutations import Mutation

FP8 = "tests/layers/test_fp8.py"
PRODUCTS = "mpcore/layers/products.py"

MUTATIONS = [
    Mutation("eight bits: the input's gradient isn't summed", PRODUCTS,
             "summing = start_reduce_scatter(dx.movedim(dim, 0), tp)\n            elif tp.size",
             "summing = start_reduce_scatter(dx.movedim(dim, 0) * 0.5, tp)\n            elif tp.size", FP8),
    Mutation("eight bits: tokens gathered again come in another order", PRODUCTS,
             "whole = _flat(_unmove(wait(gathering), dim or 0))", "whole = _flat(wait(gathering))", FP8),
    Mutation("eight bits: the weight's gradient from blocks along features", PRODUCTS,
             "rows, columns = quantize_fp8(_flat(whole), columns=wanted and not regather)",
             "rows, columns = quantize_fp8(_flat(whole), square=True, columns=wanted and not regather)", FP8),
    Mutation("eight bits: the weight isn't quantized in squares", PRODUCTS,
             "_given(quantize_fp8(weight, square=True)[0])", "_given(quantize_fp8(weight)[0])", FP8),
    Mutation("eight bits: the whole input is kept", PRODUCTS,
             "ctx.save_for_backward(x if wanted and regather else None, *kept, weight)",
             "ctx.save_for_backward(x, *kept, weight)", FP8),
    Mutation("eight bits: both passes of a split backward compute both products", PRODUCTS,
             "return torch._C._will_engine_execute_node(ctx.next_functions[which][0])", "return True", FP8),
    Mutation("eight bits: micro-batches are added in half precision", PRODUCTS,
             "return fp8_matmul(Quantized(dy, dy_scales), Quantized(x, x_scales), dtype, out=main)",
             "y = fp8_matmul(Quantized(dy, dy_scales), Quantized(x, x_scales), dtype)\n"
             "    return y if main is None else main.add_(y)", FP8),
    Mutation("eight bits: the head too", "mpcore/precision.py",
             "if not any(fnmatchcase(name, p) for p in skip)]", "]", FP8),
    Mutation("eight bits: tp cuts within a block", "mpcore/precision.py",
             "if edge % BLOCK and edge != sharding.shape[shard.dim]:", "if False:", FP8),
]  # fmt: skip
