"""DTensors over the shards of a model, and models that torch sharded first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mpcore import GateUpParallelLinear, parallelize
from mpcore.interop.dtensors import dtensor_state_dict
from tests.pool import mesh, on_ranks


def net(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4), nn.LayerNorm(4))


def check_views(size: int, width: int) -> None:
    on = mesh(tp=size)
    want = net(width).state_dict()
    model = parallelize(net(width), {"0": "colwise", "2": "rowwise"}, tp=on.tp)
    state = dtensor_state_dict(model, on)
    assert state.keys() == want.keys()
    for name, x in state.items():
        assert x.to_local().data_ptr() == model.get_parameter(name).data_ptr(), name
        assert torch.equal(x.full_tensor(), want[name]), name


@pytest.mark.parametrize(("size", "width"), [(2, 6), (3, 5)])  # 5 over 3: 2, 2, 1, as DTensor has it
def test_dtensors_are_the_shards_themselves(ranks, size, width):
    ranks(size, check_views, size, width)


@on_ranks(3)
def test_uneven_shards_blocks_and_a_model_sharded_by_torch_first_are_refused() -> None:
    on = mesh(tp=3)
    model = parallelize(net(7), {"0": "colwise", "2": "rowwise"}, tp=on.tp)  # 3, 2, 2; DTensor's are 3, 3, 1
    for layer in (model, GateUpParallelLinear(4, 6, tp=on.tp)):
        with pytest.raises(ValueError, match="full_state_dict"):
            dtensor_state_dict(layer, on)
    sharded: Any = fully_shard(net(), mesh=init_device_mesh("cpu", (3,)))
    with pytest.raises(ValueError, match="over 3 ranks already: call parallelize first"):
        parallelize(sharded, {"0": "colwise", "2": "rowwise"}, tp=on.tp)
