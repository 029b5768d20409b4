"""DiLoCo and Local SGD for a training loop of your own: an optimizer that merges workers every so many steps.

    optimizer = DiLoCo(AdamW(model), model, mesh, every=100)
    for step in range(steps):
        ...  # forward, backward, reduce_gradients: of this worker alone
        optimizer.step()
        optimizer.zero_grad()
        optimizer.merge(step + 1)

Sources: Stich 2018, arXiv:1805.09767 (Local SGD); Douillard et al. 2023, arXiv:2311.08105, algorithm 1 (DiLoCo);
Douillard et al. 2025, arXiv:2501.18512, section 2.2 (fragments, in strides).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpcore.collectives import all_reduce, all_to_all_rows, start_all_gather, wait
from mpcore.gradients.norm import norm_of
from mpcore.gradients.reduce import buckets
from mpcore.layers.module import as_module_list
from mpcore.mesh.agreement import check_same, raising_together
from mpcore.mesh.axis import Mesh
from mpcore.sharding.cross_replica_hash import cross_replica_hash
from mpcore.sharding.declarations import owners, persistent_buffers
from mpcore.sharding.local import local_tensor, reshard

OUTER_SLOTS = _ANCHOR, _MOMENTUM = "outer_anchor", "outer_momentum"
_BUCKET = 2**25  # elements a message, so that a merge needs little memory beside what it merges


class Merge(NamedTuple):
    """The result of a merge.

    Attributes:
        step: the number of steps done.
        fragment: the index of the merged part of the parameters.
        norm: the norm of the mean over workers of the parameters' change since the last merge.
        norms: the norm of each worker's change.
    """

    step: int
    fragment: int
    norm: float
    norms: tuple[float, ...]

    @property
    def agreement(self) -> float:
        """The mean inner product of two workers' changes, divided by their mean square. 1: all equal; 0: orthogonal."""
        squares, size = sum(norm**2 for norm in self.norms), len(self.norms)
        return 1.0 if size == 1 or squares == 0 else (size**2 * self.norm**2 - squares) / ((size - 1) * squares)


def check_options(every: int, lr: float, momentum: float, fragments: int) -> None:
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every {every!r} is not at least one step")
    if not isinstance(fragments, int) or not 1 <= fragments <= every:
        raise ValueError(f"fragments {fragments!r} is not from 1 to the {every} steps between merges")
    if not 0 < lr < math.inf or not 0 <= momentum < 1:
        raise ValueError(f"the outer lr {lr} is not above 0, or the momentum {momentum} not from 0 to below 1")


