"""The losses and log-probabilities of a linear layer's output in plain torch; they hold all logits."""

from typing import Any

import torch
from torch import Tensor


def linear_cross_entropy_reference(x: Tensor, weight: Tensor, target: Tensor, scale: Tensor, **options: Any) -> Tensor:
    """`linear_cross_entropy` of a whole vocabulary in plain torch, under torch's own autograd; holds all logits."""
    loss = linear_cross_entropy_rows_reference(x, weight, target, **options)
    return (loss * scale.detach().to(loss.dtype)).sum()


def linear_cross_entropy_rows_reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """`linear_cross_entropy_rows` of a whole vocabulary in plain torch; holds all logits."""
    z = _logits(x, weight, softcap)
    loss = torch.nn.functional.cross_entropy(
        z, target.long(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    if z_loss:
        loss = loss + z_loss * z.logsumexp(-1).square().masked_fill(target == ignore_index, 0)
    return loss


def linear_log_prob_reference(
    x: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int = -100, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`linear_log_prob` of a whole vocabulary in plain torch; holds all logits."""
    log_p = _logits(x, weight, softcap).log_softmax(-1)
    ignored = target == ignore_index
    log_prob = log_p.gather(-1, target.long().masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_prob.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0)


def _logits(x: Tensor, weight: Tensor, softcap: float) -> Tensor:
    z = x @ weight.t()
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return softcap * torch.tanh(z / softcap) if softcap else z
