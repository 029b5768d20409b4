"""The head and its cross-entropy, the sum or of each token, or its log-probabilities, in chunks of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.protocol import Inputs, Kernel, Shape, always, compiled, imported
from mpcore.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_rows, linear_log_prob

SIZES = {
    "shapes": [{"M": 8192, "D": 4096, "V": v} for v in (128256, 32000)],
    "toy": {"M": 6, "D": 8, "V": 37},
    "unit": "TFLOP/s",
    "check": {"M": 1024},
}


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [M, D], the head [V, D], targets and their weights [M]."""
    M, D, V = shape["M"], shape["D"], shape["V"]
    like = {"dtype": dtype, "device": device}
    return {
        "x": torch.randn(M, D, **like),
        "weight": torch.randn(V, D, **like) * D**-0.5,
        "target": torch.randint(V, (M,), device=device),
        "scale": torch.ones(M, device=device),
    }


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """All of them at once, in float32, or float64."""
    z = x @ weight.t()
    return z.to(torch.promote_types(z.dtype, torch.float32))


def eager(x: Tensor, weight: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """The sum of all losses."""
    return F.cross_entropy(logits(x, weight), target, reduction="sum")


def cost(s: Shape, b: int) -> tuple[float, float]:
    """One product, and three; those that backward makes again are no work that anybody asked for."""
    return 2.0 * s["M"] * s["D"] * s["V"], 6.0 * s["M"] * s["D"] * s["V"]


LINEAR_CROSS_ENTROPY = Kernel(
    "linear_cross_entropy",
    inputs,
    linear_cross_entropy,
    eager,
    {
        "eager": always(eager),
        "torch.compile": compiled(eager),
        "Liger": imported(
            "liger_kernel.transformers.functional",
            "liger_fused_linear_cross_entropy",
            lambda f: lambda x, weight, target, scale: f(x, weight, target, reduction="sum"),
        ),
        "quack": imported(
            "quack.linear_cross_entropy",
            "chunked_linear_cross_entropy",
            lambda f: lambda x, weight, target, scale: f(x, weight, target, reduction="sum"),
        ),
        "cut-cross-entropy": imported(
            "cut_cross_entropy",
            "linear_cross_entropy",
            lambda f: lambda x, weight, target, scale: f(x, weight, target, reduction="sum"),
        ),
    },
    cost=cost,
    constants=("scale",),
    **SIZES,
)


def inputs_of_rows(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The same without weights of tokens."""
    return {name: t for name, t in inputs(shape, dtype, device).items() if name != "scale"}


def eager_rows(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss of each token."""
    return F.cross_entropy(logits(x, weight), target, reduction="none")


def eager_log_prob(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each target, and the entropy."""
    log_p = logits(x, weight).log_softmax(-1)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


LINEAR_CROSS_ENTROPY_ROWS = Kernel(
    "linear_cross_entropy_rows",
    inputs_of_rows,
    linear_cross_entropy_rows,
    eager_rows,
    {
        "eager": always(eager_rows),
        "torch.compile": compiled(eager_rows),
        "cut-cross-entropy": imported(
            "cut_cross_entropy",
            "linear_cross_entropy",
            lambda f: lambda x, weight, target: f(x, weight, target, reduction="none"),
        ),
    },
    cost=cost,
    **SIZES,
)

LINEAR_LOG_PROB = Kernel(
    "linear_log_prob",
    inputs_of_rows,
    linear_log_prob,
    eager_log_prob,
    {
        "eager": always(eager_log_prob),
        "torch.compile": compiled(eager_log_prob),
        "verl": imported(
            "verl.utils.kernel.linear_cross_entropy",
            "linear_cross_entropy",
            lambda f: lambda x, weight, target: f(x, weight, target, 1.0, "none"),
        ),
    },
    cost=cost,
    **SIZES,
)
