"""Hide the messages of experts under the other half of their micro-batch.

A block computes the two halves of its rows in turns, so that one half computes while the messages of the other travel:

    attention 1 | attention 2 | experts 1  | experts 2 | sum
                  dispatch 1    dispatch 2
                                            combine 1    combine 2, which nothing hides

Autograd runs what was made last first, so backward has the same order, from the right to the left.

Source: DeepSeek-V3 (arXiv:2412.19437), section 3.4.1, two micro-batches with similar work at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch.autograd import in_backward
from mpcore._torch.module import has_hooks
from mpcore.kernels._checks import can_read
from mpcore.layers.block import TransformerBlock
from mpcore.layers.module import input_error
from mpcore.layers.moe.layer import ParallelMoE
from mpcore.mesh.agreement import gather_objects, raising_together
from mpcore.mesh.axis import Axis
from mpcore.parallel.recompute import assigned_forward
from mpcore.sharding.declarations import named_modules

# An argument has one entry a row if it has at least this many dimensions; None: it never has.
ATTENTION = {"rotary": 3, "positions": 2, "mask": 3, "bias": 4, "memory": 3, "rows": 1, "length": None}
EXPERTS = {"samples": 1, "mask": 2, "positions": None, "loss_scale": 1, "experts": 3}


def overlap_experts(model: nn.Module | Sequence[nn.Module], pp: Axis = Axis(role="pp")) -> None:
    """Hide messages of experts under the other half of their micro-batch, in each block with experts on ep > 1.

    Call it on every rank before `prepare`. Such a block computes its rows in two halves. Results differ from those
    without it by the rounding of weights' gradients, which are sums over the two halves.

    Note:
        - Three of the four messages in each pass of a block run beside computation. In compiled code, in a block whose
          modules have hooks, and with `dispatch="all_gather"` on a CPU, none does.
        - The rows of a block must not depend on each other: layers of mpcore, and torch's norms of features, don't.
        - Forward without gradients computes all rows at once. A micro-batch of one row hides nothing, and warns.
        - What draws from torch's generators, such as LoRA's dropout, draws other numbers than for all rows at once.

    Args:
        model: the model, or this rank's pipeline stages. Its mixtures on ep > 1 must be the `mlp` of a
            `TransformerBlock`.
        pp: the axis of the pipeline's stages, `mesh.pp`.

    Raises:
        ValueError: on every rank of pp, before anything is changed, if no stage has a mixture on ep > 1, or one can't
            compute in halves: it isn't a block's `mlp`, has `sequence_dim=0`, `aux_loss="micro_batch"` or invariant
            numerics. In forward, if an argument is unknown or doesn't have a row for each of x.

    Example:
        >>> moe = mpcore.ParallelMoE(8, 16, num_experts=4, top_k=2, ep=mpcore.Axis(rank=0, size=2, role="ep"))
        >>> block = mpcore.TransformerBlock(
        ...     mpcore.ParallelAttention(8, num_heads=2), moe, mpcore.RMSNorm(8), mpcore.RMSNorm(8))
        >>> mpcore.experimental.overlap_experts(block)
        >>> type(block)
        <class 'mpcore.experimental.overlap_experts.HalvesBlock'>
    """
    stages = [model] if isinstance(model, nn.Module) else list(model)
    modules = {name: module for stage in stages for name, module in named_modules(stage)}
    mixtures = {name: moe for name, moe in modules.items() if isinstance(moe, ParallelMoE) and moe.ep.size > 1}
    if not any(gather_objects(bool(mixtures), pp.group)):
        raise ValueError(
            f"overlap_experts hides messages of experts on ep > 1, and the model has none ({len(modules)} modules on "
            f"this rank): leave it out, or pass ep=mesh.ep to ParallelMoE"
        )
    blocks: dict[nn.Module, TransformerBlock] = {
        module.mlp: module for module in modules.values() if type(module) is TransformerBlock
    }
    with raising_together():
        for name, moe in mixtures.items():
            why = _problem(moe, moe in blocks) or foreign(blocks[moe])
            if why:
                raise ValueError(f"{name or 'the model'} {why}: leave out overlap_experts, or change it")
    for moe in mixtures.values():
        blocks[moe].__class__ = HalvesBlock  # so that copies, recomputation and data parallelism find its forward


def _problem(moe: ParallelMoE, in_block: bool) -> str:
    """Return why a mixture can't compute in halves."""
    if not in_block or type(moe).forward is not ParallelMoE.forward:
        return f"is a {type(moe).__name__} that isn't the mlp of a TransformerBlock, whose attention hides messages"
    if moe.sequence_dim == 0:
        return "has sequence_dim=0, and halves are of dimension 0"
    if moe.router.options.aux_loss == "micro_batch":
        return "has aux_loss='micro_batch', which is another loss for each of 2 halves"
    return "has invariant numerics, which don't sum gradients of 2 halves" if moe.tp.sums or moe.ep.sums else ""


ROWWISE = (nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.ModuleList)


def foreign(block: TransformerBlock) -> str:
    """Return which module of a block may not compute each row by itself, such as a batch norm."""
    for name, module in block.named_modules():
        kind = type(module)
        if assigned_forward(module) is not None or (
            kind.__module__.partition(".")[0] != "mpcore" and kind not in ROWWISE
        ):
            return f"has a {kind.__name__}{name and f' {name}'} with a forward of its own, which may mix the rows"
    return ""


@dataclass
class Half:
    """Half of the rows of a block's input, with their arguments and the message that is under way."""

    x: Tensor
    samples: Tensor | None
    tokens: Tensor | None
    attention: dict[str, Any]
    mlp: dict[str, Any]
    flight: Any = None


