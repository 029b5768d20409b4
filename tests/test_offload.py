"""Offloading against none: losses and parameters bitwise, and what it is for: less here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from examples.gpt.pretrain import Trainer, parse
from mpcore import Mesh, full_state_dict, load_full_state_dict, vocab_parallel_cross_entropy
from mpcore.checkpoint import save, step_path
from mpcore.layers import materialize
from mpcore.memory_footprint import StorageTracker
from mpcore.optim.adamw import AdamW
from mpcore.optim.muon import Muon
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.offload import offload_activations, offload_optimizer, offload_parameters
from mpcore.parallel.recompute import recompute
from mpcore.sharding.local import local_tensor
from tests.pool import BEFORE_2_13, mesh, on_ranks

CONFIG = GPTConfig(vocab_size=31, seq_len=8, layers=4, d_model=12, heads=3, d_ff=16, dropout=0.2)
EACH = ["optimizer", "activations", "parameters"]


def build() -> GPT:
    return materialize(GPT(CONFIG, device="meta", dtype=torch.float64), seed=5)  # type: ignore[return-value]


def train(offload: list[str], kind: str = "none") -> tuple[list[float], list[Tensor]]:
    model = build()
    recompute(model.blocks.values(), kind, preserve_rng_state=False)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == wide]} for wide in (True, False)]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    elsewhere = None
    if "optimizer" in offload:
        offload_optimizer(optimizer, bucket_bytes=2000)
    if "parameters" in offload:
        elsewhere = offload_parameters(model.blocks.values(), optimizer)
    g = torch.Generator().manual_seed(0)
    losses = []
    for i in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
        x, t = torch.randint(31, (2, 4, 8), generator=g)
        with offload_activations(min_bytes=64) if "activations" in offload else nullcontext():
            loss = vocab_parallel_cross_entropy(model(x, torch.arange(4)), t)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with elsewhere.here() if elsewhere else nullcontext():
        return losses, [p.detach().clone() for p in model.parameters()]


class _Late:
    """Copies as a stream of a GPU makes them: some time after they were begun, in turn; until then there is garbage."""

    begun: ClassVar[list[tuple[Tensor, Tensor]]] = []
    done = 0

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def begin(cls, to: Tensor, source: Tensor) -> _Late:
        to.view(-1).view(torch.uint8).fill_(0xFF)
        cls.begun.append((to, source.detach()))
        return cls(len(cls.begun))

    def synchronize(self) -> None:
        with torch.no_grad():
            for to, source in _Late.begun[_Late.done : self.number]:
                if to.untyped_storage().nbytes():  # what left again before it was used
                    torch.Tensor.copy_(to.detach(), source)
        _Late.done = max(_Late.done, self.number)


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(_Late, "begun", [])
    monkeypatch.setattr(_Late, "done", 0)
    monkeypatch.setattr("mpcore.parallel.offload._Copies.copy", lambda self, to, source: _Late.begin(to, source))
    monkeypatch.setattr("mpcore.parallel.offload._Copies.wait", lambda self, event, device: event.synchronize())


@pytest.mark.parametrize("offload", [*([each] for each in EACH), EACH], ids=str)
def test_training_is_bitwise_the_same_also_if_copies_take_their_time(offload, late):
    """As they do on a GPU, where what was begun is only there once somebody has waited for it."""
    want_losses, want = train([])
    for kind in ("none", "selective", "full"):
        losses, parameters = train(offload, kind)
        assert losses == want_losses, kind
        assert all(torch.equal(a, b) for a, b in zip(parameters, want, strict=True)), kind
    assert _Late.done > 100


FLAGS = [
    "--layers", "2", "--d-model", "16", "--heads", "4", "--d-ff", "24", "--seq-len", "16", "--global-batch", "8",
    "--dropout", "0.1", "--lr", "1e-2", "--warmup", "1",
]  # fmt: skip


def test_what_is_elsewhere_takes_no_memory_here():
    model, x = build(), torch.zeros(4, 8, dtype=torch.int64)
    blocks = list(model.blocks.values())
    here = []

    def note(*_) -> None:
        here.append(
            [i for i, block in enumerate(blocks) if any(p.untyped_storage().nbytes() for p in block.parameters())]
        )

    offload_parameters(blocks, torch.optim.SGD(model.parameters()))
    note()
    for block in blocks:
        block.register_forward_hook(note)
        block.register_full_backward_hook(note)
    model(x, torch.arange(4)).sum().backward()
    assert here == [[], [0, 1], [1, 2], [2, 3], [2, 3], [2, 3], [1, 2], [0, 1], [0, 1]]  # the one at work and the next
    model = build()
    held = []
    for how in (nullcontext(), offload_activations(min_bytes=0)):
        with how, StorageTracker() as storages:
            y = model(x, torch.arange(4))
            held.append(storages.held())
        del y
    assert held[1] == pytest.approx(held[0], rel=0.02)  # each storage once, however many views of it are saved


def test_tensors_of_min_bytes_are_copied_and_parameters_never(late):
    x, weight = torch.ones(1, requires_grad=True), nn.Parameter(torch.ones(64))
    with offload_activations(min_bytes=256):
        for saved in (torch.ones(64), torch.ones(63), weight, weight.view(8, 8)):
            _ = x * saved
    assert [to.nbytes for to, _ in _Late.begun] == [256]


def test_pitfall_42_what_was_written_to_since_is_saved_again():
    x = torch.ones(64, requires_grad=True)
    with offload_activations(min_bytes=0):
        y = x * 2
        a = y.exp().sum()
        with torch.no_grad():
            z = y.detach().clone()
        b = (z * x).sum()
        z.add_(1)
        c = (z * x).sum()
    (a + c).backward()
    torch.testing.assert_close(x.grad, 2 * torch.full((64,), 2.0).exp() + 3)
    with pytest.raises(RuntimeError, match="written to in place"):
        b.backward()


def test_what_was_written_to_after_its_copy_began_is_refused():
    x = torch.full((4096,), 2.0, requires_grad=True)
    for through_a_view in (False, True):
        with offload_activations():
            y = x * 1
            z = y * y
            with torch.no_grad():
                (y.view(64, 64) if through_a_view else y).fill_(7.0)
            del y
        with pytest.raises(RuntimeError, match="16384 bytes that backward needs was written to in place"):
            z.sum().backward()


class Wrapped(nn.Linear):
    """A block that takes and returns its activation in something."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__(6, 6, dtype=torch.float64)
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Any) -> Any:
        return self.wrap(super().forward(self.unwrap(x)).tanh())


