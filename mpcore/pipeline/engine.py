"""One step over its micro-batches, on a model that is whole or cut in pipeline stages.

The schedule is data (`mpcore.pipeline.schedules`), proved before anything runs (`mpcore.pipeline.prove`) and run by
`torch.distributed.pipelining`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore._torch import pytree
from mpcore._torch.pipelining import RENEWS_BUFFERS
from mpcore.collectives import all_reduce
from mpcore.mesh.axis import Mesh
from mpcore.parallel.sync import (
    drops_parameters,
    finish_gradients,
    gathered,
    sync_gradients,
)
from mpcore.pipeline.checks import agree_on_schedule, check_pending, split_linears
from mpcore.pipeline.runtime import Runtime, Stage, receive_tensors, send_tensors, sent_on
from mpcore.pipeline.schedules import Action, Schedule, Span
from mpcore.sharding.local import local_tensor, reshard

_SHAPES = 64  # of batches, whose dry run isn't run again
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
        self.plan = agree_on_schedule(schedule, mesh.pp, micro_batches, len(self.stages))
        check_pending(self.stages, mesh)
        self.last_rank = self.plan.rank_of[self.plan.stages - 1]
        split_linears(self.stages, self.plan)
        self.mine = dict(zip(self.plan.stages_of(mesh.pp.rank), self.stages, strict=True))
        self.spans: list[Span] | None = [] if trace else None
        self.problems: list[Exception] = []
        self.runtimes: dict[Any, Runtime] = {}
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
        outputs = [y for y in pytree.leaves(output) if isinstance(y, Tensor) and y.requires_grad]
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
    def _prepared(self, key: object) -> Iterator[Runtime]:
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
        runtime.drop_buffers()
        if not RENEWS_BUFFERS:
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

    def _build(self) -> Runtime:
        stages: Any = [
            Stage(module, index, self.plan.stages, self.device, group=self.pp.group)
            for index, module in self.mine.items()
        ]
        for stage in stages:
            stage.noted, stage.problems = self._noted, self.problems
        runtime = Runtime(stages, self.micro_batches, loss_fn=self._checked_loss, scale_grads=False)
        runtime.agree = self._raise_problems
        runtime.load(self.plan.ranks)
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
                            inputs = receive_tensors(self.pp, self.plan.rank_of[index - 1], self.device)
                        else:
                            inputs = sent_on(out, index - 1, f"batch {i}") if index else (x,)
                        out = stage(*inputs, **arguments)
                        sent = sent_on(out, index, f"batch {i}") if away else ()
                    except Exception:
                        if away:
                            send_tensors((), self.pp, self.plan.rank_of[index + 1], self.device)
                        raise
                    if away:
                        send_tensors(sent, self.pp, self.plan.rank_of[index + 1], self.device)
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
