"""Cut a model that is written as one module, such as a causal model of Hugging Face, into pipeline stages.

A stage is a copy of the model that shares its parameters and keeps their names. It has some of the layers. A layer of
an earlier stage hands its input through, and the last of them returns what the stage received; the first layer of a
later stage ends the forward, and the stage returns what its last layer returned. So the model's own forward makes
masks, positions and rotary tables on every stage, and what it does between two layers is done on one stage. The stages
in a row must give what the model gives, bit for bit, in evaluation and in training, or the model is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from mpcore._torch import fsdp
from mpcore._torch.fake import is_fake
from mpcore._torch.pytree import leaves
from mpcore.interop.hugging_face.small import small_copy
from mpcore.interop.parallelize.context import ShardedSequence, check_cache, check_decoder
from mpcore.interop.parallelize.generation import REFUSED_SAVE, resize_token_embeddings
from mpcore.layers.attention import sequence_index
from mpcore.layers.initialize import deferred_reads
from mpcore.layers.module import in_eval_mode
from mpcore.mesh.agreement import raising_together
from mpcore.mesh.axis import Axis, Mesh, check_mesh
from mpcore.pipeline.partition import parameter_costs, partition
from mpcore.pipeline.schedules import Schedule, find_schedule
from mpcore.sharding.declarations import add_partial, shardings

TRIED = (2, 7)  # samples and tokens of the trial
BATCH, TOKENS = -1, -2  # in a shape: as many as there are samples, and tokens
OTHERWISE = "Build the mesh with pp 1, or write the stages yourself"
MEDIA = ("pixel_", "image_", "video_", "audio_", "input_features")  # arguments of images, videos and sound
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
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

    As a check, the function runs the model and the chain of all stages on a few tokens, also in training, without
    dropout. The results must be bitwise equal. For a model of `from_pretrained(defer=True)` it runs a small copy with
    random weights and all layers instead.

    Args:
        model: the full model, the same on every pipeline rank. Its first argument is ids [B, T]. It is not changed;
            delete it afterwards to free the layers of other ranks (`from_pretrained(defer=True)` never holds them).
        mesh: the mesh; `mesh.pp` is the axis of the stages. With one stage, the model itself is returned.
        micro_batches: the number of micro-batches per step.
        schedule, example: a name of `mpcore.pipeline.schedules.NAMES`; ids [B, T] for the check, None: random ids.

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
        ids = _ids(tried) if example is None else example
        if tried is not model and example is not None:
            ids = example.cpu() % (int(_ids(tried).max()) + 1)
        if sequence := _sharded_sequence(model):
            ids = ids.roll(sequence.cp.rank, 1)  # other tokens on each rank of cp, as of a batch
        seen, want = _traced(tried, tried.get_submodule(where), ids)
        trace = seen if tried is model else _enlarged(seen, tried, model)
        last = sum(parameter_costs(trace.after.values()))
        cut = partition(parameter_costs(layers.children()), plan.stages, last=last)
        tied = _check_shared(model, where, layers, cut, trace, plan, mesh)
        chain = _chain(model, where, cut, trace, tied, mesh.device)
        _compare(tried, chain if tried is model else _chain(tried, where, cut, seen, tied), ids, want)
        if tied and plan.rank_of[0] != plan.rank_of[plan.stages - 1]:
            add_partial(chain[0].get_submodule(tied), "weight", mesh.ends)  # the last stage has the same module
        mine = plan.stages_of(mesh.pp.rank)
        blocks = {i: chain[at].get_submodule(f"{where}.{i}") for at in mine for i in cut[at]}
        return Stages([chain[at] for at in mine], blocks, plan)


def _sharded_sequence(model: nn.Module) -> ShardedSequence | None:
    return vars(model).get("sharded_sequence")


def _tokens_split(model: nn.Module) -> int:
    sequence = _sharded_sequence(model)
    return 1 if sequence is None else sequence.tp.size


# --- what stands in for modules of other stages ----------------------------------------------------------------------


class _HandedOnError(Exception):
    """End the forward of a stage after its last layer."""


class _Inlet:
    """Hold the input of a stage and the output of its last layer while forward runs. A deep copy is the same object."""

    x: Tensor | None = None
    out: Tensor | None = None
    taken: bool = False  # whether a layer got x
    tried: int = 0  # above 0 in a trial: modules of an earlier stage return NaN; 2: comparisons of ids turn around

    def keep(self, layer: nn.Module, given: Any, out: Any) -> None:
        self.out = next((x for x in leaves(out) if isinstance(x, Tensor) and x.is_floating_point()), None)

    def __deepcopy__(self, memo: dict[Any, Any]) -> _Inlet:
        return self


class _Passed(nn.Module):
    """Replace a layer of another stage: pass the input on. Attributes such as the layer's attention type are copied."""

    def __init__(self, layer: nn.Module, returned: int) -> None:
        super().__init__()
        plain = {k: v for k, v in vars(layer).items() if isinstance(v, str | int | float | None) and k[0] != "_"}
        vars(self).update({**plain, "training": layer.training})
        self.inlet: _Inlet | None = None
        self.ends, self.returned = False, returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = next(x for x in leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point())
        if self.ends:
            raise _HandedOnError
        if self.inlet is not None and self.inlet.x is not None:
            _check_gradients()
            x, self.inlet.taken = self.inlet.x, True
        return (x, *(None,) * (self.returned - 1)) if self.returned else x


