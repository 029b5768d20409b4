"""The policies of `prepare`: frozen dataclasses, one per concern, that check their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpcore.mesh.axis import Mesh
from mpcore.parallel.fsdp import Zero
from mpcore.parallel.recompute import check_recompute

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
DTYPES |= {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The dtype to compute in: 16-bit parameters or autocast, optionally with FP8 products in the blocks.

    With "bfloat16", parameters, activations, the residual stream and their communication are bfloat16. The optimizer
    steps float32 master weights, which start from the unrounded values. Gradients are summed in float32. mpcore's
    norms, softmax, losses and routers compute in float32. Build the model in float32: `prepare` converts it.

    With `Zero` stages 1 to 3, the float32 shards are the master weights, and `Zero.param_dtype` (default: bfloat16) is
    all-gathered, so any optimizer works. With stage 0 the optimizer must keep the master weights: use `mpcore.AdamW` or
    `mpcore.Muon`.

    Args:
        dtype: "float64", "float32", "bfloat16" or "float16", a short name such as "bf16", or a torch.dtype.
        autocast: keep the parameters' dtype, and cast the operands of matrix products to bfloat16 (torch.autocast). The
            residual stream is then float32. With "float16", autocast to float16 is always on, and the loss is scaled.
        fp8: compute the linear layers of the blocks in FP8 (e4m3, one scale per 128 elements).
        first_loss_scale: the initial loss scale of float16. It is halved at an overflow, and doubled after 2,000 finite
            steps.

    Raises:
        ValueError: if the dtype is unknown, or autocast is given with float32 or float64.

    Example:
        >>> Precision("bfloat16").param_dtype, Precision("bfloat16", autocast=True).param_dtype
        (torch.bfloat16, None)
    """

    dtype: str | torch.dtype = "float32"
    fp8: bool = False
    first_loss_scale: float = 2.0**16
    autocast: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (*DTYPES, *DTYPES.values()):
            known = f"{', '.join(DTYPES)}; for FP8 write Precision('bfloat16', fp8=True)"
            raise ValueError(f"precision {self.dtype!r} is none of {known}")
        if self.autocast and self._half is None:
            raise ValueError(f"Precision({self.dtype!r}, autocast=True): autocast is to bfloat16 or float16")

    @property
    def _half(self) -> torch.dtype | None:
        dtype = DTYPES[self.dtype] if isinstance(self.dtype, str) else self.dtype
        return dtype if dtype in (torch.bfloat16, torch.float16) else None

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of matrix products under autocast; None: the parameters' dtype."""
        return self._half if self.autocast or self._half == torch.float16 else None

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype of the parameters, with float32 master weights; None: the dtype they were built in."""
        return None if self.autocast_dtype else self._half


@dataclass(frozen=True)
class Recompute:
    """Recompute the blocks' activations in backward instead of keeping them.

    Args:
        kind: "none"; "selective" keeps the results of linear layers; "full" keeps only each block's input.
        every: recompute only every n-th block.
        budget: replaces `kind`: the fraction of the activations' bytes that the blocks may keep, in (0, 1].
        example: required by `budget`: `example(block)` returns `(args, kwargs)` for a call of the block. Tensors may be
            on "meta".
        preserve_rng_state: restore torch's generators for the recomputation, for blocks that draw from them. mpcore's
            layers don't.

    Raises:
        ValueError: if the kind is unknown, the budget is outside (0, 1], or `example` is missing.

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
        check_recompute(self.kind, self.every, self.budget, self.example)


@dataclass(frozen=True)
class Offload:
    """Keep optimizer state, activations or parameters in host memory until they are needed.

    Args:
        optimizer: offload the optimizer's state; the step runs on the host.
        activations: offload the tensors that autograd saves for backward.
        parameters: offload the blocks' parameters. Requires `Zero(stage=0)` or one data-parallel rank.

    Example:
        >>> Offload(optimizer=True).parameters
        False
    """

    optimizer: bool = False
    activations: bool = False
    parameters: bool = False


@dataclass(frozen=True)
class Compile:
    """Compile each block with torch.compile.

    Args:
        backend: one of `torch.compiler.list_backends(())`.

    Raises:
        ValueError: if the backend is unknown.

    Example:
        >>> Compile("aot_eager").backend
        'aot_eager'
    """

    backend: str = "inductor"

    def __post_init__(self) -> None:
        if self.backend not in torch.compiler.list_backends(()):
            known = ", ".join(torch.compiler.list_backends())
            raise ValueError(f"compile backend {self.backend!r} is none of torch's, such as {known}")


POLICIES: dict[str, tuple[type, str]] = {
    "data": (Zero, "Zero(3)"),
    "offload": (Offload, "Offload(optimizer=True)"),
    "compile": (Compile, "Compile()"),
}


def check_policies(mesh: Mesh, splits_backward: bool, **given: Any) -> None:
    """Raise ValueError for values that are not policies, or that exclude each other or don't fit the mesh."""
    for name, (kind, example) in POLICIES.items():
        if not isinstance(given[name], kind) and (given[name] is not None or name in ("data", "offload")):
            example = example.replace("3", f"{given[name]}") if given[name] in (0, 1, 2) else example
            raise ValueError(f"{name} is {given[name]!r}, which is no {kind.__name__}: write {name}={example}")
    zero, offload = given["data"], given["offload"]
    zero.check(mesh)
    data = mesh.data.size
    if offload.parameters and zero.stage and data > 1:
        raise ValueError(
            f"Offload(parameters=True) with Zero(stage={zero.stage}) on {data} data-parallel ranks: stage 0 leaves "
            f"parameters whole, which can be offloaded; stage 3 holds each once among the ranks"
        )
    if offload.parameters and splits_backward:
        raise ValueError(
            "Offload(parameters=True) can't load a block's parameters for the second half of a split backward: take "
            "the schedule 1f1b or interleaved"
        )
