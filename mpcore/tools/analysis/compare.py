"""`mpcore compare RUN_A RUN_B --twins ..`: test whether two runs differ only by rounding.

A sum in another order has other last bits, and training amplifies the difference. Twins of run A differ from it only by
rounding. Their spread shows how far rounding can go: the band. The first number of run B outside of the band points to
a bug.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from mpcore.checkpoint.schema import convert, read_lines
from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors

WIDTH = 5.0
"""Times the spread of the twins that a run may be off. docs/debugging.md has the trial that it comes from."""
NEAR = 2
"""Recorded steps before and after a step whose spreads count for it."""
LEAST = 1e-15  # of a value: what printing and reading a number may change

Curve = dict[int, "float | None"]
Curves = dict[tuple[str, str], Curve]
"""By (kind, tensor), values by step; None was not finite. The tensor is "" for numbers of the whole model."""
WHOLE = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "val_loss": "validation loss"}


@dataclass(frozen=True)
class Outside:
    """A number outside of the band.

    Attributes:
        kind, tensor: what the number is, and the tensor it belongs to; `tensor` is "" for a number of the whole model.
        a, b: the values in the two runs. None: not finite.
        times: the distance divided by the band's half width. It is infinite if only one of the two values is finite.
    """

    step: int
    kind: str
    tensor: str
    a: float | None
    b: float | None
    times: float

    def __str__(self) -> str:
        a, b = ("not finite" if x is None else f"{x:.9g}" for x in (self.a, self.b))
        return f"step {self.step}, {self.kind}{self.tensor and f' of {self.tensor}'}: {a} and {b}"


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        first: the first number outside of the band. None: all differences are rounding.
        count: the number of numbers compared.
        steps: the number of steps that both runs have.
        nearest: the largest distance, divided by the band's half width.
        twins: for each twin, its largest distance divided by the half width of the band of the other twins.
        sees: (step, relative difference): a difference of this size would be detected in half of the numbers.
    """

    first: Outside | None
    count: int
    steps: int
    nearest: float
    twins: tuple[float, ...]
    sees: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        alone = sum(found > 1 for found in self.twins)
        rates = (
            f"error rates: {alone} of {len(self.twins)} twins lie outside of the band of the others; "
            + ", ".join(f"in step {step} a difference of {size:.1e} is seen" for step, size in self.sees)
            + ", in half of the numbers"
        )
        if self.first is None:
            return (
                f"rounding: {self.count} numbers of {self.steps} steps lie within the band of {len(self.twins)} twins, "
                f"the farthest of them at {self.nearest:.0%} of the band\n{rates}"
            )
        return f"NOT rounding: {self.first}, {self.first.times:.3g} times the band of {len(self.twins)} twins\n{rates}"


def read_curves(run: Path) -> Curves:
    """Read metrics.jsonl of a run's folder, and tensors.jsonl if it exists."""
    curves: Curves = {}
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} isn't there: name the --out folder of a run")
    for entry in read_lines(path):
        for name, kind in WHOLE.items():
            if name in entry:
                curves.setdefault((kind, ""), {})[entry["step"]] = convert(float | None, entry[name], f"{path}: {name}")
    path = run / "tensors.jsonl"
    for entry in read_lines(path) if path.is_file() else ():
        for kind in ("gradient", "weight"):
            for tensor, value in convert(dict[str, float | None], entry.get(kind), f"{path}: {kind}").items():
                curves.setdefault((kind, tensor), {})[entry["step"]] = value
    return curves


