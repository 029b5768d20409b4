"""Control when data parallelism gathers parameters and sums gradients: between micro-batches, and around forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch import fsdp, pytree
from mpcore._torch.compile import uncompiled
from mpcore._torch.fsdp_wrap import looks_into, trained_tensors
from mpcore.gradients.drop import drop_gradients
from mpcore.layers.module import refuse_second_derivative
from mpcore.parallel.shared import DataParallel, set_state, shared_units, state_of
from mpcore.sharding.local import reshard


def set_gradient_sync(model: nn.Module, last: bool) -> None:
    """Tell a sharded model, before a micro-batch's forward, whether the micro-batch is the last of the step.

    The backward of the last micro-batch completes the sums over the data ranks.

    Args:
        model: the model, or a pipeline stage, that `shard_data_parallel` sharded. Other models are unchanged.
        last: True for the last micro-batch of the step.

    Note:
        - To abandon a step before that backward, call `mpcore.gradients.drop_gradients(model)` or `model.zero_grad()`.
          `zero_grad` of torch's optimizers keeps gradients that are not summed yet, and the next step would add to
          them.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> for i in range(2):  # micro-batches
        ...     mpcore.parallel.set_gradient_sync(model, last=i == 1)
        ...     model(torch.ones(1, 4)).sum().backward()
    """
    state = state_of(model)
    if state.early is not None:
        state.early.check_settled()
        if last:
            state.early.arm()
        return
    if state.leaves:
        hold_gradients(model)
        return
    # replicas of shards are summed once a step
    _set_backward(state, reduce=last or state.zero > 1, all_reduce=last, reshard=last or state.zero == 3)


def _set_backward(state: DataParallel, *, reduce: bool, all_reduce: bool, reshard: bool) -> None:
    for unit in state.units:  # one by one: torch would walk over the modules each time
        unit.set_requires_gradient_sync(reduce, recurse=False)
        unit.set_requires_all_reduce(all_reduce, recurse=False)
        unit.set_reshard_after_backward(reshard, recurse=False)


def finish_gradients(stages: Iterable[nn.Module]) -> None:
    """Sum the gradients of parameters that several stages of this rank share. Call it after the step's last backward.

    A loop with one model doesn't need it, and a run of `prepare` makes the call itself. With ZeRO 1 to 3,
    `reduce_gradients` raises an error if the gradient of a shared parameter is not summed.

    Args:
        stages: all pipeline stages of this rank.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> mpcore.parallel.finish_gradients([model])
        >>> mpcore.gradients.reduce_gradients(model, mpcore.Mesh())
    """
    stages = list(stages)
    for unit in shared_units(stages):
        unit.finish()
    for stage in stages:
        begin_sums(stage)


def begin_sums(stage: nn.Module) -> None:
    """After the stage's last backward, start the all-reduces of plain data parallelism that have not started."""
    early = state_of(stage).early
    if early is not None:
        early.begin_rest()


def zero_grad(stage: nn.Module, set_to_none: bool = True) -> None:
    """Set the gradients to None, like `zero_grad` of a model, including gradients that are not summed yet."""
    drop_gradients(stage)


@uncompiled
def before_forward(stage: Any, unit: Any, args: Any) -> None:
    """Check that a unit's parameters may be gathered."""
    fsdp.make_root(stage)  # a block that is called before its model is not a model of its own
    torch.clear_autocast_cache()  # a cast of an earlier forward has its gradient after `fully_shard` reduced
    if unit is stage and torch.is_grad_enabled() and fsdp.backward_failed(stage):
        raise ValueError(
            "a backward raised, so gradients are neither whole nor summed: give the step up with "
            "mpcore.gradients.drop_gradients(model), on every rank, before the next forward"
        )
    if torch.is_inference_mode_enabled() and not fsdp.was_gathered(unit):
        raise ValueError(
            f"the first forward of {_name(unit)} is within torch.inference_mode(), so what its parameters are gathered "
            f"in could never be trained: use torch.no_grad()"
        )


