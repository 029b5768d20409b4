"""Data parallelism over plain local shards: ZeRO-0 to 3 and HSDP, by torch's `fully_shard`.

Communication over the data ranks per step, in multiples of a rank's parameters, with M micro-batches:

    zero  parameters gathered  gradients summed                    replicated on each data rank
    0     -                    once, all-reduced (2)               parameters, gradients, optimizer state
    1     once (1)             once, reduce-scattered (1)          parameters, gradients
    2     once (1)             each micro-batch (M)                parameters
    3     twice a micro-batch  each micro-batch (M)                nothing
          (2 M)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mpcore._torch.autograd import has_accumulation_hooks, has_gradient_hooks
from mpcore._torch.fsdp import add_unit, units
from mpcore.gradients.accumulate import mark_replaced
from mpcore.gradients.overlap import OverlappedAllReduce
from mpcore.gradients.reduce import refuse_hooks
from mpcore.kernels._main_grad import main_grad
from mpcore.layers.module import as_module_list
from mpcore.layers.moe.layer import check_experts
from mpcore.mesh.agreement import check_same
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.parallel.fsdp import UnitWrapper, Zero
from mpcore.parallel.shared import UNSEEN, DataParallel, router_statistics, set_state, share_parameters, state_of
from mpcore.parallel.sync import after_forward, before_forward, connect_input, zero_grad
from mpcore.sharding.declarations import add_partial, declarations, declare_anew, owners, sharding_of, shardings
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
    """Shard a model over the data ranks. Gradients are summed, never averaged: divide the loss once.

    Parameters of experts are replicated or sharded over `mesh.edp`, all others over `mesh.data`. Call
    `reduce_gradients(model)` after each step's last backward. Without `mpcore.pipeline.Pipeline` call
    `set_gradient_sync` before each forward, and `finish_gradients` before `reduce_gradients` if stages of this rank
    share parameters.

    Args:
        model: the model, this rank's pipeline stage, or a list of its stages, which may share parameters. Parameters
            must be plain tensors with values: call `materialize` first. It is changed in place and returned.
        mesh: the model's mesh. With one data rank nothing is sharded, but gradients of experts whose etp differs from
            tp are declared partial over their replicas in tp.
        blocks: submodules in the order of forward, as a list or an `nn.ModuleDict`. Each block is gathered and reduced
            as one unit. A block inside another block is a separate unit.
        zero: the ZeRO stage.
            0: replicate everything and all-reduce gradients. The all-reduces of large gradients start in the backward
            that `set_gradient_sync` marks as the last, all others in `reduce_gradients`.
            1: shard the optimizer state. Gradients are reduce-scattered with the last micro-batch, and parameters are
            gathered once per step.
            2: shard gradients too. They are reduce-scattered in each micro-batch.
            3: shard parameters too. A block's parameters are gathered for its forward and again for its backward;
            parameters that stages share are gathered and reduced once per step.
        replicate: shard over groups of `data.size / replicate` consecutive data ranks, such as those of a node, and
            replicate across the groups (HSDP).
        param_dtype: gather parameters and compute in this dtype. The optimizer steps the parameters in their own dtype:
            they are the master weights. None: compute in the parameters' dtype.
        reduce_dtype: the dtype in which gradients are summed; fp64 for fp64 parameters.

    Raises:
        ValueError: on every rank, before anything changes, if an argument doesn't fit the mesh or the model, or
            ranks pass different arguments.

    Note:
        - Before the call, add adapters and heads, tie parameters, and make copies (EMA, `copy.deepcopy`). After it,
          create the optimizer and gradient hooks (`register_post_accumulate_grad_hook`): 1 to 3 replace the parameters.
        - With 1 to 3, return the loss, or the tensors it is computed from, from forward: as a tensor, or in dicts,
          lists or tuples (dataclasses from torch 2.13). Gradients of a loss stored elsewhere are never reduced.
        - Call the model itself, and route other methods (encode, generate) through its forward: only forward gathers
          the parameters outside the blocks. Every rank must run a block, or none: a run of `prepare` refuses the step.
        - A forward under `torch.no_grad()` may run at any time; use `gathered` to gather only once. The first forward
          must not run under `torch.inference_mode()`. Second derivatives are not supported.
        - Scalars, empty parameters and the statistics of routers are replicated.
        - After `reduce_gradients` the gradient of a parameter that no rank used is None. With 1 to 3 it is zeros until
          then, also for hooks.
        - To abandon a step, also after a backward that raised, call `mpcore.gradients.drop_gradients(model)`.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; Zhao et al. 2023, arXiv:2304.11277.

    Example:
        >>> model = nn.Sequential(mpcore.ParallelMLP(4, 16), mpcore.ParallelMLP(4, 16))
        >>> model = mpcore.parallel.shard_data_parallel(model, mpcore.build_mesh(), blocks=model, zero=3)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    check_mesh(mesh)
    policy = Zero(zero, replicate, param_dtype, reduce_dtype)
    stages = [model] if isinstance(model, nn.Module) else list(model)
    given = dict.fromkeys(block for block in as_module_list(blocks) if block not in stages)
    blocks = sorted(given, key=lambda block: sum(module in given for module in block.modules()))  # inner ones first
    policy.check(mesh)
    _check_model(stages, blocks, mesh, zero)
    check_same("data parallelism", asdict(policy) | {"blocks": len(blocks)}, mesh.data)
    if mesh.device_mesh is None:
        return model
    if zero == 0 or (mesh.data.size == 1 and param_dtype is None):
        for stage in stages:
            _declare_pending(stage, mesh, lambda _: True)  # with one data rank: experts' replicas over tp
            if mesh.data.size > 1:
                set_state(stage, DataParallel(0, early=OverlappedAllReduce(stage, stages)))
        return model

    before = [p for stage in stages for p in stage.parameters()]
    declared = {p: sharding for stage in stages for _, p, sharding in declarations(stage)}
    wrap = UnitWrapper(mesh, declared, policy)
    for name, module in ((name, m) for stage in stages for name, m in stage.named_modules()):
        wrap.form(module, "weight", zero, name)
    whole = {p for p, sharding in declared.items() if _stays_whole(p, sharding, mesh, replicate)}
    whole |= {p for stage in stages for p in router_statistics(stage)}  # else they would be cast to `param_dtype`
    for stage in stages:
        _declare_pending(stage, mesh, whole.__contains__)
    shared = share_parameters(stages, whole, wrap)
    whole |= {p for unit in shared for p in unit.shared}
    for stage in stages:
        within = set(stage.modules())
        for module in (*(block for block in blocks if block in within), stage):
            wrap(module, whole, zero)
            module.register_forward_pre_hook(partial(before_forward, stage), prepend=True)
            module.register_forward_hook(partial(after_forward, stage))
            if module is not stage:
                module.register_forward_pre_hook(connect_input, prepend=True)
            vars(module)["__deepcopy__"] = partial(_refuse_copy, zero)
        stage.zero_grad = partial(zero_grad, stage)  # type: ignore[assignment]
        mine = tuple(unit for unit in shared if unit.owners.keys() & within)
        set_state(stage, DataParallel(zero, tuple(units(stage)), mine, replicate=replicate))
        for unit in mine:
            add_unit(stage, unit)
            stage.register_forward_pre_hook(lambda *_, unit=unit: unit.gather())
    now = {p for stage in stages for p in stage.parameters()}
    mark_replaced(p for p in before if p not in now)
    return model


