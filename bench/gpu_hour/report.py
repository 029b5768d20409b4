"""The report of `bench.gpu_hour`: tables and a plot, from the lines of the results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
BOTH = "forward+backward"
GOALS: dict[tuple[str, str], dict[str, float]] = {
    ("rms_norm", "forward"): {"percent": 88, "eager": 1.4, "torch.compile": 1.03, "Liger": 1.03, "quack": 0.98},
    ("add_rms_norm", BOTH): {"percent": 85, "eager": 3.5, "torch.compile": 1.15, "Liger": 1.5, "quack": 1.0},
    ("layer_norm", BOTH): {"percent": 82, "eager": 1.8, "torch.compile": 1.1, "Liger": 1.8},
    ("gelu", BOTH): {"percent": 88, "eager": 3, "torch.compile": 1.05, "Megatron": 1.5},
    ("swiglu", BOTH): {"percent": 90, "eager": 2.3, "torch.compile": 1.05, "Liger": 1.2, "Megatron": 2.3},
    ("rope", "forward"): {"percent": 88, "eager": 4, "torch.compile": 1.1, "Liger": 2},
    ("cross_entropy", "forward"): {"percent": 90, "eager": 5, "torch.compile": 1.8, "Liger": 3.5, "Megatron": 10},
    ("cross_entropy", BOTH): {"percent": 88, "eager": 5, "torch.compile": 1.8, "Liger": 3.2, "Megatron": 7},
    ("linear_cross_entropy", BOTH): {"percent": 90, "eager": 1.0, "torch.compile": 1.05, "Liger": 3, "quack": 1.03},
    ("attention", "forward"): {"FlexAttention": 1.1, "SDPA flash": 1.2, "SDPA cuDNN": 0.75},
    ("attention", BOTH): {"FlexAttention": 1.1, "SDPA flash": 1.8, "SDPA cuDNN": 0.65},
    ("moe_permute", "forward"): {"percent": 80, "eager": 3, "torch.compile": 1.5},
    ("quantize_fp8", "forward"): {"percent": 88, "eager": 5, "torch.compile": 1.3, "torchao": 1.1},
    ("adamw", "forward"): {"percent": 93, "foreach": 2, "torch.compile": 1.05, "torch fused": 1.1},
}
"""By kernel and pass: percent of the yardstick, and the time of each peer over ours."""


def write(lines: Sequence[Line], folder: Path) -> None:
    """Write `report.md`, `report.png` where matplotlib is there, and `benchmarks.json`."""
    picture = _draw(lines, folder / "report.png")
    (folder / "report.md").write_text("\n".join(text(lines)) + (f"\n![]({picture})\n" if picture else "\n"))
    (folder / "benchmarks.json").write_text(json.dumps(_results(lines), indent=1) + "\n")


def _results(lines: Sequence[Line]) -> dict[str, Any]:
    about = _about(lines)
    rows = list(benchmarks(lines))
    commit, machine = {"id": about["commit"]}, {"machine": "", "cpu": {}, "device": about["device"]}
    return {
        "machine_info": machine,
        "commit_info": commit,
        "benchmarks": rows,
        "datetime": about["date"],
        "version": "5",
    }


def benchmarks(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """Yield the rows that `pytest-benchmark compare` and `bench.report` read: of kernels, step and example."""
    about = _about(lines)
    for row in _rows(lines, "measure"):
        case = f"{row['kernel']} {row['shape']} {row['dtype']} {row['pass']}"
        shared = about | {k: v for k, v in row.items() if k not in ("providers", "skipped", "peer_ratios")}
        for name, one in row["providers"].items():
            more = {"ratio": row["peer_ratios"][name]} if name in row["peer_ratios"] else {"skipped": row["skipped"]}
            seconds = [1e-6 * one[key] for key in ("us_p20", "us", "us_p80")]
            full = f"bench/bench_kernels.py::test_kernel[{case}-{name}]"
            yield _row(full, case, shared | {"provider": name} | one | more, seconds)
    for row in _rows(lines, "step"):
        ratios = {f"time of {name} / ours": ratio for name, ratio in row["ratios"].items()}
        ours = row["providers"]["mpcore"]
        ratios |= {"ms per step": ours["ms"], "MFU": f"{ours['mfu']:.1%}"}
        info = about | {"shape": row["shape"], "providers": row["providers"], "ratios": ratios}
        seconds = [1e-3 * ours[key] for key in ("ms_p20", "ms", "ms_p80")]
        yield _row("bench/gpu_hour training step", "step", info, seconds)
    for row in _rows(lines, "example"):
        ratios = {"tokens per second": round(row["tokens_per_second"]), "GiB": round(row["memory"] / 2**30, 1)}
        ratios |= {"MFU": f"{row['mfu']:.1%}"} if "mfu" in row else {}
        name = f"bench/gpu_hour pretrain {row['flags']}"
        yield _row(name, "seconds a token", about | {"ratios": ratios}, [1 / row["tokens_per_second"]])


def _row(fullname: str, group: str, info: Mapping[str, Any], seconds: Sequence[float]) -> dict[str, Any]:
    """One row of pytest-benchmark, from the 20th percentile, the median and the 80th, or from one figure."""
    low, middle, high = seconds if len(seconds) == 3 else (seconds[0],) * 3
    mean = sum(seconds) / len(seconds)
    stats = {"min": low, "max": high, "mean": mean, "stddev": statistics.pstdev(seconds), "rounds": len(seconds),
             "median": middle, "iqr": high - low, "q1": low, "q3": high, "iqr_outliers": 0, "stddev_outliers": 0,
             "outliers": "0;0", "ld15iqr": low, "hd15iqr": high, "ops": 1 / mean,
             "total": sum(seconds), "iterations": 1,
             }  # fmt: skip
    name = fullname.rpartition("::")[2]
    return {"group": group, "name": name, "fullname": fullname, "params": None, "param": None,
            "extra_info": dict(info), "options": {}, "stats": stats}  # fmt: skip


def _draw(lines: Sequence[Line], file: Path) -> str:
    try:
        plot = import_module("bench.plots").plot  # of matplotlib, which a bare machine may lack
    except ImportError:
        return ""
    about = _about(lines)
    entries = [{"fullname": row["kernel"], "extra_info": about | row} for row in _rows(lines, "measure")]
    return file.name if plot(entries, file) else ""


def _about(lines: Sequence[Line]) -> dict[str, Any]:
    found = next(_rows(lines, "environment"), {})
    return {"device": "unknown", "date": "", "commit": "", "torch": "", "versions": {}} | found


def _rows(lines: Sequence[Line], job: str) -> Iterator[dict[str, Any]]:
    return (row for line in lines if line["job"] == job for row in line["rows"])


def text(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of the report."""
    about = _about(lines)
    yield f"# {about['device']}, {about['date']}, {about['commit']}\n"
    if not about.get("cuda"):
        yield "**A rehearsal on a CPU, of toy shapes: no figure of a GPU is below, and no goal is judged.**\n"
    versions = {"torch": about["torch"], **about["versions"]}
    yield ", ".join(f"{name} {version}" for name, version in versions.items()) + "\n"
    bad = [line for line in lines if line["state"] != "ok"]
    yield f"{len(lines)} jobs, {len(bad)} of them not ok; {sum(line['seconds'] for line in lines):.0f} s in all\n"
    yield "## What went wrong\n"
    if not bad:
        yield "Nothing.\n"
    for line in bad:
        yield f"- **{line['state']}** {line['job']} `{line['name']}`: {line['why']}"
    yield "\n## Ceilings\n"
    for row in _rows(lines, "ceilings"):
        yield f"- {row['rate']:.4g} {row['unit']} ({row['low']:.4g}-{row['high']:.4g})"
    yield "\n## Correct, and the same bits twice\n"
    yield "| kernel | pass | error over plain torch's | same bits |\n|---|---|---|---|"
    for line in lines:
        if line["job"] == "check":
            for row in line["rows"]:
                yield f"| {line['name']} | {row['pass']} | {row['error']} | {'yes' if row['repeats'] else 'NO'} |"
            if line["state"] != "ok":
                yield f"| {line['name']} | - | **{line['state']}** | - |"
    yield "\n## Speed\n"
    yield "Time of peers over ours; the goal in brackets, bold where it is missed.\n"
    yield "| kernel | shape | pass | us (p20-p80) | rate | of a copy or product | peers |"
    yield "|---|---|---|---|---|---|---|"
    for row in _rows(lines, "measure"):
        yield speed(row, GOALS if about.get("cuda") else {})
    for line in lines:
        if line["job"] == "measure" and line["state"] != "ok":
            yield f"| {line['name']} | - | - | **{line['state']}** | - | - | - |"
    skipped = sorted({f"{n}: {why}" for row in _rows(lines, "measure") for n, why in row["skipped"].items()})
    yield "\n" + "\n".join(f"- not compared: {why}" for why in skipped)
    yield "\n## Products\n"
    for job in ("add", "products"):
        for row in _rows(lines, job):
            yield f"- {row['shape']}: " + ", ".join(f"{name} {us} us" for name, us in row["us"].items())
    yield "\n## Kernels of a block by time\n"
    for row in _rows(lines, "block"):
        yield f"\n{row['shape']}\n\n| kernel | ms | calls |\n|---|---|---|"
        yield from (f"| `{name}` | {ms} | {calls} |" for name, ms, calls in row["kernels"])
    yield "\n## The planner's predictions\n"
    for row in _rows(lines, "planner"):
        yield f"- {row['flags']}: " + "; ".join(row["told"])
    yield "\n## Training\n"
    for row in _rows(lines, "step"):
        yield from training(row)
    yield "\n| run of the example | tokens per second | MFU | GiB |\n|---|---|---|---|"
    for row in _rows(lines, "example"):
        used = f"{row['mfu']:.1%}" if "mfu" in row else "-"
        yield f"| {row['flags']} | {row['tokens_per_second']:.0f} | {used} | {row['memory'] / 2**30:.1f} |"
    yield "\n## Tests\n"
    for line in lines:
        if line["job"] in ("tests", "doctor"):
            log = line.get("log", [])
            told = [one for one in log if " passed" in one or " failed" in one][-3:] or log[-1:]
            yield f"- {line['job']} {line['name']}, {line['state']}, {line['seconds']} s: {'; '.join(told)}"


