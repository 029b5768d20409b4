"""Rotary position embedding.

Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2; scaled tables: Llama 3 (arXiv:2407.21783, and its release),
YaRN (Peng et al. 2023, arXiv:2309.00071, equations 17 to 23).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.kernels.rope import rope


class RotaryEmbedding(nn.Module):
    """Compute the cosines and sines of rotary position embedding: `cos, sin = rope(positions)`, for `apply_rope`.

    Args:
        head_dim: K.
        base: the base of the geometric series of frequencies.
        fraction: the fraction of each head that is rotated; the other dimensions are unchanged. `fraction * K` must be
            even.
        scaling: None, or a mapping as in Hugging Face configs with a `rope_type`: "default", "linear" (`factor`),
            "llama3" (`factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`) or "yarn"
            (`factor`, `original_max_position_embeddings`; optional `beta_fast`, `beta_slow`, `attention_factor`,
            `mscale` with `mscale_all_dim`, `truncate`).
        interleaved: rotate neighbouring pairs (2i, 2i+1) instead of pairs (i, i + K/2) from the two halves.

    Attributes:
        score_factor: the factor on the scores of `MultiLatentAttention`. With YaRN's `mscale_all_dim` it is the square
            of YaRN's amplitude; otherwise 1.

    Raises:
        ValueError: if the number of rotated dimensions is odd, or the scaling is unknown.

    Example:
        >>> rope = mpcore.RotaryEmbedding(8, fraction=0.5)
        >>> cos, sin = rope(torch.arange(3))
        >>> cos.shape
        torch.Size([3, 2])
    """

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        fraction: float = 1.0,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.dim: int = int(head_dim * fraction)
        if self.dim % 2:
            raise ValueError(f"RoPE rotates pairs: {self.dim} of head_dim {head_dim}, fraction {fraction}, is not even")
        self.base = base
        self.scaling: dict[str, Any] = dict(scaling or {})
        self.interleaved = interleaved
        self.amplitude: float
        frequencies, self.amplitude = rope_frequencies(self.dim, base, self.scaling)
        everywhere = self.scaling.get("mscale_all_dim")
        of_scores = _yarn_amplitude(float(self.scaling["factor"]), everywhere) if everywhere else 1.0
        self.score_factor: float = of_scores**2
        # Neither a parameter nor a buffer: `model.to(torch.bfloat16)` must not round the frequencies.
        self._frequencies = frequencies
        self.inv_freq = torch.tensor(frequencies, dtype=torch.float32, device="cpu")

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        device = fn(self.inv_freq).device
        if device.type != "meta" and device != self.inv_freq.device:
            self.inv_freq = torch.tensor(self._frequencies, dtype=torch.float32, device=device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions' angles.

        Args:
            positions: [T] or [B, T] integers.
            dtype: the dtype of the result. Angles are computed in fp32, or in fp64 for fp64. Frequencies are rounded to
                fp32 for both, as in Hugging Face.

        Returns:
            cos, sin: [T, R/2] or [B, T, R/2], where R is the number of rotated dimensions.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions.to(wide).unsqueeze(-1) * self.inv_freq.to(positions.device, wide)
        return (angles.cos() * self.amplitude).to(dtype), (angles.sin() * self.amplitude).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, scaling={self.scaling or None}, interleaved={self.interleaved}"


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each pair of dimensions by its angle. Dimensions beyond those of the table are unchanged.

    Args:
        x: [B, T, H, K], any floating dtype, as the result; computed in at least fp32.
        cos, sin: [T, R/2] or [B, T, R/2] with R <= K, from `RotaryEmbedding`.
        interleaved: rotate pairs (2i, 2i+1) instead of (i, i + R/2).

    Example:
        >>> cos, sin = mpcore.RotaryEmbedding(4)(torch.arange(3))
        >>> query = mpcore.apply_rope(torch.ones(2, 3, 1, 4), cos, sin)
        >>> query[0, 0, 0]  # position 0 isn't rotated
        tensor([1., 1., 1., 1.])
    """
    return rope(x, None, cos, sin, interleaved=interleaved)[0]


_NEEDED = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
_OPTIONAL = {"yarn": {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}}


def rope_frequencies(dim: int, base: float, scaling: Mapping[str, Any]) -> tuple[list[float], float]:
    """Return the angular frequency of each pair, in radians per position, and the factor on cos and sin."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _NEEDED:
        raise ValueError(f"rope_type {kind!r} is unknown: it is one of {sorted(_NEEDED)}")
    given = scaling.keys() - {"rope_type", "type"}
    lacking, unknown = _NEEDED[kind] - given, given - _NEEDED[kind] - _OPTIONAL.get(kind, set())
    if lacking:
        raise ValueError(f"rope scaling {kind!r} lacks {sorted(lacking)}")
    if unknown:
        raise ValueError(
            f"rope scaling {kind!r} has no {sorted(unknown)} "
            "(rope_theta is `base` here, partial_rotary_factor is `fraction`)"
        )
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if kind == "default":
        return plain, 1.0
    factor = float(scaling["factor"])
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    if kind == "llama3":
        old = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if low >= high:
            raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high} of rope scaling 'llama3'")

        def scaled(f: float) -> float:
            turns = old * f / (2 * math.pi)  # full rotations within the original training length
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            return (1 - smooth) * f / factor + smooth * f

        return [scaled(f) for f in plain], 1.0
    old = scaling["original_max_position_embeddings"]

    def index_of(turns: float) -> float:
        return dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = [min(max((i - low) / (high - low or 0.001), 0.0), 1.0) for i in range(dim // 2)]
    frequencies = [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]
    if scaling.get("attention_factor") is not None:
        return frequencies, float(scaling["attention_factor"])
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return frequencies, _yarn_amplitude(factor, mscale) / _yarn_amplitude(factor, mscale_all)
    return frequencies, _yarn_amplitude(factor, 1.0)


def _yarn_amplitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
