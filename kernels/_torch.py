"""The private names of torch that kernels use, read in torch 2.11 and 2.13. No other file of `kernels/` has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # the tensors with which `torch.compile` and dry runs trace

_aten = torch.ops.aten


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


def sdpa_backend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> str | None:
    """Return which kernel `scaled_dot_product_attention` runs for `[B, H, T, K]`; None: it returns no log-sum-exp."""
    chosen = torch._fused_sdp_choice(query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1])
    if not query.is_cuda:
        return "cpu" if chosen == 1 else None  # of torch.nn.attention.SDPBackend
    return {1: "flash", 3: "cudnn"}.get(chosen) if query.shape[3] % 8 == 0 else None


def sdpa_forward(backend: str, *given: Any) -> tuple[Tensor, Tensor]:
    """Return the output `[B, H, T, Kv]` and the log-sum-exp `[B, H, T]` of query, key, value, causal and scale."""
    *heads, causal, scale = given
    if backend == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal, scale=scale)
    if backend == "flash":
        return _aten._scaled_dot_product_flash_attention(*heads, 0.0, causal, scale=scale)[:2]
    output, lse, *_ = _aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, causal, scale=scale)
    return output, lse.squeeze(-1)


def sdpa_backward(backend: str, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of grad, query, key, value, output, log-sum-exp, causal and scale."""
    *heads, lse, causal, scale = given
    if backend == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, lse, 0.0, causal, scale=scale)
    seed, ends = lse.new_zeros(2, dtype=torch.int64), (None, None, heads[1].shape[2], heads[2].shape[2])
    if backend == "flash":
        more = lse, *ends, 0.0, causal, seed, seed
        return _aten._scaled_dot_product_flash_attention_backward(*heads, *more, scale=scale)
    more = lse.unsqueeze(-1), seed[0], seed[1], None, *ends, 0.0, causal
    return _aten._scaled_dot_product_cudnn_attention_backward(*heads, *more, scale=scale)
