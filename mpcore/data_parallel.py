"""Floor 4: data parallelism over plain local shards: ZeRO-0 to 3 and HSDP, by torch's `fully_shard`.

What is exchanged over data a step, in units of a rank's parameters, with M micro-batches:

    zero  parameters gathered  gradients summed                    lies whole on each data rank
    0     -                    once, all-reduced (2)               parameters, gradients, optimizer state
    1     once (1)             once, reduce-scattered (1)          parameters, gradients
    2     once (1)             each micro-batch (M)                parameters
    3     twice a micro-batch  each micro-batch (M)                nothing
          (2 M)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.utils._pytree import tree_leaves

from mpcore.gradients import check_backward, check_steps, drop_gradients
from mpcore.layers.module import listed, refuse_second_derivative
from mpcore.layers.moe import check_experts
from mpcore.layers.router import Router
from mpcore.mesh import Axis, Mesh, check_mesh, check_same, divisors
from mpcore.sharding import (
    Sharding,
    add_partial,
    check_lies_on,
    declarations,
    is_dtensor,
    owners,
    param_groups,
    reshard,
    sharding_of,
    shardings,
)

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
except ImportError:  # before torch 2.13 all parameters of a unit lie on one mesh
    FSDPMeshInfo = HSDPMeshInfo = ShardPlacementResult = None

try:
    from torch.distributed.fsdp._common_utils import collect_grad_tensors
except ImportError:  # before torch 2.13 it looks into no dataclass
    collect_grad_tensors = None


@dataclass(frozen=True)
class DataParallel:
    """How a stage is sharded over data: `stage.data_parallel`.

    Attributes:
        zero: what is sharded, see `shard_data_parallel`.
        replicate: over how many groups of ranks the shards are replicated.
        shared: units of the parameters that several stages of this rank share.
        gathered: whether a forward without gradients leaves parameters gathered, see `gathered`.
    """

    zero: int
    replicate: int = 1
    shared: tuple[SharedUnit, ...] = ()
    gathered: bool = False


@dataclass(frozen=True)
class Placement:
    """Where a parameter lies over data.

    Attributes:
        axis: the axis that its gradient is summed over.
        parameter, gradient, state: in how many shards it, its gradient between micro-batches, and its optimizer state
            lie; 1: whole on each rank of the axis.
    """

    axis: Axis
    parameter: int
    gradient: int
    state: int


def shard_data_parallel(
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    blocks: Iterable[nn.Module] = (),
    *,
    zero: int = 1,
    replicate: int = 1,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> nn.Module | Sequence[nn.Module]:
    """Lay a model out over the data ranks. Gradients are summed, never averaged: who makes the loss divides it, once.

    Parameters sharded over experts are replicated, and so dealt out, over `mesh.edp`; all others over `mesh.data`.
    Afterwards call `reduce_gradients(model)` after each step's last backward, as ever. Where micro-batches are run
    without `mpcore.pipeline.Pipeline`, call `sync_gradients` before each forward and `finish_gradients` after the last.
    To give a step up, also after a backward that raised, call `mpcore.drop_gradients(model)`.

    A forward without gradients (an evaluation, a teacher) may run at any time, under `torch.no_grad()`: a first one
    under `torch.inference_mode()` is refused. It gathers and shards again; `gathered` saves that where many follow each
    other.

    With 1 to 3 the model's outputs are tensors, or dicts, lists, tuples (from torch 2.13 on dataclasses too) of them:
    where a loss is kept elsewhere, no backward sums. Call the model itself, and route other entries (encode, generate)
    through its forward: that alone gathers parameters that are in no block.

    Add adapters and new heads, tie, and copy (EMA, `copy.deepcopy`) before; make the optimizer, and hooks of gradients
    (`register_post_accumulate_grad_hook`), afterwards: 1 to 3 put other parameters in place of the model's, with their
    attributes. They have no second derivative.

    Scalars, empty parameters and the statistics of routers stay whole on every rank, as with `zero=0`. A parameter that
    no rank used in a step has no gradient with `zero=0`; else one of zeros, or none where its block was skipped in all
    steps so far. Frozen parameters have none. A block is run by every rank or by none.

    Args:
        model: the model, or this rank's stage of it, with plain parameters (`materialize` first); or a rank's stages,
            which may share parameters. Changed in place.
        mesh: the mesh it lies on. With one data rank the model stays as it is; but experts whose etp isn't tp have
            replicas over tp, whose gradients only this call declares.
        blocks: submodules, a list or an `nn.ModuleDict`, that are gathered and summed one after the other, in the order
            of forward; one within another is a unit of its own.
        zero: 0 keeps everything whole on each rank, and gradients are all-reduced by `reduce_gradients`. 1 shards the
            optimizer's state: gradients are reduce-scattered with the last micro-batch, and parameters are gathered
            once a step. 2 shards gradients too: each micro-batch's are reduce-scattered. 3 shards parameters too: a
            block's are gathered for its forward, dropped, and gathered for its backward. Parameters that stages share
            are gathered once a step, and their gradients are reduce-scattered once, with 1 to 3.
        replicate: shard over groups of `data.size / replicate` consecutive data ranks, such as those of a node, and
            replicate across them (HSDP).
        param_dtype: compute in this dtype; parameters, and so the optimizer's, stay as they are: fp32 masters.
        reduce_dtype: dtype that gradients are summed in; those of fp64 parameters are in fp64.

    Returns:
        The model, or the stages.

    Raises:
        ValueError: on every rank and before anything is changed, if `zero` or `replicate` can't be had, a block lies
            outside the model, units share a parameter, something is sharded already, trained parameters of one unit
            differ in dtype, a parameter has hooks or isn't contiguous, experts lie otherwise than the mesh says, or
            ranks ask for different things.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; Zhao et al. 2023, arXiv:2304.11277.
    """
    check_mesh(mesh)
    stages = [model] if isinstance(model, nn.Module) else list(model)
    given = dict.fromkeys(block for block in listed(blocks) if block not in stages)
    blocks = sorted(given, key=lambda block: sum(module in given for module in block.modules()))  # inner ones first
    _check(stages, blocks, mesh, zero, replicate, param_dtype, reduce_dtype)
    asked = {"zero": zero, "replicate": replicate, "blocks": len(blocks), "dtypes": (param_dtype, reduce_dtype)}
    check_same("data parallelism", asked, mesh.data)
    if mesh.device_mesh is None:
        return model
    if mesh.data.size == 1 and param_dtype is None:
        for stage in stages:
            _declare_pending(stage, mesh, lambda _: True)  # experts with an etp of their own have replicas over tp
        return model
    if zero == 0:
        for stage in stages:
            _declare_pending(stage, mesh, lambda _: True)
            stage.data_parallel = DataParallel(zero)  # type: ignore[assignment]
        return model

    check_steps()
    held = {id(p): sharding for stage in stages for _, p, sharding in declarations(stage)}
    whole = {p for stage in stages for p in stage.parameters() if _stays_whole(p, held[id(p)], mesh, replicate)}
    routers = [module for stage in stages for module in stage.modules() if isinstance(module, Router)]
    whole |= {p for router in routers for p in router.statistics}  # else they would be cast to `param_dtype`
    for stage in stages:
        _declare_pending(stage, mesh, lambda p: p in whole)
    wrap = _Wrap(mesh, held, zero, replicate, param_dtype, reduce_dtype)
    shared = _share(stages, whole, wrap)
    whole |= {p for unit in shared for p in unit.shared}
    for stage in stages:
        within = set(stage.modules())
        for block in blocks:
            if block in within:
                wrap(block, whole)
                block.register_forward_pre_hook(partial(_before_forward, stage), prepend=True)
                block.register_forward_hook(partial(_after_forward, stage))
        wrap(stage, whole)
        stage.register_forward_pre_hook(partial(_before_forward, stage), prepend=True)
        stage.register_forward_hook(partial(_after_forward, stage))
        stage.zero_grad = partial(_zero_grad, stage)  # type: ignore[assignment]
        units = tuple(unit for unit in shared if unit.owners & within)
        stage.data_parallel = DataParallel(zero, replicate, units)  # type: ignore[assignment]
        for unit in units:
            stage.register_forward_pre_hook(lambda *_, unit=unit: unit.gather())
    return model


def _check(
    stages: list[nn.Module],
    blocks: list[nn.Module],
    mesh: Mesh,
    zero: int,
    replicate: int,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
) -> None:
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero {zero!r} is none of 0, 1, 2 and 3")
    if not isinstance(replicate, int) or replicate < 1 or mesh.data.size % replicate:
        raise ValueError(
            f"replicate {replicate!r} does not divide the data size {mesh.data.size}: {divisors(mesh.data.size)}"
        )
    if replicate > 1 and (zero == 0 or replicate == mesh.data.size):
        raise ValueError(
            f"replicate {replicate} with zero {zero} on {mesh.data.size} data ranks leaves nothing to shard: zero=0 "
            f"with replicate=1 replicates everything"
        )
    if replicate > 1 and mesh.edp.size % replicate:
        raise ValueError(
            f"replicate {replicate} does not divide the edp size {mesh.edp.size} of the experts: "
            f"{divisors(mesh.edp.size)}"
        )
    if zero == 0 and (param_dtype is not None or reduce_dtype != torch.float32):
        raise ValueError(
            f"zero 0 computes in the parameters' own dtype and sums in float32, not in {param_dtype} and "
            f"{reduce_dtype}: use torch.autocast, or zero=1"
        )
    if param_dtype is not None and mesh.device_mesh is None:
        raise ValueError(f"param_dtype {param_dtype} needs torch.distributed, which isn't running: use torch.autocast")
    within = {module for stage in stages for module in stage.modules()}
    for block in blocks:
        if block not in within:
            raise ValueError(f"the block {type(block).__name__} is no submodule of the model")
    if any(isinstance(module, FSDPModule) or hasattr(module, "data_parallel") for module in within):
        raise ValueError("the model is sharded over data already")
    for stage in stages:
        check_experts(stage, mesh)
        for name, parameter, sharding in declarations(stage):
            if is_dtensor(parameter):
                raise ValueError(f"{name} is sharded already: stages that share parameters are to be given in one call")
            check_lies_on(name, parameter, sharding, mesh)
            if zero and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
                raise ValueError(
                    f"{name} has hooks on its gradient, and zero {zero} puts shards in its place: call "
                    f"register_post_accumulate_grad_hook of those after shard_data_parallel, or use zero=0"
                )
            if zero and not parameter.is_contiguous():
                raise ValueError(
                    f"{name} of strides {parameter.stride()} can't be cut by zero {zero}: make it contiguous before, "
                    f"or use zero=0"
                )
    if zero:
        _check_units(stages, blocks)
    inside = {p for block in blocks for p in block.parameters()}
    for unit in (*blocks, *stages):
        mine = [p for p in unit.parameters() if p.requires_grad and (unit in blocks or p not in inside)]
        dtypes = sorted({str(p.dtype) for p in mine})
        if zero and len(dtypes) > 1:
            raise ValueError(
                f"trained parameters of one {type(unit).__name__} are of {' and '.join(dtypes)}: give each dtype "
                f"blocks of its own, or use zero=0"
            )


def _check_units(stages: list[nn.Module], blocks: list[nn.Module]) -> None:
    """Each parameter is to lie in one unit, however it is reached; those that stages share get one of their own."""
    seen: dict[nn.Parameter, tuple[str, nn.Module, nn.Module]] = {}
    units = set(blocks)
    for stage in stages:
        modules = dict(stage.named_modules(remove_duplicate=False))
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            path = [modules[prefix] for prefix in accumulate(name.split(".")[:-1], "{}.{}".format)]
            unit = next((module for module in reversed(path) if module in units), stage)
            first, other, within = seen.setdefault(parameter, (name, unit, stage))
            if parameter.dim() and within is stage and other is not unit:
                raise ValueError(
                    f"{first} and {name} are one parameter in two units, of {type(other).__name__} and "
                    f"{type(unit).__name__}: give what holds both as a block, or neither of them"
                )


def _stays_whole(parameter: Tensor, sharding: Sharding, mesh: Mesh, replicate: int) -> bool:
    """`fully_shard` cuts dimension 0: not where that is missing or empty, or experts have no replicas to cut over."""
    alone = sharding.data_axis(mesh).size == replicate < mesh.data.size
    return parameter.dim() == 0 or parameter.numel() == 0 or alone


def _declare_pending(stage: nn.Module, mesh: Mesh, which: Callable[[nn.Parameter], bool]) -> None:
    """Declare over which axis each parameter is laid out, and of some that their gradients are pending over it."""
    declared = shardings(stage)
    for name, module, leaf, parameter in list(owners(stage)):
        axis = declared[name].data_axis(mesh)
        if which(parameter) and all(axis.group is not old.group for old in declared[name].partial):
            add_partial(module, leaf, axis)
        if mesh.data.size > 1:
            said = replace(sharding_of(module, leaf, parameter), data=axis)
            module.shardings = {**getattr(module, "shardings", {}), leaf: said}  # type: ignore[assignment]


class _Wrap:
    """`fully_shard` with all that this module says about it, for one unit after the other."""

    def __init__(
        self,
        mesh: Mesh,
        held: dict[int, Sharding],
        zero: int,
        replicate: int,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.mesh, self.held, self.zero = mesh, held, zero
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        assert mesh.device_mesh is not None
        if replicate > 1:
            self.data = _cut_axis(mesh.data, replicate, mesh.device_type)
        else:
            self.data = mesh.device_mesh["dp"] if mesh.cp.size == 1 else mesh.device_mesh["dp", "cp"]._flatten("data")
        self.experts: Any = None
        if mesh.edp.size > replicate and mesh.edp.group is not mesh.data.group:
            cut = _cut_axis(mesh.edp, replicate, mesh.device_type)
            if FSDPMeshInfo is None or HSDPMeshInfo is None or ShardPlacementResult is None:
                raise ValueError(f"experts with zero {zero} need torch 2.13, this is {torch.__version__}: use zero=0")
            info = FSDPMeshInfo(cut, 0) if replicate == 1 else HSDPMeshInfo(cut, 1, 0)
            self.experts = ShardPlacementResult(None, info)

    def __call__(self, module: nn.Module, ignored: set[nn.Parameter], zero: int | None = None) -> None:
        zero = self.zero if zero is None else zero
        held = [(owner, *place) for owner in module.modules() for place in owner.named_parameters(recurse=False)]
        mine = [(owner, leaf, p) for owner, leaf, p in held if p not in ignored and not is_dtensor(p)]
        wide = any(p.dtype == torch.float64 for *_, p in mine)
        policy = MixedPrecisionPolicy(self.param_dtype, None if wide else self.reduce_dtype, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": self.data, "mp_policy": policy, "reshard_after_forward": zero == 3}
        if self.experts is not None:
            options["shard_placement_fn"] = self._placed
        sharded = fully_shard(module, ignored_params=ignored, **options)
        for owner, leaf, p in mine:
            shard = getattr(owner, leaf)
            shard.__dict__.update(vars(p))  # what others read of it, such as an optimizer that makes groups
        for *_, p in mine:
            p.replaced_by_shards = True  # type: ignore[attr-defined]  # an optimizer made before holds it still
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if hasattr(sharded, "set_reduce_scatter_unused_params"):  # ranks may use different ones
            sharded.set_reduce_scatter_unused_params(True)
        else:  # before torch 2.13
            _sum_unused(sharded)

    def _placed(self, parameter: nn.Parameter) -> Any:
        sharding = self.held.get(id(parameter))
        return self.experts if sharding is not None and sharding.data_axis(self.mesh) is self.mesh.edp else None


def _cut_axis(axis: Axis, replicate: int, device_type: str) -> DeviceMesh:
    """The axis as torch's mesh; with `replicate` > 1 one of (replicate, shard), ranks of a shard group in a row."""
    assert axis.group is not None
    if replicate == 1:
        return DeviceMesh.from_group(axis.group, device_type, mesh_dim_names=(axis.name,))
    ranks = torch.tensor(dist.get_process_group_ranks(axis.group), dtype=torch.int).view(replicate, -1)
    row, column = divmod(axis.rank, ranks.shape[1])
    # each rank makes its own two groups alone: the others of the world may not be here
    groups = [dist.new_group(mine.tolist(), use_local_synchronization=True) for mine in (ranks[:, column], ranks[row])]
    names = (f"{axis.name}_replicate", f"{axis.name}_shard")
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)  # type: ignore[arg-type]


