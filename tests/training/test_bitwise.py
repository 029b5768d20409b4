"""Invariant numerics: losses, norms, weights and masters are the same to the last bit on every layout."""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mpcore as mp
from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT, build_stages
from mpcore import AdamW, Mesh, simulate
from mpcore.checkpoint import latest
from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import is_dtensor
from mpcore.sharding.state_dict import full_tensor
from mpcore.tools import invariant
from mpcore.tools.verify import verify
from mpcore.tools.verify.layout import Layout, parse_layout
from tests.pool import mesh as pool_mesh

V = 4  # the virtual degree; sizes are odd multiples of it, and no multiple of a vector's length
CONFIG = GPTConfig(
    vocab_size=37, seq_len=12, layers=2, d_model=20, heads=4, head_dim=6, d_ff=28, bias=True, dropout=0.1,
    tie_embeddings=True,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, a batch and how they are run; the layout is no part of it."""

    config: GPTConfig = CONFIG
    virtual: int | tuple[int, int] = V
    samples: int = 12  # three in a leaf
    dtype: str = "float32"
    steps: int = 3
    frozen: str = ""  # a parameter that is frozen after `prepare`


def planned(layout: str) -> tuple[Layout, str]:
    """The layout and the schedule of `tp2` or `pp2 gpipe`."""
    name, _, schedule = layout.partition(" ")
    return parse_layout(name), schedule or "1f1b"


def prepared(mesh: Mesh, case: Case, layout: str, recompute: str = "none") -> mp.Run:
    plan, schedule = planned(layout)
    mesh = invariant.invariant_mesh(mesh, case.virtual) if case.virtual else mesh
    count = plan.pp * (2 if schedule == "interleaved" else 1)  # of stages
    held = [range(i * case.config.layers // count, (i + 1) * case.config.layers // count) for i in range(count)]
    stages = build_stages(
        case.config, mesh, held, [i % plan.pp for i in range(count)], sequence_parallel=plan.sequence_parallel,
        device="meta", dtype=torch.float64 if case.dtype == "float64" else None,
    )  # fmt: skip
    run = (invariant.prepare if case.virtual else mp.prepare)(
        stages, mesh, blocks={int(i): block for stage in stages for i, block in stage.blocks.items()}, seed=3,
        loss=stages[-1].loss, schedule=schedule, optimizer=lambda model: AdamW(model, lr=0.01, weight_decay=0.1),
        data=mp.Zero(plan.zero), recompute=recompute, precision=case.dtype,
        micro_batches=plan.mb or (1 if case.virtual else plan.pp),
    )  # fmt: skip
    for p in (p for stage in run.stages for name, p in stage.named_parameters() if name == case.frozen):
        p.requires_grad_(False)  # the optimizer holds it, and would decay it if it had a gradient
    return run


def train(run: mp.Run, case: Case, steps: int) -> list[tuple[float, float]]:
    found = []
    for _ in range(steps):
        g = torch.Generator().manual_seed(run.step)
        tokens = torch.randint(case.config.vocab_size, (case.samples, case.config.seq_len + 1), generator=g)
        targets = tokens[:, 1:].masked_fill(torch.rand(tokens[:, 1:].shape, generator=g) < 0.1, -100)
        mine = run.share(case.samples)
        part = slice(mine.start, mine.stop)
        run.forward_backward(tokens[part, :-1], targets[part], samples=run.samples(case.samples))
        run.clip_gradients(0.5)
        result = run.optimizer_step()
        found.append((result.loss, result.grad_norm))
    return found


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().double().contiguous().numpy().tobytes()).hexdigest()


def seen(run: mp.Run, record: list[tuple[float, float]]) -> dict[str, str]:
    """By name the SHA-256 of the losses and norms, and of each weight and master of this rank's stage."""
    found = {"losses and norms": hashlib.sha256(repr(record).encode()).hexdigest()}
    half = run.precision.param_dtype
    with run.parameters() as model:
        for name, p, sharding in declarations(model):
            master = run.optimizer.state[p].get("master", p)
            found[f"master of {name}"] = digest(full_tensor(master, sharding))
            found[name] = digest(full_tensor(p, sharding).to(half or p.dtype))
            assert half is None or is_dtensor(p) or p.dtype == half
    return found


def trained(mesh: Mesh, case: Case, layout: str, recompute: str = "none", resume: str = "", save: str = "") -> dict:
    run = prepared(mesh, case, layout, recompute)
    record = []
    if resume:
        record = run.load(resume).extra["record"]
    record = [tuple(entry) for entry in record] + train(run, case, case.steps - run.step)
    found = seen(run, record)
    if save:
        run.save(save, extra={"record": record})
    return found


def sizes(layout: str) -> dict[str, int]:
    plan, _ = planned(layout)
    return {"tp": plan.tp, "pp": plan.pp, "dp": plan.dp}


def on(layout: str, case: Case = Case(), **options: str) -> dict[str, str]:
    """What `trained` finds under a layout whose ranks are threads of this process, checked to be alike on all ranks."""
    work = functools.partial(_trained, options=options)
    return merged(simulate(work, case, layout, **sizes(layout)))


def _trained(mesh: Mesh, case: Case, layout: str, options: dict[str, str]) -> dict[str, str]:
    return trained(mesh, case, layout, **options)


def merged(every: list[dict[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in every:
        for name, value in each.items():
            assert found.setdefault(name, value) == value, f"two ranks have another {name}"
    return found


def differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name] != b[name]]


@functools.cache
def alone(case: Case) -> dict[str, str]:
    """The truth: the same run on one rank, which holds all virtual shards."""
    return on("tp1", case)


QUICK = ("pp2dp2zero1 gpipe", "tp4sp", "dp4zero3", "tp2pp2mb2")
LONG = ("tp2", "tp4spdp2zero3", "dp2zero2", "tp2sp", "tp2sppp2dp2zero2")


@pytest.mark.parametrize("layout", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in LONG)])
def test_every_layout_has_the_same_bits(layout: str) -> None:
    assert not differing(alone(Case()), on(layout))


