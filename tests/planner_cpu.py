"""Measure 12 layouts on 2 CPU ranks, fit the planner to the 4 that it suggests, and predict the other 8.

`python -m tests.planner_cpu --write docs/planner_cpu.json` takes a quarter of an hour on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from mpcore.tools.analysis.calibrate import count_rows, predict_sweep
from mpcore.tools.analysis.machine import load_machine
from mpcore.tools.analysis.rows import read_row
from mpcore.tools.draw import matplotlib_part

DOCS = Path(__file__).parent.parent / "docs"
PROFILE = Path("../bench/planner/this-cpu.json")
"""Its path from `DOCS`, as the rows there name it."""
SHAPES = {"wide": {"layers": 4, "d_model": 512, "heads": 8}, "deep": {"layers": 12, "d_model": 256, "heads": 4}}
COMMON = {"seq_len": 256, "vocab_size": 257, "gpus": 2, "machine": str(PROFILE), "even_stages": True}
CANDIDATES = [
    ("wide", {"tp": 2, "micro_batch": 2, "batch": 8}), ("wide", {"dp": 2, "micro_batch": 2, "batch": 8}),
    ("wide", {"pp": 2, "micro_batch": 1, "batch": 8}), ("wide", {"dp": 2, "micro_batch": 4, "batch": 16, "zero": 3}),
    ("wide", {"tp": 2, "micro_batch": 4, "batch": 8, "recompute": "full"}),
    ("wide", {"cp": 2, "micro_batch": 2, "batch": 8}),
    ("deep", {"tp": 2, "micro_batch": 2, "batch": 8, "sequence_parallel": True}),
    ("deep", {"dp": 2, "micro_batch": 1, "batch": 8}), ("deep", {"pp": 2, "micro_batch": 2, "batch": 16}),
    ("deep", {"dp": 2, "micro_batch": 4, "batch": 16, "recompute": "selective"}),
    ("deep", {"pp": 2, "micro_batch": 1, "batch": 8, "stages_per_rank": 2}),
    ("deep", {"tp": 2, "micro_batch": 4, "batch": 16}),
]  # fmt: skip
SUGGESTED = 4


def rows() -> list[dict]:
    """The candidates, as rows without times."""
    found = []
    for shape, layout in CANDIDATES:
        name = " ".join([shape, *(f"{key} {value}" for key, value in layout.items())])
        found.append({"name": name, "set": "this CPU", **COMMON, **SHAPES[shape], **layout})
    return found


def measure_step(row: dict, steps: int = 7) -> float:
    """On a rank: the median seconds of a step, all ranks beginning together."""
    import torch.distributed as dist

    from examples.gpt.pretrain import Trainer, parse
    from tests.pool import mesh

    torch.set_num_threads(1)
    made = read_row(row, need_time=False)
    arguments = list(made.arguments)
    for flag, values in (("--vocab-size", 1), ("--even-stages", 0)):
        if flag in arguments:
            i = arguments.index(flag)
            del arguments[i : i + 1 + values]
    sizes = {axis: size for axis, size in made.sizes.items() if size > 1}
    trainer = Trainer(parse(arguments), mesh(**sizes))
    times = []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        trainer.step()
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def rates() -> dict[str, float]:
    """On a rank: what one core does alone and what two exchange: products, copies, collectives of each kind."""
    import torch.distributed as dist

    from mpcore import collectives
    from tests.pool import mesh

    torch.set_num_threads(1)
    on = mesh(tp=2)

    def typical(call, times: int = 15) -> float:
        found = []
        for _ in range(times):
            dist.barrier()
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)

    def product(rows: int, inner: int, columns: int) -> float:
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        return 2 * rows * inner * columns / typical(lambda: a @ b)

    small, large = torch.zeros(4, 1024), torch.zeros(256, 1024)  # 16 KiB and 1 MiB: what a block exchanges
    big, to = torch.randn(2**24), torch.empty(2**24)
    kinds = {
        "all_reduce": lambda x: collectives.all_reduce(x, on.tp),
        "all_gather": lambda x: collectives.gather(x.chunk(2)[0], on.tp, 0),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, on.tp, 0),
        "all_to_all": lambda x: collectives.all_to_all(x, on.tp, 0, 1),
    }
    took = {kind: [typical(lambda call=call, x=x: call(x)) for x in (small, large)] for kind, call in kinds.items()}
    first, second = (seconds / 2 for seconds in took["all_reduce"])  # a ring's two rounds
    bandwidth = (large.nbytes - small.nbytes) / 2 / max(second - first, 1e-9)
    latency = max(first - small.nbytes / 2 / bandwidth, 1e-6)
    ring = latency + large.nbytes / 2 / bandwidth
    measured = {kind: seconds[1] / ring for kind, seconds in took.items() if kind != "all_reduce"}
    peak = statistics.median(product(*shape) for shape in ((512, 512, 1536), (512, 1536, 512), (512, 256, 768)))
    return {
        "peak_32": peak, "hbm": 2 * big.nbytes / typical(lambda: to.copy_(big)),
        "node_latency": latency, "node_bandwidth": bandwidth, **measured,
    }  # fmt: skip


def write_profile(measured: dict[str, float], when: str) -> None:
    """The profile this-cpu, from what was measured."""
    content = json.loads((DOCS / PROFILE).read_text())
    source = f"measured: {when}, python -m tests.planner_cpu"
    for name, value in measured.items():
        content["values"][name] = {"value": float(f"{value:.4g}"), "source": source}
    content["values"]["peak"] = content["values"]["peak_32"]
    for name, like in (("latency", "node_latency"), ("bandwidth", "node_bandwidth")):
        content["values"][name] = content["values"][like]
    (DOCS / PROFILE).write_text(json.dumps(content, indent=1) + "\n")


def predictions(measured: list[dict]) -> tuple[list[str], list[tuple[str, float, float]]]:
    """The names of the suggested rows, and of each other row its name, seconds and predicted seconds."""
    runs = count_rows([read_row(row) for row in measured], stands_for_gpu=False)
    swept = predict_sweep(runs, load_machine(DOCS / PROFILE), SUGGESTED)
    seconds = {run.row.name: run.row.seconds or 0.0 for run in runs}
    others = [(name, seconds[name], seconds[name] * (1 + error)) for name, error in swept.errors.items()]
    return [run.row.name for run in swept.chosen], others


def draw(results: list[tuple[str, float, float]], path: Path) -> None:
    """A bar for each predicted row: its error in percent."""
    figure = matplotlib_part("figure").Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([name for name, *_ in results], [100 * (p / s - 1) for _, s, p in results], color="#0072B2")
    axes.axvline(0, color="#000000", linewidth=1)
    axes.set_xlabel(f"error of the predicted step after {SUGGESTED} suggested runs, percent")
    axes.tick_params(labelsize=7)
    figure.savefig(path, dpi=130)


def section() -> str:
    """The part of docs/planner_accuracy.md, from what was measured last; "" if nothing was."""
    path = DOCS / "planner_cpu.json"
    if not path.is_file():
        return ""
    content = json.loads(path.read_text())
    chosen, results = predictions(content["rows"])
    draw(results, DOCS / "planner_cpu.png")
    errors = [abs(p / s - 1) for _, s, p in results]
    lines = [f"| {name} | {s:.3f} | {p:.3f} | {p / s - 1:+.1%} |" for name, s, p in results]
    before, after = content["load"]
    load = f"on {content['cores']} cores with a load average of {before:.1f} before and {after:.1f} after the runs"
    close = sum(abs(planned / real - 1) <= 0.05 for _, real, planned in content["peaks"])
    bytes_ = [
        f"| {name} | {real:,} | {planned:,} | {planned / real - 1:+.1%} |" for name, real, planned in content["peaks"]
    ]
    return "\n".join([
        "## A worked example: two CPU ranks\n",
        f"`python -m tests.planner_cpu --write docs/planner_cpu.json` measured {len(content['rows'])} layouts on "
        f"{content['when']}, {load}. `wide` is a GPT with 4 layers of width 512, `deep` one with 12 layers of width "
        "256.\n",
        f"1. `--suggest {len(chosen)}` named {len(chosen)} of the layouts: {'; '.join(chosen)}.",
        "2. The profile `this-cpu` was fitted to the times of these layouts.",
        "3. The planner predicted the other layouts: mean absolute error "
        f"{sum(errors) / len(errors):.1%}, largest {max(errors):.1%}.\n",
        "| layout | measured, s | predicted, s | error |", "|---|---|---|---|", *lines,
        "\n![Errors of the predicted layouts](planner_cpu.png)\n",
        "A first try had a mean error of 15.7 %, and 32 % at most. Then the profile got a rate for each kind of "
        "collective, a rate for matrix products of a block's sizes, and `x_dp` 1.\n",
        "## Planned and measured peaks\n",
        "The table compares measured and planned peaks. A peak is the most bytes that any CPU rank holds at any time "
        f"of its second step, summed over all storages. {close} of {len(bytes_)} planned peaks are within 5 %.\n",
        "| layout | measured | planned | error |", "|---|---|---|---|", *bytes_, "",
    ])  # fmt: skip


def main() -> None:
    """The command."""
    from tests.pool import Pool
    from tests.test_memory import LAYOUTS, peaks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--peaks", action="store_true", help="measure the peaks alone, and keep the times")
    args = parser.parse_args()
    content = json.loads(args.write.read_text()) if args.peaks else {}
    before, when = os.getloadavg()[0], time.strftime("%Y-%m-%d")
    pool = Pool()
    try:
        if not args.peaks:
            write_profile(pool(2, rates)[0], when)
            timed = []
            for row in rows():
                timed.append({**row, "seconds": round(max(pool(2, measure_step, row, timeout=600.0)), 4)})
                print(timed[-1]["name"], timed[-1]["seconds"], flush=True)
            load = [before, os.getloadavg()[0]]
            content = {"when": when, "cores": os.cpu_count(), "load": load, "rows": timed}
        held = []
        for sizes, flags in LAYOUTS:
            layout = " ".join([*(f"{axis} {size}" for axis, size in sizes.items()), *flags])
            held.append([layout or "one rank", *peaks(pool, sizes, flags)])
    finally:
        pool.stop()
    args.write.write_text(json.dumps(content | {"peaks": held}, indent=1) + "\n")


if __name__ == "__main__":
    main()
