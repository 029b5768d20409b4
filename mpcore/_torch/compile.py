"""Run without torch.compile. Read in torch 2.11 and 2.13, which agree.

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
