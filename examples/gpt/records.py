"""Write the files in a run's folder: metrics, the loss curve, the trace of a step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpcore.checkpoint.schema import read_lines
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import Schedule, Span
from mpcore.tools.draw import draw, plan_title, write_chrome_trace


def plot_losses(records: list[dict], path: Path) -> None:
    """Plot the training and validation loss over the tokens seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [r for r in records if "loss" in r]
    seen = {r["step"]: r["tokens"] for r in steps}
    evaluations = [r for r in records if "val_loss" in r]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
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
    plt.close(figure)
    with whole(path) as part:
        figure.savefig(part, dpi=120)


def read_records(path: Path, steps: int) -> list[dict]:
    """Read the records that an earlier run wrote of its first `steps` steps."""
    if steps == 0 or not path.is_file():
        return []
    return [entry for entry in read_lines(path) if entry["step"] < steps]


def draw_trace(plan: Schedule, spans: list[Span], out: Path) -> None:
    """Draw the plan and the run of a step in the same colours, and write the run as a Chrome trace."""
    proof = prove(plan)
    with whole(out / "plan.png") as part:
        draw(proof.spans, part, title=plan_title(plan, proof))
    busy, ranks = sum(span.end - span.start for span in spans), len(plan.ranks)
    bubble = 1 - busy / (ranks * max(span.end for span in spans))
    shown = [span._replace(start=1e3 * span.start, end=1e3 * span.end) for span in spans]
    with whole(out / "trace.png") as part:
        draw(shown, part, title=f"{plan.name}: the last step, bubble {bubble:.1%}", unit="ms")
    with whole(out / "trace.json") as part:
        write_chrome_trace(spans, part)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with whole(path) as part:
        part.write_text(text)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to. It becomes `path` if the block succeeds, and is removed if it fails."""
    part = path.with_name(f"{path.stem}.tmp{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
