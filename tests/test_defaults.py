"""What a public function does without an argument is what its documented default says, and another value does more.

The defaults below are written down a second time, from the documentation: a signature that says something else fails,
and so does a default that is stated and not used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore import experimental
from mpcore.experimental.biased_experts import BiasedExperts
from mpcore.interop.lora import add_lora
from mpcore.interop.parallelize import Colwise, LocalSizes, Replicate
from mpcore.kernels import adamw as adamw_kernels
from mpcore.kernels import attention as attention_kernels
from mpcore.kernels import cross_entropy as ce
from mpcore.kernels.activation import (
    geglu,
    geglu_reference,
    relu_squared,
    relu_squared_reference,
    swiglu,
    swiglu_reference,
)
from mpcore.kernels.dropout_add import dropout_add
from mpcore.kernels.fp8_matmul import fp8_matmul, fp8_matmul_reference
from mpcore.kernels.grouped_linear import grouped_linear, grouped_linear_reference
from mpcore.kernels.layer_norm import layer_norm, layer_norm_reference
from mpcore.kernels.linear_cross_entropy import linear_cross_entropy as linear_ce
from mpcore.kernels.linear_cross_entropy import linear_cross_entropy_rows, linear_log_prob
from mpcore.kernels.moe_permute import moe_unpermute, moe_unpermute_reference
from mpcore.kernels.quantize_fp8 import dequantize_fp8, quantize_fp8, quantize_fp8_reference
from mpcore.kernels.rms_norm import rms_norm, rms_norm_reference
from mpcore.kernels.rope import rope, rope_qkv
from mpcore.kernels.router import route, top_k, top_k_reference
from mpcore.layers.module import normal, uniform
from mpcore.layers.moe.experts import Experts
from mpcore.mesh.launch import Launch
from mpcore.pipeline import Pipeline, partition
from mpcore.sharding.declare import cut
from tests.default_recipes import IDS, WIDE, B, D, G, T, X, draw, made, prepared, same, scales, stepped, with_gradient

LOGITS, TARGET, ROWS = draw(6, 7), torch.tensor([0, 6, 2, 3, -100, 5]), draw(7, D, seed=3)
STATS = ce.cross_entropy_stats(LOGITS, TARGET, ce.Loss(7, label_smoothing=0.1), entropy=True)
HEADS = draw(B, T, 4, 6)
ANGLES = mp.RotaryEmbedding(6)(torch.arange(T), WIDE)
QKV = draw(B, T, 4, 6, seed=2)
CU = torch.tensor([0, 2, 5])
WEIGHTS = torch.tensor([1.0, 2, 0, 3, 1, 1], dtype=WIDE)
ROUTE = {"loss_scale": 1.0, "samples": torch.arange(B)}
LOSSES = {"label_smoothing": (0.0, 0.1), "z_loss": (0.0, 0.1), "softcap": (0.0, 1.0), "ignore_index": (-100, None)}
HEAD = {name: LOSSES[name] for name in ("softcap", "ignore_index")}
BIASED = {"bias": (True, False), "init": (None, normal(1.0))}
OUTPUT = {"output_init": (normal(0.5), normal(1.0), {"init": normal(0.5)})}
ADAM = {
    "lr": (1e-3, 1e-2), "betas": ((0.9, 0.999), (0.9, 0.95)), "eps": (1e-8, 1e-3),
    "state_dtype": (None, torch.bfloat16), "masters": (True, False, {"dtype": torch.bfloat16}),
    "seed": (0, 1, {"state_dtype": torch.bfloat16}),
}  # fmt: skip
ATTENTION = {
    "causal": (True, False), "window": (None, 2), "softcap": (None, 1.0), "scale": (6**-0.5, 1.0),
    "cu_seqlens": (None, CU),
}  # fmt: skip
NORM = {"residual": (None, draw(B, T, D, seed=4))}
ROPE = {
    "interleaved": (False, True), "q_weight": (None, None), "k_weight": (None, None),
    "eps": (1e-6, 1e-2, {"q_weight": draw(6), "k_weight": draw(6)}),
}  # fmt: skip
HEAD_OPTIONS = {
    "causal": (True, False), "window": (None, 2), "softcap": (None, 0.1), "rope": (None, mp.RotaryEmbedding(4)),
    **OUTPUT,
}  # fmt: skip
MOE = {
    "activation": ("swiglu", "geglu"), "shared_experts": (0, 1), **OUTPUT, "score": ("softmax", "sigmoid"),
    "normalize": (True, False), "routed_scale": (1.0, 2.0), "groups": (1, 2, {"top_groups": 1}),
    "top_groups": (2, 1, {"groups": 2}), "aux_loss": (None, "sequence"),
    "aux_coefficient": (0.01, 0.1, {"aux_loss": "sequence"}), "z_loss": (0.0, 0.1), "bias_rate": (0.0, 0.1),
    "bias": (False, True), "jitter": (0.0, 0.5), "expert_class": (Experts, BiasedExperts),
    "capacity_factor": (None, 0.3),
}  # fmt: skip
LINEAR_FP8 = (
    quantize_fp8_reference(draw(8, 128, dtype=torch.float32))[0],
    quantize_fp8_reference(draw(8, 128, seed=1, dtype=torch.float32))[0],
)

Defaults = dict[str, tuple]
"""argument: (the default as documented, another value or None if others are refused[, arguments where it counts])."""


def name_of(f: Callable[..., Any]) -> str:
    return f"{f.func.__name__}_reference" if isinstance(f, partial) else f.__name__


TABLE: dict[str, tuple[Callable[..., Any], Defaults]] = {
    "AdamW": (partial(stepped, mp.AdamW), {**ADAM, "weight_decay": (0.01, 0.1)}),
    "Muon": (
        partial(stepped, mp.Muon),
        {
            **ADAM, "weight_decay": (0.1, 0.2), "exclude": ((), None), "momentum": (0.95, 0.9),
            "nesterov": (True, False), "ns_coefficients": ((3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)),
            "ns_steps": (5, 4), "adjust_lr_fn": ("match_rms_adamw", "original"),
            "ns_dtype": (torch.float32, torch.bfloat16), "split_blocks": (True, False),
        },
    ),
    "ColumnParallelLinear": (
        partial(made, mp.ColumnParallelLinear, D, 6),
        {**BIASED, "init": (partial(nn.init.kaiming_uniform_, a=5**0.5), normal(1.0), {"bias": False})},
    ),
    "RowParallelLinear": (partial(made, mp.RowParallelLinear, D, 6), BIASED),
    "GateUpParallelLinear": (partial(made, mp.GateUpParallelLinear, D, 6), BIASED),
    "QKVParallelLinear": (partial(made, mp.QKVParallelLinear, D, 4, 2, 4), BIASED),
    "VocabParallelEmbedding": (
        partial(made, mp.VocabParallelEmbedding, 5, D, x=IDS),
        {"padding_idx": (None, 1), "init": (normal(1.0), normal(0.5))},
    ),
    "ColumnParallelEmbedding": (
        partial(made, mp.layers.ColumnParallelEmbedding, 5, D, x=IDS),
        {"padding_idx": (None, 1), "init": (normal(1.0), normal(0.5))},
    ),
    "PositionEmbedding": (partial(made, mp.PositionEmbedding, T, D), {"init": (normal(1.0), normal(0.5))}),
    "GroupedLinear": (
        partial(made, mp.layers.GroupedLinear, 2, D, 6, ep=mp.Axis(), shard=cut(6, mp.Axis(), 1), x=draw(5, D),
                call={"counts": torch.tensor([3, 2])}),
        {"init": (uniform(D**-0.5), normal(1.0))},
    ),
    "LayerNorm": (partial(made, mp.LayerNorm, D), {"eps": (1e-5, 1e-2), "bias": (True, False)}),
    "RMSNorm": (partial(made, mp.RMSNorm, D), {"eps": (1e-6, 1e-2)}),
    "ParallelMLP": (
        partial(made, mp.ParallelMLP, D, 6), {"activation": ("swiglu", "geglu"), "bias": (True, False), **OUTPUT},
    ),
    "ParallelMoE": (partial(made, mp.ParallelMoE, D, 6, 4, 2, call=ROUTE), MOE),
    "ParallelAttention": (
        partial(made, mp.ParallelAttention, D, 2),
        {
            **HEAD_OPTIONS, "num_kv_heads": (2, 1), "head_dim": (4, 2), "bias": (True, False),
            "output_bias": (True, False), "qk_norm": (False, True), "norm_eps": (1e-6, 0.1, {"qk_norm": True}),
            "alibi": (False, True), "sinks": (False, True), "memory_dim": (None, None),
        },
    ),
    "MultiLatentAttention": (
        partial(
            made, mp.MultiLatentAttention, D, 2, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
        ),
        {**HEAD_OPTIONS, "q_lora_rank": (None, 6), "bias": (False, True), "norm_eps": (1e-6, 0.1)},
    ),
    "TransformerBlock": (
        partial(made, mp.TransformerBlock, nn.Identity(), nn.Identity(), nn.Identity(), nn.Identity(),
                call={"samples": torch.arange(B)}),
        {"dropout": (0.0, 0.5)},
    ),
    "RotaryEmbedding": (
        lambda **options: [
            *mp.RotaryEmbedding(8, **options)(torch.arange(T)),
            mp.RotaryEmbedding(8, **options).interleaved,
        ],
        {
            "base": (10000.0, 500.0), "fraction": (1.0, 0.5), "interleaved": (False, True),
            "scaling": ({}, {"rope_type": "linear", "factor": 2.0}),
        },
    ),
    "LossScaler": (
        scales,
        {
            "scale": (65536.0, 1024.0), "growth_factor": (2.0, 4.0), "backoff_factor": (0.5, 0.25),
            "growth_interval": (2000, 1999),
        },
    ),
    "apply_rope": (partial(with_gradient, mp.apply_rope, HEADS, *ANGLES), {"interleaved": (False, True)}),
    "vocab_parallel_cross_entropy": (
        partial(with_gradient, mp.vocab_parallel_cross_entropy, LOGITS, TARGET),
        {**LOSSES, "vocab_size": (7, None), "reduction": ("mean", "sum"), "token_weight": (None, WEIGHTS)},
    ),
    "linear_cross_entropy": (
        partial(with_gradient, mp.linear_cross_entropy, draw(6, D), ROWS, TARGET),
        {**LOSSES, "reduction": ("mean", "sum"), "token_weight": (None, WEIGHTS)},
    ),
    "vocab_parallel_log_prob": (
        partial(with_gradient, mp.layers.vocab_parallel_log_prob, LOGITS, TARGET), {**HEAD, "vocab_size": (7, None)},
    ),
    "linear_log_prob (layer)": (partial(with_gradient, mp.layers.linear_log_prob, draw(6, D), ROWS, TARGET), HEAD),
    "prepare": (prepared, {"seed": (0, 1), "micro_batches": (1, 2)}),
    "partition": (lambda **options: partition([1.0] * 6, 3, **options), {"first": (0.0, 2.0), "last": (0.0, 2.0)}),
    "shard_sequence": (
        lambda **options: mp.shard_sequence(draw(4, 4), mp.Axis(2, 0), "zigzag", **options), {"dim": (-1, 0)},
    ),
    "cross_entropy_stats": (
        partial(with_gradient, ce.cross_entropy_stats, LOGITS, TARGET, ce.Loss(7)), {"entropy": (False, True)},
    ),
    "cross_entropy_backward": (
        partial(ce.cross_entropy_backward, LOGITS, TARGET, STATS, ce.Loss(7)),
        {name: (None, draw(6, seed=seed)) for seed, name in enumerate(("dloss", "dlog_prob", "dentropy"))},
    ),
    "Loss": (
        lambda **terms: with_gradient(linear_ce, draw(6, D), ROWS, TARGET, WEIGHTS, ce.Loss(7, **terms)),
        {**LOSSES, "start": (0, 1)},
    ),
    **{
        name_of(f): (partial(with_gradient, f, draw(6, D), ROWS, TARGET), {"loss": (None, ce.Loss(7, softcap=1.0))})
        for f in (linear_cross_entropy_rows, linear_log_prob)
    },
    "dropout_add": (
        partial(with_gradient, dropout_add, draw(T, T, D), None, 0.5, samples=torch.arange(T)),
        {
            "key": (0, 1), "samples": (torch.arange(T), torch.arange(1, T + 1)),
            "tokens": (torch.arange(T), torch.arange(1, T + 1)), "first_feature": (0, 4),
            "sequence_dim": (1, 0),
        },
    ),
    **{
        name_of(f): (partial(with_gradient, f, X), {})
        for f in (swiglu, swiglu_reference, relu_squared, relu_squared_reference)
    },
    **{
        name_of(f): (partial(with_gradient, f, X), {"approximate": ("tanh", "none")})
        for f in (geglu, geglu_reference)
    },
    **{
        name_of(f): (partial(with_gradient, f, X, G, None), {"eps": (1e-5, 1e-2), **NORM})
        for f in (layer_norm, layer_norm_reference)
    },
    **{
        name_of(f): (partial(with_gradient, f, X, G), {"eps": (1e-6, 1e-2), **NORM})
        for f in (rms_norm, rms_norm_reference)
    },
    **{
        name_of(f): (
            partial(with_gradient, f, draw(5, D), draw(2, 6, D), torch.tensor([3, 2])),
            {},
        )
        for f in (grouped_linear, grouped_linear_reference)
    },
    **{
        name_of(f): (
            partial(with_gradient, f, draw(4, D), torch.tensor([[0, 1], [2, 3]])),
            {"weight": (torch.ones(2, 2, dtype=WIDE), draw(2, 2))},
        )
        for f in (moe_unpermute, moe_unpermute_reference)
    },
    "rope": (partial(with_gradient, rope, HEADS, QKV, *ANGLES), ROPE),
    "rope_qkv": (partial(with_gradient, rope_qkv, draw(B, T, 36), 4, 1, *ANGLES), ROPE),
    **{
        name_of(f): (
            partial(
                lambda f, **options: [
                    None if q is None else dequantize_fp8(q) for q in f(draw(200, 130, dtype=torch.float32), **options)
                ],
                f,
            ),
            {"square": (False, True), "rows": (True, False), "columns": (False, True)},
        )
        for f in (quantize_fp8, quantize_fp8_reference)
    },
    **{
        name_of(f): (partial(f, *LINEAR_FP8), {"dtype": (torch.bfloat16, torch.float32)})
        for f in (fp8_matmul, fp8_matmul_reference)
    },
    "dequantize_fp8": (partial(dequantize_fp8, LINEAR_FP8[0]), {"dtype": (torch.float32, torch.float64)}),
    **{
        name: (
            partial(with_gradient, getattr(attention_kernels, name), *(draw(1, T, 2, 6, seed=i) for i in range(3))),
            ATTENTION,
        )
        for name in ("attention", "attention_reference")
    },
    "key_bounds": (
        lambda **options: attention_kernels.key_bounds(T, **options),
        {"causal": (True, False), "window": (None, 2), "cu_seqlens": (None, CU)},
    ),
    **{
        name_of(f): (partial(f, draw(5, D), 2), {"bias": (torch.zeros(D, dtype=WIDE), 9 * draw(D))})
        for f in (top_k, top_k_reference)
    },
    "route": (
        lambda **options: route(draw(5, D), draw(6, D, seed=1), 2, **options)[3],
        {"bias": (torch.zeros(6, dtype=WIDE), 9 * draw(6)), "score": ("softmax", "sigmoid"), "normalize": (True, False),
         "scale": (1.0, 2.0), "groups": ((1, 1), (3, 1)),
         "experts": (route(draw(5, D), draw(6, D, seed=1), 2)[2], torch.tensor([[0, 1]] * 5))},
    ),
}  # fmt: skip

# Arguments whose default says where or how, and not what: a layout, a device, a storage, a speed. Laws of layouts have
# them (tests/test_data_parallel.py, tests/test_mesh.py, tests/test_offload.py, tests/test_recompute.py).
WHERE = {
    "impl", "tp", "cp", "ep", "etp", "data", "mesh", "axes", "device", "dispatch", "gather_output", "regather", "unit",
    "sharded_features", "input_is_parallel", "blocks", "shard", "used_share", "pin_memory", "min_bytes", "ahead",
    "bucket_bytes", "keep", "in_place", "out", "out_dtype", "bounds", "trace", "parameters", "groups",
}  # fmt: skip
# What others take where an argument is left out; axes, which are of size 1 then, are left out.
SIGNATURES: dict[Callable[..., Any], dict[str, Any]] = {
    experimental.LocalUpdates: {
        "every": 100, "lr": None, "momentum": None, "nesterov": True, "fragments": 1, "listen": None, "join": (),
        "steps": 0, "folder": None, "token": None, "data": "", "rule": None, "wait": None, "staleness": None,
        "dynamic": True, "timeout": 60.0, "replicas": 1, "update_dtype": "same", "overlap": False,
        "defaults": None, "should_stop": None,
    },
    experimental.DiLoCo: {"every": 100, "lr": 0.7, "momentum": 0.9, "nesterov": True, "fragments": 1, "blocks": None},
    mp.Zero: {"stage": 1, "replicate": 1, "param_dtype": None, "reduce_dtype": torch.float32},
    mp.Precision: {"dtype": "float32", "fp8": False, "first_loss_scale": 65536.0, "autocast": False},
    mp.Recompute: {"kind": "full", "every": 1, "budget": None, "example": None, "preserve_rng_state": True},
    mp.Offload: {"optimizer": False, "activations": False, "parameters": False}, mp.Compile: {"backend": "inductor"},
    mp.prepare: {
        "seed": 0, "initialize": None, "micro_batches": 1, "schedule": "1f1b", "data": mp.Zero(1),
        "precision": "float32", "recompute": "none", "offload": mp.Offload(), "compile": None, "observers": (),
        "overlap": False, "trace": False,
    },
    mp.Axis: {"size": 1, "rank": 0, "group": None, "name": "", "levels": None, "role": "", "sums": None},
    mp.build_mesh: {
        **dict.fromkeys(("tp", "cp", "pp", "ep", "worlds"), 1),
        **dict.fromkeys(("dp", "device_type", "cp_inner", "etp", "timeout")),
    },
    Colwise: {"blocks": 1, "gather_output": False, "unit": None}, LocalSizes: {"kept": ()},
    Replicate: {"partial_gradient": False},
    mp.suggest_plan: {"tp": 2, "ep": 1, "example": None, "sequence_parallel": False},
    mp.simulate: {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": None, "ranks": None, "mesh": None},
    mp.training.StepResult: {"repeats": 0},
    add_lora: {
        "rank": 8, "alpha": 16, "targets": "all-linear", "dropout": 0.0, "seed": 0, "rank_pattern": None,
        "alpha_pattern": None, "use_rslora": False,
    },
    mp.parallelize: {
        "plan": "auto", "etp": None, "data": None, "context": "zigzag", "check": True, "example": None, "skip": (),
        "strict": False,
    },
    Pipeline: {"schedule": "1f1b", "trace": False, "after_backward": None},
    mp.parallel.shard_data_parallel: {
        "blocks": (), "zero": 1, "replicate": 1, "param_dtype": None, "reduce_dtype": torch.float32,
    },
    mp.parallel.recompute: {
        "kind": "full", "every": 1, "budget": None, "example": None, "axes": (), "preserve_rng_state": True,
    },
    mp.parallel.offload_activations: {"pin_memory": None, "min_bytes": 4096, "ahead": 4},
    mp.parallel.offload_optimizer: {"pin_memory": None, "bucket_bytes": 64 * 2**20},
    mp.parallel.offload_parameters: {"optimizer": None, "keep": 2, "pin_memory": None},
    mp.gradients.grad_norm: {"p": 2.0}, mp.decay_groups: {"exclude": ()},
    mp.unshard_sequence: {"dim": -1, "length": None}, mp.gradients.drop_gradients: {"parameters": None},
    mp.from_pretrained: {"plan": "auto", "defer": False, "dtype": None, "model_class": None},
    mp.save_pretrained: {"shard_bytes": 5 * 10**9}, mp.pipeline_stages: {"schedule": "1f1b", "example": None},
    Launch: {
        **dict.fromkeys(("rank", "local_rank", "port", "node_gpus"), 0), "world_size": 1, "local_size": 1,
        "address": "", "launcher": "", "job": "", "keeps_store": False,
    },
}  # fmt: skip
# The defaults of these are held by tests of their own, or reach one in the table.
ELSEWHERE = {call.__name__ for call in SIGNATURES} | {
    "AdamWState", "Experts", "Mesh", "Router", "VocabParallelCrossEntropy", "adamw_foreach", "attention_backward",
}  # fmt: skip


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__name__)
def test_signatures_have_the_documented_defaults(call):
    found = {name: value for name, value in defaults(call).items() if not isinstance(value, mp.Axis | mp.Mesh)}
    assert found == SIGNATURES[call]
    assert {name: type(value) for name, value in found.items()} == {k: type(v) for k, v in SIGNATURES[call].items()}


@pytest.mark.parametrize("name", TABLE)
def test_a_default_is_what_is_documented_and_another_value_differs(name):
    call, arguments = TABLE[name]
    for argument, (explicit, other, *also) in arguments.items():
        where = also[0] if also else {}
        default = call(**where)
        assert same(default, call(**{**where, argument: explicit})), f"{argument}: not the documented default"
        if other is not None:
            assert not same(default, call(**{**where, argument: other})), f"{argument}: another value changes nothing"


def defaults(call: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: p.default
        for name, p in inspect.signature(call).parameters.items()
        if p.default is not inspect.Parameter.empty
    }


def public() -> dict[str, Callable[..., Any]]:
    """Every public name of mpcore and of its kernels that has defaults."""
    found = {name: getattr(mp, name) for name in mp.__all__}
    folder = Path(adamw_kernels.__file__).parent
    files = [path.stem for path in sorted(folder.glob("[a-z]*.py"))]
    for module in (*(importlib.import_module(f"mpcore.kernels.{stem}") for stem in files), attention_kernels):
        own = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
        for name, f in own.items():
            package, _, file = f.__module__.rpartition(".")
            if package.startswith("mpcore.kernels") and not file.startswith("_"):
                found.setdefault(name, f)
    kept = {}
    for name, value in found.items():
        try:
            if callable(value) and defaults(value):
                kept[name] = value
        except (TypeError, ValueError):  # a typed dict, or an alias of a type
            continue
    return kept


def test_every_public_default_is_in_the_table():
    missing = [
        f"{name}({argument}={value})"
        for name, call in public().items()
        if name not in ELSEWHERE
        for argument, value in defaults(call).items()
        if argument not in WHERE and argument not in TABLE.get(name, (None, {}))[1]
    ]
    assert missing == []
