"""AdamW of bfloat16 weights and gradients with float32 master and moments: 28 bytes a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.protocol import FORWARD, Inputs, Kernel, Shape, always, compiled
from mpcore.kernels.adamw import AdamWState, adamw_foreach, adamw_now

HOW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LR = 1e-3


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Weight and gradient [n] in dtype; master and moments in float32; what changes from step to step."""
    n = shape["n"]
    master = torch.randn(n, device=device)
    return {
        "param": master.to(dtype),
        "grad": torch.randn(n, dtype=dtype, device=device),
        "exp_avg": torch.randn(n, device=device),
        "exp_avg_sq": torch.rand(n, device=device),
        "master": master,
        "now": adamw_now(torch.tensor([10.0], device=device), LR, HOW["betas"])[0],
    }


def ours(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor, now: Tensor):
    """In place; what has changed as the result."""
    adamw_foreach([AdamWState(param, grad, exp_avg, exp_avg_sq, now, master)], **HOW)
    return param, exp_avg, exp_avg_sq, master


def reference(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor, now: Tensor):
    """The same in plain torch."""
    adamw_foreach([AdamWState(param, grad, exp_avg, exp_avg_sq, now, master)], **HOW, impl="reference")
    return param, exp_avg, exp_avg_sq, master


def fused(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor, now: Tensor):
    """torch's fused step of the master weights, and a copy."""
    torch._fused_adamw_(
        *([master], [grad.float()], [exp_avg], [exp_avg_sq], [], [now[3].float()]),
        **{"lr": LR, "beta1": HOW["betas"][0], "beta2": HOW["betas"][1], "weight_decay": HOW["weight_decay"]},
        **{"eps": HOW["eps"], "amsgrad": False, "maximize": False},
    )
    param.copy_(master)
    return param, exp_avg, exp_avg_sq, master


def foreach(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor, now: Tensor):
    """The formula in torch's lists of tensors, as its default optimizer runs it, and a copy."""
    lr, correct1, correct2 = (now[i].float() for i in range(3))
    g = [grad.float()]
    torch._foreach_mul_([master], 1 - LR * HOW["weight_decay"])
    torch._foreach_lerp_([exp_avg], g, 1 - HOW["betas"][0])
    torch._foreach_mul_([exp_avg_sq], HOW["betas"][1])
    torch._foreach_addcmul_([exp_avg_sq], g, g, 1 - HOW["betas"][1])
    below = torch._foreach_sqrt([exp_avg_sq])
    torch._foreach_div_(below, correct2)
    torch._foreach_add_(below, HOW["eps"])
    torch._foreach_mul_(below, -correct1 / lr)
    torch._foreach_addcdiv_([master], [exp_avg], below)
    param.copy_(master)
    return param, exp_avg, exp_avg_sq, master


ADAMW = Kernel(
    "adamw",
    inputs,
    ours,
    reference,
    {"foreach": always(foreach), "torch fused": always(fused), "torch.compile": compiled(reference)},
    # reads gradient, master and moments; writes weight, master and moments
    cost=lambda s, b: ((2 * b + 24) * s["n"], 0),
    shapes=[{"n": 2**26}, {"n": 10**9}],
    toy={"n": 100},
    passes=(FORWARD,),
    check={"n": 2**24},
    in_float64=False,
)
