"""One rank's step of any layout on one CPU: fake process group, fake tensors, nothing allocated or sent.

`python -m mpcore.analysis {ledger,memory,plan}` call it. They are given a function of the user,
`build(mesh, arguments)`, which returns a `Work`; `examples.gpt.plan:build` is one.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from mpcore._torch.dispatch import TorchDispatchMode
from mpcore._torch.fake import NoValueError, fake_tensors, start_fake_world
from mpcore.analysis.counts import Ledger
from mpcore.gradients.reduce import reduce_gradients
from mpcore.layers.initialize import _to_empty
from mpcore.memory_footprint import StorageTracker, storage_bytes
from mpcore.mesh.axis import Mesh
from mpcore.mesh.build import build_mesh
from mpcore.parallel.sync import finish_gradients, gather, hold_gradients, reduce_held, reduce_once, sync_gradients
from mpcore.pipeline.checks import split_linears
from mpcore.pipeline.runtime import sent_on
from mpcore.pipeline.schedules import Schedule
from mpcore.pipeline.split import backward_inputs, backward_weights
from mpcore.sharding.local import local_tensor


@dataclass(frozen=True)
class Work:
    """What a rank runs in a step.

    Attributes:
        stages: this rank's stages, lowest first, on the meta device, cut over data and recomputing as they shall.
        plan: the pipeline's schedule; its micro-batches are those of the step.
        inputs: `inputs(i)` makes the arguments of `stages[i]` for one micro-batch, `(args, kwargs)`, where `args` are
            the tensors that the stage before returns.
        loss: of the last stage's output.
        optimizer: makes the optimizer of some parameters.
        autocast: the dtype of matrix products; None: that of the parameters.
        theory: by (axis, kind) the bytes that the step's collectives should have.
    """

    stages: Sequence[nn.Module]
    plan: Schedule
    inputs: Callable[[int], tuple[tuple, dict[str, Any]]]
    loss: Callable[[Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    autocast: torch.dtype | None = None
    theory: dict[tuple[str, str], int] = field(default_factory=dict)


Build = Callable[[Mesh, list[str]], Work]


@dataclass
class Kept:
    """What a stage holds from forwards to backwards, in bytes.

    Attributes:
        activations: of one micro-batch, its output counted and its input not.
        output: of them what goes with the forward's end: the last stage's output, unless backward needs it.
        between: what is left of them between the two halves of a split backward, with the gradients of layers' outputs
            that the second half takes.
        handed: of the activations the output, where it is the input of a stage of this rank.
        gathered: parameters gathered over data that are there after a forward.
        unsummed: gradients that aren't summed over data yet, from the first backward on.
        received, sent_forward, sent_backward: tensors of one micro-batch that pass between stages, sent ones to other
            ranks alone. torch's runtime holds those of all micro-batches to the end of a step, and what it received
            until the next step's takes its place.
        forward_flops, backward_flops: floating-point operations of products in one micro-batch; backward's are those of
            both its halves, and of what it computes again.
        sent: by axis the volume (`Ledger.volume`) of what a step's micro-batches send in this stage.
    """

    activations: int = 0
    output: int = 0
    between: int = 0
    handed: int = 0
    gathered: int = 0
    unsummed: int = 0
    received: int = 0
    sent_forward: int = 0
    sent_backward: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    sent: dict[str, int] = field(default_factory=dict)


@dataclass
class Found:
    """What a dry run counted, in bytes of one rank and one step.

    Attributes:
        parameters, buffers, gradients, optimizer: what lies here after a step, its gradients included.
        stages: what each stage of the rank holds in between.
        peak: the most that they hold at once, in the order of the schedule.
        ledger: the step's collectives and messages.
        theory: by (axis, kind) the bytes that they should have, where the work says.
        plan: the schedule of the pipeline.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    stages: list[Kept] = field(default_factory=list)
    peak: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    theory: dict[tuple[str, str], int] = field(default_factory=dict)
    plan: Schedule | None = None

    @property
    def total(self) -> int:
        """All of them, each at its largest."""
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.peak


