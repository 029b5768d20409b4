"""Runs the numeric tests of the kernels, `interpret/`, in a process in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_in_the_interpreter():
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # its matrices are small; threads only wait
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).parent / "interpret"]
    done = subprocess.run(command, env=os.environ | threads | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
