"""Print the newest results as the README's table: `python -m bench.report [--write FILE]`.

With `--write` the table replaces what stands in FILE between the lines `<!-- bench -->` and `<!-- /bench -->`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- bench -->\n", "<!-- /bench -->"


def rows(path: Path) -> list[str]:
    """One line for each bench of a results file."""
    lines = []
    for entry in json.loads(path.read_text())["benchmarks"]:
        info = entry["extra_info"]
        numbers = [f"{what}: **{value}**" for what, value in info.get("ratios", {}).items()]
        numbers += [f"{key}: {' + '.join(f'{n} {op}' for op, n in info[key].items())}"
                    for key in ("forward", "backward") if key in info]  # fmt: skip
        name = entry["fullname"].removeprefix("bench/")
        lines.append(f"| `{name}` | {'<br>'.join(numbers)} | {info['device']}, {info['date']}, {info['commit']} |")
    return lines


def table() -> str:
    """All results files, a later file's bench in place of an earlier one's."""
    newest: dict[str, str] = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda p: (p.stem.rpartition("_")[2], p.stem)):
        newest |= {(line.split("|")[1], path.stem.partition("_")[0]): line for line in rows(path)}
    return "\n".join(["| bench | result | machine, date, commit |", "|---|---|---|", *newest.values()]) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="a markdown file to put the table in")
    file = parser.parse_args().write
    if file is None:
        print(table(), end="")
        return
    before, begin, rest = file.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{file} has no lines {BEGIN.strip()} and {END}")
    file.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
