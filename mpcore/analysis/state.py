"""What the state of a model takes with each stage of ZeRO, from arithmetic: `mpcore plan --fit PARAMETERS`.

Bytes of each parameter in bfloat16 with float32 masters: weights 2; gradients 4, or 2 if they are summed in bfloat16;
optimizer 12, which are the master and Adam's two moments.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

WEIGHTS, OPTIMIZER = 2, 12


def state_bytes(parameters: float, stage: int, ranks: int, gradients: int = 4) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state on one rank.

    Args:
        parameters: how many the model has.
        stage: of ZeRO: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 weights too.
        ranks: data ranks.
        gradients: bytes of a gradient, 2 or 4.

    Raises:
        ValueError: for another stage.

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
    """A line for each stage and number of data ranks, in GB, with gradients of 2 and of 4 bytes."""
    lines = [
        f"{parameters:,.0f} parameters, GB on one of so many data ranks; activations come on top",
        f"{'ranks':>6} {'ZeRO':>5} {'weights':>9} {'gradients':>17} {'optimizer':>10} {'all':>19}",
        f"{'':>6} {'':>5} {'':>9} {'2 bytes':>8} {'4 bytes':>8} {'':>10} {'2 bytes':>9} {'4 bytes':>9}",
    ]
    for n in ranks:
        for stage in range(4):
            (w, g2, o), (_, g4, _) = (state_bytes(parameters / 1e9, stage, n, size) for size in (2, 4))
            lines.append(
                f"{n:>6} {stage:>5} {w:>9.1f} {g2:>8.1f} {g4:>8.1f} {o:>10.1f} {w + g2 + o:>9.1f} {w + g4 + o:>9.1f}"
            )
    return "\n".join(lines)
