"""Run all ranks of an axis as threads of one process that meet at each collective, without torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpcore._torch.dispatch import OpOverload, TorchDispatchMode
from mpcore._torch.dispatch import collective_ops as _ops
from mpcore.mesh.axis import Axis

T = TypeVar("T")


class CommunicatesError(RuntimeError):
    """The model uses other groups or collectives than the layers that `parallelize` puts in."""


class UnequalError(ValueError):
    """The ranks call different collectives, or one rank ended before another."""


class _Group:
    """Replaces a process group: the threads meet here. Only one thread computes at a time."""

    group_name = "lockstep"

    def __init__(self, size: int) -> None:
        self.ranks, self.turn = size, threading.Lock()
        self.barrier, self.slots = threading.Barrier(size), [("", torch.empty(0))] * size

    def size(self) -> int:
        return self.ranks

    def exchange(self, rank: int, what: str, x: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order.

        Raises:
            UnequalError: if the ranks call different collectives.
        """
        self.slots[rank] = what, x
        self._meet()
        found = list(self.slots)
        self._meet()
        said = [f"{what} of {tuple(x.shape)}" for what, x in found]
        if len(set(said)) > 1:
            raise UnequalError(f"the ranks make different collectives: {', '.join(said)}")
        return [x for _, x in found]

    def _meet(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class _Collectives(TorchDispatchMode):
    """Compute a rank's collectives from the other threads' tensors, and refuse collectives of other groups."""

    def __init__(self, group: _Group, rank: int) -> None:
        super().__init__()
        self.group, self.rank = group, rank

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("_c10d_functional", "c10d"):
            return func(*args, **(kwargs or {}))
        if func is _ops.wait_tensor.default:
            return args[0]
        x, *others, name = args if isinstance(args[-1], str) else (*args, "")
        if name != self.group.group_name or func is _ops.all_to_all_single.default:
            raise CommunicatesError(f"the model calls {func} itself, which one process can't run")
        found = self.group.exchange(self.rank, func.overloadpacket.__name__, x)
        if func is _ops.all_gather_into_tensor.default:
            return torch.cat(found)
        if func is _ops.all_reduce.default and others[0] in ("max", "min"):
            stacked = torch.stack(found)
            return stacked.amax(0) if others[0] == "max" else stacked.amin(0)
        total = torch.stack(found).sum(0)
        return total if func is _ops.all_reduce.default else total.chunk(self.group.ranks)[self.rank].clone()


def without_collectives() -> TorchDispatchMode:
    """Return a context in which every collective raises `CommunicatesError`: no other rank would call it."""
    return _Collectives(_Group(1), 0)


def lockstep(size: int, work: Callable[[Axis], T]) -> list[T]:
    """Call `work(axis)` for each rank of an axis, and return the results in rank order. Tensors must be on the CPU.

    Args:
        size: the number of ranks.
        work: the function that each rank runs. It may use all-reduce, all-gather and reduce-scatter over `axis`.

    Raises:
        Exception: the exception of the lowest rank whose `work` raised.

    Example:
        >>> from mpcore.interop.parallelize.lockstep import lockstep
        >>> lockstep(3, lambda axis: mpcore.collectives.reduce(torch.tensor(axis.rank), axis).item())
        [3, 3, 3]
    """
    group: Any = _Group(size)
    results: list[Any] = [None] * size
    errors: dict[int, Exception] = {}

    def rank_work(rank: int) -> None:
        with group.turn:
            try:
                with _Collectives(group, rank):
                    results[rank] = work(Axis(size, rank, group, name="tp"))
                group.exchange(rank, "end", torch.empty(0))
            except threading.BrokenBarrierError:
                pass  # another rank raised
            except Exception as error:
                errors[rank] = error
                group.barrier.abort()

    threads = [threading.Thread(target=rank_work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results
