"""Train a toy on one rank, for `mpcore preflight`: look into it, save, resume, stop and kill it."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpcore.checkpoint import checkpoints
from mpcore.gradients.accumulate import gradient_of
from mpcore.layers.attention.sequence import sequence_index
from mpcore.layers.module import RandomModule
from mpcore.sharding.declarations import declarations, shardings
from mpcore.sharding.local import local_tensor
from mpcore.sharding.state_dict import full_state_dict
from mpcore.tools.fault_tolerance import StopSignals, Watchdog, leave_together
from mpcore.tools.invariant import invariant_mesh
from mpcore.tools.preflight.toy import Toy, with_flags
from mpcore.tools.verify.pool import Pool, RankError, mesh
from mpcore.tools.verify.run import RankRecord, full_tensors, joined, listen, move
from mpcore.training.first_step import FirstStep

GRACE = 60.0  # seconds in which all ranks must have left after one was killed
_NAMED = re.compile(r"stopped, because rank (\d+)")


@dataclass
class Rehearsal:
    """What a rank saw.

    Attributes:
        scales: the loss scale after so many steps; 1 without one.
        scale: the loss scale that the run began with.
        begun, state: logical parameters and buffers at the begin and the end.
        kept: those that were saved, by the number of steps done.
        reference: on one process torch's cross-entropy of the logits in `seen`.
        wrong: what differs from torch in the loss of one process, in words; "" if nothing does.
        left: a parameter whose gradient is still there after a step; "" if none is.
        keys: seeds of dropout and of routers, by module.
        stopped, skipped: whether a signal stopped it; whether no parameter moved in the poisoned step.
    """

    worker: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)
    scale: float = 1.0
    begun: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    validation: float = 0.0
    seen: Any = None
    reference: float = math.nan
    wrong: str = ""
    left: str = ""
    keys: dict[str, int] = field(default_factory=dict)
    stopped: bool = False
    skipped: bool = False
    step: int = 0


def rehearse(
    toy: Toy, out: str, *, until: int, save_at: int | None = None, resume: str | None = None, look: bool = False,
    stop_at: int | None = None, poison_at: int | None = None, shift: float = 0.0,
    start: Mapping[str, Tensor] | None = None,
) -> Rehearsal:  # fmt: skip
    """Train a toy on this rank.

    Args:
        out: its folder.
        until: the steps of the whole run.
        save_at: after so many steps, save.
        resume: "auto", or another run's folder.
        look: record the tensors of the first step.
        stop_at: in this step the last rank gets a SIGTERM; the run is one of `Trainer.train`.
        start: parameters by name to begin with, on one process. None: draw them.
        shift: how far the first parameters are moved along their `direction`, on one process.
        poison_at: in this step the loss of the last data rank is NaN, on whichever rank of its pipeline it is.
    """
    with quiet(out):
        on = mesh_of(toy)
        if resume not in (None, "auto") and on.worlds.size > 1:  # a path would give all workers worker 0's state
            out, resume = str(resume), "auto"
        elif resume not in (None, "auto"):
            resume = str(checkpoints(Path(str(resume)) / "checkpoints", on)[0])
        trainer = trainer_of(toy)(with_flags(toy.args, out=out, resume=resume or "none"), on, toy.config)
        if start is not None:
            with trainer.run.parameters() as model, torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(start[name])
        if shift:
            with trainer.run.parameters() as model:
                move(model, shift)
        got = Rehearsal(on.worlds.rank, scale=scale_of(trainer))
        got.begun = state_of(trainer)
        random = {name: module for name, module in trainer.model.named_modules() if isinstance(module, RandomModule)}
        got.keys = {name: module.key for name, module in random.items() if module.key is not None}
        last = on.job.rank == on.job.size - 1
        if stop_at is not None:
            with StopSignals() as signals:
                trainer.stop.signals = signals
                at_step(trainer, stop_at, lambda: os.kill(os.getpid(), signal.SIGTERM) if last else None)
                got.stopped, got.step = trainer.train(), trainer.run.step
            return got
        targets = None
        if look:
            targets = trainer.batch(trainer.train_samples, trainer.share(trainer.run.step))[1]
            got.seen = observe(trainer, toy)
        for step in range(trainer.run.step, until):
            before = state_of(trainer) if step == poison_at else {}
            if step == poison_at and all(axis.rank == axis.size - 1 for axis in (on.worlds, on.dp, on.cp, on.tp)):
                poison(trainer)
            entry = trainer.step()
            got.left = got.left or next((name for name, p in trainer.model.named_parameters() if has_gradient(p)), "")
            got.losses[step], got.norms[step] = entry["loss"], entry["grad_norm"]
            got.scales[step + 1] = scale_of(trainer)
            if got.seen is not None and targets is not None and step == 0:
                got.seen.loss = entry["loss"]
                if on.job.size == on.worlds.size:
                    got.reference = cross_entropy(got.seen.output[""], targets)
                    got.wrong = wrong_loss(trainer.stages[-1].loss, got.seen.output[""], targets)
            if step == poison_at:
                after = state_of(trainer)
                # without routers' biases, which move in any case
                names = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
                got.skipped = all(torch.equal(after[name], before[name]) for name in names & before.keys())
            if step + 1 == save_at:
                got.kept[step + 1] = state_of(trainer)
                trainer.out.mkdir(parents=True, exist_ok=True)
                trainer.checkpoints.save()
                overwrite(trainer)
        got.validation, got.state, got.step = trainer.evaluate(), state_of(trainer), trainer.run.step
    return got


def mesh_of(toy: Toy) -> Any:
    return invariant_mesh(mesh(**toy.sizes), (2, toy.args.bitwise)) if toy.args.bitwise else mesh(**toy.sizes)


def trainer_of(toy: Toy) -> Any:
    program = import_module(toy.program)
    if "tqdm" in sys.modules:  # its default lock is shared by processes, which a killed one would leave behind
        sys.modules["tqdm"].tqdm.set_lock(threading.RLock())
    return program.Trainer


def cross_entropy(logits: Tensor, targets: Tensor) -> float:
    """Return torch's mean loss in float64 over the targets that are not -100."""
    loss = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
    return float(loss) / max(int((targets != -100).sum()), 1)


