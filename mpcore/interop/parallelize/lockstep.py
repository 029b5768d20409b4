"""Run a copy of a model as every rank of a mesh, in this process (`mpcore.tools.simulation`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mpcore._torch.dispatch import OpOverload, TorchDispatchMode
from mpcore.mesh.axis import Axis, Mesh
from mpcore.tools.simulation.ranks import DeadlockError, simulate
from mpcore.tools.simulation.turns import RankError

T = TypeVar("T")


class CommunicatesError(RuntimeError):
    """The model uses other groups or collectives than the layers that `parallelize` puts in."""


class UnequalError(ValueError):
    """The ranks call different collectives, or one rank ended before another."""


class _NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d"):
            raise CommunicatesError(f"the model calls {func} itself, which one process can't run")
        return func(*args, **(kwargs or {}))


def without_collectives() -> TorchDispatchMode:
    """Return a context in which every collective raises `CommunicatesError`: no other rank would call it."""
    return _NoCollectives()


def lockstep_mesh(work: Callable[[Mesh], T], **sizes: int) -> list[T]:
    """Call `work(mesh)` for each rank of a mesh, and return the results in rank order. Tensors must be on the CPU."""
    try:
        etp = {"etp": sizes.pop("etp")} if "etp" in sizes else None
        return simulate(work, **sizes, mesh=etp)
    except DeadlockError as error:
        raise UnequalError(str(error)) from error
    except RankError as error:
        raise error.__cause__ or error from None


def lockstep(size: int, work: Callable[[Axis], T]) -> list[T]:
    """Call `work(axis)` for each rank of an axis, as `lockstep_mesh` does for a mesh.

    Example:
        >>> from mpcore.interop.parallelize.lockstep import lockstep
        >>> lockstep(3, lambda axis: mpcore.collectives.reduce(torch.tensor(axis.rank), axis).item())
        [3, 3, 3]
    """
    return lockstep_mesh(lambda mesh: work(mesh.tp), tp=size)
