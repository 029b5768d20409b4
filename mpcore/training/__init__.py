"""`prepare` lays a model out on a mesh and returns a `Run`, which has every call of a training loop.

Open `prepare.py` first: its first lines list the steps in order.
"""

from mpcore.training.observers import Observer
from mpcore.training.phase import Phase
from mpcore.training.policies import Compile, Offload, Precision, Recompute, Zero
from mpcore.training.prepare import lay_out, prepare
from mpcore.training.run import Run, StepResult

__all__ = [
    "Compile", "Observer", "Offload", "Phase", "Precision", "Recompute", "Run", "StepResult", "Zero", "lay_out",
    "prepare",
]  # fmt: skip
