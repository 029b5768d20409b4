"""Load and save the checkpoints of a run, refuse those of other runs, and stop a run before its end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.gpt.arguments import flag
from examples.gpt.config import GPTConfig
from examples.gpt.console import Console
from examples.gpt.policies import learning_rate, local_updates, lr_schedule
from examples.gpt.setup import Setup, about, other_dtype
from mpcore import Mesh, Run
from mpcore.checkpoint import Loaded, Saving, checkpoints, inspect, latest, load, step_path
from mpcore.checkpoint.format import read_manifest
from mpcore.checkpoint.remote import as_path, store_of
from mpcore.collectives import all_reduce
from mpcore.interop.hugging_face import ROUTER_BIAS, ROUTER_STATISTICS
from mpcore.mesh import raise_together, raising_together
from mpcore.mesh.agreement import gather_objects
from mpcore.tools.fault_tolerance.faults import check_writable, was_restarted
from mpcore.tools.fault_tolerance.metrics import read_records, write_whole
from mpcore.tools.fault_tolerance.signals import SharedRequests, StopSignals

SCHEDULE = "lr_schedule"
"""The field of a checkpoint's `extra` that holds the flags of the learning rate schedule."""


class Checkpoints:
    """Loads and saves a run. With several workers, each has its own folder."""

    def __init__(self, run: Run, setup: Setup, args: argparse.Namespace, out: Path, console: Console) -> None:
        self.run, self.setup, self.args, self.out, self.console = run, setup, args, out, console
        self.mesh, self.path, self.updates = run.mesh, out / "checkpoints", local_updates(run)
        self.about = about(setup, args.optimizer)
        self.first_step = self.first_sample = 0
        self.saving: Saving | None = None

    def sample(self, step: int) -> int:
        """Return the global index of a step's first sample, over all workers. It is the whole state of the data."""
        return self.setup.ramp.after(self.first_sample, step - self.first_step)

    def samples(self, step: int) -> range:
        """Return the global indices of a step's samples, over all workers."""
        return range(self.sample(step), self.sample(step + 1))

    @property
    def is_job(self) -> bool:
        """Whether this job is one worker of a run, and others may join it."""
        return bool(self.args.listen or self.args.join)

    # --- where a run begins -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Resume from a checkpoint, or load the weights that the flags name, or keep the values that `prepare` drew."""
        args = self.args
        if not self._resume():
            with self.run.parameters() as model:
                if args.init_from:
                    init_from(args.init_from, model, self.mesh)
            moe = self.setup.config.moe
            if args.init_from and self.console.lead and moe is not None and moe.bias and moe.bias_rate == 0:
                print(f"the experts' bias of {args.init_from} stays as it is: moe.bias_rate moves it", flush=True)
        if self.updates is not None:
            self.updates.begin()

    def _resume(self) -> bool:
        """Resume from the checkpoint that `--resume` asks for, if there is one; `auto` skips damaged ones.

        Each worker resumes from its own checkpoint. Their steps may differ, but all must lie between the same two
        merges. A worker without such a checkpoint takes worker 0's.
        """
        resume = self.args.resume
        restarted = torch.tensor(int(was_restarted() and self.args.save_every > 0), device=self.mesh.device)
        if int(all_reduce(restarted, self.mesh.job, "max")):  # torchrun counts restarts on each node alone
            own = self._common(self.own())
            resume = resume if resume != "none" and not own else "auto"
        if resume == "none" or (resume == "auto" and self.is_job):  # it begins with the anchor and an empty optimizer
            return False
        found = self.own() if resume == "auto" else [as_path(resume)]
        error, loaded, path = None, None, None
        while path := next(iter(self._common(found)), None):
            self._check(path, resume)
            loaded, problem, failed = self._try_to_load(path)
            if not failed:
                break
            loaded, error = None, error or problem
            if problem is not None:
                found = [other for other in found if other != path]
                if self.console.lead and resume == "auto":
                    print(f"passed over: {error}", file=sys.stderr, flush=True)
        if loaded is None:
            raise_together(error)
            if found and self.console.lead:
                print(f"{found[0]} is passed over: the workers have none in common", file=sys.stderr, flush=True)
            return False
        self.first_step, self.first_sample = loaded.step, loaded.sample
        # Workers may resume from different steps. Let all count their samples from the one that is furthest ahead.
        before = self.first_step * self.args.global_batch
        ahead = torch.tensor(self.first_sample - before, device=self.mesh.device)
        self.first_sample = before + int(all_reduce(ahead, self.mesh.worlds, "max"))
        if self.console.lead:
            worker = f"worker {self.mesh.worlds.rank} " if self.mesh.worlds.size > 1 else ""
            other = f" of {path}" if path is not None and self.out not in path.parents else ""
            print(f"{worker}resumed after step {loaded.step}, from sample {loaded.sample}{other}", flush=True)
            schedule = lr_schedule(self.args)
            changed = other_schedule(loaded.extra.get(SCHEDULE, schedule), schedule, loaded.step)
            if changed is not None:
                print(changed, flush=True)
        return True

    def _check(self, path: Path, resume: str) -> None:
        newest = None if resume == "auto" else latest(self.path, self.mesh)
        refused = other_run(path, self.about, self.args.seed, self.args.dtype, bool(self.args.init_from))
        raise_together(refused or left_behind(path, newest))

    def _try_to_load(self, path: Path) -> tuple[Loaded | None, ValueError | None, bool]:
        """Return what was loaded, the error of this worker, and whether any worker had an error."""
        loaded, problem = None, None
        try:
            loaded = self.run.load(path)
        except ValueError as refused:
            problem = refused
        failed = torch.tensor(int(problem is not None), device=self.mesh.device)
        if int(all_reduce(failed, self.mesh.worlds, "max")):
            return None, problem, True
        try:
            if self.updates is not None:
                self.updates.begin()
        except ValueError as refused:  # on all workers: each tries its checkpoint before this one
            return None, refused, True
        return loaded, None, False

    def own(self) -> list[Path]:
        """List the checkpoints of this worker, of worker 0 and of a run without workers; newest first in each."""
        places = [self.out, Path(self.args.out) / "worker-0", Path(self.args.out)]
        by_place = [checkpoints(at / "checkpoints", self.mesh) for at in dict.fromkeys(places)]
        found = [path for paths in by_place for path in paths]
        if self.updates is None and sum(map(bool, by_place)) > 1:
            found.sort(key=lambda path: -read_manifest(path).step)
        return found

    def _common(self, found: list[Path]) -> list[Path]:
        """Keep the checkpoints since the latest merge after which every worker has a checkpoint."""
        if self.updates is None:
            return found
        merges = {path: self.updates.optimizer.merges_until(read_manifest(path).step) for path in found}
        every = gather_objects(set(merges.values()), self.mesh.worlds.group)
        most = max(set.intersection(*every), default=None)
        return [path for path in found if merges[path] == most]

    # --- the folder ---------------------------------------------------------------------------------------------------

    @contextmanager
    def folder(self) -> Iterator[list[dict]]:
        """Make the run's folder, and lock it against other runs. Give the records of earlier steps.

        Raises:
            ValueError: on every rank, if the folder holds another run or can't be written.
        """
        found = self.own() if self.args.resume == "none" and self.first_step == 0 and not self.is_job else []
        with raising_together():
            if found:
                raise ValueError(f"{found[0]} is there: --resume auto goes on from it, another --out begins anew")
        records: list[dict] = []
        with ExitStack() as stack:
            with raising_together():
                try:
                    records = self._write_config(stack) if self.console.lead else []
                except OSError as problem:
                    raise ValueError(f"--out {self.out} can't be written: {problem}") from problem
            with raising_together():
                if not self.args.no_save:
                    check_writable(self.path, self.mesh.world.rank)
            yield records

    def _write_config(self, stack: ExitStack) -> list[dict]:
        out = self.out
        out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(store_of(out).lock(out) or nullcontext())
        config = {"model": dataclasses.asdict(self.setup.config), "run": vars(self.args)}
        write_whole(out / "config.json", json.dumps(config, indent=2) + "\n")
        first, records = self.run.step if self.is_job else self.first_step, list[dict]()
        for path in (out / "skipped.jsonl", out / "metrics.jsonl"):
            records = read_records(path, first)  # later steps are trained again
            if path.is_file():
                write_whole(path, "".join(json.dumps(entry) + "\n" for entry in records))
        if not self.args.no_save:
            self.path.mkdir(exist_ok=True)  # if this fails, let it fail now
        return records

    # --- saving -------------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step: at the end of a run, and as often as `--save-every` says."""
        args = self.args
        return not args.no_save and (
            max(step + 1, self.run.step) == args.steps or (args.save_every > 0 and (step + 1) % args.save_every == 0)
        )

    @property
    def last(self) -> Path | None:
        """The checkpoint after the last step, if there is one."""
        return path if (path := step_path(self.path, self.run.step)).is_dir() else None

    def save(self) -> None:
        """Write a checkpoint."""
        carried = self.setup.carried
        state: dict[str, Any] = {"sample": self.sample(self.run.step), "config": self.about}
        state |= {"extra": {**carried.extra, SCHEDULE: lr_schedule(self.args)}}
        state |= {"keep": self.args.keep, "beside": carried.beside}
        if not self.args.async_save:
            self.run.save(self.path, **state)
            return
        self.wait()
        began = time.perf_counter()
        saving = self.run.save(self.path, background=True, **state)
        assert isinstance(saving, Saving)
        self.saving = saving
        name, seconds = step_path(self.path, self.run.step).name, time.perf_counter() - began
        self.console.tell(f"saving {name} in the background, copied in {seconds:.2f} s")

    def save_last(self) -> None:
        """Save, and wait until it is written. A failed save is an error here, because no other save follows."""
        self.attempt(self.wait)
        self.save()
        self.wait()

    def save_and_leave(self) -> None:
        """Save, unless with `no_save`, because the run ends before its last step."""
        if not self.args.no_save:
            self.save_last()
        if self.console.lead:
            saved, more = step_path(self.path, self.run.step), "; --resume auto continues from there"
            if self.args.no_save:
                saved, more = "nothing, as no_save says,", ""
            more = "; the same command joins the run again" if self.is_job else more
            print(f"saved {saved} and stopped{more}", flush=True)

    def wait(self) -> None:
        """Wait until a save in the background has ended."""
        if self.saving is not None:
            try:
                self.saving.wait()
                self.tell_saved()
            finally:
                self.saving = None

    def tell_saved(self) -> None:
        """Print the size and speed of a save in the background, once, when it has ended."""
        saving = self.saving
        if saving is not None and saving.done and saving.bytes:
            self.saving = None
            size, rate = saving.bytes / 1e6, saving.bytes / 1e6 / max(saving.seconds, 1e-9)
            self.console.tell(f"saved {saving.path.name}: {size:.1f} MB in {saving.seconds:.2f} s ({rate:.0f} MB/s)")

    def attempt(self, work: Callable[[], Any]) -> None:
        """Save, or wait for a save. If it fails, print a warning: the next save tries again. Call it on all ranks."""
        try:
            work()
        except ValueError as error:
            self.console.tell(f"NOT SAVED, training goes on: {error}", file=sys.stderr)


