"""Muon: orthogonalized momentum for matrices. On every layout it takes the step of the unsharded model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.collectives import all_reduce, start_all_gather, wait
from mpcore.gradients.accumulate import gradient_of
from mpcore.kernels.adamw import followed
from mpcore.layers.embedding import TABLES
from mpcore.mesh.axis import Axis, Mesh, check_mesh
from mpcore.optim.adamw import AdamW
from mpcore.optim.groups import check_model, decay_groups, parameters_of
from mpcore.sharding.local import data_run, is_dtensor, local_tensor
from mpcore.sharding.state_dict import full_tensor


class Muon(AdamW):
    """Muon for the matrices of hidden layers and AdamW for all other parameters, on any layout.

    Newton-Schulz needs the full matrix, so the momentum is all-gathered over the axes that shard it. Ranks that then
    hold the same matrices divide the work: each orthogonalizes some of them, and they exchange the results. A parameter
    that consists of several matrices is orthogonalized matrix by matrix: the blocks that a layer declares (Q, K and V;
    gate and up, also of each expert), and for more than two dimensions each matrix of the last two. A plain `nn.Linear`
    is one matrix. A checkpoint stores the blocks, and a run that would resume with others is refused.

    Args:
        model: the model, or this rank's pipeline stage. If you shard it over data, do so first.
        lr, weight_decay: learning rate and weight decay of both optimizers.
        mesh: the model's mesh; the work is divided over its tp and data axes.
        exclude: parameters or modules that AdamW updates. Name the head, and tables that are bare parameters. AdamW
            always updates embeddings, convolutions and vectors.
        split_blocks: False orthogonalizes a parameter as one matrix although its layer declares blocks.
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: as in `torch.optim.Muon`. The default
            "match_rms_adamw" (Liu et al. 2025, section 2.2) lets Muon use the learning rate of AdamW.
        ns_dtype: dtype of Newton-Schulz; None: float32 (float64 for float64). bfloat16 is faster and, according to
            Jordan et al., accurate enough, but layouts then differ in the third digit.
        betas, eps: as in `AdamW`.
        others: state_dtype, masters and seed of `AdamW`. The momentum is always float32.

    Raises:
        ValueError: if an argument is out of range (see `AdamW`), or adjust_lr_fn is unknown.

    Sources: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
    scalable for LLM training" (arXiv:2502.16982).

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4, bias=False)
        >>> optimizer = mpcore.Muon(model, lr=1e-2)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        mesh: Mesh = Mesh(),
        exclude: Iterable[nn.Parameter | nn.Module] = (),
        split_blocks: bool = True,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **others: Any,
    ) -> None:
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn {adjust_lr_fn!r} is neither 'match_rms_adamw' nor 'original'")
        check_mesh(mesh)
        check_model(model)
        convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        named = parameters_of([*(m for m in model.modules() if isinstance(m, (*TABLES, *convolutions))), *exclude])
        matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1 and p not in named]
        options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients}
        options |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        groups = [
            {"params": matrices, "weight_decay": weight_decay, "muon": True, **options},
            *({**group, "muon": False} for group in decay_groups(model, weight_decay, matrices)),
        ]
        self.mesh = mesh
        self.ns_dtype = ns_dtype
        self.options = options
        self.split_blocks = split_blocks
        super().__init__(model, lr, betas, eps, weight_decay, groups=groups, **others)
        self._whole_model = True

    def blocks_of(self, p: nn.Parameter) -> tuple[int, ...]:
        """Return the sizes of the matrices that Muon orthogonalizes separately. (): the parameter is one matrix."""
        blocks = self._declared[p][1].blocks if self.split_blocks else ()
        return blocks if len(blocks) > 1 else ()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. With "muon": True its matrices are orthogonalized; with False AdamW steps it."""
        super().add_param_group({**self.options, **param_group} if param_group.get("muon") else param_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if "muon" not in group:
            raise ValueError(
                "the parameter group doesn't say who steps it: give it 'muon': True (matrices of hidden layers), or "
                "'muon': False (what AdamW has: tables, heads, vectors)"
            )
        for p in group["params"] if group["muon"] else ():
            if p.dim() < 2:
                raise ValueError(f"{self._declared[p][0]} has {p.dim()} dimensions, Muon takes matrices: 'muon': False")

    def _step(self, group: dict[str, Any], scale: Tensor | None) -> None:
        if not group["muon"]:
            return self._adamw(group, scale)
        axes = [axis for axis in (self.mesh.tp, self.mesh.data) if axis.size > 1]
        parameters = self._with_gradient(group["params"], axes)
        size = math.prod(axis.size for axis in axes)
        for start in range(0, len(parameters), size):
            self._orthogonal_step(group, parameters[start : start + size], axes, scale)
        return None

    def _with_gradient(self, parameters: Sequence[nn.Parameter], axes: Sequence[Axis]) -> list[nn.Parameter]:
        """Return the parameters that have a gradient on any rank, because all ranks must join the all-gather."""
        grads = [gradient_of(p) for p in parameters]
        if not axes or not parameters:
            return [p for p, grad in zip(parameters, grads, strict=True) if grad is not None]
        found = torch.tensor([grad is not None for grad in grads], dtype=torch.int32).to(parameters[0].device)
        for axis in axes:
            found = all_reduce(found, axis, "max")
        return [p for p, there in zip(parameters, found.tolist(), strict=True) if there]

    def _orthogonal_step(
        self, group: dict[str, Any], parameters: Sequence[nn.Parameter], axes: Sequence[Axis], scale: Tensor | None
    ) -> None:
        """Update at most as many matrices as there are ranks to divide the work."""
        rank = 0
        for axis in axes:
            rank = rank * axis.size + axis.rank
        shapes = [self._declared[p][1].shape for p in parameters]
        longest = max(map(math.prod, shapes))
        mine = torch.zeros(longest, dtype=self._state(parameters[0], "momentum_buffer")["momentum_buffer"].dtype,
                           device=parameters[0].device)  # fmt: skip
        for i, p in enumerate(parameters):
            sharding = self._declared[p][1]
            whole = full_tensor(self._momentum(group, p, scale), sharding)
            if i == rank:
                blocks = self.blocks_of(p)
                matrices = whole.split(blocks, sharding.block_dim) if blocks else (whole,)
                adjusted = [self._direction(matrix, group) for matrix in matrices]
                mine[: whole.numel()] = torch.cat(adjusted, sharding.block_dim).flatten()
        for axis in reversed(axes):
            mine = wait(start_all_gather(mine, axis))
        for p, shape, flat in zip(parameters, shapes, mine.split(longest), strict=False):
            update = self._declared[p][1].take(flat[: math.prod(shape)].view(shape))
            if is_dtensor(p):
                start, end = data_run(p)
                update = update[start:end]
            state = self.state[p]
            weight = held = local_tensor(p.detach())
            if "master" in state:
                weight = local_tensor(state["master"])
                weight.copy_(followed(weight, held))
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.to(weight.dtype) * group["lr"])
            held.copy_(weight)

    def _momentum(self, group: dict[str, Any], p: nn.Parameter, scale: Tensor | None) -> Tensor:
        """Return the momentum to orthogonalize, sharded like the parameter."""
        state, grad = self._state(p, "momentum_buffer"), gradient_of(p)
        state["step"] += 1
        buffer = local_tensor(state["momentum_buffer"])
        g = torch.zeros_like(buffer) if grad is None else local_tensor(grad).to(buffer.dtype)
        g = g if scale is None else g * scale.to(g.dtype)
        buffer.lerp_(g, 1 - group["momentum"])
        placed = torch.empty_like(state["momentum_buffer"])
        local_tensor(placed).copy_(g.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer)
        return placed

    def _direction(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        *_, m, n = matrix.shape
        direction = orthogonalize(matrix.to(self.ns_dtype or matrix.dtype), group["ns_coefficients"], group["ns_steps"])
        factor = 0.2 * math.sqrt(max(m, n)) if group["adjust_lr_fn"] == "match_rms_adamw" else math.sqrt(max(1, m / n))
        return direction.to(matrix.dtype) * factor


def orthogonalize(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Approximate U V^T of x = U S V^T, [..., m, n], by Newton-Schulz iterations.

    Each step is a X + b (X X^T) X + c (X X^T)^2 X, with the coefficients a, b, c. The singular values of the result lie
    in about [0.7, 1.2]; tiny singular values of x stay below 0.7.

    Source: Jordan et al. 2024, "Muon", the function `zeropower_via_newtonschulz5`.
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
