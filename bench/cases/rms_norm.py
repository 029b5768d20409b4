"""RMS norm of 8192 rows, narrow and wide, alone and behind a residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.protocol import Inputs, Kernel, Shape, always, compiled, imported
from mpcore.kernels.rms_norm import rms_norm, rms_norm_reference


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [M, D] and the gain [D]."""
    M, D = shape["M"], shape["D"]
    return {"x": torch.randn(M, D, dtype=dtype, device=device), "weight": torch.rand(D, dtype=dtype, device=device) + 1}


def inputs_residual(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The same and the residual stream."""
    made = inputs(shape, dtype, device)
    return made | {"residual": torch.randn_like(made["x"])}


def eager(x: Tensor, weight: Tensor) -> Tensor:
    """torch's own."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


def eager_residual(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """torch's own after an addition."""
    h = x + residual
    return eager(h, weight), h


RMS_NORM = Kernel(
    "rms_norm",
    inputs,
    rms_norm,
    rms_norm_reference,
    {
        "eager": always(eager),
        "torch.compile": compiled(eager),
        "Liger": imported(
            "liger_kernel.ops.rms_norm",
            "LigerRMSNormFunction",
            lambda f: lambda x, weight: f.apply(x, weight, 1e-6, 0.0, "llama", False),
        ),
        "quack": imported("quack.rmsnorm", "rmsnorm", lambda f: lambda x, weight: f(x, weight, eps=1e-6)),
    },
    cost=lambda s, b: (2 * b * s["M"] * s["D"], 5 * b * s["M"] * s["D"]),
    shapes=[{"M": 8192, "D": d} for d in (2048, 4096, 16384)],
    toy={"M": 5, "D": 96},
)
ADD_RMS_NORM = Kernel(
    "add_rms_norm",
    inputs_residual,
    rms_norm,
    rms_norm_reference,
    {
        "eager": always(eager_residual),
        "torch.compile": compiled(eager_residual),
        "Liger": imported(
            "liger_kernel.ops.fused_add_rms_norm",
            "LigerFusedAddRMSNormFunction",
            lambda f: lambda x, weight, residual: f.apply(x, residual, weight, 1e-6, 0.0, "llama", False),
        ),
        "quack": imported(
            "quack.rmsnorm",
            "rmsnorm",
            lambda f: lambda x, weight, residual: f(x, weight, residual=residual, eps=1e-6, prenorm=True),
        ),
    },
    cost=lambda s, b: (4 * b * s["M"] * s["D"], 8 * b * s["M"] * s["D"]),
    shapes=[{"M": 8192, "D": 4096}, {"M": 8192, "D": 8192}],
    toy={"M": 5, "D": 96},
)
