"""`prepare`: a run whose steps sum gradients by a binary tree over the leaves of the batch (docs/bitwise.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore.collectives import all_reduce
from mpcore.gradients import gradient_of, zero_gradients
from mpcore.gradients.norm import grad_norm, owned_tensors
from mpcore.kernels._main_grad import GradientState, main_grad, mark_main_grad
from mpcore.mesh.agreement import check_same, raising_together
from mpcore.mesh.axis import Axis, Mesh, check_mesh
from mpcore.optim.adamw import AdamW
from mpcore.parallel.fsdp import ExchangeReduceScatter
from mpcore.parallel.shared import set_state, shared_units, state_of
from mpcore.parallel.sync import reduce_once
from mpcore.pipeline.schedules import Schedule
from mpcore.sharding.declarations import ModelTree
from mpcore.sharding.declare import Sharding
from mpcore.tools.invariant.layers import make_invariant
from mpcore.tools.invariant.sums import pieces, tree_sum
from mpcore.training.observers import Observer
from mpcore.training.policies import Offload, Precision, Zero
from mpcore.training.prepare import prepare as core_prepare
from mpcore.training.run import Run


class TreeReduceScatter(ExchangeReduceScatter):
    """The reduce-scatter of `fully_shard` as a binary tree over ranks."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **how: Any) -> None:
        terms = torch.empty_like(input_tensor)
        dist.all_to_all_single(terms, input_tensor, group=group)
        output_tensor.copy_(tree_sum(terms.chunk(group.size())))


def prepare(
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    *,
    micro_batches: int = 1,
    precision: Precision | str = "float32",
    data: Zero = Zero(),
    offload: Offload = Offload(),
    schedule: str | Schedule = "1f1b",
    **options: Any,
) -> Run:
    """Prepare a run whose losses, norms and weights have the same bits on all meshes of the same virtual degrees.

    The function calls `make_invariant`, then `mpcore.prepare` (docs/bitwise.md). Each forward computes one leaf of the
    batch, for every value of `micro_batches`.

    Args:
        model: see `mpcore.prepare`. The layers lie on the axes of `mesh`.
        mesh: the mesh from `invariant_mesh`.
        micro_batches, precision, data, offload, schedule, options: see `mpcore.prepare`.

    Returns:
        The `Run`. Its number of micro-batches is the number of leaves on a rank.

    Raises:
        ValueError: on every rank, if the mesh has no virtual degrees, a layer, a policy or the optimizer has no
            invariant form, or `micro_batches` doesn't divide the leaves of a rank; and as `mpcore.prepare`.

    Example:
        >>> from mpcore.tools.invariant import invariant_mesh, prepare
        >>> mesh = invariant_mesh(mpcore.build_mesh(device_type="cpu"), 8)
        >>> model = mpcore.ColumnParallelLinear(4, 8, tp=mesh.tp, device="meta")
        >>> loss = lambda output, target: (output - target).square().sum()
        >>> run = prepare(model, mesh, blocks=(), loss=loss, optimizer=mpcore.AdamW)
        >>> run.pipeline.micro_batches
        8
    """
    check_mesh(mesh)
    stages = [model] if isinstance(model, nn.Module) else list(model)
    threads = {"number of threads, by which kernels choose how to sum": torch.get_num_threads()}
    check_same("arguments of prepare", {"micro_batches": micro_batches, **threads})
    with raising_together():
        precision = precision if isinstance(precision, Precision) else Precision(precision)
        if (leaves := pieces(mesh.data)) % micro_batches:
            text = f"micro_batches {micro_batches} does not divide the {leaves} leaves of a rank: take one that does"
            raise ValueError(text)
        _check_policies(precision, data, offload, schedule, **options)
        make_invariant(stages)
    how: dict[str, Any] = {"precision": precision, "data": data, "offload": offload, "schedule": schedule, **options}
    run = core_prepare(stages, mesh, micro_batches=leaves, **how)
    with raising_together():
        step = InvariantStep(run.stages, mesh, run.optimizer)
    for stage in run.stages:
        state = state_of(stage)
        for unit in state.units:
            unit.set_custom_reduce_scatter(TreeReduceScatter())  # pyright: ignore[reportArgumentType]
        if state.units:
            set_state(stage, replace(state, leaves=True))
    run.pipeline.loss, run.pipeline.after_backward = step.watch_loss(run.pipeline.loss), step.take
    run.measure_norm = exact_norm
    run.observers.insert(0, step)
    return run


