"""What the doctor says of each part of a machine, on machines that are written here."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpcore as mp
from mpcore import collectives
from mpcore.kernels import _dispatch, _self_test
from mpcore.mesh.build import build_mesh
from mpcore.tools import doctor
from mpcore.tools.doctor import (
    Finding,
    check_collectives,
    check_kernel,
    check_kernels,
    check_launch,
    main,
    versions,
)
from mpcore.tools.verify.pool import RankError


def test_a_finding_is_a_line_of_its_state_its_name_and_its_detail():
    assert str(Finding("a port", "ok", "free")) == f"ok      {'a port':<34}free"
    assert str(Finding("a port", "FAILED")) == "FAILED  a port"
    assert Finding("x", "ok").detail == ""


# --- versions ---------------------------------------------------------------------------------------------------------


def gpu(name: str, gib: int) -> Any:
    return SimpleNamespace(name=name, total_memory=gib * 2**30, major=9, minor=0)


def test_versions_devices_and_back_ends_are_listed(monkeypatch):
    def version(name: str) -> str:
        if name == "einops":
            raise metadata.PackageNotFoundError(name)
        return f"1.{len(name)}"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    gpus = [gpu("H100", 80), gpu("H100", 80), gpu("A100", 40)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: {i, j} == {0, 1})
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    lines = {line[:16].strip(): line[16:] for line in versions()}
    assert lines["torch"] == "1.5"
    assert lines["einops"] == "not installed"
    assert [name for name in lines if name in doctor.PACKAGES] == list(doctor.PACKAGES)
    assert lines["cpu"].startswith("12 ")
    assert lines["gpus"] == "3, torch is built for the CPU alone"
    assert lines["gpu 0"] == "H100, 80 GiB, 9.0, reads the memory of [1]"
    assert lines["gpu 1"] == "H100, 80 GiB, 9.0, reads the memory of [0]"
    assert lines["gpu 2"] == "A100, 40 GiB, 9.0"
    assert lines["back ends"] == "gloo, nccl"
    assert lines["python"].startswith(".".join(map(str, sys.version_info[:3])))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert any(line.endswith("built for 6.0") for line in versions())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert any(line.endswith("built for 12.8") for line in versions())


# --- what a launch needs ----------------------------------------------------------------------------------------------


def launch(port: int = 0) -> dict[str, Finding]:
    return {
        re.sub(r" \S+$", "", f.name) if f.name.startswith(("port", "host")) else f.name: f for f in check_launch(port)
    }


def test_a_sound_machine_is_ok(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {"here": "10.1.2.3"}[name])
    monkeypatch.setattr(resource, "getrlimit", lambda what: {resource.RLIMIT_NOFILE: (1024, 5)}[what])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free={"/dev/shm": 2**26}[path]))
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/dev/shm")
    found = list(check_launch(0))
    assert [f.state for f in found] == ["ok"] * 4
    assert [(f.name, f.detail) for f in found] == [
        ("port 0", "free"), ("host name here", "10.1.2.3"), ("open files", "1024 a process"),
        ("shared memory", "64 MiB"),
    ]  # fmt: skip


@pytest.mark.parametrize(("files", "state"), [(1023, "FAILED"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_few_open_files_are_a_fault(files, state, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (files, 10**6))
    found = launch()["open files"]
    assert found.state == state
    assert ("ulimit -n" in found.detail) == (state == "FAILED")


@pytest.mark.parametrize(("free", "state"), [(2**26 - 1, "FAILED"), (2**26, "ok")])
def test_little_shared_memory_is_a_fault(free, state, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/dev/shm")
    found = launch()["shared memory"]
    assert found.state == state
    assert ("--shm-size" in found.detail) == (state == "FAILED")
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    assert "shared memory" not in launch()


@pytest.mark.parametrize(("owners", "state"), [([0, 65534, 7, 42], "ok"), ([0, 1234, 7], "warning")])
def test_other_users_of_the_host_are_a_warning(owners, state, monkeypatch):
    stat, exists = os.stat, os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/proc/self" or exists(path))
    monkeypatch.setattr(os, "listdir", lambda path: ["self", *map(str, range(len(owners)))])
    monkeypatch.setattr(os, "getuid", lambda: 7)
    monkeypatch.setattr(os, "stat", lambda path, **of: SimpleNamespace(st_uid=owners[int(path[6:])])
                        if str(path).startswith("/proc/") else stat(path, **of))  # fmt: skip
    found = launch()["other users"]
    assert found.state == state
    assert ("1234" in found.detail) == (state == "warning")


def test_a_host_without_an_address_says_which_error_and_what_to_do(monkeypatch):
    for error, text in ((OSError(5, "no answer"), "no answer; "), (OSError("gone"), "gone; ")):

        def fails(name: str, error: OSError = error) -> str:
            raise error

        monkeypatch.setattr(socket, "gethostbyname", fails)
        found = launch()["host name"]
        assert found.state == "FAILED"
        assert found.detail.startswith(text)
        assert "/etc/hosts" in found.detail


def test_a_port_of_a_server_that_has_gone_is_free():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert launch(port)["port"].state == "FAILED"
        client = socket.create_connection(("127.0.0.1", port))
        other, _ = server.accept()
        other.close()  # the server ends first: its end waits for a while
        client.close()
    assert launch(port)["port"].state == "ok"
    assert doctor.PORT == 29500


# --- kernels ----------------------------------------------------------------------------------------------------------


def machine(monkeypatch: Any, gpu: bool, triton: bool = True, interprets: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(_dispatch, "HAS_TRITON", triton)
    monkeypatch.setattr(_dispatch, "INTERPRETING", interprets)


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({"gpu": False, "triton": False}, [("kernels", "skipped")]),
        ({"gpu": True, "triton": False}, [("kernels", "FAILED")]),
        ({"gpu": False}, [("kernels", "skipped")]),
        ({"gpu": False, "interprets": True}, [("kernel a", "cpu"), ("kernel b", "skipped"), ("kernel c", "cpu")]),
        ({"gpu": True}, [("kernel a", "cuda"), ("kernel b", "cuda"), ("kernel c", "cuda")]),
        ({"gpu": True, "interprets": True}, [("kernel a", "cuda"), ("kernel b", "cuda"), ("kernel c", "cuda")]),
    ],
)
def test_kernels_are_checked_where_triton_can_run_them(there, found, monkeypatch):
    machine(monkeypatch, **there)
    monkeypatch.setattr(_self_test, "TESTS", {"a": 1, "b": 2, "c": 3})
    monkeypatch.setattr(_self_test, "IN_FP8", ("b",))
    monkeypatch.setattr(doctor, "check_kernel", lambda name, device: Finding(f"kernel {name}", device))
    assert [(f.name, f.state) for f in check_kernels()] == found
    assert all(f.detail for f in check_kernels() if f.state in ("FAILED", "skipped"))


def test_a_kernel_is_ok_wrong_or_refuses_the_device(monkeypatch):
    def fault(name: str, device: str) -> str:
        if name == "refuses":
            raise ValueError(f"not on {device}")
        return "off by 3" if name == "wrong" else ""

    monkeypatch.setattr(_self_test, "fault", fault)
    assert check_kernel("wrong", "cpu") == Finding("kernel wrong", "FAILED", "off by 3")
    assert check_kernel("refuses", "cuda") == Finding("kernel refuses", "skipped", "not on cuda")
    times = iter([5.0, 7.5])
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(times))
    assert check_kernel("right", "cpu") == Finding("kernel right", "ok", "2.5 s")


def test_without_a_gpu_plain_torch_runs(monkeypatch):
    machine(monkeypatch, gpu=False)
    assert list(doctor.choices()) == ["implementations: plain torch, as there is no GPU"]


# --- collectives ------------------------------------------------------------------------------------------------------


def errors(monkeypatch: Any) -> list[dict[str, float]]:
    monkeypatch.setattr(doctor, "mesh", lambda **sizes: build_mesh(**sizes, device_type="cpu"))
    return [dict(found) for found in mp.simulate(doctor._between_two, "gloo", ranks=2)]


NAMES = ["copy", "reduce", "split", "gather", "all_gather", "reduce_scatter", "all_to_all"]


def test_each_collective_and_its_backward_are_those_of_their_definitions(monkeypatch):
    assert errors(monkeypatch) == [dict.fromkeys(NAMES, 0.0)] * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_result_or_gradient_of_a_collective_shows_in_its_line(name, backward, monkeypatch):
    real = getattr(collectives, name)

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x + 0.5 * (not backward)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy + 0.25 * backward

    monkeypatch.setattr(collectives, name, lambda x, *more: Off.apply(real(Off.apply(x), *more)))
    for found in errors(monkeypatch):
        assert found[name] > 0
        pair = {"copy", "reduce"}  # each calls the other in its backward
        assert {each for each, error in found.items() if error} <= (pair if name in pair else {name})


class Lent:
    """A pool whose answers are given."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.calls, self.stopped = answers, [], 0

    def __call__(self, size: int, check: Any, backend: str, timeout: float) -> Any:
        self.calls.append((size, check, backend, timeout))
        if isinstance(self.answers[backend], Exception):
            raise self.answers[backend]
        return self.answers[backend]

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize(("gpus", "backends"), [(0, ["gloo"]), (1, ["gloo"]), (2, ["gloo", "nccl"])])
def test_collectives_are_checked_over_gloo_and_over_nccl_on_two_gpus(gpus, backends, monkeypatch):
    right = [[("a", 0.0), ("b", 0.0)], [("a", 0.0), ("b", 0.0)]]
    pool = Lent({"gloo": right, "nccl": [[("a", 0.0), ("b", 2.0)], [("a", 0.5), ("b", 1.0)]]})
    asked: list[int] = []
    monkeypatch.setattr(doctor, "Pool", lambda most: asked.append(most) or pool)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = list(check_collectives())
    assert asked == [2]
    assert pool.calls == [(2, doctor._between_two, backend, 60) for backend in backends]
    assert pool.stopped == 1
    assert [(f.name, f.state) for f in found[:3]] == [
        ("two processes over gloo", "ok"), ("a over gloo", "ok"), ("b over gloo", "ok"),
    ]  # fmt: skip
    assert re.fullmatch(r"\d+\.\d s", found[0].detail)
    assert float(found[0].detail[:-2]) < 5
    assert found[1].detail == ""
    assert [(f.name, f.state, f.detail) for f in found[4:]] == [
        ("a over nccl", "FAILED", "off by 0.5"), ("b over nccl", "FAILED", "off by 2"),
    ][: 2 * (gpus > 1)]  # fmt: skip


