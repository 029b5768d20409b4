"""The command `mpcore from-config FILE`: write a run.toml for `examples.gpt` from the settings of another trainer."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors
from mpcore.tools.from_config import files
from mpcore.tools.from_config.table import PEERS
from mpcore.tools.from_config.values import CONVERSIONS, FLAGS, UnknownValueError, Values

BELOW = {"dropout": 1, "attention_dropout": 1, "warmup_share": 1, "held_out": 1, "betas": 1, "zero": 4}
"""The upper bound of each field, which is excluded."""
TITLES = {"=": "same", "~": "differs, and how", "+": "files and folders to pass", "-": "not available, and what to do"}
EXCLUSIVE = ("activation", "dtype", "steps", "lr_decay_steps", "positions")
"""Fields that two settings of a file can't both give."""


class Row(NamedTuple):
    """A line of the table: what some keys of another trainer are here."""

    keys: list[str]
    default: str
    field: str
    how: str
    verdict: str
    note: str


@cache
def rows(peer: str) -> list[Row]:
    """Return the table of a trainer."""
    cells = ([cell.strip() for cell in line.split("|")] for line in PEERS[peer].strip().splitlines())
    return [Row(keys.split(), default, *field.partition(":")[::2], *rest) for keys, default, field, *rest in cells]


def read(path: Path) -> tuple[str, Values]:
    """Return which trainer wrote a file, and its settings by key.

    Raises:
        ValueError: if the file can't be parsed.
    """
    return files.read(path, frozenset(key for row in rows("Megatron-LM") if row.how in FLAGS for key in row.keys))


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, (str, int, float, type(None))) else reprlib.repr(value)
    return text if text.isprintable() else repr(text)


def _made(row: Row, value: Any, values: Values, fields: Values) -> Any:
    """Return the field that a value is, or None if it has no meaning among the others."""
    words = value if isinstance(value, list) else [value]
    if any(isinstance(word, str) and "$" in word for word in words):
        raise UnknownValueError("the file doesn't give its value")
    if value == "auto":
        raise UnknownValueError("the program sets it")
    if isinstance(value, bool) and row.how not in FLAGS:
        raise UnknownValueError("the file gives no value")
    try:
        made = CONVERSIONS[row.how](value, values, fields)
    except UnknownValueError:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
        raise UnknownValueError("this value can't be converted") from None
    most = BELOW.get(row.field, 2**63)
    for each in made if isinstance(made, list) else [made]:
        if isinstance(each, (int, float)) and not 0 <= each < most:
            raise UnknownValueError(f"{row.field} would be {_shown(made)}, which is not from 0 to below {most}")
    return made


def convert(peer: str, values: Values) -> tuple[Values, dict[str, list[str]]]:
    """Return the fields of a run.toml, and the lines of four lists by verdict: "=", "~", "+" and "-".

    Raises:
        ValueError: if no setting is known, or if two settings contradict each other.
    """
    table = rows(peer)
    fields: Values = {}
    origins: dict[str, str] = {}
    entries: list[tuple[str, str, str, str]] = []  # verdict, setting, field, note
    known = {key for row in table for key in row.keys}
    if not any(row.field and values.keys() & set(row.keys) for row in table):
        raise ValueError(f"none of the file's {len(values)} settings is one of {peer}'s")
    given = {key: value for key, value in values.items() if value is not None}
    for row in table:
        found = [key for key in row.keys if key in given]
        if not found and not row.default:
            continue
        if not row.field and found:
            verdict = "~" if all(given[key] is False for key in found) else row.verdict
            entries.append((verdict, ", ".join(f"{key} {_shown(given[key])}" for key in found), "", row.note))
            continue
        key = found[0] if found else row.keys[0]
        value = given[key] if found else files.number(row.default)
        source = f"{key} {_shown(value)}" + ("" if found else ", its default")
        try:
            if row.field and any(given[other] != value for other in found):
                raise UnknownValueError(f"{' and '.join(found)} differ")
            made = _made(row, value, given, fields) if row.field else None
        except UnknownValueError as problem:
            verdict, more = (
                ("+", "; pass --data") if row.field == "data" else ("-", f"; {row.note}" * (row.verdict == "-"))
            )
            entries.append((verdict, source, "", f"{problem}{more}"))
            continue
        if row.field and made is None:
            if found:
                entries.append(("~", source, "", f"it sets no {row.field}" + (f"; {row.note}" if row.note else "")))
            continue
        if row.field:
            if found and row.field in EXCLUSIVE and origins.get(row.field) and fields[row.field] != made:
                raise ValueError(
                    f"{origins[row.field]} and {key} contradict each other: they set {row.field} to "
                    f"{fields[row.field]} and {made}. Keep one"
                )
            if fields.get(row.field, made) != made and row.how != "second":  # a later setting replaces an earlier one
                replaced = ("", f"{key} sets {row.field}")
                entries = [("~", at[1], *replaced) if at[2] == row.field else at for at in entries]
            origins[row.field] = key if found else ""
            fields[row.field] = made
        verdict = row.verdict if found or row.verdict == "-" else "~"
        entries.append((verdict, source, row.field, row.note))
    entries += [("~", *more) for more in DERIVED.get(peer, lambda *_: iter(()))(given, fields)]
    unknown = [key for key in given if key not in known]
    entries += [("-", f"{_shown(key)} {_shown(given[key])}", "", "the table doesn't know it") for key in unknown]
    lists: dict[str, list[str]] = {verdict: [] for verdict in TITLES}
    for verdict, source, field, note in entries:
        to = f" -> {field} = {_toml(fields[field])}" if field else ""
        lists[verdict].append(f"{source}{to}" + (f": {note}" if note else ""))
    return fields, lists


