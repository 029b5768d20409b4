"""FLOP formulas of the operators that multiply matrices, for `torch.utils.flop_counter.FlopCounterMode`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_formulas: list[tuple[Any, Callable]] = []


def flops(op: Any) -> Callable[[Callable], Callable]:
    """Decorate the formula of an operator, `formula(*shapes, out_shape, **kwargs) -> int`.

    torch's counter imports Triton, so the formulas are registered when another module imports the counter.

    Args:
        op: such as `torch.ops.mpcore.attention_forward`.
    """

    def register(formula: Callable) -> Callable:
        counter = sys.modules.get(_COUNTER)
        if counter is None:
            _formulas.append((op, formula))
        else:
            counter.register_flop_formula(op)(formula)
        return formula

    return register


class _OnImport:
    """A finder on `sys.meta_path` that registers the formulas once the counter is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]  # a caller may search without importing
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def execute(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)  # type: ignore[arg-type]
                plain(module)
                for op, formula in _formulas:
                    module.register_flop_formula(op)(formula)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _OnImport())  # type: ignore[arg-type]