def _check_policies(
    precision: Precision, data: Zero, offload: Offload, schedule: str | Schedule, **options: Any
) -> None:
    """Raise ValueError for policies without an invariant form."""
    if not (isinstance(data, Zero) and isinstance(offload, Offload)):
        return  # `mpcore.prepare` raises
    splits = schedule.splits_backward if isinstance(schedule, Schedule) else schedule in ("zb", "zbv", "dualpipev")
    asked = {
        "FP8": precision.fp8, "autocast": precision.autocast_dtype is not None, "compile": options.get("compile"),
        "overlap": options.get("overlap"),
        "a schedule that splits backward": splits,
        "replicate above 1": data.replicate > 1, "offload of parameters": offload.parameters,
        "a reduce_dtype other than float32": data.reduce_dtype != torch.float32,
    }  # fmt: skip
    refused = [name for name, value in asked.items() if value]
    if refused:
        raise ValueError(f"invariant numerics don't go with {refused[0]}: see docs/bitwise.md")


@torch.no_grad()
def exact_norm(model: nn.Module | ModelTree, mesh: Mesh, numbers: Sequence[int] = ()) -> Tensor:
    """Compute `norm_of` with the same bits on every layout: integer sums of squares do not depend on the order."""
    largest = grad_norm(model, mesh, math.inf)
    unit = largest.clamp(min=torch.finfo(largest.dtype).tiny)
    digits = torch.zeros(3, dtype=torch.int64, device=mesh.device)  # each holds 20 bits of every square
    for _, grad in owned_tensors(model, mesh, gradient_of):
        rest = (grad.double() / unit).square()
        for digit in digits:
            rest = rest * 2**20
            digit += rest.long().sum()
            rest = rest - rest.floor()
    high, middle, low, *sums = all_reduce(torch.cat([digits, digits.new_tensor(numbers)]), mesh.world).double()
    squares = high * 2.0**-20 + middle * 2.0**-40 + low * 2.0**-60
    norm = torch.where(largest.isfinite(), squares.sqrt() * unit, largest)
    return torch.stack([norm, *sums]) if sums else norm


