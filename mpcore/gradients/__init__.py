"""Gradients between backward and the optimizer step: accumulate, all-reduce, measure the norm, clip, drop.

The functions read how layers declare their parameters. Optimizers and data parallelism use them. Open `reduce.py`
first.
"""

from mpcore.gradients.accumulate import gradient_of, main_gradients, mark_reduced, zero_gradients
from mpcore.gradients.drop import drop_gradients
from mpcore.gradients.guard import ReadsMainGradients, guard_optimizer
from mpcore.gradients.norm import clip_gradients, grad_norm
from mpcore.gradients.reduce import reduce_gradients

__all__ = [
    "ReadsMainGradients", "clip_gradients", "drop_gradients", "grad_norm", "gradient_of",
    "guard_optimizer", "main_gradients", "mark_reduced", "reduce_gradients", "zero_gradients",
]  # fmt: skip
