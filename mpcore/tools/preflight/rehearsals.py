"""Compare what ranks of a toy saw, for `mpcore preflight`: with one process, with float64, after a resume."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mpcore.tools.preflight.rehearse import Rehearsal
from mpcore.tools.preflight.toy import STEPS
from mpcore.tools.verify.run import RankRecord

OWN_DTYPE = {"float64": 1e-8, "float32": 1e-4}  # how far a first loss may be from one process's; of 16 bits 0.03
BLOCK_ROUNDINGS, OTHER_ROUNDINGS = 24, 12  # in a row, forward and backward: of a block, and of embedding, head and loss
ROUNDINGS = 4  # of a gradient itself: the sums over micro-batches, tp and data ranks, and the loss scale


def pick(ranks: Sequence[Rehearsal], worker: int) -> Rehearsal:
    """Return what a worker's ranks saw, with the parameters of all its stages."""
    mine = [rank for rank in ranks if rank.worker == worker]

    def joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: value for part in parts for name, value in part.items()}

    kept = {step: joined(rank.kept[step] for rank in mine) for step in mine[0].kept}
    return replace(mine[0], state=joined(rank.state for rank in mine), kept=kept)


def compare(got: Rehearsal, want: Rehearsal, steps: range, what: str, cause: str) -> None:
    """Raise ValueError, with the first step or tensor that differs, for a run that is another one."""
    for step in steps:
        for name, field in (("loss", "losses"), ("norm", "norms")):
            a, b = getattr(got, field)[step], getattr(want, field)[step]
            if not math.isclose(a, b, rel_tol=1e-8) and not (math.isnan(a) and math.isnan(b)):
                raise ValueError(f"{what}: {name} {a:.12g} of step {step} is not {b:.12g}: {cause}")
    differing(got.state, want.state, f"{what}, after step {steps[-1]}", cause)
    check_validation(got.validation, want.validation, what)


def check_validation(got: float, want: float, what: str) -> None:
    """Refuse another validation loss of the same parameters."""
    if math.isclose(got, want, rel_tol=1e-8):
        return
    times = f" ({got / want:.6g} times as large)" if got else ""
    fault = "sum its loss and its count over all data ranks, and don't count targets that are -100"
    if not got:
        fault = "only the last pipeline stage has the loss: send it to the other stages, as Pipeline.from_last does"
    raise ValueError(
        f"{what}: the training losses and the parameters are equal, but the validation loss is {got:.12g}, not "
        f"{want:.12g}{times}. The evaluation is wrong: {fault}"
    )


def differing(got: Mapping[str, Tensor], want: Mapping[str, Tensor], what: str, cause: str) -> None:
    """Refuse a tensor of `got` that `want` lacks or that has another shape or value there."""
    for name, there in got.items():
        value = want.get(name)
        if value is None or there.shape != value.shape:
            shape = None if value is None else tuple(value.shape)
            raise ValueError(f"{what}: {name} is {tuple(there.shape)}, not {shape}: {cause}")
        far = (there.double() - value.double()).abs().max().item() if value.numel() else 0.0
        if not far <= 1e-7 * max(value.double().abs().max().item() if value.numel() else 0.0, 1.0):
            raise ValueError(f"{what}: {name} is off by {far:.3g}: {cause}")


def resumed(got: Rehearsal, whole: Rehearsal, step: int, what: str) -> None:
    """Raise ValueError, with what of the state seems to be lost, if a resumed run is not the run that went on."""
    if step in whole.kept:
        differing(got.begun, whole.kept[step], what, "it was not saved, or not loaded, as it was")
    if got.scale != whole.scales.get(step, got.scale):
        raise ValueError(f"{what}: the loss scale is {got.scale:g}, it was {whole.scales[step]:g}: it is not saved")
    if min(got.losses, default=step) != step:
        raise ValueError(f"{what}: it went on with step {min(got.losses)}, {step} steps were done")
    first = got.losses.get(step, 0.0), whole.losses.get(step, 0.0)
    if not math.isclose(*first, rel_tol=1e-7):
        raise ValueError(
            f"{what}: parameters are what they were, the loss of step {step} is {first[0]:.12g}, not {first[1]:.12g}: "
            f"other samples (the data's place is not saved), or another dropout mask"
        )
    compare(got, whole, range(step, STEPS), what, "what the optimizer or the routers keep is not saved or not loaded")


