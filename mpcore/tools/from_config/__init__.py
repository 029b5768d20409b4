"""The command `mpcore from-config FILE`: write a run.toml for `examples.gpt` from the settings of another trainer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors
from mpcore.tools.from_config.table import PEERS

Values = dict[str, Any]


class Row(NamedTuple):
    """A line of the table: what some keys of another trainer are here."""

    keys: list[str]
    default: str
    field: str
    how: str
    verdict: str
    note: str


def rows(peer: str) -> list[Row]:
    """Return the table of a trainer."""
    cells = ([cell.strip() for cell in line.split("|")] for line in PEERS[peer].strip().splitlines())
    return [Row(keys.split(), default, *field.partition(":")[::2], *rest) for keys, default, field, *rest in cells]


class UnknownValueError(ValueError):
    """A value that has no counterpart."""


def _choice(**known: Any) -> Callable[[Any, Values], Any]:
    def convert(value: Any, _: Values) -> Any:
        if (found := known.get(str(value).lower().replace("-", "_"))) is None:
            raise UnknownValueError(f"{value!r} has no counterpart")
        return found

    return convert


_BF16, _FP16 = "bfloat16", "float16"


def _dropout(value: Any, values: Values) -> float:
    if float(value) and (values.get("context-parallel-size", 1) != 1 or values.get("multi-latent-attention")):
        raise UnknownValueError("the example drops no attention weights with cp or latent attention")
    return float(value)


CONVERSIONS: dict[str, Callable[[Any, Values], Any]] = {
    "": lambda v, _: v,
    "flag": lambda v, _: bool(v),
    "false": lambda v, _: not v,
    "not": lambda v, _: not v,
    "int": lambda v, _: int(bool(v)),
    "lowest": lambda v, values: float(values["lr"] if v == "lr" else v),
    "strategy": lambda v, values: _choice(no_shard=0, optim=1, optim_grads=2, optim_grads_params=3)(v, values)
    if values.get("use-megatron-fsdp") else None,
    "etp": lambda v, values: v if values.get("parallelism.expert_parallel_degree", 1) > 1 else None,
    "three": lambda v, _: None if v == 1 else 3,
    "float": lambda v, _: float(v),
    "positive": lambda v, _: v if isinstance(v, int) and v > 0 else None,
    "groups": lambda v, values: v if values.get("group-query-attention") else None,
    "positions": _choice(rope="rope", rotary="rope", learned_absolute="learned", learned="learned"),
    "norm": _choice(layernorm="layer", rmsnorm="rms"),
    "swiglu": lambda v, _: "swiglu" if v else None,
    "squared_relu": lambda v, _: "relu_squared" if v else None,
    "schedule": _choice(cosine="cosine", linear="linear"),
    "optimizer": _choice(adam="adamw", adamw="adamw"),
    "bfloat16": lambda v, _: _BF16 if v else None,
    "float16": lambda v, _: _FP16 if v else None,
    "dtype": _choice(bfloat16=_BF16, bf16=_BF16, float16=_FP16, fp16=_FP16, float32="float32", fp32="float32"),
    "act": _choice(gelu="gelu_tanh", swiglu="swiglu", geglu="geglu", relu="relu", silu="silu"),
    "recompute": _choice(full="full", selective="selective", none="none"),
    "batches": lambda v, values: None if "rampup-batch-size" in values else v // values["global-batch-size"],
    "weights": _dropout,
    "of_lr": lambda v, values: float(v) / float(values["lr"]),
    "rest": lambda v, _: round(1 - (parts := [float(x) for x in str(v).split(",")])[0] / sum(parts), 6),
    "factor": lambda v, values: float(v) * float(values["lr"]),
    "betas": lambda v, values: [float(each) for each in values["betas"]],
    "pair": lambda v, _: [float(each) for each in (v.split(",") if isinstance(v, str) else v)],
    "ramp": lambda v, _: [int(each) for each in (v if isinstance(v, list) else str(v).split())],
    "words": lambda v, _: v if isinstance(v, list) else str(v).split(),
    "moe": lambda v, values: v if values.get("num-experts") else None,
    "moe_float": lambda v, values: float(v) if values.get("num-experts") else None,
    "balance": lambda v, values: values.get("num-experts") and _choice(
        aux_loss="micro_batch", seq_aux_loss="sequence", global_aux_loss="global", none="none")(v, values),
    "reduce_scatter": lambda v, _: str(v).upper() == "REDUCE_SCATTER",
    "flavor": lambda v, values: _choice(
        llama3_1b="llama3-1b", llama3_8b="llama3-8b", llama3_70b="llama3-70b", llama3_405b="llama3-405b"
    )(f"{values.get('model.name')}_{v}", values),
}  # fmt: skip


WARMUPS = {"warmup_share", "warmup_samples"}
FLAGS = ("flag", "false", "not", "int", "swiglu", "squared_relu", "bfloat16", "float16")
"""Conversions of settings that are on or off."""


def read(path: Path) -> tuple[str, Values]:
    """Return which trainer wrote a file, and its settings by key.

    Raises:
        ValueError: if the file can't be parsed.
    """
    text, kind = path.read_text(errors="replace"), path.suffix
    try:
        if kind == ".sh":
            return "Megatron-LM", _shell(text)
        if kind == ".toml":
            module = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
            return "torchtitan", _flat(module.loads(text))
        if kind == ".json":
            return "DeepSpeed", _flat(json.loads(text))
        if kind not in (".yaml", ".yml"):
            raise ValueError("its name ends in none of .sh, .toml, .yaml, .yml, .json")
        content = import_module("yaml").safe_load(text)
        if not isinstance(content, dict):
            raise ValueError("it holds no settings by name")
    except ImportError as error:
        raise ValueError(f"{path}: pip install {error.name}") from None
    except Exception as error:  # of the parser: each has its own
        raise ValueError(f"{path} can't be read: {' '.join(str(error).split())[:300]}") from None
    if isinstance(content.get("MODEL_ARGS"), dict):
        return "Megatron-LM", {
            str(k).lstrip("-").replace("_", "-"): _number(v) for k, v in content["MODEL_ARGS"].items()
        }
    if "parallelism" in content and isinstance(content.get("model"), dict):
        return "nanotron", _flat(content)
    return "gpt-neox", _flat({str(key).replace("-", "_"): value for key, value in content.items()})


def _flat(content: Any, name: str = "") -> Values:
    if not isinstance(content, dict):
        if not name:
            raise ValueError("it holds no settings by name")
        return {name: _number(content)}
    return {
        k: v for key, value in content.items() for k, v in _flat(value, f"{name}.{key}" if name else str(key)).items()
    }


def _number(value: Any) -> Any:
    """Return the number that a word is, such as 1e-2, which YAML takes for a word."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _shell(text: str) -> Values:
    """Return the flags of a shell script; variables that it sets are replaced. A flag without a value is True."""
    text = re.sub(r"(^|\s)#[^\n]*", r"\1", text)
    text = re.sub(r"=[\"']\s*(?=--)", "=\n", text)  # NAME="--lr 1e-3 ..": a list of flags, no value of one word
    text = re.sub(r"\\\n|\$\{\w+\[[@*]\]\}", " ", re.sub(r"[\"']", "", text))
    found = {*re.findall(r"^\s*(?:export\s+)?(\w+)= ?([^\s()#;]+)", text, re.M)}
    names = [name for name, _ in found]
    variables = {name: value for name, value in found if names.count(name) == 1}
    for name, value in variables.items():  # X=${X:-2}
        variables[name] = re.sub(rf"\$\{{{name}:?-([^}}]*)\}}", r"\1", value)
    for _ in range(5):
        text = re.sub(r"\$\{(\w+):?-?([^}]*)\}|\$(\w+)", lambda m: variables.get(m[1] or m[3], m[2] or m[0]), text)
    words = re.sub(r"[();]", " ", text).split()
    values: Values = {}
    name, depth, doubtful = "", 0, set[str]()  # flags given twice, or in an if: their values stay open
    for word in words:
        depth += (word in ("if", "case")) - (word in ("fi", "esac"))
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            doubtful |= {name} if depth > 0 or name in values else set()
            values[name] = _number(value) if equals else True
        elif (
            name
            and re.match(r"[-\w./$@:,{}]+$", word)
            and "=" not in word
            and not re.match(r"\w+\.py$|-[A-Za-z]", word)
        ):
            old = values[name]
            values[name] = _number(word) if old is True else [*(old if isinstance(old, list) else [old]), word]
        else:
            name = ""
    lists = ("data-path", "rampup-batch-size")
    values = {k: v[0] if isinstance(v, list) and k not in lists else v for k, v in values.items()}
    return values | {name: f"$ ({values[name]} in one place of the script)" for name in doubtful}


