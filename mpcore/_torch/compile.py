"""Run with torch.compile and without. Checked with torch 2.11 and 2.13: no difference.

`torch._dynamo` is imported only when it is needed: the import takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Decorate a function so that it and the functions that it calls run uncompiled, between compiled graphs.

    It is like `torch.compiler.disable`, but it imports the compiler when the function is called, not when it is
    decorated.
    """
    return torch._disable_dynamo(function)  # type: ignore[return-value]


def eagerly() -> AbstractContextManager[object]:
    return nullcontext() if "torch._dynamo" not in sys.modules else torch.compiler.set_stance("force_eager")


def stance() -> object:
    """Return the compiler's stance of this process. None: the default stance."""
    return torch._dynamo.eval_frame._stance if "torch._dynamo" in sys.modules else None


def set_stance(value: object) -> None:
    """Restore what `stance` returned. This works inside a compiled function too, where torch's own context raises."""
    if "torch._dynamo" in sys.modules:
        frames = torch._dynamo.eval_frame
        frames._stance = value or frames.DynamoStance()


def allow_graphs(blocks: int) -> None:
    """Let each of `blocks` blocks have its own compiled graphs.

    Blocks that differ only in an integer attribute, such as the dropout key, share one graph.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * blocks)
    config.allow_unspec_int_on_nn_module = True
