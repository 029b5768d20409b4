"""Outer rules: how the updates of workers move the anchor.

A rule sees one tensor at a time: the anchor x, its slots (such as a momentum), and the outer gradient g. g is the sum
of the updates x_base - x_local of one outer step, each times its `weight`, divided by the number of updates or of
workers (`shares`). All tensors of a rule have one shape and dtype, and change in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """Base class of the outer rules.

    Attributes:
        slots: the names of the tensors that the rule keeps for each parameter. They begin as zeros.
        shares: whether the updates of an outer step are summed and divided by the number of workers of the run, so that
            each worker counts once, however many of them wait. Otherwise they are divided by the number of updates.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    shares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            low, high = (0.0, 1.0) if name == "momentum" else (0.0, float("inf"))
            if not isinstance(value, bool) and not low <= value < high:
                raise ValueError(f"{type(self).__name__} got {name} {value}, which is not from {low:g} to below {high}")

    def weight(self, staleness: int) -> float:
        """Return the weight of an update that missed `staleness` outer steps."""
        return 1.0

    def step(self, x: Tensor, slots: Mapping[str, Tensor], g: Tensor, number: int) -> None:
        """Move the anchor of a tensor. `number` counts the outer steps before this one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Average(Rule):
    """Add `lr` times the mean update. With updates of all workers and lr 1: parameter averaging (Local SGD).

    Source: Stich 2018, arXiv:1805.09767. If nobody waits, lr divided by the number of workers is the mixing weight of
    Xie et al. 2019, arXiv:1903.03934.
    """

    lr: float = 1.0

    shares: ClassVar[bool] = True

    def step(self, x: Tensor, slots: Mapping[str, Tensor], g: Tensor, number: int) -> None:
        """x <- x - lr g."""
        x.sub_(g, alpha=self.lr)


@dataclass(frozen=True)
class Nesterov(Rule):
    """SGD with Nesterov momentum, as `torch.optim.SGD`: DiLoCo's outer optimizer (arXiv:2311.08105, algorithm 1).

    `decay` lets an update count less the staler it is (the polynomial of arXiv:1903.03934, section 5.2).
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    decay: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    shares: ClassVar[bool] = True

    def weight(self, staleness: int) -> float:
        """Return (1 + staleness)^-decay."""
        return (1.0 + staleness) ** -self.decay

    def step(self, x: Tensor, slots: Mapping[str, Tensor], g: Tensor, number: int) -> None:
        """m <- momentum m + g; x <- x - lr (g + momentum m)."""
        m = slots["momentum"].mul_(self.momentum).add_(g)
        x.sub_(g.add(m, alpha=self.momentum) if self.nesterov else m, alpha=self.lr)


@dataclass(frozen=True)
class DelayedNesterov(Rule):
    """Delayed Nesterov: the momentum takes the mean of `buffer` updates, between which the anchor moves by gradients.

    Source: Liu et al. 2024, arXiv:2401.09135, algorithm 3.

    Args:
        lr, momentum: epsilon and beta of the paper.
        buffer: N, how many updates the momentum takes at once. The number of workers is usual.
        activation: c, from 0 to 1/N: how much of the momentum each update applies. The rest comes with the N-th.
    """

    lr: float = 0.7
    momentum: float = 0.9
    buffer: int = 4
    activation: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ("momentum", "buffer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer < 1 or self.buffer % 1 or self.activation * self.buffer > 1:
            raise ValueError(f"activation {self.activation} is not from 0 to 1/buffer, and buffer is {self.buffer}")

    def step(self, x: Tensor, slots: Mapping[str, Tensor], g: Tensor, number: int) -> None:
        """m <- beta m + buffer / N at each N-th update; x <- x - epsilon (c' beta m + g / N)."""
        m, held, share = slots["momentum"], slots["buffer"].add_(g), self.activation
        if (number + 1) % self.buffer == 0:
            m.mul_(self.momentum).add_(held, alpha=1 / self.buffer)
            held.zero_()
            share = 1 - self.activation * self.buffer + self.activation
        x.sub_(g.div(self.buffer).add_(m, alpha=share * self.momentum), alpha=self.lr)


@dataclass(frozen=True)
class HeLoCo(Rule):
    """Turn an update towards the momentum where it points elsewhere, tensor by tensor; then Nesterov momentum.

    Source: Al Asif et al. 2026, arXiv:2606.00271. The equations are from a collection of optimizers that restates the
    paper (github.com/junaidaliop/zij, docs/math/heloco.md). It gives no values of the constants: choose your own.

    Args:
        keep: the cosine of update and momentum from which an update stays unchanged (c_ok).
        shrink, shrink_most: for a negative cosine, how much of the update's part along the momentum is removed, and the
            largest share (k_s, beta_max).
        turn: for a cosine from 0 to `keep`, how far the direction turns to the momentum's (k_d).
        kappa: a large momentum lowers the trust in the update by this factor.
        lr, momentum: those of the outer step, whose momentum is a mean: m <- momentum m + (1 - momentum) g.
    """

    keep: float
    shrink: float
    shrink_most: float
    turn: float
    kappa: float
    lr: float = 0.7
    momentum: float = 0.9

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def corrected(self, g: Tensor, m: Tensor) -> Tensor:
        """Return the update that replaces g."""
        tiny = torch.finfo(g.dtype).tiny
        size, most = g.norm(), m.norm()
        if size == 0 or most == 0:
            return g
        u, v = g / size, m / most
        cosine, trust = float((u * v).sum()), float(size / (size + self.kappa * most + tiny))
        if cosine >= self.keep:
            return g
        if cosine < 0:
            return g - min(self.shrink * -cosine * trust, self.shrink_most) * cosine * size * v
        share = min(self.turn * (1 - cosine) * trust, 1.0)
        turned = (1 - share) * u + share * v
        return size * turned / turned.norm().clamp_min(tiny)

    def step(self, x: Tensor, slots: Mapping[str, Tensor], g: Tensor, number: int) -> None:
        """m <- momentum m + (1 - momentum) g'; x <- x - lr (g' + momentum m), of the corrected g'."""
        g = self.corrected(g, slots["momentum"])
        m = slots["momentum"].mul_(self.momentum).add_(g, alpha=1 - self.momentum)
        x.sub_(g.add(m, alpha=self.momentum), alpha=self.lr)


RULES = {rule.__name__: rule for rule in (Average, Nesterov, DelayedNesterov, HeLoCo)}


def describe(rule: Rule) -> dict[str, Any]:
    """Return a rule as JSON values, for `read_rule`."""
    return {"name": type(rule).__name__, **asdict(rule)}


def read_rule(said: Mapping[str, Any]) -> Rule:
    """Return the rule that `describe` described.

    Raises:
        ValueError: if there is no such rule.
    """
    options = {name: value for name, value in said.items() if name != "name"}
    if said.get("name") not in RULES:
        raise ValueError(f"the outer rule {said.get('name')!r} is none of {', '.join(RULES)}")
    try:
        return RULES[said["name"]](**options)
    except TypeError as error:
        raise ValueError(f"the outer rule {said['name']} doesn't take these options: {error}") from None