class InvariantStep(Observer):
    """Sum the gradients of an invariant run by a binary tree over the leaves of its batch.

    A leaf is one of V equal parts of the batch, where V is the virtual degree of the data ranks. Each forward and
    backward computes one leaf, so no shape depends on the layout; the layout decides only which rank has which leaves.
    A rank adds its leaves as they come, and holds at most log2(leaves) + 1 partial sums. `all_reduce` adds the sums of
    the ranks.
    """

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) is not AdamW:
            kind = f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
            raise ValueError(f"invariant numerics have no form of {kind}: take optimizer=mpcore.AdamW")
        if any(shared_units(stages)):
            raise ValueError("invariant numerics have no ZeRO of a table that stages of a rank share: take Zero(0)")
        optimizer.set_fused(False)
        self.ends: Axis = mesh.ends
        self.trees: dict[nn.Module, ModelTree] = {stage: ModelTree(stage) for stage in stages}
        for tree in self.trees.values():
            tree.declared  # noqa: B018  read now: between micro-batches modules hold gathered parameters
        self.losses: list[Tensor] = []  # of this step's leaves
        # of each parameter the levels and sums of the tree's nodes; None: no leaf below used it
        self.nodes: dict[nn.Parameter, list[tuple[int, Tensor | None]]] = {}
        self.sharded: dict[nn.Parameter, Any] = {}  # torch's record of a parameter that data parallelism sharded

    def watch_loss(self, loss: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        """Wrap the loss function to record the loss of each leaf."""

        def watched(output: Any, target: Tensor) -> Tensor:
            total = loss(output, target)
            if torch.is_grad_enabled():
                self.losses.append(total.detach().double())
            return total

        return watched

    def take(self, stage: nn.Module) -> None:
        """Take the gradients that the backward of a leaf left in one of the stages."""
        tree = self.trees[stage]
        if not self.sharded and tree.units:
            self.sharded = {p: record for each in self.trees.values() for p, record in fsdp.records(each.units)}
        for _, parameter, sharding in tree.declared:
            if not parameter.requires_grad:
                continue
            held = self.nodes.setdefault(parameter, [])
            held.append((0, self._take(parameter)))
            while not self._is_tied(sharding) and len(held) > 1 and held[-1][0] == held[-2][0]:
                (level, a), (_, b) = held[-2:]
                held[-2:] = [(level + 1, b if a is None else a if b is None else a + b)]

    def before_forward(self, run: Run, tokens: Tensor | int, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError if the step has another number of micro-batches than leaves."""
        found, leaves = run.pipeline.micro_batches, pieces(run.mesh.data)
        if found != leaves:
            raise ValueError(f"{found} micro-batches: an invariant run has {leaves} leaves in every step")

    def after_backward(self, run: Run, total: Tensor) -> Tensor:
        return run.pipeline.from_last(self.finish(total))

    def finish(self, total: Tensor) -> Tensor:
        """After the last leaf, sum the leaves' gradients (with ZeRO also over ranks), and return the summed loss."""
        for stage, tree in self.trees.items():
            for _, parameter, sharding in tree.declared:
                nodes = [node for _, node in self.nodes.pop(parameter, [])]
                if nodes and self._is_tied(sharding):
                    nodes = [self._tied_sum(parameter, nodes)]
                if nodes and nodes[0] is not None:
                    self._give(parameter, nodes[0])
            reduce_once(stage, leaves=True)
        losses, self.losses = self.losses, []
        return tree_sum(losses) if losses else total

    def dropped(self, run: Run) -> None:
        self.losses.clear()
        self.nodes.clear()

    def _is_tied(self, sharding: Sharding) -> bool:
        return self.ends.size > 1 and any(axis.group is self.ends.group for axis in sharding.partial)

    def _tied_sum(self, parameter: nn.Parameter, leaves: list[Tensor | None]) -> Tensor:
        """Add the first and last stage's gradients of each leaf, as autograd does in one stage; then sum the leaves.

        The last stage returns zeros, so the later sum over both stages changes nothing.
        """
        record = self.sharded.get(parameter)
        computed: Any = parameter if record is None else fsdp.whole_parameter(record)
        zero = torch.zeros_like(computed, dtype=torch.promote_types(computed.dtype, torch.float32))
        mine = torch.stack([zero if leaf is None else leaf for leaf in leaves])
        total = all_reduce(mine, self.ends).to(computed.dtype).to(mine.dtype)
        return tree_sum(total.unbind()) if self.ends.rank == 0 else zero

    def _take(self, parameter: nn.Parameter) -> Tensor | None:
        record = self.sharded.get(parameter)
        grad = gradient_of(parameter) if record is None else fsdp.exchange_gradient(record, None)
        # in a tensor of its own; -0 becomes 0: where a rank holds none of an element, others add 0 to it
        grad = None if grad is None else grad.to(torch.promote_types(grad.dtype, torch.float32)) + 0.0
        if record is None:
            zero_gradients([parameter])
        return grad

    def _give(self, parameter: nn.Parameter, total: Tensor) -> None:
        record, main = self.sharded.get(parameter), main_grad(parameter)
        if record is not None:
            fsdp.exchange_gradient(record, total)
        elif main is not None:
            main.copy_(total)
            mark_main_grad(parameter, GradientState.LOCAL)
        else:
            parameter.grad = total.to(parameter.dtype)
