"""The example's numbers of a recorded commit: thirty short runs, whatever was rebuilt since.

`make soak` has all of them. `make test` leaves out those of several ranks that neither round nor are in `make quick`:
`tests/examples/test_layouts.py` compares their layouts with one process.
"""

from __future__ import annotations

import json

import pytest

from tests import quick
from tests.recorded_runs import RECORD, RUNS, rerun

RECORDED = json.loads(RECORD.read_text())
# Products in half precision are another's on another CPU; all else is float64.
TOLERANCE = {
    "fp16 with a scale": 1e-3, "bf16 autocast": 1e-3, "bf16": 1e-3, "fp8": 1e-6, "adamw with bf16 moments": 1e-6,
}  # fmt: skip


SHORT = [name for name, (ranks, _) in RUNS.items() if ranks == 1 or name in {*TOLERANCE, *quick.RUNS}]


@pytest.mark.parametrize("name", quick.some(*SHORT, of=RUNS))
def test_a_run_has_its_recorded_numbers(ranks, name):
    found, want = rerun(ranks, name), RECORDED[name]
    for what in ("losses", "norms", "validation", "weights"):
        assert found[what] == pytest.approx(want[what], rel=TOLERANCE.get(name, 1e-12), abs=0), what
