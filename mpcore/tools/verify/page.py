"""Show the verdicts as a table for the terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpcore.tools.draw import matplotlib_part
from mpcore.tools.verify.judge import STAGES, Verdict


def table(verdicts: Sequence[Verdict]) -> str:
    """Return one line per layout: the largest difference of each stage in ULPs, and the first tensor that differs."""
    width = max(8, *(len(v.layout) for v in verdicts))
    lines = [f"{'layout':<{width}}  " + "  ".join(f"{stage:>8}" for stage in STAGES) + "  result (largest ULPs)"]
    for v in verdicts:
        cells = "  ".join(f"{_number(v, stage):>{max(8, len(stage))}}" for stage in STAGES)
        lines.append(f"{v.layout:<{width}}  {cells}  {result(v)}")
    lines += [f"{v.layout}: {v.mismatch or v.error}" for v in verdicts if not v.equal]
    return "\n".join(lines)


def draw(verdicts: Sequence[Verdict], path: Path | str) -> None:
    """Draw the difference of each gradient from the unsharded model's, in ULPs.

    The picture has one column per layout and one row per parameter.
    """
    names = list(dict.fromkeys(name for v in verdicts for name in v.gradients))
    rows = max(len(names), 1)
    figure = matplotlib_part("figure").Figure(
        figsize=(max(6.5, 3.5 + 0.8 * len(verdicts)), 1.8 + 0.26 * rows), layout="constrained"
    )
    axes, norm = figure.add_subplot(), matplotlib_part("colors").LogNorm(0.1, 1e6, clip=True)
    colours = matplotlib_part("pyplot").get_cmap("cividis")
    for x, v in enumerate(verdicts):
        for y, name in enumerate(names):
            ulps = v.gradients.get(name)
            shade = "#ffffff" if ulps is None else colours(norm(max(ulps, 0.1)))
            axes.barh(y, 0.96, 0.94, x - 0.48, color=shade)
            text = "-" if ulps is None else f"{ulps:.2g}" if ulps < 1e4 else f"{ulps:.0e}"
            ink = "#111111" if ulps is None or norm(max(ulps, 0.1)) > 0.55 else "white"
            first = v.mismatch is not None and v.mismatch.stage == "gradient" and v.mismatch.name == name
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color=ink, weight="bold" if first else "normal")
    equal = sum(v.equal for v in verdicts)
    axes.set_title(f"{equal} of {len(verdicts)} layouts equal the unsharded model: gradients' largest\n"
                   "differences, in units of the last place", loc="left", fontsize=10)  # fmt: skip
    axes.set(xlim=(-0.5, len(verdicts) - 0.5), ylim=(rows - 0.5, -0.5), yticks=range(len(names)))
    axes.set_yticklabels(names, fontsize=7)
    axes.set_xticks(range(len(verdicts)), [f"{v.layout}\n{result(v)}" for v in verdicts],
                    fontsize=8)  # fmt: skip
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, bottom=False)
    figure.savefig(path, dpi=150)


def result(verdict: Verdict) -> str:
    """Return `equal`, `DIFFERS` or `FAILED`."""
    return "equal" if verdict.equal else "FAILED" if verdict.error else "DIFFERS"


def _number(verdict: Verdict, stage: str) -> str:
    return f"{verdict.worst[stage]:.3g}" if stage in verdict.worst else "-"