def test_processes_that_fail_are_named_by_their_last_line_and_the_next_back_end_is_tried(monkeypatch):
    pool = Lent({"gloo": RankError("first\n  second\nlast one\n"), "nccl": [[("a", 0.0)], [("a", 0.0)]]})
    monkeypatch.setattr(doctor, "Pool", lambda most: pool)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    failed, *others = check_collectives()
    assert failed == Finding("two processes over gloo", "FAILED", "last one")
    assert [f.name for f in others] == ["two processes over nccl", "a over nccl"]
    assert pool.stopped == 1
    pool.answers["gloo"] = RuntimeError("other")
    with pytest.raises(RuntimeError, match="other"):
        list(check_collectives())
    assert pool.stopped == 2


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "port"), [([], 29500), (["--port", "7"], 7)])
@pytest.mark.parametrize("bad", [(), ("b",), ("a", "c")])
def test_the_command_prints_every_finding_and_names_those_that_failed(flags, port, bad, monkeypatch, capsys):
    def of(*names: str) -> list[Finding]:
        return [Finding(name, "FAILED" if name in bad else "skipped") for name in names]

    asked: list[int] = []
    monkeypatch.setattr(doctor, "versions", lambda: ["v1", "v2"])
    monkeypatch.setattr(doctor, "choices", lambda: ["c1"])
    monkeypatch.setattr(doctor, "check_launch", lambda port: asked.append(port) or of("a"))
    monkeypatch.setattr(doctor, "check_kernels", lambda: of("b"))
    monkeypatch.setattr(doctor, "check_collectives", lambda: of("c"))
    assert main(flags) == bool(bad)
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == ["v1", "v2", *map(str, of("a", "b", "c")), "c1"]
    assert last == (f"failed: {', '.join(bad)}" if bad else "all is well")
    assert asked == [port]
