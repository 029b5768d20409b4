"""Lay a model out on a mesh, in the only correct order.

The order, with the reason for each position:

 1. initialize: draw each parameter from (seed, full name), before data parallelism shards the values
 2. precision: round parameters, because recompute counts bytes in their dtype; switch linear layers to FP8
 3. recompute: wrap the forward of blocks, inside the hooks of data parallelism
 4. data parallelism: replace float32 parameters by shards, which are the master weights of the gathered parameters;
    then read the shards' values, if the model's values were deferred
 5. compile: compile the forward of blocks, with recompute inside and the hooks of data parallelism outside
 6. optimizer: create it on the parameters that it will step
 7. main gradients: accumulate in float32 where data parallelism doesn't, for optimizers that read main gradients
 8. guard, offload of optimizer state: wrap the optimizer, whose master weights have the values of 1
 9. pipeline: read which linear layers must split their backward; then attach the observers
10. load: fill parameters and state (`Run.load`)
11. offload of parameters: free their device memory between uses
"""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore._torch.fsdp import join_units
from mpcore.gradients import ReadsMainGradients, guard_optimizer, main_gradients
from mpcore.layers.dropout import seed_dropout
from mpcore.layers.initialize import deferred_reads, materialize, read_deferred
from mpcore.layers.module import as_module_list
from mpcore.layers.overlap import overlap_stages
from mpcore.mesh.agreement import check_same, gather_objects, raising_together
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.mesh.log import Logger, get_logger
from mpcore.optim.adamw import AdamW
from mpcore.parallel import convert_to_fp8, offload_optimizer, offload_parameters, shard_data_parallel
from mpcore.parallel import recompute as recompute_blocks
from mpcore.parallel.compile import compile_blocks
from mpcore.parallel.precision import round_parameters
from mpcore.pipeline.engine import Pipeline
from mpcore.pipeline.partition import join_stages
from mpcore.pipeline.schedules import Schedule
from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import is_dtensor
from mpcore.sharding.replicas import compare_replicas, equal_shards
from mpcore.sharding.state_dict import refuse_full_tensors
from mpcore.training.idle_axes import check_axes
from mpcore.training.loss_check import with_mesh
from mpcore.training.observers import Observer
from mpcore.training.policies import Compile, Offload, Precision, Recompute, Zero, check_policies
from mpcore.training.run import Run

log: Logger = get_logger(__name__)
OTHER_VALUES = (
    "as each rank made its own: build the model after one torch.manual_seed on all ranks, and pass init= to parallel "
    "layers (nn.init on shards of unequal sizes draws unequal numbers), or load weights. A parallel layer's parameter "
    "that was moved to another module has lost its declared sharding: keep it in its layer"
)