def training(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of a training step: who is how fast, and which of ours takes the GPU's time."""
    yield f"{row['shape']}\n"
    yield "| model | ms per step (p20-p80) | tokens per second | MFU | time over ours |\n|---|---|---|---|---|"
    for name, one in row["providers"].items():
        yield (
            f"| {name} | {one['ms']} ({one['ms_p20']}-{one['ms_p80']}) | {one['tokens_per_second']} "
            f"| {one['mfu']:.1%} | {row['ratios'].get(name, 1)} |"
        )
    yield "\n| kernel of a step of ours | ms | calls |\n|---|---|---|"
    for name, ms, calls in row["kernels"]:
        yield f"| `{name}` | {ms} | {calls} |"


def speed(row: Mapping[str, Any], every_goal: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """Return a row of the table of speed."""
    ours, goals = row["providers"]["mpcore"], every_goal.get((row["kernel"], row["pass"]), {})

    def beside(name: str, value: float, unit: str = "") -> str:
        goal = goals.get(name)
        told = f"{value:g}{unit}" if goal is None else f"{value:g}{unit} ({goal:g})"
        return f"**{told}**" if goal is not None and value < goal else told

    peers = ", ".join(f"{name} {beside(name, ratio)}" for name, ratio in row["peer_ratios"].items())
    cells = [row["kernel"], f"{row['shape']} {row['dtype']}", row["pass"]]
    cells += [f"{ours['us']} ({ours['us_p20']}-{ours['us_p80']})", f"{ours['rate']} {row['unit']}"]
    return f"| {' | '.join([*cells, beside('percent', ours['percent'], ' %'), peers or '-'])} |"
