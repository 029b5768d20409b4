"""Fit the rates of a machine to runs with a known time, and estimate the error of the fit.

Six scalars are fitted on logarithms, each with a prior: few runs can determine only few scalars, and the prior keeps
the other scalars near their values in the profile. The remaining fields of a profile are not fitted: they are
specifications, or were measured.

Source: Gauss-Newton with priors, Tarantola 2005, "Inverse Problem Theory", section 3.2; weights of outliers, Huber
1964, "Robust Estimation of a Location Parameter".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpcore.tools.analysis.layout import Counter, Layout
from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.rows import Row
from mpcore.tools.analysis.seconds import INSIDE, Seconds, estimate
from mpcore.tools.command_line import find_object

NOISE = 0.03
"""The relative standard deviation of a run's time that the fit expects."""
USUAL = 1.345
"""An error of more than so many `NOISE` pulls the fit no harder than this one: a run on a slow node counts little.

Huber's choice: 95 % of the efficiency of least squares where errors are normal."""

SPREADS = {"e_gemm": 0.15, "e_hbm": 0.3, "x_tp": 0.5, "x_dp": 0.8, "tau": 1.0, "cluster": 0.05}
"""The scalars, and what is believed of each before any run: the profile's value within a factor of e^spread, two times
out of three."""
MOST = {"e_gemm": 1.0, "e_hbm": 1.0}
NAMES = tuple(SPREADS)


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


def features(run: Run, machine: Machine) -> Tensor:
    """Return [6], the seconds per step that each scalar governs, with the machine's values.

    The bubble is divided in proportion to the other parts. The last entry is the whole step, which `cluster`
    multiplies.
    """
    found = predict(run, machine)
    busy = found.products + found.attention + found.operators + found.host
    inside = sum(found.exposed.get(axis, 0.0) for axis in INSIDE)
    grown = 1 + found.bubble / max(busy + inside, 1e-30)
    data = sum(found.exposed.values()) - inside
    parts = [
        found.products * grown, found.operators * grown + found.optimizer, inside * grown, data, found.host * grown,
    ]  # fmt: skip
    whole = found.step / machine.cluster
    return torch.tensor([*parts, whole], dtype=torch.float64)


def jacobian(parts: Tensor) -> Tensor:
    """Return [6], the derivative of the logarithm of the step's seconds by the logarithm of each scalar.

    Args:
        parts: [6], from `features`.
    """
    signs = torch.tensor([-1.0, -1, 1, 1, 1, 1], dtype=torch.float64)  # a higher rate lowers the time
    return signs * parts / parts[-1]


def sensitivities(runs: Sequence[Run], machine: Machine) -> Tensor:
    """Return [runs, 6], the `jacobian` of each run."""
    return torch.stack([torch.zeros(len(NAMES)).double(), *(jacobian(features(run, machine)) for run in runs)])[1:]


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
        J = sensitivities(timed, here)
        r = seconds.log() - torch.tensor([predict(run, here).step for run in timed], dtype=torch.float64).log()
        trust = (USUAL * NOISE / r.abs().clamp_min(1e-12)).clamp_max(1.0) / NOISE**2
        information = J.T @ (trust[:, None] * J) + weight
        change = torch.linalg.solve(information, J.T @ (trust * r) + weight @ (mean - theta))
        theta = torch.minimum(theta + change, most)
        if change.abs().max() < 1e-3:
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


def errors_of(run: Run, machine: Machine) -> tuple[float, ...]:
    """Return the relative error of a predicted step that one standard error of each scalar causes, with its sign.

    A scalar that was never fitted has the standard deviation of its prior.
    """
    J = jacobian(features(run, machine)).tolist()
    return tuple(j * machine.errors.get(name, SPREADS[name]) for j, name in zip(J, NAMES, strict=True))


def uncertainty(run: Run, machine: Machine) -> float:
    """Return the relative standard error of a predicted step, from the errors of a machine's scalars.

    The errors are taken as independent.
    """
    return math.hypot(*errors_of(run, machine), NOISE)
