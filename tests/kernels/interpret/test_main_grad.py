"""Weight gradients of rms_norm and layer_norm that the kernels add to main gradients."""

import laws
import pytest
import torch

from mpcore.kernels import layer_norm, rms_norm
from tests.kernels.interpret.test_norms import Norm

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(params=["rms_norm", "layer_norm"])
def norm(request):
    return Norm(rms_norm if request.param == "rms_norm" else layer_norm, request.param == "layer_norm")


def with_main_grads(inputs):
    """Parameters with main gradients that already hold something."""
    leaves = {name: torch.nn.Parameter(t.clone()) for name, t in inputs.items()}
    for name in ("weight", "bias"):
        if name in leaves:
            leaves[name].main_grad = torch.ones(leaves[name].shape)
            leaves[name].grad_added_to_main_grad = False
    return leaves


@pytest.mark.parametrize("D", [24, 1029])
def test_pitfall_32_main_gradients_are_added_to_once_each_time(norm, D):
    """A weight used twice, after what was there before; autograd's own gradient stays None."""
    made = norm.inputs(5, D, dtype=F32, weight=BF16)
    leaves, plain = with_main_grads(made), {name: t.clone().requires_grad_() for name, t in made.items()}
    for inputs in (leaves, plain):
        for scale in (1.0, 2.0):
            (norm.kernel(**inputs) * scale).sum().backward()
    assert torch.equal(leaves["x"].grad, plain["x"].grad)
    columns = sorted(leaves.keys() - {"x"})
    once = [
        torch.autograd.grad((norm.kernel(**plain) * scale).sum(), [plain[name] for name in columns])
        for scale in (1.0, 2.0)
    ]
    for name, *terms in zip(columns, *once, strict=True):
        assert leaves[name].grad is None
        assert leaves[name].grad_added_to_main_grad
        bound = 2 * torch.finfo(BF16).eps * sum(t.float().abs() for t in terms) + 1e-6
        assert ((leaves[name].main_grad - 1 - sum(t.float() for t in terms)).abs() <= bound).all()


def test_pitfall_32_main_gradients_are_left_alone_where_autograd_returns_gradients(norm):
    leaves = with_main_grads(norm.inputs(5, 24))
    columns = [leaves[name] for name in leaves.keys() - {"x"}]
    grads = torch.autograd.grad(norm.kernel(**leaves).sum(), columns)
    assert all(grad is not None and (column.main_grad == 1).all() for grad, column in zip(grads, columns, strict=True))
    torch.autograd.grad(norm.kernel(**leaves).sum(), leaves["x"])
    assert all((column.main_grad == 1).all() and not column.grad_added_to_main_grad for column in columns)


def test_pitfall_32_frozen_weights_add_nothing(norm):
    leaves = with_main_grads(norm.inputs(5, 24))
    leaves["weight"].requires_grad_(False)
    norm.kernel(**leaves).sum().backward()
    assert (leaves["weight"].main_grad == 1).all()
    assert leaves["weight"].grad is None


def test_a_main_gradient_of_a_wrong_shape_is_refused(norm):
    leaves = with_main_grads(norm.inputs(5, 24))
    leaves["weight"].main_grad = torch.ones(23)
    with pytest.raises(ValueError, match=r"main_grad is torch.float32 \(23,\) on \S+; for a parameter \(24,\)"):
        norm.kernel(**leaves).sum().backward()


def test_operators_with_main_gradients(norm):
    made = norm.inputs(3, 24, dtype=BF16, weight=F32)
    x, weight, bias, how = made["x"], made["weight"], made.get("bias"), (norm.has_bias,)
    _, _, stats = torch.ops.mpcore.norm_forward(x, weight, bias, None, *how, 1e-6)
    mains = torch.ones(24), torch.ones(24) if norm.has_bias else None
    laws.check_operator(torch.ops.mpcore.norm_backward, x, None, x, weight, bias, *mains, stats, *how)
