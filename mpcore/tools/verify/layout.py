"""Parse the names of layouts: `tp2sp`, `pp2`, `dp2zero3`, `cp2tp2`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_TOKEN = re.compile(r"(tp|cp|pp|dp|ep|zero|mb)(\d+)|(sp)")


@dataclass(frozen=True)
class Layout:
    """The number of processes that a model is sharded over, and how.

    Attributes:
        name: the name that the user wrote.
        sequence_parallel: whether activations are sharded along the sequence between tensor-parallel regions.
        zero: the stage of ZeRO, 0 to 3 (`mpcore.parallel.data.shard_data_parallel`).
        mb: the number of micro-batches per step. 0: the number of pipeline stages.
    """

    name: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    mb: int = 0

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        return self.mb or self.pp


def parse_layout(name: str) -> Layout:
    """Return the layout that a name describes.

    Args:
        name: any of tp, cp, pp, dp and ep, each followed by its size; sp for sequence parallel; zero followed by its
            stage; mb followed by a number of micro-batches. The order is free.

    Raises:
        ValueError: if a part of the name is unknown or appears twice, or the parts don't fit each other.

    Example:
        >>> from mpcore.tools.verify import parse_layout
        >>> parse_layout("dp2tp2zero3").size
        4
    """
    options: dict[str, Any] = {}
    position = 0
    while position < len(name):
        match = _TOKEN.match(name, position)
        if match is None:
            raise ValueError(
                f"layout {name!r}: {name[position:]!r} begins with none of tpN, cpN, ppN, dpN, epN, sp, zeroN and "
                f"mbN (such as tp2sp or dp2zero3)"
            )
        key, value = ("sequence_parallel", True) if match[3] else (match[1], int(match[2]))
        if key in options:
            raise ValueError(f"layout {name!r}: {key} is there twice")
        options[key] = value
        position = match.end()
    layout = Layout(name, **options)
    if not name or min(layout.tp, layout.cp, layout.pp, layout.dp, layout.ep) < 1:
        raise ValueError(f"layout {name!r} names no axis, or a size smaller than 1")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError(f"layout {name!r}: sp cuts the sequence over tp, which has size 1")
    if layout.zero > 3 or (layout.zero and layout.dp * layout.cp == 1):
        raise ValueError(f"layout {name!r}: zero{layout.zero} is none of zero0 to zero3 on dp x cp of 2 or more")
    if (layout.dp * layout.cp) % layout.ep:
        raise ValueError(f"layout {name!r}: ep {layout.ep} does not divide dp x cp = {layout.dp * layout.cp}")
    return layout
