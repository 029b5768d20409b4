"""Convert a config.json to the configuration of a model, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpcore.checkpoint.tensor_file import TensorFile
from mpcore.interop.hugging_face.architectures import ARCHITECTURES, FURTHER, NEEDED, REFUSED, Architecture
from mpcore.layers.rope import rope_frequencies

JSON_LIMIT = 100 * 2**20  # bytes
SIZES = ("vocab_size", "seq_len", "layers", "d_model", "heads", "d_ff")


@dataclass(frozen=True)
class ModelSpec:
    """The names and shapes of your model, for import and export.

    Your model must name its parameters as the tables of `mpcore.interop.hugging_face.architectures` do: `embedding`,
    `position`, `blocks.0.attention.qkv` and so on, `norm`, `head`.

    Attributes:
        config: a function that makes a configuration (a dataclass) from mpcore's fields as keyword arguments. `moe` and
            `latent` are mappings.
        describe: a function that returns all of mpcore's fields of a configuration, defaults included.
        shapes: a function that returns the logical shape of each parameter, by name, for a configuration.
        further: whether a configuration has a field `mtp`, the number of DeepSeek-V3's layers in a
            `MultiTokenPrediction` of the name "mtp". False: such layers of a folder are left out.

    Example::

        spec = ModelSpec(GPTConfig, describe, shapes)
        config = read_config("Llama-3.2-1B", spec=spec)
        model = GPT(config, mesh)
        load_hf("Llama-3.2-1B", model, mesh, spec=spec)
    """

    config: Callable[..., Any]
    describe: Callable[[Any], Mapping[str, Any]]
    shapes: Callable[[Any], Mapping[str, tuple[int, ...]]]
    further: bool = False


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of at most 100 MiB that holds a JSON object; otherwise raise ValueError."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if path.stat().st_size > JSON_LIMIT:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {JSON_LIMIT}")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values


def config_from_hf(values: Mapping[str, Any], where: str = "config.json", *, spec: ModelSpec) -> Any:
    """Make a model configuration from the content of a config.json. Dropout stays 0: the run chooses it.

    Args:
        where: the file's name, for messages.
        spec: the names and shapes of your model; its `config` makes what this function returns.

    Raises:
        ValueError: if the architecture or a field is not supported, or if a field is unknown: it might change the
            model.
    """
    kind = values.get("model_type")
    if kind not in [*ARCHITECTURES]:  # it may be a list
        why = f", which the blocks here cannot be: {REFUSED[kind]}" if kind in [*REFUSED] else ""
        raise ValueError(
            f"{where} has model_type {kind!r}{why}. Supported are {list(ARCHITECTURES)}. Train it as it is, with "
            f"mpcore.from_pretrained"
        )
    try:
        ours, problems = _read(ARCHITECTURES[kind], values, where)
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{where} describes no model: {error}") from None
    if problems:
        raise ValueError(f"{where} cannot be imported: {'; '.join(problems)}")
    if spec.further and ARCHITECTURES[kind].further:
        ours["mtp"] = values.get(FURTHER) or 0
    try:
        return spec.config(**ours)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where} cannot be imported: {error}") from None


def read_config(folder: str | os.PathLike[str], *, spec: ModelSpec) -> Any:
    """Make a model configuration from the config.json of a folder.

    Raises:
        ValueError: as described at `config_from_hf`, and if config.json is missing or describes no model.
    """
    path = Path(folder) / "config.json"
    values = read_json(path)
    if values.get(FURTHER) and not _has_layer(path.parent, values.get("num_hidden_layers")):
        values[FURTHER] = 0  # transformers keeps the number, but not the layers
    return config_from_hf(values, str(path), spec=spec)


def _has_layer(folder: Path, layer: Any) -> bool:
    """Return whether a folder has the weights of a layer; True if it has no weights at all."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not (index.is_file() or single.is_file()):
        return True
    names = TensorFile(single).header if single.is_file() else read_json(index).get("weight_map")
    return f"layers.{layer}." in " ".join(names if isinstance(names, dict) else ())


