"""`mpcore doctor`: check this machine, and print what belongs into an issue.

It checks each kernel against its reference, each collective between two processes against its definition, and what
a launch needs: torchrun's port, the host's name, open files and shared memory.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcore import collectives
from mpcore.command_line import Parser
from mpcore.mesh.axis import Axis
from mpcore.verify.pool import Pool, RankError, mesh

PORT = 29500  # torchrun's
PACKAGES = ("mpcore", "torch", "triton", "einops", "numpy", "transformers")
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked.
        state: "ok", "FAILED" or "skipped".
        detail: numbers, or what is wrong and what to do.
    """

    name: str
    state: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8}{self.name:<34}{self.detail}".rstrip()


def versions() -> Iterator[str]:
    """List the versions, devices and back ends that an issue needs."""
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
    """Check what starting several processes needs."""
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


# --- kernels --------------------------------------------------------------------------------------------------------

Inputs = dict[str, Any]


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def _ids(end: int, *shape: int) -> Tensor:
    return torch.randint(end, shape, generator=torch.Generator().manual_seed(end))


def _angles() -> Inputs:
    angle = _draw(9, 8)
    return {"cos": angle.cos(), "sin": angle.sin()}


def _adamw(param: Tensor, grad: Tensor, impl: str) -> Tensor:
    kernel, new = import_module("mpcore.kernels.adamw"), param.detach().clone()
    now = kernel.adamw_now(torch.ones(1, device=param.device), 1e-2, (0.9, 0.95))[0]
    moments = torch.zeros_like(new), torch.zeros_like(new)
    kernel.adamw(new, grad, *moments, now, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, impl=impl)
    return new


def _fp8_product(a: Tensor, b: Tensor, impl: str) -> Tensor:
    quantize = import_module("mpcore.kernels.quantize_fp8").quantize_fp8_reference  # rounds alike for both
    (a, _), (b, _) = quantize(a), quantize(b, square=True)
    return import_module("mpcore.kernels.fp8_matmul").fp8_matmul(a, b, torch.float32, impl=impl)


def _experts(x: Tensor, weight: Tensor, chosen: Tensor, impl: str) -> Tensor:
    moe, grouped = (import_module(f"mpcore.kernels.{name}") for name in ("moe_permute", "grouped_linear"))
    row, counts = moe.moe_rows(chosen, len(weight), impl=impl)
    rows = grouped.grouped_linear(moe.moe_permute(x, row, row.numel(), impl=impl), weight, counts, impl=impl)
    return moe.moe_unpermute(rows, row, impl=impl)


KERNELS: dict[str, tuple[Callable[[], Inputs], Callable[..., Any] | None]] = {
    "adamw": (lambda: {"param": _draw(300), "grad": _draw(300)}, _adamw),
    "attention": (
        lambda: {"query": _draw(1, 37, 4, 16), "key": _draw(1, 37, 2, 16), "value": _draw(1, 37, 2, 16)}, None
    ),
    "cross_replica_hash": (lambda: {"x": _ids(1000, 300)}, None),
    "dropout_add": (lambda: {"x": _draw(2, 9, 33), "residual": _draw(2, 9, 33), "p": 0.3, "samples": _ids(9, 2)}, None),
    "fp8_matmul": (lambda: {"a": _draw(64, 256), "b": _draw(128, 256)}, _fp8_product),
    "geglu": (lambda: {"x": _draw(9, 66)}, None),
    "gelu": (lambda: {"x": _draw(9, 33)}, None),
    "layer_norm": (lambda: {"x": _draw(9, 33), "weight": _draw(33), "bias": _draw(33)}, None),
    "linear_cross_entropy": (
        lambda: {"x": _draw(9, 16), "weight": _draw(50, 16), "target": _ids(50, 9), "scale": torch.ones(9)}, None
    ),
    "moe_permute": (lambda: {"x": _draw(9, 16), "weight": _draw(4, 24, 16), "chosen": _ids(4, 9, 1)}, _experts),
    "relu_squared": (lambda: {"x": _draw(9, 33)}, None),
    "rms_norm": (lambda: {"x": _draw(9, 33), "weight": _draw(33)}, None),
    "rope": (lambda: {"q": _draw(1, 9, 2, 16), "k": _draw(1, 9, 2, 16), **_angles()}, None),
    "swiglu": (lambda: {"x": _draw(9, 66)}, None),
}  # fmt: skip
"""By module: the inputs, in float64, and what calls it; None: the function of that name. `adamw` stands for
`sum_of_squares`, and `moe_permute` for `grouped_linear`."""
IN_FP8 = "fp8_matmul"
CONSTANT = ("cos", "sin", "scale", "a", "b")  # inputs without a gradient


