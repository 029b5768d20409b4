"""Two processes that run `interpret/`, beside all other tests: in those, four ranks leave a third of two cores idle."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TEST = "test_kernels_in_the_interpreter"
FILES = sorted(Path(__file__).parent.glob("interpret/test_*.py"))


class Interpreters:
    """The processes, started at the lowest priority: what is timed beside them is not slowed down."""

    KEY = pytest.StashKey["Interpreters"]()

    def __init__(self) -> None:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # its matrices are small; threads only wait
        command = ["nice", "-n", "19", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, FILES)]
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.halves = [
            subprocess.Popen(
                command,
                env=os.environ | threads | {"TRITON_INTERPRET": "1", "INTERPRET_HALF": half},
                stdout=self.said,
                stderr=subprocess.STDOUT,
            )
            for half in "01"
        ]

    def wait(self) -> tuple[bool, str]:
        """Whether one failed, and what both said."""
        codes = [half.wait() for half in self.halves]
        self.said.seek(0)
        return any(codes), self.said.read()

    def stop(self) -> None:
        """End what still runs."""
        for half in self.halves:
            half.kill()
            half.wait()
        self.said.close()
