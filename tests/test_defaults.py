"""Each public function has the defaults that its documentation names.

The defaults below are written down a second time, from the documentation: a signature that says something else fails.
Where a layer takes an option through others' keywords, its weights, output and gradients without the option are those
with the documented value, and another value gives others.
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
from torch import Tensor, nn

import mpcore as mp
from mpcore import experimental
from mpcore.experimental.biased_experts import BiasedExperts
from mpcore.interop.lora import add_lora
from mpcore.interop.parallelize import Colwise, LocalSizes, Replicate
from mpcore.kernels import adamw as adamw_kernels
from mpcore.kernels import attention as attention_kernels
from mpcore.layers.module import normal, uniform
from mpcore.layers.moe.experts import Experts
from mpcore.mesh.launch import Launch
from mpcore.pipeline import Pipeline, partition
from mpcore.sharding.declare import cut

B, T, D, WIDE = 2, 5, 8, torch.float64
IDS = torch.tensor([[0, 3, 1, 4, 2], [2, 2, 0, 1, 3]])


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=WIDE)


X = draw(B, T, D)


def made(kind: Callable[..., nn.Module], *args: Any, x: Tensor = X, call: dict | None = None, **options: Any) -> Any:
    """A layer's weights, its output and their gradients, in training."""
    torch.manual_seed(5)
    layer = kind(*args, **options).to(WIDE)
    mp.layers.seed_dropout(layer, 7)
    y = layer(x, **(call or {}))
    y.square().sum().backward()
    return [*layer.parameters(), y, *(p.grad for p in layer.parameters() if p.grad is not None)]


