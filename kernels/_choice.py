"""Which implementation of an operator runs where the caller names none: a rule decides.

docs/kernels.md has the order and the reasons: `impl=` of the call, `use_kernels`, the rule. What the rule chose runs
only if it passed its self-test on this device (`_self_test.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import _self_test

TRITON, TORCH, REFERENCE = "triton", "torch", "reference"
TORCH_BY_RULE = ("plain_attention", "grouped_linear", "fp8_matmul")
REFERENCE_BY_RULE = ("attention_merge", "route")  # plain torch, until a GPU has shown that the kernel is faster
_forced: str | None = None


@contextmanager
def use_kernels(impl: str) -> Iterator[None]:
    """Choose the implementation of each operator of `mpcore.kernels` that is called without `impl`.

    If a loss is wrong, run under `use_kernels("reference")`: if it is right then, a kernel is wrong. `mpcore doctor`
    says which.

    Args:
        impl: `"reference"`, or `"triton"`, which also skips the self-test.

    Raises:
        ValueError: if `impl` is neither of these two.

    Note:
        - The choice holds for all threads of the process, because recomputation in backward runs in other threads.
        - Attention by torch's `scaled_dot_product_attention` doesn't change, because that is no kernel of mpcore.
        - A compiled model is compiled again, once for each choice.

    Example:
        >>> from mpcore.kernels import use_kernels
        >>> from mpcore.kernels.rms_norm import rms_norm
        >>> with use_kernels("reference"):
        ...     y = rms_norm(torch.ones(2, 8), torch.ones(8))
    """
    global _forced
    if impl not in (TRITON, REFERENCE):
        raise ValueError(f"impl {impl!r} is neither {TRITON!r} nor {REFERENCE!r}")
    before, _forced = _forced, impl
    try:
        yield
    finally:
        _forced = before


def forced() -> str | None:
    """Return the implementation that `use_kernels` names, if any."""
    return _forced


def chosen(operator: str, x: Any) -> str:
    """Return the implementation that runs for the main input `x` on a GPU: by the rule and the self-test."""
    impl = by_rule(operator)
    tested = impl == TRITON or operator == "fp8_matmul"  # no GPU of ours has taken the layout of its scales yet
    if tested and not _self_test.passes(operator, x):
        return REFERENCE
    return impl


def by_rule(operator: str) -> str:
    """Return the implementation that runs if the kernel passes its self-test."""
    return TORCH if operator in TORCH_BY_RULE else REFERENCE if operator in REFERENCE_BY_RULE else TRITON


def describe() -> Iterator[str]:
    """List what runs on a GPU, one line for an operator, as `mpcore doctor` prints it."""
    for operator in _self_test.OPERATORS:
        yield f"{operator:<22}{by_rule(operator)}"
