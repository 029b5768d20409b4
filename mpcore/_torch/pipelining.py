"""The runtime that executes one rank's actions of a pipeline schedule.

torch's stage finds out by a dry run what it sends and receives, then runs forwards and backwards of micro-batches. The
classes here translate what it does inside into methods with plain names, which a subclass overrides.

Read in torch 2.11 and 2.13. Before 2.13:
    - buffers fit the shapes of the first batch, and cannot be made anew;
    - the dry run does not know what needs a gradient;
    - a stage greets both of its neighbours, even one on its own rank, whom gloo cannot reach.

Imports pipelining, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    RESHARD,
    UNSHARD,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from mpcore._torch.compile import eagerly

Cell = tuple[str, int, int]
"""An action: its kind, such as F or B; the stage; the micro-batch."""

PLANNERS: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "bfs": ScheduleLoopedBFS,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""The schedules that torch plans, by name."""

RENEWS_BUFFERS = hasattr(PipelineStage, "_setup_forward_recv_info")  # since torch 2.13; torch names no version


class PlannedStage:
    """What torch's schedules ask of a stage while they only plan: no module, no process group."""

    def __init__(self, ranks: int, stages: int) -> None:
        self.group_size, self.group_rank, self.num_stages = ranks, 0, stages
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = None


def planned(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> list[list[Cell]]:
    """Have torch plan one of `PLANNERS`: the actions of each rank."""
    stages = [PlannedStage(ranks, ranks * virtual_stages) for _ in range(virtual_stages)]
    order = PLANNERS[name](stages, micro_batches).pipeline_order
    return [_cells(order[rank]) for rank in range(ranks)]


def with_messages(rows: Sequence[Iterable[Cell]], rank_of: Mapping[int, int], stages: int) -> list[list[Cell]]:
    """Add the sends and receives that torch's runtime starts for these actions of each rank, in its order."""
    given = {rank: row for rank, row in _actions(rows).items() if row}
    lowered = _add_send_recv(given, rank_of.__getitem__, stages)
    return [_cells(lowered.get(rank, ())) for rank in range(len(rows))]


def _actions(rows: Sequence[Iterable[Cell]]) -> dict[int, list[Any]]:
    return {
        rank: [_Action(stage, _ComputationType(kind), micro_batch) for kind, stage, micro_batch in row]
        for rank, row in enumerate(rows)
    }


def _cells(row: Iterable[Any]) -> list[Cell]:
    """torch's actions of a rank; its overlapped pairs run one after the other, here as in its runtime."""
    plain = [b for a in row if a is not None for b in (a.sub_actions or (a,))]
    return [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in plain]


class ScheduleRuntime(_PipelineScheduleRuntime):
    """torch's runtime. A subclass is told when the dry run is over."""

    _dry_run_is_over = False

    def dry_run_over(self) -> None:
        """Called once, when this rank's stages are through with the dry run."""

    def load(self, rows: Sequence[Iterable[Cell]]) -> None:
        """Take the actions of each rank, and add the messages that they need.

        `fully_shard`'s own hooks gather parameters and shard them again, so torch's actions for that do nothing.
        """
        self._prepare_schedule_with_comms(_actions(rows))  # type: ignore[arg-type]
        self.register_custom_function(UNSHARD, lambda action, ctx: self.unsharded_stages.add(action.stage_index))
        self.register_custom_function(RESHARD, lambda action, ctx: None)

    def make_buffers(self) -> None:
        """Make what a step's micro-batches are received in."""
        for stage in self._stages if RENEWS_BUFFERS else ():
            stage._setup_forward_recv_info(self._n_microbatches, True)  # type: ignore[attr-defined]
            stage._setup_backward_recv_info(self._n_microbatches)

    def drop_buffers(self) -> None:
        """Free them after a step."""
        for stage in self._stages if RENEWS_BUFFERS else ():
            stage.args_recv_info.clear()
            stage.grad_recv_info.clear()

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        super()._initialize_stages(*args, **kwargs)
        if not self._dry_run_is_over:
            self.dry_run_over()
            self._dry_run_is_over = True


class Stage(PipelineStage):
    """torch's stage. A subclass decides what a dry run returns, and how each kind of backward runs."""

    def dry_outputs(self, module: nn.Module, forward: Callable[[], Any]) -> tuple[Tensor, ...]:
        """Return what the dry run's `forward` says that this stage sends."""
        return forward()

    def before_full_backward(self, last: bool) -> bool:
        """Called before a whole backward of a micro-batch, the step's last or not.

        Returns:
            True: gradients are reduced as this method has set `fully_shard`. False: as torch does it, once a step.
        """
        return False

    def backward_inputs(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Run the first half of a backward: return the gradients of the inputs, and what the second half takes."""
        raise NotImplementedError

    def backward_weights(self, deferred: Any, last: bool) -> None:
        """Run the second half of a backward of a micro-batch, the step's last or not."""
        raise NotImplementedError

    def promised_outputs(self) -> tuple[Any, ...] | None:
        """Return shapes, dtypes and need of gradients that the dry run found; None before torch 2.13."""
        return self._stage_meta.outputs if RENEWS_BUFFERS else None

    def keep_outputs(self, micro_batch: int, outputs: tuple[Tensor, ...]) -> None:
        """Send these outputs of a forward that has just run, and begin its backward at them."""
        self.fwd_cache[micro_batch] = outputs, self.fwd_cache[micro_batch][1]  # type: ignore[assignment]

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        if backward_type == "weight":
            self.backward_weights(bwd_kwargs["param_groups"], last_backward)
            return (), None
        outputs, grads, inputs = (bwd_kwargs[k] for k in ("stage_output", "output_grads", "input_values"))
        if backward_type == "full":
            if self.before_full_backward(last_backward):
                return stage_backward(outputs, grads, inputs), None
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        result = self.backward_inputs(outputs, grads, inputs[: len(self.args_recv_info[0])])
        bwd_kwargs.update(stage_output=(), output_grads=None, input_values=())  # so that the graph's end is freed
        for loss in outputs if self.is_last else ():
            loss.detach_()
        return result

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _to_tensor(self, arg: Any) -> Tensor:
        # The dry run's inputs: numbers that differ from each other, alike on all ranks; integers 0, as any table has.
        x = super()._to_tensor(arg)
        if isinstance(arg, Tensor):
            return x
        if x.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            x.detach().uniform_(generator=torch.Generator(x.device).manual_seed(0))
        else:
            x.detach().zero_()
        return x

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        # The last stage sends nothing; a stage after one that failed gets nothing.
        if self.is_last or not args:
            return ()
        return self.dry_outputs(module, partial(super()._compute_outputs, *args, module=module, **kwargs))

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
        with eagerly():  # the dry run before torch 2.13
            return super()._shape_inference(*args, **kwargs)  # type: ignore[misc]

    def _backward_metadata_inference(self, *args: Any, **kwargs: Any) -> None:
        # A gradient has the shape and dtype of its tensor: no loss is called and no backward runs to find out.
        meta: Any = self._stage_meta
        meta.input_grads = tuple(replace(x, requires_grad=False) if x.requires_grad else None for x in meta.inputs)
        meta.output_grads = tuple(replace(y, requires_grad=False) if y.requires_grad else None for y in meta.outputs)
        self._fwd_outputs_for_bwd_meta = self._fwd_inputs_for_bwd_meta = self._fwd_kwargs_tensors_for_bwd_meta = None
