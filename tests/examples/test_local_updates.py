"""The example with workers that merge: going on from what each has saved, and what is planned for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.gpt.plan import build
from mpcore import build_mesh
from mpcore.checkpoint import checkpoints, inspect, step_path
from mpcore.collectives import all_reduce
from mpcore.sharding.local import local_tensor
from mpcore.tools.analysis.dry_run import dry_run
from tests.examples.test_pretrain import TINY, trainer
from tests.quick import some

FLAGS = ["--dtype", "float64", "--dropout", "0.1", "--micro-batch", "1", "--global-batch", "4"]
MERGES = ["--workers", "2", "--local-steps", "3", "--set", "outer_lr=0.5", "--set", "outer_momentum=0.8"]
STEPS = 8


# --- going on -------------------------------------------------------------------------------------------------------


def save_at(sizes: dict, out: str, steps: list[list[int]]) -> tuple[int, list[float]]:
    t = trainer(*FLAGS, *MERGES, "--out", out, **sizes)
    losses = []
    for step in range(STEPS):
        losses.append(t.step()["loss"])
        if step + 1 in steps[t.mesh.worlds.rank]:
            t.checkpoints.save()
    return t.mesh.worlds.rank, losses


def go_on(sizes: dict, out: str, *flags: str) -> tuple[int, int, list[float]]:
    t = trainer(*FLAGS, *MERGES, "--out", out, "--resume", "auto", *flags, **sizes)
    losses = []
    while t.run.step < STEPS:
        losses.append(t.step()["loss"])
    return t.mesh.worlds.rank, t.checkpoints.first_step, losses


@pytest.mark.parametrize(
    ("steps", "first"),
    some(
        ([[1, 3], [2, 5, 6]], [3, 5]),  # worker 0 has none after the second merge
        of=[
            ([[4], [4]], [4, 4]),
            ([[4], [5]], [4, 5]),  # two steps, but between the same two merges
            ([[1, 3, 6], [2, 5]], [6, 6]),  # worker 1 has none, and takes worker 0's
        ],
    ),
    ids=str,
)
def test_workers_go_on_from_checkpoints_between_the_same_merges(ranks, tmp_path, steps, first):
    wanted = dict(ranks(4, save_at, {"worlds": 2, "tp": 2}, str(tmp_path), steps))
    for worker, begun, losses in ranks(2, go_on, {"worlds": 2}, str(tmp_path)):
        assert begun == first[worker]
        if all(b in of for b, of in zip(first, steps, strict=True)):  # else with another's moments
            assert losses == pytest.approx(wanted[worker][begun:], rel=1e-10)


def shares(out: str, batch: str) -> list[range]:
    t = trainer(*FLAGS, *MERGES, "--out", out, "--resume", "auto", "--global-batch", batch, worlds=2)
    return [t.share(step) for step in range(5, STEPS)]


@pytest.mark.parametrize("batch", some(8, of=[2, 4]))
def test_workers_of_two_steps_share_no_samples_when_the_batch_changes(ranks, tmp_path, batch):
    ranks(2, save_at, {"worlds": 2}, str(tmp_path), [[4], [5]])
    first, second = ranks(2, shares, str(tmp_path), str(batch))
    seen = [*first, *second]
    assert sorted(i for each in seen for i in each) == list(range(seen[0].start, seen[0].start + 3 * batch))
    assert seen[0].start >= 20  # five steps of four samples are behind them


def stop_one(sizes: dict, out: str, at: int) -> tuple[int, bool, list[int]]:
    flags = ["--local-steps", "5", "--eval-every", "0", "--steps", "20", "--set", "check_replicas=0"]
    t = trainer(*FLAGS, *MERGES, *flags, "--out", out, "--resume", "auto", **sizes)
    real = t.step

    def step() -> dict:
        if t.run.step == at and t.mesh.job.rank == t.mesh.job.size - 1:
            t.stop.asked = True
        return real()

    t.step = step
    t.train()
    return t.mesh.worlds.rank, t.stop.stopped, [inspect(path).step for path in checkpoints(t.checkpoints.path, t.mesh)]


@pytest.mark.parametrize(("at", "saved"), some((3, [9, 5]), of=[(1, [4, 3]), (2, [4, 4]), (5, [9, 7])]), ids=str)
def test_when_one_rank_is_asked_to_stop_all_workers_save_before_the_next_merge(ranks, tmp_path, at, saved):
    for worker, stopped, steps in ranks(4, stop_one, {"worlds": 2, "tp": 2}, str(tmp_path), at, timeout=60):
        assert stopped
        assert steps == [saved[worker]]
    for _, stopped, steps in ranks(4, stop_one, {"worlds": 2, "tp": 2}, str(tmp_path), 18, timeout=60):
        assert (stopped, max(steps)) == (False, 20)


def test_a_damaged_checkpoint_of_one_worker_is_passed_over_by_all(ranks, tmp_path):
    steps = [[2, 4], [2, 4]]
    wanted = dict(ranks(2, save_at, {"worlds": 2}, str(tmp_path), steps))
    file = next(step_path(tmp_path / "worker-1" / "checkpoints", 4).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for worker, begun, losses in ranks(2, go_on, {"worlds": 2}, str(tmp_path)):
        assert begun == 4  # worker 1 takes worker 0's, whose own losses are the same until they merge
        if worker == 0:
            assert losses[:2] == pytest.approx(wanted[worker][4:6], rel=1e-10)


def save_alone(out: str) -> list[int]:
    t = trainer(*FLAGS, *MERGES, "--out", out, "--set", "async_save=true", worlds=2, tp=2)
    for step in range(3):
        t.step()
        if step == 0 and t.mesh.worlds.rank == 1:
            t.checkpoints.save()
            assert t.checkpoints.saving is not None
            t.checkpoints.saving.wait()
    again = build_mesh(worlds=2, tp=2)  # the groups that all make later are still the same on all
    assert all_reduce(torch.ones(()), again.worlds) == 2
    return [inspect(path).step for path in checkpoints(t.checkpoints.path, t.mesh)]


def test_a_worker_saves_in_the_background_without_the_others(ranks, tmp_path):
    assert ranks(4, save_alone, str(tmp_path), timeout=30) == [[], [], [1], [1]]


def skip_on_one(out: str) -> None:
    t = trainer(*FLAGS, *MERGES, "--steps", "4", "--eval-every", "0", "--out", out, worlds=2)
    real = t.step

    def step() -> dict:
        bad = t.run.step == 2 and t.mesh.worlds.rank == 1
        hook = t.model.norm.weight.register_hook(lambda grad: grad * (torch.nan if bad else 1.0))
        found = real()
        hook.remove()
        return found

    t.step = step
    t.train()


def test_a_worker_that_skips_a_step_merges_all_the_same(ranks, tmp_path):
    ranks(2, skip_on_one, str(tmp_path), timeout=60)
    skipped = [tmp_path / f"worker-{worker}" / "skipped.jsonl" for worker in range(2)]
    assert [path.exists() for path in skipped] == [False, True]
    first, second = ([r["merge"] for r in read(path.parent) if "merge" in r] for path in skipped)
    assert first == second
    assert len(first) == 1
    (line,) = skipped[1].read_text().splitlines()
    assert json.loads(line)["samples"] == [10, 11]  # of step 2 with four samples, the second worker's


def go_on_alone(out: str) -> tuple[int, set[str], list[float]]:
    t = trainer(*FLAGS, "--out", out, "--resume", "auto")
    slots = {slot for state in t.run.optimizer.state.values() for slot in state}
    return t.run.step, slots, [float(local_tensor(p).sum()) for p in t.model.parameters()]


def test_the_number_of_workers_may_change(ranks, tmp_path):
    """One goes on alone from worker 0's; of three the last has none of its own, and takes worker 0's too."""
    ranks(2, save_at, {"worlds": 2}, str(tmp_path), [[3], [3]])
    ((first, slots, _),) = ranks(1, go_on_alone, str(tmp_path))
    assert first == 3
    assert slots == {"step", "exp_avg", "exp_avg_sq"}
    found = ranks(3, go_on, {"worlds": 3}, str(tmp_path), "--workers", "3", "--global-batch", "6")
    assert [begun for _, begun, _ in found] == [3, 3, 3]
    assert len({losses[0] for *_, losses in found}) == 3  # other samples


# --- planned --------------------------------------------------------------------------------------------------------


def held_by_optimizer(zero: str, momentum: str) -> int:
    flags = ["--workers", "2", "--set", f"outer_momentum={momentum}", "--zero", zero, "--micro-batch", "1"]
    t = trainer(*flags, worlds=2, dp=2)
    t.step()
    return sum(local_tensor(x).nbytes for state in t.run.optimizer.state.values() for x in state.values())


@pytest.mark.parametrize(("zero", "momentum"), some(("2", "0.9"), of=[("0", "0.9"), ("2", "0")]))
def test_the_plan_of_memory_counts_what_merges_need(ranks, zero, momentum):
    held, *_ = ranks(4, held_by_optimizer, zero, momentum)
    flags = [*TINY, "--workers", "2", "--set", f"outer_momentum={momentum}", "--zero", zero, "--micro-batch", "1"]
    plan, alone = (dry_run(build, each, 0, dp=2) for each in (flags, [*TINY, "--zero", zero, "--micro-batch", "1"]))
    assert plan.held.optimizer == pytest.approx(held, rel=0.01)
    assert plan.held.optimizer > alone.held.optimizer * (1.4 if momentum == "0" else 1.9)


# --- as people start it ---------------------------------------------------------------------------------------------


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
