"""The tables of docs/memory.md, measured: `python -m tests.memory_tables --write docs/memory.md`."""

# ruff: noqa: E501  (rows of the page's tables are one line each)
from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from examples.gpt.plan import build
from mpcore import materialize, reduce_gradients, vocab_parallel_cross_entropy
from mpcore.memory_footprint import StorageTracker, storage_bytes
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.recompute import KINDS, recompute
from mpcore.pipeline import Pipeline
from mpcore.sharding.local import is_dtensor, local_tensor, reshard
from mpcore.tools.analysis.counts import Ledger
from mpcore.tools.analysis.dry_run import dry_run
from tests.pool import Pool, mesh
from tests.test_memory import FLAGS, LAYOUTS, measure, world
from tests.theory import zero_bytes

CONFIG = GPTConfig(vocab_size=64, seq_len=16, layers=4, d_model=32, heads=4, d_ff=48, dropout=0.1)
MICRO_BATCHES = 3
ERROR = re.compile(r"[+-]([\d.]+)% \|$", re.MULTILINE)


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
        whole = [p for p in model.parameters() if not is_dtensor(p)]
        unsummed = [p.grad for p in whole if p.grad is not None]
        last.append((storage_bytes(whole), storage_bytes(unsummed)))
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
    within = {"whole_parameters": last[-1][0], "whole_gradients": last[-1][1]}
    sent = {kind: count.bytes for (axis, kind), count in ledger.counts.items() if axis in ("dp", "data", "world")}
    exchanged = sent.pop(
        "all_to_all", 0
    )  # gloo's reduce-scatter; the first and the last rank leave out their own shard
    own = exchanged // max(dp - 1, 1) if on.dp.rank in (0, dp - 1) else 0
    sent["reduce_scatter"] = sent.get("reduce_scatter", 0) + exchanged + own
    sent["all_gather"] = sent.get("all_gather", 0) + sent.pop("broadcast", 0)
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
        with StorageTracker() as storages:
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


