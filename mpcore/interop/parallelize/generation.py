"""Guard transformers' `generate` on a sharded model: every rank runs it, and all ranks must choose the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.layers.linear import ColumnParallelLinear
from mpcore.mesh.agreement import check_same
from mpcore.mesh.axis import Axis
from mpcore.random import random_state
from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import is_dtensor

REFUSED_SAVE = (
    "save_pretrained of transformers would write the shards of this rank as if they were whole: call "
    "mpcore.interop.hugging_face.save_pretrained(model, folder, mesh) on every rank"
)


def guard_save(model: nn.Module) -> None:
    """Make transformers' own `save_pretrained` and `resize_token_embeddings` raise while the model is sharded."""
    for own in (save_pretrained, resize_token_embeddings):
        if callable(getattr(type(model), own.__name__, None)):
            vars(model)[own.__name__] = MethodType(own, model)


def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Write the folder by transformers, if the model is not sharded; a pickle finds the method by this name."""
    for _, parameter, sharding in declarations(self):
        if is_dtensor(parameter) or any(shard.axis.size > 1 for shard in sharding.shards):
            raise ValueError(REFUSED_SAVE)
    return type(self).save_pretrained(self, *args, **kwargs)


def resize_token_embeddings(self: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Return the table of the tokens, unless it would change: the rows of a sharded one do not."""
    rows = self.config.get_text_config().vocab_size
    if new_num_tokens not in (None, rows) or any(args) or kwargs.get("pad_to_multiple_of"):
        raise ValueError(
            f"resize_token_embeddings({new_num_tokens}) can't change the {rows} tokens of {type(self).__name__} after "
            f"parallelize, from_pretrained or pipeline_stages: resize the model of transformers, save it, and call "
            f"from_pretrained on the new folder"
        )
    return self.get_input_embeddings()


def guard_generate(model: nn.Module, *axes: Axis) -> None:
    """Make `generate` of a sharded model raise on all ranks if the ranks could choose different tokens.

    While it runs, `is_generating` of the model is True.
    """
    for module in model.modules():
        own: Any = vars(module)  # transformers' models that can generate have a configuration of it
        if own.get("generation_config") is not None and callable(getattr(type(module), "generate", None)):
            module.generate = MethodType(_guarded(axes), module)  # type: ignore[assignment]


def _guarded(axes: tuple[Axis, ...]) -> Any:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        head = self.get_output_embeddings()
        if isinstance(head, ColumnParallelLinear) and head.tp.size > 1 and not head.gather_output:
            raise ValueError(
                f"generate needs the logits of all {head.out_features} tokens, but this rank's head gives "
                f"{head.weight.shape[0]} of them: plan the head as 'colwise_gather_output', not 'colwise'"
            )
        configs = [kwargs.get("generation_config"), *args[1:2], self.generation_config]
        do_sample, max_time = (
            kwargs.get(name, next((x for each in configs if (x := getattr(each, name, None)) is not None), None))
            for name in ("do_sample", "max_time")
        )
        for axis in axes:
            name = axis.name
            same = f"arguments: every rank of {name} must call generate with the same"
            check_same(same, _arguments(self.generation_config, args, kwargs), axis)
            if max_time is not None:
                raise ValueError(
                    f"max_time {max_time} would end ranks of {name} {axis.size} at different tokens, and the others "
                    f"wait for ever: give max_new_tokens"
                )
            if do_sample:
                what = "state of torch's random generator, of which sampling draws: call torch.manual_seed(..) with one"
                state = _digest(random_state(next(self.parameters()).device))
                check_same(f"{what} seed on all ranks of {name} before generate", state, axis)
        self.is_generating = True
        try:
            return type(self).generate(self, *args, **kwargs)
        finally:
            self.is_generating = False

    return generate


def _arguments(config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what all ranks must pass alike, by name. A streamer may be on one rank alone."""
    found = {f"argument {i}": x for i, x in enumerate(args)} | {k: x for k, x in kwargs.items() if k != "streamer"}
    for name, each in (("model.generation_config", config), *found.items()):
        if values := getattr(each, "to_dict", dict)():
            found |= {name: None, **{f"{name}.{key}": x for key, x in values.items()}}
    return {name: _value(x) for name, x in found.items()}


def _value(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _digest(x)
    if isinstance(x, Mapping | list | tuple):
        return [_value(each) for each in (x.items() if isinstance(x, Mapping) else x)]
    plain = (int, float, str, type(None))
    held = getattr(x, "__dict__", {}).values()  # of a logits processor: its penalty
    return x if isinstance(x, plain) else [type(x).__name__, *(each for each in held if isinstance(each, plain))]


def _digest(x: Tensor) -> str:
    found = hashlib.sha256(repr((tuple(x.shape), x.dtype)).encode())
    found.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]
