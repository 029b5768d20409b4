"""Which implementation of an operator runs where the caller names none: by measurement, or else by a rule.

docs/kernels.md has the order and the reasons: `impl=` of the call, `use_kernels`, the rows of `measured.json`, the
rule. What the table or the rule chose runs only if it passed its self-test on this device (`_self_test.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import _self_test

MEASURED = Path(__file__).with_name("measured.json")
TRITON, TORCH, REFERENCE = IMPLEMENTATIONS = ("triton", "torch", "reference")
TORCH_BY_RULE = ("plain_attention", "grouped_linear", "fp8_matmul")


class Measurement(NamedTuple):
    """One row of the table."""

    device: str  # such as "NVIDIA H100 80GB HBM3"
    operator: str  # a name of `_self_test.OPERATORS`
    dtype: str  # of the main input, such as "bfloat16"
    sizes: dict[str, int]  # by the letters of the operator's docstring
    impl: str  # the fastest implementation that was right
    microseconds: dict[str, float]  # median time of each implementation
    versions: dict[str, str]  # of torch and triton, and date and commit of the measurement

    def distance(self, sizes: Mapping[str, int]) -> float:
        """Return the largest difference of a size from the row's, in powers of two, over the sizes that both have."""
        shared = sizes.keys() & self.sizes.keys()
        return max((abs(math.log2(max(sizes[s], 1) / max(self.sizes[s], 1))) for s in shared), default=0.0)


def read_measurements(path: Path = MEASURED) -> list[Measurement]:
    """Read the table; raises `ValueError` if a row has other fields or names an unknown implementation."""
    rows = json.loads(path.read_text())
    for i, row in enumerate(rows):
        if set(row) != set(Measurement._fields) or row["impl"] not in IMPLEMENTATIONS:
            raise ValueError(f"row {i} of {path} has {sorted(row)} and impl {row.get('impl')!r}; it needs "
                             f"{sorted(Measurement._fields)} and one of {IMPLEMENTATIONS}")  # fmt: skip
    return [Measurement(**row) for row in rows]


measurements: Sequence[Measurement] = read_measurements()
_forced: str | None = None


@contextmanager
def use_kernels(impl: str) -> Iterator[None]:
    """Choose the implementation of each operator of `mpcore.kernels` that is called without `impl`.

    If a loss is wrong, run under `use_kernels("reference")`: if it is right then, a kernel is wrong. `mpcore doctor`
    says which.

    Args:
        impl: `"reference"`, or `"triton"`, which also skips the table and the self-test.

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


def chosen(operator: str, x: Any, sizes: Mapping[str, int]) -> str:
    """Return the implementation that runs for the main input `x` on a GPU: by the table, the rule and the self-test.

    Sizes don't count while `torch.compile` traces, so that a graph of dynamic shapes stays one graph: then the rows of
    a dtype must agree, or the rule decides.
    """
    impl = (_measured(operator, x, sizes) if measurements else None) or by_rule(operator)
    tested = impl == TRITON or operator == "fp8_matmul"  # no GPU of ours has taken the layout of its scales yet
    if tested and not _self_test.passes(operator, x):
        return TORCH if operator == "plain_attention" else REFERENCE
    return impl


def by_rule(operator: str) -> str:
    """Return the implementation that runs where nothing was measured."""
    return TORCH if operator in TORCH_BY_RULE else TRITON


def _measured(operator: str, x: Any, sizes: Mapping[str, int]) -> str | None:
    """Return the implementation of the nearest row, or None if none is within a factor of two."""
    dtype, device = str(x.dtype).removeprefix("torch."), _self_test.device_name(x.device)
    rows = [r for r in measurements if (r.operator, r.dtype, r.device) == (operator, dtype, device)]
    if torch.compiler.is_compiling():
        found = {r.impl for r in rows}
        return found.pop() if len(found) == 1 else None
    row = min(rows, key=lambda r: r.distance(sizes), default=None)
    return row.impl if row is not None and row.distance(sizes) <= 1 else None


def describe(device: torch.device) -> Iterator[str]:
    """List what runs on a device, one line for an operator or a measurement, as `mpcore doctor` prints it."""
    name = _self_test.device_name(device)
    for operator in _self_test.OPERATORS:
        own = [r for r in measurements if (r.device, r.operator) == (name, operator)]
        if not own:
            yield f"{operator:<22}{by_rule(operator):<10}by rule"
        for r in own:
            sizes = ", ".join(f"{n} {size}" for n, size in r.sizes.items())
            times = ", ".join(f"{n} {us:g} us" for n, us in r.microseconds.items())
            about = ", ".join(r.versions.values())
            yield f"{operator:<22}{r.impl:<10}{r.dtype}, {sizes}: {times} ({r.device}, {about})"
