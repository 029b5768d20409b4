"""Run one training step over its micro-batches, on a full model or on its pipeline stages.

The schedule is data (`mpcore.pipeline.schedules`). `mpcore.pipeline.prove` checks it before anything runs, and
`mpcore.pipeline.executor` runs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch.pytree import leaves
from mpcore.collectives import all_reduce
from mpcore.mesh.agreement import gather_objects
from mpcore.mesh.axis import Axis, Mesh
from mpcore.parallel.sync import drops_parameters, finish_gradients, gathered
from mpcore.pipeline.checks import agree_on_schedule, check_pending, check_published, split_linears
from mpcore.pipeline.executor import Executor, MicroBatch
from mpcore.pipeline.messages import receive_tensors, send_tensors, sent_on
from mpcore.pipeline.schedules import Action, Schedule, Span

_LOSS = "the loss is {}: return a tensor of one number, made of the output without detach()"


def one_number(loss: object) -> Tensor:
    """Return a loss as a tensor without dimensions; raise ValueError if it isn't one real number."""
    if not isinstance(loss, Tensor):
        raise ValueError(_LOSS.format(type(loss).__name__))
    if loss.numel() != 1 or loss.is_complex():
        raise ValueError(_LOSS.format(f"a {'complex ' * loss.is_complex()}tensor of shape {tuple(loss.shape)}"))
    return loss.reshape(())


