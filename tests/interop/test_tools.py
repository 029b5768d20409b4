"""Tools of torch and others on a model that is sharded over tp: the rows of docs/tools.md."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.gradients import clip_gradients, grad_norm, guard_optimizer
from tests.equality import close
from tests.pool import mesh, on_ranks

PLAN = {"0": "colwise", "2": "rowwise"}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def plain(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


OPTIMIZERS = {
    "AdamW foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
    "NAdam foreach": lambda model: torch.optim.NAdam(model.parameters(), lr=0.05, foreach=True),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3),
    "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.05),
}
REFUSED = {"LBFGS": "LBFGS.step needs a closure"}  # also on one rank
OF_SHARDS = {"Adafactor", "LBFGS", "Muon"}  # their steps read norms or products of the full matrix, and see a shard


def trained(model: nn.Module, make=plain, call=None, clip=None, after=lambda: None) -> None:
    x, optimizer = torch.arange(12.0, dtype=torch.float64).view(3, 4) / 7, make(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):

        def loss(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            found = ((call or model)(x + step) ** 2).sum()
            found.backward()
            if clip:
                clip(model)
            return found

        optimizer.step(loss)
        scheduler.step()
        after()


def full(model: nn.Module) -> list[torch.Tensor]:
    return list(mp.full_state_dict(model).values())


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_optimizers_of_torch_on_shards(name: str) -> None:
    """Element-wise optimizers and schedulers equal the dense model. A run and `guard_optimizer` refuse the others."""
    on = mesh(tp=2)
    dense, ours, cut = net(), *(mp.parallelize(net(), PLAN, tp=on.tp, check=False) for _ in range(2))

    def step() -> bool:
        loss = lambda y, _: (y**2).sum()  # noqa: E731
        run = mp.prepare(cut, on, blocks=[], loss=loss, optimizer=OPTIMIZERS[name], initialize=False)
        run.forward_backward(torch.ones(2, 4).double(), torch.zeros(2, 4).double())
        return run.optimizer_step().taken

    if name in OF_SHARDS:
        with pytest.raises(ValueError, match=REFUSED.get(name, rf"{name} computes each .*\(3, 4\) .*mpcore.Muon")):
            step()
        with pytest.raises(ValueError, match=name):
            trained(cut, lambda model: guard_optimizer(OPTIMIZERS[name](model), model))
    else:
        assert step()
    for model in (dense, ours):
        trained(model, OPTIMIZERS[name])
    error = max((a - b).abs().max().item() for a, b in zip(full(dense), full(ours), strict=True))
    assert (error > 1e-4) if name in OF_SHARDS else (error < 1e-12), error


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is missing")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_low_bit_optimizers_of_torchao_on_shards(name: str) -> None:
    """They quantize blocks of the flat shard: where its rows are multiples of a block they equal the dense model's."""
    kind = getattr(import_module("torchao.optim"), name)
    for width, same in ((512, True), (192, False)):  # the rows of the second layer's shards have 256, and 96
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
        start, ours = copy.deepcopy(dense), mp.parallelize(copy.deepcopy(dense), PLAN, tp=mesh(tp=2).tp, check=False)
        for model in (dense, ours):
            optimizer = kind(model.parameters(), lr=0.01)
            for step in range(3):
                optimizer.zero_grad()
                (model(torch.sin(torch.arange(512.0).view(8, 64) + step)) ** 2).sum().backward()
                optimizer.step()
        moved = sum((a - b).abs().sum().item() for a, b in zip(full(start), full(dense), strict=True))
        error = sum((a - b).abs().sum().item() for a, b in zip(full(ours), full(dense), strict=True)) / moved
        assert (error < 1e-4) if same else (error < 0.1), (width, error)


@on_ranks(4)
def test_ddp_over_dp() -> None:
    """The gradient is the mean over dp, of each rank's part of the batch."""
    on, dense, x = mesh(tp=2, dp=2), net(), torch.arange(16.0).view(4, 4).double()
    ours = mp.parallelize(net(), PLAN, tp=on.tp, check=False)
    wrapped = nn.parallel.DistributedDataParallel(ours, process_group=on.dp.group)
    (dense(x) ** 2).mean().backward()
    (wrapped(x[on.dp.rank :: 2]) ** 2).mean().backward()
    for (name, p), grad in zip(dense.named_parameters(), full_grads(ours), strict=True):
        close(grad, p.grad, name, 1e-12)


def full_grads(model: nn.Module) -> list[torch.Tensor]:
    """The gradients, in the full shapes: they stand in for the parameters."""
    with torch.no_grad():
        [p.copy_(p.grad) for p in model.parameters() if p.grad is not None]
    return full(model)


def check_other_tools(folder: Path) -> None:
    on, dense = mesh(tp=2), net()
    made = lambda: mp.parallelize(net(), PLAN, tp=on.tp, check=False)  # noqa: E731
    trained(dense)
    # torch.compile
    ours = made()
    trained(ours, call=torch.compile(ours, backend="aot_eager"))
    close(full(ours)[0], full(dense)[0], "torch.compile", 1e-12)
    # a copy of the model, and its moving average
    ours, of_dense = made(), net()
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = [torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay) for model in (ours, of_dense)]
    for model, average in zip((ours, of_dense), averages, strict=True):
        trained(model, after=lambda average=average, model=model: average.update_parameters(model))
    close(full(averages[0].module)[0], averages[1].module[0].weight, "average", 1e-12)
    close(full(copy.deepcopy(ours))[0], full(dense)[0], "copy", 1e-12)
    # the profiler, and activation checkpoints of torch
    ours = made()
    with torch.profiler.profile() as profile:
        trained(ours, call=lambda x: torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False))
    assert any("all_reduce" in event.key or "allreduce" in event.key for event in profile.key_averages())
    close(full(ours)[0], full(dense)[0], "profiler", 1e-12)
    # clipping: torch's norm is of this rank's shards
    clipped, ours, wrong = net(), made(), made()
    by_torch = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.05)  # noqa: E731
    trained(clipped, sgd, clip=lambda model: clip_gradients(model, 0.1, grad_norm(model, mp.Mesh())))  # no 1e-6
    trained(wrong, sgd, clip=by_torch)
    trained(ours, sgd, clip=lambda model: clip_gradients(model, 0.1, grad_norm(model, on)))
    close(full(ours)[0], full(clipped)[0], "clip_gradients", 1e-12)
    assert (full(wrong)[0] - full(clipped)[0]).abs().max() > 1e-4
    # files of torch and safetensors
    state = mp.full_state_dict(ours)
    if on.job.rank == 0:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(state, folder / "a.safetensors")
        torch.save(state, folder / "a.pt")
        for found in (safetensors.load_file(folder / "a.safetensors"), torch.load(folder / "a.pt")):
            again = net()
            again.load_state_dict(found)
            close(again[0].weight, clipped[0].weight, "file", 1e-12)


def test_compile_average_profiler_clipping_and_files(ranks, tmp_path):
    ranks(2, check_other_tools, tmp_path)
