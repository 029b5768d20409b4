"""Count what a run holds, sends and takes before it runs: `mpcore memory`, `mpcore ledger`, `mpcore plan`.

Stands on all that a training step stands on. Open `dry_run.py` first: it runs one rank's step on fake tensors.
"""

from mpcore.analysis.counts import Ledger, block_bytes, volume
from mpcore.analysis.dry_run import Work, dry_run, peak
from mpcore.analysis.plan import Estimate, Machine, estimate, plan

__all__ = [
    "Estimate", "Ledger", "Machine", "Work", "block_bytes", "dry_run", "estimate", "peak", "plan", "volume",
]  # fmt: skip
