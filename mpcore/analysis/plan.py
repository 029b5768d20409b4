"""Find the layouts of a model that fit a machine, and estimate how long a step of each takes there.

`mpcore plan examples.gpt.plan:build --world 64 --preset llama3-8b --global-batch 256
--vary recompute=none,selective,full --vary zero=1,3` tries every mesh of 64 ranks with every choice of the flags.

A dry run of every pipeline rank counts memory, floating-point operations and messages; running the schedule counts the
bubble (`mpcore.pipeline.prove`). You give the machine's rates; nothing is measured. So a time is an estimate: products
at one rate, a ring for every collective, other operations free, and nothing overlaps.

Source of a ring's cost: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mpcore.analysis.dry_run import Found, Kept, dry_run, parser_of
from mpcore.command_line import find_object
from mpcore.pipeline.draw import matplotlib_part
from mpcore.pipeline.prove import Times, prove

AXES = ("tp", "cp", "pp", "ep", "dp", "etp", "cp_inner")  # the last two where they are given
PICTURES = (".png", ".svg", ".pdf")
# What a micro-batch waits for; the other axes carry gradients and parameters.
INSIDE = ("tp", "cp", "cp_outer", "cp_inner", "ep", "etp")


@dataclass(frozen=True)
class Machine:
    """The machine of a planned run.

    Attributes:
        world: ranks, one a GPU.
        memory: bytes of a GPU that the run may hold.
        node: consecutive ranks that share a fast link.
        flops: floating-point operations a second of products.
        node_bandwidth, bandwidth: bytes a second that a rank sends within its node, and to another.
    """

    world: int
    memory: float = 80e9
    node: int = 8
    flops: float = 400e12
    node_bandwidth: float = 300e9
    bandwidth: float = 40e9

    def seconds(self, ranks: Sequence[int], volume: float) -> float:
        """How long a ring of these ranks takes for a volume (`mpcore.analysis.counts.volume`)."""
        within = len({rank // self.node for rank in ranks}) <= 1
        return volume * (1 - 1 / max(len(ranks), 1)) / (self.node_bandwidth if within else self.bandwidth)


@dataclass(frozen=True)
class Estimate:
    """A layout, and what a step of it takes: on the pipeline rank with the most of each.

    Attributes:
        sizes: of the mesh's axes.
        arguments: of the build function.
        memory: bytes; if they don't fit, those of the first rank that was found to need too much.
        compute: seconds of products.
        inside: seconds of collectives that micro-batches wait for: over tp, cp, ep.
        bubble: seconds in which a pipeline rank waits for others.
        data: seconds of collectives over data ranks and between tied stages.
        refused: why the layout is refused, or "".
    """

    sizes: dict[str, int]
    arguments: tuple[str, ...]
    memory: int = 0
    compute: float = 0.0
    inside: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    refused: str = ""

    @property
    def step(self) -> float:
        """Seconds of a step, if nothing overlaps."""
        return self.compute + self.inside + self.bubble + self.data

    def fits(self, machine: Machine) -> bool:
        """Whether it can be, in the machine's memory."""
        return not self.refused and self.memory <= machine.memory


def meshes(machine: Machine, **sizes: Sequence[int] | None) -> Iterator[dict[str, int]]:
    """List every mesh of a machine, tp within a node.

    Args:
        machine: the machine.
        sizes: the sizes an axis may have; None: tp, pp and dp any, cp and ep 1, etp that of tp, no `cp_inner`.
    """
    divisors = [n for n in range(1, machine.world + 1) if machine.world % n == 0]
    tps = sizes.get("tp") or [n for n in divisors if n <= machine.node]
    for tp, pp, cp, ep, etp, inner in itertools.product(
        tps,
        sizes.get("pp") or divisors,
        sizes.get("cp") or (1,),
        sizes.get("ep") or (1,),
        sizes.get("etp") or (None,),
        sizes.get("cp_inner") or (None,),
    ):
        dp, rest = divmod(machine.world, tp * pp * cp)
        divided = (dp * cp * tp) % (ep * (etp or 1)) == 0 and cp % (inner or 1) == 0
        if rest == 0 and dp in (sizes.get("dp") or (dp,)) and divided:
            more = {name: size for name, size in (("etp", etp), ("cp_inner", inner)) if size is not None}
            yield {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "dp": dp, **more}


