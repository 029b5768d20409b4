"""Launch choices of the kernels, timed beside each other on the GPU at hand: `python -m bench.tune [KERNEL ...]`.

Kernels are launched with static choices, each made by a small function or a name of the kernel's module: tiles, warps,
programs. A candidate puts another in its place. For each shape and pass that the benches measure, all candidates are
checked as the benches check, then timed in turn with the kernel as it is; those that can't be launched say why. What is
better is to be written into the kernel's module by hand, beside the figures.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from bench.kernels import protocol
from bench.kernels.protocol import BOTH, FORWARD, OURS, Inputs, Kernel, NotHereError, Shape, label, short
from bench.machine import describe
from mpcore.kernels._rows import ceil_div, next_power_of_2

AS_IT_IS = "as it is"
HEAD = ["| kernel | shape | pass | as it is, us | fastest (time over that) |", "|---|---|---|---|---|"]


class Candidate(NamedTuple):
    """Another choice.

    Attributes:
        name: what it is.
        patches: by name in the kernel's module what stands there instead.
        passes: where it can matter.
    """

    name: str
    patches: dict[str, Any]
    passes: tuple[str, ...] = (FORWARD, BOTH)


class Tunable(NamedTuple):
    """A kernel's module, the bench whose shapes it is tuned on, and the candidates."""

    module: str
    bench: str
    candidates: Callable[[Any], Iterator[Candidate]]


# --- candidates -------------------------------------------------------------------------------------------------------


def warps(module: Any) -> Iterator[Candidate]:
    """Half and twice the warps of every launch."""
    launch = module.launch
    for factor in (0.5, 2.0):

        def other(*given: Any, num_warps: int, factor: float = factor, **arguments: Any) -> None:
            launch(*given, num_warps=max(1, min(32, int(num_warps * factor))), **arguments)

        yield Candidate(f"warps x {factor:g}", {"launch": other})


def row_tiles(module: Any) -> Iterator[Candidate]:
    """More or fewer rows and warps a program, and programs in backward, of kernels over whole rows."""
    tile, processors = module.row_tile, module.multiprocessors
    for rows in (0.5, 1, 2):
        for factor in (0.5, 1, 2):
            if rows == factor == 1:
                continue

            def other(D: int, rows: float = rows, factor: float = factor, **shape: int) -> Any:
                t = tile(D, **shape)
                return t._replace(
                    block_m=max(1, int(t.block_m * rows)), num_warps=max(1, min(32, int(t.num_warps * factor)))
                )

            yield Candidate(f"rows x {rows:g}, warps x {factor:g}", {"row_tile": other})
    for times in (0.5, 2, 4):

        def more(device: torch.device, times: float = times) -> int:
            return max(1, int(processors(device) * times))

        yield Candidate(f"programs x {times:g}", {"multiprocessors": more}, (BOTH,))