def other_run(path: Path, about: Mapping[str, Any], seed: int, dtype: str, begun_elsewhere: bool) -> ValueError | None:
    """Return why a run can't resume from a checkpoint, or None. `load` refuses a checkpoint that can't be read.

    Args:
        about: the facts of this run that must be the same in the checkpoint.
        begun_elsewhere: whether the flags name a model to begin with.
    """
    try:
        manifest = inspect(path)
    except (ValueError, OSError):
        return None
    saved: dict[str, Any] = {"tokenizer": about["tokenizer"], **manifest.config, "seed": manifest.seed}
    saved["model"] = dataclasses.asdict(GPTConfig()) | saved.get("model", {})  # fields that came later
    refused = other_dtype(path, manifest, dtype)
    if refused is not None:
        return refused
    found = differing(saved, {**about, "seed": seed})
    if not found:
        return None
    begun = ""
    if not begun_elsewhere and saved["model"] != about["model"]:
        begun = " If it began with --init-from, give that again: the shape comes from there."
    return ValueError(
        f"{path} is of another run: {'; '.join(found)}.{begun} --init-from {path} with another --out begins a new "
        f"one from its weights"
    )


def other_schedule(saved: Mapping[str, Any], schedule: Mapping[str, Any], step: int) -> str | None:
    """Describe how the learning rate schedule differs from the saved run's. Return None if the rates to come are equal.

    Args:
        saved, schedule: what `lr_schedule` returned for the saved run, and returns for this run.
        step: the number of steps done.
    """
    changed = [name for name in schedule if saved[name] != schedule[name]]
    both = (saved, schedule)
    for at in range(step, max(step, *(s["lr_decay_steps"] for s in both)) + 1 if changed else step):
        old, new = (f"{learning_rate(s, at):.3g}" for s in both)
        if old != new:
            before, now = (" ".join(f"{flag(n)} {s[n]}" if s[n] is not None else f"no {flag(n)}" for n in changed)
                           for s in both)  # fmt: skip
            return (
                f"the learning rate after {at} steps is {new} with {now}; the saved run's schedule gives {old}: "
                f"{before} keeps it"
            )
    return None


