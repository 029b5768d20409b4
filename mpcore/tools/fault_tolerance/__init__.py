"""Survive faults: end all ranks together, save on a signal, explain a hang, detect corrupt replicas and slow ranks.

The package uses `mesh`, `sharding` and `gradients`. Read `leave.py` first.
"""

from mpcore.sharding.replicas import compare_replicas
from mpcore.tools.fault_tolerance.leave import EXIT_PEER, EXIT_STOPPED, leave, leave_together, tell_launcher
from mpcore.tools.fault_tolerance.metrics import MetricsWriter
from mpcore.tools.fault_tolerance.signals import SharedRequests, StopSignals
from mpcore.tools.fault_tolerance.spikes import Skips, Spikes
from mpcore.tools.fault_tolerance.stragglers import SlowRank, Stragglers, late_ranks
from mpcore.tools.fault_tolerance.trace import explain, read_log, record
from mpcore.tools.fault_tolerance.versions import code_versions, file_versions
from mpcore.tools.fault_tolerance.watchdog import Watchdog

__all__ = ["EXIT_PEER", "EXIT_STOPPED", "MetricsWriter", "SharedRequests", "Skips", "SlowRank", "Spikes",
           "StopSignals", "Stragglers", "Watchdog", "code_versions", "compare_replicas", "explain", "file_versions",
           "late_ranks", "leave", "leave_together", "read_log", "record", "tell_launcher"]  # fmt: skip
