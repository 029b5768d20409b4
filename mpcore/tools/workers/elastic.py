"""A `Run` as a worker: its parameters as logical tensors, whatever its layout, and its phases."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpcore.checkpoint.pieces import LocalTensor, held_by_model, masters_of
from mpcore.collectives import all_reduce
from mpcore.layers.moe.router import Router
from mpcore.mesh.agreement import exchange
from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import local_tensor, reshard
from mpcore.tools.fault_tolerance.signals import SharedRequests
from mpcore.tools.workers.journal import Replayed, read_lines, replay
from mpcore.tools.workers.outer import Options, Tensors, like, rounded
from mpcore.tools.workers.peer import Peer, Phase, start
from mpcore.tools.workers.rules import Rule
from mpcore.tools.workers.wire import read_token, split_address
from mpcore.training.policies import DTYPES
from mpcore.training.run import Run


class RunTensors:
    """The trained parameters, routers' biases and floating-point buffers of a run, as logical tensors on rank 0.

    A parameter with a master weight is read and written as the master weight. All ranks of the mesh make the calls.

    Args:
        run: a run of any layout.
        everywhere: whether each rank gets the tensors, and not rank 0 alone.

    Attributes:
        shapes: shape and dtype of each tensor of the unsharded model.
        averaged: the names of the tensors that no worker trains: an outer step takes their mean.
    """

    def __init__(self, run: Run, everywhere: bool = False) -> None:
        self.run = run
        self.mesh: Mesh = run.mesh
        self.group: Any = run.mesh.world.group
        self.keeps: bool = everywhere or run.mesh.world.rank == 0
        trained = {f"model/{name}" for name, p, _ in declarations(run.model) if p.requires_grad}
        mine = {}
        for x in self._held()[0]:
            dtype = torch.promote_types(x.tensor.dtype, torch.float32)
            mine[x.name] = tuple(x.shape), dtype, x.name in trained
        found = exchange(
            None, mine, self.group, lambda all_of: {n: said for each in all_of for n, said in each.items()}
        )
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {n: (x, y) for n, (x, y, _) in found.items()}
        self.averaged: list[str] = [name for name, (_, _, is_trained) in found.items() if not is_trained]
        self.base: Tensors = {}
        self.handed: Tensors = {}  # the tensors at the last `moved`
        self.rest: Tensors = {}  # what rounding cut off the last update

    def _held(self) -> tuple[list[LocalTensor], dict[Tensor, Tensor]]:
        reshard(self.run.model)
        masters = masters_of(self.run.optimizer)
        routers = [module for module in self.run.model.modules() if isinstance(module, Router)]
        moved = {id(p) for router in routers for p in router.statistics}  # `update_routers` changes them
        named = declarations(self.run.model)
        frozen = {f"model/{name}" for name, p, _ in named if not p.requires_grad and id(p) not in moved}
        held = held_by_model(self.run.model, self.mesh, masters)
        return [x for x in held if x.name not in frozen and x.tensor.is_floating_point()], masters

    @torch.no_grad()
    def read(self) -> Tensors:
        """Return the logical tensors in at least float32 on the CPU of rank 0; on other ranks none."""
        with self.run.parameters():
            held, found = {x.name: x for x in self._held()[0]}, {}
            for name, (shape, dtype) in sorted(self.shapes.items()):
                full = torch.zeros(shape, dtype=dtype, device=self.mesh.device)
                if name in held:
                    for box in held[name].boxes:
                        if box.owned:
                            box.of_logical(full).copy_(box.of(held[name].tensor))
                full = all_reduce(full, self.mesh.world).add_(0.0)  # -0.0 is 0.0 on every layout
                if self.keeps:
                    found[name] = full.cpu()
        return found

    @torch.no_grad()
    def write(self, tensors: Tensors) -> None:
        """Copy logical tensors of rank 0 into the run; other ranks pass none. `moved` counts from here."""
        with self.run.parameters():
            local, masters = self._held()
            held = {x.name: x for x in local}
            for name, (shape, dtype) in sorted(self.shapes.items()):
                full = torch.zeros(shape, dtype=dtype, device=self.mesh.device)
                if self.mesh.world.rank == 0:
                    full.copy_(tensors[name])
                full = all_reduce(full, self.mesh.world)
                for box in held[name].boxes if name in held else ():
                    box.of(held[name].tensor).copy_(box.of_logical(full))
            for p, master in masters.items():
                local_tensor(p.detach()).copy_(local_tensor(master.detach()))
        self.base = self.read()

    def merge(self, anchor: Tensors) -> None:
        """Write the anchor plus what the tensors changed since the last `moved`. The next `moved` counts from there."""
        now = self.read()
        self.write({name: anchor[name] + _less(x, self.handed[name]) for name, x in now.items()})
        self.base = anchor

    def moved(self, update_dtype: str = "same") -> Tensors:
        """Return what the tensors lost since `write`, on rank 0, rounded with error feedback unless "same"."""
        now = self.handed = self.read()
        moved = {name: _less(x, now[name]) for name, x in self.base.items()}
        if update_dtype == "same":
            return moved
        exact = {name: x + self.rest.get(name, 0.0) for name, x in moved.items()}
        sent = rounded(exact, update_dtype)
        self.rest = {name: exact[name] - x for name, x in like(sent, exact).items()}
        return sent

    def about(self) -> dict[str, str]:
        """Return texts that name the model, the optimizer and the precision. They do not depend on the layout."""
        names = hashlib.sha256(repr(sorted((n, s, str(d)) for n, (s, d) in self.shapes.items())).encode()).hexdigest()
        values = sum(torch.Size(shape).numel() for shape, _ in self.shapes.values())
        dtypes = ", ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in self.shapes.values()}))
        plain = (bool, int, float, str, tuple)
        options = [
            str({name: value for name, value in sorted(group.items()) if isinstance(value, plain)})
            for group in self.run.optimizer.param_groups
        ]
        options = exchange(None, options, self.group, lambda all_of: sorted({x for each in all_of for x in each}))
        model = f"{len(self.shapes)} tensors, {values} values in {dtypes}, {names[:12]}"
        chosen = self.run.precision
        words = [str(DTYPES.get(chosen.dtype, chosen.dtype)).removeprefix("torch.")]  # type: ignore[call-overload]
        words += ["autocast"] * (chosen.autocast_dtype is not None) + ["fp8"] * chosen.fp8
        optimizer = f"{type(self.run.optimizer).__name__} {' '.join(options)}"
        return {"model": model, "optimizer": optimizer, "precision": " ".join(words)}


class ElasticWorker:
    """Trains a run in phases, as one worker of several.

    Rank 0 of the run's mesh talks to the other workers. The other ranks hear from it.

    Args:
        run: the run.
        options, rule, until, join, folder: as `peer.start`.
        listen: host:port. None: a free port, on the address from which `join` is reached.
        token: the file with the token. None: the variable MPCORE_SECRET.

    Attributes:
        tensors: the run's `RunTensors`.
        peer: the `Peer`, on rank 0 after `begin`.
        last: the step after which the worker hands in its update.
        should_stop: called on each rank, about once a second while the worker waits for others. True on any rank ends
            the wait on all ranks.
        stopped: whether a wait ended so. Then leave with `stop`: there are no steps to train.
    """

    def __init__(
        self, run: Run, *, options: Options, rule: Rule, until: int, listen: str | None, join: Sequence[str],
        token: str | os.PathLike[str] | None, folder: str | os.PathLike[str] | None,
    ) -> None:  # fmt: skip
        self.run = run
        self.tensors: RunTensors = RunTensors(run)
        self.options = options
        self.arrived: SharedRequests | None = None  # whether the new anchor is here, while it is on its way
        self.later: Sequence[int] = ()  # the steps of the next phase, if they are known
        self.peer: Peer | None = None
        self.number: int = -1
        self.version: int = 0
        self.until = until
        self.first: int = 0
        self.last: int = 0
        self.merged: int = 0
        self.began: float = 0.0
        self.should_stop: Callable[[], bool] = lambda: False
        self.stopped: bool = False
        self.start: Callable[..., Peer] = lambda **given: start(
            listen=listen or near(join[0]), token=read_token(token), options=options, rule=rule, until=until,
            first=run.step, join=join, folder=None if folder is None else Path(folder), **given,
        )  # fmt: skip

    def news(self) -> list[str]:
        """Return who joined, left and took over the lead since the last call, a text each; on rank 0."""
        news = self.peer.news if self.peer else []
        return [news.pop(0) for _ in range(len(news))]

    def begin(self, data: str | Mapping[str, str], defaults: Mapping[str, str]) -> None:
        """Join the run, load the anchor, and set `run.step` to the first step of the first phase.

        A new run begins at `run.step`.

        Args:
            data: names the data, or settings by name. All workers must have the same.
            defaults: the settings of a run whose journal lacks them.

        Raises:
            ValueError: on every rank, if this worker doesn't fit the run, or nobody answers.
        """
        said = {"data": data} if isinstance(data, str) else data
        about, anchor = {**said, **self.tensors.about()}, self.tensors.read()
        defaults = {"precision": about["precision"], **defaults}  # a journal of an older program lacks it

        def work() -> int:
            self.peer = self.start(about=about, defaults=defaults, anchor=anchor, averaged=self.tensors.averaged)
            return self.peer.number

        self.number, _ = self._on_rank_0(work)
        self._take()

    def after_step(self) -> None:
        """Hand in the update if the phase ended, load the newest anchor, and set `run.step` to the next phase."""
        if self.peer is not None:
            self.peer.progress += 1
        step, ends = self.run.step, self.run.step == self.last
        seconds = (time.monotonic() - self.began) / max(self.last - self.first, 1)
        if self.arrived is not None:
            here = self.arrived.after_step(step, here=self.peer is not None and self.peer.arrived())
            if ends or here:
                anchor = self._phase()
                if self.stopped:
                    return
                self.tensors.merge(anchor)
                self.merged = step
        if ends:
            moved, later = self.tensors.moved(self.options.update_dtype), self.later
            facts: Any = moved, seconds, self.merged
            self._on_rank_0(lambda: self.peer.hand_in(*facts) if self.peer else None)
            if not later:
                self._take()
                return
            self.first, self.last = later
            self.run.step, self.began = self.first, time.monotonic()
            self.arrived = SharedRequests(self.run.mesh.world)

    def stop(self, seconds: float) -> None:
        """Leave the run before its end: `Peer.stop`."""
        self._on_rank_0(lambda: self.peer.stop(seconds) if self.peer else None)

    def _phase(self) -> Tensors:
        """Take the next phase, and wait for it unless a rank shall stop. Return the anchor, on rank 0."""
        phase: list[Phase] = []

        def work() -> list[Any] | None:
            assert self.peer is not None
            phase.extend(each for each in [self.peer.take()] if each is not None)
            return list(phase[0][:4]) if phase else None

        found = self._until(work)
        if found is not None:
            self.first, self.last, self.version, self.later = found
            self.arrived = None
        return phase[0].anchor if phase else {}

    def _until(self, work: Callable[[], Any]) -> Any:
        """Let rank 0 repeat `work` until it returns something. None, and `stopped`, if a rank shall stop before."""
        while True:
            value, stop = self._on_rank_0(work, self.should_stop())
            self.stopped: bool = stop and value is None
            if value is not None or stop:
                return value

    def _take(self) -> None:
        anchor = self._phase()
        if self.stopped:
            return
        self.tensors.write(anchor)
        self.run.step = self.merged = self.first
        self.began = time.monotonic()
        if self.first == self.last:  # the end
            self.run.step = self.until
            if self._until(lambda: self.peer.is_alone() if self.peer else None):
                self._on_rank_0(lambda: self.peer.leave() if self.peer else None)

    def _on_rank_0(self, work: Callable[[], Any], stop: bool = False) -> tuple[Any, bool]:
        """Let rank 0 work. Return on all ranks its result, and whether `stop` is True on any rank."""
        error, value = None, None
        if self.run.mesh.world.rank == 0:
            try:
                value = work()
            except (ValueError, OSError) as problem:
                error = problem
        group, both = self.run.mesh.world.group, (value, stop)
        return exchange(error, both, group, lambda of: (of[0][0], any(each for _, each in of)))


def _less(a: Tensor, b: Tensor) -> Tensor:
    same = (a == b) | (a.isnan() & b.isnan())  # a mask keeps its infinities, a buffer that nobody set its NaN
    return torch.where(same, 0.0, a - b)


def near(address: str) -> str:
    """Return this host's address on the way to another one, with a free port.

    Raises:
        ValueError: if the other host isn't known.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(split_address(address))
        except OSError as error:
            raise ValueError(f"{address} can't be reached: {error}") from None
        return f"{sock.getsockname()[0]}:0"


def replay_runs(folder: str | Path, make: Callable[[], Run], step: Callable[[Run], object]) -> Replayed:
    """Run the phases of a journal again in this process, on runs that take the places of the workers.

    The same layout gives the same bits, on processors of one kind. Another layout gives the same values within
    rounding: then all hashes differ, so compare the result's `outer.anchor`.

    Args:
        folder: where the journal is.
        make: returns a run as each worker began, without `LocalUpdates`: the same model, optimizer and seed.
        step: trains one step, number `run.step`, as the workers did.

    Returns:
        The `Replayed`.

    Raises:
        ValueError: if `make` begins with other parameters than the run did.
    """
    lines, runs = read_lines(Path(folder)), dict[int, tuple[Run, RunTensors]]()

    def train(worker: int, anchor: Tensors, first: int, last: int, merged: int) -> Tensors:
        if worker not in runs:
            runs[worker] = (made := make()), RunTensors(made, True)
        run, tensors = runs[worker]
        run.step = first
        if merged == first:
            tensors.write(anchor)
        while run.step < last:
            step(run)
            if run.step == merged:
                tensors.merge(anchor)
        return tensors.moved(lines[0]["about"]["update_dtype"])

    return replay(lines, RunTensors(make(), True).read(), train)
