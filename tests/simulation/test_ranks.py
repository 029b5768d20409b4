"""Simulated ranks: sizes, names, lines and logs, by hand."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import mpcore as mp
from mpcore.collectives import all_reduce
from mpcore.mesh.build import build_mesh
from mpcore.tools.simulation import DeadlockError, RankError, simulate


@pytest.mark.parametrize(("sizes", "axes"), [
    ({}, {}), ({"tp": 2, "cp": 3}, {"tp": 2, "cp": 3}),
    ({"ep": 3}, {"ep": 3, "dp": 3}),  # the smallest dp that fits
    ({"ep": 2, "tp": 2}, {"ep": 2, "tp": 2, "dp": 2, "etp": 2}),
    ({"ep": 2, "tp": 2, "mesh": {"etp": 1}}, {"ep": 2, "tp": 2, "dp": 1, "etp": 1}),
    ({"ep": 6, "cp": 4}, {"ep": 6, "cp": 4, "dp": 3}), ({"ep": 2, "pp": 2, "dp": 4}, {"ep": 2, "pp": 2, "dp": 4}),
    ({"cp": 4, "mesh": {"cp_inner": 2}}, {"cp": 4}),
])  # fmt: skip
def test_the_mesh_has_the_sizes_that_are_given_and_the_least_dp_that_they_need(sizes, axes):
    def look(mesh: mp.Mesh) -> dict[str, int]:
        assert mesh.device.type == "cpu"
        return {name: getattr(mesh, name).size for name in ("tp", "cp", "pp", "ep", "dp", "etp", "world")}

    found = simulate(look, **sizes)
    want = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": 1} | axes
    world = want["tp"] * want["cp"] * want["pp"] * want["dp"]
    want |= {"etp": axes.get("etp", want["tp"]), "world": world}
    assert found == [want] * world


def test_a_function_of_ranks_builds_its_own_mesh_and_gets_its_arguments():
    def own(a: int, b: int) -> tuple[int, int, int, int]:
        mesh = build_mesh(tp=2, device_type="cpu")
        return a, b, mesh.tp.rank, mesh.dp.rank

    assert simulate(own, 7, 8, ranks=4) == [(7, 8, 0, 0), (7, 8, 1, 0), (7, 8, 0, 1), (7, 8, 1, 1)]
    assert simulate(lambda mesh, a: a, 5, tp=2) == [5, 5]


@pytest.mark.parametrize(("told", "words"), [
    ({"ranks": 2, "dp": 1}, "give one of them"), ({"ranks": 2, "mesh": {}}, "give one of"), ({"ranks": -1}, "ranks -1"),
    ({"tp": 0}, "tp 0"), ({"dp": 0}, "dp 0"), ({"tp": 2, "ep": 3, "dp": 2}, "ep 3"), ({"cp": -1}, "cp -1"),
])  # fmt: skip
def test_sizes_that_make_no_mesh_are_refused_before_any_rank_starts(told, words):
    began = []
    with pytest.raises(ValueError, match=words):
        simulate(began.append, **told)
    assert not began


def test_an_error_names_the_rank_and_its_axes():
    def fails(mesh: mp.Mesh, rank: int) -> None:
        if mesh.world.rank == rank:
            raise ValueError("why")

    for sizes, rank, name in (
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, 13, "rank 13 of 16 (cp 0, dp 1, pp 1, tp 1)"),
        ({"pp": 3}, 2, "rank 2 of 3 (pp 2)"), ({}, 0, "rank 0 of 1"),
    ):  # fmt: skip
        with pytest.raises(RankError) as error:
            simulate(fails, rank, **sizes)
        head, _, what = str(error.value).partition(": ")
        assert what == "ValueError: why"
        assert sorted(re.findall(r"\w+ \d+", head)) == sorted(re.findall(r"\w+ \d+", name))
        assert isinstance(error.value.__cause__, ValueError)


def test_a_deadlock_lists_the_calls_of_a_group_by_the_name_of_its_axis():
    def work(mesh: mp.Mesh) -> None:
        all_reduce(torch.ones(2), mesh.dp)
        dist.all_reduce(torch.ones(3))
        if mesh.dp.rank == 0:
            all_reduce(torch.ones(4), mesh.dp)

    with pytest.raises(DeadlockError) as error:
        simulate(work, dp=2)
    said = str(error.value)
    assert said.startswith("no rank can go on: ")
    assert "rank 0 entered all_reduce(dp) of [4] float32" in said
    assert "the end of its function" in said
