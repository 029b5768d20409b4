"""Count what operators compute: matrix products, attention, bytes moved by other operators, and kernel launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from mpcore._torch.dispatch import TorchDispatchMode
from mpcore.memory_footprint import tensors_in
from mpcore.sharding.local import is_dtensor

_aten = torch.ops.aten
_ON_CPU = {  # torch has formulas only for the attention of GPUs, and for grouped queries only since 2.13
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        2 * q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3])  # q k^T and p v
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: (
        2 * q.shape[:3].numel() * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])  # q k^T again, dp, dv, dq, dk
    ),
}
_NAMES = ("attention", "scaled_dot_product")  # in the names of attention operators
_FREE = {  # these allocate a tensor without writing it, or return their argument
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view,
    _aten.set_, _aten.resize_, _aten.lift_fresh,
}  # fmt: skip
ALIGNED = 8
"""Elements of 16 bits that matrix units read at once: products of other head dimensions don't run on them."""
_COMMUNICATION = ("c10d", "_c10d_functional", "prim")


@dataclass
class OperatorCounts:
    """What some operators compute.

    Attributes:
        products: the floating-point operations of matrix products, by dtype.
        attention: the floating-point operations of attention, for the pairs of query and key that the mask leaves.
        all_pairs: the same for all pairs, without regard to the mask.
        scores: the number of pairs of query and key in all heads.
        unaligned: the part of `all_pairs` in 16 bits whose head dimension is no multiple of 16 bytes.
        bytes: the bytes that all other operators read and write; views are not counted.
        launches: the number of operators that are no views: the kernels that a GPU launches.
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
        """The floating-point operations of all products, and of attention for all pairs."""
        return sum(self.products.values()) + self.all_pairs


class Operators(TorchDispatchMode):
    """Count operators into `tally` while this context is entered. The caller may replace `tally` at any time.

    Unlike torch's FLOP counter it uses no hooks: they would keep tensors alive, which would then be counted as held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tally: OperatorCounts = OperatorCounts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if func.is_view or packet in _FREE or func.namespace in _COMMUNICATION:
            return out
        given = list(tensors_in((args, kwargs)))
        if any(is_dtensor(x) for x in args):  # the operator on the local tensors follows
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


def _pairs(name: str, args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the number of (query, key) pairs of all heads in a call of attention, and of those that the mask leaves.

    Bounds of masks have no values in a dry run. So half of the pairs are counted. This is exact for causal masks if the
    sequences are balanced over cp.
    """
    own = not name.startswith("_")  # an operator of `mpcore.kernels` has [B, T, H, K]; torch's have [B, H, T, K]
    backward = "backward" in name
    q, k = (args[2], args[3]) if own and backward else (args[1], args[2]) if backward else (args[0], args[1])
    (B, H), T, S = (q.shape[0], q.shape[2 if own else 1]), q.shape[1 if own else 2], k.shape[1 if own else 2]
    pairs = B * H * T * S
    if own:
        low, _, causal = args[7:10] if backward else args[3:6]
        return pairs, pairs // 2 if low is not None else B * H * T * (T + 1) // 2 if causal else pairs
    causal = any(x is True for x in args)
    return pairs, B * H * T * (T + 1) // 2 if causal and T == S else pairs
