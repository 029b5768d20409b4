"""Tests that run in processes of their own beside all others: in those, four ranks leave a third of two cores idle."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
ASKS = "test_kernels_in_the_interpreter"  # the last test, which waits for them
INTERPRETED = sorted(TESTS.glob("kernels/interpret/test_*.py"))
NO_RANKS = {
    ".": ("bench_report", "checkpoint_checksum", "checkpoint_fuzz", "floors", "memory_tables", "mutations", "plan"),
    "examples": ("data", "latent_attention", "prepare", "tokenizer"),
    "layers": ("rope",),
    "pipeline": ("draw", "partition", "prove", "schedules"),
}
RANKLESS = sorted(
    {
        *TESTS.glob("kernels/test_*.py"),
        *(TESTS / folder / f"test_{name}.py" for folder, names in NO_RANKS.items() for name in names),
    }
    - {TESTS / "kernels" / "test_interpreter.py"}
)


class Beside:
    """The processes, started at the lowest priority: what is timed beside them is not slowed down.

    Two run the kernels in Triton's interpreter. In the whole suite a third runs what needs no ranks, unless there is a
    GPU, which they would share.

    Args:
        session: after its collection; what runs beside it is taken out.
    """

    KEY = pytest.StashKey["Beside"]()

    def __init__(self, session: pytest.Session) -> None:
        low, pytest_command = ["nice", "-n", "19"], [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # matrices are small; threads only wait
        chosen = session.config.option
        marked = ["-m", chosen.markexpr]
        interpret = [{"TRITON_INTERPRET": "1", "INTERPRET_HALF": half} for half in "01"]
        runs = [(INTERPRETED, marked, environment) for environment in interpret]
        others = [item for item in session.items if item.path not in RANKLESS]
        if any(item.path.parent.name == "layers" for item in others) and not torch.cuda.is_available():
            session.items[:] = others
            runs += [(RANKLESS, [*marked, "-k", chosen.keyword], {})]
        self.processes = []
        for files, options, environment in runs:
            said = tempfile.TemporaryFile("w+")  # noqa: SIM115
            process = subprocess.Popen(
                [*low, *pytest_command, *options, *map(str, files)],
                env=os.environ | threads | environment, stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self.processes.append((process, said))
        self.summaries: list[str] = []

    def wait(self) -> str:
        """What those said that failed."""
        failed = ""
        for process, said in self.processes:
            code = process.wait()
            said.seek(0)
            text = said.read()
            self.summaries.append(text.rstrip().rpartition("\n")[2])
            failed += text if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else ""
        return failed

    def stop(self) -> None:
        """End what still runs."""
        for process, said in self.processes:
            process.send_signal(signal.SIGINT)
            process.wait()
            said.close()
