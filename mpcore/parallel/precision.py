"""Compute in half precision, with float32 masters or under autocast, or matrix products in FP8."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.layers.linear import ParallelLinear
from mpcore.layers.linear_fp8 import KeptWeight, check_blocks, grouped_fp8, to_fp8
from mpcore.layers.linear_ops import Product
from mpcore.layers.module import Blocks, as_module_list
from mpcore.layers.moe.experts import GroupedLinear
from mpcore.optim.loss_scale import LossScaler
from mpcore.parallel.shared import router_statistics
from mpcore.sharding.declarations import named_modules
from mpcore.sharding.local import is_dtensor


def autocast(dtype: torch.dtype, device_type: str, scaler: LossScaler | None = None) -> AbstractContextManager[Any]:
    """Compute matrix products in `dtype` if that is half precision; norms, softmax, losses and sums stay in float32.

    Args:
        dtype: bfloat16 or float16. With another dtype the context does nothing.
        device_type: "cuda" or "cpu".
        scaler: the `LossScaler`. float16 without one raises ValueError: gradients below 6e-8 would underflow.
    """
    if dtype == torch.float16 and scaler is None:
        raise ValueError("float16 without a loss scaler loses gradients below 6e-8: give a LossScaler, or use bfloat16")
    return torch.autocast(device_type, dtype) if dtype in (torch.bfloat16, torch.float16) else nullcontext()


@torch.no_grad()
def round_parameters(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Round the model's parameters to `dtype`, except shards over data and the statistics of routers.

    Return the master weights: for each trained parameter, its float32 values before rounding.
    """
    kept = router_statistics(model)
    rounded = [p for p in model.parameters() if p not in kept and not is_dtensor(p)]
    masters = {p: p.data.float() for p in rounded if p.requires_grad}
    for p in rounded:
        p.data = p.data.to(dtype)
    return masters


def convert_to_fp8(
    blocks: Blocks, *, keep_weights: bool = False, all_gather: bool = False, experts: bool = False
) -> None:
    """Compute the products of the blocks' parallel linear layers in FP8, in forward and backward.

    Parameters, gradients, the optimizer and all communication keep their dtypes. Inputs and output gradients are
    quantized in blocks of 128 elements, weights in blocks of 128 x 128 (`mpcore.kernels.quantize_fp8`). No block
    crosses ranks of tp, so every tp size that divides the KV heads computes the same products. Data, context and
    pipeline parallel layouts do too if their ranks hold multiples of 128 tokens; otherwise gradients differ by
    rounding.

    Args:
        blocks: a list, `nn.ModuleList` or mapping of modules, for example `model.blocks` or single linear layers. Their
            parallel linear layers are converted. Leave out the head: its rounding errors would directly change the
            loss. Embeddings, norms and routers keep their dtype.
        keep_weights: quantize each weight and its transpose once, and use them in all micro-batches, in recomputation
            and in backward until the weight changes. It costs 2 bytes more per element of these weights. Without it,
            each forward and each backward quantizes the weight again. Results are the same.
        all_gather: let ZeRO 1-3 quantize the shards of these weights, and gather them in FP8: 1 byte and 4 / 128^2 per
            element in place of 2 (bfloat16) or 4 (float32), in messages and in memory. Results are the same. Each
            data rank must hold a multiple of 128 of the layer's output features. Until it is sharded again, the
            gathered weight can be read by its layer only. A weight that stages of one rank share is gathered as it is.
        experts: convert the experts of `ParallelMoE` too. Each expert has its own products, so the host reads how many
            tokens each has, which `grouped_mm` in bfloat16 does not: it pays for few, large experts on a rank, on a GPU
            that multiplies e4m3. Blocks of 128 tokens begin with each expert, in the order of its tokens: gradients of
            experts differ between layouts by rounding. `keep_weights` and `all_gather` leave out experts.

    Raises:
        ValueError: before anything is converted, if `blocks` is a single module, tp does not cut a layer at multiples
            of 128, a layer's product has no FP8, or no linear layer can be converted (all are torch's own, or experts'
            without `experts`). `shard_data_parallel` raises it if ZeRO 1-3 would gather a weight that is kept, or with
            `all_gather` cuts a layer at no multiple of 128. Forward raises it for a weight of `keep_weights` or of
            `experts` that is computed from others, such as merged adapters.

    Note:
        - Converting a layer again keeps its `keep_weights` and `all_gather`.
        - `keep_weights` sees steps of torch's optimizers, operations in place on the parameter, and new memory
          (`p.data = x`). Between a training forward and the step it doesn't see writes that torch doesn't count:
          through `.data` (`p.data.mul_(2)`), through another tensor of the same memory, or by a collective such as
          `dist.broadcast(p)`. Write to `p` under `torch.no_grad()`.
        - The forms of `keep_weights` stay on the device if `Offload(parameters=True)` moves the parameters.
        - With ZeRO 0, or on one data rank, `all_gather` has nothing to gather.
        - A layer that is compiled, or captured in a CUDA graph, quantizes its weight each time.

    Example:
        >>> blocks = nn.ModuleList(mpcore.ParallelMLP(256, 512) for _ in range(2))
        >>> mpcore.parallel.convert_to_fp8(blocks)
        >>> blocks[0].up.product
        Fp8Product(split_backward=False)
    """
    held = enumerate(as_module_list(blocks))
    named = [(f"blocks[{i}] {name}".rstrip(), m) for i, b in held for name, m in named_modules(b)]
    found = {name: m for name, m in named if isinstance(m, ParallelLinear)}
    plain = [name for name, m in named if isinstance(m, nn.Linear)]
    if plain and not found:
        raise ValueError(
            f"the blocks have {len(plain)} nn.Linear, such as {plain[0]!r}, and no parallel linear layer to convert: "
            f"parallelize(model, plan) comes before convert_to_fp8"
        )
    grouped = {name: m for name, m in named if isinstance(m, GroupedLinear)}
    if grouped and not (found or experts):
        raise ValueError(
            f"the blocks have {len(grouped)} grouped linear layers of experts, such as {next(iter(grouped))!r}, which "
            f"stay in their dtype, and no other linear layer to convert: pass experts=True"
        )
    for name, layer in grouped.items() if experts else ():
        check_blocks(layer.shardings["weight"], name, first=1)
    products: dict[ParallelLinear, Product] = {}
    for name, layer in found.items():
        kept = KeptWeight(layer.weight) if keep_weights else None
        products[layer] = to_fp8(layer.product, layer.shardings["weight"], name, kept, all_gather)
    for layer, product in products.items():
        layer.product = product
    for layer in grouped.values() if experts else ():
        layer.product = grouped_fp8
