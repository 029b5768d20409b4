"""Raise errors for an optimizer step, a norm or clipping that would be silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpcore._torch import fsdp
from mpcore.gradients.accumulate import check_current, holds_main_grad, is_reduced
from mpcore.gradients.drop import drop_gradients
from mpcore.mesh.axis import Axis
from mpcore.sharding.dcp import mark
from mpcore.sharding.declarations import ModelTree, declarations, declared_by, tree_of
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import is_dtensor

# Of torch's optimizers those that don't step each element by itself.
OF_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
# Their steps raise an error for a DTensor; those of the second tuple with fused=True alone.
OF_PLAIN_TENSORS = (torch.optim.Adafactor, torch.optim.Rprop)
FUSED_OF_PLAIN_TENSORS = (torch.optim.SGD, torch.optim.Adagrad)


class ReadsMainGradients:
    """Base class of optimizers that read gradients with `gradient_of`, such as those of `mpcore.optim`."""


def guard_optimizer(optimizer: Optimizer, model: nn.Module | Iterable[nn.Module]) -> Optimizer:
    """Make an optimizer raise an error instead of a silently wrong step.

    `mpcore.AdamW` and `mpcore.Muon` guard themselves. Guard another optimizer once, after you created it. Each step
    then raises ValueError for

    - gradients that `reduce_gradients` has not summed since the last backward;
    - parameters that `shard_data_parallel` replaced by shards;
    - gradients in `main_grad`, if the optimizer reads only `.grad` (all but `ReadsMainGradients`);
    - shards that it can't step (those of Adafactor, LBFGS, torch's Muon; of ZeRO those of Rprop, fused SGD, Adagrad);
    - groups that mix sharded and plain parameters, if torch would update them in one kernel.

    Its `zero_grad` also drops gradients that ZeRO has not summed yet, as of an abandoned step.
    `torch.distributed.checkpoint` of its `state_dict()` raises an error for the state of sharded parameters.

    Args:
        optimizer: changed in place and returned: it gets hooks of its step and state dict.
        model: the model, this rank's pipeline stage, or a list of all modules whose parameters the optimizer has.

    Raises:
        ValueError: if the optimizer has a parameter that is not the model's.

    Note:
        - Between steps, set gradients to None (the default of `zero_grad`). With `set_to_none=False`, a forgotten
          `reduce_gradients` is found only in the first step.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 6)
        >>> optimizer = mpcore.gradients.guard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    """
    guard = _Guard([model] if isinstance(model, nn.Module) else list(model))
    guard.find(optimizer)
    optimizer.register_step_pre_hook(guard)
    optimizer.register_state_dict_post_hook(guard.mark_state)
    if not isinstance(optimizer, ReadsMainGradients):
        optimizer.zero_grad = partial(guard.zero_grad, ref(optimizer), vars(optimizer).get("zero_grad"))  # type: ignore
    return optimizer


class _Guard:
    """The step pre-hook of one optimizer. What the model declares is read at the first step, and when groups grow."""

    def __init__(self, models: list[nn.Module]) -> None:
        self.models, self.seen = models, 0
        self.names: dict[Tensor, tuple[int, str]] = {}
        self.pending: list[tuple[str, Tensor, tuple[Axis, ...]]] = []
        self.cut: set[Tensor] = set()
        self.units: list[Any] = []

    def zero_grad(self, of: ref[Any], own: Callable[..., None] | None, *args: Any, **kwargs: Any) -> None:
        """Call the optimizer's own `zero_grad`, and drop the gradients that ZeRO has not summed yet."""
        optimizer: Any = of()  # a cycle of references would keep its state in memory
        (own or partial(type(optimizer).zero_grad, optimizer))(*args, **kwargs)
        kept = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
        for model in self.models:
            drop_gradients(model, kept)
        for p, grad in kept.items():
            p.grad = grad

    def find(self, optimizer: Optimizer) -> None:
        """Find the names of the optimizer's parameters."""
        now = {p: (i, name) for i, model in enumerate(self.models) for name, p, _ in declarations(model)}
        for group in optimizer.param_groups:
            check_current(*group["params"])
            for p in group["params"]:
                if p in self.names:
                    continue
                if p not in now:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} in the optimizer is none of the model's: make the "
                        f"optimizer after materialize, parallelize and shard_data_parallel, which replace parameters, "
                        f"and give guard_optimizer every model that it trains"
                    )
                self.names[p] = now[p]

    def declared(self) -> list[tuple[str, Tensor, Sharding]]:
        """Return the declarations by parameter name: modules may hold gathered copies of the parameters now."""
        declared = {(i, name): x for i, model in enumerate(self.models) for name, _, x in declarations(model)}
        return [(place[1], p, declared[place]) for p, place in self.names.items() if place in declared]

    def mark_state(self, optimizer: Optimizer, _: dict[str, Any]) -> None:
        self.find(optimizer)
        for name, p, sharding in self.declared():
            for slot, value in optimizer.state.get(p, {}).items():
                mark(value, f"the {slot} of {name}", sharding)

    def read(self) -> None:
        found = self.declared()
        self.pending = [(name, p, sharding.pending) for name, p, sharding in found if sharding.pending]
        self.cut = {p for _, p, sharding in found if any(shard.axis.size > 1 for shard in sharding.shards)}
        self.units = [unit for model in self.models for unit in fsdp.units(model)]

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            check_current(*group["params"])
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count != self.seen:
            self.find(optimizer)
            self.read()
            self.seen = count
        for name, p, axes in self.pending:
            check_reduced(name, p, axes)
        for unit in self.units:  # a forward that no backward followed left copies, which would be read after the step
            unit.reshard()
        if not isinstance(optimizer, ReadsMainGradients):
            for group in optimizer.param_groups:
                self._check_torchs(optimizer, group)

    def _check_torchs(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        kind, fused = type(optimizer).__name__, FUSED_OF_PLAIN_TENSORS if group.get("fused") else ()
        for p in group["params"]:
            if p.grad is None and holds_main_grad(p):
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} is in main_grad, and {kind} reads .grad "
                    f"alone, which is None: take an optimizer of mpcore.optim, or leave main_gradients out"
                )
            cut = isinstance(optimizer, OF_WHOLE_TENSORS) and p in self.cut
            if cut or (isinstance(optimizer, (*OF_PLAIN_TENSORS, *fused)) and is_dtensor(p)):
                how = "computes each element from its whole tensor" if cut else "has no step for shards, of ZeRO 1 to 3"
                raise ValueError(
                    f"{kind} {how}, and a parameter of shape {tuple(p.shape)} is this rank's part of one: take "
                    f"mpcore.AdamW or mpcore.Muon, or what steps each element by itself, without fused=True"
                )
        _check_mixed(kind, group)