# --- parameters that stages share -----------------------------------------------------------------------------------


class SharedUnit(nn.Module):
    """Parameters that several stages of a rank share, such as a tied table, as a unit of `fully_shard` of its own.

    A unit belongs to one root, and each stage is a root. So this one is none of the stages' submodules; it is gathered
    before the first stage runs, and its gradients are summed when all stages are done.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        super().__init__()
        self.places = list(places)
        self.owners = {module for module, _ in self.places}
        self.held = nn.ModuleList(self.owners)

    @property
    def shared(self) -> set[nn.Parameter]:
        """The parameters, as they are now: whole or shards."""
        return {getattr(module, leaf) for module, leaf in self.places}

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        return x * 1

    @torch.no_grad()
    def gather(self) -> None:
        """Hold the parameters whole, if they are not."""
        self(torch.zeros(()))

    def finish(self) -> None:
        """Sum the gradients over data and hold shards again."""
        with torch.enable_grad():
            self(torch.zeros((), requires_grad=True)).backward()


def _share(stages: list[nn.Module], whole: set[nn.Parameter], wrap: _Wrap) -> list[SharedUnit]:
    seen: dict[nn.Parameter, set[int]] = {}
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for i, stage in enumerate(stages):
        for module in stage.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                seen.setdefault(parameter, set()).add(i)
                places.setdefault(parameter, []).append((module, leaf))
    shared = {p for p, where in seen.items() if len(where) > 1 and p not in whole}
    if not shared:
        return []
    unit = SharedUnit(place for p, held in places.items() if p in shared for place in held)
    wrap(unit, set(unit.parameters()) - shared, zero=1)
    return [unit]


# --- between micro-batches --------------------------------------------------------------------------------------------


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Say before a micro-batch's forward whether it is the step's last: only then are sums over data to be complete.

    A step given up before its last micro-batch's backward needs `mpcore.drop_gradients(model)` or `model.zero_grad()`:
    what isn't summed yet would be part of the next, as the `zero_grad` of torch's optimizers doesn't see it.
    """
    state = getattr(model, "data_parallel", None)
    if state is None or not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(last or state.zero > 1)
    model.set_requires_all_reduce(last)  # replicas of shards are summed once a step
    model.set_reshard_after_backward(last or state.zero == 3)


