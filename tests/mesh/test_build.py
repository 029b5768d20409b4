"""Sizes, places, groups and joining a world: by hand, without a rank or on simulated ones."""

from __future__ import annotations

import tempfile
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpcore as mp
from mpcore.mesh import layout, rendezvous
from mpcore.mesh.axis import Axis, Mesh
from mpcore.mesh.launch import Launch
from mpcore.tools.invariant import TreeSums, invariant_mesh


def test_an_axis_is_known_by_its_group_or_by_role_size_and_rank():
    group: Any = SimpleNamespace(size=lambda: 4, group_name="g")
    axis = Axis(4, 1, group, role="tp")
    assert (axis.name, axis.group_name, axis.key, axis.order) == ("tp", "g", ("g",), ("tp", "g"))
    assert Axis(4, 1, group, "other", role="tp") == axis, "a name is no identity"
    alone = Axis(4, 1, role="tp")
    assert (alone.key, alone.order, alone.group_name, Axis().name) == (("tp", 4, 1), ("tp", ""), "", "axis")
    for size in (3, 5):
        with pytest.raises(ValueError, match=f"the tp axis has size {size}, its process group 4 ranks"):
            Axis(size, 0, group, role="tp")
    names = ["tp", "cp", "dp", "pp", "ep", "etp", "edp", "data", "ends", "world", "worlds", "job"]
    mesh = Mesh(tp=Axis(2, 1), ep=Axis(4))
    assert list(mesh.axes) == names
    assert all(axis.role == name for name, axis in Mesh().axes.items())
    assert repr(mesh) == "Mesh(tp=2, ep=4)"
    assert str(Mesh(worlds=Axis(3, 2))).startswith("world 2 of 3: mesh of 1 ranks on cpu")
    assert Mesh().device == torch.device("cpu")
    before = time.time_ns()
    assert before <= Mesh().made_ns <= time.time_ns()
    assert mesh == Mesh(tp=Axis(2, 1), ep=Axis(4)), "meshes of the same axes are equal, whenever they were made"


def of_a_job() -> tuple:
    """An invariant mesh's degrees, what it and its mesh hold before and after its end, and two worlds."""
    on = mp.build_mesh(tp=2, device_type="cpu")
    with invariant_mesh(on, (2, 4)) as made:
        found = degrees_of(made)
    with pytest.raises(ValueError, match=r"disagree about the mesh \(virtual degrees: 2 and 4\)"):
        invariant_mesh(on, 2 ** (1 + on.tp.rank))
    on = mp.build_mesh(worlds=2, dp=2, device_type="cpu")
    assert on.device_mesh is not None
    assert (on.world.role, on.job.role) == ("world", "job")
    return (found, (on.job.size, on.job.rank), (on.world.size, on.world.rank), (on.worlds.size, on.worlds.rank),
            on.device_mesh.mesh_dim_names)  # fmt: skip


def test_a_mesh_has_virtual_degrees_and_each_worker_a_world():
    want, names = {"tp": 2, "dp": 4, "edp": 4, "data": 4}, ("worlds", "pp", "dp", "cp", "tp")
    assert mp.simulate(of_a_job, ranks=4) == [
        (want, (4, rank), (2, rank % 2), (2, rank // 2), names) for rank in range(4)
    ]


@pytest.mark.parametrize(("virtual", "sizes", "want"), [
    (0, {}, "virtual degree 0 of tp, of size 1"), (4, {"tp": 2, "dp": 4}, {"tp": 4, "dp": 4, "data": 4, "edp": 4}),
    ((2, 8), {"tp": 2}, {"tp": 2, "dp": 8, "data": 8, "edp": 8}), (1, {}, {"tp": 1, "dp": 1, "data": 1, "edp": 1}),
    ((8, 0), {}, "virtual degree 0 of dp, of size 1"), ((0, 8), {}, "virtual degree 0 of tp, of size 1"),
    (6, {}, "virtual degree 6 of tp, of size 1"), (-2, {}, "virtual degree -2 of tp"),
    (4, {"tp": 8}, "virtual degree 4 of tp, of size 8"), ((4, 2), {"dp": 4}, "virtual degree 2 of dp, of size 4"),
    (4, {"cp": 2}, "don't go with cp 2: take cp 1"), (4, {"ep": 2}, "don't go with ep 2"),
    (4, {"worlds": 2}, "don't go with worlds 2"),
])  # fmt: skip
def test_virtual_degrees_are_powers_of_two_that_sizes_divide(virtual, sizes, want):
    on = Mesh(**{name: Axis(size, role=name) for name, size in sizes.items()})  # type: ignore[arg-type]
    if isinstance(want, dict):
        assert degrees_of(invariant_mesh(on, virtual)) == want
        assert degrees_of(on) == {}
    else:
        with pytest.raises(ValueError, match=want):
            invariant_mesh(on, virtual)


def degrees_of(on: Mesh) -> dict[str, int]:
    return {name: axis.sums.degree for name, axis in on.axes.items() if isinstance(axis.sums, TreeSums)}


def test_the_worlds_of_a_job_are_of_consecutive_ranks():
    assert [layout.world_size_of(12, worlds) for worlds in (1, 2, 3, 12)] == [12, 6, 4, 1]
    for wrong in (0, 5, 2.0, True, -1):
        with pytest.raises(ValueError, match=f"worlds {wrong} do not divide the job's 12 ranks: take one"):
            layout.world_size_of(12, wrong)  # type: ignore[arg-type]


def test_levels_that_do_not_divide_cp_are_refused():
    for inner in (0, -1, 2, 4, 3.0, "3"):
        with pytest.raises(ValueError, match=f"cp_inner {inner!r} does not divide cp 3: take one of 1, 3"):
            layout.level_ranks([[0, 1, 2]], inner)  # type: ignore[arg-type]


def test_every_rank_has_read_the_secret_when_its_file_is_removed(monkeypatch, tmp_path):
    """Rank 2 reads between two calls of rank 1."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store, found = dist.HashStore(), {}

    def share(rank: int, store: Any) -> None:
        launch = Launch(rank, 3, rank, 3, "127.0.0.1", 1, "variables", "one world", keeps_store=rank == 0)
        found[rank] = rendezvous._share_secret(store, launch, "a start", time.monotonic() + 5)

    class Overtaken:
        wait, get, check = store.wait, store.get, store.check

        def add(self, key: str, amount: int) -> int:
            count = store.add(key, amount)
            share(2, store)
            return count

    share(0, store)
    share(1, Overtaken())
    assert found[0] == found[1] == found[2]
    assert not list(tmp_path.rglob("secret-*"))
