"""A real Slurm of two nodes on this machine: srun as launcher, requeue after a signal, a killed rank, a lost node."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.gpt.pretrain import main
from examples.own_model import train
from mpcore.checkpoint import latest
from tests.examples.test_pretrain import TINY

ROOT = Path(__file__).parents[2]
INSTALL = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
PRETRAIN = ["-m", "examples.gpt.pretrain", "--resume", "auto"]
FLAGS = [*TINY, "--warmup", "2", "--eval-every", "0", "--micro-batch", "1"]


@dataclass(frozen=True)
class Slurm:
    """A running Slurm: its folder, and the environment of its commands."""

    folder: Path
    environment: dict[str, str]

    def start(self, *command: str) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, text=True, **pipes)  # type: ignore[call-overload]

    def run(self, *command: str, timeout: float = 100) -> tuple[int, str, str]:
        run = self.start(*command)
        stdout, stderr = run.communicate(timeout=timeout)
        return run.returncode, stdout, stderr

    def submit(self, log: Path, *words: str, chdir: Path = ROOT) -> str:
        """Submit the script of the examples on both nodes. Return the job's number.

        The environment is this process's, and flags replace the folder, the partition and the sizes. It
        starts again what ran for 5 s, not for an hour.
        """
        script, found = re.subn(r"^source .*\n", "", SCRIPT.read_text(), flags=re.MULTILINE)
        assert found == 1
        copy = log.with_suffix(".sbatch")
        assert "$SECONDS -gt 3600 " in script
        copy.write_text(script.replace("$SECONDS -gt 3600 ", "$SECONDS -gt 5 "))
        status, job, stderr = self.run(
            "sbatch", "--parsable", "--export=ALL", "--partition=all", "-N2", "--ntasks-per-node=1",
            "--cpus-per-task=1", "--gpus-per-node=0", f"--chdir={chdir}", f"--output={log}", str(copy), *words,
        )  # fmt: skip
        assert status == 0, stderr
        return job.strip()

    def pids(self, *words: str) -> list[int]:
        """The processes of this Slurm's nodes whose environment or command line has these words."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                text = (process / "cmdline").read_bytes() + b"\0" + (process / "environ").read_bytes()
            except OSError:
                continue
            if str(self.folder).encode() in text and all(word.encode() in text for word in words):
                found.append(int(process.name))
        return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "srun", "munged")):
        pytest.skip(f"Slurm isn't here: {INSTALL}")
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a Slurm of its own needs root and mount namespaces")
    folder = tmp_path_factory.mktemp("slurm")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1] % 20_000 + 10_000
    command = ["timeout", "60", "bash", Path(__file__).parent / "cluster.sh", folder, str(port)]
    started = subprocess.run(command, capture_output=True, text=True, check=False)
    mine = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    mine |= {"SLURM_CONF": f"{folder}/slurm.conf", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    try:
        logs = "".join(f"\n{file.name}:\n{file.read_text()[-2000:]}" for file in folder.glob("log/*"))
        assert started.returncode == 0, f"{started}{logs}"
        yield Slurm(folder, mine)
        subprocess.run(["scancel", "--state=RUNNING"], env=mine, check=False)
    finally:
        for file in folder.glob("*.pid"):
            os.kill(int(file.read_text()), signal.SIGTERM)


def losses(out: Path) -> list[tuple[int, float]]:
    file = out / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(r["step"], r["loss"]) for r in records]


def wait(what: str, done, seconds: float = 100, pause: float = 0.02) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, what
        time.sleep(pause)


def own_model() -> str:
    """On a rank of the pool, a world of torch's own: what each rank of tests.slurm.train prints."""
    return " ".join(loss.hex() for loss in train(tp=2, steps=3))