def finish_gradients(stages: Iterable[nn.Module]) -> None:
    """After a step's last backward: sum the gradients of what this rank's stages share."""
    for unit in _shared_units(stages):
        unit.finish()


def _zero_grad(stage: nn.Module, set_to_none: bool = True) -> None:
    """Forget the gradients, as the `zero_grad` of a model, and those that nothing has summed: they are None."""
    drop_gradients(stage)


@torch._disable_dynamo
def _before_forward(stage: Any, unit: Any, args: Any) -> None:
    stage._get_fsdp_state()._lazy_init()  # a block that is called before its model is not a model of its own
    if unit is stage and torch.is_grad_enabled():
        check_backward(stage)
    if torch.is_inference_mode_enabled():
        held = [p for group in param_groups(unit._get_fsdp_state()) for p in group.fsdp_params]
        if not all(hasattr(p, "_unsharded_param") for p in held):
            raise ValueError(
                f"the first forward of {_name(unit)} is within torch.inference_mode(), so what its parameters "
                f"are gathered in could never be trained: use torch.no_grad()"
            )


@torch._disable_dynamo
def _after_forward(stage: nn.Module, unit: nn.Module, args: Any, out: Any) -> None:
    """Where no backward follows that would shard again, do it: nobody may read or step what is only a copy."""
    state: Any = stage.data_parallel
    trained = trained_tensors(out) if unit is stage else ()
    hidden = unit is stage and not trained and hides_tensors(out)
    evaluated = not torch.is_grad_enabled() or (unit is stage and not trained and not hidden)
    if evaluated and not state.gathered:
        reshard(unit)
    if hidden and not evaluated and any(p.requires_grad for p in stage.parameters()):
        reshard(stage)
        raise ValueError(
            f"{_name(stage)} returns a {type(out).__name__}, in which no tensor is found whose backward would "
            f"sum the gradients: return tensors, or dicts, lists, tuples or dataclasses of them; where nothing is to "
            f"be trained, call it under torch.no_grad()"
        )
    for x in trained:  # its backward frees what the graph of a second one holds
        x.register_hook(lambda _: refuse_second_derivative(f"a model sharded over data (zero {state.zero})"))


