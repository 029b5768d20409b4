"""A word on each drawn mutation that survived, by its definition and its line before and after."""

from __future__ import annotations

# Changes that nobody can see: they are not counted.
EQUIVALENT: dict[tuple[str, str, str], str] = {}

# Changes that a test could see, and none does.
NOTES: dict[tuple[str, str, str], str] = {}
