"""Count what a step sends: the collectives and messages of each kind over each axis, and their bytes.

with CommunicationCounter(mesh) as ledger:
    pipeline.forward_backward(x, target)
print(ledger)

`mpcore ledger examples.gpt.plan:build --tp 8 --pp 4 --dp 32` counts a step that can't run on this machine.

The bytes of a call are those of its full tensor, such as the result of an all-gather. The volume counts the bytes of an
all-reduce twice, because it is a reduce-scatter and an all-gather, and all others once. A ring sends (p - 1)/p of the
volume.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from mpcore._torch.dispatch import TorchDispatchMode
from mpcore._torch.distributed import as_group, group_by_name
from mpcore._torch.fake import device_of
from mpcore.memory_footprint import tensors_in
from mpcore.mesh.axis import Axis, Mesh

_DEVICE = torch.ops.prim.device.default
_KINDS = {  # longer prefixes first
    "reduce_scatter": "reduce_scatter", "allreduce": "all_reduce", "all_reduce": "all_reduce",
    "allgather": "all_gather", "all_gather": "all_gather", "alltoall": "all_to_all", "all_to_all": "all_to_all",
    "broadcast": "broadcast", "send": "send", "recv": "recv", "barrier": "barrier", "scatter": "scatter",
    "gather": "gather", "reduce": "reduce",
}  # fmt: skip


@dataclass
class Count:
    """The number of calls of one kind over one axis, and the bytes of their tensors.

    Attributes:
        beside: the bytes of calls that travel while products run, between their start and their wait.
        flops: the floating-point operations of these products.
    """

    calls: int = 0
    bytes: int = 0
    beside: int = field(default=0, compare=False)
    flops: int = field(default=0, compare=False)


class CommunicationCounter(TorchDispatchMode):
    """Count all collectives and messages while this context is entered, in forward and backward.

    Args:
        mesh: its axes name the process groups. Other groups are named by their ranks.
        axes: further axes by name, such as the two of HSDP.

    Attributes:
        counts: the counts by (axis, kind).
        ranks_of: the ranks of each axis, in the order of its group.
    """

    def __init__(self, mesh: Mesh = Mesh(), **axes: Axis) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str], Count] = {}
        self.flying: dict[int, tuple[Count, int]] = {}  # by id of the result: bytes without a product beside them
        levels = {axis.name: axis for axis in mesh.cp.levels or ()}
        named = [(name, axis) for name, axis in (mesh.axes | levels | axes).items() if axis.group is not None]
        self.sizes: dict[str, int] = {name: axis.size for name, axis in named}
        self.by_group: dict[str, str] = {}
        self.by_ranks: dict[tuple[int, ...], str] = {}
        self.ranks_of: dict[str, tuple[int, ...]] = {}
        for name, axis in named:
            self.ranks_of[name] = tuple(dist.get_process_group_ranks(axis.group))
            self.by_group.setdefault(axis.group_name, name)
            self.by_ranks.setdefault(self.ranks_of[name], name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # only fake tensors call it, eight times per operator
            return device_of(args[0])
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args, kwargs or {}, out)
        elif self.flying and (formula := flop_registry.get(func.overloadpacket)):
            next(reversed(self.flying.values()))[0].flops += formula(*args, **(kwargs or {}), out_val=out)
            for key, (count, size) in self.flying.items():
                count.beside += size
                self.flying[key] = count, 0
        return out

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        name = func.overloadpacket.__name__
        kind = next((kind for begin, kind in _KINDS.items() if name.strip("_").startswith(begin)), None)
        if kind is None:  # wait_tensor, monitored_barrier_
            self.flying.pop(id(args[0]) if args else 0, None)
            return
        group = next((g for x in (*args, *kwargs.values()) if (g := _group_of(x)) is not None), None)
        sizes = [sum(x.nbytes for x in tensors_in(tree)) for tree in (*args, out) if not isinstance(tree, str)]
        count = self.add(self._axis(group, args), kind, max(sizes))
        if func.namespace == "_c10d_functional":
            self.flying[id(out)] = count, max(sizes)

    def _axis(self, group: dist.ProcessGroup | None, args: Sequence[Any]) -> str:
        name = group.group_name if group is not None else next((x for x in reversed(args) if isinstance(x, str)), "")
        if name in self.by_group:
            return self.by_group[name]
        if group is None:
            group = group_by_name(name)
        ranks = tuple(dist.get_process_group_ranks(group))
        unnamed = f"ranks {'+'.join(map(str, ranks[:4]))}{'..' if len(ranks) > 4 else ''}"
        label = self.by_ranks.setdefault(ranks, unnamed)
        self.ranks_of.setdefault(label, ranks)
        self.sizes.setdefault(label, len(ranks))
        return label

    def add(self, axis: str, kind: str, size: int) -> Count:
        """Count one call of `kind` over `axis` with `size` bytes, and return the sum."""
        count = self.counts.setdefault((axis, kind), Count())
        count.calls += 1
        count.bytes += size
        return count

    def volume(self, *axes: str) -> int:
        """Return the volume in bytes over these axes, or over all axes if none is given.

        An all-reduce counts twice. A message counts on the rank that sends it.
        """
        return sum(volume(kind, c.bytes) for (axis, kind), c in self.counts.items() if not axes or axis in axes)

    def volumes(self) -> dict[str, int]:
        """Return the volume in bytes over each axis."""
        return {axis: self.volume(axis) for axis, _ in self.counts}

    def __str__(self) -> str:
        """Return the counts as a table, in the order of the axes."""
        lines = [f"{'axis':<10} {'ranks':>6} {'kind':<15} {'calls':>8} {'bytes':>20} {'volume':>20}"]
        order = {name: i for i, name in enumerate(self.sizes)}
        for (axis, kind), count in sorted(self.counts.items(), key=lambda e: (order.get(e[0][0], 99), e[0][1])):
            cells = f"{count.calls:>8,} {count.bytes:>20,} {volume(kind, count.bytes):>20,}"
            lines.append(f"{axis:<10} {self.sizes.get(axis, 1):>6} {kind:<15} {cells}")
        return "\n".join(lines)


def volume(kind: str, size: int) -> int:
    """Return the volume of `size` bytes as the ZeRO paper counts it.

    An all-reduce counts twice, a received message and a barrier 0 times, every other kind once.
    """
    return size * {"all_reduce": 2, "recv": 0, "barrier": 0}.get(kind, 1)


def _group_of(x: object) -> dist.ProcessGroup | None:
    return None if isinstance(x, (Tensor, str, int, float, list, tuple, type(None))) else as_group(x)
