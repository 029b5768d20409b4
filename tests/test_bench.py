"""The benches are found by `pytest bench`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_bench_is_found():
    command = [sys.executable, "-m", "pytest", "bench", "--collect-only", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout
    for path in (ROOT / "bench").rglob("bench_*.py"):
        assert f"{path.relative_to(ROOT)}::" in ran.stdout
