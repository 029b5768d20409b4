"""What one rank does: build the model, one step, and tell all that it saw."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpcore.collectives import all_reduce
from mpcore.data_parallel import shard_data_parallel
from mpcore.gradients import grad_norm, reduce_gradients
from mpcore.initialize import materialize
from mpcore.layers.context import sequence_index, shard_sequence
from mpcore.mesh import Mesh
from mpcore.pipeline.engine import Pipeline
from mpcore.sharding import Run, Sharding, full_tensor, shardings
from mpcore.verify.layout import Layout

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Task:
    """What is verified.

    Attributes:
        build: `build(mesh)` or `build(mesh, sequence_parallel=...)`: the model, or this rank's stage of it.
        batch: "x", the model's input; "target", which the loss takes; other tensors are passed by name. All [B, ...].
        loss: `loss(output, target, mesh)`: summed over what it is given, never averaged; None: half the square.
        dtype: of the parameters and of floating inputs.
        seed: of the first values.
    """

    build: Callable[..., nn.Module]
    batch: Mapping[str, Tensor]
    loss: Callable[[Tensor, Tensor, Mesh], Tensor] | None = None
    dtype: torch.dtype = torch.float64
    seed: int = 0


@dataclass
class Seen:
    """What a rank saw of the step.

    Attributes:
        tp, cp, pp, dp: this rank's place on the axes.
        length: T, of the whole sequence that cp cuts.
        tokens: the places in it that this rank holds; None: all.
        initial, gradients, updated: logical tensors by the parameter's name.
        local: gradients of replicated parameters before anything finished them.
        outputs: what the modules returned, by name in the order of the forward, on this rank.
        features: by name of a module the runs of its last dimension that this rank holds.
        output: what the last stage returned; None on other stages.
        loss: of the whole batch.
        norm: of all gradients.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    length: int = 0
    tokens: Tensor | None = None
    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    local: dict[str, Tensor] = field(default_factory=dict)
    updated: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    features: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    output: Tensor | None = None
    loss: float = 0.0
    norm: float = 0.0


def build_model(task: Task, mesh: Mesh, layout: Layout) -> nn.Module:
    """The user's model on this mesh, with its first values, in the task's dtype."""
    options: dict[str, Any] = {}
    if "sequence_parallel" in inspect.signature(task.build).parameters:
        options["sequence_parallel"] = layout.sequence_parallel
    elif layout.sequence_parallel:
        raise ValueError(f"layout {layout.name!r}: the builder takes no argument sequence_parallel")
    torch.manual_seed(task.seed)
    model = task.build(mesh, **options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"the builder returned a {type(model).__name__}, no nn.Module")
    if mesh.pp.size > 1:
        stages: list = [None] * mesh.pp.size
        dist.all_gather_object(stages, sorted(dict(model.named_parameters())), group=mesh.pp.group)
        if stages[0] and all(names == stages[0] for names in stages):
            raise ValueError(
                f"each of {mesh.pp.size} stages holds the same {len(stages[0])} parameters, such as {stages[0][0]}: "
                f"the builder must return the stage of mesh.pp.rank alone, with the names of the whole model"
            )
    if any(p.is_meta for p in model.parameters()):
        # drawn in their own dtype, as the run does it, and only then made wide
        materialize(model, task.seed)
    return model.to(task.dtype)


