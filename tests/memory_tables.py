"""The tables of docs/memory.md, measured: `python -m tests.memory_tables --write docs/memory.md`."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from examples.gpt.model import GPT, GPTConfig
from examples.gpt.plan import build
from mpcore import materialize, reduce_gradients, vocab_parallel_cross_entropy
from mpcore.data_parallel import reshard, shard_data_parallel
from mpcore.dry_run import dry_run
from mpcore.ledger import Ledger, zero_bytes
from mpcore.pipeline import Pipeline
from mpcore.recompute import KINDS, recompute
from mpcore.sharding import local_tensor
from mpcore.storages import Storages, storage_bytes
from tests.pool import Pool, mesh
from tests.test_memory import FLAGS, LAYOUTS, measure

CONFIG = GPTConfig(vocab_size=64, seq_len=16, layers=4, d_model=32, heads=4, d_ff=48, dropout=0.1)
MICRO_BATCHES = 3


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """The sum over tokens."""
    return vocab_parallel_cross_entropy(logits, target, reduction="sum")


def run_stage_of_zero(zero: int, dp: int) -> dict[str, int]:
    """One rank's bytes sent over data in the second step, by kind, and held after it."""
    on = mesh(dp=dp)
    model = materialize(GPT(CONFIG, on, device="meta"), seed=1)
    whole = sum(p.nbytes for p in model.parameters())
    shard_data_parallel(model, on, model.blocks.values(), zero=zero)  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters())
    last: list[tuple[int, int]] = []

    def noted(logits: Tensor, target: Tensor) -> Tensor:
        last.append((parameters(), gradients()))
        return loss(logits, target)

    def parameters() -> int:
        return storage_bytes(local_tensor(p) for p in model.parameters())

    def gradients() -> int:
        return storage_bytes(local_tensor(p.grad) for p in model.parameters() if p.grad is not None)

    pipeline = Pipeline(model, on, MICRO_BATCHES, noted)
    x = torch.randint(64, (MICRO_BATCHES, 16))
    for i in range(2):
        with Ledger(on) as ledger:
            pipeline.forward_backward(x, x, samples=torch.arange(MICRO_BATCHES))
            reduce_gradients(model)
        summed = gradients()
        optimizer.step()
        if i == 0:
            optimizer.zero_grad()
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    reshard(model)
    within = {"parameters_within": last[-1][0], "gradients_within": last[-1][1]}
    sent = {kind: count.bytes for (axis, kind), count in ledger.counts.items() if axis in ("dp", "data", "world")}
    held = {"parameters": parameters(), "gradients": summed, "optimizer": storage_bytes(map(local_tensor, states))}
    return {"psi": whole, "flags": 4 * len(list(model.parameters())), **sent, **held, **within}


