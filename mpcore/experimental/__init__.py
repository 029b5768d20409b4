"""Names that may still change in any release: the promises of the other public names don't hold for them.

from mpcore.experimental import LocalUpdates
"""

from mpcore.experimental.biased_experts import BiasedExperts, BiasedGroupedLinear, clamped_swiglu
from mpcore.experimental.gated_attention import GatedAttention
from mpcore.experimental.gated_delta_net import GatedDeltaNet, gated_delta_rule
from mpcore.experimental.kimi_delta import KimiDeltaAttention
from mpcore.experimental.latent_moe import LatentMoE
from mpcore.experimental.mamba2 import Mamba2, state_space_dual
from mpcore.experimental.multi_token import IndependentHeads, MultiTokenPrediction, shift_tokens
from mpcore.experimental.mup import Mup, apply_mup
from mpcore.experimental.overlap_experts import overlap_experts
from mpcore.experimental.overlap_halves import overlap_halves
from mpcore.experimental.qk_clip import QKClip
from mpcore.experimental.recurrence import RecurrentCache
from mpcore.experimental.replay import record_routing
from mpcore.experimental.symmetric_memory import overlap_in_symmetric_memory
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
    "IndependentHeads",
    "KimiDeltaAttention",
    "LatentMoE",
    "LocalUpdates",
    "Mamba2",
    "MultiTokenPrediction",
    "Mup",
    "QKClip",
    "RecurrentCache",
    "apply_mup",
    "clamped_swiglu",
    "coordinate_check",
    "gated_delta_rule",
    "make_invariant",
    "overlap_experts",
    "overlap_halves",
    "overlap_in_symmetric_memory",
    "record_routing",
    "shift_tokens",
    "simulate",
    "state_space_dual",
]
