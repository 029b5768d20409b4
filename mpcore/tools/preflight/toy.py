"""Shrink a run to a toy that local processes train in seconds, with the same divisions, ties, schedule and options."""

from __future__ import annotations

import argparse
import copy
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mpcore.pipeline.schedules import Schedule, find_schedule

RANKS = 8
STEPS = 4
SIZE_NAMES = ("tp", "cp", "pp", "dp", "ep", "etp")
DROPPED = ("", "dp", "cp", "dp cp", "pp cp", "pp dp", "tp cp", "tp dp", "tp pp", "pp", "tp", "tp cp pp", "tp cp dp",
           "tp pp dp", "cp pp dp")  # fmt: skip
"""The axes that toys leave out, in the order in which they are tried."""


@dataclass(frozen=True)
class Toy:
    """A small run.

    Attributes:
        sizes: arguments of `build_mesh`.
        program: the module that trains it; see `mpcore.tools.preflight.training`.
    """

    args: argparse.Namespace
    config: Any
    sizes: dict[str, int]
    ranks: int
    program: str

    @property
    def name(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one rank"

    def alone(self, **changes: Any) -> Toy:
        """Return the same run with one process for each worker, and other flags."""
        args, micro = self.args, self.args.micro_batch if self.args.bitwise else 1
        flags = {**dict.fromkeys(SIZE_NAMES, 1), "etp": None, "zero": 0, "replicate": 1, "cp_kind": "ring",
                 "schedule": "1f1b", "virtual_stages": None, "sequence_parallel": False, "offload": ["none"],
                 "cp_inner": None, "recompute": "none", "micro_batch": micro, **changes}  # fmt: skip
        sizes = {"worlds": args.workers} if args.workers > 1 else {}
        return Toy(with_flags(args, **flags), self.config, sizes, args.workers, self.program)


def with_flags(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    args = copy.copy(args)
    vars(args).update(changes)
    return args


def shrink(args: argparse.Namespace, config: Any, sizes: dict[str, int], micro_batches: int, plan: Schedule,
           folder: Path, program: str) -> list[Toy]:  # fmt: skip
    """Make the toys of a run: one, or several where a toy with all its axes would have more than 8 ranks. Then each
    axis is in a toy, and so are each two axes that fit.

    An even size of an axis becomes 2, an odd one 3. Every other size becomes the smallest that divides, or doesn't
    divide, in the same way.
    """
    small = {axis: size if size == 1 else 3 if size % 2 else 2 for axis, size in sizes.items()}
    workers = min(args.workers, 2)
    if 1 < args.replicate < sizes["dp"] and workers * 4 * small["tp"] * small["pp"] * small["cp"] <= RANKS:
        small["dp"] = 4
    chosen: list[dict[str, int]] = []
    known: set[tuple[str, str]] = set()  # axes that a toy has at once
    for drop in map(str.split, DROPPED):
        kept = {axis: 1 if axis in drop else small[axis] for axis in ("tp", "cp", "pp", "dp")}
        if any(small[axis] == 1 for axis in drop) or math.prod(kept.values()) * workers > RANKS:
            continue
        used = [axis for axis, size in kept.items() if size > 1]
        together = set(itertools.combinations_with_replacement(used, 2))  # an axis with itself: that it is there
        if not drop or together - known:
            known |= together
            chosen = [*(each for each in chosen if any(each[axis] > kept[axis] for axis in kept)), kept]
        if not drop:
            break
    return [
        _toy(args, config, sizes, _experts_sizes(kept, sizes), workers, micro_batches, plan, folder, program)
        for kept in chosen
    ]


def _experts_sizes(kept: dict[str, int], sizes: dict[str, int]) -> dict[str, int]:
    data = kept["tp"] * kept["cp"] * kept["dp"]
    etp = kept["tp"] if sizes["etp"] == sizes["tp"] else min(sizes["etp"], 2)
    etp = etp if data % etp == 0 else 1
    ep = next(n for n in (2 if sizes["ep"] % 2 == 0 else 3, 2, 3, 1) if data % (n * etp) == 0)
    return {**kept, "ep": ep if sizes["ep"] > 1 else 1, "etp": etp}


def _toy(args: argparse.Namespace, config: Any, full: dict[str, int], small: dict[str, int], workers: int,
         micro_batches: int, plan: Schedule, folder: Path, program: str) -> Toy:  # fmt: skip
    pp, dp = small["pp"], small["dp"]
    file = args.schedule.endswith(".csv")  # is for the run's own number of stages
    schedule, virtual = args.schedule, args.virtual_stages
    if file or (pp == 1 and full["pp"] > 1):
        schedule, virtual = "1f1b", None
    elif virtual is not None:
        virtual = min(virtual, 2)
    micro = 1 if micro_batches == 1 else 2 * pp if micro_batches % full["pp"] == 0 else 2 * pp + 1
    stages = find_schedule(schedule, pp, micro, virtual).stages
    leaves = args.bitwise and dp << (pp - 1).bit_length()  # a power of two, as few as the schedule takes
    toy = shrink_model(config, full, small, stages, plan.stages, args)
    inner = args.cp_inner if args.cp_kind != "two-level" or small["cp"] > 1 else None
    flags: dict[str, Any] = {
        **{axis: size for axis, size in small.items() if axis != "etp"},
        "etp": small["etp"] if small["etp"] != small["tp"] else None,
        "workers": workers, "replicate": 1, "cp_inner": 1 if inner else None,
        "cp_kind": args.cp_kind if small["cp"] > 1 else "zigzag",
        "schedule": schedule, "virtual_stages": virtual,
        "micro_batch": min(args.micro_batch, 2), "rampup_batch_size": None,
        "global_batch": min(args.micro_batch, 2) * (leaves or workers * dp * micro),
        "dtype": "float64", "autocast": False, "residual_dtype": None, "fp8": False, "compile": None,
        "device": "cpu", "trace": False, "profile": None, "log_to": [], "steps": STEPS, "lr_decay_steps": None,
        "warmup": 1, "data": [str(folder / "corpus")], "eval_data": [], "tokenizer": "byte", "end_of_document": None,
        "eval_every": 1, "eval_samples": 3 * workers, "preset": None, "init_from": None,
        "resume": "none", "out": str(folder / "out"), "save_every": 0, "keep": None, "exit_step": None,
        "timeout": 60.0, "check_replicas": 1, "check_speed": 0, "bitwise": leaves,
    }  # fmt: skip
    data = small["cp"] * dp
    if args.replicate > 1:
        experts = data * small["tp"] // (small["ep"] * small["etp"])  # ranks with the same experts
        flags["replicate"] = next((n for n in range(2, data) if data % n == 0 and experts % n == 0), 1)
    if workers > 1:
        flags |= {"local_steps": 2, "fragments": None if args.fragments is None else min(args.fragments, 2)}
    if args.rampup_batch_size is not None and not file:
        start = flags["global_batch"]
        flags |= {"rampup_batch_size": [start, start, 2 * start], "global_batch": 2 * start}
    if "parameters" in args.offload and args.zero and data > 1:
        flags["offload"] = [what for what in args.offload if what != "parameters"] or ["none"]
    sizes = small | ({"worlds": workers} if workers > 1 else {})
    if args.cp_kind == "two-level" and small["cp"] > 1:
        sizes["cp_inner"] = flags["cp_inner"] = 1
    return Toy(with_flags(args, **flags), toy, sizes, workers * small["tp"] * small["cp"] * pp * dp, program)


def shrink_model(config: Any, full: dict[str, int], small: dict[str, int], stages: int, full_stages: int,
                 args: argparse.Namespace) -> Any:  # fmt: skip
    """Return a model of a hundred thousand parameters at most, whose sizes divide as those of `config` do."""
    c, tp, T = config, small["tp"], full["tp"]
    width = 16 if args.fp8 else 8

    def kind(heads: int, kv: int, cp: int, tp: int) -> tuple[Any, ...]:
        enough = args.cp_kind != "alltoall" or heads // tp >= cp
        return enough, heads % tp == 0, kv % tp == 0, kv < tp, tp % kv == 0, heads == kv, heads == tp

    kv_heads = c.heads if c.kv_heads is None else c.kv_heads
    want = kind(c.heads, kv_heads, full["cp"], T)
    least = 2 if args.bitwise else 1  # two virtual shards of tp
    pairs = [(h, k) for h in range(tp, 13) for k in range(least, h + 1, least) if h % k == 0]
    heads, kv = nearest(want, pairs, lambda pair: kind(pair[0], pair[1], small["cp"], tp))
    unit = small["cp"] * (tp if args.sequence_parallel else 1)
    full_unit = full["cp"] * (T if args.sequence_parallel else 1)
    length = 2 * unit * 3 if c.seq_len % (2 * full_unit) == 0 else unit * 5 if unit % 2 else unit * 7
    hidden = 6 * width * (2 if args.fp8 else 1)
    layers = max(stages + 1 if c.layers % full_stages else stages, len(c.layers_spec or ()))
    changes: dict[str, Any] = {}
    if c.moe is not None:
        changes["moe"] = moe = shrink_experts(c.moe, full, small, 2 * width)
        layers = max(layers, moe.dense + moe.every)
    layers = layers if c.layers % full_stages else -(-layers // stages) * stages
    if c.linear is not None:
        keys = {"key_heads": c.linear.key_heads and tp, "key_dim": None}
        changes["linear"] = replace(c.linear, heads=2 * tp, head_dim=width, groups=1, **keys)
    if c.latent is not None:
        rank = None if c.latent.q_lora_rank is None else 2 * width
        heads_of = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), width)
        changes["latent"] = replace(c.latent, kv_lora_rank=2 * width, q_lora_rank=rank, **heads_of)
    else:
        changes["kv_heads"] = None if c.kv_heads is None else kv
        changes["head_dim"] = None if c.head_dim is None else width
    if c.rope_fraction * width % 2:
        changes["rope_fraction"] = 0.5
    if c.rope_scaling is not None:
        scaling = dict(c.rope_scaling)
        if "original_max_position_embeddings" in scaling:
            scaling["original_max_position_embeddings"] = length
        changes["rope_scaling"] = scaling
    wide = c.head_dim is not None and c.head_dim * c.heads != c.d_model
    return replace(
        c, vocab_size=258 if c.vocab_size % T == 0 else 257, seq_len=length, layers=max(layers, 2), heads=heads,
        d_model=heads * width * (2 if wide else 1), d_ff=hidden if c.hidden % T == 0 else hidden + 1,
        window=None if c.window is None else length if c.window >= c.seq_len else length // 3, **changes,
    )  # fmt: skip


def shrink_experts(moe: Any, full: dict[str, int], small: dict[str, int], width: int) -> Any:
    """Return a few experts, chosen in the same way."""
    groups = min(moe.groups, 2)
    experts = next(n for n in itertools.count(4) if n % (small["ep"] * groups) == 0)
    top_k = min(moe.top_k, 2) if moe.top_k < moe.experts else experts
    top_groups = None if moe.top_groups is None else min(moe.top_groups, groups)
    return replace(
        moe, experts=experts, top_k=top_k, d_ff=width * 3, every=min(moe.every, 2), dense=min(moe.dense, 1),
        shared_experts=min(moe.shared_experts, 1), groups=groups, top_groups=top_groups,
    )  # fmt: skip


def nearest(want: tuple[Any, ...], candidates: Iterable[Any], kind: Callable[[Any], tuple[Any, ...]]) -> Any:
    """Return the first candidate that agrees with `want` in the most facts."""
    return max(candidates, key=lambda c: sum(a == b for a, b in zip(kind(c), want, strict=True)))


def write_corpus(program: str, prefix: Path, documents: int = 80) -> None:
    """Write documents of random bytes, each ended with the byte tokenizer's end of a document."""
    dice = np.random.default_rng(0)
    with import_module(program).IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            writer.add_document(np.append(dice.integers(0, 256, dice.integers(3, 90)), 256))