def _megatron_model(values: Values, fields: Values) -> Iterator[tuple[str, str, str]]:
    """Add what Megatron's model has where no flag says so. Yield source, field and note."""
    if not any(values.get(name) for name in ("swiglu", "squared-relu", "quick-geglu")):
        exact = values.get("no-bias-gelu-fusion") or values.get("disable-bias-linear")
        fields["activation"] = "gelu" if exact else "gelu_tanh"
        yield "activation", "activation", "Megatron's GELU, exact or fused with a bias in its tanh form"
    width = fields.get("d_model")
    if "d_ff" not in fields and width and (inner := 8 * width // 3 // 64 * 64 if values.get("swiglu") else 4 * width):
        fields["d_ff"] = inner
        yield "ffn-hidden-size", "d_ff", "computed as Megatron does"
    if fields.get("bias") and values.get("num-experts"):
        fields["mlp_bias"] = False
        yield "biases", "mlp_bias", "experts have none here"


def _neox_model(values: Values, fields: Values) -> Iterator[tuple[str, str, str]]:
    inner, factor = values.get("intermediate_size"), values.get("expansion_factor") or 4
    if inner is None and "d_model" in fields and isinstance(factor, (int, float)) and 0 < factor < 1e6:
        inner = int(factor * fields["d_model"])
    multiple = values.get("mlp_multiple_of", 1)
    if isinstance(inner, int) and isinstance(multiple, int) and inner > 0 and multiple > 0:
        inner = int(inner * 2 / 3) // 2 if fields.get("activation") in ("swiglu", "geglu") else inner
        fields["d_ff"] = -(-inner // multiple) * multiple
        yield "d_ff", "d_ff", "computed as gpt-neox does"


DERIVED = {"Megatron-LM": _megatron_model, "gpt-neox": _neox_model}


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml(fields: Values) -> str:
    """Return fields as the text of a TOML file."""
    lines = [f"{name} = {_toml(value)}" for name, value in fields.items() if "." not in name]
    moe = [f"{name[4:]} = {_toml(value)}" for name, value in fields.items() if name.startswith("moe.")]
    return "\n".join([*lines, *(["[moe]", *moe] if moe else [])]) + "\n"


@reports_errors("mpcore from-config")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status: 1 if a setting that changes the result is not available."""
    args = parsers.from_config().parse_args(argv)
    peer, values = read(args.file)
    fields, lists = convert(peer, values)
    if args.out.exists() and not args.force:
        raise ValueError(f"{args.out} exists: --force replaces it")
    args.out.write_text(toml(fields), encoding="utf-8")
    print(
        f"{args.file}: {peer}, {len(values)} settings; wrote {args.out}, for examples.gpt.pretrain --config {args.out}"
    )
    for verdict, title in TITLES.items():
        print(f"\n{title}: {len(lists[verdict])}", *(f"  {line}" for line in lists[verdict]), sep="\n")
    return 1 if lists["-"] else 0
