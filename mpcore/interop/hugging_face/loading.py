"""Load models of transformers directly into shards, over every axis: each rank reads the boxes that it holds."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpcore.checkpoint.other_formats import refuse_other_format
from mpcore.checkpoint.tensor_file import TensorFile
from mpcore.interop.hugging_face.boxes import Weights
from mpcore.interop.hugging_face.config import read_json
from mpcore.interop.hugging_face.folder import check_counts, open_files
from mpcore.interop.hugging_face.pretrained import saved_state
from mpcore.interop.hugging_face.stored import Group, dense_shape, stored_groups, transformers_module
from mpcore.interop.parallelize import parallelize
from mpcore.interop.parallelize.plan import Plan
from mpcore.layers.initialize import allocate
from mpcore.mesh.agreement import together
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.mesh.log import Logger, get_logger
from mpcore.sharding.declarations import declarations, persistent_buffers
from mpcore.sharding.state_dict import all_names

log: Logger = get_logger("mpcore.interop")
OPTIONS = inspect.signature(parallelize).parameters.keys() - {"module", "plan", "tp", "ep", "etp", "data", "cp"}


def from_pretrained(
    folder: str | os.PathLike[str],
    mesh: Mesh = Mesh(),
    plan: Plan | str | None = "auto",
    *,
    defer: bool = False,
    dtype: torch.dtype | None = None,
    model_class: Any = None,
    **options: Any,
) -> Any:
    """Load a Hugging Face model from a local folder, sharded over tp, ep and cp. Call it on every rank.

    Each rank creates the model on the meta device and calls `parallelize`. Then it reads its shards from the files. The
    result equals `parallelize` of the model that transformers' `from_pretrained` returns.

    With `defer=True` nothing is read yet: the parameters stay on the meta device. Pass the model to `add_lora` and
    `pipeline_stages` if you use them, and then to `prepare(initialize=False)`. `prepare` shards the model over all axes
    first. Then each rank reads the boxes that it holds, so no rank ever holds more than its shards.

    Args:
        folder: a local folder with config.json and safetensors files.
        mesh: the mesh. The model is sharded over `mesh.tp`, its experts over `mesh.ep`, its sequence over `mesh.cp`.
        plan: the plan (see `parallelize`).
        defer: leave the parameters on the meta device until `prepare(initialize=False)` reads them.
        dtype: the dtype of the parameters, except those that transformers keeps in float32; buffers have the dtype that
            transformers gives them. None: the dtype in config.json, or float32 if there is none.
        model_class: a class of transformers. None: the first class in `architectures` of config.json.
        options: the arguments `context`, `check`, `example`, `skip` and `strict` of `parallelize`, and values of fields
            of the config, such as `output_router_logits=True`.

    Returns:
        The model, in evaluation mode, as transformers returns it. Call `train()` before you train it.

    Raises:
        ValueError: on every rank, if the folder doesn't exist (names on the Hub aren't accepted), transformers lacks
            the architecture, config.json names code, the weights are pickles or quantized, a tensor is missing, has
            another shape or holds NaN or infinity, an option is neither of the two, or `parallelize` raises.

    Note:
        - If config.json ties two weights and the files hold two different tensors, the weights are not tied, as in
          transformers: the model's config then has `tie_word_embeddings=False`.
        - Tensors of multi-token prediction, which transformers doesn't compute, are not read or trained:
          `save_pretrained` and `hf_tensors` copy them from this folder.
        - Tensors must have the names that transformers 5 writes. Load and save older files once with transformers.
        - Without `defer`, call `shard_data_parallel` afterwards, or `prepare(initialize=False)`, which keeps the loaded
          weights.
        - Ranks with the same shard, such as those of dp under ZeRO-0, read it once, and one broadcasts it. The groups
          of HSDP each read their own.

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> folder = tempfile.mkdtemp()
        >>> small = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1)
        >>> LlamaForCausalLM(small).save_pretrained(folder)
        >>> type(mpcore.from_pretrained(folder)).__name__
        'LlamaForCausalLM'
    """
    check_mesh(mesh)
    path = Path(folder)
    changes = {name: options.pop(name) for name in options.keys() - OPTIONS}
    model, files, where = together(mesh.world, lambda: _open(path, dtype, model_class, changes))
    dense = together(mesh.world, lambda: dense_shape(model))
    model = parallelize(model, plan, mesh.tp, ep=mesh.ep, etp=mesh.etp, data=mesh.data, cp=mesh.cp, **options)

    read: set[str] = set()

    def weights_of() -> Weights:
        held = {name: torch.empty(lies.shape, dtype=p.dtype, device="meta") for name, p, lies in declarations(model)}
        held |= {name: x for name, _, _, x in persistent_buffers(model)}
        weights = Weights(dense)
        for group in stored_groups(dense, saved_state(dense, held)):
            keys = _keys(path, dense, group, where)
            read.update(keys.values())
            weights.add(group, keys, {key: files[where[key]] for key in keys.values()})
        weights.alias(all_names(model))
        return weights

    weights = together(mesh.world, weights_of)
    unread = _unread(dense, where.keys() - read)
    ignored = getattr(dense, "_keys_to_ignore_on_load_unexpected", None) or ()
    other = sorted(where.keys() - read - {*unread} - dense.state_dict().keys())
    other = [key for key in other if not any(re.search(it, key) for it in ignored)]
    if other and mesh.world.rank == 0:
        log.warning("%s has %d tensors that %s does not have, such as %s: they are neither read nor saved",
                    path, len(other), type(dense).__name__, other[0])  # fmt: skip
    if unread and mesh.world.rank == 0:
        log.warning("%s has %d tensors that %s doesn't compute, such as %s: save_pretrained writes them unchanged",
                    path, len(unread), type(dense).__name__, unread[0])  # fmt: skip
    # a function, which a deep copy of the model shares
    vars(model)["unread_tensors"] = lambda: {key: files[where[key]].whole(key) for key in unread}
    dtypes = {name: x.dtype for name, x in model.state_dict(keep_vars=True).items()}
    buffers = {name: dtypes[name] for name, x in model.named_buffers() if name in dtypes}
    if defer:
        weights.read(model, mesh, buffers)
        begun = {name: (p, p._version) for name, p in model.named_parameters()}

        def read_values(model: Any, mesh: Mesh, dtypes: Mapping[str, torch.dtype]) -> int:
            if changed := [name for name, (p, version) in begun.items() if p.is_meta and p._version != version]:
                raise ValueError(
                    f"{changed[0]} was changed before its values were read, which the read would undo: change it after "
                    f"prepare, within run.parameters(), or load without defer"
                )
            return weights.read(model, mesh, dtypes)

        vars(model)["read_values"] = read_values  # a function, which a deep copy of the model shares
        model.register_forward_pre_hook(_refuse_unread)
    else:
        allocate(model, mesh.device)
        weights.read(model, mesh, dtypes)
    return model.eval()


def _refuse_unread(model: Any, *_: Any) -> None:
    if any(p.is_meta for p in itertools.islice(model.parameters(), 1)):
        raise ValueError(
            f"{type(model).__name__} of from_pretrained(defer=True) has no values yet: prepare(initialize=False) reads "
            f"them, or load it with defer=False"
        )


def _open(
    path: Path, dtype: torch.dtype | None, kind: Any, changes: dict[str, Any]
) -> tuple[Any, dict[str, TensorFile], dict[str, str]]:
    """Return the model with its parameters on the meta device, the open files, and the file name of each tensor."""
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: download the model first, as with huggingface_hub.snapshot_download")
    refuse_other_format(path)
    transformers = transformers_module()
    values, (files, where) = read_json(path / "config.json"), open_files(path)
    check_counts(path / "config.json", values, files)
    try:
        return _make(path, transformers, dtype, kind, changes, files, where), files, where
    except Exception as error:  # transformers raises any kind
        about = " ".join(str(error).split())
        if isinstance(error, ValueError) and str(path) in about:
            raise
        raise ValueError(f"{path / 'config.json'} can't be read: {type(error).__name__}: {about:.500}") from error


def _make(
    path: Path, transformers: Any, dtype: torch.dtype | None, kind: Any, changes: dict[str, Any],
    files: Mapping[str, TensorFile], where: Mapping[str, str],
) -> Any:  # fmt: skip
    """Return the model of a folder's config.json, with its parameters on the meta device."""
    config = auto_config(path)
    if unknown := sorted(changes.keys() - config.to_dict().keys()):
        raise ValueError(
            f"{unknown[0]!r} is neither an option of parallelize nor a field of the config of {path}, which is read as "
            f"it lies, without code of its own: leave {unknown[0]} out, and give the folder that holds the files"
        )
    config = auto_config(path, **changes) if changes else config
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{path} holds quantized weights: only plain ones are read here")
    names = config.architectures or []
    said = f"{path}/config.json names the architectures {names}"
    said = said if kind is None else f"model_class for {path} is {kind!r}"
    kind = getattr(transformers, names[0] if names else "", None) if kind is None else kind
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{said}, no model class of transformers: give model_class=, as transformers.LlamaForCausalLM")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {dtype!r} for {path}: give torch.bfloat16, or None for the dtype in config.json")
    wanted: torch.dtype = dtype or getattr(config, "dtype", None) or torch.float32
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if each is not None:
            each.dtype = wanted
    with _parameters_on_meta(wanted):
        model: Any = kind(config)
        if different := _untied(model, files, where, wanted):
            config.tie_word_embeddings = False
            model = kind(config)
            for name, other in different.items():
                if model.get_parameter_or_buffer(name) is model.get_parameter_or_buffer(other):
                    raise ValueError(f"{path} has two tensors for {name} and {other}, which {kind.__name__} ties")
    if wanted.itemsize == 2:
        with _parameters_on_meta(torch.float32):  # transformers computes tables in float32, and rounds them once
            exact = dict(kind(config).named_buffers())
        for name, x in model.named_buffers():
            x.copy_(exact[name])
    if model.can_generate():  # of its own file, or of fields in an old config.json
        old = not (path / "generation_config.json").is_file()
        file = {"config_file_name": "config.json", "_from_model_config": True} if old else {}
        model.generation_config = transformers.GenerationConfig.from_pretrained(path, local_files_only=True, **file)
    _widen(model, wanted)
    return model