class Pipeline:
    """Run one training step: forward and backward of every micro-batch, on this rank's stages.

    A stage returns a tensor or a tuple of tensors, and the next stage receives them as positional arguments. For
    micro-batches of the same shape, the number, shapes, dtypes and `requires_grad` of the outputs must not change. The
    last stage may return any object that `loss` accepts. Every stage receives the keyword arguments of a step.

    Args:
        model: this rank's stage, or a list of its stages in pipeline order if the schedule places several on a rank.
        mesh: the mesh; `mesh.pp` is the axis that stages lie on.
        micro_batches: the number of micro-batches of a step on each rank.
        loss: `loss(output, target)`, a scalar that requires grad; called on the last stage, once for each micro-batch.
            Losses are summed. Divide in `loss` by the tokens of the step, not by `micro_batches`.
        schedule: a name of `mpcore.pipeline.schedules.NAMES`, the path of a .csv, or a `Schedule`.
        trace: note when each action runs and each message is in flight, for `recorded`. On a GPU the host then waits
            for the device at each action.
        after_backward: called with the stage after each backward that the schedule doesn't split in two.

    Attributes:
        plan: the schedule that runs.
        last_rank: the rank along `mesh.pp` that holds the last stage.

    Raises:
        ValueError: on every rank of the pipeline, if the schedule doesn't exist for these numbers, fails its proof, or
            contains messages (`Pipeline` adds them), or if ranks disagree about the parameters tied over pp.

    Note:
        - For the first micro-batch of each shape the sender sends a header with the shapes, and the receiving rank's
          host waits for it. No extra forward runs.
        - `zb`, `zbv` and `dualpipev` compute the gradients of inputs first and those of weights later. The autograd
          graph stays in memory between the two, and an `autograd.Function` or a hook on an activation may run twice.

    Example:
        >>> stage = mpcore.ColumnParallelLinear(4, 4)
        >>> loss = lambda output, target: (output - target).square().sum()
        >>> pipeline = mpcore.pipeline.Pipeline(stage, mpcore.Mesh(), micro_batches=2, loss=loss)
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
        after_backward: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.stages: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
        self.pp: Axis = mesh.pp
        self.micro_batches: int = micro_batches
        self.loss = loss
        self.device: torch.device = mesh.device
        self.after_backward = after_backward
        schedule = os.fspath(schedule) if isinstance(schedule, os.PathLike) else schedule
        self.plan: Schedule = agree_on_schedule(schedule, mesh.pp, micro_batches, len(self.stages))
        check_pending(self.stages, mesh)
        self.last_rank: int = self.plan.rank_of[self.plan.stages - 1]
        split_linears(self.stages, self.plan)
        self.mine: dict[int, nn.Module] = dict(zip(self.plan.stages_of(mesh.pp.rank), self.stages, strict=True))
        self.spans: list[Span] | None = [] if trace else None
        self.trained: list[tuple[nn.Parameter, bool]] | None = None
        self._make_executor()

    def _make_executor(self) -> None:
        idle = nullcontext()

        def noted(*action: Any) -> AbstractContextManager[None]:
            return idle if self.spans is None and self.after_backward is None else self._noted(*action)

        self.executor: Executor = Executor(self.mine, self.plan, self.pp, self.device, self._checked_loss, noted)

    def set_micro_batches(self, micro_batches: int) -> None:
        """Set the number of micro-batches of the next steps; the schedule of the same name is built again.

        Raises:
            ValueError: on every rank, if the schedule does not support this number, or is not a published one.
        """
        check_published(self.plan, micro_batches)
        self.plan = agree_on_schedule(self.plan.name, self.pp, micro_batches, len(self.stages))
        self.micro_batches = micro_batches
        self._make_executor()

    def forward_backward(
        self, x: Tensor | Sequence[Tensor], target: Tensor | Sequence[Tensor], **arguments: Tensor | Sequence[Tensor]
    ) -> Tensor:
        """Run forward and backward of a batch.

        Args:
            x: [B, ...], the input of the first stage, on every rank. A tensor is split into micro-batches along
                dimension 0. A list has one tensor per micro-batch; their shapes may differ.
            target: [B, ...], the target of `loss`, on every rank; split like x.
            arguments: tensors [B, ...], split like x, for the keyword arguments of every stage.

        Returns:
            The sum of the micro-batches' losses in fp64, the same on every stage, without a graph.

        Raises:
            ValueError: on every rank, if B is not a multiple of the number of micro-batches, or tensors differ in B.
                Also if a stage's output can't be sent, or differs from the first batch of this shape, or the loss is
                not a scalar that requires grad. On GPUs, errors of a stage are raised only on its rank, and the other
                ranks return nan.
            RuntimeError: if another rank of the pipeline is gone.
        """
        micro_batches = self.cut({"x": x, "target": target, **arguments})
        last = self.pp.rank == self.last_rank
        problems = self.executor.problems
        with self._trained_as_built() as changed:
            total = self.executor.run(micro_batches)
            problems += changed
            finish_gradients(self.stages)
        if self.pp.size == 1:
            return total
        # A sum that every rank sees tells that a stage failed; to look at it costs nothing on a CPU alone.
        mine = torch.full_like(total, torch.nan) if problems else total if last else torch.zeros_like(total)
        total = all_reduce(mine, self.pp)
        if problems or (self.device.type == "cpu" and total.isnan()):
            self._raise_problems(meet=self.device.type == "cpu")
        return total

    def _raise_problems(self, meet: bool = True) -> None:
        """Raise a stage's error on its rank and, if all ranks come here, on the others."""
        mine = self.executor.problems[0] if self.executor.problems else None
        told = str(mine) if mine is None or isinstance(mine, ValueError) else f"{type(mine).__name__}: {mine}"
        texts = gather_objects(None if mine is None else told, self.pp.group) if meet else ()
        if mine is not None:
            raise mine
        for rank, text in enumerate(texts):
            if text is not None:
                raise ValueError(f"rank {rank} of the pipeline: {text}")

    def cut(self, tensors: dict[str, Any]) -> list[MicroBatch]:
        """Check a step's tensors and return its micro-batches."""
        M, as_lists = self.micro_batches, isinstance(tensors["x"], (list, tuple))
        if as_lists:
            for name, given in tensors.items():
                if not isinstance(given, (list, tuple)) or len(given) != M:
                    is_ = f"{len(given)} tensors" if isinstance(given, (list, tuple)) else f"a {type(given).__name__}"
                    raise ValueError(
                        f"{name} is {is_}, and x is a list: give a list with one tensor for each of {M} micro-batches, "
                        f"or another number of micro_batches to prepare"
                    )
        else:
            size = _check_rows(tensors)
            if size == 0 or size % M:
                raise ValueError(
                    f"a batch of {size} is not a multiple of {M} micro-batches: pad it to {max(-(-size // M), 1) * M} "
                    f"with rows whose targets the loss ignores"
                )
        cut = [given if as_lists else given.chunk(M) for given in tensors.values()]
        rows = [dict(zip(tensors, each, strict=True)) for each in zip(*cut, strict=True)]
        for each in rows if as_lists else ():
            _check_rows(each)
        mode = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else None
        keys = [(mode, *((name, x.shape, x.dtype) for name, x in each.items())) for each in rows]
        return [MicroBatch(each.pop("x"), each.pop("target"), each, key) for each, key in zip(rows, keys, strict=True)]

    def _checked_loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss in its own memory; raise ValueError if it is not a valid loss."""
        loss = one_number(self.loss(output, target))
        if loss.requires_grad:
            return loss if loss.untyped_storage().nbytes() == loss.element_size() else loss.clone()
        if not any(x.requires_grad for x in leaves(output) if isinstance(x, Tensor)):
            raise ValueError(
                "the output of the model needs no gradient: no parameter that it is made of requires one, so there "
                "is nothing to train"
            )
        raise ValueError(_LOSS.format("a tensor that needs no gradient"))

    @contextmanager
    def _trained_as_built(self) -> Iterator[list[Exception]]:
        """Run a step with the `requires_grad` of the first one, on which other stages rely. Yield what has changed."""
        if self.pp.size == 1:
            yield []
            return
        if self.trained is None:
            self.trained = [(p, p.requires_grad) for stage in self.stages for p in stage.parameters()]
        changed = [(p, was) for p, was in self.trained if p.requires_grad != was]
        problem = "parameters were frozen or freed after the first step: make a new Pipeline for them, on all ranks"
        try:
            for p, was in changed:
                p.requires_grad_(was)
            yield [ValueError(problem)] if changed else []
        finally:
            for p, was in changed:
                p.requires_grad_(not was)

    @torch.no_grad()
    def forward(self, batches: Sequence[Tensor], **arguments: Tensor | Sequence[Tensor]) -> Iterator[Tensor]:
        """Run only forward, batch after batch through the stages. Yield the output of this rank's last stage for each.

        After an error it runs the remaining batches, for which other ranks wait, yields nothing, and raises the error.

        Args:
            batches: the inputs of the first stage, on every rank. Shapes may differ between batches.
            arguments: keyword arguments for every stage: one value for all batches, or a list with one value per batch.
        """
        error: Exception | None = None
        with gathered(stage for stage in self.stages if not drops_parameters(stage)):
            for i, x in enumerate(batches):
                out: Any = x
                own = {name: of[i] if isinstance(of, (list, tuple)) else of for name, of in arguments.items()}
                # All ranks go through (batch, stage) in one order, so blocking sends can't wait for each other.
                for index, stage in self.mine.items():
                    away = index + 1 < self.plan.stages and index + 1 not in self.mine
                    try:
                        if index > 0 and index - 1 not in self.mine:
                            inputs = receive_tensors(self.pp, self.plan.rank_of[index - 1], self.device)
                        else:
                            inputs = sent_on(out, index - 1, f"batch {i}") if index else (x,)
                        out = stage(*inputs, **own)
                        sent = sent_on(out, index, f"batch {i}") if away else ()
                    except Exception as problem:
                        out, sent, error = None, None, error or problem
                    if away:
                        send_tensors(sent, self.pp, self.plan.rank_of[index + 1], self.device)
                if error is None:
                    yield out
        if error is not None:
            raise error

    def from_last(self, x: Tensor) -> Tensor:
        """Broadcast a tensor from the last stage's rank. On other ranks only the shape and dtype of `x` are used."""
        return all_reduce(x if self.pp.rank == self.last_rank else torch.zeros_like(x), self.pp)

    def recorded(self) -> list[Span]:
        """Return what all ranks of this pipeline did since the last call, in seconds. This is a collective over pp.

        The span of a message begins when this rank posts it, and ends when the rank has waited for it. The wait has a
        span of its own, whose kind begins with "exposed". The pipeline needs `trace`.
        """
        if self.spans is None:
            raise ValueError("nothing was recorded: make the Pipeline with trace=True")
        every = gather_objects(self.spans, self.pp.group)
        self.spans = []
        spans = sorted(
            (Span(r, Action(*action), *times) for spans in every for r, action, *times in spans),
            key=lambda span: (span.rank, span.start),
        )
        begin = min((span.start for span in spans), default=0.0)
        return [span._replace(start=span.start - begin, end=span.end - begin) for span in spans]

    @contextmanager
    def _noted(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        start = None if self.spans is None else self._clock()
        yield
        if start is not None and self.spans is not None:
            self.spans.append(Span(self.pp.rank, Action(kind, stage, micro_batch), start, self._clock()))
        if kind == "B" and self.after_backward is not None:
            self.after_backward(self.mine[stage])

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.time()  # of all clocks the one that ranks on other hosts share


def _check_rows(tensors: dict[str, Any]) -> int:
    """Return the number of rows, which all tensors of a batch must share."""
    x = tensors["x"]
    size = len(x) if isinstance(x, Tensor) and x.dim() else 0
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            is_ = "a tensor without rows" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise ValueError(f"{name} is {is_}: arguments are tensors with one row a sample; leave out what is None")
        if len(tensor) != size:
            raise ValueError(f"{name} has {len(tensor)} rows, x has {size}")
    return size
