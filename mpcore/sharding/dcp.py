"""Refuse local shards in `torch.distributed.checkpoint` (DCP).

A local shard is a plain tensor, so DCP would write rank 0's shard as the whole tensor. DCP asks a tensor's own
`__create_write_items__`, `__create_chunk_list__` and `__get_tensor_shard__` before it takes the tensor as a whole. The
shards in a state dict have these three, and each raises an error. DCP also compares `size()` with the logical size
before it reads, so a tensor of the local shape cannot answer instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import local_tensor

_QUESTIONS = {
    "__create_write_items__": ValueError,
    "__create_chunk_list__": TypeError,  # DCP replaces a ValueError by its own
    "__get_tensor_shard__": ValueError,
}


def refuse_shards(module: nn.Module) -> None:
    """Have DCP raise an error for the sharded parameters in this module's state dict.

    The entries stay plain tensors for `load_state_dict`, `copy.deepcopy` and `torch.save`, which warns.
    """
    module.register_state_dict_post_hook(_mark_parameters)


def _mark_parameters(module: nn.Module, state: Mapping[str, Any], prefix: str, _: Any) -> None:
    for leaf, sharding in getattr(module, "shardings", {}).items():
        mark(state.get(prefix + leaf), prefix + leaf, sharding)


def mark(x: Any, name: str, sharding: Sharding) -> None:
    """Have DCP raise an error that names `name`, if `x` is a tensor that is sharded over an axis besides data."""
    shards = [shard for shard in sharding.shards if shard.axis.size > 1]
    if isinstance(x, Tensor) and x.dim() and shards:
        over = " and ".join(f"{shard.axis.name} ({shard.axis.size} ranks)" for shard in shards)
        error = (
            f"{name} is a shard of shape {tuple(local_tensor(x).shape)} of a tensor of shape {sharding.shape}, sharded "
            f"over {over}, and torch.distributed.checkpoint takes it for the whole tensor: give it "
            f"mpcore.interop.dcp.dcp_state_dict(model, mesh, optimizer), or use save and load of mpcore.checkpoint"
        )
        answers = {question: partial(_refuse, kind, error) for question, kind in _QUESTIONS.items()}
        vars(x).update(answers, __getstate__=partial(_warn, over))  # torch.save would store the attributes


def _refuse(kind: type[Exception], error: str, *_: Any) -> NoReturn:
    raise kind(error)


def _warn(over: str) -> None:
    """Warn in place of the tensor's attributes, which torch.save asks for. All tensors have one text, shown once."""
    warnings.warn(
        f"torch.save stores this rank's shards of tensors that are sharded over {over}, as if they were whole: save on "
        f"every rank with run.save or mpcore.checkpoint.save, or give it mpcore.full_state_dict(model)",
        stacklevel=2,
    )
