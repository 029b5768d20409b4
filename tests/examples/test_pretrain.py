"""The example on every layout against the same run in one process."""

from __future__ import annotations

import hashlib
import math

import pytest

from mpcore import full_state_dict
from tests.pool import mesh

TINY = [
    "--layers",
    "2",
    "--d-model",
    "16",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--d-ff",
    "24",
    "--seq-len",
    "16",
    "--global-batch",
    "4",
]
STEPS = 10
LAYOUTS = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
CASES = [(layout, sp) for layout in LAYOUTS for sp in (False, True) if layout[0] > 1 or not sp]
NAME = "tp{}pp{}dp{}"
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def trainer(*flags: str, **sizes: int):
    from examples.gpt.pretrain import Trainer, parse

    return Trainer(parse([*TINY, "--steps", str(STEPS), "--warmup", "2", *flags]), mesh(**sizes))


def run(sizes: dict, *flags: str) -> dict:
    """Losses and norms of all steps, and a hash of each parameter before the first."""
    micro_batch = 4 // (sizes.get("dp", 1) * sizes.get("pp", 1)) if sizes else 1
    t = trainer(*flags, "--micro-batch", str(micro_batch), **sizes)
    hashes = {n: hashlib.sha256(p.numpy().tobytes()).hexdigest() for n, p in full_state_dict(t.model).items()}
    records = [t.step(i) for i in range(STEPS)]
    return {"hashes": hashes, "losses": [r["loss"] for r in records], "norms": [r["grad_norm"] for r in records],
            "val": t.evaluate()}  # fmt: skip


def names(layout: tuple[int, int, int]) -> dict:
    return dict(zip(("tp", "pp", "dp"), layout, strict=True))


_alone: dict = {}


def alone(ranks, *flags: str) -> dict:
    if flags not in _alone:
        (_alone[flags],) = ranks(1, run, {}, *flags)
    return _alone[flags]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("layout", "sequence_parallel"), CASES, ids=lambda v: NAME.format(*v) if isinstance(v, tuple) else "sp" * v
)
def test_every_layout_trains_as_one_process_does(ranks, layout, sequence_parallel, tied, dtype):
    """PITFALLS 14, 20, 21, 24, 26, 30: ten steps with dropout; bitwise the same beginning, then losses and norms."""
    flags = ["--dtype", dtype, "--dropout", "0.1", *(["--tie-embeddings"] if tied else [])]
    want = alone(ranks, *flags)
    parallel = [*flags, *(["--sequence-parallel"] if sequence_parallel else [])]
    results = ranks(math.prod(layout), run, names(layout), *parallel)
    hashes = {}
    for got in results:
        for key in ("losses", "norms"):
            assert got[key] == pytest.approx(want[key], rel=TOLERANCE[dtype], abs=0), key
        assert got["val"] == pytest.approx(want["val"], rel=10 * TOLERANCE[dtype])
        hashes |= got["hashes"]
    assert hashes == want["hashes"]
