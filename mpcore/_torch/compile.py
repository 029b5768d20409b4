"""Run with torch.compile and without. Read in torch 2.11 and 2.13, which agree.

Nothing here imports `torch._dynamo` before it is needed: that takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

_F = TypeVar("_F", bound=Callable)


def uncompiled(function: _F) -> _F:
    """Have a function, and what it calls, run between compiled graphs.

    As `torch.compiler.disable`, which imports the compiler when it decorates; this does when the function is called.
    """
    return torch._disable_dynamo(function)  # type: ignore[return-value]


def eagerly() -> AbstractContextManager[object]:
    """Run compiled functions in this context as they were written."""
    nothing_compiled = "torch._dynamo" not in sys.modules
    return nullcontext() if nothing_compiled else torch.compiler.set_stance("force_eager")


def stance() -> object:
    """Return what this process does with compiled functions now; None: what it does by default."""
    return torch._dynamo.eval_frame._stance if "torch._dynamo" in sys.modules else None


def set_stance(value: object) -> None:
    """Put back what `stance` returned, also inside a compiled function, where torch's own context refuses."""
    if "torch._dynamo" in sys.modules:
        frames = torch._dynamo.eval_frame
        frames._stance = value or frames.DynamoStance()


def allow_graphs(blocks: int) -> None:
    """Let so many blocks have graphs of their own, and share those that differ in a number alone, as dropout's key."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * blocks)
    config.allow_unspec_int_on_nn_module = True
