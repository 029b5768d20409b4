"""The rates of a machine: the peak of each part, the share of it that is reached, and the source of each number.

A profile is a JSON file, `profiles/NAME.json` in this package or any path: `{"name", "about", "values": {FIELD:
{"value", "source"}}}`. A source begins with `specification`, `measured`, `fitted` or `assumed`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mpcore.tools.parsers import PROFILES, profile_names

SOURCES = ("specification", "measured", "fitted", "assumed")


@dataclass(frozen=True)
class Machine:
    """The rates of a machine.

    Attributes:
        name: the name of the profile.
        peak: floating-point operations per second of matrix products in 16 bits.
        peak_32: the same in float32, and in every dtype that isn't listed here. 0: half of `peak`.
        peak_8: the same in FP8. 0: twice `peak`.
        peak_vector: the same in 16 bits without tensor cores, for unfused attention whose head dimension isn't a
            multiple of 16 bytes. 0: tensor cores compute every shape.
        hbm: bytes per second between a GPU and its memory.
        memory: bytes of memory per GPU.
        reserve: bytes of `memory` that the run can't use: the CUDA context, NCCL's buffers, and fragmentation.
        node: the number of consecutive ranks that share a fast link.
        e_gemm: the share of `peak` that matrix products reach.
        e_attention: the share of `peak` that attention reaches.
        e_hbm: the share of `hbm` that other operators reach.
        node_bandwidth: bytes per second that a rank sends within its node.
        node_latency: seconds per step of a ring within a node.
        bandwidth, latency: the same between nodes.
        all_gather, reduce_scatter, all_to_all: the time of each kind of collective, relative to a ring's formula.
        x_tp: the share of collectives over tp, cp and ep that is not overlapped with computation.
        x_dp: the share of collectives over data ranks that is not overlapped with computation.
        tau: further seconds per block and micro-batch: kernel launches, the host, small shapes.
        cluster: a factor on the step time, for stragglers, jitter and everything that is not modeled.
        sources: the source of each field's value.
        errors: the relative standard error of each fitted field.
    """

    name: str
    peak: float
    hbm: float
    memory: float
    peak_32: float = 0.0
    peak_8: float = 0.0
    peak_vector: float = 0.0
    reserve: float = 0.0
    node: int = 8
    e_gemm: float = 0.7
    e_attention: float = 0.5
    e_hbm: float = 0.7
    node_bandwidth: float = 300e9
    node_latency: float = 5e-6
    bandwidth: float = 25e9
    latency: float = 1e-5
    all_gather: float = 1.0
    reduce_scatter: float = 1.0
    all_to_all: float = 1.0
    x_tp: float = 1.0
    x_dp: float = 0.5
    tau: float = 1e-4
    cluster: float = 1.0
    sources: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def rate(self, dtype: str) -> float:
        """Return the operations per second that matrix products reach in a dtype, such as "bfloat16"."""
        if dtype in ("bfloat16", "float16"):
            return self.peak * self.e_gemm
        if dtype.startswith("float8"):
            return (self.peak_8 or 2 * self.peak) * self.e_gemm
        return (self.peak_32 or self.peak / 2) * self.e_gemm

    def seconds(self, kind: str, size: int, calls: int, ranks: Sequence[int]) -> float:
        """Return the seconds that collectives of a kind take, from a ring's steps and bytes.

        A ring that leaves its node uses as many network links at the same time as it has ranks per node.

        Args:
            kind: such as "all_reduce" or "send".
            size: the bytes of all calls together.
            ranks: the ranks of the group.

        Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4.
        """
        p = len(ranks)
        if p < 2 or kind in ("recv", "barrier"):
            return 0.0
        nodes = {rank // self.node for rank in ranks}
        inside = len(nodes) == 1
        each = max(p // len(nodes), 1)
        bandwidth = self.node_bandwidth if inside else min(self.bandwidth * each, self.node_bandwidth)
        latency = self.node_latency if inside else self.latency
        if kind == "send":
            return calls * latency + size / bandwidth
        rounds = 2 if kind == "all_reduce" else 1
        ring = rounds * (calls * (p - 1) * latency + size * (p - 1) / p / bandwidth)
        return ring * getattr(self, kind, 1.0)


MAY_BE_0 = ("peak_32", "peak_8", "peak_vector", "reserve", "node_latency", "latency", "all_gather", "reduce_scatter",
            "all_to_all", "x_tp", "x_dp", "tau")  # fmt: skip
NUMBERS = tuple(f.name for f in fields(Machine) if f.name not in ("name", "sources", "errors"))


def load_machine(name: str | Path, **changes: float) -> Machine:
    """Read a profile.

    Args:
        name: one of `profile_names()`, or the path of a JSON file.
        changes: values that replace those of the file.

    Raises:
        ValueError: if there is no such profile, or it lacks a field, has an unknown field, or a field has no source.

    Example:
        >>> mpcore.tools.analysis.load_machine("h100").sources["peak"].partition(":")[0]
        'specification'
    """
    path = Path(name) if str(name).endswith(".json") else PROFILES / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"the profile {name} is none of {', '.join(profile_names())}, and no file that ends in .json")
    try:
        content = json.loads(path.read_text())
        values = content["values"]
        numbers = {key: entry["value"] for key, entry in values.items()}
        sources = {key: str(entry["source"]) for key, entry in values.items()}
        errors = {key: entry["error"] for key, entry in values.items() if "error" in entry}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the profile {path} is not of the form {{name, values: {{FIELD: {{value, source}}}}}}: {error!r}"
        ) from error
    _check(path, numbers, sources)
    given = {key: f"given: instead of {numbers.get(key)}" for key in changes}
    rates: dict[str, Any] = numbers | changes
    for key in (key for key, value in rates.items() if not (0 < value < math.inf or (value == 0 and key in MAY_BE_0))):
        raise ValueError(f"{key} {rates[key]} of the machine {path.stem} is no finite number above 0")
    return Machine(str(content.get("name", path.stem)), **rates, sources=sources | given, errors=errors)


def _check(path: Path, numbers: dict[str, Any], sources: dict[str, str]) -> None:
    for key, value in numbers.items():
        if key not in NUMBERS:
            raise ValueError(f"the profile {path} has the unknown field {key}; fields are {', '.join(NUMBERS)}")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ValueError(f"the profile {path}: {key} is {value!r}, no finite number of at least 0")
        if sources[key].partition(":")[0] not in SOURCES:
            raise ValueError(f"the profile {path}: the source of {key} begins with none of {', '.join(SOURCES)}")
    missing = [key for key in ("peak", "hbm", "memory") if key not in numbers]
    if missing:
        raise ValueError(f"the profile {path} lacks {', '.join(missing)}")


def save_machine(machine: Machine, path: Path | str, about: str = "") -> None:
    """Write a profile that `load_machine` can read."""
    values = {
        key: {"value": getattr(machine, key), "source": machine.sources.get(key, "assumed: the default")}
        | ({"error": machine.errors[key]} if key in machine.errors else {})
        for key in NUMBERS
    }
    Path(path).write_text(json.dumps({"name": machine.name, "about": about, "values": values}, indent=1) + "\n")