def _name(unit: nn.Module) -> str:
    return type(unit).__name__.removeprefix("FSDP")


def trained_tensors(out: Any) -> Sequence[Tensor]:
    """The tensors of an output that need a gradient, where `fully_shard` looks for them."""
    if collect_grad_tensors is not None:
        return collect_grad_tensors(out)
    return [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]


def hides_tensors(out: Any) -> bool:
    """Whether an output without such tensors may hold some, or a backward may start elsewhere."""
    leaves = [x for x in tree_leaves(out) if x is not None]
    plain = (Tensor, int, float, complex, str)
    looked_into = (x for x in leaves if not (collect_grad_tensors is not None and is_dataclass(x)))
    return not leaves or any(not isinstance(x, plain) or getattr(x, "requires_grad", False) for x in looked_into)


@contextmanager
def gathered(model: nn.Module | Iterable[nn.Module]) -> Iterator[None]:
    """Forwards without gradients in here gather parameters once, not each anew; sharded again at the end.

    With 3 too, where the whole model has to fit in memory meanwhile. Ranks may run different numbers of forwards, as
    when samples of different lengths are generated, but for the first: that one gathers.

    Args:
        model: what `shard_data_parallel` was given, or a model that it didn't see. Nothing may step it in here.
    """
    stages = [model] if isinstance(model, nn.Module) else list(model)
    held: list[tuple[nn.Module, Any]] = [
        (stage, stage.data_parallel) for stage in stages if hasattr(stage, "data_parallel")
    ]
    for stage, state in held:
        _keep_gathered(stage, replace(state, gathered=True))
    try:
        yield
    finally:
        for stage, state in held:
            _keep_gathered(stage, state)
            if not state.gathered:
                reshard(stage)


