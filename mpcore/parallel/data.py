"""Data parallelism over plain local shards: ZeRO-0 to 3 and HSDP, by torch's `fully_shard`.

What is exchanged over data a step, in units of a rank's parameters, with M micro-batches:

    zero  parameters gathered  gradients summed                    lies whole on each data rank
    0     -                    once, all-reduced (2)               parameters, gradients, optimizer state
    1     once (1)             once, reduce-scattered (1)          parameters, gradients
    2     once (1)             each micro-batch (M)                parameters
    3     twice a micro-batch  each micro-batch (M)                nothing
          (2 M)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mpcore._torch.autograd import has_accumulation_hooks, has_gradient_hooks
from mpcore._torch.fsdp import add_unit
from mpcore.gradients.accumulate import mark_replaced
from mpcore.layers.module import listed
from mpcore.layers.moe.layer import check_experts
from mpcore.layers.moe.router import Router
from mpcore.mesh.agreement import check_same
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.mesh.layout import divisors
from mpcore.parallel.fsdp import UnitWrapper
from mpcore.parallel.shared import DataParallel, share_parameters, state_of
from mpcore.parallel.sync import after_forward, before_forward, zero_grad
from mpcore.sharding.declarations import add_partial, declarations, owners, sharding_of, shardings
from mpcore.sharding.declare import Sharding, check_lies_on
from mpcore.sharding.local import is_dtensor


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

    before = [p for stage in stages for p in stage.parameters()]
    held = {id(p): sharding for stage in stages for _, p, sharding in declarations(stage)}
    whole = {p for stage in stages for p in stage.parameters() if _stays_whole(p, held[id(p)], mesh, replicate)}
    routers = [module for stage in stages for module in stage.modules() if isinstance(module, Router)]
    whole |= {p for router in routers for p in router.statistics}  # else they would be cast to `param_dtype`
    for stage in stages:
        _declare_pending(stage, mesh, lambda p: p in whole)
    wrap = UnitWrapper(mesh, held, zero, replicate, param_dtype, reduce_dtype)
    shared = share_parameters(stages, whole, wrap)
    whole |= {p for unit in shared for p in unit.shared}
    for stage in stages:
        within = set(stage.modules())
        for block in blocks:
            if block in within:
                wrap(block, whole)
                block.register_forward_pre_hook(partial(before_forward, stage), prepend=True)
                block.register_forward_hook(partial(after_forward, stage))
        wrap(stage, whole)
        stage.register_forward_pre_hook(partial(before_forward, stage), prepend=True)
        stage.register_forward_hook(partial(after_forward, stage))
        stage.zero_grad = partial(zero_grad, stage)  # type: ignore[assignment]
        units = tuple(unit for unit in shared if unit.owners & within)
        stage.data_parallel = DataParallel(zero, replicate, units)  # type: ignore[assignment]
        for unit in units:
            add_unit(stage, unit)
            stage.register_forward_pre_hook(lambda *_, unit=unit: unit.gather())
    now = {p for stage in stages for p in stage.parameters()}
    mark_replaced(p for p in before if p not in now)
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
    if any(isinstance(module, FSDPModule) or state_of(module) is not None for module in within):
        raise ValueError("the model is sharded over data already")
    for stage in stages:
        check_experts(stage, mesh)
        for name, parameter, sharding in declarations(stage):
            if is_dtensor(parameter):
                raise ValueError(f"{name} is sharded already: stages that share parameters are to be given in one call")
            check_lies_on(name, parameter, sharding, mesh)
            if zero and (has_gradient_hooks(parameter) or has_accumulation_hooks(parameter)):
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
