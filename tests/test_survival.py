"""What finds faults, alone and on a pool of ranks. Faults in real runs: tests/examples/test_survival_runs.py."""

from __future__ import annotations

import random
import re
import signal
import socket
import textwrap
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.model import GPT
from mpcore import Mesh, simulate
from mpcore.layers import materialize
from mpcore.mesh.agreement import check_same
from mpcore.mesh.rendezvous import join_world, meet
from mpcore.parallel.data import shard_data_parallel
from mpcore.sharding.local import local_tensor
from mpcore.sharding.replicas import compare_replicas
from mpcore.tools.fault_tolerance.leave import _PEER, _torch_text, leave_together
from mpcore.tools.fault_tolerance.signals import StopSignals
from mpcore.tools.fault_tolerance.spikes import Skips, Spikes
from mpcore.tools.fault_tolerance.stragglers import Stragglers
from mpcore.tools.fault_tolerance.versions import code_versions, file_versions
from tests.forked import Forked
from tests.pool import mesh, on_ranks
from tests.quick import some
from tests.test_launch import free_port

CONFIG = GPTConfig(vocab_size=29, seq_len=8, layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24)


# --- replicas -----------------------------------------------------------------------------------------------------


def model_on(zero: bool = False, tied: bool = False, replicate: int = 1, **sizes: int) -> tuple[GPT, Mesh]:
    here = mesh(**sizes)
    moe = MoEConfig(experts=2, top_k=1) if "ep" in sizes else None
    model = GPT(replace(CONFIG, tie_embeddings=tied, moe=moe), here, device="meta", dtype=torch.float32)
    materialize(model, 3, "cpu")
    if zero:
        shard_data_parallel(model, here, model.blocks.values(), replicate=replicate)
    return model, here


def flip(model: nn.Module, name: str, row: int = 1) -> None:
    """The last bit of one element, far too small for a loss to tell."""
    with torch.no_grad():
        bits = local_tensor(model.get_parameter(name)).view(torch.int32)
        bits[(row, *[0] * (bits.dim() - 1))] ^= 1


def check_replicas(case: tuple[dict, dict, str | None, int, str, int]) -> None:
    sizes, options, name, rank, message, row = case
    model, here = model_on(**options, **sizes)
    compare_replicas(model, here)
    if name is not None and here.world.rank == rank:
        flip(model, name, row)
    if message:
        with pytest.raises(ValueError, match=message):
            compare_replicas(model, here)
    else:
        compare_replicas(model, here)


def names() -> list[str]:
    return [name for name, _ in GPT(CONFIG, device="meta").named_parameters()]


