"""Read and write adapters in the format of the `peft` library: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mpcore.checkpoint.format import write_synced
from mpcore.checkpoint.pieces import check_finite
from mpcore.checkpoint.ranks import together
from mpcore.checkpoint.tensor_file import TensorFile, write_tensors
from mpcore.interop.lora.adapters import adapt, check_adaptable, factor_names, linear_layers, lora_layers, weight_name
from mpcore.interop.lora.layers import GroupedAdapter, LoRALayer, factors, is_transposed, sizes_of
from mpcore.mesh.agreement import gather_objects
from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import declarations, named_modules
from mpcore.sharding.local import reshard
from mpcore.sharding.state_dict import check_present, copy_part, full_tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_UNSUPPORTED = (  # fields of the configuration that change what an adapter computes, but no name in the file
    "use_dora", "lora_bias", "alpha_pattern", "rank_pattern", "layer_replication", "modules_to_save",
    "target_parameters", "trainable_token_indices",
)  # fmt: skip


def save_lora(model: nn.Module, folder: str | os.PathLike[str], mesh: Mesh = Mesh()) -> Path:
    """Write a model's adapters in PEFT's format. All ranks of the mesh must call it.

    `peft.PeftModel.from_pretrained(dense_model, folder)` can open the folder, and `load_lora` can on any layout. The
    files don't depend on the layout.

    Args:
        model: the model, or this rank's stage of it, sharded over data or not.
        folder: the folder. It is created if it doesn't exist; an adapter in it is replaced. Rank 0 of the job writes
            the final files.
        mesh: the mesh that the model is on.

    Returns:
        The folder.

    Raises:
        ValueError: on every rank, if the model has no adapters, a grouped weight has one, other weights are trained
            beside them, a value is NaN or infinite, or they can't be written.

    Example:
        >>> import tempfile
        >>> model = mpcore.interop.lora.add_lora(nn.Sequential(nn.Linear(4, 4)), targets="0")
        >>> folder = mpcore.interop.lora.save_lora(model, tempfile.mkdtemp())
        >>> sorted(path.name for path in folder.iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    folder = Path(folder)
    reshard(model)
    layers = together(mesh.world, lambda: _present(model))
    mine: dict[str, Tensor] = {}
    for name, layer in layers.items():
        for leaf, factor in factors(layer):
            full = full_tensor(factor.weight, factor.shardings["weight"])
            mine[f"base_model.model.{name}.{leaf}.weight"] = full.cpu().contiguous()
    targets = set().union(*gather_objects(_targets(model, layers), mesh.pp.group))
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
            os.replace(written, folder / TENSORS)
            text = json.dumps(_config(model, layers, targets), indent=2)
            part = folder / f".{CONFIG}.{secrets.token_hex(4)}.tmp"
            write_synced(part, f"{text}\n".encode())
            os.replace(part, folder / CONFIG)

    together(mesh.world, write_stage)
    together(mesh.world, join)
    return folder


def load_lora(model: nn.Module, folder: str | os.PathLike[str], mesh: Mesh = Mesh()) -> nn.Module:
    """Load adapters in PEFT's format into a model. All ranks of the mesh must call it.

    A model without adapters is frozen and gets the adapters, as by `add_lora`. In a model that has adapters, sharded
    over data or not, only their values are replaced; then rank, alpha and layers must be the same as in the file.

    Args:
        model: the model, or this rank's stage of it, changed in place.
        folder: a folder that `save_lora` or PEFT's `save_pretrained` wrote.
        mesh: the mesh that the model is on.

    Returns:
        The model.

    Raises:
        ValueError: on every rank and before anything changes, if the files are missing or damaged, need an unsupported
            feature (DoRA, biases, a rank per layer), hold NaN or infinity, or don't fit the model.

    Example:
        >>> import tempfile
        >>> model = mpcore.interop.lora.add_lora(nn.Sequential(nn.Linear(4, 4)), targets="0")
        >>> folder = mpcore.interop.lora.save_lora(model, tempfile.mkdtemp())
        >>> _ = mpcore.interop.lora.load_lora(nn.Sequential(nn.Linear(4, 4)), folder)
    """
    folder = Path(folder)
    reshard(model)

    def read() -> tuple[dict[str, Any], TensorFile, dict[str, dict[str, str]]]:
        _refuse_grouped({name: layer for name, layer in named_modules(model) if isinstance(layer, GroupedAdapter)})
        config, file = _read_config(folder / CONFIG), TensorFile(folder / TENSORS)
        check_finite(((key, file.whole(key), True) for key in file.header), str(file.path))
        keys = _keys(file)
        for name, layer in linear_layers(model):
            if name in keys:
                _check(name, layer, file, keys[name], config)
        return config, file, keys

    config, file, keys = together(mesh.world, read)
    found = {name: layer for name, layer in linear_layers(model) if name in keys}
    here = set().union(*gather_objects(set(found), mesh.pp.group))
    held = {name for name, layer in linear_layers(model) if isinstance(layer, LoRALayer)}

    def check() -> None:
        if keys.keys() - here:
            raise ValueError(
                f"{folder} has adapters of {len(keys)} layers, and {len(keys.keys() - here)} are no linear layers of "
                f"this {type(model).__name__}, such as {min(keys.keys() - here)}"
            )
        if held and held != found.keys():
            raise ValueError(
                f"the model has adapters of {len(held)} layers and {folder} of {len(found)} of this stage's, such as "
                f"{min(held ^ found.keys())} in one of them alone"
            )
        if not held:
            check_adaptable(model, found)

    together(mesh.world, check)
    if not held:
        adapt(model, found, config["r"], config["lora_alpha"], config["lora_dropout"])
    for name, layer in linear_layers(model):
        if isinstance(layer, LoRALayer):
            for leaf, factor in factors(layer):
                copy_part(factor.weight, factor.shardings["weight"], file.whole(keys[name][leaf]))
    return model


def _present(model: nn.Module) -> dict[str, LoRALayer]:
    """Return the layers that have an adapter. Their factors must have memory, and nothing else may be trained."""
    layers = lora_layers(model)
    _refuse_grouped(layers)
    names = set(factor_names(model))
    others = [name for name, p, _ in declarations(model) if p.requires_grad and name not in names]
    if others:
        raise ValueError(
            f"{len(others)} weights beside the {len(layers)} adapters are trained, {', '.join(others[:4])}, and an "
            f"adapter's folder has no place for them: save the merged model with save_pretrained, or freeze them"
        )
    for name, layer in layers.items():
        for leaf, factor in factors(layer):
            check_present(f"{name}.{leaf}.weight", factor.weight)
    return layers


def _refuse_grouped(layers: Mapping[str, LoRALayer]) -> None:
    """Raise ValueError if a grouped weight has an adapter: PEFT's versions exchange the roles of its two factors."""
    grouped = [weight_name(name, layer) for name, layer in layers.items() if isinstance(layer, GroupedAdapter)]
    if grouped:
        raise ValueError(
            f"{len(grouped)} of {len(layers)} adapters are of grouped weights, such as {grouped[0]}, which PEFT's "
            f"versions store in different ways: save the merged model with save_pretrained, or the run with run.save"
        )


def _targets(model: nn.Module, layers: Mapping[str, LoRALayer]) -> set[str]:
    """Return the layers' names for PEFT's `target_modules`.

    It is the last part of the name, or the full name if a layer without an adapter ends in the same part.
    """
    ends = {name.rpartition(".")[2] for name in layers}
    others = {name.rpartition(".")[2] for name, _ in linear_layers(model) if name not in layers}
    return (ends - others) | {name for name in layers if name.rpartition(".")[2] in others}


def _config(model: nn.Module, layers: Mapping[str, LoRALayer], targets: set[str]) -> dict[str, Any]:
    """Return the adapters' configuration as PEFT writes it."""
    layer = next(iter(layers.values()))
    flipped = any(is_transposed(layer) for layer in layers.values())
    about = {"r": layer.rank, "lora_alpha": layer.alpha, "lora_dropout": layer.dropout}
    about |= {"target_modules": sorted(targets), "fan_in_fan_out": flipped, "bias": "none", "use_rslora": False}
    task = "CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None
    origin = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    return {"peft_type": "LORA", "task_type": task, "base_model_name_or_path": origin, "inference_mode": True, **about}


def _read_config(path: Path) -> dict[str, Any]:
    """Read rank, alpha and dropout from a configuration.

    Raises:
        ValueError: if the file is missing or damaged, or asks for an unsupported feature.
    """
    try:
        said = json.loads(path.read_text())
        r, alpha = int(said["r"]), float(said.get("lora_alpha", 8))  # PEFT's default
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: give the folder that save_lora or PEFT's save_pretrained wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    if said.get("peft_type") != "LORA" or said.get("bias", "none") != "none":
        raise ValueError(f"{path}: peft_type {said.get('peft_type')!r} with bias {said.get('bias')!r}; only LORA, none")
    for name in _UNSUPPORTED:
        if said.get(name):
            raise ValueError(f"{path}: {name} is {said[name]!r}, which mpcore's adapters don't have")
    alpha *= r**0.5 if said.get("use_rslora") else 1.0  # scaled by alpha / sqrt(r)
    return {"r": r, "lora_alpha": alpha, "lora_dropout": float(said.get("lora_dropout", 0.0))}


def _keys(file: TensorFile) -> dict[str, dict[str, str]]:
    """Return the keys of each layer's factors, by the layer's name and then by `lora_A` or `lora_B`."""
    found: dict[str, dict[str, str]] = {}
    for key in file.header:
        match = re.fullmatch(r"base_model\.model\.(.+)\.(lora_[AB])(\.default)?\.weight", key)
        if match is None:
            raise ValueError(f"{file.path}: {key} is no factor of a linear layer's adapter, which is all that is read")
        found.setdefault(match[1], {})[match[2]] = key
    for name, pair in found.items():
        if len(pair) < 2:
            raise ValueError(f"{file.path}: {name} has a {min(pair)} alone, of lora_A and lora_B")
    return found


def _check(name: str, layer: nn.Module, file: TensorFile, keys: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Raise ValueError if the factors in the file don't fit the layer, or the adapter that the layer has."""
    n_in, n_out = sizes_of(layer)
    for leaf, want in (("lora_A", [config["r"], n_in]), ("lora_B", [n_out, config["r"]])):
        found = file.header[keys[leaf]]["shape"]
        if found != want:
            raise ValueError(f"{file.path}: {keys[leaf]} has shape {found}, {name} needs {want}")
    if isinstance(layer, LoRALayer) and (layer.rank, layer.alpha) != (config["r"], config["lora_alpha"]):
        raise ValueError(
            f"{file.path} is of rank {config['r']} and alpha {config['lora_alpha']}, and the model's adapters of "
            f"{layer.rank} and {layer.alpha}: load it into the model without adapters"
        )
