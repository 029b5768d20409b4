"""The references compute in float32 and round once, to the dtype of their input."""

import pytest
import torch
import torch.nn.functional as F

from mpcore.kernels import activation
from mpcore.kernels.dropout_add import dropout_add
from mpcore.kernels.layer_norm import layer_norm
from mpcore.kernels.moe_permute import moe_unpermute
from mpcore.kernels.rms_norm import rms_norm
from mpcore.kernels.rope import rope

X, Y, W, B = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
ROW, PLACE = torch.tensor([[4, 0], [1, -1]]), {"key": 5, "samples": torch.tensor([4, 9])}
GAIN, (COS, SIN) = {"q_weight": W, "k_weight": B}, torch.randn(2, 3, 3)


def dropped(x, residual):
    return dropout_add(x, residual, 0.3, **PLACE)


def rotated(q, k):
    return torch.stack(rope(q[:, :, None], k[:, :, None], COS, SIN, **GAIN))


def unpermuted(y):
    return moe_unpermute(y.flatten(0, 1), ROW, torch.tensor([[0.3, 0.7], [0.1, 2.0]]))


ROUNDED = {  # the function, what it is in float32, and its inputs
    **{f.__name__: (f, f, [X]) for f in (activation.swiglu, activation.geglu, activation.relu_squared)},
    "rms_norm": (rms_norm, lambda x, w: F.rms_norm(x, (8,), w, 1e-6), [X, W]),
    "layer_norm": (layer_norm, lambda x, w, b: F.layer_norm(x, (8,), w, b), [X, W, B]),
    "layer_norm, float32 weight": (lambda x: layer_norm(x, W, B), lambda x: F.layer_norm(x, (8,), W, B), [X]),
    "dropout_add": (dropped, dropped, [X, Y]),
    "rope": (rotated, rotated, [X, Y]),
    "moe_unpermute": (unpermuted, unpermuted, [X]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_reference_rounds_once(name, dtype):
    function, exact, inputs = ROUNDED[name]
    given = [x.to(dtype) for x in inputs]
    assert torch.equal(function(*given), exact(*(x.float() for x in given)).to(dtype))
