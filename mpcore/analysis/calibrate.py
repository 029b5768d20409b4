"""Fit the rates of a machine to runs with a known time, and say how wrong the fit is.

At most six scalars are fitted, by the logarithm of the error, each with a prior: few runs identify few scalars, and the
prior keeps the others where they were. The others of a profile are specifications, or were measured.

Source: Gauss-Newton with priors, Tarantola 2005, "Inverse Problem Theory", section 3.2; greedy D-optimal design, Fedorov
1972, "Theory of Optimal Experiments".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpcore.analysis.layout import Counter, Layout
from mpcore.analysis.machine import Machine
from mpcore.analysis.rows import Row
from mpcore.analysis.seconds import Seconds, estimate
from mpcore.command_line import find_object

NOISE = 0.03
"""The relative standard deviation of a run's time that the fit expects."""


@dataclass(frozen=True)
class Prior:
    """What is believed of a scalar before any run: its value within a factor of e^spread, two times out of three."""

    value: float
    spread: float
    most: float = math.inf


PRIORS: dict[str, Prior] = {
    "e_gemm": Prior(0.72, 0.15, most=1.0),
    "e_hbm": Prior(0.7, 0.3, most=1.0),
    "x_tp": Prior(0.8, 0.5),
    "x_dp": Prior(0.3, 0.8),
    "tau": Prior(1e-4, 1.0),
    "cluster": Prior(1.03, 0.05),
}
NAMES = tuple(PRIORS)


@dataclass(frozen=True)
class Run:
    """A row and what its layout counts."""

    row: Row
    layout: Layout


@dataclass(frozen=True)
class Fit:
    """A fitted machine.

    Attributes:
        machine: the profile with the fitted scalars.
        errors: by scalar the relative standard error, of runs and prior together.
        identified: the scalars about which the runs say more than the prior does.
    """

    machine: Machine
    errors: Mapping[str, float]
    identified: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """A row's time, what the fit on all rows predicts, and what the fit on all others predicts."""

    row: Row
    seconds: float
    fitted: float
    left_out: float

    @property
    def error(self) -> float:
        """The relative error of the fit on all others."""
        return self.left_out / self.seconds - 1


def count_rows(rows: Sequence[Row], each: Callable[[int, int], None] = lambda done, of: None) -> list[Run]:
    """Count the layouts of rows.

    Raises:
        ValueError: naming the row whose layout is refused.
    """
    counters: dict[str, Counter] = {}
    runs = []
    for i, row in enumerate(rows, start=1):
        try:
            if row.target not in counters:
                counters[row.target] = Counter(find_object(row.target), share=True)
            runs.append(Run(row, counters[row.target].layout(row.arguments, **row.sizes)))
        except (ValueError, SystemExit) as error:
            raise ValueError(f"{row.name}: {error}") from error
        each(i, len(rows))
    return runs


def predict(run: Run, machine: Machine) -> Seconds:
    """Estimate a run's step."""
    return estimate(run.layout, machine, run.row.unfused)


def features(run: Run, machine: Machine) -> Tensor:
    """[6] the seconds of a step that each scalar governs, at the machine's values; the bubble shares as the rest does.

    The last is the whole step, which `cluster` multiplies.
    """
    found = predict(run, machine)
    busy = found.products + found.attention + found.operators + found.host
    inside = sum(found.exposed.get(axis, 0.0) for axis in _inside(found))
    grown = 1 + found.bubble / max(busy + inside, 1e-30)
    data = sum(found.exposed.values()) - inside
    parts = [
        found.products * grown, found.operators * grown + found.optimizer, inside * grown, data, found.host * grown,
    ]  # fmt: skip
    whole = found.step / machine.cluster
    return torch.tensor([*parts, whole], dtype=torch.float64)


def _inside(found: Seconds) -> list[str]:
    from mpcore.analysis.seconds import INSIDE

    return [axis for axis in found.exposed if axis in INSIDE]


