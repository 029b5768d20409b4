"""dropout_add without a GPU: the reference, bad input, and what would be launched."""

import pytest
import torch
from fake_gpu import calls, fake_gpu

from mpcore.kernels.dropout_add import dropout_add

X, SAMPLES = torch.randn(2, 3, 8), torch.tensor([4, 9])


def test_the_reference_is_the_formula():
    x, residual, bias = X.double(), torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    keep = dropout_add(torch.ones_like(x), None, 0.4, key=5, samples=SAMPLES) != 0
    wanted = residual + keep * (x + bias) / 0.6
    torch.testing.assert_close(dropout_add(x, residual, 0.4, key=5, samples=SAMPLES, bias=bias), wanted)
    torch.testing.assert_close(dropout_add(x, residual, 0.0, bias=bias), x + bias + residual)
    assert dropout_add(X, None, 0.0) is X


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_rounds_once(dtype):
    where = {"key": 5, "samples": SAMPLES, "bias": torch.randn(8)}
    found = dropout_add(X.to(dtype), X.to(dtype), 0.3, **where)
    assert torch.equal(found, dropout_add(X.to(dtype).float(), X.to(dtype).float(), 0.3, **where).to(dtype))


def test_the_reference_runs_under_torchs_own_autograd():
    inputs = [t.requires_grad_() for t in torch.randn(2, 2, 3, 4, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(lambda x, r: dropout_add(x, r, 0.5, key=1, samples=SAMPLES), inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 1.0}, r"dropout probability 1.0 is not in \[0, 1\)"),
        ({"p": -0.1}, r"dropout probability -0.1 is not in"),
        ({"residual": X[0]}, r"residual has shape \(3, 8\), but x has \(2, 3, 8\)"),
        ({"bias": torch.ones(7)}, r"bias has shape \(7,\), but the last dimension of x is 8"),
        ({"x": X[0]}, r"x \(3, 8\), samples \(2,\).* are not \[B, T, D\], \[B\]"),
        ({"samples": None}, "dropout needs samples"),
        ({"samples": torch.arange(3)}, r"x \(2, 3, 8\), samples \(3,\).* are not \[B, T, D\], \[B\]"),
        ({"samples": SAMPLES.int()}, "samples is torch.int32 on cpu; it must be int64 on cpu"),
        ({"tokens": SAMPLES}, r"tokens \(2,\) are not \[B, T, D\], \[B\], \[T\]"),
        ({"tokens": torch.arange(3, device="meta")}, "tokens is torch.int64 on meta; it must be int64 on cpu"),
        ({"samples": SAMPLES.to("meta")}, "samples is torch.int64 on meta; it must be int64 on cpu"),
        ({"tokens": torch.arange(3).int()}, "tokens is torch.int32 on cpu; it must be int64 on cpu"),
        ({"residual": X.int()}, "residual is torch.int32, which does not go with x"),
        ({"bias": torch.ones(8).to("meta")}, "bias is on meta, but x is on cpu"),
        ({"sequence_dim": -1}, "sequence_dim -1 is neither 0 nor 1"),
        ({"sequence_dim": 2}, "sequence_dim 2 is neither 0 nor 1"),
        ({"sequence_dim": 0}, r"x \(2, 3, 8\), samples \(2,\).* are not \[T, B, D\], \[B\]"),
        ({"x": X.long()}, "x is torch.int64"),
        ({"impl": "triton"}, "impl='triton', but x is on cpu"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        dropout_add(**{"x": X, "residual": None, "p": 0.5, "samples": SAMPLES} | arguments)


@pytest.mark.slow
def test_inductor_draws_the_same_mask_for_any_key():
    x, samples = torch.ones(2, 3, 9), torch.arange(2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda key: dropout_add(x, None, 0.5, key=key, samples=samples), fullgraph=True)
    for key in (0xA0000000, 2**63 - 1, 2**64 - 5):
        assert torch.equal(compiled(key), dropout_add(x, None, 0.5, key=key, samples=samples))


def launched(B, T, D, p=0.1, bias=None, key=3, residual=True, dtype=torch.bfloat16):
    x, samples = torch.empty(B, T, D, dtype=dtype), torch.zeros(B, dtype=torch.int64)
    with fake_gpu() as launches:
        y = torch.ops.mpcore.dropout_add_forward(x, x if residual else None, bias, samples, None, p, key, 0, 1)
        torch.ops.mpcore.dropout_add_backward(y, bias, dtype, samples, None, p, key, 0, 1)
    return launches


KEY = (2**31 - 1) * 2**32 + 5
# By D, first feature and whether there is a bias: a tile begins at a multiple of four features, so that a shard that
# begins at feature 4 n + 3 has three columns before it.
DROPPED = [
    (4096, 0, False, (2, 1, 2048), 2000, None),
    (4096, 3, False, (3, 1, 2048), 2000, None),
    (4096, 0, True, (2, 1, 2048), 2000, 132),  # two programs on each multiprocessor, for two tiles
    (100, 7, True, (1, 16, 128), 125, 125),
    (64, 8, True, (1, 32, 64), 63, 63),
    (20000, 0, True, (10, 1, 2048), 2000, 26),
]


@pytest.mark.parametrize(("D", "first", "has_bias", "tile", "blocks", "groups"), DROPPED)
@pytest.mark.parametrize("sequence_dim", [0, 1])
def test_launches(D, first, has_bias, tile, blocks, groups, sequence_dim):
    shape = (4, 500) if sequence_dim else (500, 4)
    x, dy = torch.empty(2000, D + 8).bfloat16()[:, :D].unflatten(0, shape), torch.empty(*shape, D).bfloat16()
    stream, bias = torch.empty(2000, D + 16)[:, :D].unflatten(0, shape), torch.empty(D) if has_bias else None
    samples, tokens = torch.zeros(8, dtype=torch.int64)[::2], torch.zeros(500, dtype=torch.int64)
    where = samples, tokens, 0.25, KEY, first, sequence_dim
    with calls() as launches:
        y = torch.ops.mpcore.dropout_add_forward(x, stream, bias, *where)
        dx, dbias = torch.ops.mpcore.dropout_add_backward(dy, bias, torch.bfloat16, *where)
    forward, backward, *total = launches
    shared = {
        "M": 2000, "inner": shape[1], "scale": 1 / 0.75, "first_counter": first // 4, "key_low": 5,
        "key_high": 2**31 - 1, "threshold": 2**30, "D": D, "SHIFT": first % 4, "SEQUENCE_DIM": sequence_dim,
        "DROPS": True, "TILES": tile[0], "BLOCK_M": tile[1], "BLOCK_D": tile[2],
    }  # fmt: skip
    held = {"bias"} if has_bias else set()
    assert (forward.kernel, forward.grid, forward.warps) == ("forward_kernel", (tile[0] * blocks, 1, 1), 4)
    assert forward.numbers == shared | {"X_STRIDE": D + 8, "RESIDUAL_STRIDE": D + 16}
    assert forward.given == {"x", "residual", "samples", "tokens", "y"} | held
    assert [forward.at(name) for name in ("x", "residual", "tokens", "y")] == [
        t.data_ptr() for t in (x, stream, tokens, y)
    ]
    assert forward.arguments["samples_ptr"].is_contiguous()
    assert (y.dtype, dx.dtype, y.shape, dx.shape) == (torch.float32, torch.bfloat16, x.shape, x.shape)
    grid = tile[0] * (blocks if groups is None else groups)
    assert (backward.kernel, backward.grid, backward.warps) == ("backward_kernel", (grid, 1, 1), 4)
    assert backward.numbers == shared | {"DY_STRIDE": D, "STAGES": 3 if has_bias else 1}
    assert backward.given == {"dy", "dx", "samples", "tokens"} | ({"partials"} if has_bias else set())
    assert [backward.at("dy"), backward.at("dx")] == [dy.data_ptr(), dx.data_ptr()]
    if has_bias:
        assert (dbias.shape, dbias.dtype) == ((D,), torch.float32)
        assert backward.arguments["partials_ptr"].shape == (1, groups, D)
        assert (total[0].at("partials"), total[0].at("first")) == (backward.at("partials"), dbias.data_ptr())
    assert (len(total), dbias.numel()) == (has_bias, D * has_bias)


def test_launches_without_dropout():
    """Then rows have no samples: any number of dimensions is one."""
    x, bias = torch.empty(6, 8), torch.empty(8)
    with calls() as launches:
        y = torch.ops.mpcore.dropout_add_forward(x, None, bias, None, None, 0.0, 3, 0, 1)
        torch.ops.mpcore.dropout_add_backward(y, bias, torch.float32, None, None, 0.0, 3, 0, 1)
        assert torch.ops.mpcore.dropout_add_forward(x[:0], x[:0].double(), None, None, None, 0.0, 3, 0, 1).shape == (
            0,
            8,
        )
        torch.ops.mpcore.dropout_add_backward(x[:, :0], None, torch.float32, None, None, 0.0, 3, 0, 1)
    forward, backward, _ = launches
    for launch, given in ((forward, {"x", "bias", "y"}), (backward, {"dy", "dx", "partials"})):
        found = launch.numbers
        assert launch.given == given
        assert (found["inner"], found["scale"], found["threshold"], found["DROPS"]) == (1, 1.0, 0, False)
    assert (forward.numbers["RESIDUAL_STRIDE"], y.dtype) == (0, torch.float32)


KEEP = dropout_add(torch.ones(2, 3, 8), None, 0.5, key=5, samples=SAMPLES) != 0


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True), ({"key": 6}, False), ({"samples": SAMPLES + 1}, False), ({"tokens": torch.arange(3)}, True),
        ({"tokens": torch.arange(3) + 1}, False), ({"first_feature": 4}, False), ({"sequence_dim": 1}, True),
        ({"key": 5 + 2**63}, False),
    ],
)  # fmt: skip
def test_every_part_of_a_place_changes_the_mask_and_defaults_are_what_they_say(changes, same):
    """The key is 0 by default, tokens count from 0, and features from 0."""
    where = {"key": 5, "samples": SAMPLES} | changes
    assert torch.equal(dropout_add(torch.ones(2, 3, 8), None, 0.5, **where) != 0, KEEP) == same
    defaults = dropout_add(torch.ones(2, 3, 8), None, 0.5, samples=SAMPLES)
    assert torch.equal(defaults, dropout_add(torch.ones(2, 3, 8), None, 0.5, samples=SAMPLES, key=0, first_feature=0))
    turned = dropout_add(torch.ones(3, 2, 8), None, 0.5, key=5, samples=SAMPLES, sequence_dim=0)
    assert torch.equal(turned.transpose(0, 1) != 0, KEEP)


