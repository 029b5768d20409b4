"""`python -m tests.storeys` prints the lines of each storey: code, docstrings and comments, blank lines.

`make check` runs it. It fails if a storey has more lines than its limit.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LIMITS = {
    "core": 26_259,
    "interop": 8_277,
    "experimental": 2_537,
    "tools": 14_781,
    "examples": 5_083,
    "bench": 3_866,
    "tests": 49_062,
}
"""The most lines that a storey may have. A change that needs more says why; a change that removes lines lowers it."""


def storey(name: str) -> str:
    """Return the storey of a module of the library, by its import name."""
    for each in ("interop", "experimental", "tools"):
        if name.startswith(f"mpcore.{each}"):
            return each
    return "tools" if name in ("mpcore.__main__", "mpcore.verify") else "core"


def files() -> dict[str, list[Path]]:
    """Return the Python files of each storey."""
    found: dict[str, list[Path]] = {name: [] for name in LIMITS}
    for package in ("mpcore", "kernels", "examples", "bench", "tests"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] == ("mpcore", "kernels"):  # a link to kernels/
                continue
            found[storey(".".join(parts)) if package in ("mpcore", "kernels") else package].append(path)
    return found


def count(text: str) -> tuple[int, int, int]:
    """Return how many lines of a source file are code, docstrings and comments, and blank."""
    strings = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                strings |= {*range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            code |= {*range(token.start[0], token.end[0] + 1)}
    lines = text.splitlines()
    code -= strings
    blank = sum(not line.strip() for line in lines)
    return len(code), len(lines) - len(code) - blank, blank


def total(paths: Iterable[Path]) -> tuple[int, int, int]:
    """Return the sums of `count` over files."""
    counts = [count(path.read_text()) for path in paths]
    code, text, blank = map(sum, zip(*counts, strict=True))
    return code, text, blank


def main() -> int:
    """Print the table. Return 1 if a storey has more lines than its limit."""
    full = []
    print(f"{'storey':<12}{'lines':>8}{'limit':>8}{'code':>8}{'text':>8}{'blank':>8}")
    for name, paths in files().items():
        counts = total(paths)
        print(f"{name:<12}{sum(counts):>8,}{LIMITS[name]:>8,}" + "".join(f"{n:>8,}" for n in counts))
        full += [name] if sum(counts) > LIMITS[name] else []
    if full:
        print(f"{' and '.join(full)} passed the limit of lines in tests/storeys.py: what can go?")
    return bool(full)


if __name__ == "__main__":
    sys.exit(main())
