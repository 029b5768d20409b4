"""The pictures of memory and of nodes, by their bars, boxes and words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from mpcore.tools.analysis.memory import parts_of, table
from mpcore.tools.analysis.pictures import draw_memory
from mpcore.tools.analysis.report import COLOURS
from mpcore.tools.analysis.work import DryRunCounts, MicroBatchMemory, StepMemory

GIB = 2**30


@pytest.fixture
def drawn(monkeypatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **__: found.append((figure, path)))
    return found


def holds(parameters: int, gradients: int, optimizer: int, activations: int, working: int) -> DryRunCounts:
    held = StepMemory(parameters * GIB, 0, gradients * GIB, optimizer * GIB)
    peak = (activations + 7) * GIB  # 7 gathered
    return DryRunCounts(held, [MicroBatchMemory(gathered=7 * GIB)], peak=peak, work_peak=peak + working * GIB)


def test_each_rank_is_a_bar_of_its_parts_one_on_the_other(drawn):
    ranks = [holds(1, 2, 3, 4, 5), holds(2, 2, 9, 1, 4), holds(1, 1, 1, 1, 1)]
    draw_memory(ranks, "mine.png")
    ((figure, path),) = drawn
    (axes,) = figure.axes
    assert path == "mine.png"
    parts = {c.get_label(): c for c in axes.containers}
    assert list(parts) == ["parameters", "gradients", "optimizer", "activations", "gathered", "working set"]
    text = {line[:12].strip(): float(line.split()[-2]) for line in table(ranks[0]).splitlines()[:-2]}
    assert {name: bars[0].get_height() for name, bars in parts.items()} == {k: v for k, v in text.items() if v}
    for place, rank in enumerate(ranks):
        below = 0.0
        for name, bars in parts.items():
            bar, size = bars[place], parts_of(rank)[name] / GIB
            assert (bar.get_height(), bar.get_y()) == (size, below)
            assert bar.get_x() + bar.get_width() / 2 == pytest.approx(place)
            assert bar.get_width() == pytest.approx(0.8)
            below += size
    kinds = list(parts_of(ranks[0]))
    for name, bars in parts.items():
        assert bars[0].get_facecolor()[:3] == pytest.approx(to_rgb(COLOURS[kinds.index(name)]))
    (marks,) = axes.collections
    assert [tuple(xy) for xy in marks.get_offsets().tolist()] == [(0, 22), (1, 25), (2, 12)]
    assert axes.get_title(loc="left").split("\n") == [
        "pipeline rank 1 holds most, 25.0 GiB;",
        "largest part: optimizer, 36%",
    ]
    assert axes.get_ylabel().startswith("GiB")
    assert list(axes.get_xticks()) == [0, 1, 2]
    assert not axes.spines["top"].get_visible()
    assert axes.spines["left"].get_visible()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*reversed(parts), "most at once"], "as the bars lie"


@pytest.mark.parametrize("count", [1, 6, 20])
def test_the_picture_of_memory_is_narrow_and_names_the_first_of_equals(drawn, count):
    draw_memory([holds(1, 1, 1, 1, 1)] * count, "x.png")
    figure = drawn[0][0]
    assert figure.get_size_inches().tolist() == [5, 4]
    assert figure.axes[0].get_title(loc="left").startswith("pipeline rank 0 ")


def title_of(axes: Any) -> Any:
    """The text artist of a picture's title."""
    (found,) = axes.findobj(lambda artist: isinstance(artist, Text) and artist.get_text() == axes.get_title(loc="left"))
    return found


def test_bars_have_white_edges_and_the_most_at_once_is_a_dash_above_them(drawn):
    draw_memory([holds(1, 2, 3, 4, 5)] * 2, "x.png")
    figure = drawn[0][0]
    (axes,) = figure.axes
    for bar in axes.patches:
        assert bar.get_edgecolor()[:3] == (1, 1, 1)
        assert bar.get_linewidth() == 0.5
    (marks,) = axes.collections
    assert (marks.get_sizes().tolist(), marks.get_zorder()) == ([pytest.approx(564, abs=1)], 3)
    assert marks.get_edgecolor()[0].tolist()[:3] == [0, 0, 0]
    dash = marks.get_paths()[0].vertices
    assert np.ptp(dash[:, 1]) < 1e-9 < np.ptp(dash[:, 0])
    assert title_of(axes).get_fontsize() == 10
    (legend,) = figure.legends
    assert not legend.get_frame_on()
    assert {text.get_fontsize() for text in legend.get_texts()} == {9}
    figure.draw_without_rendering()
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1, "beside the bars"
    assert figure.get_layout_engine() is not None
    assert axes.get_xlabel()
