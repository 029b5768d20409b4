"""Workers that exchange updates: who leads, who waits, who dies, and what a stranger can do."""

import fcntl
import os
import random
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch

from mpcore.tools.workers import Average, DelayedNesterov, Nesterov
from mpcore.tools.workers.journal import Journal, read_lines, replay, resume
from mpcore.tools.workers.outer import STOPPED, Options, Outer, new_run
from mpcore.tools.workers.peer import start
from mpcore.tools.workers.wire import Channel, connect, pack, read_token, split_address, unpack

TOKEN = b"a token of at least sixteen bytes"
ANCHOR = {"a": torch.zeros(3, 2, dtype=torch.float64), "b": torch.ones(4, dtype=torch.float64)}
ABOUT = {"model": "tiny", "data": "none"}


class Local:
    """A worker's parameters, and momentum SGD on a function of each step."""

    def __init__(self):
        self.m = {}

    def write(self, anchor):
        self.base, self.x = anchor, {name: a.clone() for name, a in anchor.items()}

    def merge(self, anchor):
        self.base, self.x = anchor, {name: a + (self.x[name] - self.handed[name]) for name, a in anchor.items()}

    def step(self, step):
        for name, value in self.x.items():
            g = value - torch.sin(torch.arange(value.numel(), dtype=torch.float64) * (step + 1)).view_as(value)
            value.sub_(self.m.setdefault(name, torch.zeros_like(g)).mul_(0.5).add_(g), alpha=0.1)

    def moved(self):
        self.handed = {name: value.clone() for name, value in self.x.items()}
        return {name: a - self.x[name] for name, a in self.base.items()}


def trained(state, worker, anchor, first, last, merged):
    """Return the update of a phase, with a state that the worker keeps."""
    local = state.setdefault(worker, Local())
    for step in range(first, last + 1):
        if step == merged:
            (local.write if merged == first else local.merge)(anchor)
        if step < last:
            local.step(step)
    return local.moved()


class Worker(threading.Thread):
    """A worker in a thread. `kill` ends it as a signal would: its sockets close, and it says nothing."""

    def __init__(
        self, join=(), seconds=0.0, until=60, about=ABOUT, rule=None, folder=None, first=0, anchor=ANCHOR, **options
    ):
        super().__init__(daemon=True)
        options = Options(**{"every": 5, "timeout": 8.0, "wait": "none", "dynamic": False, **options})
        self.stops = 0.0  # leave after this step, and serve the others for so many seconds
        self.seconds, self.dead, self.error, self.steps, self.anchor = seconds, False, None, 0, None
        self.exchanging, self.trained = 0.0, (0.0, 0.0)  # seconds of exchanges; these and the clock, at the last step
        said = {"rule": rule or Nesterov(), "first": first, "until": until, "about": about, "join": join}
        said["defaults"] = {"newer": "no"}
        self.peer = start(listen="127.0.0.1:0", token=TOKEN, options=options, anchor=anchor, folder=folder, **said)
        self.start()

    @property
    def address(self):
        return self.peer.node.address

    def run(self):
        local = Local()
        try:
            phase, steps, merged = self.taken(), (), 0
            while phase and phase.first < phase.last:
                if not steps:
                    local.write(phase.anchor)
                    steps, merged = phase[:2], phase.first
                for step in range(*steps):
                    time.sleep(self.seconds)
                    local.step(step)
                    self.peer.progress += 1
                    self.steps += 1
                    self.trained = self.exchanging, time.monotonic()
                    if self.dead:
                        return
                    if self.stops:
                        return self.peer.stop(self.stops)
                    if merged is None and (self.peer.arrived() or step + 1 == steps[1]):
                        if (phase := self.exchanged(self.taken)) is None:
                            return
                        local.merge(phase.anchor)
                        merged = step + 1
                self.exchanged(self.peer.hand_in, local.moved(), self.seconds, merged)
                steps, merged = phase.later, None
                if not steps:
                    phase = self.exchanged(self.taken)
            if phase is None:
                return
            self.anchor = phase.anchor
            self.peer.leave()
        except (ValueError, OSError) as error:
            self.error = error
        finally:
            self.peer.close()

    def taken(self):
        while (phase := self.peer.take()) is None and not self.dead:
            if self.stops:
                self.peer.stop(self.stops)
                self.kill()
        return phase

    def exchanged(self, call, *arguments):
        began = time.monotonic()
        result = call(*arguments)
        self.exchanging += time.monotonic() - began
        return result

    def kill(self):
        self.dead = True
        self.peer.close()


