"""The flags of `examples.gpt.pretrain`, the fields of its TOML file, and their ranges."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from examples.gpt.config import PARTS, PRESETS, GPTConfig
from mpcore.layers.attention.sequence import KINDS
from mpcore.optim.schedules import SCHEDULES
from mpcore.pipeline.schedules import NAMES
from mpcore.tools.command_line import Parser, did_you_mean
from mpcore.tools.from_config import rows as megatron_rows

DTYPES = {n: getattr(torch, n) for n in ("float64", "float32", "bfloat16", "float16")}
FLAGS: dict[str, dict[str, tuple[Any, str]]] = {  # by group: a default or, without one, a type; and the help
    "mesh": {
        "tp": (1, "tensor parallel size"),
        "pp": (1, "pipeline parallel size"),
        "cp": (1, "context parallel size"),
        "ep": (1, "expert parallel size"),
        "dp": (int, "data parallel size (default: what the others leave of the world)"),
        "etp": (int, "tensor parallel size inside each expert (default: tp)"),
        "zero": (1, "over data shard nothing, optimizer state, gradients too, parameters too"),
        "sequence_parallel": (False, "shard activations along the sequence between tp regions"),
        "cp_kind": ("zigzag", "how --cp shards sequences and attends"),
        "schedule": ("1f1b", f"of --pp: {', '.join(NAMES)}, or a file PATH.csv"),
        "virtual_stages": (int, "stages on each pipeline rank (default: what the schedule takes)"),
        "device": (str, "default: cuda where each process has a GPU"),
        "workers": (1, "models to train, each on a mesh as above, and to merge (DiLoCo)"),
        "local_steps": (int, "steps that workers take on their own between two merges (default 50)"),
        "listen": (str, "HOST:PORT where this job serves other jobs, which are workers of the same run"),
        "join": ([str], "HOST:PORT ..: of workers of the run to join"),
        "wait": (str, "{none,quorum:K,all}: for whom such a worker waits after its local steps (default all)"),
    },
    "model": {
        "preset": (str, "shape that the flags below change (default tiny)"),
        "layers": (int, "blocks (default: the preset's, as of those below; tiny has 4)"),
        "d_model": (int, "width (tiny: 128)"),
        "heads": (int, "attention heads (tiny: 4)"),
        "kv_heads": (int, "heads of keys and values (tiny: as many as heads)"),
        "d_ff": (int, "hidden width of the MLP (tiny: 8/3 of the width, up to a multiple of 64)"),
        "dropout": (float, "share of activations that training drops (tiny: 0)"),
        "seq_len": (int, "tokens a sample (tiny: 256)"),
        "experts": (int, "experts in the place of each MLP; 0: none (tiny: none)"),
    },
    "data": {
        "data": ([str], "[WEIGHT] PREFIX ..: of .bin and .idx, as examples.gpt.prepare writes (default: Python's "
                 "library); of several, such as 0.7 web 0.3 code, samples in these shares, or without weights by size"),
        "tokenizer": (str, "'byte' or a tokenizer.json (default byte)"),
    },
    "training": {
        "steps": (200, "of the whole run"),
        "global_batch": (16, "samples a step, over all ranks of all workers"),
        "micro_batch": (int, "samples a forward, on one rank (default 2, or what bitwise says)"),
        "lr": (3e-3, "highest learning rate"),
        "warmup": (int, "steps of linear warm-up (default 20)"),
        "lr_decay_steps": (int, "steps until the rate reaches its lowest, where it stays (default: --steps)"),
        "optimizer": ("adamw", "adamw-bf16: moments in bfloat16, rounded at random; muon: for the blocks' matrices"),
        "recompute": ("none", "activations computed again in backward: none, selective (norms, activations, attention "
                      "cores), full, or budget=SHARE, as much as keeps this share of the bytes"),
        "offload": (["none"], "what lies in the host's memory until it is needed: optimizer, activations, parameters"),
        "dtype": ("float32", "bfloat16: weights, activations and messages in bfloat16, masters in fp32; "
                  "float16: fp32 weights, matrix products in float16"),
        "fp8": (False, "the blocks' linear layers, but experts, multiply in FP8, scaled in blocks of 128"),
        "compile": (str, "training steps run each block as torch.compile makes it (default backend: inductor)"),
        "seed": (0, "of weights, dropout and the order of the data, not of what is held out"),
    },
    "results": {
        "eval_every": (50, "steps between evaluations; 0: none"),
        "out": ("runs/pretrain", "folder for metrics.jsonl, config.json, loss.png, checkpoints; of a worker, in it"),
        "save_every": (0, "steps between checkpoints; 0: only the end"),
        "resume": ("none", "{auto,PATH,none}: go on from a checkpoint of any layout; auto: the newest in OUT"),
        "init_from": (str, "PATH: begin with the shape and the weights of a checkpoint of any layout"),
    },
}  # fmt: skip
CHOICES = {
    "zero": (0, 1, 2, 3), "cp_kind": KINDS, "device": ("cpu", "cuda"), "preset": sorted(PRESETS), "dtype": DTYPES,
    "optimizer": ("adamw", "adamw-bf16", "muon"), "offload": ("none", "optimizer", "activations", "parameters"),
    "lr_schedule": SCHEDULES, "residual_dtype": ("float32",), "log_to": ("tensorboard", "wandb"),
    "param_dtype": DTYPES, "reduce_dtype": DTYPES,
}  # fmt: skip


@dataclasses.dataclass
class Fields:
    """What has no flag: fields of the TOML file, or of `--set`. docs/example.md says what each is."""

    replicate: int = 1
    cp_inner: int | None = None
    param_dtype: str | None = None
    reduce_dtype: str = "float32"
    bitwise: int = 0
    overlap: int = 0
    overlap_experts: bool = False
    overlap_halves: bool = False
    trace: bool = False
    token: str | None = None
    staleness: int | None = None
    dynamic_steps: bool = True
    worker_timeout: float = 60.0
    replicas: int = 1
    update_dtype: str = "same"
    overlap_exchange: bool = False
    outer_lr: float | None = None
    outer_momentum: float | None = None
    nesterov: bool = True
    fragments: int | None = None
    without_documents: str | None = None
    end_of_document: str | None = None
    document_masking: bool = False
    held_out: float = 0.05
    eval_data: list[str] = dataclasses.field(default_factory=list)
    rampup_batch_size: list[int] | None = None
    min_lr: float | None = None
    lr_schedule: str = "cosine"
    warmup_share: float | None = None
    warmup_samples: int | None = None
    embedding_lr_scale: float = 1.0
    eps: float = 1e-8
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.1
    clip: float = 1.0
    recompute_every: int = 1
    autocast: bool = False
    residual_dtype: str | None = None
    first_loss_scale: float = 2.0**16
    eval_samples: int = 32
    log_to: list[str] = dataclasses.field(default_factory=list)
    profile: str | None = None
    no_save: bool = False
    keep: int | None = None
    async_save: bool = False
    exit_step: int | None = None
    exit_minutes: float | None = None
    timeout: float = 600.0
    max_skips: int = 20
    check_replicas: int = 100
    check_speed: int = 50


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


TABLES: dict[str, type] = {"model": GPTConfig, **PARTS}
MODEL_FIELDS = _fields(GPTConfig) - {*TABLES, *(name for rows in FLAGS.values() for name in rows)}
RENAMED = {
    "shared_experts": "moe.shared_experts", "expert_d_ff": "moe.d_ff", "moe_every": "moe.every", "top_k": "moe.top_k",
    "routed_scale": "moe.routed_scale", "aux_loss": "moe.aux_loss", "aux_coefficient": "moe.aux_coefficient",
    "router_z_loss": "moe.z_loss", "bias_rate": "moe.bias_rate", "router_jitter": "moe.jitter",
    "capacity_factor": "moe.capacity_factor", "dispatch": "moe.dispatch",
}  # fmt: skip
GONE = {
    "balance": "set moe.aux_loss and moe.bias_rate: a bias alone is moe.aux_loss=none moe.bias_rate=0.001",
    "twin": "mpcore verify, preflight and --dtype float64 tell rounding from a bug",
    "init_from_hf": "mpcore convert examples.gpt.hf:SPEC --from-hf DIR --to CKPT, then --init-from CKPT",
}
"""Flags of version 0.2: the field that does it now, or what to do."""
FROM_0 = ("bitwise", "overlap", "experts", "moe.shared_experts", "warmup", "warmup_samples", "eval_every",
          "save_every", "max_skips", "check_replicas", "check_speed")  # fmt: skip
FROM_1 = ("tp", "pp", "cp", "ep", "dp", "etp", "replicate", "cp_inner", "virtual_stages", "workers", "local_steps",
          "fragments", "layers", "d_model", "heads", "kv_heads", "d_ff", "moe.top_k", "moe.d_ff", "moe.every",
          "seq_len", "steps", "lr_decay_steps", "global_batch", "rampup_batch_size", "micro_batch", "eval_samples",
          "keep", "exit_step", "recompute_every")  # fmt: skip
NOT_NEGATIVE = ("lr", "min_lr", "embedding_lr_scale", "eps", "weight_decay", "model.init_std", "moe.aux_coefficient",
                "moe.z_loss", "moe.bias_rate")  # fmt: skip
POSITIVE = ("timeout", "exit_minutes", "outer_lr", "moe.routed_scale", "moe.capacity_factor", "first_loss_scale")
SHARES = ("dropout", "model.attention_dropout", "held_out", "warmup_share", "outer_momentum", "moe.jitter", "betas")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Every flag has a default; `--config` names a file that gives flags and fields first.

    Returns:
        The flags, the `Fields`, and as dicts the `TABLES`: the fields of the model that have no flag.

    Raises:
        ValueError: as `check_ranges`.
        SystemExit: if a flag or a field can't be parsed.
    """
    argv, parser = list(sys.argv[1:] if argv is None else argv), _parser()
    megatron_flags = {key for row in megatron_rows("Megatron-LM") for key in row.keys}
    for word in (word.partition("=")[0] for word in argv if word.startswith("--")):
        name, theirs = word[2:].replace("-", "_"), word[2:].replace("_", "-")
        if now := _moved(name):
            parser.error(f"{word} is no flag any more: {now}")
        if theirs in megatron_flags and not any(name in rows for rows in FLAGS.values()):
            text = f"{word} is a flag of Megatron-LM: mpcore from-config SCRIPT converts a command"
            parser.error(f"{text}, and docs/megatron.md lists the flags")
    args, name = argparse.Namespace(**vars(Fields()), **{table: {} for table in TABLES}), parser.prog
    given, words = parser.parse_args(argv, copy.copy(args)), list[str]()
    for source in ("config", "set"):
        if not (value := getattr(given, source)):
            continue
        parser.prog = f"{name} --{source}{f' {value}' if source == 'config' else ''}"  # whose error it is
        try:
            words += (more := _assign(args, read_file(Path(value)) if source == "config" else _read_set(value)))
            parser.parse_args(more)
        except (OSError, ValueError) as problem:
            parser.error(str(problem))
    parser.prog = name
    args = parser.parse_args([*words, *argv], args) if given.config or given.set else given
    del args.set
    check_ranges(args)
    args.micro_batch = args.micro_batch or (max(args.global_batch // args.bitwise, 1) if args.bitwise else 2)
    return args


def _parser() -> Parser:
    parser = Parser(
        prog="python -m examples.gpt.pretrain", description="Pretrain a GPT on any mesh.",
        examples=[
            "python -m examples.gpt.pretrain --steps 10 --set min_lr=1e-4 moe.z_loss=0.001",
            "torchrun --nproc-per-node 4 -m examples.gpt.pretrain --tp 2 --pp 2 --sequence-parallel",
            "", "fields without a flag, of the file or of --set, with their defaults (docs/example.md):",
            *(f"  {name} = {value!r}" for name, value in vars(Fields()).items()),
            "  and those of GPTConfig, and as moe.FIELD, latent.FIELD and linear.FIELD those of its parts",
        ],
    )  # fmt: skip
    text = "a .toml with flags and fields, or the config.json of another run; flags on the command line win"
    parser.add_argument("--config", metavar="PATH", help=text)
    text = "fields as in the .toml of --config"
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="FIELD=VALUE", help=text)
    for title, rows in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, (default, text) in rows.items():
            options: dict[str, Any] = {"help": text, "choices": CHOICES.get(name)}
            if name == "compile":
                options |= {"nargs": "?", "const": "inductor", "metavar": "BACKEND"}
            elif default is False:
                options = {"help": text, "action": "store_true"}
            elif isinstance(default, type):
                options |= {"type": default}
            elif isinstance(default, list):
                options |= {"nargs": "+", "default": None if default == [str] else default}
            else:
                options |= {"type": type(default), "default": default, "help": f"{text} (default {default})"}
            group.add_argument(flag(name), **options)
    return parser


def _moved(name: str) -> str:
    """Return what does now what a flag did before; "" for a flag, or for no known name."""
    if name in GONE:
        return GONE[name]
    field = RENAMED.get(name, name)
    if field == name and name not in vars(Fields()) and name not in MODEL_FIELDS:
        return ""
    table, _, own = field.rpartition(".")
    return f"write {own} = VALUE in the file of --config{f', under [{table}]' * bool(table)}, or --set {field}=VALUE"


def read_file(path: Path) -> dict[str, Any]:
    """Read a .toml file, or the config.json that a run wrote.

    Raises:
        ValueError: if it isn't TOML or JSON.
        OSError: if it can't be read.
    """
    text = path.read_text()
    content = json.loads(text) if path.suffix == ".json" else {"run": _toml(text)}
    found = content.get("run") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ValueError("it has no 'run': give the config.json of a run")
    return found


def _toml(text: str) -> dict[str, Any]:
    return import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)


