"""Check by a few steps at several widths that the activations of a model keep their size: what muP promises.

`mpcore coordinate-check package.module:train --widths 64,128,256 --layouts tp2,dp2` prints a table and draws a plot.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import named_modules
from mpcore.tools import parsers
from mpcore.tools.command_line import find_object, reports_errors
from mpcore.tools.draw import matplotlib_part
from mpcore.tools.simulation import simulate
from mpcore.tools.verify.layout import Layout, parse_layout
from mpcore.training.run import Run

FLAT = 0.25  # activations of standard parametrization grow by an exponent of 0.5 to 1
Train = Callable[[int, Mesh], tuple[Run, Mapping[str, Any]]]
Sizes = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Coordinates:
    """The mean absolute activations of each module.

    Attributes:
        sizes: maps each module's name to a list by width of lists by step.
        slopes: the exponent of growth with the width, by module: the least-squares slope of log(size) after the last
            step over log(width).
    """

    widths: tuple[int, ...]
    sizes: Sizes
    slopes: dict[str, float]

    @property
    def growing(self) -> list[str]:
        """The modules whose activations grow by an exponent of more than 0.25."""
        return [name for name, slope in self.slopes.items() if not slope <= FLAT]

    def __str__(self) -> str:
        head = f"{'module':<32}{'exponent':>10}  mean |activation| at width {', '.join(map(str, self.widths))}"
        rows = [
            f"{name:<32}{slope:>10.2f}  {', '.join(f'{steps[-1]:.3g}' for steps in self.sizes[name])}"
            for name, slope in self.slopes.items()
        ]
        return "\n".join([head, *rows])


def coordinate_check(train: Train, widths: Sequence[int], steps: int = 4, layout: str = "tp1") -> Coordinates:
    """Train a model of each width on one batch, and measure the outputs of its modules in each forward.

    Args:
        train: called as `train(width, mesh)`. It returns a prepared run and the arguments of `run.forward_backward`,
            with this rank's samples. It seeds what it draws.
        widths: at least two widths.
        steps: steps to train before the last measurement.
        layout: the axes, as `mpcore verify` names them (`tp2`, `pp2`, `dp2`). Ranks are threads of this process.

    Raises:
        ValueError: if there are fewer than two widths, a module is missing at a width, or the layout sets a stage of
            ZeRO, micro-batches or sequence parallelism, which `train` sets.
    """
    axes = parse_layout(layout)
    if axes != Layout(layout, axes.tp, axes.cp, axes.pp, axes.dp, axes.ep):
        raise ValueError(f"layout {layout!r}: zero, mb and sp are set by the function that builds the run")
    if len(set(widths)) < 2 or steps < 1:
        raise ValueError(f"widths {list(widths)}, steps {steps}: it takes two widths and one step at least")
    sizes: Sizes = {}
    for width in sorted(set(widths)):
        ranks = simulate(
            partial(_measure, train, width, steps), tp=axes.tp, cp=axes.cp, pp=axes.pp, ep=axes.ep, dp=axes.dp
        )
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            parts = zip(*(rank[name] for rank in ranks if name in rank), strict=True)
            means = [sum(total for total, _ in part) / sum(count for _, count in part) for part in parts]
            sizes.setdefault(name, []).append(means)
    found = tuple(sorted(set(widths)))
    for name, means in sizes.items():
        if len(means) < len(found):
            raise ValueError(f"{name} is there at {len(means)} of {len(found)} widths: build the same modules at each")
    return Coordinates(found, sizes, {name: _slope(found, [m[-1] for m in means]) for name, means in sizes.items()})


def _measure(train: Train, width: int, steps: int, mesh: Mesh) -> dict[str, list[tuple[float, int]]]:
    """Return the sum of the absolute outputs and their number, by module and step, on this rank."""
    run, batch = train(width, mesh)
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    now: dict[str, tuple[float, int]] = {}

    def watch(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            total, count = now.get(name, (0.0, 0))
            now[name] = (total + output.detach().double().abs().sum().item(), count + output.numel())

    for name, module in named_modules(run.model):
        if name:  # the root of a pipeline rank is another part of the model
            module.register_forward_hook(partial(watch, name))
    for _ in range(steps + 1):
        now.clear()
        run.forward_backward(**batch)
        run.optimizer_step()
        for name, each in now.items():
            found[name].append(each)
    return dict(found)


def _slope(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Return the least-squares slope of log(size) over log(width); nan if a size is not positive and finite."""
    if not all(0 < size < math.inf for size in sizes):
        return math.nan
    x, y = (torch.tensor([math.log(each) for each in values], dtype=torch.float64) for values in (widths, sizes))
    x, y = x - x.mean(), y - y.mean()
    return ((x @ y) / (x @ x)).item()


def draw(found: Mapping[str, Coordinates], path: Path) -> None:
    """Draw the activations over the width, a panel for each layout, a line for each module."""
    figure = matplotlib_part("figure").Figure(figsize=(2.4 * len(found) + 2.2, 3.4), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)
    for panel, (layout, each) in zip(panels[0], found.items(), strict=True):
        # a module returns what its last one returns: one line
        last = {tuple(steps[-1] for steps in sizes): name for name, sizes in reversed(each.sizes.items())}
        for i, (values, name) in enumerate(reversed(last.items())):
            style = {"marker": "o", "markersize": 3, "color": f"C{i % 10}", "ls": "-:"[i // 10 % 2]}
            panel.loglog(each.widths, values, label=name, **style)
        panel.set(title=layout, xlabel="width")
        panel.set_xticks(each.widths, [str(width) for width in each.widths])
        panel.minorticks_off()
        panel.yaxis.set_major_locator(matplotlib_part("ticker").LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
    panels[0][0].set_ylabel("mean |activation| after the last step")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


@reports_errors("mpcore coordinate-check")
def main(argv: Sequence[str] | None = None) -> int:
    """Run `mpcore coordinate-check`. Status 1: activations grow with the width, or layouts differ."""
    args = parsers.coordinate_check().parse_args(argv)
    train, found, wrong = find_object(args.train), {}, 0
    for layout in ["tp1", *(each for each in args.layouts if each != "tp1")]:
        found[layout] = each = coordinate_check(train, args.widths, args.steps, layout)
        print(f"{layout}:\n{each}", flush=True)
        lines = [f"{name} grow with the width (exponent {each.slopes[name]:.2f})" for name in each.growing]
        for name, sizes in each.sizes.items():
            one = found["tp1"].sizes.get(name, sizes)
            worst = max(
                abs(a - b) / max(a, 1e-30) for x, y in zip(one, sizes, strict=True) for a, b in zip(x, y, strict=True)
            )
            lines += [f"{name} differ from tp1's by a relative {worst:.1e}"] * (worst > args.tolerance)
        for line in lines:
            wrong += 1
            print(f"{layout}: the outputs of {line}")
    if args.out:
        draw(found, args.out)
        print(f"wrote {args.out}")
    return 1 if wrong else 0