def _check_gradients() -> None:
    """Raise ValueError within `checkpoint(use_reentrant=True)`, where a stage's input gets no gradients."""
    frame = None if torch.is_grad_enabled() else inspect.currentframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    if frame is not None:
        raise ValueError(
            "forward calls a layer in torch.utils.checkpoint(use_reentrant=True), so earlier pipeline stages "
            "would get no gradients: pass use_reentrant=False, or recompute= to prepare instead"
        )


class _Blank(nn.Module):
    """Replace a module before the layers: return zeros of the right shape, which no layer uses (NaN in a trial).

    If forward reads a weight of the module, such as `position.weight[:T]`, it reads zeros that use no memory.
    """

    def __init__(self, name: str, trace: _Trace, inlet: _Inlet, module: nn.Module, device: torch.device | None) -> None:
        super().__init__()
        self.name, self.shape, self.inlet = name, trace.shapes.get(name), inlet  # None: the module was never called
        for name, x in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            self.__dict__[name] = x.new_zeros((), device=device if x.is_meta else x.device).expand(x.shape)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.shape is None or self.inlet.x is None:
            raise ValueError(
                f"{self.name} is called now, was not called when the model was cut, and is on the first of the "
                f"pipeline stages alone: leave out the argument that it is for. {OTHERWISE}"
            )
        sizes = {BATCH: self.inlet.x.shape[0], TOKENS: self.inlet.x.shape[1]}
        zeros = self.inlet.x.new_zeros([sizes.get(size, size) for size in self.shape])
        return zeros / 0 if self.inlet.tried else zeros


class _Elsewhere(nn.Module):
    """Replace a module after the layers: end the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _HandedOnError


class _Trial(TorchFunctionMode):
    """Leave out torch's dropout. Turn the results around if ids of a later stage, whose strides are 0, are compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            args = args if len(args) < 5 else (*args[:4], 0.0, *args[5:])
            kwargs = {**(kwargs or {}), **({"dropout_p": 0.0} if len(args) < 5 else {})}
        out = args[0] if func in DROPOUTS else func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").strip("_") not in ("eq", "ne", "lt", "le", "gt", "ge", "isin"):
            return out
        ids = [x for x in args if isinstance(x, Tensor) and x.dtype == torch.long and x.dim() and not any(x.stride())]
        return ~out if ids else out


