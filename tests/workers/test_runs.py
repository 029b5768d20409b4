"""Runs as workers: any layout in a worker, the bits of a replay, the example, and signals to processes."""

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.gpt.pretrain import Trainer, parse
from mpcore import Axis, Mesh, build_mesh, prepare
from mpcore.__main__ import main
from mpcore.experimental import LocalUpdates, simulate
from mpcore.tools.workers import Average, Nesterov, command
from mpcore.tools.workers.elastic import RunTensors, replay_runs
from mpcore.tools.workers.journal import read_lines
from mpcore.tools.workers.outer import ENDED, STOPPED, like
from tests.forked import Forked
from tests.quick import some
from tests.test_launch import free_port

ROOT = Path(__file__).parents[2]
TINY = ["--layers", "2", "--d-model", "32", "--heads", "2", "--seq-len", "16", "--global-batch", "4", "--micro-batch",
        "1", "--device", "cpu", "--eval-every", "0", "--dtype", "float64"]  # fmt: skip


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("MPCORE_SECRET", "a secret of at least sixteen bytes")


def trainer(mesh, out, *flags, steps=18):
    own = ["--local-steps", "3", "--wait", "none", "--set", "dynamic_steps=false"]
    own = own if "--listen" in flags or "--join" in flags else []
    return Trainer(parse([*TINY, *own, "--steps", str(steps), "--out", str(out), *flags]), mesh)


def worker_of(run):
    return next(each for each in run.observers if isinstance(each, LocalUpdates)).worker


def replayed(folder, out, *flags, steps=18):
    made = {}

    def make():
        one = trainer(Mesh(), out, *flags, steps=steps)
        made[id(one.run)] = one
        return one.run

    return replay_runs(folder, make, lambda run: made[id(run)].step())


def visit(mesh, out, flags, phases):
    """Join a run, train a few phases, and leave."""
    one = trainer(build_mesh(**mesh, device_type="cpu"), out, *flags, steps=36)
    worker = worker_of(one.run)
    for _ in range(3 * phases):
        one.step()
    if worker.peer is not None:
        worker.peer.stop()
    return worker.number


LAYOUTS = [
    ({"tp": 2}, ["--tp", "2"]),
    ({"dp": 2}, ["--dp", "2", "--zero", "2"]),
    ({"pp": 2}, ["--pp", "2", "--global-batch", "4"]),
]


@pytest.mark.parametrize("overlap", some("true", of=["false"]))
def test_workers_of_unlike_layouts_equal_dense_ones(overlap, tmp_path):
    """Each layout joins in turn. The replay trains all phases dense, and ends with the same anchor to 1e-10."""
    more = ["--set", f"overlap_exchange={overlap}"]
    dense = trainer(Mesh(), tmp_path / "0", "--listen", "127.0.0.1:0", *more, steps=36)
    address = worker_of(dense.run).peer.node.address
    for number, (mesh, flags) in enumerate(LAYOUTS, 1):
        flags = [*flags, *more, "--join", address]
        assert simulate(visit, mesh, tmp_path / str(number), flags, 2, ranks=2) == [number] * 2
    while dense.run.step < 36:
        dense.step()
    anchor, found = RunTensors(dense.run).read(), replayed(tmp_path / "0", tmp_path / "r", steps=36)
    entries = [entry for line in read_lines(tmp_path / "0") for entry in line.get("updates", ())]
    assert len({entry["worker"] for entry in entries}) == 4
    later = {entry["worker"] for entry in entries if entry.get("merged", 0) > entry["steps"][0]}
    assert later == (set(range(4)) if overlap == "true" else set())
    for name, x in found.outer.anchor.items():
        torch.testing.assert_close(x, anchor[name], rtol=1e-10, atol=1e-10)


def stopped_while_waiting(out):
    """Rank 1 alone is asked to stop while the worker waits for a second one. Return when, and how the run ended."""
    one = trainer(
        build_mesh(tp=2, device_type="cpu"), out, "--tp", "2", "--listen", "127.0.0.1:0", "--wait", "quorum:2"
    )
    worker, calls = worker_of(one.run), []
    inner = worker.should_stop

    def should_stop():
        calls.append(time.monotonic())
        one.stop.asked = one.mesh.world.rank == 1 and len(calls) > 3
        return inner()

    worker.should_stop = should_stop
    return one.train(), one.run.step, len(calls) < 6


