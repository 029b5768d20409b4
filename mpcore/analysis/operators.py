"""Count what operators compute: products, attention, the bytes that the others read and write, and kernels launched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from mpcore._torch.dispatch import TorchDispatchMode
from mpcore.memory_footprint import tensors_in
from mpcore.sharding.local import is_dtensor

_aten = torch.ops.aten
_ON_CPU = {  # torch has formulas for the attention of GPUs alone, and of grouped queries not before 2.13
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        2 * q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3])  # q k^T and p v
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: (
        2 * q.shape[:3].numel() * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])  # q k^T again, dp, dv, dq, dk
    ),
}
_NAMES = ("attention", "scaled_dot_product")  # of operators of attention
_FREE = {  # make a tensor without writing it, or return the one they got
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view,
    _aten.set_, _aten.resize_, _aten.lift_fresh,
}  # fmt: skip
ALIGNED = 8
"""Elements of 16 bits that matrix units read at once: products of other head dimensions don't run on them."""
_COMMUNICATION = ("c10d", "_c10d_functional", "prim")


@dataclass
class Tally:
    """What some operators compute.

    Attributes:
        products: by dtype the floating-point operations of matrix products.
        attention: floating-point operations of attention over the pairs that the mask leaves.
        all_pairs: the same over all pairs, whatever the mask.
        scores: pairs of query and key, of all heads, that calls of attention meet.
        unaligned: of `all_pairs` those in 16 bits whose head dimension is no multiple of 16 bytes.
        bytes: what every other operator that is no view reads and writes.
        launches: operators that are no views: the kernels that a GPU launches.
    """

    products: dict[str, int] = field(default_factory=dict)
    attention: int = 0
    all_pairs: int = 0
    scores: int = 0
    unaligned: int = 0
    bytes: int = 0
    launches: int = 0

    @property
    def flops(self) -> int:
        """All floating-point operations of products, those of attention over all pairs."""
        return sum(self.products.values()) + self.all_pairs


class Operators(TorchDispatchMode):
    """Count operators into `tally`, which the caller replaces, while this context is entered.

    Without hooks, unlike torch's counter: they would keep tensors that are counted as held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if func.is_view or packet in _FREE or func.namespace in _COMMUNICATION:
            return out
        given = list(tensors_in((args, kwargs)))
        if any(is_dtensor(x) for x in args):  # comes again, as an operator on the local tensors
            return out
        tally = self.tally
        tally.launches += 1
        formula = _ON_CPU.get(packet) or flop_registry.get(packet)
        if formula is None:
            tally.bytes += sum(x.numel() * x.itemsize for x in given)
            tally.bytes += sum(x.numel() * x.itemsize for x in tensors_in(out) if not any(x is y for y in given))
            return out
        flops = formula(*args, **(kwargs or {}), out_val=out)
        if any(name in packet.__name__ for name in _NAMES):
            pairs, seen = _pairs(packet.__name__, args)
            tally.all_pairs += flops
            tally.attention += flops * seen // max(pairs, 1)
            tally.scores += pairs
            tally.unaligned += flops * (given[0].itemsize == 2 and given[0].shape[-1] % ALIGNED != 0)
        else:
            dtype = str(given[0].dtype).removeprefix("torch.")
            tally.products[dtype] = tally.products.get(dtype, 0) + flops
        return out


def _pairs(name: str, args: tuple) -> tuple[int, int]:
    """Pairs of query and key, of all heads, that a call of attention meets, and those that its mask leaves.

    Bounds have no values in a dry run: half of the pairs are taken, which is exact for causal masks whose sequences are
    balanced over cp.
    """
    own = not name.startswith("_")  # of `mpcore.kernels`: [B, T, H, K]; torch's are [B, H, T, K]
    backward = "backward" in name
    q, k = (args[2], args[3]) if own and backward else (args[1], args[2]) if backward else (args[0], args[1])
    (B, H), T, S = (q.shape[0], q.shape[2 if own else 1]), q.shape[1 if own else 2], k.shape[1 if own else 2]
    pairs = B * H * T * S
    if own:
        low, _, causal = args[7:10] if backward else args[3:6]
        return pairs, pairs // 2 if low is not None else B * H * T * (T + 1) // 2 if causal else pairs
    causal = any(x is True for x in args)
    return pairs, B * H * T * (T + 1) // 2 if causal and T == S else pairs
