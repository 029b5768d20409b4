"""What a dry run counts of small stages, against each tensor on paper."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore import Mesh
from mpcore.gradients import overlap
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.recompute import recompute
from mpcore.pipeline.schedules import NAMES, Action, Schedule, build_schedule
from mpcore.tools.analysis.counts import CommunicationCounter, Count
from mpcore.tools.analysis.dry_run import assemble, dry_run, on_mesh, pretend, rounds_of
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.tools.analysis.work import MicroBatchMemory, MicroBatchWork, PassWork, StepMemory, Work
from tests.theory import zero_bytes

B, D, H = 5, 8, 24
x, h = 4 * B * D, 4 * B * H  # bytes of a stage's input, output and their gradients; and of the hidden layer
W = 2 * 4 * D * H  # of the weights of a stage
MULTIPLY = 2 * B * D * H  # operations of one of its products


class Stage(nn.Sequential):
    """Two products with a ReLU between, which keeps its output."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        linear = {"bias": False, "device": "meta", "dtype": dtype}
        parts = (nn.Linear(D, H, **linear), nn.ReLU(), nn.Linear(H, D, **linear))
        super().__init__(OrderedDict({f"{index}{name}": part for name, part in zip("abc", parts, strict=True)}))
        self.register_buffer("table", torch.empty(7, device="meta"))


def build(mesh: Mesh, arguments: list[str]) -> Work:
    """Arguments: the schedule, the micro-batches, a dtype, a stage of ZeRO or none."""
    name, micro_batches, dtype, zero, *more = arguments
    plan, kind = build_schedule(name, mesh.pp.size, int(micro_batches)), getattr(torch, dtype)
    stages = [Stage(i, kind) for i in plan.stages_of(mesh.pp.rank)]
    if more:
        recompute(stages, "full")
    if zero != "none":
        shard_data_parallel(stages, mesh, zero=int(zero))
    return Work(stages, plan, lambda i: ((torch.empty(B, D, dtype=kind),), {}), lambda y: (y * y).sum())


def counts(kept: MicroBatchMemory) -> dict[str, int]:
    return {name: value for name, value in vars(kept).items() if name != "rounds" and value}