def saved_bytes(kind: str, tp: int, sp: bool) -> int:
    """The formula of a block's saved bytes in float32."""
    B, T, D, F, H = 2, CONFIG.seq_len, CONFIG.d_model, CONFIG.d_ff, CONFIG.heads
    width = 4 * B * T
    stream = width * D // (tp if sp else 1)
    if kind == "full":
        return stream
    if kind == "selective":
        return 2 * stream + width * (3 * D + 2 * F) // tp + (2 * width * D if sp else 0)
    return width * (9 * D // 2 + 2) // (tp if sp else 1) + 2 * width * D + width * (6 * D + 4 * F + H) // tp


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([number(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(cell: object) -> str:
    """Integers with commas."""
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def estimates(pool: Pool, layouts: Sequence[tuple[dict[str, int], list[str]]] = LAYOUTS) -> str:
    """Estimate against measured bytes; of the ranks the one with the largest error."""
    rows = []
    for sizes, flags in layouts:
        found = []
        for rank, got in enumerate(pool(world(sizes), measure, sizes, flags)):
            plan, held = dry_run(build, [*FLAGS, *flags], rank, **sizes).total, sum(got.values())
            found.append((abs(plan / held - 1), plan, held))
        _, plan, held = max(found)
        where = " ".join(f"{name} {size}" for name, size in sizes.items()) or "one process"
        rows.append([where, " ".join(flags), plan, held, f"{plan / held - 1:+.2%}"])
        print(*rows[-1], flush=True)
    return table(["layout", "flags", "estimate", "measured", "error"], rows)


def stages_of_zero(pool: Pool, sizes: Iterable[int] = (1, 2, 4), stages: Iterable[int] = range(4)) -> str:
    """Bytes sent and held by each stage."""
    rows = []
    for dp in sizes:
        for zero in stages if dp > 1 else (0,):
            got = pool(dp, run_stage_of_zero, zero, dp)[0]
            want = zero_bytes(got["psi"], zero, MICRO_BATCHES) if dp > 1 else {}
            want["all_reduce"] = want.get("all_reduce", 0) + (got["flags"] if dp > 1 else 0)
            kinds = ("all_reduce", "all_gather", "reduce_scatter")
            sent = [f"{number(got.get(kind, 0))} / {number(want.get(kind, 0))}" for kind in kinds]
            held = ("parameters", "gradients", "optimizer", "whole_parameters", "whole_gradients")
            rows.append([dp, zero, *sent, *(got[what] for what in held)])
            print(*rows[-1], flush=True)
    kinds = [f"{kind}, sent / theory" for kind in ("all-reduce", "all-gather", "reduce-scatter")]
    held = ["parameters", "gradients", "optimizer", "full parameters", "full gradients"]
    return table(["dp", "zero", *kinds, *held], rows)


def recomputations(pool: Pool, layouts: Iterable[tuple[int, bool]] = ((1, False), (2, False), (2, True))) -> str:
    """Saved bytes of a block by kind."""
    rows = []
    for tp, sp in layouts:
        for kind, (each, equal) in pool(tp, run_recomputation, tp, sp)[0].items():
            where = f"tp {tp}{' sequence parallel' if sp else ''}"
            rows.append([where, kind, each, saved_bytes(kind, tp, sp), "yes" if equal else "NO"])
            print(*rows[-1], flush=True)
    return table(["layout", "kind", "saved per block, bytes", "formula, bytes", "gradients bitwise equal"], rows)


TEXT = """# Memory: the estimate, the stages of ZeRO, recomputation

`python -m tests.memory_tables --write docs/memory.md` measures these tables on CPU ranks and writes this page. All
sizes are bytes on one rank.

## The estimate against what a run holds

The table compares the estimate of `mpcore memory --cpu examples.gpt.plan:build` with the bytes that a rank of the example
holds in its second step, on the same layout and with the same flags. The estimate and the measurement count
parameters, gradients, optimizer state, and the peak of activations, buffers and messages. Each row shows the rank with
the largest error. The largest error of all rows is {largest}. Each row's flags follow `{flags}`.

- Most errors are negative, because the estimate omits the tokens and targets of a batch.
- With data parallelism some errors are positive, because the estimate adds peaks that may occur at different times.

{estimates}

## The stages of ZeRO

The model is a GPT with {psi} bytes of float32 parameters (psi), trained with AdamW and {micro_batches} micro-batches
per step. Each stage communicates these bytes over the data-parallel ranks; a collective counts the bytes of its full
tensor:

| stage | per step | per micro-batch |
| --- | --- | --- |
| 0 | all-reduce of psi, and of 4 bytes per tensor, which tell whether the tensor has a gradient | |
| 1 | all-gather of psi, reduce-scatter of psi | |
| 2 | all-gather of psi | reduce-scatter of psi |
| 3 | | two all-gathers of psi, reduce-scatter of psi |

An all-reduce costs as much as an all-gather and a reduce-scatter together. So with one micro-batch stages 0, 1 and 2
cost 2 psi, and stage 3 costs 3 psi.

The columns of the next table:

- *all-reduce, all-gather, reduce-scatter*: the bytes per step, counted by the ledger / predicted by the table above. On
  CPUs an all-gather is one broadcast per rank, and a reduce-scatter is an all-to-all.
- *parameters, gradients, optimizer*: the bytes that a rank holds after a step. From stage 1 on, parameters and gradients
  are psi / dp each, and the optimizer state is 2 psi / dp.
- *full parameters, full gradients*: the bytes of full tensors that a rank holds when it computes the loss of the last
  micro-batch. From stage 1 on, a rank holds them in addition to its shards. Stages 0, 1 and 2 hold all parameters.
  Stages 0 and 1 also hold gradients that are not yet reduced.

{zero}

## Recomputation

Each kind of recomputation keeps other tensors of a block for backward. B samples have T tokens each; D is the width, F
the hidden width of the MLP, H the number of heads, and t the tp size. s is t with sequence parallelism, otherwise 1.

| kind | a block keeps | bytes in float32 |
| --- | --- | --- |
| full | its output, which is the next block's input | 4 B T D / s |
| selective | also the sum after attention and the outputs of matrix products; with sequence parallelism also the two all-gathered inputs | 4 B T (2 D / s + (3 D + 2 F) / t), with sequence parallelism + 8 B T D |
| none | also outputs and normalized inputs of norms, dropout masks (one byte per element), rotated q and k, attention's output and log-sum-exp, and in the MLP the activated gate and its product with up | 4 B T ((4.5 D + 2) / s + 2 D + (6 D + 4 F + H) / t) |

- With selective, if backward doesn't need an output, one element of it (4 bytes) stays in memory. The formula omits
  these bytes.
- The formula of none is for the CPU operators. The fused GPU kernels keep neither normalized inputs, nor masks, nor the
  activated gate.

The table below shows the measured bytes per block (the mean of four blocks), and whether all gradients are bitwise
equal to the gradients without recomputation. B = 2, T = 16, D = 32, F = 48, H = 4, dropout 0.1.

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
    largest = max(ERROR.findall(parts["estimates"]), key=float)
    page = TEXT.format(
        flags=" ".join(FLAGS), psi=number(psi), micro_batches=MICRO_BATCHES, largest=f"{largest} %", **parts
    )
    if args.write:
        args.write.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
