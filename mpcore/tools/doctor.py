"""`mpcore doctor`: check this machine, and print what to paste into a bug report."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcore import collectives
from mpcore.kernels import _choice, _dispatch, _self_test
from mpcore.mesh.axis import Axis
from mpcore.tools import parsers
from mpcore.tools.parsers import PORT
from mpcore.tools.verify.pool import Pool, RankError, mesh

NOBODY = 65534
PACKAGES = ("mpcore", "torch", "triton", "einops", "numpy", "transformers")
OK, FAILED, SKIPPED, WARNING = "ok", "FAILED", "skipped", "warning"


@dataclass(frozen=True)
class Finding:
    """The result of one check; `state` is "ok", "FAILED", "warning" or "skipped"."""

    name: str
    state: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8}{self.name:<34}{self.detail}".rstrip()


def versions() -> Iterator[str]:
    """List the versions, devices and back ends, for a bug report."""
    for name in PACKAGES:
        try:
            yield f"{name:<16}{metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name:<16}not installed"
    yield f"{'python':<16}{platform.python_version()} on {platform.platform()}"
    yield f"{'cpu':<16}{os.cpu_count()} cores"
    built = torch.version.cuda or torch.version.hip
    yield f"{'gpus':<16}{torch.cuda.device_count()}, torch is built for {built or 'the CPU alone'}"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        peers = [j for j in range(torch.cuda.device_count()) if j != i and torch.cuda.can_device_access_peer(i, j)]
        reaches = f", reads the memory of {peers}" if peers else ""
        yield f"{f'gpu {i}':<16}{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor}{reaches}"
    there = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    yield f"{'back ends':<16}{', '.join(there)}"


def check_launch(port: int = PORT) -> Iterator[Finding]:
    """Check the requirements for starting several processes."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            yield Finding(f"port {port}", OK, "free")
        except OSError as error:
            way = f"another run may have it: torchrun --master-port {port + 1}, or --standalone"
            yield Finding(f"port {port}", FAILED, f"{error.strerror}; {way}")
    host = socket.gethostname()
    try:
        yield Finding(f"host name {host}", OK, socket.gethostbyname(host))
    except OSError as error:
        way = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface"
        yield Finding(f"host name {host}", FAILED, f"{error.strerror or error}; {way}")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files >= 1024 or files == resource.RLIM_INFINITY
    way = "" if enough else ": ulimit -n 65536"
    yield Finding("open files", OK if enough else FAILED, f"{files} a process{way}")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        way = "" if free >= 2**26 else "; in a container: --shm-size 1g, or --ipc host"
        yield Finding("shared memory", FAILED if way else OK, f"{free / 2**20:.0f} MiB{way}")
    if os.path.isdir("/proc/self"):
        owners = set()
        for process in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # it has ended
                owners.add(os.stat(f"/proc/{process}").st_uid)
        others = sorted(uid for uid in owners - {os.getuid(), NOBODY} if uid >= 1000)  # below: the system's
        users = ", ".join(map(str, others[:9]))
        way = f"{users}: they can reach torch's store, which nothing protects; see SECURITY.md"
        yield Finding("other users", WARNING if others else OK, way if others else "none runs a process")


# --- kernels --------------------------------------------------------------------------------------------------------


def check_kernel(name: str, device: str) -> Finding:
    began = time.perf_counter()
    try:
        why = _self_test.fault(name, device)
    except ValueError as error:  # the kernel refuses this device, and says why
        return Finding(f"kernel {name}", SKIPPED, str(error))
    return Finding(f"kernel {name}", FAILED if why else OK, why or f"{time.perf_counter() - began:.1f} s")


def check_kernels() -> Iterator[Finding]:
    """Check every kernel where Triton can run it: on a GPU, or on the CPU in Triton's interpreter."""
    on_gpu = torch.cuda.is_available()
    if not _dispatch.HAS_TRITON:
        state = FAILED if on_gpu else SKIPPED
        yield Finding("kernels", state, "triton can't be imported, so plain torch runs: pip install 'triton>=3.6'")
    elif not on_gpu and not _dispatch.INTERPRETING:
        yield Finding("kernels", SKIPPED, "no GPU: plain torch runs; TRITON_INTERPRET=1 checks them on the CPU")
    else:
        for name in _self_test.TESTS:
            if on_gpu or name not in _self_test.IN_FP8:
                yield check_kernel(name, "cuda" if on_gpu else "cpu")
            else:
                yield Finding(f"kernel {name}", SKIPPED, "Triton's interpreter casts to FP8 wrongly")


