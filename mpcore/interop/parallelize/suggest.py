"""Find a plan for a model: trace which linear layer feeds which in one forward, and test plans that may follow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpcore._torch.dispatch import OpOverload, TorchDispatchMode
from mpcore._torch.pytree import leaves
from mpcore.interop.parallelize.checks import HEAD_DIMS, HEADS, check_plan, head_dim_of, linear_sizes, owner_of
from mpcore.interop.parallelize.model_copy import ModelCopy, as_arguments, plain_arguments, size_of
from mpcore.interop.parallelize.plan import Colwise, Experts, Hidden, LocalSizes, Plan, Style, Target, on_axes, resolve
from mpcore.interop.parallelize.prove import DIVIDED, GRADIENT, CannotCheckError, PlanTester, shapes_of
from mpcore.interop.parallelize.prove_sequence import prove_sequence
from mpcore.interop.parallelize.swap import cut_model, sharded_parameters, swaps_of
from mpcore.mesh.axis import Axis

LARGE = 0.005  # a layer with more than this part of the model's parameters is sharded separately
Styles = dict[str, "str | Style"]
SPLIT: Styles = {"": "sequence_parallel"}
_WHOLE = ""  # marks tensors that every rank must have unsharded
_NORMED = "*"  # marks tensors behind a norm over all features of linear layers
T = TypeVar("T")


@dataclass(frozen=True)
class Suggestion:
    """What `suggest_plan` returns.

    Attributes:
        plan: the plan, for `parallelize`.
        share: the part of the model's bytes that the plan shards, in [0, 1].
        proven: whether a small random copy of the model computed the same sharded by this plan as unsharded.
        left: the reason why a module stays unsharded, by module pattern.
        replicated: the reason why each rank computes the full input of a layer, such as the attention of all heads, by
            the layer's pattern. The ranks may store shards of the layers around it, which saves memory and no time.
    """

    plan: Styles
    share: float
    proven: bool
    left: dict[str, str]
    replicated: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{pattern!r}: {style!r}," for pattern, style in self.plan.items()]
        lines += [f"# {pattern} stays whole: {why}" for pattern, why in self.left.items()]
        full = "# each rank computes the full input of {} (all heads, if this is attention): {}"
        lines += [full.format(*each) for each in self.replicated.items()]
        sure = "proven equal to the unsharded model" if self.proven else "not proven"
        full = f"; attention, or what else feeds {', '.join(self.replicated)}, is computed in full on each rank"
        return "\n".join([*lines, f"# shards {self.share:.0%} of the bytes, {sure}{full if self.replicated else ''}"])


@dataclass
class _Region:
    """Linear layers whose outputs may be sharded, the linear layers that use them, and norms of heads in between."""

    columns: dict[str, None] = field(default_factory=dict)
    rows: dict[str, None] = field(default_factory=dict)
    norms: dict[str, None] = field(default_factory=dict)


def suggest_plan(
    model: nn.Module, tp: int | Axis = 2, *, ep: int | Axis = 1, example: Any = None, sequence_parallel: bool = False
) -> Suggestion:
    """Derive a plan from one traced forward, part by part, and keep the parts that pass the test.

    A linear layer becomes "rowwise" if its input comes only from other linear layers, with no norm over all features in
    between. Those layers become "colwise". Fused projections and `LocalSizes` are found by testing the possible plans.
    Each test runs on a small random copy of the model on the CPU, as in `parallelize`.

    Args:
        model: the model, on any device, also meta.
        tp: the number of ranks to test with, or an axis of this size.
        ep: the number of ranks over which experts are sharded. With tp 1 the plan names nothing but experts.
        example: arguments of a forward, as for `parallelize`. None: guess them.
        sequence_parallel: also try to shard the tokens between sharded layers: `{"": "sequence_parallel"}`.

    Returns:
        A `Suggestion`: the plan, what it shards, and why it leaves other parts. `print` it to see all.

    Raises:
        ValueError: if the model can't be copied, or its forward accepts none of the arguments tried.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> print(mpcore.suggest_plan(model))
        '0': 'colwise',
        '2': 'rowwise',
        # shards 95% of the bytes, proven equal to the unsharded model
    """
    tp, ep = (axis.size if isinstance(axis, Axis) else axis for axis in (tp, ep))
    try:
        prover = PlanTester(shapes_of(model), None if example is None else as_arguments(example))
        flow = _flow(prover.whole[0], prover)
    except CannotCheckError as error:
        why = f"no plan can be tried on this model: {error}. Give arguments of a forward: example=.."
        raise ValueError(why) from None
    twin, plan, left, replicated = prover.whole[0], {}, {}, {}
    for region in _regions(flow) if tp > 1 or ep == 1 else ():
        rows = dict.fromkeys(flow.patterns[name] for name in region.rows)
        failed: list[str] = []
        for part in _parts(twin, flow, region, tp):
            wrong = _verdict(prover, plan | flow.spelled(part), tp, ep)
            if wrong is None:
                plan |= flow.spelled(part)
                if "rowwise_split_input" in part.values():
                    furthest = (*(w for w in failed if w.startswith(GRADIENT)), *(w for w in failed if DIVIDED in w))
                    closest = next(iter(furthest), failed[0])  # with a wrong gradient, the forward was right
                    replicated |= flow.spelled(dict.fromkeys(rows, _why_replicated(twin, region, closest, tp)))
                break
            failed.append(wrong)
        else:
            left |= flow.spelled(dict.fromkeys(rows, failed[-1]))
    others = (*_ends(twin, flow), *_large(twin, flow)) if tp > 1 or ep == 1 else ()
    for part in (*map(flow.spelled, (*_experts(twin, flow, ep), *others)), SPLIT):
        if not part.keys() & plan.keys() and (part is not SPLIT or (sequence_parallel and plan)):
            wrong = _verdict(prover, plan | part, tp, ep)
            if wrong is None:
                plan |= part
            else:
                left |= dict.fromkeys(part, wrong)
    replicated |= flow.spelled(_full_inputs(flow)) if tp > 1 or ep == 1 else {}
    left = {pattern: why for pattern, why in left.items() if pattern not in plan}
    return Suggestion(plan, share_of(prover.shapes, plan, tp, ep), bool(plan), left, replicated)


def _why_replicated(twin: ModelCopy, region: _Region, wrong: str, tp: int) -> str:
    """Return why no rank can compute a part of what lies between the layers of a region."""
    owner = twin.model.get_submodule(owner_of(twin.model, next(iter(region.columns))))
    heads = {name: value for name, value in vars(owner).items() if HEADS.fullmatch(name) and type(value) is int}
    if uneven := [f"{name} {value}" for name, value in heads.items() if value % tp]:
        return f"tp {tp} does not divide {', '.join(uneven)}"
    if heads or head_dim_of(owner):
        return wrong
    return f"{wrong}. If it has heads, read their number from {type(owner).__name__}.num_heads"


def share_of(model: nn.Module, plan: Plan | str | None, tp: int, ep: int = 1) -> float:
    axis, targets = Axis(tp, name="tp"), targets_of(model, plan, tp, ep) if plan else []
    cut = sharded_parameters(swaps_of(model, targets, axis), targets, axis)
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    return sum(size for key, size in sizes.items() if key in cut) / max(sum(sizes.values()), 1)


def targets_of(model: nn.Module, plan: Plan | str | None, tp: int, ep: int = 1) -> list[Target]:
    return on_axes(resolve(model, plan, tp, ep), Axis(ep, role="ep"))


def _verdict(prover: PlanTester, plan: Styles, tp: int, ep: int) -> str | None:
    twin = prover.whole[0]
    try:
        if plan.get("") == SPLIT[""]:
            styles = {name: style for name, _, style in resolve(prover.shapes, plan)}
            return prove_sequence(prover, styles, tp, cut_model)
        targets = targets_of(prover.shapes, plan, tp, ep)
        check_plan(prover.shapes, targets, Axis(tp, name="tp"))
        return prover.verdict({name: style for name, _, style in targets}, tp, cut_model)
    except (ValueError, CannotCheckError) as error:
        return str(error)
    finally:
        twin.model.zero_grad()


# --- the trace --------------------------------------------------------------------------------------------------------


class _Sources(TorchDispatchMode):
    """Record for each tensor the linear layers whose outputs it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, frozenset[str]] = {}
        self.alive: list[Tensor] = []

    def of(self, tree: Any) -> frozenset[str]:
        return frozenset().union(*(self.found.get(id(x), ()) for x in leaves(tree)))

    def set(self, tree: Any, sources: frozenset[str]) -> None:
        for x in leaves(tree):
            if isinstance(x, Tensor):
                self.found[id(x)] = sources
                self.alive.append(x)  # keep it alive: another tensor could get its id

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.set(out, self.of((args, kwargs)))
        return out


