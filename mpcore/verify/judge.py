"""Compare what the ranks recorded with the unsharded model's values, and explain the first difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpcore.collectives import shard_sizes
from mpcore.verify.layout import Layout, faults_of_module
from mpcore.verify.run import Seen

STAGES = ("first values", "forward", "loss", "gradient", "norm", "update", "buffers", "evaluation")
TOLERANCE = 1e-10  # relative, for float64: thousands of roundings
OF_FLOAT32 = 2.0**33  # float64 ULPs, about 30 roundings of float32 (2^28 each): below it, suspect casts to float32


@dataclass(frozen=True)
class Departure:
    """The first tensor that differs from the unsharded model's.

    Attributes:
        stage: one of `STAGES`.
        name: the name of the module (for the forward), the parameter or the buffer. "" for the loss and the norm.
        ulps: the difference, in units of the last place of the tensor's largest value; infinite if the tensors can't be
            compared.
        cause: the likely cause, in a sentence.
    """

    stage: str
    name: str
    ulps: float
    cause: str

    def __str__(self) -> str:
        where = f"{self.stage} of {self.name}" if self.name else self.stage
        by = f" differs by {self.ulps:.3g} ULPs" if self.ulps < math.inf else ""
        return f"{where}{by}: {self.cause}"


@dataclass
class Verdict:
    """The result for one layout.

    Attributes:
        layout: the layout's name.
        worst: the largest difference of any tensor of each stage, in ULPs. For the forward only the model's output and
            the first module whose output differs are counted. A stage that wasn't reached is missing.
        gradients: the largest difference of each parameter's gradient, in ULPs; infinite if there is no gradient to
            compare.
        departure: the first tensor that differs. None: the models are equal.
        error: why the run failed. "": it didn't.
    """

    layout: str
    worst: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    departure: Departure | None = None
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether the model ran and is equal to the unsharded model."""
        return self.departure is None and not self.error


