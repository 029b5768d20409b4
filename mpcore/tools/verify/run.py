"""Build the model on one rank, run one step, and record all tensors that are compared."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch import pytree
from mpcore._torch.compile import eagerly
from mpcore.layers.attention.sequence import sequence_index, shard_sequence
from mpcore.layers.initialize import materialize
from mpcore.mesh.agreement import gather_objects
from mpcore.mesh.axis import Mesh
from mpcore.optim.adamw import AdamW
from mpcore.random import generator
from mpcore.sharding.declarations import declarations, named_modules, persistent_buffers, shardings
from mpcore.sharding.declare import Run, Sharding
from mpcore.sharding.state_dict import full_tensor
from mpcore.tools import invariant
from mpcore.tools.verify.errors import explained, without_sequence_parallel
from mpcore.tools.verify.layout import Layout
from mpcore.training.loss_check import with_mesh
from mpcore.training.policies import Zero
from mpcore.training.prepare import prepare
from mpcore.training.replica_check import norms_of_shards

SHIFT = 1e-6  # for weights near 0.02: the central difference is then off by 1e-8 of the gradient's norm
SLOPE = 1e-6  # the largest accepted error of a slope, relative to the gradient's norm
STEP = 0.1  # largest norm of the step: small, so that evaluation after it has rounding errors as before
Call = tuple[str, int]  # a module's name, and the number of its call within one forward: 0, 1, ...


@dataclass(frozen=True)
class Task:
    """The model to verify, and how.

    Attributes:
        build: `build(mesh)` or `build(mesh, sequence_parallel=...)`. It returns the model, or this rank's stage of it.
        batch: "x": the model's input; "target": the loss's second argument; other tensors are passed by name. All are
            [B, ...].
        loss: `loss(output, target)` or `loss(output, target, mesh)`: a sum over its tokens, never a mean. None: half
            the sum of squares.
        dtype: the dtype of the parameters and of floating-point inputs.
        nudge: the seed of a random change of each parameter by up to half a rounding. 0: no change.
        virtual: the virtual degree of the meshes; runs are then bitwise equal. 0: none.
        shift: how far each trained parameter is moved along its `direction`, on one process. 0: not moved.
        wide: whether to compute in float64 where the model casts to float32.
    """

    build: Callable[..., nn.Module]
    batch: Mapping[str, Tensor]
    loss: Callable[..., Tensor] | None = None
    dtype: torch.dtype = torch.float64
    seed: int = 0
    nudge: int = 0
    virtual: int = 0
    shift: float = 0.0
    wide: bool = False


@dataclass
class RankRecord:
    """The tensors that a rank recorded in the step.

    Attributes:
        length: T, the length of the full sequence that cp shards.
        tokens: the indices of this rank's tokens in the sequence. None: all.
        initial, gradients, updated: the initial values, gradients and updated values: logical tensors by parameter
            name.
        local: the gradients of replicated parameters before any reduction.
        outputs: what each call of a module returned on this rank, in the order of the forward.
        random: the calls of modules before whose end the forward drew from torch's random generator, since the end of
            the module call before.
        features: by module name, the index ranges of the last dimension that this rank holds.
        output: the tensors that the last stage returned, by their position in its output. None on other stages.
        buffers: this rank's persistent buffers after the step.
        evaluated: like `output`, for the same batch in eval() after the step.
        sharded: the names of the parameters of which a rank holds a shard.
        norms: what to replace each norm by that isn't sequence parallel, if other layers are.
        forgotten: the layers with tp that were built without sequence parallelism, if others were built with it.
        rows: B, the number of rows of the full batch.
        casts: the number of tensors that a run with `wide` kept from being cast to float32.
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
    outputs: dict[Call, Tensor] = field(default_factory=dict)
    random: set[Call] = field(default_factory=set)
    features: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    output: dict[str, Tensor] | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluated: dict[str, Tensor] | None = None
    sharded: frozenset[str] = frozenset()
    norms: dict[str, str] = field(default_factory=dict)
    forgotten: frozenset[str] = frozenset()
    rows: int = 0
    loss: float = 0.0
    norm: float = 0.0
    casts: int = 0


