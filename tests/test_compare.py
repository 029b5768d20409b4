"""`mpcore compare`: twins of a run show how far rounding goes, and what lies outside is named by step and tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples.gpt.pretrain import Trainer, parse
from mpcore.gradients import gradient_of
from mpcore.tools.analysis.compare import Curves, compare_runs
from tests.oracles.runs import MOE, build, flags_of
from tests.pool import mesh

CASE = {"tie_embeddings": True, "kv_heads": 1, "steps": 2, "micro_batch": 1}


def norms_of_layout(words: list[str], sizes: dict[str, int]) -> dict[str, dict[str, float]]:
    trainer = Trainer(parse(words), mesh(**sizes))
    found = []
    trainer.curves.after_backward = lambda: found.append(trainer.curves.measure())
    trainer.step()
    return found[0]


@pytest.mark.parametrize(("sizes", "flags", "case"), [
    ({"tp": 2, "dp": 2}, "--zero 3 --sequence-parallel", CASE), ({"pp": 2, "tp": 2}, "", CASE),
    ({"ep": 2, "dp": 4}, "--zero 1", {**MOE, "global_batch": 4, "micro_batch": 1}),
])  # fmt: skip
def test_norms_of_tensors_are_those_of_one_process_on_every_layout(ranks, sizes, flags, case):
    words = [*flags_of(case), *flags.split()]
    dense = norms_of_layout_alone(case)
    for found in ranks(4, norms_of_layout, words, sizes):
        for kind in ("gradient", "weight"):
            assert found[kind] == pytest.approx(dense[kind], rel=1e-9, abs=1e-15), kind
    assert min(dense["gradient"].values()) > 0


def norms_of_layout_alone(case: dict) -> dict[str, dict[str, float]]:
    trainer, found = build(case), []
    trainer.curves.after_backward = lambda: found.append(trainer.curves.measure())
    trainer.step()
    return found[0]


def twin_on(words: list[str], sizes: dict[str, int]) -> tuple[list[int], dict[str, float], float]:
    trainer = Trainer(parse(words), mesh(**sizes))
    return list(trainer.share(0)), trainer.curves.measure()["weight"], trainer.step()["loss"]


def test_a_twin_has_the_samples_of_each_step_and_the_weights_but_for_a_rounding(ranks):
    case = {"steps": 2, "global_batch": 8}
    runs = [build(case, "--set", f"twin={twin}") for twin in (0, 1, 2)]
    shares = [[list(run.share(step)) for step in (0, 1)] for run in runs]
    assert shares[0] == [list(range(8)), list(range(8, 16))]
    for share in shares[1:]:
        assert [sorted(mine) for mine in share] == shares[0]
        assert share != shares[0]
    weights = [{name: p.detach().clone() for name, p in run.model.named_parameters()} for run in runs]
    for name, p in weights[0].items():
        off = (weights[1][name] / p - 1).abs()
        assert 2**-54 < float(off[p != 0].max()) < 2**-51, name
    assert not torch.equal(weights[1]["norm.weight"], weights[2]["norm.weight"])
    losses = [run.step()["loss"] for run in runs]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-14)
    words = [*flags_of(case), "--set", "twin=1", "--micro-batch", "1"]
    drawn = ranks(4, twin_on, words, {"dp": 2, "tp": 2})
    assert sorted(drawn[0][0] + drawn[2][0]) == list(range(8))
    assert drawn[0][0] + drawn[2][0] == shares[1][0]
    for _, found, loss in drawn:
        assert found == pytest.approx({name: float(p.norm()) for name, p in weights[1].items()}, rel=1e-14)
        assert loss == pytest.approx(losses[1], rel=1e-14)


def test_a_loss_that_the_order_of_samples_changes_has_no_twin():
    with pytest.raises(ValueError, match=r"changes moe.aux_loss micro_batch by more than rounding"):
        build({**MOE, "aux_loss": "micro_batch"}, "--set", "twin=1")


def curves(
    change: Callable[[int], float] = lambda step: 0.0, loss: Callable[[int], float | None] | None = None
) -> Curves:
    """Ten steps: the weight is off by 1e-6 times `change`."""
    found: Curves = {("weight", "w"): {step: 1.0 + 1e-6 * change(step) for step in range(10)}}
    found["loss", ""] = {step: loss(step) if loss else 2.0 for step in range(10)}
    return found


TWINS = [curves(lambda step: 1.0), curves(lambda step: -1.0), curves(lambda step: float(step % 2))]


@pytest.mark.parametrize(("b", "twins", "message"), [
    (curves(), TWINS[:1], "1 twins don't show how far rounding goes: give at least 2"),
    ({("loss", ""): {0: 1.0}}, TWINS, "the first run has the weight of w, the second has not"),
    (curves(), [{}, {}], "have no recorded step in common"),
])  # fmt: skip
def test_what_cant_be_compared_is_refused(b, twins, message):
    with pytest.raises(ValueError, match=message):
        compare_runs(curves(), b, twins)


TRAINED = {"steps": 8, "warmup": 10, "global_batch": 4, "micro_batch": 2, "clip": 0.3, "dtype": "float32"}


def trained(twin: int, tensor: str = "", change: Callable[[torch.Tensor], object] = id, **changes: int) -> Curves:
    """The curves of a run; `change` is what happens to the gradient of `tensor` before it is measured."""
    trainer = build({**TRAINED, **changes}, "--set", f"twin={twin}")
    found: Curves = {}
    forward_backward = trainer.run.pipeline.forward_backward

    def faulty(*args: Any, **named: Any) -> Any:
        total = forward_backward(*args, **named)
        if tensor:
            change(gradient_of(trainer.model.get_parameter(tensor)))
        return total

    def record() -> None:
        for kind, values in trainer.curves.measure().items():
            for name, value in values.items():
                found.setdefault((kind, name), {})[trainer.run.step] = value

    trainer.run.pipeline.forward_backward = faulty
    trainer.curves.after_backward = record
    for step in range(TRAINED["steps"]):
        entry = trainer.step()
        for kind, name in (("loss", "loss"), ("gradient norm", "grad_norm"), ("learning rate", "lr")):
            found.setdefault((kind, ""), {})[step] = entry[name]
    return found


def swap_rows(g: torch.Tensor) -> None:
    g[:2] = g[:2].flip(0).clone()


def test_honest_runs_are_rounding_and_faults_are_found():
    a, twins = trained(0), [trained(twin) for twin in (1, 2, 3, 4)]
    for b in (trained(101), trained(102, micro_batch=1)):
        assert compare_runs(a, b, twins).first is None
    for tensor, change, where in (
        ("blocks.0.attention.qkv.weight", lambda g: g.mul_(1.001), (0, "gradient")),
        ("head.weight", swap_rows, (1, "weight")),
    ):
        first = compare_runs(a, trained(99, tensor, change), twins).first
        assert (first.step, first.kind) in {where, (where[0], "gradient"), (where[0], "gradient norm")}
