"""`mpcore.tools.verify` on models that aren't the example's GPT, and on broken ones: does it say what is wrong?"""

from __future__ import annotations

import copy
import math
import re
import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from mpcore.tools.verify import LATE, parse_layout, verify, what_happened
from mpcore.tools.verify.__main__ import main
from mpcore.tools.verify.causes import packed_before, why_module, why_parameter
from mpcore.tools.verify.judge import STAGES, Judge, Mismatch, Verdict
from mpcore.tools.verify.page import draw, page, table
from mpcore.tools.verify.run import RankRecord, listen
from tests import verify_models as models


@pytest.mark.parametrize(
    ("build", "layouts", "loss"),
    [
        (models.Encoder, ["tp2sp", "dp2pp2", "cp2"], models.loss),
        pytest.param(models.Encoder,
                     ["tp2", "tp4", "pp2", "dp2", "tp2pp2", "dp2zero3", "cp4", "cp2tp2sp", "dp2zero2mb2"],
                     models.loss, marks=pytest.mark.slow),
        (models.Mixer, ["tp3", "tp2dp2zero2"], None),
        pytest.param(models.Mixer, ["tp2", "dp2"], None, marks=pytest.mark.slow),
        (models.llama, ["tp2"], None),
        pytest.param(models.llama, ["dp2"], None, marks=pytest.mark.slow),
        (models.ByHand, ["tp2", "dp2zero2"], None),
        (partial(models.decoder, models.DENSE, "zigzag"), ["cp2", "cp2tp2"], models.loss),
        (partial(models.decoder, models.MIXED, "ring"), ["tp2dp2ep2"], models.loss),
        pytest.param(partial(models.decoder, models.MIXED, "ring"), ["cp2ep2", "cp2tp2ep2sp", "cp2dp2ep2"], models.loss,
                     marks=pytest.mark.slow),
    ],
    ids=["encoder", "encoder whole", "mixer", "mixer whole", "llama", "llama whole", "by hand", "decoder", "mixture",
         "mixture whole"],
)  # fmt: skip
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


def test_luck_in_one_small_gradient_is_no_measure_of_rounding(ranks):
    options = {"loss": models.loss, "dtype": torch.float32, "seed": 23, "pool": ranks}
    (verdict,) = verify(models.Encoder, models.batch(), ["tp2"], **options)
    assert verdict.equal, verdict.mismatch


def test_bfloat16_is_judged_by_the_dense_models_own_rounding(ranks):
    options = {"loss": models.loss, "dtype": torch.bfloat16, "pool": ranks}
    (verdict,) = verify(models.Encoder, models.batch(), ["tp2"], **options)
    assert verdict.equal, verdict.mismatch
    (verdict,) = verify(models.broken("bias"), models.batch(), ["tp2"], **options)
    assert not verdict.equal


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
    (43, "detach", "tp2", models.loss, "gradient", "", ""),
    (0, "by hand", "tp2", models.loss, "first values", "mlp.up.weight", r"\(24, 16\), init, .*cut\(24, tp, 0"),
    (0, "reduce", "tp2", models.loss, "forward", "attention.output", "one term of a sum, and nothing adds"),
    (0, "one rank", "tp2", models.loss, "forward", "scale", "it is tp = 2 times too large"),
    (0, "between", "tp2", models.loss, "forward", "scale", "or the code between the module before and th"),
    (0, "modulation", "tp2sp", models.loss, "gradient", "scale.up.weight", r"without collectives.copy\(x, mesh.tp\)"),
    (0, "declared twice", "tp2", models.loss, "gradient", "attention.output.bias", "2 times too large: it is declared"),
]  # fmt: skip


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


def test_the_model_without_a_fault_is_equal(ranks):
    verdicts = verify(models.broken(""), models.batch(), ["tp2", "tp2sp", "dp2"], loss=models.loss, pool=ranks)
    assert all(v.equal for v in verdicts), [str(v.mismatch) for v in verdicts]


@pytest.mark.parametrize(
    ("fault", "layout", "stage", "name"),
    [
        ("complex", "tp2", "forward", "mlp.up"),
        ("indices", "tp2", "forward", "output[0]"),
        ("mean", "tp2", "forward", "output[1]['mean']"),
        ("again", "tp2mb2", "forward", "mlp.up (call 2 of it)"),
        ("late", "tp2mb2", "forward", "head"),
        ("bias", "tp2", "gradient", "bias"),
        ("buffer", "tp2", "buffers", "steps"),
        ("eval", "tp2", "evaluation", "output[1]['logits']"),
        ("second", "tp2", "evaluation", "output[1]['logits']"),
    ],
)
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


