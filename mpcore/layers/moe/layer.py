"""The mixture of experts: each token is computed by the few experts that its router chose, on the ranks that hold them.

Every rank of tp x cp x dp brings different tokens: sequence parallelism shards them over tp, and without it this layer
does. The experts are on other axes of the same ranks: ep shards the list of experts, etp shards each expert, and edp
holds replicas. Each token is therefore computed once for all sizes of tp and etp.

    tokens to experts over ep x etp -> experts (output partial over etp) -> back     (`mpcore.layers.moe.dispatch`)

Sources: Lepikhin et al. 2020, "GShard" (arXiv:2006.16668), section 3; Fedus et al. 2021 (arXiv:2101.03961); shared
experts: Dai et al. 2024, "DeepSeekMoE" (arXiv:2401.06066), equation 9; upcycling: Komatsuzaki et al. 2022
(arXiv:2212.05055).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from mpcore import collectives
from mpcore.layers.linear import wrong_last
from mpcore.layers.mlp import Activation, ParallelMLP
from mpcore.layers.module import (
    Init,
    LayerOptions,
    ParallelLayer,
    TensorOptions,
    TensorParallelOptions,
    input_error,
    select_options,
)
from mpcore.layers.moe.dispatch import DISPATCHES, AllGather, AllToAll
from mpcore.layers.moe.experts import Experts
from mpcore.layers.moe.router import Places, Router
from mpcore.mesh.axis import Axis, Mesh, check_axis
from mpcore.sharding.declarations import ModelTree, declarations, named_modules
from mpcore.sharding.declare import Sharding, cut

MIXED = ("tp", "ep", "etp")  # the axes of a mixture, as attributes


class Flight(NamedTuple):
    """A forward between two of its parts: its input, a `Sent` or `Returned`, and what the shared experts computed."""

    x: Tensor
    message: Any
    shared: Tensor | None


class ParallelMoE(ParallelLayer):
    """Mixture of experts: `shared(x) + sum over the K chosen experts e of weight_e(x) expert_e(x)`.

    Args:
        dim, hidden_dim: D, the model width, and F, the hidden width of each expert.
        num_experts, top_k: E, the number of experts, and K, the number of experts per token.
        activation: see `ParallelMLP`.
        shared_experts: the number of experts that every token uses in addition; 0: none. They are one MLP of their
            joint width.
        dispatch: how tokens reach experts on other ranks: "all_gather" or "all_to_all". None: all_to_all with a
            capacity, otherwise all_gather. all_to_all without a capacity sends less, but the host waits for the
            sizes of the messages, except in a `Run` or with `DispatchBounds`.
        ep: the axis over which the experts are sharded.
        etp: the axis over which each expert is sharded; None: tp.
        cp, data: the other axes over which tokens are sharded.
        expert_class: `Experts`, or a class with its arguments, such as `mpcore.experimental.BiasedExperts`.
        output_init: fills the down projections; None: use `init`, which also fills the router and gate_up.
        options: `LayerOptions`, and `RouterOptions` for the router.

    Raises:
        ValueError: if K is larger than E, ep does not divide E, F is smaller than etp, or a name is unknown.

    Example:
        >>> moe = mpcore.ParallelMoE(8, 16, num_experts=4, top_k=2, aux_loss="sequence")
        >>> y = moe(torch.randn(2, 5, 8), loss_scale=1 / 10)  # 10 tokens in the step: the factor of the main loss
        >>> y.shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self, dim: int, hidden_dim: int, num_experts: int, top_k: int, activation: Activation = "swiglu", *,
        shared_experts: int = 0, dispatch: str | None = None, ep: Axis = Axis(role="ep"), etp: Axis | None = None,
        cp: Axis = Axis(name="cp"), data: Axis = Axis(name="data"), expert_class: type[Experts] = Experts,
        output_init: Init | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**select_options(options, TensorParallelOptions))
        if dispatch not in (None, *DISPATCHES):
            raise ValueError(f"dispatch {dispatch!r} is none of {DISPATCHES} and None")
        if shared_experts < 0:
            raise ValueError(f"shared_experts {shared_experts} is negative")
        for axis in (ep, etp or self.tp, cp, data):
            check_axis(axis)
        self.dim = dim
        self.ep = ep
        self.etp: Axis = etp or replace(self.tp, name="etp", role="etp")
        self.cp = cp
        layer, like = select_options(options, LayerOptions), select_options(options, TensorOptions)
        init = layer.get("init")
        routing = {name: value for name, value in options.items() if name not in layer}
        self.router: Router = Router(
            dim, num_experts, top_k, tp=self.tp, cp=cp, data=data, init=init, **routing, **like
        )
        inits: dict[str, Any] = {"init": init, "output_init": output_init, "used_share": top_k / num_experts}
        self.experts: Experts = expert_class(
            num_experts, dim, hidden_dim, activation, ep=ep, etp=self.etp, **inits, **like
        )
        bounded = self.router.options.capacity_factor is not None
        self.dispatch = dispatch or ("all_to_all" if bounded else "all_gather")
        way = AllToAll if self.dispatch == "all_to_all" and ep.size > 1 else AllGather
        self.dispatcher: AllGather | AllToAll = way(ep, self.etp, num_experts, top_k)
        self.shared: ParallelMLP | None = None
        if shared_experts:
            width = shared_experts * hidden_dim
            self.shared = ParallelMLP(dim, width, activation, bias=False, output_init=output_init, **layer)

    def forward(
        self, x: Tensor, *, samples: Tensor | None = None, mask: Tensor | None = None, positions: Tensor | None = None,
        loss_scale: Tensor | float | None = None, experts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, T, D] -> [B, T, D] ([T, B, D] with `sequence_dim=0`); this rank's shard under sequence parallelism.

        All ranks of ep and etp must pass inputs of one shape; with a capacity, all ranks of cp too. Pad, and pass a
        mask.

        Args:
            samples: int64 [B], the global sample index of each row. Jitter needs it in training.
            mask: bool [B, T], False for padding, which is neither routed nor counted. T is this cp rank's full
                sequence, also under sequence parallelism.
            positions: int64 [T], the position of each token of this cp rank in the full sequence. With cp, a capacity
                and, in training, jitter need it.
            loss_scale: the factor that multiplies the main loss's sum over tokens: a number, or [B]. Balance losses
                need it in training: they are multiplied by the same factor, and backward adds their gradients.
            experts: int64 [B, T, K], the experts of each token in place of the router's choice, as `record_routing`
                returns them. The router's scores of these experts are their weights. T as in `mask`.

        Raises:
            ValueError: before any communication, if shapes don't fit each other, the mask is not bool, or `experts`
                are not int64.
        """
        return self.receive(self.compute(self.send(x, samples, mask, positions, loss_scale, experts)))

    def send(
        self, x: Tensor, samples: Tensor | None = None, mask: Tensor | None = None, positions: Tensor | None = None,
        loss_scale: Tensor | float | None = None, experts: Tensor | None = None,
    ) -> Flight:  # fmt: skip
        """Start to send tokens to their experts; see `forward`. Work before `compute` runs beside the messages."""
        if x.shape[-1] != self.dim:
            raise wrong_last(x, self.dim, "dim")
        if x.dim() != 3:
            raise input_error(f"x {tuple(x.shape)} is not [B, T, D]")
        if mask is not None and mask.dtype != torch.bool:
            raise input_error(f"the mask is of {mask.dtype}: give mask.bool(), True for tokens and False for padding")
        rows = x.shape[1 if self.sequence_dim == 0 else 0]
        if isinstance(loss_scale, Tensor) and loss_scale.shape not in ((), (1,), (rows,)):
            shape = tuple(loss_scale.shape)
            raise input_error(f"loss_scale has shape {shape}, the batch {rows} rows: give one number, or one for each")
        ordered = rearrange(x, "t b d -> b t d") if self.sequence_dim == 0 else x
        tokens, places = rearrange(ordered, "b t d -> (b t) d"), self._places(ordered, mask, positions, experts)
        if self.tp.size > 1 and not self.sequence_parallel:  # all ranks have the same tokens: each keeps a shard
            short = -len(tokens) % self.tp.size
            tokens = collectives.split(F.pad(tokens, (0, 0, 0, short)), self.tp, 0)
            here = slice(self.tp.rank * len(tokens), (self.tp.rank + 1) * len(tokens))
            sequence, position, real = (F.pad(part, (0, short))[here] for part in places[:3])
            given = None if places.experts is None else F.pad(places.experts, (0, 0, 0, short))[here]
            places = places._replace(sequence=sequence, position=position, real=real, experts=given)
        routing = self.router(tokens, places, samples, loss_scale)
        capacity = self.router.capacity(places.length)
        room = None if capacity is None else min(len(tokens), capacity * places.sequences)
        weights = routing.weights
        if routing.loss is not None:  # attached to the weights, not to y: torch.compile would return a wrong view of y
            weights = _WithLoss.apply(weights, routing.loss)
        sent = self.dispatcher.send(tokens, routing.experts, weights, room)  # the shared experts compute meanwhile
        return Flight(x, sent, None if self.shared is None else self.shared.hidden(x))

    def compute(self, flight: Flight) -> Flight:
        """Compute the experts, and start to send their outputs back."""
        returned = self.dispatcher.compute(flight.message, self.experts)
        return Flight(flight.x, returned, None if self.shared is None else self.shared.down(flight.shared))

    def receive(self, flight: Flight) -> Tensor:
        """Return what `forward` returns."""
        y, turned = self.dispatcher.receive(flight.message), self.sequence_dim == 0
        B, T, _ = flight.x.transpose(0, 1).shape if turned else flight.x.shape
        if self.tp.size > 1 and not self.sequence_parallel:
            y = collectives.gather(y, self.tp, 0)[: B * T]
        y = rearrange(y, "(b t) d -> t b d" if turned else "(b t) d -> b t d", b=B, t=T)
        return y if flight.shared is None else y + flight.shared

    def _places(
        self, x: Tensor, mask: Tensor | None, positions: Tensor | None, experts: Tensor | None = None
    ) -> Places:
        B, T, _ = x.shape
        start, whole = (self.tp.rank * T, self.tp.size * T) if self.sequence_parallel else (0, T)
        options = self.router.options
        needs = f"jitter {options.jitter}" if self.training and options.jitter else None
        needs = needs if options.capacity_factor is None else f"capacity_factor {options.capacity_factor}"
        if positions is None and self.cp.size > 1 and needs:
            raise input_error(
                f"{needs} on cp {self.cp.size} needs the tokens' places in the whole sequence: "
                f"positions=mpcore.layers.sequence_index(T, cp, context)"
            )
        if positions is None:
            positions = torch.arange(self.cp.rank * whole, (self.cp.rank + 1) * whole, device=x.device)
        if positions.shape != (whole,):
            raise input_error(f"positions has shape {tuple(positions.shape)}, but this rank's sequence {whole} tokens")
        if mask is None:
            mask = torch.ones(B, whole, dtype=torch.bool, device=x.device)
        if mask.shape != (B, whole):
            raise input_error(f"mask has shape {tuple(mask.shape)}, but this rank's sequences are {(B, whole)}")
        K, given = self.router.top_k, None
        if experts is not None:
            if experts.shape != (B, whole, K) or experts.dtype != torch.int64:
                was = f"{tuple(experts.shape)} of {experts.dtype}"
                raise input_error(f"experts are {was}, but this rank's sequences need {(B, whole, K)} of torch.int64")
            given = experts[:, start : start + T].reshape(-1, K)
        rows = torch.arange(B, device=x.device)[:, None].expand(B, T)
        position = positions[start : start + T].expand(B, T)
        real = mask[:, start : start + T].reshape(-1)
        return Places(rows.reshape(-1), position.reshape(-1), real, B, self.cp.size * whole, given)

    def extra_repr(self) -> str:
        """Return the dispatch and the sizes of the axes."""
        return f"dispatch={self.dispatch}, ep={self.ep.size}, etp={self.etp.size}"


class _WithLoss(Function):
    """Return the weights. Their backward also starts the backward of an already scaled loss."""

    @staticmethod
    def forward(ctx, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return gradient, ctx.like


def check_experts(model: nn.Module | ModelTree, mesh: Mesh) -> None:
    """Raise ValueError if a mixture's axes are not the mesh's: gradients would be summed over the wrong ranks."""
    for name, moe, (tp, ep, etp) in _mixtures(model):
        if tp.size * mesh.data.size != etp.size * ep.size * Sharding((), (cut(ep.size, ep, 0),)).data_axis(mesh).size:
            built = f"tp of size {tp.size}, ep of size {ep.size}, etp of size {etp.size}"
            there = ", ".join(f"{axis} {getattr(mesh, axis).size}" for axis in MIXED)
            raise ValueError(
                f"{name or 'the model'} is a {type(moe).__name__} built with {built}; the mesh has {there}: pass "
                f"tp=mesh.tp, ep=mesh.ep, etp=mesh.etp, or its experts' gradients are summed over other ranks than "
                f"bring tokens"
            )


def check_replicas(model: nn.Module | ModelTree) -> None:
    """Raise ValueError if trained experts have replicas over tp whose gradients are never summed."""
    for name, moe, (tp, ep, etp) in _mixtures(model):
        if tp.size > etp.size * ep.size:
            for leaf, parameter, sharding in declarations(moe):
                experts = any(shard.axis.key == ep.key for shard in sharding.shards)
                if experts and parameter.requires_grad and sharding.data is None and not sharding.partial:
                    raise ValueError(
                        f"{name}.{leaf} has replicas over tp ({tp.size} ranks, etp x ep {etp.size * ep.size}) whose "
                        f"gradients nothing sums: call shard_data_parallel(model, mesh) before, also with one data "
                        f"rank, or reduce_gradients(model, mesh)".lstrip(".")
                    )


def _mixtures(model: nn.Module | ModelTree) -> Iterator[tuple[str, nn.Module, list[Axis]]]:
    for name, module in named_modules(model):
        axes: list[Any] = [vars(module).get(axis) for axis in MIXED]
        if all(isinstance(axis, Axis) for axis in axes):
            yield name, module, axes
