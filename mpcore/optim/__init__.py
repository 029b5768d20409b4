"""Optimizers that take on every layout the step of the unsharded model, learning rates and the loss scale.

Stands on `gradients`. Open `adamw.py` first.
"""

from mpcore.optim.adamw import AdamW
from mpcore.optim.groups import decay_groups
from mpcore.optim.loss_scale import LossScaler
from mpcore.optim.muon import Muon, orthogonalize
from mpcore.optim.schedules import SCHEDULES, cosine, linear, wsd

__all__ = [
    "SCHEDULES", "AdamW", "LossScaler", "Muon", "cosine", "decay_groups", "linear", "orthogonalize", "wsd",
]  # fmt: skip
