"""Numerics of attention beside the laws of `test_laws.py`: views, the blocks of a ring, merges and operators."""

import laws
import pytest
import torch
from attention_cases import draw, mask, seen

from mpcore.kernels.attention import attention, attention_backward, attention_merge, attention_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def triton(**arguments):
    return attention(**arguments, impl="triton")


def test_errors_of_a_packed_projection():
    """Query, key and value as views of one tensor, heads before tokens in the gradient."""
    packed = torch.randn(1, 37, 4, 64)
    ours, theirs = (packed.clone().requires_grad_() for _ in range(2))
    for x, how in ((ours, triton), (theirs, attention_reference)):
        query, key, value = x.split([2, 1, 1], 2)
        output, lse = how(query=query, key=key, value=value)
        output.transpose(1, 2).contiguous().mul(lse.unsqueeze(-1)).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("softcap", [5.0])
def test_pitfall_37_blocks_of_a_ring_make_the_whole_with_float32_lse(softcap):
    """Each block's backward pass, from the merged output and lse alone, is its term of the gradient."""
    inputs, blocks = draw(48, 4, 2, dtype=BF16), 6
    exact = {name: x.double().requires_grad_() for name, x in inputs.items()}
    want = attention_reference(**exact, softcap=softcap)
    gradients = [torch.randn_like(y).to(BF16).double() for y in want]
    torch.autograd.backward(want, gradients)
    index, size = torch.arange(48, dtype=torch.int32), 48 // blocks
    common = {"softcap": softcap, "impl": "triton", "out_dtype": F32}

    def parts():
        for n in range(blocks):
            held = {name: x[:, n * size : (n + 1) * size] for name, x in inputs.items() if name != "query"}
            yield (held, {"bounds": (torch.zeros_like(index), index + 1 - n * size)} | common)

    output, lse = torch.zeros(want[0].shape), torch.full(want[1].shape, -torch.inf)
    for held, options in parts():
        part, part_lse = attention(inputs["query"], **held, **options)
        assert part.dtype == part_lse.dtype == F32
        merged = torch.logaddexp(lse, part_lse)
        weights = [(each - merged).exp().transpose(1, 2).unsqueeze(-1) for each in (lse, part_lse)]
        output, lse = weights[0] * output + weights[1] * part, merged
    torch.testing.assert_close(lse.double(), want[1], rtol=0, atol=2e-5)
    whole, _ = attention(**inputs, **common)
    errors = [(x.double() - want[0]).square().mean().sqrt() for x in (output, whole)]
    assert errors[0] <= 1.05 * errors[1] < 2e-3
    saved, dlse = output.to(BF16), gradients[1].float()
    found = [
        attention_backward(gradients[0].to(BF16), inputs["query"], output=saved, lse=lse, dlse=dlse, **held, **options)
        for held, options in parts()
    ]
    alone = attention_backward(gradients[0].to(BF16), **inputs, output=saved, lse=lse, dlse=dlse, **common)
    sums = sum(part[0].double() for part in found), *(torch.cat([part[i] for part in found], 1) for i in (1, 2))
    for name, ring, whole in zip(inputs, sums, alone, strict=True):
        errors = [(x.double() - exact[name].grad).square().mean().sqrt() for x in (ring, whole)]
        assert errors[0] <= 1.05 * errors[1], name


def test_a_query_that_sees_nothing_gives_no_gradient_whatever_comes_back():
    inputs = draw(8)
    low, high = torch.zeros(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32) - 3
    output, lse = attention(**inputs, bounds=(low, high), impl="triton")
    dlse = torch.where(lse.isfinite(), 1.0, torch.nan)  # as of a merge that divides by nothing
    found = attention_backward(output, **inputs, output=output, lse=lse, dlse=dlse, bounds=(low, high), impl="triton")
    assert all(x.isfinite().all() for x in found)
    assert not found[0][:, :4].any()


def test_the_same_bits_each_time():
    inputs, options = draw(70, 4, 2, dtype=BF16), mask("bounds", 70)
    first, second = (laws.results(triton, inputs, **options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("name", "impl"), [
    ("bounds", "triton"), ("causal", "reference"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("causal", "triton"), ("bounds", "reference"))),
])  # fmt: skip
def test_operators(name, impl):
    inputs, ops = draw(5, 4, 2, dtype=BF16), torch.ops.mpcore
    low, high = mask(name, 5).get("bounds", (None, None))
    numbers = (low, high, True, 0.1, 20.0, impl, None if name == "causal" else F32)
    laws.check_operator(ops.attention_forward, *inputs.values(), *numbers)
    output, lse = ops.attention_forward(*inputs.values(), *numbers)
    for dlse in (lse, None):
        given = output.to(BF16), dlse, *inputs.values(), output, lse
        laws.check_operator(ops.attention_backward, *given, *numbers)


@pytest.mark.parametrize("layout", ["contiguous", "strided rows"])
@pytest.mark.parametrize(("B", "T", "t", "H", "V", "dtype"), [
    (1, 9, 9, 3, 24, F32), (2, 37, 20, 2, 80, BF16), (2, 6, 1, 5, 128, F32), (1, 4, 0, 2, 16, F32),
])  # fmt: skip
def test_errors_of_merged_blocks(B, T, t, H, V, dtype, layout):
    """Also where a query sees no key of one block or of both, in 16 bits, and with heads before tokens."""
    generator = torch.Generator().manual_seed(T)
    shapes = {"output": (B, T, H, V), "lse": (B, H, T), "other": (B, H, t, V), "other_lse": (B, H, t)}
    given = {name: laws.drawn(torch.randn, shape, generator=generator) for name, shape in shapes.items()}
    given["other"] = given["other"].to(dtype).transpose(1, 2)
    given["other_lse"][..., 1:3], given["lse"][..., T - t :][..., 2:4] = -torch.inf, -torch.inf
    given["other"][:, 1:3], given["output"][:, T - t :][:, 2:4] = 0, 0

    def merged(impl):
        def run(output, lse, other, other_lse):
            kept = [x.detach().contiguous().clone() for x in (output, lse)]
            attention_merge(*kept, other.detach(), other_lse.detach(), impl=impl)
            assert torch.equal(kept[0][:, : T - t], output[:, : T - t])
            return kept

        return seen(run)

    laws.check_errors(merged("triton"), merged("reference"), given, layout, gradients=False)
    laws.check_operator(torch.ops.mpcore.attention_merge, *given.values())
