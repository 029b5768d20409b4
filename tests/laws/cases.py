"""The table of cases: layers and small models, each with its formula in plain torch.

A row says how to build the layer, and computes the same from the logical parameters with torch alone. Each case is one
block: a trained scale before the layer makes the gradient of the layer's input visible as that of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcore as mp
from mpcore import collectives

B, T, D, FF, V, H, K = 8, 12, 8, 16, 12, 4, 4  # samples, tokens, model width, hidden width, vocabulary, heads, head dim
Params = Mapping[str, Tensor]
Truth = Callable[[Params, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        build: makes the layer from its axes and options, `build(tp=axis, sequence_parallel=True)`; no argument makes
            the unsharded layer.
        truth: computes the layer's output [B, T, ..] from its logical parameters, in plain torch.
        takes, gives: what input and output are with sequence parallel: "sequence" is a shard of the tokens, "whole" is
            replicated, "features" is a shard of the last dimension.
        mesh: the sizes of the mesh.
        refuses: the features that this layer or mesh refuses.
    """

    build: Callable[..., nn.Module]
    truth: Truth
    takes: str = "sequence"
    gives: str = "sequence"
    mesh: Mapping[str, int] = field(default_factory=lambda: {"tp": 2, "dp": 2})
    refuses: tuple[str, ...] = ()


class Block(nn.Module):
    """A scale of the input's features, the layer, and its output with all features of all tokens."""

    def __init__(self, case: Case, tp: mp.Axis | None, sequence_parallel: bool) -> None:
        super().__init__()
        on: dict[str, Any] = {} if tp is None else {"tp": tp}
        if sequence_parallel:
            on["sequence_parallel"] = True
        self.scale = nn.Parameter(torch.empty(D, dtype=torch.float64))
        self.layer, self.tp, self.sequence_parallel = case.build(**on).double(), tp, sequence_parallel
        self.takes, self.gives = case.takes, case.gives
        self.sometimes: nn.Parameter | None = None  # [D, D], multiplies the input in the first step alone
        self.step = 0
        if sequence_parallel and self.takes == "sequence":
            mp.add_partial(self, "scale", self.tp)  # it multiplies this rank's tokens alone

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, ..]."""
        sharded = self.sequence_parallel and self.takes == "sequence"
        if sharded:
            x = collectives.split(x, self.tp, 1)
        if self.sometimes is not None and self.step == 0:
            x = x @ self.sometimes
        y = self.layer(x * self.scale)
        if self.gives == "features" or not self.sequence_parallel:
            return y if self.gives != "features" else collectives.gather(y, self.tp, -1)
        return collectives.gather(y, self.tp, 1) if self.gives == "sequence" else y


def _linear(p: Params, x: Tensor, at: str = "") -> Tensor:
    return F.linear(x, p[f"{at}weight"], p.get(f"{at}bias"))


def _mlp(activation: Callable[[Tensor], Tensor]) -> Truth:
    return lambda p, x: _linear(p, activation(_linear(p, x, "up.")), "down.")


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """RoPE of [B, H, T, K]: each pair (i, i + K/2) is rotated by the angle token * base^(-2i/K)."""
    half = x.shape[-1] // 2
    rates = (base ** (-torch.arange(half, dtype=torch.float64) / half)).float().double()  # stored in float32
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _attention(
    kv: int = H, heads: int = H, window: int | None = None, rope: bool = False, causal: bool = True
) -> Truth:
    def truth(p: Params, x: Tensor, at: str = "") -> Tensor:
        parts = _linear(p, x, f"{at}qkv.").split([heads * K, kv * K, kv * K], -1)
        q, k, v = (part.unflatten(-1, (-1, K)).transpose(1, 2) for part in parts)
        q, k = (_rotate(q), _rotate(k)) if rope else (q, k)
        k, v = (part.repeat_interleave(H // kv, 1) for part in (k, v))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        seen = seen.tril() if causal else seen
        seen = seen if window is None else seen & seen.triu(1 - window)
        scores = (q @ k.mT / math.sqrt(K)).masked_fill(~seen, -math.inf)
        return _linear(p, (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), "output.")

    return truth


def _norm(p: Params, x: Tensor, at: str = "") -> Tensor:
    return F.rms_norm(x, (D,), p[f"{at}weight"], 1e-6)


def _block(p: Params, x: Tensor) -> Tensor:
    def of(at: str) -> Params:
        return {name.removeprefix(f"{at}."): value for name, value in p.items() if name.startswith(f"{at}.")}

    x = x + _attention()(of("attention"), _norm(of("attention_norm"), x))
    return x + _mlp(_swiglu)(of("mlp"), _norm(of("mlp_norm"), x))


ON_THREE: dict[str, Any] = {"mesh": {"tp": 3}, "refuses": ("invariant",)}  # whose degrees are powers of two
CASES: dict[str, Case] = {
    "column": Case(lambda **on: mp.ColumnParallelLinear(D, FF, **on), _linear, gives="features"),
    "column, gathered": Case(lambda **on: mp.ColumnParallelLinear(D, FF, False, gather_output=True, **on), _linear,
                             gives="whole"),
    "column, uneven": Case(lambda **on: mp.ColumnParallelLinear(D, 2 * V + 1, gather_output=True, **on), _linear,
                           gives="whole", **ON_THREE),
    "row": Case(lambda **on: mp.RowParallelLinear(D, FF, input_is_parallel=False, **on), _linear, takes="whole"),
    "row, uneven": Case(lambda **on: mp.RowParallelLinear(D, FF, input_is_parallel=False, **on), _linear,
                        takes="whole", **ON_THREE),
    "swiglu": Case(lambda **on: mp.ParallelMLP(D, FF, **on), _mlp(_swiglu)),
    "gelu": Case(lambda **on: mp.ParallelMLP(D, FF, "gelu", **on), _mlp(F.gelu)),
    "attention": Case(lambda **on: mp.ParallelAttention(D, H, head_dim=K, **on), _attention()),
    "grouped queries": Case(lambda **on: mp.ParallelAttention(D, H, 2, head_dim=K, rope=mp.RotaryEmbedding(K), **on),
                            _attention(2, rope=True), refuses=("invariant",)),
    "one KV head": Case(lambda **on: mp.ParallelAttention(D, H, 1, head_dim=K, **on), _attention(1),
                        refuses=("invariant",)),
    "uneven heads": Case(lambda **on: mp.ParallelAttention(D, H, 2, head_dim=K, window=3, **on),
                         _attention(2, window=3), **ON_THREE),
    "not causal": Case(lambda **on: mp.ParallelAttention(D, H, head_dim=K, causal=False, **on),
                       _attention(causal=False)),
    "rms norm": Case(
        lambda **on: nn.Sequential(mp.RMSNorm(D, **on), mp.ColumnParallelLinear(D, FF, False, **on)),
        lambda p, x: _linear(p, _norm(p, x, "0."), "1."), gives="features",
    ),
    "layer norm": Case(
        lambda **on: nn.Sequential(mp.LayerNorm(D, **on), mp.ColumnParallelLinear(D, FF, **on)),
        lambda p, x: _linear(p, F.layer_norm(x, (D,), p["0.weight"], p["0.bias"], 1e-5), "1."), gives="features",
    ),
    "block": Case(
        lambda **on: mp.TransformerBlock(mp.ParallelAttention(D, H, head_dim=K, **on), mp.ParallelMLP(D, FF, **on),
                                         mp.RMSNorm(D, **on), mp.RMSNorm(D, **on)), _block),
}  # fmt: skip
