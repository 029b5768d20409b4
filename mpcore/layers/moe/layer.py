"""The mixture of experts: each token goes through the few experts that its router chose, on whichever rank they lie.

Every rank of tp x cp x dp brings tokens that no other has: with sequence parallel they are sharded over tp already,
without it they are sharded here. Experts lie on other axes of the same ranks: ep shards the list of experts, etp each
expert, and edp holds replicas. So each token is computed once, whatever the sizes of tp and etp.

    gather over etp -> to experts over ep -> experts, a sum pending over etp -> back over ep -> reduce-scatter over etp

Two ways over ep. "all_gather" brings every token to every rank and sums the results: the host reads nothing from the
device, but a rank has rows for the worst case. "all_to_all" sends each choice to its expert alone. Without a capacity
the host must know how many rows to send, and waits for the device once in forward (never in backward).

Sources: Lepikhin et al. 2020, "GShard" (arXiv:2006.16668), section 3; Fedus et al. 2021 (arXiv:2101.03961); shared
experts: Dai et al. 2024, "DeepSeekMoE" (arXiv:2401.06066), equation 9; upcycling: Komatsuzaki et al. 2022
(arXiv:2212.05055).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from mpcore import collectives
from mpcore._torch.fake import is_fake
from mpcore.collectives import all_gather, all_to_all_rows, reduce_scatter
from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_unpermute
from mpcore.layers.linear import check_last
from mpcore.layers.mlp import ParallelMLP
from mpcore.layers.module import Init, LayerOptions, ParallelLayer, TensorOptions, TensorParallelOptions, pick
from mpcore.layers.moe.experts import Experts
from mpcore.layers.moe.router import Places, Router, Routing
from mpcore.mesh.axis import Axis, Mesh, check_axis
from mpcore.sharding.declarations import ModelTree, declarations, named_modules
from mpcore.sharding.declare import Sharding, cut

DISPATCHES = ("all_gather", "all_to_all")


class ParallelMoE(ParallelLayer):
    """`shared(x) + sum over the K chosen experts e of weight_e(x) expert_e(x)`.

    Args:
        dim, hidden_dim: D and F, the width of each expert.
        num_experts, top_k: E and K.
        activation: as of `ParallelMLP`.
        shared_experts: how many experts' width every token goes through besides; 0: none.
        dispatch: "all_gather" or "all_to_all"; None: all_to_all where a capacity bounds it, else all_gather, neither of
            which waits for the device.
        ep, etp: the axes of the experts; etp None: as tp, the axis of the layers around this one.
        cp, data: the other axes that tokens are sharded over.
        output_init: fills the weights of down; None: as `init`, which fills those of router and gate_up.
        options: `LayerOptions`, and `RouterOptions` for the router.

    Raises:
        ValueError: if K is more than E, ep doesn't divide E, F is smaller than etp, or a name is unknown.

    Note:
        - Twelve parameters: four sizes, three choices, and five axes or initial values that only this layer has.

    Example:
        >>> moe = mpcore.ParallelMoE(8, 16, num_experts=4, top_k=2, aux_loss="sequence")
        >>> y = moe(torch.randn(2, 5, 8), loss_scale=1 / 10)  # as the main loss: divided by the tokens of the step
        >>> y.shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        activation: str = "swiglu",
        *,
        shared_experts: int = 0,
        dispatch: str | None = None,
        ep: Axis = Axis(role="ep"),
        etp: Axis | None = None,
        cp: Axis = Axis(name="cp"),
        data: Axis = Axis(name="data"),
        output_init: Init | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**pick(options, TensorParallelOptions))
        if dispatch not in (None, *DISPATCHES):
            raise ValueError(f"dispatch {dispatch!r} is none of {DISPATCHES} and None")
        if shared_experts < 0:
            raise ValueError(f"shared_experts {shared_experts} is negative")
        for axis in (ep, etp or self.tp, cp, data):
            check_axis(axis)
        self.dim, self.ep, self.etp, self.cp = dim, ep, etp or replace(self.tp, name="etp", role="etp"), cp
        layer, like = pick(options, LayerOptions), pick(options, TensorOptions)
        init = layer.get("init")
        routing = {name: value for name, value in options.items() if name not in layer}
        self.router = Router(dim, num_experts, top_k, tp=self.tp, cp=cp, data=data, init=init, **routing, **like)
        inits: dict[str, Any] = {"init": init, "output_init": output_init, "used_share": top_k / num_experts}
        self.experts = Experts(num_experts, dim, hidden_dim, activation, ep=ep, etp=self.etp, **inits, **like)
        self.local_experts = num_experts // ep.size
        bounded = self.router.options.capacity_factor is not None
        self.dispatch = dispatch or ("all_to_all" if bounded else "all_gather")
        self.shared = None
        if shared_experts:
            width = shared_experts * hidden_dim
            self.shared = ParallelMLP(dim, width, activation, bias=False, output_init=output_init, **layer)

    def forward(
        self,
        x: Tensor,
        *,
        samples: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        loss_scale: Tensor | float | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D] (or [T, B, D]), or this rank's shard of the sequence to the same.

        All ranks of ep and etp bring inputs of one shape, and with a capacity those of cp too: pad, and mask. Only
        all_to_all without a capacity, on etp 1, takes other numbers of tokens from each rank of ep.

        Args:
            samples: [B] global sample index of each row, for jitter in training.
            mask: [B, T] bool, False for padding, which is routed and counted nowhere. Of this cp rank's whole sequence,
                also with sequence parallel.
            positions: [T] global index of each token of this cp rank's sequence; None: cp ranks hold one run each.
            loss_scale: factor of the main loss's sum over tokens, a number or [B]. Balance losses need it in training:
                they are scaled alike, and their gradient joins in backward.

        Raises:
            ValueError: before anything is sent, if shapes don't fit each other, or the mask isn't of booleans.
        """
        check_last(x, self.dim, "dim")
        if x.dim() != 3:
            raise ValueError(f"x {tuple(x.shape)} is not [B, T, D]")
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"the mask is of {mask.dtype}: give mask.bool(), True for tokens and False for padding")
        rows = x.shape[1 if self.sequence_dim == 0 else 0]
        if isinstance(loss_scale, Tensor) and loss_scale.shape not in ((), (1,), (rows,)):
            shape = tuple(loss_scale.shape)
            raise ValueError(f"loss_scale has shape {shape}, the batch {rows} rows: give one number, or one for each")
        ordered = x.transpose(0, 1) if self.sequence_dim == 0 else x
        split = self.tp.size > 1 and not self.sequence_parallel
        tokens, places = ordered.reshape(-1, self.dim), self._places(ordered, mask, positions)
        if split:  # the same tokens lie on every rank of tp: each takes its part
            short = -len(tokens) % self.tp.size
            tokens = collectives.split(F.pad(tokens, (0, 0, 0, short)), self.tp, 0)
            here = slice(self.tp.rank * len(tokens), (self.tp.rank + 1) * len(tokens))
            sequence, position, real = (F.pad(part, (0, short))[here] for part in places[:3])
            places = places._replace(sequence=sequence, position=position, real=real)
        routing = self.router(tokens, places, samples, loss_scale)
        y = self._through_experts(tokens, routing, places)
        if routing.loss is not None:
            y = _WithLoss.apply(y, routing.loss)
        if split:
            y = collectives.gather(y, self.tp, 0)[: ordered.shape[:2].numel()]
        y = y.reshape(ordered.shape)
        y = y.transpose(0, 1) if self.sequence_dim == 0 else y
        return y if self.shared is None else y + self.shared(x)

    def _places(self, x: Tensor, mask: Tensor | None, positions: Tensor | None) -> Places:
        B, T, _ = x.shape
        start, whole = (self.tp.rank * T, self.tp.size * T) if self.sequence_parallel else (0, T)
        if positions is None:
            positions = torch.arange(self.cp.rank * whole, (self.cp.rank + 1) * whole, device=x.device)
        if positions.shape != (whole,):
            raise ValueError(f"positions has shape {tuple(positions.shape)}, but this rank's sequence {whole} tokens")
        if mask is None:
            mask = torch.ones(B, whole, dtype=torch.bool, device=x.device)
        if mask.shape != (B, whole):
            raise ValueError(f"mask has shape {tuple(mask.shape)}, but this rank's sequences are {(B, whole)}")
        rows = torch.arange(B, device=x.device)[:, None].expand(B, T)
        position = positions[start : start + T].expand(B, T)
        real = mask[:, start : start + T].reshape(-1)
        return Places(rows.reshape(-1), position.reshape(-1), real, B, self.cp.size * whole)

    def _through_experts(self, x: Tensor, routing: Routing, places: Places) -> Tensor:
        """[N, D] -> [N, D], the weighted sum over each token's experts."""
        K = self.router.top_k
        weights, experts = routing.weights, routing.experts
        by_gather = self.dispatch == "all_gather"
        route = torch.cat([weights, experts.to(weights.dtype)], 1)  # one message, and experts are exact in fp32
        for axis in (self.etp, self.ep) if by_gather else (self.etp,):
            x, route = all_gather(x, axis, 0), all_gather(route, axis, 0)
        weights, experts = route[:, :K], route[:, K:].detach().long()
        capacity = self.router.capacity(places.length)
        slots = len(x) if capacity is None else min(len(x), capacity * places.sequences * self.etp.size)
        if by_gather:
            slots = len(x) if capacity is None else min(len(x), slots * self.ep.size)
            y = self._of_all(x, experts, weights, slots)
            y = reduce_scatter(y, self.ep, 0)
        elif capacity is None:
            y = self._sent_uneven(x, experts, weights)
        else:
            y = self._sent_in_slots(x, experts, weights, slots)
        return reduce_scatter(y, self.etp, 0)

    def _of_all(self, x: Tensor, experts: Tensor, weights: Tensor, slots: int) -> Tensor:
        """Every token is here: run those that chose this rank's experts."""
        n = self.local_experts
        row, counts = moe_rows(experts - self.ep.rank * n, n)
        rows = min(len(x) * min(self.router.top_k, n), slots * n)
        return moe_unpermute(self.experts(moe_permute(x, row, rows), counts), row, weights)

    def _sent_in_slots(self, x: Tensor, experts: Tensor, weights: Tensor, slots: int) -> Tensor:
        """Each rank sends `slots` rows to each expert, whether they are full or not."""
        n, E = self.local_experts, self.router.num_experts
        row, counts = moe_rows(experts, E)
        first = F.pad(counts.cumsum(0) - counts, (0, 1))  # E: nowhere
        row = torch.where(row >= 0, row + (experts * slots - first[experts]), -1)
        sent = all_to_all_rows(moe_permute(x, row, E * slots), self.ep)  # (r n s) d
        mine = sent.view(self.ep.size, n, slots, self.dim).transpose(0, 1).reshape(-1, self.dim)  # (n r s) d
        y = self.experts(mine, counts.new_full((n,), self.ep.size * slots))
        y = y.view(n, self.ep.size, slots, self.dim).transpose(0, 1).reshape(-1, self.dim)  # (r n s) d
        return moe_unpermute(all_to_all_rows(y, self.ep), row, weights)

    def _sent_uneven(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Each rank sends as many rows as there are; the host reads the numbers."""
        n, E = self.local_experts, self.router.num_experts
        row, counts = moe_rows(experts, E)
        coming = all_to_all_rows(counts, self.ep).view(self.ep.size, n)
        send, receive = _read(counts.view(self.ep.size, n).sum(1), coming.sum(1), len(x) * self.router.top_k)
        sent = all_to_all_rows(moe_permute(x, row, sum(send)), self.ep, send, receive)
        owner = torch.arange(n, device=x.device).repeat(self.ep.size)
        owner = owner.repeat_interleave(coming.flatten(), output_size=sum(receive))
        here, counts = moe_rows(owner[:, None], n)
        y = moe_unpermute(self.experts(moe_permute(sent, here, len(sent)), counts), here)
        return moe_unpermute(all_to_all_rows(y, self.ep, receive, send), row, weights)

    def extra_repr(self) -> str:
        """How tokens travel."""
        return f"dispatch={self.dispatch}, ep={self.ep.size}, etp={self.etp.size}"


def _read(send: Tensor, receive: Tensor, total: int) -> tuple[list[int], list[int]]:
    """Rows for each rank and from each; of tensors without values, as in a dry run, even parts of a total."""
    if send.is_meta or is_fake(send):
        even = [total // len(send) + (rank < total % len(send)) for rank in range(len(send))]
        return even, even
    send, receive = torch.stack([send, receive]).tolist()
    return send, receive  # type: ignore[return-value]


class _WithLoss(Function):
    """The output; its backward also begins that of a loss already scaled, so no stage hands the loss on."""

    @staticmethod
    def forward(ctx, y: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        return dy, ctx.like


def check_experts(model: nn.Module | ModelTree, mesh: Mesh) -> None:
    """Refuse mixtures whose experts lie otherwise than on the mesh: gradients would be summed over the wrong ranks."""
    for name, moe in named_modules(model):
        if not isinstance(moe, ParallelMoE):
            continue
        replicas = Sharding((), (cut(moe.ep.size, moe.ep, 0),)).data_axis(mesh)
        if moe.tp.size * mesh.data.size != moe.etp.size * moe.ep.size * replicas.size:
            axes = ("tp", "ep", "etp")
            built = ", ".join(f"{axis} of size {getattr(moe, axis).size}" for axis in axes)
            there = ", ".join(f"{axis} {getattr(mesh, axis).size}" for axis in axes)
            raise ValueError(
                f"{name or 'the model'} is a ParallelMoE built with {built}; the mesh has {there}: pass tp=mesh.tp, "
                f"ep=mesh.ep, etp=mesh.etp, or its experts' gradients are summed over other ranks than bring tokens"
            )


def check_replicas(model: nn.Module | ModelTree) -> None:
    """Refuse trained experts with replicas over tp whose gradients nothing sums."""
    for name, moe in named_modules(model):
        if isinstance(moe, ParallelMoE) and moe.tp.size > moe.etp.size * moe.ep.size:
            for leaf, parameter, sharding in declarations(moe.experts):
                if parameter.requires_grad and sharding.data is None and not sharding.partial:
                    raise ValueError(
                        f"{name}.experts.{leaf} has replicas over tp ({moe.tp.size} ranks, etp x ep "
                        f"{moe.etp.size * moe.ep.size}) whose gradients nothing sums: call "
                        f"shard_data_parallel(model, mesh) before, also with one data rank, or "
                        f"reduce_gradients(model, mesh)".lstrip(".")
                    )
