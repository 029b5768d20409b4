"""A loop without `prepare`: which stages need `finish_gradients`, on two simulated data ranks."""

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.gradients.accumulate import gradient_of
from mpcore.sharding.local import local_tensor
from mpcore.tools.simulation import RankError


class Head(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.T


def summed(mesh: mp.Mesh, zero: int, stages: int, finish: bool) -> list[Tensor]:
    """Return the gradients of one step of a model, or of two stages that share a table."""
    torch.manual_seed(0)
    embedding = nn.Embedding(8, 4)
    models = [nn.Sequential(embedding, nn.Linear(4, 4)), Head(embedding)][:stages]
    mp.parallel.shard_data_parallel(models, mesh, zero=zero)
    for model in models:
        mp.parallel.set_gradient_sync(model, last=True)
    x = torch.arange(0, 8, 3) + mesh.data.rank
    for model in models:
        x = model(x)
    x.square().sum().backward()
    if finish:
        mp.parallel.finish_gradients(models)
    tree = nn.ModuleList(models)
    mp.gradients.reduce_gradients(tree)
    return [local_tensor(gradient_of(p)) for p in tree.parameters()]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_model_needs_no_finish_gradients_and_stages_that_share_a_table_do(zero):
    one, two = (mp.simulate(summed, zero, stages, True, dp=2) for stages in (1, 2))
    assert all(grad.any() for grads in (*one, *two) for grad in grads)
    torch.testing.assert_close(mp.simulate(summed, zero, 1, False, dp=2), one, rtol=0, atol=0)
    if zero == 0:
        torch.testing.assert_close(mp.simulate(summed, zero, 2, False, dp=2), two, rtol=0, atol=0)
    else:
        with pytest.raises(RankError, match="is gathered from the 2 ranks of data"):
            mp.simulate(summed, zero, 2, False, dp=2)