def test_numbers_complex_buffers_and_layers_used_twice_are_no_fault(ranks):
    verdicts = verify(
        models.strange(""), models.batch(), ["tp2", "mb2", "dp2"], loss=models.loss_of_strange, pool=ranks
    )
    assert all(v.equal for v in verdicts), [str(v.mismatch or v.error) for v in verdicts]


def test_outputs_whose_rows_come_second_are_told_of(ranks):
    (verdict,) = verify(models.TokensFirst, models.tokens(), ["dp2"], pool=ranks)
    assert r"it is (8, 2, 22), which is no rank's part of the unsharded model's (8, 4, 22)" in str(verdict.mismatch)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "names no axis"), ("tp", "begins with none of"), ("tp2tp2", "tp is there twice"),
        ("sp", "over tp, which has"),
        ("tp0", "smaller than 1"), ("zero3", "on dp x cp of 2 or more"), ("dp2zero4", "none of zero0 to zero3"),
        ("dp2ep3", "ep 3 does not divide dp x cp = 2"), ("tp2xp2", "'xp2' begins with none of"),
    ],
)  # fmt: skip
def test_names_of_layouts_are_checked(name, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(name)


def test_layouts_are_read():
    layout = parse_layout("tp2sppp2dp4zero3ep2cp2mb8")
    assert (layout.tp, layout.pp, layout.dp, layout.ep, layout.zero, layout.sequence_parallel) == (2, 2, 4, 2, 3, True)
    assert (layout.cp, layout.micro_batches, layout.size) == (2, 8, 32)
    assert parse_layout("pp4").micro_batches == 4


def test_a_model_that_ignores_cp_differs(ranks):
    batch = {"x": models.batch()["x"]}
    (verdict,) = verify(models.Mixer, batch, ["cp2"], pool=ranks)
    assert "a Mixer, may mix tokens" in verdict.error, verdict
    (verdict,) = verify(models.broken(""), models.batch(), ["cp2"], loss=models.loss, pool=ranks)
    assert "attention (ParallelAttention) was built with cp 1" in verdict.error, verdict


@pytest.mark.parametrize(
    ("layout", "holds", "sentence"),
    [
        ("tp2", "ab", "each rank of tp holds one term of its gradient"),
        ("tp4", "ab..", "its values differ in no simple way"),
        ("pp4", "a..b", "each pipeline stage holds one term of its gradient"),
        ("tp2", "aa", "its values differ in no simple way"),
    ],
)
def test_a_missing_sum_is_named_where_every_rank_of_the_axis_holds_a_term(layout, holds, sentence):
    terms = dict(zip("ab", torch.randn(2, 5, dtype=torch.float64), strict=True))
    axis = layout[:2]
    held = [
        RankRecord(
            **{**dict.fromkeys(("tp", "cp", "pp", "dp"), 0), axis: i}, gradients={"w": terms[c]} if c in terms else {}
        )
        for i, c in enumerate(holds)
    ]
    why = why_parameter(parse_layout(layout), "gradient", "w", held, terms["a"], terms["a"] + terms["b"])
    assert why.startswith(sentence)


VALUES = torch.arange(12.0, dtype=torch.float64).view(4, 3) + 1
PLACES = {
    "initial": "first values", "gradients": "gradient", "updated": "update", "buffers": "buffers", "output": "forward",
    "evaluated": "evaluation", "loss": "loss", "norm": "norm",
}  # fmt: skip


def seen_on(layout: str) -> tuple[RankRecord, list[RankRecord]]:
    """Return records of the unsharded model and of two ranks: an index, a sum over the rows, and values."""

    def output(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"[0]": torch.tensor([7, 8]), "[1]": rows.sum(), "[2]": rows.clone()}

    whole = {name: {"w": VALUES.clone()} for name in ("initial", "gradients", "updated", "buffers")}
    numbers = {"rows": 4, "loss": 5.0, "norm": 3.0}
    rows = VALUES.chunk(2) if layout == "dp2" else (VALUES, VALUES)
    truth = RankRecord(0, 0, 0, 0, **whole, **numbers, output=output(VALUES), evaluated=output(VALUES))
    places = [{**dict.fromkeys(("tp", "cp", "pp", "dp"), 0), layout[:2]: i} for i in range(2)]
    both = zip(places, rows, strict=True)
    whole = {name: {"w": VALUES.clone()} for name in whole}
    return truth, [
        RankRecord(**at, **copy.deepcopy(whole), **numbers, output=output(part), evaluated=output(part))
        for at, part in both
    ]


def change(seen: RankRecord, field: str, how: float | str) -> str:
    """Scale one number that a rank recorded, or give its tensor another shape, or drop it. Returns its name."""
    held = getattr(seen, field)
    if isinstance(held, float):
        setattr(seen, field, held * how)
        return ""
    name = list(held)[-1]
    if how == "shape":
        held[name] = held[name][:, :2].T
    elif how == "gone":
        del held[name]
    else:
        held[name][1, 1] *= how
    return name


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_whatever_differs_on_one_rank_is_named_by_its_stage(layout):
    truth, ranks = seen_on(layout)
    verdict = Judge(truth)(parse_layout(layout), ranks)
    assert verdict.equal, verdict.mismatch
    assert list(verdict.worst.items()) == [(stage, 0.0) for stage in STAGES]
    for field, stage in PLACES.items():
        of_tensors = () if field in ("loss", "norm") else ("shape", "gone")
        for how in (1 + 2.0**-52, 1 + 1e-9, math.nan, math.inf, *of_tensors):
            ranks = seen_on(layout)[1]
            name = change(ranks[1], field, how)
            verdict = Judge(truth)(parse_layout(layout), ranks)
            found = verdict.mismatch
            if how == 1 + 2.0**-52 or (how == "gone" and field in ("initial", "buffers")):  # another stage holds it
                assert found is None, (field, how, found)
            else:
                assert found is not None, (field, how)
                assert (found.stage, name in found.name) == (stage, True), (field, how, found)
                assert min(found.ulps, verdict.worst[stage]) > 1, (field, how, found)


BIAS, TERM = torch.tensor([3.0, -5.0, 7.0], dtype=torch.float64), VALUES.flip(0).sin()
WHY = [
    ("the bias is added 2 times, once on each rank of tp", (VALUES + BIAS, VALUES + BIAS)),
    ("each rank of tp returns one term of a sum", (TERM, VALUES - TERM)),
    ("each rank of tp returns one term of a sum", (TERM + BIAS, VALUES - TERM)),
    ("it is tp = 2 times too large", (2 * VALUES, 2 * VALUES)),
    ("it is tp = 2 times too small", (VALUES / 2, VALUES / 2)),
    ("other elements are zero", (VALUES * (VALUES % 3 > 0), VALUES * (VALUES % 3 > 0))),
    ("its features stand in another order", (VALUES[:, [1, 0, 2]], VALUES[:, [1, 0, 2]])),
    ("3 of its 12 elements are NaN or infinite", (VALUES.index_fill(0, torch.tensor(1), math.nan),) * 2),
    ("4 of its 12 elements are NaN or infinite", (VALUES.index_fill(1, torch.tensor(1), math.inf),) * 2),
    ("all modules before it are right", (VALUES + TERM, VALUES + TERM)),
    ("all modules before it are right", ((VALUES + TERM) * (VALUES % 3 > 0), VALUES)),
]


@pytest.mark.parametrize(("told", "outputs"), WHY)
def test_why_a_module_is_off_is_told_by_what_its_ranks_return(told, outputs):
    truth = RankRecord(0, 0, 0, 0, initial={"m.bias": BIAS}, outputs={("m", 0): VALUES})
    held = [RankRecord(i, 0, 0, 0, outputs={("m", 0): each}) for i, each in enumerate(outputs)]
    assert why_module(truth, parse_layout("tp2"), "m", 0, held, VALUES).startswith(told)
    truth.random.add(("m", 0))
    draws = why_module(truth, parse_layout("tp2"), "m", 0, held, VALUES)
    assert draws.startswith("in it, or between the m" if told.startswith(("its features", "all modules")) else told)


@pytest.mark.parametrize(("name", "shards"), [("tp2", False), ("tp2sp", True)])
def test_a_mask_that_differs_names_the_arguments_of_dropout_under_sequence_parallelism(name, shards):
    truth = RankRecord(0, 0, 0, 0, outputs={("m", 0): VALUES})
    held = [RankRecord(i, 0, 0, 0, outputs={("m", 0): VALUES * (VALUES % 3 > 0)}) for i in range(2)]
    told = why_module(truth, parse_layout(name), "m", 0, held, VALUES)
    assert told.startswith("other elements are zero")
    assert ("tp= and sequence_parallel=True" in told) == shards


def test_the_calls_are_noted_before_whose_end_random_numbers_were_drawn():
    class Draws(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.drop, self.two, self.three = (torch.nn.Linear(2, 2) for _ in range(4))
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x):
            x = torch.nn.functional.dropout(self.two(self.drop(self.one(x))), 0.5, self.training)
            return self.one(self.three(x))

    seen, model = RankRecord(0, 0, 0, 0), Draws()
    listen(model, seen)
    model.eval()(torch.ones(2, 2))
    assert seen.random == set()
    torch.rand(1)
    model.train()(torch.ones(2, 2))
    assert seen.random == {("drop", 0), ("three", 0)}


ROWS = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm, lambda size: torch.nn.Softmax(-1), None])
def test_a_norm_over_this_ranks_features_is_told(norm):
    truth = RankRecord(0, 0, 0, 0, outputs={("m", 0): norm(8).double()(ROWS).detach() if norm else ROWS})
    held = [RankRecord(i, 0, 0, 0, features={"m": ((4 * i, 4 * i + 4),)}) for i in range(2)]
    for seen, rows in zip(held, ROWS.chunk(2, -1), strict=True):
        seen.outputs["m", 0] = norm(4).double()(rows).detach() if norm else rows.square()
    why = why_module(truth, parse_layout("tp2"), "m", 0, held, truth.outputs["m", 0])
    told = "a norm or a softmax over 8 features sees only the 4 of this rank. Normalize where each rank has all"
    assert (told in why) == (norm is not None), why


