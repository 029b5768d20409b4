"""Read a run of `examples.gpt.pretrain` as a row: its flags from config.json, its seconds from metrics.jsonl."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from mpcore.checkpoint.schema import convert, read_json, read_lines
from mpcore.tools.analysis.rows import Row, read_row
from mpcore.tools.parsers import AXES

PLANNED = (
    "zero", "replicate", "sequence_parallel", "cp_kind", "schedule", "virtual_stages", "preset", "layers", "d_model",
    "heads", "kv_heads", "d_ff", "dropout", "experts", "seq_len", "tie_embeddings", "top_k", "expert_d_ff", "moe_every",
    "global_batch", "micro_batch", "recompute", "dtype", "autocast", "residual_dtype", "fp8", "optimizer",
)  # fmt: skip
"""The flags and fields that change what a step computes, sends or holds; the last four are of version 0.2."""
SKIPPED = 2
"""The first steps, which compile and connect."""


def read_run(folder: Path) -> Row:
    """Read the folder of a run."""
    try:
        config = convert(dict[str, Any], read_json(folder / "config.json", 2**24), "config.json")
        lines = [*read_lines(folder / "metrics.jsonl", steps=False)]
        flags = convert(dict[str, Any], config.get("run"), "config.json: run")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no run: config.json and metrics.jsonl can't be read: {error}") from error
    times = [
        convert(float, line["seconds"], f"{folder}: seconds") for line in lines if "seconds" in line and "loss" in line
    ][SKIPPED:]
    if not times:
        raise ValueError(f"{folder}/metrics.jsonl has no step with seconds after the first {SKIPPED}")
    columns = {name: flags[name] for name in (*AXES, *PLANNED) if flags.get(name) is not None}
    for table in ("model", "moe", "latent"):
        columns |= {f"{table}.{name}": value for name, value in flags.get(table, {}).items() if value is not None}
    return read_row({"name": folder.name, "seconds": statistics.median(times), **columns}, str(folder))