NORM = next(n for n in names() if n.startswith("blocks.0") and "norm" in n)
QKV = next(n for n in names() if n.startswith("blocks.1") and "qkv" in n)
DOWN = next(n for n in names() if n.startswith("blocks.1") and "down" in n)
EXPERT = "blocks.0.mlp.experts.down.weight"
BOTH = f"{NORM} over tp, on ranks 0 and 1; {NORM} over data, on ranks 1 and 3"
CASES = {
    "tp names the minority": ({"tp": 4}, {}, NORM, 2, rf"{NORM} over tp, on rank 2, while ranks 0, 1, 3 agree", 1),
    "a shard of tp is nobody's replica": ({"tp": 4}, {}, DOWN, 2, "", 1),
    "a shard of tp is a replica over data": (
        {"tp": 2, "dp": 2}, {}, DOWN, 3, rf"{DOWN} over (data|dp), on ranks 1 and 3", 1,
    ),
    "replicated KV heads": ({"tp": 4}, {}, QKV, 1, rf"{QKV}\[\d+:\d+\] over tp, on ranks 0 and 1", -1),
    "queries of replicated KV heads": ({"tp": 4}, {}, QKV, 1, "", 0),
    "norm over tp and data": ({"tp": 2, "dp": 2}, {}, NORM, 1, BOTH, 1),
    "sharded over data, replicated over tp": (
        {"tp": 2, "dp": 2}, {"zero": True}, NORM, 3, rf"{NORM} over tp, on ranks 2 and 3", 1,
    ),
    "sharded over data": ({"dp": 4}, {"zero": True}, DOWN, 3, "", 1),
    "a shard of two replicas of four ranks": (
        {"dp": 4}, {"zero": True, "replicate": 2}, DOWN, 3, rf"{DOWN} over data, on ranks 1 and 3", 1,
    ),
    "tied tables of two stages": (
        {"pp": 2, "tp": 2}, {"tied": True}, "embedding.weight", 3, r"embedding.weight over ends, on ranks 1 and 3", 1,
    ),
    "experts on the ranks of tp": (
        {"tp": 2, "dp": 2, "ep": 2, "etp": 1}, {}, EXPERT, 3, rf"{EXPERT} over edp, on ranks 1 and 3", 0,
    ),
    "norm of the last stage": ({"pp": 2, "tp": 2}, {}, "norm.weight", 3, r"norm.weight over tp, on ranks 2 and 3", 1),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_row_29_a_flipped_bit_in_a_replica_is_named_by_tensor_and_rank(ranks, case):
    ranks(4, check_replicas, CASES[case], timeout=60)


# --- slow ranks ---------------------------------------------------------------------------------------------------


def check_straggler_of_a_worker() -> list[int]:
    finder = Stragglers(mesh(worlds=2, dp=2), threshold=3.0, patience=1)
    with finder.timed("data"):
        time.sleep(0.2 if dist.get_rank() == 3 else 0.02)  # a busy machine adds some milliseconds
    return [late.rank for late in finder.check()]


def test_row_6_a_workers_slow_rank_is_named_by_its_number_in_the_job(ranks):
    assert ranks(4, check_straggler_of_a_worker) == [[], [], [3], [3]]


def test_row_6_what_a_gpu_still_does_from_before_is_no_part_of_a_phase(monkeypatch):
    """A device with a queue: the host goes on at once, and waits where it synchronizes."""
    finder, queued = Stragglers(Mesh(), size=8), [0.1]

    def synchronize(device: torch.device) -> None:
        assert device == torch.device("cuda", 0)
        while queued:
            time.sleep(queued.pop())

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with finder.timed("data"):
        pass
    assert queued == [0.1]  # on a CPU nothing is waited for
    finder.mesh = Mesh(device_type="cuda")
    with finder.timed("data"):
        pass
    assert not queued
    with finder.timed("data"):
        queued.append(0.1)
    finder.probe()
    assert finder.times["data"][1] < 0.05
    assert finder.times["data"][2] > 0.09
    assert finder.times["compute"][0] < 0.05


# --- numbers ------------------------------------------------------------------------------------------------------


def falling(steps: int, seed: int = 0) -> list[float]:
    """A loss as runs have it: it falls, and trembles."""
    draw = random.Random(seed)
    return [2.0 + 3.0 * 0.98**i + draw.gauss(0, 0.05) for i in range(steps)]


def test_row_28_spikes_are_found_and_a_falling_loss_is_none():
    for seed in range(5):
        finder = Spikes()
        assert all(finder.score(loss) is None for loss in falling(500, seed))
    found, finder = [], Spikes()
    for i, loss in enumerate(falling(500)):
        if finder.score(loss * (3 if i in (100, 102, 300) else 1)) is not None:
            found.append(i)
    assert found == [100, 102, 300]


def test_row_20_a_skipped_step_that_is_not_written_down_is_told(caplog):
    skips = Skips(1, Path("/dev/full"))
    skips.step(False, step=7)
    (record,) = caplog.records
    assert record.getMessage() == "NOT WRITTEN: /dev/full: [Errno 28] No space left on device"
    assert record.rank == 0
    with pytest.raises(ValueError, match=r"2 steps in a row .* \(step 8\)"):
        skips.step(False, step=8)


# --- what ranks have in common ------------------------------------------------------------------------------------


def test_files_of_one_name_in_two_folders_have_a_version_each(tmp_path, monkeypatch):
    """Whose folder may lie elsewhere on another rank, or be named from another place."""
    monkeypatch.chdir(tmp_path)
    for folder in ("here/web", "here/code", "there/web", "there/code"):
        Path(folder).mkdir(parents=True)
        Path(folder, "corpus.idx").write_bytes(folder.encode()[-3:])
    found = file_versions("here/web/corpus.idx", "here/code/corpus.idx")
    assert found.keys() == {"web/corpus.idx", "code/corpus.idx"}
    assert found["web/corpus.idx"] != found["code/corpus.idx"]
    assert found == file_versions(*(tmp_path / "there" / name / "corpus.idx" for name in ("web", "code")))
    assert file_versions("here/web/corpus.idx").keys() == {"corpus.idx"}
    assert file_versions() == {}


def test_code_of_one_name_in_two_folders_is_refused(tmp_path):
    for name in ("web", "code"):
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / "src" / "train.py").write_text(f"x = {name!r}")
    with pytest.raises(
        ValueError, match=r"two of the folders are called src, and each has a train.py of its own: give"
    ):
        code_versions(tmp_path / "web" / "src", tmp_path / "code" / "src")
    assert {"web/src/train.py", "code/src/train.py"} <= {n.partition("/")[2] for n in code_versions(tmp_path)}


