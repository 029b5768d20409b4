"""Begin a mixture of experts with the weights of a dense model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mpcore.layers.moe.layer import ParallelMoE
from mpcore.sharding.declarations import named_modules


def upcycle(state: Mapping[str, Tensor], mixture: nn.Module) -> dict[str, Tensor]:
    """Turn the state dict of a dense model into that of a mixture: each expert is a copy of the layer's MLP.

    With normalised weights of scale 1 and no shared experts the mixture's first output equals the dense model's, for
    any router. With a top_k of 1 weights aren't normalised: then it is the dense MLP's output times the router's score.

    Args:
        state: as `mpcore.full_state_dict` gives it, of a model with a `ParallelMLP` where the mixture has a
            `ParallelMoE`, under any name.
        mixture: the model that is to load it, or this rank's stage of it; on the meta device too.

    Returns:
        A new dict. It has no router weights: take those from the mixture's own state dict.

    Raises:
        ValueError: if the model has no `ParallelMoE`, the dense one no MLP there, or one with biases, which experts
            have not.

    Example:
        >>> dense = nn.Sequential(mpcore.ParallelMLP(4, 8, bias=False))
        >>> mixture = nn.Sequential(mpcore.ParallelMoE(4, 8, num_experts=3, top_k=2))
        >>> state = mpcore.upcycle(mpcore.full_state_dict(dense), mixture)
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'0.experts.gate_up.weight': (3, 16, 4), '0.experts.down.weight': (3, 4, 8)}
    """
    layers = [(f"{name}.".lstrip("."), m) for name, m in named_modules(mixture) if isinstance(m, ParallelMoE)]
    if not layers:
        raise ValueError(f"the {type(mixture).__name__} has no ParallelMoE: give the mixture, not the dense model")
    mixed = dict(state)
    for name, moe in layers:
        for projection, expert in (("up", "gate_up"), ("down", "down")):
            weight = mixed.pop(f"{name}{projection}.weight", None)
            if weight is None:
                raise ValueError(f"the dense model's {len(state)} tensors have no {name}{projection}.weight, an MLP's")
            if f"{name}{projection}.bias" in state:
                raise ValueError(f"{name}{projection}.bias: experts have no biases, so it can't be upcycled")
            mixed[f"{name}experts.{expert}.weight"] = weight.expand(moe.router.num_experts, *weight.shape).clone()
    return mixed
