"""The pages of docs run as they stand: in one process, and on a mesh with the same losses."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.quick import some

DOCS = Path(__file__).parent.parent / "docs"


def run_page(name: str, **sizes: int) -> dict:
    """Run all python blocks of a page, one after the other, and return what they leave."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL))
    assert ("TP = PP = 1" in code) == (name == "training.md")
    assert ("CP = 1\n" in code) == (name == "context_parallel.md")
    code = code.replace("TP = PP = 1", f"TP, PP = {sizes.get('tp', 1)}, {sizes.get('pp', 1)}")
    code = code.replace("CP = 1\n", f"CP = {sizes.get('cp', 1)}\n")
    held: dict = {"__name__": "docs"}
    exec(compile(code, name, "exec"), held)
    return held


def losses(folder: str, **sizes: int) -> list[float]:
    with mock.patch.object(tempfile, "tempdir", folder):  # where the page saves
        return run_page("training.md", **sizes)["piped"]


@pytest.mark.parametrize(("size", "sizes"), some((4, {"tp": 2, "pp": 2}), (2, {}), of=[(2, {"tp": 2})]), ids=str)
def test_the_page_on_training_has_the_same_losses_on_a_mesh(ranks, tmp_path, size, sizes):
    (alone,) = ranks(1, losses, str(tmp_path))
    assert alone[-1] < alone[0]
    for found in ranks(size, losses, str(tmp_path), **sizes):
        assert found == pytest.approx(alone, rel=1e-5)


def context_losses(cp: int) -> list[float]:
    return run_page("context_parallel.md", cp=cp)["losses"]


def test_the_page_on_context_parallelism_has_the_same_losses_on_a_mesh(ranks):
    (alone,) = ranks(1, context_losses, 1)
    assert alone[-1] < alone[0] / 2
    for size, cp in ((2, 2), (4, 2), (4, 4)):
        for found in ranks(size, context_losses, cp):
            assert found == pytest.approx(alone, rel=1e-5)


def test_the_page_on_plans_runs():
    run_page("parallelize.md")


def merged() -> tuple[int, bool, dict]:
    held = run_page("local_updates.md")
    return held["run"].step, held["result"].merge is not None, held["run"].model.state_dict()


def test_the_page_on_local_updates_ends_with_workers_that_agree(ranks):
    (*one, first), (*two, second) = ranks(2, merged)
    assert one == two == [10, True]
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0)


def test_every_file_that_a_page_names_exists():
    root = DOCS.parent
    for page in set(DOCS.glob("*.md")) - {DOCS / "decisions.md"}:  # which is history
        for path in re.findall(r"`((?:mpcore|examples|tests|bench|kernels)/[\w/]+\.\w+)`", page.read_text()):
            assert (root / path).exists(), f"{page.name} names {path}"