class Jobs:
    """Three jobs that run at once, as each waits more than it computes: the tests below look at what became of them."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.again, self.killed, self.log = folder / "again", folder / "killed", folder / "log"
        self.flags = [*FLAGS, "--tp", "2", "--steps", "80", "--save-every", "100000", "--dropout", "0.1"]
        self.job = slurm.submit(self.log, *PRETRAIN, *self.flags, "--out", str(self.again))
        self.unequal = slurm.start("srun", "-N2", "-n4", "--distribution=plane=3", "python", "-m", "tests.slurm.train")
        fault = ("python", "-m", "tests.examples.faulty", "kill", "1", "7", *FLAGS)
        flags = ["--steps", "100000", "--tp", "2", "--save-every", "3", "--out", str(self.killed)]
        self.fault = slurm.start("srun", "-n2", "--kill-on-bad-exit=0", "--wait=60", *fault, *flags)


@pytest.fixture(scope="module")
def jobs(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(slurm, tmp_path_factory.mktemp("jobs"))
    yield jobs
    for run in (jobs.unequal, jobs.fault):
        run.kill()
        run.communicate()


def test_a_job_that_is_told_to_stop_saves_requeues_and_goes_on_bitwise(slurm, jobs, ranks, tmp_path):
    """The script of the examples, asked to stop by the signal that --signal=TERM sends."""
    wait("a step", lambda: losses(jobs.again))
    assert slurm.run("scancel", "--signal=TERM", jobs.job)[0] == 0
    assert ranks(2, main, [*jobs.flags, "--out", str(tmp_path)]) == [0, 0]
    wait("the job's end", lambda: slurm.run("squeue", "-h", "-j", jobs.job)[1] == "", pause=0.3)
    printed = jobs.log.read_text()
    stopped = re.search(r"resumed after step (\d+)", printed)
    assert stopped, printed
    assert 1 <= int(stopped[1]) < 80
    found = losses(jobs.again)
    assert found[-1][0] == 79
    assert found == losses(tmp_path)


def test_srun_trains_one_model_on_unequal_nodes_with_the_losses_of_ranks_without_slurm(jobs, ranks):
    """Three tasks on one node, one on the other."""
    printed, stderr = jobs.unequal.communicate(timeout=100)
    assert jobs.unequal.returncode == 0, stderr
    found = sorted(line.split(maxsplit=2) for line in printed.splitlines() if re.match(r"\d/4 ", line))
    assert [(rank, place) for rank, place, _ in found] == [
        ("0/4", "0/3"), ("1/4", "1/3"), ("2/4", "2/3"), ("3/4", "0/1"),
    ]  # fmt: skip
    (expected,) = set(ranks(4, own_model))
    assert len(expected.split()) == 3
    assert {bits for _, _, bits in found} == {expected}


def test_a_killed_rank_is_named_and_the_others_leave(jobs):
    _, stderr = jobs.fault.communicate(timeout=60)
    assert jobs.fault.returncode in (70, 137), stderr
    assert "rank 0: stopped, because rank 1" in stderr
    assert "killed, or cut off" in stderr
    assert latest(jobs.killed / "checkpoints") is not None


@pytest.mark.parametrize("script", sorted((ROOT / "examples" / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_slurm_would_run_the_example(slurm, script):
    status, _, stderr = slurm.run("sbatch", "--test-only", "--partition=all", f"--chdir={ROOT}", str(script))
    assert status == 0, stderr
    assert "to start at" in stderr


@pytest.mark.slow
def test_the_program_and_script_of_the_page_on_launching_save_and_resume(slurm, tmp_path):
    page = (ROOT / "docs" / "launch.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    log = tmp_path / "log"
    job = slurm.submit(log, "train.py", "--tp", "2", "--steps", "400", chdir=tmp_path)
    wait("a step", lambda: log.exists() and "step 3: " in log.read_text())
    assert slurm.run("scancel", "--signal=TERM", job)[0] == 0
    wait("the job's end", lambda: slurm.run("squeue", "-h", "-j", job)[1] == "", pause=0.3)
    steps = [int(step) for step in re.findall(r"^step (\d+): loss", log.read_text(), re.MULTILINE)]
    assert steps == list(range(1, 401)), log.read_text()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert len(saved) == 2, saved  # the one of the signal, and the last
    assert saved[1] == "step-00000400"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [10, 300])
def test_a_job_whose_node_is_lost_starts_again_by_itself(slurm, tmp_path, seconds):
    """Node n1 loses its daemon and all of its processes at once.

    After 10 s Slurm notices, and requeues the job. Before 300 s, its default, the other ranks have left, and the script
    requeues the job.
    """
    conf = slurm.folder / "slurm.conf"
    conf.write_text(re.sub("SlurmdTimeout=.*", f"SlurmdTimeout={seconds}", conf.read_text()))
    assert slurm.run("scontrol", "reconfigure")[0] == 0
    flags = [*FLAGS, "--dp", "2", "--steps", "200", "--save-every", "20"]
    out, log = tmp_path / "out", tmp_path / "log"
    job = slurm.submit(log, *PRETRAIN, *flags, "--out", str(out))
    wait("a checkpoint", lambda: latest(out / "checkpoints") is not None)
    tasks = slurm.pids("SLURMD_NODENAME=n1")
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in tasks}
    steps = parents & set(slurm.pids("slurmstepd: "))
    assert tasks
    assert steps
    for pid in {*slurm.pids("slurmd\0-N\0n1"), *steps, *tasks}:
        os.kill(pid, signal.SIGKILL)
    if seconds == 10:
        wait("that Slurm notices", lambda: "down" in slurm.run("sinfo", "-h", "-n", "n1", "-o", "%T")[1], pause=0.3)
    else:
        wait("the script's end", lambda: slurm.run("squeue", "-h", "-j", job, "-o", "%T")[1] != "RUNNING", 150, 0.3)
        assert "down" not in slurm.run("sinfo", "-h", "-n", "n1", "-o", "%T")[1]
    again = f"mount --bind {slurm.folder}/hosts /etc/hosts; slurmd -N n1"
    assert slurm.run("unshare", "-m", "--propagation", "private", "bash", "-c", again)[0] == 0
    wait("the job's end", lambda: slurm.run("squeue", "-h", "-j", job)[1] == "", 200, 0.3)
    assert "resumed after step" in log.read_text()
    assert losses(out)[-1][0] == 199
