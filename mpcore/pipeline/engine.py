"""Floor 4: one step over its micro-batches, on a model that is whole or cut in pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from mpcore.collectives import all_reduce
from mpcore.data_parallel import sync_gradients
from mpcore.mesh import Axis, Mesh

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


class Pipeline:
    """Runs a step: forward and backward of every micro-batch, on this rank's stage.

    Args:
        model: this rank's stage. The first takes the batch's input, each other what the one before returns, all of them
            the keyword arguments of a step.
        mesh: the mesh; `mesh.pp` is the axis that stages lie on.
        micro_batches: how many a step has.
        loss: `loss(output, target)`, a scalar; called on the last stage. Losses are summed, nothing is divided here.

    Raises:
        ValueError: if there are fewer micro-batches than stages.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2: 1F1B, PipeDream-Flush.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self.model, self.pp, self.micro_batches, self.loss = model, mesh.pp, micro_batches, loss
        self.device = mesh.device
        if micro_batches < mesh.pp.size:
            raise ValueError(
                f"{micro_batches} micro-batches are fewer than the pp size {mesh.pp.size}: make micro-batches smaller, "
                f"or the batch larger"
            )
        if mesh.pp.size > 1:
            stage = PipelineStage(model, mesh.pp.rank, mesh.pp.size, mesh.device, group=mesh.pp.group)
            self.schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss, scale_grads=False)

    def forward_backward(self, x: Tensor, target: Tensor, **arguments: Tensor) -> Tensor:
        """Forward and backward of a batch, cut in micro-batches along dimension 0.

        Args:
            x: [B, ...] input of the first stage, on every rank.
            target: [B, ...] what `loss` takes, on every rank.
            arguments: [B, ...] tensors, cut likewise and passed to every stage.

        Returns:
            The sum of the micro-batches' losses in fp64, the same on every stage, without a graph.
        """
        if self.pp.size == 1:
            batches = [t.chunk(self.micro_batches) for t in (x, target, *arguments.values())]
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for i, (inputs, targets, *others) in enumerate(zip(*batches, strict=True)):
                sync_gradients(self.model, i == self.micro_batches - 1)
                loss = self.loss(self.model(inputs, **dict(zip(arguments, others, strict=True))), targets)
                loss.backward()
                total += loss.detach()
            return total
        first, last = self.pp.rank == 0, self.pp.rank == self.pp.size - 1
        losses: list[Tensor] = []
        inputs = (x,) if first else ()
        kwargs: dict[str, Any] = dict(arguments)
        self.schedule.step(*inputs, target=target if last else None, losses=losses if last else None, **kwargs)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        return _from_last(sum((loss.detach() for loss in losses), total), self.pp)

    @torch.no_grad()
    def forward(self, batches: Sequence[Tensor], **arguments: Tensor) -> Iterator[Tensor]:
        """Forward alone, batch after batch through the stages; shapes may differ from batch to batch.

        Args:
            batches: inputs of the first stage, on every rank.
            arguments: passed to every stage.

        Yields:
            For each batch the model's output on the last stage, this stage's output on the others.
        """
        for x in batches:
            if self.pp.rank > 0:
                x = _receive(self.pp, self.device)
            y = self.model(x, **arguments)
            if self.pp.rank < self.pp.size - 1:
                _send(y, self.pp)
            yield y

    def from_last(self, x: Tensor) -> Tensor:
        """What the last stage holds, on every stage: `x` of the others gives only the shape and dtype."""
        return _from_last(x, self.pp)


def _from_last(x: Tensor, pp: Axis) -> Tensor:
    return all_reduce(x if pp.rank == pp.size - 1 else torch.zeros_like(x), pp)


def _send(x: Tensor, pp: Axis) -> None:
    header = torch.tensor([_DTYPES.index(x.dtype), x.dim(), *x.shape, *[0] * (6 - x.dim())], device=x.device)
    for tensor in (header, x.contiguous()):
        dist.send(tensor, group=pp.group, group_dst=pp.rank + 1)


def _receive(pp: Axis, device: torch.device) -> Tensor:
    header = torch.zeros(8, dtype=torch.int64, device=device)
    dist.recv(header, group=pp.group, group_src=pp.rank - 1)
    dtype, dims, *shape = header.tolist()
    x = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device)
    dist.recv(x, group=pp.group, group_src=pp.rank - 1)
    return x
