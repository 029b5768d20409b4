"""Find out how a model of transformers is stored in its files: which model tensors make which file tensors.

transformers defines the conversion as operations on tensors. This module runs them on the meta device to find the
dependencies, and then on one group of tensors at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpcore._torch import fsdp
from mpcore._torch.pytree import leaves


@dataclass
class Group:
    """File tensors that are made from the same model tensors."""

    sources: list[str]
    files: dict[str, Tensor]  # on the meta device, by their names in the files
    renamed: bool  # whether the group is one tensor that only has another name


def class_of(model: nn.Module) -> Any:
    """Return the class of a model without the classes that `fully_shard` and `pipeline_stages` put in front of it."""
    kind: Any = type(model).__bases__[-1] if model in fsdp.units(model) else type(model)  # fully_shard adds a subclass
    return getattr(kind, "whole_class", kind)


def dense_shape(model: nn.Module) -> Any:
    """Create the unsharded model of a model's class and config, on the meta device."""
    kind = class_of(model)
    config: Any = getattr(model, "config", None)
    if config is None or getattr(kind, "save_pretrained", None) is None:
        raise ValueError(
            f"{type(model).__name__} is no model of transformers: save a model of your own with "
            f"mpcore.checkpoint.save, or write an Architecture for it and call export_hf"
        )
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{kind.__name__} is quantized or holds adapters: only plain weights are saved here")
    config = copy.deepcopy(config)
    config.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)  # saving makes it text
    with torch.device("meta"):
        dense = kind(config)
    if "_weight_conversions" in vars(model):  # the conversion that from_pretrained used
        vars(dense)["_weight_conversions"] = vars(model)["_weight_conversions"]
    return dense


def stored_names(dense: Any) -> list[str]:
    """Return the names of the state dict that are saved. Tied weights have one name."""
    ignored = getattr(dense, "_keys_to_ignore_on_save", None) or ()
    state = {name: x for name, x in dense.state_dict().items() if name not in ignored}
    return list(transformers_module("modeling_utils").remove_tied_weights_from_state_dict(state, dense))


def stored_groups(dense: Any, state: Mapping[str, Tensor]) -> list[Group]:
    """Split a state dict on the meta device into groups, in the order of their names in the files."""
    source_of = {id(x): {name} for name, x in state.items()}
    with _Trace(source_of):
        files = _revert(dense, dict(state))
    order = {name: i for i, name in enumerate(state)}
    groups: dict[str, Group] = {}  # by each source
    for key, x in files.items():
        sources = source_of[id(x)]
        joined = {id(groups[name]): groups[name] for name in sources if name in groups}.values()
        old = [name for group in joined for name in group.sources]
        group = Group(
            sorted({*old, *sources}, key=order.__getitem__),
            {name: like for group in joined for name, like in group.files.items()} | {key: x},
            len(sources) == 1 and not joined and any(x is state[name] for name in sources),
        )
        groups |= dict.fromkeys(group.sources, group)
    if lost := sorted(state.keys() - groups.keys()):
        raise ValueError(f"transformers writes no file of {lost[:20]}")
    return list({id(group): group for group in groups.values()}.values())


def stored_tensors(dense: Any, group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the file tensors made from the model tensors of a group. They are views if a view is enough."""
    if group.renamed:
        return dict(zip(group.files, tensors.values(), strict=True))
    with _Views():
        made = _revert(dense, dict(tensors))
    return {key: made[key] for key in group.files} if made.keys() == group.files.keys() else dict(
        zip(group.files, made.values(), strict=True)
    )  # fmt: skip


def _revert(dense: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return transformers_module("core_model_loading").revert_weight_conversion(dense, state)


def transformers_module(name: str = "") -> Any:
    """Import a module of transformers 5, which is an optional dependency."""
    try:
        return import_module(f"transformers.{name}".rstrip("."))
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: install transformers 5 or later") from None


class _Views(TorchFunctionMode):
    """Make `contiguous` return its tensor unchanged, so that results stay views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


class _Trace(_Views):
    """Record, by the id of each new tensor, which named tensors it is made from."""

    def __init__(self, source_of: dict[int, set[str]]) -> None:
        super().__init__()
        self.source_of, self.held = source_of, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs)
        sources = set().union(*(self._of(leaves((args, kwargs)))))
        for x in leaves(made):
            if isinstance(x, Tensor) and id(x) not in self.source_of:
                self.source_of[id(x)] = sources
                self.held.append(x)  # so that no other tensor gets its id
        return made

    def _of(self, values: Iterable[Any]) -> Iterable[set[str]]:
        return [self.source_of.get(id(x), set()) for x in values if isinstance(x, Tensor)]
