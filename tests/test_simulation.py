"""Simulated ranks: what a debugger of a layer wants to see. `tests/laws` has their numbers beside plain torch."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpcore as mp
from examples import own_model
from mpcore._torch.compile import eagerly
from mpcore._torch.distributed import mesh_caches
from mpcore.checkpoint import latest
from mpcore.collectives import all_reduce
from mpcore.tools.simulation import RankError
from tests.pool import Simulated
from tests.training import test_prepare as training

simulated = Simulated()


def test_torch_keeps_nothing_of_a_simulated_mesh():
    """A later mesh of the same ranks would get its groups, which are gone."""
    mp.simulate(own_model.train, 1, 3, 1, ranks=2)
    assert {cached.cache_info().currsize for cached in mesh_caches()} == {0}


def go_on(sizes: dict, folder: str, steps: int, **told: Any) -> list[float]:
    """Go on from the newest checkpoint there, train until so many steps are done, and save."""
    run, losses = training.start(sizes, **told), []
    found = latest(folder, run.mesh)
    if found is not None:
        run.load(found)
    while run.step < steps:
        run.forward_backward(*training.batch(run.step, run.share(training.SAMPLES)))
        losses.append(run.optimizer_step().loss)
    run.save(folder)
    return losses


def test_a_checkpoint_goes_from_simulated_ranks_to_real_ones_and_back(ranks, tmp_path):
    (want,) = simulated(1, go_on, {}, str(tmp_path / "whole"), 4)
    got: list[float] = []
    parts = (
        (simulated, "pp 2 x dp 2, zb"),
        (ranks, "ZeRO-2 x tp, sequence parallel"),
        (simulated, "ZeRO-3 x tp, recompute"),
    )
    for steps, (start, name) in enumerate(parts, 2):
        sizes, told = training.LAYOUTS[name]
        got += start(math.prod(sizes.values()), go_on, sizes, str(tmp_path / "parts"), steps, **told)[0]
    assert got == pytest.approx(want, rel=1e-9)


def save_beside(mesh: mp.Mesh, folder: str) -> list[str]:
    model = mp.ColumnParallelLinear(4, 6, tp=mesh.tp)
    mp.checkpoint.save_async(folder, model, mesh=mesh, step=1).wait()
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_save_in_the_background_is_written_at_once(tmp_path):
    first, second = mp.simulate(save_beside, str(tmp_path / "step1"), tp=2)
    assert first == second
    assert len(first) > 1


@pytest.mark.parametrize(("sizes", "axes"), [
    ({"tp": 3}, [(rank, 0, 0, 0) for rank in range(3)]),
    ({"tp": 2, "dp": 2}, [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)]),
    ({"pp": 2, "cp": 2}, [(0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)]),
    ({"ep": 2}, [(0, 0, 0, 0), (0, 1, 0, 0)]),  # dp is the smallest that fits
    ({"ep": 2, "tp": 2, "mesh": {"etp": 1}}, [(0, 0, 0, 0), (1, 0, 0, 0)]),
    ({"cp": 4, "mesh": {"cp_inner": 2}}, [(0, 0, rank, 0) for rank in range(4)]),
    ({"tp": 2, "mesh": {"worlds": 2}}, [(0, 0, 0, 0), (1, 0, 0, 0)] * 2),
], ids=str)  # fmt: skip
def test_results_come_in_rank_order(sizes, axes):
    def places(mesh: mp.Mesh) -> tuple[int, ...]:
        return mesh.tp.rank, mesh.dp.rank, mesh.cp.rank, mesh.pp.rank

    assert mp.simulate(places, **sizes) == axes


def test_each_rank_has_its_own_random_state_and_the_caller_keeps_its_own():
    def draw(mesh: mp.Mesh, seeds: bool) -> list[float]:
        if seeds:
            torch.manual_seed(mesh.tp.rank)
            random.seed(mesh.tp.rank)
            np.random.seed(mesh.tp.rank)
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(()).item(), random.random(), float(np.random.rand())]
            all_reduce(torch.ones(1), mesh.tp)
        return drawn

    before = torch.get_rng_state(), random.getstate()
    one, two, three = mp.simulate(draw, True, tp=3)
    assert len({*one, *two, *three}) == 27
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    (alone,) = mp.simulate(draw, False, tp=1)
    assert mp.simulate(draw, False, tp=2) == [alone, alone]


def test_breakpoint_calls_stop_rank_after_rank(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(dist.get_rank()))

    def work(mesh: mp.Mesh) -> None:
        breakpoint()
        all_reduce(torch.ones(1), mesh.tp)

    mp.simulate(work, tp=4)
    assert sorted(seen) == [0, 1, 2, 3]


def test_each_line_says_which_rank_printed_it(capsys):
    def talk(mesh: mp.Mesh) -> None:
        print("first\nsecond")
        all_reduce(torch.ones(1), mesh.tp)
        print("done")

    print("before")
    mp.simulate(talk, tp=2)
    print("after")
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("before", "after")
    assert sorted(lines) == [f"rank {rank}: {word}" for rank in range(2) for word in ("done", "first", "second")]


def test_a_sum_over_ranks_is_no_write_as_of_real_ones(caplog):
    """A large gradient is summed in place after backward: no warning says that the caller changed it."""

    def train(mesh: mp.Mesh) -> None:
        model = mp.ColumnParallelLinear(512, 1024, tp=mesh.tp)
        run = mp.prepare(model, mesh, blocks=[model], data=mp.Zero(0), loss=lambda y, _: y.square().sum(),
                         initialize=False, optimizer=lambda m: torch.optim.SGD(m.parameters()))  # fmt: skip
        for step in range(3):
            x = torch.full((1, 512), 1.0 + step + mesh.dp.rank)
            run.forward_backward(x, x)
            run.optimizer_step()

    mp.simulate(train, dp=2)
    assert "changed" not in caplog.text


def test_an_error_names_its_rank_and_stops_the_others():
    ended = []

    def work(mesh: mp.Mesh) -> None:
        try:
            all_reduce(torch.ones(1), mesh.world)  # all are here before one fails
            if mesh.world.rank == 2:
                raise KeyError("no such thing")
            all_reduce(torch.ones(1), mesh.tp)
            all_reduce(torch.ones(1), mesh.dp)
        finally:
            ended.append(mesh.world.rank)

    with pytest.raises(RankError, match=r"rank 2 of 4 \(tp 0, dp 1\): KeyError: 'no such thing'") as caught:
        mp.simulate(work, tp=2, dp=2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert sorted(ended) == [0, 1, 2, 3]
    assert mp.simulate(lambda mesh: mesh.tp.rank, tp=2) == [0, 1]  # nothing is left of it
    assert not dist.is_initialized()


def test_what_runs_without_graphs_on_ranks_leaves_the_callers_compiler_on():
    def work(mesh: mp.Mesh) -> None:
        with eagerly():  # each rank enters before the other leaves
            all_reduce(torch.ones(1), mesh.tp)
            all_reduce(torch.ones(1), mesh.tp)

    traced = torch.compile(lambda x: x * torch.compiler.is_compiling(), backend="eager")
    mp.simulate(work, tp=2)
    assert traced(torch.ones(1)) == 1


def test_ranks_that_shard_one_model_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    with pytest.raises(RankError, match="simulated ranks 0 and 1 shard one Sequential: build the model inside"):
        mp.simulate(lambda mesh: mp.parallelize(model, {"0": "colwise", "2": "rowwise"}, mesh.tp), tp=2)


@pytest.mark.parametrize(("told", "words"), [
    ({"ranks": 2, "tp": 2}, "give one of them"), ({"ranks": 0}, "ranks 0 is smaller than 1"), ({"tp": 0}, "tp"),
    ({"dp": 0}, "dp"), ({"ep": 3, "dp": 2}, "3"),
], ids=str)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(told, words):
    with pytest.raises(ValueError, match=words):
        mp.simulate(lambda *_: None, **told)


def inner(mesh: mp.Mesh, of: int) -> tuple[int, ...]:
    return of, mesh.tp.rank, int(all_reduce(torch.tensor(10 * of + mesh.tp.rank), mesh.tp))


def test_a_rank_may_simulate_and_goes_on_as_the_rank_it_was():
    def outer(mesh: mp.Mesh) -> tuple:
        before = int(all_reduce(torch.tensor(mesh.tp.rank), mesh.tp))
        found = mp.simulate(inner, mesh.tp.rank, tp=3)
        return before, found, int(all_reduce(torch.tensor(1 + mesh.tp.rank), mesh.tp)), torch.distributed.get_rank()

    for rank, found in enumerate(mp.simulate(outer, tp=2)):
        assert found == (1, [(rank, i, 30 * rank + 3) for i in range(3)], 3, rank)
    with pytest.raises(RankError, match=r"rank 0 of 2.*RankError: rank 0 of 3.*ZeroDivisionError"):
        mp.simulate(lambda mesh: mp.simulate(lambda inside: 1 / inside.tp.rank, tp=3), tp=2)
