"""A worker's side of a run: join, take steps and the anchor, hand in an update, and find the leader again."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mpcore.mesh.log import Logger, get_logger
from mpcore.tools.workers.journal import FILE, line_count, read_lines, resume, saved
from mpcore.tools.workers.node import Node
from mpcore.tools.workers.outer import ENDED, STOPPED, Line, Options, Outer, Tensors, check_settings, new_run
from mpcore.tools.workers.rules import Rule
from mpcore.tools.workers.wire import Channel, Message, connect, pack, unpack

log: Logger = get_logger(__name__)
_TRIES = 8  # of a question whose connection breaks
_GO_ON = (
    f"To go on from {FILE} and the newest outer state, start the worker whose folder has the highest outer-N first, "
    f"without join"
)


class Phase(NamedTuple):
    """What a worker trains next.

    Attributes:
        first, last: the steps [first, last); equal at the end of the run.
        base: the version of the anchor.
        later: the first and last step of the phase after it, with `Options.overlap`; empty if there is none yet.
        anchor: the parameters to begin with.
    """

    first: int
    last: int
    base: int
    later: Sequence[int]
    anchor: Tensors


class Peer:
    """One worker of a run. `start` makes it.

    Attributes:
        node: its server.
        number: its number.
        phase: how many updates it has handed in.
        progress: a counter of signs of life. The caller raises it at each step.
        waited: the seconds that it waited for others or the network.
        awaits: what it waits for, in words; and whether more time alone brings it.
        sent: the bytes of its updates.
        news: who joined, left and took over the lead since the caller emptied this list: one text each.
    """

    def __init__(self, node: Node, addresses: Iterable[str]) -> None:
        self.node = node
        self.options: Options = node.options
        self.token: bytes = node.token
        self.addresses: list[Any | str] = list(addresses)  # of workers that may know who leads
        self.number: int = -1
        self.phase: int = 0
        self.base: int = 0
        self.progress: int = 0
        self.waited: float = 0.0
        self.told: float = 0.0  # of the seconds that it waited, those of phases that it handed in
        self.wait: float = 0.0  # the seconds that it has waited for this phase
        self.tell_at: float = self.options.timeout / 10  # of these seconds
        self.awaits: tuple[str, bool] = "", True
        self.heard: float = 0.0  # when `awaits` was set
        self.sent: int = 0
        self.run: str = ""
        self.facts: dict[str, Any] = {}
        self.update: bytes = b""
        self.answers: queue.SimpleQueue[Phase | Exception] | None = None  # of the exchange, which a thread makes
        self.channel: Channel | None = None
        self.left: threading.Event = threading.Event()
        self.news: list[str] = []
        self.members: dict[int, str] = {}
        self.leader: str = ""

    def join(self, about: Mapping[str, str], defaults: Mapping[str, str], held: tuple[int, list[Line]]) -> None:
        """Join the run of the leader. `about` and `defaults` are those of `start`.

        `held` is how many lines of the journal the newest outer state in the folder has, with the last of them.

        Raises:
            ValueError: if this worker's settings, model, optimizer or data are not those of the run.
        """
        if self.node.leading:
            self.number = self.node.number
        else:
            said = {"about": dict(about), "defaults": dict(defaults), "address": self.node.address, "held": held}
            answer, _ = self.ask({"kind": "join", **said})
            self.number = self.node.number = answer["worker"]
        self.news.append(f"this is worker {self.number} of the run")
        Node.thread(self._beat)

    def take(self) -> Phase | None:
        """Return the next steps and the newest anchor, or None after a second in which they didn't come: call again.

        A warning says what a long wait is for: after a tenth of the timeout, and then each time the wait has doubled.
        """
        began, limit, phase = time.monotonic(), self.options.timeout, None
        if self.answers is None:
            self._exchange()
        assert self.answers is not None
        with contextlib.suppress(queue.Empty):
            phase = self.answers.get(timeout=min(1.0, limit / 10))
        now = time.monotonic()
        self.waited += now - began
        self.wait += now - began
        if phase is None:
            if self.wait >= self.tell_at:
                self.tell_at = 2 * self.wait
                quiet, silent = now - self.heard, f"; the leader {self.leader} gave no answer for"
                more = f"{silent} {quiet:.0f} s, at most {limit:g} s" if quiet > min(limit / 4, 5.0) + 1 else ""
                log.warning("worker %d has waited for %.0f s: %s", self.number, self.wait, self.awaits[0] + more)
            return None
        self.answers, self.wait, self.tell_at = None, 0.0, limit / 10
        if isinstance(phase, Exception):
            raise phase
        return phase

    def _set_awaits(self, what: str, comes: bool) -> None:
        self.awaits, self.heard = (what, comes), time.monotonic()

    def _take(self) -> Phase:
        while True:
            answer, tensors = self.ask({"kind": "take", "worker": self.number, "phase": self.phase})
            self.progress += 1
            if answer.get("hand"):
                self.ask(self.facts, self.update)
            elif not answer.get("wait"):
                break
            self._set_awaits(*answer.get("for", ("its next steps", True)))
        self.base = answer["base"]
        (first, last), *later = answer.get("leases", [(0, 0)])
        return Phase(first, last, self.base, later[0] if later else (), unpack(tensors))

    def hand_in(self, update: Mapping[str, Tensor], seconds: float = 0.0, merged: int = 0) -> None:
        """Hand in the update of the phase that was taken, x_anchor - x_local, and ask for the next phase.

        A thread does both. `take` waits for the phase and raises what failed; `arrived` says if it must wait.

        Args:
            update: the tensors by logical name. The leader converts them to the anchor's dtypes.
            seconds: the time of one step, for dynamic local steps.
            merged: the step before which the anchor came, with `Options.overlap`.
        """
        self.facts = {"kind": "hand", "worker": self.number, "phase": self.phase, "base": self.base, "merged": merged}
        self.facts |= {"seconds": seconds, "waited": round(self.waited - self.told, 3)}
        self.phase, self.told = self.phase + 1, self.waited
        self._exchange(update)

    def arrived(self) -> bool:
        """Whether `take` has an answer at once, or the exchange failed."""
        return self.answers is not None and not self.answers.empty()

    def _exchange(self, update: Mapping[str, Tensor] | None = None) -> None:
        answers = self.answers = queue.SimpleQueue[Phase | Exception]()
        self._set_awaits("its message travels to the leader", True)

        def work() -> None:
            try:
                if update is not None:
                    self.update = pack(update)
                    self.sent += len(self.update)
                    self.ask(self.facts, self.update)
                answers.put(self._take())
            except (OSError, ValueError) as error:
                answers.put(error)

        Node.thread(work)

    def is_alone(self) -> bool | None:
        """Return True if no other worker needs this one to lead; None after a second in which one does."""
        node, until = self.node, time.monotonic() + 1.0
        while node.leading and node.outer is not None and len(node.outer.members) > 1:
            if time.monotonic() > until:
                self.progress += 1
                return None
            time.sleep(0.02)
        return True

    def leave(self) -> None:
        """Leave a run that ended. The leader serves until the others have left, too, or were left out."""
        self.stop(math.inf, ENDED)

    def stop(self, seconds: float = 10.0, why: str = STOPPED) -> None:
        """Leave the run. Others train the steps whose update isn't handed in. The leader and replicas save their state.

        Args:
            seconds: how long an update that was handed in may wait to be applied, and the leader serves others that
                stop, too. If all have left by then, its folder has all that was applied. If not, a replica leads on.
            why: the reason, for the journal.
        """
        if self.left.is_set():
            return
        node, end = self.node, time.monotonic() + seconds
        until = min(end, time.monotonic() + self.options.timeout)
        while self.answers is not None and not self.arrived() and self.awaits[1] and time.monotonic() < until:
            time.sleep(0.02)
        self.left.set()
        message = {"kind": "leave", "worker": self.number, "why": why}
        try:
            if not node.leading:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    if self.channel is not None:
                        self._copy_journal(self.channel)
                node.save()
                with contextlib.suppress(ValueError):
                    self.ask(message, limit=until - time.monotonic())
            node.end(message, end - time.monotonic())
        finally:
            self.close()

    def close(self) -> None:
        """Stop without a word."""
        self.left.set()
        if self.channel is not None:
            self.channel.close()
        self.node.close()

    # --- the leader ---------------------------------------------------------------------------------------------------

    def ask(self, message: Message, tensors: bytes = b"", limit: float | None = None) -> tuple[Message, memoryview]:
        """Ask the leader. If it is gone, find the next one, for at most `limit` seconds, and ask again.

        Raises:
            ValueError: if the leader refuses, or no leader is found.
        """
        broken = 0
        while True:
            channel, self.channel = self.channel, None  # a connection that failed is not used again
            try:
                channel = channel or self.find(self.options.timeout if limit is None else limit, True)
                answer, found = channel.ask(message, tensors)
            except OSError as error:
                if channel is not None:
                    channel.close()
                broken += 1
                if broken > _TRIES:
                    raise ValueError(f"the connection to the leader broke {broken} times in a row: {error}") from None
                continue
            if "refused" in answer:
                raise ValueError(answer["refused"])
            if answer.get("leads", True):
                self.channel = channel
                return answer, found
            channel.close()
            time.sleep(0.05)

    def find(self, seconds: float, waits: bool = False) -> Channel:
        """Return a connection to the leader.

        Args:
            seconds: how long to look. As long again, at most twice, if a worker begins to lead and isn't ready by then.
            waits: whether this worker waits for it: `awaits` says so.

        Raises:
            ValueError: if nobody says to lead in this time, or the tokens differ.
        """
        began, asked, told = time.monotonic(), list[str](), False
        until, problem, refused = began + seconds, list[str](), list[str]()
        while True:
            asked = asked or list(dict.fromkeys([self.node.address, *self.addresses]))
            address, reached = asked.pop(0), False
            try:
                channel = connect(address, self.token, self.options.timeout)
                reached = True
                answer, _ = channel.ask({"kind": "who"})
                if answer.get("leads") and self.run in ("", answer["run"]):
                    self.run = answer["run"]
                    return channel
                channel.close()
                leader = answer.get("leader")
                if leader and leader != address and leader not in self.addresses:
                    self.addresses.append(leader)
            except ValueError as error:
                refused.append(f"{address}: {error}")
            except OSError as error:
                problem.append(f"{address}: {error}")
                if reached and isinstance(error, TimeoutError):  # it looks for dead workers before it leads
                    until = min(time.monotonic() + seconds, began + 3 * seconds)
            if not asked:
                if refused and self.number < 0:  # one that has a number goes on to look for the others
                    raise ValueError("; ".join(refused))
                found = "; ".join(problem + refused) or "none of the workers there leads"
                now = time.monotonic()
                if waits:
                    found = f"0 of {len(self.addresses)} known workers lead or hold the outer state ({found})"
                    self._set_awaits(f"{found}; this worker ends in {max(until - now, 0):.0f} s", False)
                if now > until:
                    found += f". {_GO_ON}" if waits else ""
                    raise ValueError(f"no worker of the run answered within {until - began:.3g} s: {found}")
                if not told and self.number < 0:
                    log.warning("wait at most %g s for a worker of the run: %s", seconds, found)
                problem, refused, told = [], [], True
                time.sleep(0.1)

    def _beat(self) -> None:
        """Tell the leader that this worker makes progress, and hear who else there is."""
        channel = None
        while not self.left.is_set():
            try:
                channel = channel or self.find(self.options.timeout)
                answer, _ = channel.ask({"kind": "beat", "worker": self.number, "progress": self.progress})
                if not answer.get("leads", True):
                    raise ConnectionError("it leads no longer")
                known = [at for _, at in sorted(answer["members"]) if at != self.node.address]
                self.addresses = list(dict.fromkeys([*known, *self.addresses]))[:256]
                self._tell(dict(answer["members"]), answer["left"], answer["leader"])
                self._copy_journal(channel)
            except (OSError, ValueError, KeyError):
                if channel is not None:
                    channel.close()
                channel = None
            self.left.wait(min(self.options.timeout / 8, 0.5))
        if channel is not None:
            channel.close()

    def _tell(self, members: dict[int, str], left: Mapping[int, str], leader: str) -> None:
        numbers = {address: number for number, address in members.items()}
        if not self.members:
            others = ", ".join(str(number) for number in sorted(members) if number != self.number) or "none yet"
            self.news.append(f"other workers: {others}")
        else:
            self.news += [f"worker {n} at {members[n]} joined" for n in sorted(members.keys() - self.members.keys())]
            gone = sorted(self.members.keys() - members.keys())
            self.news += [f"worker {n} left: {left.get(n, 'the run was started again')}" for n in gone]
        if leader != self.leader:
            self.news.append(f"worker {numbers.get(leader, '?')} at {leader} leads: it orders the updates")
        self.members = members
        self.leader = self.node.leader = leader

    def _copy_journal(self, channel: Channel) -> None:
        """Get the lines that this worker's journal lacks. The leader sends them to its replicas by itself."""
        journal, more = self.node.journal, self.node.journal.folder is not None
        while more and self.node.outer is None:
            count = len(journal.lines)
            question = {"kind": "lines", "worker": self.number, "count": count, "last": journal.lines[-1:]}
            answer, _ = channel.ask(question)
            begin, more = answer["begin"], bool(answer["lines"])
            with self.node.state:
                if self.node.outer is not None or not more:
                    return
                if not begin:
                    journal.replace(answer["lines"])
                elif len(journal.lines) == count:
                    for line in answer["lines"]:
                        journal.append(line)


