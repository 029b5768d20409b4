"""What the planner counts and adds up, against formulas by hand."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from examples.gpt import plan as gpt_plan
from examples.gpt.plan import build as build_gpt
from examples.gpt.plan import least_bytes, parse
from mpcore import ColumnParallelLinear, Mesh, RowParallelLinear
from mpcore.parallel.data import shard_data_parallel
from mpcore.pipeline.schedules import build_schedule
from mpcore.tools.analysis import plan
from mpcore.tools.analysis.__main__ import main as count
from mpcore.tools.analysis.dry_run import Work, dry_run
from mpcore.tools.analysis.layout import Counter
from mpcore.tools.analysis.machine import Machine, load_machine, save_machine
from mpcore.tools.analysis.plan import main
from mpcore.tools.analysis.search import Estimate
from mpcore.tools.analysis.seconds import Seconds, estimate
from mpcore.tools.analysis.work import make_work
from mpcore.training.policies import Zero

B, D, M = 8, 64, 4  # samples of a micro-batch, width, micro-batches
BUILD = "tests.test_plan:build"
PRODUCT = 2 * B * D * D
NOTHING = {"hbm": 1e30, "e_gemm": 1.0, "tau": 0.0, "node_latency": 0.0, "latency": 0.0}
FREE = {**NOTHING, "node_bandwidth": 1e30, "bandwidth": 1e30}  # only products take time


def machine(peak: float = 1e12, **changes: float) -> Machine:
    """Rates by which one thing alone takes time."""
    return Machine("test", peak, **({"memory": 80e9, "peak_32": peak} | FREE | changes))  # type: ignore[arg-type]


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
    """A stage is one MLP; `--schedule NAME`, `--refuse`, `--break` (on tp 2), `--micro-batch N` times B."""
    if "--break" in arguments and mesh.tp.size == 2:
        raise RuntimeError("shape '[2, 3]' is invalid")
    if "--refuse" in arguments:
        raise ValueError(f"refused on {mesh.tp.size}")
    name = arguments[arguments.index("--schedule") + 1] if "--schedule" in arguments else "gpipe"
    rows = B * (int(arguments[arguments.index("--micro-batch") + 1]) if "--micro-batch" in arguments else 1)
    schedule = build_schedule(name, mesh.pp.size, M)
    stages: list[nn.Module] = [
        nn.Sequential(OrderedDict({str(i): MLP(mesh)})) for i in schedule.stages_of(mesh.pp.rank)
    ]
    shard_data_parallel(stages, mesh, zero=0)
    return Work(stages, schedule, lambda i: ((torch.empty(rows, D),), {}), Tensor.sum)


def one(rates: Machine, *arguments: str, **sizes: int) -> Seconds:
    full = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": 1} | sizes
    return estimate(Counter(build).layout(arguments, **full), rates)


def test_products_take_their_operations_at_the_rate():
    """The input of all needs no gradient: two products forward, three backward."""
    found = one(machine())
    assert found.products == pytest.approx(M * 5 * PRODUCT / 1e12, rel=1e-12)
    assert found.step == pytest.approx(found.products, rel=1e-9)
    assert one(machine(), tp=4).products == pytest.approx(found.products / 4, rel=1e-12)
    assert one(machine(e_gemm=0.5), dp=4).products == pytest.approx(2 * found.products, rel=1e-12)
    late = one(machine(tau=1.0, cluster=1.5))
    assert (late.host, late.cluster) == (pytest.approx(M), pytest.approx((M + found.products) / 2))


def test_flops_of_all_ranks_are_those_of_one_process():
    """A GPT's products on paper; the attention's five in backward (Dao 2023, arXiv:2307.08691, section 3)."""
    flags = ["--layers", "2", "--d-model", "32", "--heads", "4", "--d-ff", "48"]
    flags += ["--seq-len", "16", "--global-batch", "8"]

    def total(*more: str, **sizes: int) -> tuple[int, int]:
        world = torch.tensor(list(sizes.values())).prod().item() if sizes else 1
        found = [dry_run(build_gpt, [*flags, *more], rank, **sizes) for rank in range(int(world))]
        kept = [(f.plan.micro_batches, k) for f in found for k in f.stages]
        return tuple(
            sum(m * getattr(k.middle, way).operators.flops for m, k in kept) for way in ("forward", "backward")
        )

    alone = total()
    tokens, V = 8 * 16, 257
    products = 2 * tokens * (2 * (4 * 32 * 32 + 3 * 32 * 48) + 32 * V)
    attention = 2 * 2 * 2 * 8 * 16 * 16 * 32
    assert alone == (products + attention, 2 * products + 5 * attention // 2)
    assert total(tp=2, pp=2) == alone
    again = total("--recompute", "full")
    assert again[0] == alone[0]
    assert again[1] > alone[1] + products // 2


def test_a_gpu_launches_fewer_kernels_and_keeps_less():
    flags = ["--layers", "1", "--d-model", "64", "--heads", "4", "--seq-len", "32", "--dtype", "bfloat16"]
    cpu, gpu = (dry_run(build_gpt, flags, 0, stands_for_gpu).stages[0] for stands_for_gpu in (False, True))
    assert gpu.middle.forward.operators.flops == cpu.middle.forward.operators.flops
    assert gpu.activations < 0.7 * cpu.activations
    launches = [kept.middle.forward.operators.launches for kept in (gpu, cpu)]
    assert launches[0] < 0.5 * launches[1]
    seen = gpu.middle.forward.operators
    assert seen.attention == seen.all_pairs * 33 // 64, "T (T + 1) / 2 of T^2 pairs"


SENDS = ["--layers", "2", "--d-model", "128", "--seq-len", "32", "--global-batch", "4", "--micro-batch", "2"]


@pytest.mark.parametrize(("flags", "gathers", "sums"), [
    ("", 0, 4), ("--recompute selective", 0, 4), ("--recompute full", 0, 5), ("--recompute full --dropout 0.1", 0, 6),
    ("--sequence-parallel", 4, 4), ("--sequence-parallel --recompute full", 6, 5),
    ("--sequence-parallel --recompute full --dropout 0.1", 6, 6), ("--sequence-parallel --regather", 6, 4),
])  # fmt: skip
def test_a_block_sends_what_the_papers_say(flags, gathers, sums):
    """Shoeybi et al. 2019, figure 4, and Korthikanti et al. 2022, section 4.2.2; full repeats the forward."""
    sent = dry_run(build_gpt, [*SENDS, *flags.split()], 0, True, tp=2).ledger.counts
    full = 2 * 32 * 128 * 4  # of a micro-batch; two blocks, and one message at each end
    of_loss = 2 * (2 * 32 * 4 * 4)  # four numbers a token
    kind = "reduce_scatter" if gathers else "all_reduce"
    assert sent["tp", kind].bytes == 2 * (2 * sums + 2) * full
    ends = 2 + ("--regather" in flags) if gathers else 0
    assert sent["tp", "all_gather"].bytes == 2 * ((2 * gathers + ends) * full + of_loss)


def test_regather_keeps_shards_of_the_sequence_and_gathers_them_again():
    flags = [*SENDS, "--sequence-parallel", "--dtype", "bfloat16"]
    usual, less = (dry_run(build_gpt, [*flags, *more], 0, True, tp=2) for more in ([], ["--regather"]))
    saved = usual.stages[0].activations - less.stages[0].activations
    assert saved == 5 * (2 * 32 * 128 * 2) // 2, "of two products a block, and of the head, half of the whole"


def work_of_mlp(mesh: Mesh, arguments: list[str]) -> Work:
    model = MLP(mesh)
    zero = Zero(int(arguments[1])) if arguments else Zero(0)
    options = {"micro_batches": M, "data": zero}
    return make_work(model, mesh, inputs=(torch.empty(B, D),), loss=Tensor.sum, blocks=[model], **options)


def test_one_call_makes_the_work_of_a_whole_model():
    for sizes in ({"tp": 2}, {"dp": 2}):
        found, by_hand = dry_run(work_of_mlp, **sizes), dry_run(build, ["--schedule", "1f1b"], **sizes)
        assert found.ledger.counts == by_hand.ledger.counts != {}
        assert found == replace(by_hand, ledger=found.ledger)
    assert dry_run(work_of_mlp, ["--zero", "3"], dp=2).held.parameters == 2 * D * D * 4 / 2
    with pytest.raises(ValueError, match="make_work has one pipeline stage, and the mesh has 2: give --pp 1, or"):
        dry_run(work_of_mlp, pp=2)
    with pytest.raises(ValueError, match=r"shape \(0, 64\), without samples: .* dp x micro-batches = 1 x 1"):
        make_work(MLP(Mesh()), Mesh(), inputs=(torch.empty(0, D),), loss=Tensor.sum, blocks=[])


def test_the_command_prints_what_fits_and_draws_it(tmp_path, capsys):
    vary = ["--vary", "schedule=gpipe,1f1b", "--vary", "nothing=1,2", "--tp", "1,2"]
    main([BUILD, "--world", "4", *vary, "--out", str(tmp_path / "plan.png")])
    text = capsys.readouterr().out
    assert f"a model of {2 * D * D:,} parameters" in text, "of the whole, not of a rank's shard"
    rows = [line.split() for line in text.split("no other layout")[0].splitlines() if re.match(r" +\d+ +\d", line)]
    want = {(str(tp), str(pp), str(4 // tp // pp)) for tp in (1, 2) for pp in (1, 2, 4) if tp * pp <= 4}
    assert {tuple(row[1:4]) for row in rows} == want
    flags = sorted(" ".join(row[row.index("--nothing") - 2 :]) for row in rows if row[1:4] == ["1", "2", "2"])
    assert flags == ["--schedule 1f1b --nothing 1", "--schedule gpipe --nothing 1"], "what changes nothing is left out"
    assert not any("--schedule" in row for row in rows if row[2] == "1"), "no schedule on one pipeline rank"
    assert (tmp_path / "plan.png").stat().st_size > 5000


@pytest.mark.parametrize(("flags", "message"), [
    (["--world", "4", "--memory", "1e-9"], "no layout fits"), (["--world", "4", "--tp", "3"], "no mesh of these sizes"),
    (["--world", "4", "--refuse"], "no layout could be counted: "), (["--world", "4", "--vary", "zero"], "of the form"),
    (["--world", "4", "--tp", "0"], "argument --tp: 0 is smaller"), (["--world", "4", "--vary", "ep=1,2"], "--ep 1,2"),
    (["--world", "4", "--top", "0"], "argument --top: 0 is smaller"),
    (["--world", "4", "--out", "plan.json"], "--out plan.json is no .png"), ([], "a target and --world are needed"),
    (["--world", "4", "--machine", "b200"], "b200 is none of a100-80"),
    (["--world", "1", "--explain", "2"], "--explain 2"),
])  # fmt: skip
def test_where_nothing_fits_it_says_so_and_fails(flags, message, capsys):
    with pytest.raises((ValueError, SystemExit)) as error:
        main([BUILD, *flags])
    assert message in f"{error.value} {capsys.readouterr().err}"


def test_a_layout_whose_model_raises_is_one_of_those_refused(capsys):
    main([BUILD, "--world", "4", "--break"])
    told = capsys.readouterr().out
    assert re.search(r"[1-9] refused: the model: shape '\[2, 3\]' is invalid", told)
    assert "choose row" in told


def test_memory_numbers_stages_as_the_pipeline_does(capsys):
    count(["memory", BUILD, "--pp", "2", "--rank", "1"])
    assert "stage 1: activations" in capsys.readouterr().out


def test_a_row_is_explained_and_trained_by_the_commands_below_the_table(capsys):
    """The first command plans row 1 alone. A trainer has the flags that it knows, or there is no command."""
    small = [
        "--layers", "1", "--d-model", "16", "--heads", "2", "--d-ff", "16", "--seq-len", "16", "--micro-batch", "1",
    ]  # fmt: skip
    flags = ["--world", "4", "--memory", "40", "--vary", "zero=1", "--tp", "2", "--pp", "1", *small]
    main(["examples.gpt.plan:build", *flags])
    head, _, row, *_, explained, trained = capsys.readouterr().out.splitlines()
    main(explained.removeprefix("explain row 1: mpcore plan ").split())
    again, _, step, *_, shown = capsys.readouterr().out.splitlines()
    assert (again, shown) == (head, trained)
    assert re.findall(r"[\d.]+", step)[0] == row.split()[5]
    run = parse(trained.removeprefix("train as row 1: torchrun --nproc-per-node 4 -m examples.gpt.pretrain ").split())
    assert (run.tp, run.dp, run.zero, run.d_model) == (2, 2, 1, 16)
    main(["examples.gpt.plan:build", *flags, "--even-stages", "--explain", "1"])
    assert "no command trains row 1" in capsys.readouterr().out
    main(["examples.gpt.plan:build", "--world", "16", "--tp", "1", "--pp", "1", *small, "--explain", "1"])
    assert "srun -n 16 --ntasks-per-node 8 --gpus-per-node 8 python -m" in capsys.readouterr().out


ON_TP = "--tp 2 --vary overlap=off,1024 --sequence-parallel"
ON_HALVES = "--tp 2 --vary overlap-halves=off,on --micro-batch 2"
ON_EP = "--tp 1 --ep 2 --vary overlap-experts=off,on --experts 2 --micro-batch 2 --set moe.dispatch=all_to_all"


@pytest.mark.parametrize(("hbm", "flags", "wins"), [
    (1e15, ON_TP, "--set overlap=1024"), (1e9, ON_TP, ""), (1e15, ON_EP, "--set overlap_experts=true"),
    *((1e15, ON_HALVES + more, "--set overlap_halves=true") for more in ("", " --sequence-parallel")),
])  # fmt: skip
def test_the_command_of_the_chosen_row_hides_messages_where_that_is_faster(tmp_path, capsys, hbm, flags, wins):
    """Where memory is slow, the copies of a product in parts cost more than its messages."""
    rates = replace(load_machine("h100"), peak=1e11, hbm=hbm, node_bandwidth=1e9, node_latency=0.0, tau=0.0)
    save_machine(rates, tmp_path / "slow.json")
    size = "--layers 1 --d-model 64 --heads 2 --d-ff 256 --seq-len 256"
    mesh = ["--world", "2", "--pp", "1", "--machine", str(tmp_path / "slow.json")]
    main(["examples.gpt.plan:build", *mesh, *size.split(), *flags.split()])
    trained = capsys.readouterr().out.splitlines()[-1]
    assert "overlap" not in trained if not wins else wins in trained


@pytest.mark.parametrize(("rows", "chosen"), [
    ([(1, 0.9), (1, 0.9)], 1), ([(1, 0.96), (1, 0.9)], 2), ([(3, 0.9), (1, 0.96), (2, 0.9), (2, 0.5)], 3),
    ([(2, 0.9), (2, 0.9), (1, 0.9, 2.0)], 1), ([(2, 0.96), (1, 0.97)], 2),
])  # fmt: skip
def test_a_row_with_memory_to_spare_and_few_axes_is_chosen(monkeypatch, capsys, rows, chosen):
    memory, reserve = (getattr(load_machine("h100"), name) for name in ("memory", "reserve"))
    found = []
    for axes, used, *seconds in rows:
        sizes = dict(zip(("tp", "pp", "dp"), [2] * axes + [1] * (3 - axes), strict=True))
        held = int(used * memory - reserve)
        found.append(Estimate(sizes, (), memory=held, seconds=Seconds(host=(seconds or [1.0])[0]), errors=(0.1,)))
    monkeypatch.setattr(plan, "search", lambda *_: found)
    main([BUILD, "--world", "8"])
    assert f"\nchoose row {chosen}: " in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "bfloat16 --set autocast=true", "bfloat16 --fp8"])
def test_what_is_counted_is_no_less_than_the_lower_bound(dtype, monkeypatch):
    """A layout is ruled out by the bound alone. Weights in bfloat16 have masters; float16 is autocast."""
    bounds: list[int] = []
    monkeypatch.setattr(gpt_plan, "least_bytes", lambda *of: bounds.append(least_bytes(*of)) or bounds[-1])
    flags = "--layers 4 --d-model 64 --heads 4 --seq-len 64 --global-batch 8 --micro-batch 1 --recompute full --dtype "
    most = dry_run(build_gpt, [*flags.split(), *dtype.split()], 0, True, tp=1, cp=1, pp=1, ep=1, dp=1).most
    assert 0.85 * most < bounds[-1] <= most


MIXTURE = ["--experts", "4", "--set", "moe.top_k=2", "--layers", "1", "--d-model", "16", "--heads", "4", "--d-ff", "16"]
MIXTURE += ["--seq-len", "16", "--global-batch", "8", "--micro-batch", "1"]


def test_what_a_line_says_is_the_mesh_that_was_planned(capsys):
    """Also of etp and of two levels of cp; a mesh among the run's flags is refused, whichever planner takes it."""
    flags = [*MIXTURE, "--cp-kind", "two-level", "--zero", "0"]
    sizes = {"tp": 2, "cp": 4, "pp": 1, "ep": 2, "dp": 1}
    command = ["examples.gpt.plan:build", "--world", "8", "--tp", "2", "--cp", "4", "--pp", "1", "--ep", "2"]
    main([*command, "--etp", "1", "--cp-inner", "2", *flags])
    _, head, line, *_, trained = capsys.readouterr().out.splitlines()
    assert "--tp 2 --cp 4 --ep 2 --etp 1 --set cp_inner=2" in trained
    assert head.split()[:8] == ["row", "tp", "pp", "cp", "ep", "dp", "etp", "cp_inner"]
    assert line.split()[:8] == ["1", "2", "1", "4", "2", "1", "1", "2"]
    found = dry_run(build_gpt, flags, 0, True, **sizes, etp=1, cp_inner=2)
    for axis in ("cp_outer", "cp_inner", "ep"):
        assert found.ledger.volumes()[axis] > 0
        assert len(found.ledger.ranks_of[axis]) == 2, "also where another axis has the same ranks"
    for flag, size in (("tp", 4), ("etp", 1), ("cp-inner", 4)):
        with pytest.raises(ValueError, match=rf"{flag[-5:]} {size} among the run's flags"):
            dry_run(build_gpt, [*flags, f"--{flag}", str(size)], 0, **sizes, cp_inner=2)