class _Stage(nn.Module):
    """Make forward accept the output of the previous stage instead of ids. A mixin in front of the model's class."""

    inlet: _Inlet
    options: dict[str, Any]
    ends: tuple[Any, Any]  # the names of the stage's first and last layer, unless it is the model's first or last

    def forward(self, x: Tensor, **arguments: Any) -> Any:
        positions, sequence = arguments.get("position_ids"), _sharded_sequence(self)
        for name, given in arguments.items() if getattr(self, "config", None) is not None else ():
            if name.startswith(MEDIA):
                raise ValueError(
                    f"{name} {tuple(given.shape)} needs modules and ids of several pipeline stages, which pass on one "
                    f"tensor of hidden states: leave {name} out, or build the mesh with pp 1"
                )
        if sequence is None and "use_cache" in self.options and _restart(positions, arguments):
            check_cache(self)
        args, arguments, inlet, (first, last) = (x,), {**self.options, **arguments}, self.inlet, self.ends
        if first:
            ids = x.new_zeros((), dtype=torch.long).expand(x.shape[0], x.shape[1] * _tokens_split(self))
            inlet.x, args = x, (ids if inlet.tried > 1 and sequence is None else ids.clone(),)
        try:  # the hook is the last: it sees what forward sees, after the hooks of data parallelism and of the user
            with self.get_submodule(last).register_forward_hook(inlet.keep) if last else nullcontext():
                if sequence is not None:
                    args, arguments = sequence(self, args, arguments)
                out = super().forward(*args, **arguments)
        except _HandedOnError:
            out = None
        finally:
            seen = {**vars(inlet)}
            vars(inlet).clear()
        if (first and "taken" not in seen) or (last and seen.get("out") is None):
            skipped = f"the forward of a pipeline stage skipped the layer {last or 'before ' + first}, whose output"
            raise ValueError(f"{skipped} goes from stage to stage: call each layer, as with layerdrop 0. {OTHERWISE}")
        return seen["out"] if last else out

    def generate(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "generate needs all layers, and a pipeline stage has some of them: write the weights with save_pretrained, "
            "and load them on a mesh with pp 1"
        )

    def save_pretrained(self, *_: Any, **__: Any) -> Any:
        raise ValueError(REFUSED_SAVE)

    resize_token_embeddings = resize_token_embeddings


def _restart(positions: Any, arguments: dict[str, Any]) -> bool:
    """Return whether positions restart where nothing else says what a token sees."""
    if not isinstance(positions, Tensor) or arguments.keys() & {"attention_mask", "use_cache"}:
        return False
    unknown = torch.compiler.is_compiling() or positions.is_meta or is_fake(positions)
    return not unknown and bool((torch.diff(positions) != 1).any())


def _chain(
    model: nn.Module, where: str, cut: list[range], trace: _Trace, tied: str, device: torch.device | None = None
) -> list[nn.Module]:
    """Return all stages. The last one has the first one's embedding too, if `tied` names one."""
    chain = [_stage(model, where, held, cut[-1].stop, trace, device) for held in cut]
    if tied:
        _put(chain[-1], tied, chain[0].get_submodule(tied))
    return chain


def _stage(model: nn.Module, where: str, held: range, count: int, trace: _Trace, device: Any) -> nn.Module:
    """Copy the model with the layers `held` alone. It shares parameters, buffers and modules without parameters."""
    shared = [m for m in model.modules() if next(m.parameters(), None) is None and not isinstance(m, nn.ModuleList)]
    stage = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers(), *shared)})
    inlet, layers = _Inlet(), stage.get_submodule(where)
    for i in (i for i in range(count) if i not in held):
        passed = _Passed(layers.get_submodule(str(i)), trace.returned[i])
        passed.ends, passed.inlet = i == held.stop, inlet if i == held.start - 1 else None
        layers.register_module(str(i), passed)
    for name in trace.before if held.start else ():
        _put(stage, name, _Blank(name, trace, inlet, stage.get_submodule(name), device))
    for name in trace.after if held.stop < count else ():
        _put(stage, name, _Elsewhere())
    stage.__class__ = type(f"PipelineStage{type(model).__name__}", (_Stage, type(model)), {"whole_class": type(model)})
    stage.inlet, stage.options = inlet, trace.options  # type: ignore[assignment]
    stage.ends = held.start and f"{where}.{held.start}", held.stop < count and f"{where}.{held.stop - 1}"  # type: ignore
    return stage


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent).register_module(child, module)


