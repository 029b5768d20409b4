"""The law of steps: a small GPT takes the steps of plain torch on every layout, or is refused.

`FACTORS` lists what a run can combine. Rows cover each pair of values of two factors. Each row trains two steps and is
compared with `tests.oracles.gpt` in one process: losses, gradient norms and weights. `REFUSED` is the exact table of
what is refused, and `FOUND` has rows that were wrong once.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.experimental import overlap_experts, overlap_halves
from mpcore.pipeline.schedules import NAMES, find_schedule
from mpcore.tools import invariant
from tests.oracles.gpt import GPT, Call
from tests.oracles.settings import Settings
from tests.oracles.training import build_optimizers, cross_entropy

Row = Mapping[str, Any]
pytestmark = pytest.mark.timeout(900)  # they run beside others, at the lowest priority
FACTORS: dict[str, tuple] = {
    "tp": (1, 2), "sequence parallel": (False, True), "context": ("none", "ring", "zigzag", "alltoall", "allgather"),
    "schedule": ("none", *NAMES), "dp": (1, 2, 4), "zero": (0, 1, 2, 3), "replicate": (1, 2),
    "experts": ("none", "on tp", "on ep", "on ep, etp 1", "on ep, all-to-all"),
    "dtype": ("float64", "float32", "bfloat16", "autocast"),
    "optimizer": ("AdamW", "torch's AdamW", "torch's SGD", "Muon"), "micro-batches": (1, 2, 4),
    "targets": ("all", "unequal", "empty"), "tied": (False, True),
    "frozen": ("nothing", "embedding", "norms", "first half"),
    "unused": ("nothing", "always", "in half of the samples"), "evaluated": (False, True),
    "numerics": ("plain", "invariant"),
}  # fmt: skip
FIRST = {name: values[0] for name, values in FACTORS.items()}
LIMIT = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.2, "autocast": 0.2}
"""Largest relative error: of losses and norms, and of each weight's update beside the largest update."""
SMALL = Settings(layers=4, kv_heads=2, seq_len=8, steps=2, lr=0.02, betas=(0.8, 0.9), balance="none")
V, B, T, EPS = 12, 8, 8, 0.1  # words, samples a step, tokens; a large eps: the gradient's scale matters


def ranks(row: Row) -> int:
    """How many ranks a row needs."""
    return row["tp"] * row["dp"] * (1 + (row["context"] != "none")) * (1 + (row["schedule"] != "none"))


# --- the truth ------------------------------------------------------------------------------------------------------


def settings(row: Row) -> Settings:
    """The oracle's settings of a row."""
    rule = {"Muon": "muon"}.get(row["optimizer"], "adamw")
    experts = 0 if row["experts"] == "none" else 4
    top_k = 4 if LIMIT[row["dtype"]] > 0.01 else 2  # rounding to 16 bits would change some choices
    return replace(SMALL, experts=experts, top_k=top_k, tie_embeddings=row["tied"], optimizer=rule)


def weights(row: Row) -> dict[str, Tensor]:
    """The first logical weights, by name; frozen ones require no gradient."""
    s, D = settings(row), SMALL.d_model
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (V, D), "norm.weight": (D,)}
    shapes |= {} if row["tied"] else {"head.weight": (V, D)}
    for at in (f"blocks.{i}" for i in range(s.layers)):
        shapes |= {f"{at}.{name}_norm.weight": (D,) for name in ("attention", "mlp")}
        shapes |= {f"{at}.attention.qkv.weight": (2 * D, D), f"{at}.attention.output.weight": (D, D)}
        wide = {"up": (2 * s.d_ff, D), "down": (D, s.d_ff)}
        if s.experts:
            wide = {"experts.gate_up": (4, 2 * s.d_ff, D), "experts.down": (4, D, s.d_ff), "router": (4, D)}
        shapes |= {f"{at}.mlp.{name}.weight": shape for name, shape in wide.items()}
    shapes |= {"blocks.1.extra": (D, D)} if row["unused"] != "nothing" else {}
    draws = torch.Generator().manual_seed(1)
    found = {name: torch.randn(shape, generator=draws, dtype=torch.float64) / 4 for name, shape in shapes.items()}
    return {name: (x + ("norm" in name)).requires_grad_(not is_frozen(row, name)) for name, x in found.items()}


