"""Two hosts on one machine: network namespaces joined by a cable (a veth pair). Needs root, `ip` and `unshare`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def why_not() -> str:
    """Say why this machine can't have two hosts; "" where it can."""
    if os.geteuid() != 0:
        return "two hosts need root: `ip netns add` isn't permitted"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"two hosts need {', '.join(missing)}: apt-get install iproute2 util-linux hostname"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"network namespaces aren't permitted: {tried.stderr.decode()}"


class TwoHosts:
    """Hosts 0 and 1, called host-0 and host-1 by their programs."""

    def __init__(self) -> None:
        self.names = [f"mpcore{os.getpid()}-{host}" for host in (0, 1)]
        self.ends = [f"v{os.getpid()}-{host}"[:15] for host in (0, 1)]

    def ip(self, host: int, *words: str) -> str:
        """Run `ip` on a host."""
        return subprocess.run(["ip", "-n", self.names[host], *words], check=True, capture_output=True, text=True).stdout

    def plug(self, state: str) -> None:
        """Pull the cable ("down"), or plug it in again ("up")."""
        self.ip(1, "link", "set", self.ends[1], state)

    def start(self, host: int, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a Python program on a host."""
        words = [sys.executable, *command]
        inside = 'hostname "$0" && exec "$@"'
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", inside, f"host-{host}", *words],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": self.ends[host],
                 **variables},
        )  # fmt: skip

    def torchrun(self, *command: str, ranks: int = 2) -> list[subprocess.Popen[str]]:
        """Start `torchrun` on both hosts, with so many ranks on each."""
        both = f"--nnodes 2 --nproc-per-node {ranks} --master-addr {ADDRESSES[0]} --master-port 29400".split()
        launch = ["-m", "torch.distributed.run", *both, "--node-rank"]
        return [self.start(host, *launch, str(host), "-m", *command) for host in (0, 1)]

    def ranks(self, *command: str, port: int) -> list[subprocess.Popen[str]]:
        """Start two ranks on each host without torchrun, which itself waits long for a host that is cut off."""
        world = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port)}
        return [
            self.start(rank // 2, "-m", *command, **world, RANK=str(rank), LOCAL_RANK=str(rank % 2))
            for rank in range(4)
        ]


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two hosts, joined by a cable, and remove them and their programs at the end."""
    hosts = TwoHosts()
    try:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        a, b = hosts.ends
        hosts.ip(0, "link", "add", a, "type", "veth", "peer", "name", b, "netns", hosts.names[1])
        for host in (0, 1):
            hosts.ip(host, "link", "set", "lo", "up")
            hosts.ip(host, "addr", "add", f"{ADDRESSES[host]}/24", "dev", hosts.ends[host])
            hosts.ip(host, "link", "set", hosts.ends[host], "up")
        yield hosts
    finally:
        for name in hosts.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in found.split():
                subprocess.run(["kill", "-9", pid], check=False)
            subprocess.run(["ip", "netns", "del", name], check=False)


def finish(run: subprocess.Popen[str], timeout: float) -> tuple[int, str, str]:
    """Wait for the end of a program: its status and what it printed."""
    stdout, stderr = run.communicate(timeout=timeout)
    return run.returncode, stdout, stderr
