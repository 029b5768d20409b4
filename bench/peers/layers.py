"""Rows of layers: an MLP on a tp group that sends nothing, and cross-entropy."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

from bench.layers.bench_host_time import MLP
from bench.peers.measure import Row, Step
from mpcore import ColumnParallelLinear, RowParallelLinear, build_mesh, vocab_parallel_cross_entropy

TP, D, HIDDEN, BATCH, LENGTH = 8, 64, 256, 2, 16
TOKENS, VOCAB = 512, 12576  # a quarter of 50304


def whole_mlp() -> MLP:
    """Plain torch; the second product reads rank 0's share of the hidden units alone, so that nothing is to sum."""
    torch.manual_seed(0)
    up, down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
    with torch.no_grad():
        down.weight[:, HIDDEN // TP :] = 0
        down.bias.zero_()  # of which DTensor adds a part on each rank
    return MLP(up, down)


def share(mlp: MLP) -> dict[str, Tensor]:
    """Rank 0's part of the state."""
    state, n = mlp.state_dict(), HIDDEN // TP
    return {
        "up.weight": state["up.weight"][:n],
        "up.bias": state["up.bias"][:n],
        "down.weight": state["down.weight"][:, :n],
        "down.bias": state["down.bias"],
    }


def step_of(mlp: nn.Module, sequence_parallel: bool = False) -> Step:
    """Forward and backward; returns the output and the gradient of the input."""
    torch.manual_seed(1)
    length = LENGTH // TP if sequence_parallel else LENGTH
    x, dy = torch.randn(BATCH, length, D, requires_grad=True), torch.randn(BATCH, length, D)
    parameters = list(mlp.parameters())

    def step() -> tuple[Tensor, Tensor]:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        y = mlp(x)
        y.backward(dy)
        assert x.grad is not None
        for result in (y, x.grad):
            if isinstance(result, AsyncCollectiveTensor):  # DTensor leaves the waiting to whoever reads
                result.wait()
        return y, x.grad

    return step


def mpcore_mlp(sequence_parallel: bool = False) -> Step:
    """Ours."""
    tp = {"tp": build_mesh(tp=TP, device_type="cpu").tp, "sequence_parallel": sequence_parallel}
    mlp = MLP(ColumnParallelLinear(D, HIDDEN, **tp), RowParallelLinear(HIDDEN, D, **tp))
    mlp.load_state_dict(share(whole_mlp()))
    return step_of(mlp, sequence_parallel)


def plain_mlp() -> Step:
    """Two `nn.Linear` of the whole sizes: what a user swaps out."""
    return step_of(whole_mlp())


def local_mlp() -> Step:
    """Two `nn.Linear` of one rank's sizes."""
    mlp = MLP(nn.Linear(D, HIDDEN // TP), nn.Linear(HIDDEN // TP, D))
    mlp.load_state_dict(share(whole_mlp()))
    return step_of(mlp)


def dtensor_mlp(sequence_parallel: bool = False) -> Step:
    """DTensor's two styles."""
    mesh = build_mesh(tp=TP, device_type="cpu").device_mesh
    assert mesh is not None
    up = ColwiseParallel(input_layouts=Shard(1)) if sequence_parallel else ColwiseParallel()
    down = RowwiseParallel(output_layouts=Shard(1)) if sequence_parallel else RowwiseParallel()
    mlp = parallelize_module(whole_mlp(), mesh["tp"], {"up": up, "down": down}, src_data_rank=None)
    return step_of(mlp, sequence_parallel)


def megatron_mlp(sequence_parallel: bool = False) -> Step:
    """Megatron-Core's two layers."""
    from megatron.core import parallel_state  # type: ignore[import-not-found]
    from megatron.core.model_parallel_config import ModelParallelConfig  # type: ignore[import-not-found]
    from megatron.core.tensor_parallel import layers  # type: ignore[import-not-found]

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP, create_gloo_process_groups=False)
    config = ModelParallelConfig(
        tensor_model_parallel_size=TP, sequence_parallel=sequence_parallel, use_cpu_initialization=True,
        perform_initialization=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    like = {"config": config, "init_method": nn.init.zeros_, "skip_bias_add": False}

    class First(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]

    up = layers.ColumnParallelLinear(D, HIDDEN, gather_output=False, bias=True, **like)
    down = layers.RowParallelLinear(HIDDEN, D, input_is_parallel=True, bias=True, **like)
    mlp, state = MLP(First(up), First(down)), share(whole_mlp())
    for name, layer in (("up", up), ("down", down)):
        layer.load_state_dict({key: state[f"{name}.{key}"] for key in ("weight", "bias")}, strict=False)
    return step_of(mlp, sequence_parallel)


def fairscale_mlp() -> Step:
    """fairscale's two layers."""
    from fairscale.nn.model_parallel import initialize, layers  # type: ignore[import-not-found]

    initialize.initialize_model_parallel(TP)
    up = layers.ColumnParallelLinear(D, HIDDEN, gather_output=False)
    mlp = MLP(up, layers.RowParallelLinear(HIDDEN, D, input_is_parallel=True))
    mlp.load_state_dict(share(whole_mlp()), strict=False)
    return step_of(mlp)


def loss_step(dtype: torch.dtype, side: str) -> Step:
    """Cross-entropy of logits, forward and backward; returns the loss and the gradient of the logits."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.randn(TOKENS, VOCAB * size, dtype=dtype)
    target = torch.randint(VOCAB * size, (TOKENS,))
    mesh = build_mesh(tp=size, device_type="cpu")
    mine = whole.chunk(size, -1)[mesh.tp.rank].clone().requires_grad_()
    if side == "torch":
        forward = partial(F.cross_entropy, mine, target)
    else:
        forward = partial(vocab_parallel_cross_entropy, mine, target, tp=mesh.tp, vocab_size=VOCAB * size)

    def dtensor() -> Tensor:
        logits = DTensor.from_local(mine, mesh.device_mesh["tp"], [Shard(-1)])  # type: ignore[index]
        with loss_parallel():
            loss = F.cross_entropy(logits, target)
            loss.backward()
        return loss.to_local()  # type: ignore[attr-defined]

    def plain() -> Tensor:
        loss = forward()
        loss.backward()
        return loss

    once = dtensor if side == "DTensor" else plain

    def step() -> tuple[Tensor, Tensor]:
        mine.grad = None
        loss = once()
        assert mine.grad is not None
        return loss, mine.grad

    return step


OVERLAP = (
    "the two all-reduces, and a backward in Python, which starts the all-reduce of the input's gradient before it "
    "computes the weight's gradient, so that both run at the same time. torch's backward computes both gradients in "
    "one call, and nothing is left to overlap with the all-reduce."
)
MLP_NAME = "MLP of two linear layers on tp 8, host time"
SP_NAME = "the MLP with sequence parallel, host time"
ROWS = [
    Row(MLP_NAME, "nn.Linear, unsharded", mpcore_mlp, plain_mlp, 1 / 1.35, fake=TP),
    Row(MLP_NAME, "nn.Linear of the local sizes", mpcore_mlp, local_mlp, 0.5, fake=TP, why=OVERLAP),
    Row(MLP_NAME, "DTensor", mpcore_mlp, dtensor_mlp, 6.0, fake=TP, why=OVERLAP),
    Row(MLP_NAME, "Megatron-Core", mpcore_mlp, megatron_mlp, 1.2, fake=TP, needs="megatron",
        why="Megatron-Core does the same work: " + OVERLAP),
    Row(MLP_NAME, "fairscale", mpcore_mlp, fairscale_mlp, 1.0, fake=TP, needs="fairscale",
        why=OVERLAP + " fairscale starts the all-reduce after the weight's gradient, and waits for it."),
    Row(SP_NAME, "DTensor", partial(mpcore_mlp, True), partial(dtensor_mlp, True), 6.0, fake=TP,
        why="four collectives (all-gathers and reduce-scatters). Each needs a copy, because the sequence is not the "
        "first dimension"),
    *(
        Row(f"cross-entropy, {str(dtype)[6:]}, one rank", "F.cross_entropy", partial(loss_step, dtype, "mpcore"),
            partial(loss_step, dtype, "torch"), tolerance=tolerance,
            why="mpcore computes in float32, `F.cross_entropy` in bfloat16" if dtype == torch.bfloat16 else "")
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2))
    ),
    Row("cross-entropy, float32, tp 2", "DTensor loss_parallel", partial(loss_step, torch.float32, "mpcore"),
        partial(loss_step, torch.float32, "DTensor"), 1.2, ranks=2),
]  # fmt: skip
