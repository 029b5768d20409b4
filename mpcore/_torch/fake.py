"""Tensors without memory, and process groups without other processes. Read in torch 2.11 and 2.13, which agree."""

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
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (importing it makes the backend known)

NoValueError = DataDependentOutputException
"""Raised where an operator reads the value of a fake tensor. Its `func` is the operator."""


def is_fake(x: object) -> bool:
    """Tell whether a tensor is fake: it has a shape, a dtype and a device, and no values."""
    return isinstance(x, FakeTensor)


def device_of(x: FakeTensor) -> torch.device:
    """Return the device that a fake tensor pretends to be on."""
    return x.fake_device


def fake_tensors(stands_for_gpu: bool = False) -> FakeTensorMode:
    """Make every tensor in this context fake. Real tensors may be given to operators too.

    Args:
        stands_for_gpu: fake tensors on the CPU take the operators of a GPU: `mpcore.kernels` calls its kernels. Fake
            tensors on "cuda" would raise in autograd where torch is built without CUDA.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.stands_for_gpu = stands_for_gpu  # type: ignore[attr-defined]  # read by `mpcore.kernels`
    return mode


def real_tensors() -> AbstractContextManager[object]:
    """Make tensors in this context real again, inside of `fake_tensors`."""
    return unset_fake_temporarily()


def start_fake_world(size: int, rank: int) -> None:
    """Start torch.distributed as one rank of a world whose other ranks do not exist: collectives compute nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
