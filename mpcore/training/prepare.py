"""Lay a model out on a mesh, in the one order that is right.

The order, and why each step comes where it does:

 1. initialize     draws each parameter by (seed, full name); sharding over data must find the values there
 2. FP8            changes how linear layers multiply, which recompute counts and compile sees
 3. recompute      wraps the forward of blocks, inside the hooks of data parallelism
 4. data parallel  replaces parameters by shards; whatever holds parameters comes afterwards
 5. compile        makes the forward of blocks, with recompute inside and the hooks of data parallelism outside
 6. optimizer      holds the parameters that are stepped
 7. main gradients accumulate in float32 where data parallelism doesn't, for optimizers that read them
 8. guard, offload of its state, local updates: each wraps the optimizer
 9. pipeline       reads which linear layers must split their backward
10. load           fills parameters and state (`Run.load`)
11. offload of parameters, which takes their memory away between uses
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.gradients.accumulate import main_gradients
from mpcore.layers.dropout import seed_dropout
from mpcore.layers.initialize import materialize
from mpcore.layers.module import listed
from mpcore.mesh.agreement import check_same, raise_together
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.optim.adamw import AdamW
from mpcore.parallel.compile import compile_blocks
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.local_updates import DiLoCo
from mpcore.parallel.offload import offload_optimizer, offload_parameters
from mpcore.parallel.precision import convert_to_fp8
from mpcore.parallel.recompute import recompute as recompute_blocks
from mpcore.pipeline.engine import Pipeline
from mpcore.pipeline.partition import join_stages
from mpcore.pipeline.schedules import Schedule
from mpcore.sharding.local import is_dtensor
from mpcore.training.policies import (
    Compile,
    LocalUpdates,
    Offload,
    Precision,
    Recompute,
    Zero,
    check_policies,
)
from mpcore.training.run import Run

Loss = Callable[[Any, Tensor], Tensor]


def prepare(
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    *,
    blocks: Iterable[nn.Module],
    loss: Loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    seed: int = 0,
    initialize: bool = True,
    micro_batches: int = 1,
    schedule: str | Schedule = "1f1b",
    data: Zero = Zero(),
    precision: Precision | str = "float32",
    recompute: Recompute | str = "none",
    offload: Offload = Offload(),
    compile: Compile | None = None,
    local_updates: LocalUpdates | None = None,
    trace: bool = False,
) -> Run:
    """Lay a model out on a mesh, make its optimizer, and return what a training loop calls.

    It has more than ten parameters because it is the one place that knows the order of all that they ask for; each
    policy is one frozen object, and every one but `blocks`, `loss` and `optimizer` has a default.

    Args:
        model: the model, on "meta" or not; with pp > 1 this rank's stage of it, or its stages, lowest first.
        mesh: of `build_mesh`, the one that the model's layers were made with.
        blocks: the transformer blocks in the order of forward: the units of ZeRO, recompute, FP8, offload and compile.
        loss: `loss(output, target)`, the SUM over the tokens of a micro-batch. Never divide it: the run divides once,
            by the tokens of the whole step on all ranks.
        optimizer: makes the optimizer of the prepared model, such as `lambda model: AdamW(model, lr=3e-4)` or
            `lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)`.
        seed: of parameters and dropout.
        initialize: draw the parameters anew. False keeps the values that they have, as of a pretrained model.
        micro_batches: how many a step has on each rank. Gradients accumulate over them.
        schedule: of the pipeline: a name of `mpcore.pipeline.schedules.NAMES`, the path of a .csv, or a schedule.
        data: how parameters, gradients and optimizer state are sharded over the data-parallel ranks.
        precision: a `Precision`, or its dtype.
        recompute: a `Recompute`, or its kind.
        offload, compile, local_updates: see the policies.
        trace: record when each action of the pipeline runs.

    Returns:
        The run.

    Raises:
        ValueError: on every rank, before a collective of the model starts, if policies don't go together or with the
            mesh, ranks ask for different things, or a step of the order refuses the model.

    Example:
        >>> import torch
        >>> from mpcore import ColumnParallelLinear, build_mesh, prepare
        >>> mesh = build_mesh(device_type="cpu")
        >>> model = torch.nn.Sequential(ColumnParallelLinear(4, 4, tp=mesh.tp))
        >>> run = prepare(
        ...     model, mesh, blocks=model, loss=lambda y, target: (y - target).square().sum(),
        ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ... )
        >>> mean = run.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
        >>> run.optimizer_step().taken
        True
    """
    check_mesh(mesh)
    stages = [model] if isinstance(model, nn.Module) else list(model)
    blocks = listed(blocks)
    precision = precision if isinstance(precision, Precision) else Precision(precision)
    recompute = recompute if isinstance(recompute, Recompute) else Recompute(recompute)
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ValueError(
            f"optimizer is a {kind} that exists already, and sharding replaces its parameters: give what makes it, "
            f"lambda model: {kind}(...)"
        )
    asked = {"data": data, "precision": precision, "micro_batches": micro_batches, "seed": seed}
    asked |= {"offload": offload, "compile": compile, "local_updates": local_updates}
    asked |= {"recompute": (recompute.kind, recompute.every, recompute.budget)}
    check_same("arguments of prepare", asked)
    error = None
    try:
        check_policies(mesh, data, offload, local_updates, _splits_backward(schedule))
    except ValueError as problem:
        error = problem
    raise_together(error)

    whole = stages[0] if len(stages) == 1 else join_stages(stages)
    lay_out(stages, mesh, whole=whole, blocks=blocks, seed=seed, initialize=initialize, data=data,
            precision=precision, recompute=recompute, compile=compile)  # fmt: skip
    made = optimizer(whole)
    if precision.autocast is not None and isinstance(made, AdamW) and not any(map(is_dtensor, whole.parameters())):
        main_gradients(whole)  # data parallelism accumulates in float32 by itself; torch's optimizers read .grad alone
    if offload.optimizer:
        offload_optimizer(made)
    if local_updates is not None:
        options = {"every": local_updates.every, "lr": local_updates.lr, "momentum": local_updates.momentum}
        options |= {"nesterov": local_updates.nesterov, "fragments": local_updates.fragments}
        made = DiLoCo(made, whole, mesh, **options)
    run = Run(whole, stages, mesh, made, precision=precision, offload=offload, seed=seed)
    run.pipeline = Pipeline(stages, mesh, micro_batches, run.scaled(loss), schedule, trace=trace)
    if offload.parameters:
        run.offloaded = offload_parameters(blocks, made)
    return run


def lay_out(
    stages: Sequence[nn.Module],
    mesh: Mesh,
    *,
    whole: nn.Module,
    blocks: Sequence[nn.Module],
    seed: int,
    initialize: bool,
    data: Zero,
    precision: Precision,
    recompute: Recompute,
    compile: Compile | None,
) -> None:
    """Take the steps of the order that change the model: `prepare`'s first five, and all that a dry run takes.

    Args:
        stages: this rank's stages.
        whole: the stages as one module (`join_stages`), or the only one.
        blocks, mesh, seed, initialize, data, precision, recompute, compile: as of `prepare`. Without `initialize`
            parameters may stay on "meta".

    Raises:
        ValueError: on every rank, as the steps do.
    """
    if initialize:
        materialize(whole, seed, mesh.device)
    else:
        seed_dropout(whole, seed)
    error = None
    try:
        if precision.fp8:
            for stage in stages:
                convert_to_fp8(stage)
        options: dict[str, Any] = {"preserve_rng_state": recompute.preserve_rng_state}
        if recompute.budget is not None:
            options |= {"budget": recompute.budget, "example": recompute.example, "axes": (mesh.tp, mesh.data)}
        with torch.autocast("cpu", precision.autocast, enabled=precision.autocast is not None):
            recompute_blocks(blocks, recompute.kind, every=recompute.every, **options)
    except ValueError as problem:  # of these blocks alone, such as a budget that is out of their reach
        error = problem
    raise_together(error)
    shard_data_parallel(stages, mesh, blocks, zero=data.stage, replicate=data.replicate,
                        param_dtype=data.param_dtype, reduce_dtype=data.reduce_dtype)  # fmt: skip
    if compile is not None:
        compile_blocks(blocks, compile.backend)


def _splits_backward(schedule: str | Schedule) -> bool:
    return schedule.splits_backward if isinstance(schedule, Schedule) else schedule in ("zb", "zbv", "dualpipev")
