"""Read and write adapters in the format of the `peft` library: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.checkpoint.pieces import check_finite
from mpcore.checkpoint.remote import store_of
from mpcore.checkpoint.store import check_local
from mpcore.checkpoint.tensor_file import TensorFile, write_tensors
from mpcore.interop.lora.adapters import (
    adapt,
    adapters_of,
    check_adaptable,
    factor_names,
    linear_layers,
    rank_and_alpha,
    weight_name,
)
from mpcore.interop.lora.layers import GroupedAdapter, LoRALayer, factors, is_transposed, sizes_of
from mpcore.mesh.agreement import gather_objects, merged, together
from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import declarations, named_modules, persistent_buffers
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import reshard
from mpcore.sharding.state_dict import all_names, check_present, copy_part, full_tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Held = tuple[Tensor, Sharding]
_READ = ("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
_NO_EFFECT = (  # on what stored factors compute; `_read_config` refuses every other field that is set
    "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    "task_type",
)  # fmt: skip
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # the others change the base model's weights, too


def save_lora(model: nn.Module, folder: str | os.PathLike[str], mesh: Mesh = Mesh()) -> Path:
    """Write a model's adapters in PEFT's format. All ranks of the mesh must call it.

    Other modules with trained weights, such as the embedding or the head, are written too, as PEFT's `modules_to_save`.
    `peft.PeftModel.from_pretrained(dense_model, folder)` can open the folder, and `load_lora` can on any layout.

    Args:
        model: the model, or this rank's stage of it, sharded over data or not.
        folder: the folder, which is returned. It is created if it doesn't exist; an adapter in it is replaced.
        mesh: the mesh that the model is on.

    Raises:
        ValueError: on every rank, if the model has no adapters or some of several dropouts, a grouped weight has one, a
            layer with an adapter trains its own weights too, a value is NaN or infinite, or they can't be written.

    Example:
        >>> import tempfile
        >>> model = mpcore.interop.lora.add_lora(nn.Sequential(nn.Linear(4, 4)), targets="0")
        >>> folder = mpcore.interop.lora.save_lora(model, tempfile.mkdtemp())
        >>> sorted(path.name for path in folder.iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    folder = check_local(Path(folder))
    reshard(model)
    layers, tensors, names = together(mesh.world, lambda: _present(model))
    modules = merged(mesh.world, lambda: names, _modules_to_save)
    extra = {name: held for name, held in tensors.items() if _in_modules(name, modules)}
    mine: dict[str, Tensor] = {}
    for name, layer in layers.items():
        for leaf, factor in factors(layer):
            full = full_tensor(factor.weight, factor.shardings["weight"])
            mine[f"{PREFIX}{name}.{leaf}.weight"] = full.cpu().contiguous()
    for name, (x, sharding) in extra.items():
        mine[f"{PREFIX}{name}"] = full_tensor(x, sharding).cpu().clone()
    config = _config(model, layers, {name.rpartition(".")[0] for name in extra}, mesh)
    parts = [folder / f".{TENSORS}.{stage}" for stage in range(mesh.pp.size)]

    def write_stage() -> None:
        check_finite(((key, x, True) for key, x in mine.items()), f"{folder} isn't written")
        if mesh.tp.rank == mesh.data.rank == mesh.worlds.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            parts[mesh.pp.rank].unlink(missing_ok=True)  # a killed save may have left it
            write_tensors(parts[mesh.pp.rank], mine)

    def join() -> None:
        if mesh.job.rank == 0:
            written = parts[0]
            if len(parts) > 1:
                files = [TensorFile(part) for part in parts]
                written = folder / f".{TENSORS}"
                written.unlink(missing_ok=True)
                write_tensors(written, {key: file.whole(key) for file in files for key in file.header})
                for part in parts:
                    part.unlink()
            part = folder / f".{CONFIG}.{secrets.token_hex(4)}.tmp"
            store_of(part).write(part, f"{json.dumps(config, indent=2)}\n".encode())
            (folder / CONFIG).unlink(missing_ok=True)  # nothing loads new tensors with an old config
            os.replace(written, folder / TENSORS)
            os.replace(part, folder / CONFIG)

    together(mesh.world, write_stage)
    together(mesh.world, join)
    return folder


def load_lora(model: nn.Module, folder: str | os.PathLike[str], mesh: Mesh = Mesh()) -> nn.Module:
    """Load adapters in PEFT's format into a model. All ranks of the mesh must call it.

    A model without adapters is frozen and gets the adapters, as by `add_lora`. In a model that has adapters, sharded
    over data or not, only their values are replaced; then rank, alpha, layers and the modules trained beside must be
    the same as in the file. The modules of PEFT's `modules_to_save` get their values, and are trained, too.

    Args:
        model: the model, or this rank's stage of it, changed in place and returned.
        folder: a folder that `save_lora` or PEFT's `save_pretrained` wrote.
        mesh: the mesh that the model is on.

    Raises:
        ValueError: on every rank and before anything changes, if the files are missing or damaged, need an unsupported
            feature (DoRA, biases, PiSSA, ..), hold NaN or infinity, or don't fit the model.

    Example:
        >>> import tempfile
        >>> model = mpcore.interop.lora.add_lora(nn.Sequential(nn.Linear(4, 4)), targets="0")
        >>> folder = mpcore.interop.lora.save_lora(model, tempfile.mkdtemp())
        >>> _ = mpcore.interop.lora.load_lora(nn.Sequential(nn.Linear(4, 4)), folder)
    """
    folder = Path(folder)
    reshard(model)

    tensors, ours = _held(model), factor_names(model)

    def read() -> tuple[dict[str, Any], TensorFile, dict[str, dict[str, str]], dict[str, str]]:
        _refuse_grouped({name: layer for name, layer in named_modules(model) if isinstance(layer, GroupedAdapter)})
        config, file = _read_config(folder / CONFIG), TensorFile(folder / TENSORS)
        modules, tied = config["modules_to_save"], [names for names in all_names(model) if len(names) > 1]
        if config["ensure_weight_tying"]:  # PEFT then writes a tied weight under each of its names
            modules += [name.rpartition(".")[0] for names in tied for name in names
                        if any(_in_modules(other, modules) for other in names)]  # fmt: skip
        keys, extra = _keys(file, modules)
        for name, layer in linear_layers(model):
            if name in keys:
                _check(name, layer, file, keys[name], config)
        places = extra | {f"{name}.{leaf}.weight": key for name, pair in keys.items() for leaf, key in pair.items()}
        dtypes = {key: tensors[name][0].dtype for name, key in places.items() if name in tensors}
        for key in file.header:  # 16 bits may be too narrow
            check_finite([(key, file.whole(key).to(dtypes.get(key)), True)], str(file.path))
        for name, (x, sharding) in tensors.items():
            shape = tuple(file.header[extra[name]]["shape"]) if name in extra else None
            needed = _in_modules(name, modules) or (x.requires_grad and bool(ours) and name not in ours)
            if shape != sharding.shape and (needed or shape is not None):
                raise ValueError(f"{file.path} has {name} of shape {shape}, and the model needs {sharding.shape}")
        for names in tied:
            present = [name for name in names if name in extra]
            first, *others = present or [""]
            if 0 < len(present) < len(names) and not config["ensure_weight_tying"]:
                other = next(name for name in names if name not in extra)
                raise ValueError(
                    f"{file.path} has {first} without {other}, which is tied to it here and which PEFT leaves as it "
                    f"was: train in PEFT with ensure_weight_tying=True, or save the model with two weights, untied"
                )
            if any(not torch.equal(file.whole(extra[first]), file.whole(extra[name])) for name in others):
                raise ValueError(f"{file.path} has two values of {' and '.join([first, *others])}, which are tied here")
        return config, file, keys, extra

    config, file, keys, extra = together(mesh.world, read)
    found = {name: layer for name, layer in linear_layers(model) if name in keys}
    held = {name for name, layer in linear_layers(model) if isinstance(layer, LoRALayer)}
    trained = {name for name, (x, _) in tensors.items() if x.requires_grad}
    mine = {*found, *(extra.keys() & tensors.keys())}, held, trained & ours, trained - ours
    here, adapted, live, beside = (set().union(*of) for of in zip(*gather_objects(mine, mesh.pp.group), strict=True))

    def check() -> None:
        if unknown := {*keys, *extra} - here:
            raise ValueError(
                f"{folder} has {len(keys)} adapters and {len(extra)} other tensors, and {len(unknown)} fit no layer or "
                f"tensor of this {type(model).__name__}, such as {min(unknown)}: load them into the model of that run"
            )
        if adapted and held != found.keys():
            raise ValueError(
                f"the model has adapters of {len(held)} layers and {folder} of {len(found)} of this stage's, such as "
                f"{min(held ^ found.keys())} in one of them alone"
            )
        if not adapted:
            check_adaptable(model, found, config["lora_dropout"])
        used = [at for at in config["modules_to_save"] if any(_in_modules(name, [at]) for name in beside)]
        if live and (frozen := sorted(name for name in extra if not _in_modules(name, used))):
            raise ValueError(
                f"{folder} has {len(frozen)} trained tensors, such as {frozen[0]}, of modules that are frozen in this "
                f"model with adapters: call requires_grad_() of them before prepare, or load it into a model without"
            )

    together(mesh.world, check)
    if not adapted:
        adapt(model, found, {name: _size(name, config) for name in found}, config["lora_dropout"])
    for name, layer in linear_layers(model):
        if isinstance(layer, LoRALayer):
            for leaf, factor in factors(layer):
                copy_part(factor.weight, factor.shardings["weight"], file.whole(keys[name][leaf]))
    for name in extra.keys() & tensors.keys():
        x, sharding = tensors[name]
        copy_part(x, sharding, file.whole(extra[name]))
        if not adapted and isinstance(x, nn.Parameter):
            x.requires_grad_()
    return model


def _present(model: nn.Module) -> tuple[dict[str, LoRALayer], dict[str, Held], tuple[list[str], list[str]]]:
    """Return the layers that have an adapter, all tensors, and the names for `_modules_to_save`."""
    held, layers = _held(model), {n: layer for n, layer in named_modules(model) if isinstance(layer, LoRALayer)}
    _refuse_grouped(layers)
    for name, (x, _) in held.items():
        check_present(name, x)
    factors = factor_names(model)
    trained = [name for name, (x, _) in held.items() if x.requires_grad and name not in factors]
    return layers, held, (trained, [name.rpartition(".")[0] for name in adapters_of(model)])


def _modules_to_save(stages: list[tuple[list[str], list[str]]]) -> list[str]:
    """Return PEFT's `modules_to_save`, of each stage's weights trained beside adapters, and adapted modules."""
    modules = {name: name.rpartition(".")[0] for trained, _ in stages for name in trained}
    adapted = {f"{at}." for _, each in stages for at in each}
    if not adapted:
        raise ValueError("the model has 0 layers with an adapter: call add_lora or load_lora first")
    if bad := sorted(n for n, m in modules.items() if not m or any(_in_modules(at, [m]) for at in adapted)):
        raise ValueError(
            f"{len(bad)} trained weights, {', '.join(bad[:4])}, are in a layer that has an adapter or in no submodule, "
            f"or their module's name ends the name of a module that is or holds such a layer: PEFT's modules_to_save "
            f"can't hold them; save the merged model with save_pretrained, or freeze them"
        )
    return sorted({*modules.values()})


def _held(model: nn.Module) -> dict[str, Held]:
    held: dict[str, Held] = {name: (x, sharding) for name, x, sharding in declarations(model)}
    held |= {name: (x, Sharding(tuple(x.shape))) for name, _, _, x in persistent_buffers(model)}
    return held | {name: held[first] for first, *others in all_names(model) for name in others}


def _refuse_grouped(layers: Mapping[str, LoRALayer]) -> None:
    """Raise ValueError if a grouped weight has an adapter: PEFT's versions exchange the roles of its two factors."""
    grouped = [weight_name(name, layer) for name, layer in layers.items() if isinstance(layer, GroupedAdapter)]
    if grouped:
        raise ValueError(
            f"{len(grouped)} of {len(layers)} adapters are of grouped weights, such as {grouped[0]}, which PEFT's "
            f"versions store in different ways: save the merged model with save_pretrained, or the run with run.save"
        )


def _config(model: nn.Module, layers: Mapping[str, LoRALayer], extra: set[str], mesh: Mesh) -> dict[str, Any]:
    """Return the adapters' configuration as PEFT writes it. The ranks of pp join theirs.

    PEFT's `target_modules` has the last part of a layer's name, or the full name if a layer without an adapter ends in
    the same part.
    """
    mine = (
        {name: (layer.rank, layer.alpha) for name, layer in layers.items()},
        {name.rpartition(".")[2] for name, _ in linear_layers(model) if name not in layers},
        any(is_transposed(layer) for layer in layers.values()),
        {layer.dropout for layer in layers.values()},
        extra,
    )
    stages = gather_objects(mine, mesh.pp.group)
    sizes = {name: tuple(size) for found, *_ in stages for name, size in found.items()}
    others = set().union(*(ends for _, ends, *_ in stages))
    dropouts = set().union(*(found for *_, found, _ in stages))
    if len(dropouts) > 1:
        raise ValueError(
            f"the adapters have dropout {' and '.join(map(str, sorted(dropouts)))}, and PEFT's file has one for all "
            f"layers: set the attribute dropout of all layers to one value first"
        )
    ends = {name: name.rpartition(".")[2] for name in sizes}
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    escaped = {f"^{re.escape(name)}": size for name, size in sizes.items()}
    flipped = any(transposed for _, _, transposed, *_ in stages)
    about = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropouts.pop()}
    about |= {"rank_pattern": {name: r for name, (r, _) in escaped.items() if r != rank}}
    about |= {"alpha_pattern": {name: a for name, (_, a) in escaped.items() if a != alpha}}
    modules = set().union(*(modules for *_, modules in stages))
    outer = sorted(name for name in modules if not any(name.startswith(f"{other}.") for other in modules))
    about |= {"modules_to_save": outer or None}
    targets = sorted({name if end in others else end for name, end in ends.items()})
    about |= {"target_modules": targets, "fan_in_fan_out": flipped}
    about |= {"bias": "none", "use_rslora": False}
    task = "CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None
    origin = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    return {"peft_type": "LORA", "task_type": task, "base_model_name_or_path": origin, "inference_mode": True, **about}


