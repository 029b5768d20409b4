"""FLOP formulas of the operators that multiply matrices, for `torch.utils.flop_counter.FlopCounterMode`.

torch's counter imports Triton, so the formulas are registered when another module imports the counter.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_formulas: list[tuple[Any, Callable]] = []


def register_flops(op: Any, formula: Callable) -> None:
    """Register `formula(*shapes, out_shape, **kwargs) -> int` of an operator such as `torch.ops.mpcore.fp8_matmul`."""
    _formulas.append((op, formula))
    if _COUNTER in sys.modules:
        sys.modules[_COUNTER].register_flop_formula(op)(formula)


class _OnImport:
    """A finder on `sys.meta_path` that registers the formulas once the counter is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER or _COUNTER in sys.modules:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]  # a caller may search without importing
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def execute(module: ModuleType) -> None:
                plain(module)
                for op, formula in _formulas:
                    module.register_flop_formula(op)(formula)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _OnImport())  # type: ignore[arg-type]
