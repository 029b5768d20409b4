"""What tensor parallelism costs the host: a tiny MLP on tp 8 beside plain torch and DTensor; a block's messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bench.interleave import interleave, judge
from mpcore import (
    ColumnParallelLinear,
    LayerNorm,
    Mesh,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    TransformerBlock,
)

D, HIDDEN, BATCH, LENGTH = 64, 256, 2, 8


class MLP(nn.Module):
    """Two linear layers of any make, GELU between."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def step(model: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward, gradients thrown away."""
    parameters = list(model.parameters())

    def call() -> None:
        y = model(x)
        y.backward(dy)
        for result in (y, x.grad):
            if isinstance(result, AsyncCollectiveTensor):  # DTensor leaves the waiting to whoever reads
                result.wait()
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return call


@pytest.mark.benchmark(group="host time of an MLP on tp 8, forward and backward")
def test_mlp_host_time(benchmark, tp8: Mesh) -> None:
    """At most 1.35 times plain `nn.Linear`; at least 6 times as fast as DTensor."""
    tp = tp8.tp
    assert tp8.device_mesh is not None
    ours = MLP(ColumnParallelLinear(D, HIDDEN, tp=tp), RowParallelLinear(HIDDEN, D, tp=tp))
    local = MLP(nn.Linear(D, HIDDEN // tp.size), nn.Linear(HIDDEN // tp.size, D))
    whole = MLP(nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D))
    dtensor = parallelize_module(
        MLP(nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)),
        tp8.device_mesh["tp"],
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    )
    x, dy = torch.randn(BATCH, LENGTH, D, requires_grad=True), torch.randn(BATCH, LENGTH, D)

    local.load_state_dict(ours.state_dict())
    for mlp in (ours, local):  # the fake group sums nothing, so one rank's share is what plain torch computes
        mlp.zero_grad()
        mlp(x).backward(dy)
    torch.testing.assert_close(ours(x), local(x))
    for mine, other in zip(ours.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)

    models = {"mpcore": ours, "torch.nn local": local, "torch.nn whole": whole, "DTensor": dtensor}
    calls = {name: step(model, x, dy) for name, model in models.items()}
    times = interleave(calls, rounds=150, iterations=20, warmup=5)
    faster, to_whole = times.ratio("DTensor", "mpcore"), times.ratio("mpcore", "torch.nn whole")
    to_local = times.ratio("mpcore", "torch.nn local")
    benchmark.extra_info |= {
        "shape": f"[{BATCH}, {LENGTH}, {D}] -> {HIDDEN}",
        "microseconds": {name: round(1e6 * times.median(name), 1) for name in times},
        "ratios": {
            "host time / nn.Linear of the local sizes (no bound)": round(to_local, 3),
            "host time / nn.Linear, unsharded (at most 1.35)": round(to_whole, 3),
            "DTensor parallelize_module / host time (at least 6)": round(faster, 2),
        },
    }
    benchmark.pedantic(calls["mpcore"], rounds=50, iterations=20, warmup_rounds=2)
    for what, pair, bound in (
        ("DTensor's host time over ours", ("DTensor", "mpcore"), {"at_least": 6.0}),
        ("host time over unsharded nn.Linear's", ("mpcore", "torch.nn whole"), {"at_most": 1.35}),
    ):
        judge(benchmark.extra_info, what, times.ratios(*pair), **bound)


class Messages(TorchDispatchMode):
    """Counts collectives, and the bytes that one rank sends in a ring."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.calls, self.sent = size, Counter[str](), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """See every operator below autograd."""
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func.__name__:
            name = func.__name__.partition(".")[0]
            whole = out if name.startswith("all_gather") else args[0]
            steps = 2 * (self.size - 1) if name.startswith("all_reduce") else self.size - 1
            self.calls[name] += 1
            self.sent += steps * whole.nbytes // self.size
        return out


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence parallel"])
@pytest.mark.benchmark(group="a transformer block on tp 8, forward and backward")
def test_block_messages(benchmark, tp8: Mesh, sequence_parallel: bool) -> None:
    """Two all-reduces forward and two backward, or the same bytes as all-gather and reduce-scatter, nothing else."""
    tp, dim, heads = tp8.tp, 64, 8
    sp = {"tp": tp, "sequence_parallel": sequence_parallel}
    block = TransformerBlock(
        ParallelAttention(dim, heads, **sp),
        ParallelMLP(dim, 4 * dim, "swiglu", **sp),
        LayerNorm(dim, **sp),
        LayerNorm(dim, **sp),
        **sp,
    )
    length = 16 // tp.size if sequence_parallel else 16
    x, dy = torch.randn(2, length, dim, requires_grad=True), torch.randn(2, length, dim)
    with Messages(tp.size) as forward:
        y = block(x)
    with Messages(tp.size) as backward:
        y.backward(dy)

    expected = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2} if sequence_parallel else {"all_reduce": 2}
    all_reduce = 2 * (tp.size - 1) * (2 * 16 * dim * 4) // tp.size
    assert forward.calls == backward.calls == expected
    assert forward.sent == backward.sent == 2 * all_reduce
    benchmark.extra_info |= {
        "forward": dict(forward.calls),
        "backward": dict(backward.calls),
        "bytes sent a pass": forward.sent,
    }
    benchmark.pedantic(step(block, x, dy), rounds=20, iterations=10, warmup_rounds=2)
