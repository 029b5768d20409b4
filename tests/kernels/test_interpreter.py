"""Runs the numeric tests of the kernels, `interpret/`, in two processes in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

FILES = sorted(Path(__file__).parent.glob("interpret/test_*.py"), key=lambda file: file.stat().st_size)


def test_kernels_in_the_interpreter():
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # its matrices are small; threads only wait
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    how = {"env": os.environ | threads | {"TRITON_INTERPRET": "1"}, "stdout": subprocess.PIPE, "text": True}
    halves = [subprocess.Popen([*command, *FILES[i::2]], stderr=subprocess.STDOUT, **how) for i in range(2)]
    said = [half.communicate()[0] for half in halves]
    assert [half.returncode for half in halves] == [0, 0], "\n".join(said)
