"""Draw the pictures of the guides: `python -m docs.drawings` writes docs/*.svg; tests/test_docs.py compares them.

Colours are Okabe and Ito's, which people with any colour vision tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import build_schedule

DOCS = Path(__file__).parent
BLUE, ORANGE, GREEN, SKY, RED, PINK = "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7"
INK, GREY, PALE = "#222222", "#767676", "#eef3fa"
PICTURES: dict[str, Callable[[], str]] = {}


def picture(draw: Callable[[], str]) -> Callable[[], str]:
    """Name a picture by its function: `choose` draws docs/choose.svg."""
    PICTURES[f"{draw.__name__}.svg"] = draw
    return draw


class Svg:
    """A picture 760 wide; its title says what is found."""

    def __init__(self, height: float, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height:g}" font-family="sans-serif" '
            'font-size="14">',
            f"<title>{escape(title)}</title>",
            f'<rect width="760" height="{height:g}" fill="white"/>',
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>',
        ]
        self.text(12, 24, title, size=16, weight="bold")

    def text(
        self, x: float, y: float, text: str, *, at: str = "start", size: int = 14, fill: str = INK, weight: str = ""
    ) -> None:
        """Write at a baseline; `at`: start, middle or end."""
        more = (f' text-anchor="{at}"' if at != "start" else "") + (f' font-size="{size}"' if size != 14 else "")
        more += f' font-weight="{weight}"' if weight else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" fill="{fill}"{more}>{escape(text)}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = PALE,
        *lines: str,
        line: str = "",
        ink: str = INK,
    ) -> None:
        """Draw a rectangle with lines of text in its middle."""
        stroke = f' stroke="{line}"' if line else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{stroke}/>')
        for i, text in enumerate(lines):
            middle = y + height / 2 + 5 + 18 * (i - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, text, at="middle", fill=ink)

    def arrow(self, x: float, y: float, x2: float, y2: float, text: str = "") -> None:
        """Draw an arrow, with a text above its middle."""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )
        if text:
            self.text((x + x2) / 2, (y + y2) / 2 - 6, text, at="middle", size=12)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Write what colours mean, in a row."""
        for fill, text in entries:
            self.box(x, y - 11, 14, 14, fill)
            self.text(x + 20, y, text, size=12)
            x += 36 + 6.6 * len(text)

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of a page's table that begins with this head."""
    text = (DOCS / page).read_text()
    table = text[text.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    return [[re.sub(r"[`*]", "", cell).strip() for cell in line.strip("|").split("|")] for line in table]


@picture
def one_loss() -> str:
    text = (DOCS.parent / "README.md").read_text()
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    runs = [(eval(sizes), [float(x) for x in losses.split()]) for sizes, losses in re.findall("({.*}) (.+)", printed)]
    svg = Svg(330, f"One model, {len(runs)} layouts, one loss")
    svg.text(12, 52, "the part of a weight that each rank stores", size=13)
    svg.text(400, 52, "loss by step, a ring for each layout", size=13)
    across, most = 400.0, max(max(losses) for _, losses in runs)
    for level in (0.5, 1.0, 1.5):
        y = 290 - 140 * level
        svg.parts.append(f'<path d="M{across} {y:g}H740" stroke="#dddddd"/>')
        svg.text(across - 6, y + 5, f"{level:g}", at="end", size=12)
    assert most < 1.6
    for i, ((sizes, losses), ink) in enumerate(zip(runs, (BLUE, ORANGE, GREEN, RED, PINK), strict=True)):
        tp, dp, radius, top = sizes.get("tp", 1), sizes.get("dp", 1), 4 + 2.5 * i, 64 + 52 * i
        name = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one process"
        ring = f'r="{radius:g}" fill="none" stroke="{ink}" stroke-width="1.6"'
        svg.parts.append(f'<circle cx="26" cy="{top + 20}" {ring}/>')
        svg.text(50, top + 25, name)
        for rank in range(tp * dp):
            x = 150 + 52 * rank
            svg.box(x, top, 40, 40, PALE, line=GREY)
            svg.box(x + 40 / tp * (rank % tp), top + 40 / dp * (rank // tp), 40 / tp, 40 / dp, ink)
        for step, loss in enumerate(losses):
            svg.parts.append(f'<circle cx="{across + 30 + 70 * step}" cy="{290 - 140 * loss:.1f}" {ring}/>')
    for step in range(len(runs[0][1])):
        svg.text(across + 30 + 70 * step, 312, str(step), at="middle", size=12)
    return str(svg)


@picture
def choose() -> str:
    svg = Svg(660, "Take the first answer that fits; add one axis at a time")
    questions = [
        ("Does the model fit if the GPUs shard", "the optimizer state?", "ZeRO-1", "Zero(1), the default"),
        ("Does it fit if they shard", "the gradients, too?", "ZeRO-2", "Zero(2)"),
        ("Does it fit with ZeRO-3, selective", "recomputation, or tp=2?", "the fastest of them", "see mpcore plan"),
        ("Does it fit if the GPUs of a node", "shard each layer?", "+ tensor, sequence parallel", "build_mesh(tp=8)"),
        ("Does it fit if nodes hold", "different blocks?", "+ pipeline", "build_mesh(tp=8, pp=4)"),
        ("Are the samples too long,", "32,000 tokens and more?", "+ context parallel", "build_mesh(tp=8, cp=4)"),
        ("Does the model have experts?", "", "+ expert parallel", "build_mesh(ep=8)"),
    ]  # fmt: skip
    for i, (*question, answer, code) in enumerate(questions):
        y = 48 + 84 * i + 30 * (i > 4)
        svg.box(12, y, 330, 60, PALE, *filter(None, question), line=BLUE)
        svg.box(436, y, 312, 60, "#fdf3dc", answer, code, line=ORANGE)
        svg.arrow(342, y + 30, 434, y + 30, "yes")
        if i < 4:
            svg.arrow(177, y + 60, 177, y + 83)
            svg.text(187, y + 76, "no", size=12)
    svg.text(12, 488, "In addition to each of these:", weight="bold")
    return str(svg)


@picture
def choose_memory() -> str:
    found = rows("choose.md", "layout of 64 ranks")
    svg = Svg(110 + 46 * len(found), "A 65B model fits on 80 GB with ZeRO-3, or with tensor parallelism and ZeRO-1")
    kinds = ((BLUE, "parameters"), (ORANGE, "gradients"), (GREEN, "optimizer"), (PINK, "activations and gathered"))
    svg.legend(190, 54, kinds)
    scale, left, most = 3.0, 190, 155
    gpu, bottom = left + scale * 80e9 / 2**30, 80 + 46 * len(found)
    for i, (layout, flags, *sizes, total) in enumerate(found):
        y, x = 76 + 46 * i, float(left)
        recompute, zero = re.findall(r"--(?:recompute|zero) (\w+)", flags)
        svg.text(180, y + 12, layout, at="end")
        svg.text(180, y + 28, f"ZeRO-{zero}, recompute {recompute}", at="end", size=12, fill=GREY)
        for (fill, _), size in zip(kinds, sizes, strict=True):
            width = min(float(size) * scale, left + most * scale - x)
            svg.box(x, y, width, 28, fill)
            x += width
        over = float(total.replace(",", "")) > most
        x = gpu if gpu - 60 < x < gpu else x  # the label doesn't cross the line
        svg.text(x + 6, y + 19, f"{'... ' if over else ''}{total} GiB", size=12)
    svg.parts.append(f'<path d="M{gpu:g} 66V{bottom}" stroke="{INK}" stroke-dasharray="4 3"/>')
    svg.text(gpu, bottom + 16, "a GPU of 80 GB", size=12, at="middle")
    return str(svg)


@picture
def tensor_parallel() -> str:
    svg = Svg(438, "Sequence parallelism shards norms and dropout too, and sends the same bytes")
    variants = (
        (60, "tensor parallel", "copy", "all-reduce", "[B, T, D]", 40),
        (250, "tensor and sequence parallel", "all-gather", "reduce-scatter", "[B, T/2, D]", 20),
    )
    for y, name, enter, leave, shape, height in variants:
        svg.text(12, y, name, weight="bold")
        for rank in (0, 1):
            top = y + 44 + 52 * rank
            svg.text(12, top + 24, f"rank {rank}")
            here = top + (20 * rank if height == 20 else 0)
            svg.box(76, here, 112, height, SKY, "norm")
            svg.box(258, top, 96, 40, ORANGE, "column")
            svg.box(362, top, 96, 40, ORANGE, "heads or", "units")
            svg.box(466, top, 96, 40, ORANGE, "row")
            svg.box(636, here, 112, height, SKY, "dropout, +")
        for x, label, word in ((223, enter, "enter"), (599, leave, "leave")):
            svg.box(x - 24, y + 44, 48, 92, "none" if label == "copy" else "#dddddd", line=GREY)
            svg.text(x, y + 36, label, at="middle", size=12)
            svg.text(x, y + 94, word, at="middle", size=12)
        svg.text(132, y + 154, shape, at="middle", size=12)
        svg.text(410, y + 154, "[B, T, features/2]", at="middle", size=12)
        svg.text(692, y + 154, shape, at="middle", size=12)
    svg.text(
        12,
        424,
        "Blue is replicated, or sharded along the sequence; orange is sharded over heads or hidden units.",
        size=12,
    )
    return str(svg)


@picture
def zero() -> str:
    svg = Svg(322, "Each stage of ZeRO shards one thing more over the data-parallel ranks")
    kinds = (("parameters", BLUE, 40, 3), ("gradients", ORANGE, 40, 2), ("optimizer state", GREEN, 80, 1))
    svg.legend(12, 54, [(fill, name) for name, fill, _, _ in kinds])
    svg.legend(420, 54, [("#dddddd", "on other ranks")])
    for stage in range(4):
        left = 12 + 188 * stage
        svg.text(left, 86, f"ZeRO-{stage}", weight="bold")
        for rank in range(4):
            x, y = left + 42 * rank, 98.0
            for _, fill, height, first in kinds:
                shard = height / 4
                svg.box(x, y, 36, height, fill if stage < first else "#dddddd")
                if stage >= first:
                    svg.box(x, y + shard * rank, 36, shard, fill)
                y += height + 4
            svg.text(x + 18, y + 14, f"rank {rank}", at="middle", size=11)
    svg.text(
        12, 312, "In the middle of a step. Besides, ZeRO-3 gathers the parameters of one block at a time.", size=12
    )
    return str(svg)


@picture
def pipelines() -> str:
    names = ("gpipe", "1f1b", "interleaved", "zb", "zbv")
    svg = Svg(60 + 132 * len(names) + 24, "Splitting backward and stages shrinks the bubble from 27 % to 6 %")
    colours = {"F": SKY, "B": ORANGE, "I": "#f0e442", "W": GREEN}
    words = ("forward", "backward", "backward of the input", "of the weights")
    svg.legend(12, 50, [*zip(colours.values(), words, strict=True), ("#dddddd", "idle")])
    longest = prove(build_schedule("gpipe", 4, 8)).makespan
    for i, name in enumerate(names):
        schedule = build_schedule(name, 4, 8)
        proof, top = prove(schedule), 72 + 132 * i
        each = 4 / schedule.stages  # a stage of two on a rank takes half as long
        svg.text(12, top + 12, name, weight="bold")
        cost = f"bubble {proof.bubble:.0%}, at most {max(proof.peaks):g} micro-batches held on a rank"
        svg.text(110, top + 12, cost, size=12)
        scale = 700 / longest * each
        for rank in range(4):
            y = top + 20 + 24 * rank
            svg.text(12, y + 15, str(rank), size=12)
            svg.box(30, y, scale * proof.makespan, 22, "#dddddd")
        for rank, action, start, end in proof.spans:
            x, y, width = 30 + scale * start, top + 20 + 24 * rank, scale * (end - start)
            svg.box(x, y, width - 0.8, 22, colours[action.kind])
            if width > 10:
                svg.text(x + width / 2, y + 15, str(action.micro_batch), at="middle", size=11)
    svg.text(12, 74 + 132 * len(names), "Rows are ranks, numbers are micro-batches, time goes to the right.", size=12)
    return str(svg)


@picture
def concepts() -> str:
    svg = Svg(420, "Each collective takes a tensor from one way of lying on two ranks to another")
    svg.legend(12, 52, [(BLUE, "whole"), (ORANGE, "shard"), (PINK, "one term of a sum that is still to be made")])
    nodes = {
        "P": (280, 70, "partial", PINK, BLUE),
        "I": (20, 190, "invariant", BLUE, BLUE),
        "S": (540, 190, "sharded", ORANGE, ORANGE),
        "R": (280, 310, "replicated", BLUE, PINK),
    }
    for name, (x, y, word, value, gradient) in nodes.items():
        svg.box(x, y, 200, 92, PALE, line=GREY)
        svg.text(x + 10, y + 20, f"{name}, {word}", weight="bold")
        for column, (label, fill) in enumerate((("values", value), ("gradient", gradient))):
            left = x + 50 + 76 * column
            svg.text(left, y + 38, label, size=12)
            for rank in (0, 1):
                half = 30 if fill == ORANGE else 60
                svg.box(left + (30 * rank if fill == ORANGE else 0), y + 44 + 22 * rank, half, 16, fill)
        for rank in (0, 1):
            svg.text(x + 8, y + 57 + 22 * rank, f"rank {rank}", size=11)
    svg.arrow(278, 140, 160, 188)
    svg.text(212, 150, "reduce", at="end", size=13)
    svg.arrow(482, 140, 600, 188)
    svg.text(548, 150, "reduce_scatter", size=13)
    svg.arrow(222, 222, 538, 222, "split")
    svg.arrow(538, 256, 222, 256)
    svg.text(380, 274, "gather", at="middle", size=12)
    svg.arrow(160, 284, 278, 332)
    svg.text(212, 326, "copy", at="end", size=13)
    svg.arrow(600, 284, 482, 332)
    svg.text(548, 326, "all_gather", size=13)
    return str(svg)


@picture
def less_memory() -> str:
    found = rows("records/2026-11-26_memory.md", "layout | kind | saved per block, bytes")
    svg = Svg(96 + 30 * len(found), "Full recomputation keeps 4 of 75 KiB of a block's activations, selective 32")
    svg.text(
        12, 50, "KiB that a block keeps for backward; tp 2 divides most of it, sequence parallelism the rest", size=13
    )
    inks = {"none": BLUE, "selective": ORANGE, "full": GREEN}
    for i, (layout, kind, saved, _, _) in enumerate(found):
        y, kib = 66 + 30 * i + 6 * (i // 3), int(saved.replace(",", "")) / 1024
        if kind == "none":
            svg.text(12, y + 42, layout.replace(" sequence", ", sequence"), size=13)
        svg.text(278, y + 17, kind, at="end", size=13)
        svg.box(286, y, 5 * kib, 24, inks[kind])
        svg.text(292 + 5 * kib, y + 17, f"{kib:.0f}", size=13)
    return str(svg)


@picture
def parameter_servers() -> str:
    svg = Svg(300, "Under ZeRO every rank serves its own shard: no link carries the traffic of all")
    svg.text(12, 56, "a parameter server", weight="bold")
    svg.box(110, 74, 160, 50, ORANGE, "parameters,", "optimizer state")
    for i in (0, 1):
        left = 30 + 190 * i
        svg.box(left, 216, 130, 50, SKY, f"worker {i}", "gradient")
        svg.arrow(left + 50, 214, 150 + 60 * i, 128)
        svg.arrow(170 + 60 * i, 128, left + 80, 214)
    svg.text(64, 176, "push", size=13)
    svg.text(196, 176, "pull", size=13)
    svg.text(400, 56, "ZeRO: two ranks", weight="bold")
    for rank in (0, 1):
        left = 400 + 200 * rank
        svg.box(left, 74, 148, 192, PALE, line=GREY)
        svg.text(left + 8, 92, f"rank {rank}", size=13)
        svg.box(left + 8, 102, 132, 50, ORANGE, f"shard {rank} of", "the parameters")
        svg.box(left + 8, 206, 132, 50, SKY, "gradient of", "its samples")
        svg.arrow(left + 74, 204, left + 74, 156)
    svg.arrow(540, 204, 606, 156)
    svg.arrow(610, 204, 544, 156)
    svg.text(574, 240, "reduce-", at="middle", size=12)
    svg.text(574, 256, "scatter", at="middle", size=12)
    svg.text(574, 130, "all-", at="middle", size=12)
    svg.text(574, 146, "gather", at="middle", size=12)
    return str(svg)


@picture
def context_parallel() -> str:
    chunks, ranks = 8, 4
    svg = Svg(382, "Zigzag gives each rank of cp 4 the same causal work")
    inks = (BLUE, ORANGE, GREEN, PINK)
    svg.legend(12, 52, [(ink, f"rank {rank}") for rank, ink in enumerate(inks)])
    owners = {"ring": [c // 2 for c in range(chunks)], "zigzag": [min(c, chunks - 1 - c) for c in range(chunks)]}
    for side, (name, owner) in enumerate(owners.items()):
        left, top, cell = 60 + 380 * side, 92, 22
        svg.text(left, 80, name, weight="bold")
        work = [0.0] * ranks
        for query in range(chunks):
            for key in range(query + 1):
                x, y = left + cell * key, top + cell * query
                half = f"M{x} {y}v{cell}h{cell}z" if key == query else f"M{x} {y}h{cell}v{cell}h-{cell}z"
                svg.parts.append(f'<path d="{half}" fill="{inks[owner[query]]}" stroke="white"/>')
                work[owner[query]] += 0.5 if key == query else 1
        svg.text(left + cell * chunks / 2, top + cell * chunks + 18, "keys", at="middle", size=12)
        svg.text(left - 8, top + cell * chunks / 2, "queries", at="end", size=12)
        for rank, amount in enumerate(work):
            y = 300 + 18 * rank
            svg.box(left, y, 9 * amount, 14, inks[rank])
            svg.text(left + 9 * amount + 6, y + 12, f"{amount / sum(work):.0%} of the work", size=12)
    return str(svg)


@picture
def moe() -> str:
    svg = Svg(330, "A token goes once to each rank that holds one of its experts")
    svg.legend(12, 52, [(SKY, "tokens of a rank"), (ORANGE, "experts of a rank"), (GREEN, "weighted sums, sent back")])
    chosen = ((0, 1), (0, 2), (2, 3), (1, 3))  # of tokens 0 and 1 on rank 0, 2 and 3 on rank 1: two experts each
    for rank in (0, 1):
        top = 74 + 124 * rank
        svg.box(12, top, 736, 112, "none", line="#cccccc")
        svg.text(20, top + 18, f"rank {rank}", weight="bold")
        for i in (0, 1):
            token, y = 2 * rank + i, top + 26 + 42 * i
            svg.box(80, y, 150, 34, SKY, f"token {token}: {chosen[token][0]}, {chosen[token][1]}")
            svg.box(330, y, 120, 34, ORANGE, f"expert {token}")
            svg.box(560, y, 110, 34, GREEN, f"token {token}")
    for token, experts in enumerate(chosen):
        start = 74 + 124 * (token // 2) + 43 + 42 * (token % 2)
        for rank in sorted({expert // 2 for expert in experts}):
            mine = [expert for expert in experts if expert // 2 == rank]
            ends = [74 + 124 * rank + 43 + 42 * (expert % 2) for expert in mine]
            end = sum(ends) / len(ends)
            svg.arrow(232, start, 328, end)
            svg.arrow(452, end, 558, start)
    return str(svg)


def main() -> None:
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw())


if __name__ == "__main__":
    main()
