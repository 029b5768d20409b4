"""Tensors without memory, and process groups without other processes.

Checked with torch 2.11 and 2.13: no difference.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (the import registers the backend)

NoValueError = DataDependentOutputException
"""Raised where an operator reads the value of a fake tensor. Its `func` is the operator."""


def is_fake(x: object) -> bool:
    """Return whether a tensor is fake: it has a shape, a dtype and a device, but no values."""
    return isinstance(x, FakeTensor)


def device_of(x: FakeTensor) -> torch.device:
    """Return the device that a fake tensor pretends to be on."""
    return x.fake_device


def fake_tensors(stands_for_gpu: bool = False) -> FakeTensorMode:
    """Return a context in which every new tensor is fake. Operators accept real tensors too.

    Args:
        stands_for_gpu: if True, `mpcore.kernels` calls its GPU kernels for fake tensors on the CPU. Fake tensors on
            "cuda" would raise in autograd if torch is built without CUDA.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.stands_for_gpu = stands_for_gpu  # type: ignore[attr-defined]  # read by `mpcore.kernels`
    return mode


def real_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors are real again, inside of `fake_tensors`."""
    return unset_fake_temporarily()


def start_fake_world(size: int, rank: int) -> None:
    """Start torch.distributed as one rank of a world whose other ranks don't exist. Collectives compute nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