class DiLoCo(torch.optim.Optimizer):
    """Wrap an optimizer so that workers merge their parameters every `every` steps (DiLoCo).

    The merge is an outer step of SGD with Nesterov momentum.

    The outer gradient is the mean over workers of each parameter's change since the last merge. With `lr=1` and
    `momentum=0`, a merge averages the parameters (Local SGD, federated averaging). The inner optimizer's state is not
    merged. The outer step keeps a copy of the parameters and a momentum in float32 (float64 for float64), sharded like
    the parameters. A merge also averages untrained values that differ between workers: router biases and
    floating-point buffers.

    Args:
        optimizer: the inner optimizer, created after the model is sharded. Both share `param_groups`.
        model: the model, or this rank's pipeline stage; the same parameters on all workers.
        mesh: the mesh from `build_mesh(worlds=...)`. One worker merges with itself (with momentum 0, this is the
            Lookahead optimizer).
        every: the number of steps between two merges of a parameter.
        lr, momentum, nesterov: options of the outer step, as in `torch.optim.SGD`.
        fragments: the number of parts of the model, merged in turn, `every / fragments` steps apart, to send less at
            once. Block i is in part i modulo `fragments`; all other parameters are in part 0.
        blocks: required with several fragments: the blocks in order. For a pipeline stage,
            `{number in the full model: block}`.

    Raises:
        ValueError: on every rank, if an argument is out of range, or workers pass different arguments or start from
            different parameters.

    Note:
        - Save checkpoints after `merge`, each worker to its own folder. `mpcore.checkpoint` treats this object as one
          optimizer, and can load a checkpoint of only the inner optimizer. Call `begin` after a load.
        - With `offload_parameters`, call `begin` before it, and `merge` inside its `here()`.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> optimizer = mpcore.AdamW(model)
        >>> mesh = mpcore.build_mesh(worlds=1)  # each worker has a mesh of its own
        >>> outer = DiLoCo(optimizer, model, mesh, every=100)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        mesh: Mesh,
        every: int = 100,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int = 1,
        blocks: Iterable[nn.Module] | Mapping[int, nn.Module] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.model = model
        self.mesh = mesh
        self.every = every
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.fragments = fragments
        self.outer: dict[Tensor, dict[str, Tensor]] = {}
        numbered: Any = blocks.items() if isinstance(blocks, Mapping) else enumerate(as_module_list(blocks or ()))
        self.block_of: dict[nn.Module, int] = {module: i for i, block in numbered for module in block.modules()}
        with raising_together():
            check_options(every, lr, momentum, fragments)
            self._find_parameters()
            if fragments > 1 and blocks is None:
                raise ValueError(f"fragments {fragments} are of blocks, and none are given: blocks=model.blocks")
        options = {"every": every, "lr": lr, "momentum": momentum, "nesterov": nesterov, "fragments": fragments}
        check_same("local updates", options)
        self._compare({name: parameter for parameter, name in self.names.items()})

    # --- as an optimizer ----------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the inner optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:  # type: ignore[override]
        """The state of the inner optimizer and of the outer step, by parameter."""
        return _State(self.optimizer.state, self.outer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)  # hooks and defaults are the inner one's

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Step the inner optimizer. Call `merge` afterwards, also if you skip the step."""
        self._begin()
        return self.optimizer.step(closure, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer, of parameters that the model may have got since.

        Raises:
            ValueError: if one of them is none of the model's. Nothing is added then.
        """
        self.optimizer.add_param_group(param_group)
        try:
            self._find_parameters()
        except ValueError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return `{"inner": .., "outer": ..}`: the state dicts of the inner optimizer and of the outer step."""
        self._begin()
        outer = {place: dict(self.outer[p]) for place, p in enumerate(self._grouped()) if p in self.outer}
        return {"inner": self.optimizer.state_dict(), "outer": outer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict["inner"])
        places = list(self._grouped())
        self.outer = {
            places[place]: {slot: x.detach().to(places[place].device, copy=True) for slot, x in slots.items()}
            for place, slots in state_dict["outer"].items()
        }

    # --- merges -------------------------------------------------------------------------------------------------------

    def merges_until(self, step: int) -> int:
        """Return the number of merges in the first `step` steps. Workers must resume after equally many merges."""
        return sum((step - first) // self.every + 1 for first in self._first_merges() if step >= first)

    def due(self, step: int) -> int | None:
        """Return the fragment to merge after `step` steps, or None if no merge is due."""
        due = [i for i, first in enumerate(self._first_merges()) if step >= first and (step - first) % self.every == 0]
        return due[0] if due else None

    def begin(self) -> None:
        """Check that all workers start from the same merged values. All ranks of all workers must call it.

        Call it after a load. For values that the checkpoint lacks, it uses the current parameters.

        Raises:
            ValueError: on every rank, if workers start from different merges.
        """
        self._begin()
        slots = {_ANCHOR: "", **({_MOMENTUM: "the outer momentum of "} if self.momentum else {})}
        held = [(f"{of}{self.names[p]}", self.outer[p][slot]) for p in self._parameters() for slot, of in slots.items()]
        self._compare({f"{name} after the last merge": x for name, x in held})

    @torch.no_grad()
    def merge(self, step: int) -> Merge | None:
        """Merge the fragment that is due: call it after every step, on all ranks of all workers.

        Args:
            step: the number of steps since training began, including skipped ones. It decides which fragment is due.

        Returns:
            The `Merge`, the same on all ranks. None, without communication, if no merge was due.

        Raises:
            ValueError: on every rank, before anything changes, if a worker's parameter change is not finite, or workers
                have different values from the last merge.
        """
        fragment = self.due(step)
        if fragment is None:
            return None
        reshard(self.model)
        self._begin()
        mine = [p for p in self._parameters() if self._fragment(self.owner[p]) == fragment]
        moved = {p: self._moved(p) for p in mine}
        self._compare({f"{self.names[p]} after the last merge": self.outer[p][_ANCHOR] for p in mine}, moved)
        norms = self._gather(norm_of(self.model, self.mesh, moved.get))
        self._average([*moved.values(), *self._differing(fragment)])
        norm = float(norm_of(self.model, self.mesh, moved.get))
        for p, gradient in moved.items():
            self._outer_step(p, gradient)
        return Merge(step, fragment, norm, tuple(norms.tolist()))

    def _find_parameters(self) -> None:
        reshard(self.model)
        held = list(owners(self.model))
        self.names: dict[Tensor, str] = {parameter: name for name, _, _, parameter in held}
        self.owner: dict[Tensor, nn.Module] = {parameter: module for _, module, _, parameter in held}
        for p in self._parameters():
            if p not in self.names:
                raise ValueError(f"the optimizer's parameter of shape {tuple(p.shape)} is none of the model's")

    def _first_merges(self) -> list[int]:
        return [(i + 1) * self.every // self.fragments for i in range(self.fragments)]

    def _fragment(self, owner: nn.Module) -> int:
        return self.block_of.get(owner, 0) % self.fragments

    def _parameters(self) -> Iterator[Tensor]:
        return (p for p in self._grouped() if p.requires_grad)

    def _grouped(self) -> Iterator[Tensor]:
        return itertools.chain(*(group["params"] for group in self.param_groups))

    def _differing(self, fragment: int) -> list[Tensor]:
        """Return the untrained tensors that differ between workers. Equal ones keep their bits."""
        found = [p for p in self.names if not p.requires_grad and self._fragment(self.owner[p]) == fragment]
        found += [buffer for _, at, _, buffer in persistent_buffers(self.model) if self._fragment(at) == fragment]
        found = [x.detach() for x in found if x.is_floating_point()]
        return [x for x, row in zip(found, self._hashes(found), strict=True) if len(set(row)) > 1]

    @torch.no_grad()
    def _begin(self) -> None:
        """Take parameters that have no anchor, at first and where a checkpoint had none, as they are."""
        for p in self._parameters():
            state = self.outer.setdefault(p, {})
            if _ANCHOR not in state:
                state[_ANCHOR] = torch.empty_like(p.detach(), dtype=torch.promote_types(p.dtype, torch.float32))
                local_tensor(state[_ANCHOR]).copy_(self._now(p))
            if self.momentum and _MOMENTUM not in state:
                state[_MOMENTUM] = torch.zeros_like(state[_ANCHOR])

    def _now(self, p: Tensor) -> Tensor:
        """The local tensor of a parameter as the inner optimizer has it: its master, if any, perhaps on the host."""
        return local_tensor(self.optimizer.state.get(p, {}).get("master", p).detach())

    def _moved(self, p: Tensor) -> Tensor:
        """Return a parameter's change since the last merge, computed from the merged value rounded to its dtype."""
        moved, now = self.outer[p][_ANCHOR].clone(), self._now(p)
        anchor = local_tensor(moved)
        anchor.copy_(anchor.to(now.dtype).to(anchor.dtype) - now.to(anchor.device, anchor.dtype))
        return moved

    def _outer_step(self, p: Tensor, gradient: Tensor) -> None:
        state = self.outer[p]
        if self.momentum:
            momentum = state[_MOMENTUM].mul_(self.momentum).add_(gradient)
            gradient = gradient.add_(momentum, alpha=self.momentum) if self.nesterov else momentum
        state[_ANCHOR].sub_(gradient, alpha=self.lr)
        for held in (self._now(p), local_tensor(p.detach())):
            held.copy_(local_tensor(state[_ANCHOR]))

    # --- messages between workers -------------------------------------------------------------------------------------

    def _gather(self, value: Tensor) -> Tensor:
        """Gather every worker's tensor as (workers, *shape) on the host."""
        rows = torch.zeros(self.mesh.worlds.size, *value.shape, dtype=value.dtype, device=value.device)
        rows[self.mesh.worlds.rank] = value
        return all_reduce(rows, self.mesh.worlds).cpu()

    def _average(self, tensors: list[Tensor]) -> None:
        """Average each tensor over workers, each element in one order: replicas on several ranks keep the same bits."""
        axis, size = self.mesh.worlds, self.mesh.worlds.size
        alike = itertools.groupby(map(local_tensor, tensors), lambda x: x.dtype)
        for bucket in itertools.chain.from_iterable(buckets(group, Tensor.numel, _BUCKET) for _, group in alike):
            flat = torch.cat([x.reshape(-1) for x in bucket])
            length, wide = flat.numel(), torch.promote_types(flat.dtype, torch.float32)
            flat = torch.nn.functional.pad(flat, (0, -length % size)).view(size, -1)
            total = torch.zeros_like(flat[0], dtype=wide)
            for row in all_to_all_rows(flat, axis):
                total += row
            mean = (total / size).to(flat.dtype)
            mean = wait(start_all_gather(mean, axis)) if size > 1 else mean
            for x, part in zip(bucket, mean[:length].split([x.numel() for x in bucket]), strict=True):
                x.copy_(part.view_as(x))

    def _hashes(self, tensors: list[Tensor]) -> list[list[int]]:
        """Return every worker's hash of each tensor."""
        if not tensors:
            return []
        hashes = torch.stack([cross_replica_hash(local_tensor(x).detach()) for x in tensors])
        return self._gather(hashes.to(self.mesh.device)).T.tolist()

    def _compare(self, tensors: dict[str, Tensor], moved: dict[Tensor, Tensor] | None = None) -> None:
        """Raise on all ranks if a tensor differs between workers, or a change is not finite."""
        workers = self.mesh.worlds
        with raising_together():
            if moved is None:
                shapes = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
                check_same("model of each worker", shapes, workers)
            for name, row in zip(tensors, self._hashes(list(tensors.values())), strict=True):
                odd = [worker for worker, value in enumerate(row) if value != row[0]]
                if odd:
                    raise ValueError(
                        f"{name} differs between workers 0 and {odd[0]} of {len(row)}: begin all with one seed or one "
                        f"checkpoint"
                    )
            finite = [local_tensor(x).isfinite().all() for x in (moved or {}).values()]
            for p, good in zip(moved or {}, torch.stack(finite).tolist() if finite else [], strict=True):
                if not good:
                    where = f"worker {workers.rank} of {workers.size}"
                    raise ValueError(f"{self.names[p]} of {where} is not finite: nothing was merged")


class _State(MutableMapping[Any, Any]):
    """The state of the inner optimizer and of the outer step as one; the outer slots have names of their own."""

    def __init__(self, inner: MutableMapping[Any, Any], outer: dict[Tensor, dict[str, Tensor]]) -> None:
        self.inner, self.outer = inner, outer

    def __getitem__(self, p: Tensor) -> dict[str, Any]:
        if p not in self.inner and p not in self.outer:
            raise KeyError(p)
        return {**self.inner.get(p, {}), **self.outer.get(p, {})}

    def __setitem__(self, p: Tensor, slots: dict[str, Any]) -> None:
        ours = {name: value for name, value in slots.items() if name in OUTER_SLOTS}
        self.outer.pop(p, None)
        if ours:
            self.outer[p] = ours
        self.inner[p] = {name: value for name, value in slots.items() if name not in ours}

    def __delitem__(self, p: Tensor) -> None:
        self.outer.pop(p, None)
        self.inner.pop(p, None)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(dict.fromkeys([*self.inner, *self.outer]))

    def __len__(self) -> int:
        return len(list(iter(self)))
