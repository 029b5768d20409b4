"""The checks that every kernel shares, the state of main gradients, and random words, each by a table."""

import pytest
import torch

from mpcore.kernels import _main_grad, _philox
from mpcore.kernels._checks import check_beside, check_dtype, check_inputs, check_shapes, outside
from mpcore.kernels._main_grad import (
    GradientState,
    attach_main_grad,
    holds_main_grad,
    main_grad,
    main_grad_state,
    mark_main_grad,
    take_main_grad,
    will_accumulate,
)

X = torch.ones(2, 3)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS])
def test_the_dtypes_that_references_compute_in(dtype):
    if dtype in DTYPES:
        check_dtype("x", dtype)
        return
    with pytest.raises(ValueError, match=f"^x is {dtype}; it must be float64, float32, bfloat16 or float16$"):
        check_dtype("x", dtype)
    with pytest.raises(ValueError, match=f"^x is {dtype}; it must be"):
        check_inputs(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("other", [*DTYPES, torch.int32])
def test_dtypes_that_go_together(x, other):
    """Any but float64 beside a narrower one: the kernel computes in float32."""
    fits = other in DTYPES and (other != torch.float64 or x == torch.float64)
    given = torch.zeros(2, dtype=x), torch.zeros(2, dtype=other)
    if fits:
        check_beside("x", given[0], weight=given[1], none=None)
        check_inputs(given[0], given[1], weight=given[1])
        return
    with pytest.raises(ValueError, match=f"^weight is {other}, which does not go with x of {x}$"):
        check_beside("x", given[0], none=None, weight=given[1])
    with pytest.raises(ValueError, match=f"^residual is {other}, which does not go with x of {x}$"):
        check_inputs(*given)


@pytest.mark.parametrize(("given", "columns", "message"), [
    ((X[0, 0],), {}, "^x is a scalar; it needs at least one dimension$"),
    ((X, X[0]), {}, r"^residual has shape \(3,\), but x has \(2, 3\)$"),
    ((X,), {"weight": X[0, :2]}, r"^weight has shape \(2,\), but the last dimension of x is 3$"),
    ((X,), {"weight": X}, r"^weight has shape \(2, 3\), but the last dimension of x is 3$"),
    ((X,), {"weight": None, "bias": X[:, 0]}, r"^bias has shape \(2,\), but the last dimension of x is 3$"),
    ((X, X.to("meta")), {}, "^residual is on meta, but x is on cpu$"),
    ((X,), {"bias": X[0].to("meta")}, "^bias is on meta, but x is on cpu$"),
    ((X, X), {"weight": X[0], "bias": None}, None),
])  # fmt: skip
def test_inputs_beside_x(given, columns, message):
    if message is None:
        check_inputs(*given, **columns)
        return
    with pytest.raises(ValueError, match=message):
        check_inputs(*given, **columns)


def test_shapes_are_spelled_by_letters():
    assert check_shapes(x=(X, "N D"), w=(X[0], "D"), none=(None, "N N")) == {"N": 2, "D": 3}
    assert check_shapes() == {}
    assert check_shapes(s=(torch.ones(()), "")) == {}
    assert check_shapes(x=(X, "2 3")) == {"2": 2, "3": 3}
    for given, words in (
        ({"x": (X, "N N")}, r"^x \(2, 3\) are not \[N, N\]$"),
        ({"x": (X, "N")}, r"^x \(2, 3\) are not \[N\]$"),
        ({"x": (X, "N D M")}, r"^x \(2, 3\) are not \[N, D, M\]$"),
        ({"x": (X, "N D"), "none": (None, "N"), "y": (X.t(), "N D")},
         r"^x \(2, 3\), y \(3, 2\) are not \[N, D\], \[N, D\]$"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            check_shapes(**given)


@pytest.mark.parametrize(("ids", "size", "ignored", "found"), [
    ([0, 4], 5, None, None), ([0, 5], 5, None, 5), ([-1, 4], 5, None, -1), ([-1, 9], 5, None, -1),
    ([-100, 4], 5, -100, None), ([-100, 5], 5, -100, 5), ([-100, -1], 5, -100, -1), ([-100], 5, None, -100),
    ([7, 4], 5, 7, None), ([-100, 0], 1, -100, None), ([], 5, None, None), ([4], 4, None, 4),
])  # fmt: skip
def test_an_id_outside_of_the_vocabulary(ids, size, ignored, found):
    assert outside(torch.tensor(ids, dtype=torch.int64), size, ignored) == found
    assert outside(torch.tensor(ids, dtype=torch.int64).to("meta"), size, ignored) is None


def parameter(*shape, main=True):
    p = torch.nn.Parameter(torch.ones(shape))
    if main:
        attach_main_grad(p, torch.zeros(shape))
    return p


def test_the_states_of_a_main_gradient():
    p = parameter(3, main=False)
    assert (main_grad(p), main_grad(None), holds_main_grad(p), main_grad_state(p)) == (None, None, False, 0)
    buffer = torch.zeros(3)
    attach_main_grad(p, buffer)
    assert main_grad(p) is p.main_grad is buffer
    assert (holds_main_grad(p), main_grad_state(p)) == (False, GradientState.EMPTY)
    for state in (GradientState.LOCAL, GradientState.SUMMED):
        mark_main_grad(p, state)
        assert (holds_main_grad(p), main_grad_state(p)) == (True, state)
    p.grad_added_to_main_grad = True  # as Megatron's kernels mark it
    assert main_grad_state(p) is GradientState.LOCAL
    attach_main_grad(p, buffer)
    assert main_grad_state(p) is GradientState.EMPTY
    assert [*GradientState] == [0, 1, 2, 3]


class Takes(torch.autograd.Function):
    """Keeps what its backward may add to."""

    @staticmethod
    def forward(ctx, x, p, q, found):
        ctx.parameters, ctx.found = (p, q), found
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.found.append(
            (take_main_grad(ctx.parameters), *(will_accumulate(p) for p in ctx.parameters if p is not None))
        )
        return grad, grad, None if ctx.parameters[1] is None else grad, None


def test_a_backward_adds_where_it_accumulates_all_gradients():
    p, q, found = parameter(3), parameter(3), []
    x = torch.ones(3, requires_grad=True)
    assert take_main_grad(None) is None
    Takes.apply(x, p, None, found).sum().backward()
    assert found.pop() == ((p.main_grad, None), True)
    assert main_grad_state(p) is GradientState.LOCAL
    Takes.apply(x, p, q, found).sum().backward()
    assert found.pop() == ((p.main_grad, q.main_grad), True, True)
    mark_main_grad(p, GradientState.EMPTY)
    torch.autograd.grad(Takes.apply(x, p, q, found).sum(), [x, p, q])
    assert found.pop() == (None, None, None)
    torch.autograd.grad(Takes.apply(x, p, q, found).sum(), x)
    assert found.pop() == (None, False, False)  # of x alone
    assert main_grad_state(p) is GradientState.EMPTY
    frozen = parameter(3).requires_grad_(False)
    Takes.apply(x, p, frozen, found).sum().backward()
    assert found.pop() == (None, True, None)
    assert main_grad_state(p) is GradientState.EMPTY


@pytest.mark.parametrize("main", [
    torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, device="meta"), torch.zeros(6)[::2],
    torch.zeros(3).bfloat16(),
])  # fmt: skip
def test_a_place_of_another_kind_is_refused(main):
    p, x = parameter(3), torch.ones(3, requires_grad=True)
    p.main_grad = main
    words = (
        rf"main_grad is {main.dtype} \({len(main)},\) on {main.device}; for a parameter \(3,\) it must be contiguous"
    )
    with pytest.raises(ValueError, match=words):
        Takes.apply(x, p, None, []).sum().backward()
    assert _main_grad.main_grad_state(p) is GradientState.EMPTY


def test_philox_has_the_words_of_its_authors():
    """The known answers that come with Random123: of zeros, of ones, and of digits of pi."""
    ones = 2**32 - 1
    for key, counter, words in (
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones, ones), (ones,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):  # fmt: skip
        found = _philox.philox(key[0] + (key[1] << 32), *(torch.tensor([c]) for c in counter))
        assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("features", [range(8), range(1, 3), range(3, 9), range(4, 4), range(2**32 - 2, 2**32 + 3)])
@pytest.mark.parametrize("rows", [False, True])
def test_the_word_of_a_feature_is_that_of_its_place(features, rows):
    key, samples = 2**63 + 12345, torch.tensor([7, 2**40 + 1])
    tokens = torch.tensor([[0, 5, 9], [2**31, 1, 3]]) if rows else torch.tensor([0, 5, 9])
    found = _philox.random_words(key, samples, tokens, features)
    assert found.shape == (2, 3, len(features))
    assert found.dtype == torch.int64
    for b, sample in enumerate(samples.tolist()):
        for t in range(3):
            token = (tokens[b] if rows else tokens)[t]
            for i, d in enumerate(features):
                counter = (d // 4, int(token), sample % 2**32, sample // 2**32)
                words = _philox.philox(key, *(torch.tensor(c) for c in counter))
                assert found[b, t, i] == words[d % 4]


def test_thresholds_and_signed_words():
    assert [_philox.threshold_of(p) for p in (0.0, 0.25, 0.5, 1 - 2**-32)] == [0, 2**30, 2**31, 2**32 - 1]
    assert [_philox.as_int32(n) for n in (0, 2**31 - 1, 2**31, 2**32, -1)] == [0, 2**31 - 1, -(2**31), 0, -1]
