"""The session-wide pool of gloo ranks, `mpcore.verify.pool`, with memory that shows what nobody wrote.

`ranks(n, check, *args)` calls `check(*args)` in n processes that form a world of their own, and returns the n results.
`check` must be importable: a function at the top level of a test module.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from mpcore.verify.pool import Pool, RankError, mesh

__all__ = ["BEFORE_2_13", "Pool", "RankError", "mesh", "start_pool", "strict_memory"]

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # docs/decisions.md says what differs


def strict_memory() -> None:
    """Have `torch.empty` return NaN, so that an output nobody wrote fails, and refuse nondeterministic operations."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def start_pool(most: int = 4) -> Pool:
    """A pool whose ranks import once, not each and after each crash, what half of the tests need: 1.5 s of it."""
    return Pool(most, _prepare, preload=("mpcore.checkpoint", "mpcore.pipeline", "examples.gpt.pretrain"))


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
