"""Loss of workers of unequal speed, beside synchronous merges, on a simulated clock: `python -m bench.workers`.

Workers train the model of docs/local_updates.md: by default four, of which one is 4 times slower, after 300 steps of
data parallelism. `--begin 0 --seconds 1 1 --steps 400 --batch 8 --every 20` is its recipe of two shells. A clock that
counts steps orders the updates, so a row depends on no machine's speed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
from collections.abc import Sequence
from typing import Any

from examples.gpt.pretrain import Trainer, parse
from examples.gpt.samples import TokenSamples, split_documents
from mpcore import Mesh
from mpcore.tools.workers import Average, DelayedNesterov, Nesterov
from mpcore.tools.workers.elastic import RunTensors
from mpcore.tools.workers.outer import Options, Outer, Tensors
from mpcore.tools.workers.rules import Rule, describe

TINY = ["--layers", "2", "--d-model", "64", "--heads", "4", "--d-ff", "256", "--seq-len", "128", "--device", "cpu",
        "--eval-every", "0"]  # fmt: skip
ROWS: dict[str, tuple[str, bool, Rule]] = {
    "all, Nesterov": ("all", False, Nesterov()),
    "all, Nesterov, dynamic": ("all", True, Nesterov()),
    "all, average, dynamic": ("all", True, Average()),
    "none, average": ("none", False, Average()),
    "none, average 1.4": ("none", False, Average(1.4)),
    "none, delayed Nesterov": ("none", False, DelayedNesterov(lr=1.0, momentum=0.5)),
}


def trainer(folder: str, seed: int, *flags: str) -> Trainer:
    """Return a trainer on one process."""
    return Trainer(parse([*TINY, "--out", folder, "--seed", str(seed), *flags]), Mesh())


def trained(
    start: Tensors, folder: str, seed: int, args: argparse.Namespace, wait: str, dynamic: bool, rule: Rule
) -> dict[str, float]:
    """Train. Return the held-out loss of the anchor at the end, and at the clock when nobody waited for others."""
    every, seconds, first = args.every, args.seconds, args.begin * 16 // args.batch
    until, soon = first + args.steps, args.steps // len(args.seconds) * 4 // 3
    flags = ["--steps", str(max(until, 2 * first)), "--warmup", str(320 // args.batch if first else 20)]
    flags += ["--global-batch", str(args.batch)]
    runs, known = [trainer(folder, seed, *flags) for _ in seconds], dict[int, float]()
    for worker, each in enumerate(runs if args.shards else ()):
        data: Any = each.train_samples
        ids, parts = split_documents(len(data.dataset))[0], len(seconds)
        mine = ids[len(ids) * worker // parts : len(ids) * (worker + 1) // parts]
        each.train_samples = TokenSamples(data.dataset, data.seq_len, seed=seed, documents=mine)
    tensors, options = [RunTensors(each.run) for each in runs], Options(every=every, wait=wait, dynamic=dynamic)
    outer = Outer({"rule": describe(rule), "first": first, "until": until}, start)
    events, pending, clock, early = list[tuple[float, int]](), dict[int, tuple[Any, Tensors]](), 0.0, None
    for worker in range(len(seconds)):
        outer.apply({"op": "join", "worker": worker, "address": ""})

    def lease(worker: int) -> None:
        steps = outer.free_steps(options.steps_of(worker, known, until - outer.done))
        if steps is not None:
            line = {"op": "lease", "worker": worker, "phase": 0, "steps": steps, "base": outer.version}
            outer.apply(line)
            tensors[worker].write(outer.anchor)
            heapq.heappush(events, (clock + (steps[1] - steps[0]) * seconds[worker], worker))

    for worker in range(len(seconds)):
        lease(worker)
    while not outer.ended:
        clock, worker = heapq.heappop(events)
        runs[worker].run.step, known[worker] = outer.leases[worker].first, seconds[worker]
        while runs[worker].run.step < outer.leases[worker].last:
            runs[worker].step()
        entry = {"worker": worker, "base": outer.leases[worker].base, "applied": True}
        pending[worker] = entry, tensors[worker].moved()
        if len(pending) >= options.needed(len(outer.leases), len(seconds)):
            entries, updates = zip(*(pending[each] for each in sorted(pending)), strict=True)
            pending.clear()
            workers = len(seconds) if rule.shares and wait != "all" else len(entries)
            line = {"op": "update", "version": outer.version + 1, "updates": entries, "workers": workers}
            outer.apply(line, updates)
            if early is None and clock >= soon:
                early = evaluated(folder, seed, flags, outer.anchor)
            for each in entries:
                lease(each["worker"])
    return {"loss": evaluated(folder, seed, flags, outer.anchor), f"loss at {soon}": early or 0.0, "clock": clock}


def evaluated(folder: str, seed: int, flags: Sequence[str], anchor: Tensors) -> float:
    """Return the held-out loss of an anchor."""
    one = trainer(folder, seed, *flags)
    RunTensors(one.run).write(anchor)
    return round(one.evaluate(), 4)


def main() -> None:
    """Print a row for each rule and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0, 1.0, 1.0, 4.0], help="of each one's step")
    for name, default in {"begin": 300, "steps": 1200, "batch": 4, "every": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shards", action="store_true", help="each worker has a part of the documents of its own")
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=[*ROWS])
    args = parser.parse_args()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            begun = trainer(folder, seed, "--steps", str(2 * args.begin or 1), "--global-batch", "16")
            while begun.run.step < args.begin:
                begun.step()
            start = RunTensors(begun.run).read()
            for name in args.rows:
                found = trained(start, folder, seed, args, *ROWS[name])
                print(json.dumps({"row": name, "seed": seed, "every": args.every, **found}), flush=True)


if __name__ == "__main__":
    main()