def test_a_shard_of_features_or_tokens_has_its_part_of_the_mask():
    x = torch.ones(2, 7, 23)
    whole = dropout_add(x, None, 0.5, key=5, samples=SAMPLES)
    for first in (0, 1, 2, 3, 4, 22):
        part = dropout_add(x[..., first:], None, 0.5, key=5, samples=SAMPLES, first_feature=first)
        assert torch.equal(part, whole[..., first:])
    part = dropout_add(x[:, 3:], None, 0.5, key=5, samples=SAMPLES, tokens=torch.arange(3, 7))
    assert torch.equal(part, whole[:, 3:])


def test_sites_share_their_compiled_kernels():
    """A key is data: not even one that is 1, or a multiple of 16, makes Triton compile anew."""
    kernels = {
        launch.kernel.hash for key in (1, 3, 16, 2**40, 2**62 + 16, 5 << 32) for launch in launched(1, 2, 64, key=key)
    }
    assert len(kernels) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_draws_the_same_mask(dtype):
    x, residual = torch.randn(2, 33, 1001, dtype=dtype), torch.randn(2, 33, 1001, dtype=dtype)
    where = {"key": 2**62 + 3, "first_feature": 5}
    found = dropout_add(x.cuda(), None, 0.3, samples=SAMPLES.cuda(), **where)
    assert torch.equal(found.cpu(), dropout_add(x, None, 0.3, samples=SAMPLES, **where))
    added = dropout_add(x.cuda(), residual.cuda(), 0.3, samples=SAMPLES.cuda(), **where)
    torch.testing.assert_close(added.cpu(), dropout_add(x, residual, 0.3, samples=SAMPLES, **where))
