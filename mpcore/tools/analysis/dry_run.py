"""Run one rank's step of any layout on one CPU: on fake tensors and a fake process group, without memory or messages.

`mpcore ledger`, `mpcore memory` and `mpcore plan` use it. Their target is a function of the user,
`build(mesh, arguments)`, which returns a `Work`; `examples.gpt.plan:build` is one.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpcore._torch.fake import NoValueError, fake_tensors, start_fake_world
from mpcore._torch.fsdp import take_unused
from mpcore._torch.module import remove_forward_pre_hook
from mpcore._torch.storage import StorageWeakRef, alive
from mpcore.gradients.accumulate import gradient_of, main_gradients, zero_gradients
from mpcore.gradients.reduce import reduce_gradients
from mpcore.layers.initialize import _to_empty
from mpcore.layers.module import refuse_wrapper
from mpcore.memory_footprint import PeakTracker, StorageTracker, storage_bytes
from mpcore.mesh.axis import Mesh
from mpcore.mesh.build import build_mesh
from mpcore.parallel.shared import state_of
from mpcore.parallel.sync import (
    begin_sums,
    finish_gradients,
    gather,
    hold_gradients,
    reduce_held,
    reduce_once,
    set_gradient_sync,
)
from mpcore.pipeline.checks import split_linears
from mpcore.pipeline.messages import sent_on
from mpcore.pipeline.schedules import Schedule
from mpcore.pipeline.split import backward_inputs, backward_weights
from mpcore.sharding.local import is_dtensor, local_tensor
from mpcore.tools.analysis.counts import CommunicationCounter
from mpcore.tools.analysis.operators import Operators
from mpcore.tools.analysis.peak import peak
from mpcore.tools.analysis.work import (
    Build,
    DryRunCounts,
    LayoutSpec,
    MicroBatchMemory,
    MicroBatchWork,
    Model,
    StepMemory,
    Work,
    combine,
)

__all__ = ["Build", "DryRunCounts", "LayoutSpec", "MicroBatchMemory", "Model", "Work", "dry_run", "pretend", "run_dry"]


@contextmanager
def pretend(world_size: int, rank: int = 0) -> Iterator[None]:
    """Within this context, this process is one rank of a world whose other ranks don't exist.

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


def dry_run(
    build: Build, arguments: Sequence[str] = (), rank: int = 0, stands_for_gpu: bool = False, **sizes: int
) -> DryRunCounts:
    """Count what one rank of a mesh holds, computes and sends in a step. All stages of the rank are run.

    Args:
        build: the function that makes the rank's work. It is called as `build(mesh, arguments)`.
        stands_for_gpu: whether to count the operators that a GPU runs, or those of a CPU.
        sizes: the sizes tp, cp, pp, ep, dp, etp and cp_inner of the mesh.

    Raises:
        ValueError: if the mesh has no such rank, the work can't be run without values, or two pipeline ranks have
            parameters of the same names.
    """
    with on_mesh(rank, **sizes) as mesh:
        found = run_dry(call_build(build, mesh, arguments), mesh, stands_for_gpu)
    check_stages(build, arguments, **sizes)
    return found


def check_stages(build: Build, arguments: Sequence[str], **sizes: int) -> None:
    """Raise ValueError if the first two pipeline ranks have parameters of the same names, as `prepare` does.

    A parameter has its name in the unsharded model, so these ranks hold the same part of it, such as all of it.
    """
    if sizes.get("pp", 1) == 1 or isinstance(build, Model):
        return
    held = []
    for rank in (0, sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1)):
        with on_mesh(rank, **sizes) as mesh:
            stages = call_build(build, mesh, arguments).stages
            held.append({name for stage in stages for name, _ in stage.named_parameters()})
    if held[0] and held[0] == held[1]:
        raise ValueError(
            f"pipeline ranks 0 and 1 both hold {len(held[0])} parameters of the same names, such as {min(held[0])}: "
            f"return the stages of mesh.pp.rank alone, with the names of the unsharded model, such as "
            f"ModuleDict({{str(i): block}}) with i the block's number there"
        )


@contextmanager
def on_mesh(rank: int, **sizes: int) -> Iterator[Mesh]:
    """Within this context, this process is one rank of a mesh whose other ranks don't exist."""
    world = 1
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} {size} is smaller than 1")
    for name in ("tp", "cp", "pp", "dp"):
        world *= sizes.get(name, 1)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not from 0 to {world - 1}, the ranks of the mesh")
    with pretend(world, rank):
        yield build_mesh(**sizes, device_type="cpu")


def call_build(build: Build, mesh: Mesh, arguments: Sequence[str]) -> Work:
    try:
        inspect.signature(build).bind(mesh, [])
    except TypeError as error:
        raise ValueError(f"the target is called as function(mesh, arguments): {error}") from None
    return build(mesh, list(arguments))


