"""The table of docs/records/2026-11-21_moe.md on what a dispatch sends: `python -m tests.dispatch_table --write PAGE`.

One layer on 4 ranks of ep, forward and backward, counted by the ledger. A call counts the bytes of its whole tensor.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

import torch

from mpcore import Axis, ParallelMoE, load_full_state_dict
from mpcore.gradients import drop_gradients
from mpcore.layers.moe import DispatchBounds
from mpcore.layers.moe.bounds import REVIEW
from mpcore.layers.moe.dispatch import AllToAll
from mpcore.tools.analysis.counts import CommunicationCounter
from tests.pool import Pool, mesh, start_pool

TOKENS, DIM, EXPERTS, TOP_K, EP = 512, 64, 32, 2, 4
SKEWS = {"even": 0.0, "uneven": 1.0, "one rank has all": 30.0}
HEAD = "| loads | best | all-to-all, first | later | host reads | all-gather | choices one by one |"
MODELS = {"Mixtral 8x7B": (8, 2, 8), "Qwen3-30B-A3B": (128, 8, 16), "DeepSeek-V3": (256, 8, 64)}  # E, K, ep
ROWS = "| | experts | top-k | ep | best | all-to-all, first | all-gather | choices one by one |"
ROUTE = 2 * TOP_K * 4  # bytes of a token's experts and weights


class Sent(NamedTuple):
    """Bytes that a rank sends over ep, the mean over ranks: in the order of `HEAD`."""

    best: int
    first: int
    later: int
    read: int
    gathered: int
    choices: int


def count(skew: float) -> Sent:
    """What one layer sends with loads of such a skew; on each rank."""
    on = mesh(dp=EP, ep=EP)
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(EXPERTS, DIM, generator=generator) / 8
    router[:, 0] = skew * torch.cat([torch.ones(EXPERTS // EP), torch.zeros(EXPERTS - EXPERTS // EP)])
    generator.manual_seed(1 + on.dp.rank)
    x = torch.randn(1, TOKENS, DIM, generator=generator)
    x[..., 0] = 1.0

    def bytes_of(moe: ParallelMoE, bounds: DispatchBounds | None = None) -> int:
        def compute() -> None:
            moe(x.clone().requires_grad_()).sum().backward()

        with CommunicationCounter(on) as ledger:
            if bounds is None:
                compute()
            else:
                bounds.exact(compute, lambda: drop_gradients(moe))
        return sum(c.bytes for (_, kind), c in ledger.counts.items() if kind != "all_reduce")

    made = {}
    for dispatch in ("all_to_all", "all_gather"):
        moe = ParallelMoE(DIM, 8, EXPERTS, TOP_K, dispatch=dispatch, ep=on.ep, data=on.data)
        state = {"experts.gate_up.weight": torch.zeros(EXPERTS, 16, DIM)}
        state["experts.down.weight"] = torch.zeros(EXPERTS, DIM, 8)
        load_full_state_dict(moe, {"router.weight": router, **state})
        made[dispatch] = moe
    moe = made["all_to_all"]
    bounds = DispatchBounds(moe, on)
    first = bytes_of(moe, bounds)  # with those of a repetition
    bounds.steps = REVIEW - 1
    bytes_of(moe, bounds)
    later = bytes_of(moe, bounds)
    owners = (x[0] @ router.t()).topk(TOP_K).indices // (EXPERTS // EP)
    rows = sum(int((owners == rank).any(1).sum()) for rank in range(EP))
    best = rows * (4 * DIM * 4 + 2 * ROUTE)  # x, its gradient, the outputs and theirs; routes and their gradients
    choices = TOKENS * TOP_K * 4 * DIM * 4
    return Sent(best, first, later, bytes_of(moe), bytes_of(made["all_gather"]), choices)


def line(name: str, found: list[Sent]) -> str:
    """A row of the table: the mean over ranks, in KiB."""
    means = [sum(each) / len(found) / 1024 for each in zip(*found, strict=True)]
    return f"| {name} | {' | '.join(f'{mean:,.0f}' for mean in means)} |"


def table(pool: Pool, names: list[str]) -> str:
    """Markdown."""
    rows = [line(name, pool(EP, count, SKEWS[name])) for name in names]
    return "\n".join([HEAD, "|---" * 7 + "|", *rows])


def rows_of_models() -> str:
    """Markdown: how many rows of a token are sent, with even loads."""
    lines = [ROWS, "|---" * 8 + "|"]
    for name, (experts, top_k, ep) in MODELS.items():
        way = AllToAll(Axis(ep, 0, None, "ep"), Axis(), experts, top_k)
        best, first = (f"{sum(bound.sent):.1f}" for bound in (way.even, way.bound))
        lines.append(f"| {name} | {experts} | {top_k} | {ep} | {best} | {first} | {ep} | {top_k} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.dispatch_table", description=__doc__)
    parser.add_argument("--write", type=Path, help="the page that has the table")
    args = parser.parse_args()
    pool = start_pool()
    try:
        tables = {HEAD: table(pool, list(SKEWS)), ROWS: rows_of_models()}
    finally:
        pool.stop()
    if args.write is None:
        print("\n\n".join(tables.values()))
        return
    page = args.write.read_text()
    for head, text in tables.items():
        page = re.sub(re.escape(head) + r"\n(\|.*\n)*", lambda _, text=text: text + "\n", page)
    args.write.write_text(page)


if __name__ == "__main__":
    main()