@dataclass
class _Flow:
    """Which layers feed which: for each module, the linear layers whose outputs reach it.

    `patterns` has the pattern of each module by its name in the twin. If modules of several classes match one pattern,
    each class has a label instead, and `labelled` has the names of its modules in the model.
    """

    inputs: dict[str, frozenset[str]] = field(default_factory=dict)  # of each linear layer
    norms: dict[str, frozenset[str]] = field(default_factory=dict)  # of each norm of heads
    full_norms: dict[str, frozenset[str]] = field(default_factory=dict)  # of each norm over all features of its input
    tables: dict[str, None] = field(default_factory=dict)
    output: frozenset[str] = frozenset()
    patterns: dict[str, str] = field(default_factory=dict)
    labelled: dict[str, list[str]] = field(default_factory=dict)

    def spelled(self, said: dict[str, T]) -> dict[str, T]:
        return {name: what for pattern, what in said.items() for name in self.labelled.get(pattern, [pattern])}


def is_linear(module: nn.Module) -> bool:
    """Return whether `Colwise` and `Rowwise` can shard a module: an `nn.Linear` or a Conv1D that isn't parametrized."""
    kind = isinstance(module, nn.Linear) or isinstance(getattr(module, "nf", None), int)
    return kind and module._parameters.get("weight") is not None


