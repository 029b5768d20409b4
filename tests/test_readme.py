"""README and docs are held to their word: the example runs for every tp, and what they name and link is there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run_example(tp: int) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert code.count("tp=1") == 1, "one argument makes it tensor parallel"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("tp=1", f"tp={tp}", 1), {"__name__": "readme"})
    return printed.getvalue()


def check_example(tp: int) -> float:
    value = re.match(r"tensor\((-?\d+\.\d+)", run_example(tp))
    assert value
    return float(value[1])


def test_the_drop_in_example_gives_one_number_for_every_tp(ranks):
    (alone,) = ranks(1, check_example, 1)
    for size in (2, 3):
        for value in ranks(size, check_example, size):
            assert abs(value - alone) < 1e-3 * abs(alone)


def test_every_test_that_is_named_exists():
    proofs = (ROOT / "docs" / "proofs.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", proofs)
    assert len(named) > 10
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_file_that_is_linked_exists():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"```.*?```|`[^`\n]+`(?!\])", "", page.read_text(), flags=re.DOTALL)  # in code, f[i](x) is a call
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
