"""Conversions of another trainer's values to fields of a run.toml, by the names of `table.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Values = dict[str, Any]
Conversion = Callable[..., Any]
"""From a value, the settings of the file, and the fields so far."""


class UnknownValueError(ValueError):
    """A value that has no counterpart."""


def _choice(**known: Any) -> Conversion:
    def convert(value: Any, *_: Values) -> Any:
        if (found := known.get(str(value).lower().replace("-", "_"))) is None:
            raise UnknownValueError("this value has no counterpart")
        return found

    return convert


def _whole(least: int) -> Conversion:
    def convert(value: Any, *_: Values) -> int:
        if not isinstance(value, (int, float)) or not least <= value < 2**63 or value != int(value):
            raise UnknownValueError(f"it must be a whole number, at least {least}")
        return int(value)

    return convert


def _if_on(made: Any, otherwise: Any = None) -> Conversion:
    def convert(value: Any, *_: Values) -> Any:
        if value not in (True, False):
            raise UnknownValueError("it must be true or false")
        return made if value else otherwise

    return convert


def _float(value: Any, *_: Values) -> float:
    return float(value)


def _where(key: str, convert: Conversion = _float) -> Conversion:
    """Return a conversion for where another key is set; elsewhere the setting has no meaning."""
    return lambda value, values, _: convert(value) if values.get(key) else None


def _pair(value: Any, *_: Values) -> list[float]:
    first, second = value.split(",") if isinstance(value, str) else value
    return [_float(first), _float(second)]


def _ramp(value: Any, *_: Values) -> list[int]:
    start, more, samples = value if isinstance(value, list) else value.strip("[]").split()
    return [int(start), int(more), int(samples)]


def _dropout(value: Any, values: Values, _: Values) -> float:
    if _float(value) and (values.get("context-parallel-size", 1) != 1 or values.get("multi-latent-attention")):
        raise UnknownValueError("the example drops no attention weights with cp or latent attention")
    return _float(value)


def _batch(value: Any, *_: Values) -> int:
    if not isinstance(value, int) or value < 1:
        raise UnknownValueError("set global_batch by hand")
    return value


def _of_ranks(value: Any, values: Values, run: Values) -> int:
    """Return torchtitan's global batch, by default the local batch times the data ranks."""
    local = values.get("training.local_batch_size", values.get("training.batch_size", 8))
    shards, copies = (
        values.get(f"parallelism.data_parallel_{x}_degree", d) for x, d in (("shard", -1), ("replicate", 1))
    )
    return _batch(value if value > 0 else local * shards * copies)


def _fsdp(value: Any, values: Values, run: Values) -> int:
    if value == 1 and run.get("cp", 1) == 1:
        return 0
    by_default = "never" if run.get("pp", 1) > 1 else "always"
    policy = values.get("parallelism.fsdp_reshard_after_forward", "default")
    return _choice(never=2, always=3)(by_default if policy == "default" else policy)


def _held_out(value: Any, *_: Values) -> float:
    parts = [float(each) for each in str(value).split(",")]
    return round(1 - parts[0] / sum(parts), 6)


BF16, FP16 = "bfloat16", "float16"
FLAGS: dict[str, Any] = {
    "flag": _if_on(True, False), "false": _if_on(False, True), "int": _if_on(1, 0), "three": _if_on(3),
    "rope": _if_on("rope"), "swiglu": _if_on("swiglu"), "squared_relu": _if_on("relu_squared"),
    "bfloat16": _if_on(BF16), "float16": _if_on(FP16), "float32": _if_on("float32"), "full": _if_on("full"),
    "optimizer": _if_on(["optimizer"]), "inductor": _if_on("inductor"),
    "validation": lambda v, values, _: _whole(1)(values.get("validation.freq", 10)) if v else 0,
    "saving": lambda v, values, _: _whole(1)(values.get("checkpoint.interval", 500)) if v else 0,
}  # fmt: skip
"""Conversions of settings that are on or off."""

