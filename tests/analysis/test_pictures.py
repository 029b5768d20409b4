"""The pictures of memory and of nodes, by their bars, boxes and words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from mpcore.mesh.layout import mesh_ranks
from mpcore.tools.analysis.memory import parts_of, table
from mpcore.tools.analysis.pictures import MOST_NODES, crossing, draw_memory, draw_ranks
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


# --- ranks on nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "sizes", "crosses"),
    [
        (8, {"tp": 8, "dp": 2}, {"tp": False, "dp": True}),
        (8, {"tp": 2, "cp": 2, "dp": 2}, {"tp": False, "cp": False, "dp": False}),
        (4, {"tp": 2, "cp": 2, "dp": 2}, {"tp": False, "cp": False, "dp": True}),
        (3, {"tp": 2, "dp": 3}, {"tp": True, "dp": True}),  # ranks 2 and 3 are of two nodes
        (1, {"pp": 2}, {"pp": True}),
        (8, {}, {}),
        (2, {"ep": 2, "dp": 4}, {"ep": False, "dp": True}),
    ],
)
def test_an_axis_crosses_nodes_if_any_of_its_groups_does(node, sizes, crosses):
    assert crossing(node, **sizes) == crosses


def boxes(axes: Any) -> list[tuple[int, int, Any]]:
    """Row, column and colour of each box."""
    return [(round(p.get_y() + p.get_height() / 2), round(p.get_x() + p.get_width() / 2), p.get_edgecolor()[:3])
            for p in axes.patches]  # fmt: skip


@pytest.mark.parametrize(("node", "sizes"), [(4, {"tp": 2, "dp": 2, "pp": 2}), (3, {"tp": 2, "pp": 4}), (8, {"dp": 2}),
                                             (2, {"cp": 2, "ep": 2, "dp": 2})])  # fmt: skip
def test_each_rank_is_a_box_on_its_node_in_the_colour_of_its_stage(drawn, node, sizes):
    draw_ranks(node, "mine.svg", **sizes)
    ((figure, path),) = drawn
    (axes,) = figure.axes
    assert path == "mine.svg"
    groups = mesh_ranks(**sizes)
    world = len([rank for group in groups["tp"] for rank in group])
    place = {name: {rank: group.index(rank) for group in groups[name] for rank in group} for name in groups}
    stage = place["pp"]
    assert boxes(axes) == [
        (rank // node, rank % node, pytest.approx(to_rgb(COLOURS[stage[rank]]))) for rank in range(world)
    ]
    for patch in axes.patches:
        assert (patch.get_width(), patch.get_height()) == pytest.approx((0.96, 0.92))
    said = {(round(t.get_position()[0]), t.get_position()[1]): t.get_text().split("\n")
            for t in axes.texts if t.get_text().startswith("rank")}  # fmt: skip
    shown = [name for name in crossing(node, **sizes) if name != "pp"]
    assert said == {
        (rank % node, rank // node): [f"rank {rank}", *(f"{name} {place[name][rank]}" for name in shown)]
        for rank in range(world)
    }
    starts = [rank for rank in range(world) if rank % node == 0 or stage[rank] != stage[rank - 1]]
    stages = [t for t in axes.texts if t.get_text().startswith("stage")]
    assert [t.get_text() for t in stages] == ([f"stage {stage[r]}" for r in starts] if sizes.get("pp", 1) > 1 else [])
    for text, rank in zip(stages, starts, strict=False):
        assert text.get_position() == pytest.approx((rank % node - 0.46, rank // node - 0.42))
    nodes = -(-world // node)
    assert axes.get_xlim() == (-0.5, min(node, world) - 0.5)
    assert axes.get_ylim() == (nodes - 0.5, -0.5)
    assert [t.get_text() for t in axes.get_yticklabels()] == [f"node {i}" for i in range(nodes)]
    assert list(axes.get_xticks()) == []
    assert not any(spine.get_visible() for spine in axes.spines.values())
    height = 0.35 + 0.15 * (sizes.get("pp", 1) > 1) + 0.16 * len(shown)
    assert figure.get_size_inches().tolist() == pytest.approx(
        [1 + 0.55 * max(min(node, world), 6), 1.3 + height * nodes]
    )
    title, flags = axes.get_title(loc="left").split("\n")
    assert flags == " ".join(f"--{name} {sizes[name]}" for name in sizes)
    for name, crossed in crossing(node, **sizes).items():
        inside, _, outside = title.partition("inside a node") if "inside" in title else ("", "", title)
        assert name in (outside if crossed else inside)


def test_a_single_rank_and_many_nodes(drawn):
    draw_ranks(8, "x.png")
    draw_ranks(2, "x.png", tp=2, dp=MOST_NODES)
    draw_ranks(2, "x.png", tp=2, dp=MOST_NODES + 1, cp_inner=None)
    draw_ranks(2, "x.png", tp=2, cp=4, dp=1, cp_inner=2)
    one, full, more, inner = (figure.axes[0] for figure, _ in drawn)
    assert one.get_title(loc="left").split("\n")[0] == "one rank"
    assert len(full.patches) == len(more.patches) == 2 * MOST_NODES
    assert ";" not in full.get_title(loc="left")
    assert f"{MOST_NODES} of {MOST_NODES + 1}" in more.get_title(loc="left")
    assert len(inner.patches) == 8


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