def _keep_gathered(stage: Any, state: DataParallel) -> None:
    stage.data_parallel = state
    if state.zero == 3:
        stage.set_reshard_after_forward(not state.gathered)


def drops_parameters(model: nn.Module) -> bool:
    """Whether no rank holds its whole stage at any time, so that an evaluation that gathered it might not fit."""
    return getattr(model, "data_parallel", DataParallel(0)).zero == 3


def gather(model: nn.Module) -> None:
    """Have the modules hold whole parameters: what a backward that is split in two needs."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def hold_gradients(model: nn.Module) -> None:
    """Have a backward leave gradients unsummed, and parameters whole: the first half of a split one."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)


def reduce_held(model: nn.Module, last: bool) -> None:
    """After the second half of a split backward, which runs no hooks: what `sync_gradients` says is to be done."""
    if getattr(model, "data_parallel", None) is None or not isinstance(model, FSDPModule):
        return
    if reduces_each_micro_batch(model):
        sync_gradients(model, last)
    else:  # `reduce_once` sums at the end; here sums of half precision move to float32
        hold_gradients(model)
    _run_hooks(model)


def reduce_once(model: nn.Module) -> None:
    """After a pipeline's last backward: sum gradients that aren't summed each micro-batch."""
    if isinstance(model, FSDPModule) and not reduces_each_micro_batch(model):
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        _run_hooks(model)


