"""Fit a machine's rates to runs with a known time, and print the error of the fit.

`python -m bench.planner rows.json --machine h100 --out mine.json` fits. `bench.planner.rows` describes the format of
rows. A folder of a run of `examples.gpt.pretrain` is a row too.

Six rates are fitted on logarithms, each with a prior: few runs can determine only few rates, and the prior keeps the
other rates near their values in the profile. The remaining fields of a profile are not fitted: they are specifications,
or were measured.

Source: Gauss-Newton with priors, Tarantola 2005, "Inverse Problem Theory", section 3.2; weights of outliers, Huber
1964, "Robust Estimation of a Location Parameter".
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench.planner.rows import Row, read_rows, read_run
from mpcore.tools.analysis.layout import Counter, Layout
from mpcore.tools.analysis.machine import Machine, load_machine, save_machine
from mpcore.tools.analysis.rate_errors import NAMES, NOISE, SPREADS, errors_of, sensitivities
from mpcore.tools.analysis.seconds import Seconds, estimate
from mpcore.tools.command_line import Parser, find_object
from mpcore.tools.parsers import profile_names

USUAL = 1.345
"""An error of more than so many `NOISE` pulls the fit no harder than this one: a run on a slow node counts little.

Huber's choice: 95 % of the efficiency of least squares where errors are normal."""
MOST = {"e_gemm": 1.0, "e_hbm": 1.0}


@dataclass(frozen=True)
class Run:
    """A row, and the counts of its layout."""

    row: Row
    layout: Layout


@dataclass(frozen=True)
class Result:
    """A row's measured time, its time predicted by the fit on all rows, and by the fit on all other rows.

    Attributes:
        row: the row.
        seconds: the measured seconds per step.
        fitted: the seconds that the fit on all rows predicts.
        left_out: the seconds that the fit on all other rows predicts.
    """

    row: Row
    seconds: float
    fitted: float
    left_out: float

    @property
    def error(self) -> float:
        """The relative error of the fit on all other rows."""
        return self.left_out / self.seconds - 1


def count_rows(
    rows: Sequence[Row], each: Callable[[int, int], None] = lambda done, of: None, stands_for_gpu: bool = True
) -> list[Run]:
    """Count the layouts of rows."""
    counters: dict[str, Counter] = {}
    runs = []
    for i, row in enumerate(rows, start=1):
        try:
            if row.target not in counters:
                counters[row.target] = Counter(find_object(row.target), stands_for_gpu, share=True)
            layout = counters[row.target].layout(row.arguments, **row.sizes)
            runs.append(Run(row, layout.with_gradients(row.gradient_bytes)))
        except (ValueError, SystemExit) as error:
            raise ValueError(f"{row.name}: {error}") from error
        each(i, len(rows))
    return runs


def predict(run: Run, machine: Machine) -> Seconds:
    """Estimate the seconds of a run's step."""
    return estimate(run.layout, machine, run.row.unfused)


def fit(runs: Sequence[Run], machine: Machine, steps: int = 30) -> Machine:
    """Fit the six scalars to runs: Gauss-Newton on logarithms, with priors and with lower weights for outliers.

    Args:
        runs: the runs; those without a time are ignored.
        machine: the values that aren't fitted, and the means of the priors.
        steps: the largest number of Gauss-Newton steps.

    Returns:
        The machine with the fitted scalars. Its `errors` are their relative standard errors, from the runs and the
        priors together.
    """
    timed = [run for run in runs if run.row.seconds is not None]
    mean, weight = scalars_of(machine), torch.tensor([s**-2 for s in SPREADS.values()], dtype=torch.float64).diag()
    most = torch.tensor([math.log(MOST.get(name, math.inf)) for name in NAMES])
    seconds = torch.tensor([run.row.seconds for run in timed], dtype=torch.float64)
    theta, information = mean.clone(), weight
    for _ in range(steps):
        here = with_scalars(machine, theta)
        J = torch.tensor([sensitivities(run.layout, here, run.row.unfused) for run in timed], dtype=torch.float64)
        J = J.reshape(-1, len(NAMES))
        r = seconds.log() - torch.tensor([predict(run, here).step for run in timed], dtype=torch.float64).log()
        trust = (USUAL * NOISE / r.abs().clamp_min(1e-12)).clamp_max(1.0) / NOISE**2
        information = J.T @ (trust[:, None] * J) + weight
        change = torch.linalg.solve(information, J.T @ (trust * r) + weight @ (mean - theta))
        theta = torch.minimum(theta + change, most)
        if change.abs().max() < 1e-4:
            break
    errors = torch.linalg.inv(information).diagonal().sqrt().tolist()
    sources = machine.sources | dict.fromkeys(NAMES, f"fitted: {len(timed)} runs")
    return replace(with_scalars(machine, theta), sources=sources, errors=dict(zip(NAMES, errors, strict=True)))