# --- what the forward calls, and when --------------------------------------------------------------------------------


@dataclass
class _Trace:
    """Record one forward of the model: modules with parameters, by name."""

    before: dict[str, nn.Module] = field(default_factory=dict)  # called before all layers
    after: dict[str, nn.Module] = field(default_factory=dict)  # called after all layers, or never
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the outputs of the modules in `before`
    returned: list[int] = field(default_factory=list)  # the length of the tuple of each layer; 0: a tensor
    options: dict[str, Any] = field(default_factory=dict)


def _layers(model: nn.Module) -> tuple[str, nn.Module]:
    lists = {n: m for n, m in model.named_modules() if n and isinstance(m, nn.ModuleList | nn.Sequential) and len(m)}
    lists = {n: m for n, m in lists.items() if len(m) > 1} or lists
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    if not outer:
        raise ValueError(f"{type(model).__name__} has no nn.ModuleList of layers to cut: write its stages yourself")
    return max(outer.items(), key=lambda found: sum(p.numel() for p in found[1].parameters()))


def _traced(model: nn.Module, layers: nn.Module, ids: Tensor) -> tuple[_Trace, list[Any]]:
    """Run the model once; return the trace of the call, and the outputs."""
    numbers, calls, want = {layer: i for i, layer in enumerate(layers.children())}, [], []
    units = dict(_units(model, layers))
    names = {module: name for name, module in units.items()}
    trace = _Trace()
    trace.options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def returned(layer: nn.Module, given: Any, out: Any) -> None:
        trace.returned.append(len(out) if isinstance(out, tuple | list) else 0)

    def made(unit: nn.Module, given: Any, out: Any) -> None:
        sizes = {ids.shape[1] // _tokens_split(model): TOKENS, ids.shape[0]: BATCH}
        shape = tuple(out.shape) if isinstance(out, Tensor) else ()
        trace.shapes[names[unit]] = (*(sizes.get(size, size) for size in shape[:-1]), *shape[-1:])

    handles = [m.register_forward_pre_hook(lambda m, given: calls.append(m)) for m in (*numbers, *units.values())]
    handles += [layer.register_forward_hook(returned) for layer in numbers]
    handles += [unit.register_forward_hook(made) for unit in units.values()]
    try:
        for found in _run(model, [model], ids, trace.options):
            want.append(found)
            for handle in handles:  # they record the first forward
                handle.remove()
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{type(model).__name__} fails on ids {tuple(ids.shape)}: {said}. Give ids [B, T] that it takes as example="
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    of_layers = [numbers[m] for m in calls if m in numbers]
    if of_layers != list(range(len(numbers))):
        raise ValueError(f"the layers of {type(model).__name__} are called in the order {of_layers}, not once each")
    at = [i for i, m in enumerate(calls) if m in numbers]
    first, last = at[0], at[-1]
    for module, name in names.items():
        places = [i for i, m in enumerate(calls) if m is module]
        if not places or max(places) < first:
            trace.before[name] = module
        elif min(places) > last:
            trace.after[name] = module
        else:
            raise ValueError(f"{name} is called between layers, so every stage needs it: write the stages yourself")
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
        if module is layers or next(module.parameters(), None) is None:
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
    config: Any = getattr(model, "config", None)
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if getattr(config, name, False) is True:
            raise ValueError(
                f"{name} is True in the config of {type(model).__name__}, and each of {stages} stages has some of the "
                f"layers: set model.config.{name} = False, or build the mesh with pp 1"
            )
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


# --- the trial -------------------------------------------------------------------------------------------------------


def _ids(model: nn.Module) -> Tensor:
    """Return random ids below the model's vocabulary size, to run the model on."""
    table = next((m for m in model.modules() if isinstance(getattr(m, "num_embeddings", None), int)), None)
    if table is None:
        raise ValueError(f"{type(model).__name__} has no table of ids: give ids [B, T] of a forward as example=")
    words: Any = getattr(getattr(model, "config", None), "vocab_size", None) or table.num_embeddings
    shape, seeded = (TRIED[0], TRIED[1] * _tokens_split(model)), torch.Generator().manual_seed(6)
    return torch.randint(2, words, shape, generator=seeded).to(next(model.parameters()).device)


def _run(model: nn.Module, stages: list[nn.Module], ids: Tensor, options: Any, trains: bool = False) -> Iterator[Any]:
    """Yield the floating-point tensors that the chain of stages returns in evaluation, then those of padded samples.

    Then those with comparisons of ids turned around, and those of training with two seeds. If training fails, raise
    the error if `trains`, and else yield none.
    """
    masks: list[dict[str, Any]] = [{}]
    sequence = _sharded_sequence(model)
    if "attention_mask" in inspect.signature(model.forward).parameters and not (sequence and sequence.recurrent):
        cp, kind = (sequence.cp, sequence.kind) if sequence else (Axis(name="cp"), "ring")
        tokens = ids.shape[1] * cp.size
        shown = sequence_index(tokens, cp, kind, ids.device) < tokens - 1
        masks.append({"attention_mask": shown.long().expand_as(ids)})
    masks.append({})
    held = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for i, mask in enumerate((*masks, {}, {})):
        x: Any = ids
        devices = [ids.device] if ids.is_cuda else []
        with in_eval_mode(stages), torch.no_grad(), torch.random.fork_rng(devices), _Trial():
            for generator in (torch.default_generator, *(torch.cuda.default_generators[x.index] for x in devices)):
                generator.manual_seed(i)  # torch.manual_seed would change those of other devices, for good
            try:
                for stage in stages:
                    vars(stage).get("inlet", _Inlet()).tried = 1 + (i == len(masks) - 1)
                    x = stage.train(i >= len(masks))(x, **{**options, **mask})
            except Exception:
                if i < len(masks) or trains:
                    raise
                x = None
            for buffer, before in held:
                if not buffer.equal(before):  # one that is expanded can't be written to
                    buffer.copy_(before)
        yield [y for y in leaves(x) if isinstance(y, Tensor) and y.is_floating_point()]


def _compare(model: nn.Module, chain: list[nn.Module], ids: Tensor, want: list[list[Tensor]]) -> None:
    said = f"{type(model).__name__} can't be cut into {len(chain)} stages"
    try:
        got = list(_run(model, chain, ids, {}, bool(want[-1])))
    except Exception as error:
        raise ValueError(
            f"{said}: one uses more of another than one tensor of hidden states ({type(error).__name__}: {error}). "
            f"{OTHERWISE}"
        ) from error
    if not (want[-1] and _same(want[-1], want[-2])):
        want, got = want[:-2], got[:-2]  # training fails, or draws random numbers
    if not any(want) or not all(_same(a, b) for a, b in zip(want, got, strict=True)):
        raise ValueError(
            f"{said}: in a row they return other values than the model, which may use ids, or what modules or layers "
            f"of an earlier stage made, in training or in evaluation: write x + layer(x) in the layer. {OTHERWISE}"
        )


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x.isnan().equal(y.isnan())]
    return len(a) == len(b) == len(pairs) and all(x.nan_to_num().equal(y.nan_to_num()) for x, y in pairs)
