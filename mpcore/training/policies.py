"""What `prepare` is told about a run: frozen policies, one for each concern, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpcore.mesh.axis import Mesh
from mpcore.mesh.layout import divisors

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16)}  # fmt: skip
RECOMPUTE_KINDS = ("none", "selective", "full")


@dataclass(frozen=True)
class Zero:
    """Shard over the data-parallel ranks: ZeRO, and HSDP with `replicate`.

    Args:
        stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.
        replicate: shard within groups of `data.size / replicate` ranks, such as a node, and replicate across them.
        param_dtype: gather and compute parameters in this dtype; None: in their own.
        reduce_dtype: sum gradients in this dtype.

    Raises:
        ValueError: if the stage is none of 0, 1, 2 and 3.

    Example:
        >>> Zero(stage=3, replicate=2).stage
        3
    """

    stage: int = 1
    replicate: int = 1
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"zero stage {self.stage!r} is none of 0, 1, 2 and 3")


@dataclass(frozen=True)
class Precision:
    """Compute in a dtype: autocast for half precision, a loss scale for float16, FP8 products in the blocks.

    Args:
        dtype: "float64", "float32", "bfloat16" or "float16", or torch's. Parameters keep the dtype that they are built
            in; with half precision they are float32, and so are their gradients.
        fp8: the linear layers of the blocks multiply in FP8 (e4m3, a scale for each 128 elements).
        first_loss_scale: of float16, which halves it at an overflow and doubles it after 2,000 good steps.

    Raises:
        ValueError: for another dtype.

    Example:
        >>> Precision("bfloat16").autocast
        torch.bfloat16
    """

    dtype: str | torch.dtype = "float32"
    fp8: bool = False
    first_loss_scale: float = 2.0**16

    def __post_init__(self) -> None:
        if self.dtype not in (*DTYPES, *DTYPES.values()):
            raise ValueError(f"precision {self.dtype!r} is none of {', '.join(DTYPES)}")

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of matrix products under autocast; None: that of the parameters."""
        dtype = DTYPES[self.dtype] if isinstance(self.dtype, str) else self.dtype
        return dtype if dtype in (torch.bfloat16, torch.float16) else None


@dataclass(frozen=True)
class Recompute:
    """Compute activations of the blocks again in backward instead of keeping them.

    Args:
        kind: "none"; "selective" keeps the products of matrices; "full" keeps each block's input alone.
        every: only each n-th block.
        budget: instead of a kind: the share of their activations' bytes that the blocks may keep, in (0, 1].
        example: with `budget`, `example(block)` returns `(args, kwargs)` of its call; tensors may be on "meta".
        preserve_rng_state: of torch's generators, for blocks that draw from them. mpcore's layers don't.

    Raises:
        ValueError: if the kind is unknown, the budget is outside (0, 1], or comes without an example.

    Example:
        >>> Recompute("selective").kind
        'selective'
    """

    kind: str = "full"
    every: int = 1
    budget: float | None = None
    example: Callable[[nn.Module], tuple[Sequence[Any], Mapping[str, Any]]] | None = None
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        if self.kind not in RECOMPUTE_KINDS:
            raise ValueError(f"recompute kind {self.kind!r} is none of {', '.join(RECOMPUTE_KINDS)}")
        if self.budget is not None and not 0 < self.budget <= 1:
            raise ValueError(f"recompute budget {self.budget} is not above 0 and at most 1")
        if self.budget is not None and self.example is None:
            raise ValueError(f"recompute budget {self.budget} needs example=, which returns a block's arguments")


@dataclass(frozen=True)
class Offload:
    """Keep in the host's memory until it is needed.

    Args:
        optimizer: the optimizer's state; its step runs on the host.
        activations: what autograd saves for backward.
        parameters: the blocks' parameters; with `Zero(stage=0)` or one data-parallel rank.

    Example:
        >>> Offload(optimizer=True).parameters
        False
    """

    optimizer: bool = False
    activations: bool = False
    parameters: bool = False


@dataclass(frozen=True)
class Compile:
    """Run each block as torch.compile makes it.

    Args:
        backend: one of `torch.compiler.list_backends(())`.

    Raises:
        ValueError: for another.

    Example:
        >>> Compile("aot_eager").backend
        'aot_eager'
    """

    backend: str = "inductor"

    def __post_init__(self) -> None:
        if self.backend not in torch.compiler.list_backends(()):
            known = ", ".join(torch.compiler.list_backends())
            raise ValueError(f"compile backend {self.backend!r} is none of torch's, such as {known}")


@dataclass(frozen=True)
class LocalUpdates:
    """Train the workers of `build_mesh(workers=...)` on their own, and merge them every so many steps (DiLoCo).

    Args:
        every: steps between two merges of a parameter.
        lr, momentum, nesterov: of the outer step; lr 1 and momentum 0 average the parameters (Local SGD).
        fragments: merge so many parts of the model in turn.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> LocalUpdates(every=50, fragments=2).every
        50
    """

    every: int = 100
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1

    def __post_init__(self) -> None:
        if self.every < 1 or not 1 <= self.fragments <= self.every:
            raise ValueError(f"{self.fragments} fragments are not from 1 to the {self.every} steps between merges")
        if not 0 < self.lr < math.inf or not 0 <= self.momentum < 1:
            raise ValueError(f"the outer lr {self.lr} is not above 0, or its momentum {self.momentum} not in [0, 1)")


def check_policies(mesh: Mesh, zero: Zero, offload: Offload, local: LocalUpdates | None, splits_backward: bool) -> None:
    """Refuse policies that don't go together, or not with the mesh.

    Raises:
        ValueError: with both and the way out.
    """
    data = mesh.data.size
    if zero.replicate > 1 and (zero.stage == 0 or data % zero.replicate or zero.replicate == data):
        raise ValueError(
            f"Zero(stage={zero.stage}, replicate={zero.replicate}) on {data} data-parallel ranks leaves nothing to "
            f"shard, or unequal groups: take a stage from 1, and for replicate {divisors(data)} below {data}"
        )
    if offload.parameters and zero.stage and data > 1:
        raise ValueError(
            f"Offload(parameters=True) with Zero(stage={zero.stage}) on {data} data-parallel ranks: stage 0 leaves "
            f"parameters whole, which can be offloaded; stage 3 holds each once among the ranks"
        )
    if offload.parameters and splits_backward:
        raise ValueError(
            "Offload(parameters=True) with a schedule that splits backward, whose second half doesn't say which block "
            "it is at: take 1f1b or interleaved"
        )
    if mesh.workers.size > 1 and local is None:
        raise ValueError(
            f"the mesh has {mesh.workers.size} workers, and nothing says when they merge: give "
            f"local_updates=LocalUpdates(every=100), or build_mesh(workers=1)"
        )
