"""Measure the memory of loading and saving a folder of transformers: `python -m tests.pretrained_memory`.

A Llama with random bfloat16 weights is saved by transformers, and `from_pretrained` and `save_pretrained` run on tp
ranks. The peak is VmHWM of /proc/self/status, less what the rank held before; shards are the bytes of its parameters.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from mpcore import from_pretrained, save_pretrained
from tests.pool import mesh, start_pool


def memory() -> tuple[int, int]:
    """The most memory that this process held since `forget_peak`, and what it holds now, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    peak, now = (1024 * int(lines[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    return peak, now


def forget_peak() -> int:
    """Begin to measure anew; returns what the process holds."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory()[1]


def config(layers: int, width: int = 2048) -> Any:
    """A Llama whose largest tensor is its embedding."""
    return transformers.LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip


def make(folder: str, layers: int) -> tuple[int, int]:
    """Write the folder; returns the bytes of its tensors, and of the largest."""
    transformers.logging.disable_progress_bar()
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.LlamaForCausalLM(config(layers))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="500MB")
    sizes = [p.nbytes for p in model.parameters()]
    return sum(sizes), max(sizes)


def measure(folder: str, out: str) -> dict[str, int]:
    """The peaks of one rank, in bytes above its shards."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    layout = mesh(tp=torch.distributed.get_world_size())
    before = forget_peak()
    model = from_pretrained(folder, layout, check=False)
    shards = sum(p.nbytes for p in model.parameters())
    loaded = memory()[0] - before
    before = forget_peak()
    save_pretrained(model, out, layout)
    return {"shards": shards, "from_pretrained": loaded - shards, "save_pretrained": memory()[0] - before}


def main() -> None:
    """Print one line for each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=15, help="of 121 MB each (default: 15, 2 GB in all)")
    parser.add_argument("--tp", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        maker, pool = start_pool(1), start_pool(given.tp)
        try:
            total, largest = maker(1, make, f"{folder}/in", given.layers)[0]
            maker.stop()
            print(f"{total / 1e6:.0f} MB of tensors, the largest {largest / 1e6:.0f} MB; MB above what a rank held:")
            for rank, found in enumerate(pool(given.tp, measure, f"{folder}/in", f"{folder}/out")):
                print(f"rank {rank}: " + ", ".join(f"{name} {size / 1e6:.0f}" for name, size in found.items()))
        finally:
            maker.stop()
            pool.stop()


if __name__ == "__main__":
    main()
