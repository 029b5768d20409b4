"""What launchers tell a process, and wrong launches: each named by one line that says what to do."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from mpcore import build_mesh
from mpcore.mesh import Launch, build, choose_device, read_launch
from mpcore.mesh.launch import first_host, tasks_per_node
from mpcore.mesh.rendezvous import enter_world, open_store, start_world
from tests.forked import Forked
from tests.quick import some

VARIABLES = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "a", "MASTER_PORT": "29400"}  # fmt: skip
ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}


def step(procid: int, localid: int, node: int, tasks: str, job: int = 7, number: int = 0) -> dict:
    """The variables of one task, as Slurm 22.05 sets them."""
    return {
        "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(number), "SLURM_STEP_NUM_TASKS": str(sum(tasks_per_node(tasks))),
        "SLURM_PROCID": str(procid), "SLURM_LOCALID": str(localid), "SLURM_NODEID": str(node),
        "SLURM_STEP_NODELIST": "n[0-2]", "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    }  # fmt: skip


def without(variables: dict, *names: str) -> dict:
    return {name: value for name, value in variables.items() if name not in names}


BY_HAND = Launch(3, 4, 1, 2, "a", 29400, "variables", "a world started by its variables")
SLURM = Launch(4, 5, 0, 1, "n0", 10_707, "Slurm", "Slurm step 7.0")


@pytest.mark.parametrize(("variables", "launch"), [
    ({}, Launch()), ({"WORLD_SIZE": "1"}, Launch()), ({"WORLD_SIZE": "1", "RANK": "0"}, Launch()), (VARIABLES, BY_HAND),
    (without(VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), replace(BY_HAND, local_rank=3, local_size=1)),
    (without(VARIABLES, "LOCAL_WORLD_SIZE"), BY_HAND), (step(1, 1, 0, "2"), replace(SLURM, rank=1, world_size=2,
                                                         local_rank=1, local_size=2, one_host=True)),
    (VARIABLES | {"LOCAL_WORLD_SIZE": "4"}, replace(BY_HAND, local_size=4, one_host=True)),
    (without(VARIABLES | {"LOCAL_RANK": "3"}, "LOCAL_WORLD_SIZE"), replace(BY_HAND, local_rank=3, local_size=4)),
    (VARIABLES | {"RANK": "0"}, replace(BY_HAND, rank=0, keeps_store=True)),
    (VARIABLES | ELASTIC, replace(BY_HAND, launcher="torchrun")),
    (VARIABLES | ELASTIC | {"RANK": "0"}, replace(BY_HAND, rank=0, launcher="torchrun")),  # the agent's store
    (without(VARIABLES | ELASTIC | {"RANK": "0"}, "TORCHELASTIC_USE_AGENT_STORE"),
     replace(BY_HAND, rank=0, launcher="torchrun", keeps_store=True)),
    (VARIABLES | {"MASTER_PORT": "1"}, replace(BY_HAND, port=1)),
    (VARIABLES | {"MASTER_PORT": "65535"}, replace(BY_HAND, port=65535)),
    (step(4, 0, 2, "2(x2),1"), SLURM), (step(3, 1, 1, "2(x2),1"), replace(SLURM, rank=3, local_rank=1, local_size=2)),
    (step(0, 0, 0, "2(x2),1"), replace(SLURM, rank=0, local_size=2, keeps_store=True)),
    (step(4, 0, 2, "2(x2),1") | {"WORLD_SIZE": "5"}, SLURM),
    (step(4, 0, 2, "2(x2),1") | {"MASTER_ADDR": "b", "MASTER_PORT": "1234"}, replace(SLURM, address="b", port=1234)),
    (step(4, 0, 2, "2(x2),1") | {"SLURM_GPUS_ON_NODE": "4"}, replace(SLURM, node_gpus=4)),
    (step(4, 0, 2, "2(x2),1") | VARIABLES, BY_HAND),  # torchrun's variables win
    (step(1, 0, 1, "1,1") | VARIABLES | ELASTIC, replace(BY_HAND, launcher="torchrun")),  # a torchrun a node
    (step(0, 0, 0, "1"), Launch()), (without(step(0, 0, 0, "2(x2),1"), "SLURM_STEP_ID"), Launch()),
    ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}, Launch()),  # the script
], ids=str)  # fmt: skip
def test_each_launcher_is_read(variables, launch):
    assert read_launch(variables) == launch


@pytest.mark.parametrize(("nodelist", "host"), [
    ("a[01-03,7],b2", "a01"), ("b2,a[01-03]", "b2"), ("n0", "n0"), ("r[1-2]n[07-9]", "r1n07"), ("a-b.c[3]", "a-b.c3"),
    ("n[12]", "n12"), ("gpu[8,10-12]-ib", "gpu8-ib"),
])  # fmt: skip
def test_rank_0_is_on_the_first_host_of_the_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("text", "tasks"), [("2(x2),1", [2, 2, 1]), ("4", [4]), ("1,2(x3),10(x1)", [1, 2, 2, 2, 10]), ("1(x12)", [1] * 12)]
)
def test_unequal_tasks_a_node_are_counted(text, tasks):
    assert tasks_per_node(text) == tasks
    first = 0
    for node, size in enumerate(tasks):
        for local in range(size if sum(tasks) > 1 else 0):
            found = read_launch(step(first + local, local, node, text))
            assert (found.rank, found.local_rank, found.local_size) == (first + local, local, size)
        first += size


def test_a_running_world_tells_the_rank_and_the_variables_the_place():
    assert read_launch({}, (2, 4)) == Launch(2, 4, 2)
    assert read_launch({"LOCAL_RANK": "0"}, (2, 4)) == Launch(2, 4, 0)
    assert read_launch(step(4, 0, 2, "2(x2),1"), (4, 5)) == Launch(4, 5, 0)
    assert read_launch({"RANK": "9", "WORLD_SIZE": "2"}, (0, 4)) == Launch(0, 4, 0)
    assert read_launch(VARIABLES | ELASTIC, (3, 4)) == Launch(3, 4, 1, 2)


def test_gpus_that_slurm_gave_each_task_are_taken():
    """With --gpus-per-task=1 each of four tasks sees one GPU, its own: LOCAL_RANK 3 must not index past it."""
    bound = replace(SLURM, local_rank=3, local_size=4, node_gpus=4)
    for gpus, shared, place in ((1, 4, (0, 1)), (4, 4, (3, 4)), (1, 1, (3, 4)), (0, 4, (3, 4)), (1, 0, (3, 4))):
        assert replace(bound, node_gpus=shared).place(gpus) == place
    index, count = bound.place(1)
    assert choose_device(None, gpus=1, local_rank=index, local_size=count) == "cuda"
    assert choose_device("cuda", gpus=1, local_rank=index, local_size=count) == "cuda"
    assert replace(BY_HAND, local_rank=3, local_size=1).place(1) == (0, 1)  # a pod with a GPU of its own


def test_build_mesh_takes_the_gpu_of_the_task_and_says_when_gpus_are_too_few(monkeypatch):
    def stop(launch: Launch, backend: str, timeout: float | None) -> None:
        raise ValueError(f"{launch.launcher} begins with {backend}")

    for name, value in step(3, 3, 0, "4").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(build, "start_world", stop)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    with pytest.raises(ValueError, match=r"Slurm begins with cpu:gloo,cuda:nccl$"):
        build_mesh()
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")  # which the four share
    with pytest.raises(ValueError, match=r"GPUs here: 1, processes: 4\. Each needs one for nccl: start fewer, or"):
        build_mesh(device_type="cuda")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    with (
        pytest.warns(UserWarning, match=r"GPUs here: 1, processes: 4\. Too few for all, so the CPU is"),
        pytest.raises(ValueError, match=r"Slurm begins with gloo$"),
    ):
        build_mesh()


WRONG = {
    "a variable is missing": (without(VARIABLES, "MASTER_PORT"), r"RANK is 3, .*MASTER_ADDR is a, but MASTER_PORT "
                              r"isn't set: start with torchrun or srun, or set them"),
    "no rank": (without(VARIABLES, "RANK"), "WORLD_SIZE is 4, .*but RANK isn't set: start with"),
    "no world size": (without(VARIABLES, "WORLD_SIZE"), "RANK is 3, .*but WORLD_SIZE isn't set: start with"),
    "a rank out of range": (VARIABLES | {"RANK": "4"}, "RANK 4 isn't below WORLD_SIZE 4: number all processes"),
    "a negative rank": (VARIABLES | {"RANK": "-1"}, "RANK -1 isn't below WORLD_SIZE 4"),
    "a local rank out of range": (VARIABLES | {"LOCAL_RANK": "2"}, "LOCAL_RANK 2 isn't below LOCAL_WORLD_SIZE 2"),
    "no local rank": (without(VARIABLES, "LOCAL_RANK"), "LOCAL_WORLD_SIZE is 2, but LOCAL_RANK isn't set: set both"),
    "no number": (VARIABLES | {"WORLD_SIZE": "4 "}, "WORLD_SIZE='4 ' is no whole number"),
    "no port": (VARIABLES | {"MASTER_PORT": "65536"}, "MASTER_PORT 65536 isn't between 1 and 65535"),
    "another world size than srun's": (step(0, 0, 0, "4") | {"WORLD_SIZE": "8"},
                                       r"WORLD_SIZE is 8 in a Slurm step of 4 tasks, .*: unset WORLD_SIZE"),
    "a world of one in a step of four": (step(0, 0, 0, "4") | {"WORLD_SIZE": "1", "RANK": "0"},
                                         "WORLD_SIZE is 1 in a Slurm step of 4 tasks: unset .* `env -u SLURM_STEP_ID`"),
    "srun and torchrun mixed": (step(2, 2, 0, "4") | VARIABLES | ELASTIC | {"GROUP_WORLD_SIZE": "1"},
                                "Slurm started 4 tasks, and each runs a torchrun .*: start one task a node"),
    "a step without its variables": (without(step(1, 1, 0, "4"), "SLURM_PROCID"), "SLURM_PROCID isn't set: .* srun"),
    "a step of several components": (step(5, 1, 0, "2(x2)"), r"task 5 of 4, 1 on node 0, doesn't fit \[2, 2\] tasks"),
    "a negative place": (step(0, -1, 0, "2(x2)"), r"task 0 of 4, -1 on node 0, doesn't fit \[2, 2\] tasks"),
    "an unknown list": (step(0, 0, 0, "2(x2)") | {"SLURM_STEP_TASKS_PER_NODE": "2x2"}, "'2x2' is no list such as"),
}  # fmt: skip


@pytest.mark.parametrize(("variables", "message"), WRONG.values(), ids=WRONG)
def test_wrong_variables_are_refused_by_one_line(variables, message, monkeypatch):
    with pytest.raises(ValueError, match=message) as refused:
        read_launch(variables)
    assert "\n" not in str(refused.value)
    for name in {*VARIABLES, *ELASTIC}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        build_mesh()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def here(rank: int, size: int, **changes) -> Launch:
    at = Launch(rank, size, rank, size, "localhost", free_port(), "variables", "one world", keeps_store=rank == 0)
    return replace(at, **changes)


def test_an_address_that_does_not_resolve_is_named_at_once(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    for rank in (0, 1):
        message = (
            f"^rank {rank} on .*: the address 'nowhere' of rank 0 doesn't resolve .*not known.*: set MASTER_ADDR to"
        )
        with pytest.raises(ValueError, match=message):
            start_world(here(rank, 2, address="nowhere"), "gloo", 600.0)


def test_a_port_in_use_is_named_at_once_and_within_the_timeout_by_the_others():
    """What listens there is no store: it never answers."""
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"^rank 0 on .*: port {port} is in use: .*RANK 0.* a free MASTER_PORT$"):
            start_world(here(0, 2, port=port), "gloo", 600.0)
        with pytest.raises(ValueError, match=f"^rank 1 on .*: rank 0 did not arrive at localhost:{port} within 1 s: "):
            start_world(here(1, 2, port=port), "gloo", 1.0)


def test_where_no_rank_0_is_the_others_name_the_address_within_the_timeout():
    with pytest.raises(ValueError, match=r"rank 1 on .*: rank 0 did not arrive at localhost:\d+ within 1 s: start all"):
        start_world(here(1, 2), "gloo", 1.0)


def test_a_process_that_starts_its_world_again_meets_at_the_same_port():
    launch = here(0, 1)
    first, again = (open_store(launch, timedelta(seconds=10)) for _ in range(2))
    first.set("who", "the first world")
    assert again.get("who") == b"the first world"


ENDS = """
import contextlib, os, sys, torch, torch.distributed as dist
import mpcore, mpcore.collectives