def distinct(begun: Mapping[str, Tensor]) -> None:
    """Refuse two parameters that begin with the same random values."""
    known: dict[bytes, str] = {}
    for name, value in begun.items():
        if value.numel() > 1 and value.min() != value.max():
            before = known.setdefault(value.double().numpy().tobytes(), name)
            if before != name:
                raise ValueError(f"{before} and {name} begin with the same values: they draw from one random stream")


def within_rounding(
    dtype: str, eps: float, truth: RankRecord, rounded: Sequence[RankRecord], got: RankRecord, *, layers: int,
    experts: bool,
) -> None:  # fmt: skip
    """Refuse gradients that are farther from float64 than one process's in the same dtype, some times over.

    The errors of two runs in one dtype are sums of equally many roundings, and the 2-norm of a tensor's error is the
    root of a sum of many squares: one of twice the size is no rounding. Besides, a gradient is itself rounded a few
    times. Of experts the norm alone is compared: a rounding may send a token to another expert, which replaces one of
    the n tokens' terms of the gradient, about 1/sqrt(n) of its norm.

    Args:
        dtype, eps: of products, and the distance of its two numbers at 1.
    """
    if not all(math.isfinite(seen.norm) for seen in (*rounded, got)):
        return  # a first loss scale that is too large
    far = max(abs(seen.norm - truth.norm) for seen in rounded)
    most = (BLOCK_ROUNDINGS * layers + OTHER_ROUNDINGS) * eps / 2  # each moves it by half a unit at most, all one way
    if not far <= max(most, OWN_DTYPE["float32"]) * truth.norm and not experts:
        raise ValueError(
            f"the norm of step 0 in {dtype} on one process is {rounded[0].norm:.6g}, in float64 {truth.norm:.6g}: a "
            f"gradient of this dtype is lost, kept or counted twice"
        )
    moved = 2 * math.sqrt(2 / (truth.rows * truth.length)) if experts else 0.0
    if not abs(got.norm - truth.norm) <= 2 * far + (ROUNDINGS * eps + moved) * truth.norm:
        raise ValueError(
            f"the norm of step 0 in {dtype} is {got.norm:.6g}, in float64 {truth.norm:.6g}, and on one process "
            f"{rounded[0].norm:.6g}: a gradient of this dtype is lost, kept or counted twice"
        )
    floor = 1e-3 * max(float(g.norm()) for g in truth.gradients.values())
    for name, want in truth.gradients.items():
        scale = max(float(want.norm()), floor)
        own = max(error(seen, name, want) for seen in rounded)
        if dtype == "float32" and not own <= OWN_DTYPE[dtype] * scale and not experts:
            raise ValueError(
                f"the gradient of {name} on one process in {dtype} is off by {own / scale:.2g} of its norm in float64: "
                f"something is computed in a narrower dtype"
            )
        off = error(got, name, want)
        if not off <= 2 * own + ROUNDINGS * eps * scale and not experts:
            raise ValueError(
                f"the gradient of {name} in {dtype} is off by {off / scale:.2g} of its norm in float64, on one process "
                f"by {own / scale:.2g}: a gradient is summed, merged or kept in a narrower dtype, or lost"
            )


def check_digits(dtype: torch.dtype, seen: RankRecord) -> None:
    """Refuse a sum over data ranks that has no more digits than one term: it was added up in half precision.

    A sum of two such numbers is one itself in at most three of four cases, so that all of 64 are in one of 10^8. The
    matrices of blocks alone are looked at: a row of a table, or an expert, may have a single term.
    """
    for name, g in seen.gradients.items():
        if g.dim() < 2 or not name.startswith("blocks.") or ".experts." in name:
            continue
        values = g[g != 0].double()
        if len(values) >= 64 and torch.equal(values.to(dtype).double(), values):
            raise ValueError(f"the gradient of {name} has the digits of {dtype} alone: it is not summed in float32")


def error(seen: RankRecord, name: str, want: Tensor) -> float:
    """The 2-norm of the error of a gradient; 0 where a rank has none."""
    got = seen.gradients.get(name)
    return 0.0 if got is None else float((got.double() - want.double()).norm())