FIRST = {"activations": h + x, "output": x, "returned": x, "forward_more": 2 * h}  # its input is the run's
MIDDLE = {"received": x, "activations": x + h + x, "output": x, "returned": x, "sent_back": x, "forward_more": 2 * h}
LAST = {"received": x, "activations": x + h + x + 4, "output": 4, "sent_back": x, "forward_more": 2 * h}  # y is kept
ONLY = {"activations": h + x + 4, "output": 4, "forward_more": 2 * h}
WHOLE = {"made": W, "backward_more": h + W // 2}  # the gradients of the hidden layer and of one weight
WEIGHTS_ALONE = {"made": W, "weight_more": h + W // 2, "between": h + x}  # a first stage's first half does nothing
LATER = {"between": x + h + x + h, "between_inputs": x, "weight_more": W // 2, "made": W}  # inputs, outputs' gradients
HALVES = LATER | {"backward_more": 2 * h}  # the gradients behind and before the ReLU
AT_LOSS = LATER | {"backward_more": 2 * h + x}  # y's gradient is made here


@pytest.mark.parametrize(("name", "pp", "rank", "stages"), [
    ("1f1b", 1, 0, [ONLY | WHOLE]), ("1f1b", 3, 0, [FIRST | WHOLE]), ("gpipe", 3, 1, [MIDDLE | WHOLE]),
    ("1f1b", 3, 2, [LAST | WHOLE]), ("interleaved", 2, 0, [FIRST | WHOLE, MIDDLE | WHOLE]),
    ("interleaved", 2, 1, [MIDDLE | WHOLE, LAST | WHOLE]), ("zb", 3, 0, [FIRST | WEIGHTS_ALONE]),
    ("zb", 3, 1, [MIDDLE | HALVES]), ("zb", 3, 2, [LAST | AT_LOSS]),
    ("zbv", 2, 0, [FIRST | WEIGHTS_ALONE, LAST | AT_LOSS]),
])  # fmt: skip
def test_a_stage_keeps_its_tensors_from_forward_to_backward(name, pp, rank, stages):
    found = dry_run(build, [name, "6", "float32", "none"], rank, pp=pp)
    for kept, want in zip(found.stages, stages, strict=True):
        assert counts(kept) == want
        forward, backward = kept.middle.forward.operators, kept.middle.backward.operators
        first, last = "received" not in want, "returned" not in want
        assert forward.products == {"float32": 2 * MULTIPLY}
        assert backward.products == {"float32": (3 if first else 4) * MULTIPLY}, "the run's input has no gradient"
        assert forward.bytes - (3 * x + x + 4) * last == 2 * h, "the ReLU, and y * y with its sum"
        assert forward.launches == 3 + 2 * last
        if not last:
            assert backward.bytes == 3 * h + 2 * W, "of the ReLU; each gradient is added to its sum in place"
    n = len(stages)
    held = StepMemory(n * W, 28 * n, n * W, n * (2 * W + 2 * 4))  # AdamW counts its steps in a float of each parameter
    assert found.held == held


@pytest.mark.parametrize(("name", "rank"), [("1f1b", 2), ("zb", 0), ("zb", 1)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_shards_what_its_stage_says_and_sends_what_its_paper_says(name, rank, zero):
    m, n = 6, 2
    found = dry_run(build, [name, str(m), "float32", str(zero)], rank * n, pp=3, dp=n)
    share = n if zero else 1
    assert found.held == StepMemory(W // share, 28, W // share, 2 * W // share + 8, found.held.sent)
    (kept,) = found.stages
    full = (kept.gathered, kept.unsummed, kept.made)
    late = W if name == "zb" and rank else 0  # gradients that a second half has made are reduced in the next one
    assert full == {0: (0, 0, W), 1: (W, W, 0), 2: (W, late, 0), 3: (0, late, 0)}[zero]
    waits = {} if name == "1f1b" else {each: LATER[each] for each in ("between", "between_inputs")}
    waits = {"between": h + x} if name == "zb" and rank == 0 else waits
    own = {
        each: (FIRST, MIDDLE, LAST)[rank].get(each, 0) for each in ("received", "activations", "output", "sent_back")
    }
    assert {each: getattr(kept, each) for each in (*own, *waits)} == own | waits, (
        "without what is gathered or unreduced"
    )
    sent = {kind: count.bytes for (axis, kind), count in found.ledger.counts.items() if axis == "dp"}
    flags = 2 * 4  # which parameters have a gradient
    paper = zero_bytes(W, zero, m)
    assert sent == paper | {"all_reduce": paper.get("all_reduce", 0) + flags}
    assert set(found.held.sent) == {("dp", "all_reduce")}


def test_gathered_parameters_are_copied_out_of_what_was_gathered():
    """ZeRO-3 in each forward; ZeRO-1 in the first, where the parameters that stay are counted on their own."""
    (every,), (first,) = (dry_run(build, ["gpipe", "1", "float32", zero], dp=2).stages for zero in "31")
    assert (every.gathered, every.forward_more) == (0, 2 * W + 2 * h)
    assert (first.gathered, first.forward_more) == (W, W + 2 * h)


def test_large_gradients_are_reduced_within_the_last_backward_and_the_rest_after_it(monkeypatch):
    monkeypatch.setattr(overlap, "ALONE", D * H)
    found = dry_run(build, ["1f1b", "3", "float32", "0"], 0, dp=2)
    backward = [round_.backward.sent for round_ in found.stages[0].rounds]
    assert backward == [{}, {}, {("dp", "all_reduce"): Count(2, W)}]
    after = found.held.sent["dp", "all_reduce"]
    assert after.bytes < W // 10, "which parameters have a gradient"
    assert found.ledger.counts["dp", "all_reduce"] == Count(2 + after.calls, W + after.bytes)


def test_what_inputs_make_besides_their_tensors_is_not_counted():
    def made(mesh: Mesh, arguments: list[str]) -> Work:
        plan = build_schedule("1f1b", 2, 4)

        def inputs(i: int) -> tuple[tuple, dict[str, Any]]:
            return (torch.empty(B, D),), {"unused": torch.empty(1000)} if arguments else {}

        class Takes(Stage):
            def forward(self, input: Tensor, unused: Tensor | None = None) -> Tensor:
                return super().forward(input)

        return Work([Takes(mesh.pp.rank, torch.float32)], plan, inputs, Tensor.sum)

    for rank in (0, 1):
        without, with_it = (dry_run(made, more, rank, pp=2) for more in ([], ["more"]))
        assert with_it.stages == without.stages
        assert with_it.held == without.held


@pytest.mark.parametrize("name", NAMES)
def test_the_rounds_of_a_stage_stand_for_all_its_micro_batches(name):
    for m in (6, 7, 12):
        plan = build_schedule(name, 3 if name != "zbv" else 2, m if m % 3 == 0 or name in ("1f1b", "gpipe") else 6)
        for index in range(plan.stages):
            mine = [a for a in plan.ranks[plan.rank_of[index]] if a.stage == index and a.kind in ("B", "W")]
            found = rounds_of(plan, index)
            assert found[0] == (mine[0].kind == "W", 1)
            assert found[-1] == (mine[-1].kind == "W", 1)
            for split in (False, True):
                assert sum(n for s, n in found if s == split) == sum((a.kind == "W") == split for a in mine)
            assert len(found) <= 4


@pytest.mark.parametrize(("m", "times"), [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (9, [1, 7, 1])])
def test_few_micro_batches_have_few_rounds(m, times):
    assert rounds_of(build_schedule("gpipe", 1, m), 0) == [(False, n) for n in times]
    if m == 1:
        alone = Schedule("mine", (tuple(Action(kind, 0, 0) for kind in "FIW"),), 1, 1)
        assert rounds_of(alone, 0) == [(True, 1)]
    at_first = (W // 2 + 2 * h - x) - W  # one gradient is made, both sides of the ReLU are there, y is gone
    if m == 1:
        assert dry_run(build, ["zb", "1", "float32", "none"]).stages[0].weight_more == at_first
    found = dry_run(build, ["gpipe", str(m), "float32", "none"])
    assert found.times == [times]
    assert len(found.stages[0].rounds) == len(times)
    assert counts(found.stages[0]) == ONLY | WHOLE | ({"backward_more": at_first} if m == 1 else {})


def test_a_step_is_its_rounds_times_what_they_stand_for_and_what_follows_the_last():
    def part(n: int) -> PassWork:
        return PassWork(OperatorCounts(), {("tp", "all_reduce"): Count(1, n)})

    rounds = [MicroBatchWork(part(1), part(10)), MicroBatchWork(part(100), part(1000))]
    kept = [MicroBatchMemory(activations=100, rounds=rounds),
            MicroBatchMemory(activations=50, rounds=[MicroBatchWork(part(5), part(0))])]  # fmt: skip
    held = StepMemory(parameters=7, sent={("dp", "all_reduce"): Count(3, 9)})
    plan = build_schedule("interleaved", 1, 5, 2)
    found = assemble(plan, 0, kept, [[1, 4], [5]], held, CommunicationCounter())
    want = {("tp", "all_reduce"): Count(2 + 8 + 10, 11 + 4400 + 25), ("dp", "all_reduce"): Count(3, 9)}
    assert found.ledger.counts == want
    assert (found.held, found.stages, found.plan) == (held, kept, plan)
    assert found.work_peak >= found.peak > 0


def test_a_rank_of_a_pretended_mesh_has_its_place_and_leaves_no_world():
    with on_mesh(5, tp=2, cp=2, pp=2, dp=1) as mesh:
        assert (mesh.tp.rank, mesh.cp.rank, mesh.pp.rank) == (1, 0, 1)
        assert mesh.device.type == "cpu"
        assert dist.get_world_size() == 8
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="inside 3 of 4"), pretend(4, 3):
        raise RuntimeError(f"inside {dist.get_rank()} of {dist.get_world_size()}")
    assert not dist.is_initialized()
    with pretend(2):
        assert dist.get_rank() == 0


@pytest.mark.parametrize(("rank", "sizes", "message"), [
    (0, {"tp": 0}, "tp 0 is smaller than 1"), (0, {"etp": -1}, "etp -1 is smaller than 1"),
    (-1, {"tp": 2}, "rank -1 is not from 0 to 1,"), (12, {"tp": 2, "cp": 3, "dp": 2}, "rank 12 is not from 0 to 11,"),
    (4, {"pp": 2, "dp": 2, "ep": 2}, "rank 4 is not from 0 to 3,"),
])  # fmt: skip
def test_a_mesh_without_the_rank_is_refused(rank, sizes, message):
    with pytest.raises(ValueError, match=message), on_mesh(rank, **sizes):
        pass


def test_stages_of_one_rank_that_share_a_table_make_its_gradient_once():
    table = nn.Linear(D, D, bias=False, device="meta")

    def shares(mesh: Mesh, arguments: list[str]) -> Work:
        stages = [nn.Sequential(OrderedDict({"t": table})) for _ in range(2)]
        return Work(stages, build_schedule("interleaved", 1, 4, 2), lambda i: ((torch.empty(B, D),), {}), Tensor.sum)

    found = dry_run(shares)
    size = 4 * D * D
    assert [kept.made for kept in found.stages] == [size, 0]
    assert found.held == StepMemory(size, 0, size, 2 * size + 4, found.held.sent)


def test_what_isnt_trained_has_no_gradient_and_no_state():
    def frozen(mesh: Mesh, arguments: list[str]) -> Work:
        stage = Stage(0, torch.float32)
        next(stage.parameters()).requires_grad_(False)
        return Work([stage], build_schedule("1f1b", 1, 3), lambda i: ((torch.empty(B, D),), {}), Tensor.sum)

    found = dry_run(frozen)
    assert found.held == StepMemory(W, 28, W // 2, W + 4, found.held.sent)
    assert found.stages[0].made == W // 2
    assert found.stages[0].middle.backward.operators.flops == MULTIPLY


@pytest.mark.parametrize(("zero", "dtype"), [(0, "float32"), (0, "bfloat16"), (1, "float32"), (3, "float32")])
def test_what_no_forward_uses_has_no_gradient_and_no_state(zero, dtype):
    def idle(mesh: Mesh, arguments: list[str]) -> Work:
        stage = nn.Sequential(OrderedDict({f"{i}": Stage(i, getattr(torch, dtype)) for i in range(2)}))
        stage.forward = lambda x: stage[0](x)  # type: ignore[method-assign]
        shard_data_parallel(stage, mesh, stage, zero=zero)
        inputs = torch.empty(B, D, dtype=getattr(torch, dtype))
        return Work([stage], build_schedule("1f1b", 1, 3), lambda i: ((inputs,), {}), Tensor.sum)

    held, half = dry_run(idle, dp=2).held, dtype == "bfloat16"
    share = 2 if zero else 1
    masters = 4 * D * H * 4 if half else 0
    assert (held.parameters, held.gradients) == (2 * W // share // (1 + half), W // share)
    assert held.optimizer == 2 * W // share + 8 + masters


def test_autocast_multiplies_in_its_dtype():
    def cast(mesh: Mesh, arguments: list[str]) -> Work:
        model = nn.Linear(D, H, bias=False, device="meta")
        return Work([model], build_schedule("1f1b", 1, 1), lambda i: ((torch.empty(B, D),), {}), Tensor.sum,
                    autocast=torch.bfloat16)  # fmt: skip

    (kept,) = dry_run(cast).stages
    assert kept.middle.forward.operators.products == {"bfloat16": MULTIPLY}
    assert kept.middle.backward.operators.products == {"bfloat16": MULTIPLY}
    assert dry_run(cast).held.parameters == W // 2


def test_full_recomputation_keeps_the_input_alone_and_runs_the_forward_again():
    usual, again = (dry_run(build, ["1f1b", "6", "float32", "none", *more], 1, pp=3) for more in ([], ["full"]))
    usual, again = usual.stages[0], again.stages[0]
    assert counts(again)["activations"] == 2 * x + 28  # and the buffers
    assert again.output == x
    products = [kept.middle.backward.operators.products["float32"] for kept in (usual, again)]
    assert products[1] == products[0] + MULTIPLY, "up to the last tensor that backward needs, the ReLU's"


def test_stages_of_one_rank_send_each_other_nothing():
    found = dry_run(build, ["zbv", "8", "float32", "none"], 1, pp=2)  # stages 1 and 2 of 4
    assert found.ledger.counts == {(("pp"), kind): Count(16, 16 * x) for kind in ("send", "recv")}
