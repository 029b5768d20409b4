"""`pytest bench` as pytest-benchmark's users know it, with device times that a plugin makes up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import Forked

ROOT = Path(__file__).parents[1]
PYTEST = f"import os, sys, pytest; sys.path.insert(0, {str(ROOT)!r}); os.chdir(sys.argv[1]); " \
         "sys.exit(pytest.main(sys.argv[2:]))"  # fmt: skip
RESULTS = sorted((ROOT / "bench" / "results").glob("*.json"))


def run_bench(folder, *options, **environment):
    command = [str(folder), str(ROOT / "bench" / "bench_kernels.py"), "-p", "tests.fake_device_clock", "-q"]
    command += ["-k", "test_kernel and rms_norm and not add", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--benchmark-storage={folder}", "--benchmark-columns=median", *options]
    ran = Forked(PYTEST, *command, env=os.environ | environment)
    shown = "".join(ran.communicate(timeout=300))
    return ran.returncode, shown


def test_rows_are_saved_and_compared_by_the_time_of_the_device(tmp_path):
    files = f"--benchmark-json={tmp_path}/a.json", f"--benchmark-histogram={tmp_path}/time"
    status, shown = run_bench(tmp_path, "--benchmark-save=a", *files)
    assert status == 0, shown
    # 30 kB in 10.02 us; 4 GB/s is the copy; eager 20.04 us; the fastest peer 12.525 us; 70 us of the host
    for part in ("3 GB/s       75 %  0.80x    70 us host", "3 tests", "missed: host us", "of 10 rows after 0:"):
        assert part in shown
    rows = json.loads((tmp_path / "a.json").read_text())["benchmarks"]
    assert {row["extra_info"]["provider"]: row["stats"]["median"] for row in rows} == pytest.approx(
        {"mpcore": 1.002e-5, "eager": 2.004e-5, "torch.compile": 1.2525e-5}
    )
    drawn = [path.read_text() for path in tmp_path.glob("time*.svg")]  # one for each group
    assert len(drawn) == 2
    assert all(f"{name} " in svg for svg in drawn for name in ("mpcore", "eager", "torch.compile"))
    against = ("--benchmark-compare", "--benchmark-compare-fail=median:5%", "--quick")
    status, shown = run_bench(tmp_path, *against)
    assert status == 0, shown
    assert "(0001_a)" in shown, shown
    assert "(NOW)" in shown, shown
    status, shown = run_bench(tmp_path, *against, FAKE_SLOWER="1.06")
    assert status != 0, shown
    assert "Performance has regressed" in shown, shown


def test_a_run_that_is_cut_short_keeps_and_shows_what_it_measured(tmp_path):
    status, shown = run_bench(tmp_path, f"--benchmark-json={tmp_path}/a.json", FAKE_SIGTERM="1")
    assert status == 2, shown
    assert "3 GB/s       75 %  0.80x" in shown
    assert len(json.loads((tmp_path / "a.json").read_text())["benchmarks"]) == 3


def test_every_bench_is_found():
    ran = Forked(PYTEST, str(ROOT), "bench", "--collect-only", "-q", "-p", "no:cacheprovider")
    shown, _ = ran.communicate(timeout=300)
    assert ran.returncode == 0, shown
    for path in (ROOT / "bench").rglob("bench_*.py"):
        assert f"{path.relative_to(ROOT)}::" in shown


def test_committed_results_can_be_compared(tmp_path):
    command = [sys.executable, "-m", "pytest_benchmark", "compare", *map(str, RESULTS), "--columns=median"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "Name (time in" in ran.stdout, ran.stderr
    status, shown = run_bench(tmp_path, f"--benchmark-compare={RESULTS[-1]}", "--quick")
    assert status == 0, shown
