"""Which blocks are on the device, what is copied when, which blocks a budget recomputes, and dtypes: by hand."""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.layers.linear_fp8 import Fp8Product
from mpcore.parallel import offload, precision
from mpcore.parallel.offload import ParameterOffload, offload_activations, offload_optimizer, offload_parameters

recompute: Any = importlib.import_module("mpcore.parallel.recompute")  # the package has a function of this name


class Swap:
    """A block's parameters, which write down where they go."""

    def __init__(self, number: int, said: list) -> None:
        self.number, self.said, self.here = number, said, False

    def __getattr__(self, name: str) -> Any:
        return lambda: self.said.append((name, self.number))


def uses(count: int, keep: int, *places: tuple[int, int]) -> list[list[tuple[str, int]]]:
    """What each use of a block, with the direction in which the next one lies, makes of the blocks."""
    said: list = []
    held, found = ParameterOffload([Swap(i, said) for i in range(count)], keep), []  # type: ignore[misc]
    for place, step in places:
        held.use(place, step)
        found.append(list(said))
        said.clear()
    return found


def test_the_block_at_work_and_the_next_are_here_and_the_oldest_goes():
    assert uses(4, 2, (0, 1), (1, 1), (2, 1), (3, 1), (3, -1), (2, -1)) == [
        [("fill", 0), ("call", 1), ("call", 0)],
        [("drop", 0), ("fill", 1), ("call", 2), ("call", 1)],
        [("drop", 1), ("fill", 2), ("call", 3), ("call", 2)],
        [("fill", 3), ("call", 3)],
        [("fill", 3), ("call", 2), ("call", 3)],
        [("drop", 3), ("fill", 2), ("call", 1), ("call", 2)],
    ]
    assert uses(3, 1, (0, 1), (1, 1), (1, -1)) == [
        [("fill", 0), ("call", 0)], [("drop", 0), ("fill", 1), ("call", 1)], [("fill", 1), ("call", 1)],
    ]  # fmt: skip
    assert uses(3, 3, (0, 1), (1, 1), (2, 1), (0, 1)) == [
        [("fill", 0), ("call", 1), ("call", 0)], [("fill", 1), ("call", 2), ("call", 1)], [("fill", 2), ("call", 2)],
        [("fill", 0), ("call", 1), ("call", 0)],
    ]  # fmt: skip


def test_within_here_every_block_is_and_at_its_end_all_are_stored():
    said: list = []
    held = ParameterOffload([Swap(i, said) for i in range(2)], 1)  # type: ignore[misc]
    held.use(1, 1)
    said.clear()
    with held.here():
        assert said == [("call", 0), ("call", 1), ("fill", 0), ("fill", 1)]
        said.clear()
        held.use(0, 1)
        assert said == [], "nothing moves meanwhile"
        with held.here():
            said.clear()
        assert said == [], "the outermost context ends it"
    assert said == [("store", 0), ("release", 0), ("store", 1), ("release", 1)]
    assert held.used == []
    with pytest.raises(LookupError), held.here():
        raise LookupError
    assert held.depth == 0


def test_a_block_without_its_parameters_has_shapes_and_no_memory():
    block: Any = nn.Linear(3, 2)
    values = [p.detach().clone() for p in block.parameters()]
    held = offload_parameters([block])
    (swap,) = held.swaps

    def sizes() -> list[int]:
        return [p.data.untyped_storage().nbytes() for p in block.parameters()]

    assert sizes() == [0, 0]
    assert [p.shape for p in block.parameters()] == [(2, 3), (2,)]
    versions = [p._version for p in block.parameters()]
    swap.fill()
    assert (swap.here, swap.coming) == (True, [])
    assert sizes() == [24, 8]
    assert all(map(torch.equal, block.parameters(), values))
    assert [p._version for p in block.parameters()] == versions
    swap.drop()
    swap.drop()
    assert (swap.here, sizes()) == (False, [0, 0])
    with held.here(), torch.no_grad():
        block.weight += 1
    assert sizes() == [0, 0]
    with held.here():
        assert torch.equal(block.weight, values[0] + 1)


