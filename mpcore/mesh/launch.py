"""Read the launcher's environment variables: torchrun's, or those of a Slurm step of several tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ALONE = "to run every task alone on purpose, start it with `env -u SLURM_STEP_ID`"


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment variables say about this process.

    Attributes:
        rank, world_size: this process's rank in the job, and the number of processes. 0 and 1 without a launcher.
        local_rank, local_size: this process's rank on its node, and the number of processes there. If no variable says
            it: `rank` and 1; `local_rank` + 1 if only LOCAL_RANK is set.
        address, port: where the ranks meet, on the host of rank 0.
        launcher: "torchrun", "Slurm", "variables" (another launcher sets RANK etc.), or "" for none.
        job: a name of the world, so that a rank detects another world at its address.
        keeps_store: whether this process hosts the store of the rendezvous.
        node_gpus: the number of GPUs of the Slurm step on this node. 0: unknown.
        one_host: whether the variables say that all processes are on this host.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0
    launcher: str = ""
    job: str = ""
    keeps_store: bool = False
    node_gpus: int = 0
    one_host: bool = False

    def place(self, gpus: int) -> tuple[int, int]:
        """Return this process's rank among the processes that share the `gpus` that it sees, and their number.

        If there are fewer than `node_gpus`, Slurm gave each task its own GPUs, and the result is (0, 1).
        """
        return (0, 1) if 0 < gpus < self.node_gpus or self.local_size == 1 else (self.local_rank, self.local_size)


def read_launch(variables: Mapping[str, str], running: tuple[int, int] | None = None) -> Launch:
    """Read the launcher's variables from `variables`.

    The variables that torchrun sets come first: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT. Without RANK, in a Slurm step of several tasks, Slurm's own variables are read; MASTER_ADDR and
    MASTER_PORT then override the address and the port. In every other case, also in a Slurm batch script, the process
    is alone.

    Args:
        variables: the environment, such as `os.environ`.
        running: (rank, size) of a world that runs already. The variables then give only the rank on the node.

    Raises:
        ValueError: if a variable is missing, is no number, or contradicts another.

    Example:
        >>> from mpcore.mesh import read_launch
        >>> slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
        >>> slurm |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
        >>> launch = read_launch(slurm | {"SLURM_STEP_NODELIST": "gpu[08-09]"})
        >>> launch.rank, launch.world_size, launch.local_rank, launch.local_size, launch.address
        (2, 3, 0, 1, 'gpu08')
    """
    tasks = _number(variables, "SLURM_STEP_NUM_TASKS", 1) if variables.get("SLURM_STEP_ID") else 1
    if running is not None:
        local_rank = _number(variables, "SLURM_LOCALID", running[0]) if tasks > 1 else running[0]
        local_size = _number(variables, "LOCAL_WORLD_SIZE", 1) if "TORCHELASTIC_RUN_ID" in variables else 1
        return Launch(*running, _number(variables, "LOCAL_RANK", local_rank), local_size)
    elastic = "TORCHELASTIC_RUN_ID" in variables
    if tasks > 1 and elastic and _number(variables, "GROUP_WORLD_SIZE", 1) == 1:
        raise ValueError(
            f"Slurm started {tasks} tasks, and each runs a torchrun with a world of its own: start one task a node "
            f"(--ntasks-per-node=1) and give torchrun --nnodes and --rdzv-endpoint, or leave torchrun out"
        )
    if elastic or variables.get("RANK"):
        return _read_torchrun(variables, tasks, elastic)
    size = _number(variables, "WORLD_SIZE", tasks)
    if tasks > 1:
        if size != tasks:
            raise ValueError(
                f"WORLD_SIZE is {size} in a Slurm step of {tasks} tasks, and RANK isn't set: unset WORLD_SIZE; {ALONE}"
            )
        return _read_slurm(variables, tasks)
    if size > 1:
        return _read_torchrun(variables, tasks, elastic)
    return Launch()


def _read_torchrun(variables: Mapping[str, str], tasks: int, elastic: bool) -> Launch:
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    alone = variables.get("WORLD_SIZE") == "1" and not elastic
    missing = [] if alone else [name for name in wanted if not variables.get(name)]
    if missing:
        others = ", ".join(f"{name} is {variables[name]}" for name in wanted if variables.get(name))
        raise ValueError(
            f"{others or 'torchrun started this'}, but {', '.join(missing)} isn't set: start with torchrun or srun, or "
            f"set them for each process (and LOCAL_RANK and LOCAL_WORLD_SIZE, for its GPU)"
        )
    rank, size = _number(variables, "RANK", 0), _number(variables, "WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise ValueError(f"RANK {rank} isn't below WORLD_SIZE {size}: number all processes of all hosts from 0")
    if alone and tasks > 1:
        raise ValueError(f"WORLD_SIZE is 1 in a Slurm step of {tasks} tasks: unset RANK and WORLD_SIZE; {ALONE}")
    if alone:
        return Launch()
    known = variables.get("LOCAL_RANK")
    local_rank = _number(variables, "LOCAL_RANK", rank)
    local_size = _number(variables, "LOCAL_WORLD_SIZE", local_rank + 1 if known else 1)
    if not known and local_size > 1:
        raise ValueError(f"LOCAL_WORLD_SIZE is {local_size}, but LOCAL_RANK isn't set: set both, or neither")
    if known and not 0 <= local_rank < local_size:
        raise ValueError(f"LOCAL_RANK {local_rank} isn't below LOCAL_WORLD_SIZE {local_size}: number them from 0")
    return Launch(
        rank, size, local_rank, local_size, variables["MASTER_ADDR"], _port(variables, 0),
        launcher="torchrun" if elastic else "variables", job="a world started by its variables",
        keeps_store=rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        one_host=_number(variables, "LOCAL_WORLD_SIZE", 0) == size,
    )  # fmt: skip


def _read_slurm(variables: Mapping[str, str], tasks: int) -> Launch:
    names = ("JOB_ID", "STEP_ID", "PROCID", "LOCALID", "NODEID", "STEP_NODELIST", "STEP_TASKS_PER_NODE")
    missing = [f"SLURM_{name}" for name in names if not variables.get(f"SLURM_{name}")]
    if missing:
        raise ValueError(f"a Slurm step of {tasks} tasks, but {', '.join(missing)} isn't set: start the task with srun")
    job, step, rank, local_rank, node = (_number(variables, f"SLURM_{name}", 0) for name in names[:5])
    sizes = tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
    if not (0 <= rank < tasks == sum(sizes) and 0 <= node < len(sizes) and 0 <= local_rank < sizes[node]):
        raise ValueError(
            f"task {rank} of {tasks}, {local_rank} on node {node}, doesn't fit {sizes} tasks a node: jobs of several "
            f"components need RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    address = variables.get("MASTER_ADDR") or first_host(variables["SLURM_STEP_NODELIST"])
    return Launch(
        rank, tasks, local_rank, sizes[node], address,
        _port(variables, 10_000 + (101 * job + step) % 20_000),  # below the ephemeral ports
        launcher="Slurm", job=f"Slurm step {job}.{step}", keeps_store=rank == 0,
        node_gpus=_number(variables, "SLURM_GPUS_ON_NODE", 0), one_host=sizes[node] == tasks,
    )  # fmt: skip


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `first_host("a[01-03,7],b2")` is `a01`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)[0])


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node of a Slurm step: `tasks_per_node("2(x2),1")` is [2, 2, 1]."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry) for entry in text.split(",")]
    if None in found:
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is no list such as '2(x2),1'")
    return [int(entry[1]) for entry in found if entry for _ in range(int(entry[2] or 1))]


def _port(variables: Mapping[str, str], default: int) -> int:
    port = _number(variables, "MASTER_PORT", default)
    if not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT {port} isn't between 1 and 65535")
    return port


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name) or str(default)
    if not re.fullmatch(r"-?\d+", text):
        raise ValueError(f"{name}={text!r} is no whole number")
    return int(text)