def convert(peer: str, values: Values) -> tuple[Values, dict[str, list[str]]]:
    """Return the fields of a run.toml, and the lines of three lists by verdict: "=", "~" and "-"."""
    fields: Values = {}
    lists: dict[str, list[str]] = {"=": [], "~": [], "-": []}
    known = {key.replace("_", "-") if peer == "Megatron-LM" else key for row in rows(peer) for key in row.keys}
    if not known & values.keys():
        raise ValueError(f"none of the file's {len(values)} settings is one of {peer}'s")
    rates = ("lr", "optimizer.lr", "optimizer.learning_rate_scheduler.learning_rate")
    named: Values = {"lr": next((values[k] for k in rates if k in values), 8e-4)}
    for row in rows(peer):
        found = [
            key for key in (k.replace("_", "-") if peer == "Megatron-LM" else k for k in row.keys) if key in values
        ]
        if not found and (not row.default or (row.field == "warmup" and fields.keys() & WARMUPS)):
            continue
        key = found[0] if found else row.keys[0]
        value = values[key] if found else _number(row.default)
        source = f"{key} {value}" + ("" if found else ", its default")
        if row.how == "betas":
            named["betas"] = [
                values.get(k, d) for k, d in zip(row.keys, (0.9, 0.999 if peer == "Megatron-LM" else 0.95), strict=True)
            ]
        try:
            if "$" in str(value) and row.field:
                raise UnknownValueError("the file doesn't give its value")
            if value is True and row.field and row.how not in FLAGS:
                raise UnknownValueError("the file gives no value")
            made = CONVERSIONS[row.how](value, {**values, **named}) if row.field and value is not None else None
            if (
                row.field
                and (isinstance(made, (dict, list)) or made == "auto")
                and row.field not in ("betas", "data", "rampup_batch_size")
            ):
                raise UnknownValueError("the file gives no single value")
        except UnknownValueError as problem:
            lists["-"].append(f"{source}: {problem}")
            continue
        except (ValueError, TypeError, KeyError):
            lists["-"].append(f"{source}: this value can't be converted")
            continue
        if row.field and made is None and not found:
            continue
        if row.field and made is None:
            lists["~"].append(f"{source}: {row.note or 'set nothing'}; {row.field} keeps its default")
            continue
        if row.field:
            fields[row.field] = made
        verdict = row.verdict if found or row.verdict == "-" else "~"
        to = f" -> {row.field} = {json.dumps(made)}" if row.field else ""
        lists[verdict].append(f"{source}{to}" + (f": {row.note}" if row.note else ""))
    if peer == "Megatron-LM":
        _megatron_defaults(values, fields, lists["~"])
    elif peer == "gpt-neox":
        _neox_model(values, fields, lists["~"])
    elif peer == "torchtitan":
        fields.setdefault("min_lr", 0.0)
    lists["-"] += [f"{key} {values[key]}: the table doesn't know it" for key in values if key not in known]
    return fields, lists


