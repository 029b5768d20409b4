"""Guard transformers' `generate` on a sharded model: every rank runs it, and all ranks must choose the same tokens."""

from __future__ import annotations

import hashlib
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch.pytree import leaves
from mpcore.layers.linear import ColumnParallelLinear
from mpcore.mesh.agreement import check_same
from mpcore.mesh.axis import Axis
from mpcore.random import random_state


def guard_generate(model: nn.Module, *axes: Axis) -> None:
    """Make `generate` of a sharded model raise on all ranks if the ranks could choose different tokens.

    `generate` then raises ValueError if the logits are sharded, if the ranks of the axes get different prompts or have
    different random states, or if `max_time` is set. While it runs, `is_generating` of the model is True.
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
        config = kwargs.get("generation_config") or self.generation_config
        do_sample, max_time = (kwargs.get(name, getattr(config, name, None)) for name in ("do_sample", "max_time"))
        if max_time is not None and axes:
            raise ValueError(
                f"max_time {max_time} would end ranks of {axes[0].name} {axes[0].size} at different tokens, and the "
                f"others wait for ever: give max_new_tokens"
            )
        for axis in axes:
            name = axis.name
            check_same(f"prompt: every rank of {name} must call generate with the same", _digest(args, kwargs), axis)
            if do_sample:
                check_same(
                    f"state of torch's random generator, of which sampling draws: call torch.manual_seed(..) with one "
                    f"seed on all ranks of {name} before generate",
                    _digest(random_state(next(self.parameters()).device)),
                    axis,
                )
        self.is_generating = True
        try:
            return type(self).generate(self, *args, **kwargs)
        finally:
            self.is_generating = False

    return generate


def _digest(*values: Any) -> str:
    found = hashlib.sha256()
    for x in (x for x in leaves(values) if isinstance(x, Tensor)):
        found.update(repr((tuple(x.shape), x.dtype)).encode())
        found.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]
