"""The session-wide pool of gloo ranks, `mpcore.verify.pool`, with memory that shows what nobody wrote.

`ranks(n, check, *args)` calls `check(*args)` in n processes that form a world of their own, and returns the n results.
`check` must be importable: a function at the top level of a test module.
"""

from __future__ import annotations

import torch

from mpcore.verify.pool import Pool, RankError, mesh

__all__ = ["BEFORE_2_13", "Pool", "RankError", "mesh", "strict_memory"]

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # docs/decisions.md says what differs


def strict_memory() -> None:
    """Have `torch.empty` return NaN, so that an output nobody wrote fails, and refuse nondeterministic operations."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
