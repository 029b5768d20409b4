"""Test a plan before it is used: a small random twin of the model must compute the same sharded as unsharded.

The twin's ranks are threads of this process (`simulate`), so the test needs neither the model's weights nor
torch.distributed. It compares outputs, and the gradients of all parameters and inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpcore._torch.dispatch import OpOverload, TorchDispatchMode
from mpcore._torch.pytree import leaves, map_tensors
from mpcore._torch.values import real_tensors
from mpcore.gradients.reduce import reduce_gradients
from mpcore.interop.parallelize.checks import HEAD_DIMS, is_partial
from mpcore.interop.parallelize.model_copy import (
    MOST,
    SMALL,
    Arguments,
    ModelCopy,
    guesses,
    plain_arguments,
    shape_copy,
    size_of,
    twin_of,
)  # fmt: skip
from mpcore.interop.parallelize.plan import Colwise, Experts, LocalSizes, Rowwise, Style, Target, Vocab, on_axes
from mpcore.mesh.axis import Axis, Mesh
from mpcore.sharding.declarations import declarations, declare_anew, declared_by
from mpcore.sharding.declare import Sharding
from mpcore.tools.simulation.ranks import DeadlockError, simulate
from mpcore.tools.simulation.turns import RankError

# Relative to the largest value. float32 inside a forward causes differences of about 1e-6, a wrong plan 1e-2 or more.
TOLERANCE = 1e-4
DRAWS = (
    ". The forward draws random numbers, although the copy is in eval(): if they change its output, no plan passes. "
    "Draw in training only: F.dropout(x, p, self.training), dropout_p=p if self.training else 0.0"
)
Cut = Callable[[nn.Module, list[Target], Axis], nn.Module]


class CannotCheckError(Exception):
    """The plan can't be tested: no twin could be made, or its forward accepted none of the arguments."""


class CommunicatesError(RuntimeError):
    """The model uses other groups or collectives than the layers that `parallelize` puts in."""


class WithoutCollectives(TorchDispatchMode):
    """A context in which every collective raises `CommunicatesError`: no other rank would call it."""

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d"):
            raise CommunicatesError(f"the model calls {func} itself, which one process can't run")
        return func(*args, **(kwargs or {}))


@dataclass
class Run:
    """The results of one forward and backward of a twin."""

    outputs: list[Tensor] = field(default_factory=list)
    calls: list[tuple[str, list[Tensor]]] = field(default_factory=list)  # a module and its outputs, as modules ended
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # those of inputs are named "input 0" and so on
    shardings: dict[str, Sharding] = field(default_factory=dict)
    random: bool = False  # whether it drew from torch's random generator, although the twin is in evaluation
    error: Exception | None = None
    where: str = ""  # the innermost module in which `error` was raised


class Mismatch(NamedTuple):
    """A tensor that differs from the unsharded model's."""

    name: str  # the module or parameter
    what: str
    error: float  # the largest difference, relative to the largest value


def shapes_of(model: nn.Module) -> nn.Module:
    with real_tensors(), torch.device("cpu"):
        try:
            return shape_copy(model)
        except Exception as error:
            raise CannotCheckError(f"it can't be copied ({_first_line(error)})") from error


