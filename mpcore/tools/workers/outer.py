"""The outer state of a run: the anchor, the slots of the rule, and who trains which steps.

`Outer` is a state machine without clock, network or randomness. Everything that happens to a run is a line: a dict of
JSON values, which the journal keeps. Whoever applies the same lines and updates to the same start gets the same bits.

    begin   run, rule, first, until, about, anchor    the first line: the steps from first to below until
            averaged                                  the tensors that aren't trained, which no rule moves
    join    worker, address                           a number is never used again
    lease   worker, phase, steps, base                the worker trains steps [first, last) from the anchor `base`
    update  version, updates, anchor, workers         one outer step: the sum of its updates, divided by `workers`
    leave   worker, why                               its steps are handed out again
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mpcore.checkpoint.tensor_file import raw
from mpcore.tools.workers.rules import Rule, describe, read_rule

Line = dict[str, Any]
Tensors = dict[str, Tensor]
ENDED, STOPPED = "it ended", "it stopped"  # why a worker left that said so
_BLOCK, _SCALE = 256, "|scale"  # values of an int8 update with one scale, and how the names of scales end


@dataclass(frozen=True)
class Options:
    """How a run's workers play together. All workers of a run have the same.

    Attributes:
        every: the steps of a phase.
        wait: "none": apply each update at once. "all", "quorum:k": apply the mean of all workers', or of k updates. A
            run of fewer than k workers stops, so at most one side of a network split goes on with a majority.
        staleness: the most outer steps that an update may have missed; None: no limit. A staler one isn't applied.
        dynamic: whether slow workers take fewer steps, so that all need the same time (Liu et al. 2024, section 5). The
            first phase of a worker has every / 10 steps: it measures the speed.
        timeout: the seconds without a step after which a worker is left out.
        replicas: how many workers beside the leader hold the outer state.
        update_dtype: "same" sends updates in the anchor's dtype, "bfloat16" or "int8" (with a float32 scale for each
            256 values) in this one: what rounding cuts off is added to the worker's next update (error feedback).
        save_every: outer steps between two files of the outer state.
        overlap: whether a worker trains its next phase while its update and the new anchor travel.
    """

    every: int = 100
    wait: str = "all"
    staleness: int | None = None
    dynamic: bool = True
    timeout: float = 60.0
    replicas: int = 1
    update_dtype: str = "same"
    save_every: int = 10
    overlap: bool = False

    def __post_init__(self) -> None:
        kind, _, count = self.wait.partition(":")
        if self.wait not in ("none", "all") and (kind != "quorum" or not count.isdigit() or int(count) < 1):
            raise ValueError(f"wait {self.wait!r} is none of 'none', 'all' and 'quorum:k' with k from 1")
        if self.update_dtype not in ("same", "bfloat16", "int8"):
            raise ValueError(f"update_dtype {self.update_dtype!r} is none of 'same', 'bfloat16' and 'int8'")
        least = min(self.every - 1, self.replicas, self.save_every - 1, self.staleness or 0)
        if least < 0 or not self.timeout > 0:
            raise ValueError(f"one of {self} is out of range")

    def needed(self, training: int, workers: int) -> int:
        """Return how many updates make an outer step, while `training` of the workers train."""
        kind, _, count = self.wait.partition(":")
        if kind == "quorum":
            return min(int(count), training) if workers >= int(count) else int(count)
        return training if kind == "all" else 1

    def steps_of(self, worker: int, seconds: Mapping[int, float], left: int) -> int:
        """Return the steps of a worker's next phase, so that phases take the same time, those at the end too.

        `seconds` are those of a step of each worker, 0 before its first; `left` steps are not in the anchor yet.
        """
        own, known = seconds.get(worker), [each for each in seconds.values() if each]
        if not self.dynamic or not own:
            return max(self.every // 10, 1) if self.dynamic else self.every
        most = sum(self.every * min(known) / each for each in known)  # steps of all workers
        phases = max(math.ceil(left / most), 1)
        steps = self.every * min(known) / own * left / (phases * most)
        return max(math.ceil(steps) if phases == 1 else int(steps), 1)


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


def rounded(update: Mapping[str, Tensor], dtype: str) -> Tensors:
    """Return an update in bfloat16, or in int8 with a scale for each 256 values. `like` makes floats of it again."""
    if dtype == "bfloat16":
        return {name: x.to(torch.bfloat16) for name, x in update.items()}
    found = {}
    for name, x in update.items():
        rows = pad(x.flatten(), (0, -x.numel() % _BLOCK)).view(-1, _BLOCK)
        scale = rows.abs().amax(1).div(127).float()  # not finite if a value isn't: the whole block becomes NaN
        steps = rows / scale.clamp_min(torch.finfo(scale.dtype).tiny)[:, None]
        found[name] = steps.round().to(torch.int8).flatten()[: x.numel()].view_as(x)
        found[name + _SCALE] = scale
    return found


def like(update: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensors:
    """Return an update in the dtypes of the anchor.

    Raises:
        ValueError: if its names or shapes are not the anchor's.
    """
    scaled = [name for name in anchor if name + _SCALE in update]
    shapes = {name: x.shape for name, x in anchor.items()}
    shapes |= {name + _SCALE: torch.Size([-(-anchor[name].numel() // _BLOCK)]) for name in scaled}
    if {name: x.shape for name, x in update.items()} != shapes:
        raise ValueError(f"an update of {len(update)} tensors doesn't fit the anchor of {len(anchor)}")
    found = {name: update[name].to(x.dtype) for name, x in anchor.items()}
    for name in scaled:
        x, scale = found[name], update[name + _SCALE].to(found[name].dtype)
        found[name] = x * scale.repeat_interleave(_BLOCK)[: x.numel()].view_as(x)
    return found


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, shapes, dtypes and bits, 32 hex digits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype} ".encode())
        found.update(raw(tensors[name]))
    return found.hexdigest()[:32]


def check_settings(here: Mapping[str, str], run: Mapping[str, str], where: str, defaults: Mapping[str, str]) -> None:
    """Raise ValueError that names the first settings in which a worker differs from the run, with both values.

    A setting that one of them lacks, because it is older than the setting, is as in `defaults` or `Options()`.
    """
    defaults = {**{name: str(value) for name, value in vars(Options()).items()}, **defaults}
    here, run = {**defaults, **here}, {**defaults, **run}
    names = [name for name in sorted(here.keys() | run.keys()) if here.get(name) != run.get(name)]
    names = [name for name in names if name not in ("model", "optimizer")] or names  # a setting says more than a hash
    if names:
        told = [f"{name} is {here.get(name)} here, and {run.get(name)} {where}" for name in names[:3]]
        raise ValueError(f"{'; '.join(told)}: use the same here, or begin another run (an empty folder, without join)")


def new_run(
    rule: Rule, first: int, until: int, about: Mapping[str, str], anchor: Mapping[str, Tensor],
    averaged: Iterable[str] = (),
) -> Line:  # fmt: skip
    """Return the line `begin` of a new run."""
    facts = {"rule": describe(rule), "first": first, "until": until, "about": dict(about), "anchor": digest(anchor)}
    facts["averaged"] = sorted(averaged)
    return {"op": "begin", "run": secrets.token_hex(8), **facts, "at": round(time.time(), 3)}


class Outer:
    """The outer state.

    Args:
        begin: the line `begin`.
        anchor: the parameters that the run begins with, by logical name, on the CPU. They are copied.
        lines: what happened since. They change all but the tensors, which `load_tensors` brings.

    Attributes:
        version: the number of outer steps.
        anchor, slots: the tensors, by name; those of the rule by slot and name.
        counter: the first step that no worker has got yet.
        returned: ranges of steps that went back, because their worker left or its update was too stale.
        done: how many steps are in the anchor.
        members: the address of each worker, by number.
        left: why workers left, by number.
        phases: how many updates each worker has handed in.
        leases: what each worker trains now. With `overlap`: its oldest steps whose update isn't applied yet.
        ahead: the steps that each worker trains after these, with `overlap`.
    """

    def __init__(self, begin: Line, anchor: Mapping[str, Tensor], lines: Sequence[Line] = ()) -> None:
        self.begin = begin
        self.rule: Rule = read_rule(begin["rule"])
        self.until: int = int(begin["until"])
        self.averaged: frozenset[str] = frozenset(begin.get("averaged", ()))
        self.anchor: Tensors = {name: x.detach().clone() for name, x in anchor.items()}
        self.slots: dict[str, dict[str, Tensor]] = {
            slot: {name: torch.zeros_like(x) for name, x in anchor.items()} for slot in self.rule.slots
        }
        self.version: int = 0
        self.next_worker: int = 0
        self.counter: int = int(begin["first"])
        self.done: int = self.counter
        self.returned: list[tuple[int, int]] = []
        self.members: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self.phases: dict[int, int] = {}
        self.leases: dict[int, Lease] = {}
        self.ahead: dict[int, Lease] = {}
        for line in lines:
            self.apply(line)

    @property
    def ended(self) -> bool:
        """Whether all steps of the run are in the anchor."""
        return self.done >= self.until

    def left_steps(self, ahead: bool) -> int:
        """Return how many steps no update has brought yet; `ahead`: and no worker trains now."""
        trained = sum(lease.last - lease.first for lease in self.leases.values()) if ahead else 0
        return self.until - self.done - trained

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
            (first, last), held = line["steps"], self.leases
            if worker in held and held[worker].phase < line["phase"]:
                held = self.ahead
            if worker not in held:
                self._take(first, last)
            held[worker] = Lease(line["phase"], first, last, line["base"])
        elif op == "leave":
            self.members.pop(worker)
            self.left[worker] = line["why"]
            self.returned += [held.pop(worker)[1:3] for held in (self.leases, self.ahead) if worker in held]
        elif op == "update":
            self._update(line, updates)

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
        self.counter: int = last

    @torch.no_grad()
    def _update(self, line: Line, updates: Sequence[Mapping[str, Tensor]]) -> None:
        applied = []
        for place, entry in enumerate(line["updates"]):
            lease = self.leases.pop(entry["worker"])
            self.phases[entry["worker"]] = lease.phase + 1
            if entry["worker"] in self.ahead:
                self.leases[entry["worker"]] = self.ahead.pop(entry["worker"])
            if not entry["applied"]:
                self.returned.append(lease[1:3])
                continue
            self.done += lease.last - lease.first
            applied.append((self.rule.weight(self.version - entry["base"]), place))
        if applied and updates:
            weighted = [(w, updates[place]) for w, place in applied]
            workers = line.get("workers", len(applied))
            step(self.rule, self.version, self.anchor, self.slots, weighted, workers, self.averaged, len(self.members))
        self.version = line["version"]


def step(
    rule: Rule, number: int, anchor: Tensors, slots: Mapping[str, Tensors],
    updates: Sequence[tuple[float, Mapping[str, Tensor]]], workers: int, averaged: Collection[str], members: int,
) -> None:  # fmt: skip
    """Move the anchor by the sum of weighted updates, in their order, divided by a number of workers.

    Args:
        rule: the outer rule.
        number: the outer steps before this one.
        anchor, slots: the outer state, which changes.
        updates: pairs of a weight and the update's tensors, x_base - x_local.
        workers: the number that divides their sum.
        averaged: the tensors of which the anchor gets the mean alone. Momentum would make a variance negative.
        members: the workers of the run. Each has its share of these tensors at most.
    """
    for name, x in anchor.items():
        g = torch.zeros_like(x)
        for weight, update in updates:
            g.add_(update[name].to(g.dtype), alpha=weight)
        if name in averaged:
            x.sub_(g.div_(max(workers, members)))
        else:
            rule.step(x, {slot: held[name] for slot, held in slots.items()}, g.div_(workers), number)
