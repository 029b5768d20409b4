"""The hooks and the wrappers of a module. Checked with torch 2.11 and 2.13: no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed import get_process_group_ranks

from mpcore._torch.fsdp import is_unit, ranks_of_units


def has_hooks(module: nn.Module, besides: str = "-") -> bool:
    """Return whether a module has hooks, where functions of the package `besides` don't count."""
    held = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    hooks: list[Any] = [hook for hooks in held for hook in hooks.values()]
    return any(getattr(hook, "func", hook).__module__.partition(".")[0] != besides for hook in hooks)


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or nn.modules.module._global_forward_hooks)


def remove_forward_pre_hook(module: nn.Module, hook: Callable[..., object]) -> None:
    for key in [key for key, held in module._forward_pre_hooks.items() if held is hook]:
        del module._forward_pre_hooks[key]


def ranks_of_wrapper(module: Any, layer: nn.Module) -> dict[str, set[int]]:
    """Return the ranks that DDP or FSDP takes for replicas of a layer, by its name; {} if `module` is neither."""
    name = type(module).__name__
    if name in ("DistributedDataParallel", "FullyShardedDataParallel"):
        groups = [module.process_group, getattr(module, "_inter_node_pg", None)]
        return {name: {rank for group in groups if group is not None for rank in get_process_group_ranks(group)}}
    return {"fully_shard": ranks_of_units([module], layer)} if is_unit(module) else {}
