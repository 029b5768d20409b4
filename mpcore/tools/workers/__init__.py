"""Local-update workers that are jobs of their own: they come, go and die, wait for nobody, and can be replayed.

A worker trains a range of steps from the newest anchor, the parameters that all workers share, and hands in its update:
the change of its parameters. `outer` orders what happens, `rules` say how an update moves the anchor, and `journal`
records it. `wire`, `node` and `peer` carry it between processes; `elastic` connects a `Run` to it.

Sources: Liu et al. 2024, arXiv:2401.09135 (asynchronous Local SGD); Douillard et al. 2023, arXiv:2311.08105 (DiLoCo).
"""

from mpcore.tools.workers.rules import Average, DelayedNesterov, HeLoCo, Nesterov

__all__ = ["Average", "DelayedNesterov", "HeLoCo", "Nesterov"]
