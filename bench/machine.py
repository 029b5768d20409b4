"""What a number was measured on: without it, the number means nothing."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


@functools.cache
def describe() -> dict[str, str | int]:
    """Processor or GPU, versions, commit and date of this run."""
    about: dict[str, str | int] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": _commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return about


def gpu_state() -> dict[str, str]:
    """Clocks, power, temperature and reasons to throttle of the GPU at this moment; empty without nvidia-smi."""
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"
    ask = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={torch.cuda.current_device()}"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields.split(","), (value.strip() for value in told.split(",")), strict=False))


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Write `text` in place of what stands between two lines of a page."""
    before, found, rest = page.read_text().partition(f"{begin}\n")
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"{page} has no lines {begin} and {end}")
    page.write_text(before + found + text + ended + after)


def _commit() -> str:
    """The commit's short hash, with a plus sign where files differ from it; empty outside a clone or without git."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=9", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
