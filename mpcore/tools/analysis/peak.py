"""Compute how much a pipeline rank holds at the same time, from what each of its stages keeps of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from mpcore.pipeline.messages import receive_early, releases
from mpcore.pipeline.schedules import Schedule
from mpcore.tools.analysis.work import MicroBatchMemory


def peak(plan: Schedule, rank: int, stages: Sequence[MicroBatchMemory], early: bool = False) -> tuple[int, int]:
    """Return the most bytes that a pipeline rank holds besides its own parameters, gradients and optimizer state.

    The function goes through the rank's actions in the order in which `mpcore.pipeline.executor` runs them.

    Args:
        stages: what each stage of the rank keeps.
        early: whether receives are posted early, as on a CPU.

    Returns:
        The most bytes at the end of any forward, and the most at any time, while operators run.

    Example:
        >>> from mpcore.tools.analysis import peak
        >>> from mpcore.tools.analysis.work import MicroBatchMemory
        >>> from mpcore.pipeline.schedules import build_schedule
        >>> stage = MicroBatchMemory(activations=100)  # bytes
        >>> [peak(build_schedule("1f1b", 4, 8), rank, [stage])[0] for rank in range(4)]
        [400, 300, 200, 100]
    """
    of = dict(zip(plan.stages_of(rank), stages, strict=True))
    whole = plan.with_messages if len(plan.ranks) > 1 else plan
    released = releases(whole, rank)
    started: set[int] = set()
    freed: set[int] = set()
    held = most = ever = 0
    missing = sum(kept.made for kept in stages)  # gradients that don't exist yet: a step begins without them
    for action in receive_early(whole, rank) if early else whole.ranks[rank]:
        kind, stage, _ = action
        kept, before = of[stage], stage - 1 in of  # that stage's output is this stage's input, until its backward
        for send in released.get(action, ()):
            held -= of[send.stage].output if send.kind == "SEND_F" else of[send.stage].sent_back
        if kind == "RECV_F":
            held += kept.received
        if kind == "RECV_B":
            held += kept.returned
        if kind == "F":
            ever = max(ever, held + kept.forward_more + (0 if stage in started else kept.gathered) - missing)
            held += kept.activations - kept.received + (0 if stage in started else kept.gathered)
            started.add(stage)
            most = max(most, held)
            held -= kept.output if stage == plan.stages - 1 else 0
        if kind in ("B", "W") and stage not in freed:
            missing -= kept.made
        if kind in ("B", "I", "W"):
            ever = max(ever, held + (kept.weight_more if kind == "W" else kept.backward_more) - missing)
        if kind in ("B", "I"):
            held += kept.sent_back
        if kind == "B" or kind == ("I" if stage else "W"):  # the first stage's whole backward is W
            held -= kept.returned
        if kind == "I":  # an input that the previous stage holds is not freed here
            held += kept.between - (kept.activations - kept.output)
            held += kept.received - kept.between_inputs if before else 0
        if kind in ("B", "W"):
            held -= kept.activations - kept.output if kind == "B" else kept.between
            held += (kept.received if kind == "B" else kept.between_inputs) if before else 0
            held += 0 if stage in freed else kept.unsummed
            freed.add(stage)
        if before and kind in ("B", "W"):
            held -= of[stage - 1].output
    return most, ever
