"""Count what two hosts send each other: `python -m tests.two_hosts_bytes hsdp|diloco STEPS`, a rank of four.

Ranks 0 and 1 are on host 0. Rank 0 prints, in JSON, the bytes that host 0 sent through the cable, those that the ranks'
ledgers count between the hosts, and the seconds of all steps.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mpcore as mp
from mpcore.experimental import LocalUpdates
from mpcore.mesh.agreement import exchange
from mpcore.tools.analysis import CommunicationCounter

WIDTH, BLOCKS, EVERY = 768, 4, 5


def sent() -> int:
    """Bytes that this host has sent through the cable, without the headers of Ethernet, IP and TCP."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    words = next(line for line in lines if os.environ["GLOO_SOCKET_IFNAME"] in line).split(":")[1].split()
    return int(words[8]) - 66 * int(words[9])


def between_hosts(ledger: CommunicationCounter) -> float:
    """Bytes that this rank sends to the other host: of the links of a ring over both, two lie between them."""
    total = 0.0
    for axis, volume in ledger.volumes().items():
        ranks = ledger.ranks(axis)
        if {rank // 2 for rank in ranks} == {0, 1}:
            total += volume * (len(ranks) - 1) / len(ranks) * (2 / len(ranks))
    return total


def main(kind: str, steps: int) -> None:
    """Train, and print what was sent."""
    mesh = mp.build_mesh(worlds=2 if kind == "diloco" else 1, device_type="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    policies: dict[str, Any] = {"data": mp.Zero(3, replicate=2)}
    if kind == "diloco":
        policies = {"data": mp.Zero(3), "observers": [LocalUpdates(every=EVERY)]}
    run = mp.prepare(
        model, mesh, blocks=list(model), initialize=False, loss=lambda y, target: y[:, 0].pow(2).sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        **policies,
    )  # fmt: skip
    x, target = torch.ones(2, WIDTH), torch.zeros(2, dtype=torch.long)

    def step() -> None:
        run.forward_backward(x, target)
        run.optimizer_step()

    for _ in range(EVERY):  # connections are made, and the workers merge once
        step()
    time.sleep(0.5)  # what the socket of the first steps still holds is sent
    before, began = exchange(None, sent(), mesh.job.group)[0], time.perf_counter()
    with CommunicationCounter(mesh) as ledger:
        for _ in range(steps):
            step()
    seconds = time.perf_counter() - began
    counted = sum(exchange(None, between_hosts(ledger), mesh.job.group)[:2])
    time.sleep(0.5)
    after = exchange(None, sent(), mesh.job.group)[0]
    if mesh.job.rank == 0:
        print(json.dumps({"sent": after - before, "counted": counted, "seconds": seconds, "table": str(ledger)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