@pytest.mark.parametrize(
    ("features", "rows", "tp", "between", "hint"),
    [
        ({"qkv": ((0, 12),)}, 8, 2, False, True),
        ({"qkv": ((0, 12),)}, 24, 2, False, False),  # an MLP
        ({"qkv": ((0, 12),)}, 8, 2, True, False),  # another layer reads all features
        ({"qkv": ((0, 12),), "m": ((0, 4),)}, 8, 2, False, False),  # the module isn't row-parallel
        ({"qkv": ((0, 4), (8, 12), (16, 20))}, 8, 2, False, False),  # QKVParallelLinear
        ({"later": ((0, 12),)}, 8, 2, False, False),
        ({}, 8, 2, False, False),
        ({"qkv": ((0, 12),)}, 8, 1, False, False),
    ],
)
def test_packed_projections_sharded_as_one_matrix_are_told(features, rows, tp, between, hint):
    sizes = {"norm.weight": (8,), "qkv.weight": (24, 8), "down.weight": (8, 24), "m.weight": (8, rows)}
    initial = {name: torch.zeros(size) for name, size in sizes.items() if between or name != "down.weight"}
    calls = ["norm", "qkv", "drop", *(["down"] if between else []), "m", "later"]
    truth = RankRecord(0, 0, 0, 0, initial=initial, outputs={(name, 0): VALUES for name in calls})
    seen = RankRecord(0, 0, 0, 0, features=features)
    found = packed_before(truth, parse_layout(f"tp{tp}dp2"), "m", 0, seen)
    assert ("qkv returns 24 features, and this one reads 8. If qkv packs q, k and v" in found) == hint
    assert bool(found) == hint