def finish(*workers, limit=60):
    for worker in workers:
        worker.join(limit)
        assert not worker.is_alive()
        if not worker.dead and worker.error is not None:
            raise worker.error


def check(folder, until, of=None, begun=0, anchor=ANCHOR):
    """Every step is in the anchor once, and the replay has the bits. Return the lines."""
    lines = read_lines(folder)
    entries = [entry for line in lines for entry in line.get("updates", ())]
    covered = sorted(step for entry in entries if entry["applied"] for step in range(*entry["steps"]))
    assert covered == list(range(begun, until))
    state = {}
    found = replay(lines, anchor, lambda *phase: trained(state, *phase))
    assert found.differing == []
    for worker in of or ():
        assert all(torch.equal(x, found.outer.anchor[name]) for name, x in worker.anchor.items())
    return lines


@pytest.mark.parametrize(("wait", "rule", "overlap"), [
    ("none", Nesterov(), False), ("none", DelayedNesterov(buffer=3), True), ("quorum:2", Nesterov(), True),
    ("quorum:2", DelayedNesterov(buffer=3), False), ("all", DelayedNesterov(buffer=3), True),
    ("all", Nesterov(), False),
], ids=str)  # fmt: skip
def test_workers_end_with_one_anchor_and_the_replay_has_its_bits(wait, rule, overlap, tmp_path):
    options = {"wait": wait, "rule": rule, "overlap": overlap}
    first = Worker(folder=tmp_path / "0", **options)
    others = [Worker([first.address], 0.003, folder=tmp_path / str(i), **options) for i in (1, 2)]
    finish(first, *others)
    for i in range(3):  # worker 2 keeps no replica, but the journal
        check(tmp_path / str(i), 60, [first, *others])


def test_waiting_for_all_is_diloco(tmp_path):
    """Two workers of equal speed: SGD with Nesterov momentum of the mean update, by torch."""
    first = Worker(folder=tmp_path, wait="quorum:2", until=40)
    finish(first, Worker([first.address], wait="quorum:2", until=40))
    state, p = {}, {name: torch.nn.Parameter(x.clone()) for name, x in ANCHOR.items()}
    sgd = torch.optim.SGD(p.values(), lr=0.7, momentum=0.9, nesterov=True)
    for line in check(tmp_path, 40):
        if line["op"] == "update":
            base = {name: x.detach().clone() for name, x in p.items()}
            all_of = [trained(state, e["worker"], base, *e["steps"], e["steps"][0]) for e in line["updates"]]
            for name, x in p.items():
                x.grad = sum(update[name] for update in all_of) / line["workers"]
            sgd.step()
    for name, x in p.items():
        torch.testing.assert_close(x.detach(), first.anchor[name], rtol=1e-12, atol=1e-12)


class Late(Worker):
    """A worker whose thread is slow to take its first steps."""

    def taken(self):
        time.sleep(0.5)
        return super().taken()


def test_waiting_for_all_waits_for_a_worker_that_has_no_steps_yet(tmp_path):
    first = Worker(folder=tmp_path, wait="all", until=60, seconds=0.02)
    second = Late([first.address], wait="all", until=60)
    finish(first, second)
    lines = check(tmp_path, 60, [first, second])
    joined = next(i for i, line in enumerate(lines) if line["op"] == "join" and line["worker"] == 1)
    counts = [len(line["updates"]) for line in lines[joined:] if line["op"] == "update"]
    assert {*counts[:-1]} == {2}, counts


