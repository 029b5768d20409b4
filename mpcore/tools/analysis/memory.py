"""Count the memory that a rank of any layout needs, on fake tensors: nothing is allocated.

    mpcore memory examples.gpt.plan:build --tp 8 --pp 4 --dp 32 --preset llama3-70b

Activations are the bytes that live between the forward and the backward of a micro-batch, times the number of
micro-batches that the schedule holds at the same time. With ZeRO, the line "gathered" has the parameters that are
gathered and the gradients that are not yet reduced. The working set is what operators hold in addition while they run.
The allocator's loss is not included.
"""

from __future__ import annotations

from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.work import DryRunCounts

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def parts_of(found: DryRunCounts) -> dict[str, int]:
    """Return the largest bytes of each kind of memory that a rank holds, by the names of tables and pictures."""
    held, gathered = found.held, min(found.peak, sum(stage.gathered + stage.unsummed for stage in found.stages))
    return {
        "parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer,
        "buffers": held.buffers, "activations": found.peak - gathered, "gathered": gathered,
        "working set": max(found.work_peak - found.peak, 0),
    }  # fmt: skip


def unit_of(size: int) -> str:
    """Return the largest unit in which a size is at least 0.1."""
    return next((name for name, unit in UNITS.items() if size >= unit / 10), "KiB")


def fit(found: DryRunCounts, machine: Machine) -> str:
    """Return a line that says whether the rank fits in a GPU of the machine."""
    total, has, reserve = (size / 2**30 for size in (found.most, machine.memory, machine.reserve))
    left = has - reserve - total
    how = f"fits, {left:.3f} GiB are left" if left >= 0 else f"does not fit, {-left:.3f} GiB are missing"
    return f"a GPU of {machine.name} has {has:.1f} GiB, of which {reserve:.1f} are a reserve: this rank {how}"


def table(found: DryRunCounts, pp: int = 0) -> str:
    """Return a table of pipeline rank `pp` with one line per kind of memory, all in one unit."""
    name = unit_of(found.most)
    unit = UNITS[name]
    rows = parts_of(found) | {"total": found.most}
    rows = {what: size for what, size in rows.items() if size}
    lines = [f"{what:<12} {size / unit:>12.3f} {name}" for what, size in rows.items()]
    lines[-1] += "  at the peak; each line above is a peak of its own, so the lines can add up to more"
    for i, stage in zip(found.plan.stages_of(pp), found.stages, strict=True):
        data = stage.gathered + stage.unsummed
        more = f"; gathered parameters and unreduced gradients {data / unit:.3f} {name}" if data else ""
        lines.append(f"stage {i}: activations {stage.activations / unit:.3f} {name} per micro-batch{more}")
    return "\n".join(lines)