def test_the_sharded_weight_is_named_before_what_was_drawn_after_it():
    for sharded, name, told in (
        ({"b"}, "b", "drew this rank's shard.* Pass init= to the layer"),
        ({"c"}, "a", "code of yours drew other random numbers before it. Build the model on the meta device"),
    ):
        truth = RankRecord(0, 0, 0, 0, initial=dict.fromkeys("abc", VALUES))
        initial = {"a": VALUES + TERM, "b": VALUES - TERM, "c": VALUES}
        ranks = [RankRecord(i, 0, 0, 0, initial=dict(initial), sharded=frozenset(sharded)) for i in range(2)]
        found = Judge(truth)._parameters(parse_layout("tp2"), ranks, "first values", "initial")[1]
        assert found is not None
        assert found.name == name
        assert re.search(told, found.cause), found.cause


def test_the_first_module_without_finite_outputs_is_named():
    """Infinity and NaN that the unsharded model has too are no difference."""
    calls = [("mask", 0), ("first", 0), ("second", 0)]
    mask = torch.tensor([[0, -math.inf, math.nan]], dtype=torch.float64).expand(4, 3)
    truth = RankRecord(0, 0, 0, 0, outputs=dict(zip(calls, (mask, VALUES, VALUES), strict=True)), output={"": VALUES})
    for value in (math.nan, math.inf):
        outputs = dict(zip(calls, (mask, VALUES * value, VALUES * value), strict=True))
        ranks = [RankRecord(i, 0, 0, 0, outputs=outputs, output={"": VALUES * value}) for i in range(2)]
        worst, found = Judge(truth)._output(parse_layout("tp2"), ranks, "forward", "output")
        assert found is not None
        assert (found.name, worst) == ("first", math.inf)
        assert found.cause.startswith("12 of its 12 elements are NaN or infinite, and none of the unsharded model's")


