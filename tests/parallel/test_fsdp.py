"""ZeRO on blocks whose output is a view: on simulated ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp


class AddsInPlace(nn.Module):
    """The output of `up` is a view of its product, of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y += x
        return self.down(y.tanh())


def norm_of_step(zero: int, recompute: str) -> float:
    torch.manual_seed(0)
    model, x = AddsInPlace().double(), torch.randn(4, 3, 4, dtype=torch.float64)
    run = mp.prepare(
        model, mp.build_mesh(device_type="cpu"), blocks=[model.up, model.down], initialize=False, data=mp.Zero(zero),
        loss=lambda y, target: (y - target).square().sum(), recompute=recompute,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    mine = [*run.share(4)]
    run.forward_backward(x[mine], x[mine], tokens=4)
    return run.optimizer_step().grad_norm


@pytest.mark.parametrize(("zero", "recompute"), [(1, "none"), (3, "none"), (3, "full")])
def test_pitfall_68_a_blocks_output_may_be_changed_in_place(zero, recompute):
    want = mp.simulate(norm_of_step, 0, "none", ranks=1)[0]
    assert mp.simulate(norm_of_step, zero, recompute, ranks=2) == [pytest.approx(want, rel=1e-12)] * 2