def start(
    *, listen: str, token: bytes, options: Options, rule: Rule, until: int, about: Mapping[str, str], anchor: Tensors,
    first: int = 0, join: Iterable[str] = (), folder: Path | None = None, defaults: Mapping[str, str] | None = None,
    averaged: Iterable[str] = (),
) -> Peer:  # fmt: skip
    """Join a run, or begin one, or resume one after all of its workers ended.

    The addresses of `join`, and those of the workers in the journal of `folder`, are asked first. If none of them
    answers, and `join` is empty, this worker leads: from the newest outer state in `folder`, or else from `anchor`.

    Args:
        listen: where this worker serves, host:port.
        token: the run's token.
        options: the options of the run.
        rule: the outer rule.
        first, until: the steps of the run, from `first` to below `until`. Who joins takes `first` from the run.
        about: what must be the same in all workers, by name.
        defaults: the settings in `about` of a run whose journal lacks them.
        anchor: this worker's parameters, by logical name, on the CPU.
        averaged: the names of the tensors that no worker trains: an outer step takes their mean.
        join: addresses of workers of the run.
        folder: for the journal. None: none.

    Raises:
        ValueError: if this worker doesn't fit the run, or nobody answers at `join`.
    """
    said: dict[str, Any] = {**about, **{name: str(value) for name, value in vars(options).items()}}
    said = {**said, "rule": str(rule), "steps": str(until)}
    node, given = Node(listen, token, options, folder), [*join]
    written, held = None, (0, list[Line]())
    if folder is not None and (folder / FILE).is_file():
        lines = read_lines(folder)
        written = Outer(lines[0], {}, lines[1:])
        count = max((n for n in map(line_count, saved(folder)) if n <= len(lines)), default=0)
        held = count, lines[:count][-1:]
    known = [*written.members.values()] if written else []
    peer = Peer(node, [at for at in (*given, *known) if at != node.address])
    try:
        if peer.addresses:
            try:
                peer.channel = peer.find(options.timeout if given else min(options.timeout, 5.0))
            except ValueError:
                if given:
                    raise
        if written and peer.run not in ("", written.begin["run"]):
            raise ValueError(
                f"{folder} has the journal of run {written.begin['run']}, and the workers there train run {peer.run}: "
                f"give this worker a folder of its own"
            )
        if peer.channel is None:
            found = None if folder is None else resume(folder, anchor)
            if written and found is None and written.version >= options.save_every:
                raise ValueError(
                    f"{folder} has a journal of {written.version} outer steps, and no outer state to go on from: start "
                    f"the worker whose folder has one first, or give this one an empty folder to begin anew"
                )
            begin = new_run(rule, first, until, said, anchor, averaged)
            outer, lines = found or (Outer(begin, anchor), [begin])
            if found and outer.members:
                others = ", ".join(map(str, sorted(outer.members)))
                log.warning(
                    "workers %s went on after the state in %s: their folders may have a later one", others, folder
                )
            check_settings(said, outer.begin["about"], f"in the run of {folder}", defaults or {})
            node.lead(outer, lines)
        peer.join(said, defaults or {}, held)
    except BaseException:
        peer.close()
        raise
    return peer
