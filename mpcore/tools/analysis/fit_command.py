"""Fit a machine's rates to runs with a known time, and print the error of the fit.

`mpcore calibrate rows.json --machine h100 --out mine.json` fits. `mpcore.tools.analysis.rows` describes the format of
rows. A folder of a run of `examples.gpt.pretrain` is a row too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mpcore.tools import parsers
from mpcore.tools.analysis.calibrate import (
    NAMES,
    Result,
    Run,
    count_rows,
    fit,
    identified,
    leave_one_out,
    predict,
    uncertainty,
)
from mpcore.tools.analysis.machine import Machine, load_machine, save_machine
from mpcore.tools.analysis.rows import Row, read_rows
from mpcore.tools.analysis.runs import read_run
from mpcore.tools.parsers import profile_names


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
    args = parsers.calibrate().parse_args(argv)
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
