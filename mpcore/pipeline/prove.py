"""Analyze a schedule without a process group: whether it ends, how long it takes, and what it holds in memory.

proof = prove(build_schedule("1f1b", ranks=4, micro_batches=8))
proof.bubble    # 0.2727..., which is (P - 1) / (M + P - 1)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from mpcore.pipeline.schedules import COMPUTE, MESSAGES, Action, Schedule, Span


@dataclass(frozen=True)
class Times:
    """The duration of each kind of action on one stage, in any unit.

    Attributes:
        input: duration of I, the gradient of a stage's input.
        weight: duration of W, the gradient of a stage's weights.
        backward: duration of B, both gradients at once; None: input + weight.
        message: time between the end of an action and the start of the action on another rank that waits for it. Ranks
            compute meanwhile.
        stages: a factor on the durations of each stage; empty: all stages cost the same.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    backward: float | None = None
    message: float = 0.0
    stages: tuple[float, ...] = ()

    def of(self, action: Action) -> float:
        """Return how long the action occupies its rank."""
        backward = self.input + self.weight if self.backward is None else self.backward
        each = {"F": self.forward, "I": self.input, "W": self.weight, "B": backward}.get(action.kind, 0.0)
        return each * (self.stages[action.stage] if self.stages else 1.0)


@dataclass(frozen=True)
class Proof:
    """The result of `prove`.

    Attributes:
        bubble: the idle fraction of all ranks' time between the first start and the last end.
        bubbles: the idle fraction of each rank in the same interval.
        stalls: for each rank, the idle fraction between its own first start and last end: the bubble that remains when
            steps follow each other without a break.
        peaks: for each rank, the largest number of micro-batches whose activations it holds at once. A micro-batch held
            by one of the rank's V stages counts 1/V. B or W frees the activations.
        messages: the number of tensors sent between ranks.
        makespan: the time from the first start to the last end.
        spans: the time of every action, for `mpcore.tools.draw`.
    """

    bubble: float
    bubbles: tuple[float, ...]
    stalls: tuple[float, ...]
    peaks: tuple[float, ...]
    messages: int
    makespan: float
    spans: tuple[Span, ...]


def prove(schedule: Schedule, times: Times = Times()) -> Proof:
    """Prove that a schedule is complete, respects dependencies and does not deadlock; measure its cost.

    A schedule of only F, B, I and W sends each message as soon as its sender is done. In a schedule with send and
    receive actions, a send blocks its rank until the receiver has posted the receive. Two ranks must then post their
    messages in the same order: messages have no names, so two swapped messages of one shape would not be noticed.

    Args:
        schedule: the schedule.
        times: the durations of the actions.

    Returns:
        A `Proof`: times, bubbles, peaks and messages.

    Raises:
        ValueError: if an action is missing, occurs twice, or is on a rank without its stage; or if the schedule
            deadlocks. The message names the first blocked action and what it waits for.
    """
    if times.stages and len(times.stages) != schedule.stages:
        raise ValueError(f"times of {len(times.stages)} stages for a schedule of {schedule.stages}")
    check_complete(schedule)
    check_message_order(schedule)
    return _measure(schedule, times, _run(schedule, times))