def element_tiles(module: Any) -> Iterator[Candidate]:
    """Other sizes of tiles that cover parts of rows."""
    for elements in (1024, 4096, 8192):

        def other(columns: int, elements: int = elements) -> tuple[int, int, int]:
            block = max(4, min(elements, next_power_of_2(columns)))
            return min(64, max(1, elements // block)), block, ceil_div(columns, block)

        yield Candidate(f"tiles of {elements}", {"flat_tiles": other})
    yield from warps(module)


def vocabulary_tiles(module: Any) -> Iterator[Candidate]:
    """Other tiles of a row of logits, and elements a thread."""
    tile = module._tile
    for block in (2048, 4096, 8192, 16384):
        for per_warp in (512, 1024, 2048):
            if (block, per_warp) != (module.BLOCK_V, 1024):

                def other(logits: torch.Tensor, block: int = block, per_warp: int = per_warp) -> tuple[int, int, int]:
                    vector, _, _ = tile(logits)
                    block_v = max(256, min(block, next_power_of_2(logits.shape[-1])))
                    return vector, block_v, max(1, min(32, block_v // per_warp))

                yield Candidate(f"tiles of {block}, {per_warp} a warp", {"_tile": other})


def attention_tiles(module: Any) -> Iterator[Candidate]:
    """Blocks, stages and warps of each of attention's kernels."""
    tile, Tile = module.tile, module.Tile
    for kind in ("forward", "dkdv", "dq"):
        for blocks in ((128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64)):
            for stages in (2, 3):
                for count in (4, 8):
                    chosen = Tile(blocks, stages, count)

                    def other(kernel: str, *args: Any, kind: str = kind, chosen: Any = chosen) -> Any:
                        return chosen if kernel == kind else tile(kernel, *args)

                    name = f"{kind} {blocks[0]}x{blocks[1]}, {stages} stages, {count} warps"
                    yield Candidate(name, {"tile": other}, (FORWARD,) if kind == "forward" else (BOTH,))


def rope_tiles(module: Any) -> Iterator[Candidate]:
    """Larger and smaller tiles, and warps."""
    tile = module._tile
    for factor in (0.5, 2, 4):

        def other(y: Any, q: Any, k: Any, elements: int, factor: float = factor) -> tuple[int, int]:
            return tile(y, q, k, int(elements * factor))

        yield Candidate(f"tiles x {factor:g}", {"_tile": other})
    yield from warps(module)


def blocks(name: str, *sizes: int) -> Callable[[Any], Iterator[Candidate]]:
    """Other values of a module's constant, and warps."""

    def candidates(module: Any) -> Iterator[Candidate]:
        for size in sizes:
            if size != getattr(module, name):
                yield Candidate(f"{name} {size}", {name: size})
        yield from warps(module)

    return candidates


TUNABLE = {
    "rms_norm": Tunable("_norm", "bench_rms_norm", row_tiles),
    "layer_norm": Tunable("_norm", "bench_layer_norm", row_tiles),
    "activation": Tunable("activation", "bench_activation", element_tiles),
    "dropout_add": Tunable("dropout_add", "bench_dropout_add", element_tiles),
    "rope": Tunable("rope", "bench_rope", rope_tiles),
    "cross_entropy": Tunable("cross_entropy", "bench_cross_entropy", vocabulary_tiles),
    "attention": Tunable("attention.tiles", "bench_attention", attention_tiles),
    "adamw": Tunable("adamw", "bench_adamw", blocks("_BLOCK", 512, 1024, 2048, 4096)),
    "moe_permute": Tunable("moe_permute", "bench_moe_permute", warps),
    "quantize_fp8": Tunable("quantize_fp8", "bench_quantize_fp8", blocks("ROWS", 16, 64, 128)),
}


@contextmanager
def in_place(module: Any, candidate: Candidate | None) -> Iterator[None]:
    """Have a candidate's choices in the module."""
    patches = {} if candidate is None else candidate.patches
    before = {name: getattr(module, name) for name in patches}
    for name, value in patches.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# --- measuring --------------------------------------------------------------------------------------------------------


def kernels_of(tunable: Tunable) -> list[Kernel]:
    """The kernels of its bench."""
    held = vars(importlib.import_module(f"bench.kernels.{tunable.bench}")).values()
    return [k for value in held for k in (value if isinstance(value, list) else [value]) if isinstance(k, Kernel)]


def tune(
    tunable: Tunable, kernel: Kernel, shape: Shape, dtype: torch.dtype, which: str, seconds: float = math.inf
) -> dict[str, Any]:
    """One row: microseconds of each candidate, its time over that of the kernel as it is, and what could not run.

    After so many seconds no further candidate is tried: each is a compilation or two.
    """
    until = time.monotonic() + seconds
    module = importlib.import_module(f"mpcore.kernels.{tunable.module}")
    protocol.begin()
    choices = {AS_IT_IS: None} | {c.name: c for c in tunable.candidates(module) if which in c.passes}
    torch.manual_seed(0)
    checked = {**shape, **{name: min(size, shape[name]) for name, size in kernel.check.items()}}
    inputs = kernel.inputs(checked, dtype, torch.device("cuda"))
    bounds = protocol._bounds(kernel, inputs, which)
    full = kernel.inputs(shape, dtype, torch.device("cuda"))
    leaves = protocol._leaves(kernel, full, which)
    calls: dict[str, Callable[[], object]] = {}
    failed: dict[str, str] = {}
    host = 0.0
    for name, candidate in tqdm(choices.items(), desc=f"{kernel.name} {label(shape)} {which}", leave=False):
        if candidate is not None and time.monotonic() > until:
            failed[name] = f"not tried in {seconds:g} seconds"
            continue
        call = _within(module, candidate, kernel, leaves, which)
        try:
            with in_place(module, candidate):
                protocol._check(kernel, OURS, kernel.ours, inputs, which, bounds)
            host = max(host, protocol._host_seconds(call))
            calls[name] = call
        except Exception as error:
            if candidate is None:
                raise
            failed[name] = protocol._why(error)
    times = protocol.device_times(calls, host)
    base = times[AS_IT_IS]
    found = {
        name: {
            "us": round(1e6 * statistics.median(own), 2),
            "ratio": round(statistics.median(a / b for a, b in zip(own, base, strict=True)), 4),
        }
        for name, own in times.items()
    }
    row = {"kernel": kernel.name, "shape": label(shape), "dtype": short(dtype), "pass": which}
    return {**row, "candidates": dict(sorted(found.items(), key=lambda item: item[1]["ratio"])), "failed": failed}


def _within(
    module: Any, candidate: Candidate | None, kernel: Kernel, leaves: Inputs, which: str
) -> Callable[[], object]:
    plain = protocol._call(kernel.ours, leaves, which)

    def call() -> object:
        with in_place(module, candidate):
            return plain()

    return call


def line(row: dict[str, Any], best: int = 3) -> str:
    """The fastest of a row; ratios under 1 are faster than the kernel as it is."""
    found = [(name, one) for name, one in row["candidates"].items() if name != AS_IT_IS][:best]
    told = "; ".join(f"{name} ({one['ratio']:.3f})" for name, one in found)
    base = row["candidates"][AS_IT_IS]["us"]
    return f"| {row['kernel']} | {row['shape']} {row['dtype']} | {row['pass']} | {base} | {told} |"


def summary(rows: list[dict[str, Any]]) -> str:
    """The choices by their geometric mean over all shapes of a kernel and pass, where they ran on all of them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["pass"]), []).append(row["candidates"])
    lines = []
    for (kernel, which), found in groups.items():
        everywhere = set.intersection(*(set(one) for one in found))
        means = {n: math.exp(statistics.fmean(math.log(one[n]["ratio"]) for one in found)) for n in everywhere}
        name = min(means, key=lambda n: means[n])
        lines.append(f"{kernel} {which}: {name}, {means[name]:.3f} of the time over {len(found)} shapes")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(TUNABLE)} (default: all)")
    parser.add_argument("--shapes", type=int, help="only the first so many shapes of each bench")
    parser.add_argument("--seconds", type=float, default=math.inf, help="a row's time to try candidates (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of all candidates, written after each row")
    args = parser.parse_args(argv)
    unknown = [name for name in args.kernels if name not in TUNABLE]
    if unknown:
        sys.exit(f"error: {unknown[0]!r} is none of {', '.join(TUNABLE)}")
    if not torch.cuda.is_available():
        sys.exit("error: there is no GPU here: launch choices are timed on the one that they are for")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    broken = 0
    print("\n".join(HEAD))
    for name in args.kernels or TUNABLE:
        for kernel in kernels_of(TUNABLE[name]):
            for shape, dtype, which in itertools.product(kernel.shapes[: args.shapes], kernel.dtypes, kernel.passes):
                try:
                    rows.append(tune(TUNABLE[name], kernel, shape, dtype, which, args.seconds))
                    print(line(rows[-1]), flush=True)
                except Exception as error:  # the next has its turn
                    broken += not isinstance(error, NotHereError)
                    print(f"{kernel.name} {label(shape)} {which}: {protocol._why(error)}", file=sys.stderr)
                if args.out is not None:
                    args.out.write_text(json.dumps({**describe(), "rows": rows}, indent=1) + "\n")
    print(f"\n{summary(rows)}")
    if broken:
        sys.exit(f"error: {broken} could not be timed as they are, see above")


if __name__ == "__main__":
    main()