def build_options(build: Callable[..., nn.Module], layout: Layout) -> dict[str, bool]:
    """Return the keyword arguments of `build` under a layout."""
    if "sequence_parallel" in inspect.signature(build).parameters:
        return {"sequence_parallel": layout.sequence_parallel}
    if layout.sequence_parallel:
        raise ValueError(
            f"layout {layout.name!r}: the builder takes no argument sequence_parallel: write build(mesh, "
            "sequence_parallel=False) and pass it to the layers, or leave out sp"
        )
    return {}


def build_model(task: Task, mesh: Mesh, layout: Layout) -> nn.Module:
    """Return the user's model on this mesh, with its initial values, in the task's dtype."""
    torch.manual_seed(task.seed)
    model = task.build(mesh, **build_options(task.build, layout))
    if not isinstance(model, nn.Module):
        raise ValueError(f"the builder returned a {type(model).__name__}, no nn.Module")
    if mesh.pp.size > 1:
        stages = gather_objects(sorted(dict(model.named_parameters())), mesh.pp.group)
        if stages[0] and all(names == stages[0] for names in stages):
            raise ValueError(
                f"each of {mesh.pp.size} stages holds the same {len(stages[0])} parameters, such as {stages[0][0]}: "
                f"the builder must return the stage of mesh.pp.rank alone, with the names of the unsharded model"
            )
    if any(p.is_meta for p in model.parameters()):
        # initialized in their own dtype, as in training, and cast afterwards
        materialize(model, task.seed)
    complex_dtype = torch.complex128 if task.dtype == torch.float64 else torch.complex64

    def cast(x: Tensor) -> Tensor:  # not model.to(dtype), which drops the imaginary part of complex buffers
        return x.to(complex_dtype if x.is_complex() else task.dtype if x.is_floating_point() else x.dtype)

    model = model._apply(cast)
    if task.nudge:
        torch.manual_seed(task.nudge)
        with torch.no_grad():
            for p in model.parameters():
                p += p * (torch.finfo(p.dtype).eps * (torch.rand(p.shape) - 0.5)).to(p.dtype)
    if task.shift:
        move(model, task.shift)
    return model


@torch.no_grad()
def move(model: nn.Module, shift: float) -> None:
    """Move the trained parameters by `shift` along `direction`."""
    for name, p in model.named_parameters():
        p += shift * direction(name, p) if p.requires_grad else 0


def direction(name: str, like: Tensor) -> Tensor:
    """Return a random direction in which to move a parameter. It depends only on the parameter's name and shape."""
    return torch.randn(like.shape, generator=generator(0, name), dtype=torch.float64).to(like)


def check_slope(gradients: Mapping[str, Tensor], norm: float, above: float, below: float) -> float:
    """Compare the gradients with the slope of the loss along a random direction, in float64 on one process."""
    slope = (above - below) / (2 * SHIFT)
    want = float(sum((g * direction(name, g)).sum() for name, g in gradients.items()))
    off = abs(slope - want) / norm if norm else abs(slope)
    if not off <= SLOPE + 1e-15 * max(abs(above), 1.0) / (SHIFT * (norm or 1.0)):
        raise ValueError(
            f"along a random direction the loss of one process has the slope {slope:.9g}, and its gradients say "
            f"{want:.9g}: a backward is not that of its forward"
        )
    return off


