"""Vocabulary-parallel cross-entropy at one rank: whole vocabularies and an eighth of one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.protocol import Inputs, Kernel, Shape, always, compiled, imported
from mpcore.layers.loss import vocab_parallel_cross_entropy


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Logits [M, V] and targets [M]."""
    M, V = shape["M"], shape["V"]
    return {"logits": torch.randn(M, V, dtype=dtype, device=device), "target": torch.randint(V, (M,), device=device)}


def reference(logits: Tensor, target: Tensor) -> Tensor:
    """torch's own in at least float32."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target, reduction="sum")


CROSS_ENTROPY = Kernel(
    "cross_entropy",
    inputs,
    lambda logits, target: vocab_parallel_cross_entropy(logits, target, reduction="sum"),
    reference,
    {
        "eager": always(reference),
        "torch.compile": compiled(reference),
        "Liger": imported(
            "liger_kernel.transformers.functional",
            "liger_cross_entropy",
            lambda f: lambda logits, target: f(logits, target, reduction="sum"),
        ),
        "quack": imported(
            "quack.cross_entropy", "cross_entropy", lambda f: lambda logits, target: f(logits, target, reduction="sum")
        ),
        "Megatron": imported(
            "megatron.core.fusions.fused_cross_entropy",
            "fused_vocab_parallel_cross_entropy",
            lambda f: lambda logits, target: f(logits[:, None], target[:, None], torch.distributed.group.WORLD).sum(),
        ),
    },
    cost=lambda s, b: (b * s["M"] * s["V"], 3 * b * s["M"] * s["V"]),
    shapes=[{"M": 8192, "V": v} for v in (128256, 16032)],
    toy={"M": 5, "V": 37},
    check={"M": 1024},
)
