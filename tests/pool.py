"""The session-wide pool of gloo ranks, `mpcore.tools.verify.pool`, with memory that shows what nobody wrote.

`ranks(n, check, *args)` calls `check(*args)` in n processes that form a world of their own, and returns the n results.
`check` must be importable: a function at the top level of a test module.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch

from mpcore.tools.simulation import simulate
from mpcore.tools.verify.pool import Pool, RankError, mesh

__all__ = [
    "BEFORE_2_13", "CRASHES", "Pool", "RankError", "RepeatingPool", "mesh", "on_ranks", "start_pool", "strict_memory",
]  # fmt: skip

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # docs/decisions.md says what differs


CRASHES: list[str] = []  # calls that were repeated, each with its signal and its test


class RepeatingPool(Pool):
    """A pool that repeats a call once after a crash in native code, which the suite's last lines then tell of.

    Once in some hundred runs of the suite the heap of gloo's thread was corrupt; docs/decisions.md says what was tried.
    """

    def __call__(self, size: int, check: Callable, *args: Any, **kwargs: Any) -> list:
        """As of `Pool`."""
        try:
            return super().__call__(size, check, *args, **kwargs)
        except RankError as error:
            crash = re.search(r"died \((SIGABRT|SIGBUS|SIGSEGV)\)", str(error))
            if crash is None:
                raise
            CRASHES.append(f"{crash[1]} in {os.environ.get('PYTEST_CURRENT_TEST', check)}")
            return super().__call__(size, check, *args, **kwargs)


def strict_memory() -> None:
    """Have `torch.empty` return NaN, so that an output nobody wrote fails, and refuse nondeterministic operations."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


# What half of the tests need in a rank, and what takes a rank long to import.
PRELOAD = (
    "mpcore.checkpoint", "mpcore.pipeline", "examples.gpt.pretrain", "examples.gpt.generate", "tests.pool", "pytest",
    "hypothesis", "matplotlib.pyplot", "torch._inductor.pattern_matcher", "transformers.models.llama.modeling_llama",
)  # fmt: skip


def start_pool(most: int = 4) -> Pool:
    """A pool whose ranks are forked from a process that has imported `PRELOAD`: once, not in each and after a crash."""
    return RepeatingPool(most, _prepare, PRELOAD, grace=1.5)


def _prepare() -> None:
    """In a rank, have a run of the example write a short text, and look for its code and its corpus only once."""
    from examples.gpt import generate, setup

    strict_memory()
    find, corpora = setup.default_corpus, {}

    def corpus(tokenizer: setup.Tokenizer) -> str:
        if tokenizer.fingerprint not in corpora:
            corpora[tokenizer.fingerprint] = find(tokenizer=tokenizer)
        return corpora[tokenizer.fingerprint]

    setup.default_corpus, setup.code_versions = corpus, cache(setup.code_versions)
    generate.generate = partial(generate.generate, new_tokens=4)


class Simulated:
    """In place of a pool: the ranks are threads of this process."""

    def __call__(self, size: int, check: Callable, *args: Any, timeout: float = 120.0, **kwargs: Any) -> list:
        """As of `Pool`."""

        def seeded() -> Any:
            torch.manual_seed(0)
            return check(*args, **kwargs)

        try:
            return simulate(seeded, ranks=size)
        except RuntimeError as error:
            raise RankError(str(error)) from error


def on_ranks(*sizes: int, timeout: float = 120.0) -> Callable[[Callable], Callable]:
    """Make a test of a function that each rank runs: once for each of `sizes`, the numbers of ranks.

    The function's parameters without a default are the test's. Put this decorator next to the function.
    """

    def decorate(check: Callable) -> Callable:
        own = [p for p in inspect.signature(check).parameters.values() if p.default is p.empty]

        def test(ranks: Pool, size: int, **options: Any) -> None:
            values = (options[p.name] for p in own)
            ranks(size, _in_rank, check.__module__, check.__name__, *values, timeout=timeout)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        leading = [inspect.Parameter(name, kind) for name in ("ranks", "size")]
        vars(test).update(__signature__=inspect.Signature([*leading, *own]), check=check)
        return pytest.mark.parametrize("size", sizes)(test)

    return decorate


def _in_rank(module: str, name: str, *values: Any) -> Any:
    return getattr(import_module(module), name).check(*values)
