"""Read JSON that another program may have written: its size is checked before it is parsed, types and ranges after.

A schema is a dataclass or a TypedDict. `docs/decisions.md` says why no library is used.
"""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

Size = Annotated[int, range(2**63)]
"""A size, count or index."""
LINE_LIMIT = 2**24  # bytes of a line of metrics


def read_json(path: Path, limit: int, objects: int = 2**20) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        limit: the largest size in bytes.
        objects: the largest number of objects in it.

    Raises:
        ValueError: if the file is missing or too large, or isn't JSON of finite numbers. The message names the file.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    with path.open("rb") as file:
        data = file.read(min(limit, path.stat().st_size) + 1)  # a buffer of this many bytes is made
    if len(data) > limit:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {limit}")
    return load_json(data, str(path), objects)


def load_json(data: bytes, where: str, objects: int = 2**20) -> Any:
    """Parse JSON. NaN, infinity and numbers that overflow to it are refused. See `read_json`."""
    if (count := data.count(b"{")) > objects:
        raise ValueError(f"{where} is damaged: it has {count} objects, more than {objects}")
    try:
        return json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {error}") from None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a file of metrics: one JSON object a line.

    A last line that isn't complete is left out: the machine stopped while it was written.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT), b""), 1):
            where = f"{path}, line {number}"
            if line.isspace():
                continue
            try:
                entry = convert(dict[str, Any], load_json(line, where), where)
                convert(Size, entry.get("step"), f"{where}: step")
            except ValueError:
                if line.endswith(b"\n"):
                    raise
                return
            yield entry


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def convert(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as a type: a dataclass, TypedDict, `Size`, `dict[str, T]`, `list[T]`, a tuple, `T | None`.

    Raises:
        ValueError: if the value is of another type or out of range, or a field is missing or unknown.
    """
    try:
        return _converter(kind)(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {error}") from None


@functools.cache
def _converter(kind: Any) -> Callable[[Any], Any]:
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if is_dataclass(kind) or is_typeddict(kind):
        return _of_fields(kind)
    if origin is Annotated:
        number, allowed = _converter(of[0]), of[1]
        said = f"between {allowed[0]} and {allowed[-1]}"
        return lambda value: value if number(value) in allowed else _refuse(value, said)
    if origin is dict:
        entry = _converter(of[1])
        return lambda value: {key: entry(x) for key, x in _typed(dict, value).items()}
    if origin is list or (origin is tuple and of[-1] is ...):
        item = _converter(of[0])
        return lambda value: origin(map(item, _typed(list, value)))
    if origin is tuple:
        items = [*map(_converter, of)]
        return lambda value: (
            tuple(item(x) for item, x in zip(items, value, strict=True))
            if len(_typed(list, value)) == len(items)
            else _refuse(value, f"a list of {len(items)}")
        )
    if origin in (Union, types.UnionType):
        (other,) = (_converter(each) for each in of if each is not type(None))
        return lambda value: None if value is None else other(value)
    if kind is float:
        return lambda value: value if type(value) in (int, float) else _refuse(value, "a number")
    return lambda value: _typed(kind, value)


def _of_fields(kind: Any) -> Callable[[Any], Any]:
    of = {name: _converter(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    if is_dataclass(kind):
        needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    else:
        needed = kind.__required_keys__

    make: Any = kind

    def convert_fields(value: Any) -> Any:
        names = _typed(dict, value).keys()
        if needed - names or names - of.keys():
            _refuse([*names], f"the fields {sorted(of)}")
        found = {}
        for name, x in value.items():
            try:
                found[name] = of[name](x)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return make(**found)

    return convert_fields


def _typed(kind: type, value: Any) -> Any:
    return value if type(value) is kind else _refuse(value, f"of type {kind.__name__}")


def _refuse(value: Any, wanted: str) -> Any:
    raise ValueError(f"{str(value)[:200]!r} is not {wanted}")
