"""Swap the layers of any model for parallel ones, as a plan says.

Stands on `layers`. Open `plan.py` first: it has the language of plans.
"""

from mpcore.interop.parallelize.model import parallelize
from mpcore.interop.parallelize.plan import Colwise, LocalSizes, Plan, Replicate, Rowwise, Vocab, model_plan

__all__ = ["Colwise", "LocalSizes", "Plan", "Replicate", "Rowwise", "Vocab", "model_plan", "parallelize"]
