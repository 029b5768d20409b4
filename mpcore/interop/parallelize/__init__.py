"""Replace the layers of any model by tensor-parallel ones, as a plan says.

The package uses `layers`. Read `plan.py` first: it defines plans. `prove.py` tests a plan before it is used.
"""

from mpcore.interop.parallelize.model import parallelize
from mpcore.interop.parallelize.plan import (
    Colwise,
    Experts,
    Hidden,
    LocalSizes,
    Plan,
    Replicate,
    Rowwise,
    SequenceParallel,
    Vocab,
    model_plan,
)  # fmt: skip
from mpcore.interop.parallelize.suggest import suggest_plan
from mpcore.interop.parallelize.summary import parallelize_summary

__all__ = [
    "Colwise", "Experts", "Hidden", "LocalSizes", "Plan", "Replicate", "Rowwise", "SequenceParallel", "Vocab",
    "model_plan", "parallelize", "parallelize_summary", "suggest_plan",
]  # fmt: skip
