"""The error of a predicted step, from the errors of a machine's rates."""

from __future__ import annotations

from mpcore.tools.analysis.layout import Layout
from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.seconds import INSIDE, estimate

NOISE = 0.03
"""The relative standard deviation of a run's time."""

SPREADS = {"e_gemm": 0.15, "e_hbm": 0.3, "x_tp": 0.5, "x_dp": 0.8, "tau": 1.0, "cluster": 0.05}
"""The rates that may be fitted, and what is believed of each before any run: the profile's value within a factor of
e^spread, two times out of three."""
NAMES = tuple(SPREADS)


def sensitivities(layout: Layout, machine: Machine, unfused: bool = False) -> list[float]:
    """Return [6], the derivative of the logarithm of the step's seconds by the logarithm of each rate of `NAMES`.

    The bubble is divided in proportion to the other parts. `cluster` multiplies the whole step.
    """
    found = estimate(layout, machine, unfused)
    busy = found.products + found.attention + found.operators + found.host
    inside = sum(found.exposed.get(axis, 0.0) for axis in INSIDE)
    grown = 1 + found.bubble / max(busy + inside, 1e-30)
    parts = [  # a higher rate lowers the time
        -found.products * grown, -(found.operators * grown + found.optimizer), inside * grown,
        sum(found.exposed.values()) - inside, found.host * grown,
    ]  # fmt: skip
    whole = found.step / machine.cluster
    return [*(part / whole for part in parts), 1.0]


def errors_of(layout: Layout, machine: Machine, unfused: bool = False) -> tuple[float, ...]:
    """Return the relative error of a predicted step that one standard error of each rate causes, with its sign.

    A rate that was never fitted has the standard deviation of its prior. The errors are taken as independent.
    """
    J = sensitivities(layout, machine, unfused)
    return tuple(j * machine.errors.get(name, SPREADS[name]) for j, name in zip(J, NAMES, strict=True))
