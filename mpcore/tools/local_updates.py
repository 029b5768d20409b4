"""Local-update training: workers train separately for many steps, then merge (Local SGD, DiLoCo).

A worker is a world of the mesh: `build_mesh(worlds=4, ...)` splits the job into four workers, each with its own mesh.
Between two merges, workers do not communicate. Or each worker is a job of its own (`mpcore.tools.workers`).
`LocalUpdates` is an observer of a run of `mpcore.prepare`; `mpcore.tools.diloco` is for a training loop of your own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import Logger, get_logger
from mpcore.tools.diloco import OUTER_SLOTS, DiLoCo, Merge, check_options
from mpcore.tools.workers.elastic import ElasticWorker
from mpcore.tools.workers.outer import Options
from mpcore.tools.workers.rules import Average, Nesterov, Rule
from mpcore.training.observers import Observer
from mpcore.training.run import Run

log: Logger = get_logger(__name__)
_OF_JOBS = ("steps", "folder", "token", "data", "rule", "wait", "staleness", "dynamic", "timeout", "replicas",
            "update_dtype", "overlap", "defaults", "should_stop")  # fmt: skip


@dataclass
class LocalUpdates(Observer):
    """Train several workers separately, and merge their parameters (DiLoCo, Local SGD). Pass it to `prepare`.

    The workers are the worlds of one job, `build_mesh(worlds=...)`: they merge every `every` steps, and each waits for
    all. Or each worker is a job of its own, if `listen` or `join` is given: it trains up to `every` steps from the
    newest anchor, the shared parameters, and hands in its update. Slow workers take fewer steps (`dynamic`), so that
    all hand in at about the same time; or nobody waits (`wait`). Then workers may come and die.

    Args:
        every: the number of steps between two merges of a parameter.
        lr, momentum, nesterov: options of the outer optimizer, which merges the workers. lr 1 and momentum 0 average
            the parameters (Local SGD): the default of jobs that don't wait for all. None is otherwise 0.7 and 0.9.
        fragments: the number of parts of the model, which are merged in turn.
        listen: where this worker serves the others, host:port.
        join: host:port of a worker of the run, or several. The first worker of a run has none.
        steps: the steps of the run, over all workers that are jobs of their own.
        folder: for the journal and the outer state of these workers, which `replay_runs` and a restart read.
        token: the file with the secret that these workers share. None: the variable MPCORE_SECRET.
        data: names the data, or settings by name. A worker with other data, another model, optimizer or option is
            refused, with the name and both values.
        should_stop: called on each rank about once a second while this worker waits for others. If it returns True on
            any rank, the wait ends on all ranks, and `stopped` is True.
        defaults: the settings in `data` of a run that an older program began, without them.
        rule: the outer rule (`mpcore.tools.workers`), instead of `Average(lr)` or `Nesterov(lr, momentum, nesterov)`.
        wait, staleness, dynamic, timeout, replicas, update_dtype, overlap: of `mpcore.tools.workers.outer.Options`;
            wait None is "all". Worlds always wait for all, and take equal steps.

    Attributes:
        optimizer: the `DiLoCo`, which is then the optimizer of the run, if the workers are worlds.
        merged: the `Merge` after the last step; None if no merge was due.
        worker: the `ElasticWorker`, if the workers are jobs.

    Raises:
        ValueError: if a number is out of range. `prepare` raises it on every rank if there is one worker, or fragments
            of pipeline stages need the blocks' numbers.

    Note:
        - If workers are jobs, call `begin` before the first batch, and read `run.step` anew for each batch: it jumps
          from phase to phase. At the end all workers have the last anchor.

    Example:
        >>> LocalUpdates(every=50, fragments=2).every
        50
    """

    every: int = 100
    lr: float | None = None
    momentum: float | None = None
    nesterov: bool = True
    fragments: int = 1
    listen: str | None = None
    join: str | Sequence[str] = ()
    steps: int = 0
    folder: str | os.PathLike[str] | None = None
    token: str | os.PathLike[str] | None = None
    data: str | Mapping[str, str] = ""
    defaults: Mapping[str, str] | None = None
    should_stop: Callable[[], bool] | None = field(default=None, repr=False, compare=False)
    rule: Rule | None = None
    wait: str | None = None
    staleness: int | None = None
    dynamic: bool = True
    timeout: float = 60.0
    replicas: int = 1
    update_dtype: str = "same"
    overlap: bool = False
    merged: Merge | None = field(default=None, init=False, repr=False, compare=False)
    worker: ElasticWorker | None = field(default=None, init=False, repr=False, compare=False)

    joins_worlds: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = OUTER_SLOTS

    def __post_init__(self) -> None:
        if self.rule is not None and (self.lr, self.momentum, self.nesterov) != (None, None, True):
            own = f"lr {self.lr}, momentum {self.momentum} and nesterov {self.nesterov}"
            raise ValueError(f"LocalUpdates got {own} beside rule={self.rule}: give these to the rule alone")
        averages = self.are_jobs and self.wait not in (None, "all") and not self.momentum
        lr = (1.0 if averages else 0.7) if self.lr is None else self.lr
        momentum = (0.0 if averages else 0.9) if self.momentum is None else self.momentum
        check_options(self.every, lr, momentum, self.fragments)
        self.lr, self.momentum = (lr, momentum) if self.rule is None else (None, None)
        self.outer_rule: Rule = self.rule or (Average(lr) if averages else Nesterov(lr, momentum, self.nesterov))
        names = ("every", "staleness", "dynamic", "timeout", "replicas", "update_dtype", "overlap")
        self.options: Options = Options(wait=self.wait or "all", **{name: getattr(self, name) for name in names})
        own = LocalUpdates.__dataclass_fields__  # those below are of jobs alone
        given = [name for name in _OF_JOBS if getattr(self, name) != own[name].default]
        if given and not self.are_jobs and (given != ["wait"] or self.wait != "all"):
            raise ValueError(f"{', '.join(given)} are of workers that are jobs of their own: give listen or join, too")
        if self.are_jobs and (self.steps < 1 or self.fragments > 1):
            raise ValueError(f"worker jobs got steps {self.steps} and {self.fragments} fragments: 1 or more, 1")
        rule = self.outer_rule
        if self.are_jobs and self.options.wait == "none" and isinstance(rule, Nesterov) and rule.momentum > 0:
            log.warning("%s can diverge with wait 'none': it adds up stale updates. The default is Average()", rule)

    @property
    def are_jobs(self) -> bool:
        """Whether each worker is a job of its own."""
        return self.listen is not None or bool(self.join)

    def check(self, mesh: Mesh, blocks: Sequence[nn.Module] | Mapping[int, nn.Module]) -> None:
        """Raise ValueError if there is one worker, or the blocks of a pipeline stage have no numbers."""
        if self.are_jobs != (mesh.worlds.size == 1):
            raise ValueError(
                f"build_mesh(worlds={mesh.worlds.size}) with {self}: one worker merges with other jobs (listen=, "
                f"join=), several worlds with each other"
            )
        if self.fragments > 1 and mesh.pp.size > 1 and not isinstance(blocks, Mapping):
            raise ValueError(
                f"{self.fragments} fragments on {mesh.pp.size} pipeline ranks need the blocks' numbers in the "
                f"unsharded model: blocks={{number: block}}"
            )
        self.blocks = blocks

    def attach(self, run: Run) -> None:
        """Wrap the optimizer of the run, if the workers are worlds."""
        self.run = run
        self.begun = False
        if self.are_jobs:
            self.worker = ElasticWorker(
                run, options=self.options, rule=self.outer_rule, until=self.steps, listen=self.listen,
                join=[self.join] if isinstance(self.join, str) else self.join, token=self.token, folder=self.folder,
            )  # fmt: skip
            return
        options = {name: getattr(self, name) for name in ("lr", "momentum", "nesterov", "fragments")}
        self.optimizer: DiLoCo = DiLoCo(run.optimizer, run.model, run.mesh, self.every, blocks=self.blocks, **options)
        run.optimizer = self.optimizer

    def begin(self) -> None:
        """Check that all workers start from the same parameters. The first step after `prepare` or a load calls it.

        If workers are jobs, call it yourself: it joins the run, loads the anchor and sets `run.step`.

        Raises:
            ValueError: on every rank, if workers start from different merges, or this worker doesn't fit the run.
        """
        if not self.begun:
            if self.worker is not None:
                self.worker.should_stop = self.should_stop or self.worker.should_stop
                self.worker.begin(self.data, self.defaults or {})
            else:
                with self.run.parameters():
                    self.optimizer.begin()
        self.begun = True

    def stop(self, seconds: float = 10.0) -> None:
        """Leave a run of jobs before its last step. Others go on. If all stop, start them again to go on.

        Args:
            seconds: how long the worker that leads serves others that stop, too, so that its folder has all updates.

        Raises:
            ValueError: on every rank, if the outer state can't be written.
        """
        if self.worker is not None and self.begun:
            self.worker.stop(seconds)

    @property
    def stopped(self) -> bool:
        """Whether `should_stop` ended a wait, on all ranks alike. Then no step is left to train: call `stop`."""
        return self.worker is not None and self.worker.stopped

    def before_forward(self, run: Run, tokens: Tensor | int, arguments: Mapping[str, Any]) -> None:
        """Call `begin`."""
        if self.worker is not None and not self.begun:
            raise ValueError(f"step {run.step} begins before LocalUpdates.begin(), which says what its number is")
        self.begin()

    def after_step(self, run: Run, taken: bool) -> None:
        """Merge the workers if a merge is due."""
        self.merged = None
        if self.worker is not None:
            self.worker.after_step()
        elif self.optimizer.due(run.step) is not None:
            with run.parameters():
                self.merged = self.optimizer.merge(run.step)

    def state(self) -> dict[str, Any]:
        """Call `begin`: the tensors of a checkpoint are in the optimizer's state."""
        if self.worker is None:
            self.begin()
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Let the next step call `begin`."""
        if self.worker is not None and self.begun:
            raise ValueError(f"worker {self.worker.number} loads a checkpoint in a run of several: load before begin()")
        self.begun: bool = False
