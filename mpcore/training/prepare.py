"""Lay a model out on a mesh, in the one order that is right.

The order, and why each step comes where it does:

 1. initialize     draws each parameter by (seed, full name); data parallelism then shards the values
 2. precision      rounds parameters, in the dtype that recompute counts; FP8 changes how linear layers multiply
 3. recompute      wraps the forward of blocks, inside the hooks of data parallelism
 4. data parallel  replaces float32 parameters by shards, the masters of what it gathers
 5. compile        compiles the forward of blocks, with recompute inside and the hooks of data parallelism outside
 6. optimizer      holds the parameters that are stepped
 7. main gradients accumulate in float32 where data parallelism doesn't, for optimizers that read them
 8. guard, offload of its state, local updates: each wraps the optimizer, whose masters begin with the values of 1
 9. pipeline       reads which linear layers must split their backward
10. load           fills parameters and state (`Run.load`)
11. offload of parameters, which takes their memory away between uses
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.fault_tolerance.replicas import compare_replicas
from mpcore.gradients import ReadsMainGradients, guard_optimizer, main_gradients
from mpcore.layers.dropout import seed_dropout
from mpcore.layers.initialize import materialize
from mpcore.layers.module import listed
from mpcore.mesh.agreement import check_same, gather_objects, raising_together
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.optim.adamw import AdamW
from mpcore.parallel import DiLoCo, convert_to_fp8, offload_optimizer, offload_parameters, shard_data_parallel
from mpcore.parallel import recompute as recompute_blocks
from mpcore.parallel.compile import compile_blocks
from mpcore.parallel.precision import round_parameters
from mpcore.pipeline.engine import Pipeline
from mpcore.pipeline.partition import join_stages
from mpcore.pipeline.schedules import Schedule
from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import is_dtensor
from mpcore.training.loss_check import Loss
from mpcore.training.numerics import InvariantStep, check_invariant, leaves_of_rank
from mpcore.training.policies import Compile, LocalUpdates, Offload, Precision, Recompute, Zero, check_policies
from mpcore.training.run import Run

OTHER_VALUES = "as each rank made its own: build the model after one torch.manual_seed on all ranks, or load weights"


def prepare(
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    *,
    blocks: Iterable[nn.Module] | Mapping[int, nn.Module],
    loss: Loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    seed: int = 0,
    initialize: bool | None = None,
    micro_batches: int = 1,
    schedule: str | Schedule = "1f1b",
    data: Zero = Zero(),
    precision: Precision | str = "float32",
    recompute: Recompute | str = "none",
    offload: Offload = Offload(),
    compile: Compile | None = None,
    local_updates: LocalUpdates | None = None,
    trace: bool = False,
    numerics: str = "default",
) -> Run:
    """Lay a model out on a mesh, make its optimizer, and return what a training loop calls.

    Args:
        model: the model; with pp > 1 this rank's stage of it, or its stages, lowest first.
        mesh: the mesh of `build_mesh` whose axes the model's layers were built with.
        blocks: the transformer blocks in the order of forward: the units of ZeRO, recompute, FP8, offload and compile.
            With pp > 1 and fragments of local updates, `{number in the whole model: block}`.
        loss: `loss(output, target)`, the SUM over the tokens of a micro-batch. Never divide it: the run divides once,
            by the tokens of the whole step on all ranks. The first step calls it once more, to refuse a mean.
        optimizer: called with the prepared model, returns its optimizer: `lambda model: AdamW(model, lr=3e-4)` or
            `lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)`.
        seed: seeds parameters and dropout.
        initialize: None: the model must be on "meta", and its values are drawn. True: draw them anew. False: keep them,
            as of a pretrained model. A drawn value depends on seed and full name, so every layout has the same.
        micro_batches: how many a step has on each rank. Gradients accumulate over them.
        schedule: the pipeline's: a name of `mpcore.pipeline.schedules.NAMES`, the path of a .csv, or a schedule.
        data: how parameters, gradients and optimizer state are sharded over the data-parallel ranks.
        precision, recompute, offload, compile, local_updates: policies. Short forms: `precision="bfloat16"`,
            `recompute="full"`.
        trace: record when each action of the pipeline runs.
        numerics: "invariant": losses, norms and weights have the same bits on every mesh of one `virtual` degree
            (docs/bitwise.md). Each forward is then of one leaf of the batch, whatever `micro_batches`.

    Returns:
        The run.

    Raises:
        ValueError: on every rank, before a collective of the model starts, if policies don't go together or with the
            mesh, ranks ask for different things, or the model can't be prepared; the message says why.

    Example:
        >>> import torch
        >>> from mpcore import ColumnParallelLinear, build_mesh, prepare
        >>> mesh = build_mesh(device_type="cpu")
        >>> with torch.device("meta"):  # `prepare` draws the values
        ...     model = torch.nn.Sequential(ColumnParallelLinear(4, 4, tp=mesh.tp))
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
    is_numbered, held = isinstance(blocks, Mapping), listed(blocks)
    numbered: Any = blocks if is_numbered else dict(enumerate(held))
    precision = precision if isinstance(precision, Precision) else Precision(precision)
    recompute = recompute if isinstance(recompute, Recompute) else Recompute(recompute)
    policies = {"data": data, "offload": offload, "compile": compile, "local_updates": local_updates}
    told = (recompute.kind, recompute.every, recompute.budget)
    asked = {"precision": precision, "recompute": told, "micro_batches": micro_batches, "seed": seed,
             "numerics": numerics, **policies}  # fmt: skip
    if numerics == "invariant":
        asked["number of threads, by which kernels choose how to sum"] = torch.get_num_threads()
    check_same("arguments of prepare", asked)
    splits = schedule.splits_backward if isinstance(schedule, Schedule) else schedule in ("zb", "zbv", "dualpipev")
    with raising_together():
        check_policies(mesh, splits, **policies)
        leaves = leaves_of_rank(numerics, mesh, micro_batches)
        if numerics == "invariant":
            check_invariant(stages, precision, policies, splits)
        _check_optimizer(optimizer)
        _check_values(stages, initialize, precision)
        modules = {module for stage in stages for module in stage.modules()}
        outside = [type(block).__name__ for block in held if block not in modules]
        if outside:
            raise ValueError(f"blocks holds a {outside[0]} that is no submodule of the model: give model.blocks")
        if local_updates is not None and local_updates.fragments > 1 and mesh.pp.size > 1 and not is_numbered:
            raise ValueError(
                f"{local_updates.fragments} fragments on {mesh.pp.size} pipeline ranks need the blocks' numbers in the "
                f"whole model: blocks={{number: block}}"
            )
    on_blocks = {"recompute": recompute.kind != "none" or recompute.budget, "precision with fp8": precision.fp8}
    on_blocks |= {"offload of parameters": offload.parameters, "compile": compile}
    idle = [name for name, wanted in on_blocks.items() if wanted]
    if idle and not sum(gather_objects(len(held), mesh.pp.group)):
        raise ValueError(f"blocks is empty, and {' and '.join(idle)} would do nothing: give blocks=model.blocks")

    _check_names(stages, mesh, drawn=initialize is not False)
    if initialize is False:  # before data parallelism shards the values: each rank would give its own part
        with raising_together():
            joined = stages[0] if len(stages) == 1 else join_stages(stages)
        compare_replicas(joined, mesh, OTHER_VALUES)
    whole, masters = lay_out(stages, mesh, held, seed=seed, initialize=initialize is not False, data=data,
                             precision=precision, recompute=recompute, compile=compile)  # fmt: skip
    made = optimizer(whole)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer(model) returned {made!r:.60}: return the torch.optim.Optimizer that it makes")
    stale = {p for group in made.param_groups for p in group["params"]} - set(whole.parameters())
    if stale:
        raise ValueError(
            f"the optimizer holds {len(stale)} parameters that the prepared model has not: make it from the argument, "
            f"optimizer=lambda model: AdamW(model.parameters(), lr=...)"
        )
    with raising_together():
        if masters and not (isinstance(made, AdamW) and made.masters):
            raise ValueError(
                f"{type(made).__name__} keeps no float32 masters of {len(masters)} {precision.param_dtype} parameters: "
                f"take mpcore.AdamW or mpcore.Muon; or Zero(1) on several data ranks, whose shards are the masters; or "
                f"Precision({precision.dtype!r}, autocast=True), with float32 parameters"
            )
    if masters:
        main_gradients(whole, masters)
    elif precision.autocast_dtype and isinstance(made, AdamW) and not any(map(is_dtensor, whole.parameters())):
        main_gradients(whole)  # data parallelism accumulates in float32 by itself; torch's optimizers read .grad alone
    if not isinstance(made, AdamW):  # mpcore's optimizers guard themselves
        guard_optimizer(made, stages)
    if offload.optimizer:
        offload_optimizer(made)
    for p in (p for group in made.param_groups for p in group["params"] if p in masters):
        made.state[p]["master"] = masters[p]
    if local_updates is not None:
        made = DiLoCo(made, whole, mesh, blocks=numbered, **asdict(local_updates))
    run = Run(whole, stages, mesh, made, precision=precision, offload=offload, seed=seed)
    summed, after = run.scaled(loss), None
    if numerics == "invariant":
        run.invariant = InvariantStep(stages, mesh, made)
        summed, after = run.invariant.watch_loss(summed), run.invariant.take
    run.pipeline = Pipeline(stages, mesh, leaves, summed, schedule, trace=trace, after_backward=after)
    if offload.parameters:
        run.offloaded = offload_parameters(held, made)
    return run