def run_step(task: Task, mesh: Mesh, layout: Layout) -> RankRecord:
    """Build the model, and run forward, backward, one step of plain SGD and a forward in eval().

    With a virtual degree, the optimizer is AdamW, and two steps are made.
    """
    model = build_model(task, mesh, layout)
    seen = RankRecord(mesh.tp.rank, mesh.cp.rank, mesh.pp.rank, mesh.dp.rank)
    declared = shardings(model)
    seen.initial = full_tensors({name: p for name, p, _ in declarations(model)}, declared)
    seen.sharded = frozenset(name for name, s in declared.items() if any(len(each.runs) > 1 for each in s.shards))
    seen.norms = norms_of_shards(named_modules(model))
    seen.forgotten = frozenset(without_sequence_parallel(named_modules(model))) - seen.norms.keys()
    seen.rows = len(task.batch["x"])
    each = task.virtual or mesh.dp.size * layout.micro_batches
    if seen.rows % each:
        what = "the virtual degree" if task.virtual else "dp x micro-batches ="
        raise ValueError(f"layout {layout.name!r}: {seen.rows} rows are not a multiple of {what} {each}")
    forwards = listen(model, seen)
    returned: list[dict[str, Tensor]] = []
    own_loss = with_mesh(task.loss, mesh) if task.loss else None

    def loss(output: Any, target: Tensor) -> Tensor:
        if own_loss is None and not isinstance(output, Tensor):
            raise ValueError(f"the model returns a {type(output).__name__}: a loss(output, target, mesh) must take it")
        returned.append(_leaves(output))
        if not any(leaf.is_floating_point() for leaf in returned[-1].values()):
            raise ValueError(f"the model returns a {type(output).__name__} without a floating tensor: none to compare")
        return output.square().sum() / 2 if own_loss is None else own_loss(output, target)

    batch = {name: t.chunk(mesh.dp.size)[mesh.dp.rank] for name, t in task.batch.items()}
    if mesh.cp.size > 1:
        batch = _cut_sequence(batch, model, mesh, seen)
    batch = {name: t.to(task.dtype) if t.is_floating_point() else t for name, t in batch.items()}
    target = batch.pop("target", batch["x"])
    exact: dict[str, Any] = {"micro_batches": layout.mb or 1, "optimizer": AdamW}
    plain = {"micro_batches": layout.micro_batches, "optimizer": lambda model: torch.optim.SGD(model.parameters())}
    run = (invariant.prepare if task.virtual else prepare)(
        model, mesh, blocks=(), loss=loss, seed=task.seed, initialize=False, data=Zero(layout.zero),
        **(exact if task.virtual else plain),
    )  # fmt: skip
    x = batch.pop("x")
    with eagerly():  # otherwise the hooks are compiled with the modules, again for each call
        try:
            seen.loss = float(run.forward_backward(x, target, tokens=1, **batch))
        except (RuntimeError, ValueError, IndexError) as error:
            error.args = (explained(error, model, loss, layout),)
            raise
    seen.output = joined(returned) if returned else None
    seen.outputs = joined(forwards)
    parameters = {name: p for name, p, _ in declarations(model)}
    if layout.zero == 0:
        seen.local = {
            name: p.grad.clone() for name, p in parameters.items() if p.grad is not None and not declared[name].shards
        }
    seen.norm = float(run.finish_gradients())
    seen.gradients = full_tensors({name: p.grad for name, p in parameters.items() if p.grad is not None}, declared)
    run.optimizer_step(lr=STEP / max(seen.norm, 1.0))
    if task.virtual:  # a second step: in the first the optimizer's moments are 0, which hides errors in them
        with eagerly():
            run.forward_backward(x, target, tokens=1, **batch)
        run.optimizer_step(lr=STEP / max(seen.norm, 1.0))
    seen.updated = full_tensors(parameters, declared)
    seen.buffers = {name: _copied(buffer) for name, _, _, buffer in persistent_buffers(model)}
    with eagerly(), run.evaluating():
        parts = run.pipeline.micro_batches if task.virtual else 1  # the same shapes as in training
        rest: dict[str, Any] = {name: t.chunk(parts) for name, t in batch.items()}
        evaluated = [_leaves(output) for output in run.pipeline.forward(x.chunk(parts), **rest)]
    seen.evaluated = joined(evaluated) if returned else None
    return seen


