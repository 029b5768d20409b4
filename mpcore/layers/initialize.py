"""Initialize a model's parameters from (seed, full name), so that every layout starts bitwise equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore._torch.autograd import has_accumulation_hooks, has_gradient_hooks
from mpcore.layers.dropout import seed_dropout
from mpcore.layers.module import fill
from mpcore.mesh.axis import Mesh
from mpcore.random import generator, stream_key
from mpcore.sharding.declarations import named_modules, owners, sharding_of
from mpcore.sharding.local import is_dtensor


@torch.no_grad()
def materialize(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """Allocate a model's storage, for example from the meta device, fill its values, and seed its dropout.

    Each logical parameter is drawn on the CPU from a generator keyed by (seed, full name), and this rank keeps its
    shard. Its values therefore do not depend on tp, pp, dp, the order of construction or other modules. A module that
    is not mpcore's, or that has buffers on the meta device, is filled by its own `reset_parameters` (or
    `_reset_parameters`, or `init_weights` if it has no submodules), under a seed from (seed, the module's full name).
    Buffers on other devices keep their values.

    Args:
        model: changed in place and returned. Parameters must be plain tensors: call `shard_data_parallel` afterwards.
        seed: the run's seed.
        device: the device of the storage.

    Raises:
        ValueError: if nothing fills a parameter or a buffer on the meta device (its module declares no initial values
            and has no `reset_parameters` that fills it), or if a parameter is already sharded over the data ranks.

    Example:
        >>> model = mpcore.layers.materialize(mpcore.ParallelMLP(4, 8, device="meta"), seed=0)
        >>> model.up.weight.device.type
        'cpu'
    """
    draws, resets, drawn = [], {}, []
    for name, module, leaf, parameter in owners(model):
        if is_dtensor(parameter):
            raise ValueError(f"{name} is sharded over data already: materialize first")
        init = getattr(module, "inits", {}).get(leaf)
        if init is not None:
            draws.append((name, module, leaf, init))
        elif _reset_of(module) is not None:
            resets[id(module)] = (name.rpartition(".")[0], module)
            drawn += [(name, module, leaf)] if parameter.is_floating_point() and parameter.itemsize > 1 else []
        else:
            raise _unfilled(name, module, leaf, "parameter")
    held = [(name, module, module.named_buffers(recurse=False)) for name, module in named_modules(model)]
    buffers = [(name, module, leaf) for name, module, each in held for leaf, buffer in each if buffer.is_meta]
    for name, module, leaf in buffers:
        if _reset_of(module) is None:
            raise _unfilled(name, module, leaf, "buffer")
    if buffers or any(p.is_meta for p in model.parameters()):
        _to_empty(model, device)
    else:
        model.to(device)
    for _, module, leaf in drawn:
        module._parameters[leaf].fill_(torch.nan)  # type: ignore[union-attr]
    emptied: list[Any] = [(*place, x := place[1]._buffers[place[2]], x._version) for place in buffers]  # type: ignore
    for name, module in {id(module): (name, module) for name, module, _ in buffers}.values():
        if id(module) not in resets:  # first: this reset may change parameters, which are filled below
            _reset(name, module, seed, device)
    for name, module, leaf, init in draws:
        parameter = getattr(module, leaf)
        sharding = sharding_of(module, leaf, parameter)
        full = torch.empty(sharding.shape, dtype=parameter.dtype, device="cpu")
        parameter.copy_(sharding.take(fill(init, full, generator(seed, name))))
    for name, module in sorted(resets.values(), key=lambda reset: getattr(reset[1], "reset_parameters", None) is None):
        _reset(name, module, seed, device)  # torch's attention last: it resets its output projection again
    for name, module, leaf in drawn:
        if (p := module._parameters[leaf]) is not None and not p.is_meta and p.isnan().any():
            raise _unfilled(name, module, leaf, "parameter")
    for name, module, leaf, buffer, version in emptied:
        now = module._buffers[leaf]
        if now is buffer and buffer is not None and buffer._version == version and buffer.numel():
            raise _unfilled(name, module, leaf, "buffer")
        module._buffers[leaf] = now if now is None else now.to(device)
    seed_dropout(model, seed)
    return model


@torch.no_grad()
def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Allocate the parameters that are on the meta device, without values, and move all other tensors to `device`."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in dict.fromkeys(x for root in (model, *fsdp.units(model)) for x in root.modules()):  # type: ignore
        for leaf, p in module._parameters.items():
            if p is not None and p.is_meta:
                if p not in made:
                    made[p] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                    vars(made[p]).update(vars(p))
                module._parameters[leaf] = made[p]
            elif p is not None and not is_dtensor(p):
                p.data = p.data.to(device)
        for leaf, x in module._buffers.items():
            if x is not None:
                module._buffers[leaf] = x.to(device)
    fsdp.renew_parameters(model)


def deferred_reads(stages: Sequence[nn.Module]) -> list[Callable[..., int]]:
    """Return the functions that read the values of stages whose parameters are on the meta device until then.

    Such a stage has a function as its attribute `read_values`. `read_values(model, mesh, dtypes)` fills the allocated
    parameters of a model that are named in `dtypes`, after a cast to the dtype there, and returns the number of bytes
    that this rank read. All ranks of the mesh must call it.
    """
    found = (vars(stage).get("read_values") for stage in stages)
    return list(dict.fromkeys(read for read in found if read is not None))


def read_deferred(stages: Sequence[nn.Module], model: nn.Module, mesh: Mesh, dtypes: dict[str, torch.dtype]) -> None:
    """Allocate the parameters of `model`, which joins the stages, and read their values (`deferred_reads`)."""
    reads = deferred_reads(stages)
    if reads:
        allocate(model, mesh.device)
    for read in reads:
        read(model, mesh, dtypes)
    for stage in stages:
        vars(stage).pop("read_values", None)


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    names = ("reset_parameters", "_reset_parameters", *(() if any(module.children()) else ("init_weights",)))
    return next((reset for name in names if callable(reset := getattr(module, name, None))), None)


def _reset(name: str, module: nn.Module, seed: int, device: torch.device | str) -> None:
    reset = _reset_of(module)
    assert reset is not None
    on_gpu = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):  # torch.manual_seed seeds each GPU there is
        (torch.manual_seed if on_gpu else torch.default_generator.manual_seed)(stream_key(seed, name))
        reset()


def _unfilled(name: str, module: nn.Module, leaf: str, what: str) -> ValueError:
    kind, full = type(module).__name__, name if what == "parameter" else f"{name}.{leaf}".lstrip(".")
    other = "" if what == "parameter" else ', or create the buffer with device="cpu"'
    fill = f"torch.nn.init.normal_(self.{leaf}, std=0.02)" if what == "parameter" else f"self.{leaf}.copy_(..)"
    return ValueError(
        f"no code gives the {what} {full} its first values: add a method to {kind} that fills it in place{other}. For "
        f"example:\n    def reset_parameters(self):\n        {fill}\n"
        f"Values that the model's own code sets on the meta device, as self.apply(self._init_weights) does, are lost "
        f"in all modules. To keep them, build the model with values and pass initialize=False to prepare"
    )


def _to_empty(model: nn.Module, device: torch.device | str) -> None:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
        if has_gradient_hooks(parameter) or has_accumulation_hooks(parameter):
            raise ValueError(
                f"{name} has a hook on its gradient and no memory: the parameter that takes its place has no hook. "
                f"Register it after prepare, or build the model with values and pass initialize=False"
            )

    def empty(x: Tensor) -> Tensor:
        return torch.empty_like(x, device=device) if x.is_meta or isinstance(x, nn.Parameter) else x.to(device)

    for module in reversed(list(model.modules())):  # visits a module once, even if two stages share it
        module._apply(empty, recurse=False)  # makes one parameter per name, which unties tied parameters
    for first, *others in names.values():
        for name in others:
            prefix, _, leaf = name.rpartition(".")
            model.get_submodule(prefix).register_parameter(leaf, model.get_parameter(first))
