"""Memory of the host that is taken quickly: in large pages."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 2**21  # bytes of a large page


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU, not filled, in pages of 2 MiB where the system has them.

    New memory costs the kernel a fault and a cleared page every 4 KiB, four times what copying into it takes; malloc
    leaves it at that unless told otherwise for the whole process.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has none
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