def left_behind(path: Path, newest: Path | None) -> ValueError | None:
    """Return why a run can't resume from a checkpoint that isn't the newest: `auto` and restarts would take another."""
    try:
        if newest is None or read_manifest(newest).step <= read_manifest(path).step:
            return None
    except (ValueError, OSError):  # which `load` reports
        return None
    return ValueError(
        f"--resume {path} leaves behind what was trained after it, up to {newest}, from which restarts and "
        f"--resume auto would go on: take another --out, or remove or rename the later checkpoints"
    )


def differing(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> list[str]:
    """List the fields in which two configs differ, each with both values."""
    found = []
    for name in dict.fromkeys([*here, *there]):
        a, b = there.get(name), here.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differing(a, b, f"{within}{name}.")
        elif a != b:
            a, b = ("not set" if value is None else repr(value) for value in (a, b))
            found.append(f"{within}{name} is {a} there, {b} here")
    return found


def init_from(path: str, model: nn.Module, mesh: Mesh) -> None:
    """Load the weights of a checkpoint. If it has no bias or statistics of routers, these keep their first values."""
    loaded = load(path, model, mesh=mesh, strict=False, cast=True)  # an import may be in half precision
    missing = [name for name in loaded.missing_keys if not name.endswith((ROUTER_BIAS, ROUTER_STATISTICS))]
    if missing or any(not name.endswith(ROUTER_STATISTICS) for name in loaded.unexpected_keys):
        load(path, model, mesh=mesh, cast=True)  # raises, and names them


class Stop:
    """Decides whether to stop after a step.

    Attributes:
        asked: set it to save and leave after this step, as on a signal.
        signals: catches signals; None before somebody sets it.
        stopped: whether the ranks have agreed to stop.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints) -> None:
        self.run, self.checkpoints, self.updates = run, checkpoints, local_updates(run)
        self.job = local_updates(run, are_jobs=True)
        self.signals: StopSignals | None = None
        self.ends = time.monotonic() + 60 * (checkpoints.args.exit_minutes or math.inf)
        self.asked = self.stopped = False
        self.wishes = SharedRequests(run.mesh.world)

    def is_asked(self) -> bool:
        """Return whether this rank was asked to stop. Other ranks may not know yet."""
        late = time.monotonic() >= self.ends
        return self.asked or late or (self.signals is not None and self.signals.asked)

    def after_step(self, until: int) -> bool:
        """Return whether any rank was asked to stop, and `until` steps are not done. Print the error of a failed save.

        Ranks hear of each other a step late. Workers ask each other in the last step before a merge, which waits for
        every worker.
        """
        if self.job is not None and self.job.stopped:  # all ranks know it, and there is no next step
            self.stopped = True
            return True
        failed = (saving := self.checkpoints.saving) is not None and saving.failed
        granted = self.wishes.after_step(self.run.step, stop=self.is_asked(), failed=failed)
        if "failed" in granted:
            self.checkpoints.attempt(self.checkpoints.wait)
        stop = self._any_worker("stop" in granted) if self._before_merge() else "stop" in granted
        self.stopped = stop and self.run.step < until
        return self.stopped

    def before_steps(self) -> bool:
        """Return whether another worker stops. A run that resumes right before a merge asks as the step before did."""
        self.stopped = self._before_merge() and self._any_worker(False)
        return self.stopped

    def tell_workers(self) -> None:
        """Tell the other workers that this one stops, before they wait for it in a merge."""
        if self.stopped and self.updates is not None and not self._before_merge():
            with suppress(RuntimeError):  # other workers may have reached their end
                self._any_worker(True)

    def _before_merge(self) -> bool:
        return self.updates is not None and self.updates.optimizer.due(self.run.step + 1) is not None

    def _any_worker(self, stop: bool) -> bool:
        """Return whether any worker stops. Each worker asks once between two merges."""
        mesh = self.run.mesh
        return bool(all_reduce(torch.tensor(int(stop), device=mesh.device), mesh.worlds, "max"))
