"""`mpcore.tools.verify` on models that aren't the example's GPT, and on broken ones: does it say what is wrong?"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from mpcore.tools.verify import parse_layout, verify
from mpcore.tools.verify.__main__ import main
from mpcore.tools.verify.judge import STAGES
from tests import verify_models as models


@pytest.mark.parametrize(("build", "layouts", "loss"), [
    (models.Encoder, ["tp2sp", "dp2pp2", "cp2"], models.loss),
    pytest.param(models.Encoder, ["tp2", "tp4", "pp2", "dp2", "tp2pp2", "dp2zero3", "cp4", "cp2tp2sp", "dp2zero2mb2"],
     models.loss, marks=pytest.mark.slow), (models.Mixer, ["tp3", "tp2dp2zero2"], None),
    pytest.param(models.Mixer, ["tp2", "dp2"], None, marks=pytest.mark.slow), (models.llama, ["tp2"], None),
    pytest.param(models.llama, ["dp2"], None, marks=pytest.mark.slow), (models.ByHand, ["tp2", "dp2zero2"], None),
    (partial(models.decoder, models.DENSE, "zigzag"), ["cp2", "cp2tp2"], models.loss),
    (partial(models.decoder, models.MIXED, "ring"), ["tp2dp2ep2"], models.loss),
    pytest.param(partial(models.decoder, models.MIXED, "ring"), ["cp2ep2", "cp2tp2ep2sp", "cp2dp2ep2"], models.loss,
     marks=pytest.mark.slow),
],
    ids=["encoder", "encoder whole", "mixer", "mixer whole", "llama", "llama whole", "by hand", "decoder",
    "mixture", "mixture whole",
])  # fmt: skip
def test_models_of_others_are_the_same_under_every_layout(ranks, build, layouts, loss):
    batch = models.samples_batch() if isinstance(build, partial) else models.batch()
    if loss is None:
        batch.pop("target")
    verdicts = verify(build, batch, layouts, loss=loss, pool=ranks)
    assert [v.layout for v in verdicts] == layouts
    for v in verdicts:
        assert v.equal, f"{v.layout}: {v.mismatch or v.error}"
        assert set(v.worst) == set(STAGES)
        assert v.worst["first values"] == 0
        assert max(v.worst.values()) < 1e4


FAULTS = [
    (10, "gathered", "tp2", models.gathered_loss, "loss", "", r"log\(tp\) too large for each of 17 tokens"),
    (11, "norm", "tp2sp", models.loss, "gradient", "norm.weight", r"make it mp\.RMSNorm\(\.\., tp=mesh\.tp, seq"),
    (12, "qk-norm", "tp2", models.loss, "gradient", "attention.q_norm.weight", "each rank of tp holds one term"),
    (13, "gather", "tp2", models.loss, "gradient", "scale.weight", "2 times too large: what feeds it sums"),
    (14, "tied", "pp2", models.loss, "gradient", "embedding.weight", "each pipeline stage holds one term .*mesh.ends"),
    (14, "tied", "pp3mb4", models.loss, "gradient", "embedding.weight", "mesh.ends.*where other stages hold it"),
    (14, "renamed", "pp2", models.loss, "gradient", "head.weight", "its first name in the unsharded model on"),
    (16, "gate-up", "tp2", models.loss, "forward", "mlp.down", "sharded otherwise than its forward computes|order"),
    (18, "bias", "tp2", models.loss, "forward", "attention.output", "the bias is added 2 times, once on each rank"),
    (19, "dropout", "tp2sp", models.loss, "forward", "dropout", "its dropout mask depends on the layout"),
    (21, "init", "tp2", models.loss, "first values", "attention.qkv.weight", "its first values depend on the layout"),
    (24, "", "dp2", models.mean_loss, "loss", "", "a mean of means weighs tokens unequally"),
    (24, "", "tp2dp2", models.divided_loss, "loss", "", "tp = 2 or dp = 2 times too small"),
    (43, "detach", "tp2", models.loss, "gradient", "", ""),
    (0, "by hand", "tp2", models.loss, "first values", "mlp.up.weight", r"\(24, 16\), init, .*cut\(24, tp, 0"),
    (0, "reduce", "tp2", models.loss, "forward", "attention.output", "one term of a sum, and nothing adds"),
    (16, "heads", "tp2", models.loss, "forward", "attention.output", "model's H heads"),
    (0, "one rank", "tp2", models.loss, "forward", "scale", "it is tp = 2 times too large"),
    (0, "between", "tp2", models.loss, "forward", "scale", "or the code between the module before and th"),
    (0, "modulation", "tp2sp", models.loss, "gradient", "scale.up.weight", r"without collectives.copy\(x, mesh.tp\)"),
    (0, "declared twice", "tp2", models.loss, "gradient", "attention.output.bias", "2 times too large: it is declared"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "loss", "said"), [
    ("", models.torch_loss, "vocab_parallel_cross_entropy"), ("swapped", models.loss, "is it swapped"),
    ("moved", models.loss, "moved to another module has lost its declared sharding.*mlp.up.weight"),
])  # fmt: skip
def test_a_fault_that_ends_the_step_is_named(ranks, fault, loss, said):
    (verdict,) = verify(models.broken(fault), models.batch(), ["tp2"], loss=loss, pool=ranks)
    assert re.search(said, verdict.error)


@pytest.mark.parametrize(
    ("pitfall", "fault", "layout", "loss", "stage", "name", "cause"), FAULTS, ids=lambda v: str(v)[:12]
)
def test_a_planted_fault_is_named(ranks, pitfall, fault, layout, loss, stage, name, cause):
    (verdict,) = verify(models.broken(fault), models.batch(), [layout], loss=loss, pool=ranks)
    assert verdict.mismatch is not None, verdict
    assert verdict.mismatch.stage == stage, verdict.mismatch
    if name:
        assert verdict.mismatch.name == name, verdict.mismatch
    assert re.search(cause, verdict.mismatch.cause), verdict.mismatch
    assert verdict.worst[stage] >= verdict.mismatch.ulps, "the table's number includes the named tensor"


@pytest.mark.parametrize(("fault", "layout", "stage", "name"), [
    ("complex", "tp2", "forward", "mlp.up"), ("indices", "tp2", "forward", "output[0]"),
    ("mean", "tp2", "forward", "output[1]['mean']"), ("again", "tp2mb2", "forward", "mlp.up (call 2 of it)"),
    ("late", "tp2mb2", "forward", "head"), ("bias", "tp2", "gradient", "bias"), ("buffer", "tp2", "buffers", "steps"),
    ("other buffer", "tp2", "buffers", "other"),
    ("eval", "tp2", "evaluation", "output[1]['logits']"), ("second", "tp2", "evaluation", "output[1]['logits']"),
])  # fmt: skip
def test_a_fault_beside_the_first_output_of_training_is_named(ranks, fault, layout, stage, name):
    options = {"loss": models.loss_of_strange, "pool": ranks}
    (verdict,) = verify(models.strange(fault), models.batch(), [layout], **options)
    mismatch = verdict.mismatch
    assert mismatch is not None, verdict
    assert (mismatch.stage, mismatch.name) == (stage, name), mismatch


@pytest.mark.parametrize(
    ("loss", "equal"),
    [(models.narrow_loss, True), (models.narrow_and_tilted_loss, False), (models.narrow_if_sharded_loss, False)],
)
def test_a_rounding_of_the_models_own_float32_is_no_fault(ranks, loss, equal):
    (verdict,) = verify(models.broken(""), models.batch(), ["tp2"], loss=loss, pool=ranks)
    assert verdict.equal == equal, verdict


@pytest.mark.parametrize(("name", "message"), [
    ("", "names no axis"), ("tp", "begins with none of"), ("tp2tp2", "tp is there twice"), ("sp", "over tp, which has"),
    ("tp0", "smaller than 1"), ("zero3", "on dp x cp of 2 or more"), ("dp2zero4", "none of zero0 to zero3"),
    ("dp2ep3", "ep 3 does not divide dp x cp = 2"), ("tp2xp2", "'xp2' begins with none of"),
])  # fmt: skip
def test_names_of_layouts_are_checked(name, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(name)
    layout = parse_layout("tp2sppp2dp4zero3ep2cp2mb8")
    assert (layout.tp, layout.pp, layout.dp, layout.ep, layout.zero, layout.sequence_parallel) == (2, 2, 4, 2, 3, True)
    assert (layout.cp, layout.micro_batches, layout.size, parse_layout("pp4").micro_batches) == (2, 8, 32, 4)


X = {"x": models.batch()["x"]}


@pytest.mark.parametrize(("build", "batch", "options", "message"), [
    (models.Mixer, (torch.ones(2),), {}, "the batch is a tuple"), (models.Mixer, X, {"timeout": 0}, "timeout 0 must"),
    (models.Mixer, X, {"timeout": float("nan")}, "timeout nan must be seconds above 0"),
    (models.Mixer, {"y": torch.ones(2)}, {}, 'no "x"'),
    (models.Mixer, {"x": torch.ones(2), "samples": None}, {}, "samples of the batch is a NoneType"),
    (lambda mesh: models.Mixer(mesh), X, {}, "build can't be sent"), (models.nothing, X, {}, "returned a NoneType"),
    (models.Named, models.batch(), {}, "the model returns a dict"), (models.Chosen, X, {}, "without a floating tensor"),
    (models.broken(""), {"x": torch.ones(4, 8)}, {"loss": models.loss}, "one process can't run the model: "),
])  # fmt: skip
def test_what_no_layout_can_run_is_refused(ranks, build, batch, options, message):
    with pytest.raises(ValueError, match=message):
        verify(build, batch, ["tp2"], pool=ranks, **options)


@pytest.mark.parametrize(("build", "batch", "layout", "options", "error"), [
    (models.Plain, {"x": torch.ones(4)}, "cp2", {}, r"x \(4,\) has no dimension 1"),
    (models.Mixer, models.batch(), "pp2", {"loss": models.loss}, "each of 2 stages holds the same"),
    (models.Mixer, X, "tp2sp", {}, "takes no argument sequence_parallel"),
    (models.Mixer, X, "dp3", {}, "4 rows are not a multiple of dp x micro-batches = 3"),
    (models.Mixer, X, "dp2", {}, ""),
    (models.Forgotten, {"x": torch.ones(4, 6)}, "tp2", {}, "inner.down: its input has 4 features, .* is 8"),
    (models.Mixer, X, "cp2", {}, "a Mixer, may mix tokens"),
    (models.broken(""), models.batch(), "cp2", {"loss": models.loss}, r"attention \(ParallelAttention\) .* cp 1"),
    (models.TokensFirst, models.tokens(), "dp2", {}, r"it is \(8, 2, 22\), .* \(8, 4, 22\)"),
    (models.Uneven, X, "tp2", {"timeout": 1.0}, r"not done after 1 seconds: rank 0 in .*forward; rank 1 in .*"),
])  # fmt: skip
def test_what_a_layout_cant_run_is_its_error(ranks, build, batch, layout, options, error):
    (verdict,) = verify(build, batch, [layout], pool=ranks, **options)
    assert verdict.equal == (not error)
    assert re.search(error, f"{verdict.error} {verdict.mismatch}"), verdict


def test_the_command_exits_with_1_on_a_difference(tmp_path, capsys):
    plot = tmp_path / "verify.svg"
    assert main(["tests.verify_models:Encoder", "--layouts", "tp2", "--plot", str(plot)]) == 0
    assert re.search(r"^tp2 .* equal$", capsys.readouterr().out, re.MULTILINE)
    assert plot.read_text()
    assert main(["tests.verify_models:wrong_heads", "--layouts", "tp2"]) == 1
    assert "forward of attention" in capsys.readouterr().out
    for wrong in ("tests.no_such:build", "tests.verify_models:none"):
        assert main([wrong]) == 2
        assert wrong.split(":")[wrong.endswith("none")] in capsys.readouterr().err
    assert main(["tests.verify_models:Encoder", "--layouts", "tp2x"]) == 2


@pytest.mark.parametrize(("build", "batch", "layouts", "loss"), [
    (models.broken(""), models.batch(), ["tp2", "tp2sp", "dp2"], models.loss),
    (models.strange(""), models.batch(), ["tp2", "mb2", "dp2"], models.loss_of_strange),
    (models.Named, models.batch(), ["tp2", "dp2"], models.loss_of_named),
])  # fmt: skip
def test_models_without_a_fault_are_equal(ranks, build, batch, layouts, loss):
    verdicts = verify(build, batch, layouts, loss=loss, pool=ranks)
    assert all(v.equal for v in verdicts), [str(v.mismatch or v.error) for v in verdicts]


def test_narrow_dtypes_are_judged_by_the_dense_models_own_rounding(ranks):
    options = {"loss": models.loss, "pool": ranks}
    for build, dtype, seed, equal in (
        (models.Encoder, torch.float32, 23, True), (models.Encoder, torch.bfloat16, 0, True),
        (models.broken("bias"), torch.bfloat16, 0, False),
    ):  # fmt: skip
        (verdict,) = verify(build, models.batch(), ["tp2"], dtype=dtype, seed=seed, **options)
        assert verdict.equal == equal, verdict.mismatch