@contextmanager
def pretend(world_size: int, rank: int = 0) -> Iterator[None]:
    """A world of so many ranks, of which this process is one and the others don't exist.

    Raises:
        ValueError: if torch.distributed is running already.
    """
    if dist.is_initialized():
        raise ValueError("torch.distributed is running: plan in a process of its own, without torchrun")
    start_fake_world(world_size, rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_run(build: Build, arguments: Sequence[str] = (), rank: int = 0, **sizes: int) -> Found:
    """Plan one rank of a mesh.

    Args:
        build: makes the rank's work.
        arguments: what else it takes.
        rank: the rank.
        sizes: tp, cp, pp, ep, dp, etp and cp_inner of the mesh.

    Raises:
        ValueError: if the mesh has no such rank.
    """
    world = 1
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} {size} is smaller than 1")
    for name in ("tp", "cp", "pp", "dp"):
        world *= sizes.get(name, 1)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not from 0 to {world - 1}, the ranks of the mesh")
    with pretend(world, rank):
        mesh = build_mesh(**sizes, device_type="cpu")
        try:
            inspect.signature(build).bind(mesh, [])
        except TypeError as error:
            raise ValueError(f"the target is called as function(mesh, arguments): {error}") from None
        return run_dry(build(mesh, list(arguments)), mesh)


def run_dry(work: Work, mesh: Mesh) -> Found:
    """Run a rank's work on fake tensors and count.

    Raises:
        ValueError: if it is no `Work`, or not of this rank, or can't be run without values.
    """
    if not isinstance(work, Work):
        raise ValueError(f"the target returned a {type(work).__name__}, no mpcore.analysis.dry_run.Work")
    wanted = work.plan.stages_of(mesh.pp.rank)
    if len(work.stages) != len(wanted):
        raise ValueError(
            f"the target made {len(work.stages)} stages for rank {mesh.pp.rank} of pp, where the schedule "
            f"{work.plan.name} has {len(wanted)}"
        )
    found = Found(ledger=Ledger(mesh), theory=work.theory, plan=work.plan)
    owner, pp = nn.ModuleList(work.stages), mesh.pp.rank
    split_linears(work.stages, work.plan)
    with fake_tensors():
        if any(p.is_meta for p in owner.parameters()):
            _to_empty(owner, "cpu")
        # Stages that share a table are two owners of it; parameters() names it once.
        try:
            found.stages = [_run_stage(work, i, index, mesh, found) for i, index in enumerate(wanted)]
        except NoValueError as error:
            raise ValueError(f"a forward reads the value of a tensor ({error.func}), and a dry run has none") from error
        with found.ledger:
            finish_gradients(work.stages)
            for stage in work.stages:
                reduce_gradients(stage)
        parameters = list(owner.parameters())
        found.parameters = storage_bytes(local_tensor(p) for p in parameters)
        found.buffers = storage_bytes(owner.buffers())
        found.gradients = storage_bytes(local_tensor(p.grad) for p in parameters if p.grad is not None)
        optimizer = work.optimizer([p for p in parameters if p.requires_grad])
        optimizer.step()
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        found.optimizer = storage_bytes(local_tensor(x) for x in states)
    found.peak = peak(work.plan, pp, found.stages)
    return found


