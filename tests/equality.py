"""The equality helper: a sharded model against the same model unsharded, in values and in gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mpcore import Axis, collectives, full_state_dict, load_full_state_dict
from mpcore.gradients import reduce_gradients
from mpcore.sharding import shardings
from mpcore.sharding.state_dict import full_tensor
from tests.pool import mesh

FEWER_SIZES = [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]  # of tp; the laws take 2


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw_ids(seed: int, size: int, *shape: int) -> Tensor:
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(seed))


def tp_axis() -> Axis:
    """Of all ranks of this test."""
    return mesh(tp=torch.distributed.get_world_size()).tp


def close(got: Tensor, want: Tensor, what: str, tolerance: float = 1e-12) -> None:
    """Fail unless the tensors agree to `tolerance` of the largest value wanted (or of 1, where all are smaller)."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, wanted {want.dtype}"
    if want.numel() == 0:
        return
    error = (got.double() - want.double()).abs().max().item()
    bound = tolerance * max(want.double().abs().max().item(), 1.0)
    assert error <= bound, f"{what}: off by {error:.3g}, allowed {bound:.3g} (a NaN fails too)"


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient in its logical shape: a collective."""
    declared = shardings(model)
    return {n: full_tensor(p.grad, declared[n]) for n, p in model.named_parameters() if p.grad is not None}


def same_model(
    build: Callable[..., nn.Module],
    run: Callable[[nn.Module], dict[str, Tensor]],
    tolerance: float = 1e-12,
    reduce: bool = True,
    **axes,
) -> None:
    """On each rank: build the model sharded and unsharded with the same weights, run both, compare all they give.

    Args:
        build: called with the axes for the sharded model, with nothing for the dense one.
        run: runs forward and backward, and returns named tensors that must agree (outputs whole, input gradients).
        tolerance: relative to the largest value, in float64.
        reduce: finish declared gradients with `reduce_gradients` first.
        axes: what `build` takes, such as `tp=mesh.tp`.
    """
    torch.manual_seed(1)
    dense = build().double()
    torch.manual_seed(2)
    sharded = build(**axes).double()
    load_full_state_dict(sharded, full_state_dict(dense))
    want, got = run(dense), run(sharded)
    if reduce:
        reduce_gradients(sharded)
    assert want.keys() == got.keys()
    for name in want:
        close(got[name], want[name], name, tolerance)
    want, got = full_gradients(dense), full_gradients(sharded)
    assert want.keys() == got.keys(), f"gradients of {want.keys() ^ got.keys()} on one side only"
    for name in want:
        close(got[name], want[name], f"gradient of {name}", tolerance)


def same_layer(
    build: Callable[..., nn.Module],
    shape: tuple[int, ...],
    *,
    split: int | None = None,
    gather: tuple[int, ...] | None = None,
    grad: bool = True,
    expanded: bool = False,
    tp: Axis | None = None,
) -> None:
    """`same_model` of one layer on tp, of its output and its input's gradient.

    Args:
        build: makes the layer.
        shape: of the whole input.
        split: the dimension over which an input is sharded.
        gather: the dimension over which an output is sharded, and its whole size where ranks have unequal shards.
        grad: whether the input requires a gradient.
        expanded: whether the output's gradient is an expanded one.
        tp: the axis; None: of all ranks of this test.
    """

    def run(layer: nn.Module) -> dict[str, Tensor]:
        x, axis = draw(1, *shape).requires_grad_(grad), next(m.tp for m in layer.modules() if hasattr(m, "tp"))
        y = layer(x if split is None else collectives.split(x, axis, split))
        y = y if gather is None else collectives.gather(y, axis, *gather)
        (y.sum() if expanded else (y * draw(2, *y.shape)).sum()).backward()
        return {"y": y.detach()} | ({"dx": x.grad} if grad else {})

    same_model(build, run, tp=tp or tp_axis())
