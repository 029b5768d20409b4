"""Compare what the ranks recorded with the unsharded model's values, and explain the first difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mpcore.tools.verify.causes import axes, undeclared, why_module, why_parameter
from mpcore.tools.verify.layout import Layout
from mpcore.tools.verify.parts import TOLERANCE, close, farthest, infinite, parts, shards
from mpcore.tools.verify.run import RankRecord

STAGES = ("first values", "forward", "loss", "gradient", "norm", "update", "buffers", "evaluation")
OF_FLOAT32 = 2.0**33  # float64 ULPs, about 30 roundings of float32 (2^28 each): below it, suspect casts to float32


@dataclass(frozen=True)
class Mismatch:
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
        mismatch: the first tensor that differs. None: the models are equal.
        error: why the run failed. "": it didn't.
    """

    layout: str
    worst: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    mismatch: Mismatch | None = None
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether the model ran and is equal to the unsharded model."""
        return self.mismatch is None and not self.error


class Judge:
    """Compares runs with the unsharded model, within a tolerance for rounding.

    Args:
        rounded: runs of the unsharded model in that dtype, if it isn't float64. Twice their largest error is allowed.
        exact: if True, no difference is allowed.
    """

    def __init__(
        self,
        truth: RankRecord,
        dtype: torch.dtype = torch.float64,
        rounded: Sequence[RankRecord] = (),
        exact: bool = False,
    ) -> None:
        self.truth = truth
        self.dtype = dtype
        self.rounded = rounded
        self.exact = exact
        self.eps: float = torch.finfo(dtype).eps

    def __call__(self, layout: Layout, ranks: Sequence[RankRecord]) -> Verdict:
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
            worst, mismatch = found[stage]
            verdict.worst[stage] = worst
            if mismatch is not None and verdict.mismatch is None:
                verdict.mismatch = mismatch
        return verdict

    def _own(self, which: str, name: str | tuple[str, int]) -> float:
        want, *near = (getattr(run, which).get(name) for run in (self.truth, *self.rounded))
        return max((farthest(t, want) for t in near if t is not None and t.shape == want.shape), default=0.0)

    def _off(self, got: Tensor, want: Tensor, own: float, floor: float = 0.0) -> tuple[float, bool]:
        """Return the difference in ULPs, and whether it is more than rounding explains."""
        exact = not want.is_floating_point()
        if got.numel() == 0 or (exact and self.dtype != torch.float64):  # rounding may change an index
            return 0.0, False
        scale = max(want.double().nan_to_num(0, 0, 0).abs().max().item(), floor) or 1.0
        error = farthest(got, want)
        allowed = 2 * own + self.eps * scale if self.rounded else TOLERANCE * scale
        allowed = 0.0 if exact or self.exact else allowed
        ulps = math.inf if math.isnan(error) else error / (self.eps * scale)
        return ulps, not error <= allowed  # also true for NaN

    # --- parameters and their gradients -------------------------------------------------------------------------------

    def _parameters(
        self, layout: Layout, ranks: Sequence[RankRecord], stage: str, which: str, each: dict[str, float] | None = None
    ) -> tuple[float, Mismatch | None]:
        want: Mapping[str, Tensor] = getattr(self.truth, which)
        floor = 1e-3 * max((t.abs().max().item() for t in want.values() if t.numel()), default=0.0)
        worst, first, last, each = 0.0, None, "", {} if each is None else each

        def is_whole(name: str) -> bool:
            same = (seen.initial.get(name, want[name]).shape == want[name].shape for seen in ranks)
            return all(same) and not any(name in seen.sharded for seen in ranks)

        names = sorted(want, key=is_whole) if stage == "first values" else want  # drawing a shard changes what is later
        for name in names:
            tensor = want[name]
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
                    f"their gradients are terms of one sum, declare it with mp.add_partial(module, name, axis)"
                )
            elif shape is not None:
                cause = undeclared(name, shape, tuple(tensor.shape))
            if cause:
                first = first or Mismatch(stage, name, math.inf, cause)
                each[name] = worst = math.inf
            else:
                own = self._own(which, name)
                offs = [self._off(t, tensor, own, floor) for t in there]
                each[name] = max(ulps for ulps, _ in offs)
                worst = max(worst, each[name])
                last = name if any(bad for _, bad in offs) else last
                if first is None and last:
                    ulps = max(ulps for ulps, bad in offs if bad)
                    far = there[max(range(len(offs)), key=lambda i: offs[i][::-1])]
                    first = Mismatch(stage, name, ulps, why_parameter(layout, stage, name, held, far, tensor))
        if which == "gradients" and first is not None and last not in ("", first.name):
            behind = (
                f"; the gradients behind {last} are right, so also look at what reads the output of its module: a sum "
                f"over ranks may be missing there in backward, as where F.linear multiplies by a layer's shard"
            )
            first = replace(first, cause=first.cause + behind)
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
                worst, first = math.inf, Mismatch(stage, unknown[0], math.inf, cause)
            elif extra and first is None:
                worst, first = (
                    math.inf,
                    Mismatch(stage, extra[0], math.inf, "the unsharded model gives it none: frozen there alone?"),
                )
        return worst, first

    # --- the forward --------------------------------------------------------------------------------------------------

    def _output(
        self, layout: Layout, ranks: Sequence[RankRecord], stage: str, which: str
    ) -> tuple[float, Mismatch | None]:
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
                fits = got is not None and any(True for _ in parts(layout, seen, want, got.shape, ()))
                if is_cut and name != main and not (fits and want.shape[:1] == (self.truth.rows,)):
                    continue
                ulps, bad = math.inf, True
                if got is not None and fits:
                    ulps, bad = self._off_rank(layout, seen, got, want, own, ())
                worst = max(worst, ulps)
                if bad and first is None:
                    what = f"output{name}" if name else "the model"
                    first = Mismatch(stage, what, ulps, self._why_output(stage, fits, got, want))
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
        self, layout: Layout, seen: RankRecord, got: Tensor, want: Tensor, own: float, runs: tuple[Any, ...]
    ) -> tuple[float, bool]:
        """Compare with the parts of the unsharded tensor that this rank may hold: the smallest difference counts."""
        offs = (self._off(got, part, own) for part in parts(layout, seen, want, got.shape, runs))
        return min(offs, default=(math.inf, True))

    def _locate(self, layout: Layout, ranks: Sequence[RankRecord], output: Mismatch) -> Mismatch:
        """Return the first module call whose output differs, or the output itself."""
        for (name, call), want in self.truth.outputs.items():
            own = self._own("outputs", (name, call))
            held = [seen for seen in ranks if (name, call) in seen.outputs]
            offs = []
            for seen in held:
                got, runs = seen.outputs[name, call], seen.features.get(name, ())
                fits = any(True for _ in parts(layout, seen, want, got.shape, runs))
                off = self._off_rank(layout, seen, infinite(got), infinite(want), own, runs) if fits else (0.0, False)
                offs.append(off)
            if any(bad for _, bad in offs):
                ulps = max(ulps for ulps, bad in offs if bad)
                order = sorted(range(len(held)), key=lambda i: offs[i][::-1], reverse=True)  # largest difference first
                cause = why_module(self.truth, layout, name, call, [held[i] for i in order], want)
                again = f" (call {call + 1} of it)" if call else ""
                return Mismatch("forward", (name or "the model") + again, ulps, cause)
        return output

    # --- buffers ------------------------------------------------------------------------------------------------------

    def _buffers(self, layout: Layout, ranks: Sequence[RankRecord]) -> tuple[float, Mismatch | None]:
        """Compare each rank's buffers with the unsharded model's, or with this rank's shard over tp of them."""
        worst, first = 0.0, None
        for name, want in self.truth.buffers.items():
            own = self._own("buffers", name)
            for seen in (seen for seen in ranks if name in seen.buffers):
                got = seen.buffers[name]
                parts = list(shards(layout, seen, want, got.shape, ()))
                ulps, bad = self._off(got, parts[0], own) if parts else (math.inf, True)
                worst = max(worst, ulps)
                if bad and first is None:
                    cause = (
                        "after the step it differs from the unsharded model's, and it is saved in checkpoints: let all "
                        "ranks compute it alike, from sums over tp, dp, cp and micro-batches; if each rank has its "
                        "own, or nobody needs it saved, register_buffer(..., persistent=False)"
                    )
                    first = Mismatch("buffers", name, ulps, cause)
        held = {name for seen in ranks for name in seen.buffers}
        for name in sorted(held ^ self.truth.buffers.keys()):
            only = "the layout" if name in held else "the unsharded model"
            cause = f"only {only} has a persistent buffer of this name: checkpoints of the two would differ"
            worst, first = math.inf, first or Mismatch("buffers", name, math.inf, cause)
        return worst, first

    # --- the loss and the norm ----------------------------------------------------------------------------------------

    def _number(self, name: str, ranks: Sequence[RankRecord]) -> tuple[float, bool]:
        """Return the difference of a number, such as the loss, on the worst rank, and whether it is too large."""

        def number(seen: RankRecord) -> Tensor:
            return torch.tensor(getattr(seen, name), dtype=torch.float64)

        own = max((farthest(number(run), number(self.truth)) for run in self.rounded), default=0.0)
        offs = [self._off(number(seen), number(self.truth), own) for seen in ranks]
        return max(ulps for ulps, _ in offs), any(bad for _, bad in offs)

    def _norm(self, ranks: Sequence[RankRecord]) -> tuple[float, Mismatch | None]:
        worst, bad = self._number("norm", ranks)
        if not bad:
            return worst, None
        cause = (
            "every gradient was right: a rank counts what another counts too, or nobody counts "
            "(mpcore.gradients.grad_norm)"
        )
        return worst, Mismatch("norm", "", worst, cause)

    def _loss(self, layout: Layout, ranks: Sequence[RankRecord]) -> tuple[float, Mismatch | None]:
        worst, bad = self._number("loss", ranks)
        if not bad:
            return worst, None
        got, want = ranks[0].loss, self.truth.loss
        tokens = (got - want) / math.log(layout.tp) if layout.tp > 1 else math.nan
        if math.isfinite(tokens) and close(tokens / max(round(tokens), 1), 1.0):
            cause = (
                f"it is log(tp) too large for each of {round(tokens)} tokens: gathered logits go into a loss that "
                f"takes them for this rank's shard of the vocabulary"
            )
        elif divided := [f"{axis} = {n}" for axis, n in axes(layout) if n > 1 and want and close(got / want, 1 / n)]:
            cause = (
                f"it is {' or '.join(divided)} times too small: return the sum over tokens. The run divides it once, "
                f"by the count of all ranks"
            )
        elif layout.dp * layout.cp * layout.pp > 1:
            parts = layout.dp * layout.cp * layout.pp
            cause = (
                f"the {parts} parts of the batch don't add up to it: return the sum over tokens, and divide once by "
                f"the count of all ranks (a mean of means weighs tokens unequally)"
            )
        elif want and close(got / want, layout.tp):
            cause = f"it is tp = {layout.tp} times too large: every rank's whole loss is summed over tp"
        else:
            cause = "the output was right: the loss reads it otherwise than the unsharded model does"
            if layout.tp > 1:
                cause += ". Logits of a column-parallel head are sharded: use mp.vocab_parallel_cross_entropy"
        return worst, Mismatch("loss", "", worst, cause)
