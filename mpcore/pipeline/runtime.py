"""Run one rank's actions of a pipeline schedule on torch's runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore._torch import pipelining
from mpcore._torch.compile import eagerly
from mpcore.mesh.axis import Axis
from mpcore.parallel.sync import (
    gather,
    hold_gradients,
    reduce_held,
    reduce_once,
    reduces_each_micro_batch,
    sync_gradients,
)
from mpcore.pipeline.split import Deferred, backward_inputs, backward_weights

_DTYPES = sorted({str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})


class Runtime(pipelining.ScheduleRuntime):
    """torch's runtime, whose ranks hear of a dry run that failed on one of them."""

    agree: Callable[[], None]

    def dry_run_over(self) -> None:
        """Raise on all ranks what failed on one."""
        self.agree()


class Stage(pipelining.Stage):
    """torch's stage, which tells when each of its actions began and ended, and sums gradients when ZeRO says so."""

    noted: Callable[[str, int, int], Any]
    problems: list[Exception]

    def dry_outputs(self, module: nn.Module, forward: Callable[[], Any]) -> tuple[Tensor, ...]:
        """What the dry run's forward sends on, without a trace in the module; nothing where it fails."""
        try:
            with undone(module), eagerly():
                return sent_on(forward(), self.stage_index, "its first forward")
        except Exception as error:  # raised on all ranks once they are through: see `Runtime`
            self.problems.append(error)
            return ()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.noted("F", self.stage_index, fwd_chunk_id):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # backward begins at the loss, of an output of any kind
            self.keep_outputs(fwd_chunk_id, ())
            return out
        when = f"micro-batch {fwd_chunk_id}"
        promised = self.promised_outputs()
        out = sent_on(out, self.stage_index, when) if promised is None else self._as_promised(out, promised, when)
        self.keep_outputs(fwd_chunk_id, out)
        return out

    def _as_promised(self, out: Any, promised: tuple[Any, ...], when: str) -> tuple[Tensor, ...]:
        """What the next stage waits for. What differs is told at the step's end, so that nobody waits for ever."""
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

    def before_full_backward(self, last: bool) -> bool:
        """Have ZeRO 2 and 3 reduce each micro-batch's gradients: torch would reduce after the last alone."""
        if not reduces_each_micro_batch(self.submod):
            return False
        sync_gradients(self.submod, last)
        return True

    def backward_inputs(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
    ) -> tuple[tuple[Tensor | None, ...], Deferred]:
        """The first half of a backward."""
        gather(self.submod)  # both halves look for the whole parameters in the graph
        hold_gradients(self.submod)
        return backward_inputs(outputs, grads, inputs)

    def backward_weights(self, deferred: Deferred, last: bool) -> None:
        """The second half of a backward."""
        gather(self.submod)
        hold_gradients(self.submod)
        backward_weights(deferred)
        reduce_held(self.submod, last)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        reduce_once(self.submod)  # the factor is 1: nothing is rescaled here


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
