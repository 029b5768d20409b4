"""Sequence parallelism for models of transformers: norms, residuals and embeddings have T/tp tokens on each rank.

A module that owns sharded layers, such as an attention or an MLP, computes as without sequence parallelism: a hook
gathers its input over tp, and another one splits its output. The other modules must compute each token separately.

Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from mpcore import collectives
from mpcore.interop.parallelize.checks import owner_of
from mpcore.interop.parallelize.plan import LocalSizes, Replicate, SequenceParallel, Target
from mpcore.mesh.axis import Axis
from mpcore.sharding.declarations import add_partial


def shards_tokens(styles: list[Target]) -> bool:
    """Return whether a plan asks for sequence parallelism."""
    names = [name for name, _, style in styles if isinstance(style, SequenceParallel)]
    if names and names != [""]:
        raise ValueError(
            f"'sequence_parallel' is for the model itself, and the plan gives it to {names[0]!r}: write "
            f"'': 'sequence_parallel', and leave {names[0]} out: modules between sharded layers have T/tp tokens"
        )
    return bool(names)


def split_tokens(model: nn.Module, styles: list[Target], tp: Axis) -> None:
    """Shard the tokens between the sharded layers of a model over tp, in place. The layers are sharded already."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ValueError(
            f"'sequence_parallel' serves models of transformers with output embeddings, and this is a "
            f"{type(model).__name__}: leave it out of the plan"
        )
    regions = _regions(model, styles)
    inside = {module for region in regions.values() for module in region.modules()} | {*head.modules()}
    for region in regions.values():
        region.register_forward_pre_hook(partial(_gather_input, tp), with_kwargs=True)
        region.register_forward_hook(partial(_split_output, tp))
    head.register_forward_pre_hook(partial(_gather_input, tp), with_kwargs=True)
    for module in model.modules():
        if module in inside:
            continue
        if isinstance(module, nn.Embedding) or "num_embeddings" in vars(module):
            module.register_forward_hook(partial(_split_output, tp))
            continue
        for leaf, _ in module.named_parameters(recurse=False):
            add_partial(module, leaf, tp)


def _regions(model: nn.Module, styles: list[Target]) -> dict[str, nn.Module]:
    """Return by name the outermost modules that own sharded layers, unsharded attention, or a convolution."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    owners = {name for name, module in model.named_modules() if "is_causal" in vars(module)}  # as transformers' has
    owners |= {name.rpartition(".")[0] for name, module in model.named_modules() if isinstance(module, nn.Conv1d)}
    for name, _, style in styles:
        module = model.get_submodule(name)
        if isinstance(style, SequenceParallel | Replicate) or module is head or "num_embeddings" in vars(module):
            continue
        owners.add(name if isinstance(style, LocalSizes) else owner_of(model, name))
    if "" in owners:
        raise ValueError("'sequence_parallel' needs the plan's layers within modules, such as an attention and an MLP")
    outer = [name for name in owners if not any(name.startswith(f"{other}.") for other in owners)]
    return {name: model.get_submodule(name) for name in sorted(outer)}


def _gather_input(tp: Axis, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All-gather the tokens of a module's first floating-point input. Backward keeps this rank's tokens."""
    if args:
        return (collectives.gather(args[0], tp, 1), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, kwargs | {name: collectives.gather(kwargs[name], tp, 1)}


def _split_output(tp: Axis, module: nn.Module, args: Any, output: Any) -> Any:
    """Keep this rank's tokens of a module's output [B, T, D] or [B T, D]. Backward all-gathers their gradients."""
    x = output[0] if isinstance(output, tuple) else output
    rows = args[0].shape[:2] if x.dim() == 2 and args and args[0].dim() == 3 else None
    mine = collectives.split(x if rows is None else x.unflatten(0, rows), tp, -2)
    mine = mine if rows is None else mine.flatten(0, 1)
    return (mine, *output[1:]) if isinstance(output, tuple) else mine
