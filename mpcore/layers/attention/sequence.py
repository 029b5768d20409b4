"""Shard a sequence over the context-parallel ranks, in the order that each kind of attention needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from mpcore import collectives
from mpcore.collectives import shard_sizes
from mpcore.mesh.axis import Axis, check_axis
from mpcore.sharding.declare import Run

KINDS = ("alltoall", "ring", "zigzag", "allgather", "two-level")
Runs = tuple[Run, ...]
Batch = TypeVar("Batch", Tensor, Mapping[str, Tensor])


def sequence_runs(length: int, cp: Axis, pattern: str) -> tuple[Runs, ...]:
    """Return, for each rank of cp, the runs `(start, end)` of the sequence that the rank holds, in order.

    Under every pattern rank r holds `shard_sizes(length, cp.size)[r]` tokens, so lengths may be odd. Raises ValueError
    if the pattern is unknown, there are fewer tokens than ranks, or "two-level" is given for an axis with one level.
    """
    check_kind(pattern, cp)
    if cp.size > 1 and length < cp.size:  # one rank may hold nothing
        raise ValueError(
            f"a sequence of {length} tokens is shorter than the {cp.name} size {cp.size}, which no pattern can cut: "
            f"pad it to {cp.size} with ignored targets, or take {cp.name} {length}"
        )
    sizes = shard_sizes(length, cp.size)
    if pattern in ("alltoall", "ring") or cp.size == 1:
        return tuple((run,) for run in pairwise([0, *accumulate(sizes)]))
    inner = cp.levels[1].size if pattern == "two-level" and cp.levels else 1
    blocks = [sum(sizes[i : i + inner]) for i in range(0, cp.size, inner)]
    halves = [(n + 1) // 2 for n in blocks] + [n // 2 for n in reversed(blocks)]  # chunk i, and its mirror image
    chunks = list(pairwise([0, *accumulate(halves)]))
    pairs = [(chunks[i], chunks[-1 - i]) for i in range(len(blocks))]
    return tuple(runs for i, pair in enumerate(pairs) for runs in cut_runs(pair, sizes[i * inner : (i + 1) * inner]))


def cut_runs(runs: Runs, sizes: Sequence[int]) -> list[Runs]:
    """Split `runs` in order into consecutive parts of `sizes` tokens."""
    pieces: list[Runs] = []
    for a, b in pairwise([0, *accumulate(sizes)]):
        offset, mine = 0, []
        for start, end in runs:
            first, last = max(start, start + a - offset), min(end, start + b - offset)
            offset += end - start
            if first < last:
                mine.append((first, last))
        pieces.append(tuple(mine))
    return pieces


def sequence_index(length: int, cp: Axis, pattern: str, device: torch.device | None = None) -> Tensor:
    """Return the position in the full sequence of each token that this rank holds: int64 [T/cp], increasing.

    Pass it to `RotaryEmbedding`, `PositionEmbedding` and `Dropout`.

    Args:
        length: T, the number of tokens of the full sequence.
        cp, pattern: see `shard_sequence`.
        device: the device of the result; None: torch's default device.

    Raises:
        ValueError: if the pattern is unknown, there are fewer tokens than ranks, or "two-level" is used with an axis
            without levels.

    Example:
        >>> mpcore.sequence_index(8, mpcore.Axis(size=2, rank=0), "zigzag")
        tensor([0, 1, 6, 7])
    """
    return index_of_runs(sequence_runs(length, cp, pattern)[cp.rank], device)


def tokens_of(runs: Runs) -> int:
    return sum(end - start for start, end in runs)


def index_of_runs(runs: Runs, device: torch.device | None) -> Tensor:
    return torch.cat([torch.arange(start, end, device=device) for start, end in runs])


def order_of_runs(runs: Sequence[Runs], device: torch.device | None) -> Tensor:
    return index_of_runs(tuple(run for of_rank in runs for run in of_rank), device)


def shard_sequence(batch: Batch, cp: Axis, pattern: str, dim: int = -1) -> Batch:
    """Keep this rank's tokens of full sequences. Shard tokens, targets, positions and masks with this function.

    Shift the targets first (`tokens[:, :-1], tokens[:, 1:]`), so that no token at a shard's border is lost. The input
    must be the same on every rank of cp. Backward all-gathers the gradients of the shards.

    Args:
        batch: a tensor whose dimension `dim` has size T, by default `[..., T]`; or a mapping of names to such tensors.
        cp: the context-parallel axis.
        pattern: the `context` of the model's attention layers: "alltoall", "ring", "zigzag", "allgather" or
            "two-level". It decides which tokens a rank holds (`sequence_index`).
        dim: the sequence dimension of each tensor, for example 1 for `[B, T, D]`. All other dimensions stay.

    Returns:
        A tensor whose dimension `dim` has size T/cp, or a dictionary of such tensors. If cp doesn't divide T, the
        shards are uneven: rank r gets `mpcore.collectives.shard_sizes(T, cp.size)[r]` tokens. If cp has size 1, `batch`
        itself is returned.

    Raises:
        ValueError: if the pattern is unknown, there are fewer tokens than ranks, the tensors have different lengths,
            or "two-level" is used with an axis without levels (`build_mesh(cp_inner=..)`).

    Note:
        - Do not use this on activations, such as image embeddings merged into text embeddings: backward all-gathers
          their gradients, and the gradients of the parameters that computed them are summed over cp once more. Use
          `x.index_select(dim, sequence_index(...))`.

    Example:
        >>> tokens = torch.arange(9).unsqueeze(0)
        >>> batch = {"x": tokens[:, :-1], "target": tokens[:, 1:]}
        >>> mpcore.shard_sequence(batch, mpcore.Axis(size=2, rank=0, name="cp"), "zigzag")["x"]
        tensor([[0, 1, 6, 7]])
    """
    check_axis(cp)
    tensors = {"": batch} if isinstance(batch, Tensor) else batch
    lengths = {name: t.shape[dim] for name, t in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"one sequence can't have the lengths {lengths}")
    runs = sequence_runs(max(lengths.values(), default=cp.size), cp, pattern)
    if cp.size == 1:
        return batch
    cut = {}
    for name, t in tensors.items():
        cut[name] = collectives.split(t.index_select(dim, order_of_runs(runs, t.device)), cp, dim)
    return cut[""] if isinstance(batch, Tensor) else cut  # type: ignore[return-value]


def unshard_sequence(x: Tensor, cp: Axis, pattern: str, dim: int = -1, length: int | None = None) -> Tensor:
    """Undo `shard_sequence`: all-gather the full sequence on every rank. Backward keeps this rank's shard.

    Args:
        x: this rank's shard, [..., T/cp]: its dimension `dim` has size `shard_sizes(T, cp.size)[cp.rank]`.
        cp, pattern, dim: see `shard_sequence`.
        length: T, required if cp doesn't divide T. None: every rank has as many tokens as this rank.

    Returns:
        The tensor with all T tokens in their original order, [..., T].

    Raises:
        ValueError: if the pattern is unknown, or there are fewer tokens than ranks.

    Example:
        >>> cp, x = mpcore.Axis(name="cp"), torch.arange(8)
        >>> torch.equal(mpcore.unshard_sequence(mpcore.shard_sequence(x, cp, "ring"), cp, "ring"), x)
        True
    """
    check_axis(cp)
    length = x.shape[dim] * cp.size if length is None else length
    runs = sequence_runs(length, cp, pattern)
    if cp.size == 1:
        return x
    return collectives.gather(x, cp, dim, length).index_select(dim, order_of_runs(runs, x.device).argsort())


def check_kind(kind: str, cp: Axis) -> None:
    """Raise ValueError if the pattern is unknown, or is "two-level" and the axis has one level."""
    check_axis(cp)
    if kind not in KINDS:
        raise ValueError(f"context {kind!r} is none of {', '.join(map(repr, KINDS))}")
    if kind == "two-level" and cp.size > 1 and cp.levels is None:
        raise ValueError(
            f"context 'two-level' needs the {cp.name} axis of size {cp.size} as outer x inner: "
            f"build_mesh(cp={cp.size}, cp_inner=...); 'zigzag' needs none"
        )
