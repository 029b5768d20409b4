"""Run N ranks in one process to debug them: breakpoints, output marked by rank, one traceback, deadlocks explained.

`simulate` runs a function as every rank of a mesh. Each rank is a thread, and one thread runs at a time. The package
uses `mesh`, and `fault_tolerance` to explain why ranks wait. docs/debugging.md shows how to use it.
"""

from mpcore.tools.simulation.ranks import DeadlockError, simulate
from mpcore.tools.simulation.turns import RankError

__all__ = ["DeadlockError", "RankError", "simulate"]