def prepare(
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    *,
    blocks: Iterable[nn.Module] | Mapping[int, nn.Module],
    loss: Callable[..., Tensor],
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
    overlap: bool | int = False,
    observers: Iterable[Observer] = (),
    trace: bool = False,
) -> Run:
    """Lay a model out on a mesh, create its optimizer, and return the `Run` that a training loop calls.

    Args:
        model: the model. With pp > 1, this rank's pipeline stage, or a list of its stages in pipeline order.
        mesh: the mesh from `build_mesh` whose axes the model's layers were built with.
        blocks: the transformer blocks in the order of forward: the units of ZeRO, recompute, FP8, offload and compile.
            If an observer needs the blocks' numbers in the full model, pass `{number: block}`.
        loss: `loss(output, target)` or `loss(output, target, mesh)`, the SUM over the tokens of a micro-batch. Never
            divide it: the run divides once, by the tokens of the whole step on all ranks. The first step calls it once
            more, to detect a mean.
        optimizer: a function that gets the prepared model and returns its optimizer: `lambda model: AdamW(model,
            lr=3e-4)` or `lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)`.
        seed: seed of parameters and dropout.
        initialize: None: draw the values; the model must be on "meta". True: draw the values, replacing existing ones.
            False: keep the values, for example of a pretrained model; a model on the CPU is moved to the mesh's device.
            The values of `from_pretrained(defer=True)` are read from its files, after the model is sharded.
            A drawn value depends only on the seed and the full name, so it is the same on every layout.
        micro_batches: the number of micro-batches per step on each rank. Gradients accumulate over them.
        schedule: the pipeline schedule: a name of `mpcore.pipeline.schedules.NAMES`, the path of a .csv, or a
            `Schedule`.
        data: how parameters, gradients and optimizer state are sharded over the data-parallel ranks.
        precision, recompute, offload, compile: policies. Short forms: `precision="bfloat16"`, `recompute="full"`.
        overlap: hide messages of tensor parallelism under products in forward too, in all parallel linear layers: see
            `mpcore.layers.overlap_communication`. A number is the elements of its smallest message; True: 2^22.
        observers: look at each step (`mpcore.training.Observer`), after the observers that every run has.
        trace: record when each action of the pipeline runs.

    Raises:
        ValueError: on every rank, before a collective of the model starts, if policies exclude each other or don't fit
            the mesh, ranks pass different arguments, the model doesn't use an axis above 1, or it can't be prepared.
            The message says why.

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
    held, observers = as_module_list(blocks), list(observers)
    precision = precision if isinstance(precision, Precision) else Precision(precision)
    recompute = recompute if isinstance(recompute, Recompute) else Recompute(recompute)
    policies = {"data": data, "offload": offload, "compile": compile}
    asked = {"precision": precision, "micro_batches": micro_batches, "seed": seed, "overlap": overlap, **policies}
    asked["recompute"] = (recompute.kind, recompute.every, recompute.budget, recompute.preserve_rng_state)
    asked["observers"] = [type(observer).__name__ for observer in observers]
    own = isinstance(schedule, Schedule) and f"{schedule.name} {zlib.crc32(repr(schedule.ranks).encode())}"
    asked |= {"initialize": initialize, "trace": trace, "schedule": own or str(schedule)}
    check_same("arguments of prepare", asked)
    for axis in (mesh.tp, mesh.data):
        check_same("blocks of prepare", {"blocks": len(held)}, axis)
    splits = schedule.splits_backward if isinstance(schedule, Schedule) else schedule in ("zb", "zbv", "dualpipev")
    with raising_together():
        check_policies(mesh, splits, **policies)
        if overlap and precision.fp8:
            raise ValueError(f"overlap={overlap} with fp8={precision.fp8}, whose products run whole: leave out one")
        _check_optimizer(optimizer)
        half = precision.param_dtype or (data.param_dtype if mesh.data.size > 1 else None)
        _check_values(stages, initialize, precision, half, mesh)
        modules = {module for stage in stages for module in stage.modules()}
        outside = [type(block).__name__ for block in held if block not in modules]
        if outside:
            raise ValueError(f"blocks holds a {outside[0]} that is no submodule of the model: give model.blocks")
        if offload.parameters:
            _check_offloaded(modules, held)
        _check_observers(observers, mesh, blocks if isinstance(blocks, Mapping) else held)
    on_blocks = {"recompute": recompute.kind != "none" or recompute.budget, "precision with fp8": precision.fp8}
    on_blocks |= {"offload of parameters": offload.parameters, "compile": compile}
    idle = [name for name, wanted in on_blocks.items() if wanted]
    if idle and not sum(gather_objects(len(held), mesh.pp.group)):
        raise ValueError(f"blocks is empty, and {' and '.join(idle)} would do nothing: give blocks=model.blocks")

    _check_names(stages, mesh, drawn=initialize is not False)
    check_axes(stages, mesh)
    if overlap:
        overlap_stages(stages, mesh, overlap)
    if initialize is False:  # must come before data parallelism shards the values
        with raising_together():
            joined = stages[0] if len(stages) == 1 else join_stages(stages)
        compare_replicas(joined, mesh, OTHER_VALUES)
        if (alike := equal_shards(joined, mesh.tp)) and mesh.job.rank == 0:
            log.warning("all ranks of tp hold the same shard of %s, as after nn.init with one seed: pass init= to the "
                        "layer, which draws the unsharded weight", ", ".join(alike[:3]))  # fmt: skip
    whole, masters = lay_out(stages, mesh, held, seed=seed, initialize=initialize is not False, data=data,
                             precision=precision, recompute=recompute, compile=compile)  # fmt: skip
    with raising_together():
        made = optimizer(whole)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"optimizer(model) returned {made!r:.60}: return the torch.optim.Optimizer that it makes")
        of_step = inspect.signature(made.step).parameters.values()
        if needs := [x.name for x in of_step if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]:
            raise ValueError(
                f"{type(made).__name__}.step needs a {needs[0]}, and a run computes gradients once, before the step: "
                f"take mpcore.AdamW, or another optimizer whose step() needs nothing"
            )
        stale = {p for group in made.param_groups for p in group["params"]} - set(whole.parameters())
        if stale:
            raise ValueError(
                f"the optimizer holds {len(stale)} parameters that the prepared model has not: make it from the "
                f"argument, optimizer=lambda model: AdamW(model.parameters(), lr=...)"
            )
        if masters and not (isinstance(made, AdamW) and made.masters):
            raise ValueError(
                f"{type(made).__name__} keeps no float32 masters of {len(masters)} {precision.param_dtype} parameters: "
                f"take mpcore.AdamW or mpcore.Muon; or Zero(1) on several data ranks, whose shards are the masters; or "
                f"Precision({precision.dtype!r}, autocast=True), with float32 parameters"
            )
    if masters:
        main_gradients(whole, masters)
    elif precision.autocast_dtype and isinstance(made, AdamW) and not any(map(is_dtensor, whole.parameters())):
        main_gradients(whole)  # not with data parallelism, which accumulates in float32; torch's optimizers read .grad
    if not isinstance(made, AdamW):  # mpcore's optimizers guard themselves
        guard_optimizer(made, stages)
    if offload.optimizer:
        offload_optimizer(made)
    for p in (p for group in made.param_groups for p in group["params"] if p in masters):
        made.state[p]["master"] = masters[p]
    run = Run(whole, stages, mesh, made, blocks=held, precision=precision, offload=offload, seed=seed)
    run.pipeline = Pipeline(stages, mesh, micro_batches, run.scaled(with_mesh(loss, mesh)), schedule, trace=trace)
    run.observers += observers
    run.attach()
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
        mesh, blocks, seed, data, precision, recompute, compile: see `prepare`.

    Returns:
        The only stage, or all stages joined in one module; and the float32 master weights of its trained 16-bit
        parameters.

    Raises:
        ValueError: on every rank, if a step rejects its arguments or the model.
    """
    whole = stages[0] if len(stages) == 1 else join_stages(stages)
    dtypes = {name: p.dtype for name, p, _ in declarations(whole) if p.is_meta}
    if initialize:
        materialize(whole, seed, mesh.device)
    else:
        seed_dropout(whole, seed)
        if data.stage == 0 or mesh.data.size == 1:  # otherwise sharding moves the model, block by block
            read_deferred(stages, whole, mesh, dtypes)
            held = [*whole.parameters(), *whole.buffers()]
            if any(x.device.type != mesh.device.type for x in held) and not any(x.is_meta for x in held):
                whole.to(mesh.device)
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
    if len(stages) > 1:
        join_units(whole, stages)
    if not initialize:
        read_deferred(stages, whole, mesh, dtypes)
    if precision.param_dtype is not None:
        masters = round_parameters(whole, precision.param_dtype)  # those that are no shards
    if compile is not None:
        compile_blocks(blocks, compile.backend)
    whole.register_load_state_dict_pre_hook(refuse_full_tensors)
    return whole, masters