def choices() -> Iterator[str]:
    """List which implementation of each operator runs on the first GPU; without a GPU plain torch runs."""
    if not torch.cuda.is_available():
        yield "implementations: plain torch, as there is no GPU"
        return
    yield "implementations on this GPU"
    yield from _choice.describe()


# --- collectives ----------------------------------------------------------------------------------------------------


def _between_two(backend: str) -> list[tuple[str, float]]:
    """Return, on each of two ranks, the error of each collective and of its backward."""
    axis, device = mesh(tp=2).tp, "cpu"
    if backend != "gloo":
        device = f"cuda:{dist.get_rank()}"
        torch.cuda.set_device(device)
        group: Any = dist.new_group([0, 1], backend=backend)
        axis = Axis(2, dist.get_rank(), group, name="tp")
    whole, terms = torch.arange(8.0).view(4, 2).to(device), [torch.full((4, 2), r + 1.0, device=device) for r in (0, 1)]
    rank, total = axis.rank, terms[0] + terms[1]
    half, mine = whole[2 * rank : 2 * rank + 2], terms[rank]
    cases: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor, Tensor]] = {
        # what is called, its input, what it returns, the incoming gradient, the gradient that it returns
        "copy": (lambda x: collectives.copy(x, axis), whole, whole, mine, total),
        "reduce": (lambda x: collectives.reduce(x, axis), mine, total, whole, whole),
        "split": (lambda x: collectives.split(x, axis, 0), whole, half, half, whole),
        "gather": (lambda x: collectives.gather(x, axis, 0), half, whole, whole, half),
        "all_gather": (lambda x: collectives.all_gather(x, axis, 0), half, whole, mine, total[:2]),
        "reduce_scatter": (lambda x: collectives.reduce_scatter(x, axis, 0), mine, total[:2], half, whole),
        "all_to_all": (
            lambda x: collectives.all_to_all(x, axis, 1, 0), half, whole[:, [rank]], whole[:, [rank]], half
        ),
    }  # fmt: skip
    found = []
    for name, (call, x, out, grad, back) in cases.items():
        x = x.clone().requires_grad_()
        y = call(x)
        (dx,) = torch.autograd.grad(y, x, grad.clone())
        found.append((name, max((y.detach() - out).abs().max().item(), (dx - back).abs().max().item())))
    return found


def check_collectives() -> Iterator[Finding]:
    """Check each collective between two processes: over gloo, and over nccl where there are two GPUs."""
    pool = Pool(most=2)
    try:
        for backend in ("gloo", *(["nccl"] if torch.cuda.device_count() > 1 else [])):
            began = time.perf_counter()
            try:
                first, second = pool(2, _between_two, backend, timeout=60)
            except RankError as error:
                yield Finding(f"two processes over {backend}", FAILED, str(error).strip().splitlines()[-1])
                continue
            yield Finding(f"two processes over {backend}", OK, f"{time.perf_counter() - began:.1f} s")
            for (name, error), (_, other) in zip(first, second, strict=True):
                wrong = max(error, other) > 0
                detail = f"off by {max(error, other):g}" if wrong else ""
                yield Finding(f"{name} over {backend}", FAILED if wrong else OK, detail)
    finally:
        pool.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if no check failed, otherwise 1."""
    port = parsers.doctor().parse_args(argv).port
    print("\n".join(versions()))
    bad = []
    for check in (lambda: check_launch(port), check_kernels, check_collectives):
        for finding in check():
            print(finding, flush=True)
            bad += [finding.name] * (finding.state == FAILED)
    print("\n".join(choices()))
    print(f"failed: {', '.join(bad)}" if bad else "all is well")
    return int(bool(bad))