def config_to_hf(config: Any, *, spec: ModelSpec, first: str | None = None) -> dict[str, Any]:
    """Return the content of a config.json for a configuration, of the architecture that `architecture_of` returns."""
    kind = architecture_of(config, spec=spec, first=first)
    return {"model_type": kind, **_write(ARCHITECTURES[kind], _flat(spec.describe(config)))}


def architecture_of(config: Any, *, spec: ModelSpec, first: str | None = None) -> str:
    """Return the `model_type` of a configuration: the first whose config.json, read again, gives the same model.

    Args:
        first: the `model_type` to try first, such as that of the imported folder. None: no preference.

    Raises:
        ValueError: if there is none. The message lists the fields that the closest architecture would change.
    """
    wanted = _flat(spec.describe(config))
    found: dict[str, list[str]] = {}
    order = sorted(ARCHITECTURES, key=lambda kind: kind != first)
    for kind, architecture in ((kind, ARCHITECTURES[kind]) for kind in order):
        if architecture.kind == ("moe.experts" in wanted, "latent.kv_lora_rank" in wanted):
            found[kind] = _changes(architecture, wanted, spec)
            if not found[kind]:
                return kind
    if not found:
        raise ValueError(f"no supported Hugging Face architecture has latent attention without experts: {config}")
    closest = min(found, key=lambda kind: len(found[kind]))
    raise ValueError(
        f"no supported Hugging Face architecture is this model; the closest is {closest}, but: "
        f"{'; '.join(found[closest])}"
    )