def _read_set(words: Sequence[str]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word} is not FIELD=VALUE")
        table, _, own = name.rpartition(".")
        (content.setdefault(table, {}) if table else content)[own] = _value(value)
    return content


def _value(word: str) -> Any:
    try:
        return _toml(f"x = {word}")["x"]
    except ValueError:  # a word without quotes
        return word


def _assign(args: argparse.Namespace, content: dict[str, Any]) -> list[str]:
    """Assign the fields of a file, and return its flags. Tables but [moe], [latent] and [linear] are for readers alone.

    Raises:
        ValueError: if a name is unknown or given twice, or a value has another type.
    """
    flags = {name: default for rows in FLAGS.values() for name, (default, _) in rows.items()}
    tables = {name: inner for name, inner in content.items() if isinstance(inner, dict) and name not in MODEL_FIELDS}
    tables[""] = {name: value for name, value in content.items() if name not in tables}
    values = [(table, *each) for table, inner in tables.items() for each in inner.items()]
    words, seen = [], set()
    for table, name, value in values:
        name = name.replace("-", "_")
        if value is None and table not in TABLES:  # in the config.json of a run: not given
            continue
        if table != "moe" and name in RENAMED:
            table, name = "moe", RENAMED[name].removeprefix("moe.")
        kind = table if table in PARTS and name in _fields(TABLES[table]) else ""
        kind = kind or ("model" if name in MODEL_FIELDS else "")
        if (kind, name) in seen:
            raise ValueError(f"{flag(name) if name in flags else name} is given twice")
        seen.add((kind, name))
        if kind:
            getattr(args, kind)[name] = _typed(f"{kind}.{name}", value, _hints(TABLES[kind])[name])
        elif name in flags:
            if value is False and flags[name] is not False:
                raise ValueError(f"{name} = false is no value of {flag(name)}")
            listed = value if isinstance(value, list) else [] if value is True else [value]
            words += [flag(name), *map(str, listed)] if value is not False and value != [] else []
        elif name in vars(Fields()):
            setattr(args, name, _typed(name, value, _hints(Fields)[name]))
        elif name in GONE:
            raise ValueError(f"{name} is no field any more: {GONE[name]}")
        elif name != "config":
            known = [*flags, *vars(Fields()), *(each for kind in TABLES.values() for each in _fields(kind))]
            raise ValueError(f"unknown {name}{did_you_mean(name, known)}")
    return words