def _check_observers(observers: Sequence[Observer], mesh: Mesh, blocks: Any) -> None:
    for observer in observers:
        if not isinstance(observer, Observer):
            raise ValueError(f"observers holds {observer!r:.60}, not an Observer: subclass mpcore.training.Observer")
        observer.check(mesh, blocks)
    if mesh.worlds.size > 1 and not any(observer.joins_worlds for observer in observers):
        raise ValueError(
            f"build_mesh(worlds={mesh.worlds.size}) without an observer that joins their models: pass one, such as "
            f"observers=[mpcore.experimental.LocalUpdates(every=100)]"
        )


def _check_offloaded(modules: set[nn.Module], blocks: Sequence[nn.Module]) -> None:
    within = {module for block in blocks for module in block.modules()}
    held = {p for block in blocks for p in block.parameters()}
    for module in modules - within:
        for leaf, p in module.named_parameters(recurse=False):
            if p in held:
                raise ValueError(
                    f"Offload(parameters=True), and {leaf} {tuple(p.shape)} of a {type(module).__name__} outside the "
                    f"{len(blocks)} blocks is a block's parameter too, which lies on the host: untie it, or offload no "
                    f"parameters"
                )


def _check_optimizer(optimizer: object) -> None:
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
    """Raise ValueError if pipeline ranks share a name, as they would draw the same values, or nothing is trained."""
    tied = {mesh.pp, mesh.ends}
    held = [each for stage in stages for each in declarations(stage)]
    own = list(dict.fromkeys(name for name, _, sharding in held if tied.isdisjoint(sharding.partial)))
    holder: dict[str, int] = {}
    trained = any(p.requires_grad for _, p, _ in held)
    ranks, any_trained = zip(*gather_objects((own, trained), mesh.pp.group), strict=True)
    if any(ranks) and not any(any_trained):
        raise ValueError(
            f"none of the {sum(map(len, ranks))} parameters requires a gradient, so there is nothing to train: call "
            f"requires_grad_() for those to train before prepare"
        )
    alike = any(set(one) == set(other) for one, other in itertools.combinations(ranks, 2) if one)
    for rank, names in enumerate(ranks):
        for name in names if drawn or alike else ():
            if name in holder:
                raise ValueError(
                    f"pipeline ranks {holder[name]} and {rank} both hold a parameter {name}. If each has all "
                    f"layers, cut the model with pipeline_stages(model, mesh, ..); name parameters of a stage as in "
                    f"the unsharded model, such as ModuleDict({{str(i): block}}) with i the block's number there; "
                    f"declare one tied weight with add_partial(module, leaf, mesh.ends)"
                )
            holder[name] = rank