def stepped(state_dtype: torch.dtype | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """Weights after three steps of Muon on two fused matrices and their biases; the last gradient is small."""
    torch.manual_seed(5)
    model = nn.Sequential(mp.GateUpParallelLinear(6, 2)).to(dtype)
    optimizer = mp.Muon(model, state_dtype=state_dtype, **options)
    for size in (1.0, 0.5, 1e-7):
        for p in model.parameters():
            p.grad = (size * draw(*p.shape)).to(dtype)
        optimizer.step()
    return list(model.parameters())


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether the tensors are the same, in float64 to rounding."""
    alike = [x.shape == y.shape for x, y in zip(a, b, strict=False)]
    return (
        len(a) == len(b)
        and all(alike)
        and all(
            torch.allclose(x, y, rtol=1e-12, atol=1e-15) if x.dtype == WIDE else torch.equal(x, y)
            for x, y in zip(a, b, strict=True)
        )
    )


INIT, OUTPUT = {"init": (None, normal(1.0))}, {"output_init": (normal(0.5), normal(1.0), {"init": normal(0.5)})}
KAIMING = {"init": (partial(nn.init.kaiming_uniform_, a=5**0.5), normal(1.0), {"bias": False})}
TABLE_INIT = {"init": (normal(1.0), normal(0.5))}
HEADS = {
    "causal": (True, False), "window": (None, 2), "softcap": (None, 0.1), "rope": (None, mp.RotaryEmbedding(4)),
    **OUTPUT,
}  # fmt: skip
MOE = {
    **OUTPUT, "score": ("softmax", "sigmoid"), "normalize": (True, False), "routed_scale": (1.0, 2.0),
    "groups": (1, 2, {"top_groups": 1}), "top_groups": (2, 1, {"groups": 2}), "aux_loss": (None, "sequence"),
    "aux_coefficient": (0.01, 0.1, {"aux_loss": "sequence"}), "z_loss": (0.0, 0.1), "bias_rate": (0.0, 0.1),
    "bias": (False, True), "jitter": (0.0, 0.5), "expert_class": (Experts, BiasedExperts),
    "capacity_factor": (None, 0.3),
}  # fmt: skip
LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
GROUPED = {"ep": mp.Axis(), "shard": cut(6, mp.Axis(), 1), "x": draw(5, D), "call": {"counts": torch.tensor([3, 2])}}
ROUTE = {"loss_scale": 1.0, "samples": torch.arange(B)}
# How to make a layer, and of each option the default as documented, another value, and options where it counts.
OPTIONS: dict[str, tuple[Callable[..., Any], dict[str, tuple]]] = {
    "Muon": (stepped, {
        "state_dtype": (None, torch.bfloat16), "masters": (True, False, {"dtype": torch.bfloat16}),
        "seed": (0, 1, {"state_dtype": torch.bfloat16}), "ns_dtype": (torch.float32, torch.bfloat16),
    }),
    "ColumnParallelLinear": (partial(made, mp.ColumnParallelLinear, D, 6), KAIMING),
    "RowParallelLinear": (partial(made, mp.RowParallelLinear, D, 6), INIT),
    "GateUpParallelLinear": (partial(made, mp.GateUpParallelLinear, D, 6), INIT),
    "QKVParallelLinear": (partial(made, mp.QKVParallelLinear, D, 4, 2, 4), INIT),
    "VocabParallelEmbedding": (partial(made, mp.VocabParallelEmbedding, 5, D, x=IDS), TABLE_INIT),
    "ColumnParallelEmbedding": (partial(made, mp.layers.ColumnParallelEmbedding, 5, D, x=IDS), TABLE_INIT),
    "PositionEmbedding": (partial(made, mp.PositionEmbedding, T, D), TABLE_INIT),
    "GroupedLinear": (
        partial(made, mp.layers.GroupedLinear, 2, D, 6, **GROUPED), {"init": (uniform(D**-0.5), normal(1.0))},
    ),
    "ParallelMLP": (partial(made, mp.ParallelMLP, D, 6), OUTPUT),
    "ParallelMoE": (partial(made, mp.ParallelMoE, D, 6, 4, 2, call=ROUTE), MOE),
    "ParallelAttention": (partial(made, mp.ParallelAttention, D, 2), HEADS | {
        "num_kv_heads": (2, 1), "head_dim": (4, 2), "output_bias": (True, False),
    }),
    "MultiLatentAttention": (partial(made, mp.MultiLatentAttention, D, 2, **LATENT), HEADS),
}  # fmt: skip

# Arguments whose default says where or how, and not what: a layout, a device, a storage, a speed. Laws of layouts have
# them (tests/test_data_parallel.py, tests/test_mesh.py, tests/test_offload.py, tests/test_recompute.py).
WHERE = {
    "impl", "tp", "cp", "ep", "etp", "data", "mesh", "axes", "device", "dispatch", "gather_output", "regather", "unit",
    "sharded_features", "input_is_parallel", "blocks", "shard", "used_share", "pin_memory", "min_bytes", "ahead",
    "bucket_bytes", "keep", "in_place", "out", "out_dtype", "bounds", "trace", "parameters",
}  # fmt: skip
# What others take where an argument is left out; axes, which are of size 1 then, are left out.
SIGNATURES: dict[Callable[..., Any], dict[str, Any]] = {
    mp.optim.LossScaler: {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000},
    mp.layers.vocab_parallel_log_prob: {"vocab_size": None, "ignore_index": -100, "softcap": 0.0},
    partition: {"first": 0.0, "last": 0.0},
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
        "address": "", "launcher": "", "job": "", "keeps_store": False, "one_host": False,
    },
}  # fmt: skip
LOSS = {"ignore_index": -100, "softcap": 0.0, "label_smoothing": 0.0, "z_loss": 0.0}
MEAN = {"token_weight": None, "reduction": "mean"}
MASK = {"causal": True, "window": None, "cu_seqlens": None}
ROPE = {"interleaved": False, "q_weight": None, "k_weight": None, "eps": 1e-6}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
# The defaults of all public names of mpcore and of its kernels, except those in `WHERE`.
DOCUMENTED: dict[str, dict[str, Any]] = {
    "AdamW": {**ADAM, "weight_decay": 0.01, "state_dtype": None, "masters": True, "seed": 0, "groups": None},
    "Muon": {
        **ADAM, "weight_decay": 0.1, "exclude": (), "split_blocks": True, "momentum": 0.95, "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw", "ns_dtype": None,
    },
    **{f"{kind}ParallelLinear": {"bias": True} for kind in ("Column", "Row", "GateUp", "QKV")},
    "VocabParallelEmbedding": {"padding_idx": None}, "LayerNorm": {"eps": 1e-5, "bias": True}, "RMSNorm": {"eps": 1e-6},
    "MultiLatentAttention": {"q_lora_rank": None, "bias": False, "norm_eps": 1e-6},
    "ParallelAttention": {
        "num_kv_heads": None, "head_dim": None, "bias": True, "output_bias": None, "qk_norm": False, "norm_eps": 1e-6,
        "alibi": False, "sinks": False, "memory_dim": None,
    },
    "ParallelMLP": {"activation": "swiglu", "bias": True, "output_init": None},
    "ParallelMoE": {"activation": "swiglu", "shared_experts": 0, "expert_class": Experts, "output_init": None},
    "RotaryEmbedding": {"base": 10000.0, "fraction": 1.0, "scaling": None, "interleaved": False},
    "TransformerBlock": {"dropout": 0.0}, "apply_rope": {"interleaved": False}, "shard_sequence": {"dim": -1},
    "linear_cross_entropy": {"label_smoothing": 0.0, "z_loss": 0.0, **MEAN},
    "vocab_parallel_cross_entropy": {"vocab_size": None, **LOSS, **MEAN}, "Loss": {"start": 0, **LOSS},
    "geglu": {"approximate": "tanh"}, "cross_entropy_stats": {"entropy": False},
    "cross_entropy_backward": {"dloss": None, "dlog_prob": None, "dentropy": None},
    "dropout_add": {"key": 0, "samples": None, "tokens": None, "first_feature": 0, "sequence_dim": 1},
    "dequantize_fp8": {"dtype": torch.float32}, "quantize_fp8": {"square": False, "rows": True, "columns": False},
    "fp8_matmul": {"dtype": torch.bfloat16}, "fp8_matmul_reference": {"dtype": torch.bfloat16},
    "layer_norm": {"eps": 1e-5, "residual": None}, "rms_norm": {"eps": 1e-6, "residual": None},
    "linear_cross_entropy_rows": {"loss": None}, "linear_log_prob": {"loss": None},
    "moe_unpermute": {"weight": None}, "moe_unpermute_reference": {"weight": None}, "rope": ROPE, "rope_qkv": ROPE,
    "top_k": {"bias": None}, "top_k_reference": {"bias": None}, "key_bounds": MASK,
    "route": {"bias": None, "score": "softmax", "normalize": True, "scale": 1.0, "groups": (1, 1), "experts": None},
    "attention": {**MASK, "scale": None, "softcap": None},
}  # fmt: skip

# The defaults of these are held by tests of their own, or are in `SIGNATURES`.
ELSEWHERE = {call.__name__ for call in SIGNATURES} | {"AdamWState", "Mesh", "adamw_foreach", "attention_backward"}


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__name__)
def test_signatures_have_the_documented_defaults(call):
    found = {name: value for name, value in defaults(call).items() if not isinstance(value, mp.Axis | mp.Mesh)}
    assert found == SIGNATURES[call]
    assert {name: type(value) for name, value in found.items()} == {k: type(v) for k, v in SIGNATURES[call].items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_what_is_documented_and_another_value_differs(name):
    call, arguments = OPTIONS[name]
    for argument, (explicit, other, *also) in arguments.items():
        where = also[0] if also else {}
        default = call(**where)
        assert same(default, call(**{**where, argument: explicit})), f"{argument}: not the documented default"
        assert not same(default, call(**{**where, argument: other})), f"{argument}: another value changes nothing"


def defaults(call: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(call).parameters.items()
    return {name: p.default for name, p in parameters if p.default is not inspect.Parameter.empty}


def public() -> dict[str, Callable[..., Any]]:
    """Every public name of mpcore and of its kernels that can be called."""
    found = {name: getattr(mp, name) for name in mp.__all__}
    files = [path.stem for path in sorted(Path(adamw_kernels.__file__).parent.glob("[a-z]*.py"))]
    for module in (*(importlib.import_module(f"mpcore.kernels.{stem}") for stem in files), attention_kernels):
        for name, f in vars(module).items():
            package, _, file = getattr(f, "__module__", "").rpartition(".")
            if callable(f) and name[0] != "_" and package.startswith("mpcore.kernels") and file[0] != "_":
                found.setdefault(name, f)
    return {name: value for name, value in found.items() if callable(value)}


def test_every_public_default_is_documented():
    found = {}
    for name, call in public().items():
        try:
            held = {k: v for k, v in defaults(call).items() if k not in WHERE and not isinstance(v, mp.Axis | mp.Mesh)}
        except (TypeError, ValueError):  # a typed dict, or an alias of a type
            continue
        if held and name not in ELSEWHERE:
            found[name] = held
    assert found == DOCUMENTED