def choices(vary: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The arguments of every combination of `name=value,value,..`; `on` is a flag alone, `off` none.

    Raises:
        ValueError: if one isn't of that form, or is an axis of the mesh.
    """
    options = []
    for text in vary:
        name, equals, values = text.partition("=")
        if not (name and equals and all(values.split(","))):
            raise ValueError(f"--vary {text} isn't of the form name=value,value: such as zero=1,3")
        flag = f"--{name.lstrip('-').replace('_', '-')}"
        if flag[2:].replace("-", "_") in AXES:
            raise ValueError(f"--vary {text}: the axes of the mesh are the planner's own flags: {flag} {values}")
        each: dict[str, tuple[str, ...]] = {"on": (flag,), "off": ()}
        options.append([each.get(value, (flag, value)) for value in values.split(",")])
    for combination in itertools.product(*options):
        yield tuple(itertools.chain(*combination))


def estimate(
    name: str, machine: Machine, given: Sequence[str], layout: tuple[dict[str, int], tuple[str, ...]]
) -> Estimate:
    """Estimate a step of one layout.

    Args:
        name: `module:function` that builds a rank's `mpcore.analysis.dry_run.Work`.
        machine: the machine.
        given: arguments of that function that all layouts share.
        layout: sizes of the mesh, and arguments of its own.
    """
    sizes, own = layout
    build, found = find_object(name), []
    stride = machine.world // sizes["pp"]
    last_cp = (sizes["cp"] - 1) * sizes["tp"]  # with causal masks it may have the most to compute
    try:
        for pp in range(sizes["pp"]):
            here = [dry_run(build, [*given, *own], pp * stride + cp, **sizes) for cp in sorted({0, last_cp})]
            found.append(here)
            if max(f.total for f in here) > machine.memory:
                break
    except ValueError as error:
        return Estimate(sizes, own, refused=str(error))
    memory = max(f.total for here in found for f in here)
    if memory > machine.memory:
        return Estimate(sizes, own, memory)
    slowest = [max(here, key=lambda f: sum(_rank(machine, f))) for here in found]
    return Estimate(sizes, own, memory, *_times(machine, slowest))


def _stage(machine: Machine, found: Found, kept: Kept) -> tuple[float, float]:
    """Seconds of a step that a stage's products take, and the collectives that its micro-batches wait for."""
    assert found.plan is not None
    sent = ((found.ledger.ranks(axis), size) for axis, size in kept.sent.items() if axis in INSIDE)
    compute = found.plan.micro_batches * (kept.forward_flops + kept.backward_flops) / machine.flops
    return compute, sum(machine.seconds(ranks, size) for ranks, size in sent)


def _rank(machine: Machine, found: Found) -> tuple[float, float]:
    """As `_stage`, of all stages of a rank."""
    each = [_stage(machine, found, kept) for kept in found.stages]
    return sum(compute for compute, _ in each), sum(inside for _, inside in each)


def _times(machine: Machine, ranks: Sequence[Found]) -> tuple[float, float, float, float]:
    """Seconds of compute, inside, bubble and data of an `Estimate`, from what each pipeline rank counted."""
    plan = ranks[0].plan
    assert plan is not None
    stages = {
        i: (found, kept)
        for r, found in enumerate(ranks)
        for i, kept in zip(plan.stages_of(r), found.stages, strict=True)
    }
    each = [sum(_stage(machine, *stages[i])) / plan.micro_batches for i in range(plan.stages)]
    forward = sum(kept.forward_flops for _, kept in stages.values())
    backward = sum(kept.backward_flops for _, kept in stages.values())
    share = forward / max(forward + backward, 1)
    widest = max(max(kept.received, kept.sent_back) for _, kept in stages.values())
    ends = [r * machine.world // len(ranks) for r in range(min(len(ranks), 2))]
    message = 2 * machine.seconds(ends, widest)  # a ring of two sends half
    times = Times(share, (1 - share) / 2, (1 - share) / 2, message=message, stages=tuple(each))
    compute, inside = max((_rank(machine, found) for found in ranks), key=sum)
    data = max(
        sum(
            machine.seconds(f.ledger.ranks(axis), size)
            for axis, size in f.ledger.volumes().items()
            if axis not in (*INSIDE, "pp")
        )
        for f in ranks
    )
    bubble = max(prove(plan, times).makespan - compute - inside, 0.0)
    return compute, inside, bubble, data


def plan(
    name: str,
    machine: Machine,
    arguments: Sequence[str] = (),
    layouts: Iterable[tuple[dict[str, int], tuple[str, ...]]] | None = None,
    jobs: int = 1,
    each: Callable[[int, int], None] = lambda done, of: None,
) -> list[Estimate]:
    """Estimate layouts: first the ones that fit, by time; then the too large ones, by memory; then the refused ones.

    Args:
        name: `module:function` that builds a rank's `mpcore.analysis.dry_run.Work`.
        machine: the machine.
        arguments: of that function, the same for all layouts.
        layouts: sizes of a mesh and further arguments; None: every mesh, nothing further.
        jobs: processes that share the work; 1: this one.
        each: called with the number of layouts that are done and of all.
    """
    layouts = [(sizes, ()) for sizes in meshes(machine)] if layouts is None else list(layouts)
    one, found = partial(estimate, name, machine, tuple(arguments)), []
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) if jobs > 1 else None
    try:
        for result in (pool.map if pool else map)(one, layouts):
            found.append(result)
            each(len(found), len(layouts))
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    # Flags may change nothing, such as the stage of ZeRO on one data rank: the first choice stands for all.
    found = list({(tuple(e.sizes.items()), e.memory, e.step, e.refused): e for e in reversed(found)}.values())
    fits = sorted((e for e in found if e.fits(machine)), key=lambda e: (round(e.step, 9), e.memory))
    large = sorted((e for e in found if not e.fits(machine) and not e.refused), key=lambda e: e.memory)
    return [*fits, *large, *(e for e in reversed(found) if e.refused)]


def table(estimates: Sequence[Estimate], machine: Machine, top: int = 20) -> str:
    """The layouts that fit, a line each, the fastest first; then how many don't fit or are refused, and why."""
    fits = [e for e in estimates if e.fits(machine)]
    large = [e for e in estimates if not e.fits(machine) and not e.refused]
    axes = [a for a in AXES if any(e.sizes.get(a, 0) > (a in ("cp", "ep")) for e in estimates)]
    wide = {a: max(4, len(a) + 1) for a in axes}
    lines = []
    if fits:
        head = "".join(f"{a:>{wide[a]}}" for a in axes)
        lines.append(
            f"{head} {'GiB':>7} {'step, s':>9} {'compute':>8} {'tp,cp,ep':>8} {'bubble':>8} {'data':>8}  flags"
        )
    for e in fits[:top]:
        parts = "".join(f" {part / e.step:>8.1%}" for part in (e.compute, e.inside, e.bubble, e.data))
        cells = "".join(f"{e.sizes.get(a, ''):>{wide[a]}}" for a in axes)
        lines.append(f"{cells} {e.memory / 2**30:>7.1f} {e.step:>9.3f}{parts}  {' '.join(e.arguments)}".rstrip())
    if len(fits) > top:
        lines.append(f".. and {len(fits) - top} slower ones that fit")
    if large:
        least = large[0]
        what = " ".join([*(f"{a} {size}" for a, size in least.sizes.items() if a in axes), *least.arguments])
        needs = f"{least.memory / 2**30:.1f} GiB of {machine.memory / 2**30:.1f}"
        lines.append(f"{len(large)} don't fit; the smallest of them needs at least {needs}: {what}")
    reasons = Counter(e.refused for e in estimates if e.refused)
    lines += [f"{count} refused: {reason}" for reason, count in reasons.most_common(5)]
    if len(reasons) > 5:
        lines.append(f"{sum(reasons.values()) - sum(n for _, n in reasons.most_common(5))} refused for other reasons")
    return "\n".join(lines)


def draw(estimates: Sequence[Estimate], machine: Machine, path: Path | str) -> None:
    """Draw the layouts that fit: a point each, seconds of a step over memory, the fastest five by name.

    Raises:
        ValueError: if none fits.
    """
    fits = [e for e in estimates if e.fits(machine)]
    if not fits:
        raise ValueError("there is nothing to draw: no layout fits")
    figure = matplotlib_part("figure").Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for pp in sorted({e.sizes["pp"] for e in fits}):
        points = [e for e in fits if e.sizes["pp"] == pp]
        axes.scatter([e.memory / 2**30 for e in points], [e.step for e in points], s=18, label=f"pp {pp}")
    names = []
    for i, e in enumerate(fits[:5], 1):
        axes.annotate(str(i), (e.memory / 2**30, e.step), xytext=(3, 4), textcoords="offset points", fontsize=8)
        names.append(f"{i}: {' '.join([*(f'{a}{e.sizes[a]}' for a in AXES if e.sizes.get(a, 1) > 1), *e.arguments])}")
    axes.axvline(machine.memory / 2**30, color="#aa3333", linewidth=1)
    axes.set(xlabel="memory of the fullest rank, GiB", ylabel="estimated seconds of a step", ylim=(0, None))
    axes.set_title("\n".join([f"layouts of {machine.world} ranks that fit", *names]), loc="left", fontsize=8)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _sizes(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{min(sizes)} is no size of an axis")
    return sizes


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(
        "mpcore plan", __doc__, "mpcore plan examples.gpt.plan:build --world 16 --preset llama3-8b --vary zero=1,3"
    )
    parser.add_argument("--world", type=int, required=True, help="ranks, one a GPU")
    parser.add_argument("--memory", type=float, default=80e9 / 2**30, help="GiB of a GPU for the run (80e9 bytes)")
    parser.add_argument("--node", type=int, default=8, help="ranks of a node; tp stays in one (8)")
    parser.add_argument("--tflops", type=float, default=400.0, help="10^12 operations/s that products reach (400)")
    parser.add_argument("--node-bandwidth", type=float, default=300.0, help="GB/s to a rank of the node (300)")
    parser.add_argument("--bandwidth", type=float, default=40.0, help="GB/s to a rank of another node (40)")
    for name in AXES:
        text = {"etp": "sizes to try; else that of tp", "cp_inner": "sizes of sub-groups of cp to try; else none"}
        flag = f"--{name.replace('_', '-')}"
        other = "sizes to try (default: 1)" if name in ("cp", "ep") else "sizes to try (default: all that fit)"
        parser.add_argument(flag, type=_sizes, metavar="N,N", help=text.get(name, other))
    parser.add_argument(
        "--vary", action="append", default=[], metavar="FLAG=V,V", help="values of a flag to try; also on, off"
    )
    parser.add_argument("--top", type=int, default=20, help="lines to print (20)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that share the work")
    parser.add_argument("--out", type=Path, help=f"draw the layouts that fit, as {' or '.join(PICTURES)}")
    args, args.arguments = parser.parse_known_args(argv)
    return args


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse(argv)
    rates = {
        "flops": args.tflops * 1e12,
        "node_bandwidth": args.node_bandwidth * 1e9,
        "bandwidth": args.bandwidth * 1e9,
    }
    machine = Machine(args.world, args.memory * 2**30, args.node, **rates)
    try:
        if args.out and (args.out.suffix not in PICTURES or not args.out.parent.is_dir()):
            raise ValueError(f"--out {args.out} is no {' or '.join(PICTURES)} in a folder that is there")
        find_object(args.target)
        cuts = list(meshes(machine, **{name: getattr(args, name) for name in AXES}))
        if not cuts:
            raise ValueError(f"no mesh of these sizes has {args.world} ranks, with tp up to {args.node}")
        layouts = list(itertools.product(cuts, choices(args.vary)))
        found = plan(args.target, machine, args.arguments, layouts, min(args.jobs, len(layouts)), _tell)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(
        f"{args.world} ranks of {args.memory:.1f} GiB, {args.node} a node; assumed: {args.tflops:g} TFLOP/s, "
        f"{args.node_bandwidth:g} GB/s in a node, {args.bandwidth:g} GB/s between nodes; nothing overlaps"
    )
    print(table(found, machine, args.top))
    if args.out and found[0].fits(machine):
        draw(found, machine, args.out)
    if not found[0].fits(machine):
        sys.exit(
            "no layout fits: try --vary recompute=selective,full, --vary zero=3, more ranks or smaller micro-batches"
        )


def _tell(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {of} layouts", end="\n" if done == of else "", file=sys.stderr, flush=True)
