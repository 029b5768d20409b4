"""Explain an error of the user's forward or loss: name the layer, and what may be wrong under the layout."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from torch import nn

from mpcore.layers.module import ParallelLayer
from mpcore.sharding.declarations import named_modules
from mpcore.tools.verify.layout import Layout
from mpcore.training.loss_check import SHARDED
from mpcore.training.replica_check import first_names


def explained(error: Exception, model: nn.Module, loss: Callable[..., Any], layout: Layout) -> str:
    """Return an error's message in one line, with the layer whose forward was running, and a likely cause."""
    message = " ".join(str(error).split("\n"))
    names = {module: name for name, module in named_modules(model)}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [each for each in (frame.f_locals.get("self") for frame in frames) if isinstance(each, nn.Module)]
    called = [names[each] for each in calls if each in names]
    where = ""
    if called:
        where = f" (in layer {called[-1]})" if called[-1] else " (in the model's own forward)"
    elif any(frame.f_code is loss.__code__ for frame in frames):
        where = " (in the loss)"
    where = "" if " (in layer " in message else where
    if isinstance(error, IndexError) and layout.tp > 1 and not called:
        where += f"; if the loss reads logits that are sharded: {SHARDED}"
    forgotten = without_sequence_parallel(named_modules(model)) if layout.sequence_parallel else []
    if forgotten:
        built = f"Built without sequence_parallel=True: {first_names(forgotten, 5)}: pass it to every layer"
        return f"{message}{where}. {built}"
    return f"{message}{where}{why_sizes(message, layout)}"


def without_sequence_parallel(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return the names of layers with tp that aren't sequence parallel, if other layers are.

    A layer inside another layer with tp is left out: the outer layer built it.
    """
    layers: dict[str, ParallelLayer] = {}
    for name, module in modules:
        outer = ("", *accumulate(name.split(".")[:-1], "{}.{}".format)) if name else ()
        if isinstance(module, ParallelLayer) and module.tp.size > 1 and not layers.keys() & {*outer}:
            layers[name] = module
    found = [name for name, layer in layers.items() if not layer.sequence_parallel]
    return found if len(found) < len(layers) else []


def why_sizes(error: str, layout: Layout) -> str:
    """Return a hint for torch's error about two sizes, if one is tp times the other; otherwise ""."""
    found = re.search(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", error)
    small, large = sorted(map(int, found.groups())) if found else (0, 0)
    if not found or layout.tp == 1 or small * layout.tp != large:
        return ""
    if layout.sequence_parallel:
        return (
            f". A rank holds {small} of {large} tokens under sequence parallelism: use mp.PositionEmbedding with "
            "tp=mesh.tp and sequence_parallel=True for learned positions, and this rank's tokens of other operands"
        )
    return (
        f". A rank holds {small} of the {large} features that a column-parallel layer shards: shard the other operand "
        "too, or make the layer an mp.RowParallelLinear if it is swapped"
    )