def check_complete(schedule: Schedule) -> None:
    """Check that each stage is on one rank, each micro-batch has one F and one B (or I and W), and messages match."""
    where: dict[Action, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action in where:
                raise ValueError(f"{action} is there twice: on rank {where[action]} and on rank {rank}")
            where[action] = rank
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.stage >= schedule.stages or action.micro_batch >= schedule.micro_batches:
                raise ValueError(
                    f"{action} on rank {rank} is outside of {schedule.stages} stages and {schedule.micro_batches} "
                    f"micro-batches"
                )
            owner = schedule.rank_of.get(action.stage)
            if owner not in (rank, None):
                raise ValueError(f"{action} is on rank {rank}, but rank {owner} has the other actions of that stage")
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            there = [kind for kind in COMPUTE if Action(kind, stage, m) in where]
            if there not in (["F", "B"], ["F", "I", "W"]):
                _refuse_kinds(stage, m, there)
    if any(action.kind in MESSAGES for action in where):
        wanted = {pair for action in where if action.kind in COMPUTE for pair in _messages_of(schedule, action)}
        given = {action for action in where if action.kind in MESSAGES}
        for action in sorted(wanted - given):
            raise ValueError(f"{action} is missing: the schedule names other messages")
        for action in sorted(given - wanted):
            raise ValueError(f"{action} on rank {where[action]} is too many: nothing passes there")


def _refuse_kinds(stage: int, micro_batch: int, there: list[str]) -> None:
    if "B" in there and ("I" in there or "W" in there):
        both = next(kind for kind in ("I", "W") if kind in there)
        raise ValueError(
            f"{Action('B', stage, micro_batch)} and {Action(both, stage, micro_batch)} are both there: backward is "
            f"either whole or split"
        )
    wanted = ["F", "I", "W"] if "I" in there or "W" in there else ["F", "B"]
    missing = next(kind for kind in wanted if kind not in there)
    raise ValueError(f"{Action(missing, stage, micro_batch)} is missing")


def _messages_of(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    kind, stage, m = action
    other = stage + 1 if kind == "F" else stage - 1
    if kind == "W" or not 0 <= other < schedule.stages or schedule.rank_of[stage] == schedule.rank_of[other]:
        return ()
    letter = "F" if kind == "F" else "B"
    return Action(f"SEND_{letter}", stage, m), Action(f"RECV_{letter}", other, m)


def check_message_order(schedule: Schedule) -> None:
    """Check that two ranks post their sends and receives to each other in the same order."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind in MESSAGES:
                peer = schedule.rank_of[_peer_stage(action)]
                if action.kind.startswith("SEND"):
                    sent[rank, peer].append(action)
                else:
                    received[peer, rank].append(action)
    for (source, to), sends in sent.items():
        for i, (send, receive) in enumerate(zip(sends, received[source, to], strict=True)):
            if other_end(send) != receive:
                raise ValueError(
                    f"message {i} from rank {source} to rank {to} is sent as {send}, but received as {receive}: "
                    f"{other_end(send)} must be posted there"
                )


def _peer_stage(message: Action) -> int:
    return message.stage + (1 if message.kind in ("SEND_F", "RECV_B") else -1)


def other_end(message: Action) -> Action:
    """Return the send of a receive, or the receive of a send."""
    verb, letter = message.kind.split("_")
    return Action(f"{'RECV' if verb == 'SEND' else 'SEND'}_{letter}", _peer_stage(message), message.micro_batch)


def needs(schedule: Schedule, action: Action, named: bool) -> Iterator[Action]:
    """Yield the actions that must be done before an action can run.

    Args:
        schedule: the schedule.
        action: one of its actions.
        named: whether messages are separate actions, as in `Schedule.with_messages`.
    """
    kind, stage, m = action
    if kind == "F" and stage > 0:
        yield from _arrival(schedule, Action("F", stage - 1, m), named)
    elif kind in ("B", "I"):
        yield Action("F", stage, m)
        if stage < schedule.stages - 1:
            yield from _arrival(schedule, _backward(schedule, stage + 1, m), named)
    elif kind == "W":
        yield Action("I", stage, m)
    elif kind.startswith("SEND"):
        yield Action("F", stage, m) if kind == "SEND_F" else _backward(schedule, stage, m)
        yield other_end(action)


def _backward(schedule: Schedule, stage: int, micro_batch: int) -> Action:
    whole = Action("B", stage, micro_batch)
    return whole if whole in schedule.actions else whole._replace(kind="I")


def _arrival(schedule: Schedule, source: Action, named: bool) -> Iterator[Action]:
    messages = _messages_of(schedule, source) if named else ()
    yield from messages[::-1] or (source,)


def in_order(schedule: Schedule, named: bool) -> Iterator[tuple[int, Action, list[Action]]]:
    """Yield rank and action of a schedule, each after the actions that it needs, which are the third value.

    Each rank's actions come in its order. A schedule that deadlocks raises ValueError.
    """
    done: set[Action] = set()
    position = [0] * len(schedule.ranks)
    going = True
    while going:
        going = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                before = list(needs(schedule, action, named))
                if not done.issuperset(before):
                    break
                yield rank, action, before
                done.add(action)
                position[rank] += 1
                going = True
    if len(done) < sum(map(len, schedule.ranks)):
        raise ValueError(_stuck(schedule, done, position, named))


def _run(schedule: Schedule, times: Times) -> dict[Action, tuple[float, float]]:
    """Return start and end of every action: each rank runs its actions in order, each as early as possible."""
    named = any(action.kind in MESSAGES for actions in schedule.ranks for action in actions)
    done: dict[Action, tuple[float, float]] = {}
    clock = [0.0] * len(schedule.ranks)
    for rank, action, before in in_order(schedule, named):
        delays = (times.message if schedule.rank_of[need.stage] != rank else 0.0 for need in before)
        start = max([clock[rank], *(done[need][1] + delay for need, delay in zip(before, delays, strict=True))])
        done[action] = (start, start + times.of(action))
        if action.kind in COMPUTE:  # messages pass beside the computation
            clock[rank] = done[action][1]
    return done


def _stuck(schedule: Schedule, done: set[Action], position: list[int], named: bool) -> str:
    """Describe, for each blocked rank, the action, what it waits for, and where that is."""
    place = {a: (rank, i) for rank, actions in enumerate(schedule.ranks) for i, a in enumerate(actions)}
    waiting = []
    for rank, actions in enumerate(schedule.ranks):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            need = next(n for n in needs(schedule, action, named) if n not in done)
            on, at = place[need]
            when = f"only later on the same rank, as action {at}" if on == rank else f"action {at} of rank {on}"
            text = f"{action}, action {position[rank]} of rank {rank}, waits for {need}, {when}"
            waiting.append((position[rank], rank, text))
    _, _, first = min(waiting)
    others = "; ".join(text for *_, text in sorted(waiting)[1:4])
    return f"the schedule deadlocks: {first}" + (f" (and {others})" if others else "")


def _measure(schedule: Schedule, times: Times, done: dict[Action, tuple[float, float]]) -> Proof:
    ranks = [[a for a in actions if a.kind in COMPUTE] for actions in schedule.ranks]
    spans = [Span(rank, a, *done[a]) for rank, actions in enumerate(ranks) for a in actions]
    makespan = max(span.end for span in spans)
    busy, bubbles, stalls, peaks = [], [], [], []
    for actions in ranks:
        busy.append(sum(times.of(a) for a in actions))
        span = done[actions[-1]][1] - done[actions[0]][0] if actions else 0.0
        bubbles.append(1 - busy[-1] / makespan if makespan else 0.0)
        stalls.append(1 - busy[-1] / span if span else 0.0)
        peaks.append(_peak(actions))
    passed = sum(len(_messages_of(schedule, a)) // 2 for actions in ranks for a in actions)
    total = makespan * len(ranks)
    bubble = 1 - sum(busy) / total if total else 0.0
    return Proof(bubble, tuple(bubbles), tuple(stalls), tuple(peaks), passed, makespan, tuple(spans))


def _peak(actions: list[Action]) -> float:
    held = most = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most / max(len({a.stage for a in actions}), 1)
