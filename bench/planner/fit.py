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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from bench.planner.rows import Row, read_rows, read_run
from mpcore.tools.analysis.layout import Counter, Layout
from mpcore.tools.analysis.machine import Machine, load_machine, save_machine
from mpcore.tools.analysis.seconds import NAMES, NOISE, SPREADS, errors_of, estimate, sensitivities
from mpcore.tools.command_line import Parser, find_object
from mpcore.tools.parsers import profile_names

# An error of more than so many `NOISE` pulls the fit no harder than this one: a run on a slow node counts little.
# Huber's choice: 95 % of the efficiency of least squares where errors are normal.
USUAL = 1.345
MOST = {"e_gemm": 1.0, "e_hbm": 1.0}


@dataclass(frozen=True)
class Run:
    """A row, and the counts of its layout."""

    row: Row
    layout: Layout


def with_gradients(layout: Layout, size: int) -> Layout:
    """Return the same layout in a runtime whose gradients take `size` bytes per parameter instead of 4."""
    each = [(kept, kept.unsummed * size // 4, kept.made * size // 4) for kept in layout.stages]
    stages = tuple(replace(kept, unsummed=unsummed, made=made) for kept, unsummed, made in each)
    held = tuple(replace(each, gradients=each.gradients * size // 4) for each in layout.held)
    return replace(layout, stages=stages, held=held)


def count_rows(rows: Sequence[Row], stands_for_gpu: bool = True) -> list[Run]:
    """Count the layouts of rows."""
    counters: dict[str, Counter] = {}
    runs = []
    for row in tqdm(rows, unit="row", disable=None):
        try:
            if row.target not in counters:
                counters[row.target] = Counter(find_object(row.target), stands_for_gpu, share=True)
            layout = counters[row.target].layout(row.arguments, **row.sizes)
            runs.append(Run(row, with_gradients(layout, row.gradient_bytes)))
        except (ValueError, SystemExit) as error:
            raise ValueError(f"{row.name}: {error}") from error
    return runs


def predict(run: Run, machine: Machine) -> float:
    """Estimate the seconds of a run's step."""
    return estimate(run.layout, machine, run.row.unfused).step


def uncertainty(run: Run, machine: Machine) -> float:
    """Return the relative standard error of a predicted step, from the errors of a machine's rates."""
    return math.hypot(*errors_of(run.layout, machine, run.row.unfused), NOISE)


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
    runs = [run for run in runs if run.row.seconds is not None]
    mean, weight = scalars_of(machine), torch.tensor([s**-2 for s in SPREADS.values()], dtype=torch.float64).diag()
    most = torch.tensor([math.log(MOST.get(name, math.inf)) for name in NAMES])
    seconds = torch.tensor([run.row.seconds for run in runs], dtype=torch.float64)
    theta, information = mean.clone(), weight
    for _ in range(steps):
        here = with_scalars(machine, theta)
        J = torch.tensor([sensitivities(run.layout, here, run.row.unfused) for run in runs], dtype=torch.float64)
        J = J.reshape(-1, len(NAMES))
        r = seconds.log() - torch.tensor([predict(run, here) for run in runs], dtype=torch.float64).log()
        trust = (USUAL * NOISE / r.abs().clamp_min(1e-12)).clamp_max(1.0) / NOISE**2
        information = J.T @ (trust[:, None] * J) + weight
        change = torch.linalg.solve(information, J.T @ (trust * r) + weight @ (mean - theta))
        theta = torch.minimum(theta + change, most)
        if change.abs().max() < 1e-4:
            break
    errors = torch.linalg.inv(information).diagonal().sqrt().tolist()
    sources = machine.sources | dict.fromkeys(NAMES, f"fitted: {len(runs)} runs")
    return replace(with_scalars(machine, theta), sources=sources, errors=dict(zip(NAMES, errors, strict=True)))


def scalars_of(machine: Machine) -> Tensor:
    """Return [6], the logarithms of a machine's scalars."""
    return torch.tensor([math.log(max(getattr(machine, name), 1e-12)) for name in NAMES], dtype=torch.float64)


def with_scalars(machine: Machine, theta: Tensor) -> Machine:
    """Return the machine with new scalars. `theta`, [6], has their logarithms."""
    return replace(machine, **{name: math.exp(float(value)) for name, value in zip(NAMES, theta, strict=True)})


def identified(machine: Machine) -> tuple[str, ...]:
    """Return the scalars of a fitted machine that the runs determine better than the prior does."""
    return tuple(name for name in NAMES if machine.errors[name] < SPREADS[name] / 2)


def leave_one_out(runs: Sequence[Run], machine: Machine) -> list[tuple[Run, float]]:
    """Return each run with a time, and its seconds as a fit on all other runs predicts them."""
    timed = [run for run in runs if run.row.seconds is not None]
    return [(run, predict(run, fit([*timed[:i], *timed[i + 1 :]], machine))) for i, run in enumerate(timed)]


def mean_and_most(results: Sequence[tuple[Run, float]]) -> tuple[float, float]:
    """Return the mean and the largest of the absolute relative errors of predictions."""
    errors = [abs(step / (run.row.seconds or math.nan) - 1) for run, step in results]
    return sum(errors) / len(errors), max(errors)


def print_scalars(machine: Machine) -> None:
    """Print a table of the fitted scalars."""
    print(f"  {'scalar':<10} {'value':>10} {'standard error':>15}")
    for name in NAMES:
        mark = "" if name in identified(machine) else "  not identified: the prior says as much"
        print(f"  {name:<10} {getattr(machine, name):>10.4g} {machine.errors[name]:>15.0%}{mark}")


def print_results(what: str, results: Sequence[tuple[Run, float]], machine: Machine) -> None:
    """Print a table with one line per prediction, and the mean error. `machine` is the fit on all rows."""
    wide = max(len(run.row.name) for run, _ in results)
    print(f"  {what:<{wide}} {'seconds':>9} {'fitted':>9} {'predicted':>9} {'error':>7} {'+-':>4} {'GB':>5}")
    for run, step in results:
        seconds, held = run.row.seconds or math.nan, run.layout.fullest[1] / 1e9
        print(f"  {run.row.name:<{wide}} {seconds:>9.3f} {predict(run, machine):>9.3f} {step:>9.3f} "
              f"{step / seconds - 1:>+7.1%} {uncertainty(run, machine):>4.0%} {held:>5.0f}")  # fmt: skip
    mean, most = mean_and_most(results)
    print(f"  mean absolute error of {what} {mean:.1%}, largest {most:.1%}")


def print_memory(runs: Sequence[Run], machine: Machine) -> None:
    """Compare the rows that are planned to run out of memory with the rows that did."""
    large = [run for run in runs if run.layout.fullest[1] + machine.reserve > machine.memory]
    alarms = [run.row.name for run in large if run.row.seconds is not None]
    failed = sum(run.row.seconds is None for run in runs)
    if alarms:
        print(f"  planned too large: {', '.join(alarms)}, which ran")
    if failed:
        seen, ran = len(large) - len(alarms), len(runs) - failed
        print(f"  out of memory: {seen} of {failed} were planned so, {len(alarms)} of {ran} that ran too")


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
    add("--test", action="append", default=[], metavar="ROWS", help="rows to predict, which are not fitted")
    add("--out", type=Path, metavar="PROFILE", help="write the fitted profile, a .json file")
    add("--cpu", action="store_true", help="count the operators of a CPU instead of a GPU's kernels")
    return parser.parse_args(argv)


def read_all(names: Sequence[str]) -> list[Row]:
    """Read rows from files and folders."""
    return [row for path in map(Path, names) for row in ([read_run(path)] if path.is_dir() else read_rows(path))]


def main(argv: list[str] | None = None) -> None:
    """Run the command. Rows of each set and profile are fitted separately."""
    args = parse(argv)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in read_all(args.rows):
        if not args.set or row.set in args.set:
            groups.setdefault((row.set, args.machine or row.machine), []).append(row)
    if not groups:
        raise ValueError(f"no row is of --set {', '.join(args.set)}")
    for (of, profile), group in groups.items():
        if not profile:
            raise ValueError(
                f"{group[0].name}: no machine; give --machine or the column machine: {', '.join(profile_names())}"
            )
        machine = load_machine(profile)
        runs = count_rows(group, not args.cpu)
        print(f"{of}, {len(group)} rows, from the profile {machine.name}")
        found = fit(runs, machine)
        print_scalars(found)
        results = leave_one_out(runs, machine)
        if results:
            print_results("rows left out", results, found)
        print_memory(runs, machine)
        tests = read_all(args.test)
        tests = count_rows([row for row in tests if row.set == of] or tests, not args.cpu)
        known = [(run, predict(run, found)) for run in tests if run.row.seconds is not None]
        if known:
            print_results("rows that were not fitted", known, found)
        print_memory(tests, found)
        if args.out:
            save_machine(found, args.out, f"{machine.name}, fitted to {len(results)} runs")
            print(f"  wrote {args.out}")
