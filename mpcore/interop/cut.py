"""Cut a model that is written as one module, such as a causal model of Hugging Face, into pipeline stages.

A stage is a copy of the model that shares its parameters and keeps their names. It has some of the layers; small
modules stand in for the others (`stage_modules`). So the model's own forward makes masks, positions and rotary tables
on every stage. One tensor goes from stage to stage. The check (`stage_check`) chooses which, or refuses the model:

- the output of a stage's last layer. The next stage does what forward does between the two layers, such as dropout;
- or the input of the next stage's first layer, if forward adds it to the layer's output: `x = x + layer(x)`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore.interop import stage_modules
from mpcore.interop.hugging_face.small import small_copy
from mpcore.interop.parallelize.context import check_decoder
from mpcore.interop.stage_check import Run, check_buffers, compare, random_ids, run_chain
from mpcore.interop.stage_modules import BATCH, TOKENS, sharded_sequence, tokens_split
from mpcore.layers.initialize import deferred_reads
from mpcore.mesh.agreement import raising_together
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.pipeline.partition import parameter_costs, partition
from mpcore.pipeline.schedules import Schedule, find_schedule
from mpcore.sharding.declarations import add_partial, persistent_buffers, shardings

LATER = "read it with from_pretrained(defer=False)"


class Stages(NamedTuple):
    """The result of `pipeline_stages`, for `prepare`."""

    stages: list[nn.Module]
    blocks: dict[int, nn.Module]  # the layers of these stages, by number in the full model
    schedule: Schedule


def pipeline_stages(
    model: nn.Module, mesh: Mesh, *, micro_batches: int, schedule: str = "1f1b", example: Tensor | None = None
) -> Stages:
    """Split a model into pipeline stages and return this rank's. Call it after `parallelize` and `add_lora`.

    The layers are the largest `nn.ModuleList` or `nn.Sequential` of the model. Modules that forward calls before the
    layers, such as embeddings, go to the first stage. Modules that it calls after them, such as the norm and the head,
    go to the last stage. A table tied to the head is on both, and its gradients are summed over `mesh.ends`.

    As a check, the function runs the model and the chain of all stages five times each on 14 tokens, also in training,
    without dropout. The results must be bitwise equal. The stages share the weights of the model, so the check needs
    no memory for weights. For a model of `from_pretrained(defer=True)` it runs a small copy with random weights and all
    layers instead.

    Args:
        model: the full model, the same on every pipeline rank. Its first argument is ids [B, T]. It is not changed;
            delete it afterwards to free the layers of other ranks (`from_pretrained(defer=True)` never holds them).
        mesh: the mesh; `mesh.pp` is the axis of the stages. With one stage, the model itself is returned.
        micro_batches: the number of micro-batches per step.
        schedule: a name of `mpcore.pipeline.schedules.NAMES`.
        example: ids [B, T] for the check; None: random ids.

    Returns:
        `(stages, blocks, schedule)`, the arguments of `prepare`.

    Raises:
        ValueError: on every pipeline rank, if no layers are found, forward does not call each layer once in order,
            there are fewer layers than stages, two stages use a parameter, the model fails on `example`, or the stages'
            result differs from the model's.

    Note:
        - Pass inputs that all stages need, such as `attention_mask`, as keyword arguments of `forward_backward`.
        - The last stage returns the model's output, which is the input of `loss`. Don't pass `labels`.

    Example:
        >>> mesh = mpcore.build_mesh(device_type="cpu")
        >>> layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> model = nn.Sequential(nn.Embedding(10, 8), layers, nn.Linear(8, 10))
        >>> stages, blocks, schedule = mpcore.pipeline_stages(model, mesh, micro_batches=1)
        >>> len(stages), list(blocks)
        (1, [0, 1])
    """
    check_mesh(mesh)
    with raising_together():
        plan, (where, layers) = find_schedule(schedule, mesh.pp.size, micro_batches), _layers(model)
        if plan.stages == 1:
            return Stages([model], dict(enumerate(layers.children())), plan)
        _check_whole(model, where, layers, plan.stages)
        tried = small_copy(model) if deferred_reads([model]) else model
        ids = random_ids(tried) if example is None else example
        if ids.dim() != 2:
            raise ValueError(f"example has the shape {tuple(ids.shape)}: give ids [B, T]")
        if len(ids) == ids.shape[1] // tokens_split(model):
            ids = ids[[*range(len(ids)), 0]]  # another number of samples than of tokens: `_traced` finds both in shapes
        if tried is not model and example is not None:
            ids = ids.cpu() % (int(random_ids(tried).max()) + 1)
        if sequence := sharded_sequence(model):
            ids = ids.roll(sequence.cp.rank, 1)  # other tokens on each rank of cp, as of a batch
        seen, want = _traced(tried, tried.get_submodule(where), ids)
        trace = seen if tried is model else _enlarged(seen, tried, model)
        last = sum(parameter_costs(trace.after.values()))
        cut = partition(parameter_costs(layers.children()), plan.stages, last=last)
        tied = _check_shared(model, where, layers, cut, trace, plan, mesh)
        of_one = tuple(f"{name}." for name in (where, *trace.before, *trace.after))
        for name in trace.changed if plan.stages > mesh.pp.size else ():
            if not name.startswith(of_one):
                raise ValueError(
                    f"forward changes the buffer {name} beside the layers, and each of the {plan.stages} stages on "
                    f"{mesh.pp.size} ranks would: take schedule='1f1b', which places one stage on a rank"
                )

    def checked(sends_inputs: bool) -> tuple[list[nn.Module], list[nn.Module], list[Run]]:
        same = _chain(tried, where, cut, seen, tied, sends_inputs, mesh.device if tried is model else None)
        got = compare(tried, same, ids, want)
        return same if tried is model else _chain(model, where, cut, trace, tied, sends_inputs, mesh.device), same, got

    try:
        with raising_together():
            chain, same, got = checked(sends_inputs=False)
    except ValueError as refused:
        with raising_together():  # all ranks of tp and cp try again, or none
            try:
                chain, same, got = checked(sends_inputs=True)
            except ValueError as error:  # the more helpful one is made of a ValueError
                raise error if isinstance(error.__cause__, ValueError) else refused from None
    with raising_together():
        check_buffers(tried, same, want, got)
    if tied and plan.rank_of[0] != plan.rank_of[plan.stages - 1]:
        add_partial(chain[0].get_submodule(tied), "weight", mesh.ends)  # the last stage has the same module
    mine = plan.stages_of(mesh.pp.rank)
    for stage in (chain[at] for at in mine):
        for name, module, leaf, _ in persistent_buffers(stage):
            if not name.startswith(of_one):  # every stage has this buffer, and checkpoints have it once
                add_partial(module, leaf, mesh.pp)
    blocks = {i: chain[at].get_submodule(f"{where}.{i}") for at in mine for i in cut[at]}
    return Stages([chain[at] for at in mine], blocks, plan)


def _chain(
    model: nn.Module, where: str, cut: list[range], trace: _Trace, tied: str, sends_inputs: bool, device: Any = None
) -> list[nn.Module]:
    """Return all stages. The last one has the first one's embedding too, if `tied` names one.

    They share the model's parameters, buffers and modules without either, and a copy of modules with buffers alone.
    """
    alone = [m for m in model.modules() if next(m.parameters(), None) is None and not isinstance(m, nn.ModuleList)]
    memo = {id(x): x for x in (*model.parameters(), *model.buffers(), *(m for m in alone if not m.state_dict()))}
    copy.deepcopy(alone, memo)
    chain = [_stage(model, where, held, cut[-1].stop, trace, sends_inputs, {**memo}, device) for held in cut]
    if tied:
        parent, _, child = tied.rpartition(".")
        chain[-1].get_submodule(parent).register_module(child, chain[0].get_submodule(tied))
    return chain


def _stage(
    model: nn.Module, where: str, held: range, count: int, trace: _Trace, sends_inputs: bool, memo: Any, device: Any
) -> nn.Module:
    """Copy the model with the layers `held` alone. `memo` has what the stages share."""
    stage, boundary = copy.deepcopy(model, memo), stage_modules.Boundary(sends_inputs)
    replaced: dict[nn.Module, nn.Module] = {}
    for i in (i for i in range(count) if i not in held):
        layer, place = stage.get_submodule(f"{where}.{i}"), {held.start - 1: "before", held.stop: "after"}.get(i, "")
        replaced[layer] = stage_modules.PassedLayer(layer, trace.returned[i], place, boundary)
    for name in trace.before if held.start else ():
        module = stage.get_submodule(name)
        replaced[module] = stage_modules.Blank(name, trace.shapes.get(name), boundary, module, device)
    for name in trace.after if held.stop < count else ():
        replaced[stage.get_submodule(name)] = stage_modules.Elsewhere()
    for parent in [*stage.modules()]:
        for name, module in parent._modules.items():  # a module may have several names
            parent._modules[name] = replaced.get(module, module) if module is not None else None
    first = f"{where}.{held.start}" if held.start else ""
    last = f"{where}.{held.stop - 1}" if held.stop < count else ""
    stage_modules.make_stage(stage, boundary, trace.options, (first, last))
    return stage


@dataclass
class _Trace:
    """Record one forward of the model: modules with parameters, by name."""

    before: dict[str, nn.Module] = field(default_factory=dict)  # called before all layers
    after: dict[str, nn.Module] = field(default_factory=dict)  # called after all layers, or never
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the outputs of the modules in `before`
    returned: list[int] = field(default_factory=list)  # the length of the tuple of each layer; 0: a tensor
    options: dict[str, Any] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # buffers that forward changes


def _layers(model: nn.Module) -> tuple[str, nn.Module]:
    lists = {n: m for n, m in model.named_modules() if n and isinstance(m, nn.ModuleList | nn.Sequential) and len(m)}
    lists = {n: m for n, m in lists.items() if len(m) > 1} or lists
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    if not outer:
        raise ValueError(f"{type(model).__name__} has no nn.ModuleList of layers to cut: write its stages yourself")
    return max(outer.items(), key=lambda found: sum(p.numel() for p in found[1].parameters()))


def _traced(model: nn.Module, layers: nn.Module, ids: Tensor) -> tuple[_Trace, list[Run]]:
    """Run the model; return the trace of its first forward, and what `run_chain` yields."""
    numbers = {layer: i for i, layer in enumerate(layers.children())}
    units = {module: name for name, module in _units(model, layers)}
    calls: list[tuple[nn.Module, Any]] = []  # each with its output
    want: list[Run] = []
    trace = _Trace()
    trace.options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    handles = [m.register_forward_hook(lambda m, _, out: calls.append((m, out))) for m in (*numbers, *units)]
    try:
        for found in run_chain(model, [model], ids, trace.options):
            want.append(found)
            made = found[1][0] if found[1] else {}
            buffers = dict(model.named_buffers(remove_duplicate=False))
            trace.changed |= {name for name, x in made.items() if name not in buffers or not x.equal(buffers[name])}
            for handle in handles:
                handle.remove()
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{type(model).__name__} fails on ids {tuple(ids.shape)}: {said}. Give ids [B, T] that it takes as example="
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    of_layers = [at for at, (module, _) in enumerate(calls) if module in numbers]
    order = [numbers[calls[at][0]] for at in of_layers]
    if order != list(range(len(numbers))):
        raise ValueError(f"the layers of {type(model).__name__} are called in the order {order}, not once each")
    trace.returned = [len(out) if isinstance(out, tuple | list) else 0 for module, out in calls if module in numbers]
    sizes = {ids.shape[1] // tokens_split(model): TOKENS, ids.shape[0]: BATCH}
    for module, name in units.items():
        places = [at for at, (called, _) in enumerate(calls) if called is module]
        if not places or places[-1] < of_layers[0]:
            trace.before[name] = module
        elif places[0] > of_layers[-1]:
            trace.after[name] = module
        else:
            raise ValueError(
                f"{name} is called between layers, so every stage needs it: make it a part of the layers, or write the "
                f"stages yourself"
            )
        if places:
            out = calls[places[-1]][1]
            shape = tuple(out.shape) if isinstance(out, Tensor) else ()
            trace.shapes[name] = (*(sizes.get(size, size) for size in shape[:-1]), *shape[-1:])
    return trace, want


def _enlarged(trace: _Trace, small: nn.Module, model: nn.Module) -> _Trace:
    """Return the trace of a model from the trace of its small copy: the model's modules and their outputs' sizes."""
    shapes = {}
    for name, shape in trace.shapes.items() if trace.before else ():
        given = dict(small.get_submodule(name).named_parameters())
        full = {leaf: lies.shape for leaf, lies in shardings(model.get_submodule(name)).items()}
        sizes = []
        for size in shape:
            found = {full[leaf][dim] for leaf, p in given.items() for dim, n in enumerate(p.shape) if n == size}
            found = {size} if size in (BATCH, TOKENS, 1) else found
            if len(found) != 1 and name in trace.before:
                raise ValueError(f"the sizes of the output of {name} are unknown before the model has values: {LATER}")
            sizes += found
        shapes[name] = tuple(sizes)
    before, after = ({name: model.get_submodule(name) for name in held} for held in (trace.before, trace.after))
    return replace(trace, before=before, after=after, shapes=shapes)


def _units(model: nn.Module, layers: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules with parameters, except the layers."""
    for own, _ in model.named_parameters(recurse=False):
        raise ValueError(
            f"{prefix}{own} is a parameter beside the layers, and no stage is known to need it: make it the weight "
            f"of a module, such as an nn.Embedding, or write the stages yourself"
        )
    for name, module in model.named_children():
        if module in {layers, *layers.children()} or next(module.parameters(), None) is None:
            continue
        if any(inner is layers for inner in module.modules()):
            yield from _units(module, layers, f"{prefix}{name}.")
        else:
            yield prefix + name, module