def _check_values(
    stages: Sequence[nn.Module], initialize: bool | None, precision: Precision, half: torch.dtype | None, mesh: Mesh
) -> None:
    """Raise ValueError if it is unclear whether to keep a model's values, or their dtypes don't fit the precision."""
    if any(isinstance(stage, nn.parallel.DistributedDataParallel) for stage in stages):
        raise ValueError("the model is wrapped in DistributedDataParallel: pass its module; the run sums the gradients")
    parameters = [each for stage in stages for each in stage.named_parameters()]
    for name, p in parameters:
        if p.is_complex():
            raise ValueError(
                f"{name} is {p.dtype}, and gradients are summed as real numbers: make it a real parameter of shape "
                f"{(*p.shape, 2)}, and call torch.view_as_complex in forward"
            )
    for name, each in (each for stage in stages for each in stage.named_modules()):
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            raise ValueError(f"{name} has sparse=True, and ranks sum dense gradients: leave out sparse=True")
        has_mean = isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
        if isinstance(each, nn.SyncBatchNorm) and mesh.job.size > 1:
            group, data = each.process_group or dist.group.WORLD, mesh.data.group
            over = [] if group is dist.GroupMember.NON_GROUP_MEMBER else dist.get_process_group_ranks(group)
            if over != (ranks := [mesh.job.rank] if data is None else dist.get_process_group_ranks(data)):
                raise ValueError(
                    f"{name} is a SyncBatchNorm over ranks {over!s:.60}, and mesh.data has {ranks!s:.60}: "
                    f"give it process_group=mesh.data.group, or with one data rank take BatchNorm"
                )
        if has_mean and mesh.data.size > 1 and mesh.job.rank == 0 and not isinstance(each, nn.SyncBatchNorm):
            log.warning("%s is a %s, which takes the mean of one data rank's samples: on %d ranks it trains another "
                        "model than on one", name, type(each).__name__, mesh.data.size)  # fmt: skip
        if half and has_mean and each.affine and each.running_mean is not None and each.running_mean.dtype != half:
            raise ValueError(
                f"{name} is a {type(each).__name__} with statistics in {each.running_mean.dtype}, and its weight would "
                f"be {half}, which torch does not mix: use Precision(.., autocast=True), or a norm without statistics"
            )
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
    reads = deferred_reads(stages)
    if initialize is None and reads:
        raise ValueError("the model's values are deferred: initialize=False reads them, initialize=True draws new ones")
    if initialize is False and meta and not reads:
        raise ValueError(
            f'initialize=False keeps values, and {meta[0]} is on "meta", without one: load before prepare, or give '
            f"prepare the deferred model itself, not a module around it"
        )