@contextmanager
def relay(address, rate=float("inf")):
    """A relay of so many bytes per second each way to a worker. Yield its address, and what each end sends."""
    heard, server = {"question": b"", "answer": b""}, socket.create_server(("127.0.0.1", 0))

    def pump(a, b, kind):
        free = 0.0  # when the link is free
        with suppress(OSError):
            while data := a.recv(4096):
                heard[kind] += data
                free = max(free, time.monotonic()) + len(data) / rate
                time.sleep(max(free - time.monotonic(), 0.0))
                b.sendall(data)
        for end in (a, b):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept():
        with suppress(OSError):
            while True:
                near, far = server.accept()[0], socket.create_connection(split_address(address))
                for ends in ((near, far, "question"), (far, near, "answer")):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}", heard
    server.close()


LARGE = {"a": torch.zeros(5000, dtype=torch.float64)}  # 40 kB


@pytest.mark.slow  # it measures time
def test_a_worker_behind_a_slow_link_loses_at_most_5_percent_of_its_compute_time(tmp_path):
    """The exchange of a phase takes about 0.4 of the time of its steps."""
    share = {}
    for overlap in (False, True):
        options = {"overlap": overlap, "until": 400, "every": 20, "replicas": 0, "anchor": LARGE}
        first = Worker(seconds=0.02, folder=tmp_path / str(overlap), **options)
        with relay(first.address, 500_000) as (address, _):
            began, second = time.monotonic(), Worker([address], 0.02, **options)
            finish(first, second)
        share[overlap] = second.trained[0] / (second.trained[1] - began)  # at the end there are no steps to train
        check(tmp_path / str(overlap), 400, [first, second], anchor=LARGE)
    assert share[True] < 0.05 < 0.2 < share[False], share


def test_a_slow_worker_trains_fewer_steps(tmp_path):
    """A tenth of a phase at first, then as many as it can in the time of the fastest one's; phases are equally long."""
    said = {"listen": "127.0.0.1:0", "token": TOKEN, "rule": Nesterov(), "until": 64, "about": ABOUT, "anchor": ANCHOR}
    said["options"] = Options(wait="quorum:2", dynamic=True, every=20)
    first = start(folder=tmp_path, **said)
    peers, sizes, state = [first, start(join=[first.node.address], **said)], [], {}
    for count in range(5):
        phases = [next(filter(None, iter(peer.take, 0))) for peer in peers]  # both, before either hands in
        sizes.append([phase.last - phase.first for phase in phases])
        for i, phase in enumerate(phases if count < 4 else ()):
            update = trained(state, i, phase.anchor, phase.first, phase.last, phase.first)
            peers[i].hand_in(update, seconds=(0.01, 0.04)[i])
    for peer in reversed(peers):  # the leader last
        peer.leave()
    assert sizes == [[2, 2], [16, 4], [16, 4], [16, 4], [0, 0]]
    check(tmp_path, 64)


def wait_for(condition, limit=20.0):
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_any_worker_may_die_and_others_come(tmp_path):
    """The leader dies, then the next leader, then two at once; others join. No step is lost or applied twice."""
    options = {"until": 400, "replicas": 2, "seconds": 0.005}
    workers = [Worker(folder=tmp_path / "0", **options)]

    def more(count):
        for _ in range(count):
            alive = [worker.address for worker in workers if not worker.dead]
            workers.append(Worker(alive, folder=tmp_path / str(len(workers)), **options))

    more(3)
    for dead in ((0,), (2,), (1, 3)):
        steps = sum(worker.steps for worker in workers)
        wait_for(lambda: sum(worker.steps for worker in workers) > steps + 40)  # noqa: B023
        for i in dead:
            workers[i].kill()
        more(len(dead))
        began, others = time.monotonic(), [worker for worker in workers if not worker.dead]
        before = {worker: worker.peer.phase for worker in others}
        wait_for(lambda: all(worker.peer.phase > before[worker] or worker.error for worker in others))  # noqa: B023
        assert time.monotonic() - began < 8.0 + 5 * 0.005 + 2.0  # the time-out, a phase, and slack
    finish(*workers)
    check(tmp_path / "4", 400, [worker for worker in workers if not worker.dead])  # it led last


