"""The notebooks run as they stand, cell by cell, and check what they show by assertions of their own."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.ipynb")))
def test_a_notebook_runs(name, monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    plt.switch_backend("agg")
    book = json.loads((FOLDER / f"{name}.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert any("assert" in cell for cell in cells)
    assert not any(cell.get("outputs") for cell in book["cells"]), "outputs are not kept: clear them"
    held: dict = {"__name__": name}
    for i, cell in enumerate(cells):
        exec(compile(cell, f"{name}.ipynb, code cell {i}", "exec"), held)
    if "matplotlib" in "".join(cells):
        assert plt.get_fignums(), "it draws nothing"
    plt.close("all")


def test_the_page_lists_each_notebook():
    page = (FOLDER.parents[1] / "docs" / "notebooks.md").read_text()
    assert all(path.name in page for path in FOLDER.glob("*.ipynb"))
