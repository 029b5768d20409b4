"""Loss of workers that wait for nobody, beside synchronous merges, on a simulated clock: `python -m bench.workers`.

Four workers train the model of docs/local_updates.md from 300 steps of data parallelism on. One of them is 4 times
slower. Who hands in when follows from a clock that counts steps, so a row depends on no machine's speed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
from collections.abc import Sequence
from typing import Any

from examples.gpt.pretrain import Trainer, parse
from mpcore import Mesh
from mpcore.tools.workers import Average, DelayedNesterov, HeLoCo, Nesterov
from mpcore.tools.workers.elastic import RunTensors
from mpcore.tools.workers.outer import Options, Outer, Tensors
from mpcore.tools.workers.rules import Rule, describe

TINY = ["--layers", "2", "--d-model", "64", "--heads", "4", "--d-ff", "256", "--seq-len", "128", "--device", "cpu",
        "--eval-every", "0"]  # fmt: skip
SECONDS = (1.0, 1.0, 1.0, 4.0)  # of a step of each worker
ROWS: dict[str, tuple[str, bool, Rule]] = {
    "all, Nesterov": ("all", False, Nesterov()),
    "none, average": ("none", False, Average(0.35)),
    "none, delayed Nesterov": ("none", False, DelayedNesterov(lr=1.0, momentum=0.5)),
    "none, delayed Nesterov, dynamic": ("none", True, DelayedNesterov(lr=1.0, momentum=0.3)),
    "none, HeLoCo, dynamic": ("none", True, HeLoCo(0.3, 1.0, 0.5, 0.5, 1.0, lr=0.2)),
}


def trainer(folder: str, seed: int, *flags: str) -> Trainer:
    """Return a trainer on one process."""
    return Trainer(parse([*TINY, "--out", folder, "--seed", str(seed), *flags]), Mesh())


def trained(
    start: Tensors, folder: str, seed: int, every: int, wait: str, dynamic: bool, rule: Rule
) -> dict[str, float]:
    """Train steps 1200 to 2400, 4 samples each. Return the held-out loss of the anchor at the end and at clock 400."""
    flags = ["--steps", "2400", "--warmup", "80", "--global-batch", "4"]
    runs = [trainer(folder, seed, *flags) for _ in SECONDS]
    tensors, options = [RunTensors(each.run) for each in runs], Options(every=every, wait=wait, dynamic=dynamic)
    outer = Outer({"rule": describe(rule), "first": 1200, "until": 2400}, start)
    events, pending, clock, early = list[tuple[float, int]](), dict[int, tuple[Any, Tensors]](), 0.0, None
    for worker in range(len(SECONDS)):
        outer.apply({"op": "join", "worker": worker, "address": ""})

    def lease(worker: int) -> None:
        steps = outer.free_steps(max(int(every / SECONDS[worker]), 1) if dynamic else every)
        if steps is not None:
            line = {"op": "lease", "worker": worker, "phase": 0, "steps": steps, "base": outer.version}
            outer.apply(line)
            tensors[worker].write(outer.anchor)
            heapq.heappush(events, (clock + (steps[1] - steps[0]) * SECONDS[worker], worker))

    for worker in range(len(SECONDS)):
        lease(worker)
    while not outer.ended:
        clock, worker = heapq.heappop(events)
        runs[worker].run.step = outer.leases[worker].first
        while runs[worker].run.step < outer.leases[worker].last:
            runs[worker].step()
        entry = {"worker": worker, "base": outer.leases[worker].base, "applied": True}
        pending[worker] = entry, tensors[worker].moved()
        if len(pending) >= options.needed(len(outer.leases)):
            entries, updates = zip(*(pending[each] for each in sorted(pending)), strict=True)
            pending.clear()
            outer.apply({"op": "update", "version": outer.version + 1, "updates": entries}, updates)
            if early is None and clock >= 400:
                early = evaluated(folder, seed, flags, outer.anchor)
            for each in entries:
                lease(each["worker"])
    return {"loss": evaluated(folder, seed, flags, outer.anchor), "loss at 400": early or 0.0, "clock": clock}


def evaluated(folder: str, seed: int, flags: Sequence[str], anchor: Tensors) -> float:
    """Return the held-out loss of an anchor."""
    one = trainer(folder, seed, *flags)
    RunTensors(one.run).write(anchor)
    return round(one.evaluate(), 4)


def main() -> None:
    """Print a row for each rule and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=[*ROWS])
    args = parser.parse_args()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            begun = trainer(folder, seed, "--steps", "600", "--global-batch", "16")
            while begun.run.step < 300:
                begun.step()
            start = RunTensors(begun.run).read()
            for name in args.rows:
                found = trained(start, folder, seed, args.every, *ROWS[name])
                print(json.dumps({"row": name, "seed": seed, "every": args.every, **found}), flush=True)


if __name__ == "__main__":
    main()
