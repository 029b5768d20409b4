"""The bytes that the operators of a training step read and write, counted from their shapes on fake tensors.

`python -m tests.kernels.step_bytes` prints them for a block and the head of an 8B model, and for a block of experts, by
operator. Each operator reads its inputs once and writes its outputs once, as on a GPU whose caches hold nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mpcore
from mpcore._torch.fake import fake_tensors
from mpcore.gradients import main_gradients
from mpcore.layers import linear_log_prob

SILENT = ("empty", "new_empty", "detach", "_unsafe_view", "_reshape_alias", "promote_types")
NO_READ = ("new_", "zeros", "ones", "full", "fill_", "zero_", "empty", "arange", "_like")
LIKE: dict[str, Any] = {"dtype": torch.bfloat16}


class Bytes(TorchDispatchMode):
    """The bytes of all operators, by name; views and empty tensors move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outs = op(*args, **kwargs or {})
        name = op._schema.name.partition("::")[2]
        if op.namespace != "prim" and not op.is_view and not name.startswith(SILENT):
            given = [] if any(part in name for part in NO_READ) else args
            given = args[1:] if name == "copy_" else given
            written = zip(args, op._schema.arguments, strict=False) if outs is None else ()
            every = given, outs, [x for x, argument in written if argument.is_write]
            self.calls[name] += 1
            self.moved[name] += sum(x.nbytes for x in tree_leaves(every) if isinstance(x, Tensor))
        return outs


def draw(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


def block(moe: bool) -> tuple[nn.Module, Callable[..., Any]]:
    if moe:  # Qwen3-30B-A3B
        layer = mpcore.ParallelMoE(2048, 768, 128, 8, **LIKE)
        return layer, lambda: layer(draw(1, 8192, 2048))
    norms = (mpcore.RMSNorm(4096, **LIKE) for _ in range(2))
    attention = mpcore.ParallelAttention(4096, 32, num_kv_heads=8, bias=False, rope=mpcore.RotaryEmbedding(128), **LIKE)
    layer = mpcore.TransformerBlock(attention, mpcore.ParallelMLP(4096, 14336, "swiglu", bias=False, **LIKE), *norms)
    return layer, lambda: layer(draw(1, 8192, 4096))


def head(rows: bool) -> tuple[nn.Module, Callable[..., Any]]:
    layer = mpcore.ColumnParallelLinear(4096, 128256, bias=False, **LIKE)
    x, target = draw(8192, 4096), torch.zeros(8192, dtype=torch.int64)
    if rows:
        return layer, lambda: torch.stack(linear_log_prob(x, layer.weight, target)).sum()
    return layer, lambda: mpcore.linear_cross_entropy(x, layer.weight, target, reduction="sum")


PARTS = {
    "block of 8B": lambda: block(False), "head, loss": lambda: head(False), "head, log_prob": lambda: head(True),
    "experts of 30B-A3B": lambda: block(True),
}  # fmt: skip


def count(part: str) -> Counter[str]:
    with fake_tensors(stands_for_gpu=True):
        module, forward = PARTS[part]()
        main_gradients(module)
        with Bytes() as bytes_:
            y = forward()
            y.backward(torch.empty_like(y))
    return bytes_.moved


def lines() -> Iterator[str]:
    for part in PARTS:
        moved = count(part)
        yield f"{part}: {sum(moved.values()) / 2**30:.2f} GiB"
        for name, size in moved.most_common(14):
            yield f"    {name:<28}{size / 2**30:8.2f}"


if __name__ == "__main__":
    print("\n".join(lines()))
