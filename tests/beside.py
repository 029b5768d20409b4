"""Tests that run in processes of their own beside all others, which keep hardly more than one core busy.

The ranks of a test wait for each other, and many tests need one process. So a second pool runs a third of the tests of
ranks. They start before the collection, which takes as long as some of them.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
ASKS = "test_kernels_in_the_interpreter"  # which waits for them
INTERPRETED = set(TESTS.glob("kernels/interpret/test_*.py"))
NO_RANKS = {
    ".": ("checkpoint_checksum", "cross_replica_hash", "floors", "notebooks", "plan", "replay"),
    "examples": ("data", "prepare", "tokenizer"), "laws": ("steps",), "layers": ("rope",),
    "pipeline": ("draw", "partition", "prove", "schedules"),
}  # fmt: skip
RANKS = {
    ".": ("collectives", "data_parallel", "gradients", "layout", "ledger", "local_updates", "lora", "memory",
          "odd_models", "optim", "parallelize", "plans", "pretrained", "recompute"),
    "oracles": ("oracles",),
    "pipeline": ("memory",),
    "training": ("bfloat16", "bitwise"),
}  # fmt: skip


def files(names: dict[str, tuple[str, ...]]) -> set[Path]:
    """The test files of these names in these folders. A name without a file ends every command of pytest."""
    return {(TESTS / folder / f"test_{name}.py").resolve(strict=True) for folder in names for name in names[folder]}


WAITS = {".": ("attacks", "control_plane", "launch", "survival", "two_hosts"), "training": ("mistakes",),
         "workers": ("runs", "workers")}  # fmt: skip
WAITING = set(TESTS.glob("slurm/test_*.py")) | files(WAITS)
"""Tests that mostly wait: they have deadlines of their own, and therefore the first priority."""
RANKLESS = files(NO_RANKS) | set(TESTS.glob("kernels/test_*.py")) - files({"kernels": ("interpreter",)})
LAW = files({"laws": ("pairs",)})
RANKED = files(RANKS) | set(TESTS.glob("layers/test_*.py")) - RANKLESS
WHOLE = ("not slow", "slow or not slow")


def is_whole_suite(config: pytest.Config) -> bool:
    """Whether the command runs every test of `make test` or `make soak`."""
    chosen = config.option
    some = chosen.keyword or chosen.deselect or chosen.collectonly or getattr(chosen, "lf", False)
    return [Path(arg).resolve() for arg in config.args] == [TESTS] and chosen.markexpr in WHOLE and not some


class Beside:
    """The processes, most of them at a low priority: what is timed beside them is not slowed down.

    One runs the kernels in Triton's interpreter. For the whole suite a second runs what needs no ranks, a third the
    law of pairs, a fourth what mostly waits, and a fifth, as long as no long proofs are asked for, what needs a pool.
    With a GPU, which they would share, these four don't run.

    Args:
        config: of the command.
        whole: whether the command runs the whole suite.

    Attributes:
        paths: the test files that run beside the others, and not with them.
    """

    KEY = pytest.StashKey["Beside"]()

    def __init__(self, config: pytest.Config, whole: bool) -> None:
        pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # matrices are small; threads only wait
        marked = ["-m", config.option.markexpr]
        moved = [(19, RANKLESS), (10, LAW), (0, WAITING)] if whole and not torch.cuda.is_available() else []
        moved += [(5, RANKED)] if moved and config.option.markexpr == "not slow" else []
        runs = [(19, INTERPRETED, {"TRITON_INTERPRET": "1"}), *((*each, {}) for each in moved)]
        self.paths = {path for _, paths in moved for path in paths}
        self.processes = []
        for nice, paths, environment in runs:
            said = tempfile.TemporaryFile("w+")  # noqa: SIM115
            process = subprocess.Popen(
                ["nice", "-n", str(nice), *pytest_command, *marked, *map(str, sorted(paths))],
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
