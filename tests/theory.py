"""A paper's formula for the bytes that a step sends. Tests compare the counted bytes with it."""

from __future__ import annotations


def zero_bytes(size: int, zero: int, micro_batches: int = 1) -> dict[str, int]:
    """Bytes of each kind over the data axis in a step. With one micro-batch the volume is 2 psi, for ZeRO 3 3 psi.

    Args:
        size: psi, the bytes of all parameters that are sharded together, padding included.
        zero: the stage. 2 and 3 reduce the gradients of each micro-batch, 3 gathers parameters twice for each.
        micro_batches: how many a step has.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, sections 7.1 and 7.2.
    """
    if zero not in range(4):
        raise ValueError(f"ZeRO stage {zero} is none of 0, 1, 2, 3")
    m = micro_batches
    gathered, scattered = ((0, 0), (1, 1), (1, m), (2 * m, m))[zero]
    each = {"all_reduce": 0 if zero else size, "all_gather": gathered * size, "reduce_scatter": scattered * size}
    return {kind: total for kind, total in each.items() if total}