def run_dry(work: Work, mesh: Mesh, stands_for_gpu: bool = False) -> DryRunCounts:
    """Run a rank's work on fake tensors, and count, as `dry_run` does.

    Raises:
        ValueError: if `work` is no `Work`, has the wrong number of stages for this rank, or can't be run without
            values.
    """
    if not isinstance(work, Work):
        raise ValueError(f"the target returned a {type(work).__name__}, no mpcore.tools.analysis.dry_run.Work")
    wanted = work.plan.stages_of(mesh.pp.rank)
    if len(work.stages) != len(wanted):
        raise ValueError(
            f"the target made {len(work.stages)} stages for rank {mesh.pp.rank} of pp, where the schedule "
            f"{work.plan.name} has {len(wanted)}"
        )
    split_linears(work.stages, work.plan)
    rounds = [rounds_of(work.plan, index) for index in wanted]
    patterns = [tuple(split for split, _ in each) for each in rounds]
    stages, held, ledger = count_stages(work, list(zip(wanted, patterns, strict=True)), mesh, stands_for_gpu)
    times = [[time for _, time in each] for each in rounds]
    return assemble(work.plan, mesh.pp.rank, stages, times, held, ledger, early=not stands_for_gpu)


def assemble(
    plan: Schedule, rank: int, stages: list[MicroBatchMemory], times: list[list[int]], held: StepMemory,
    ledger: CommunicationCounter, early: bool = False,
) -> DryRunCounts:  # fmt: skip
    """Combine the counts of a rank's stages into those of its step: all micro-batches, and what follows the last."""
    rounds = [(t, r) for kept, each in zip(stages, times, strict=True) for t, r in zip(each, kept.rounds, strict=True)]
    sent = [(time, part.sent) for time, r in rounds for part in (r.forward, r.backward)]
    ledger.counts = combine([*sent, (1, held.sent)])
    at_end, at_any_time = peak(plan, rank, stages, early)
    return DryRunCounts(held, stages, times, at_end, at_any_time, ledger, plan)


def count_stages(
    work: Work, stages: Sequence[tuple[int, tuple[bool, ...]]], mesh: Mesh, stands_for_gpu: bool
) -> tuple[list[MicroBatchMemory], StepMemory, CommunicationCounter]:
    """Run some stages for a few micro-batches, and the optimizer once."""
    held, ledger, owner = StepMemory(), CommunicationCounter(mesh), nn.ModuleList(work.stages)
    for module in owner.modules():  # a check of the first forward, whose frames would hold inputs
        remove_forward_pre_hook(module, refuse_wrapper)
    with fake_tensors(stands_for_gpu):
        if any(p.is_meta for p in owner.parameters()):
            _to_empty(owner, "cpu")
        trained = [p for p in owner.parameters() if p.requires_grad]
        if not trained:
            smaller = f", or take a smaller pp than {mesh.pp.size}" if mesh.pp.size > 1 else ""
            count = len(list(owner.parameters()))
            raise ValueError(
                f"0 of the {count} parameters of pipeline rank {mesh.pp.rank} have requires_grad, so its "
                f"optimizer has nothing to train: set requires_grad of one{smaller}"
            )
        half = {p for p in trained if p.dtype in (torch.bfloat16, torch.float16) and not is_dtensor(p)}
        main_gradients(owner, half)  # as `prepare` does: its optimizers step float32 master weights of these
        # Stages that share a table are two owners of it; parameters() names it once.
        try:
            kept = [
                _run_stage(work, i, index, pattern, mesh.pp.rank, ledger) for i, (index, pattern) in enumerate(stages)
            ]
        except NoValueError as error:
            raise ValueError(
                f"a forward reads the value of a tensor ({error.func}){_place_of(error, owner)}, and a dry run has no "
                f"values: compute it from shapes"
            ) from error
        ledger.counts = {}
        with ledger:
            finish_gradients(work.stages)
        idle = take_unused(unit for stage in work.stages for unit in state_of(stage).units)
        idle |= {p for p in trained if gradient_of(p) is None}
        for p in idle:  # a step sends zeros, and drops the sums if no other rank used the parameter
            p.grad = torch.zeros_like(p)
        with ledger:
            reduce_gradients(owner)
        zero_gradients(idle)
        held.sent = ledger.counts
        parameters = list(owner.parameters())
        held.parameters = storage_bytes(local_tensor(p) for p in parameters)
        held.buffers = storage_bytes(owner.buffers())
        held.gradients = storage_bytes(local_tensor(g) for p in parameters if (g := gradient_of(p)) is not None)
        stepped = [_master(p) if p in half else p for p in trained]
        try:
            optimizer = work.optimizer(stepped)
        except Exception as error:
            raise ValueError(
                f"optimizer= gets a list of {len(stepped)} parameters, not the model, and raised {error!r:.200}: give "
                f"optimizer=lambda ps: torch.optim.AdamW(ps), which has as much state as mpcore.AdamW has by default"
            ) from error
        optimizer.step()
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        masters = [stand_in for p, stand_in in zip(trained, stepped, strict=True) if p in half]
        held.optimizer = storage_bytes(local_tensor(x) for x in (*states, *masters))
    return kept, held, ledger


