"""Run N ranks in one process, to debug them: breakpoints, marked prints, one traceback, deadlocks explained.

`simulate` runs a function as every rank of a mesh, each in a thread, one thread at a time. It stands on the mesh and on
`fault_tolerance`, whose explainer says why ranks wait. docs/debugging.md shows how to use it.
"""

from mpcore.simulation.ranks import DeadlockError, simulate
from mpcore.simulation.turns import RankError

__all__ = ["DeadlockError", "RankError", "simulate"]
