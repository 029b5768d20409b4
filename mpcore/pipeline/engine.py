"""Floor 4: one step over its micro-batches, on a model that is whole or cut in pipeline stages.

The schedule is data (`mpcore.pipeline.schedules`), proved before anything runs (`mpcore.pipeline.prove`) and run by
`torch.distributed.pipelining`.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, _PipelineScheduleRuntime
from torch.utils._pytree import tree_leaves

from mpcore.collectives import all_reduce
from mpcore.data_parallel import (
    drops_parameters,
    finish_gradients,
    gather,
    gathered,
    hold_gradients,
    reduce_held,
    reduce_once,
    reduces_each_micro_batch,
    reshard,
    sync_gradients,
)
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.mesh import Axis, Mesh, check_same
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import MESSAGES, Action, Schedule, Span, find_schedule, to_torch
from mpcore.pipeline.split import backward_inputs, backward_weights
from mpcore.sharding import declarations, local_tensor

_DTYPES = sorted({str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})
_SHAPES = 64  # of batches, whose dry run isn't run again
_MADE_ANEW = hasattr(PipelineStage, "_setup_forward_recv_info")  # since torch 2.13, which knows what needs gradients
_RESERVED = ("losses", "loss_kwargs", "return_outputs")  # by torch's runtime


class Pipeline:
    """Runs a step: forward and backward of every micro-batch, on this rank's stages.

    A stage returns a tensor, or a tuple of tensors, which the next takes as so many arguments: of the same number,
    shapes, dtypes and need of gradients in every micro-batch of a step. The last one may return whatever `loss` takes.

    With pp > 1 the first step of a new shape begins with a forward of every stage but the last, which tells the next
    what it will get: in the mode the stage is in, on values that mean nothing (from 0 to 1, integers 0), behind the
    first stage. Buffers, attributes of modules and torch's generators are afterwards as before; what else a forward
    changes sees that call.

    Schedules that split backward (`zb`, `zbv`, `dualpipev`) run it in two halves: a stage's graph is kept between
    them, an `autograd.Function` may run its backward in both, hooks of activations too, and a layer that is used
    several times costs what lies between its uses once more.

    Args:
        model: this rank's stage; or its stages, lowest first, for schedules that lay several on a rank. The first
            takes the batch's input, each other what the one before returns, all of them the keyword arguments of a
            step.
        mesh: the mesh; `mesh.pp` is the axis that stages lie on.
        micro_batches: how many a step has.
        loss: `loss(output, target)`, one number with a graph; called on the last stage. Losses are summed, nothing is
            divided here.
        schedule: a name of `mpcore.pipeline.schedules.NAMES`, the path of a .csv, or a schedule.
        trace: note when each action runs, for `recorded`. On a GPU that waits for the device around each action.

    Attributes:
        plan: the schedule that runs.
        last_rank: the rank along `mesh.pp` that holds the last stage.

    Raises:
        ValueError: on every rank of the pipeline, if the schedule can't be had with these numbers, fails its proof,
            names its messages (they are posted here), or gives this rank another number of stages; or if a tied
            parameter is pending over `mesh.pp` or `mesh.ends` on some of their ranks alone.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        mesh: Mesh,
        micro_batches: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        schedule: str | os.PathLike[str] | Schedule = "1f1b",
        *,
        trace: bool = False,
    ) -> None:
        self.stages = [model] if isinstance(model, nn.Module) else list(model)
        self.pp, self.micro_batches, self.loss = mesh.pp, micro_batches, loss
        self.device = mesh.device
        schedule = os.fspath(schedule) if isinstance(schedule, os.PathLike) else schedule
        self.plan = _agree(schedule, mesh.pp, micro_batches, len(self.stages))
        _check_pending(self.stages, mesh)
        self.last_rank = self.plan.rank_of[self.plan.stages - 1]
        split_linears(self.stages, self.plan)
        self.mine = dict(zip(self.plan.stages_of(mesh.pp.rank), self.stages, strict=True))
        self.spans: list[Span] | None = [] if trace else None
        self.problems: list[Exception] = []
        self.runtimes: dict[Any, _Runtime] = {}
        self.trained: list[bool] | None = None

    def forward_backward(self, x: Tensor, target: Tensor, **arguments: Tensor) -> Tensor:
        """Forward and backward of a batch, cut in micro-batches along dimension 0.

        Shapes may change from step to step: the first step of a new shape costs a forward more.

        Args:
            x: [B, ...] input of the first stage, on every rank.
            target: [B, ...] what `loss` takes, on every rank.
            arguments: [B, ...] tensors, cut likewise and passed to every stage; none of them is `losses`,
                `loss_kwargs` or `return_outputs`.

        Returns:
            The sum of the micro-batches' losses in fp64, the same on every stage, without a graph.

        Raises:
            ValueError: on every rank, if B isn't a multiple of the number of micro-batches, tensors have another B,
                a stage returns what can't be sent or something else than in its first forward, or the loss is none.
                On GPUs the last two are raised on the rank that has them, and the others return nan.
        """
        tensors = {"x": x, "target": target, **arguments}
        self._check_batch(tensors)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.pp.size == 1:
            batches = [t.chunk(self.micro_batches) for t in tensors.values()]
            for i, (inputs, targets, *others) in enumerate(zip(*batches, strict=True)):
                total += self._one_by_one(i, inputs, targets, dict(zip(arguments, others, strict=True)))
            finish_gradients(self.stages)
            return total
        shapes = tuple((name, t.shape, t.dtype) for name, t in tensors.items())
        modes = tuple(stage.training for stage in self.stages)
        mode = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else None
        self.problems.clear()
        losses: list[Tensor] = []
        last = self.pp.rank == self.last_rank
        with self._trained_as_built(), self._prepared((shapes, modes, mode)) as runtime:
            inputs = (x,) if 0 in self.mine else ()
            keywords: dict[str, Any] = arguments | ({"target": target, "losses": losses} if last else {})
            runtime.step(*inputs, return_outputs=False, **keywords)
            finish_gradients(self.stages)
        total = sum((loss.detach() for loss in losses), total)
        # A sum that every rank sees tells that a stage broke its word; to look at it costs nothing on a CPU alone.
        mine = torch.full_like(total, torch.nan) if self.problems else total if last else torch.zeros_like(total)
        total = all_reduce(mine, self.pp)
        if self.problems or (self.device.type == "cpu" and total.isnan()):
            self._raise_problems(meet=self.device.type == "cpu")
        return total

    def _raise_problems(self, meet: bool = True) -> None:
        """What a stage noted, raised on its rank and, where all ranks come here, on the others."""
        mine = self.problems[0] if self.problems else None
        texts: list[str | None] = [None]
        if meet:
            told = None
            if mine is not None:
                told = str(mine) if isinstance(mine, ValueError) else f"{type(mine).__name__}: {mine}"
            texts = [None] * self.pp.size
            dist.all_gather_object(texts, told, group=self.pp.group)
        if mine is not None:
            raise mine
        for rank, text in enumerate(texts):
            if text is not None:
                raise ValueError(f"rank {rank} of the pipeline: {text}")

    def _check_batch(self, tensors: dict[str, Tensor]) -> None:
        size = len(tensors["x"]) if isinstance(tensors["x"], Tensor) and tensors["x"].dim() else 0
        for name, tensor in tensors.items():
            if name in _RESERVED:
                raise ValueError(f"no argument can be named {name}: {', '.join(_RESERVED)} are taken")
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                is_ = "a tensor without rows" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
                raise ValueError(
                    f"{name} is {is_}: arguments are tensors with one row a sample; leave out what is None"
                )
            if len(tensor) != size:
                raise ValueError(f"{name} has {len(tensor)} rows, x has {size}")
        if size == 0 or size % self.micro_batches:
            padded = max(-(-size // self.micro_batches), 1) * self.micro_batches
            raise ValueError(
                f"a batch of {size} is not a multiple of {self.micro_batches} micro-batches: pad it to {padded} with "
                f"rows whose targets the loss ignores"
            )

    def _one_by_one(self, i: int, x: Tensor, target: Tensor, arguments: dict[str, Tensor]) -> Tensor:
        """A micro-batch through the whole model, on one rank."""
        out: Any = x
        for index, stage in self.mine.items():
            sync_gradients(stage, i == self.micro_batches - 1)
            inputs = (x,) if index == 0 else sent_on(out, index - 1, f"micro-batch {i}")
            with self._noted("F", index, i):
                out = stage(*inputs, **arguments)
        loss = self._checked_loss(out, target)
        with self._noted("B", self.plan.stages - 1, i):
            loss.backward()
        return loss.detach()

    def _checked_loss(self, output: Any, target: Tensor) -> Tensor:
        """The loss, in memory of its own; on pipelines what is wrong with it is told when all ranks are through."""
        loss: Any = self.loss(output, target)
        is_ = type(loss).__name__
        if isinstance(loss, Tensor):
            if loss.numel() == 1 and loss.requires_grad:
                return loss.reshape(()).clone()
            is_ = "a tensor that needs no gradient" if loss.numel() == 1 else f"a tensor of shape {tuple(loss.shape)}"
        problem = ValueError(f"the loss is {is_}: return a tensor of one number, made of the output without detach()")
        if self.pp.size == 1:
            raise problem
        self.problems.append(problem)
        outputs = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
        zero = torch.zeros((), device=self.device, requires_grad=True)
        return sum((0 * y.sum() for y in outputs), zero)  # other stages wait for gradients

    @contextmanager
    def _trained_as_built(self) -> Iterator[None]:
        """What one stage froze or freed since the first step, the others' messages don't know: the step runs as it was
        built, so that no rank waits, and is refused on all at its end."""
        parameters = [p for stage in self.stages for p in stage.parameters()]
        now = [p.requires_grad for p in parameters]
        self.trained = self.trained or now
        changed = [(p, was) for p, was in zip(parameters, self.trained, strict=False) if p.requires_grad != was]
        if now != self.trained:
            problem = "parameters were frozen or freed after the first step: make a new Pipeline for them, on all ranks"
            self.problems.append(ValueError(problem))
        try:
            for p, was in changed:
                p.requires_grad_(was)
            yield
        finally:
            for p, was in changed:
                p.requires_grad_(not was)

    @contextmanager
    def _prepared(self, key: object) -> Iterator[_Runtime]:
        """torch's runtime for a batch of these shapes: its buffers fit the first batch alone, and gloo takes any."""
        runtime = self.runtimes.pop(key, None)
        held = []
        if runtime is None:
            runtime = self._build()
            # The dry run that finds out the stages' shapes drops what gradients `fully_shard` holds of earlier steps.
            for stage in self.stages:
                reshard(stage)
            held = [(p, p.grad) for stage in self.stages for p in stage.parameters() if p.grad is not None]
            for parameter, _ in held:
                parameter.grad = None
        else:
            runtime.make_buffers()
        yield runtime
        if _MADE_ANEW:
            runtime.drop_buffers()
        else:
            self.runtimes.clear()
        self.runtimes[key] = runtime  # none that failed half-way
        if len(self.runtimes) > _SHAPES:
            del self.runtimes[next(iter(self.runtimes))]
        with torch.no_grad():
            for parameter, grad in held:
                if parameter.grad is None:
                    parameter.grad = grad
                else:
                    local_tensor(parameter.grad).add_(local_tensor(grad))

    def _build(self) -> _Runtime:
        stages: Any = [
            _Stage(module, index, self.plan.stages, self.device, group=self.pp.group)
            for index, module in self.mine.items()
        ]
        for stage in stages:
            stage.noted, stage.problems = self._noted, self.problems
        runtime = _Runtime(stages, self.micro_batches, loss_fn=self._checked_loss, scale_grads=False)
        runtime.agree = self._raise_problems
        plan: Any = {rank: list(to_torch(actions)) for rank, actions in enumerate(self.plan.ranks)}
        runtime._prepare_schedule_with_comms(plan)

        # The hooks of `fully_shard` gather when a block first needs it, and shard again as its stage of ZeRO says.
        def unshard(action: Any, ctx: Any) -> None:
            runtime.unsharded_stages.add(action.stage_index)

        runtime.register_custom_function(UNSHARD, unshard)
        runtime.register_custom_function(RESHARD, lambda action, ctx: None)
        return runtime

    @torch.no_grad()
    def forward(self, batches: Sequence[Tensor], **arguments: Tensor) -> Iterator[Tensor]:
        """Forward alone, batch after batch through the stages; shapes may differ from batch to batch.

        Args:
            batches: inputs of the first stage, on every rank.
            arguments: passed to every stage.

        Yields:
            For each batch the model's output on the rank of the last stage, the output of its own last stage on the
            others.
        """
        with gathered(stage for stage in self.stages if not drops_parameters(stage)):
            for i, x in enumerate(batches):
                out: Any = x
                # All ranks go through (batch, stage) in one order, so blocking sends can't wait for each other.
                for index, stage in self.mine.items():
                    away = index + 1 < self.plan.stages and index + 1 not in self.mine
                    try:
                        if index > 0 and index - 1 not in self.mine:
                            inputs = _receive(self.pp, self.plan.rank_of[index - 1], self.device)
                        else:
                            inputs = sent_on(out, index - 1, f"batch {i}") if index else (x,)
                        out = stage(*inputs, **arguments)
                        sent = sent_on(out, index, f"batch {i}") if away else ()
                    except Exception:
                        if away:
                            _send((), self.pp, self.plan.rank_of[index + 1], self.device)
                        raise
                    if away:
                        _send(sent, self.pp, self.plan.rank_of[index + 1], self.device)
                yield out

    def from_last(self, x: Tensor) -> Tensor:
        """What the rank of the last stage holds, on every rank: `x` of the others gives only the shape and dtype."""
        return all_reduce(x if self.pp.rank == self.last_rank else torch.zeros_like(x), self.pp)

    def recorded(self) -> list[Span]:
        """What all ranks of this pipeline did since the last call, in seconds from its begin: a collective over pp.

        Raises:
            ValueError: if this pipeline was made without `trace`.
        """
        if self.spans is None:
            raise ValueError("nothing was recorded: make the Pipeline with trace=True")
        every: list = [self.spans]
        if self.pp.size > 1:
            every = [None] * self.pp.size
            dist.all_gather_object(every, self.spans, group=self.pp.group)
        self.spans = []
        spans = sorted((span for spans in every for span in spans), key=lambda span: (span.rank, span.start))
        begin = min((span.start for span in spans), default=0.0)
        return [span._replace(start=span.start - begin, end=span.end - begin) for span in spans]

    @contextmanager
    def _noted(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        if self.spans is None:
            yield
            return
        start = self._clock()
        yield
        self.spans.append(Span(self.pp.rank, Action(kind, stage, micro_batch), start, self._clock()))

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.time()  # of all clocks the one that ranks on other hosts share


class _Runtime(_PipelineScheduleRuntime):
    """torch's runtime, whose ranks hear of a dry run that failed on one of them."""

    agree: Callable[[], None]
    agreed = False

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        super()._initialize_stages(*args, **kwargs)
        if not self.agreed:
            self.agree()
            self.agreed = True

    def make_buffers(self) -> None:
        """What a step's micro-batches are received in."""
        if not _MADE_ANEW:
            return
        for stage in self._stages:
            stage._setup_forward_recv_info(self._n_microbatches, True)  # type: ignore[attr-defined]
            stage._setup_backward_recv_info(self._n_microbatches)

    def drop_buffers(self) -> None:
        for stage in self._stages:
            stage.args_recv_info.clear()
            stage.grad_recv_info.clear()


class _Stage(PipelineStage):
    """torch's stage, which tells when each of its actions began and ended, and sums gradients when ZeRO says so."""

    noted: Callable[[str, int, int], Any]
    problems: list[Exception]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Before torch 2.13 a stage says hello to both neighbours, even one on its own rank, whom gloo can't reach.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _to_tensor(self, arg: Any) -> Tensor:
        # The dry run's inputs: tokens that differ, alike on all ranks; and places that every table has.
        x = super()._to_tensor(arg)
        if isinstance(arg, Tensor):
            return x
        if x.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            x.detach().uniform_(generator=torch.Generator(x.device).manual_seed(0))
        else:
            x.detach().zero_()
        return x

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        # torch's dry run for the shapes of what a stage sends: the last sends nothing, nor does one after a failure.
        if self.is_last or not args:
            return ()
        try:
            with _undone(module), uncompiled():
                return sent_on(
                    super()._compute_outputs(*args, module=module, **kwargs), self.stage_index, "its first forward"
                )
        except Exception as error:  # raised on all ranks once they are through: see `_Runtime`
            self.problems.append(error)
            return ()

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
        with uncompiled():  # the dry run before torch 2.13
            return super()._shape_inference(*args, **kwargs)  # type: ignore[misc]

    def _backward_metadata_inference(self, *args: Any, **kwargs: Any) -> None:
        # A gradient looks like what it is of: no loss is called and no backward runs for that.
        meta: Any = self._stage_meta
        meta.input_grads = tuple(replace(x, requires_grad=False) if x.requires_grad else None for x in meta.inputs)
        meta.output_grads = tuple(replace(y, requires_grad=False) if y.requires_grad else None for y in meta.outputs)
        self._fwd_outputs_for_bwd_meta = self._fwd_inputs_for_bwd_meta = self._fwd_kwargs_tensors_for_bwd_meta = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.noted("F", self.stage_index, fwd_chunk_id):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        inputs = self.fwd_cache[fwd_chunk_id][1]
        if self.is_last:  # backward begins at the loss, of an output of any kind
            self.fwd_cache[fwd_chunk_id] = (), inputs
            return out
        when = f"micro-batch {fwd_chunk_id}"
        out = self._as_promised(out, when) if _MADE_ANEW else sent_on(out, self.stage_index, when)
        self.fwd_cache[fwd_chunk_id] = out, inputs
        return out

    def _as_promised(self, out: Any, when: str) -> tuple[Tensor, ...]:
        """What the next stage waits for. What differs is told at the step's end, so that nobody waits for ever."""
        promised: Any = self._stage_meta.outputs
        try:
            outputs = sent_on(out, self.stage_index, when)
            if len(outputs) != len(promised):
                raise ValueError(
                    f"stage {self.stage_index} returns {len(outputs)} outputs in {when}, {len(promised)} in its first "
                    f"forward"
                )
            for i, (x, like) in enumerate(zip(outputs, promised, strict=True)):
                is_, was = (f"{tuple(y.shape)} of {y.dtype}" for y in (x, like))
                way_out = "pad it"
                if is_ == was and x.requires_grad and not like.requires_grad and torch.is_grad_enabled():
                    is_, was = "in need of a gradient", "in need of none"
                    way_out = "y + 0 * x.sum() needs one as x does"
                if is_ != was:
                    raise ValueError(
                        f"output {i} of stage {self.stage_index} in {when} is {is_}, in its first forward it was "
                        f"{was}: make it alike in all micro-batches; {way_out}"
                    )
        except ValueError as error:
            self.problems.append(error)
            return tuple(torch.zeros(y.shape, dtype=y.dtype, device=self.device) for y in promised)
        return outputs

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        with self.noted("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.noted("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        if backward_type == "full" and reduces_each_micro_batch(self.submod):  # torch would sum after the last alone
            sync_gradients(self.submod, last_backward)
            return stage_backward(*(bwd_kwargs[k] for k in ("stage_output", "output_grads", "input_values"))), None
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        gather(self.submod)  # both halves look for the whole parameters in the graph
        hold_gradients(self.submod)
        if backward_type == "input":
            outputs, grads, inputs = (bwd_kwargs[k] for k in ("stage_output", "output_grads", "input_values"))
            result = backward_inputs(outputs, grads, inputs[: len(self.args_recv_info[0])])
            bwd_kwargs.update(stage_output=(), output_grads=None, input_values=())  # so that the graph's end is freed
            for loss in outputs if self.is_last else ():
                loss.detach_()
            return result
        backward_weights(bwd_kwargs["param_groups"])
        reduce_held(self.submod, last_backward)
        return (), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        reduce_once(self.submod)  # the factor is 1: nothing is rescaled here


def uncompiled() -> Any:
    """Compiled blocks run as they were written."""
    compiled = "torch._dynamo" in sys.modules  # else nothing is, and importing it takes a second
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def sent_on(out: Any, stage: int, when: str) -> tuple[Tensor, ...]:
    """What a stage sends on, as a tuple of contiguous tensors."""
    outputs = out if type(out) in (tuple, list) else (out,)
    for i, x in enumerate(outputs):
        if not isinstance(x, Tensor):
            which = f"output {i}" if len(outputs) > 1 else "the output"
            raise ValueError(
                f"{which} of stage {stage} in {when} is a {type(x).__name__}: what goes to the next stage is a tensor "
                f"or a tuple of tensors"
            )
    if not outputs:
        raise ValueError(f"stage {stage} returns nothing in {when}")
    return tuple(x.contiguous() for x in outputs)


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """A call of a module in here leaves no trace in its buffers and attributes, such as what routers count."""
    before = [(each, dict(each.__dict__), dict(each._buffers)) for each in module.modules()]
    values = [(x, x.detach().clone()) for x in module.buffers()]
    try:
        yield
    finally:
        for each, attributes, buffers in before:
            each.__dict__.clear()
            each.__dict__.update(attributes)
            each._buffers.clear()
            each._buffers.update(buffers)
        with torch.no_grad():
            for x, value in values:
                if not torch.equal(x, value):
                    x.copy_(value)


def split_linears(stages: Iterable[nn.Module], plan: Schedule) -> None:
    """Tell the linears of stages whether gradients of inputs and of weights are asked for apart."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.split_backward = plan.splits_backward


def _check_pending(stages: Iterable[nn.Module], mesh: Mesh) -> None:
    """Refuse tied parameters whose gradients some ranks would sum over an axis on which others hold none."""
    for axis in (mesh.pp, mesh.ends):
        shapes = Counter(
            f"of shape {tuple(p.shape)}"
            for p, sharding in {p: sharding for stage in stages for _, p, sharding in declarations(stage)}.items()
            if any(pending.group is axis.group for pending in sharding.partial)
        )
        check_same(f"number of parameters pending over {axis.name}, which all its ranks must hold", shapes, axis)


def _agree(schedule: str | Schedule, pp: Axis, micro_batches: int, stages: int) -> Schedule:
    """The schedule, proved, and the same on all ranks; what is wrong with it is raised on all of them."""
    problem, plan = None, None
    try:
        plan = _check_plan(schedule, pp, micro_batches, stages)
    except ValueError as error:
        problem = str(error)
    check_same("pipeline", problem or hashlib.sha256(repr(plan).encode()).hexdigest(), pp)
    if problem or plan is None:
        raise ValueError(problem)
    return plan


def _check_plan(schedule: str | Schedule, pp: Axis, micro_batches: int, stages: int) -> Schedule:
    if isinstance(schedule, Schedule):
        plan = schedule
    else:
        plan = find_schedule(schedule, pp.size, micro_batches, None if schedule.endswith(".csv") else stages)
    if (len(plan.ranks), plan.micro_batches) != (pp.size, micro_batches):
        raise ValueError(
            f"the schedule {plan.name} is for {len(plan.ranks)} ranks and {plan.micro_batches} micro-batches, the "
            f"pipeline has {pp.size} and {micro_batches}"
        )
    prove(plan)
    named = [action for actions in plan.ranks for action in actions if action.kind in MESSAGES]
    if named:
        raise ValueError(
            f"the schedule {plan.name} names messages, such as {named[0]}: leave them out, they are posted here"
        )
    order = [a for a in plan.ranks[plan.rank_of[plan.stages - 1]] if (a.kind, a.stage) == ("F", plan.stages - 1)]
    for m, action in enumerate(order):
        if action.micro_batch != m:
            raise ValueError(
                f"{action} must not run before {action._replace(micro_batch=m)}: losses are kept in that order"
            )
    mine = plan.stages_of(pp.rank)
    if len(mine) != stages:
        raise ValueError(f"the schedule {plan.name} lays {len(mine)} stages on rank {pp.rank}, which holds {stages}")
    return plan


def _send(outputs: tuple[Tensor, ...], pp: Axis, to: int, device: torch.device) -> None:
    """Tensors of any number, shapes and dtypes; none of them says that there is nothing to wait for."""
    numbers = [n for x in outputs for n in (_DTYPES.index(str(x.dtype)), x.dim(), *x.shape)]
    header = [torch.tensor(n, dtype=torch.int64, device=device) for n in ([len(numbers)], numbers)]
    for tensor in (*header, *(x.reshape(-1).view(torch.uint8) for x in outputs)):
        if tensor.numel():
            dist.send(tensor, group=pp.group, group_dst=to)


def _receive(pp: Axis, source: int, device: torch.device) -> tuple[Tensor, ...]:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, group=pp.group, group_src=source)
    if int(size) == 0:
        raise ValueError(f"the stage before failed on rank {source} of the pipeline, which says why")
    header = torch.zeros(int(size), dtype=torch.int64, device=device)
    dist.recv(header, group=pp.group, group_src=source)
    numbers = iter(header.tolist())
    outputs = []
    for name in numbers:
        dtype = getattr(torch, _DTYPES[name].removeprefix("torch."))
        outputs.append(torch.empty([next(numbers) for _ in range(next(numbers))], dtype=dtype, device=device))
    for x in outputs:
        if x.numel():
            dist.recv(x.view(-1).view(torch.uint8), group=pp.group, group_src=source)
    return tuple(outputs)