def _run_stage(work: Work, i: int, index: int, mesh: Mesh, found: Found) -> Kept:
    """Forward and backward of a stage's first micro-batch, its last, and one of each kind between them."""
    stage, kept, ends = work.stages[i], Kept(), index == work.plan.stages - 1
    own = list(stage.parameters())
    mode = nullcontext() if work.autocast is None else torch.autocast("cpu", work.autocast)
    before_stage = found.ledger.volumes()
    with StorageTracker() as storages, _Flops() as flops:
        for m, (split, times) in enumerate(rounds := _rounds(work.plan, index)):
            last = m == len(rounds) - 1
            sync_gradients(stage, last)
            args, kwargs = work.inputs(i)
            received = [x for x in args if isinstance(x, Tensor)]
            if index > 0 and not received[0].is_floating_point():
                raise ValueError(
                    f"stage {index} takes {received[0].dtype}, which no stage before it sends: the target must return "
                    f"the stages of mesh.pp.rank alone, not the whole model, and their inputs"
                )
            for x in received:
                x.requires_grad_(index > 0 and x.is_floating_point())
            before, _ = _held(storages, stage, own)
            with found.ledger.times(times), found.ledger:
                flops.count = 0
                with mode:
                    y = stage(*args, **kwargs)
                    sent = () if ends else sent_on(y, index, "a dry run")
                    outputs = [work.loss(y)] if ends else [x for x in sent if x.requires_grad]
                kept.forward_flops, flops.count = flops.count, 0
                _count_messages(work.plan, index, mesh.pp.rank, received, sent, found.ledger, kept)
                after, gathered = _held(storages, stage, own)
                del y, sent
                kept.output = after - _held(storages, stage, own)[0] if ends else 0
                grads = None if ends else [torch.empty_like(x) for x in outputs]
                if split:
                    between = _split_backward(stage, own, index, received, outputs, grads, last, storages)
                    kept.between = max(between - before, kept.between)
                elif outputs:
                    torch.autograd.backward(outputs, grads)
            kept.backward_flops = flops.count
            kept.activations, kept.gathered = after - before, max(gathered, kept.gathered)
            if m > 0:
                kept.unsummed = max(before - sum(x.nbytes for x in received), 0)
            del args, received, x, outputs, grads
    kept.sent = {axis: size - before_stage.get(axis, 0) for axis, size in found.ledger.volumes().items()}
    return kept


_ON_CPU = {  # torch has formulas for the attention of GPUs alone, and of grouped queries not before 2.13
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        2 * q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3])  # q k^T and p v
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: (
        2 * q.shape[:3].numel() * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])  # q k^T again, dp, dv, dq, dk
    ),
}


class _Flops(TorchDispatchMode):
    """Counts the floating-point operations of products, by torch's formulas and ours: of attention those of all pairs,
    whatever the mask. No hooks, unlike torch's counter: they would keep tensors that are counted as held."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _ON_CPU.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.count += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _rounds(plan: Schedule, index: int) -> list[tuple[bool, int]]:
    """Of each micro-batch that is run, whether its backward is split, and for how many it stands."""
    order = [a.kind == "W" for a in plan.ranks[plan.rank_of[index]] if a.stage == index and a.kind in ("B", "W")]
    middle = [(split, order[1:-1].count(split)) for split in (False, True)]
    return [(order[0], 1), *(kind for kind in middle if kind[1]), *([(order[-1], 1)] if len(order) > 1 else [])]


def _split_backward(
    stage: nn.Module, own: Sequence[nn.Parameter], index: int, received: Sequence[Tensor], outputs: Sequence[Tensor],
    grads: Sequence[Tensor] | None, last: bool, storages: StorageTracker,
) -> int:  # fmt: skip
    """Backward in two halves, as the pipeline runs them; returns what is held in between."""
    if index == 0:  # no gradient of its input is asked for, so all is done in the second half
        between, _ = _held(storages, stage, own, *(grads or ()))
        torch.autograd.backward(outputs, grads)
        return between
    gather(stage)
    hold_gradients(stage)
    dx, deferred = backward_inputs(outputs, grads, received)
    between, _ = _held(storages, stage, own, *(grads or ()), *dx)
    gather(stage)
    backward_weights(deferred)
    reduce_held(stage, last)
    if last:
        reduce_once(stage)
    return between


def _held(
    storages: StorageTracker, stage: nn.Module, own: Sequence[nn.Parameter], *messages: Tensor | None
) -> tuple[int, int]:
    """What is held without messages, this rank's gradients and gathered parameters; and the last."""
    # Gathered parameters are none of its own, and have gradients that wait to be summed.
    gradients = [local_tensor(p.grad) for p in own if p.grad is not None]
    gradients += [x for x in messages if x is not None]
    rest = storages.held([*gradients, *(local_tensor(p) for p in stage.parameters())])
    return rest, storages.held(gradients) - rest