def logical(row: Row, name: str) -> str:
    """The oracle's name of a parameter: a tied head is the embedding."""
    return "embedding.weight" if row["tied"] and name == "head.weight" else name


def is_frozen(row: Row, name: str) -> bool:
    """Whether a parameter of this logical name is frozen."""
    early = name.startswith(("embedding.", "blocks.0.", "blocks.1."))
    return {"nothing": False, "embedding": name == "embedding.weight", "norms": "norm" in name,
            "first half": early}[row["frozen"]]  # fmt: skip


def batches(row: Row) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and targets of each step: all count, or samples have different numbers of targets, or half have none."""
    for step in range(SMALL.steps):
        text = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(step))
        ids, targets = text[:, :-1], text[:, 1:].clone()
        if row["targets"] == "unequal":
            targets[torch.arange(T) > torch.arange(B)[:, None]] = -100
        elif row["targets"] == "empty":
            targets[: B // 2] = -100
        yield ids, targets


class Oracle(GPT):
    """With an extra matrix beside an attention that the second half of the samples uses."""

    def logits(self, tokens: Tensor, call: Call) -> Tensor:
        """[B, T] -> [B, T, V]."""
        self.samples = call.samples
        return super().logits(tokens, call)

    def attention(self, x: Tensor, at: str, call: Call) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        y, extra = super().attention(x, at, call), self.w.get(at.replace("attention", "extra"))
        return y if extra is None else y + (self.samples >= B // 2)[:, None, None] * (x @ extra)


@cache
def truth(key: tuple) -> dict[str, Tensor]:
    """Train in plain torch with these values of the factors that change a number."""
    row = dict(key)
    s, w = settings(row), weights(row)
    used = {name: p for name, p in w.items() if not (name.endswith("extra") and row["unused"] == "always")}
    model, trained, muon = Oracle(s, used), {name: p for name, p in used.items() if p.requires_grad}, None
    if row["optimizer"] == "torch's SGD":
        groups = [{"params": list(trained.values())}]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=s.lr, momentum=0.9)
    else:
        optimizer, muon = build_optimizers(s, trained)
        for group in optimizer.param_groups:
            group["eps"] = EPS
    steps = []
    for step, (ids, targets) in enumerate(batches(row)):
        logits = model.logits(ids, Call(torch.arange(B), training=True, fractions={}))
        loss = cross_entropy(logits[targets >= 0], targets[targets >= 0]) / (targets >= 0).sum()
        steps += [loss.item()] if step == 0 and row["evaluated"] else []
        loss.backward()
        steps += [loss.item(), math.hypot(*(float(p.grad.norm()) for p in trained.values() if p.grad is not None))]
        optimizer.step()
        muon.step(s.lr) if muon is not None else None
        for p in trained.values():
            p.grad = None
    return {"steps": torch.tensor(steps, dtype=torch.float64), **{name: p.detach() for name, p in w.items()}}


# --- the run --------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """The blocks of one pipeline stage, with the embedding before the first and the head after the last."""

    def __init__(self, row: Row, mesh: mp.Mesh, blocks: range) -> None:
        super().__init__()
        s, on = settings(row), {"tp": mesh.tp, "sequence_parallel": row["sequence parallel"]}
        D, kind = s.d_model, row["context"]
        self.first, self.last, self.blocks = blocks.start == 0, blocks.stop == s.layers, nn.ModuleDict()
        self.embedding: nn.Module | None = None
        if self.first or (self.last and s.tied):
            self.embedding = mp.VocabParallelEmbedding(V, D, **on)
        for i in blocks:
            attention = mp.ParallelAttention(D, s.heads, s.kv_heads, bias=False, cp=mesh.cp,
                                             rope=mp.RotaryEmbedding(D // s.heads),
                                             context="ring" if kind == "none" else kind, **on)  # fmt: skip
            if s.experts:
                way = "all_to_all" if row["experts"].endswith(("all-to-all", "in halves")) else None
                axes = {"ep": mesh.ep, "etp": mesh.etp, "cp": mesh.cp, "data": mesh.data}
                mlp: nn.Module = mp.ParallelMoE(D, s.d_ff, s.experts, s.top_k, dispatch=way, **axes, **on)
            else:
                mlp = mp.ParallelMLP(D, s.d_ff, bias=False, **on)
            self.blocks[str(i)] = mp.TransformerBlock(attention, mlp, mp.RMSNorm(D, **on), mp.RMSNorm(D, **on))
            if row["unused"] != "nothing" and i == 1:
                block = self.blocks[str(i)]
                block.extra = nn.Parameter(torch.empty(D, D))
                if row["unused"] != "always":
                    attention.register_forward_hook(lambda _, inputs, y, block=block: self.add(block.extra, inputs, y))
                if row["sequence parallel"]:
                    mp.add_partial(block, "extra", mesh.tp)
        if self.last:
            self.norm, self.head = mp.RMSNorm(D, **on), mp.ColumnParallelLinear(D, V, bias=False, **on)
            if s.tied:
                self.head.weight = self.embedding.weight

    def add(self, extra: Tensor, inputs: tuple[Tensor], y: Tensor) -> Tensor:
        """Add the product with an extra matrix in the second half of the samples, if there are any."""
        late = self.samples >= B // 2
        return y + late[:, None, None] * (inputs[0] @ extra) if late.any() else y

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:
        """[B, T/cp] ids -> logits; between stages hidden states. `samples` [B] are the numbers of the samples."""
        self.samples = samples
        x = self.embedding(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def optimizer(row: Row, stages: Sequence[Stage], mesh: mp.Mesh) -> Any:
    """What makes the optimizer of a row."""
    s = settings(row)
    rule = {"lr": s.lr, "betas": s.betas, "eps": EPS, "weight_decay": s.weight_decay}
    if row["optimizer"] == "AdamW":
        return lambda model: mp.AdamW(model, **rule)
    if row["optimizer"] == "torch's AdamW":
        return lambda model: torch.optim.AdamW(mp.decay_groups(model, s.weight_decay), **rule)
    if row["optimizer"] == "torch's SGD":
        return lambda model: torch.optim.SGD(model.parameters(), lr=s.lr, momentum=0.9)
    heads = [stage.head for stage in stages if stage.last]
    return lambda model: mp.Muon(model, mesh=mesh, exclude=heads, **rule)


def train(row: Row) -> dict[str, Tensor]:
    """Take the steps of a row on this rank's part of the mesh."""
    s, first = settings(row), {name: p.detach() for name, p in weights(row).items()}
    pp, cp, apart = 1 + (row["schedule"] != "none"), 1 + (row["context"] != "none"), row["experts"].startswith("on ep")
    etp = 1 if row["experts"].endswith("etp 1") else None
    mesh = mp.build_mesh(row["tp"], cp, pp, 2 if apart else 1, row["dp"], "cpu", etp=etp)
    prepare = mp.prepare
    if row["numerics"] == "invariant":
        mesh, prepare = invariant.invariant_mesh(mesh, 2), invariant.prepare
    plan = find_schedule("1f1b" if pp == 1 else row["schedule"], pp, row["micro-batches"])
    each = s.layers // plan.stages
    stages = [Stage(row, mesh, range(i * each, i * each + each)) for i in plan.stages_of(mesh.pp.rank)]
    if row["tied"] and len(stages) > 1 and stages[0].first and stages[-1].last:  # a V: one rank has both ends
        stages[-1].embedding, stages[-1].head.weight = stages[0].embedding, stages[0].embedding.weight
    elif row["tied"]:
        for stage in (stage for stage in stages if stage.embedding is not None):
            mp.add_partial(stage.embedding, "weight", mesh.ends)
    if row["experts"].endswith("in halves"):
        overlap_experts(stages, mesh.pp)
    if row.get("halves"):
        overlap_halves(stages, mesh.pp)
    for stage in stages:
        stage.double() if row["dtype"] == "float64" else stage
        for name, p in stage.named_parameters():
            p.requires_grad_(not is_frozen(row, logical(row, name)))
        mp.load_full_state_dict(stage, {name: first[logical(row, name)] for name in mp.full_state_dict(stage)})
    kept, half = ("float64", "float32"), "bfloat16"
    run = prepare(
        stages, mesh, blocks=[block for stage in stages for block in stage.blocks.values()], initialize=False,
        loss=lambda y, target: mp.vocab_parallel_cross_entropy(y, target, tp=mesh.tp, vocab_size=V, reduction="sum"),
        optimizer=optimizer(row, stages, mesh), micro_batches=row["micro-batches"],
        schedule="1f1b" if pp == 1 else row["schedule"],
        data=mp.Zero(row["zero"], replicate=row["replicate"]), overlap=row.get("overlap", False),
        precision=row["dtype"] if row["dtype"] in kept else mp.Precision(half, autocast=row["dtype"] == "autocast"),
    )  # fmt: skip
    share = run.share(B)
    steps, samples = [], torch.arange(B)[share]
    for step, batch in enumerate(batches(row)):
        ids, targets = (mp.shard_sequence(x[share], mesh.cp, row["context"], dim=1) if cp > 1 else x[share]
                        for x in batch)  # fmt: skip
        if step == 0 and row["evaluated"]:
            steps.append(run.evaluate([(ids, targets)] * 2, samples=[samples] * 2))
        run.forward_backward(ids, targets, samples=samples)
        result = run.optimizer_step()
        steps += [float(result.loss), float(result.grad_norm)]
    with run.parameters():
        own = {name: p for stage in run.stages for name, p in mp.full_state_dict(stage).items()}
    return {"steps": torch.tensor(steps, dtype=torch.float64), **own}


