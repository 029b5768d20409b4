"""Read the settings of other trainers, by key."""

from __future__ import annotations

import collections
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mpcore.tools.from_config.values import Values

MOST_BYTES, MOST_SETTINGS, MOST_DEEP = 100_000, 10_000, 20
LISTS = ("data-path", "rampup-batch-size", "moe-router-load-balancing-type", "moe-aux-loss-coeff")
"""Flags of Megatron that take several words."""


def read(path: Path, booleans: frozenset[str] = frozenset()) -> tuple[str, Values]:
    """Return which trainer wrote a file, and its settings by key.

    Args:
        path: the file; its suffix says its kind.
        booleans: the flags of Megatron that take no word.

    Raises:
        ValueError: if the file can't be parsed.
    """
    kind = path.suffix
    try:
        if kind not in (".sh", ".toml", ".yaml", ".yml", ".json"):
            raise ValueError("its name ends in none of .sh, .toml, .yaml, .yml, .json")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"it has {size} bytes; a launch file has at most {MOST_BYTES}")
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        if kind == ".sh":
            return "Megatron-LM", _shell(text, booleans)
        if kind == ".toml":
            if max((line.count(".") for line in text.splitlines()), default=0) > 20 * MOST_DEEP:  # its parser is slow
                raise ValueError(f"a line has more than {20 * MOST_DEEP} dots")
            module = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
            return "torchtitan", _flat(module.loads(text))
        if kind == ".json":
            return "DeepSpeed", _flat(json.loads(text))
        return _yaml(import_module("yaml").safe_load(text))
    except ImportError as error:
        raise ValueError(f"{path}: pip install {error.name}") from None
    except OSError:
        raise
    except Exception as error:  # of the parser: each has its own
        raise ValueError(f"{path} can't be read: {' '.join(str(error).split())[:300]}") from None


def _yaml(content: Any) -> tuple[str, Values]:
    if not isinstance(content, dict):
        raise ValueError("it holds no settings by name")
    if isinstance(flags := content.get("MODEL_ARGS"), dict):
        return "Megatron-LM", {str(k).lstrip("-").replace("_", "-"): number(v) for k, v in flags.items()}
    if "parallelism" in content and isinstance(content.get("model"), dict):
        return "nanotron", _flat(content)
    return "gpt-neox", _flat({str(key).replace("-", "_"): value for key, value in content.items()})


def _flat(content: Any) -> Values:
    """Return the settings of nested tables, with names such as `optimizer.lr`."""
    if not isinstance(content, dict):
        raise ValueError("it holds no settings by name")
    found: Values = {}
    left = [("", content, 0)]
    while left:
        name, value, depth = left.pop()
        if not isinstance(value, dict) or not value:
            found[name] = number(value)
            continue
        if depth > MOST_DEEP or len(left) + len(value) > MOST_SETTINGS or len(found) > MOST_SETTINGS:
            raise ValueError(f"it has more than {MOST_SETTINGS} settings, or {MOST_DEEP} tables within each other")
        left += [(f"{name}.{k}" if name else str(k), inner, depth + 1) for k, inner in reversed(value.items())]
    return found


def number(value: Any) -> Any:
    """Return the number that a word is, such as 1e-2, which YAML takes for a word."""
    if not isinstance(value, str):
        return value
    value = value.encode(errors="replace").decode()
    if re.fullmatch(r"[-+]?[0-9]{1,18}", value):
        return int(value)
    if len(value) < 40 and re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", value):
        return float(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def _shell(text: str, booleans: frozenset[str]) -> Values:
    """Return the flags of a shell script; variables that it sets are replaced. A flag without a value is True."""
    text = re.sub(r"(^|\s)#[^\n]*", r"\1", text)
    text = re.sub(r"=[\"']\s*(?=--)", "=\n", text)  # NAME="--lr 1e-3 ..": a list of flags, no value of one word
    text = re.sub(r"\\\n|\$\{\w{1,99}\[[@*]\]\}", " ", re.sub(r"[\"']", "", text))
    found = re.findall(r"^[ \t]*(?:export[ \t]+)?(\w+)= ?([^\s()#;]{1,999})", text, re.MULTILINE)
    times = collections.Counter(name for name, _ in set(found))
    variables = {name: value for name, value in found if times[name] == 1}
    own = re.compile(r"\$\{(\w{1,99}):?-([^}]*)\}")  # X=${X:-2}
    for name, value in variables.items():
        variables[name] = own.sub(lambda m, name=name: m[2] if m[1] == name else m[0], value)
    for _ in range(5):
        text = re.sub(
            r"\$\{(\w{1,99}):?-?([^{}\n]{0,999})\}|\$(\w{1,99})",
            lambda m: variables.get(m[1] or m[3], m[2] or m[0]),
            text,
        )
        if len(text) > 10 * MOST_BYTES:
            raise ValueError("its variables expand without end")
    values: Values = {}
    name, depth, doubtful = "", 0, set[str]()  # flags given twice, or in an if: their values stay open
    for word in re.sub(r"[();]", " ", text).split():
        depth += (word in ("if", "case")) - (word in ("fi", "esac"))
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            doubtful |= {name} if depth > 0 or name in values else set()
            values[name] = [number(value)] if equals else []
            name = "" if name in booleans else name
        elif not name or re.match(r"\w+\.py$|-[A-Za-z]|(fi|else|elif|esac|done)$|.*[^-\w./$@:,{}]", word):
            name = ""
        else:
            values[name].append(number(word))
    values = {k: v if k in LISTS and len(v) > 1 else v[0] if v else True for k, v in values.items()}
    return values | {name: f"$ ({values[name]} in one place of the script)" for name in doubtful}
