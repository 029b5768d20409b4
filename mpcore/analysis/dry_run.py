"""One rank's step of any layout on one CPU: fake process group, fake tensors, nothing allocated or sent.

`mpcore ledger`, `mpcore memory` and `mpcore plan` call it. They are given a function of the user,
`build(mesh, arguments)`, which returns a `Work`; `examples.gpt.plan:build` is one.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.flop_counter import flop_registry

from mpcore._torch.dispatch import TorchDispatchMode
from mpcore._torch.fake import NoValueError, fake_tensors, start_fake_world
from mpcore._torch.storage import StorageWeakRef, alive
from mpcore.analysis.counts import Ledger
from mpcore.command_line import Parser
from mpcore.gradients.accumulate import gradient_of, main_gradients
from mpcore.gradients.reduce import reduce_gradients
from mpcore.layers.initialize import _to_empty
from mpcore.memory_footprint import StorageTracker, storage_bytes
from mpcore.mesh.axis import Mesh
from mpcore.mesh.build import build_mesh
from mpcore.parallel.sync import finish_gradients, gather, hold_gradients, reduce_held, reduce_once, sync_gradients
from mpcore.pipeline.checks import split_linears
from mpcore.pipeline.messages import releases, sent_on
from mpcore.pipeline.schedules import Schedule, with_messages
from mpcore.pipeline.split import backward_inputs, backward_weights
from mpcore.sharding.local import is_dtensor, local_tensor


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
    """What a stage holds of one micro-batch, in bytes.

    Attributes:
        received: its inputs.
        activations: after forward, with its inputs and outputs.
        output: the outputs, unless backward needs them: they are held until they have arrived at the next stage.
        between: between the two halves of a split backward, with the gradients of layers' outputs that the second half
            takes; of its inputs what backward still needs.
        between_inputs: of that, what is left of the inputs.
        returned: the gradients that the next stage sends back.
        sent_back: the gradients of its inputs.
        gathered: parameters gathered over data that are there after a forward.
        unsummed: gradients that aren't summed over data yet, from the first backward on.
        forward_flops, backward_flops: floating-point operations of products in one micro-batch; backward's are those of
            both its halves, and of what it computes again.
        sent: by axis the volume (`Ledger.volume`) of what a step's micro-batches send in this stage.
    """

    received: int = 0
    activations: int = 0
    output: int = 0
    between: int = 0
    between_inputs: int = 0
    returned: int = 0
    sent_back: int = 0
    gathered: int = 0
    unsummed: int = 0
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
        trained = [p for p in owner.parameters() if p.requires_grad]
        half = {p for p in trained if p.dtype in (torch.bfloat16, torch.float16) and not is_dtensor(p)}
        main_gradients(owner, half)  # as `prepare`, whose optimizers step float32 masters of these
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
        found.gradients = storage_bytes(local_tensor(g) for p in parameters if (g := gradient_of(p)) is not None)
        stepped = [_master(p) if p in half else p for p in trained]
        optimizer = work.optimizer(stepped)
        optimizer.step()
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        masters = [stand_in for p, stand_in in zip(trained, stepped, strict=True) if p in half]
        found.optimizer = storage_bytes(local_tensor(x) for x in (*states, *masters))
    found.peak = peak(work.plan, pp, found.stages)
    return found


def _master(p: nn.Parameter) -> nn.Parameter:
    """A float32 parameter as a master is, with the main gradient as its gradient."""
    master = nn.Parameter(p.detach().float())
    master.grad = gradient_of(p)
    return master


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
            empty, _ = _held(storages, stage, own)
            args, kwargs = work.inputs(i)
            received = [x for x in args if isinstance(x, Tensor)]
            if index > 0 and not received[0].is_floating_point():
                raise ValueError(
                    f"stage {index} takes {received[0].dtype}, which no stage before it sends: the target must return "
                    f"the stages of mesh.pp.rank alone, not the whole model, and their inputs"
                )
            for x in received:
                x.requires_grad_(index > 0 and x.is_floating_point())
            kept.received = sum(x.nbytes for x in received) if index else 0
            given, _ = _held(storages, stage, own)  # with what else `inputs` made, which isn't counted
            others = given - empty - kept.received
            with found.ledger.times(times), found.ledger:
                flops.count = 0
                with mode:
                    y = stage(*args, **kwargs)
                    sent = () if ends else sent_on(y, index, "a dry run")
                    outputs = [work.loss(y)] if ends else [x for x in sent if x.requires_grad]
                kept.forward_flops, flops.count = flops.count, 0
                _count_messages(work.plan, index, mesh.pp.rank, received, sent, found.ledger)
                after, gathered = _held(storages, stage, own)
                edges = [get_gradient_edge(x) for x in outputs]
                grads = [torch.empty_like(x) for x in outputs]
                kept.returned = 0 if ends else sum(x.nbytes for x in grads)
                kept.sent_back = sum(x.nbytes for x in received if x.requires_grad)
                del y, sent, outputs
                kept.output = after - _held(storages, stage, own, *grads)[0]
                del args, x
                if split:
                    _split_backward(stage, own, index, received, edges, grads, last, storages, kept, empty + others)
                elif edges:
                    torch.autograd.backward(edges, grads)
            kept.backward_flops = flops.count
            kept.activations, kept.gathered = after - empty - others, max(gathered, kept.gathered)
            if m > 0:
                kept.unsummed = max(empty, 0)
            del received, edges, grads
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
    stage: nn.Module, own: Sequence[nn.Parameter], index: int, received: list[Tensor], edges: list[GradientEdge],
    grads: list[Tensor], last: bool, storages: StorageTracker, kept: Kept, empty: int,
) -> None:  # fmt: skip
    """Backward in two halves, as the pipeline runs them; notes in `kept` what is held in between, besides `empty`.

    It has as many arguments as the forward before it has results.
    """
    if index == 0:  # no gradient of its input is asked for, so all is done in the second half
        between = _held(storages, stage, own)[0] - empty
        kept.between, kept.between_inputs = max(between, kept.between), 0
        torch.autograd.backward(edges, grads)
        return
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
    gather(stage)
    backward_weights(deferred)
    reduce_held(stage, last)
    if last:
        reduce_once(stage)


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
    plan: Schedule, index: int, pp: int, received: Sequence[Tensor], sent: Sequence[Tensor], ledger: Ledger
) -> None:
    """Count what a micro-batch sends to and receives from stages on other ranks."""
    for neighbour, tensors, forth, back in ((index - 1, received, "recv", "send"), (index + 1, sent, "send", "recv")):
        if not 0 <= neighbour < plan.stages or plan.rank_of[neighbour] == pp:
            continue
        for x in tensors:
            ledger.add("pp", forth, x.nbytes)
            if x.requires_grad:
                ledger.add("pp", back, x.nbytes)


def peak(plan: Schedule, rank: int, stages: Sequence[Kept]) -> int:
    """The most bytes that a pipeline rank holds besides its own parameters, gradients and states, at the end of any
    forward, going through its actions in order as `mpcore.pipeline.executor` does.

    Args:
        plan: the schedule.
        rank: the rank along pp.
        stages: what each of its stages keeps.
    """
    of = dict(zip(plan.stages_of(rank), stages, strict=True))
    whole = with_messages(plan) if len(plan.ranks) > 1 else plan
    released = releases(whole, rank)
    local = {stage for stage in of if stage + 1 in of}  # whose outputs are the inputs of the next, until its backward
    started: set[int] = set()
    freed: set[int] = set()
    held = most = 0
    for action in whole.ranks[rank]:
        kind, stage, _ = action
        kept, before = of[stage], stage - 1 in local
        for send in released.get(action, ()):
            held -= of[send.stage].output if send.kind == "SEND_F" else of[send.stage].sent_back
        if kind == "RECV_F":
            held += kept.received
        if kind == "RECV_B":
            held += kept.returned
        if kind == "F":
            held += kept.activations - kept.received + (0 if stage in started else kept.gathered)
            started.add(stage)
            most = max(most, held)
            held -= kept.output if stage == plan.stages - 1 else 0
        if kind in ("B", "I"):
            held += kept.sent_back
        if kind == "B" or kind == ("I" if stage else "W"):  # the first stage's backward is all in W
            held -= kept.returned
        if kind == "I":  # of an input that the stage before holds, nothing is freed here
            held += kept.between - (kept.activations - kept.output)
            held += kept.received - kept.between_inputs if before else 0
        if kind in ("B", "W"):
            held -= kept.activations - kept.output if kind == "B" else kept.between
            held += (kept.received if kind == "B" else kept.between_inputs) if before else 0
            held += 0 if stage in freed else kept.unsummed
            freed.add(stage)
        if before and kind in ("B", "W"):
            held -= of[stage - 1].output
    return most


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """The mesh that a planner's command line asks for."""
    return {name: getattr(args, name) for name in ("tp", "cp", "pp", "ep", "dp", "etp", "cp_inner")}


def parser_of(prog: str, about: str | None, example: str) -> Parser:
    """The beginning of a planner's command line: the target."""
    parser = Parser(prog=prog, description=(about or "").partition("\n\n")[0], examples=[example])
    parser.add_argument(
        "target",
        help="module:function, called as function(mesh, arguments), which returns a Work; flags not listed here are "
        "its arguments",
    )
    return parser


def parse(prog: str, about: str | None, argv: list[str] | None) -> argparse.Namespace:
    """The command line of a planner: a target, the mesh, the rank; `arguments` are all others, for the target."""
    example = f"{prog} examples.gpt.plan:build --tp 8 --pp 4 --dp 32 --preset llama3-70b --global-batch 1024"
    parser = parser_of(prog, about, example)
    for name in ("tp", "cp", "pp", "ep", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--etp", type=int, help="tensor parallel size inside each expert (default: tp)")
    parser.add_argument("--cp-inner", type=int, help="ranks of a sub-group of cp, for two-level (default: none)")
    parser.add_argument("--rank", type=int, default=0, help="the rank to plan (default 0)")
    args, args.arguments = parser.parse_known_args(argv)
    return args