class HalvesBlock(TransformerBlock):
    """A `TransformerBlock` with a mixture of experts, made by `overlap_experts`."""

    maker = "overlap_experts"
    fewest = 0  # rows that are halved: all ranks of ep send messages of two halves, also if one of them has no row
    last: tuple[bool, ...] = ()  # whether the last forward had hooks, or all rows at once. Recomputation resets numbers

    def forward(
        self,
        x: Tensor,
        *,
        samples: Tensor | None = None,
        tokens: Tensor | None = None,
        mlp_arguments: Mapping[str, Any] | None = None,
        cu_seqlens: Tensor | None = None,
        **attention_arguments: Any,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]; see `TransformerBlock.forward`."""
        documents = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        modules = () if torch.compiler.is_compiling() else [*self.modules()][1:]
        hooked = any(has_hooks(module, besides="mpcore") for module in modules)
        whole = hooked or not torch.is_grad_enabled() or torch.compiler.is_compiling() or len(x) < self.fewest
        if in_backward():
            if self.last[:1] != (hooked,):
                raise input_error(
                    f"hooks of a block were added or removed before its recomputation, and {self.maker} computes all "
                    f"rows at once where there are hooks: keep them until backward has ended"
                )
            whole = whole or self.last[1]  # as in forward, which torch's reentrant checkpoint runs without gradients
        else:
            self.last = (hooked, whole)
        if len(x) == 1 and torch.is_grad_enabled() and not hooked:
            warnings.warn(f"{self.maker} hides nothing in a micro-batch of 1 row: give it 2 or more", stacklevel=2)
        if whole:
            about: dict[str, Any] = {"samples": samples, "tokens": tokens, "mlp_arguments": mlp_arguments}
            return super().forward(x, **about, **documents, **attention_arguments)
        middle, halves = -(-len(x) // 2), []
        for here in (slice(0, middle), slice(middle, len(x))):
            attention, mlp = (
                _of(here, x, arguments, dims, self.maker)
                for arguments, dims in ((attention_arguments, ATTENTION), (mlp_arguments or {}, EXPERTS))
            )
            part, mine = x[here], _of(here, x, {"samples": samples}, EXPERTS, self.maker)["samples"]
            if cu_seqlens is not None:
                attention["cu_seqlens"], factor = _documents(here, len(x), cu_seqlens, self.maker)
                part = part if factor is None else part * factor.to(part)
            halves.append(Half(part, mine, tokens, attention, mlp))
        try:
            return self.compute(halves)
        finally:
            for half in halves:
                self.stop(half)

    def compute(self, halves: list[Half]) -> Tensor:
        """Compute both halves in turns."""
        for half in halves:
            self.begin(half)
        for half in halves:
            self.go_on(half)
        return torch.cat([self.end(half) for half in halves])

    def begin(self, half: Half) -> None:
        """Compute attention, and start the first message."""
        y = self.attention(self.attention_norm(half.x), **half.attention)
        half.x = self.attention_dropout(y, half.samples, half.tokens, residual=half.x)
        moe: Any = self.mlp
        half.flight = moe.send(self.mlp_norm(half.x), **half.mlp)

    def go_on(self, half: Half) -> None:
        """Compute with what the first message brought, and start the second one."""
        moe: Any = self.mlp
        half.flight = moe.compute(half.flight)

    def end(self, half: Half) -> Tensor:
        """Wait for the second message, and return the block's output."""
        moe: Any = self.mlp
        return self.mlp_dropout(moe.receive(half.flight), half.samples, half.tokens, residual=half.x)

    def stop(self, half: Half) -> None:
        """Wait for a message that forward has left, as recomputation does when it has what backward needs."""


def _of(
    here: slice, x: Tensor, arguments: Mapping[str, Any], dims: Mapping[str, int | None], maker: str
) -> dict[str, Any]:
    """Return the arguments for these rows of x."""

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(cut(name, each) for each in value)
        least, is_one = dims.get(name), here.start < here.stop and name not in ("samples", "rows", "experts")
        if not isinstance(value, Tensor) or least is None or value.dim() < least or (is_one and len(value) == 1):
            return value  # one row counts for all
        if len(value) != len(x):
            raise input_error(
                f"{name} {tuple(value.shape)} has {len(value)} rows, and {maker} cuts the {len(x)} rows of x: give as "
                f"many"
            )
        return value[here]

    for name, value in arguments.items():
        if name not in dims and value is not None:
            known = ", ".join(dims)
            raise input_error(f"{maker} can't cut {name} into the rows of 2 halves: pass no other than {known}")
    return {name: cut(name, value) for name, value in arguments.items()}


def _documents(here: slice, rows: int, ends: Tensor, maker: str) -> tuple[Tensor, Tensor | None]:
    """Return the document ends of these of all rows, and where the host can't read them a factor.

    The factor is NaN if a document lies in both halves, and otherwise 1.
    """
    begin, end = (ends[-1] // max(rows, 1) * row for row in (here.start, here.stop))
    one = ((ends == begin).any() & (ends == end).any()).logical_not()
    if can_read(ends) and bool(one):
        raise input_error(
            f"a document of cu_seqlens goes across the end of row {here.stop or rows} of {rows}, and {maker} "
            f"computes the rows in 2 halves: end documents at rows, as document_ends does"
        )
    return ends.clamp(begin, end) - begin, None if can_read(ends) else torch.where(one, torch.nan, 1.0)
