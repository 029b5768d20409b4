"""Compute matrix products in half precision, or in FP8."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase

import torch
from torch import nn

from mpcore.kernels.quantize_fp8 import BLOCK
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.layers.moe.experts import GroupedLinear
from mpcore.optim.loss_scale import LossScaler
from mpcore.sharding.declarations import named_modules


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
