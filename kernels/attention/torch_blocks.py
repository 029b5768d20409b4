"""Attention by torch's own kernels, which return the log-sum-exp and take a merged output and log-sum-exp in backward.

They serve causal and full masks, such as the blocks of ring attention. Results have the dtype of the query: in bfloat16
the output of each block is rounded before it is merged.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import operator
from .._torch import has_no_values, sdpa_backend, sdpa_backward, sdpa_forward
from .forward import OPTIONS


def check_torch(query: Tensor, key: Tensor, value: Tensor, causal: bool, **refused: Any) -> None:
    """Raise `ValueError` unless torch has a kernel of these heads, and everything `refused` is None."""
    given = [f"{name} {tuple(x.shape) if isinstance(x, Tensor) else x}" for name, x in refused.items() if x is not None]
    if given:
        raise ValueError(f"impl='torch' serves causal and full masks alone, not {' or '.join(given)}: leave out impl")
    if not torch.compiler.is_compiling() and not _is_empty(query, key):
        _backend(query, key, value, causal)


def _backend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> str:
    found = sdpa_backend(*_by_heads(query, key, value), causal=causal)
    if found is None:
        raise ValueError(
            f"impl='torch', but for heads of {query.shape[3]} and {value.shape[3]} in {query.dtype} on {query.device} "
            "torch has no attention that returns a log-sum-exp: leave out impl"
        )
    return found


def _by_heads(*of_tokens: Tensor) -> Any:
    return tuple(x.transpose(1, 2) for x in of_tokens)


def _is_empty(query: Tensor, key: Tensor) -> bool:
    return has_no_values(query) or query.numel() == 0 or key.numel() == 0


@operator(
    f"attention_torch_forward(Tensor query, Tensor key, Tensor value, {OPTIONS}) -> (Tensor output, Tensor lse)",
    flops=lambda query, key, value, *_, **__: 2 * math.prod(query[:3]) * key[1] * (query[3] + value[3]),
)
def torch_forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    _, _, causal, scale, _, _, out_dtype = options
    if _is_empty(query, key):
        (B, T, H, _), V, wide = query.shape, value.shape[3], torch.promote_types(query.dtype, torch.float32)
        return query.new_zeros((B, T, H, V), dtype=out_dtype), query.new_full((B, H, T), -math.inf, dtype=wide)
    output, lse = sdpa_forward(_backend(query, key, value, causal), *_by_heads(query, key, value), causal, scale)
    return output.transpose(1, 2).to(out_dtype or query.dtype).contiguous(), lse.contiguous()


@operator(
    "attention_torch_backward(Tensor grad, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor output,"
    f" Tensor lse, {OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    flops=lambda grad, dlse, query, key, value, *_, **__: (
        2 * math.prod(query[:3]) * key[1] * (3 * query[3] + 2 * value[3])
    ),
)
def torch_backward(
    grad: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _, _, causal, scale, _, _, out_dtype = options
    heads, widths = (query, key, value), (query.shape[3], query.shape[3], value.shape[3])
    if _is_empty(query, key):
        return tuple(x.new_zeros(x.shape, dtype=out_dtype) for x in heads)
    if dlse is not None:  # torch sums output grad: eight more columns, whose values are 0, subtract dlse from the sum
        heads = tuple(F.pad(x, (0, 8)) for x in heads)
        more = (dlse / -8).transpose(1, 2).unsqueeze(-1).expand(*grad.shape[:3], 8)
        grad, output = F.pad(grad, (0, 8), value=1.0), torch.cat([output, more.to(output.dtype)], -1)
    given = *_by_heads(grad, *heads, output.to(grad.dtype)), lse.contiguous(), causal, scale
    found = _by_heads(*sdpa_backward(_backend(*heads, causal=causal), *given))
    return tuple(x[..., :n].to(out_dtype or x.dtype).contiguous() for x, n in zip(found, widths, strict=True))