def test_offload_refuses_what_it_cannot_do(monkeypatch):
    with pytest.raises(ValueError, match="keep 0 is smaller than 1"):
        offload_parameters([nn.Linear(2, 2)], keep=0)
    shared = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="block 1 shares 2 parameters with one before"):
        offload_parameters([nn.Sequential(shared), nn.Sequential(shared, nn.Linear(2, 2))])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for use in (
        partial(offload_parameters, []),
        partial(offload_optimizer, torch.optim.SGD(nn.Linear(2, 2).parameters())),
    ):
        with pytest.raises(ValueError, match="pin_memory=True, but pinned memory needs a GPU"):
            use(pin_memory=True)
    with pytest.raises(ValueError, match="ahead -1 is negative"), offload_activations(ahead=-1):
        pass
    assert [offload._Copies(pin).pin_memory for pin in (None, False)] == [False, False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [offload._Copies(pin).pin_memory for pin in (None, False, True)] == [True, False, True]
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    optimizer.state[torch.ones(1)] = {}
    with pytest.raises(ValueError, match="the optimizer has states of 1 parameters: offload before the first step"):
        offload_optimizer(optimizer, pin_memory=False)


def test_an_offloaded_step_takes_buckets_of_so_many_bytes(monkeypatch):
    model = nn.ParameterList([nn.Parameter(torch.full((n,), 2.0)) for n in (2, 2, 3, 9, 1)])
    steps: list = []
    real = offload._Step._step
    monkeypatch.setattr(offload._Step, "_step", lambda self, *given: steps.append(len(given[2])) or real(self, *given))
    optimizer = offload_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), bucket_bytes=16)
    for i, p in enumerate(model):
        p.grad = torch.ones_like(p) if i != 4 else None
    optimizer.step()
    assert steps == [2, 1, 1]
    assert [p.detach().tolist()[0] for p in model] == [1.5] * 4 + [2.0]
    assert {p: state["momentum_buffer"].tolist() for p, state in optimizer.state.items()} == {
        p: [1.0] * len(p) for p in list(model)[:4]
    }
    with pytest.raises(ValueError, match="an offloaded optimizer takes no closure"):
        optimizer.step(lambda: 0.0)


# --- activations ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("ahead", [0, 4])
def test_views_that_an_operation_saves_come_back_in_one_copy(copied, ahead):
    x = torch.ones(64, requires_grad=True)
    with offload_activations(min_bytes=64, ahead=ahead):
        y = x * 1
        z = y[:32] * y[32:]
    assert copied == [256]
    copied.clear()
    z.sum().backward()
    assert copied == [256]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(64))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_so_many_tensors_come_back_before_backward_asks_for_them(copied, ahead):
    x, order = torch.ones(1, requires_grad=True), []
    with offload_activations(min_bytes=1, ahead=ahead):
        y = x
        for i in range(4):
            y = Save.apply(y, torch.ones(10 + i))
            y.register_hook(lambda _, i=i: order.append((i, len(copied))))
    copied.clear()
    y.sum().backward()
    assert order[0] == (3, 0)
    came = [count for _, count in order]
    assert came == [0, *(min(i + ahead, 4) for i in (1, 2, 3))]


# --- recomputation ----------------------------------------------------------------------------------------------------

BYTES = {"none": 10, "selective": 4, "full": 1}


def kinds(budget: float, monkeypatch: pytest.MonkeyPatch, *blocks: dict[str, int]) -> list[str] | str:
    """What a budget makes of blocks that keep so many bytes."""
    made = [nn.Identity() for _ in blocks]
    of = dict(zip(made, blocks, strict=True))
    monkeypatch.setattr(recompute, "kept_bytes", lambda block, example, kind: of[block][kind])
    try:
        return recompute._within(budget, made, ((), {}), ())  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)


def test_blocks_become_selective_in_order_and_then_full_until_they_fit(monkeypatch):
    two = [BYTES, BYTES]
    for budget, want in (
        (1.0, "none none"), (0.99, "selective none"), (0.7, "selective none"), (0.69, "selective selective"),
        (0.4, "selective selective"), (0.39, "full selective"), (0.25, "full selective"), (0.24, "full full"),
        (0.1, "full full"),
    ):  # fmt: skip
        assert kinds(budget, monkeypatch, *two) == want.split()
    assert kinds(0.09, monkeypatch, *two) == (
        "budget 0.09 is out of reach: with all blocks recomputed in full 0.100 is kept"
    )
    assert str(kinds(0.1, monkeypatch, BYTES, {**BYTES, "none": 9})).endswith("in full 0.106 is kept"), (
        "2 of 19, rounded up"
    )
    equal = {"none": 10, "selective": 10, "full": 2}
    assert kinds(0.5, monkeypatch, equal, BYTES) == ["full", "selective"], "what saves nothing is not chosen"
    for wrong in (0.0, -1.0, 1.01):
        assert str(kinds(wrong, monkeypatch, BYTES)).startswith(f"budget {wrong} is not in (0, 1]")


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
    with pytest.raises(ValueError, match=r"budget 0\.5 needs an example"):
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


class Modes(nn.Module):
    """Notes the mode of each forward, and doubles in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.training)
        return (x * self.weight).sin() * (2 if self.training else 1)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_modes_of_the_first_forward_hold_in_the_recomputation(kind):
    block = Modes()
    mp.parallel.recompute([block], kind)
    y = block(torch.ones(3, 2, requires_grad=True)).sum()
    block.eval()
    y.backward()
    assert block.seen == [True, True]
    assert not block.training


# --- dtypes -----------------------------------------------------------------------------------------------------------


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