def test_ranks_of_a_worker_that_waits_agree_to_stop(tmp_path):
    assert simulate(stopped_while_waiting, tmp_path, ranks=2) == [(True, 3, True)] * 2
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()
    assert [line["op"] for line in read_lines(tmp_path)] == ["begin", "join", "lease", "leave"]


STARTS = "import os, runpy; os.dup2(1, 2); runpy.run_module('examples.gpt.pretrain', run_name='__main__')"


def program(out, *flags, steps=18):
    saves = () if "--save-every" in flags else ("--set", "no_save=true")
    words = [*TINY, "--local-steps", "3", "--steps", str(steps), "--out", str(out), *saves, *flags]
    return Forked(STARTS, *words)


def test_a_worker_that_lacks_others_says_so_and_stops_on_sigterm(tmp_path, capsys):
    job = program(tmp_path, "--wait", "quorum:2", "--listen", "127.0.0.1:0", "--set", "worker_timeout=5")
    lines = []
    while "1 of 2 workers are here" not in "".join(lines[-1:]):
        lines.append(job.stdout.readline())
        assert lines[-1], lines
    os.kill(job.pid, signal.SIGTERM)
    out = job.communicate(timeout=60)[0]
    assert job.returncode == 75, out
    assert "and stopped; the same command joins the run again" in out
    assert main(["replay-workers", str(tmp_path)]) == 0
    said = "ends with outer step 0, at step 0 of 18: all workers had left the run, so no folder has more"
    assert said in capsys.readouterr().out
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # killed, or of another worker's folder
    assert main(["replay-workers", str(tmp_path)]) == 0
    assert "in the run then: 0 (if a worker went on, its folder has more" in capsys.readouterr().out


