"""The example's GPT in the names of Hugging Face: `mpcore convert examples.gpt.hf:SPEC --from-hf DIR --to CKPT`."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from examples.gpt.tokenizer import ByteTokenizer
from mpcore.interop import hugging_face
from mpcore.interop.hugging_face import FOLDER, ModelSpec, carried_by_checkpoint


def describe(config: GPTConfig) -> dict[str, Any]:
    """Return all fields of a configuration, with every default spelled out."""
    c, values = config, dataclasses.asdict(config)
    qkv, output, mlp = c.biases
    values |= {"qkv_bias": qkv, "output_bias": output, "mlp_bias": mlp, "norm_eps": c.eps, "d_ff": c.hidden}
    values |= {"kv_heads": c.kv_heads or c.heads, "head_dim": c.head_width}
    if c.moe is not None:
        values["moe"] = dataclasses.asdict(c.moe) | {
            "d_ff": c.moe.d_ff or c.hidden,
            "top_groups": c.moe.top_groups or c.moe.groups,
            "normalize": c.moe.top_k > 1 if c.moe.normalize is None else c.moe.normalize,
            "aux_coefficient": c.moe.aux_coefficient if c.moe.aux_loss else 0.0,
            "bias": c.moe.bias or (c.moe.bias is None and c.moe.bias_rate > 0),
        }
    for name in ("bias", "attention_dropout", "mtp_weight"):  # three biases above replace it; exports have no others
        del values[name]
    return values


def shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of each parameter."""
    return {name: tuple(p.shape) for name, p in GPT(config, device="meta").named_parameters()}


SPEC = ModelSpec(GPTConfig, describe, shapes, further=True)
open_checkpoint = partial(hugging_face.open_checkpoint, spec=SPEC)


def tokenizer_of_checkpoint(path: str | os.PathLike[str]) -> Path | str:
    """Find the tokenizer.json that is saved beside a checkpoint; "byte" if the model was trained on bytes.

    Raises:
        ValueError: if the checkpoint can't be read, or names no tokenizer and its vocabulary isn't that of bytes.
    """
    manifest, files, config = open_checkpoint(path)
    if "tokenizer.json" in carried_by_checkpoint(path).files:
        return files.folder / FOLDER / "tokenizer.json"
    size = config.vocab_size
    if manifest.config.get("tokenizer") != ByteTokenizer.fingerprint and size != ByteTokenizer.vocab_size:
        raise ValueError(
            f"{path} carries no tokenizer, and its vocabulary of {size} is not the {ByteTokenizer.vocab_size} of "
            f"bytes: --tokenizer names the one that the model was trained with"
        )
    return "byte"
