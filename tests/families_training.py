"""Three steps of AdamW of a family of transformers, as a user runs them: `python -m tests.families --train`."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import mpcore as mp
from mpcore.interop.parallelize import model_plan, suggest_plan
from mpcore.interop.parallelize.plan import is_experts
from mpcore.interop.parallelize.prove import TOLERANCE, CannotCheckError, PlanTester, shapes_of
from mpcore.interop.parallelize.prove_sequence import tokens_of_example
from mpcore.mesh.axis import Mesh
from mpcore.tools.simulation import RankError

SECONDS = 600
EXACT = 1e-9  # of the largest value, in float64
AXES = {  # the mesh of each column, and ZeRO's stage
    "tp 2": ({"tp": 2}, 0), "tp 3": ({"tp": 3}, 0), "sp 2": ({"tp": 2}, 0), "cp 2": ({"cp": 2}, 0),
    "pp 2": ({"pp": 2}, 0), "ep 2": ({"ep": 2}, 0), "ep 2 x tp 2": ({"tp": 2, "ep": 2}, 0),
    "tp 2 x ep 2 x dp 2, ZeRO-2": ({"tp": 2, "ep": 2, "dp": 2, "mesh": {"etp": 1}}, 2),
}  # fmt: skip
ROWS, TOKENS = 4, 12
Tensors = dict[str, torch.Tensor]  # of a batch, or the weights after the last step, the losses and gradient norms


def token_loss(out: Any, target: torch.Tensor) -> torch.Tensor:
    """The sum over tokens, of the logits or of the features of a model without a head."""
    logits = out.logits if hasattr(out, "logits") else out[0]
    return F.cross_entropy(logits.flatten(0, 1), target.flatten() % logits.shape[-1], reduction="sum")


def steps_of(twin: nn.Module, batches: list[Tensors]) -> Tensors:
    """Train a copy of a model in plain torch."""
    model, seen = copy.deepcopy(twin), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        loss = token_loss(model(**{k: x for k, x in batch.items() if k != "target"}), batch["target"])
        (loss / batch["target"].numel()).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        seen.append([loss.item() / batch["target"].numel(), norm.item()])
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), "losses, norms": torch.tensor(seen, dtype=torch.float64)}


def steps_on(on: Mesh, twin: nn.Module, batches: list[Tensors], plan: Any, zero: int, check: bool) -> Tensors:
    """Train a copy of a model on a mesh."""
    model, seen = copy.deepcopy(twin), []
    if max(on.tp.size, on.cp.size, on.ep.size) > 1:
        model = mp.parallelize(model, plan, on.tp, ep=on.ep, etp=on.etp, cp=on.cp, check=check)
    stages, blocks, schedule = mp.pipeline_stages(model, on, micro_batches=on.pp.size)
    run = mp.prepare(
        stages, on, blocks=blocks, schedule=schedule, micro_batches=on.pp.size, loss=token_loss, initialize=False,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), data=mp.Zero(zero),
    )  # fmt: skip
    for batch in batches:
        mine = mp.shard_sequence({key: x[run.share(ROWS)] for key, x in batch.items()}, on.cp, "zigzag")
        run.forward_backward(mine.pop("input_ids"), mine.pop("target"), **mine)
        seen.append(run.optimizer_step()[:2])
    with run.parameters() as whole:
        return {**mp.full_state_dict(whole), "losses, norms": torch.tensor(seen, dtype=torch.float64)}


def farthest(want: Tensors, ranks: list[Tensors]) -> float:
    """The largest difference of a loss or a weight, relative to the largest value."""
    missing = want.keys() - {name for held in ranks for name in held}
    pairs = [(x.double(), want[name]) for held in ranks for name, x in held.items() if x.numel()]
    errors = [((x - y).abs().max() / y.abs().max().clamp(min=1e-30)).item() for x, y in pairs]
    return float("inf") if missing or any(x != x for x in errors) else max(errors)


def trained(model: nn.Module, _: object) -> dict[str, str]:
    """The results of three steps of AdamW on each mesh of `AXES`."""
    plans: dict[tuple[int, int], Any] = {}
    results = dict.fromkeys(AXES, "not applicable")
    meshes = {column: on for column, on in AXES.items() if "ep" not in on[0] or plans_experts(model.config)}
    try:
        twin, given = tokens_of_example(PlanTester(shapes_of(model)), TOKENS + 1)
    except CannotCheckError as error:
        return results | dict.fromkeys(meshes, f"refused: {error}")
    ids, batches = given.pop("input_ids"), []
    twin.model.config.use_cache = twin.model.config.get_text_config().use_cache = False
    for step in range(3):
        seeded = torch.Generator().manual_seed(step)
        rows = ids.flatten()[torch.randint(ids.numel(), (ROWS, TOKENS + 1), generator=seeded)]
        rest = {name: x[:1, :TOKENS].expand(ROWS, *x[:1, :TOKENS].shape[1:]) for name, x in given.items()}
        batches.append({"input_ids": rows[:, :-1], "target": rows[:, 1:], **rest})
    with wide():
        want = steps_of(twin.model, batches)
    for column, (sizes, zero) in meshes.items():
        signal.alarm(SECONDS)
        tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)

        def plan_of(kind: str, tp: int = tp, ep: int = ep, column: str = column) -> Any:
            if kind == "own":
                plan = model_plan(model, tp, ep) if tp * ep > 1 else "auto"
            else:  # that of tp 2 is seldom another than that of tp 3
                of = (min(tp, 2), ep) if kind == "of tp 2" else (tp, ep)
                found = plans.get(of) or plans.setdefault(of, suggest_plan(model, of[0], ep=ep))
                if ep > 1 and not any(map(is_experts, found.plan.values())):
                    raise ValueError("; ".join(dict.fromkeys(found.left.values())))
                plan = found.plan
            return plan | {"": "sequence_parallel"} if column.startswith("sp") else plan

        def attempt(kind: str, check: bool, sizes: Any = sizes, zero: int = zero, plan_of: Any = plan_of) -> str:
            try:
                found = farthest(want, mp.simulate(steps_on, twin.model, batches, plan_of(kind), zero, check, **sizes))
            except Exception as error:  # of a rank, or of `suggest_plan`
                cause = (error.__cause__ or error) if isinstance(error, RankError) else error
                refused = isinstance(cause, ValueError | CannotCheckError)
                return f"refused: {cause}" if refused else f"failed: {type(cause).__name__}: {cause}"
            if found > TOLERANCE:
                return f"different: {found:.0e}"
            return ("equal" if found <= EXACT else f"equal to {TOLERANCE:g}") + ", plan found" * (kind != "own")

        for kind in ("own", *(("of tp 2",) if tp > 2 else ()), *(("found",) if tp * ep > 1 else ())):
            with wide():
                said = attempt(kind, False)
            said = said if said.startswith("equal") else attempt(kind, True)  # as a user would have called it
            if said.startswith("equal"):
                break
        results[column] = said
    return results


def plans_experts(config: Any) -> bool:
    """Whether the plans of a config name fused experts."""
    plans = [getattr(config, f"base_model_{axis}_plan", None) or {} for axis in ("tp", "ep")]
    return any(is_experts(style) for plan in plans for style in plan.values())


@contextmanager
def wide() -> Iterator[None]:
    """Leave out the casts of a model from float64 to float32."""
    softmax, to, zeros = F.softmax, torch.Tensor.to, torch.zeros_like

    def cast(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype == torch.float64:
            args = tuple(arg for arg in args if arg is not torch.float32)
            kwargs = {name: arg for name, arg in kwargs.items() if arg is not torch.float32}
        return to(x, *args, **kwargs) if args or kwargs else x

    def zeros_of(x: torch.Tensor, **how: Any) -> torch.Tensor:
        narrow = (x.dtype, how.get("dtype")) == (torch.float64, torch.float32)
        return zeros(x, **how | {"dtype": x.dtype} if narrow else how)

    plain = mock.patch.multiple(torch.Tensor, float=lambda x: x, to=cast, type=cast)
    soft = mock.patch.object(F, "softmax", lambda x, dim=None, _stacklevel=3, dtype=None: softmax(x, dim))
    with plain, soft, mock.patch.object(torch, "zeros_like", zeros_of):
        yield
