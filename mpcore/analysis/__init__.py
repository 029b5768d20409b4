"""What a run would hold, send and take, counted before it runs: `python -m mpcore.analysis {memory,ledger,plan}`.

Stands on all that a training step stands on. Open `dry_run.py` first: it runs one rank's step on fake tensors.
"""

from mpcore.analysis.counts import Ledger, block_bytes, volume, zero_bytes
from mpcore.analysis.dry_run import Work, dry_run, peak
from mpcore.analysis.memory import layer_activation_bytes
from mpcore.analysis.plan import Estimate, Machine, estimate, plan

__all__ = [
    "Estimate", "Ledger", "Machine", "Work", "block_bytes", "dry_run", "estimate", "layer_activation_bytes", "peak",
    "plan", "volume", "zero_bytes",
]  # fmt: skip
