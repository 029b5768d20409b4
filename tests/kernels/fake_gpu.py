"""A GPU driver that compiles and launches nothing: Triton's real launch path runs on a machine without a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from mpcore.kernels import _dispatch, _triton

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_89": GPUTarget("cuda", 89, 32), "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32), "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip


class Launch(NamedTuple):
    name: str
    kernel: CompiledKernel
    grid: tuple[int, ...]
    arguments: dict[str, Any]


SHARED_MEMORY = {  # bytes a program may have
    "sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536
}  # fmt: skip


class _Utils:
    def __init__(self, target: str) -> None:
        self.target = target

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, most threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self.target], "multiprocessor_count": 132, "warpSize": 32}

    def unload_module(self, *args: Any) -> None:
        pass


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


class _Driver:
    launcher_cls = _Launcher

    def __init__(self, target: str, device: str) -> None:
        self.target, self.device, self.utils = target, device, _Utils(target)

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target]

    def get_current_device(self) -> str:
        return self.device  # keys Triton's kernel cache, so that targets do not share kernels

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def fake_gpu(target: str = "sm_90", *, record: bool = True, device: str = "") -> Iterator[list[Launch]]:
    """Make `target` the active GPU, and yield the list that each launch joins, in order, if they are recorded."""
    launches: list[Launch] = []
    driver = triton.runtime.driver
    previous, plain, launching = driver._active, CompiledKernel.launch_metadata, _dispatch.launching_on_cpu

    def append(kernel: CompiledKernel, grid: tuple[int, ...], stream: int, *args: Any) -> None:
        named = dict(zip(kernel.src.fn.arg_names, args, strict=True))
        launches.append(Launch(kernel.name, kernel, tuple(grid), named))

    driver.set_active(_Driver(target, device or f"fake {target}"))
    _dispatch.launching_on_cpu = True
    if record:
        CompiledKernel.launch_metadata = append
    _triton._readers.cache_clear()
    try:
        yield launches
    finally:
        driver._active, CompiledKernel.launch_metadata = previous, plain
        _dispatch.launching_on_cpu = launching
        _triton._readers.cache_clear()


class Call(NamedTuple):
    """What a launcher hands to `launch`."""

    kernel: str
    grid: tuple[int, ...]
    warps: int
    arguments: dict[str, Any]

    @property
    def numbers(self) -> dict[str, Any]:
        """All arguments but tensors."""
        return {name: x for name, x in self.arguments.items() if not name.endswith("_ptr")}

    @property
    def given(self) -> set[str]:
        """The names of the tensors, without those that are `None`."""
        return {name[:-4] for name, x in self.arguments.items() if name.endswith("_ptr") and x is not None}

    def at(self, name: str) -> int:
        """The address of a tensor."""
        return self.arguments[f"{name}_ptr"].data_ptr()


@contextlib.contextmanager
def calls(target: str = "sm_90", multiprocessors: int = 132) -> Iterator[list[Call]]:
    """As `fake_gpu`, but record what the launchers hand to `launch`, and compile nothing."""
    found: list[Call] = []

    def record(kernel: Any, grid: tuple[int, ...], *, num_warps: int, **arguments: Any) -> None:
        found.append(Call(kernel.__name__.strip("_"), grid, num_warps, arguments))

    replaced = {"launch": record, "multiprocessors": lambda device: multiprocessors}
    with fake_gpu(target, record=False), contextlib.ExitStack() as stack:
        for module in [m for name, m in sys.modules.items() if name.startswith("mpcore.kernels.")]:
            for name, other in replaced.items():
                if getattr(module, name, None) is getattr(_triton, name) and module is not _triton:
                    stack.enter_context(mock.patch.object(module, name, other))
        yield found