def compare(row: Row, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> str:
    """Return "equal", or what differs from plain torch on a rank."""
    limit, first = LIMIT[row["dtype"]], weights(row)
    errors = {"steps": ((got["steps"] - want["steps"]) / want["steps"]).abs().max().item()}
    moved = {name: (want[name] - p.detach()).norm() / p.numel() ** 0.5 for name, p in first.items()}
    for name in got.keys() - {"steps"}:
        value = want[logical(row, name)]
        rounding = torch.finfo(torch.bfloat16 if limit > 0.01 else got[name].dtype).eps * value.abs()
        error = ((got[name].double() - value).abs() - rounding).clamp(0).norm() / value.numel() ** 0.5
        errors[name] = (error / max(moved.values())).item()
    wrong = {name: f"{error:.2g}" for name, error in errors.items() if not error <= limit}
    return f"differs: {wrong}" if wrong else "equal"


CHANGES = ("experts", "optimizer", "targets", "tied", "frozen", "unused", "evaluated")  # what changes a number


def outcome(row: Row) -> str:
    """Return "equal", the refusal of `prepare` or of a layer, or what differs."""
    same = {name: row[name] for name in CHANGES}
    same |= {"dtype": "float64" if LIMIT[row["dtype"]] < 0.01 else "autocast"}
    same |= {"experts": "none" if row["experts"] == "none" else "on tp"}
    same |= {"optimizer": "AdamW"} if row["optimizer"] == "torch's AdamW" else {}
    want = truth(tuple(same.items()))

    def rank() -> str:
        try:
            return compare(row, train(row), want)
        except ValueError as error:
            return f"refused: {error}"

    try:
        found = mp.simulate(rank, ranks=ranks(row))
    except RuntimeError as error:
        return f"raised {error}"
    return next((each for each in found if each != "equal"), "equal")


# --- the rows -------------------------------------------------------------------------------------------------------


def data(row: Row) -> int:
    """How many ranks hold the same weights and different tokens."""
    return row["dp"] * (1 + (row["context"] != "none"))


def is_invariant(row: Row) -> bool:
    """Whether a row has invariant numerics, of degree 2."""
    return row["numerics"] == "invariant"


def holders(row: Row) -> int:
    """Over how many ranks ZeRO shards each parameter, or each expert."""
    return data(row) // (2 if row["experts"].startswith("on ep") else 1) // row["replicate"]


LEAST = {"1f1b": 2, "dualpipev": 4}
REFUSED: dict[str, Callable[[Row], bool]] = {
    "too few micro-batches": lambda row: row["micro-batches"] < LEAST.get(row["schedule"], 1),
    "too few samples": lambda row: row["dp"] * row["micro-batches"] > B,
    "too few ranks to replicate": lambda row: row["replicate"] == 2 and (row["zero"] == 0 or data(row) < 4),
    "too few ranks for ep": lambda row: row["experts"].startswith("on ep") and data(row) < 2,
    "no masters": lambda row: row["dtype"] == "bfloat16" and row["optimizer"].startswith("torch's")
    and (row["zero"] == 0 or holders(row) < 2),
    "invariant x cp": lambda row: is_invariant(row) and row["context"] != "none",
    "invariant x experts": lambda row: is_invariant(row) and row["experts"] != "none",
    "invariant x autocast": lambda row: is_invariant(row) and row["dtype"] == "autocast",
    "invariant x optimizer": lambda row: is_invariant(row) and row["optimizer"] != "AdamW",
    "invariant x split backward": lambda row: is_invariant(row) and row["schedule"] in ("zb", "zbv", "dualpipev"),
    "invariant x dp above the degree": lambda row: is_invariant(row) and row["dp"] > 2,
    "invariant x micro-batches": lambda row: is_invariant(row) and 2 % (row["micro-batches"] * row["dp"]) > 0,
}  # fmt: skip


def refused(row: Row) -> list[str]:
    """The names in `REFUSED` of what refuses a row."""
    return [name for name, applies in REFUSED.items() if applies(row)]


def pairs(row: Row) -> set[tuple]:
    """The pairs of values of two factors in a row."""
    return set(itertools.combinations(row.items(), 2))


def drawn(dice: random.Random, fixed: Row, most: int) -> Row | None:
    """A row with these values that is not refused, on at most so many ranks; None: none was found."""
    for _ in range(400):
        row = {name: fixed.get(name, dice.choice(values)) for name, values in FACTORS.items()}
        if ranks(row) <= most and not refused(row):
            return row
    return None


def cover(seed: int = 0, most: int = 4) -> list[Row]:
    """Rows that hold each pair of values that a row on at most `most` ranks can hold."""
    dice, rows = random.Random(seed), []
    names = itertools.combinations(FACTORS, 2)
    left = {((a, x), (b, y)): None for a, b in names for x in FACTORS[a] for y in FACTORS[b]}
    while left:
        pair = next(iter(left))
        found = [row for row in (drawn(dice, dict(pair), most) for _ in range(12)) if row]
        left.pop(pair)
        if found:
            best = max(found, key=lambda row: len(pairs(row) & left.keys()))
            rows.append(best)
            left = {each: None for each in left if each not in pairs(best)}
    return rows


def check(rows: Sequence[Row]) -> None:
    """Fail with the list of all rows that are not equal, or that `REFUSED` names and that are not refused."""
    found = [(row, outcome(row), "refused" if refused(row) else "equal") for row in rows]
    wrong = [f"{({k: v for k, v in row.items() if v != FIRST.get(k)})}: {what}" for row, what, want in found
             if not what.startswith(want)]  # fmt: skip
    assert not wrong, f"{len(wrong)} of {len(rows)} rows:\n" + "\n".join(wrong)


FOUND: list[Row] = [  # each was wrong once
    {**FIRST, "context": "alltoall", "schedule": "gpipe", "zero": 1, "dtype": "bfloat16", "micro-batches": 4,
     "unused": "always"},
    {**FIRST, "schedule": "gpipe", "dp": 2, "zero": 2, "dtype": "bfloat16", "numerics": "invariant",
     "unused": "always"},
    {**FIRST, "schedule": "dualpipev", "dp": 2, "zero": 3, "micro-batches": 4, "tied": True, "frozen": "first half"},
    {**FIRST, "dp": 2, "zero": 1, "micro-batches": 2, "unused": "in half of the samples", "dtype": "autocast"},
    {**FIRST, "dp": 2, "zero": 3, "micro-batches": 2, "unused": "in half of the samples", "dtype": "autocast"},
]  # fmt: skip
ON_TP: Row = {**FIRST, "tp": 2, "overlap": 1, "micro-batches": 2}
ZERO_3: Row = {"dp": 2, "zero": 3}
DENSE: Row = {**FIRST, "tp": 2, "halves": True, "micro-batches": 2}
IN_HALVES: Row = {**FIRST, "experts": "on ep, in halves", "micro-batches": 2}
OVERLAPPED: list[Row] = [
    {**ON_TP, "schedule": "1f1b", "sequence parallel": True, "dtype": "bfloat16", "frozen": "first half"},
    {**ON_TP, "schedule": "zbv", "tied": True},
    {**ON_TP, "dp": 2, "zero": 3, "dtype": "bfloat16"},
    {**ON_TP, "dp": 2, "zero": 3, "sequence parallel": True, "experts": "on tp", "frozen": "embedding"},
    {**ON_TP, "schedule": "dualpipev", "sequence parallel": True, "micro-batches": 4, "dtype": "autocast"},
    {**ON_TP, "context": "zigzag", "sequence parallel": True, "evaluated": True, "optimizer": "Muon"},
    {**IN_HALVES, "schedule": "1f1b", "dp": 2, "zero": 3, "dtype": "bfloat16"},
    {**IN_HALVES, "schedule": "zbv", "dp": 2, "tied": True},
    {**IN_HALVES, "schedule": "dualpipev", "context": "ring", "micro-batches": 4, "targets": "unequal"},
    {**IN_HALVES, "dp": 2, "tp": 2, "sequence parallel": True, "overlap": 1, "evaluated": True, "zero": 2},
    {**DENSE, "schedule": "1f1b", "dp": 2, "zero": 3, "dtype": "bfloat16", "frozen": "first half"},
    {**DENSE, "schedule": "zbv", "tied": True},
    {**DENSE, "context": "zigzag", "evaluated": True, "overlap": 1, "optimizer": "Muon", "dtype": "autocast"},
    {**DENSE, **ZERO_3, "schedule": "1f1b", "sequence parallel": True, "dtype": "bfloat16", "frozen": "norms"},
    {**DENSE, "schedule": "zbv", "sequence parallel": True, "tied": True, "overlap": 1, "dtype": "autocast"},
    {**DENSE, "schedule": "dualpipev", "sequence parallel": True, "context": "ring", "micro-batches": 4},
]
PARTS = 5


def test_what_was_wrong_once_stays_right():
    check(FOUND)


def test_hidden_messages_take_the_steps_of_plain_torch():
    check(OVERLAPPED)


@pytest.mark.parametrize("part", [*range(3), *(pytest.param(part, marks=pytest.mark.slow) for part in (3, 4))])
def test_every_pair_of_factors_takes_the_steps_of_plain_torch(part):
    check(cover()[part::PARTS])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_covers_take_the_steps_of_plain_torch(seed):
    check(cover(seed))


@pytest.mark.slow
def test_rows_on_eight_ranks_take_the_steps_of_plain_torch():
    dice = random.Random(8)
    rows = [row for row in (drawn(dice, {}, 8) for _ in range(400)) if row and ranks(row) == 8]
    check(rows[:12])


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_table_names_is_refused(name):
    dice = random.Random(name)
    rows = ({each: dice.choice(values) for each, values in FACTORS.items()} for _ in range(100_000))
    check(list(itertools.islice((row for row in rows if ranks(row) <= 4 and refused(row) == [name]), 3)))