def _given_up(mesh: Mesh, drop: bool) -> list[tuple[float, float]]:
    case = Case()
    run = prepared(mesh, case, "tp1")
    if drop:  # in the third of four leaves
        calls = itertools.count()

        def fail(*_: object) -> None:
            if next(calls) == 2:
                raise RuntimeError("no third leaf")

        hook = run.stages[0].register_forward_pre_hook(fail)
        tokens = torch.arange(12 * 12).view(12, 12) % 37
        with pytest.raises(RuntimeError, match="no third leaf"):
            run.forward_backward(tokens, tokens, samples=torch.arange(12))
        hook.remove()
        run.drop_gradients()
    return train(run, case, 2)


def test_nothing_is_left_of_a_step_that_was_given_up() -> None:
    (want,), (got,) = (simulate(_given_up, drop, dp=1) for drop in (False, True))
    assert got == want


SHORT = (("tp2sp", "selective"), ("dp2zero3", "full"))
OTHERS = (("tp2spdp2zero3", "selective"), ("tp2pp2dp2zero1", "full"))


@pytest.mark.parametrize(
    ("layout", "recompute"), [*SHORT, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_every_layout_has_the_same_bits_in_bfloat16(layout: str, recompute: str) -> None:
    case = Case(dtype="bfloat16", steps=2)
    assert not differing(alone(case), on(layout, case, recompute=recompute))


def test_a_run_that_resumes_on_another_layout_has_the_same_bits(tmp_path: Path) -> None:
    case = Case(steps=3)
    on("dp2zero1", replace(case, steps=2), save=str(tmp_path))
    assert not differing(alone(case), on("tp2sp", case, resume=str(latest(tmp_path))))


def test_a_frozen_table_that_stages_share_stays_as_it_is() -> None:
    case = Case(config=replace(CONFIG, layers=4), samples=4, steps=2, frozen="embedding.weight")
    found = on("pp2 interleaved", case)
    assert not differing(alone(case), found)
    assert found["embedding.weight"] == on("tp1", replace(case, steps=0))["embedding.weight"]


def test_processes_have_the_bits_of_threads(ranks) -> None:
    assert not differing(alone(Case(steps=2)), merged(ranks(4, on_processes, "tp2spdp2zero1", Case(steps=2))))


def on_processes(layout: str, case: Case) -> dict[str, str]:
    torch.set_num_threads(1)
    return trained(pool_mesh(**sizes(layout)), case, layout)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_mesh_without_a_virtual_degree_is_refused() -> None:
    """`tests/laws/test_steps.py` and `tests/layers/test_invariant.py` have all that has no invariant form."""
    with pytest.raises(ValueError, match="data axis of size 1 has no virtual degree: take invariant_mesh"):
        invariant.prepare(GPT(CONFIG, device="meta"), Mesh(), blocks=[], loss=None, optimizer=AdamW)


# --- mpcore verify --bitwise ----------------------------------------------------------------------------------------

PLAIN = replace(CONFIG, dropout=0.0, tie_embeddings=False)


def whole(mesh: Mesh, sequence_parallel: bool = False) -> GPT:
    return GPT(PLAIN, mesh, sequence_parallel=sequence_parallel)


def off_by_one_place(mesh: Mesh) -> GPT:
    """A model whose second block adds one unit in the last place on tp 2."""
    model = GPT(PLAIN, mesh)
    if mesh.tp.size > 1:
        model.get_submodule("blocks.1.mlp.down").register_forward_hook(lambda module, args, y: y * (1 + 2**-23))
    return model


def sum_of_losses(output: torch.Tensor, target: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    V = PLAIN.vocab_size
    return mp.vocab_parallel_cross_entropy(output, target, tp=mesh.tp, vocab_size=V, reduction="sum")


def test_verify_names_the_first_tensor_that_has_another_bit(ranks) -> None:
    x, target = torch.randint(PLAIN.vocab_size, (2, 4, PLAIN.seq_len))
    how: dict[str, Any] = {"loss": sum_of_losses, "dtype": torch.float32, "virtual": V, "pool": ranks}
    verdicts = verify(whole, {"x": x, "target": target}, ["tp2sp", "dp2zero1"], **how)
    assert not [str(v.mismatch or v.error) for v in verdicts if not v.equal]
    (verdict,) = verify(off_by_one_place, {"x": x, "target": target}, ["tp2"], **how)
    assert (verdict.mismatch.stage, verdict.mismatch.name) == ("forward", "blocks.1.mlp.down")
