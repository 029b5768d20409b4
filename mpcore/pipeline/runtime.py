"""Run one rank's actions of a pipeline schedule on torch's runtime."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from mpcore.mesh.axis import Axis
from mpcore.parallel.sync import (
    gather,
    hold_gradients,
    reduce_held,
    reduce_once,
    reduces_each_micro_batch,
    sync_gradients,
)
from mpcore.pipeline.split import backward_inputs, backward_weights

_DTYPES = sorted({str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})
MADE_ANEW = hasattr(PipelineStage, "_setup_forward_recv_info")  # since torch 2.13, which knows what needs gradients


class Runtime(_PipelineScheduleRuntime):
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
        if not MADE_ANEW:
            return
        for stage in self._stages:
            stage._setup_forward_recv_info(self._n_microbatches, True)  # type: ignore[attr-defined]
            stage._setup_backward_recv_info(self._n_microbatches)

    def drop_buffers(self) -> None:
        for stage in self._stages:
            stage.args_recv_info.clear()
            stage.grad_recv_info.clear()


class Stage(PipelineStage):
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
            with undone(module), uncompiled():
                return sent_on(
                    super()._compute_outputs(*args, module=module, **kwargs), self.stage_index, "its first forward"
                )
        except Exception as error:  # raised on all ranks once they are through: see `Runtime`
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
        out = self._as_promised(out, when) if MADE_ANEW else sent_on(out, self.stage_index, when)
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
def undone(module: nn.Module) -> Iterator[None]:
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


def send_tensors(outputs: tuple[Tensor, ...], pp: Axis, to: int, device: torch.device) -> None:
    """Tensors of any number, shapes and dtypes; none of them says that there is nothing to wait for."""
    numbers = [n for x in outputs for n in (_DTYPES.index(str(x.dtype)), x.dim(), *x.shape)]
    header = [torch.tensor(n, dtype=torch.int64, device=device) for n in ([len(numbers)], numbers)]
    for tensor in (*header, *(x.reshape(-1).view(torch.uint8) for x in outputs)):
        if tensor.numel():
            dist.send(tensor, group=pp.group, group_dst=to)


def receive_tensors(pp: Axis, source: int, device: torch.device) -> tuple[Tensor, ...]:
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
