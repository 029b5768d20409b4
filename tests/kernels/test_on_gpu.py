"""What of the kernels only a GPU shows: the same bits each time, CUDA graphs, and more than 2^31 elements."""

import functools

import laws
import pytest
import torch

from bench.cases import KERNELS
from mpcore.kernels import use_kernels
from mpcore.kernels.activation import relu_squared, relu_squared_reference, swiglu, swiglu_reference
from mpcore.kernels.attention import attention, attention_reference
from mpcore.kernels.fp8_matmul import fp8_matmul
from mpcore.kernels.grouped_linear import grouped_linear
from mpcore.kernels.layer_norm import layer_norm, layer_norm_reference
from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_unpermute
from mpcore.kernels.quantize_fp8 import quantize_fp8
from mpcore.kernels.rms_norm import rms_norm, rms_norm_reference
from tests.kernels.interpret import test_cross_entropy as of_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
M, D, T, V = 3000, 1000, 500, 5000  # more rows than a GPU has programs at a time
F32, BF16 = torch.float32, torch.bfloat16
BEYOND = 2**31


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield


def draw(*shape, dtype=BF16):
    return laws.drawn(torch.randn, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def numbers(end, *shape):
    return laws.drawn(torch.randint, 0, end, shape, generator=torch.Generator().manual_seed(end))


def of(function, **fixed):
    return functools.partial(function, impl="triton", **fixed)


def torchs(impl):
    """Where the product is torch's own."""
    return None if impl == "triton" else impl


def experts(x, weight, w, chosen, impl):
    row, counts = moe_rows(chosen, len(w), impl=impl)
    y = grouped_linear(moe_permute(x, row, chosen.numel(), impl=impl), w, counts, impl=torchs(impl))
    return moe_unpermute(y, row, weight, impl=impl)


def cross_entropy(rows, V):
    options = {"target": numbers(V, rows), **of_cross_entropy.ALL}
    return functools.partial(of_cross_entropy.kernels, **options), {"logits": draw(rows, V)}


def mixture(F):
    x = {"x": draw(M, 256), "weight": draw(M, 2, dtype=F32), "w": draw(8, F, 256)}
    return of(experts, chosen=numbers(8, M, 2)), x


def eight_bits(x, weight, impl):
    """Bytes and scales both ways, and the product of one."""
    (a, turned), (b, _) = quantize_fp8(x, columns=True, impl=impl), quantize_fp8(weight, square=True, impl=impl)
    held = [part for q in (a, turned, b) for part in (q.values.view(torch.uint8), q.scales)]
    return *held, fp8_matmul(a, b, impl=torchs(impl))


def row(name, more=dict, **sizes):
    """A row of `bench.cases` by Triton, with `more` inputs or other ones."""
    kernel = KERNELS[name]
    inputs = kernel.inputs(sizes, BF16, torch.get_default_device()) | more()
    named = {name for name, x in inputs.items() if any(x is y for y in kernel.differentiable(inputs))}

    def run(**leaves):
        with use_kernels("triton"):
            return kernel.ours(**inputs | leaves)

    return run, {name: x for name, x in inputs.items() if name in named}


# What runs, and the tensors that it differentiates, if any.
CASES = {
    "rms_norm": lambda: row("rms_norm", M=M, D=D), "rms_norm of wide rows": lambda: row("rms_norm", M=300, D=16384),
    "layer_norm": lambda: row("layer_norm", lambda: {"residual": draw(M, D)}, M=M, D=D),
    "layer_norm of wide rows": lambda: row("layer_norm", M=300, D=12288),
    **{name: functools.partial(row, name, M=M, F=D) for name in ("swiglu", "geglu", "relu_squared")},
    "cross_entropy": lambda: cross_entropy(M, V),
    **{name: functools.partial(row, name, lambda: {"chunk_rows": M // 2}, M=M, D=256, V=V)
       for name in ("linear_cross_entropy", "linear_log_prob")},
    "rope": lambda: row("rope", lambda: {"q_weight": draw(64), "k_weight": draw(64)}, B=2, T=T, H=8, Hkv=2, K=64),
    "dropout_add": lambda: row("dropout_add", lambda: {"key": 2**40}, B=3, T=M // 3, D=D),
    "moe_permute and grouped_linear": lambda: mixture(304),
    "attention": lambda: (
        of(attention, window=T // 2),
        {"query": draw(2, T, 8, 96), "key": draw(2, T, 2, 96), "value": draw(2, T, 2, 96)},
    ),
    "quantize_fp8 and fp8_matmul": lambda: (torch.no_grad()(of(eight_bits)), {"x": draw(M, D), "weight": draw(D, D)}),
}  # fmt: skip


def passes(function, inputs):
    """Outputs, and gradients of half the sum of their squares."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    differentiable = [y for y in outputs if y.requires_grad]
    if not differentiable:
        return outputs
    gradients = torch.autograd.grad(differentiable, list(leaves.values()), [y.detach() for y in differentiable])
    return *outputs, *gradients


def check_same(found, wanted):
    assert len(found) == len(wanted)
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours, theirs), i


@pytest.mark.parametrize("name", CASES)
def test_every_run_gives_the_same_bits(name):
    function, inputs = CASES[name]()
    wanted = passes(function, inputs)
    for _ in range(3):
        check_same(passes(function, inputs), wanted)


@pytest.mark.parametrize("name", CASES)
def test_a_cuda_graph_replays_both_passes(name):
    """On what its inputs hold by then."""
    function, inputs = CASES[name]()
    passes(function, inputs)  # compiles, which a graph can't capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = passes(function, inputs)
    for _ in range(2):
        graph.replay()
        check_same(found, passes(function, inputs))
        for x in inputs.values():
            x.copy_(x.flip(-1))


def need(elements):
    laws.need_memory(16 * elements)  # both ways in bfloat16, with copies, guards and what looks at them


def rows_around(*widths):
    """As many rows as have 2^31 elements of the narrowest width and some, and which of them are tried."""
    rows = BEYOND // min(widths) + 5
    need(rows * sum(widths))
    edges = (0, *(BEYOND // width for width in widths), rows - 2)
    return rows, torch.tensor(sorted({edge + i for edge in edges for i in (0, 1)}))


def among(rows, where, function):
    """`function` of a tensor of many rows, of which those at `where` are given."""

    def only_there(y):
        assert y.count_nonzero() == y.index_select(0, where).count_nonzero()

    def call(**arguments):
        name, x = next(iter(arguments.items()))
        whole = x.new_zeros((rows, *x.shape[1:])).index_copy(0, where, x)
        whole.register_hook(only_there)
        y = function(**arguments | {name: whole})
        only_there(y.detach())
        return y.index_select(0, where)

    return call


def many_tokens(rows, where):
    def call(logits, target):
        return of_cross_entropy.kernels(logits, torch.full((rows,), -100).index_copy(0, where, target))

    return call


def packed(function, **how):
    return lambda x: function(*x.split(8, 2), **how)[0]


# Kernel, reference, the shape of a row, the widths that matter, and what else there is.
GIANTS = {
    "rms_norm": (of(rms_norm), rms_norm_reference, (4096,), (4096,), {"weight": (4096,)}),
    "layer_norm": (of(layer_norm, bias=None), functools.partial(layer_norm_reference, bias=None),
                   (4096,), (4096,), {"weight": (4096,)}),
    "swiglu": (of(swiglu), swiglu_reference, (2 * 4096,), (2 * 4096, 4096), {}),
    "relu_squared": (of(relu_squared), relu_squared_reference, (4096,), (4096,), {}),
    "attention": (packed(attention, impl="triton"), packed(attention_reference), (16, 24, 64), (16 * 24 * 64,), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", GIANTS)
def test_errors_among_more_than_2_31_elements(name):
    kernel, reference, row, widths, others = GIANTS[name]
    rows, where = rows_around(*widths)
    inputs = {"x": draw(len(where), *row)} | {name: draw(*shape) for name, shape in others.items()}
    laws.check_errors(among(rows, where, kernel), reference, inputs)


def test_errors_of_cross_entropy_among_more_than_2_31_logits():
    width = 128256
    rows, where = rows_around(width)
    kernel = among(rows, where, many_tokens(rows, where))
    inputs, target = {"logits": draw(len(where), width)}, numbers(width, len(where))
    laws.check_errors(kernel, of_cross_entropy.truth, inputs, target=target)


def test_bits_of_quantize_fp8_among_more_than_2_31_elements():
    """Blocks of rows at both ends and around the edge, where they lie and where they lie turned; elsewhere it is 0."""
    width = 4096
    rows = BEYOND // width + 256
    need(rows * width)
    x = torch.zeros(rows, width, dtype=BF16)
    given = [slice(start, start + 128) for start in (0, BEYOND // width - 128, BEYOND // width, rows - 128)]
    for i, part in enumerate(given):
        x[part] = draw(128, width) * 2**i
    q, turned = quantize_fp8(x, columns=True)
    for part in given:
        one, other = quantize_fp8(x[part].clone(), columns=True)
        check_same((q.values[part].view(torch.uint8), q.scales[part]), (one.values.view(torch.uint8), one.scales))
        found = turned.values[:, part].view(torch.uint8), turned.scales[:, part.start // 128, None]
        check_same(found, (other.values.view(torch.uint8), other.scales))
    assert q.values.view(torch.uint8).count_nonzero() == sum(
        q.values[p].view(torch.uint8).count_nonzero() for p in given
    )
