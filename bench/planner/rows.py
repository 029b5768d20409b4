"""Read runs with a known time, as rows of a JSON list or of a CSV file, for `python -m bench.planner`.

A row has the mesh, the time of the run, and flags of the target: `docs/records/2026-11-26_planner.md` lists the
columns.

    [{"name": "8B", "gpus": 8, "tp": 1, "cp": 2, "preset": "llama3-8b", "dtype": "bfloat16", "micro_batch": 1,
      "batch": 128, "seconds": 12.78}]
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpcore.checkpoint.schema import convert, read_json, read_lines
from mpcore.tools.parsers import AXES

TARGET = "examples.gpt.plan:build"
OWN = ("name", "set", "machine", "seconds", "tflops", "flops", "gpus", "attention", "target", "gradient_bytes")
ALIASES = {"hidden": "d_model", "batch": "global_batch", "stages_per_rank": "virtual_stages"}
FORMULAS = {"plain": (72, 12), "recomputed": (96, 16)}
# The flags and fields that change what a step computes, sends or holds; the last four are of version 0.2.
PLANNED = (
    "zero", "replicate", "sequence_parallel", "cp_kind", "schedule", "virtual_stages", "preset", "layers", "d_model",
    "heads", "kv_heads", "d_ff", "dropout", "experts", "seq_len", "tie_embeddings", "top_k", "expert_d_ff", "moe_every",
    "global_batch", "micro_batch", "recompute", "dtype", "autocast", "residual_dtype", "fp8", "optimizer",
)  # fmt: skip
SKIPPED = 2  # the first steps of a run, which compile and connect


@dataclass(frozen=True)
class Row:
    """A run.

    Attributes:
        set: the set of rows whose errors are averaged together.
        machine: a profile's name or path, or "".
        seconds: seconds per step. None: the run ran out of memory.
        unfused: whether attention writes its scores to memory.
        gradient_bytes: the bytes of gradients per parameter in the run's runtime.
    """

    name: str
    set: str
    machine: str
    target: str
    sizes: dict[str, int]
    arguments: tuple[str, ...]
    seconds: float | None
    unfused: bool = False
    gradient_bytes: int = 4


def read_rows(path: str | Path) -> list[Row]:
    """Read rows from a .json or .csv file."""
    path = Path(path)
    try:
        if path.suffix == ".csv":
            content: Any = list(csv.DictReader(path.read_text().splitlines()))
        else:
            content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the rows {path} can't be read: {error}") from error
    content = content.get("rows", content) if isinstance(content, dict) else content
    if not isinstance(content, list) or not content:
        raise ValueError(f"the rows {path} are no list of at least one row")
    rows = [read_row(row, f"{path}, row {i}") for i, row in enumerate(content, start=1)]
    return [replace(r, machine=str(path.parent / r.machine)) if r.machine.endswith(".json") else r for r in rows]


def read_row(row: Any, where: str = "the row") -> Row:
    """Read one row, a mapping of columns to values.

    Example:
        >>> row = read_row({"tp": 2, "gpus": 4, "layers": 2, "batch": 8, "seconds": 1.5})
        >>> row.sizes["dp"], row.arguments
        (2, ('--layers', '2', '--global-batch', '8'))
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}, no mapping of columns to values")
    values: dict[str, Any] = {}
    for key, value in row.items():
        name = str(key).strip().lower().replace("-", "_").replace(" ", "_")
        name, value = ALIASES.get(name, name), value.strip() if isinstance(value, str) else value
        if value in (None, ""):
            continue
        if name in values:
            raise ValueError(f"{where}: the column {key} gives {name} a second time")
        values[name] = value
    where = f"{where} ({values['name']})" if "name" in values else where
    sizes = _mesh(values, where)
    unfused = values.get("attention", "fused")
    if unfused not in ("fused", "unfused"):
        raise ValueError(f"{where}: attention {unfused!r} is none of fused, unfused")
    if str(values.get("virtual_stages", 1)) != "1":
        values.setdefault("schedule", "interleaved")
    else:
        values.pop("virtual_stages", None)
    arguments = [word for name, value in values.items() if name not in (*OWN, *AXES) for word in _flag(name, value)]
    return Row(
        str(values.get("name", where)), str(values.get("set", "rows")), str(values.get("machine", "")),
        str(values.get("target", TARGET)), sizes, tuple(arguments), _seconds(values, sizes, where),
        unfused == "unfused", _integer(values.get("gradient_bytes", 4), "gradient_bytes", where),
    )  # fmt: skip


