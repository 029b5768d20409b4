"""Sizes, places, groups and joining a world: by hand, without a rank or on simulated ones."""

from __future__ import annotations

import dataclasses
import socket
import tempfile
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpcore as mp
from mpcore.mesh import layout, rendezvous
from mpcore.mesh.axis import Axis, Mesh
from mpcore.mesh.launch import Launch, read_launch
from mpcore.mesh.rendezvous import join_world, meet
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
    found = layout.for_worlds({"tp": [[0, 1], [2, 3]], "ends": []}, 8, 2)
    assert found == {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]], "ends": [], "world": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "worlds": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }  # fmt: skip


def test_levels_of_cp_are_neighbours_within_and_strides_without():
    found = layout.level_ranks([[0, 2, 4, 6], [1, 3, 5, 7]], 2)
    assert found == {"cp_outer": [[0, 4], [2, 6], [1, 5], [3, 7]], "cp_inner": [[0, 2], [4, 6], [1, 3], [5, 7]]}
    assert layout.level_ranks([[0, 1, 2]], 3) == {"cp_outer": [[0], [1], [2]], "cp_inner": [[0, 1, 2]]}
    for inner in (0, -1, 2, 4):
        with pytest.raises(ValueError, match=f"cp_inner {inner} does not divide cp 3: take one of 1, 3"):
            layout.level_ranks([[0, 1, 2]], inner)
    assert layout.divisors(12) == "take one of 1, 2, 3, 4, 6, 12"


def test_a_large_mesh_is_drawn_in_short():
    def cells(**sizes: int) -> list[str]:
        return layout.layout_table(**sizes).splitlines()[1:]  # type: ignore[arg-type]

    assert cells(dp=5)[0].count("|") == 5
    assert cells(dp=6) == ["  stage 0 | dp 0: 0 | dp 1: 1 | dp 2: 2 | .. | dp 5: 5"]
    assert cells(tp=5) == ["  stage 0 | dp 0: 0 1 2 3 4"]
    assert cells(tp=6) == ["  stage 0 | dp 0: 0 1 2 .. 5"]
    assert len(cells(pp=8)) == 8
    assert [line.split(" |")[0] for line in cells(pp=9)] == [*(f"  stage {i}" for i in range(4)), "  ..", "  stage 8"]
    head = layout.layout_table(ep=2, dp=4, etp=1, tp=2, device_type="cuda").splitlines()[0]
    assert head == "mesh of 8 ranks on cuda: pp 1 x dp 4 x cp 1 x tp 2, ep 2, etp 1"


def twins(sizes: dict[str, int]) -> dict[str, bool]:
    on = mp.build_mesh(device_type="cpu", **sizes)
    pairs = (("data", "dp"), ("etp", "tp"), ("edp", "data"))
    return {a: on.axes[a].group is on.axes[b].group for a, b in pairs}


@pytest.mark.parametrize(("sizes", "same"), [
    ({"tp": 2, "dp": 2}, {"data": True, "etp": True, "edp": True}),
    ({"cp": 2, "dp": 2}, {"data": False, "etp": True, "edp": True}),
    ({"dp": 4, "ep": 2}, {"data": True, "etp": True, "edp": False}),
    ({"dp": 4, "etp": 2}, {"data": True, "etp": False, "edp": False}),
])  # fmt: skip
def test_axes_of_the_same_ranks_share_their_group(sizes, same):
    assert mp.simulate(twins, sizes, ranks=4) == [same] * 4


def test_the_rank_that_keeps_the_store():
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}) == read_launch({"WORLD_SIZE": "1"}) == read_launch({})
    assert read_launch({}) == Launch() == Launch(0, 1, 0, 1, "", 0, "", "", False, 0)
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29400"}
    assert read_launch(told).keeps_store
    assert not read_launch({**told, "RANK": "1"}).keeps_store
    elastic = {**told, "TORCHELASTIC_RUN_ID": "x"}
    assert read_launch(elastic).keeps_store
    assert not read_launch({**elastic, "TORCHELASTIC_USE_AGENT_STORE": "True"}).keeps_store
    assert read_launch({**told, "LOCAL_RANK": "0"}).local_size == 1
    found = read_launch({**told, "RANK": "1", "LOCAL_RANK": "1"})
    assert (found.local_rank, found.local_size) == (1, 2), "as many as there must be"
    assert (read_launch(told).local_rank, read_launch(told).local_size) == (0, 1)
    for port in ("1", "65535"):
        assert read_launch({**told, "MASTER_PORT": port}).port == int(port)
    for wrong, said in (("0", "isn't between 1 and 65535"), ("65536", "isn't between"), ("1.0", "no whole number")):
        with pytest.raises(ValueError, match=f"MASTER_PORT.*{said}"):
            read_launch({**told, "MASTER_PORT": wrong})


def here(rank: int, size: int = 2, **changes: Any) -> Launch:
    at = Launch(rank, size, rank, size, "localhost", 29999, "variables", "one world", keeps_store=rank == 0)
    return dataclasses.replace(at, **changes)


def test_a_group_that_cant_be_made_names_the_silent_ranks_after_two_seconds(monkeypatch):
    slept: list = []
    monkeypatch.setattr(rendezvous.time, "sleep", slept.append)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("refused\nmore")

    monkeypatch.setattr(dist, "init_process_group", fail)
    store = dist.HashStore()
    for rank, who in ((1, "ranks 0, 2 gave no answer"), (2, "rank 0 gave no answer"), (0, "refused")):
        with pytest.raises(ValueError, match=rf"within 4 s: {who}\. See whether they run"):
            join_world("gloo", store, rank, 3, timedelta(seconds=4))
        assert store.check([f"mpcore/late/{rank}"])
    assert slept == [2.0] * 3


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


def test_a_meeting_counts_once_for_each_rank_and_hears_of_the_first_message(monkeypatch):
    slept: list = []
    real = time.sleep
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: slept.append(seconds) or real(1e-3))
    store, names = dist.HashStore(), [""] * 3

    def one(rank: int) -> None:
        names[rank] = meet(store, rank, 3, 20.0)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (name,) = set(names)
    assert name.startswith("attempt ")
    assert len(name) == len("attempt ") + 16
    assert {store.get(f"{name}/mpcore/host/{rank}").decode() for rank in range(3)} == {socket.gethostname()}
    assert int(store.get("mpcore/tickets")) == 2, "rank 0 needs none"
    assert set(slept) <= {0.01 + 2e-4 * 3}
    rendezvous._tell(store, f"{name}/mpcore/met", "something else")
    assert store.get(f"{name}/mpcore/met") == b"all are here"
    assert meet(store, 0, 1, 1.0) != name
    slept.clear()
    with pytest.raises(ValueError, match=r"of 5000 ranks 1, 2, .* did not arrive within 0\.001 s"):
        meet(dist.HashStore(), 0, 5000, 0.001)
    assert set(slept) <= {1.0}