@torch.no_grad()
def _flow(twin: ModelCopy, prover: PlanTester) -> _Flow:
    found, sources, handles = _Flow(), _Sources(), []
    args, kwargs = plain_arguments(prover.whole[1])
    given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
    sources.set(given, frozenset([_WHOLE]))
    sizes = {name: linear_sizes(m)[1] for name, m in twin.model.named_modules() if is_linear(m)}
    widths_in = {linear_sizes(m)[0] for m in twin.model.modules() if is_linear(m)}

    def before(name: str, given: Any) -> None:
        found.inputs[name] = found.inputs.get(name, frozenset()) | sources.of(given)

    def after(name: str, module: nn.Module, given: Any, out: Any) -> None:
        came = sources.of(given)
        if name in sizes:
            sources.set(out, frozenset([name]))
        elif isinstance(module, nn.Embedding):
            found.tables[name] = None
            sources.set(out, frozenset([_WHOLE] if module.embedding_dim in widths_in else []))
        elif came:
            widths = {p.shape[-1] for p in module.parameters(recurse=False) if p.dim()}
            if widths & {sizes[one] for one in came if one in sizes}:
                found.full_norms[name] = found.full_norms.get(name, frozenset()) | came
                sources.set(out, came | {_NORMED})
            elif widths:
                found.norms[name] = found.norms.get(name, frozenset()) | came

    for name, module in twin.model.named_modules():
        if name in sizes:
            handles.append(module.register_forward_pre_hook(lambda _, given, name=name: before(name, given)))
        if not any(True for _ in module.children()):
            handles.append(module.register_forward_hook(lambda m, given, out, name=name: after(name, m, given, out)))
    try:
        with sources:
            out = twin.model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    found.output = sources.of(out)
    patterns, found.labelled = _patterns(prover.shapes)
    found.patterns = {name: patterns[old] for name, old in twin.names.items()}
    return found


def _patterns(model: nn.Module) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the pattern or label of each module, and the modules of each label."""
    alike: dict[str, dict[tuple[type, type], list[str]]] = {}
    for name, module in model.named_modules():
        kind = type(model.get_submodule(name.rpartition(".")[0])), type(module)
        alike.setdefault(_pattern(model, name), {}).setdefault(kind, []).append(name)
    found, labelled = {}, {}
    for pattern, kinds in alike.items():
        for (owner, kind), names in kinds.items():
            label = pattern if len(kinds) == 1 else f"{pattern} ({owner.__name__}, {kind.__name__})"
            found |= dict.fromkeys(names, label)
            labelled |= {label: names} if len(kinds) > 1 else {}
    return found, labelled


def _pattern(model: nn.Module, name: str) -> str:
    said, owner = [], model
    for part in filter(None, name.split(".")):
        said.append("*" if isinstance(owner, nn.ModuleList) else part)
        owner = owner.get_submodule(part)
    return ".".join(said)


def _rows(flow: _Flow) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    """Return for each layer that may be "rowwise" the layers that feed it, and the layers whose outputs stay full."""
    rows: dict[str, frozenset[str]] = {}
    for name, came in flow.inputs.items():  # in the order of the forward
        if came and not came & {_WHOLE, _NORMED, *rows}:
            rows[name] = came
    return rows, flow.output | frozenset().union(*(came for name, came in flow.inputs.items() if name not in rows))


def _full_inputs(flow: _Flow) -> dict[str, str]:
    """Return why no plan shards the input of a layer that several other layers feed, by the layer's pattern."""
    rows, full = _rows(flow)
    found = {}
    for name, came in flow.inputs.items():
        if len(came - {_NORMED}) > 1 and _WHOLE not in came and came & {_NORMED, *rows, *full}:
            norms = [norm for norm, of in flow.full_norms.items() if _NORMED in came and of <= came]
            why = "norms over all features come before it" if norms else "no plan shards all that feeds it"
            named = dict.fromkeys(flow.patterns[one] for one in norms or sorted(came & {*rows, *full} - {_NORMED}))
            found[flow.patterns[name]] = f"{why} ({', '.join(named)})"
    return found


