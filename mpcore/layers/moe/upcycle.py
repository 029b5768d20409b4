"""Begin a mixture of experts with the weights of a dense model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor


def upcycle(state: Mapping[str, Tensor], num_experts: int, every: int = 1) -> dict[str, Tensor]:
    """A dense model's logical state dict as that of a mixture: each expert begins as a copy of the layer's MLP.

    With normalised weights of scale 1 and no shared experts the mixture's first output is the dense model's, whatever
    its router.

    Args:
        state: as `mpcore.full_state_dict` gives it; MLPs are `blocks.N.mlp.up.weight` and `blocks.N.mlp.down.weight`.
        num_experts: E.
        every: every how many-th block becomes a mixture: N with (N + 1) % every == 0.

    Returns:
        A new dict. It has no router: its weight is the mixture's own beginning, so take that from the mixture's state.

    Raises:
        ValueError: if no block becomes a mixture, or an MLP has biases, which experts have not.
    """
    mixed, found = {}, 0
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*\bblocks\.(\d+)\.mlp)\.(up|down)\.(weight|bias)", name)
        if match is None or (int(match[2]) + 1) % every:
            mixed[name] = tensor
            continue
        if match[4] == "bias":
            raise ValueError(f"{name}: experts have no biases, so a dense model with them can't be upcycled")
        leaf = "gate_up" if match[3] == "up" else "down"
        mixed[f"{match[1]}.experts.{leaf}.weight"] = tensor.expand(num_experts, *tensor.shape).clone()
        found += 1
    if not found:
        raise ValueError(f"none of the {len(state)} tensors is the MLP of a block to mix (every {every})")
    return mixed
