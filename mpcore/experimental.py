"""Names that may still change in any release: the promises of the other public names don't hold for them.

from mpcore.experimental import LocalUpdates
"""

from mpcore.layers.attention.gated import GatedAttention
from mpcore.layers.gated_delta_net import GatedDeltaNet, gated_delta_rule
from mpcore.layers.mamba2 import Mamba2, state_space_dual
from mpcore.layers.moe.biased import BiasedExperts, BiasedGroupedLinear, clamped_swiglu
from mpcore.layers.moe.replay import record_routing
from mpcore.layers.multi_token import MultiTokenPrediction, shift_tokens
from mpcore.layers.recurrence import RecurrentCache
from mpcore.optim.mup import Mup, apply_mup
from mpcore.tools.coordinate_check import coordinate_check
from mpcore.tools.diloco import DiLoCo
from mpcore.tools.invariant import make_invariant
from mpcore.tools.local_updates import LocalUpdates
from mpcore.tools.simulation import simulate

__all__ = [
    "BiasedExperts",
    "BiasedGroupedLinear",
    "DiLoCo",
    "GatedAttention",
    "GatedDeltaNet",
    "LocalUpdates",
    "Mamba2",
    "MultiTokenPrediction",
    "Mup",
    "RecurrentCache",
    "apply_mup",
    "clamped_swiglu",
    "coordinate_check",
    "gated_delta_rule",
    "make_invariant",
    "record_routing",
    "shift_tokens",
    "simulate",
    "state_space_dual",
]
