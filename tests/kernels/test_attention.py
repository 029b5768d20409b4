"""attention without a GPU: the reference, bad input, and what would be launched; on a GPU also the kernels."""

import math
from types import SimpleNamespace

import laws
import pytest
import torch
from fake_gpu import calls, fake_gpu
from torch.utils.flop_counter import FlopCounterMode

from mpcore.kernels._torch import sdpa_backward, sdpa_forward
from mpcore.kernels.attention import attention, reference, tiles
from mpcore.kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tests.oracles.attention import attend, sees

T = 23
ENDS = torch.tensor([0, 5, 5, 6, T])
MASKS = {
    "causal": {}, "full": {"causal": False}, "window": {"window": 4}, "packed": {"cu_seqlens": ENDS},
    "packed full": {"cu_seqlens": ENDS, "causal": False}, "packed window": {"cu_seqlens": ENDS, "window": 3},
    "bounds": {"bounds": (torch.arange(T).int() // 4 * 4 - 6, torch.arange(T).int() // 2 * 3 - 4)},
}  # fmt: skip


def draw(T=T, H=4, groups=2, K=6, V=5, B=1, keys=None, dtype=torch.float64):
    keys = T if keys is None else keys
    generator = torch.Generator().manual_seed(T + H)
    shapes = (B, T, H, K), (B, keys, groups, K), (B, keys, groups, V)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def dense(query, key, value, scale=None, softcap=None, **mask):
    mask = {"ends" if name == "cu_seqlens" else name: value for name, value in mask.items()}
    return attend(query, key, value, sees(query.shape[1], keys=key.shape[1], **mask), scale=scale, softcap=softcap)


def finite(pair):
    output, lse = pair
    return output, torch.where(lse.detach() == -math.inf, 0.0, lse)


@pytest.mark.parametrize("chunk", [reference.CHUNK_SCORES, 100])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_is_the_formula(mask, softcap, chunk, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_SCORES", chunk)
    check_formula(draw(B=1 if "packed" in mask else 2), **MASKS[mask], softcap=softcap)


@pytest.mark.parametrize(("groups", "keys"), [(2, T), (4, 5)])
def test_torchs_own_kernel_is_the_formula_with_a_gradient_of_lse(groups, keys):
    inputs, how = draw(B=2, groups=groups, V=6, keys=keys), {"impl": "torch", "causal": keys == T}
    check_formula(inputs, how["impl"], causal=how["causal"])
    laws.check_compiles(attention, dict(zip(("query", "key", "value"), inputs, strict=True)), **how)
    assert [y.shape for y in attention(*(x[:, :0] for x in inputs), **how)] == [(2, 0, 4, 6), (2, 4, 0)]


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_torchs_operators_of_a_gpu_take_what_they_are_given(backend):
    q, k, v = (x.bfloat16().to("meta").transpose(1, 2) for x in draw(B=2, K=8, V=8, keys=5))
    output, lse = sdpa_forward(backend, q, k, v, False, 0.3)
    gradients = sdpa_backward(backend, output, q, k, v, output, lse, False, 0.3)
    assert [x.shape for x in (output, lse, *gradients)] == [q.shape, q.shape[:3], q.shape, k.shape, v.shape]


def check_formula(inputs, impl=None, **options):
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    options["scale"] = 0.9
    found, wanted = finite(attention(*ours, **options, impl=impl)), dense(*theirs, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradients = [torch.randn_like(y) for y in wanted]
    torch.autograd.backward(found, gradients)
    torch.autograd.backward(wanted, gradients)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-11, atol=1e-12)


def test_gradients_of_output_or_lse_alone():
    inputs = [x.requires_grad_() for x in draw(5, 2, 1, 3, 2)]
    torch.autograd.gradcheck(lambda *x: attention(*x)[1], inputs)
    torch.autograd.gradcheck(lambda *x: attention(*x)[0], inputs)


def test_a_query_that_sees_nothing():
    inputs = [x.requires_grad_() for x in draw(6)]
    bounds = (torch.zeros(6, dtype=torch.int32), torch.tensor([0, 0, 0, 1, 2, 2], dtype=torch.int32))
    output, lse = attention(*inputs, bounds=bounds)
    assert not output[:, :3].any()
    assert lse.isneginf().tolist() == [[[True] * 3 + [False] * 3] * 4]
    torch.autograd.backward((output, lse), [torch.ones_like(output), torch.where(lse.isfinite(), 1.0, math.nan)])
    assert all(x.grad.isfinite().all() for x in inputs)
    assert not inputs[0].grad[:, :3].any()
    assert not any(x.grad[:, 2:].any() for x in inputs[1:])


def test_autocast_takes_its_dtype():
    inputs = draw(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, lse = attention(*inputs)
    wanted = attention(*(x.bfloat16() for x in inputs))
    assert torch.equal(output, wanted[0])
    assert torch.equal(lse, wanted[1])


def test_second_derivatives_are_refused():
    inputs = [x.requires_grad_() for x in draw()]
    with pytest.raises(RuntimeError, match=r"no second derivative; use .*scaled_dot_product_attention"):
        torch.autograd.grad(attention(*inputs)[0].sum(), inputs, create_graph=True)


def test_flops_are_those_of_the_products():
    q, k, v = (x.requires_grad_() for x in draw(8, 4, 2, 6, 5, B=3))
    with FlopCounterMode(display=False) as counter:
        output, _ = attention(q, k, v)
        forward = counter.get_total_flops()
        output.sum().backward()
    pairs = 3 * 4 * 8 * 8
    assert forward == 2 * pairs * (6 + 5)
    assert counter.get_total_flops() - forward == 2 * pairs * (3 * 6 + 2 * 5)


def test_flops_of_linear_cross_entropy_are_counted_by_its_products():
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, weight, torch.zeros(6, dtype=torch.int64), torch.ones(6)).backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 4 * 9
    for chunk_rows, products in ((3, 4), (6, 3)):  # a single chunk of logits is kept
        with FlopCounterMode(display=False) as counter:
            sum(linear_log_prob(x, weight, torch.zeros(6, dtype=torch.int64), chunk_rows=chunk_rows)).sum().backward()
        assert counter.get_total_flops() == products * 2 * 6 * 4 * 9


@pytest.mark.parametrize(("change", "options", "message"), [
    ({"query": (1, 8, 6)}, {}, r"query \(1, 8, 6\).*are not \[B, Tq, H, K\]"),
    ({"query": (2, 8, 4, 6)}, {}, r"query \(2, 8, 4, 6\), key \(1, 8, 2, 6\).*are not \[B, Tq, H, K\]"),
    ({"key": (1, 8, 2, 7)}, {}, r"are not \[B, Tq, H, K\]"), ({"value": (1, 9, 2, 6)}, {}, r"are not \[B, Tq, H, K\]"),
    ({"query": (1, 8, 5, 6)}, {}, "5 query heads are not a multiple of 2 KV heads"),
    ({"query": (1, 8, 1, 6)}, {}, "1 query heads are not a multiple of 2 KV heads"),
    ({"query": (1, 7, 4, 6)}, {}, "7 queries of 8 keys have no diagonal: give bounds, or causal=False"),
    ({}, {"window": 0}, "window 0 needs a causal mask and at least 1 token"),
    ({}, {"window": 2, "causal": False}, "window 2 needs a causal mask"),
    ({}, {"scale": math.nan}, "scale nan is not a positive number"),
    ({}, {"softcap": 0.0}, "softcap 0.0 is not a positive number; None is none"),
    ({}, {"softcap": math.inf}, "softcap inf is not a positive number"),
    ({"query": (1, 8, 4, 0), "key": (1, 8, 2, 0)}, {}, "K is 0 and Kv 6: heads have no dimensions"),
    ({"value": (1, 8, 2, 0)}, {}, "K is 6 and Kv 0: heads have no dimensions"),
    ({"query": (1, 7, 4, 6)}, {"causal": False, "cu_seqlens": torch.tensor([0, 7])}, "7 queries of 8 keys have no"),
    ({}, {"cu_seqlens": torch.tensor([1, 8])}, "from 0 to 8, the tokens of all rows, but runs from 1 to 8$"),
    ({}, {"cu_seqlens": torch.tensor([[0, 8]])}, r"cu_seqlens is torch.int64 \(1, 2\), but must be"),
    ({}, {"cu_seqlens": torch.tensor([], dtype=torch.int32)}, r"cu_seqlens is torch.int32 \(0,\), but must be"),
    ({}, {"cu_seqlens": torch.tensor([0.0, 8.0])}, r"cu_seqlens is torch.float32 \(2,\), but must be"),
    ({}, {"bounds": (torch.zeros(8, device="meta").int(), torch.zeros(8).int())},
     "bound low is torch.int32 .* on meta"),
    ({}, {"bounds": (torch.zeros(8).int(),) * 2, "cu_seqlens": torch.tensor([0, 8])}, "bounds are the whole mask"),
    ({}, {"bounds": (torch.arange(8).flip(0).int(), torch.full((8,), 8).int())}, "bounds fall"),
    ({}, {"cu_seqlens": torch.tensor([0, 9])}, "from 0 to 8, the tokens of all rows, but runs from 0 to 9$"),
    ({}, {"cu_seqlens": torch.tensor([0, 6, 5, 8])}, "but runs from 0 to 8, falling from 6 to 5$"),
    ({}, {"cu_seqlens": [0, 8]}, "cu_seqlens is a list, but must be int32 or int64"),
    ({}, {"bounds": (torch.zeros(7).int(),) * 2}, r"bound low is torch.int32 \(7,\) on cpu; it must be .*\(8,\)"),
    ({}, {"bounds": (torch.zeros(8).int(), torch.zeros(8).long())}, "bound high is torch.int64"),
    ({}, {"impl": "fast"}, "impl 'fast'"),
    ({}, {"impl": "torch", "window": 2}, "impl='torch' .* not bounds of 8 queries"),
    ({}, {"impl": "torch", "softcap": 2.0}, "impl='torch' .* not softcap 2.0"),
    ({"value": (1, 8, 2, 5)}, {"impl": "torch"}, "impl='torch', but for heads of 6 and 5 in torch.float32 on cpu"),
    ({"query": (1, 8, 4, 257), "key": (1, 8, 2, 257)}, {"impl": "triton"},
     r"no kernel of head dimensions \(257, 6\), only of 1 to 256"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change, options, message):
    shapes = {"query": (1, 8, 4, 6), "key": (1, 8, 2, 6), "value": (1, 8, 2, 6)} | change
    with pytest.raises(ValueError, match=message):
        attention(**{name: torch.zeros(shape) for name, shape in shapes.items()}, **options)


def test_on_the_meta_device_shapes_come_out():
    output, lse = attention(*(x.to("meta").requires_grad_() for x in draw(B=2)))
    assert (output.shape, lse.shape) == ((2, T, 4, 5), (2, 4, T))
    output.sum().backward()


def test_views_are_not_copied():
    packed = torch.empty(2, 300, 12, 64, dtype=torch.bfloat16)
    q, k, v = packed.split([8, 2, 2], 2)
    with fake_gpu() as launches:
        torch.ops.mpcore.attention_forward(q, k, v, None, None, True, 0.1, 0.0, "triton", None)
        torch.ops.mpcore.attention_forward(q, k.mT.contiguous().mT, v, None, None, True, 0.1, 0.0, "triton", None)
    plain, copied = (launch.arguments for launch in launches)
    assert [plain[f"{name}_ptr"].data_ptr() for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]
    assert (plain["k_batch"], plain["k_token"], plain["k_head"]) == (300 * 12 * 64, 12 * 64, 64)
    assert (copied["k_batch"], copied["k_token"], copied["k_head"]) == (300 * 2 * 64, 2 * 64, 64)


def test_strides_beyond_32_bits_are_another_kernel():
    """Their type is part of the compiled code; a launch that remembers the last must not take it for these."""
    near = torch.empty(1, 16, 1, 64, dtype=torch.bfloat16)
    far = near.as_strided((1, 16, 1, 64), (2**32, 64, 64, 1))
    with fake_gpu() as launches:
        for query in (near, far):
            torch.ops.mpcore.attention_forward(query, near, near, None, None, True, 0.1, 0.0, "triton", None)
    assert [launch.kernel.src.signature["q_batch"] for launch in launches] == ["i32", "i64"]


@pytest.mark.parametrize(("B", "T", "keys"), [(2, 0, 0), (0, 3, 3), (2, 3, 0)])
def test_nothing_is_launched_for_nothing(B, T, keys):
    q, k, ops = torch.empty(B, T, 4, 16), torch.empty(B, keys, 2, 16), torch.ops.mpcore
    options = (None, None, False, 0.1, 0.0, "triton", None)
    with calls() as launches:
        output = torch.zeros_like(q)
        dq, dk, dv = ops.attention_backward(output, None, q, k, k, output, torch.zeros(B, 4, T), *options)
        if T == 0 or B == 0:
            ops.attention_forward(q, k, k, *options)
    assert launches == []
    assert (dq.shape, dk.shape, dv.shape, dq.any()) == (q.shape, k.shape, k.shape, False)


def check_tiles(table):
    """Powers of two from 16; what has bounds or padded heads has no larger tile, nor has a wider head."""
    assert table.keys() == {"forward", "dkdv", "dq"}
    for of_kernel in table.values():
        sizes = []
        assert list(of_kernel) in ([64, 128, 256], [64, 128, 256, (256, 128)])
        for plain, masked in of_kernel.values():
            for n in (*plain, *masked):
                assert n in (16, 32, 64, 128)
            assert math.prod(masked) <= math.prod(plain)
            sizes.append((math.prod(plain), math.prod(masked)))
        assert sizes[:3] == sorted(sizes[:3], reverse=True)


TARGETS = {"sm_80": tiles._A100, "sm_90": tiles._LARGE, "sm_100": tiles._BLACKWELL, "gfx942": tiles._AMD}


@pytest.mark.parametrize("target", TARGETS)
def test_every_tile_is_whole_blocks_that_fit(target):
    with fake_gpu(target):
        found = tiles._tiles_of.__wrapped__(f"fake {target}")
    assert found is TARGETS[target]
    check_tiles(found)


@pytest.mark.parametrize(
    ("memory", "major", "hip", "table"),
    [
        (227, 9, None, "_LARGE"), (200, 9, None, "_LARGE"), (227, 10, None, "_BLACKWELL"),
        (227, 12, None, "_BLACKWELL"), (199, 9, None, "_A100"),
        (163, 8, None, "_A100"), (160, 8, None, "_A100"), (159, 8, None, "_SMALL"),
        (99, 12, None, "_SMALL"), (64, 9, "6.4", "_AMD"), (227, 9, "6.4", "_AMD"),
    ],
)  # fmt: skip
def test_which_table_a_gpu_has(memory, major, hip, table, monkeypatch):
    found = SimpleNamespace(shared_memory_per_block_optin=memory * 1024, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = tiles._tiles_of.__wrapped__(torch.device("cuda", 0))
    assert found is getattr(tiles, table)
    check_tiles(found)