@pytest.mark.timeout(1800)  # on a busy machine; it ends when what it waits for is there
def test_processes_join_die_by_sigkill_and_the_replay_has_the_bits(tmp_path, capsys):
    """Three jobs of the example; the leader is killed, and started again where its checkpoints are."""
    at = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    flags = ["--set", "worker_timeout=20", "--listen"]
    jobs = [program(tmp_path / "0", *flags, at[0], "--save-every", "3", steps=210)]
    jobs.append(program(tmp_path / "1", *flags, at[1], "--join", at[0], steps=210))

    def lines():
        with suppress(ValueError):
            return read_lines(tmp_path / "1")
        return []

    until = time.monotonic() + 900
    while sum("version" in line for line in lines()) < 12 and time.monotonic() < until:
        time.sleep(0.1)
        for job in jobs:
            assert job.poll() is None, job.communicate()[0]
    while not (saved := list(tmp_path.glob("0/checkpoints/step-*"))) and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(jobs[0].pid, signal.SIGKILL)
    assert saved
    jobs.append(program(tmp_path / "0", *flags, at[0], "--save-every", "999", "--resume", "auto", steps=210))
    outs = [job.communicate(timeout=900)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [-signal.SIGKILL, 0, 0], outs
    found = lines()
    assert [line["worker"] for line in found if line["op"] == "join"] == [0, 1, 2]
    steps = [s for line in found for e in line.get("updates", ()) if e["applied"] for s in range(*e["steps"])]
    assert sorted(steps) == list(range(210))
    assert main(["replay-workers", str(tmp_path / "1")]) == 0
    assert "step 210 of 210: the same bits" in capsys.readouterr().out
    for text in ("this is worker 1 of the run", "worker 0 left", "leads", "step 210 of 210"):
        assert text in outs[1]
    assert [line["worker"] for line in read_lines(tmp_path / "0") if line["op"] == "join"] == [0, 1, 2]
    assert main(["replay-workers", str(tmp_path / "1"), "--picture", str(tmp_path / "run.svg")]) == 0
    assert (tmp_path / "run.svg").read_text().count("worker ") >= 3
    path = tmp_path / "1" / "journal.jsonl"
    first = next(line["updates"][0]["update"] for line in found if "updates" in line)
    path.write_text(path.read_text().replace(first, first[::-1]))
    assert main(["replay-workers", str(tmp_path / "1")]) == 1


OLDER = {"overlap": "False", "embedding_scale": "1.0", "precision": "float64"}


def test_a_stopped_run_goes_on_from_its_last_outer_step(tmp_path):
    """At exit_step, which lies within a phase, and as on a signal. The replay has the bits of all three starts."""
    kept = []
    for flags, signalled in ((["--set", "exit_step=7"], False), ([], True), ([], False)):
        one = trainer(Mesh(), tmp_path, "--listen", "127.0.0.1:0", *flags, steps=30)
        one.stop.asked = signalled
        one.train()
        lines = read_lines(tmp_path)
        assert lines[: len(kept)] == kept
        assert lines[-1]["op"] == "leave"
        about = lines[0]["about"]  # the next start finds a folder as from before these settings
        assert [about.pop(name, default) for name, default in OLDER.items()] == [*OLDER.values()]
        (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        kept = lines
    assert [line["why"] for line in kept if line["op"] == "leave"] == [STOPPED, STOPPED, ENDED]
    assert [step for line in kept for e in line.get("updates", ()) for step in range(*e["steps"])] == list(range(30))
    found = replayed(tmp_path, tmp_path / "r", steps=30)
    assert (found.updates, found.differing) == (10, [])


def test_a_picture_shows_who_trains_waits_and_leaves():
    lines = [
        {"op": "begin", "at": 10.0},
        {"op": "join", "worker": 0, "at": 10.0},
        {"op": "lease", "worker": 0, "phase": 0, "at": 11.0},
        {"op": "update", "at": 14.0, "updates": [{"worker": 0, "phase": 0, "handed": 13.0, "applied": True}]},
        {"op": "lease", "worker": 0, "phase": 1, "at": 14.0},
        {"op": "leave", "worker": 0, "why": STOPPED, "at": 16.0},
        {"op": "join", "worker": 1, "at": 17.0},
    ]
    found, moved, left = command.spans(lines)
    assert found == [(0, "wait", 0, 1), (0, "train", 1, 3), (0, "wait", 3, 4), (0, "lost", 4, 6), (0, "stop", 6, 7)]
    assert (moved, left) == ([4.0], {0: 6.0})
    lines[2:] = [  # with `overlap` it trains on, but for the second that it waited for the exchange before
        {"op": "lease", "worker": 0, "phase": 1, "at": 11.0},
        {"op": "lease", "worker": 0, "phase": 2, "at": 11.0},
        {"op": "update", "at": 14.0, "updates": [{"worker": 0, "phase": 1, "handed": 13.0, "applied": 1, "waited": 1}]},
        {"op": "leave", "worker": 0, "why": "killed", "at": 16.0},
    ]
    assert command.spans(lines)[0] == [(0, "wait", 0, 1), (0, "train", 1, 2), (0, "wait", 2, 3), (0, "lost", 3, 6)]


def test_what_a_run_of_workers_refuses(tmp_path, caplog):
    for odd, said in (({}, "steps 0"), ({"wait": "some"}, "'some'"), ({"rule": Average(), "lr": 0.5}, "lr 0.5")):
        with pytest.raises(ValueError, match=said):
            LocalUpdates(listen="127.0.0.1:0", steps=5 * bool(odd), **odd)
    for alone in ({"wait": "none"}, {"wait": "quorum:2"}, {"staleness": 3}, {"rule": Nesterov()}):
        with pytest.raises(ValueError, match=f"{next(iter(alone))} are of workers"):
            LocalUpdates(**alone)
    LocalUpdates(wait="all")  # is what worlds do
    for wait, given, rule in (("none", {}, Average()), ("quorum:2", {"lr": 0.5}, Average(0.5)), (None, {}, Nesterov()),
                              ("none", {"momentum": 0.9}, Nesterov())):  # fmt: skip
        assert LocalUpdates(listen="127.0.0.1:0", steps=5, wait=wait, **given).outer_rule == rule
    assert caplog.text.count("can diverge") == 1
    with pytest.raises(ValueError, match="--wait none has no effect with neither --listen"):
        trainer(Mesh(), tmp_path, "--wait", "none")
    for each, worlds in ((LocalUpdates(listen="127.0.0.1:0", steps=5), 2), (LocalUpdates(), 1)):
        with pytest.raises(ValueError, match=f"worlds={worlds}"):
            each.check(replace(Mesh(), worlds=Axis(size=worlds)), [])
    single = ["--dtype", "float32"]
    first = trainer(Mesh(), tmp_path / "0", "--listen", "127.0.0.1:0", *single)
    address = worker_of(first.run).peer.node.address
    for flags, said in (
        (["--d-model", "64"], "--d-model is 64"),
        (["--seed", "1"], "data is"),
        (["--lr", "1"], "--lr is 1.0"),
        (["--warmup", "7"], "--warmup is 7"),
        (["--dtype", "bfloat16"], "precision is bfloat16"),
        (["--dtype", "bfloat16", "--set", "autocast=true"], "precision is bfloat16 autocast"),
    ):
        with pytest.raises(ValueError, match=f"{said}.* here, and .* at the run"):
            trainer(Mesh(), tmp_path / "1", "--join", address, *single, *flags)
    worker_of(first.run).peer.close()


def test_rounded_updates_are_smaller_and_replayed_with_their_rounding(tmp_path):
    sent = {}
    for dtype in ("same", "bfloat16", "int8"):
        flags = ["--listen", "127.0.0.1:0", "--set", f"update_dtype={dtype}"]
        one = trainer(Mesh(), tmp_path / dtype, *flags)
        while one.run.step < 18:
            one.step()
        found = replayed(tmp_path / dtype, tmp_path / "r")
        assert (found.updates, found.differing) == (6, [])
        sent[dtype] = worker_of(one.run).peer.sent
    assert sent["bfloat16"] < 0.3 * sent["same"]
    assert sent["int8"] < 0.17 * sent["same"]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_error_feedback_loses_nothing(dtype):
    run = trainer(Mesh(), "none").run
    tensors, total = RunTensors(run), 0.0
    begun = tensors.read()
    for seed in range(5):
        tensors.write(tensors.read())
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(torch.randn(p.shape, dtype=p.dtype, generator=g))
        sent = like(tensors.moved(dtype), begun)
        total = {name: x.double() + (total[name] if total else 0.0) for name, x in sent.items()}
        assert all(0 < rest.norm() < 0.02 * sent[name].norm() for name, rest in tensors.rest.items())
    for name, x in tensors.read().items():
        torch.testing.assert_close(begun[name] - x, total[name] + tensors.rest[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("overlap", some(True, of=[False]))
def test_statistics_and_masks_are_those_of_training_without_workers(overlap):
    """Nesterov's momentum made variances negative, and -inf - -inf a NaN."""

    def train(*observers):
        torch.manual_seed(0)
        model, mesh = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), build_mesh(device_type="cpu")
        model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        model.register_buffer("unset", torch.full((2,), torch.nan))
        run = prepare(
            model, mesh, blocks=[], loss=lambda y, target: (y - target).square().sum(), initialize=False,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0), observers=observers,
        )  # fmt: skip
        for each in observers:
            each.begin()
        while run.step < 16:
            run.forward_backward(1e-3 * torch.randn(8, 4), torch.zeros(8, 4))
            run.optimizer_step()
        return dict(model.named_buffers())

    found = train(LocalUpdates(4, steps=16, listen="127.0.0.1:0", dynamic=False, overlap=overlap))
    for name, x in train().items():
        torch.testing.assert_close(found[name], x, msg=name, equal_nan=True)


@pytest.mark.parametrize(
    "flags", [["--dtype", "bfloat16"], ["--experts", "4", "--set", "moe.aux_loss=none", "moe.bias_rate=0.1"]], ids=str
)
def test_masters_and_buffers_travel_with_the_parameters(flags, tmp_path):
    """What was written is read again to the bit, from masters in float32 if there are any; weights follow them."""
    one = trainer(Mesh(), tmp_path, *flags)
    one.step()
    tensors = RunTensors(one.run)
    anchor = {name: x + torch.randn_like(x) for name, x in tensors.read().items()}
    assert any("bias" in name for name in anchor) or "--dtype" in flags
    tensors.write(anchor)
    assert all(torch.equal(x, anchor[name]) for name, x in tensors.read().items())
    for name, p in one.run.model.named_parameters():
        assert torch.equal(p, anchor[f"model/{name}"].to(p.dtype)), name
    assert all(not x.any() for x in tensors.moved().values())
    one.step()
    assert any(x.any() for x in tensors.moved().values())
    handed, _, now = tensors.read(), one.step(), tensors.read()
    tensors.merge(anchor)  # what changed since `moved` stays
    for name, x in tensors.read().items():
        torch.testing.assert_close(x, anchor[name] + now[name] - handed[name])
    for name, x in tensors.moved().items():
        torch.testing.assert_close(x, handed[name] - now[name], rtol=1e-5, atol=1e-5)