@uncompiled
def connect_input(unit: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Let a block with trained parameters have a gradient of its input, so that all ranks reduce blocks in one order.

    Otherwise backward would end at the first block that this rank trained in the step: `fully_shard` reduces the blocks
    below it at the end and in another order, and ranks that used other parameters would add gradients of other blocks.
    """
    first = None
    for x in args if torch.is_grad_enabled() else ():
        if isinstance(x, Tensor) and x.is_floating_point():
            if x.requires_grad:
                return None
            first = x if first is None else first
    if first is None or not fsdp.trains(unit):
        return None
    return tuple(x.detach().requires_grad_() if x is first else x for x in args)


@uncompiled
def after_forward(stage: nn.Module, unit: nn.Module, args: Any, out: Any) -> None:
    """Shard parameters again if no backward will do it: gathered copies must not be read or stepped."""
    if unit is not stage and torch.is_grad_enabled():
        return
    state = state_of(stage)
    trained = trained_tensors(out) if unit is stage else ()
    hidden = unit is stage and not trained and hides_tensors(out)
    evaluated = not torch.is_grad_enabled() or (unit is stage and not trained and not hidden)
    if evaluated and not state.gathered:
        # Not the parameters that another stage shares: its backward needs them.
        for each in state.units if unit is stage and torch.is_grad_enabled() else fsdp.units(unit):
            each.reshard()
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


def hides_tensors(out: Any) -> bool:
    """Return whether an output may hold trained tensors that were not found, or a backward may start elsewhere."""
    leaves = [x for x in pytree.leaves(out) if x is not None]
    plain = (Tensor, int, float, complex, str)
    rest = (x for x in leaves if not looks_into(x))
    return not leaves or any(not isinstance(x, plain) or getattr(x, "requires_grad", False) for x in rest)


@contextmanager
def gathered(model: nn.Module | Iterable[nn.Module]) -> Iterator[None]:
    """Gather parameters once for all forwards without gradients in this context, and shard them again at its end.

    With zero 3 the unsharded stage must fit in memory. Ranks may run different numbers of forwards, for example to
    generate texts of different lengths, but every rank must run the first one, which gathers.

    Args:
        model: the model or stages given to `shard_data_parallel`; other models are unchanged. Don't step the optimizer
            inside the context.
    """
    stages = [model] if isinstance(model, nn.Module) else list(model)
    held = [(stage, state_of(stage)) for stage in stages if state_of(stage).units]
    for stage, state in held:
        _keep_gathered(stage, replace(state, gathered=True))
    try:
        yield
    finally:
        for stage, state in held:
            _keep_gathered(stage, state)
            if not state.gathered:
                reshard(stage)


def _keep_gathered(stage: nn.Module, state: DataParallel) -> None:
    set_state(stage, state)
    for unit in state.units if state.zero == 3 else ():
        unit.set_reshard_after_forward(not state.gathered, recurse=False)


def drops_parameters(model: nn.Module) -> bool:
    """Return whether no rank ever holds its full stage, so that a gathered evaluation might not fit in memory."""
    return state_of(model).zero == 3


def gather(model: nn.Module) -> None:
    """Gather the parameters in the modules, as a split backward needs."""
    for unit in state_of(model).units:
        unit.unshard()


def hold_gradients(model: nn.Module) -> None:
    """Let a backward leave gradients unsummed and parameters gathered: the first half of a split backward."""
    state = state_of(model)
    if state.root is not None:
        state.root.set_is_last_backward(False)
    if state.early is not None:
        state.early.armed = False
    _set_backward(state, reduce=False, all_reduce=False, reshard=state.leaves and state.zero == 3)


def reduce_held(model: nn.Module, last: bool) -> None:
    """After the second half of a split backward, which runs no hooks, do what `set_gradient_sync` requested."""
    root = state_of(model).root
    if root is None:
        return
    if reduces_each_micro_batch(model):
        set_gradient_sync(model, last)
    else:  # `reduce_once` sums at the end; here sums of half precision move to float32
        hold_gradients(model)
    fsdp.end_backward(root)


def reduce_once(model: nn.Module, leaves: bool = False) -> None:
    """After a step's last backward, sum gradients that were not summed in each micro-batch, or those of leaves."""
    state = state_of(model)
    begin_sums(model)
    if state.root is not None and state.leaves == leaves and not reduces_each_micro_batch(model):
        state.root.set_is_last_backward(True)
        _set_backward(state, reduce=True, all_reduce=True, reshard=True)
        fsdp.end_backward(state.root)


def reduces_each_micro_batch(model: nn.Module) -> bool:
    """Return whether gradients are sharded, and so reduce-scattered in each micro-batch."""
    state = state_of(model)
    return state.zero > 1 and not state.leaves


def sums_within_backward(model: nn.Module) -> bool:
    """Return whether a backward sums gradients: in each micro-batch if they are sharded, in the last with ZeRO-0."""
    return reduces_each_micro_batch(model) or state_of(model).early is not None