CONVERSIONS: dict[str, Conversion] = {
    **FLAGS,
    "": _whole(1),
    "count": _whole(0),
    "warmup": lambda v, _, run: None if v == 0 and {"warmup_share", "warmup_samples"} & {*run} else _whole(0)(v),
    "stages": lambda v, *_: max(_whole(0)(v), 1),
    "float": _float,
    "lowest": lambda v, _, run: run.get("lr") if v == "lr" else _float(v),
    "strategy": _where("use-megatron-fsdp", _choice(no_shard=0, optim=1, optim_grads=2, optim_grads_params=3)),
    "fsdp": _fsdp,
    "replicas": lambda v, values, _: (
        None if values.get("parallelism.data_parallel_shard_degree") == 1 else _whole(1)(v)
    ),
    "layer_eps": lambda v, _, run: _float(v) if run["norm"] == "layer" else None,
    "rms_eps": lambda v, _, run: _float(v) if run["norm"] == "rms" else None,
    "etp": lambda v, _, run: _whole(1)(v) if run.get("ep", 1) > 1 else None,
    "above_1": lambda v, *_: True if v > 1 else None,
    "local": lambda v, values, _: _whole(1)(
        v if values.get("parallelism.pipeline_parallel_degree", 1) == 1
        else values.get("parallelism.pipeline_parallel_microbatch_size", 1)
    ),
    "batch": _batch,
    "of_ranks": _of_ranks,
    "accumulation": lambda v, values, run: _batch(v * run["micro_batch"] * values["parallelism.dp"]),
    "groups": _where("group-query-attention", _whole(1)),
    "positions": _choice(rope="rope", rotary="rope", learned_absolute="learned", learned="learned"),
    "norm": _choice(layernorm="layer", rmsnorm="rms"),
    "schedule": _choice(cosine="cosine", linear="linear"),
    "decay": _choice(warmupdecaylr="linear", warmupcosinelr="cosine"),
    "cos_min": lambda v, values, run: run["lr"] * _float(values.get("scheduler.params.cos_min_ratio", 0.0001))
    if v == "WarmupCosineLR" else 0.0 if v == "WarmupDecayLR" else None,
    "pipeline": _choice(**{"1f1b": "1f1b", "gpipe": "gpipe", "afab": "gpipe", "interleaved1f1b": "interleaved",
                           "zbvzerobubble": "zbv", "dualpipev": "dualpipev"}),
    "adam": _choice(adam="adamw", adamw="adamw"),
    "adamw": _choice(adamw="adamw"),
    "dtype": _choice(bfloat16=BF16, bf16=BF16, float16=FP16, fp16=FP16, float32="float32", fp32="float32"),
    "act": lambda v, values, _: _choice(
        gelu="gelu_tanh" if values.get("bias_gelu_fusion") else "gelu", swiglu="swiglu", geglu="geglu", relu="relu",
        silu="silu",
    )(v),
    "hidden_act": _choice(silu="swiglu"),
    "recompute": _choice(full="full", selective="selective", none="none"),
    "cpu": _choice(cpu=["optimizer"], none=["none"]),
    "asynchronous": _choice(disabled=False, async_with_pinned_mem=True, **{"async": True}),
    "validations": lambda v, *_: _whole(0)(max(v, 0)),
    "batches": lambda v, values, _: None if "rampup-batch-size" in values else v // values["global-batch-size"],
    "weights": _dropout,
    "of_lr": lambda v, _, run: _float(v) / run["lr"],
    "factor": lambda v, _, run: _float(v) * run["lr"],
    "rest": _held_out,
    "first": lambda v, *_: [_float(v), 0.95],
    "second": lambda v, _, run: [run.get("betas", [0.9])[0], _float(v)],
    "pair": _pair,
    "pair_with_optimizer": _where("optimizer.type", _pair),
    "with_optimizer": _where("optimizer.type"),
    "with_scheduler": _where("scheduler.type", _whole(0)),
    "decay_lr": lambda v, values, _: (  # the default counts for one schedule alone
        _float(v) if "scheduler.params.warmup_max_lr" in values or values.get("scheduler.type") == "WarmupDecayLR"
        else None
    ),
    "with_fp16": _where("fp16"),
    "with_mtp": _where("mtp-num-layers"),
    "power": _where("fp16.enabled", lambda v: 2.0 ** _whole(0)(v)),
    "after_warmup": lambda v, _, run: _whole(1)(v) + run.get("warmup", 0),
    "ramp": _ramp,
    "words": lambda v, *_: " ".join(map(str, v) if isinstance(v, list) else [str(v)]).split() or None,
    "coefficient": lambda v, _, run: None if run.get("moe.aux_loss", "none") == "none" else _float(v),
    "moe": _where("num-experts", _whole(1)),
    "moe_float": _where("num-experts"),
    "balance": _where("num-experts", _choice(
        aux_loss="micro_batch", seq_aux_loss="sequence", global_aux_loss="global", none="none")),
    "reduce_scatter": lambda v, *_: _choice(reduce_scatter=1, all_reduce=0)(v) == 1,
    "flavor": lambda v, values, _: _choice(
        llama3_1b="llama3-1b", llama3_8b="llama3-8b", llama3_70b="llama3-70b", llama3_405b="llama3-405b"
    )(f"{values.get('model.name', 'llama3')}_{v}"),
}  # fmt: skip
