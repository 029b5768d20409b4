"""Print the newest results as tables and draw them: `python -m bench.report [--write FILE] [--results FOLDER]`.

A plot of each machine's newest file lies beside it. With `--write` the tables replace what stands in FILE between the
lines `<!-- bench -->` and `<!-- /bench -->`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.machine import replace_between
from bench.protocol import OURS

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
KERNELS = [
    "| kernel | shape | dtype | pass | µs (p20-p80) | rate | of a copy or product | peak MiB | host µs "
    "| time of peers / ours | machine, date, commit |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito, 2008
MARKERS, TICKS = "osD^vPX*<>", (0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
Info = dict[str, Any]


def grouped(rows: Sequence[Info]) -> tuple[list[Info], list[Info]]:
    """Return what a GPU measured of each kernel's case, with the ratios of its peers; and the rows of other benches."""
    cases: dict[tuple[str, ...], Info] = {}
    others: dict[str, Info] = {}
    for row in rows:
        info = row["extra_info"]
        if "step_of" in info and info["step_of"] != OURS:  # stands in the ratios of ours
            continue
        if "provider" not in info:
            name = info.get("source", row["fullname"]).removeprefix("bench/")
            others[f"{name} {info['device']}"] = info | {"name": name}
        elif info["clock"] == "device":
            key = (
                *(info[name] for name in ("kernel", "shape", "dtype", "pass", "device")),
                row["fullname"].split("[")[0],
            )
            case = cases.setdefault(key, {"peer_ratios": {}})
            if info["provider"] == OURS:
                case |= info | {"peer_ratios": case["peer_ratios"]}
            elif "ratio" in info:
                case["peer_ratios"][info["provider"]] = info["ratio"]
    return [case for case in cases.values() if "provider" in case], [*others.values()]


def files(results: Path) -> list[Path]:
    """Return the files of results by their date."""
    return sorted(results.glob("*.json"), key=lambda p: (p.stem.rpartition("_")[2], p.stem))


def read(path: Path) -> list[Info]:
    """Return the rows of a file of pytest-benchmark."""
    return json.loads(path.read_text())["benchmarks"]


def machine(info: Info) -> str:
    """Return what a row was measured on."""
    return f"{info['device']}, {info['date']}, {info['commit']}"


def other_row(info: Info) -> str:
    """Return the line of a bench that has ratios, targets or predictions."""
    numbers = [f"{what}: **{value}**" for what, value in info.get("ratios", {}).items()]
    numbers += [*info.get("targets", []), *(f"planned: {line}" for line in info.get("planned", []))]
    return f"| `{info['name']}` | {'<br>'.join(numbers) or info.get('shape', '')} | {machine(info)} |"


def kernel_row(info: Info) -> str:
    """Return the line of a kernel on a GPU, its peers' times over its own at the end."""
    cells = [f"`{info['kernel']}`", info["shape"], info["dtype"], info["pass"]]
    cells += [f"{info['us']} ({info['us_p20']}-{info['us_p80']})", f"{info['rate']} {info['unit']}"]
    cells += [f"{info['percent']} %", str(info["peak_mib"]), str(info["host_us"])]
    cells += ["<br>".join(f"{name}: **{ratio}**" for name, ratio in info["peer_ratios"].items()), machine(info)]
    return f"| {' | '.join(cells)} |"


def table(rows: Sequence[Info]) -> str:
    """Return all benches, kernels on a GPU in a table of their own, and who was not there to be compared."""
    kernels, others = grouped(rows)
    lines = []
    if others or not kernels:
        lines += ["| bench | result | machine, date, commit |", "|---|---|---|", *map(other_row, others)]
    if kernels:
        lines += [""] * bool(lines) + [*KERNELS, *map(kernel_row, kernels), ""]
        missing: dict[str, list[str]] = {}
        for info in kernels:
            for name, why in info["skipped"].items():
                missing.setdefault(f"{name}: {why}", []).append(info["kernel"])
        lines += [f"- Not compared ({', '.join(dict.fromkeys(names))}): {why}" for why, names in missing.items()]
    return "\n".join(lines).rstrip("\n") + "\n"


def longest_kernels(rows: Sequence[Info]) -> Iterator[str]:
    """Yield tables of the kernels that take the longest in a training step."""
    for row in rows:
        if isinstance(kernels := row["extra_info"].get("kernels"), list) and kernels:
            yield f"\n{row['name']}: {row['extra_info']['shape']}\n\n| kernel | ms | calls |\n|---|---|---|"
            yield from (f"| `{name}` | {ms} | {calls} |" for name, ms, calls in kernels)


def draw(rows: Sequence[Info], file: Path) -> bool:
    """Draw the time of each peer over ours, of all kernels on a GPU and their longest pass, as a PNG.

    Returns:
        Whether there was a kernel with a peer.
    """
    from matplotlib.figure import Figure  # which a bare machine may lack

    cases = {f"{info['kernel']}, {info['shape']}": info for info in grouped(rows)[0] if info["peer_ratios"]}
    if not cases:
        return False
    figure = Figure(figsize=(9, 1.6 + 0.34 * len(cases)), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(dict.fromkeys(name for info in cases.values() for name in info["peer_ratios"])):
        dots = [(info["peer_ratios"][name], y) for y, info in enumerate(cases.values()) if name in info["peer_ratios"]]
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        axes.scatter(*zip(*dots, strict=True), color=color, marker=marker, s=45, label=name, zorder=3)
    axes.axvline(1, color="black", linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{t:g}x" for t in TICKS], minor=False)
    axes.minorticks_off()
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.grid(alpha=0.4)
    about = next(iter(cases.values()))
    axes.set_xlabel("time of the peer / time of mpcore: right of 1x mpcore is faster", fontsize=9)
    figure.suptitle(f"Each kernel's forward and backward, {about['device']}, {about['date']}", fontsize=11)
    figure.legend(fontsize=8, loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=100)
    return True


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="a markdown file to put the tables in")
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=RESULTS, help="where the results lie")
    given = parser.parse_args(arguments)
    if not given.results.is_dir():
        raise SystemExit(f"--results {given.results} is no folder: benches write theirs to {RESULTS}")
    paths = files(given.results)
    for path in {path.stem.partition("_")[0]: path for path in paths}.values():  # the newest of each machine
        png = path.with_name(f"{path.stem}_peers.png")
        if draw(read(path), png):
            print(f"drew {png}")
    text = table([row for path in paths for row in read(path)])
    if given.write is None:
        print(text, end="")
    else:
        replace_between(given.write, BEGIN, END, text)


if __name__ == "__main__":
    main()
