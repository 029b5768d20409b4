"""Intercept each operator that runs. Checked with torch 2.11 and 2.13: no difference.

`TorchDispatchMode` is a context whose `__torch_dispatch__(func, types, args, kwargs)` is called instead of each
operator. `OpOverload` is the type of `func`. `collective_ops` has torch's functional collectives. `unsafe_view` returns
a view that autograd treats as a new tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Float64", "OpOverload", "TorchDispatchMode", "collective_ops", "overload_name", "unsafe_view", "wrapper",
    "written_arguments",
]  # fmt: skip
collective_ops = torch.ops._c10d_functional
unsafe_view = torch.ops.aten._unsafe_view.default


class Float64(TorchDispatchMode):
    """A context that computes in float64 where the code asks for float32.

    Attributes:
        casts: the number of float64 tensors that would have been cast to float32.
    """

    casts = 0

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            self.casts += func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def written_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call that the operator writes to."""
    schema = operator._schema
    if not schema.is_mutable:
        return []
    given = [*zip(schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
    return [x for argument, x in given if argument.alias_info is not None and argument.alias_info.is_write]


def overload_name(operator: OpOverload) -> str:
    """Return the overload's name, such as "out". "": the default overload."""
    return operator._schema.overload_name


def wrapper(kind: type[torch.Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a tensor of a subclass that has no memory of its own: its `__torch_dispatch__` runs each operator."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)
