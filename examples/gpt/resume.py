"""Refuse checkpoints of other runs, and load the weights of a checkpoint into a new run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from examples.gpt.arguments import flag
from examples.gpt.config import GPTConfig
from examples.gpt.optimizer import learning_rate
from mpcore import Mesh
from mpcore.checkpoint import Manifest, inspect, load
from mpcore.checkpoint.format import read_manifest
from mpcore.interop.hugging_face import ROUTER_BIAS, ROUTER_STATISTICS


def other_run(path: Path, about: Mapping[str, Any], seed: int, dtype: str, begun_elsewhere: bool) -> ValueError | None:
    """Return why a run can't resume from a checkpoint, or None. `load` refuses a checkpoint that can't be read.

    Args:
        path: the checkpoint.
        about: the facts of this run that must be the same in the checkpoint.
        seed, dtype: those of this run.
        begun_elsewhere: whether the flags name a model to begin with.
    """
    try:
        manifest = inspect(path)
    except (ValueError, OSError):
        return None
    saved: dict[str, Any] = {"tokenizer": about["tokenizer"], **manifest.config, "seed": manifest.seed}
    saved["model"] = dataclasses.asdict(GPTConfig()) | saved.get("model", {})  # fields that came later
    refused = other_dtype(path, manifest, dtype)
    if refused is not None:
        return refused
    found = differing(saved, {**about, "seed": seed})
    if not found:
        return None
    begun = ""
    if not begun_elsewhere and saved["model"] != about["model"]:
        begun = " If it began with --init-from-hf or --init-from, give that again: the shape comes from there."
    return ValueError(
        f"{path} is of another run: {'; '.join(found)}.{begun} --init-from {path} with another --out begins a new "
        f"one from its weights"
    )


def other_schedule(saved: Mapping[str, Any], schedule: Mapping[str, Any], step: int) -> str | None:
    """Describe how the learning rate schedule differs from the saved run's. Return None if the rates to come are equal.

    Args:
        saved, schedule: what `lr_schedule` returned for the saved run, and returns for this run.
        step: the number of steps done.
    """
    changed = [name for name in schedule if saved[name] != schedule[name]]
    both = (saved, schedule)
    for at in range(step, max(step, *(s["lr_decay_steps"] for s in both)) + 1 if changed else step):
        old, new = (f"{learning_rate(s, at):.3g}" for s in both)
        if old != new:
            before, now = (" ".join(f"{flag(n)} {s[n]}" if s[n] is not None else f"no {flag(n)}" for n in changed)
                           for s in both)  # fmt: skip
            return (
                f"the learning rate after {at} steps is {new} with {now}; the saved run's schedule gives {old}: "
                f"{before} keeps it"
            )
    return None


def left_behind(path: Path, newest: Path | None) -> ValueError | None:
    """Return why a run can't resume from a checkpoint that isn't the newest: `auto` and restarts would take another."""
    try:
        if newest is None or read_manifest(newest).step <= read_manifest(path).step:
            return None
    except (ValueError, OSError):  # which `load` reports
        return None
    return ValueError(
        f"--resume {path} leaves behind what was trained after it, up to {newest}, from which restarts and "
        f"--resume auto would go on: take another --out, or remove or rename the later checkpoints"
    )


def differing(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> list[str]:
    """List the fields in which two configs differ, each with both values."""
    found = []
    for name in dict.fromkeys([*here, *there]):
        a, b = there.get(name), here.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differing(a, b, f"{within}{name}.")
        elif a != b:
            a, b = ("not set" if value is None else repr(value) for value in (a, b))
            found.append(f"{within}{name} is {a} there, {b} here")
    return found


def init_from(path: str, model: nn.Module, mesh: Mesh) -> None:
    """Load the weights of a checkpoint. If it has no bias or statistics of routers, these keep their first values.

    Raises:
        ValueError: as `load`.
    """
    loaded = load(path, model, mesh=mesh, strict=False, cast=True)  # an import may be in half precision
    missing = [name for name in loaded.missing_keys if not name.endswith((ROUTER_BIAS, ROUTER_STATISTICS))]
    if missing or any(not name.endswith(ROUTER_STATISTICS) for name in loaded.unexpected_keys):
        load(path, model, mesh=mesh, cast=True)  # raises, and names them


def other_dtype(path: Path | str, manifest: Manifest, dtype: str) -> ValueError | None:
    """Return why a checkpoint's dtype doesn't fit: weights are float64 with --dtype float64, else float32."""
    found = {entry.dtype for name, entry in manifest.tensors.items() if name.startswith("model/")}
    if dtype == "float64" and "F64" not in found and "F32" in found:
        return ValueError(f"{path} has float32 weights: --dtype float32 goes on from it, not float64")
    if dtype != "float64" and "F64" in found:
        return ValueError(f"{path} has float64 weights: --dtype float64 goes on from it, not {dtype}")
    return None