def _read_config(path: Path) -> dict[str, Any]:
    """Read the fields `_READ` of a configuration."""
    defaults: dict[str, Any] = {"lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False}  # PEFT's
    try:
        said = json.loads(path.read_text())
        found: dict[str, Any] = {name: defaults.get(name) if said.get(name) is None else said[name] for name in _READ}
        found["r"], found["lora_alpha"] = int(said["r"]), float(found["lora_alpha"])
        found |= {name: dict(found[name] or {}) for name in ("rank_pattern", "alpha_pattern")}
        found["modules_to_save"] = [*(found["modules_to_save"] or [])]
        found["ensure_weight_tying"] = bool(said.get("ensure_weight_tying"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: give the folder that save_lora or PEFT's save_pretrained wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    kind, bias = said.get("peft_type"), said.get("bias", "none")
    if kind != "LORA" or bias != "none":
        raise ValueError(f"{path} has peft_type {kind!r} and bias {bias!r}: only 'LORA' with 'none' can be loaded")
    for name, value in said.items():
        if (value and name not in (*_READ, *_NO_EFFECT)) or (name == "init_lora_weights" and value not in _INITS):
            raise ValueError(f"{path}: {name} is {value!r}, which mpcore doesn't support: merge the adapter with PEFT")
    return found


def _size(name: str, config: Mapping[str, Any]) -> tuple[int, float]:
    ranks, alphas = config["rank_pattern"], config["alpha_pattern"]
    return rank_and_alpha(name, config["r"], config["lora_alpha"], ranks, alphas, config["use_rslora"])


def _keys(file: TensorFile, modules: Sequence[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the keys of factors by layer and `lora_A` or `lora_B`, and those of `modules_to_save` by their names."""
    found: dict[str, dict[str, str]] = {}
    extra: dict[str, str] = {}
    for key in file.header:
        match = re.fullmatch(r"base_model\.model\.(.+)\.(lora_[AB])(\.default)?\.weight", key)
        name = key.removeprefix(PREFIX)
        if match is not None:
            found.setdefault(match[1], {})[match[2]] = key
        elif _in_modules(name, modules):
            extra[name] = key
        else:
            raise ValueError(f"{file.path}: {key} is no factor of a linear layer's adapter, and not in modules_to_save")
    for name, pair in found.items():
        if len(pair) < 2:
            raise ValueError(f"{file.path}: {name} has a {min(pair)} alone, of lora_A and lora_B")
    return found, extra


def _in_modules(name: str, modules: Sequence[str]) -> bool:
    """Return whether a tensor lies in one of PEFT's `modules_to_save`, which are ends of names."""
    parts = name.split(".")
    return any(".".join(parts[:i]).endswith(tuple(modules)) for i in range(1, len(parts)))


def _check(name: str, layer: nn.Module, file: TensorFile, keys: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Raise ValueError if the factors in the file don't fit the layer, or the adapter that the layer has."""
    (n_in, n_out), (rank, alpha) = sizes_of(layer), _size(name, config)
    for leaf, want in (("lora_A", [rank, n_in]), ("lora_B", [n_out, rank])):
        found = file.header[keys[leaf]]["shape"]
        if found != want:
            raise ValueError(f"{file.path}: {keys[leaf]} has shape {found}, {name} needs {want}")
    if isinstance(layer, LoRALayer) and (layer.rank, layer.alpha) != (rank, alpha):
        raise ValueError(
            f"{file.path} is of rank {rank} and alpha {alpha} in {name}, and the model's adapter of "
            f"{layer.rank} and {layer.alpha}: load it into the model without adapters"
        )
