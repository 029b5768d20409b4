"""FP8, gradients in float32, recomputation, counts of FLOPs, non-finite losses, and flags."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mpcore as mp
from examples.gpt.config import PRESETS
from examples.gpt.model import flops_of_token
from mpcore.kernels.quantize_fp8 import dequantize_fp8, quantize_fp8
from tests.peers import rows


@rows({f"size {n}": n for n in (4, 8, 16, 64)})
def test_fp8_keeps_values_to_a_sixteenth(size):
    x = torch.randn(size, size)
    found, _ = quantize_fp8(x)
    assert found is not None
    assert (found.values.dtype, found.values.shape) == (torch.float8_e4m3fn, x.shape)
    back = dequantize_fp8(found)
    assert back.dtype == torch.float32
    assert not torch.equal(back, x)
    largest = x.abs().amax(1, keepdim=True)
    assert bool(((back - x).abs() <= x.abs() / 16 + largest * 2.0**-13).all())


@rows(
    {
        "test_gradient_promoting_in_fp32": (1, False),
        "test_gradient_accumulated_in_fp32": (5, False),
        "test_optimizer_can_step_gradient_in_fp32": (5, True),
    }
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision_accumulate_in_float32(batches, step, dtype):
    """The sum of the half-precision gradients of each backward, in float32."""
    layer = nn.Linear(10, 4, bias=False, dtype=dtype)
    mp.gradients.main_gradients(layer)
    weight, want = layer.weight, torch.zeros(4, 10)
    for _ in range(batches):
        x = torch.randn(3, 10, dtype=dtype)
        layer(x).sum().backward()
        want += x.detach().float().sum(0).expand(4, 10)
    mp.gradients.reduce_gradients(layer)
    found: Tensor = weight.main_grad  # type: ignore[attr-defined]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, want, rtol=2.0**-7, atol=2.0**-6)
    if step:
        before = weight.detach().float().clone()
        mp.AdamW(layer, lr=0.1, weight_decay=0.0, eps=1e-30).step()
        torch.testing.assert_close(weight.float(), before - 0.1 * found.sign(), rtol=2.0**-7, atol=1e-3)


class Three(nn.Module):
    """torchtitan's toy: a gate, a query projection, and an output of twice the width."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.wq = (mp.ColumnParallelLinear(64, 64, bias=False) for _ in range(2))
        self.output = mp.ColumnParallelLinear(64, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.wq(self.gate(x))).sum()


@rows({"test_flops, nothing recomputed": ("none", 8.0), "test_correctness": ("full", None)})
def test_backward_of_three_products_takes_eight(kind, products):
    """In units of a 64 x 64 x 64 product: 4 forward and 8 backward. A convention: selective keeps all three."""
    plain, block, x = Three(), Three(), torch.randn(64, 64, requires_grad=True)
    block.load_state_dict(plain.state_dict())
    mp.parallel.recompute([block], kind)
    y = block(x)
    with FlopCounterMode(display=False) as counter:
        y.backward()
    if products is not None:
        assert counter.get_total_flops() / (2 * 64**3) == products
    found = [x.grad, *(p.grad for p in block.parameters())]
    x.grad = None
    plain(x).backward()
    for a, b in zip(found, [x.grad, *(p.grad for p in plain.parameters())], strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_selective_recomputation_repeats_no_product():
    """A convention: torchtitan's repeats every second one, and its full recomputation the last one too."""
    counts = {}
    for kind in ("selective", "full"):
        block, x = Three(), torch.randn(64, 64, requires_grad=True)
        mp.parallel.recompute([block], kind)
        y = block(x)
        with FlopCounterMode(display=False) as counter:
            y.backward()
        counts[kind] = counter.get_total_flops() / (2 * 64**3)
    assert counts == {"selective": 8.0, "full": 10.0}


def test_flops_of_attention_count_what_the_causal_mask_hides():
    """A convention: for 4 layers of 512 and 1,024 tokens Megatron counts 6 x 4 x 512 x 1,024 a token, half as many."""
    config = replace(PRESETS["gpt2"], layers=4, d_model=512, heads=8, kv_heads=8, d_ff=2048, positions="rope")
    short, long = (flops_of_token(replace(config, seq_len=length)) for length in (1024, 2048))
    assert long - short == 2 * 6 * 4 * 512 * 1024


def run_of(loss: float) -> mp.Run:
    """A run whose loss is the given one."""
    model = nn.Sequential(nn.Linear(2, 2))
    return mp.prepare(
        model, mp.Mesh(), blocks=model, initialize=False, data=mp.Zero(0),
        loss=lambda y, target: y.sum() * 0 + loss * target.numel(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )  # fmt: skip


def test_a_loss_that_is_not_finite_skips_the_step():
    """A convention: torchtitan raises an error."""
    run = run_of(float("nan"))
    run.forward_backward(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))
    assert run.optimizer_step().taken is False
