"""What the doctor says of each part of a machine, on machines that are written here."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import mpcore as mp
from mpcore.mesh.build import build_mesh
from mpcore.tools import doctor
from mpcore.tools.doctor import Finding, check_launch, versions


def test_versions_devices_and_back_ends_are_listed(monkeypatch):
    gpus = [SimpleNamespace(name=name, total_memory=gib * 2**30, major=9, minor=0) for name, gib in
            (("H100", 80), ("H100", 80), ("A100", 40))]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: {i, j} == {0, 1})
    lines = {line[:16].strip(): line[16:] for line in versions()}
    assert lines["torch"] == metadata.version("torch")
    assert [name for name in lines if name in doctor.PACKAGES] == list(doctor.PACKAGES)
    assert lines["gpu 0"] == "H100, 80 GiB, 9.0, reads the memory of [1]"
    assert lines["gpu 2"] == "A100, 40 GiB, 9.0"
    assert "gloo" in lines["back ends"]


def launch(port: int = 0) -> dict[str, Finding]:
    return {
        re.sub(r" \S+$", "", f.name) if f.name.startswith(("port", "host")) else f.name: f for f in check_launch(port)
    }


FAULTS: dict[str, list[tuple[Any, str, str]]] = {  # what is there, its state, what the finding names
    "open files": [(1023, "FAILED", "ulimit -n"), (1024, "ok", ""), (resource.RLIM_INFINITY, "ok", "")],
    "shared memory": [(2**26 - 1, "FAILED", "--shm-size"), (2**26, "ok", "64 MiB")],
    "other users": [([0, 65534, 7, 42], "ok", ""), ([0, 1234, 7], "warning", "1234")],
    "host name": [(OSError(5, "no answer"), "FAILED", "no answer; "), (OSError("gone"), "FAILED", "gone; "),
                  ("10.1.2.3", "ok", "10.1.2.3")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "there", "state", "part"), [(name, *row) for name in FAULTS for row in FAULTS[name]])
def test_each_part_of_a_machine_is_sound_or_names_its_fault(name, there, state, part, monkeypatch):
    stat, exists = os.stat, os.path.isdir
    if name == "open files":
        monkeypatch.setattr(resource, "getrlimit", lambda what: (there, 10**6))
    elif name == "shared memory":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=there))
        monkeypatch.setattr(os.path, "isdir", lambda path: False)
        assert name not in launch()
        monkeypatch.setattr(os.path, "isdir", lambda path: path == "/dev/shm")
    elif name == "other users":
        monkeypatch.setattr(os.path, "isdir", lambda path: path == "/proc/self" or exists(path))
        monkeypatch.setattr(os, "listdir", lambda path: ["self", *map(str, range(len(there)))])
        monkeypatch.setattr(os, "getuid", lambda: 7)
        monkeypatch.setattr(os, "stat", lambda path, **of: SimpleNamespace(st_uid=there[int(path[6:])])
                            if str(path).startswith("/proc/") else stat(path, **of))  # fmt: skip
    else:
        answer = {"side_effect": there} if isinstance(there, OSError) else {"return_value": there}
        monkeypatch.setattr(socket, "gethostbyname", mock.Mock(**answer))
    found = launch()[name]
    assert found.state == state
    assert part in found.detail
    assert (name != "host name") or ("/etc/hosts" in found.detail) == (state == "FAILED")


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


def errors(monkeypatch: Any) -> list[dict[str, float]]:
    monkeypatch.setattr(doctor, "mesh", lambda **sizes: build_mesh(**sizes, device_type="cpu"))
    return [dict(found) for found in mp.simulate(doctor._between_two, "gloo", ranks=2)]


NAMES = ["copy", "reduce", "split", "gather", "all_gather", "reduce_scatter", "all_to_all"]


def test_each_collective_and_its_backward_are_those_of_their_definitions(monkeypatch):
    assert errors(monkeypatch) == [dict.fromkeys(NAMES, 0.0)] * 2