def lay_out(
    stages: Sequence[nn.Module], mesh: Mesh, blocks: Sequence[nn.Module], *, seed: int, initialize: bool, data: Zero,
    precision: Precision, recompute: Recompute, compile: Compile | None,
) -> tuple[nn.Module, dict[nn.Parameter, Tensor]]:  # fmt: skip
    """Do the steps of `prepare` that change the model: draw values, FP8, recompute, shard over data, compile.

    Args:
        stages: this rank's stages.
        initialize: draw all parameters. Without it they may stay on "meta".
        mesh, blocks, seed, data, precision, recompute, compile: as of `prepare`.

    Returns:
        The only stage, or all stages as one module; and the float32 masters of its trained 16-bit parameters.

    Raises:
        ValueError: on every rank, as the steps do.
    """
    whole = stages[0] if len(stages) == 1 else join_stages(stages)
    if initialize:
        materialize(whole, seed, mesh.device)
    else:
        seed_dropout(whole, seed)
    masters = {} if precision.param_dtype is None else round_parameters(whole, precision.param_dtype)
    with raising_together():  # blocks of one rank alone may be refused, as for a budget that they can't keep
        if precision.fp8:
            convert_to_fp8(blocks)
        options: dict[str, Any] = {"preserve_rng_state": recompute.preserve_rng_state}
        if recompute.budget is not None:
            options |= {"budget": recompute.budget, "example": recompute.example, "axes": (mesh.tp, mesh.data)}
        half = precision.autocast_dtype
        with torch.autocast("cpu", half, enabled=half is not None):
            recompute_blocks(blocks, recompute.kind, every=recompute.every, **options)
    gathered = data.param_dtype
    if data.stage and mesh.data.size > 1:
        gathered = gathered or precision.param_dtype
    for p, master in masters.items():
        p.data = master  # to be sharded
    shard_data_parallel(stages, mesh, blocks, zero=data.stage, replicate=data.replicate,
                        param_dtype=gathered, reduce_dtype=data.reduce_dtype)  # fmt: skip
    if precision.param_dtype is not None:
        masters = round_parameters(whole, precision.param_dtype)  # those that are no shards
    if compile is not None:
        compile_blocks(blocks, compile.backend)
    return whole, masters


