"""Workers that exchange updates: who leads, who waits, who dies, and what a stranger can do."""

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
from mpcore.tools.workers.journal import read_lines, replay
from mpcore.tools.workers.outer import Options
from mpcore.tools.workers.peer import start
from mpcore.tools.workers.wire import Channel, connect, pack, read_token, split_address, unpack

TOKEN = b"a token of at least sixteen bytes"
ANCHOR = {"a": torch.zeros(3, 2, dtype=torch.float64), "b": torch.ones(4, dtype=torch.float64)}
ABOUT = {"model": "tiny", "data": "none"}


def trained(state, worker, anchor, first, last):
    """Return the update of a phase: momentum SGD on a function of each step, with a state that the worker keeps."""
    x = {name: a.clone() for name, a in anchor.items()}
    for step in range(first, last):
        for name, value in x.items():
            g = value - torch.sin(torch.arange(value.numel(), dtype=torch.float64) * (step + 1)).view_as(value)
            m = state.setdefault((worker, name), torch.zeros_like(g)).mul_(0.5).add_(g)
            value.sub_(m, alpha=0.1)
    return {name: anchor[name] - x[name] for name in x}


class Worker(threading.Thread):
    """A worker in a thread. `kill` ends it as a signal would: its sockets close, and it says nothing."""

    def __init__(self, join=(), seconds=0.0, until=60, about=ABOUT, rule=None, folder=None, first=0, **options):
        super().__init__(daemon=True)
        options = Options(**{"every": 5, "timeout": 8.0, **options})
        self.seconds, self.dead, self.error, self.steps, self.anchor = seconds, False, None, 0, None
        said = {
            "rule": rule or Nesterov(),
            "first": first,
            "until": until,
            "about": about,
            "join": join,
            "folder": folder,
        }
        self.peer = start(listen="127.0.0.1:0", token=TOKEN, options=options, anchor=ANCHOR, **said)
        self.start()

    @property
    def address(self):
        return self.peer.node.address

    def run(self):
        state = {}
        try:
            while (phase := self.peer.take()).first < phase.last:
                for _ in range(phase.first, phase.last):
                    time.sleep(self.seconds)
                    self.peer.progress += 1
                    self.steps += 1
                    if self.dead:
                        return
                update = trained(state, self.peer.number, phase.anchor, phase.first, phase.last)
                self.peer.hand_in(update, self.seconds)
            self.anchor = phase.anchor
            self.peer.leave()
        except (ValueError, OSError) as error:
            self.error = error
        finally:
            self.peer.close()

    def kill(self):
        self.dead = True
        self.peer.close()


def finish(*workers, limit=60):
    for worker in workers:
        worker.join(limit)
        assert not worker.is_alive()
        if not worker.dead and worker.error is not None:
            raise worker.error


def check(folder, until, of=None, begun=0):
    """Every step is in the anchor once, and the replay has the bits. Return the lines."""
    lines = read_lines(folder)
    entries = [entry for line in lines for entry in line.get("updates", ())]
    covered = sorted(step for entry in entries if entry["applied"] for step in range(*entry["steps"]))
    assert covered == list(range(begun, until))
    state = {}
    found = replay(lines, ANCHOR, lambda *phase: trained(state, *phase))
    assert found.differing == []
    for worker in of or ():
        assert all(torch.equal(x, found.outer.anchor[name]) for name, x in worker.anchor.items())
    return lines


@pytest.mark.parametrize("wait", ["none", "quorum:2", "all"])
@pytest.mark.parametrize("rule", [Nesterov(), DelayedNesterov(buffer=3)], ids=["nesterov", "delayed"])
def test_workers_end_with_one_anchor_and_the_replay_has_its_bits(wait, rule, tmp_path):
    first = Worker(folder=tmp_path / "0", wait=wait, rule=rule)
    options = {"wait": wait, "rule": rule}
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
            all_of = [trained(state, entry["worker"], base, *entry["steps"]) for entry in line["updates"]]
            for name, x in p.items():
                x.grad = sum(update[name] for update in all_of) / line["workers"]
            sgd.step()
    for name, x in p.items():
        torch.testing.assert_close(x.detach(), first.anchor[name], rtol=1e-12, atol=1e-12)


@pytest.mark.slow  # it measures time
def test_a_slow_worker_holds_up_nobody(tmp_path):
    """One of four is 4 times slower: steps per second against synchronous merges, and dynamic local steps."""
    seconds = {}
    for wait, dynamic in (("all", False), ("none", False), ("none", True)):
        folder, began = tmp_path / f"{wait}{dynamic}", time.monotonic()
        options = {"wait": wait, "dynamic": dynamic, "until": 480, "every": 10}
        first = Worker(seconds=0.01, folder=folder, **options)
        finish(first, *[Worker([first.address], s, **options) for s in (0.01, 0.01, 0.04)])
        seconds[wait, dynamic] = time.monotonic() - began
        lines = check(folder, 480)
    assert seconds["all", False] > 2.5 * seconds["none", False], seconds
    sizes = {e["worker"]: e["steps"][1] - e["steps"][0] for line in lines[-30:] for e in line.get("updates", ())}
    assert max(sizes.values()) >= 3 * sizes[3], sizes


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


