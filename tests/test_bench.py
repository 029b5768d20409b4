"""`pytest bench` as pytest-benchmark's users know it, with device times that a plugin makes up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "bench" / "results").glob("*.json"))


def run_bench(folder, *options, **environment):
    command = [
        sys.executable, "-m", "pytest", str(ROOT / "bench" / "bench_kernels.py"), "-p", "tests.fake_device_clock", "-q",
    ]  # fmt: skip
    command += ["-k", "test_kernel and rms_norm and not add", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--benchmark-storage={folder}", "--benchmark-columns=median", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return ran.returncode, ran.stdout + ran.stderr


def test_rows_are_saved_and_compared_by_the_time_of_the_device(tmp_path):
    status, shown = run_bench(tmp_path, "--benchmark-save=a", f"--benchmark-json={tmp_path}/a.json")
    assert status == 0, shown
    # 30 kB in 10.02 us; 4 GB/s is the copy; eager 20.04 us; the fastest peer 12.525 us; 70 us of the host
    for part in ("3 GB/s       75 %  0.80x    70 us host", "3 tests", "missed: host us", "of 10 rows after 0:"):
        assert part in shown
    rows = json.loads((tmp_path / "a.json").read_text())["benchmarks"]
    assert {row["extra_info"]["provider"]: row["stats"]["median"] for row in rows} == pytest.approx(
        {"mpcore": 1.002e-5, "eager": 2.004e-5, "torch.compile": 1.2525e-5}
    )
    against = ("--benchmark-compare", "--benchmark-compare-fail=median:5%", "--quick")
    status, shown = run_bench(tmp_path, *against)
    assert status == 0, shown
    assert "(0001_a)" in shown, shown
    assert "(NOW)" in shown, shown
    status, shown = run_bench(tmp_path, *against, FAKE_SLOWER="1.06")
    assert status != 0, shown
    assert "Performance has regressed" in shown, shown


@pytest.mark.parametrize("file", RESULTS[-1:], ids=lambda path: path.stem)
def test_committed_results_can_be_compared(tmp_path, file):
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(file), "--columns=median"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "Name (time in" in ran.stdout, ran.stderr
    status, shown = run_bench(tmp_path, f"--benchmark-compare={file}", "--quick")
    assert status == 0, shown
