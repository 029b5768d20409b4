"""Fit the rates of a machine to runs with a known time, and estimate the error of the fit.

Six scalars are fitted on logarithms, each with a prior: few runs can determine only few scalars, and the prior keeps
the other scalars near their values in the profile. The remaining fields of a profile are not fitted: they are
specifications, or were measured.

Source: Gauss-Newton with priors, Tarantola 2005, "Inverse Problem Theory", section 3.2; weights of outliers, Huber
1964, "Robust Estimation of a Location Parameter"; designs by the variance of predictions, Fedorov 1972, "Theory of
Optimal Experiments".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
NODES = 0.05
"""Where the source of some runs tells of several states of its nodes, each has a factor of its own: within e^0.05 of
the others, two times out of three."""


@dataclass(frozen=True)
class Run:
    """A row, and the counts of its layout."""

    row: Row
    layout: Layout


@dataclass(frozen=True)
class Fit:
    """A fitted machine.

    Attributes:
        errors: the relative standard error of each scalar, from the runs and the prior together.
        identified: the scalars that the runs determine better than the prior does.
        covariance: [6 + states, 6 + states], the covariance of the logarithms of the scalars and of the states'
            factors.
        states: for each state of the nodes that a row names, the factor of a step's seconds.
    """

    machine: Machine
    errors: Mapping[str, float]
    identified: tuple[str, ...]
    covariance: Tensor
    states: Mapping[str, float] = field(default_factory=dict)

    def predict(self, run: Run) -> Seconds:
        """Predict the seconds of a run's step, by part."""
        return predict(run, _in_state(self.machine, self.states.get(run.row.nodes, 1.0)))

    def uncertainty(self, run: Run) -> float:
        """Return the relative standard error of a run's predicted time.

        It includes the errors of the scalars and of the nodes' state, and `NOISE`.
        """
        (J,) = sensitivities([run], self.machine, list(self.states))
        is_new = run.row.nodes not in ("", *self.states)
        return math.sqrt(float(J @ self.covariance @ J) + is_new * NODES**2 + NOISE**2)


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


def states_of(runs: Sequence[Run]) -> list[str]:
    """Return the states of nodes that rows name. A row that names none has the usual state."""
    return list(dict.fromkeys(run.row.nodes for run in runs if run.row.nodes))


def sensitivities(runs: Sequence[Run], machine: Machine, states: Sequence[str]) -> Tensor:
    """Return [runs, 6 + states]: the `jacobian` of each run, and 1 for the state that its nodes are in."""
    rows = [[*jacobian(features(run, machine)).tolist(), *(float(run.row.nodes == s) for s in states)] for run in runs]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(runs), len(NAMES) + len(states))


def _in_state(machine: Machine, factor: float) -> Machine:
    return replace(machine, cluster=machine.cluster * factor)


def fit(runs: Sequence[Run], machine: Machine, steps: int = 30) -> Fit:
    """Fit the six scalars to runs: Gauss-Newton on logarithms, with priors and with lower weights for outliers.

    Args:
        runs: the runs; those without a time are ignored.
        machine: the values that aren't fitted, and the means of the priors.
        steps: the largest number of Gauss-Newton steps.
    """
    timed = [run for run in runs if run.row.seconds is not None]
    states = states_of(timed)
    mean, weight = torch.cat([scalars_of(machine), torch.zeros(len(states)).double()]), _weight(states)
    most = torch.tensor([*(math.log(MOST.get(name, math.inf)) for name in NAMES), *(math.inf for _ in states)])
    seconds = torch.tensor([run.row.seconds for run in timed], dtype=torch.float64)
    theta, information = mean.clone(), weight
    for _ in range(steps):
        here = with_scalars(machine, theta[: len(NAMES)])
        J = sensitivities(timed, here, states)
        logs = torch.tensor([predict(run, here).step for run in timed], dtype=torch.float64).log()
        r = seconds.log() - logs - J[:, len(NAMES) :] @ theta[len(NAMES) :]
        trust = (USUAL * NOISE / r.abs().clamp_min(1e-12)).clamp_max(1.0) / NOISE**2
        information = J.T @ (trust[:, None] * J) + weight
        change = torch.linalg.solve(information, J.T @ (trust * r) + weight @ (mean - theta))
        theta = torch.minimum(theta + change, most)
        if change.abs().max() < 1e-3:
            break
    covariance = torch.linalg.inv(information)
    errors = {name: float(covariance[i, i].sqrt()) for i, name in enumerate(NAMES)}
    known = tuple(name for name in NAMES if errors[name] < SPREADS[name] / 2)
    sources = machine.sources | dict.fromkeys(NAMES, f"fitted: {len(timed)} runs")
    fitted = replace(with_scalars(machine, theta[: len(NAMES)]), sources=sources, errors=errors)
    factors = dict(zip(states, theta[len(NAMES) :].exp().tolist(), strict=True))
    return Fit(fitted, errors, known, covariance, factors)