class PlanTester:
    """Tests plans on a twin of a model, which is made of `shapes_of(model)` when the first plan is tested.

    Args:
        example: arguments of a forward. None: guess them.
        tolerance: the largest difference that is accepted, relative to the largest value.
    """

    def __init__(self, shapes: nn.Module, example: Arguments | None = None, tolerance: float = TOLERANCE) -> None:
        self.shapes = shapes
        self.example = example
        self.tolerance = tolerance

    @cached_property
    def whole(self) -> tuple[ModelCopy, Arguments, Run]:
        """The twin, arguments that its forward accepts, and the results of its unsharded run."""
        with real_tensors(), torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            return _whole_run(self.shapes, self.example)

    def verdict(self, styles: dict[str, Style], size: int, cut: Cut, tp: Axis | None = None) -> str | None:
        """Compare the twin sharded by a plan with the unsharded twin. Return what is wrong, or None.

        `cut` shards a model in place for one rank, as `parallelize` will over `tp`. A gradient that the model declares
        partial over this axis, or over an axis with the role "tp", is summed over the twin's ranks.
        """
        twin, arguments, first = self.whole
        sizes = _mesh_sizes(styles, size)
        with real_tensors(), torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            named = [(n, m, twin.names.get(n, n)) for n, m in twin.model.named_modules()]  # a forward may add modules
            found = [(name, module, styles[full]) for name, module, full in named if full in styles]
            data = [(arguments, first)]
            for rank in range(1, sizes.get("dp", 1)):  # other tokens on each data rank
                rolled = map_tensors(lambda x, rank=rank: x.roll(rank, 0) if x.dim() > 1 else x, arguments)
                data.append((rolled, plain_run(twin, rolled)))
            runs = [Run() for _ in range(len(data) * size)]

            def rank_run(mesh: Mesh) -> None:
                torch.default_generator.manual_seed(mesh.world.rank)  # for a forward that draws
                part = copy.deepcopy(twin.model)
                _declare_on(part, mesh.tp, tp)
                mine = on_axes([(n, part.get_submodule(n), style) for n, _, style in found], mesh.ep, mesh.etp)
                with_data = (mesh,) if mesh.ep.size > 1 else ()
                one = runs[mesh.data.rank * size + mesh.tp.rank]
                run(cut(part, mine, mesh.tp), data[mesh.data.rank][0], *with_data, found=one)

            run_ranks(rank_run, runs, **sizes)
            total = summed([whole.gradients for _, whole in data])
            for rank, (_, whole) in enumerate(data):
                expected = replace(whole, gradients=whole.gradients | total)
                mine = runs[rank * size : (rank + 1) * size]
                wrong = compare(twin, expected, mine, found, self.tolerance, len(runs))
                if wrong:
                    return wrong + DRAWS if first.random else wrong
            return None