def _mesh(values: Mapping[str, Any], where: str) -> dict[str, int]:
    sizes = {axis: _integer(values[axis], axis, where) for axis in AXES if axis in values}
    each = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "cp"))
    if "gpus" in values:
        gpus = _integer(values["gpus"], "gpus", where)
        if gpus % each:
            raise ValueError(f"{where}: {gpus} gpus are not a multiple of tp x pp x cp = {each}")
        if sizes.setdefault("dp", gpus // each) * each != gpus:
            raise ValueError(f"{where}: {gpus} gpus are not tp x pp x cp x dp = {each * sizes['dp']}")
    return {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": 1} | sizes


def _number(value: Any, name: str, where: str, kind: str = "number above 0") -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf or (kind != "number above 0" and number % 1):
        raise ValueError(f"{where}: {name} is {value!r}, no {kind}")
    return number


def _integer(value: Any, name: str, where: str) -> int:
    return int(_number(value, name, where, "integer from 1"))


def _flag(name: str, value: Any) -> list[str]:
    flag, text = f"--{name.replace('_', '-')}", str(value).lower()
    if text in ("true", "on"):
        return [flag]
    if text in ("false", "off"):
        return []
    return [flag, *map(str, value if isinstance(value, list) else [value])]


def _seconds(values: Mapping[str, Any], sizes: Mapping[str, int], where: str) -> float | None:
    given = [name for name in ("seconds", "tflops") if name in values]
    if len(given) != 1:
        raise ValueError(f"{where}: give one of the columns seconds and tflops, not {len(given)} of them")
    if str(values[given[0]]).lower() == "oom":
        return None
    number = _number(values[given[0]], given[0], where)
    if given == ["seconds"]:
        return number
    counted = values.get("flops", "recomputed" if values.get("recompute") == "full" else "plain")
    flops = flops_of(values, str(counted), where) if counted in FORMULAS else _number(counted, "flops", where)
    return flops / (number * 1e12 * math.prod(sizes[axis] for axis in ("tp", "pp", "cp", "dp")))


def flops_of(values: Mapping[str, Any], formula: str, where: str) -> float:
    """Return the floating-point operations per step by Megatron's formula, F B s L h^2 (1 + s / 6h + V / DLh).

    F and D are 72 and 12 for "plain", 96 and 16 for "recomputed". The latter also counts the forward that full
    recomputation repeats.
    """
    names = ("global_batch", "seq_len", "layers", "d_model", "vocab_size")
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"{where}: tflops need the columns {', '.join(missing)}, or flops, the operations of a step")
    B, s, L, h, V = (_integer(values[name], name, where) for name in names)
    factor, divisor = FORMULAS[formula]
    return factor * B * s * L * h * h * (1 + s / (6 * h) + V / (divisor * L * h))


def read_run(folder: Path) -> Row:
    """Read the folder of a run of the example: its flags from config.json, its seconds from metrics.jsonl."""
    try:
        config = convert(dict[str, Any], read_json(folder / "config.json", 2**24), "config.json")
        lines = [*read_lines(folder / "metrics.jsonl", steps=False)]
        flags = convert(dict[str, Any], config.get("run"), "config.json: run")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no run: config.json and metrics.jsonl can't be read: {error}") from error
    steps = [line for line in lines if "seconds" in line and "loss" in line]
    times = [convert(float, line["seconds"], f"{folder}: seconds") for line in steps][SKIPPED:]
    if not times:
        raise ValueError(f"{folder}/metrics.jsonl has no step with seconds after the first {SKIPPED}")
    columns = {name: flags[name] for name in (*AXES, *PLANNED) if flags.get(name) is not None}
    for table in ("model", "moe", "latent"):
        columns |= {f"{table}.{name}": value for name, value in flags.get(table, {}).items() if value is not None}
    return read_row({"name": folder.name, "seconds": statistics.median(times), **columns}, str(folder))
