"""Building, running and recording a rank of `mpcore.tools.verify`, in one process and on two simulated ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.tools.invariant import invariant_mesh
from mpcore.tools.verify import parse_layout
from mpcore.tools.verify import run as of_run
from mpcore.tools.verify.run import STEP, Task

ALONE, WIDTH = parse_layout("tp1"), 3
build_model: Any = of_run.build_model
run_step: Any = of_run.run_step


class Small(nn.Module):
    """A linear layer, a frozen one, a complex and an integer buffer, and a mode in eval()."""

    turns: Tensor
    steps: Tensor

    def __init__(self, mesh: mp.Mesh | None = None) -> None:
        super().__init__()
        self.up, self.fixed = nn.Linear(WIDTH, 4), nn.Linear(4, 2, bias=False).requires_grad_(False)
        self.register_buffer("turns", torch.tensor([1.0 + 2.0j, -1.0j], dtype=torch.complex64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.ones(2), persistent=False)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """[B, 3] -> [B, 2]."""
        y = self.fixed(self.up(x).tanh()) * (1 if weights is None else weights[:, None])
        self.steps += 1
        return y if self.training else 3 * y


def task(**more: Any) -> Task:
    x = torch.arange(8.0 * WIDTH).view(8, WIDTH).sin()
    return Task(**{"build": Small, "batch": {"x": x, "target": x.sum(1).cos()}, "loss": squares, **more})


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, None]).square().sum()


def test_a_slope_may_be_off_by_a_millionth_of_the_norm_and_by_rounding():
    gradient = {"p": torch.tensor([3.0, -4.0], dtype=torch.float64)}
    want = float((gradient["p"] * of_run.direction("p", gradient["p"])).sum())
    for off, good in ((0.0, True), (0.9e-6, True), (-0.9e-6, True), (1.3e-6, False), (-1.3e-6, False)):
        above = (want + 5.0 * off) * 2e-6
        if good:
            assert of_run.check_slope(gradient, 5.0, above, 0.0) == pytest.approx(abs(off), abs=1e-9)
        else:
            with pytest.raises(ValueError, match="a backward is not that of its forward"):
                of_run.check_slope(gradient, 5.0, above, 0.0)
    # a loss of 1e6 has roundings of 1e-10, so that a slope of norm 5 may be off by 1e6 x 1e-15 / 1e-6 / 5 = 2e-4 of it
    for off, good in ((1.9e-4, True), (2.2e-4, False)):
        losses = (1e6 + (want + 5.0 * off) * 1e-6, 1e6 - (want + 5.0 * off) * 1e-6)
        if good:
            of_run.check_slope(gradient, 5.0, *losses)
        else:
            with pytest.raises(ValueError, match="slope"):
                of_run.check_slope(gradient, 5.0, *losses)
    assert of_run.check_slope({}, 0.0, 1.0, 1.0) == 0.0
    with pytest.raises(ValueError, match="slope 1, and"):
        of_run.check_slope({}, 0.0, 1.0 + 1e-6, 1.0 - 1e-6)
    with pytest.raises(ValueError, match="slope nan"):
        of_run.check_slope(gradient, 5.0, math.nan, 0.0)


def by_hand(rows: slice = slice(None)) -> dict[str, Any]:
    """The step in plain torch: a loss that nobody divides, its gradients, and a step of at most STEP."""
    torch.manual_seed(0)
    model = Small().double()
    x, target = (t.double()[rows] for t in (task().batch["x"], task().batch["target"]))
    out = model(x)
    loss = squares(out, target)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p -= (STEP / max(norm, 1.0)) * p.grad if p.grad is not None else 0
    up = initial["up.weight"]
    return {
        "loss": loss.item(), "norm": norm, "initial": initial, "gradients": gradients, "output": {"": out.detach()},
        "updated": {name: p.detach() for name, p in model.named_parameters()},
        "evaluated": {"": model.eval()(x).detach()}, "first": x @ up.T + initial["up.bias"],
    }  # fmt: skip


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("layout", "steps"), [("tp1", 1), ("mb4", 4)])
def test_the_record_of_one_process_is_that_of_plain_torch(layout, steps):
    seen, want = run_step(task(), mp.Mesh(), parse_layout(layout)), by_hand()
    assert (seen.tp, seen.cp, seen.pp, seen.dp, seen.rows, seen.length, seen.tokens) == (0, 0, 0, 0, 8, 0, None)
    for name, value in want.items():
        if name != "first":
            same(getattr(seen, name), value)
    same(seen.local, want["gradients"])
    same(seen.outputs["up", 0], want["first"])
    assert set(seen.outputs) == {("up", 0), ("fixed", 0), ("", 0)}
    assert seen.buffers.keys() == {"turns", "steps"}
    assert seen.buffers["turns"].tolist() == [[1, 2], [0, -1]]
    assert int(seen.buffers["steps"]) == steps  # before the forward in eval(), and without the check of the loss


def test_a_step_is_at_most_a_tenth_also_where_the_gradient_is_small():
    seen = run_step(task(loss=tiny), mp.Mesh(), ALONE)
    assert seen.norm < 1e-3
    same(seen.updated["up.bias"], seen.initial["up.bias"] - STEP * seen.gradients["up.bias"])


def tiny(output: Tensor, target: Tensor) -> Tensor:
    return squares(output, target) * 1e-5


def with_mesh(output: Tensor, target: Tensor, mesh: mp.Mesh) -> Tensor:
    assert isinstance(mesh, mp.Mesh)
    return squares(output, target)


def with_an_option(output: Tensor, target: Tensor, power: int = 2) -> Tensor:
    assert power == 2
    return squares(output, target)


@pytest.mark.parametrize("loss", [with_mesh, with_an_option])
def test_a_loss_gets_the_mesh_if_it_takes_it(loss):
    assert run_step(task(loss=loss), mp.Mesh(), ALONE).loss == pytest.approx(by_hand()["loss"], rel=1e-12)


def test_an_error_of_the_step_says_where_it_was():
    def refuses(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no\ntokens")

    with pytest.raises(ValueError, match=r"^no tokens \(in the loss\)$"):
        run_step(task(loss=refuses), mp.Mesh(), ALONE)
    short = {"x": torch.ones(8, WIDTH), "weights": torch.ones(8, 3), "target": torch.ones(8)}
    with pytest.raises(RuntimeError, match=r"must match the size .* \(in the model's own forward\)$"):
        run_step(task(batch=short), mp.Mesh(), ALONE)


def sequence_parallel_layers() -> tuple:
    on = mp.build_mesh(tp=2, device_type="cpu")

    def build(mesh: mp.Mesh, sequence_parallel: bool = False) -> nn.Module:
        sp: Any = {"tp": mesh.tp, "sequence_parallel": sequence_parallel}
        torch.manual_seed(0)
        return nn.Sequential(mp.RowParallelLinear(4, 4, **sp), nn.LayerNorm(4), mp.LayerNorm(4, tp=mesh.tp),
                             mp.Dropout(0.0, tp=mesh.tp))  # fmt: skip

    batch = {"x": torch.ones(2, 4, 2), "target": torch.ones(2, 2)}
    found = [run_step(task(build=build, batch=batch, loss=lambda y, _: y.sum()), on, parse_layout(name))
             for name in ("tp2sp", "tp2")]  # fmt: skip
    return [(sorted(seen.norms), seen.forgotten) for seen in found]


def test_norms_and_layers_without_sequence_parallelism_are_noted_in_a_model_with_it():
    for found in mp.simulate(sequence_parallel_layers, ranks=2):
        assert found == [(["1", "2"], {"3"}), ([], set())]


def test_rows_that_dont_fit_are_refused_with_the_number_that_they_must_be_a_multiple_of():
    with pytest.raises(ValueError, match=r"layout 'mb3': 8 rows are not a multiple of dp x micro-batches = 3$"):
        run_step(task(), mp.Mesh(), parse_layout("mb3"))
    with pytest.raises(ValueError, match="8 rows are not a multiple of the virtual degree 16"):
        run_step(task(build=linear, virtual=16), invariant_mesh(mp.build_mesh(device_type="cpu"), (2, 16)), ALONE)


def linear(mesh: mp.Mesh) -> mp.ColumnParallelLinear:
    """Three inputs and two outputs."""
    return mp.ColumnParallelLinear(WIDTH, 2, tp=mesh.tp)


def test_with_a_virtual_degree_two_steps_of_adamw_are_made():
    on = invariant_mesh(mp.build_mesh(device_type="cpu"), (2, 4))
    seen = run_step(task(build=linear, virtual=4), on, ALONE)
    torch.manual_seed(0)
    model = linear(mp.Mesh()).double()
    optimizer = mp.AdamW(model)
    x, target = (task().batch[name].double() for name in ("x", "target"))
    for _ in range(2):
        loss = squares(model(x), target)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = STEP / max(seen.norm, 1.0)
        if not optimizer.state:
            assert seen.loss == pytest.approx(loss.item(), rel=1e-12)
            same(seen.gradients, {name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    same(seen.updated, {name: p.detach() for name, p in model.named_parameters()})
    same(seen.evaluated[""], model(x).detach())


def test_the_model_has_the_seeds_values_in_the_tasks_dtype_and_complex_buffers_stay_complex():
    torch.manual_seed(5)
    want = Small()
    for dtype, complex_dtype in ((torch.float64, torch.complex128), (torch.float32, torch.complex64),
                                 (torch.bfloat16, torch.complex64)):  # fmt: skip
        torch.manual_seed(11)
        model = build_model(task(seed=5, dtype=dtype), mp.Mesh(), ALONE)
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.equal(p, q.to(dtype))
        assert torch.equal(model.get_buffer("turns"), want.turns.to(complex_dtype))
        assert model.get_buffer("turns").dtype == complex_dtype
        assert (model.get_buffer("steps").dtype, model.get_buffer("own").dtype) == (torch.int64, dtype)
    assert not torch.equal(build_model(task(seed=6), mp.Mesh(), ALONE).up.weight, want.up.weight.double())
