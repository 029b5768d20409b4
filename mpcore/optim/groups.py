"""Parameter groups with and without weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def decay_groups(
    model: nn.Module, weight_decay: float, exclude: Iterable[nn.Parameter | nn.Module] = ()
) -> list[dict[str, Any]]:
    """Return two parameter groups for any optimizer: matrices with weight decay, vectors and scalars without.

    Both groups exist even if empty, so that all pipeline stages have the same groups. Frozen parameters are in neither.

    Args:
        model: the model, or this rank's pipeline stage. Shard it over data first.
        weight_decay: weight decay of the matrices.
        exclude: parameters, or modules with all their parameters, to leave out because you put them in other groups.

    Returns:
        `[{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]`.

    Raises:
        TypeError: if `exclude` holds something other than parameters and modules, such as a name.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> [(len(group["params"]), group["weight_decay"]) for group in mpcore.decay_groups(model, 0.1)]
        [(1, 0.1), (1, 0.0)]
    """
    left = parameters_of(exclude)
    parameters = [p for p in model.parameters() if p.requires_grad and p not in left]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"it takes the model, which says where its parameters lie, not {type(model).__name__}")


def parameters_of(exclude: Iterable[nn.Parameter | nn.Module]) -> set[Tensor]:
    """Return the given parameters, and all parameters of the given modules."""
    found: set[Tensor] = set()
    for each in exclude:
        if not isinstance(each, Tensor | nn.Module):
            raise TypeError(f"exclude holds {each!r}, neither a parameter nor a module: model.get_submodule finds it")
        found.update(each.parameters() if isinstance(each, nn.Module) else (each,))
    return found