def identified(machine: Machine) -> tuple[str, ...]:
    """Return the scalars of a fitted machine that the runs determine better than the prior does."""
    return tuple(name for name in NAMES if machine.errors[name] < SPREADS[name] / 2)


def scalars_of(machine: Machine) -> Tensor:
    """Return [6], the logarithms of a machine's scalars."""
    return torch.tensor([math.log(max(getattr(machine, name), 1e-12)) for name in NAMES], dtype=torch.float64)


def with_scalars(machine: Machine, theta: Tensor) -> Machine:
    """Return the machine with new scalars. `theta`, [6], has their logarithms."""
    return replace(machine, **{name: math.exp(float(value)) for name, value in zip(NAMES, theta, strict=True)})


def leave_one_out(runs: Sequence[Run], machine: Machine) -> list[Result]:
    """Predict each run from a fit on all other runs."""
    timed = [run for run in runs if run.row.seconds is not None]
    whole, results = fit(timed, machine), []
    for i, run in enumerate(timed):
        left = fit([*timed[:i], *timed[i + 1 :]], machine)
        assert run.row.seconds is not None
        results.append(Result(run.row, run.row.seconds, predict(run, whole).step, predict(run, left).step))
    return results


def uncertainty(run: Run, machine: Machine) -> float:
    """Return the relative standard error of a predicted step, from the errors of a machine's rates."""
    return math.hypot(*errors_of(run.layout, machine, run.row.unfused), NOISE)


# --- the command ------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m bench.planner",
        description="Fit a machine's rates to runs with a known time, and print the error of the fit.",
        examples=["python -m bench.planner rows.csv --machine a100-80 --out mine.json"],
    )
    add = parser.add_argument
    add("rows", nargs="+", help="files .json or .csv of rows, or folders of runs")
    add("--machine", help=f"profile to begin with: {', '.join(profile_names())} or a path (default: the rows' own)")
    add("--set", action="append", help="only rows of this set; may be given again")
    add("--test", action="append", metavar="ROWS", help="rows to predict, which are not fitted")
    add("--out", type=Path, metavar="PROFILE", help="write the fitted profile, a .json file")
    add("--cpu", action="store_true", help="count the operators of a CPU instead of a GPU's kernels")
    return parser.parse_args(argv)


def read_all(names: Sequence[str]) -> list[Row]:
    """Read rows from files and folders."""
    return [row for path in map(Path, names) for row in ([read_run(path)] if path.is_dir() else read_rows(path))]


