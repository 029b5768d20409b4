"""The bytes that memory-bound kernels move, counted from their launches, over the floor of their operators."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
from fake_gpu import fake_gpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MULTIPROCESSORS = 132  # an H100's
COUNTING = ("_norm", "rope")
# Bound by products, or by latency: rows of experts are found from a megabyte of ids, which stays in the cache.
UNBOUND = ("attention", "moe_rows")


def moved(case: Callable[[], None]) -> dict[str, float]:
    """Return the bytes over the floor of the operators of a case, by kernel; nothing is compiled."""
    operators: list[tuple[str, int, list[tuple[str, int]]]] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ours = op.namespace == "mpcore"
            if ours:
                operators.append((op._schema.name.removeprefix("mpcore::"), _floor(op, args), []))
            outs = op(*args, **kwargs or {})
            if ours:
                name, floor, launches = operators[-1]
                operators[-1] = name, floor + _bytes(outs), launches
            return outs

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        if operators:
            arguments = dict(zip(kernel.arg_names, args, strict=True))
            operators[-1][2].append((kernel.__name__.strip("_"), _moved(arguments)))

    with contextlib.ExitStack() as stack:
        filled = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing touches these gigabytes
        stack.callback(torch.utils.deterministic.__setattr__, "fill_uninitialized_memory", filled)
        for name in COUNTING:
            module = importlib.import_module(f"mpcore.kernels.{name}")
            stack.enter_context(mock.patch.object(module, "multiprocessors", return_value=MULTIPROCESSORS))
        stack.enter_context(fake_gpu(record=False))
        stack.enter_context(mock.patch.object(triton.JITFunction, "run", run))
        stack.enter_context(Operators())
        case()
    found: dict[str, float] = {}
    for name, floor, launches in operators:
        ratio = round(sum(size for _, size in launches) / max(floor, 1), 3)
        for kernel, _ in launches if not name.startswith(UNBOUND) else ():
            found[kernel] = max(found.get(kernel, 0), ratio)
    return found


def _bytes(given: Any) -> int:
    """The bytes of all tensors in the arguments or the results of an operator."""
    if isinstance(given, Tensor):
        return given.numel() * given.element_size()
    return sum(map(_bytes, given)) if isinstance(given, (list, tuple)) else 0


def _floor(op: Any, args: tuple[Any, ...]) -> int:
    """The bytes of an operator's inputs, twice of those that it changes."""
    changed = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    return sum(_bytes(given) * (1 + twice) for given, twice in zip(args, changed, strict=False))


def _moved(arguments: dict[str, Any]) -> int:
    """The bytes of the tensors of a launch."""
    if "table_ptr" in arguments:  # of AdamW, whose pointers give types alone: all but the gradients are changed
        roles = {"param": 2, "grad": 1, "exp_avg": 2, "exp_avg_sq": 2, "master": 2}
        examples = [(arguments[f"{role}_ptr"], times) for role, times in roles.items()]
        width = sum(x.element_size() * times for x, times in examples if x is not None)
        moved = _bytes([arguments["tiles_ptr"], arguments["table_ptr"]])
        for *_, n, columns, _, _ in arguments["table_ptr"].tolist():
            moved += n * width + 32 + (8 * (n // columns + columns) if arguments["rows_ptr"] is not None else 0)
        return moved
    counted = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    if counted.keys() == {"out_ptr", "filled_ptr"}:  # writes the rows that the launch before it didn't
        del counted["out_ptr"]
    return _bytes(list(counted.values()))
