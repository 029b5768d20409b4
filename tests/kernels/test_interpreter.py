"""Runs the numeric tests of the kernels, `interpret/`, in two processes in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

FILES = sorted(Path(__file__).parent.glob("interpret/test_*.py"))


def test_kernels_in_the_interpreter():
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # its matrices are small; threads only wait
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    halves = [
        subprocess.Popen(command, env=os.environ | threads | {"TRITON_INTERPRET": "1", "INTERPRET_HALF": half}, **how)
        for half in "01"
    ]
    said = [half.communicate()[0] for half in halves]
    assert [half.returncode for half in halves] == [0, 0], "\n".join(said)