def _changes(architecture: Architecture, wanted: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    """Return the fields that an export to this architecture would change, with both values."""
    values, problems = _read(architecture, _write(architecture, wanted), "the export")
    try:
        if spec.further and architecture.further:
            values["mtp"] = wanted["mtp"]
        got = _same_groups(_flat(spec.describe(spec.config(**values))))
    except ValueError as error:
        return [*problems, str(error)]
    wanted = _same_groups(wanted)
    names = [name for name in wanted if name not in architecture.forgotten]
    return problems + [f"{n} {wanted[n]!r} would be {got.get(n)!r}" for n in names if got.get(n) != wanted[n]]


def _same_groups(ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields, with one group of experts if a token may choose from all groups anyway."""
    grouped = ours.get("moe.groups") != ours.get("moe.top_groups")
    return ours if grouped else {**ours, "moe.groups": 1, "moe.top_groups": 1}


class Fields:
    """The fields of a config.json during reading."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.left: dict[str, Any] = dict(values)  # the fields that no rule has read yet
        self.where = where
        self.problems: list[str] = []

    def take(self, name: str, default: Any = NEEDED) -> Any:
        """Return a field's value and remove the field. A missing field gives the default."""
        if name not in self.left and default is NEEDED:
            raise ValueError(f"{self.where} has no {name}")
        found = self.left.pop(name, default)
        if isinstance(found, str) and isinstance(default, (int, float)):
            self.problems.append(f"{name} {found!r} must be a number, not text")
            return default
        return bool(found) if isinstance(default, bool) else found

    def expect(self, name: str, wanted: Any) -> None:
        """Add a problem if a field has another value than `wanted`. A missing field is fine."""
        found = self.left.pop(name, wanted)
        if found != wanted:
            self.problems.append(f"{name} {found!r} is not supported: only {wanted!r} is")

    def finish(self, ignored: Collection[str]) -> None:
        """Add a problem for each field that no rule has read and that may change the model."""
        empty = (None, False, "", [], {})
        if unknown := {name: v for name, v in self.left.items() if name not in ignored and v not in empty}:
            self.problems.append(f"unknown fields, which may change the model: {unknown}")


def _read(architecture: Architecture, values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return mpcore's fields, and the problems found in the Hugging Face fields."""
    c, ours = Fields(values, where), dict(architecture.ours)
    for name, field in architecture.fields.items():
        value = c.take(name, None if field.alias else field.default)
        if field.alias and not value:
            value = c.take(field.alias, field.default)
        if field.words is not None:
            if value not in field.words:
                c.problems.append(f"{name} {value!r} is none of {sorted(field.words)}")
            value = field.words.get(value)
        if field.ours in SIZES and field.default is not None and type(value) is not int:
            c.problems.append(f"{name} {value!r} must be a whole number")
            value = 1  # the rules compute with it
        if field.ours == "norm_eps" and (value is None or isinstance(value, bool)):
            c.problems.append(f"{name} {value!r} must be a number")
        ours |= dict.fromkeys(field.ours.split(), value)
    for name, wanted in {**architecture.only, "is_causal": True}.items():
        c.expect(name, wanted)
    for rule in architecture.rules:
        RULES[rule][0](c, ours)
    c.finish(architecture.ignored)
    for name in ("d_ff", "kv_heads", "head_dim", "moe.experts", "moe.top_k", "moe.d_ff"):
        value = ours.get(name, 1)  # the model would take 0 for "use the default"
        if (type(value) is not int or value < 1) and (name.startswith("moe.") or not (value is None or c.problems)):
            c.problems.append(f"{name.replace('.', ' ')} {ours[name]!r} is not supported: it must be 1 or more")
    nested: dict[str, Any] = {}
    for name, value in ours.items():
        outer, _, inner = name.rpartition(".")
        (nested.setdefault(outer, {}) if outer else nested)[inner] = value
    return nested, c.problems


def _write(architecture: Architecture, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Hugging Face fields for mpcore's flat fields."""
    values: dict[str, Any] = {"architectures": [architecture.class_name]}
    for name, field in architecture.fields.items():
        value = ours[field.ours.split()[0]]
        if field.words is not None:
            value = next((theirs for theirs, word in field.words.items() if word == value), None)
        values[name] = value
    values |= architecture.only
    for rule in architecture.rules:
        values |= RULES[rule][1](ours)
    return values


def _flat(description: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in description.items():
        nested = name in ("moe", "latent")
        flat |= {f"{name}.{inner}": each for inner, each in (value or {}).items()} if nested else {name: value}
    return flat


# --- rules: each reads a group of Hugging Face fields into mpcore's, and writes the group back ------------------------


def _read_heads(c: Fields, ours: dict[str, Any]) -> None:
    heads, d_model = ours["heads"], ours["d_model"]
    ours["kv_heads"] = ours["kv_heads"] or heads
    head_dim = ours["head_dim"] or d_model // heads
    ours["head_dim"] = None if head_dim * heads == d_model else head_dim


def _read_rope(c: Fields, ours: dict[str, Any]) -> None:
    """Read base and scaling from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    old, new = c.take("rope_scaling", None), c.take("rope_parameters", None)
    rope = {name: value for name, value in (old or new or {}).items() if value is not None}
    base = c.take("rope_theta", None)
    base = rope.pop("rope_theta", base) or ours.get("rope_base", 10000.0)
    for fraction in (rope.pop("partial_rotary_factor", 1.0), c.take("partial_rotary_factor", 1.0)):
        if fraction not in (None, 1.0):
            c.problems.append(f"partial_rotary_factor {fraction} is not supported: only 1.0 is")
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", ours["seq_len"])
    scaling = {"rope_type": kind, **rope}
    try:
        rope_frequencies(2, base, scaling)
    except ValueError as error:
        c.problems.append(str(error))
    ours |= {"rope_base": float(base), "rope_scaling": None if kind == "default" else scaling}


def _check_plain_rope(c: Fields, ours: dict[str, Any]) -> None:
    if ours["rope_scaling"] is not None:
        kind = ours["rope_scaling"]["rope_type"]
        c.problems.append(f"rope_type {kind!r} is not supported: of this architecture only 'default' is")


def _check_window(c: Fields, ours: dict[str, Any], types: list[str] | None = None) -> None:
    types = types or c.take("layer_types", None)
    if types and set(types) != {"full_attention" if ours["window"] is None else "sliding_attention"}:
        c.problems.append(f"layer_types {types} are not supported: all layers have the same attention")


def _read_qwen_window(c: Fields, ours: dict[str, Any], *, full: int, clear: bool = True) -> None:
    window, types = c.take("sliding_window", 4096), c.take("layer_types", None)
    on = bool(c.take("use_sliding_window", False)) and window is not None
    full = c.take("max_window_layers", full)
    if on and full and not clear:
        c.problems.append(f"max_window_layers {full} means different things to different transformers: only 0 is clear")
    usual = ["sliding_attention" if on and i >= full else "full_attention" for i in range(ours["layers"])]
    ours["window"] = window if "sliding_attention" in ((clear and types) or usual) else None  # mixtures read no types
    _check_window(c, ours, types or usual)


def _read_sparse_layers(c: Fields, ours: dict[str, Any]) -> None:
    step, dense = c.take("decoder_sparse_step", 1), c.take("mlp_only_layers", None) or []
    layers = ours["layers"]
    mixed = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    every = ours["moe.every"] = mixed[0] + 1 if mixed else 0
    if not mixed or mixed != list(range(mixed[0], layers, every)):
        c.problems.append(
            f"decoder_sparse_step {step} and mlp_only_layers {dense} put experts in the layers {mixed} of {layers}: "
            f"supported is every n-th layer, from the n-th on"
        )


def _read_deepseek(c: Fields, ours: dict[str, Any]) -> None:
    nope, rope, heads = ours["latent.qk_nope_head_dim"], ours["latent.qk_rope_head_dim"], ours["heads"]
    for name, wanted in {"num_key_value_heads": heads, "head_dim": rope, "qk_head_dim": nope + rope}.items():
        c.expect(name, wanted)
    if not ours["moe.shared_experts"]:
        c.problems.append(f"n_shared_experts {ours['moe.shared_experts']} is not supported: it must be 1 or more")
    top_k, groups, top_groups = ours["moe.top_k"], ours["moe.groups"], ours["moe.top_groups"]
    if top_groups < groups and -(-top_k // top_groups) != 2:
        c.problems.append(
            f"num_experts_per_tok {top_k} and topk_group {top_groups} of {groups}: transformers ranks groups by their "
            f"two best experts, mpcore by as many as a group gives, {-(-top_k // top_groups)}"
        )


def _write_deepseek(ours: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = {"n_group": ours["moe.groups"], "topk_group": ours["moe.top_groups"]}
    return {"num_key_value_heads": ours["heads"], **groups, FURTHER: ours.get("mtp", 0)}


def _write_qwen_window(ours: Mapping[str, Any]) -> Mapping[str, Any]:
    window = ours["window"]
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}


Read = Callable[[Fields, dict[str, Any]], None]
Write = Callable[[Mapping[str, Any]], Mapping[str, Any]]
RULES: dict[str, tuple[Read, Write]] = {
    "gpt2": (
        lambda c, ours: ours.update(d_ff=ours["d_ff"] or 4 * ours["d_model"]),
        lambda ours: {"resid_pdrop": ours["dropout"], "embd_pdrop": ours["dropout"], "attn_pdrop": 0.0},
    ),
    "rope": (_read_rope, lambda ours: {"rope_theta": ours["rope_base"], "rope_scaling": ours["rope_scaling"]}),
    "heads": (_read_heads, lambda ours: {}), "window": (_check_window, lambda ours: {}),
    "plain_rope": (_check_plain_rope, lambda ours: {}),
    "mixtral": (lambda c, ours: None, lambda ours: {"intermediate_size": ours["moe.d_ff"]}),
    "qwen_window": (partial(_read_qwen_window, full=28), _write_qwen_window),
    "qwen_moe_window": (partial(_read_qwen_window, full=0, clear=False), _write_qwen_window),
    "sparse_layers": (_read_sparse_layers, lambda o: {"decoder_sparse_step": o["moe.every"], "mlp_only_layers": []}),
    "deepseek": (_read_deepseek, _write_deepseek),
}  # fmt: skip
