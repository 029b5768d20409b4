"""The table of features: what changes a model or its run, each with its effect in plain torch.

A feature has up to six parts; a part that is missing changes nothing:

    on          options of the layer's constructor
    change      changes the built model, before `prepare`
    of_mesh     changes the mesh
    of_run      arguments of `prepare`
    prepare     takes the place of `prepare`
    truth       what the feature changes in the formula: the logical parameters, before the layer's formula reads them
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.interop.lora import add_lora
from mpcore.layers.linear import ParallelLinear
from mpcore.layers.moe import GroupedLinear
from mpcore.tools import invariant
from tests.laws.cases import ALPHA, MOVES, RANK, Block, D


@dataclass(frozen=True)
class Feature:
    """A row of the table; see the module's docstring.

    Attributes:
        resumes: save after the first step, and go on with a new model and optimizer that load the checkpoint.
        moves: they have another mesh: all ranks on dp, or on tp where all were on dp.
        evaluates: evaluate on larger inputs before each step, and call the model once more before the optimizer.
        abandons: compute gradients of larger inputs before each step, and drop them.
        grows: two micro-batches from the second step on.
        max_norm: clip the gradients to this norm.
        optimizer: makes the optimizer of groups of parameters, of the run and in plain torch, in place of AdamW.
        kind: two features of one kind exclude each other by nature.
    """

    on: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], nn.Module] = lambda model: model
    of_mesh: Callable[[mp.Mesh], mp.Mesh] = lambda mesh: mesh
    of_run: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[..., mp.Run] = mp.prepare
    truth: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda params: params
    resumes: bool = False
    moves: bool = False
    evaluates: bool = False
    abandons: bool = False
    grows: bool = False
    max_norm: float = 0.0
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    kind: str = ""


def _add_lora(model: nn.Module) -> nn.Module:
    targets = [name for name, module in model.named_modules() if isinstance(module, ParallelLinear | GroupedLinear)]
    return add_lora(model, rank=RANK, alpha=ALPHA, targets=targets) if targets else model


def _with_adapters(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """W + alpha / rank B A for each weight that has factors."""
    found = dict(params)
    for name in [name for name in params if name.endswith(".lora_A.weight")]:
        at = name.removesuffix(".lora_A.weight")
        weight = at.removesuffix("_lora") if at.endswith("_lora") else f"{at}.weight"  # of all experts, of a layer
        found[weight] = params[weight] + ALPHA / RANK * params[f"{at}.lora_B.weight"] @ params[name]
    return found


def _freeze_biases(model: nn.Module) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and not name.endswith("bias"))
    return model


def _add_unused(model: Block) -> Block:
    if model.first:
        model.unused = nn.Parameter(torch.zeros(D, D, dtype=torch.float64))
    return model


def _add_sometimes(model: Block) -> Block:
    if model.first:
        model.sometimes = nn.Parameter(torch.zeros(D, D, dtype=torch.float64))
    if model.first and model.sequence_parallel and model.takes == "sequence":
        mp.add_partial(model, "sometimes", model.tp)
    return model


def _tie(model: Block) -> Block:
    model.again = model.scale
    return model


def _zero(stage: int) -> Feature:
    return Feature(of_run={"data": mp.Zero(stage)}, kind="data")


def _inputs(layer: nn.Module) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The arguments of a call of a case's layer."""
    x, samples = torch.empty(layer.input_shape, dtype=torch.float64, device="meta"), torch.zeros(1, dtype=torch.int64)
    return (x, samples.to("meta"))[: 1 + layer.draws], {}


def _recompute(**how: Any) -> Feature:
    return Feature(of_run={"recompute": mp.training.Recompute(**how)}, kind="recompute")


FEATURES: dict[str, Feature] = {
    "sequence parallel": Feature(on={"sequence_parallel": True}),
    "LoRA": Feature(change=_add_lora, truth=_with_adapters),
    "invariant": Feature(of_mesh=partial(invariant.invariant_mesh, degree=4), prepare=invariant.prepare),
    "full recompute": _recompute(), "selective recompute": _recompute(kind="selective"),
    "recompute budget": _recompute(budget=0.95, example=_inputs),
    "overlapped communication": Feature(of_run={"overlap": 1}), "split backward": Feature(of_run={"schedule": "zb"}),
    "deepcopy": Feature(change=copy.deepcopy), "frozen biases": Feature(change=_freeze_biases),
    "unused parameter": Feature(change=_add_unused), "parameter of one step": Feature(change=_add_sometimes),
    "ZeRO-1": _zero(1), "ZeRO-2": _zero(2), "ZeRO-3": _zero(3),
    "SGD of torch": Feature(optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=0.1)),
    "2 micro-batches": Feature(of_run={"micro_batches": 2}, kind="micro-batches"),
    "more micro-batches": Feature(grows=True, kind="micro-batches"),
    "optimizer offload": Feature(of_run={"offload": mp.Offload(optimizer=True)}, kind="offload"),
    "activation offload": Feature(of_run={"offload": mp.Offload(activations=True)}, kind="offload"),
    "parameter offload": Feature(of_run={"offload": mp.Offload(parameters=True)}, kind="offload"),
    "evaluation": Feature(evaluates=True), "resume": Feature(resumes=True, kind="resume"),
    MOVES: Feature(resumes=True, moves=True, kind="resume"),
    "abandoned step": Feature(abandons=True), "clipping": Feature(max_norm=0.01), "tied scale": Feature(change=_tie),
    "compile": Feature(of_run={"compile": mp.Compile("eager")}),
}  # fmt: skip

REFUSED = [
    {"LoRA", "invariant"}, {"invariant", "parameter offload"}, {"invariant", "compile"},
    {"invariant", "split backward"}, {"invariant", "SGD of torch"}, {"parameter offload", "split backward"},
    {"overlapped communication", "invariant"}, *({f"ZeRO-{stage}", "parameter offload"} for stage in (1, 2, 3)),
]  # fmt: skip
"""The pairs that are refused. All others are equal."""