def _mesh_sizes(styles: dict[str, Style], tp: int) -> dict[str, int]:
    """Return the sizes of the mesh on which a plan is tested. ep has the smallest size that says as much."""
    experts = next((style for style in styles.values() if isinstance(style, Experts)), None)
    if experts is None:
        return {"tp": tp}
    ep = next((size for size in range(2, experts.ep.size + 1) if experts.ep.size % size == 0), 1)
    etp = experts.inner(Axis(tp)).size
    return {"tp": tp, "ep": ep, "etp": etp, "dp": etp * ep // math.gcd(etp * ep, tp)}


def summed(gradients: list[dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name in gradients[0]:
        parts = [x for each in gradients if (x := each[name]) is not None]
        if not name.startswith("input "):
            found[name] = torch.stack(parts).sum(0) if parts else None
    return found


def _whole_run(shapes: nn.Module, example: Arguments | None) -> tuple[ModelCopy, Arguments, Run]:
    """Return the first twin and arguments that run, twins with few layers first."""
    said = []
    for few in (False,) if size_of(shapes) <= SMALL else (True, False):
        twin = None
        for arguments in [example] if example is not None else guesses(shapes):
            twin = twin or _twin(shapes, few)
            try:
                return twin, arguments, plain_run(twin, arguments)
            except CannotCheckError as error:
                said.append(str(error))
    why = f"on a copy with random weights, {said[0]}" if said else "no arguments of its forward are known"
    raise CannotCheckError(why)


def plain_run(twin: ModelCopy, arguments: Arguments) -> Run:
    """Run the unsharded twin, and leave no gradients in it. If it fails, raise `CannotCheckError`."""
    try:
        with WithoutCollectives():
            found = run(twin.model, plain_arguments(arguments), sharded=False)
    except CommunicatesError as error:
        raise CannotCheckError(str(error)) from error
    twin.model.zero_grad()
    for held in map(vars, twin.model.modules()):  # such as a weight that a hook of weight_norm computed
        held.update({k: x.detach() for k, x in held.items() if isinstance(x, Tensor) and not x.is_leaf})
    if found.error is not None:
        raise CannotCheckError(_first_line(found.error)) from found.error
    if not found.outputs or not all(x.isfinite().all() for x in found.outputs):
        raise CannotCheckError("its output has no finite floats")
    return found


def _twin(shapes: nn.Module, few_layers: bool) -> ModelCopy:
    if not few_layers and (size := size_of(shapes)) > MOST:
        raise CannotCheckError(f"it has {size} parameters, and a copy may have {MOST}")
    return twin_of(shapes, few_layers)


def _declare_on(model: nn.Module, axis: Axis, tp: Axis | None) -> None:
    """Declare gradients that are partial over tp as partial over `axis`, and drop the other axes of `add_partial`."""
    for module in model.modules():
        for leaf, sharding in declared_by(module).items():
            if sharding.partial:
                partial = (axis,) if is_partial(sharding, tp) else ()
                declare_anew(module, leaf, replace(sharding, partial=partial, added=partial))


def run(model: nn.Module, arguments: Arguments, *over: Mesh, sharded: bool = True, found: Run | None = None) -> Run:
    """Run one forward and backward. The loss has the same gradients for a full output and for its shards.

    Partial gradients are summed if `sharded`, also over the data ranks of a mesh `over`. `found` receives the results,
    also of a run that is stopped.
    """
    found, stack = found or Run(), [""]
    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)),
            module.register_forward_hook(lambda *of, name=name: _record(found, stack, name, of[2])),
        ]
    args, kwargs = plain_arguments(arguments)
    inputs = [x.requires_grad_() for x in _floats((args, kwargs))]
    args, kwargs = map_tensors(lambda x: x.clone(), (args, kwargs))
    state = torch.get_rng_state()
    try:
        out = model(*args, **kwargs)
        stack[:] = ["the backward"]
        found.outputs = _floats(out)
        sum(((x + x.square() / 2).sum() for x in found.outputs if x.requires_grad), torch.zeros(())).backward()
        held = list(declarations(model))
        if sharded:
            reduce_gradients(model, *over)
    except CommunicatesError:
        raise
    except Exception as error:
        found.error = error
        return found
    finally:
        found.where = stack[-1]
        found.random = not torch.equal(state, torch.get_rng_state())
        for handle in handles:
            handle.remove()
    found.outputs = [x.detach() for x in found.outputs]
    found.gradients = {name: p.grad for name, p, _ in held}
    found.shardings = {name: sharding for name, _, sharding in held}
    found.gradients |= {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return found


def _floats(tree: Any) -> list[Tensor]:
    return [x for x in leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]


def _record(found: Run, stack: list[str], name: str, out: Any) -> None:
    stack.pop()
    found.calls.append((name, [x.detach().clone() for x in _floats(out)]))


# --- the comparison ---------------------------------------------------------------------------------------------------


def run_ranks(work: Callable[[Mesh], object], runs: list[Run], **sizes: int) -> None:
    """Call `work(mesh)` on each rank of a mesh, which fills the ranks' `runs`. A deadlock is the first's error."""
    etp = {"etp": sizes.pop("etp")} if "etp" in sizes else None
    try:
        simulate(work, **sizes, mesh=etp)
    except DeadlockError as error:
        if not any(each.error for each in runs):
            runs[0].error = error
    except RankError as error:
        raise error.__cause__ or error from None


def compare(
    twin: ModelCopy, whole: Run, runs: list[Run], targets: list[Target], tolerance: float, size: int = 0
) -> str | None:
    """Return what is wrong with the sharded runs, as text that names the module. None: nothing is wrong.

    `runs` are the runs of the ranks of tp that see the same data, among `size` ranks; 0: among themselves.
    """
    size = size or len(runs)
    errors = [found for found in runs if found.error is not None]
    if errors:
        failed = errors[0]
        where = twin.names.get(failed.where, failed.where) or "the model itself"
        said = f"{where} fails on {size} ranks: {_first_line(failed.error)}"
        return said + _advice(twin, failed.where, targets, size, failed=True)
    outputs = [
        _departure("the output", x, [r.outputs[i] for r in runs], tolerance) for i, x in enumerate(whole.outputs)
    ]
    gradients = list(_gradient_departures(whole, runs, tolerance))
    if not any(outputs) and not gradients:
        return None
    inner = tuple(f"{name}." for name, _, style in targets if isinstance(style, Experts | Vocab))  # other tokens each
    first = next(_call_departures(whole, runs, tolerance, inner), None) or next(filter(None, outputs), None)
    if any(outputs) and first is not None:
        where = twin.names.get(first.name, first.name) or "the model itself"
        said = f"{where} returns other values on {size} ranks than on one, off by {first.error:.1%} of the largest"
        return said + _advice(twin, first.name, targets, size, failed=False)
    place = {name: at for at, (name, _) in enumerate(whole.calls)}
    # the module closest to the output, where a wrong gradient starts
    last = max(gradients, key=lambda found: place.get(found.name.rpartition(".")[0], -1))
    owner, _, leaf = last.name.rpartition(".")
    where = ".".join(filter(None, (twin.names.get(owner, owner), leaf)))
    return (
        f"{GRADIENT} {where} on {size} ranks is not that of the unsharded model, off by {last.error:.1%} of "
        f"the largest{_gradient_advice(last, targets)}"
    )


def _departure(name: str, want: Tensor, got: list[Tensor], tolerance: float) -> Mismatch | None:
    """Return how a tensor differs from the unsharded one. Each rank has it, or a shard of it in any order."""
    if all(x.shape == want.shape for x in got):
        error = max(_error(x, want) for x in got)
        return Mismatch(name, "value", error) if error > tolerance else None
    for dim in range(want.dim()):
        try:
            joined = torch.cat(got, dim)
        except (RuntimeError, IndexError):  # of other sizes, or of fewer dimensions
            continue
        if joined.shape == want.shape:
            error = min(_error(joined, want), _error(joined.sort(dim).values, want.sort(dim).values))
            return Mismatch(name, "value", error) if error > tolerance else None
    return Mismatch(name, "shape", 1.0)


def _error(got: Tensor, want: Tensor, scale: float = 0.0) -> float:
    if want.numel() == 0:
        return 0.0
    both = (got.double() - want.double()).abs()
    both = both.masked_fill((got == want) | (got.isnan() & want.isnan()), 0)
    error = both.max().item() / max(want.double().nan_to_num(0, 0, 0).abs().max().item(), scale, 1e-30)
    return error if error == error else float("inf")


def _call_departures(whole: Run, runs: list[Run], tolerance: float, inside: tuple[str, ...] = ()) -> Iterator[Mismatch]:
    """Yield the modules whose output has the right shape but other values, as they ended; none begins with `inside`."""
    calls, *others = [[each for each in of.calls if not each[0].startswith(inside)] for of in (whole, *runs)]
    if any([name for name, _ in other] != [name for name, _ in calls] for other in others):
        return
    for at, (name, want) in enumerate(calls):
        for i, x in enumerate(want):
            got = [other[at][1][i] for other in others if len(other[at][1]) == len(want)]
            if got and all(y.shape == x.shape for y in got):
                mismatch = _departure(name, x, got, tolerance)
                if mismatch is not None:
                    yield mismatch


def _gradient_departures(whole: Run, runs: list[Run], tolerance: float) -> Iterator[Mismatch]:
    held = [x for x in whole.gradients.values() if x is not None]
    scale = 1e-2 * max((x.abs().max().item() for x in held if x.numel()), default=0.0)
    for name, want in whole.gradients.items():
        got = [found.gradients.get(name) for found in runs]
        if want is None or any(x is None for x in got):
            if (want is not None and want.abs().max() > 0) or any(x is not None and x.abs().max() > 0 for x in got):
                yield Mismatch(name, "presence", 1.0)
            continue
        errors = []
        for found, x in zip(runs, got, strict=True):
            sharding = found.shardings.get(name)
            part = want if sharding is None else sharding.take(want)
            errors.append(_error(x, part, scale) if x is not None and x.shape == part.shape else 1.0)
        if max(errors) > tolerance:
            yield Mismatch(name, "gradient", max(errors))


# --- advice -----------------------------------------------------------------------------------------------------------

GRADIENT = "the gradient of"  # begins what is said of a gradient; the forward was right then
DIVIDED = "divided already"  # said if `LocalSizes` has all sizes, and the module still fails


def _advice(twin: ModelCopy, name: str, targets: list[Target], size: int, failed: bool) -> str:
    """Return advice on how to change the plan, as far as the failing module tells."""
    if name not in twin.names or not targets:
        return ""
    module, styles = twin.model.get_submodule(name), {name: style for name, _, style in targets}
    style, full = styles.get(name), twin.names[name]
    if isinstance(style, Experts) and not failed and (style.etp is None or style.etp.size > 1):
        return ". If it normalizes what an expert returns, each expert must be on one rank: build_mesh(.., etp=1)"
    if isinstance(module, nn.Linear) or isinstance(getattr(module, "nf", None), int):
        if not isinstance(style, Rowwise | Colwise):
            return f". If its input is sharded, write {full!r}: 'rowwise'"
        if isinstance(style, Rowwise) and not failed:
            return (
                ". What reaches it is not each rank's share of the whole input: shard all layers that feed it, name "
                "the packing of fused ones (Colwise(blocks=.., unit=..)), and numbers of heads in LocalSizes"
            )
        if isinstance(style, Rowwise) and not style.split_input:
            return (
                f". 'rowwise' takes the sharded output of a 'colwise' layer: make what feeds {full} 'colwise', or "
                f"write 'rowwise_split_input' for a whole input"
            )
        if isinstance(style, Colwise):
            return f". 'colwise' takes a whole input: make what feeds {full} 'rowwise', or {full} itself"
    inside = [n for n, _, style in targets if n.startswith(f"{name}." if name else "") and isinstance(style, Colwise)]
    divided = style.names if isinstance(style, LocalSizes) else ()
    counts = {k: v for k, v in vars(module).items() if type(v) is int and k not in (*HEAD_DIMS, *divided)}
    sizes = sorted(k for k, v in counts.items() if v > 1 and v % size == 0)
    said = ""
    if inside and sizes:
        said = f". It has the sizes {', '.join(sizes)}: name in LocalSizes those that count sharded heads or features"
    if inside and divided:
        said += (
            f". {', '.join(divided)} {'is' if len(divided) == 1 else 'are'} {DIVIDED}: if its forward computes "
            f"another size from its input's width, as C // n_head does, write -1 for this size, and chunk for split"
        )
    fused = [n for n in inside if styles[n] == Colwise()]
    if fused:
        said += f". Where {twin.names[fused[0]]} packs several projections, write Colwise(blocks=.., unit=..)"
        said += "" if sizes else "; where a view counts heads, give it the size of a head and -1"
    return said


def _gradient_advice(found: Mismatch, targets: list[Target]) -> str:
    if found.name.startswith("input ") or not targets:
        return ""
    owner, _, leaf = found.name.rpartition(".")
    if any(name == owner and isinstance(style, LocalSizes) for name, _, style in targets):  # one style for a module
        return (
            f". If it meets sharded heads or features, call mp.add_partial(module, {leaf!r}, tp) before parallelize, "
            f"for example in the module's __init__"
        )
    return (
        ". If it meets sharded heads or features, write 'replicated_with_grad_allreduce' for its module; if it sees "
        "all of them on every rank, 'replicate'"
    )


def _first_line(error: Exception | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