def _place_of(error: Exception, owner: nn.Module) -> str:
    """Return the innermost module whose forward raised, and its line: " in blocks.0.mlp at model.py:44"."""
    names = {module: name for name, module in owner.named_modules()}
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            name = names[module].partition(".")[2] or "the model"
            place = f" in {name} at {Path(frame.f_code.co_filename).name}:{line}"
    return place


def _master(p: nn.Parameter) -> nn.Parameter:
    """Return a float32 parameter like a master weight, with the main gradient as its gradient."""
    master = nn.Parameter(p.detach().float())
    master.grad = gradient_of(p)
    return master


def _run_stage(
    work: Work, i: int, index: int, pattern: Sequence[bool], pp: int, ledger: CommunicationCounter
) -> MicroBatchMemory:
    """Run forward and backward of some micro-batches of stage `index`, which is the i-th stage of the work."""
    stage, kept, ends = work.stages[i], MicroBatchMemory(), index == work.plan.stages - 1
    forward: list[tuple[int, int]] = []
    weight: list[tuple[int, int]] = []
    backward: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    own = list(stage.parameters())
    there = _whole_gradients(own)  # made by an earlier stage that shares parameters with this one
    mode = nullcontext() if work.autocast is None else torch.autocast("cpu", work.autocast)
    alike = len(pattern) > 2 and not any(pattern) and not state_of(stage).last_differs
    with PeakTracker() as storages, Operators() as operators:
        for m, split in enumerate(pattern[:-1] if alike else pattern):
            last = m == len(pattern) - 1
            set_gradient_sync(stage, last)
            empty, _ = _held(storages, stage, own)
            args, kwargs = work.inputs(i)
            received = [x for x in args if isinstance(x, Tensor)]
            if index > 0 and not received[0].is_floating_point():
                raise ValueError(
                    f"stage {index} takes {received[0].dtype}, which no stage before it sends: the target must return "
                    f"the stages of mesh.pp.rank alone, not the unsharded model, and their inputs"
                )
            received = [x.requires_grad_(index > 0 and x.is_floating_point()) for x in received]
            kept.received = sum(x.nbytes for x in received) if index else 0
            given, _ = _held(storages, stage, own)  # includes other tensors that `inputs` made, which aren't counted
            others = given - empty - kept.received
            round_ = MicroBatchWork()
            ledger.counts, operators.tally = round_.forward.sent, round_.forward.operators
            with ledger:
                before = storages.begin()
                with mode:
                    y = stage(*args, **kwargs)
                    sent = () if ends else sent_on(y, index, "a dry run")
                    outputs = [work.loss(y)] if ends else [x for x in sent if x.requires_grad]
                    if ends and not outputs[0].requires_grad:
                        raise ValueError("the loss depends on no trained parameter: train one that the forward uses")
                more = storages.most - before
                _count_messages(work.plan, index, pp, received, sent, round_, ledger)
                ledger.counts, operators.tally = round_.backward.sent, round_.backward.operators
                after, gathered = _held(storages, stage, own)
                edges = [get_gradient_edge(x) for x in outputs]
                grads = [torch.empty_like(x) for x in outputs]
                kept.returned = 0 if ends else sum(x.nbytes for x in grads)
                kept.sent_back = sum(x.nbytes for x in received if x.requires_grad)
                del y, sent, outputs
                kept.output = after - _held(storages, stage, own, *grads)[0]
                del args
                before = storages.begin()
                if split:
                    rest = last, storages, kept, empty + others
                    first_half, begin = _split_backward(stage, own, index, received, edges, grads, *rest)
                    more_back, more_weight = first_half - before, storages.most - begin
                else:
                    if edges:
                        torch.autograd.backward(edges, grads)
                    if last:
                        begin_sums(stage)
                    more_back, more_weight = storages.most - before, 0
            kept.rounds.append(round_)
            kept.activations, kept.gathered = after - empty - others, max(gathered, kept.gathered)
            if m == 0:  # parameters are gathered (and kept below ZeRO-3) and gradients are allocated
                more -= min(gathered, max(more - kept.activations, 0))
                kept.made = _whole_gradients(own) - there
                made = storage_bytes(local_tensor(g) for p in own if (g := p.grad) is not None)
                more_back, more_weight = (more_back, more_weight - made) if split else (more_back - made, 0)
            forward.append((m, more))
            backward[split].append((m, more_back))
            weight += [(m, more_weight)] * split
            if m > 0:
                kept.unsummed = max(empty, 0)
            del received, edges, grads, kwargs
    kept.rounds += kept.rounds[-1:] * alike  # the last micro-batch is like those in the middle
    kept.forward_more, kept.weight_more = _most_of(forward), _most_of(weight)
    kept.backward_more = max(map(_most_of, backward.values()))
    return kept


