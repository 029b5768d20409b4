"""The costs on docs/bitwise.md.

`OMP_NUM_THREADS=1 python -m tests.bitwise_cost` prints what a step costs in the ordinary and in the invariant mode, by
layout. With `--host REV` it prints the host time of the ordinary mode here and at that commit, measured in turn.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import mpcore as mp
from examples.gpt.config import GPTConfig
from mpcore import collectives, simulate
from mpcore.memory_footprint import PeakTracker
from mpcore.tools._torch.simulated import SimulatedGroup, simulated_rank
from tests.training.test_bitwise import Case, prepared, sizes, train

CONFIG = GPTConfig(
    vocab_size=256, seq_len=64, layers=2, d_model=128, heads=8, head_dim=16, d_ff=512, bias=True, dropout=0.1,
    tie_embeddings=True,
)  # fmt: skip
CASE = Case(CONFIG, virtual=8, samples=8)
LAYOUTS = ("tp1", "tp2", "tp2sp", "tp4", "tp8", "dp2zero1", "dp4zero0", "dp2zero3", "pp2", "tp2spdp2zero1")
STEPS = 5


RINGS: dict[str, Callable[[int], float]] = {  # of a collective's input, the part that each of n ranks sends
    "all_reduce": lambda n: 2 * (n - 1) / n, "_all_gather_base": lambda n: n - 1,
    "_reduce_scatter_base": lambda n: (n - 1) / n, "all_to_all": lambda n: (n - 1) / n,
}  # fmt: skip
SENT: dict[int | None, float] = defaultdict(float)  # bytes, by rank
_meet, _send = SimulatedGroup._meet, SimulatedGroup.send


def noted_meet(group: SimulatedGroup, kind: str, x: torch.Tensor | None, *rest: Any) -> Any:
    """Note what a collective sends."""
    SENT[simulated_rank()] += RINGS.get(kind, lambda n: 1)(group.count) * (0 if x is None else x.nbytes)
    return _meet(group, kind, x, *rest)


def noted_send(group: SimulatedGroup, tensors: list[torch.Tensor], *rest: Any) -> Any:
    """Note what a message sends."""
    SENT[simulated_rank()] += sum(x.nbytes for x in tensors)
    return _send(group, tensors, *rest)


def cost(layout: str) -> list[float]:
    """Of both modes, of this rank: milliseconds of all ranks' processor time, MB sent in rings, and most MB held."""
    runs, found = [], []
    for virtual in (0, CASE.virtual):
        mesh = mp.build_mesh(**sizes(layout), device_type="cpu")
        with PeakTracker() as held:
            run = prepared(mesh, replace(CASE, virtual=virtual), layout)
            train(run, CASE, 1)
        held.begin()
        before = SENT[simulated_rank()]
        with held:
            train(run, CASE, 1)
        runs.append((mesh, run, []))
        found += [(SENT[simulated_rank()] - before) / 1e6, held.most / 1e6]
    for _ in range(STEPS):
        for mesh, run, times in runs:
            collectives.all_reduce(torch.zeros(1), mesh.job)
            begin = time.process_time()
            train(run, CASE, 1)
            collectives.all_reduce(torch.zeros(1), mesh.job)
            times.append(1e3 * (time.process_time() - begin))
    return [*(median(times) for *_, times in runs), *found]


SERVED = """
import sys, time, torch, mpcore as mp
torch.set_num_threads(1)
torch.manual_seed(0)
mesh = mp.build_mesh(device_type="cpu")
layers = (mp.VocabParallelEmbedding(32, 16), mp.RMSNorm(16), mp.ParallelAttention(16, 2), mp.LayerNorm(16),
          mp.ParallelMLP(16, 32), mp.ColumnParallelLinear(16, 32))
model = torch.nn.Sequential(*layers)
def loss(y, target):
    return mp.vocab_parallel_cross_entropy(y, target, vocab_size=32, reduction="sum")
run = mp.prepare(model, mesh, blocks=(), loss=loss, initialize=True, optimizer=lambda m: mp.AdamW(m))
x = torch.randint(32, (1, 4))
def bare():
    loss(model(x), x).backward()
    model.zero_grad()
def step():
    run.forward_backward(x, x)
    run.clip_gradients(1.0)
    run.optimizer_step()
def events(call):  # calls of Python and C functions, and returns
    seen = []
    sys.setprofile(lambda *event: seen.append(event[1]))
    call()
    sys.setprofile(None)
    return len(seen)
for call in (bare, step) * 3:
    call()
print(mp.__file__, events(bare), events(step), flush=True)
for line in sys.stdin:
    call = {"bare": bare, "step": step}[line.strip()]
    begin = time.process_time()
    for _ in range(20):
        call()
    print(1e6 * (time.process_time() - begin) / 20, flush=True)
"""


def host(revision: str, rounds: int = 150) -> None:
    """Print the ordinary mode's host time of a tiny model, here and at a commit: two processes that run in turn."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], check=True, capture_output=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        here = Path(__file__).parents[1]
        started: list[Any] = [
            subprocess.Popen([sys.executable, "-c", SERVED], cwd=root, **pipe) for root in (here, folder)
        ]
        said = [process.stdout.readline().split() for process in started]
        assert all(line[0].startswith(str(root)) for line, root in zip(said, (here, folder), strict=True))
        for n, what in enumerate(("bare", "step"), 1):
            times: list[list[float]] = [[], []]
            for i in range(rounds + 5):
                for k in (0, 1) if i % 2 else (1, 0):
                    started[k].stdin.write(f"{what}\n")
                    started[k].stdin.flush()
                    times[k].append(float(started[k].stdout.readline()))
            now, before = (each[5:] for each in times)
            ratios = sorted(a / b for a, b in zip(now, before, strict=True))
            quarter = len(ratios) // 4
            print(
                f"{what}: {median(now):.0f} us, at {revision} {median(before):.0f} us, ratio {median(ratios):.3f} "
                f"(quartiles {ratios[quarter]:.3f} to {ratios[-quarter - 1]:.3f}, {rounds} pairs); of the fastest "
                f"{min(now) / min(before):.3f}; calls and returns {said[0][n]}, at {revision} {said[1][n]}"
            )
        for process in started:
            process.stdin.close()
            process.wait()


def main() -> None:
    """Print the table, or the host time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", metavar="REV", help="the commit before the mode: 99059c1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.host:
        host(args.host)
        return
    print("| layout | ordinary, ms | invariant, ms | ratio | MB sent | invariant | MB held | invariant |")
    print("|---|---|---|---|---|---|---|---|")
    for name, noted in (("_meet", noted_meet), ("send", noted_send)):
        patch.object(SimulatedGroup, name, noted).start()
    for layout in LAYOUTS:
        every = simulate(cost, layout, ranks=sizes(layout)["tp"] * sizes(layout)["pp"] * sizes(layout)["dp"])
        (plain, ours, *_), worst = every[0], [max(column) for column in zip(*every, strict=True)]
        cells = [f"{plain:.0f}", f"{ours:.0f}", f"{ours / plain:.1f}"]
        cells += [f"{worst[2]:.2f}", f"{worst[4]:.2f}", f"{worst[3]:.2f}", f"{worst[5]:.2f}"]
        print(f"| {layout} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