def run_kernel(name: str, impl: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return a kernel's outputs and gradients, in float64 on the CPU.

    Args:
        name: a key of `KERNELS`.
        impl: "triton" or "reference".
        dtype, device: of the inputs.
    """
    make, call = KERNELS[name]
    call = call or getattr(import_module(f"mpcore.kernels.{name}"), name)
    given: dict[str, Any] = make()
    for key, x in given.items():
        if isinstance(x, Tensor):
            real = x.is_floating_point()
            given[key] = x.to(device, dtype if real else x.dtype).requires_grad_(real and key not in CONSTANT)
    outs = call(**given, impl=impl)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out is not None]
    if any(out.requires_grad for out in outs):
        leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
        weights = [torch.arange(1, out.numel() + 1, device=device).view(out.shape) / out.numel() for out in outs]
        outs += torch.autograd.grad(outs, leaves, [w.to(out.dtype) for w, out in zip(weights, outs, strict=True)])
    return [out.detach().double().cpu() for out in outs]


def check_kernel(name: str, device: str) -> Finding:
    """Compare a kernel in float32 with its reference: its error may be twice the reference's, or four roundings."""
    began = time.perf_counter()
    try:
        exact = run_kernel(name, "reference", torch.float64, device)
        plain = run_kernel(name, "reference", torch.float32, device)
        found = run_kernel(name, "triton", torch.float32, device)
    except ValueError as error:  # the kernel refuses this device, and says why
        return Finding(f"kernel {name}", SKIPPED, str(error))
    except Exception as error:  # whatever a compiler or a driver raises is the finding
        return Finding(f"kernel {name}", FAILED, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    for i, (truth, reference, kernel) in enumerate(zip(exact, plain, found, strict=True)):
        rounding = torch.finfo(torch.float32).eps * truth.abs().max().item()
        bound = max(2 * (reference - truth).abs().max().item(), 4 * rounding)
        error = (kernel - truth).abs().max().item()
        if not error <= bound:
            return Finding(f"kernel {name}", FAILED, f"result {i} is off by {error:.2g}, more than {bound:.2g}")
    return Finding(f"kernel {name}", OK, f"{time.perf_counter() - began:.1f} s")


def check_kernels() -> Iterator[Finding]:
    """Check every kernel where Triton can run it: on a GPU, or on the CPU in Triton's interpreter."""
    dispatch: Any = import_module("mpcore.kernels._dispatch")
    on_gpu = torch.cuda.is_available()
    if not dispatch.HAS_TRITON:
        state = FAILED if on_gpu else SKIPPED
        yield Finding("kernels", state, "triton can't be imported, so plain torch runs: pip install 'triton>=3.6'")
    elif not on_gpu and not dispatch.INTERPRETING:
        yield Finding("kernels", SKIPPED, "no GPU: plain torch runs; TRITON_INTERPRET=1 checks them on the CPU")
    else:
        yield from (check_kernel(name, "cuda" if on_gpu else "cpu") for name in KERNELS if on_gpu or name != IN_FP8)
        if not on_gpu:
            yield Finding(f"kernel {IN_FP8}", SKIPPED, "Triton's interpreter casts to FP8 wrongly")


# --- collectives ----------------------------------------------------------------------------------------------------


def _between_two(backend: str) -> list[tuple[str, float]]:
    """On each of two ranks: the error of each collective and of its backward."""
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
    """Run the command.

    Returns:
        0 if no check failed, otherwise 1.
    """
    parser = Parser(prog="mpcore doctor", description=__doc__, examples=["mpcore doctor"])
    parser.add_argument("--port", type=int, default=PORT, help=f"the port that a launch meets at ({PORT})")
    port = parser.parse_args(argv).port
    print("\n".join(versions()))
    bad = []
    for check in (lambda: check_launch(port), check_kernels, check_collectives):
        for finding in check():
            print(finding, flush=True)
            bad += [finding.name] * (finding.state == FAILED)
    print(f"failed: {', '.join(bad)}" if bad else "all is well")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