def _count_messages(
    plan: Schedule, index: int, pp: int, received: Sequence[Tensor], sent: Sequence[Tensor], ledger: Ledger, kept: Kept
) -> None:
    """Count what a micro-batch sends to and receives from other stages; torch's runtime keeps both to the end."""
    kept.received = kept.sent_forward = kept.sent_backward = kept.handed = 0
    for neighbour, tensors, forth, back in ((index - 1, received, "recv", "send"), (index + 1, sent, "send", "recv")):
        if not 0 <= neighbour < plan.stages:
            continue
        there, again = [x.nbytes for x in tensors], [x.nbytes for x in tensors if x.requires_grad]
        kept.received += sum(there if forth == "recv" else again)
        if plan.rank_of[neighbour] == pp:
            kept.handed = sum(there) if neighbour > index else kept.handed
            continue
        for size in there:
            ledger.add("pp", forth, size)
        for size in again:
            ledger.add("pp", back, size)
        if forth == "send":
            kept.sent_forward = sum(there)
        else:
            kept.sent_backward = sum(again)


def peak(plan: Schedule, rank: int, stages: Sequence[Kept]) -> int:
    """The most bytes that a pipeline rank holds besides its own parameters, gradients and states, at the end of any
    forward, going through its actions in order.

    Args:
        plan: the schedule.
        rank: the rank along pp.
        stages: what each of its stages keeps.
    """
    of = dict(zip(plan.stages_of(rank), stages, strict=True))
    started: set[int] = set()
    freed: set[int] = set()
    held = most = sum(plan.micro_batches * kept.received for kept in stages)
    for action in plan.ranks[rank]:
        stage, kept = action.stage, of[action.stage]
        if action.kind == "F":
            held += kept.activations + (0 if stage in started else kept.gathered)
            started.add(stage)
            most = max(most, held)
            held -= kept.output + kept.handed  # the second takes the place of what the stage behind received before
        if action.kind in ("B", "I"):
            held += kept.sent_backward
        if action.kind == "I":
            held += kept.between + kept.output - kept.activations
        if action.kind in ("B", "W"):
            left = kept.activations - kept.output if action.kind == "B" else kept.between
            held += kept.sent_forward + kept.handed - left + (0 if stage in freed else kept.unsummed)
            freed.add(stage)
    return most


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """The mesh that a planner's command line asks for."""
    return {name: getattr(args, name) for name in ("tp", "cp", "pp", "ep", "dp", "etp", "cp_inner")}


def parser_of(prog: str, about: str | None) -> argparse.ArgumentParser:
    """The beginning of a planner's command line: the target."""
    parser = argparse.ArgumentParser(prog=prog, description=about, allow_abbrev=False)
    parser.epilog = "Other flags go to the target."
    parser.add_argument("target", help="module:function, called as function(mesh, arguments), which returns a Work")
    return parser


def parse(prog: str, about: str | None, argv: list[str] | None) -> argparse.Namespace:
    """The command line of a planner: a target, the mesh, the rank; `arguments` are all others, for the target."""
    parser = parser_of(prog, about)
    for name in ("tp", "cp", "pp", "ep", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--etp", type=int, help="tensor parallel size inside each expert (default: tp)")
    parser.add_argument("--cp-inner", type=int, help="ranks of a sub-group of cp, for two-level (default: none)")
    parser.add_argument("--rank", type=int, default=0, help="the rank to plan (default 0)")
    args, args.arguments = parser.parse_known_args(argv)
    return args


def target(name: str) -> Build:
    """The function that a `module:function` names.

    Raises:
        ValueError: if there is none.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} names no function as module:function does: {error}") from error