def _run_hooks(model: FSDPModule) -> None:
    """What `fully_shard` does after a backward, as torch's `PipelineStage.perform_reduce_grad` does it."""
    root: Any = model._get_fsdp_state()  # type: ignore[attr-defined]
    for unit in root._state_ctx.all_states:
        for group in param_groups(unit):
            group.post_backward()
    root._root_post_backward_final_callback()


def _sum_unused(module: FSDPModule) -> None:
    """Have a unit sum zeros for parameters without a gradient, so that all ranks post the same sums."""
    for group in param_groups(module._get_fsdp_state()):  # type: ignore[attr-defined]

        def post_backward(*_: Any, group: Any = group) -> None:
            there = [p for p in group.fsdp_params if group.reduce_grads and hasattr(p, "_unsharded_param")]
            for p in there:
                whole = p.unsharded_param
                if whole.requires_grad and whole.grad is None and p.unsharded_accumulated_grad is None:
                    whole.grad = torch.zeros_like(whole)
            type(group).post_backward(group)

        group.post_backward = post_backward


def reduces_each_micro_batch(model: nn.Module) -> bool:
    """Whether gradients are sharded."""
    return isinstance(model, FSDPModule) and getattr(model, "data_parallel", DataParallel(0)).zero > 1


def placements(stages: nn.Module | Iterable[nn.Module], mesh: Mesh) -> dict[str, Placement]:
    """Where each parameter, its gradient and its optimizer state lie over data, by name.

    Args:
        stages: what `shard_data_parallel` was given, or a model that it didn't see.
        mesh: the mesh it lies on.
    """
    found = {}
    for stage in [stages] if isinstance(stages, nn.Module) else stages:
        reshard(stage)
        state = getattr(stage, "data_parallel", DataParallel(0))
        shared = {p for unit in state.shared for p in unit.shared}
        for name, parameter, sharding in declarations(stage):
            cut = data_shards(parameter)
            zero = 1 if parameter in shared else state.zero
            axis = sharding.data_axis(mesh)
            found[name] = Placement(axis, cut if zero == 3 else 1, cut if zero > 1 else 1, cut)
    return found


def data_shards(x: Tensor) -> int:
    """In how many shards data parallelism cut a tensor; 1: it is whole."""
    if not is_dtensor(x):
        return 1
    sizes = [x.device_mesh.size(i) for i, place in enumerate(x.placements) if not isinstance(place, Replicate)]
    return torch.Size(sizes).numel()


def _shared_units(stages: Iterable[nn.Module]) -> Iterator[SharedUnit]:
    seen = set()
    for stage in stages:
        for unit in getattr(stage, "data_parallel", DataParallel(0)).shared:
            if id(unit) not in seen:
                seen.add(id(unit))
                yield unit