def slow(threads, policy):
    for thread in threads - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):  # one that made the connection may end meanwhile
            os.sched_setscheduler(thread, policy, os.sched_param(0))

def train(end, rank):
    global mesh
    mesh = mpcore.build_mesh(tp=2)
    cores = sorted(os.sched_getaffinity(0))
    mpcore.collectives.all_reduce(torch.ones(3), mesh.tp)  # starts gloo's threads
    threads = {int(thread) for thread in os.listdir("/proc/self/task")}
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, {cores[rank % len(cores)]})
    sys.setswitchinterval(10)
    slow(threads, os.SCHED_IDLE)  # the main thread runs on before they have freed the tensor
    mpcore.collectives.all_reduce(torch.ones(3), mesh.tp)
    slow(threads, os.SCHED_OTHER)
    if end == "destroy":
        dist.destroy_process_group()
    if end == "raise":
        raise RuntimeError

for port, end in zip(sys.argv[2:], sys.argv[1].split()):
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            sys.exit(train(end, rank))
    print(end, *(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)
"""


def test_a_process_that_ends_right_after_a_collective_keeps_its_status():
    """Gloo's thread frees the last tensor under Python's lock: in the interpreter's shutdown that aborts."""
    command = [sys.executable, "-c", ENDS, "destroy destroy raise return", *(str(free_port()) for _ in range(4))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.stdout.splitlines() == ["destroy 0 0", "destroy 0 0", "raise 1 1", "return 0 0"], run.stderr


HOST_ENDS = """
import os, signal, time, mpcore
from mpcore.mesh import build
from mpcore.tools.fault_tolerance import leave_together
def end(*said):
    os.environ["RANK"] == "0" and os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    check_same(*said)
check_same = build.check_same
build.check_same = end if WITHIN else check_same
mesh = mpcore.build_mesh(tp=2)
check_same = print
end()
leave_together(mesh)
"""
WAITS = """
import mpcore
from mpcore.mesh import rendezvous
rendezvous._GONE, rendezvous._LATE = {}, 1.0
mpcore.build_mesh(tp=2)
"""
LISTENS = (
    "import socket, time; s = socket.create_server(('127.0.0.1', {})); time.sleep(100)"  # a port, and no store yet
)
IN, AFTER = (HOST_ENDS.replace("WITHIN", within) for within in ("True", "False"))


@pytest.mark.parametrize(("dead", "end", "code"), some(
    (0, "", WAITS.format(1)), (1, "import time; time.sleep(100)", WAITS.format(1e9)), (0, IN, IN),
    of=[(1, "", WAITS.format(1)), (0, LISTENS, WAITS.format(1e9)), (0, AFTER, AFTER)],
), ids=["0 never there", "1", "in build_mesh", "1 never there", "0", "before leave_together"])  # fmt: skip
def test_a_rank_that_ends_before_the_first_step_is_named_without_torchrun(dead, end, code):
    port, words = free_port(), "is gone" if end is code else "ended before the ranks met, or did not start"
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    codes = {dead: end.replace("{}", str(port)), 1 - dead: code}
    ranks = [subprocess.Popen([sys.executable, "-c", each], env=env | {"RANK": str(rank)}, text=True,
                              stderr=subprocess.PIPE) for rank, each in codes.items() if each]  # fmt: skip
    if end and end is not code:
        assert f"waits for rank {dead}" in ranks[1].stderr.readline()  # type: ignore[union-attr]
        ranks[0].kill()
    last = ranks[-1].communicate(timeout=60)[1].splitlines()[-1]
    assert f"rank {dead}" in last
    assert words in last
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL, 1][-len(ranks) :]


def test_a_start_names_the_rank_without_a_process_and_not_one_that_is_late():
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    late = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env=env | {"RANK": "2"})
    waits = subprocess.Popen([sys.executable, "-c", WAITS.format(1e9)], env=env | {"RANK": "0"}, text=True,
                             stderr=subprocess.PIPE)  # fmt: skip
    try:
        assert "waits for rank 1, not here" in waits.stderr.readline()  # type: ignore[union-attr]
    finally:
        late.kill()
        waits.kill()


