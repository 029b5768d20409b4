"""Host seconds of a step as work grows, beside a bare loop of torch: `python -m bench.growth --write docs/speed.md`."""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import mpcore as mp
from bench.interleave import interleave
from bench.machine import describe
from bench.steps import Step, adamw, prepared, squares
from mpcore._torch.fake import start_fake_world

D, ROWS, DP, WORLD = 8, 4, 8, 16384


class MLP(nn.Module):
    """A residual block of two linear layers of any make."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        """[rows, D] to the same."""
        return x + self.down(F.relu(self.up(x)))


class Many(nn.Module):
    """So many parameters of 4 elements, and nothing to compute with them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.held = nn.ParameterList(torch.ones(4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Their sum, added to each row."""
        return x + torch.stack(list(self.held)).sum()


def rows(micro_batches: int) -> Tensor:
    """The input, and the target, of a step."""
    return torch.ones(ROWS * micro_batches, D)


def bare(model: nn.Module, micro_batches: int = 1) -> Step:
    """A step of a plain torch loop, clipped."""
    optimizer, x = adamw(model), rows(micro_batches)

    def step() -> None:
        for part in x.chunk(micro_batches):
            squares(model(part), part).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(layers: int) -> nn.Sequential:
    """Blocks of `nn.Linear`."""
    return nn.Sequential(*(MLP(nn.Linear(D, D), nn.Linear(D, D)) for _ in range(layers)))


def parallel(layers: int, mesh: mp.Mesh) -> nn.Sequential:
    """The same of parallel layers."""
    tp = mesh.tp
    blocks = (MLP(mp.ColumnParallelLinear(D, D, tp=tp), mp.RowParallelLinear(D, D, tp=tp)) for _ in range(layers))
    return nn.Sequential(*blocks)


def world(size: int) -> None:
    """Begin a world of fake ranks, which send nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
    start_fake_world(size, 0)


def by_layers(n: int) -> dict[str, Step]:
    """Blocks on one rank."""
    world(1)
    mesh, model = mp.build_mesh(device_type="cpu"), plain(n)
    return {"mpcore": prepared(mesh, model, list(model), rows(1)), "bare loop": bare(plain(n))}


def by_micro_batches(n: int) -> dict[str, Step]:
    """Micro-batches through two blocks."""
    world(1)
    mesh, model = mp.build_mesh(device_type="cpu"), plain(2)
    ours = prepared(mesh, model, list(model), rows(n), micro_batches=n)
    return {"mpcore": ours, "bare loop": bare(plain(2), n)}


def by_parameters(n: int) -> dict[str, Step]:
    """Parameters of four elements on data-parallel ranks."""
    world(DP)
    mesh = mp.build_mesh(device_type="cpu")
    return {
        "mpcore, ZeRO-0": prepared(mesh, Many(n), (), rows(1), data=mp.Zero(0)),
        "bare loop on one rank": bare(Many(n)),
    }


def by_zero_parameters(n: int) -> dict[str, Step]:
    """The same sharded, beside `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    world(DP)
    mesh, other = mp.build_mesh(device_type="cpu"), Many(n)
    assert mesh.device_mesh is not None
    fully_shard(other, mesh=mesh.device_mesh["dp"])
    return {"mpcore, ZeRO-3": prepared(mesh, Many(n), (), rows(1), data=mp.Zero(3)), "FSDP2": bare(other)}


def by_tp(n: int) -> dict[str, Step]:
    """Eight blocks on so many ranks of tp, each of one element's width."""
    world(n)
    mesh = mp.build_mesh(tp=n, device_type="cpu")
    model = parallel(8, mesh)
    return {"mpcore": prepared(mesh, model, list(model), rows(1))}


class Growth(NamedTuple):
    """A quantity that grows: its name, its sizes, and a function that builds the steps of a size."""

    what: str
    sizes: tuple[int, ...]
    build: Callable[[int], dict[str, Step]]


GROWTHS = [
    Growth("layers", (8, 16, 32, 64, 128), by_layers),
    Growth("micro-batches", (1, 4, 16, 64, 256), by_micro_batches),
    Growth("parameters", (100, 300, 1000, 3000, 10000), by_parameters),
    Growth("parameters, sharded", (100, 300, 1000, 3000), by_zero_parameters),
    Growth("tp", (1, 2, 4, 8), by_tp),
]
Curve = dict[str, list[tuple[int, float]]]


def measure(growth: Growth, rounds: int) -> Curve:
    """Processor seconds of a step by side and size."""
    curve: Curve = {}
    for size in growth.sizes:
        for name, seconds in interleave(growth.build(size), rounds=rounds, iterations=1, warmup=2).items():
            curve.setdefault(name, []).append((size, statistics.median(seconds)))
    return curve


def slope(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The line of least squares: seconds for each more, and the exponent of growth between the two largest sizes."""
    xs, ys = zip(*points, strict=True)
    (x, y), (last_x, last_y) = points[-2:]
    exponent = math.log(last_y / y) / math.log(last_x / x)
    return statistics.linear_regression(xs, ys).slope, exponent


PROBE = """
import time
began = time.process_time()
import torch, torch.distributed as dist
with_torch = time.process_time()
import mpcore as mp
mp.prepare, mp.build_mesh
imported = time.process_time()
from mpcore._torch.fake import start_fake_world
start_fake_world({world}, 0)
before = time.process_time()
mesh = mp.build_mesh(tp=8, pp=8, cp=2, ep=8, device_type="cpu")
built = time.process_time()
groups = {{axis.group_name for axis in mesh.axes.values() if axis.size > 1}}
dist.destroy_process_group()
alone = time.process_time()
model = torch.nn.Sequential(mp.ColumnParallelLinear(8, 8))
run = mp.prepare(model, mp.build_mesh(device_type="cpu"), blocks=list(model), initialize=False,
                 loss=lambda y, t: (y - t).square().sum(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
run.forward_backward(torch.ones(4, 8), torch.ones(4, 8)); run.optimizer_step()
print(with_torch - began, imported - with_torch, built - before, len(groups), time.process_time() - alone)
"""


def start() -> str:
    """Lines on a start: processor seconds of import, of a large mesh, and of a first step, each in a new process."""
    each = []
    for _ in range(3):
        told = subprocess.run(
            [sys.executable, "-c", PROBE.format(world=WORLD)], capture_output=True, text=True, check=True
        )
        each.append([float(number) for number in told.stdout.split()])
    torch_s, ours_s, mesh_s, groups, first = (statistics.median(column) for column in zip(*each, strict=True))
    return (
        f"- `import mpcore` with `prepare` and `build_mesh`: {ours_s:.2f} s beyond torch's {torch_s:.2f} s.\n"
        f"- `build_mesh(tp=8, pp=8, cp=2, ep=8)` on {WORLD:,} fake ranks: {mesh_s:.2f} s, "
        f"{groups:.0f} groups per rank.\n"
        f"- `prepare` and the first step of one linear layer: {first:.2f} s."
    )


def table(curves: dict[str, Curve]) -> str:
    """One row for each side of each growth."""
    rows = [
        "| what grows | side | ms per step, by size | µs for each more | exponent at the end |",
        "|---|---|---|---|---|",
    ]
    for what, curve in curves.items():
        for side, points in curve.items():
            told = ", ".join(f"{size:,}: {1e3 * seconds:.3g}" for size, seconds in points)
            each, exponent = slope(points)
            rows.append(f"| {what} | {side} | {told} | **{1e6 * each:.3g}** | {exponent:.2f} |")
    return "\n".join(rows)


def draw(curves: dict[str, Curve], file: Path) -> None:
    """Draw milliseconds against size."""
    figure = Figure(figsize=(3.2 * len(curves), 3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (what, curve) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for side, points in curve.items():
            axes.plot(*zip(*((size, 1e3 * seconds) for size, seconds in points), strict=True), marker="o", label=side)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel(what, fontsize=8)
        axes.set_ylabel("ms of processor time a step", fontsize=8)
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=100)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--only", default="", help="what grows")
    parser.add_argument("--rounds", type=int, default=5, help="of each size (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace what lies between the page's markers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, Curve] = {}
    for growth in GROWTHS:
        if given.only in growth.what:
            curves[growth.what] = measure(growth, given.rounds)
            print(table({growth.what: curves[growth.what]}), flush=True)
    if given.write:
        about, plot = describe(), given.write.with_name("growth.png")
        draw(curves, plot)
        head = f"Machine: {about['device']}, {about['cores']} cores. Date: {about['date']}, commit {about['commit']}."
        text = f"{head}\n\n![Milliseconds per step by size]({plot.name})\n\n{table(curves)}\n\n{start()}"
        before, rest = given.write.read_text().split("<!-- growth -->\n")
        after = rest.partition("<!-- /growth -->\n")[2]
        given.write.write_text(f"{before}<!-- growth -->\n{text}\n<!-- /growth -->\n{after}")


if __name__ == "__main__":
    main()
