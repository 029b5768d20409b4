"""The outer state of a run: the anchor, the slots of the rule, and who trains which steps.

`Outer` is a state machine without clock, network or randomness. Everything that happens to a run is a line: a dict of
JSON values, which the journal keeps. Whoever applies the same lines and updates to the same start gets the same bits.

    begin   run, rule, first, until, about, anchor    the first line: the steps from first to below until
    join    worker, address                           a number is never used again
    lease   worker, phase, steps, base                the worker trains steps [first, last) from the anchor `base`
    update  version, updates, anchor, workers         one outer step: the sum of its updates, divided by `workers`
    leave   worker, why                               its steps are handed out again
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpcore.checkpoint.tensor_file import raw
from mpcore.tools.workers.rules import Rule, describe, read_rule

Line = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """How a run's workers play together. All workers of a run have the same.

    Attributes:
        every: the steps of a phase.
        wait: "none": apply each update at once. "all", "quorum:k": apply the mean of all workers', or of k updates. A
            run of fewer than k workers stops, so at most one side of a network split goes on with a majority.
        staleness: the most outer steps that an update may have missed; None: no limit. A staler one isn't applied.
        dynamic: whether slow workers take fewer steps, so that all need the same time (Liu et al. 2024, section 5).
        timeout: the seconds without a step after which a worker is left out.
        replicas: how many workers beside the leader hold the outer state.
        update_dtype: "same" sends updates in the anchor's dtype, "bfloat16" in this one: what rounding cuts off is
            added to the worker's next update (error feedback).
        save_every: outer steps between two files of the outer state.
    """

    every: int = 100
    wait: str = "none"
    staleness: int | None = None
    dynamic: bool = False
    timeout: float = 60.0
    replicas: int = 1
    update_dtype: str = "same"
    save_every: int = 10

    def __post_init__(self) -> None:
        kind, _, count = self.wait.partition(":")
        if self.wait not in ("none", "all") and (kind != "quorum" or not count.isdigit() or int(count) < 1):
            raise ValueError(f"wait {self.wait!r} is none of 'none', 'all' and 'quorum:k' with k from 1")
        if self.update_dtype not in ("same", "bfloat16"):
            raise ValueError(f"update_dtype {self.update_dtype!r} is neither 'same' nor 'bfloat16'")
        if self.every < 1 or self.timeout <= 0 or self.replicas < 0 or self.save_every < 1:
            raise ValueError(f"one of {self} is out of range")

    def needed(self, training: int, workers: int) -> int:
        """Return how many updates make an outer step, while `training` of the workers train."""
        kind, _, count = self.wait.partition(":")
        if kind == "quorum":
            return min(int(count), training) if workers >= int(count) else int(count)
        return training if kind == "all" else 1


class Lease(NamedTuple):
    """The steps that a worker trains now.

    Attributes:
        phase: counts the leases of this worker that ended in an update.
        first, last: the steps from `first` to below `last`. Step s has the samples s * B to (s + 1) * B - 1.
        base: the version of the anchor that the worker starts from.
    """

    phase: int
    first: int
    last: int
    base: int


def like(update: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensors:
    """Return an update in the dtypes of the anchor.

    Raises:
        ValueError: if its names or shapes are not the anchor's.
    """
    if {name: x.shape for name, x in update.items()} != {name: x.shape for name, x in anchor.items()}:
        raise ValueError(f"an update of {len(update)} tensors doesn't fit the anchor of {len(anchor)}")
    return {name: update[name].to(x.dtype) for name, x in anchor.items()}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, shapes, dtypes and bits, 32 hex digits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype} ".encode())
        found.update(raw(tensors[name]))
    return found.hexdigest()[:32]


def check_settings(here: Mapping[str, str], run: Mapping[str, str], where: str) -> None:
    """Raise ValueError that names the first settings in which a worker differs from the run, with both values."""
    names = [name for name in sorted(here.keys() | run.keys()) if here.get(name) != run.get(name)]
    names = [name for name in names if name not in ("model", "optimizer")] or names  # a setting says more than a hash
    if names:
        told = [f"{name} is {here.get(name)} here, and {run.get(name)} {where}" for name in names[:3]]
        raise ValueError("; ".join(told))


def new_run(rule: Rule, first: int, until: int, about: Mapping[str, str], anchor: Mapping[str, Tensor]) -> Line:
    """Return the line `begin` of a new run."""
    facts = {"rule": describe(rule), "first": first, "until": until, "about": dict(about), "anchor": digest(anchor)}
    return {"op": "begin", "run": secrets.token_hex(8), **facts, "at": round(time.time(), 3)}


class Outer:
    """The outer state.

    Args:
        begin: the line `begin`.
        anchor: the parameters that the run begins with, by logical name, on the CPU. They are copied.

    Attributes:
        version: the number of outer steps.
        anchor, slots: the tensors, by name; those of the rule by slot and name.
        counter: the first step that no worker has got yet.
        returned: ranges of steps that went back, because their worker left or its update was too stale.
        done: how many steps are in the anchor.
        members: the address of each worker, by number.
        left: why workers left, by number.
        phases: how many updates each worker has handed in.
        leases: what each worker trains now.
    """

    def __init__(self, begin: Line, anchor: Mapping[str, Tensor]) -> None:
        self.begin, self.rule, self.until = begin, read_rule(begin["rule"]), int(begin["until"])
        self.anchor: Tensors = {name: x.detach().clone() for name, x in anchor.items()}
        self.slots = {slot: {name: torch.zeros_like(x) for name, x in anchor.items()} for slot in self.rule.slots}
        self.version = self.next_worker = 0
        self.counter = self.done = int(begin["first"])
        self.returned: list[tuple[int, int]] = []
        self.members: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self.phases: dict[int, int] = {}
        self.leases: dict[int, Lease] = {}

    @property
    def ended(self) -> bool:
        """Whether all steps of the run are in the anchor."""
        return self.done >= self.until

    def free_steps(self, most: int) -> tuple[int, int] | None:
        """Return the steps to train next, at most `most`; None if each is done or some worker's."""
        if self.returned:
            first, last = min(self.returned)
            return first, min(last, first + most)
        return (self.counter, min(self.counter + most, self.until)) if self.counter < self.until else None

    def apply(self, line: Line, updates: Sequence[Mapping[str, Tensor]] = ()) -> None:
        """Change the state by a line. `updates` are the tensors of a line `update`, in the order of its entries."""
        op, worker = line["op"], line.get("worker", -1)
        if op == "join":
            self.members[worker], self.phases[worker] = line["address"], 0
            self.next_worker = worker + 1
        elif op == "lease":
            (first, last), is_new = line["steps"], worker not in self.leases
            self.leases[worker] = Lease(line["phase"], first, last, line["base"])
            if is_new:
                self._take(first, last)
        elif op == "leave":
            self.members.pop(worker)
            self.left[worker] = line["why"]
            if worker in self.leases:
                self._give_back(self.leases.pop(worker))
        elif op == "update":
            self._update(line, updates)

    def apply_facts(self, lines: Sequence[Line]) -> None:
        """Change all but the tensors by lines, for a state whose tensors come from a checkpoint or a peer."""
        for line in lines:
            self.apply(line)

    def tensors(self) -> Tensors:
        """Return all tensors under one name each, for a file or a message. They are not copied."""
        slots = {f"{slot}/{name}": x for slot, held in self.slots.items() for name, x in held.items()}
        return {**{f"anchor/{name}": x for name, x in self.anchor.items()}, **slots}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what `tensors` returned.

        Raises:
            ValueError: if names, shapes or dtypes differ.
        """
        held = self.tensors()
        if {n: (x.shape, x.dtype) for n, x in held.items()} != {n: (x.shape, x.dtype) for n, x in tensors.items()}:
            raise ValueError(f"an outer state of {len(tensors)} tensors doesn't fit this run's of {len(held)}")
        for name, x in held.items():
            x.copy_(tensors[name])

    def _take(self, first: int, last: int) -> None:
        for start, end in [each for each in self.returned if each[0] == first]:
            self.returned.remove((start, end))
            self.returned += [(last, end)] if last < end else []
            return
        self.counter = last

    def _give_back(self, lease: Lease) -> None:
        self.returned.append((lease.first, lease.last))

    @torch.no_grad()
    def _update(self, line: Line, updates: Sequence[Mapping[str, Tensor]]) -> None:
        applied = []
        for place, entry in enumerate(line["updates"]):
            lease = self.leases.pop(entry["worker"])
            self.phases[entry["worker"]] = lease.phase + 1
            if not entry["applied"]:
                self._give_back(lease)
                continue
            self.done += lease.last - lease.first
            applied.append((self.rule.weight(self.version - entry["base"]), place))
        if applied and updates:
            weighted = [(w, updates[place]) for w, place in applied]
            step(self.rule, self.version, self.anchor, self.slots, weighted, line.get("workers", len(applied)))
        self.version = line["version"]


def step(
    rule: Rule, number: int, anchor: Tensors, slots: Mapping[str, Tensors],
    updates: Sequence[tuple[float, Mapping[str, Tensor]]], workers: int,
) -> None:  # fmt: skip
    """Move the anchor by the sum of weighted updates, in their order, divided by a number of workers.

    Args:
        rule: the outer rule.
        number: the outer steps before this one.
        anchor, slots: the outer state, which changes.
        updates: pairs of a weight and the update's tensors, x_base - x_local.
        workers: the number that divides their sum.
    """
    for name, x in anchor.items():
        g = torch.zeros_like(x)
        for weight, update in updates:
            g.add_(update[name].to(g.dtype), alpha=weight)
        rule.step(x, {slot: held[name] for slot, held in slots.items()}, g.div_(workers), number)
