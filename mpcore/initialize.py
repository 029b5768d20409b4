"""Floor 4: a model's first parameters, from (seed, full name) alone, so that every layout begins bitwise equal."""

from __future__ import annotations

import torch
from torch import nn

from mpcore.layers.dropout import seed_dropout
from mpcore.random import generator, stream_key
from mpcore.sharding import is_dtensor, owners, sharding_of


@torch.no_grad()
def materialize(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """Give a model, on the meta device or not, its storage and its first values; seed its dropout.

    Each parameter is drawn whole on the CPU, from a generator keyed by (seed, its full name), and this rank keeps its
    shard. So neither tp, pp nor dp, neither the order of construction nor other modules change a value. Modules that
    aren't mpcore's are reset by their own `reset_parameters`, under a seed from (seed, the module's full name).

    Args:
        model: the model, changed in place. Its parameters must be plain tensors: shard over data afterwards.
        seed: the run's seed.
        device: where the storage is made.

    Returns:
        The model.

    Raises:
        ValueError: if a parameter has neither a declared beginning nor an owner with `reset_parameters`, or is sharded
            over data already.
    """
    draws, resets = [], {}
    for name, module, leaf, parameter in owners(model):
        if is_dtensor(parameter):
            raise ValueError(f"{name} is sharded over data already: materialize first")
        init = getattr(module, "inits", {}).get(leaf)
        if init is not None:
            draws.append((name, module, leaf, init))
        elif callable(getattr(module, "reset_parameters", None)):
            resets[id(module)] = (name.rpartition(".")[0], module)
        else:
            raise ValueError(f"nothing says how {name} of {type(module).__name__} begins: give it reset_parameters()")
    if any(p.is_meta for p in model.parameters()):
        _to_empty(model, device)
    else:
        model.to(device)
    for name, module, leaf, init in draws:
        parameter = getattr(module, leaf)
        sharding = sharding_of(module, leaf, parameter)
        full = torch.empty(sharding.shape, dtype=parameter.dtype, device="cpu")
        parameter.copy_(sharding.take(init(full, generator=generator(seed, name))))
    for name, module in resets.values():
        with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
            torch.manual_seed(stream_key(seed, name))
            module.reset_parameters()
    seed_dropout(model, seed)
    return model


def _to_empty(model: nn.Module, device: torch.device | str) -> None:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for module in reversed(list(model.modules())):  # each once, though two stages may share it
        module.to_empty(device=device, recurse=False)  # makes a parameter for each name, so that tied ones come apart
    for first, *others in names.values():
        for name in others:
            prefix, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(prefix), leaf, model.get_parameter(first))