@on_ranks(4)
def test_row_12_other_code_or_data_on_a_rank_is_refused_by_file(tmp_path):
    own = Path(tmp_path) / f"rank{dist.get_rank()}" / "code"
    own.mkdir(parents=True)
    (own / "same.py").write_text("x = 1\n")
    (own / "part.py").write_text(f"x = {dist.get_rank() // 2}\n")
    versions = code_versions(own)
    assert {"python", "torch", "mpcore/kernels/rms_norm.py", "code/same.py"} <= versions.keys()
    with pytest.raises(
        ValueError, match=r"ranks 0 and 2 disagree about the code \(code/part.py: '\w{12}' and '\w{12}'\)"
    ):
        check_same("code", versions)
    data = own / "corpus.idx"
    data.write_bytes(bytes(300) + bytes([dist.get_rank() // 3]))
    with pytest.raises(ValueError, match=r"ranks 0 and 3 disagree about the data \(corpus.idx: '301 bytes"):
        check_same("data", file_versions(data, ends=100))
    data.write_bytes(bytes(300 + dist.get_rank()))
    with pytest.raises(ValueError, match=r"ranks 0 and 1 .* \(corpus.idx: '300 bytes, .* and '301 bytes"):
        check_same("data", file_versions(data, ends=100))


# --- ranks meet ---------------------------------------------------------------------------------------------------


def meet_all(store: dist.Store, size: int, timeout: float, absent: tuple[int, ...] = ()) -> list[str]:
    """What each rank gets, or is told."""
    found = [""] * size

    def one(rank: int) -> None:
        try:
            found[rank] = meet(store, rank, size, timeout)
        except ValueError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_row_2_38_every_attempt_agrees_on_a_name_that_no_dead_one_used():
    store = dist.HashStore()
    store.set(f"mpcore/hello/{store.add('mpcore/tickets', 2)}", "a number of the dead")  # the other died before that
    names = set()
    for _ in range(3):
        (name,) = set(meet_all(store, 4, 30.0))
        names.add(name)
    assert len(names) == 3
    assert meet(store, 0, 1, 1.0) not in names


def test_row_39_ranks_that_do_not_arrive_are_named_on_those_that_did():
    store = dist.HashStore()
    meet_all(store, 4, 30.0)
    found = meet_all(store, 4, 1.0, absent=(2, 3))
    told = (
        f"of 4 ranks 2, 3 did not arrive within 1 s. The others are on {socket.gethostname()}: start the missing ones"
    )
    assert found[:2] == [f"{told} too, or read what ended them"] * 2
    assert meet_all(dist.HashStore(), 2, 0.5, absent=(0,))[1].startswith("rank 0 did not arrive within 0.5 s: start")


def test_a_group_that_cant_be_made_names_the_ranks_that_gave_no_answer_or_the_cause(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("connection refused by peer\nand thirty lines more")

    store = dist.HashStore()
    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for rank, size, told in (
        (0, 2, "rank 1 gave no answer"), (1, 2, "connection refused by peer"), (1, 5, "ranks 2, 3, 4 gave no answer"),
    ):  # fmt: skip
        words = f"could not make their process group within 5 s: {told}. See whether they run"
        with pytest.raises(ValueError, match=re.escape(words)):
            join_world("gloo", store, rank, size, timedelta(seconds=5))


# --- ranks leave --------------------------------------------------------------------------------------------------


START = """
import ctypes, mmap, os, signal, sys, threading, time
import torch, torch.distributed as dist
from mpcore import build_mesh
from mpcore.mesh.agreement import raise_together
from mpcore.tools.fault_tolerance import StopSignals, leave, leave_together
rank = int(sys.argv[1])
"""
LEAVE = """
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=3)
mesh = build_mesh(dp=3)
with open(sys.argv[2] + ".data", "ab+") as file:
    file.truncate(2**14)
    data = mmap.mmap(file.fileno(), 2**14)
with leave_together(mesh, grace=0.5):
    dist.all_reduce(torch.ones(1))
    if rank == 1:
{fault}
    while True:
        dist.all_reduce(torch.ones(1))
"""
FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -9, "rank 1 gives no answer: killed, or cut off"),
    "raises": ("raise LookupError('lost')", 1, "rank 1 failed first: LookupError: lost"),
    "exits 0": ("sys.exit(0)", 1, "rank 1 left before the end, with exit status 0"),
    "exits 3": ("sys.exit(3)", 3, "rank 1 left with exit status 3"),
    "says": ("sys.exit('no more')", 1, "rank 1 left: no more"),
    "maps a file that is cut": (
        "os.truncate(sys.argv[2] + '.data', 5); data[9000]", -signal.SIGBUS,
        "rank 1 gives no answer: killed, or cut off. {}/store.data has 5 bytes now, fewer than were mapped",
    ),
}  # fmt: skip


def start(code, size, tmp_path):
    """A process for each rank, which is told its rank and where the store of all is."""
    return [Forked(START + code, str(rank), str(tmp_path / "store")) for rank in range(size)]


@pytest.mark.parametrize("fault", some("killed", of=FAULTS))
def test_row_1_3_4_when_a_rank_fails_the_others_name_it(tmp_path, fault):
    line, status, cause = FAULTS[fault]
    code = LEAVE.format(fault=textwrap.indent(line, " " * 8))
    runs = start(code, 3, tmp_path)
    try:
        told = [run.communicate(timeout=60)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [70, status, 70], told
    for rank in (0, 2):
        assert told[rank].splitlines()[-1].endswith(f" rank {rank}: stopped, because {cause.format(tmp_path)}")
        assert "Traceback" not in told[rank]
    assert ("Bus error" in told[1]) == (status == -signal.SIGBUS)
    if fault == "raises":
        assert told[1].rstrip().endswith("LookupError: lost")
        assert "Traceback" in told[1]


LAST = """
dist.init_process_group("gloo", init_method="tcp://localhost:{port}", rank=rank, world_size=3)
with leave_together(build_mesh(dp=3)):
    time.sleep(2.0 if rank == 0 else 0.0)  # rank 0 writes to a slow disk, and the others ask the store more rarely
    raise_together(None)
leave(75)
"""


def test_rank_0_keeps_its_store_until_the_others_have_left(tmp_path):
    runs = start(LAST.format(port=free_port()), 3, tmp_path)
    told = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [75, 75, 75], told


STANDS = """
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = build_mesh(dp=2)
with leave_together(mesh, grace=0.5):
    pass
assert "mpcore-leave" not in [thread.name for thread in threading.enumerate()]
with leave_together(mesh, grace=0.5), StopSignals():
    dist.barrier()
    if rank == 1:
        raise LookupError("lost")
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second waits for ever, in C, as a wait for a GPU does
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_row_3_a_rank_that_stands_in_c_leaves_with_the_others_and_names_the_first(tmp_path):
    runs = start(STANDS, 2, tmp_path)
    try:
        runs[1].wait(60)
        runs[0].send_signal(signal.SIGTERM)  # as torchrun does
        told = [run.communicate(timeout=10)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [70, 1], told
    assert told[0].splitlines()[-1].endswith(" rank 0: stopped, because rank 1 failed first: LookupError: lost")
    assert "Traceback" in told[1]
    assert told[1].rstrip().endswith("LookupError: lost")


def stop_signals_of_a_rank(mesh: Mesh) -> bool:
    with leave_together(mesh), StopSignals() as signals:
        return signals.asked


def test_simulated_ranks_leave_signals_alone():
    before = signal.getsignal(signal.SIGTERM)
    assert simulate(stop_signals_of_a_rank, dp=2) == [False, False]
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_a_peer_left_is_told_from_an_error_of_our_own():
    for text in (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9",
        "Connection reset by peer",
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Timed out waiting 1800000ms for send operation to complete",
        "NCCL communicator was aborted on rank 1.",
    ):
        error = ValueError("the save failed")
        error.__cause__ = RuntimeError(text)
        assert _PEER.search(_torch_text(error))
    for mine in (
        ValueError("heads 10 is not a multiple of tp 4"),
        ConnectionRefusedError("Connection refused: s3://a"),
    ):
        assert not _PEER.search(_torch_text(mine))
    assert not _PEER.search("the file igloo.bin is missing")