def run_step(task: Task, mesh: Mesh, layout: Layout) -> Seen:
    """Build, forward, backward and one step of plain SGD.

    Raises:
        ValueError: if the batch can't be dealt out.
    """
    model = build_model(task, mesh, layout)
    seen = Seen(mesh.tp.rank, mesh.cp.rank, mesh.pp.rank, mesh.dp.rank)
    declared = shardings(model)
    seen.initial = _full(dict(model.named_parameters()), declared)
    rows = len(task.batch["x"])
    each = mesh.dp.size * layout.micro_batches
    if rows % each:
        raise ValueError(f"layout {layout.name!r}: {rows} rows are not a multiple of dp x micro-batches = {each}")
    outputs = _listen(model, seen)
    if mesh.data.size > 1:
        shard_data_parallel(model, mesh, zero=layout.zero)

    def loss(output: Any, target: Tensor) -> Tensor:
        if task.loss is None and not isinstance(output, Tensor):
            raise ValueError(f"the model returns a {type(output).__name__}: a loss(output, target, mesh) must take it")
        first = _first(output)
        if first is None:
            raise ValueError(f"the model returns a {type(output).__name__} without a floating tensor: none to compare")
        seen.output = first.detach() if seen.output is None else torch.cat([seen.output, first.detach()])
        return task.loss(output, target, mesh) if task.loss else output.square().sum() / 2

    batch = {name: t.chunk(mesh.dp.size)[mesh.dp.rank] for name, t in task.batch.items()}
    if mesh.cp.size > 1:
        batch = _cut_sequence(batch, model, mesh, seen)
    batch = {name: t.to(task.dtype) if t.is_floating_point() else t for name, t in batch.items()}
    target = batch.pop("target", batch["x"])
    pipeline = Pipeline(model, mesh, layout.micro_batches, loss)
    total = pipeline.forward_backward(batch.pop("x"), target, **batch)
    seen.loss = float(all_reduce(total, mesh.data))
    seen.outputs = {name: torch.cat(parts[-layout.micro_batches :]) for name, parts in outputs.items()}
    parameters = dict(model.named_parameters())
    if layout.zero == 0:
        seen.local = {
            name: p.grad.clone() for name, p in parameters.items() if p.grad is not None and not declared[name].shards
        }
    reduce_gradients(model)
    seen.gradients = _full({name: p.grad for name, p in parameters.items() if p.grad is not None}, declared)
    seen.norm = float(grad_norm(model, mesh))
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    seen.updated = _full(parameters, declared)
    return seen


def _cut_sequence(batch: dict[str, Tensor], model: nn.Module, mesh: Mesh, seen: Seen) -> dict[str, Tensor]:
    """This rank's tokens of all that is [B, T, ...], as the model's attention has them."""
    kinds = {module.context for module in model.modules() if isinstance(getattr(module, "context", None), str)}
    if len(kinds) > 1:
        raise ValueError(f"the sequence can't be cut as {sorted(map(str, kinds))} at once: give all one context")
    kind = str(kinds.pop()) if kinds else "ring"
    if batch["x"].dim() < 2:
        raise ValueError(f"x {tuple(batch['x'].shape)} has no dimension 1, the sequence that cp cuts: [B, T, ...]")
    seen.length = batch["x"].shape[1]
    seen.tokens = sequence_index(seen.length, mesh.cp, kind)
    whole = {name: t for name, t in batch.items() if t.dim() > 1 and t.shape[1] == seen.length}
    return {**batch, **shard_sequence(whole, mesh.cp, kind, 1)}


def _full(tensors: Mapping[str, Tensor], declared: Mapping[str, Sharding]) -> dict[str, Tensor]:
    return {name: full_tensor(t, declared[name]).clone() for name, t in tensors.items()}


def _first(output: Any) -> Tensor | None:
    """The first floating tensor of what a module returns: of a tuple, a dict, or an output of Hugging Face's."""
    return next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()), None)


def _listen(model: nn.Module, seen: Seen) -> dict[str, list[Tensor]]:
    """Keep the first tensor that each module returns, from the inside out."""
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = _first(output)
            if first is not None and not first.is_meta:
                outputs.setdefault(name, []).append(first.detach().clone())

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name))
        weight = getattr(module, "shardings", {}).get("weight")
        if weight is not None and not getattr(module, "gather_output", False):
            for shard in weight.shards:
                if weight.shape[shard.dim] == getattr(module, "out_features", None) and shard.dim == 0:
                    seen.features[name] = shard.mine
    return outputs