def wrong_loss(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> str:
    """Compare a loss, summed over tokens, and its gradient with torch's, also for ignored targets and large logits."""
    some = targets.clone()
    some.flatten()[::3] = -100
    far_apart = 1e4 / float(logits.abs().max())  # no exponential of such a gap is above 0
    for scale, dtype in ((1.0, torch.float64), (far_apart, torch.float64), (1.0, torch.float32)):
        given = (scale * logits).to(dtype)
        ours, torchs = (given.to(wide, copy=True).requires_grad_() for wide in (dtype, torch.float64))
        got = loss(ours, some)
        want = torch.nn.functional.cross_entropy(torchs.flatten(0, 1), some.flatten(), reduction="sum")
        (dx,) = torch.autograd.grad(got, ours)
        (truth,) = torch.autograd.grad(want, torchs)
        got, want = float(got.detach()), float(want.detach())
        what = f"of logits up to {float(given.abs().max()):.3g} in {str(dtype).removeprefix('torch.')}"
        if not torch.equal(ours.detach(), given):
            return f"the loss {what} writes to its logits"
        if not math.isclose(got, want, rel_tol=1e4 * torch.finfo(dtype).eps):
            return f"the loss {what} is {got:.9g}, torch's {want:.9g}"
        if dx[some == -100].any():
            return f"the loss {what} gives an ignored target a gradient"
        far = float((dx.double() - truth).abs().max())
        if not far <= 1e2 * torch.finfo(dtype).eps:
            return f"the gradient of the loss {what} is off by {far:.2g} of a probability: it is rounded, or wrong"
    return ""


@torch.no_grad()
def overwrite(trainer: Any) -> None:
    """While a save in the background is written, do at once what the next step does: write to the parameters."""
    saving = trainer.checkpoints.saving
    if saving is None:
        return
    with trainer.run.parameters() as model:
        held = [(p, p.clone()) for p in model.parameters()]
        for p, _ in held:
            p.zero_()
        saving.wait()
        for p, value in held:
            p.copy_(value)


def has_gradient(parameter: Tensor) -> bool:
    grad = gradient_of(parameter)
    return grad is not None and bool(local_tensor(grad).any())


def state_of(trainer: Any) -> dict[str, Tensor]:
    """Copy the logical parameters and buffers: a collective."""
    with trainer.run.parameters() as model:
        return {name: value.clone() for name, value in full_state_dict(model).items()}


def scale_of(trainer: Any) -> float:
    return trainer.run.scaler.scale if trainer.run.scaler else 1.0


def at_step(trainer: Any, at: int, act: Any) -> None:
    """Have a step do something before it begins."""
    step = trainer.step

    def then() -> dict[str, Any]:
        if trainer.run.step == at:
            act()
        return step()

    trainer.step = then  # type: ignore[method-assign]


def poison(trainer: Any) -> None:
    """Make this rank's loss of the next step NaN, as a bad batch does: its gradients are NaN before any sum."""
    run, factor = trainer.run, trainer.run.loss_factor

    run.loss_factor = lambda tokens: factor(tokens) * torch.nan  # type: ignore[method-assign]
    step = trainer.step

    def then() -> dict[str, Any]:
        entry = step()
        run.loss_factor, trainer.step = factor, step  # type: ignore[method-assign]
        return entry

    trainer.step = then  # type: ignore[method-assign]


def observe(trainer: Any, toy: Toy) -> RankRecord:
    """Record the tensors of the next step, as `mpcore.tools.verify` compares them."""
    run, on = trainer.run, trainer.mesh
    seen = RankRecord(on.tp.rank, on.cp.rank, on.pp.rank, on.dp.rank, rows=trainer.setup.ramp.size(0) // on.worlds.size)
    seen.length = toy.config.seq_len
    if on.cp.size > 1:
        seen.tokens = sequence_index(seen.length, on.cp, trainer.args.cp_kind)
    declared = shardings(run.model)
    with run.parameters() as model:
        seen.initial = full_tensors({name: p for name, p, _ in declarations(model)}, declared)
    forwards = [listen(stage, seen) for stage in trainer.stages]
    finish = run.finish_gradients

    def then() -> Tensor:
        run.finish_gradients = finish  # type: ignore[method-assign]
        # the comparison with the unsharded model says more than the first step's
        run.observers = [each for each in run.observers if not isinstance(each, FirstStep)]
        with run.parameters() as model:
            parameters = {name: p for name, p, _ in declarations(model)}
            grads = {name: g for name, p in parameters.items() if (g := gradient_of(p)) is not None}
            if trainer.args.zero == 0:
                seen.local = {name: g.clone() for name, g in grads.items() if not declared[name].shards}
        norm = finish()
        seen.norm = float(norm)
        with run.parameters() as model:
            grads = {name: g for name, p, _ in declarations(model) if (g := gradient_of(p)) is not None}
            seen.gradients = full_tensors(grads, declared)
        for found in forwards:
            seen.outputs |= joined(found) if found else {}
        if trainer.stages and trainer.stages[-1].last:
            seen.output = {"": seen.outputs[("", 0)]}
            seen.evaluated = {}
        return norm

    run.finish_gradients = then  # type: ignore[method-assign]
    return seen


@contextmanager
def quiet(folder: str) -> Iterator[Path]:
    """Write what this process prints to a file of the folder."""
    path = Path(folder) / f"said-{os.getpid()}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [os.dup(1), os.dup(2)]
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield path
    finally:
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)


def die(toy: Toy, out: str) -> None:
    """On each rank: train as the command does, and kill the last rank in its second step."""
    with quiet(out):
        on = mesh_of(toy)
        args = with_flags(toy.args, out=str(Path(out) / "run"), steps=10**6)
        with leave_together(on), Watchdog(on, timeout=GRACE / 2):
            trainer = trainer_of(toy)(args, on, toy.config)
            if on.job.rank == on.job.size - 1:
                at_step(trainer, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
            trainer.train()


def kill(toy: Toy, out: str, timeout: float) -> str:
    """Kill a rank of a toy in training.

    Raises:
        ValueError: if the others don't leave by themselves, or don't name it.
    """
    pool, began = Pool(toy.ranks, preload=(__name__, toy.program), grace=GRACE), time.monotonic()
    try:
        pool(toy.ranks, die, toy, out, timeout=timeout)
    except RankError as error:
        said, text = "".join(path.read_text() for path in Path(out).glob("said-*.txt")), str(error)
    else:
        raise ValueError("a rank that killed itself is still there")
    finally:
        pool.stop()
    if "still running" in text:
        raise ValueError(f"rank {toy.ranks - 1} was killed, and after {GRACE:.0f} s others still wait for it")
    named = _NAMED.findall(said)
    if str(toy.ranks - 1) not in named:
        last = said.strip().splitlines()[-1:] or "nothing"
        raise ValueError(f"rank {toy.ranks - 1} was killed, and the others said {last}")
    seconds = time.monotonic() - began
    return f"{len(named)} of {toy.ranks - 1} others name rank {toy.ranks - 1}; from start to end {seconds:.0f} s"