def test_a_loss_of_gathered_logits_is_told_by_the_tokens_that_it_counts():
    for tokens in (1, 12):
        truth, ranks = seen_on("tp2")
        ranks[0].loss += tokens * math.log(2)
        found = Judge(truth)(parse_layout("tp2"), ranks).mismatch
        assert found is not None
        assert f"it is log(tp) too large for each of {tokens} tokens" in found.cause
    ranks[0].loss = math.inf
    told = str(Judge(truth)(parse_layout("tp2"), ranks).mismatch)
    assert "the output was right: the loss reads it otherwise" in told
    assert "are sharded: use mp.vocab_parallel_cross_entropy" in told


def test_a_hang_says_where_each_rank_stands(ranks):
    verdicts = verify(models.Uneven, {"x": models.batch()["x"]}, ["tp2"], timeout=4.0, pool=ranks)
    said = verdicts[0].error
    assert re.fullmatch(
        r"not done after 4 seconds: rank 0 in .*/verify_models\.py:\d+, forward; rank 1 in .*/mpcore/\S+, \w+"
        r"\. If no rank is slow, make all ranks call the same collectives, and .*",
        said,
    ), said


def test_of_a_hang_the_ranks_that_had_finished_are_named_too():
    late = f'{LATE}\n  File "m.py", line 7 in forward'
    said = what_happened(f"--- rank 1 of 4\n{late}\n--- rank 2 of 4\n{late}", 3)
    assert re.match("not done after 3 seconds: rank 1 in .*; rank 2 in .*; rank 0, 3 had finished. If no", said)


