"""The notebooks run cell by cell, and hold the outputs that they have: `python -m tests.test_notebooks` writes them."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
BOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def run(name: str) -> dict[str, Any]:
    """Return a notebook with the outputs of its cells: what they print, and the figures that they leave open."""
    plt.switch_backend("agg")
    book, held = json.loads((FOLDER / f"{name}.ipynb").read_text()), {"__name__": name}
    for i, cell in enumerate(each for each in book["cells"] if each["cell_type"] == "code"):
        where, said, code = f"{name}.ipynb, code cell {i}", io.StringIO(), ast.parse("".join(cell["source"]))
        last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(said):
            exec(compile(code, where, "exec"), held)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), where, "eval"), held)
                assert value is None, f"{where}: Jupyter would show {value}, a figure for the second time"
        text = said.getvalue().splitlines(keepends=True)
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
        for number in plt.get_fignums():
            png = io.BytesIO()
            plt.figure(number).savefig(png, dpi=60, metadata={"Software": None})
            data = {"image/png": base64.b64encode(png.getvalue()).decode()}
            cell["outputs"].append({"output_type": "display_data", "metadata": {}, "data": data})
        plt.close("all")
    return book


def outputs(book: dict[str, Any]) -> list[list[str]]:
    """Return what each cell shows: its text, and the word `picture` for each picture."""
    return [
        [re.sub(r"\d\.\de-1\d", "rounding", "".join(each.get("text", "picture"))) for each in cell.get("outputs", ())]
        for cell in book["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_has_the_outputs_of_its_cells(name):
    book = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert any("assert" in "".join(cell["source"]) for cell in book["cells"])
    assert outputs(run(name)) == outputs(book), "run: python -m tests.test_notebooks"


if __name__ == "__main__":
    for name in BOOKS:
        (FOLDER / f"{name}.ipynb").write_text(json.dumps(run(name), indent=1, ensure_ascii=False) + "\n")
