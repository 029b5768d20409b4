"""Which ranges of a dimension several ranks hold, whom an error names, and what one process asks of nobody."""

from __future__ import annotations

import pytest
import torch

import mpcore as mp
from mpcore.mesh.axis import Axis
from mpcore.sharding import replicas
from mpcore.sharding.declare import Shard
from mpcore.sharding.local import local_tensor

INDICES = torch.arange(24).view(2, 12)
RUNS: dict[str, tuple[tuple, list[str]]] = {  # the runs of three ranks, and the ranges that several hold
    "apart": ((((0, 4),), ((4, 8),), ((8, 12),)), []),
    "two hold all": ((((0, 4),), ((0, 4),), ()), ["[0:4]"]),
    "an overlap": ((((0, 5),), ((4, 9),), ((9, 12),)), ["[4:5]"]),
    "overlaps side by side": ((((0, 6),), ((3, 9),), ((6, 12),)), ["[3:6]", "[6:9]"]),
    "one in another": ((((0, 8),), ((2, 5),), ((5, 8),)), ["[2:5]", "[5:8]"]),
    "with a gap": ((((0, 2), (6, 8)), ((0, 2), (6, 8)), ()), ["[0:2]", "[6:8]"]),
    "three hold the middle": ((((0, 6),), ((2, 8),), ((4, 5),)), ["[2:4]", "[4:5]", "[5:6]"]),
    "in another order": ((((6, 8), (0, 2)), ((0, 3), (6, 7)), ()), ["[0:2]", "[6:7]"]),
}


@pytest.mark.parametrize("case", RUNS)
def test_ranges_that_the_same_ranks_hold_are_compared_as_one(case):
    runs, names = RUNS[case]
    for rank, own in enumerate(runs):
        mine = [i for start, end in own for i in range(start, end)]
        found = list(replicas._shared_runs(Shard(Axis(3, rank), 1, runs), INDICES[:, mine]))
        assert [name for name, _ in found] == names, "the same on all ranks"
        for name, part in found:
            start, end = map(int, name[1:-1].split(":"))
            there = [i for i in range(start, end) if i in mine]
            assert there in ([], list(range(start, end)))
            assert (part is not None) is bool(there)
            if part is not None:
                assert torch.equal(part, INDICES[:, there])


class Table(torch.nn.Module):
    """Nine weights that the ranks of tp hold whole."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        for i, value in enumerate(values):
            self.register_parameter(f"w{i}", torch.nn.Parameter(torch.tensor([value])))


def compares(count: int, cause: str | None) -> str:
    on = mp.build_mesh(device_type="cpu", tp=2)
    model = Table([float(on.tp.rank)] * count + [1.0])
    try:
        replicas.compare_replicas(model, on, *([] if cause is None else [cause]))
    except ValueError as error:
        return str(error)
    return ""


def test_eight_tensors_are_named_and_the_others_counted():
    one = [f"w{i} over tp, on ranks 0 and 1" for i in range(11)]
    for count, more in ((1, ""), (8, ""), (9, "; and 1 more"), (11, "; and 3 more")):
        said = f"replicas differ, so a rank's memory is corrupt: {'; '.join(one[: min(count, 8)])}{more}"
        assert mp.simulate(compares, count, None, ranks=2) == [said] * 2
    assert mp.simulate(compares, 1, "as asked", ranks=2)[0] == f"replicas differ, as asked: {one[0]}"
    assert mp.simulate(compares, 0, None, ranks=2) == ["", ""]


def spoiled_shard() -> list[str]:
    on = mp.build_mesh(device_type="cpu", dp=4)
    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    mp.parallel.shard_data_parallel(model, on, zero=3, replicate=2)
    if on.data.rank == 3:
        local_tensor(model.weight).data[0, 0] = 2.0
    try:
        replicas.compare_replicas(model, on)
    except ValueError as error:
        return str(error)
    return ""


def test_replicas_of_hsdps_shards_are_compared():
    for said in mp.simulate(spoiled_shard, ranks=4):
        assert "weight" in said
        assert "bias" not in said