def test_a_batch_that_needs_arguments_is_refused(monkeypatch, capsys):
    def batch(step: int, share: range = range(4)) -> dict:
        raise AssertionError

    module = ModuleType("needy")
    vars(module).update(build=models.Mixer, batch=batch)
    monkeypatch.setitem(sys.modules, "needy", module)
    assert main(["needy:build"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "mpcore verify: error: needy:batch can't be called without arguments (missing a required argument: 'step'): "
        "give each argument a default, such as batch(step=0)"
    )


def test_what_doesnt_run_is_said(ranks):
    with pytest.raises(ValueError, match=r'the batch is a tuple, no dict such as {"x": \.\.\., "target": \.\.\.}'):
        verify(models.Mixer, (torch.ones(2),), ["tp2"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout 0 must be seconds above 0"):
        verify(models.Mixer, {"x": torch.ones(2)}, ["tp2"], timeout=0)
    with pytest.raises(ValueError, match='no "x"'):
        verify(models.Mixer, {"y": torch.ones(2)}, ["tp2"], timeout=0.5)
    with pytest.raises(ValueError, match=r"samples of the batch is a NoneType, no tensor of \[B, \.\.\.\]"):
        verify(models.Mixer, {"x": torch.ones(2), "samples": None}, ["tp2"])  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="build can't be sent to other processes: make it a function of a module"):
        verify(lambda mesh: models.Mixer(mesh), {"x": torch.ones(2)}, ["tp2"])
    with pytest.raises(ValueError, match=r"the builder returned a NoneType, no nn\.Module"):
        verify(models.nothing, {"x": torch.ones(2)}, ["tp2"], pool=ranks)
    with pytest.raises(ValueError, match=r"the model returns a dict: a loss\(output, target, mesh\) must take it"):
        verify(models.Named, models.batch(), ["tp2"], pool=ranks)
    with pytest.raises(ValueError, match="the model returns a Tensor without a floating tensor: none to compare"):
        verify(models.Chosen, {"x": models.batch()["x"]}, ["tp2"], pool=ranks)
    (verdict,) = verify(models.Plain, {"x": torch.ones(4)}, ["cp2"], pool=ranks)
    assert r"x (4,) has no dimension 1, the sequence that cp cuts" in verdict.error, verdict
    (verdict,) = verify(models.Mixer, models.batch(), ["pp2"], loss=models.loss, pool=ranks)
    assert "each of 2 stages holds the same" in verdict.error, verdict
    with pytest.raises(
        ValueError, match=r"^one process can't run the model: \w+Error: .*\n(  File .*verify_models.*\n(    .*\n?)+)+$"
    ):
        verify(models.broken(""), {"x": torch.ones(4, 8)}, ["tp2"], loss=models.loss, pool=ranks)
    refused = verify(models.Mixer, {"x": models.batch()["x"]}, ["tp2sp", "dp3", "dp2"], pool=ranks)
    assert "layout 'tp2sp': the builder takes no argument sequence_parallel" in refused[0].error
    assert "4 rows are not a multiple of dp x micro-batches = 3" in refused[1].error
    assert [verdict.equal for verdict in refused] == [False, False, True]
    (verdict,) = verify(models.Forgotten, {"x": torch.ones(4, 6)}, ["tp2"], pool=ranks)
    assert "nn.Linear inner.down: its input has 4 features, and in_features is 8. If" in verdict.error, verdict


def test_a_model_may_return_what_its_loss_takes(ranks):
    verdicts = verify(models.Named, models.batch(), ["tp2", "dp2"], loss=models.loss_of_named, pool=ranks)
    assert all(v.equal for v in verdicts), verdicts


def test_the_command_prints_a_table_writes_a_page_and_exits_with_1_on_a_difference(tmp_path, capsys):
    html = tmp_path / "verify.html"
    assert main(["tests.verify_models:Encoder", "--layouts", "tp2", "--html", str(html)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^tp2 .* equal$", out, re.MULTILINE), out
    assert "1 of 1 layouts equal the unsharded model" in html.read_text()
    assert main(["tests.verify_models:wrong_heads", "--layouts", "tp2"]) == 1
    assert "DIFFERS" in (out := capsys.readouterr().out), out
    assert "forward of attention" in out
    for wrong, said in (
        ("tests.no_such:build", "can't be imported"),
        ("tests.verify_models:none", "has no none: write package.module:name"),
    ):
        assert main([wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["tests.verify_models:Encoder", "--layouts", "tp2x"]) == 2


def test_the_picture_has_each_gradient_under_each_layout(tmp_path):
    off = Mismatch("gradient", "up.bias", 7e15, "why")
    right, failed = Verdict("tp2", gradients={"up.weight": 1.5, "up.bias": 0.0}), Verdict("cp2", error="no")
    draw([right, Verdict("dp2", gradients={"up.bias": 7e15}, mismatch=off), failed], tmp_path / "x.svg")
    texts = re.findall("<!-- (.*?) -->", (tmp_path / "x.svg").read_text())
    assert [text for text in texts if text[0].isdigit() or text == "-"][:6] == ["1.5", "0", "-", "7e+15", "-", "-"]
    assert {"up.weight", "up.bias", "tp2", "equal", "DIFFERS", "FAILED"} <= set(texts)
    assert "1 of 3 layouts equal the unsharded model: gradients' largest" in texts


def test_the_page_escapes_what_it_shows():
    verdict = Verdict("tp2", {"loss": math.inf}, error="<script>")
    assert "<script>" not in page("a & b", [verdict])
    assert "FAILED" in table([verdict])


class Several(torch.nn.Module):
    """Returns indices, a number, a complex tensor, and last the values; a call inside returns indices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> dict:
        """[B, D] -> the tensors by name."""
        ids = self.inner(torch.arange(3))
        return {"ids": ids, "sum": x.sum(), "turned": torch.complex(x, x), "shape": x.to("meta"), "values": x}


def test_what_a_module_returned_is_its_first_tensor_of_floats():
    model = Several()
    seen = listen(model, RankRecord(0, 0, 0, 0))
    model(torch.ones(2, 3))
    assert [{call: value.shape for call, value in forward.items()} for forward in seen] == [{("", 0): (2, 3)}]
