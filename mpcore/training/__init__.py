"""The front door: `prepare` lays a model out on a mesh and returns a `Run`, which has all that a training loop calls.

Stands above every package that it puts in order. Open `prepare.py` first: the order stands there, and nowhere else.
"""

from mpcore.training.policies import Compile, LocalUpdates, Offload, Precision, Recompute, Zero
from mpcore.training.prepare import lay_out, prepare
from mpcore.training.run import Run, StepResult

__all__ = [
    "Compile",
    "LocalUpdates",
    "Offload",
    "Precision",
    "Recompute",
    "Run",
    "StepResult",
    "Zero",
    "lay_out",
    "prepare",
]
