"""Compute the memory of a model's state for each stage of ZeRO: `mpcore plan --fit PARAMETERS`.

Bytes per parameter in bfloat16 with float32 master weights: weights 2; gradients 4, or 2 if they are reduced in
bfloat16; optimizer 12, for the master weight and Adam's two moments.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

WEIGHTS, OPTIMIZER = 2, 12


def state_bytes(parameters: float, stage: int, ranks: int, gradients: int = 4) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer state on one rank.

    Args:
        parameters: the number of parameters of the model.
        stage: the stage of ZeRO. 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also weights.
        ranks: the number of data ranks.
        gradients: bytes per gradient, 2 or 4.

    Raises:
        ValueError: if `stage` is not 0 to 3.

    Example:
        >>> [round(x / 1e9) for x in state_bytes(65e9, 1, 64, gradients=2)]
        [130, 130, 12]
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO stage {stage} is none of 0, 1, 2, 3")
    share = [ranks if stage >= first else 1 for first in (3, 2, 1)]
    each = (WEIGHTS, gradients, OPTIMIZER)
    return tuple(parameters * size / n for size, n in zip(each, share, strict=True))  # type: ignore[return-value]


def state_table(parameters: float, ranks: Sequence[int]) -> str:
    """Return a table in GB: one line per stage and number of data ranks, for gradients of 2 and of 4 bytes."""
    lines = [
        f"{parameters:,.0f} parameters, GB per data rank, without activations; gradients in bf16 / in float32",
        f"{'ranks':>6} {'ZeRO':>5} {'weights':>9} {'gradients':>16} {'optimizer':>10} {'total':>17}",
    ]
    for n in ranks:
        for stage in range(4):
            (w, g2, o), (_, g4, _) = (state_bytes(parameters / 1e9, stage, n, size) for size in (2, 4))
            both = f"{g2:.1f} / {g4:.1f}", f"{w + g2 + o:.1f} / {w + g4 + o:.1f}"
            lines.append(f"{n:>6} {stage:>5} {w:>9.1f} {both[0]:>16} {o:>10.1f} {both[1]:>17}")
    return "\n".join(lines)