_hints = lru_cache(get_type_hints)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return a value of this type. The word "none" is None where the type has it: TOML has no other word."""
    hints = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    kinds = [get_origin(each) or each for each in hints]
    if type(None) in kinds and value in ("none", None):
        return None
    if {list, tuple} & {*kinds} and isinstance(value, (str, list)):
        words = value if isinstance(value, list) else map(_value, value.split(","))  # of --set: several with commas
        return [_typed(name, each, get_args(hints[0])[0]) for each in words]
    if type(value) is int and int not in kinds and (float in kinds or str in kinds):
        value = float(value) if float in kinds else str(value)
    if type(value) not in kinds:
        known = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise ValueError(f"{name} = {value!r} is no {known}")
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(map(str, CHOICES[name]))}")
    return value


def check_ranges(args: argparse.Namespace) -> None:
    """Raise ValueError for a number that no run can have, whatever its other flags and its ranks are."""
    if "://" in args.out:
        raise ValueError(f"--out {args.out} is a URL, and metrics need a local folder: run.save takes URLs")
    ranges: list[tuple[Sequence[str], Callable[[float], bool], str]] = [
        (FROM_0, lambda x: x >= 0, "smaller than 0"),
        (FROM_1, lambda x: x >= 1, "smaller than 1"),
        (NOT_NEGATIVE, lambda x: 0 <= x < math.inf, "no number from 0"),
        (POSITIVE, lambda x: 0 < x < math.inf, "no number above 0"),
        (SHARES, lambda x: 0 <= x < 1, "no number from 0 to below 1"),
        (("clip",), lambda x: not math.isnan(x), "no number; 0 bounds nothing"),
    ]
    for names, is_legal, fault in ranges:
        for name in names:
            table, _, own = name.rpartition(".")
            value = getattr(args, table).get(own) if table else getattr(args, name)
            for each in value if isinstance(value, list) else [value]:
                if each is not None and not is_legal(each):
                    raise ValueError(f"{flag(name)} {each} is {fault}")
    for names in (("warmup", "warmup_share", "warmup_samples"), ("warmup_samples", "rampup_batch_size")):
        given = [f"{flag(name)} {value}" for name in names if (value := getattr(args, name)) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: give one of them")
    for name, count in (("betas", 2), ("rampup_batch_size", 3)):
        value = getattr(args, name)
        if value is not None and len(value) != count:
            raise ValueError(f"{name} {value} are not {count} numbers")


def flag(name: str) -> str:
    """Return a name as the user writes it: a flag with its dashes, a field as it is."""
    return f"--{name.replace('_', '-')}" if any(name in rows for rows in FLAGS.values()) else name
