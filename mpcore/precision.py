"""Floor 4: matrix products in half precision with float32 weights, or in eight bits, and float16's dynamic loss scale.

Source: Micikevicius et al. 2018, arXiv:1710.03740, sections 3.1 and 3.2; eight bits: DeepSeek-V3 (2024),
arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from mpcore.collectives import all_reduce
from mpcore.gradients import gradient_of
from mpcore.kernels.quantize_fp8 import BLOCK
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.layers.moe import GroupedLinear
from mpcore.mesh import Mesh, check_mesh
from mpcore.sharding import local_tensor, named_modules


class LossScaler:
    """Multiplies the loss, so that small gradients don't vanish in float16; all ranks of the world decide alike.

    A step: backward of `loss * scaler.scale`, the gradient sums, `scaler.unscale(model)`, the norm; then the optimizer
    steps if `scaler.update(norm.isfinite())` says so, on every rank or on none.

    Args:
        mesh: whose `world` agrees.
        scale: the first scale.
        growth_factor: it grows by that after `growth_interval` steps without inf or NaN in a row.
        backoff_factor: it shrinks by that when there is one, and the step is skipped.
        growth_interval: in steps.

    Raises:
        ValueError: if growing would not grow, or shrinking not shrink.
    """

    def __init__(
        self,
        mesh: Mesh = Mesh(),
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if scale <= 0 or growth_factor < 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                f"scale {scale} and growth_interval {growth_interval} must be positive, growth_factor {growth_factor} "
                f"at least 1, backoff_factor {backoff_factor} in (0, 1)"
            )
        check_mesh(mesh)
        self.mesh, self.scale, self.good_steps = mesh, scale, 0
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval

    @torch.no_grad()
    def unscale(self, model: nn.Module) -> None:
        """Divide all gradients, main gradients included, by the scale; call it once a step, after the last backward."""
        for parameter in model.parameters():
            grad = gradient_of(parameter)
            if grad is not None:
                local_tensor(grad).div_(self.scale)

    def update(self, finite: Tensor | bool) -> bool:
        """Adapt the scale after a backward: a collective on all ranks of the world.

        Args:
            finite: whether this rank found its gradients finite.

        Returns:
            Whether all ranks did: take the step, or skip it.
        """
        found = torch.as_tensor(finite, device=self.mesh.device).to(torch.int32)
        good = bool(all_reduce(found, self.mesh.world, "min"))
        self.good_steps = self.good_steps + 1 if good else 0
        if not good:
            self.scale *= self.backoff_factor
        elif self.good_steps % self.growth_interval == 0:
            self.scale *= self.growth_factor
        return good

    def state_dict(self) -> dict[str, float]:
        """What must be kept to go on as before, as JSON takes it."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a state; what it lacks stays."""
        self.scale = float(state.get("scale", self.scale))
        self.good_steps = int(state.get("good_steps", self.good_steps))


def autocast(dtype: torch.dtype, device_type: str, scaler: LossScaler | None = None) -> AbstractContextManager:
    """Matrix products in `dtype` where that is half precision; norms, softmax, losses and sums stay in float32.

    Args:
        dtype: bfloat16 or float16; others change nothing.
        device_type: "cuda" or "cpu".
        scaler: float16 needs one.

    Raises:
        ValueError: for float16 without a scaler: gradients below 6e-8 would vanish.
    """
    if dtype == torch.float16 and scaler is None:
        raise ValueError("float16 without a loss scaler loses gradients below 6e-8: give a LossScaler, or use bfloat16")
    return torch.autocast(device_type, dtype) if dtype in (torch.bfloat16, torch.float16) else nullcontext()


def convert_to_fp8(model: nn.Module, skip: Iterable[str] = ("*head",)) -> nn.Module:
    """Have the parallel linear layers of a model compute their products in eight bits, forward and backward.

    Parameters, gradients, the optimizer and all communication stay as they are; what a layer keeps of its input for
    backward is half of bfloat16's. Inputs and output gradients are quantized in blocks of 128 elements, weights in
    blocks of 128 x 128 (`mpcore.kernels.quantize_fp8`). Blocks don't cross the ranks of tp, so every tp size computes
    the same products, where it divides the number of KV heads; so do data, context and pipeline parallel layouts whose
    ranks hold sequences, or parts of them, of multiples of 128 tokens. Others differ by roundings of gradients.

    Args:
        model: the model, or this rank's stage of it.
        skip: patterns of the names of layers to leave, as `fnmatch` reads them. The head is, by default: its errors
            go into the loss directly. Embeddings, norms, routers and grouped experts are never in eight bits.

    Returns:
        The model.

    Raises:
        ValueError: if a layer's cut over tp isn't at multiples of 128, or all linear layers are torch's own
            or experts'.
    """
    skip = tuple(skip)
    named = [(name, m) for name, m in named_modules(model) if not any(fnmatchcase(name, p) for p in skip)]
    found = {name: m for name, m in named if isinstance(m, ColumnParallelLinear | RowParallelLinear)}
    plain = [name for name, m in named if isinstance(m, nn.Linear)]
    if plain and not found:
        raise ValueError(
            f"the model has {len(plain)} nn.Linear, such as {plain[0]!r}, and no parallel linear layer to convert: "
            f"parallelize(model, plan) comes before convert_to_fp8"
        )
    grouped = [name for name, m in named if isinstance(m, GroupedLinear)]
    if grouped and not found:
        raise ValueError(
            f"the model has {len(grouped)} grouped linear layers of experts, such as {grouped[0]!r}, which stay in "
            f"their dtype, and no other linear layer to convert"
        )
    for name, layer in found.items():
        _check_blocks(name, layer)
    for layer in found.values():
        layer.fp8 = True
    return model


def _check_blocks(name: str, layer: ColumnParallelLinear | RowParallelLinear) -> None:
    sharding = layer.shardings["weight"]
    for shard in sharding.shards:
        for edge in sorted({edge for runs in shard.runs for run in runs for edge in run}):
            if edge % BLOCK and edge != sharding.shape[shard.dim]:
                raise ValueError(
                    f"{name} is cut over {shard.axis.name} {shard.axis.size} at feature {edge}, which is no multiple "
                    f"of {BLOCK}, the block of eight-bit products: take a smaller {shard.axis.name}, or skip {name!r}"
                )
