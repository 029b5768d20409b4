"""The first step of a run compares the gradients of replicated parameters within tp."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.tools.simulation import RankError
from mpcore.training import replica_check

V, D = 6, 8


class Net(nn.Module):
    """Dropout of replicated features (`at` 0) or of sharded ones (`at` 1), and a scalar that meets sharded features.

    With `at` 3 unevenly sharded features are dropped, and then replicated ones.
    """

    def __init__(self, tp: mp.Axis, at: int, partial: bool) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(V, D), nn.LayerNorm(D)
        hidden = 4 * D + (at == 3)
        self.up, self.down = mp.ColumnParallelLinear(D, hidden, tp=tp), mp.RowParallelLinear(hidden, D, tp=tp)
        self.head = mp.ColumnParallelLinear(D, V, tp=tp)
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout, self.at = nn.Dropout(0.1), at
        if partial:
            mp.add_partial(self, "scale", tp)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        hidden = self.up(self.dropout(x) if self.at == 0 else x) * self.scale
        x = self.down(self.dropout(hidden) if self.at in (1, 3) else hidden)
        return self.head(self.dropout(x) if self.at == 3 else x)


def steps(mesh: mp.Mesh, at: int, alike: bool, partial: bool = True, zero: int = 1, tokens: int | None = None,
          factor: float = 1.0, precision: str = "float32", autocast: bool = False) -> int:  # fmt: skip
    def loss(logits: Tensor, target: Tensor) -> Tensor:  # the same on all ranks of tp, whatever the masks
        return mp.vocab_parallel_cross_entropy(logits, target, tp=mesh.tp, vocab_size=V, reduction="sum")

    with torch.device("meta"):
        net = Net(mesh.tp, at, partial)
    run = mp.prepare(net, mesh, blocks=[net.up], loss=loss, data=mp.Zero(zero), precision=precision,
                     optimizer=lambda m: mp.AdamW(m, lr=0.1))  # fmt: skip
    with run.parameters(), torch.no_grad():
        net.down.weight.mul_(factor)
    torch.manual_seed(mesh.data.rank if alike else mesh.world.rank)
    for _ in range(2):
        with torch.autocast("cpu", enabled=autocast):
            run.forward_backward(torch.arange(V).view(2, 3), torch.arange(V).view(2, 3), tokens=tokens)
        run.optimizer_step()
    return run.step


DROPOUT = r"is replicated, but the ranks of tp have different gradients of it \(by .*%; and of [a-z.]+, [a-z.]+"
DROPOUT += (
    r".*\), so the replicas would drift apart: the random states differ within the tp group, .* torch.manual_seed\(mesh"
)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_masks_of_replicated_features_must_be_alike(zero: int) -> None:
    with pytest.raises(RankError, match=DROPOUT):
        mp.simulate(steps, 0, False, True, zero, tp=2, dp=2)
    assert mp.simulate(steps, 0, True, True, zero, tp=2, dp=2) == [2] * 4
    assert mp.simulate(steps, 1, False, True, zero, tp=2, dp=2) == [2] * 4  # masks of sharded features may differ


def test_ranks_may_draw_unequal_numbers_of_values() -> None:
    with pytest.raises(RankError, match=r"the ranks drew unequal numbers of random values in the step, as nn.Dropout"):
        mp.simulate(steps, 3, True, tp=2)


def test_a_sum_that_nobody_declares_is_named() -> None:
    for at, alike in ((1, True), (2, False)):  # random states don't matter if nothing draws
        with pytest.raises(
            RankError,
            match=r"scale is replicated, .* mpcore.add_partial\(module, 'scale', mesh.tp\), .* mpcore verify, which",
        ):
            mp.simulate(steps, at, alike, False, tp=2)
    assert mp.simulate(steps, 1, True, False, 1, 1, tp=2) == [2] * 2  # not of a step with a token: as in verify
    assert mp.simulate(steps, 0, False, False, tp=1, dp=2) == [2] * 2


def test_a_small_difference_is_an_error_where_rounding_is_smaller() -> None:
    """As with GPT-2's initial values, whose gradient of a scalar in the MLP is a thousandth of the largest gradient."""
    with pytest.raises(RankError, match="scale is replicated"):
        mp.simulate(steps, 2, True, False, 1, None, 1e-4, tp=2)
    for half in ({"precision": "bfloat16"}, {"autocast": True}):
        assert mp.simulate(partial(steps, **half), 2, True, False, 1, None, 1e-4, tp=2) == [2] * 2


def sketch(x: Tensor | None) -> Tensor:
    return replica_check.sketch(x, torch.device("cpu"))


def test_a_sketch_sees_each_element() -> None:
    x = torch.randn(replica_check.PIECE + 5)
    want = torch.stack([(x * torch.cat([torch.arange(n).cos() for n in (replica_check.PIECE, 5)])).sum(), x.norm()])
    torch.testing.assert_close(sketch(x), want.double(), rtol=1e-3, atol=1e-2)
    assert sketch(None).tolist() == [0, 0]
    assert float(sketch(x.flip(0))[0]) != float(sketch(x)[0])
