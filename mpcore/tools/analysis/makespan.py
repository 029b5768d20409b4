"""Compute the duration of a proved schedule quickly and repeatedly, for different times per action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpcore.pipeline.prove import in_order
from mpcore.pipeline.schedules import COMPUTE, Action, Schedule


@dataclass(frozen=True)
class Resolved:
    """A schedule's actions in an order in which each action comes after those it waits for.

    Attributes:
        steps: for each action its rank, kind, stage, and the index here of the action on another rank whose result it
            needs, or -1.
    """

    ranks: int
    steps: tuple[tuple[int, str, int, int], ...]

    def makespan(self, times: Mapping[str, Sequence[float]], message: float = 0.0) -> float:
        """Return the seconds from the first start to the last end.

        Args:
            times: for each kind (F, I, W, B), the seconds of an action of each stage.
            message: seconds between the end of an action and the start of the action on another rank that waits for it.
        """
        clock, ends = [0.0] * self.ranks, [0.0] * len(self.steps)
        for i, (rank, kind, stage, needed) in enumerate(self.steps):
            start = clock[rank]
            if needed >= 0 and ends[needed] + message > start:
                start = ends[needed] + message
            clock[rank] = ends[i] = start + times[kind][stage]
        return max(clock)


def resolve(schedule: Schedule) -> Resolved:
    """Order the actions of a schedule of F, B, I and W."""
    rows = tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in schedule.ranks)
    place: dict[Action, int] = {}
    steps: list[tuple[int, str, int, int]] = []
    for rank, action, before in in_order(replace(schedule, ranks=rows), named=False):
        remote = [place[other] for other in before if schedule.rank_of[other.stage] != rank]
        place[action] = len(steps)
        steps.append((rank, action.kind, action.stage, remote[0] if remote else -1))
    return Resolved(len(rows), tuple(steps))