def _whole_gradients(parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes of gradients that are not sharded."""
    return storage_bytes(g for p in parameters if (g := p.grad) is not None and not is_dtensor(g))


def _most_of(found: Sequence[tuple[int, int]]) -> int:
    """Return the largest value of any micro-batch.

    The first micro-batch is unlike the others, so it counts only if there is no other.
    """
    return max([more for m, more in found if m > 0] or [more for _, more in found] or [0])


def rounds_of(plan: Schedule, index: int) -> list[tuple[bool, int]]:
    """Return the micro-batches of a stage to run: whether each one's backward is split, and how many it stands for."""
    if not plan.splits_backward:
        middle = plan.micro_batches - 2
        return [(False, 1), *([(False, middle)] if middle > 0 else []), *([(False, 1)] if middle >= 0 else [])]
    order = [a.kind == "W" for a in plan.ranks[plan.rank_of[index]] if a.stage == index and a.kind in ("B", "W")]
    middle = [(split, order[1:-1].count(split)) for split in (False, True)]
    return [(order[0], 1), *(kind for kind in middle if kind[1]), *([(order[-1], 1)] if len(order) > 1 else [])]


def _split_backward(
    stage: nn.Module, own: Sequence[nn.Parameter], index: int, received: list[Tensor], edges: list[GradientEdge],
    grads: list[Tensor], last: bool, storages: PeakTracker, kept: MicroBatchMemory, empty: int,
) -> tuple[int, int]:  # fmt: skip
    """Run a backward in two halves, as the pipeline does. Note in `kept` what is held between them, besides `empty`.

    Returns the most that was held within the first half, and what was held when the second half began.
    """
    if index == 0:  # the first stage needs no gradient of its input: the second half does everything
        between = _held(storages, stage, own)[0] - empty
        kept.between, kept.between_inputs = max(between, kept.between), 0
        first_half, begin = storages.most, storages.begin()
        torch.autograd.backward(edges, grads)
        return first_half, begin
    gather(stage)
    hold_gradients(stage)
    inputs = [StorageWeakRef(x.untyped_storage()) for x in received]
    dxs, deferred = backward_inputs(edges, grads, received)
    for held in (edges, grads, received):
        held.clear()
    left = [storage for weak in inputs if (storage := alive(weak)) is not None]
    kept.between_inputs = sum(storage.nbytes() for storage in left)
    kept.between = max(_held(storages, stage, own, *dxs)[0] - empty, kept.between)
    del dxs, left
    first_half, begin = storages.most, storages.begin()
    gather(stage)
    backward_weights(deferred)
    reduce_held(stage, last)
    if last:
        reduce_once(stage)
    return first_half, begin


def _held(
    storages: StorageTracker, stage: nn.Module, own: Sequence[nn.Parameter], *messages: Tensor | None
) -> tuple[int, int]:
    """Return the bytes held without messages, own gradients and parameters; and the bytes of gathered parameters."""
    # Gathered parameters are not in `own`. Their gradients are not yet reduced.
    gradients = [local_tensor(p.grad) for p in own if p.grad is not None]
    gradients += [x for x in messages if x is not None]
    rest = storages.held([*gradients, *(local_tensor(p) for p in stage.parameters())])
    return rest, storages.held(gradients) - rest


def _count_messages(
    plan: Schedule, index: int, pp: int, received: Sequence[Tensor], sent: Sequence[Tensor], round_: MicroBatchWork,
    ledger: CommunicationCounter,
) -> None:  # fmt: skip
    """Count the messages of a micro-batch with stages on other ranks."""
    for neighbour, tensors, forth, back in ((index - 1, received, "recv", "send"), (index + 1, sent, "send", "recv")):
        if not 0 <= neighbour < plan.stages or plan.rank_of[neighbour] == pp:
            continue
        for x in tensors:
            ledger.counts = round_.forward.sent
            ledger.add("pp", forth, x.nbytes)
            ledger.counts = round_.backward.sent
            if x.requires_grad:
                ledger.add("pp", back, x.nbytes)