def compare_runs(a: Curves, b: Curves, twins: Sequence[Curves], width: float = WIDTH) -> Verdict:
    """Compare the curves of two runs."""
    if len(twins) < 2:
        raise ValueError(f"{len(twins)} twins don't show how far rounding goes: give at least 2, better 4")
    missing = next((key for key in sorted(a.keys() ^ b.keys())), None)
    if missing is not None:
        has, lacks = ("the first", "the second") if missing in a else ("the second", "the first")
        raise ValueError(f"{has} run has the {' of '.join(filter(None, missing))}, {lacks} has not: record both alike")
    band = make_band(a, twins)
    found = list(_distances(a, b, band, width))
    if not found:
        raise ValueError("the runs and the twins have no recorded step in common")
    outside = [each for each in found if each.times > 1]
    first = min(outside, key=lambda each: (each.step, -each.times)) if outside else None
    apart = []
    for i, twin in enumerate(twins):
        others = [other for j, other in enumerate(twins) if j != i]
        apart.append(max((each.times for each in _distances(a, twin, make_band(a, others), width)), default=0.0))
    sees: dict[int, list[float]] = {}
    for key, curve in band.items():
        for step, spread in curve.items():
            if value := a[key].get(step):
                sees.setdefault(step, []).append(width * spread / abs(value))
    ends = sorted(sees)[:: max(len(sees) - 1, 1)]
    return Verdict(
        first, len(found), len({each.step for each in found}), max(each.times for each in found), tuple(apart),
        tuple((step, statistics.median(sees[step])) for step in ends),
    )  # fmt: skip


def make_band(a: Curves, twins: Sequence[Curves]) -> dict[tuple[str, str], dict[int, float]]:
    """Return the spread of each number among the run and its twins, as the largest spread in the steps around.

    A number that is nearly equal in all twins by chance gets at least the median relative spread of its kind.
    """
    runs, spreads = [a, *twins], {}
    relative: dict[tuple[str, int], list[float]] = {}
    for key, curve in a.items():
        steps = sorted(step for step in curve if all(step in run.get(key, {}) for run in runs))
        values = [[run[key][step] for run in runs] for step in steps]
        own = [_spread(each) for each in values]
        wide = [max(own[max(i - NEAR, 0) : i + NEAR + 1]) for i in range(len(own))]
        spreads[key] = dict(zip(steps, wide, strict=True))
        for step, spread, each in zip(steps, wide, values, strict=True):
            if each[0] and math.isfinite(spread):
                relative.setdefault((key[0], step), []).append(spread / abs(each[0]))
    middle = {where: statistics.median(found) for where, found in relative.items()}
    return {
        key: {
            step: max(spread, (middle.get((key[0], step), 0.0) + LEAST) * abs(a[key][step] or 0.0), 1e-300)
            for step, spread in curve.items()
        }
        for key, curve in spreads.items()
    }


def _spread(values: Sequence[float | None]) -> float:
    """Return the largest distance between two values; infinite if only some are finite."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return math.inf if finite else 0.0
    return max(abs(x - y) for x, y in combinations(finite, 2))


def _distances(
    a: Curves, b: Curves, band: Mapping[tuple[str, str], Mapping[int, float]], width: float
) -> Iterable[Outside]:
    """Yield each number of both runs with its distance, divided by the band's half width."""
    for (kind, tensor), curve in band.items():
        other = b[kind, tensor]
        for step, spread in curve.items():
            x, y = a[kind, tensor][step], other.get(step, math.nan)
            if (x is None and y is None) or (y is not None and math.isnan(y)):
                continue
            far = math.inf if x is None or y is None else abs(x - y)
            times = 0.0 if math.isinf(spread) else far / (width * spread)
            yield Outside(step, kind, tensor, x, y, times)


@reports_errors("mpcore compare")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status. 0: the runs differ only by rounding. 1: they differ by more. 2: they can't be compared.
    """
    args = parsers.compare().parse_args(argv)
    if not args.twins:
        lines = [
            f"  python -m examples.gpt.pretrain --config {args.a}/config.json --set twin={i} --out {args.a}-twin-{i}"
            for i in (1, 2, 3, 4)
        ]
        asked = "name twins of RUN_A with --twins; train them with its launcher and"
        raise ValueError("\n".join([asked, *lines]))
    a, b, *twins = (read_curves(run) for run in (args.a, args.b, *args.twins))
    verdict = compare_runs(a, b, twins)
    print(verdict)
    return int(verdict.first is not None)


if __name__ == "__main__":
    sys.exit(main())