def auto_config(path: Path, **changes: Any) -> Any:
    """Return the config of a folder, or of a config.json, as an object of transformers. No code that it names runs."""
    file = path / "config.json" if path.is_dir() else path
    _refuse_kernels(file, read_json(file))
    auto = transformers_module("").AutoConfig
    return auto.from_pretrained(str(path), local_files_only=True, trust_remote_code=False, **changes)


def _refuse_kernels(path: Path, values: Any) -> None:
    """Raise ValueError if config.json names code on the Hub, such as an attention kernel "org/name"."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if key.endswith("_implementation") and "/" in str(value):
            raise ValueError(f"{path}: {key} is {value!r}, code on the Hub that is not run here: remove the field")
        _refuse_kernels(path, value)


def _untied(
    model: Any, files: Mapping[str, TensorFile], where: Mapping[str, str], dtype: torch.dtype
) -> dict[str, str]:
    """Return the tied weights of a model, in pairs, for which the files hold two different tensors."""
    different = {}
    for name, other in model.all_tied_weights_keys.items():
        both = (*_file_keys(model, name), *_file_keys(model, other))
        keys = [found for key in both if (found := _found(model, key, where)) is not None]
        if len(keys) < 2:
            continue
        a, b = (files[where[key]].whole(key) for key in keys)
        rows = zip(a.split(1024), b.split(1024), strict=False)
        if a.shape != b.shape or not all(torch.equal(x.to(dtype), y.to(dtype)) for x, y in rows):
            different[name] = other
        for key in keys:
            files[where[key]].forget(key)
    return different


def _unread(dense: Any, keys: Set[str]) -> list[str]:
    """Return those of the unread tensors that belong to multi-token prediction: layers after the last, or "mtp"."""
    config = dense.config.get_text_config()
    depth, more = (getattr(config, f"num_{kind}_layers", None) or 0 for kind in ("hidden", "nextn_predict"))
    layer = {key: int(found[1]) for key in keys if (found := re.match(r"model\.layers\.(\d+)\.", key))}
    after = {*range(depth, depth + more)} if max(layer.values(), default=0) < depth + more else {}
    return sorted(key for key in keys if re.search(r"(^|\.)mtp[._]", key) or layer.get(key) in after)


def _file_keys(model: Any, name: str) -> list[str]:
    (group,) = stored_groups(model, {name: torch.empty(model.get_parameter_or_buffer(name).shape, device="meta")})
    return list(group.files)


def _found(model: Any, key: str, where: Mapping[str, str]) -> str | None:
    """Return the name of a tensor in these files, or None. Files of a base model lack a prefix, or have one more."""
    prefix = f"{model.base_model_prefix}."
    return next((name for name in (key, key.removeprefix(prefix), prefix + key) if name in where), None)


def _widen(model: Any, dtype: torch.dtype) -> None:
    """Cast to float32 the parameters and persistent buffers that transformers never keeps in 16 bits."""
    strict, half = (getattr(model, f"_keep_in_fp32_modules{end}", None) or () for end in ("_strict", ""))
    kept = {torch.float16: [*strict, *half], torch.bfloat16: strict}.get(dtype, ())
    for name, x in model.state_dict(keep_vars=True).items():
        if any(re.search(part.replace("*", ".*"), name) for part in kept):
            x.data = x.data.float()


@contextlib.contextmanager
def _parameters_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Within this block, modules create their parameters on the meta device. Buffers are created as usual."""
    register, before = nn.Module.register_parameter, torch.get_default_dtype()

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            empty = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            vars(empty).update(vars(param))
            param = empty
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        torch.set_default_dtype(dtype)  # raises if config.json names a dtype of integers
        yield
    finally:
        torch.set_default_dtype(before)
        nn.Module.register_parameter = register


def _keys(path: Path, dense: Any, group: Group, where: Mapping[str, str]) -> dict[str, str]:
    """Return the names that a group's tensors have in these files. A tied weight may have any of its names."""
    keys = {}
    for key in group.files:
        found = _found(dense, key, where)
        if found is None and group.renamed:
            pairs = dense.all_tied_weights_keys.items()
            others = [one for pair in pairs if group.sources[0] in pair for one in pair]
            others += [one for pair in pairs if set(pair) & set(others) for one in pair]
            names = (_found(dense, file, where) for one in others for file in _file_keys(dense, one))
            found = next(filter(None, names), None)
        if found is None:
            raise ValueError(
                f"{path} has no tensor {key!r}, which {group.sources[0]} needs: if transformers can open it, save it "
                f"anew with its save_pretrained"
            )
        keys[key] = found
    return keys
