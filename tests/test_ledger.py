"""What is counted from real runs against theory and against the plan, which runs nothing."""

from __future__ import annotations

import pytest
import torch

from examples.gpt.plan import build
from examples.gpt.pretrain import Trainer, parse
from mpcore import Mesh
from mpcore.tools.analysis.counts import CommunicationCounter
from mpcore.tools.analysis.dry_run import dry_run
from tests.pool import mesh
from tests.quick import some

FLAGS = "--layers 4 --d-model 16 --heads 4 --d-ff 24 --seq-len 16 --global-batch 8 --dropout 0.1".split()  # noqa: SIM905


def counts(ledger: CommunicationCounter) -> dict:
    """Calls and bytes over each axis. Bytes that a rank gets are those that another one sends."""
    return {key: (count.calls, count.bytes) for key, count in ledger.counts.items() if key[0] != "world"}


def as_on_a_gpu(found: dict, on: Mesh) -> dict:
    """Counts of a run on gloo, with the broadcasts and exchanges of shards as the collectives that they carry out."""
    size, rank = on.data.size, on.data.rank
    for axis in {axis for axis, kind in found if kind == "broadcast"} & {"dp", "data", "edp"}:
        (calls, total), (exchanges, sent) = found.pop((axis, "broadcast")), found.pop((axis, "all_to_all"))
        own = sent // (size - 1) if rank in (0, size - 1) else 0  # the first and the last rank leave out their shard
        for kind, more in (("all_gather", (calls // size, total)), ("reduce_scatter", (exchanges, sent + own))):
            before = found.get((axis, kind), (0, 0))
            found[axis, kind] = (before[0] + more[0], before[1] + more[1])
    return found


def check_real(sizes: dict, flags: list[str]) -> dict:
    from mpcore.gradients import reduce_gradients

    on = mesh(**sizes)
    trainer = Trainer(parse([*FLAGS, *flags]), on)
    trainer.step()  # with the pipeline's dry run and the first connections
    tokens, targets, arguments = trainer.batch(trainer.train_samples, trainer.share(0))
    if trainer.config.moe:
        arguments["loss_factor"] = torch.ones_like(arguments["samples"], dtype=torch.float64)
    for dispatch in trainer.run.bounds.dispatches:  # as in a step of the run
        dispatch.is_bounded = True
    with CommunicationCounter(on) as ledger:
        trainer.run.pipeline.forward_backward(tokens, targets, **arguments)
        reduce_gradients(trainer.model)
    if on.pp.size > 1:  # the loss is told to all stages: no part of what is planned
        count = ledger.counts["pp", "all_reduce"]
        assert (count.calls, count.bytes) == (1, 8)
        del ledger.counts["pp", "all_reduce"]
    return as_on_a_gpu(counts(ledger), on)


MOE = "--preset tiny-moe --set moe.every=2 --set moe.d_ff=8"
SENT = "--preset tiny-moe --set moe.dispatch=all_to_all"


@pytest.mark.parametrize(("sizes", "flags"), some(
    ({"cp": 2, "tp": 2}, "--sequence-parallel --cp-kind zigzag"),
    ({"pp": 2, "dp": 2}, "--schedule interleaved --set tie_embeddings=true"),
    of=[
        ({"dp": 4, "ep": 2}, MOE), ({"tp": 2, "pp": 2}, "--preset tiny-mla --sequence-parallel --recompute full"),
        ({"dp": 4, "ep": 2}, f"{MOE} --recompute budget=0.7"), ({"tp": 2, "dp": 2}, "--recompute full"),
        ({"tp": 2, "pp": 2}, "--sequence-parallel --recompute selective --schedule zb"),
        ({"tp": 2, "pp": 2}, "--sequence-parallel --recompute selective"),
        ({"tp": 2, "pp": 2}, "--recompute full --schedule zb"),
        ({"pp": 2, "dp": 2}, "--schedule zbv --set tie_embeddings=true"),
        ({"pp": 2, "dp": 2}, "--schedule zbv --zero 2"),
        ({"pp": 2, "dp": 2}, "--schedule dualpipev --zero 3 --recompute full --global-batch 16"),
        *(({"cp": 4}, f"--cp-kind {kind}") for kind in ("ring", "allgather", "alltoall")),
        ({"cp": 2, "pp": 2}, "--recompute full"), ({"tp": 4}, "--preset tiny-mla --recompute full"),
        ({"tp": 2, "cp": 2}, "--preset tiny-mla --sequence-parallel --cp-kind alltoall"),
        ({"tp": 2, "dp": 2}, "--preset tiny-mla"),
        ({"tp": 2, "dp": 2, "ep": 2, "etp": 1}, f"{SENT} --set moe.capacity_factor=1.5"),
        ({"tp": 2, "dp": 2, "ep": 2}, f"{SENT} --experts 16 --set moe.top_k=1"),
    ],
), ids=str)  # fmt: skip
def test_the_plan_counts_what_the_run_sends(ranks, request, sizes, flags):
    real = ranks(4, check_real, sizes, flags.split())
    for rank in range(4) if request.node.get_closest_marker("slow") else (0, 3):
        planned = dry_run(build, [*FLAGS, *flags.split()], rank, **sizes)
        assert counts(planned.ledger) == real[rank], f"rank {rank}"