@dataclass
class Output:
    """What a block of Hugging Face may return."""

    y: Tensor


def test_parameters_come_back_for_the_backward_of_whatever_a_block_returns():
    def gradients(wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor], offload: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Wrapped(wrap, unwrap) for _ in range(4)))
        if offload:
            offload_parameters(model)
        unwrap(model(wrap(torch.ones(2, 6, dtype=torch.float64)))).square().sum().backward()
        return [p.grad for p in model.parameters()]

    shown = [(lambda x: {"x": x}, lambda x: x["x"]), (lambda x: [None, (x,)], lambda x: x[1][0])]
    if not BEFORE_2_13:
        shown.append((Output, lambda x: x.y))
    for wrap, unwrap in shown:
        got, want = (gradients(wrap, unwrap, offload) for offload in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="block 0 returns a SimpleNamespace, in which no tensor is found"):
        gradients(lambda x: SimpleNamespace(x=x), lambda x: x.x, True)


def test_places_to_be_here_may_be_nested_and_a_step_may_fail():
    models = [nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    offload = offload_parameters(models[1], optimizers[1], keep=1)
    x = torch.ones(2, 6, dtype=torch.float64)
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().sum().backward()
            fails = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            fails.remove()
            with offload.here():
                optimizer.step()  # opens `here` as well
                with offload.here(), torch.no_grad():
                    model[0].weight += 0.25
                    model(x)  # lets go of nothing
            optimizer.zero_grad()
        assert {p.data.untyped_storage().nbytes() for p in models[1].parameters()} == {0}
        with offload.here():
            for p, q in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(p, q)


def test_parameters_that_are_elsewhere_are_refused_by_name(tmp_path):
    """torch reads and writes past the end of a storage of no bytes, or ends the process."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    state = {name: value.clone() for name, value in full_state_dict(model).items()}
    offload = offload_parameters(model)
    for call in (
        lambda: full_state_dict(model), lambda: load_full_state_dict(model, state), lambda: copy.deepcopy(model),
        lambda: save(step_path(tmp_path, 1), model, mesh=Mesh(), step=1), model.state_dict, model[0].state_dict,
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"weight has 16 elements and 0 bytes .* within `with offload.here\(\):`"):
            call()
        with offload.here():
            call()


def test_what_cant_be_had_is_refused():
    model = nn.Linear(2, 2)
    used = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    used.step()
    fresh = partial(torch.optim.AdamW, list(model.parameters()))

    def trainer(*flags: str) -> partial:
        return partial(lambda flags: Trainer(parse([*FLAGS, *flags]), mesh()), flags)

    cases: list[tuple[Callable, str]] = [
        (partial(offload_parameters, [model], keep=0), "keep 0 is smaller than 1"),
        (partial(offload_parameters, [model, model]), "block 1 shares 2 parameters"),
        (partial(offload_optimizer, used), "state of 2 parameters"),
        (partial(offload_optimizer(fresh()).step, lambda: torch.zeros(())), "takes no closure"),
        (offload_activations(ahead=-1).__enter__, "ahead -1 is negative"),
        (trainer("--offload", "none", "optimizer"), "--offload none optimizer"),
        (trainer("--offload", "parameters", "--schedule", "zb"), "split backward: take the schedule 1f1b"),
        (trainer("--offload", "optimizer", "--optimizer", "muon"), "--offload optimizer .*muon's"),
        (trainer("--recompute", "budget=much"), "--recompute 'budget=much' is none of"),
    ]
    for whole in (Muon(build()), torch.optim.Muon([model.weight]), torch.optim.Adafactor([model.weight])):
        cases.append((partial(offload_optimizer, whole), rf"{type(whole).__name__} computes each element from"))
    if not torch.cuda.is_available():
        for call in (partial(offload_optimizer, fresh()), offload_activations, partial(offload_parameters, [model])):
            cases.append((lambda call=call: call(pin_memory=True).__enter__(), "pin_memory=True, .* needs a GPU"))
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    offload_parameters(list(blocks))
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="offloaded has no second derivative"):
        torch.autograd.grad(blocks(x).tanh().sum(), x, create_graph=True)


@on_ranks(2)
def test_an_offloaded_step_sees_what_was_written_to_parameters_since():
    """As a merge of workers does; a DTensor's version doesn't tell of what is written to its shard."""
    for sizes in ({"tp": 2}, {"dp": 2}):
        results = []
        for offload in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(5, 3)
            shard_data_parallel(model, mesh(**sizes), zero=1)
            optimizer = AdamW(model, lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(offload_optimizer(optimizer) if offload else optimizer, 1, 0.5)
            for step, scale in enumerate((None, 0.25, torch.tensor(0.25))):
                model(torch.ones(2, 5) + step).square().sum().backward()
                optimizer.step(scale=scale)
                schedule.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.weight.mul_(0.5)
            results.append([local_tensor(p.detach()) for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    (weight := nn.Parameter(torch.ones(2))).sum().backward()
    offload_optimizer(torch.optim.Adagrad([weight], lr=1.0, initial_accumulator_value=3.0)).step()
    assert torch.equal(weight.detach(), torch.full((2,), 0.5))  # 1 - 1 / sqrt(3 + 1): its state was made before
