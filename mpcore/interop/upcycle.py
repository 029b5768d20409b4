"""Initialize a mixture of experts from the weights of a dense model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mpcore.layers.moe.layer import ParallelMoE
from mpcore.sharding.declarations import named_modules


def upcycle(state: Mapping[str, Tensor], mixture: nn.Module) -> dict[str, Tensor]:
    """Convert a dense model's full state dict to the state dict of a mixture of experts.

    Each expert of a layer is a copy of the dense MLP of that layer. With normalized router scores, `routed_scale=1` and
    no shared experts, the untrained mixture returns the same output as the dense model, whatever the router's weights.
    With `top_k=1` the scores are not normalized: the router's score multiplies the output of each MLP.

    Args:
        state: the dense model's state dict from `mpcore.full_state_dict`. The dense model must have a `ParallelMLP`
            under the name of each `ParallelMoE` of the mixture.
        mixture: the model that will load the result, or this rank's pipeline stage. It may be on the meta device.

    Returns:
        A new state dict of unsharded tensors, with all E experts: `experts.gate_up.weight` [E, 2F, D] (or [E, F, D]
        without a gate) and `experts.down.weight` [E, D, F]. It has no router weights: use those of the mixture's own
        state dict.

    Raises:
        ValueError: if the mixture has no `ParallelMoE`, one with weights that no MLP has (`LatentMoE`), the dense model
            has no MLP of the same name, or the MLP has biases, which experts do not support.

    Example:
        >>> dense = nn.Sequential(mpcore.ParallelMLP(4, 8, bias=False))
        >>> mixture = nn.Sequential(mpcore.ParallelMoE(4, 8, num_experts=3, top_k=2))
        >>> state = mpcore.interop.upcycle.upcycle(mpcore.full_state_dict(dense), mixture)
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'0.experts.gate_up.weight': (3, 16, 4), '0.experts.down.weight': (3, 4, 8)}
    """
    layers = [(f"{name}.".lstrip("."), m) for name, m in named_modules(mixture) if isinstance(m, ParallelMoE)]
    if not layers:
        raise ValueError(f"the {type(mixture).__name__} has no ParallelMoE: give the mixture, not the dense model")
    mixed = dict(state)
    for name, moe in layers:
        for other in {leaf.partition(".")[0] for leaf, _ in moe.named_parameters()} - {"router", "experts", "shared"}:
            raise ValueError(
                f"{name}{other} of {type(moe).__name__} changes what the experts get, and a dense MLP has no such "
                f"weight: upcycle to a ParallelMoE"
            )
        for projection, expert in (("up", "gate_up"), ("down", "down")):
            weight = mixed.pop(f"{name}{projection}.weight", None)
            if weight is None:
                raise ValueError(f"the dense model's {len(state)} tensors have no {name}{projection}.weight, an MLP's")
            if f"{name}{projection}.bias" in state:
                raise ValueError(f"{name}{projection}.bias: experts have no biases, so it can't be upcycled")
            mixed[f"{name}experts.{expert}.weight"] = weight.expand(moe.router.num_experts, *weight.shape).clone()
    return mixed