class Judge:
    """Compares runs with the unsharded model, within a tolerance for rounding.

    Args:
        truth: the unsharded model's run in float64.
        dtype: the dtype of the layouts' runs.
        rounded: runs of the unsharded model in that dtype, if it isn't float64. Twice their largest error is allowed.
        exact: if True, no difference is allowed.
    """

    def __init__(
        self, truth: Seen, dtype: torch.dtype = torch.float64, rounded: Sequence[Seen] = (), exact: bool = False
    ) -> None:
        self.truth, self.dtype, self.rounded, self.exact = truth, dtype, rounded, exact
        self.eps = torch.finfo(dtype).eps

    def __call__(self, layout: Layout, ranks: Sequence[Seen]) -> Verdict:
        """Compare all ranks of a layout."""
        verdict = Verdict(layout.name)
        found = {
            "first values": self._parameters(layout, ranks, "first values", "initial"),
            "forward": self._output(layout, ranks, "forward", "output"),
            "loss": self._loss(layout, ranks),
            "gradient": self._parameters(layout, ranks, "gradient", "gradients", verdict.gradients),
            "norm": self._norm(ranks),
            "update": self._parameters(layout, ranks, "update", "updated"),
            "buffers": self._buffers(layout, ranks),
            "evaluation": self._output(layout, ranks, "evaluation", "evaluated"),
        }
        for stage in STAGES:
            worst, departure = found[stage]
            verdict.worst[stage] = worst
            if departure is not None and verdict.departure is None:
                verdict.departure = departure
        return verdict

    def _own(self, which: str, name: str | tuple[str, int]) -> float:
        """Return the largest rounding error of the unsharded model's own tensor."""
        want, *near = (getattr(run, which).get(name) for run in (self.truth, *self.rounded))
        return max((_farthest(t, want) for t in near if t is not None and t.shape == want.shape), default=0.0)

    def _off(self, got: Tensor, want: Tensor, own: float, floor: float = 0.0) -> tuple[float, bool]:
        """Return the difference in ULPs, and whether it is more than rounding explains.

        Args:
            got: the layout's tensor.
            want: the unsharded model's tensor.
            own: the unsharded model's own rounding error.
            floor: the least scale of the tolerance.
        """
        exact = not want.is_floating_point()
        if got.numel() == 0 or (exact and self.dtype != torch.float64):  # rounding may change an index
            return 0.0, False
        scale = max(want.double().nan_to_num(0, 0, 0).abs().max().item(), floor) or 1.0
        error = _farthest(got, want)
        allowed = 2 * own + self.eps * scale if self.rounded else TOLERANCE * scale
        allowed = 0.0 if exact or self.exact else allowed
        ulps = math.inf if math.isnan(error) else error / (self.eps * scale)
        return ulps, not error <= allowed  # also true for NaN

    # --- parameters and their gradients -------------------------------------------------------------------------------

    def _parameters(
        self, layout: Layout, ranks: Sequence[Seen], stage: str, which: str, each: dict[str, float] | None = None
    ) -> tuple[float, Departure | None]:
        want: Mapping[str, Tensor] = getattr(self.truth, which)
        floor = 1e-3 * max((t.abs().max().item() for t in want.values() if t.numel()), default=0.0)
        worst, first, each = 0.0, None, {} if each is None else each
        for name, tensor in want.items():
            held = [seen for seen in ranks if name in seen.initial]
            tensors = [getattr(seen, which).get(name) for seen in held]
            there = [t for t in tensors if t is not None]
            shape = next((tuple(t.shape) for t in there if t.shape != tensor.shape), None)
            cause = ""
            if not held:
                cause = "no rank has a parameter of this name"
            elif not there:
                cause = "it has none: the parameter is frozen, or its use was detached, under this layout"
            elif len(there) < len(held) and tensor.any():
                cause = (
                    f"{len(held) - len(there)} of the {len(held)} ranks that hold it have none: let all use it, or, if "
                    f"their gradients are terms of one sum, declare it pending with add_partial(module, name, axis)"
                )
            elif shape is not None:
                cause = _undeclared(name, shape, tuple(tensor.shape))
            if cause:
                first = first or Departure(stage, name, math.inf, cause)
                each[name] = worst = math.inf
            else:
                own = self._own(which, name)
                offs = [self._off(t, tensor, own, floor) for t in there]
                each[name] = max(ulps for ulps, _ in offs)
                worst = max(worst, each[name])
                if first is None and any(bad for _, bad in offs):
                    ulps = max(ulps for ulps, bad in offs if bad)
                    far = there[max(range(len(offs)), key=lambda i: offs[i][::-1])]
                    first = Departure(stage, name, ulps, self._why(layout, stage, name, held, far, tensor))
        if which == "gradients":
            zeros = layout.zero > 0  # with ZeRO an unused parameter's gradient is zero, not None
            extra = sorted(
                {name for seen in ranks for name, g in seen.gradients.items() if not zeros or g.any()} - want.keys()
            )
            unknown = [name for name in extra if name not in self.truth.initial]
            if unknown:
                cause = (
                    "the unsharded model has no parameter of this name. A tied parameter has its first name in the "
                    "unsharded model on every rank: register it by this name on the last stage too, and tie the head "
                    "to it"
                )
                worst, first = math.inf, Departure(stage, unknown[0], math.inf, cause)
            elif extra and first is None:
                worst, first = (
                    math.inf,
                    Departure(stage, extra[0], math.inf, "the unsharded model gives it none: frozen there alone?"),
                )
        return worst, first

    def _why(self, layout: Layout, stage: str, name: str, held: Sequence[Seen], got: Tensor, want: Tensor) -> str:
        if stage == "first values":
            return (
                "its first values depend on the layout: draw the logical tensor and keep the shard (declare it, or "
                "call mpcore.materialize)"
            )
        if stage == "update":
            return "its gradient was right: the optimizer steps on something else, or ranks hold unequal replicas"
        for axis, size in _axes(layout):
            terms = _one_each(held, [seen.gradients.get(name) for seen in held], axis)
            all_terms = len(terms) > 1 and (axis == "pp" or len(terms) == size)  # of pp only the stages that hold it
            if all_terms and not _same(terms) and _near(torch.stack(terms).sum(0), want):
                if axis == "pp":
                    return (
                        "each pipeline stage holds one term of its gradient, and nobody sums them: declare the tied "
                        "parameter pending with add_partial(module, name, mesh.ends), under one name on both stages; "
                        "where other stages hold it, over an Axis of their ranks' own group"
                    )
                return (
                    f"each rank of {axis} holds one term of its gradient, and nobody sums them: the parameter is "
                    f"replicated but sees only this rank's part of the work: declare it in its module with "
                    f"mp.add_partial(module, {name.rpartition('.')[2]!r}, mesh.{axis})"
                )
        ratio = _ratio(got, want)
        local = [seen.local.get(name) for seen in held]
        for axis, size in _axes(layout):
            if size > 1 and _close(ratio, size):
                terms = [t for t in local if t is not None]
                whole = (
                    "it is declared pending though each rank has all of it"
                    if terms and _near(terms[0], want)
                    else "what feeds it sums a gradient that every rank has whole (all_gather where gather is right?)"
                )
                return f"the gradient is {axis} = {size} times too large: {whole}"
            if size > 1 and _close(ratio, 1 / size):
                return (
                    f"the gradient is {axis} = {size} times too small: it is averaged, or one rank's term of a sum; "
                    f"losses are summed here, and divided once"
                )
        also = ""
        if layout.sequence_parallel:
            also = (
                "; or a whole tensor that depends on it, such as a modulation, meets this rank's tokens without "
                "collectives.copy(x, mesh.tp), which sums its gradient"
            )
        return (
            "its values differ in no simple way: look at the module that it belongs to, and at what reads its output"
            + also
        )

    # --- the forward --------------------------------------------------------------------------------------------------

    def _output(self, layout: Layout, ranks: Sequence[Seen], stage: str, which: str) -> tuple[float, Departure | None]:
        """Compare each tensor of the model's output. If one differs, find the first module whose own output differs.

        A tensor without rows, such as a loss or a mean, depends on the part of the batch. So it is compared only if the
        layout splits no batch. The first floating-point tensor with at least one dimension is always compared.
        """
        truth: Mapping[str, Tensor] = getattr(self.truth, which)
        main = next((name for name, t in truth.items() if t.is_floating_point() and t.dim()), None)
        is_cut = layout.dp * layout.cp * layout.micro_batches > 1
        worst, first = 0.0, None
        for name, want in truth.items():
            own = self._own(which, name)
            for seen in (seen for seen in ranks if getattr(seen, which) is not None):
                got = getattr(seen, which).get(name)
                fits = got is not None and any(True for _ in _parts(layout, seen, want, got.shape, ()))
                if is_cut and name != main and not (fits and want.shape[:1] == (self.truth.rows,)):
                    continue
                ulps, bad = math.inf, True
                if got is not None and fits:
                    ulps, bad = self._off_rank(layout, seen, got, want, own, ())
                worst = max(worst, ulps)
                if bad and first is None:
                    what = f"output{name}" if name else "the model"
                    first = Departure(stage, what, ulps, self._why_output(stage, fits, got, want))
        if first is not None and stage == "forward":
            first = self._locate(layout, ranks, first)
            worst = max(worst, first.ulps)
        return worst, first

    def _why_output(self, stage: str, fits: bool, got: Tensor | None, want: Tensor) -> str:
        if got is None:
            return "the unsharded model returns it, this layout doesn't, or not alike in each micro-batch"
        if not fits:
            return (
                f"it is {tuple(got.shape)}, which is no rank's part of the unsharded model's {tuple(want.shape)}: "
                f"outputs are [B, ...], sharded in rows over dp and micro-batches, and [B, T, ...] over cp"
            )
        if stage == "evaluation":
            return (
                "the forward in training was right: it goes another way in eval(), or keeps something of the forward, "
                "or of the weights, before the step"
            )
        return "no module's own output is off: look at the model's forward itself"

    def _off_rank(
        self, layout: Layout, seen: Seen, got: Tensor, want: Tensor, own: float, runs: tuple
    ) -> tuple[float, bool]:
        """Compare with the parts of the unsharded tensor that this rank may hold: the smallest difference counts."""
        offs = (self._off(got, part, own) for part in _parts(layout, seen, want, got.shape, runs))
        return min(offs, default=(math.inf, True))

    def _locate(self, layout: Layout, ranks: Sequence[Seen], output: Departure) -> Departure:
        """Return the first module call whose output differs, or the output itself."""
        for (name, call), want in self.truth.outputs.items():
            own = self._own("outputs", (name, call))
            held = [seen for seen in ranks if (name, call) in seen.outputs]
            offs = [
                self._off_rank(layout, seen, seen.outputs[name, call], want, own, seen.features.get(name, ()))
                for seen in held
            ]
            if any(bad and ulps < math.inf for ulps, bad in offs):
                ulps = max(ulps for ulps, bad in offs if bad)
                order = sorted(range(len(held)), key=lambda i: offs[i][::-1], reverse=True)  # largest difference first
                cause = self._why_forward(layout, name, call, [held[i] for i in order], want)
                again = f" (call {call + 1} of it)" if call else ""
                return Departure("forward", (name or "the model") + again, ulps, cause)
        return output

    def _why_forward(self, layout: Layout, name: str, call: int, held: Sequence[Seen], want: Tensor) -> str:
        got = held[0].outputs[name, call]
        part = next(iter(_parts(layout, held[0], want, got.shape, held[0].features.get(name, ()))))
        off = got.double() - part
        bias = self.truth.initial.get(f"{name}.bias")
        fits = bias is not None and bias.shape == off.shape[-1:] and layout.tp > 1
        again = (layout.tp - 1) * bias.expand_as(off) if bias is not None and fits else torch.zeros_like(off)
        if fits and _near(off, again):
            return f"the bias is added {layout.tp} times, once on each rank of tp: add it once, after the sum"
        for axis, size in (("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp)):
            terms = _one_each(held, [seen.outputs[name, call] for seen in held], axis)
            unequal = axis == "tp" and len(terms) == size > 1 and not _same(terms) and _same_shape([*terms, part])
            total = torch.stack(terms).double().sum(0) if unequal else part
            if unequal and (_near(total, part) or _near(total - again, part)):
                return "each rank of tp returns one term of a sum, and nothing adds them: use mp.RowParallelLinear here"
            ratio = _ratio(got, part)
            if size > 1 and _close(ratio, size):
                return f"it is {axis} = {size} times too large: what every rank holds whole is summed over {axis}"
            if size > 1 and _close(ratio, 1 / size):
                return f"it is {axis} = {size} times too small: a sum over {axis} is averaged"
        zero, zero_here = part == 0, got == 0
        both = ~(zero | zero_here)
        if bool((zero != zero_here).any()) and _near(got[both], part[both]):
            return (
                "other elements are zero: its dropout mask depends on the layout (mpcore.Dropout with samples draws "
                "the same one everywhere)"
            )
        if got.dim() > 1 and _same_columns(got, part):
            return "its features stand in another order: blocks such as gate and up, or heads, are cut as one"
        return faults_of_module(layout)

    # --- buffers ------------------------------------------------------------------------------------------------------

    def _buffers(self, layout: Layout, ranks: Sequence[Seen]) -> tuple[float, Departure | None]:
        """Compare each rank's buffers with the unsharded model's, or with this rank's shard over tp of them."""
        worst, first = 0.0, None
        for name, want in self.truth.buffers.items():
            own = self._own("buffers", name)
            for seen in (seen for seen in ranks if name in seen.buffers):
                got = seen.buffers[name]
                parts = list(_shards(layout, seen, want, got.shape, ()))
                ulps, bad = self._off(got, parts[0], own) if parts else (math.inf, True)
                worst = max(worst, ulps)
                if bad and first is None:
                    cause = (
                        "after the step it differs from the unsharded model's, and it is saved in checkpoints: let all "
                        "ranks compute it alike, from sums over tp, dp, cp and micro-batches; if each rank has its "
                        "own, or nobody needs it saved, register_buffer(..., persistent=False)"
                    )
                    first = Departure("buffers", name, ulps, cause)
        return worst, first

    # --- the loss and the norm ----------------------------------------------------------------------------------------

    def _number(self, name: str, ranks: Sequence[Seen]) -> tuple[float, bool]:
        """Return the difference of a number, such as the loss, on the worst rank, and whether it is too large."""

        def number(seen: Seen) -> Tensor:
            return torch.tensor(getattr(seen, name), dtype=torch.float64)

        own = max((_farthest(number(run), number(self.truth)) for run in self.rounded), default=0.0)
        offs = [self._off(number(seen), number(self.truth), own) for seen in ranks]
        return max(ulps for ulps, _ in offs), any(bad for _, bad in offs)

    def _norm(self, ranks: Sequence[Seen]) -> tuple[float, Departure | None]:
        worst, bad = self._number("norm", ranks)
        if not bad:
            return worst, None
        cause = "every gradient was right: a rank counts what another counts too, or nobody counts (mpcore.grad_norm)"
        return worst, Departure("norm", "", worst, cause)

    def _loss(self, layout: Layout, ranks: Sequence[Seen]) -> tuple[float, Departure | None]:
        worst, bad = self._number("loss", ranks)
        if not bad:
            return worst, None
        got = ranks[0].loss
        tokens = (got - self.truth.loss) / math.log(layout.tp) if layout.tp > 1 else math.nan
        if math.isfinite(tokens) and _close(tokens / max(round(tokens), 1), 1.0):
            cause = (
                f"it is log(tp) too large for each of {round(tokens)} tokens: gathered logits go into a loss that "
                f"takes them for this rank's shard of the vocabulary"
            )
        elif layout.dp * layout.cp * layout.pp > 1:
            parts = layout.dp * layout.cp * layout.pp
            cause = (
                f"the {parts} parts of the batch don't add up to it: return the sum over tokens, and divide once by "
                f"the count of all ranks (a mean of means weighs tokens unequally)"
            )
        elif _close(got / self.truth.loss, layout.tp) if self.truth.loss else False:
            cause = f"it is tp = {layout.tp} times too large: every rank's whole loss is summed over tp"
        else:
            cause = "the output was right: the loss reads it otherwise than the unsharded model does"
        return worst, Departure("loss", "", worst, cause)


def _parts(
    layout: Layout, seen: Seen, want: Tensor, shape: torch.Size, runs: Iterable[tuple[int, int]]
) -> Iterator[Tensor]:
    """Yield the parts of an unsharded tensor that a rank may hold.

    They are its rows and tokens, and of them the declared features, or a shard of one dimension.
    """
    rows = want.chunk(layout.dp)[seen.dp] if want.dim() and layout.dp > 1 else want
    runs = tuple(runs)
    parts = []
    if seen.tokens is not None:
        for dim in (d for d, size in enumerate(rows.shape) if size == seen.length):
            parts += _shards(layout, seen, rows.index_select(dim, seen.tokens), shape, runs)
    yield from parts or _shards(layout, seen, rows, shape, runs)


def _shards(layout: Layout, seen: Seen, rows: Tensor, shape: torch.Size, runs: tuple) -> Iterator[Tensor]:
    if runs and sum(end - start for start, end in runs) == shape[-1] and runs[-1][1] <= rows.shape[-1]:
        declared = torch.cat([rows.narrow(-1, start, end - start) for start, end in runs], -1)
        if declared.shape == shape:
            yield declared
            return
    if rows.shape == shape:
        yield rows
        return
    unequal = [d for d in range(rows.dim()) if rows.dim() == len(shape) and rows.shape[d] != shape[d]]
    if len(unequal) == 1:
        dim = unequal[0]
        sizes = shard_sizes(rows.shape[dim], layout.tp)
        if sizes[seen.tp] == shape[dim]:
            yield rows.narrow(dim, sum(sizes[: seen.tp]), shape[dim])


def _undeclared(name: str, shape: tuple[int, ...], want: tuple[int, ...]) -> str:
    leaf, pairs = name.rpartition(".")[2], zip(shape, want, strict=False)
    dim = next((i for i, (here, whole) in enumerate(pairs) if here != whole), 0)
    cut = f"mpcore.sharding.cut({want[dim] if want else 1}, tp, {dim})"
    return (
        f"its declared shape is {shape}, and the unsharded model's {want}. If each rank holds a shard, derive the "
        f"module from mpcore.layers.module.ParallelModule, and make the parameter by "
        f'self.declare("{leaf}", {want}, init, shard={cut})'
    )


def _axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((axis, getattr(layout, axis)) for axis in ("tp", "dp", "cp", "pp"))


def _one_each(held: Sequence[Seen], tensors: Sequence[Tensor | None], axis: str) -> list[Tensor]:
    """Return the tensors of the ranks that have the same coordinates as the first rank, except on `axis`."""
    others = [a for a in ("tp", "cp", "pp", "dp") if a != axis]
    return [
        t
        for seen, t in zip(held, tensors, strict=True)
        if t is not None and all(getattr(seen, a) == getattr(held[0], a) for a in others)
    ]


def _same_shape(tensors: Sequence[Tensor]) -> bool:
    return all(t.shape == tensors[0].shape for t in tensors)


def _same(tensors: Sequence[Tensor]) -> bool:
    return _same_shape(tensors) and all(torch.equal(t, tensors[0]) for t in tensors)


def _near(got: Tensor, want: Tensor) -> bool:
    """Return whether two tensors are equal to rounding."""
    scale = want.double().abs().max().item() if want.numel() else 0.0
    eps = torch.finfo(got.dtype).eps if got.dtype != torch.float64 else TOLERANCE
    return bool(scale) and (got.double() - want.double()).abs().max().item() <= 64 * eps * scale


def _farthest(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference. Equal infinities differ by 0."""
    return ((got.double() - want.double()).abs().masked_fill_(got == want, 0)).max().item()


def _ratio(got: Tensor, want: Tensor) -> float:
    """Return r if got = r want, otherwise NaN."""
    got, want = got.double(), want.double()
    square = want.square().sum().item()
    if not square or got.shape != want.shape:
        return math.nan
    ratio = (got * want).sum().item() / square
    return ratio if ratio and _near(got / ratio, want) else math.nan


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)


def _same_columns(got: Tensor, want: Tensor) -> bool:
    columns = [t.double().reshape(-1, t.shape[-1]).square().sum(0).sort().values for t in (got, want)]
    return _near(*columns)
