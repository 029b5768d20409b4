"""Print the newest results as tables and draw them: `python -m bench.report [--write FILE] [--results FOLDER]`.

The plots lie beside the results, a PNG for each file of them. With `--write` the tables replace what stands in FILE
between the lines `<!-- bench -->` and `<!-- /bench -->`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.machine import replace_between
from bench.plots import compare, plot
from bench.protocol import OURS

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
FIGURES = ("us", "us_p20", "us_p80", "rate", "percent", "peak_mib", "host_us", "error")
KERNELS = [
    "| kernel | shape | dtype | pass | µs (p20-p80) | rate | of a copy or product | peak MiB | host µs "
    "| time of peers / ours | machine, date, commit |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


def newest(results: Path) -> list[dict[str, Any]]:
    """The entries of all results files, a later file's bench in place of an earlier one's of the same machine."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in _files(results):
        for entry in grouped(json.loads(path.read_text())["benchmarks"]):
            found[entry["fullname"], path.stem.partition("_")[0]] = entry
    return list(found.values())


def grouped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each case of a kernel, with all its providers; other benches as they are."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        info = row["extra_info"]
        if "step_of" in info and info["step_of"] != OURS:  # stands in the ratios of ours
            continue
        if "provider" not in info:
            name = info.get("source", row["fullname"])
            found[name] = row | {"fullname": name}
            continue
        if info["clock"] != "device":
            continue
        case = row["fullname"].removesuffix(f"-{info['provider']}]")
        empty = {"providers": {}, "peer_ratios": {}, "skipped": {}}
        entry = found.setdefault(case, {"fullname": case, "extra_info": empty})
        entry["extra_info"]["providers"][info["provider"]] = {key: info[key] for key in FIGURES}
        entry["extra_info"] |= {key: value for key, value in info.items() if key not in (*FIGURES, "provider", "ratio")}
        if "ratio" in info:
            entry["extra_info"]["peer_ratios"][info["provider"]] = info["ratio"]
    return [e for e in found.values() if OURS in e["extra_info"].get("providers", {OURS: None})]


def _files(results: Path) -> list[Path]:
    return sorted(results.glob("*.json"), key=lambda p: (p.stem.rpartition("_")[2], p.stem))


def _machine(info: dict[str, Any]) -> str:
    return f"{info['device']}, {info['date']}, {info['commit']}"


def row(entry: dict[str, Any]) -> str:
    """The line of a bench that has ratios or counts."""
    info = entry["extra_info"]
    numbers = [f"{what}: **{value}**" for what, value in info.get("ratios", {}).items()]
    numbers += info.get("targets", [])
    numbers += [
        f"{key}: {' + '.join(f'{n} {op}' for op, n in info[key].items())}"
        for key in ("forward", "backward")
        if key in info
    ]
    name = entry["fullname"].removeprefix("bench/")
    return f"| `{name}` | {'<br>'.join(numbers)} | {_machine(info)} |"


def kernel_row(info: dict[str, Any]) -> str:
    """The line of a kernel on a GPU, its peers' times over its own at the end."""
    ours = info["providers"][OURS]
    cells = [f"`{info['kernel']}`", info["shape"], info["dtype"], info["pass"]]
    cells += [f"{ours['us']} ({ours['us_p20']}-{ours['us_p80']})", f"{ours['rate']} {info['unit']}"]
    cells += [f"{ours['percent']} %", str(ours["peak_mib"]), str(ours["host_us"])]
    cells += ["<br>".join(f"{name}: **{ratio}**" for name, ratio in info["peer_ratios"].items()), _machine(info)]
    return f"| {' | '.join(cells)} |"


def table(results: Path = RESULTS) -> str:
    """All benches, kernels on a GPU in a table of their own, and who was not there to be compared."""
    entries = newest(results)
    kernels = [entry["extra_info"] for entry in entries if "kernel" in entry["extra_info"]]
    others = [row(entry) for entry in entries if "kernel" not in entry["extra_info"]]
    lines = []
    if others or not kernels:
        lines += ["| bench | result | machine, date, commit |", "|---|---|---|", *others]
    if kernels:
        missing: dict[str, list[str]] = {}
        for info in kernels:
            for name, why in info["skipped"].items():
                where = missing.setdefault(f"{name}: {why}", [])
                where += [info["kernel"]] * (info["kernel"] not in where)
        lines += [""] * bool(lines) + [*KERNELS, *map(kernel_row, kernels)]
        lines += [""] * bool(missing) + [f"- Not compared ({', '.join(w)}): {why}" for why, w in missing.items()]
    return "\n".join(lines) + "\n"


def plots(results: Path = RESULTS) -> list[Path]:
    """Draw the newest file of each machine."""
    last = {path.stem.partition("_")[0]: path for path in _files(results)}
    drawn = [(path.with_suffix(".png"), grouped(json.loads(path.read_text())["benchmarks"])) for path in last.values()]
    found = [png for png, entries in drawn if plot(entries, png)]
    beside = [(png.with_name(f"{png.stem}_peers.png"), entries) for png, entries in drawn]
    return found + [png for png, entries in beside if compare(entries, png)]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="a markdown file to put the tables in")
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=RESULTS, help="where the results lie")
    given = parser.parse_args(arguments)
    if not given.results.is_dir():
        raise SystemExit(f"--results {given.results} is no folder: benches write theirs to {RESULTS}")
    for png in plots(given.results):
        print(f"drew {png}")
    if given.write is None:
        print(table(given.results), end="")
        return
    replace_between(given.write, BEGIN, END, table(given.results))


if __name__ == "__main__":
    main()
