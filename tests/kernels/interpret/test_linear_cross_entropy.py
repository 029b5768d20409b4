"""Numerics of linear_cross_entropy around the kernels of cross_entropy."""

import laws
import pytest
import torch

from mpcore.kernels.cross_entropy import Loss
from mpcore.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_rows, linear_log_prob
from tests.oracles.linear_loss import (
    linear_cross_entropy_reference,
    linear_cross_entropy_rows_reference,
    linear_log_prob_reference,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0}


def draw(N, D, V, dtype):
    generator = torch.Generator().manual_seed(N)
    shapes = {"x": (N, D), "weight": (V, D)}
    inputs = {name: laws.drawn(torch.randn, shape, generator=generator) for name, shape in shapes.items()}
    target = laws.drawn(torch.randint, 0, V, (N,), generator=generator)
    target[1] = -100
    scale = laws.drawn(torch.rand, N, generator=generator)
    return {name: t.to(dtype) for name, t in inputs.items()}, {"target": target, "scale": scale}


def terms(arguments):
    """The arguments of a reference, with the terms of the loss as the kernels take them."""
    given = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    return arguments | {"loss": Loss(len(arguments["weight"]), **given)}


def kernels(**arguments):
    return linear_cross_entropy(**terms(arguments), impl="triton", chunk_rows=6).view(1)


def reference(**arguments):
    return linear_cross_entropy_reference(**arguments).view(1)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("options", [{}, OPTIONS])
@pytest.mark.parametrize("N", [5, 20])
def test_errors(N, options, dtype):
    inputs, rows = draw(N, 8, 1001, dtype)
    laws.check_errors(kernels, reference, inputs, **rows, **options)


def losses(**arguments):
    return linear_cross_entropy_rows(**terms(arguments), impl="triton", chunk_rows=6)


def log_probs(**arguments):
    return linear_log_prob(**terms(arguments), impl="triton", chunk_rows=6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("function", "reference", "options"), [
    (losses, linear_cross_entropy_rows_reference, OPTIONS), (log_probs, linear_log_prob_reference, {}),
    (log_probs, linear_log_prob_reference, {"softcap": 5.0}),
])  # fmt: skip
@pytest.mark.parametrize("N", [5, 20])
def test_errors_of_each_row(N, function, reference, options, dtype):
    inputs, rows = draw(N, 8, 1001, dtype)
    laws.check_errors(function, reference, inputs, target=rows["target"], **options)


def test_compiles_in_one_graph():
    inputs, rows = draw(13, 8, 25, BF16)
    laws.check_compiles(kernels, inputs, **rows, **OPTIONS)
    laws.check_compiles(losses, inputs, target=rows["target"], **OPTIONS)
    laws.check_compiles(log_probs, inputs, target=rows["target"])
