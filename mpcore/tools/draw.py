"""Draw a pipeline's plan or its run, in the same colours.

mpcore schedule --schedule zbv --stages 4 --microbatches 8 --out zbv.png
"""

from __future__ import annotations

import importlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpcore.pipeline.prove import Proof, Times, prove
from mpcore.pipeline.schedules import COMPUTE, EXPOSED, Action, Schedule, Span, find_schedule
from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors
from mpcore.tools.fault_tolerance.metrics import whole

COLOURS = {"F": "#4477aa", "B": "#ee8866", "I": "#ddaa33", "W": "#44aa77"}  # told apart by colour-blind people too
MEANINGS = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}


def draw(spans: Sequence[Span], path: Path | str, *, title: str = "", unit: str = "units") -> None:
    """Draw what each rank does over time: one row per rank, one box per action with its micro-batch.

    The first stage on a rank is drawn in full colour, later stages are lighter.
    """
    spans = [span for span in spans if span.action.kind in COMPUTE]
    if not any(span.end > span.start for span in spans):
        raise ValueError("there is nothing to draw: no span of F, B, I or W takes time")
    figures, patches = matplotlib_part("figure"), matplotlib_part("patches")
    begin, end = min(s.start for s in spans), max(s.end for s in spans)
    ranks = max(s.rank for s in spans) + 1
    shades = _shades(spans)
    inches = min(max(7.0, 0.26 * max(Counter(span.rank for span in spans).values())), 26.0)
    figure = figures.Figure(figsize=(inches, 1.7 + 0.42 * ranks), layout="constrained")
    axes = figure.add_subplot()
    for span in spans:
        colour = _lighten(COLOURS[span.action.kind], shades[span.rank, span.action.stage])
        axes.barh(
            span.rank, span.end - span.start, 0.86, span.start - begin, color=colour, edgecolor="white", linewidth=0.6
        )
        label = str(span.action.micro_batch)
        if (span.end - span.start) / (end - begin) * inches > 0.075 * len(label) + 0.03:
            middle = (span.start + span.end) / 2 - begin
            ink = "white" if 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] < 0.5 else "#111111"
            axes.text(middle, span.rank, label, ha="center", va="center", fontsize=7, color=ink)
    axes.set(xlim=(0, end - begin), ylim=(ranks - 0.5, -0.5), xlabel=f"time ({unit})", yticks=range(ranks))
    axes.set_yticklabels([f"rank {rank}" for rank in range(ranks)])
    axes.set_facecolor("#eeeeee")  # what no box covers is the bubble
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(handles=_legend(spans, patches), loc="outside lower center", ncols=9, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def matplotlib_part(name: str) -> Any:
    # Drawing is an extra: the library itself works without matplotlib.
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ModuleNotFoundError as problem:
        raise ImportError("drawing needs matplotlib: pip install 'mpcore[examples]'") from problem


def _shades(spans: Sequence[Span]) -> dict[tuple[int, int], float]:
    """Return how much lighter each stage of a rank is drawn: 0 for the first, up to 0.6 for the last."""
    held: dict[int, list[int]] = {}
    for rank, stage in sorted({(s.rank, s.action.stage) for s in spans}):
        held.setdefault(rank, []).append(stage)
    most = max(map(len, held.values()))
    return {(rank, s): 0.6 * i / max(most - 1, 1) for rank, stages in held.items() for i, s in enumerate(stages)}


def _lighten(colour: str, by: float) -> tuple[float, ...]:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(c + (1 - c) * by for c in channels)


def _legend(spans: Sequence[Span], patches: Any) -> list[Any]:
    there = {span.action.kind for span in spans}
    handles = [patches.Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in COLOURS if kind in there]
    shades = sorted(set(_shades(spans).values()))
    if len(shades) > 1:
        names = ["first stage of a rank", *(f"stage {i}" for i in range(2, len(shades))), "last stage of a rank"]
        handles += [
            patches.Patch(color=_lighten("#555555", shade), label=name)
            for shade, name in zip(shades, names, strict=True)
        ]
    return [*handles, patches.Patch(color="#eeeeee", label="idle")]


def plan_title(schedule: Schedule, proof: Proof) -> str:
    """Return the title for the picture of a plan."""
    peak = max(proof.peaks)
    return (
        f"{schedule.name}: {len(schedule.ranks)} ranks, {schedule.stages} stages, {schedule.micro_batches} "
        f"micro-batches\nbubble {proof.bubble:.1%}, activations of at most {peak:g} micro-batches a rank, "
        f"{proof.messages} messages"
    )


def write_chrome_trace(spans: Sequence[Span], path: Path | str, *, seconds: float = 1.0) -> None:
    """Write spans in the format of chrome://tracing and Perfetto.

    Each rank is a process. Its thread has the computations, and the waits for messages, named and colored "exposed".
    Messages have lanes of their own, from the post to the end of the wait.

    Args:
        spans: the spans of `prove`, of `Pipeline.recorded` or of `CommunicationClock.spans`.
        seconds: the number of seconds per unit of the spans' times.
    """
    begin = min((span.start for span in spans), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    for i, span in enumerate(spans):
        start, took = (span.start - begin) * seconds * 1e6, (span.end - span.start) * seconds * 1e6
        event = {"name": _name(span.action), "pid": span.rank, "tid": 0, "ts": start}
        args = {"args": {"stage": span.action.stage, "micro_batch": span.action.micro_batch}}
        waits = span.action.kind.startswith(EXPOSED)
        if not waits and span.action.kind not in COMPUTE:  # messages overlap, as a thread's events may not
            event |= {"cat": "message", "id": i}
            events += [event | {"ph": "b", **args}, event | {"ph": "e", "ts": start + took}]
            continue
        if waits:
            message = span.action._replace(kind=span.action.kind.removeprefix(EXPOSED))
            event |= {"name": f"{EXPOSED}{_name(message)}", "cat": "exposed", "cname": "terrible"}
        events.append({"cat": MEANINGS.get(span.action.kind, ""), **event, "ph": "X", "dur": took, **args})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _name(action: Action) -> str:
    return str(action) if action.stage >= 0 else action.kind  # a collective within a stage, such as "tp all_reduce"


def plot_losses(records: list[dict[str, Any]], path: Path) -> None:
    """Plot the training and validation loss over the tokens seen."""
    figures = matplotlib_part("figure")
    steps = [r for r in records if "loss" in r]
    seen = {r["step"]: r["tokens"] for r in steps}
    evaluations = [r for r in records if "val_loss" in r]
    figure = figures.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["tokens"] for r in steps], [r["loss"] for r in steps], lw=1, label="training")
    axes.plot([seen[r["step"]] for r in evaluations], [r["val_loss"] for r in evaluations], "o-", label="held out")
    for name in dict.fromkeys(name for r in evaluations for name in r.get("val_losses", ())):
        measured = [r for r in evaluations if name in r.get("val_losses", ())]
        axes.plot([seen[r["step"]] for r in measured], [r["val_losses"][name] for r in measured], "o-", label=name)
    axes.set(xlabel="tokens", ylabel="loss (nats a token)")
    finite = [r for r in evaluations if r["val_loss"] is not None and math.isfinite(r["val_loss"])]
    if finite:
        best = min(finite, key=lambda r: r["val_loss"])
        found = f"held-out loss: lowest {best['val_loss']:.3f} after {seen[best['step']]:,} tokens"
        axes.set_title(f"{found}, {finite[-1]['val_loss']:.3f} at the end", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    with whole(path) as part:
        figure.savefig(part, dpi=120)


def draw_trace(plan: Schedule, spans: list[Span], out: Path) -> None:
    """Draw the plan and the run of a step in the same colours, and write the run as a Chrome trace."""
    proof = prove(plan)
    with whole(out / "plan.png") as part:
        draw(proof.spans, part, title=plan_title(plan, proof))
    computed = [span for span in spans if span.action.kind in COMPUTE]
    busy, ranks = sum(span.end - span.start for span in computed), len(plan.ranks)
    took = max(span.end for span in computed) - min(span.start for span in computed)
    bubble = 1 - busy / (ranks * took)
    shown = [span._replace(start=1e3 * span.start, end=1e3 * span.end) for span in spans]
    with whole(out / "trace.png") as part:
        draw(shown, part, title=f"{plan.name}: the last step, bubble {bubble:.1%}", unit="ms")
    with whole(out / "trace.json") as part:
        write_chrome_trace(spans, part)


@reports_errors("mpcore schedule", ImportError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: prove a schedule and draw its plan. Return 2 if there is no such schedule, otherwise 0."""
    args = parsers.schedule().parse_args(argv)
    for name in ("forward", "input", "weight", "message"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"--{name} {getattr(args, name)} is no time: a number from 0")
    schedule = find_schedule(args.schedule, args.stages, args.microbatches, args.virtual_stages)
    proof = prove(schedule, Times(args.forward, args.input, args.weight, message=args.message))
    if args.out.endswith(".json"):
        write_chrome_trace(proof.spans, args.out, seconds=1e-3)
    else:
        draw(proof.spans, args.out, title=plan_title(schedule, proof), unit=f"forward of one stage is {args.forward:g}")
    print(f"{plan_title(schedule, proof)}; wrote {args.out}")
    return 0
