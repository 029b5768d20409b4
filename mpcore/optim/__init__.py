"""Optimizers, learning-rate schedules and loss scaling that are the same on every layout.

Open `adamw.py` first.
"""

from mpcore.optim.adamw import AdamW
from mpcore.optim.groups import decay_groups
from mpcore.optim.loss_scale import LossScaler
from mpcore.optim.muon import Muon, orthogonalize
from mpcore.optim.schedules import SCHEDULES, cosine, linear, wsd

__all__ = [
    "SCHEDULES", "AdamW", "LossScaler", "Muon", "cosine", "decay_groups", "linear", "orthogonalize", "wsd",
]  # fmt: skip
