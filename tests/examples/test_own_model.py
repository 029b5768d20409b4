"""The short example: its losses are those of one process, whatever the mesh."""

from __future__ import annotations

import pytest
import torch

from tests.quick import some


def losses(tp: int, zero: int) -> list[float]:
    from examples.own_model import train

    torch.set_default_dtype(torch.float64)
    try:
        return train(tp, zero, steps=4)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("size", "tp", "zero"), some((4, 2, 3), of=[(2, 1, 2), (3, 3, 0), (4, 2, 0)]))
def test_every_mesh_has_the_losses_of_one_process(ranks, size, tp, zero):
    (alone,) = ranks(1, losses, 1, 0)
    assert alone[-1] < alone[0] - 1, "a nat in three steps, at this rate"
    for found in ranks(size, losses, tp, zero):
        assert found == pytest.approx(alone, rel=1e-12)