def _cut_sequence(batch: dict[str, Tensor], model: nn.Module, mesh: Mesh, seen: RankRecord) -> dict[str, Tensor]:
    """Return this rank's tokens of all tensors [B, T, ...], sharded as the model's attention needs."""
    kinds = {module.context for module in model.modules() if isinstance(getattr(module, "context", None), str)}
    if len(kinds) > 1:
        raise ValueError(f"layers have the contexts {sorted(map(str, kinds))}: give all layers the same context")
    kind = str(kinds.pop()) if kinds else "ring"
    if batch["x"].dim() < 2:
        raise ValueError(f"x {tuple(batch['x'].shape)} has no dimension 1, the sequence that cp cuts: [B, T, ...]")
    seen.length = batch["x"].shape[1]
    seen.tokens = sequence_index(seen.length, mesh.cp, kind)
    whole = {name: t for name, t in batch.items() if t.dim() > 1 and t.shape[1] == seen.length}
    return {**batch, **shard_sequence(whole, mesh.cp, kind, 1)}


def full_tensors(tensors: Mapping[str, Tensor], declared: Mapping[str, Sharding]) -> dict[str, Tensor]:
    """Gather logical tensors from the ranks' shards. All ranks must call it."""
    return {name: full_tensor(t, declared[name]).clone() for name, t in tensors.items()}


def _leaves(output: Any, where: str = "") -> dict[str, Tensor]:
    """Return copies of all tensors in a model's output by position, such as "" (the output itself) or "['logits']"."""
    if isinstance(output, Tensor):
        return {where: _copied(output)}
    if isinstance(output, Mapping):
        inner: Sequence[tuple[Any, Any]] = list(output.items())
    else:
        leaves = output if isinstance(output, tuple | list) else pytree.leaves(output)
        inner = [(i, leaf) for i, leaf in enumerate(leaves) if leaf is not output]
    return {name: leaf for key, value in inner for name, leaf in _leaves(value, f"{where}[{key!r}]").items()}


def _copied(x: Tensor) -> Tensor:
    """Return a copy. A complex tensor [...] becomes its real and imaginary parts [..., 2]."""
    return torch.view_as_real(x.detach().resolve_conj()).clone() if x.is_complex() else x.detach().clone()


def joined(parts: Sequence[Mapping[Any, Tensor]]) -> dict[Any, Tensor]:
    """Concatenate the tensors of micro-batches along dimension 0.

    Tensors without dimensions, or whose other dimensions differ, are left out.
    """
    if len(parts) < 2:
        return dict(*parts)
    found = {key: [part[key] for part in parts if key in part] for key in parts[0]}
    alike = {key for key, ts in found.items() if len({t.shape[1:] for t in ts}) == 1 and len(ts) == len(parts)}
    return {key: torch.cat(ts) for key, ts in found.items() if key in alike and ts[0].dim()}


def listen(model: nn.Module, seen: RankRecord) -> list[dict[Call, Tensor]]:
    """Record, for each forward of the model, the first tensor that each module call returns, inner modules first."""
    forwards: list[dict[Call, Tensor]] = []
    inside = False  # False during recomputation, whose calls are not recorded
    state = torch.get_rng_state()

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal inside, state
        forwards.append({})
        inside, state = True, torch.get_rng_state()

    def keep(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal inside, state
            tensors = (x for x in pytree.leaves(output) if isinstance(x, Tensor))
            first = next((x for x in tensors if x.is_floating_point() and x.dim() and not x.is_meta), None)
            if inside and first is not None:
                call = next(i for i in itertools.count() if (name, i) not in forwards[-1])
                forwards[-1][name, call] = first.detach().clone()
                before, state = state, torch.get_rng_state()
                if not torch.equal(before, state):
                    seen.random.add((name, call))
            inside = inside and module is not model

        return hook

    model.register_forward_pre_hook(begin)
    for name, module in named_modules(model):
        module.register_forward_hook(keep(name))
        weight = getattr(module, "shardings", {}).get("weight")
        if weight is not None and not getattr(module, "gather_output", False):
            for shard in weight.shards:
                if weight.shape[shard.dim] == getattr(module, "out_features", None) and shard.dim == 0:
                    seen.features[name] = shard.mine
    return forwards