def _check_mixed(kind: str, group: dict[str, Any]) -> None:
    said, on_gpu = (group.get("foreach"), group.get("fused")), any(p.is_cuda for p in group["params"][:1])
    if not any(said) and not ("foreach" in group and said == (None, None) and on_gpu):
        return
    stepped = [p for p in group["params"] if p.grad is not None]
    cut = [p for p in stepped if is_dtensor(p)]
    plain = [p for p in stepped if not is_dtensor(p) and p.numel() != 1]  # torch takes one number for a replica
    if cut and plain:
        raise ValueError(
            f"{kind} steps all of a group at once, and of this one {len(cut)} parameters are sharded over data and "
            f"{len(plain)} are not, as one of shape {tuple(plain[0].shape)}: foreach=False, a group for each kind, "
            f"or mpcore.AdamW"
        )


def check_reduced(name: str, parameter: Tensor, axes: Sequence[Axis]) -> None:
    """Raise ValueError if the parameter's gradient must still be all-reduced over `axes`."""
    if axes and parameter.requires_grad and not is_reduced(parameter):
        over = " and ".join(f"{axis.name} ({axis.size} ranks)" for axis in axes)
        raise ValueError(
            f"the gradient of {name} is this rank's term of a sum over {over}: call "
            f"mpcore.gradients.reduce_gradients(model) after the last backward; with mpcore.prepare call "
            f"run.optimizer_step(), which does it"
        )


def check_all_reduced(model: nn.Module | ModelTree) -> None:
    """Raise ValueError if a gradient of the model must still be all-reduced."""
    tree = tree_of(model)
    for _, module in tree.modules:  # takes less time than to join the declarations of tied parameters
        for leaf, sharding in declared_by(module).items():
            parameter = module._parameters.get(leaf)
            if sharding.pending and parameter is not None and not is_reduced(parameter):
                for name, p, declared in tree.declared:
                    check_reduced(name, p, declared.pending)
