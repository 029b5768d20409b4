"""Two hosts, joined by a cable that is pulled, and that is slow: what a run does, and whom it names."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.examples.test_survival_runs import FLAGS, losses, wait_for_steps
from tests.two_hosts import ADDRESSES, ROOT, TwoHosts, finish, two_hosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "two hosts")
MESH = ["--tp", "2", "--pp", "2", "--device", "cpu"]

START = """
import pathlib, sys, time
from mpcore import build_mesh
from mpcore.mesh import rendezvous
join = rendezvous.join_world
def late(*args):
    pathlib.Path(sys.argv[1], "met").touch()
    time.sleep(3)
    return join(*args)
if sys.argv[2] == "cut":
    rendezvous.join_world = late
began = time.monotonic()
try:
    mesh = build_mesh(tp=2, device_type="cpu", timeout=60 if sys.argv[2] == "both" else 5)
except ValueError as error:
    sys.exit(f"{error}, after {time.monotonic() - began:.0f} s")
print(mesh.job.size)
"""


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as made:
        yield made


def start(hosts: TwoHosts, folder: Path, what: str, port: int) -> list[subprocess.Popen[str]]:
    """A rank on each host, which builds a mesh."""
    return [
        hosts.start(host, "-c", START, str(folder), what, RANK=str(host), WORLD_SIZE="2", LOCAL_RANK="0",
                    LOCAL_WORLD_SIZE="1", MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(port))
        for host in (0, 1)
    ]  # fmt: skip


def test_two_hosts_build_a_mesh_and_a_host_that_never_comes_is_named(hosts, tmp_path):
    both, (first, second) = start(hosts, tmp_path, "both", 29401), start(hosts, tmp_path, "", 29402)
    second.kill()
    for run in both:
        assert finish(run, 90)[:2] == (0, "2\n")
    status, _, stderr = finish(first, 90)
    assert status == 1
    told = "of 2 ranks 1 did not arrive within 5 s. The others are on host-0: start the missing ones too, or read what"
    assert re.search(rf"{told} ended them, after [5-9] s", stderr), stderr
    finish(second, 10)


@pytest.mark.slow
def test_a_cable_pulled_during_the_start_is_named_on_both_hosts(hosts, tmp_path):
    runs = start(hosts, tmp_path, "cut", 29403)
    until = time.monotonic() + 60
    while not (tmp_path / "met").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.5)
    hosts.plug("down")
    began = time.monotonic()
    try:
        (_, _, here), (status, _, there) = (finish(run, 60) for run in runs)
    finally:
        hosts.plug("up")
    assert time.monotonic() - began < 5 + 20
    assert "rank 1 (host host-1) of 2 did not reach the check of the mesh within 5 s" in here, here
    assert status == 70
    assert re.search(rf"rank 1: on host-1: the mesh was not built .*{ADDRESSES[0]}:29403 gives no answer", there), there


@pytest.mark.slow
def test_two_hosts_train_as_one_and_a_cable_pulled_in_a_step_is_named_on_both(hosts, tmp_path, record_property):
    whole, two = tmp_path / "whole", tmp_path / "two"
    flags = [*FLAGS, *MESH, "--save-every", "4"]
    one = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m",
         "examples.gpt.pretrain", *flags, "--steps", "12", "--out", str(whole)], cwd=ROOT, check=False,
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert one.returncode == 0, one.stderr
    command = ["examples.gpt.pretrain", *flags, "--out", str(two), "--steps", "12", "--set", "timeout=8"]
    runs = hosts.ranks("tests.examples.faulty", "sleep", "0", "5", *command[1:], port=29404)
    wait_for_steps(runs[0], two, 5)  # rank 0 sleeps now
    hosts.plug("down")
    began = time.monotonic()
    try:
        told = [finish(run, 120)[2] for run in runs]
        took = time.monotonic() - began
    finally:
        hosts.plug("up")
    record_property("seconds to leave", took)
    assert took < 8 + 15 + 12  # the timeout, gloo's own, and the grace of the last words
    assert "ranks 2, 3 (host host-1) give no answer" in told[0] or "rank 2: no answer" in told[0], told[0]
    for text in told[2:]:
        assert f"the store of the run at {ADDRESSES[0]}:29404 gives no answer" in text, text
    for run in hosts.torchrun(*command, "--resume", "auto"):
        status, _, stderr = finish(run, 200)
        assert status == 0, stderr
    assert losses(two) == losses(whole)
