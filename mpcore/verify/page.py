"""The result as a table for the terminal, and as an HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence

from mpcore.verify.judge import STAGES, Verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #222 }
table { border-collapse: collapse }
td, th { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child, td:last-child { text-align: left }
.equal { background: #e5f5ea }
.off { background: #fdeaea }
"""


def table(verdicts: Sequence[Verdict]) -> str:
    """A line for each layout with the largest difference of each stage in ULPs, and what departs first."""
    width = max(8, *(len(v.layout) for v in verdicts))
    lines = [f"{'layout':<{width}}  " + "  ".join(f"{stage:>12}" for stage in STAGES) + "  result (largest ULPs)"]
    for v in verdicts:
        cells = "  ".join(f"{_number(v, stage):>12}" for stage in STAGES)
        lines.append(f"{v.layout:<{width}}  {cells}  {'equal' if v.equal else 'DIFFERS' if not v.error else 'FAILED'}")
    lines += [f"{v.layout}: {v.departure or v.error}" for v in verdicts if not v.equal]
    return "\n".join(lines)


def page(title: str, verdicts: Sequence[Verdict]) -> str:
    """The table as a page of its own, without scripts."""
    head = "".join(f"<th>{name}</th>" for name in ("layout", *STAGES, "result"))
    rows = []
    for v in verdicts:
        cells = "".join(f"<td>{_number(v, stage)}</td>" for stage in STAGES)
        result = "equal" if v.equal else html.escape(str(v.departure or v.error))
        rows.append(
            f'<tr class="{"equal" if v.equal else "off"}"><td><code>{html.escape(v.layout)}</code></td>{cells}'
            f"<td>{result}</td></tr>"
        )
    equal = sum(v.equal for v in verdicts)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{html.escape(title)}</h1><p>{equal} of {len(verdicts)} layouts are the dense model. Numbers are the "
        f"largest differences in units of the last place of each tensor's largest value.</p>"
        f"<table><tr>{head}</tr>{''.join(rows)}</table>\n"
    )


def _number(verdict: Verdict, stage: str) -> str:
    return f"{verdict.worst[stage]:.3g}" if stage in verdict.worst else "-"
