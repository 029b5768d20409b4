"""Compare the gradients of replicated parameters in a run's first step: different ones would let replicas drift."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mpcore.collectives import all_reduce
from mpcore.gradients.accumulate import gradient_of
from mpcore.layers.module import ParallelLayer
from mpcore.layers.norm import LayerNorm, RMSNorm
from mpcore.mesh.agreement import gather_objects, raise_together
from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import ModelTree
from mpcore.sharding.local import local_tensor

# A difference is an error if it exceeds OWN times the gradient's norm, and LARGEST times the largest norm (LARGEST_FULL
# times in float32). Rounding stays below, also in a gradient that is 0 but for rounding, as that of a bias of keys.
OWN, LARGEST, LARGEST_FULL = 1e-2, 1e-3, 1e-6
PIECE = 2**20


@torch.no_grad()
def check_replicas(tree: ModelTree, mesh: Mesh, half: bool, states: Sequence[Tensor], cause: str = "") -> None:
    """After all sums over ranks, raise ValueError on every rank if replicas on tp would get different updates.

    `states` are torch's random states before the step's forward and after its backward.
    """
    tp, error, names, sketches = mesh.tp, None, [], []
    for name, parameter, sharding in tree.declared:
        if parameter.requires_grad and any(axis.key == tp.key for axis in sharding.replica_axes(mesh)):
            names.append(name)
            half = half or parameter.dtype.itemsize < 4
            sketches.append(sketch(gradient_of(parameter), mesh.device))
    if names and tp.size > 1:
        total, norm = torch.stack(sketches).unbind(1)
        most, least, norm = all_reduce(torch.stack([total, -total, norm]), tp, "max")
        off = most + least
        wrong = (off > OWN * norm) & (off > (LARGEST if half else LARGEST_FULL) * norm.max())
        if bool(wrong.any()):
            worst = int(torch.where(wrong, off / norm, 0).argmax())
            others = [names[i] for i in wrong.nonzero().flatten().tolist() if i != worst]
            norm_of = norms_of_shards(tree.modules).get(names[worst].rpartition(".")[0], "")
            why = _cause(names[worst], others, norm_of, states, mesh)  # a collective: `cause` may be one rank's
            error = ValueError(
                f"{names[worst]} is replicated, but the ranks of tp have different gradients of it (by "
                f"{float(off[worst] / norm[worst]):.1%}{f'; and of {first_names(others, 3)}' if others else ''}), so "
                f"the replicas would drift apart: {cause or why}"
            )
    raise_together(error, mesh.world)


def _cause(name: str, others: Sequence[str], norm: str, states: Sequence[Tensor], mesh: Mesh) -> str:
    """Return the likely cause in this rank's tp group; `norm` is what the parameter's module should be, or ""."""
    mine = [state.numpy().tobytes() for state in states]
    before, after = map(set, zip(*gather_objects(mine, mesh.tp.group), strict=True))
    if len(before) == 1 and len(after) > 1:
        return (
            "the ranks drew unequal numbers of random values in the step, as nn.Dropout does with uneven shards. "
            "Use mpcore.Dropout"
        )
    if before != after and len(before) > 1:
        return (
            "the random states differ within the tp group, and the step drew random numbers, as nn.Dropout does. "
            "Use mpcore.Dropout, or call torch.manual_seed(mesh.data.rank) after prepare"
        )
    meets = (
        f"its input is a shard of the sequence, make it {norm}"
        if norm
        else f"it meets only this rank's heads, features or tokens, call mpcore.add_partial(module, "
        f"{name.rpartition('.')[2]!r}, mesh.tp), which sums its gradient"
    )
    why = (
        f"if {meets}; otherwise the ranks of tp compute different things with it or behind it: run mpcore "
        f"verify, which names the first module that is off"
    )
    more = ". All of these may lack one sum in backward, in what reads them last: add_partial would hide it"
    return why + more if others else why


def norms_of_shards(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """Return what to replace each norm by that isn't sequence parallel, if other layers of the model are."""
    modules = list(modules)
    if not any(isinstance(module, ParallelLayer) and module.sequence_parallel for _, module in modules):
        return {}
    found = {}
    for name, module in modules:
        norm = isinstance(module, nn.LayerNorm | nn.RMSNorm | LayerNorm | RMSNorm)
        if norm and not getattr(module, "sequence_parallel", False):
            kind = "LayerNorm" if isinstance(module, nn.LayerNorm | LayerNorm) else "RMSNorm"
            found[name] = f"mp.{kind}(.., tp=mesh.tp, sequence_parallel=True)"
    return found


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first names, such as "a, b and 4 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def sketch(grad: Tensor | None, device: torch.device) -> Tensor:
    """Return the sum of a gradient's elements, each with its own weight, and the norm: [2] in float64; 0 for None."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    pieces = () if grad is None else local_tensor(grad).reshape(-1).split(PIECE)
    for piece in pieces:  # a copy in float64 of all of a large gradient could run out of memory
        x = piece.double()
        weights = torch.arange(len(x), dtype=torch.float64, device=x.device).cos()
        total += torch.stack([(x * weights).sum(), x.square().sum()]).to(device)
    return torch.stack([total[0], total[1].sqrt()])
