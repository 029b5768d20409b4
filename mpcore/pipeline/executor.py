"""Floor 4: run one rank's actions of a schedule, and hold in memory what is in flight and nothing else.

- A receive is posted up to two computations before it is needed (`messages.receive_early`).
- A receive buffer exists from the receive to the end of its micro-batch's backward.
- What is sent is released when a later message shows that it has arrived (`messages.releases`).
- A backward begins at gradient edges, so a stage's outputs are not held for it.
- A stage that fails sends zeros, or says that it failed, so that no other rank waits for it.

torch's runtime (`torch.distributed.pipelining`) makes the buffers of all micro-batches at a step's start and keeps what
it sent to the end. It asks for one shape in all micro-batches, and runs one more forward to find it out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpcore._torch.autograd import run_backward
from mpcore.mesh.axis import Axis
from mpcore.parallel.sync import (
    gather,
    hold_gradients,
    reduce_held,
    reduce_once,
    set_gradient_sync,
    sums_within_backward,
)
from mpcore.pipeline.messages import (
    Message,
    Meta,
    input_of,
    peer_of,
    post,
    receive_early,
    receive_header,
    releases,
    send_header,
    sent_on,
)
from mpcore.pipeline.schedules import EXPOSED, MESSAGES, Action, Schedule
from mpcore.pipeline.split import Deferred, backward_inputs, backward_weights


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of a micro-batch. Micro-batches with the same key have messages of the same shapes."""

    x: Tensor
    target: Tensor
    arguments: Mapping[str, Tensor]
    key: Any  # shapes and dtypes of all of these tensors


@dataclass
class MicroBatchState:
    """What a stage holds of one micro-batch."""

    inputs: Sequence[Tensor] | None = None  # None: an earlier stage failed
    wanted: Sequence[bool] = ()  # for each input, whether the previous stage needs its gradient
    ends: list[GradientEdge | None] = field(default_factory=list)  # where backward begins
    grads: tuple[Tensor, ...] = ()  # of `ends`, from the next stage or of the loss
    sent: tuple[Meta, ...] | None = None  # to the next stage
    deferred: Deferred | None = None  # between the two halves of a split backward


class Executor:
    """Run the steps of one schedule on one rank.

    Args:
        stages: this rank's stages by number.
        plan: the schedule, with only F, B, I and W.
        noted: `noted(kind, stage, micro_batch)`, a context around each action, from a message's post until its wait is
            over, and around the wait, whose kind is the message's after `EXPOSED`.

    Attributes:
        problems: the errors of the step, in order. The step still runs to its end, with zeros.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], plan: Schedule, pp: Axis, device: torch.device,
        loss: Callable[[Any, Tensor], Tensor], noted: Callable[[str, int, int], Any],
    ) -> None:  # fmt: skip
        self.stages = stages
        self.pp = pp
        self.device = device
        self.loss = loss
        self.noted = noted
        self.plan: Schedule = plan.with_messages if pp.size > 1 else _one_by_one(plan)
        actions = self.plan.ranks[pp.rank]
        self.peers: dict[Action, int] = {x: peer_of(self.plan, x) for x in actions if x.kind in MESSAGES}
        # On a GPU all messages of a group share a stream: an early receive there would hold the sends behind it.
        early = pp.size > 1 and device.type == "cpu"
        self.early: Sequence[Action] = receive_early(self.plan, pp.rank) if early else actions
        self.arrivals: dict[Action, list[Action]] = self._arrivals(actions)
        self.last: dict[int, Action] = {action.stage: action for action in actions if action.kind in ("B", "W")}
        self.shapes: dict[tuple[int, Any], tuple[Meta, ...]] = {}  # of the messages of a stage, by shape of batch
        self.problems: list[Exception] = []
        self.one: Tensor | None = None

    def _arrivals(self, actions: Sequence[Action]) -> dict[Action, list[Action]]:
        """Return, for each action, the messages to wait for: its input, and the sends that have arrived by then."""
        sends, taking = releases(self.plan, self.pp.rank), [x for x in actions if x.kind in ("F", "B", "I")]
        return {x: [y for y in (input_of(x),) if y in self.peers] + sends.get(x, []) for x in taking}

    def run(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Run a step. Return the sum of the losses in float64, without a graph; 0 on ranks without the last stage.

        On a single rank, errors of a stage are raised directly.
        """
        self.problems.clear()
        return _Step(self, micro_batches).run()