def _megatron_defaults(values: Values, fields: Values, differs: list[str]) -> None:
    """Write what Megatron's model has where no flag says so."""
    gated = bool(values.get("swiglu"))
    if not any(values.get(name) for name in ("swiglu", "squared-relu", "quick-geglu")):
        fields["activation"] = "gelu_tanh"
        differs.append('activation -> "gelu_tanh": Megatron\'s fused GELU; unfused it is exact, "gelu"')
    if values.get("use-rotary-position-embeddings"):
        fields["positions"] = "rope"
    fields.setdefault("bias", True)
    fields.setdefault("tie_embeddings", True)
    width = values.get("hidden-size")
    if "d_ff" not in fields and isinstance(width, int):
        fields["d_ff"] = int(width * 4 * 2 / 3) // 64 * 64 if gated else 4 * width
    if fields["bias"] and values.get("num-experts"):
        fields["mlp_bias"] = False
        differs.append("biases -> mlp_bias = false: experts have none here")
    differs.append("biases and tied embeddings -> bias, tie_embeddings: Megatron's defaults are true, here false")


def _neox_model(values: Values, fields: Values, differs: list[str]) -> None:
    name, eps = ("rms_norm_epsilon", 1e-8) if fields.get("norm") == "rms" else ("layernorm_epsilon", 1e-5)
    made = {"norm_eps": float(values.get(name, eps))}
    for field, key in {"bias": "use_bias_in_attn_linear", "mlp_bias": "use_bias_in_mlp"}.items():
        made[field] = bool(values.get(key, True))
    inner = values.get("intermediate_size") or (
        int((values.get("expansion_factor") or 4) * values["hidden_size"]) if "hidden_size" in values else None
    )
    if isinstance(inner, int):
        multiple = values.get("mlp_multiple_of", 1)
        inner = int(inner * 2 / 3) // 2 if fields.get("activation") in ("swiglu", "geglu") else inner
        made["d_ff"] = -(-inner // multiple) * multiple
    fields |= made
    differs += [f"{field} -> {json.dumps(value)}: computed as gpt-neox does" for field, value in made.items()]


def toml(fields: Values) -> str:
    """Return fields as the text of a TOML file."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items() if "." not in name]
    moe = [f"{name[4:]} = {json.dumps(value)}" for name, value in fields.items() if name.startswith("moe.")]
    return "\n".join([*lines, *(["[moe]", *moe] if moe else [])]) + "\n"


@reports_errors("mpcore from-config")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    args = parsers.from_config().parse_args(argv)
    peer, values = read(args.file)
    fields, lists = convert(peer, values)
    if args.out.exists() and not args.force:
        raise ValueError(f"{args.out} exists: --force replaces it")
    args.out.write_text(toml(fields))
    print(
        f"{args.file}: {peer}, {len(values)} settings; wrote {args.out}, for examples.gpt.pretrain --config {args.out}"
    )
    for verdict, title in {"=": "same", "~": "differs, and how", "-": "not available, and what to do"}.items():
        print(f"\n{title}: {len(lists[verdict])}", *(f"  {line}" for line in lists[verdict]), sep="\n")
    return 0