def test_a_worker_that_closed_answers_nobody():
    """Not even over a connection that it accepted before: it would seem alive, and lead again."""
    worker = Worker(until=10**6)
    with socket.create_connection(split_address(worker.address)) as sock:
        assert sock.recv(1, socket.MSG_PEEK)  # it waits for the rest of the handshake
        worker.kill()
        with pytest.raises(ConnectionError):
            Channel(sock, TOKEN, False, 3.0).ask({"kind": "who"})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_workers_may_die_at_random_times(seed, tmp_path):
    """One or two of four at once, three times a run: 30 times in all."""
    draw, options = random.Random(seed), {"until": 1500, "replicas": 2, "seconds": 0.01}
    options |= {"wait": ("none", "all", "quorum:2")[seed % 3], "dynamic": seed % 2 == 1}
    workers = [Worker(folder=tmp_path / "0", **options)]
    for round_ in range(4):
        alive = [worker for worker in workers if not worker.dead]
        while len(alive) < 4:
            folder = tmp_path / str(len(workers))
            workers.append(Worker([worker.address for worker in alive], folder=folder, **options))
            alive.append(workers[-1])
        if round_ < 3:
            time.sleep(draw.uniform(0.05, 0.6))
            for worker in draw.sample(alive, draw.choice((1, 1, 2))):
                worker.kill()
    finish(*workers)
    last = [worker for worker in workers if not worker.dead]
    journals = [tmp_path / str(i) for i in range(len(workers)) if (tmp_path / str(i) / "journal.jsonl").is_file()]
    check(max(journals, key=lambda folder: len(read_lines(folder))), 1500, last)


@pytest.mark.parametrize("until", [5, 200])
def test_fewer_workers_than_the_quorum_stop(until, tmp_path, caplog):
    """As on the smaller side of a network split. The run goes on when another worker joins."""
    options = {"wait": "quorum:2", "until": until, "seconds": 0.005, "timeout": 2.0}
    first = Worker(folder=tmp_path, **options)
    if until == 5:  # the first worker has all steps, and the second none
        wait_for(lambda: first.peer.node.pending)
        finish(first, Worker([first.address], **options))
        check(tmp_path, 5, [first])
        return
    others = [Worker([first.address], **options) for _ in range(2)]
    wait_for(lambda: first.peer.phase > 1)
    for each in others:
        each.kill()
    wait_for(lambda: len(first.peer.node.outer.members) == 1)
    time.sleep(0.5)
    version = first.peer.node.outer.version
    time.sleep(1.0)
    assert first.peer.node.outer.version == version
    assert "worker 0 has waited for" in caplog.text
    assert "1 of 2 workers are here (wait 'quorum:2')" in caplog.text
    finish(first, Worker([first.address], **options))
    check(tmp_path, 200, [first])


def test_a_worker_whose_leader_and_replica_die_says_so(caplog):
    """For one timeout, not for longer."""
    options = {"until": 10**6, "seconds": 0.005, "timeout": 2.0}
    first = Worker(**options)
    second = Worker([first.address], **options)
    third = Worker([first.address, second.address], **options)
    wait_for(lambda: len(third.peer.addresses) == 2)
    for each in (first, second):
        each.kill()
    began = time.monotonic()
    third.join(30)
    assert time.monotonic() - began < 6
    assert "answered within 2 s: 0 of 2 known workers lead or hold the outer state" in str(third.error)
    assert first.address in str(third.error)
    assert "highest outer-N" in str(third.error)
    assert "s: 0 of 2 known workers" in caplog.text