def groups_of(rows: Sequence[Row], machine: str | None) -> dict[tuple[str, str], list[Row]]:
    """Group rows by set and profile. Each group is fitted separately."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        profile = machine or row.machine
        if not profile:
            raise ValueError(
                f"{row.name}: no machine; give --machine or the column machine: {', '.join(profile_names())}"
            )
        found.setdefault((row.set, profile), []).append(row)
    return found


def scalars_table(found: Machine) -> str:
    """Return a table of the fitted scalars, one line each."""
    lines = [f"  {'scalar':<10} {'value':>10} {'standard error':>15}"]
    for name in NAMES:
        mark = "" if name in identified(found) else "  not identified: the prior says as much"
        lines.append(f"  {name:<10} {getattr(found, name):>10.4g} {found.errors[name]:>15.0%}{mark}")
    return "\n".join(lines)


def mean_and_most(results: Sequence[Result]) -> tuple[float, float]:
    """Return the mean and the largest of the absolute relative errors."""
    errors = [abs(result.error) for result in results]
    return sum(errors) / len(errors), max(errors)


def results_table(results: Sequence[Result]) -> str:
    """Return a table with one line per row, and the mean error."""
    wide = max(len(result.row.name) for result in results)
    lines = [f"  {'row':<{wide}} {'seconds':>9} {'fitted':>9} {'left out':>9} {'error':>7}"]
    for r in results:
        lines.append(f"  {r.row.name:<{wide}} {r.seconds:>9.3f} {r.fitted:>9.3f} {r.left_out:>9.3f} {r.error:>+7.1%}")
    mean, most = mean_and_most(results)
    lines.append(f"  mean absolute error of rows left out {mean:.1%}, largest {most:.1%}")
    return "\n".join(lines)


def memory_lines(runs: Sequence[Run], machine: Machine) -> list[str]:
    """Return lines that compare the rows planned to run out of memory with the rows that did."""
    failed = [run for run in runs if run.row.seconds is None]
    ran = [run for run in runs if run.row.seconds is not None]

    def too_large(run: Run) -> bool:
        return run.layout.fullest[1] + machine.reserve > machine.memory

    alarms = [run.row.name for run in ran if too_large(run)]
    lines = [f"  planned too large: {', '.join(alarms)}, which ran"] if alarms else []
    if failed:
        seen = sum(map(too_large, failed))
        lines.append(
            f"  out of memory: {seen} of {len(failed)} were planned so, {len(alarms)} of {len(ran)} that ran too"
        )
    return lines


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = parse(argv)
    rows = [row for row in read_all(args.rows) if not args.set or row.set in args.set]
    if not rows:
        raise ValueError(f"no row is of --set {', '.join(args.set)}")
    groups = groups_of(rows, args.machine)
    for (of, profile), group in groups.items():
        machine = load_machine(profile)
        runs = count_rows(group, _tell, not args.cpu)
        print(f"{of}, {len(group)} rows, from the profile {machine.name}")
        found = fit(runs, machine)
        print(scalars_table(found))
        timed = [run for run in runs if run.row.seconds is not None]
        if timed:
            print(results_table(leave_one_out(timed, machine)))
        for line in memory_lines(runs, machine):
            print(line)
        if args.test:
            tests = read_all(args.test)
            own = [row for row in tests if row.set == of]  # rows of the same set, if there are any
            print(tested(found, count_rows(own or tests, _tell, not args.cpu)))
        if args.out:
            save_machine(found, args.out, f"{machine.name}, fitted to {len(timed)} runs")
            print(f"  wrote {args.out}")


def tested(found: Machine, runs: Sequence[Run]) -> str:
    """Return lines that compare predictions with the times of rows that weren't fitted."""
    lines, errors = ["  rows that were not fitted:"], []
    for run in runs:
        step = predict(run, found).step
        if run.row.seconds is None:
            continue
        errors.append(step / run.row.seconds - 1)
        predicted = f"predicted {step:.3f} +- {uncertainty(run, found):.0%}"
        held = f"{run.layout.fullest[1] / 1e9:.0f} GB"
        lines.append(f"  {run.row.name}: {run.row.seconds:.3f} s, {predicted}, {errors[-1]:+.1%}, {held}")
    if errors:
        mean = sum(map(abs, errors)) / len(errors)
        lines.append(f"  mean absolute error {mean:.1%}, largest {max(map(abs, errors)):.1%}")
    return "\n".join(lines + memory_lines(runs, found))


def _tell(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {of} rows counted", end="\n" if done == of else "", file=sys.stderr, flush=True)
