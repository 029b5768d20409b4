"""Which blocks are on the device, what is copied when, which blocks a budget recomputes, and dtypes: by hand."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.layers.linear_fp8 import Fp8Product
from mpcore.parallel import offload, precision
from mpcore.parallel.offload import offload_activations, offload_parameters

recompute: Any = importlib.import_module("mpcore.parallel.recompute")  # the package has a function of this name


def test_a_block_without_its_parameters_has_shapes_and_no_memory():
    block: Any = nn.Linear(3, 2)
    values = [p.detach().clone() for p in block.parameters()]
    held = offload_parameters([block])

    def sizes() -> list[int]:
        return [p.data.untyped_storage().nbytes() for p in block.parameters()]

    assert sizes() == [0, 0]
    assert [p.shape for p in block.parameters()] == [(2, 3), (2,)]
    versions = [p._version for p in block.parameters()]
    with held.here():
        assert sizes() == [24, 8]
        assert all(map(torch.equal, block.parameters(), values))
    assert [p._version for p in block.parameters()] == versions
    with held.here(), torch.no_grad():
        block.weight += 1
    assert sizes() == [0, 0]
    with held.here():
        assert torch.equal(block.weight, values[0] + 1)


class Copies(offload._Copies):
    """Copies that write down their bytes and directions."""

    said: list = []  # noqa: RUF012

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.said.append(to.nbytes)
        to.copy_(source)


@pytest.fixture
def copied(monkeypatch) -> list:
    monkeypatch.setattr(offload, "_Copies", Copies)
    Copies.said = []
    return Copies.said


class Save(torch.autograd.Function):
    """Saves what it is told, and asks for it back."""

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        for tensor in ctx.saved_tensors:
            assert tensor.sum() == tensor.numel()
        return dy, *[None] * len(ctx.saved_tensors)


def test_large_tensors_that_autograd_saves_are_copied_once_and_parameters_never(copied):
    x, weight = torch.ones(1, requires_grad=True), nn.Parameter(torch.ones(64))
    large, small = torch.ones(64), torch.ones(63)
    with offload_activations(min_bytes=256):
        y = Save.apply(x, large, large.view(8, 8)[2:], weight, weight.view(8, 8), small)
        assert copied == [256], "one storage, of which 48 elements are saved too"
        z = Save.apply(y, torch.ones(128), large)
        assert copied == [256, 512]
    assert z.requires_grad
    usual = torch.ones(2**10), torch.ones(2**10 - 1)
    copied.clear()
    with offload_activations():
        Save.apply(x, *usual)
    assert copied == [2**12]


def kinds(budget: float, hidden: tuple[int, ...]) -> list[str]:
    """What a budget makes of blocks of these widths: each keeps 2 h + 4 numbers, h + 5 selective, 4 in full."""
    blocks = [nn.Sequential(nn.Linear(4, h, bias=False), nn.GELU(), nn.Linear(h, 4, bias=False)) for h in hidden]
    example = ((torch.ones(1, 4, requires_grad=True),), {})
    return mp.parallel.recompute(blocks, budget=budget, example=example)


def test_blocks_become_selective_in_order_and_then_full_until_they_fit():
    for budget, want in (
        (1.0, "none none"), (0.99, "selective none"), (57 / 72, "selective none"), (56 / 72, "selective selective"),
        (42 / 72, "selective selective"), (41 / 72, "full selective"), (25 / 72, "full selective"),
        (24 / 72, "full full"),
        (8 / 72, "full full"),
    ):  # fmt: skip
        assert kinds(budget, (16, 16)) == want.split(), budget
    with pytest.raises(ValueError, match=r"budget 0.11 is out of reach: with all blocks recomputed in full 0.112 is"):
        kinds(0.11, (16, 16))
    for wrong in (0.0, -1.0, 1.01):
        with pytest.raises(ValueError, match=rf"budget {wrong} is not above 0 and at most 1"):
            kinds(wrong, (16,))


def test_every_nth_block_is_recomputed_from_the_first():
    def made(**how: Any) -> list[str]:
        return mp.parallel.recompute([nn.Identity() for _ in range(5)], **how)

    assert made() == ["full"] * 5
    assert made(kind="selective", every=2) == ["selective", "none", "selective", "none", "selective"]
    assert made(every=3) == ["full", "none", "none", "full", "none"]
    assert made(kind="none") == ["none"] * 5
    for every in (0, -1):
        with pytest.raises(ValueError, match=f"every {every} is smaller than 1"):
            made(every=every)
    with pytest.raises(ValueError, match="recompute kind 'some' is unknown"):
        made(kind="some")
    with pytest.raises(ValueError, match=r"budget 0\.5 needs example="):
        made(budget=0.5)


def test_what_a_call_keeps_is_counted_in_bytes():
    block = nn.Sequential(nn.Linear(4, 8, bias=False), nn.GELU(), nn.Linear(8, 4, bias=False))
    example = ((torch.ones(5, 4, requires_grad=True),), {})
    kept = {kind: recompute.kept_bytes(block, example, kind) for kind in recompute.KINDS}
    hidden, out = 5 * 8 * 4, 5 * 4 * 4
    assert kept == {
        "none": 2 * hidden + out,
        "selective": hidden + out + 4,
        "full": out,
    }  # a number stands for the last product
    assert recompute.kept_bytes(block, example) == kept["none"], "as the block is"
    mp.parallel.recompute([block], "full")
    assert recompute.kept_bytes(block, example) == kept["full"]
    assert recompute.kept_bytes(block, example, "none") == kept["none"]
    assert block.__dict__[recompute._SETTING].kind == "full", "the block is as it was"


def test_parameters_are_rounded_and_their_values_before_are_the_masters(monkeypatch):
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    monkeypatch.setattr(precision, "router_statistics", lambda given: {model[1].bias} if given is model else set())
    before = [p.detach().clone() for p in model.parameters()]
    masters = precision.round_parameters(model, torch.bfloat16)
    first, frozen, second, kept = model.parameters()
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 3 + [torch.float32]
    assert all(torch.equal(p, old.to(p.dtype)) for p, old in zip(model.parameters(), before, strict=True))
    assert not frozen.requires_grad
    assert torch.equal(kept, before[3])
    assert list(masters) == [first, second]
    assert torch.equal(masters[first], before[0])


def test_autocast_is_for_half_precision():
    with pytest.raises(ValueError, match="float16 without a loss scaler loses gradients below 6e-8"):
        precision.autocast(torch.float16, "cpu")
    scaler: Any = SimpleNamespace()
    for dtype in (torch.float32, torch.float64):
        assert isinstance(precision.autocast(dtype, "cpu"), contextlib.nullcontext)
    for dtype, given in ((torch.bfloat16, None), (torch.float16, scaler)):
        with precision.autocast(dtype, "cpu", given):
            assert torch.is_autocast_enabled("cpu")
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_blocks_without_a_layer_for_fp8_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"the blocks have 2 nn.Linear, such as 'blocks\[0\] 0', and no parallel"):
        mp.parallel.convert_to_fp8([nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=r"the blocks have 2 grouped linear layers of experts, such as 'blocks\[0\] "):
        mp.parallel.convert_to_fp8([mp.ParallelMoE(4, 4, 4, 2)])
    both = [nn.ModuleDict({"a": nn.Linear(2, 2), "b": mp.ColumnParallelLinear(128, 128)})]
    mp.parallel.convert_to_fp8(both)
    assert both[0]["b"].product == Fp8Product()  # type: ignore[union-attr]
    mp.parallel.convert_to_fp8([])