def _check_whole(model: nn.Module, where: str, layers: nn.Module, stages: int) -> None:
    names = [*layers._modules]
    if names != [*map(str, range(len(names)))] or None in layers._modules.values():
        raise ValueError(f"{where} holds {names}: name {len(names)} layers from 0 on, none of them None")
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None and not deferred_reads([model]):
        raise ValueError(
            f"{meta} has no values, and the stages are tried: cut a model of from_pretrained, or build one with "
            f"values, and give prepare initialize=True to draw new ones"
        )
    check_decoder(model, f"pp {stages}")
    stage_modules.check_outputs(model, {})
    if fsdp.units(model):
        raise ValueError("the model is sharded over data already: cut it first, prepare shards its stages")


def _check_shared(
    model: nn.Module, where: str, layers: nn.Module, cut: list[range], trace: _Trace, plan: Schedule, mesh: Mesh
) -> str:
    """Return the name of the embedding that the first and the last stage share, or "" if no parameter is shared."""
    holders: dict[nn.Parameter, set[int]] = {}
    parts = [[layers.get_submodule(str(i)) for i in held] for held in cut]
    parts[0] += trace.before.values()
    parts[-1] += trace.after.values()
    for at, modules in enumerate(parts):
        for p in (p for module in modules for p in module.parameters()):
            holders.setdefault(p, set()).add(at)
    before = {f"{name}.{n}".rstrip("."): m for name, unit in trace.before.items() for n, m in unit.named_modules()}
    tables = {m._parameters["weight"]: name for name, m in before.items() if "weight" in m._parameters}
    shared = [p for p, stages in holders.items() if len(stages) > 1]
    names = {p: name for name, p in model.named_parameters()}
    for p in shared:
        ends = (plan.rank_of[0], plan.rank_of[plan.stages - 1])
        if holders[p] != {0, len(cut) - 1} or p not in tables or len(shared) > 1:
            raise ValueError(f"{names[p]} is used in stages {sorted(holders[p])}: only table and head may be tied")
        if ends[0] != ends[1] and ends != (0, mesh.pp.size - 1):
            raise ValueError(f"{names[p]} is tied between pipeline ranks {ends}: only 0 and {mesh.pp.size - 1} sum it")
    return tables[shared[0]] if shared else ""