def _refuse_copy(zero: int, _: object) -> None:
    raise ValueError(
        f"a module that zero {zero} has sharded can't be copied: copy it before, or use zero=0; average (EMA) copies "
        f"of its shards, {{name: p.detach().clone() for name, p in model.named_parameters()}}"
    )


def _check_model(stages: list[nn.Module], blocks: list[nn.Module], mesh: Mesh, zero: int) -> None:
    within = {module for stage in stages for module in stage.modules()}
    for block in blocks:
        if block not in within:
            raise ValueError(f"the block {type(block).__name__} is no submodule of the model")
    if any(isinstance(module, FSDPModule) or state_of(module) is not UNSEEN for module in within):
        raise ValueError("the model is sharded over data already")
    tables = [(n, m) for s in stages for n, m in s.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    capped = next((name for name, table in tables if table.max_norm is not None), None)
    if capped is not None and mesh.data.size > 1:
        raise ValueError(
            f"{capped} has max_norm: each of {mesh.data.size} data ranks would scale the rows of its own tokens alone, "
            f"and the replicas would part. Scale the rows that are looked up in your forward instead"
        )
    for stage in stages:
        check_experts(stage, mesh)
        for name, parameter, sharding in declarations(stage):
            if is_dtensor(parameter):
                raise ValueError(f"{name} is sharded already: stages that share parameters are to be given in one call")
            check_lies_on(name, parameter, sharding, mesh)
            adds = has_accumulation_hooks(parameter)
            if zero and (adds or has_gradient_hooks(parameter)):
                raise ValueError(
                    f"{name} has hooks on its gradient, and zero {zero} puts shards in its place: call "
                    f"register_post_accumulate_grad_hook of those after shard_data_parallel"
                )
            if has_gradient_hooks(parameter) or (adds and main_grad(parameter) is None):  # whose hook adds to it
                refuse_hooks(name, sharding, [mesh.data])
            if zero and not parameter.is_contiguous():
                raise ValueError(
                    f"{name} of strides {parameter.stride()} can't be cut by zero {zero}: make it contiguous before, "
                    f"or use zero=0"
                )
    if zero:
        _check_units(stages, blocks)


def _check_units(stages: list[nn.Module], blocks: list[nn.Module]) -> None:
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
    inside = {p for block in blocks for p in block.parameters()}
    for unit in (*blocks, *stages):
        mine = [p for p in unit.parameters() if p.requires_grad and (unit in units or p not in inside)]
        dtypes = sorted({str(p.dtype) for p in mine})
        if len(dtypes) > 1:
            raise ValueError(
                f"trained parameters of one {type(unit).__name__} are of {' and '.join(dtypes)}: give each dtype "
                f"blocks of its own, or use zero=0"
            )


def _stays_whole(parameter: Tensor, sharding: Sharding, mesh: Mesh, replicate: int) -> bool:
    """Return whether `fully_shard` can't shard the parameter: no or empty dimension 0, or experts without replicas."""
    alone = sharding.data_axis(mesh).size == replicate < mesh.data.size
    return parameter.dim() == 0 or parameter.numel() == 0 or alone


def _declare_pending(stage: nn.Module, mesh: Mesh, which: Callable[[nn.Parameter], bool]) -> None:
    """Declare the data axis of each parameter, and declare the gradients of some partial over it."""
    declared = shardings(stage)
    for name, module, leaf, parameter in list(owners(stage)):
        axis = declared[name].data_axis(mesh)
        if which(parameter) and all(axis.group is not old.group for old in declared[name].partial):
            add_partial(module, leaf, axis)
        if mesh.data.size > 1:
            declare_anew(module, leaf, replace(sharding_of(module, leaf, parameter), data=axis))