def scalars_of(machine: Machine) -> Tensor:
    """Return [6], the logarithms of a machine's scalars."""
    return torch.tensor([math.log(max(getattr(machine, name), 1e-12)) for name in NAMES], dtype=torch.float64)


def _weight(states: Sequence[str] = ()) -> Tensor:
    spreads = [*SPREADS.values(), *(NODES for _ in states)]
    return torch.tensor([spread**-2 for spread in spreads], dtype=torch.float64).diag()


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
        results.append(Result(run.row, run.row.seconds, whole.predict(run).step, left.predict(run).step))
    return results


def suggest(runs: Sequence[Run], machine: Machine, n: int, measured: Sequence[Run] = ()) -> list[Run]:
    """Choose the runs to measure first: each choice lowers the errors of all predictions most.

    A run that is unlike all others determines a scalar well, but says little about the times of the others. So the
    criterion is the error of all predictions.

    Args:
        runs: the candidates. They need no times.
        machine: the present estimate of the rates.
        n: the number of runs to choose.
        measured: runs that are measured already.

    Returns:
        The chosen runs, the most useful first.
    """
    states = states_of([*runs, *measured])
    known, J = sensitivities(measured, machine, states), sensitivities(runs, machine, states)
    weight = _weight(states) + known.T @ known / NOISE**2
    chosen: list[int] = []
    for _ in range(min(n, len(runs))):
        shared = J @ torch.linalg.solve(weight, J.T)  # covariances of predictions
        after = shared.diagonal()[:, None] - shared.square() / (NOISE**2 + shared.diagonal())  # [runs, choice]
        left = (after + NOISE**2).log().sum(0)
        left[chosen] = math.inf
        chosen.append(int(left.argmin()))
        weight = weight + torch.outer(J[chosen[-1]], J[chosen[-1]]) / NOISE**2
    return [runs[i] for i in chosen]


@dataclass(frozen=True)
class Sweep:
    """A sweep of layouts, predicted after some of its runs were measured.

    Attributes:
        errors: the relative error of the predicted time, for each other run with a time.
        regrets: for each model and batch with several layouts, how much longer the layout that seems fastest takes than
            the one that is fastest, as a relative number. A measured run seems as fast as it is; another run seems as
            fast as predicted.
    """

    chosen: tuple[Run, ...]
    found: Fit
    errors: Mapping[str, float]
    regrets: Mapping[str, float]


LAID_OUT = ("--micro-batch", "--schedule", "--virtual-stages", "--stage-blocks", "--zero", "--recompute")
"""Flags with a value that are of the layout, not of the model."""


def predict_sweep(runs: Sequence[Run], machine: Machine, n: int) -> Sweep:
    """Choose n runs of a sweep with `suggest`, fit the machine to them, and predict all runs."""
    timed = [run for run in runs if run.row.seconds is not None]
    chosen = suggest(timed, machine, n)
    return judge_sweep(timed, chosen, fit(chosen, machine))


def judge_sweep(timed: Sequence[Run], chosen: Sequence[Run], found: Fit) -> Sweep:
    """Compare the predictions of a sweep with its measured times. The times of `chosen` count as known."""
    steps = [(run, run.row.seconds or 0.0, found.predict(run).step) for run in timed]
    models: dict[str, list[tuple[float, float]]] = {}
    for run, seconds, step in steps:
        words = run.row.arguments
        kept = [w for i, w in enumerate(words) if w not in LAID_OUT and (not i or words[i - 1] not in LAID_OUT)]
        seems = seconds if run in chosen else step
        models.setdefault(" ".join([*kept, str(run.row.gradient_bytes)]), []).append((seems, seconds))
    regrets = {name: min(m)[1] / min(s for _, s in m) - 1 for name, m in models.items() if len(m) > 1}
    errors = {run.row.name: step / seconds - 1 for run, seconds, step in steps if run not in chosen}
    return Sweep(tuple(chosen), found, errors, regrets)


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
