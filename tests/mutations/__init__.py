"""Ways to break mpcore, by what they break. `python -m tests.mutations` tries them: see `__main__`."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """What breaks: the pitfall or the promise, the file, its text before and after, and the tests that must notice."""

    what: str
    file: str
    old: str
    new: str
    tests: str