def _regions(flow: _Flow) -> list[_Region]:
    """Return the parts of the model that can be sharded separately. Equal parts of several layers are joined."""
    rows, whole = _rows(flow)
    found: dict[object, _Region] = {}
    for row, came in rows.items():
        if not came & whole:
            key = tuple(dict.fromkeys(flow.patterns[name] for name in sorted(came)))
            region = found.setdefault(key, _Region())
            region.rows[row] = None
            region.columns |= dict.fromkeys(sorted(came))
            region.norms |= dict.fromkeys(name for name, of in flow.norms.items() if of and of <= came)
    return list(found.values())


# --- what to try ------------------------------------------------------------------------------------------------------


def _parts(twin: ModelCopy, flow: _Flow, region: _Region, tp: int) -> Iterator[Styles]:
    """Yield plans for a region, the most likely first."""
    parts = (region.columns, region.rows, region.norms)
    columns, rows, norms = ({flow.patterns[name]: None for name in names} for names in parts)
    column, row = next(iter(region.columns)), next(iter(region.rows))
    at = owner_of(twin.model, column)
    owner, where = twin.model.get_submodule(at), flow.patterns[at]
    n_out, n_in = linear_sizes(twin.model.get_submodule(column))[1], linear_sizes(twin.model.get_submodule(row))[0]
    base: Styles = {**dict.fromkeys(rows, "rowwise"), **dict.fromkeys(norms, "replicated_with_grad_allreduce")}
    for table in (flow.patterns[name] for name in flow.tables):
        if table.rpartition(".")[0] == where:
            base[table] = "colwise"  # such as a relative position bias for each head
    for sizes, style in itertools.product(_sizes(owner, n_out, n_in, tp), _packings(twin, owner, n_out, n_in, columns)):
        yield ({where: sizes} if sizes is not None else {}) | dict.fromkeys(columns, style) | base
    gathered: Styles = dict.fromkeys(columns, "colwise_gather_output")
    yield gathered | dict.fromkeys(rows, "rowwise_split_input")  # replicated computation between the layers


def _counts(owner: nn.Module, n_out: int, n_in: int) -> dict[str, int]:
    """Return the attributes that may count heads or groups. Attributes with such a name come first."""
    held = {name: value for name, value in vars(owner).items() if type(value) is int and name not in HEAD_DIMS}
    found = {name: value for name, value in held.items() if HEADS.fullmatch(name)}
    return found | {n: v for n, v in held.items() if v > 1 and (n_in % v == 0 or n_out % v == 0) and v < n_in}


def _sizes(owner: nn.Module, n_out: int, n_in: int, tp: int) -> Iterator[LocalSizes | None]:
    """Yield the attributes to divide by tp: none, then heads, heads and widths, and other divisors of the widths."""
    heads = tuple(name for name in vars(owner) if HEADS.fullmatch(name) and type(vars(owner)[name]) is int)

    def divided(names: Iterable[str]) -> LocalSizes:
        return LocalSizes(tuple(names), kept=tuple(name for name in heads if name not in names))

    first = [name for name in heads if vars(owner)[name] % tp == 0]
    wide = [n for n, v in vars(owner).items() if type(v) is int and v in (n_in, n_out) and v % tp == 0]
    others = [n for n, v in _counts(owner, n_out, n_in).items() if n not in heads and v % tp == 0][:4]
    chosen = [first, [*first, *wide]]
    chosen += [[*first, *some] for n in range(len(others), 0, -1) for some in itertools.combinations(others, n)]
    yield divided([]) if heads else None
    yield from map(divided, filter(None, dict.fromkeys(tuple(dict.fromkeys(names)) for names in chosen)))


