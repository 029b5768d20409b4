"""Tests that run in processes of their own beside all others, which keep hardly more than one core busy.

The ranks of a test wait for each other, and many tests need one process. So a second pool runs a third of the tests of
ranks. None of them has a deadline of its own.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
ASKS = "test_kernels_in_the_interpreter"  # which waits for them
INTERPRETED = set(TESTS.glob("kernels/interpret/test_*.py"))
NO_RANKS = {
    ".": ("bench_report", "checkpoint_checksum", "checkpoint_fuzz", "cross_replica_hash", "floors", "memory_tables",
          "mutations", "notebooks", "plan", "replay"),
    "examples": ("data", "latent_attention", "prepare", "tokenizer"),
    "layers": ("rope",),
    "pipeline": ("draw", "partition", "prove", "schedules"),
}  # fmt: skip
RANKS = {
    ".": ("collectives", "data_parallel", "gradients", "layout", "ledger", "lora", "memory", "odd_models", "optim",
          "parallelize", "plans", "pretrained", "recompute"),
    "examples": ("hf",),
    "oracles": ("oracles",),
    "pipeline": ("memory",),
    "training": ("bfloat16", "bitwise"),
}  # fmt: skip


def files(names: dict[str, tuple[str, ...]]) -> set[Path]:
    """The test files of these names in these folders."""
    return {TESTS / folder / f"test_{name}.py" for folder, each in names.items() for name in each}


LAST = set(TESTS.glob("slurm/test_*.py")) | files({".": ("two_hosts", "gpu_hour")})
"""Tests with deadlines of their own. They run last, beside what has the lowest priority: they mostly wait."""
RANKLESS = files(NO_RANKS) | set(TESTS.glob("kernels/test_*.py")) - files({"kernels": ("interpreter",)})
RANKED = files(RANKS) | set(TESTS.glob("layers/test_*.py")) - RANKLESS


class Beside:
    """The processes, started at a low priority: what is timed beside them is not slowed down.

    Two run the kernels in Triton's interpreter. In the whole suite a third runs what needs no ranks, and a fourth, as
    long as no long proofs are asked for, what needs a pool. With a GPU, which they would share, these two don't run.

    Args:
        session: after its collection; what runs beside it is taken out.
    """

    KEY = pytest.StashKey["Beside"]()

    def __init__(self, session: pytest.Session) -> None:
        pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # matrices are small; threads only wait
        chosen = session.config.option
        marked = ["-m", chosen.markexpr]
        interpret = [{"TRITON_INTERPRET": "1", "INTERPRET_HALF": half} for half in "01"]
        runs = [(19, INTERPRETED, marked, environment) for environment in interpret]
        if any(item.path.parent.name == "layers" for item in session.items) and not torch.cuda.is_available():
            moved = [(19, RANKLESS), (5, RANKED)] if chosen.markexpr == "not slow" else [(19, RANKLESS)]
            runs += [(*each, [*marked, "-k", chosen.keyword], {}) for each in moved]
            session.items[:] = [item for item in session.items if not any(item.path in each for _, each in moved)]
        self.processes = []
        for nice, paths, options, environment in runs:
            said = tempfile.TemporaryFile("w+")  # noqa: SIM115
            process = subprocess.Popen(
                ["nice", "-n", str(nice), *pytest_command, *options, *map(str, sorted(paths))],
                env=os.environ | threads | environment, stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self.processes.append((process, said))
        self.summaries: list[str] = []

    def wait_for_ranks(self) -> None:
        """Wait for the fourth process: its ranks would make tests with deadlines late."""
        for process, _ in self.processes[3:]:
            process.wait()

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