def test_a_hung_worker_is_left_out_and_says_so(tmp_path):
    first = Worker(folder=tmp_path, until=100, seconds=0.01, timeout=1.0)
    hung = Worker([first.address], until=100, seconds=0.01, timeout=1.0)
    wait_for(lambda: hung.steps > 5)
    hung.seconds = 2.5
    finish(first)
    hung.join(40)
    assert "worker 1 was left out" in str(hung.error)
    assert "1 s" in str(hung.error)
    assert [line["worker"] for line in check(tmp_path, 100, [first]) if line["op"] == "leave"] == [1, 0]


def test_a_replica_that_stood_still_does_not_lead(caplog):
    """As after SIGSTOP or the sleep of its machine: the others may have ended the run without it."""
    first = Worker(until=10**6, timeout=1.0)
    second = Worker([first.address], until=10**6, timeout=1.0)
    wait_for(lambda: second.peer.node.outer is not None)
    with second.peer.node.pulse:
        first.kill()
        second.peer.node.awake -= 10.0
    second.join(30)
    assert "no worker of the run answered within" in str(second.error)
    assert "worker 1 stood still for 1" in caplog.text


def test_a_folder_belongs_to_one_run_and_one_process(tmp_path):
    finish(Worker(folder=tmp_path / "old", until=10))
    first, old = Worker(until=10**6), (tmp_path / "old" / "journal.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"old has the journal of run \w+, and the workers there train run \w+: give"):
        Worker([first.address], folder=tmp_path / "old")
    assert (tmp_path / "old" / "journal.jsonl").read_bytes() == old
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is in use by"):
            Worker([first.address], folder=tmp_path)
    with pytest.raises(ValueError, match=f"can't listen at {first.address}: Address already in use"):
        start(listen=first.address, token=TOKEN, options=Options(), anchor=ANCHOR, rule=Average(), until=1, about=ABOUT)
    assert first.peer.node.outer.members.keys() == {0}
    first.kill()


def test_a_run_resumes_after_all_of_its_workers_ended(tmp_path):
    """From the newest outer state: what came after it is trained again, and nothing is applied twice."""
    options = {"until": 200, "seconds": 0.002, "save_every": 4, "timeout": 2.0}
    first = Worker(folder=tmp_path, **options)
    second = Worker([first.address], **options)
    wait_for(lambda: len(list(tmp_path.glob("outer-*"))) > 1)
    first.kill()
    second.kill()
    with pytest.raises(ValueError, match=r"steps is 300 here, and 200"):
        Worker(folder=tmp_path, **{**options, "until": 300})
    path = tmp_path / "journal.jsonl"
    path.write_text(path.read_text().replace(', "overlap": "False"', ""))  # as a version before this option wrote it
    with pytest.raises(ValueError, match=r"overlap is True here, and False"):
        Worker(folder=tmp_path, **options, overlap=True)
    options["about"] = {**ABOUT, "newer": "no"}  # a setting that the program has since then
    again = Worker(folder=tmp_path, **options)
    finish(again, Worker([again.address], **options))
    assert [line["worker"] for line in check(tmp_path, 200, [again]) if line["op"] == "join"] == [0, 1, 2, 3]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_all_workers_stop_and_go_on(overlap, tmp_path):
    """The leader saves what all have handed in. No line of its journal is lost, and no step trained twice."""
    options = {"until": 300, "seconds": 0.005, "save_every": 10**6, "overlap": overlap}
    first = Worker(folder=tmp_path / "0", **options)
    second = Worker([first.address], folder=tmp_path / "1", **options)
    wait_for(lambda: second.peer.phase > 3)
    first.stops = second.stops = 10.0
    finish(first, second)
    lines = read_lines(tmp_path / "0")
    assert {line["worker"]: line["why"] for line in lines if line["op"] == "leave"} == dict.fromkeys((0, 1), STOPPED)
    assert sum("updates" in line for line in lines) > 5
    again = Worker(folder=tmp_path / "0", **options)
    finish(again, third := Worker([again.address], folder=tmp_path / "1", **options))
    assert check(tmp_path / "0", 300, [again, third])[: len(lines)] == lines


def test_a_leader_that_stops_applies_what_waits_for_it(tmp_path):
    """All stop while one worker's update waits for the leader's: the update is not lost, and nobody waits."""
    options = {"wait": "all", "until": 10**6, "folder": tmp_path}
    first = Worker(seconds=0.3, **options)
    second = Worker([first.address], **{**options, "folder": None})
    wait_for(lambda: 1 in first.peer.node.pending)
    began = time.monotonic()
    first.stops = second.stops = 10.0
    finish(first, second)
    assert time.monotonic() - began < 5
    *_, last = [line for line in read_lines(tmp_path) if "updates" in line]
    assert [entry["worker"] for entry in last["updates"]] == [1]
    assert [line["why"] for line in read_lines(tmp_path) if line["op"] == "leave"] == [STOPPED] * 2


def test_a_leader_that_stops_hands_over_to_its_replica(tmp_path, caplog):
    options = {"until": 1200, "seconds": 0.005, "timeout": 2.0}
    first = Worker(folder=tmp_path / "0", **options)
    others = [Worker([first.address], folder=tmp_path / str(i), **options) for i in (1, 2)]
    wait_for(lambda: first.peer.phase > 1)
    first.stops = 1.6  # longer than a worker may be without a connection
    finish(first, *others)
    lines = check(tmp_path / "1", 1200, others)
    assert {"op": "leave", "worker": 0, "why": STOPPED}.items() <= next(x for x in lines if x["op"] == "leave").items()
    Worker(folder=tmp_path / "0", **options).kill()  # the others went on after its state
    assert "1, 2 went on after the state in" in caplog.text


def test_an_outer_state_of_other_lines_is_not_resumed(tmp_path):
    """As where another worker resumed an older state, and its journal replaced this one's."""
    outer = Outer(new_run(Nesterov(), 0, 9, {}, ANCHOR), ANCHOR)
    journal = Journal(tmp_path)
    journal.replace([outer.begin])
    journal.save(outer)
    outer.anchor["a"] += 1
    journal.lines += [{"op": "join", "worker": 0, "address": ""}] * 2
    journal.save(outer)  # of lines that the file lacks
    journal.replace([*journal.lines, {"op": "leave", "worker": 0, "why": ""}])
    found, lines = resume(tmp_path, ANCHOR)
    assert lines == [outer.begin]
    assert torch.equal(found.anchor["a"], ANCHOR["a"])


def test_a_worker_with_a_later_outer_state_joins_no_run_that_lacks_it(tmp_path):
    """One of two stops, and later the other: started in this order, the run would go on from the earlier state."""
    options = {"until": 10**6, "seconds": 0.002, "timeout": 2.0}
    first = Worker(folder=tmp_path / "0", **options)
    second = Worker([first.address], folder=tmp_path / "1", **options)
    for worker in (first, second):
        version = worker.peer.node.outer.version if worker.peer.node.outer else 0
        wait_for(lambda: (outer := second.peer.node.outer) is not None and outer.version > version + 3)  # noqa: B023
        worker.stops = 0.5
        finish(worker)
    again = Worker(folder=tmp_path / "0", **options)
    with pytest.raises(
        ValueError, match=r"has an outer state after \d+ lines of the journal, and the run goes on from"
    ):
        Worker([again.address], folder=tmp_path / "1", **options)
    again.kill()
    last = Worker(folder=tmp_path / "1", **options)
    assert last.peer.node.outer.version > again.peer.node.outer.version
    last.kill()


def test_a_full_disk_is_told_and_written_later(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    worker = Worker(folder=tmp_path, until=300, seconds=0.005)
    wait_for(lambda: worker.steps > 40)
    with monkeypatch.context() as patch:
        patch.setattr("mpcore.tools.fault_tolerance.metrics.open", full, raising=False)
        patch.setattr("mpcore.tools.workers.journal.write_tensors", full)
        patch.setattr("pathlib.Path.write_text", full)
        wait_for(lambda: caplog.text.count("NOT WRITTEN") >= 2)
    finish(worker)
    assert "journal.jsonl: [Errno 28] No space left" in caplog.text
    assert f"the outer state in {tmp_path}: [Errno 28]" in caplog.text
    check(tmp_path, 300, [worker])
    for path in tmp_path.glob("outer-*"):
        path.unlink()
    with pytest.raises(ValueError, match="has a journal of 60 outer steps, and no outer state to go on from"):
        Worker(folder=tmp_path, until=300)


def test_outer_states_of_an_earlier_journal_do_not_push_out_new_ones(tmp_path):
    for until in (100, 40):
        (tmp_path / "journal.jsonl").unlink(missing_ok=True)
        finish(Worker(folder=tmp_path, until=until, save_every=2))
        outer, _ = resume(tmp_path, ANCHOR)
        assert outer.done == until


def test_an_update_that_is_not_finite_is_refused_and_its_steps_are_trained_again():
    good = Worker(until=60, seconds=0.01)
    bad = start(listen="127.0.0.1:0", token=TOKEN, options=good.peer.options, rule=Nesterov(), until=60, about=ABOUT,
                anchor=ANCHOR, join=[good.address], defaults={"newer": "no"})  # fmt: skip
    while (phase := bad.take()) is None:
        pass
    bad.hand_in({name: x * float("nan") for name, x in phase.anchor.items()})
    wait_for(bad.arrived)
    with pytest.raises(ValueError, match="a of worker 1 is not finite: its update is not applied"):
        bad.take()
    bad.close()
    finish(good)
    assert all(x.isfinite().all() for x in good.anchor.values())


def test_a_worker_joins_by_the_address_of_any_other():
    first = Worker(until=10**6, replicas=0)
    second = Worker([first.address], until=10**6, replicas=0)
    wait_for(lambda: second.peer.leader == first.address)
    third = Worker([second.address], until=10**6, replicas=0)
    assert third.peer.number == 2
    for worker in (first, second, third):
        worker.kill()


def test_updates_that_are_too_stale_are_trained_again(tmp_path):
    options = {"first": 40, "until": 160, "staleness": 1, "timeout": 10.0}
    first = Worker(folder=tmp_path, seconds=0.002, **options)
    finish(first, Worker([first.address], seconds=0.03, **options))
    lines = check(tmp_path, 160, [first], 40)
    assert any(not entry["applied"] for line in lines for entry in line.get("updates", ()))


@pytest.mark.parametrize(("changed", "said"), [
    ({"about": {**ABOUT, "model": "other"}}, "model is other here, and tiny at the run"),
    ({"every": 7}, "every is 7 here, and 5 at the run"),
    ({"rule": Average(0.5)}, r"rule is Average\(lr=0.5\) here, and Nesterov\(lr=0.7"),
])  # fmt: skip
def test_a_worker_that_differs_is_refused_by_name(changed, said):
    first = Worker(seconds=0.01, until=30)
    with pytest.raises(ValueError, match=said):
        Worker([first.address], **{"until": 30, **changed})
    finish(first)


def test_a_stranger_can_not_join_read_or_stop_a_run(tmp_path):
    first = Worker(folder=tmp_path, seconds=0.01, until=150)
    host, port = first.address.split(":")
    for token in (b"another token of sixteen bytes", b"", TOKEN[:-1]):
        with pytest.raises(ValueError, match="refused this secret"):
            connect(first.address, token, 3.0)
    with relay(first.address) as (address, heard):
        channel = connect(address, TOKEN, 3.0)
        channel.ask({"kind": "leave", "worker": -7, "why": ""})  # a real worker's message
        channel.close()
    garbage = [b"", b"\0" * 8, os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", heard["question"],
               heard["question"][:48] + struct.pack("<Q", 2**62)]  # fmt: skip
    for data in garbage:
        with socket.create_connection((host, int(port)), 3.0) as stranger:
            answer = stranger.recv(48, socket.MSG_WAITALL)
            with suppress(OSError):  # the worker may have closed the connection
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while part := stranger.recv(4096):
                    answer += part
            said = answer[48:]  # after the name of the protocol and a random number: nothing, or the fixed refusal
            assert len(answer) >= 48, data[:20]
            assert said in (b"", b"\xff" * 8), (data[:20], answer)
    idle = [socket.create_connection((host, int(port))) for _ in range(80)]  # more than may be silent at once
    for each in idle:
        each.close()
    finish(first)
    check(tmp_path, 150, [first])


def test_a_worker_that_finds_no_run_says_why(caplog):
    """At once if the secret is wrong or another program listens; else one line, and an error after the time-out."""
    first, began = Worker(seconds=0.01, until=30), time.monotonic()
    own = {"options": Options(timeout=60.0), "rule": Nesterov(), "until": 30, "about": ABOUT, "anchor": ANCHOR}
    with pytest.raises(ValueError, match=f"{first.address}.* refused this secret"):
        start(listen="127.0.0.1:0", token=b"another token of sixteen bytes", join=[first.address], **own)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400" + b" " * 99)).start()
        with pytest.raises(ValueError, match=f"{address}.* is no worker"):
            start(listen="127.0.0.1:0", token=TOKEN, join=[address], **own)
    assert time.monotonic() - began < 10
    with pytest.raises(ValueError, match=rf"1\.5 s: {address}"):
        start(listen="127.0.0.1:0", token=TOKEN, join=[address], **{**own, "options": Options(timeout=1.5)})
    assert f"1.5 s for a worker of the run: {address}" in caplog.text
    finish(first)


def test_a_message_that_is_changed_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    ends = {}
    server = threading.Thread(target=lambda: ends.update(far=Channel(far, TOKEN, True, 3.0)))
    server.start()
    channel = Channel(near, TOKEN, False, 3.0)
    server.join()
    channel.send({"kind": "hello"})
    assert ends["far"].receive()[0] == {"kind": "hello"}
    channel.sent = 0  # the first message's number again
    channel.send({"kind": "hello"})
    with pytest.raises(ValueError, match="signed"):
        ends["far"].receive()


def test_the_token_is_a_secret_of_its_user(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="644"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == b"0123456789abcdef"
    monkeypatch.setenv("MPCORE_SECRET", "short")
    with pytest.raises(ValueError, match="5 bytes"):
        read_token(None)


def test_packed_tensors_keep_bits_and_refuse_damage():
    tensors = {"a": torch.randn(3, 2), "b": torch.tensor(float("nan")), "c": torch.empty(0, 4), "d": torch.arange(3)}
    data = pack(tensors)
    found = unpack(memoryview(data))
    assert all(found[n].dtype == x.dtype and found[n].shape == x.shape for n, x in tensors.items())
    assert pack(found) == data
    for wrong in (b"", data[:-1], data + b"\0", data[:4], struct.pack("<Q", 2**60) + data[8:]):
        with pytest.raises(ValueError, match="damaged"):
            unpack(memoryview(wrong))


@pytest.mark.slow  # it measures time
def test_the_exchange_grows_linearly_with_the_workers(tmp_path):
    """64 workers: the journal has a line for each update, join and lease, and nobody waits longer than with 8."""
    seconds = {}
    for count in (8, 64):
        options = {"until": 20 * count, "timeout": 20.0}
        first = Worker(folder=tmp_path / str(count), seconds=0.2, **options)
        pace = [0.2 + 0.1 * i / count for i in range(1, count)]  # they don't all hand in at once
        workers = [first, *[Worker([first.address], seconds, **options) for seconds in pace]]
        finish(*workers)
        lines = check(tmp_path / str(count), 20 * count, workers)
        assert len(lines) == 1 + 2 * count + 2 * 4 * count
        taken = {(line["worker"], line["phase"]): line["at"] for line in lines if line["op"] == "lease"}
        handed = [(entry["handed"], entry) for line in lines for entry in line.get("updates", ())]
        waits = [taken.get((entry["worker"], entry["phase"] + 1), at) - at for at, entry in handed]
        seconds[count] = sum(waits) / len(waits)
    assert seconds[64] < 0.1 + 3 * seconds[8], seconds