def jacobian(run: Run, machine: Machine) -> Tensor:
    """[6] how the logarithm of a step's seconds changes with the logarithm of each scalar."""
    parts = features(run, machine)
    signs = torch.tensor([-1.0, -1, 1, 1, 1, 1], dtype=torch.float64)  # of rates that are reached, time falls
    return signs * parts / parts[-1]


def fit(runs: Sequence[Run], machine: Machine, priors: Mapping[str, Prior] = PRIORS, steps: int = 12) -> Fit:
    """Fit the six scalars to runs: Gauss-Newton on logarithms, with priors.

    Args:
        runs: at least one with a time.
        machine: gives all that isn't fitted.
        priors: of each scalar.
        steps: at most.
    """
    timed = [run for run in runs if run.row.seconds is not None]
    mean = torch.tensor([math.log(priors[name].value) for name in NAMES], dtype=torch.float64)
    most = torch.tensor([math.log(priors[name].most) for name in NAMES], dtype=torch.float64)
    weight = torch.tensor([priors[name].spread ** -2 for name in NAMES], dtype=torch.float64).diag()
    theta, information = mean.clone(), weight
    for _ in range(steps):
        here = with_scalars(machine, theta)
        J = torch.stack([jacobian(run, here) for run in timed])
        r = torch.tensor([math.log(run.row.seconds / predict(run, here).step) for run in timed], dtype=torch.float64)  # type: ignore[operator]
        information = J.T @ J / NOISE**2 + weight
        change = torch.linalg.solve(information, J.T @ r / NOISE**2 + weight @ (mean - theta))
        theta = torch.minimum(theta + change, most)
        if change.abs().max() < 1e-4:
            break
    covariance = torch.linalg.inv(information)
    errors = {name: float(covariance[i, i].sqrt()) for i, name in enumerate(NAMES)}
    known = tuple(name for name in NAMES if errors[name] < priors[name].spread / 2)
    source = f"fitted: {len(timed)} runs"
    fitted = with_scalars(machine, theta)
    sources = {**machine.sources, **{name: source for name in NAMES}}
    return Fit(replace(fitted, sources=sources, errors=errors), errors, known)


def with_scalars(machine: Machine, theta: Tensor) -> Machine:
    """The machine with these logarithms of the six scalars."""
    return replace(machine, **{name: math.exp(float(value)) for name, value in zip(NAMES, theta, strict=True)})


def leave_one_out(runs: Sequence[Run], machine: Machine) -> list[Result]:
    """Predict each run from a fit on all others."""
    timed = [run for run in runs if run.row.seconds is not None]
    whole = fit(timed, machine).machine
    results = []
    for i, run in enumerate(timed):
        others = [*timed[:i], *timed[i + 1 :]]
        left = fit(others, machine).machine if others else with_scalars(machine, _prior_mean())
        assert run.row.seconds is not None
        results.append(Result(run.row, run.row.seconds, predict(run, whole).step, predict(run, left).step))
    return results


def _prior_mean() -> Tensor:
    return torch.tensor([math.log(prior.value) for prior in PRIORS.values()], dtype=torch.float64)


def suggest(runs: Sequence[Run], machine: Machine, n: int, measured: Sequence[Run] = ()) -> list[Run]:
    """Choose the runs to measure first: each next one tells most about the scalars, given the ones before.

    Args:
        runs: candidates; no times are needed.
        machine: the rates that are believed.
        n: how many.
        measured: runs that are measured already.
    """
    weight = torch.tensor([prior.spread**-2 for prior in PRIORS.values()], dtype=torch.float64).diag()
    rows = [jacobian(run, machine) for run in runs]
    for run in measured:
        J = jacobian(run, machine)
        weight = weight + torch.outer(J, J) / NOISE**2
    chosen: list[int] = []
    for _ in range(min(n, len(runs))):
        inverse = torch.linalg.inv(weight)
        gains = [-1.0 if i in chosen else float(J @ inverse @ J) for i, J in enumerate(rows)]
        best = max(range(len(runs)), key=gains.__getitem__)
        chosen.append(best)
        weight = weight + torch.outer(rows[best], rows[best]) / NOISE**2
    return [runs[i] for i in chosen]
