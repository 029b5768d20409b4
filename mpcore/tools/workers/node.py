"""The server in each worker. The one with the lowest number leads the run; the next ones keep replicas.

The leader orders what happens, applies it to the outer state, and sends every line with its updates to the replicas
before anybody hears of it. If the leader dies, the lowest replica leads. Terms count the leaders: a replica refuses the
lines of an older term, so a leader that was only paused learns that it leads no longer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mpcore.mesh.log import Logger, get_logger
from mpcore.tools.workers.journal import Journal
from mpcore.tools.workers.outer import Lease, Line, Options, Outer, Tensors, check_settings, digest, like
from mpcore.tools.workers.wire import Channel, Message, connect, pack, split_address, unpack

log: Logger = get_logger(__name__)
_STRANGERS = 64  # connections that have not signed a message yet
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # where it can, it counts the sleep of the machine
_GRACE = 1.0  # seconds in which a worker whose connection broke may connect again


class NotLeadingError(Exception):
    """This worker doesn't lead the run."""


class Node:
    """Serves one worker's share of a run, in threads.

    Args:
        listen: host:port; port 0 takes a free one.
        token: the run's token.
        options: the options of the run.
        folder: for the journal. None: none.

    Attributes:
        address: host:port, where others reach it.
        number: the number of this worker.
        outer: the outer state, at the leader and its replicas; else None.
    """

    def __init__(self, listen: str, token: bytes, options: Options, folder: Path | None = None) -> None:
        self.token = token
        self.options = options
        self.journal: Journal = Journal(folder)
        self.state: threading.Condition = threading.Condition(threading.RLock())
        self.outer: Outer | None = None
        self.leading: bool = False
        self.term: int = 0
        self.number: int = -1
        self.leader: str = ""
        self.copies: dict[int, Channel] = {}  # to the replicas
        self.seen: dict[int, tuple[int, float]] = {}  # of each worker: its progress, and when that changed
        self.broken: set[int] = set()  # workers whose connection broke
        self.pending: dict[int, tuple[Line, Tensors]] = {}  # updates that wait for others
        self.seconds: dict[int, float] = {}  # of a step of each worker
        self.packed: tuple[int, bytes] = -1, b""
        self.channels: set[Channel] = set()
        self.strangers: threading.Semaphore = threading.Semaphore(_STRANGERS)
        self.closed: bool = False
        self.ending: bool = False  # this worker trains no more, and leads until the others have left
        self.pulse: threading.Lock = threading.Lock()
        self.awake: float = time.clock_gettime(CLOCK)  # when this process was last seen to run
        host, port = split_address(listen)
        try:
            self.sock: socket.socket = socket.create_server((host, port), backlog=256)
        except OSError as error:
            self.journal.close()
            raise ValueError(f"can't listen at {listen}: {error.strerror}. Listen at another port") from None
        self.address: str = f"{host}:{self.sock.getsockname()[1]}"
        self.thread(self._accept)
        self.thread(self._stay_awake)

    @staticmethod
    def thread(work: Any, *arguments: Any) -> None:
        """Start a background thread."""
        threading.Thread(target=work, args=arguments, daemon=True, name="mpcore-worker").start()

    def close(self) -> None:
        """Answer nobody any more."""
        self.closed = True
        self.leading = False
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.sock.close()
        for channel in [*self.channels, *self.copies.values()]:
            channel.close()
        self.journal.close()

    def save(self) -> None:
        """Write the outer state, if this worker holds it."""
        with self.state:
            if self.outer is not None:
                self.journal.save(self.outer)

    def end(self, message: Message, seconds: float) -> None:
        """Let the leader serve until the others have left, for at most so many seconds, and then leave and save."""
        until = time.monotonic() + seconds
        with contextlib.suppress(NotLeadingError):
            with self.state:
                self.ending = True
                self._merge()  # what the others have handed in waits for this worker no longer
            while len(self._led().members) > 1 and time.monotonic() < until:
                time.sleep(0.02)  # it stays a member: without it a replica would lead
            with self.state:
                self._leave(message, memoryview(b""))
                self.save()

    # --- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self.closed:
            try:
                sock, _ = self.sock.accept()
            except OSError:
                return
            if self.strangers.acquire(blocking=False):
                self.thread(self._serve, sock)
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        channel, beats, known = None, -1, False
        try:
            channel = Channel(sock, self.token, True, 4 * self.options.timeout)
            self.channels.add(channel)
            while True:
                message, tensors = channel.receive()
                if self.closed:  # the connection was accepted while this node closed
                    return
                if not known:
                    known = True
                    self.strangers.release()
                if message.get("kind") == "beat":
                    beats = message["worker"]
                channel.send(*self._answer(message, tensors))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not known and channel is not None and isinstance(error, ValueError):
                channel.refuse()
                log.debug("a stranger was refused: %s", error)
        finally:
            if not known:
                self.strangers.release()
            if beats in self.seen:  # it ended, or its link broke: it may connect again
                progress, _ = self.seen[beats]
                self.seen[beats] = progress, time.monotonic() - self.options.timeout + _GRACE
                self.broken.add(beats)
            if channel is not None:
                self.channels.discard(channel)
            sock.close()

    def _answer(self, message: Message, tensors: memoryview) -> tuple[Message, bytes]:
        kind = message.get("kind")
        handlers = {"who": self._who, "join": self._join, "take": self._take, "hand": self._hand, "beat": self._beat,
                    "leave": self._leave, "lines": self._lines, "state": self._state, "log": self._log}  # fmt: skip
        if kind == "hello":
            return {"number": self.number}, b""
        if kind not in handlers:
            return {"refused": f"there is no message {str(kind)[:40]!r}"}, b""
        try:
            self._check_awake()
            answer = handlers[kind](message, tensors)
            return answer if isinstance(answer, tuple) else (answer, b"")
        except NotLeadingError:
            return {"leads": False, "leader": self.leader}, b""
        except ValueError as error:
            return {"refused": str(error)}, b""

    # --- the leader ---------------------------------------------------------------------------------------------------

    def lead(self, outer: Outer, lines: Sequence[Line]) -> None:
        """Join and lead a run, from an outer state and the lines before it. Workers of an earlier start leave."""
        with self.state:
            lines, now = list(lines), round(time.time(), 3)
            for worker in [*outer.members]:
                lines.append({"op": "leave", "worker": worker, "why": "the run was started again", "at": now})
                outer.apply(lines[-1])
            self.journal.replace(lines)
            self.outer, self.number = outer, outer.next_worker
            self._begin_to_lead()
            self.seen[self.number] = 0, time.monotonic()
            self._commit({"op": "join", "worker": self.number, "address": self.address})

    def _begin_to_lead(self) -> None:
        assert self.outer is not None
        self.leading, self.term, self.leader = True, self.term + 1, self.address
        self.seen = {worker: (0, time.monotonic()) for worker in self.outer.members}
        self.copies, self.pending = {}, {}
        self.thread(self._watch, self.term)

    def _led(self) -> Outer:
        if not self.leading or self.outer is None:
            raise NotLeadingError
        return self.outer

    def _forget(self) -> None:
        self.leading = False
        self.outer = None
        self.leader: str = ""
        self.state.notify_all()

    def _stay_awake(self) -> None:
        while not self.closed:
            time.sleep(min(self.options.timeout / 8, 0.5))
            self._check_awake()

    def _check_awake(self) -> None:
        """Neither lead nor hold a copy if this process was stopped for longer than the timeout: others went on."""
        with self.pulse:
            before, self.awake = self.awake, time.clock_gettime(CLOCK)
            if self.awake - before < self.options.timeout:
                return
            with self.state:
                if self.outer is not None and len(self.outer.members) > 1:
                    log.warning(
                        "worker %d stood still for %.0f s, and the timeout is %g s: the others went on without it",
                        self.number, self.awake - before, self.options.timeout,
                    )  # fmt: skip
                    self._forget()

    def _commit(self, line: Line, updates: Sequence[Mapping[str, Tensor]] = ()) -> None:
        """Let something happen: here, at the replicas, and then in the journal."""
        outer = self._led()
        line["at"] = round(time.time(), 3)
        outer.apply(line, updates)
        if updates:
            line["anchor"] = digest(outer.anchor)
        lost = self._replicate(line, pack({f"{i}/{name}": x for i, u in enumerate(updates) for name, x in u.items()}))
        self.journal.append(line)
        if updates and (outer.version % self.options.save_every == 0 or outer.ended):
            self.journal.save(outer)
        self.state.notify_all()
        for worker in lost:
            self._leave_out(worker, "its replica did not answer")

    def _replicate(self, line: Line, updates: bytes) -> list[int]:
        """Send a line to the replicas, and the whole state to new ones. Return the replicas that did not answer."""
        outer, lost, began = self._led(), list[int](), time.monotonic()
        others = sorted(outer.members.keys() - {self.number})[: self.options.replicas]
        for worker in others:
            message: Message = {"kind": "log", "term": self.term, "line": line}
            try:
                if new := worker not in self.copies:
                    self.copies[worker] = connect(outer.members[worker], self.token, self.options.timeout)
                answer, _ = ({}, b"") if new else self.copies[worker].ask(message, updates)
                if new or answer.get("again"):
                    whole = {"kind": "state", "term": self.term, "number": worker, "lines": [*self.journal.lines, line]}
                    answer, _ = self.copies[worker].ask(whole, pack(outer.tensors()))
            except (OSError, ValueError):
                channel = self.copies.pop(worker, None)
                if channel is not None:
                    channel.close()
                lost.append(worker)
                continue
            if answer.get("term", 0) > self.term:
                log.warning("worker %d leads no longer: another took over while it was not heard of", self.number)
                self._forget()
                raise NotLeadingError
        waited = time.monotonic() - began  # meanwhile other workers waited for this one: nobody was silent
        for worker, (progress, since) in [*self.seen.items()]:
            self.seen[worker] = progress, since + waited
        return lost

    def _leave_out(self, worker: int, why: str) -> None:
        outer = self._led()
        if worker in outer.members:
            for held in (self.pending, self.seconds, self.seen):
                held.pop(worker, None)
            if worker in self.copies:
                self.copies.pop(worker).close()
            self._commit({"op": "leave", "worker": worker, "why": why})
            self._merge()

    def _watch(self, term: int) -> None:
        """Leave out the workers that make no progress."""
        limit = self.options.timeout
        while self.leading and self.term == term and not self.closed:
            time.sleep(min(limit / 8, 0.5))
            self._check_awake()
            with self.state, contextlib.suppress(NotLeadingError):
                for worker, (_, since) in [*self.seen.items()]:
                    if self.ending and worker == self.number:  # it serves the others, and takes no more steps
                        continue
                    if time.monotonic() - since > limit and worker in self._led().members:
                        broke = worker in self.broken
                        self._leave_out(worker, "its connection broke" if broke else f"no step for {limit:g} s")

    # --- what workers ask the leader ----------------------------------------------------------------------------------

    def _join(self, message: Message, _: memoryview) -> Message:
        with self.state:
            outer = self._led()
            check_settings(message["about"], outer.begin["about"], "at the run", message.get("defaults", {}))
            count, last = message.get("held", (0, []))
            if self.journal.lines[:count][-1:] != last:
                raise ValueError(
                    f"this worker's folder has an outer state after {count} lines of the journal, and the run goes on "
                    f"from an earlier one: stop the others and start this worker first, without join; or give the "
                    f"state up, and join with another folder"
                )
            worker = outer.next_worker
            self.seen[worker] = 0, time.monotonic()
            self._commit({"op": "join", "worker": worker, "address": message["address"]})
            return {"worker": worker, "run": outer.begin["run"]}

    def _member(self, worker: int) -> Outer:
        outer = self._led()
        if worker not in outer.members:
            raise ValueError(
                f"worker {worker} was left out of the run: {outer.left.get(worker, 'the run never had it')}. Start it "
                f"again, and it joins under another number; or set a timeout above {self.options.timeout:g} s"
            )
        return outer

    def _take(self, message: Message, _: memoryview) -> tuple[Message, bytes]:
        """Give a worker that has handed in `phase` updates its next steps and the anchor, as soon as there are any."""
        worker, phase = message["worker"], message["phase"]
        until = time.monotonic() + min(self.options.timeout / 12, 5.0)
        with self.state:
            while True:
                outer = self._member(worker)
                if outer.phases[worker] < phase and worker not in self.pending:
                    return {"hand": True}, b""  # the leader that had it is gone
                if outer.phases[worker] == phase:
                    if outer.ended:
                        return {"end": True, "base": outer.version}, self._anchor()
                    leases = [self._lease(worker, phase + i) for i in range(1 + self.options.overlap)]
                    if leases[0] is not None:
                        return {"leases": [x[1:3] for x in leases if x], "base": outer.version}, self._anchor()
                    if self._merge():  # nobody else can train: these updates are enough
                        continue
                if not self.state.wait(until - time.monotonic()):
                    return {"wait": True, "for": self._awaited(worker)}, b""

    def _awaited(self, worker: int) -> tuple[str, bool]:
        """Return what a worker waits for, and whether it comes if no worker joins."""
        outer, here, needed = self._led(), len(self.pending), self._needed()
        others = ", ".join(f"{n} at {outer.members[n]}" for n in sorted(self._training() - self.pending.keys()))
        more = f"still trains: {others} (removed after {self.options.timeout:g} s without a step)"
        if worker in self.pending and needed > len(self._training()):
            return f"{len(outer.members)} of {needed} workers are here (wait {self.options.wait!r}): start more", False
        what = f"{here} of {needed} updates are here" if worker in self.pending else "no steps are left for this worker"
        return f"{what}; {more}", True

    def _lease(self, worker: int, phase: int) -> Lease | None:
        outer = self._led()
        held = outer.leases if outer.phases[worker] == phase else outer.ahead
        if worker not in held:
            most = self.options.steps_of(worker, self.seconds, outer.left_steps(held is outer.ahead))
            if (steps := outer.free_steps(most)) is None:
                return None
            line = {"op": "lease", "worker": worker, "phase": phase, "steps": [*steps], "base": outer.version}
            self._commit(line)
        return held[worker]

    def _anchor(self) -> bytes:
        outer = self._led()
        if self.packed[0] != outer.version:
            self.packed = outer.version, pack(outer.anchor)
        return self.packed[1]

    def _hand(self, message: Message, tensors: memoryview) -> Message:
        """Take a worker's update."""
        with self.state:
            outer, worker = self._member(message["worker"]), message["worker"]
            lease, self.seconds[worker] = outer.leases.get(worker), message["seconds"]
            if lease is None or lease.phase != message["phase"]:
                return {}  # it was applied: the answer was lost
            update = like(unpack(tensors), outer.anchor)
            if wrong := [name for name, x in update.items() if not x.isfinite().all()]:
                raise ValueError(
                    f"{wrong[0]} of worker {worker} is not finite: its update is not applied, read its losses"
                )
            entry = {"worker": worker, "phase": lease.phase, "base": message["base"], "steps": [*lease[1:3]]}
            entry |= {"merged": message["merged"], "waited": message["waited"]} if self.options.overlap else {}
            self.pending[worker] = {**entry, "update": digest(update), "handed": round(time.time(), 3)}, update
            self._merge()
            return {}

    def _training(self) -> set[int]:
        """Return the workers whose updates come: all while steps are left, also one that has not taken them yet."""
        outer, own = self._led(), self.number
        idle = {own} if self.ending and own not in self.pending else set[int]()
        return {*(outer.leases if outer.free_steps(1) is None else outer.members)} - idle

    def _needed(self) -> int:
        return self.options.needed(len(self._training()), len(self._led().members))

    def _merge(self) -> bool:
        """Apply the updates that wait, if they are enough. Return whether they are."""
        outer, limit = self._led(), self.options.staleness
        if not self.pending or len(self.pending) < self._needed():
            return False
        held = [self.pending[worker] for worker in sorted(self.pending)]
        self.pending = {}
        entries = [{**entry, "applied": limit is None or outer.version - entry["base"] <= limit} for entry, _ in held]
        moved = sum(entry["applied"] for entry in entries)
        workers = len(outer.members) if outer.rule.shares and self.options.wait != "all" else moved
        line = {"op": "update", "version": outer.version + bool(moved), "updates": entries, "workers": workers}
        self._commit(line, [update for _, update in held])
        return True

    def _beat(self, message: Message, _: memoryview) -> Message:
        outer, worker = self._led(), message["worker"]
        self.broken.discard(worker)
        if worker in self.seen and self.seen[worker][0] != message["progress"]:
            self.seen[worker] = message["progress"], time.monotonic()
        members = [[number, address] for number, address in [*outer.members.items()]]
        return {"members": members, "left": dict(outer.left), "leader": self.address, "term": self.term}

    def _lines(self, message: Message, _: memoryview) -> Message:
        """Return lines after the first `count`; from the first on if the last of those is another one here."""
        self._member(message["worker"])
        lines, count = self.journal.lines, message["count"]
        begin = count if lines[:count][-1:] == message["last"] else 0
        return {"begin": begin, "lines": lines[begin : begin + 1000]}

    def _leave(self, message: Message, _: memoryview) -> Message:
        with self.state:
            self._leave_out(message["worker"], message["why"])
            return {}

    # --- replicas -----------------------------------------------------------------------------------------------------

    def _state(self, message: Message, tensors: memoryview) -> Message:
        with self.state:
            if message["term"] < self.term:
                return {"term": self.term}
            begin, *others = message["lines"]
            found = unpack(tensors)
            anchor = {name.removeprefix("anchor/"): x for name, x in found.items() if name.startswith("anchor/")}
            outer = Outer(begin, anchor, others)
            outer.load_tensors(found)
            self.journal.replace(message["lines"])
            self.outer = outer
            self.term = message["term"]
            self.number = message["number"]
            self.leading = False
            return {}

    def _log(self, message: Message, tensors: memoryview) -> Message:
        with self.state:
            if message["term"] < self.term:
                return {"term": self.term}
            if self.outer is None:
                return {"again": True}
            line, updates = message["line"], [dict[str, Tensor]() for _ in message["line"].get("updates", ())]
            for name, x in unpack(tensors).items():
                place, _, own = name.partition("/")
                updates[int(place)][own] = x
            self.term: int = message["term"]
            self.leading: bool = False
            self.outer.apply(line, updates)
            if updates and digest(self.outer.anchor) != line["anchor"]:  # another processor rounds otherwise
                return {"again": True}
            self.journal.append(line)
            if updates and self.outer.version % self.options.save_every == 0:
                self.journal.save(self.outer)
            return {}

    def _who(self, message: Message, _: memoryview) -> Message:
        """Say who leads. A replica whose leader and lower replicas are gone leads from now on."""
        if not self.leading and self.outer is not None:
            lower = {n: at for n, at in [*self.outer.members.items()] if n < self.number}
            if not any(self._is_alive(worker, at) for worker, at in lower.items()):
                self._check_awake()  # it may have stood still since the message came
                with self.state:
                    if not self.leading and self.outer is not None and not self.closed:
                        self._begin_to_lead()
                        for worker in lower:
                            self._leave_out(worker, "it led the run, or would have, and did not answer")
        run = self.outer.begin["run"] if self.outer is not None else ""
        return {"leads": self.leading, "leader": self.leader, "term": self.term, "run": run}

    def _is_alive(self, worker: int, address: str) -> bool:
        """Return whether a worker answers, and not a new process at its address."""
        try:
            channel = connect(address, self.token, self.options.timeout)
            answer, _ = channel.ask({"kind": "hello"})
            channel.close()
        except (OSError, ValueError):
            return False
        return answer["number"] == worker
