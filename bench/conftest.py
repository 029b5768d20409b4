"""What all benches share: one thread, a described machine, and results without raw rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bench.machine import describe
from mpcore import Mesh, build_mesh

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _described(request: pytest.FixtureRequest) -> None:
    if "benchmark" in request.fixturenames:
        request.getfixturevalue("benchmark").extra_info.update(describe())


@pytest.fixture
def tp8() -> Iterator[Mesh]:
    """Rank 0 of a mesh with tp 8, whose collectives return at once: what is left is the host's work."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield build_mesh(tp=8, device_type="cpu")
    dist.destroy_process_group()


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict) -> None:
    """Keep medians and what stands beside them; leave out raw rounds and the flags of the processor."""
    output_json["machine_info"] = describe()
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