def test_fewer_workers_than_the_quorum_stop(tmp_path):
    """As on the smaller side of a network split. The run goes on when another worker joins."""
    options = {"wait": "quorum:2", "until": 200, "seconds": 0.005, "timeout": 2.0}
    first = Worker(folder=tmp_path, **options)
    others = [Worker([first.address], **options) for _ in range(2)]
    wait_for(lambda: first.peer.phase > 1)
    for each in others:
        each.kill()
    wait_for(lambda: len(first.peer.node.outer.members) == 1)
    time.sleep(0.5)
    version = first.peer.node.outer.version
    time.sleep(1.0)
    assert first.peer.node.outer.version == version
    finish(first, Worker([first.address], **options))
    check(tmp_path, 200, [first])


def test_a_hung_worker_is_left_out_and_says_so(tmp_path):
    first = Worker(folder=tmp_path, until=100, seconds=0.01, timeout=2.0)
    hung = Worker([first.address], until=100, seconds=0.01, timeout=2.0)
    wait_for(lambda: hung.steps > 5)
    hung.seconds = 4.0
    finish(first)
    hung.join(40)
    assert "worker 1 was left out" in str(hung.error)
    assert "2 s" in str(hung.error)
    assert [line["worker"] for line in check(tmp_path, 100, [first]) if line["op"] == "leave"] == [1]


def test_a_run_resumes_after_all_of_its_workers_ended(tmp_path):
    """From the newest outer state: what came after it is trained again, and nothing is applied twice."""
    options = {"until": 200, "seconds": 0.002, "save_every": 4}
    first = Worker(folder=tmp_path, **options)
    second = Worker([first.address], **options)
    wait_for(lambda: len(list(tmp_path.glob("outer-*"))) > 1)
    first.kill()
    second.kill()
    with pytest.raises(ValueError, match=r"steps is 300 here, and 200"):
        Worker(folder=tmp_path, **{**options, "until": 300})
    again = Worker(folder=tmp_path, **options)
    finish(again, Worker([again.address], **options))
    lines = check(tmp_path, 200, [again])
    assert [line["worker"] for line in lines if line["op"] == "join"] == [0, 1, 2, 3]


def test_updates_that_are_too_stale_are_trained_again(tmp_path):
    options = {"first": 40, "until": 160, "staleness": 1, "timeout": 10.0}
    first = Worker(folder=tmp_path, seconds=0.002, **options)
    finish(first, Worker([first.address], seconds=0.03, **options))
    lines = check(tmp_path, 160, [first], 40)
    assert any(not entry["applied"] for line in lines for entry in line.get("updates", ()))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"about": {**ABOUT, "model": "other"}}, "model is other here, and tiny at the run"),
        ({"every": 7}, "every is 7 here, and 5 at the run"),
        ({"rule": Average(0.5)}, r"rule is Average\(lr=0.5\) here, and Nesterov\(lr=0.7"),
    ],
)
def test_a_worker_that_differs_is_refused_by_name(changed, said):
    first = Worker(seconds=0.01, until=30)
    with pytest.raises(ValueError, match=said):
        Worker([first.address], **{"until": 30, **changed})
    finish(first)


@contextmanager
def recorded(address):
    """A relay to a worker, which keeps what each end sends."""
    heard, server = {"question": b"", "answer": b""}, socket.create_server(("127.0.0.1", 0))

    def relay():
        near, _ = server.accept()
        host, port = address.split(":")
        far = socket.create_connection((host, int(port)))

        def pump(a, b, kind):
            while data := a.recv(65536):
                heard[kind] += data
                b.sendall(data)
            b.close()

        threading.Thread(target=pump, args=(far, near, "answer"), daemon=True).start()
        pump(near, far, "question")

    threading.Thread(target=relay, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}", heard
    server.close()


def test_a_stranger_can_not_join_read_or_stop_a_run(tmp_path):
    first = Worker(folder=tmp_path, seconds=0.01, until=150)
    host, port = first.address.split(":")
    for token in (b"another token of sixteen bytes", b"", TOKEN[:-1]):
        with pytest.raises(ValueError, match="refused this secret"):
            connect(first.address, token, 3.0)
    with recorded(first.address) as (address, heard):
        channel = connect(address, TOKEN, 3.0)
        channel.ask({"kind": "leave", "worker": -7})  # a real worker's message
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
        assert len(lines) == 1 + 2 * count - 1 + 2 * 4 * count
        taken = {(line["worker"], line["phase"]): line["at"] for line in lines if line["op"] == "lease"}
        handed = [(entry["handed"], entry) for line in lines for entry in line.get("updates", ())]
        waits = [taken.get((entry["worker"], entry["phase"] + 1), at) - at for at, entry in handed]
        seconds[count] = sum(waits) / len(waits)
    assert seconds[64] < 0.1 + 3 * seconds[8], seconds