class _Step:
    """Run one step, and hold the micro-batches and messages in flight."""

    def __init__(self, executor: Executor, micro_batches: Sequence[MicroBatch]) -> None:
        self.of, self.micro_batches = executor, micro_batches
        self.held: dict[tuple[int, int], MicroBatchState] = defaultdict(MicroBatchState)
        self.outbox: dict[Action, tuple[Tensor, ...] | None] = {}
        self.messages: dict[Action, Message] = {}
        self.travels: dict[Action, Any] = {}  # notes how long each is in flight
        self.losses: list[Tensor] = []

    def run(self) -> Tensor:
        run = {"F": self.forward, "B": self.backward, "I": self.backward_inputs, "W": self.backward_weights}
        run |= {"SEND_F": self.send_forward, "SEND_B": self.send_backward}
        run |= {"RECV_F": self.receive_forward, "RECV_B": self.receive_backward}
        received = {(a.stage - 1, self.micro_batches[a.micro_batch].key) for a in self.of.peers if a.kind == "RECV_F"}
        known = self.of.shapes.keys() >= received  # otherwise the host waits for headers, in the schedule's order
        for action in self.of.early if known else self.of.plan.ranks[self.of.pp.rank]:
            kind, stage, m = action
            run[kind](action, stage, m)
        for message in [*self.messages]:
            self._wait(message)
        return torch.stack(self.losses or [torch.zeros((), device=self.of.device)]).sum(dtype=torch.float64)

    # --- messages -----------------------------------------------------------------------------------------------------

    def send_forward(self, action: Action, stage: int, m: int) -> None:
        outputs = self.outbox.pop(action)
        key = stage, self.micro_batches[m].key
        metas = self.of.shapes.get(key)
        if metas is None:
            metas = None if outputs is None else tuple(map(Meta.of, outputs))
            send_header(metas, self.of.pp, self.of.peers[action], self.of.device)
            if metas is None:
                return
            self.of.shapes[key] = metas
        self.held[stage, m].sent = metas
        self._post(dist.isend, [x.empty(self.of.device).zero_() for x in metas] if outputs is None else outputs, action)

    def receive_forward(self, action: Action, stage: int, m: int) -> None:
        key = stage - 1, self.micro_batches[m].key
        metas = self.of.shapes.get(key)
        if metas is None:
            metas = receive_header(self.of.pp, self.of.peers[action], self.of.device)
            if metas is None:
                return
            self.of.shapes[key] = metas
        self._give(stage, m, self._receive(metas, action), [x.requires_grad for x in metas])

    def send_backward(self, action: Action, stage: int, m: int) -> None:
        self._post(dist.isend, self.outbox.pop(action) or (), action)

    def receive_backward(self, action: Action, stage: int, m: int) -> None:
        metas = self.held[stage, m].sent or ()
        self.held[stage, m].grads = self._receive([x for x in metas if x.requires_grad], action)

    def _receive(self, metas: Sequence[Meta], action: Action) -> tuple[Tensor, ...]:
        tensors = tuple([x.empty(self.of.device) for x in metas])
        self._post(dist.irecv, tensors, action)
        return tensors

    def _give(self, stage: int, m: int, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        held = self.held[stage, m]
        held.inputs, held.wanted = inputs, wanted
        for x, needs in zip(inputs, wanted, strict=True):
            x.requires_grad_(needs)

    def _post(self, transfer: Callable[..., Any], tensors: Sequence[Tensor], action: Action) -> None:
        if tensors:
            self.travels[action] = self.of.noted(*action)
            self.travels[action].__enter__()
            self.messages[action] = post(transfer, tensors, self.of.pp, self.of.peers[action], action)

    def _await(self, action: Action) -> None:
        for message in self.of.arrivals[action]:
            if message in self.messages:
                self._wait(message)

    def _wait(self, action: Action) -> None:
        with self.of.noted(EXPOSED + action.kind, action.stage, action.micro_batch):
            self.messages.pop(action).wait()
        self.travels.pop(action).__exit__(None, None, None)

    # --- actions ------------------------------------------------------------------------------------------------------

    def forward(self, action: Action, stage: int, m: int) -> None:
        of, held, batch = self.of, self.held[stage, m], self.micro_batches[m]
        self._await(action)
        if stage == 0:
            held.inputs = (batch.x,)
        if of.pp.size == 1:
            set_gradient_sync(of.stages[stage], m == of.plan.micro_batches - 1)
        outputs = None
        if held.inputs is not None:
            try:
                with of.noted("F", stage, m):
                    out = of.stages[stage](*held.inputs, **batch.arguments)
                if stage == of.plan.stages - 1:
                    loss = of.loss(out, batch.target)
                    self.losses.append(loss.detach())
                    if of.one is None or of.one.dtype != loss.dtype:
                        of.one = torch.ones_like(loss)
                    held.ends, held.grads = [get_gradient_edge(loss)], (of.one,)
                    return
                outputs = sent_on(out, stage, f"micro-batch {m}")
                metas = of.shapes.get((stage, batch.key), outputs)
                if metas is not outputs:
                    _check_promise(metas, outputs, stage, m)  # type: ignore[arg-type]
                held.ends = [
                    get_gradient_edge(x) if x.requires_grad else None
                    for x, meta in zip(outputs, metas, strict=True)
                    if meta.requires_grad
                ]
            except Exception as error:
                outputs = None
                self._failed(error)
        if stage + 1 in of.stages:
            if outputs is not None:
                self._give(stage + 1, m, [x.detach() for x in outputs], [x.requires_grad for x in outputs])
        elif stage + 1 < of.plan.stages:
            self.outbox[Action("SEND_F", stage, m)] = outputs

    def backward(self, action: Action, stage: int, m: int) -> None:
        of, held = self.of, self.held.pop((stage, m))
        self._await(action)
        with of.noted("B", stage, m):
            self._whole_backward(stage, m, held)
        self._send_back(stage, m, held, [x.grad for x in held.inputs or ()])
        self._finish(action, stage)

    def backward_inputs(self, action: Action, stage: int, m: int) -> None:
        """Compute the inputs' gradients and send them. The first stage does nothing: `W` runs its full backward."""
        of, held = self.of, self.held[stage, m]
        self._await(action)
        with of.noted("I", stage, m):
            if stage == 0:
                return
            gather(of.stages[stage])  # both halves look for the whole parameters in the graph
            hold_gradients(of.stages[stage])
            dxs: Sequence[Tensor | None] = [None] * len(held.wanted)
            try:
                dxs, held.deferred = backward_inputs(*_begin(held), held.inputs or ())
            except Exception as error:
                self._failed(error)
        self._send_back(stage, m, held, dxs)
        held.inputs = None  # the graph keeps what the weights' gradients need

    def backward_weights(self, action: Action, stage: int, m: int) -> None:
        of, held = self.of, self.held.pop((stage, m))
        module = of.stages[stage]
        with of.noted("W", stage, m):
            if stage == 0:
                self._whole_backward(stage, m, held)
            elif held.deferred is not None:
                gather(module)
                hold_gradients(module)
                try:
                    backward_weights(held.deferred)
                except Exception as error:
                    self._failed(error)
                reduce_held(module, self._is_last(stage, m))
        self._finish(action, stage)

    def _whole_backward(self, stage: int, m: int, held: MicroBatchState) -> None:
        module = self.of.stages[stage]
        if self.of.pp.size > 1 and sums_within_backward(module):
            set_gradient_sync(module, self._is_last(stage, m))
        elif self.of.pp.size > 1:  # on one rank, `forward` has said when to sum
            hold_gradients(module)
        ends, grads = _begin(held)
        try:
            if ends:
                run_backward(ends, grads)
        except Exception as error:
            self._failed(error)

    def _send_back(self, stage: int, m: int, held: MicroBatchState, dxs: Sequence[Tensor | None]) -> None:
        """Send the inputs' gradients to the previous stage, zeros for an input without a gradient."""
        if stage == 0:
            return
        sent = zip(held.inputs or (), dxs, held.wanted, strict=True)
        grads = tuple([torch.zeros_like(x) if dx is None else dx.contiguous() for x, dx, wanted in sent if wanted])
        if stage - 1 in self.of.stages:
            self.held[stage - 1, m].grads = grads
        else:
            self.outbox[Action("SEND_B", stage, m)] = grads

    def _is_last(self, stage: int, m: int) -> bool:
        return self.of.last[stage].micro_batch == m

    def _finish(self, action: Action, stage: int) -> None:
        if self.of.pp.size > 1 and action == self.of.last[stage]:
            reduce_once(self.of.stages[stage])

    def _failed(self, error: Exception) -> None:
        if self.of.pp.size == 1:
            raise error
        self.of.problems.append(error)


def _begin(held: MicroBatchState) -> tuple[list[GradientEdge], list[Tensor]]:
    pairs = [(end, grad) for end, grad in zip(held.ends, held.grads, strict=False) if end is not None]
    held.ends, held.grads = [], ()
    return [end for end, _ in pairs], [grad for _, grad in pairs]


def _check_promise(metas: Sequence[Meta], outputs: Sequence[Tensor], stage: int, m: int) -> None:
    """Raise ValueError if the next stage expects another number of outputs, or other shapes or dtypes."""
    if len(outputs) != len(metas):
        raise ValueError(
            f"stage {stage} returns {len(outputs)} outputs in micro-batch {m}, {len(metas)} in its first forward of "
            f"this shape of batch"
        )
    for i, (x, like) in enumerate(zip(outputs, metas, strict=True)):
        if x.shape != like.shape or x.dtype != like.dtype:
            is_, was, way_out = f"{tuple(x.shape)} of {x.dtype}", f"{like.shape} of {like.dtype}", "pad it"
        elif x.requires_grad and not like.requires_grad:
            is_, was, way_out = "in need of a gradient", "in need of none", "y + 0 * x.sum() needs one as x does"
        else:
            continue
        raise ValueError(
            f"output {i} of stage {stage} in micro-batch {m} is {is_}, in its first forward of this shape of batch it "
            f"was {was}: make it alike; {way_out}"
        )


def _one_by_one(plan: Schedule) -> Schedule:
    """Return the plan of a single rank: all forwards of a micro-batch, then its backwards, then the next one."""
    up = range(plan.stages)
    row = [
        Action(kind, stage, m)
        for m in range(plan.micro_batches)
        for kind, order in (("F", up), ("B", reversed(up)))
        for stage in order
    ]
    return Schedule(plan.name, (tuple(row),), plan.stages, plan.micro_batches)
