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
from mpcore.tools.workers.outer import Lease, Options, Outer, Tensors
from mpcore.tools.workers.rules import Rule, describe

TINY = ["--layers", "2", "--d-model", "64", "--heads", "4", "--d-ff", "256", "--seq-len", "128", "--device", "cpu",
        "--eval-every", "0"]  # fmt: skip
ROWS: dict[str, tuple[str, bool, Rule, float | None]] = {
    "all, Nesterov": ("all", False, Nesterov(), None),
    "all, Nesterov, dynamic": ("all", True, Nesterov(), None),
    "all, Nesterov, dynamic, overlap": ("all", True, Nesterov(), 0.5),
    "all, average, dynamic": ("all", True, Average(), None),
    "none, average": ("none", False, Average(), None),
    "none, average, overlap": ("none", False, Average(), 0.5),
    "none, average 1.4": ("none", False, Average(1.4), None),
    "none, delayed Nesterov": ("none", False, DelayedNesterov(lr=1.0, momentum=0.5), None),
}


def trainer(folder: str, seed: int, *flags: str) -> Trainer:
    """Return a trainer on one process."""
    return Trainer(parse([*TINY, "--out", folder, "--seed", str(seed), *flags]), Mesh())


def trained(
    start: Tensors, folder: str, seed: int, args: argparse.Namespace,
    wait: str, dynamic: bool, rule: Rule, travel: float | None,
) -> dict[str, float]:  # fmt: skip
    """Train. Return the held-out loss of the anchor at the end, and at the clock when nobody waited for others.

    With `travel` workers overlap: a new anchor arrives after this share of a fast worker's phase.
    """
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
    pending, clock, early = dict[int, tuple[Any, Tensors]](), 0.0, None
    events: list[tuple[float, str, int]] = []  # an "anchor" arrives, a phase "ends"
    trains, bases = dict[int, tuple[float, Lease]](), dict[int, int]()  # since when, and the version of the anchor
    flying, late = set(range(len(seconds))), set[int]()  # whose anchor is on its way, and who waits for it
    for worker in sorted(flying):
        outer.apply({"op": "join", "worker": worker, "address": ""})
        heapq.heappush(events, (clock, "anchor", worker))

    def begin(worker: int, lease: Lease) -> None:
        trains[worker] = clock, lease
        runs[worker].run.step = lease.first
        heapq.heappush(events, (clock + (lease.last - lease.first) * seconds[worker], "ends", worker))

    def train(worker: int) -> None:
        since, lease = trains[worker]
        while runs[worker].run.step < min(lease.first + round((clock - since) / seconds[worker]), lease.last):
            runs[worker].step()

    def hand_in(worker: int) -> None:
        del trains[worker]
        known[worker] = seconds[worker]
        entry = {"worker": worker, "base": bases[worker], "applied": True}
        pending[worker] = entry, tensors[worker].moved()
        flying.add(worker)
        if worker in outer.ahead:
            begin(worker, outer.ahead[worker])

    def arrive(worker: int) -> None:
        flying.remove(worker)
        for phase in range(outer.phases[worker], outer.phases[worker] + (1 if travel is None else 2)):
            held = [each[worker].phase for each in (outer.leases, outer.ahead) if worker in each]
            steps = outer.free_steps(options.steps_of(worker, known, outer.left_steps(phase > outer.phases[worker])))
            if phase not in held and steps is not None:
                line = {"op": "lease", "worker": worker, "phase": phase, "steps": steps, "base": outer.version}
                outer.apply(line)
        bases[worker], anchor = outer.version, {name: x.clone() for name, x in outer.anchor.items()}
        if worker in trains:
            train(worker)
            tensors[worker].merge(anchor)
        elif worker in outer.leases:
            tensors[worker].write(anchor)
            begin(worker, outer.leases[worker])

    while not outer.ended:
        clock, event, worker = heapq.heappop(events)
        if event == "anchor":
            arrive(worker)
            if worker not in late:
                continue
            late.remove(worker)
        else:
            train(worker)
            if worker in flying:
                late.add(worker)
                continue
        hand_in(worker)
        if len(pending) >= options.needed(len(outer.leases), len(seconds)):
            entries, updates = zip(*(pending[each] for each in sorted(pending)), strict=True)
            pending.clear()
            workers = len(seconds) if rule.shares and wait != "all" else len(entries)
            line = {"op": "update", "version": outer.version + 1, "updates": entries, "workers": workers}
            outer.apply(line, updates)
            if early is None and clock >= soon:
                early = evaluated(folder, seed, flags, outer.anchor)
            for each in entries:
                heapq.heappush(events, (clock + (travel or 0.0) * every, "anchor", each["worker"]))
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
