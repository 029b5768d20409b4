"""What the planner counts and adds up, against formulas by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from examples.gpt.plan import build as build_gpt
from mpcore import ColumnParallelLinear, Mesh, RowParallelLinear
from mpcore.analysis.__main__ import main as analysis
from mpcore.analysis.dry_run import Work, dry_run
from mpcore.analysis.plan import Estimate, Machine, choices, draw, estimate, main, meshes, plan, table
from mpcore.parallel.data import shard_data_parallel
from mpcore.pipeline.schedules import build_schedule

B, D, M = 8, 64, 4  # samples of a micro-batch, width, micro-batches
BUILD = "tests.test_plan:build"
PRODUCT = 2 * B * D * D
FAST = {"flops": 1e12, "node_bandwidth": 1e30, "bandwidth": 1e30}  # nothing that is sent takes time


class MLP(nn.Module):
    """Two products, and one all-reduce in forward."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(D, D, bias=False, tp=mesh.tp, device="meta")
        self.down = RowParallelLinear(D, D, bias=False, tp=mesh.tp, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return self.down(self.up(x))


def build(mesh: Mesh, arguments: list[str]) -> Work:
    """A stage is one MLP; `--schedule NAME`, `--refuse`."""
    if "--refuse" in arguments:
        raise ValueError(f"refused on {mesh.tp.size}")
    name = arguments[arguments.index("--schedule") + 1] if "--schedule" in arguments else "gpipe"
    schedule = build_schedule(name, mesh.pp.size, M)
    stages: list[nn.Module] = [MLP(mesh) for _ in schedule.stages_of(mesh.pp.rank)]
    shard_data_parallel(stages, mesh, zero=0)
    return Work(stages, schedule, lambda i: ((torch.empty(B, D),), {}), Tensor.sum)


def one(machine: Machine, *arguments: str, **sizes: int) -> Estimate:
    full = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": 1} | sizes
    return estimate(BUILD, machine, arguments, (full, ()))


def test_compute_is_the_products_at_the_rate():
    """The input of all needs no gradient: two products forward, three backward."""
    found = one(Machine(1, **FAST))
    assert found.compute == pytest.approx(M * 5 * PRODUCT / 1e12, rel=1e-12)
    assert found.step == found.compute
    assert one(Machine(4, **FAST), tp=4).compute == pytest.approx(found.compute / 4, rel=1e-12)
    assert one(Machine(4, **FAST), dp=4).compute == pytest.approx(found.compute, rel=1e-12)


def test_the_bubble_is_that_of_the_schedule_with_the_stages_own_times():
    """Stage 0: 2 + 3 products, stage 1: 2 + 4. Both spend 4/11 forward, as the planner has one share for all.

    gpipe: stage 1 starts its M forwards after stage 0's first, then its M backwards; then stage 0's last backward.
    """
    found = one(Machine(2, **FAST), pp=2)
    first, last = 5 * PRODUCT / 1e12, 6 * PRODUCT / 1e12
    assert found.compute == pytest.approx(M * last, rel=1e-12)
    assert found.bubble == pytest.approx(first * 4 / 11 + first * 7 / 11, rel=1e-12)
    assert found.step == pytest.approx(M * last + first, rel=1e-12)


@pytest.mark.parametrize(("node", "rate"), [(8, 3e9), (2, 1e9)], ids=["in a node", "between nodes"])
def test_messages_take_a_ring_of_the_slowest_link(node, rate):
    machine = Machine(4, node=node, flops=1e30, node_bandwidth=3e9, bandwidth=1e9)
    over_tp = one(machine, tp=4)  # the sum behind the second product; the input has no gradient to sum
    assert over_tp.inside == pytest.approx(M * 2 * (4 * B * D) * 3 / 4 / rate, rel=1e-12)
    assert over_tp.data == 0
    over_dp = one(machine, dp=4)  # a gradient, and for each of two parameters whether there is one
    assert over_dp.data == pytest.approx(2 * 4 * (2 * D * D + 2) * 3 / 4 / rate, rel=1e-12)
    assert over_dp.inside == 0


def test_each_stage_of_a_rank_sends_its_own():
    """Four stages, two a rank: a sum in each forward, and one in each backward but the first stage's."""
    machine = Machine(4, flops=1e30, node_bandwidth=1e9)
    found = one(machine, "--schedule", "interleaved", tp=2, pp=2)
    assert found.inside == pytest.approx(M * 4 * 2 * (4 * B * D) / 2 / 1e9, rel=1e-12)


def test_a_message_between_stages_delays_the_one_that_waits():
    machine = Machine(2, flops=1e12, node_bandwidth=1e9, bandwidth=1e9)
    size = 4 * B * D / 1e9  # a tensor there, a gradient back
    slower = one(machine, pp=2).bubble - one(Machine(2, **FAST), pp=2).bubble
    assert slower == pytest.approx(2 * size, rel=1e-9)


def test_flops_of_all_ranks_are_those_of_one_process():
    """A GPT's products on paper; the attention's five in backward (Dao 2023, arXiv:2307.08691, section 3)."""
    from examples.gpt.plan import build

    flags = ["--layers", "2", "--d-model", "32", "--heads", "4", "--d-ff", "48"]
    flags += ["--seq-len", "16", "--global-batch", "8"]

    def total(*more: str, **sizes: int) -> tuple[int, int]:
        world = torch.tensor(list(sizes.values())).prod().item() if sizes else 1
        kept = [
            (f.plan.micro_batches, k)
            for rank in range(int(world))
            for f in [dry_run(build, [*flags, *more], rank, **sizes)]
            for k in f.stages
        ]
        return sum(m * k.forward_flops for m, k in kept), sum(m * k.backward_flops for m, k in kept)

    alone = total()
    tokens, V = 8 * 16, 257
    products = 2 * tokens * (2 * (4 * 32 * 32 + 3 * 32 * 48) + 32 * V)
    attention = 2 * 2 * 2 * 8 * 16 * 16 * 32
    assert alone == (products + attention, 2 * products + 5 * attention // 2)
    for sizes in ({"tp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}):
        assert total(**sizes) == alone
    again = total("--recompute", "full")
    assert again[0] == alone[0]
    assert again[1] > alone[1] + products // 2


def test_eight_bits_keep_less_and_multiply_as_much():
    flags = ["--layers", "2", "--d-model", "256", "--heads", "4", "--d-ff", "512", "--seq-len", "16"]
    (wide,), (narrow,) = (dry_run(build_gpt, [*flags, *more], 0, tp=2).stages for more in ([], ["--fp8"]))
    assert narrow.forward_flops == wide.forward_flops
    assert narrow.backward_flops == wide.backward_flops
    assert 0.8 * wide.activations < narrow.activations < 0.9 * wide.activations


def test_what_workers_cannot_share_is_refused():
    with pytest.raises(ValueError, match="--global-batch 8 is not a multiple of --workers 3"):
        dry_run(build_gpt, ["--global-batch", "8", "--workers", "3"], 0)


def test_a_layout_has_the_memory_of_its_fullest_rank():
    from examples.gpt.plan import build

    flags = ["--layers", "3", "--d-model", "32", "--heads", "4", "--seq-len", "16", "--global-batch", "8"]
    sizes = {"tp": 1, "cp": 1, "pp": 2, "ep": 1, "dp": 2}
    found = estimate("examples.gpt.plan:build", Machine(4), flags, (sizes, ()))
    assert found.memory == max(dry_run(build, flags, rank, **sizes).total for rank in range(4))


def test_the_fastest_that_fits_comes_first():
    layouts = [
        ({"tp": t, "cp": 1, "pp": p, "ep": 1, "dp": 4 // t // p}, ()) for t, p in ((1, 1), (2, 1), (4, 1), (1, 2))
    ]
    layouts += [(layouts[0][0], ("--refuse",)), (layouts[1][0], ("--refuse",))]
    all_fit = plan(BUILD, Machine(4), layouts=layouts)
    assert [e.refused for e in all_fit] == ["", "", "", "", "refused on 1", "refused on 2"]
    assert [e.step for e in all_fit[:4]] == sorted(e.step for e in all_fit[:4])
    least, *_, most = sorted(e.memory for e in all_fit[:4])
    assert least < most
    some = plan(BUILD, Machine(4, memory=most - 1), layouts=layouts)
    assert [e.memory for e in some[:4]].count(most) >= 1
    assert some[3].memory == most
    text = table(some, Machine(4, memory=most - 1))
    assert "don't fit" in text or "1 don't fit" in text
    assert "1 refused: refused on 1" in text


@pytest.mark.slow
def test_two_processes_find_what_one_finds():
    layouts = [(sizes, ()) for sizes in meshes(Machine(4))]
    assert plan(BUILD, Machine(4), layouts=layouts, jobs=2) == plan(BUILD, Machine(4), layouts=layouts)


def test_meshes_are_all_factorisations():
    found = [tuple(m.values()) for m in meshes(Machine(8, node=4))]
    assert len(set(found)) == len(found)
    every = {
        (tp, 1, pp, 1, 8 // tp // pp) for tp, pp in itertools.product((1, 2, 4), (1, 2, 4, 8)) if 8 % (tp * pp) == 0
    }
    assert set(found) == every
    assert [m["dp"] for m in meshes(Machine(12), tp=[2, 5], pp=[3], cp=[2])] == [1]
    assert list(meshes(Machine(8), tp=[2], pp=[2], dp=[4])) == []
    inner = [{**m} for m in meshes(Machine(8), tp=[2], pp=[1], cp=[4], ep=[2, 4], etp=[1, 2], cp_inner=[2, 3])]
    assert [(m["ep"], m["etp"], m["cp_inner"]) for m in inner] == [(2, 1, 2), (2, 2, 2), (4, 1, 2), (4, 2, 2)]
    assert {m["ep"] for m in meshes(Machine(8), tp=[1], pp=[1], ep=[1, 4, 16])} == {1, 4}


def test_choices_are_all_combinations():
    assert list(choices([])) == [()]
    assert list(choices(["zero=1,3", "sequence-parallel=off,on"])) == [
        ("--zero", "1"),
        ("--zero", "1", "--sequence-parallel"),
        ("--zero", "3"),
        ("--zero", "3", "--sequence-parallel"),
    ]
    for wrong in ("zero", "zero=", "=1", "zero=1,,3"):
        with pytest.raises(ValueError, match="isn't of the form"):
            list(choices([wrong]))


def test_the_command_prints_what_fits_and_draws_it(tmp_path, capsys):
    vary = ["--vary", "schedule=gpipe,1f1b", "--vary", "nothing=1,2"]
    main([BUILD, "--world", "4", *vary, "--jobs", "1", "--out", str(tmp_path / "plan.png")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 ranks of 74.5 GiB, 8 a node; assumed: 400 TFLOP/s")
    assert lines[1].split()[:3] == ["tp", "pp", "dp"]
    assert {tuple(line.split()[:3]) for line in lines[2:]} == {
        (str(tp), str(pp), str(4 // tp // pp)) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 4
    }
    flags = [line[line.index("--") :] for line in lines[2:] if line.split()[:3] == ["1", "2", "2"]]
    assert sorted(flags) == ["--schedule 1f1b --nothing 1", "--schedule gpipe --nothing 1"], (
        "what changes nothing is left out"
    )
    assert (tmp_path / "plan.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--world", "4", "--memory", "1e-9"], "no layout fits"),
        (["--world", "4", "--tp", "3"], "no mesh of these sizes has 4 ranks"),
        (["--world", "4", "--refuse"], "no layout fits"),
        (["--world", "4", "--vary", "zero"], "isn't of the form"),
        (["--world", "4", "--tp", "0"], "argument --tp: 0 is no size of an axis"),
        (
            ["--world", "4", "--vary", "ep=1,2"],
            "--vary ep=1,2: the axes of the mesh are the planner's own flags: --ep 1,2",
        ),
        (["--world", "4", "--vary", "cp_inner=2"], "flags: --cp-inner 2"),
        (
            ["--world", "4", "--out", "plan.json"],
            "--out plan.json is no .png or .svg or .pdf in a folder that is there",
        ),
        (["--world", "4", "--out", "/nowhere/plan.png"], "in a folder that is there"),
    ],
)
def test_where_nothing_fits_it_says_so_and_fails(flags, message, capsys):
    with pytest.raises(SystemExit) as error:
        main([BUILD, *flags, "--jobs", "1"])
    assert message in f"{error.value} {capsys.readouterr().err}"


def test_a_function_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="nowhere can't be imported"):
        main(["nowhere:build", "--world", "4"])


def test_one_command_line_runs_all_three_commands():
    for words in (["plan", "nowhere:build", "--world", "4"], ["memory", "nowhere:build"], ["ledger", "nowhere:build"]):
        with pytest.raises(SystemExit, match="nowhere can't be imported"):
            analysis(words)
    with pytest.raises(SystemExit, match=r"usage: python -m mpcore.analysis {memory,ledger,plan}"):
        analysis(["sums"])


def test_a_picture_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([], Machine(1), tmp_path / "plan.png")


MIXTURE = ["--experts", "4", "--top-k", "2", "--layers", "1", "--d-model", "16", "--heads", "4", "--d-ff", "16"]
MIXTURE += ["--seq-len", "16", "--global-batch", "8", "--micro-batch", "1"]


def test_what_a_line_says_is_the_mesh_that_was_planned(capsys):
    """Also of etp and of two levels of cp; a mesh among the run's flags is refused, whichever planner takes it."""
    flags = [*MIXTURE, "--cp-kind", "two-level", "--zero", "0"]
    sizes = {"tp": 2, "cp": 4, "pp": 1, "ep": 2, "dp": 1}
    command = ["examples.gpt.plan:build", "--world", "8", "--tp", "2", "--cp", "4", "--pp", "1", "--ep", "2"]
    main([*command, "--etp", "1", "--cp-inner", "2", *flags, "--jobs", "1"])
    head, line = capsys.readouterr().out.splitlines()[1:]
    assert head.split()[:7] == ["tp", "cp", "pp", "ep", "dp", "etp", "cp_inner"]
    assert line.split()[:7] == ["2", "4", "1", "2", "1", "1", "2"]
    found = dry_run(build_gpt, flags, 0, **sizes, etp=1, cp_inner=2)
    for axis in ("cp_outer", "cp_inner", "ep"):
        assert found.ledger.volumes()[axis] > 0
        assert len(found.ledger.ranks(axis)) == 2, "also where another axis has the same ranks"
    analysis(["memory", *command[:1], "--tp", "2", "--cp", "4", "--ep", "2", "--etp", "1", "--cp-inner", "2", *flags])
    assert f"total        {found.total / 2**20:>12.3f} MiB" in capsys.readouterr().out
    for name, size in (("tp", 4), ("cp", 2), ("pp", 2), ("ep", 4), ("dp", 2), ("etp", 1), ("cp_inner", 4)):
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(ValueError, match=f"{flag} {size} among the run's flags, on a mesh that has "):
            dry_run(build_gpt, [*flags, flag, str(size)], 0, **sizes, cp_inner=2)