def _check_optimizer(optimizer: object) -> None:
    """Refuse what doesn't make an optimizer when it is called with the model."""
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    kind: Any = type(optimizer) if is_made else getattr(optimizer, "func", optimizer)  # the class within a partial
    name = kind.__name__ if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) else ""
    takes_model = name and issubclass(kind, ReadsMainGradients)
    if is_made or not callable(optimizer) or (name and not takes_model):
        what = f"a {name} that exists already" if is_made else repr(optimizer)[:60]
        raise ValueError(
            f"optimizer is {what}, and prepare calls optimizer(model) when the parameters are sharded: give "
            f"optimizer=lambda model: {name or 'AdamW'}({'model' if takes_model else 'model.parameters()'}, lr=...)"
        )


def _check_names(stages: Sequence[nn.Module], mesh: Mesh, drawn: bool) -> None:
    """Refuse two pipeline ranks that call different parameters by one name: they would be drawn with the same values.

    If values are kept, refuse two that have all their names in common: each was given the whole model.
    """
    tied = {mesh.pp, mesh.ends}
    held = [each for stage in stages for each in declarations(stage)]
    own = list(dict.fromkeys(name for name, _, sharding in held if tied.isdisjoint(sharding.partial)))
    holder: dict[str, int] = {}
    ranks = gather_objects(own, mesh.pp.group)
    alike = any(set(one) == set(other) for one, other in itertools.combinations(ranks, 2) if one)
    for rank, names in enumerate(ranks):
        for name in names if drawn or alike else ():
            if name in holder:
                raise ValueError(
                    f"pipeline ranks {holder[name]} and {rank} both hold a parameter {name}. If each has the whole "
                    f"model, cut it with pipeline_stages(model, mesh, ..); call parameters of a stage as in the "
                    f"whole model, such as ModuleDict({{str(i): block}}) with i the block's number there; declare one "
                    f"tied weight with add_partial(module, leaf, mesh.ends)"
                )
            holder[name] = rank


def _check_values(stages: Sequence[nn.Module], initialize: bool | None, precision: Precision) -> None:
    """Refuse to guess whether a model's values are to be kept, and to train parameters without values or in less."""
    parameters = [each for stage in stages for each in stage.named_parameters()]
    narrow = [f"{name} is {p.dtype}" for name, p in parameters if p.is_floating_point() and p.dtype != torch.float64]
    if narrow and precision.dtype in ("float64", "fp64", torch.float64):
        raise ValueError(f"precision is float64, but {narrow[0]}: build the model in float64, or call model.double()")
    named = [(name, p.is_meta) for name, p in parameters]
    real, meta = ([name for name, is_meta in named if is_meta == wanted] for wanted in (False, True))
    if initialize is None and real:
        raise ValueError(
            f"{real[0]} has a value already: initialize=False keeps the model's values, initialize=True draws them "
            f'anew; or build the model under torch.device("meta")'
        )
    if initialize is False and meta:
        raise ValueError(f'initialize=False keeps values, and {meta[0]} is on "meta", without one: load before prepare')
