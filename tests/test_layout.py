"""Counts from stages of one and two blocks against full runs, integer for integer, and peaks within 4 %."""

from __future__ import annotations

import pytest

from examples.gpt.plan import build
from mpcore.gradients import overlap
from mpcore.tools.analysis.dry_run import dry_run, on_mesh
from mpcore.tools.analysis.layout import PEAKS, Counter, TooLargeError

FLAGS = "--d-model 32 --heads 4 --d-ff 48 --seq-len 16 --global-batch 32 --micro-batch 1".split()  # noqa: SIM905
SHORT = [
    ("--layers 4 --zero 1 --sequence-parallel --recompute selective --dtype bfloat16", {"tp": 2, "dp": 2}),
    ("--layers 4 --zero 0 --dtype bfloat16", {"dp": 2}),
]
BY_HAND = [
    ("--layers 8 --zero 2 --sequence-parallel --recompute selective --dtype bfloat16", {"tp": 2, "pp": 2, "dp": 2}),
    ("--layers 9 --zero 3", {"pp": 2, "dp": 2}),
    ("--layers 9 --global-batch 30 --schedule zb", {"pp": 3}),
    ("--layers 8 --preset tiny-moe --set moe.every=2 --set moe.d_ff=8", {"dp": 2, "ep": 2}),
    ("--layers 8 --cp-kind ring", {"cp": 2, "pp": 2}),
    ("--layers 8 --set mtp=2 layers_spec=delta,kimi,full", {"tp": 2}),
    ("--layers 12 --schedule interleaved --set tie_embeddings=true", {"pp": 2, "dp": 2}),
    ("--layers 6 --recompute budget=0.5", {"tp": 2}),
    ("--layers 5 --recompute full --set recompute_every=2", {"pp": 2}),
]


def check_equal(flags: str, sizes: dict[str, int], gpu: bool = True) -> None:
    counter, pp, world, most = Counter(build, gpu), sizes.get("pp", 1), 1, 0
    for size in sizes.values():
        world *= size
    for pp_rank in range(pp):
        rank, arguments = pp_rank * world // pp, [*FLAGS, *flags.split()]
        full, fast = dry_run(build, arguments, rank, gpu, **sizes), counter.rank(arguments, rank, **sizes)
        for got, want in zip(fast.stages, full.stages, strict=True):
            for name in PEAKS:
                assert abs(getattr(got, name) - getattr(want, name)) <= 0.04 * full.work_peak, (name, rank)
                setattr(got, name, getattr(want, name))
        assert fast.work_peak == pytest.approx(full.work_peak, rel=0.04)
        for name in ("held", "stages", "times", "peak"):
            assert getattr(full, name) == getattr(fast, name), (name, rank)
        assert full.ledger.counts == fast.ledger.counts
        most = max(most, full.most)
    with on_mesh(0, **sizes) as mesh:
        assert build.outline(mesh, [*FLAGS, *flags.split()]).least <= most, "it would be ruled out, and may fit"


@pytest.mark.parametrize(("flags", "sizes"), SHORT, ids=str)
def test_few_blocks_count_what_all_blocks_count(flags, sizes, monkeypatch):
    monkeypatch.setattr(overlap, "ALONE", 256)  # so that ZeRO-0 sums every matrix within backward
    check_equal(flags, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize(("flags", "sizes"), BY_HAND, ids=str)
def test_any_flags_count_what_all_blocks_count(flags, sizes, gpu, monkeypatch):
    monkeypatch.setattr(overlap, "ALONE", 256)
    check_equal(flags, sizes, gpu)


def test_a_layout_that_fits_is_never_ruled_out():
    """Also in every case of `check_equal`."""
    flags = [*FLAGS, *"--layers 4 --zero 1 --dtype bfloat16 --d-model 256 --d-ff 512".split()]  # noqa: SIM905
    with on_mesh(0, dp=2) as mesh:
        least = build.outline(mesh, flags).least
    with pytest.raises(TooLargeError, match=f"{least} bytes at least, of {least - 1}"):
        Counter(build).layout(flags, room=least - 1, dp=2)
    assert least <= Counter(build).layout(flags, room=least, dp=2).fullest[1] < least / 0.8, "it is a bound of use"