def run_recomputation(tp: int, sp: bool) -> dict[str, tuple[int, bool]]:
    """For each kind a block's saved bytes, and whether all gradients are bitwise those without."""
    on = mesh(tp=tp)
    found, want = {}, None
    for kind in KINDS:
        model = materialize(GPT(CONFIG, on, device="meta", sequence_parallel=sp), seed=1)
        assert isinstance(model, GPT)
        assert model.rope is not None
        recompute(model.blocks.values(), kind, preserve_rng_state=False)  # type: ignore[union-attr]
        g = torch.Generator().manual_seed(2)
        x = torch.randn(2, 16 // tp if sp else 16, 32, generator=g, requires_grad=True)
        rotary = model.rope(torch.arange(16), torch.float32)
        samples = torch.arange(2)
        with Storages() as storages:
            y = x
            for block in model.blocks.values():  # type: ignore[union-attr]
                y = block(y, rotary=rotary, samples=samples)
        gc.collect()
        held = storages.held()
        y.square().sum().backward()
        gradients = [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        want = want or gradients
        equal = all(torch.equal(a, b) for a, b in zip(gradients, want, strict=True))
        found[kind] = (held // CONFIG.layers, equal)
    return found


def saved_bytes(kind: str, tp: int, sp: bool) -> str:
    """The formula of a block's saved bytes in float32, and what it gives."""
    sbh, D, F = 2 * 16 * 32, 32, 48
    stream = 4 * sbh // (tp if sp else 1)
    if kind == "full":
        return str(stream)
    if kind == "selective":
        return str(2 * stream + 4 * 2 * 16 * (3 * D + 2 * F) // tp + (2 * 4 * sbh if sp else 0))
    return ""


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def estimates(pool: Pool) -> str:
    """Estimate against measured bytes; of the ranks the one with the largest error."""
    rows = []
    for sizes, flags in LAYOUTS:
        found = []
        for rank, got in enumerate(pool(torch.Size(sizes.values()).numel(), measure, sizes, flags)):
            plan, held = dry_run(build, [*FLAGS, *flags], rank, **sizes).total, sum(got.values())
            found.append((abs(plan / held - 1), plan, held))
        _, plan, held = max(found)
        where = " ".join(f"{name} {size}" for name, size in sizes.items()) or "one process"
        rows.append([where, " ".join(flags), plan, held, f"{plan / held - 1:+.2%}"])
        print(*rows[-1], flush=True)
    return table(["layout", "flags", "estimate", "measured", "error"], rows)


def stages_of_zero(pool: Pool) -> str:
    """Bytes sent and held by each stage."""
    rows = []
    for dp in (2, 4):
        for zero in range(4):
            got = pool(dp, run_stage_of_zero, zero, dp)[0]
            want = zero_bytes(got["psi"], zero, MICRO_BATCHES)
            want["all_reduce"] = want.get("all_reduce", 0) + (got["flags"] if zero == 0 else 0)
            kinds = ("all_reduce", "all_gather", "reduce_scatter")
            sent = [f"{got.get(kind, 0)} / {want.get(kind, 0)}" for kind in kinds]
            held = ("parameters", "gradients", "optimizer", "parameters_within", "gradients_within")
            rows.append([dp, zero, *sent, *(got[what] for what in held)])
            print(*rows[-1], flush=True)
    kinds = [f"{kind}, sent / theory" for kind in ("all-reduce", "all-gather", "reduce-scatter")]
    held = ["parameters", "gradients", "optimizer", "parameters within", "gradients within"]
    return table(["dp", "zero", *kinds, *held], rows)


def recomputations(pool: Pool) -> str:
    """Saved bytes of a block by kind."""
    rows = []
    for tp, sp in ((1, False), (2, False), (2, True)):
        for kind, (each, equal) in pool(tp, run_recomputation, tp, sp)[0].items():
            where = f"tp {tp}{' sequence parallel' if sp else ''}"
            rows.append([where, kind, each, saved_bytes(kind, tp, sp), "yes" if equal else "NO"])
            print(*rows[-1], flush=True)
    return table(["layout", "kind", "saved a block", "formula", "bitwise as none"], rows)


TEXT = """# Memory: estimates, stages of ZeRO, recomputation

Made by `python -m tests.memory_tables --write docs/memory.md` on CPU ranks. All sizes are in bytes.

## The estimate against what a run holds

`python -m mpcore.memory` against parameters, gradients, optimizer state and the largest set of activations, buffers and
messages that a rank of the example really holds in its second step. Of the ranks of a layout the one with the largest
error. The flags are those of the example, after `{flags}`.

A batch's tokens and targets, which a run holds and the estimate leaves out, are most of the errors.

{estimates}

## The stages of ZeRO

A model of {psi} bytes of float32 parameters, {micro_batches} micro-batches a step, one rank: what its collectives over
data send in a step, by the ledger, and what theory says; what it holds after the step; and what of parameters and of
unsummed gradients it sees whole within the step, at the loss of the last micro-batch (shards of stage 3, and summed
gradients of stage 2, count as after the step). The all-reduce of stage 0 takes 4 bytes of each tensor besides, which
say whether it has a gradient.

{zero}

## Recomputation

What four blocks leave for backward, for each block. B = 2 samples of T = 16 tokens, width D = 32, hidden width F = 48,
float32, dropout 0.1. Full keeps a block's output, which is the next one's input, 4 B T D (a tp-th with sequence
parallel). Selective keeps besides what products and collectives gave, 4 B T (3 D + 2 F) / tp + 4 B T D, and with
sequence parallel both gathered inputs, 8 B T D; and a shell of one element for each result that nothing needs.

{recompute}
"""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.memory_tables", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the page goes; else it is printed")
    args = parser.parse_args()
    pool = Pool()
    try:
        parts = {"zero": stages_of_zero(pool), "recompute": recomputations(pool), "estimates": estimates(pool)}
    finally:
        pool.stop()
    psi = 4 * sum(p.numel() for p in GPT(CONFIG, device="meta").parameters())
    page = TEXT.format(flags=" ".join(FLAGS), psi=psi, micro_batches=MICRO_BATCHES, **parts)
    if args.write:
        args.write.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
