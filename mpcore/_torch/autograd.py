"""The running backward, gradient hooks, and dispatch below autograd.

Checked with torch 2.11 and 2.13: no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.utils.hooks import RemovableHandle

below_autograd: Callable[[], AbstractContextManager[None]] = torch._C._AutoDispatchBelowAutograd
"""Run operators in this context without autograd, also without the autograd that torch wrote for them in Python."""


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def will_run(node: Node | None) -> bool:
    """Return whether the running backward will call a node, so that its gradient is needed.

    A leaf has no such node, and the answer is True: its gradient is needed whenever the backward reaches it.
    """
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[arg-type]
    except RuntimeError:  # torch raises this for a leaf
        return True


def graph_is_kept() -> bool:
    """Return whether the running backward keeps its graph (`retain_graph=True`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the innermost active pair (pack, unpack) of `saved_tensors_hooks`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def has_gradient_hooks(x: Tensor) -> bool:
    """Return whether `register_hook` was called on a tensor."""
    return bool(x._backward_hooks)


def has_accumulation_hooks(x: Tensor) -> bool:
    """Return whether `register_post_accumulate_grad_hook` was called on a tensor."""
    return bool(x._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def has_last_accumulation_hook(x: Tensor, handle: RemovableHandle) -> bool:
    """Return whether `handle` is the last hook of `register_post_accumulate_grad_hook` to run on a tensor."""
    return next(reversed(x._post_accumulate_grad_hooks or {}), None) == handle.id  # type: ignore[attr-defined]


def keeps_version(x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which writing to a tensor doesn't change its version, so that autograd doesn't notice."""
    return torch.autograd._unsafe_preserve_version_counter(x)


def run_backward(edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """Run `torch.autograd.backward(edges, grads)` without its shape checks, which take a tenth of a small step."""
    keep_graph = create_graph = False
    _engine_run_backward(tuple(edges), tuple(grads), keep_graph, create_graph, accumulate_grad=True)


def running_node() -> Node | None:
    """Return the node whose backward is running in this thread, or None outside of a backward."""
    return torch._C._current_autograd_node()  # type: ignore[attr-defined]


def is_view(x: Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another one."""
    return x._is_view()