def test_rank_0_at_another_hosts_address_is_told():
    with pytest.raises(ValueError, match=r"rank 0 on .*: can't reach itself at 192\.0\.2\.1:\d+: set MASTER_ADDR to"):
        open_store(here(0, 2, address="192.0.2.1", local_size=1), timedelta(seconds=1))


@pytest.mark.parametrize(("change", "there"), [
    ({"job": "another world"}, "one world of 2 ranks"), ({"world_size": 3}, "one world of 2 ranks"),
    ({}, "one world of 2 ranks, all of them here"), ({"one_host": True}, "one world of 2 ranks"),
], ids=["two worlds on one port", "another world size", "a rank twice", "LOCAL_WORLD_SIZE of one rank"])  # fmt: skip
def test_a_rank_that_meets_another_world_is_told(change, there):
    first = here(0, 2)
    store = open_store(first, timedelta(seconds=10))
    enter_world(store, first, 10.0)
    if not change:
        store.set("mpcore/world", there)
    mine = replace(first, rank=1, keeps_store=False)
    stranger = replace(mine, **change)
    words = f"rank 1 on .*: localhost:{first.port} belongs to another world .{there}., this is {stranger.job} of "
    words += f"{stranger.world_size} ranks{' on one host' * stranger.one_host}: give each world a MASTER_PORT"
    with pytest.raises(ValueError, match=words):
        enter_world(open_store(stranger, timedelta(seconds=10)), stranger, 10.0)
    if change:
        enter_world(open_store(mine, timedelta(seconds=10)), mine, 10.0)


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
BUILDS = """
import ctypes
from mpcore.tools.fault_tolerance import StopSignals
with StopSignals(OPTIONS):
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)  # all zeros: a mutex that nobody holds
    for _ in range(2):  # the second waits for ever, in C, as for ranks that don't come
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(("options", "number", "status", "said"), [
    ("leave_with=75", signal.SIGTERM, 75, rf"{TIME} rank 0: left on SIGTERM before the first step: nothing to save\n"),
    ("leave_with=75", signal.SIGINT, 130, rf"{TIME} rank 0: left on SIGINT before the first step: nothing to save\n"),
    ("apart=0.2", signal.SIGINT, 130, r"((?!again leaves).)*ctrl-C again leaves at once((?!again leaves).)*"),
], ids=["SIGTERM", "SIGINT", "a second interrupt of a run"])  # fmt: skip
def test_row_32_a_second_interrupt_leaves_at_once_even_inside_a_call_that_waits(options, number, status, said):
    """Before the first step a first signal does, too."""
    run = Forked(BUILDS.replace("OPTIONS", options))
    try:
        assert run.stdout.readline() == "ready\n"
        until = time.monotonic() + 20
        while run.poll() is None and time.monotonic() < until:
            run.send_signal(number)
            time.sleep(0.3)
        _, stderr = run.communicate(timeout=10)
    finally:
        run.kill()
    assert run.returncode == status
    assert re.fullmatch(said, stderr, re.DOTALL), stderr
