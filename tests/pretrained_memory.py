"""Measure the memory and the bytes read of a model of transformers: `python -m tests.pretrained_memory`.

transformers saves a Llama with random bfloat16 weights, and for ep a Qwen3-MoE. Each layout reads it with
`from_pretrained(defer=True)` and `prepare`, writes it with `save_pretrained`, takes its tensors one by one from
`hf_tensors`, and writes it with `torch.distributed.checkpoint`. The peak is VmHWM of
/proc/self/status, less what the process held before, and less its shards: the bytes of its parameters and buffers. The
bytes read are counted twice: those of the tensors that the ranks copied, and `read_bytes` of /proc/self/io, which the
disk served after the files were dropped from the page cache.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.nn import functional as F

import mpcore as mp
from mpcore.interop.dcp import dcp_state_dict
from mpcore.interop.hugging_face import hf_tensors
from mpcore.sharding.local import local_tensor
from tests.pool import mesh, start_pool

LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "dp 4, ZeRO-3": ({"dp": 4}, 3), "tp 2 x dp 2, ZeRO-3": ({"tp": 2, "dp": 2}, 3),
    "pp 2 x dp 2, ZeRO-3": ({"pp": 2, "dp": 2}, 3), "tp 2 x dp 2, ZeRO-0": ({"tp": 2, "dp": 2}, 0),
    "ep 2 x edp 2, ZeRO-3": ({"ep": 2, "dp": 4}, 3), "ep 2 x edp 2, ZeRO-0": ({"ep": 2, "dp": 4}, 0),
}  # fmt: skip


def memory() -> tuple[int, int]:
    """Return the most memory that this process held since `forget_peak`, and what it holds now, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    peak, now = (1024 * int(lines[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    return peak, now


def forget_peak() -> int:
    """Begin to measure anew, and return what the process holds."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory()[1]


def read_from_disk() -> int:
    """Return the bytes that the disk has served to this process."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def build(layers: int, width: int, experts: bool) -> Any:
    """Build a Llama, or a Qwen3-MoE of 8 experts of the same size. Its largest tensor is the embedding."""
    sizes: dict[str, Any] = {
        "vocab_size": 32000, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 4, "tie_word_embeddings": False, "dtype": torch.bfloat16,
    }  # fmt: skip
    if not experts:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=4 * width))
    sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width // 2, "head_dim": width // 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def make(folder: str, layers: int, width: int, experts: bool) -> tuple[int, int]:
    """Write the folder. Return the bytes of its tensors, and of the largest."""
    transformers.logging.disable_progress_bar()
    torch.set_default_dtype(torch.bfloat16)
    model = build(layers, width, experts)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="500MB")
    sizes = [p.nbytes for p in model.parameters()]
    return sum(sizes), max(sizes)


def drop_cache(folder: str) -> None:
    """Write the files of a folder to the disk, and drop them from the page cache."""
    for path in Path(folder).glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: str, out: str, axes: dict[str, int], zero: int) -> dict[str, int]:
    """Return the peaks of one rank, in bytes above its shards, and the bytes that it read."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    transformers.logging.set_verbosity_error()
    layout, copied = mesh(**axes), []
    if layout.world.rank == 0:
        drop_cache(folder)
    torch.distributed.barrier()
    before, served = forget_peak(), read_from_disk()
    model = mp.from_pretrained(folder, layout, defer=True, check=False)
    read = model.read_values
    model.read_values = lambda *given: copied.append(read(*given)) or copied[-1]
    stages, blocks, schedule = mp.pipeline_stages(model, layout, micro_batches=2 * layout.pp.size)
    del model
    run = mp.prepare(
        stages, layout, blocks=blocks, schedule=schedule, micro_batches=2 * layout.pp.size, initialize=False,
        data=mp.Zero(zero), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda out, target: F.cross_entropy(out.logits.flatten(0, 1), target.flatten(), reduction="sum"),
    )  # fmt: skip
    shards = sum(local_tensor(x).nbytes for x in (*run.model.parameters(), *run.model.buffers()))
    loaded, served = memory()[0] - before - shards, read_from_disk() - served
    gc.collect()
    before = forget_peak()
    mp.save_pretrained(run.model, out, layout)
    found = {"shards": shards, "read": loaded, "written": memory()[0] - before, "copied": sum(copied), "disk": served}
    gc.collect()
    before = forget_peak()
    for _, tensor in hf_tensors(run.model, layout):
        del tensor  # else the loop holds it while the next one is made
    found["streamed"] = memory()[0] - before
    gc.collect()
    before = forget_peak()
    dcp.save(dcp_state_dict(run.model, layout), checkpoint_id=f"{out}, DCP")
    return found | {"DCP": memory()[0] - before}


def main() -> None:
    """Print one line for each rank of each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=15, help="of 121 MB each (default: 15, 2 GB in all)")
    parser.add_argument("--only", choices=LAYOUTS, help="measure this layout only")
    given = parser.parse_args()
    chosen = {name: how for name, how in LAYOUTS.items() if given.only in (None, name)}
    for experts in sorted({"ep" in axes for axes, _ in chosen.values()}):
        compare({name: how for name, how in chosen.items() if ("ep" in how[0]) == experts}, given.layers, experts)


def compare(layouts: dict[str, tuple[dict[str, int], int]], layers: int, experts: bool) -> None:
    """Write one model, and measure each layout on it."""
    with tempfile.TemporaryDirectory() as folder:
        maker = start_pool(1)
        try:
            total, largest = maker(1, make, f"{folder}/in", layers, 2048, experts)[0]
            maker(1, make, f"{folder}/small", 2, 256, experts)  # the first calls load code
        finally:
            maker.stop()
        print(f"{total / 1e6:.0f} MB of tensors, the largest {largest / 1e6:.0f} MB")
        for name, how in layouts.items():
            pool = start_pool(4)
            try:
                pool(4, measure, f"{folder}/small", f"{folder}/{name}, small", *how)
                found = pool(4, measure, f"{folder}/in", f"{folder}/{name}", *how)
            finally:
                pool.stop()
            for rank, each in enumerate(found):
                print(f"{name}, rank {rank}: " + ", ".join(f"{key} {size / 1e6:.0f}" for key, size in each.items()))
            copied, disk = (sum(each[key] for each in found) / total for key in ("copied", "disk"))
            print(f"{name}: the ranks copied {copied:.2f} times the checkpoint, the disk served {disk:.2f} times")


if __name__ == "__main__":
    main()
