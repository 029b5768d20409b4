"""The private names of torch that kernels use, read in torch 2.11 and 2.13. No other file of `kernels/` has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # the tensors with which `torch.compile` and dry runs trace


def has_no_values(x: Tensor) -> bool:
    """Return whether `x` is a meta or a fake tensor: it has a shape, a dtype and a device, and no values to read."""
    return x.is_meta or isinstance(x, FakeTensor)


def is_tracing() -> bool:
    """Return whether operators run on fake tensors now, as in a dry run: then results of real tensors are fake too."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_on_gpu(x: Tensor) -> bool:
    """Return whether `x` is on a GPU, or a fake tensor that stands for one on a GPU (its mode's `stands_for_gpu`)."""
    return x.is_cuda or (isinstance(x, FakeTensor) and getattr(x.fake_mode, "stands_for_gpu", False))


def engine_will_execute(node: Any) -> bool:
    """Return whether the backward pass that runs now executes `node` of the graph and accumulates its gradient.

    Raises `RuntimeError` if no backward pass runs, or `torch.autograd.grad` wants the gradient as a result.
    """
    return torch._C._will_engine_execute_node(node)  # torch.autograd.graph calls it too


def backward_runs() -> bool:
    """Return whether this thread runs a part of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def graph_is_kept() -> bool:
    """Return whether another backward pass may follow the one that runs now (`retain_graph`)."""
    running = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return torch.compiler.is_compiling() or running._get_current_graph_task_keep_graph()


def mutated_arguments(op: Callable) -> list[int]:
    """Return the positions of the arguments that `op` mutates, as its schema declares them."""
    arguments = op._schema.arguments  # pyright: ignore[reportFunctionMemberAccess]
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