def _packings(
    twin: ModelCopy, owner: nn.Module, n_out: int, n_in: int, columns: Collection[str]
) -> Iterator[str | Style]:
    """Yield the ways in which a projection may pack heads or several projections."""
    if n_out <= n_in or len(columns) > 1:
        yield "colwise"
        return
    config: Any = getattr(twin.model, "config", None)
    counts = list(_counts(owner, n_out, n_in).values())
    counts += [getattr(config, name, None) for name in ("num_attention_heads", "num_heads", "n_head")]
    counts = [n for n in dict.fromkeys(counts) if isinstance(n, int) and n]
    units = [head_dim_of(owner), *(n_in // n for n in counts if n_in % n == 0)]
    for unit in (n for n in dict.fromkeys(units) if n):
        kv = (n_out - n_in) // 2
        if (n_out - n_in) % 2 == 0 and kv % unit == 0:
            yield Colwise(blocks=(n_in, kv, kv), unit=unit)
            groups = kv // unit
            if groups and n_out % groups == 0:
                yield Colwise(unit=n_out // groups)  # grouped by KV head: its queries, key and value
    for count in (n for n in counts if n_out % n == 0):
        yield Colwise(unit=n_out // count)
        yield Colwise(blocks=n_out // count, unit=1)  # heads innermost
    if n_out % n_in == 0:
        yield Colwise(blocks=n_out // n_in, unit=1)
        yield Colwise(unit=n_out // n_in)  # such as gate and up, interleaved
    yield "colwise"


def _experts(twin: ModelCopy, flow: _Flow, ep: int) -> Iterator[Styles]:
    """Yield a plan for each module that holds all experts of a layer and each possible layout of its parameters."""
    held = {flow.patterns[n]: module for n, module in twin.model.named_modules() if n in flow.patterns}
    for pattern, module in held.items():
        for style in itertools.islice(_expert_styles(module, ep), 24):
            yield {pattern: style}


def _expert_styles(module: nn.Module, ep: int = 1) -> Iterator[str | Experts]:
    if getattr(module, "is_concatenated", None) is not None:
        yield "moe_tp_experts"
    shapes = {leaf: p.shape for leaf, p in module._parameters.items() if p is not None and p.dim() in (2, 3)}
    stacked = {leaf: shape for leaf, shape in shapes.items() if len(shape) == 3 and shape[0] > 1}
    if len(stacked) < 2:
        return
    if ep > 1:
        yield "ep_dispatch_experts"  # enough with etp 1
    if len({shape[0] for shape in shapes.values()}) > 1:
        return
    for size in dict.fromkeys(size for shape in stacked.values() for size in shape[1:]):
        ways = {leaf: list(_hidden_ways(shape, size)) for leaf, shape in shapes.items()}
        if all(ways[leaf] for leaf in stacked):
            found = {leaf: each for leaf, each in ways.items() if each}
            yield from (Experts(dict(zip(found, way, strict=True))) for way in itertools.product(*found.values()))


def _hidden_ways(shape: torch.Size, size: int) -> Iterator[Hidden]:
    """Yield the dimensions that may hold `size` hidden features, or those of gate and up."""
    for dim in range(-1, -len(shape), -1):
        if shape[dim] == size:
            yield Hidden(dim)
        elif shape[dim] == 2 * size:
            yield from (Hidden(dim, blocks=2), Hidden(dim, unit=2))


def _ends(twin: ModelCopy, flow: _Flow) -> Iterator[Styles]:
    """Yield plans for the token embedding, and for the layer that computes the logits."""
    sizes = {name: twin.model.get_parameter(f"{name}.weight").shape for name in flow.tables}
    rows = max((shape[0] for shape in sizes.values()), default=0)
    for name, shape in sizes.items():
        if shape[0] == rows:
            yield {flow.patterns[name]: "vocab"}
    for name in list(flow.inputs)[-1:]:
        yield {flow.patterns[name]: "colwise_gather_output"}


def _large(twin: ModelCopy, flow: _Flow) -> Iterator[Styles]:
    sizes: Counter[str] = Counter()
    for name in flow.inputs:
        sizes[flow.patterns[name]] += twin.model.get_parameter(f"{name}.weight").numel()
    for pattern, size in sizes.items():
        if size > LARGE * size_of(twin.model):
            yield {pattern: "colwise_gather_output"}
