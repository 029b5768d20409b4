"""Name the layer whose input is sharded over tp, and which takes all features."""

from __future__ import annotations

import traceback

from torch import Tensor, nn

from mpcore.layers.norm import LayerNorm, RMSNorm
from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import named_modules

NORMALIZE = (
    "Normalize where each rank has all features: before the column-parallel layer, after the row-parallel one, or "
    "behind gather_output=True"
)


def wrong_width(error: Exception, mesh: Mesh) -> ValueError | None:
    """Return an error that names the linear or the norm whose input is sharded over tp, or None for any other error."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [each for each in frames if isinstance(each.get("self"), nn.Module)]
    module, x = (calls[-1]["self"], calls[-1].get("input", calls[-1].get("x"))) if calls else (None, None)
    if mesh.tp.size == 1 or not isinstance(x, Tensor) or x.dim() == 0:
        return None
    package = "nn"
    if type(module) is nn.Linear:
        argument, features = "in_features", module.in_features
        told = "make the layer a RowParallelLinear ('rowwise' in a plan)"
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        argument, features, told = "normalized_shape", module.normalized_shape[-1], NORMALIZE[0].lower() + NORMALIZE[1:]
    elif isinstance(module, LayerNorm | RMSNorm):
        package, argument, features, told = "mp", "dim", module.dim, NORMALIZE[0].lower() + NORMALIZE[1:]
    else:
        return None
    if x.shape[-1] == features:
        return None
    names = (name for call in calls for name, each in named_modules(call["self"]) if each is module and name)
    return ValueError(
        f"{package}.{type(module).__name__} {next(names, '')}: its input has {x.shape[-1]} features, and {argument} is "
        f"{features}. If the input is sharded over tp, as behind a ColumnParallelLinear, {told}"
    )
