"""Count what a run holds, sends and computes before it runs: `mpcore memory`, `mpcore ledger`, `mpcore plan`.

The package uses everything that a training step uses. Read `work.py` first: it defines what is counted. Then read
`dry_run.py`: it runs one rank's step on fake tensors.
"""

from mpcore.tools.analysis.communication import CommunicationClock
from mpcore.tools.analysis.counts import CommunicationCounter, volume
from mpcore.tools.analysis.dry_run import dry_run
from mpcore.tools.analysis.layout import Counter, Layout
from mpcore.tools.analysis.machine import Machine, load_machine
from mpcore.tools.analysis.peak import peak
from mpcore.tools.analysis.seconds import Seconds, estimate
from mpcore.tools.analysis.work import LayoutSpec, Model, Work, make_work

__all__ = ["CommunicationClock", "CommunicationCounter", "Counter", "Layout", "LayoutSpec", "Machine", "Model",
           "Seconds", "Work", "dry_run", "estimate", "load_machine", "make_work", "peak", "volume"]  # fmt: skip
